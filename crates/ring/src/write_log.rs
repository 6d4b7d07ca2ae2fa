//! What the device half of a ring records in a [`DirtyLog`] while the driver's memory is migrated: its own writes to the ring.
//!
//! Whoever serves the ring makes a [`WriteLog`] and gives it to [`Device::set_log`](crate::Device::set_log) before or between two
//! bursts, and takes it away in the same way. While the half has one, [`publish`](crate::Device::publish) marks the pages of the
//! used elements or descriptors of the burst and of the used index, and turning kicks on or off marks those of the event words,
//! each after its stores. Buffers are written by the device type above the ring, which marks them itself, in
//! [`Device::log`](crate::Device::log).
//!
//! The addresses are those of the ring's own memory. vhost-user's `log_guest_addr` is not used: for a packed ring QEMU has it name
//! the device event suppression structure, which is not where used descriptors are written.

use std::sync::Arc;

use ringferry_memory::{Area, DirtyLog};

use crate::parts::{DESC, Parts};
use crate::split;

/// Guest addresses of what the device half writes in a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingAddresses {
    /// Queue size.
    size: u16,
    packed: bool,
    /// First used element, or first descriptor of a packed ring.
    entries: u64,
    /// Used ring, or device event suppression structure.
    device: u64,
}

impl RingAddresses {
    /// Returns the addresses of a ring in these areas, which is packed or split.
    pub fn of(parts: &Parts<Area>, packed: bool) -> Self {
        let device = parts.device.guest_addr();
        let entries = if packed { parts.desc.guest_addr() } else { device + split::RING as u64 };
        Self { size: parts.size, packed, entries, device }
    }
}

/// A dirty log, and the ring whose writes are recorded in it.
#[derive(Debug)]
pub struct WriteLog {
    log: Arc<DirtyLog>,
    ring: RingAddresses,
}

impl WriteLog {
    /// Makes a log of the writes to the ring at `ring`.
    pub fn new(log: Arc<DirtyLog>, ring: RingAddresses) -> Self {
        Self { log, ring }
    }

    /// Returns the log, for writes to buffers.
    pub(crate) fn log(&self) -> &DirtyLog {
        &self.log
    }

    /// Records that `count` entries from `index` on, at most all of the ring, were written and published.
    #[cold]
    pub(crate) fn published(&self, index: u16, count: u16) {
        if count == 0 {
            return;
        }
        let RingAddresses { size, packed, entries, device } = self.ring;
        let entry = if packed { DESC } else { split::ELEMENT };
        let before_end = count.min(size - index);
        self.log.mark(entries + entry as u64 * u64::from(index), entry * usize::from(before_end));
        self.log.mark(entries, entry * usize::from(count - before_end));
        if !packed {
            self.log.mark(device, split::RING);
        }
    }

    /// Records that the words were written by which the device asks for kicks.
    #[cold]
    pub(crate) fn kicks_changed(&self) {
        let RingAddresses { size, packed, device, .. } = self.ring;
        self.log.mark(device, split::RING);
        if !packed {
            let event = split::RING + split::ELEMENT * usize::from(size);
            self.log.mark(device + event as u64, 2);
        }
    }
}
