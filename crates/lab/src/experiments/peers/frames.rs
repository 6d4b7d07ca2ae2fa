//! What the frames are, on both sides: those of testpmd's `txonly`, and numbered ones that can be
//! checked from the first byte to the last.

use crate::experiment::RowError;

use super::case::{BURST, Case, Who};

/// Ethernet, IPv4 and UDP: what `txonly` writes into each frame. It leaves the rest as it finds it.
pub(in crate::experiments) const HEADERS: usize = 14 + 20 + 8;

/// Where a numbered frame's number ends and its pattern begins.
const PATTERN: usize = HEADERS + 8;

/// UDP port of `txonly`, both ways.
const PORT: u16 = 9;

/// Frames of one size.
#[derive(Clone)]
pub(in crate::experiments) struct Format {
    size: usize,
    headers: [u8; HEADERS],
    /// Bytes of no short period; a frame's begin at its number's last byte.
    pattern: Vec<u8>,
}

impl Format {
    pub(in crate::experiments) fn new(size: usize) -> Format {
        let ip_len = (size - 14) as u16;
        let mut headers = [0; HEADERS];
        headers[..12].copy_from_slice(&[2, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 1]);
        headers[12..16].copy_from_slice(&[0x08, 0x00, 0x45, 0x00]);
        headers[16..18].copy_from_slice(&ip_len.to_be_bytes());
        headers[22..24].copy_from_slice(&[64, 17]);
        headers[26..34].copy_from_slice(&[198, 18, 0, 1, 198, 18, 0, 2]);
        let checksum = !ip_sum(&headers[14..34]);
        headers[24..26].copy_from_slice(&checksum.to_be_bytes());
        headers[34..36].copy_from_slice(&PORT.to_be_bytes());
        headers[36..38].copy_from_slice(&PORT.to_be_bytes());
        headers[38..40].copy_from_slice(&(ip_len - 20).to_be_bytes());
        let mut state = 0x9e37_79b9_7f4a_7c15u64;
        let pattern = (0..size + 256).map(|_| {
            // xorshift64
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state as u8
        });
        Format { size, headers, pattern: pattern.collect() }
    }

    /// Bytes of a frame.
    #[inline]
    pub(in crate::experiments) fn size(&self) -> usize {
        self.size
    }

    /// The first bytes of each frame.
    #[inline]
    pub(in crate::experiments) fn headers(&self) -> &[u8; HEADERS] {
        &self.headers
    }

    fn tail(&self, number: u64) -> &[u8] {
        &self.pattern[number as usize & 0xff..][..self.size - PATTERN]
    }

    /// Makes `frame` the numbered one.
    pub(in crate::experiments) fn write(&self, number: u64, frame: &mut [u8]) {
        frame[..HEADERS].copy_from_slice(&self.headers);
        frame[HEADERS..PATTERN].copy_from_slice(&number.to_le_bytes());
        frame[PATTERN..].copy_from_slice(self.tail(number));
    }

    /// Whether `frame` is the one of that number, whole.
    pub(in crate::experiments) fn check(&self, number: u64, frame: &[u8]) -> Result<(), RowError> {
        self.check_len(frame)?;
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&frame[HEADERS..PATTERN]);
        let found = u64::from_le_bytes(bytes);
        if found != number {
            let text =
                format!("frame {number} was expected and frame {found} came: lost, repeated or out of order");
            return Err(RowError::failed(text));
        }
        if frame[..HEADERS] != self.headers || frame[PATTERN..] != *self.tail(number) {
            return Err(RowError::failed(format!("frame {number} of {} bytes was damaged", self.size)));
        }
        Ok(())
    }

    /// Whether `frame` is one of `txonly`'s: its length, its IPv4 header with its checksum, its UDP header.
    pub(in crate::experiments) fn check_txonly(&self, frame: &[u8]) -> Result<(), RowError> {
        self.check_len(frame)?;
        let lengths = frame[16..18] == self.headers[16..18] && frame[38..40] == self.headers[38..40];
        let kind = frame[12..16] == self.headers[12..16] && frame[36..38] == self.headers[36..38];
        if lengths && kind && ip_sum(&frame[14..34]) == 0xffff {
            Ok(())
        } else {
            Err(RowError::failed(format!("a frame of testpmd's was damaged: {:02x?}", &frame[..HEADERS])))
        }
    }

    fn check_len(&self, frame: &[u8]) -> Result<(), RowError> {
        if frame.len() == self.size {
            return Ok(());
        }
        Err(RowError::failed(format!("a frame of {} bytes came, and {} were sent", frame.len(), self.size)))
    }
}

/// The one's complement sum of an IPv4 header.
fn ip_sum(header: &[u8]) -> u16 {
    let sum: u32 = header.chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    folded as u16
}

/// How the receiver of frames tells a good one, while they are checked.
pub(in crate::experiments) struct Checker {
    format: Format,
    /// Frames with numbers, from 0; `None` when testpmd sends, which does not number.
    numbered: Option<u64>,
    checked: u64,
}

impl Checker {
    /// For the frames that `sender` sends.
    pub(in crate::experiments) fn new(case: &Case, sender: Who) -> Checker {
        let format = Format::new(case.size);
        match sender {
            Who::Ringferry => Checker::numbered(format, case.checked()),
            Who::Dpdk => Checker { format, numbered: None, checked: 0 },
        }
    }

    /// For `count` numbered frames.
    pub(in crate::experiments) fn numbered(format: Format, count: u64) -> Checker {
        Checker { format, numbered: Some(count), checked: 0 }
    }

    /// Looks at the next frame.
    pub(in crate::experiments) fn check(&mut self, frame: &[u8]) -> Result<(), RowError> {
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
    pub(in crate::experiments) fn checked(&self) -> u64 {
        self.checked
    }
}

/// Private memory for the frames of one burst, as DPDK has its buffers: those of a burst are the ones
/// that the burst before gave back.
pub(in crate::experiments) struct Pool {
    bytes: Vec<u8>,
    stride: usize,
}

impl Pool {
    /// Buffers for frames of `size` bytes.
    pub(in crate::experiments) fn new(size: usize) -> Pool {
        // An odd number of cache lines, so that the buffers' first lines spread over the cache's sets.
        let lines = (size.div_ceil(64) + 4) | 1;
        Pool { bytes: vec![0; lines * 64 * BURST], stride: lines * 64 }
    }

    /// The buffer of the `at`-th frame of a burst.
    #[inline]
    pub(in crate::experiments) fn frame(&mut self, at: usize) -> &mut [u8] {
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
    fn the_header_checksum_is_right_also_where_it_carries() {
        for size in [64, 1518, 65_000] {
            assert_eq!(ip_sum(&Format::new(size).headers()[14..34]), 0xffff, "{size}");
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
