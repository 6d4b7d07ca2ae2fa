//! `ringferry lab replace`, with the program itself: guests and taps that send while their switch is replaced, and killed. How long anything
//! took is not looked at.

mod support;

use ringferry_rig::process::may;

const PARTNERS: [&str; 3] = ["guest", "tap", "ringferry-guest"];

#[test]
fn nobody_loses_anything_by_a_replacement_and_all_go_on_after_a_kill() {
    let options = ["--option", "ports=4", "--option", "events=1", "--option", "pin=off"];
    let args = ["replace", "--runs=1", "--no-plot", "--filter", "ring=packed$"];
    let result = support::measure(&[&args[..], &options].concat());
    let rows = result["rows"].as_array().unwrap();
    let missing = |row: &serde_json::Value| row["missing"]["reason"].as_str().map(str::to_owned);
    if rows.iter().find_map(missing).is_some_and(|reason| !may(&reason, false)) {
        return;
    }
    let events = ["none", "replace", "kill"];
    for (event, partner) in events.iter().flat_map(|event| PARTNERS.map(|partner| (*event, partner))) {
        let find = |figure: &str| {
            let labels = [("event", event), ("figure", figure), ("partner", partner)];
            let found =
                rows.iter().find(|row| labels.iter().all(|(name, value)| row["labels"][name] == *value));
            found.unwrap_or_else(|| panic!("no {figure}: {rows:?}"))
        };
        let value =
            |figure: &str| find(figure)["values"][0].as_f64().unwrap_or_else(|| panic!("{}", find(figure)));
        let median = find("gap-median");
        assert_eq!(median["extra"]["events"][0].as_f64(), Some(1.0), "{median}");
        assert!(0.0 < value("gap-median") && value("gap-median") <= value("gap-max"), "{median}");
        // A worker that is killed has a burst in its hands, and the next knows no address. Beside other tests the thread of the ends may not run
        // just then: what all flows have under way, 200 frames each, is then sent to all.
        let most = if event == "kill" { 4.0 * 200.0 } else { 0.0 };
        assert!(value("lost") <= most && value("disordered") <= most, "{event}, {partner}: {rows:?}");
    }
}
