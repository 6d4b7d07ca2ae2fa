//! What the driver receives: buffers posted, packets lent.

use std::sync::Arc;

use arrayvec::ArrayVec;
use ringferry_memory::{Area, GuestMemory, ReadSlice, Translator};
use ringferry_packet::vnet::Header;
use ringferry_ring::{Buffer, Driver, Fault, Used};

use super::arena::{Arena, ArenaError, Queue};
use super::transmitq::Transmitq;
use crate::{Features, MAX_FRAME, MIN_FRAME};

/// How receive buffers are laid out (5.1.6.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RxMode {
    /// Buffers of a page; a packet takes as many as it needs. Needs MRG_RXBUF.
    Mergeable,
    /// Buffers of the largest packet; a packet takes one. For guest offloads without MRG_RXBUF.
    Big,
    /// Buffers of one MTU-sized packet; a packet takes one. Without guest segmentation offloads.
    Small {
        /// Largest packet behind the Ethernet header, in bytes.
        mtu: u16,
    },
}

/// Bytes of a mergeable buffer. A page carries a 64 KiB frame in 17 buffers; 1.5 KiB takes 44, and
/// 16 KiB wastes 15/16 of the memory on small packets.
const MERGEABLE: u32 = 4096;

impl RxMode {
    /// The mode that `features` call for.
    pub fn of(features: Features, mtu: u16) -> Self {
        let big = Features::GUEST_TSO4 | Features::GUEST_TSO6 | Features::GUEST_UFO;
        let big = big | Features::GUEST_USO4 | Features::GUEST_USO6;
        if features.contains(Features::MRG_RXBUF) {
            RxMode::Mergeable
        } else if features.intersects(big) {
            RxMode::Big
        } else {
            RxMode::Small { mtu }
        }
    }

    /// Bytes of each buffer, header included.
    pub fn buffer_len(self) -> u32 {
        match self {
            RxMode::Mergeable => MERGEABLE,
            RxMode::Big => ((MAX_FRAME + Header::LEN).next_multiple_of(64)) as u32,
            // 14 for Ethernet and 4 for a VLAN tag.
            RxMode::Small { mtu } => (Header::LEN as u32 + 18 + u32::from(mtu)).next_multiple_of(64),
        }
    }
}

/// Packets that were dropped because of what the device said about them. Every buffer of such a
/// packet is posted again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReceiveErrors {
    /// A length beyond the buffer, a packet shorter than its headers or longer than [`MAX_FRAME`],
    /// `num_buffers` of 0 or more than the device used. Linux calls these `rx_length_errors`.
    pub length: u64,
}

/// A received packet that lies in one buffer and stays there: to be sent as it is with
/// [`Transmitq::forward`](super::Transmitq::forward), or given back to the queue it came from with
/// [`Receiveq::give_back`]. One that is forgotten is lost to that queue.
#[derive(Debug)]
#[must_use]
pub struct Loan {
    /// The receive buffer.
    pub(super) index: u16,
    /// Bytes in it, header included.
    pub(super) len: u32,
    /// Where they are.
    pub(super) addr: u64,
}

/// A received packet, lent for one call.
#[derive(Debug)]
pub struct Packet<'a> {
    /// The virtual header, as the device wrote it.
    pub header: Header,
    /// Length of the frame in bytes, header excluded.
    pub len: usize,
    /// Header and frame, in pieces. The first piece holds all of the header.
    pub pieces: &'a [ReadSlice<'a>],
    /// Its buffer, if there is only one, for who wants to keep it beyond the call.
    pub loan: &'a mut Option<Loan>,
}

/// The driver's side of a receiveq.
#[derive(Debug)]
pub struct Receiveq {
    ring: Driver<Area, u16>,
    memory: Arc<GuestMemory>,
    mode: RxMode,
    header_len: usize,
    buffers: u64,
    stride: u64,
    /// Buffers not posted.
    free: Vec<u16>,
    /// The packet being put together: buffer and used length.
    parts: Vec<(u16, u32)>,
    errors: ReceiveErrors,
}

/// Used buffers that are collected, and their headers fetched, before any is looked at.
const LOOKAHEAD: usize = 32;

/// Bytes of a virtual header.
const HEADER: u32 = Header::LEN as u32;

/// Most pieces of one packet: a frame of [`MAX_FRAME`] in mergeable buffers, and one more for the header.
const MAX_PIECES: usize = MAX_FRAME / MERGEABLE as usize + 2;

impl Receiveq {
    /// Bytes of arena for a queue of `size` entries.
    pub fn arena_bytes(size: u16, mode: RxMode) -> usize {
        Arena::queue_bytes(size, 0) + buffers(size) * stride(mode) as usize + 4096
    }

    /// Makes a queue of `size` entries and twice as many buffers, none posted yet.
    ///
    /// # Errors
    /// See [`ArenaError`].
    pub fn new(
        arena: &mut Arena,
        size: u16,
        features: Features,
        mode: RxMode,
    ) -> Result<(Queue, Self), ArenaError> {
        let (queue, ring) = arena.queue(size, features.ring(), 0)?;
        let stride = stride(mode);
        let count = buffers(size);
        let buffers = arena.alloc(count * stride as usize)?;
        let receiveq = Self {
            ring,
            memory: Arc::clone(arena.memory()),
            mode,
            header_len: features.header_len(),
            buffers,
            stride,
            free: (0..count).rev().map(|index| index as u16).collect(),
            parts: Vec::new(),
            errors: ReceiveErrors::default(),
        };
        Ok((queue, receiveq))
    }

    /// The ring, for its notifications and its state.
    pub fn ring(&mut self) -> &mut Driver<Area, u16> {
        &mut self.ring
    }

    /// The violation that broke this queue, if any.
    pub fn fault(&self) -> Option<Fault> {
        self.ring.fault()
    }

    /// How buffers are laid out.
    pub fn mode(&self) -> RxMode {
        self.mode
    }

    /// Packets dropped for what the device said, since the queue was made.
    pub fn errors(&self) -> ReceiveErrors {
        self.errors
    }

    /// Posts every free buffer; true when the device wants a kick.
    #[inline]
    pub fn refill(&mut self) -> bool {
        let len = self.mode.buffer_len();
        for _ in 0..self.ring.free() {
            let Some(index) = self.free.pop() else { break };
            let addr = self.buffers + u64::from(index) * self.stride;
            if self.ring.add(&[], &[Buffer { addr, len }], index).is_err() {
                self.free.push(index);
                break;
            }
        }
        self.ring.publish()
    }

    /// Lends each of up to `max` received packets to `deliver`; returns how many there were. Their
    /// buffers are free afterwards and wait for [`Receiveq::refill`].
    #[inline]
    pub fn receive(&mut self, max: usize, mut deliver: impl FnMut(Packet<'_>)) -> usize {
        let memory = Arc::clone(&self.memory);
        let mut translator = memory.translator();
        let mut count = 0;
        while count < max {
            // A packet has at least one buffer: no more of them are collected than are used up below.
            let mut burst = ArrayVec::<Used<u16>, LOOKAHEAD>::new();
            while burst.len() < LOOKAHEAD.min(max - count) {
                let Some(used) = self.ring.collect() else { break };
                // The device has just written it: all misses of a burst overlap.
                self.lend(&mut translator, used.token, HEADER).prefetch();
                burst.push(used);
            }
            if burst.is_empty() {
                break;
            }
            let mut burst = burst.into_iter();
            while let Some(used) = burst.next() {
                self.gather(used, &mut burst, &mut translator, &mut deliver);
                count += 1;
            }
        }
        count
    }

    /// Takes a buffer back that was kept.
    #[inline]
    pub fn give_back(&mut self, loan: Loan) {
        self.free.push(loan.index);
    }

    /// Takes back the buffers of this queue that `transmitq` has forwarded and reclaimed.
    #[inline]
    pub fn take_back(&mut self, transmitq: &mut Transmitq) {
        self.free.append(&mut transmitq.returned);
    }

    /// The first `len` bytes of a buffer, which lies inside the arena.
    #[inline(always)]
    fn lend<'m>(&self, translator: &mut Translator<'m>, index: u16, len: u32) -> ReadSlice<'m> {
        let addr = self.buffers + u64::from(index) * self.stride;
        translator.read(addr, len as usize).unwrap_or(ReadSlice::EMPTY)
    }

    /// Puts one packet together from its first buffer and those that follow, and lends it. Its buffers
    /// are free afterwards.
    #[inline(always)]
    fn gather(
        &mut self,
        used: Used<u16>,
        burst: &mut impl Iterator<Item = Used<u16>>,
        translator: &mut Translator<'_>,
        deliver: &mut impl FnMut(Packet<'_>),
    ) {
        let limit = self.mode.buffer_len();
        let first = self.lend(translator, used.token, used.len.min(limit));
        let mut bytes = [0; Header::LEN];
        first.first(self.header_len).copy_to(&mut bytes);
        let header = Header::from_bytes(&bytes);
        let whole = used.len <= limit && used.len as usize >= self.header_len;
        // A header that was not written is an earlier packet's: its count would swallow good packets.
        let counts = self.mode == RxMode::Mergeable && used.len as usize >= self.header_len;
        if counts && header.num_buffers != 1 {
            self.gather_many(used, header, whole, burst, translator, deliver);
            return;
        }
        let len = (used.len as usize).wrapping_sub(self.header_len);
        let addr = self.buffers + u64::from(used.token) * self.stride;
        let mut loan = Some(Loan { index: used.token, len: used.len, addr });
        if whole && (MIN_FRAME..=MAX_FRAME).contains(&len) {
            deliver(Packet { header, len, pieces: &[first], loan: &mut loan });
        } else {
            self.errors.length += 1;
        }
        if let Some(loan) = loan {
            self.free.push(loan.index);
        }
    }

    /// Puts together a packet of several buffers, or of a number of them that cannot be.
    #[inline(never)]
    fn gather_many(
        &mut self,
        used: Used<u16>,
        header: Header,
        mut good: bool,
        burst: &mut impl Iterator<Item = Used<u16>>,
        translator: &mut Translator<'_>,
        deliver: &mut impl FnMut(Packet<'_>),
    ) {
        let limit = self.mode.buffer_len();
        let mut total = used.len as usize;
        self.parts.push((used.token, used.len));
        // Without a sane count there is no telling where the next packet begins: take one buffer.
        good &= header.num_buffers > 0;
        for _ in 1..header.num_buffers {
            // All buffers of a packet become visible together (5.1.6.4.1): one that is missing is the
            // device's error, not a reason to wait.
            let Some(next) = burst.next().or_else(|| self.ring.collect()) else {
                good = false;
                break;
            };
            self.parts.push((next.token, next.len));
            good &= next.len <= limit && self.parts.len() <= MAX_PIECES;
            total = total.saturating_add(next.len as usize);
        }
        if good && (MIN_FRAME..=MAX_FRAME).contains(&total.saturating_sub(self.header_len)) {
            let pieces: ArrayVec<ReadSlice<'_>, MAX_PIECES> =
                self.parts.iter().map(|&(index, len)| self.lend(translator, index, len)).collect();
            let len = total - self.header_len;
            deliver(Packet { header, len, pieces: &pieces, loan: &mut None });
        } else {
            self.errors.length += 1;
        }
        self.free.extend(self.parts.drain(..).map(|(index, _)| index));
    }
}

/// Buffers of a queue of `size` entries: as many as it holds, and as many again that may be on loan
/// meanwhile, so that a driver that forwards keeps its ring full. Their numbers fit 16 bits. Those that
/// are never used cost addresses, not memory.
fn buffers(size: u16) -> usize {
    2 * usize::from(size)
}

/// Distance between buffers: their length, up to a cache line, and an odd number of lines. A multiple
/// of the page would put the headers of all buffers into the same few sets of the first-level cache.
fn stride(mode: RxMode) -> u64 {
    let lines = u64::from(mode.buffer_len()).div_ceil(64);
    64 * (lines | 1)
}
