//! An experiment is the interface between the things that are measured and the lab that
//! measures them.
//!
//! An [`Experiment`] has a name, a line that says what it is about, and a [`Plan`]: rows, made for the
//! [`Setup`] the user asked for. A [`Row`] is one thing measured: a name made of labelled parameters,
//! a unit, and a function called once per run that returns one value. The lab decides when a row runs
//! (interleaved with all others, after a warm-up round), keeps the values, and compares a row with its
//! baseline. Whatever a run needs, the row's function sets up and takes down; nothing may be left
//! behind when it returns, error or not.
//!
//! What cannot be measured here is a row too: one that is *missing*, with the reason and the package to
//! install. It is listed as missing and never replaced by a number from elsewhere. Numbers from
//! elsewhere are [`Published`] figures, and stand in a column of their own.
//!
//! To add an experiment: a module beside the others in `experiments`, a type that implements
//! [`Experiment`], and a line in `experiments::all`.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use ringferry_rig::testpmd::{self, Testpmd};
use serde::{Deserialize, Serialize};

use crate::labels::Labels;
use crate::stop::Stop;

/// Something the lab can measure.
pub trait Experiment {
    /// The name that the user types: `ringferry lab NAME`. Lower-case letters, digits and `-`.
    fn name(&self) -> &'static str;

    /// One line for `lab list`.
    fn about(&self) -> &'static str;

    /// Settings of its own, for `--option NAME=VALUE`. The lab refuses names that are not among them.
    fn options(&self) -> &'static [OptionSpec] {
        &[]
    }

    /// Runs and seconds per run when the user does not say.
    fn defaults(&self) -> Defaults {
        Defaults::default()
    }

    /// Says whether what it measures goes with the distance of the processors (see [`crate::probe`]). If not it is not probed, and no block of
    /// it is rejected because a processor was moved.
    fn goes_with_distance(&self) -> bool {
        true
    }

    /// The rows, in the order they are listed. Looks for peers and checks options; measures nothing.
    ///
    /// # Errors
    /// A bad option value, or a machine on which nothing of it can run.
    fn plan(&self, setup: &Setup) -> Result<Plan, RowError>;

    /// The body of a process of its own; see [`Setup::child`]. Its output is for the row that started
    /// it; `program` is [`Setup::program`].
    ///
    /// # Errors
    /// Whatever went wrong; the process ends with status 1 and the message on standard error.
    fn child(&self, _program: &Path, args: &[String]) -> Result<(), RowError> {
        Err(RowError::failed(format!("{} has no child process {args:?}", self.name())))
    }
}

/// A setting that an experiment has besides those of the lab.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptionSpec {
    /// The word in front of the `=`.
    pub name: &'static str,
    /// Its meaning, with its unit and default, in one line.
    pub help: &'static str,
}

/// How much an experiment measures unless told otherwise.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Defaults {
    /// Rounds that count, of blocks with two runs of each row; the warm-up comes on top.
    pub runs: usize,
    /// Length of one run in seconds.
    pub seconds: f64,
    /// What a run takes beside that, to be set up, to be checked and to end, about: seconds. The time of all experiments is shared out by it.
    pub set_up: f64,
}

impl Default for Defaults {
    fn default() -> Self {
        // The fewest blocks that prove anything at 95 %.
        Self { runs: 6, seconds: 1.0, set_up: 0.5 }
    }
}

/// The user's wishes, as far as an experiment's plan depends on it.
#[derive(Clone, Debug)]
pub struct Setup {
    pub seconds: Duration,
    /// Processors to pin to: the user's `--cpus`, else all this process may use.
    pub cpus: Vec<usize>,
    /// The experiment's own settings.
    pub options: BTreeMap<String, String>,
    /// The lab: the program that answers to `child EXPERIMENT ARGS`.
    pub lab: PathBuf,
    /// `ringferry`, for rows that measure a whole switch, or guests and traffic. It need not be there: see
    /// [`Setup::without_program`].
    pub program: PathBuf,
}

impl Setup {
    /// The command that runs [`Experiment::child`] of the named experiment in a process of its own. The
    /// caller appends arguments, starts it (by `ringferry_sys::process::spawn`, which gives it back the
    /// signals the lab keeps for itself) and must wait for it.
    pub fn child(&self, experiment: &str) -> Command {
        let mut command = Command::new(&self.lab);
        command.arg("child").arg("--program").arg(&self.program).arg(experiment);
        command
    }

    /// Why rows that need `ringferry` cannot be measured, if it is not there.
    pub fn without_program(&self) -> Option<String> {
        (!self.program.is_file()).then(|| {
            let program = self.program.display();
            format!("needs ringferry, and {program} is not there: `cargo build --release -p ringferry`, or --program")
        })
    }

    /// A setup for tests of plans, on a machine of so many processors where the lab cannot be started.
    #[cfg(test)]
    pub(crate) fn planning(cpus: usize, options: &[(&str, &str)]) -> Self {
        Self {
            seconds: Duration::from_millis(1),
            cpus: (0..cpus).collect(),
            options: options.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect(),
            lab: "/nonexistent/ringferry-lab".into(),
            program: std::env::current_exe().unwrap(),
        }
    }

    /// The value of an option, parsed; `default` when it was not given.
    ///
    /// # Errors
    /// A value that does not parse.
    pub fn option<T: std::str::FromStr>(&self, name: &str, default: T) -> Result<T, RowError>
    where
        T::Err: Display,
    {
        Ok(self.given(name)?.unwrap_or(default))
    }

    /// The value of an option, parsed; `None` when it was not given.
    ///
    /// # Errors
    /// A value that does not parse.
    pub fn given<T: std::str::FromStr>(&self, name: &str) -> Result<Option<T>, RowError>
    where
        T::Err: Display,
    {
        let parse = |text: &String| {
            text.parse().map_err(|error| RowError::failed(format!("--option {name}={text}: {error}")))
        };
        self.options.get(name).map(parse).transpose()
    }

    /// The value of an option that is a list of numbers from 1 to `most`, with commas: in order, each once. `None` when
    /// it was not given.
    ///
    /// # Errors
    /// A value that is no such list.
    pub fn numbers(&self, name: &str, most: usize) -> Result<Option<Vec<usize>>, RowError> {
        let Some(text) = self.options.get(name) else { return Ok(None) };
        let number = |word: &str| word.parse().ok().filter(|number| (1..=most).contains(number));
        let mut numbers: Vec<usize> =
            text.split(',').map(number).collect::<Option<_>>().ok_or_else(|| {
                RowError::failed(format!("--option {name}={text}: numbers from 1 to {most}, with commas"))
            })?;
        numbers.sort_unstable();
        numbers.dedup();
        Ok(Some(numbers))
    }
}

/// The rows and remarks of an experiment before anything is measured.
#[derive(Default)]
pub struct Plan {
    /// The rows, each with a name of its own.
    pub rows: Vec<Row>,
    /// Published figures that belong to the experiment and to no single row.
    pub published: Vec<Published>,
    /// Programs and libraries it measures with, for the machine facts.
    pub peers: Vec<Peer>,
    /// Things other than rows that are missing, the tool for counting loads for example.
    pub missing: Vec<Missing>,
    /// Lines for the reader: what was chosen, what a row means.
    pub notes: Vec<String>,
}

/// A program that takes part, and its version.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Peer {
    /// Its name, `testpmd` for example.
    pub name: String,
    /// The version that it reports.
    pub version: String,
}

impl Peer {
    /// DPDK's testpmd, as a result names it.
    pub(crate) fn testpmd(program: &Path) -> Self {
        Self { name: "testpmd".into(), version: testpmd::version(program) }
    }
}

/// Something that could not be measured here.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Missing {
    /// Name of the row, tool or peer.
    pub name: String,
    /// The reason, as a sentence for the user.
    pub reason: String,
    /// The Debian package that brings it, if one does.
    pub package: Option<String>,
}

/// A figure somebody else measured on another machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Published {
    /// The system or setting that the figure is of.
    pub what: String,
    pub value: f64,
    pub unit: String,
    /// The paper or page, with who measured it and on which machine.
    pub source: String,
}

impl Published {
    /// A figure with its unit and source.
    pub fn new(what: &str, value: f64, unit: &str, source: &str) -> Self {
        Self { what: what.into(), value, unit: unit.into(), source: source.into() }
    }
}

/// Says whether low or high values are good.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Better {
    /// A time, a cost, a count of drops.
    Lower,
    /// High values are good: a rate.
    Higher,
}

/// The function that makes one run.
pub type Measure = Box<dyn FnMut(&Run<'_>) -> Result<Sample, RowError>>;
/// The function that counts: called once, before the first round.
pub type Count = Box<dyn FnMut(&Run<'_>) -> Result<BTreeMap<String, f64>, RowError>>;

/// How a row gets its values.
pub enum Source {
    /// By measuring once per run.
    Measured(Measure),
    /// Not at all: it cannot be measured here.
    Missing(Missing),
}

/// One thing that is measured. Made with [`Row::measured`] and the builder methods.
pub struct Row {
    /// The parameters; together they are its name.
    pub labels: Labels,
    /// Rows of one group share a unit, are drawn in one plot, and have an A/A row in common.
    pub group: String,
    /// Unit of the value, `ns/buffer` or `Mpps` for example.
    pub unit: String,
    /// Says whether a low or a high value is good.
    pub better: Better,
    /// Name of the row it is compared with.
    pub baseline: Option<String>,
    /// The run that it has its values from, if other rows have theirs from the same.
    pub run: Option<String>,
    /// How many times as good as this row its baseline is to be.
    pub goal: Option<f64>,
    /// The worst mean that is good enough, in the row's unit.
    pub bound: Option<f64>,
    /// Published figures to stand beside it.
    pub published: Vec<Published>,
    /// Deterministic counts that belong to it, taken once.
    pub counts: Option<Count>,
    /// Where its values come from.
    pub source: Source,
}

impl Row {
    /// A row that `measure` makes a run of.
    pub fn measured(
        labels: Labels,
        unit: &str,
        better: Better,
        measure: impl FnMut(&Run<'_>) -> Result<Sample, RowError> + 'static,
    ) -> Self {
        Self {
            labels,
            group: String::new(),
            unit: unit.into(),
            better,
            baseline: None,
            run: None,
            goal: None,
            bound: None,
            published: Vec::new(),
            counts: None,
            source: Source::Measured(Box::new(measure)),
        }
    }

    /// Does not measure it if there is a reason why it cannot be measured here; with the Debian package to install, if one helps.
    pub fn unless(mut self, missing: Option<(impl Into<String>, Option<&str>)>) -> Self {
        if let Some((reason, package)) = missing {
            let package = package.map(Into::into);
            self.source = Source::Missing(Missing { name: self.name(), reason: reason.into(), package });
        }
        self
    }

    /// The row's name: its labels, `ring=packed order=in batch=32`.
    pub fn name(&self) -> String {
        self.labels.to_string()
    }

    /// Puts it into a group; see [`Row::group`].
    pub fn in_group(mut self, group: &str) -> Self {
        self.group = group.into();
        self
    }

    /// Compares it with the row of these labels, if any.
    pub fn against(mut self, baseline: Option<Labels>) -> Self {
        self.baseline = baseline.map(|labels| labels.to_string());
        self
    }

    /// Says that rows of the same `run`, any name, have their values from one: they are asked for the same [`Run::sample`] one after the other.
    pub fn of_run(mut self, run: impl Into<String>) -> Self {
        self.run = Some(run.into());
        self
    }

    /// Wants its baseline to be so many times as good, if that is wanted: that is the row under development, this one a peer.
    pub fn goal(mut self, times: Option<f64>) -> Self {
        self.goal = times;
        self
    }

    /// Wants its mean to be no worse than that, if there is a bound.
    pub fn bound(mut self, worst: Option<f64>) -> Self {
        self.bound = worst;
        self
    }

    /// Puts published figures beside it.
    pub fn published(mut self, figures: impl IntoIterator<Item = Published>) -> Self {
        self.published.extend(figures);
        self
    }

    /// Adds deterministic counts: taken once, shown beside the values, not compared by statistics.
    pub fn counting(
        mut self,
        count: impl FnMut(&Run<'_>) -> Result<BTreeMap<String, f64>, RowError> + 'static,
    ) -> Self {
        self.counts = Some(Box::new(count));
        self
    }
}

/// One run of one row.
#[derive(Clone, Copy, Debug)]
pub struct Run<'a> {
    /// How long to measure, set-up and tear-down not included.
    pub seconds: Duration,
    /// For whatever is random in a run: the same for all rows of a round, different from round to round,
    /// and reproducible.
    pub seed: u64,
    /// 0 is the warm-up round, whose values are thrown away; the rounds that count start at 1.
    pub round: usize,
    /// Number of the sample: the same for rows that have their values from one run, and for no others.
    pub sample: u64,
    /// Processors to pin threads or processes to, the one that matters most first. Never empty; may be
    /// one only.
    pub cpus: &'a [usize],
    /// Set once the user wants to stop.
    pub stop: &'a Stop,
}

impl Run<'_> {
    /// The processor for the `n`-th thread, counted from 0, while there are enough; `None` when threads
    /// would have to share one, and then they are better left to the scheduler.
    pub fn cpu(&self, n: usize) -> Option<usize> {
        self.cpus.get(n).copied()
    }

    /// Returns true if the user pressed Ctrl-C: return [`RowError::Stopped`] soon.
    pub fn stopped(&self) -> bool {
        self.stop.requested()
    }
}

/// The value of one run, with other figures of it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sample {
    /// The value, in the row's unit. Must be finite.
    pub value: f64,
    /// Other figures of the same run by name, `drops` or `CPU share` for example.
    pub extra: BTreeMap<String, f64>,
}

impl Sample {
    /// A sample without other figures.
    pub fn new(value: f64) -> Self {
        Self { value, extra: BTreeMap::new() }
    }

    /// And another figure of the same run.
    pub fn with(mut self, name: &str, value: f64) -> Self {
        self.extra.insert(name.into(), value);
        self
    }
}

/// Why a run gave no value. Other rows go on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RowError {
    /// It went wrong; the message says what to do.
    #[error("{0}")]
    Failed(String),
    /// The user wants to stop.
    #[error("stopped")]
    Stopped,
}

impl RowError {
    /// The failure with what testpmd said last, who was the peer.
    pub(crate) fn with_peer(self, testpmd: &mut Testpmd) -> Self {
        match self {
            Self::Failed(text) => testpmd.explain(&format!("was the peer when this happened: {text}")).into(),
            Self::Stopped => Self::Stopped,
        }
    }

    /// A failure with a message.
    pub fn failed(message: impl Display) -> Self {
        Self::Failed(message.to_string())
    }
}

impl From<testpmd::Error> for RowError {
    fn from(error: testpmd::Error) -> Self {
        match error {
            testpmd::Error::Stopped => Self::Stopped,
            error => Self::failed(error),
        }
    }
}

impl From<ringferry_rig::front::Error> for RowError {
    fn from(error: ringferry_rig::front::Error) -> Self {
        Self::failed(error)
    }
}

impl From<crate::frames::Wrong> for RowError {
    fn from(wrong: crate::frames::Wrong) -> Self {
        Self::failed(wrong)
    }
}

impl From<std::io::Error> for RowError {
    fn from(error: std::io::Error) -> Self {
        Self::failed(error)
    }
}
