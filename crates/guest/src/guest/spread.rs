//! Over how many pairs flows are spread: they stay on the first while that is enough, and take all pairs in use when it is not.
//!
//! Several queues are for several processors. A load that one thread carries easily only loses by a second one: each
//! wakes for half as many packets, and who sends small pieces finds the way free at once, so that fewer of them become one packet. With
//! two pairs against one, both ends on two processors, streams of 512-byte sends reached 0.63-0.8 of their rate, and 4
//! sessions of requests took up to a third more processor time; kept on the first pair, both are as with one.
//!
//! So flows spread when the busiest pair is **saturated**, and there is a processor that has nothing to do, for which they
//! could be spread: on a machine that is full, more threads are only more switching between them. A pair is as busy as its
//! thread runs, and as long as it waits for a full ring while packets wait for it: the back end has a thread of its own for
//! each pair, too. They return when all pairs together have been far from that for a while.
//!
//! **How.** The pairs that are not needed are switched off as if somebody had asked for that, so that nothing is lost, and what
//! remains costs what one pair does, in the kernel's tap and in the back end, too. Keeping all of them on and having the kernel
//! steer flows to the first cost one session of requests 4 % (in 40 interleaved runs).
//!
//! Flows would not take new pairs by themselves: a flow is sent on the queue that it was last received on, and the back end
//! delivers it on the pair it was last sent on. So for a while the threads hand what they receive to the kernel on
//! the queue that each flow shall have ([`Order::Share`](super::bridge::Order::Share)); the rest follows. All of them do: a flow
//! that sends first goes where the kernel's hash says, and when only the old pairs' threads shared, the first pair kept a ninth of
//! the flows on three pairs, those that both hashes gave to it. Flows keep their order but for packets that are in two queues in
//! the instant of the change.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ringferry_sys::usage::{ThreadClock, idle_time};

/// How often loads are looked at. A shorter time would be mostly the ten milliseconds that idle time is counted in.
pub(super) const WINDOW: Duration = Duration::from_millis(250);

/// Idle processors without which nothing is spread.
const ROOM: f64 = 0.5;

/// Part of the load that spreads flows under which all of it must stay, in all pairs together, before they return.
const SPARSE: f64 = 0.5;

/// For so many windows. Loads pause: a second is longer than the pauses of a connection that goes on.
const PATIENCE: u32 = 4;

/// What a pair's thread tells of its load.
#[derive(Debug, Default)]
pub(super) struct Gauge {
    clock: OnceLock<ThreadClock>,
    /// Nanoseconds.
    stalled: AtomicU64,
}

impl Gauge {
    /// The calling thread is the pair's.
    pub(super) fn begin(&self) {
        if let Ok(clock) = ThreadClock::current() {
            let _ = self.clock.set(clock);
        }
    }

    /// The thread has waited so long for a full ring.
    pub(super) fn stalled(&self, time: Duration) {
        self.stalled.fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
    }

    fn busy(&self) -> Duration {
        let used = self.clock.get().and_then(|clock| clock.used()).unwrap_or_default();
        used + Duration::from_nanos(self.stalled.load(Ordering::Relaxed))
    }
}

/// When flows are spread, and what that follows from.
#[derive(Debug)]
pub(super) struct Spread {
    /// Load of a pair that spreads flows, as a part of a processor; `None`: they are spread always.
    at: Option<f64>,
    /// Windows without much to do, one after another.
    sparse: u32,
    last: Option<Reading>,
}

#[derive(Debug)]
struct Reading {
    at: Instant,
    busy: Vec<Duration>,
    idle: Duration,
}

/// What has passed between two readings, in processors.
#[derive(Debug, PartialEq)]
struct Load {
    busiest: f64,
    sum: f64,
    idle: f64,
}

impl Spread {
    /// Flows are spread from this load on, in per cent of a processor; 0: always.
    pub(super) fn new(per_cent: u8) -> Spread {
        Spread { at: (per_cent > 0).then_some(f64::from(per_cent) / 100.0), sparse: 0, last: None }
    }

    /// Whether it depends on loads.
    pub(super) fn adapts(&self) -> bool {
        self.at.is_some()
    }

    /// They are spread from now on whatever happens: they cannot be brought back.
    pub(super) fn give_up(&mut self) {
        self.at = None;
    }

    /// Looks at the loads of all pairs; call it every [`WINDOW`]. `spread`: flows are, now. Whether that is to change.
    pub(super) fn look<'a>(
        &mut self,
        spread: bool,
        gauges: impl Iterator<Item = &'a Gauge>,
        online: &[usize],
    ) -> bool {
        let Some(at) = self.at else { return false };
        let Ok(idle) = idle_time(online) else {
            self.give_up();
            return !spread;
        };
        let now = Reading { at: Instant::now(), busy: gauges.map(Gauge::busy).collect(), idle };
        let load = self.last.replace(now).zip(self.last.as_ref()).and_then(|(then, now)| now.since(&then));
        load.is_some_and(|load| self.decide(spread, at, &load))
    }

    fn decide(&mut self, spread: bool, at: f64, load: &Load) -> bool {
        if !spread {
            self.sparse = 0;
            return load.busiest >= at && load.idle >= ROOM;
        }
        self.sparse = if load.sum < at * SPARSE { self.sparse + 1 } else { 0 };
        self.sparse >= PATIENCE
    }
}

impl Reading {
    /// `None` when no time has passed.
    fn since(&self, then: &Reading) -> Option<Load> {
        let span = self.at.saturating_duration_since(then.at).as_secs_f64();
        let part = |now: Duration, then: Duration| now.saturating_sub(then).as_secs_f64() / span;
        let busy = || self.busy.iter().zip(&then.busy).map(|(now, then)| part(*now, *then));
        (span > 0.0).then(|| Load {
            busiest: busy().fold(0.0, f64::max),
            sum: busy().sum(),
            idle: part(self.idle, then.idle),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(busiest: f64, sum: f64, idle: f64) -> Load {
        Load { busiest, sum, idle }
    }

    #[test]
    fn flows_spread_when_a_pair_is_saturated_and_a_processor_is_free() {
        let mut decider = Spread::new(80);
        let mut decide = |spread, busiest, idle| decider.decide(spread, 0.8, &load(busiest, busiest, idle));
        assert!(!decide(false, 0.5, 2.0), "not saturated");
        assert!(!decide(false, 0.95, 0.1), "nothing free");
        assert!(decide(false, 0.9, 0.6));
        assert!(!decide(true, 0.9, 0.6), "they are");
    }

    #[test]
    fn flows_return_when_there_was_little_to_do_for_a_while() {
        let mut decider = Spread::new(80);
        let mut windows = |spread, sums: &[f64]| {
            sums.iter().filter(|sum| decider.decide(spread, 0.8, &load(0.3, **sum, 0.0))).count()
        };
        assert_eq!(windows(true, &[0.1, 0.1, 0.1, 0.9, 0.1, 0.1, 0.1]), 0);
        assert_eq!(windows(true, &[0.1]), 1);
        assert_eq!(windows(false, &[0.1; 10]), 0);
        assert_eq!(windows(true, &[0.1; 3]), 0, "patience begins anew");
    }

    #[test]
    fn always_is_always() {
        let mut spread = Spread::new(0);
        assert!(!spread.adapts() && !spread.look(true, [Gauge::default()].iter(), &[0]));
        let mut spread = Spread::new(50);
        assert!(spread.adapts());
        spread.give_up();
        assert!(!spread.adapts() && !spread.look(true, [].into_iter(), &[0]));
    }

    #[test]
    fn a_load_is_what_has_passed_since() {
        let ms = Duration::from_millis;
        let start = Instant::now();
        let then = Reading { at: start, busy: vec![ms(10), ms(500)], idle: ms(1000) };
        let now = Reading { at: start + ms(500), busy: vec![ms(260), ms(625)], idle: ms(1750) };
        assert_eq!(now.since(&then), Some(load(0.5, 0.75, 1.5)));
        assert_eq!(then.since(&then), None);
    }

    #[test]
    fn a_thread_that_works_is_busy_and_so_is_one_that_waits_for_a_ring() {
        let gauges = [Gauge::default(), Gauge::default()];
        let cpus = ringferry_sys::cpu::allowed().unwrap();
        gauges[0].begin();
        let mut spread = Spread::new(80);
        assert!(!spread.look(false, gauges.iter(), &cpus), "nothing to compare with");
        let used = gauges[0].busy();
        while gauges[0].busy() < used + Duration::from_millis(5) {}
        gauges[1].stalled(Duration::from_millis(7));
        spread.look(false, gauges.iter(), &cpus);
        let busy = &spread.last.unwrap().busy;
        assert!(busy[0] >= Duration::from_millis(5));
        assert_eq!(busy[1], Duration::from_millis(7));
    }
}
