//! The flow table of automatic receive steering (VIRTIO 1.4, 5.1.6.5.6): it remembers on which
//! queue pair the guest sends each flow, so that replies are delivered on that pair. It is a 4-way
//! set-associative table that evicts the flow idle for longest, and it moves flows by flowlet
//! switching.
//!
//! A table is created with a port and dropped with it, and is shared by all workers that carry the
//! port's packets; any thread may call it. [`FlowTable::learn`] is called for frames from the guest
//! and [`FlowTable::choose`] for frames to it. An entry is two atomic words, read and written
//! without locks, and only written when they change. Two workers that write one entry at once may
//! lose one of the two observations; no wrong pair can come of it, because every pair that is read
//! is checked again where it is used.
//!
//! A flow is moved rarely, because frames under way to the guest on one pair may be overtaken by
//! frames on another. A flow whose sender has moved to another pair follows when nothing was
//! delivered to it for [`GAP`]: by then the guest has taken the frames that it got before, so a new
//! flowlet begins. A flow that never pauses follows when its sender has stayed on the new pair for
//! [`SETTLED`], so that it does not stay behind for ever.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Logarithm of the unit of time, the tick: 2^6 microseconds. That is long enough that a busy flow
/// seldom writes its time, and short against [`GAP`].
const TICK_SHIFT: u32 = 6;

/// The pause that begins a new flowlet, half a millisecond in ticks: longer than a guest that runs
/// takes for a ring full of packets, shorter than the time between two bursts of a connection that
/// waits for its peer.
const GAP: u32 = 500 >> TICK_SHIFT;

/// The stay of a sender that is followed without a pause, 10 milliseconds in ticks: a sender that
/// moves more often is being moved about by the guest's scheduler.
const SETTLED: u32 = 10_000 >> TICK_SHIFT;

/// The silence after which a flow yields its place to any other, 3 seconds in ticks. Linux's tap
/// uses the same.
const AGE: u32 = 3_000_000 >> TICK_SHIFT;

/// Entries of one set, in which a flow can be stored: one cache line.
const WAYS: usize = 4;

/// Number of sets: 4096 flows in 64 KiB, as many as Linux's tap keeps. With more live flows than
/// entries, the rest are spread by their hash.
const SETS: usize = 1024;

/// A flow as two words. `key` is `hash << 32 | (wanted + 1) << 16 | (pair + 1)`, or 0 for a free
/// entry: frames are delivered on `pair`, and `wanted` is the pair that the guest last sent on.
///
/// `times` is `delivered << 32 | since`, in ticks: the last delivery to the guest, and the first
/// frame that it sent on `wanted`.
#[derive(Debug, Default)]
struct Entry {
    key: AtomicU64,
    times: AtomicU64,
}

/// The decoded content of an [`Entry`].
#[derive(Clone, Copy)]
struct Flow {
    hash: u32,
    pair: u16,
    wanted: u16,
    delivered: u32,
    since: u32,
}

impl Flow {
    fn key(self) -> u64 {
        // Pairs are less than 0x8000 (MAX_PAIRS).
        u64::from(self.hash) << 32 | u64::from(self.wanted + 1) << 16 | u64::from(self.pair + 1)
    }

    fn times(self) -> u64 {
        u64::from(self.delivered) << 32 | u64::from(self.since)
    }
}

impl Entry {
    /// Loads the entry if it holds the flow of this hash.
    #[inline]
    fn load_if(&self, hash: u32) -> Option<Flow> {
        // The first word alone rules out the entries of other flows.
        let key = self.key.load(Relaxed);
        if (key >> 32) as u32 == hash { self.decode(key) } else { None }
    }

    #[inline]
    fn load(&self) -> Option<Flow> {
        self.decode(self.key.load(Relaxed))
    }

    #[inline]
    fn decode(&self, key: u64) -> Option<Flow> {
        let times = self.times.load(Relaxed);
        let pair = (key as u16).checked_sub(1)?;
        let wanted = ((key >> 16) as u16).checked_sub(1)?;
        let (delivered, since) = ((times >> 32) as u32, times as u32);
        Some(Flow { hash: (key >> 32) as u32, pair, wanted, delivered, since })
    }

    /// Stores only the words that changed, so that an unchanged cache line stays shared between
    /// processors.
    fn update(&self, before: Flow, flow: Flow) {
        if before.times() != flow.times() {
            self.times.store(flow.times(), Relaxed);
        }
        if before.key() != flow.key() {
            self.key.store(flow.key(), Relaxed);
        }
    }

    /// Stores another flow in the entry.
    fn replace(&self, flow: Flow) {
        self.times.store(flow.times(), Relaxed);
        self.key.store(flow.key(), Relaxed);
    }
}

#[derive(Debug, Default)]
#[repr(align(64))]
struct Set([Entry; WAYS]);

/// The flow table of one port.
#[derive(Debug)]
pub struct FlowTable {
    sets: Box<[Set]>,
}

impl Default for FlowTable {
    fn default() -> Self {
        Self { sets: std::iter::repeat_with(Set::default).take(SETS).collect() }
    }
}

impl FlowTable {
    /// Returns the flows in the table, for another process that goes on with them ([`restore`](Self::restore)): two words each, whose meaning is the
    /// table's.
    pub fn words(&self) -> impl Iterator<Item = [u64; 2]> {
        let entries = self.sets.iter().flat_map(|set| &set.0);
        let words = entries.map(|entry| [entry.key.load(Relaxed), entry.times.load(Relaxed)]);
        words.filter(|[key, _]| *key != 0)
    }

    /// Puts a flow into the table that another process has had in its own, whose clock is the same. One that makes no sense, or for which there is
    /// no room, is left out.
    pub fn restore(&self, [key, times]: [u64; 2]) {
        let pairs = [key as u16, (key >> 16) as u16];
        if pairs.iter().any(|pair| *pair == 0 || *pair > crate::config::MAX_PAIRS) {
            return;
        }
        let free = self.set((key >> 32) as u32).0.iter().find(|entry| entry.key.load(Relaxed) == 0);
        if let Some(entry) = free {
            entry.times.store(times, Relaxed);
            entry.key.store(key, Relaxed);
        }
    }

    /// Records that the guest sent a frame of this flow on `pair`, which must be less than
    /// [`MAX_PAIRS`](crate::config::MAX_PAIRS) or is ignored; `now` is in microseconds.
    #[inline]
    pub fn learn(&self, hash: u32, pair: u16, now: u64) {
        if pair >= crate::config::MAX_PAIRS {
            return;
        }
        let now = ticks(now);
        let set = self.set(hash);
        if let Some((entry, before)) = find(set, hash) {
            if before.wanted != pair {
                let mut flow = Flow { wanted: pair, since: now, ..before };
                follow(&mut flow, now);
                entry.update(before, flow);
            }
            return;
        }
        let never = now.wrapping_sub(GAP);
        let flow = Flow { hash, pair, wanted: pair, delivered: never, since: now };
        // A flow that the guest sends replaces the one that has been idle for longest.
        let silence = |entry: &&Entry| entry.load().map_or(u32::MAX, |flow| idle(flow, now));
        if let Some(entry) = set.0.iter().max_by_key(silence) {
            entry.replace(flow);
        }
    }

    /// Selects the pair for a frame of this flow to the guest; `now` is in microseconds. `spread`,
    /// which must be usable, is taken for flows that are unknown or whose pair is not `usable`;
    /// such a flow stays on it until the guest sends on another pair or its old pair is usable
    /// again.
    #[inline]
    pub fn choose(&self, hash: u32, now: u64, usable: impl Fn(u16) -> bool, spread: u16) -> u16 {
        let now = ticks(now);
        let set = self.set(hash);
        let Some((entry, before)) = find(set, hash) else {
            // The flow is stored if there is room, so that an answer of the guest on another pair
            // counts as a move; flows that the guest never sent evict no live flow.
            let vacant = |entry: &&Entry| entry.load().is_none_or(|flow| idle(flow, now) >= AGE);
            if spread < crate::config::MAX_PAIRS
                && let Some(entry) = set.0.iter().find(vacant)
            {
                entry.replace(Flow { hash, pair: spread, wanted: spread, delivered: now, since: now });
            }
            return spread;
        };
        let Some(flow) = settle(before, now, usable, spread) else { return spread };
        entry.update(before, Flow { delivered: now, ..flow });
        flow.pair
    }

    /// Returns the pair that [`choose`](Self::choose) would select, and stores nothing.
    pub fn peek(&self, hash: u32, now: u64, usable: impl Fn(u16) -> bool, spread: u16) -> u16 {
        let found = find(self.set(hash), hash);
        found.and_then(|(_, flow)| settle(flow, ticks(now), usable, spread)).map_or(spread, |flow| flow.pair)
    }

    /// Counts the flows that are stored.
    pub fn len(&self) -> usize {
        self.sets.iter().flat_map(|set| &set.0).filter(|entry| entry.load().is_some()).count()
    }

    /// Returns true if no flow is stored.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Removes all flows, for a port that gets another guest.
    pub fn clear(&self) {
        for entry in self.sets.iter().flat_map(|set| &set.0) {
            entry.key.store(0, Relaxed);
        }
    }

    fn set(&self, hash: u32) -> &Set {
        // Sets are indexed by the low bits of the hash, pairs by the high bits of a product of it.
        &self.sets[hash as usize % SETS]
    }
}

#[inline]
fn ticks(now: u64) -> u32 {
    (now >> TICK_SHIFT) as u32
}

#[inline]
fn find(set: &Set, hash: u32) -> Option<(&Entry, Flow)> {
    set.0.iter().find_map(|entry| Some((entry, entry.load_if(hash)?)))
}

/// Returns the ticks from `then` to `now`; 0 if another worker's clock is ahead of this one's.
#[inline]
fn elapsed(then: u32, now: u32) -> u32 {
    let ticks = now.wrapping_sub(then);
    if ticks > u32::MAX / 2 { 0 } else { ticks }
}

/// Returns the ticks since the flow was last active in either direction.
fn idle(flow: Flow, now: u32) -> u32 {
    elapsed(flow.delivered, now).min(elapsed(flow.since, now))
}

/// Returns a flow as it is when its next frame is delivered: moved, if it may and has to. `None` if that frame goes to `spread`, as the flow's
/// pairs are of no use.
#[inline]
fn settle(mut flow: Flow, now: u32, usable: impl Fn(u16) -> bool, spread: u16) -> Option<Flow> {
    if usable(flow.wanted) {
        follow(&mut flow, now);
    }
    if !usable(flow.pair) {
        flow.pair = if usable(flow.wanted) { flow.wanted } else { spread };
        if flow.pair >= crate::config::MAX_PAIRS {
            return None;
        }
    }
    Some(flow)
}

/// Moves a flow to its sender's pair if the time allows it.
#[inline]
fn follow(flow: &mut Flow, now: u32) {
    if flow.wanted != flow.pair
        && (elapsed(flow.delivered, now) >= GAP || elapsed(flow.since, now) >= SETTLED)
    {
        flow.pair = flow.wanted;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MS: u64 = 1000;
    const SECOND: u64 = 1000 * MS;

    fn all(_: u16) -> bool {
        true
    }

    #[test]
    fn clause_5_1_6_5_6_replies_come_on_the_pair_that_sent() {
        let table = FlowTable::default();
        for hash in 0..100 {
            table.learn(hash, (hash % 7) as u16, 5);
        }
        for hash in 0..100 {
            assert_eq!(table.choose(hash, 6, all, 9), (hash % 7) as u16);
        }
        assert_eq!(table.choose(1000, 6, all, 9), 9, "a flow that the guest has not sent");
        assert_eq!(table.len(), 101);
        table.clear();
        assert!(table.is_empty());
    }

    #[test]
    fn a_flow_follows_its_sender_after_a_pause_and_not_before() {
        let table = FlowTable::default();
        table.learn(7, 1, 0);
        let mut now = SECOND;
        assert_eq!(table.choose(7, now, all, 0), 1);
        table.learn(7, 2, now);
        // No pause is as long as the gap.
        for _ in 0..20 {
            now += 300;
            assert_eq!(table.choose(7, now, all, 0), 1);
        }
        now += MS;
        assert_eq!(table.choose(7, now, all, 0), 2);
        assert_eq!(table.choose(7, now + 1, all, 0), 2);
        // After a pause nothing is under way, so the flow moves at once.
        now += MS;
        table.learn(7, 3, now);
        assert_eq!(table.choose(7, now, all, 0), 3);
    }

    #[test]
    fn a_flow_without_pauses_follows_a_sender_that_has_settled() {
        let table = FlowTable::default();
        table.learn(7, 1, 0);
        let mut moves = Vec::new();
        let mut now = 0;
        let mut last = 1;
        for step in 0..1000u64 {
            now = step * 50;
            // Back and forth every 5 ms, from 20 ms on quiet.
            let sender = if now < 20 * MS { 1 + (now / (5 * MS) % 2) as u16 } else { 2 };
            table.learn(7, sender, now);
            let pair = table.choose(7, now, all, 0);
            if pair != last {
                moves.push(now);
            }
            last = pair;
        }
        assert_eq!((moves.len(), last), (1, 2), "{moves:?}");
        assert!((25 * MS..35 * MS).contains(&moves[0]), "{moves:?} of {now}");
    }

    #[test]
    fn silent_flows_are_forgotten_for_others_and_strangers_push_out_nobody() {
        let table = FlowTable::default();
        // These hashes all fall into one set.
        let hash = |flow: u32| flow << 20;
        for flow in 0..WAYS as u32 {
            table.learn(hash(flow), 1, SECOND);
        }
        for stranger in 100..200 {
            assert_eq!(table.choose(hash(stranger), SECOND + MS, all, 5), 5);
        }
        for flow in 0..WAYS as u32 {
            assert_eq!(table.choose(hash(flow), SECOND + 2 * MS, all, 5), 1, "{flow}");
        }
        // A flow that the guest sends takes the place of the one that was idle for longest.
        for flow in 1..WAYS as u32 {
            table.choose(hash(flow), SECOND + 3 * MS, all, 5);
        }
        table.learn(hash(50), 2, SECOND + 3 * MS);
        assert_eq!(table.choose(hash(50), SECOND + 4 * MS, all, 5), 2);
        assert_eq!(table.choose(hash(0), SECOND + 4 * MS, all, 5), 5);
        // After a long silence a flow that the guest never sent is stored, too.
        assert_eq!(table.choose(hash(100), 10 * SECOND, all, 6), 6);
        assert_eq!(table.choose(hash(100), 10 * SECOND, all, 5), 6);
        assert_eq!(table.len(), WAYS);
    }

    #[test]
    fn a_pair_that_is_gone_is_not_chosen() {
        let table = FlowTable::default();
        table.learn(7, 3, 0);
        assert_eq!(table.choose(7, MS, |pair| pair < 2, 1), 1);
        // It stays there, and follows its sender when the old pair is back.
        assert_eq!(table.choose(7, 2 * MS, |pair| pair < 2, 0), 1);
        assert_eq!(table.choose(7, 2 * MS + 1, all, 0), 1, "not without a pause");
        assert_eq!(table.choose(7, 3 * MS, all, 0), 3);
        // A sender that has moved off an unusable pair is followed at once.
        table.learn(8, 3, 10 * MS);
        table.choose(8, 10 * MS, all, 0);
        table.learn(8, 1, 10 * MS + 1);
        assert_eq!(table.choose(8, 10 * MS + 2, |pair| pair < 2, 0), 1);
    }

    #[test]
    fn workers_share_a_table_without_locks() {
        let table = FlowTable::default();
        std::thread::scope(|scope| {
            for worker in 0..2u16 {
                let table = &table;
                scope.spawn(move || {
                    for step in 0..20_000u64 {
                        let hash = (step % 5000) as u32;
                        table.learn(hash, worker, step);
                        assert!(table.choose(hash, step, |pair| pair < 2, 0) < 2);
                    }
                });
            }
        });
        assert!(table.len() <= SETS * WAYS);
    }

    proptest! {
        #[test]
        fn no_pair_is_chosen_that_cannot_be_used(
            steps in proptest::collection::vec((0u32..40, any::<u16>(), any::<bool>(), 0u64..20_000), 1..300),
            start: u64, limit in 1u16..9,
        ) {
            let table = FlowTable::default();
            let mut now = start;
            for (flow, pair, learn, wait) in steps {
                now = now.wrapping_add(wait);
                let hash = flow << 10;
                if learn {
                    table.learn(hash, pair % 12, now);
                    table.learn(hash, pair, now);
                } else {
                    prop_assert!(table.choose(hash, now, |pair| pair < limit, pair % limit) < limit);
                }
            }
            prop_assert!(table.len() <= WAYS);
        }

        /// For every movement of senders: between two frames that are less than a gap apart, a flow
        /// moves at most once in the time that a sender needs to settle.
        #[test]
        fn a_busy_flow_does_not_flap(senders in proptest::collection::vec(0u16..4, 1..400)) {
            let table = FlowTable::default();
            let (mut last, mut moved) = (None, None::<u64>);
            for (now, sender) in (SECOND..).step_by(100).zip(senders) {
                table.learn(7, sender, now);
                let pair = table.choose(7, now, all, 0);
                if last.is_some_and(|last| last != pair) {
                    prop_assert!(moved.is_none_or(|before| now - before + 64 >= 10 * MS));
                    moved = Some(now);
                }
                last = Some(pair);
            }
        }
    }
}
