//! Several queue pairs and their control queue, both halves in one process: pairs that come and go under traffic,
//! steering, hash reports and coalescing.

mod common;

use std::collections::HashMap;
use std::sync::Arc;

use common::{
    BORDER, BUFFERS, END, GSO, Guest, Mode, PLAIN, Piece, Raw, device_map, device_ring, payload, readable,
    received, writable,
};
use proptest::prelude::*;
use ringferry_memory::{Area, GuestMemory};
use ringferry_packet::flow::{HashTypes, PacketHash, RssHasher, SYMMETRIC_KEY, flow_hash};
use ringferry_packet::frame::Burst;
use ringferry_packet::testing::Packet;
use ringferry_packet::vnet::Header;
use ringferry_ring::Fault;
use ringferry_virtio_net::config::{HashConfig, HashLimits, NetConfig};
use ringferry_virtio_net::control::{Coalesce, Command, ERR, OK};
use ringferry_virtio_net::device::{self, Coalescer, FlowTable, Notify, Settings, Steering};
use ringferry_virtio_net::driver::{Arena, Channels, Controlq};
use ringferry_virtio_net::{Features, MAX_FRAME, MIN_FRAME};

const MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
const PAIRS: u16 = 4;
const BASE: Features = Features::VERSION_1.union(Features::MRG_RXBUF).union(Features::EVENT_IDX);

/// A UDP frame of a flow, with a number behind its header.
fn frame(flow: u16, number: u32) -> Vec<u8> {
    let payload = [&number.to_be_bytes()[..], &[0; 18]].concat();
    let [high, low] = flow.to_be_bytes();
    let mut packet = Packet { ports: [high, low, 0, 80], ..Packet::plain(false, false, payload) };
    packet.addresses[..8].copy_from_slice(&[10, 0, 0, 2, 10, 0, 0, 1]);
    packet.partial()
}

/// A frame of the same flow in the other direction.
fn reply(flow: u16, number: u32) -> Vec<u8> {
    let mut frame = frame(flow, number);
    frame[26..34].rotate_left(4);
    frame[34..38].rotate_left(2);
    frame
}

/// The flow of a frame that was received, and its number.
fn read(frame: &[u8]) -> (u16, u32) {
    let number = frame[42..46].try_into().unwrap();
    (u16::from_be_bytes([frame[34], frame[35]]), u32::from_be_bytes(number))
}

/// A control queue between both halves, and what the driver has set.
struct Control {
    driver: Controlq,
    device: device::Controlq<Area>,
    memory: Arc<GuestMemory>,
    settings: Settings,
}

impl Control {
    fn new(features: Features) -> Self {
        let mut arena = Arena::new(Controlq::arena_bytes()).unwrap();
        let (queue, driver) = Controlq::new(&mut arena, features).unwrap();
        let memory = device_map(&arena);
        let device = device::Controlq::new(device_ring(&memory, &queue, features));
        Self { driver, device, memory, settings: Settings::new(features, MAC, PAIRS) }
    }

    /// The driver sends a command, the device serves it, and the driver has its answer.
    fn command(&mut self, command: &Command) -> bool {
        self.driver.submit(command).unwrap();
        self.device.poll(&self.memory, &mut self.settings);
        self.driver.poll().unwrap()
    }
}

/// A guest of several pairs, and the device that serves it.
struct Rig {
    guests: Vec<Guest>,
    control: Control,
    channels: Channels,
    flows: Arc<FlowTable>,
    steering: Steering,
    now: u64,
}

impl Rig {
    fn new(features: Features) -> Self {
        let features = features | BASE;
        let net = NetConfig { mac: MAC, status: 1, max_virtqueue_pairs: PAIRS, mtu: 1500 };
        // The configuration that the driver reads.
        let config = HashConfig::from_bytes(&HashConfig::new(net, HashLimits::DEVICE).to_bytes());
        let control = Control::new(features);
        let flows = Arc::new(FlowTable::default());
        let guest = || Guest::new(features, 64, Mode::Mergeable, PLAIN);
        let mut guests: Vec<Guest> = std::iter::repeat_with(guest).take(PAIRS.into()).collect();
        guests[0].pair.refill();
        let steering = control.settings.steering(Arc::clone(&flows));
        let channels = Channels::new(features, &config, &SYMMETRIC_KEY);
        Self { guests, control, channels, flows, steering, now: 1_000_000 }
    }

    /// Sends the command of a change that has begun, and does what the answer says. Buffers come before the
    /// announcement.
    fn carry_out(&mut self, command: &Command) -> bool {
        for guest in &mut self.guests[..self.channels.receive().into()] {
            guest.pair.refill();
        }
        let done = self.control.command(command);
        self.steering = self.control.settings.steering(Arc::clone(&self.flows));
        self.channels.answered(done);
        done
    }

    fn set_pairs(&mut self, pairs: u16) {
        let command = self.channels.set_pairs(pairs).unwrap();
        assert!(self.carry_out(&command));
        assert_eq!(self.channels.pairs(), pairs);
    }

    /// The guest sends a frame on a pair, which the device takes and learns from.
    fn send(&mut self, pair: u16, frame: &[u8]) {
        assert!(pair < self.channels.transmit());
        let guest = &mut self.guests[usize::from(pair)];
        guest.pair.reclaim();
        guest.send(&Header::default(), frame);
        guest.pair.transmitq.flush();
        let memory = Arc::clone(&guest.memory);
        let mut burst = Burst::new();
        assert_eq!(guest.device_tx.poll(&memory, 32, &mut burst), 1);
        for frame in burst.frames() {
            self.steering.learn(flow_hash(frame.prefix()), pair, self.now);
        }
        guest.device_tx.complete();
    }

    /// The device delivers a frame; returns the pair it went to, and the hash.
    fn deliver(&mut self, frame: &[u8]) -> Option<(u16, PacketHash)> {
        let (pair, hash) = self.steering.choose(&frame[..frame.len().min(64)], self.now);
        let guest = &mut self.guests[usize::from(pair?)];
        let (first, rest) = frame.split_at(frame.len().min(64));
        let mut memory = guest.memory.translator();
        guest.device_rx.deliver_hashed(&mut memory, Header::default(), hash, first, &[rest.into()]).unwrap();
        guest.device_rx.flush();
        Some((pair?, hash))
    }

    /// All that the guest has received: pair, frame and reported hash.
    fn receive(&mut self) -> Vec<(u16, Vec<u8>, Option<u32>)> {
        let mut all = Vec::new();
        for (pair, guest) in (0..).zip(&mut self.guests) {
            for chain in guest.keep(usize::MAX) {
                all.push((pair, received(&chain).frame, chain.hash));
                guest.recycle(chain);
            }
        }
        for guest in &mut self.guests[..self.channels.receive().into()] {
            guest.pair.refill();
        }
        all
    }

    fn finish(mut self) {
        for guest in &mut self.guests {
            guest.pair.refill();
        }
        self.guests.into_iter().for_each(Guest::finish);
    }
}

#[test]
fn clause_5_1_6_5_6_2_one_pair_until_the_driver_asks_for_more() {
    let mut rig = Rig::new(Features::MQ | Features::CTRL_VQ);
    for flow in 0..30 {
        assert_eq!(rig.deliver(&frame(flow, 0)), Some((0, PacketHash::NONE)));
    }
    assert!(rig.receive().iter().all(|(pair, ..)| *pair == 0));
    rig.set_pairs(4);
    let pairs: Vec<u16> = (0..30).map(|flow| rig.deliver(&frame(flow, 0)).unwrap().0).collect();
    assert!((0..4).all(|pair| pairs.contains(&pair)), "{pairs:?}");
    let mut seen: Vec<_> = rig.receive().into_iter().map(|(pair, frame, _)| (read(&frame).0, pair)).collect();
    seen.sort_unstable();
    assert_eq!(seen, (0..30).zip(pairs).collect::<Vec<_>>());
    rig.finish();
}

#[test]
fn clause_5_1_6_5_6_replies_arrive_on_the_pair_that_sent() {
    let mut rig = Rig::new(Features::MQ | Features::CTRL_VQ);
    rig.set_pairs(4);
    for flow in 0..40 {
        rig.send(flow % 4, &reply(flow, 0));
        assert_eq!(rig.deliver(&frame(flow, 0)).unwrap().0, flow % 4);
    }
    // The sender has moved; nothing of the flow is under way.
    rig.receive();
    rig.now += 1000;
    rig.send(3, &reply(0, 1));
    assert_eq!(rig.deliver(&frame(0, 1)).unwrap().0, 3);
    assert_eq!(rig.receive().len(), 1);
    rig.finish();
}

#[test]
fn clause_5_1_6_5_6_1_a_refused_number_of_pairs_leaves_the_old_one() {
    let mut rig = Rig::new(Features::MQ | Features::CTRL_VQ);
    rig.set_pairs(3);
    for pairs in [0, 5, 0x8000, u16::MAX] {
        assert!(rig.channels.set_pairs(pairs).is_err(), "the driver does not ask");
        assert!(!rig.control.command(&Command::QueuePairs(pairs)), "and the device refuses");
        assert_eq!(rig.control.settings.pairs, 3);
    }
    // A device that is being reset refuses what is good.
    rig.control.settings.begin_reset();
    let command = rig.channels.set_pairs(1).unwrap();
    assert!(!rig.carry_out(&command));
    assert_eq!((rig.channels.pairs(), rig.channels.transmit(), rig.channels.receive()), (3, 3, 3));
    assert_eq!(rig.steering.ready(), [0, 1, 2]);
}

/// 1 to 4 and back a thousand times with packets under way: none is lost, none overtakes another of its flow,
/// nothing leaks.
#[test]
fn pairs_that_come_and_go_under_traffic_lose_nothing() {
    for features in [Features::MQ, Features::MULTIQUEUE] {
        let mut rig = Rig::new(features | Features::CTRL_VQ);
        let mut sent = 0u32;
        let mut last = HashMap::new();
        let mut got = 0;
        for round in 0..1000u32 {
            let flows = (0..8).map(|flow| flow * 7 + 1);
            for flow in flows.clone() {
                rig.now += 100;
                rig.send((flow + round as u16) % rig.channels.transmit(), &reply(flow, 0));
                sent += 1;
                assert!(rig.deliver(&frame(flow, sent)).unwrap().0 < rig.channels.receive());
            }
            // Between the command and its answer packets go on to arrive.
            let command = rig.channels.set_pairs(1 + (round * 5 % 7 % 4) as u16).unwrap();
            for guest in &mut rig.guests[..rig.channels.receive().into()] {
                guest.pair.refill();
            }
            rig.control.driver.submit(&command).unwrap();
            for flow in flows {
                rig.send((flow + round as u16) % rig.channels.transmit(), &reply(flow, 0));
                sent += 1;
                assert!(rig.deliver(&frame(flow, sent)).unwrap().0 < rig.channels.receive());
            }
            rig.control.device.poll(&rig.control.memory, &mut rig.control.settings);
            rig.steering = rig.control.settings.steering(Arc::clone(&rig.flows));
            let done = rig.control.driver.poll().unwrap();
            assert!(done);
            rig.channels.answered(done);
            rig.now += 1000;
            let received = rig.receive();
            got += received.len();
            let mut of_queue = HashMap::new();
            let mut packets = Vec::new();
            for (pair, frame, _) in received {
                let (flow, number) = read(&frame);
                assert!(of_queue.insert((pair, flow), number).is_none_or(|before| before < number));
                packets.push((flow, number));
            }
            // Queues are emptied one after the other, so that only rounds are compared across them.
            packets.sort_unstable();
            for (flow, number) in packets {
                assert!(last.insert(flow, number).is_none_or(|before| before < number));
            }
        }
        assert_eq!(got, sent as usize);
        rig.finish();
    }
}

#[test]
fn clause_5_1_6_5_7_2_rss_puts_packets_where_the_table_says_and_reports_hashes() {
    let mut rig = Rig::new(Features::MULTIQUEUE);
    rig.set_pairs(4);
    assert!(rig.steering.is_rss());
    let hasher = RssHasher::new(HashTypes::SHORT, &SYMMETRIC_KEY);
    for table in [None, Some(vec![3, 1]), Some(vec![2]), Some((0..128).map(|entry| 3 - entry / 32).collect())]
    {
        let command = rig.channels.set_table(table.clone()).unwrap();
        assert!(rig.carry_out(&command));
        let table = table.unwrap_or_else(|| (0..128).map(|entry| entry % 4).collect::<Vec<u16>>());
        for flow in 0..60 {
            // The pair on which the guest sends does not matter.
            rig.send(flow % 4, &reply(flow, 0));
            let hash = hasher.hash(&frame(flow, 0));
            let pair = table[hash.value as usize % table.len()];
            assert_eq!(rig.deliver(&frame(flow, 0)), Some((pair, hash)));
            let expected = (pair, frame(flow, 0), Some(hash.value));
            assert_eq!(rig.receive(), [expected], "{flow}");
        }
        // ARP has no hash: the default queue.
        let mut arp = frame(0, 0);
        arp[13] = 6;
        assert_eq!(rig.deliver(&arp), Some((0, PacketHash::NONE)));
        assert_eq!(rig.receive(), [(0, arp, None)]);
    }
    rig.finish();
}

#[test]
fn clause_5_1_6_5_6_4_hashes_are_reported_with_automatic_steering() {
    let mut rig = Rig::new(Features::MQ | Features::CTRL_VQ | Features::HASH_REPORT);
    rig.set_pairs(2);
    rig.deliver(&frame(1, 0));
    assert_eq!(rig.receive()[0].2, None, "nothing is hashed before the driver says so");
    let start = rig.channels.start().unwrap();
    assert!(rig.control.command(&start));
    rig.steering = rig.control.settings.steering(Arc::clone(&rig.flows));
    let hash = RssHasher::new(HashTypes::SHORT, &SYMMETRIC_KEY).hash(&frame(2, 0));
    rig.send(1, &reply(2, 0));
    assert_eq!(rig.deliver(&frame(2, 0)), Some((1, hash)));
    assert_eq!(rig.receive(), [(1, frame(2, 0), hash.get())]);
    rig.set_pairs(1);
    assert_eq!(rig.deliver(&frame(2, 0)), Some((0, hash)), "a change of pairs does not switch reports off");
    rig.receive();
    rig.finish();
}

/// 5.1.6: headers of 20 bytes on all queues, whatever the rest of the layout.
#[test]
fn clause_5_1_6_long_headers_carry_every_size_in_every_mode() {
    let rings = [Features::empty(), Features::IN_ORDER, Features::RING_PACKED];
    for mode in Mode::ALL {
        for (ring, indirect) in rings.into_iter().flat_map(|ring| [(ring, false), (ring, true)]) {
            let offloads = Features::GUEST_CSUM | Features::CSUM | Features::HOST_TSO4;
            let mut features = mode.with(ring | Features::VERSION_1 | Features::HASH_REPORT | offloads);
            features.set(Features::INDIRECT_DESC, indirect);
            let (mut from, mut to) =
                (Guest::new(features, 64, mode, PLAIN), Guest::new(features, 64, mode, PLAIN));
            for (number, len) in (1..).zip([14, 60, 64, 65, 1514, 4076, 4077, 9014, MAX_FRAME]) {
                if len > mode.max_frame() {
                    continue;
                }
                to.pair.refill();
                from.pair.reclaim();
                let mut room = 0;
                let posted = to.room();
                let buffers = posted.iter().take_while(|bytes| {
                    let before = room;
                    room += **bytes;
                    before < 20 + len
                });
                let buffers = buffers.count() as u16;
                let header = if len >= 1514 { GSO } else { Header::default() };
                let bytes = payload(number, len);
                from.send(&header, &bytes);
                from.pair.transmitq.flush();
                let memory = Arc::clone(&from.memory);
                let mut burst = Burst::new();
                assert_eq!(from.device_tx.poll(&memory, 1, &mut burst), 1);
                let [frame] = burst.frames() else { panic!("{:?}", from.device_tx.rejected()) };
                let hash = PacketHash { value: 0x1234_5600 + number as u32, report: number as u16 % 11 };
                let (first, rest) = (frame.prefix(), burst.rest(frame));
                let mut translator = to.memory.translator();
                to.device_rx.deliver_hashed(&mut translator, frame.header, hash, first, rest).unwrap();
                to.device_rx.flush();
                from.device_tx.complete();
                let chains = to.keep(2);
                let [chain] = &chains[..] else { panic!("{mode:?} {len}") };
                let packet = received(chain);
                assert_eq!(packet.header, Header { num_buffers: buffers, ..header }, "{mode:?} {len}");
                assert!(packet.frame == bytes, "{mode:?} {len}");
                assert_eq!(chain.hash, (1..=9).contains(&hash.report).then_some(hash.value));
                chains.into_iter().for_each(|chain| to.recycle(chain));
            }
            from.finish();
            to.finish();
        }
    }
}

/// 2.7.4.1: a driver may cut the long header anywhere, and what it leaves in the hash is ignored.
#[test]
fn clause_2_7_4_1_long_headers_may_be_cut_anywhere() {
    let features = Features::VERSION_1 | Features::HASH_REPORT;
    let bytes = [&Header::default().to_bytes()[..], &[0xee; 8], &payload(1, 60)].concat();
    for cut in 1..24 {
        for second in cut..24 {
            let mut raw = Raw::new(16);
            let mut queue = device::Transmitq::new(raw.device(features), features);
            let pieces = raw.scatter(BUFFERS, &[&bytes[..cut], &bytes[cut..second], &bytes[second..]]);
            raw.chain(&pieces);
            let memory = Arc::clone(&raw.memory);
            let mut burst = Burst::new();
            queue.poll(&memory, 1, &mut burst);
            let [frame] = burst.frames() else { panic!("{cut} {second}") };
            let mut flat = Vec::new();
            burst.flatten(frame, &mut flat);
            assert_eq!((frame.header, flat), (Header::default(), payload(1, 60)));
        }
    }
    // A frame of 13 bytes behind it.
    let mut raw = Raw::new(16);
    let mut queue = device::Transmitq::new(raw.device(features), features);
    raw.write(BUFFERS, &bytes[..33]);
    raw.chain(&[readable(BUFFERS, 33)]);
    let memory = Arc::clone(&raw.memory);
    let mut burst = Burst::new();
    assert_eq!((queue.poll(&memory, 1, &mut burst), burst.len(), queue.rejected().too_short), (1, 0, 1));
}

/// A packet of every length up to the shortest frame behind a header of 20 bytes, in one descriptor and in two: where a header of 12 bytes is taken for
/// the whole of it, the last eight bytes become the frame's first.
#[test]
fn cve_2023_6693_a_header_with_a_hash_report_takes_its_20_bytes_and_the_frame_begins_behind_them() {
    let features = Features::VERSION_1 | Features::HASH_REPORT;
    let frame = payload(1, MIN_FRAME);
    let bytes = [&Header::default().to_bytes()[..], &[0xee; 8], &frame].concat();
    for len in 1..=bytes.len() {
        for cut in [0, 12.min(len - 1)] {
            let mut raw = Raw::new(16);
            let mut queue = device::Transmitq::new(raw.device(features), features);
            let parts = [&bytes[..cut], &bytes[cut..len]];
            let pieces = raw.scatter(BUFFERS, if cut == 0 { &parts[1..] } else { &parts });
            let head = raw.chain(&pieces);
            let memory = Arc::clone(&raw.memory);
            let mut burst = Burst::new();
            assert_eq!(queue.poll(&memory, 1, &mut burst), 1);
            let frames = burst.frames().iter().map(|frame| {
                let mut flat = Vec::new();
                burst.flatten(frame, &mut flat);
                (frame.header, flat)
            });
            let whole = usize::from(len == bytes.len());
            assert_eq!(frames.collect::<Vec<_>>(), vec![(Header::default(), frame.clone()); whole], "{len}");
            assert_eq!(queue.rejected().too_short, 1 - whole as u64, "{len} {cut}");
            queue.complete();
            assert_eq!(raw.used(), [(u32::from(head), 0)]);
        }
    }
}

#[test]
fn clause_5_1_6_5_10_coalescing_is_set_and_asked_for_queue_by_queue() {
    let mut control = Control::new(BASE | Features::MULTIQUEUE);
    let limits = |max_packets| Coalesce { max_packets, max_usecs: 100 };
    assert!(control.command(&Command::QueuePairs(2)));
    assert!(control.command(&Command::CoalesceReceive(limits(8))));
    assert!(control.command(&Command::CoalesceQueue(3, limits(4))));
    for (queue, expected) in [(0, limits(8)), (1, Coalesce::default()), (2, limits(8)), (3, limits(4))] {
        assert!(control.command(&Command::QueryQueue(queue)));
        assert_eq!(control.driver.result(), Some(expected), "{queue}");
        assert_eq!(control.settings.coalesce(queue), expected);
    }
    for queue in [4, 8, u16::MAX] {
        assert!(!control.command(&Command::QueryQueue(queue)), "{queue}");
        assert_eq!(control.driver.result(), None);
        assert!(!control.command(&Command::CoalesceQueue(queue, limits(1))));
    }
    let mut plain = Control::new(BASE | Features::CTRL_VQ | Features::MQ);
    assert!(!plain.command(&Command::CoalesceReceive(limits(8))), "not negotiated");
    assert!(!plain.command(&Command::QueryQueue(0)));
}

/// A driver that sleeps gets, with 8 packets to a notification, an eighth of the notifications, in
/// time.
#[test]
fn clause_5_1_6_5_10_1_a_sleeping_driver_is_called_as_seldom_as_it_asked() {
    for event_idx in [true, false] {
        let mut features = BASE;
        features.set(Features::EVENT_IDX, event_idx);
        for (limits, expected) in [(Coalesce::default(), 64), (Coalesce { max_packets: 8, max_usecs: 50 }, 8)]
        {
            let mut guest = Guest::new(features, 128, Mode::Mergeable, PLAIN);
            guest.pair.refill();
            let mut coalescer = Coalescer::new(limits);
            let (mut calls, mut timer, mut seen) = (0, None, 0);
            let mut deliver = |now: u64, guest: &mut Guest, timer: &mut Option<u64>| {
                guest.deliver(Header::default(), &payload(now, 60)).unwrap();
                let wanted = guest.device_rx.flush();
                let call = coalescer.used(now, 1, wanted);
                *timer = if let Notify::At(at) = call { Some(at) } else { None };
                call == Notify::Now
            };
            assert!(!guest.pair.receiveq.driver().ring().enable_calls());
            for now in 0..64 {
                if deliver(now, &mut guest, &mut timer) {
                    calls += 1;
                    // The driver wakes up, takes what there is, and sleeps again.
                    seen += guest.receive().len();
                    guest.pair.refill();
                    assert!(!guest.pair.receiveq.driver().ring().enable_calls());
                }
            }
            assert_eq!((calls, seen, timer), (expected, 64, None), "{limits:?}");
            // One packet more: at once, or when its time has come.
            let at_once = deliver(100, &mut guest, &mut timer);
            assert_eq!((at_once, timer), if limits.is_on() { (false, Some(150)) } else { (true, None) });
            if let Some(at) = timer {
                assert_eq!(coalescer.poll(at - 1), Notify::At(at));
                assert_eq!(coalescer.poll(at), Notify::Now);
            }
            assert_eq!(guest.receive().len(), 1);
            // A driver that polls is not called at all.
            guest.pair.refill();
            guest.pair.disable_calls();
            for now in 200..220 {
                guest.deliver(Header::default(), &payload(now, 60)).unwrap();
                let wanted = guest.device_rx.flush();
                assert_eq!(coalescer.used(now, 1, wanted && !event_idx), Notify::No);
            }
            guest.receive();
            guest.finish();
        }
    }
}

/// Address of acknowledgements, among canaries.
const ANSWER: u64 = END - 64;

#[test]
fn a_result_goes_where_there_is_room_and_nowhere_else() {
    let command = Command::QueryQueue(1).encode();
    let limits = Coalesce { max_packets: 0x0403_0201, max_usecs: 0x0807_0605 };
    let read = readable(BUFFERS, command.len());
    let serve = |pieces: &[Piece]| {
        let mut raw = Raw::new(16);
        raw.write(BUFFERS, &command);
        raw.write(ANSWER, &[0xa5; 64]);
        let mut queue = device::Controlq::new(raw.device(Features::VERSION_1));
        let mut settings = Settings::new(Features::all(), MAC, 1);
        assert!(settings.apply(Command::CoalesceTransmit(limits)));
        raw.chain(pieces);
        let memory = Arc::clone(&raw.memory);
        queue.poll(&memory, &mut settings);
        let used = raw.used().first().map(|(_, len)| *len);
        (used, raw.read(ANSWER, 64), raw.read(BORDER - 8, 16), queue.ring().fault())
    };
    let answer = [OK, 1, 2, 3, 4, 5, 6, 7, 8];
    // In one piece, with more room than needed; cut anywhere; with empty buffers between.
    let (used, bytes, _, _) = serve(&[read, writable(ANSWER, 60)]);
    assert_eq!((used, &bytes[..10]), (Some(9), &[&answer[..], &[0xa5]].concat()[..]));
    for cut in 1..9 {
        let pieces = [
            read,
            (u64::MAX, 0, true),
            writable(ANSWER, cut),
            (0, 0, true),
            writable(ANSWER + cut as u64, 9 - cut),
        ];
        let (used, bytes, _, fault) = serve(&pieces);
        assert_eq!((used, &bytes[..9], bytes[9], fault), (Some(9), &answer[..], 0xa5, None), "{cut}");
    }
    // Across regions.
    for before in 1..8 {
        let (used, _, bytes, _) = serve(&[read, writable(BORDER - before, 9)]);
        let at = 8 - before as usize;
        assert_eq!((used, &bytes[at..at + 9]), (Some(9), &answer[..]));
    }
    // No room for the result: an error, and one byte.
    for room in 1..9 {
        let (used, bytes, _, fault) = serve(&[read, writable(ANSWER, room)]);
        assert_eq!((used, bytes[0], bytes[1], fault), (Some(1), ERR, 0xa5, None), "{room}");
    }
    // Outside memory.
    for pieces in [[writable(ANSWER, 1), writable(END, 8)], [writable(ANSWER, 1), writable(END - 4, 8)]] {
        let (used, _, _, fault) = serve(&[&[read][..], &pieces].concat());
        assert_eq!((used, fault), (None, Some(Fault::Unusable)));
    }
}

/// A device may acknowledge a command and not have written its result.
#[test]
fn hostile_device_short_results_are_not_believed() {
    let features = BASE - Features::EVENT_IDX;
    for len in [0, 1, 5, 8, 9, u32::MAX] {
        let mut arena = Arena::new(Controlq::arena_bytes()).unwrap();
        let (queue, mut driver) = Controlq::new(&mut arena, features).unwrap();
        let memory = device_map(&arena);
        let mut ring = device_ring(&memory, &queue, features);
        driver.submit(&Command::QueryQueue(0)).unwrap();
        let mut chains = ringferry_ring::Chains::new();
        ring.take(1, &mut memory.translator(), &mut chains);
        let chain = chains.chain(0);
        let [ack, result] = chains.writable(&chain) else { panic!("acknowledgement and result") };
        memory.translator().write(ack.addr, 1).unwrap().copy_from(&[OK]);
        memory.translator().write(result.addr, 8).unwrap().copy_from(&[1; 8]);
        ring.complete(chain.done(len));
        ring.publish();
        let good = len >= 9;
        // A length beyond the buffers may also break the ring.
        match driver.poll() {
            Some(done) => assert_eq!((done, driver.result().is_some()), (good, good), "{len}"),
            None => assert!(len > 9 && driver.fault().is_some(), "{len}"),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Commands in any order and range, frames of any flow: a refused command changes nothing, and
    /// every frame arrives on a queue that is in use, with the hash that the settings select.
    #[test]
    fn any_commands_keep_frames_on_queues_in_use(
        steps in proptest::collection::vec((0u8..6, 0u16..6, 0u16..40, any::<u16>()), 1..60),
        mq: bool, rss: bool, report: bool,
    ) {
        let mut features = Features::CTRL_VQ;
        features.set(Features::MQ, mq);
        features.set(Features::RSS, rss);
        features.set(Features::HASH_REPORT, report);
        let mut rig = Rig::new(features);
        for guest in &mut rig.guests {
            guest.pair.refill();
        }
        for (step, small, flow, any) in steps {
            rig.now += u64::from(any);
            let key = vec![any as u8; usize::from(any % 50)];
            let types = u32::from(any) >> 6;
            let command = match step {
                0 => Command::QueuePairs(small),
                1 => Command::Hash { types, key },
                2 => {
                    let table = (0..1 << (any % 9)).map(|entry| (entry * small) % 6).collect();
                    let rss = ringferry_virtio_net::control::Rss { types, unclassified: small, table, max_tx: small, key };
                    Command::Rss(rss)
                }
                3 => {
                    rig.steering.learn(flow_hash(&reply(flow, 0)), small, rig.now);
                    continue;
                }
                _ => {
                    let frame = frame(flow, any.into());
                    let (pair, hash) = rig.deliver(&frame).expect("the device's own settings are consistent");
                    prop_assert!(pair < rig.control.settings.pairs);
                    let reported = hash.get().filter(|_| report);
                    prop_assert_eq!(rig.receive(), [(pair, frame, reported)]);
                    for guest in &mut rig.guests {
                        guest.pair.refill();
                    }
                    continue;
                }
            };
            let mut model = rig.control.settings.clone();
            let before = format!("{model:?}");
            let done = rig.control.command(&command);
            prop_assert_eq!(done, model.apply(command));
            let after = format!("{:?}", rig.control.settings);
            prop_assert!(done || after == before);
            prop_assert_eq!(after, format!("{model:?}"));
            rig.steering = rig.control.settings.steering(Arc::clone(&rig.flows));
        }
        rig.finish();
    }
}
