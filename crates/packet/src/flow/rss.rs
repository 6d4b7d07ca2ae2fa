//! The hash of received packets that VIRTIO defines (VIRTIO 1.4, 5.1.6.4.3): selection of the fields, the Toeplitz hash
//! over them, and the report (5.1.6.4.5).
//!
//! A device makes an [`RssHasher`] when the driver sets key and types, calls [`RssHasher::hash`] for each frame on its
//! worker, and replaces it at the next setting.

use bitflags::bitflags;

use super::{Fields, Toeplitz};
use crate::parse::{IpVersion, PROTO_TCP, PROTO_UDP};

bitflags! {
    /// VIRTIO_NET_HASH_TYPE_*: the types of packets that are hashed; each type has its own fields (5.1.6.4.3.1).
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct HashTypes: u32 {
        /// IPv4, hashed by its addresses.
        const IPV4 = 1 << 0;
        /// TCP over IPv4, hashed by its addresses and ports.
        const TCPV4 = 1 << 1;
        /// UDP over IPv4, hashed by its addresses and ports.
        const UDPV4 = 1 << 2;
        /// IPv6, hashed by its addresses.
        const IPV6 = 1 << 3;
        /// TCP over IPv6, hashed by its addresses and ports.
        const TCPV6 = 1 << 4;
        /// UDP over IPv6, hashed by its addresses and ports.
        const UDPV6 = 1 << 5;
        /// IPv6 with extension headers, hashed by the home address and the address in a type 2 routing header, if it
        /// has them, instead of source and destination.
        const IP_EX = 1 << 6;
        /// TCP over IPv6 with extension headers, hashed like `IP_EX` with ports.
        const TCP_EX = 1 << 7;
        /// UDP over IPv6 with extension headers, hashed like `IP_EX` with ports.
        const UDP_EX = 1 << 8;
    }
}

impl HashTypes {
    /// The types whose fields are in a prefix of 64 bytes, for a device that reads no more. Packets with IPv6 extension
    /// headers, whose ports are beyond the prefix, are hashed by their addresses then.
    pub const SHORT: HashTypes = HashTypes::IPV4
        .union(HashTypes::TCPV4)
        .union(HashTypes::UDPV4)
        .union(HashTypes::IPV6)
        .union(HashTypes::TCPV6)
        .union(HashTypes::UDPV6);

    /// Returns the VIRTIO_NET_HASH_REPORT_* of the lowest type in the set, or 0 (NONE) if it is empty.
    #[must_use]
    pub const fn report(self) -> u16 {
        if self.is_empty() { 0 } else { self.bits().trailing_zeros() as u16 + 1 }
    }
}

/// The hash that is reported for a packet: `hash_value` and `hash_report` in its header (5.1.6.4.5).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PacketHash {
    /// The hash value; 0 if there is none.
    pub value: u32,
    /// The type of packet that was hashed, VIRTIO_NET_HASH_REPORT_*; 0 if there is no hash.
    pub report: u16,
}

impl PacketHash {
    /// No hash: VIRTIO_NET_HASH_REPORT_NONE.
    pub const NONE: PacketHash = PacketHash { value: 0, report: 0 };
    /// The largest report that is defined, VIRTIO_NET_HASH_REPORT_UDPv6_EX.
    pub const LAST_REPORT: u16 = 9;

    /// Returns the hash value, or `None` if the report is 0 or not defined.
    #[inline]
    #[must_use]
    pub fn get(self) -> Option<u32> {
        (1..=Self::LAST_REPORT).contains(&self.report).then_some(self.value)
    }
}

/// Computes the hash with a driver's key, for the types that it enabled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RssHasher {
    types: HashTypes,
    toeplitz: Toeplitz,
}

impl RssHasher {
    /// Makes a hasher for these types with this key; see [`Toeplitz::new`].
    pub fn new(types: HashTypes, key: &[u8]) -> Self {
        Self { types, toeplitz: Toeplitz::new(key) }
    }

    /// Returns the types that are hashed.
    pub fn types(&self) -> HashTypes {
        self.types
    }

    /// Returns the key, padded with zeros to [`KEY_LEN`](super::KEY_LEN) bytes.
    pub fn key(&self) -> &[u8] {
        self.toeplitz.key()
    }

    /// Computes the hash of the frame that starts with `prefix`; [`PacketHash::NONE`] if it is not of an enabled type.
    /// Fragments, the first one included, are hashed without ports, so that all fragments of a datagram have the same
    /// hash.
    #[must_use]
    pub fn hash(&self, prefix: &[u8]) -> PacketHash {
        let Some(fields) = Fields::parse(prefix) else { return PacketHash::NONE };
        let (kind, [source, destination], ports) = self.choose(&fields);
        if kind.is_empty() {
            return PacketHash::NONE;
        }
        let (first, second) = (source.len(), source.len() + destination.len());
        let value = self.toeplitz.hash(source)
            ^ self.toeplitz.hash_from(first, destination)
            ^ self.toeplitz.hash_from(second, ports.as_ref().map_or(&[], |ports| &ports[..]));
        PacketHash { value, report: kind.report() }
    }

    /// Returns the type of a packet, the first that applies and is enabled, with the fields that are hashed.
    fn choose<'a>(&self, fields: &Fields<'a>) -> (HashTypes, [&'a [u8]; 2], Option<[u8; 4]>) {
        let [ip, tcp, udp] = match fields.ip {
            IpVersion::V4 => [HashTypes::IPV4, HashTypes::TCPV4, HashTypes::UDPV4],
            IpVersion::V6 => [HashTypes::IPV6, HashTypes::TCPV6, HashTypes::UDPV6],
        };
        let pick = |ip: HashTypes, tcp: HashTypes, udp: HashTypes| match fields.proto {
            PROTO_TCP if fields.ports.is_some() && self.types.contains(tcp) => (tcp, fields.ports),
            PROTO_UDP if fields.ports.is_some() && self.types.contains(udp) => (udp, fields.ports),
            _ => (self.types & ip, None),
        };
        if fields.extended {
            let (kind, ports) = pick(HashTypes::IP_EX, HashTypes::TCP_EX, HashTypes::UDP_EX);
            if !kind.is_empty() {
                let [source, destination] = fields.addresses;
                let addresses = [fields.home.unwrap_or(source), fields.route.unwrap_or(destination)];
                return (kind, addresses, ports);
            }
        }
        let (kind, ports) = pick(ip, tcp, udp);
        (kind, fields.addresses, ports)
    }
}
