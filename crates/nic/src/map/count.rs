//! Counting of segments: pure arithmetic over addresses and lengths, used by the planner before a packet is
//! changed and by the mapper to fill the segment list after it.

use ringferry_packet::buffer::{Buf, Chain};

use super::SegList;
use crate::driver::Segment;
use crate::limits::SegLimits;

/// Returns the number of segments of a packet as it lies in memory. Adjacent buffers form one segment unless
/// that is longer than [`SegLimits::max_seg_len`] or crosses a [`SegLimits::boundary`]; empty buffers count
/// as none.
#[inline]
pub fn count(chain: &Chain, limits: &SegLimits) -> usize {
    Runs::of(chain.bufs(), 0).fold(0, |count, run| count.saturating_add(limits.pieces(run.addr, run.len)))
}

/// Replaces the contents of `segs` by the segments of `bufs`, as many as [`count`] returns. They must fit.
#[inline]
pub(super) fn fill(bufs: &[Buf], limits: &SegLimits, segs: &mut SegList) {
    segs.clear();
    for Run { mut addr, mut len, .. } in Runs::of(bufs, 0) {
        while len > 0 {
            let n = limits.first_len(addr, len);
            segs.push(Segment { addr, len: n as u32 });
            addr += n as u64;
            len -= n;
        }
    }
}

/// A run of contiguous bytes in one or more buffers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Run {
    pub addr: u64,
    pub len: usize,
    /// Index of the last buffer with data in it.
    pub last: usize,
}

/// Iterates over the maximal runs of some buffers.
pub(super) struct Runs<'a> {
    bufs: std::iter::Enumerate<std::slice::Iter<'a, Buf>>,
    /// The next buffer with data, read ahead so that each buffer is read once.
    ahead: Option<Run>,
}

impl<'a> Runs<'a> {
    #[inline]
    pub fn of(bufs: &'a [Buf], lead: usize) -> Self {
        let mut runs = Self { bufs: bufs.iter().enumerate(), ahead: None };
        if lead > 0
            && let Some((last, buf)) = runs.bufs.next()
        {
            runs.ahead = Some(Run { addr: buf.addr() - lead as u64, len: buf.len() + lead, last });
        } else {
            runs.ahead = runs.next_buf();
        }
        runs
    }

    #[inline]
    fn next_buf(&mut self) -> Option<Run> {
        let (last, buf) = self.bufs.by_ref().find(|(_, buf)| !buf.is_empty())?;
        Some(Run { addr: buf.addr(), len: buf.len(), last })
    }
}

impl Iterator for Runs<'_> {
    type Item = Run;

    #[inline]
    fn next(&mut self) -> Option<Run> {
        let mut run = self.ahead?;
        self.ahead = self.next_buf();
        while let Some(next) = self.ahead.filter(|next| next.addr == run.addr + run.len as u64) {
            run.len += next.len;
            run.last = next.last;
            self.ahead = self.next_buf();
        }
        Some(run)
    }
}

impl SegLimits {
    /// Returns the length of the longest segment, at least 1 to avoid a division by zero if the limits were
    /// never checked.
    #[inline(always)]
    fn longest(&self) -> usize {
        self.max_seg_len.max(1) as usize
    }

    /// Returns the distance between boundaries in bytes, ignoring one that is not a power of two, in case the
    /// limits were never checked.
    #[inline(always)]
    pub(super) fn block(&self) -> Option<u64> {
        self.boundary.filter(|boundary| boundary.is_power_of_two())
    }

    /// Returns the number of bytes, at least one, from `addr` to the next boundary.
    #[inline(always)]
    pub(super) fn before_boundary(&self, addr: u64) -> Option<u64> {
        self.block().map(|boundary| boundary - (addr & (boundary - 1)))
    }

    /// Returns true if the `len` bytes (at least one) at `addr` fit one segment.
    #[inline(always)]
    pub(super) fn is_one(&self, addr: u64, len: usize) -> bool {
        len <= self.longest() && self.before_boundary(addr).is_none_or(|most| len as u64 <= most)
    }

    /// Returns the length of the first segment of the `len` bytes at `addr`.
    #[inline(always)]
    pub(super) fn first_len(&self, addr: u64, len: usize) -> usize {
        let len = len.min(self.longest());
        self.before_boundary(addr).map_or(len, |most| most.min(len as u64) as usize)
    }

    /// Returns the number of segments of the `len` bytes at `addr`.
    #[inline]
    pub(super) fn pieces(&self, addr: u64, len: usize) -> usize {
        if len == 0 || self.is_one(addr, len) {
            return len.min(1);
        }
        let longest = self.longest();
        let Some((boundary, most)) = self.block().zip(self.before_boundary(addr)) else {
            return len.div_ceil(longest);
        };
        let first = most.min(len as u64) as usize;
        // A boundary beyond `usize` is never reached, so it may be clamped.
        let (rest, boundary) = (len - first, usize::try_from(boundary).unwrap_or(usize::MAX));
        let blocks = (rest / boundary).saturating_mul(boundary.div_ceil(longest));
        first.div_ceil(longest).saturating_add(blocks).saturating_add((rest % boundary).div_ceil(longest))
    }

    /// Returns the number of segments of `len` bytes that begin at a boundary: the fewest possible.
    #[inline]
    pub(super) fn fewest(&self, len: usize) -> usize {
        self.pieces(0, len)
    }

    /// Returns the largest number of segments of `len` bytes at any address: an upper bound of
    /// [`SegLimits::pieces`].
    pub(super) fn most(&self, len: usize) -> usize {
        let longest = self.longest();
        let Some(boundary) = self.block().and_then(|boundary| usize::try_from(boundary).ok()) else {
            return len.div_ceil(longest);
        };
        // Most blocks are touched if the first byte is the last one of a block.
        let blocks = if len < 2 { len } else { (len - 2) / boundary + 2 };
        if longest >= boundary {
            return blocks;
        }
        // Each block may end with a segment of a single byte.
        len.saturating_add(blocks.saturating_mul(longest - 1)) / longest
    }
}
