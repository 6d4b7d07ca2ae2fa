//! Guests that take no packets any more: a receiveq is filled, and its driver posts nothing.
//!
//! A guest that hangs, or is paused, keeps its rings. The switch goes on to fill the buffers that are posted there, for as long as there are any, and nothing in its counters says that nobody
//! looks at them. What says so is the position up to which the driver has posted buffers: a guest that takes packets moves it, though not after each. A driver that wants to be called at a position
//! (EVENT_IDX) moves that one, too, once it has taken what there is: so a guest that hangs is told by the first packet that it leaves.
//!
//! The control plane's thread asks the workers with its tick, and takes their answers with the next one, so that it waits for nobody. It asks while
//! packets are put into receiveqs, or one is stalled: an idle switch sleeps.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use ringferry_control::snapshot::StallSnapshot;
use ringferry_ring::Unanswered;
use ringferry_virtio_net::queue_index;

use crate::fdb::PortId;
use crate::log_limit::LogLimit;
use crate::ports::Interface;
use crate::ports::queues::{QueueState, Workers};
use crate::ports::table::PortTable;

/// Entries of a receiveq that its driver may have used and not posted again without being late. Drivers collect them: Linux's and DPDK's virtio-net post anew when up to 32 are missing.
const COLLECTED: u16 = 64;

/// A driver that has posted nothing for so long though it should have is said to be stalled. A guest that gets no processor for a second is busy; what takes longer a user notices.
const PATIENCE: Duration = Duration::from_secs(3);

/// Most ports that workers are asked about in a tick. A look at a ring is a cache line that another processor has: of 1000 ports it would hold up a worker for a
/// millisecond or two.
const AT_ONCE: usize = 64;

/// What is seen of a receiveq.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Seen {
    posted: u16,
    available: u16,
    unanswered: Option<Unanswered>,
}

/// A receiveq, since its driver has last been seen to post buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Receiveq {
    /// As it was when it was last looked at.
    seen: Seen,
    /// Entries that were available when the driver had posted buffers.
    had: u16,
    /// Its driver was seen to move the position at which it wants to be called, and so does not poll.
    asks: bool,
    /// When it was first seen that the driver should have taken packets or posted buffers, and has not.
    since: Option<Instant>,
    is_logged: bool,
}

impl Receiveq {
    fn new(seen: Seen) -> Receiveq {
        Receiveq { seen, had: seen.available, asks: false, since: None, is_logged: false }
    }

    /// Goes on to a later state.
    fn after(self, now: Instant, seen: Seen) -> Receiveq {
        let Seen { posted, available, unanswered } = seen;
        let has_moved = match (self.seen.unanswered, unanswered) {
            (Some(before), Some(now)) => before.since != now.since,
            _ => false,
        };
        let has_posted = posted != self.seen.posted;
        // One that posts buffers and has left the position where it was polls.
        let is_left = !has_moved && has_posted && unanswered.is_some_and(|left| left.entries > 0);
        let asks = has_moved || self.asks && !is_left;
        let (had, is_logged) = if has_posted { (available, false) } else { (self.had, self.is_logged) };
        let left = unanswered.filter(|_| asks).map(|left| left.entries);
        let is_filled = had.saturating_sub(available) > COLLECTED;
        let is_due = left.map_or(is_filled, |left| left > 0) || available == 0;
        let since = self.since.filter(|_| !(has_posted || has_moved && available > 0));
        Receiveq { seen, had, asks, since: is_due.then(|| since.unwrap_or(now)), is_logged }
    }

    /// Returns true if the driver has posted nothing since the ring was new.
    fn has_never_posted(&self) -> bool {
        self.had == 0 && is_start(self.seen.posted)
    }

    /// The stall, if there is one and it goes on: `available` entries are what the ring has now. If these are more than they were the driver has posted some.
    fn stall(&self, now: Instant, available: u16) -> Option<StallSnapshot> {
        let lasts = now.saturating_duration_since(self.since?);
        let is_stalled = lasts >= PATIENCE && available <= self.seen.available;
        let used = |had: u16| had.saturating_sub(available);
        let entries = match self.seen.unanswered.filter(|_| self.asks) {
            Some(left) => left.entries + used(self.seen.available),
            None => used(self.had),
        };
        is_stalled.then_some(StallSnapshot { entries, seconds: lasts.as_secs() })
    }
}

/// Returns true for the position of a ring that is new: 0. Beside it a packed ring's has a bit that is 1 then.
pub(crate) fn is_start(position: u16) -> bool {
    position & 0x7fff == 0
}

/// The states of the queues of one worker.
type States = Vec<(PortId, QueueState)>;

/// The receiveqs that were looked at.
#[derive(Debug)]
pub(crate) struct Stalls {
    rings: BTreeMap<(PortId, u16), Receiveq>,
    /// Bursts for each port, when the workers were last asked about it.
    bursts: BTreeMap<PortId, u64>,
    /// Where to go on, if there were too many.
    next: PortId,
    /// When they were asked, and what has not been answered.
    asked: Instant,
    about: Arc<[PortId]>,
    awaited: Vec<Receiver<States>>,
    /// Of each port one, as a guest can stall again and again.
    limits: BTreeMap<PortId, LogLimit>,
}

impl Default for Stalls {
    fn default() -> Stalls {
        Stalls {
            rings: BTreeMap::new(),
            bursts: BTreeMap::new(),
            next: PortId(0),
            asked: Instant::now(),
            about: Arc::default(),
            awaited: Vec::new(),
            limits: BTreeMap::new(),
        }
    }
}

impl Stalls {
    /// Takes what workers have answered since the last tick, and asks them again if there is something to ask for.
    pub(crate) fn tick(&mut self, now: Instant, ports: &PortTable, workers: &Workers) {
        let awaited = self.awaited.len();
        let answers: Vec<States> =
            self.awaited.drain(..).filter_map(|answer| answer.try_recv().ok()).collect();
        let is_whole = answers.len() == awaited;
        let states = answers.concat();
        if is_whole {
            self.forget_stopped(&states);
        }
        let asked = self.asked;
        let name = |id| ports.interfaces().find(|port| port.id == id).map(|port| port.name.to_owned());
        self.observe(asked, states.iter().map(|(id, state)| (*id, state)));
        self.log(asked, name);
        let bursts = |port: Interface<'_>| (port.id, port.counters.sum_of(|counters| &counters.tx_bursts));
        let bursts: BTreeMap<PortId, u64> = ports.interfaces().map(bursts).collect();
        // What has gone has no stalls.
        self.rings.retain(|(id, _), _| bursts.contains_key(id));
        self.limits.retain(|id, _| bursts.contains_key(id));
        let due = self.due(&bursts);
        if !due.is_empty() {
            self.bursts.extend(due.iter().map(|id| (*id, bursts[id])));
            self.asked = now;
            self.about = due.into();
            self.awaited = workers.begin_to_inspect(Arc::clone(&self.about));
        }
        self.bursts.retain(|id, _| bursts.contains_key(id));
    }

    /// Returns the ports that are to be looked at: those for which there were bursts since they last were, and those with a stall; after so many the others come with the
    /// next ticks.
    fn due(&mut self, bursts: &BTreeMap<PortId, u64>) -> Vec<PortId> {
        let is_stalled = |id: &PortId| {
            let of_port = (*id, 0)..=(*id, u16::MAX);
            self.rings.range(of_port).any(|(_, ring)| ring.since.is_some())
        };
        let due = bursts
            .iter()
            .filter(|(id, count)| self.bursts.get(id) != Some(count) || is_stalled(id))
            .map(|(id, _)| *id);
        let mut due: Vec<_> = due.collect();
        if due.len() > AT_ONCE {
            // It goes on where it has stopped.
            let next = due.partition_point(|id| *id < self.next);
            due.rotate_left(next);
            self.next = due[AT_ONCE];
            due.truncate(AT_ONCE);
        }
        due
    }

    /// Forgets the rings of ports that were asked about, all of whose workers have answered, and that have none any more: the next ones are another driver's.
    fn forget_stopped(&mut self, states: &States) {
        let has = |key: &(PortId, u16)| states.iter().any(|(id, state)| (*id, state.index) == *key);
        self.rings.retain(|key, _| !self.about.contains(&key.0) || has(key));
    }

    /// Takes the states of queues, as they were at this time.
    fn observe<'s>(&mut self, now: Instant, states: impl Iterator<Item = (PortId, &'s QueueState)>) {
        for (id, state) in states.filter(|(_, state)| !queue_index::is_transmitq(state.index)) {
            let key = (id, state.index);
            let (Some(posted), Some(available), None) = (state.posted, state.available, &state.broken) else {
                self.rings.remove(&key);
                continue;
            };
            let seen = Seen { posted, available, unanswered: state.unanswered };
            let ring = self.rings.entry(key).or_insert_with(|| Receiveq::new(seen));
            *ring = ring.after(now, seen);
        }
    }

    /// Says of each stall once that it is there.
    fn log(&mut self, now: Instant, name: impl Fn(PortId) -> Option<String>) {
        for ((id, queue), ring) in &mut self.rings {
            let (Some(stall), false) = (ring.stall(now, ring.seen.available), ring.is_logged) else {
                continue;
            };
            let Some(port) = name(*id) else { continue };
            if !self.limits.entry(*id).or_insert_with(|| LogLimit::new(1)).allows(&port) {
                continue;
            }
            ring.is_logged = true;
            if ring.has_never_posted() {
                tracing::warn!(
                    port,
                    queue,
                    "its guest has posted no buffer since the ring was started: most likely its VMM does not share the memory that the guest writes to (share=on)"
                );
            } else {
                tracing::warn!(
                    port,
                    queue,
                    "its guest has taken no packets for {} s: it hangs, is paused, or gets no processor",
                    stall.seconds
                );
            }
        }
    }

    /// The stall of a receiveq that has `available` entries now, if there is one.
    pub(crate) fn of(&self, now: Instant, id: PortId, queue: u16, available: u16) -> Option<StallSnapshot> {
        self.rings.get(&(id, queue))?.stall(now, available)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VM: PortId = PortId(4);

    /// The state of a receiveq that has `available` entries, of those up to `posted`.
    fn state(index: u16, posted: u16, available: u16) -> QueueState {
        QueueState {
            index,
            last_avail: posted.wrapping_sub(available),
            last_used: posted.wrapping_sub(available),
            available: Some(available),
            posted: Some(posted),
            unanswered: None,
            broken: None,
            pages: None,
        }
    }

    /// Observes a queue once a second, in these states of posted and available entries, and returns what is said of it then.
    fn watch(states: &[(u16, u16)]) -> Vec<Option<(u16, u64)>> {
        let (mut stalls, begin) = (Stalls::default(), Instant::now());
        let mut at = |second: u64, (posted, available): (u16, u16)| {
            let now = begin + Duration::from_secs(second);
            stalls.observe(now, [(VM, &state(0, posted, available))].into_iter());
            stalls.of(now, VM, 0, available).map(|stall| (stall.entries, stall.seconds))
        };
        (0..).zip(states).map(|(second, state)| at(second, *state)).collect()
    }

    #[test]
    fn a_guest_that_posts_nothing_while_its_ring_is_filled_is_stalled() {
        // It is full of buffers, and 100 more are used in each second.
        let found = watch(&[(1024, 1024), (1024, 924), (1024, 824), (1024, 724), (1024, 624), (1024, 524)]);
        assert_eq!(found, [None, None, None, None, Some((400, 3)), Some((500, 4))]);
        // An empty ring is as bad, however small it is; positions wrap around.
        let found = watch(&[(16, 16), (16, 0), (16, 0), (16, 0), (16, 0)]);
        assert_eq!(found.last(), Some(&Some((16, 3))));
    }

    #[test]
    fn a_guest_that_is_late_or_receives_little_is_not() {
        // It posts 200 of them each second, and has none most of the time.
        let late: Vec<_> = (0..10u16).map(|second| (200 * second, 0)).collect();
        assert!(watch(&late).iter().all(Option::is_none));
        // Its driver collects what it has used before it posts it again.
        let idle: Vec<_> = (0..60).map(|second| (256, 256 - second)).collect();
        assert!(watch(&idle).iter().all(Option::is_none));
    }

    #[test]
    fn a_guest_that_is_called_by_position_is_stalled_by_the_first_packet_that_it_leaves() {
        let (mut stalls, begin) = (Stalls::default(), Instant::now());
        // One packet a second, of which the driver takes some, and posts nothing anew.
        let mut look = |second: u16, since: u16, entries: u16| {
            let now = begin + Duration::from_secs(second.into());
            let unanswered = Some(Unanswered { since, entries });
            let seen = QueueState { unanswered, ..state(0, 256, 256 - second) };
            stalls.observe(now, [(VM, &seen)].into_iter());
            stalls.of(now, VM, 0, 256 - second).map(|stall| (stall.entries, stall.seconds))
        };
        let taken: Vec<_> = (1..100).map(|second| look(second, second, 0)).collect();
        assert!(taken.iter().all(Option::is_none), "it has not posted {} that it has taken", taken.len());
        let left: Vec<_> = (1..=5).map(|left| look(99 + left, 99, left)).collect();
        assert_eq!(left, [None, None, None, Some((4, 3)), Some((5, 4))]);
        // It goes on, late.
        assert_eq!(look(105, 104, 1), None);
        assert_eq!(look(106, 105, 1), None);
        assert_eq!(look(107, 107, 0), None);
    }

    #[test]
    fn a_driver_that_polls_leaves_its_position_behind_and_is_not_stalled() {
        let (mut stalls, begin) = (Stalls::default(), Instant::now());
        for second in 0..200u16 {
            let now = begin + Duration::from_secs(second.into());
            // It posts sixteen at a time, and was seen to sleep once.
            let (posted, available) = (256 + second / 16 * 16, 256 - second % 16);
            let since = u16::from(second > 2);
            let unanswered = Some(Unanswered { since, entries: second.saturating_sub(since) });
            let seen = QueueState { unanswered, ..state(0, posted, available) };
            stalls.observe(now, [(VM, &seen)].into_iter());
            let is_said = stalls.of(now, VM, 0, available).is_some();
            assert!(!is_said || second < 16, "{second}");
        }
    }

    #[test]
    fn the_next_guest_of_a_port_is_not_stalled_for_the_last_one() {
        let (mut stalls, begin) = (Stalls::default(), Instant::now());
        let at = |second| begin + Duration::from_secs(second);
        for second in 0..5 {
            stalls.observe(at(second), [(VM, &state(0, 256, 0))].into_iter());
        }
        assert!(stalls.of(at(5), VM, 0, 0).is_some());
        // Another port was asked about, and then this one, which has no rings.
        stalls.about = [PortId(7)].into();
        stalls.forget_stopped(&Vec::new());
        assert!(stalls.of(at(5), VM, 0, 0).is_some());
        stalls.about = [VM].into();
        stalls.forget_stopped(&Vec::new());
        stalls.observe(at(9), [(VM, &state(0, 256, 0))].into_iter());
        assert_eq!(stalls.of(at(9), VM, 0, 0), None);
    }

    #[test]
    fn ports_are_looked_at_in_turns_and_those_that_rest_are_not() {
        let mut stalls = Stalls::default();
        let all: BTreeMap<_, _> = (0..150).map(|id| (PortId(id), 7)).collect();
        let seen: Vec<_> = (0..3).map(|_| stalls.due(&all)).collect();
        assert!(seen.iter().all(|due| due.len() == AT_ONCE));
        let mut ids: Vec<_> = seen.concat();
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), 150, "each of them in three turns");
        stalls.bursts = all.clone();
        assert!(stalls.due(&all).is_empty());
        let more = all.iter().map(|(id, count)| (*id, count + u64::from(*id == PortId(9)))).collect();
        assert_eq!(stalls.due(&more), [PortId(9)]);
    }

    #[test]
    fn a_stall_is_over_when_buffers_are_posted_or_the_queue_has_gone() {
        let found = watch(&[(256, 256), (256, 0), (256, 0), (256, 0), (256, 0), (300, 44), (300, 40)]);
        assert_eq!(found[4..], [Some((256, 3)), None, None]);
        let (mut stalls, begin) = (Stalls::default(), Instant::now());
        let later = begin + PATIENCE;
        for (now, available) in [(begin, 100), (begin, 0), (later, 0)] {
            stalls.observe(now, [(VM, &state(0, 100, available)), (VM, &state(1, 100, 0))].into_iter());
        }
        assert_eq!(stalls.of(later, VM, 1, 0), None, "a transmitq is no receiveq");
        assert!(stalls.of(later, VM, 0, 0).is_some());
        // The workers have not been asked since.
        assert_eq!(stalls.of(later, VM, 0, 7), None);
        let broken = QueueState { broken: Some("it lies".to_owned()), ..state(0, 100, 0) };
        stalls.observe(later, [(VM, &broken)].into_iter());
        assert_eq!(stalls.of(later, VM, 0, 0), None);
    }
}
