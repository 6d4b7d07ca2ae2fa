//! The driver half against the device half: a guest receives exactly the frames that another sends.

mod common;

use std::collections::VecDeque;
use std::sync::Arc;

use common::{GSO, Guest, Mode, PLAIN, Received, TCP_OVER_IPV4, buffers_for, forward, payload, received};
use proptest::prelude::*;
use ringferry_memory::WriteSlice;
use ringferry_nic::rx::{PolicyKind, RxConfig};
use ringferry_packet::buffer::Chain;
use ringferry_packet::frame::Burst;
use ringferry_packet::vnet::Header;
use ringferry_ring::Chains;
use ringferry_virtio_net::device::Refused;
use ringferry_virtio_net::{Features, MAX_FRAME};

const SMALL: Mode = Mode::Small { mtu: 1500 };
const MODES: [Mode; 4] = [Mode::Mergeable, Mode::Big, SMALL, Mode::Small { mtu: 9000 }];

/// Smallest frame, smallest on a wire, around the prefix that is copied, MTU-sized, jumbo, GSO.
const SIZES: [usize; 9] = [14, 60, 63, 64, 65, 1514, 9014, 65_550, MAX_FRAME];

/// Every kind of ring that can be negotiated.
const RINGS: [Features; 4] = [
    Features::empty(),
    Features::IN_ORDER,
    Features::RING_PACKED,
    Features::RING_PACKED.union(Features::IN_ORDER),
];

fn features(mode: Mode, event_idx: bool, indirect: bool, ring: Features) -> Features {
    let offloads = Features::CSUM | Features::HOST_TSO4 | Features::GUEST_CSUM;
    let mut features = mode.with(ring | Features::VERSION_1 | offloads);
    features.set(Features::EVENT_IDX, event_idx);
    features.set(Features::INDIRECT_DESC, indirect);
    features
}

fn pair(mode: Mode, size: u16) -> (Guest, Guest) {
    let features = features(mode, true, false, Features::empty());
    let (from, mut to) = (Guest::new(features, size, mode, PLAIN), Guest::new(features, size, mode, PLAIN));
    to.pair.refill();
    (from, to)
}

/// Sends a frame from one guest to the other: it arrives as it was sent, or is refused, or is counted, as the
/// mode says.
fn carry(from: &mut Guest, to: &mut Guest, mode: Mode, number: u64, len: usize) {
    let header = if len >= 1514 { GSO } else { Header::default() };
    let frame = payload(number, len);
    from.pair.reclaim();
    to.pair.refill();
    let need = buffers_for(mode, len, to.room());
    let errors = to.pair.receiveq.stats().rx_length_errors;
    from.send(&header, &frame);
    from.pair.transmitq.flush();
    let answers = forward(from, to, 32);
    let packets = to.receive();
    let came = match need {
        Ok(count) if len <= mode.max_frame() => {
            let header = Header { num_buffers: count as u16, ..header };
            assert!(packets == [Received { header, frame }], "{mode:?} {len}");
            true
        }
        _ => {
            assert!(packets.is_empty());
            false
        }
    };
    assert_eq!(answers, [need.map(|_| ())], "{mode:?} {len}");
    let dropped = u64::from(need.is_ok() && !came);
    assert_eq!(to.pair.receiveq.stats().rx_length_errors, errors + dropped);
    // Only what is longer than the mode allows may be refused or dropped.
    assert!(came || len > mode.max_frame(), "{mode:?} {len}");
}

/// 5.1.6.4.1 (num_buffers, also 1 when MRG_RXBUF is not negotiated) and byte-exact carriage.
#[test]
fn clause_5_1_6_4_1_every_size_arrives_as_it_was_sent() {
    for mode in MODES {
        for (event_idx, indirect) in [(false, false), (false, true), (true, false), (true, true)] {
            for (size, ring) in [32, 256].into_iter().flat_map(|size| RINGS.map(|ring| (size, ring))) {
                let features = features(mode, event_idx, indirect, ring);
                let mut from = Guest::new(features, size, mode, RxConfig::default());
                let mut to = Guest::new(features, size, mode, RxConfig::default());
                for (number, len) in (0..).zip(SIZES) {
                    carry(&mut from, &mut to, mode, number, len);
                }
                from.finish();
                to.finish();
            }
        }
    }
}

/// Every buffer policy receives every length from 14 bytes to the largest, from frame to frame and
/// while buffers grow and shrink.
#[test]
fn clause_5_1_6_3_every_policy_and_mode_receives_every_length() {
    // Long runs, so that averages follow; then every length of a walk through all of them.
    let runs = [(600, 60), (600, 1514), (100, MAX_FRAME), (600, 300)];
    let runs = runs.into_iter().flat_map(|(count, len)| std::iter::repeat_n(len, count));
    let walk = (0..80).map(|i| 14 + i * 831 % (MAX_FRAME - 13)).chain(SIZES);
    let lengths: Vec<usize> = runs.chain(walk).collect();
    for (mode, policy) in MODES.into_iter().flat_map(|mode| PolicyKind::ALL.map(|policy| (mode, policy))) {
        for (copy_break, ring) in
            [0, 128, 256].into_iter().zip(RINGS.into_iter().cycle().skip(policy as usize))
        {
            let rx = RxConfig { policy, copy_break, ..RxConfig::default() };
            let features = features(mode, true, true, ring);
            let (mut from, mut to) = (Guest::new(features, 64, mode, rx), Guest::new(features, 64, mode, rx));
            for (number, len) in (0..).zip(&lengths) {
                carry(&mut from, &mut to, mode, number, *len);
            }
            let stats = to.pair.receiveq.stats();
            let short = |len: &&usize| **len <= copy_break;
            assert_eq!(stats.copied, lengths.iter().filter(short).count() as u64, "{mode:?} {rx:?}");
            let fit = |len: &&usize| **len <= mode.max_frame();
            assert_eq!(stats.packets, lengths.iter().filter(fit).count() as u64);
            from.finish();
            to.finish();
        }
    }
}

/// 5.1.6.3.1: without MRG_RXBUF every buffer of a driver that takes segments of 64 KiB holds one.
#[test]
fn clause_5_1_6_3_1_big_buffers_hold_the_largest_packet() {
    for (policy, ring) in PolicyKind::ALL.into_iter().zip(RINGS) {
        for (size, indirect) in [(4, false), (4, true), (64, false), (64, true), (256, true)] {
            let features = features(Mode::Big, true, indirect, ring);
            let mut guest = Guest::new(
                features,
                size,
                Mode::Big,
                RxConfig { policy, copy_break: 0, ..RxConfig::default() },
            );
            guest.pair.refill();
            let room = guest.room();
            assert!(
                !room.is_empty() && room.iter().all(|bytes| *bytes >= Header::LEN + MAX_FRAME),
                "{room:?}"
            );
            for number in 0..room.len() as u64 {
                guest.deliver(GSO, &payload(number, MAX_FRAME)).unwrap();
            }
            guest.device_rx.flush();
            for (number, packet) in (0..).zip(guest.receive()) {
                assert!(packet.frame == payload(number, MAX_FRAME));
            }
            assert_eq!(guest.pair.receiveq.stats().packets, room.len() as u64);
            guest.finish();
        }
    }
}

/// A legacy header has no num_buffers without MRG_RXBUF (5.1.6.1).
#[test]
fn clause_5_1_6_1_legacy_header_of_10_bytes() {
    let legacy = Features::CSUM | Features::GUEST_CSUM;
    for copy_break in [0, 128] {
        let rx = RxConfig { copy_break, ..PLAIN };
        let (mut from, mut to) = (Guest::new(legacy, 8, SMALL, rx), Guest::new(legacy, 8, SMALL, rx));
        for len in [60, 100, 1000] {
            let frame = payload(1, len);
            to.pair.refill();
            from.send(&Header { flags: 1, csum_start: 34, csum_offset: 16, ..Header::default() }, &frame);
            from.pair.transmitq.flush();
            assert_eq!(forward(&mut from, &mut to, 8), [Ok(())]);
            let packets = to.receive();
            let header = packets[0].header;
            assert_eq!((header.flags, header.csum_start, header.csum_offset), (1, 34, 16));
            assert!(packets.len() == 1 && packets[0].frame == frame);
        }
        from.finish();
        to.finish();
    }
}

/// The content of header fields that a driver does not use does not reach another guest, nor does
/// its num_buffers (5.1.6.2).
#[test]
fn clause_5_1_6_2_unused_header_fields_stay_behind() {
    for mode in [Mode::Mergeable, SMALL] {
        let (mut from, mut to) = pair(mode, 8);
        let noise = Header { flags: 0xfe, hdr_len: 7, gso_size: 8, csum_start: 9, ..Header::default() };
        from.send(&Header { csum_offset: 10, num_buffers: 11, ..noise }, &payload(0, 60));
        from.pair.transmitq.flush();
        assert_eq!(forward(&mut from, &mut to, 8), [Ok(())]);
        assert_eq!(to.receive()[0].header, Header { num_buffers: 1, ..Header::default() });
    }
}

/// A side that sleeps is woken by the notification that the other says is wanted, over more packets
/// than a 16-bit index counts.
#[test]
fn indexes_wrap_and_no_wake_up_is_lost() {
    const PACKETS: u64 = 70_000;
    for (event_idx, ring) in [false, true].into_iter().flat_map(|idx| RINGS.map(|ring| (idx, ring))) {
        let features = features(Mode::Mergeable, event_idx, false, ring);
        let mut from = Guest::new(features, 16, Mode::Mergeable, RxConfig::default());
        // Buffers of at least a page: 5000 bytes take two at most.
        let mut to = Guest::new(features, 16, Mode::Mergeable, RxConfig { copy_break: 128, ..PLAIN });
        let len = |number: u64| if number % 64 == 63 { 5000 } else { 14 + (number as usize * 37) % 200 };
        let (mut sent, mut came) = (0, 0);
        // True while awake: the device (on the sender's ring), the receiver, the sender.
        let (mut device, mut receiver, mut sender) = (true, true, true);
        to.pair.refill();
        let mut kicks = 0;
        while came < PACKETS {
            assert!(device || receiver || sender, "everybody sleeps at {sent}, {came}");
            if sender {
                from.pair.transmitq.driver().ring().disable_calls();
                from.pair.reclaim();
                while sent < PACKETS && from.pair.send_frame(&Header::default(), &payload(sent, len(sent))) {
                    sent += 1;
                    if sent % 5 == 0 {
                        break;
                    }
                }
                let kick = from.pair.transmitq.flush();
                kicks += u64::from(kick);
                device |= kick;
                sender = sent % 7 == 0 || from.pair.transmitq.driver().ring().enable_calls();
            }
            if device {
                from.device_tx.ring().disable_kicks();
                let memory = Arc::clone(&from.memory);
                let mut burst = Burst::new();
                // No more than the receiver surely holds: this test is not about drops.
                let room = to.room().len() / 2;
                from.device_tx.poll(&memory, room, &mut burst);
                to.device_rx.expect(burst.len());
                for frame in burst.frames() {
                    let (first, rest) = (frame.prefix(), burst.rest(frame));
                    let mut translator = to.memory.translator();
                    to.device_rx.deliver(&mut translator, frame.header, first, rest).unwrap();
                }
                receiver |= to.device_rx.flush();
                sender |= from.device_tx.complete();
                device = room < 2 || from.device_tx.ring().enable_kicks();
            }
            if receiver {
                to.pair.receiveq.driver().ring().disable_calls();
                for packet in to.receive_some(3) {
                    assert_eq!(packet.frame, payload(came, len(came)));
                    came += 1;
                }
                to.pair.refill();
                receiver = to.pair.receiveq.driver().ring().enable_calls();
            }
        }
        assert!(kicks < sent, "a device that polls is not kicked for every packet");
        from.finish();
        to.finish();
    }
}

#[test]
fn cve_2022_26353_no_buffers_refuses_the_frame_and_spends_nothing() {
    let (_, mut to) = pair(Mode::Mergeable, 32);
    let (large, small) = (payload(1, 9000), payload(2, 60));
    let mut room = VecDeque::from(to.room());
    let mut expect = Vec::new();
    while let Ok(need) = buffers_for(Mode::Mergeable, large.len(), room.iter().copied()) {
        assert_eq!(to.deliver(Header::default(), &large), Ok(()));
        room.drain(..need);
        expect.push(large.clone());
    }
    // The buffers left are not enough for another large frame, and stay for small ones.
    assert!(!room.is_empty() && room.len() < 3);
    assert_eq!(to.deliver(Header::default(), &large), Err(Refused::NoBuffers));
    for _ in room {
        assert_eq!(to.deliver(Header::default(), &large), Err(Refused::NoBuffers));
        assert_eq!(to.deliver(Header::default(), &small), Ok(()));
        expect.push(small.clone());
    }
    assert_eq!(to.deliver(Header::default(), &small), Err(Refused::NoBuffers));
    to.device_rx.flush();
    let frames: Vec<_> = to.receive().into_iter().map(|packet| packet.frame).collect();
    assert!(frames == expect);
    to.assert_all_home();
    // All are there again, for as much as they hold and no more; and no driver takes a frame that long.
    let all: usize = to.room().iter().sum();
    assert_eq!(to.deliver(Header::default(), &vec![0; all - 11]), Err(Refused::NoBuffers));
    assert_eq!(to.deliver(Header::default(), &vec![0; all - 12]), Ok(()));
    to.device_rx.flush();
    assert_eq!((to.receive().len(), to.pair.receiveq.stats().rx_length_errors), (0, 1));
    to.finish();
}

#[test]
fn too_big_for_a_small_buffer_spends_nothing() {
    for mode in [SMALL, Mode::Small { mtu: 9000 }] {
        let (_, mut to) = pair(mode, 4);
        let longest = mode.max_frame();
        let too_big = |room: usize| payload(0, room - Header::LEN + 1);
        let room = to.room();
        assert_eq!(to.deliver(Header::default(), &too_big(room[0])), Err(Refused::TooBig));
        assert_eq!(to.deliver(Header::default(), &payload(1, longest)), Ok(()));
        assert_eq!(to.deliver(Header::default(), &too_big(room[1])), Err(Refused::TooBig));
        // There is room at the end of the buffer, but the driver expects no frame that long.
        assert_eq!(to.deliver(Header::default(), &payload(2, longest + 1)), Ok(()));
        assert_eq!(to.deliver(Header::default(), &payload(3, 14)), Ok(()));
        to.device_rx.flush();
        let frames: Vec<_> = to.receive().into_iter().map(|packet| packet.frame).collect();
        assert!(frames == [payload(1, longest), payload(3, 14)]);
        assert_eq!(to.pair.receiveq.stats().rx_length_errors, 1);
        to.finish();
    }
}

/// A caller that fills the next buffers before it delivers them finds its packet there, whole, and
/// no more buffers are consumed than it takes.
#[test]
fn a_packet_may_lie_in_its_place_before_it_is_delivered() {
    const HEAD: usize = 64;
    for (mode, ring) in MODES.into_iter().flat_map(|mode| RINGS.map(|ring| (mode, ring))) {
        let features = features(mode, true, false, ring);
        let mut to = Guest::new(features, 256, mode, PLAIN);
        to.pair.refill();
        let longest = mode.max_frame();
        for (number, len) in (0..).zip(SIZES.into_iter().filter(|len| *len <= longest)) {
            let frame = payload(number, len);
            let memory = Arc::clone(&to.memory);
            let mut room = Vec::new();
            assert!(to.device_rx.room(&mut memory.translator(), HEAD, longest, &mut room));
            assert!(room.iter().map(WriteSlice::len).sum::<usize>() >= longest - HEAD);
            let (first, rest) = frame.split_at(len.min(HEAD));
            let mut done = 0;
            let rest = room.iter().map(|piece| {
                let written = piece.copy_from(&rest[done..]);
                done += written;
                piece.as_read().first(written)
            });
            let rest: Vec<_> = rest.filter(|piece| !piece.is_empty()).collect();
            let delivered = to.device_rx.deliver(&mut memory.translator(), GSO, first, &rest);
            assert_eq!(delivered, Ok(()));
            to.device_rx.flush();
            let received = to.receive();
            assert!(received.len() == 1 && received[0].frame == frame, "{mode:?} {ring:?} {len}");
            to.pair.refill();
        }
        to.finish();
    }
}

#[test]
fn there_is_room_for_what_could_be_delivered_and_asking_breaks_nothing() {
    let (_, mut to) = pair(Mode::Mergeable, 32);
    let memory = Arc::clone(&to.memory);
    let all: usize = to.room().iter().sum();
    let room = |to: &mut Guest, most| to.device_rx.room(&mut memory.translator(), 64, most, &mut Vec::new());
    assert!(!room(&mut to, all - 11));
    assert!(room(&mut to, all - 12));
    assert_eq!(to.deliver(Header::default(), &payload(1, 60)), Ok(()));
    assert!(!room(&mut to, all - 12));
    to.device_rx.flush();
    assert_eq!(to.receive().len(), 1);
    to.finish();
}

#[test]
fn flush_gives_chains_back_that_were_taken_ahead() {
    let (_, mut to) = pair(Mode::Mergeable, 8);
    for number in 0..40 {
        // Far more than follows.
        to.device_rx.expect(64);
        to.deliver(Header::default(), &payload(number, 60)).unwrap();
        to.device_rx.flush();
        let spent = number as u16 + 1;
        let ring = to.device_rx.ring();
        assert_eq!((ring.base(), ring.used_index()), (spent, spent), "GET_VRING_BASE tells the truth");
        assert_eq!(to.receive()[0].frame, payload(number, 60));
        // The queue is not refilled until all eight are consumed, so buffers that were returned
        // must be found again.
        if number % 8 == 7 {
            assert_eq!(to.deliver(Header::default(), &[0; 60]), Err(Refused::NoBuffers));
            to.device_rx.flush();
            to.pair.refill();
        }
    }
    to.finish();
}

#[test]
fn nothing_is_shown_before_flush_and_all_of_it_after() {
    let (_, mut to) = pair(Mode::Mergeable, 64);
    to.deliver(Header::default(), &payload(0, 60)).unwrap();
    to.deliver(Header::default(), &payload(1, 20_000)).unwrap();
    assert_eq!(to.receive(), []);
    to.device_rx.flush();
    assert_eq!(to.receive().len(), 2);
    assert_eq!(to.pair.receiveq.stats().rx_length_errors, 0);
}

#[test]
fn a_sender_has_its_buffers_back_when_the_burst_is_completed_and_not_before() {
    let (mut from, _) = pair(SMALL, 4);
    for number in 0..4 {
        from.send(&Header::default(), &payload(number, 60));
    }
    assert!(!from.pair.send_frame(&Header::default(), &[0; 60]), "four entries, four packets");
    from.pair.transmitq.flush();
    let memory = Arc::clone(&from.memory);
    let mut burst = Burst::new();
    assert_eq!(from.device_tx.poll(&memory, 3, &mut burst), 3);
    assert_eq!(from.pair.reclaim(), 0);
    from.device_tx.complete();
    assert_eq!(from.pair.reclaim(), 3);
    assert_eq!(from.device_tx.poll(&memory, 3, &mut burst), 1);
    assert_eq!(burst.len(), 4, "a poll appends");
    from.device_tx.complete();
    from.finish();
}

/// 2.7.7 and 2.7.10: a notification is asked for when it is wanted, and not otherwise.
#[test]
fn clause_2_7_7_notifications_follow_the_wish() {
    for (event_idx, ring) in [false, true].into_iter().flat_map(|idx| RINGS.map(|ring| (idx, ring))) {
        let features = features(Mode::Mergeable, event_idx, false, ring);
        // A packed ring can say "none at all"; a split one's event word always names an entry.
        let first = event_idx && !ring.contains(Features::RING_PACKED);
        let (mut from, mut to) = (
            Guest::new(features, 64, Mode::Mergeable, PLAIN),
            Guest::new(features, 64, Mode::Mergeable, PLAIN),
        );
        let send = |from: &mut Guest| {
            from.send(&Header::default(), &payload(0, 60));
            from.pair.transmitq.flush()
        };
        // The event words of a fresh ring ask for the first notification of all; let it pass.
        assert_eq!(send(&mut from), first);
        assert!(!from.pair.transmitq.flush(), "nothing new to tell");
        assert!(!send(&mut from), "the device has not asked");
        assert!(from.device_tx.ring().enable_kicks(), "there is work: do not sleep");
        let memory = Arc::clone(&from.memory);
        let take_all = |from: &mut Guest| {
            from.device_tx.poll(&memory, 64, &mut Burst::new());
            from.device_tx.complete()
        };
        assert_eq!(take_all(&mut from), first, "again the first of a fresh ring");
        assert!(!from.device_tx.ring().enable_kicks());
        assert!(send(&mut from), "the device sleeps");
        from.device_tx.ring().disable_kicks();
        assert!(!send(&mut from), "the device is awake");
        assert!(!take_all(&mut from), "the driver has not asked");
        from.pair.reclaim();
        assert!(!from.pair.transmitq.driver().ring().enable_calls());
        send(&mut from);
        assert!(take_all(&mut from), "the driver sleeps");

        // The receive side: buffers kick, packets call.
        assert_eq!(to.pair.refill(), first);
        assert!(!to.pair.refill(), "nothing new");
        let deliver = |to: &mut Guest| {
            to.deliver(Header::default(), &payload(0, 60)).unwrap();
            to.device_rx.flush()
        };
        assert_eq!(deliver(&mut to), first);
        assert!(!to.device_rx.flush(), "nothing new");
        assert!(!deliver(&mut to), "the driver has not asked");
        assert!(to.pair.receiveq.driver().ring().enable_calls(), "there are packets: do not sleep");
        assert_eq!(to.receive().len(), 2);
        assert!(!to.pair.receiveq.driver().ring().enable_calls());
        assert!(deliver(&mut to), "the driver sleeps");
        to.receive();
        // A device that waits for buffers is told of them.
        while to.deliver(Header::default(), &payload(0, 60)).is_ok() {}
        to.device_rx.flush();
        assert!(!to.device_rx.ring().enable_kicks());
        to.receive();
        assert!(to.pair.refill());
    }
}

/// A buffer of a packet that is sent.
#[derive(Clone, Copy, Debug)]
struct Piece {
    len: usize,
    /// Bytes that were taken off its front: where it begins in memory.
    pulled: usize,
    /// True if the buffer has no tail room.
    cut: bool,
    /// Somebody else has it as well.
    shared: bool,
}

fn pieces() -> impl Strategy<Value = Vec<Piece>> {
    let piece = || {
        let len = prop_oneof![4 => 1usize..64, 4 => 64usize..2000, 1 => 2000usize..20_000];
        let piece = (len, 0usize..200, any::<bool>(), proptest::bool::weighted(0.2));
        piece.prop_map(|(len, pulled, cut, shared)| Piece { len, pulled, cut, shared })
    };
    prop_oneof![proptest::collection::vec(piece(), 1..4), proptest::collection::vec(piece(), 1..=64)]
}

/// One guest that sends, and what its device is to find.
struct Shapes {
    guest: Guest,
    max_segs: u16,
    indirect: bool,
    sent: u64,
    under_way: VecDeque<Received>,
    /// The other owners of shared buffers, and what is in them.
    others: Vec<(Chain, Vec<u8>)>,
}

impl Shapes {
    fn new(size: u16, max_segs: u16, indirect: bool, ring: Features) -> Self {
        let features = features(Mode::Mergeable, true, indirect, ring) | Features::HOST_TSO4;
        let guest = Guest::segmented(features, size, Mode::Mergeable, PLAIN, max_segs);
        Self { guest, max_segs, indirect, sent: 0, under_way: VecDeque::new(), others: Vec::new() }
    }

    fn build(&mut self, pieces: &[Piece]) -> Option<(Chain, Vec<u8>)> {
        let mut all = Vec::new();
        let mut chain = Chain::default();
        for (at, piece) in (0..).zip(pieces) {
            let mut bytes = payload(self.sent << 8 | at, piece.pulled + piece.len);
            // All of it together is what `GSO` says that it is.
            for (offset, byte) in TCP_OVER_IPV4 {
                let offset = offset.checked_sub(all.len()).filter(|offset| *offset < piece.len);
                offset.into_iter().for_each(|offset| bytes[piece.pulled + offset] = byte);
            }
            let mut buf = self.guest.pair.pools.alloc(bytes.len())?;
            assert_eq!(buf.append(&bytes), bytes.len());
            buf.pull(piece.pulled);
            if piece.cut {
                drop(buf.split_off(piece.len));
            }
            if piece.shared {
                let other = Chain::from(buf.share());
                self.others.push((other, bytes[piece.pulled..].to_vec()));
            }
            all.extend(&bytes[piece.pulled..]);
            chain.push_back(buf);
        }
        Some((chain, all))
    }

    fn send(&mut self, pieces: &[Piece]) {
        let (mut chain, frame) = match self.build(pieces) {
            Some(built) => built,
            None => {
                self.drain();
                self.build(pieces).expect("the pools hold any packet")
            }
        };
        chain.header = if frame.len() >= 1514 { GSO } else { Header::default() };
        let header = chain.header;
        let pair = &mut self.guest.pair;
        if let Err(unsent) = pair.transmitq.send(chain, &mut pair.pools) {
            assert!(unsent.reason.is_retryable(), "{unsent}");
            assert!(unsent.chain.to_vec() == frame, "what is not sent comes back as it was");
            self.drain();
            let pair = &mut self.guest.pair;
            pair.transmitq.send(unsent.chain, &mut pair.pools).expect("an empty ring takes any packet");
        }
        self.sent += 1;
        self.under_way.push_back(Received { header, frame });
    }

    /// The device takes all that was sent.
    fn drain(&mut self) {
        self.guest.pair.transmitq.flush();
        let memory = Arc::clone(&self.guest.memory);
        let ring = self.guest.device_tx.ring();
        let mut chains = Chains::new();
        ring.take(usize::MAX, &mut memory.translator(), &mut chains);
        for chain in chains.iter() {
            assert!((1..=self.max_segs).contains(&chain.readable) && chain.writable == 0);
            assert!(!self.indirect || chain.slots == 1, "a table takes one entry");
        }
        ring.untake(chains.all());
        while !self.under_way.is_empty() {
            let mut burst = Burst::new();
            let taken = self.guest.device_tx.poll(&memory, usize::MAX, &mut burst);
            assert!((1..=self.under_way.len()).contains(&taken));
            assert_eq!(burst.len(), taken, "{:?}", self.guest.device_tx.rejected());
            for (frame, sent) in burst.frames().iter().zip(self.under_way.drain(..taken)) {
                let mut bytes = Vec::new();
                burst.flatten(frame, &mut bytes);
                assert_eq!(frame.header, sent.header);
                assert!(bytes == sent.frame, "{} bytes", bytes.len());
            }
            self.guest.device_tx.complete();
        }
        assert!(self.others.drain(..).all(|(other, bytes)| other.to_vec() == bytes));
        self.guest.pair.reclaim();
    }

    fn finish(mut self) {
        self.drain();
        let stats = self.guest.pair.transmitq.stats();
        assert_eq!((stats.packets(), stats.reclaimed, stats.dropped()), (self.sent, self.sent, 0));
        assert_eq!(stats.map.segments.iter().map(|(_, packets)| packets).sum::<u64>(), self.sent);
        assert!(stats.map.segments.iter().all(|(segments, _)| segments <= self.max_segs.into()));
        self.guest.finish();
    }
}

/// 2.7.5.3.1, 2.8.5: chains of one descriptor to as many as may be, and packets of more buffers than that.
#[test]
fn clause_2_7_5_3_1_packets_of_any_number_of_buffers_are_sent() {
    let piece = Piece { len: 300, pulled: 7, cut: false, shared: false };
    for (indirect, ring) in [false, true].into_iter().flat_map(|indirect| RINGS.map(|ring| (indirect, ring)))
    {
        for max_segs in [1, 2, 17, 32, 64] {
            let mut shapes = Shapes::new(64, max_segs, indirect, ring);
            for count in 1..=64 {
                shapes.send(&vec![piece; count]);
            }
            shapes.drain();
            let map = shapes.guest.pair.transmitq.stats().map;
            let direct = u64::from(max_segs);
            assert_eq!((map.direct, map.collapsed + map.defragged), (direct, 64 - direct));
            shapes.finish();
        }
    }
}

#[derive(Clone, Debug)]
enum Step {
    Send(usize),
    Publish,
    Poll(usize),
    Deliver(usize),
    Flush,
    Receive(usize),
    /// Like [`Step::Receive`], and the packets are kept for a while.
    Keep(usize),
    /// The oldest packets that are kept are recycled.
    Recycle(usize),
    /// The oldest packets that are kept are dropped, as by another thread.
    Drop(usize),
    Refill,
    Reclaim,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let len = prop_oneof![6 => 14usize..200, 2 => 200usize..5000, 1 => 5000usize..=MAX_FRAME];
    let step = prop_oneof![
        4 => len.prop_map(Step::Send),
        2 => Just(Step::Publish),
        2 => (1usize..12).prop_map(Step::Poll),
        3 => (1usize..12).prop_map(Step::Deliver),
        2 => Just(Step::Flush),
        2 => (1usize..12).prop_map(Step::Receive),
        1 => (1usize..12).prop_map(Step::Keep),
        1 => (1usize..12).prop_map(Step::Recycle),
        1 => (1usize..12).prop_map(Step::Drop),
        1 => Just(Step::Refill),
        1 => Just(Step::Reclaim),
    ];
    proptest::collection::vec(step, 1..200)
}

/// A packet that was delivered: its bytes, and the buffers that it takes.
type Delivered = (Vec<u8>, usize);

/// The two guests, and where each packet is according to the rules.
struct Model {
    from: Guest,
    to: Guest,
    mode: Mode,
    next: u64,
    sent: VecDeque<Vec<u8>>,
    published: VecDeque<Vec<u8>>,
    polled: VecDeque<Vec<u8>>,
    delivered: VecDeque<Delivered>,
    shown: VecDeque<Delivered>,
    kept: VecDeque<(Chain, Vec<u8>)>,
    /// Entries of the transmitq that are free.
    free: usize,
    /// Entries completed and not yet reclaimed.
    completed: usize,
    /// Taken in the last poll.
    taken: usize,
    /// Bytes of each receive buffer posted and not spent.
    posted: VecDeque<usize>,
    /// Packets longer than the mode allows: the driver drops them.
    too_long: u64,
}

impl Model {
    fn new(mode: Mode, event_idx: bool, size: u16, ring: Features, rx: RxConfig) -> Self {
        let features = features(mode, event_idx, false, ring);
        Self {
            from: Guest::new(features, size, mode, rx),
            to: Guest::new(features, size, mode, rx),
            mode,
            next: 0,
            sent: VecDeque::new(),
            published: VecDeque::new(),
            polled: VecDeque::new(),
            delivered: VecDeque::new(),
            shown: VecDeque::new(),
            kept: VecDeque::new(),
            free: size.into(),
            completed: 0,
            taken: 0,
            posted: VecDeque::new(),
            too_long: 0,
        }
    }

    fn step<'m>(&mut self, step: &Step, memory: &'m ringferry_memory::GuestMemory, burst: &mut Burst<'m>) {
        match *step {
            Step::Send(len) => {
                let frame = payload(self.next, len);
                let sent = self.from.pair.send_frame(&Header::default(), &frame);
                assert_eq!(sent, self.free > 0);
                if sent {
                    self.next += 1;
                    self.free -= 1;
                    self.sent.push_back(frame);
                }
            }
            Step::Publish => {
                self.from.pair.transmitq.flush();
                self.published.append(&mut self.sent);
            }
            Step::Poll(max) => {
                // A burst stays until it is delivered: nothing of it may be lost.
                if self.polled.is_empty() {
                    self.from.device_tx.complete();
                    self.completed += self.taken;
                    *burst = Burst::reuse(std::mem::take(burst));
                    self.taken = self.from.device_tx.poll(memory, max, burst);
                    // A burst may end before that if it is much memory; nothing is left for ever.
                    let most = max.min(self.published.len());
                    assert!(self.taken <= most && (self.taken > 0) == (most > 0));
                    self.polled.extend(self.published.drain(..self.taken));
                    self.to.device_rx.expect(self.taken);
                }
            }
            Step::Deliver(max) => self.deliver(max, burst),
            Step::Flush => {
                self.to.device_rx.flush();
                self.shown.append(&mut self.delivered);
            }
            Step::Receive(max) => {
                for chain in self.receive(max) {
                    self.to.recycle(chain.0);
                }
            }
            Step::Keep(max) => {
                let kept = self.receive(max);
                self.kept.extend(kept);
            }
            Step::Recycle(max) => {
                for (chain, frame) in self.kept.drain(..max.min(self.kept.len())) {
                    assert!(chain.to_vec() == frame, "a packet that is kept stays as it is");
                    self.to.recycle(chain);
                }
            }
            Step::Drop(max) => {
                for (chain, frame) in self.kept.drain(..max.min(self.kept.len())) {
                    assert!(chain.to_vec() == frame, "a packet that is kept stays as it is");
                }
            }
            Step::Refill => {
                let before = self.to.pair.receiveq.posted();
                self.to.pair.refill();
                let new = self.to.pair.receiveq.posted() - before;
                // The device may have taken those in front ahead of time.
                let room = self.to.room();
                self.posted.extend(&room[room.len() - new..]);
            }
            Step::Reclaim => {
                assert_eq!(self.from.pair.reclaim(), self.completed);
                self.free += std::mem::take(&mut self.completed);
            }
        }
    }

    fn deliver(&mut self, max: usize, burst: &Burst<'_>) {
        let at = burst.len() - self.polled.len();
        let mut translator = self.to.memory.translator();
        for frame in burst.frames().iter().skip(at).take(max) {
            let need = buffers_for(self.mode, frame.len as usize, self.posted.iter().copied());
            let (first, rest) = (frame.prefix(), burst.rest(frame));
            let answer = self.to.device_rx.deliver(&mut translator, frame.header, first, rest);
            assert_eq!(answer, need.map(|_| ()));
            match need {
                Ok(need) => {
                    self.posted.drain(..need);
                    self.delivered.extend(self.polled.pop_front().map(|frame| (frame, need)));
                }
                // A frame that can never fit is dropped, and one that does not fit now waits.
                Err(Refused::NoBuffers) => break,
                Err(_) => drop(self.polled.pop_front()),
            }
        }
    }

    fn receive(&mut self, max: usize) -> Vec<(Chain, Vec<u8>)> {
        let mut expect: Vec<_> = self.shown.drain(..max.min(self.shown.len())).collect();
        let all = expect.len();
        expect.retain(|(frame, _)| frame.len() <= self.mode.max_frame());
        self.too_long += (all - expect.len()) as u64;
        let chains = self.to.keep(max);
        assert_eq!(self.to.pair.receiveq.stats().rx_length_errors, self.too_long);
        assert_eq!(chains.len(), expect.len());
        let check = |(chain, (frame, need)): (Chain, Delivered)| {
            let packet = received(&chain);
            assert!(packet.frame == frame, "another packet");
            assert_eq!(usize::from(packet.header.num_buffers), need);
            (chain, frame)
        };
        chains.into_iter().zip(expect).map(check).collect()
    }

    fn finish<'m>(mut self, memory: &'m ringferry_memory::GuestMemory, burst: &mut Burst<'m>) {
        let round = [
            Step::Publish,
            Step::Poll(usize::MAX),
            Step::Recycle(usize::MAX),
            Step::Refill,
            Step::Deliver(usize::MAX),
            Step::Flush,
            Step::Receive(usize::MAX),
            Step::Reclaim,
        ];
        while self.sent.len() + self.published.len() + self.polled.len() + self.taken > 0 {
            round.iter().for_each(|step| self.step(step, memory, burst));
        }
        round.iter().for_each(|step| self.step(step, memory, burst));
        assert!(self.delivered.is_empty() && self.shown.is_empty());
        self.from.finish();
        self.to.finish();
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(192))]

    #[test]
    fn packets_of_any_shape_arrive_as_they_were_sent(
        packets in proptest::collection::vec(pieces(), 1..40),
        max_segs in proptest::sample::select(&[1u16, 2, 3, 8, 32][..]),
        size in proptest::sample::select(&[32u16, 64][..]),
        indirect in any::<bool>(),
        ring in proptest::sample::select(&RINGS[..]),
    ) {
        let mut shapes = Shapes::new(size, max_segs, indirect, ring);
        for mut pieces in packets {
            let mut left = MAX_FRAME;
            for piece in &mut pieces {
                piece.len = piece.len.min(left);
                left -= piece.len;
            }
            pieces.retain(|piece| piece.len > 0);
            // A packet shorter than an Ethernet header is not a frame.
            pieces[0].len = pieces[0].len.max(14);
            if left >= 14 {
                shapes.send(&pieces);
            }
        }
        shapes.finish();
    }

    #[test]
    fn any_interleaving_keeps_every_packet_in_order(
        steps in steps(),
        mode in proptest::sample::select(&MODES[..]),
        event_idx in any::<bool>(),
        size in proptest::sample::select(&[1u16, 2, 8, 32][..]),
        ring in proptest::sample::select(&RINGS[..]),
        policy in proptest::sample::select(&PolicyKind::ALL[..]),
        copy_break in proptest::sample::select(&[0, 128, 256][..]),
    ) {
        let size = size.max(mode.least());
        let mut model = Model::new(mode, event_idx, size, ring, RxConfig { policy, copy_break, fetch_frame: true });
        let memory = Arc::clone(&model.from.memory);
        let mut burst = Burst::new();
        for step in &steps {
            model.step(step, &memory, &mut burst);
        }
        model.finish(&memory, &mut burst);
    }
}
