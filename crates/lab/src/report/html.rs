//! Results as one page: everything is in the file, nothing is fetched, no script runs.

use maud::{DOCTYPE, Markup, PreEscaped, html};

use super::svg::{boxes, curves};
use super::{distance, words};
use crate::results::{Results, RowResult};
use crate::stats::ministat::{self, Set};
use crate::stats::{Comparison, Summary, Verdict};
use crate::versus::Versus;

const STYLE: &str = include_str!("style.css");

/// The page of one experiment.
pub fn page(results: &Results) -> String {
    let groups = results.groups();
    let body = html! {
        h1 { "ringferry lab " (results.experiment) }
        p { (results.about) }
        p.soft {
            "Measured " (results.started) " on "
            (results.machine.cpu.as_deref().unwrap_or("an unknown processor")) "; "
            (results.settings.runs) " rounds of blocks after a warm-up, each row twice in a block, runs of " (results.settings.seconds) " s, " (format!("{:.0}", results.elapsed_seconds)) " s in all."
        }
        @if !results.complete {
            p.warn { "Stopped before the last round: these are partial results." }
        }
        @if results.machine.build == "debug" {
            p.warn { "Measured with a debug build: the figures mean little." }
        }
        @for warning in &results.warnings {
            p.warn { (warning) }
        }
        (glance(results))
        @if groups.len() > 1 {
            nav aria-label="Groups" {
                ul {
                    @for (at, group) in groups.iter().enumerate() {
                        li { a href={ "#g" (at) } { (title(results, group)) } }
                    }
                }
            }
        }
        @for (at, group) in groups.iter().enumerate() {
            (section(results, group, &format!("g{at}")))
        }
        (missing(results))
        (errors(results))
        (published(results))
        (how(results))
    };
    document(&format!("ringferry lab {}", results.experiment), &body)
}

/// The page of a comparison of two results.
pub fn versus_page(versus: &Versus, old: &Results, new: &Results) -> String {
    let verdicts = versus.rows.iter().map(|row| row.comparison.verdict);
    let compared = |group: &&str| versus.rows.iter().any(|row| row.group == *group);
    let body = html! {
        h1 { "ringferry lab " (versus.experiment) ": new against old" }
        p { "New: measured " (versus.started[1]) ". Old: measured " (versus.started[0]) "." }
        @for warning in &versus.warnings {
            p.warn { (warning) }
        }
        p { (tally(verdicts, "the old results")) }
        @for (at, group) in new.groups().into_iter().filter(compared).enumerate() {
            (versus_section(versus, group, &format!("v{at}"), old, new))
        }
        @for (what, names) in [("old", &versus.only_old), ("new", &versus.only_new)] {
            @for name in names {
                p.soft { "Only in the " (what) " results: " (name) }
            }
        }
    };
    document(&format!("ringferry lab {}: new against old", versus.experiment), &body)
}

/// A group of a comparison: the table, and what lies behind each of its rows to unfold.
fn versus_section(versus: &Versus, group: &str, id: &str, old: &Results, new: &Results) -> Markup {
    let rows: Vec<_> = versus.rows.iter().filter(|row| row.group == group).collect();
    let named: Vec<&RowResult> = rows.iter().filter_map(|row| new.row(&row.name)).collect();
    let name = title(new, group);
    let short = |of: &str| new.row(of).map_or_else(|| of.to_owned(), |row| words::short(row, &named));
    let header =
        ["row", "old mean", "new mean", "difference", "ratio, interval", "verdict", "old N", "new N"];
    let cells = rows.iter().map(|row| {
        html! {
            (th(&short(&row.name))) (td(&words::value(row.old.mean))) (td(&words::value(row.new.mean)))
            (compared(Some(&row.comparison), false))
            (td(&row.old.n.to_string())) (td(&row.new.n.to_string()))
        }
    });
    let caption = rows
        .first()
        .map_or_else(String::new, |row| format!("{name}: {}, {}", row.unit, words::better(row.better)));
    let drawings = rows.iter().enumerate().filter_map(|(at, row)| {
        let side = |results: &Results, name: &str| -> Option<RowResult> {
            let found = results.row(&row.name)?;
            let labels = crate::labels::Labels::new().with("result", name);
            let baseline = (name == "new").then(|| "old".to_owned());
            Some(RowResult { labels, repeats: None, baseline, ..found.clone() })
        };
        let (before, now) = (side(old, "old")?, side(new, "new")?);
        Some((short(&row.name), boxes(&format!("{id}-{at}"), &row.name, &[&before, &now])?))
    });
    html! {
        section {
            h2 { (name) }
            (table(&caption, "", &header, cells))
            details {
                summary { "All values, old and new" }
                div.plots {
                    @for (name, drawing) in drawings {
                        figure { figcaption { (name) } (drawing) }
                    }
                }
            }
        }
    }
}

fn document(title: &str, body: &Markup) -> String {
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                title { (title) }
                style { (PreEscaped(STYLE)) }
            }
            body { main { (body) } }
        }
    };
    page.into_string()
}

fn title<'a>(results: &'a Results, group: &'a str) -> &'a str {
    if group.is_empty() { &results.experiment } else { group }
}

/// The outcome in a few lines.
fn glance(results: &Results) -> Markup {
    let compared = results.comparisons.iter().filter(|comparison| !comparison.noise_floor);
    let verdicts: Vec<Verdict> = compared.map(|comparison| comparison.comparison.verdict).collect();
    let missing = results.all_missing().len();
    let failed = results.rows.iter().filter(|row| !row.errors.is_empty()).count();
    html! {
        ul {
            @if !verdicts.is_empty() {
                li { (tally(verdicts.into_iter(), "their baselines")) }
            }
            @for sentence in distance::sentences(results) {
                li { (sentence) }
            }
            @for line in words::noise(results).into_iter().chain(words::chance(results)) {
                li { (line) }
            }
            @if missing > 0 {
                li { a href="#missing" { (missing) " missing" } " on this machine." }
            }
            @if failed > 0 {
                li { a href="#errors" { "Runs failed" } " in " (words::rows(failed)) "." }
            }
        }
    }
}

fn tally(verdicts: impl Iterator<Item = Verdict> + Clone, with: &str) -> String {
    let count = |wanted| verdicts.clone().filter(|verdict| *verdict == wanted).count();
    format!(
        "{} compared with {with}: {} faster, {} slower, {} that differ by distance, {} without a proven difference.",
        words::rows(verdicts.clone().count()),
        count(Verdict::Faster),
        count(Verdict::Slower),
        count(Verdict::DiffersByDistance),
        count(Verdict::NoDifferenceProven) + count(Verdict::TooFewRuns)
    )
}

fn section(results: &Results, group: &str, id: &str) -> Markup {
    let rows: Vec<&RowResult> = results.rows.iter().filter(|row| row.group == group).collect();
    let Some(first) = rows.first() else { return html! {} };
    let name = title(results, group);
    let drawings = curves(&format!("{id}-c"), name, &rows).into_iter();
    html! {
        section id=(id) {
            h2 { (name) }
            div.plots {
                @for drawing in drawings.chain(boxes(&format!("{id}-b"), name, &rows)) {
                    figure { (drawing) }
                }
            }
            (values(results, name, first, &rows))
            (by_distance(results, &rows))
            (details(results, &rows))
        }
    }
}

fn th(text: &str) -> Markup {
    html! { th scope="row" { (text) } }
}

fn td(text: &str) -> Markup {
    html! { td { (text) } }
}

/// Three cells: difference, ratio, verdict.
fn compared(comparison: Option<&Comparison>, noise_floor: bool) -> Markup {
    let Some(comparison) = comparison else { return html! { td {} td {} td {} } };
    let (class, sign, remark) = match (comparison.verdict, noise_floor) {
        (Verdict::Faster | Verdict::Slower, true) => ("", "", ", by chance or drift"),
        (Verdict::Faster, false) => ("faster", "▲ ", ""),
        (Verdict::Slower, false) => ("slower", "▼ ", ""),
        _ => ("", "", ""),
    };
    html! {
        (interval(&words::difference(comparison)))
        (interval(&words::ratio(comparison)))
        td class={ "verdict " (class) } { (sign) (comparison.verdict) (remark) }
    }
}

/// A figure with its interval below it.
fn interval(text: &str) -> Markup {
    match text.find(" ±").or_else(|| text.find(" [")) {
        Some(at) => html! { td { (text[..at]) br; small { (text[at + 1..]) } } },
        None => td(text),
    }
}

/// A table in a box that scrolls by itself on narrow screens.
fn table(caption: &str, class: &str, header: &[&str], rows: impl Iterator<Item = Markup>) -> Markup {
    html! {
        div.scroll tabindex="0" role="region" aria-label=(caption) {
            table class=(class) {
                caption { (caption) }
                thead { tr { @for name in header { th scope="col" { (name) } } } }
                tbody { @for row in rows { tr { (row) } } }
            }
        }
    }
}

fn values(results: &Results, name: &str, first: &RowResult, rows: &[&RowResult]) -> Markup {
    let named: Vec<&RowResult> = rows.iter().copied().filter(|row| row.repeats.is_none()).collect();
    let mut counts: Vec<&str> = rows.iter().flat_map(|row| row.counts.keys().map(String::as_str)).collect();
    counts.sort_unstable();
    counts.dedup();
    let with_published = rows.iter().any(|row| !row.published.is_empty());
    let with_verdict = rows.iter().any(|row| results.comparison(&row.name).is_some());
    let with_goal = rows.iter().any(|row| row.goal.is_some());
    // What the reader came for stands first: the rest may be beyond the edge of a small screen.
    let mut header = vec!["row", "median", "mean"];
    if with_verdict {
        header.extend(["difference", "ratio, interval", "verdict"]);
    }
    header.extend(with_goal.then_some("goal"));
    let with_bound = rows.iter().any(|row| row.bound.is_some());
    header.extend(with_bound.then_some("bound"));
    if with_published {
        header.push("published");
    }
    header.extend(["N", "min", "max", "std. dev."]);
    header.extend(&counts);
    let cells = rows.iter().map(|row| {
        let found = results.comparison(&row.name);
        let goal = found.and_then(|found| found.goal.as_ref()).map_or_else(String::new, words::goal);
        let [means, spread] = summary(row);
        html! {
            th.again-row[row.repeats.is_some()] scope="row" { (words::short(row, &named)) }
            (means)
            @if with_verdict {
                (compared(found.map(|found| &found.comparison), found.is_some_and(|found| found.noise_floor)))
            }
            @if with_goal {
                (td(&goal))
            }
            @if with_bound {
                (td(&words::bound(results, row)))
            }
            @if with_published {
                td.published { (row.published.iter().map(words::published).collect::<Vec<_>>().join(", ")) }
            }
            (spread)
            @for name in &counts {
                td { @if let Some(count) = row.counts.get(*name) { (words::value(*count)) } }
            }
        }
    });
    let caption = format!("{name}: {}, {}", first.unit, words::better(first.better));
    table(&caption, "", &header, cells)
}

/// What the rows did at each distance of the processors, where that says more than the table above.
fn by_distance(results: &Results, rows: &[&RowResult]) -> Markup {
    let named: Vec<&RowResult> = rows.iter().copied().filter(|row| row.repeats.is_none()).collect();
    let (header, cells) = distance::cells(results, rows, &named);
    let header: Vec<&str> = header.iter().map(String::as_str).collect();
    let cells = cells.iter().map(|row| {
        html! { (th(&row[0])) @for cell in &row[1..] { (interval(cell)) } }
    });
    html! {
        @if !header.is_empty() {
            (table("By distance of the processors", "", &header, cells))
        }
    }
}

/// The cells of median and mean, and those of N, min, max and standard deviation.
fn summary(row: &RowResult) -> [Markup; 2] {
    let Some(Summary { n, min, max, median, mean, stddev }) = row.summary else {
        let why = match (&row.missing, row.errors.is_empty()) {
            (Some(_), _) => html! { a href="#missing" { "missing" } },
            (None, false) => html! { a href="#errors" { "failed" } },
            (None, true) => html! { "no values" },
        };
        return [html! { td colspan="2" { (why) } }, html! { td {} td {} td {} td {} }];
    };
    let cells = |values: &[f64]| html! { @for value in values { (td(&words::value(*value))) } };
    [cells(&[median, mean]), html! { td { (n) } (cells(&[min, max, stddev])) }]
}

/// The long part: ministat's output and all values.
fn details(results: &Results, rows: &[&RowResult]) -> Markup {
    let tests = rows.iter().filter_map(|row| {
        let found = results.comparison(&row.name)?;
        let sets =
            [results.row(&found.baseline)?, *row].map(|side| Set { name: &side.name, values: &side.values });
        let text = ministat::report(&sets, results.settings.confidence, true)?;
        let welch = words::welch(&found.comparison);
        Some(format!("{text}\t(Welch: {welch})\n{}\n\n", found.comparison.verdict))
    });
    let tests: String = tests.collect();
    let list = |values: &[f64]| values.iter().map(|v| words::value(*v)).collect::<Vec<_>>().join(" ");
    let raw = rows.iter().filter(|row| !row.values.is_empty()).flat_map(|row| {
        let line = move |name: &str, values: &[f64]| html! { (th(name)) (td(&list(values))) };
        let extra =
            row.extra.iter().map(move |(name, values)| line(&format!("{}: {name}", row.name), values));
        std::iter::once(line(&row.name, &row.values)).chain(extra)
    });
    html! {
        @if !tests.is_empty() {
            details { summary { "Comparisons as ministat prints them" } pre { (tests) } }
        }
        details {
            summary { "All values" }
            (table("Values in the order they were measured", "text", &["row", "values"], raw))
        }
    }
}

fn missing(results: &Results) -> Markup {
    let missing = results.all_missing();
    let rows = missing.iter().map(|missing| {
        let package = missing.package.as_deref().unwrap_or("");
        html! { (th(&missing.name)) (td(&missing.reason)) (td(package)) }
    });
    html! {
        @if !missing.is_empty() {
            section id="missing" {
                h2 { "Missing" }
                (table("Not measured here", "text", &["what", "why", "Debian package"], rows))
            }
        }
    }
}

fn errors(results: &Results) -> Markup {
    let rows = results.rows.iter().flat_map(|row| {
        row.errors.iter().map(|error| {
            let round = if error.round == 0 { "warm-up".to_owned() } else { error.round.to_string() };
            html! { (th(&row.name)) (td(&round)) (td(&error.message)) }
        })
    });
    html! {
        @if results.failed() {
            section id="errors" {
                h2 { "Failed runs" }
                (table("Runs that failed", "text", &["row", "round", "why"], rows))
            }
        }
    }
}

fn published(results: &Results) -> Markup {
    let mut figures: Vec<_> = results.published.iter().collect();
    for figure in results.rows.iter().flat_map(|row| &row.published) {
        if !figures.contains(&figure) {
            figures.push(figure);
        }
    }
    let cells = figures
        .iter()
        .map(|figure| html! { (th(&figure.what)) (td(&words::published(figure))) (td(&figure.source)) });
    html! {
        @if !figures.is_empty() {
            section {
                h2 { "Published figures" }
                (table("Measured by others, on other machines", "text", &["what", "published", "source"], cells))
            }
        }
    }
}

fn how(results: &Results) -> Markup {
    let settings = &results.settings;
    let mut facts: Vec<(String, String)> = vec![
        ("command".into(), words::command(&results.command)),
        ("seed".into(), settings.seed.to_string()),
        ("confidence".into(), format!("{} %", settings.confidence.percent())),
        ("pinned to processors".into(), words::cpus(&settings.cpus)),
    ];
    facts.extend(results.machine.facts().into_iter().map(|(name, value)| (name.into(), value)));
    facts.extend(results.peers.iter().map(|peer| (peer.name.clone(), peer.version.clone())));
    let rows = facts.iter().map(|(name, value)| html! { (th(name)) (td(value)) });
    html! {
        section {
            h2 { "How and where" }
            ul {
                @for note in &results.notes {
                    li { (note) }
                }
                li {
                    "A difference is called proven when the intervals of both Student's and Welch's test exclude zero. The "
                    "ratio is that of the means, its interval by the delta method."
                }
            }
            (table("The session and the machine", "text", &["what", "value"], rows))
        }
    }
}
