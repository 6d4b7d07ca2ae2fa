//! `ringferry lab queues` with kernel sockets, with the program itself: a switch with workers, two guests with queue
//! pairs, and traffic.

mod support;

use ringferry_rig::process::may;
use serde_json::Value;

/// The rows whose names match, one short run each; nothing where no kernel traffic can be had.
fn lab(filter: &str) -> Option<Vec<Value>> {
    let options = ["queues", "--runs=1", "--seconds=0.2", "--option", "queues=1,2", "--filter", filter];
    let result = support::measure(&options);
    let rows = result["rows"].as_array().unwrap().clone();
    if let Some(reason) = rows[0]["missing"]["reason"].as_str() {
        may(reason, false);
        return None;
    }
    Some(rows)
}

/// One figure of the first run, 0 where there is none.
fn extra(row: &Value, name: &str) -> f64 {
    row["extra"][name][0].as_f64().unwrap_or_default()
}

#[test]
fn both_figures_of_kernel_traffic_over_one_queue_pair_and_over_two() {
    let Some(rows) = lab("test=(rr size=256 sessions=4|crr size=1 sessions=20|receive size=512 sessions=4) ")
    else {
        return;
    };
    for row in &rows {
        assert!(row["values"][0].as_f64().unwrap() > 0.0, "{row}");
        let labels = &row["labels"];
        if labels["per"] != "second" || !row["repeats"].is_null() {
            continue;
        }
        let shares = |name: &str| [0, 1].map(|queue| extra(row, &format!("{name} {queue} share")));
        if labels["queues"] == "2" {
            for [first, second] in [shares("rx"), shares("tx")] {
                assert!((first + second - 1.0).abs() < 1e-9, "{row}");
            }
        } else {
            assert_eq!(shares("rx"), [0.0; 2]);
        }
        for who in ["switch", "guests", "sockets"] {
            assert!(extra(row, &format!("CPUs, {who}")) > 0.0, "{row}");
        }
        assert_eq!(extra(row, "p99 µs") > 0.0, labels["test"] != "receive", "{row}");
        assert!(extra(row, "bytes/packet") > 40.0, "{row}");
    }
    let count = |test: &str| rows.iter().filter(|row| row["labels"]["test"] == test).count();
    // One queue and two, over time and over processor time, and the first of each group once more.
    assert_eq!([count("rr"), count("crr"), count("receive")], [6; 3]);
}

#[test]
fn sixteen_queue_pairs_can_be_set_up_and_one_used() {
    let Some(rows) = lab("test=rr size=1 sessions=1 queues=1 offered=16 per=second") else { return };
    assert!(rows[0]["values"][0].as_f64().unwrap() > 0.0, "{}", rows[0]);
    // The other pairs have carried nothing.
    for name in ["rx", "tx"] {
        assert!((1..16).all(|pair| extra(&rows[0], &format!("{name} {pair} share")) == 0.0), "{}", rows[0]);
    }
}
