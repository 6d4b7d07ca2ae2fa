//! The length that costs least for the packets of late.
//!
//! The lengths of late are counted in classes, four to the power of two, each halved from window to window. For
//! every length that divides a chunk well, the cost of carrying just those packets is added up: descriptors,
//! memory that is charged and not used, and work. The cheapest wins, if it is clearly cheaper than the
//! present one.
//!
//! Two things make this better than any statistic of the mean:
//! - Packets that are copied are not counted. They take a descriptor whatever its length, and leave the
//!   buffer. In a stream of acknowledgements and 64 KiB frames only the frames have a say.
//! - The end of a buffer that a packet did not need is posted again. Long buffers cost a packet
//!   that is not so long some work, but no memory.

use arrayvec::ArrayVec;

use super::{Bounds, LINE};

/// Packets between choices: a ring or two. Half as many tempt it to follow noise; more make it late.
const WINDOW: u32 = 512;

/// Packets before the first choice.
const FIRST_WINDOW: u32 = 64;

/// Most lengths to choose from. More than 24 in a chunk are shorter than a frame.
const LENGTHS: usize = 24;

/// Lengths from 64 bytes to 128 KiB, four to each power of two.
const CLASSES: usize = 4 * (17 - MIN_LOG);
const MIN_LOG: usize = 6;

/// What a sample adds to its class: large enough that rare ones survive some windows.
const SAMPLE: u32 = 16;

/// Costs, in units of 16 bytes that are charged and not used, which is about a third of a nanosecond.
/// A descriptor is written, read and completed, on two CPUs.
const DESCRIPTOR: usize = 64;
/// Cutting a buffer is four atomic operations until its chunk is whole again. At 64 and less, frames of a few
/// hundred bytes are cut from long buffers, at rates where that costs throughput.
const CUT: usize = 96;
/// Copying a short end, and the small buffer it is copied to.
const COPY: usize = 32;
/// Bytes of waste that are one unit.
const WASTE: usize = 16;

/// Packets of about one length.
#[derive(Clone, Copy, Debug, Default)]
struct Class {
    /// How many, in [`SAMPLE`]s; older ones count less.
    weight: u32,
    /// The longest of the window before, and of this one.
    longest: [u32; 2],
}

/// See the head of this file.
#[derive(Debug)]
pub(crate) struct Best {
    classes: [Class; CLASSES],
    /// Samples until the next choice.
    left: u32,
    lengths: ArrayVec<usize, LENGTHS>,
    len: usize,
    header: usize,
    copy_break: usize,
    /// Ends of so many bytes are cut off.
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
    pub fn delivered(&mut self, len: usize) {
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

    /// What it costs to carry the packets of late in buffers of `len` bytes.
    fn cost(&self, len: usize) -> u64 {
        let used = self.classes.iter().filter(|class| class.weight > 0 && class.longest != [0, 0]);
        used.map(|class| {
            let longest = class.longest[0].max(class.longest[1]) as usize;
            u64::from(class.weight) * self.cost_of_one(longest + self.header, len) as u64
        })
        .sum()
    }

    /// What it costs to carry a packet of `bytes`, header included, in buffers of `len` bytes.
    fn cost_of_one(&self, bytes: usize, len: usize) -> usize {
        let buffers = bytes.div_ceil(len);
        let end = bytes - (buffers - 1) * len;
        let unused = len - end;
        let work = if buffers > 1 && end <= self.copy_break {
            COPY
        } else if unused >= self.trim {
            CUT
        } else {
            unused / WASTE
        };
        buffers * DESCRIPTOR + work
    }
}
