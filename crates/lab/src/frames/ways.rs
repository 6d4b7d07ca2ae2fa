//! The frames of a way, from one port to another, and what must have become of them.
//!
//! Frame `n` is of flow `n` modulo their number, and as long as the mix has it. A flow has Ethernet addresses, IP addresses
//! and a source port of its own, so whatever a switch goes by, it sees as many flows as the row says. Behind the headers
//! are the frame's number, with the way's in its top byte, and the time that it was due; behind these a pattern that
//! depends on the number, in every [`WHOLE`]th frame and while frames are checked: in the others the first [`HEAD`] bytes
//! are written, and the rest of a buffer is what it was, as in testpmd's generator.
//!
//! UDP comes as a connected socket of Linux sends it without offloads: with a checksum, not to be fragmented, and with an
//! identification that counts the packets of the flow. With these a switch may merge datagrams, and whoever cuts them again
//! makes what was sent. A rest that is what it was is summed up by nobody: the pattern consists of groups of four bytes,
//! a word and its complement, which add up to nothing, and one begins at `HEAD` in every frame. So the checksum holds
//! whatever frame left the rest there, and where it is still zero.

use std::fmt;

use ringferry_packet::checksum::{self, Sum};
use ringferry_packet::vnet::Header;
use serde::{Deserialize, Serialize};

use super::{Between, IP, TCP, TCP_CHECKSUM, UDP, UDP_CHECKSUM, Wrong, to_be_cut};

/// Bytes at the front of a frame that are always written, and always looked at: the headers, number and time, and zeros
/// where these end before. Behind them is a whole number of groups.
pub const HEAD: usize = 70;

/// Of so many frames one is written and compared whole while the rate is measured, a power of two. More often would make
/// the ends the limit at 1500 bytes.
pub const WHOLE: u64 = 256;

/// The top byte of a number: a frame that only shows where an address is.
const HELLO: u8 = 0xff;

/// Bytes of number and time.
const STAMP: usize = 16;

/// Bytes of a group of the pattern.
const GROUP: usize = 4;

/// Payload of each packet that a TSO frame is to be cut into, and how many.
const MSS: usize = 1448;
const SEGMENTS: usize = 45;

/// Where a testpmd that writes addresses sends frames.
pub const NEXT_HOP: [u8; 6] = [2, 0, 0, 0, 0x0b, 1];

/// The mix of frames. Lengths are those of RFC 2544, with four bytes of checksum that no virtual wire has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Frames {
    /// Frames of 64 bytes.
    Smallest,
    /// 64, 594 and 1518 bytes, 7 : 4 : 1.
    Imix,
    /// UDP that fills an MTU of 1500 bytes, no offloads: 1518 bytes.
    Mtu,
    /// TCP over IPv4 to be cut into 45 packets of 1448 bytes (TSO), checksum left blank.
    Tso,
}

impl Frames {
    pub const ALL: [Frames; 4] = [Frames::Smallest, Frames::Imix, Frames::Mtu, Frames::Tso];
}

impl fmt::Display for Frames {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Frames::Smallest => "64",
            Frames::Imix => "imix",
            Frames::Mtu => "1500",
            Frames::Tso => "64K-tso",
        })
    }
}

/// Lengths of frames in memory, without checksum, in the order they are sent; again and again. IMIX is spread evenly.
fn sizes(frames: Frames) -> &'static [usize] {
    match frames {
        Frames::Smallest => &[60],
        Frames::Imix => &[60, 590, 60, 60, 590, 60, 590, 60, 60, 590, 60, 1514],
        Frames::Mtu => &[1514],
        Frames::Tso => &[TCP + SEGMENTS * MSS],
    }
}

pub fn longest(frames: Frames) -> usize {
    sizes(frames).iter().copied().max().unwrap_or_default()
}

/// Addresses of a flow of a way: where its frames go, and where they come from.
fn macs(way: u8, flow: u32) -> [u8; 12] {
    let [_, a, b, c] = flow.to_be_bytes();
    [2, way, 1, a, b, c, 2, way, 0, a, b, c]
}

/// The frames of one way.
#[derive(Clone, Debug)]
pub struct Format {
    way: u8,
    flows: u32,
    /// Where the number is; the time follows.
    number_at: usize,
    sizes: &'static [usize],
    /// A front of each length, of flow 0; where the transport checksum belongs, the sum of the pseudo header.
    fronts: Vec<[u8; HEAD]>,
    /// The virtual header of every frame.
    pub header: Header,
    pattern: Vec<u8>,
}

/// The identity of a frame: its number, and what follows from it and takes a division to find out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Position {
    number: u64,
    flow: u32,
    /// How many frames of the flow were before it; goes round.
    turn: u16,
    /// The number modulo that of the lengths.
    slot: usize,
}

impl Format {
    pub fn new(frames: Frames, way: u8, flows: u32) -> Self {
        let (sizes, tcp) = (sizes(frames), frames == Frames::Tso);
        let header = if tcp { to_be_cut(TCP, MSS) } else { Header::default() };
        Self {
            way,
            flows,
            number_at: if tcp { TCP } else { UDP },
            sizes,
            fronts: sizes.iter().map(|&size| front(way, size, tcp)).collect(),
            header,
            // Knuth's multiplier: no two groups are the same.
            pattern: (0..longest(frames) / GROUP + WHOLE as usize)
                .map(|group| (group as u16).wrapping_mul(0x9e37))
                .flat_map(|word| (u32::from(word) << 16 | u32::from(!word)).to_be_bytes())
                .collect(),
        }
    }

    fn position(&self, number: u64) -> Position {
        let flows = u64::from(self.flows);
        Position {
            number,
            flow: (number % flows) as u32,
            turn: (number / flows) as u16,
            slot: (number % self.sizes.len() as u64) as usize,
        }
    }

    #[inline]
    pub fn size(&self, number: u64) -> usize {
        match self.sizes {
            [size] => *size,
            sizes => sizes[(number % sizes.len() as u64) as usize],
        }
    }

    pub fn flows(&self) -> u32 {
        self.flows
    }

    /// The front of a frame.
    #[inline]
    fn front(&self, position: Position, time: u64) -> [u8; HEAD] {
        let Position { number, flow, turn, slot } = position;
        let mut front = self.fronts[slot];
        let [_, a, b, c] = flow.to_be_bytes();
        front[3..6].copy_from_slice(&[a, b, c]);
        front[9..12].copy_from_slice(&[a, b, c]);
        front[27..30].copy_from_slice(&[a, b, c]);
        // The sum of both addresses is that of every flow.
        front[31..34].copy_from_slice(&[!a, !b, !c]);
        front[35] = c;
        let number = number | u64::from(self.way) << 56;
        front[self.number_at..self.number_at + 8].copy_from_slice(&number.to_be_bytes());
        front[self.number_at + 8..self.number_at + 16].copy_from_slice(&time.to_be_bytes());
        if !self.header.is_gso() {
            front[18..20].copy_from_slice(&turn.to_be_bytes());
            let of_first = u16::from_be_bytes([front[24], front[25]]);
            front[24..26].copy_from_slice(&checksum::update(of_first, 0, turn).to_be_bytes());
            // With the sum of the pseudo header among it, and nothing behind it that adds to it.
            let mut sum = Sum::new();
            sum.add(&front[IP..UDP + STAMP]);
            // Zero would say that there is none (RFC 768).
            let sum = if sum.finish() == 0 { 0xffff } else { sum.finish() };
            front[UDP_CHECKSUM..UDP_CHECKSUM + 2].copy_from_slice(&sum.to_be_bytes());
        }
        front
    }

    /// A frame from its first byte to its last.
    fn whole(&self, position: Position, time: u64, out: &mut Vec<u8>) {
        let size = self.sizes[position.slot];
        let shift = GROUP * (position.number / WHOLE % WHOLE) as usize;
        out.clear();
        out.extend_from_slice(&self.front(position, time)[..size.min(HEAD)]);
        out.extend_from_slice(&self.pattern[shift..shift + size.saturating_sub(HEAD)]);
    }

    /// A frame that goes the other way and shows where the destination of a flow is.
    pub fn hello(&self, flow: u32) -> [u8; 60] {
        let mut frame = [0; 60];
        let position = Position { number: u64::from(HELLO) << 56, flow, ..Position::default() };
        let front = self.front(position, 0);
        frame[..UDP].copy_from_slice(&front[..UDP]);
        let macs = macs(self.way, flow);
        frame[..6].copy_from_slice(&macs[6..]);
        frame[6..12].copy_from_slice(&macs[..6]);
        // An Ethernet type for experiments (IEEE 802.1): nobody answers.
        frame[12..14].copy_from_slice(&[0x88, 0xb5]);
        frame
    }

    /// Tells from its front which way a frame belongs to.
    #[inline]
    pub fn read(&self, front: &[u8]) -> Mark {
        let word =
            |at: usize| front.get(at..at + 8).and_then(|bytes| bytes.try_into().ok()).map(u64::from_be_bytes);
        let (Some(number), Some(time)) = (word(self.number_at), word(self.number_at + 8)) else {
            return Mark::Foreign;
        };
        if (number >> 56) as u8 == self.way && front[12..14] == [8, 0] {
            return Mark::Own { number: number & (u64::MAX >> 8), time };
        }
        // Of another way, or of the kernel's own making.
        let lab = front[12..14] == [8, 0] && front[26] == 10 && front[30] == 11;
        if lab { Mark::Stray } else { Mark::Foreign }
    }

    /// Compares a frame with what was sent. With `rewritten` the addresses must be new ones.
    pub fn check(
        &self,
        frame: &[u8],
        number: u64,
        time: u64,
        rewritten: bool,
        scratch: &mut Vec<u8>,
    ) -> Result<(), Wrong> {
        self.whole(self.position(number), time, scratch);
        if self.header.is_gso() && frame.len() == scratch.len() {
            // The checksum of what is to be cut is anybody's to write.
            let field = TCP_CHECKSUM..TCP_CHECKSUM + 2;
            scratch[field.clone()].copy_from_slice(&frame[field]);
        }
        let from = if rewritten { 12 } else { 0 };
        let moved = !rewritten || (frame[..6] == NEXT_HOP && frame[6..12] != scratch[6..12]);
        if frame.len() == scratch.len() && frame[from..] == scratch[from..] && moved {
            return Ok(());
        }
        let at = frame.iter().zip(scratch.iter()).skip(from).position(|(got, sent)| got != sent);
        let at = at.map_or_else(|| "its length or addresses".into(), |at| format!("byte {}", from + at));
        let front = &frame[..frame.len().min(HEAD)];
        Err(Wrong(format!("frame {number} was damaged, first at {at}: {front:02x?}")))
    }
}

/// The origin that the front of a frame tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mark {
    /// The frame is the way's own.
    Own { number: u64, time: u64 },
    /// The frame is another way's.
    Stray,
    /// Nobody's: it shows an address, or the kernel had something to say.
    Foreign,
}

/// The front of the first frame of flow 0.
fn front(way: u8, size: usize, tcp: bool) -> [u8; HEAD] {
    let between = Between {
        macs: macs(way, 0),
        source: [10, 0, 0, 0],
        destination: [11, 0xff, 0xff, 0xff],
        ports: [0x4000, 0x7266],
        whole: !tcp,
    };
    let mut front = [0; HEAD];
    // For whoever finishes the checksum: of TCP whoever cuts it, of UDP whoever knows the rest of the front.
    if tcp {
        front[..TCP].copy_from_slice(&between.tcp::<TCP>(size));
        front[TCP_CHECKSUM..TCP_CHECKSUM + 2].copy_from_slice(&between.pseudo(6, size).to_be_bytes());
    } else {
        front[..UDP].copy_from_slice(&between.udp(size));
        front[UDP_CHECKSUM..UDP_CHECKSUM + 2].copy_from_slice(&between.pseudo(17, size).to_be_bytes());
    }
    front
}

/// A way's frames, one after another.
#[derive(Debug)]
pub struct Stream {
    pub format: Format,
    position: Position,
    /// True if every frame is written whole.
    pub whole: bool,
    scratch: Vec<u8>,
}

/// The next frame, as far as it is written.
#[derive(Debug)]
pub struct Next<'a> {
    pub bytes: &'a [u8],
    pub size: usize,
}

impl Stream {
    pub fn new(format: Format) -> Self {
        Self { format, position: Position::default(), whole: true, scratch: Vec::new() }
    }

    /// The number of the next frame.
    #[inline]
    pub fn number(&self) -> u64 {
        self.position.number
    }

    /// The next frame, due at `time`.
    #[inline]
    pub fn peek(&mut self, time: u64) -> Next<'_> {
        let Self { format, position, whole, scratch } = self;
        let size = format.sizes[position.slot];
        if *whole || position.number.is_multiple_of(WHOLE) {
            format.whole(*position, time, scratch);
        } else {
            let front = format.front(*position, time);
            scratch.clear();
            scratch.extend_from_slice(&front[..size.min(HEAD)]);
        }
        Next { bytes: scratch, size }
    }

    /// Goes on to the next frame, as this one was sent.
    #[inline]
    pub fn advance(&mut self) {
        let Self { format, position: Position { number, flow, turn, slot }, .. } = self;
        *number += 1;
        *flow += 1;
        if *flow == format.flows {
            (*flow, *turn) = (0, turn.wrapping_add(1));
        }
        *slot = if *slot + 1 == format.sizes.len() { 0 } else { *slot + 1 };
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use ringferry_packet::parse::Layers;

    use super::*;

    #[test]
    fn mixes_have_the_lengths_that_their_names_say() {
        let count = |size| sizes(Frames::Imix).iter().filter(|&&of| of == size).count();
        // 64, 594 and 1518 bytes with their checksum, 7 : 4 : 1.
        assert_eq!([60, 590, 1514].map(count), [7, 4, 1]);
        assert_eq!(sizes(Frames::Imix).len(), 12);
        assert_eq!((longest(Frames::Smallest), longest(Frames::Mtu)), (60, 1514));
        assert!((65_000..65_536 + 14).contains(&longest(Frames::Tso)));
    }

    #[test]
    fn frames_are_good_ip_and_flows_differ_in_everything() {
        for frames in Frames::ALL {
            let mut stream = Stream::new(Format::new(frames, 3, 70_000));
            let mut seen: [BTreeSet<Vec<u8>>; 4] = Default::default();
            for number in 0..70_000 {
                if (100..69_900).contains(&number) {
                    stream.advance();
                    continue;
                }
                let header = stream.format.header;
                let next = stream.peek(5);
                assert_eq!(next.bytes.len(), next.size);
                let mut sum = Sum::default();
                sum.add(&next.bytes[14..34]);
                assert_eq!(sum.finish(), 0, "{frames} {number}");
                assert!(Layers::parse(&next.bytes[..next.size.min(64)]).is_ok());
                assert!(header.check(next.size).is_ok());
                for (of, range) in seen.iter_mut().zip([0..6, 6..12, 26..30, 30..34]) {
                    assert!(of.insert(next.bytes[range].to_vec()), "{frames} {number}");
                }
                stream.advance();
            }
        }
    }

    #[test]
    fn checksums_hold_whatever_frame_the_rest_of_a_buffer_is_of() {
        for frames in [Frames::Smallest, Frames::Imix, Frames::Mtu] {
            let mut stream = Stream::new(Format::new(frames, 3, 7));
            let (mut used, mut wholes) = (vec![0; longest(frames)], BTreeSet::new());
            for number in 0..4000_u64 {
                // Whole ones now and then, each of another part of the pattern, and times that reach every byte.
                stream.whole = number % 50 > 45;
                let Next { bytes, size } = stream.peek(number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
                let mut fresh = vec![0; size];
                for buffer in [&mut used, &mut fresh] {
                    buffer[..bytes.len()].copy_from_slice(bytes);
                    assert_ne!(buffer[UDP_CHECKSUM..UDP_CHECKSUM + 2], [0, 0], "{frames} {number}");
                    checksum::verify(&buffer[..size]).unwrap_or_else(|e| panic!("{frames} {number}: {e}"));
                }
                if bytes.len() == size {
                    wholes.insert(size);
                }
                stream.advance();
            }
            assert_eq!(wholes, sizes(frames).iter().copied().collect(), "{frames}");
        }
    }

    #[test]
    fn a_checksum_that_comes_out_as_zero_is_sent_as_ones() {
        // Among as many times as there are checksums each comes out.
        let format = Format::new(Frames::Smallest, 0, 1);
        let mut ones = 0;
        for time in 0..=0xffff {
            let front = format.front(format.position(1), time);
            checksum::verify(&front[..60]).unwrap();
            ones += u64::from(front[UDP_CHECKSUM..UDP_CHECKSUM + 2] == [0xff, 0xff]);
            assert_ne!(front[UDP_CHECKSUM..UDP_CHECKSUM + 2], [0, 0], "{time}");
        }
        assert!(ones > 0);
    }

    #[test]
    fn identifications_count_the_packets_of_a_flow_and_may_go_round() {
        let mut stream = Stream::new(Format::new(Frames::Smallest, 3, 3));
        for number in 0..3 * 0x1_0010_u64 {
            let (next, turn) = (stream.peek(0), number / 3);
            assert_eq!(next.bytes[18..21], [(turn >> 8) as u8, turn as u8, 0x40], "{number}");
            if next.size == next.bytes.len() {
                checksum::verify(next.bytes).unwrap();
            }
            stream.advance();
            assert_eq!(stream.position, stream.format.position(number + 1));
        }
    }

    #[test]
    fn what_was_sent_is_known_again_and_damage_is_found() {
        let (mut stream, mut scratch) = (Stream::new(Format::new(Frames::Imix, 1, 5)), Vec::new());
        for number in 0..600 {
            stream.whole = number < 300;
            let time = 1_000_000 + number;
            let next = stream.peek(time);
            let (bytes, size) = (next.bytes.to_vec(), next.size);
            assert_eq!(stream.format.read(&bytes), Mark::Own { number, time });
            assert_eq!(stream.format.size(number), size);
            if stream.whole || number == 512 {
                let check = |frame: &[u8], rewritten, scratch: &mut Vec<u8>| {
                    stream.format.check(frame, number, time, rewritten, scratch)
                };
                check(&bytes, false, &mut scratch).unwrap();
                for at in [0, 11, 29, size - 1] {
                    let mut bad = bytes.clone();
                    bad[at] ^= 1;
                    assert!(check(&bad, false, &mut scratch).is_err(), "{number} {at}");
                }
                assert!(check(&bytes[..size - 1], false, &mut scratch).is_err());
                assert!(check(&bytes, true, &mut scratch).is_err(), "not rewritten");
                let mut moved = bytes.clone();
                moved[..6].copy_from_slice(&NEXT_HOP);
                moved[6..12].copy_from_slice(&[2, 9, 9, 9, 9, 9]);
                check(&moved, true, &mut scratch).unwrap();
            }
            stream.advance();
        }
        let (own, other) = (Format::new(Frames::Smallest, 1, 5), Format::new(Frames::Smallest, 2, 5));
        let mut stray = Stream::new(other);
        assert_eq!(own.read(stray.peek(0).bytes), Mark::Stray);
        assert_eq!(own.read(&own.hello(3)), Mark::Foreign);
        assert_eq!(own.read(&[0; 42]), Mark::Foreign);
    }
}
