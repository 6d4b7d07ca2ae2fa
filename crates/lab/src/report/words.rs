//! How numbers, names and verdicts are worded, on the terminal and on the page alike.

use crate::experiment::{Better, Published};
use crate::results::{BoundVerdict, Goal, Results, RowComparison, RowResult};
use crate::stats::format::general;
use crate::stats::paired::{Effect, Paired, Scale};
use crate::stats::{Comparison, Verdict};

/// Says in a few words whether a goal is met.
pub(crate) fn goal(goal: &Goal) -> String {
    let Goal { wanted, reached, met } = goal;
    format!("{reached:.2} of {wanted}: {}", if *met { "met" } else { "missed" })
}

/// Says in a few words whether a row keeps its bound; nothing for a row without one.
pub(crate) fn bound(results: &Results, row: &RowResult) -> String {
    let worst = row.bound.map(value).unwrap_or_default();
    match results.bound_verdict(row) {
        None => worst,
        Some(BoundVerdict::Kept) => format!("{worst}: kept"),
        Some(BoundVerdict::Exceeded) => format!("{worst}: exceeded"),
        Some(BoundVerdict::ExceededByBaselineToo) => format!("{worst}: exceeded by the baseline, too"),
    }
}

/// Significant digits of a measured value: more than its noise, fewer than would pretend.
const DIGITS: usize = 4;

/// A value for people, without an exponent while it is of a size people read.
pub fn value(value: f64) -> String {
    let size = value.abs();
    // Large values keep all digits in front of the point.
    if (10f64.powi(DIGITS as i32)..1e15).contains(&size) {
        return format!("{value:.0}");
    }
    general(value, DIGITS)
}

/// A ratio and its interval: `0.9761 [0.97, 0.98]`.
pub fn ratio(comparison: &Comparison) -> String {
    comparison
        .ratio
        .map_or_else(String::new, |ratio| format!("{:.4} [{:.4}, {:.4}]", ratio.value, ratio.low, ratio.high))
}

/// An effect and its interval: `0.9761 [0.97, 0.98]`.
pub(crate) fn effect(effect: &Effect) -> String {
    format!("{:.4} [{:.4}, {:.4}]", effect.value, effect.low, effect.high)
}

/// The difference and its interval: of blocks in per cent, `-2.4 % [-2.7, -2.1]`, or in the rows' unit where values are not positive; without blocks
/// in per cent by Student's test, `-2.4 % ± 0.3 %`.
pub fn difference(comparison: &Comparison) -> String {
    if let Some(Paired { scale, effect, .. }) = &comparison.paired {
        let percent = |ratio: f64| (ratio - 1.0) * 100.0;
        let Effect { value: mean, low, high, .. } = *effect;
        return match scale {
            Scale::Ratio => format!("{:+.2} % [{:+.2}, {:+.2}]", percent(mean), percent(low), percent(high)),
            Scale::Difference => format!("{} [{}, {}]", value(mean), value(low), value(high)),
        };
    }
    let student = comparison.student.filter(|student| student.percent.is_finite());
    student.map_or_else(String::new, |student| {
        format!("{:+.2} % ± {:.2} %", student.percent, student.percent_error.abs())
    })
}

/// The difference by Welch's test: `-0.71 ± 0.12 (df 7.3)`.
pub fn welch(comparison: &Comparison) -> String {
    comparison.welch.map_or_else(String::new, |welch| {
        format!("{} ± {} (df {:.1})", value(welch.difference), value(welch.error), welch.df)
    })
}

/// A published figure with its unit.
pub fn published(figure: &Published) -> String {
    format!("{} {}", value(figure.value), figure.unit)
}

/// `1 row`, `2 rows`.
pub fn rows(count: usize) -> String {
    format!("{count} row{}", if count == 1 { "" } else { "s" })
}

/// A command line that a shell takes apart into the same words.
pub fn command(words: &[String]) -> String {
    // No command line has a NUL; a results file that somebody wrote may.
    shlex::try_join(words.iter().map(String::as_str)).unwrap_or_else(|_| words.join(" "))
}

/// Processors that threads were pinned to.
pub fn cpus(cpus: &[usize]) -> String {
    if cpus.is_empty() {
        return "none".into();
    }
    cpus.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")
}

/// Says whether low or high values are good.
pub fn better(better: Better) -> &'static str {
    match better {
        Better::Lower => "lower is better",
        Better::Higher => "higher is better",
    }
}

/// A row's name within its group: the labels that not all rows of the group share.
pub fn short(row: &RowResult, group: &[&RowResult]) -> String {
    let shared = |key: &str, value: &str| group.iter().all(|other| other.labels.get(key) == Some(value));
    let own = row.labels.iter().filter(|(key, value)| !shared(key, value));
    let name = own.map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>().join(" ");
    if name.is_empty() { row.name.clone() } else { name }
}

/// One warning for each baseline that exceeds its own bound: what then exceeds the bound beside it proves nothing.
pub fn overrun_baselines(all: &[RowResult]) -> Vec<String> {
    let compared = |name: &str| {
        all.iter().filter(|row| row.repeats.is_none() && row.baseline.as_deref() == Some(name)).count()
    };
    let warn = |row: &RowResult| {
        let (bound, mean, unit) = (row.bound?, row.summary?.mean, &row.unit);
        let over = row.repeats.is_none() && compared(&row.name) > 0 && row.within_bound() == Some(false);
        over.then(|| {
            format!(
                "The baseline {} is over its bound by itself: its mean is {} {unit}, and {} {unit} is the worst that is good enough. \
                 What exceeds this bound among the {} compared with it was not shown to do so for a reason of its own. \
                 Measure again when nothing else runs on the machine.",
                row.name,
                value(mean),
                value(bound),
                rows(compared(&row.name)),
            )
        })
    };
    all.iter().filter_map(warn).collect()
}

/// A caution that a reader of many comparisons needs.
pub fn chance(results: &Results) -> Option<String> {
    let count = results.comparisons.iter().filter(|comparison| !comparison.noise_floor).count();
    let wrong = count as f64 * (1.0 - results.settings.confidence.percent() / 100.0);
    (wrong >= 0.5).then(|| {
        format!(
            "Of {count} comparisons at {} % confidence, up to about {wrong:.0} come out as proven by chance alone.",
            results.settings.confidence.percent()
        )
    })
}

/// One line on the noise: how far A/A rows were from the rows they repeat.
pub fn noise(results: &Results) -> Option<String> {
    let floor: Vec<&RowComparison> =
        results.comparisons.iter().filter(|comparison| comparison.noise_floor).collect();
    let percents = floor.iter().filter_map(|floor| Some((floor.comparison.ratio?.value - 1.0).abs() * 100.0));
    let largest = percents
        .fold(None, |most: Option<f64>, percent| Some(most.map_or(percent, |most| most.max(percent))))?;
    let proven = floor
        .iter()
        .filter(|floor| {
            !matches!(floor.comparison.verdict, Verdict::NoDifferenceProven | Verdict::TooFewRuns)
        })
        .count();
    let verdict = match proven {
        0 => "none called proven".to_owned(),
        _ => format!("{proven} called proven, which can only be chance or drift"),
    };
    Some(format!(
        "A/A: {} measured twice, the largest difference {largest:.2} %; {verdict}.",
        rows(floor.len())
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_line_can_be_given_to_a_shell_again() {
        let words = ["ringferry", "--filter", "ring=split batch=1 ", "it's", "", "a=b,c", "$HOME\\"]
            .map(String::from);
        assert_eq!(shlex::split(&command(&words)).as_deref(), Some(&words[..]));
        assert!(command(&words).starts_with("ringferry --filter 'ring=split batch=1 ' "));
    }

    #[test]
    fn values_have_as_many_digits_as_are_read() {
        for (number, text) in [
            (75.0, "75"),
            (21.123_456, "21.12"),
            (0.012_345_6, "0.01235"),
            (123_456.7, "123457"),
            (5_451_082_016.0, "5451082016"),
            (0.0, "0"),
        ] {
            assert_eq!(value(number), text);
        }
    }
}
