//! What the driver receives: buffers posted, packets lent.

use std::sync::Arc;

use arrayvec::ArrayVec;
use ringferry_memory::{Area, GuestMemory, ReadSlice};
use ringferry_packet::vnet::Header;
use ringferry_ring::{Buffer, Driver, Fault, Used};

use super::arena::{Arena, ArenaError, LEAD, Queue, line_stride};
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
    buffers: Buffers,
    /// Buffers not posted.
    free: Vec<u16>,
    /// The packet being put together.
    parts: Vec<Used<u16>>,
    errors: ReceiveErrors,
}

/// Used buffers that are collected, and their headers fetched, before any is looked at.
const LOOKAHEAD: usize = 32;

/// Free entries that are worth posting buffers for: a burst.
const REFILL: u16 = 32;

/// Bytes of a virtual header.
const HEADER: u32 = Header::LEN as u32;

/// Most pieces of one packet: a frame of [`MAX_FRAME`] in mergeable buffers, and one more for the header.
const MAX_PIECES: usize = MAX_FRAME / MERGEABLE as usize + 2;

impl Receiveq {
    /// Bytes of arena for a queue of `size` entries.
    pub fn arena_bytes(size: u16, mode: RxMode) -> usize {
        Arena::queue_bytes(size, 0) + Buffers::count(size) * Buffers::stride(mode) + 4096
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
        let stride = Buffers::stride(mode);
        let count = Buffers::count(size);
        let base = arena.alloc(count * stride)?;
        let receiveq = Self {
            ring,
            memory: Arc::clone(arena.memory()),
            mode,
            header_len: features.header_len(),
            buffers: Buffers { base, stride: stride as u64 },
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

    /// Posts free buffers once there are enough to be worth showing; true when the device wants a
    /// kick. For whoever polls: a device that is given its buffers one by one also works one by one.
    /// [`Receiveq::refill`] is due before sleeping.
    #[inline]
    pub fn top_up(&mut self) -> bool {
        self.ring.free() >= REFILL.min(self.ring.size() / 4) && self.refill()
    }

    /// Posts every free buffer; true when the device wants a kick.
    #[inline]
    pub fn refill(&mut self) -> bool {
        let len = self.mode.buffer_len();
        for _ in 0..self.ring.free() {
            let Some(index) = self.free.pop() else { break };
            let addr = self.buffers.addr(index);
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
        let Self { ring, memory, mode, header_len, buffers, free, parts, errors } = self;
        let (limit, mergeable) = (mode.buffer_len(), *mode == RxMode::Mergeable);
        let mut translator = memory.translator();
        let mut lend = |index: u16, len: u32| translator.read(buffers.addr(index), len as usize);
        let mut lend = |index, len| lend(index, len).unwrap_or(ReadSlice::EMPTY);
        let mut count = 0;
        while count < max {
            // A packet has at least one buffer: no more of them are collected than are used up below.
            let mut burst = ArrayVec::<Used<u16>, LOOKAHEAD>::new();
            while burst.len() < LOOKAHEAD.min(max - count) {
                let Some(used) = ring.collect() else { break };
                // The device has just written it: all misses of a burst overlap.
                lend(used.token, HEADER).prefetch();
                burst.push(used);
            }
            if burst.is_empty() {
                break;
            }
            let mut burst = burst.into_iter();
            while let Some(Used { token, len: used }) = burst.next() {
                count += 1;
                let first = lend(token, used.min(limit));
                let mut bytes = [0; Header::LEN];
                first.first(*header_len).copy_to(&mut bytes);
                let header = Header::from_bytes(&bytes);
                let written = used as usize >= *header_len;
                // A header that was not written is an earlier packet's: its count would swallow good
                // packets.
                if mergeable && written && header.num_buffers != 1 {
                    let first = Used { token, len: used };
                    let mut next = || burst.next().or_else(|| ring.collect());
                    let total = gather(first, header.num_buffers, limit, parts, &mut next);
                    let len = total.unwrap_or(0).saturating_sub(*header_len);
                    if (MIN_FRAME..=MAX_FRAME).contains(&len) {
                        let pieces: ArrayVec<ReadSlice<'_>, MAX_PIECES> =
                            parts.iter().map(|part| lend(part.token, part.len)).collect();
                        deliver(Packet { header, len, pieces: &pieces, loan: &mut None });
                    } else {
                        errors.length += 1;
                    }
                    free.extend(parts.drain(..).map(|part| part.token));
                    continue;
                }
                let len = (used as usize).saturating_sub(*header_len);
                let mut loan = Some(Loan { index: token, len: used, addr: buffers.addr(token) });
                if used <= limit && (MIN_FRAME..=MAX_FRAME).contains(&len) {
                    deliver(Packet { header, len, pieces: &[first], loan: &mut loan });
                } else {
                    errors.length += 1;
                }
                if let Some(loan) = loan {
                    free.push(loan.index);
                }
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
}

/// Collects the buffers of a packet that says it has `count`, into `parts`; the bytes in them, or `None`
/// when it cannot be so.
#[inline(never)]
fn gather(
    first: Used<u16>,
    count: u16,
    limit: u32,
    parts: &mut Vec<Used<u16>>,
    next: &mut impl FnMut() -> Option<Used<u16>>,
) -> Option<usize> {
    let mut total = first.len as usize;
    // Without a sane count there is no telling where the next packet begins: take one buffer.
    let mut good = first.len <= limit && count > 0;
    parts.push(first);
    for _ in 1..count {
        // All buffers of a packet become visible together (5.1.6.4.1): one that is missing is the
        // device's error, not a reason to wait.
        let part = next()?;
        good &= part.len <= limit && parts.len() < MAX_PIECES;
        total = total.saturating_add(part.len as usize);
        parts.push(part);
    }
    good.then_some(total)
}

/// Where the buffers of a queue lie.
#[derive(Clone, Copy, Debug)]
struct Buffers {
    base: u64,
    stride: u64,
}

impl Buffers {
    /// How many buffers a queue of `size` entries has: as many as it holds, and as many again that may
    /// be on loan meanwhile, so that a driver that forwards keeps its ring full. Their numbers fit 16
    /// bits. Those that are never used cost addresses, not memory.
    fn count(size: u16) -> usize {
        2 * usize::from(size)
    }

    /// Bytes from one to the next; see [`line_stride`].
    fn stride(mode: RxMode) -> usize {
        line_stride(mode.buffer_len() as usize)
    }

    #[inline(always)]
    fn addr(self, index: u16) -> u64 {
        self.base + u64::from(index) * self.stride + LEAD as u64
    }
}
