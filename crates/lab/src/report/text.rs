//! Results for a terminal: what ministat would print for each comparison, then the tables.

use std::fmt::Write;

use super::table::Table;
use super::{distance, extra, words};
use crate::results::{Results, RowResult};
use crate::stats::ministat::{self, Set};

/// The whole report. Without `plot`, ministat's plots are left out.
pub fn report(results: &Results, plot: bool) -> String {
    let mut out = comparisons(results, plot);
    for group in results.groups() {
        out.push_str(&table(results, group));
    }
    out.push_str(&again(results));
    for sentence in distance::sentences(results) {
        let _ = writeln!(out, "{sentence}");
    }
    for warning in &results.warnings {
        let _ = writeln!(out, "WARNING: {warning}");
    }
    for line in words::noise(results).into_iter().chain(words::chance(results)) {
        let _ = writeln!(out, "{line}");
    }
    out.push_str(&rest(results));
    out
}

/// What became of rows that were compared with themselves again and again.
fn again(results: &Results) -> String {
    if results.repetitions.is_empty() {
        return String::new();
    }
    let mut table =
        Table::new(&["row (A/A)", "repetitions", "no difference", "faster", "slower", "differs by distance"]);
    for row in &results.repetitions {
        let counts = [row.repetitions, row.no_difference, row.faster, row.slower, row.differs_by_distance];
        table.push([row.row.clone()].into_iter().chain(counts.map(|count| count.to_string())).collect());
    }
    format!("{}\n", table.draw())
}

/// The output of ministat for each row and its baseline, with Welch's test, and what the blocks say below.
fn comparisons(results: &Results, plot: bool) -> String {
    let mut out = String::new();
    for found in &results.comparisons {
        let sets = [&found.baseline, &found.row]
            .map(|name| Set { name, values: results.row(name).map_or(&[], |row| row.values.as_slice()) });
        let Some(text) = ministat::report(&sets, results.settings.confidence, plot) else { continue };
        if !plot {
            let _ = writeln!(out, "x {}\n+ {}", sets[0].name, sets[1].name);
        }
        out.push_str(&text);
        let _ = writeln!(out, "\t(Welch: {})", words::welch(&found.comparison));
        if let Some(paired) = &found.comparison.paired {
            let blocks = paired.effect.blocks;
            let _ = writeln!(out, "In {blocks} blocks: {}", words::difference(&found.comparison));
        }
        let verdict = if found.noise_floor { "A/A: ".into() } else { String::new() };
        let _ = writeln!(out, "{verdict}{}\n", found.comparison.verdict);
    }
    out
}

fn table(results: &Results, group: &str) -> String {
    let rows: Vec<&RowResult> = results.rows.iter().filter(|row| row.group == group).collect();
    let Some(first) = rows.first() else { return String::new() };
    let named: Vec<&RowResult> = rows.iter().copied().filter(|row| row.repeats.is_none()).collect();
    let counts = counts(&rows);
    let mut header = vec!["row", "N", "min", "median", "mean", "max", "stddev"];
    header.extend(["difference", "ratio", "verdict"]);
    let with_goal = rows.iter().any(|row| row.goal.is_some());
    header.extend(with_goal.then_some("goal"));
    let with_bound = rows.iter().any(|row| row.bound.is_some());
    header.extend(with_bound.then_some("bound"));
    header.push("published");
    header.extend(counts.iter().copied());
    let mut table = Table::new(&header);
    for row in &rows {
        let mut cells = vec![words::short(row, &named)];
        match (&row.summary, &row.missing) {
            (Some(s), _) => {
                cells.push(s.n.to_string());
                cells.extend([s.min, s.median, s.mean, s.max, s.stddev].map(words::value));
            }
            (None, missing) => {
                // The reason is told once, after the tables.
                cells.push(if missing.is_some() { "missing" } else { "no values" }.into());
                cells.resize(7, String::new());
            }
        }
        match results.comparison(&row.name) {
            Some(found) => cells.extend([
                words::difference(&found.comparison),
                words::ratio(&found.comparison),
                found.comparison.verdict.to_string(),
            ]),
            None => cells.resize(10, String::new()),
        }
        if with_goal {
            let goal = results.comparison(&row.name).and_then(|found| found.goal.as_ref());
            cells.push(goal.map_or_else(String::new, words::goal));
        }
        if with_bound {
            cells.push(words::bound(results, row));
        }
        cells.push(row.published.iter().map(words::published).collect::<Vec<_>>().join(", "));
        cells.extend(
            counts
                .iter()
                .map(|name| row.counts.get(*name).map_or_else(String::new, |count| words::value(*count))),
        );
        table.push(cells);
    }
    let title = if group.is_empty() { results.experiment.as_str() } else { group };
    let distances = distance::table(results, &rows, &named);
    let extra = extra::table(results, &rows, &named);
    format!("{title} ({}, {})\n{}\n{distances}{extra}", first.unit, words::better(first.better), table.draw())
}

/// Names of the counts of a group's rows.
fn counts<'a>(rows: &[&'a RowResult]) -> Vec<&'a str> {
    let mut names: Vec<&str> = rows.iter().flat_map(|row| row.counts.keys().map(String::as_str)).collect();
    names.sort_unstable();
    names.dedup();
    names
}

fn missing_text(reason: &str, package: Option<&str>) -> String {
    match package {
        Some(package) => format!("missing: {reason} (apt install {package})"),
        None => format!("missing: {reason}"),
    }
}

fn rest(results: &Results) -> String {
    let mut out = String::new();
    // Many rows miss the same thing.
    let mut reasons: Vec<(String, Vec<&str>)> = Vec::new();
    for missing in results.all_missing() {
        let reason = missing_text(&missing.reason, missing.package.as_deref());
        match reasons.iter_mut().find(|(have, _)| *have == reason) {
            Some((_, names)) => names.push(&missing.name),
            None => reasons.push((reason, vec![&missing.name])),
        }
    }
    for (reason, names) in &reasons {
        let _ = match names[..] {
            [name] => writeln!(out, "{name}: {reason}"),
            _ => writeln!(out, "{reason}\n  {}", names.join("\n  ")),
        };
    }
    for row in &results.rows {
        for error in &row.errors {
            let round = if error.round == 0 { "warm-up".into() } else { format!("round {}", error.round) };
            let _ = writeln!(out, "failed: {}, {round}: {}", row.name, error.message);
        }
    }
    if !results.published.is_empty() {
        out.push_str("\nPublished figures, measured elsewhere:\n");
        for figure in &results.published {
            let _ = writeln!(out, "  {}: {} ({})", figure.what, words::published(figure), figure.source);
        }
    }
    out.push('\n');
    for note in &results.notes {
        let _ = writeln!(out, "{note}");
    }
    let _ = writeln!(
        out,
        "{} rounds of blocks after a warm-up, each row twice in a block, runs of {} s, order shuffled from seed {}; {:.0} s in all",
        results.settings.runs, results.settings.seconds, results.settings.seed, results.elapsed_seconds
    );
    let machine = &results.machine;
    let cpu = machine.cpu.as_deref().unwrap_or("unknown processor");
    let kind = if machine.virtual_machine { "virtual machine, " } else { "" };
    let processors = if machine.cpus_online == 1 { "processor" } else { "processors" };
    let _ = writeln!(out, "{cpu}, {kind}{} {processors}, {}", machine.cpus_online, machine.kernel);
    if machine.build == "debug" {
        out.push_str("This is a debug build: its figures mean little. Build with --release.\n");
    }
    if !results.complete {
        out.push_str("Stopped before the last round: these are partial results.\n");
    }
    out
}
