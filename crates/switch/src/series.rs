//! The recent past of all counters: rates over the last 1, 10 and 60 seconds.
//!
//! The control plane's thread alone has it, and takes a [`Sample`] with each tick of its loop, once a second ([`Series::observe`]); workers only count, as they do anyhow. When
//! somebody asks, a fresh sample is compared with the one at the beginning of each window.
//!
//! **Cost.** If no worker has counted anything since the last sample, no port is looked at, and the ports of the last sample are shared: an idle switch reads a few words
//! a second. Samples are kept at three distances (a few of the last seconds, every other second of the last ten, every tenth of the last minute), so there are 18 at most: of a port with
//! four pairs about 14 KiB, of 1000 ports 14 MB.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ringferry_control::snapshot::{Rates, WINDOWS, WorkerLoad};

use crate::counters::{
    BURSTS, DropReason, PAIR_COUNTERS, PAIR_NAMES, PORT_COUNTERS, PORT_VALUES, PairCounters, WORKER_COUNTERS,
    WorkerCounters,
};
use crate::fdb::PortId;
use crate::ports::queues::Workers;
use crate::ports::table::PortTable;
use crate::ports::{Interface, InterfaceQueues};

/// The distance between the samples that are kept, and how many of them: each row reaches beyond its window.
const ROWS: [(Duration, usize); 3] =
    [(Duration::from_secs(1), 3), (Duration::from_secs(2), 7), (Duration::from_secs(10), 8)];

/// Ticks are never exact: a sample is kept that comes by so much too early.
const SLACK: Duration = Duration::from_millis(300);

/// What one port had counted.
#[derive(Clone, Debug, PartialEq, Eq)]
struct PortSample {
    values: Box<[u64; PORT_VALUES]>,
    /// The work that each worker has done for it.
    work: Box<[u64]>,
    /// Its queue pairs, up to the last one that has counted anything.
    pairs: Box<[[u64; PAIR_COUNTERS]]>,
}

impl PortSample {
    fn of(port: &Interface<'_>) -> PortSample {
        let mut pairs: Vec<_> = match &port.queues {
            InterfaceQueues::Pairs(shared) => shared.pairs.iter().map(PairCounters::values).collect(),
            InterfaceQueues::Kernel(_) => Vec::new(),
        };
        while pairs.pop_if(|pair| *pair == [0; PAIR_COUNTERS]).is_some() {}
        PortSample {
            values: Box::new(port.counters.values()),
            work: port.counters.work().collect(),
            pairs: pairs.into(),
        }
    }

    /// Whether this can be what `later` was before: counters only grow, so one that has not is another port's under the same number.
    fn precedes(&self, later: &PortSample) -> bool {
        self.values.iter().zip(later.values.iter()).all(|(before, after)| before <= after)
    }
}

/// What everybody had counted at one moment.
#[derive(Clone, Debug)]
pub(crate) struct Sample {
    at: Instant,
    workers: Vec<[u64; WORKER_COUNTERS]>,
    ports: Arc<HashMap<PortId, PortSample>>,
}

impl Sample {
    /// Takes a sample of the switch as it is.
    pub(crate) fn take(now: Instant, ports: &PortTable, workers: &Workers) -> Sample {
        let workers = workers.counters().map(WorkerCounters::values).collect();
        Sample {
            at: now,
            workers,
            ports: Arc::new(ports.interfaces().map(|port| (port.id, PortSample::of(&port))).collect()),
        }
    }
}

#[cfg(test)]
impl Sample {
    /// Makes a sample of workers and ports whose counters a test has.
    pub(crate) fn of<'c>(
        at: Instant,
        workers: impl IntoIterator<Item = &'c WorkerCounters>,
        ports: impl IntoIterator<Item = (PortId, &'c crate::counters::PortTotals)>,
    ) -> Sample {
        let ports = ports.into_iter().map(|(id, totals)| {
            let (values, work) = (Box::new(totals.values()), totals.work().collect());
            (id, PortSample { values, work, pairs: Box::default() })
        });
        let workers = workers.into_iter().map(WorkerCounters::values).collect();
        Sample { at, workers, ports: Arc::new(ports.collect()) }
    }
}

/// The samples of the last minute.
#[derive(Debug, Default)]
pub(crate) struct Series {
    rows: [VecDeque<Arc<Sample>>; ROWS.len()],
}

impl Series {
    /// Takes a sample, and keeps it where one is due.
    pub(crate) fn observe(&mut self, now: Instant, ports: &PortTable, workers: &Workers) {
        workers.count_run_delays();
        let counted: Vec<_> = workers.counters().map(WorkerCounters::values).collect();
        let sample = match self.rows[0].back() {
            Some(last) if last.workers == counted => {
                Sample { at: now, workers: counted, ports: Arc::clone(&last.ports) }
            }
            _ => Sample::take(now, ports, workers),
        };
        self.keep(sample);
    }

    pub(crate) fn keep(&mut self, sample: Sample) {
        let sample = Arc::new(sample);
        for (row, (distance, most)) in self.rows.iter_mut().zip(ROWS) {
            if row.back().is_some_and(|last| sample.at.saturating_duration_since(last.at) + SLACK < distance)
            {
                continue;
            }
            row.push_back(Arc::clone(&sample));
            if row.len() > most {
                row.pop_front();
            }
        }
    }

    /// Returns all samples that are kept, the newest first.
    fn samples(&self) -> Vec<&Sample> {
        let mut all: Vec<_> = self.rows.iter().flatten().map(|sample| &**sample).collect();
        all.sort_unstable_by_key(|sample| std::cmp::Reverse(sample.at));
        all
    }

    /// For each window, returns what `of` finds in the sample at its beginning: the newest that is old enough, or else the oldest in which it finds
    /// anything. The seconds since then come with it.
    fn begins<'s, T>(&'s self, now: &Sample, of: impl Fn(&'s Sample) -> Option<T>) -> Vec<(u64, f64, T)> {
        let samples = self.samples();
        let of_window = |window: u64| {
            let (mut found, length) = (None, Duration::from_secs(window));
            for sample in &samples {
                let age = now.at.saturating_duration_since(sample.at);
                match of(sample) {
                    Some(values) if !age.is_zero() => found = Some((window, age.as_secs_f64(), values)),
                    Some(_) => {}
                    None => break,
                }
                if age >= length {
                    break;
                }
            }
            found
        };
        WINDOWS.into_iter().filter_map(of_window).collect()
    }

    /// Returns the rates of a port up to `now`.
    pub(crate) fn port(&self, now: &Sample, id: PortId) -> Vec<Rates> {
        let Some(current) = now.ports.get(&id) else { return Vec::new() };
        let begins = self.begins(now, |sample| sample.ports.get(&id).filter(|port| port.precedes(current)));
        let rates = begins.into_iter().map(|(window, seconds, before)| {
            let grown: Vec<_> = grown(&*before.values, &*current.values, seconds);
            let (counters, drops) = grown.split_at(PORT_COUNTERS.len());
            Rates {
                window,
                seconds,
                counters: named(PORT_COUNTERS.iter().copied(), counters),
                drops: named(DropReason::ALL.into_iter().map(DropReason::name), drops),
            }
        });
        rates.collect()
    }

    /// Returns the rates of one queue pair of a port up to `now`.
    pub(crate) fn pair(&self, now: &Sample, id: PortId, pair: u16) -> Vec<Rates> {
        let at = usize::from(pair);
        let Some(port) = now.ports.get(&id) else { return Vec::new() };
        let Some(current) = port.pairs.get(at) else { return Vec::new() };
        let begins = self.begins(now, |sample| {
            let before = sample.ports.get(&id).filter(|before| before.precedes(port))?;
            Some(before.pairs.get(at).copied().unwrap_or_default())
        });
        let rates = begins.into_iter().map(|(window, seconds, before)| Rates {
            window,
            seconds,
            counters: named(PAIR_NAMES, &grown(&before, current, seconds)),
            drops: BTreeMap::new(),
        });
        rates.collect()
    }

    /// Returns the load of a worker up to `now`; `name` names its ports.
    pub(crate) fn worker<'n>(
        &self,
        now: &Sample,
        number: usize,
        name: impl Fn(PortId) -> Option<&'n str>,
    ) -> Vec<WorkerLoad> {
        let Some(current) = now.workers.get(number) else { return Vec::new() };
        let load = self.begins(now, Some).into_iter().map(|(window, seconds, before)| {
            let earlier = before.workers.get(number).copied().unwrap_or_default();
            let grown = grown(&earlier, current, seconds);
            let [_, _, _, wakeups, _, busy, polling, .., delay] = grown[..] else {
                return WorkerLoad::default();
            };
            let share = |nanoseconds: f64| (nanoseconds / 1e7).clamp(0.0, 100.0);
            let (busy_percent, polling_percent) = (share(busy), share(polling).min(100.0 - share(busy)));
            WorkerLoad {
                window,
                seconds,
                busy_percent,
                polling_percent,
                sleeping_percent: 100.0 - busy_percent - polling_percent,
                wakeups,
                run_delay_percent: share(delay),
                bursts: grown[BURSTS].iter().sum(),
                ports: shares(now, before, number, &name),
            }
        });
        load.collect()
    }
}

/// Returns the share of each port in the work of a worker since a sample, in percent; shares that nobody would see are left out.
fn shares<'n>(
    now: &Sample,
    before: &Sample,
    number: usize,
    name: impl Fn(PortId) -> Option<&'n str>,
) -> BTreeMap<String, f64> {
    let of = |port: &PortSample| port.work.get(number).copied().unwrap_or(0);
    let work = now.ports.iter().filter_map(|(id, port)| {
        let earlier = before.ports.get(id).filter(|before| before.precedes(port)).map_or(0, of);
        Some((name(*id)?, of(port).saturating_sub(earlier)))
    });
    let work: Vec<_> = work.filter(|(_, work)| *work > 0).collect();
    let all: u64 = work.iter().map(|(_, work)| work).sum();
    let shares = work.into_iter().map(|(name, work)| (name.to_owned(), 100.0 * work as f64 / all as f64));
    shares.filter(|(_, share)| *share >= 0.1).collect()
}

/// Returns by how much each value has grown per second.
fn grown(before: &[u64], after: &[u64], seconds: f64) -> Vec<f64> {
    before.iter().zip(after).map(|(before, after)| after.saturating_sub(*before) as f64 / seconds).collect()
}

/// Returns the rates that are not zero, by name.
fn named<'n>(names: impl IntoIterator<Item = &'n str>, rates: &[f64]) -> BTreeMap<String, f64> {
    let all = names.into_iter().zip(rates.iter().copied()).filter(|(_, rate)| *rate > 0.0);
    all.map(|(name, rate)| (name.to_owned(), rate)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::counters::PortTotals;

    const VM0: PortId = PortId(4);
    const VM1: PortId = PortId(5);

    /// A switch of two workers and two ports, whose counters a test moves.
    struct Counted {
        began: Instant,
        series: Series,
        workers: [WorkerCounters; 2],
        ports: [(PortId, PortTotals); 2],
        pair: [u64; PAIR_COUNTERS],
    }

    impl Counted {
        fn new() -> Counted {
            Counted {
                began: Instant::now(),
                series: Series::default(),
                workers: Default::default(),
                ports: [VM0, VM1].map(|id| (id, PortTotals::new(2))),
                pair: [0; PAIR_COUNTERS],
            }
        }

        fn sample(&self, millis: u64) -> Sample {
            let ports = self.ports.iter().map(|(id, totals)| {
                let (values, work) = (Box::new(totals.values()), totals.work().collect());
                (*id, PortSample { values, work, pairs: [self.pair].into() })
            });
            Sample {
                at: self.began + Duration::from_millis(millis),
                workers: self.workers.iter().map(WorkerCounters::values).collect(),
                ports: Arc::new(ports.collect()),
            }
        }

        fn keep(&mut self, millis: u64) {
            let sample = self.sample(millis);
            self.series.keep(sample);
        }

        fn name(id: PortId) -> Option<&'static str> {
            [(VM0, "vm0"), (VM1, "vm1")].into_iter().find(|(known, _)| *known == id).map(|(_, name)| name)
        }
    }

    #[test]
    fn rates_are_those_of_their_windows() {
        let mut counted = Counted::new();
        // 100 packets a second for two minutes, then 1000 for five seconds.
        for second in 0..=125 {
            counted.keep(second * 1000);
            let packets = if second < 120 { 100 } else { 1000 };
            counted.ports[0].1.of(1).rx_packets.add(packets);
            counted.ports[0].1.of(0).drops.add(DropReason::Vlan, packets / 100);
            counted.pair[0] += packets;
        }
        let now = counted.sample(126_000);
        let rates = counted.series.port(&now, VM0);
        let found: Vec<_> = rates.iter().map(|rates| (rates.window, rates.seconds)).collect();
        assert_eq!(found[0], (1, 1.0));
        assert!((10.0..=12.0).contains(&found[1].1) && (60.0..=70.0).contains(&found[2].1), "{found:?}");
        assert_eq!(rates[0].counter("rx_packets"), 1000.0);
        for Rates { seconds, counters, drops, .. } in &rates[1..] {
            let expected = (6.0 * 1000.0 + (seconds - 6.0) * 100.0) / seconds;
            assert!((counters["rx_packets"] - expected).abs() < 1e-6, "{counters:?} {expected}");
            assert!((drops["vlan"] - expected / 100.0).abs() < 1e-6);
            assert_eq!((counters.len(), drops.len()), (1, 1), "what has not grown is left out");
        }
        let pair = counted.series.pair(&now, VM0, 0);
        assert_eq!(pair[0].counters, [("rx_packets".to_owned(), 1000.0)].into());
        assert!(counted.series.pair(&now, VM0, 1).is_empty());
        assert!(counted.series.samples().len() <= 18);
    }

    #[test]
    fn a_young_switch_and_a_port_that_is_new_have_shorter_windows() {
        let mut counted = Counted::new();
        assert!(counted.series.port(&counted.sample(5), VM0).is_empty());
        counted.keep(0);
        counted.ports[0].1.of(0).tx_packets.add(30);
        let rates = counted.series.port(&counted.sample(3000), VM0);
        assert_eq!(rates.iter().map(|rates| rates.seconds).collect::<Vec<_>>(), [3.0; 3]);
        assert_eq!(rates[2].counter("tx_packets"), 10.0);
        // Another port takes its number, and has counted less.
        counted.keep(3000);
        counted.ports[0].1 = PortTotals::new(2);
        counted.ports[0].1.of(0).tx_packets.add(7);
        assert!(counted.series.port(&counted.sample(4000), VM0).is_empty());
        counted.keep(4000);
        counted.ports[0].1.of(0).tx_packets.add(7);
        let rates = counted.series.port(&counted.sample(5000), VM0);
        assert_eq!(rates.iter().map(|rates| rates.counter("tx_packets")).collect::<Vec<_>>(), [7.0; 3]);
    }

    #[test]
    fn the_load_of_a_worker_is_of_now_and_shared_by_its_ports() {
        let mut counted = Counted::new();
        counted.workers[1].count_round(Duration::from_secs(50));
        for second in 0..4 {
            counted.keep(second * 1000);
            counted.workers[1].count_round(Duration::from_millis(600));
            counted.workers[1].count_polling(Duration::from_millis(100));
            counted.workers[1].wakeups.add(20);
            counted.workers[1].run_delay_nanoseconds.add(250_000_000);
            counted.workers[1].count_burst(32);
            counted.ports[0].1.of(1).work_nanoseconds.add(300);
            counted.ports[1].1.of(1).work_nanoseconds.add(100);
            counted.ports[1].1.of(0).work_nanoseconds.add(9);
        }
        let load = counted.series.worker(&counted.sample(4000), 1, Counted::name);
        assert_eq!(load.len(), 3);
        for load in &load {
            let WorkerLoad { busy_percent, polling_percent, sleeping_percent, wakeups, bursts, .. } = load;
            assert_eq!([busy_percent, polling_percent].map(|share| share.round()), [60.0, 10.0]);
            assert_eq!((sleeping_percent.round(), *wakeups, *bursts), (30.0, 20.0, 1.0));
            assert_eq!(load.run_delay_percent.round(), 25.0);
            assert_eq!(load.by_share(), [("vm0", 75.0), ("vm1", 25.0)]);
        }
        let idle = counted.series.worker(&counted.sample(4000), 0, Counted::name);
        assert_eq!((idle[0].busy_percent, idle[0].sleeping_percent), (0.0, 100.0));
        assert!(counted.series.worker(&counted.sample(4000), 2, Counted::name).is_empty());
    }

    #[test]
    fn samples_are_bounded_however_often_they_are_taken() {
        let mut counted = Counted::new();
        (0..2000).for_each(|tick| counted.keep(tick * 130));
        assert_eq!(counted.series.rows.each_ref().map(VecDeque::len), ROWS.map(|(_, most)| most));
        let now = counted.sample(2000 * 130);
        let seconds: Vec<_> = counted.series.port(&now, VM0).into_iter().map(|rates| rates.seconds).collect();
        assert!(
            seconds.iter().zip(WINDOWS).all(|(seconds, window)| *seconds >= window as f64),
            "{seconds:?}"
        );
    }
}
