//! `lab tenants`: what a hostile guest does to others.
//!
//! Two innocent guests have a stream of 1 Gbit/s and requests with answers between them, somebody asks the control plane now and
//! then, and an attacker's front ends do their worst on the same switch. The rows of an attack are compared with the same
//! figures when nobody attacks, and some figures have a bound that they are to keep whatever the attack.
//!
//! | module | idea |
//! |---|---|
//! | `case` | the matrix, the figures, and their bounds |
//! | `attacks` | the attacks, and the attacker's process |
//! | `pair` | the innocent guests |
//! | `absence` | when they had no processor themselves |
//! | `probe` | the control plane, memory, descriptors, log |
//! | `run` | one run |

mod absence;
mod attacks;
mod case;
mod pair;
mod probe;
mod run;

use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use self::attacks::Attack;
use self::case::{Case, Figure, Who};
use self::run::{MEGABYTES, Order, Outcome, Processors};
use crate::experiment::{Defaults, Experiment, OptionSpec, Peer, Plan, Row, RowError, Run, Sample, Setup};
use crate::experiments::peers::huge_pages::HugePages;
use crate::experiments::shared::shared;
use crate::experiments::{network, ovs};

#[derive(Clone, Copy, Debug)]
pub struct Tenants;

const NAME: &str = "tenants";

/// The Debian packages of testpmd and of its driver.
const PACKAGES: &str = "dpdk-dev librte-net-vhost23";

const OPTIONS: [OptionSpec; 3] = [
    OptionSpec {
        name: "workers",
        help: "worker threads of ringferry, 1 to 16 (default 1); with more, the ports of the guests and of the attacker are theirs in turn",
    },
    OptionSpec {
        name: "segment",
        help: "`own` (default): innocent guests and attacker are in VLANs of their own; `one`: in the same, so that floods reach all",
    },
    OptionSpec {
        name: "pin",
        help: "`apart` (default): guests and attacker have the first processor, the switch the second; `off`: the scheduler decides",
    },
];

/// The conditions that all rows share.
struct Conditions {
    setup: Setup,
    workers: u16,
    one_segment: bool,
    pinned: bool,
    testpmd: Option<Rc<Path>>,
    /// Why Open vSwitch cannot be attacked, and the package to install.
    no_ovs: Option<(String, Option<&'static str>)>,
}

impl Experiment for Tenants {
    fn name(&self) -> &'static str {
        NAME
    }

    fn about(&self) -> &'static str {
        "innocent guests beside a hostile one, attack by attack: their waits and losses, the control plane, memory, log"
    }

    fn options(&self) -> &'static [OptionSpec] {
        &OPTIONS
    }

    fn defaults(&self) -> Defaults {
        Defaults { runs: 6, seconds: 2.0, set_up: 1.0 }
    }

    /// Waits are of tens to thousands of microseconds, and a block of four rows, each twice, takes so long that a processor is moved in most of them.
    fn goes_with_distance(&self) -> bool {
        false
    }

    fn plan(&self, setup: &Setup) -> Result<Plan, RowError> {
        let conditions = Rc::new(Conditions::new(setup)?);
        let mut plan = Plan { notes: notes(&conditions), ..Plan::default() };
        if let Some(testpmd) = &conditions.testpmd {
            plan.peers.push(Peer::testpmd(testpmd));
        }
        plan.peers.extend(ovs::peer());
        plan.rows.extend(Case::all().into_iter().flat_map(|case| rows(case, &conditions)));
        Ok(plan)
    }

    fn child(&self, program: &Path, args: &[String]) -> Result<(), RowError> {
        match args {
            [word] if word == "probe" => network::probe(),
            [word, order] if word == "run" => {
                let order: Order = serde_json::from_str(order).map_err(RowError::failed)?;
                network::tell(&run::run(&order, program)?)
            }
            [word, order] if word == "attack" => {
                attacks::run(&serde_json::from_str(order).map_err(RowError::failed)?)
            }
            _ => Err(RowError::failed("usage: lab child tenants probe | run ORDER | attack ORDER")),
        }
    }
}

impl Conditions {
    fn new(setup: &Setup) -> Result<Self, RowError> {
        let workers: u16 = setup.option("workers", 1)?;
        if !(1..=16).contains(&workers) {
            return Err(RowError::failed(format!("--option workers={workers}: from 1 to 16")));
        }
        let choice = |name: &str, yes: &str, no: &str| {
            let word: String = setup.option(name, yes.into())?;
            match word.as_str() {
                word if word == yes => Ok(true),
                word if word == no => Ok(false),
                _ => Err(RowError::failed(format!("--option {name}={word}: `{yes}` or `{no}`"))),
            }
        };
        Ok(Self {
            setup: setup.clone(),
            workers,
            one_segment: !choice("segment", "own", "one")?,
            pinned: choice("pin", "apart", "off")?,
            testpmd: ringferry_rig::testpmd::find().map(Rc::from),
            no_ovs: match ovs::find() {
                None => Some(("needs Open vSwitch with DPDK".into(), Some(ovs::PACKAGES))),
                // Its bridge is an interface, too.
                Some(_) => network::forbidden(setup, NAME).map(|why| (why, None)),
            },
        })
    }

    /// Why a figure cannot be measured, and the package to install.
    fn missing(&self, case: &Case, figure: Figure) -> Option<(String, Option<&'static str>)> {
        if self.setup.cpus.len() < 2 {
            return Some(("needs two processors, one for the guests and one for the switch".into(), None));
        }
        match case.who {
            Who::Ringferry => {
                let alone = self.workers == 1 && case.attack.is_some_and(Attack::wants_two_workers);
                let alone = alone.then(|| "needs two workers: --option workers=2".to_owned());
                self.setup.without_program().or(alone).map(|why| (why, None))
            }
            Who::Testpmd if self.testpmd.is_none() => {
                Some(("needs dpdk-testpmd and its drivers".into(), Some(PACKAGES)))
            }
            Who::Testpmd if figure == Figure::Control => Some(("testpmd has no control socket".into(), None)),
            Who::Testpmd => None,
            Who::Ovs => {
                let cannot = case.attack.and_then(Attack::not_on_ovs).map(|why| (why.to_owned(), None));
                self.no_ovs.clone().or(cannot)
            }
        }
    }
}

fn notes(conditions: &Conditions) -> Vec<String> {
    vec![
        "wait: from the time a request of an innocent guest was due (open loop, 2000 a second) to its answer; service: less the time for which the \
         guests' own thread, beside the attacker's, had no processor; share: what arrives in \
         time of a stream of 1 Gbit/s in frames of 1500 bytes; lost: taken by the switch and never delivered. connect: GET_FEATURES \
         over a fresh connection to another port; ctl: `ctl show`, or `ovs-appctl dpif/show`. A question without an answer counts with the time it has waited."
            .into(),
        format!(
            "rss, vmsize, descriptors: growth of the switch's since before the attack; log: lines a second, without those of the \
             probe. bound: what a value is to keep whatever the attack, and without one: where the row \
             without an attack exceeds it, too, an attack is not to blame. {} and the attacker's processes are kinder to their \
             processor than all others; {} worker(s).",
            match conditions.pinned {
                true => "Guests and attacker share the first processor, the switch has the second",
                false => "The scheduler places everybody",
            },
            conditions.workers
        ),
    ]
}

/// The rows of a case.
fn rows(case: Case, conditions: &Rc<Conditions>) -> Vec<Row> {
    let own = Rc::clone(conditions);
    let measures = shared(move |run| measure(&case, &own, run));
    let rows = std::iter::zip(Figure::ALL, measures).map(|(figure, measure)| {
        Row::measured(case.labels(figure), figure.unit(), figure.better(), measure)
            .of_run(case.labels(Figure::ALL[0]).to_string())
            .unless(conditions.missing(&case, figure))
            .in_group(&case.group(figure))
            .against((case != case.quiet()).then(|| case.quiet().labels(figure)))
            .bound(figure.bound())
    });
    rows.collect()
}

/// Measures one run: all figures, as [`Figure::ALL`].
fn measure(
    case: &Case,
    conditions: &Conditions,
    run: &Run<'_>,
) -> Result<[Sample; Figure::ALL.len()], RowError> {
    // A peer has one thread for what it carries.
    let workers = if case.who == Who::Ringferry { usize::from(conditions.workers) } else { 1 };
    let switch: Vec<usize> = (1..=workers).filter_map(|at| run.cpu(at)).collect();
    let (Some(ends), false) = (run.cpu(0), switch.is_empty()) else {
        return Err(RowError::failed("needs two processors, one for the guests and one for the switch"));
    };
    let folder = crate::experiments::folder()?;
    let pages = match case.who {
        Who::Testpmd => HugePages::reserve(MEGABYTES << 20, run.stop)?,
        Who::Ovs => HugePages::reserve(ovs::MEGABYTES << 20, run.stop)?,
        Who::Ringferry => None,
    };
    let order = Order {
        case: *case,
        folder: folder.path().to_owned(),
        cpus: conditions.pinned.then_some(Processors { ends, switch }),
        workers: conditions.workers,
        one_segment: conditions.one_segment,
        seconds: run.seconds.as_secs_f64(),
        huge_pages: pages.is_some(),
        testpmd: conditions.testpmd.as_deref().map(Into::into),
    };
    let mut command = conditions.setup.child(NAME);
    command.arg("run").arg(serde_json::to_string(&order).map_err(RowError::failed)?);
    let outcome: Outcome = network::run_child(&mut command, longest(run.seconds), run)?;
    Ok(outcome.samples())
}

/// How long a run may take, beyond the start of its processes.
fn longest(seconds: Duration) -> Duration {
    seconds + Duration::from_secs(60)
}

#[cfg(test)]
mod tests;
