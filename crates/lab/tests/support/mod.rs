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

/// Returns the JSON that the lab writes when it measures `ringferry` with these arguments, whatever else the machine does meanwhile.
pub fn measure(args: &[&str]) -> Value {
    let output =
        lab(args).arg("--program").arg(program()).args(["--no-probe", "--json", "-"]).output().unwrap();
    let [said, result] = [&output.stderr, &output.stdout].map(|text| String::from_utf8_lossy(text));
    assert!(output.status.success(), "{said}{result}");
    ringferry_rig::schema::assert_described(&[&["lab"], args].concat(), &result);
    serde_json::from_str(&result).unwrap()
}

/// `ringferry` beside the lab, as it is there: `cargo test --workspace` has just built it. Where it is not there it is built now.
pub fn program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        let program = Path::new(env!("CARGO_BIN_EXE_ringferry-lab")).with_file_name("ringferry");
        if !program.is_file() {
            build(&program);
        }
        program
    })
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
