//! Answers of a running switch and a running guest, recorded as they went over the socket and as `ringferry ctl` printed them, stay as
//! they are to the byte. Programs read both: a change here is a change of the interface.
//!
//! `show` has vhost-user ports and a tap; `xen` has an entry for Xen guests and one of its interfaces.

use ringferry_control::{Answer, Response};

fn recorded(name: &str) -> String {
    let path = format!("{}/tests/recorded/{name}", env!("CARGO_MANIFEST_DIR"));
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn response(name: &str) -> Response {
    serde_json::from_str(&recorded(&format!("{name}.json"))).unwrap()
}

fn text(answer: &Answer) -> String {
    match answer {
        Answer::Show(snapshot) => snapshot.to_text(),
        Answer::Guest(snapshot) => snapshot.to_text(),
        Answer::Dump(text) => text.clone(),
        Answer::Channels(channels) => channels.to_text(),
        Answer::Steering(steering) => steering.to_text(),
        Answer::Stats(stats) => stats.to_text(),
        Answer::Explain(explanation) => explanation.to_text(),
        Answer::Why(diagnosis) => diagnosis.to_text(),
        Answer::Diagnoses(all) => ringferry_control::why::all_to_text(all),
        Answer::Trace(trace) => trace.to_text(),
        Answer::Rules(rules) => rules.to_text(),
        Answer::Firewall(report) => report.to_text(),
        Answer::Firewalls(all) => all.to_text(),
        Answer::Denials(denials) => denials.to_lines(0).unwrap(),
        Answer::SettingsChanged(change) => change.to_text(),
        Answer::PortChanged(change) => change.to_text(),
        Answer::Reloaded(reload) => reload.to_text(),
        Answer::Replacing { .. } => unreachable!("nothing of it is shown"),
        Answer::LinkChanged(change) => change.to_text(),
        Answer::Mirrors(mirrors) => mirrors.to_text(),
        Answer::Wires(wires) => wires.to_text(),
        Answer::WireChanged(change) => change.to_text(),
        Answer::FdbFlushed(flush) => flush.to_text(),
        Answer::Capture(_) => panic!("it means nothing without its descriptors"),
    }
}

#[test]
fn what_is_read_is_written_as_it_was() {
    let names = [
        "show",
        "xen",
        "guest",
        "dump",
        "channels",
        "steering",
        "stats",
        "explain-vm0",
        "explain-vm1",
        "explain-uplink",
        "rules",
        "set",
        "error",
    ];
    for name in names {
        let line = serde_json::to_string(&response(name)).unwrap() + "\n";
        assert_eq!(line, recorded(&format!("{name}.json")), "{name}");
    }
}

#[test]
fn texts_are_as_they_were() {
    let names = [
        "show",
        "xen",
        "guest",
        "channels",
        "steering",
        "stats",
        "explain-vm0",
        "explain-vm1",
        "explain-uplink",
        "rules",
        "set",
    ];
    for name in names {
        let Response::Ok(answer) = response(name) else { panic!("{name} is no answer") };
        assert_eq!(text(&answer), recorded(&format!("{name}.txt")), "{name}");
    }
    let Response::Ok(Answer::Show(snapshot)) = response("xen") else { panic!("no snapshot") };
    assert_eq!(snapshot.fdb_to_text(), recorded("fdb.txt"));
}

/// An older `ctl` shows what it can of a later switch.
#[test]
fn what_only_later_versions_have_is_kept_or_left_out() {
    let mut json: serde_json::Value = serde_json::from_str(&recorded("show.json")).unwrap();
    let port = &mut json["ok"]["show"]["ports"][0];
    port["kind"] = "xdp".into();
    port["features"] = serde_json::json!(["zero-copy"]);
    port["drops"]["moon-phase"] = 7.into();
    json["ok"]["show"]["ports"][1]["features"] = serde_json::json!(["CSUM", "LATER", "BIT_45"]);
    json["ok"]["show"]["later"] = true.into();
    let Response::Ok(Answer::Show(snapshot)) = serde_json::from_value(json.clone()).unwrap() else {
        panic!("no snapshot")
    };
    let text = snapshot.to_text();
    assert!(text.contains("  features: zero-copy\n") && text.contains("moon-phase 7"), "{text}");
    let back = serde_json::to_value(&snapshot).unwrap();
    assert_eq!(back["ports"][0], json["ok"]["show"]["ports"][0]);
    assert_eq!(back["ports"][1]["features"], serde_json::json!(["CSUM", "BIT_45"]));
}

#[test]
fn addresses_that_are_none_are_refused() {
    for (path, text) in [("/ok/show/ports/0/mac", "52:54"), ("/ok/show/fdb/entries/0/mac", "x")] {
        let mut json: serde_json::Value = serde_json::from_str(&recorded("show.json")).unwrap();
        *json.pointer_mut(path).unwrap() = text.into();
        let error = serde_json::from_value::<Response>(json).unwrap_err();
        assert!(error.to_string().contains("is not an Ethernet address"), "{error}");
    }
}
