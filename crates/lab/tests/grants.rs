//! `ringferry lab grants`, by the lab as a process: the front end is a process of its own. The counts must be
//! right, however long they took; frames that go astray, and pages that stay mapped, fail the run by themselves.

mod support;

use serde_json::Value;

/// The rows whose names match, one short run each.
fn lab(filter: &str) -> Value {
    support::measure(&["grants", "--runs=1", "--seconds=0.02", "--filter", filter])
}

fn extra(row: &Value, name: &str) -> f64 {
    row["extra"][name][0].as_f64().unwrap()
}

#[test]
fn modes_cost_the_calls_copies_and_mappings_that_they_are_about() {
    for (filter, pages) in [("size=1496 queues=1", 1.0), ("size=65535 queues=1", 16.0)] {
        let result = lab(&format!("^direction.*{filter}"));
        for row in result["rows"].as_array().unwrap() {
            if extra(row, "hit share") == 0.0 && extra(row, "calls/packet") == 0.0 {
                // A machine so busy that nothing went through the window.
                assert_eq!(row["values"][0], 0.0, "{row}");
                continue;
            }
            let [calls, copies, maps] =
                ["calls/packet", "copies/packet", "maps/packet"].map(|name| extra(row, name));
            match row["labels"]["mode"].as_str().unwrap() {
                "persistent" | "static" => {
                    assert!(calls < 0.2 && copies < 0.2 && extra(row, "hit share") > 0.9, "{row}");
                }
                "copy" => assert!(copies >= pages && maps == 0.0 && calls <= 2.0 * pages, "{row}"),
                // Neighbouring pages are mapped by one call.
                "map" => assert!(maps >= pages && copies == 0.0 && calls > 0.0, "{row}"),
                other => panic!("{other}"),
            }
        }
    }
}

#[test]
fn several_queues_carry_frames_and_a_small_cache_keeps_to_its_bound() {
    let result = lab("size=64 queues=2 mode=(persistent|copy)|test=bound direction=receive .*pages=(64|16)$");
    let rows = result["rows"].as_array().unwrap();
    assert_eq!(rows.iter().filter(|row| row["repeats"].is_null()).count(), 6);
    for row in rows {
        if let Some(pages) = row["labels"]["pages"].as_str() {
            assert!(extra(row, "KiB mapped") <= 4.0 * pages.parse::<f64>().unwrap(), "{row}");
        }
    }
}
