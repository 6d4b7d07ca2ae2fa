//! TCP segments with a number each, of which the first are compared from the first byte to the last.

use ringferry_packet::vnet::Header;

use super::{STATIONS, TCP as HEADERS, Wrong, pattern, to_be_cut};

/// Where the number ends and the pattern begins.
const PATTERN: usize = HEADERS + 8;
/// Payload of the segments that a large frame is to be cut to.
const MSS: usize = 1448;

/// Frames of a row: a private frame, which is written before it is sent, and one that those that arrive are copied to.
#[derive(Debug)]
pub struct Frames {
    /// The virtual header of each.
    pub header: Header,
    frame: Vec<u8>,
    /// Bytes of no short period.
    pattern: Vec<u8>,
    checked: u64,
    pub count: u64,
}

impl Frames {
    /// Frames of `size` bytes, to be cut or sent as they are; the first `checked` are compared whole.
    pub fn new(size: usize, cut: bool, checked: u64) -> Self {
        let mut frame = vec![0; size];
        frame[..HEADERS].copy_from_slice(&STATIONS.tcp::<HEADERS>(size));
        let header = if cut { to_be_cut(HEADERS, MSS) } else { Header::default() };
        Self { header, frame, pattern: pattern(size + 256), checked, count: 0 }
    }

    /// The next frame, to be sent; [`count`](Self::count) it once it is.
    #[inline]
    pub fn next(&mut self) -> &[u8] {
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
    pub fn arrived(&mut self, len: usize, copy: impl FnOnce(&mut [u8]) -> usize) -> Result<(), Wrong> {
        let number = self.count;
        if len != self.frame.len() || copy(&mut self.frame) != len {
            return Err(Wrong(format!("frame {number} arrived with {len} bytes, not {}", self.frame.len())));
        }
        if self.frame[HEADERS..PATTERN] != number.to_le_bytes() {
            return Err(Wrong(format!("frame {number} was lost, repeated or out of order")));
        }
        if number < self.checked {
            let tail = &self.frame[PATTERN..];
            if tail != &self.pattern[number as usize & 0xff..][..tail.len()] {
                return Err(Wrong(format!("frame {number} was damaged")));
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
        for (size, checked) in [(64, 3000), (1496, 3000), (65_535, 300)] {
            let [mut sent, mut arrived] = [(); 2].map(|()| Frames::new(size, size > 4096, checked));
            for _ in 0..checked + 3 {
                let frame = sent.next().to_vec();
                let take = |out: &mut [u8], from: &[u8]| {
                    out.copy_from_slice(from);
                    out.len()
                };
                if sent.count < checked {
                    let mut damaged = frame.clone();
                    damaged[size - 1] ^= 1;
                    let count = arrived.count;
                    assert!(arrived.arrived(size, |out| take(out, &damaged)).is_err());
                    assert!(arrived.arrived(size - 1, |_| size - 1).is_err());
                    assert_eq!(arrived.count, count);
                }
                arrived.arrived(size, |out| take(out, &frame)).unwrap();
                assert!(arrived.arrived(size, |out| take(out, &frame)).is_err(), "repeated");
                sent.count += 1;
            }
        }
    }
}
