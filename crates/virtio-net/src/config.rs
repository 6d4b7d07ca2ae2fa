//! The device configuration space (VIRTIO 1.4, 5.1.4): [`NetConfig`] holds the fields that every
//! device has, [`HashConfig`] also those of a device that hashes packets.
//!
//! These are plain values: a device builds one when it is set up and answers reads from it, and a
//! driver parses one after negotiation.

use ringferry_packet::flow::HashTypes;

use crate::Features;

/// VIRTIO_NET_CTRL_MQ_VQ_PAIRS_MAX: most queue pairs that a device may have (5.1.6.5.6).
pub const MAX_PAIRS: u16 = 0x8000;

/// The fields up to `mtu`, which are all fields of a device that does not hash packets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NetConfig {
    /// The device's address; meaningful with VIRTIO_NET_F_MAC.
    pub mac: [u8; 6],
    /// Combination of [`S_LINK_UP`] and [`S_ANNOUNCE`]; meaningful with VIRTIO_NET_F_STATUS.
    pub status: u16,
    /// Most queue pairs that the driver may use; meaningful with VIRTIO_NET_F_MQ or
    /// VIRTIO_NET_F_RSS.
    pub max_virtqueue_pairs: u16,
    /// Largest MTU in bytes that the driver may use; meaningful with VIRTIO_NET_F_MTU.
    pub mtu: u16,
}

/// Bit of `status` that reports a link that is up.
pub const S_LINK_UP: u16 = 1;
/// Bit of `status` that asks the guest to announce itself.
pub const S_ANNOUNCE: u16 = 2;

impl NetConfig {
    /// Size of the encoded fields in bytes.
    pub const LEN: usize = 12;

    /// Encodes the fields in little-endian byte order.
    pub fn to_bytes(self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[..6].copy_from_slice(&self.mac);
        bytes[6..8].copy_from_slice(&self.status.to_le_bytes());
        bytes[8..10].copy_from_slice(&self.max_virtqueue_pairs.to_le_bytes());
        bytes[10..].copy_from_slice(&self.mtu.to_le_bytes());
        bytes
    }

    /// Decodes fields in little-endian byte order.
    pub fn from_bytes(bytes: &[u8; Self::LEN]) -> Self {
        let [m0, m1, m2, m3, m4, m5, s0, s1, p0, p1, t0, t1] = *bytes;
        Self {
            mac: [m0, m1, m2, m3, m4, m5],
            status: u16::from_le_bytes([s0, s1]),
            max_virtqueue_pairs: u16::from_le_bytes([p0, p1]),
            mtu: u16::from_le_bytes([t0, t1]),
        }
    }

    /// Reads from byte `offset` into `out`; bytes past the end read as 0, because a driver may read
    /// more than a device has.
    pub fn read(self, offset: usize, out: &mut [u8]) {
        read(&self.to_bytes(), offset, out);
    }

    /// Returns the number of queue pairs that a driver with these features may use (5.1.4.2): 1
    /// without a control queue, and if the device reports a number outside 1 to [`MAX_PAIRS`].
    pub fn pairs(self, features: Features) -> u16 {
        let multiqueue = features.consistent().intersects(Features::MQ.union(Features::RSS));
        match self.max_virtqueue_pairs {
            pairs @ 1..=MAX_PAIRS if multiqueue => pairs,
            _ => 1,
        }
    }
}

/// The hashes that a device can calculate, and the indirection tables that it takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HashLimits {
    /// Longest hash key in bytes; meaningful with VIRTIO_NET_F_RSS or VIRTIO_NET_F_HASH_REPORT.
    pub max_key: u8,
    /// Most entries of the indirection table; meaningful with VIRTIO_NET_F_RSS.
    pub max_table: u16,
    /// Packet types that can be hashed; meaningful with VIRTIO_NET_F_RSS or
    /// VIRTIO_NET_F_HASH_REPORT.
    pub types: HashTypes,
}

impl HashLimits {
    /// The limits of this crate's device half: keys and tables of the least size that a device may
    /// have (5.1.4.1), which is also the largest that older Linux drivers have room for; types
    /// whose fields lie in the bytes that a switch copies of a frame.
    pub const DEVICE: HashLimits = HashLimits { max_key: 40, max_table: 128, types: HashTypes::SHORT };

    /// Returns true if a device with these features may report these limits (5.1.4.1). A driver
    /// does not use the hash features of a device that reports less.
    pub fn is_valid(self, features: Features) -> bool {
        let hashes = features.intersects(Features::RSS.union(Features::HASH_REPORT));
        let rss = features.contains(Features::RSS);
        (!hashes || self.max_key >= Self::DEVICE.max_key)
            && (!rss || self.max_table >= Self::DEVICE.max_table)
    }
}

/// All fields up to `supported_hash_types`: the configuration space of a device that offers VIRTIO_NET_F_RSS or
/// VIRTIO_NET_F_HASH_REPORT.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HashConfig {
    /// The fields that every device has, in front of the others.
    pub net: NetConfig,
    /// Speed of the link in Mbit/s; meaningful with VIRTIO_NET_F_SPEED_DUPLEX.
    pub speed: u32,
    /// 1 for full duplex, 0 for half; meaningful with VIRTIO_NET_F_SPEED_DUPLEX.
    pub duplex: u8,
    /// Hashes and tables that the device supports.
    pub hash: HashLimits,
}

/// Value of `speed` for a link of unknown speed.
pub const SPEED_UNKNOWN: u32 = u32::MAX;
/// Value of `duplex` for a link of unknown mode.
pub const DUPLEX_UNKNOWN: u8 = u8::MAX;

impl HashConfig {
    /// Size of the encoded fields in bytes.
    pub const LEN: usize = 24;

    /// Creates the configuration of a device of unknown speed.
    pub const fn new(net: NetConfig, hash: HashLimits) -> Self {
        Self { net, speed: SPEED_UNKNOWN, duplex: DUPLEX_UNKNOWN, hash }
    }

    /// Encodes the fields in little-endian byte order.
    pub fn to_bytes(self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[..NetConfig::LEN].copy_from_slice(&self.net.to_bytes());
        bytes[12..16].copy_from_slice(&self.speed.to_le_bytes());
        bytes[16] = self.duplex;
        bytes[17] = self.hash.max_key;
        bytes[18..20].copy_from_slice(&self.hash.max_table.to_le_bytes());
        bytes[20..].copy_from_slice(&self.hash.types.bits().to_le_bytes());
        bytes
    }

    /// Decodes fields in little-endian byte order. Hash types that are not defined are left out,
    /// because a driver must not ask for them.
    pub fn from_bytes(bytes: &[u8; Self::LEN]) -> Self {
        let le16 = |at| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let le32 = |at| u32::from(le16(at)) | u32::from(le16(at + 2)) << 16;
        Self {
            net: NetConfig::from_bytes(&std::array::from_fn(|at| bytes[at])),
            speed: le32(12),
            duplex: bytes[16],
            hash: HashLimits {
                max_key: bytes[17],
                max_table: le16(18),
                types: HashTypes::from_bits_truncate(le32(20)),
            },
        }
    }

    /// Reads from byte `offset` into `out`, like [`NetConfig::read`].
    pub fn read(self, offset: usize, out: &mut [u8]) {
        read(&self.to_bytes(), offset, out);
    }
}

/// Copies `bytes` from `offset` on into `out`, and fills the rest with zeroes.
fn read(bytes: &[u8], offset: usize, out: &mut [u8]) {
    out.fill(0);
    if let Some(have) = bytes.get(offset..) {
        let n = have.len().min(out.len());
        out[..n].copy_from_slice(&have[..n]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clause_5_1_4_layout() {
        let config =
            NetConfig { mac: [1, 2, 3, 4, 5, 6], status: S_LINK_UP, max_virtqueue_pairs: 2, mtu: 9000 };
        assert_eq!(config.to_bytes(), [1, 2, 3, 4, 5, 6, 1, 0, 2, 0, 0x28, 0x23]);
        assert_eq!(NetConfig::from_bytes(&config.to_bytes()), config);
    }

    #[test]
    fn reads_past_the_end_give_zeroes() {
        let config = NetConfig { mac: [9; 6], status: 1, max_virtqueue_pairs: 1, mtu: 1500 };
        let mut out = [0xff; 8];
        config.read(10, &mut out);
        assert_eq!(out, [0xdc, 5, 0, 0, 0, 0, 0, 0]);
        config.read(usize::MAX, &mut out);
        assert_eq!(out, [0; 8]);
    }

    #[test]
    fn clause_5_1_4_layout_of_what_hashing_needs() {
        let net = NetConfig { mac: [1; 6], status: 1, max_virtqueue_pairs: 4, mtu: 1500 };
        let config = HashConfig::new(net, HashLimits::DEVICE);
        let bytes = config.to_bytes();
        assert_eq!(bytes[..12], net.to_bytes());
        assert_eq!(bytes[12..], [0xff, 0xff, 0xff, 0xff, 0xff, 40, 128, 0, 0x3f, 0, 0, 0]);
        assert_eq!(HashConfig::from_bytes(&bytes), config);
        let mut out = [0xee; 8];
        config.read(17, &mut out);
        assert_eq!(out, [40, 128, 0, 0x3f, 0, 0, 0, 0]);
        // Types that are not defined.
        assert_eq!(HashConfig::from_bytes(&[0xff; 24]).hash.types, HashTypes::all());
    }

    #[test]
    fn clause_5_1_4_2_pairs_out_of_range_are_one_pair() {
        let of = |pairs, features| {
            NetConfig { max_virtqueue_pairs: pairs, ..NetConfig::default() }.pairs(features)
        };
        let mq = Features::MQ | Features::CTRL_VQ;
        assert_eq!([0, 1, 2, 0x8000, 0x8001, 0xffff].map(|pairs| of(pairs, mq)), [1, 1, 2, 0x8000, 1, 1]);
        assert_eq!(of(4, Features::RSS | Features::CTRL_VQ), 4);
        assert_eq!((of(4, Features::MQ), of(4, Features::CTRL_VQ)), (1, 1), "no control queue, or no need");
    }

    #[test]
    fn clause_5_1_4_1_devices_that_hash_too_little_are_recognised() {
        let rss = Features::RSS;
        assert!(HashLimits::DEVICE.is_valid(Features::MULTIQUEUE));
        assert!(!HashLimits { max_key: 39, ..HashLimits::DEVICE }.is_valid(Features::HASH_REPORT));
        assert!(!HashLimits { max_table: 127, ..HashLimits::DEVICE }.is_valid(rss));
        assert!(HashLimits { max_table: 0, ..HashLimits::DEVICE }.is_valid(Features::HASH_REPORT));
        assert!(HashLimits::default().is_valid(Features::MQ));
    }
}
