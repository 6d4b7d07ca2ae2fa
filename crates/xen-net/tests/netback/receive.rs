//! Frames that the back end delivers to a front end.

use proptest::prelude::*;
use ringferry_packet::vnet::{F_DATA_VALID, F_NEEDS_CSUM, GSO_TCPV4, GSO_UDP_L4, Header};
use ringferry_xen::grant::Access;
use ringferry_xen::netif::wire::{GSO_TCPV4 as KIND_TCPV4, MAX_PACKET, RxFlags};
use ringferry_xen_net::netback::{Delivery, Drained, Mode, QueueConfig, Refused};

use crate::front::{Front, MODES, Received, deliver, frame, tcp4};

#[test]
fn frames_of_every_size_are_received_in_every_mode() {
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
            front.post(18);
            deliver(&mut queue, Header::default(), &sent, 3000).unwrap();
            assert!(front.received().is_empty(), "nothing is seen before it is flushed");
            queue.flush();
            assert!(front.received() == [Received { bytes: sent, ..Received::default() }], "{mode:?} {len}");
            // The rest of what was posted.
            while deliver(&mut queue, Header::default(), &frame(60, 0), 60).is_ok() {}
            queue.flush();
            front.received();
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
            front.post(32);
            queue.expect(32);
            for i in 0..32 {
                deliver(&mut queue, Header::default(), &frame(100, i), 100).unwrap();
            }
            queue.flush();
            assert_eq!(front.received().len(), 32);
            let calls = front.calls();
            per_burst.push((calls.map, calls.unmap, calls.copy));
        }
        let expected = match mode {
            Mode::Copy => [(0, 0, 1); 4],
            Mode::Map => [(1, 1, 0); 4],
            Mode::Persistent => [(0, 0, 1), (1, 0, 0), (0, 0, 0), (0, 0, 0)],
        };
        assert_eq!(per_burst, expected, "{mode:?}");
        front.finish(queue);
    }
}

#[test]
fn large_frames_are_copied_from_where_they_lie() {
    let mut front = Front::new(64);
    let mut queue = front.queue(Mode::Copy);
    front.post(40);
    queue.expect(2);
    let sent = [frame(60_000, 1), frame(50_000, 2)];
    for frame in &sent {
        deliver(&mut queue, Header::default(), frame, 5000).unwrap();
    }
    queue.flush();
    assert_eq!(front.received().into_iter().map(|frame| frame.bytes).collect::<Vec<_>>(), sent);
    assert_eq!((front.calls().copy, queue.counters().copied_bytes), (2, 110_000));
    front.finish(queue);
}

#[test]
fn one_burst_is_one_notification_and_pages_not_spent_go_back() {
    let mut front = Front::new(32);
    let mut queue = front.queue(Mode::Map);
    let rings = front.fake.mapped_pages();
    front.post(20);
    assert!(!front.rx.final_check(1));
    queue.expect(16);
    for i in 0..4 {
        deliver(&mut queue, Header::default(), &frame(100, i), 100).unwrap();
    }
    assert_eq!(front.fake.mapped_pages() - rings, 16);
    assert!(queue.flush());
    assert!(!queue.flush());
    assert_eq!(front.fake.mapped_pages(), rings);
    assert_eq!(front.received().len(), 4);
    queue.expect(100);
    for i in 0..16 {
        deliver(&mut queue, Header::default(), &frame(200, i), 100).unwrap();
    }
    assert_eq!(deliver(&mut queue, Header::default(), &frame(200, 0), 100), Err(Refused::NoBuffers));
    queue.flush();
    assert_eq!(front.received().len(), 16);
    front.finish(queue);
}

#[test]
fn offloads_are_said_with_flags_and_an_extra() {
    for mode in MODES {
        let mut front = Front::new(32);
        let mut queue = front.queue(mode);
        let blank = Header { flags: F_NEEDS_CSUM, csum_start: 34, csum_offset: 16, ..Header::default() };
        let large = Header { gso_type: GSO_TCPV4, gso_size: 1448, hdr_len: 54, ..blank };
        let valid = Header { flags: F_DATA_VALID, ..Header::default() };
        let sent = [tcp4(100, 1), tcp4(10_000, 2), tcp4(900, 3), tcp4(5, 4)];
        front.post(10);
        for (header, frame) in [blank, large, large, valid].iter().zip(&sent) {
            deliver(&mut queue, *header, frame, 777).unwrap();
        }
        queue.flush();
        let both = RxFlags::CSUM_BLANK | RxFlags::DATA_VALIDATED;
        let expected = [
            (both, None),
            (both | RxFlags::EXTRA_INFO, Some((1448, KIND_TCPV4))),
            (both | RxFlags::EXTRA_INFO, Some((1448, KIND_TCPV4))),
            (RxFlags::DATA_VALIDATED, None),
        ];
        let expected: Vec<_> = expected
            .iter()
            .zip(&sent)
            .map(|((flags, gso), bytes)| Received {
                bytes: bytes.clone(),
                flags: *flags,
                gso: *gso,
                failed: false,
            })
            .collect();
        assert_eq!(front.received(), expected);
        front.finish(queue);
    }
}

#[test]
fn what_the_front_end_cannot_take_is_refused_and_spends_nothing() {
    let mut front = Front::new(32);
    let mut queue = front.back(QueueConfig::new(Mode::Copy, false));
    front.post(4);
    let plain = Header::default();
    assert_eq!(deliver(&mut queue, plain, &frame(4097, 0), 4096), Err(Refused::TooBig));
    let udp = Header { gso_type: GSO_UDP_L4, gso_size: 100, ..plain };
    assert_eq!(deliver(&mut queue, udp, &frame(1000, 0), 4096), Err(Refused::Offload));
    assert_eq!(deliver(&mut queue, plain, &frame(70_000, 0), 4096), Err(Refused::TooBig));
    for _ in 0..4 {
        deliver(&mut queue, plain, &frame(4096, 0), 4096).unwrap();
    }
    assert_eq!(deliver(&mut queue, plain, &frame(14, 0), 4096), Err(Refused::NoBuffers));
    queue.flush();
    assert_eq!(front.received().len(), 4);
    front.finish(queue);
}

#[test]
fn xsa_392_a_frame_that_needs_more_pages_than_are_posted_spends_none() {
    let mut front = Front::new(32);
    let mut queue = front.queue(Mode::Copy);
    front.post(3);
    let large = Header {
        flags: F_NEEDS_CSUM,
        gso_type: GSO_TCPV4,
        gso_size: 1448,
        csum_start: 34,
        csum_offset: 16,
        ..Header::default()
    };
    for _ in 0..100 {
        // Three pages and an extra.
        assert_eq!(deliver(&mut queue, large, &tcp4(12_000, 0), 4096), Err(Refused::NoBuffers));
    }
    deliver(&mut queue, Header::default(), &frame(12_000, 0), 4096).unwrap();
    queue.flush();
    assert_eq!(front.received().len(), 1);
    assert!(!queue.arm_receive(4096));
    front.post_page(front.gref(0), 0);
    assert!(!front.rx.publish(), "one page is not enough for a page and an extra");
    front.post_page(front.gref(1), 1);
    assert!(front.rx.publish(), "feature-rx-notify");
    front.finish(queue);
}

#[test]
fn frames_without_pages_wait_in_order_and_are_told_of() {
    for mode in MODES {
        let mut front = Front::new(64);
        let mut queue = front.queue(mode).with_backlog(100_000);
        let frames: Vec<_> =
            [4000, 60, 9000, 100, 60_000, 60].iter().zip(0..).map(|(len, i)| frame(*len, i)).collect();
        front.post(2);
        let put = |queue: &mut ringferry_xen_net::netback::Queue<_>, frame: &[u8]| {
            let (first, rest) = frame.split_at(40);
            let rest: Vec<_> = rest.chunks(3000).map(ringferry_memory::ReadSlice::from).collect();
            queue.deliver_or_wait(Header::default(), first, &rest)
        };
        let mut became = Vec::new();
        for frame in &frames {
            became.push(put(&mut queue, frame).unwrap());
        }
        // A frame that would fit waits as well, behind those before it.
        let (done, waits) = (Delivery::Done, Delivery::Waits);
        assert_eq!(became, [done, done, waits, waits, waits, waits]);
        assert_eq!(put(&mut queue, &frame(40_000, 0)), Err(Refused::NoBuffers), "the bound");
        assert_eq!(put(&mut queue, &frame(MAX_PACKET + 1, 0)), Err(Refused::TooBig));
        assert_eq!(queue.drain(), Drained::default());
        queue.flush();
        assert!(!queue.arm_backlog());
        let mut arrived = front.received();
        assert_eq!(arrived.len(), 2);
        front.post_page(front.gref(10), 10);
        front.post_page(front.gref(11), 11);
        assert!(!front.rx.publish(), "two pages are not enough for the first that waits");
        assert_eq!((queue.drain(), queue.arm_backlog()), (Drained::default(), false));
        front.post_page(front.gref(12), 12);
        assert!(front.rx.publish(), "feature-rx-notify");
        assert!(queue.arm_backlog(), "they are there already");
        assert_eq!(queue.drain(), Drained { frames: 1, bytes: 9000, expired: 0 });
        queue.flush();
        arrived.extend(front.received());
        assert!(!queue.arm_backlog());
        front.post(30);
        assert_eq!(queue.drain(), Drained { frames: 3, bytes: 60_160, expired: 0 });
        queue.flush();
        arrived.extend(front.received());
        assert!(arrived.iter().map(|frame| &frame.bytes).eq(&frames), "{mode:?}");
        assert!(!queue.has_backlog() && !queue.arm_backlog());
        assert_eq!(queue.waited(), 4);
        assert_eq!(put(&mut queue, &frames[1]), Ok(Delivery::Done));
        queue.flush();
        front.finish(queue);
    }
}

#[test]
fn nothing_waits_for_a_front_end_that_does_not_tell() {
    let front = Front::new(8);
    let mut queue = front.queue(Mode::Copy);
    assert_eq!(queue.deliver_or_wait(Header::default(), &frame(60, 0), &[]), Err(Refused::NoBuffers));
    assert!(!queue.has_backlog() && !queue.arm_backlog());
    front.finish(queue);
}

#[test]
fn a_page_that_cannot_be_written_is_answered_with_an_error_and_harms_no_other() {
    for mode in MODES {
        let mut front = Front::new(8);
        let mut table = front.domain.grants().unwrap();
        let readonly = table.grant(crate::front::HOST, 1, Access::Read).unwrap();
        let mut queue = front.queue(mode);
        for _ in 0..4 {
            front.post_page(front.gref(0), 0);
            front.post_page(readonly.refs()[0], 1);
            front.post_page(ringferry_xen::grant::GrantRef(u32::MAX), 2);
            front.post_page(front.gref(3), 3);
            let _ = front.rx.publish();
            queue.expect(4);
            for i in 0..4 {
                deliver(&mut queue, Header::default(), &frame(100, i), 100).unwrap();
            }
            queue.flush();
            let failed: Vec<_> = front.received().iter().map(|frame| frame.failed).collect();
            assert_eq!(failed, [false, true, true, false], "{mode:?}");
        }
        assert_eq!(readonly.end(), 0);
        front.finish(queue);
    }
}

#[test]
fn a_queue_whose_pages_are_lent_out_takes_no_frame() {
    let mut front = Front::new(8);
    let mut queue = front.queue(Mode::Copy);
    front.post(4);
    front.send_frame(&frame(60, 0));
    let _ = front.tx.publish();
    queue.poll(32, &mut front.multicast);
    let lent = queue.lend().unwrap();
    assert!(queue.lend().is_none());
    assert_eq!(deliver(&mut queue, Header::default(), &frame(60, 0), 60), Err(Refused::Lent));
    assert_eq!((queue.poll(32, &mut front.multicast), queue.flush()), (0, false));
    queue.give_back(lent);
    queue.complete();
    deliver(&mut queue, Header::default(), &frame(60, 0), 60).unwrap();
    queue.flush();
    front.finish(queue);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn any_frame_in_any_pieces_is_received(
        frames in prop::collection::vec((prop_oneof![14usize..300, 14usize..=MAX_PACKET], 1usize..5000), 1..6),
        mode in 0usize..3,
        posted in 17usize..120,
    ) {
        let mut front = Front::new(128);
        let mut queue = front.queue(MODES[mode]);
        for round in 0..3 {
            front.post(posted.min(front.rx.free() as usize));
            queue.expect(frames.len());
            let mut expected = Vec::new();
            for (i, (len, cut)) in frames.iter().enumerate() {
                let sent = frame(*len, round + i as u8);
                if deliver(&mut queue, Header::default(), &sent, *cut).is_ok() {
                    expected.push(sent);
                }
            }
            queue.flush();
            let arrived: Vec<_> = front.received().into_iter().map(|frame| frame.bytes).collect();
            prop_assert!(arrived == expected);
        }
        front.finish(queue);
    }
}
