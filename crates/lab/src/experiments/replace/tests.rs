//! Plans and options; what runs is tried by `tests/replace.rs`.

use std::collections::BTreeSet;

use super::*;
use crate::experiment::Source;

#[test]
fn rows_have_names_of_their_own_and_no_event_is_the_baseline_of_their_group_and_unit() {
    let plan = Replace.plan(&Setup::planning(2, &[])).unwrap();
    let names: BTreeSet<String> = plan.rows.iter().map(Row::name).collect();
    assert_eq!(names.len(), plan.rows.len());
    for row in &plan.rows {
        let Some(baseline) = &row.baseline else {
            assert!(row.name().starts_with("event=none "), "{}", row.name());
            continue;
        };
        let found = plan.rows.iter().find(|other| other.name() == *baseline).unwrap();
        assert_eq!((&found.group, &found.unit), (&row.group, &row.unit));
    }
}

#[test]
fn every_event_figure_ring_and_option_is_in_the_documentation() {
    let text = include_str!("../../../../../docs/lab.md");
    let section = text.split("\n## replace\n").nth(1).unwrap();
    let section = section.split("\n## ").next().unwrap();
    let plan = Replace.plan(&Setup::planning(2, &[])).unwrap();
    let words: BTreeSet<String> = plan
        .rows
        .iter()
        .flat_map(|row| row.name().split([' ', '=']).map(str::to_owned).collect::<Vec<_>>())
        .collect();
    for word in words {
        assert!(section.contains(&format!("`{word}`")), "docs/lab.md does not name {word}");
    }
    for option in OPTIONS {
        assert!(section.contains(&format!("`--option {}=", option.name)), "{}", option.name);
    }
}

#[test]
fn what_cannot_be_measured_says_why_and_options_are_checked() {
    let one = Replace.plan(&Setup::planning(1, &[])).unwrap();
    for row in &one.rows {
        let Source::Missing(missing) = &row.source else { panic!("{} can be measured", row.name()) };
        assert!(missing.reason.contains("two processors"));
    }
    for wrong in
        [("ports", "3"), ("ports", "0"), ("ports", "66"), ("workers", "17"), ("events", "0"), ("pin", "on")]
    {
        assert!(Replace.plan(&Setup::planning(2, &[wrong])).is_err(), "{wrong:?}");
    }
}
