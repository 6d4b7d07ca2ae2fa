//! Ethernet: addresses, and the link-layer header at the start of a frame (IEEE 802.3, VLAN tags of 802.1Q and
//! 802.1ad).
//!
//! The functions are pure and keep nothing. They read a *prefix*, the first bytes of a frame already copied out of
//! shared memory, and return `None` if it is too short.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

/// Length in bytes of an untagged Ethernet header, and so of the shortest frame that can be forwarded.
pub const MIN_FRAME: usize = 14;
/// Largest number of VLAN tags that are skipped: a service tag and a customer tag (802.1ad). The network layer of
/// frames with more tags is not parsed.
pub const MAX_VLAN_TAGS: usize = 2;

/// EtherType of IPv4 (RFC 894).
pub const TYPE_IPV4: u16 = 0x0800;
/// EtherType of ARP (RFC 826).
pub const TYPE_ARP: u16 = 0x0806;
/// EtherType of RARP (RFC 903).
pub const TYPE_RARP: u16 = 0x8035;
/// EtherType of IPv6 (RFC 2464).
pub const TYPE_IPV6: u16 = 0x86dd;
/// EtherType of MAC control frames, such as PAUSE (802.3, 31).
pub const TYPE_MAC_CONTROL: u16 = 0x8808;
/// EtherType of a customer VLAN tag (802.1Q).
pub const TYPE_VLAN: u16 = 0x8100;
/// EtherType of a service VLAN tag (802.1ad).
pub const TYPE_SERVICE_VLAN: u16 = 0x88a8;

/// An Ethernet address, formatted and parsed as `52:54:00:12:34:56`.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Mac(pub [u8; 6]);

/// The error of parsing text that is not an Ethernet address.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[error("`{0}` is not an Ethernet address; write six pairs of hexadecimal digits, such as 52:54:00:12:34:56")]
pub struct MacError(String);

impl Mac {
    /// The broadcast address, `ff:ff:ff:ff:ff:ff`.
    pub const BROADCAST: Mac = Mac([0xff; 6]);

    /// Returns true for a group address, broadcast included.
    #[inline]
    #[must_use]
    pub const fn is_multicast(self) -> bool {
        self.0[0] & 1 != 0
    }

    /// Returns true for an address that frames may come from: it is neither a group address nor all zeros.
    #[inline]
    #[must_use]
    pub fn is_station(self) -> bool {
        !self.is_multicast() && self != Mac([0; 6])
    }

    /// Returns true for the addresses 01:80:c2:00:00:00 to 0f, of protocols between neighbours, which no bridge forwards
    /// (IEEE 802.1Q, table 8-1): spanning tree, PAUSE, link aggregation, port authentication, LLDP.
    #[inline]
    #[must_use]
    pub fn is_reserved(self) -> bool {
        let [head @ .., last] = self.0;
        head == [0x01, 0x80, 0xc2, 0, 0] && last < 0x10
    }

    /// Returns true for the broadcast address.
    #[inline]
    #[must_use]
    pub fn is_broadcast(self) -> bool {
        self == Mac::BROADCAST
    }

    /// Makes a locally administered unicast address of the caller's random bytes.
    #[must_use]
    pub const fn random_local(entropy: [u8; 6]) -> Mac {
        let [first, b, c, d, e, f] = entropy;
        Mac([first & !1 | 2, b, c, d, e, f])
    }
}

impl fmt::Display for Mac {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, f] = self.0;
        write!(out, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{f:02x}")
    }
}

impl fmt::Debug for Mac {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, out)
    }
}

impl FromStr for Mac {
    type Err = MacError;

    fn from_str(text: &str) -> Result<Mac, MacError> {
        let refused = || MacError(text.to_owned());
        let mut mac = Mac::default();
        let mut pairs = text.split(':');
        for byte in &mut mac.0 {
            let pair = pairs.next().ok_or_else(refused)?;
            // from_str_radix alone would take "+f" and "f".
            if pair.len() != 2 || !pair.bytes().all(|digit| digit.is_ascii_hexdigit()) {
                return Err(refused());
            }
            *byte = u8::from_str_radix(pair, 16).map_err(|_| refused())?;
        }
        if pairs.next().is_some() { Err(refused()) } else { Ok(mac) }
    }
}

/// Returns the destination address of a frame, or `None` if the prefix is shorter than 6 bytes.
#[inline]
#[must_use]
pub fn destination(prefix: &[u8]) -> Option<Mac> {
    prefix.first_chunk().copied().map(Mac)
}

/// Returns the source address of a frame, or `None` if the prefix is shorter than 12 bytes.
#[inline]
#[must_use]
pub fn source(prefix: &[u8]) -> Option<Mac> {
    prefix.get(6..)?.first_chunk().copied().map(Mac)
}

/// Returns true for a MAC control frame (802.3, 31), whatever its destination: a PAUSE that is sent to a station's own
/// address stops it as well as one to the group of all. Also for one behind a VLAN tag, which may be taken off on the way.
#[inline]
#[must_use]
pub fn is_mac_control(prefix: &[u8]) -> bool {
    match be16(prefix, MIN_FRAME - 2) {
        Some(TYPE_VLAN) => be16(prefix, MIN_FRAME + 2) == Some(TYPE_MAC_CONTROL),
        ether_type => ether_type == Some(TYPE_MAC_CONTROL),
    }
}

/// The link-layer header of a frame, VLAN tags included.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Link {
    /// EtherType (or 802.3 length) behind the VLAN tags. It is a VLAN type if there are more than
    /// [`MAX_VLAN_TAGS`] tags.
    pub ether_type: u16,
    /// Offset of the network layer from the start of the frame.
    pub l3: usize,
    /// VLAN identifier (0 to 4095) of the outermost tag, if there is a tag.
    pub vlan: Option<u16>,
}

impl Link {
    /// Parses the header at the start of a frame. Returns `None` if the prefix ends inside it.
    #[inline]
    #[must_use]
    pub fn parse(prefix: &[u8]) -> Option<Link> {
        let mut link = Link { ether_type: be16(prefix, 12)?, l3: MIN_FRAME, vlan: None };
        for _ in 0..MAX_VLAN_TAGS {
            if !matches!(link.ether_type, TYPE_VLAN | TYPE_SERVICE_VLAN) {
                break;
            }
            let control = be16(prefix, link.l3)?;
            link.vlan = link.vlan.or(Some(control & 0x0fff));
            link.ether_type = be16(prefix, link.l3 + 2)?;
            link.l3 += 4;
        }
        Some(link)
    }
}

/// Makes a frame that announces the new location of a station: a broadcast RARP request of the station for itself,
/// padded to 60 bytes. Switches learn from it and hosts ignore it. A back end sends it for the vhost-user message
/// SEND_RARP, when a guest that cannot announce itself has migrated.
#[must_use]
pub fn rarp_announcement(station: Mac) -> [u8; 60] {
    // Hardware Ethernet, protocol IPv4, their address lengths, operation "request reverse".
    const REQUEST: [u8; 8] = [0, 1, 0x08, 0x00, 6, 4, 0, 3];
    let mut frame = [0; 60];
    frame[..6].copy_from_slice(&Mac::BROADCAST.0);
    frame[6..12].copy_from_slice(&station.0);
    frame[12..14].copy_from_slice(&TYPE_RARP.to_be_bytes());
    frame[14..22].copy_from_slice(&REQUEST);
    // Source and target hardware address; the protocol addresses between and behind stay 0.
    frame[22..28].copy_from_slice(&station.0);
    frame[32..38].copy_from_slice(&station.0);
    frame
}

/// Reads a 16-bit number in network byte order.
#[inline]
pub(crate) fn be16(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..)?.first_chunk().map(|number| u16::from_be_bytes(*number))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::hex;
    use proptest::prelude::*;

    fn tagged(tags: &[u16], ether_type: u16) -> Vec<u8> {
        let mut frame = vec![0x11; 12];
        for tag in tags {
            frame.extend(tag.to_be_bytes());
            frame.extend(0xa07bu16.to_be_bytes());
        }
        frame.extend(ether_type.to_be_bytes());
        frame
    }

    #[test]
    fn addresses_are_at_their_places() {
        let frame: Vec<u8> = (0..14).collect();
        assert_eq!(destination(&frame), Some(Mac([0, 1, 2, 3, 4, 5])));
        assert_eq!(source(&frame), Some(Mac([6, 7, 8, 9, 10, 11])));
        assert_eq!(destination(&frame[..5]), None);
        assert_eq!(source(&frame[..11]), None);
    }

    #[test]
    fn vlan_tags_are_skipped_up_to_the_bound() {
        let untagged = Link { ether_type: TYPE_IPV4, l3: 14, vlan: None };
        assert_eq!(Link::parse(&tagged(&[], TYPE_IPV4)), Some(untagged));
        let one = Link { ether_type: TYPE_IPV6, l3: 18, vlan: Some(0x7b) };
        assert_eq!(Link::parse(&tagged(&[TYPE_VLAN], TYPE_IPV6)), Some(one));
        let two = Link { ether_type: TYPE_ARP, l3: 22, vlan: Some(0x7b) };
        assert_eq!(Link::parse(&tagged(&[TYPE_SERVICE_VLAN, TYPE_VLAN], TYPE_ARP)), Some(two));
        let three = Link { ether_type: TYPE_VLAN, l3: 22, vlan: Some(0x7b) };
        assert_eq!(Link::parse(&tagged(&[TYPE_VLAN; 3], TYPE_IPV4)), Some(three));
    }

    #[test]
    fn header_cut_short_is_not_parsed() {
        let frame = tagged(&[TYPE_SERVICE_VLAN, TYPE_VLAN], TYPE_IPV4);
        for len in 0..frame.len() {
            assert_eq!(Link::parse(&frame[..len]), None, "{len}");
        }
    }

    #[test]
    fn group_addresses_are_recognised() {
        assert!(Mac::BROADCAST.is_broadcast() && Mac::BROADCAST.is_multicast());
        let multicast: Mac = "01:00:5e:00:00:01".parse().unwrap();
        assert!(multicast.is_multicast() && !multicast.is_broadcast());
        assert!(!Mac([0x52, 0x54, 0, 0, 0, 1]).is_multicast());
    }

    #[test]
    fn text_that_is_no_address_is_refused() {
        for text in [
            "",
            "52:54:00:12:34",
            "52:54:00:12:34:56:78",
            "52:54:00:12:34:56:",
            "52-54-00-12-34-56",
            "+2:54:00:12:34:56",
            "2:54:00:12:34:56",
            "é:54:00:12:34:56",
        ] {
            assert_eq!(text.parse::<Mac>(), Err(MacError(text.to_owned())));
        }
        assert_eq!("aA:bB:0f:F0:00:01".parse(), Ok(Mac([0xaa, 0xbb, 0x0f, 0xf0, 0, 1])));
    }

    #[test]
    fn rfc_903_announcement_is_a_request_of_the_station_for_itself() {
        let mac = Mac([0x52, 0x54, 0, 0x12, 0x34, 0x56]);
        let expected = hex(
            "ffffffffffff 525400123456 8035 0001 0800 06 04 0003 525400123456 00000000 525400123456 00000000",
        );
        let frame = rarp_announcement(mac);
        assert_eq!(frame[..42], expected);
        assert_eq!(frame[42..], [0; 18]);
    }

    proptest! {
        #[test]
        fn addresses_survive_text(bytes: [u8; 6]) {
            prop_assert_eq!(Mac(bytes).to_string().parse(), Ok(Mac(bytes)));
        }

        #[test]
        fn random_addresses_are_local_and_of_one_station(entropy: [u8; 6]) {
            let Mac(bytes) = Mac::random_local(entropy);
            prop_assert_eq!(bytes[0] & 3, 2);
            prop_assert_eq!(bytes[0] >> 2, entropy[0] >> 2);
            prop_assert_eq!(&bytes[1..], &entropy[1..]);
        }
    }
}
