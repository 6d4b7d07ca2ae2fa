//! `ringferry demo` on this machine: every test passes, and nothing is left behind.

use ringferry_rig::process::{Process, eventually, may};
use ringferry_rig::switch::{Place, ringferry};
use ringferry_sys::process::Spawn;
use rustix::process::Signal;

/// Returns true if the demo can run here: as root, or where users may make namespaces, and with the tun driver.
fn may_run() -> bool {
    let namespaces = || {
        let mut unshare = std::process::Command::new("unshare");
        unshare.args(["--user", "--map-root-user", "--net", "true"]);
        unshare.output().is_ok_and(|output| output.status.success())
    };
    let possible = ringferry_sys::process::is_root() || namespaces();
    may("needs root or user namespaces", possible)
        && may("needs /dev/net/tun", std::path::Path::new("/dev/net/tun").exists())
}

/// Starts the demo with `place` as its temporary directory, by which its processes are known.
fn demo(place: &Place, seconds: &str) -> Process {
    let mut command = ringferry();
    command.args(["demo", "--json", "--seconds", seconds]).env("TMPDIR", place.path());
    Process::start(&mut command, Spawn::default())
}

/// Processes that the demo started, and it itself.
fn processes(place: &Place) -> Vec<String> {
    let mark = format!("TMPDIR={}", place.path().display());
    let of = |process: std::fs::DirEntry| {
        let environment = std::fs::read(process.path().join("environ")).ok()?;
        let ours = environment.split(|byte| *byte == 0).any(|entry| entry == mark.as_bytes());
        let command = std::fs::read(process.path().join("cmdline")).ok()?;
        ours.then(|| String::from_utf8_lossy(&command).replace('\0', " "))
    };
    std::fs::read_dir("/proc").unwrap().filter_map(|process| of(process.ok()?)).collect()
}

#[track_caller]
fn nothing_is_left(place: &Place) {
    eventually("all processes are gone", || processes(place).is_empty().then_some(()));
    assert_eq!(place.files(), [""; 0]);
}

#[test]
fn the_demo_verifies_real_traffic_and_leaves_nothing_behind() {
    if !may_run() {
        return;
    }
    let place = Place::new();
    let mut demo = demo(&place, "0.3");
    let (status, output) = demo.wait();
    assert!(status.success(), "{status}: {output}");
    let document: serde_json::Value = serde_json::from_str(&output).unwrap();
    let tests = document["tests"].as_array().unwrap();
    assert_eq!(tests.len(), 5);
    for test in tests {
        let name = &test["name"];
        assert_eq!(test["error"], serde_json::Value::Null, "{name}");
        assert_eq!(test["traffic"]["corrupt"], 0, "{name}");
        assert!(test["traffic"]["bytes"].as_u64().unwrap() > 0, "{name}: {test}");
        assert_eq!(test["unaccounted"], 0, "{name}: {test}");
    }
    assert!(tests.iter().any(|test| test["traffic"]["latency_us"]["p99"].is_number()));
    assert_eq!(document["ports"].as_array().unwrap().len(), 2);
    nothing_is_left(&place);
}

#[test]
fn an_interrupted_demo_cleans_up_and_says_so_by_its_exit_code() {
    if !may_run() {
        return;
    }
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        let place = Place::new();
        let mut demo = demo(&place, "30");
        // In the middle of it: the demo, the switch, two guests, a traffic server and a client.
        eventually("traffic is under way", || (processes(&place).len() == 6).then_some(()));
        demo.signal(signal);
        let (status, output) = demo.wait();
        assert_eq!((status.code(), output.as_str()), (Some(code), ""));
        demo.until_logged("interrupted");
        nothing_is_left(&place);
    }
}

/// Killed without a chance to clean up: the processes still end; only a directory of sockets may stay.
#[test]
fn a_killed_demo_leaves_no_process() {
    if !may_run() {
        return;
    }
    let place = Place::new();
    let mut demo = demo(&place, "30");
    eventually("traffic is under way", || (processes(&place).len() == 6).then_some(()));
    demo.signal(Signal::KILL);
    demo.wait();
    eventually("all processes are gone", || processes(&place).is_empty().then_some(()));
}
