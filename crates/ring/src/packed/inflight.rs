//! In-flight log of a packed queue (vhost-user, "Inflight I/O tracking"): a write-ahead log in shared
//! memory that lets another process take over the device half after a crash.
//!
//! The device half creates an `InflightLog` at set-up over the part of the in-flight region that
//! belongs to its queue, and drops it with the ring; the region outlives the process. The log is needed
//! because used descriptors overwrite available ones: after a crash in the middle of a burst some would
//! be overwritten, and the driver and the successor would not agree on the used cursor. Each burst is
//! therefore published in four steps:
//!
//! ```text
//! 1. entries   slot and second word of every used descriptor of the burst
//! 2. position  old and new used cursor, number of entries          (one release store)
//! 3. ring      the used descriptors, the head flags last
//! 4. position  the new used cursor alone, no entries               (one release store)
//! ```
//!
//! A successor that finds a position with entries looks at the burst's head in the ring. If it is still
//! available, the driver has seen nothing and the successor repeats step 3; if it is used, the burst was
//! published.

use ringferry_memory::Words;

use super::side::Side;
use super::{Cursor, Desc};
use crate::parts::LayoutError;

/// Offset in bytes of the position in a packed queue's part of the region. The position is one 64-bit word
/// that is stored atomically: `used_idx` (bits 0 to 15), `old_used_idx` (16 to 31), `used_wrap_counter`
/// (32 to 39), `old_used_wrap_counter` (40 to 47) and, in what vhost-user calls padding, the number of
/// entries that log a burst (48 to 63).
pub const POSITION: usize = 16;
/// Offset of the first entry and size of each entry, in bytes. There is one entry per descriptor of the
/// ring.
pub const ENTRY: usize = 32;
/// Offset in an entry of the logged slot: 16 bits, in the place of vhost-user's `last`.
pub const SLOT: usize = 4;
/// Offset in an entry of the logged descriptor's second word as it goes to the ring: 64 bits, in the place
/// of vhost-user's `id`, `flags` and `len`.
pub const WORD: usize = 16;

/// The log of one queue: the used descriptors of the burst being completed, and the region they are
/// logged to.
#[derive(Debug)]
pub(super) struct InflightLog<A> {
    region: A,
    burst: Vec<(Cursor, Desc)>,
}

impl<A: Words> InflightLog<A> {
    /// Creates a log in `region`, the part of the in-flight region that belongs to a queue of `size`
    /// entries.
    ///
    /// # Errors
    /// [`LayoutError::Short`] and [`LayoutError::Unaligned`], if the part cannot hold the log.
    pub(super) fn new(region: A, size: u16) -> Result<Self, LayoutError> {
        if region.len() < ENTRY * (1 + usize::from(size)) {
            return Err(LayoutError::Short("in-flight region"));
        }
        if !region.is_aligned(8) {
            return Err(LayoutError::Unaligned("in-flight region"));
        }
        Ok(Self { region, burst: Vec::new() })
    }

    /// Adds a used descriptor to the burst, which has at most as many as the ring has slots.
    #[inline(always)]
    pub(super) fn push(&mut self, at: Cursor, desc: Desc) {
        self.burst.push((at, desc));
    }

    /// Publishes the burst on `side` in the four steps above. Returns true if the driver wants a call.
    pub(super) fn publish(&mut self, side: &mut Side<A>) -> bool {
        if self.burst.is_empty() {
            return false;
        }
        let (new, old) = (side.write_cursor, side.published);
        // A burst of one descriptor is published by one store and needs no entry.
        let entries = if self.burst.len() > 1 { self.burst.len() } else { 0 };
        for (i, (at, desc)) in self.burst[..entries].iter().enumerate() {
            let entry = ENTRY * (i + 1);
            self.region.store16(entry + SLOT, at.index);
            self.region.store64(entry + WORD, desc.into_word());
        }
        self.set_position(new, old, entries as u16);
        for (at, desc) in self.burst.drain(..) {
            side.write_desc_release(at, desc);
        }
        let wanted = side.publish();
        self.set_position(new, new, 0);
        wanted
    }

    /// Stores the position, with release order: it is visible only after all stores before it.
    fn set_position(&self, new: Cursor, old: Cursor, entries: u16) {
        let indexes = u64::from(new.index) | u64::from(old.index) << 16;
        let wraps = u64::from(new.wrap) << 32 | u64::from(old.wrap) << 40;
        self.region.store64_release(POSITION, indexes | wraps | u64::from(entries) << 48);
    }
}
