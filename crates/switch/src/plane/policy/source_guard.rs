//! The source guard (anti-spoofing): a frame may name only its port's own Ethernet and IP addresses as its sender, in Ethernet, ARP,
//! IPv4, IPv6 and neighbour discovery.
//!
//! The rules are those of OVN's port security and libvirt's `clean-traffic`, with the gaps closed that such filters had:
//!
//! - **Nothing passes unchecked.** A header that lies too deep to be read (three VLAN tags, neighbour discovery behind more than
//!   [`HEAD`] bytes of headers, IP in LLC/SNAP) is refused, and so is neighbour discovery in fragments, which hosts should
//!   ignore (RFC 6980) but may not (as RFC 7113 has it for router advertisements).
//! - **Nothing changes after the check.** A burst has a private copy of the first 64 bytes of a frame. A verdict that rests
//!   on later ones says so ([`Judgement::FineIfStable`]). A checksum that is still to be filled in is two bytes that the
//!   sender chose: it must not lie in bytes that were checked.
//! - **Nothing speaks for the network.** A guarded port is a host's: router advertisements and redirects (RFC 4861) from it are
//!   refused, as RA guard does (RFC 6105). So is the home address option (RFC 6275, 6.3), which replaces the source address that was
//!   checked by another one.
//! - **Nothing behind the end of a packet counts.** The padding behind an IPv6 packet is not read, or the padding
//!   of a first fragment could pass for the header that really comes with the second one.
//!
//! An address that is allowed is allowed with every MAC address of the port. Addresses inside tunnels are not checked.

use std::net::IpAddr;

use ringferry_packet::ether::{
    Link, Mac, TYPE_ARP, TYPE_IPV4, TYPE_IPV6, TYPE_RARP, TYPE_SERVICE_VLAN, TYPE_VLAN,
};
use ringferry_packet::extension::{Cut, DESTINATION_OPTIONS, Extension, FRAGMENT};
use ringferry_packet::frame::{Burst, Frame, PREFIX};
use ringferry_packet::parse::PROTO_UDP;
use ringferry_packet::vnet::Header;

use super::vlan::TAG_TYPES;
use crate::rules;

/// Upper bound on the bytes of a frame that are examined. Neighbour discovery takes about 90, a nonce and a
/// tag included; it needs more than 200 only with SEND (RFC 3971), which nobody has.
const HEAD: usize = 256;

/// Below this, an EtherType is a length (IEEE 802.3, 3.2.6).
const MIN_ETHER_TYPE: u16 = 0x0600;

const ICMPV6: u8 = 58;
const IPV4_LEN: usize = 20;
const IPV6_LEN: usize = 40;
const ARP_LEN: usize = 28;
/// ARP operation code of a request.
const REQUEST: u16 = 1;

/// Types of ICMPv6 messages that are for finding listeners (RFC 2710, RFC 3810) and neighbours (RFC 4861).
const LISTENER_REPORT: u8 = 131;
const LISTENER_DONE: u8 = 132;
const ROUTER_SOLICITATION: u8 = 133;
const NEIGHBOUR_SOLICITATION: u8 = 135;
const NEIGHBOUR_ADVERTISEMENT: u8 = 136;
const REDIRECT: u8 = 137;
const LISTENER_REPORT_2: u8 = 143;

/// Options of a destination options header (RFC 8200, 4.2; RFC 6275, 6.3).
const PAD_1: u8 = 0;
const HOME_ADDRESS: u8 = 0xc9;

/// Options of neighbour discovery that name a link-layer address: of the source, of the target.
const LINK_LAYER: [u8; 2] = [1, 2];

/// The prefix of link-local addresses, fe80::/64.
const LINK_LOCAL: u128 = 0xfe80 << 112;

/// The addresses that a port may send from, prepared for look-ups.
#[derive(Debug)]
pub(crate) struct SourceGuard {
    /// Sorted, for binary search.
    macs: Box<[Mac]>,
    ips: Option<Ips>,
}

#[derive(Debug)]
struct Ips {
    /// None is allowed: no IP at all, nor what a host without an address may send.
    none: bool,
    v4: Ranges<u32>,
    v6: Ranges<u128>,
}

/// The verdict of [`SourceGuard::judge`] on a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Judgement {
    /// The frame may pass as it lies.
    Fine,
    /// The frame may pass if nobody can change it any more: bytes beyond the burst's private copy were
    /// examined.
    FineIfStable,
    /// The frame must be dropped.
    Spoofed,
}

impl SourceGuard {
    pub(crate) fn new(guard: &rules::Guard) -> Self {
        let mut macs = guard.macs.clone();
        macs.sort_unstable();
        let ips = guard.ips.as_ref().map(|networks| {
            let local = |mac: &Mac| (link_local(*mac), link_local(*mac));
            let v4 = networks.iter().filter_map(|network| match network.address {
                IpAddr::V4(address) => Some(range(address.to_bits().into(), 32, network.bits)),
                IpAddr::V6(_) => None,
            });
            let v6 = networks.iter().filter_map(|network| match network.address {
                IpAddr::V4(_) => None,
                IpAddr::V6(address) => Some(range(address.to_bits(), 128, network.bits)),
            });
            Ips {
                none: networks.is_empty(),
                v4: v4.map(|(first, last)| (first as u32, last as u32)).collect(),
                v6: v6.chain(macs.iter().map(local)).collect(),
            }
        });
        Self { macs: macs.into(), ips }
    }

    /// Judges a frame of `burst`.
    #[inline]
    pub(crate) fn judge(&self, burst: &Burst<'_>, frame: &Frame) -> Judgement {
        let prefix = frame.prefix();
        let view = View { header: &frame.header, bytes: prefix, len: frame.len as usize };
        match self.allows(view) {
            Ok(()) => Judgement::Fine,
            Err(Doubt::Beyond) if frame.len as usize > PREFIX => self.judge_more(burst, frame),
            Err(_) => Judgement::Spoofed,
        }
    }

    /// Judges a frame as [`judge`](Self::judge) does, and also reads the bytes that the burst has no copy of.
    #[cold]
    fn judge_more(&self, burst: &Burst<'_>, frame: &Frame) -> Judgement {
        let mut head = [0; HEAD];
        let mut have = frame.prefix().len();
        head[..have].copy_from_slice(frame.prefix());
        for piece in burst.rest(frame) {
            have += piece.copy_to(&mut head[have..]);
        }
        let view = View { header: &frame.header, bytes: &head[..have], len: frame.len as usize };
        match self.allows(view) {
            Ok(()) => Judgement::FineIfStable,
            Err(_) => Judgement::Spoofed,
        }
    }

    #[inline]
    fn allows(&self, frame: View<'_>) -> Result<(), Doubt> {
        self.owns(frame.mac(6)?)?;
        let Link { ether_type, l3, .. } = Link::parse(frame.bytes).ok_or(Doubt::Beyond)?;
        frame.checksum_from(l3)?;
        match ether_type {
            TYPE_IPV4 => self.ipv4(frame, l3),
            TYPE_IPV6 => self.ipv6(frame, l3),
            TYPE_ARP | TYPE_RARP => self.arp(frame, l3, ether_type),
            // A further tag, as no more than two are skipped, or one of those from before 802.1ad, by which the next hop may go.
            tag if TAG_TYPES.contains(&tag) => Err(Doubt::Spoofed),
            ..MIN_ETHER_TYPE => snap(frame, l3),
            _ => Ok(()),
        }
    }

    fn ipv4(&self, frame: View<'_>, l3: usize) -> Result<(), Doubt> {
        let Some(ips) = &self.ips else { return Ok(()) };
        expect(!ips.none)?;
        let first = frame.byte(l3)?;
        let len = usize::from(first & 0x0f) * 4;
        expect(first >> 4 == 4 && len >= IPV4_LEN)?;
        let l4 = l3 + len;
        frame.checksum_from(l4)?;
        let source = u32::from_be_bytes(frame.array(l3 + 12)?);
        if ips.v4.contains(source) {
            return Ok(());
        }
        // A host without an address may ask a DHCP server for one, by broadcast (RFC 2131, 4.1).
        expect(frame.array(l3 + 16)? == [0xff; 4])?;
        let fragment = frame.be16(l3 + 6)? & 0x3fff != 0;
        expect(source == 0 && frame.byte(l3 + 9)? == PROTO_UDP && !fragment)?;
        expect(frame.array(l4)? == [0, 68, 0, 67])?;
        frame.checksum_from(l4 + 4)
    }

    /// ARP (RFC 826) and its reverse (RFC 903).
    fn arp(&self, frame: View<'_>, l3: usize, ether_type: u16) -> Result<(), Doubt> {
        frame.checksum_from(l3 + ARP_LEN)?;
        // Only ARP for IPv4 over Ethernet is allowed.
        expect(frame.array(l3)? == [0, 1, 8, 0, 6, 4])?;
        self.owns(frame.mac(l3 + 8)?)?;
        let Some(ips) = &self.ips else { return Ok(()) };
        // An announcement of the station alone (RARP) says nothing of IP.
        expect(!ips.none || ether_type == TYPE_RARP)?;
        let sender = u32::from_be_bytes(frame.array(l3 + 14)?);
        let target = u32::from_be_bytes(frame.array(l3 + 24)?);
        let anonymous = match ether_type {
            TYPE_RARP => true,
            // A probe (RFC 5227, 2.1.1) claims its target: a host that has that address would give it up.
            _ => frame.be16(l3 + 6)? == REQUEST && ips.v4.contains(target),
        };
        expect(ips.v4.contains(sender) || sender == 0 && anonymous)
    }

    fn ipv6(&self, frame: View<'_>, l3: usize) -> Result<(), Doubt> {
        expect(frame.byte(l3)? >> 4 == 6 && self.ips.as_ref().is_none_or(|ips| !ips.none))?;
        let source = u128::from_be_bytes(frame.array(l3 + 8)?);
        let own = self.ips.as_ref().is_none_or(|ips| ips.v6.contains(source));
        expect(own || source == 0)?;
        // If the packet is still to be segmented, the length in its header means nothing; such a packet is
        // TCP or UDP.
        let end = match frame.header.is_gso() {
            true => frame.len,
            false => l3 + IPV6_LEN + usize::from(frame.be16(l3 + 4)?),
        };
        let whole = end <= frame.len;
        let frame = frame.until(end);
        let Transport { proto, at, fragmented } = Transport::find(frame, l3, self.ips.is_some())?;
        frame.checksum_from(at)?;
        if proto != Some(ICMPV6) {
            return expect(own);
        }
        // A checksum that is filled in later must not overwrite the type.
        frame.checksum_from(at + 2)?;
        let kind = frame.byte(at)?;
        if own && !(ROUTER_SOLICITATION..=REDIRECT).contains(&kind) {
            return Ok(());
        }
        // A host without an address may send these messages, within the link.
        let link_scope = frame.array(l3 + 24)? == [0xff, 0x02];
        expect(own || link_scope && !fragmented)?;
        let fixed = match kind {
            LISTENER_REPORT | LISTENER_DONE | LISTENER_REPORT_2 => return Ok(()),
            ROUTER_SOLICITATION => 8,
            NEIGHBOUR_SOLICITATION => 24,
            NEIGHBOUR_ADVERTISEMENT if own => 24,
            // Messages that only routers send are refused, too.
            _ => return Err(Doubt::Spoofed),
        };
        expect(whole && !fragmented && !frame.header.needs_csum())?;
        // An advertisement claims an address, and so does a duplicate address detection (RFC 4862, 5.4).
        let claimed = kind == NEIGHBOUR_ADVERTISEMENT || kind == NEIGHBOUR_SOLICITATION && source == 0;
        if let Some(ips) = self.ips.as_ref().filter(|_| claimed) {
            expect(ips.v6.contains(u128::from_be_bytes(frame.array(at + 8)?)))?;
        }
        self.options(frame, at + fixed, own)
    }

    /// Checks the link-layer addresses among the options of a message of neighbour discovery (RFC 4861, 4.6).
    fn options(&self, frame: View<'_>, mut at: usize, may_name: bool) -> Result<(), Doubt> {
        let end = frame.len;
        expect(at <= end)?;
        while at < end {
            let [kind, units] = frame.array(at)?;
            let next = at + usize::from(units) * 8;
            expect(units > 0 && next <= end)?;
            if LINK_LAYER.contains(&kind) {
                expect(may_name && units == 1)?;
                self.owns(frame.mac(at + 2)?)?;
            }
            at = next;
        }
        Ok(())
    }

    #[inline]
    fn owns(&self, mac: Mac) -> Result<(), Doubt> {
        // Most ports have one address, so that case avoids a search.
        expect(match &*self.macs {
            [own] => *own == mac,
            several => several.binary_search(&mac).is_ok(),
        })
    }
}

/// Refuses IP behind a SNAP header (RFC 1042): some hosts read it, and nobody needs it.
fn snap(frame: View<'_>, l3: usize) -> Result<(), Doubt> {
    frame.checksum_from(l3 + 8)?;
    let Ok([0xaa, 0xaa, .., high, low]) = frame.array::<8>(l3) else { return Ok(()) };
    let refused = [TYPE_IPV4, TYPE_IPV6, TYPE_ARP, TYPE_RARP, TYPE_VLAN, TYPE_SERVICE_VLAN];
    expect(!refused.contains(&u16::from_be_bytes([high, low])))
}

/// The transport header of an IPv6 packet, behind its extension headers.
struct Transport {
    /// The protocol; `None` in a later fragment, as only the first one tells it.
    proto: Option<u8>,
    at: usize,
    /// True if the packet has a fragment header.
    fragmented: bool,
}

impl Transport {
    /// Walks the extension headers to the transport header. `by_source` says that the packet's source address
    /// was checked, so nothing may replace it.
    fn find(frame: View<'_>, l3: usize, by_source: bool) -> Result<Self, Doubt> {
        let (mut proto, mut at, mut fragmented) = (frame.byte(l3 + 6)?, l3 + IPV6_LEN, false);
        // Each iteration advances by at least eight bytes, and the view has at most `HEAD`.
        loop {
            let Some(found) = Extension::read(proto, frame.bytes, at) else {
                return Ok(Self { proto: Some(proto), at, fragmented });
            };
            let Extension { next, len, .. } = found.map_err(|Cut| Doubt::Beyond)?;
            if proto == DESTINATION_OPTIONS && by_source {
                no_home_address(frame, at + 2, at + len)?;
            }
            if proto == FRAGMENT {
                fragmented = true;
                if frame.be16(at + 2)? & 0xfff8 != 0 {
                    return Ok(Self { proto: None, at: at + 8, fragmented });
                }
            }
            (proto, at) = (next, at + len);
        }
    }
}

/// Checks that the options of a header, from `at` to `end`, name no home address.
fn no_home_address(frame: View<'_>, mut at: usize, end: usize) -> Result<(), Doubt> {
    while at < end {
        at += match frame.byte(at)? {
            PAD_1 => 1,
            HOME_ADDRESS => return Err(Doubt::Spoofed),
            _ => 2 + usize::from(frame.byte(at + 1)?),
        };
    }
    expect(at == end)
}

/// The reason why a check fails.
enum Doubt {
    Spoofed,
    /// Undecided: the bytes to examine are not in the view.
    Beyond,
}

#[inline]
fn expect(true_of_own: bool) -> Result<(), Doubt> {
    if true_of_own { Ok(()) } else { Err(Doubt::Spoofed) }
}

/// A view of the first bytes of a frame.
#[derive(Clone, Copy)]
struct View<'f> {
    header: &'f Header,
    bytes: &'f [u8],
    /// Length of the whole frame in bytes.
    len: usize,
}

impl View<'_> {
    /// Returns the view without the bytes from `end` on.
    fn until(self, end: usize) -> Self {
        Self { bytes: &self.bytes[..self.bytes.len().min(end)], len: self.len.min(end), ..self }
    }

    #[inline]
    fn array<const N: usize>(&self, at: usize) -> Result<[u8; N], Doubt> {
        self.bytes.get(at..).and_then(|bytes| bytes.first_chunk().copied()).ok_or(Doubt::Beyond)
    }

    #[inline]
    fn byte(&self, at: usize) -> Result<u8, Doubt> {
        self.bytes.get(at).copied().ok_or(Doubt::Beyond)
    }

    #[inline]
    fn be16(&self, at: usize) -> Result<u16, Doubt> {
        self.array(at).map(u16::from_be_bytes)
    }

    #[inline]
    fn mac(&self, at: usize) -> Result<Mac, Doubt> {
        self.array(at).map(Mac)
    }

    /// Fails if a checksum that is still to be filled in lies in front of `at`.
    #[inline]
    fn checksum_from(&self, at: usize) -> Result<(), Doubt> {
        let Header { csum_start, csum_offset, .. } = self.header;
        expect(!self.header.needs_csum() || usize::from(*csum_start) + usize::from(*csum_offset) >= at)
    }
}

/// Returns the link-local address that a host makes of its MAC address (RFC 4291, appendix A).
fn link_local(Mac([a, b, c, d, e, f]): Mac) -> u128 {
    LINK_LOCAL | u128::from(u64::from_be_bytes([a ^ 2, b, c, 0xff, 0xfe, d, e, f]))
}

/// First and last address of a network, of addresses of `width` bits.
fn range(address: u128, width: u32, bits: u8) -> (u128, u128) {
    let host = width.saturating_sub(bits.into());
    let rest = 1_u128.checked_shl(host).map_or(u128::MAX, |size| size - 1);
    (address & !rest, address | rest)
}

/// A set of addresses as ranges, sorted and apart, so that one of many is found as fast as one of few.
#[derive(Debug)]
struct Ranges<T>(Box<[(T, T)]>);

impl<T: Ord + Copy> Ranges<T> {
    #[inline]
    fn contains(&self, address: T) -> bool {
        let after = self.0.partition_point(|(first, _)| *first <= address);
        after.checked_sub(1).is_some_and(|at| address <= self.0[at].1)
    }
}

impl<T: Ord + Copy> FromIterator<(T, T)> for Ranges<T> {
    fn from_iter<I: IntoIterator<Item = (T, T)>>(ranges: I) -> Self {
        let mut sorted: Vec<(T, T)> = ranges.into_iter().collect();
        sorted.sort_unstable();
        let mut apart: Vec<(T, T)> = Vec::with_capacity(sorted.len());
        for (first, last) in sorted {
            match apart.last_mut() {
                Some(before) if first <= before.1 => before.1 = before.1.max(last),
                _ => apart.push((first, last)),
            }
        }
        Self(apart.into())
    }
}

#[cfg(test)]
mod tests;
