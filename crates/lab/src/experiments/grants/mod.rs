//! `lab grants`: grant copy, map and unmap, persistent and static grants over the same traffic, between a back end in this process
//! and a front end in another. Frames per second of one queue and more, both ways.
//!
//! | module | idea |
//! |---|---|
//! | `case` | which rows there are |
//! | `machine` | hypervisor, store and toolstack |
//! | `back` | the back end's side of a queue |
//! | `front` | the front end, in its process |
//! | `processors` | which thread runs where |
//! | `measure` | one run |
//! | `lookup` | what a look-up costs |
//!
//! Each queue has a thread on either side, and both poll. They treat the payload alike in every mode: the sender writes
//! every byte of a frame once, from private memory; the receiver copies every byte to private memory, from wherever the mode
//! has put it.

mod back;
mod case;
mod front;
mod lookup;
mod machine;
mod measure;
mod processors;

use std::path::Path;

use self::case::Case;
use self::front::Order;
use self::lookup::Lookup;
use self::machine::Provider;
use crate::experiment::{Better, Defaults, Experiment, OptionSpec, Plan, Published, Row, RowError, Setup};

#[derive(Clone, Copy, Debug)]
pub struct Grants;

const NAME: &str = "grants";

/// Most queues that are measured.
const MAX_QUEUES: usize = 8;

const OPTIONS: [OptionSpec; 2] = [
    OptionSpec {
        name: "provider",
        help: "`process`: the kernel plays hypervisor (default); `xen`: within a domain of Xen, which grants to itself",
    },
    OptionSpec {
        name: "queues",
        help: "numbers of queues, with commas (default: 1, 2, and twice as many while each has two processors)",
    },
];

impl Experiment for Grants {
    fn name(&self) -> &'static str {
        NAME
    }

    fn about(&self) -> &'static str {
        "Xen's grants: copied, mapped for a burst, persistent and static, both ways between two processes"
    }

    fn options(&self) -> &'static [OptionSpec] {
        &OPTIONS
    }

    fn defaults(&self) -> Defaults {
        // Some 90 rows of 0.1 s, and as much for two processes to begin and end, thirteen times and more for baselines: six minutes.
        Defaults { runs: 6, seconds: 0.1, set_up: 0.15 }
    }

    fn plan(&self, setup: &Setup) -> Result<Plan, RowError> {
        let provider: Provider = setup.option("provider", Provider::Process)?;
        let queues = queues(setup)?;
        let mut plan = Plan::default();
        plan.rows.extend(Case::all(&queues).into_iter().map(|case| row(case, provider, setup)));
        plan.rows.extend(Case::bounds().into_iter().map(|case| row(case, provider, setup)));
        plan.rows.extend(Lookup::all().map(look_up));
        plan.published = published();
        plan.notes = notes();
        Ok(plan)
    }

    fn child(&self, _program: &Path, args: &[String]) -> Result<(), RowError> {
        match args {
            [role, order] if role == "front" => {
                let order: Order = serde_json::from_str(order).map_err(RowError::failed)?;
                front::child(&order)
            }
            _ => Err(RowError::failed("usage: lab child grants front ORDER")),
        }
    }
}

/// Reads the numbers of queues from the options.
fn queues(setup: &Setup) -> Result<Vec<usize>, RowError> {
    Ok(setup.numbers("queues", MAX_QUEUES)?.unwrap_or_else(|| {
        let more = [4, MAX_QUEUES].into_iter().filter(|queues| setup.cpus.len() >= 2 * queues);
        [1, 2].into_iter().chain(more).collect()
    }))
}

fn row(case: Case, provider: Provider, setup: &Setup) -> Row {
    let setup = setup.clone();
    let row = Row::measured(case.labels(), "kpps", Better::Higher, move |run| {
        measure::measure(&case, provider, &setup, run)
    });
    row.in_group(&case.group())
        .against(case.baseline().map(|baseline| baseline.labels()))
        .published(case.published())
}

fn look_up(case: Lookup) -> Row {
    Row::measured(case.labels(), "ns/look-up", Better::Lower, move |run| lookup::measure(&case, run))
        .in_group(case.group())
        .against(case.baseline().map(|baseline| baseline.labels()))
}

fn notes() -> Vec<String> {
    vec![
        "Static, mapped and copied are compared with persistent grants: where map and copy are `slower`, persistent grants win, and \
         the interval says by how much. Caches with a bound are compared with copies."
            .into(),
        "process: granted pages lie in a memfd; map is an mmap of the page with its lookup, unmap takes it away with a flush of the \
         TLB, copy is preadv and pwritev, one call for pages that follow each other. Frames of 65535 bytes are TCP to \
         be cut (GSO), in 16 or 17 slots."
            .into(),
    ]
}

/// Bulk TCP, which belongs to no single row.
fn published() -> Vec<Published> {
    let hosts = [
        ("Xeon E5-1650 v2, Xen 4.5", "transmit, 1 queue", 14.5, 21.6),
        ("Xeon E5-1650 v2, Xen 4.5", "transmit, 2 queues", 17.6, 27.4),
        ("Xeon E5-1650 v2, Xen 4.5", "transmit, 3 queues", 17.2, 29.3),
        ("Xeon E5-1650 v2, Xen 4.5", "receive, 1 queue", 20.9, 17.8),
        ("Xeon E5-1650 v2, Xen 4.5", "receive, 2 queues", 21.1, 24.9),
        ("Xeon E5-1650 v2, Xen 4.5", "receive, 3 queues", 22.1, 31.0),
        ("Xeon E5-1650 v2, Xen 4.5", "guest to guest", 12.4, 18.9),
        ("Xeon E5-2697 v2", "transmit, 1 queue", 10.5, 15.9),
        ("Xeon E5-2697 v2", "transmit, 6 queues", 15.9, 30.0),
        ("Xeon E5-2697 v2", "receive, 1 queue", 15.1, 13.3),
        ("Xeon E5-2697 v2", "receive, 2 queues", 19.5, 18.1),
        ("Xeon E5-2697 v2", "receive, 3 queues", 22.2, 22.7),
        ("Xeon E5-2697 v2", "receive, 4 queues", 23.7, 25.8),
        ("Xeon E5-2697 v2", "receive, 5 queues", 24.0, 29.8),
        ("Xeon E5-2697 v2", "guest to guest, 1 queue", 12.5, 14.5),
        ("Xeon E5-2697 v2", "guest to guest, 2 queues", 12.6, 20.6),
        ("Xeon E5-2697 v2", "guest to guest, 3 queues", 13.7, 24.5),
    ];
    let both = hosts.into_iter().flat_map(|(source, what, before, with)| {
        let source = format!("bulk TCP, {source}, kernel drivers");
        [("before", before), ("with persistent grants", with)]
            .map(|(when, value)| Published::new(&format!("{what}: {when}"), value, "Gbit/s", &source))
    });
    let polling = Published::new(
        "64 bytes, transmit, bursts of 8: with persistent grants",
        4170.0,
        "kpps",
        "polling unikernel front end",
    );
    both.chain([polling]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn baselines_are_rows_of_the_same_group_and_unit() {
        for cpus in [1, 2, 8, 16] {
            let plan = Grants.plan(&Setup::planning(cpus, &[])).unwrap();
            let names: BTreeSet<String> = plan.rows.iter().map(Row::name).collect();
            assert_eq!(names.len(), plan.rows.len());
            for row in &plan.rows {
                let Some(baseline) = &row.baseline else { continue };
                let first = plan.rows.iter().find(|other| other.name() == *baseline).unwrap();
                assert_eq!((&first.group, &first.unit), (&row.group, &row.unit));
            }
        }
    }

    #[test]
    fn queues_are_as_many_as_there_are_processors_for_or_as_asked() {
        let counts = |cpus, options: &[(&str, &str)]| queues(&Setup::planning(cpus, options)).ok();
        assert_eq!(counts(2, &[]), Some(vec![1, 2]));
        assert_eq!(counts(8, &[]), Some(vec![1, 2, 4]));
        assert_eq!(counts(64, &[]), Some(vec![1, 2, 4, 8]));
        assert_eq!(counts(2, &[("queues", "3,1,3")]), Some(vec![1, 3]));
        for wrong in ["0", "9", "", "1,x"] {
            assert_eq!(counts(2, &[("queues", wrong)]), None, "{wrong}");
        }
        assert!(Grants.plan(&Setup::planning(2, &[("provider", "kvm")])).is_err());
    }
}
