//! For test programs without the harness, which start themselves again in a role.

use std::process::Command;

/// Runs a test, and says so as the harness does.
pub fn run(name: &str, test: impl FnOnce()) {
    eprintln!("test {name} ...");
    test();
    eprintln!("test {name} ... ok");
}

/// This program, in a role.
pub fn role(name: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.arg(name);
    command
}
