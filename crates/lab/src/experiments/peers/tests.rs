//! Behaviour of the engines, and of the harness around them: short runs in which every frame is checked.

use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use ringferry_rig::process::may;

use super::case::{Case, Direction, Ring, Who};
use super::pair::{Conditions, measure};
use super::testpmd;
use crate::stop::Stop;

/// Short: the checks before and after the time are what is tested.
const SECONDS: Duration = Duration::from_millis(20);

/// Runs of which one must carry frames.
const ATTEMPTS: usize = 10;

/// Each run spins on two processors: tests would only be in each other's way.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

fn run(case: &Case, program: Option<&Path>) {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let cpus = ringferry_sys::cpu::allowed().unwrap();
    let cpus = [cpus[0], cpus[cpus.len() - 1]];
    let conditions = Conditions { seconds: SECONDS, cpus, program, stop: &Stop::new() };
    let rate = || {
        let sample = measure(case, &conditions).unwrap_or_else(|error| panic!("{}: {error}", case.labels()));
        sample.value
    };
    // On a busy machine an end may sleep through so short a time.
    assert!((0..ATTEMPTS).any(|_| rate() > 0.0), "{}: nothing arrived", case.labels());
}

fn cases(driver: Who, device: Who) -> impl Iterator<Item = Case> {
    Case::all(256).into_iter().filter(move |case| (case.driver, case.device) == (driver, device))
}

fn ringferry_with_itself(direction: Direction) {
    for case in
        cases(Who::Ringferry, Who::Ringferry).filter(|case| case.direction == direction && case.size != 256)
    {
        run(&case, None);
    }
}

#[test]
fn every_ring_and_size_transmits_without_loss_damage_or_disorder() {
    ringferry_with_itself(Direction::Transmit);
}

#[test]
fn every_ring_and_size_receives_without_loss_damage_or_disorder() {
    ringferry_with_itself(Direction::Receive);
}

#[test]
fn every_ring_and_size_goes_round_without_loss_damage_or_disorder() {
    ringferry_with_itself(Direction::Loopback);
}

#[test]
fn with_testpmd_every_ring_carries_frames_in_every_direction() {
    let Some(program) = ringferry_rig::testpmd::find() else {
        may(&format!("needs dpdk-testpmd: apt-get install {}", testpmd::PACKAGES), false);
        return;
    };
    let pairs = [(Who::Ringferry, Who::Dpdk), (Who::Dpdk, Who::Ringferry)];
    for (driver, device) in pairs {
        for case in cases(driver, device).filter(|case| case.size == 64) {
            let representative = case.mergeable || case.ring == Ring::PackedVectorized;
            if representative {
                run(&case, Some(&program));
            }
        }
    }
}
