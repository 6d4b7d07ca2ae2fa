//! `ringferry lab offloads`, which takes the program itself: a switch, two guests, and traffic.

use std::process::{Command, Stdio};

use serde_json::Value;

#[test]
fn ports_have_what_the_row_says_and_the_switch_does_the_rest() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringferry"));
    command.args(["lab", "offloads", "--runs=1", "--seconds=0.2", "--json", "-"]);
    command
        .args(["--filter", "traffic=tcp from=all to=(all|none)$"])
        .env_remove("RUST_LOG")
        .stdin(Stdio::null());
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let result: Value = serde_json::from_slice(&output.stdout).unwrap();
    let rows = result["rows"].as_array().unwrap();
    if let Some(reason) = rows[0]["missing"]["reason"].as_str() {
        assert!(std::env::var_os("CI").is_none_or(|ci| ci != "true"), "{reason}");
        eprintln!("skipped: {reason}");
        return;
    }
    let row = |to: &str| {
        let found = rows.iter().find(|row| row["labels"]["to"] == to && row["repeats"].is_null());
        let row = found.unwrap_or_else(|| panic!("no {to}: {rows:?}"));
        assert!(row["values"][0].as_f64().unwrap() > 0.0, "{row}");
        ["bytes/frame", "done in software"].map(|name| row["extra"][name][0].as_f64().unwrap())
    };
    let ([whole, untouched], [cut, done]) = (row("all"), row("none"));
    // Of 64 KiB where both take that, whatever the machine; of an MTU at most where the receiver takes nothing.
    assert!(whole > 1514.0 && untouched == 0.0, "{rows:?}");
    assert!(cut <= 1514.0 && done > 0.0, "{rows:?}");
}
