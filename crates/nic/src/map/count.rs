//! Where segments begin and end, and how many there are: pure arithmetic over addresses and lengths.

use ringferry_packet::buffer::{Buf, Chain};

use super::SegList;
use crate::driver::Segment;
use crate::limits::SegLimits;

/// Segments of a packet as it lies in memory. Neighbours that continue each other are one segment, unless
/// that is longer than [`SegLimits::max_seg_len`] or crosses a [`SegLimits::boundary`]; empty buffers are none.
#[inline]
pub fn count(chain: &Chain, limits: &SegLimits) -> usize {
    Runs::of(chain.bufs(), 0).fold(0, |count, run| count.saturating_add(limits.pieces(run.addr, run.len)))
}

/// Replaces the segments by those of these buffers: as many as [`count`] says. They must fit.
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

/// Bytes one behind the other, in one buffer or more.
#[derive(Clone, Copy, Debug)]
pub(super) struct Run {
    pub addr: u64,
    pub len: usize,
    /// Index of the last buffer with data in it.
    pub last: usize,
}

/// The runs of some buffers, each as long as can be.
pub(super) struct Runs<'a> {
    bufs: std::iter::Enumerate<std::slice::Iter<'a, Buf>>,
    /// The next buffer that has data, so that each is looked at once.
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
    /// Longest segment. Limits that were never checked are no reason to divide by zero.
    #[inline(always)]
    fn longest(&self) -> usize {
        self.max_seg_len.max(1) as usize
    }

    /// Bytes between boundaries. Limits that were never checked are no reason for nonsense.
    #[inline(always)]
    pub(super) fn block(&self) -> Option<u64> {
        self.boundary.filter(|boundary| boundary.is_power_of_two())
    }

    /// Bytes from `addr` to the next boundary, at least one.
    #[inline(always)]
    pub(super) fn before_boundary(&self, addr: u64) -> Option<u64> {
        self.block().map(|boundary| boundary - (addr & (boundary - 1)))
    }

    /// Whether the `len` bytes at `addr`, at least one, are one segment.
    #[inline(always)]
    pub(super) fn is_one(&self, addr: u64, len: usize) -> bool {
        len <= self.longest() && self.before_boundary(addr).is_none_or(|most| len as u64 <= most)
    }

    /// Length of the first segment of the `len` bytes at `addr`.
    #[inline(always)]
    pub(super) fn first_len(&self, addr: u64, len: usize) -> usize {
        let len = len.min(self.longest());
        self.before_boundary(addr).map_or(len, |most| most.min(len as u64) as usize)
    }

    /// Segments of the `len` bytes at `addr`.
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
        // No more bytes than an address space has: what is left of a large boundary does not matter.
        let (rest, boundary) = (len - first, usize::try_from(boundary).unwrap_or(usize::MAX));
        let blocks = (rest / boundary).saturating_mul(boundary.div_ceil(longest));
        first.div_ceil(longest).saturating_add(blocks).saturating_add((rest % boundary).div_ceil(longest))
    }

    /// Segments of `len` bytes that begin at a boundary: the fewest possible.
    #[inline]
    pub(super) fn fewest(&self, len: usize) -> usize {
        self.pieces(0, len)
    }

    /// Segments of `len` bytes wherever they begin: never less than [`SegLimits::pieces`].
    pub(super) fn most(&self, len: usize) -> usize {
        let longest = self.longest();
        let Some(boundary) = self.block().and_then(|boundary| usize::try_from(boundary).ok()) else {
            return len.div_ceil(longest);
        };
        // Blocks touched by bytes that begin with the last byte of one.
        let blocks = if len < 2 { len } else { (len - 2) / boundary + 2 };
        if longest >= boundary {
            return blocks;
        }
        // Each block may end with a segment of a single byte.
        len.saturating_add(blocks.saturating_mul(longest - 1)) / longest
    }
}
