//! The kernel's TCP: one stream between two guests on a switch ([`network`]). The sending guest reads packets from its tap
//! into buffers of as many bytes as the stream's sends had.

use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::case::Kernel;
use crate::experiment::{RowError, Run, Sample, Setup};
use crate::experiments::network::{self, Network, Options, number};

/// How much longer than another's a run of this is: TCP takes a moment to find its window.
pub(super) const TIMES: u32 = 5;

/// The experiment whose child process starts the network.
const EXPERIMENT: &str = "txmap";

/// The figures that the child process prints.
#[derive(Debug, Serialize, Deserialize)]
struct Outcome {
    client: Value,
    /// The sending guest's counters.
    sender: Value,
}

/// Why kernel TCP cannot be measured here, if so.
pub(super) fn impossible(setup: &Setup) -> Option<String> {
    network::impossible(setup, EXPERIMENT)
}

/// Measures one run, in Gbit/s of payload that arrived and was right. A packet dropped for its shape is an error.
pub(super) fn measure(case: &Kernel, setup: &Setup, run: &Run<'_>) -> Result<Sample, RowError> {
    let folder = crate::experiments::folder()?;
    let seconds = (run.seconds * TIMES).max(network::SHORTEST);
    let mut command = setup.child(EXPERIMENT);
    command.arg("run").arg(folder.path());
    command.args([case.send.to_string(), case.piece.to_string(), case.limit.to_string()]);
    command.arg(seconds.as_secs_f64().to_string());
    let Outcome { client, sender } = network::run_child(&mut command, seconds, run)?;
    let mapped = |name: &str| number(&sender, &format!("/queues/0/tx/{name}"));
    let packets = mapped("packets")?.max(1.0);
    if mapped("dropped")? > 0.0 {
        return Err(RowError::failed(format!("{} packets were dropped", mapped("dropped")?)));
    }
    let mut sample = Sample::new(number(&client, "/bits_per_second")? / 1e9)
        .with("bytes/packet", mapped("bytes")? / packets)
        .with("copied bytes/packet", mapped("copied_bytes")? / packets);
    for outcome in ["direct", "collapsed", "defragged"] {
        sample = sample.with(outcome, mapped(outcome)?);
    }
    Ok(sample)
}

/// Runs the child process.
pub(super) fn child(program: &Path, args: &[String]) -> Result<(), RowError> {
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args.as_slice() {
        ["probe"] => network::probe(),
        ["run", folder, send, piece, limit, seconds] => {
            network::contain()?;
            let sender: &[&str] = &["--pieces", piece, "--max-segs", limit];
            let options = Options { guests: [sender, &[]], ..Options::default() };
            let mut network = Network::start(program, Path::new(folder), options)?;
            let client = network.traffic(&["--mode", "tcp", "--size", send, "--seconds", seconds])?;
            let [sender, _] = network.finish()?;
            network::tell(&Outcome { client, sender })
        }
        _ => Err(RowError::failed("usage: lab child txmap probe | run FOLDER SEND PIECE LIMIT SECONDS")),
    }
}
