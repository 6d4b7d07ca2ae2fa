//! The rings of a capture: single producer, single consumer, in memory that two processes share.
//!
//! **Life cycle.** The switch makes the [`SharedRings`] of a capture, gives each of its workers the [`RingWriter`] of one ring, and sends the
//! descriptors to the client, which opens a [`RingReader`] on them. A worker calls [`RingWriter::push`] between two bursts and at no other time;
//! the client calls [`RingReader::read`] whenever it likes. A ring ends when both sides have dropped it.
//!
//! **A worker never waits.** A record that finds no room is lost, and counted by whoever pushes it. No descriptor is signalled: the reader
//! looks now and then.
//!
//! **Hostile readers.** There are two files. The *contents* are sealed against shrinking and, once the switch has mapped them and touched each page,
//! against writing by anybody else (`F_SEAL_FUTURE_WRITE`), which also forbids to punch holes; the reader reads them with `pread`. The
//! *index* is small and writable by both: the writer keeps copies of what it writes there, and believes the reader's position only as far as it is
//! between the writer's own and a ring's length before it. A position that is not makes records lost and nothing else.
//!
//! ```text
//!   index, for each ring:   head (the writer's) | tail (the reader's) | seen, accepted, lost of each interface
//!   contents, for each:     records of HEADER bytes and the frame, padded to 8, round and round
//! ```

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ringferry_memory::{Area, MapError, ReadSlice, Region, RegionSpec, SharedMem, Words};
use ringferry_packet::vnet::Header;
use rustix::fs::SealFlags;

use super::Direction;
use crate::drops::DropReason;

/// Bytes in front of each frame.
const HEADER: usize = 40;

/// Alignment of records.
const ALIGN: usize = 8;

/// Offsets in a ring's part of the index. The writer's and the reader's words are on lines of their own, two apart, as adjacent ones are fetched in
/// pairs.
const HEAD: usize = 0;
const TAIL: usize = 128;
const COUNTS: usize = 256;

/// Bytes of the counters of one interface.
const COUNTS_BYTES: usize = 24;

/// The number of a queue that is not known.
const NO_QUEUE: u16 = u16::MAX;

/// Bounds on the length of a ring.
pub const MIN_RING: usize = 64 << 10;
/// See [`MIN_RING`].
pub const MAX_RING: usize = 64 << 20;

/// A reason why a capture has no rings.
#[derive(Debug, thiserror::Error)]
pub enum RingError {
    /// There is no memory, or no descriptor.
    #[error("no memory for a capture: {0}")]
    Os(#[from] io::Error),
    /// The memory cannot be mapped.
    #[error("the memory of a capture: {0}")]
    Map(#[from] MapError),
    /// What the other side says of the rings cannot be.
    #[error("the rings of the capture make no sense: is it the same version on both sides?")]
    Garbled,
}

/// Numbers and sizes of a capture's rings, from which both sides compute where everything lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Number of rings.
    pub rings: usize,
    /// Bytes of each, a power of two.
    pub ring_bytes: usize,
    /// Number of interfaces.
    pub interfaces: usize,
}

impl Layout {
    /// Bytes of a ring's part of the index.
    fn index_stride(&self) -> usize {
        (COUNTS + self.interfaces * COUNTS_BYTES).next_multiple_of(256)
    }

    /// Bytes of the two files together.
    pub fn bytes(&self) -> usize {
        self.rings * (self.index_stride() + self.ring_bytes)
    }

    fn is_sound(&self) -> bool {
        (1..=4096).contains(&self.rings)
            && (MIN_RING..=MAX_RING).contains(&self.ring_bytes)
            && self.ring_bytes.is_power_of_two()
            && (1..=usize::from(u16::MAX)).contains(&self.interfaces)
    }
}

/// What became of frames that a capture was offered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Frames that were offered.
    pub seen: u64,
    /// Those that passed the filter, and for which there was room.
    pub accepted: u64,
    /// Those that were lost: there was no room, or no time to look at them.
    pub lost: u64,
}

/// What is known of a captured frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// Nanoseconds since 1970.
    pub stamp: u64,
    /// Number of the interface.
    pub interface: u16,
    /// The queue pair of the port that it came from or goes to.
    pub queue: Option<u16>,
    /// Length of the frame.
    pub original: u32,
    /// Which way it goes.
    pub direction: Direction,
    /// The reason, if it was dropped.
    pub dropped: Option<DropReason>,
    /// Its virtual header.
    pub header: Header,
}

impl Record {
    fn to_bytes(self, captured: u32, total: u32) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        let mut at = 0;
        let mut put = |part: &[u8]| {
            bytes[at..at + part.len()].copy_from_slice(part);
            at += part.len();
        };
        put(&total.to_le_bytes());
        put(&captured.to_le_bytes());
        put(&self.stamp.to_le_bytes());
        put(&self.original.to_le_bytes());
        put(&self.interface.to_le_bytes());
        put(&self.queue.unwrap_or(NO_QUEUE).to_le_bytes());
        put(&self.header.to_bytes());
        put(&[u8::from(self.direction == Direction::Out), self.dropped.map_or(0, |reason| reason as u8 + 1)]);
        bytes
    }

    /// Reads a record at the beginning of `bytes`: it, the frame, and the bytes behind it.
    fn read(bytes: &[u8]) -> Option<(Record, &[u8], &[u8])> {
        let head = bytes.first_chunk::<HEADER>()?;
        let word = |at: usize| head[at..].first_chunk().map(|word| u32::from_le_bytes(*word));
        let half = |at: usize| head[at..].first_chunk().map(|half| u16::from_le_bytes(*half));
        let (total, captured) = (word(0)? as usize, word(4)? as usize);
        let frame = bytes.get(HEADER..HEADER.checked_add(captured)?)?;
        let behind = bytes.get(total..).filter(|_| total == record_bytes(captured))?;
        let queue = half(22)?;
        let record = Record {
            stamp: head[8..].first_chunk().map(|stamp| u64::from_le_bytes(*stamp))?,
            original: word(16)?,
            interface: half(20)?,
            queue: (queue != NO_QUEUE).then_some(queue),
            header: Header::from_bytes(head[24..].first_chunk()?),
            direction: if head[36] == 0 { Direction::In } else { Direction::Out },
            dropped: match head[37] {
                0 => None,
                reason => Some(*DropReason::ALL.get(usize::from(reason) - 1)?),
            },
        };
        Some((record, frame, behind))
    }
}

/// Bytes of a record with so much of a frame.
fn record_bytes(captured: usize) -> usize {
    (HEADER + captured).next_multiple_of(ALIGN)
}

fn spec(size: usize) -> RegionSpec {
    RegionSpec { guest_addr: 0, size: size as u64, user_addr: 0, mmap_offset: 0 }
}

/// The rings of a capture, as the switch makes them.
#[derive(Debug)]
pub struct SharedRings {
    layout: Layout,
    index: SharedMem,
    contents: SharedMem,
    regions: [Arc<Region>; 2],
}

impl SharedRings {
    /// Makes the memory, all pages of it.
    ///
    /// # Errors
    /// There is none, or the layout is out of bounds.
    pub fn new(layout: Layout) -> Result<SharedRings, RingError> {
        if !layout.is_sound() {
            return Err(RingError::Garbled);
        }
        let index = SharedMem::new("ringferry-capture-index", layout.rings * layout.index_stride())?;
        let contents = SharedMem::sealable("ringferry-capture", layout.rings * layout.ring_bytes)?;
        let regions = [index.map_at(0)?, contents.map_at(0)?];
        // The kernel clears each page when it is first touched. That takes longer than copying a frame, so it is done here and not by a worker.
        for (region, size) in regions.iter().zip([index.size(), contents.size()]) {
            let area = region.area(0, size).ok_or(RingError::Garbled)?;
            (0..size).step_by(4096).for_each(|at| area.store64(at, 0));
        }
        let seals = SealFlags::FUTURE_WRITE | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(contents.fd(), seals).map_err(io::Error::from)?;
        Ok(SharedRings { layout, index, contents, regions })
    }

    /// Borrows the descriptors, for the client: those of the index and of the contents.
    pub fn fds(&self) -> [BorrowedFd<'_>; 2] {
        [self.index.fd(), self.contents.fd()]
    }

    /// Returns the writing end of a ring, of which there must be only one.
    pub fn writer(&self, ring: usize) -> Option<RingWriter> {
        let Layout { rings, ring_bytes, interfaces } = self.layout;
        let stride = self.layout.index_stride();
        let index = self.regions[0].area(ring.checked_mul(stride)?, stride)?;
        let contents = self.regions[1].area(ring.checked_mul(ring_bytes)?, ring_bytes)?;
        let zero = AtomicU64::default;
        (ring < rings).then(|| RingWriter { index, contents, interfaces, head: zero(), tail: zero() })
    }
}

/// The writing end of a ring, for one thread at a time. Two would spoil each other's records, and nothing worse.
#[derive(Debug)]
pub struct RingWriter {
    index: Area,
    contents: Area,
    interfaces: usize,
    /// Bytes written ever.
    head: AtomicU64,
    /// The reader's position when it was last looked at.
    tail: AtomicU64,
}

impl RingWriter {
    /// Writes a record of the frame that is the concatenation of `first` and `rest`, of which `snaplen` bytes are kept at most. Returns false if there
    /// is no room.
    #[inline]
    pub fn push(&self, record: &Record, first: &[u8], rest: &[ReadSlice<'_>], snaplen: u32) -> bool {
        let size = self.contents.len();
        let captured = record.original.min(snaplen) as usize;
        let total = record_bytes(captured);
        let head = self.head.load(Ordering::Relaxed);
        if !self.has_room(head, total as u64) {
            return false;
        }
        let mut at = self.copy(head as usize, &record.to_bytes(captured as u32, total as u32), size);
        let mut left = captured;
        let part = &first[..first.len().min(left)];
        at = self.copy(at, part, size);
        left -= part.len();
        for piece in rest {
            if left == 0 {
                break;
            }
            let mut piece = piece.first(left);
            left -= piece.len();
            while !piece.is_empty() {
                let from = at & (size - 1);
                let Some(room) = self.contents.write(from, size - from) else { break };
                let done = piece.copy_to_slice(&room);
                (at, piece) = (at + done, piece.skip(done));
            }
        }
        let head = head + total as u64;
        self.head.store(head, Ordering::Relaxed);
        // The record is seen with it.
        self.index.store64_release(HEAD, head);
        true
    }

    #[inline]
    fn has_room(&self, head: u64, total: u64) -> bool {
        let size = self.contents.len() as u64;
        let room = |tail: u64| size.checked_sub(head.wrapping_sub(tail)).is_some_and(|room| room >= total);
        if room(self.tail.load(Ordering::Relaxed)) {
            return true;
        }
        // What the reader has released must not be overwritten before it has been read.
        let tail = self.index.load64_acquire(TAIL);
        let found = room(tail);
        if found {
            self.tail.store(tail, Ordering::Relaxed);
        }
        found
    }

    #[inline]
    fn copy(&self, mut at: usize, mut bytes: &[u8], size: usize) -> usize {
        while !bytes.is_empty() {
            let from = at & (size - 1);
            let Some(room) = self.contents.write(from, size - from) else { break };
            let done = room.copy_from(bytes);
            (at, bytes) = (at + done, &bytes[done..]);
        }
        at
    }

    /// Returns what was last shown of an interface.
    pub fn shown(&self, interface: u16) -> Counts {
        let at = COUNTS + usize::from(interface) * COUNTS_BYTES;
        if usize::from(interface) >= self.interfaces {
            return Counts::default();
        }
        let word = |number: usize| self.index.load64(at + number * 8);
        Counts { seen: word(0), accepted: word(1), lost: word(2) }
    }

    /// Shows what became of the frames of an interface so far.
    #[inline]
    pub fn show(&self, interface: u16, counts: Counts) {
        let at = usize::from(interface);
        if at < self.interfaces {
            let at = COUNTS + at * COUNTS_BYTES;
            self.index.store64(at, counts.seen);
            self.index.store64(at + 8, counts.accepted);
            self.index.store64(at + 16, counts.lost);
        }
    }
}

/// The client's end of a capture's rings.
#[derive(Debug)]
pub struct RingReader {
    layout: Layout,
    /// The index part of each ring.
    index: Vec<Area>,
    contents: OwnedFd,
    tails: Vec<u64>,
}

impl RingReader {
    /// Opens the rings that a switch has made.
    ///
    /// # Errors
    /// They cannot be mapped, or are not what was said.
    pub fn new(layout: Layout, index: impl AsFd, contents: OwnedFd) -> Result<RingReader, RingError> {
        if !layout.is_sound() {
            return Err(RingError::Garbled);
        }
        let stride = layout.index_stride();
        let region = Region::map(index.as_fd(), spec(layout.rings * stride))?;
        let index = (0..layout.rings).map(|ring| region.area(ring * stride, stride));
        let index = index.collect::<Option<Vec<_>>>().ok_or(RingError::Garbled)?;
        Ok(RingReader { layout, index, contents, tails: vec![0; layout.rings] })
    }

    /// Returns the number of rings.
    pub fn rings(&self) -> usize {
        self.layout.rings
    }

    /// Takes everything out of a ring. `take` is called for each record, in the order in which they were written.
    ///
    /// # Errors
    /// The contents cannot be read, or are not records.
    pub fn read(
        &mut self,
        ring: usize,
        buffer: &mut Vec<u8>,
        take: &mut dyn FnMut(Record, &[u8]),
    ) -> Result<(), RingError> {
        let size = self.layout.ring_bytes as u64;
        let (index, tail) = (&self.index[ring], self.tails[ring]);
        let head = index.load64_acquire(HEAD);
        let have = head.wrapping_sub(tail);
        if have > size {
            return Err(RingError::Garbled);
        }
        buffer.resize(have as usize, 0);
        let from = tail & (size - 1);
        let (one, two) = buffer.split_at_mut(have.min(size - from) as usize);
        let start = ring as u64 * size;
        for (mut part, mut at) in [(one, start + from), (two, start)] {
            while !part.is_empty() {
                let done = rustix::io::pread(&self.contents, &mut *part, at).map_err(io::Error::from)?;
                if done == 0 {
                    return Err(RingError::Garbled);
                }
                part = &mut part[done..];
                at += done as u64;
            }
        }
        self.tails[ring] = head;
        index.store64_release(TAIL, head);
        let mut left = &buffer[..];
        while !left.is_empty() {
            let (record, frame, behind) = Record::read(left).ok_or(RingError::Garbled)?;
            if usize::from(record.interface) >= self.layout.interfaces {
                return Err(RingError::Garbled);
            }
            take(record, frame);
            left = behind;
        }
        Ok(())
    }

    /// Returns what became of the frames of an interface so far, in all rings.
    pub fn counts(&self, interface: u16) -> Counts {
        let mut sum = Counts::default();
        if usize::from(interface) < self.layout.interfaces {
            let at = COUNTS + usize::from(interface) * COUNTS_BYTES;
            for index in &self.index {
                let word = |number: usize| index.load64(at + number * 8);
                sum.seen = sum.seen.wrapping_add(word(0));
                sum.accepted = sum.accepted.wrapping_add(word(1));
                sum.lost = sum.lost.wrapping_add(word(2));
            }
        }
        sum
    }
}

#[cfg(test)]
mod tests;
