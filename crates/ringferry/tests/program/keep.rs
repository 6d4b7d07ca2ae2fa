//! A switch that is killed while its descriptors are kept outside of it: `ringferry keep`. Front ends stay connected, and packets go on.

use std::os::fd::OwnedFd;
use std::process::Command;
use std::time::{Duration, Instant};

use ringferry_control::{self as control, Answer, Request};
use ringferry_packet::vnet::Header;
use ringferry_rig::frames::frame;
use ringferry_rig::guest::{Guest, Options, acquaint, converse};
use ringferry_rig::process::{PATIENCE, eventually, in_a_namespace};
use ringferry_rig::switch::{Place, Switch, ringferry};
use ringferry_sys::netif;
use ringferry_virtio_net::Features;
use rustix::process::{Pid, Signal, kill_process};

/// Kills for each kind of ring.
const ROUNDS: u32 = 8;

/// The command that keeps a switch with these ports.
fn keep(place: &Place, ports: &[&str]) -> Command {
    let run = place.run(ports);
    let mut command = ringferry();
    command.arg("keep").args(run.get_args().skip(1));
    command
}

/// The number of the switch's own process.
fn pid(place: &Place) -> Option<u32> {
    match control::call(&place.control(), &Request::Show) {
        Ok(Answer::Show(snapshot)) => Some(snapshot.pid),
        _ => None,
    }
}

/// Starts a kept switch.
fn start<'a>(place: &'a Place, ports: &[&str]) -> Switch<'a> {
    place.start(&mut keep(place, ports), Vec::<(OwnedFd, i32)>::new())
}

/// Waits until a state is kept that says this so often. It is stored a moment after it has changed.
#[track_caller]
fn until_kept(switch: &Switch<'_>, what: &str, count: usize) {
    let folder = format!("/proc/{}/fd", switch.process.pid());
    let is_kept = |path: &std::path::Path| {
        let is_state =
            std::fs::read_link(path).is_ok_and(|link| link.to_string_lossy().contains("ringferry-state"));
        let text = if is_state { std::fs::read(path).unwrap_or_default() } else { Vec::new() };
        String::from_utf8_lossy(&text).matches(what).count() == count
    };
    eventually("the state is kept", || {
        let mut kept = std::fs::read_dir(&folder).unwrap();
        kept.any(|fd| fd.is_ok_and(|fd| is_kept(&fd.path()))).then_some(())
    });
}

/// Kills the switch, and returns when the next one answers.
#[track_caller]
fn kill(place: &Place) {
    let before = pid(place).unwrap();
    kill_process(Pid::from_raw(before as i32).unwrap(), Signal::KILL).unwrap();
    eventually("the next switch answers", || pid(place).filter(|pid| *pid != before));
}

/// Sends a frame of its own and receives whatever is still on its way until it has come. What a switch had in its hands when it was killed is lost.
#[track_caller]
fn flush_out(from: &mut Guest, to: &mut Guest, number: u32) {
    let last = frame(to.mac, from.mac, 300, number);
    let deadline = Instant::now() + PATIENCE;
    loop {
        from.send(&last);
        let again = Instant::now() + Duration::from_millis(200);
        while Instant::now() < again {
            to.pump();
            while let Some(received) = to.take() {
                if received.frame == last {
                    return;
                }
            }
        }
        assert!(Instant::now() < deadline, "nothing arrives any more");
    }
}

fn killed_and_kept(features: Features) {
    let place = Place::new();
    let switch = start(&place, &["a", "b"]);
    let options = Options { features, inflight: false, ..Options::default() };
    let [mut a, mut b] = [("a", 1), ("b", 2)].map(|(port, number)| switch.plug(port, number, options));
    acquaint(&mut [&mut a, &mut b]);
    until_kept(&switch, "\"kick\"", 4);
    for round in 0..ROUNDS {
        let before = pid(&place).unwrap();
        let filler = frame(b.mac, a.mac, 200, 0);
        let victim = Pid::from_raw(before as i32).unwrap();
        let when = Instant::now() + Duration::from_micros(1000 + u64::from(round) * 137);
        let mut killed = false;
        // Under load, and until the next one is there.
        while !killed || Instant::now() < when + Duration::from_millis(30) {
            a.pair.reclaim();
            while a.pair.send_frame(&Header::default(), &filler) {}
            a.flush();
            b.pump();
            while b.take().is_some() {}
            if !killed && Instant::now() >= when {
                kill_process(victim, Signal::KILL).unwrap();
                killed = true;
            }
        }
        eventually("the next switch answers", || pid(&place).filter(|pid| *pid != before));
        flush_out(&mut a, &mut b, 2 * round);
        flush_out(&mut b, &mut a, 2 * round + 1);
        while a.pair.transmitq.in_flight() > 0 || b.pair.transmitq.in_flight() > 0 {
            a.drain();
            b.drain();
        }
        // Whatever was on its way twice has come before what was sent after it.
        for guest in [&mut a, &mut b] {
            guest.pump();
            while guest.take().is_some() {}
        }
        converse(&mut a, &mut b, 1000, 100);
        assert!(a.connection.frontend().check().is_ok() && b.connection.frontend().check().is_ok());
    }
    // The next front end is served by the same socket.
    drop(b);
    let mut b = switch.plug("b", 2, options);
    acquaint(&mut [&mut a, &mut b]);
    converse(&mut a, &mut b, 0, 20);
    switch.stop();
    assert_eq!(place.files(), [""; 0]);
}

#[test]
fn guests_outlive_a_killed_switch_split() {
    killed_and_kept(Features::DEVICE - Features::RING_PACKED - Features::IN_ORDER);
}

#[test]
fn guests_outlive_a_killed_switch_split_in_order() {
    killed_and_kept(Features::DEVICE - Features::RING_PACKED);
}

#[test]
fn guests_outlive_a_killed_switch_packed() {
    killed_and_kept(Features::DEVICE - Features::IN_ORDER);
}

#[test]
fn guests_outlive_a_killed_switch_packed_in_order() {
    killed_and_kept(Features::DEVICE);
}

fn a_tap_outlives_in_the_namespace() {
    let place = Place::new();
    let mut command = keep(&place, &["a"]);
    let switch = place.start(command.args(["--port", "tap:rf0"]), Vec::new());
    until_kept(&switch, "\"tap\":", 1);
    let index = netif::index("rf0").unwrap();
    for _ in 0..3 {
        kill(&place);
        assert_eq!(netif::index("rf0").unwrap(), index, "it is the same interface");
    }
    switch.stop();
    assert_eq!(netif::index("rf0").unwrap(), None);
}

#[test]
fn a_tap_outlives_a_killed_switch() {
    in_a_namespace(a_tap_outlives_in_the_namespace);
}
