//! Our driver before somebody's device: what a vhost-user front end asks for, and a queue pair whose two sides poll.

use std::os::fd::AsFd;

use ringferry_sys::eventfd::EventFd;
use ringferry_sys::socket::Stream;
use ringferry_vhost_user::{Connection, ProtocolFeatures, RingPlan, Wanted, connect_device};
use ringferry_virtio_net::Features;
use ringferry_virtio_net::driver::{Arena, Pair, PairConfig, Queue};

use crate::experiment::RowError;

/// What to ask a device for. DPDK tracks no chains in flight, so nobody does.
pub(super) fn wanted(features: Features, required: Features) -> Wanted {
    Wanted {
        features: features.bits(),
        required: required.bits(),
        protocol: Wanted::NET_PROTOCOL - ProtocolFeatures::INFLIGHT_SHMFD,
    }
}

/// A ring for the device.
pub(super) fn ring<'a>(queue: &Queue, kick: &'a EventFd, call: &'a EventFd) -> RingPlan<'a> {
    let Queue { size, desc, avail, used } = *queue;
    RingPlan {
        size,
        base: None,
        desc,
        avail,
        used,
        kick: Some(kick.as_fd()),
        call: Some(call.as_fd()),
        err: None,
        enabled: true,
    }
}

/// A queue pair whose device is set up, with calls turned off.
pub(super) struct Front {
    /// The device stops when it is closed.
    _connection: Connection,
    _calls: [EventFd; 2],
    kicks: [EventFd; 2],
    pub(super) pair: Pair,
}

impl Front {
    /// Starts the device behind `socket` and posts buffers.
    pub(super) fn start(socket: Stream, wanted: &Wanted, config: &PairConfig) -> Result<Self, RowError> {
        let mut connection = connect_device(socket, wanted).map_err(RowError::failed)?;
        let features = Features::from_bits_retain(connection.negotiated().features);
        let mut arena = Arena::new(config.arena_bytes(features)).map_err(RowError::failed)?;
        let pair = Pair::new(&mut arena, features, config).map_err(RowError::failed)?;
        let kicks = [EventFd::new()?, EventFd::new()?];
        let calls = [EventFd::new()?, EventFd::new()?];
        let rings: [_; 2] = std::array::from_fn(|at| ring(&pair.queues[at], &kicks[at], &calls[at]));
        connection.start(&[(arena.region(), arena.fd())], &rings).map_err(RowError::failed)?;
        let mut front = Self { _connection: connection, _calls: calls, kicks, pair };
        front.pair.disable_calls();
        front.refill();
        Ok(front)
    }

    /// Posts what was received again, a burst at a time.
    #[inline]
    pub(super) fn top_up(&mut self) {
        if self.pair.receiveq.top_up() {
            let _ = self.kicks[0].signal();
        }
    }

    /// Posts what was received again.
    #[inline]
    pub(super) fn refill(&mut self) {
        if self.pair.refill() {
            let _ = self.kicks[0].signal();
        }
    }

    /// Shows what was sent to the device.
    #[inline]
    pub(super) fn publish(&mut self) {
        if self.pair.transmitq.flush() {
            let _ = self.kicks[1].signal();
        }
    }

    /// An error once the device has broken a rule.
    #[inline]
    pub(super) fn check(&mut self) -> Result<(), RowError> {
        let errors = self.pair.receiveq.stats().rx_length_errors;
        match self.pair.fault() {
            Some(fault) => Err(RowError::failed(format!("the device broke a ring: {fault}"))),
            None if errors > 0 => Err(RowError::failed(format!("{errors} frames had impossible lengths"))),
            None => Ok(()),
        }
    }
}
