//! A stream of bytes as TCP packets that the device is to cut up: full ones, whatever sends it was written by.

use ringferry_packet::vnet::Header;

use super::{STATIONS, Wrong, pattern, to_be_cut};

/// Ethernet, IPv4 and TCP with time stamps.
pub const HEADERS: usize = 14 + 20 + 32;
/// Bytes of payload that the device puts into each frame: MTU 1500.
const MSS: usize = 1448;
/// Bytes of payload of a packet: as many whole frames as 64 KiB hold.
pub const PAYLOAD: usize = 45 * MSS;

/// The application's stream: bytes that repeat, but not after as many as a packet or a buffer has.
#[derive(Debug)]
pub struct Payload(Vec<u8>);

/// Bytes after which the payload repeats: a prime.
const PERIOD: usize = 65_521;

impl Payload {
    pub fn new() -> Self {
        let mut bytes = pattern(PERIOD);
        bytes.extend_from_within(..);
        Self(bytes)
    }

    /// `len` bytes of the stream from `at` on, at most [`PERIOD`].
    #[inline]
    pub fn slice(&self, at: u64, len: usize) -> &[u8] {
        &self.0[(at % PERIOD as u64) as usize..][..len]
    }

    /// Checks that `frame` is the `number`-th packet of a stream, whole.
    pub fn check(&self, number: u64, frame: &[u8]) -> Result<(), Wrong> {
        let good = frame.len() == HEADERS + PAYLOAD
            && frame[..HEADERS] == headers()
            && frame[HEADERS..] == *self.slice(number * PAYLOAD as u64, PAYLOAD);
        let text =
            || format!("packet {number} was lost, repeated, out of order or damaged: {} bytes", frame.len());
        if good { Ok(()) } else { Err(Wrong(text())) }
    }
}

/// The headers of every packet.
pub fn headers() -> [u8; HEADERS] {
    STATIONS.tcp(HEADERS + PAYLOAD)
}

/// The virtual header of a packet.
pub fn offloads() -> Header {
    to_be_cut(HEADERS, MSS)
}
