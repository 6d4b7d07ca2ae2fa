//! One virtqueue of a [`Session`](crate::backend::Session): its description, which the front end
//! sends message by message, and its resolution to memory.
//!
//! The session creates one [`Vring`] per virtqueue, handlers fill it in, and [`Vring::setup`] turns
//! it into a [`RingSetup`] each time the ring starts. The description is kept in the front end's
//! terms (size, user addresses) and resolved anew at every start, so a change of the memory map can
//! never leave an old address behind. Its meaning depends on the layout, which is known once
//! features are negotiated; a description that comes earlier is checked when the ring starts.

use std::io;
use std::sync::Arc;

use ringferry_memory::{Area, DirtyLog, GuestMemory, Words};
use ringferry_ring::parts::{LayoutError, Parts, check_size, part_aligns, part_bytes};
use ringferry_ring::{RingAddresses, RingFeatures, WriteLog};
use ringferry_sys::closer::Deferred;
use ringferry_sys::eventfd::{EventFd, EventId};

use crate::base::{check_position, decode, first_position};
use crate::inflight::{self, InflightTracking};
use crate::message::{F_RING_PACKED, VringAddr};

/// A started ring, as handed to the [`Device`](crate::backend::Device), checked and resolved. The
/// events are copies that the device owns.
#[derive(Debug)]
pub struct RingSetup {
    /// The ring's size and its three areas, of [`part_bytes`] and aligned to [`part_aligns`].
    pub parts: Parts<Area>,
    /// Position at which the ring's device half starts: the next available index of a split ring,
    /// whose used index is in the used ring; or a packed ring's index, below the size, with the
    /// wrap counter in bit 15.
    pub base: u16,
    /// A packed ring's part of the in-flight region, if there is one. It already holds `base`, and
    /// the device must log its position there; see [`crate::inflight`].
    pub inflight: Option<Area>,
    /// Event that becomes readable when buffers were made available; `None`: poll the ring.
    pub kick: Option<EventFd>,
    /// Event to be signalled when buffers were used; `None`: the driver polls.
    pub call: Option<EventFd>,
    /// Event to be signalled when the ring is found broken.
    pub err: Option<EventFd>,
    /// True if the ring starts enabled; see
    /// [`Device::ring_enabled`](crate::backend::Device::ring_enabled).
    pub enabled: bool,
    /// The memory map that translates the addresses of buffers.
    pub memory: Arc<GuestMemory>,
    /// The virtio features that were negotiated.
    pub features: u64,
    /// The dirty log in which writes to the ring and to its buffers are recorded, while the guest is migrated.
    pub log: Option<Arc<DirtyLog>>,
}

impl RingSetup {
    /// Returns true if the ring is packed.
    pub fn packed(&self) -> bool {
        self.features & F_RING_PACKED != 0
    }

    /// Returns true if the ring starts where a driver that resets its device begins. One that resumes elsewhere was in use before: by a guest that has
    /// arrived here, or whose front end has connected again.
    pub fn is_new(&self) -> bool {
        self.base == first_position(self.packed())
    }

    /// The device's half of the ring, which begins at [`base`](Self::base) and has the [dirty log](Self::log). Kicks start off.
    ///
    /// # Errors
    /// None for a setup as a session hands it over; see [`LayoutError`] for one that was changed.
    pub fn ring(&self) -> Result<ringferry_ring::Device<Area>, LayoutError> {
        let features = RingFeatures::from_bits(self.features);
        let mut ring =
            ringferry_ring::Device::new(self.parts.clone(), features, self.base, self.inflight.clone())?;
        ring.set_log(self.log.clone().map(|log| WriteLog::new(log, self.addresses())));
        Ok(ring)
    }

    /// Returns the guest addresses of what the device writes in the ring, for a [`WriteLog`].
    pub fn addresses(&self) -> RingAddresses {
        RingAddresses::of(&self.parts, self.packed())
    }

    /// Tells the front end of used buffers if the driver `wants` to be told, as publishing them says, and the front end
    /// gave an event for it.
    ///
    /// # Errors
    /// As for [`EventFd::signal`].
    pub fn signal_used(&self, wants: bool) -> io::Result<()> {
        match &self.call {
            Some(call) if wants => call.signal(),
            _ => Ok(()),
        }
    }
}

/// The reason why a ring's description is refused.
#[derive(Debug, thiserror::Error)]
pub enum RingError {
    /// A ring of this layout cannot have this size.
    #[error(transparent)]
    Size(#[from] LayoutError),
    /// A part of the ring is not aligned (VIRTIO 1.4, 2.7 and 2.8.10).
    #[error("the {part} at {addr:#x} is not aligned to {align} bytes")]
    Alignment {
        /// Name of the part in the words of VIRTIO.
        part: &'static str,
        /// User address of the part.
        addr: u64,
        /// Alignment that the part needs, in bytes.
        align: usize,
    },
    /// A part of the ring is not inside one shared region.
    #[error("the {part} at {addr:#x} ({len} bytes) is not inside one shared memory region")]
    Outside {
        /// Name of the part in the words of VIRTIO.
        part: &'static str,
        /// User address of the part.
        addr: u64,
        /// Length of the part in bytes.
        len: usize,
    },
    /// The base of a split ring has more than 16 bits.
    #[error("base {0:#x} has more than the 16 bits of a split ring")]
    Base(u32),
    /// The base of a packed ring lies outside the ring.
    #[error("a packed ring of {size} entries cannot resume at entry {index}")]
    Position {
        /// Index at which the ring should resume.
        index: u16,
        /// Size of the ring in entries.
        size: u16,
    },
    /// The base of a running ring, or the size of a running packed ring, cannot be set.
    #[error("the {0} of a running ring cannot be set; stop it with GET_VRING_BASE first")]
    Running(&'static str),
    /// The process has no file descriptor left for the device's copies of the ring's events.
    #[error("no file descriptor left for the ring's events ({0}); raise the limit (ulimit -n)")]
    Descriptors(io::Error),
}

/// Size and addresses of a ring, as far as the front end has sent them.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Geometry {
    pub size: Option<u16>,
    pub addr: Option<VringAddr>,
}

/// Names the parts of a ring in the words of VIRTIO, for error messages.
fn part_names(packed: bool) -> [&'static str; 3] {
    if packed {
        ["descriptor ring", "driver event suppression area", "device event suppression area"]
    } else {
        ["descriptor table", "available ring", "used ring"]
    }
}

/// Checks a ring's size; `packed` is `None` while the layout is unknown.
pub(crate) fn check_num(size: u32, packed: Option<bool>) -> Result<u16, RingError> {
    Ok(check_size(size, packed.unwrap_or(true))?)
}

/// Checks the alignment of a ring's user addresses; `packed` is `None` while the layout is unknown,
/// and then only what both layouts need is checked.
pub(crate) fn check_addr(addr: &VringAddr, packed: Option<bool>) -> Result<(), RingError> {
    let packed = packed.unwrap_or(false);
    let addrs = [addr.desc, addr.avail, addr.used];
    for ((part, addr), align) in part_names(packed).into_iter().zip(addrs).zip(part_aligns(packed)) {
        if !addr.is_multiple_of(align as u64) {
            return Err(RingError::Alignment { part, addr, align });
        }
    }
    Ok(())
}

impl Geometry {
    /// Checks that `memory` holds the ring; an incomplete description passes.
    pub fn check(&self, memory: &GuestMemory, packed: bool) -> Result<(), RingError> {
        self.resolve(memory, packed).map(|_| ())
    }

    pub fn resolve(&self, memory: &GuestMemory, packed: bool) -> Result<Option<Parts<Area>>, RingError> {
        let (Some(size), Some(addr)) = (self.size, self.addr) else { return Ok(None) };
        check_size(size.into(), packed)?;
        check_addr(&addr, Some(packed))?;
        let (names, lens, aligns) = (part_names(packed), part_bytes(size, packed), part_aligns(packed));
        let area = |at: usize, addr| {
            let (part, len, align) = (names[at], lens[at], aligns[at]);
            let area = memory.user_area(addr, len).ok_or(RingError::Outside { part, addr, len })?;
            // The region may be mapped at another offset within its page than in the front end.
            if area.is_aligned(align) { Ok(area) } else { Err(RingError::Alignment { part, addr, align }) }
        };
        Ok(Some(Parts {
            size,
            desc: area(0, addr.desc)?,
            driver: area(1, addr.avail)?,
            device: area(2, addr.used)?,
        }))
    }
}

/// The kick event as the front end set it.
#[derive(Debug, Default)]
pub(crate) enum Kick {
    /// Not set: the ring is stopped.
    #[default]
    Unset,
    /// Set without a descriptor: the device polls the ring.
    Poll,
    /// Set to an event that the device waits for.
    Event(Deferred<RingEvent>),
}

/// An event that a front end has passed.
#[derive(Debug)]
pub(crate) struct RingEvent {
    pub event: EventFd,
    /// The mark of its open file.
    pub id: EventId,
}

/// One virtqueue as described by the front end.
#[derive(Debug, Default)]
pub(crate) struct Vring {
    pub geometry: Geometry,
    /// Base at which the ring starts, encoded as in `SET_VRING_BASE`; `None`: at the beginning.
    pub base: Option<u32>,
    /// True if the in-flight region came after the ring last ran, so that its position takes
    /// precedence over `base`.
    pub recover: bool,
    pub kick: Kick,
    pub call: Option<Deferred<RingEvent>>,
    pub err: Option<Deferred<RingEvent>>,
    pub enabled: bool,
    pub started: bool,
}

impl Vring {
    /// Resolves everything that the device needs to start ring `index`, and initialises the ring's
    /// part of the in-flight region. Returns `None` while the description is incomplete.
    pub fn setup(
        &self,
        index: u16,
        memory: &Arc<GuestMemory>,
        features: u64,
        tracking: Option<&InflightTracking>,
        log: Option<Arc<DirtyLog>>,
    ) -> Result<Option<RingSetup>, RingError> {
        let packed = features & F_RING_PACKED != 0;
        let kick = match &self.kick {
            Kick::Unset => return Ok(None),
            Kick::Poll => None,
            Kick::Event(event) => Some(&**event),
        };
        let Some(parts) = self.geometry.resolve(memory, packed)? else { return Ok(None) };
        let size = parts.size;
        let events = [duplicate(kick)?, duplicate(self.call.as_deref())?, duplicate(self.err.as_deref())?];
        let [kick, call, err] = events;
        let inflight =
            if packed { tracking.and_then(|region| region.packed_part(index, size)) } else { None };
        let recovered = match &inflight {
            Some(part) if self.recover => inflight::recover(part, size, &parts.desc)?,
            _ => None,
        };
        let base = match (recovered, self.base) {
            (Some(position), _) => position,
            (None, Some(base)) => decode(base, packed)?,
            (None, None) => first_position(packed),
        };
        check_position(base, size, packed)?;
        if let Some(part) = &inflight {
            inflight::initialise(part, size, base);
        }
        Ok(Some(RingSetup {
            parts,
            base,
            inflight,
            kick,
            call,
            err,
            enabled: self.enabled,
            memory: Arc::clone(memory),
            features,
            log,
        }))
    }
}

/// Duplicates an event for the device. The session keeps its own, to start the ring again when the
/// memory map changes.
pub(crate) fn duplicate(event: Option<&RingEvent>) -> Result<Option<EventFd>, RingError> {
    event.map(|event| event.event.try_clone()).transpose().map_err(RingError::Descriptors)
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
    fn a_size_is_judged_by_the_layout_once_that_is_known() {
        for size in [1, 2, 256, 32768] {
            assert!(
                [None, Some(false), Some(true)].into_iter().all(|layout| check_num(size, layout).is_ok())
            );
        }
        for size in [3, 255, 32767] {
            assert!([None, Some(true)].into_iter().all(|layout| check_num(size, layout).is_ok()));
            assert!(check_num(size, Some(false)).is_err());
        }
        for size in [0, 32769, 65535, 65536 + 256, u32::MAX] {
            assert!(
                [None, Some(false), Some(true)].into_iter().all(|layout| check_num(size, layout).is_err())
            );
        }
    }

    #[test]
    fn virtio_2_7_and_2_8_10_parts_are_aligned() {
        let good = VringAddr { desc: 16, avail: 4, used: 4, ..VringAddr::default() };
        for layout in [Some(false), Some(true), None] {
            assert!(check_addr(&good, layout).is_ok());
            assert!(check_addr(&VringAddr { desc: 8, ..good }, layout).is_err());
            assert!(check_addr(&VringAddr { avail: 1, ..good }, layout).is_err());
            assert!(check_addr(&VringAddr { used: 2, ..good }, layout).is_err());
            let halves = VringAddr { avail: 2, ..good };
            assert_eq!(check_addr(&halves, layout).is_ok(), layout != Some(true));
        }
    }

    #[test]
    fn parts_end_inside_their_region() {
        // 256 entries: 4096 bytes of descriptors, 518 available, 2054 used.
        let memory = memory(0x2000, 0);
        let check = |desc, avail, used| ring(256, desc, avail, used).check(&memory, false);
        assert!(check(0, 4096, 6136).is_ok());
        assert!(check(0, 4096, 6140).is_err());
        assert!(check(0x1010, 0, 0).is_err());
        assert!(check(0, 0x2000 - 516, 0).is_err());
        assert!(check(0u64.wrapping_sub(USER), 0, 0).is_err());
        assert!(check((u64::MAX - 15).wrapping_sub(USER), 0, 0).is_err());
    }

    #[test]
    fn packed_parts_end_inside_their_region() {
        // 300 entries: 4800 bytes of descriptors, 4 and 4 of events.
        let memory = memory(0x2000, 0);
        let check = |desc, driver, device| ring(300, desc, driver, device).check(&memory, true);
        assert!(check(0x2000 - 4800, 0, 4).is_ok());
        assert!(check(0, 0x2000 - 4, 0x2000 - 8).is_ok());
        assert!(check(0x2000 - 4784, 0, 4).is_err());
        assert!(check(0, 0x2000, 4).is_err());
        assert!(check(0, 4, 0x2000).is_err());
        assert!(ring(300, 0, 0x1000, 0x1800).check(&memory, false).is_err(), "no size of a split ring");
    }

    #[test]
    fn events_do_not_run_across_the_end_of_their_region() {
        // A region whose size is no multiple of 4: the last word is cut.
        let memory = memory(0x2002, 0);
        assert!(ring(4, 0, 0x1ffc, 0x1000).check(&memory, true).is_ok());
        for (driver, device) in [(0x2000, 0x1000), (0x1000, 0x2000)] {
            assert!(matches!(
                ring(4, 0, driver, device).check(&memory, true),
                Err(RingError::Outside { len: 4, .. })
            ));
        }
    }

    #[test]
    fn a_region_mapped_off_its_alignment_is_refused() {
        // The front end's address is aligned, ours would not be.
        for (packed, offset) in [(false, 0x1001), (true, 0x1002)] {
            let memory = memory(0x4000, offset);
            let outcome = ring(16, 0, 0x1000, 0x2000).check(&memory, packed);
            assert!(matches!(outcome, Err(RingError::Alignment { .. })), "{outcome:?}");
        }
    }

    #[test]
    fn a_ring_starts_only_when_fully_described() {
        let memory = memory(0x4000, 0);
        let mut vring = Vring { geometry: ring(16, 0, 0x1000, 0x2000), ..Vring::default() };
        assert!(vring.setup(0, &memory, 0, None, None).unwrap().is_none());
        vring.kick = Kick::Poll;
        let setup = vring.setup(0, &memory, 5, None, None).unwrap().unwrap();
        assert_eq!((setup.parts.size, setup.base, setup.features), (16, 0, 5));
        assert!(setup.kick.is_none() && setup.inflight.is_none());
        vring.geometry.size = None;
        assert!(vring.setup(0, &memory, 0, None, None).unwrap().is_none());
    }

    #[test]
    fn a_packed_ring_resumes_inside_itself() {
        let memory = memory(0x4000, 0);
        let mut vring = Vring { geometry: ring(5, 0, 0x1000, 0x1004), kick: Kick::Poll, ..Vring::default() };
        let start = |vring: &Vring| vring.setup(0, &memory, F_RING_PACKED, None, None);
        assert_eq!(start(&vring).unwrap().unwrap().base, 0x8000, "wrap counters begin at 1");
        for (base, position) in [(0x8000, 0x8000), (0x8004_8004, 0x8004), (0x4, 4), (0x8003_0004, 0x8003)] {
            vring.base = Some(base);
            assert_eq!(start(&vring).unwrap().unwrap().base, position);
        }
        for base in [5, 0x8005, 0x8005_8004, 0x7fff, 0xffff_ffff] {
            vring.base = Some(base);
            assert!(matches!(start(&vring), Err(RingError::Position { size: 5, .. })), "{base:#x}");
        }
    }
}
