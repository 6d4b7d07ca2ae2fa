//! The device configuration space (VIRTIO 1.4, 5.1.4).

/// Fields up to `mtu`; later ones belong to features this project does not offer yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NetConfig {
    /// Meaningful with VIRTIO_NET_F_MAC.
    pub mac: [u8; 6],
    /// VIRTIO_NET_S_LINK_UP and VIRTIO_NET_S_ANNOUNCE; meaningful with VIRTIO_NET_F_STATUS.
    pub status: u16,
    /// Meaningful with VIRTIO_NET_F_MQ.
    pub max_virtqueue_pairs: u16,
    /// Meaningful with VIRTIO_NET_F_MTU.
    pub mtu: u16,
}

/// `status`: the link is up.
pub const S_LINK_UP: u16 = 1;
/// `status`: the guest should announce itself.
pub const S_ANNOUNCE: u16 = 2;

impl NetConfig {
    /// Bytes of the little-endian form.
    pub const LEN: usize = 12;

    /// The little-endian form.
    pub fn to_bytes(self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[..6].copy_from_slice(&self.mac);
        bytes[6..8].copy_from_slice(&self.status.to_le_bytes());
        bytes[8..10].copy_from_slice(&self.max_virtqueue_pairs.to_le_bytes());
        bytes[10..].copy_from_slice(&self.mtu.to_le_bytes());
        bytes
    }

    /// Reads the little-endian form.
    pub fn from_bytes(bytes: &[u8; Self::LEN]) -> Self {
        let [m0, m1, m2, m3, m4, m5, s0, s1, p0, p1, t0, t1] = *bytes;
        Self {
            mac: [m0, m1, m2, m3, m4, m5],
            status: u16::from_le_bytes([s0, s1]),
            max_virtqueue_pairs: u16::from_le_bytes([p0, p1]),
            mtu: u16::from_le_bytes([t0, t1]),
        }
    }

    /// Fills `out` from byte `offset` on; bytes past the end read as 0, as a driver may read more
    /// than a device has.
    pub fn read(self, offset: usize, out: &mut [u8]) {
        out.fill(0);
        if let Some(have) = self.to_bytes().get(offset..) {
            let n = have.len().min(out.len());
            out[..n].copy_from_slice(&have[..n]);
        }
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
}
