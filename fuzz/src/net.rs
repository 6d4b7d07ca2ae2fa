//! The network device's queues over hostile guest memory.
//!
//! A transmitq lends exactly the bytes that the guest's chains name and that are in its memory; a
//! receiveq writes exactly where chains say it may, and nothing before [`Receiveq::flush`] to the ring.

use ringferry_memory::ReadSlice;
use ringferry_packet::frame::Burst;
use ringferry_packet::vnet::{Header, VALIDATED_HEAD};
use ringferry_ring::{Buffer, Device, part_bytes};
use ringferry_virtio_net::device::{Receiveq, Refused, Transmitq};
use ringferry_virtio_net::{Features, MAX_FRAME, MIN_FRAME};

use crate::guest::{BASE, Guest, Hostile, Memory, Places, REGIONS};
use crate::oracle;
use crate::pen::{Pen, Stroke};
use crate::ring::{Cursor, Reached, Setup};
use crate::script::{Bytes, Field, operations};

/// Bit of [`Setup::flags`]: the ring is packed.
pub const PACKED: u8 = 1 << 3;
/// Bit of [`Setup::flags`]: MRG_RXBUF.
pub const MERGEABLE: u8 = 1 << 4;
/// Bit of [`Setup::flags`]: no VERSION_1.
pub const LEGACY: u8 = 1 << 5;

/// Number of ring sizes to choose from: up to 33 entries, as every offered chain is checked for each frame.
const SIZES: u8 = 6;

/// Bytes of memory that are compared at a time.
const PIECE: usize = 256;

/// Upper bound on the packets per poll. A switch takes 32.
const MAX_POLL: u8 = 64;

operations! {
    /// One step of a script for a transmitq.
    TransmitStep {
        /// The driver changes its ring or memory.
        Driver { stroke: Stroke },
        /// Takes packets, checks their frames and completes them.
        Poll { max: u8 },
        /// Does the same as `Poll`, but the driver writes eight bytes anywhere before the packets are
        /// completed.
        PollChanged { max: u8, at: u32, value: u64 },
        /// Asks the driver for kicks.
        Enable {},
        /// Asks the driver for no kicks.
        Disable {},
    }
}

operations! {
    /// One step of a script for a receiveq.
    ReceiveStep {
        /// The driver changes its ring or memory.
        Driver { stroke: Stroke },
        /// Delivers a frame of private memory.
        Deliver { len: u16 },
        /// Delivers a frame that lies in the same guest's memory.
        Echo { at: u32, len: u16 },
        /// Delivers a frame that was written to its place before.
        InPlace { len: u16 },
        /// Announces frames to the queue.
        Expect { frames: u8 },
        /// Publishes the delivered frames.
        Flush {},
        /// Asks the driver for kicks.
        Enable {},
        /// Asks the driver for no kicks.
        Disable {},
    }
}

/// A ring chosen by an input, and its hostile driver.
struct Ring {
    guest: Guest,
    places: Places,
    features: Features,
    pen: Pen,
}

impl Ring {
    fn new(setup: Setup) -> Option<(Self, Device<Hostile>)> {
        let has = |bit: u8| setup.flags & bit != 0;
        let (places, ring) = Setup { size: setup.size % SIZES, ..setup }.ring(has(PACKED));
        let mut features = Features::empty();
        features.set(Features::INDIRECT_DESC, ring.indirect);
        features.set(Features::EVENT_IDX, ring.event_idx);
        features.set(Features::IN_ORDER, ring.in_order);
        features.set(Features::RING_PACKED, ring.packed);
        features.set(Features::MRG_RXBUF, has(MERGEABLE));
        features.set(Features::VERSION_1, !has(LEGACY));
        // A driver that negotiates no other feature may negotiate no offload, either.
        let offloads = Features::CSUM
            | Features::HOST_TSO4
            | Features::HOST_TSO6
            | Features::HOST_ECN
            | Features::HOST_USO;
        features.set(offloads, !has(LEGACY));
        let guest = Guest::new();
        let start = Cursor::new(&places, setup.base);
        if !places.packed {
            guest.write(places.at[1] + 2, &setup.base.to_le_bytes());
            guest.write(places.at[2] + 2, &setup.base.to_le_bytes());
        }
        let device = Device::new(places.of_device(&guest), features.ring(), start.base(), None).ok()?;
        let pen = Pen::new(places, start);
        Some((Self { guest, places, features, pen }, device))
    }

    /// Applies a stroke of the driver, but never during a call: results are compared with memory as it was.
    fn apply(&mut self, stroke: Stroke) {
        if !matches!(stroke, Stroke::Surprise { .. }) {
            self.pen.apply(stroke, &self.guest);
        }
    }
}

/// Runs a script on a transmitq, and panics if a check fails.
pub fn transmitq(input: &[u8]) -> Reached {
    run_transmitq(input).unwrap_or_default()
}

fn run_transmitq(input: &[u8]) -> Option<Reached> {
    let mut input = Bytes(input);
    let (mut ring, device) = Ring::new(Setup::get(&mut input)?)?;
    let mut queue = Transmitq::new(device, ring.features);
    let mut reached = Reached::default();
    while let Some(step) = TransmitStep::get(&mut input) {
        match step {
            TransmitStep::Driver { stroke } => ring.apply(stroke),
            TransmitStep::Poll { max } => poll(&ring, &mut queue, max, None, &mut reached),
            TransmitStep::PollChanged { max, at, value } => {
                poll(&ring, &mut queue, max, Some((at, value)), &mut reached);
            }
            TransmitStep::Enable {} => {
                queue.ring().enable_kicks();
            }
            TransmitStep::Disable {} => queue.ring().disable_kicks(),
        }
    }
    reached.broken = queue.ring().fault().is_some();
    Some(reached)
}

/// Polls, checks every frame against memory, and completes.
fn poll(
    ring: &Ring,
    queue: &mut Transmitq<Hostile>,
    max: u8,
    change: Option<(u32, u64)>,
    reached: &mut Reached,
) {
    let start = Cursor::new(&ring.places, queue.ring().base());
    let broken = queue.ring().fault().is_some();
    let mut burst = Burst::new();
    let taken = queue.poll(ring.guest.map(), usize::from(max % (MAX_POLL + 1)), &mut burst);
    assert!(taken == 0 || !broken, "a broken ring has packets");
    let expected = expected_frames(ring, start, taken);
    assert_eq!(expected.len(), burst.len(), "frames of {taken} packets");
    let mut bytes = Vec::new();
    if let Some((at, value)) = change {
        ring.guest.write(BASE + u64::from(at), &value.to_le_bytes());
    }
    for (frame, (header, expected)) in burst.frames().iter().zip(&expected) {
        assert!(frame.header.check(expected.len()).is_ok(), "a header that contradicts itself");
        assert_eq!(frame.header.to_bytes(), header.to_bytes());
        burst.flatten(frame, &mut bytes);
        assert_eq!((bytes.len(), frame.len as usize), (expected.len(), expected.len()));
        assert_eq!(frame.prefix(), &expected[..frame.prefix().len()], "the prefix is a copy");
        assert!(change.is_some() || bytes == *expected, "a frame's bytes");
        reached.frames += 1;
    }
    reached.chains += taken;
    queue.complete();
    let behind = queue.ring().base();
    assert_eq!(queue.ring().used_index(), behind, "every packet that was taken is completed");
}

/// Returns the frames of the `taken` chains from `at` on, read once more and naively.
fn expected_frames(ring: &Ring, mut at: Cursor, taken: usize) -> Vec<(Header, Vec<u8>)> {
    let header_len = ring.features.header_len();
    let mut frames = Vec::new();
    let mut free = ring.places.size;
    for _ in 0..taken {
        let chain = oracle::chain(&ring.guest, &ring.places, ring.features.ring(), at, free);
        let chain = chain.expect("a chain that breaks a rule was taken");
        at = at.forward(&ring.places, chain.slots);
        free -= chain.slots;
        let total: usize = chain.readable.iter().map(|buffer| buffer.len as usize).sum();
        if !(header_len + MIN_FRAME..=header_len + MAX_FRAME).contains(&total) {
            continue;
        }
        // The header comes first: if it is bad, the rest of the frame is not read.
        let Some(bytes) = gather(&ring.guest, &chain.readable, header_len) else { break };
        let mut header = [0; Header::LEN];
        header[..header_len].copy_from_slice(&bytes);
        let header = Header::from_bytes(&header).sanitised();
        if header.check(total - header_len).is_err() {
            continue;
        }
        let Some(bytes) = gather(&ring.guest, &chain.readable, total) else { break };
        let frame = &bytes[header_len..];
        let first = &frame[..frame.len().min(VALIDATED_HEAD)];
        if let Ok(header) = header.validated(first, frame.len(), ring.features.host_offloads()) {
            frames.push((header, frame.to_vec()));
        }
    }
    frames
}

/// Returns the first `len` bytes of buffers, if all are in memory.
fn gather(guest: &Guest, buffers: &[Buffer], len: usize) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    for buffer in buffers {
        let some = (buffer.len as usize).min(len - bytes.len());
        if some > 0 {
            bytes.extend(guest.read(buffer.addr, some)?);
        }
    }
    Some(bytes)
}

/// Runs a script on a receiveq, and panics if a check fails.
pub fn receiveq(input: &[u8]) -> Reached {
    run_receiveq(input).unwrap_or_default()
}

fn run_receiveq(input: &[u8]) -> Option<Reached> {
    let mut input = Bytes(input);
    let (ring, device) = Ring::new(Setup::get(&mut input)?)?;
    let queue = Receiveq::new(device, ring.features);
    let mut subject =
        Receiver { ring, queue, offered: Vec::new(), delivered: 0, reached: Reached::default() };
    while let Some(step) = ReceiveStep::get(&mut input) {
        match step {
            ReceiveStep::Driver { stroke } => subject.ring.apply(stroke),
            ReceiveStep::Deliver { len } => subject.deliver(len.into(), None),
            ReceiveStep::Echo { at, len } => subject.deliver(len.into(), Some(BASE + u64::from(at))),
            ReceiveStep::InPlace { len } => subject.deliver_in_place(len.into()),
            ReceiveStep::Expect { frames } => subject.queue.expect(frames.into()),
            ReceiveStep::Flush {} => subject.flush(),
            ReceiveStep::Enable {} => {
                subject.queue.ring().enable_kicks();
            }
            ReceiveStep::Disable {} => subject.queue.ring().disable_kicks(),
        }
    }
    subject.reached.broken = subject.queue.ring().fault().is_some();
    Some(subject.reached)
}

/// A receiveq with the expected state.
struct Receiver {
    ring: Ring,
    queue: Receiveq<Hostile>,
    /// Buffers that the device may write: those of chains that it may have taken since the last flush.
    offered: Vec<Buffer>,
    /// Number of frames since the last flush.
    delivered: usize,
    reached: Reached,
}

impl Receiver {
    fn deliver(&mut self, len: usize, from: Option<u64>) {
        self.note_offers();
        let frame = (1..=251).collect::<Vec<u8>>().repeat(len / 251 + 1);
        let frame = &frame[..len];
        let (first, rest) = frame.split_at(len.min(64));
        let before = self.ring.guest.snapshot();
        let broken = self.queue.ring().fault().is_some();
        let guest = self.ring.guest.clone();
        let mut translator = guest.map().translator();
        let rest = match from {
            Some(addr) => translator.read(addr, rest.len()).unwrap_or(ReadSlice::EMPTY),
            None => rest.into(),
        };
        let result = self.queue.deliver(&mut translator, Header::default(), first, &[rest]);
        let changed = self.ring.guest.snapshot();
        self.only_offered(&before, &changed);
        match result {
            Ok(()) => {
                assert!(!broken, "a broken ring takes frames");
                self.delivered += 1;
                self.reached.frames += 1;
            }
            Err(Refused::Broken) => assert!(self.queue.ring().fault().is_some()),
            Err(Refused::TooBig) => {
                assert!(!self.ring.features.contains(Features::MRG_RXBUF) && before == changed);
            }
            Err(Refused::Dear | Refused::NoBuffers) => {
                assert!(before == changed, "a frame was written and refused");
            }
        }
    }

    /// Writes a frame into the room that the queue has for it, and delivers it from there.
    fn deliver_in_place(&mut self, len: usize) {
        const HEAD: usize = 64;
        self.note_offers();
        let before = self.ring.guest.snapshot();
        let guest = self.ring.guest.clone();
        let mut translator = guest.map().translator();
        let mut room = Vec::new();
        if self.queue.room(&mut translator, HEAD, len, &mut room) {
            let mut left = len.saturating_sub(HEAD);
            let rest = room.iter().map(|piece| {
                let piece = piece.first(left);
                left -= piece.copy_from(&vec![0x5a; piece.len()]);
                piece.as_read()
            });
            let rest: Vec<_> = rest.collect();
            assert_eq!(left, 0, "less room than was said");
            let first = &[0x5a; HEAD][..len.min(HEAD)];
            let result = self.queue.deliver(&mut translator, Header::default(), first, &rest);
            assert_eq!(result, Ok(()), "there was room");
            self.delivered += 1;
            self.reached.frames += 1;
        } else {
            assert!(before == self.ring.guest.snapshot(), "asking writes nothing");
        }
        self.only_offered(&before, &self.ring.guest.snapshot());
    }

    /// Flushes the queue, and checks that the device's own part of the ring changes, and nothing else.
    fn flush(&mut self) {
        let before = self.ring.guest.snapshot();
        let place = self.queue.ring().used_index();
        self.queue.flush();
        let lens = part_bytes(self.ring.places.size, self.ring.places.packed);
        self.offered.clear();
        for part in if self.ring.places.packed { [0, 2] } else { [2, 2] } {
            self.offered.push(Buffer { addr: self.ring.places.at[part], len: lens[part] as u32 });
        }
        self.only_offered(&before, &self.ring.guest.snapshot());
        self.offered.clear();
        let moved = place != self.queue.ring().used_index();
        assert!(moved || self.delivered == 0, "nothing was completed");
        assert_eq!(self.queue.ring().base(), self.queue.ring().used_index(), "unspent chains went back");
        self.reached.chains += self.delivered;
        self.delivered = 0;
    }

    /// Adds every buffer of the chains that the device may take now.
    fn note_offers(&mut self) {
        let Ring { guest, places, features, .. } = &self.ring;
        let mut at = Cursor::new(places, self.queue.ring().base());
        for _ in 0..places.size {
            // The device may take chains that a split ring's index has once published, even if the index was
            // moved back since.
            if places.packed && oracle::available(guest, places, at) == 0 {
                break;
            }
            let chain = oracle::chain(guest, places, features.ring(), at, places.size);
            let Some(chain) = chain else { break };
            self.offered.extend(chain.writable);
            at = at.forward(places, chain.slots);
        }
    }

    /// Checks that only offered bytes changed.
    fn only_offered(&self, before: &[u8], after: &[u8]) {
        // The buffers are sorted by address; each has the furthest end of those up to it.
        let mut offered: Vec<_> =
            self.offered.iter().map(|buffer| (buffer.addr, u64::from(buffer.len))).collect();
        offered.sort_unstable();
        let mut furthest = 0;
        for (start, len) in &mut offered {
            furthest = furthest.max(start.saturating_add(*len));
            *len = furthest;
        }
        let mut at = 0;
        for (start, len) in REGIONS {
            // Memory is compared in pieces: the fuzzer counts every comparison of ours, and a piece is one.
            for piece in (at..at + len).step_by(PIECE) {
                if before[piece..piece + PIECE] == after[piece..piece + PIECE] {
                    continue;
                }
                let changed = (piece..piece + PIECE).filter(|i| before[*i] != after[*i]);
                for addr in changed.map(|i| start + (i - at) as u64) {
                    let begun = offered.partition_point(|(start, _)| *start <= addr);
                    let inside = begun > 0 && addr < offered[begun - 1].1;
                    assert!(inside, "a byte at {addr:#x} was written that was not offered");
                }
            }
            at += len;
        }
    }
}
