//! The driver half against the device half: what one guest sends is what the other receives.

mod common;

use std::collections::VecDeque;
use std::sync::Arc;

use common::{GSO, Guest, Received, buffers_for, forward, payload};
use proptest::prelude::*;
use ringferry_packet::frame::Burst;
use ringferry_packet::vnet::Header;
use ringferry_virtio_net::device::Refused;
use ringferry_virtio_net::driver::RxMode;
use ringferry_virtio_net::{Features, MAX_FRAME};

const SMALL: RxMode = RxMode::Small { mtu: 1500 };
const MODES: [RxMode; 4] = [RxMode::Mergeable, RxMode::Big, SMALL, RxMode::Small { mtu: 9000 }];

/// Smallest frame, smallest on a wire, around the prefix that is copied, MTU-sized, jumbo, GSO.
const SIZES: [usize; 9] = [14, 60, 63, 64, 65, 1514, 9014, 65_550, MAX_FRAME];

/// Every kind of ring.
const RINGS: [Features; 4] = [
    Features::empty(),
    Features::IN_ORDER,
    Features::RING_PACKED,
    Features::RING_PACKED.union(Features::IN_ORDER),
];

fn features(mode: RxMode, event_idx: bool, indirect: bool, ring: Features) -> Features {
    let mut features = ring | Features::VERSION_1 | Features::CSUM | Features::GUEST_CSUM;
    features.set(Features::MRG_RXBUF, mode == RxMode::Mergeable);
    features.set(Features::GUEST_TSO4, mode == RxMode::Big);
    features.set(Features::EVENT_IDX, event_idx);
    features.set(Features::INDIRECT_DESC, indirect);
    features
}

fn pair(mode: RxMode, size: u16) -> (Guest, Guest) {
    let features = features(mode, true, false, Features::empty());
    let (from, mut to) = (Guest::new(features, size, mode), Guest::new(features, size, mode));
    to.rx.refill();
    (from, to)
}

fn fits(mode: RxMode, len: usize) -> bool {
    mode == RxMode::Mergeable || Header::LEN + len <= mode.buffer_len() as usize
}

/// 5.1.6.4.1 (num_buffers, also 1 when MRG_RXBUF is not negotiated) and byte-exact carriage.
#[test]
fn clause_5_1_6_4_1_every_size_arrives_as_it_was_sent() {
    for mode in MODES {
        for (event_idx, indirect) in [(false, false), (false, true), (true, false), (true, true)] {
            for (size, ring) in [32, 256].into_iter().flat_map(|size| RINGS.map(|ring| (size, ring))) {
                let features = features(mode, event_idx, indirect, ring);
                assert!(RxMode::of(features, 1500) == mode || matches!(mode, RxMode::Small { .. }));
                let mut from = Guest::new(features, size, mode);
                let mut to = Guest::new(features, size, mode);
                for (number, len) in (0..).zip(SIZES) {
                    let header = if len >= 1514 { GSO } else { Header::default() };
                    let frame = payload(number, len);
                    to.rx.refill();
                    from.send(&header, &frame);
                    from.tx.publish();
                    let answers = forward(&mut from, &mut to, 32);
                    let received = to.receive();
                    if fits(mode, len) {
                        let num_buffers = buffers_for(mode, len) as u16;
                        assert_eq!(answers, [Ok(())], "{mode:?} {len}");
                        let header = Header { num_buffers, ..header };
                        assert!(received == [Received { header, frame }], "{mode:?} {len}");
                    } else {
                        assert_eq!((&answers[..], received.len()), (&[Err(Refused::TooBig)][..], 0));
                    }
                }
                assert_eq!(to.rx.errors().length, 0);
                from.assert_nothing_leaked();
                to.assert_nothing_leaked();
            }
        }
    }
}

/// A legacy header has no num_buffers without MRG_RXBUF (5.1.6.1).
#[test]
fn clause_5_1_6_1_legacy_header_of_10_bytes() {
    let legacy = Features::CSUM | Features::GUEST_CSUM;
    let (mut from, mut to) = (Guest::new(legacy, 8, SMALL), Guest::new(legacy, 8, SMALL));
    to.rx.refill();
    let frame = payload(1, 100);
    from.send(&Header { flags: 1, csum_start: 34, csum_offset: 16, ..Header::default() }, &frame);
    from.tx.publish();
    assert_eq!(forward(&mut from, &mut to, 8), [Ok(())]);
    let mut seen = Vec::new();
    to.rx.receive(8, |packet| {
        seen.resize(packet.pieces[0].len(), 0);
        packet.pieces[0].copy_to(&mut seen);
        assert_eq!((packet.len, packet.header.flags, packet.header.csum_start), (100, 1, 34));
    });
    assert_eq!(seen[10..], frame);
}

/// What a driver leaves in fields it does not use does not reach another guest, nor does its
/// num_buffers (5.1.6.2).
#[test]
fn clause_5_1_6_2_unused_header_fields_stay_behind() {
    for mode in [RxMode::Mergeable, SMALL] {
        let (mut from, mut to) = pair(mode, 8);
        let noise = Header { flags: 0xfe, hdr_len: 7, gso_size: 8, csum_start: 9, ..Header::default() };
        from.send(&Header { csum_offset: 10, num_buffers: 11, ..noise }, &payload(0, 60));
        from.tx.publish();
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
        let features = features(RxMode::Mergeable, event_idx, false, ring);
        let mut from = Guest::new(features, 16, RxMode::Mergeable);
        let mut to = Guest::new(features, 16, RxMode::Mergeable);
        let len = |number: u64| if number % 64 == 63 { 5000 } else { 14 + (number as usize * 37) % 200 };
        let (mut sent, mut came) = (0, 0);
        // Receive buffers the device has filled and the driver has not collected.
        let mut filled = 0;
        // Who is awake: the device (on the sender's ring), the receiver, the sender.
        let (mut device, mut receiver, mut sender) = (true, true, true);
        to.rx.refill();
        let mut kicks = 0;
        while came < PACKETS {
            assert!(device || receiver || sender, "everybody sleeps at {sent}, {came}");
            if sender {
                from.tx.ring().disable_calls();
                from.tx.reclaim();
                while sent < PACKETS && from.tx.send_frame(&Header::default(), &payload(sent, len(sent))) {
                    sent += 1;
                    if sent % 5 == 0 {
                        break;
                    }
                }
                let kick = from.tx.publish();
                kicks += u64::from(kick);
                device |= kick;
                sender = sent % 7 == 0 || from.tx.ring().enable_calls();
            }
            if device {
                from.device_tx.ring().disable_kicks();
                let memory = Arc::clone(&from.memory);
                let mut burst = Burst::new();
                // No more than the receiver surely holds: this test is not about drops.
                let room = (to.rx.ring().in_flight() - filled) / 2;
                from.device_tx.poll(&memory, usize::from(room), &mut burst);
                to.device_rx.expect(burst.len());
                for frame in burst.frames() {
                    let (first, rest) = (frame.prefix(), burst.rest(frame));
                    let mut translator = to.memory.translator();
                    to.device_rx.deliver(&mut translator, frame.header, first, rest).unwrap();
                    filled += buffers_for(RxMode::Mergeable, frame.len as usize) as u16;
                }
                receiver |= to.device_rx.flush();
                sender |= from.device_tx.complete();
                device = room < 2 || from.device_tx.ring().enable_kicks();
            }
            if receiver {
                to.rx.ring().disable_calls();
                for packet in to.receive_some(3) {
                    assert_eq!(packet.frame, payload(came, len(came)));
                    filled -= packet.header.num_buffers;
                    came += 1;
                }
                to.rx.refill();
                receiver = to.rx.ring().enable_calls();
            }
        }
        assert!(kicks < sent, "a device that polls is not kicked for every packet");
        from.assert_nothing_leaked();
        to.assert_nothing_leaked();
    }
}

#[test]
fn no_buffers_refuses_the_frame_and_spends_nothing() {
    let (_, mut to) = pair(RxMode::Mergeable, 4);
    let (large, small) = (payload(1, 9000), payload(2, 60));
    assert_eq!(to.deliver(Header::default(), &large), Ok(()));
    // One buffer is left: not enough for another large one, and it stays for the small one.
    assert_eq!(to.deliver(Header::default(), &large), Err(Refused::NoBuffers));
    assert_eq!(to.deliver(Header::default(), &large), Err(Refused::NoBuffers));
    assert_eq!(to.deliver(Header::default(), &small), Ok(()));
    assert_eq!(to.deliver(Header::default(), &small), Err(Refused::NoBuffers));
    to.device_rx.flush();
    let frames: Vec<_> = to.receive().into_iter().map(|packet| packet.frame).collect();
    assert!(frames == [large, small]);
    to.assert_nothing_leaked();
    // All four are there again, for as much as four hold and no more.
    assert_eq!(to.deliver(Header::default(), &payload(3, 4 * 4096 - 11)), Err(Refused::NoBuffers));
    assert_eq!(to.deliver(Header::default(), &payload(3, 4 * 4096 - 12)), Ok(()));
    to.device_rx.flush();
    assert_eq!(to.receive()[0].frame, payload(3, 4 * 4096 - 12));
}

#[test]
fn too_big_for_a_small_buffer_spends_nothing() {
    for mode in [SMALL, RxMode::Small { mtu: 9000 }] {
        let len = mode.buffer_len() as usize - Header::LEN + 1;
        let (_, mut to) = pair(mode, 2);
        assert_eq!(to.deliver(Header::default(), &payload(0, len)), Err(Refused::TooBig));
        assert_eq!(to.deliver(Header::default(), &payload(1, len - 1)), Ok(()));
        assert_eq!(to.deliver(Header::default(), &payload(0, len)), Err(Refused::TooBig));
        assert_eq!(to.deliver(Header::default(), &payload(2, 14)), Ok(()));
        to.device_rx.flush();
        let frames: Vec<_> = to.receive().into_iter().map(|packet| packet.frame).collect();
        assert!(frames == [payload(1, len - 1), payload(2, 14)]);
        to.assert_nothing_leaked();
    }
}

#[test]
fn flush_gives_chains_back_that_were_taken_ahead() {
    let (_, mut to) = pair(RxMode::Mergeable, 8);
    for number in 0..40 {
        // Far more than follows.
        to.device_rx.expect(64);
        to.deliver(Header::default(), &payload(number, 60)).unwrap();
        to.device_rx.flush();
        let spent = number as u16 + 1;
        let ring = to.device_rx.ring();
        assert_eq!((ring.base(), ring.used_index()), (spent, spent), "GET_VRING_BASE tells the truth");
        assert_eq!(to.receive()[0].frame, payload(number, 60));
        // Not refilled until all eight are spent: what was given back must be found again.
        if number % 8 == 7 {
            assert_eq!(to.deliver(Header::default(), &[0; 60]), Err(Refused::NoBuffers));
            to.device_rx.flush();
            to.rx.refill();
        }
    }
    to.assert_nothing_leaked();
}

#[test]
fn nothing_is_shown_before_flush_and_all_of_it_after() {
    let (_, mut to) = pair(RxMode::Mergeable, 64);
    to.deliver(Header::default(), &payload(0, 60)).unwrap();
    to.deliver(Header::default(), &payload(1, 20_000)).unwrap();
    assert_eq!(to.receive(), []);
    to.device_rx.flush();
    assert_eq!(to.receive().len(), 2);
    assert_eq!(to.rx.errors().length, 0);
}

#[test]
fn a_sender_has_its_slots_back_when_the_burst_is_completed_and_not_before() {
    let (mut from, _) = pair(SMALL, 4);
    for number in 0..4 {
        from.send(&Header::default(), &payload(number, 60));
    }
    assert!(!from.tx.send_frame(&Header::default(), &[0; 60]), "four slots, four packets");
    from.tx.publish();
    let memory = Arc::clone(&from.memory);
    let mut burst = Burst::new();
    assert_eq!(from.device_tx.poll(&memory, 3, &mut burst), 3);
    assert_eq!(from.tx.reclaim(), 0);
    from.device_tx.complete();
    assert_eq!(from.tx.reclaim(), 3);
    assert_eq!(from.device_tx.poll(&memory, 3, &mut burst), 1);
    assert_eq!(burst.len(), 4, "a poll appends");
    from.device_tx.complete();
    from.assert_nothing_leaked();
}

/// 2.7.7 and 2.7.10: a notification is asked for when it is wanted, and not otherwise.
#[test]
fn clause_2_7_7_notifications_follow_the_wish() {
    for (event_idx, ring) in [false, true].into_iter().flat_map(|idx| RINGS.map(|ring| (idx, ring))) {
        let features = features(RxMode::Mergeable, event_idx, false, ring);
        // A packed ring can say "none at all"; a split one's event word always names an entry.
        let first = event_idx && !ring.contains(Features::RING_PACKED);
        let (mut from, mut to) =
            (Guest::new(features, 64, RxMode::Mergeable), Guest::new(features, 64, RxMode::Mergeable));
        let send = |from: &mut Guest| {
            from.send(&Header::default(), &payload(0, 60));
            from.tx.publish()
        };
        // The event words of a fresh ring ask for the first notification of all; let it pass.
        assert_eq!(send(&mut from), first);
        assert!(!from.tx.publish(), "nothing new to tell");
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
        from.tx.reclaim();
        assert!(!from.tx.ring().enable_calls());
        send(&mut from);
        assert!(take_all(&mut from), "the driver sleeps");

        // The receive side: buffers kick, packets call.
        assert_eq!(to.rx.refill(), first);
        assert!(!to.rx.refill(), "nothing new");
        let deliver = |to: &mut Guest| {
            to.deliver(Header::default(), &payload(0, 60)).unwrap();
            to.device_rx.flush()
        };
        assert_eq!(deliver(&mut to), first);
        assert!(!to.device_rx.flush(), "nothing new");
        assert!(!deliver(&mut to), "the driver has not asked");
        assert!(to.rx.ring().enable_calls(), "there are packets: do not sleep");
        assert_eq!(to.receive().len(), 2);
        assert!(!to.rx.ring().enable_calls());
        assert!(deliver(&mut to), "the driver sleeps");
        to.receive();
        // A device that waits for buffers is told of them.
        while to.deliver(Header::default(), &payload(0, 60)).is_ok() {}
        to.device_rx.flush();
        assert!(!to.device_rx.ring().enable_kicks());
        to.receive();
        assert!(to.rx.refill());
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
        1 => Just(Step::Refill),
        1 => Just(Step::Reclaim),
    ];
    proptest::collection::vec(step, 1..200)
}

/// The two guests, and where each packet is according to the rules.
struct Model {
    from: Guest,
    to: Guest,
    mode: RxMode,
    size: usize,
    next: u64,
    sent: VecDeque<Vec<u8>>,
    published: VecDeque<Vec<u8>>,
    polled: VecDeque<Vec<u8>>,
    delivered: VecDeque<Vec<u8>>,
    shown: VecDeque<Vec<u8>>,
    /// Slots with the sender.
    slots: usize,
    /// Slots completed and not yet reclaimed.
    completed: usize,
    /// Taken in the last poll.
    taken: usize,
    /// Receive buffers posted and not spent.
    posted: usize,
    /// Receive buffers with the receiver.
    free: usize,
}

impl Model {
    fn new(mode: RxMode, event_idx: bool, size: u16, ring: Features) -> Self {
        let features = features(mode, event_idx, false, ring);
        Self {
            from: Guest::new(features, size, mode),
            to: Guest::new(features, size, mode),
            mode,
            size: size.into(),
            next: 0,
            sent: VecDeque::new(),
            published: VecDeque::new(),
            polled: VecDeque::new(),
            delivered: VecDeque::new(),
            shown: VecDeque::new(),
            slots: size.into(),
            completed: 0,
            taken: 0,
            posted: 0,
            free: size.into(),
        }
    }

    fn step<'m>(&mut self, step: &Step, memory: &'m ringferry_memory::GuestMemory, burst: &mut Burst<'m>) {
        let at = burst.len() - self.polled.len();
        match *step {
            Step::Send(len) => {
                let frame = payload(self.next, len);
                let sent = self.from.tx.send_frame(&Header::default(), &frame);
                assert_eq!(sent, self.slots > 0);
                if sent {
                    self.next += 1;
                    self.slots -= 1;
                    self.sent.push_back(frame);
                }
            }
            Step::Publish => {
                self.from.tx.publish();
                self.published.append(&mut self.sent);
            }
            Step::Poll(max) => {
                // A burst stays until it is delivered: nothing of it may be lost.
                if self.polled.is_empty() {
                    self.from.device_tx.complete();
                    self.completed += self.taken;
                    *burst = Burst::reuse(std::mem::take(burst));
                    self.taken = self.from.device_tx.poll(memory, max, burst);
                    assert_eq!(self.taken, max.min(self.published.len()));
                    self.polled.extend(self.published.drain(..self.taken));
                    self.to.device_rx.expect(self.taken);
                }
            }
            Step::Deliver(max) => {
                let mut translator = self.to.memory.translator();
                for frame in burst.frames().iter().skip(at).take(max) {
                    let need = buffers_for(self.mode, frame.len as usize);
                    let expect = if self.posted == 0 {
                        Err(Refused::NoBuffers)
                    } else if !fits(self.mode, frame.len as usize) {
                        Err(Refused::TooBig)
                    } else if self.posted < need {
                        Err(Refused::NoBuffers)
                    } else {
                        Ok(())
                    };
                    let (first, rest) = (frame.prefix(), burst.rest(frame));
                    let answer = self.to.device_rx.deliver(&mut translator, frame.header, first, rest);
                    assert_eq!(answer, expect);
                    match answer {
                        Ok(()) => {
                            self.posted -= need;
                            self.delivered.extend(self.polled.pop_front());
                        }
                        // What will never fit is dropped, what does not fit now waits.
                        Err(Refused::NoBuffers) if need <= self.size => break,
                        Err(_) => drop(self.polled.pop_front()),
                    }
                }
            }
            Step::Flush => {
                self.to.device_rx.flush();
                self.shown.append(&mut self.delivered);
            }
            Step::Receive(max) => {
                let packets = self.to.receive_some(max);
                assert_eq!(packets.len(), max.min(self.shown.len()));
                for packet in packets {
                    let buffers = buffers_for(self.mode, packet.frame.len());
                    assert_eq!(usize::from(packet.header.num_buffers), buffers);
                    assert!(Some(packet.frame) == self.shown.pop_front(), "another packet");
                    self.free += buffers;
                }
            }
            Step::Refill => {
                self.to.rx.refill();
                self.posted += std::mem::take(&mut self.free);
            }
            Step::Reclaim => {
                assert_eq!(self.from.tx.reclaim(), self.completed);
                self.slots += std::mem::take(&mut self.completed);
            }
        }
    }

    fn finish<'m>(&mut self, memory: &'m ringferry_memory::GuestMemory, burst: &mut Burst<'m>) {
        let round = [
            Step::Publish,
            Step::Poll(usize::MAX),
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
        self.from.assert_nothing_leaked();
        self.to.assert_nothing_leaked();
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(192))]

    #[test]
    fn any_interleaving_keeps_every_packet_in_order(
        steps in steps(),
        mode in proptest::sample::select(&MODES[..]),
        event_idx in any::<bool>(),
        size in proptest::sample::select(&[1u16, 2, 8, 32][..]),
        ring in proptest::sample::select(&RINGS[..]),
    ) {
        let mut model = Model::new(mode, event_idx, size, ring);
        let memory = Arc::clone(&model.from.memory);
        let mut burst = Burst::new();
        for step in &steps {
            model.step(step, &memory, &mut burst);
        }
        model.finish(&memory, &mut burst);
    }
}
