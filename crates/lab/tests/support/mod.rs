//! The lab as a process, and the program that it measures.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use serde_json::Value;

/// The lab with these arguments.
pub fn lab(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringferry-lab"));
    command.args(args).env_remove("RUST_LOG").stdin(Stdio::null());
    command
}

/// What the lab writes as JSON when it measures `ringferry` with these arguments.
pub fn measure(args: &[&str]) -> Value {
    let output = lab(args).arg("--program").arg(program()).args(["--json", "-"]).output().unwrap();
    let [said, result] = [&output.stderr, &output.stdout].map(|text| String::from_utf8_lossy(text));
    assert!(output.status.success(), "{said}{result}");
    serde_json::from_str(&result).unwrap()
}

/// `ringferry` beside the lab. `cargo test --workspace` has built it; where it is not there, or older than its sources, it is
/// built now.
pub fn program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        let program = Path::new(env!("CARGO_BIN_EXE_ringferry-lab")).with_file_name("ringferry");
        if !fresh(&program) {
            build(&program);
        }
        program
    })
}

/// Whether the program is there and no file that it is made of is younger: cargo lists them beside it.
fn fresh(program: &Path) -> bool {
    let changed = |path: &Path| path.metadata().and_then(|file| file.modified()).ok();
    let Ok(list) = std::fs::read_to_string(program.with_extension("d")) else { return false };
    // As for make: `PROGRAM: FILE FILE ...`, and a space in a name has a backslash in front.
    let files = list.split_once(": ").map_or("", |(_, files)| files).replace("\\ ", "\0");
    let youngest = files.split_whitespace().map(|file| changed(Path::new(&file.replace('\0', " "))));
    let youngest = youngest.collect::<Option<Vec<_>>>().and_then(|times| times.into_iter().max());
    matches!((changed(program), youngest), (Some(built), Some(source)) if built >= source)
}

/// As `cargo test` builds it, into the same folder.
fn build(program: &Path) {
    let folder = program.parent().unwrap();
    let profile = if folder.ends_with("release") { "release" } else { "test" };
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(["build", "--quiet", "-p", "ringferry", "--profile", profile, "--manifest-path"]);
    command.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/../ringferry/Cargo.toml"));
    command.arg("--target-dir").arg(folder.parent().unwrap());
    assert!(command.status().unwrap().success(), "cannot build it: {command:?}");
    assert!(program.is_file(), "{command:?} has not made {}", program.display());
}
