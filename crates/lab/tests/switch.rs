//! `ringferry lab switch`, with the program itself: the switch in a process of its own between guests and taps of the
//! lab's, a moment of each figure.

mod support;

use std::sync::{Mutex, PoisonError};

use ringferry_rig::process::may;
use serde_json::Value;

/// Each of these wants two processors to itself.
static ALONE: Mutex<()> = Mutex::new(());

/// The rows whose names match, one short run each.
fn lab(filter: &str) -> Vec<Value> {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let options = ["--option", "trial=0.03", "--option", "precision=25"];
    let switch = ["switch", "--runs=1", "--seconds=0.1", "--filter", filter];
    let result = support::measure(&[&switch[..], &options].concat());
    result["rows"].as_array().unwrap().clone()
}

/// Returns true if a row could not be measured, and says why.
fn skipped(row: &Value) -> bool {
    row["missing"]["reason"].as_str().is_some_and(|reason| !may(reason, false))
}

/// One figure of the first run.
fn extra(row: &Value, name: &str) -> f64 {
    row["extra"][name][0].as_f64().unwrap_or_else(|| panic!("no {name}: {row}"))
}

/// Looks at the figures of one run of our switch, by what they are called.
fn good(rows: &[Value], ends: &str) {
    let find = |figure: &str| {
        let found = rows.iter().find(|row| row["labels"]["figure"] == figure && row["repeats"].is_null());
        let row = found.unwrap_or_else(|| panic!("no {figure}: {rows:?}"));
        assert_eq!(row["labels"]["ends"], ends);
        row
    };
    let value = |figure: &str| find(figure)["values"][0].as_f64().unwrap();
    let rate = find("rate");
    assert!(value("rate") > 0.0 && extra(rate, "Gbit/s") > 0.0, "{rate}");
    assert!(extra(rate, "CPUs, switch") > 0.0, "{rate}");
    for share in ["misordered share", "late share", "stray share"] {
        assert_eq!(extra(rate, share), 0.0, "{rate}");
    }
    assert!((0.0..=1.0).contains(&extra(rate, "lost share")), "{rate}");
    assert!(value("pdr") >= 0.0 && value("ndr") >= 0.0, "{rows:?}");
    assert!(extra(find("ndr"), "trials") >= 1.0);
    for load in ["10%", "50%", "90%"] {
        let row = find(&format!("p99-at-{load}"));
        let [p50, p999, max] = ["p50 µs", "p99.9 µs", "max µs"].map(|name| extra(row, name));
        let p99 = row["values"][0].as_f64().unwrap();
        assert!(0.0 < p50 && p50 <= p99 && p99 <= p999 && p999 <= max, "{row}");
        assert!(extra(row, "frames") > 0.0, "{row}");
    }
    let wake_up = find("wake-up");
    assert!(0.0 < value("wake-up") && value("wake-up") <= extra(wake_up, "p99 µs"), "{wake_up}");
    assert!(value("cpu") > 0.0);
    assert!(value("idle-cpu") < 50.0, "{}", find("idle-cpu"));
}

#[test]
fn every_figure_of_ours_between_guests_and_the_kernels_side_of_a_tap() {
    let rows = lab("(guest-guest ports=2 frames=64|tap.* ports=2 frames=1500) .* switch=ringferry$");
    for (ends, frames) in [("guest-guest", "64"), ("guest-tap", "1500"), ("tap-guest", "1500")] {
        let rows: Vec<Value> = rows
            .iter()
            .filter(|row| row["labels"]["ends"] == ends && row["labels"]["frames"] == frames)
            .cloned()
            .collect();
        if !skipped(&rows[0]) {
            good(&rows, ends);
        }
    }
}

#[test]
fn a_peer_is_measured_on_the_same_ends_or_missing_with_what_to_install() {
    let rows = lab("ends=guest-guest .* frames=64 .* figure=rate switch=(testpmd-mac|ovs-dpdk|bridge)");
    let named = |name: &str| {
        rows.iter().find(|row| row["labels"]["switch"] == name && row["repeats"].is_null()).unwrap()
    };
    for name in ["testpmd-mac", "ovs-dpdk", "bridge"] {
        let row = named(name);
        match row["missing"].as_object() {
            // Open vSwitch is nowhere mandatory.
            Some(missing) if name == "ovs-dpdk" => {
                assert_eq!(
                    missing["package"].as_str().unwrap_or("openvswitch-switch-dpdk"),
                    "openvswitch-switch-dpdk"
                );
                eprintln!("skipped: {}", missing["reason"]);
            }
            Some(_) => assert!(skipped(row)),
            None => {
                assert!(row["values"][0].as_f64().unwrap() > 0.0, "{row}");
                assert_eq!(extra(row, "misordered share"), 0.0, "{row}");
            }
        }
        assert_eq!(
            row["goal"].as_f64(),
            [("testpmd-mac", 1.3), ("ovs-dpdk", 2.0)]
                .iter()
                .find(|(of, _)| *of == name)
                .map(|(_, goal)| *goal)
        );
    }
}
