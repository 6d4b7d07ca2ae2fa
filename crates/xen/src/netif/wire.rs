//! Slots of the transmit and receive rings, as plain values (Xen's `io/netif.h`).
//!
//! A slot is loaded once, as words, and decoded here; nothing of it is read again. Encoding fills
//! the whole slot, so neither its previous content nor memory of ours is disclosed (XSA-216).

use bitflags::bitflags;

use crate::domain::PAGE;
use crate::grant::GrantRef;

/// A raw slot of a transmit ring.
pub type TxSlot = [u32; 3];
/// A raw slot of a receive ring.
pub type RxSlot = [u32; 2];

/// Number of data slots of one packet that every back end accepts (`XEN_NETIF_NR_SLOTS_MIN`).
/// Extras do not count.
pub const MAX_SLOTS: usize = 18;

/// Largest packet in bytes: sizes are 16 bits wide.
pub const MAX_PACKET: usize = 65535;

bitflags! {
    /// Flags of a transmit request (`XEN_NETTXF_*`). Undefined bits are kept and ignored.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct TxFlags: u16 {
        /// The checksum field holds only the pseudo header's sum.
        const CSUM_BLANK = 1;
        /// The data is known to be good.
        const DATA_VALIDATED = 2;
        /// The packet continues in the next slot.
        const MORE_DATA = 4;
        /// The next slot holds an extra.
        const EXTRA_INFO = 8;
        const _ = !0;
    }

    /// Flags of a receive response (`XEN_NETRXF_*`): the first two are swapped.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct RxFlags: u16 {
        /// The data is known to be good.
        const DATA_VALIDATED = 1;
        /// The checksum field holds only the pseudo header's sum.
        const CSUM_BLANK = 2;
        /// The packet continues in the next slot.
        const MORE_DATA = 4;
        /// The next slot holds an extra.
        const EXTRA_INFO = 8;
        const _ = !0;
    }
}

/// Status of a packet that was handled (`XEN_NETIF_RSP_OKAY`).
pub const OKAY: i16 = 0;
/// Status of a packet that was refused (`XEN_NETIF_RSP_ERROR`).
pub const ERROR: i16 = -1;
/// Status of a packet that was dropped (`XEN_NETIF_RSP_DROPPED`).
pub const DROPPED: i16 = -2;
/// Status in the response to a slot that held an extra (`XEN_NETIF_RSP_NULL`).
pub const NULL: i16 = 1;

/// A piece of a packet that the front end transmits, within one page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TxRequest {
    /// Grant reference of the page.
    pub gref: GrantRef,
    /// Offset of the first byte in the page.
    pub offset: u16,
    /// Flags of the slot, of which the first slot's apply to the packet.
    pub flags: TxFlags,
    /// Identifier that the response repeats.
    pub id: u16,
    /// Size in bytes: of the whole packet in its first slot, of this piece in the others.
    pub size: u16,
}

impl TxRequest {
    /// Decodes a request from a raw slot.
    #[inline]
    #[must_use]
    pub const fn from_slot([gref, middle, last]: TxSlot) -> Self {
        Self {
            gref: GrantRef(gref),
            offset: middle as u16,
            flags: TxFlags::from_bits_retain((middle >> 16) as u16),
            id: last as u16,
            size: (last >> 16) as u16,
        }
    }

    /// Encodes the request to a raw slot.
    #[inline]
    #[must_use]
    pub const fn to_slot(self) -> TxSlot {
        [self.gref.0, pair(self.offset, self.flags.bits()), pair(self.id, self.size)]
    }
}

/// The response to a slot of a transmit ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TxResponse {
    /// Identifier of the request; meaningless for an extra.
    pub id: u16,
    /// [`OKAY`], [`ERROR`], [`DROPPED`] or [`NULL`].
    pub status: i16,
}

impl TxResponse {
    /// Decodes a response from a raw slot.
    #[inline]
    #[must_use]
    pub const fn from_slot([word, ..]: TxSlot) -> Self {
        Self { id: word as u16, status: (word >> 16) as i16 }
    }

    /// Encodes the response to a raw slot.
    #[inline]
    #[must_use]
    pub const fn to_slot(self) -> TxSlot {
        [pair(self.id, self.status as u16), 0, 0]
    }
}

/// A page that the front end posts to be filled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RxRequest {
    /// Identifier that the response repeats.
    pub id: u16,
    /// Grant reference of the page.
    pub gref: GrantRef,
}

impl RxRequest {
    /// Decodes a request from a raw slot.
    #[inline]
    #[must_use]
    pub const fn from_slot([word, gref]: RxSlot) -> Self {
        Self { id: word as u16, gref: GrantRef(gref) }
    }

    /// Encodes the request to a raw slot.
    #[inline]
    #[must_use]
    pub const fn to_slot(self) -> RxSlot {
        [self.id as u32, self.gref.0]
    }
}

/// A page that was filled. The response lies in the same ring slot as its request did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RxResponse {
    /// Identifier that the request carried.
    pub id: u16,
    /// Offset of the first byte in the page.
    pub offset: u16,
    /// Flags of the slot, of which the first slot's apply to the packet.
    pub flags: RxFlags,
    /// Number of bytes in this page, or negative: [`ERROR`] and the like.
    pub status: i16,
}

impl RxResponse {
    /// Decodes a response from a raw slot.
    #[inline]
    #[must_use]
    pub const fn from_slot([low, high]: RxSlot) -> Self {
        Self {
            id: low as u16,
            offset: (low >> 16) as u16,
            flags: RxFlags::from_bits_retain(high as u16),
            status: (high >> 16) as i16,
        }
    }

    /// Encodes the response to a raw slot.
    #[inline]
    #[must_use]
    pub const fn to_slot(self) -> RxSlot {
        [pair(self.id, self.offset), pair(self.flags.bits(), self.status as u16)]
    }

    /// Returns the number of bytes in this page; `None` for an error, or when the peer claims bytes
    /// outside the page.
    #[inline]
    #[must_use]
    #[expect(
        clippy::len_without_is_empty,
        reason = "a response of no bytes is no collection without elements"
    )]
    pub fn len(self) -> Option<usize> {
        let len = usize::try_from(self.status).ok()?;
        (usize::from(self.offset) + len <= PAGE).then_some(len)
    }
}

/// The `kind` of an [`Extra::Gso`] for TCP over IPv4 (`XEN_NETIF_GSO_TYPE_TCPV4`).
pub const GSO_TCPV4: u8 = 1;
/// The `kind` of an [`Extra::Gso`] for TCP over IPv6 (`XEN_NETIF_GSO_TYPE_TCPV6`).
pub const GSO_TCPV6: u8 = 2;

const EXTRA_GSO: u8 = 1;
const EXTRA_MCAST_ADD: u8 = 2;
const EXTRA_MCAST_DEL: u8 = 3;
const EXTRA_HASH: u8 = 4;
const EXTRA_FLAG_MORE: u8 = 1;

/// An extra-info slot, which describes a packet instead of holding bytes of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extra {
    /// The packet is still to be segmented.
    Gso {
        /// Payload bytes per segment. A hostile peer can send the invalid value 0.
        size: u16,
        /// [`GSO_TCPV4`] or [`GSO_TCPV6`], or any other value from a hostile peer.
        kind: u8,
    },
    /// A command to register a multicast address; the slots carry no packet.
    MulticastAdd([u8; 6]),
    /// A command to remove a multicast address; the slots carry no packet.
    MulticastDel([u8; 6]),
    /// The hash of the packet's flow.
    Hash {
        /// Headers that were hashed (`XEN_NETIF_CTRL_HASH_TYPE_*`).
        kind: u8,
        /// Algorithm that was used (`XEN_NETIF_CTRL_HASH_ALGORITHM_*`).
        algorithm: u8,
        /// The 32-bit value of the hash.
        value: u32,
    },
}

impl Extra {
    /// Decodes the first 8 bytes of a slot, and returns true with the extra if another follows;
    /// `None` for a type that is not defined (or not offered: XDP head room).
    #[inline]
    #[must_use]
    pub const fn decode([low, high]: [u32; 2]) -> Option<(Self, bool)> {
        let [kind, flags, a, b] = low.to_le_bytes();
        let [c, d, e, f] = high.to_le_bytes();
        let extra = match kind {
            EXTRA_GSO => Self::Gso { size: u16::from_le_bytes([a, b]), kind: c },
            EXTRA_MCAST_ADD => Self::MulticastAdd([a, b, c, d, e, f]),
            EXTRA_MCAST_DEL => Self::MulticastDel([a, b, c, d, e, f]),
            EXTRA_HASH => Self::Hash { kind: a, algorithm: b, value: high },
            _ => return None,
        };
        Some((extra, flags & EXTRA_FLAG_MORE != 0))
    }

    /// Encodes the first 8 bytes of a slot; `more` announces that another extra follows.
    #[inline]
    #[must_use]
    pub const fn encode(self, more: bool) -> [u32; 2] {
        let (kind, [a, b, c, d, e, f]) = match self {
            Self::Gso { size, kind } => (EXTRA_GSO, [size as u8, (size >> 8) as u8, kind, 0, 0, 0]),
            Self::MulticastAdd(mac) => (EXTRA_MCAST_ADD, mac),
            Self::MulticastDel(mac) => (EXTRA_MCAST_DEL, mac),
            Self::Hash { kind, algorithm, value } => {
                let [c, d, e, f] = value.to_le_bytes();
                (EXTRA_HASH, [kind, algorithm, c, d, e, f])
            }
        };
        [u32::from_le_bytes([kind, more as u8, a, b]), u32::from_le_bytes([c, d, e, f])]
    }

    /// Returns a bit that is unique to this type of extra, to find out whether a packet has two of
    /// one type.
    #[inline]
    #[must_use]
    pub const fn bit(self) -> u8 {
        match self {
            Self::Gso { .. } => 1,
            Self::MulticastAdd(_) => 2,
            Self::MulticastDel(_) => 4,
            Self::Hash { .. } => 8,
        }
    }
}

#[inline]
const fn pair(low: u16, high: u16) -> u32 {
    low as u32 | (high as u32) << 16
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn bytes<const N: usize>(slot: [u32; N]) -> Vec<u8> {
        slot.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    #[test]
    fn netif_h_layout_of_requests_and_responses() {
        let request = TxRequest {
            gref: GrantRef(0x0403_0201),
            offset: 0x0605,
            flags: TxFlags::CSUM_BLANK | TxFlags::MORE_DATA,
            id: 0x0a09,
            size: 0x0c0b,
        };
        assert_eq!(bytes(request.to_slot()), [1, 2, 3, 4, 5, 6, 5, 0, 9, 10, 11, 12]);
        let response = TxResponse { id: 0x0201, status: DROPPED };
        assert_eq!(bytes(response.to_slot()), [1, 2, 0xfe, 0xff, 0, 0, 0, 0, 0, 0, 0, 0]);
        let request = RxRequest { id: 0x0201, gref: GrantRef(0x0807_0605) };
        assert_eq!(bytes(request.to_slot()), [1, 2, 0, 0, 5, 6, 7, 8]);
        let flags = RxFlags::DATA_VALIDATED | RxFlags::EXTRA_INFO;
        let response = RxResponse { id: 0x0201, offset: 0x0403, flags, status: 0x0807 };
        assert_eq!(bytes(response.to_slot()), [1, 2, 3, 4, 9, 0, 7, 8]);
    }

    #[test]
    fn netif_h_layout_of_extras() {
        let gso = Extra::Gso { size: 0x0403, kind: GSO_TCPV6 };
        assert_eq!(bytes(gso.encode(true)), [1, 1, 3, 4, 2, 0, 0, 0]);
        let hash = Extra::Hash { kind: 2, algorithm: 1, value: 0x0807_0605 };
        assert_eq!(bytes(hash.encode(false)), [4, 0, 2, 1, 5, 6, 7, 8]);
        assert_eq!(bytes(Extra::MulticastDel([1, 2, 3, 4, 5, 6]).encode(false)), [3, 0, 1, 2, 3, 4, 5, 6]);
    }

    #[test]
    fn transmit_and_receive_flags_are_swapped() {
        assert_eq!((TxFlags::CSUM_BLANK.bits(), TxFlags::DATA_VALIDATED.bits()), (1, 2));
        assert_eq!((RxFlags::CSUM_BLANK.bits(), RxFlags::DATA_VALIDATED.bits()), (2, 1));
    }

    #[test]
    fn a_response_that_ends_behind_its_page_has_no_length() {
        let response = |offset, status| RxResponse { offset, status, ..RxResponse::default() }.len();
        assert_eq!(response(0, 4096), Some(4096));
        assert_eq!(response(2, 4094), Some(4094));
        assert_eq!(response(1, 4096), None);
        assert_eq!(response(u16::MAX, 1), None);
        assert_eq!(response(0, i16::MIN), None);
        assert_eq!(response(0, ERROR), None);
    }

    proptest! {
        #[test]
        fn every_slot_survives(tx: TxSlot, rx: RxSlot) {
            prop_assert_eq!(TxRequest::from_slot(tx).to_slot(), tx);
            prop_assert_eq!(RxResponse::from_slot(rx).to_slot(), rx);
            prop_assert_eq!(RxRequest::from_slot(rx).to_slot(), [rx[0] & 0xffff, rx[1]]);
            prop_assert_eq!(TxResponse::from_slot(tx).to_slot(), [tx[0], 0, 0]);
        }

        #[test]
        fn xsa_216_an_extra_shows_its_own_fields_and_nothing_else(words: [u32; 2]) {
            match Extra::decode(words) {
                Some((extra, more)) => {
                    let again = extra.encode(more);
                    prop_assert_eq!(Extra::decode(again), Some((extra, more)));
                    prop_assert_eq!(again[0] & 0xff, words[0] & 0xff);
                    if matches!(extra, Extra::Gso { .. }) {
                        prop_assert_eq!(again[1] >> 8, 0);
                    }
                }
                None => prop_assert!(!(1..=4).contains(&(words[0] & 0xff))),
            }
        }
    }
}
