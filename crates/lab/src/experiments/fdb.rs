//! `lab fdb`: what a look-up in the switch's forwarding database costs, by how many addresses it holds.

use std::fmt;
use std::hint::black_box;

use fastrand::Rng;
use ringferry_packet::ether::Mac;
use ringferry_switch::fdb::{Fdb, Learned, PortId};

use super::lookups::{BURST, time};
use super::txmap::clock::pin;
use crate::experiment::{Better, Defaults, Experiment, Plan, Row, RowError, Run, Sample, Setup};
use crate::labels::Labels;

#[derive(Clone, Copy, Debug)]
pub struct Database;

/// Addresses in the table, which is made for the next power of two.
const ENTRIES: [u32; 5] = [16, 250, 4000, 62_500, MOST];
const MOST: u32 = 1_000_000;

/// Addresses of a run, drawn at random: so many for every table, so that the processor learns the order of none.
const DRAWN: usize = 1 << 20;

/// The time, in seconds: a second in which all addresses have been seen.
const NOW: u32 = 1;
const MAX_AGE: u32 = 300;

const UNIT: &str = "ns/look-up";

/// The smallest table, next to the largest, is to be at most twice as fast.
const GOAL: f64 = 0.5;

/// The operation that is done with each address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Work {
    /// It is where a frame goes.
    Destination,
    /// It is where a frame comes from, in the same second as another that did.
    Source,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Case {
    work: Work,
    entries: u32,
}

impl fmt::Display for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Work::Destination => "destination",
            Work::Source => "source",
        })
    }
}

impl Case {
    /// The largest tables, which the others are next to, come first.
    fn all() -> impl Iterator<Item = Case> {
        [Work::Destination, Work::Source]
            .into_iter()
            .flat_map(|work| ENTRIES.into_iter().rev().map(move |entries| Case { work, entries }))
    }

    fn labels(self) -> Labels {
        Labels::new().with("address", self.work).with("entries", self.entries)
    }

    fn row(self) -> Row {
        let largest = Case { entries: MOST, ..self };
        Row::measured(self.labels(), UNIT, Better::Lower, move |run| self.measure(run))
            .in_group(&format!("address={}", self.work))
            .against((self != largest).then(|| largest.labels()))
            .goal((self.entries == ENTRIES[0]).then_some(GOAL))
    }

    fn measure(self, run: &Run<'_>) -> Result<Sample, RowError> {
        pin(run.cpu(0))?;
        let mut fdb = filled(self.entries, run.seed)?;
        let drawn = draw(self.entries, run.seed);
        time(run, &drawn, "an address that the table holds was not found", |burst| {
            self.work.of(&mut fdb, burst)
        })
    }
}

impl Work {
    /// As the switch does it; whether the table knew all of the addresses.
    #[inline]
    fn of(self, fdb: &mut Fdb, burst: &[Mac]) -> bool {
        if fdb.is_large() {
            burst.iter().for_each(|mac| fdb.prefetch(fdb.hash(0, *mac)));
        }
        let mut known = true;
        for mac in burst {
            known &= match self {
                Work::Destination => black_box(fdb.lookup(0, *mac, NOW)).is_some(),
                Work::Source => black_box(fdb.learn(0, *mac, port(*mac), NOW)) == Learned::Known,
            };
        }
        known
    }
}

/// A table that knows so many addresses.
fn filled(entries: u32, seed: u64) -> Result<Fdb, RowError> {
    let mut fdb = Fdb::new(entries as usize, MAX_AGE, [seed, !seed]);
    for number in 0..entries {
        let mac = mac(number);
        if fdb.learn(0, mac, port(mac), NOW) != Learned::News {
            return Err(RowError::failed(format!("the table knew address {number} before it was there")));
        }
    }
    if fdb.len() != entries as usize {
        return Err(RowError::failed(format!("of {entries} addresses the table took {}", fdb.len())));
    }
    Ok(fdb)
}

/// [`DRAWN`] of the first `entries` addresses.
fn draw(entries: u32, seed: u64) -> Vec<Mac> {
    let mut random = Rng::with_seed(seed);
    std::iter::repeat_with(|| mac(random.u32(..entries))).take(DRAWN).collect()
}

fn mac(number: u32) -> Mac {
    let [a, b, c, d] = number.to_be_bytes();
    Mac([0x02, 0, a, b, c, d])
}

/// The port that a station is behind.
fn port(mac: Mac) -> PortId {
    PortId(u16::from(mac.0[5]))
}

impl Experiment for Database {
    fn name(&self) -> &'static str {
        "fdb"
    }

    fn about(&self) -> &'static str {
        "the switch's forwarding database: what a look-up costs with 16 addresses, and with a million"
    }

    fn defaults(&self) -> Defaults {
        // Ten rows and two for A/A, thirteen times and more for baselines, and as long again to fill the tables: two minutes.
        Defaults { runs: 6, seconds: 0.2, set_up: 0.3 }
    }

    fn plan(&self, _: &Setup) -> Result<Plan, RowError> {
        Ok(Plan {
            rows: Case::all().map(Case::row).collect(),
            notes: vec![format!(
                "Addresses behind 256 ports, drawn at random, in bursts of {BURST}; those of a large table are fetched before the \
                     first of a burst is looked up, as the switch does it. Every row's baseline is the table of {MOST}."
            )],
            ..Plan::default()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stop::Stop;
    use std::time::Duration;

    #[test]
    fn every_address_is_found_however_many_there_are() {
        let stop = Stop::new();
        let run = Run { seconds: Duration::ZERO, seed: 1, round: 1, sample: 1, cpus: &[], stop: &stop };
        let mut names: Vec<_> = Case::all().map(|case| case.labels().to_string()).collect();
        names.dedup();
        assert_eq!(names.len(), 2 * ENTRIES.len());
        for case in Case::all().filter(|case| case.entries < MOST) {
            assert!(case.measure(&run).unwrap().value > 0.0, "{case:?}");
            let row = case.row();
            assert!(row.baseline.is_some_and(|baseline| names.contains(&baseline)));
            assert_eq!(row.goal.is_some(), case.entries == 16);
        }
    }

    #[test]
    fn an_address_that_the_table_does_not_have_is_no_result() {
        let mut fdb = filled(16, 1).unwrap();
        for work in [Work::Destination, Work::Source] {
            assert!(work.of(&mut fdb, &[mac(15)]));
            assert!(!work.of(&mut fdb, &[mac(15), mac(16)]), "{work}");
        }
    }

    #[test]
    fn all_addresses_are_drawn_behind_all_ports() {
        let drawn = draw(250, 7);
        let mut stations: Vec<_> = drawn.iter().map(|mac| mac.0).collect();
        stations.sort_unstable();
        stations.dedup();
        assert_eq!((drawn.len(), stations.len()), (DRAWN, 250));
        let mut ports: Vec<_> = (0..MOST).map(|number| port(mac(number)).0).collect();
        ports.sort_unstable();
        ports.dedup();
        assert_eq!(ports.len(), 256);
    }
}
