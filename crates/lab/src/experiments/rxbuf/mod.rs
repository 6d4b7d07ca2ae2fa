//! `lab rxbuf`: how long receive buffers are, and what that costs. Four policies under five kinds of traffic, against our
//! device half, DPDK's, and with the kernel's TCP.
//!
//! | module | idea |
//! |---|---|
//! | `workload` | what arrives |
//! | `sink` | the driver that is measured |
//! | `window` | a window of time on its thread |
//! | `source`, `ours` | our device half, and a run against it |
//! | `dpdk` | a run against testpmd |
//! | `kernel` | a run of kernel traffic between two guests |
//! | `network` | the processes that takes |
//!
//! The device is the same for all policies and works as fast as there are buffers, so what differs is what the buffers
//! cost: descriptors on both sides, and memory. Packets are held for a while before they come back, as by a socket
//! that is not read at once. Before anything is timed, frames are checked: those of our device whole, with a number and a
//! pattern in each; those of testpmd by length and headers; kernel traffic by whoever receives it, to the last byte.

mod dpdk;
mod kernel;
mod ours;
mod sink;
mod source;
mod window;
mod workload;

#[cfg(test)]
mod tests;

use std::path::Path;
use std::rc::Rc;

use ringferry_nic::rx::PolicyKind;
use ringferry_rig::testpmd;

use self::workload::Workload;
use super::peers::testpmd::PACKAGES;
use crate::experiment::{
    Better, Defaults, Experiment, OptionSpec, Peer, Plan, Published, Row, RowError, Run, Sample, Setup,
};
use crate::labels::Labels;

#[derive(Clone, Copy, Debug)]
pub struct Rxbuf;

const NAME: &str = "rxbuf";

/// Frames that are handled together, on either side.
const BURST: usize = 32;

/// Most acknowledgements to a long frame: with more, the long frames are no longer what matters.
const MOST_ACKS: usize = 1000;

const OPTIONS: [OptionSpec; 2] = [
    OptionSpec { name: "acks", help: "64-byte frames to every 64 KiB frame of the bimodal mix (default 1)" },
    OptionSpec {
        name: "kernel",
        help: "kernel rows: `tcp` (default), `all` (and UDP of 64 and 1500 bytes), `off`",
    },
];

/// Said where two threads would share a processor.
const TWO: &str = "needs two processors, one for each side";

const SOURCE: &str = "virtio-net with mergeable buffers in Linux 3.14: netperf TCP_STREAM, 30 s, mean of 5, two virtual machines of \
                      two CPUs on one host, all offloads; printed as Gb/s, evidently Mbit/s";

/// The device that fills the buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Device {
    /// Our device half, on a thread.
    Ringferry,
    Dpdk,
    /// The kernel's TCP or UDP, through the switch.
    Kernel,
}

impl Device {
    const ALL: [Device; 3] = [Device::Ringferry, Device::Dpdk, Device::Kernel];

    fn name(self) -> &'static str {
        match self {
            Device::Ringferry => "ringferry",
            Device::Dpdk => "dpdk",
            Device::Kernel => "kernel",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Case {
    workload: Workload,
    device: Device,
    policy: PolicyKind,
}

impl Case {
    fn all() -> impl Iterator<Item = Case> {
        Workload::ALL.into_iter().flat_map(|workload| {
            Device::ALL.into_iter().flat_map(move |device| {
                PolicyKind::ALL.into_iter().map(move |policy| Case { workload, device, policy })
            })
        })
    }

    fn labels(&self) -> Labels {
        Labels::new()
            .with("workload", self.workload.name())
            .with("device", self.device.name())
            .with("policy", self.policy.name())
    }

    /// The average is compared with the fixed length that suits the traffic, the best policy with the average, and the
    /// fixed lengths with each other.
    fn baseline(&self) -> Option<Case> {
        let policy = match self.policy {
            PolicyKind::FixedMtu => return None,
            PolicyKind::FixedPage => PolicyKind::FixedMtu,
            PolicyKind::Ewma => self.workload.better_fixed(),
            PolicyKind::Best => PolicyKind::Ewma,
        };
        Some(Case { policy, ..*self })
    }

    fn published(&self) -> Option<Published> {
        if (self.workload, self.device) != (Workload::Gso, Device::Kernel) {
            return None;
        }
        let (what, value) = match self.policy {
            PolicyKind::FixedMtu => ("MTU-size buffers", 13_170.01),
            PolicyKind::FixedPage => ("PAGE_SIZE buffers", 14_642.85),
            PolicyKind::Ewma => ("auto-tuned buffers", 14_555.94),
            PolicyKind::Best => return None,
        };
        Some(Published::new(what, value, "Mbit/s", SOURCE))
    }
}

/// The conditions that all rows share.
#[derive(Clone)]
struct Conditions {
    setup: Setup,
    acks: usize,
    testpmd: Option<Rc<Path>>,
    /// Why there is no kernel traffic, if there is none.
    no_kernel: Option<String>,
}

impl Experiment for Rxbuf {
    fn name(&self) -> &'static str {
        NAME
    }

    fn about(&self) -> &'static str {
        "receive buffers of fixed, averaged and best length under five kinds of traffic: ours, DPDK, kernel TCP"
    }

    fn options(&self) -> &'static [OptionSpec] {
        &OPTIONS
    }

    fn defaults(&self) -> Defaults {
        // Some 50 rows, set-up included 0.3 s against our device and a second otherwise, thirteen times and more for baselines: ten
        // minutes.
        Defaults { runs: 6, seconds: 0.1, set_up: 0.4 }
    }

    fn plan(&self, setup: &Setup) -> Result<Plan, RowError> {
        let acks: usize = setup.option("acks", 1)?;
        if !(1..=MOST_ACKS).contains(&acks) {
            return Err(RowError::failed(format!("--option acks={acks}: 1 to {MOST_ACKS}")));
        }
        let wanted: String = setup.option("kernel", "tcp".into())?;
        let wanted: &[Workload] = match wanted.as_str() {
            "tcp" => &[Workload::Gso, Workload::Bimodal],
            "all" => &Workload::ALL,
            "off" => &[],
            other => return Err(RowError::failed(format!("--option kernel={other}: `tcp`, `all` or `off`"))),
        };
        let no_kernel = if wanted.is_empty() { None } else { kernel::impossible(setup) };
        let testpmd = testpmd::find().map(Rc::from);
        let mut plan = Plan::default();
        if let Some(program) = &testpmd {
            plan.peers.push(Peer::testpmd(program));
        }
        let conditions = Conditions { setup: setup.clone(), acks, testpmd, no_kernel };
        let cases =
            Case::all().filter(|case| case.device != Device::Kernel || wanted.contains(&case.workload));
        plan.rows.extend(cases.map(|case| row(case, &conditions)));
        for (what, value) in [("MTU-size buffers, 40 GbE", 22.0), ("auto-tuned buffers, 40 GbE, about", 26.0)]
        {
            plan.published.push(Published::new(
                what,
                value,
                "Gbit/s",
                "the same change, between two machines",
            ));
        }
        plan.notes = notes(acks);
        Ok(plan)
    }

    fn child(&self, program: &Path, args: &[String]) -> Result<(), RowError> {
        kernel::child(program, args)
    }
}

fn notes(acks: usize) -> Vec<String> {
    vec![
        format!(
            "The policy ewma is compared with the fixed length that suits the traffic, best with ewma, page with mtu. bimodal: for \
             each frame of 64 KiB {acks} of 64 bytes, in random order; kernel: TCP both ways at once."
        ),
        format!(
            "Packed rings in order of {} entries; the last {} packets are held. ringferry: the device waits for buffers, \
             so nothing is dropped but what the driver refuses. dpdk: drops what does not fit, and does not say how much: drops \
             are the driver's. kernel: rings of 1024, {} times as long a run; both guests have the policy, figures are those \
             of the receiving one.",
            sink::RING,
            sink::HELD,
            kernel::TIMES
        ),
    ]
}

/// A row that runs, or one that cannot.
fn row(case: Case, conditions: &Conditions) -> Row {
    let own = conditions.clone();
    Row::measured(case.labels(), "Gbit/s", Better::Higher, move |run| measure(&case, &own, run))
        .unless(missing(&case, conditions))
        .in_group(case.workload.title())
        .against(case.baseline().map(|baseline| baseline.labels()))
        .published(case.published())
}

/// Why a row cannot be measured here, and the package to install.
fn missing(case: &Case, conditions: &Conditions) -> Option<(String, Option<&'static str>)> {
    let two = || (conditions.setup.cpus.len() < 2).then(|| (TWO.to_owned(), None));
    let why = |why: &str| (why.to_owned(), None);
    match case.device {
        Device::Ringferry => two(),
        Device::Dpdk => dpdk::impossible(case.workload, conditions.acks)
            .map(why)
            .or_else(|| {
                let text = "needs dpdk-testpmd and its vhost driver";
                conditions.testpmd.is_none().then(|| (text.to_owned(), Some(PACKAGES)))
            })
            .or_else(two),
        Device::Kernel => kernel::traffic(case.workload)
            .err()
            .map(why)
            .or_else(|| conditions.no_kernel.clone().map(|text| (text, None))),
    }
}

fn measure(case: &Case, conditions: &Conditions, run: &Run<'_>) -> Result<Sample, RowError> {
    let Case { workload, device, policy } = *case;
    match device {
        Device::Ringferry => ours::measure(policy, &workload.mix(conditions.acks), run),
        Device::Dpdk => match &conditions.testpmd {
            Some(program) => dpdk::measure(policy, workload, program, run),
            None => Err(RowError::failed("testpmd is not installed")),
        },
        Device::Kernel => kernel::measure(policy, workload, &conditions.setup, run),
    }
}
