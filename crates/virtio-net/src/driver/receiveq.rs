//! What the driver receives: buffers posted, packets lent.

use std::sync::Arc;

use ringferry_memory::{Area, GuestMemory, ReadSlice};
use ringferry_packet::vnet::Header;
use ringferry_ring::split::{Driver, Used};
use ringferry_ring::{Buffer, Fault};

use super::arena::{Arena, ArenaError, Queue};
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

/// A received packet, lent for one call.
#[derive(Debug)]
pub struct Packet<'a> {
    /// The virtual header, as the device wrote it.
    pub header: Header,
    /// Length of the frame in bytes, header excluded.
    pub len: usize,
    /// Header and frame, in pieces. The first piece holds all of the header.
    pub pieces: &'a [ReadSlice<'a>],
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

/// Most pieces of one packet: a frame of [`MAX_FRAME`] in mergeable buffers, and one more for the header.
const MAX_PIECES: usize = MAX_FRAME / MERGEABLE as usize + 2;

impl Receiveq {
    /// Bytes of arena for a queue of `size` entries.
    pub fn arena_bytes(size: u16, mode: RxMode) -> usize {
        Arena::queue_bytes(size, 0) + usize::from(size) * stride(mode) as usize + 4096
    }

    /// Makes a queue of `size` entries and as many buffers, none posted yet.
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
        let buffers = arena.alloc(usize::from(size) * stride as usize)?;
        let receiveq = Self {
            ring,
            memory: Arc::clone(arena.memory()),
            mode,
            header_len: features.header_len(),
            buffers,
            stride,
            free: (0..size).rev().collect(),
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
        while let Some(index) = self.free.pop() {
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
        let mut count = 0;
        while count < max {
            let Some(used) = self.ring.collect() else { break };
            self.gather(used, &mut deliver);
            self.free.extend(self.parts.drain(..).map(|(index, _)| index));
            count += 1;
        }
        count
    }

    /// Puts one packet together from its first buffer and those that follow, and lends it.
    #[inline]
    fn gather(&mut self, used: Used<u16>, deliver: &mut impl FnMut(Packet<'_>)) {
        let limit = self.mode.buffer_len();
        self.parts.push((used.token, used.len));
        let mut good = used.len <= limit && used.len as usize >= self.header_len;
        let mut total = used.len as usize;
        let mut translator = self.memory.translator();
        let (buffers, stride) = (self.buffers, self.stride);
        let mut lend = |index: u16, len: u32| {
            let addr = buffers + u64::from(index) * stride;
            translator.read(addr, len as usize).unwrap_or(ReadSlice::EMPTY)
        };
        let mut bytes = [0; Header::LEN];
        lend(used.token, self.header_len as u32).copy_to(&mut bytes);
        let header = Header::from_bytes(&bytes);
        // A header that was not written is an earlier packet's: its count would swallow good packets.
        if self.mode == RxMode::Mergeable && used.len as usize >= self.header_len {
            // Without a sane count there is no telling where the next packet begins: take one buffer.
            good &= header.num_buffers > 0;
            for _ in 1..header.num_buffers {
                // All buffers of a packet become visible together (5.1.6.4.1): one that is missing
                // is the device's error, not a reason to wait.
                let Some(next) = self.ring.collect() else {
                    good = false;
                    break;
                };
                self.parts.push((next.token, next.len));
                good &= next.len <= limit && self.parts.len() <= MAX_PIECES;
                total = total.saturating_add(next.len as usize);
            }
        }
        if !good || !(MIN_FRAME..=MAX_FRAME).contains(&total.saturating_sub(self.header_len)) {
            self.errors.length += 1;
            return;
        }
        let mut pieces = [ReadSlice::EMPTY; MAX_PIECES];
        for (piece, &(index, len)) in pieces.iter_mut().zip(&self.parts) {
            *piece = lend(index, len);
        }
        let pieces = &pieces[..self.parts.len()];
        deliver(Packet { header, len: total - self.header_len, pieces });
    }
}

/// Distance between buffers: their length, up to a cache line.
fn stride(mode: RxMode) -> u64 {
    u64::from(mode.buffer_len()).next_multiple_of(64)
}
