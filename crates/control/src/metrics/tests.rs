//! The two formats: as their readers parse them, and as Prometheus's own checker likes them.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write as _;
use std::process::{Command, Stdio};

use ringferry_sys::tap::Offloads;

use super::*;
use crate::snapshot::{CaptureSnapshot, FdbEntry, FdbSnapshot, Negotiated, QueueSnapshot};

fn port(name: &str) -> PortSnapshot {
    let counts = |of: &[(&str, u64)]| of.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect();
    let queue = |index| QueueSnapshot {
        index,
        role: QueueRole::of(index),
        size: 256,
        enabled: true,
        started: true,
        broken: (index == 1).then(|| "it lies".to_owned()),
        last_avail: 0,
        last_used: 0,
        available: None,
        stalled: None,
        grants: None,
    };
    PortSnapshot {
        name: name.to_owned(),
        negotiated: Negotiated::Tap(Offloads::empty()),
        state: PortState::AdminDown,
        fault: None,
        peer: "/run/\"odd\"\\\n.sock".to_owned(),
        mtu: 1500,
        mac: Some("52:54:00:00:00:01".parse().unwrap()),
        queues: vec![queue(0), queue(1)],
        counters: counts(&[
            ("rx_packets", 7),
            ("tx_bytes", 0),
            ("work_nanoseconds", 2_500_000_000),
            ("later", 3),
            ("Odd name", 1),
        ]),
        drops: counts(&[("vlan", 5), ("a-later-one", 2)]),
        rules: BTreeMap::default(),
        pairs: Vec::new(),
        rates: Vec::new(),
        another_waits: false,
        ended: None,
        stopped_seconds: None,
        front_end: None,
    }
}

fn snapshot(ports: usize) -> Snapshot {
    let ports: Vec<_> = (0..ports).map(|number| port(&format!("vm{number}"))).collect();
    let entry = FdbEntry {
        vlan: 0,
        mac: "52:54:00:00:00:01".parse().unwrap(),
        port: "vm0".to_owned(),
        age_seconds: 1,
        fixed: false,
    };
    let worker = WorkerSnapshot {
        polls: 9,
        sleep_nanoseconds: Some(1_500_000_000),
        busy_nanoseconds: 250_000_000,
        polling_nanoseconds: 500_000_000,
        bursts: vec![5, 4, 3, 2, 1, 7],
        rounds: vec![1, 0, 0, 0, 0, 0, 0, 2],
        ..WorkerSnapshot::default()
    };
    let fdb = FdbSnapshot {
        capacity: 16,
        behind: [("vm0".to_owned(), 1)].into(),
        entries: vec![entry],
        counters: [("learned".to_owned(), 1)].into(),
        ..FdbSnapshot::default()
    };
    Snapshot {
        version: 1,
        pid: 1,
        uptime_seconds: 60,
        clock_nanoseconds: 1,
        ports,
        fdb,
        workers: vec![worker],
        program: "0.1.0".to_owned(),
        process_seconds: Some(5),
        captures: vec![CaptureSnapshot::default()],
        ..Snapshot::default()
    }
}

fn stats() -> Stats {
    let counters =
        [("rx_queue_0_packets", 3), ("tx_queue_0_packets", 4), ("rx_packets", 7), ("rx_queue_x_packets", 9)];
    Stats { port: "vm0".to_owned(), counters: counters.map(|(name, count)| (name.to_owned(), count)).into() }
}

/// A reader of OpenMetrics, as strict as the specification: families do not interleave, a sample belongs to the family before it, a series comes once,
/// and `# EOF` ends it all. Returns each series with its value.
fn read(text: &str) -> BTreeMap<String, f64> {
    let mut lines = text.lines();
    let (mut family, mut kind, mut families, mut series) =
        (String::new(), "", BTreeSet::new(), BTreeMap::new());
    assert_eq!(lines.next_back(), Some("# EOF"));
    for line in lines {
        if let Some(help) = line.strip_prefix("# HELP ") {
            family = help.split_once(' ').unwrap().0.to_owned();
            assert!(families.insert(family.clone()), "{family} comes twice");
        } else if let Some(of) = line.strip_prefix("# TYPE ") {
            let (name, its) = of.split_once(' ').unwrap();
            assert_eq!(name, family);
            kind = its;
        } else {
            let (name, value) = line.rsplit_once(' ').unwrap();
            let bare = name.split('{').next().unwrap();
            let expected = match kind {
                "counter" => vec![format!("{family}_total")],
                "histogram" => ["bucket", "count", "sum"].map(|of| format!("{family}_{of}")).into(),
                _ => vec![family.clone()],
            };
            assert!(expected.iter().any(|expected| bare == expected), "{bare} of {expected:?}");
            assert!(series.insert(name.to_owned(), value.parse().unwrap()).is_none(), "{name} comes twice");
        }
    }
    series
}

#[test]
fn openmetrics_is_what_its_specification_says() {
    let series = read(&of_switch(&snapshot(3), &[stats()], Format::OpenMetrics));
    for (name, value) in [
        (r#"ringferry_port_rx_packets_total{port="vm0"}"#, 7.0),
        (r#"ringferry_port_work_seconds_total{port="vm1"}"#, 2.5),
        (r#"ringferry_port_later_total{port="vm2"}"#, 3.0),
        (r#"ringferry_port_dropped_packets_total{port="vm0",reason="vlan"}"#, 5.0),
        (r#"ringferry_port_dropped_packets_total{port="vm0",reason="storm"}"#, 0.0),
        (r#"ringferry_port_dropped_packets_total{port="vm0",reason="a-later-one"}"#, 2.0),
        (r#"ringferry_port_state{port="vm0",state="admin-down"}"#, 1.0),
        (r#"ringferry_port_up{port="vm0"}"#, 0.0),
        (
            r#"ringferry_port_info{port="vm0",kind="tap",peer="/run/\"odd\"\\\n.sock",mac="52:54:00:00:00:01"}"#,
            1.0,
        ),
        (r#"ringferry_queue_running{port="vm0",queue="0",role="receiveq"}"#, 1.0),
        (r#"ringferry_queue_running{port="vm0",queue="1",role="transmitq"}"#, 0.0),
        (r#"ringferry_queue_rx_packets_total{port="vm0",pair="0"}"#, 3.0),
        (r#"ringferry_worker_sleep_seconds_total{worker="0"}"#, 1.5),
        (r#"ringferry_worker_busy_seconds_total{worker="0"}"#, 0.25),
        (r#"ringferry_worker_polling_seconds_total{worker="0"}"#, 0.5),
        (r#"ringferry_worker_burst_packets_bucket{worker="0",le="1.0"}"#, 5.0),
        (r#"ringferry_worker_burst_packets_bucket{worker="0",le="4.0"}"#, 12.0),
        (r#"ringferry_worker_burst_packets_bucket{worker="0",le="+Inf"}"#, 22.0),
        (r#"ringferry_worker_burst_packets_count{worker="0"}"#, 22.0),
        (r#"ringferry_worker_round_seconds_bucket{worker="0",le="4.096e-6"}"#, 1.0),
        (r#"ringferry_worker_round_seconds_bucket{worker="0",le="0.016777216"}"#, 1.0),
        (r#"ringferry_worker_round_seconds_bucket{worker="0",le="+Inf"}"#, 3.0),
        (r#"ringferry_worker_round_seconds_sum{worker="0"}"#, 0.25),
        (r#"ringferry_fdb_addresses{port="vm0"}"#, 1.0),
        (r#"ringferry_fdb_addresses{port="vm2"}"#, 0.0),
    ] {
        assert_eq!(series.get(name), Some(&value), "{name} of {series:#?}");
    }
    assert!(!series.keys().any(|name| name.contains("Odd")), "{series:#?}");
}

#[test]
fn a_port_has_a_bounded_number_of_series_and_its_queues_none_unless_they_are_asked_for() {
    let count =
        |ports, queues: &[Stats]| read(&of_switch(&snapshot(ports), queues, Format::OpenMetrics)).len();
    let each = count(2, &[]) - count(1, &[]);
    assert_eq!(count(100, &[]), count(1, &[]) + 99 * each);
    assert!(each < 60, "{each} series for a port");
    assert!(count(1, &[stats()]) > count(1, &[]));
}

#[test]
fn every_help_of_a_direction_says_whose_it_is() {
    for (name, help) in
        PORT_COUNTERS.iter().filter(|(name, _)| name.ends_with("packets") || name.ends_with("bytes"))
    {
        let whose = if name.starts_with("rx") { "its guest has sent" } else { "its guest has received" };
        assert!(help.contains(whose) && help.contains("the switch has"), "{name}: {help}");
    }
}

#[test]
fn every_time_is_in_seconds() {
    let mut snapshot = snapshot(1);
    snapshot.ports[0].counters.insert("rx_paused_microseconds".to_owned(), 2_500_000);
    let text = of_switch(&snapshot, &[], Format::OpenMetrics);
    assert!(text.contains("ringferry_port_rx_paused_seconds_total{port=\"vm0\"} 2.5\n"), "{text}");
    assert!(!text.contains("microseconds"), "{text}");
}

#[test]
fn openmetrics_is_for_those_who_prefer_it() {
    for (accept, format) in [
        ("", Format::Text),
        ("*/*", Format::Text),
        ("text/plain", Format::Text),
        ("application/openmetrics-text", Format::OpenMetrics),
        (
            "application/openmetrics-text; version=0.0.1,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
            Format::OpenMetrics,
        ),
        ("application/openmetrics-text;version=1.0.0;q=0.3,text/plain;version=0.0.4;q=0.5", Format::Text),
        ("application/openmetrics-text;q=0", Format::Text),
        ("application/openmetrics-text;q=nan,text/plain", Format::Text),
        ("application/openmetrics-text-not", Format::Text),
    ] {
        assert_eq!(Format::accepted(accept), format, "{accept}");
    }
}

/// Prometheus's own checker, which knows the older format only.
#[test]
fn promtool_has_nothing_to_say() {
    let checker = Command::new("promtool")
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let mut checker = match checker {
        Ok(checker) => checker,
        Err(error) => {
            assert!(std::env::var_os("CI").is_none(), "promtool, of Debian's package prometheus: {error}");
            eprintln!("skipped: needs promtool, of Debian's package prometheus: {error}");
            return;
        }
    };
    let text = of_switch(&snapshot(3), &[stats()], Format::Text);
    checker.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let output = checker.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.is_empty(), "{said}\n{text}");
}
