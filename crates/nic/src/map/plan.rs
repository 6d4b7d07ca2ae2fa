//! Planning of a mapping: pure arithmetic that decides how a packet is mapped, before anything is allocated
//! or changed.
//!
//! The mapper makes a [`Job`] for each packet that is not trivially direct, asks it for a plan
//! ([`Job::direct`], [`Job::collapse`], [`Job::full`], in this order) and passes the plan to `commit`.
//!
//! ```text
//! collapse    a group of neighbours becomes one run: behind the data of its first buffer, if that has a single
//!             owner and enough tail room, else in a new buffer
//! full copy   the whole packet goes to large buffers, which gives the fewest segments
//! ```
//!
//! *The greedy collapse.* Its cost is the bytes copied, so long pieces should stay. Pieces are merged only up to
//! a length limit, the shortest that is sufficient, and from the front only until the packet fits. If all
//! pieces have about the same length, as in a stream of small sends, this copies one piece per segment to be
//! saved and one more for each new buffer, which is optimal. It takes a few passes over the packet. The exact
//! minimum by dynamic programming takes (pieces x segments) steps, longer than a full copy of 64 KiB.

use ringferry_packet::buffer::{Buf, Chain, Pool, Pools};

use super::count::Runs;
use crate::limits::SegLimits;

/// Collapse is tried only if at least 1/`KEEP_SHARE` of the packet's bytes may stay where they are. Otherwise a
/// full copy is cheaper: collapsing would leave as many short segments as the device allows, which costs the
/// device more than the rest of the copy, and planning costs time here. For 128 pieces of 512 bytes and 32
/// segments: 47 000 instructions with the plan, 26 000 without.
const KEEP_SHARE: usize = 2;

/// The input of the planner: the limits and the facts of one packet.
#[derive(Clone, Copy, Debug)]
pub(super) struct Job {
    /// The limits, with [`SegLimits::min_first`] raised to at least `header`.
    pub limits: SegLimits,
    /// Length in bytes of the driver's header in front of the frame.
    pub header: usize,
    /// True if the header needs a buffer of its own unless something is merged.
    pub own: bool,
    /// Length in bytes of header and frame together.
    pub total: usize,
    /// Capacity of a large buffer in bytes.
    pub room: usize,
}

/// A new buffer of a plan, not allocated yet.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Fresh {
    /// Least capacity in bytes.
    pub need: usize,
    /// Upper bound of the number of segments of its data.
    segments: usize,
    /// Lower bound of the length of its first segment in bytes.
    first: usize,
}

impl Fresh {
    /// Plans a buffer for `len` bytes at an unknown address. If `room` allows, it is made so large that its
    /// data can begin at a boundary.
    fn of(limits: &SegLimits, len: usize, room: usize) -> Option<Self> {
        let slack =
            limits.block().map_or(0, |boundary| (boundary - 1).min((len as u64).saturating_sub(1)) as usize);
        if len + slack <= room {
            return Some(Self {
                need: len + slack,
                segments: limits.fewest(len),
                first: limits.first_len(0, len),
            });
        }
        (len <= room).then(|| Self { need: len, segments: limits.most(len), first: 1 })
    }
}

impl SegLimits {
    /// Returns the number of bytes to skip at the start of an empty buffer at `addr`, so that `len` bytes in
    /// it have the fewest segments and the longest first segment.
    pub(super) fn skip(&self, addr: u64, len: usize, room: usize) -> usize {
        let Some(most) = self.before_boundary(addr).and_then(|most| usize::try_from(most).ok()) else {
            return 0;
        };
        let first = len.min(self.min_first as usize);
        let worse = self.pieces(addr, len) > self.fewest(len) || self.first_len(addr, len) < first;
        if worse && most + len <= room { most } else { 0 }
    }
}

/// A group of neighbouring buffers that are merged to one run.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Group {
    /// Least capacity of the group's new buffer in bytes; 0 if it needs none.
    pub need: usize,
    /// Number of bytes in the new buffer, header room included.
    pub len: usize,
    /// Number of buffers that are kept as they are.
    pub kept: usize,
    /// Number of buffers behind those whose data is copied to the new buffer, or to the last one kept.
    pub copied: usize,
}

/// A run of the packet, which is merged or kept as a whole.
#[derive(Clone, Copy, Debug)]
pub(super) struct Unit {
    bufs: usize,
    addr: u64,
    len: usize,
    /// Writable room behind the run in bytes.
    tail: usize,
    segments: usize,
}

impl Unit {
    /// Replaces the contents of `units` by the runs of `bufs`, the first extended by `lead` bytes in front.
    pub fn list(bufs: &[Buf], lead: usize, limits: &SegLimits, units: &mut Vec<Unit>) {
        units.clear();
        let mut from = 0;
        units.extend(Runs::of(bufs, lead).map(|run| {
            let last = &bufs[run.last];
            let count = run.last + 1 - std::mem::replace(&mut from, run.last + 1);
            let tail = if last.is_exclusive() { last.tailroom() } else { 0 };
            Unit {
                bufs: count,
                addr: run.addr,
                len: run.len,
                tail,
                segments: limits.pieces(run.addr, run.len),
            }
        }));
    }
}

/// A length class: all runs whose lengths have the same number of bits.
#[derive(Clone, Copy, Debug, Default)]
struct Class {
    /// Number of segments of the runs in the class.
    segments: usize,
    bytes: usize,
}

/// Number of length classes.
const CLASSES: usize = usize::BITS as usize + 1;

/// The group at the end of the plan, which may still grow.
#[derive(Clone, Copy, Debug)]
struct Open {
    group: Group,
    addr: u64,
    len: usize,
    tail: usize,
    segments: usize,
    /// Lower bound of the length of its first segment in bytes.
    first: usize,
}

impl Job {
    /// Returns true if a packet with so many segments, the first of `first` bytes, is within the limits.
    fn fits(&self, segments: usize, first: usize) -> bool {
        self.limits.fits(segments) && first >= self.first()
    }

    /// Returns the least length of the first segment in bytes.
    fn first(&self) -> usize {
        self.total.min(self.limits.min_first as usize)
    }

    /// Plans a new buffer for the header alone.
    fn header_buf(&self) -> Option<Fresh> {
        Fresh::of(&self.limits, self.header, self.room)
    }

    /// Plans to copy nothing. Returns the number of segments, and the capacity of the new buffer for the
    /// header (0 if it needs none), or `None` if the packet does not fit like that.
    #[inline]
    pub fn direct(&self, chain: &Chain) -> Option<(usize, usize)> {
        let lead = if self.own { 0 } else { self.header };
        let mut runs = Runs::of(chain.bufs(), lead).peekable();
        let (before, first, need) = if self.own {
            let fresh = self.header_buf()?;
            (fresh.segments, fresh.first, fresh.need)
        } else {
            let first = runs.peek()?;
            (0, self.limits.first_len(first.addr, first.len), 0)
        };
        // Counting stops as soon as the packet does not fit.
        let segments = runs.try_fold(before, |count, run| {
            let count = count + self.limits.pieces(run.addr, run.len);
            self.fits(count, first).then_some(count)
        })?;
        self.fits(segments, first).then_some((segments, need))
    }

    /// Plans a full copy. Returns `None` if not even that fits.
    pub fn full(&self) -> Option<Full> {
        Full::of(&self.limits, self.header, self.total, self.room)
            .filter(|full| self.limits.fits(full.segments))
    }

    /// Plans the merging of neighbours. Fills `groups` for all of `units` and returns the number of segments
    /// that remain, or `None` if collapsing is not sufficient or not worth while.
    pub fn collapse(&self, units: &[Unit], groups: &mut Vec<Group>) -> Option<usize> {
        let own = if self.own { self.header_buf()?.segments } else { 0 };
        let before = units.iter().fold(own, |count, unit| count.saturating_add(unit.segments));
        let excess = before.saturating_sub(self.limits.segs());
        let mut lengths = [Class::default(); CLASSES];
        for unit in units {
            let Class { segments, bytes } = &mut lengths[(usize::BITS - unit.len.leading_zeros()) as usize];
            *segments += unit.segments;
            *bytes += unit.len;
        }
        if self.bytes_kept(&lengths) < self.total / KEEP_SHARE {
            return None;
        }
        let any_tail = self.own || units.iter().any(|unit| unit.tail > 0);
        // Merging into tail room is tried first, as it needs no new buffers.
        let stages = if any_tail { &[false, true][..] } else { &[true] };
        stages.iter().find_map(|&copies| {
            let mut enough = 0usize;
            lengths.iter().enumerate().filter(|(_, class)| class.segments > 0).find_map(|(bits, class)| {
                // Only merged runs save segments, so the limit must cover at least `excess` of them.
                enough += class.segments;
                let longest = (1usize << bits) - 1;
                if enough >= excess { self.merge(units, before, longest, copies, groups) } else { None }
            })
        })
    }

    /// Estimates the bytes that may stay where they are: those of the longest segments, as many as the packet
    /// may have.
    fn bytes_kept(&self, lengths: &[Class; CLASSES]) -> usize {
        let mut left = self.limits.segs();
        let longest_first = lengths.iter().rev().filter(|class| class.segments > 0);
        longest_first.fold(0, |stays, &Class { segments, bytes }| {
            let taken = segments.min(left);
            left -= taken;
            stays + bytes / segments * taken
        })
    }

    /// Plans one pass: merges runs of up to `longest` bytes, from the front, until the packet fits. `copies`
    /// allows new buffers; without it only tail room is used.
    fn merge(
        &self,
        units: &[Unit],
        before: usize,
        longest: usize,
        copies: bool,
        groups: &mut Vec<Group>,
    ) -> Option<usize> {
        groups.clear();
        let mut segments = before;
        let mut first = None;
        let mut units = units.iter();
        let mut open = if self.own { self.open_own()? } else { self.open(units.next()?) };
        for unit in units {
            let short = first.is_none() && open.first < self.first();
            if short || !self.limits.fits(segments) {
                let longest = if short { self.total } else { longest };
                let others = segments - open.segments - unit.segments;
                match self.grow(&open, unit, longest, copies) {
                    Some(grown) if short || others + grown.segments < segments => {
                        segments = others + grown.segments;
                        open = grown;
                        continue;
                    }
                    _ => (),
                }
            }
            first.get_or_insert(open.first);
            groups.push(open.group);
            open = self.open(unit);
        }
        groups.push(open.group);
        self.fits(segments, first.unwrap_or(open.first)).then_some(segments)
    }

    fn open(&self, unit: &Unit) -> Open {
        let Unit { bufs, addr, len, tail, segments } = *unit;
        let group = Group { kept: bufs, ..Group::default() };
        Open { group, addr, len, tail, segments, first: self.limits.first_len(addr, len) }
    }

    fn open_own(&self) -> Option<Open> {
        let fresh = self.header_buf()?;
        let group = Group { need: fresh.need, len: self.header, ..Group::default() };
        Some(Open { group, addr: 0, len: self.header, tail: 0, segments: fresh.segments, first: fresh.first })
    }

    /// Adds a run to the open group: in its tail room, in its new buffer, or in a new buffer for both. Returns
    /// `None` if the run is too long or there is no way to add it.
    fn grow(&self, open: &Open, unit: &Unit, longest: usize, copies: bool) -> Option<Open> {
        if unit.len > longest {
            return None;
        }
        let Group { need, kept, copied, .. } = open.group;
        let len = open.len + unit.len;
        if need == 0 && unit.len <= open.tail {
            let group = Group { copied: copied + unit.bufs, ..open.group };
            let (segments, first) =
                (self.limits.pieces(open.addr, len), self.limits.first_len(open.addr, len));
            return Some(Open { group, len, tail: open.tail - unit.len, segments, first, ..*open });
        }
        if need == 0 && (!copies || open.len > longest) {
            return None;
        }
        let fresh = Fresh::of(&self.limits, len, self.room)?;
        let group = Group { need: fresh.need, len, kept: 0, copied: kept + copied + unit.bufs };
        Some(Open { group, addr: 0, len, tail: 0, segments: fresh.segments, first: fresh.first })
    }
}

/// The plan of a full copy of a packet to large buffers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Full {
    /// Upper bound of the number of segments.
    pub segments: usize,
    /// Upper bound of the number of large buffers.
    pub buffers: usize,
    /// Distance between boundaries in bytes, if buffers are filled with whole blocks. That gives the fewest
    /// segments, but leaves the bytes in front of a buffer's first boundary empty.
    blocks: Option<usize>,
}

impl Full {
    /// Plans to copy `total` bytes, `header` of them in front of the frame, to buffers of `room` bytes. The
    /// numbers never decrease with the length of the packet. Returns `None` if the first segment could be too
    /// short.
    pub(crate) fn of(limits: &SegLimits, header: usize, total: usize, room: usize) -> Option<Self> {
        let first = header.max(limits.min_first as usize).min(total);
        let plain =
            Self::plain(limits, total, room).filter(|(_, least)| first <= *least).map(|(full, _)| full);
        if plain.is_some_and(|full| limits.fits(full.segments)) {
            return plain;
        }
        Self::aligned(limits, total, room).filter(|_| first <= limits.first_len(0, total)).or(plain)
    }

    /// Plans to fill buffers from their beginning. Also returns the least length of the first segment.
    fn plain(limits: &SegLimits, total: usize, room: usize) -> Option<(Self, usize)> {
        let each = Self::each(limits, room);
        let filled = total.checked_sub(1)?.checked_div(each)?;
        let last = Fresh::of(limits, total - filled * each, room)?;
        let segments = filled.saturating_mul(limits.most(each)).saturating_add(last.segments);
        let first = match (filled, limits.block()) {
            (0, _) => last.first,
            (_, None) => limits.first_len(0, each),
            (_, Some(_)) => 1,
        };
        Some((Self { segments, buffers: filled + 1, blocks: None }, first))
    }

    /// Plans to fill buffers from their first boundary, if they hold a block at any address.
    fn aligned(limits: &SegLimits, total: usize, room: usize) -> Option<Self> {
        let boundary = limits.block().and_then(|boundary| usize::try_from(boundary).ok())?;
        let blocks = (room + 1).checked_sub(boundary)? / boundary;
        let buffers = total.div_ceil(boundary).checked_div(blocks)? + 1;
        Some(Self { segments: limits.fewest(total), buffers, blocks: Some(boundary) })
    }

    /// Returns the number of bytes in a full buffer: as many whole segments as it has room for.
    fn each(limits: &SegLimits, room: usize) -> usize {
        let longest = limits.max_seg_len.max(1) as usize;
        if room > longest { room - room % longest } else { room }
    }

    /// Returns how many bytes of an empty buffer to skip, and how many of the `left` bytes to write to it.
    pub(super) fn part(&self, limits: &SegLimits, buf: &Buf, left: usize) -> (usize, usize) {
        let (addr, room) = (buf.addr(), buf.tailroom());
        let Some(block) = self.blocks else {
            let each = left.min(Self::each(limits, room));
            return (if each == left { limits.skip(addr, left, room) } else { 0 }, each);
        };
        let skip = limits.before_boundary(addr).map_or(0, |most| most as usize % block);
        let whole = (room - skip) / block * block;
        if left <= room - skip { (skip, left) } else { (skip, whole) }
    }
}

/// Allocates an empty buffer of at least `need` bytes from the first pool, by size, that has one.
pub(super) fn alloc(pools: &mut Pools, need: usize) -> Option<Buf> {
    [&mut pools.small, &mut pools.frame, &mut pools.large]
        .into_iter()
        .filter(|pool| pool.layout().room() as usize >= need)
        .find_map(Pool::alloc)
}
