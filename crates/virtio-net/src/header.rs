//! The virtual header (`virtio_net_hdr`) in every length that can be negotiated (VIRTIO 1.4,
//! 5.1.6): 10 bytes in the legacy interface, 12 as a rule, 20 with hash reports.
//!
//! These are pure functions. Queues store the length that was negotiated, handle 12 bytes
//! themselves on their fast path, and call this module for the other two.

use ringferry_memory::ReadSlice;
use ringferry_packet::flow::PacketHash;
use ringferry_packet::vnet::Header;

/// Length with VIRTIO_NET_F_HASH_REPORT, in bytes, on transmitqs too.
pub(crate) const HASHED_LEN: usize = 20;

/// Encodes the longest form, whose first 10 or 12 bytes are the shorter forms.
#[inline]
pub(crate) fn to_bytes(header: &Header, hash: PacketHash) -> [u8; HASHED_LEN] {
    let mut bytes = [0; HASHED_LEN];
    bytes[..Header::LEN].copy_from_slice(&header.to_bytes());
    bytes[12..16].copy_from_slice(&hash.value.to_le_bytes());
    // Two bytes of padding follow.
    bytes[16..18].copy_from_slice(&hash.report.to_le_bytes());
    bytes
}

/// Returns the hash that the device reports in the header `front`; `None` if the header is
/// incomplete or the report type is not defined.
#[inline]
pub(crate) fn hash(front: ReadSlice<'_>) -> Option<u32> {
    let [v0, v1, v2, v3, r0, r1] = front.skip(Header::LEN).array()?;
    let (value, report) = (u32::from_le_bytes([v0, v1, v2, v3]), u16::from_le_bytes([r0, r1]));
    PacketHash { value, report }.get()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clause_5_1_6_hash_fields_follow_num_buffers() {
        let header = Header { num_buffers: 0x0102, ..Header::default() };
        let bytes = to_bytes(&header, PacketHash { value: 0x0403_0201, report: 9 });
        assert_eq!(bytes, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 1, 1, 2, 3, 4, 9, 0, 0, 0]);
        assert_eq!(hash(ReadSlice::from(&bytes[..])), Some(0x0403_0201));
    }

    #[test]
    fn clause_5_1_6_4_5_reports_that_are_not_defined_say_nothing() {
        for report in [0, 10, 0x0100, u16::MAX] {
            let bytes = to_bytes(&Header::default(), PacketHash { value: 7, report });
            assert_eq!(hash(ReadSlice::from(&bytes[..])), None, "{report}");
        }
        let bytes = to_bytes(&Header::default(), PacketHash { value: 7, report: 1 });
        assert_eq!(hash(ReadSlice::from(&bytes[..17])), None, "cut short");
    }
}
