//! A second, naive reader of rings: it computes what a device must make of the memory in front of it if
//! nobody writes there meanwhile. It is written from the specification, for one chain at a time, without
//! regard to speed.

use ringferry_ring::{Buffer, RingFeatures};

use crate::guest::{Memory, Places};
use crate::ring::{Cursor, INDIRECT, NEXT, OWNER, WRITE};

/// Upper bound on the descriptors of a chain, as the crate under test documents it.
const MAX_CHAIN: usize = 1024;

/// A chain as the ring in memory describes it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Model {
    /// Head index (split ring) or buffer id (packed ring).
    pub id: u16,
    /// Number of entries of the ring that the chain takes.
    pub slots: u16,
    /// Buffers that the device may read, in order.
    pub readable: Vec<Buffer>,
    /// Buffers that the device may write, in order.
    pub writable: Vec<Buffer>,
}

/// A descriptor; `link` is the next one in a split ring or table, the buffer id in a packed one.
#[derive(Clone, Copy)]
struct Desc {
    buffer: Buffer,
    flags: u16,
    link: u16,
}

impl Desc {
    fn new(bytes: &[u8; 16], packed: bool) -> Self {
        let [a0, a1, a2, a3, a4, a5, a6, a7, l0, l1, l2, l3, x0, x1, y0, y1] = *bytes;
        let addr = u64::from_le_bytes([a0, a1, a2, a3, a4, a5, a6, a7]);
        let buffer = Buffer { addr, len: u32::from_le_bytes([l0, l1, l2, l3]) };
        let (x, y) = (u16::from_le_bytes([x0, x1]), u16::from_le_bytes([y0, y1]));
        let (flags, link) = if packed { (y, x) } else { (x, y) };
        Self { buffer, flags, link }
    }
}

fn desc(guest: &impl Memory, addr: u64, packed: bool) -> Option<Desc> {
    Some(Desc::new(guest.read(addr, 16)?.as_array()?, packed))
}

impl Model {
    fn push(&mut self, desc: Desc) -> Option<()> {
        let total: u64 = self.readable.iter().chain(&self.writable).map(|buffer| u64::from(buffer.len)).sum();
        let list = match desc.flags & WRITE != 0 {
            true => &mut self.writable,
            false if self.writable.is_empty() => &mut self.readable,
            false => return None,
        };
        list.push(desc.buffer);
        (total + u64::from(desc.buffer.len) < 1 << 32).then_some(())
    }

    fn len(&self) -> usize {
        self.readable.len() + self.writable.len()
    }

    /// Adds the entries of an indirect table (2.7.5.3, 2.8.7).
    fn table(&mut self, guest: &impl Memory, table: Buffer, limit: usize, packed: bool) -> Option<()> {
        let entries = table.len / 16;
        if entries == 0 || !table.len.is_multiple_of(16) {
            return None;
        }
        if packed && entries as usize > limit {
            return None;
        }
        let mut index = 0;
        while index < entries {
            let entry = desc(guest, table.addr.checked_add(16 * u64::from(index))?, packed)?;
            if !packed && entry.flags & INDIRECT != 0 || self.len() == limit {
                return None;
            }
            self.push(entry)?;
            if !packed && entry.flags & NEXT == 0 {
                return Some(());
            }
            index = if packed { index + 1 } else { entry.link.into() };
        }
        packed.then_some(())
    }
}

/// Returns the number of chains that the driver has published from `at` on; for a packed ring only 0 or 1.
pub fn available(guest: &impl Memory, places: &Places, at: Cursor) -> u16 {
    if !places.packed {
        return u16::from_le_bytes(guest.number(places.at[1] + 2)).wrapping_sub(at.index);
    }
    desc(guest, places.desc(at.index), true).is_some_and(|desc| desc.flags & OWNER == at.owner(false)).into()
}

/// Returns the chain at `at`, of which at most `free` slots belong to the driver; `None` if it breaks a rule.
pub fn chain(
    guest: &impl Memory,
    places: &Places,
    features: RingFeatures,
    at: Cursor,
    free: u16,
) -> Option<Model> {
    let packed = places.packed;
    let limit = usize::from(if packed { free } else { places.size }).min(MAX_CHAIN);
    let table_limit = usize::from(places.size).min(MAX_CHAIN);
    let head = u16::from_le_bytes(guest.number(places.head(at.index)));
    let mut model = Model { id: head, slots: 1, ..Model::default() };
    let mut index = if packed { at.index } else { head };
    loop {
        if index >= places.size {
            return None;
        }
        let desc = desc(guest, places.desc(index), packed)?;
        if desc.flags & INDIRECT != 0 {
            let alone = !packed || model.slots == 1;
            if !features.indirect || desc.flags & NEXT != 0 || !alone {
                return None;
            }
            model.table(guest, desc.buffer, table_limit, packed)?;
        } else {
            model.push(desc)?;
        }
        if packed {
            model.id = desc.link;
        }
        if desc.flags & NEXT == 0 {
            return Some(model);
        }
        if model.len() >= limit {
            return None;
        }
        if packed {
            model.slots += 1;
            index = (index + 1) % places.size;
        } else {
            index = desc.link;
        }
    }
}
