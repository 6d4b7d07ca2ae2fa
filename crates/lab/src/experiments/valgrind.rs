//! Running the lab's own child processes under valgrind, which counts what a timing on a floating processor cannot prove.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use ringferry_sys::process::{Spawn, spawn};

use crate::experiment::{Missing, Peer, RowError, Setup};

/// The Debian package of valgrind.
const PACKAGE: &str = "valgrind";

/// Valgrind as a peer, or what is missing without it.
pub(super) fn find(counts: &str) -> Result<Peer, Missing> {
    let output = Command::new("valgrind").arg("--version").stderr(Stdio::null()).output();
    let version = output.ok().filter(|output| output.status.success());
    let version = version.and_then(|output| String::from_utf8(output.stdout).ok());
    match version {
        Some(version) => Ok(Peer { name: "valgrind".into(), version: version.trim().into() }),
        None => Err(Missing {
            name: counts.into(),
            reason: "valgrind, which counts them, is not installed".into(),
            package: Some(PACKAGE.into()),
        }),
    }
}

/// Runs [`Experiment::child`](crate::experiment::Experiment::child) of an experiment under a tool of valgrind, and returns what the tool has written.
pub(super) fn run(
    setup: &Setup,
    experiment: &str,
    tool: &[&str],
    args: &[String],
) -> Result<String, RowError> {
    let folder = super::folder()?;
    let out: PathBuf = folder.path().join("out");
    let name = tool.first().and_then(|tool| tool.strip_prefix("--tool=")).unwrap_or_default();
    let child = setup.child(experiment);
    let mut command = Command::new("valgrind");
    command
        .args(tool)
        .arg("-q")
        .arg(format!("--{name}-out-file={}", out.display()))
        .arg(child.get_program())
        .args(child.get_args())
        .args(args)
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
    Ok(std::fs::read_to_string(out)?)
}
