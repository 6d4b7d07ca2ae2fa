//! Finding H3: frames to everybody that are cut into as many packets as can be, for each of eight receivers that cannot take
//! them whole, so that a few bytes in a ring are a great deal of work.

use super::floods::{Flood, mac, tcp};
use super::{Place, Step};
use crate::experiment::RowError;
use crate::frames::to_be_cut;
use ringferry_virtio_net::Features;

/// Headers of Ethernet, IPv4 and TCP without options.
const HEADERS: usize = 54;
/// Packets of a frame, at most, that a switch is to accept.
const PACKETS: usize = 2040;

fn start(place: &Place, mss: usize, pairs: u16) -> Result<Step, RowError> {
    let len = (HEADERS + mss * PACKETS).min(65_535);
    let mut flood = Flood::new(tcp([0xff; 6], mac(0), len));
    flood.header = to_be_cut(HEADERS, mss);
    flood.sender.features = Features::CSUM | Features::HOST_TSO4;
    flood.sender.pairs = pairs;
    flood.start(place)
}

/// 64 KiB in packets of 32 bytes of payload.
pub(super) fn large(place: &Place) -> Result<Step, RowError> {
    start(place, 32, 1)
}

/// The same from 16 queue pairs at once.
pub(super) fn pairs(place: &Place) -> Result<Step, RowError> {
    start(place, 32, 16)
}

/// 16 KiB in packets of 8 bytes of payload, the least that the switch accepts.
pub(super) fn smallest(place: &Place) -> Result<Step, RowError> {
    start(place, 8, 1)
}
