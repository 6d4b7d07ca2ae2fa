//! Two results of one experiment against each other: before and after a change, or two machines.

use std::fmt::Write;

use serde::{Deserialize, Serialize};

use crate::experiment::Better;
use crate::probe::Distance;
use crate::report::table::Table;
use crate::report::words;
use crate::results::{Results, RowResult};
use crate::stats::{Comparison, Confidence, Summary};

/// Name and version of the schema.
pub const SCHEMA: &str = "ringferry-lab-compare/1";

/// New results against old ones, row by row.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Versus {
    /// Always `ringferry-lab-compare/1`.
    pub schema: String,
    pub experiment: String,
    /// When each was measured: old, new.
    pub started: [String; 2],
    /// Reasons to doubt the comparison: another machine, another length of a run.
    pub warnings: Vec<String>,
    /// Rows that both have, in the order of the new results.
    pub rows: Vec<VersusRow>,
    /// Rows with values in the old results only.
    pub only_old: Vec<String>,
    /// Rows with values in the new results only.
    pub only_new: Vec<String>,
}

/// One row then and now.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct VersusRow {
    pub name: String,
    /// The group that it is drawn in.
    pub group: String,
    pub unit: String,
    /// Says whether low or high is good.
    pub better: Better,
    pub old: Summary,
    pub new: Summary,
    pub comparison: Comparison,
}

/// Why two results cannot be compared.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum VersusError {
    /// They are of different experiments.
    #[error("cannot compare `lab {old}` with `lab {new}`: give two results of one experiment")]
    Experiments {
        /// Experiment of the old results.
        old: String,
        /// Experiment of the new results.
        new: String,
    },
    /// No row is in both.
    #[error("the two results have no row in common: were they measured with different --filter?")]
    NothingInCommon,
}

impl Versus {
    /// Compares `new` with `old`, at the confidence of the new results.
    ///
    /// # Errors
    /// See [`VersusError`].
    pub fn new(old: &Results, new: &Results) -> Result<Self, VersusError> {
        if old.experiment != new.experiment {
            let (old, new) = (old.experiment.clone(), new.experiment.clone());
            return Err(VersusError::Experiments { old, new });
        }
        let confidence = new.settings.confidence;
        let rows: Vec<VersusRow> =
            measured(new).filter_map(|row| compare(old.row(&row.name)?, row, confidence)).collect();
        if rows.is_empty() {
            return Err(VersusError::NothingInCommon);
        }
        let missing_from = |rows: &[VersusRow], all: &Results| -> Vec<String> {
            let compared = |name: &str| rows.iter().any(|row| row.name == name);
            measured(all).map(|row| row.name.clone()).filter(|name| !compared(name)).collect()
        };
        Ok(Self {
            schema: SCHEMA.into(),
            experiment: new.experiment.clone(),
            started: [old.started.clone(), new.started.clone()],
            warnings: warnings(old, new),
            only_old: missing_from(&rows, old),
            only_new: missing_from(&rows, new),
            rows,
        })
    }

    /// The report for a terminal.
    pub fn text(&self) -> String {
        let mut out =
            format!("lab {}: measured {} against {}\n", self.experiment, self.started[1], self.started[0]);
        for warning in &self.warnings {
            let _ = writeln!(out, "careful: {warning}");
        }
        out.push('\n');
        let mut table = Table::new(&[
            "row",
            "unit",
            "old N",
            "old mean",
            "new N",
            "new mean",
            "difference",
            "ratio",
            "verdict",
        ]);
        for row in &self.rows {
            table.push(vec![
                row.name.clone(),
                row.unit.clone(),
                row.old.n.to_string(),
                words::value(row.old.mean),
                row.new.n.to_string(),
                words::value(row.new.mean),
                words::difference(&row.comparison),
                words::ratio(&row.comparison),
                row.comparison.verdict.to_string(),
            ]);
        }
        out.push_str(&table.draw());
        for (what, names) in [("old", &self.only_old), ("new", &self.only_new)] {
            for name in names {
                let _ = writeln!(out, "only in the {what} results: {name}");
            }
        }
        out
    }
}

fn measured(results: &Results) -> impl Iterator<Item = &RowResult> {
    results.rows.iter().filter(|row| row.summary.is_some())
}

/// `None` when there are no old values, or they are in another unit.
fn compare(old: &RowResult, new: &RowResult, confidence: Confidence) -> Option<VersusRow> {
    let (before, now) = (old.summary?, new.summary?);
    (old.unit == new.unit).then(|| VersusRow {
        name: new.name.clone(),
        group: new.group.clone(),
        unit: new.unit.clone(),
        better: new.better,
        old: before,
        new: now,
        comparison: Comparison::new(&now, &before, new.better, confidence),
    })
}

/// How many blocks were measured at each distance.
fn distances(results: &Results) -> String {
    let count = |wanted| {
        let blocks = results.blocks.iter().filter(|block| Distance::of(block.round_trip) == wanted).count();
        (blocks > 0).then(|| format!("{wanted} {blocks}"))
    };
    let all = [Distance::Near, Distance::Mid, Distance::Far, Distance::Unknown];
    all.into_iter().filter_map(count).collect::<Vec<_>>().join(", ")
}

fn warnings(old: &Results, new: &Results) -> Vec<String> {
    let mut warnings = vec![
        "the two were not measured interleaved: what changed on the machine between them counts as a \
         difference"
            .to_owned(),
    ];
    let mut differs = |what: &str, old: String, new: String| {
        if old != new {
            warnings.push(format!("{what}: {old} then, {new} now"));
        }
    };
    let text = |value: &Option<String>| value.clone().unwrap_or_else(|| "unknown".into());
    differs("processor", text(&old.machine.cpu), text(&new.machine.cpu));
    differs("kernel", old.machine.kernel.clone(), new.machine.kernel.clone());
    differs("build", old.machine.build.clone(), new.machine.build.clone());
    differs("pinned to", format!("{:?}", old.settings.cpus), format!("{:?}", new.settings.cpus));
    differs("seconds per run", old.settings.seconds.to_string(), new.settings.seconds.to_string());
    differs("blocks by distance of the processors", distances(old), distances(new));
    differs("options", format!("{:?}", old.settings.options), format!("{:?}", new.settings.options));
    warnings
}
