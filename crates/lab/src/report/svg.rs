//! Plots as inline SVG: box plots of a group's rows, and curves over a numeric label.
//!
//! Colours and fonts come from the page's style by class, so that one drawing serves light and dark.
//! Drawings are narrow (a phone's width) and grow with the page. Each has a title and a description for
//! those who do not see it; the tables on the page hold the same figures.

use maud::{Markup, html};

use super::words;
use crate::results::RowResult;
use crate::stats::summary::quartiles;

/// Width of all drawings in user units, about a phone's pixels.
const WIDTH: f64 = 420.0;
/// Left and right margins of a box plot.
const MARGIN: f64 = 12.0;
/// Height of one row of a box plot: the name above, the box below.
const ROW: f64 = 34.0;
/// Height of an axis with its numbers and title.
const AXIS: f64 = 38.0;
/// Height of the field of a curve plot.
const FIELD: f64 = 210.0;
/// Room for the numbers left of it.
const LEFT: f64 = 46.0;
/// Values that span more than this factor are drawn on a logarithmic axis.
const LOG: f64 = 8.0;
/// Fewer values than this have no quartiles worth a box: they are drawn as they are.
const MIN_BOX: usize = 5;
/// Different values of a numeric label from which on curves are drawn over it.
const MIN_POINTS: usize = 3;
/// Series a plot has colours for; what comes after has them again, dashed.
const COLOURS: usize = 6;

/// A position or a length, to a tenth of a unit. (Elements of a drawing are closed by `{}`: they are no void elements of HTML.)
fn px(value: f64) -> String {
    format!("{value:.1}")
}

/// An axis: values to positions.
struct Scale {
    low: f64,
    high: f64,
    log: bool,
    from: f64,
    to: f64,
}

impl Scale {
    /// Like [`Scale::over`], from zero unless that would need a logarithm: on a curve the height is read as
    /// the amount.
    fn from_zero(values: impl Iterator<Item = f64> + Clone, from: f64, to: f64) -> Self {
        let mut scale = Self::over(values, from, to);
        if !scale.log && scale.high > 0.0 {
            scale.low = scale.low.min(0.0);
        }
        scale
    }

    /// Over all `values`, a little wider, at positions `from` to `to`.
    fn over(values: impl Iterator<Item = f64> + Clone, from: f64, to: f64) -> Self {
        let low = values.clone().fold(f64::INFINITY, f64::min);
        let high = values.fold(f64::NEG_INFINITY, f64::max);
        let log = low > 0.0 && high / low > LOG;
        let (low, high) = if log {
            (low / 1.15, high * 1.15)
        } else {
            let room = ((high - low) * 0.06).max(high.abs() * 1e-3).max(f64::MIN_POSITIVE);
            // What is never negative gets no negative stretch; a low end close to zero might as well be zero.
            let below = low - room;
            (if high > low && low >= 0.0 && below < high * 0.2 { 0.0 } else { below }, high + room)
        };
        Self { low, high, log, from, to }
    }

    fn at(&self, value: f64) -> f64 {
        let part = if self.log {
            (value / self.low).ln() / (self.high / self.low).ln()
        } else {
            (value - self.low) / (self.high - self.low)
        };
        self.from + part * (self.to - self.from)
    }

    /// Round values on the axis: three to eight or so.
    fn ticks(&self) -> Vec<f64> {
        if self.log {
            let decades = (self.low.log10().floor() as i32)..=(self.high.log10().ceil() as i32);
            // Over many decades there is only room for their beginnings.
            let steps: &[f64] = if self.high / self.low > 1000.0 { &[1.0] } else { &[1.0, 2.0, 5.0] };
            let all = decades.flat_map(|decade| steps.iter().map(move |step| step * 10f64.powi(decade)));
            return all.filter(|tick| (self.low..=self.high).contains(tick)).collect();
        }
        let rough = (self.high - self.low) / 8.0;
        let power = 10f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].map(|factor| factor * power);
        let step = step.into_iter().find(|step| *step >= rough).unwrap_or(rough);
        let first = (self.low / step).ceil() as i64;
        let last = (self.high / step).floor() as i64;
        (first..=last).map(|at| at as f64 * step).collect()
    }
}

/// A drawing with its title and description.
fn drawing(id: &str, height: f64, title: &str, description: &str, content: &Markup) -> Markup {
    html! {
        svg viewBox=(format!("0 0 {WIDTH} {height:.0}")) role="img" aria-labelledby={ (id) "-t " (id) "-d" } {
            title id={ (id) "-t" } { (title) }
            desc id={ (id) "-d" } { (description) }
            (content)
        }
    }
}

fn line(class: &str, from: [f64; 2], to: [f64; 2]) -> Markup {
    let class = (!class.is_empty()).then_some(class);
    html! { line class=[class] x1=(px(from[0])) y1=(px(from[1])) x2=(px(to[0])) y2=(px(to[1])) {} }
}

/// Text that ends at, or is centred on, its position, or begins there.
fn text(class: &str, anchor: Option<&str>, at: [f64; 2], content: &str) -> Markup {
    let class = (!class.is_empty()).then_some(class);
    html! { text class=[class] text-anchor=[anchor] x=(px(at[0])) y=(px(at[1])) { (content) } }
}

/// The words that a reader must know about an axis before comparing lengths on it.
fn kind(scale: &Scale) -> &'static str {
    match (scale.log, scale.low > 0.0) {
        (true, _) => ", logarithmic",
        (false, true) => ", not from zero",
        (false, false) => "",
    }
}

/// A horizontal axis below `y` with grid lines up to `top`.
fn axis(scale: &Scale, top: f64, y: f64, title: &str) -> Markup {
    html! {
        @for tick in scale.ticks() {
            @let x = scale.at(tick);
            (line("grid", [x, top], [x, y]))
            (text("num", Some("middle"), [x, y + 13.0], &words::value(tick)))
        }
        (text("axis", Some("middle"), [WIDTH / 2.0, y + 30.0], &format!("{title}{}", kind(scale))))
    }
}

/// Box plots of the rows that have values: whiskers from the least to the largest value, a box between the
/// quartiles when there are enough values, a line at the median, a dot per value. `None` when no row has
/// values.
pub fn boxes(id: &str, title: &str, rows: &[&RowResult]) -> Option<Markup> {
    let drawn: Vec<&RowResult> = rows.iter().copied().filter(|row| row.summary.is_some()).collect();
    let first = drawn.first()?;
    let values = drawn.iter().flat_map(|row| row.values.iter().copied());
    let scale = Scale::over(values, MARGIN, WIDTH - MARGIN);
    let height = ROW * drawn.len() as f64 + AXIS;
    let unit = format!("{}, {}", first.unit, words::better(first.better));
    let named: Vec<&RowResult> = rows.iter().copied().filter(|row| row.repeats.is_none()).collect();
    let class = |row: &RowResult| match (&row.repeats, &row.baseline) {
        (Some(_), _) => "again",
        (None, Some(_)) => "row",
        (None, None) => "base",
    };
    let content = html! {
        (axis(&scale, 2.0, height - AXIS, &unit))
        @for (at, row) in drawn.iter().enumerate() {
            (draw_box(&scale, ROW * at as f64, class(row), &words::short(row, &named), row))
        }
    };
    Some(drawing(
        id,
        height,
        &format!("{title}: all values"),
        "One line per row, with a dot for each value and a bar at the median. Rows of five values or more \
         have a box between the quartiles. The table below has the figures.",
        &content,
    ))
}

fn draw_box(scale: &Scale, top: f64, class: &str, name: &str, row: &RowResult) -> Markup {
    let (Some(summary), Some(quartiles)) = (row.summary, quartiles(&row.values)) else { return html! {} };
    let middle = top + 22.0;
    let [low, high] = [summary.min, summary.max].map(|value| scale.at(value));
    let [q1, q2, q3] = quartiles.map(|value| scale.at(value));
    html! {
        g class=(class) {
            (text("", None, [MARGIN, top + 11.0], name))
            (line("", [low, middle], [high, middle]))
            @for x in [low, high] {
                (line("", [x, middle - 4.0], [x, middle + 4.0]))
            }
            @if row.values.len() >= MIN_BOX {
                // A box that is too thin to see is still a box.
                rect x=(px(q1)) y=(px(middle - 6.0)) width=(px((q3 - q1).max(1.0))) height="12" {}
            }
            @for value in &row.values {
                circle cx=(px(scale.at(*value))) cy=(px(middle)) r="2.2" {}
            }
            (line("median", [q2, middle - 6.0], [q2, middle + 6.0]))
        }
    }
}

/// One curve: where its rows agree, and a point per row.
struct Series<'a> {
    name: String,
    points: Vec<(f64, &'a RowResult)>,
}

/// Curves of the medians over every numeric label of which the group has at least three values; none for
/// labels that only tell other things.
pub fn curves(id: &str, title: &str, rows: &[&RowResult]) -> Vec<Markup> {
    let drawn: Vec<&RowResult> =
        rows.iter().copied().filter(|row| row.summary.is_some() && row.repeats.is_none()).collect();
    let Some(first) = drawn.first() else { return Vec::new() };
    let keys: Vec<&str> = first.labels.iter().map(|(key, _)| key).collect();
    let numeric = keys.into_iter().filter(|key| {
        let mut values: Vec<f64> = drawn.iter().filter_map(|row| number(row.labels.get(key)?)).collect();
        let complete = values.len() == drawn.len();
        values.sort_by(f64::total_cmp);
        values.dedup();
        complete && values.len() >= MIN_POINTS
    });
    numeric.map(|key| curve(&format!("{id}-{key}"), title, key, &drawn)).collect()
}

/// The number a label is, with the usual suffixes of sizes: `64`, `64K`, `64KiB`.
fn number(text: &str) -> Option<f64> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let factor = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" | "b" => 1.0,
        "k" | "kib" => 1024.0,
        "m" | "mib" => 1024.0 * 1024.0,
        _ => return None,
    };
    digits.trim().parse::<f64>().ok().filter(|value| value.is_finite()).map(|value| value * factor)
}

fn curve(id: &str, title: &str, key: &str, rows: &[&RowResult]) -> Markup {
    let series = series(key, rows);
    let legend = 18.0 * series.len() as f64 + 24.0;
    let height = legend + FIELD + AXIS;
    let bottom = legend + FIELD;
    let points = || series.iter().flat_map(|series| &series.points);
    let xs = Scale::over(points().map(|(x, _)| *x), LEFT + 8.0, WIDTH - MARGIN - 6.0);
    let ends = points().filter_map(|(_, row)| row.summary).flat_map(|s| [s.min, s.max]);
    let ys = Scale::from_zero(ends, bottom, legend);
    let unit =
        rows.first().map_or_else(String::new, |row| format!("{}, {}", row.unit, words::better(row.better)));
    let mut values: Vec<f64> = points().map(|(x, _)| *x).collect();
    values.sort_by(f64::total_cmp);
    values.dedup();
    let logarithmic = if xs.log { ", logarithmic" } else { "" };
    let content = html! {
        @for tick in ys.ticks() {
            @let y = ys.at(tick);
            (line("grid", [LEFT, y], [WIDTH - MARGIN, y]))
            (text("num", Some("end"), [LEFT - 4.0, y + 3.5], &words::value(tick)))
        }
        @for value in values {
            (text("num", Some("middle"), [xs.at(value), bottom + 14.0], &words::value(value)))
        }
        (text("axis", None, [4.0, legend - 8.0], &format!("{unit}{}", kind(&ys))))
        (text("axis", Some("middle"), [WIDTH / 2.0, bottom + 30.0], &format!("{key}{logarithmic}")))
        @for (at, series) in series.iter().enumerate() {
            (draw_series((&xs, &ys), at, series))
        }
    };
    drawing(
        id,
        height,
        &format!("{title}: median over {key}"),
        &format!(
            "Medians in {unit} over {key}, with a bar from the least to the largest value. The table below has the figures."
        ),
        &content,
    )
}

fn series<'a>(key: &str, rows: &[&'a RowResult]) -> Vec<Series<'a>> {
    let mut all: Vec<(String, Series<'a>)> = Vec::new();
    for row in rows {
        let Some(x) = row.labels.get(key).and_then(number) else { continue };
        let rest = row.labels.without(key);
        let name = rest.to_string();
        match all.iter_mut().find(|(have, _)| *have == name) {
            Some((_, series)) => series.points.push((x, row)),
            None => {
                let differs = |(k, v): &(&str, &str)| rows.iter().any(|other| other.labels.get(k) != Some(v));
                let own: Vec<String> = rest.iter().filter(differs).map(|(k, v)| format!("{k}={v}")).collect();
                let shown = if own.is_empty() { "median".into() } else { own.join(" ") };
                all.push((name, Series { name: shown, points: vec![(x, row)] }));
            }
        }
    }
    for (_, series) in &mut all {
        series.points.sort_by(|a, b| a.0.total_cmp(&b.0));
    }
    all.into_iter().map(|(_, series)| series).collect()
}

fn draw_series((xs, ys): (&Scale, &Scale), at: usize, series: &Series<'_>) -> Markup {
    let y = 18.0 * at as f64 + 10.0;
    let class = at % COLOURS;
    let dashed = if at < COLOURS { "" } else { " dashed" };
    let summaries = series.points.iter().filter_map(|(x, row)| Some((xs.at(*x), row.summary?)));
    let medians: Vec<String> =
        summaries.clone().map(|(x, s)| format!("{x:.1},{:.1}", ys.at(s.median))).collect();
    html! {
        g class={ "s" (class) (dashed) } {
            (line("", [LEFT, y], [LEFT + 28.0, y]))
            (marker(class, LEFT + 14.0, y))
            (text("", None, [LEFT + 34.0, y + 4.0], &series.name))
            polyline points=(medians.join(" ")) {}
            @for (x, s) in summaries {
                (line("range", [x, ys.at(s.min)], [x, ys.at(s.max)]))
                (marker(class, x, ys.at(s.median)))
            }
        }
    }
}

/// A mark of a shape of its own, for those who cannot tell the colours.
fn marker(class: usize, x: f64, y: f64) -> Markup {
    match class % 3 {
        0 => html! { circle cx=(px(x)) cy=(px(y)) r="3.6" {} },
        1 => html! { rect x=(px(x - 3.5)) y=(px(y - 3.5)) width="7" height="7" {} },
        _ => {
            let corners = [(x, y - 4.5), (x + 4.5, y + 3.5), (x - 4.5, y + 3.5)];
            let corners = corners.map(|(x, y)| format!("{x:.1},{y:.1}"));
            html! { polygon points=(corners.join(" ")) {} }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_have_round_numbers_inside() {
        let linear = Scale::over([21.3, 30.2].into_iter(), 0.0, 100.0);
        assert_eq!(linear.ticks(), [22.0, 24.0, 26.0, 28.0, 30.0]);
        let log = Scale::over([3.0, 400.0].into_iter(), 0.0, 100.0);
        assert_eq!(log.ticks(), [5.0, 10.0, 20.0, 50.0, 100.0, 200.0]);
        // One value, or none that differ, still make an axis.
        for value in [0.0, 5.0, -3.0, 1e12] {
            let scale = Scale::over([value, value].into_iter(), 0.0, 100.0);
            assert!((scale.at(value) - 50.0).abs() < 1e-3, "{value}");
            assert!(scale.ticks().len() < 20);
        }
    }

    #[test]
    fn numbers_of_labels_are_read_with_their_suffixes() {
        assert_eq!(number("256"), Some(256.0));
        assert_eq!((number("64K"), number("64 KiB")), (Some(65536.0), Some(65536.0)));
        assert_eq!((number("on"), number("12 apples"), number("")), (None, None, None));
    }
}
