//! Runs of a few milliseconds: frames must come out right, however fast.

use std::time::Duration;

use ringferry_rig::process::may;

use super::case::{Doorbell, Ring};
use super::*;
use crate::experiment::Source;
use crate::stop::Stop;

#[test]
fn every_way_of_ours_forwards_all_flows_in_order_with_new_addresses() {
    let cpus = ringferry_sys::cpu::allowed().unwrap();
    // Both threads may share a processor: the check does not depend on time.
    let cpus = [cpus[0], cpus[cpus.len() - 1]];
    let stop = Stop::new();
    let run =
        Run { seconds: Duration::from_millis(5), seed: 1, round: 1, sample: 1, cpus: &cpus, stop: &stop };
    for case in Case::all().into_iter().filter(|case| case.who == Who::Ringferry) {
        let sample = measure::measure(&case, &run, None).unwrap();
        let shares: f64 =
            (0..case.how.queues).map(|queue| sample.extra[&format!("queue {queue} share")]).sum();
        assert!((shares - 1.0).abs() < 1e-9, "{case:?}");
        if case.how.queues > 1 {
            let fair = 1.0 / case.how.queues as f64;
            assert!(
                (0..case.how.queues).all(|queue| sample.extra[&format!("queue {queue} share")] > fair / 2.0)
            );
        }
        // A packet may be sent after the last that was received.
        match case.how.doorbell {
            Doorbell::Polled => assert!(!sample.extra.contains_key("doorbells/packet")),
            Doorbell::Packet => assert!(sample.extra["doorbells/packet"] > 0.9, "{sample:?}"),
            Doorbell::Burst | Doorbell::Ladder => {
                assert!(sample.extra["doorbells/packet"] <= 1.1, "{sample:?}");
            }
        }
    }
}

#[test]
fn testpmd_forwards_the_same_frames() {
    let cpus = ringferry_sys::cpu::allowed().unwrap();
    let Some(program) = ringferry_rig::testpmd::find().filter(|_| cpus.len() > 1) else {
        may("needs dpdk-testpmd and two processors: apt-get install dpdk-dev librte-net-virtio23", false);
        return;
    };
    let stop = Stop::new();
    let run =
        Run { seconds: Duration::from_millis(5), seed: 1, round: 1, sample: 1, cpus: &cpus, stop: &stop };
    for ring in [Ring::Split, Ring::PackedInOrder] {
        let case =
            Case::all().into_iter().find(|case| case.who == Who::Testpmd && case.ring == ring).unwrap();
        measure::measure(&case, &run, Some(&program)).unwrap();
    }
}

#[test]
fn one_processor_is_too_few_for_any_row() {
    let plan = Forward.plan(&Setup::planning(1, &[])).unwrap();
    for row in &plan.rows {
        let Source::Missing(missing) = &row.source else { panic!("{} can be measured", row.name()) };
        assert!(missing.reason.contains("two processors"));
    }
    assert_eq!(plan.rows.len(), 4 + 3 + 3 + 4 + 3);
    assert_eq!(plan.published.len(), 5);
}
