//! The other figures of a group's rows: medians, and how they compare with those of the row's baseline. No statistics:
//! what matters is a row of its own.

use super::table::Table;
use super::words;
use crate::results::{Results, RowResult};

/// A table of them, or nothing where there are none.
pub(super) fn table(results: &Results, rows: &[&RowResult], named: &[&RowResult]) -> String {
    let mut names: Vec<&str> = rows.iter().flat_map(|row| row.extra.keys().map(String::as_str)).collect();
    names.sort_unstable();
    names.dedup();
    let mut table = Table::new(&[&["row (medians)"], &names[..]].concat());
    for row in rows.iter().filter(|row| !row.extra.is_empty()) {
        let cells = names.iter().map(|name| cell(results, row, name).unwrap_or_default());
        table.push(std::iter::once(words::short(row, named)).chain(cells).collect());
    }
    if table.is_empty() { String::new() } else { format!("{}\n", table.draw()) }
}

/// A figure, and its ratio to the baseline's if that is another.
fn cell(results: &Results, row: &RowResult, name: &str) -> Option<String> {
    let value = median(row, name)?;
    let baseline = row.baseline.as_deref().and_then(|baseline| median(results.row(baseline)?, name));
    Some(match baseline {
        Some(baseline) if baseline != 0.0 && baseline != value => {
            format!("{} ({:.3}x)", words::value(value), value / baseline)
        }
        _ => words::value(value),
    })
}

fn median(row: &RowResult, name: &str) -> Option<f64> {
    Some(crate::stats::Summary::of(row.extra.get(name)?)?.median)
}
