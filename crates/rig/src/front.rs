//! Our driver half behind a vhost-user socket: what a front end asks a device for, how it describes a ring, and a queue pair whose two
//! sides poll.
//!
//! [`wanted`] and [`ring`] are for whoever makes a front end of any shape. A [`Front`] has one queue pair: [`Front::start`] negotiates, starts
//! the device and posts buffers; one thread uses it, which polls; the device stops when it is dropped.

use std::io;
use std::os::fd::AsFd;

use ringferry_ring::Fault;
use ringferry_sys::eventfd::EventFd;
use ringferry_sys::socket::Stream;
use ringferry_vhost_user::{Connection, FrontendError, ProtocolFeatures, RingPlan, Wanted, connect_device};
use ringferry_virtio_net::Features;
use ringferry_virtio_net::driver::{Arena, ArenaError, Pair, PairConfig, PairError, Queue};

/// A reason why a front end could not be started, or cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Session(#[from] FrontendError),
    #[error(transparent)]
    Memory(#[from] ArenaError),
    #[error(transparent)]
    Queues(#[from] PairError),
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("the device broke a ring: {0}")]
    Broken(Fault),
    #[error("{0} frames had impossible lengths")]
    Lengths(u64),
}

/// The features and protocol features to ask a device for. DPDK tracks no chains in flight, so nobody does.
pub fn wanted(features: Features, required: Features) -> Wanted {
    Wanted {
        features: features.bits(),
        required: required.bits(),
        protocol: Wanted::NET_PROTOCOL - ProtocolFeatures::INFLIGHT_SHMFD,
    }
}

/// A ring for the device, enabled, which begins at its beginning. Without `call` the driver polls.
pub fn ring<'a>(queue: &Queue, kick: &'a EventFd, call: Option<&'a EventFd>) -> RingPlan<'a> {
    let Queue { size, desc, avail, used } = *queue;
    let (kick, call) = (Some(kick.as_fd()), call.map(AsFd::as_fd));
    RingPlan { size, base: None, desc, avail, used, kick, call, err: None, enabled: true }
}

/// A queue pair whose device is set up, with calls turned off.
pub struct Front {
    /// The device stops when it is closed.
    _connection: Connection,
    _calls: [EventFd; 2],
    kicks: [EventFd; 2],
    pub pair: Pair,
}

impl Front {
    /// Starts the device behind `socket` and posts buffers.
    pub fn start(socket: Stream, wanted: &Wanted, config: &PairConfig) -> Result<Self, Error> {
        let mut connection = connect_device(socket, wanted)?;
        let features = Features::from_bits_retain(connection.negotiated().features);
        let mut arena = Arena::new(config.arena_bytes(features))?;
        let pair = Pair::new(&mut arena, features, config)?;
        let kicks = [EventFd::new()?, EventFd::new()?];
        let calls = [EventFd::new()?, EventFd::new()?];
        let rings: [_; 2] = std::array::from_fn(|at| ring(&pair.queues[at], &kicks[at], Some(&calls[at])));
        connection.start(&[(arena.region(), arena.fd())], &rings)?;
        let mut front = Self { _connection: connection, _calls: calls, kicks, pair };
        front.pair.disable_calls();
        front.refill();
        Ok(front)
    }

    /// Posts what was received again, a burst at a time.
    #[inline]
    pub fn top_up(&mut self) {
        if self.pair.receiveq.top_up() {
            let _ = self.kicks[0].signal();
        }
    }

    /// Posts what was received again.
    #[inline]
    pub fn refill(&mut self) {
        if self.pair.refill() {
            let _ = self.kicks[0].signal();
        }
    }

    /// Shows what was sent to the device.
    #[inline]
    pub fn publish(&mut self) {
        if self.pair.transmitq.flush() {
            let _ = self.kicks[1].signal();
        }
    }

    /// An error once the device has broken a rule.
    #[inline]
    pub fn check(&mut self) -> Result<(), Error> {
        let errors = self.pair.receiveq.stats().rx_length_errors;
        match self.pair.fault() {
            Some(fault) => Err(Error::Broken(fault)),
            None if errors > 0 => Err(Error::Lengths(errors)),
            None => Ok(()),
        }
    }
}
