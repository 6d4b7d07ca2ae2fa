//! The EWMA policy: the length is an exponentially weighted moving average of packet lengths, as in Linux.
//!
//! It is created when a queue is attached and gets each delivered packet as a sample. It is good if packets are
//! alike; for a mixture of short and long ones it is a length that no packet has.

use super::{Bounds, LINE};

/// An exponentially weighted moving average in which each sample weighs 1/64.
///
/// One value may determine the buffers of a whole ring, so it must change slowly compared to a ring. It has 16
/// fractional bits, more than the 6 bits of the weight, so that a constant input converges to the exact byte.
#[derive(Clone, Copy, Debug, Default)]
pub struct Average(i64);

impl Average {
    const FRACTION: u32 = 16;
    const WEIGHT: u32 = 6;

    /// Adds a sample, which must be less than 2^47.
    #[inline(always)]
    pub fn add(&mut self, sample: usize) {
        self.0 += (((sample as i64) << Self::FRACTION) - self.0) >> Self::WEIGHT;
    }

    /// Returns the rounded average, which starts at 0.
    #[inline]
    pub fn get(self) -> usize {
        ((self.0 + (1 << (Self::FRACTION - 1))) >> Self::FRACTION) as usize
    }
}

/// The policy: the average, at least the minimum and at most a page.
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
        // Both bounds are whole cache lines, so rounding and clamping may be done in either order.
        (self.header + self.average.get()).next_multiple_of(LINE).clamp(self.minimum, self.maximum)
    }

    #[inline(always)]
    pub fn sample(&mut self, len: usize) {
        self.average.add(len);
    }
}
