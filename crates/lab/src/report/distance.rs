//! The distances at which a session was measured, what was rejected and why, and what rows did at each distance.

use super::table::Table;
use super::words;
use crate::probe::Distance;
use crate::results::{Results, RowResult};
use crate::schedule::Rejected;
use crate::stats::Summary;

/// The distances met, nearest first, with the round trips of their blocks.
pub(super) fn met(results: &Results) -> Vec<(Distance, Option<Summary>, usize)> {
    let mut met: Vec<(Distance, Vec<f64>, usize)> = Vec::new();
    for block in &results.blocks {
        let distance = Distance::of(block.round_trip);
        let at = met.iter().position(|(known, ..)| *known == distance).unwrap_or_else(|| {
            met.push((distance, Vec::new(), 0));
            met.len() - 1
        });
        met[at].1.extend(block.round_trip);
        met[at].2 += 1;
    }
    met.sort_by_key(|(distance, ..)| *distance);
    met.into_iter()
        .map(|(distance, round_trips, blocks)| (distance, Summary::of(&round_trips), blocks))
        .collect()
}

/// Sentences on the machine while it was measured: one for each distance, one for what was rejected.
pub(super) fn sentences(results: &Results) -> Vec<String> {
    let distance = |(distance, round_trips, blocks): (Distance, Option<Summary>, usize)| match round_trips {
        Some(ns) => format!(
            "Processors {distance}: {blocks} blocks, a cache line's round trip {} ns ({} to {}).",
            words::value(ns.median),
            words::value(ns.min),
            words::value(ns.max)
        ),
        None => format!("Without probes of the processors' distance: {blocks} blocks."),
    };
    let mut sentences: Vec<String> = met(results).into_iter().map(distance).collect();
    let Rejected { moved, stolen, lost } = results.rejected;
    if moved + stolen > 0 {
        sentences.push(format!(
            "Measured again: {moved} times as a processor was moved, {stolen} times as the hypervisor took too much time; {lost} blocks were given up."
        ));
    }
    sentences
}

/// What the rows of a group did at each distance, or nothing where only one was met and nothing was rejected.
pub(super) fn table(results: &Results, rows: &[&RowResult], named: &[&RowResult]) -> String {
    let (header, cells) = cells(results, rows, named);
    let mut table = Table::new(&header.iter().map(String::as_str).collect::<Vec<_>>());
    cells.into_iter().for_each(|row| table.push(row));
    if table.is_empty() { String::new() } else { format!("{}\n", table.draw()) }
}

/// Header and rows of that table.
pub(super) fn cells(
    results: &Results,
    rows: &[&RowResult],
    named: &[&RowResult],
) -> (Vec<String>, Vec<Vec<String>>) {
    let met: Vec<Distance> = met(results).into_iter().map(|(distance, ..)| distance).collect();
    let rejected = |row: &RowResult| row.rejected != Rejected::default();
    if met.len() < 2 && !rows.iter().any(|row| rejected(row)) {
        return Default::default();
    }
    let mut header = vec!["row (by distance)".to_owned()];
    for distance in &met {
        header.extend([format!("{distance} N"), format!("{distance} median"), format!("{distance} ratio")]);
    }
    header
        .extend(["ns without distance", "round trips/packet", "measured again", "given up"].map(Into::into));
    let line = |row: &RowResult| {
        let mut cells = vec![words::short(row, named)];
        let found = results.comparison(&row.name).and_then(|found| found.comparison.paired.as_ref());
        for distance in &met {
            let values: Vec<f64> = std::iter::zip(&row.values, &row.blocks)
                .filter(|(_, block)| {
                    results
                        .blocks
                        .get(**block)
                        .is_some_and(|block| Distance::of(block.round_trip) == *distance)
                })
                .map(|(value, _)| *value)
                .collect();
            let median =
                Summary::of(&values).map_or_else(String::new, |summary| words::value(summary.median));
            let effect = found.and_then(|found| found.distances.iter().find(|at| at.distance == *distance));
            cells.push(if values.is_empty() { String::new() } else { values.len().to_string() });
            cells.push(median);
            cells.push(effect.map_or_else(String::new, |at| words::effect(&at.effect)));
        }
        let (instructions, lines) = row.line.map_or_else(Default::default, |line| {
            let with = |value: f64, error: f64| format!("{} ± {}", words::value(value), words::value(error));
            (with(line.intercept, line.intercept_error), with(line.slope, line.slope_error))
        });
        let again = row.rejected.moved + row.rejected.stolen;
        let count = |count: usize| if count == 0 { String::new() } else { count.to_string() };
        cells.extend([instructions, lines, count(again), count(row.rejected.lost)]);
        cells
    };
    (header, rows.iter().filter(|row| !row.values.is_empty() || rejected(row)).map(|row| line(row)).collect())
}
