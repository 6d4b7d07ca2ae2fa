//! The experiments for programs: what `lab list --json` writes.

use serde::Serialize;

use crate::experiment::{Better, Experiment, Missing, Source};
use crate::labels::Labels;
use crate::session::{self, LabError};

/// Name and version of the schema.
pub const SCHEMA: &str = "ringferry-lab-list/1";

/// The experiments that can be run.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct List {
    /// Always `ringferry-lab-list/1`.
    pub schema: &'static str,
    pub experiments: Vec<Listed>,
}

/// An experiment with its options and rows.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Listed {
    pub name: &'static str,
    /// One line.
    pub about: &'static str,
    /// The settings of its own, for `--option NAME=VALUE`.
    pub options: Vec<ListedOption>,
    pub rows: Vec<ListedRow>,
    /// Rounds, unless `--runs` says otherwise.
    pub runs: usize,
    /// Seconds of a run, unless `--seconds` says otherwise.
    pub seconds: f64,
}

#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct ListedOption {
    pub name: &'static str,
    pub help: &'static str,
}

#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct ListedRow {
    /// The labels as one text; unique.
    pub name: String,
    pub labels: Labels,
    /// Rows of a group are drawn together.
    pub group: String,
    pub unit: String,
    /// Says whether low or high is good.
    pub better: Better,
    /// The row it is compared with.
    pub baseline: Option<String>,
    /// Why it cannot be measured here.
    pub missing: Option<Missing>,
}

impl List {
    /// # Errors
    /// The plan of an experiment cannot be made.
    pub fn of(experiments: &[Box<dyn Experiment>]) -> Result<Self, LabError> {
        let listed = experiments.iter().map(|experiment| Listed::of(experiment.as_ref()));
        Ok(Self { schema: SCHEMA, experiments: listed.collect::<Result<_, LabError>>()? })
    }
}

impl Listed {
    fn of(experiment: &dyn Experiment) -> Result<Self, LabError> {
        let plan = experiment.plan(&session::setup(experiment, None)?)?;
        let rows = plan.rows.into_iter().map(|row| ListedRow {
            name: row.name(),
            labels: row.labels,
            group: row.group,
            unit: row.unit,
            better: row.better,
            baseline: row.baseline,
            missing: match row.source {
                Source::Missing(missing) => Some(missing),
                Source::Measured(_) => None,
            },
        });
        let options = experiment.options().iter();
        Ok(Self {
            name: experiment.name(),
            about: experiment.about(),
            options: options.map(|option| ListedOption { name: option.name, help: option.help }).collect(),
            rows: rows.collect(),
            runs: experiment.defaults().runs,
            seconds: experiment.defaults().seconds,
        })
    }
}
