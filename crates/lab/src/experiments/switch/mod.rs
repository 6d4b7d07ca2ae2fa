//! `lab switch`: ringferry's switch against what people use, on the very same ends.
//!
//! ```text
//!   first processor                                  second processor
//!   generator: guest or tap -- vhost-user, tap --> the switch: ringferry, testpmd,
//!   receiver:  guest or tap <-- vhost-user, tap --'            Open vSwitch, the kernel's bridge
//! ```
//!
//! A guest is our driver over vhost-user; a tap has another tap behind it, with a bridge of the kernel's between. Frames of
//! so many flows go one way from the first port of each pair to its second. Every frame that arrives is counted, its number
//! and length are checked, and one of 256 is compared whole; before anything is timed, all are. Frames that were lost, came late,
//! out of order within their flow, or to a wrong port are counted.
//!
//! | module | idea |
//! |---|---|
//! | `case` | the matrix, the figures, and the goals |
//! | `end` | guests and taps |
//! | `pace`, `load` | open-loop generator and receiver |
//! | `search` | NDR and PDR |
//! | `contest` | who switches |
//! | `run` | one run |

mod case;
mod contest;
mod end;
mod load;
mod pace;
mod run;
mod search;

use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use self::case::{Case, Figure, Ring, Who};
use self::contest::{Order, testpmd};
use self::run::Outcome;
use crate::experiment::{Defaults, Experiment, OptionSpec, Peer, Plan, Row, RowError, Run, Sample, Setup};
use crate::experiments::peers::huge_pages::HugePages;
use crate::experiments::shared::shared;
use crate::experiments::{network, ovs};
use crate::frames::ways::Frames;

#[derive(Clone, Copy, Debug)]
pub struct Switch;

const NAME: &str = "switch";

/// Entries of a virtqueue: virtio_user's default, and QEMU's.
const QUEUE: u16 = 256;

/// Seconds of a trial of the search. RFC 2544 wants sixty; a rate that is found in a tenth of a second is a few per cent too
/// high at most, for everybody.
const TRIAL: f64 = 0.1;

/// The second threshold of loss, in per cent, and how well a rate is to be known.
const LOSS: f64 = 0.1;
const PRECISION: f64 = 1.0;

const OPTIONS: [OptionSpec; 7] = [
    OptionSpec {
        name: "matrix",
        help: "`default`: 2 ports, 1000 flows, with taps 1 as well; `full`: 2 and 8 ports, 1 to 100000 flows (hours; for use with --filter)",
    },
    OptionSpec {
        name: "trial",
        help: "seconds of each trial of the search for NDR and PDR (default 0.1; RFC 2544: 60)",
    },
    OptionSpec { name: "loss", help: "per cent of frames that may be lost at the PDR (default 0.1)" },
    OptionSpec {
        name: "precision",
        help: "per cent of the full load to which NDR and PDR are found (default 1)",
    },
    OptionSpec {
        name: "ring",
        help: "virtqueues of the guests: `split` (default), `packed`, `packed-in-order`",
    },
    OptionSpec { name: "queue-size", help: "entries of each virtqueue, a power of two (default 256)" },
    OptionSpec {
        name: "poll",
        help: "`poll_microseconds` of ringferry: how long a worker polls before it sleeps (default: its own)",
    },
];

/// The conditions that all rows share.
struct Conditions {
    setup: Setup,
    ring: Ring,
    queue: u16,
    /// Microseconds that ringferry is to poll.
    poll: Option<u32>,
    trial: f64,
    /// The second threshold of loss and the precision of a rate, as shares.
    loss: f64,
    precision: f64,
    testpmd: Option<Rc<Path>>,
    ovs: bool,
    /// Why there can be no network of our own.
    no_network: Option<String>,
}

impl Experiment for Switch {
    fn name(&self) -> &'static str {
        NAME
    }

    fn about(&self) -> &'static str {
        "the switch against testpmd, Open vSwitch with DPDK and the kernel's bridge: rates, NDR, PDR, latency, CPU"
    }

    fn options(&self) -> &'static [OptionSpec] {
        &OPTIONS
    }

    fn defaults(&self) -> Defaults {
        // 40 runs of 2 to 5 seconds, and eight again for A/A, thirteen times and more for baselines: three quarters of an hour.
        Defaults { runs: 6, seconds: 0.2, set_up: 3.0 }
    }

    fn plan(&self, setup: &Setup) -> Result<Plan, RowError> {
        let conditions = Rc::new(Conditions::new(setup)?);
        let matrix: String = setup.option("matrix", "default".into())?;
        let all = match matrix.as_str() {
            "full" => true,
            "default" => false,
            _ => return Err(RowError::failed(format!("--option matrix={matrix}: `default` or `full`"))),
        };
        let mut plan = Plan { notes: notes(&conditions), ..Plan::default() };
        if let Some(testpmd) = &conditions.testpmd {
            plan.peers.push(Peer::testpmd(testpmd));
        }
        plan.peers.extend(ovs::peer());
        plan.rows.extend(Case::matrix(all).into_iter().flat_map(|case| rows(case, &conditions)));
        Ok(plan)
    }

    fn child(&self, program: &Path, args: &[String]) -> Result<(), RowError> {
        match args {
            [word] if word == "probe" => network::probe(),
            [word, order] if word == "run" => {
                let order: Order = serde_json::from_str(order).map_err(RowError::failed)?;
                let outcome = run::run(&order, program)?;
                network::tell(&outcome)
            }
            _ => Err(RowError::failed("usage: lab child switch probe | run ORDER")),
        }
    }
}

impl Conditions {
    fn new(setup: &Setup) -> Result<Self, RowError> {
        let queue: u16 = setup.option("queue-size", QUEUE)?;
        if !queue.is_power_of_two() || !(64..=1024).contains(&queue) {
            let text = format!("--option queue-size={queue}: a power of two from 64 to 1024");
            return Err(RowError::failed(text));
        }
        let number = |name: &str, default: f64, least: f64, most: f64| {
            let value: f64 = setup.option(name, default)?;
            if (least..=most).contains(&value) {
                return Ok(value);
            }
            Err(RowError::failed(format!("--option {name}={value}: from {least} to {most}")))
        };
        Ok(Self {
            setup: setup.clone(),
            ring: setup.option("ring", Ring::default())?,
            queue,
            poll: setup.given("poll")?,
            trial: number("trial", TRIAL, 0.001, 600.0)?,
            loss: number("loss", LOSS, 0.0, 50.0)? / 100.0,
            precision: number("precision", PRECISION, 0.05, 50.0)? / 100.0,
            testpmd: ringferry_rig::testpmd::find().map(Rc::from),
            ovs: ovs::find().is_some(),
            no_network: network::forbidden(setup, NAME),
        })
    }

    /// Why a case cannot be measured, and the package to install.
    fn missing(&self, case: &Case) -> Option<(String, Option<&'static str>)> {
        let taps = case.ends.taps() != [false; 2];
        if self.setup.cpus.len() < 2 {
            return Some(("needs two processors, one for the ends and one for the switch".into(), None));
        }
        if let Some(why) = self.setup.without_program().filter(|_| case.who.is_ringferry()) {
            return Some((why, None));
        }
        if case.who.is_testpmd() && self.testpmd.is_none() {
            let packages = if taps { testpmd::TAP_PACKAGES } else { testpmd::PACKAGES };
            return Some(("needs dpdk-testpmd and its drivers".into(), Some(packages)));
        }
        if case.who.is_testpmd() && taps && case.frames == Frames::Tso {
            return Some(("testpmd's net_tap port takes no frames that are to be cut".into(), None));
        }
        if case.who == Who::TestpmdMac && case.frames == Frames::Tso {
            return Some(("testpmd's mac mode forgets that a frame is to be cut".into(), None));
        }
        if case.who == Who::Ovs && !self.ovs {
            return Some(("needs Open vSwitch with DPDK".into(), Some(ovs::PACKAGES)));
        }
        let network = taps || matches!(case.who, Who::Ovs | Who::Bridge);
        if network && ringferry_sys::program::installed("ip").is_none() {
            return Some(("needs ip".into(), Some("iproute2")));
        }
        self.no_network.clone().filter(|_| network).map(|why| (why, None))
    }
}

fn notes(conditions: &Conditions) -> Vec<String> {
    vec![
        format!(
            "rate: what arrives at full load; ndr, pdr: the highest rate at which nothing, and {} %, is lost, by binary search \
             (RFC 2544, RFC 8204) in trials of {} s, all ways together; what is due and finds no room in the ring is lost. \
             Frames go one way.",
            100.0 * conditions.loss,
            conditions.trial
        ),
        "p99-at-10%, 50%, 90%: of the no-drop rate of the same run, from the time a frame was due (open loop) to the time the \
         receiver saw it. wake-up: the same of single frames, 1000 a second. cpu: processor seconds of the switch's process for a \
         gigabyte at full load."
            .into(),
        format!(
            "Virtqueues of {} entries, {:?}. The ends share the first processor, the switch has the second. A flow has Ethernet \
             addresses, IP addresses and a source port of its own. The bridge has taps where the others have guests, and works \
             in the thread that sends: its time is the generator's, which has the second processor there.",
            conditions.queue, conditions.ring
        ),
        "The ratio is that of a row to ringferry's; goal: how many times as good ringferry is, of how many it is to be, per core: \
         for rates each has one, and cpu is what it used of that. One that polls uses all of it whatever it carries. testpmd \
         and Open vSwitch get huge pages for the length of a run where they can be had; ringferry uses none."
            .into(),
    ]
}

/// The rows of a case.
fn rows(case: Case, conditions: &Rc<Conditions>) -> Vec<Row> {
    let missing = conditions.missing(&case);
    let own = Rc::clone(conditions);
    let measures = shared(move |run| measure(&case, &own, run));
    let rows = std::iter::zip(Figure::ALL, measures).map(|(figure, measure)| {
        Row::measured(case.labels(figure), figure.unit(), figure.better(), measure)
            .of_run(case.labels(Figure::Rate).to_string())
            .unless(missing.clone())
            .in_group(&case.group(figure))
            .published(case.published(figure))
            .against((case != case.ours()).then(|| case.ours().labels(figure)))
            .goal(case.goal(figure))
    });
    rows.collect()
}

/// Measures one run: all figures, as [`Figure::ALL`].
fn measure(
    case: &Case,
    conditions: &Conditions,
    run: &Run<'_>,
) -> Result<[Sample; Figure::ALL.len()], RowError> {
    let (Some(ends), Some(switch)) = (run.cpu(0), run.cpu(1)) else {
        return Err(RowError::failed("needs two processors, one for the ends and one for the switch"));
    };
    let folder = crate::experiments::folder()?;
    let megabytes = match case.who {
        Who::TestpmdIo | Who::TestpmdMac => testpmd::MEGABYTES,
        Who::Ovs => ovs::MEGABYTES,
        Who::Ringferry | Who::Firewall | Who::Bridge => 0,
    };
    let pages = if megabytes > 0 { HugePages::reserve(megabytes << 20, run.stop)? } else { None };
    let order = Order {
        case: *case,
        folder: folder.path().to_owned(),
        cpus: [ends, switch],
        ring: conditions.ring,
        queue: conditions.queue,
        poll: conditions.poll,
        seconds: run.seconds.as_secs_f64(),
        trial: conditions.trial,
        loss: conditions.loss,
        precision: conditions.precision,
        huge_pages: pages.is_some(),
        testpmd: conditions.testpmd.as_deref().map(Into::into),
    };
    let mut command = conditions.setup.child(NAME);
    command.arg("run").arg(serde_json::to_string(&order).map_err(RowError::failed)?);
    let outcome: Outcome = network::run_child(&mut command, longest(&order), run)?;
    Ok(outcome.samples(conditions.loss))
}

/// How long a run may take: two searches, all trials made again as often as can be, and flows that are learnt.
fn longest(order: &Order) -> Duration {
    let trials = 100.0 * (order.trial + 0.02);
    let flows = f64::from(order.case.flows) * order.case.ports as f64 * 0.5e-3;
    Duration::from_secs_f64(6.0 * order.seconds + trials + flows)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::experiment::Source;

    #[test]
    fn rows_have_names_of_their_own_and_ours_is_the_baseline_of_their_group_and_unit() {
        for matrix in ["default", "full"] {
            let plan = Switch.plan(&Setup::planning(2, &[("matrix", matrix)])).unwrap();
            let rows: BTreeMap<String, &Row> = plan.rows.iter().map(|row| (row.name(), row)).collect();
            assert_eq!(rows.len(), plan.rows.len());
            for row in &plan.rows {
                let Some(baseline) = &row.baseline else {
                    assert!(row.name().ends_with("switch=ringferry") && row.goal.is_none());
                    continue;
                };
                let found = rows[baseline.as_str()];
                assert_eq!((&found.group, &found.unit), (&row.group, &row.unit));
            }
        }
    }

    #[test]
    fn what_cannot_be_measured_says_why_and_options_are_checked() {
        let reason = |plan: &Plan, start: &str| {
            let row = plan.rows.iter().find(|row| row.name().starts_with(start)).unwrap();
            match &row.source {
                Source::Missing(missing) => missing.reason.clone(),
                Source::Measured(_) => String::new(),
            }
        };
        let one = Switch.plan(&Setup::planning(1, &[])).unwrap();
        assert!(reason(&one, "ends=guest-guest").contains("two processors"));
        let two = Switch.plan(&Setup::planning(2, &[])).unwrap();
        // Our own guests need no network; taps do, and the program to probe for one is not there.
        assert_eq!(
            reason(&two, "ends=guest-guest ports=2 frames=64 flows=1000 figure=ndr switch=ringferry"),
            ""
        );
        let why = reason(&two, "ends=guest-tap");
        let bare = ringferry_sys::program::installed("ip").is_none();
        assert!(if bare { why == "needs ip" } else { why.contains("/nonexistent/ringferry-lab") }, "{why}");
        for wrong in [
            ("matrix", "some"),
            ("trial", "0"),
            ("loss", "x"),
            ("precision", "90"),
            ("ring", "round"),
            ("queue-size", "100"),
            ("poll", "1s"),
        ] {
            assert!(Switch.plan(&Setup::planning(2, &[wrong])).is_err(), "{wrong:?}");
        }
    }
}
