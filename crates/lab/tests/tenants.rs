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
        assert_eq!(find("service-p99")["bound"].as_f64(), Some(3000.0), "{wait}");
        assert!(value("service-p99") > 0.0);
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

/// Runs every attack for a moment. Nothing is said of how much the innocent guests suffer.
#[test]
fn every_attack_does_something_and_the_switch_answers_afterwards() {
    let output = support::lab(&["list", "tenants"]).output().unwrap();
    let list = String::from_utf8(output.stdout).unwrap();
    let rows = list.lines().filter_map(|line| line.trim().strip_prefix("attack="));
    let attacks: Vec<&str> = rows
        .filter_map(|row| row.split_once(" figure=wait-p99 switch=ringferry"))
        .map(|(name, _)| name)
        .collect();
    assert!(attacks.len() > 20 && attacks.contains(&"m5-other-worker"), "{list}");
    for attack in attacks.into_iter().filter(|attack| *attack != "none") {
        let folder = tempfile::tempdir().unwrap();
        let order = serde_json::json!({
            "case": { "attack": attack, "who": "Ringferry" },
            "folder": folder.path(),
            "cpus": null,
            // With one there is no ring between two.
            "workers": 2,
            "one_segment": false,
            "seconds": 0.05,
            "huge_pages": false,
            "testpmd": null,
        });
        let mut run = support::lab(&["child", "--program"]);
        let output =
            run.arg(support::program()).args(["tenants", "run", &order.to_string()]).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{attack}: {said}");
        let outcome: Value = serde_json::from_slice(&output.stdout).unwrap();
        let extra = |name: &str| {
            let found = outcome["extra"].as_array().unwrap().iter().find(|extra| extra[0] == name);
            found.and_then(|extra| extra[1].as_f64()).unwrap_or_else(|| panic!("no {name}: {outcome}"))
        };
        assert!(extra("attack operations") + extra("attack refused") > 0.0, "{attack}: {outcome}");
        assert_eq!(extra("answers afterwards"), 1.0, "{attack}: {outcome}");
    }
}
