//! The tap that plays a guest's interface: what `guest` and `netfront` do alike with theirs. Nothing is owned here.

use std::net::IpAddr;

use arrayvec::ArrayVec;
use ringferry_memory::ReadSlice;
use ringferry_packet::buffer::Chain;
use ringferry_packet::ether::Mac;
use ringferry_packet::vnet;
use ringferry_sys::netif::{self, InterfaceError};
use ringferry_sys::tap::{Offloads, Tap};

/// Most buffers of a packet that go to the kernel, the header among them: a frame of any length in buffers of an
/// MTU, and some.
const PIECES: usize = 64;

/// Reads an address as options give it: ADDRESS/PREFIX.
pub fn parse_address(text: &str) -> Result<(IpAddr, u8), String> {
    let (address, prefix) = text.split_once('/').ok_or("write ADDRESS/PREFIX, such as 10.0.0.2/24")?;
    let address: IpAddr = address.parse().map_err(|error| format!("{error}"))?;
    let longest = if address.is_ipv4() { 32 } else { 128 };
    match prefix.parse() {
        Ok(prefix) if prefix <= longest => Ok((address, prefix)),
        _ => Err(format!("the prefix length is a number from 0 to {longest}")),
    }
}

/// Gives the interface what was asked for, and sets it up.
pub fn set_up(
    name: &str,
    mac: Option<Mac>,
    mtu: Option<u16>,
    addresses: &[(IpAddr, u8)],
) -> Result<(), InterfaceError> {
    netif::quiet_ipv6(name);
    if let Some(mac) = mac {
        netif::set_mac(name, mac.0)?;
    }
    if let Some(mtu) = mtu {
        netif::set_mtu(name, mtu.into())?;
    }
    for &(address, prefix) in addresses {
        netif::add_address(name, address, prefix)?;
    }
    netif::set_up(name, true)
}

/// The offloads that the kernel may leave unfinished: those that the back end finishes.
pub fn offloads(host: vnet::Offloads) -> Offloads {
    let pairs = [
        (vnet::Offloads::CSUM, Offloads::CSUM),
        (vnet::Offloads::TSO4, Offloads::TSO4),
        (vnet::Offloads::TSO6, Offloads::TSO6),
        (vnet::Offloads::ECN, Offloads::ECN),
        (vnet::Offloads::USO, Offloads::USO4 | Offloads::USO6),
    ];
    pairs.into_iter().filter(|(offload, _)| host.contains(*offload)).map(|(_, tap)| tap).collect()
}

/// Returns what may go to the kernel of the virtual header that a back end wrote for a frame of `len` bytes, if it keeps to what was
/// `agreed`; `None` if it does not, and the packet must be dropped.
///
/// The kernel believes a header: it would finish checksums and cut segments wherever it says. Without an offload a back end
/// must not ask for it, and a claim that a checksum is valid, which only makes the kernel trust a frame, is not passed on.
pub fn header_from_back_end(
    header: &vnet::Header,
    len: usize,
    agreed: vnet::Offloads,
) -> Option<vnet::Header> {
    let mut header = header.sanitised_from_device();
    if !agreed.contains(vnet::Offloads::CSUM) {
        header.flags &= !vnet::F_DATA_VALID;
    }
    // What the frame itself says of its protocols is to be compared with the header here, too.
    (agreed.accepts(&header) && header.check(len).is_ok()).then_some(header)
}

/// Hands a packet to the kernel; false when it does not take it.
pub fn write(tap: &Tap, packet: &Chain) -> bool {
    let header = packet.header.to_bytes();
    let mut slices = ArrayVec::<ReadSlice<'_>, PIECES>::new();
    slices.push(ReadSlice::from(&header[..]));
    slices.extend(packet.pieces().take(PIECES - 1));
    packet.bufs().len() < PIECES && tap.writev(&slices).is_ok()
}

#[cfg(test)]
mod tests {
    use ringferry_virtio_net::Features;

    use super::*;

    #[test]
    fn addresses_need_a_prefix_that_fits() {
        assert_eq!(parse_address("10.0.0.2/24").unwrap(), ("10.0.0.2".parse().unwrap(), 24));
        assert_eq!(parse_address("fd00::1/64").unwrap().1, 64);
        for text in ["10.0.0.2", "10.0.0.2/33", "fd00::1/129", "x/8", "10.0.0.2/"] {
            assert!(parse_address(text).is_err(), "{text}");
        }
    }

    #[test]
    fn d5_a_back_end_may_ask_the_kernel_only_for_what_was_agreed() {
        use vnet::{
            F_DATA_VALID, F_NEEDS_CSUM, GSO_ECN, GSO_NONE, GSO_TCPV4, GSO_TCPV6, GSO_UDP, GSO_UDP_L4, Header,
        };
        let header = |flags, gso_type| Header {
            flags,
            gso_type,
            hdr_len: if gso_type == GSO_NONE { 0 } else { 54 },
            gso_size: if gso_type == GSO_NONE { 0 } else { 1000 },
            csum_start: if flags & F_NEEDS_CSUM == 0 { 0 } else { 34 },
            csum_offset: if flags & F_NEEDS_CSUM == 0 { 0 } else { 16 },
            num_buffers: 0,
        };
        let (none, csum) = (vnet::Offloads::empty(), vnet::Offloads::CSUM);
        let (tcp4, all) = (csum | vnet::Offloads::TSO4, Features::DEVICE.guest_offloads());
        let passes = |agreed, flags, gso| header_from_back_end(&header(flags, gso), 3000, agreed).is_some();
        for (needed, flags, gso) in [
            (csum, F_NEEDS_CSUM, GSO_NONE),
            (tcp4, F_NEEDS_CSUM, GSO_TCPV4),
            (tcp4 | vnet::Offloads::ECN, F_NEEDS_CSUM, GSO_TCPV4 | GSO_ECN),
            (csum | vnet::Offloads::TSO6, F_NEEDS_CSUM, GSO_TCPV6),
            (csum | vnet::Offloads::USO, F_NEEDS_CSUM, GSO_UDP_L4),
        ] {
            assert!(passes(all, flags, gso) && passes(needed, flags, gso), "{gso}");
            for lacking in needed.iter() {
                assert!(!passes(needed - lacking, flags, gso), "{gso} without {lacking:?}");
            }
            assert!(!passes(none, flags, gso), "{gso}");
        }
        // Fragmentation is never agreed on, nor is what has no meaning, or has none for this frame.
        for (flags, gso) in [(F_NEEDS_CSUM, GSO_UDP), (F_NEEDS_CSUM, 9), (0, GSO_TCPV4), (0, GSO_ECN)] {
            assert!(!passes(all, flags, gso), "{gso}");
        }
        assert!(header_from_back_end(&header(F_NEEDS_CSUM, GSO_NONE), 40, all).is_none(), "beyond the frame");
        let valid = header(F_DATA_VALID, GSO_NONE);
        assert_eq!(header_from_back_end(&valid, 100, all), Some(valid));
        assert_eq!(header_from_back_end(&valid, 100, none), Some(Header::NONE));
    }

    #[test]
    fn the_kernel_leaves_unfinished_only_what_the_back_end_finishes() {
        assert_eq!(offloads(vnet::Offloads::empty()), Offloads::empty());
        assert_eq!(offloads(Features::DEVICE.host_offloads()), Offloads::all());
    }
}
