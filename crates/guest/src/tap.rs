//! The tap that plays a guest's interface: what `guest` and `netfront` do alike with theirs. Nothing is owned here.

use std::net::IpAddr;

use arrayvec::ArrayVec;
use ringferry_memory::ReadSlice;
use ringferry_packet::buffer::Chain;
use ringferry_packet::ether::Mac;
use ringferry_packet::vnet::{self, Header, VALIDATED_HEAD};
use ringferry_sys::netif::{self, InterfaceError};
use ringferry_sys::tap::{Offloads, Tap};

/// Most buffers of a packet that go to the kernel: a frame of any length in buffers of an MTU, and some.
const MAX_BUFFERS: usize = 63;

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

/// Why a packet did not get to the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Undelivered {
    /// Its virtual header asks for what was not agreed on, or contradicts the frame.
    BadHeader,
    /// The kernel does not take it.
    NotTaken,
}

/// Hands a packet that a back end wrote to the kernel, if its virtual header keeps to what was `agreed` and to what the frame is.
///
/// The kernel believes a header: it would finish checksums and cut segments wherever it says. Without an offload a back end must not
/// ask for it, and a claim that a checksum is valid, which only makes the kernel trust a frame, is not passed on. The back end may
/// still write to the frame, so the kernel gets the very copy of its headers that was checked.
///
/// # Errors
/// [`Undelivered`]; the packet must be counted.
#[inline]
pub fn deliver(tap: &Tap, packet: &Chain, agreed: vnet::Offloads) -> Result<(), Undelivered> {
    let header = packet.header.sanitised_from_device();
    if header.needs_csum() {
        return deliver_unfinished(tap, header, packet, agreed);
    }
    // Whatever else a header may say does not depend on the frame's protocols.
    let header = header.validated(&[], packet.len(), agreed).map_err(|_| Undelivered::BadHeader)?;
    write(tap, header, &[], packet)
}

#[inline(never)]
fn deliver_unfinished(
    tap: &Tap,
    header: Header,
    packet: &Chain,
    agreed: vnet::Offloads,
) -> Result<(), Undelivered> {
    let mut head = [0; VALIDATED_HEAD];
    let (header, head) = validated(header, packet, agreed, &mut head).ok_or(Undelivered::BadHeader)?;
    write(tap, header, head, packet)
}

/// Copies the first bytes of a frame to `head` and holds its virtual header against them; `None` if it must be dropped.
fn validated<'h>(
    header: Header,
    packet: &Chain,
    agreed: vnet::Offloads,
    head: &'h mut [u8; VALIDATED_HEAD],
) -> Option<(Header, &'h [u8])> {
    let head = packet.prefix(head);
    let header = header.validated(head, packet.len(), agreed).ok()?;
    // The kernel finishes any checksum behind the network header by itself, and the copy does not change: it needs no other software.
    Some((header.sanitised_from_device(), head))
}

fn write(tap: &Tap, header: Header, head: &[u8], packet: &Chain) -> Result<(), Undelivered> {
    let header = header.to_bytes();
    let slices = slices(&header, head, packet).ok_or(Undelivered::NotTaken)?;
    tap.writev(&slices).map(drop).map_err(|_| Undelivered::NotTaken)
}

/// What the kernel is given: the virtual header, `head`, and of the packet what is behind so many bytes. `None` if it is in too many
/// buffers.
fn slices<'a>(
    header: &'a [u8; Header::LEN],
    head: &'a [u8],
    packet: &'a Chain,
) -> Option<ArrayVec<ReadSlice<'a>, { MAX_BUFFERS + 2 }>> {
    if packet.bufs().len() > MAX_BUFFERS {
        return None;
    }
    let mut slices = ArrayVec::new();
    slices.push(ReadSlice::from(&header[..]));
    if head.is_empty() {
        slices.extend(packet.pieces());
        return Some(slices);
    }
    slices.push(ReadSlice::from(head));
    let mut copied = head.len();
    for piece in packet.pieces() {
        let rest = piece.skip(copied);
        copied -= copied.min(piece.len());
        if !rest.is_empty() {
            slices.push(rest);
        }
    }
    Some(slices)
}

#[cfg(test)]
mod tests {
    use ringferry_packet::buffer::Pools;
    use ringferry_packet::testing::{Packet, Sent, chain_of, pools};
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

    /// What the kernel is given of a packet; `None` if it is dropped.
    fn given(packet: &Chain, agreed: vnet::Offloads) -> Option<(Header, Vec<u8>)> {
        let header = packet.header.sanitised_from_device();
        let mut head = [0; VALIDATED_HEAD];
        let (header, head) = validated(header, packet, agreed, &mut head)?;
        let bytes = header.to_bytes();
        let slices = slices(&bytes, head, packet).unwrap();
        assert_eq!(bytes_of(&slices[..1]), bytes);
        Some((header, bytes_of(&slices[1..])))
    }

    fn bytes_of(slices: &[ReadSlice<'_>]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for slice in slices {
            let at = bytes.len();
            bytes.resize(at + slice.len(), 0);
            slice.copy_to(&mut bytes[at..]);
        }
        bytes
    }

    /// What a back end sent, in buffers of these lengths and one for the rest.
    fn received((header, frame): &Sent, lens: &[usize]) -> (Pools, Chain) {
        let mut pools = pools(lens.len() as u32 + 2);
        let rest = frame.len() - lens.iter().sum::<usize>();
        let packet = chain_of(&mut pools, *header, frame, &[lens, &[rest]].concat());
        (pools, packet)
    }

    #[test]
    fn d5_a_back_end_may_ask_the_kernel_only_for_what_was_agreed() {
        use vnet::{F_DATA_VALID, GSO_ECN, GSO_UDP};
        let (csum, ecn) = (vnet::Offloads::CSUM, vnet::Offloads::ECN);
        let all = Features::DEVICE.guest_offloads();
        let passes = |agreed, sent: &Sent| given(&received(sent, &[]).1, agreed).is_some();
        let partial = |v6, tcp| {
            let packet = Packet::plain(v6, tcp, vec![7; 3000]);
            (packet.header(), packet.partial())
        };
        let unsegmented = |v6, tcp| Packet::plain(v6, tcp, vec![7; 3000]).sent(1000);
        let (header, frame) = unsegmented(false, true);
        let congested = (Header { gso_type: header.gso_type | GSO_ECN, ..header }, frame.clone());
        for (needed, sent) in [
            (csum, partial(false, true)),
            (csum, partial(true, false)),
            (csum | vnet::Offloads::TSO4, unsegmented(false, true)),
            (csum | vnet::Offloads::TSO4 | ecn, congested),
            (csum | vnet::Offloads::TSO6, unsegmented(true, true)),
            (csum | vnet::Offloads::USO, unsegmented(false, false)),
        ] {
            assert!(passes(all, &sent) && passes(needed, &sent), "{:?}", sent.0);
            for lacking in needed.iter() {
                assert!(!passes(needed - lacking, &sent), "{:?} without {lacking:?}", sent.0);
            }
        }
        // Fragmentation is never agreed on, nor is what has no meaning.
        for gso_type in [GSO_UDP, 9, GSO_ECN] {
            assert!(!passes(all, &(Header { gso_type, ..header }, frame.clone())), "{gso_type}");
        }
        let valid = (Header { flags: F_DATA_VALID, ..Header::NONE }, frame.clone());
        assert_eq!(given(&received(&valid, &[]).1, all).unwrap().0, valid.0);
        assert_eq!(given(&received(&valid, &[]).1, vnet::Offloads::empty()).unwrap().0, Header::NONE);
        assert!(!passes(all, &(Header::NONE, vec![0; 13])), "no Ethernet header");
    }

    #[test]
    fn d5_the_header_of_a_back_end_agrees_with_its_frame() {
        let all = Features::DEVICE.guest_offloads();
        let (header, frame) = Packet::plain(false, true, vec![7; 3000]).sent(1000);
        let header = Header { hdr_len: 54, ..header };
        let passes =
            |header| given(&received(&(header, frame.clone()), &[]).1, all).map(|(header, _)| header);
        assert_eq!(passes(header), Some(header));
        // The kernel computes from it where the payload begins.
        assert_eq!(passes(Header { hdr_len: 0, ..header }), Some(header));
        assert_eq!(passes(Header { gso_type: vnet::GSO_TCPV6, ..header }), None, "IPv4");
        assert_eq!(passes(Header { csum_start: 14, csum_offset: 12, ..header }), None, "addresses");
        assert_eq!(passes(Header { csum_offset: 6, ..header }), None, "not that of TCP");
        assert_eq!(passes(Header { gso_size: 1, ..header }), None, "too many segments");
        assert_eq!(passes(Header { gso_size: 3000, ..header }).map(|header| header.gso_type), Some(0));
        // The kernel alone finishes the checksum of a packet within the packet.
        let inner =
            Header { csum_start: 100, csum_offset: 6, gso_type: 0, gso_size: 0, hdr_len: 0, ..header };
        assert_eq!(passes(inner), Some(inner));
        assert_eq!(passes(Header { csum_start: 3100, ..inner }), None, "beyond the frame");
    }

    #[test]
    fn d5_what_was_checked_is_what_the_kernel_gets() {
        let sent = Packet::plain(true, true, vec![7; 3000]).sent(1000);
        let bytes = sent.0.to_bytes();
        for lens in [&[][..], &[1, 13], &[100, 156], &[100, 157], &[400]] {
            let (_pools, packet) = received(&sent, lens);
            // The back end has written to the frame since its head was copied.
            for head in [&[9; 64][..], &[9; VALIDATED_HEAD]] {
                let slices = slices(&bytes, head, &packet).unwrap();
                assert_eq!(bytes_of(&slices[1..]), [head, &sent.1[head.len()..]].concat(), "{lens:?}");
            }
        }
    }

    #[test]
    fn packets_in_too_many_buffers_are_not_written() {
        let (header, frame) = (Header::NONE, vec![1; 200]);
        let in_buffers = |count: usize| received(&(header, frame.clone()), &vec![1; count - 1]);
        let (bytes, head) = (header.to_bytes(), &frame[..20]);
        for head in [&[][..], head] {
            assert!(slices(&bytes, head, &in_buffers(MAX_BUFFERS).1).is_some());
            assert!(slices(&bytes, head, &in_buffers(MAX_BUFFERS + 1).1).is_none());
        }
    }

    #[test]
    fn the_kernel_leaves_unfinished_only_what_the_back_end_finishes() {
        assert_eq!(offloads(vnet::Offloads::empty()), Offloads::empty());
        assert_eq!(offloads(Features::DEVICE.host_offloads()), Offloads::all());
    }
}
