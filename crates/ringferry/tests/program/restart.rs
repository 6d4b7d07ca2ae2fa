//! A switch that is killed in the middle of a burst, with every kind of ring: the next one goes on
//! with the rings as they are, and no guest is left with one that stands still.

use std::time::Duration;

use ringferry_control::snapshot::PortState;
use ringferry_packet::vnet::Header;
use ringferry_rig::frames::frame;
use ringferry_rig::guest::{Guest, Options, acquaint, converse};
use ringferry_rig::switch::Place;
use ringferry_virtio_net::Features;
use rustix::process::{Pid, Signal, kill_process};

/// Kills per kind of ring; a fraction of a second. A device that is killed between the descriptors of a
/// burst is rare, about one kill in some hundreds: the in-flight region's own tests take it step by step.
const ROUNDS: u32 = 25;

/// Sends as fast as it can, and receives, for as long as the back end is there.
fn flood(from: &mut Guest, to: &mut Guest) {
    let filler = frame(to.mac, from.mac, 200, 0);
    while from.connection.frontend().check().is_ok() {
        from.pair.reclaim();
        while from.pair.send_frame(&Header::default(), &filler) {}
        from.flush();
        to.pump();
        while to.take().is_some() {}
    }
}

/// Sends a frame of its own and receives whatever is still on its way until it has come.
#[track_caller]
pub fn flush_out(from: &mut Guest, to: &mut Guest, number: u32) {
    let last = frame(to.mac, from.mac, 300, number);
    from.send(&last);
    while to.receive().frame != last {}
}

fn killed_under_load(features: Features) {
    let place = Place::new();
    let mut switch = place.switch(&["a", "b"]);
    let options = Options { features, ..Options::default() };
    let [mut a, mut b] = [("a", 1), ("b", 2)].map(|(port, number)| switch.plug(port, number, options));
    assert_eq!(a.features, features);
    acquaint(&mut [&mut a, &mut b]);
    for round in 0..ROUNDS {
        let pid = Pid::from_raw(switch.process.pid() as i32).unwrap();
        // Not always at the same moment after the start.
        let when = Duration::from_micros(1000 + u64::from(round) * 137);
        let killer = std::thread::spawn(move || {
            std::thread::sleep(when);
            kill_process(pid, Signal::KILL).unwrap();
        });
        flood(&mut a, &mut b);
        killer.join().unwrap();
        switch.process.wait();
        drop(switch);

        switch = place.switch(&["a", "b"]);
        b.move_to(switch.connect("b"));
        switch.until_state("b", PortState::Up);
        a.move_to(switch.connect("a"));
        switch.until_state("a", PortState::Up);
        flush_out(&mut a, &mut b, round);
        flush_out(&mut b, &mut a, round);
        converse(&mut a, &mut b, 1000, 100);
    }
    switch.stop();
}

#[test]
fn a_switch_killed_under_load_is_followed_by_another_split() {
    killed_under_load(Features::DEVICE - Features::RING_PACKED - Features::IN_ORDER);
}

#[test]
fn a_switch_killed_under_load_is_followed_by_another_split_in_order() {
    killed_under_load(Features::DEVICE - Features::RING_PACKED);
}

#[test]
fn a_switch_killed_under_load_is_followed_by_another_packed() {
    killed_under_load(Features::DEVICE - Features::IN_ORDER);
}

#[test]
fn a_switch_killed_under_load_is_followed_by_another_packed_in_order() {
    killed_under_load(Features::DEVICE);
}
