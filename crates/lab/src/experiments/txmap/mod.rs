//! `lab txmap`: what becomes of a stream's throughput when its sends are small, and its packets chains of more
//! buffers than the device takes segments.
//!
//! | module | idea |
//! |---|---|
//! | `case` | which rows there are |
//! | `stack` | a stream of sends as packets |
//! | `paths` | a driver that takes everything, and a virtqueue with our device half behind it |
//! | `sender` | the stack and the framework's queue |
//! | `stream` | one run of a stream |
//! | `direct` | what the planner costs packets that need none |
//! | `kernel` | the kernel's TCP through two guests and the switch |
//! | `clock` | threads that work and one that measures |
//!
//! No packet may be dropped for its shape: a run in which one was has failed.

mod case;
pub(super) mod clock;
mod direct;
mod kernel;
mod paths;
mod sender;
mod stack;
mod stream;

#[cfg(test)]
mod tests;

use self::case::{Direct, Kernel, Path, Synthetic};
use crate::experiment::{Better, Defaults, Experiment, OptionSpec, Plan, Row, RowError, Setup};

#[derive(Clone, Copy, Debug)]
pub struct Txmap;

const OPTIONS: [OptionSpec; 1] = [OptionSpec {
    name: "kernel",
    help: "kernel TCP rows: `32` segments only (default), `all` limits, `off`",
}];

/// Said where two threads would share a processor.
const TWO: &str = "needs two processors, one for each side";

impl Experiment for Txmap {
    fn name(&self) -> &'static str {
        "txmap"
    }

    fn about(&self) -> &'static str {
        "streams of small sends through limits of 8 to 64 segments: mapping alone, virtqueues, kernel TCP"
    }

    fn options(&self) -> &'static [OptionSpec] {
        &OPTIONS
    }

    fn defaults(&self) -> Defaults {
        // Some 110 rows of a tenth of a second and a dozen of a second, thirteen times and more for baselines: ten minutes.
        Defaults { runs: 6, seconds: 0.1, set_up: 0.1 }
    }

    fn plan(&self, setup: &Setup) -> Result<Plan, RowError> {
        let kernel: String = setup.option("kernel", "32".into())?;
        let kernel: Vec<Kernel> = match kernel.as_str() {
            "32" => Kernel::all(false).collect(),
            "all" => Kernel::all(true).collect(),
            "off" => Vec::new(),
            _ => return Err(RowError::failed(format!("--option kernel={kernel}: `32`, `all` or `off`"))),
        };
        let mut plan = Plan { published: case::published(), ..Plan::default() };
        plan.rows.extend(Synthetic::all().map(|case| synthetic(case, setup)));
        plan.rows.extend(Direct::all().map(|case| single(case, setup)));
        let missing = if kernel.is_empty() { None } else { kernel::impossible(setup) };
        plan.rows.extend(kernel.into_iter().map(|case| tcp(case, setup, missing.as_deref())));
        plan.notes = vec![
            "Every row's baseline is the one of 256 KiB sends through the same limit, over the same path: its ratio is what \
             small sends keep. A packet dropped for its shape fails the run."
                .into(),
            "stack=coalescing: a send goes behind the one before it while that buffer has room, as in the stacks of kernels; \
             in all other rows each send has a buffer of its own, so that the chains of small sends are as long as can be."
                .into(),
            "null: stack, its copy of every send, and mapping, on one processor, and nothing behind; send ns/packet is what \
             the framework takes of it. virtio: and a device on the second processor that copies every byte out."
                .into(),
            format!(
                "kernel: TCP between two guests on the switch, {} times as long a run; the sending guest reads packets in \
                 buffers of `pieces` bytes. Small writes cost the socket, too: the rows with sends of 256 KiB in small pieces \
                 leave that out.",
                kernel::TIMES
            ),
        ];
        Ok(plan)
    }

    fn child(&self, program: &std::path::Path, args: &[String]) -> Result<(), RowError> {
        kernel::child(program, args)
    }
}

fn too_few(path: Path, setup: &Setup) -> Option<(&'static str, Option<&'static str>)> {
    (path == Path::Virtio && setup.cpus.len() < 2).then_some((TWO, None))
}

fn synthetic(case: Synthetic, setup: &Setup) -> Row {
    Row::measured(case.labels(), "Gbit/s", Better::Higher, move |run| stream::measure(&case, run))
        .unless(too_few(case.path, setup))
        .in_group(&case.group())
        .against(case.baseline().map(|case| case.labels()))
}

fn single(case: Direct, setup: &Setup) -> Row {
    Row::measured(case.labels(), "Mpps", Better::Higher, move |run| direct::measure(&case, run))
        .unless(too_few(case.path, setup))
        .in_group(&case.group())
        .against(case.baseline().map(|case| case.labels()))
}

fn tcp(case: Kernel, setup: &Setup, missing: Option<&str>) -> Row {
    let own = setup.clone();
    Row::measured(case.labels(), "Gbit/s", Better::Higher, move |run| kernel::measure(&case, &own, run))
        .unless(missing.map(|why| (why, None)))
        .in_group(&case.group())
        .against(case.baseline().map(|case| case.labels()))
        .published(case.published())
}
