//! The driver half against a device that lies about what it wrote.

mod common;

use std::sync::Arc;

use common::{INDIRECT, Mode, PLAIN, assert_pools_full, dismantle, payload, received};
use proptest::prelude::*;
use ringferry_memory::{Area, GuestMemory, Words};
use ringferry_nic::map::MapError;
use ringferry_nic::rx::{PolicyKind, RxConfig, RxQueue};
use ringferry_nic::tx::SendError;
use ringferry_packet::buffer::{Fragments, Pool, PoolLayout};
use ringferry_packet::vnet::Header;
use ringferry_ring::{Fault, part_bytes};
use ringferry_virtio_net::control::{Command, OK};
use ringferry_virtio_net::driver::{Arena, Controlq, Pair, PairConfig, Queue, RxRing};
use ringferry_virtio_net::{Features, MAX_FRAME, MIN_FRAME};

const SMALL: Mode = Mode::Small { mtu: 1500 };

/// Bytes of a segment of a buffer for the largest packet: a fifth of it, in whole cache lines.
const BIG_SEGMENT: u32 = ((MAX_FRAME + Header::LEN).div_ceil(5 * 64) * 64) as u32;

/// Bytes of each buffer of [`receiver`], however many segments it has.
const fn buffer_len(mode: Mode) -> u32 {
    match mode {
        Mode::Mergeable => 4096,
        Mode::Big => 5 * BIG_SEGMENT,
        // Header, Ethernet, a tag and the MTU, in whole cache lines.
        Mode::Small { .. } => 1536,
    }
}

/// A device that writes the used ring as the test says.
struct Liar {
    memory: Arc<GuestMemory>,
    size: u16,
    desc: Area,
    avail: Area,
    used: Area,
    taken: u16,
    next_used: u16,
}

impl Liar {
    fn new(arena: &Arena, queue: &Queue) -> Self {
        let area = |addr, len| arena.memory().area(addr, len).unwrap();
        let bytes = part_bytes(queue.size, false);
        Self {
            memory: Arc::clone(arena.memory()),
            size: queue.size,
            desc: area(queue.desc, bytes[0]),
            avail: area(queue.avail, bytes[1]),
            used: area(queue.used, bytes[2]),
            taken: 0,
            next_used: 0,
        }
    }

    /// The next chain that was made available.
    fn take(&mut self) -> Option<u16> {
        if self.taken == self.avail.load16_acquire(2) {
            return None;
        }
        let head = self.avail.load16(4 + 2 * usize::from(self.taken % self.size));
        self.taken = self.taken.wrapping_add(1);
        Some(head)
    }

    /// Writes into the first buffer of a chain.
    fn write(&self, head: u16, bytes: &[u8]) {
        let at = 16 * usize::from(head);
        let (mut addr, mut rest) = (self.desc.load64(at), self.desc.load64(at + 8));
        if (rest >> 32) as u16 & INDIRECT != 0 {
            let table = self.memory.area(addr, 16).unwrap();
            (addr, rest) = (table.load64(0), table.load64(8));
        }
        let piece = self.memory.translator().write(addr, rest as u32 as usize).unwrap();
        assert_eq!(piece.copy_from(bytes), bytes.len());
    }

    /// Says that a chain was used; shown by [`Liar::show`].
    fn complete(&mut self, id: u32, len: u32) {
        let at = 4 + 8 * usize::from(self.next_used % self.size);
        self.used.store32(at, id);
        self.used.store32(at + 4, len);
        self.next_used = self.next_used.wrapping_add(1);
    }

    fn show(&self) {
        self.used.store16_release(2, self.next_used);
    }

    /// Uses as many buffers as there are lengths for one packet, whose header says `num_buffers`.
    fn packet(&mut self, num_buffers: u16, lens: &[u32]) {
        for (i, len) in lens.iter().enumerate() {
            let head = self.take().expect("a posted buffer");
            if i == 0 {
                self.write(head, &Header { num_buffers, ..Header::default() }.to_bytes());
            }
            self.complete(head.into(), *len);
        }
        self.show();
    }
}

/// A pair whose receive buffers are all of [`buffer_len`], none in a chunk longer than the others, and the device
/// of its receiveq. All are posted.
fn exact(mode: Mode, buffers: u16, copy_break: usize) -> (Pair, Liar) {
    let rx = RxConfig { copy_break, ..PLAIN };
    // With indirect tables a buffer for the largest packet is several segments.
    let features = mode.with(Features::VERSION_1 | Features::INDIRECT_DESC);
    let config = config(mode, buffers, rx);
    let lead = 64 - HDR;
    let segment = if mode == Mode::Big { BIG_SEGMENT } else { buffer_len(mode) };
    // A ring full twice, four segments to a chunk.
    let count = (2 * u32::from(buffers) * buffer_len(mode)).div_ceil(4 * segment);
    let layout = PoolLayout::chunks(lead + 4 * segment, count, lead);
    let bytes = config.arena_bytes(features) + RxRing::arena_bytes(buffers) + layout.bytes() + 4096;
    let mut arena = Arena::new(bytes).unwrap();
    let mut pair = Pair::new(&mut arena, features, &config).unwrap();
    let at = arena.alloc(layout.bytes()).unwrap();
    let pool = Pool::new(arena.memory(), at, layout).unwrap();
    let (queue, ring) = RxRing::new(&mut arena, buffers, features, config.mtu).unwrap();
    pair.receiveq = RxQueue::attach(ring, Fragments::new(pool), rx).unwrap();
    pair.refill();
    assert_eq!(pair.receiveq.posted(), buffers.into());
    (pair, Liar::new(&arena, &queue))
}

fn config(mode: Mode, size: u16, rx: RxConfig) -> PairConfig {
    let mtu = if let Mode::Small { mtu } = mode { mtu } else { 1500 };
    PairConfig { receive: size, transmit: 4, mtu, rx, ..PairConfig::default() }
}

/// [`exact`], with every frame where it was received.
fn receiver(mode: Mode, buffers: u16) -> (Pair, Liar) {
    exact(mode, buffers, 0)
}

fn errors(pair: &Pair) -> u64 {
    pair.receiveq.stats().rx_length_errors
}

/// Lengths of the frames that come out. Each packet owns as much memory as it says, and every one that does
/// not come out is counted.
fn receive(pair: &mut Pair, max: usize) -> Vec<usize> {
    let before = errors(pair) as usize;
    let mut lens = Vec::new();
    let count = pair.receiveq.lend(max, &mut pair.pools, |chain, _| {
        lens.push(received(&chain).frame.len());
        Some(chain)
    });
    assert_eq!(count, lens.len() + errors(pair) as usize - before);
    lens
}

/// Every buffer is posted again.
fn assert_all_posted(pair: &mut Pair) {
    pair.refill();
    let posted = pair.receiveq.posted();
    let ring = pair.receiveq.driver().ring();
    assert_eq!((posted, usize::from(ring.in_flight())), (ring.size().into(), ring.size().into()));
    assert_eq!((pair.fault(), pair.receiveq.stats().unknown), (None, 0));
    assert_pools_full(&pair.pools);
}

const HDR: u32 = Header::LEN as u32;

/// 2.7.8.3: a driver must not read beyond the used length, nor beyond what it posted.
#[test]
fn clause_2_7_8_3_lengths_that_make_no_sense_are_counted_and_the_buffer_posted_again() {
    for mode in [Mode::Mergeable, Mode::Big, SMALL] {
        let limit = buffer_len(mode);
        let (mut rx, mut device) = receiver(mode, 32);
        let bad = [0, 1, HDR - 1, HDR, HDR + MIN_FRAME as u32 - 1, limit + 1, 0x7fff_ffff, u32::MAX];
        for (count, len) in (1..).zip(bad) {
            // A good packet before and behind: neither is lost.
            device.packet(1, &[100]);
            device.packet(1, &[len]);
            device.packet(1, &[200]);
            assert_eq!(receive(&mut rx, 8), [88, 188], "{mode:?} {len}");
            assert_eq!(errors(&rx), count);
            assert_all_posted(&mut rx);
        }
        device.packet(1, &[HDR + MIN_FRAME as u32]);
        let most = (limit as usize - Header::LEN).min(mode.max_frame());
        device.packet(1, &[HDR + most as u32]);
        assert_eq!(receive(&mut rx, 8), [MIN_FRAME, most]);
        assert_all_posted(&mut rx);
        dismantle(rx);
    }
}

#[test]
fn frames_beyond_the_largest_are_counted() {
    for mode in [Mode::Big, SMALL] {
        let (mut rx, mut device) = receiver(mode, 8);
        device.packet(1, &[HDR + mode.max_frame() as u32 + 1]);
        device.packet(1, &[buffer_len(mode)]);
        assert_eq!((receive(&mut rx, 8), errors(&rx)), (vec![], 2));
        assert_all_posted(&mut rx);
        dismantle(rx);
    }
    let mode = Mode::Mergeable;
    let (mut rx, mut device) = receiver(mode, 32);
    let last = (MAX_FRAME + Header::LEN - 16 * 4096) as u32;
    device.packet(17, &[&[4096; 16][..], &[last]].concat());
    assert_eq!(receive(&mut rx, 8), [MAX_FRAME]);
    assert_all_posted(&mut rx);
    device.packet(17, &[&[4096; 16][..], &[last + 1]].concat());
    assert_eq!(receive(&mut rx, 8), []);
    assert_all_posted(&mut rx);
    for count in [18, 19, 31, 32] {
        device.packet(count, &vec![4096; count.into()]);
        assert_eq!(receive(&mut rx, 8), []);
        assert_all_posted(&mut rx);
    }
    assert_eq!(errors(&rx), 5);
    dismantle(rx);
}

/// 5.1.6.4.1: num_buffers is what was used, all of it at once.
#[test]
fn clause_5_1_6_4_1_num_buffers_that_make_no_sense() {
    let cases: [(u16, &[u32]); 9] = [
        (0, &[100]),
        (0, &[4096]),
        (2, &[4096]),
        (3, &[4096, 4096]),
        (65_535, &[4096, 4096, 100]),
        (65_535, &[4096; 16]),
        // Lengths of later buffers.
        (2, &[4096, 4097]),
        (2, &[4096, u32::MAX]),
        (3, &[4096, u32::MAX, u32::MAX]),
    ];
    let mode = Mode::Mergeable;
    // With fewer entries buffers would be longer: all of them hold the longest packet.
    let (mut rx, mut device) = receiver(mode, 32);
    for (count, (num_buffers, lens)) in (1..).zip(cases) {
        device.packet(num_buffers, lens);
        assert_eq!((receive(&mut rx, 8), errors(&rx)), (vec![], count), "{num_buffers} {lens:?}");
        assert_all_posted(&mut rx);
        device.packet(2, &[4096, 100]);
        assert_eq!(receive(&mut rx, 8), [4096 + 100 - Header::LEN], "the next packet is whole");
        assert_all_posted(&mut rx);
    }
    dismantle(rx);
}

/// Buffers of which the device says that it wrote nothing into them are no part of the packet, and are posted
/// again.
#[test]
fn buffers_of_a_packet_that_nothing_was_written_to() {
    let mode = Mode::Mergeable;
    let (mut rx, mut device) = receiver(mode, 32);
    for lens in [&[100u32, 0, 0][..], &[HDR, 0, 100], &[HDR + 100, 0, 100, 0], &[HDR, 4096, 0, 0, 4096]] {
        device.packet(lens.len() as u16, lens);
        let bytes: u32 = lens.iter().sum();
        assert_eq!(receive(&mut rx, 8), [(bytes - HDR) as usize], "{lens:?}");
        assert_all_posted(&mut rx);
    }
    device.packet(3, &[0, 0, 0]);
    device.packet(2, &[HDR, 0]);
    assert_eq!(receive(&mut rx, 8), []);
    assert_all_posted(&mut rx);
    dismantle(rx);
}

/// A header that the device did not write is not believed: an earlier packet's would swallow the
/// packets behind.
#[test]
fn a_header_that_was_not_written_is_not_believed() {
    let mode = Mode::Mergeable;
    let (mut rx, mut device) = receiver(mode, 32);
    for _ in 0..12 {
        // Buffers come back in turn, so all of them say 6 at some time.
        device.packet(6, &[4096, 4096, 4096, 4096, 4096, 100]);
        assert_eq!(receive(&mut rx, 8).len(), 1);
        assert_all_posted(&mut rx);
        let head = device.take().unwrap();
        device.write(head, &Header { num_buffers: 6, ..Header::default() }.to_bytes());
        device.complete(head.into(), HDR - 1);
        device.packet(1, &[100]);
        device.packet(1, &[101]);
        assert_eq!(receive(&mut rx, 8), [88, 89]);
        assert_all_posted(&mut rx);
    }
    assert_eq!(errors(&rx), 12);
    dismantle(rx);
}

/// 5.1.6.4.2: without MRG_RXBUF num_buffers is ignored.
#[test]
fn clause_5_1_6_4_2_num_buffers_without_mergeable_buffers_is_ignored() {
    for mode in [Mode::Big, SMALL] {
        let (mut rx, mut device) = receiver(mode, 8);
        for num_buffers in [0, 2, u16::MAX] {
            device.packet(num_buffers, &[100]);
        }
        assert_eq!((receive(&mut rx, 8), errors(&rx)), (vec![88; 3], 0));
        assert_all_posted(&mut rx);
        dismantle(rx);
    }
}

/// Both kinds of frames are checked: those that stay where they were received, and those that are
/// copied.
#[test]
fn bytes_behind_the_used_length_are_not_delivered() {
    for (mode, copy_break) in Mode::ALL.into_iter().flat_map(|mode| [(mode, 0), (mode, 128)]) {
        let (mut rx, mut device) = exact(mode, 32, copy_break);
        let head = device.take().unwrap();
        let one = Header { num_buffers: 1, ..Header::default() };
        let bytes = [&one.to_bytes()[..], &payload(1, 1000)].concat();
        device.write(head, &bytes);
        device.complete(head.into(), 112);
        device.show();
        let mut seen = Vec::new();
        rx.receiveq.receive(1, &mut rx.pools, |chain, _| seen.push(received(&chain)));
        assert_eq!(seen[0].frame, bytes[Header::LEN..112]);
        assert_eq!((seen.len(), rx.receiveq.stats().copied), (1, u64::from(copy_break > 0)));
        dismantle(rx);
    }
}

#[test]
fn used_ids_that_were_not_given_break_the_ring_for_good() {
    type Lie = fn(&mut Liar);
    let lies: [(Lie, Fault); 5] = [
        (|device| device.complete(8, 100), Fault::BadIndex(8)),
        (|device| device.complete(u32::MAX, 100), Fault::BadIndex(u32::MAX)),
        (|device| device.complete(0x1_0000, 100), Fault::BadIndex(0x1_0000)),
        (
            |device| {
                let head = device.take().unwrap();
                device.complete(head.into(), 100);
                device.complete(head.into(), 100);
            },
            Fault::NotOutstanding(0),
        ),
        (|device| device.next_used = 9, Fault::IndexJump(9)),
    ];
    for (i, (lie, fault)) in lies.into_iter().enumerate() {
        let (mut rx, mut device) = receiver(SMALL, 8);
        lie(&mut device);
        device.show();
        let good = usize::from(i == 3);
        assert_eq!(receive(&mut rx, 8).len() + errors(&rx) as usize, good);
        assert_eq!(rx.fault(), Some(fault));
        // Nothing moves any more, and nothing hangs or panics.
        assert!(!rx.refill());
        assert_eq!(receive(&mut rx, 8), []);
        assert_eq!(rx.fault(), Some(fault));
        // Buffers that the device never gave back, and those that wait, all of them come home.
        assert_eq!(rx.receiveq.posted(), 8 - good);
        dismantle(rx);
    }
}

#[test]
fn a_ring_that_breaks_inside_a_packet_drops_it() {
    let (mut rx, mut device) = receiver(Mode::Mergeable, 32);
    let head = device.take().unwrap();
    device.write(head, &Header { num_buffers: 3, ..Header::default() }.to_bytes());
    device.complete(head.into(), 4096);
    device.complete(77, 4096);
    device.show();
    assert_eq!((receive(&mut rx, 8), errors(&rx)), (vec![], 1));
    assert_eq!(rx.fault(), Some(Fault::BadIndex(77)));
    dismantle(rx);
}

/// A pair and the device of its transmitq.
fn sender(size: u16) -> (Pair, Liar) {
    let config = PairConfig { receive: 4, transmit: size, ..PairConfig::default() };
    let mut arena = Arena::new(config.arena_bytes(Features::VERSION_1)).unwrap();
    let pair = Pair::new(&mut arena, Features::VERSION_1, &config).unwrap();
    let device = Liar::new(&arena, &pair.queues[1]);
    (pair, device)
}

#[test]
fn a_transmitq_believes_only_ids_it_gave() {
    const SIZE: u16 = 4;
    let (mut tx, mut device) = sender(SIZE);
    // Any length, any order: a driver ignores what a device claims to have written into a packet.
    for round in 0..1000u32 {
        while tx.send_frame(&Header::default(), &payload(round.into(), 60)) {}
        tx.transmitq.flush();
        let mut heads: Vec<_> = std::iter::from_fn(|| device.take()).collect();
        heads.rotate_left(round as usize % 4);
        for head in heads {
            device.complete(head.into(), u32::MAX - round);
        }
        device.show();
        assert_eq!(tx.reclaim(), SIZE.into());
        assert_pools_full(&tx.pools);
    }
    // A buffer that is not back is not used again, though the device says it twice.
    assert!(tx.send_frame(&Header::default(), &[0; 60]) && tx.send_frame(&Header::default(), &[0; 60]));
    tx.transmitq.flush();
    let head = device.take().unwrap();
    device.complete(head.into(), 0);
    device.complete(head.into(), 0);
    device.show();
    assert_eq!(tx.reclaim(), 1);
    assert_eq!(tx.fault(), Some(Fault::NotOutstanding(head.into())));
    for number in 0..10 {
        // Packets come back to who sends them, as they were.
        let frame = payload(number, 600);
        let chain = tx.pools.chain_of(&frame).unwrap();
        let unsent = tx.transmitq.send(chain, &mut tx.pools).unwrap_err();
        assert_eq!(unsent.reason, SendError::Broken);
        assert_eq!(unsent.chain.to_vec(), frame);
        tx.transmitq.give_up(unsent, &mut tx.pools);
    }
    assert!(!tx.transmitq.flush());
    assert_eq!((tx.reclaim(), tx.transmitq.in_flight()), (0, 1));
    let stats = tx.transmitq.stats();
    assert_eq!((stats.packets(), stats.reclaimed, stats.broken, stats.dropped()), (4002, 4001, 10, 10));
    dismantle(tx);
}

/// When a ring breaks while it is full, the sender gets its packet back, and the queue reports why
/// there will never be room.
#[test]
fn a_full_transmitq_that_breaks_keeps_no_packet() {
    let (mut tx, mut device) = sender(4);
    while tx.send_frame(&Header::default(), &[0; 60]) {}
    tx.transmitq.flush();
    device.complete(77, 0);
    device.show();
    assert_eq!(tx.reclaim(), 0);
    assert_eq!(tx.fault(), Some(Fault::BadIndex(77)));
    for _ in 0..3 {
        let chain = tx.pools.chain_of(&[1; 60]).unwrap();
        let unsent = tx.transmitq.send_or_reclaim(chain, &mut tx.pools).unwrap_err();
        assert_eq!(unsent.chain.to_vec(), [1; 60]);
        assert_eq!(unsent.reason, SendError::Broken);
        tx.transmitq.give_up(unsent, &mut tx.pools);
    }
    let stats = tx.transmitq.stats();
    assert_eq!((stats.packets(), stats.dropped(), tx.transmitq.in_flight()), (4, 3, 4));
    dismantle(tx);
}

/// A packet that no device would take does not reach the ring.
#[test]
fn frames_too_long_or_empty_are_not_sent() {
    let (mut tx, mut device) = sender(4);
    for (len, reason) in
        [(0, MapError::Empty), (MAX_FRAME + 1, MapError::TooLong), (80_000, MapError::TooLong)]
    {
        let chain = tx.pools.chain_of(&payload(0, len)).unwrap();
        let unsent = tx.transmitq.send(chain, &mut tx.pools).unwrap_err();
        assert_eq!((unsent.reason, unsent.chain.to_vec()), (SendError::Map(reason), payload(0, len)));
        tx.transmitq.give_up(unsent, &mut tx.pools);
    }
    assert!(!tx.transmitq.flush());
    assert_eq!((device.take(), tx.transmitq.stats().dropped()), (None, 3));
    dismantle(tx);
}

#[test]
fn control_answers_that_were_not_written_or_are_not_ok() {
    let mut arena = Arena::new(Controlq::arena_bytes()).unwrap();
    let (queue, mut control) = Controlq::new(&mut arena, Features::all() - Features::RING_PACKED).unwrap();
    let mut device = Liar::new(&arena, &queue);
    // The answer written, the length told, whether that means done.
    let cases =
        [(OK, 1, true), (OK, 0, false), (1, 1, false), (7, 1, false), (0xff, 9, false), (OK, u32::MAX, true)];
    for (ack, len, done) in cases {
        control.submit(&Command::AnnounceAck).unwrap();
        let head = device.take().unwrap();
        let rest = device.desc.load64(16 * usize::from(head) + 8);
        device.write((rest >> 48) as u16, &[ack]);
        device.complete(head.into(), len);
        device.show();
        assert_eq!(control.poll(), Some(done), "{ack} {len}");
    }
    control.submit(&Command::AnnounceAck).unwrap();
    device.complete(3, 1);
    device.show();
    assert_eq!(control.poll(), None);
    assert!(control.fault().is_some());
    assert_eq!(control.submit(&Command::AnnounceAck), None);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// For all lengths, counts and orders of completions: every buffer is posted again, every
    /// packet is delivered or counted, and none owns less memory than it has bytes.
    #[test]
    fn lies_about_lengths_lose_no_buffer(
        mode in proptest::sample::select(&[Mode::Mergeable, Mode::Big, SMALL][..]),
        policy in proptest::sample::select(&PolicyKind::ALL[..]),
        copy_break in proptest::sample::select(&[0, 128][..]),
        indirect in any::<bool>(),
        packets in proptest::collection::vec(
            (
                prop_oneof![Just(0u16), Just(1), 2u16..20, any::<u16>()],
                proptest::collection::vec(
                    prop_oneof![Just(4096u32), 0u32..100, 0u32..70_000, any::<u32>()],
                    1..20,
                ),
                1usize..5,
            ),
            1..40,
        ),
    ) {
        let mut features = mode.with(Features::VERSION_1);
        features.set(Features::INDIRECT_DESC, indirect);
        let config = config(mode, 64, RxConfig { policy, copy_break, fetch_frame: true });
        let mut arena = Arena::new(config.arena_bytes(features)).unwrap();
        let mut rx = Pair::new(&mut arena, features, &config).unwrap();
        rx.refill();
        let posted = rx.receiveq.posted();
        let mut device = Liar::new(&arena, &rx.queues[0]);
        for (num_buffers, lens, max) in packets {
            let room = device.avail.load16(2).wrapping_sub(device.taken);
            device.packet(num_buffers, &lens[..lens.len().min(room.into())]);
            receive(&mut rx, max);
            rx.refill();
        }
        receive(&mut rx, usize::MAX);
        rx.refill();
        prop_assert_eq!(rx.receiveq.posted(), posted);
        prop_assert_eq!(rx.receiveq.stats().no_replacement, 0);
        prop_assert_eq!(rx.fault(), None);
        dismantle(rx);
    }

    #[test]
    fn a_used_ring_of_random_words_never_panics(
        mode in proptest::sample::select(&[Mode::Mergeable, Mode::Big, SMALL][..]),
        words in proptest::collection::vec((prop_oneof![4 => 0u32..8, 1 => any::<u32>()], any::<u32>()), 8),
        indexes in proptest::collection::vec(prop_oneof![4 => 0u16..20, 1 => any::<u16>()], 1..20),
    ) {
        let features = mode.with(Features::VERSION_1);
        let config = config(mode, 8, PLAIN);
        let mut arena = Arena::new(config.arena_bytes(features)).unwrap();
        let mut rx = Pair::new(&mut arena, features, &config).unwrap();
        rx.refill();
        let posted = rx.receiveq.posted();
        let mut device = Liar::new(&arena, &rx.queues[0]);
        for index in indexes {
            for (slot, (id, len)) in words.iter().enumerate() {
                device.used.store32(4 + 8 * slot, *id);
                device.used.store32(8 + 8 * slot, *len);
            }
            device.next_used = index;
            device.show();
            receive(&mut rx, 8);
            rx.refill();
            if rx.fault().is_none() {
                prop_assert_eq!(rx.receiveq.posted(), posted);
            }
        }
        dismantle(rx);
    }
}
