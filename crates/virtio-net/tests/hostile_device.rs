//! The driver half against a device that lies about what it wrote.

mod common;

use std::sync::Arc;

use common::payload;
use proptest::prelude::*;
use ringferry_memory::{Area, GuestMemory, ReadSlice, Words};
use ringferry_packet::vnet::Header;
use ringferry_ring::{Fault, part_bytes};
use ringferry_virtio_net::control::{Command, OK};
use ringferry_virtio_net::driver::{Arena, Controlq, Queue, Receiveq, RxMode, Transmitq};
use ringferry_virtio_net::{Features, MAX_FRAME, MIN_FRAME};

const SMALL: RxMode = RxMode::Small { mtu: 1500 };

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
        let len = self.desc.load64(at + 8) as u32 as usize;
        let piece = self.memory.translator().write(self.desc.load64(at), len).unwrap();
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

fn receiver(mode: RxMode, size: u16) -> (Receiveq, Liar) {
    let mut features = Features::VERSION_1;
    features.set(Features::MRG_RXBUF, mode == RxMode::Mergeable);
    let mut arena = Arena::new(Receiveq::arena_bytes(size, mode)).unwrap();
    let (queue, mut rx) = Receiveq::new(&mut arena, size, features, mode).unwrap();
    rx.refill();
    (rx, Liar::new(&arena, &queue))
}

/// Lengths of the frames that come out. Every piece is checked against what was posted, and every
/// packet that does not come out is counted.
fn receive(rx: &mut Receiveq, max: usize) -> Vec<usize> {
    let limit = rx.mode().buffer_len() as usize;
    let before = rx.errors().length as usize;
    let mut lens = Vec::new();
    let count = rx.receive(max, |packet| {
        assert!((MIN_FRAME..=MAX_FRAME).contains(&packet.len), "{}", packet.len);
        assert!(packet.pieces.iter().all(|piece| piece.len() <= limit));
        let bytes: usize = packet.pieces.iter().map(ReadSlice::len).sum();
        assert_eq!(bytes, Header::LEN + packet.len);
        assert!(packet.pieces[0].len() >= Header::LEN);
        lens.push(packet.len);
    });
    assert_eq!(count, lens.len() + rx.errors().length as usize - before);
    lens
}

/// Every buffer is posted again.
fn assert_all_posted(rx: &mut Receiveq) {
    rx.refill();
    assert_eq!((rx.ring().in_flight(), rx.ring().free(), rx.fault()), (rx.ring().size(), 0, None));
}

const HDR: u32 = Header::LEN as u32;

/// 2.7.8.3: a driver must not read beyond the used length, nor beyond what it posted.
#[test]
fn clause_2_7_8_3_lengths_that_make_no_sense_are_counted_and_the_buffer_posted_again() {
    for mode in [RxMode::Mergeable, RxMode::Big, SMALL] {
        let limit = mode.buffer_len();
        let (mut rx, mut device) = receiver(mode, 8);
        let bad = [0, 1, HDR - 1, HDR, HDR + MIN_FRAME as u32 - 1, limit + 1, 0x7fff_ffff, u32::MAX];
        for (count, len) in (1..).zip(bad) {
            // A good packet before and behind: neither is lost.
            device.packet(1, &[100]);
            device.packet(1, &[len]);
            device.packet(1, &[200]);
            assert_eq!(receive(&mut rx, 8), [88, 188], "{mode:?} {len}");
            assert_eq!(rx.errors().length, count);
            assert_all_posted(&mut rx);
        }
        device.packet(1, &[HDR + MIN_FRAME as u32]);
        device.packet(1, &[limit.min(HDR + MAX_FRAME as u32)]);
        let most = (limit as usize).min(Header::LEN + MAX_FRAME) - Header::LEN;
        assert_eq!(receive(&mut rx, 8), [MIN_FRAME, most]);
        assert_all_posted(&mut rx);
    }
}

#[test]
fn frames_beyond_the_largest_are_counted() {
    let (mut rx, mut device) = receiver(RxMode::Big, 8);
    device.packet(1, &[HDR + MAX_FRAME as u32 + 1]);
    device.packet(1, &[RxMode::Big.buffer_len()]);
    assert_eq!((receive(&mut rx, 8), rx.errors().length), (vec![], 2));
    assert_all_posted(&mut rx);

    let (mut rx, mut device) = receiver(RxMode::Mergeable, 32);
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
    assert_eq!(rx.errors().length, 5);
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
        (65_535, &[4096; 8]),
        // Lengths of later buffers.
        (2, &[4096, 4097]),
        (2, &[4096, u32::MAX]),
        (3, &[4096, u32::MAX, u32::MAX]),
    ];
    let (mut rx, mut device) = receiver(RxMode::Mergeable, 8);
    for (count, (num_buffers, lens)) in (1..).zip(cases) {
        device.packet(num_buffers, lens);
        assert_eq!((receive(&mut rx, 8), rx.errors().length), (vec![], count), "{num_buffers} {lens:?}");
        assert_all_posted(&mut rx);
        device.packet(2, &[4096, 100]);
        assert_eq!(receive(&mut rx, 8), [4096 + 100 - Header::LEN], "the next packet is whole");
        assert_all_posted(&mut rx);
    }
}

/// A header that the device did not write is not believed: an earlier packet's would swallow the
/// packets behind.
#[test]
fn a_header_that_was_not_written_is_not_believed() {
    let (mut rx, mut device) = receiver(RxMode::Mergeable, 8);
    for _ in 0..3 {
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
    assert_eq!(rx.errors().length, 3);
}

/// 5.1.6.4.2: without MRG_RXBUF num_buffers is ignored.
#[test]
fn clause_5_1_6_4_2_num_buffers_without_mergeable_buffers_is_ignored() {
    for mode in [RxMode::Big, SMALL] {
        let (mut rx, mut device) = receiver(mode, 8);
        for num_buffers in [0, 2, u16::MAX] {
            device.packet(num_buffers, &[100]);
        }
        assert_eq!((receive(&mut rx, 8), rx.errors().length), (vec![88; 3], 0));
        assert_all_posted(&mut rx);
    }
}

#[test]
fn bytes_behind_the_used_length_are_not_lent() {
    let (mut rx, mut device) = receiver(SMALL, 2);
    let head = device.take().unwrap();
    let bytes = [&[0; Header::LEN][..], &payload(1, 1000)].concat();
    device.write(head, &bytes);
    device.complete(head.into(), 112);
    device.show();
    let mut seen = Vec::new();
    rx.receive(1, |packet| {
        seen.resize(2000, 0);
        let len = packet.pieces[0].copy_to(&mut seen);
        seen.truncate(len);
        assert_eq!(packet.pieces.len(), 1);
    });
    assert_eq!(seen, bytes[..112]);
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
        assert_eq!(receive(&mut rx, 8).len() + rx.errors().length as usize, good);
        assert_eq!(rx.fault(), Some(fault));
        // Nothing moves any more, and nothing hangs or panics.
        assert!(!rx.refill());
        assert_eq!(receive(&mut rx, 8), []);
        assert_eq!(rx.fault(), Some(fault));
    }
}

#[test]
fn a_ring_that_breaks_inside_a_packet_drops_it() {
    let (mut rx, mut device) = receiver(RxMode::Mergeable, 8);
    let head = device.take().unwrap();
    device.write(head, &Header { num_buffers: 3, ..Header::default() }.to_bytes());
    device.complete(head.into(), 4096);
    device.complete(77, 4096);
    device.show();
    assert_eq!((receive(&mut rx, 8), rx.errors().length), (vec![], 1));
    assert_eq!(rx.fault(), Some(Fault::BadIndex(77)));
}

#[test]
fn a_transmitq_believes_only_ids_it_gave() {
    const SIZE: u16 = 4;
    let mut arena = Arena::new(Transmitq::arena_bytes(SIZE)).unwrap();
    let (queue, mut tx) = Transmitq::new(&mut arena, SIZE, Features::VERSION_1).unwrap();
    let mut device = Liar::new(&arena, &queue);
    // Any length, any order: a driver ignores what a device claims to have written into a packet.
    for round in 0..1000u32 {
        while tx.send_frame(&Header::default(), &payload(round.into(), 60)) {}
        tx.publish();
        let mut heads: Vec<_> = std::iter::from_fn(|| device.take()).collect();
        heads.rotate_left(round as usize % 4);
        for head in heads {
            device.complete(head.into(), u32::MAX - round);
        }
        device.show();
        assert_eq!(tx.reclaim(), SIZE.into());
    }
    // A slot that is not back is not used again, though the device says it twice.
    assert!(tx.send_frame(&Header::default(), &[0; 60]) && tx.send_frame(&Header::default(), &[0; 60]));
    tx.publish();
    let head = device.take().unwrap();
    device.complete(head.into(), 0);
    device.complete(head.into(), 0);
    device.show();
    assert_eq!(tx.reclaim(), 1);
    assert_eq!(tx.fault(), Some(Fault::NotOutstanding(head.into())));
    let free = std::iter::from_fn(|| tx.slot().map(|slot| tx.send(slot, 72))).take(10).count();
    assert_eq!(free, 10, "on a broken ring packets are lost with the ring, slots are not");
    assert!(!tx.publish());
    assert_eq!(tx.reclaim(), 0);
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

    /// Whatever lengths, counts and order: every buffer is posted again, every packet is delivered or
    /// counted, and no piece is longer than its buffer.
    #[test]
    fn lies_about_lengths_lose_no_buffer(
        mode in proptest::sample::select(&[RxMode::Mergeable, RxMode::Big, SMALL][..]),
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
        let (mut rx, mut device) = receiver(mode, 32);
        for (num_buffers, lens, max) in packets {
            let room = device.avail.load16(2).wrapping_sub(device.taken);
            device.packet(num_buffers, &lens[..lens.len().min(room.into())]);
            receive(&mut rx, max);
            rx.refill();
        }
        receive(&mut rx, usize::MAX);
        assert_all_posted(&mut rx);
    }

    #[test]
    fn a_used_ring_of_random_words_never_panics(
        mode in proptest::sample::select(&[RxMode::Mergeable, RxMode::Big, SMALL][..]),
        words in proptest::collection::vec((prop_oneof![4 => 0u32..8, 1 => any::<u32>()], any::<u32>()), 8),
        indexes in proptest::collection::vec(prop_oneof![4 => 0u16..20, 1 => any::<u16>()], 1..20),
    ) {
        let (mut rx, mut device) = receiver(mode, 8);
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
                prop_assert_eq!(rx.ring().in_flight(), 8);
            }
        }
    }
}
