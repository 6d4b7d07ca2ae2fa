//! The hash that VIRTIO prescribes for received packets (VIRTIO 1.4, 5.1.6.4.3): which fields go into it, and how
//! the device says so (5.1.6.4.5).

use bitflags::bitflags;

use super::{Fields, Toeplitz};
use crate::parse::{IpVersion, PROTO_TCP, PROTO_UDP};

bitflags! {
    /// VIRTIO_NET_HASH_TYPE_*: the kinds of packets that are hashed, each over fields of its own (5.1.6.4.3.1).
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct HashTypes: u32 {
        /// IPv4: addresses.
        const IPV4 = 1 << 0;
        /// TCP over IPv4: addresses and ports.
        const TCPV4 = 1 << 1;
        /// UDP over IPv4: addresses and ports.
        const UDPV4 = 1 << 2;
        /// IPv6: addresses.
        const IPV6 = 1 << 3;
        /// TCP over IPv6: addresses and ports.
        const TCPV6 = 1 << 4;
        /// UDP over IPv6: addresses and ports.
        const UDPV6 = 1 << 5;
        /// IPv6 with extension headers: home address and address of a type 2 routing header instead, where they
        /// are there.
        const IP_EX = 1 << 6;
        /// The same for TCP, with ports.
        const TCP_EX = 1 << 7;
        /// The same for UDP, with ports.
        const UDP_EX = 1 << 8;
    }
}

impl HashTypes {
    /// Those whose fields lie in a prefix of 64 bytes: what a device supports that looks at no more. Packets with
    /// IPv6 extension headers, whose ports lie beyond, are then hashed by their addresses.
    pub const SHORT: HashTypes = HashTypes::IPV4
        .union(HashTypes::TCPV4)
        .union(HashTypes::UDPV4)
        .union(HashTypes::IPV6)
        .union(HashTypes::TCPV6)
        .union(HashTypes::UDPV6);

    /// VIRTIO_NET_HASH_REPORT_* of the lowest type, 0 (NONE) without any.
    #[must_use]
    pub const fn report(self) -> u16 {
        if self.is_empty() { 0 } else { self.bits().trailing_zeros() as u16 + 1 }
    }
}

/// What is reported of a packet's hash: `hash_value` and `hash_report` of its header (5.1.6.4.5).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PacketHash {
    /// The hash; 0 without one.
    pub value: u32,
    /// VIRTIO_NET_HASH_REPORT_*: over which fields; 0 without a hash.
    pub report: u16,
}

impl PacketHash {
    /// VIRTIO_NET_HASH_REPORT_NONE.
    pub const NONE: PacketHash = PacketHash { value: 0, report: 0 };
    /// The last report that is defined, VIRTIO_NET_HASH_REPORT_UDPv6_EX.
    pub const LAST_REPORT: u16 = 9;

    /// The hash, if there is one. A report that is not defined says nothing.
    #[inline]
    #[must_use]
    pub fn get(self) -> Option<u32> {
        (1..=Self::LAST_REPORT).contains(&self.report).then_some(self.value)
    }
}

/// Computes the hash with a driver's key, for the types it enabled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RssHasher {
    types: HashTypes,
    toeplitz: Toeplitz,
}

impl RssHasher {
    /// For these types, with this key; see [`Toeplitz::new`].
    pub fn new(types: HashTypes, key: &[u8]) -> Self {
        Self { types, toeplitz: Toeplitz::new(key) }
    }

    /// The types that are hashed.
    pub fn types(&self) -> HashTypes {
        self.types
    }

    /// The key.
    pub fn key(&self) -> &[u8] {
        self.toeplitz.key()
    }

    /// The hash of the frame that starts with `prefix`; [`PacketHash::NONE`] for one that is not of an enabled
    /// type. Fragments, the first included, have no transport header for this purpose: all of a datagram
    /// have one hash.
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

    /// The type of a packet, and what goes into its hash: the first of those that apply and are enabled.
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
