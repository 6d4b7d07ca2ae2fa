//! An attacker's front end, for tests and for the lab: a vhost-user connection and split rings that are written by hand, so that anything
//! can be in them. It is made for one connection, used by one thread, and the device stops when it is dropped.
//!
//! ```text
//!   transmitq: every descriptor is a whole frame, slot I of the available ring is descriptor I for ever, and offering all
//!   that was used again is one store to the available index: nothing is cheaper, so the switch is what is busy
//! ```

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use ringferry_memory::{Area, RegionSpec};
use ringferry_packet::vnet::Header;
use ringferry_sys::eventfd::EventFd;
use ringferry_sys::socket::Stream;
use ringferry_vhost_user::{Connection, Frontend, ProtocolFeatures, RingPlan, Wanted, connect_device};
use ringferry_virtio_net::driver::{Arena, Queue};
use ringferry_virtio_net::{Features, queue_index};

use crate::front::{Error, ring};

/// Bytes of the virtual header of a device that follows VIRTIO 1.
pub const HEADER: usize = 12;
/// Bytes of a page.
pub const PAGE: usize = 4096;
/// VIRTQ_DESC_F_NEXT and VIRTQ_DESC_F_WRITE.
pub const NEXT: u16 = 1;
pub const WRITE: u16 = 2;
/// VIRTQ_DESC_F_INDIRECT.
pub const INDIRECT: u16 = 4;
/// VIRTQ_DESC_F_AVAIL, with which a descriptor of a packed ring is available in the first lap.
pub const AVAIL: u16 = 1 << 7;
/// VRING_USED_F_NO_NOTIFY.
const NO_NOTIFY: u16 = 1;
/// How long an answer may take. An attacker has time.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long a port may take to listen at first.
const LISTENING: Duration = Duration::from_secs(5);

/// The shape of a front end's rings.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub pairs: u16,
    /// Entries of each receiveq and each transmitq.
    pub receive: u16,
    pub transmit: u16,
    /// Features beside VERSION_1 and MRG_RXBUF.
    pub features: Features,
    /// True if every message waits for its acknowledgement.
    pub acknowledged: bool,
    /// Bytes for buffers.
    pub buffers: usize,
    /// Rings that are enabled from the beginning.
    pub enabled: bool,
}

impl Default for Shape {
    fn default() -> Self {
        Self {
            pairs: 1,
            receive: 256,
            transmit: 1024,
            features: Features::empty(),
            acknowledged: true,
            buffers: 1 << 20,
            enabled: true,
        }
    }
}

/// A ring with its events.
pub struct Ring {
    pub queue: Queue,
    desc: Area,
    avail: Area,
    used: Area,
    pub kick: EventFd,
    call: EventFd,
}

/// The front end. Ring 2N is the receiveq of pair N, ring 2N + 1 its transmitq.
pub struct Front {
    pub connection: Connection,
    arena: Arena,
    pub rings: Vec<Ring>,
    /// Guest address of the buffers.
    pub buffers: u64,
    area: Area,
    shape: Shape,
}

/// Connects to a port, which may take a moment until it listens or takes another connection.
pub fn connect(socket: &Path) -> Result<Stream, Error> {
    let begin = Instant::now();
    loop {
        match Stream::connect(socket) {
            Ok(stream) => return Ok(stream),
            Err(error) if begin.elapsed() >= LISTENING => {
                return Err(other(format!("nobody listens at {}: {error}", socket.display())));
            }
            Err(_) => std::thread::sleep(Duration::from_millis(1)),
        }
    }
}

impl Front {
    /// Connects, and makes rings that are empty and not started.
    pub fn new(socket: &Path, shape: Shape) -> Result<Self, Error> {
        let protocol = Wanted::NET_PROTOCOL - ProtocolFeatures::INFLIGHT_SHMFD;
        let unacknowledged = ProtocolFeatures::REPLY_ACK | ProtocolFeatures::STATUS;
        let features = shape.features | Features::VERSION_1 | Features::MRG_RXBUF;
        let wanted = Wanted {
            features: features.bits(),
            required: features.bits(),
            protocol: if shape.acknowledged { protocol } else { protocol - unacknowledged },
        };
        let mut connection = connect_device(connect(socket)?, &wanted)?;
        connection.frontend().set_timeout(PATIENCE);
        if connection.negotiated().queue_num < shape.pairs {
            return Err(other(format!("the port has fewer than {} queue pairs", shape.pairs)));
        }
        let sizes = [shape.receive, shape.transmit].map(|size| Arena::queue_bytes(size, 0));
        let bytes = usize::from(shape.pairs) * (sizes[0] + sizes[1]) + shape.buffers + (1 << 16);
        let mut arena = Arena::new(bytes)?;
        let mut rings = Vec::new();
        for index in (0..shape.pairs).flat_map(queue_index::both) {
            let size = if queue_index::is_transmitq(index) { shape.transmit } else { shape.receive };
            rings.push(Ring::new(&mut arena, size)?);
        }
        let buffers = arena.alloc(shape.buffers)?;
        let area = area(&arena, buffers, shape.buffers)?;
        Ok(Self { connection, arena, rings, buffers, area, shape })
    }

    /// Starts the rings as they are.
    pub fn start(&mut self) -> Result<(), Error> {
        let enabled = self.shape.enabled;
        let plans: Vec<RingPlan<'_>> = self.rings.iter().map(|ring| ring.plan(enabled)).collect();
        let memory = [(self.arena.region(), self.arena.fd())];
        Ok(self.connection.start(&memory, &plans)?)
    }

    /// The memory, as the device is told of it.
    pub fn region(&self) -> RegionSpec {
        self.arena.region()
    }

    /// Sends the memory map once more.
    pub fn set_mem_table(&mut self) -> Result<(), Error> {
        self.set_larger_mem_table(&[])
    }

    /// Sends the memory map with more regions behind its own.
    pub fn set_larger_mem_table(&mut self, more: &[(RegionSpec, OwnedFd)]) -> Result<(), Error> {
        let mut memory = vec![(self.arena.region(), self.arena.fd())];
        memory.extend(more.iter().map(|(region, file)| (*region, file.as_fd())));
        Ok(self.connection.frontend().set_mem_table(&memory)?)
    }

    /// The messages of the protocol, for calls beside set-up.
    pub fn frontend(&mut self) -> &mut Frontend {
        self.connection.frontend()
    }

    /// Writes to the buffers.
    pub fn write(&self, at: usize, bytes: &[u8]) -> Result<(), Error> {
        put(&self.area, at, bytes)
    }

    /// Writes a virtual header and a frame to the buffers, at `at`; returns how many bytes both are.
    pub fn write_frame(&self, at: usize, header: &Header, frame: &[u8]) -> Result<usize, Error> {
        let header = header.to_bytes();
        self.write(at, &header)?;
        self.write(at + header.len(), frame)?;
        Ok(header.len() + frame.len())
    }

    pub fn receiveqs(&self) -> impl Iterator<Item = &Ring> {
        self.rings.iter().step_by(2)
    }

    pub fn transmitqs(&self) -> impl Iterator<Item = &Ring> {
        self.rings.iter().skip(1).step_by(2)
    }

    /// Makes every entry of the receiveqs one buffer of `len` bytes, the same for all: nobody reads what comes. Rings are then
    /// full once [`Ring::offer`] was called.
    pub fn receive_into(&self, at: usize, len: u32) -> Result<(), Error> {
        let addr = self.buffers + at as u64;
        self.receiveqs().try_for_each(|ring| ring.fill(|_| (addr, len), true))
    }

    /// Makes the receiveqs chains of `links` buffers of `len` bytes, each of which has a page of its own from `at` on: so many as there are
    /// descriptors for, which the slots of the available ring are in turn.
    pub fn receive_into_chains(&self, at: usize, links: u16, len: u32) -> Result<(), Error> {
        let addr = self.buffers + at as u64;
        self.receiveqs().try_for_each(|ring| ring.scatter(links, addr, len))
    }

    /// Makes every entry of the transmitqs the same frame, which [`Front::write_frame`] put at `at`.
    pub fn send_from(&self, at: usize, len: usize) -> Result<(), Error> {
        let addr = self.buffers + at as u64;
        self.transmitqs().try_for_each(|ring| ring.fill(|_| (addr, len as u32), false))
    }

    /// Makes the entries of the transmitqs frames of `len` bytes, virtual header included, each `apart` bytes behind the one before.
    pub fn send_from_all_over(&self, apart: usize, len: usize) -> Result<(), Error> {
        let addr = |at: u16| self.buffers + u64::from(at) * apart as u64;
        self.transmitqs().try_for_each(|ring| ring.fill(|at| (addr(at), len as u32), false))
    }

    /// Where the buffers begin in their file, and the file.
    pub fn buffers_in_file(&self) -> Result<(u64, File), Error> {
        let file = File::from(self.arena.fd().try_clone_to_owned()?);
        Ok((self.buffers - self.arena.region().guest_addr, file))
    }

    /// Fails once the switch has ended the connection.
    pub fn check(&mut self) -> Result<(), Error> {
        Ok(self.connection.frontend().check()?)
    }
}

impl Ring {
    fn new(arena: &mut Arena, size: u16) -> Result<Self, Error> {
        let lens = [16 * usize::from(size), 6 + 2 * usize::from(size), 6 + 8 * usize::from(size)];
        let mut addrs = [0; 3];
        for (addr, len) in std::iter::zip(&mut addrs, lens) {
            *addr = arena.alloc(len)?;
        }
        let [desc, avail, used] = addrs;
        Ok(Self {
            queue: Queue { size, desc, avail, used },
            desc: area(arena, desc, lens[0])?,
            avail: area(arena, avail, lens[1])?,
            used: area(arena, used, lens[2])?,
            kick: EventFd::new()?,
            call: EventFd::new()?,
        })
    }

    pub fn plan(&self, enabled: bool) -> RingPlan<'_> {
        RingPlan { enabled, ..ring(&self.queue, &self.kick, Some(&self.call)) }
    }

    /// Makes every descriptor a buffer of its own chain, and slot I of the available ring descriptor I.
    pub fn fill(&self, mut buffer: impl FnMut(u16) -> (u64, u32), writable: bool) -> Result<(), Error> {
        let flags = if writable { WRITE } else { 0 };
        for at in 0..self.queue.size {
            let (addr, len) = buffer(at);
            self.describe(at, addr, len, flags, 0)?;
            self.head(at, at)?;
        }
        Ok(())
    }

    /// Makes all descriptors from the first on one chain of so many, each of which has the next `len` bytes from `addr` on, and every
    /// slot of the available ring that chain.
    pub fn chain(&self, descriptors: u16, addr: u64, len: u32) -> Result<(), Error> {
        for at in 0..descriptors {
            let flags = if at + 1 < descriptors { NEXT } else { 0 };
            self.describe(at, addr + u64::from(at) * u64::from(len), len, flags, at + 1)?;
        }
        (0..self.queue.size).try_for_each(|slot| self.head(slot, 0))
    }

    /// Makes the ring chains of `links` writable buffers of `len` bytes. No two descriptors of a chain are neighbours, and each buffer begins
    /// a page behind the one before: nothing that is read for a chain is in the cache because of what was read before.
    fn scatter(&self, links: u16, addr: u64, len: u32) -> Result<(), Error> {
        let chains = self.queue.size / links;
        for at in 0..chains * links {
            let flags = if at / chains + 1 < links { NEXT | WRITE } else { WRITE };
            self.describe(at, addr + u64::from(at) * PAGE as u64, len, flags, at.wrapping_add(chains))?;
        }
        (0..self.queue.size).try_for_each(|slot| self.head(slot, slot % chains))
    }

    /// Writes a descriptor of a packed ring, which is all that such a ring is; its flags make it available.
    pub fn describe_packed(&self, at: u16, addr: u64, len: u32, id: u16, flags: u16) -> Result<(), Error> {
        // Where a split ring's descriptor has its flags and the next one.
        self.describe(at, addr, len, id, flags)
    }

    fn describe(&self, at: u16, addr: u64, len: u32, flags: u16, next: u16) -> Result<(), Error> {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&addr.to_le_bytes());
        bytes[8..12].copy_from_slice(&len.to_le_bytes());
        bytes[12..14].copy_from_slice(&flags.to_le_bytes());
        bytes[14..].copy_from_slice(&next.to_le_bytes());
        put(&self.desc, 16 * usize::from(at), &bytes)
    }

    fn head(&self, slot: u16, descriptor: u16) -> Result<(), Error> {
        put(&self.avail, 4 + 2 * usize::from(slot), &descriptor.to_le_bytes())
    }

    /// The index of the available ring as the attacker wants it.
    pub fn set_available(&self, index: u16) -> Result<(), Error> {
        fence(Ordering::SeqCst);
        put(&self.avail, 2, &index.to_le_bytes())?;
        fence(Ordering::SeqCst);
        Ok(())
    }

    /// The index of the used ring: so many chains, modulo 2^16, has the device had.
    pub fn used(&self) -> Result<u16, Error> {
        get(&self.used, 2)
    }

    /// Offers all entries that are not on offer already, and kicks if the device wants that; returns how many it has used
    /// since `before`, its used index of last time, which is changed.
    pub fn offer(&self, before: &mut u16) -> Result<u64, Error> {
        let used = self.used()?;
        let done = used.wrapping_sub(*before);
        *before = used;
        self.set_available(used.wrapping_add(self.queue.size))?;
        if get(&self.used, 0)? & NO_NOTIFY == 0 {
            self.kick.signal()?;
        }
        Ok(done.into())
    }
}

/// An error that is none of a system call.
fn other(message: impl Into<String>) -> Error {
    io::Error::other(message.into()).into()
}

fn area(arena: &Arena, addr: u64, len: usize) -> Result<Area, Error> {
    arena.memory().area(addr, len).ok_or_else(|| other("a ring is outside its arena"))
}

fn put(area: &Area, at: usize, bytes: &[u8]) -> Result<(), Error> {
    let room = area.write(at, bytes.len()).ok_or_else(|| other("a write outside its arena"))?;
    room.copy_from(bytes);
    Ok(())
}

fn get(area: &Area, at: usize) -> Result<u16, Error> {
    let bytes = area.read(at, 2).and_then(|bytes| bytes.array());
    bytes.map(u16::from_le_bytes).ok_or_else(|| other("a read outside its arena"))
}
