//! What is sent comes back: a driver, and the device that it drives.
//!
//! Read it before writing a driver of your own. [`LoopbackTx`] and [`LoopbackRx`] are all that a driver is: some
//! limits, and the ring operations. The framework does the rest. `Device` stands for hardware: it sees
//! addresses and lengths, and copies packets from the transmit ring to posted buffers when it is told that there is
//! something new.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ringferry_memory::{GuestMemory, ReadSlice};
use ringferry_packet::vnet::Header;
use smallvec::SmallVec;

use crate::driver::{Completion, Refused, RxDriver, Segment, Start, TxDriver, TxPacket};
use crate::limits::{RxLimits, RxMode, SegLimits, TxLimits};

/// Longest frame: an IP packet of 64 KiB, Ethernet and a VLAN tag in front.
pub const MAX_FRAME: usize = 65_535 + 18;

/// How a loopback device is made.
#[derive(Clone, Copy, Debug)]
pub struct LoopbackConfig {
    /// Entries of each ring.
    pub ring: u16,
    /// Most segments of a packet that is sent, and of a buffer that is posted.
    pub max_segs: u16,
    /// How received packets lie in buffers.
    pub mode: RxMode,
}

/// A packet, or a buffer: what the device knows of it.
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

/// The device: both rings, as it sees them.
#[derive(Debug)]
struct Device {
    memory: Arc<GuestMemory>,
    config: LoopbackConfig,
    sent: VecDeque<Entry>,
    posted: VecDeque<Entry>,
    /// Packets that it is done with: token and segments.
    transmitted: VecDeque<(u16, usize)>,
    /// Buffers that it has filled.
    received: VecDeque<Completion>,
    dropped: u64,
}

impl Device {
    /// Copies every packet for which there are buffers. The others wait; a packet that would wait for ever is
    /// dropped.
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

    /// How many of the posted buffers a packet takes, if there are as many.
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

/// The device, from either side.
#[derive(Clone, Debug)]
struct Wire(Arc<Mutex<Device>>);

impl Wire {
    fn device(&self) -> MutexGuard<'_, Device> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Makes a device in `memory`, where all buffers must be, and the two halves of its driver.
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
    let room = config.ring.into();
    (LoopbackTx { wire: wire.clone(), config, room }, LoopbackRx { wire, config, room })
}

/// The driver's transmit half.
#[derive(Debug)]
pub struct LoopbackTx {
    wire: Wire,
    config: LoopbackConfig,
    room: usize,
}

impl LoopbackTx {
    /// Packets that no buffer could ever have held.
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

    fn encap(&mut self, packet: &TxPacket<'_>, token: u16) -> Result<(), Refused> {
        self.room = self.room.checked_sub(packet.segments.len()).ok_or(Refused::Full)?;
        packet.room.copy_from(&packet.header.to_bytes());
        self.wire.device().sent.push_back(Entry::new(token, packet.segments));
        Ok(())
    }

    /// The device needs no doorbell: it runs here.
    fn flush(&mut self) -> bool {
        self.wire.device().run();
        false
    }

    fn completed(&mut self) -> Option<u16> {
        let (token, segments) = self.wire.device().transmitted.pop_front()?;
        self.room += segments;
        Some(token)
    }
}

/// The driver's receive half.
#[derive(Debug)]
pub struct LoopbackRx {
    wire: Wire,
    config: LoopbackConfig,
    room: usize,
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

    fn post(&mut self, segments: &[Segment], token: u16) -> Result<(), Refused> {
        self.room = self.room.checked_sub(1).ok_or(Refused::Full)?;
        self.wire.device().posted.push_back(Entry::new(token, segments));
        Ok(())
    }

    /// Packets may be waiting for the buffers that are new.
    fn flush(&mut self) -> bool {
        self.wire.device().run();
        false
    }

    fn completed(&mut self) -> Option<Completion> {
        let done = self.wire.device().received.pop_front()?;
        self.room += 1;
        Some(done)
    }

    fn start(&mut self, front: ReadSlice<'_>) -> Start {
        let header = Header::from_bytes(&front.array().unwrap_or_default());
        Start { header, buffers: header.num_buffers, hash: None }
    }
}
