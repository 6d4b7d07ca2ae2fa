//! `ringferry lab` is the program `ringferry-lab`, as `git foo` is `git-foo`: whoever carries packets needs no laboratory, so it
//! is built and installed by itself (crate `ringferry-lab`). This process becomes that program.

use std::convert::Infallible;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use clap::Args;

const PROGRAM: &str = "ringferry-lab";

/// Arguments of `ringferry lab`: all of them are the lab's.
#[derive(Debug, Args)]
pub struct LabArgs {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENTS")]
    args: Vec<OsString>,
}

/// Why there is no lab.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It was not built, or not installed.
    #[error(
        "{PROGRAM} is neither beside this program nor in PATH: build it with `cargo build --release -p {PROGRAM}`, \
         or install it with `cargo install --path crates/lab`"
    )]
    Missing,
    /// It is there and does not start.
    #[error("cannot start {}: {error}", program.display())]
    Start { program: PathBuf, error: std::io::Error },
}

/// Becomes the lab; returns only if that is not possible.
pub fn run(args: &LabArgs, verbose: u8) -> Error {
    let Err(error) = become_lab(args, verbose);
    error
}

fn become_lab(args: &LabArgs, verbose: u8) -> Result<Infallible, Error> {
    let program = ringferry_sys::program::find(PROGRAM).ok_or(Error::Missing)?;
    let mut command = Command::new(&program);
    // `ringferry -v lab ...` is meant for the lab. In front of a subcommand of its own it would take them for an experiment's.
    command.args(&args.args).args((0..verbose).map(|_| "-v"));
    let error = command.exec();
    Err(Error::Start { program, error })
}
