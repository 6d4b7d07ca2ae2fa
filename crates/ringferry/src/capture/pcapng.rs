//! The file format of captures: pcapng (draft-ietf-opsawg-pcapng).
//!
//! A file begins with one section header and an interface description for each port. Then come enhanced packet blocks, in the order of their time
//! stamps as far as they are known when they are written, and at the end statistics for each interface. All link types are Ethernet and all snapshot
//! lengths are equal, without which libpcap refuses a file of several interfaces; stamps are nanoseconds, which each interface says, as the default is
//! microseconds.
//!
//! | what the switch knows | where it is in a packet block |
//! |---|---|
//! | direction, unicast or multicast or broadcast, checksum not ready or valid, TCP to be segmented | `epb_flags` |
//! | queue pair | `epb_queue` |
//! | reason of a drop, virtual header, a gap before it | a comment each |
//!
//! The link types that libpcap knows have none for a virtio-net header in front of an Ethernet frame; a comment is shown by every version of Wireshark,
//! and can be filtered for (`frame.comment contains "gso=tcpv4"`).

use ringferry_control::capture::Direction;
use ringferry_control::capture::ring::{Counts, Record};
use ringferry_packet::ether;
use ringferry_packet::vnet::{
    F_DATA_VALID, F_NEEDS_CSUM, GSO_ECN, GSO_TCPV4, GSO_TCPV6, GSO_UDP, GSO_UDP_L4, Header,
};

const SECTION: u32 = 0x0a0d_0d0a;
const INTERFACE: u32 = 1;
const STATISTICS: u32 = 5;
const PACKET: u32 = 6;

const ETHERNET: u16 = 1;

/// Options that any block may have.
const END: u16 = 0;
const COMMENT: u16 = 1;

/// Appends blocks to a buffer. The lengths of a block are filled in when it is ended.
struct Block<'b> {
    out: &'b mut Vec<u8>,
    start: usize,
}

impl<'b> Block<'b> {
    fn begin(out: &'b mut Vec<u8>, kind: u32) -> Self {
        let start = out.len();
        out.extend(kind.to_le_bytes());
        out.extend([0; 4]);
        Block { out, start }
    }

    fn word(&mut self, word: u32) -> &mut Self {
        self.out.extend(word.to_le_bytes());
        self
    }

    /// Appends bytes and pads them to words.
    fn padded(&mut self, bytes: &[u8]) -> &mut Self {
        self.out.extend_from_slice(bytes);
        let padding = bytes.len().next_multiple_of(4) - bytes.len();
        self.out.extend(std::iter::repeat_n(0, padding));
        self
    }

    fn option(&mut self, code: u16, value: &[u8]) -> &mut Self {
        // An option is 65535 bytes long at most; text is cut where that leaves it text.
        let mut len = value.len().min(u16::MAX.into());
        while len < value.len() && value[len] & 0xc0 == 0x80 {
            len -= 1;
        }
        self.out.extend(code.to_le_bytes());
        self.out.extend((len as u16).to_le_bytes());
        self.padded(&value[..len])
    }

    /// A time stamp: the high word first, whatever the byte order.
    fn stamp(&mut self, nanos: u64) -> &mut Self {
        self.word((nanos >> 32) as u32).word(nanos as u32)
    }

    fn end(&mut self) {
        self.out.extend(END.to_le_bytes());
        self.out.extend([0; 2]);
        let len = (self.out.len() - self.start + 4) as u32;
        self.out[self.start + 4..self.start + 8].copy_from_slice(&len.to_le_bytes());
        self.out.extend(len.to_le_bytes());
    }
}

/// Begins a file.
pub(super) fn section(out: &mut Vec<u8>) {
    let mut block = Block::begin(out, SECTION);
    // The byte order, version 1.0, and a length that is not known.
    block.word(0x1a2b_3c4d).word(1).word(u32::MAX).word(u32::MAX);
    block.option(3, std::env::consts::OS.as_bytes());
    block.option(4, concat!("ringferry ", env!("CARGO_PKG_VERSION")).as_bytes());
    block.end();
}

/// Describes the next interface.
pub(super) fn interface(out: &mut Vec<u8>, name: &str, description: &str, snaplen: u32, filter: &str) {
    let mut block = Block::begin(out, INTERFACE);
    block.word(ETHERNET.into()).word(snaplen);
    block.option(2, name.as_bytes());
    if !description.is_empty() {
        block.option(3, description.as_bytes());
    }
    // Nanoseconds.
    block.option(9, &[9]);
    if !filter.is_empty() {
        // In libpcap's language.
        block.option(11, &[&[0], filter.as_bytes()].concat());
    }
    block.end();
}

/// Writes a captured frame, with a note for whoever reads the file.
pub(super) fn packet(out: &mut Vec<u8>, record: &Record, frame: &[u8], note: Option<&str>) {
    let mut block = Block::begin(out, PACKET);
    block.word(record.interface.into()).stamp(record.stamp);
    block.word(frame.len() as u32).word(record.original).padded(frame);
    block.option(2, &flags(record, frame).to_le_bytes());
    if let Some(queue) = record.queue {
        block.option(6, &u32::from(queue).to_le_bytes());
    }
    if let Some(note) = note {
        block.option(COMMENT, note.as_bytes());
    }
    if let Some(reason) = record.dropped {
        block.option(COMMENT, format!("dropped: {}: {}", reason.name(), reason.meaning()).as_bytes());
    }
    if let Some(comment) = virtual_header(&record.header) {
        block.option(COMMENT, comment.as_bytes());
    }
    block.end();
}

/// Says what became of the frames of an interface, of which so many are in the file.
pub(super) fn statistics(
    out: &mut Vec<u8>,
    interface: u16,
    counts: Counts,
    written: u64,
    [began, ends]: [u64; 2],
) {
    let mut block = Block::begin(out, STATISTICS);
    block.word(interface.into()).stamp(ends);
    for (code, stamp) in [(2, began), (3, ends)] {
        block.option(code, &[((stamp >> 32) as u32).to_le_bytes(), (stamp as u32).to_le_bytes()].concat());
    }
    // What was received, passed the filter, was dropped by the system for want of room or time, and was delivered to the user.
    for (code, count) in [(4, counts.seen), (6, counts.accepted), (7, counts.lost), (8, written)] {
        block.option(code, &count.to_le_bytes());
    }
    block.end();
}

/// The bits of `epb_flags`.
fn flags(record: &Record, frame: &[u8]) -> u32 {
    let direction = match record.direction {
        Direction::In => 1,
        Direction::Out => 2,
    };
    let reception = match ether::destination(frame) {
        Some(mac) if mac.is_broadcast() => 3,
        Some(mac) if mac.is_multicast() => 2,
        Some(_) => 1,
        None => 0,
    };
    let Header { flags, gso_type, .. } = record.header;
    let tcp = matches!(gso_type & !GSO_ECN, GSO_TCPV4 | GSO_TCPV6);
    let bit = |is: bool, bit: u32| u32::from(is) << bit;
    direction
        | reception << 2
        | bit(flags & F_NEEDS_CSUM != 0, 9)
        | bit(flags & F_DATA_VALID != 0, 10)
        | bit(tcp, 11)
}

/// A virtual header in words; `None` if it says nothing.
fn virtual_header(header: &Header) -> Option<String> {
    let mut words = Vec::new();
    if header.flags & F_NEEDS_CSUM != 0 {
        words.push(format!("csum=partial start={} offset={}", header.csum_start, header.csum_offset));
    }
    if header.flags & F_DATA_VALID != 0 {
        words.push("csum=valid".to_owned());
    }
    if header.is_gso() {
        let kind = match header.gso_type & !GSO_ECN {
            GSO_TCPV4 => "tcpv4",
            GSO_TCPV6 => "tcpv6",
            GSO_UDP => "udp-fragments",
            GSO_UDP_L4 => "udp",
            _ => "unknown",
        };
        let ecn = if header.gso_type & GSO_ECN != 0 { "+ecn" } else { "" };
        words.push(format!("gso={kind}{ecn} size={} hdr_len={}", header.gso_size, header.hdr_len));
    }
    (!words.is_empty()).then(|| format!("virtio-net header: {}", words.join(" ")))
}

/// Returns the blocks of a file, or of a part of it, each with its type and length. What is no whole block ends it.
pub(super) fn blocks_of(mut blocks: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        let length = u32::from_le_bytes(blocks.get(4..8)?.try_into().ok()?) as usize;
        let (block, rest) = blocks.split_at_checked(length).filter(|_| length > 0)?;
        blocks = rest;
        Some(block)
    })
}

/// Returns the interface of each packet that is among these blocks.
pub(super) fn interfaces_of(blocks: &[u8]) -> impl Iterator<Item = u32> {
    let word = |block: &[u8], at: usize| block.get(at..at + 4)?.try_into().ok().map(u32::from_le_bytes);
    blocks_of(blocks)
        .filter(move |block| word(block, 0) == Some(PACKET))
        .filter_map(move |block| word(block, 8))
}

#[cfg(test)]
mod tests {
    use ringferry_control::DropReason;

    use super::*;

    const RECORD: Record = Record {
        stamp: 0x0123_4567_89ab_cdef,
        interface: 1,
        queue: Some(3),
        original: 1500,
        direction: Direction::Out,
        dropped: None,
        header: Header::NONE,
    };

    /// Reads the blocks of a file: the type of each and its body.
    fn blocks(mut file: &[u8]) -> Vec<(u32, Vec<u8>)> {
        let word = |at: usize, bytes: &[u8]| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
        let mut all = Vec::new();
        while !file.is_empty() {
            let len = word(4, file) as usize;
            assert!(len.is_multiple_of(4) && word(len - 4, file) as usize == len);
            all.push((word(0, file), file[8..len - 4].to_vec()));
            file = &file[len..];
        }
        all
    }

    /// Reads options: the code and value of each.
    fn options(mut bytes: &[u8]) -> Vec<(u16, Vec<u8>)> {
        let mut all = Vec::new();
        loop {
            let [a, b, c, d] = *bytes.first_chunk().unwrap();
            let (code, len) = (u16::from_le_bytes([a, b]), usize::from(u16::from_le_bytes([c, d])));
            if code == END {
                assert_eq!(bytes.len(), 4);
                return all;
            }
            all.push((code, bytes[4..4 + len].to_vec()));
            bytes = &bytes[4 + len.next_multiple_of(4)..];
        }
    }

    #[test]
    fn a_file_is_what_the_draft_says() {
        let mut file = Vec::new();
        section(&mut file);
        interface(&mut file, "vm0", "a port", 96, "tcp port 80");
        packet(&mut file, &RECORD, &[0xff; 61], None);
        statistics(&mut file, 0, Counts { seen: 9, accepted: 5, lost: 2 }, 4, [1, 1 << 33]);
        let blocks = blocks(&file);
        assert_eq!(blocks.iter().map(|block| block.0).collect::<Vec<_>>(), [SECTION, 1, 6, 5]);
        assert_eq!(&blocks[0].1[..8], [0x4d, 0x3c, 0x2b, 0x1a, 1, 0, 0, 0]);
        assert_eq!(&blocks[1].1[..8], [1, 0, 0, 0, 96, 0, 0, 0]);
        let described = options(&blocks[1].1[8..]);
        assert_eq!(described[0], (2, b"vm0".to_vec()));
        assert_eq!(described[2..], [(9, vec![9]), (11, b"\0tcp port 80".to_vec())]);
        let head = [1, 0, 0, 0, 0x67, 0x45, 0x23, 0x01, 0xef, 0xcd, 0xab, 0x89, 61, 0, 0, 0, 0xdc, 5, 0, 0];
        assert_eq!(blocks[2].1[..20], head);
        assert_eq!(options(&blocks[2].1[20 + 64..]), [(2, vec![2 | 3 << 2, 0, 0, 0]), (6, vec![3, 0, 0, 0])]);
        let counted = options(&blocks[3].1[12..]);
        assert_eq!(counted[1], (3, vec![2, 0, 0, 0, 0, 0, 0, 0]));
        let counts: Vec<_> = counted[2..].iter().map(|(code, value)| (*code, value[0])).collect();
        assert_eq!(counts, [(4, 9), (6, 5), (7, 2), (8, 4)]);
    }

    #[test]
    fn what_the_switch_knows_of_a_packet_is_beside_it() {
        let header = Header {
            flags: F_NEEDS_CSUM,
            gso_type: GSO_TCPV4 | GSO_ECN,
            hdr_len: 54,
            gso_size: 1448,
            csum_start: 34,
            csum_offset: 16,
            num_buffers: 0,
        };
        let dropped = Some(DropReason::NoReceiveBuffers);
        let record = Record { header, dropped, queue: None, direction: Direction::In, ..RECORD };
        let mut file = Vec::new();
        packet(&mut file, &record, &[2; 60], Some("a gap"));
        let found = options(&blocks(&file)[0].1[20 + 60..]);
        assert_eq!(found[0], (2, (1u32 | 1 << 2 | 1 << 9 | 1 << 11).to_le_bytes().to_vec()));
        let comments: Vec<_> = found[1..].iter().map(|(_, text)| String::from_utf8_lossy(text)).collect();
        assert_eq!(comments[0], "a gap");
        assert!(
            comments[1].starts_with("dropped: no-receive-buffers: The receiving guest has posted no buffers")
        );
        let expected =
            "virtio-net header: csum=partial start=34 offset=16 gso=tcpv4+ecn size=1448 hdr_len=54";
        assert_eq!(comments[2], expected);
        assert_eq!(
            flags(&Record { header: Header { flags: F_DATA_VALID, ..Header::NONE }, ..RECORD }, &[]),
            2 | 1 << 10
        );
    }

    #[test]
    fn a_name_of_any_length_is_text() {
        let mut file = Vec::new();
        interface(&mut file, &("x".to_owned() + &"ü".repeat(40_000)), "", 1, "");
        let name = options(&blocks(&file)[0].1[8..])[0].1.clone();
        assert_eq!(String::from_utf8(name).unwrap().len(), 65_535);
    }
}
