//! The text and the plot that FreeBSD's ministat prints.
//!
//! The layout, the formulas and the table of t are those of ministat, so that people who read its output
//! for a living find here what they expect; the error of the difference in per cent is that of current
//! versions (older ones printed the absolute error divided by the baseline's mean).

use std::fmt::Write;

use super::compare::{Comparison, MIN_RUNS};
use super::distribution::Confidence;
use super::format::{g, general};
use super::summary::Summary;
use crate::experiment::Better;

/// Marks of the data sets. A column where several sets have a point shows the mark whose number is the
/// bits of their numbers put together: `*` for the first and the second.
const MARKS: [char; 8] = [' ', 'x', '+', '*', '%', '#', '@', 'O'];

/// Characters between the plot's borders.
const WIDTH: usize = 74;

/// Most sets in one plot.
pub const MAX_SETS: usize = MARKS.len() - 1;

/// A data set and its name.
#[derive(Clone, Copy, Debug)]
pub struct Set<'a> {
    /// Name of the set, which is printed in the legend.
    pub name: &'a str,
    /// The values in any order.
    pub values: &'a [f64],
}

/// Returns what `ministat FILE...` prints for these sets, the first being the reference. With `plot` false, as
/// with `-n`, names and plot are left out.
///
/// `None` when there are no sets, more than [`MAX_SETS`], or one has fewer than three values: ministat
/// refuses those.
pub fn report(sets: &[Set<'_>], confidence: Confidence, plot: bool) -> Option<String> {
    let summaries: Vec<Summary> = sets.iter().filter_map(|set| Summary::of(set.values)).collect();
    let enough = summaries.len() == sets.len() && summaries.iter().all(|summary| summary.n >= MIN_RUNS);
    if sets.is_empty() || sets.len() > MAX_SETS || !enough {
        return None;
    }
    let mut out = String::new();
    if plot {
        for (mark, set) in MARKS[1..].iter().zip(sets) {
            let _ = writeln!(out, "{mark} {}", set.name);
        }
        let drawn = Plot::new(sets, &summaries).map(Plot::draw);
        out.push_str(drawn.as_deref().unwrap_or("[no plot, span is zero width]\n"));
    }
    out.push_str("    N           Min           Max        Median           Avg        Stddev\n");
    for (at, (mark, summary)) in MARKS[1..].iter().zip(&summaries).enumerate() {
        let columns = [summary.min, summary.max, summary.median, summary.mean, summary.stddev];
        let columns = columns.map(|value| format!("{:>13}", general(value, 8))).join(" ");
        let _ = writeln!(out, "{mark} {:3} {columns}", summary.n);
        if at > 0 {
            out.push_str(&difference(summary, &summaries[0], confidence));
        }
    }
    Some(out)
}

fn difference(summary: &Summary, reference: &Summary, confidence: Confidence) -> String {
    let percent = confidence.percent();
    // The direction does not matter to ministat.
    match Comparison::new(summary, reference, Better::Lower, confidence).student {
        Some(s) if s.proven() => format!(
            "Difference at {percent:.1}% confidence\n\t{} +/- {}\n\t{}% +/- {}%\n\t(Student's t, pooled s = {})\n",
            g(s.difference),
            g(s.error),
            g(s.percent),
            g(s.percent_error),
            g(s.pooled)
        ),
        _ => format!("No difference proven at {percent:.1}% confidence\n"),
    }
}

/// The plot: columns of stacked points and below them one bar from mean less to mean plus standard
/// deviation per set, all on one line.
struct Plot {
    /// Value at the left border and per column.
    scale: (f64, f64),
    /// Rows of columns from the bottom up; the bits of the sets that have a point there.
    points: Vec<[u8; WIDTH]>,
    bars: [char; WIDTH],
}

impl Plot {
    /// `None` when all values are the same.
    fn new(sets: &[Set<'_>], summaries: &[Summary]) -> Option<Self> {
        let ends = |pick: fn(f64, f64) -> f64, of: fn(&Summary) -> f64, start: f64| {
            summaries.iter().map(of).fold(start, pick)
        };
        let low = ends(f64::min, |s| s.min.min(s.mean - s.stddev), f64::INFINITY);
        let high = ends(f64::max, |s| s.max.max(s.mean + s.stddev), f64::NEG_INFINITY);
        if high <= low {
            return None;
        }
        let step = (high - low) / (WIDTH as f64 - 1.0);
        // The ends lie in the middle of the outermost columns.
        let scale = (low - 0.5 * step, step);
        let mut plot = Self { scale, points: Vec::new(), bars: [' '; WIDTH] };
        for (at, (set, summary)) in sets.iter().zip(summaries).enumerate() {
            plot.stack(set.values, at as u8 + 1);
            plot.bar(summary);
        }
        Some(plot)
    }

    fn column(&self, value: f64) -> usize {
        (((value - self.scale.0) / self.scale.1) as usize).min(WIDTH - 1)
    }

    fn stack(&mut self, values: &[f64], bits: u8) {
        let mut heights = [0; WIDTH];
        for value in values.iter().filter(|value| value.is_finite()) {
            let column = self.column(*value);
            let row = heights[column];
            heights[column] += 1;
            if self.points.len() == row {
                self.points.push([0; WIDTH]);
            }
            self.points[row][column] |= bits;
        }
    }

    fn bar(&mut self, summary: &Summary) {
        let left = self.column(summary.mean - summary.stddev);
        let right = self.column(summary.mean + summary.stddev);
        self.bars[left] = '|';
        self.bars[right] = '|';
        for cell in &mut self.bars[left..right] {
            if *cell == ' ' {
                *cell = '_';
            }
        }
        self.bars[self.column(summary.median)] = 'M';
        self.bars[self.column(summary.mean)] = 'A';
    }

    fn draw(self) -> String {
        let border = format!("+{}+\n", "-".repeat(WIDTH));
        let mut out = border.clone();
        for row in self.points.iter().rev() {
            let marks: String = row.iter().map(|bits| MARKS[usize::from(*bits)]).collect();
            let _ = writeln!(out, "|{marks}|");
        }
        let _ = writeln!(out, "|{}|", self.bars.iter().collect::<String>());
        out + &border
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sets<'a>(values: &[&'a [f64]]) -> Vec<Set<'a>> {
        ["before", "after", "third"].iter().zip(values).map(|(name, values)| Set { name, values }).collect()
    }

    // Both outputs were printed by ministat itself (Debian 20150715), but for the error in per cent, which
    // is that of the current formula, computed by hand.
    #[test]
    fn a_proven_difference_is_printed_as_by_ministat() {
        let sets = sets(&[&[10.5, 11.0, 9.75, 10.25, 10.75], &[20.0, 21.5, 19.125, 20.75, 22.0]]);
        let expected = "\
x before
+ after
+--------------------------------------------------------------------------+
|x  xx xx                                                +    +    +   +  +|
| |__A__|                                                  |______AM_____| |
+--------------------------------------------------------------------------+
    N           Min           Max        Median           Avg        Stddev
x   5          9.75            11          10.5         10.45     0.4808846
+   5        19.125            22         20.75        20.675     1.1510864
Difference at 95.0% confidence
\t10.225 +/- 1.28651
\t97.8469% +/- 14.7377%
\t(Student's t, pooled s = 0.882114)
";
        assert_eq!(report(&sets, Confidence::C95, true).unwrap(), expected);
    }

    #[test]
    fn no_proven_difference_is_printed_as_by_ministat() {
        let sets = sets(&[
            &[50.0, 200.0, 150.0, 400.0, 750.0, 400.0, 150.0],
            &[350.0, 40.0, 220.0, 500.0, 220.0, 350.0, 220.0],
        ]);
        let expected = "\
x before
+ after
+--------------------------------------------------------------------------+
|                   +                                                      |
|           x       +            +    x                                    |
|+x         x    x  +            +    x         +                         x|
|  |______|______M__M____A__A___________|___________|                      |
+--------------------------------------------------------------------------+
    N           Min           Max        Median           Avg        Stddev
x   7            50           750           200           300     238.04761
+   7            40           500           220     271.42857     144.96305
No difference proven at 95.0% confidence
";
        assert_eq!(report(&sets, Confidence::C95, true).unwrap(), expected);
    }

    #[test]
    fn values_without_a_span_have_no_plot() {
        let report = report(&sets(&[&[5.0; 3], &[5.0; 3]]), Confidence::C95, true).unwrap();
        assert!(report.contains("[no plot, span is zero width]\n    N "), "{report}");
        assert!(report.ends_with("No difference proven at 95.0% confidence\n"));
    }

    #[test]
    fn what_ministat_refuses_has_no_report() {
        assert_eq!(report(&[], Confidence::C95, true), None);
        assert_eq!(report(&sets(&[&[1.0, 2.0]]), Confidence::C95, true), None);
        let eight = [Set { name: "x", values: &[1.0, 2.0, 3.0] }; 8];
        assert_eq!(report(&eight, Confidence::C95, true), None);
        assert!(report(&eight[1..], Confidence::C95, true).is_some());
    }

    #[test]
    fn numbers_alone_come_without_names_and_plot() {
        let report = report(&sets(&[&[1.0, 2.0, 3.0]]), Confidence::C95, false).unwrap();
        assert_eq!(report.lines().count(), 2);
        assert!(report.starts_with("    N  "));
    }
}
