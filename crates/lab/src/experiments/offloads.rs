//! `lab offloads`: what it costs that two guests on a switch do not take the same offloads. The kernel's TCP and UDP between two
//! guests, over every ordered pair of four kinds of port; whatever one end lacks, the switch does.

use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::network::{self, Network, Options, number};
use crate::experiment::{Better, Defaults, Experiment, Plan, Row, RowError, Run, Sample, Setup};
use crate::labels::Labels;

#[derive(Clone, Copy, Debug)]
pub struct Offloads;

const NAME: &str = "offloads";

/// The offloads of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// All offloads.
    All,
    Unmerged,
    /// Checksums; nothing is cut up.
    Checksum,
    /// No offloads.
    None,
}

impl Kind {
    const ALL: [Kind; 4] = [Kind::All, Kind::Unmerged, Kind::Checksum, Kind::None];

    /// Its place among all, the fastest with itself first. For TCP each has less than the one before it. Single datagrams need
    /// nothing of what is missing there, and were received slowest into buffers of 64 KiB each.
    fn rank(self, traffic: &str) -> usize {
        if traffic == "udp" && self == Kind::Unmerged { Kind::ALL.len() } else { self as usize }
    }

    fn name(self) -> &'static str {
        match self {
            Kind::All => "all",
            Kind::Unmerged => "unmerged",
            Kind::Checksum => "checksum",
            Kind::None => "none",
        }
    }

    /// The keys of such a port.
    fn keys(self) -> &'static str {
        match self {
            Kind::All => "",
            Kind::Unmerged => ",mergeable=off",
            Kind::Checksum => ",tso=off,uso=off",
            Kind::None => ",csum=off,tso=off,uso=off",
        }
    }
}

/// A stream from one guest to the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Case {
    /// Mode of the traffic generator.
    traffic: &'static str,
    from: Kind,
    to: Kind,
}

impl Case {
    /// Those that others are compared with come first in their group.
    fn all() -> impl Iterator<Item = Self> {
        ["tcp", "udp"].into_iter().flat_map(|traffic| {
            let pairs = Kind::ALL.into_iter().flat_map(|from| Kind::ALL.map(|to| Self { traffic, from, to }));
            let (alike, mixed): (Vec<_>, Vec<_>) = pairs.partition(|case| case.from == case.to);
            alike.into_iter().chain(mixed)
        })
    }

    /// The slower end with itself, unless that is the case.
    fn baseline(self) -> Option<Self> {
        let rank = |kind: Kind| kind.rank(self.traffic);
        let slower = if rank(self.from) > rank(self.to) { self.from } else { self.to };
        let alone = Self { from: slower, to: slower, ..self };
        (alone != self).then_some(alone)
    }

    fn labels(self) -> Labels {
        Labels::new().with("traffic", self.traffic).with("from", self.from.name()).with("to", self.to.name())
    }

    fn row(self, setup: &Setup, missing: Option<&str>) -> Row {
        let setup = setup.clone();
        Row::measured(self.labels(), "Gbit/s", Better::Higher, move |run| self.measure(&setup, run))
            .unless(missing.map(|why| (why, None)))
            .in_group(&format!("traffic={}", self.traffic))
            .against(self.baseline().map(Case::labels))
    }

    fn measure(self, setup: &Setup, run: &Run<'_>) -> Result<Sample, RowError> {
        let folder = crate::experiments::folder()?;
        let seconds = run.seconds.max(network::SHORTEST);
        let mut command = setup.child(NAME);
        command.arg("run").arg(folder.path()).args([self.traffic, self.from.keys(), self.to.keys()]);
        command.arg(seconds.as_secs_f64().to_string());
        network::run_child::<Outcome>(&mut command, seconds, run)?.sample()
    }
}

impl Experiment for Offloads {
    fn name(&self) -> &'static str {
        NAME
    }

    fn about(&self) -> &'static str {
        "kernel TCP and UDP between guests that take different offloads, every pair of four kinds of port"
    }

    fn defaults(&self) -> Defaults {
        // 32 rows, and two again for A/A, thirteen times and more for baselines: nine minutes.
        Defaults { runs: 6, seconds: 0.5, set_up: 0.6 }
    }

    fn plan(&self, setup: &Setup) -> Result<Plan, RowError> {
        let missing = network::impossible(setup, NAME);
        Ok(Plan {
            rows: Case::all().map(|case| case.row(setup, missing.as_deref())).collect(),
            notes: vec![
                "Every row's baseline is the slower kind of its two ends with itself: a ratio below 0.5 is a pair that is more \
                 than twice as slow."
                    .into(),
            ],
            ..Plan::default()
        })
    }

    fn child(&self, program: &Path, args: &[String]) -> Result<(), RowError> {
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        match args.as_slice() {
            ["probe"] => network::probe(),
            ["run", folder, traffic, from, to, seconds] => {
                network::contain()?;
                let options = Options { ports: [from, to], ..Options::default() };
                let mut network = Network::start(program, Path::new(folder), options)?;
                let [before, _] = network.cpu_time()?;
                let report = network.traffic(&["--mode", traffic, "--seconds", seconds])?;
                let [after, _] = network.cpu_time()?;
                let outcome =
                    Outcome { report, switch: network.switch()?, busy: after.saturating_sub(before) };
                network::tell(&outcome)
            }
            _ => Err(RowError::failed("usage: lab child offloads probe | run FOLDER MODE KEYS KEYS SECONDS")),
        }
    }
}

/// The figures that the child process prints.
#[derive(Debug, Serialize, Deserialize)]
struct Outcome {
    report: Value,
    /// The switch's snapshot.
    switch: Value,
    /// Processor time that the switch used.
    busy: Duration,
}

impl Outcome {
    fn sample(&self) -> Result<Sample, RowError> {
        let receiver = |name: &str| number(&self.switch, &format!("/ports/1/counters/{name}"));
        let frames = receiver("tx_packets")?.max(1.0);
        let payload = number(&self.report, "/bits_per_second")? / 8.0 * number(&self.report, "/seconds")?;
        Ok(Sample::new(number(&self.report, "/bits_per_second")? / 1e9)
            .with("switch CPU s/GB", self.busy.as_secs_f64() / (payload / 1e9))
            .with("bytes/frame", receiver("tx_bytes")? / frames)
            .with("done in software", receiver("tx_software")?)
            .with("coalesced", receiver("tx_coalesced")?))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::json;

    use super::*;

    #[test]
    fn every_pair_is_compared_with_the_slower_of_its_ends() {
        let plan = Offloads.plan(&Setup::planning(1, &[])).unwrap();
        let rows: BTreeMap<String, Option<String>> =
            plan.rows.into_iter().map(|row| (row.name(), row.baseline)).collect();
        assert_eq!(rows.len(), 2 * 16);
        assert_eq!(rows.values().flatten().count(), 2 * 12);
        let baseline = |name: &str| rows[name].as_deref();
        assert_eq!(baseline("traffic=tcp from=none to=none"), None);
        assert_eq!(
            baseline("traffic=udp from=all to=checksum"),
            Some("traffic=udp from=checksum to=checksum")
        );
        assert_eq!(baseline("traffic=tcp from=none to=unmerged"), Some("traffic=tcp from=none to=none"));
        assert_eq!(
            baseline("traffic=udp from=unmerged to=none"),
            Some("traffic=udp from=unmerged to=unmerged")
        );
        assert!(rows.values().flatten().all(|name| rows[name].is_none()));
    }

    #[test]
    fn figures_are_those_of_the_receivers_port() {
        let counters = json!({ "tx_packets": 10, "tx_bytes": 15_000, "tx_software": 4, "tx_coalesced": 3 });
        let outcome = Outcome {
            report: json!({ "bits_per_second": 4e9, "seconds": 0.5 }),
            switch: json!({ "ports": [{}, { "counters": counters }] }),
            busy: Duration::from_millis(100),
        };
        let sample = outcome.sample().unwrap();
        assert_eq!(sample.value, 4.0);
        let expected = [
            ("bytes/frame", 1500.0),
            ("coalesced", 3.0),
            ("done in software", 4.0),
            ("switch CPU s/GB", 0.4),
        ];
        assert_eq!(sample.extra, expected.map(|(name, value)| (name.to_owned(), value)).into());
    }
}
