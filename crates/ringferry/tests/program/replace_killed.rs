//! One of the two processes is killed while the one replaces the other, at fifty moments of it: guests notice nothing as long as either is left that has the
//! ports, and there is never a moment at which neither has them, or both.
//!
//! A successor that is killed once it has taken over is a switch that was killed ([`restart`](crate::restart)), and guests go on with
//! the next one.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ringferry_control::{self as control, Answer, Request};
use ringferry_rig::guest::{Guest, converse};
use ringferry_rig::process::{PATIENCE, Process};
use ringferry_rig::switch::{Place, Switch};
use ringferry_sys::process::{Spawn, is_root};
use rustix::process::{Pid, Signal, kill_process};

use crate::lifecycle::bystanders;
use crate::replace::{Flow, replace, replaced, stream};
use crate::restart::flush_out;

/// How often each of the two is killed.
const KILLS: u32 = 50;

/// Which of the two is killed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Victim {
    Successor,
    Predecessor,
}

/// Starts a process that is to replace the switch.
fn start(place: &Place) -> Process {
    let mut command = replace(place);
    if !is_root() {
        command.args(["--sandbox", "off"]);
    }
    Process::start(&mut command, Spawn::default())
}

/// Returns the number of the process that serves the place; none if there is none.
fn serving(place: &Place) -> Option<u32> {
    match control::call(&place.control(), &Request::Show { addresses: None }) {
        Ok(Answer::Show(snapshot)) => Some(snapshot.pid),
        _ => None,
    }
}

/// Lets numbered frames flow both ways until `done`, and waits for nothing.
fn flow(a: &mut Guest, b: &mut Guest, [there, back]: &mut [Flow; 2], mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < deadline, "neither process goes on, and neither ends");
        there.send(a, b.mac);
        back.send(b, a.mac);
        there.receive(b, a.mac);
        back.receive(a, b.mac);
    }
}

/// Has guests, which have lost their back end, go on with the next switch.
fn go_on<'a>(place: &'a Place, a: &mut Guest, b: &mut Guest, round: u32) -> Switch<'a> {
    let switch = place.switch(&["a", "b"]);
    for (guest, port) in [(&mut *a, "a"), (&mut *b, "b")] {
        guest.move_to(switch.connect(port));
        switch.until_state(port, ringferry_control::snapshot::PortState::Up);
    }
    flush_out(a, b, round);
    flush_out(b, a, round);
    converse(a, b, 1000, 20);
    switch
}

/// All frames that were dropped.
fn drops(switch: &Switch<'_>) -> u64 {
    switch.show().ports.iter().flat_map(|port| port.drops.values()).sum()
}

fn killed(victim: Victim) {
    let place = Place::new();
    let mut switch = place.switch(&["a", "b"]);
    let (mut a, mut b) = bystanders(&switch);
    let (a, b) = (&mut a, &mut b);
    let mut flows = <[Flow; 2]>::default();
    // How long it takes here.
    let begun = Instant::now();
    switch = replaced(&place, switch, |done| stream(a, b, &mut flows, done));
    let whole = begun.elapsed();
    let mut outcomes = [0; 3];
    // Frames that came before a port was up after a kill.
    let mut dropped = 0;
    for round in 0..KILLS {
        let mut new = start(&place);
        let killed = AtomicBool::new(false);
        let (old_pid, new_pid) = (switch.process.pid(), new.pid());
        let pid = if victim == Victim::Successor { new_pid } else { old_pid };
        let when: Duration = whole * round / KILLS;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(when);
                let _ = kill_process(Pid::from_raw(pid as i32).unwrap(), Signal::KILL);
                killed.store(true, Ordering::Relaxed);
            });
            flow(a, b, &mut flows, || killed.load(Ordering::Relaxed));
        });
        // The one that is left has the ports, or ends.
        let left_pid = if victim == Victim::Successor { old_pid } else { new_pid };
        let mut gone = false;
        flow(a, b, &mut flows, || {
            let left = if victim == Victim::Successor { &mut switch.process } else { &mut new };
            gone = !left.is_running();
            gone || serving(&place) == Some(left_pid)
        });
        if gone {
            // All that was lost is what a killed switch loses.
            if victim == Victim::Predecessor {
                let (status, _) = new.wait();
                assert_eq!(status.code(), Some(1));
                let said = new.log().join("\n");
                assert!(said.contains("ringferry: "), "{said}");
            } else {
                new.wait();
                let (status, _) = switch.process.wait();
                let orphaned = "the process that has taken over was killed before it ran";
                let said = if status.success() { "another process has taken over" } else { orphaned };
                switch.process.until_logged_times(said, 1);
            }
            drop(switch);
            switch = go_on(&place, a, b, round);
            dropped = drops(&switch);
            flows = Default::default();
            outcomes[0] += 1;
            continue;
        }
        stream(a, b, &mut flows, || true);
        if victim == Victim::Predecessor {
            switch.process.wait();
            let old = std::mem::replace(&mut switch.process, new);
            drop(old);
            outcomes[1] += 1;
        } else {
            outcomes[2] += 1;
        }
        assert_eq!(drops(&switch), dropped);
    }
    eprintln!(
        "nobody was left {} times, the successor {}, the one before {}",
        outcomes[0], outcomes[1], outcomes[2]
    );
    // It can be replaced after all that.
    switch = replaced(&place, switch, |done| stream(a, b, &mut flows, done));
    switch.stop();
    assert_eq!(place.files(), [""; 0]);
}

#[test]
fn a_successor_that_is_killed_at_any_moment_leaves_the_ports_to_one_process() {
    killed(Victim::Successor);
}

#[test]
fn a_switch_that_is_killed_while_it_is_replaced_is_followed_by_its_successor_or_the_next_one() {
    killed(Victim::Predecessor);
}
