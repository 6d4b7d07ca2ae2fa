//! The rings and the memory of one socket: packets out of it and into it.
//!
//! **Life cycle.** Made of two descriptors, which may come from another process, by whoever serves the queue, and used by one thread at a time. The kernel
//! has the socket and its memory as long as anybody has the descriptors.
//!
//! Which frames may be sent from lies in the memory itself, behind the frames, so that it goes along with the descriptors. What a process had in its hands when it
//! was killed is lost to the next one: at most a burst of frames for each of the two directions.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use ringferry_memory::{Area, MapError, ReadSlice, Region, Words};
use rustix::io::Errno;
use rustix::net::xdp::{
    XDP_PGOFF_RX_RING, XDP_PGOFF_TX_RING, XDP_UMEM_PGOFF_COMPLETION_RING, XDP_UMEM_PGOFF_FILL_RING,
    XdpRingOffset,
};
use rustix::net::{RecvFlags, SendFlags, sockopt};

use crate::ring::{ADDRESS, Consumer, Descriptor, Offsets, Producer};
use crate::{ENTRIES, FRAME, FRAMES};

/// Bytes of the frames of a UMEM, behind which lies the list of those that may be sent from.
pub(crate) const UMEM: usize = FRAMES as usize * FRAME;

/// Bytes of a whole memory.
pub(crate) const MEMORY: usize = UMEM + 2 * FRAME;

/// Frames that one packet may have: as many as the kernel takes in copy mode (`MAX_SKB_FRAGS` and the first).
const MOST_FRAMES: usize = 18;

/// Calls of the kernel for one burst: in copy mode it sends 32 packets a call (16 before Linux 5.15).
const MOST_CALLS: u32 = ENTRIES / 16;

/// The list of frames that may be sent from.
#[derive(Debug)]
struct Free(Area);

impl Free {
    /// Where the entries begin, behind their number.
    const ENTRIES: usize = 8;

    fn len(&self) -> u32 {
        // Another process may have written anything there.
        self.0.load32(0).min(ENTRIES)
    }

    fn at(index: u32) -> usize {
        Self::ENTRIES + 2 * index as usize
    }

    fn push(&self, frame: u32) {
        let len = self.len();
        if len < ENTRIES {
            self.0.store16(Self::at(len), frame as u16);
            self.0.store32(0, len + 1);
        }
    }

    /// Takes a frame that may be sent from.
    fn pop(&self) -> Option<u32> {
        let len = self.len().checked_sub(1)?;
        self.0.store32(0, len);
        // Those of the first half are received into.
        let frame = u32::from(self.0.load16(Self::at(len)));
        (ENTRIES..FRAMES).contains(&frame).then_some(frame)
    }
}

/// The reason why a packet was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// The interface has not sent what it was given before.
    Full,
    /// It is too long for the frames that a packet may have.
    TooLong,
}

/// What the kernel has counted since the socket was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Packets that were dropped as no frame was there to be filled, or the receive ring was full.
    pub rx_dropped: u64,
    /// Descriptors that were refused, of which there should be none.
    pub invalid: u64,
}

/// Packets that were received. Their frames go back with [`Queue::give_back`].
#[derive(Debug)]
pub struct Lent {
    memory: Area,
    descriptors: Vec<Descriptor>,
}

impl Lent {
    /// Returns the packets, each as the pieces that it lies in.
    #[inline]
    pub fn packets(&self) -> impl Iterator<Item = impl Iterator<Item = ReadSlice<'_>>> {
        let packets = self.descriptors.split_inclusive(|descriptor| !descriptor.continues);
        packets.map(|packet| packet.iter().map(|descriptor| self.piece(descriptor)))
    }

    #[inline]
    fn piece(&self, descriptor: &Descriptor) -> ReadSlice<'_> {
        // What the kernel says lies in the memory.
        self.memory.read(descriptor.address as usize, descriptor.len as usize).unwrap_or(ReadSlice::EMPTY)
    }
}

/// One queue of an interface: the rings and the memory of its socket, for one thread at a time.
#[derive(Debug)]
pub struct Queue {
    socket: OwnedFd,
    memory: Area,
    fill: Producer<Area>,
    received: Consumer<Area>,
    transmit: Producer<Area>,
    completed: Consumer<Area>,
    free: Free,
    /// The storage of the last [`Lent`].
    spare: Vec<Descriptor>,
    /// A packet may lie in several frames.
    several: bool,
}

impl Queue {
    /// Entries of each of its rings.
    pub const ENTRIES: u16 = ENTRIES as u16;

    /// Maps the rings and the memory of a socket that is bound. `several`: a packet may lie in several frames.
    ///
    /// # Errors
    /// It is no such socket or memory, or there is no room to map them.
    pub fn new(socket: OwnedFd, memory: BorrowedFd<'_>, several: bool) -> io::Result<Queue> {
        let offsets = sockopt::xdp_mmap_offsets(&socket)?;
        let wrong = || io::Error::from(io::ErrorKind::InvalidData);
        let map = |fd, offset, size| match Region::map_exact(fd, offset, size) {
            // What it says beyond that is about guests.
            Err(MapError::Os(error)) => Err(error.into()),
            mapped => mapped.map_err(io::Error::other),
        };
        let ring = |at: u64, offsets: &XdpRingOffset, size: usize| {
            let offsets = Offsets::from(offsets);
            let size = offsets.entries + ENTRIES as usize * size;
            let words = map(socket.as_fd(), at, size)?.area(0, size);
            words.map(|words| (words, offsets)).ok_or_else(wrong)
        };
        if rustix::fs::fstat(memory)?.st_size != MEMORY as i64 {
            return Err(wrong());
        }
        let memory = map(memory, 0, MEMORY)?;
        let list = memory.area(UMEM, MEMORY - UMEM).ok_or_else(wrong)?;
        let memory = memory.area(0, UMEM).ok_or_else(wrong)?;
        let (fill, fill_at) = ring(XDP_UMEM_PGOFF_FILL_RING, &offsets.fr, ADDRESS)?;
        let (completed, completed_at) = ring(XDP_UMEM_PGOFF_COMPLETION_RING, &offsets.cr, ADDRESS)?;
        let (received, received_at) = ring(XDP_PGOFF_RX_RING, &offsets.rx, Descriptor::SIZE)?;
        let (transmit, transmit_at) = ring(XDP_PGOFF_TX_RING, &offsets.tx, Descriptor::SIZE)?;
        Ok(Queue {
            fill: Producer::new(fill, fill_at, ADDRESS, ENTRIES),
            received: Consumer::new(received, received_at, Descriptor::SIZE, ENTRIES),
            transmit: Producer::new(transmit, transmit_at, Descriptor::SIZE, ENTRIES),
            completed: Consumer::new(completed, completed_at, ADDRESS, ENTRIES),
            free: Free(list),
            memory,
            socket,
            spare: Vec::new(),
            several,
        })
    }

    /// Gives the kernel the frames to be filled, and makes the list of those that may be sent from: once, for a socket that is new.
    pub(crate) fn begin(&mut self) {
        for frame in 0..ENTRIES {
            self.fill.push_address(u64::from(frame) * FRAME as u64);
            self.free.push(ENTRIES + frame);
        }
        self.fill.publish();
    }

    /// Takes up to `most` packets that have come in. The rest of their bytes stays as it is until they are given back.
    #[inline]
    pub fn lend(&mut self, most: usize) -> Option<Lent> {
        let available = self.received.available();
        let mut descriptors = std::mem::take(&mut self.spare);
        descriptors.clear();
        let (mut packets, mut whole) = (0, 0);
        for ahead in 0..available {
            if packets == most {
                break;
            }
            let descriptor = self.received.descriptor(ahead);
            descriptors.push(descriptor);
            if !descriptor.continues {
                packets += 1;
                whole = descriptors.len();
            }
        }
        // The kernel shows whole packets; one without its end is left for the next time.
        descriptors.truncate(whole);
        if descriptors.is_empty() {
            self.spare = descriptors;
            return None;
        }
        self.received.release(whole as u32);
        Some(Lent { memory: self.memory.clone(), descriptors })
    }

    /// Gives the kernel the frames of packets back, to be filled anew.
    #[inline]
    pub fn give_back(&mut self, lent: Lent) {
        let Lent { mut descriptors, .. } = lent;
        // There is room for all that there are.
        let room = self.fill.room(descriptors.len() as u32) as usize;
        for descriptor in descriptors.iter().take(room) {
            self.fill.push_address(descriptor.address & !(FRAME as u64 - 1));
        }
        self.fill.publish();
        if self.fill.needs_wakeup() {
            // It has nothing to read: the call tells the driver of the frames.
            let _ = rustix::net::recv(&self.socket, &mut [0_u8; 0][..], RecvFlags::DONTWAIT);
        }
        descriptors.clear();
        self.spare = descriptors;
    }

    /// Copies a packet of `len` bytes, the concatenation of `first` and `rest`, to where it is sent from with the next [`flush`](Self::flush).
    ///
    /// # Errors
    /// [`Refused`]; nothing was done.
    #[inline]
    pub fn put(&mut self, first: &[u8], rest: &[ReadSlice<'_>], len: usize) -> Result<(), Refused> {
        if !self.takes(len) {
            return Err(Refused::TooLong);
        }
        let frames = len.div_ceil(FRAME) as u32;
        if !self.has_room(frames) {
            self.reclaim();
            if !self.has_room(frames) {
                return Err(Refused::Full);
            }
        }
        let Self { memory, transmit, free, .. } = self;
        let (mut first, mut rest) = (ReadSlice::from(first), rest.iter());
        let mut left = len;
        while left > 0 {
            let Some(frame) = free.pop() else { return Err(Refused::Full) };
            let bytes = left.min(FRAME);
            let address = frame as usize * FRAME;
            let Some(mut to) = memory.write(address, bytes) else { return Err(Refused::Full) };
            while !to.is_empty() {
                let copied = first.copy_to_slice(&to);
                (to, first) = (to.skip(copied), first.skip(copied));
                if first.is_empty() {
                    let Some(next) = rest.next() else { break };
                    first = *next;
                }
            }
            left -= bytes;
            transmit.push(Descriptor { address: address as u64, len: bytes as u32, continues: left > 0 });
        }
        Ok(())
    }

    #[inline]
    fn has_room(&mut self, frames: u32) -> bool {
        self.transmit.room(frames) >= frames && self.free.len() >= frames
    }

    /// Returns true if a packet of `len` bytes is not too long.
    pub fn takes(&self, len: usize) -> bool {
        len.div_ceil(FRAME) <= if self.several { MOST_FRAMES } else { 1 }
    }

    /// Shows the kernel what was [put](Self::put), and has it sent. Returns true if the kernel had to be called for that.
    #[inline]
    pub fn flush(&mut self) -> bool {
        self.transmit.publish();
        let calls = self.transmit.needs_wakeup();
        if calls {
            self.send();
        }
        self.reclaim();
        calls
    }

    /// Has the kernel send what it was shown: in copy mode it does that within the call, some packets at a time. Returns true if some is left for which another call
    /// would do.
    fn send(&mut self) -> bool {
        for _ in 0..MOST_CALLS {
            match rustix::net::send(&self.socket, &[], SendFlags::DONTWAIT) {
                // It has sent as many as it does in one call; or none for now; or has lost one, as nothing is plugged in.
                Ok(_) | Err(Errno::AGAIN | Errno::BUSY) => {}
                // The interface is down, or gone.
                Err(_) => return false,
            }
            if !self.transmit.is_pending() {
                return false;
            }
            // Frames that come back make room for what the kernel has to report.
            self.reclaim();
        }
        true
    }

    /// Has the kernel send what it has left. Returns true if there is nothing of that kind any more; what an interface that is down has not sent waits until it is up.
    pub fn settle(&mut self) -> bool {
        !self.transmit.is_pending() || !self.transmit.needs_wakeup() || !self.send()
    }

    /// Takes frames back that were sent.
    #[inline]
    fn reclaim(&mut self) {
        let available = self.completed.available();
        if available == 0 {
            return;
        }
        let mut frames = [0; 64];
        for begin in (0..available).step_by(frames.len()) {
            let count = (available - begin).min(frames.len() as u32);
            for (ahead, frame) in (0..count).zip(&mut frames) {
                *frame = (self.completed.address(ahead) / FRAME as u64) as u32;
            }
            // In this order: who is killed in between loses frames, and has none twice.
            self.completed.release(count);
            frames[..count as usize].iter().for_each(|frame| self.free.push(*frame));
        }
    }

    /// Returns true if packets have come in.
    #[inline]
    pub fn has_packets(&mut self) -> bool {
        self.received.available() > 0
    }

    /// Returns how many descriptors of packets were taken, and how many put, since the socket was made; both begin at 0 again behind the largest number.
    pub fn positions(&self) -> [u32; 2] {
        [self.received.position(), self.transmit.position()]
    }

    /// Returns what the kernel has counted.
    pub fn statistics(socket: impl AsFd) -> Statistics {
        let Ok(counted) = sockopt::xdp_statistics(socket) else { return Statistics::default() };
        let more = [counted.rx_ring_full, counted.rx_fill_ring_empty_descs];
        Statistics {
            rx_dropped: counted.rx_dropped + more.iter().flatten().sum::<u64>(),
            invalid: counted.rx_invalid_descs + counted.tx_invalid_descs,
        }
    }
}

impl AsFd for Queue {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
