//! `ringferry lab replace`, with the program itself: guests that send while their switch is replaced, and killed. How long anything took is not
//! looked at.

mod support;

use ringferry_rig::process::may;

#[test]
fn guests_lose_nothing_by_a_replacement_and_go_on_after_a_kill() {
    let options = ["--option", "ports=4", "--option", "events=2", "--option", "pin=off"];
    let args = ["replace", "--runs=1", "--no-plot", "--filter", "ring=packed$"];
    let result = support::measure(&[&args[..], &options].concat());
    let rows = result["rows"].as_array().unwrap();
    if rows[0]["missing"]["reason"].as_str().is_some_and(|reason| !may(reason, false)) {
        return;
    }
    for event in ["none", "replace", "kill"] {
        let find = |figure: &str| {
            let found =
                rows.iter().find(|row| row["labels"]["figure"] == figure && row["labels"]["event"] == event);
            found.unwrap_or_else(|| panic!("no {figure}: {rows:?}"))
        };
        let value =
            |figure: &str| find(figure)["values"][0].as_f64().unwrap_or_else(|| panic!("{}", find(figure)));
        let median = find("gap-median");
        assert_eq!(median["extra"]["events"][0].as_f64(), Some(2.0), "{median}");
        assert!(0.0 < value("gap-median") && value("gap-median") <= value("gap-max"), "{median}");
        assert_eq!(value("disordered"), 0.0, "{event}");
        if event != "kill" {
            assert_eq!(value("lost"), 0.0, "{event}");
        }
    }
}
