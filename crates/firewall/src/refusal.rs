//! What a guest is told that asks for a name of no rule: that the server refuses it (RFC 1035, 4.1.1), so that it does not wait for an answer.

use std::net::IpAddr;

use ringferry_packet::checksum::{Sum, pseudo_header_v4, pseudo_header_v6};
use ringferry_packet::ether::Link;
use ringferry_packet::parse::PROTO_UDP;

use crate::dns::{self, Message};
use crate::headers::{Ends, Part, Subject, View};

/// Length of a UDP header, and of an Ethernet address.
const UDP_LEN: u16 = 8;
const MAC_LEN: usize = 6;

/// Hops of a packet that is made here.
const HOPS: u8 = 64;

impl View<'_> {
    /// Returns the frame by which the server would refuse the question in this one; `None` if there is none in it, or it cannot be read.
    pub(crate) fn refusal(&self, resolvers: &[IpAddr]) -> Option<Vec<u8>> {
        let (Subject::Packet { ends, part: Part::Whole, l4, end, .. }, _) = self.subject().ok()? else {
            return None;
        };
        if (ends.protocol, ends.ports[1]) != (PROTO_UDP, dns::PORT) || !resolvers.contains(&ends.destination)
        {
            return None;
        }
        let message = self.datagram(l4, end).ok()?;
        let Some(Message::Query(_)) = Message::read(message) else { return None };
        let payload = dns::refused(message)?;
        let l3 = Link::parse(self.bytes)?.l3;
        let link = self.bytes.get(..l3)?;
        let (to, rest) = link.split_at_checked(MAC_LEN)?;
        let (from, types) = rest.split_at_checked(MAC_LEN)?;
        Some([from, to, types, &packet(ends.reversed(), &payload)?].concat())
    }
}

/// Makes a packet of UDP with these ends.
fn packet(ends: Ends, payload: &[u8]) -> Option<Vec<u8>> {
    let len = UDP_LEN.checked_add(u16::try_from(payload.len()).ok()?)?;
    let [from, to] = ends.ports.map(u16::to_be_bytes);
    let mut udp = [&from[..], &to, &len.to_be_bytes(), &[0, 0], payload].concat();
    let (head, mut sum) = match (ends.source, ends.destination) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            let (source, destination) = (source.octets(), destination.octets());
            let total = len.checked_add(20)?.to_be_bytes();
            let mut head = [0x45, 0, total[0], total[1], 0, 0, 0x40, 0, HOPS, PROTO_UDP, 0, 0].to_vec();
            head.extend([source, destination].concat());
            let mut sum = Sum::new();
            sum.add(&head);
            head[10..12].copy_from_slice(&sum.finish().to_be_bytes());
            (head, pseudo_header_v4(source, destination, PROTO_UDP, len))
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            let (source, destination) = (source.octets(), destination.octets());
            let [high, low] = len.to_be_bytes();
            let mut head = vec![0x60, 0, 0, 0, high, low, PROTO_UDP, HOPS];
            head.extend([source, destination].concat());
            (head, pseudo_header_v6(source, destination, PROTO_UDP, len.into()))
        }
        _ => return None,
    };
    sum.add(&udp);
    // Zero means that there is none (RFC 768).
    let checksum = Some(sum.finish()).filter(|sum| *sum != 0).unwrap_or(0xffff);
    udp[6..8].copy_from_slice(&checksum.to_be_bytes());
    Some([head, udp].concat())
}

#[cfg(test)]
mod tests {
    use ringferry_packet::checksum::verify;
    use ringferry_packet::testing::Packet;
    use ringferry_packet::vnet::Header;

    use super::*;

    fn refusal(header: &Header, frame: &[u8], resolvers: &[IpAddr]) -> Option<Vec<u8>> {
        View { header, bytes: frame, len: frame.len(), peek: &|_| None }.refusal(resolvers)
    }

    #[test]
    fn a_question_is_refused_in_the_servers_name() {
        let question = b"\x07\x09\x01\x20\0\x01\0\0\0\0\0\x01\x04Evil\x03org\0\0\x01\0\x01";
        // An option of EDNS behind it.
        let message = [&question[..], &[0, 0, 41, 4, 208, 0, 0, 0, 0, 0, 0]].concat();
        for (v6, tags) in [(false, 0), (true, 0), (false, 1), (true, 2)] {
            let mut packet = Packet::plain(v6, false, message.clone());
            (packet.tags, packet.ports) = (tags, [0x13, 0x88, 0, 53]);
            let (header, frame) = packet.complete();
            let view = View { header: &header, bytes: &frame, len: frame.len(), peek: &|_| None };
            let Ok((Subject::Packet { ends, .. }, _)) = view.subject() else { panic!("a packet") };
            let resolvers = [ends.destination];
            let answer = refusal(&header, &frame, &resolvers).unwrap();
            verify(&answer).unwrap();
            assert_eq!((&answer[..6], &answer[6..12]), (&frame[6..12], &frame[..6]));
            assert_eq!(answer[12..packet.l3()], frame[12..packet.l3()], "the same tags");
            let told = &answer[packet.l4()..];
            assert_eq!(told[..4], [0, 53, 0x13, 0x88]);
            assert_eq!(told[8..12], [7, 9, 0x81, 0x85]);
            assert_eq!(told[8 + 4..8 + 12], [0, 1, 0, 0, 0, 0, 0, 0]);
            assert_eq!(told[8 + 12..], question[12..]);
            assert_eq!(refusal(&header, &answer, &resolvers), None, "nobody refuses a refusal");
            assert_eq!(refusal(&header, &frame, &[]), None, "a server that the policy does not know");
        }
        assert_eq!(refusal(&Header::NONE, &[0; 60], &[]), None);
    }
}
