//! The hostile driver: writes a device half's ring, by the rules or not, as the input says.

use crate::guest::{BASE, Guest, Places, Surprise};
use crate::ring::{Cursor, NEXT, OWNER};
use crate::script::operations;

operations! {
    /// One act of a hostile driver on its ring.
    Stroke {
        /// Writes a descriptor: in a split ring the `at`-th of the table, in a packed one the one `at` slots
        /// ahead, with the owner bits that make it available there (xored with those given).
        Desc { at: u16, addr: u32, len: u32, flags: u16, link: u16 },
        /// Writes an entry of an indirect table, in the layout of the ring.
        Entry { table: u16, at: u16, addr: u32, len: u32, flags: u16, link: u16 },
        /// Split: puts a head into the available ring. Packed: goes on by so many slots.
        Offer { head: u16 },
        /// Split: publishes what was offered, and `jump` entries more. Packed: writes the driver's event
        /// suppression.
        Show { jump: u16 },
        /// Writes eight bytes anywhere.
        Write { at: u32, value: u64 },
        /// Fills memory with bytes that differ from each other.
        Fill { at: u32, len: u16, seed: u8 },
        /// Will write one word between two loads of the device.
        Surprise { after: u8, flip: u8, value: u64 },
    }
}

/// The position of the hostile driver in its ring.
#[derive(Clone, Debug)]
pub struct Pen {
    places: Places,
    next: Cursor,
}

impl Pen {
    /// Makes a driver at the beginning of a ring.
    pub fn new(places: Places, start: Cursor) -> Self {
        Self { places, next: start }
    }

    /// Returns the address of an indirect table.
    fn table(&self, table: u16) -> u64 {
        self.places.rest + 64 * u64::from(table)
    }

    /// Carries out a stroke. Addresses are offsets from the start of guest memory.
    pub fn apply(&mut self, stroke: Stroke, guest: &Guest) {
        let places = &self.places;
        let words = |addr: u32, len: u32, flags: u16, link: u16| {
            let (flags, link) = (u64::from(flags), u64::from(link));
            let second = if places.packed { link << 32 | flags << 48 } else { flags << 32 | link << 48 };
            let first = BASE + u64::from(addr);
            (u128::from(first) | u128::from(second | u64::from(len)) << 64).to_le_bytes()
        };
        match stroke {
            Stroke::Desc { at, addr, len, flags, link } if places.packed => {
                let at = self.next.forward(places, at % (places.size + 1));
                guest.write(places.desc(at.index), &words(addr, len, flags ^ at.owner(false), link));
            }
            Stroke::Desc { at, addr, len, flags, link } => {
                guest.write(places.desc(at), &words(addr, len, flags, link));
            }
            Stroke::Entry { table, at, addr, len, flags, link } => {
                let entry = self.table(table) + 16 * u64::from(at);
                guest.write(entry, &words(addr, len, flags & !OWNER, link));
            }
            Stroke::Offer { head } if places.packed => {
                self.next = self.next.forward(places, head % (places.size + 1));
            }
            Stroke::Offer { head } => {
                guest.write(places.head(self.next.index), &head.to_le_bytes());
                self.next = self.next.forward(places, 1);
            }
            Stroke::Show { jump } if places.packed => {
                // The low half is the position asked for, the high half the kind of event suppression, taken
                // from its lowest bits.
                let wish = u32::from(jump) | u32::from(jump & 3) << 16;
                guest.write(places.at[1], &wish.to_le_bytes());
            }
            Stroke::Show { jump } => {
                guest.write(places.at[1] + 2, &self.next.index.wrapping_add(jump).to_le_bytes());
            }
            Stroke::Write { at, value } => guest.write(BASE + u64::from(at), &value.to_le_bytes()),
            Stroke::Fill { at, len, seed } => {
                // A period that is no power of two, so that pieces differ wherever they begin.
                let period: Vec<u8> = (0..251u8).map(|i| i.wrapping_add(seed)).collect();
                let bytes = &period.repeat(usize::from(len) / period.len() + 1)[..len.into()];
                guest.write(BASE + u64::from(at), bytes);
            }
            Stroke::Surprise { after, flip, value } => {
                guest.plan(Surprise { after, flip: flip & 1 != 0, value });
            }
        }
    }
}

/// Returns the strokes that offer a chain of `buffers` (offset, length, flags but NEXT) at descriptor `at`.
pub fn offer(packed: bool, at: u16, buffers: &[(u32, u32, u16)]) -> Vec<Stroke> {
    let mut strokes = Vec::new();
    for (i, (addr, len, flags)) in (0..).zip(buffers) {
        let more = if usize::from(i) + 1 < buffers.len() { NEXT } else { 0 };
        // The id of a packed chain is the number of its first descriptor, too.
        let (at, link) = if packed { (i, at) } else { (at + i, at + i + 1) };
        strokes.push(Stroke::Desc { at, addr: *addr, len: *len, flags: flags | more, link });
    }
    strokes.push(Stroke::Offer { head: if packed { buffers.len() as u16 } else { at } });
    strokes.push(Stroke::Show { jump: 0 });
    strokes
}
