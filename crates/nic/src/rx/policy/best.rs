//! The least-cost policy: the length that would have carried recent packets at the least cost.
//!
//! It is created when a queue is attached, gets each delivered packet as a sample, and chooses a length after
//! each window of samples. Lengths are counted in a histogram with four classes per power of two, whose weights
//! are halved after each window (exponential decay). For each candidate, that is, each length that divides a
//! chunk well, the cost of the histogram's packets is summed up: descriptors, memory charged and not used, and
//! work. The cheapest is chosen if it is clearly cheaper than the current one.
//!
//! Two properties make it better than a statistic of the mean:
//! - Packets that are copied are not counted: they take one descriptor of any length and leave the buffer.
//!   In a stream of acknowledgements and 64 KiB frames only the frames count.
//! - The unused end of a buffer is posted again, so a long buffer costs a shorter packet some work, but no
//!   memory.

use arrayvec::ArrayVec;

use super::{Bounds, LINE};

/// Number of samples between choices, about one or two rings. Half as many follow noise; more react late.
const WINDOW: u32 = 512;

/// Number of samples before the first choice.
const FIRST_WINDOW: u32 = 64;

/// Largest number of candidates. If a chunk were divided into more than 24 buffers, they would be shorter than
/// a frame.
const LENGTHS: usize = 24;

/// Number of classes: lengths from 64 bytes to 128 KiB, four classes per power of two.
const CLASSES: usize = 4 * (17 - MIN_LOG);
const MIN_LOG: usize = 6;

/// Weight that a sample adds to its class, so large that rare ones survive a few windows of halving.
const SAMPLE: u32 = 16;

/// Cost of a descriptor, which is written, read and completed, on two CPUs. The unit of all costs is 16 bytes
/// charged and not used, about a third of a nanosecond.
const DESCRIPTOR: usize = 64;
/// Cost of trimming a buffer: four atomic operations until its chunk is whole again. At 64 and less, frames of
/// a few hundred bytes are trimmed from long buffers at rates where that costs throughput.
const TRIM: usize = 96;
/// Cost of copying a short end, and of the small buffer that it is copied to.
const COPY: usize = 32;
/// Number of bytes charged and not used that cost one unit.
const WASTE: usize = 16;

/// A class of the histogram: packets of similar length.
#[derive(Clone, Copy, Debug, Default)]
struct Class {
    /// Number of packets in units of [`SAMPLE`], halved after each window.
    weight: u32,
    /// Longest packet of the previous and of the current window, in bytes.
    longest: [u32; 2],
}

/// The policy and its histogram; see the module's documentation.
#[derive(Debug)]
pub(crate) struct Best {
    classes: [Class; CLASSES],
    /// Number of samples until the next choice.
    left: u32,
    lengths: ArrayVec<usize, LENGTHS>,
    len: usize,
    header: usize,
    copy_break: usize,
    /// Least number of unused bytes that are trimmed.
    trim: usize,
}

impl Best {
    pub fn new(bounds: &Bounds) -> Self {
        let whole_lines = |pieces: usize| bounds.room / pieces / LINE * LINE;
        let first = bounds.per_chunk.max(1);
        let mut lengths: ArrayVec<usize, LENGTHS> =
            (first..first + LENGTHS - 1).map(whole_lines).take_while(|&len| len > bounds.minimum).collect();
        lengths.push(bounds.minimum);
        Self {
            classes: [Class::default(); CLASSES],
            left: FIRST_WINDOW,
            lengths,
            len: bounds.minimum,
            header: bounds.header,
            copy_break: bounds.copy_break,
            trim: if bounds.trims { bounds.trim() } else { usize::MAX },
        }
    }

    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    #[inline(always)]
    pub fn sample(&mut self, len: usize) {
        if len > self.copy_break {
            self.count(len);
        }
    }

    #[inline]
    fn count(&mut self, len: usize) {
        let len = len.clamp(1 << MIN_LOG, (1 << 17) - 1);
        let log = len.ilog2() as usize;
        let class = &mut self.classes[4 * (log - MIN_LOG) + (len >> (log - 2)) % 4];
        class.weight += SAMPLE;
        class.longest[1] = class.longest[1].max(len as u32);
        self.left -= 1;
        if self.left == 0 {
            self.choose();
        }
    }

    #[cold]
    fn choose(&mut self) {
        let now = self.cost(self.len);
        let best = self.lengths.iter().map(|&len| (self.cost(len), len)).min();
        if let Some((cost, len)) = best
            && cost + cost / 16 < now
        {
            self.len = len;
        }
        for class in &mut self.classes {
            class.weight /= 2;
            class.longest = [class.longest[1], 0];
        }
        self.left = WINDOW;
    }

    /// Returns the cost of carrying the histogram's packets in buffers of `len` bytes.
    fn cost(&self, len: usize) -> u64 {
        let used = self.classes.iter().filter(|class| class.weight > 0 && class.longest != [0, 0]);
        used.map(|class| {
            let longest = class.longest[0].max(class.longest[1]) as usize;
            u64::from(class.weight) * self.cost_of_one(longest + self.header, len) as u64
        })
        .sum()
    }

    /// Returns the cost of carrying one packet of `bytes`, header included, in buffers of `len` bytes.
    fn cost_of_one(&self, bytes: usize, len: usize) -> usize {
        let buffers = bytes.div_ceil(len);
        let end = bytes - (buffers - 1) * len;
        let unused = len - end;
        let work = if buffers > 1 && end <= self.copy_break {
            COPY
        } else if unused >= self.trim {
            TRIM
        } else {
            unused / WASTE
        };
        buffers * DESCRIPTOR + work
    }
}
