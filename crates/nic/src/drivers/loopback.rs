//! The loopback driver and the device that it drives: each packet that is sent is received again.
//!
//! [`loopback`] creates both halves over one device; a queue is attached to each, and the device ends with
//! the last of them. It is meant to be read before writing a driver: [`LoopbackTx`] and [`LoopbackRx`] are
//! complete drivers, that is, limits and ring operations. `Device` stands for the hardware: it knows addresses
//! and lengths, and copies packets from the transmit ring to posted buffers whenever either half flushes. The
//! halves may be on different threads; a mutex guards the device.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ringferry_memory::{GuestMemory, ReadSlice};
use ringferry_packet::vnet::Header;
use smallvec::SmallVec;

use super::InTurn;
use crate::driver::{Completion, Refused, RxDriver, Segment, Start, TxDriver, TxPacket};
use crate::limits::{RxLimits, RxMode, SegLimits, TxLimits};

/// Length in bytes of the longest frame: an IP packet of 64 KiB behind Ethernet and a VLAN tag.
pub const MAX_FRAME: usize = 65_535 + 18;

/// Settings of a loopback device.
#[derive(Clone, Copy, Debug)]
pub struct LoopbackConfig {
    /// Number of entries of each ring.
    pub ring: u16,
    /// Largest number of segments of a packet that is sent, and of a buffer that is posted.
    pub max_segs: u16,
    /// The placement of received packets in buffers.
    pub mode: RxMode,
}

/// A packet to send or a buffer to fill, as the device knows it.
#[derive(Debug)]
struct Entry {
    token: u16,
    segments: SmallVec<[Segment; 2]>,
}

impl Entry {
    fn new(token: u16, segments: &[Segment]) -> Self {
        Self { token, segments: segments.into() }
    }

    fn len(&self) -> usize {
        self.segments.iter().map(|segment| segment.len as usize).sum()
    }
}

/// The device with both rings.
#[derive(Debug)]
struct Device {
    memory: Arc<GuestMemory>,
    config: LoopbackConfig,
    sent: VecDeque<Entry>,
    posted: VecDeque<Entry>,
    /// Completed packets: token and number of segments.
    transmitted: VecDeque<(u16, usize)>,
    /// Filled buffers.
    received: VecDeque<Completion>,
    dropped: u64,
}

impl Device {
    /// Copies each packet for which there are buffers. The others wait, unless no posted buffer could ever
    /// hold them; those are dropped.
    fn run(&mut self) {
        while let Some(packet) = self.sent.pop_front() {
            let len = packet.len();
            match self.buffers_for(len) {
                Some(buffers) => self.copy(&packet, len, buffers),
                None if self.config.mode == RxMode::Mergeable && self.may_get_more() => {
                    return self.sent.push_front(packet);
                }
                None if self.posted.is_empty() => return self.sent.push_front(packet),
                None => self.dropped += 1,
            }
            self.transmitted.push_back((packet.token, packet.segments.len()));
        }
    }

    fn may_get_more(&self) -> bool {
        self.posted.len() < self.config.ring.into()
    }

    /// Returns how many of the posted buffers a packet of `len` bytes takes, or `None` if there are too few.
    fn buffers_for(&self, len: usize) -> Option<usize> {
        match self.config.mode {
            RxMode::Whole => self.posted.front().filter(|buffer| buffer.len() >= len).map(|_| 1),
            RxMode::Mergeable => {
                let mut room = 0;
                let enough = self.posted.iter().position(|buffer| {
                    room += buffer.len();
                    room >= len
                });
                enough.map(|last| last + 1)
            }
        }
    }

    fn copy(&mut self, packet: &Entry, len: usize, buffers: usize) {
        let mut memory = self.memory.translator();
        let mut from = packet.segments.iter().copied();
        let mut piece = Segment::default();
        let mut left = len;
        for (number, buffer) in self.posted.drain(..buffers).enumerate() {
            let take = buffer.len().min(left);
            left -= take;
            for mut room in buffer.segments.iter().copied() {
                while room.len > 0 {
                    if piece.len == 0 {
                        let Some(next) = from.next() else { break };
                        piece = next;
                        continue;
                    }
                    let read = memory.read(piece.addr, piece.len as usize).unwrap_or(ReadSlice::EMPTY);
                    let Some(write) = memory.write(room.addr, room.len as usize) else { break };
                    let n = read.copy_to_slice(&write) as u32;
                    if n == 0 {
                        break;
                    }
                    piece = Segment { addr: piece.addr + u64::from(n), len: piece.len - n };
                    room = Segment { addr: room.addr + u64::from(n), len: room.len - n };
                }
            }
            if number == 0
                && let Some(front) = buffer.segments.first()
                && let Some(header) = memory.write(front.addr, Header::LEN)
            {
                header.skip(Header::LEGACY_LEN).copy_from(&(buffers as u16).to_le_bytes());
            }
            self.received.push_back(Completion { token: buffer.token, len: take as u32 });
        }
    }
}

/// A shared handle of the device, held by each half of the driver.
#[derive(Clone, Debug)]
struct Wire(Arc<Mutex<Device>>);

impl Wire {
    fn device(&self) -> MutexGuard<'_, Device> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Creates a device over `memory`, in which all buffers must be, and returns the two halves of its driver.
pub fn loopback(memory: &Arc<GuestMemory>, config: LoopbackConfig) -> (LoopbackTx, LoopbackRx) {
    let wire = Wire(Arc::new(Mutex::new(Device {
        memory: Arc::clone(memory),
        config,
        sent: VecDeque::new(),
        posted: VecDeque::new(),
        transmitted: VecDeque::new(),
        received: VecDeque::new(),
        dropped: 0,
    })));
    let (room, tokens) = (config.ring.into(), || InTurn::new(config.ring));
    (
        LoopbackTx { wire: wire.clone(), config, room, tokens: tokens() },
        LoopbackRx { wire, config, room, tokens: tokens() },
    )
}

/// The transmit half of the driver.
#[derive(Debug)]
pub struct LoopbackTx {
    wire: Wire,
    config: LoopbackConfig,
    room: usize,
    tokens: InTurn,
}

impl LoopbackTx {
    /// Returns the number of packets that were dropped because no buffer could ever hold them.
    pub fn dropped(&self) -> u64 {
        self.wire.device().dropped
    }
}

impl TxDriver for LoopbackTx {
    fn limits(&self) -> TxLimits {
        let segs = SegLimits {
            max_segs: self.config.max_segs,
            reserved: 0,
            max_seg_len: u32::MAX,
            boundary: None,
            min_first: Header::LEN as u32,
            max_bytes: (Header::LEN + MAX_FRAME) as u32,
        };
        TxLimits { ring: self.config.ring, header_room: Header::LEN, plain: segs, tso: segs }
    }

    fn room(&self) -> usize {
        self.room
    }

    fn encap(&mut self, packet: &TxPacket<'_>) -> Result<u16, Refused> {
        self.room = self.room.checked_sub(packet.segments.len()).ok_or(Refused::Full)?;
        packet.room.copy_from(&packet.header.to_bytes());
        let token = self.tokens.take();
        self.wire.device().sent.push_back(Entry::new(token, packet.segments));
        Ok(token)
    }

    /// Runs the device here, so that it needs no doorbell.
    fn flush(&mut self) -> bool {
        self.wire.device().run();
        false
    }

    fn completed(&mut self, most: usize, mut each: impl FnMut(u16)) -> usize {
        let mut device = self.wire.device();
        let count = most.min(device.transmitted.len());
        for (token, segments) in device.transmitted.drain(..count) {
            self.room += segments;
            each(token);
        }
        count
    }
}

/// The receive half of the driver.
#[derive(Debug)]
pub struct LoopbackRx {
    wire: Wire,
    config: LoopbackConfig,
    room: usize,
    tokens: InTurn,
}

impl RxDriver for LoopbackRx {
    fn limits(&self) -> RxLimits {
        RxLimits {
            ring: self.config.ring,
            header_len: Header::LEN,
            mode: self.config.mode,
            max_frame: MAX_FRAME,
            max_segs: self.config.max_segs,
        }
    }

    fn room(&self) -> usize {
        self.room
    }

    fn post(&mut self, segments: &[Segment]) -> Result<u16, Refused> {
        self.room = self.room.checked_sub(1).ok_or(Refused::Full)?;
        let token = self.tokens.take();
        self.wire.device().posted.push_back(Entry::new(token, segments));
        Ok(token)
    }

    /// Runs the device, as packets may be waiting for the new buffers.
    fn flush(&mut self) -> bool {
        self.wire.device().run();
        false
    }

    fn completed(&mut self, most: usize, each: impl FnMut(Completion)) -> usize {
        let mut device = self.wire.device();
        let count = most.min(device.received.len());
        device.received.drain(..count).for_each(each);
        self.room += count;
        count
    }

    fn start(&mut self, front: ReadSlice<'_>) -> Start {
        let header = Header::from_bytes(&front.array().unwrap_or_default());
        Start { header, buffers: header.num_buffers, hash: None }
    }
}
