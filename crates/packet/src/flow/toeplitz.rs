//! The Toeplitz hash of receive-side scaling: for every bit of the input that is set, the 32 bits of the key
//! from that position on, all added without carry.

use std::fmt;

/// Bytes of a key: with 40, every bit of the longest input (two IPv6 addresses and two ports) has 32 bits of
/// the key behind it. VIRTIO asks a device to take at least as many (5.1.4.1), and Linux uses no more.
pub const KEY_LEN: usize = 40;

/// Longest input in bytes: more would find no key.
const MAX_INPUT: usize = KEY_LEN - 4;

/// A key whose bits repeat every 16: swapping source and destination, addresses or ports, changes nothing, so that
/// both directions of a connection have one hash. (Woo and Park, "Scalable TCP session monitoring with symmetric
/// receive-side scaling".)
pub const SYMMETRIC_KEY: [u8; KEY_LEN] = {
    let mut key = [0x6d; KEY_LEN];
    let mut at = 1;
    while at < KEY_LEN {
        key[at] = 0x5a;
        at += 2;
    }
    key
};

/// The hash with a key, as one table for each byte of the input: as many look-ups as bytes, where the definition
/// takes a step for every bit. 36 KiB, of which IPv4 touches 12; tables for half-bytes take a tenth of that but
/// twice the look-ups, tables for two bytes would not stay in any cache.
#[derive(Clone)]
pub struct Toeplitz {
    key: [u8; KEY_LEN],
    tables: Box<[[u32; 256]]>,
}

impl Toeplitz {
    /// The hash with this key. One that is short counts as if zeroes followed; what is behind the first [`KEY_LEN`]
    /// bytes never matters.
    pub fn new(key: &[u8]) -> Self {
        let mut padded = [0; KEY_LEN];
        let len = key.len().min(KEY_LEN);
        padded[..len].copy_from_slice(&key[..len]);
        let mut tables = vec![[0; 256]; MAX_INPUT].into_boxed_slice();
        for (table, window) in tables.iter_mut().zip(padded.windows(5)) {
            // The key from the first bit of this byte on, 32 bits of it for each of eight positions.
            let key = window.iter().fold(0u64, |key, byte| key << 8 | u64::from(*byte));
            for value in 1..256usize {
                // What the value without its lowest set bit has, and the part of that bit.
                let position = 7 - value.trailing_zeros();
                table[value] = table[value & (value - 1)] ^ (key >> (8 - position)) as u32;
            }
        }
        Self { key: padded, tables }
    }

    /// The key.
    pub fn key(&self) -> &[u8; KEY_LEN] {
        &self.key
    }

    /// The hash of `input`, of which no more than 36 bytes count.
    #[inline]
    #[must_use]
    pub fn hash(&self, input: &[u8]) -> u32 {
        self.hash_from(0, input)
    }

    /// The share of `input` in the hash of a longer one, in which it begins at byte `at`. The shares of all parts,
    /// added without carry, are the hash of the whole.
    #[inline]
    #[must_use]
    pub fn hash_from(&self, at: usize, input: &[u8]) -> u32 {
        let tables = self.tables.get(at..).unwrap_or_default();
        tables.iter().zip(input).fold(0, |hash, (table, byte)| hash ^ table[usize::from(*byte)])
    }
}

impl fmt::Debug for Toeplitz {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Toeplitz").field("key", &self.key).finish_non_exhaustive()
    }
}

impl PartialEq for Toeplitz {
    fn eq(&self, other: &Self) -> bool {
        self.key == other.key
    }
}

impl Eq for Toeplitz {}
