//! How late frames leave a wire: a histogram, so that the accuracy of the delays can be asked of a switch that runs.

/// Upper bounds of the buckets in nanoseconds: eight to a power of two would be finer than the clock, so these are round numbers of microseconds around
/// the accuracy that is promised, 50 µs.
pub(crate) const BUCKETS: [u64; 15] = [
    1_000, 2_000, 3_000, 5_000, 7_000, 10_000, 15_000, 20_000, 30_000, 50_000, 100_000, 200_000, 500_000,
    1_000_000, 10_000_000,
];

/// Numbers of frames by how late they left.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Lateness {
    /// Frames by bucket; the last has those that were later than all bounds.
    pub(crate) frames: [u64; BUCKETS.len() + 1],
    /// The latest, in nanoseconds.
    pub(crate) max: u64,
}

impl Lateness {
    /// Counts a frame that was so many nanoseconds late.
    pub(crate) fn count(&mut self, late: u64) {
        let bucket = BUCKETS.iter().position(|bound| late <= *bound).unwrap_or(BUCKETS.len());
        self.frames[bucket] += 1;
        self.max = self.max.max(late);
    }

    /// Adds what another worker has counted.
    pub(crate) fn add(&mut self, other: &Lateness) {
        self.frames.iter_mut().zip(other.frames).for_each(|(mine, others)| *mine += others);
        self.max = self.max.max(other.max);
    }
}
