//! `ringferry lab tenants`, with the program itself: innocent guests, a switch and an attacker in processes of their own, for a
//! moment. How long anything took is not looked at.

mod support;

use ringferry_rig::process::may;
use serde_json::Value;

/// Returns true if a row could not be measured, and says why.
fn skipped(row: &Value) -> bool {
    row["missing"]["reason"].as_str().is_some_and(|reason| !may(reason, false))
}

#[test]
fn every_figure_is_measured_without_an_attack_and_with_one() {
    let filter = "attack=(none|flood-64) .* switch=ringferry";
    let result = support::measure(&["tenants", "--runs=1", "--seconds=0.1", "--no-plot", "--filter", filter]);
    let rows = result["rows"].as_array().unwrap();
    if skipped(&rows[0]) {
        return;
    }
    for attack in ["none", "flood-64"] {
        let find = |figure: &str| {
            let found = rows.iter().find(|row| {
                row["labels"]["figure"] == figure
                    && row["labels"]["attack"] == attack
                    && row["repeats"].is_null()
            });
            found.unwrap_or_else(|| panic!("no {figure}: {rows:?}"))
        };
        let value =
            |figure: &str| find(figure)["values"][0].as_f64().unwrap_or_else(|| panic!("{}", find(figure)));
        let wait = find("wait-p99");
        assert_eq!(wait["bound"].as_f64(), Some(3000.0), "{wait}");
        // Another figure may be of another run, as the first row is measured twice.
        let p50 = wait["extra"]["wait p50 µs"][0].as_f64().unwrap();
        assert!(0.0 < p50 && p50 <= value("wait-p99"), "{wait}");
        assert!(value("wait-max") > 0.0);
        assert!((0.0..=100.0).contains(&value("share")), "{}", find("share"));
        for figure in ["lost", "rss", "vmsize", "descriptors", "log"] {
            assert!(value(figure) >= 0.0, "{}", find(figure));
        }
        for figure in ["connect-p99", "ctl-p99"] {
            assert!(value(figure) > 0.0, "{}", find(figure));
        }
        assert!(wait["extra"]["connects"][0].as_f64().unwrap() >= 1.0, "{wait}");
        assert_eq!(wait["extra"].get("attack operations/s").is_some(), attack != "none", "{wait}");
    }
}

#[test]
fn testpmd_is_attacked_in_the_same_way_or_missing() {
    let filter = "attack=flood-64 figure=(wait-p99|share|ctl-p99) switch=testpmd";
    let result = support::measure(&["tenants", "--runs=1", "--seconds=0.1", "--no-plot", "--filter", filter]);
    let rows = result["rows"].as_array().unwrap();
    let row = |figure: &str| rows.iter().find(|row| row["labels"]["figure"] == figure).unwrap();
    assert!(row("ctl-p99")["missing"]["reason"].is_string());
    if !skipped(row("wait-p99")) {
        assert!(row("wait-p99")["values"][0].as_f64().unwrap() > 0.0, "{}", row("wait-p99"));
    }
}

#[test]
fn open_vswitch_is_attacked_in_the_same_way_and_asked_for_its_ports_or_missing() {
    let filter = "attack=(flood-64|h3-segments) figure=(wait-p99|ctl-p99) switch=ovs-dpdk";
    let result = support::measure(&["tenants", "--runs=1", "--seconds=0.1", "--no-plot", "--filter", filter]);
    let rows = result["rows"].as_array().unwrap();
    let row = |start: &str| rows.iter().find(|row| row["name"].as_str().unwrap().starts_with(start)).unwrap();
    assert!(row("attack=h3-segments ")["missing"]["reason"].is_string());
    let wait = row("attack=flood-64 figure=wait-p99");
    if !skipped(wait) {
        assert!(wait["values"][0].as_f64().unwrap() > 0.0, "{wait}");
        assert!(wait["extra"]["ctl answers"][0].as_f64().unwrap() >= 1.0, "{wait}");
        assert_eq!(wait["extra"]["ctl failed"][0].as_f64(), Some(0.0), "{wait}");
    }
}
