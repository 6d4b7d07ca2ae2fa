//! The in-flight region ("Inflight I/O tracking"): shared memory that outlives a back end and tells
//! the next one where rings resume. For packed rings it holds a write-ahead (redo) log of the burst
//! that is being published.
//!
//! The back end creates the region on request, the front end keeps it ([`InflightRegion`]) and
//! gives it to each back end that it connects to, which maps it. Each ring has a part of it:
//!
//! ```text
//! split:  features 8, version 2, desc_num 2, last_batch_head 2, used_idx 2, then 16 bytes per entry
//! packed: features 8, version 2, desc_num 2, free_head 2, old_free_head 2,
//!         used_idx 2, old_used_idx 2, used_wrap_counter 1, old_used_wrap_counter 1, padding 10,
//!         then 32 bytes per entry
//! ```
//!
//! Our device halves complete in ring order, as network devices do, so the chains in flight are
//! those between the used and the available position, in the ring itself ("If virtqueue is
//! processed in order, we can easily achieve that"). No entry of the region is ever marked in
//! flight, and a split ring uses nothing of it: its used index is in its own memory. A packed
//! ring's position is stored only here. Its device half publishes a burst in these steps, and may
//! be killed after any store:
//!
//! 1. It logs in the region what it will write to the ring: in entry `k` the slot ([`SLOT`]) and
//!    the descriptor's second word ([`WORD`]), entry 0 being the first of the burst. A burst of one
//!    descriptor needs no log.
//! 2. It stores the new position as `used`, the present one as `old_used`, and the number of logged
//!    entries, as one word at [`POSITION`].
//! 3. It writes the descriptors to the ring, the first one last: the driver sees none before that.
//! 4. It stores the new position as both.
//!
//! The next user (`recover`) reads the descriptor at the old position. If it is still available,
//! the driver has seen nothing of the burst: without a log the ring is as it was before the burst;
//! with a log it may have been written in part, and the log is replayed. If it is not available any
//! more, the burst is complete.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use ringferry_memory::{Area, GuestMemory, MapBudget, Region, RegionSpec, SharedMem, Words};
use ringferry_ring::Parts;
use ringferry_ring::inflight::{ENTRY, POSITION, SLOT, WORD};

use crate::base::{INDEX, check_position, encode, parts, position};
use crate::message::InflightDescription;
use crate::vring::RingError;

/// Offset of a part's feature flags, all zero: 64 bits.
const FEATURES: usize = 0;
/// Offset of the version: 16 bits, 0 in a region that was never used.
const VERSION: usize = 8;
/// Offset of the number of entries: 16 bits.
const DESC_NUM: usize = 10;
/// Offset of the first free entry, now and before the burst: 16 bits each.
const FREE_HEADS: usize = 12;
/// Bytes before the entries of a split ring's part.
const SPLIT_HEADER: usize = 16;
/// Bytes of an entry of a split ring's part.
const SPLIT_ENTRY: usize = 16;
/// Offset of the next free entry within an entry of a packed ring's part: 16 bits.
const NEXT: usize = 2;

/// Most entries of all queues together, twice those of 64 queues of 1024 entries, the longest that QEMU makes: each takes 32 bytes that the back end writes when a ring
/// starts, on the thread that serves everybody.
pub(crate) const MAX_ENTRIES: u32 = 1 << 17;

/// The only version that is defined.
const VERSION_1: u16 = 1;
/// Alignment of parts, as in QEMU's and DPDK's regions.
const PART_ALIGN: u64 = 64;

/// Offset of length, identifier and flags in a packed ring's descriptor (VIRTIO 1.4, 2.8.13).
const DESC_WORD: usize = 8;
/// Offset of the flags in a packed ring's descriptor.
const DESC_FLAGS: usize = 14;
const DESC_BYTES: usize = 16;
/// Offset of the index in a split ring's used ring (VIRTIO 1.4, 2.7.8).
const SPLIT_USED_IDX: usize = 2;
const F_AVAIL: u16 = 1 << 7;
const F_USED: u16 = 1 << 15;

/// Returns the size of one ring's part in bytes.
fn part_len(queue_size: u16, packed: bool) -> usize {
    let entries = usize::from(queue_size);
    if packed { ENTRY + ENTRY * entries } else { SPLIT_HEADER + SPLIT_ENTRY * entries }
}

/// Returns the distance from one ring's part to the next in bytes.
fn stride(queue_size: u16, packed: bool) -> u64 {
    (part_len(queue_size, packed) as u64).next_multiple_of(PART_ALIGN)
}

/// Returns the size of a region in bytes: at most 65535 parts of about 1 MiB.
fn region_len(num_queues: u16, queue_size: u16, packed: bool) -> u64 {
    u64::from(num_queues) * stride(queue_size, packed)
}

/// Creates a region for a front end that asks for one. Its pages are zero ("Zero value indicates an
/// uninitialized buffer") and take memory only once a ring runs on them.
pub(crate) fn create(
    num_queues: u16,
    queue_size: u16,
    packed: bool,
) -> io::Result<(InflightDescription, SharedMem)> {
    let mmap_size = region_len(num_queues, queue_size, packed);
    let mem = SharedMem::new("ringferry-inflight", mmap_size as usize)?;
    Ok((InflightDescription { mmap_size, mmap_offset: 0, num_queues, queue_size, padding: 0 }, mem))
}

/// The region of a session, mapped by the back end. Truncating its file does not crash the process.
#[derive(Debug)]
pub(crate) struct InflightTracking {
    memory: GuestMemory,
    num_queues: u16,
    queue_size: u16,
}

impl InflightTracking {
    /// Maps the region that `description` says is in `fd`. Its sizes must have been checked against
    /// zero and the device's limits; here they are checked against each other and against the file.
    ///
    /// # Errors
    /// Any [`InflightError`]; nothing stays mapped.
    pub fn map(
        fd: BorrowedFd<'_>,
        description: &InflightDescription,
        packed: bool,
        budget: &Arc<MapBudget>,
    ) -> Result<Self, InflightError> {
        let InflightDescription { mmap_size, mmap_offset, num_queues, queue_size, .. } = *description;
        let needed = region_len(num_queues, queue_size, packed);
        if mmap_size < needed {
            return Err(InflightError::TooSmall { num_queues, queue_size, needed, mmap_size });
        }
        // No more is mapped than rings can use, whatever size the front end claims.
        let size = mmap_size.min(region_len(num_queues, queue_size, true));
        let spec = RegionSpec { guest_addr: 0, size, user_addr: 0, mmap_offset };
        let memory = GuestMemory::new(vec![Region::map_within(fd, spec, budget)?])?;
        Ok(Self { memory, num_queues, queue_size })
    }

    /// Returns the part of packed ring `index`; `None` when the region has no part of that index
    /// and size.
    pub fn packed_part(&self, index: u16, size: u16) -> Option<Area> {
        if index >= self.num_queues || size > self.queue_size {
            return None;
        }
        let at = u64::from(index) * stride(self.queue_size, true);
        self.memory.area(at, part_len(size, true)).filter(|part| part.is_aligned(align_of::<u64>()))
    }
}

/// The reason why a region cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum InflightError {
    /// The region is too small for the queues that it is said to be for.
    #[error(
        "an in-flight region of {mmap_size} bytes, but {num_queues} queues of {queue_size} entries need {needed}"
    )]
    TooSmall {
        /// Number of queues in the description.
        num_queues: u16,
        /// Number of entries of each queue.
        queue_size: u16,
        /// Size in bytes that they need.
        needed: u64,
        /// Size in bytes in the description.
        mmap_size: u64,
    },
    /// The region's file cannot be mapped.
    #[error(transparent)]
    Map(#[from] ringferry_memory::MapError),
    /// Cannot happen with one region; it exists so that nothing is unwrapped.
    #[error(transparent)]
    Memory(#[from] ringferry_memory::MemoryError),
}

/// Returns the position at which the last user of a packed ring's part stopped, and first replays
/// the log of a burst that it was publishing. `None` when the part was never used, or was used for
/// a ring of another size. `desc` is the descriptor ring, to which the log is replayed.
///
/// # Errors
/// [`RingError::Position`] when the part holds an index outside the ring.
pub(crate) fn recover(part: &Area, size: u16, desc: &Area) -> Result<Option<u16>, RingError> {
    if part.load16(VERSION) != VERSION_1 || part.load16(DESC_NUM) != size {
        return Ok(None);
    }
    let word = part.load64(POSITION);
    let new = position(word as u16, word >> 32 & 1 != 0);
    let old = position((word >> 16) as u16, word >> 40 & 1 != 0);
    let logged = (word >> 48) as u16;
    for position in [old, new] {
        check_position(position, size, true)?;
    }
    let (index, wrap) = parts(old);
    let flags = desc.load16(DESC_BYTES * usize::from(index) + DESC_FLAGS);
    let is_available = (flags & F_AVAIL != 0) == wrap && (flags & F_USED != 0) != wrap;
    if old == new || !is_available {
        return Ok(Some(new));
    }
    if logged < 2 {
        return Ok(Some(old));
    }
    replay(part, size, desc, logged)?;
    Ok(Some(new))
}

/// Writes the logged descriptors of a burst to the ring, the first one last.
fn replay(part: &Area, size: u16, desc: &Area, logged: u16) -> Result<(), RingError> {
    if logged > size {
        return Err(RingError::Position { index: logged, size });
    }
    for entry in (0..logged).rev() {
        let entry = ENTRY + ENTRY * usize::from(entry);
        let slot = part.load16(entry + SLOT);
        check_position(slot, size, true)?;
        desc.store64_release(DESC_BYTES * usize::from(slot & INDEX) + DESC_WORD, part.load64(entry + WORD));
    }
    Ok(())
}

/// Initialises a packed ring's part for a device that starts at position `at`.
pub(crate) fn initialise(part: &Area, size: u16, at: u16) {
    let (index, wrap) = parts(at);
    let (index, wrap) = (u64::from(index), u64::from(wrap));
    let word = index | index << 16 | wrap << 32 | wrap << 40;
    if part.load16(VERSION) == VERSION_1 && part.load16(DESC_NUM) == size {
        part.store64(POSITION, word);
        return;
    }
    part.store16(VERSION, 0);
    part.store64(FEATURES, 0);
    part.store16(DESC_NUM, size);
    // All entries are marked free, for a later back end that uses them.
    part.store16(FREE_HEADS, 0);
    part.store16(FREE_HEADS + 2, 0);
    for entry in 0..size {
        part.store16(ENTRY + ENTRY * usize::from(entry) + NEXT, entry + 1);
    }
    part.store64(POSITION, word);
    part.store16_release(VERSION, VERSION_1);
}

/// The region as the front end keeps it, from one back end to the next. It is valid for the rings
/// that it was made for: when the driver resets the device, drop it and get a new one.
#[derive(Debug)]
pub struct InflightRegion {
    pub(crate) description: InflightDescription,
    pub(crate) fd: OwnedFd,
}

impl InflightRegion {
    /// Returns the descriptor of the file that holds the region.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    fn resume(&self, index: u16, ring: &Parts<Area>) -> Option<u32> {
        let tracking =
            InflightTracking::map(self.fd(), &self.description, true, &MapBudget::unlimited()).ok()?;
        tracking.resume(index, ring)
    }
}

impl InflightTracking {
    fn resume(&self, index: u16, ring: &Parts<Area>) -> Option<u32> {
        let part = self.packed_part(index, ring.size)?;
        let position = recover(&part, ring.size, &ring.desc).ok()??;
        Some(encode(position, true))
    }
}

/// Does the same as [`resume_base`] with a region that is mapped.
pub(crate) fn resume_within(
    index: u16,
    ring: &Parts<Area>,
    packed: bool,
    region: Option<&InflightTracking>,
) -> Option<u32> {
    if packed { region?.resume(index, ring) } else { Some(ring.device.load16(SPLIT_USED_IDX).into()) }
}

/// Returns the base at which a front end resumes ring `index` after its back end died: the used
/// index of a split ring, or the position that `region` holds for a packed one, after the log of an
/// unfinished burst is replayed. `None` when the ring was not tracked or its part is invalid: then
/// the ring must be set up anew.
pub fn resume_base(
    index: u16,
    ring: &Parts<Area>,
    packed: bool,
    region: Option<&InflightRegion>,
) -> Option<u32> {
    if packed { region?.resume(index, ring) } else { Some(ring.device.load16(SPLIT_USED_IDX).into()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn area(len: usize) -> Area {
        let mem = SharedMem::new("area", len).unwrap();
        GuestMemory::new(vec![mem.map_at(0).unwrap()]).unwrap().area(0, len).unwrap()
    }

    #[test]
    fn parts_have_the_sizes_of_the_specification() {
        // sizeof(QueueRegionSplit) + n * sizeof(DescStateSplit), and the same of the packed ones.
        assert_eq!((part_len(256, false), part_len(256, true)), (16 + 16 * 256, 32 + 32 * 256));
        assert_eq!((stride(256, false), stride(256, true)), (4160, 8256));
        assert_eq!((stride(1, false), stride(1, true)), (64, 64));
        assert_eq!(region_len(u16::MAX, 32768, true), 65535 * (32 * 32768 + 64));
    }

    #[test]
    fn a_part_nobody_used_says_nothing_and_begins_where_it_is_told() {
        let (part, desc) = (area(part_len(5, true)), area(5 * DESC_BYTES));
        assert_eq!(recover(&part, 5, &desc).unwrap(), None);
        initialise(&part, 5, position(3, true));
        let header: Vec<u16> = (0..12).map(|word| part.load16(2 * word)).collect();
        // features, version, desc_num, free heads, used and old index, both wrap counters, padding
        assert_eq!(header, [0, 0, 0, 0, 1, 5, 0, 0, 3, 3, 0x0101, 0]);
        let free: Vec<u16> = (0..5).map(|entry| part.load16(32 + 32 * entry + 2)).collect();
        assert_eq!(free, [1, 2, 3, 4, 5]);
        assert_eq!(recover(&part, 5, &desc).unwrap(), Some(position(3, true)));
        assert_eq!(recover(&part, 4, &desc).unwrap(), None, "another size");
        initialise(&part, 5, position(4, false));
        assert_eq!(recover(&part, 5, &desc).unwrap(), Some(position(4, false)));
    }

    #[test]
    fn a_burst_counts_when_the_descriptor_at_the_old_position_was_marked_used() {
        let (part, desc) = (area(part_len(5, true)), area(5 * DESC_BYTES));
        for wrap in [false, true] {
            initialise(&part, 5, position(3, wrap));
            // A burst of four is about to be published, across the ring's end.
            let (old, new) = (u64::from(wrap), u64::from(!wrap));
            part.store64(POSITION, 2 | 3 << 16 | new << 32 | old << 40);
            let (available, used) = if wrap { (F_AVAIL, F_AVAIL | F_USED) } else { (F_USED, 0) };
            desc.store16(3 * DESC_BYTES + DESC_FLAGS, available | 1);
            assert_eq!(recover(&part, 5, &desc).unwrap(), Some(position(3, wrap)), "not published");
            desc.store16(3 * DESC_BYTES + DESC_FLAGS, used | 2);
            assert_eq!(recover(&part, 5, &desc).unwrap(), Some(position(2, !wrap)), "published");
        }
    }

    /// A ring of five with four chains of one descriptor that are completed as one burst, from entry 3
    /// across the end, by a device that is killed after `steps` stores.
    fn killed_after(steps: usize, wrap: bool) -> (Area, Area) {
        let (part, desc) = (area(part_len(5, true)), area(5 * DESC_BYTES));
        let flags = |wrap| if wrap { F_AVAIL } else { F_USED };
        let used = |wrap| if wrap { F_AVAIL | F_USED } else { 0 };
        let chains: [(u16, bool); 4] = [(3, wrap), (4, wrap), (0, !wrap), (1, !wrap)];
        for (slot, wrap) in chains {
            desc.store16(DESC_BYTES * usize::from(slot) + DESC_FLAGS, flags(wrap));
        }
        initialise(&part, 5, position(3, wrap));
        let (old, new) = (u64::from(wrap), u64::from(!wrap));
        let word = |(slot, wrap): (u16, bool)| {
            (100 + u64::from(slot)) | u64::from(slot) << 32 | u64::from(used(wrap)) << 48
        };
        let entry = |k: usize| ENTRY + ENTRY * k;
        let mut stores: Vec<Box<dyn Fn()>> = Vec::new();
        let (part, desc) = (&part, &desc);
        for (k, chain) in chains.into_iter().enumerate() {
            stores.push(Box::new(move || part.store16(entry(k) + SLOT, chain.0)));
            stores.push(Box::new(move || part.store64(entry(k) + WORD, word(chain))));
        }
        stores.push(Box::new(move || part.store64(POSITION, 2 | 3 << 16 | new << 32 | old << 40 | 4 << 48)));
        for chain in chains.into_iter().rev() {
            let at = DESC_BYTES * usize::from(chain.0) + DESC_WORD;
            stores.push(Box::new(move || desc.store64(at, word(chain))));
        }
        stores.push(Box::new(move || part.store64(POSITION, 2 | 2 << 16 | new << 32 | new << 40)));
        assert_eq!(stores.len(), STORES);
        stores.iter().take(steps).for_each(|store| store());
        drop(stores);
        (part.clone(), desc.clone())
    }

    const STORES: usize = 8 + 1 + 4 + 1;

    #[test]
    fn wherever_a_device_is_killed_a_burst_is_seen_whole_or_not_at_all() {
        for (wrap, steps) in [false, true].into_iter().flat_map(|wrap| (0..=STORES).map(move |at| (wrap, at)))
        {
            let (part, desc) = killed_after(steps, wrap);
            let at = recover(&part, 5, &desc).unwrap().unwrap();
            let flags = |slot: usize| desc.load16(DESC_BYTES * slot + DESC_FLAGS);
            let seen = [(3, wrap), (4, wrap), (0, !wrap), (1, !wrap)].map(|(slot, wrap)| {
                let used = (flags(slot) & F_AVAIL != 0) == wrap && (flags(slot) & F_USED != 0) == wrap;
                assert_eq!(used, desc.load32(DESC_BYTES * slot + DESC_WORD) == 100 + slot as u32);
                used
            });
            let published = steps > 8;
            assert_eq!(seen, [published; 4], "killed after {steps}");
            let expected = if published { position(2, !wrap) } else { position(3, wrap) };
            assert_eq!(at, expected, "killed after {steps}");
            // Finding out twice makes no difference: the front end does, and then the back end.
            assert_eq!(recover(&part, 5, &desc).unwrap(), Some(at));
        }
    }

    #[test]
    fn a_log_is_not_replayed_once_the_driver_goes_on() {
        // Killed before the last store; the driver has taken the burst and used the slots anew.
        let (part, desc) = killed_after(STORES - 1, true);
        for slot in [3, 4] {
            desc.store64(DESC_BYTES * slot + DESC_WORD, 7 | u64::from(F_USED) << 48);
        }
        assert_eq!(recover(&part, 5, &desc).unwrap(), Some(position(2, false)));
        assert_eq!(desc.load32(DESC_BYTES * 3 + DESC_WORD), 7);
    }

    #[test]
    fn a_log_with_impossible_slots_is_refused() {
        for (k, slot, logged) in [(0, 5, 4u64), (3, 0x7fff, 4), (0, 3, 6), (0, 3, 0xffff)] {
            let (part, desc) = killed_after(9, true);
            part.store16(ENTRY + ENTRY * k + SLOT, slot);
            part.store64(POSITION, part.load64(POSITION) & ((1 << 48) - 1) | logged << 48);
            assert!(matches!(recover(&part, 5, &desc), Err(RingError::Position { .. })), "{slot} {logged}");
        }
    }

    #[test]
    fn positions_outside_the_ring_are_refused() {
        let (part, desc) = (area(part_len(5, true)), area(5 * DESC_BYTES));
        initialise(&part, 5, 0);
        for word in [5, 5 << 16, 0x7fff, 0x7fff << 16, u64::MAX] {
            part.store64(POSITION, word);
            assert!(
                matches!(recover(&part, 5, &desc), Err(RingError::Position { size: 5, .. })),
                "{word:#x}"
            );
        }
    }
}
