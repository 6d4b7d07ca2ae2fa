//! `ringferry lab rxbuf` with kernel traffic, with the program itself: a switch, two guests, and traffic.

mod support;

use ringferry_rig::process::may;
use serde_json::Value;

/// The rows whose names match, one short run each.
fn lab(filter: &str) -> Value {
    support::measure(&["rxbuf", "--runs=1", "--seconds=0.1", "--option", "kernel=all", "--filter", filter])
}

#[test]
fn guests_receive_with_the_buffers_they_were_told_to_have_and_say_what_they_cost() {
    let result = lab("workload=gso device=kernel policy=(mtu|page)$");
    let rows = result["rows"].as_array().unwrap();
    if let Some(reason) = rows[0]["missing"]["reason"].as_str() {
        may(reason, false);
        return;
    }
    let extra = |row: &Value, name: &str| row["extra"][name][0].as_f64().unwrap();
    for (policy, length) in [("mtu", 1536.0), ("page", 4096.0)] {
        let row = rows.iter().find(|row| row["labels"]["policy"] == policy && row["repeats"].is_null());
        let row = row.unwrap();
        assert!(row["values"][0].as_f64().unwrap() > 0.0, "{row}");
        assert_eq!((extra(row, "buffer"), extra(row, "sender's buffer")), (length, length), "{row}");
        assert!(extra(row, "descriptors/packet") >= 1.0 && extra(row, "truesize/payload") >= 1.0, "{row}");
    }
    // Many of the packets are of 64 KiB, whatever the machine.
    let descriptors = |policy: &str| {
        extra(rows.iter().find(|row| row["labels"]["policy"] == policy).unwrap(), "descriptors/packet")
    };
    assert!(descriptors("mtu") > descriptors("page"));
}
