//! `lab peers`: ringferry and DPDK as driver and as device, each with itself and with the other, over a
//! real vhost-user socket. Two threads or processes, one processor each, both polling; frames received per
//! second, in millions.
//!
//! Each side does the same per frame whoever plays it, and the same as testpmd:
//!
//! | | `txonly` / source | `rxonly` / sink | `io` / forward |
//! |---|---|---|---|
//! | driver | virtual header and 42 bytes of headers written into a buffer of its own that the device reads | nothing read but the virtual header; buffers posted again | what is received is sent |
//! | device | 42 bytes of headers written into a private buffer, which is copied whole to the driver's | copied whole to a private buffer | DPDK copies to an mbuf, and from there to the driver's; ringferry once, from the one to the other |
//!
//! Bursts are of 32 frames, queues of 256 entries unless asked for otherwise, calls and kicks are off. Of a frame's
//! payload no side reads more than the copies need; both count frames and bytes.
//!
//! Before anything is timed, each run checks that the data path is right: wherever ringferry receives,
//! frames are looked at whole, and those that ringferry sent carry a number and a pattern, so that one that
//! is damaged, lost, repeated or out of order fails the row. DPDK cannot look at frames; its
//! counters must say that all came, with all their bytes. The same is compared after the time
//! is over. Generators wait for room, except DPDK's, which drops what does not fit; frames of a loop that do not
//! fit the other ring are dropped by both.

pub(super) mod case;
mod device;
mod driver;
mod engine;
pub(super) mod huge_pages;
mod pair;
pub(super) mod testpmd;

#[cfg(test)]
mod tests;

use std::rc::Rc;

use self::case::Case;
use self::pair::{Conditions, measure};
use crate::experiment::{Better, Defaults, Experiment, OptionSpec, Peer, Plan, Row, RowError, Run, Setup};

pub struct Peers;

/// Entries of a queue: virtio_user's default.
const QUEUE: u16 = 256;

const OPTIONS: [OptionSpec; 2] = [
    OptionSpec {
        name: "matrix",
        help: "`default`: 64 and 1518 bytes, mergeable buffers; `all`: every row, for use with --filter",
    },
    OptionSpec { name: "queue-size", help: "entries of each virtqueue, a power of two (default 256)" },
];

impl Experiment for Peers {
    fn name(&self) -> &'static str {
        "peers"
    }

    fn about(&self) -> &'static str {
        "ringferry and DPDK (testpmd) as virtio-net driver and device, all four pairs, over vhost-user"
    }

    fn options(&self) -> &'static [OptionSpec] {
        &OPTIONS
    }

    fn defaults(&self) -> Defaults {
        // About 1.2 s per run with its set-up, for some hundred rows thirteen times: half an hour.
        Defaults { runs: 6, seconds: 0.5, set_up: 0.7 }
    }

    fn plan(&self, setup: &Setup) -> Result<Plan, RowError> {
        let queue: u16 = setup.option("queue-size", QUEUE)?;
        if !queue.is_power_of_two() || !(64..=1024).contains(&queue) {
            let text = format!("--option queue-size={queue}: a power of two from 64 to 1024");
            return Err(RowError::failed(text));
        }
        let matrix: String = setup.option("matrix", "default".into())?;
        let all = match matrix.as_str() {
            "all" => true,
            "default" => false,
            _ => return Err(RowError::failed(format!("--option matrix={matrix}: `default` or `all`"))),
        };
        let program = ringferry_rig::testpmd::find().map(Rc::from);
        let mut plan = Plan::default();
        if let Some(program) = &program {
            plan.peers.push(Peer::testpmd(program));
        }
        let cases = Case::all(queue).into_iter().filter(|case| all || case.by_default());
        plan.rows.extend(cases.map(|case| row(case, setup, program.clone())));
        plan.notes.push(format!(
            "Queues of {queue} entries, bursts of {}; the driver runs on the first processor, the device on the \
             second. Published figures are those of DPDK with itself.",
            crate::frames::numbered::BURST
        ));
        Ok(plan)
    }
}

/// The row of a case.
fn row(case: Case, setup: &Setup, program: Option<Rc<std::path::Path>>) -> Row {
    let missing = if setup.cpus.len() < 2 {
        Some(("needs two processors, one for each side", None))
    } else if case.needs_dpdk() && program.is_none() {
        Some(("needs dpdk-testpmd and its vhost and virtio drivers", Some(testpmd::PACKAGES)))
    } else {
        None
    };
    let row = Row::measured(case.labels(), "Mpps", Better::Higher, move |run: &Run<'_>| {
        let (Some(driver), Some(device)) = (run.cpu(0), run.cpu(1)) else {
            return Err(RowError::failed("needs two processors, one for each side"));
        };
        let program = program.as_deref();
        measure(&case, &Conditions { seconds: run.seconds, cpus: [driver, device], program, stop: run.stop })
    });
    row.unless(missing)
        .in_group(&case.group())
        .against((case != case.baseline()).then(|| case.baseline().labels()))
        .published(case.published())
}
