//! What the frames are: TCP segments with a number each, of which the first are compared from the first byte to the last.

use ringferry_packet::vnet::{F_NEEDS_CSUM, GSO_TCPV4, Header};
use ringferry_xen::domain::PAGE;

use super::case::Case;
use crate::experiment::RowError;

/// Ethernet, IPv4 and TCP.
const HEADERS: usize = 14 + 20 + 20;
/// Where the number ends and the pattern begins.
const PATTERN: usize = HEADERS + 8;
/// Payload of the segments that a large frame is to be cut to.
const MSS: u16 = 1448;

/// Frames of a row: a private frame, which is written before it is sent, and one that those that arrive are copied to.
#[derive(Debug)]
pub(super) struct Frames {
    /// What is to be done with each: larger than a page, it is to be cut.
    pub header: Header,
    frame: Vec<u8>,
    /// Bytes of no short period.
    pattern: Vec<u8>,
    checked: u64,
    /// Frames so far.
    pub count: u64,
}

impl Frames {
    pub(super) fn new(case: &Case) -> Self {
        let size = case.size;
        let mut frame = vec![0; size];
        frame[..12].copy_from_slice(&[2, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 1]);
        frame[12..16].copy_from_slice(&[0x08, 0x00, 0x45, 0x00]);
        frame[16..18].copy_from_slice(&((size - 14) as u16).to_be_bytes());
        frame[22..24].copy_from_slice(&[64, 6]);
        frame[26..34].copy_from_slice(&[198, 18, 0, 1, 198, 18, 0, 2]);
        frame[46] = 5 << 4;
        let mut state = 0x9e37_79b9_7f4a_7c15u64;
        let pattern = (0..size + 256).map(|_| {
            // xorshift64
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state as u8
        });
        let mut header = Header::default();
        if size > PAGE {
            let (csum_start, csum_offset, hdr_len) = (34, 16, HEADERS as u16);
            let flags = F_NEEDS_CSUM;
            header = Header { flags, csum_start, csum_offset, hdr_len, ..header };
            (header.gso_type, header.gso_size) = (GSO_TCPV4, MSS);
        }
        Self { header, frame, pattern: pattern.collect(), checked: case.checked(), count: 0 }
    }

    /// The next frame, to be sent; [`count`](Self::count) it once it is.
    #[inline]
    pub(super) fn next(&mut self) -> &[u8] {
        let number = self.count;
        self.frame[HEADERS..PATTERN].copy_from_slice(&number.to_le_bytes());
        if number < self.checked {
            let from = number as usize & 0xff;
            let len = self.frame.len() - PATTERN;
            self.frame[PATTERN..].copy_from_slice(&self.pattern[from..from + len]);
        }
        &self.frame
    }

    /// Takes a frame of `len` bytes that has arrived, which `copy` copies, and looks whether it is the next one: by its number,
    /// and as long as frames are checked by every byte.
    #[inline]
    pub(super) fn arrived(
        &mut self,
        len: usize,
        copy: impl FnOnce(&mut [u8]) -> usize,
    ) -> Result<(), RowError> {
        let number = self.count;
        if len != self.frame.len() || copy(&mut self.frame) != len {
            return Err(RowError::failed(format!(
                "frame {number} arrived with {len} bytes, not {}",
                self.frame.len()
            )));
        }
        if self.frame[HEADERS..PATTERN] != number.to_le_bytes() {
            return Err(RowError::failed(format!("frame {number} was lost, repeated or out of order")));
        }
        if number < self.checked {
            let tail = &self.frame[PATTERN..];
            if tail != &self.pattern[number as usize & 0xff..][..tail.len()] {
                return Err(RowError::failed(format!("frame {number} was damaged")));
            }
            // What the next one does not write must not look right.
            self.frame.fill(0);
        }
        self.count += 1;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_that_are_damaged_lost_or_short_are_found() {
        for case in Case::all(&[1]) {
            let (mut sent, mut arrived) = (Frames::new(&case), Frames::new(&case));
            for _ in 0..case.checked() + 3 {
                let frame = sent.next().to_vec();
                let take = |out: &mut [u8], from: &[u8]| {
                    out.copy_from_slice(from);
                    out.len()
                };
                if sent.count < case.checked() {
                    let mut damaged = frame.clone();
                    damaged[case.size - 1] ^= 1;
                    let count = arrived.count;
                    assert!(arrived.arrived(case.size, |out| take(out, &damaged)).is_err());
                    assert!(arrived.arrived(case.size - 1, |_| case.size - 1).is_err());
                    assert_eq!(arrived.count, count);
                }
                arrived.arrived(case.size, |out| take(out, &frame)).unwrap();
                assert!(arrived.arrived(case.size, |out| take(out, &frame)).is_err(), "repeated");
                sent.count += 1;
            }
        }
    }
}
