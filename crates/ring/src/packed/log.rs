//! What a device half keeps in a packed queue's in-flight region (vhost-user, "Inflight I/O
//! tracking") for whoever comes after it: its position, and the burst it is publishing.
//!
//! Used descriptors overwrite available ones. A device killed in the middle of a burst would leave
//! some of them written, and the driver and its successor would not agree on where they are. So the
//! burst is noted first, then the position before and behind it, then it goes to the ring, and at last
//! the new position alone is noted. Whether the first descriptor of the burst is still available says
//! whether the driver has seen it; if not, the successor carries the notes out.

use ringferry_memory::Words;

use super::side::Side;
use super::{Cursor, Desc};
use crate::parts::LayoutError;

/// Offset of the position in a packed ring's part of the region, one 64-bit word that is never left
/// half written: `used_idx` (bits 0 to 15), `old_used_idx` (16 to 31), `used_wrap_counter` (32 to 39),
/// `old_used_wrap_counter` (40 to 47); and in the padding behind them how many entries hold notes of a
/// burst (48 to 63).
pub const POSITION: usize = 16;
/// Offset of the first entry, and bytes of each: one per descriptor of the ring.
pub const ENTRY: usize = 32;
/// Offset of the slot in an entry that holds a note: 16 bits, `last` of an entry in flight.
pub const SLOT: usize = 4;
/// Offset of the descriptor's second word, as it goes to the ring, in an entry that holds a note: 64
/// bits, `id`, `flags` and `len` of an entry in flight.
pub const WORD: usize = 16;

/// The burst being completed, and the region it is noted in.
#[derive(Debug)]
pub(super) struct Log<A> {
    region: A,
    burst: Vec<(Cursor, Desc)>,
}

impl<A: Words> Log<A> {
    /// A log in the part of the region that belongs to a queue of `size` entries.
    pub(super) fn new(region: A, size: u16) -> Result<Self, LayoutError> {
        if region.len() < ENTRY * (1 + usize::from(size)) {
            return Err(LayoutError::Short("in-flight region"));
        }
        if !region.is_aligned(8) {
            return Err(LayoutError::Unaligned("in-flight region"));
        }
        Ok(Self { region, burst: Vec::new() })
    }

    /// Adds a used descriptor to the burst; a burst has at most as many as the ring.
    #[inline(always)]
    pub(super) fn push(&mut self, at: Cursor, desc: Desc) {
        self.burst.push((at, desc));
    }

    /// Publishes the burst on `side`.
    pub(super) fn publish(&mut self, side: &mut Side<A>) -> bool {
        if self.burst.is_empty() {
            return false;
        }
        let (new, old) = (side.next, side.published);
        // One descriptor is there or not; only more need notes.
        let notes = if self.burst.len() > 1 { self.burst.len() } else { 0 };
        for (i, (at, desc)) in self.burst[..notes].iter().enumerate() {
            let entry = ENTRY * (i + 1);
            self.region.store16(entry + SLOT, at.index);
            self.region.store64(entry + WORD, desc.into_word());
        }
        self.set_position(new, old, notes as u16);
        for (at, desc) in self.burst.drain(..) {
            side.hand_over_in_order(at, desc);
        }
        let wanted = side.publish();
        self.set_position(new, new, 0);
        wanted
    }

    /// Notes a position, behind all stores before it.
    fn set_position(&self, new: Cursor, old: Cursor, notes: u16) {
        let indexes = u64::from(new.index) | u64::from(old.index) << 16;
        let wraps = u64::from(new.wrap) << 32 | u64::from(old.wrap) << 40;
        self.region.store64_release(POSITION, indexes | wraps | u64::from(notes) << 48);
    }
}
