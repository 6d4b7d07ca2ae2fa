//! The Toeplitz hash of receive-side scaling: the exclusive or, over all set bits of the input, of the 32 bits of the
//! key from that position on.
//!
//! A [`Toeplitz`] is made for a key, which computes its tables, and is immutable afterwards.

use std::fmt;

/// Length of a key in bytes. With 40, every bit of the longest input (two IPv6 addresses and two ports) has 32 bits of
/// the key behind it. VIRTIO demands that a device accepts at least 40 (5.1.4.1), and Linux uses no more.
pub const KEY_LEN: usize = 40;

/// Length in bytes of the longest input that a key covers.
const MAX_INPUT: usize = KEY_LEN - 4;

/// A key whose bits repeat after 16, so that both directions of a connection have the same hash: exchanging source and
/// destination, of addresses or ports, does not change it. (Woo and Park, "Scalable TCP session monitoring with
/// symmetric receive-side scaling".)
pub const SYMMETRIC_KEY: [u8; KEY_LEN] = {
    let mut key = [0x6d; KEY_LEN];
    let mut at = 1;
    while at < KEY_LEN {
        key[at] = 0x5a;
        at += 2;
    }
    key
};

/// The hash with one key, as a table for each byte of the input: one look-up per byte, where the definition takes a
/// step per bit. The tables have 36 KiB, of which IPv4 uses 12. Tables for half-bytes have a tenth of that but need
/// twice the look-ups; tables for two bytes would not fit any cache.
#[derive(Clone)]
pub struct Toeplitz {
    key: [u8; KEY_LEN],
    tables: Box<[[u32; 256]]>,
}

impl Toeplitz {
    /// Computes the tables of a key. A short key is padded with zeros; bytes behind the first [`KEY_LEN`] are ignored.
    pub fn new(key: &[u8]) -> Self {
        let mut padded = [0; KEY_LEN];
        let len = key.len().min(KEY_LEN);
        padded[..len].copy_from_slice(&key[..len]);
        let mut tables = vec![[0; 256]; MAX_INPUT].into_boxed_slice();
        for (table, window) in tables.iter_mut().zip(padded.windows(5)) {
            // 40 bits of the key, which contain the 32 bits from each of the byte's eight positions on.
            let key = window.iter().fold(0u64, |key, byte| key << 8 | u64::from(*byte));
            for value in 1..256usize {
                // The entry is that of the value without its lowest set bit, plus the share of that bit.
                let position = 7 - value.trailing_zeros();
                table[value] = table[value & (value - 1)] ^ (key >> (8 - position)) as u32;
            }
        }
        Self { key: padded, tables }
    }

    /// Returns the key, padded with zeros.
    pub fn key(&self) -> &[u8; KEY_LEN] {
        &self.key
    }

    /// Computes the hash of `input`; bytes behind the first 36 are ignored.
    #[inline]
    #[must_use]
    pub fn hash(&self, input: &[u8]) -> u32 {
        self.hash_from(0, input)
    }

    /// Computes the share of `input` in the hash of a longer input in which it begins at byte `at`. The exclusive or of
    /// the shares of all parts is the hash of the whole.
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
