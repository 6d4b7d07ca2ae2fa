//! One virtqueue as the front end describes it, message by message, and its resolution to memory.
//!
//! The description is kept in the front end's terms (size, user addresses) and resolved anew each
//! time the ring starts, so a change of the memory map can never leave an old address behind.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use ringferry_memory::{Area, GuestMemory};

use crate::message::{MAX_RING_SIZE, VringAddr};

/// A started ring, as handed to the [`Device`](crate::backend::Device): everything checked and
/// resolved. The descriptors are the device's own.
pub struct RingSetup {
    /// Entries: a power of two, at most 32768.
    pub size: u16,
    /// Descriptor table: 16 bytes per entry, 16-byte aligned.
    pub desc: Area,
    /// Available ring: 6 + 2 bytes per entry, 2-byte aligned.
    pub avail: Area,
    /// Used ring: 6 + 8 bytes per entry, 4-byte aligned.
    pub used: Area,
    /// Next available index to look at (16 bits in a split ring). The used index to continue with
    /// is in the used ring.
    pub base: u32,
    /// Readable when buffers were made available; `None`: poll the ring.
    pub kick: Option<OwnedFd>,
    /// To be written when buffers were used; `None`: the front end polls.
    pub call: Option<OwnedFd>,
    /// To be written when the ring is broken.
    pub err: Option<OwnedFd>,
    /// Whether the ring starts enabled; see [`Device::ring_enabled`](crate::backend::Device::ring_enabled).
    pub enabled: bool,
    /// The map buffers are translated with.
    pub memory: Arc<GuestMemory>,
    /// The virtio features agreed on.
    pub features: u64,
}

/// Why a ring cannot be as the front end wants it.
#[derive(Debug, thiserror::Error)]
pub enum RingError {
    /// VIRTIO 1.4, 2.7: "Queue Size value is always a power of 2", at most 32768.
    #[error("ring size {0} is not a power of two up to {MAX_RING_SIZE}")]
    Size(u32),
    /// VIRTIO 1.4, 2.7: alignment of the parts of a split ring.
    #[error("the {part} at {addr:#x} is not aligned to {align} bytes")]
    Alignment {
        /// Which part of the ring.
        part: &'static str,
        /// Its user address.
        addr: u64,
        /// What it must be a multiple of.
        align: usize,
    },
    /// A part is not inside one shared region.
    #[error("the {part} at {addr:#x} ({len} bytes) is not inside one shared memory region")]
    Outside {
        /// Which part of the ring.
        part: &'static str,
        /// Its user address.
        addr: u64,
        /// Its length in bytes.
        len: usize,
    },
    /// Where a split ring resumes has 16 bits.
    #[error("base {0:#x} has more than the 16 bits of a split ring")]
    Base(u32),
    /// Where a ring resumes can only be set while it is stopped.
    #[error("the base of a running ring cannot be set; stop it with GET_VRING_BASE first")]
    Running,
    /// No descriptor left for the device's copy of the ring's events.
    #[error("no file descriptor left for the ring's events ({0}); raise the limit (ulimit -n)")]
    Descriptors(io::Error),
}

/// What says where ring entries can be found.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Geometry {
    pub size: Option<u16>,
    pub addr: Option<VringAddr>,
}

/// The three parts of a split ring, resolved.
struct Parts {
    desc: Area,
    avail: Area,
    used: Area,
}

const DESC_ALIGN: usize = 16;
const AVAIL_ALIGN: usize = 2;
const USED_ALIGN: usize = 4;

/// Checks a ring size.
pub(crate) fn check_size(size: u32) -> Result<u16, RingError> {
    match u16::try_from(size) {
        Ok(entries) if entries.is_power_of_two() && size <= MAX_RING_SIZE => Ok(entries),
        _ => Err(RingError::Size(size)),
    }
}

/// Checks the alignment of a ring's user addresses.
pub(crate) fn check_addr(addr: &VringAddr) -> Result<(), RingError> {
    let parts = [
        ("descriptor table", addr.desc, DESC_ALIGN),
        ("available ring", addr.avail, AVAIL_ALIGN),
        ("used ring", addr.used, USED_ALIGN),
    ];
    for (part, addr, align) in parts {
        if !addr.is_multiple_of(align as u64) {
            return Err(RingError::Alignment { part, addr, align });
        }
    }
    Ok(())
}

impl Geometry {
    /// Whether `memory` holds the ring; a ring not yet described fully holds.
    pub fn check(&self, memory: &GuestMemory) -> Result<(), RingError> {
        self.resolve(memory).map(|_| ())
    }

    fn resolve(&self, memory: &GuestMemory) -> Result<Option<(u16, Parts)>, RingError> {
        let (Some(size), Some(addr)) = (self.size, self.addr) else { return Ok(None) };
        let entries = usize::from(size);
        let area = |part, addr, len, align| {
            let area = memory.user_area(addr, len).ok_or(RingError::Outside { part, addr, len })?;
            // The region may be mapped at another offset within its page than the front end's.
            if area.is_aligned(align) { Ok(area) } else { Err(RingError::Alignment { part, addr, align }) }
        };
        let parts = Parts {
            desc: area("descriptor table", addr.desc, 16 * entries, DESC_ALIGN)?,
            avail: area("available ring", addr.avail, 6 + 2 * entries, AVAIL_ALIGN)?,
            used: area("used ring", addr.used, 6 + 8 * entries, USED_ALIGN)?,
        };
        Ok(Some((size, parts)))
    }
}

/// What the front end said of the kick.
#[derive(Debug, Default)]
pub(crate) enum Kick {
    /// Nothing yet: the ring is stopped.
    #[default]
    Unset,
    /// No descriptor: the ring is to be polled.
    Poll,
    /// An event.
    Event(OwnedFd),
}

/// One virtqueue.
#[derive(Debug, Default)]
pub(crate) struct Vring {
    pub geometry: Geometry,
    pub base: u32,
    pub kick: Kick,
    pub call: Option<OwnedFd>,
    pub err: Option<OwnedFd>,
    pub enabled: bool,
    pub started: bool,
}

impl Vring {
    /// Everything the device needs to start, or `None` while the front end has not said it all.
    pub fn setup(&self, memory: &Arc<GuestMemory>, features: u64) -> Result<Option<RingSetup>, RingError> {
        let kick = match &self.kick {
            Kick::Unset => return Ok(None),
            Kick::Poll => None,
            Kick::Event(fd) => Some(fd),
        };
        let Some((size, Parts { desc, avail, used })) = self.geometry.resolve(memory)? else {
            return Ok(None);
        };
        Ok(Some(RingSetup {
            size,
            desc,
            avail,
            used,
            base: self.base,
            kick: duplicate(kick)?,
            call: duplicate(self.call.as_ref())?,
            err: duplicate(self.err.as_ref())?,
            enabled: self.enabled,
            memory: Arc::clone(memory),
            features,
        }))
    }
}

/// A copy of an event for the device: the session keeps its own, to start the ring again when the
/// memory map changes.
pub(crate) fn duplicate(fd: Option<&OwnedFd>) -> Result<Option<OwnedFd>, RingError> {
    fd.map(|fd| fd.as_fd().try_clone_to_owned()).transpose().map_err(RingError::Descriptors)
}

#[cfg(test)]
mod tests {
    use ringferry_memory::{Region, RegionSpec, SharedMem};

    use super::*;

    const USER: u64 = 0x7f00_0000_0000;

    fn memory(size: u64, mmap_offset: u64) -> Arc<GuestMemory> {
        let mem = SharedMem::new("vring", (size + mmap_offset) as usize).unwrap();
        let spec = RegionSpec { guest_addr: 0, size, user_addr: USER, mmap_offset };
        Arc::new(GuestMemory::new(vec![Region::map(mem.fd(), spec).unwrap()]).unwrap())
    }

    fn ring(size: u16, desc: u64, avail: u64, used: u64) -> Geometry {
        let [desc, avail, used] = [desc, avail, used].map(|offset| USER.wrapping_add(offset));
        let addr = VringAddr { desc, avail, used, ..VringAddr::default() };
        Geometry { size: Some(size), addr: Some(addr) }
    }

    #[test]
    fn virtio_2_7_ring_size_is_a_power_of_two_up_to_32768() {
        for size in [1, 2, 256, 32768] {
            assert_eq!(u32::from(check_size(size).unwrap()), size);
        }
        for size in [0, 3, 255, 32769, 65536, 65536 + 256, u32::MAX] {
            assert!(check_size(size).is_err(), "{size}");
        }
    }

    #[test]
    fn virtio_2_7_parts_are_aligned() {
        let good = VringAddr { desc: 16, avail: 2, used: 4, ..VringAddr::default() };
        assert!(check_addr(&good).is_ok());
        assert!(check_addr(&VringAddr { desc: 8, ..good }).is_err());
        assert!(check_addr(&VringAddr { avail: 1, ..good }).is_err());
        assert!(check_addr(&VringAddr { used: 2, ..good }).is_err());
    }

    #[test]
    fn parts_end_inside_their_region() {
        // 256 entries: 4096 bytes of descriptors, 518 available, 2054 used.
        let memory = memory(0x2000, 0);
        assert!(ring(256, 0, 4096, 6136).check(&memory).is_ok());
        assert!(ring(256, 0, 4096, 6140).check(&memory).is_err());
        assert!(ring(256, 0x1010, 0, 0).check(&memory).is_err());
        assert!(ring(256, 0, 0x2000 - 516, 0).check(&memory).is_err());
        assert!(ring(256, 0u64.wrapping_sub(USER), 0, 0).check(&memory).is_err());
        assert!(ring(256, u64::MAX.wrapping_sub(USER), 0, 0).check(&memory).is_err());
    }

    #[test]
    fn a_region_mapped_off_its_alignment_is_refused() {
        // The front end's address is aligned, ours would not be.
        let memory = memory(0x4000, 0x1001);
        assert!(matches!(ring(16, 0, 0x1000, 0x2000).check(&memory), Err(RingError::Alignment { .. })));
    }

    #[test]
    fn a_ring_starts_only_when_fully_described() {
        let memory = memory(0x4000, 0);
        let mut vring = Vring { geometry: ring(16, 0, 0x1000, 0x2000), ..Vring::default() };
        assert!(vring.setup(&memory, 0).unwrap().is_none());
        vring.kick = Kick::Poll;
        let setup = vring.setup(&memory, 5).unwrap().unwrap();
        assert_eq!((setup.size, setup.base, setup.features), (16, 0, 5));
        assert!(setup.kick.is_none());
        vring.geometry.size = None;
        assert!(vring.setup(&memory, 0).unwrap().is_none());
    }
}
