//! Results as pages of a repository: what is missed first, then published figures beside ours, then all rows.

use std::fmt::Write;

use super::{distance, words};
use crate::experiment::Published;
use crate::results::{BoundVerdict, Results, RowResult};
use crate::stats::Verdict;

/// The page of one experiment.
pub fn page(results: &Results) -> String {
    let mut out = format!("# ringferry lab {}\n\n{}\n\n", results.experiment, results.about);
    out.push_str("## Missed\n\n");
    let missed = missed(results);
    if missed.is_empty() {
        out.push_str("Nothing: every goal is met and every bound kept.\n");
    }
    for line in &missed {
        let _ = writeln!(out, "- {line}");
    }
    out.push_str(&published(results));
    for group in results.groups() {
        out.push_str(&rows(results, group));
    }
    out.push_str(&how(results));
    out
}

/// The page that names all others.
pub fn index(all: &[Results]) -> String {
    let mut out = String::from(
        "# Results\n\nWritten by `ringferry lab all --publish`; [how it measures](../lab.md).\n\n## Missed\n\n",
    );
    for results in all {
        for line in missed(results) {
            let _ = writeln!(out, "- [{0}]({0}.md): {line}", results.experiment);
        }
    }
    if all.iter().all(|results| missed(results).is_empty()) {
        out.push_str("Nothing: every goal is met and every bound kept.\n");
    }
    out.push_str("\n## Experiments\n\n| experiment | measured | rows compared | faster | slower | no difference proven | goals met |\n|---|---|---|---|---|---|---|\n");
    for results in all {
        let compared: Vec<_> = results.comparisons.iter().filter(|found| !found.noise_floor).collect();
        let count = |verdict| compared.iter().filter(|found| found.comparison.verdict == verdict).count();
        let goals: Vec<bool> = compared.iter().filter_map(|found| Some(found.goal?.met)).collect();
        let met = goals.iter().filter(|met| **met).count();
        let _ = writeln!(
            out,
            "| [{0}]({0}.md) | {1} | {2} | {3} | {4} | {5} | {met} of {6} |",
            results.experiment,
            results.started,
            compared.len(),
            count(Verdict::Faster),
            count(Verdict::Slower),
            count(Verdict::NoDifferenceProven),
            goals.len()
        );
    }
    out
}

/// What is not as it is to be, worst kind first: an interruption, goals, bounds, failures, what proves nothing, what could not be measured.
fn missed(results: &Results) -> Vec<String> {
    let mut missed = Vec::new();
    if !results.complete {
        missed.push("interrupted: these are partial results".to_owned());
    }
    for found in &results.comparisons {
        if let Some(goal) = found.goal.filter(|goal| !goal.met) {
            let ratio = words::ratio(&found.comparison);
            missed.push(format!("goal: {}: {} (ratio {ratio})", code(&found.row), words::goal(&goal)));
        }
    }
    for row in &results.rows {
        if matches!(
            results.bound_verdict(row),
            Some(BoundVerdict::Exceeded | BoundVerdict::ExceededByBaselineToo)
        ) {
            let mean = row.summary.map(|summary| words::value(summary.mean)).unwrap_or_default();
            missed.push(format!(
                "bound: {}: {mean} {}, bound {}",
                code(&row.name),
                row.unit,
                words::bound(results, row)
            ));
        }
    }
    for row in &results.rows {
        if let Some(error) = row.errors.last() {
            let count = row.errors.len();
            missed.push(format!("failed {count} times: {}: {}", code(&row.name), flat(&error.message)));
        }
    }
    let unmeasured =
        |row: &&RowResult| row.summary.is_none() && row.missing.is_none() && row.errors.is_empty();
    let unmeasured: Vec<&RowResult> = results.rows.iter().filter(unmeasured).collect();
    if let [first, others @ ..] = &unmeasured[..] {
        missed.push(format!(
            "without values, as the time was over or no block counted: {} and {} others",
            code(&first.name),
            others.len()
        ));
    }
    let few =
        results.comparisons.iter().filter(|found| found.comparison.verdict == Verdict::TooFewRuns).count();
    if few > 0 {
        missed.push(format!("too few blocks to prove anything: {}", words::rows(few)));
    }
    let mut reasons: Vec<(&str, usize, &str)> = Vec::new();
    for missing in results.all_missing() {
        match reasons.iter_mut().find(|(reason, ..)| *reason == missing.reason) {
            Some((_, count, _)) => *count += 1,
            None => reasons.push((&missing.reason, 1, &missing.name)),
        }
    }
    for (reason, count, first) in reasons {
        let others = if count > 1 { format!(" and {} others", count - 1) } else { String::new() };
        missed.push(format!("not measured: {}{others}: {}", code(first), flat(reason)));
    }
    missed
}

/// Published figures row by row, ours beside those that a row of ours stands for.
fn published(results: &Results) -> String {
    let beside =
        results.rows.iter().flat_map(|row| row.published.iter().map(move |figure| (figure, Some(row))));
    let alone = results.published.iter().map(|figure| (figure, None));
    let lines: Vec<String> =
        beside.chain(alone).map(|(figure, row)| published_line(results, figure, row)).collect();
    if lines.is_empty() {
        return String::new();
    }
    format!(
        "\n## Published figures beside ours\n\nOthers measured theirs on their machines; they are here to be compared by eye.\n\n\
         | published | value | source | our row | ours |\n|---|---|---|---|---|\n{}",
        lines.concat()
    )
}

fn published_line(results: &Results, figure: &Published, row: Option<&RowResult>) -> String {
    let ours = row.and_then(|row| {
        // A change is compared with our change.
        if figure.unit == "%" {
            return results.comparison(&row.name).map(|found| words::difference(&found.comparison));
        }
        row.summary.map(|summary| format!("{} {}", words::value(summary.median), row.unit))
    });
    let ours = match (ours, row) {
        (Some(ours), _) if !ours.is_empty() => ours,
        (_, Some(_)) => "not measured".into(),
        (_, None) => "no row of ours is the same".into(),
    };
    format!(
        "| {} | {} | {} | {} | {ours} |\n",
        cell(&figure.what),
        words::published(figure),
        cell(&figure.source),
        row.map(|row| code(&row.name)).unwrap_or_default()
    )
}

/// The rows of a group.
fn rows(results: &Results, group: &str) -> String {
    let rows: Vec<&RowResult> = results.rows.iter().filter(|row| row.group == group).collect();
    let Some(first) = rows.first() else { return String::new() };
    let named: Vec<&RowResult> = rows.iter().copied().filter(|row| row.repeats.is_none()).collect();
    let title = if group.is_empty() { &results.experiment } else { group };
    let mut counts: Vec<&str> = rows.iter().flat_map(|row| row.counts.keys().map(String::as_str)).collect();
    counts.sort_unstable();
    counts.dedup();
    let mut header = vec![
        "row",
        "N",
        "min",
        "median",
        "max",
        "against",
        "difference, interval",
        "verdict",
        "goal",
        "bound",
    ];
    header.extend(&counts);
    let lines = rows.iter().map(|row| {
        let found = results.comparison(&row.name);
        let mut cells = vec![code(&words::short(row, &named))];
        match (&row.summary, &row.missing) {
            (Some(s), _) => {
                cells.push(s.n.to_string());
                cells.extend([s.min, s.median, s.max].map(words::value));
            }
            (None, missing) => {
                let why = if missing.is_some() { "missing" } else { "no values" };
                cells.extend([why.to_owned(), String::new(), String::new(), String::new()]);
            }
        }
        cells.push(found.map(|found| code(&short_of(results, &found.baseline, &named))).unwrap_or_default());
        cells.push(found.map(|found| words::difference(&found.comparison)).unwrap_or_default());
        cells.push(found.map(|found| found.comparison.verdict.to_string()).unwrap_or_default());
        cells.push(found.and_then(|found| found.goal.as_ref()).map(words::goal).unwrap_or_default());
        cells.push(words::bound(results, row));
        cells.extend(
            counts
                .iter()
                .map(|name| row.counts.get(*name).map(|count| words::value(*count)).unwrap_or_default()),
        );
        cells
    });
    let (by_distance, cells) = distance::cells(results, &rows, &named);
    let header: Vec<String> = header.into_iter().map(Into::into).collect();
    format!(
        "\n## {title}\n\n{}, {}.\n\n{}{}",
        first.unit,
        words::better(first.better),
        table(&header, lines),
        table(&by_distance, cells.into_iter()),
    )
}

fn short_of(results: &Results, name: &str, named: &[&RowResult]) -> String {
    results.row(name).map_or_else(|| name.to_owned(), |row| words::short(row, named))
}

/// A table without the columns in which nothing stands; nothing without a header.
fn table(header: &[String], rows: impl Iterator<Item = Vec<String>>) -> String {
    let rows: Vec<Vec<String>> = rows.collect();
    let shown: Vec<usize> =
        (0..header.len()).filter(|at| rows.iter().any(|row| !row[*at].is_empty())).collect();
    if shown.is_empty() {
        return String::new();
    }
    let line = |row: &[String]| {
        let cells: Vec<&str> = shown.iter().map(|at| row[*at].as_str()).collect();
        format!("| {} |\n", cells.join(" | "))
    };
    let rule = format!("|{}\n", "---|".repeat(shown.len()));
    let body: String = rows.iter().map(|row| line(row)).collect();
    format!("{}{rule}{body}\n", line(header))
}

/// How it was measured, and on what.
fn how(results: &Results) -> String {
    let mut out = String::from("\n## How\n\n");
    let _ = writeln!(
        out,
        "Measured {}, {:.0} minutes: {} rounds of blocks, runs of {} s, seed {}.\n",
        results.started,
        results.elapsed_seconds / 60.0,
        results.settings.runs,
        results.settings.seconds,
        results.settings.seed
    );
    let sentences =
        distance::sentences(results).into_iter().chain(words::noise(results)).chain(words::chance(results));
    for line in sentences.chain(results.warnings.clone()).chain(results.notes.clone()) {
        let _ = writeln!(out, "- {line}");
    }
    out.push('\n');
    let peers = results.peers.iter().map(|peer| (peer.name.as_str(), peer.version.clone()));
    for (name, value) in results.machine.facts().into_iter().chain(peers) {
        let _ = writeln!(out, "- {name}: {value}");
    }
    out
}

fn code(name: &str) -> String {
    format!("`{}`", flat(name).replace('|', "\\|"))
}

/// Text that is neither markup nor the end of a cell.
fn cell(text: &str) -> String {
    flat(text).replace('|', "\\|").replace('<', "&lt;")
}

fn flat(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
