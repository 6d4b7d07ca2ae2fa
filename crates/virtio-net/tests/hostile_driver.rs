//! The device half of the packet queues against a guest that writes what it likes.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use common::{
    BASE, BORDER, BUFFERS, END, GSO, INDIRECT, Piece, Raw, SIZE, WRITE, payload, readable, writable,
};
use proptest::prelude::*;
use ringferry_memory::{Area, Words};
use ringferry_packet::frame::{Burst, PREFIX};
use ringferry_packet::vnet::{F_NEEDS_CSUM, Header};
use ringferry_ring::Fault;
use ringferry_virtio_net::device::{Receiveq, Refused, Rejected, Transmitq};
use ringferry_virtio_net::{Features, MAX_FRAME, MIN_FRAME};

const PLAIN: Features = Features::VERSION_1
    .union(Features::CSUM)
    .union(Features::HOST_TSO4)
    .union(Features::HOST_TSO6)
    .union(Features::HOST_ECN)
    .union(Features::HOST_USO);
const MERGEABLE: Features = Features::VERSION_1.union(Features::MRG_RXBUF);

fn packet(header: Header, frame: &[u8]) -> Vec<u8> {
    [&header.to_bytes()[..], frame].concat()
}

/// Takes what is there and completes it.
fn poll(raw: &Raw, queue: &mut Transmitq<Area>) -> Vec<(Header, Vec<u8>)> {
    let memory = Arc::clone(&raw.memory);
    let mut burst = Burst::new();
    queue.poll(&memory, 64, &mut burst);
    let flat = |frame| {
        let mut bytes = Vec::new();
        burst.flatten(frame, &mut bytes);
        assert_eq!(bytes.len(), frame.len as usize);
        (frame.header, bytes)
    };
    let frames = burst.frames().iter().map(flat).collect();
    queue.complete();
    frames
}

fn sender() -> (Raw, Transmitq<Area>) {
    let raw = Raw::new(128);
    let queue = Transmitq::new(raw.device(PLAIN), PLAIN);
    (raw, queue)
}

/// 2.7.4.1: a device must not assume any framing, wherever the header is cut.
#[test]
fn clause_2_7_4_1_header_in_1_to_12_descriptors() {
    let (mut raw, mut queue) = sender();
    let frame = payload(1, 100);
    let bytes = packet(GSO, &frame);
    for cuts in 0..12 {
        // `cuts` descriptors of one byte; then the rest of the header, alone or with the frame.
        for join in [false, true] {
            let mut parts: Vec<_> = bytes[..cuts].chunks(1).collect();
            if join {
                parts.push(&bytes[cuts..]);
            } else {
                parts.extend([&bytes[cuts..12], &bytes[12..50], &bytes[50..51], &bytes[51..]]);
            }
            let pieces = raw.scatter(BUFFERS + 1, &parts);
            let head = raw.chain(&pieces);
            assert_eq!(poll(&raw, &mut queue), [(GSO, frame.clone())], "{cuts} {join}");
            assert_eq!(raw.used(), [(u32::from(head), 0)], "a device writes nothing on transmit");
        }
    }
}

#[test]
fn cve_2022_2132_chain_shorter_than_header() {
    let (mut raw, mut queue) = sender();
    let bytes = packet(Header::default(), &payload(0, MIN_FRAME));
    for len in 0..bytes.len() {
        // In one descriptor, in single bytes, and behind an empty descriptor.
        let single: Vec<_> = bytes[..len].chunks(1).collect();
        for parts in [vec![&bytes[..len]], single, vec![&[][..], &bytes[..len]]] {
            if parts.is_empty() {
                continue;
            }
            let before = queue.rejected().too_short;
            let pieces = raw.scatter(BUFFERS, &parts);
            let head = raw.chain(&pieces);
            assert_eq!(poll(&raw, &mut queue), []);
            assert_eq!(queue.rejected().too_short, before + 1, "{len}");
            assert_eq!(raw.used(), [(u32::from(head), 0)], "what is dropped is given back");
        }
    }
    let pieces = raw.scatter(BUFFERS, &[&bytes]);
    raw.chain(&pieces);
    assert_eq!(poll(&raw, &mut queue).len(), 1, "the smallest frame");
    assert_eq!(queue.ring().fault(), None);
}

/// Linux took such a frame from behind a virtual header, in macvtap (CVE-2024-41090) and in tun (CVE-2024-41091).
#[test]
fn cve_2024_41090_a_frame_shorter_than_an_ethernet_header_is_dropped_whatever_its_header_asks_for() {
    let (mut raw, mut queue) = sender();
    let csum = Header { flags: F_NEEDS_CSUM, ..Header::default() };
    for header in [Header::default(), csum, Header { gso_size: 1, csum_start: 0, csum_offset: 0, ..GSO }] {
        for len in 0..MIN_FRAME {
            let bytes = packet(header, &payload(0, len));
            for parts in [&[&bytes[..]][..], &[&bytes[..12], &bytes[12..]], &[&bytes[..4], &bytes[4..]]] {
                let before = queue.rejected().too_short;
                let pieces = raw.scatter(BUFFERS, parts);
                let head = raw.chain(&pieces);
                assert_eq!(poll(&raw, &mut queue), [], "{len}");
                assert_eq!(queue.rejected(), Rejected { too_short: before + 1, ..Rejected::default() });
                assert_eq!(raw.used(), [(u32::from(head), 0)]);
            }
        }
    }
    let frame = payload(0, MIN_FRAME);
    let pieces = raw.scatter(BUFFERS, &[&packet(Header::default(), &frame)]);
    raw.chain(&pieces);
    assert_eq!(poll(&raw, &mut queue), [(Header::default(), frame)], "one that is no shorter passes");
}

#[test]
fn cve_2020_10725_zero_length_descriptors_are_skipped_wherever_they_point() {
    let (mut raw, mut queue) = sender();
    let frame = payload(3, 300);
    let bytes = packet(Header::default(), &frame);
    let nowhere = |addr| (addr, 0, false);
    let mut pieces = vec![nowhere(0), nowhere(u64::MAX)];
    for piece in raw.scatter(BUFFERS, &[&bytes[..5], &bytes[5..12], &bytes[12..40], &bytes[40..]]) {
        pieces.extend([piece, nowhere(0xdead_0000_0000), nowhere(END)]);
    }
    raw.chain(&pieces);
    assert_eq!(poll(&raw, &mut queue), [(Header::default(), frame)]);
    assert_eq!(queue.ring().fault(), None);
}

#[test]
fn cve_2016_6490_a_chain_of_nothing_but_empty_descriptors_ends() {
    let (mut raw, mut queue) = sender();
    raw.chain(&[(0, 0, false); 100]);
    assert_eq!(poll(&raw, &mut queue), []);
    assert_eq!((queue.rejected().too_short, queue.ring().fault()), (1, None));

    let mut receiver = raw.beside(128);
    let mut queue = Receiveq::new(receiver.device(MERGEABLE), MERGEABLE);
    receiver.chain(&[(0, 0, true); 100]);
    assert_eq!(deliver(&receiver, &mut queue, &[1; 60]), Err(Refused::Broken));
}

#[test]
fn cve_2018_1059_buffers_outside_memory_break_the_ring_and_only_that() {
    let bytes = packet(Header::default(), &payload(0, 200));
    let places = [0, BASE - 1, BASE - 211, END - 211, END, END + 1, u64::MAX, u64::MAX - 100, 1 << 63];
    for addr in places {
        // The whole packet, only the frame, only the last byte outside.
        for inside in [0, 12, 211] {
            if addr >= BASE && addr.saturating_add(bytes.len() as u64 - inside as u64) <= END {
                continue;
            }
            let (mut raw, mut queue) = sender();
            let mut other = raw.beside(8);
            let mut other_queue = Transmitq::new(other.device(PLAIN), PLAIN);
            let good = raw.scatter(BUFFERS, &[&bytes]);
            let mut bad = raw.scatter(BUFFERS + 0x1000, &[&bytes[..inside]]);
            bad.push(readable(addr, bytes.len() - inside));
            raw.chain(&good);
            raw.chain(&bad);
            raw.chain(&good);
            assert_eq!(poll(&raw, &mut queue).len(), 1, "what came before is forwarded: {addr:#x}");
            assert_eq!(queue.ring().fault(), Some(Fault::Unusable), "{addr:#x} {inside}");
            raw.chain(&good);
            assert_eq!(poll(&raw, &mut queue), [], "broken is broken");
            let other_good = other.scatter(BUFFERS, &[&bytes]);
            other.chain(&other_good);
            assert_eq!(poll(&other, &mut other_queue).len(), 1, "the other queue lives");
        }
    }
}

#[test]
fn buffers_may_cross_adjacent_regions() {
    let (mut raw, mut queue) = sender();
    let frame = payload(5, 300);
    let bytes = packet(GSO, &frame);
    // The border lies in the header, behind it, in the prefix, in the rest, at the very end.
    for before in [1, 11, 12, 13, 12 + PREFIX as u64, 200, 311] {
        raw.write(BORDER - before, &bytes);
        raw.chain(&[readable(BORDER - before, bytes.len())]);
        assert_eq!(poll(&raw, &mut queue), [(GSO, frame.clone())], "{before}");
    }
    // Up to the last byte of memory.
    raw.write(END - bytes.len() as u64, &bytes);
    raw.chain(&[readable(END - bytes.len() as u64, bytes.len())]);
    assert_eq!(poll(&raw, &mut queue).len(), 1);
    assert_eq!(queue.ring().fault(), None);
}

/// CVE-2024-11614 (csum_start beyond the packet), gso_size 0, and the other ways a header can be wrong.
#[test]
fn cve_2024_11614_headers_that_contradict_the_frame_are_dropped() {
    let csum = Header { flags: F_NEEDS_CSUM, csum_start: 34, csum_offset: 16, ..Header::default() };
    let bad = [
        Header { csum_start: 100, csum_offset: 0, ..csum },
        Header { csum_start: 99, csum_offset: 0, ..csum },
        Header { csum_start: 83, csum_offset: 16, ..csum },
        Header { csum_start: u16::MAX, csum_offset: u16::MAX, ..csum },
        Header { csum_start: 34, csum_offset: u16::MAX, ..csum },
        Header { csum_start: 13, csum_offset: 20, ..csum },
        Header { gso_size: 0, ..GSO },
        Header { flags: 0, ..GSO },
        Header { gso_type: 2, ..GSO },
        Header { gso_type: 6, ..GSO },
        Header { gso_type: 0x80, ..GSO },
        Header { gso_type: 0x83, ..GSO },
        Header { gso_type: 0xff, ..GSO },
        Header { gso_type: 4, ..GSO },
        Header { gso_type: 5, ..GSO },
        Header { gso_size: 7, ..GSO },
        Header { csum_start: 26, csum_offset: 0, ..csum },
        Header { csum_start: 14, csum_offset: 12, ..csum },
        Header { csum_start: 14, ..GSO },
        Header { hdr_len: 101, ..GSO },
        Header { flags: 0xfe, ..GSO },
    ];
    let good = [csum, GSO, Header { gso_type: 0x81, ..GSO }, Header { hdr_len: 100, ..GSO }];
    let (mut raw, mut queue) = sender();
    let frame = payload(0, 100);
    for (expect, headers) in [(0, &bad[..]), (1, &good[..])] {
        for header in headers {
            let pieces = raw.scatter(BUFFERS, &[&packet(*header, &frame)]);
            let head = raw.chain(&pieces);
            let hdr_len = if header.is_gso() { 54 } else { 0 };
            let passed = Header { hdr_len, ..*header };
            assert_eq!(poll(&raw, &mut queue), vec![(passed, frame.clone()); expect], "{header:?}");
            assert_eq!(raw.used(), [(u32::from(head), 0)]);
        }
    }
    // A checksum that is not TCP's, but behind the headers, is nobody else's business.
    let pieces = raw.scatter(BUFFERS, &[&packet(Header { csum_start: 82, csum_offset: 16, ..csum }, &frame)]);
    raw.chain(&pieces);
    assert!(poll(&raw, &mut queue)[0].0.is_software_only());
    let rejected = Rejected { bad_header: bad.len() as u64, ..Rejected::default() };
    assert_eq!((queue.rejected(), queue.ring().fault()), (rejected, None));
}

/// An offload that was not negotiated, in one piece and in several.
#[test]
fn m2_offloads_that_were_not_negotiated_are_dropped() {
    let offers = [
        (Features::empty(), [false, false, false]),
        (Features::CSUM, [true, false, false]),
        (Features::CSUM | Features::HOST_TSO4, [true, true, false]),
        (Features::CSUM | Features::HOST_TSO4 | Features::HOST_ECN, [true, true, true]),
    ];
    let frame = payload(0, 100);
    let csum = Header { gso_type: 0, gso_size: 0, hdr_len: 0, ..GSO };
    for (features, expected) in offers {
        let mut raw = Raw::new(RING);
        let mut queue = Transmitq::new(raw.device(PLAIN), Features::VERSION_1 | features);
        for (header, passes) in [csum, GSO, Header { gso_type: 0x81, ..GSO }].into_iter().zip(expected) {
            let bytes = packet(header, &frame);
            for pieces in [&[&bytes[..]][..], &[&bytes[..50], &bytes[50..]]] {
                let pieces = raw.scatter(BUFFERS, pieces);
                raw.chain(&pieces);
                let expected = vec![(header, frame.clone()); usize::from(passes)];
                assert_eq!(poll(&raw, &mut queue), expected, "{features:?}");
            }
        }
    }
}

/// 5.1.6.2: a driver sets only NEEDS_CSUM; DATA_VALID, RSC_INFO and unknown flags do not pass.
#[test]
fn clause_5_1_6_2_flags_of_a_device_are_stripped() {
    let (mut raw, mut queue) = sender();
    for (flags, kept) in [(2, 0), (4, 0), (0xfe, 0), (0xff, 1), (3, 1), (5, 1)] {
        let header = Header { flags, csum_start: 34, csum_offset: 16, ..Header::default() };
        let pieces = raw.scatter(BUFFERS, &[&packet(header, &payload(0, 100))]);
        raw.chain(&pieces);
        let frames = poll(&raw, &mut queue);
        assert_eq!((frames[0].0.flags, frames[0].0.num_buffers), (kept, 0));
    }
}

#[test]
fn cve_2022_26354_over_long_frames_are_counted_and_given_back() {
    let (mut raw, mut queue) = sender();
    let longest = (Header::LEN + MAX_FRAME) as u32;
    raw.chain(&[(BUFFERS, longest, false)]);
    assert_eq!(poll(&raw, &mut queue)[0].1.len(), MAX_FRAME);
    raw.used();
    // One byte more, in one descriptor and in two; then nearly 4 GiB, which lie in no memory.
    let chains: [&[Piece]; 4] = [
        &[(BUFFERS, longest + 1, false)],
        &[(BUFFERS, longest, false), (BUFFERS, 1, false)],
        &[(BUFFERS, u32::MAX, false)],
        &[(BUFFERS, 0x7fff_ffff, false), (BUFFERS, 0x7fff_ffff, false)],
    ];
    for (i, chain) in (1..).zip(chains) {
        raw.chain(chain);
        assert_eq!(poll(&raw, &mut queue), []);
        assert_eq!((queue.rejected().too_long, raw.used().len()), (i, 1));
    }
    assert_eq!(queue.ring().fault(), None);
    // 2^32 bytes are no chain at all (2.7.5).
    raw.chain(&[(BUFFERS, u32::MAX, false), (BUFFERS, 1, false)]);
    assert_eq!(poll(&raw, &mut queue), []);
    assert_eq!(queue.ring().fault(), Some(Fault::ChainTooLarge));
}

/// What is read for a burst is bounded, however long chains are and whether frames come of them; what was not taken comes next, in order.
#[test]
fn h3_a_burst_ends_where_its_chains_or_its_memory_are_too_much() {
    let mut raw = Raw::new(512);
    let mut queue = Transmitq::new(raw.device(PLAIN), PLAIN);
    for number in 0..4 {
        let mut pieces = vec![readable(BUFFERS + 100 * number, 12 + 60)];
        raw.write(BUFFERS + 100 * number, &packet(Header::default(), &[number as u8; 60]));
        pieces.extend([readable(BUFFERS + 0x1000, 4); 126]);
        raw.chain(&pieces);
    }
    let numbers =
        |frames: Vec<(Header, Vec<u8>)>| frames.iter().map(|(_, frame)| frame[0]).collect::<Vec<_>>();
    assert_eq!(numbers(poll(&raw, &mut queue)), [0, 1]);
    assert_eq!(numbers(poll(&raw, &mut queue)), [2, 3]);

    raw.chain(&[readable(BUFFERS, 12 + 60), readable(BUFFERS + 0x1000, 4)].repeat(128));
    assert_eq!(poll(&raw, &mut queue).len(), 1);
    raw.chain(&[&[readable(BUFFERS, 12 + 60)], &[readable(BUFFERS + 0x1000, 4); 256][..]].concat());
    assert_eq!((poll(&raw, &mut queue).len(), queue.rejected().too_long), (0, 1));
    assert_eq!(raw.used().len(), 6);

    let longest = (Header::LEN + MAX_FRAME) as u32;
    raw.write(BUFFERS, &[0; 12]);
    (0..20).for_each(|_| _ = raw.chain(&[(BUFFERS, longest, false)]));
    assert_eq!(poll(&raw, &mut queue).len(), 15);
    assert_eq!(poll(&raw, &mut queue).len(), 5);
    assert_eq!((raw.used().len(), queue.ring().fault()), (20, None));
}

/// CVE-2020-14374 and similar: the device delivers the bytes that it checked, whatever the sender
/// has written to its memory since.
#[test]
fn cve_2020_14374_header_and_addresses_are_read_once() {
    let (mut raw, mut queue) = sender();
    let mut receiver = raw.beside(8);
    let mut receiveq = Receiveq::new(receiver.device(PLAIN), PLAIN);
    receiver.chain(&[writable(BORDER, 2048)]);
    let frame = payload(9, 200);
    raw.write(BUFFERS, &packet(GSO, &frame));
    raw.chain(&[readable(BUFFERS, 212)]);
    let memory = Arc::clone(&raw.memory);
    let mut burst = Burst::new();
    assert_eq!(queue.poll(&memory, 8, &mut burst), 1);
    raw.write(BUFFERS, &[0xff; 212]);
    let first = &burst.frames()[0];
    let mut translator = memory.translator();
    receiveq.deliver(&mut translator, first.header, first.prefix(), burst.rest(first)).unwrap();
    receiveq.flush();
    queue.complete();
    assert_eq!(receiver.used(), [(0, 212)]);
    let seen = raw.read(BORDER, 212);
    assert_eq!(seen[..12], Header { num_buffers: 1, ..GSO }.to_bytes());
    assert_eq!(seen[12..12 + PREFIX], frame[..PREFIX]);
    // The rest is the guest's own business, as long as it is as long as it was.
    assert_eq!(seen[12 + PREFIX..], [0xff; 200 - PREFIX]);
}

#[test]
fn csum_start_that_changes_all_the_time_never_passes_unchecked() {
    let (mut raw, mut queue) = sender();
    let word = raw.memory.area(BUFFERS, 16).unwrap();
    raw.write(BUFFERS, &packet(GSO, &payload(0, 100)));
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                for csum_start in [34, 0xffff, 90, 0, 13] {
                    word.store16(6, csum_start);
                }
            }
        });
        for _ in 0..20_000 {
            raw.chain(&[readable(BUFFERS, 112)]);
            for (header, frame) in poll(&raw, &mut queue) {
                assert_eq!(header.check(frame.len()), Ok(()));
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert_eq!(queue.ring().fault(), None);
}

#[test]
fn writable_descriptors_on_a_transmitq_are_left_alone() {
    let (mut raw, mut queue) = sender();
    let frame = payload(0, 60);
    raw.write(BORDER, &[0xa5; 64]);
    let mut pieces = raw.scatter(BUFFERS, &[&packet(Header::default(), &frame)]);
    pieces.push(writable(BORDER, 64));
    let head = raw.chain(&pieces);
    assert_eq!(poll(&raw, &mut queue), [(Header::default(), frame)]);
    assert_eq!(raw.used(), [(u32::from(head), 0)]);
    assert_eq!(raw.read(BORDER, 64), [0xa5; 64]);
}

fn deliver(raw: &Raw, queue: &mut Receiveq<Area>, frame: &[u8]) -> Result<(), Refused> {
    let (first, rest) = frame.split_at(frame.len().min(PREFIX));
    queue.deliver(&mut raw.memory.translator(), Header::default(), first, &[rest.into()])
}

fn receiver(features: Features) -> (Raw, Receiveq<Area>) {
    let raw = Raw::new(128);
    let queue = Receiveq::new(raw.device(features), features);
    (raw, queue)
}

const CANARY: u8 = 0xa5;

fn fill_with_canaries(raw: &Raw) {
    raw.write(BUFFERS, &vec![CANARY; (END - BUFFERS) as usize]);
}

/// Bytes outside the writable ones among `pieces` are as they were.
fn assert_canaries_live(raw: &Raw, pieces: &[Piece]) {
    let mut bytes = raw.read(BUFFERS, (END - BUFFERS) as usize);
    for &(addr, len, _) in pieces.iter().filter(|piece| piece.2) {
        let from = addr.clamp(BUFFERS, END) - BUFFERS;
        let to = addr.saturating_add(len.into()).clamp(BUFFERS, END) - BUFFERS;
        bytes[from as usize..to as usize].fill(CANARY);
    }
    let hit = bytes.iter().position(|byte| *byte != CANARY);
    assert_eq!(hit.map(|at| BUFFERS + at as u64), None, "written outside the posted buffers");
}

/// CVE-2013-4148 and CVE-2015-7295: a jumbo frame and small buffers.
#[test]
fn cve_2015_7295_nothing_is_written_past_a_buffer() {
    for features in [PLAIN, MERGEABLE] {
        for len in [14, 60, 1514, 9014, 65_550] {
            let (mut raw, mut queue) = receiver(features);
            fill_with_canaries(&raw);
            // Chains of odd buffers: single bytes, empty ones, one across the regions' border.
            let mut at = BUFFERS + 7;
            let mut all = Vec::new();
            for chain in 0..16 {
                let mut pieces = vec![(u64::MAX, 0, true)];
                for len in [1, 5, 0, 40, 1000 + 13 * chain] {
                    pieces.push(writable(at, len));
                    at += len as u64 + 9;
                }
                raw.chain(&pieces);
                all.extend(pieces);
            }
            let across = writable(BORDER - 100, 9000);
            raw.chain(&[across]);
            all.push(across);
            let answer = deliver(&raw, &mut queue, &payload(1, len));
            queue.flush();
            assert_canaries_live(&raw, &all);
            let used = raw.used();
            if features == PLAIN {
                assert_eq!(answer, if len <= 1034 { Ok(()) } else { Err(Refused::TooBig) });
            } else {
                assert_eq!(answer, if len <= 20_000 { Ok(()) } else { Err(Refused::NoBuffers) });
            }
            let written: usize = used.iter().map(|(_, len)| *len as usize).sum();
            assert_eq!(written, if answer.is_ok() { Header::LEN + len } else { 0 });
            if answer.is_ok() {
                let mut bytes = Vec::new();
                for &(addr, len, _) in all.iter().filter(|piece| piece.1 > 0) {
                    bytes.extend(raw.read(addr, len as usize));
                }
                let header = Header { num_buffers: used.len() as u16, ..Header::default() };
                assert_eq!(bytes[..written], packet(header, &payload(1, len)));
            }
            assert_eq!(queue.ring().fault(), None);
        }
    }
}

/// The driver has a buffer to itself as soon as it was given back: num_buffers is in its place by then, and whatever comes later, errors included, is
/// written to other buffers.
#[test]
fn cve_2021_3748_num_buffers_is_written_before_a_buffer_is_given_back_and_nothing_after() {
    let (mut raw, mut queue) = receiver(MERGEABLE);
    fill_with_canaries(&raw);
    let pieces: Vec<_> = (0..8).map(|i| writable(BUFFERS + 0x1000 * i, 1024)).collect();
    for piece in &pieces {
        raw.chain(&[*piece]);
    }
    queue.expect(8);
    assert_eq!(deliver(&raw, &mut queue, &payload(1, 3000)), Ok(()));
    queue.flush();
    assert_eq!(raw.used(), [(0, 1024), (1, 1024), (2, 964)]);
    let header = Header { num_buffers: 3, ..Header::default() };
    assert_eq!(raw.read(pieces[0].0, Header::LEN), header.to_bytes());
    fill_with_canaries(&raw);
    // A frame of two buffers, and one that finds too few.
    assert_eq!(deliver(&raw, &mut queue, &payload(2, 2000)), Ok(()));
    assert_eq!(deliver(&raw, &mut queue, &payload(3, 4000)), Err(Refused::NoBuffers));
    queue.flush();
    assert_eq!(raw.used(), [(3, 1024), (4, 988)]);
    assert_canaries_live(&raw, &pieces[3..5]);
    fill_with_canaries(&raw);
    // A frame whose fourth buffer is in no memory: the three before it are not given back, so they may be written to.
    raw.chain(&[writable(END, 1024)]);
    assert_eq!(deliver(&raw, &mut queue, &payload(4, 4000)), Err(Refused::Broken));
    queue.flush();
    assert_canaries_live(&raw, &pieces[5..]);
    // They are the driver's again when it resets the device.
    fill_with_canaries(&raw);
    assert_eq!(deliver(&raw, &mut queue, &payload(5, 60)), Err(Refused::Broken));
    queue.flush();
    assert_eq!(raw.used(), []);
    assert_canaries_live(&raw, &[]);
}

/// A frame that meets a buffer outside memory halfway breaks the ring, and no chain of it is left in the device's hands: a device that follows, as after
/// GET_VRING_BASE, takes all that was not given back.
#[test]
fn cve_2022_26353_chains_of_a_frame_that_fails_halfway_are_left_to_the_next_device() {
    for features in [PLAIN, MERGEABLE] {
        let (mut raw, mut queue) = receiver(features);
        let good = [writable(BUFFERS, 1024), writable(BUFFERS + 0x1000, 1024)];
        raw.chain(&good[..1]);
        if features == MERGEABLE {
            good.iter().for_each(|piece| _ = raw.chain(&[*piece]));
            raw.chain(&[writable(END, 1024)]);
        } else {
            raw.chain(&[good[0], good[1], writable(END, 1024)]);
        }
        queue.expect(8);
        assert_eq!(deliver(&raw, &mut queue, &payload(1, 60)), Ok(()));
        assert_eq!(deliver(&raw, &mut queue, &payload(2, 3000)), Err(Refused::Broken));
        queue.flush();
        assert_eq!(raw.used(), [(0, 72)], "what was delivered before is shown");
        assert_eq!((queue.ring().base(), queue.ring().used_index()), (1, 1));
    }
}

/// Each buffer costs as much as a small frame, and whoever sends pays.
#[test]
fn hundreds_of_tiny_buffers_break_the_ring_instead_of_holding_up_the_sender() {
    for features in [PLAIN, MERGEABLE] {
        for (count, len, frame, fits) in [
            (60, 2, 60, true),
            (100, 64, 4000, true),
            (18, 4096, 65_550, true),
            (100, 2, 60, false),
            (120, 16, 1514, false),
        ] {
            let (mut raw, mut queue) = receiver(features);
            let pieces: Vec<_> = (0..count).map(|i| writable(BUFFERS + i * 4096, len)).collect();
            raw.chain(&pieces);
            let expected = if fits { Ok(()) } else { Err(Refused::Broken) };
            assert_eq!(deliver(&raw, &mut queue, &payload(1, frame)), expected, "{count} of {len}");
        }
    }
}

/// In the long run buffers are as large as those of real drivers, or frames are lost: each buffer is a page that nobody else has touched.
#[test]
fn a_driver_of_tiny_buffers_gets_fewer_frames_and_one_of_small_ones_all() {
    for (count, len, all) in
        [(13, 128, true), (2, 1514, true), (19, 4096, true), (60, 30, false), (25, 64, false)]
    {
        let (mut raw, mut queue) = receiver(PLAIN);
        let pieces: Vec<_> = (0..count).map(|i| writable(BUFFERS + i * 4096, len)).collect();
        let frames = 2000;
        let mut lost = 0;
        raw.chain(&pieces);
        for _ in 0..frames {
            match deliver(&raw, &mut queue, &payload(1, 1500)) {
                Ok(()) => {
                    raw.chain(&pieces);
                }
                Err(refused) => {
                    assert_eq!(refused, Refused::Dear);
                    lost += 1;
                }
            }
            queue.flush();
            raw.used();
        }
        assert_eq!(lost == 0, all, "{lost} of {count} buffers of {len}");
        assert!(lost < frames * 3 / 4, "{lost}");
    }
}

/// What a driver in order posts costs it nothing; buffers that are many for no good reason do.
#[test]
fn unusual_buffers_are_counted_and_those_of_real_drivers_are_none() {
    // Chains of so many buffers of so many bytes, frames of so many bytes, and whether each frame takes some beyond what is usual.
    for (features, count, len, frame, unusual) in [
        (PLAIN, 19, 4096, 60, 0),
        (PLAIN, 19, 4096, 65_000, 0),
        (PLAIN, 2, 1514, 1500, 0),
        (PLAIN, 60, 64, 60, 40),
        (MERGEABLE, 1, 1536, 1500, 0),
        (MERGEABLE, 1, 1536, 65_000, 0),
        (MERGEABLE, 1, 1024, 65_000, 0),
        (MERGEABLE, 1, 128, 1500, 10),
        (MERGEABLE, 1, 14, 60, 5),
    ] {
        let (mut raw, mut queue) = receiver(features);
        let pieces: Vec<_> = (0..count).map(|i| writable(BUFFERS + i * 4096, len)).collect();
        for _ in 0..if count > 1 { 2 } else { 64 } {
            raw.chain(&pieces);
        }
        assert_eq!(deliver(&raw, &mut queue, &payload(1, frame)), Ok(()));
        assert_eq!(queue.unusual_buffers(), unusual, "{count} of {len} for {frame} bytes");
        queue.flush();
        assert_eq!(queue.unusual_buffers(), 0);
    }
}

/// 5.1.6.4.1: every buffer of a packet but the last is filled, and only the first has a header.
#[test]
fn clause_5_1_6_4_1_buffers_are_filled_in_order() {
    let (mut raw, mut queue) = receiver(MERGEABLE);
    // No shorter than a header, and nothing but one.
    let heads: Vec<_> = (0..6).map(|i| raw.chain(&[writable(BUFFERS + 100 * i, 12)])).collect();
    deliver(&raw, &mut queue, &payload(4, 50)).unwrap();
    assert_eq!(raw.used(), [], "not before all of it is there");
    queue.flush();
    let used: Vec<_> = heads.iter().map(|head| (u32::from(*head), 12)).collect();
    assert_eq!(raw.used(), [&used[..5], &[(u32::from(heads[5]), 2)]].concat());
    let mut bytes: Vec<u8> = (0..6).flat_map(|i| raw.read(BUFFERS + 100 * i, 12)).collect();
    bytes.truncate(62);
    assert_eq!(bytes, packet(Header { num_buffers: 6, ..Header::default() }, &payload(4, 50)));
}

#[test]
fn receive_chains_of_no_use_break_the_ring_and_only_that() {
    let bad: [&[Piece]; 9] = [
        // Lent for reading (5.1.6.3.1).
        &[(BUFFERS, 2048, false)],
        &[(BUFFERS, 12, false), (BUFFERS, 2048, true)],
        &[(BUFFERS, 0, false), (BUFFERS, 2048, true)],
        // Shorter than a header.
        &[(BUFFERS, 11, true)],
        &[(BUFFERS, 0, true)],
        &[(BUFFERS, 5, true), (BUFFERS, 6, true)],
        // Outside memory.
        &[(0, 2048, true)],
        &[(END, 2048, true)],
        &[(u64::MAX - 10, 2048, true)],
    ];
    for features in [PLAIN, MERGEABLE] {
        for chain in bad {
            let (mut raw, mut queue) = receiver(features);
            let mut other = raw.beside(8);
            let mut other_queue = Receiveq::new(other.device(features), features);
            fill_with_canaries(&raw);
            raw.chain(chain);
            raw.chain(&[writable(BUFFERS + 4096, 2048)]);
            let memory = Arc::clone(&raw.memory);
            assert!(!queue.room(&mut memory.translator(), 64, 1500, &mut Vec::new()), "{chain:?}");
            assert_eq!(queue.ring().fault(), None, "only asked");
            assert_eq!(deliver(&raw, &mut queue, &payload(0, 60)), Err(Refused::Broken), "{chain:?}");
            assert_eq!(deliver(&raw, &mut queue, &payload(0, 60)), Err(Refused::Broken), "sticky");
            assert!(!queue.flush());
            assert_eq!(queue.ring().fault(), Some(Fault::Unusable));
            assert_eq!(raw.used(), []);
            assert_canaries_live(&raw, &[]);
            other.chain(&[writable(BUFFERS, 2048)]);
            assert_eq!(deliver(&other, &mut other_queue, &payload(0, 60)), Ok(()));
        }
    }
}

/// A chain after a good one may break the ring in the same call that takes both: then no frame may
/// be prepared in the good chain either, because none is delivered to it any more.
#[test]
fn there_is_no_room_in_a_ring_that_breaks_behind_it() {
    for features in [PLAIN, MERGEABLE] {
        let (mut raw, mut queue) = receiver(features);
        fill_with_canaries(&raw);
        raw.chain(&[writable(BUFFERS, 2048)]);
        raw.offer(u16::MAX);
        queue.expect(2);
        let memory = Arc::clone(&raw.memory);
        assert!(!queue.room(&mut memory.translator(), 64, 1500, &mut Vec::new()));
        assert!(queue.ring().fault().is_some(), "the head is no descriptor");
        assert_eq!(deliver(&raw, &mut queue, &payload(0, 60)), Err(Refused::Broken));
        queue.flush();
        assert_canaries_live(&raw, &[]);
    }
}

#[test]
fn cve_2018_1059_a_receive_buffer_across_the_end_of_memory_breaks_the_ring() {
    let (mut raw, mut queue) = receiver(PLAIN);
    fill_with_canaries(&raw);
    // Enough of it is inside for the first frame, not for the second.
    for _ in 0..2 {
        raw.chain(&[writable(END - 100, 2048)]);
    }
    assert_eq!(deliver(&raw, &mut queue, &payload(0, 88)), Ok(()));
    assert_eq!(deliver(&raw, &mut queue, &payload(0, 89)), Err(Refused::Broken));
    assert_eq!(queue.ring().fault(), Some(Fault::Unusable));
    assert_canaries_live(&raw, &[writable(END - 100, 100)]);
}

#[test]
fn huge_receive_buffers_take_one_frame_and_tell_its_length() {
    for features in [PLAIN, MERGEABLE] {
        let (mut raw, mut queue) = receiver(features);
        raw.chain(&[(BUFFERS, u32::MAX, true)]);
        raw.chain(&[(BUFFERS, 0x8000_0000, true), (BUFFERS, 0x7fff_ffff, true)]);
        for _ in 0..2 {
            assert_eq!(deliver(&raw, &mut queue, &payload(0, 65_550)), Ok(()));
        }
        queue.flush();
        assert_eq!(raw.used(), [(0, 65_562), (1, 65_562)]);
    }
}

fn addresses() -> impl Strategy<Value = u64> {
    prop_oneof![
        6 => BUFFERS..BORDER,
        2 => BORDER - 300..BORDER + 10,
        1 => END - 2000..END + 10,
        1 => prop_oneof![any::<u64>(), u64::MAX - 100..=u64::MAX, Just(0), Just(BASE - 1)],
    ]
}

fn lengths() -> impl Strategy<Value = u32> {
    prop_oneof![2 => Just(0u32), 3 => 1u32..30, 4 => 30u32..3000, 1 => 60_000u32..70_000, 1 => any::<u32>()]
}

#[derive(Clone, Debug)]
struct RandomDesc {
    addr: u64,
    len: u32,
    flags: u16,
    next: u16,
}

fn descriptors(count: usize) -> impl Strategy<Value = Vec<RandomDesc>> {
    let flags =
        prop_oneof![4 => Just(0u16), 4 => Just(1u16), 4 => Just(2u16), 3 => Just(3u16), 2 => any::<u16>()];
    let next = prop_oneof![20 => 0..count as u16 + 1, 1 => any::<u16>()];
    let desc = (addresses(), lengths(), flags, next).prop_map(|(addr, len, flags, next)| RandomDesc {
        addr,
        len,
        flags,
        next,
    });
    proptest::collection::vec(desc, count)
}

/// Chains of pieces a driver might post, most of them sound.
fn chains() -> impl Strategy<Value = Vec<Vec<Piece>>> {
    let piece = (addresses(), lengths(), proptest::bool::weighted(0.97));
    proptest::collection::vec(proptest::collection::vec(piece, 1..5), 1..24)
}

const RING: u16 = 32;
const INDIRECT_TABLE: u64 = BUFFERS + 0x2000;

fn write_random(raw: &Raw, descs: &[RandomDesc], indirect: bool) {
    for (i, desc) in (0..).zip(descs) {
        raw.write_desc(i, desc.addr, desc.len, desc.flags, desc.next);
        // The same again as an indirect table, which every other descriptor points to.
        let rest = u64::from(desc.len) | u64::from(desc.flags) << 32 | u64::from(desc.next) << 48;
        raw.write(INDIRECT_TABLE + 16 * u64::from(i), &[desc.addr, rest].map(u64::to_le_bytes).concat());
        if indirect && i % 2 == 0 {
            raw.write_desc(i, INDIRECT_TABLE + 16 * u64::from(desc.next % RING), 16 * 20, INDIRECT, 0);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn random_transmit_descriptors_yield_only_sane_frames(
        descs in descriptors(RING.into()),
        heads in proptest::collection::vec(0..RING + 1, 1..40),
        indirect in any::<bool>(),
        memory_seed in any::<u64>(),
    ) {
        let mut raw = Raw::new(RING);
        let features = PLAIN | if indirect { Features::INDIRECT_DESC } else { Features::empty() };
        // Zeroes are a good header; random bytes hardly ever are.
        raw.write(BUFFERS + SIZE / 2, &payload(memory_seed, 0x1000));
        write_random(&raw, &descs, indirect);
        let mut queue = Transmitq::new(raw.device(features), features);
        let (mut frames, mut offered) = (0, 0);
        for head in heads {
            raw.offer(head);
            offered += 1;
            if offered % 5 == 0 {
                for (header, frame) in poll(&raw, &mut queue) {
                    frames += 1;
                    prop_assert!((MIN_FRAME..=MAX_FRAME).contains(&frame.len()));
                    prop_assert_eq!(header.check(frame.len()), Ok(()));
                    prop_assert_eq!((header.flags & !F_NEEDS_CSUM, header.num_buffers), (0, 0));
                }
            }
        }
        let rejected = queue.rejected();
        let counted = frames + rejected.too_short + rejected.too_long + rejected.bad_header;
        let used = raw.used();
        prop_assert!(used.iter().all(|(_, len)| *len == 0));
        if queue.ring().fault().is_none() {
            prop_assert_eq!(counted, used.len() as u64, "each packet is forwarded or counted");
        }
    }

    #[test]
    fn random_receive_descriptors_are_never_written_past(
        chains in chains(),
        sizes in proptest::collection::vec(prop_oneof![14usize..200, 14usize..10_000], 1..20),
        mergeable in any::<bool>(),
    ) {
        let features = if mergeable { MERGEABLE } else { PLAIN };
        let (mut raw, mut queue) = receiver(features);
        fill_with_canaries(&raw);
        for chain in &chains {
            raw.chain(chain);
        }
        let mut bytes = 0;
        for (number, len) in (0..).zip(sizes) {
            if deliver(&raw, &mut queue, &payload(number, len)).is_ok() {
                bytes += Header::LEN + len;
            }
        }
        queue.flush();
        assert_canaries_live(&raw, &chains.concat());
        if queue.ring().fault().is_none() {
            let used = raw.used();
            prop_assert_eq!(used.iter().map(|(_, len)| *len as usize).sum::<usize>(), bytes);
            // Buffers come back in order, none of them with more than it holds.
            for ((_, len), chain) in used.iter().zip(&chains) {
                prop_assert!(u64::from(*len) <= chain.iter().map(|piece| u64::from(piece.1)).sum::<u64>());
            }
        }
    }

    #[test]
    fn random_receive_rings_never_panic(
        descs in descriptors(RING.into()),
        heads in proptest::collection::vec(0..RING + 1, 1..40),
        indirect in any::<bool>(),
    ) {
        let mut raw = Raw::new(RING);
        let features = MERGEABLE | if indirect { Features::INDIRECT_DESC } else { Features::empty() };
        let writable: Vec<_> =
            descs.into_iter().map(|desc| RandomDesc { flags: desc.flags | WRITE, ..desc }).collect();
        write_random(&raw, &writable, indirect);
        let mut queue = Receiveq::new(raw.device(features), features);
        for head in heads {
            raw.offer(head);
            let answer = deliver(&raw, &mut queue, &payload(u64::from(head), 14 + 50 * usize::from(head)));
            prop_assert_eq!(answer == Err(Refused::Broken), queue.ring().fault().is_some());
            queue.flush();
        }
    }
}
