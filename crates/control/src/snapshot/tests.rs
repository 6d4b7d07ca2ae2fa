//! The schema, and the texts made of it.

use std::collections::BTreeMap;

use ringferry_sys::tap::Offloads as TapOffloads;
use ringferry_virtio_net::Features;

use super::*;

fn named<const N: usize>(counts: [(&str, u64); N]) -> BTreeMap<String, u64> {
    counts.map(|(name, count)| (name.to_owned(), count)).into()
}

fn entry(vlan: u16, mac: &str, port: &str, age_seconds: u32, fixed: bool) -> FdbEntry {
    FdbEntry { vlan, mac: mac.parse().unwrap(), port: port.to_owned(), age_seconds, fixed }
}

fn example() -> Snapshot {
    let counters = [
        ("calls", 0),
        ("kicks", 77),
        ("rx_bytes", 1_850_000_000),
        ("rx_packets", 1_234_567),
        ("tx_packets", 0),
    ];
    let queue = QueueSnapshot {
        index: 0,
        role: QueueRole::Receiveq,
        size: 256,
        enabled: true,
        started: true,
        broken: None,
        last_avail: 300,
        last_used: 44,
        available: Some(200),
        stalled: None,
        grants: None,
    };
    let broken = QueueSnapshot {
        index: 1,
        role: QueueRole::Transmitq,
        broken: Some("descriptor loop".into()),
        ..queue.clone()
    };
    let vm0 = PortSnapshot {
        name: "vm0".into(),
        negotiated: Negotiated::VhostUser(Features::CSUM | Features::MRG_RXBUF),
        state: PortState::Broken,
        fault: None,
        peer: "/run/ringferry/vm0.sock".into(),
        mtu: 1500,
        mac: Some("52:54:00:00:00:01".parse().unwrap()),
        queues: vec![queue, broken],
        counters: named(counters),
        drops: named([("link-down", 0), ("no-receive-buffers", 12)]),
        rules: BTreeMap::new(),
        pairs: vec![],
        rates: vec![],
        another_waits: false,
        ended: None,
        stopped_seconds: None,
        front_end: None,
    };
    let tap = PortSnapshot {
        name: "uplink".into(),
        negotiated: Negotiated::Tap(TapOffloads::empty()),
        state: PortState::Up,
        fault: None,
        peer: "rf0".into(),
        mtu: 9000,
        mac: None,
        queues: vec![],
        counters: named([("rx_packets", 0)]),
        drops: BTreeMap::new(),
        rules: [("isolated".to_owned(), true.into()), ("vlan".to_owned(), 10.into())].into(),
        pairs: vec![],
        rates: vec![],
        another_waits: false,
        ended: None,
        stopped_seconds: None,
        front_end: None,
    };
    let fdb = FdbSnapshot {
        capacity: 64,
        behind: named([("uplink", 1), ("vm0", 1)]),
        entries: vec![
            entry(0, "52:54:00:00:00:02", "uplink", 10, false),
            entry(0, "52:54:00:00:00:01", "vm0", 5, false),
        ],
        counters: named([("aged", 0), ("learned", 2)]),
        restless: vec![],
        lost: vec![],
    };
    Snapshot {
        version: VERSION,
        pid: 42,
        uptime_seconds: 3725,
        clock_nanoseconds: 7,
        ports: vec![vm0, tap],
        fdb,
        workers: vec![WorkerSnapshot {
            polls: 10,
            busy_polls: 5,
            sleeps: 3,
            wakeups: 2,
            sleep_nanoseconds: Some(4),
            busy_percent: 12.34,
            ..WorkerSnapshot::default()
        }],
        ..Snapshot::default()
    }
}

/// Programs parse this: a change here is a change of the interface.
#[test]
fn json_schema_is_stable() {
    let json = serde_json::to_value(example()).unwrap();
    assert_eq!(json["version"], 1);
    assert_eq!(json["ports"][0]["state"], "broken");
    assert_eq!(json["ports"][0]["counters"]["rx_packets"], 1_234_567);
    assert_eq!(json["ports"][0]["drops"]["no-receive-buffers"], 12);
    assert_eq!(json["ports"][0]["queues"][1]["role"], "transmitq");
    assert_eq!(json["ports"][0]["queues"][1]["broken"], "descriptor loop");
    assert_eq!(
        json["fdb"]["entries"][1],
        serde_json::json!({"vlan": 0, "mac": "52:54:00:00:00:01", "port": "vm0", "age_seconds": 5})
    );
    assert_eq!(json["fdb"]["counters"]["learned"], 2);
    assert_eq!(json["workers"][0]["busy_percent"], 12.34);
    let keys =
        |value: &serde_json::Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>().join(" ");
    assert_eq!(keys(&json), "clock_nanoseconds fdb pid ports uptime_seconds version workers");
    assert_eq!(keys(&json["ports"][0]), "counters drops features kind mac mtu name peer queues rules state");
    assert_eq!(json["ports"][0]["rules"], serde_json::json!({}));
    assert_eq!(json["ports"][1]["rules"], serde_json::json!({"isolated": true, "vlan": 10}));
}

#[test]
fn json_reads_back_and_later_fields_are_ignored() {
    let mut json = serde_json::to_value(example()).unwrap();
    json["ports"][0]["added_later"] = 1.into();
    assert_eq!(serde_json::from_value::<Snapshot>(json).unwrap(), example());
}

#[test]
fn a_port_out_of_service_says_why() {
    let mut snapshot = example();
    snapshot.ports[0].fault = Some("its kick event never falls silent".into());
    assert!(snapshot.to_text().contains("\n  fault: its kick event never falls silent\n"));
    let json = serde_json::to_value(&snapshot).unwrap();
    assert_eq!(json["ports"][0]["fault"], "its kick event never falls silent");
    assert_eq!(serde_json::from_value::<Snapshot>(json).unwrap(), snapshot);
}

#[test]
fn state_names_are_those_of_json() {
    for state in [
        PortState::Up,
        PortState::Listening,
        PortState::Connecting,
        PortState::Down,
        PortState::NoMemory,
        PortState::Broken,
    ] {
        assert_eq!(serde_json::to_value(state).unwrap(), state.name());
    }
}

#[test]
fn text_is_aligned_and_complete() {
    let expected = "\
ringferry, process 42, up 1 h 2 min, 2 of 64 MAC addresses
worker 0: awake 12.3 % of its life, 10 polls, 5 of them with packets, 3 sleeps, 2 wakeups

PORT    KIND        STATE    MTU  RX PACKETS  RX BYTES  TX PACKETS  TX BYTES  DROPS
vm0     vhost-user  broken  1500       1.23M     1.85G           0         0     12
uplink  tap         up      9000           0         0           0         0      0

PORT  QUEUE  ROLE       SIZE  AVAILABLE  STATE
vm0       0  receiveq    256        200  running
vm0       1  transmitq   256        200  broken: descriptor loop

vm0: /run/ringferry/vm0.sock, 52:54:00:00:00:01
  features: CSUM MRG_RXBUF
  counters: kicks 77
  drops: no-receive-buffers 12

uplink: rf0
  rules: isolated=true vlan=10
";
    assert_eq!(example().to_text(), expected);
    assert_eq!(
        example().fdb_to_text(),
        "MAC                PORT     AGE\n52:54:00:00:00:02  uplink  10 s\n52:54:00:00:00:01  vm0      5 s\n"
    );
}

#[test]
fn of_many_ports_only_those_that_are_not_well_are_shown_whole() {
    let mut snapshot = example();
    let [vm0, tap] = &snapshot.ports[..] else { panic!() };
    let (vm0, tap) = (vm0.clone(), tap.clone());
    let named = |number| PortSnapshot { name: format!("up{number}"), ..tap.clone() };
    snapshot.ports = (0..99).map(named).chain([vm0]).collect();
    let text = snapshot.to_text();
    assert!(text.lines().count() < 130, "{text}");
    assert!(text.contains("up98") && !text.contains("up98: rf0") && text.contains("vm0: /run/"), "{text}");
    assert!(text.ends_with(
        "of the 99 ports that are well, or wait for their guests, are not shown: `ringferry ctl show PORT` has them.\n"
    ));
    assert!(text.contains("\n100 ports: 1 broken, 99 up\n"), "{text}");
    // What waits is no trouble, and what is up may be.
    let stall = StallSnapshot { entries: 3, seconds: 9 };
    let stalled = |mut port: PortSnapshot| {
        port.state = PortState::Up;
        port.queues.iter_mut().for_each(|queue| queue.broken = None);
        port.queues[0].stalled = Some(stall);
        port
    };
    let waits = PortSnapshot { state: PortState::Listening, ..snapshot.ports[0].clone() };
    let faulty = PortSnapshot {
        name: "worse".to_owned(),
        fault: Some("its bridge is down".to_owned()),
        ..snapshot.ports[0].clone()
    };
    let vm0 = stalled(snapshot.ports.pop().unwrap());
    snapshot.ports.splice(0..3, [waits, vm0, faulty]);
    let text = snapshot.to_text();
    assert!(text.contains("\n99 ports: 1 faulty, 1 listening, 1 stalled, 96 up\n"), "{text}");
    assert!(!text.contains("\nup0: ") && text.contains("\nvm0: ") && text.contains("\nworse: "), "{text}");
}

/// The example, measured.
fn measured() -> Snapshot {
    let mut snapshot = example();
    let rates = |window: u64, packets: f64| Rates {
        window,
        seconds: window as f64,
        counters: [
            ("rx_packets", packets),
            ("rx_bytes", packets * 1000.0),
            ("rx_bursts", packets / 16.0),
            ("kicks", 2.0),
            ("tx_bursts", 10.0),
            ("tx_starved", 4.0),
            ("tx_starved_microseconds", 250_000.0),
        ]
        .map(|(name, rate)| (name.to_owned(), rate))
        .into(),
        drops: [("no-receive-buffers".to_owned(), 0.5)].into(),
    };
    snapshot.ports[0].rates = vec![rates(1, 387_500.0), rates(10, 48_000.0), rates(60, 8_000.0)];
    snapshot.ports[0].pairs = vec![PairSnapshot {
        pair: 0,
        worker: 0,
        counters: named([("rx_packets", 7)]),
        rates: vec![rates(10, 3.0)],
    }];
    let load = |window, busy_percent| WorkerLoad {
        window,
        seconds: 1.0,
        busy_percent,
        polling_percent: 2.0,
        sleeping_percent: 98.0 - busy_percent,
        run_delay_percent: 1.5,
        wakeups: 1200.0,
        bursts: 3.0,
        ports: [("vm0".to_owned(), 70.4), ("uplink".to_owned(), 29.6)].into(),
    };
    snapshot.workers[0].load = vec![load(1, 91.25), load(10, 90.0), load(60, 44.0)];
    snapshot
}

#[test]
fn nothing_dropped_has_no_sign() {
    assert!(!Rates::default().dropped().is_sign_negative());
}

#[test]
fn load_and_rates_are_shown_over_three_windows() {
    let text = measured().to_text();
    let expected = "
WORKER  BUSY 1 S    10 S    60 S  POLLING  ASLEEP  RUN DELAY  WAKEUPS/S  WORKS FOR
     0    91.2 %  90.0 %  44.0 %    2.0 %   8.0 %      1.5 %      1.20k  vm0 70 %, uplink 30 %

PORT ";
    assert!(text.contains(expected), "{text}");
    let expected = "
BIT/S OF  RX 1 S  10 S   60 S  TX 1 S  10 S  60 S  RX PACKETS/S  TX PACKETS/S  DROPS/S
vm0        3.10G  384M  64.0M       0     0     0         48.0k             0     0.50

PORT ";
    assert!(text.contains(expected), "{text}");
}

#[test]
fn a_port_has_a_page_of_its_own() {
    let text = measured().of_port("vm0").unwrap().page_to_text();
    for part in [
        "vm0: /run/ringferry/vm0.sock, 52:54:00:00:00:01\n  features: CSUM MRG_RXBUF\nvhost-user, broken, MTU 1500\n",
        "WORKER  PAIRS  BUSY 1 S    10 S    60 S  FOR THIS PORT\n     0  0        91.2 %  90.0 %  44.0 %           70 %\n",
        "QUEUE  ROLE       SIZE  AVAILABLE  FULL  WORKER  STATE\n    0  receiveq    256        200  78 %       0  running\n",
        "COUNTER     TOTAL  PER SECOND 1 S   10 S   60 S\nkicks          77               2      2      2\n",
        "rx_packets  1.23M            388k  48.0k  8.00k\n",
        "packets received in a burst         16.0    16.0    16.0\n",
        "time without receive buffers      25.0 %  25.0 %  25.0 %\n",
        "bursts for which buffers ran out  40.0 %  40.0 %  40.0 %\n",
        "no-receive-buffers: 12 dropped, per second 0.50 in the last 1 s, 0.50 in 10 s, 0.50 in 60 s\n",
        "  What to do: Some loss is normal",
        "\n1 MAC address behind it",
    ] {
        assert!(text.contains(part), "{part}\n---\n{text}");
    }
    assert!(!text.contains("uplink: rf0"));
    let error = measured().of_port("vm9").unwrap_err();
    assert_eq!(error, "there is no port \"vm9\"; the ports are: vm0, uplink");
}

#[test]
fn columns_are_those_that_are_asked_for() {
    let columns = |names: &[&str]| names.iter().map(|name| Column::of(name).unwrap()).collect::<Vec<_>>();
    let ports = columns(&["port", "worker", "rx-bps", "batch", "starved", "posted", "waiting", "rules"]);
    let expected = "\
PORT    WORKER  RX BIT/S  BATCH  STARVED   POSTED  WAITING  RULES
vm0          0      384M   16.0   25.0 %  200/256        -
uplink       -         -      -        -        -        -  isolated=true vlan=10
";
    assert_eq!(measured().columns_to_text(&ports, None), expected);
    let pairs = columns(&["port", "queue", "worker", "rx-packets", "rx-pps", "drops", "posted"]);
    let expected = "\
PORT  QUEUE  WORKER  RX PACKETS  RX PACKETS/S  DROPS   POSTED
vm0       0       0           7             3      -  200/256
";
    assert_eq!(measured().columns_to_text(&pairs, Some(10)), expected);
    let all = measured().columns_to_text(COLUMNS, Some(60));
    assert_eq!(all.lines().count(), 2, "a row for each pair, as one of the columns is the pair");
    let names: std::collections::BTreeSet<_> = COLUMNS.iter().map(|column| column.name).collect();
    assert_eq!(names.len(), COLUMNS.len());
    assert_eq!(Column::of("rx_pps").unwrap().name, "rx-pps", "counters have underscores");
    assert!(
        Column::of("moon").unwrap_err().to_string().contains("the columns are: port, queue, worker, kind")
    );
}

#[test]
fn vlans_are_shown_where_there_are_any() {
    let entries = vec![
        entry(0, "52:54:00:00:00:01", "uplink", 0, true),
        entry(7, "52:54:00:00:00:01", "vm0", 5, false),
    ];
    let text = Snapshot { fdb: FdbSnapshot { entries, ..example().fdb }, ..example() }.fdb_to_text();
    let expected = "\
VLAN  MAC                PORT       AGE
   0  52:54:00:00:00:01  uplink  static
   7  52:54:00:00:00:01  vm0        5 s
";
    assert_eq!(text, expected);
}

#[test]
fn reasons_are_explained_where_there_are_drops() {
    let mut snapshot = example();
    snapshot.ports[1].drops = named([("no-receive-buffers", 3), ("moon-phase", 1)]);
    let reason = crate::DropReason::NoReceiveBuffers;
    let expected = format!(
        "moon-phase: uplink 1\n  A reason that this version of ctl does not know.\n\n\
         no-receive-buffers (counted at the receiver): vm0 12, uplink 3\n  {}\n  What to do: {}\n",
        reason.meaning(),
        reason.remedy()
    );
    assert_eq!(snapshot.reasons_to_text(), expected);
    assert_eq!(Snapshot::default().reasons_to_text(), "no packet was dropped\n");
}
