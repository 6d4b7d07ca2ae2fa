//! `ringferry lab offloads`, with the program itself: a switch, two guests, and traffic.

mod support;

use ringferry_rig::process::may;

#[test]
fn ports_have_what_the_row_says_and_the_switch_does_the_rest() {
    let filter = "traffic=tcp from=all to=(all|none)$";
    let result = support::measure(&["offloads", "--runs=1", "--seconds=0.2", "--filter", filter]);
    let rows = result["rows"].as_array().unwrap();
    if let Some(reason) = rows[0]["missing"]["reason"].as_str() {
        may(reason, false);
        return;
    }
    let row = |to: &str| {
        let found = rows.iter().find(|row| row["labels"]["to"] == to && row["repeats"].is_null());
        let row = found.unwrap_or_else(|| panic!("no {to}: {rows:?}"));
        assert!(row["values"][0].as_f64().unwrap() > 0.0, "{row}");
        ["bytes/frame", "done in software"].map(|name| row["extra"][name][0].as_f64().unwrap())
    };
    let ([whole, untouched], [cut, done]) = (row("all"), row("none"));
    // Of 64 KiB where both take that, whatever the machine; of an MTU at most where the receiver takes nothing.
    assert!(whole > 1514.0 && untouched == 0.0, "{rows:?}");
    assert!(cut <= 1514.0 && done > 0.0, "{rows:?}");
}
