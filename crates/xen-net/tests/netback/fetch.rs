//! Counts how often a ring page is read.

use ringferry_memory::Area;
use ringferry_memory::testing::Watched;
use ringferry_packet::frame::Burst;
use ringferry_packet::vnet::Header;
use ringferry_xen::domain::PAGE;
use ringferry_xen::netif::wire::{Extra, GSO_TCPV4, TxFlags};
use ringferry_xen_net::netback::{Mode, Queue, QueueConfig};

use crate::front::{Front, frame, tcp4};

/// The most loads of any word of a slot since the last time of asking, and how many words there were.
fn most(ring: &Watched<Area>) -> (usize, usize) {
    let slots: Vec<_> =
        ring.loads().into_iter().filter(|(at, _)| *at >= 64).map(|(_, count)| count).collect();
    (slots.iter().copied().max().unwrap_or(0), slots.len())
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
        assert_eq!(most(&tx), (1, 7 * 3), "all words of six requests and an extra");
        front.answers();

        front.post(8);
        queue.expect(3);
        for len in [100, 5000, 60] {
            crate::front::deliver(&mut queue, Header::default(), &frame(len, round), 999).unwrap();
        }
        queue.flush();
        assert_eq!(most(&rx), (1, 4 * 2));
        front.received();
        front.rx.refresh();
        // The rest, so that every round begins with an empty ring.
        while queue.deliver(Header::default(), &frame(60, 0), &[]).is_ok() {}
        queue.flush();
        front.received();
        most(&rx);
    }
    drop((queue, tx, rx));
    front.fake.destroy(crate::front::GUEST);
}
