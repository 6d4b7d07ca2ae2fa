//! Front ends that break the rules. Each class of the advisories is named; only the front end
//! itself may notice.

use proptest::prelude::*;
use ringferry_packet::vnet::Header;
use ringferry_xen::grant::GrantRef;
use ringferry_xen::netif::Fault;
use ringferry_xen::netif::wire::{ERROR, Extra, NULL, OKAY, TxFlags};
use ringferry_xen_net::netback::{Mode, Refused, Rejected};
use ringferry_xen_sim::fake::Op;

use crate::front::{Front, HOST, MODES, deliver, frame, tcp4};

const NONE: TxFlags = TxFlags::empty();
const MORE: TxFlags = TxFlags::MORE_DATA;

/// Sends a good frame, then what `bad` pushes: the good one must arrive, and the ring be broken for that reason.
fn breaks(fault: Fault, bad: impl Fn(&mut Front)) {
    for mode in MODES {
        let mut front = Front::new(32);
        let mut queue = front.queue(mode);
        let good = frame(100, 1);
        front.send_frame(&good);
        bad(&mut front);
        assert_eq!(front.forward(&mut queue), [(Header::default(), good)], "{mode:?}");
        assert_eq!(queue.fault(), Some(fault), "{mode:?}");
        // Nothing is taken any more, and nothing answered.
        assert_eq!(front.statuses(), []);
        assert!(!queue.has_packets() && !queue.arm());
        front.finish(queue);
    }
}

/// Sends a good frame, what `bad` pushes, and another good one: both arrive, and the answers in between are `statuses`.
fn refuses(statuses: &[i16], bad: impl Fn(&mut Front)) {
    for mode in MODES {
        let mut front = Front::new(32);
        let mut queue = front.queue(mode);
        let good = || (Header::default(), frame(100, 1));
        for round in 0..4 {
            front.send_frame(&good().1);
            bad(&mut front);
            front.send_frame(&good().1);
            assert_eq!(front.forward(&mut queue), [good(), good()], "{mode:?} {round}");
            let mut expected = vec![OKAY];
            expected.extend(statuses);
            expected.push(OKAY);
            assert_eq!(front.statuses(), expected, "{mode:?} {round}");
        }
        assert_eq!(queue.fault(), None);
        assert!(queue.rejected() != Rejected::default());
        front.finish(queue);
    }
}

#[test]
fn xsa_39_a_packet_without_its_last_slots_breaks_the_ring() {
    breaks(Fault::Incomplete, |front| front.request(front.gref(0), 0, MORE, 1, 100));
}

#[test]
fn xsa_39_a_packet_without_end_breaks_the_ring() {
    breaks(Fault::TooManySlots, |front| {
        front.request(front.gref(0), 0, MORE, 1, 65535);
        (0..200).for_each(|_| front.request(front.gref(1), 0, MORE, 2, 1));
    });
}

#[test]
fn xsa_39_a_producer_that_jumps_breaks_the_ring() {
    for jump in [258, 1 << 31, u32::MAX] {
        let mut front = Front::new(8);
        let mut queue = front.queue(Mode::Persistent);
        front.send_frame(&frame(100, 1));
        front.forward(&mut queue);
        front.answers();
        ringferry_memory::Words::store32(&front.rings.region().area(0, 4).unwrap(), 0, jump);
        assert_eq!(queue.poll(32, &mut front.multicast), 0);
        assert_eq!(queue.fault(), Some(Fault::Index));
        front.finish(queue);
    }
}

#[test]
fn xsa_39_a_receive_producer_that_jumps_breaks_the_ring() {
    let mut front = Front::new(8);
    let mut queue = front.queue(Mode::Persistent);
    front.post(4);
    queue.expect(2);
    deliver(&mut queue, Header::default(), &frame(100, 0), 100).unwrap();
    ringferry_memory::Words::store32(&front.rings.region().area(4096, 4).unwrap(), 0, 9999);
    for _ in 0..2 {
        assert_eq!(deliver(&mut queue, Header::default(), &frame(13_000, 0), 100), Err(Refused::Broken));
    }
    assert!(!queue.flush());
    assert_eq!(queue.fault(), Some(Fault::Index));
    front.finish(queue);
}

#[test]
fn xsa_39_a_piece_that_ends_behind_its_page_breaks_the_ring() {
    breaks(Fault::CrossesPage, |front| front.request(front.gref(0), 4000, NONE, 1, 97));
    breaks(Fault::CrossesPage, |front| front.request(front.gref(0), u16::MAX, NONE, 1, u16::MAX));
    breaks(Fault::CrossesPage, |front| {
        front.request(front.gref(0), 0, MORE, 1, 5000);
        front.request(front.gref(1), 1, NONE, 2, 4096);
    });
    breaks(Fault::CrossesPage, |front| {
        front.request(front.gref(0), 0, MORE, 1, 4196 + 1);
        front.request(front.gref(1), 0, NONE, 2, 100);
    });
}

#[test]
fn xsa_432_a_few_slots_too_many_are_answered_with_errors() {
    for slots in [19, 20] {
        refuses(&vec![ERROR; slots], |front| {
            front.request(front.gref(0), 0, MORE, 1, 1000);
            for i in 1..slots {
                front.request(front.gref(1), 0, if i + 1 < slots { MORE } else { NONE }, 2, 10);
            }
        });
    }
    breaks(Fault::TooManySlots, |front| {
        front.request(front.gref(0), 0, MORE, 1, 1000);
        (1..21).for_each(|i| front.request(front.gref(1), 0, if i < 20 { MORE } else { NONE }, 2, 10));
    });
}

#[test]
fn sizes_that_do_not_add_up_are_answered_with_errors() {
    refuses(&[ERROR; 3], |front| {
        front.request(front.gref(0), 0, MORE, 1, 1000);
        front.request(front.gref(1), 0, MORE, 2, 900);
        front.request(front.gref(2), 0, NONE, 3, 101);
    });
}

#[test]
fn a_packet_shorter_than_its_header_is_answered_with_an_error() {
    for size in [0, 1, 13] {
        refuses(&[ERROR], |front| front.request(front.gref(0), 0, NONE, 1, size));
    }
}

#[test]
fn xsa_448_empty_pieces_are_okay_and_nothing() {
    for mode in MODES {
        let mut front = Front::new(8);
        let mut queue = front.queue(mode);
        let sent = frame(200, 1);
        for cuts in [&[0, 200][..], &[200, 0], &[100, 0, 0, 100], &[0, 0, 0, 200]] {
            front.send(&sent, cuts, NONE, &[]);
            assert_eq!(front.forward(&mut queue), [(Header::default(), sent.clone())]);
            assert_eq!(front.statuses(), vec![OKAY; cuts.len()]);
        }
        // One whose page is not granted at all is not looked at.
        front.write(0, 0, &sent);
        front.request(front.gref(0), 0, MORE, 1, 200);
        front.request(GrantRef(u32::MAX), 0, NONE, 2, 0);
        assert_eq!(front.forward(&mut queue).len(), 1);
        front.finish(queue);
    }
}

#[test]
fn extras_without_end_or_twice_or_unknown_break_the_ring() {
    let gso = Extra::Gso { size: 1448, kind: 1 };
    let first = |front: &mut Front| front.request(front.gref(0), 0, TxFlags::EXTRA_INFO, 1, 100);
    breaks(Fault::Incomplete, first);
    breaks(Fault::Incomplete, |front| {
        first(front);
        front.extra(gso, true);
    });
    breaks(Fault::BadExtra, |front| {
        first(front);
        (0..200).for_each(|_| front.extra(gso, true));
    });
    for kind in [0, 5, 6, 255] {
        breaks(Fault::BadExtra, |front| {
            first(front);
            front.tx.push([kind, 0, 0]);
        });
    }
}

#[test]
fn segmentation_of_nothing_and_checksums_of_nothing_are_answered_with_errors() {
    let blank = TxFlags::CSUM_BLANK;
    for extra in [
        Extra::Gso { size: 0, kind: 1 },
        Extra::Gso { size: 1448, kind: 0 },
        Extra::Gso { size: 1448, kind: 2 },
        Extra::Gso { size: 1448, kind: 3 },
    ] {
        refuses(&[ERROR, NULL], |front| front.send(&tcp4(1000, 0), &[1054], blank, &[extra]));
    }
    refuses(&[ERROR, NULL], |front| {
        front.send(&tcp4(1000, 0), &[1054], NONE, &[Extra::Gso { size: 1448, kind: 1 }]);
    });
    refuses(&[ERROR], |front| front.send(&frame(100, 0), &[100], blank, &[]));
    // XSA-423: a header that is cut off by the end of the packet.
    refuses(&[ERROR], |front| front.send(&tcp4(0, 0)[..40], &[40], blank, &[]));
}

#[test]
fn bad_references_are_answered_with_errors_in_every_mode() {
    for gref in [GrantRef(0), GrantRef(u32::MAX), GrantRef(1 << 20)] {
        refuses(&[ERROR], |front| front.request(gref, 0, NONE, 1, 100));
        refuses(&[ERROR, OKAY], |front| {
            front.request(gref, 0, MORE, 1, 200);
            front.request(front.gref(1), 0, NONE, 2, 100);
        });
        refuses(&[ERROR, OKAY], |front| {
            front.request(front.gref(1), 0, MORE, 1, 200);
            front.request(gref, 0, NONE, 2, 100);
        });
    }
}

#[test]
fn a_flood_of_references_takes_no_slot_from_pages_that_are_used_again() {
    let mut front = Front::new(64);
    let mut queue = front.queue(Mode::Persistent);
    for _ in 0..3 {
        for i in 0..64 {
            front.send_frame(&frame(100, i));
        }
        front.forward(&mut queue);
        front.answers();
    }
    for gref in 0..5000 {
        front.request(GrantRef(1 << 24 | gref), 0, NONE, 1, 100);
        if gref % 100 == 99 {
            assert!(front.forward(&mut queue).is_empty());
            front.answers();
        }
    }
    assert_eq!(queue.mapped(), (64, 0));
    front.finish(queue);
}

#[test]
fn xsa_361_faults_of_the_hypervisor_are_answered_with_errors() {
    for mode in MODES {
        let mut front = Front::new(32);
        let mut queue = front.queue(mode);
        for (op, after) in [(Op::Map, 0), (Op::Map, 3), (Op::Copy, 0), (Op::Copy, 5), (Op::Batch, 0)] {
            for _ in 0..3 {
                front.fake.fail(HOST, op, after);
                for i in 0..8 {
                    front.send_frame(&frame(5000, i));
                }
                let arrived = front.forward(&mut queue).len();
                let statuses = front.statuses();
                assert_eq!(statuses.len(), 16);
                assert_eq!(
                    statuses.iter().filter(|status| **status == ERROR).count(),
                    8 - arrived,
                    "{mode:?} {op:?}"
                );
                front.post(8);
                queue.expect(8);
                for i in 0..4 {
                    deliver(&mut queue, Header::default(), &frame(5000, i), 1000).unwrap();
                }
                queue.flush();
                assert_eq!(front.received().len(), 4);
            }
        }
        assert_eq!(queue.fault(), None);
        front.finish(queue);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]
    /// Any slots whatever, in every mode: no panic, an answer to each slot or a broken ring, nothing left mapped.
    #[test]
    fn any_slots_are_answered_or_break_the_ring(
        slots in prop::collection::vec(
            (0usize..12, prop_oneof![0u16..200, any::<u16>()], 0u16..16, prop_oneof![0u16..2000, any::<u16>()], any::<bool>()),
            1..120,
        ),
        mode in 0usize..3,
    ) {
        let mut front = Front::new(8);
        let mut queue = front.queue(MODES[mode]);
        for (at, (page, offset, flags, size, extra)) in slots.iter().enumerate() {
            if *extra {
                let kind = *page as u32 % 6;
                front.tx.push([kind | u32::from(*flags & 1) << 8 | u32::from(*size) << 16, *offset as u32, 0]);
            } else {
                let gref = if *page < 8 { front.gref(*page) } else { GrantRef(*page as u32 * 77) };
                let flags = if at + 1 == slots.len() { NONE } else { TxFlags::from_bits_retain(*flags) };
                front.request(gref, *offset, flags, at as u16, *size);
            }
        }
        front.forward(&mut queue);
        if queue.fault().is_none() {
            prop_assert_eq!(front.answers().len(), slots.len());
        }
        front.finish(queue);
    }
}
