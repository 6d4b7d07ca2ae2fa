//! The results of a session: the document that is written as JSON, drawn as HTML,
//! printed as text and read back for a comparison.
//!
//! The schema is documented in `docs/lab.md`. Members are only ever added within a version; readers
//! ignore what they do not know.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::experiment::{Better, Missing, Peer, Published};
use crate::labels::Labels;
use crate::machine::Machine;
use crate::probe::Distance;
use crate::schedule::{Block, Rejected};
use crate::stats::line::{self, Line};
use crate::stats::{Comparison, Confidence, Pair, Paired, Summary, Verdict};

/// Name and version of the schema.
pub const SCHEMA: &str = "ringferry-lab/1";

/// The results of one experiment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Results {
    /// Always `ringferry-lab/1`.
    pub schema: String,
    pub experiment: String,
    /// The experiment's own line of description.
    pub about: String,
    /// The command line, word by word.
    pub command: Vec<String>,
    /// When measuring began, RFC 3339, UTC.
    pub started: String,
    pub elapsed_seconds: f64,
    /// False when the user stopped it before the last round.
    pub complete: bool,
    pub settings: Settings,
    /// The machine that it was measured on.
    pub machine: Machine,
    pub peers: Vec<Peer>,
    pub notes: Vec<String>,
    /// Published figures for the experiment as a whole.
    pub published: Vec<Published>,
    /// Tools and peers that were missing, besides rows.
    pub missing: Vec<Missing>,
    /// The rows, in the experiment's order; an A/A row follows the row it repeats.
    pub rows: Vec<RowResult>,
    /// The blocks that count, in the order they were measured.
    #[serde(default)]
    pub blocks: Vec<Block>,
    /// Attempts at blocks that did not count.
    #[serde(default)]
    pub rejected: Rejected,
    /// Rows against their baselines, in the order of the rows.
    pub comparisons: Vec<RowComparison>,
    /// Rows that were compared with themselves, again and again.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub repetitions: Vec<Repetitions>,
    /// Reasons why the results may not mean what they seem to, as sentences.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

/// How an experiment was measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Settings {
    /// Rounds that count. Each measures every block once, and a block each of its rows twice.
    pub runs: usize,
    pub seconds: f64,
    /// Where all that is random started from: the order of the rows, and each run's seed.
    pub seed: u64,
    /// Level of all intervals, in per cent.
    pub confidence: Confidence,
    /// Processors that threads were pinned to.
    pub cpus: Vec<usize>,
    /// Regular expressions for the names of rows; all rows when empty.
    pub filters: Vec<String>,
    /// The experiment's own settings, as given.
    pub options: BTreeMap<String, String>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct RowResult {
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
    /// How many times as good as this row its baseline is to be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub goal: Option<f64>,
    /// The worst mean that is good enough.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bound: Option<f64>,
    /// For an A/A row: the row that it measures once more.
    pub repeats: Option<String>,
    /// One value per run that counts, in the order they were measured.
    pub values: Vec<f64>,
    /// For each value the block that it was measured in, an index into the `blocks` of the document.
    #[serde(default)]
    pub blocks: Vec<usize>,
    /// Attempts at its blocks that did not count.
    #[serde(default)]
    pub rejected: Rejected,
    /// Other figures of the runs, by name.
    pub extra: BTreeMap<String, Vec<f64>>,
    /// Deterministic counts, taken once.
    pub counts: BTreeMap<String, f64>,
    /// Statistics of the values; absent without values.
    pub summary: Option<Summary>,
    /// Its cost by the distance of the processors, where several were met.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub line: Option<Line>,
    pub errors: Vec<RunError>,
    /// Why it could not be measured at all.
    pub missing: Option<Missing>,
    /// Published figures to compare with by eye.
    pub published: Vec<Published>,
}

impl RowResult {
    /// Returns true if the mean keeps the row's bound; `None` without a bound or without values.
    pub fn within_bound(&self) -> Option<bool> {
        self.keeps(self.bound?)
    }

    /// Returns true if the mean is no worse than `bound`; `None` without values.
    fn keeps(&self, bound: f64) -> Option<bool> {
        let mean = self.summary?.mean;
        Some(match self.better {
            Better::Lower => mean <= bound,
            Better::Higher => mean >= bound,
        })
    }
}

/// How a row stands to its bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BoundVerdict {
    /// Its mean is no worse than the bound.
    Kept,
    /// Its mean is worse than the bound. The mean of its baseline, if it has one, is not.
    Exceeded,
    /// Its mean is worse than the bound, and so is the mean of its baseline: the excess is not due to what the two differ in.
    ExceededByBaselineToo,
}

/// A run that gave no value.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct RunError {
    /// The round; 0 is the warm-up, which also stands for the counts.
    pub round: usize,
    pub message: String,
}

/// A row against its baseline.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct RowComparison {
    pub row: String,
    pub baseline: String,
    /// The row is the baseline measured again: what is found here is noise.
    pub noise_floor: bool,
    /// Says whether the baseline is as many times as good as this row as it is to be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub goal: Option<Goal>,
    /// The tests and their verdict.
    #[serde(flatten)]
    pub comparison: Comparison,
}

/// A row that is to be so many times as good as another.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Goal {
    pub wanted: f64,
    /// How many it is: by the ratio of [`Comparison`], else by the means.
    pub reached: f64,
    /// True if that is enough.
    pub met: bool,
}

impl Goal {
    /// By how many times as much `row` is as its baseline; `None` where one of them is 0.
    fn new(wanted: f64, ratio: f64, better: Better) -> Option<Self> {
        let reached = match better {
            Better::Higher => 1.0 / ratio,
            Better::Lower => ratio,
        };
        (reached.is_finite() && reached > 0.0).then_some(Self { wanted, reached, met: reached >= wanted })
    }
}

/// A row that was compared with itself in so many sessions' worth of blocks, and what each of them said.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Repetitions {
    pub row: String,
    pub repetitions: usize,
    pub no_difference: usize,
    pub faster: usize,
    pub slower: usize,
    pub differs_by_distance: usize,
}

/// Takes the blocks of each A/A row `blocks_each` at a time, in the order they were measured, and compares them as a session of that length would have.
pub fn repetitions(
    rows: &[RowResult],
    blocks: &[Block],
    blocks_each: usize,
    confidence: Confidence,
) -> Vec<Repetitions> {
    let of = |again: &RowResult| {
        let row = rows.iter().find(|row| Some(&row.name) == again.repeats.as_ref())?;
        let pairs = pairs(again, row, blocks);
        let verdicts: Vec<Verdict> = pairs
            .chunks_exact(blocks_each)
            .filter_map(|pairs| Some(Paired::new(pairs, confidence)?.verdict(row.better, confidence)))
            .collect();
        let count = |wanted| verdicts.iter().filter(|verdict| **verdict == wanted).count();
        Some(Repetitions {
            row: row.name.clone(),
            repetitions: verdicts.len(),
            no_difference: count(Verdict::NoDifferenceProven),
            faster: count(Verdict::Faster),
            slower: count(Verdict::Slower),
            differs_by_distance: count(Verdict::DiffersByDistance),
        })
    };
    rows.iter().filter_map(of).collect()
}

/// Why a results file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The file cannot be read.
    #[error("cannot read {path}: {error}")]
    Io { path: String, error: std::io::Error },
    /// It is no JSON, or not of the schema it claims.
    #[error("{path} is not a result of `ringferry lab NAME --json`: {error}")]
    Json { path: String, error: serde_json::Error },
    /// It is of another schema.
    #[error(
        "{path} has schema {found}, this ringferry reads {SCHEMA}: measure again with this version, or \
         compare with the version that wrote it"
    )]
    Schema {
        path: String,
        /// The schema that it claims.
        found: String,
    },
}

impl Results {
    /// Reads a results file.
    ///
    /// # Errors
    /// See [`ReadError`].
    pub fn read(path: &Path) -> Result<Self, ReadError> {
        let name = path.display().to_string();
        let text = std::fs::read(path).map_err(|error| ReadError::Io { path: name.clone(), error })?;
        let json = |error| ReadError::Json { path: name.clone(), error };
        // Twice: first only what it claims to be.
        let claim: Claim = serde_json::from_slice(&text).map_err(json)?;
        if claim.schema != SCHEMA {
            return Err(ReadError::Schema { path: name, found: claim.schema.to_string() });
        }
        serde_json::from_slice(&text).map_err(json)
    }

    /// The row of that name.
    pub fn row(&self, name: &str) -> Option<&RowResult> {
        self.rows.iter().find(|row| row.name == name)
    }

    /// The comparison of a row with its baseline, if there is one.
    pub fn comparison(&self, row: &str) -> Option<&RowComparison> {
        self.comparisons.iter().find(|comparison| comparison.row == row)
    }

    /// How a row stands to its bound; `None` without a bound or without values.
    pub fn bound_verdict(&self, row: &RowResult) -> Option<BoundVerdict> {
        if row.within_bound()? {
            return Some(BoundVerdict::Kept);
        }
        let baseline = row.baseline.as_deref().and_then(|name| self.row(name));
        let too = baseline.zip(row.bound).and_then(|(baseline, bound)| baseline.keeps(bound)) == Some(false);
        Some(if too { BoundVerdict::ExceededByBaselineToo } else { BoundVerdict::Exceeded })
    }

    /// Returns true if a run of any row failed.
    pub fn failed(&self) -> bool {
        self.rows.iter().any(|row| !row.errors.is_empty())
    }

    /// The groups in the order of their first rows.
    pub fn groups(&self) -> Vec<&str> {
        let mut groups: Vec<&str> = Vec::new();
        for row in &self.rows {
            if !groups.contains(&row.group.as_str()) {
                groups.push(&row.group);
            }
        }
        groups
    }

    /// All that could not be measured: rows first, then the rest.
    pub fn all_missing(&self) -> Vec<&Missing> {
        self.rows.iter().filter_map(|row| row.missing.as_ref()).chain(&self.missing).collect()
    }
}

/// The schema that a document claims; null when it claims none.
#[derive(Deserialize)]
struct Claim {
    #[serde(default)]
    schema: serde_json::Value,
}

/// What a row and its baseline measured in the same blocks.
pub fn pairs(row: &RowResult, baseline: &RowResult, blocks: &[Block]) -> Vec<Pair> {
    let of = |row: &RowResult, block: usize| -> Vec<f64> {
        std::iter::zip(&row.values, &row.blocks)
            .filter(|(_, measured_in)| **measured_in == block)
            .map(|(value, _)| *value)
            .collect()
    };
    let pair = |(at, block): (usize, &Block)| {
        let (row, baseline) = (of(row, at), of(baseline, at));
        let both = !row.is_empty() && !baseline.is_empty();
        both.then(|| Pair { distance: Distance::of(block.round_trip), row, baseline })
    };
    blocks.iter().enumerate().filter_map(pair).collect()
}

/// A row's cost by the distance of the processors, one point for each block.
pub fn cost_line(row: &RowResult, blocks: &[Block], confidence: Confidence) -> Option<Line> {
    let point = |(at, block): (usize, &Block)| {
        let costs: Vec<f64> = std::iter::zip(&row.values, &row.blocks)
            .filter(|(_, measured_in)| **measured_in == at)
            .map(|(value, _)| line::cost(*value, &row.unit, row.better))
            .collect::<Option<_>>()?;
        Some((block.round_trip?, Summary::of(&costs)?.mean))
    };
    let points: Vec<(f64, f64)> = blocks.iter().enumerate().filter_map(point).collect();
    Line::through(&points, confidence)
}

/// Compares every row that has a baseline, or repeats a row, where both have values.
pub fn compare_rows(rows: &[RowResult], blocks: &[Block], confidence: Confidence) -> Vec<RowComparison> {
    let compare = |row: &RowResult| {
        let baseline = row.repeats.as_ref().or(row.baseline.as_ref())?;
        let other = rows.iter().find(|row| row.name == *baseline)?;
        let (own, base) = (row.summary?, other.summary?);
        let pairs = pairs(row, other, blocks);
        let comparison = Comparison::of_blocks(&own, &base, &pairs, row.better, confidence);
        let ratio = comparison.ratio.map_or(own.mean / base.mean, |ratio| ratio.value);
        let goal = row.goal.and_then(|wanted| Goal::new(wanted, ratio, row.better));
        Some(RowComparison {
            row: row.name.clone(),
            goal,
            baseline: baseline.clone(),
            noise_floor: row.repeats.is_some(),
            comparison,
        })
    };
    rows.iter().filter_map(compare).collect()
}

/// Figures that division by a mean of zero leaves undefined are `null` in JSON and NaN here.
pub(crate) mod undefined {
    use serde::{Deserialize, Deserializer};

    /// Reads a number or `null`.
    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
        Ok(Option::deserialize(deserializer)?.unwrap_or(f64::NAN))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_bound_is_kept_by_what_is_no_worse_and_by_nothing_without_values() {
        let row = |better: &str, bound: serde_json::Value, mean: Option<f64>| -> RowResult {
            let summary = mean.map(|mean| {
                json!({ "n": 1, "min": mean, "max": mean, "median": mean, "mean": mean, "stddev": 0.0 })
            });
            let row = json!({
                "name": "a=b", "labels": { "a": "b" }, "group": "", "unit": "µs", "better": better, "baseline": null,
                "bound": bound, "repeats": null, "values": [], "extra": {}, "counts": {}, "summary": summary,
                "errors": [], "missing": null, "published": [],
            });
            serde_json::from_value(row).unwrap()
        };
        for (better, mean, kept) in
            [("lower", 10.0, true), ("lower", 10.5, false), ("higher", 10.0, true), ("higher", 9.5, false)]
        {
            assert_eq!(row(better, json!(10.0), Some(mean)).within_bound(), Some(kept), "{better} {mean}");
        }
        assert_eq!(row("lower", json!(10.0), None).within_bound(), None);
        assert_eq!(row("lower", json!(null), Some(1.0)).within_bound(), None);
    }
}
