//! One run of kernel traffic between two guests, whose receive buffers are what the row says. Guest a sends; guest b is the
//! one whose figures count. In the bimodal workload both send, and b receives long frames and acknowledgements.

use std::path::Path;

use ringferry_nic::rx::PolicyKind;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::workload::Workload;
use crate::experiment::{RowError, Run, Sample, Setup};
use crate::experiments::network::{self, Network, Options, number};

/// The experiment, for its child process.
const EXPERIMENT: &str = super::NAME;

/// How much longer than another's a run of this is: TCP takes a moment to find its window.
pub(super) const TIMES: u32 = 3;

/// Mode of the traffic generator and bytes of a write or a datagram; why there is none if so. Datagrams are 42 bytes
/// shorter than their frames.
pub(super) fn traffic(workload: Workload) -> Result<(&'static str, &'static str), &'static str> {
    match workload {
        Workload::Small => Ok(("udp", "22")),
        Workload::Mtu => Ok(("udp", "1472")),
        Workload::Gso => Ok(("tcp", "131072")),
        Workload::Bimodal => Ok(("tcp-both", "131072")),
        Workload::Imix => Err("the traffic generator sends datagrams of one length"),
    }
}

/// The figures that the child process prints.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct Outcome {
    bits_per_second: f64,
    /// Packets that guest b received, over the time.
    packets_per_second: f64,
    descriptors_per_packet: f64,
    truesize_per_payload: f64,
    /// Packets that the switch had no buffers for, and that guest b's queue or kernel refused.
    drops: f64,
    /// Bytes of the next buffer of b, and of a, which gets the acknowledgements.
    buffers: [f64; 2],
}

impl Outcome {
    fn sample(&self) -> Sample {
        Sample::new(self.bits_per_second / 1e9)
            .with("Mpps", self.packets_per_second / 1e6)
            .with("descriptors/packet", self.descriptors_per_packet)
            .with("truesize/payload", self.truesize_per_payload)
            .with("drops", self.drops)
            .with("buffer", self.buffers[0])
            .with("sender's buffer", self.buffers[1])
    }

    /// From the report of the traffic client, what the switch says, and what the guests counted.
    fn new(report: &Value, switch: &Value, [a, b]: [&Value; 2]) -> Result<Self, RowError> {
        let rx = |name: &str| number(b, &format!("/queues/0/rx/{name}"));
        let ports = switch["ports"].as_array().into_iter().flatten();
        let refused: f64 = ports.filter_map(|port| port["drops"]["no-receive-buffers"].as_f64()).sum();
        Ok(Self {
            bits_per_second: number(report, "/bits_per_second")?,
            packets_per_second: rx("packets")? / number(report, "/seconds")?,
            descriptors_per_packet: rx("descriptors")? / rx("packets")?,
            truesize_per_payload: rx("truesize_bytes")? / rx("bytes")?,
            drops: refused + number(b, "/rx_length_errors")? + number(b, "/rx_tap_errors")?,
            buffers: [rx("rx_buffer_len")?, number(a, "/queues/0/rx/rx_buffer_len")?],
        })
    }
}

/// Why no kernel traffic can be had here, if so.
pub(super) fn impossible(setup: &Setup) -> Option<String> {
    network::impossible(setup, EXPERIMENT)
}

pub(super) fn measure(
    policy: PolicyKind,
    workload: Workload,
    setup: &Setup,
    run: &Run<'_>,
) -> Result<Sample, RowError> {
    let (mode, size) = traffic(workload).map_err(RowError::failed)?;
    let folder = crate::experiments::folder()?;
    let seconds = (run.seconds * TIMES).max(network::SHORTEST);
    let mut command = setup.child(EXPERIMENT);
    command.arg("run").arg(folder.path()).args([policy.name(), mode, size]);
    command.arg(seconds.as_secs_f64().to_string());
    let outcome: Outcome = network::run_child(&mut command, seconds, run)?;
    Ok(outcome.sample())
}

/// Runs the child process.
pub(super) fn child(program: &Path, args: &[String]) -> Result<(), RowError> {
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args.as_slice() {
        ["probe"] => network::probe(),
        ["run", folder, policy, mode, size, seconds] => {
            network::contain()?;
            let buffers = ["--buffers", policy];
            let options = Options { guests: [&buffers; 2], ..Options::default() };
            let mut network = Network::start(program, Path::new(folder), options)?;
            let report = network.traffic(&["--mode", mode, "--size", size, "--seconds", seconds])?;
            let switch = network.switch()?;
            let [a, b] = network.finish()?;
            let outcome = Outcome::new(&report, &switch, [&a, &b])?;
            network::tell(&outcome)
        }
        _ => Err(RowError::failed("usage: lab child rxbuf probe | run FOLDER POLICY MODE SIZE SECONDS")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn guest(buffer: u32) -> Value {
        let rx = json!({
            "rx_buffer_len": buffer, "packets": 100, "bytes": 1000, "descriptors": 250, "truesize_bytes": 1100,
        });
        json!({ "rx_length_errors": 1, "rx_tap_errors": 2, "queues": [{ "rx": rx }] })
    }

    #[test]
    fn figures_are_those_of_the_receiving_guest_and_drops_those_of_all() {
        let report = json!({ "bits_per_second": 2e9, "seconds": 0.5 });
        let drops = |count: u32| json!({ "drops": { "no-receive-buffers": count } });
        let switch = json!({ "ports": [drops(3), { "name": "no drops" }, drops(4)] });
        let sample = Outcome::new(&report, &switch, [&guest(1536), &guest(4096)]).unwrap().sample();
        assert_eq!(sample.value, 2.0);
        let expected = [
            ("Mpps", 200.0 / 1e6),
            ("buffer", 4096.0),
            ("descriptors/packet", 2.5),
            ("drops", 10.0),
            ("sender's buffer", 1536.0),
            ("truesize/payload", 1.1),
        ];
        assert_eq!(sample.extra, expected.map(|(name, value)| (name.to_owned(), value)).into());
    }

    #[test]
    fn a_count_that_is_missing_is_named() {
        let report = json!({ "bits_per_second": 2e9, "seconds": 0.5 });
        let old = json!({ "rx_packets": 5 });
        let error = Outcome::new(&report, &json!({}), [&old, &old]).unwrap_err().to_string();
        assert!(error.contains("/queues/0/rx/packets"), "{error}");
    }
}
