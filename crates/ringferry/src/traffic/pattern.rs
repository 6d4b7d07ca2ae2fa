//! Payload that proves itself: what a sender writes and how a receiver checks every byte of it.
//!
//! Data is made of *blocks*: a datagram, a write of a TCP stream, a request. A block has a sequence number,
//! and every byte of it follows from the number, the test's random token and the direction, so a flipped
//! bit, a swapped buffer, a stale packet of another test or a header written over data all show.
//!
//! ```text
//!  0        8         16                          len
//!  | number | check   | table[shift(number)..]    |      integers little endian; blocks shorter than 16 bytes are all table
//! ```
//!
//! The body is a slice of one constant pseudo-random table, so that sending needs no copy and checking is
//! one `memcmp`. A checksum in place of the table would cost a pass of arithmetic over the data and still
//! not say what the bytes should have been.

use std::sync::LazyLock;

/// Bytes of number and check at the front of a block.
pub const HEADER: usize = 16;
/// Largest block in bytes: eight times what iperf3 writes at once.
pub const MAX_BLOCK: usize = 1 << 20;
/// Body shifts are below this many bytes. Small, so that the part of the table in use stays in the
/// second-level cache.
const SHIFTS: usize = 1 << 16;
/// How far back, in datagrams, a late one can be told from a duplicate: 8 KiB of bits, and more than any
/// queue on the way holds.
const WINDOW: u64 = 1 << 16;

static TABLE: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let mut state = 0;
    let mut table = Vec::with_capacity(MAX_BLOCK + SHIFTS);
    while table.len() < MAX_BLOCK + SHIFTS {
        state += 1;
        table.extend_from_slice(&mix(state).to_le_bytes());
    }
    table
});

/// Bytes of number and check at the front of a block of `len` bytes: none in one that is shorter than they are.
fn head(len: usize) -> usize {
    if len < HEADER { 0 } else { HEADER }
}

/// The finaliser of SplitMix64: every input bit changes about half of the output bits.
fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The payload of one direction of one test.
#[derive(Clone, Copy, Debug)]
pub struct Pattern {
    key: u64,
}

impl Pattern {
    /// The payload for the test `token` in the direction `salt` (any two different numbers for the two
    /// directions).
    pub fn new(token: u64, salt: u64) -> Self {
        Self { key: mix(token ^ mix(salt)) }
    }

    /// Block `number` of `len` bytes, as its header and what comes after it.
    pub fn parts<'a>(
        &self,
        number: u64,
        len: usize,
        header: &'a mut [u8; HEADER],
    ) -> (&'a [u8], &'static [u8]) {
        *header = self.header(number, len);
        (&header[..head(len)], self.body(number, len))
    }

    /// The first 16 bytes of block `number` of `len` bytes, at least [`HEADER`].
    fn header(&self, number: u64, len: usize) -> [u8; HEADER] {
        let mut header = [0; HEADER];
        header[..8].copy_from_slice(&number.to_le_bytes());
        header[8..].copy_from_slice(&mix(number ^ self.key ^ ((len as u64) << 40)).to_le_bytes());
        header
    }

    /// Everything after the header of block `number` of `len` bytes; the whole block when `len` is below
    /// [`HEADER`].
    fn body(&self, number: u64, len: usize) -> &'static [u8] {
        let shift = (mix(number ^ self.key) % SHIFTS as u64) as usize;
        &TABLE[shift..shift + len - head(len)]
    }

    /// Writes block `number` over all of `block`.
    pub fn fill(&self, number: u64, block: &mut [u8]) {
        let len = block.len();
        let (header, body) = block.split_at_mut(head(len));
        header.copy_from_slice(&self.header(number, len)[..header.len()]);
        body.copy_from_slice(self.body(number, len));
    }

    /// Returns true if `block` is exactly block `number`.
    pub fn matches(&self, number: u64, block: &[u8]) -> bool {
        let len = block.len();
        let (header, body) = block.split_at(head(len));
        header == &self.header(number, len)[..header.len()] && body == self.body(number, len)
    }

    /// The number of the datagram `block`, or nothing when any byte of it is wrong.
    pub fn identify(&self, block: &[u8]) -> Option<u64> {
        let number = u64::from_le_bytes(block.get(..8)?.try_into().ok()?);
        (block.len() >= HEADER && self.matches(number, block)).then_some(number)
    }
}

/// Checks a byte stream of equal blocks that arrives in pieces of any size.
pub struct StreamVerifier {
    pattern: Pattern,
    block: usize,
    number: u64,
    at: usize,
    damaged: bool,
    corrupt: u64,
}

impl StreamVerifier {
    /// A verifier at the start of a stream of blocks of `block` bytes, 1 to [`MAX_BLOCK`].
    pub fn new(pattern: Pattern, block: usize) -> Self {
        Self { pattern, block, number: 0, at: 0, damaged: false, corrupt: 0 }
    }

    /// Checks the next bytes of the stream.
    pub fn feed(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let mut header = [0; HEADER];
            let (header, body) = self.pattern.parts(self.number, self.block, &mut header);
            let expected = match self.at.checked_sub(header.len()) {
                None => &header[self.at..],
                Some(at) => &body[at..],
            };
            let take = expected.len().min(bytes.len());
            self.damaged |= bytes[..take] != expected[..take];
            bytes = &bytes[take..];
            self.at += take;
            if self.at == self.block {
                self.corrupt += u64::from(self.damaged);
                (self.number, self.at, self.damaged) = (self.number + 1, 0, false);
            }
        }
    }

    /// Blocks with a wrong byte so far, the unfinished one included.
    pub fn corrupt(&self) -> u64 {
        self.corrupt + u64::from(self.damaged)
    }
}

/// A record of the datagrams of a numbered sequence that have arrived.
pub struct Ledger {
    next: u64,
    seen: Vec<u64>,
    /// Datagrams that arrived, each counted once.
    pub arrived: u64,
    /// Datagrams that arrived after one with a higher number.
    pub reordered: u64,
    /// Copies of a datagram that had arrived before.
    pub duplicated: u64,
}

impl Ledger {
    /// Nothing has arrived yet; the first number is 0.
    pub fn new() -> Self {
        Self { next: 0, seen: vec![0; (WINDOW / 64) as usize], arrived: 0, reordered: 0, duplicated: 0 }
    }

    /// Datagram `number` arrived. One that is later than the window is taken for reordered, not duplicated.
    pub fn record(&mut self, number: u64) {
        if number >= self.next {
            for skipped in self.next.max(number.saturating_sub(WINDOW))..number {
                self.mark(skipped, false);
            }
            self.next = number + 1;
        } else if self.next - number <= WINDOW && self.marked(number) {
            self.duplicated += 1;
            return;
        } else {
            self.reordered += 1;
        }
        self.arrived += 1;
        if self.next - number <= WINDOW {
            self.mark(number, true);
        }
    }

    fn marked(&self, number: u64) -> bool {
        let bit = number % WINDOW;
        self.seen[(bit / 64) as usize] >> (bit % 64) & 1 == 1
    }

    fn mark(&mut self, number: u64, seen: bool) {
        let bit = number % WINDOW;
        let word = &mut self.seen[(bit / 64) as usize];
        *word = *word & !(1 << (bit % 64)) | u64::from(seen) << (bit % 64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATTERN: Pattern = Pattern { key: 77 };

    fn datagram(number: u64, len: usize) -> Vec<u8> {
        let mut block = vec![0; len];
        PATTERN.fill(number, &mut block);
        block
    }

    #[test]
    fn every_flipped_bit_of_a_datagram_is_caught() {
        let good = datagram(9, 100);
        assert_eq!(PATTERN.identify(&good), Some(9));
        for bit in 0..good.len() * 8 {
            let mut bad = good.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(PATTERN.identify(&bad), None, "bit {bit}");
        }
    }

    #[test]
    fn truncated_extended_and_foreign_datagrams_are_caught() {
        let good = datagram(9, 100);
        assert_eq!(PATTERN.identify(&good[..99]), None);
        assert_eq!(PATTERN.identify(&good[..15]), None);
        assert_eq!(PATTERN.identify(&[]), None);
        assert_eq!(PATTERN.identify(&[good.as_slice(), &[0]].concat()), None);
        assert_eq!(Pattern::new(1, 0).identify(&good), None);
        assert_ne!(Pattern::new(1, 0).key, Pattern::new(1, 1).key);
    }

    #[test]
    fn a_block_shorter_than_the_header_still_depends_on_its_number() {
        for len in [1, 8, 15, 16, 17] {
            assert!(PATTERN.matches(5, &datagram(5, len)), "{len}");
            let mut wrong = datagram(5, len);
            wrong[len - 1] ^= 1;
            assert!(!PATTERN.matches(5, &wrong), "{len}");
        }
        assert!((0..100).any(|number| !PATTERN.matches(number, &datagram(5, 1))));
    }

    fn stream(blocks: u64, len: usize) -> Vec<u8> {
        (0..blocks).flat_map(|number| datagram(number, len)).collect()
    }

    #[test]
    fn a_stream_is_verified_in_pieces_of_any_size() {
        let data = stream(20, 50);
        for piece in [1, 7, 16, 49, 50, 51, 1000] {
            let mut verifier = StreamVerifier::new(PATTERN, 50);
            data.chunks(piece).for_each(|bytes| verifier.feed(bytes));
            assert_eq!(verifier.corrupt(), 0, "pieces of {piece}");
        }
    }

    #[test]
    fn a_stream_of_blocks_shorter_than_a_header_is_verified_byte_by_byte() {
        for block in [1, 5, 15, 16, 17] {
            let mut data = stream(40, block);
            let check = |data: &[u8], piece: usize| {
                let mut verifier = StreamVerifier::new(PATTERN, block);
                data.chunks(piece).for_each(|bytes| verifier.feed(bytes));
                verifier.corrupt()
            };
            assert_eq!((check(&data, 1), check(&data, 7), check(&data, 1000)), (0, 0, 0), "{block}");
            data[3 * block] ^= 1;
            assert_eq!((check(&data, 1), check(&data, 1000)), (1, 1), "{block}");
        }
    }

    #[test]
    fn a_flipped_byte_damages_one_block_of_a_stream_and_a_missing_byte_all_that_follow() {
        let mut data = stream(20, 50);
        data[3 * 50 + 20] ^= 0x80;
        let mut verifier = StreamVerifier::new(PATTERN, 50);
        data.chunks(33).for_each(|bytes| verifier.feed(bytes));
        assert_eq!(verifier.corrupt(), 1);

        let mut data = stream(20, 50);
        data.remove(10 * 50);
        let mut verifier = StreamVerifier::new(PATTERN, 50);
        verifier.feed(&data);
        assert_eq!(verifier.corrupt(), 10);
    }

    #[test]
    fn the_largest_block_fits_the_table() {
        assert!(PATTERN.matches(u64::MAX, &datagram(u64::MAX, MAX_BLOCK)));
        let reach = (0..10_000).map(|number| mix(number ^ PATTERN.key) % SHIFTS as u64).max();
        assert!(reach.is_some_and(|shift| (shift as usize) < SHIFTS));
    }

    fn ledger(numbers: impl IntoIterator<Item = u64>) -> (u64, u64, u64) {
        let mut ledger = Ledger::new();
        numbers.into_iter().for_each(|number| ledger.record(number));
        (ledger.arrived, ledger.reordered, ledger.duplicated)
    }

    #[test]
    fn lost_reordered_and_duplicated_datagrams_are_told_apart() {
        assert_eq!(ledger([0, 1, 2, 3]), (4, 0, 0));
        assert_eq!(ledger([0, 1, 3, 4]), (4, 0, 0), "2 is lost");
        assert_eq!(ledger([0, 2, 1, 3]), (4, 1, 0));
        assert_eq!(ledger([0, 1, 1, 2, 0]), (3, 0, 2));
        assert_eq!(ledger([5, 4, 5, 4, 6]), (3, 1, 2));
    }

    #[test]
    fn the_window_of_the_ledger_slides_over_gaps_larger_than_itself() {
        assert_eq!(ledger(0..3 * WINDOW), (3 * WINDOW, 0, 0));
        let far = 5 * WINDOW + 3;
        assert_eq!(ledger([0, far, far - 1, far - WINDOW + 1, far]), (4, 2, 1));
        assert_eq!(ledger([0, far, 0]), (3, 1, 0), "too old to be recognised as a duplicate");
    }
}
