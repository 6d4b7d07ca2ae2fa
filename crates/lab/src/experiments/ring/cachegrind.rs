//! Loads and stores per buffer, counted by valgrind's cachegrind.
//!
//! One thread plays both sides in turn, in a process of its own under valgrind: once for N buffers and
//! once for 2 N. The difference is what N buffers cost; starting and setting up falls out. Unlike a time it
//! is the same on every run.

use std::collections::BTreeMap;

use super::variant::Variant;
use crate::experiment::{RowError, Setup};
use crate::experiments::valgrind;

/// N. Other differences from run to run (by the environment's length, for example) are some hundred
/// accesses, a hundredth per buffer.
const BUFFERS: usize = 25_600;

/// Loads and stores per buffer of a variant.
pub fn count(setup: &Setup, variant: &Variant, size: u16) -> Result<BTreeMap<String, f64>, RowError> {
    let [once, twice] = [BUFFERS, 2 * BUFFERS].map(|buffers| accesses(setup, variant, size, buffers));
    let (once, twice) = (once?, twice?);
    let per_buffer = |at: usize| {
        let more = twice[at].checked_sub(once[at]);
        let more = more.ok_or_else(|| RowError::failed("more buffers cost fewer accesses"))?;
        Ok::<_, RowError>(more as f64 / BUFFERS as f64)
    };
    Ok([("loads/buffer".to_owned(), per_buffer(0)?), ("stores/buffer".to_owned(), per_buffer(1)?)].into())
}

/// Data reads and writes of a whole process that exchanges so many buffers.
fn accesses(setup: &Setup, variant: &Variant, size: u16, buffers: usize) -> Result<[u64; 2], RowError> {
    let args = [variant.labels().to_string(), size.to_string(), buffers.to_string()];
    let text = valgrind::run(setup, "ring", &["--tool=cachegrind", "--cache-sim=yes"], &args)?;
    totals(&text).ok_or_else(|| {
        RowError::failed("cachegrind's output has no data reads and writes: is its valgrind too new?")
    })
}

/// The totals of cachegrind's output: a line names the events, the last one sums them up.
fn totals(text: &str) -> Option<[u64; 2]> {
    let line = |start: &str| text.lines().find_map(|line| line.strip_prefix(start));
    let (events, summary) = (line("events:")?, line("summary:")?);
    let event = |name: &str| {
        let at = events.split_whitespace().position(|event| event == name)?;
        summary.split_whitespace().nth(at)?.parse().ok()
    };
    Some([event("Dr")?, event("Dw")?])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn totals_are_found_by_the_events_names() {
        let text = "desc: I1 cache: x\ncmd: y\nevents: Ir I1mr ILmr Dr D1mr DLmr Dw D1mw DLmw\nfn=a\n1 2 3\n\
                    summary: 9000 1 2 3000 4 5 1500 6 7\n";
        assert_eq!(totals(text), Some([3000, 1500]));
        assert_eq!(totals("events: Ir\nsummary: 5\n"), None);
        assert_eq!(totals("events: Ir Dr Dw\nsummary: 5\n"), None);
        assert_eq!(totals(""), None);
    }
}
