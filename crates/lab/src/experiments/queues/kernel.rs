//! One run of kernel sockets between two guests with several queue pairs, on a switch with as many workers ([`network`]).
//! The processor time of all of it is counted, and how packets spread over queues.

use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::case::{Case, Per, Test};
use crate::experiment::{RowError, Run, Sample, Setup};
use crate::experiments::network::{self, Network, Options, TAP, number};

/// The experiment, for its child process.
const EXPERIMENT: &str = super::NAME;

/// Time that connections of many sessions take to be opened, one after another, before the test begins.
const OPENING: Duration = Duration::from_secs(5);

/// The figures that the child process prints.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Outcome {
    /// Transactions, or megabits of payload.
    amount: f64,
    seconds: f64,
    cpu: Cpu,
    /// Of transactions, in microseconds: median and 99th percentile.
    latency: Option<[f64; 2]>,
    /// Of each queue pair, both guests together: packets received and sent.
    queues: Vec<[f64; 2]>,
    /// Bytes of the packets that the guest sent from which the payload comes, over their number.
    bytes_per_packet: f64,
    /// Times that the guests told the switch of packets, for each that they sent.
    kicks_per_packet: f64,
    /// Packets that the switch had no buffers for.
    drops: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct Cpu {
    switch: f64,
    guests: f64,
    /// The processes that have the sockets.
    sockets: f64,
}

/// The sum of a number over the queue pairs of a guest.
fn sum(guest: &Value, path: &str) -> Result<f64, RowError> {
    pairs(guest).iter().map(|pair| number(pair, path)).sum()
}

fn pairs(guest: &Value) -> &[Value] {
    guest["queues"].as_array().map_or(&[], Vec::as_slice)
}

impl Outcome {
    /// From the report of the traffic client, the time that switch and guests took, what the switch says, and what the
    /// guests counted.
    fn new(
        test: Test,
        report: &Value,
        [switch_cpu, guests_cpu]: [Duration; 2],
        switch: &Value,
        guests: [&Value; 2],
    ) -> Result<Self, RowError> {
        let [a, b] = guests;
        let sender = if test == Test::Receive { b } else { a };
        let count = pairs(a).len().max(pairs(b).len());
        let of = |guest: &Value, pair: usize, path: &str| {
            pairs(guest).get(pair).map_or(Ok(0.0), |pair| number(pair, path))
        };
        let both = |pair, path| Ok::<_, RowError>(of(a, pair, path)? + of(b, pair, path)?);
        let queues: Result<_, RowError> =
            (0..count).map(|pair| Ok([both(pair, "/rx/packets")?, both(pair, "/tx/packets")?])).collect();
        let total = |path| Ok::<_, RowError>(sum(a, path)? + sum(b, path)?);
        let (amount, latency) = if test.is_transactional() {
            let latency = [number(report, "/latency_us/p50")?, number(report, "/latency_us/p99")?];
            (number(report, "/transactions")?, Some(latency))
        } else {
            (number(report, "/bytes")? * 8.0 / 1e6, None)
        };
        let ports = switch["ports"].as_array().into_iter().flatten();
        Ok(Self {
            amount,
            seconds: number(report, "/seconds")?,
            cpu: Cpu {
                switch: switch_cpu.as_secs_f64(),
                guests: guests_cpu.as_secs_f64(),
                sockets: number(report, "/cpu_seconds")? + number(report, "/server_cpu_seconds")?,
            },
            latency,
            queues: queues?,
            bytes_per_packet: sum(sender, "/tx/bytes")? / sum(sender, "/tx/packets")?.max(1.0),
            kicks_per_packet: total("/tx/kicks")? / total("/tx/packets")?.max(1.0),
            drops: ports.filter_map(|port| port["drops"]["no-receive-buffers"].as_f64()).sum(),
        })
    }

    /// Over a second, with all other figures, and over a second of processor time.
    fn samples(&self) -> [Sample; 2] {
        let Cpu { switch, guests, sockets } = self.cpu;
        let mut sample = Sample::new(self.amount / self.seconds);
        for (name, seconds) in
            [("CPUs, switch", switch), ("CPUs, guests", guests), ("CPUs, sockets", sockets)]
        {
            sample = sample.with(name, seconds / self.seconds);
        }
        if let Some([median, tail]) = self.latency {
            sample = sample.with("p50 µs", median).with("p99 µs", tail);
        }
        if self.queues.len() > 1 {
            for (column, name) in ["rx", "tx"].into_iter().enumerate() {
                let all: f64 = self.queues.iter().map(|pair| pair[column]).sum();
                for (at, pair) in self.queues.iter().enumerate() {
                    sample = sample.with(&format!("{name} {at} share"), pair[column] / all.max(1.0));
                }
            }
        }
        sample = sample
            .with("bytes/packet", self.bytes_per_packet)
            .with("kicks/packet", self.kicks_per_packet)
            .with("drops", self.drops);
        [sample, Sample::new(self.amount / (switch + guests + sockets))]
    }
}

/// Why no kernel traffic can be had here, if so.
pub(super) fn impossible(setup: &Setup) -> Option<String> {
    network::impossible(setup, EXPERIMENT)
}

/// Measures one run: what arrived per second and per second of processor time, as [`Per::BOTH`].
pub(super) fn measure(
    case: &Case,
    setup: &Setup,
    run: &Run<'_>,
) -> Result<[Sample; Per::BOTH.len()], RowError> {
    let folder = crate::experiments::folder()?;
    let seconds = run.seconds.max(network::SHORTEST);
    let mut command = setup.child(EXPERIMENT);
    command.arg("run").arg(folder.path()).arg(case.test.to_string());
    command.args([case.size.to_string(), case.sessions.to_string()]);
    command.args([case.queues.to_string(), case.offered.to_string(), seconds.as_secs_f64().to_string()]);
    command.args(setup.options.get(super::SPREAD_AT));
    let outcome: Outcome = network::run_child(&mut command, seconds + OPENING, run)?;
    Ok(outcome.samples())
}

/// Runs the child process.
pub(super) fn child(program: &Path, args: &[String]) -> Result<(), RowError> {
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args.as_slice() {
        ["probe"] => network::probe(),
        ["run", folder, test, size, sessions, queues, offered, seconds, spread_at @ ..] => {
            let test = Test::ALL.into_iter().find(|known| known.to_string() == *test);
            let test = test.ok_or_else(|| RowError::failed("no such test"))?;
            network::contain()?;
            let folder = Path::new(folder);
            let outcome =
                exchange(program, folder, test, [size, sessions, seconds], [queues, offered], spread_at)?;
            network::tell(&outcome)
        }
        _ => Err(RowError::failed(
            "usage: lab child queues probe | run FOLDER TEST SIZE SESSIONS QUEUES OFFERED SECONDS [SPREAD_AT]",
        )),
    }
}

/// Starts the network, runs the test, and collects what all say.
fn exchange(
    program: &Path,
    folder: &Path,
    test: Test,
    [size, sessions, seconds]: [&str; 3],
    [queues, offered]: [&str; 2],
    spread_at: &[&str],
) -> Result<Outcome, RowError> {
    let controls = [0, 1].map(|guest| Network::control(folder, guest));
    let paths = controls.each_ref().map(|path| path.to_str().unwrap_or_default());
    let spread = spread_at.iter().flat_map(|load| ["--spread-at", load]);
    let guests = paths.map(|path| ["--queues", offered, "--control", path].into_iter().chain(spread.clone()));
    let guests = guests.map(Iterator::collect::<Vec<_>>);
    let options = Options {
        switch: &["--workers", queues],
        guests: guests.each_ref().map(Vec::as_slice),
        ..Options::default()
    };
    let mut network = Network::start(program, folder, options)?;
    for control in &controls {
        let channels = network.ctl(control, &["channels", TAP, "combined", queues, "--json"])?;
        let [most, used] = [number(&channels, "/max_combined")?, number(&channels, "/combined")?];
        if [most, used].map(|count| count.to_string()) != [offered, queues] {
            let text =
                format!("{used} of {most} queue pairs are in use, and {queues} of {offered} should be");
            return Err(RowError::failed(text));
        }
    }
    let before = network.cpu_time()?;
    let report = network.traffic(&[
        "--mode",
        test.mode(),
        "--size",
        size,
        "--sessions",
        sessions,
        "--seconds",
        seconds,
    ])?;
    let after = network.cpu_time()?;
    let used = [0, 1].map(|at| after[at].saturating_sub(before[at]));
    let switch = network.switch()?;
    let [a, b] = network.finish()?;
    Outcome::new(test, &report, used, &switch, [&a, &b])
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn guest(pairs: &[(u64, u64)]) -> Value {
        let pair = |&(rx, tx): &(u64, u64)| json!({ "rx": { "packets": rx }, "tx": { "packets": tx, "bytes": 100 * tx, "kicks": 5 } });
        json!({ "queues": pairs.iter().map(pair).collect::<Vec<_>>() })
    }

    fn outcome(test: Test) -> Outcome {
        let report = json!({
            "transactions": 500, "bytes": 1_000_000, "seconds": 2.0, "cpu_seconds": 0.5,
            "server_cpu_seconds": 0.25, "latency_us": { "p50": 20.0, "p99": 70.0 },
        });
        let cpu = [Duration::from_millis(1000), Duration::from_millis(250)];
        let switch = json!({ "ports": [{ "drops": { "no-receive-buffers": 3 } }, { "name": "no drops" }] });
        let (a, b) = (guest(&[(10, 30), (10, 10)]), guest(&[(50, 25), (30, 35)]));
        Outcome::new(test, &report, cpu, &switch, [&a, &b]).unwrap()
    }

    #[test]
    fn transactions_are_over_time_and_over_everybodys_processor_time() {
        let [second, cpu] = outcome(Test::Rr).samples();
        assert_eq!((second.value, cpu.value), (250.0, 250.0));
        assert_eq!((second.extra["p50 µs"], second.extra["p99 µs"]), (20.0, 70.0));
        assert_eq!(second.extra["CPUs, switch"], 0.5);
        assert_eq!(second.extra["CPUs, guests"], 0.125);
        assert_eq!(second.extra["CPUs, sockets"], 0.375);
        assert_eq!((second.extra["drops"], second.extra["kicks/packet"]), (3.0, 0.2));
        // Both guests together.
        let share = |name: &str| second.extra[name];
        assert_eq!((share("rx 0 share"), share("rx 1 share")), (0.6, 0.4));
        assert_eq!((share("tx 0 share"), share("tx 1 share")), (0.55, 0.45));
    }

    #[test]
    fn streams_are_in_megabits_and_their_packets_those_of_the_sender() {
        for test in [Test::Transmit, Test::Receive] {
            let [second, cpu] = outcome(test).samples();
            assert_eq!((second.value, cpu.value), (4.0, 4.0));
            assert!(!second.extra.contains_key("p50 µs"));
            assert_eq!(second.extra["bytes/packet"], 100.0);
        }
    }

    #[test]
    fn a_count_that_is_missing_is_named_and_one_queue_has_no_shares() {
        let report = json!({ "bytes": 8, "seconds": 1.0, "cpu_seconds": 0.0, "server_cpu_seconds": 0.0 });
        let one = guest(&[(1, 1)]);
        let good =
            Outcome::new(Test::Transmit, &report, [Duration::ZERO; 2], &json!({}), [&one, &one]).unwrap();
        assert!(good.samples()[0].extra.keys().all(|name| !name.ends_with("share")));
        let old = json!({ "queues": [{ "rx": {} }] });
        let error = Outcome::new(Test::Transmit, &report, [Duration::ZERO; 2], &json!({}), [&old, &one]);
        assert!(error.unwrap_err().to_string().contains("/rx/packets"));
    }
}
