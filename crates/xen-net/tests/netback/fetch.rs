//! Counts how often a ring page is read.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use ringferry_memory::{Area, Entry, WordSlots, WordTable, Words};
use ringferry_packet::frame::Burst;
use ringferry_packet::vnet::Header;
use ringferry_xen::domain::PAGE;
use ringferry_xen::netif::wire::{Extra, GSO_TCPV4, TxFlags};
use ringferry_xen_net::netback::{Mode, Queue, QueueConfig};

use crate::front::{Front, frame, tcp4};

/// An area whose loads are counted, by offset.
#[derive(Clone, Debug)]
struct Watched {
    area: Area,
    loads: Arc<Mutex<BTreeMap<usize, usize>>>,
}

impl Watched {
    fn new(area: Area) -> Self {
        Self { area, loads: Arc::default() }
    }

    /// The most loads of any word of a slot since the last time of asking, and how many words there were.
    fn most(&self) -> (usize, usize) {
        let loads = std::mem::take(&mut *self.loads.lock().unwrap());
        let slots: Vec<_> = loads.into_iter().filter(|(at, _)| *at >= 64).map(|(_, count)| count).collect();
        (slots.iter().copied().max().unwrap_or(0), slots.len())
    }
}

macro_rules! watched {
    ($($load:ident $store:ident $word:ty),*) => {$(
        fn $load(&self, at: usize) -> $word {
            *self.loads.lock().unwrap().entry(at).or_default() += 1;
            self.area.$load(at)
        }
        fn $store(&self, at: usize, value: $word) {
            self.area.$store(at, value);
        }
    )*};
}

impl Words for Watched {
    type Table<E: Entry> = WordTable<Self>;
    fn table<E: Entry>(&self, at: usize, count: u16) -> Option<WordTable<Self>> {
        WordTable::new::<E>(self.clone(), at, count)
    }
    type Slots = WordSlots<Self>;
    fn slots(&self, count: u16) -> Option<WordSlots<Self>> {
        WordSlots::new(self.clone(), count)
    }
    fn len(&self) -> usize {
        self.area.len()
    }
    fn is_aligned(&self, align: usize) -> bool {
        self.area.is_aligned(align)
    }
    watched!(load16 store16 u16, load16_acquire store16_release u16);
    watched!(load32 store32 u32, load32_acquire store32_release u32);
    watched!(load64 store64 u64, load64_acquire store64_release u64);
    fn full_fence() {
        Area::full_fence();
    }
}

#[test]
fn xsa_155_no_word_of_a_slot_is_read_twice() {
    let mut front = Front::new(32);
    let ring = |i| Watched::new(front.rings.region().area(i * PAGE, PAGE).unwrap());
    let (tx, rx) = (ring(0), ring(1));
    let config = QueueConfig::new(Mode::Persistent, true);
    let mut queue = Queue::new(tx.clone(), rx.clone(), front.foreign(), config).unwrap();
    for round in 0..3 {
        let gso = Extra::Gso { size: 1448, kind: GSO_TCPV4 };
        front.send_frame(&frame(100, round));
        front.send(&tcp4(9000, round), &[54, 4000, 4000, 1000], TxFlags::CSUM_BLANK, &[gso]);
        front.send(&frame(200, round), &[200], TxFlags::CSUM_BLANK, &[]);
        let _ = front.tx.publish();
        assert_eq!(queue.poll(32, &mut front.multicast), 3);
        let lent = queue.lend().unwrap();
        let mut burst = Burst::new();
        lent.frames(&mut burst);
        assert_eq!(burst.len(), 2);
        drop(burst);
        queue.give_back(lent);
        queue.complete();
        assert_eq!(tx.most(), (1, 7 * 3), "all words of six requests and an extra");
        front.answers();

        front.post(8);
        queue.expect(3);
        for len in [100, 5000, 60] {
            crate::front::deliver(&mut queue, Header::default(), &frame(len, round), 999).unwrap();
        }
        queue.flush();
        assert_eq!(rx.most(), (1, 4 * 2));
        front.received();
        front.rx.refresh();
        // The rest, so that every round begins with an empty ring.
        while queue.deliver(Header::default(), &frame(60, 0), &[]).is_ok() {}
        queue.flush();
        front.received();
        rx.most();
    }
    drop((queue, tx, rx));
    front.fake.destroy(crate::front::GUEST);
}
