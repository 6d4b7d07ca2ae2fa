//! The paths that are sent into: a null driver alone, or a virtqueue with our device half at its other end.

use std::sync::Arc;

use ringferry_memory::{Area, GuestMemory, Region};
use ringferry_nic::drivers::null::NullTx;
use ringferry_nic::limits::{SegLimits, TxLimits};
use ringferry_packet::buffer::{Pools, PoolsLayout};
use ringferry_packet::frame::{Burst, Frame};
use ringferry_packet::vnet::Header;
use ringferry_ring::{Device, Parts, part_bytes};
use ringferry_virtio_net::driver::{Arena, TxRing};
use ringferry_virtio_net::{Features, MAX_FRAME, device};

use crate::experiment::RowError;

const RING: u16 = 256;

/// Packets that the device takes together: the switch's burst.
const BURST: usize = 32;

/// Private memory that the device copies to: as many bytes as are under way, so that they are not
/// always the same.
const COPIES: usize = super::sender::WINDOW;

/// Where a device takes over a fresh ring: index 0, and in a packed ring a wrap counter of 1.
const FRESH: u16 = 1 << 15;

/// The null driver's limits: those of the virtqueue.
fn limits(segments: u16) -> TxLimits {
    let bytes = (Header::LEN + MAX_FRAME) as u32;
    let segs = SegLimits {
        max_segs: segments,
        reserved: 0,
        max_seg_len: bytes,
        boundary: None,
        min_first: Header::LEN as u32,
        max_bytes: bytes,
    };
    TxLimits { ring: RING, header_room: Header::LEN, plain: segs, tso: segs }
}

/// A null driver, and buffers.
pub(super) fn null(segments: u16, layout: PoolsLayout) -> Result<(NullTx, Pools), RowError> {
    let mut arena = Arena::new(layout.bytes()).map_err(RowError::failed)?;
    let at = arena.alloc(layout.bytes()).map_err(RowError::failed)?;
    let pools = Pools::new(arena.memory(), at, layout).map_err(RowError::failed)?;
    Ok((NullTx::new(limits(segments)), pools))
}

/// A packed ring in order, buffers, and the device's end. Both ends poll.
pub(super) fn virtio(segments: u16, layout: PoolsLayout) -> Result<(TxRing, Pools, End), RowError> {
    let features = Features::VERSION_1
        | Features::MRG_RXBUF
        | Features::INDIRECT_DESC
        | Features::RING_PACKED
        | Features::IN_ORDER
        | Features::CSUM
        | Features::HOST_TSO4;
    let bytes = TxRing::arena_bytes(RING, segments) + layout.bytes() + 4096;
    let mut arena = Arena::new(bytes).map_err(RowError::failed)?;
    let (queue, mut ring) = TxRing::new(&mut arena, RING, features, segments).map_err(RowError::failed)?;
    let at = arena.alloc(layout.bytes()).map_err(RowError::failed)?;
    let pools = Pools::new(arena.memory(), at, layout).map_err(RowError::failed)?;
    ring.ring().disable_calls();

    // The device has a mapping of its own, as over vhost-user.
    let region = Region::map(arena.fd(), arena.region()).map_err(RowError::failed)?;
    let memory = Arc::new(GuestMemory::new(vec![region]).map_err(RowError::failed)?);
    let area =
        |addr, len| memory.user_area(addr, len).ok_or_else(|| RowError::failed("a ring outside its memory"));
    let [desc, driver, used] = part_bytes(queue.size, features.ring().packed);
    let parts = Parts {
        size: queue.size,
        desc: area(queue.desc, desc)?,
        driver: area(queue.avail, driver)?,
        device: area(queue.used, used)?,
    };
    let mut device = Device::new(parts, features.ring(), FRESH, None).map_err(RowError::failed)?;
    device.disable_kicks();
    Ok((ring, pools, End { queue: device::Transmitq::new(device, features), memory }))
}

/// The device's end, on its way to the thread that serves it.
#[derive(Debug)]
pub(super) struct End {
    queue: device::Transmitq<Area>,
    memory: Arc<GuestMemory>,
}

impl End {
    /// Serves it on this thread.
    pub(super) fn taker(self) -> Taker {
        let copies = (0..COPIES).map(|_| vec![0; MAX_FRAME]).collect();
        Taker { end: self, copies, spare: Burst::new(), taken: 0 }
    }
}

/// Takes packets and copies them out whole, as a switch copies them to their receiver.
#[derive(Debug)]
pub(super) struct Taker {
    end: End,
    copies: Vec<Vec<u8>>,
    spare: Burst<'static>,
    taken: u64,
}

impl Taker {
    /// Takes a burst; `look` sees each packet's number and bytes. Packets taken so far.
    ///
    /// # Errors
    /// What `look` says, or the driver broke a rule.
    pub(super) fn round(
        &mut self,
        mut look: impl FnMut(u64, &[u8]) -> Result<(), RowError>,
    ) -> Result<u64, RowError> {
        let Taker { end: End { queue, memory }, copies, spare, taken } = self;
        let mut burst = Burst::reuse(std::mem::take(spare));
        let mut good = Ok(());
        if queue.poll(memory, BURST, &mut burst) > 0 {
            for frame in burst.frames() {
                let to = &mut copies[*taken as usize % COPIES];
                let len = copy_out(&burst, frame, to);
                good = good.and_then(|()| look(*taken, &to[..len]));
                *taken += 1;
            }
            queue.complete();
        }
        *spare = Burst::reuse(burst);
        good?;
        let rejected = queue.rejected();
        match queue.ring().fault() {
            Some(fault) => Err(RowError::failed(format!("the driver broke the ring: {fault}"))),
            None if rejected != Default::default() => {
                Err(RowError::failed(format!("the driver sent what are no frames: {rejected:?}")))
            }
            None => Ok(*taken),
        }
    }
}

/// Copies a frame into private memory; returns its length.
#[inline]
fn copy_out(burst: &Burst<'_>, frame: &Frame, to: &mut [u8]) -> usize {
    let prefix = frame.prefix();
    to[..prefix.len()].copy_from_slice(prefix);
    let mut at = prefix.len();
    for piece in burst.rest(frame) {
        at += piece.copy_to(&mut to[at..]);
    }
    at
}
