//! The three memory areas of a virtqueue (VIRTIO 1.4, 2.6): sizes, alignments and their checks.
//!
//! Whoever sets a queue up fills in a [`Parts`] with resolved memory, once, and moves it into
//! [`crate::Device::new`] or [`crate::Driver::new`], which check it. The meaning of the areas depends on the
//! layout.

use ringferry_memory::Words;

/// The largest queue of either layout (VIRTIO 1.4, 2.7 and 2.8).
pub const MAX_SIZE: u16 = 32768;

/// Size in bytes of a descriptor in either layout and in indirect tables.
pub(crate) const DESC: usize = 16;

/// The areas of a queue, with the names of VIRTIO 1.4, 2.6. `A` is resolved memory (see [`Words`]).
#[derive(Clone, Debug)]
pub struct Parts<A> {
    /// Queue size in descriptors, 1 to [`MAX_SIZE`]; a power of two for a split ring.
    pub size: u16,
    /// Descriptor area: the descriptor table (split) or the descriptor ring (packed).
    pub desc: A,
    /// Driver area: the available ring (split) or the driver event suppression structure (packed).
    pub driver: A,
    /// Device area: the used ring (split) or the device event suppression structure (packed).
    pub device: A,
}

/// Returns the required alignments of the descriptor, driver and device area in bytes (2.7, 2.8).
pub const fn part_aligns(packed: bool) -> [usize; 3] {
    if packed { [16, 4, 4] } else { [16, 2, 4] }
}

/// Returns the lengths in bytes of the descriptor, driver and device area of a queue of `size` entries. For
/// split rings the two event index words at the ends are included.
pub const fn part_bytes(size: u16, packed: bool) -> [usize; 3] {
    let entries = size as usize;
    if packed { [DESC * entries, 4, 4] } else { [DESC * entries, 6 + 2 * entries, 6 + 8 * entries] }
}

/// Checks that a queue may have `size` entries, and returns the size as a `u16`.
///
/// # Errors
/// [`LayoutError::Size`], if not.
pub fn check_size(size: u32, packed: bool) -> Result<u16, LayoutError> {
    match u16::try_from(size) {
        Ok(entries) if (1..=MAX_SIZE).contains(&entries) && (packed || entries.is_power_of_two()) => {
            Ok(entries)
        }
        _ => Err(LayoutError::Size(size, if packed { "packed" } else { "split" })),
    }
}

/// The reason for which memory areas cannot hold a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// The size is not between 1 and [`MAX_SIZE`] or, for a split ring, not a power of two.
    #[error(
        "{0} entries do not make a {1} queue: it takes 1 to {MAX_SIZE}, and in a split queue a power of two"
    )]
    Size(u32, &'static str),
    /// The named area is shorter than the queue size needs.
    #[error("the {0} is too short for the queue size")]
    Short(&'static str),
    /// The named area is not aligned; see [`part_aligns`].
    #[error("the {0} is not aligned")]
    Unaligned(&'static str),
    /// The position at which a packed ring is to be taken over lies outside the ring.
    #[error("the ring has no entry {0} to go on from")]
    Base(u16),
}

impl<A: Words> Parts<A> {
    /// Checks size, lengths and alignments for the layout.
    ///
    /// # Errors
    /// [`LayoutError`], naming the area at fault.
    pub(crate) fn check(&self, packed: bool) -> Result<(), LayoutError> {
        check_size(self.size.into(), packed)?;
        let names = ["descriptor area", "driver area", "device area"];
        let areas = [&self.desc, &self.driver, &self.device];
        let needs = part_bytes(self.size, packed).into_iter().zip(part_aligns(packed));
        for (((need, align), area), name) in needs.zip(areas).zip(names) {
            if area.len() < need {
                return Err(LayoutError::Short(name));
            }
            if !area.is_aligned(align) {
                return Err(LayoutError::Unaligned(name));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn virtio_2_7_and_2_8_sizes() {
        for (size, split, packed) in [
            (0, false, false),
            (1, true, true),
            (3, false, true),
            (256, true, true),
            (32767, false, true),
            (32768, true, true),
            (32769, false, false),
            (65536, false, false),
            (65536 + 256, false, false),
        ] {
            assert_eq!(check_size(size, false).is_ok(), split, "split {size}");
            assert_eq!(check_size(size, true).is_ok(), packed, "packed {size}");
        }
    }
}
