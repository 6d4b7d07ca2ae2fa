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
    };
    let fdb = FdbSnapshot {
        capacity: 64,
        entries: vec![
            entry(0, "52:54:00:00:00:02", "uplink", 10, false),
            entry(0, "52:54:00:00:00:01", "vm0", 5, false),
        ],
        counters: named([("aged", 0), ("learned", 2)]),
    };
    Snapshot {
        version: VERSION,
        pid: 42,
        uptime_seconds: 3725,
        ports: vec![vm0, tap],
        fdb,
        workers: vec![WorkerSnapshot {
            polls: 10,
            busy_polls: 5,
            sleeps: 3,
            wakeups: 2,
            busy_percent: 12.34,
        }],
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
    assert_eq!(keys(&json), "fdb pid ports uptime_seconds version workers");
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
fn a_port_in_quarantine_says_why() {
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
worker 0: busy 12.3 %, 10 polls, 5 of them with packets, 3 sleeps, 2 wakeups

PORT    KIND        STATE    MTU  RX PACKETS  RX BYTES  TX PACKETS  TX BYTES  DROPS
vm0     vhost-user  broken  1500       1.23M     1.85G           0         0     12
uplink  tap         up      9000           0         0           0         0      0

PORT  QUEUE  ROLE       SIZE  STATE
vm0       0  receiveq    256  running
vm0       1  transmitq   256  broken: descriptor loop

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
