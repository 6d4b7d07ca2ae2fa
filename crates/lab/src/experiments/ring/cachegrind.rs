//! Loads and stores per buffer, counted by valgrind's cachegrind.
//!
//! One thread plays both sides in turn, in a process of its own under valgrind: once for N buffers and
//! once for 2 N. The difference is what N buffers cost; starting and setting up falls out. Unlike a time it
//! is the same on every run.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Stdio};

use ringferry_sys::process::{Spawn, spawn};

use super::variant::Variant;
use crate::experiment::{Missing, Peer, RowError, Setup};

/// The Debian package of valgrind.
pub const PACKAGE: &str = "valgrind";

/// N. Other differences from run to run (by the environment's length, for example) are some hundred
/// accesses, a hundredth per buffer.
const BUFFERS: usize = 25_600;

/// Valgrind as a peer, or what is missing.
pub fn find() -> Result<Peer, Missing> {
    let output = Command::new("valgrind").arg("--version").stderr(Stdio::null()).output();
    let version = output.ok().filter(|output| output.status.success());
    let version = version.and_then(|output| String::from_utf8(output.stdout).ok());
    match version {
        Some(version) => Ok(Peer { name: "valgrind".into(), version: version.trim().into() }),
        None => Err(Missing {
            name: "loads/buffer and stores/buffer".into(),
            reason: "valgrind, which counts them, is not installed".into(),
            package: Some(PACKAGE.into()),
        }),
    }
}

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
    let folder = crate::experiments::folder()?;
    let out = folder.path().join("cachegrind.out");
    let child = setup.child("ring");
    let mut command = Command::new("valgrind");
    command
        .args(["--tool=cachegrind", "--cache-sim=yes", "-q"])
        .arg(format!("--cachegrind-out-file={}", out.display()))
        .arg(child.get_program())
        .args(child.get_args())
        .args([variant.labels().to_string(), size.to_string(), buffers.to_string()])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    let output =
        spawn(&mut command, Spawn { die_with_parent: true, ..Spawn::default() })?.wait_with_output()?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        let last = said.lines().last().unwrap_or("and said nothing").to_owned();
        return Err(RowError::failed(format!("valgrind ended with {}: {last}", output.status)));
    }
    read(&out)
}

/// The totals of a cachegrind output file: a line names the events, the last one sums them up.
fn read(path: &Path) -> Result<[u64; 2], RowError> {
    let text = std::fs::read_to_string(path)?;
    totals(&text).ok_or_else(|| {
        RowError::failed("cachegrind's output has no data reads and writes: is its valgrind too new?")
    })
}

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
