//! UDP frames of one length: those of testpmd's `txonly`, and numbered ones that can be checked from the first byte to the
//! last.

use ringferry_packet::checksum::Sum;

use super::{ETHERNET, IP, STATIONS, UDP, Wrong, pattern};

/// Frames that are made and handled together: DPDK's burst.
pub const BURST: usize = 32;

/// The indexes of the frames of a burst.
pub(crate) const EACH: [u32; BURST] = {
    let (mut each, mut at) = ([0; BURST], 0);
    while at < BURST {
        each[at] = at as u32;
        at += 1;
    }
    each
};

/// Ethernet, IPv4 and UDP: what `txonly` writes into each frame. It leaves the rest as it finds it.
pub const HEADERS: usize = UDP;

/// Where a numbered frame's number ends and its pattern begins.
const PATTERN: usize = HEADERS + 8;

/// The format of frames of one size.
#[derive(Clone)]
pub struct Format {
    size: usize,
    headers: [u8; HEADERS],
    /// Bytes of no short period; a frame's begin at its number's last byte.
    pattern: Vec<u8>,
}

impl Format {
    pub fn new(size: usize) -> Format {
        Format { size, headers: STATIONS.udp(size), pattern: pattern(size + 256) }
    }

    #[inline]
    pub fn size(&self) -> usize {
        self.size
    }

    /// The first bytes of each frame.
    #[inline]
    pub fn headers(&self) -> &[u8; HEADERS] {
        &self.headers
    }

    fn tail(&self, number: u64) -> &[u8] {
        &self.pattern[number as usize & 0xff..][..self.size - PATTERN]
    }

    /// Makes `frame` the numbered one.
    pub fn write(&self, number: u64, frame: &mut [u8]) {
        frame[..HEADERS].copy_from_slice(&self.headers);
        frame[HEADERS..PATTERN].copy_from_slice(&number.to_le_bytes());
        frame[PATTERN..].copy_from_slice(self.tail(number));
    }

    /// Checks that `frame` is the one of that number, whole.
    pub fn check(&self, number: u64, frame: &[u8]) -> Result<(), Wrong> {
        self.check_len(frame)?;
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&frame[HEADERS..PATTERN]);
        let found = u64::from_le_bytes(bytes);
        if found != number {
            let text =
                format!("frame {number} was expected and frame {found} came: lost, repeated or out of order");
            return Err(Wrong(text));
        }
        if frame[..HEADERS] != self.headers || frame[PATTERN..] != *self.tail(number) {
            return Err(Wrong(format!("frame {number} of {} bytes was damaged", self.size)));
        }
        Ok(())
    }

    /// Checks that `frame` is one of `txonly`'s: its length, its IPv4 header with its checksum, its UDP header.
    pub fn check_txonly(&self, frame: &[u8]) -> Result<(), Wrong> {
        self.check_len(frame)?;
        let lengths = frame[16..18] == self.headers[16..18] && frame[38..40] == self.headers[38..40];
        let kind = frame[12..16] == self.headers[12..16] && frame[36..38] == self.headers[36..38];
        let mut sum = Sum::new();
        sum.add(&frame[ETHERNET..IP]);
        if lengths && kind && sum.finish() == 0 {
            Ok(())
        } else {
            Err(Wrong(format!("a frame of testpmd's was damaged: {:02x?}", &frame[..HEADERS])))
        }
    }

    fn check_len(&self, frame: &[u8]) -> Result<(), Wrong> {
        if frame.len() == self.size {
            return Ok(());
        }
        Err(Wrong(format!("a frame of {} bytes came, and {} were sent", frame.len(), self.size)))
    }
}

/// How the receiver of frames tells a good one, while they are checked.
pub struct Checker {
    format: Format,
    /// Frames with numbers, from 0; `None` when testpmd sends, which does not number.
    numbered: Option<u64>,
    checked: u64,
}

impl Checker {
    /// A checker for `count` numbered frames.
    pub fn numbered(format: Format, count: u64) -> Checker {
        Checker { format, numbered: Some(count), checked: 0 }
    }

    /// A checker for frames of testpmd's.
    pub fn txonly(format: Format) -> Checker {
        Checker { format, numbered: None, checked: 0 }
    }

    /// Looks at the next frame.
    pub fn check(&mut self, frame: &[u8]) -> Result<(), Wrong> {
        match self.numbered {
            Some(count) if self.checked < count => self.format.check(self.checked, frame)?,
            // The sender runs already, and the receiver has not heard yet.
            Some(_) => return Ok(()),
            None => self.format.check_txonly(frame)?,
        }
        self.checked += 1;
        Ok(())
    }

    /// Frames that were good.
    pub fn checked(&self) -> u64 {
        self.checked
    }
}

/// Private memory for the frames of one burst, as DPDK has its buffers: those of a burst are the ones
/// that the burst before gave back.
pub struct Pool {
    bytes: Vec<u8>,
    stride: usize,
}

impl Pool {
    /// Buffers for frames of `size` bytes.
    pub fn new(size: usize) -> Pool {
        // An odd number of cache lines, so that the buffers' first lines spread over the cache's sets.
        let lines = (size.div_ceil(64) + 4) | 1;
        Pool { bytes: vec![0; lines * 64 * BURST], stride: lines * 64 }
    }

    /// The buffer of the `at`-th frame of a burst.
    #[inline]
    pub fn frame(&mut self, at: usize) -> &mut [u8] {
        &mut self.bytes[at * self.stride..][..self.stride]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_damage_to_a_numbered_frame_is_found() {
        for size in [64, 256, 1518] {
            let format = Format::new(size);
            let mut frame = vec![0; size];
            format.write(300, &mut frame);
            format.check(300, &frame).unwrap();
            format.check_txonly(&frame).unwrap();
            assert!(format.check(301, &frame).is_err());
            assert!(format.check(300, &frame[..size - 1]).is_err());
            for at in 0..size {
                frame[at] ^= 0x10;
                assert!(format.check(300, &frame).is_err(), "byte {at} of {size}");
                frame[at] ^= 0x10;
            }
        }
    }

    #[test]
    fn a_checker_takes_each_number_once_and_in_order() {
        let format = Format::new(64);
        let mut checker = Checker::numbered(format.clone(), 1000);
        let mut frame = [0; 64];
        for number in 0..300 {
            format.write(number, &mut frame);
            checker.check(&frame).unwrap();
        }
        assert!(checker.check(&frame).is_err(), "twice");
        format.write(301, &mut frame);
        assert!(checker.check(&frame).is_err(), "one left out");
        assert_eq!(checker.checked(), 300);
    }
}
