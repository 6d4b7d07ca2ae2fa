//! One ring of an AF_XDP socket. Each side writes one index, which counts entries without end; this side keeps a copy of its own and loads the kernel's only when the
//! copy of that says that nothing is left.

use ringferry_memory::Words;
use rustix::net::xdp::XdpRingOffset;

/// `XDP_RING_NEED_WAKEUP`.
const NEED_WAKEUP: u32 = 1;

/// What both sides of a ring have.
#[derive(Debug)]
struct Ring<W> {
    words: W,
    offsets: Offsets,
    /// Bytes of an entry.
    size: usize,
    mask: u32,
    /// The index that this side writes.
    own: u32,
    /// The kernel's, as it was last loaded.
    peer: u32,
}

/// Where in the memory of a ring its words are, in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Offsets {
    pub(crate) producer: usize,
    pub(crate) consumer: usize,
    pub(crate) flags: usize,
    pub(crate) entries: usize,
}

impl From<&XdpRingOffset> for Offsets {
    fn from(offsets: &XdpRingOffset) -> Self {
        Self {
            producer: offsets.producer as usize,
            consumer: offsets.consumer as usize,
            // Kernels before 5.4 have none, and are too old for this workspace.
            flags: offsets.flags.unwrap_or(0) as usize,
            entries: offsets.desc as usize,
        }
    }
}

/// An entry of a receive or transmit ring (`struct xdp_desc`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Descriptor {
    /// Where the bytes begin, from the begin of the UMEM.
    pub(crate) address: u64,
    pub(crate) len: u32,
    /// The packet goes on in the next descriptor.
    pub(crate) continues: bool,
}

impl Descriptor {
    /// Bytes of a descriptor in its ring.
    pub(crate) const SIZE: usize = 16;
    /// `XDP_PKT_CONTD`.
    const CONTINUES: u64 = 1;
}

/// Bytes of an address in the fill and in the completion ring.
pub(crate) const ADDRESS: usize = 8;

impl<W: Words> Ring<W> {
    fn new(words: W, offsets: Offsets, size: usize, entries: u32) -> Self {
        Self { words, offsets, size, mask: entries - 1, own: 0, peer: 0 }
    }

    fn at(&self, index: u32) -> usize {
        self.offsets.entries + (index & self.mask) as usize * self.size
    }

    fn needs_wakeup(&self) -> bool {
        self.words.load32(self.offsets.flags) & NEED_WAKEUP != 0
    }
}

/// A ring that this side adds entries to.
#[derive(Debug)]
pub(crate) struct Producer<W>(Ring<W>);

impl<W: Words> Producer<W> {
    /// Goes on where whoever had the ring before has published.
    pub(crate) fn new(words: W, offsets: Offsets, size: usize, entries: u32) -> Self {
        let mut ring = Ring::new(words, offsets, size, entries);
        ring.own = ring.words.load32(offsets.producer);
        ring.peer = ring.words.load32_acquire(offsets.consumer);
        Self(ring)
    }

    /// Returns how many entries there is room for, if `wanted` or more once the kernel's index is loaded anew.
    #[inline]
    pub(crate) fn room(&mut self, wanted: u32) -> u32 {
        let Ring { words, offsets, mask, own, peer, .. } = &mut self.0;
        let room = |own: u32, peer: u32| (*mask + 1).saturating_sub(own.wrapping_sub(peer));
        if room(*own, *peer) < wanted {
            *peer = words.load32_acquire(offsets.consumer);
        }
        room(*own, *peer)
    }

    /// Adds the address of a frame. The caller has seen that there is [room](Self::room).
    #[inline]
    pub(crate) fn push_address(&mut self, address: u64) {
        self.0.words.store64(self.0.at(self.0.own), address);
        self.0.own = self.0.own.wrapping_add(1);
    }

    /// Adds a descriptor likewise.
    #[inline]
    pub(crate) fn push(&mut self, Descriptor { address, len, continues }: Descriptor) {
        let at = self.0.at(self.0.own);
        let options = if continues { Descriptor::CONTINUES } else { 0 };
        self.0.words.store64(at, address);
        self.0.words.store64(at + 8, options << 32 | u64::from(len));
        self.0.own = self.0.own.wrapping_add(1);
    }

    /// Shows the kernel what was added.
    #[inline]
    pub(crate) fn publish(&self) {
        self.0.words.store32_release(self.0.offsets.producer, self.0.own);
    }

    /// Returns true if the kernel looks at the ring only if it is called.
    #[inline]
    pub(crate) fn needs_wakeup(&self) -> bool {
        self.0.needs_wakeup()
    }

    /// Returns the index of the next entry.
    pub(crate) fn position(&self) -> u32 {
        self.0.own
    }

    /// Returns true if the kernel has not taken all that was published.
    pub(crate) fn is_pending(&mut self) -> bool {
        let Ring { words, offsets, own, peer, .. } = &mut self.0;
        *peer = words.load32_acquire(offsets.consumer);
        *peer != *own
    }
}

/// A ring that this side takes entries from.
#[derive(Debug)]
pub(crate) struct Consumer<W>(Ring<W>);

impl<W: Words> Consumer<W> {
    /// Goes on where whoever had the ring before has stopped.
    pub(crate) fn new(words: W, offsets: Offsets, size: usize, entries: u32) -> Self {
        let mut ring = Ring::new(words, offsets, size, entries);
        ring.own = ring.words.load32(offsets.consumer);
        ring.peer = ring.words.load32_acquire(offsets.producer);
        Self(ring)
    }

    /// Returns how many entries there are, up to a whole ring.
    #[inline]
    pub(crate) fn available(&mut self) -> u32 {
        let Ring { words, offsets, mask, own, peer, .. } = &mut self.0;
        if *peer == *own {
            *peer = words.load32_acquire(offsets.producer);
        }
        peer.wrapping_sub(*own).min(*mask + 1)
    }

    /// Returns the address of a frame, `ahead` entries behind the next one, which is [available](Self::available).
    #[inline]
    pub(crate) fn address(&self, ahead: u32) -> u64 {
        self.0.words.load64(self.0.at(self.0.own.wrapping_add(ahead)))
    }

    /// Returns a descriptor likewise.
    #[inline]
    pub(crate) fn descriptor(&self, ahead: u32) -> Descriptor {
        let at = self.0.at(self.0.own.wrapping_add(ahead));
        let second = self.0.words.load64(at + 8);
        Descriptor {
            address: self.0.words.load64(at),
            len: second as u32,
            continues: second >> 32 & Descriptor::CONTINUES != 0,
        }
    }

    /// Gives `count` entries back to the kernel.
    #[inline]
    pub(crate) fn release(&mut self, count: u32) {
        self.0.own = self.0.own.wrapping_add(count);
        self.0.words.store32_release(self.0.offsets.consumer, self.0.own);
    }

    /// Returns the index of the next entry.
    pub(crate) fn position(&self) -> u32 {
        self.0.own
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use ringferry_memory::Area;
    use ringferry_memory::shared::SharedMem;

    use super::*;

    const OFFSETS: Offsets = Offsets { producer: 0, consumer: 64, flags: 128, entries: 192 };

    fn area() -> Area {
        let memory = SharedMem::new("ring", 4096).unwrap();
        memory.map_at(0).unwrap().area(0, 4096).unwrap()
    }

    #[test]
    fn a_ring_goes_on_where_the_one_before_stopped_also_around_the_end_of_its_indexes() {
        let words = area();
        for at in [OFFSETS.producer, OFFSETS.consumer] {
            words.store32(at, u32::MAX - 1);
        }
        let mut producer = Producer::new(words.clone(), OFFSETS, ADDRESS, 8);
        assert_eq!((producer.room(8), producer.needs_wakeup()), (8, false));
        (0..5).for_each(|address| producer.push_address(address));
        producer.publish();
        assert!(producer.is_pending());
        let mut consumer = Consumer::new(words.clone(), OFFSETS, ADDRESS, 8);
        assert_eq!((consumer.available(), consumer.address(4)), (5, 4));
        consumer.release(2);
        let mut again = Consumer::new(words.clone(), OFFSETS, ADDRESS, 8);
        assert_eq!((again.available(), again.address(0)), (3, 2));
        let mut producer = Producer::new(words.clone(), OFFSETS, ADDRESS, 8);
        assert_eq!(producer.room(8), 5);
        again.release(3);
        assert_eq!(producer.room(8), 8);
        assert!(!producer.is_pending());
        words.store32(OFFSETS.flags, 1);
        assert!(producer.needs_wakeup());
    }

    proptest! {
        /// Whatever is added comes out, once, in order and as it was.
        #[test]
        fn descriptors_come_out_as_they_went_in(
            steps in prop::collection::vec((0u32..12, 0u32..12), 1..60), begin: u32,
        ) {
            let words = area();
            words.store32(OFFSETS.producer, begin);
            words.store32(OFFSETS.consumer, begin);
            let mut producer = Producer::new(words.clone(), OFFSETS, Descriptor::SIZE, 8);
            let mut consumer = Consumer::new(words, OFFSETS, Descriptor::SIZE, 8);
            let (mut added, mut taken) = (0u32, 0u32);
            let nth = |n: u32| Descriptor { address: u64::from(n) << 12, len: n + 1, continues: n.is_multiple_of(3) };
            for (add, take) in steps {
                for _ in 0..add.min(producer.room(add)) {
                    producer.push(nth(added));
                    added += 1;
                }
                producer.publish();
                prop_assert!(added - taken <= 8);
                let available = consumer.available();
                prop_assert!(available <= added - taken && (available > 0 || added == taken));
                let take = take.min(available);
                for ahead in 0..take {
                    prop_assert_eq!(consumer.descriptor(ahead), nth(taken + ahead));
                }
                consumer.release(take);
                taken += take;
            }
        }
    }
}
