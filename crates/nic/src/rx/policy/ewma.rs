//! The length that packets have on average.
//!
//! Good where packets are alike. Where short and long ones are mixed, it is a length that no packet has.

use super::{Bounds, LINE};

/// A moving average: each sample weighs 1/64.
///
/// A whole ring of buffers may be made by one value of it, so it moves slowly against a ring. The 16
/// fractional bits are more than the 6 that the weight takes away: a steady input becomes the average, to the
/// byte.
#[derive(Clone, Copy, Debug, Default)]
pub struct Average(i64);

impl Average {
    const FRACTION: u32 = 16;
    const WEIGHT: u32 = 6;

    /// Adds a sample, less than 2^47.
    #[inline(always)]
    pub fn add(&mut self, sample: usize) {
        self.0 += (((sample as i64) << Self::FRACTION) - self.0) >> Self::WEIGHT;
    }

    /// The average, rounded; 0 before the first sample.
    #[inline]
    pub fn get(self) -> usize {
        ((self.0 + (1 << (Self::FRACTION - 1))) >> Self::FRACTION) as usize
    }
}

/// The average, at least a minimum and at most a page.
#[derive(Debug)]
pub(crate) struct Ewma {
    average: Average,
    header: usize,
    minimum: usize,
    maximum: usize,
}

impl Ewma {
    pub fn new(bounds: &Bounds) -> Self {
        let Bounds { header, minimum, .. } = *bounds;
        Self { average: Average::default(), header, minimum, maximum: bounds.page() }
    }

    #[inline]
    pub fn len(&self) -> usize {
        // Both bounds are whole lines, so that it makes no difference whether to round first.
        (self.header + self.average.get()).next_multiple_of(LINE).clamp(self.minimum, self.maximum)
    }

    #[inline(always)]
    pub fn delivered(&mut self, len: usize) {
        self.average.add(len);
    }
}
