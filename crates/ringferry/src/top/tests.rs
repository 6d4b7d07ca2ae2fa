//! Switches to look at, for the tests of all files here; and what is said without a terminal.

use std::sync::atomic::{AtomicBool, Ordering};

use clap::Parser;
use ringferry_control::snapshot::{
    FdbEntry, FdbSnapshot, Negotiated, PairSnapshot, PortSnapshot, PortState, QueueRole, QueueSnapshot,
    Rates, WorkerLoad, WorkerSnapshot,
};
use ringferry_control::why::{Effect, Finding};
use ringferry_control::{Answer, ControlServer, Request, Response};
use ringferry_virtio_net::Features;

use super::*;

#[derive(Debug, Parser)]
struct Program {
    #[command(flatten)]
    top: TopArgs,
}

pub(super) fn args(words: &[&str]) -> TopArgs {
    Program::try_parse_from([&["top"], words].concat()).unwrap().top
}

pub(super) fn model() -> Model {
    Model::new(args(&[]).settings())
}

/// A port with these rates of bits, in all windows.
pub(super) fn port(name: &str, rx: f64, tx: f64) -> PortSnapshot {
    let counters = [("rx_bytes", rx / 8.0), ("tx_bytes", tx / 8.0)];
    let counters = counters.map(|(name, rate)| (name.to_owned(), rate)).into();
    let rates = |window| Rates { window, seconds: window as f64, counters, drops: Default::default() };
    PortSnapshot {
        name: name.to_owned(),
        negotiated: Negotiated::VhostUser(Features::empty()),
        state: PortState::Up,
        fault: None,
        peer: format!("/run/ringferry/{name}.sock"),
        mtu: 1500,
        mac: None,
        queues: Vec::new(),
        counters: Default::default(),
        drops: Default::default(),
        rules: Default::default(),
        pairs: Vec::new(),
        another_waits: false,
        ended: None,
        stopped_seconds: None,
        front_end: None,
        rates: vec![rates(1)],
    }
}

/// Gives a port one pair of rings of 256 entries.
pub(super) fn rings(mut port: PortSnapshot, posted: u16, waiting: u16) -> PortSnapshot {
    port.queues = [posted, waiting]
        .into_iter()
        .zip(0..)
        .map(|(available, index)| QueueSnapshot {
            index,
            role: QueueRole::of(index),
            size: 256,
            enabled: true,
            started: true,
            broken: None,
            last_avail: 0,
            last_used: 0,
            available: Some(available),
            stalled: None,
            grants: None,
        })
        .collect();
    port.pairs =
        vec![PairSnapshot { pair: 0, worker: 0, rates: port.rates.clone(), ..PairSnapshot::default() }];
    port
}

pub(super) fn switch(ports: Vec<PortSnapshot>) -> Snapshot {
    Snapshot { version: 1, pid: 4242, uptime_seconds: 11_530, ports, ..Snapshot::default() }
}

/// Two guests, one of which loses packets, and an uplink that is down, on two workers.
pub(super) fn busy() -> Snapshot {
    let mut vm0 = rings(port("vm0", 1.2e6, 9.41e9), 3, 0);
    vm0.rates[0].counters.extend([("rx_packets".to_owned(), 2400.0), ("tx_packets".to_owned(), 812_345.0)]);
    vm0.rates[0].drops = [("no-receive-buffers".to_owned(), 1200.0)].into();
    vm0.drops = [("no-receive-buffers".to_owned(), 123_456), ("vlan".to_owned(), 0)].into();
    vm0.mac = Some("52:54:00:00:00:01".parse().unwrap());
    vm0.rules = [("vlan".to_owned(), 10.into())].into();
    vm0.pairs[0].rates = vm0.rates.clone();
    let mut vm1 = rings(port("vm1", 9.41e9, 1.2e6), 256, 130);
    vm1.rates[0].counters.extend([("rx_packets".to_owned(), 812_345.0), ("tx_packets".to_owned(), 2400.0)]);
    vm1.pairs[0].rates = vm1.rates.clone();
    vm1.pairs[0].worker = 1;
    let mut uplink = port("uplink", 0.0, 0.0);
    uplink.state = PortState::AdminDown;
    let entry = |number: u8, port: &str, fixed| FdbEntry {
        vlan: 10,
        mac: format!("52:54:00:00:00:{number:02}").parse().unwrap(),
        port: port.to_owned(),
        age_seconds: 7,
        fixed,
    };
    let worker = |busy_percent, ports: &[(&str, f64)]| WorkerSnapshot {
        load: vec![WorkerLoad {
            window: 1,
            seconds: 1.0,
            busy_percent,
            polling_percent: 8.0,
            sleeping_percent: 92.0 - busy_percent,
            run_delay_percent: 0.0,
            wakeups: 120.0,
            bursts: 25_400.0,
            ports: ports.iter().map(|(name, share)| ((*name).to_owned(), *share)).collect(),
        }],
        ..WorkerSnapshot::default()
    };
    Snapshot {
        fdb: FdbSnapshot {
            capacity: 1024,
            behind: [("vm0".to_owned(), 1), ("vm1".to_owned(), 1)].into(),
            entries: vec![entry(1, "vm0", true), entry(2, "vm1", false)],
            ..FdbSnapshot::default()
        },
        workers: vec![worker(72.0, &[("vm0", 61.0), ("vm1", 39.0)]), worker(3.0, &[("vm1", 100.0)])],
        ..switch(vec![vm0, vm1, uplink])
    }
}

pub(super) fn diagnosis() -> Diagnosis {
    Diagnosis {
        port: "vm0".to_owned(),
        seconds: 10.0,
        findings: vec![Finding {
            situation: "receive-buffers".to_owned(),
            port: Some("vm0".to_owned()),
            effect: Effect::Loses,
            percent: 12.0,
            text: "12 % of the packets for vm0 were dropped, as its guest had posted no buffers for them."
                .to_owned(),
            remedy: "Give its ring more entries (rx_queue_size=1024 in QEMU).".to_owned(),
        }],
        ..Diagnosis::default()
    }
}

/// Runs `ringferry top` against a switch that is always [`busy`]. JSON must be as its schema says.
fn top(words: &[&str]) -> (Result<(), TopError>, String) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("control");
    let mut server = ControlServer::bind(&path, 0o600).unwrap();
    let args = args(&[&["--control", path.to_str().unwrap()], words].concat());
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                server.serve(&mut |request| match request {
                    Request::Show { .. } => Response::Ok(Answer::Show(busy().into())),
                    Request::Why { .. } => Response::Ok(Answer::Why(diagnosis())),
                    request => Response::Error(format!("{request:?} is not asked")),
                });
                thread::sleep(Duration::from_millis(1));
            }
        });
        let mut out = Vec::new();
        let result = run(&args, &mut out);
        done.store(true, Ordering::Relaxed);
        let text = String::from_utf8(out).unwrap();
        if args.json {
            ringferry_rig::schema::assert_described(&[&["top"], words].concat(), &text);
        }
        (result, text)
    })
}

#[test]
fn screens_are_printed_without_a_terminal() {
    let (result, text) = top(&["--once", "--sort", "config"]);
    result.unwrap();
    assert!(
        text.starts_with("ringferry 4242, up 3 h 12 min: 3 ports, 2 up; over 1 s, by config\n"),
        "{text}"
    );
    assert!(!text.contains('\x1b'), "{text:?}");
    let (result, twice) = top(&["--batch", "-n", "2", "--sort", "config"]);
    result.unwrap();
    assert_eq!(twice, format!("{text}\n{text}"));
    let (result, page) = top(&["--once", "vm0"]);
    result.unwrap();
    assert!(
        page.contains("\nvm0: vhost-user, up, MTU 1500") && page.contains("1. 12 % of the packets"),
        "{page}"
    );
}

#[test]
fn json_is_the_snapshot_in_the_order_of_the_screen() {
    let (result, text) = top(&["--json", "--once", "--sort", "name", "--reverse"]);
    result.unwrap();
    assert_eq!(text.lines().count(), 1);
    let snapshot: Snapshot = serde_json::from_str(&text).unwrap();
    let names: Vec<_> = snapshot.ports.iter().map(|port| port.name.as_str()).collect();
    assert_eq!(names, ["vm1", "vm0", "uplink"]);
    let expected = Snapshot { ports: snapshot.ports.clone(), ..busy() };
    assert_eq!(snapshot, expected);
    let (result, text) = top(&["--json", "-n", "2", "--filter", "vm1"]);
    result.unwrap();
    let snapshots: Vec<Snapshot> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(snapshots.len(), 2);
    assert_eq!((snapshots[0].ports.len(), snapshots[0].fdb.entries.len()), (1, 1));
    let (result, text) = top(&["vm0", "--json", "--once"]);
    result.unwrap();
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(json["ports"].as_array().unwrap().len(), 1);
    assert_eq!(json["why"]["findings"][0]["situation"], "receive-buffers");
}

#[test]
fn what_cannot_be_shown_is_said_with_what_to_do() {
    let (result, text) = top(&[]);
    assert_eq!(text, "");
    assert!(result.unwrap_err().to_string().contains("one of them with --once"));
    let (result, _) = top(&["vm9", "--once"]);
    assert_eq!(
        result.unwrap_err().to_string(),
        "the switch refuses: there is no port \"vm9\"; the ports are: vm0, vm1, uplink"
    );
    let (result, text) = top(&["vm9", "--once", "--json"]);
    assert!(result.unwrap_err().is_told());
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(json["kind"], "refused");
    let absent = args(&["--once", "--control", "/nonexistent/c.sock"]);
    let error = run(&absent, &mut Vec::new()).unwrap_err().to_string();
    assert!(error.contains("start one with `ringferry run`"), "{error}");
    for wrong in [
        &["--once", "-n", "2"][..],
        &["--delay", "0"],
        &["--count", "0"],
        &["--window", "5"],
        &["--sort", "x"],
    ] {
        assert!(Program::try_parse_from([&["top"], wrong].concat()).is_err(), "{wrong:?}");
    }
}

#[test]
fn the_environment_says_what_the_terminal_can_show() {
    for (environment, colour, unicode) in [
        (&[("TERM", "xterm"), ("LANG", "de_DE.UTF-8")][..], true, true),
        (&[("TERM", "xterm"), ("LANG", "C.utf8"), ("NO_COLOR", "1")], false, true),
        (&[("TERM", "xterm"), ("LANG", "C.UTF-8"), ("LC_ALL", "C")], true, false),
        (&[("TERM", "linux"), ("LC_CTYPE", "C.UTF-8")], true, false),
        (&[("TERM", "dumb"), ("LANG", "C.UTF-8")], false, false),
        (&[], false, false),
    ] {
        let of = |name: &str| {
            let found = environment.iter().find(|(one, _)| *one == name);
            found.map_or_else(String::new, |(_, value)| (*value).to_owned())
        };
        assert_eq!(look(&of, false), Look { colour, unicode }, "{environment:?}");
        assert!(!look(&of, true).unicode);
    }
}
