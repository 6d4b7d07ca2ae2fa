//! The shaper of a port with `rate_out`: frames wait here while their receiver has used up its rate.
//!
//! Each worker has one of each port, with the frames that it is to deliver; the rate is shared by all of
//! them. The forwarder asks [`Port::shape`](crate::plane::port::Port::shape) for each frame: it goes on at
//! once if none waits and there are tokens, and otherwise it is copied, as its sender gets its buffers back,
//! and waits. A timer of the worker [releases](Shaper::pop) frames as tokens come.
//!
//! **Bounds.** The queue is no longer than the bytes and packets that [`MAX_TIME`] allows at the rate, and
//! never larger than [`MAX_BYTES`] and [`MAX_FRAMES`]. One frame always finds room. Frames that find none are
//! dropped (`rate-out`).
//!
//! **CoDel** (RFC 8289, with the marks of its section 3.2 in the reference of RFC 8290). A queue that is
//! short again and again is what TCP needs; one in which frames have waited for more than [`TARGET`] for a
//! whole [`INTERVAL`] only delays. Then the sender is signalled by the next frame, which is marked with CE if
//! both ends know ECN (RFC 3168) and else dropped; the longer the delay lasts, the more frames are.

use std::collections::VecDeque;

use ringferry_packet::vnet::Header;

use super::WireCost;
use super::rate_limit::RateLimit;
use crate::fdb::PortId;

/// Delay that a frame should have at most, bursts aside, in microseconds (RFC 8289, 4.4).
const TARGET: u64 = 5_000;

/// Time for which the delay may exceed [`TARGET`], in microseconds: a round trip of most connections (RFC
/// 8289, 4.3).
const INTERVAL: u64 = 100_000;

/// Number of intervals without marks after which the learned rate of marks is forgotten.
const MEMORY: u64 = 16;

/// The queue's length in time, as a part of a second: 50 ms.
const MAX_TIME: u64 = 20;

/// The queue's length in bytes, however fast the port is: 3 ms at 10 Gbit/s.
const MAX_BYTES: u64 = 4 << 20;

/// The queue's length in bytes that is granted to the slowest port: the largest frame.
const MIN_BYTES: u64 = 64 << 10;

/// The queue's length in frames, whatever their size.
const MAX_FRAMES: usize = 4096;

/// A frame that has waited in a shaper.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Delayed {
    /// The port that sent it. The frame is still charged to that port: if it is handed off to another worker,
    /// it must take the same queue as the port's next frames.
    pub(crate) from: PortId,
    pub(crate) header: Header,
    pub(crate) frame: Vec<u8>,
}

/// A frame in the queue, with its cost and its time of arrival.
#[derive(Debug)]
struct Waiting {
    since: u64,
    cost: WireCost,
    delayed: Delayed,
}

/// The frames that CoDel signalled congestion with, during one or more calls of [`Shaper::pop`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Signals {
    /// Frames that were dropped before the queue was full.
    pub(crate) dropped: Vec<Delayed>,
    /// Frames that were marked with CE.
    pub(crate) marked: u64,
}

/// The shaper of one port in one worker: a queue with CoDel.
#[derive(Debug, Default)]
pub(crate) struct Shaper {
    queue: VecDeque<Waiting>,
    /// Cost of all waiting frames together.
    cost: WireCost,
    /// The longest frame since the queue was last empty.
    longest: u64,
    codel: CoDel,
}

/// A frame of a queue, for another process that goes on with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Queued {
    /// Time of its arrival, in microseconds of the switch's clock.
    pub(crate) since: u64,
    pub(crate) cost: WireCost,
    pub(crate) delayed: Delayed,
}

impl Shaper {
    /// Returns copies of the frames that wait, in their order.
    pub(crate) fn queued(&self) -> impl Iterator<Item = Queued> {
        self.queue.iter().map(|Waiting { since, cost, delayed }| Queued {
            since: *since,
            cost: *cost,
            delayed: delayed.clone(),
        })
    }

    /// Appends a frame that another process has queued. It finds room, as it did there.
    pub(crate) fn requeue(&mut self, queued: Queued) {
        self.push(queued.delayed, queued.cost, queued.since);
    }

    /// Returns true if no frame waits.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Returns the number of frames that wait.
    pub(crate) fn len(&self) -> usize {
        self.queue.len()
    }

    /// Returns true if the queue has room for a frame that costs `cost`, at the rate of `limit`.
    pub(crate) fn has_room(&self, cost: WireCost, limit: &RateLimit) -> bool {
        let (packets, bytes) = limit.per_second();
        let packets = packets.map_or(u64::MAX, |packets| packets / MAX_TIME);
        let bytes = bytes.map_or(MAX_BYTES, |bytes| (bytes / MAX_TIME).clamp(MIN_BYTES, MAX_BYTES));
        let fits = self.cost.packets.saturating_add(cost.packets) <= packets
            && self.cost.bytes.saturating_add(cost.bytes) <= bytes
            && self.queue.len() < MAX_FRAMES;
        self.is_empty() || fits
    }

    /// Appends a frame that waits from `now` on.
    pub(crate) fn push(&mut self, delayed: Delayed, cost: WireCost, now: u64) {
        self.longest = self.longest.max(cost.bytes);
        self.cost.packets += cost.packets;
        self.cost.bytes += cost.bytes;
        self.queue.push_back(Waiting { since: now, cost, delayed });
    }

    /// Takes the frame that has waited longest, with its cost. The caller has checked that there are tokens.
    pub(crate) fn pop(&mut self, now: u64, signals: &mut Signals) -> Option<(Delayed, WireCost)> {
        let Waiting { delayed, cost, .. } = self.dequeue(now, signals)?;
        Some((delayed, cost))
    }

    /// Takes all frames that wait, in the order they came, with their costs.
    pub(crate) fn drain(&mut self) -> impl Iterator<Item = (Delayed, WireCost)> + use<> {
        let Self { queue, .. } = std::mem::take(self);
        queue.into_iter().map(|Waiting { delayed, cost, .. }| (delayed, cost))
    }

    /// Takes the next frame, with true if the delay has exceeded [`TARGET`] for a whole interval (`dodequeue`
    /// of RFC 8289, 5.5).
    fn next(&mut self, now: u64) -> Option<(Waiting, bool)> {
        let Some(waiting) = self.queue.pop_front() else {
            (self.codel.above_since, self.longest) = (None, 0);
            return None;
        };
        self.cost.packets -= waiting.cost.packets;
        self.cost.bytes -= waiting.cost.bytes;
        // A queue of one frame does not count as one: that frame is being sent.
        if now.saturating_sub(waiting.since) < TARGET || self.cost.bytes <= self.longest {
            self.codel.above_since = None;
            return Some((waiting, false));
        }
        let since = *self.codel.above_since.get_or_insert(now);
        Some((waiting, now.saturating_sub(since) >= INTERVAL))
    }

    /// The next frame that is to be sent (`dequeue` of RFC 8289, 5.5).
    fn dequeue(&mut self, now: u64, signals: &mut Signals) -> Option<Waiting> {
        let (mut waiting, mut above) = self.next(now)?;
        if self.codel.dropping {
            self.codel.dropping = above;
            while self.codel.dropping && now >= self.codel.next {
                self.codel.count += 1;
                let next = self.codel.after(self.codel.next);
                if mark(&mut waiting.delayed.frame) {
                    signals.marked += 1;
                    self.codel.next = next;
                    break;
                }
                signals.dropped.push(waiting.delayed);
                let Some(other) = self.next(now) else {
                    self.codel.dropping = false;
                    return None;
                };
                (waiting, above) = other;
                if above {
                    self.codel.next = next;
                } else {
                    self.codel.dropping = false;
                }
            }
        } else if above {
            let marked = mark(&mut waiting.delayed.frame);
            let next = if marked {
                signals.marked += 1;
                Some((waiting, above))
            } else {
                signals.dropped.push(waiting.delayed);
                self.next(now)
            };
            self.codel.begin(now);
            (waiting, _) = next?;
        }
        Some(waiting)
    }
}

/// CoDel's state (RFC 8289, 5.3).
#[derive(Debug, Default)]
struct CoDel {
    /// The time since which every frame has waited too long.
    above_since: Option<u64>,
    dropping: bool,
    /// The time at which the next frame is dropped or marked.
    next: u64,
    /// Signals since dropping began, and the count at which it began last.
    count: u64,
    last_count: u64,
}

impl CoDel {
    /// Returns the time of the signal after one at `at`: the more there were, the sooner.
    fn after(&self, at: u64) -> u64 {
        at + (INTERVAL * 1024) / (self.count * 1024 * 1024).isqrt().max(1)
    }

    /// Begins signalling with the first frame; at the rate of before, if that was just now.
    fn begin(&mut self, now: u64) {
        let before = self.count - self.last_count;
        let recent = now.saturating_sub(self.next) < MEMORY * INTERVAL;
        self.count = if before > 1 && recent { before } else { 1 };
        (self.dropping, self.last_count) = (true, self.count);
        self.next = self.after(now);
    }
}

const TYPE_IPV4: [u8; 2] = [0x08, 0x00];
const TYPE_IPV6: [u8; 2] = [0x86, 0xdd];
const TAGS: [[u8; 2]; 2] = [[0x81, 0x00], [0x88, 0xa8]];

/// Tags in front of an IP header that [`mark`] skips, at most.
const MOST_TAGS: usize = 2;

/// Marks an IP packet with CE (RFC 3168, 5) if its sender says that both ends know ECN; false, and nothing done, if not.
fn mark(frame: &mut [u8]) -> bool {
    let mut at = 12;
    for _ in 0..MOST_TAGS {
        at +=
            if frame.get(at..at + 2).is_some_and(|kind| TAGS.iter().any(|tag| tag == kind)) { 4 } else { 0 };
    }
    let Some((kind, packet)) = frame.get_mut(at..).and_then(<[u8]>::split_first_chunk_mut::<2>) else {
        return false;
    };
    match (*kind, packet) {
        (TYPE_IPV4, [first, tos, rest @ ..]) if rest.len() >= 18 && *first >> 4 == 4 && *tos & 3 != 0 => {
            let before = u16::from_be_bytes([*first, *tos]);
            *tos |= 3;
            let after = u16::from_be_bytes([*first, *tos]);
            // RFC 1624, 3: HC' = ~(~HC + ~m + m').
            let checksum = &mut rest[8..10];
            let sum = u32::from(!u16::from_be_bytes([checksum[0], checksum[1]]))
                + u32::from(!before)
                + u32::from(after);
            let sum = (sum & 0xffff) + (sum >> 16);
            let sum = (sum & 0xffff) + (sum >> 16);
            checksum.copy_from_slice(&(!(sum as u16)).to_be_bytes());
            true
        }
        (TYPE_IPV6, [first, class, rest @ ..])
            if rest.len() >= 38 && *first >> 4 == 6 && *class >> 4 & 3 != 0 =>
        {
            *class |= 0x30;
            true
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests;
