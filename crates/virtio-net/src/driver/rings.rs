//! [`TxRing`] and [`RxRing`]: the two packet rings as drivers of the framework, which turn its
//! segments into descriptor chains.
//!
//! A [`Pair`](super::Pair) creates both in its arena and gives them to the framework's queues
//! ([`ringferry_nic`]), which call them on the pair's thread, own all packets and buffers, and make
//! all decisions.

use ringferry_memory::{Area, ReadSlice};
use ringferry_nic::driver::{Completion, Refused, RxDriver, Segment, Start, TxDriver, TxPacket};
use ringferry_nic::limits::{RxLimits, RxMode, SegLimits, TxLimits};
use ringferry_packet::flow::PacketHash;
use ringferry_packet::vnet::Header;
use ringferry_ring::{AddError, Driver};

use super::arena::{Arena, ArenaError, Queue};
use crate::header::{self, HASHED_LEN};
use crate::{Features, MAX_FRAME};

/// Default for the most segments of a packet: a frame of [`MAX_FRAME`] in page-sized buffers that
/// begin and end anywhere has 18. FreeBSD's driver for this device takes 32 to 64; DPDK's back end
/// takes 256.
pub const MAX_SEGS: u16 = 32;

/// Longest descriptor in bytes. VIRTIO sets no limit; nothing is longer than a packet.
const MAX_SEG_LEN: u32 = (MAX_FRAME + HASHED_LEN) as u32;

/// Most segments of a receive buffer for the longest packet, if it is not in one piece: chunks of
/// 32 KiB make three, of 16 KiB five.
const BIG_SEGS: u16 = 5;

/// Returns the framework's reason for the ring's. Out of line, as a ring that has room refuses nothing.
#[cold]
#[inline(never)]
fn refused(error: AddError<()>) -> Refused {
    match error {
        AddError::Full(()) => Refused::Full,
        _ => Refused::Broken,
    }
}

/// The ring of a transmitq, driven by the framework.
#[derive(Debug)]
pub struct TxRing {
    ring: Driver<Area, ()>,
    header_len: usize,
    max_segs: u16,
    /// True if a chain of several segments takes one entry of the ring, by an indirect table.
    indirect: bool,
}

impl TxRing {
    /// Returns the bytes of arena for a ring of `size` entries and packets of up to `max_segs`
    /// segments.
    pub fn arena_bytes(size: u16, max_segs: u16) -> usize {
        Arena::queue_bytes(size, max_segs)
    }

    /// Creates a ring of `size` entries for packets of up to `max_segs` segments (usually
    /// [`MAX_SEGS`]).
    ///
    /// # Errors
    /// See [`ArenaError`].
    pub fn new(
        arena: &mut Arena,
        size: u16,
        features: Features,
        max_segs: u16,
    ) -> Result<(Queue, Self), ArenaError> {
        // A chain may not be longer than the ring, even with an indirect table (2.7.5.3.1).
        let max_segs = max_segs.min(size);
        let indirect = features.ring().indirect && max_segs > 1;
        let (queue, ring) = arena.queue(size, features.ring(), if indirect { max_segs } else { 0 })?;
        Ok((queue, Self { ring, header_len: features.header_len(), max_segs, indirect }))
    }

    /// Returns the ring, for its notifications and its state.
    pub fn ring(&mut self) -> &mut Driver<Area, ()> {
        &mut self.ring
    }

    /// Returns the violation that broke the queue, if any.
    pub fn fault(&self) -> Option<ringferry_ring::Fault> {
        self.ring.fault()
    }
}

impl TxDriver for TxRing {
    fn limits(&self) -> TxLimits {
        let segs = SegLimits {
            max_segs: self.max_segs,
            reserved: 0,
            max_seg_len: MAX_SEG_LEN,
            boundary: None,
            // The header is never divided, because some devices read it in one piece.
            min_first: self.header_len as u32,
            max_bytes: (self.header_len + MAX_FRAME) as u32,
        };
        TxLimits { ring: self.ring.size(), header_room: self.header_len, plain: segs, tso: segs }
    }

    #[inline(always)]
    fn room(&self) -> usize {
        self.ring.free().into()
    }

    #[inline(always)]
    fn cost(&self, segments: usize) -> usize {
        if self.indirect { 1 } else { segments }
    }

    #[inline(always)]
    fn encap(&mut self, packet: &TxPacket<'_>) -> Result<u16, Refused> {
        // num_buffers is 0 on transmit (5.1.6.2).
        let header = Header { num_buffers: 0, ..*packet.header };
        // The header is stored only if it differs: headers seldom change, and an unchanged cache
        // line stays shared with the device.
        if self.header_len == Header::LEN {
            let (low, high) = header.to_words();
            packet.room.update(low, high);
        } else {
            packet.room.copy_from(&header::to_bytes(&header, PacketHash::NONE)[..self.header_len]);
        }
        self.ring.add(packet.segments, &[], ()).map_err(refused)
    }

    #[inline]
    fn flush(&mut self) -> bool {
        self.ring.publish()
    }

    fn is_broken(&self) -> bool {
        self.ring.fault().is_some()
    }

    #[inline(always)]
    fn completed(&mut self, most: usize, mut each: impl FnMut(u16)) -> usize {
        self.ring.collect_each(most, |used| each(used.id))
    }
}

/// Returns the longest frame in bytes that a driver with these features takes.
pub(super) fn max_frame(features: Features, mtu: u16) -> usize {
    let large = features.intersects(Features::MRG_RXBUF.union(Features::GUEST_SEGMENTATION));
    // The Ethernet header takes 14 bytes, and two VLAN tags take 4 each.
    if large { MAX_FRAME } else { 22 + usize::from(mtu) }
}

/// The ring of a receiveq, driven by the framework.
#[derive(Debug)]
pub struct RxRing {
    ring: Driver<Area, ()>,
    limits: RxLimits,
    /// True if the device reports hashes.
    hashed: bool,
}

impl RxRing {
    /// Returns the bytes of arena for a ring of `size` entries.
    pub fn arena_bytes(size: u16) -> usize {
        Arena::queue_bytes(size, BIG_SEGS)
    }

    /// Returns true if a buffer for the longest packet may have several segments, which needs
    /// indirect tables: without them the ring would hold correspondingly fewer packets.
    pub(super) fn takes_segments(features: Features) -> bool {
        features.intersects(Features::GUEST_SEGMENTATION) && features.ring().indirect
    }

    /// Creates a ring of `size` entries. `mtu` limits frames unless a feature admits larger ones.
    ///
    /// # Errors
    /// See [`ArenaError`].
    pub fn new(
        arena: &mut Arena,
        size: u16,
        features: Features,
        mtu: u16,
    ) -> Result<(Queue, Self), ArenaError> {
        let mergeable = features.contains(Features::MRG_RXBUF);
        let segmented = !mergeable && Self::takes_segments(features);
        let tables = if segmented { BIG_SEGS.min(size) } else { 0 };
        let (queue, ring) = arena.queue(size, features.ring(), tables)?;
        let limits = RxLimits {
            ring: size,
            header_len: features.header_len(),
            mode: if mergeable { RxMode::Mergeable } else { RxMode::Whole },
            max_frame: max_frame(features, mtu),
            max_segs: if segmented { tables } else { 1 },
        };
        Ok((queue, Self { ring, limits, hashed: features.contains(Features::HASH_REPORT) }))
    }

    /// Returns the ring, for its notifications and its state.
    pub fn ring(&mut self) -> &mut Driver<Area, ()> {
        &mut self.ring
    }

    /// Returns the violation that broke the queue, if any.
    pub fn fault(&self) -> Option<ringferry_ring::Fault> {
        self.ring.fault()
    }
}

impl RxDriver for RxRing {
    fn limits(&self) -> RxLimits {
        self.limits
    }

    #[inline(always)]
    fn room(&self) -> usize {
        self.ring.free().into()
    }

    #[inline(always)]
    fn post(&mut self, segments: &[Segment]) -> Result<u16, Refused> {
        self.ring.add(&[], segments, ()).map_err(refused)
    }

    #[inline]
    fn flush(&mut self) -> bool {
        self.ring.publish()
    }

    #[inline(always)]
    fn completed(&mut self, most: usize, mut each: impl FnMut(Completion)) -> usize {
        self.ring.collect_each(most, |used| each(Completion { token: used.id, len: used.len }))
    }

    #[inline(always)]
    fn start(&mut self, front: ReadSlice<'_>) -> Start {
        let header = Header::from_bytes(&front.array().unwrap_or_else(|| {
            let mut bytes = [0; Header::LEN];
            front.copy_to(&mut bytes);
            bytes
        }));
        let buffers = if self.limits.mode == RxMode::Mergeable { header.num_buffers } else { 1 };
        let hash = if self.hashed { header::hash(front) } else { None };
        Start { header, buffers, hash }
    }
}
