//! ringferry as the driver: a vhost-user front end with one queue pair, used as any program would.

mod forward;
mod sink;
mod source;

use std::num::NonZeroU16;
use std::os::fd::AsFd;
use std::path::Path;

use ringferry_nic::rx::{PolicyKind, RxConfig};
use ringferry_nic::tx::TxConfig;
use ringferry_packet::buffer::Chain;
use ringferry_sys::eventfd::EventFd;
use ringferry_sys::socket::Stream;
use ringferry_vhost_user::{Connection, ProtocolFeatures, RingPlan, Wanted, connect_device};
use ringferry_virtio_net::Features;
use ringferry_virtio_net::driver::{Arena, Pair, PairConfig, Queue};

pub(super) use forward::Forward;
pub(super) use sink::Sink;
pub(super) use source::Source;

use super::case::Case;
use crate::experiment::RowError;

/// A queue pair whose device is set up. Both sides poll: calls are turned off.
pub(super) struct End {
    /// The device stops when it is closed.
    _connection: Connection,
    _calls: [EventFd; 2],
    kicks: [EventFd; 2],
    pair: Pair,
}

/// Longest frame of MTU 1500 with a tag.
const FRAME: usize = 1518;

/// Buffers of one frame, as the other peer has, as long as that is enough.
fn policy(size: usize) -> PolicyKind {
    if size <= FRAME { PolicyKind::FixedMtu } else { PolicyKind::Best }
}

impl End {
    /// Connects to the device that listens at `socket` and starts it with the rings of `case`; buffers are
    /// posted.
    pub(super) fn connect(case: &Case, socket: &Path) -> Result<End, RowError> {
        let features = case.features();
        let wanted = Wanted {
            features: features.bits(),
            required: features.bits(),
            // DPDK tracks no chains in flight, so ringferry does not either.
            protocol: Wanted::NET_PROTOCOL - ProtocolFeatures::INFLIGHT_SHMFD,
        };
        let connection = Stream::connect(socket).map_err(RowError::from);
        let mut connection = connect_device(connection?, &wanted).map_err(RowError::failed)?;
        let features = Features::from_bits_retain(connection.negotiated().features);
        let config = PairConfig {
            receive: case.queue,
            transmit: case.queue,
            mtu: (case.size - 14).max(1500) as u16,
            // Nobody reads frames, and nobody keeps them: a copy, or a fetch, would only move lines, and memory that is
            // cut off would be joined again at once.
            rx: RxConfig { copy_break: 0, fetch_frame: false, policy: policy(case.size) },
            // When the ring is short of space, as testpmd does.
            tx: TxConfig { reclaim_after: NonZeroU16::new(case.queue), ..TxConfig::default() },
            ..PairConfig::default()
        };
        let mut arena = Arena::new(config.arena_bytes(features)).map_err(RowError::failed)?;
        let pair = Pair::new(&mut arena, features, &config).map_err(RowError::failed)?;
        let [rx, tx] = pair.queues;
        let kicks = [EventFd::new()?, EventFd::new()?];
        let calls = [EventFd::new()?, EventFd::new()?];
        let plan = |queue: Queue, at: usize| RingPlan {
            size: queue.size,
            base: None,
            desc: queue.desc,
            avail: queue.avail,
            used: queue.used,
            kick: Some(kicks[at].as_fd()),
            call: Some(calls[at].as_fd()),
            err: None,
            enabled: true,
        };
        let rings = [plan(rx, 0), plan(tx, 1)];
        connection.start(&[(arena.region(), arena.fd())], &rings).map_err(RowError::failed)?;
        let mut end = End { _connection: connection, _calls: calls, kicks, pair };
        end.pair.receiveq.driver().ring().disable_calls();
        end.pair.transmitq.driver().ring().disable_calls();
        end.refill();
        Ok(end)
    }

    /// Posts what was received again, a burst at a time.
    #[inline]
    fn top_up(&mut self) {
        if self.pair.receiveq.top_up() {
            let _ = self.kicks[0].signal();
        }
    }

    /// Posts what was received again.
    #[inline]
    fn refill(&mut self) {
        if self.pair.refill() {
            let _ = self.kicks[0].signal();
        }
    }

    /// Shows what was sent to the device.
    #[inline]
    fn publish(&mut self) {
        if self.pair.transmitq.flush() {
            let _ = self.kicks[1].signal();
        }
    }

    /// An error once the device has broken a rule.
    #[inline]
    fn check(&mut self) -> Result<(), RowError> {
        let Pair { receiveq, transmitq, .. } = &mut self.pair;
        let errors = receiveq.stats().rx_length_errors;
        match receiveq.driver().fault().or_else(|| transmitq.driver().fault()) {
            Some(fault) => Err(RowError::failed(format!("the device broke a ring: {fault}"))),
            None if errors > 0 => Err(RowError::failed(format!("{errors} frames had impossible lengths"))),
            None => Ok(()),
        }
    }
}

/// Copies a frame together.
fn flatten(packet: &Chain, whole: &mut Vec<u8>) {
    whole.resize(packet.len(), 0);
    packet.copy_to(whole);
}
