//! Wires: what a frame meets between the two ports of a `[[wire]]`.
//!
//! **Life cycle.** The control plane compiles the [`WireEnd`] of a port into its policy, with a [`Line`] that all workers
//! share. Each worker that gets such a policy gives its [`Port`](crate::plane::port::Port) a [`WireQueue`], and another policy of the same wire changes that
//! one: what waits goes on waiting. The forwarder sends all that one end sends to the other ([`decide`](crate::plane::forward)), where the
//! queue [admits](WireQueue::admit) each frame; a timer of the worker takes out those whose time has come.
//!
//! ```text
//!   frame ─► lost? ─► room? ─► twice? ─► rate: its place on the line ─► delay, or at once (reorder) ─► one bit wrong? ─► waits until it is due
//! ```
//!
//! A frame that meets nothing is not copied: it is delivered from its sender's memory as any other. One that has to wait, or is changed, is copied.
//!
//! | file | idea |
//! |---|---|
//! | `mod` | the queue of one end in one worker: what becomes of a frame, and which is due |
//! | `model` | the impairments as a function of the seed, the frames and their times |
//! | `random` | the generator, and the distributions |
//! | `due` | frames in the order in which they are due |
//! | `line` | the rate, which all workers share |
//! | `lateness` | how late frames leave |
//! | `pass` | frames of a burst on their way through: copied, cut, changed |

mod due;
mod lateness;
mod line;
mod model;
mod pass;
mod random;

use std::sync::Arc;

use smallvec::SmallVec;

use crate::impairments::{Impairments, WireEnd};
use crate::plane::policy::WireCost;
use crate::plane::policy::shaper::{Delayed, Queued};
use due::{Due, DueQueue};
pub(crate) use lateness::{BUCKETS, Lateness};
pub(crate) use line::Line;
pub(crate) use model::ModelState;
use model::{Model, Passage};

/// Memory that a waiting frame takes beside its bytes: its place in the queue, and what the allocator adds.
const OVERHEAD: u64 = 128;

/// A port's end of a wire, as all workers share it.
#[derive(Clone, Debug)]
pub(crate) struct CompiledEnd {
    pub(crate) end: Arc<WireEnd>,
    pub(crate) line: Arc<Line>,
}

impl CompiledEnd {
    /// Compiles an end. The line of `before`, if that is the same wire's, goes on.
    pub(crate) fn new(end: &WireEnd, before: Option<&CompiledEnd>) -> CompiledEnd {
        let same = before.filter(|before| before.end.wire == end.wire);
        CompiledEnd {
            end: Arc::new(end.clone()),
            line: same.map(|same| Arc::clone(&same.line)).unwrap_or_default(),
        }
    }
}

/// What becomes of a frame at the end of a wire.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Admission {
    /// It goes on at once, as it is.
    Passes,
    /// It waits: once for each passage.
    Waits(SmallVec<[Passage; 2]>),
    /// It is lost on the wire.
    Lost,
    /// It finds no room.
    NoRoom,
}

/// The frames that wait at one end of a wire in one worker.
#[derive(Debug)]
pub(crate) struct WireQueue {
    end: CompiledEnd,
    model: Model,
    waiting: DueQueue,
    /// Memory of all that waits.
    bytes: u64,
    /// When the frames that wait for the rate will have been sent, in their order.
    sending: std::collections::VecDeque<u64>,
    lateness: Lateness,
    /// What frames that were cut and copied since it was last asked have cost.
    cost: u64,
}

/// What waits at one end of a wire in one worker, for people.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct WireState {
    pub(crate) frames: u64,
    pub(crate) bytes: u64,
    pub(crate) lateness: Lateness,
}

impl WireState {
    /// Adds what waits in another worker.
    pub(crate) fn add(&mut self, other: &WireState) {
        self.frames += other.frames;
        self.bytes += other.bytes;
        self.lateness.add(&other.lateness);
    }
}

impl WireQueue {
    /// Makes an empty queue.
    pub(crate) fn new(end: CompiledEnd) -> WireQueue {
        let model = Model::new(end.end.seed, end.end.direction);
        WireQueue {
            end,
            model,
            waiting: DueQueue::default(),
            bytes: 0,
            sending: std::collections::VecDeque::new(),
            lateness: Lateness::default(),
            cost: 0,
        }
    }

    /// Goes on with other impairments. What waits is due when it was; chance goes on where it is, unless there is another seed.
    pub(crate) fn become_another(&mut self, end: CompiledEnd) {
        let seed = |end: &CompiledEnd| (end.end.seed, end.end.direction);
        if seed(&self.end) != seed(&end) {
            self.model = Model::new(end.end.seed, end.end.direction);
        }
        self.end = end;
    }

    /// Returns true if this is the queue of that wire.
    pub(crate) fn is_of(&self, end: &CompiledEnd) -> bool {
        self.end.end.wire == end.end.wire
    }

    fn impairments(&self) -> &Impairments {
        &self.end.end.impairments
    }

    /// Returns true if frames pass as they are, and at once.
    pub(crate) fn is_open(&self) -> bool {
        self.waiting.is_empty() && self.impairments().is_none()
    }

    /// Returns true if nothing waits.
    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Returns the number of frames that wait.
    pub(crate) fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Decides what becomes of a frame of `len` bytes that comes at `now`, in nanoseconds.
    pub(crate) fn admit(&mut self, len: u64, now: u64) -> Admission {
        let impairments = &self.end.end.impairments;
        if self.model.loses(impairments) {
            return Admission::Lost;
        }
        if !self.has_room(len, now) {
            return Admission::NoRoom;
        }
        let impairments = &self.end.end.impairments;
        let copies = if self.model.doubles(impairments) { 2 } else { 1 };
        let mut passages = SmallVec::new();
        for copy in 0..copies {
            if copy > 0 && !self.has_room(2 * len + OVERHEAD, now) {
                break;
            }
            let impairments = &self.end.end.impairments;
            let sent = match impairments.rate {
                None => now,
                Some(rate) => {
                    let sent = self.end.line.send(len, rate, now);
                    self.sending.push_back(sent);
                    sent
                }
            };
            passages.push(self.model.passage(impairments, sent));
        }
        match &passages[..] {
            [Passage { due, flip: None, .. }] if *due <= now && self.waiting.is_empty() => Admission::Passes,
            _ => Admission::Waits(passages),
        }
    }

    /// Returns true if a frame of `len` bytes finds room.
    fn has_room(&mut self, len: u64, now: u64) -> bool {
        while self.sending.front().is_some_and(|sent| *sent <= now) {
            self.sending.pop_front();
        }
        let Impairments { rate, limit, limit_bytes, .. } = self.impairments();
        (rate.is_none() || self.sending.len() < *limit as usize)
            && self.bytes + len + OVERHEAD <= *limit_bytes
    }

    /// Returns for how many nanoseconds a frame of `len` bytes would be on the wire that comes at `now`, jitter aside; `None` if it found no room.
    pub(crate) fn outlook(&self, len: u64, now: u64) -> Option<u64> {
        let Impairments { delay, rate, limit, limit_bytes, .. } = self.impairments();
        let queued = self.sending.iter().filter(|sent| **sent > now).count();
        let is_full =
            rate.is_some() && queued >= *limit as usize || self.bytes + len + OVERHEAD > *limit_bytes;
        let sent = rate.map_or(now, |rate| self.end.line.would_send(len, rate, now));
        (!is_full).then(|| sent - now + delay)
    }

    /// Puts a frame into the queue until it is due.
    pub(crate) fn push(&mut self, due: u64, delayed: Delayed) {
        self.bytes += delayed.frame.len() as u64 + OVERHEAD;
        self.waiting.push(due, delayed);
    }

    /// Takes the next frame that is due at `now`, in nanoseconds.
    pub(crate) fn pop(&mut self, now: u64) -> Option<Delayed> {
        let Due { due, delayed, .. } = self.waiting.pop(now)?;
        self.bytes -= delayed.frame.len() as u64 + OVERHEAD;
        self.lateness.count(now - due);
        Some(delayed)
    }

    /// Takes the next frame of a wire that is no more, due or not.
    pub(crate) fn pop_stranded(&mut self) -> Option<Delayed> {
        self.waiting.pop(u64::MAX).map(|Due { delayed, .. }| delayed)
    }

    /// Returns when the next frame is due, in nanoseconds.
    pub(crate) fn next_due(&self) -> Option<u64> {
        self.waiting.next()
    }

    /// Takes what cutting and copying frames has cost.
    pub(crate) fn take_cost(&mut self) -> u64 {
        std::mem::take(&mut self.cost)
    }

    /// Returns what waits, for people.
    pub(crate) fn state(&self) -> WireState {
        WireState { frames: self.waiting.len() as u64, bytes: self.bytes, lateness: self.lateness.clone() }
    }

    /// Returns copies of the frames that wait, for another process, in the order in which they are due; `since` of each is when it is.
    pub(crate) fn queued(&self) -> impl Iterator<Item = Queued> {
        let queued = |Due { due, delayed, .. }: &Due| Queued {
            since: *due,
            cost: WireCost::default(),
            delayed: delayed.clone(),
        };
        self.waiting.in_order().map(queued)
    }

    /// Returns where chance stands, for another process.
    pub(crate) fn model(&self) -> ModelState {
        self.model.state()
    }

    /// Goes on with the chance of another process.
    pub(crate) fn set_model(&mut self, state: &ModelState) {
        self.model.set_state(state);
    }

    /// Appends a frame that waited in another process.
    pub(crate) fn requeue(&mut self, queued: Queued) {
        self.push(queued.since, queued.delayed);
    }
}

#[cfg(test)]
mod tests;
