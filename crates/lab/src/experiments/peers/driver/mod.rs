//! ringferry as the driver: a vhost-user front end with one queue pair, used as any program would.

mod forward;
mod sink;
mod source;

use std::num::NonZeroU16;
use std::path::Path;

use ringferry_nic::rx::{PolicyKind, RxConfig};
use ringferry_nic::tx::TxConfig;
use ringferry_packet::buffer::Chain;
use ringferry_rig::front::{Front, wanted};
use ringferry_sys::socket::Stream;
use ringferry_virtio_net::driver::PairConfig;

pub(super) use forward::Forward;
pub(super) use sink::Sink;
pub(super) use source::Source;

use super::case::Case;
use crate::experiment::RowError;

/// Longest frame of MTU 1500 with a tag.
const FRAME: usize = 1518;

/// Buffers of one frame, as the other peer has, as long as that is enough.
fn policy(size: usize) -> PolicyKind {
    if size <= FRAME { PolicyKind::FixedMtu } else { PolicyKind::Best }
}

/// Connects to the device that listens at `socket` and starts it with the rings of `case`.
pub(super) fn connect(case: &Case, socket: &Path) -> Result<Front, RowError> {
    let features = case.features();
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
    Ok(Front::start(Stream::connect(socket)?, &wanted(features, features), &config)?)
}

/// Copies a packet's segments into one buffer.
fn flatten(packet: &Chain, whole: &mut Vec<u8>) {
    whole.resize(packet.len(), 0);
    packet.copy_to(whole);
}
