use std::sync::atomic::{AtomicBool, Ordering};

use clap::Parser;
use ringferry_control::channels::QueueSteering;
use ringferry_control::firewall::{Denials, FirewallReport, Firewalls};
use ringferry_control::mirror::Mirror;
use ringferry_control::snapshot::{Negotiated, PortSnapshot, PortState, Rates, Snapshot};
use ringferry_control::trace::TracedFrame;
use ringferry_control::wire::{Wire, WireChange, WireDirection, Wires};
use ringferry_control::{ControlServer, PortAction, ReloadStep, Response};
use ringferry_rig::schema;

use super::*;

#[derive(clap::Parser)]
struct Program {
    #[command(flatten)]
    ctl: CtlArgs,
}

/// A port that has received something.
fn port(name: &str) -> PortSnapshot {
    PortSnapshot {
        name: name.to_owned(),
        negotiated: Negotiated::Tap(ringferry_sys::tap::Offloads::empty()),
        state: PortState::Up,
        fault: None,
        peer: "rf0".to_owned(),
        mtu: 1500,
        mac: None,
        queues: Vec::new(),
        counters: [("rx_packets".to_owned(), 7)].into(),
        drops: Default::default(),
        rules: Default::default(),
        pairs: Vec::new(),
        another_waits: false,
        ended: None,
        stopped_seconds: None,
        front_end: None,
        rates: vec![Rates {
            window: 10,
            seconds: 10.0,
            counters: [("rx_packets".to_owned(), 0.5)].into(),
            drops: Default::default(),
        }],
    }
}

/// Runs `ringferry ctl` with these arguments against a switch that answers with a known state. JSON must be as its schema says.
fn ctl(arguments: &[&str]) -> Result<String, CtlError> {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("control.sock");
    let mut server = ControlServer::bind(&path, 0o600).unwrap();
    let mut arguments = arguments.to_vec();
    arguments.extend(["--control", path.to_str().unwrap()]);
    let args = Program::try_parse_from([&["ctl"], arguments.as_slice()].concat()).unwrap().ctl;
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                server.serve(&mut |request| {
                    Response::Ok(match request {
                        Request::Show { .. } => Answer::Show(Box::new(Snapshot {
                            pid: 42,
                            ports: vec![port("vm0"), port("vm1")],
                            ..Snapshot::default()
                        })),
                        Request::Dump => Answer::Dump("[switch]\n".into()),
                        Request::Channels { combined: Some(0), .. } => {
                            return Response::Error("0 is too few".into());
                        }
                        Request::Channels { port, combined } => {
                            let combined = combined.unwrap_or(1);
                            Answer::Channels(Channels { port, max_combined: 4, combined, started: 4 })
                        }
                        Request::Steering { port } => {
                            Answer::Steering(Steering { port, by: "chance".into(), ..Steering::default() })
                        }
                        Request::Assign { worker: 9, .. } => {
                            return Response::Error("there is no worker 9".into());
                        }
                        Request::Assign { port, queue, worker, .. } => {
                            let worker = Some(worker);
                            let queue = QueueSteering { queue, worker, ..QueueSteering::default() };
                            Answer::Steering(Steering { port, queues: vec![queue], ..Steering::default() })
                        }
                        Request::Stats { port, queues } => {
                            let counters = [("queues".to_owned(), queues.into())].into();
                            Answer::Stats(Stats { port, counters })
                        }
                        Request::Explain { port } => {
                            Answer::Explain(Explanation { port, mtu: 1500, ..Explanation::default() })
                        }
                        Request::Replace { .. } => return Response::Error("nobody asks".into()),
                        Request::Rules { port } => {
                            let rules =
                                [("allowed_ips".to_owned(), serde_json::json!(["10.0.0.2", "fd00::/64"]))];
                            Answer::Rules(PortRules { port, rules: rules.into() })
                        }
                        Request::Denials { .. } => Answer::Denials(Denials::default()),
                        Request::Firewalls => Answer::Firewalls(Firewalls::default()),
                        Request::Firewall { port, .. } => {
                            Answer::Firewall(Box::new(FirewallReport { port, ..FirewallReport::default() }))
                        }
                        Request::Capture(_) => return Response::Error("no capture".into()),
                        Request::Link { port, up } => Answer::LinkChanged(LinkChange { port, up, told: up }),
                        Request::Mirrors => Answer::Mirrors(Mirrors::default()),
                        Request::Trace(asked) => {
                            let frame = TracedFrame {
                                from: asked.from,
                                queue: asked.queue,
                                source: asked.source.unwrap_or_default(),
                                destination: asked.to,
                                vlan: asked.vlan,
                                protocol: asked.protocol,
                                size: asked.size.unwrap_or(60),
                                gso: asked.gso,
                                csum: asked.csum,
                            };
                            let (steps, delivered, dropped) = (Vec::new(), Vec::new(), Vec::new());
                            let (verdict, remedy) = ("Delivered to nobody.".to_owned(), String::new());
                            Answer::Trace(Box::new(Trace {
                                frame,
                                steps,
                                delivered,
                                dropped,
                                verdict,
                                remedy,
                            }))
                        }
                        Request::Diagnose => Answer::Diagnoses(vec![Diagnosis {
                            port: "vm1".to_owned(),
                            seconds: 10.0,
                            ..Diagnosis::default()
                        }]),
                        Request::Why { port, peer } => {
                            Answer::Why(Diagnosis { port, peer, seconds: 10.0, ..Diagnosis::default() })
                        }
                        Request::AddMirror { from, to, direction, vlan } => {
                            let (copied, lost) = (0, 0);
                            let mirror = Mirror { from, to, direction, vlan, copied, lost, to_state: None };
                            Answer::Mirrors(Mirrors { mirrors: vec![mirror] })
                        }
                        Request::RemoveMirror { from, to } => {
                            return Response::Error(format!("{from:?} is not mirrored to {to:?}"));
                        }
                        Request::Wires { wire } => match wire.as_deref() {
                            Some("nobody") => return Response::Error("there is no wire \"nobody\"".into()),
                            _ => Answer::Wires(Wires { wires: vec![wire_of(&[], None)] }),
                        },
                        Request::SetWire { settings, from, runtime, .. } => {
                            Answer::WireChanged(changed(wire_of(&settings, from), false, !runtime))
                        }
                        Request::ResetWire { from, runtime, .. } => {
                            Answer::WireChanged(changed(wire_of(&[], from), false, !runtime))
                        }
                        Request::AddWire { ports, name, settings, runtime } => {
                            let wire = Wire {
                                name: name.unwrap_or_else(|| ports.join("--")),
                                ..wire_of(&settings, None)
                            };
                            Answer::WireChanged(changed(wire, false, !runtime))
                        }
                        Request::RemoveWire { runtime, .. } => {
                            Answer::WireChanged(changed(wire_of(&[], None), true, !runtime))
                        }
                        Request::FlushFdb { port, vlan, mac } => {
                            let said = [port.is_some(), vlan.is_some(), mac.is_some()];
                            let forgotten = said.iter().filter(|said| **said).count() as u64;
                            Answer::FdbFlushed(FdbFlush { forgotten })
                        }
                        Request::AddFdb { mac, port, vlan, runtime } => {
                            let rules = [(mac, vlan.unwrap_or(0).into())].into();
                            Answer::SettingsChanged(SettingsChange {
                                port,
                                rules,
                                persistent: !runtime,
                                note: "so".to_owned(),
                                ..SettingsChange::default()
                            })
                        }
                        Request::RemoveFdb { mac, .. } => {
                            return Response::Error(format!("{mac} is no static address"));
                        }
                        Request::Add { runtime, .. } => Answer::PortChanged(PortChange::new(
                            "vm2",
                            PortAction::Added,
                            !runtime,
                            "in rf.toml".to_owned(),
                        )),
                        Request::Remove { if_exists: false, port, .. } => {
                            return Response::Error(format!("there is no port {port:?}"));
                        }
                        Request::Remove { port, runtime, .. } => Answer::PortChanged(PortChange::new(
                            &port,
                            PortAction::Nothing,
                            runtime,
                            "there is no such port".to_owned(),
                        )),
                        Request::Reload { dry_run } => Answer::Reloaded(Reload {
                            dry_run,
                            steps: vec![ReloadStep {
                                port: "vm0".to_owned(),
                                action: PortAction::Added,
                                what: "a tap port".to_owned(),
                                error: (!dry_run).then(|| "no room".to_owned()),
                            }],
                            ..Reload::default()
                        }),
                        Request::Set { port, settings, runtime } => {
                            let rules = settings.into_iter().map(|setting| (setting, runtime.into()));
                            let (rules, note) = (rules.collect(), "in rf.toml".to_owned());
                            Answer::SettingsChanged(SettingsChange {
                                port,
                                rules,
                                persistent: !runtime,
                                note,
                                ..SettingsChange::default()
                            })
                        }
                        Request::Unset { port, runtime, .. } => {
                            let (rules, note) = (Default::default(), "there is no file".to_owned());
                            Answer::SettingsChanged(SettingsChange {
                                port,
                                rules,
                                persistent: runtime,
                                note,
                                ..SettingsChange::default()
                            })
                        }
                    })
                });
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        let mut out = Vec::new();
        let result = run(&args, &mut out, None);
        done.store(true, Ordering::Relaxed);
        let text = String::from_utf8(out).unwrap();
        if args.command.is_json() {
            schema::assert_described(&[&["ctl"], arguments.as_slice()].concat(), &text);
        }
        result.map(|()| text)
    })
}

#[test]
fn show_prints_text_or_json() {
    assert!(ctl(&["show"]).unwrap().starts_with("ringferry, process 42, up 0 s"));
    let json: serde_json::Value = serde_json::from_str(&ctl(&["show", "--json"]).unwrap()).unwrap();
    assert_eq!(json["pid"], 42);
}

#[test]
fn show_has_one_port_columns_and_repeats() {
    let text = ctl(&["show", "vm1"]).unwrap();
    assert!(text.starts_with("vm1: rf0\n") && text.contains("rx_packets      7"), "{text}");
    let error = ctl(&["show", "vm9"]).unwrap_err().to_string();
    assert_eq!(error, "the switch refuses: there is no port \"vm9\"; the ports are: vm0, vm1");
    let json: serde_json::Value = serde_json::from_str(&ctl(&["show", "vm1", "--json"]).unwrap()).unwrap();
    assert_eq!((json["ports"].as_array().unwrap().len(), &json["ports"][0]["name"]), (1, &"vm1".into()));
    let text = ctl(&["show", "--columns", "port,rx-pps,worker", "--window", "10"]).unwrap();
    assert_eq!(text, "PORT  RX PACKETS/S  WORKER\nvm0           0.50       -\nvm1           0.50       -\n");
    let underscored = ctl(&["show", "--columns", "port,rx_pps,worker", "--window", "10"]).unwrap();
    assert_eq!(underscored, text);
    let text = ctl(&["show", "--columns", "port", "--watch", "1", "--count", "2"]).unwrap();
    assert_eq!(text, "PORT\nvm0\nvm1\n\nPORT\nvm0\nvm1\n\n");
    let text = ctl(&["show", "--json", "--watch", "--count", "1"]).unwrap();
    assert_eq!(text.lines().count(), 1);
    serde_json::from_str::<Snapshot>(&text).unwrap();
    let error = match Program::try_parse_from(["ctl", "show", "--columns", "port,moon"]) {
        Err(error) => error.to_string(),
        Ok(_) => panic!("there is no such column"),
    };
    assert!(error.contains("there is no column \"moon\"; the columns are: port, queue, worker"), "{error}");
    for wrong in
        [&["--columns", "port", "--json"][..], &["--window", "10"], &["--count", "3"], &["--watch", "0"]]
    {
        assert!(Program::try_parse_from([&["ctl", "show"], wrong].concat()).is_err(), "{wrong:?}");
    }
}

#[test]
fn a_switch_that_is_not_there_is_waited_for() {
    let show = ShowArgs { watch: Some(1), count: Some(1), ..ShowArgs::default() };
    let text = |show| {
        let args = CtlArgs {
            control: Some("/nonexistent/c.sock".into()),
            timeout: 1,
            command: CtlCommand::Show(show),
        };
        let mut out = Vec::new();
        run(&args, &mut out, None).unwrap();
        String::from_utf8(out).unwrap()
    };
    assert!(text(show.clone()).contains("start one with `ringferry run`"));
    let json: serde_json::Value = serde_json::from_str(&text(ShowArgs { json: true, ..show })).unwrap();
    assert_eq!(json["kind"], "not-running");
}

#[test]
fn reasons_are_text_alone() {
    assert_eq!(ctl(&["show", "--reasons"]).unwrap(), "no packet was dropped\n");
    assert!(Program::try_parse_from(["ctl", "show", "--reasons", "--json"]).is_err());
}

#[test]
fn fdb_and_dump_print_their_part() {
    assert_eq!(ctl(&["fdb"]).unwrap(), "MAC  PORT  AGE\n");
    let json: serde_json::Value = serde_json::from_str(&ctl(&["fdb", "--json"]).unwrap()).unwrap();
    assert_eq!(json["entries"], serde_json::json!([]));
    assert_eq!(ctl(&["dump"]).unwrap(), "[switch]\n");
}

#[test]
fn channels_are_shown_and_changed() {
    let text = ctl(&["channels", "eth0"]).unwrap();
    assert!(text.starts_with("Channel parameters for eth0:\n") && text.contains("Combined: 1\n"), "{text}");
    let json: serde_json::Value =
        serde_json::from_str(&ctl(&["channels", "eth0", "combined", "3", "--json"]).unwrap()).unwrap();
    assert_eq!(json["combined"], 3);
    let error = ctl(&["channels", "eth0", "combined", "0"]).unwrap_err();
    assert_eq!(error.to_string(), "the switch refuses: 0 is too few");
    for wrong in [&["channels"][..], &["channels", "eth0", "combined"], &["channels", "eth0", "rx", "2"]] {
        assert!(Program::try_parse_from([&["ctl"], wrong].concat()).is_err(), "{wrong:?}");
    }
}

#[test]
fn a_pair_is_assigned_to_a_worker() {
    let json: serde_json::Value =
        serde_json::from_str(&ctl(&["assign", "eth0", "1", "3", "--json"]).unwrap()).unwrap();
    assert_eq!((&json["queues"][0]["queue"], &json["queues"][0]["worker"]), (&1.into(), &3.into()));
    assert!(ctl(&["assign", "eth0", "1", "2"]).unwrap().contains("WORKER\n    1  disabled  any       2\n"));
    let error = ctl(&["assign", "eth0", "1", "9"]).unwrap_err();
    assert_eq!(error.to_string(), "the switch refuses: there is no worker 9");
    assert!(Program::try_parse_from(["ctl", "assign", "eth0", "1"]).is_err());
}

#[test]
fn why_prints_text_or_json() {
    assert!(ctl(&["why", "vm0"]).unwrap().starts_with("vm0, measured over the last 10 s\n"));
    assert!(ctl(&["why", "vm0", "vm1"]).unwrap().starts_with("vm0 and vm1, measured"));
    let json: serde_json::Value = serde_json::from_str(&ctl(&["why", "vm0", "--json"]).unwrap()).unwrap();
    assert_eq!((&json["port"], &json["findings"]), (&"vm0".into(), &serde_json::json!([])));
    let all = ctl(&["why"]).unwrap();
    assert!(all.starts_with("1 ports, measured over the last 10 s\n\nNothing that stops"), "{all}");
    let json: serde_json::Value = serde_json::from_str(&ctl(&["why", "--json"]).unwrap()).unwrap();
    assert_eq!(json[0]["port"], "vm1");
}

#[test]
fn trace_asks_for_what_was_said_and_prints_text_or_json() {
    let text = ctl(&["trace", "vm0/52:54:00:00:00:01", "vm1", "tcp4", "--vlan", "10", "--gso", "1448"]);
    let first = "an imaginary frame from vm0 (queue 0): 52:54:00:00:00:01 to vm1, with a tag of VLAN 10, tcp4, 60 bytes, to be cut every 1448 bytes\n";
    assert_eq!(text.unwrap(), format!("{first}\nDelivered to nobody.\n"));
    let json = ctl(&["trace", "vm0", "broadcast", "--json", "--size", "99"]).unwrap();
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!((&json["frame"]["protocol"], &json["frame"]["size"]), (&"raw".into(), &99.into()));
    for wrong in [
        &["vm0"][..],
        &["vm0/52:54:00:00:00:zz", "vm1"],
        &["vm0", "vm1", "tcp"],
        &["vm0", "vm1", "tcp4", "--gso", "0"],
    ] {
        assert!(Program::try_parse_from([&["ctl", "trace"], wrong].concat()).is_err(), "{wrong:?}");
    }
}

#[test]
fn explain_prints_text_or_json() {
    assert!(ctl(&["explain", "eth0"]).unwrap().starts_with("eth0: takes nothing; "));
    let json: serde_json::Value =
        serde_json::from_str(&ctl(&["explain", "eth0", "--json"]).unwrap()).unwrap();
    assert_eq!((json["mtu"].as_u64(), json["ways"].as_array().unwrap().len()), (Some(1500), 0));
}

#[test]
fn steering_and_stats_print_text_or_json() {
    assert!(ctl(&["steering", "eth0"]).unwrap().starts_with("Steering of eth0: chance\n"));
    assert_eq!(ctl(&["stats", "eth0", "--queues"]).unwrap(), "Statistics for eth0:\n     queues: 1\n");
    let json: serde_json::Value = serde_json::from_str(&ctl(&["stats", "eth0", "--json"]).unwrap()).unwrap();
    assert_eq!(json["counters"]["queues"], 0);
}

#[test]
fn rules_are_shown_and_changed() {
    assert_eq!(ctl(&["rules", "vm0"]).unwrap(), "rules of vm0:\n  allowed_ips=10.0.0.2,fd00::/64\n");
    let json: serde_json::Value = serde_json::from_str(&ctl(&["rules", "vm0", "--json"]).unwrap()).unwrap();
    assert_eq!(json["rules"]["allowed_ips"][1], "fd00::/64");
    assert_eq!(
        ctl(&["set", "vm0", "vlan=10", "isolated=on"]).unwrap(),
        "rules of vm0:\n  isolated=on=false\n  vlan=10=false\nkept: in rf.toml\n"
    );
    assert_eq!(
        ctl(&["unset", "vm0", "vlan"]).unwrap(),
        "vm0 has no rules\nnot kept when the switch ends: there is no file\n"
    );
    let json = ctl(&["set", "vm0", "vlan=10", "--runtime", "--json"]).unwrap();
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!((&json["persistent"], &json["rules"]["vlan=10"]), (&false.into(), &true.into()));
    for wrong in [&["set", "vm0"][..], &["unset", "vm0"], &["rules"]] {
        assert!(Program::try_parse_from([&["ctl"], wrong].concat()).is_err(), "{wrong:?}");
    }
}

#[test]
fn ports_are_added_and_removed() {
    assert_eq!(ctl(&["add", "vhost-user:/vm2.sock"]).unwrap(), "vm2 added\nkept: in rf.toml\n");
    let text = ctl(&["add", "tap:vm2", "--runtime"]).unwrap();
    assert_eq!(text, "vm2 added\nnot kept when the switch ends: in rf.toml\n");
    assert_eq!(ctl(&["remove", "vm9", "--if-exists"]).unwrap(), "vm9: there is no such port\n");
    let error = ctl(&["remove", "vm9"]).unwrap_err();
    assert_eq!(error.to_string(), "the switch refuses: there is no port \"vm9\"");
    let json: serde_json::Value = serde_json::from_str(&ctl(&["add", "tap:vm2", "--json"]).unwrap()).unwrap();
    assert_eq!((&json["port"], &json["done"]), (&"vm2".into(), &"added".into()));
}

#[test]
fn a_reload_that_is_incomplete_is_an_error_after_its_plan() {
    let text = ctl(&["reload", "--dry-run"]).unwrap();
    assert_eq!(text, "+ vm0: a tap port\n1 port would change; nothing was done\n");
    assert!(matches!(ctl(&["reload"]), Err(CtlError::Incomplete)));
    // As JSON the plan has said it.
    assert!(matches!(ctl(&["reload", "--json"]), Err(CtlError::Told)));
}

/// Runs `ringferry ctl`, which must fail and say why as JSON.
fn refused(arguments: &[&str]) -> serde_json::Value {
    let args = Program::try_parse_from([&["ctl"], arguments].concat()).unwrap().ctl;
    let mut out = Vec::new();
    assert!(run(&args, &mut out, None).unwrap_err().is_told());
    let text = String::from_utf8(out).unwrap();
    schema::assert_described(&[&["ctl"], arguments].concat(), &text);
    serde_json::from_str(&text).unwrap()
}

#[test]
fn with_json_errors_are_json_and_nothing_else() {
    let error = refused(&["show", "--json", "--control", "/nonexistent/c.sock"]);
    assert_eq!(error["kind"], "not-running");
    assert!(error["error"].as_str().unwrap().contains("start one with `ringferry run`"));
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("control.sock");
    let mut server = ControlServer::bind(&path, 0o600).unwrap();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                server.serve(&mut |_| Response::Error("there is no port \"x\"".into()));
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        let error = refused(&["rules", "x", "--json", "--control", path.to_str().unwrap()]);
        done.store(true, Ordering::Relaxed);
        assert_eq!(error, serde_json::json!({ "error": "there is no port \"x\"", "kind": "refused" }));
    });
}

#[test]
fn addresses_and_mirrors_are_changed() {
    assert_eq!(ctl(&["fdb", "flush"]).unwrap(), "0 addresses forgotten\n");
    let text = ctl(&["fdb", "flush", "--port", "vm0", "--vlan", "3", "--mac", "52:54:00:00:00:01"]).unwrap();
    assert_eq!(text, "3 addresses forgotten\n");
    assert_eq!(ctl(&["fdb", "flush", "--json", "--vlan", "0"]).unwrap(), "{\n  \"forgotten\": 1\n}\n");
    let text = ctl(&["fdb", "add", "52:54:00:00:00:01", "vm0", "--vlan", "10", "--runtime"]).unwrap();
    assert_eq!(text, "rules of vm0:\n  52:54:00:00:00:01=10\nnot kept when the switch ends: so\n");
    let error = ctl(&["fdb", "del", "52:54:00:00:00:01"]).unwrap_err();
    assert_eq!(error.to_string(), "the switch refuses: 52:54:00:00:00:01 is no static address");
    assert_eq!(ctl(&["link", "vm0", "up"]).unwrap(), "vm0 is up; its guest was told\n");
    let text = ctl(&["link", "vm0", "down"]).unwrap();
    assert!(
        text.starts_with("vm0 is down: no packet passes it; whoever is behind it was not told"),
        "{text}"
    );
    assert_eq!(ctl(&["mirror"]).unwrap(), "no port is mirrored\n");
    assert_eq!(ctl(&["mirror", "list"]).unwrap(), "no port is mirrored\n");
    let text = ctl(&["mirror", "add", "vm0", "probe", "--direction", "in", "--vlan", "7"]).unwrap();
    let words: Vec<_> = text.split_whitespace().skip(6).collect();
    assert_eq!(words, ["vm0", "probe", "in", "7", "0", "0"]);
    let json: serde_json::Value =
        serde_json::from_str(&ctl(&["mirror", "add", "vm0", "probe", "--json"]).unwrap()).unwrap();
    assert_eq!(json["mirrors"][0]["to"], "probe");
    assert!(ctl(&["mirror", "remove", "vm0", "probe"]).unwrap_err().to_string().contains("not mirrored"));
    for wrong in
        [&["fdb", "add", "52:54:00:00:00:01"][..], &["mirror", "add", "vm0"], &["fdb", "--json", "flush"]]
    {
        assert!(Program::try_parse_from([&["ctl"], wrong].concat()).is_err(), "{wrong:?}");
    }
}

/// A wire whose direction from `from` has these settings.
fn wire_of(settings: &[String], from: Option<String>) -> Wire {
    let pairs = settings.iter().filter_map(|setting| setting.split_once('='));
    let impairments = pairs.map(|(key, value)| (key.to_owned(), value.into())).collect();
    let (from, to) = (from.unwrap_or_else(|| "r1".to_owned()), "r2".to_owned());
    let to_state = Some(PortState::Up);
    let direction =
        WireDirection { from, to, joined: true, to_state, impairments, ..WireDirection::default() };
    Wire { name: "w".to_owned(), seed: 7, seed_is_set: true, directions: vec![direction] }
}

fn changed(wire: Wire, removed: bool, persistent: bool) -> Box<WireChange> {
    Box::new(WireChange { wire, removed, persistent, note: "so".to_owned() })
}

#[test]
fn wires_are_shown_and_changed() {
    let text = ctl(&["wire"]).unwrap();
    assert!(text.contains("w: seed 7\n  r1 to r2: no impairments\n"), "{text}");
    assert_eq!(ctl(&["wire", "show", "w"]).unwrap(), text);
    let text = ctl(&["wire", "set", "w", "delay=1ms", "loss=1%", "--from", "r9", "--runtime"]).unwrap();
    assert_eq!(text, "w: seed 7\n  r9 to r2: delay=1ms loss=1%\nnot kept when the switch ends: so\n");
    assert_eq!(ctl(&["wire", "reset", "w"]).unwrap(), "w: seed 7\n  r1 to r2: no impairments\nkept: so\n");
    let text = ctl(&["wire", "add", "r1", "r2", "rate=1gbit"]).unwrap();
    assert_eq!(text, "r1--r2: seed 7\n  r1 to r2: rate=1gbit\nkept: so\n");
    assert_eq!(ctl(&["wire", "remove", "w"]).unwrap(), "w removed\nthe removal is kept: so\n");
    let json: serde_json::Value = serde_json::from_str(&ctl(&["wire", "--json"]).unwrap()).unwrap();
    assert_eq!(json["wires"][0]["directions"][0]["to"], "r2");
    let json: serde_json::Value =
        serde_json::from_str(&ctl(&["wire", "add", "r1", "r2", "--name", "x", "--json"]).unwrap()).unwrap();
    assert_eq!((&json["wire"]["name"], &json["removed"]), (&"x".into(), &false.into()));
    assert!(ctl(&["wire", "show", "nobody"]).unwrap_err().to_string().contains("there is no wire"));
    for wrong in [&["wire", "set", "w"][..], &["wire", "add", "r1"], &["wire", "--json", "reset", "w"]] {
        assert!(Program::try_parse_from([&["ctl"], wrong].concat()).is_err(), "{wrong:?}");
    }
}

#[test]
fn absent_switch_is_an_error_with_a_remedy() {
    let args = CtlArgs { control: Some("/nonexistent/c.sock".into()), timeout: 1, command: CtlCommand::Dump };
    let error = run(&args, &mut Vec::new(), None).unwrap_err().to_string();
    assert!(error.contains("start one with `ringferry run`, or say which one with --control"), "{error}");
}

#[test]
fn reader_that_leaves_is_no_error() {
    struct Full(io::ErrorKind);
    impl Write for Full {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(self.0.into())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    assert!(print("x", &mut Full(io::ErrorKind::BrokenPipe)).is_ok());
    assert!(matches!(print("x", &mut Full(io::ErrorKind::StorageFull)), Err(CtlError::Output(_))));
}
