//! `lab forward`: 2000 UDP flows of the smallest frames from one NIC to another, through the framework and through testpmd.
//!
//! ```text
//!   first processor                        second processor
//!   generator -- vhost-user, receive ring --> forwarder: receives, writes two MAC addresses, sends
//!   receiver  <-- vhost-user, transmit ring --'
//! ```
//!
//! Both forwarders are drivers on the same two vhost-user ends. Before anything is timed, frames of all flows are
//! looked at whole: their addresses, their order within the flow, and every other byte.
//!
//! | module | idea |
//! |---|---|
//! | `case` | which rows there are |
//! | `port` | the two sockets and the sessions on them |
//! | `ends` | generator and receiver |
//! | `nics` | ringferry as the forwarder |
//! | `testpmd` | testpmd as the forwarder |
//! | `measure` | one run |

mod case;
mod ends;
mod measure;
mod nics;
mod port;
mod testpmd;

#[cfg(test)]
mod tests;

use std::path::Path;
use std::rc::Rc;

use self::case::{Case, Who};
use crate::experiment::{Better, Defaults, Experiment, Plan, Published, Row, RowError, Run, Setup};
use crate::frames::flows::Flows;

#[derive(Clone, Copy, Debug)]
pub struct Forward;

impl Experiment for Forward {
    fn name(&self) -> &'static str {
        "forward"
    }

    fn about(&self) -> &'static str {
        "2000 UDP flows of the smallest frames from one NIC to another: the framework, testpmd, bursts, doorbells, entries"
    }

    fn defaults(&self) -> Defaults {
        // Some 25 rows of half a second with their set-up, thirteen times and more for baselines: five minutes.
        Defaults { runs: 6, seconds: 0.3, set_up: 0.4 }
    }

    fn plan(&self, setup: &Setup) -> Result<Plan, RowError> {
        let program = ringferry_rig::testpmd::find().map(Rc::from);
        let mut plan = Plan { published: published(), ..Plan::default() };
        plan.rows.extend(Case::all().into_iter().map(|case| row(case, setup, program.clone())));
        plan.notes = vec![
            "Generator and receiver share the first processor, the forwarder has the second; all poll. Where input full share \
             is near 0 the generator is the limit, not the forwarder."
                .into(),
            "mac: the forwarder writes both Ethernet addresses. testpmd gets huge pages for the length of a run where they can be \
             had; ringferry uses none."
                .into(),
        ];
        Ok(plan)
    }
}

fn row(case: Case, setup: &Setup, program: Option<Rc<Path>>) -> Row {
    let missing = if setup.cpus.len() < 2 {
        Some(("needs two processors, one for the ends and one for the forwarder", None))
    } else if case.who == Who::Testpmd && program.is_none() {
        Some(("needs dpdk-testpmd and its virtio driver", Some(testpmd::PACKAGES)))
    } else {
        None
    };
    let row = Row::measured(case.labels(), "Mpps", Better::Higher, move |run: &Run<'_>| {
        measure::measure(&case, run, program.as_deref())
    });
    let row =
        row.unless(missing).in_group(case.group()).against(case.baseline().map(|baseline| baseline.labels()));
    if case.group() == "output queues" { row.counting(move |_| Ok(spread(&case))) } else { row }
}

/// How the flows lie over the queues.
fn spread(case: &Case) -> std::collections::BTreeMap<String, f64> {
    let [most, least] = Flows::new().spread(case.how.queues);
    [("flows, fullest queue".into(), most as f64), ("flows, emptiest queue".into(), least as f64)].into()
}

/// Figures that others measured when FreeBSD's framework got the same repair of its mapping.
fn published() -> Vec<Published> {
    let figure = |what: &str, pps: f64, source: &str| Published::new(what, pps / 1e6, "Mpps", source);
    let method = "2000 UDP flows of the smallest frames, medians of 5 boots, ministat";
    vec![
        figure("APU2 (i210), IPv4, before", 464_490.0, method),
        figure("APU2 (i210), IPv4, after: +2.9052 % +- 0.260947 %; IPv6 no difference", 477_130.0, method),
        figure("Atom C2558 (i350), IPv4, before", 826_483.0, method),
        figure(
            "Atom C2558 (i350), IPv4, after: -1.41658 % +- 0.659936 %; IPv6 no difference",
            815_034.0,
            method,
        ),
        Published::new("interrupts bound to CPUs (+- 0.301691)", 0.342_631, "%", method),
    ]
}
