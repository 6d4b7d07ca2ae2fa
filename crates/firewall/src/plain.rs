//! The short way to the flow of a plain packet, as most are: TCP or UDP over IPv4 without options or over IPv6 without extension headers, whole and without a
//! tag, whose addresses and ports lie at fixed places.
//!
//! It says nothing that [`View::subject`] would say otherwise, which a property test holds equal; whatever is not plain goes that way.

use ringferry_packet::ether::{MIN_FRAME, TYPE_IPV4, TYPE_IPV6};
use ringferry_packet::parse::{PROTO_TCP, PROTO_UDP};
use ringferry_packet::vnet::Header;

use crate::flows::{Key, Kind, tail};
use crate::headers::{TCP_FLAGS, View};

/// Ends of the ports in a plain packet.
const PORTS_END_V4: usize = MIN_FRAME + 20 + 4;
const PORTS_END_V6: usize = MIN_FRAME + 40 + 4;

/// A header in which nothing is told of fragments but that they are not allowed.
const FRAGMENT_BITS: u16 = 0x3fff;

impl View<'_> {
    /// Returns the key of the packet's flow and its TCP flags, if it is plain. `out` says that the guest has sent it.
    #[inline(always)]
    pub(crate) fn plain(&self, out: bool) -> Option<(Key, Option<u8>)> {
        let head: &[u8; PORTS_END_V6] = self.bytes.first_chunk()?;
        let be16 = |at: usize| u16::from_be_bytes([head[at], head[at + 1]]);
        let (key, end, l4, length) = match be16(12) {
            TYPE_IPV4 if head[14] == 0x45 && be16(20) & FRAGMENT_BITS == 0 => {
                let address = |at: usize| {
                    u64::from(u32::from_be_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]))
                };
                let (from, to, ports) = (address(26), address(30), [be16(34), be16(36)]);
                let words = if out { [from, 0, to, 0] } else { [to, 0, from, 0] };
                (key(words, true, head[23], ports, out)?, PORTS_END_V4, MIN_FRAME + 20, be16(16))
            }
            TYPE_IPV6 if head[14] >> 4 == 6 => {
                let word = |at: usize| u64::from_be_bytes(std::array::from_fn(|byte| head[at + byte]));
                let (from, to) = ([word(30), word(22)], [word(46), word(38)]);
                let [local, remote] = if out { [from, to] } else { [to, from] };
                let words = [local[0], local[1], remote[0], remote[1]];
                let ports = [be16(54), be16(56)];
                (
                    key(words, false, head[20], ports, out)?,
                    PORTS_END_V6,
                    MIN_FRAME + 40,
                    be16(18).checked_add(40)?,
                )
            }
            _ => return None,
        };
        let Header { csum_start, csum_offset, .. } = self.header;
        let is_touched =
            self.header.needs_csum() && usize::from(*csum_start) + usize::from(*csum_offset) < end;
        let ends = MIN_FRAME + usize::from(length);
        let is_whole = self.header.is_gso() || end <= ends && ends <= self.len;
        if is_touched || !is_whole {
            return None;
        }
        let flags_at = l4 + TCP_FLAGS;
        let is_tcp = (key.protocol() == PROTO_TCP) && (self.header.is_gso() || flags_at < ends);
        let flags = if is_tcp && flags_at < self.len { self.byte(flags_at) } else { None };
        Some((key, flags))
    }
}

/// Makes the key of a flow of TCP or UDP.
#[inline(always)]
fn key([a, b, c, d]: [u64; 4], is_v4: bool, protocol: u8, [from, to]: [u16; 2], out: bool) -> Option<Key> {
    if !matches!(protocol, PROTO_TCP | PROTO_UDP) {
        return None;
    }
    let (local, remote) = if out { (from, to) } else { (to, from) };
    let ports = u32::from(local) << 16 | u32::from(remote);
    Some(Key::from_words([a, b, c, d, tail(Kind::Flow, is_v4, protocol, 0, ports)]))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use ringferry_packet::testing::Packet;
    use ringferry_packet::vnet::F_NEEDS_CSUM;

    use super::*;
    use crate::headers::{Part, Subject};

    proptest! {
        #[test]
        fn a_plain_packet_has_the_flow_that_the_long_way_finds(
            packet in Packet::any(60), out: bool, have in 40..128usize, cut in 0..40usize,
            csum in proptest::option::of((0..80u16, 0..20u16)), change in proptest::option::of((12..60usize, any::<u8>())),
        ) {
            let mut frame = packet.partial();
            if let Some((at, value)) = change && let Some(byte) = frame.get_mut(at) {
                *byte = value;
            }
            frame.truncate(frame.len().saturating_sub(cut.saturating_sub(20)).max(14));
            let header = match csum {
                Some((csum_start, csum_offset)) => Header { flags: F_NEEDS_CSUM, csum_start, csum_offset, ..Header::NONE },
                None => Header::NONE,
            };
            let peek = |at: usize| frame.get(at).copied();
            let bytes = &frame[..frame.len().min(have)];
            let view = View { header: &header, bytes, len: frame.len(), peek: &peek };
            if let Some((key, flags)) = view.plain(out) {
                let Ok((Subject::Packet { ends, part: Part::Whole, flags_at, .. }, 0)) = view.subject() else {
                    return Err(TestCaseError::fail("it is not plain"));
                };
                let ends = if out { ends } else { ends.reversed() };
                prop_assert_eq!(key, Key::flow(&ends, 0));
                prop_assert_eq!(flags, flags_at.and_then(|at| view.byte(at)));
            }
        }

        #[test]
        fn what_most_packets_are_is_plain(v6: bool, tcp: bool, out: bool) {
            let frame = Packet::plain(v6, tcp, vec![0; 20]).partial();
            let view = View { header: &Header::NONE, bytes: &frame, len: frame.len(), peek: &|_| None };
            prop_assert!(view.plain(out).is_some_and(|(_, flags)| flags.is_some() == tcp));
        }
    }
}
