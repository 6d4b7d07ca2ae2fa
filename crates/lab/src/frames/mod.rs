//! Frames that are sent to be known again: what is in them, and what is wrong with one that arrives. All of it is made of
//! `ringferry-packet` and fastrand; nothing here knows an experiment.
//!
//! | module | frames |
//! |---|---|
//! | [`numbered`] | UDP of one length with a number and a pattern, and those of testpmd's `txonly` mode |
//! | [`segments`] | TCP of one length with a number, written and copied in place, to be cut if they are large |
//! | [`stream`] | packets of a stream of bytes, whatever sends it was written by |
//! | [`flows`] | the smallest frames of 2000 UDP flows, which a router has changed |
//! | [`ways`] | mixes of lengths in many flows between many ports, with the time each was due, and good checksums |

pub mod flows;
pub mod numbered;
pub mod segments;
pub mod stream;
pub mod ways;

use fastrand::Rng;
use ringferry_packet::checksum::{self, Sum};
use ringferry_packet::vnet::{F_NEEDS_CSUM, GSO_TCPV4, Header};

/// Bytes of Ethernet's header.
pub const ETHERNET: usize = 14;
/// Bytes of Ethernet's and IPv4's headers.
pub const IP: usize = ETHERNET + 20;
/// Bytes of all headers in front of what UDP carries.
pub const UDP: usize = IP + 8;
/// Bytes of all headers in front of what TCP carries, without options.
pub const TCP: usize = IP + 20;

/// Where the checksums of UDP and TCP are.
const UDP_CHECKSUM: usize = IP + 6;
const TCP_CHECKSUM: usize = IP + 16;

/// A reason why a frame is wrong.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Wrong(String);

/// The header fields that all frames between two ends have in common.
#[derive(Clone, Copy, Debug)]
struct Between {
    /// Ethernet addresses, destination first, as in a frame.
    macs: [u8; 12],
    source: [u8; 4],
    destination: [u8; 4],
    /// Source and destination port.
    ports: [u16; 2],
    /// True if DF is set.
    whole: bool,
}

/// Two stations with the addresses of RFC 2544, as testpmd's `txonly` mode has them, and with its ports.
const STATIONS: Between = Between {
    macs: [2, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 1],
    source: [198, 18, 0, 1],
    destination: [198, 18, 0, 2],
    ports: [9, 9],
    whole: false,
};

impl Between {
    /// The headers of a UDP frame of so many bytes; where its checksum belongs is zero, which says that there is none.
    fn udp(&self, size: usize) -> [u8; UDP] {
        let mut headers = [0; UDP];
        self.ip(17, size, &mut headers);
        headers[IP + 4..IP + 6].copy_from_slice(&((size - IP) as u16).to_be_bytes());
        headers
    }

    /// The headers of a TCP frame of so many bytes, an acknowledgement; `N` less [`TCP`] bytes of them are room for options. Where
    /// the checksum belongs is zero.
    fn tcp<const N: usize>(&self, size: usize) -> [u8; N] {
        let mut headers = [0; N];
        self.ip(6, size, &mut headers);
        let words = (N - IP) / 4;
        headers[IP + 12..IP + 16].copy_from_slice(&[(words as u8) << 4, 0x10, 0xff, 0xff]);
        headers
    }

    /// Ethernet, IPv4, and the ports.
    fn ip(&self, protocol: u8, size: usize, headers: &mut [u8]) {
        headers[..12].copy_from_slice(&self.macs);
        headers[12..16].copy_from_slice(&[0x08, 0x00, 0x45, 0x00]);
        headers[16..18].copy_from_slice(&((size - ETHERNET) as u16).to_be_bytes());
        headers[20..24].copy_from_slice(&[if self.whole { 0x40 } else { 0 }, 0, 64, protocol]);
        headers[26..30].copy_from_slice(&self.source);
        headers[30..34].copy_from_slice(&self.destination);
        let mut sum = Sum::new();
        sum.add(&headers[ETHERNET..IP]);
        headers[24..26].copy_from_slice(&sum.finish().to_be_bytes());
        for (at, port) in self.ports.into_iter().enumerate() {
            headers[IP + 2 * at..][..2].copy_from_slice(&port.to_be_bytes());
        }
    }

    /// The sum of the pseudo header, which is where the checksum of a frame belongs that somebody else finishes.
    fn pseudo(&self, protocol: u8, size: usize) -> u16 {
        checksum::pseudo_header_v4(self.source, self.destination, protocol, (size - IP) as u16).partial()
    }
}

/// The virtual header of a TCP frame that is to be cut: packets of `mss` bytes behind as many bytes of headers.
pub fn to_be_cut(headers: usize, mss: usize) -> Header {
    Header {
        flags: F_NEEDS_CSUM,
        gso_type: GSO_TCPV4,
        hdr_len: headers as u16,
        gso_size: mss as u16,
        csum_start: IP as u16,
        csum_offset: (TCP_CHECKSUM - IP) as u16,
        num_buffers: 0,
    }
}

/// Bytes of no short period, the same each time.
fn pattern(len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    Rng::with_seed(0x9e37_79b9_7f4a_7c15).fill(&mut bytes);
    bytes
}

#[cfg(test)]
mod tests {
    use ringferry_packet::parse::Layers;

    use super::*;

    #[test]
    fn headers_are_good_also_where_their_checksum_carries() {
        for size in [64, 1518, 65_000] {
            for headers in [&STATIONS.udp(size)[..], &STATIONS.tcp::<TCP>(size), &STATIONS.tcp::<66>(size)] {
                let mut sum = Sum::new();
                sum.add(&headers[ETHERNET..IP]);
                assert_eq!(sum.finish(), 0, "{size}");
                let mut frame = headers.to_vec();
                frame.resize(size.max(headers.len()), 0);
                assert!(Layers::parse(&frame).is_ok(), "{size}");
            }
        }
    }
}
