//! Feature bits (VIRTIO 1.4, 5.1.3 and 6), the dependencies between them, and the offloads that
//! follow from them. A set of features is a plain value, fixed once it is negotiated.

use bitflags::bitflags;
use ringferry_packet::vnet::{Header, Offloads};
use ringferry_ring::RingFeatures;

use crate::header::HASHED_LEN;

bitflags! {
    /// The feature bits of a network device that this crate knows, by their standard names without
    /// the prefix `VIRTIO_NET_F_` or `VIRTIO_F_`.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct Features: u64 {
        /// The device completes partial checksums.
        const CSUM = 1 << 0;
        /// The driver takes packets with partial checksums.
        const GUEST_CSUM = 1 << 1;
        /// Receive offloads can be changed at run time.
        const CTRL_GUEST_OFFLOADS = 1 << 2;
        /// The device reports its MTU in configuration space.
        const MTU = 1 << 3;
        /// The device reports its address in configuration space.
        const MAC = 1 << 5;
        /// The driver takes unsegmented TCP over IPv4.
        const GUEST_TSO4 = 1 << 7;
        /// The driver takes unsegmented TCP over IPv6.
        const GUEST_TSO6 = 1 << 8;
        /// The driver takes unsegmented TCP with ECN.
        const GUEST_ECN = 1 << 9;
        /// The driver takes unfragmented UDP.
        const GUEST_UFO = 1 << 10;
        /// The device takes unsegmented TCP over IPv4.
        const HOST_TSO4 = 1 << 11;
        /// The device takes unsegmented TCP over IPv6.
        const HOST_TSO6 = 1 << 12;
        /// The device takes unsegmented TCP with ECN.
        const HOST_ECN = 1 << 13;
        /// The device takes unfragmented UDP.
        const HOST_UFO = 1 << 14;
        /// A packet may be spread over several receive buffers.
        const MRG_RXBUF = 1 << 15;
        /// The device reports the state of its link.
        const STATUS = 1 << 16;
        /// The device has a control queue.
        const CTRL_VQ = 1 << 17;
        /// The receive modes and the address filter can be set.
        const CTRL_RX = 1 << 18;
        /// The VLAN filter can be set.
        const CTRL_VLAN = 1 << 19;
        /// The further receive modes can be set.
        const CTRL_RX_EXTRA = 1 << 20;
        /// The device may ask the guest to announce itself.
        const GUEST_ANNOUNCE = 1 << 21;
        /// The device has several queue pairs.
        const MQ = 1 << 22;
        /// The address can be set through the control queue.
        const CTRL_MAC_ADDR = 1 << 23;
        /// Descriptors may point to indirect tables of descriptors.
        const INDIRECT_DESC = 1 << 28;
        /// Both sides suppress notifications by index (`used_event`, `avail_event`).
        const EVENT_IDX = 1 << 29;
        /// The vhost-user connection negotiates protocol features; this is not a feature of the
        /// device.
        const PROTOCOL_FEATURES = 1 << 30;
        /// The device complies with VIRTIO 1.0 or later.
        const VERSION_1 = 1 << 32;
        /// Rings have the packed layout.
        const RING_PACKED = 1 << 34;
        /// Buffers are used in the order they were made available.
        const IN_ORDER = 1 << 35;
        /// Coalescing limits can be set for single queues.
        const VQ_NOTF_COAL = 1 << 52;
        /// Coalescing limits can be set for all queues.
        const NOTF_COAL = 1 << 53;
        /// The driver takes unsegmented UDP over IPv4.
        const GUEST_USO4 = 1 << 54;
        /// The driver takes unsegmented UDP over IPv6.
        const GUEST_USO6 = 1 << 55;
        /// The device takes unsegmented UDP.
        const HOST_USO = 1 << 56;
        /// The device reports the hash of each packet, and virtual headers have 20 bytes.
        const HASH_REPORT = 1 << 57;
        /// The driver configures receive-side scaling.
        const RSS = 1 << 60;
    }
}

impl Features {
    /// The features that this crate's device half offers without a control queue or configuration
    /// space.
    pub const DEVICE: Features = Features::CSUM
        .union(Features::GUEST_CSUM)
        .union(Features::GUEST_SEGMENTATION)
        .union(Features::HOST_TSO4)
        .union(Features::HOST_TSO6)
        .union(Features::HOST_ECN)
        .union(Features::HOST_USO)
        .union(Features::MRG_RXBUF)
        .union(Features::INDIRECT_DESC)
        .union(Features::EVENT_IDX)
        .union(Features::RING_PACKED)
        .union(Features::IN_ORDER)
        .union(Features::VERSION_1);

    /// The features that the device half can offer in addition if a control queue is served
    /// ([`Controlq`](crate::device::Controlq)).
    pub const MULTIQUEUE: Features = Features::CTRL_VQ
        .union(Features::MQ)
        .union(Features::RSS)
        .union(Features::HASH_REPORT)
        .union(Features::NOTF_COAL)
        .union(Features::VQ_NOTF_COAL);

    /// The features with which the device may deliver frames longer than the MTU, except UFO, which
    /// no device offers any more.
    pub const GUEST_SEGMENTATION: Features = Features::GUEST_TSO4
        .union(Features::GUEST_TSO6)
        .union(Features::GUEST_ECN)
        .union(Features::GUEST_USO4)
        .union(Features::GUEST_USO6);

    /// The offloads of both directions: features with which a frame may have a partial checksum, or be unsegmented.
    pub const OFFLOADS: Features = Features::CSUM
        .union(Features::GUEST_CSUM)
        .union(Features::GUEST_SEGMENTATION)
        .union(Features::GUEST_UFO)
        .union(Features::HOST_TSO4)
        .union(Features::HOST_TSO6)
        .union(Features::HOST_ECN)
        .union(Features::HOST_UFO)
        .union(Features::HOST_USO);

    /// Each feature that needs another (5.1.3.1), paired with the one that it needs.
    const NEEDS: [(Features, Features); 18] = [
        (Features::GUEST_TSO4, Features::GUEST_CSUM),
        (Features::GUEST_TSO6, Features::GUEST_CSUM),
        (Features::GUEST_UFO, Features::GUEST_CSUM),
        (Features::GUEST_USO4, Features::GUEST_CSUM),
        (Features::GUEST_USO6, Features::GUEST_CSUM),
        (Features::HOST_TSO4, Features::CSUM),
        (Features::HOST_TSO6, Features::CSUM),
        (Features::HOST_UFO, Features::CSUM),
        (Features::HOST_USO, Features::CSUM),
        (Features::CTRL_RX, Features::CTRL_VQ),
        (Features::CTRL_VLAN, Features::CTRL_VQ),
        (Features::CTRL_RX_EXTRA, Features::CTRL_VQ),
        (Features::GUEST_ANNOUNCE, Features::CTRL_VQ),
        (Features::MQ, Features::CTRL_VQ),
        (Features::CTRL_MAC_ADDR, Features::CTRL_VQ),
        (Features::NOTF_COAL, Features::CTRL_VQ),
        (Features::VQ_NOTF_COAL, Features::CTRL_VQ),
        (Features::RSS, Features::CTRL_VQ),
    ];

    /// Returns these features without the ones whose precondition (5.1.3.1) is missing.
    #[must_use]
    pub fn consistent(self) -> Features {
        let mut features = self;
        for (feature, needs) in Self::NEEDS {
            if !features.contains(needs) {
                features.remove(feature);
            }
        }
        if !features.intersects(Features::GUEST_TSO4.union(Features::GUEST_TSO6)) {
            features.remove(Features::GUEST_ECN);
        }
        if !features.intersects(Features::HOST_TSO4.union(Features::HOST_TSO6)) {
            features.remove(Features::HOST_ECN);
        }
        features
    }

    /// Returns the offloads that the driver accepts in received packets.
    #[must_use]
    pub fn guest_offloads(self) -> Offloads {
        let features = self.consistent();
        let mut offloads = Offloads::empty();
        offloads.set(Offloads::CSUM, features.contains(Features::GUEST_CSUM));
        offloads.set(Offloads::TSO4, features.contains(Features::GUEST_TSO4));
        offloads.set(Offloads::TSO6, features.contains(Features::GUEST_TSO6));
        offloads.set(Offloads::ECN, features.contains(Features::GUEST_ECN));
        offloads.set(Offloads::USO, features.contains(Features::GUEST_USO4.union(Features::GUEST_USO6)));
        offloads.set(Offloads::UFO, features.contains(Features::GUEST_UFO));
        offloads
    }

    /// Returns the offloads that the device accepts in transmitted packets.
    #[must_use]
    pub fn host_offloads(self) -> Offloads {
        let features = self.consistent();
        let mut offloads = Offloads::empty();
        offloads.set(Offloads::CSUM, features.contains(Features::CSUM));
        offloads.set(Offloads::TSO4, features.contains(Features::HOST_TSO4));
        offloads.set(Offloads::TSO6, features.contains(Features::HOST_TSO6));
        offloads.set(Offloads::ECN, features.contains(Features::HOST_ECN));
        offloads.set(Offloads::USO, features.contains(Features::HOST_USO));
        offloads.set(Offloads::UFO, features.contains(Features::HOST_UFO));
        offloads
    }

    /// Returns the size of the virtual header in bytes (5.1.6): 20 on all queues with HASH_REPORT.
    /// `num_buffers` is always present with VERSION_1, and in the legacy interface only with
    /// MRG_RXBUF.
    #[must_use]
    pub fn header_len(self) -> usize {
        if self.contains(Features::HASH_REPORT) {
            HASHED_LEN
        } else if self.intersects(Features::VERSION_1.union(Features::MRG_RXBUF)) {
            Header::LEN
        } else {
            Header::LEGACY_LEN
        }
    }

    /// Returns the features that concern rings.
    #[must_use]
    pub fn ring(self) -> RingFeatures {
        RingFeatures::from_bits(self.bits())
    }

    /// Returns the names of the features, in the order of their bits; an unknown bit is named
    /// `BIT_n`.
    pub fn names(self) -> Vec<String> {
        let mut names: Vec<String> = self.iter_names().map(|(name, _)| name.to_owned()).collect();
        let unknown = self.bits() & !Features::all().bits();
        names.extend((0..64).filter(|bit| unknown & (1 << bit) != 0).map(|bit| format!("BIT_{bit}")));
        names
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clause_5_1_3_1_features_fall_with_what_they_need() {
        let features = (Features::GUEST_TSO4 | Features::GUEST_ECN | Features::MQ).consistent();
        assert_eq!(features, Features::empty());
        let features = (Features::CSUM | Features::HOST_TSO6 | Features::HOST_ECN).consistent();
        assert_eq!(features, Features::CSUM | Features::HOST_TSO6 | Features::HOST_ECN);
        assert_eq!(Features::DEVICE.consistent(), Features::DEVICE);
    }

    #[test]
    fn clause_5_1_6_1_header_is_12_bytes_with_version_1() {
        assert_eq!(Features::VERSION_1.header_len(), 12);
        assert_eq!(Features::MRG_RXBUF.header_len(), 12);
        assert_eq!(Features::empty().header_len(), 10);
    }

    #[test]
    fn clause_5_1_6_header_is_20_bytes_with_hash_report() {
        for other in [Features::VERSION_1, Features::MRG_RXBUF, Features::empty()] {
            assert_eq!((Features::HASH_REPORT | other).header_len(), 20);
        }
    }

    #[test]
    fn clause_5_1_3_1_multiqueue_needs_the_control_queue() {
        let without = Features::MULTIQUEUE - Features::CTRL_VQ;
        // The specification only says that HASH_REPORT should not come alone (5.1.4.2), and the
        // header is longer all the same.
        assert_eq!(without.consistent(), Features::HASH_REPORT);
        assert_eq!(Features::MULTIQUEUE.consistent(), Features::MULTIQUEUE);
        assert!(!Features::DEVICE.intersects(Features::MULTIQUEUE));
    }

    #[test]
    fn uso_needs_both_families() {
        let one = Features::GUEST_CSUM | Features::GUEST_USO4;
        assert!(!one.guest_offloads().contains(Offloads::USO));
        assert!((one | Features::GUEST_USO6).guest_offloads().contains(Offloads::USO));
    }

    #[test]
    fn unknown_bits_have_names_too() {
        let names = Features::from_bits_retain(1 | 1 << 63).names();
        assert_eq!(names, ["CSUM", "BIT_63"]);
    }
}
