//! Packets that a front end sends to the back end.

use proptest::prelude::*;
use ringferry_packet::vnet::{F_NEEDS_CSUM, GSO_TCPV4, Header};
use ringferry_xen::netif::wire::{ERROR, Extra, GSO_TCPV4 as KIND_TCPV4, MAX_PACKET, NULL, OKAY, TxFlags};
use ringferry_xen_net::netback::Mode;

use crate::front::{Front, MODES, frame, tcp4};

#[test]
fn frames_of_every_size_arrive_in_every_mode() {
    for mode in MODES {
        let mut front = Front::new(64);
        let mut queue = front.queue(mode);
        for (i, len) in [14, 60, 64, 65, 1514, 4095, 4096, 4097, 9000, MAX_PACKET]
            .into_iter()
            .cycle()
            .take(60)
            .enumerate()
        {
            let sent = frame(len, i as u8);
            front.send_frame(&sent);
            assert!(front.forward(&mut queue) == [(Header::default(), sent)], "{mode:?} {len}");
            assert!(front.statuses().iter().all(|status| *status == OKAY));
        }
        front.finish(queue);
    }
}

#[test]
fn a_burst_costs_one_call_of_each_kind_and_none_once_pages_are_known() {
    for mode in MODES {
        let mut front = Front::new(32);
        let mut queue = front.queue(mode);
        let mut per_burst = Vec::new();
        for _ in 0..4 {
            for i in 0..32 {
                front.send_frame(&frame(100, i));
            }
            assert_eq!(front.forward(&mut queue).len(), 32);
            assert_eq!(front.answers().len(), 32);
            let calls = front.calls();
            per_burst.push((calls.map, calls.unmap, calls.copy));
        }
        let expected = match mode {
            Mode::Copy => [(0, 0, 1); 4],
            Mode::Map => [(1, 1, 0); 4],
            Mode::Persistent => [(0, 0, 1), (1, 0, 0), (0, 0, 0), (0, 0, 0)],
        };
        assert_eq!(per_burst, expected, "{mode:?}");
        let counters = queue.counters();
        assert_eq!(counters.hits + counters.misses, 128);
        assert_eq!(counters.copied_bytes, counters.copies * 100);
        front.finish(queue);
    }
}

#[test]
fn one_burst_is_one_notification() {
    let mut front = Front::new(32);
    let mut queue = front.queue(Mode::Copy);
    for i in 0..8 {
        front.send_frame(&frame(100, i));
    }
    assert!(front.tx.publish(), "the back end has not seen anything yet");
    assert_eq!(queue.poll(32, &mut front.multicast), 8);
    assert!(!front.tx.final_check(1));
    assert!(queue.complete(), "the front end asked");
    assert!(!queue.complete(), "nothing more to say");
    assert!(!queue.arm());
    front.send_frame(&frame(100, 0));
    assert!(front.tx.publish(), "the back end asked");
    assert!(queue.arm() && queue.has_packets());
    front.forward(&mut queue);
    front.finish(queue);
}

#[test]
fn pages_are_unmapped_before_their_answers_are_seen() {
    let mut front = Front::new(8);
    let mut queue = front.queue(Mode::Map);
    let rings = front.fake.mapped_pages();
    front.send_frame(&frame(9000, 1));
    let _ = front.tx.publish();
    queue.poll(32, &mut front.multicast);
    assert_eq!((front.fake.mapped_pages() - rings, front.answers().len()), (3, 0));
    queue.complete();
    assert_eq!((front.fake.mapped_pages() - rings, front.answers().len()), (0, 3));
    front.finish(queue);
}

#[test]
fn two_packets_in_one_page_are_two_references_to_it() {
    let mut front = Front::new(1);
    let mut queue = front.queue(Mode::Persistent);
    for round in 0..4 {
        let halves = [frame(2048, round), frame(2048, round + 100)];
        for (i, half) in halves.iter().enumerate() {
            front.write(0, 2048 * i, half);
            front.request(front.gref(0), 2048 * i as u16, TxFlags::empty(), i as u16, 2048);
        }
        let arrived = front.forward(&mut queue);
        assert_eq!(arrived, halves.map(|half| (Header::default(), half)));
        assert_eq!(front.statuses(), [OKAY; 2]);
    }
    assert_eq!(queue.mapped(), (1, 0));
    front.finish(queue);
}

#[test]
fn a_blank_checksum_is_found_and_segmentation_kept() {
    for mode in MODES {
        let mut front = Front::new(32);
        let mut queue = front.queue(mode);
        let blank = TxFlags::CSUM_BLANK | TxFlags::DATA_VALIDATED;
        let needs = Header { flags: F_NEEDS_CSUM, csum_start: 34, csum_offset: 16, ..Header::default() };
        let sent = tcp4(1000, 3);
        front.send(&sent, &[20, 1034], blank, &[]);
        assert_eq!(front.forward(&mut queue), [(needs, sent)]);
        let sent = tcp4(20_000, 4);
        let gso = Extra::Gso { size: 1448, kind: KIND_TCPV4 };
        front.send(&sent, &[66, 4096, 4096, 4096, 4096, 3604], blank, &[gso]);
        let header = Header { gso_type: GSO_TCPV4, gso_size: 1448, hdr_len: 54, ..needs };
        assert_eq!(front.forward(&mut queue), [(header, sent)]);
        assert_eq!(front.statuses(), [OKAY, OKAY, OKAY, NULL, OKAY, OKAY, OKAY, OKAY, OKAY]);
        front.finish(queue);
    }
}

#[test]
fn what_a_guest_says_of_valid_data_is_not_believed() {
    let mut front = Front::new(4);
    let mut queue = front.queue(Mode::Copy);
    let sent = tcp4(10, 0);
    front.send(&sent, &[sent.len()], TxFlags::DATA_VALIDATED, &[]);
    assert_eq!(front.forward(&mut queue), [(Header::default(), sent)]);
    front.finish(queue);
}

#[test]
fn a_back_end_that_comes_back_answers_what_the_last_one_did_not() {
    for mode in MODES {
        let mut front = Front::new(8);
        let mut queue = front.queue(mode);
        front.send_frame(&frame(100, 1));
        front.forward(&mut queue);
        front.send_frame(&frame(100, 2));
        let _ = front.tx.publish();
        queue.poll(32, &mut front.multicast);
        drop(queue);
        let mut queue = front.queue(mode);
        assert_eq!(front.forward(&mut queue), [(Header::default(), frame(100, 2))]);
        assert_eq!(front.statuses(), [OKAY, OKAY]);
        front.finish(queue);
    }
}

#[test]
fn multicast_orders_are_carried_out_and_carry_no_packet() {
    let mut front = Front::new(4);
    let mut queue = front.queue(Mode::Copy);
    front.multicast.set_filter(true);
    let group = |i: u8| [1, 0, 0x5e, 0, 0, i];
    front.send(&frame(60, 0), &[60], TxFlags::empty(), &[Extra::MulticastAdd(group(1))]);
    front.send_frame(&frame(60, 1));
    assert_eq!(front.forward(&mut queue).len(), 1);
    assert_eq!(front.statuses(), [OKAY, NULL, OKAY]);
    assert!(front.multicast.accepts(&group(1)) && !front.multicast.accepts(&group(2)));
    front.send(&frame(60, 0), &[60], TxFlags::empty(), &[Extra::MulticastDel(group(1))]);
    front.forward(&mut queue);
    assert!(!front.multicast.accepts(&group(1)));
    // More than are kept.
    for i in 0..65 {
        front.send(&frame(60, 0), &[60], TxFlags::empty(), &[Extra::MulticastAdd(group(i))]);
    }
    front.statuses();
    front.forward(&mut queue);
    let statuses = front.statuses();
    assert_eq!(statuses.iter().filter(|status| **status == ERROR).count(), 1);
    assert_eq!(statuses.len(), 130);
    front.finish(queue);
}

/// Lengths of pieces, some empty, that add up to `len`, at most 18.
fn cuts(len: usize) -> impl Strategy<Value = Vec<usize>> {
    prop::collection::vec(0usize..=4096, 0..18).prop_map(move |lens| {
        let mut left = len;
        let mut cuts: Vec<usize> = lens
            .iter()
            .map(|want| {
                let cut = left.min(*want);
                left -= cut;
                cut
            })
            .collect();
        // Remaining bytes go to pieces that have room, then to new ones.
        for cut in &mut cuts {
            let more = left.min(4096 - *cut);
            *cut += more;
            left -= more;
        }
        while left > 0 || cuts.is_empty() {
            let cut = left.min(4096);
            cuts.push(cut);
            left -= cut;
        }
        cuts
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    /// Any split of any length, with bursts of several.
    #[test]
    fn xsa_432_any_split_of_any_length_arrives(
        frames in prop::collection::vec(
            prop_oneof![14usize..300, 14usize..=MAX_PACKET].prop_flat_map(|len| (Just(len), cuts(len), any::<bool>())),
            1..6,
        ),
        mode in 0usize..3,
    ) {
        let mut front = Front::new(128);
        let mut queue = front.queue(MODES[mode]);
        // Several times, so that pages are known.
        for round in 0..3 {
            let mut expected = Vec::new();
            for (i, (len, cuts, blank)) in frames.iter().enumerate() {
                let blank = *blank && *len >= 54;
                let sent = if blank { tcp4(len - 54, i as u8) } else { frame(*len, round + i as u8) };
                let flags = if blank { TxFlags::CSUM_BLANK } else { TxFlags::empty() };
                front.send(&sent, cuts, flags, &[]);
                expected.push(sent);
            }
            let arrived: Vec<_> = front.forward(&mut queue).into_iter().map(|(_, bytes)| bytes).collect();
            prop_assert!(arrived == expected);
            prop_assert!(front.statuses().iter().all(|status| *status == OKAY));
            prop_assert_eq!(front.tx.in_flight(), 0);
        }
        front.finish(queue);
    }
}
