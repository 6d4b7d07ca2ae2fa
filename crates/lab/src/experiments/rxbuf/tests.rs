//! Behaviour of the harness, in runs so short that only the checks in front of them and what is counted mean anything.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use ringferry_rig::process::may;

use super::*;
use crate::stop::Stop;

/// Each run spins on two processors: tests would only be in each other's way.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

fn with_run<T>(body: impl FnOnce(&Run<'_>) -> T) -> T {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let cpus = ringferry_sys::cpu::allowed().unwrap();
    let cpus = [cpus[0], cpus[cpus.len() - 1]];
    let stop = Stop::new();
    body(&Run { seconds: Duration::from_millis(20), seed: 7, round: 1, sample: 1, cpus: &cpus, stop: &stop })
}

fn ours(policy: PolicyKind, mix: &[(usize, usize)]) -> Sample {
    with_run(|run| ours::measure(policy, mix, run)).unwrap_or_else(|error| panic!("{policy:?}: {error}"))
}

#[test]
fn every_row_has_a_name_of_its_own_and_its_baseline_is_a_row_of_its_group() {
    let cases: Vec<Case> = Case::all().collect();
    let names: BTreeSet<String> = cases.iter().map(|case| case.labels().to_string()).collect();
    assert_eq!((cases.len(), names.len()), (60, 60));
    for case in &cases {
        let Some(baseline) = case.baseline() else { continue };
        assert!(cases.contains(&baseline) && baseline != *case);
        assert_eq!((baseline.workload, baseline.device), (case.workload, case.device));
    }
    // The average against the better of both, and the best policy against the average.
    let against =
        |workload, policy| Case { workload, device: Device::Ringferry, policy }.baseline().unwrap().policy;
    assert_eq!(against(Workload::Small, PolicyKind::Ewma), PolicyKind::FixedMtu);
    assert_eq!(against(Workload::Gso, PolicyKind::Ewma), PolicyKind::FixedPage);
    assert_eq!(against(Workload::Gso, PolicyKind::Best), PolicyKind::Ewma);
}

#[test]
fn what_cannot_be_sent_is_missing_with_its_reason_and_options_are_checked() {
    let plan = Rxbuf.plan(&Setup::planning(1, &[("kernel", "all")])).unwrap();
    assert_eq!(plan.rows.len(), 60);
    let reason = |name: &str| {
        let row = plan.rows.iter().find(|row| row.name() == name).unwrap();
        match &row.source {
            crate::experiment::Source::Missing(missing) => missing.reason.clone(),
            crate::experiment::Source::Measured(_) => panic!("{name} is measured"),
        }
    };
    assert!(reason("workload=imix device=dpdk policy=best").contains("7 : 4 : 1"));
    assert!(reason("workload=imix device=kernel policy=best").contains("one length"));
    assert!(reason("workload=gso device=ringferry policy=best").contains("two processors"));
    assert!(reason("workload=gso device=kernel policy=best").contains("/nonexistent/ringferry-lab"));
    for (name, value) in [("acks", "0"), ("acks", "1001"), ("acks", "x"), ("kernel", "udp")] {
        assert!(Rxbuf.plan(&Setup::planning(1, &[(name, value)])).is_err(), "{name}={value}");
    }
    let off = Rxbuf.plan(&Setup::planning(1, &[("kernel", "off")])).unwrap();
    assert_eq!(off.rows.len(), 40);
}

#[test]
fn every_policy_receives_every_kind_of_traffic_whole_and_in_order() {
    for policy in PolicyKind::ALL {
        for workload in Workload::ALL {
            let sample = ours(policy, &workload.mix(1));
            let extra = &sample.extra;
            assert!(sample.value > 0.0 && extra["drops"] == 0.0, "{policy:?} {workload:?}: {extra:?}");
            assert!(extra["descriptors/packet"] >= 1.0 && extra["truesize/payload"] >= 1.0, "{extra:?}");
        }
    }
}

#[test]
fn fixed_lengths_stay_and_long_frames_take_as_many_buffers_as_they_need() {
    let mix = Workload::Gso.mix(1);
    for (policy, length) in [(PolicyKind::FixedMtu, 1536.0), (PolicyKind::FixedPage, 4096.0)] {
        let extra = ours(policy, &mix).extra;
        assert_eq!(extra["buffer"], length);
        // The last buffer of a chunk is longer by the hole.
        let most = ((workload::GSO + 12) as f64 / length).ceil();
        let few = extra["descriptors/packet"];
        assert!(few <= most && few > 0.9 * most, "{policy:?}: {few}, at most {most}");
    }
}

#[test]
fn on_the_bimodal_mix_the_best_policy_takes_a_fifth_fewer_descriptors_than_the_average() {
    for acks in [1, 40] {
        let mix = Workload::Bimodal.mix(acks);
        let [ewma, best] = [PolicyKind::Ewma, PolicyKind::Best].map(|policy| ours(policy, &mix).extra);
        let name = "descriptors/packet";
        assert!(best[name] <= 0.8 * ewma[name], "{acks}: {best:?} {ewma:?}");
    }
}

#[test]
fn with_testpmd_frames_of_one_length_and_of_two_arrive() {
    let Some(program) = testpmd::find() else {
        may(&format!("needs dpdk-testpmd: apt-get install {PACKAGES}"), false);
        return;
    };
    for workload in Workload::ALL.into_iter().filter(|&workload| dpdk::impossible(workload, 1).is_none()) {
        let sample = with_run(|run| dpdk::measure(PolicyKind::Best, workload, &program, run));
        let sample = sample.unwrap_or_else(|error| panic!("{workload:?}: {error}"));
        assert_eq!(sample.extra["drops"], 0.0, "{workload:?}");
        let mean = sample.value * 1e9 / 8.0 / (sample.extra["Mpps"] * 1e6);
        let expected = workload::Sequence::new(&workload.mix(1), 1).mean();
        // testpmd tosses a coin for each frame of the mix.
        assert!((mean / expected - 1.0).abs() < 0.25, "{workload:?}: {mean} bytes on average");
    }
}
