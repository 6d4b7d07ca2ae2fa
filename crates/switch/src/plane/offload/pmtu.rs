//! Path MTU errors: the sender of a packet that does not fit its receiver gets "fragmentation needed" (RFC
//! 792 and 1191), or "packet too big" (RFC 4443). Without it, path MTU discovery waits for an answer that
//! never comes and connections hang.
//!
//! The switch has no address of its own. It answers in the name of the destination, as if the packet had got
//! as far as there: a host accepts the error by the packet that is quoted in it, not by its source address
//! (RFC 1122, 3.2.2.1). An answer goes to the port that the packet came from, is never longer than the
//! packet, and there is at most one to each, so no guest can use answers against others.

use std::net::{Ipv4Addr, Ipv6Addr};

use ringferry_packet::checksum::{Sum, pseudo_header_v6};
use ringferry_packet::ether::{self, Link, Mac};
use ringferry_packet::parse::{IpVersion, Layers};
use ringferry_packet::vnet::Header;

/// Bytes at the beginning of a frame that are enough for both functions here: Ethernet with two tags, and as much of the packet as an
/// answer quotes.
pub(crate) const ENOUGH: usize = 22 + MAX_V6 - IPV6_LEN - ICMP_LEN;

/// Upper bound on the length of an ICMP error over IPv4, in bytes with its IP header: the size that every host
/// takes (RFC 1812, 4.3.2.3).
const MAX_V4: usize = 576;
/// The same bound over IPv6: the MTU that every link has (RFC 4443, 2.4).
const MAX_V6: usize = 1280;
/// Least MTU of IPv6. A smaller one is not announced: no host would believe it (RFC 8201, 4).
const LEAST_V6: u16 = 1280;

const ICMP: u8 = 1;
const ICMP_V6: u8 = 58;
const IPV4_LEN: usize = 20;
const IPV6_LEN: usize = 40;
const ICMP_LEN: usize = 8;
const HOPS: u8 = 64;

/// Returns true if each packet of a frame of `len` bytes has at most `mtu` bytes behind its link header: the
/// segments, if the header asks for segmentation. `frame` is the frame's beginning, with all of its headers.
pub(crate) fn fits(frame: &[u8], len: usize, header: &Header, mtu: u16) -> bool {
    let mtu = usize::from(mtu);
    if len <= ether::MIN_FRAME + mtu {
        return true;
    }
    let Some(Link { l3, .. }) = Link::parse(frame) else { return true };
    if !header.is_gso() {
        return len - l3 <= mtu;
    }
    // A frame whose headers cannot be read cannot be segmented.
    Layers::parse(frame).is_ok_and(|layers| layers.payload - l3 + usize::from(header.gso_size) <= mtu)
}

/// Makes the answer to a frame that does not [fit](fits) a receiver with this `mtu`, into `out`: a whole
/// frame with finished checksums, for the port that the frame came from. `frame` is the frame's beginning,
/// [`ENOUGH`] bytes of it or all.
///
/// Returns false, and leaves `out` empty, if there is no answer: the packet is not IP, or may be fragmented
/// on its way (IPv4 without DF); its source or destination is not one station; it is an ICMP error, or not
/// the first fragment (RFC 1122, 3.2.2; RFC 4443, 2.4 (e)); no host would believe the MTU.
pub(crate) fn answer(frame: &[u8], mtu: u16, out: &mut Vec<u8>) -> bool {
    out.clear();
    reply(frame, mtu, out).is_some()
}

fn reply(frame: &[u8], mtu: u16, out: &mut Vec<u8>) -> Option<()> {
    let (destination, source) = (ether::destination(frame)?, ether::source(frame)?);
    if destination.is_multicast() || source.is_multicast() || source == Mac::default() {
        return None;
    }
    let layers = Layers::parse(frame).ok()?;
    let link = &frame[ether::MIN_FRAME - 2..layers.l3];
    let packet = &frame[layers.l3..];
    let begin = |out: &mut Vec<u8>| {
        out.extend(source.0);
        out.extend(destination.0);
        out.extend(link);
    };
    match layers.ip {
        IpVersion::V4 => {
            let bits = be16(packet, 6)?;
            let (may_not_be_cut, first) = (bits & 0x4000 != 0, bits & 0x1fff == 0);
            let error = layers.proto == ICMP && matches!(frame.get(layers.l4), None | Some(3..=5 | 11 | 12));
            let from: [u8; 4] = *packet.get(12..)?.first_chunk()?;
            let to: [u8; 4] = *packet.get(16..)?.first_chunk()?;
            if !may_not_be_cut || !first || error || !is_station_v4(from) || !is_station_v4(to) {
                return None;
            }
            begin(out);
            write_v4(packet, from, to, mtu, out);
        }
        IpVersion::V6 => {
            // The fragment header is the last that was read.
            let first = !layers.fragment || be16(frame, layers.l4 - 6)? & 0xfff8 == 0;
            // ICMPv6 errors have types below 128; a redirect is not answered, either.
            let error = layers.proto == ICMP_V6 && matches!(frame.get(layers.l4), None | Some(..128 | 137));
            let from: [u8; 16] = *packet.get(8..)?.first_chunk()?;
            let to: [u8; 16] = *packet.get(24..)?.first_chunk()?;
            if mtu < LEAST_V6 || !first || error || !is_station_v6(from) || !is_station_v6(to) {
                return None;
            }
            begin(out);
            write_v6(packet, from, to, mtu, out);
        }
    }
    Some(())
}

/// Writes the error about an IPv4 packet from host `from` to host `to`.
fn write_v4(packet: &[u8], from: [u8; 4], to: [u8; 4], mtu: u16, out: &mut Vec<u8>) {
    let quoted = &packet[..packet.len().min(MAX_V4 - IPV4_LEN - ICMP_LEN)];
    let len = (IPV4_LEN + ICMP_LEN + quoted.len()) as u16;
    let ip = out.len();
    // The type of service is internetwork control (RFC 1812, 4.3.2.5); DF is set, so that the packet needs no
    // identification (RFC 6864).
    out.extend([0x45, 0xc0]);
    out.extend(len.to_be_bytes());
    out.extend([0, 0, 0x40, 0, HOPS, ICMP, 0, 0]);
    out.extend(to);
    out.extend(from);
    let icmp = out.len();
    // Destination unreachable, fragmentation needed and DF set.
    out.extend([3, 4, 0, 0, 0, 0]);
    out.extend(mtu.to_be_bytes());
    out.extend(quoted);
    seal(out, ip, icmp, 10, Sum::new());
    let end = out.len();
    seal(out, icmp, end, 2, Sum::new());
}

/// Writes the error about an IPv6 packet from host `from` to host `to`.
fn write_v6(packet: &[u8], from: [u8; 16], to: [u8; 16], mtu: u16, out: &mut Vec<u8>) {
    let quoted = &packet[..packet.len().min(MAX_V6 - IPV6_LEN - ICMP_LEN)];
    let len = (ICMP_LEN + quoted.len()) as u16;
    out.extend([0x60, 0, 0, 0]);
    out.extend(len.to_be_bytes());
    out.extend([ICMP_V6, HOPS]);
    out.extend(to);
    out.extend(from);
    let icmp = out.len();
    // Type 2: packet too big.
    out.extend([2, 0, 0, 0]);
    out.extend(u32::from(mtu).to_be_bytes());
    out.extend(quoted);
    let end = out.len();
    seal(out, icmp, end, 2, pseudo_header_v6(to, from, ICMP_V6, len.into()));
}

/// Stores the checksum of `out[start..end]`, which is 0 so far, `at` bytes behind the start.
fn seal(out: &mut [u8], start: usize, end: usize, at: usize, mut sum: Sum) {
    sum.add(&out[start..end]);
    out[start + at..start + at + 2].copy_from_slice(&sum.finish().to_be_bytes());
}

/// Returns true if this can be the address of one host.
fn is_station_v4(address: [u8; 4]) -> bool {
    let address = Ipv4Addr::from(address);
    // Class E is excluded as it has the limited broadcast in it.
    !address.is_unspecified() && !address.is_loopback() && address.octets()[0] < 224
}

fn is_station_v6(address: [u8; 16]) -> bool {
    let address = Ipv6Addr::from(address);
    !address.is_unspecified() && !address.is_loopback() && !address.is_multicast()
}

fn be16(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..)?.first_chunk().map(|number| u16::from_be_bytes(*number))
}

#[cfg(test)]
mod tests {
    use ringferry_packet::checksum::verify;

    use super::*;
    use ringferry_packet::testing::Packet;

    fn answered(frame: &[u8], mtu: u16) -> Option<Vec<u8>> {
        let mut out = vec![1, 2, 3];
        let answered = answer(&frame[..frame.len().min(ENOUGH)], mtu, &mut out);
        assert_eq!(answered, !out.is_empty());
        answered.then_some(out)
    }

    fn tagged(v6: bool, tags: usize, len: usize) -> Vec<u8> {
        Packet { tags, ..Packet::plain(v6, false, vec![6; len]) }.complete().1
    }

    fn edited(frame: &[u8], at: usize, bytes: &[u8]) -> Vec<u8> {
        let mut frame = frame.to_vec();
        frame[at..at + bytes.len()].copy_from_slice(bytes);
        frame
    }

    /// RFC 1191, 4, puts the next-hop MTU in the second word; RFC 792 quotes the packet in the name of the
    /// destination.
    #[test]
    fn rfc_1191_fragmentation_needed_goes_back_to_the_source() {
        for tags in 0..3 {
            for len in [1473, 3000, 8000] {
                let frame = tagged(false, tags, len);
                let l3 = 14 + 4 * tags;
                let reply = answered(&frame, 1400).unwrap();
                assert_eq!((&reply[..6], &reply[6..12]), (&frame[6..12], &frame[..6]));
                assert_eq!(reply[12..l3], frame[12..l3]);
                let layers = verify(&reply).unwrap();
                assert_eq!((layers.l3, layers.proto, layers.fragment), (l3, ICMP, false));
                assert_eq!(reply[l3 + 12..l3 + 16], frame[l3 + 16..l3 + 20]);
                assert_eq!(reply[l3 + 16..l3 + 20], frame[l3 + 12..l3 + 16]);
                assert_eq!(reply.len(), l3 + MAX_V4);
                assert_eq!(be16(&reply, l3 + 2), Some(MAX_V4 as u16));
                let icmp = &reply[l3 + 20..];
                assert_eq!((icmp[..2].to_vec(), be16(icmp, 6)), (vec![3, 4], Some(1400)));
                let mut sum = Sum::new();
                sum.add(icmp);
                assert_eq!(sum.finish(), 0);
                assert_eq!(icmp[8..], frame[l3..l3 + icmp.len() - 8]);
            }
        }
    }

    /// RFC 4443, 3.2: type 2, code 0, the MTU in 32 bits, as much of the packet as fits 1280 bytes.
    #[test]
    fn rfc_4443_packet_too_big_goes_back_to_the_source() {
        for tags in 0..3 {
            let frame = tagged(true, tags, 3000);
            let l3 = 14 + 4 * tags;
            let reply = answered(&frame, 1500).unwrap();
            assert_eq!((&reply[..6], &reply[6..12]), (&frame[6..12], &frame[..6]));
            assert_eq!(reply[12..l3], frame[12..l3]);
            assert_eq!(reply.len(), l3 + MAX_V6);
            assert_eq!(be16(&reply, l3 + 4), Some((MAX_V6 - IPV6_LEN) as u16));
            assert_eq!(reply[l3 + 6], ICMP_V6);
            assert_eq!(reply[l3 + 8..l3 + 24], frame[l3 + 24..l3 + 40]);
            assert_eq!(reply[l3 + 24..l3 + 40], frame[l3 + 8..l3 + 24]);
            let icmp = &reply[l3 + 40..];
            assert_eq!(icmp[..2], [2, 0]);
            assert_eq!(icmp[4..8], 1500u32.to_be_bytes());
            let (from, to) = (reply[l3 + 8..l3 + 24].try_into(), reply[l3 + 24..l3 + 40].try_into());
            let mut sum = pseudo_header_v6(from.unwrap(), to.unwrap(), ICMP_V6, icmp.len() as u32);
            sum.add(icmp);
            assert_eq!(sum.finish(), 0);
            assert_eq!(icmp[8..], frame[l3..l3 + icmp.len() - 8]);
        }
    }

    /// RFC 1122, 3.2.2, lists packets that get no ICMP error.
    #[test]
    fn rfc_1122_some_packets_are_never_answered() {
        let v4 = tagged(false, 0, 3000);
        assert!(answered(&v4, 1400).is_some());
        let never = [
            ("may be fragmented", 20, vec![0, 0]),
            ("not the first fragment", 20, vec![0x40, 1]),
            ("to a group", 0, vec![1, 0, 0x5e]),
            ("from a group", 6, vec![3]),
            ("from nobody's station", 6, vec![0; 6]),
            ("to a group's address", 30, vec![239, 1, 2, 3]),
            ("to everyone", 30, vec![255; 4]),
            ("from a group's address", 26, vec![224, 0, 0, 1]),
            ("from nobody", 26, vec![0; 4]),
            ("from itself", 26, vec![127, 0, 0, 1]),
            ("not IP", 12, vec![8, 6]),
        ];
        for (what, at, bytes) in never {
            assert_eq!(answered(&edited(&v4, at, &bytes), 1400), None, "{what}");
        }
        let icmp = edited(&v4, 23, &[ICMP]);
        for kind in 0..=20u8 {
            let error = [3, 4, 5, 11, 12].contains(&kind);
            assert_eq!(answered(&edited(&icmp, 34, &[kind]), 1400).is_none(), error, "{kind}");
        }
        assert!(answered(&edited(&v4, 20, &[0x60, 0]), 1400).is_some(), "the first fragment");
    }

    /// RFC 4443, 2.4 (e); RFC 8201, 4: no MTU below 1280.
    #[test]
    fn rfc_4443_some_packets_are_never_answered() {
        let v6 = tagged(true, 0, 3000);
        assert!(answered(&v6, LEAST_V6).is_some());
        assert_eq!(answered(&v6, LEAST_V6 - 1), None);
        assert_eq!(answered(&edited(&v6, 38, &[0xff]), 1500), None, "to a group");
        assert_eq!(answered(&edited(&v6, 22, &[0xff]), 1500), None, "from a group");
        assert_eq!(answered(&edited(&v6, 22, &[0; 16]), 1500), None, "from nobody");
        let icmp = edited(&v6, 20, &[ICMP_V6]);
        for kind in 0..=255u8 {
            let error = kind < 128 || kind == 137;
            assert_eq!(answered(&edited(&icmp, 54, &[kind]), 1500).is_none(), error, "{kind}");
        }
        let fragment = |offset: u8| edited(&edited(&v6, 20, &[44]), 54, &[17, 0, 0, offset, 0, 0, 0, 1]);
        assert!(answered(&fragment(1), 1500).is_some(), "the first fragment");
        assert_eq!(answered(&fragment(9), 1500), None, "another");
    }

    #[test]
    fn a_frame_fits_if_each_of_its_packets_does() {
        for tags in 0..3 {
            for v6 in [false, true] {
                let headers = if v6 { 48 } else { 28 };
                let frame = tagged(v6, tags, 1000);
                let exact = (1000 + headers) as u16;
                for (mtu, expected) in [(exact, true), (exact - 1, false), (u16::MAX, true)] {
                    assert_eq!(fits(&frame, frame.len(), &Header::default(), mtu), expected);
                }
                let tcp = Packet { tags, tcp_options: 3, ..Packet::plain(v6, true, vec![1; 9000]) };
                let (header, frame) = tcp.sent(1388);
                let exact = (1388 + 32 + headers - 8) as u16;
                for (mtu, expected) in [(exact, true), (exact - 1, false)] {
                    assert_eq!(fits(&frame, frame.len(), &header, mtu), expected, "{tags} {v6}");
                }
            }
        }
    }

    #[test]
    fn frames_cut_short_do_no_harm() {
        for frame in [tagged(false, 2, 2000), tagged(true, 2, 2000)] {
            for len in 0..100 {
                let mut out = Vec::new();
                let _ = answer(&frame[..len], 1400, &mut out);
                let _ = fits(&frame[..len], frame.len(), &Packet::plain(false, true, vec![]).sent(9).0, 1400);
            }
        }
    }
}
