//! What is to become of a packet with too many segments: decided before anything is allocated or changed.
//!
//! ```text
//! collapse    groups of neighbours become one: behind the data of the first, if the tail room of a buffer that
//!             nobody else has takes them, else in a new buffer
//! full copy   all of the packet to large buffers: the fewest segments that it can have
//! ```
//!
//! *The cheapest collapse.* Merging is a matter of what not to copy: the large pieces. So pieces are merged only up
//! to some length, the shortest that is enough, and from the front only until the packet fits. Where all pieces have
//! about the same length, as in a stream of small sends, this copies one piece per segment to be saved and one more
//! for each new buffer, and nothing copies less. It is a few passes over the packet. The exact minimum by dynamic
//! programming takes (pieces x segments) steps, more time than a full copy of 64 KiB.

use ringferry_packet::buffer::{Buf, Chain, Pool, Pools};

use super::count::Runs;
use crate::limits::SegLimits;

/// Merging is worth while if a half of the packet may stay where it is. Otherwise all of it is copied at once: what merging
/// would leave is as many short segments as the device takes, which costs its side more than the rest of the copy, and
/// this one a plan. 128 pieces of 512 bytes for 32 segments: 47 000 instructions with the plan, 26 000 without.
const WORTH: usize = 2;

/// What the planner knows of a packet.
#[derive(Clone, Copy, Debug)]
pub(super) struct Job {
    /// With a [`SegLimits::min_first`] of no less than `header`.
    pub limits: SegLimits,
    /// Bytes in front of the frame.
    pub header: usize,
    /// Whether they get a buffer of their own, if nothing is merged.
    pub own: bool,
    /// Bytes of header and frame.
    pub total: usize,
    /// Bytes that a large buffer has room for.
    pub room: usize,
}

/// A new buffer.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Fresh {
    /// Room that it must have.
    pub need: usize,
    /// Segments of what it will hold, at most.
    segments: usize,
    /// Length of the first of them, at least.
    first: usize,
}

impl Fresh {
    /// One for `len` bytes. Where it will be is not known yet. If its room allows, its data will begin at a
    /// boundary.
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
    /// Bytes of an empty buffer with its room at `addr` to leave out so that `len` bytes have as few segments, and
    /// as long a first one, as they can.
    pub(super) fn skip(&self, addr: u64, len: usize, room: usize) -> usize {
        let Some(most) = self.before_boundary(addr).and_then(|most| usize::try_from(most).ok()) else {
            return 0;
        };
        let first = len.min(self.min_first as usize);
        let worse = self.pieces(addr, len) > self.fewest(len) || self.first_len(addr, len) < first;
        if worse && most + len <= room { most } else { 0 }
    }
}

/// Neighbours that become one.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Group {
    /// Room that its new buffer must have; 0 if it has none.
    pub need: usize,
    /// Bytes in its new buffer, header room included.
    pub len: usize,
    /// Buffers that stay as they are.
    pub kept: usize,
    /// Buffers behind them whose data moves to the new buffer, or to the last that stays.
    pub copied: usize,
}

/// A run of the packet: what is merged or not as a whole.
#[derive(Clone, Copy, Debug)]
pub(super) struct Unit {
    bufs: usize,
    addr: u64,
    len: usize,
    /// Room behind it that may be written.
    tail: usize,
    segments: usize,
}

impl Unit {
    /// Puts the runs of `bufs` into `units`.
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

/// Runs with lengths of as many bits.
#[derive(Clone, Copy, Debug, Default)]
struct Class {
    /// The segments they are.
    segments: usize,
    bytes: usize,
}

/// Classes of lengths.
const CLASSES: usize = usize::BITS as usize + 1;

/// A group that may grow.
#[derive(Clone, Copy, Debug)]
struct Open {
    group: Group,
    addr: u64,
    len: usize,
    tail: usize,
    segments: usize,
    /// Length of its first segment, at least.
    first: usize,
}

impl Job {
    /// Whether a packet of so many segments may go, the first of them so long.
    fn fits(&self, segments: usize, first: usize) -> bool {
        self.limits.fits(segments) && first >= self.first()
    }

    /// Bytes that the first segment holds at least.
    fn first(&self) -> usize {
        self.total.min(self.limits.min_first as usize)
    }

    /// The new buffer for the header alone.
    fn own(&self) -> Option<Fresh> {
        Fresh::of(&self.limits, self.header, self.room)
    }

    /// Plans to change nothing: the segments there are, and the room of the new buffer for the header, 0 if it needs
    /// none. `None` when that does not do.
    #[inline]
    pub fn direct(&self, chain: &Chain) -> Option<(usize, usize)> {
        let lead = if self.own { 0 } else { self.header };
        let mut runs = Runs::of(chain.bufs(), lead).peekable();
        let (before, first, need) = if self.own {
            let fresh = self.own()?;
            (fresh.segments, fresh.first, fresh.need)
        } else {
            let first = runs.peek()?;
            (0, self.limits.first_len(first.addr, first.len), 0)
        };
        // How far a packet is from fitting is nobody's concern here.
        let segments = runs.try_fold(before, |count, run| {
            let count = count + self.limits.pieces(run.addr, run.len);
            self.fits(count, first).then_some(count)
        })?;
        self.fits(segments, first).then_some((segments, need))
    }

    /// Plans to copy everything. `None` when not even that does.
    pub fn full(&self) -> Option<Full> {
        Full::of(&self.limits, self.header, self.total, self.room)
            .filter(|full| self.limits.fits(full.segments))
    }

    /// Plans the merging of neighbours: groups for all of `units`, and the segments that are left. `None` when that
    /// does not do.
    pub fn collapse(&self, units: &[Unit], groups: &mut Vec<Group>) -> Option<usize> {
        let own = if self.own { self.own()?.segments } else { 0 };
        let before = units.iter().fold(own, |count, unit| count.saturating_add(unit.segments));
        let excess = before.saturating_sub(self.limits.segs());
        let mut lengths = [Class::default(); CLASSES];
        for unit in units {
            let Class { segments, bytes } = &mut lengths[(usize::BITS - unit.len.leading_zeros()) as usize];
            *segments += unit.segments;
            *bytes += unit.len;
        }
        if self.stays(&lengths) < self.total / WORTH {
            return None;
        }
        let any_tail = self.own || units.iter().any(|unit| unit.tail > 0);
        // Tail room first: that takes no buffers.
        let stages = if any_tail { &[false, true][..] } else { &[true] };
        stages.iter().find_map(|&copies| {
            let mut enough = 0usize;
            lengths.iter().enumerate().filter(|(_, class)| class.segments > 0).find_map(|(bits, class)| {
                // What is not merged saves nothing.
                enough += class.segments;
                let longest = (1usize << bits) - 1;
                if enough >= excess { self.merge(units, before, longest, copies, groups) } else { None }
            })
        })
    }

    /// Bytes that may stay where they are, about: those of as many segments as the packet may have, the longest ones.
    fn stays(&self, lengths: &[Class; CLASSES]) -> usize {
        let mut left = self.limits.segs();
        let longest_first = lengths.iter().rev().filter(|class| class.segments > 0);
        longest_first.fold(0, |stays, &Class { segments, bytes }| {
            let taken = segments.min(left);
            left -= taken;
            stays + bytes / segments * taken
        })
    }

    /// Merges runs of up to `longest` bytes until the packet fits.
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
        let fresh = self.own()?;
        let group = Group { need: fresh.need, len: self.header, ..Group::default() };
        Some(Open { group, addr: 0, len: self.header, tail: 0, segments: fresh.segments, first: fresh.first })
    }

    /// The group and a run more: in its tail room, in its new buffer, or in a new buffer for both.
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

/// A copy of a whole packet to large buffers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Full {
    /// Segments, at most.
    pub segments: usize,
    /// Large buffers, at most.
    pub buffers: usize,
    /// Bytes between boundaries, if buffers are filled with whole blocks: the fewest segments, but what lies
    /// in front of the first boundary in a buffer stays empty.
    blocks: Option<usize>,
}

impl Full {
    /// Of `total` bytes, `header` of them in front of the frame, to buffers with so much room. The longer the
    /// packet, the more it takes. `None` when its first segment may be too short.
    pub(crate) fn of(limits: &SegLimits, header: usize, total: usize, room: usize) -> Option<Self> {
        let first = header.max(limits.min_first as usize).min(total);
        let plain =
            Self::plain(limits, total, room).filter(|(_, least)| first <= *least).map(|(full, _)| full);
        if plain.is_some_and(|full| limits.fits(full.segments)) {
            return plain;
        }
        Self::aligned(limits, total, room).filter(|_| first <= limits.first_len(0, total)).or(plain)
    }

    /// Buffers are filled from their beginning. With it, the length of the first segment at least.
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

    /// Buffers begin at a boundary, if they have room for a block wherever they are.
    fn aligned(limits: &SegLimits, total: usize, room: usize) -> Option<Self> {
        let boundary = limits.block().and_then(|boundary| usize::try_from(boundary).ok())?;
        let blocks = (room + 1).checked_sub(boundary)? / boundary;
        let buffers = total.div_ceil(boundary).checked_div(blocks)? + 1;
        Some(Self { segments: limits.fewest(total), buffers, blocks: Some(boundary) })
    }

    /// Bytes for a buffer that will be full: as many whole segments as it has room for.
    fn each(limits: &SegLimits, room: usize) -> usize {
        let longest = limits.max_seg_len.max(1) as usize;
        if room > longest { room - room % longest } else { room }
    }

    /// For an empty buffer and the bytes that are left: how many to leave out and how many to write.
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

/// An empty buffer with so much room, from the pool of the smallest that have it.
pub(super) fn alloc(pools: &mut Pools, need: usize) -> Option<Buf> {
    [&mut pools.small, &mut pools.frame, &mut pools.large]
        .into_iter()
        .filter(|pool| pool.layout().room() as usize >= need)
        .find_map(Pool::alloc)
}
