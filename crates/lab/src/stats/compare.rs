//! Compares two sets of values: Student's test as ministat does it, Welch's test beside
//! it, the ratio of the means, and a verdict in one word.
//!
//! Rows of one session were measured in blocks, and their ratio and verdict are those of [`Paired`]; both tests stand beside them, as ministat prints them. Two sessions have
//! no blocks in common ([`Comparison::new`]): there a difference counts as *proven* only when the intervals of both tests exclude zero. Student's test assumes that both sets
//! scatter alike, which measurements of two programs rarely do; Welch's does not.

use serde::{Deserialize, Serialize};

use super::distribution::Confidence;
use super::paired::{Pair, Paired, Scale};
use super::summary::Summary;
use crate::experiment::Better;
use crate::results::undefined;

/// Fewer values than this prove nothing: ministat refuses them too.
pub const MIN_RUNS: usize = 3;

/// Student's test for two samples of equal variance, in ministat's terms.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Student {
    /// Degrees of freedom, n1 + n2 - 2.
    pub df: usize,
    /// The critical t from the table.
    pub t: f64,
    pub pooled: f64,
    /// Mean less the baseline's mean.
    pub difference: f64,
    /// Half the width of the difference's confidence interval.
    pub error: f64,
    /// The difference in per cent of the baseline's mean; undefined (NaN, `null` in JSON) when that is 0.
    #[serde(deserialize_with = "undefined::deserialize")]
    #[cfg_attr(test, schemars(with = "Option<f64>"))]
    pub percent: f64,
    /// Half the width of the interval of `percent`: not `error` in per cent, as the baseline is uncertain as
    /// well.
    #[serde(deserialize_with = "undefined::deserialize")]
    #[cfg_attr(test, schemars(with = "Option<f64>"))]
    pub percent_error: f64,
}

impl Student {
    /// Returns true if the interval excludes zero.
    pub fn proven(&self) -> bool {
        self.difference.abs() > self.error
    }
}

/// Welch's test for two samples of any variances.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Welch {
    /// Degrees of freedom by Welch and Satterthwaite; 0 when neither sample varies.
    pub df: f64,
    /// The critical t.
    pub t: f64,
    /// Mean less the baseline's mean.
    pub difference: f64,
    /// Half the width of the difference's confidence interval.
    pub error: f64,
}

impl Welch {
    /// Returns true if the interval excludes zero.
    pub fn proven(&self) -> bool {
        self.difference.abs() > self.error
    }
}

/// The ratio of a row to its baseline with its confidence interval: by blocks ([`Paired`]), else by the delta method on
/// logarithms of the means: ln(m1/m2) has about the variance s1²/(n1 m1²) + s2²/(n2 m2²).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Ratio {
    pub value: f64,
    /// Lower end of the interval.
    pub low: f64,
    pub high: f64,
}

/// The verdict of a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// Better than the baseline.
    Faster,
    /// Worse than the baseline.
    Slower,
    /// That they are the same is not excluded.
    NoDifferenceProven,
    /// Better at one distance of the processors and worse at another, both proven.
    DiffersByDistance,
    /// Too few blocks, or values, to prove anything.
    TooFewRuns,
}

impl std::fmt::Display for Verdict {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Self::Faster => "faster",
            Self::Slower => "slower",
            Self::NoDifferenceProven => "no difference proven",
            Self::DiffersByDistance => "differs by distance",
            Self::TooFewRuns => "too few runs",
        })
    }
}

/// One set of values against its baseline.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Comparison {
    /// The level of all intervals.
    pub confidence: Confidence,
    /// Student's test, when there are enough values.
    pub student: Option<Student>,
    /// Welch's test, when there are enough values.
    pub welch: Option<Welch>,
    /// Block by block, when the two were measured so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub paired: Option<Paired>,
    /// By blocks the mean ratio, when all values are positive. Without blocks the ratio of the means, when both are positive and
    /// there are enough values.
    pub ratio: Option<Ratio>,
    pub verdict: Verdict,
}

impl Comparison {
    /// Compares a row with its baseline by the blocks that both were measured in.
    pub fn of_blocks(
        row: &Summary,
        baseline: &Summary,
        pairs: &[Pair],
        better: Better,
        confidence: Confidence,
    ) -> Self {
        let unpaired = Self::new(row, baseline, better, confidence);
        let paired = Paired::new(pairs, confidence);
        let verdict =
            paired.as_ref().map_or(Verdict::TooFewRuns, |paired| paired.verdict(better, confidence));
        let ratio = paired.as_ref().filter(|paired| paired.scale == Scale::Ratio).map(|paired| Ratio {
            value: paired.effect.value,
            low: paired.effect.low,
            high: paired.effect.high,
        });
        Self { paired, ratio, verdict, ..unpaired }
    }

    /// Compares two sets of values that were not measured in pairs.
    pub fn new(row: &Summary, baseline: &Summary, better: Better, confidence: Confidence) -> Self {
        if row.n < MIN_RUNS || baseline.n < MIN_RUNS {
            return Self {
                confidence,
                student: None,
                welch: None,
                paired: None,
                ratio: None,
                verdict: Verdict::TooFewRuns,
            };
        }
        let student = student(row, baseline, confidence);
        let welch = welch(row, baseline, confidence);
        let improved = match better {
            Better::Lower => student.difference < 0.0,
            Better::Higher => student.difference > 0.0,
        };
        let verdict = match (student.proven() && welch.proven(), improved) {
            (false, _) => Verdict::NoDifferenceProven,
            (true, true) => Verdict::Faster,
            (true, false) => Verdict::Slower,
        };
        let ratio = ratio(row, baseline, confidence);
        Self { confidence, student: Some(student), welch: Some(welch), paired: None, ratio, verdict }
    }
}

fn student(row: &Summary, baseline: &Summary, confidence: Confidence) -> Student {
    let (n1, n2) = (row.n as f64, baseline.n as f64);
    let (v1, v2) = (row.variance(), baseline.variance());
    let df = row.n + baseline.n - 2;
    let t = confidence.table_t(df);
    let pooled = (((n1 - 1.0) * v1 + (n2 - 1.0) * v2) / df as f64).sqrt();
    let difference = row.mean - baseline.mean;
    let scale = row.mean / baseline.mean;
    let spread = ((n1 - 1.0) * v1 + (n2 - 1.0) * v2 * scale * scale) * (n1 + n2) / (n1 * n2 * df as f64);
    Student {
        df,
        t,
        pooled,
        difference,
        error: t * pooled * (1.0 / n1 + 1.0 / n2).sqrt(),
        percent: difference * 100.0 / baseline.mean,
        percent_error: t * spread.sqrt() * 100.0 / baseline.mean,
    }
}

fn welch(row: &Summary, baseline: &Summary, confidence: Confidence) -> Welch {
    let parts = [row, baseline].map(|side| (side.variance() / side.n as f64, side.n));
    let (df, t, error) = satterthwaite(parts, confidence);
    Welch { df, t, difference: row.mean - baseline.mean, error }
}

fn ratio(row: &Summary, baseline: &Summary, confidence: Confidence) -> Option<Ratio> {
    if !(row.mean > 0.0 && baseline.mean > 0.0) {
        return None;
    }
    let parts =
        [row, baseline].map(|side| (side.variance() / (side.n as f64 * side.mean * side.mean), side.n));
    let (_, _, error) = satterthwaite(parts, confidence);
    let value = row.mean / baseline.mean;
    Some(Ratio { value, low: value * (-error).exp(), high: value * error.exp() })
}

/// Degrees of freedom, critical t and half width of the interval of a sum of two independent estimates,
/// each given by its variance and the number of values it comes from.
fn satterthwaite(parts: [(f64, usize); 2], confidence: Confidence) -> (f64, f64, f64) {
    let variance = parts[0].0 + parts[1].0;
    if variance == 0.0 {
        // Values without any scatter: nothing is uncertain.
        return (0.0, 0.0, 0.0);
    }
    let squares: f64 = parts.iter().map(|(v, n)| (v / variance).powi(2) / (*n as f64 - 1.0)).sum();
    let df = 1.0 / squares;
    let t = confidence.t(df);
    (df, t, t * variance.sqrt())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn compare(row: &[f64], baseline: &[f64], better: Better) -> Comparison {
        let summary = |values| Summary::of(values).unwrap();
        Comparison::new(&summary(row), &summary(baseline), better, Confidence::C95)
    }

    /// A summary of five values with these moments.
    fn five(mean: f64, stddev: f64) -> Summary {
        Summary { n: 5, min: mean, max: mean, median: mean, mean, stddev }
    }

    #[test]
    fn the_published_figures_of_freebsd_d11476_come_out() {
        // Medians 464 490 -> 477 130 packets per second, five runs each, published as pooled s 813.984,
        // +/- 1187.15, +/- 0.260947 %.
        let (before, after, pooled) = (464_490.0, 477_130.0, 813.984);
        let compare = |row_share: f64| {
            let total = 2.0f64 * pooled * pooled;
            let row = five(after, (total * row_share).sqrt());
            let baseline = five(before, (total * (1.0 - row_share)).sqrt());
            Comparison::new(&row, &baseline, Better::Higher, Confidence::C95).student.unwrap()
        };
        for row_share in [0.0, 0.3, 1.0] {
            let student = compare(row_share);
            assert_eq!((student.df, student.t), (8, 2.306));
            assert!((student.pooled - pooled).abs() < 1e-9);
            assert!((student.error - 1187.15).abs() < 0.01, "{}", student.error);
        }
        // The raw values are not published, so neither is whose scatter it was. If all of it is the
        // row's, the baseline is certain and the error in per cent is the absolute one divided; if
        // all of it is the baseline's, it counts at the row's scale. The published one lies between.
        let (least, most) = (compare(1.0).percent_error, compare(0.0).percent_error);
        assert!((least - 118_715.0 / before).abs() < 1e-5, "{least}");
        assert!((most - 118_715.0 / before * after / before).abs() < 1e-5, "{most}");
        assert!(least < 0.260_947 && 0.260_947 < most);
    }

    #[test]
    fn equal_sets_of_equal_variance_have_equal_tests() {
        let result = compare(&[11.0, 12.0, 13.0], &[1.0, 2.0, 3.0], Better::Higher);
        let (student, welch) = (result.student.unwrap(), result.welch.unwrap());
        assert!((welch.df - 4.0).abs() < 1e-9 && (student.error - welch.error).abs() < 1e-3);
        assert_eq!((student.difference, student.percent), (10.0, 500.0));
        assert_eq!(result.verdict, Verdict::Faster);
    }

    #[test]
    fn welch_is_right_about_a_worked_example() {
        // By hand: v1 = 1, v2 = 100, n = 4 and 4: var/n 0.25 and 25, sum 25.25;
        // df = 25.25² / (0.25²/3 + 25²/3) = 3.05999.
        let row = Summary { n: 4, min: 0.0, max: 0.0, median: 0.0, mean: 20.0, stddev: 1.0 };
        let baseline = Summary { mean: 10.0, stddev: 10.0, ..row };
        let result = Comparison::new(&row, &baseline, Better::Lower, Confidence::C95);
        let welch = result.welch.unwrap();
        assert!((welch.df - 3.059_994).abs() < 1e-4, "{}", welch.df);
        assert!((welch.error - welch.t * 25.25f64.sqrt()).abs() < 1e-12);
        assert!(welch.t < 3.182 && welch.t > 2.776, "between three and four degrees: {}", welch.t);
    }

    #[test]
    fn the_verdict_needs_both_tests() {
        // Student's pooled s is small because the large set hardly scatters; Welch sees that the three
        // values do.
        let many: Vec<f64> = (0..60).map(|i| 100.0 + f64::from(i % 2) * 0.1).collect();
        let result = compare(&[101.0, 104.0, 102.0], &many, Better::Lower);
        assert!(result.student.unwrap().proven() && !result.welch.unwrap().proven());
        assert_eq!(result.verdict, Verdict::NoDifferenceProven);
    }

    #[test]
    fn better_decides_between_faster_and_slower() {
        let (low, high) = ([1.0, 1.1, 1.2], [9.0, 9.1, 9.2]);
        assert_eq!(compare(&low, &high, Better::Lower).verdict, Verdict::Faster);
        assert_eq!(compare(&low, &high, Better::Higher).verdict, Verdict::Slower);
        assert_eq!(compare(&high, &low, Better::Lower).verdict, Verdict::Slower);
        assert_eq!(compare(&high, &low, Better::Higher).verdict, Verdict::Faster);
        assert_eq!(compare(&low, &low, Better::Lower).verdict, Verdict::NoDifferenceProven);
    }

    #[test]
    fn the_ratios_interval_contains_it_and_turns_over_with_it() {
        let (a, b) = ([10.0, 11.0, 12.0, 10.5], [20.0, 21.0, 19.0, 20.5]);
        let ratio = compare(&a, &b, Better::Lower).ratio.unwrap();
        let inverse = compare(&b, &a, Better::Lower).ratio.unwrap();
        assert!(ratio.low < ratio.value && ratio.value < ratio.high && ratio.high < 1.0);
        assert!((ratio.low * inverse.high - 1.0).abs() < 1e-12);
        assert!((ratio.value * inverse.value - 1.0).abs() < 1e-12);
    }

    #[test]
    fn values_that_allow_no_statement_get_none() {
        assert_eq!(compare(&[1.0, 2.0], &[5.0, 6.0, 7.0], Better::Lower).verdict, Verdict::TooFewRuns);
        let none = compare(&[0.0; 3], &[0.0; 3], Better::Lower);
        assert_eq!((none.ratio, none.verdict), (None, Verdict::NoDifferenceProven));
        let exact = compare(&[7.0; 3], &[5.0; 3], Better::Lower);
        assert_eq!((exact.verdict, exact.welch.unwrap().error), (Verdict::Slower, 0.0));
    }
}
