//! Frames for tests, built field by field, and a slow reference implementation of the checksum.
//!
//! A [`Packet`] is a TCP or UDP packet as the stack of its sender describes it: with tags, options and extension headers, and with its
//! checksum complete, partial, or for segmentation. It takes nothing from the code under test but constants, so that it can
//! be the measure for it. The feature `testing` turns this module on, for the tests of other crates.

use proptest::collection::vec;
use proptest::prelude::*;
use ringferry_memory::{GuestMemory, SharedMem};

use crate::buffer::{Chain, Pools, PoolsLayout};
use crate::ether::{TYPE_IPV4, TYPE_IPV6, TYPE_SERVICE_VLAN, TYPE_VLAN};
use crate::parse::{PROTO_TCP, PROTO_UDP};
use crate::vnet::{F_NEEDS_CSUM, GSO_ECN, GSO_TCPV4, GSO_TCPV6, GSO_UDP_L4, Header};

/// RFC 1071 word by word, carry after carry.
pub fn reference_sum(bytes: &[u8]) -> u16 {
    bytes.chunks(2).fold(0u16, |sum, word| {
        let word = u16::from_be_bytes([word[0], word.get(1).copied().unwrap_or(0)]);
        let (sum, carry) = sum.overflowing_add(word);
        sum + u16::from(carry)
    })
}

/// A TCP or UDP packet over IPv4 or IPv6, as its sender's stack describes it.
#[derive(Clone, Debug)]
pub struct Packet {
    /// Destination and source.
    pub macs: [[u8; 6]; 2],
    /// VLAN tags, of priority 1 and VLAN 5; the first of two is a service tag.
    pub tags: usize,
    /// IPv6, else IPv4.
    pub v6: bool,
    /// TCP, else UDP.
    pub tcp: bool,
    /// Words of IPv4 options, or units of eight bytes in each of two IPv6 extension headers.
    pub options: usize,
    /// Length of the TCP options in 32-bit words.
    pub tcp_options: usize,
    /// Source and destination; the first 8 bytes with IPv4.
    pub addresses: [u8; 32],
    /// Source and destination, in network order.
    pub ports: [u8; 4],
    /// Of IPv4.
    pub identification: u16,
    /// Of TCP.
    pub sequence: u32,
    /// The flags byte of the TCP header.
    pub flags: u8,
    /// What it carries.
    pub payload: Vec<u8>,
}

/// A frame with its virtual header.
pub type Sent = (Header, Vec<u8>);

/// Destination and source of a [`Packet`] that says nothing else.
const MACS: [[u8; 6]; 2] = [[2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]];

impl Packet {
    /// Any packet with up to `payload` bytes.
    pub fn any(payload: usize) -> impl Strategy<Value = Packet> {
        let shape = (0..3usize, any::<bool>(), any::<bool>(), 0..=10usize, 0..=10usize);
        let fields = any::<([u8; 32], [u8; 4], u16, u32, u8)>();
        (shape, fields, vec(any::<u8>(), 0..=payload)).prop_map(|(shape, fields, payload)| {
            let (tags, v6, tcp, options, tcp_options) = shape;
            let (addresses, ports, identification, sequence, flags) = fields;
            Packet {
                macs: MACS,
                tags,
                v6,
                tcp,
                options,
                tcp_options,
                addresses,
                ports,
                identification,
                sequence,
                flags,
                payload,
            }
        })
    }

    /// A packet without tags and options.
    pub fn plain(v6: bool, tcp: bool, payload: Vec<u8>) -> Packet {
        let (addresses, ports) = ([9; 32], [1, 2, 3, 4]);
        Packet {
            macs: MACS,
            tags: 0,
            v6,
            tcp,
            options: 0,
            tcp_options: 0,
            addresses,
            ports,
            identification: 7,
            sequence: 8,
            flags: 0x10,
            payload,
        }
    }

    /// Its protocol number.
    pub fn proto(&self) -> u8 {
        if self.tcp { PROTO_TCP } else { PROTO_UDP }
    }

    /// Where its IP header begins.
    pub fn l3(&self) -> usize {
        14 + 4 * self.tags
    }

    /// Where its transport header begins.
    pub fn l4(&self) -> usize {
        let extensions = if self.options == 0 { 0 } else { 2 * 8 * self.options };
        self.l3() + if self.v6 { 40 + extensions } else { 20 + 4 * self.options }
    }

    /// Where its payload begins.
    pub fn payload_at(&self) -> usize {
        self.l4() + if self.tcp { 20 + 4 * self.tcp_options } else { 8 }
    }

    /// The pseudo header of the whole packet, as bytes.
    pub fn pseudo(&self) -> Vec<u8> {
        let len = self.payload_at() - self.l4() + self.payload.len();
        let addresses = if self.v6 { &self.addresses[..] } else { &self.addresses[..8] };
        [addresses, &(len as u32).to_be_bytes(), &[0, 0, 0, self.proto()]].concat()
    }

    /// The frame with its transport checksum partial.
    pub fn partial(&self) -> Vec<u8> {
        let mut frame = self.macs.concat();
        for tag in 0..self.tags {
            frame
                .extend(if tag == 0 && self.tags == 2 { TYPE_SERVICE_VLAN } else { TYPE_VLAN }.to_be_bytes());
            frame.extend([0x20, 0x05]);
        }
        let ip_len = self.payload_at() + self.payload.len() - self.l3();
        if self.v6 {
            frame.extend(TYPE_IPV6.to_be_bytes());
            let next = if self.options == 0 { self.proto() } else { 0 };
            frame.extend([0x60, 0, 0, 0]);
            frame.extend(((ip_len - 40) as u16).to_be_bytes());
            frame.extend([next, 64]);
            frame.extend(self.addresses);
            if self.options > 0 {
                // Hop-by-hop, then destination options.
                for next in [60, self.proto()] {
                    frame.extend([next, self.options as u8 - 1]);
                    frame.extend(vec![0; 8 * self.options - 2]);
                }
            }
        } else {
            frame.extend(TYPE_IPV4.to_be_bytes());
            frame.extend([0x45 + self.options as u8, 0]);
            frame.extend((ip_len as u16).to_be_bytes());
            frame.extend(self.identification.to_be_bytes());
            frame.extend([0x40, 0, 64, self.proto(), 0, 0]);
            frame.extend(&self.addresses[..8]);
            frame.extend(vec![1; 4 * self.options]);
            let checksum = !reference_sum(&frame[self.l3()..]);
            frame[self.l3() + 10..][..2].copy_from_slice(&checksum.to_be_bytes());
        }
        assert_eq!(frame.len(), self.l4());
        frame.extend(self.ports);
        let pseudo = reference_sum(&self.pseudo()).to_be_bytes();
        if self.tcp {
            frame.extend(self.sequence.to_be_bytes());
            frame.extend([0, 0, 0, 1, 0x50 + 0x10 * self.tcp_options as u8, self.flags, 1, 0]);
            frame.extend(pseudo);
            frame.extend([0, 0]);
            frame.extend(vec![1; 4 * self.tcp_options]);
        } else {
            frame.extend(((8 + self.payload.len()) as u16).to_be_bytes());
            frame.extend(pseudo);
        }
        assert_eq!(frame.len(), self.payload_at());
        frame.extend(&self.payload);
        frame
    }

    /// Makes the virtual header that belongs to [`partial`](Self::partial).
    pub fn header(&self) -> Header {
        Header {
            flags: F_NEEDS_CSUM,
            csum_start: self.l4() as u16,
            csum_offset: if self.tcp { 16 } else { 6 },
            ..Header::default()
        }
    }

    /// The header for [`partial`](Self::partial) when it is to be cut every `gso_size` bytes. Its
    /// `hdr_len` is of no use on purpose.
    pub fn gso_header(&self, gso_size: u16) -> Header {
        let gso_type = match (self.tcp, self.v6) {
            (true, v6) if self.flags & 0x80 != 0 => GSO_ECN | if v6 { GSO_TCPV6 } else { GSO_TCPV4 },
            (true, false) => GSO_TCPV4,
            (true, true) => GSO_TCPV6,
            (false, _) => GSO_UDP_L4,
        };
        Header { gso_type, gso_size, hdr_len: 1, ..self.header() }
    }

    /// The frame with a partial checksum, to be cut every `gso_size` bytes, or not with 0.
    pub fn sent(&self, gso_size: u16) -> Sent {
        let header = if gso_size == 0 { self.header() } else { self.gso_header(gso_size) };
        (header, self.partial())
    }

    /// The frame with a finished checksum.
    pub fn complete(&self) -> Sent {
        let mut frame = self.partial();
        let l4 = self.l4();
        let at = l4 + if self.tcp { 16 } else { 6 };
        let sum = match !reference_sum(&frame[l4..]) {
            // RFC 768: a sum of zero is sent as ones, as zero means none. With TCP it makes no difference.
            0 => 0xffff,
            sum => sum,
        };
        frame[at..at + 2].copy_from_slice(&sum.to_be_bytes());
        (Header::default(), frame)
    }
}

/// Pools of `count` buffers of each size.
pub fn pools(count: u32) -> Pools {
    let layout = PoolsLayout::new(count, 4096);
    let file = SharedMem::new("packets", layout.bytes()).unwrap();
    let memory = GuestMemory::new(vec![file.map_at(0x10000).unwrap()]).unwrap();
    Pools::new(&memory, 0x10000, layout).unwrap()
}

/// Returns the numbers of free small, frame and large buffers.
pub fn available(pools: &Pools) -> [u32; 3] {
    [pools.small.available(), pools.frame.available(), pools.large.available()]
}

/// The frame in buffers of these lengths, and one more.
pub fn chain_of(pools: &mut Pools, header: Header, frame: &[u8], lens: &[usize]) -> Chain {
    let mut chain = Chain::default();
    chain.header = header;
    let mut rest = frame;
    for len in lens {
        let (piece, behind) = rest.split_at((*len).min(rest.len()));
        chain.append(pools.chain_of(piece).unwrap());
        rest = behind;
    }
    chain.append(pools.chain_of(rest).unwrap());
    chain
}

/// Bytes from hexadecimal digits; white space is skipped.
pub fn hex(digits: &str) -> Vec<u8> {
    let digits: Vec<u8> =
        digits.chars().filter_map(|digit| digit.to_digit(16)).map(|digit| digit as u8).collect();
    digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect()
}
