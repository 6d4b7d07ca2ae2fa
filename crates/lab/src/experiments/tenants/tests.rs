//! Plans and options; what runs is tried by `tests/tenants.rs`.

use std::collections::BTreeSet;

use super::*;
use crate::experiment::Source;

#[test]
fn rows_have_names_of_their_own_and_no_attack_is_the_baseline_of_their_group_and_unit() {
    let plan = Tenants.plan(&Setup::planning(2, &[])).unwrap();
    let names: BTreeSet<String> = plan.rows.iter().map(Row::name).collect();
    assert_eq!(names.len(), plan.rows.len());
    for row in &plan.rows {
        let Some(baseline) = &row.baseline else {
            assert!(row.name().starts_with("attack=none "), "{}", row.name());
            continue;
        };
        let found = plan.rows.iter().find(|other| other.name() == *baseline).unwrap();
        assert_eq!((&found.group, &found.unit, found.bound), (&row.group, &row.unit, row.bound));
    }
}

#[test]
fn every_attack_is_in_the_plan_and_in_the_documentation() {
    let text = include_str!("../../../../../docs/lab.md");
    let section = text.split("\n## tenants\n").nth(1).unwrap();
    let section = section.split("\n## ").next().unwrap();
    let plan = Tenants.plan(&Setup::planning(2, &[])).unwrap();
    for attack in Attack::ALL {
        let name = attack.name();
        assert!(section.contains(&format!("`{name}`")), "docs/lab.md does not name the attack {name}");
        for who in Who::ALL {
            let wanted = who != Who::Testpmd || attack.on_testpmd();
            let start = format!("attack={name} figure=share switch={who}");
            assert_eq!(plan.rows.iter().any(|row| row.name() == start), wanted, "{start}");
        }
    }
    for figure in Figure::ALL {
        assert!(section.contains(&format!("`{figure}`")), "docs/lab.md does not name the figure {figure}");
    }
    for option in OPTIONS {
        assert!(section.contains(&format!("`--option {}=", option.name)), "{}", option.name);
    }
}

#[test]
fn an_attack_is_ordered_by_its_name() {
    for attack in Attack::ALL {
        let text = serde_json::to_string(&attack).unwrap();
        assert_eq!(text, format!("\"{}\"", attack.name()));
        assert_eq!(serde_json::from_str::<Attack>(&text).unwrap(), attack);
    }
    assert!(serde_json::from_str::<Attack>("\"flood\"").is_err());
}

#[test]
fn what_cannot_be_had_of_a_peer_says_why() {
    let plan = Tenants.plan(&Setup::planning(2, &[])).unwrap();
    let reason = |start: &str| {
        let row = plan.rows.iter().find(|row| row.name().starts_with(start)).unwrap();
        match &row.source {
            Source::Missing(missing) => missing.reason.clone(),
            Source::Measured(_) => String::new(),
        }
    };
    // Where it is not installed, or cannot be started, that is why.
    let why = reason("attack=h3-segments figure=share switch=ovs-dpdk");
    assert!(
        ["HOST_TSO4", "needs Open vSwitch", "/nonexistent/"].iter().any(|text| why.contains(text)),
        "{why}"
    );
    assert_ne!(reason("attack=none figure=ctl-p99 switch=testpmd"), "");
    assert!(reason("attack=m5-other-worker figure=share switch=ringferry").contains("two workers"));
    assert_eq!(reason("attack=m6-semaphore-kick figure=share switch=ringferry"), "");
}

#[test]
fn what_cannot_be_measured_says_why_and_options_are_checked() {
    let one = Tenants.plan(&Setup::planning(1, &[])).unwrap();
    for row in &one.rows {
        let Source::Missing(missing) = &row.source else { panic!("{} can be measured", row.name()) };
        assert!(missing.reason.contains("two processors"));
    }
    for wrong in [("workers", "0"), ("workers", "17"), ("segment", "two"), ("pin", "on")] {
        assert!(Tenants.plan(&Setup::planning(2, &[wrong])).is_err(), "{wrong:?}");
    }
}
