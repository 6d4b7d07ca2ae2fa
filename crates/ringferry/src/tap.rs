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

/// What the kernel may leave unfinished: what the back end finishes.
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
    fn the_kernel_leaves_unfinished_only_what_the_back_end_finishes() {
        assert_eq!(offloads(vnet::Offloads::empty()), Offloads::empty());
        assert_eq!(offloads(Features::DEVICE.host_offloads()), Offloads::all());
    }
}
