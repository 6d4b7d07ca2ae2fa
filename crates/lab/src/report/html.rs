//! Results as one page: everything is in the file, nothing is fetched, no script runs.

use std::fmt::Write;

use super::svg::{boxes, curves, escape};
use super::words;
use crate::results::{Results, RowResult};
use crate::stats::ministat::{self, Set};
use crate::stats::{Comparison, Summary, Verdict};
use crate::versus::Versus;

const STYLE: &str = include_str!("style.css");

/// The page of one experiment.
pub fn page(results: &Results) -> String {
    let mut body = format!(
        "<h1>ringferry lab {}</h1>\n<p>{}</p>\n<p class=\"soft\">Measured {} on {}; {} runs of {} s per row after \
         a warm-up, interleaved, {:.0} s in all.</p>\n",
        escape(&results.experiment),
        escape(&results.about),
        escape(&results.started),
        escape(results.machine.cpu.as_deref().unwrap_or("an unknown processor")),
        results.settings.runs,
        results.settings.seconds,
        results.elapsed_seconds
    );
    if !results.complete {
        body.push_str("<p class=\"warn\">Stopped before the last round: these are partial results.</p>\n");
    }
    if results.machine.build == "debug" {
        body.push_str("<p class=\"warn\">Measured with a debug build: the figures mean little.</p>\n");
    }
    body.push_str(&glance(results));
    let groups = results.groups();
    if groups.len() > 1 {
        body.push_str("<nav aria-label=\"Groups\"><ul>\n");
        for (at, group) in groups.iter().enumerate() {
            let _ = writeln!(body, "<li><a href=\"#g{at}\">{}</a></li>", escape(title(results, group)));
        }
        body.push_str("</ul></nav>\n");
    }
    for (at, group) in groups.iter().enumerate() {
        body.push_str(&section(results, group, &format!("g{at}")));
    }
    body.push_str(&missing(results));
    body.push_str(&errors(results));
    body.push_str(&published(results));
    body.push_str(&how(results));
    document(&format!("ringferry lab {}", results.experiment), &body)
}

/// The page of a comparison of two results.
pub fn versus_page(versus: &Versus, old: &Results, new: &Results) -> String {
    let mut body = format!(
        "<h1>ringferry lab {}: new against old</h1>\n<p>New: measured {}. Old: measured {}.</p>\n",
        escape(&versus.experiment),
        escape(&versus.started[1]),
        escape(&versus.started[0])
    );
    for warning in &versus.warnings {
        let _ = writeln!(body, "<p class=\"warn\">{}</p>", escape(warning));
    }
    let verdicts = versus.rows.iter().map(|row| row.comparison.verdict);
    let _ = writeln!(body, "<p>{}</p>", tally(verdicts, "the old results"));
    let compared = |group: &&str| versus.rows.iter().any(|row| row.group == *group);
    for (at, group) in new.groups().into_iter().filter(compared).enumerate() {
        body.push_str(&versus_section(versus, group, &format!("v{at}"), old, new));
    }
    for (what, names) in [("old", &versus.only_old), ("new", &versus.only_new)] {
        for name in names {
            let _ = writeln!(body, "<p class=\"soft\">Only in the {what} results: {}</p>", escape(name));
        }
    }
    document(&format!("ringferry lab {}: new against old", versus.experiment), &body)
}

/// A group of a comparison: the table, and what lies behind each of its rows to unfold.
fn versus_section(versus: &Versus, group: &str, id: &str, old: &Results, new: &Results) -> String {
    let rows: Vec<_> = versus.rows.iter().filter(|row| row.group == group).collect();
    let named: Vec<&RowResult> = rows.iter().filter_map(|row| new.row(&row.name)).collect();
    let name = title(new, group);
    let short = |of: &str| new.row(of).map_or_else(|| of.to_owned(), |row| words::short(row, &named));
    let mut out = format!("<section>\n<h2>{}</h2>\n", escape(name));
    let header =
        ["row", "old mean", "new mean", "difference", "ratio, interval", "verdict", "old N", "new N"];
    let cells = rows.iter().map(|row| {
        let mut cells =
            vec![th(&short(&row.name)), td(&words::value(row.old.mean)), td(&words::value(row.new.mean))];
        cells.extend(compared(Some(&row.comparison), false));
        cells.extend([row.old.n, row.new.n].map(|n| td(&n.to_string())));
        cells.concat()
    });
    let caption = rows
        .first()
        .map_or_else(String::new, |row| format!("{name}: {}, {}", row.unit, words::better(row.better)));
    out.push_str(&table(&caption, "", &header, cells));
    out.push_str("<details><summary>All values, old and new</summary>\n<div class=\"plots\">\n");
    for (at, row) in rows.iter().enumerate() {
        let side = |results: &Results, name: &str| -> Option<RowResult> {
            let found = results.row(&row.name)?;
            let labels = crate::labels::Labels::new().with("result", name);
            let baseline = (name == "new").then(|| "old".to_owned());
            Some(RowResult { labels, repeats: None, baseline, ..found.clone() })
        };
        let (Some(before), Some(now)) = (side(old, "old"), side(new, "new")) else { continue };
        let Some(drawing) = boxes(&format!("{id}-{at}"), &row.name, &[&before, &now]) else { continue };
        let _ = writeln!(
            out,
            "<figure><figcaption>{}</figcaption>\n{drawing}</figure>",
            escape(&short(&row.name))
        );
    }
    out + "</div></details>\n</section>\n"
}

fn document(title: &str, body: &str) -> String {
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n\
         <title>{}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n{body}</main>\n</body>\n</html>\n",
        escape(title)
    )
}

fn title<'a>(results: &'a Results, group: &'a str) -> &'a str {
    if group.is_empty() { &results.experiment } else { group }
}

/// What came out, in a few lines.
fn glance(results: &Results) -> String {
    let mut out = String::from("<ul>\n");
    let compared = results.comparisons.iter().filter(|comparison| !comparison.noise_floor);
    let verdicts: Vec<Verdict> = compared.map(|comparison| comparison.comparison.verdict).collect();
    if !verdicts.is_empty() {
        let _ = writeln!(out, "<li>{}</li>", tally(verdicts.into_iter(), "their baselines"));
    }
    for line in words::noise(results).into_iter().chain(words::chance(results)) {
        let _ = writeln!(out, "<li>{}</li>", escape(&line));
    }
    let missing = results.all_missing().len();
    if missing > 0 {
        let _ = writeln!(out, "<li><a href=\"#missing\">{missing} missing</a> on this machine.</li>");
    }
    let failed = results.rows.iter().filter(|row| !row.errors.is_empty()).count();
    if failed > 0 {
        let _ = writeln!(out, "<li><a href=\"#errors\">Runs failed</a> in {}.</li>", words::rows(failed));
    }
    out + "</ul>\n"
}

fn tally(verdicts: impl Iterator<Item = Verdict> + Clone, with: &str) -> String {
    let count = |wanted| verdicts.clone().filter(|verdict| *verdict == wanted).count();
    format!(
        "{} compared with {with}: {} faster, {} slower, {} without a proven difference.",
        words::rows(verdicts.clone().count()),
        count(Verdict::Faster),
        count(Verdict::Slower),
        count(Verdict::NoDifferenceProven) + count(Verdict::TooFewRuns)
    )
}

fn section(results: &Results, group: &str, id: &str) -> String {
    let rows: Vec<&RowResult> = results.rows.iter().filter(|row| row.group == group).collect();
    let Some(first) = rows.first() else { return String::new() };
    let name = title(results, group);
    let mut out = format!("<section id=\"{id}\">\n<h2>{}</h2>\n<div class=\"plots\">\n", escape(name));
    let mut drawings = curves(&format!("{id}-c"), name, &rows);
    drawings.extend(boxes(&format!("{id}-b"), name, &rows));
    for drawing in drawings {
        let _ = writeln!(out, "<figure>\n{drawing}</figure>");
    }
    out.push_str("</div>\n");
    out.push_str(&values(results, name, first, &rows));
    out.push_str(&details(results, &rows));
    out + "</section>\n"
}

fn th(text: &str) -> String {
    format!("<th scope=\"row\">{}</th>", escape(text))
}

fn td(text: &str) -> String {
    format!("<td>{}</td>", escape(text))
}

/// Three cells: difference, ratio, verdict.
fn compared(comparison: Option<&Comparison>, noise_floor: bool) -> [String; 3] {
    let Some(comparison) = comparison else { return [td(""), td(""), td("")] };
    let (class, sign, remark) = match (comparison.verdict, noise_floor) {
        (Verdict::Faster | Verdict::Slower, true) => ("", "", ", by chance or drift"),
        (Verdict::Faster, false) => ("faster", "▲ ", ""),
        (Verdict::Slower, false) => ("slower", "▼ ", ""),
        _ => ("", "", ""),
    };
    [
        interval(&words::difference(comparison), " ±"),
        interval(&words::ratio(comparison), " ["),
        format!("<td class=\"verdict {class}\">{sign}{}{remark}</td>", comparison.verdict),
    ]
}

/// A figure with its interval, which begins at `mark`, below it.
fn interval(text: &str, mark: &str) -> String {
    match text.find(mark) {
        Some(at) => {
            format!("<td>{}<br/><small>{}</small></td>", escape(&text[..at]), escape(&text[at + 1..]))
        }
        None => td(text),
    }
}

/// A table in a box that scrolls by itself on narrow screens.
fn table(caption: &str, class: &str, header: &[&str], rows: impl Iterator<Item = String>) -> String {
    let mut out = format!(
        "<div class=\"scroll\" tabindex=\"0\" role=\"region\" aria-label=\"{0}\"><table class=\"{class}\">\
         <caption>{0}</caption>\n<thead><tr>",
        escape(caption)
    );
    for name in header {
        let _ = write!(out, "<th scope=\"col\">{}</th>", escape(name));
    }
    out.push_str("</tr></thead>\n<tbody>\n");
    for row in rows {
        let _ = writeln!(out, "<tr>{row}</tr>");
    }
    out + "</tbody></table></div>\n"
}

fn values(results: &Results, name: &str, first: &RowResult, rows: &[&RowResult]) -> String {
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
    if with_published {
        header.push("published");
    }
    header.extend(["N", "min", "max", "std. dev."]);
    header.extend(&counts);
    let cells = rows.iter().map(|row| {
        let mut cells = vec![match row.repeats {
            Some(_) => {
                format!("<th scope=\"row\" class=\"again-row\">{}</th>", escape(&words::short(row, &named)))
            }
            None => th(&words::short(row, &named)),
        }];
        let [means, spread] = summary(row);
        cells.push(means);
        if with_verdict {
            let found = results.comparison(&row.name);
            let noise = found.is_some_and(|found| found.noise_floor);
            cells.extend(compared(found.map(|found| &found.comparison), noise));
        }
        if with_goal {
            let goal = results.comparison(&row.name).and_then(|found| found.goal.as_ref());
            cells.push(td(&goal.map_or_else(String::new, words::goal)));
        }
        if with_published {
            let figures: Vec<String> = row.published.iter().map(words::published).collect();
            cells.push(format!("<td class=\"published\">{}</td>", escape(&figures.join(", "))));
        }
        cells.push(spread);
        cells.extend(
            counts
                .iter()
                .map(|name| td(&row.counts.get(*name).map_or_else(String::new, |c| words::value(*c)))),
        );
        cells.concat()
    });
    let caption = format!("{name}: {}, {}", first.unit, words::better(first.better));
    table(&caption, "", &header, cells)
}

/// The cells of median and mean, and those of N, min, max and standard deviation.
fn summary(row: &RowResult) -> [String; 2] {
    let Some(Summary { n, min, max, median, mean, stddev }) = row.summary else {
        let why = match (&row.missing, row.errors.is_empty()) {
            (Some(_), _) => "<a href=\"#missing\">missing</a>",
            (None, false) => "<a href=\"#errors\">failed</a>",
            (None, true) => "no values",
        };
        return [format!("<td colspan=\"2\">{why}</td>"), td("").repeat(4)];
    };
    let cells = |values: &[f64]| values.iter().map(|value| td(&words::value(*value))).collect::<String>();
    [cells(&[median, mean]), td(&n.to_string()) + &cells(&[min, max, stddev])]
}

/// What is long: ministat's output and all values.
fn details(results: &Results, rows: &[&RowResult]) -> String {
    let mut tests = String::new();
    for row in rows {
        let Some(found) = results.comparison(&row.name) else { continue };
        let Some(baseline) = results.row(&found.baseline) else { continue };
        let sets = [baseline, *row].map(|side| Set { name: &side.name, values: &side.values });
        let Some(text) = ministat::report(&sets, results.settings.confidence, true) else { continue };
        let welch = words::welch(&found.comparison);
        let _ = writeln!(tests, "{text}\t(Welch: {welch})\n{}\n", found.comparison.verdict);
    }
    let mut out = String::new();
    if !tests.is_empty() {
        let _ = writeln!(
            out,
            "<details><summary>Comparisons as ministat prints them</summary><pre>{}</pre></details>",
            escape(&tests)
        );
    }
    let list = |values: &[f64]| values.iter().map(|v| words::value(*v)).collect::<Vec<_>>().join(" ");
    let raw = rows.iter().filter(|row| !row.values.is_empty()).flat_map(|row| {
        let extra =
            row.extra.iter().map(|(name, values)| th(&format!("{}: {name}", row.name)) + &td(&list(values)));
        std::iter::once(th(&row.name) + &td(&list(&row.values))).chain(extra)
    });
    let raw = table("Values in the order they were measured", "text", &["row", "values"], raw);
    let _ = writeln!(out, "<details><summary>All values</summary>\n{raw}</details>");
    out
}

fn missing(results: &Results) -> String {
    let missing = results.all_missing();
    if missing.is_empty() {
        return String::new();
    }
    let rows = missing.iter().map(|missing| {
        let package = missing.package.as_deref().unwrap_or("");
        [th(&missing.name), td(&missing.reason), td(package)].concat()
    });
    let table = table("Not measured here", "text", &["what", "why", "Debian package"], rows);
    format!("<section id=\"missing\">\n<h2>Missing</h2>\n{table}</section>\n")
}

fn errors(results: &Results) -> String {
    if !results.failed() {
        return String::new();
    }
    let rows = results.rows.iter().flat_map(|row| {
        row.errors.iter().map(|error| {
            let round = if error.round == 0 { "warm-up".to_owned() } else { error.round.to_string() };
            [th(&row.name), td(&round), td(&error.message)].concat()
        })
    });
    let table = table("Runs that failed", "text", &["row", "round", "why"], rows);
    format!("<section id=\"errors\">\n<h2>Failed runs</h2>\n{table}</section>\n")
}

fn published(results: &Results) -> String {
    let rows: Vec<_> = results.rows.iter().flat_map(|row| &row.published).collect();
    let mut figures: Vec<_> = results.published.iter().collect();
    for figure in rows {
        if !figures.contains(&figure) {
            figures.push(figure);
        }
    }
    if figures.is_empty() {
        return String::new();
    }
    let cells = figures
        .iter()
        .map(|figure| [th(&figure.what), td(&words::published(figure)), td(&figure.source)].concat());
    let table =
        table("Measured by others, on other machines", "text", &["what", "published", "source"], cells);
    format!("<section>\n<h2>Published figures</h2>\n{table}</section>\n")
}

fn how(results: &Results) -> String {
    let settings = &results.settings;
    let mut facts: Vec<(String, String)> = vec![
        ("command".into(), words::command(&results.command)),
        ("seed".into(), settings.seed.to_string()),
        ("confidence".into(), format!("{} %", settings.confidence.percent())),
        ("pinned to processors".into(), words::cpus(&settings.cpus)),
    ];
    facts.extend(results.machine.facts().into_iter().map(|(name, value)| (name.into(), value)));
    facts.extend(results.peers.iter().map(|peer| (peer.name.clone(), peer.version.clone())));
    let rows = facts.iter().map(|(name, value)| th(name) + &td(value));
    let mut out = String::from("<section>\n<h2>How and where</h2>\n<ul>\n");
    for note in &results.notes {
        let _ = writeln!(out, "<li>{}</li>", escape(note));
    }
    out.push_str(
        "<li>A difference is called proven when the intervals of both Student's and Welch's test exclude \
         zero. The ratio is that of the means, its interval by the delta method.</li>\n</ul>\n",
    );
    out + &table("The session and the machine", "text", &["what", "value"], rows) + "</section>\n"
}
