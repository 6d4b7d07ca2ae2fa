//! [`Transmitq`]: the device's side of a transmitq. It turns chains into frames that still lie in
//! the guest's memory.
//!
//! The owner creates it when its ring starts, with the features negotiated by then, and uses it
//! from one thread. [`Transmitq::poll`] takes a burst and lends its frames; once they are delivered
//! or dropped, [`Transmitq::complete`] returns all buffers of the burst. A violation by the driver
//! breaks the ring, and polls find nothing more. The queue ends by being dropped.

use arrayvec::ArrayVec;
use ringferry_memory::{GuestMemory, ReadSlice, Translator, Words};
use ringferry_packet::frame::Burst;
use ringferry_packet::vnet::{Header, Offloads};
use ringferry_ring::{Buffer, Chain, Chains, Device, Fault};

use crate::header::HASHED_LEN;
use crate::{Features, MAX_FRAME, MIN_FRAME};

/// Most memory that the packets of one burst are to lie in, in bytes, beside the first packet: each buffer counts as the page that it may need. A page that
/// was never touched, or that the front end takes away again and again, costs the thread some microseconds when it is read, so this bounds a
/// burst to about a millisecond whatever the pages are like. Full bursts of MTU frames fit, and of frames of
/// 64 KiB from half a dozen to 15, according to their buffers.
const MOST_MEMORY: usize = 1 << 20;
/// What a buffer counts as beside its bytes.
const PAGE: usize = 4096;
/// Most buffers of a packet, as in DPDK's vhost library (`BUF_VECTOR_MAX`). Linux sends 48 at most; a single packet of a thousand pages that nobody has
/// touched takes three milliseconds to read.
const MAX_BUFFERS: usize = 256;

/// Counters of packets that a guest sent and that are not valid frames, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rejected {
    /// Packets shorter than a virtual header and an Ethernet header.
    pub too_short: u64,
    /// Packets whose frame is longer than [`MAX_FRAME`], or lies in more than 256 buffers.
    pub too_long: u64,
    /// Packets whose virtual header contradicts itself or the frame, or asks for an offload that was not negotiated.
    pub bad_header: u64,
    /// Packets with buffers outside guest memory, which broke the queue.
    pub bad_memory: u64,
}

/// The device's side of a transmitq, with the burst that is being forwarded.
#[derive(Debug)]
pub struct Transmitq<A: Words> {
    ring: Device<A>,
    header_len: usize,
    /// What the guest may ask for.
    offloads: Offloads,
    /// The chains of the current burst, taken and not yet completed.
    chains: Chains,
    rejected: Rejected,
}

impl<A: Words> Transmitq<A> {
    /// Creates the queue on a ring, with the features that were negotiated.
    pub fn new(ring: Device<A>, features: Features) -> Self {
        Self {
            ring,
            header_len: features.header_len(),
            offloads: features.host_offloads(),
            chains: Chains::bounded(MAX_BUFFERS),
            rejected: Rejected::default(),
        }
    }

    /// Returns the ring, for its notifications and its state.
    pub fn ring(&mut self) -> &mut Device<A> {
        &mut self.ring
    }

    /// Returns the counters of invalid packets since the queue was created.
    pub fn rejected(&self) -> Rejected {
        self.rejected
    }

    /// Returns how many buffers of packets in several were read for the last burst, those included of packets that are no frames.
    #[inline]
    pub fn further_buffers(&self) -> usize {
        self.chains.further_buffers()
    }

    /// Takes up to `max` packets, fewer if they lie in much memory, and appends the valid frames among them to `burst`. Returns the
    /// number of packets taken, each of which [`Transmitq::complete`] completes whether valid or
    /// not. A chain that the ring or the memory map refuses breaks the ring: that chain is not
    /// completed, and no chain after it is taken.
    #[inline]
    pub fn poll<'m>(&mut self, memory: &'m GuestMemory, max: usize, burst: &mut Burst<'m>) -> usize {
        let mut translator = memory.translator();
        self.chains.clear();
        let mut taken = self.ring.take(max, &mut translator, &mut self.chains);
        let (mut bad, mut memory_used, mut rest) = (None, 0, None);
        'burst: for (group, chains) in self.chains.all().chunks(LOOKAHEAD).enumerate() {
            let fetch = |chain: &Chain| match chain.sole_readable() {
                Some(buffer) => prefetch(&[buffer], &mut translator),
                None => prefetch(self.chains.readable(chain), &mut translator),
            };
            let pieces: ArrayVec<ReadSlice<'m>, LOOKAHEAD> = chains.iter().map(fetch).collect();
            for (i, (chain, piece)) in chains.iter().zip(pieces).enumerate() {
                let (total, buffers) = (chain.readable_len as usize, usize::from(chain.readable));
                memory_used += total + PAGE * buffers;
                if memory_used > MOST_MEMORY && group + i > 0 {
                    rest = Some(group * LOOKAHEAD + i);
                    break 'burst;
                }
                if total < self.header_len + MIN_FRAME {
                    self.rejected.too_short += 1;
                    continue;
                }
                let len = total - self.header_len;
                if len > MAX_FRAME || buffers > MAX_BUFFERS {
                    self.rejected.too_long += 1;
                    continue;
                }
                // Fast path: most packets lie in one piece.
                let read = if let Some(header) = piece.array().filter(|_| piece.len() == total) {
                    Ok(self.read_whole(&header, piece.skip(self.header_len), burst))
                } else {
                    let shape = Shape { header_len: self.header_len, len, offloads: self.offloads };
                    read_frame(self.chains.readable(chain), shape, &mut translator, burst)
                };
                match read {
                    Ok(true) => {}
                    Ok(false) => self.rejected.bad_header += 1,
                    Err(fault) => {
                        bad = Some((group * LOOKAHEAD + i, fault));
                        break 'burst;
                    }
                }
            }
        }
        if let Some((i, fault)) = bad {
            self.rejected.bad_memory += 1;
            self.ring.break_with(fault);
            self.ring.untake(&self.chains.all()[i..]);
            self.chains.truncate(i);
            taken = i + 1;
        } else if let Some(i) = rest {
            self.ring.untake(&self.chains.all()[i..]);
            self.chains.truncate(i);
            taken = i;
        }
        taken
    }

    /// Lends a packet that lies in one piece; returns false if the header is invalid.
    #[inline(always)]
    fn read_whole<'m>(
        &self,
        header: &[u8; Header::LEN],
        frame: ReadSlice<'m>,
        burst: &mut Burst<'m>,
    ) -> bool {
        if Header::is_plain(header) {
            burst.push(Header::default(), frame);
            return true;
        }
        // num_buffers is ignored (5.1.6.2); after a legacy header these are bytes of the frame.
        let header = Header::from_bytes(header).sanitised();
        if header.check(frame.len()).is_err() {
            return false;
        }
        burst.push(header, frame);
        burst.validate_last(self.offloads).is_ok()
    }

    /// Completes every packet of the last [`Transmitq::poll`]. Returns true if the driver wants a
    /// notification.
    #[inline]
    pub fn complete(&mut self) -> bool {
        self.ring.complete_all(self.chains.iter().map(|chain| chain.done(0)));
        self.chains.clear();
        self.ring.publish()
    }
}

/// Number of packets whose cache lines are fetched before the first of them is read, as many as the
/// ring looks ahead.
const LOOKAHEAD: usize = 32;

/// Prefetches the cache lines that will be read, at the header and at the start of the frame, so
/// that all misses of a burst overlap. Returns the chain's first piece.
#[inline(always)]
fn prefetch<'m>(buffers: &[Buffer], translator: &mut Translator<'m>) -> ReadSlice<'m> {
    let mut first = None;
    for buffer in buffers.iter().take(2) {
        if let Some(piece) = translator.read(buffer.addr, buffer.len as usize) {
            piece.prefetch();
            // The virtual header shifts the frame, so that its first 64 bytes lie on two lines.
            piece.skip(64).prefetch();
            first.get_or_insert(piece);
        }
    }
    first.unwrap_or(ReadSlice::EMPTY)
}

/// What is known of a packet before it is read.
#[derive(Clone, Copy)]
struct Shape {
    header_len: usize,
    /// Length of the frame in bytes.
    len: usize,
    /// What the guest may ask for.
    offloads: Offloads,
}

/// Reads the header and lends the frame after it; returns false if the header is invalid.
///
/// Header and frame may be divided into buffers anywhere (2.7.4.1), also inside the header.
#[inline]
fn read_frame<'m>(
    buffers: &[Buffer],
    Shape { header_len, len, offloads }: Shape,
    translator: &mut Translator<'m>,
    burst: &mut Burst<'m>,
) -> Result<bool, Fault> {
    let mut bytes = [0; HASHED_LEN];
    let mut pieces = Pieces { buffers, at: 0, translator };
    let mut have = 0;
    let mut spill = None;
    while have < header_len {
        let piece = pieces.next()?;
        let n = piece.first(header_len - have).copy_to(&mut bytes[have..header_len]);
        have += n;
        spill = Some(piece.skip(n));
    }
    // num_buffers is ignored on transmit (5.1.6.2), and so is a hash.
    let [a, b, c, d, e, f, g, h, i, j, k, l, ..] = bytes;
    let header = Header::from_bytes(&[a, b, c, d, e, f, g, h, i, j, k, l]).sanitised();
    if header.check(len).is_err() {
        return Ok(false);
    }
    let mut frame = burst.build(header, len as u32);
    let mut left = len;
    if let Some(piece) = spill {
        left -= piece.len();
        frame.piece(piece);
    }
    while left > 0 {
        let piece = pieces.next()?;
        left -= piece.len();
        frame.piece(piece);
    }
    frame.finish();
    Ok(burst.validate_last(offloads).is_ok())
}

/// Iterates over the contiguous pieces of a chain's readable buffers, whose lengths the ring has
/// added up.
struct Pieces<'a, 'm> {
    buffers: &'a [Buffer],
    /// Bytes of the first buffer that were already returned.
    at: usize,
    translator: &'a mut Translator<'m>,
}

impl<'m> Pieces<'_, 'm> {
    #[inline]
    fn next(&mut self) -> Result<ReadSlice<'m>, Fault> {
        loop {
            let [buffer, rest @ ..] = self.buffers else { return Err(Fault::Unusable) };
            let left = buffer.len as usize - self.at;
            if left == 0 {
                // An empty buffer, or the end of one that crossed two regions.
                self.buffers = rest;
                self.at = 0;
                continue;
            }
            let addr = buffer.addr.checked_add(self.at as u64).ok_or(Fault::Unusable)?;
            let piece = self.translator.read(addr, left).ok_or(Fault::Unusable)?;
            self.at += piece.len();
            return Ok(piece);
        }
    }
}
