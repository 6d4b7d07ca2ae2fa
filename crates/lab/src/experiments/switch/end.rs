//! The ends of a way: a guest, which is our driver over vhost-user, or the kernel's side of a tap. Both poll. An end is
//! the same whoever switches.

use std::num::NonZeroU16;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ringferry_nic::rx::{PolicyKind, RxConfig};
use ringferry_nic::tx::TxConfig;
use ringferry_packet::buffer::Chain;
use ringferry_packet::vnet::Header;
use ringferry_rig::front::{Front, wanted};
use ringferry_sys::socket::{Listener, Stream as Socket};
use ringferry_sys::tap::{HEADER_LEN, MAX_READ, Tap};
use ringferry_virtio_net::Features;
use ringferry_virtio_net::driver::{Pair, PairConfig};

use crate::experiment::RowError;
use crate::frames::ways::Stream;

/// Frames that are handled together: what testpmd, Open vSwitch and the switch do.
pub(super) const BURST: usize = 32;

/// How long a switch may take until it answers.
const PATIENCE: Duration = Duration::from_secs(15);

/// The place where an end reaches its port.
#[derive(Debug)]
pub(super) enum Place {
    /// The switch listens at the socket.
    Connect(PathBuf),
    /// The switch connects to the socket.
    Listen(Listener),
    /// A tap that frames for the port are written to.
    Tap(Tap),
}

/// A guest, or the kernel's side of a tap.
pub(super) enum End {
    Guest(Box<Guest>),
    Tap(Box<TapEnd>),
}

/// A received frame.
pub(super) enum Seen<'a> {
    Packet(&'a Chain),
    /// With the virtual header in front.
    Bytes(&'a [u8; HEADER_LEN], &'a [u8]),
}

impl Seen<'_> {
    #[inline]
    pub(super) fn len(&self) -> usize {
        match self {
            Seen::Packet(chain) => chain.len(),
            Seen::Bytes(_, bytes) => bytes.len(),
        }
    }

    /// The first bytes, as many as there are room and frame.
    #[inline]
    pub(super) fn prefix<'a>(&self, out: &'a mut [u8]) -> &'a [u8] {
        match self {
            Seen::Packet(chain) => chain.prefix(out),
            Seen::Bytes(_, bytes) => {
                let n = bytes.len().min(out.len());
                out[..n].copy_from_slice(&bytes[..n]);
                &out[..n]
            }
        }
    }

    /// Returns true if it is still to be cut.
    #[inline]
    pub(super) fn is_gso(&self) -> bool {
        match self {
            Seen::Packet(chain) => chain.header.is_gso(),
            Seen::Bytes(header, _) => Header::from_bytes(header).is_gso(),
        }
    }

    pub(super) fn copy_to(&self, out: &mut Vec<u8>) {
        out.resize(self.len(), 0);
        self.prefix(out);
    }
}

/// The shape of the guests' devices.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub features: Features,
    pub queue: u16,
    /// Bytes of the longest frame.
    pub longest: usize,
}

impl End {
    /// Connects to a port and starts it.
    pub(super) fn start(
        place: Place,
        shape: &Shape,
        alive: impl FnMut() -> Result<(), RowError>,
    ) -> Result<Self, RowError> {
        match place {
            Place::Tap(tap) => Ok(End::Tap(Box::new(TapEnd {
                tap,
                outgoing: vec![0; MAX_READ],
                incoming: vec![0; MAX_READ],
            }))),
            Place::Connect(path) => Ok(End::Guest(Box::new(Guest::start(connect(&path, alive)?, shape)?))),
            Place::Listen(listener) => {
                Ok(End::Guest(Box::new(Guest::start(accept(&listener, alive)?, shape)?)))
            }
        }
    }

    /// Sends up to `max` frames; returns how many there was room for. `time` says when each is due.
    #[inline]
    pub(super) fn send(
        &mut self,
        max: usize,
        stream: &mut Stream,
        time: impl FnMut(u64) -> u64,
    ) -> Result<usize, RowError> {
        match self {
            End::Guest(guest) => guest.send(max, stream, time),
            End::Tap(tap) => tap.send(max, stream, time),
        }
    }

    /// Sends one frame, if there is room, without offloads.
    pub(super) fn say(&mut self, frame: &[u8]) -> Result<bool, RowError> {
        match self {
            End::Guest(guest) => {
                let Guest(front) = &mut **guest;
                front.pair.transmitq.make_room(1, &mut front.pair.pools);
                let sent = front.pair.send_frame(&Header::default(), frame);
                front.publish();
                Ok(sent)
            }
            End::Tap(tap) => {
                tap.outgoing[..HEADER_LEN].fill(0);
                tap.outgoing[HEADER_LEN..HEADER_LEN + frame.len()].copy_from_slice(frame);
                tap.write(frame.len())
            }
        }
    }

    /// Takes up to `max` frames; returns how many there were.
    #[inline]
    pub(super) fn receive(&mut self, max: usize, see: impl FnMut(&Seen<'_>)) -> Result<usize, RowError> {
        match self {
            End::Guest(guest) => guest.receive(max, see),
            End::Tap(tap) => tap.receive(max, see),
        }
    }
}

/// Connects once the switch listens.
fn connect(path: &Path, mut alive: impl FnMut() -> Result<(), RowError>) -> Result<Socket, RowError> {
    let begin = Instant::now();
    loop {
        match Socket::connect(path) {
            Ok(socket) => return Ok(socket),
            Err(error) if begin.elapsed() >= PATIENCE => {
                return Err(RowError::failed(format!("nobody listens at {}: {error}", path.display())));
            }
            Err(_) => {}
        }
        alive()?;
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Waits until the switch connects.
fn accept(listener: &Listener, mut alive: impl FnMut() -> Result<(), RowError>) -> Result<Socket, RowError> {
    let begin = Instant::now();
    loop {
        if let Some(socket) = listener.accept()? {
            return Ok(socket);
        }
        if begin.elapsed() >= PATIENCE {
            return Err(RowError::failed("the switch does not connect to its port"));
        }
        alive()?;
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A guest with one queue pair.
pub(super) struct Guest(Front);

impl Guest {
    fn start(socket: Socket, shape: &Shape) -> Result<Self, RowError> {
        let large = shape.longest > 1514;
        let config = PairConfig {
            receive: shape.queue,
            transmit: shape.queue,
            // Frames are looked at and kept by nobody. A buffer for each, as long as one is enough.
            rx: RxConfig {
                copy_break: 0,
                fetch_frame: true,
                policy: if large { PolicyKind::Best } else { PolicyKind::FixedMtu },
            },
            // When the ring is short of space, as testpmd does.
            tx: TxConfig { reclaim_after: NonZeroU16::new(shape.queue), ..TxConfig::default() },
            ..PairConfig::default()
        };
        let wanted = wanted(shape.features | Features::INDIRECT_DESC, shape.features);
        Ok(Self(Front::start(socket, &wanted, &config)?))
    }

    #[inline]
    fn send(
        &mut self,
        max: usize,
        stream: &mut Stream,
        mut time: impl FnMut(u64) -> u64,
    ) -> Result<usize, RowError> {
        let Pair { transmitq, pools, .. } = &mut self.0.pair;
        transmitq.make_room(max, pools);
        let header = stream.format.header;
        let mut sent = 0;
        while sent < max && transmitq.free() > 0 {
            let next = stream.peek(time(stream.number()));
            let Some(mut buf) = pools.alloc(next.size) else { break };
            buf.room().copy_from(next.bytes);
            buf.grow(next.size);
            let mut chain = Chain::from(buf);
            chain.header = header;
            if !transmitq.try_send(chain, pools) {
                break;
            }
            stream.advance();
            sent += 1;
        }
        self.0.publish();
        self.0.check()?;
        Ok(sent)
    }

    #[inline]
    fn receive(&mut self, max: usize, mut see: impl FnMut(&Seen<'_>)) -> Result<usize, RowError> {
        let Pair { receiveq, pools, .. } = &mut self.0.pair;
        let received = receiveq.lend(max, pools, |packet, _| {
            see(&Seen::Packet(&packet));
            Some(packet)
        });
        if received > 0 {
            self.0.top_up();
        }
        self.0.check()?;
        Ok(received)
    }
}

/// The kernel's side of a tap.
pub(super) struct TapEnd {
    tap: Tap,
    outgoing: Vec<u8>,
    incoming: Vec<u8>,
}

impl TapEnd {
    fn send(
        &mut self,
        max: usize,
        stream: &mut Stream,
        mut time: impl FnMut(u64) -> u64,
    ) -> Result<usize, RowError> {
        self.outgoing[..HEADER_LEN].copy_from_slice(&stream.format.header.to_bytes());
        for sent in 0..max {
            let next = stream.peek(time(stream.number()));
            self.outgoing[HEADER_LEN..HEADER_LEN + next.bytes.len()].copy_from_slice(next.bytes);
            let size = next.size;
            if !self.write(size)? {
                return Ok(sent);
            }
            stream.advance();
        }
        Ok(max)
    }

    fn write(&mut self, size: usize) -> Result<bool, RowError> {
        match self.tap.write(&self.outgoing[..HEADER_LEN + size]) {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => Ok(false),
            Err(error) => Err(RowError::failed(format!("writing to tap {}: {error}", self.tap.name()))),
        }
    }

    fn receive(&mut self, max: usize, mut see: impl FnMut(&Seen<'_>)) -> Result<usize, RowError> {
        for received in 0..max {
            match self.tap.read(&mut self.incoming) {
                Ok(bytes) => {
                    if let Some((header, frame)) = self.incoming[..bytes].split_first_chunk() {
                        see(&Seen::Bytes(header, frame));
                    }
                }
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return Ok(received),
                Err(error) => {
                    return Err(RowError::failed(format!("reading tap {}: {error}", self.tap.name())));
                }
            }
        }
        Ok(max)
    }
}
