//! `lab replace`: what guests and taps notice when their switch is replaced, or killed.
//!
//! Guests and their partners, each of which is another guest, or the kernel behind a tap, send numbered frames to each other as fast as they are
//! taken. Meanwhile another process takes the switch's place, or the switch is killed and `ringferry keep` starts the next one. A gap is the longest
//! time in which any of the flows stood still.
//!
//! | module | idea |
//! |---|---|
//! | `case` | the matrix, the figures, and their bounds |
//! | `end` | where a flow begins and ends: a guest, or a tap |
//! | `flows` | numbered frames, and what became of them |
//! | `run` | one run |

mod case;
mod end;
mod flows;
mod run;

use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use self::case::{Case, Event, Figure};
use self::run::{Order, Outcome};
use crate::experiment::{Defaults, Experiment, OptionSpec, Plan, Row, RowError, Run, Sample, Setup};
use crate::experiments::network;
use crate::experiments::shared::shared;

#[derive(Clone, Copy, Debug)]
pub struct Replace;

const NAME: &str = "replace";

const OPTIONS: [OptionSpec; 4] = [
    OptionSpec { name: "ports", help: "ports, an even number from 2 to 64 (default 16)" },
    OptionSpec { name: "workers", help: "worker threads of the switch, 1 to 16 (default 1)" },
    OptionSpec {
        name: "events",
        help: "how often the switch is replaced or killed in a run, 1 to 1000 (default 8)",
    },
    OptionSpec {
        name: "pin",
        help: "`apart` (default): the ends of the flows have the first processor, the switch the second; `off`: the scheduler decides",
    },
];

/// The conditions that all rows share.
struct Conditions {
    setup: Setup,
    ports: u16,
    workers: u16,
    events: u16,
    pinned: bool,
    /// Why there can be no network, if so.
    no_network: Option<String>,
}

impl Experiment for Replace {
    fn name(&self) -> &'static str {
        NAME
    }

    fn about(&self) -> &'static str {
        "guests under full load while their switch is replaced by another process, or killed: gaps, frames lost, doubled or reordered"
    }

    fn options(&self) -> &'static [OptionSpec] {
        &OPTIONS
    }

    fn defaults(&self) -> Defaults {
        // The length of a run is that of its events.
        Defaults { runs: 6, seconds: 2.5, set_up: 1.0 }
    }

    /// Gaps are of milliseconds.
    fn goes_with_distance(&self) -> bool {
        false
    }

    fn plan(&self, setup: &Setup) -> Result<Plan, RowError> {
        let conditions = Rc::new(Conditions::new(setup)?);
        let rows = Case::all().flat_map(|case| rows(case, &conditions)).collect();
        Ok(Plan { notes: notes(&conditions), rows, ..Plan::default() })
    }

    fn child(&self, program: &Path, args: &[String]) -> Result<(), RowError> {
        match args {
            [word] if word == "probe" => network::probe(),
            [word, order] if word == "run" => {
                let order: Order = serde_json::from_str(order).map_err(RowError::failed)?;
                network::tell(&run::run(&order, program)?)
            }
            _ => Err(RowError::failed("usage: lab child replace probe | run ORDER")),
        }
    }
}

impl Conditions {
    fn new(setup: &Setup) -> Result<Self, RowError> {
        let number = |name: &str, default: u16, most: u16| {
            let number: u16 = setup.option(name, default)?;
            match (1..=most).contains(&number) {
                true => Ok(number),
                false => Err(RowError::failed(format!("--option {name}={number}: from 1 to {most}"))),
            }
        };
        let ports = number("ports", 16, 64)?;
        if ports % 2 == 1 {
            return Err(RowError::failed(format!("--option ports={ports}: their ends are in pairs")));
        }
        let pin: String = setup.option("pin", "apart".into())?;
        if !["apart", "off"].contains(&pin.as_str()) {
            return Err(RowError::failed(format!("--option pin={pin}: `apart` or `off`")));
        }
        let (workers, events) = (number("workers", 1, 16)?, number("events", 8, 1000)?);
        let (pinned, no_network) = (pin == "apart", network::forbidden(setup, NAME));
        Ok(Self { setup: setup.clone(), ports, workers, events, pinned, no_network })
    }

    /// Why a case cannot be measured, and the package to install.
    fn missing(&self, case: &Case) -> Option<(String, Option<&'static str>)> {
        if self.pinned && self.setup.cpus.len() < 2 {
            return Some((
                "needs two processors, one for the ends of the flows and one for the switch, or --option pin=off".into(),
                None,
            ));
        }
        if case.partner.needs_network()
            && let Some(why) = &self.no_network
        {
            return Some((why.clone(), None));
        }
        self.setup.without_program().map(|why| (why, None))
    }
}

fn notes(conditions: &Conditions) -> Vec<String> {
    let place = match conditions.pinned {
        true => {
            "The ends of the flows have the first processor, the switch and whoever takes its place the second"
        }
        false => "The scheduler places everybody",
    };
    vec![format!(
        "gap: the longest time for which any of the {} flows stood still, from before an event until 100 ms after it; without an event, in as long a time. {} events in a \
         run, one after the other; {} worker(s). {place}.",
        conditions.ports, conditions.events, conditions.workers
    )]
}

/// The rows of a case.
fn rows(case: Case, conditions: &Rc<Conditions>) -> Vec<Row> {
    let own = Rc::clone(conditions);
    let measures = shared(move |run| measure(&case, &own, run));
    let rows = std::iter::zip(Figure::ALL, measures).map(|(figure, measure)| {
        Row::measured(case.labels(figure), figure.unit(), figure.better(), measure)
            .of_run(case.labels(Figure::ALL[0]).to_string())
            .unless(conditions.missing(&case))
            .in_group(&case.group(figure))
            .against((case.event != Event::None).then(|| case.quiet().labels(figure)))
            .bound(figure.bound(case.event, conditions.events, conditions.workers))
    });
    rows.collect()
}

/// Measures one run: all figures, as [`Figure::ALL`].
fn measure(
    case: &Case,
    conditions: &Conditions,
    run: &Run<'_>,
) -> Result<[Sample; Figure::ALL.len()], RowError> {
    let folder = crate::experiments::folder()?;
    let switch = (1..=usize::from(conditions.workers)).filter_map(|at| run.cpu(at)).collect();
    let order = Order {
        case: *case,
        folder: folder.path().to_owned(),
        cpus: run.cpu(0).filter(|_| conditions.pinned).map(|ends| (ends, switch)),
        workers: conditions.workers,
        ports: conditions.ports,
        events: conditions.events,
    };
    let mut command = conditions.setup.child(NAME);
    command.arg("run").arg(serde_json::to_string(&order).map_err(RowError::failed)?);
    let outcome: Outcome = network::run_child(&mut command, longest(conditions.events), run)?;
    Ok(outcome.samples())
}

/// How long a run may take, beyond the start of its processes: far more than an event takes.
fn longest(events: u16) -> Duration {
    Duration::from_secs(2) * u32::from(events)
}

#[cfg(test)]
mod tests;
