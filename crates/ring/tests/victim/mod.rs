//! A device half under attack: the test writes its memory in place of a driver, by the rules or against them.
//!
//! A test makes a [`Victim`], writes descriptors, calls [`Victim::take`] or [`Victim::take_one`], and checks the fault.
#![allow(dead_code, reason = "every test program uses its own part of this module")]

use ringferry_memory::Words;
use ringferry_ring::{Chain, Chains, Device, Fault, Parts, RingFeatures};

use crate::common::{AVAIL, BASE, Heap, Memory, Places, USED, Watched, fresh_base, watched};

/// Default queue size of a victim.
pub const SIZE: u16 = 8;

/// The 16 bytes of a descriptor: address, length, and two words that are flags and next in a split
/// ring, id and flags in a packed one.
pub type Raw = (u64, u32, u16, u16);

/// A device half with its memory.
pub struct Victim {
    /// The whole guest memory of the test.
    pub memory: Heap,
    /// Addresses of the queue's areas.
    pub places: Places,
    /// The queue's areas with counted accesses, as the device uses them.
    pub parts: Parts<Watched>,
    /// The device half under attack.
    pub device: Device<Watched>,
    /// The chains that the device took last.
    pub chains: Chains,
    features: RingFeatures,
}

impl Victim {
    /// Makes a ring of [`SIZE`] entries with a page behind it.
    pub fn new(features: RingFeatures) -> Self {
        Self::sized(SIZE, features)
    }

    /// Makes a ring of `size` entries with a page behind it.
    pub fn sized(size: u16, features: RingFeatures) -> Self {
        Self::over(Heap::new(Places::new(size, features.packed).bytes(0x1000)), size, features)
    }

    /// Makes a ring of `size` entries in `memory`.
    pub fn over(memory: Heap, size: u16, features: RingFeatures) -> Self {
        let places = Places::new(size, features.packed);
        let parts = watched(places.parts(&memory));
        let device = Device::new(parts.clone(), features, fresh_base(features.packed), None).unwrap();
        Victim { memory, places, parts, device, chains: Chains::new(), features }
    }

    /// Returns the address at which tests place indirect tables.
    pub fn table(&self) -> u64 {
        self.places.rest
    }

    /// Writes one descriptor at a guest address, which may be odd.
    pub fn put(&self, addr: u64, desc: Raw) {
        let mut bytes = desc.0.to_le_bytes().to_vec();
        bytes.extend(desc.1.to_le_bytes());
        bytes.extend(desc.2.to_le_bytes());
        bytes.extend(desc.3.to_le_bytes());
        for (i, byte) in bytes.into_iter().enumerate() {
            let at = (addr - BASE) as usize + i;
            let mut pair = self.memory.load16(at & !1).to_le_bytes();
            pair[at & 1] = byte;
            self.memory.store16(at & !1, u16::from_le_bytes(pair));
        }
    }

    /// Writes consecutive descriptors, of the ring or of an indirect table.
    pub fn write(&self, addr: u64, descs: &[Raw]) {
        for (i, desc) in descs.iter().enumerate() {
            self.put(addr + 16 * i as u64, *desc);
        }
    }

    /// Writes descriptors of the ring, from index 0 on.
    pub fn descriptors(&self, descs: &[Raw]) {
        self.write(self.places.desc, descs);
    }

    /// Split: makes `heads` available from ring entry `from` on.
    pub fn offer(&self, from: u16, heads: &[u16]) {
        let mut index = from;
        for head in heads {
            self.parts.driver.store16(4 + 2 * usize::from(index % self.places.size), *head);
            index = index.wrapping_add(1);
        }
        self.parts.driver.store16(2, index);
    }

    /// Packed: writes available descriptors from position `from` (index, and wrap counter in bit 15)
    /// on, and returns the position behind them. Flags of `descs` are without AVAIL and USED.
    pub fn supply(&self, from: u16, descs: &[Raw]) -> u16 {
        let mut at = from;
        for (addr, len, id, flags) in descs {
            let owner = if at >> 15 != 0 { AVAIL } else { USED };
            self.put(self.places.desc + 16 * u64::from(at & 0x7fff), (*addr, *len, *id, flags | owner));
            at = if (at & 0x7fff) + 1 == self.places.size { (at & 0x8000) ^ 0x8000 } else { at + 1 };
        }
        at
    }

    /// Takes all available chains and returns their number.
    pub fn take(&mut self) -> usize {
        self.chains.clear();
        self.device.take(usize::MAX, &mut self.memory.tables(), &mut self.chains)
    }

    /// Takes the only chain, which starts at descriptor 0 (and is made available here in a split ring). Returns the
    /// fault if the device refuses it.
    pub fn take_one(&mut self) -> Result<Chain, Fault> {
        if !self.features.packed {
            self.offer(0, &[0]);
        }
        match self.take() {
            0 => Err(self.refused()),
            _ => {
                assert_eq!((self.chains.len(), self.device.fault()), (1, None));
                Ok(self.chains.chain(0))
            }
        }
    }

    /// Checks that the ring is broken and stays so, and returns the fault.
    pub fn refused(&mut self) -> Fault {
        let fault = self.device.fault().expect("the device noticed nothing");
        let base = self.device.base();
        let before = self.chains.len();
        // Even a driver that now behaves, or offers something else, is not served.
        if self.features.packed {
            self.supply(base, &[(BASE, 1, 0, 0)]);
        } else {
            self.descriptors(&[(BASE, 1, 0, 0)]);
            self.offer(base, &[0]);
        }
        assert!(!self.device.has_chains() && !self.device.enable_kicks());
        let taken = self.device.take(usize::MAX, &mut self.memory.tables(), &mut self.chains);
        assert_eq!((taken, self.chains.len()), (0, before));
        assert_eq!((self.device.fault(), self.device.base()), (Some(fault), base));
        self.device.break_with(Fault::BadTable);
        assert_eq!(self.device.fault(), Some(fault), "the first violation is the one remembered");
        fault
    }
}
