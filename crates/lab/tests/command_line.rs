//! The command line of the lab, and what a session leaves behind.

mod support;

use std::path::Path;
use std::process::{Command, Output, Stdio};

use ringferry_rig::process::may;
use ringferry_rig::schema::assert_described;
use serde_json::Value;

/// Two rows that are over in no time, three runs each.
const QUICK: [&str; 10] = [
    "ring",
    "--runs=3",
    "--seconds=0.002",
    "--option",
    "counts=off",
    "--filter",
    "mode=polling ring=split order=any chain=direct batch=32 ",
    "--confidence=99",
    "--no-plot",
    // Every block counts, whatever else the machine does meanwhile.
    "--no-probe",
];

fn lab(args: &[&str]) -> Output {
    support::lab(args).output().unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

fn read(path: &Path) -> Value {
    let text = std::fs::read_to_string(path).unwrap();
    assert_described(&["lab"], &text);
    serde_json::from_str(&text).unwrap()
}

#[test]
fn the_experiments_are_listed_for_people_and_for_programs() {
    let output = lab(&["list"]);
    assert!(output.status.success());
    assert!(stdout(&output).contains("ring ") && stdout(&output).contains("--option buffers="));
    let rows = stdout(&lab(&["list", "ring"]));
    assert!(rows.contains("mode=notified ring=packed order=in chain=indirect batch=256 shadow=on"), "{rows}");
    let text = stdout(&lab(&["list", "--json"]));
    assert_described(&["lab", "list"], &text);
    let document: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(document["schema"], "ringferry-lab-list/1");
    let ring = &document["experiments"][0];
    assert_eq!((&ring["name"], &ring["rows"][0]["labels"]["ring"]), (&"ring".into(), &"null".into()));
}

#[test]
fn results_are_written_and_compared() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    let output = lab(&[&QUICK[..], &["--json", &path("a.json"), "--html", &path("a.html")]].concat());
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(stdout(&output).contains("split, direct, polling (ns/buffer, lower is better)"));
    assert!(stderr(&output).contains("warm-up") && stderr(&output).contains("round 3/3"));
    let result = read(&folder.path().join("a.json"));
    assert_eq!(result["schema"], "ringferry-lab/1");
    assert_eq!(result["rows"].as_array().unwrap().len(), 3, "off, off again, on");
    assert_eq!(result["rows"][0]["values"].as_array().unwrap().len(), 6, "two a round");
    assert_eq!(result["settings"]["confidence"], "99");
    assert_eq!(result["command"][1], "ring");
    assert!(std::fs::read_to_string(folder.path().join("a.html")).unwrap().starts_with("<!DOCTYPE html>"));

    assert!(lab(&[&QUICK[..], &["--json", &path("b.json")]].concat()).status.success());
    let output = lab(&["compare", &path("a.json"), &path("b.json"), "--json", "-"]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert_described(&["lab", "compare"], &stdout(&output));
    let versus: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(versus["schema"], "ringferry-lab-compare/1");
    assert_eq!(versus["rows"].as_array().unwrap().len(), 3);
    let text = stdout(&lab(&["compare", &path("a.json"), &path("b.json"), "--html", &path("c.html")]));
    assert!(text.contains("shadow=on") && text.contains("old mean"), "{text}");
    assert!(folder.path().join("c.html").exists());
}

#[test]
fn a_wrong_command_line_ends_with_status_2_and_says_what_to_do() {
    for (args, message) in [
        (&["rings"][..], "there is no experiment rings: try ring"),
        (&["ring", "--runs", "0"], "between 1 and 10000"),
        (&["ring", "--runs", "5", "--aa", "3"], "fewer than 6 blocks prove nothing"),
        (&["ring", "--filter", "nothing like it"], "ringferry lab list ring"),
        (&["ring", "--option", "size=77"], "77"),
        (&["ring", "--json", "/nonexistent/x.json"], "choose a folder"),
        (&["ring", "--nonsense"], "unexpected argument"),
        (&["compare", "/nonexistent/a", "/nonexistent/b"], "cannot read /nonexistent/a"),
    ] {
        let output = lab(args);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(message), "{args:?}: {}", stderr(&output));
        assert!(stdout(&output).is_empty(), "{args:?}");
    }
}

#[test]
fn help_has_examples_and_hides_what_is_internal() {
    let help = stdout(&lab(&["--help"]));
    assert!(help.contains("lab compare old.json new.json") && help.contains("Exit status"));
    assert!(!help.contains("child"), "{help}");
}

#[test]
fn ctrl_c_keeps_what_was_measured() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("partial.json");
    let mut args = QUICK.to_vec();
    args[1] = "--runs=10000";
    let json = path.display().to_string();
    args.extend(["--json", &json]);
    let mut child = support::lab(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // The rounds that count have begun when the first of them is announced.
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(child.stderr.take().unwrap()));
    assert!(lines.any(|line| line.unwrap().starts_with("round 4/")));
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    let rest = std::thread::spawn(move || lines.for_each(drop));
    let output = child.wait_with_output().unwrap();
    rest.join().unwrap();
    assert!(output.status.success(), "{:?}", output.status);
    assert!(stdout(&output).contains("partial results"));
    let result = read(&path);
    assert_eq!(result["complete"], false);
    let values = result["rows"][0]["values"].as_array().unwrap().len();
    assert!((6..20_000).contains(&values), "{values}");
}

#[test]
fn loads_and_stores_are_counted_by_valgrind() {
    let there =
        Command::new("valgrind").arg("--version").output().is_ok_and(|output| output.status.success());
    if !may("needs valgrind: apt-get install valgrind", there) {
        return;
    }
    let count = || -> Vec<(f64, f64)> {
        // `measure` goes without probes by itself.
        let mut args = QUICK[..9].to_vec();
        args[4] = "counts=on";
        let result = support::measure(&args);
        let counted = |row: &Value| {
            let counts = &row["counts"];
            Some((counts["loads/buffer"].as_f64()?, counts["stores/buffer"].as_f64()?))
        };
        result["rows"].as_array().unwrap().iter().filter_map(counted).collect()
    };
    let (first, second) = (count(), count());
    assert_eq!(first.len(), 2, "the A/A row is not counted again");
    assert_eq!(first, second, "counts are the same every time");
    let [(loads_off, _), (loads_on, stores_on)] = first[..] else { unreachable!() };
    assert!(loads_on > 1.0 && stores_on > 1.0);
    assert!(loads_on < loads_off, "shadowing saves loads: {loads_on} of {loads_off}");
}

#[test]
fn the_program_runs_the_lab_that_is_beside_it() {
    let by_program = |args: &[&str]| {
        let mut command = Command::new(support::program());
        command.args(args).env_remove("RUST_LOG").output().unwrap()
    };
    let [direct, through] = [lab(&["list", "fdb", "--json"]), by_program(&["lab", "list", "fdb", "--json"])];
    assert!(through.status.success(), "{}", stderr(&through));
    assert_eq!(stdout(&direct), stdout(&through));
    // What stands in front of `lab` is for it as well; its help and its exit status are its own.
    assert!(by_program(&["-v", "lab", "list"]).status.success());
    assert!(stdout(&by_program(&["lab", "--help"])).contains("ringferry lab compare old.json new.json"));
    let output = by_program(&["lab", "rings"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(
        stderr(&output).starts_with("ringferry-lab: there is no experiment rings"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn without_the_program_its_rows_are_missing_and_others_are_not() {
    let folder = tempfile::tempdir().unwrap();
    let alone = folder.path().join("ringferry-lab");
    std::fs::copy(env!("CARGO_BIN_EXE_ringferry-lab"), &alone).unwrap();
    let output = Command::new(&alone).args(["list", "switch"]).env("PATH", folder.path()).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let text = stdout(&output);
    let ours = |line: &&str| line.ends_with("switch=ringferry") || line.contains("switch=ringferry ");
    let mut rows = text.lines().filter(ours).peekable();
    assert!(rows.peek().is_some(), "{text}");
    assert!(rows.all(|line| line.contains("missing: needs")), "{text}");
    let output = Command::new(&alone).args(["ring", "--program", "/nonexistent/ringferry"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("there is no such file"), "{}", stderr(&output));
}

/// `ringferry lab list | head`.
#[test]
fn a_reader_that_has_seen_enough_is_no_error() {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let output = support::lab(&["list"]).stdout(writer).stderr(Stdio::piped()).output().unwrap();
    assert!(output.status.success() && stderr(&output).is_empty(), "{output:?}");
}
