//! VLANs: classifies a frame into one, decides by which ports it may leave, and changes its tag for them
//! (IEEE 802.1Q, 6.9).
//!
//! Only customer tags (0x8100) count. A service tag (802.1ad) is payload, as it is to a bridge for customers,
//! and so is everything behind the first tag. A *priority tag*, that of VLAN 0, says nothing about the VLAN:
//! such a frame belongs where an untagged one does. VLAN 0 itself is that of frames nobody has put into
//! another, so it cannot be written as a tag: it leaves only by ports where it is the native one.
//!
//! **VLAN hopping.** Bytes that are payload here may be a tag to the next hop: Linux removes a priority tag
//! of either type, and then uses the tag behind it. Four rules keep a frame in its VLAN there, too. A
//! priority tag in front of another tag is dropped where it comes in, at every port. A port with VLAN rules
//! takes and sends no frame without a tag of its own whose payload begins with [one](TAG_TYPES), and sends no
//! priority tags, and takes no frame with the tag of its native VLAN in front of another. A tag is not removed in
//! front of another one.

use arrayvec::ArrayVec;
use ringferry_packet::ether::{MIN_FRAME, TYPE_SERVICE_VLAN, TYPE_VLAN};
use ringferry_packet::frame::PREFIX;
use ringferry_packet::vnet::Header;

use crate::rules::{MAX_VID, Vid, Vlans};

/// Offset of the tag: behind the addresses, in front of what was the EtherType.
const TAG_AT: usize = 12;
/// Length of a tag in bytes: TPID and TCI.
const TAG_LEN: usize = 4;
/// Mask of the VID in the TCI; the other bits are priority and drop eligibility.
const VID: u16 = 0x0fff;
/// EtherTypes that some device takes for a tag: those of 802.1Q and 802.1ad, and those that were used before
/// there was 802.1ad.
pub(super) const TAG_TYPES: [u16; 5] = [TYPE_VLAN, TYPE_SERVICE_VLAN, 0x9100, 0x9200, 0x9300];
/// Length of the shortest frame with a tag, in bytes.
const MIN_TAGGED: usize = MIN_FRAME + TAG_LEN;

/// The VLANs whose tag a port takes and sends.
#[derive(Clone, Debug)]
enum Allowed {
    All,
    Some(Box<[u64; 64]>),
}

/// A port's VLAN membership.
#[derive(Clone, Debug)]
pub(crate) struct Membership {
    allowed: Allowed,
    /// The VLAN of frames without a tag, if they are allowed.
    native: Option<Vid>,
    /// True if there are VLANs that the port must not reach, or only as its native one.
    limited: bool,
}

/// The membership of a port without rules: a trunk of all VLANs.
pub(crate) static EVERYWHERE: Membership =
    Membership { allowed: Allowed::All, native: Some(0), limited: false };

/// The tagging of a VLAN's frames where they leave by a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Egress {
    /// Without a tag, not even one for the priority alone: by a port with VLAN rules.
    Untagged,
    /// As it came, by a port that carries whatever tags there are: the frame has none, or one for the priority alone.
    AsIs,
    /// With the tag of its VLAN.
    Tagged,
}

/// The VLAN of a frame that came in, and the tag that it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tagged {
    /// The VLAN that the frame belongs to.
    pub(crate) vid: Vid,
    /// The tag control information of the frame's tag, if it has one: priority, drop eligibility, and `vid` or 0.
    pub(crate) wire: Option<u16>,
}

/// The change to a frame's tag where it leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Retag {
    /// Leave the frame as it is.
    Keep,
    /// Remove the tag.
    Strip,
    /// Insert a tag with this tag control information.
    Insert(u16),
    /// Overwrite the tag control information of the tag with this.
    Replace(u16),
}

/// The first bytes of a frame with another tag.
pub(crate) type Head = ArrayVec<u8, { PREFIX + TAG_LEN }>;

impl Membership {
    pub(crate) fn new(vlans: &Vlans) -> Self {
        let set = |vids: &[Vid]| {
            let mut set = Box::new([0; 64]);
            for vid in vids.iter().filter(|vid| (1..=MAX_VID).contains(*vid)) {
                set[usize::from(vid / 64)] |= 1 << (vid % 64);
            }
            Allowed::Some(set)
        };
        let limited = *vlans != Vlans::default();
        match vlans {
            Vlans::Access(vid) => Self { allowed: set(&[]), native: Some(*vid), limited },
            Vlans::Trunk { allowed, native } => {
                Self { allowed: allowed.as_deref().map_or(Allowed::All, set), native: *native, limited }
            }
        }
    }

    /// Returns the VLAN of a frame that came in by this port and begins with `prefix`; `None` if the port is
    /// not in it, or if the frame has no tag and needs one, half a tag, the reserved VID 4095, or a tag that
    /// the next hop could take for its VLAN.
    ///
    /// A checksum that is still to be filled in must not lie in the tag, or the frame could change its VLAN
    /// after this check: such a frame is in none.
    #[inline]
    pub(crate) fn classify(&self, prefix: &[u8], header: &Header) -> Option<Tagged> {
        match tci(prefix) {
            Tci::None if self.limited && is_tag(prefix, TAG_AT) => None,
            Tci::None => Some(Tagged { vid: self.native?, wire: None }),
            Tci::Cut => None,
            Tci::Is(tci) => self.classify_tagged(tci, prefix, header),
        }
    }

    /// Does the same for a frame with a tag. Apart, as frames without one are to pay nothing for it.
    #[inline(never)]
    fn classify_tagged(&self, tci: u16, prefix: &[u8], header: &Header) -> Option<Tagged> {
        if header.needs_csum() && usize::from(header.csum_start) < MIN_TAGGED {
            return None;
        }
        let vid = match tci & VID {
            0 if is_tag(prefix, TAG_AT + TAG_LEN) => return None,
            0 => self.native?,
            // Where frames of its native VLAN have no tag, one that has it and another one behind it wants to hop.
            vid if self.limited && self.native == Some(vid) && is_tag(prefix, TAG_AT + TAG_LEN) => {
                return None;
            }
            vid if self.has(vid) => vid,
            _ => return None,
        };
        Some(Tagged { vid, wire: Some(tci) })
    }

    /// Returns the tagging with which a frame that begins with `prefix` leaves by this port; `None` if it
    /// must not, as the port is not in its VLAN, or as it would leave without a tag and be taken for one of
    /// another VLAN.
    #[inline]
    pub(crate) fn egress(&self, tagged: Tagged, prefix: &[u8]) -> Option<Egress> {
        let egress = self.leaves(tagged.vid)?;
        let hops = egress == Egress::Untagged && tagged.wire.is_none() && is_tag(prefix, TAG_AT);
        (!hops).then_some(egress)
    }

    /// Returns the tagging of this VLAN's frames at this port; `None` if the port is not in the VLAN.
    #[inline]
    pub(crate) fn leaves(&self, vid: Vid) -> Option<Egress> {
        if self.native == Some(vid) {
            Some(if self.limited { Egress::Untagged } else { Egress::AsIs })
        } else if vid != 0 && self.has(vid) {
            Some(Egress::Tagged)
        } else {
            None
        }
    }

    #[inline]
    fn has(&self, vid: Vid) -> bool {
        match &self.allowed {
            Allowed::All => vid <= MAX_VID,
            Allowed::Some(set) => {
                let words: &[u64; 64] = set;
                words.get(usize::from(vid / 64)).is_some_and(|word| word >> (vid % 64) & 1 != 0)
                    || self.native == Some(vid)
            }
        }
    }
}

enum Tci {
    None,
    /// The frame ends within its tag.
    Cut,
    Is(u16),
}

#[inline]
fn tci(prefix: &[u8]) -> Tci {
    match prefix.get(TAG_AT..TAG_AT + 2) {
        Some(kind) if *kind == TYPE_VLAN.to_be_bytes() => match prefix.get(TAG_AT + 2..MIN_TAGGED) {
            Some(&[high, low, _, _]) => Tci::Is(u16::from_be_bytes([high, low])),
            _ => Tci::Cut,
        },
        _ => Tci::None,
    }
}

/// Returns the VLAN identifier in a frame's tag, if it has one; 0 is that of a tag for its priority alone.
pub(crate) fn tag(prefix: &[u8]) -> Option<Vid> {
    match tci(prefix) {
        Tci::Is(tci) => Some(tci & 0xfff),
        Tci::None | Tci::Cut => None,
    }
}

/// Returns true if a frame begins with anything that some device takes for a tag.
#[inline]
pub(crate) fn is_tagged(prefix: &[u8]) -> bool {
    is_tag(prefix, TAG_AT)
}

/// Returns true if anything that some device takes for a tag begins at this offset.
#[inline]
fn is_tag(prefix: &[u8], at: usize) -> bool {
    matches!(prefix.get(at..at + 2), Some(&[high, low]) if TAG_TYPES.contains(&u16::from_be_bytes([high, low])))
}

impl Tagged {
    /// Returns true if the frame is in another VLAN than its tag, or the lack of one, says: it came by a port
    /// with rules.
    #[inline]
    pub(crate) fn is_foreign(self) -> bool {
        self.vid != self.wire.map_or(0, |tci| tci & VID)
    }

    /// Returns the change to the frame's tag where it leaves.
    #[inline]
    pub(crate) fn retag(self, out: Egress) -> Retag {
        match (out, self.wire) {
            (Egress::AsIs, _) | (Egress::Untagged, None) => Retag::Keep,
            (Egress::Untagged, Some(_)) => Retag::Strip,
            (Egress::Tagged, None) => Retag::Insert(self.vid),
            (Egress::Tagged, Some(tci)) if tci & VID == self.vid => Retag::Keep,
            (Egress::Tagged, Some(tci)) => Retag::Replace(tci & !VID | self.vid),
        }
    }
}

impl Retag {
    /// Returns true if a frame that begins with `prefix` has a tag after this change.
    #[inline]
    pub(crate) fn leaves_tagged(self, prefix: &[u8]) -> bool {
        match self {
            Retag::Keep => is_tagged(prefix),
            // A tag is only removed if no other is behind it.
            Retag::Strip => false,
            Retag::Insert(_) | Retag::Replace(_) => true,
        }
    }

    /// Applies the change to a frame whose first bytes are `first` (at least 18 of them, or the whole frame).
    /// Writes the new beginning of the frame into `out`, moves the offsets in `header`, and returns how many
    /// bytes of `first` are in `out`; the rest of the frame is to follow `out`. Returns `None`, and does
    /// nothing, if the frame is too short, if `header` does not fit, or if a second tag would come to light
    /// that a receiver would take for the frame's VLAN ("double tagging").
    pub(crate) fn apply(self, header: &mut Header, first: &[u8], out: &mut Head) -> Option<usize> {
        let first = &first[..first.len().min(PREFIX)];
        let tagged = matches!(tci(first), Tci::Is(_));
        let (tag, skip, moved) = match self {
            Retag::Keep => (None, 0, *header),
            Retag::Insert(tci) if first.len() >= MIN_FRAME => (Some(tci), 0, forward(*header)?),
            Retag::Strip if tagged && !is_tag(first, TAG_AT + TAG_LEN) => (None, TAG_LEN, back(*header)?),
            Retag::Replace(tci) if tagged => (Some(tci), TAG_LEN, *header),
            _ => return None,
        };
        let (addresses, rest) = first.split_at_checked(TAG_AT)?;
        out.clear();
        // `out` has room: it gets at most the prefix and a tag.
        out.try_extend_from_slice(addresses).ok()?;
        if let Some(tci) = tag {
            let ([a, b], [c, d]) = (TYPE_VLAN.to_be_bytes(), tci.to_be_bytes());
            out.try_extend_from_slice(&[a, b, c, d]).ok()?;
        }
        out.try_extend_from_slice(&rest[skip..]).ok()?;
        *header = moved;
        Some(first.len())
    }
}

/// Returns the header of a frame that got a tag: all offsets move forward.
fn forward(mut header: Header) -> Option<Header> {
    if header.needs_csum() {
        header.csum_start = header.csum_start.checked_add(TAG_LEN as u16)?;
    }
    if header.hdr_len != 0 {
        header.hdr_len = header.hdr_len.checked_add(TAG_LEN as u16)?;
    }
    Some(header)
}

/// Returns the header of a frame that lost its tag. The bytes to be summed must lie behind it; `hdr_len` is
/// only a hint.
fn back(mut header: Header) -> Option<Header> {
    if header.needs_csum() {
        header.csum_start =
            header.csum_start.checked_sub(TAG_LEN as u16).filter(|start| usize::from(*start) >= MIN_FRAME)?;
    }
    header.hdr_len = header.hdr_len.saturating_sub(TAG_LEN as u16);
    Some(header)
}

#[cfg(test)]
mod tests {
    use proptest::collection::{btree_set, vec};
    use proptest::prelude::*;
    use ringferry_packet::vnet::F_NEEDS_CSUM;

    use super::*;

    const ADDRESSES: [u8; 12] = [2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2];
    const PLAIN: Header = Header::NONE;

    /// Builds a frame with these tags (type, TCI) in front of `payload`, which begins with an EtherType.
    fn frame(tags: &[(u16, u16)], payload: &[u8]) -> Vec<u8> {
        let mut frame = ADDRESSES.to_vec();
        for (kind, tci) in tags {
            frame.extend(kind.to_be_bytes());
            frame.extend(tci.to_be_bytes());
        }
        frame.extend(payload);
        frame
    }

    fn untagged() -> Vec<u8> {
        frame(&[], &[8, 0, 0x45, 0])
    }

    fn tagged(tci: u16) -> Vec<u8> {
        frame(&[(TYPE_VLAN, tci)], &[8, 0, 0x45, 0])
    }

    fn trunk(allowed: Option<&[Vid]>, native: Option<Vid>) -> Membership {
        Membership::new(&Vlans::Trunk { allowed: allowed.map(<[Vid]>::to_vec), native })
    }

    fn vid(port: &Membership, frame: &[u8]) -> Option<Vid> {
        port.classify(frame, &PLAIN).map(|tagged| tagged.vid)
    }

    fn retagged(retag: Retag, header: &mut Header, frame: &[u8]) -> Option<Vec<u8>> {
        let mut head = Head::new();
        let used = retag.apply(header, frame, &mut head)?;
        Some([&head, &frame[used..]].concat())
    }

    #[test]
    fn a_port_without_rules_carries_every_tag_as_it_is() {
        let port = &EVERYWHERE;
        for (frame, vid) in [(untagged(), 0), (tagged(0x6000), 0), (tagged(0xe005), 5), (tagged(4094), 4094)]
        {
            let tagged = port.classify(&frame, &PLAIN).unwrap();
            assert_eq!(tagged.vid, vid);
            assert_eq!(tagged.retag(port.leaves(vid).unwrap()), Retag::Keep);
        }
        let service = frame(&[(0x88a8, 5)], &[8, 0]);
        assert_eq!(port.classify(&service, &PLAIN), Some(Tagged { vid: 0, wire: None }));
    }

    /// Linux takes off a priority tag of either type and goes by the tag behind it.
    #[test]
    fn m1_no_tag_hides_behind_a_priority_tag() {
        let ports = [EVERYWHERE.clone(), Membership::new(&Vlans::Access(7)), trunk(Some(&[2]), Some(7))];
        for (port, behind) in ports.iter().flat_map(|port| TAG_TYPES.map(|behind| (port, behind))) {
            let hidden = frame(&[(TYPE_VLAN, 0xe000), (behind, 20)], &[8, 0, 0x45, 0]);
            assert_eq!(vid(port, &hidden), None, "{behind:#x}");
            let hidden = frame(&[(TYPE_VLAN, 0), (behind, 0), (TYPE_VLAN, 20)], &[8, 0, 0x45, 0]);
            assert_eq!(vid(port, &hidden), None, "{behind:#x}");
        }
    }

    #[test]
    fn m1_a_port_with_vlan_rules_takes_no_foreign_tag_for_payload() {
        let limited = [
            Membership::new(&Vlans::Access(0)),
            Membership::new(&Vlans::Access(7)),
            trunk(Some(&[2]), Some(7)),
            trunk(None, Some(7)),
        ];
        for (port, kind) in limited.iter().flat_map(|port| TAG_TYPES.map(|kind| (port, kind))).skip(1) {
            let Some(native) = port.native else { panic!("all have one") };
            for tci in [0, 20].into_iter().filter(|_| kind != TYPE_VLAN) {
                let foreign = frame(&[(kind, tci), (TYPE_VLAN, 20)], &[8, 0, 0x45, 0]);
                assert_eq!(vid(port, &foreign), None, "{kind:#x}");
                let from_elsewhere = Tagged { vid: native, wire: None };
                assert_eq!(port.egress(from_elsewhere, &foreign), None, "{kind:#x}");
                assert_eq!(EVERYWHERE.egress(Tagged { vid: 0, wire: None }, &foreign), Some(Egress::AsIs));
            }
            assert_eq!(port.egress(Tagged { vid: native, wire: None }, &untagged()), Some(Egress::Untagged));
        }
    }

    #[test]
    fn m1_no_tag_is_taken_off_in_front_of_another() {
        for kind in TAG_TYPES {
            let double = frame(&[(TYPE_VLAN, 9), (kind, 0), (TYPE_VLAN, 20)], &[8, 0, 0x45, 0]);
            assert_eq!(retagged(Retag::Strip, &mut PLAIN.clone(), &double), None, "{kind:#x}");
        }
    }

    /// IEEE 802.1Q, table 9-2, reserves VID 4095.
    #[test]
    fn the_reserved_vlan_is_nobodys() {
        for port in [EVERYWHERE.clone(), trunk(Some(&[4095]), Some(4095)), Membership::new(&Vlans::Access(1))]
        {
            assert_eq!(vid(&port, &tagged(4095)).filter(|vid| *vid <= MAX_VID), None);
        }
    }

    #[test]
    fn an_access_port_takes_and_gives_frames_without_tags() {
        let port = Membership::new(&Vlans::Access(7));
        assert_eq!(vid(&port, &untagged()), Some(7));
        assert_eq!(vid(&port, &tagged(0xe000)), Some(7), "a priority tag");
        assert_eq!(vid(&port, &tagged(7)), Some(7));
        assert_eq!(vid(&port, &tagged(8)), None);
        assert_eq!((port.leaves(7), port.leaves(8), port.leaves(0)), (Some(Egress::Untagged), None, None));
    }

    #[test]
    fn a_trunk_port_takes_what_it_is_in() {
        let port = trunk(Some(&[2, 63, 64, 4094]), Some(9));
        for in_it in [2, 63, 64, 4094] {
            assert_eq!((vid(&port, &tagged(in_it)), port.leaves(in_it)), (Some(in_it), Some(Egress::Tagged)));
        }
        for out in [1, 3, 62, 65, 4093] {
            assert_eq!((vid(&port, &tagged(out)), port.leaves(out)), (None, None));
        }
        assert_eq!((vid(&port, &untagged()), vid(&port, &tagged(9))), (Some(9), Some(9)));
        let strict = trunk(None, None);
        assert_eq!((vid(&strict, &untagged()), vid(&strict, &tagged(0))), (None, None));
        assert_eq!(vid(&strict, &tagged(1)), Some(1));
        assert_eq!(strict.leaves(0), None, "VLAN 0 cannot be written as a tag");
    }

    #[test]
    fn half_a_tag_is_none() {
        let whole = tagged(5);
        for len in 14..18 {
            assert_eq!(vid(&EVERYWHERE, &whole[..len]), None, "{len}");
        }
        assert_eq!(vid(&EVERYWHERE, &whole[..18]), Some(5));
    }

    #[test]
    fn tags_are_changed_and_priorities_kept() {
        let cases = [
            (untagged(), Egress::Tagged, 9, tagged(9)),
            (tagged(0xf000), Egress::Tagged, 9, tagged(0xf009)),
            (tagged(0xf009), Egress::Untagged, 9, untagged()),
            (tagged(0xf000), Egress::Untagged, 9, untagged()),
            (tagged(0xf009), Egress::Tagged, 9, tagged(0xf009)),
        ];
        for (frame, egress, vid, expected) in cases {
            let port = trunk(None, Some(9));
            let tagged = port.classify(&frame, &PLAIN).unwrap();
            assert_eq!(tagged.vid, vid);
            assert_eq!(retagged(tagged.retag(egress), &mut PLAIN.clone(), &frame), Some(expected));
        }
    }

    #[test]
    fn positions_in_the_header_move_with_the_frame() {
        let header = Header {
            flags: F_NEEDS_CSUM,
            gso_type: 1,
            hdr_len: 54,
            gso_size: 1,
            csum_start: 34,
            csum_offset: 16,
            num_buffers: 0,
        };
        let mut moved = header;
        let longer = retagged(Retag::Insert(5), &mut moved, &[1; 100]).unwrap();
        assert_eq!((longer.len(), moved), (104, Header { hdr_len: 58, csum_start: 38, ..header }));
        retagged(Retag::Strip, &mut moved, &longer).unwrap();
        assert_eq!(moved, header);
        let mut plain = Header { num_buffers: 1, ..PLAIN };
        retagged(Retag::Insert(5), &mut plain, &[1; 100]).unwrap();
        assert_eq!(plain, Header { num_buffers: 1, ..PLAIN }, "what means nothing does not move");
    }

    #[test]
    fn what_does_not_fit_is_left_alone() {
        let header = |csum_start, hdr_len| Header { flags: F_NEEDS_CSUM, csum_start, hdr_len, ..PLAIN };
        let whole = tagged(5);
        let cases = [
            (Retag::Insert(5), &untagged()[..13], header(34, 0)),
            (Retag::Insert(5), &untagged()[..14], header(65532, 0)),
            (Retag::Insert(5), &untagged()[..14], header(34, 65532)),
            (Retag::Strip, &whole[..17], header(34, 0)),
            (Retag::Strip, &whole[..], header(17, 0)),
            (Retag::Strip, &untagged()[..], header(34, 0)),
            (Retag::Replace(5), &untagged()[..], header(34, 0)),
            (Retag::Replace(5), &whole[..17], header(34, 0)),
            (Retag::Keep, &whole[..11], header(34, 0)),
        ];
        for (retag, frame, header) in cases {
            let mut after = header;
            let mut head = Head::new();
            assert_eq!(
                (retag.apply(&mut after, frame, &mut head), after, head.len()),
                (None, header, 0),
                "{retag:?}"
            );
        }
    }

    /// A checksum that software or a NIC has yet to fill in is two bytes that the sender chooses.
    #[test]
    fn checksum_cannot_be_filled_into_the_tag() {
        let header =
            |csum_start, csum_offset| Header { flags: F_NEEDS_CSUM, csum_start, csum_offset, ..PLAIN };
        for port in [EVERYWHERE.clone(), Membership::new(&Vlans::Access(5))] {
            assert_eq!(port.classify(&tagged(5), &header(14, 0)), None);
            assert_eq!(port.classify(&tagged(5), &header(17, 40)), None);
            assert!(port.classify(&tagged(5), &header(18, 0)).is_some());
            assert!(port.classify(&untagged(), &header(14, 0)).is_some());
        }
    }

    /// The sender of a frame with two tags must not get it into the VLAN of the second by having the first removed.
    #[test]
    fn double_tagging_does_not_hop() {
        let double = frame(&[(TYPE_VLAN, 5), (TYPE_VLAN, 6)], &[8, 0]);
        assert_eq!(vid(&Membership::new(&Vlans::Access(5)), &double), None, "its sender is named");
        assert_eq!(vid(&trunk(None, Some(5)), &double), None);
        let tagged = trunk(None, None).classify(&double, &PLAIN).unwrap();
        let retag = tagged.retag(trunk(None, Some(5)).leaves(5).unwrap());
        assert_eq!(retag, Retag::Strip);
        assert_eq!(retagged(retag, &mut PLAIN.clone(), &double), None);
        let kept = tagged.retag(trunk(None, None).leaves(5).unwrap());
        assert_eq!(retagged(kept, &mut PLAIN.clone(), &double), Some(double));
    }

    fn membership() -> impl Strategy<Value = Vlans> {
        let vid = || 0..8u16;
        let several = (proptest::option::of(btree_set(vid(), 0..6)), proptest::option::of(vid()));
        prop_oneof![
            1 => vid().prop_map(Vlans::Access),
            3 => several.prop_map(|(allowed, native)| Vlans::Trunk { allowed: allowed.map(|set| set.into_iter().collect()), native }),
        ]
    }

    /// Oracle: applies the rules word by word.
    fn member(vlans: &Vlans, vid: Vid) -> Option<Egress> {
        match vlans {
            Vlans::Access(own) => (*own == vid).then_some(Egress::Untagged),
            Vlans::Trunk { native, .. } if *native == Some(vid) => {
                Some(if *vlans == Vlans::default() { Egress::AsIs } else { Egress::Untagged })
            }
            Vlans::Trunk { allowed, .. } => (vid != 0
                && allowed.as_ref().is_none_or(|allowed| allowed.contains(&vid)))
            .then_some(Egress::Tagged),
        }
    }

    proptest! {
        /// The VLAN of a frame is the one that the next switch sees it in, and all else of it stays.
        #[test]
        fn frames_stay_in_their_vlan(
            from in membership(),
            to in membership(),
            tags in vec((prop_oneof![4 => Just(TYPE_VLAN), 1 => Just(0x88a8u16)], 0..8u16, 0..16u16), 0..3),
            payload in vec(any::<u8>(), 2..120),
        ) {
            let tags: Vec<_> = tags.into_iter().map(|(kind, vid, priority)| (kind, priority << 12 | vid)).collect();
            // Only `tags` decides whether the payload looks like a tag.
            let payload = [&[8, 0], &payload[..]].concat();
            let whole = frame(&tags, &payload);
            let wire = tags.first().filter(|(kind, _)| *kind == TYPE_VLAN).map(|(_, tci)| *tci);
            let native = match &from { Vlans::Access(vid) => Some(*vid), Vlans::Trunk { native, .. } => *native };
            let foreign = wire.is_none() && !tags.is_empty();
            let expected = match wire.map(|tci| tci & VID) {
                None if foreign && from != Vlans::default() => None,
                Some(0) if tags.len() > 1 => None,
                Some(vid) if Some(vid) == native && tags.len() > 1 && from != Vlans::default() => None,
                None | Some(0) => native,
                Some(vid) => Some(vid).filter(|vid| member(&from, *vid).is_some()),
            };
            let tagged = Membership::new(&from).classify(&whole[..whole.len().min(PREFIX)], &PLAIN);
            prop_assert_eq!(tagged, expected.map(|vid| Tagged { vid, wire }));
            let Some(tagged) = tagged else { return Ok(()) };
            let to_port = Membership::new(&to);
            prop_assert_eq!(to_port.leaves(tagged.vid), member(&to, tagged.vid));
            let Some(egress) = to_port.egress(tagged, &whole) else {
                let hops = foreign && member(&to, tagged.vid) == Some(Egress::Untagged);
                prop_assert!(hops || member(&to, tagged.vid).is_none());
                return Ok(());
            };
            let retag = tagged.retag(egress);
            let Some(after) = retagged(retag, &mut PLAIN.clone(), &whole) else {
                prop_assert!(retag == Retag::Strip && tags.len() > 1);
                return Ok(());
            };
            let there = to_port.classify(&after, &PLAIN).unwrap();
            prop_assert_eq!(there.vid, tagged.vid);
            prop_assert_eq!(there.wire.is_some_and(|tci| tci & VID != 0), egress == Egress::Tagged);
            if let (Some(before), Some(now)) = (wire, there.wire) {
                prop_assert_eq!(before & !VID, now & !VID);
            }
            let inner = |frame: &[u8], tagged: Tagged| frame[if tagged.wire.is_some() { 16 } else { 12 }..].to_vec();
            prop_assert_eq!(inner(&after, there), inner(&whole, tagged));
            prop_assert_eq!(&after[..12], &ADDRESSES);
            if egress == Egress::Untagged {
                prop_assert!(!is_tag(&after, TAG_AT), "the next hop would go by it");
            }
        }

        #[test]
        fn any_bytes_do_no_harm(frame in vec(any::<u8>(), 0..100), bytes: [u8; 12], tci: u16, vid: u16) {
            let mut header = Header::from_bytes(&bytes);
            let _ = EVERYWHERE.classify(&frame, &header);
            let _ = trunk(Some(&[vid]), Some(vid)).leaves(vid);
            for retag in [Retag::Keep, Retag::Strip, Retag::Insert(tci), Retag::Replace(tci)] {
                let _ = retagged(retag, &mut header, &frame);
            }
        }
    }
}
