//! The handshake of both xenbus drivers over a store: every mix of features, every order of coming
//! and going, and stores with invalid content.

mod pair_support;

use std::time::{Duration, Instant};

use pair_support::*;
use ringferry_xen::domain::{DomId, EventPort};
use ringferry_xen::store::{NodeAccess, Nodes, Permission, path};
use ringferry_xen_net::offload::Accepts;
use ringferry_xen_net::xenbus::rings::{Ports, RingNodes};
use ringferry_xen_net::xenbus::{BackConfig, BackEvent, FrontConfig, Polled, Refusal, State, VifId};
use ringferry_xen_sim::fake::Op;

const CONNECTED: (Option<State>, Option<State>) = (Some(State::Connected), Some(State::Connected));
const CLOSED: (Option<State>, Option<State>) = (Some(State::Closed), Some(State::Closed));

/// A machine with an interface, and both halves of it.
fn machine(front: FrontConfig, back: BackConfig) -> (Machine, Both) {
    let mut machine = Machine::new();
    machine.plug(ID);
    let both = Both::new(Some(machine.front(ID, front)), Some(machine.plugs(back)));
    (machine, both)
}

fn connected() -> (Machine, Both) {
    let (machine, mut both) = machine(front_config(), BackConfig::default());
    both.connect();
    (machine, both)
}

/// Ends both halves; nothing may be left.
#[track_caller]
fn end(machine: &Machine, both: Both) {
    drop(both);
    machine.fake.assert_nothing_left();
}

#[test]
fn halves_connect_at_every_mix_of_queues_and_events() {
    for (front_queues, back_queues, split) in [
        (1, 1, (false, false)),
        (1, 4, (true, false)),
        (4, 1, (true, true)),
        (4, 3, (false, true)),
        (2, 2, (true, true)),
    ] {
        let front = FrontConfig { queues: front_queues, split_events: split.0, ..front_config() };
        let back = BackConfig { max_queues: back_queues, split_events: split.1, ..BackConfig::default() };
        let (mut machine, mut both) = machine(front, back);
        both.connect();
        let queues = usize::from(front_queues.min(back_queues));
        assert_eq!(both.session.as_ref().unwrap().pairs.len(), queues);
        assert_eq!(both.connection.as_ref().unwrap().queues.len(), queues);
        both.until("Connected of both", |_| machine.states(ID) == CONNECTED);

        let device = nodes(ID).1;
        let rings = RingNodes::read(&mut machine.tools, &device, back_queues).unwrap();
        assert_eq!(rings.queues.len(), queues);
        for queue in &rings.queues {
            assert_eq!(matches!(queue.ports, Ports::Split { .. }), split.0 && split.1);
        }
        // Keys of one queue are flat, those of more are not (netif.h).
        let names = machine.tools.directory(&device).unwrap();
        assert_eq!(names.iter().any(|name| name == "tx-ring-ref"), queues == 1);
        assert_eq!(
            names.iter().filter(|name| name.starts_with("queue-")).count(),
            if queues > 1 { queues } else { 0 }
        );
        end(&machine, both);
    }
}

#[test]
fn each_side_learns_what_the_other_takes() {
    let some = Accepts { sg: true, csum4: true, csum6: false, gso4: true, gso6: false };
    for (to_front, to_back) in
        [(Accepts::ALL, some), (some, Accepts::default()), (Accepts::default(), Accepts::ALL)]
    {
        for persistent in [false, true] {
            let front = FrontConfig { accepts: to_front, persistent, ..front_config() };
            let back = BackConfig { accepts: to_back, persistent: !persistent, ..BackConfig::default() };
            let (machine, mut both) = machine(front, back);
            both.connect();
            let (session, connection) = (both.session.as_ref().unwrap(), both.connection.as_ref().unwrap());
            assert_eq!((session.accepts, connection.front.accepts), (to_back, to_front));
            assert_eq!((session.back.persistent, connection.front.persistent), (!persistent, persistent));
            assert_eq!(session.mac.map(|mac| mac.to_string()).as_deref(), Some("00:16:3e:00:00:09"));
            assert_eq!(connection.mac, session.mac);
            end(&machine, both);
        }
    }
}

#[test]
fn hot_unplug_unmaps_everything_before_closed() {
    let (mut machine, mut both) = connected();
    let granted = machine.fake.granted_pages();
    assert!(granted > 300 && machine.fake.mapped_pages() >= 2);
    machine.unplug(ID);
    // The front end does not answer yet, and yet the back end lets go at once.
    let front = both.front.take();
    both.until("the back end", |both| both.parted == 1);
    assert_eq!(machine.fake.mapped_pages(), 0);
    assert_eq!(machine.states(ID).0, Some(State::Closing));
    both.front = front;
    both.until("the end of both", |both| both.removed == 1);
    assert_eq!(both.closed, [0]);
    assert_eq!(machine.states(ID), CLOSED);
    machine.fake.assert_nothing_left();
    // An interface that is offline stays closed.
    machine.remove(&nodes(ID).0);
    both.step();
    assert_eq!((both.removed, both.connected), (1, 1));
}

#[test]
fn a_front_end_that_closes_takes_all_back_once_it_was_unmapped() {
    let (mut machine, mut both) = connected();
    both.front.as_mut().unwrap().close();
    both.until("the end", |both| both.closed == [0]);
    machine.fake.assert_nothing_left();
    both.until("Closed of both", |_| machine.states(ID) == CLOSED);
    // Nothing of its rings is left for the next one to stumble over.
    let rings = RingNodes::read(&mut machine.tools, &nodes(ID).1, 8);
    assert!(rings.is_err());
    // It stays online: a front end that begins anew is served again.
    both.front = Some(machine.front(ID, front_config()));
    both.connect();
    both.until("Connected of both", |_| machine.states(ID) == CONNECTED);
    end(&machine, both);
}

/// As one does whose rings were broken.
#[test]
fn d6_a_front_end_that_closed_begins_anew_with_new_rings() {
    let (mut machine, mut both) = connected();
    for round in 1..4 {
        both.front.as_mut().unwrap().close();
        both.until("the end", |both| both.closed.len() == round);
        machine.fake.assert_nothing_left();
        both.front.as_mut().unwrap().reopen().unwrap();
        both.connect();
        both.until("Connected of both", |_| machine.states(ID) == CONNECTED);
    }
    end(&machine, both);
}

#[test]
fn a_front_end_that_was_killed_reconnects() {
    let (mut machine, mut both) = connected();
    for round in 1..4 {
        both.front = None;
        both.session = None;
        assert_eq!(machine.fake.granted_pages(), 0);
        both.front = Some(machine.front(ID, front_config()));
        both.until("the old connection's end", |both| both.parted == round);
        both.connect();
        both.until("Connected of both", |_| machine.states(ID) == CONNECTED);
    }
    assert!(both.refused.is_empty());
    end(&machine, both);
}

#[test]
fn a_back_end_that_was_killed_takes_the_live_rings_over() {
    let (mut machine, mut both) = connected();
    both.until("Connected of both", |_| machine.states(ID) == CONNECTED);
    for _ in 0..3 {
        both.plugs = None;
        both.connection = None;
        assert_eq!(machine.fake.mapped_pages(), 0);
        both.step();
        both.plugs = Some(machine.plugs(BackConfig::default()));
        both.until("the rings again", |both| both.connection.is_some());
        both.until("Connected of both", |_| machine.states(ID) == CONNECTED);
    }
    // The front end did not even stop.
    assert_eq!((both.connected, both.closed.len()), (1, 0));
    end(&machine, both);
}

#[test]
fn a_back_end_that_was_removed_and_comes_again_is_found_again() {
    let (mut machine, mut both) = connected();
    let (back, _) = nodes(ID);
    machine.remove(&back);
    // Either of the two may see it first, so pages may still be mapped when their grants are ended.
    both.until("the end", |both| both.closed.len() == 1 && both.removed == 1);
    machine.fake.assert_nothing_left();
    machine.plug(ID);
    both.connect();
    assert_eq!(both.connected, 2);
    end(&machine, both);
}

#[test]
fn a_front_end_whose_nodes_vanish_is_let_go() {
    let (mut machine, mut both) = connected();
    let (back, front) = nodes(ID);
    machine.remove(&front);
    both.until("the end of both", |both| both.parted == 1 && both.closed.len() == 1);
    machine.fake.assert_nothing_left();
    // No node comes back because someone writes its state.
    assert_eq!(machine.tools.directory(&front).unwrap(), Vec::<String>::new());
    machine.remove(&back);
    both.until("the back end's end", |both| both.removed == 1);
    assert_eq!(machine.tools.directory(&back).unwrap(), Vec::<String>::new());
}

#[test]
fn a_store_that_says_anything_harms_only_who_wrote_it() {
    let keys = [
        "tx-ring-ref",
        "rx-ring-ref",
        "event-channel-tx",
        "event-channel-rx",
        "ctrl-ring-ref",
        "event-channel-ctrl",
        "multi-queue-num-queues",
        "request-rx-copy",
        "state",
        "feature-sg",
        "feature-gso-tcpv4",
    ];
    let long = "9".repeat(2000);
    let values: [&[u8]; 9] = [
        b"",
        b"0",
        b"-1",
        b"4294967295",
        b"99999999999999999999",
        b" 1",
        b"1\0",
        b"\xff\xfe",
        long.as_bytes(),
    ];
    let other = VifId { front: DomId(6), device: 0 };
    let mut machine = Machine::new();
    machine.plug(other);
    let mut both =
        Both::new(Some(machine.front(other, front_config())), Some(machine.plugs(BackConfig::default())));
    both.connect();
    both.until("Connected of both", |_| machine.states(other) == CONNECTED);
    let (innocent, mapped) = (both.connection.take(), machine.fake.mapped_pages());

    let mut guest = machine.client(FRONT);
    let mut refused = 0;
    for key in keys {
        for value in values {
            machine.plug(ID);
            both.until("an offer", |_| machine.states(ID).0 == Some(State::InitWait));
            let device = "device/vif/0";
            let all = [
                ("tx-ring-ref", "8"),
                ("rx-ring-ref", "9"),
                ("event-channel-tx", "1"),
                ("event-channel-rx", "2"),
                ("request-rx-copy", "1"),
            ];
            for (key, value) in all {
                guest.write(&path::join(device, key), value).unwrap();
            }
            if key != "state" {
                guest.write(&path::join(device, key), value).unwrap();
            }
            guest.write(&path::join(device, "state"), if key == "state" { value } else { b"4" }).unwrap();
            if key == "state" {
                both.step();
            } else {
                both.until("a refusal", |both| both.refused.len() > refused);
            }
            refused = both.refused.len();
            // Its grants do not exist: whatever it says, it is never served.
            assert!(both.connection.is_none());
            assert_eq!(machine.fake.mapped_pages(), mapped, "{key}");
        }
    }
    assert_eq!(machine.states(other), CONNECTED);
    assert!(innocent.is_some());
    drop(innocent);
    end(&machine, both);
}

#[test]
fn queues_that_were_not_offered_are_refused() {
    for asked in ["0", "9", "65536", "x"] {
        let mut machine = Machine::new();
        machine.plug(ID);
        let mut both =
            Both::new(None, Some(machine.plugs(BackConfig { max_queues: 8, ..BackConfig::default() })));
        both.until("an offer", |_| machine.states(ID).0 == Some(State::InitWait));
        let front = nodes(ID).1;
        machine.write(&path::join(&front, "multi-queue-num-queues"), asked);
        machine.write(&path::join(&front, "state"), "4");
        both.until("a refusal", |both| both.refused.len() == 1);
        assert!(matches!(both.refused[0], Refusal::Rings(_)), "{asked}");
        assert_eq!(machine.states(ID).0, Some(State::Closing));
        machine.fake.assert_nothing_left();
    }
}

#[test]
fn a_front_end_is_never_looked_for_in_another_domain() {
    let mut machine = Machine::new();
    machine.plug(ID);
    let (back, _) = nodes(ID);
    for path in
        ["/local/domain/6/device/vif/0", "device/vif/0", "/local/domain/55/device/vif/0", "/", "no path"]
    {
        machine.write(&path::join(&back, "frontend"), path);
        machine.write(&path::join(&back, "state"), "1");
        let mut both = Both::new(None, Some(machine.plugs(BackConfig::default())));
        both.step();
        both.step();
        assert_eq!(both.plugs.as_ref().unwrap().vifs().count(), 0, "{path}");
        assert_eq!(machine.states(ID).0, Some(State::Initialising));
    }
}

#[test]
fn a_failure_while_connecting_leaves_nothing_behind() {
    // On the front end's side: grants and channels, each one in turn.
    for (op, count) in [(Op::Grant, 3), (Op::Channel, 3)] {
        for after in 0..count {
            let mut machine = Machine::new();
            machine.plug(ID);
            let mut both = Both::new(
                Some(machine.front(ID, front_config())),
                Some(machine.plugs(BackConfig::default())),
            );
            let mut front = both.front.take().unwrap();
            both.until("an offer", |_| machine.states(ID).0 == Some(State::InitWait));
            machine.fake.fail(FRONT, op, after);
            let mut failed = false;
            while !failed {
                failed = front.poll().is_err();
            }
            machine.fake.assert_nothing_left();
            // The next try succeeds, as the fault is gone.
            both.front = Some(machine.front(ID, front_config()));
            drop(front);
            both.connect();
            end(&machine, both);
        }
    }
    // On the back end's: rings and channels.
    for (op, count) in [(Op::Map, 3), (Op::Channel, 3)] {
        for after in 0..count {
            let (machine, mut both) = machine(front_config(), BackConfig::default());
            machine.fake.fail(BACK, op, after);
            both.until("a refusal", |both| both.refused.len() == 1 && both.closed == [0]);
            machine.fake.assert_nothing_left();
        }
    }
}

#[test]
fn a_front_end_that_cannot_be_told_that_it_is_served_is_disconnected_and_no_other() {
    let (mut machine, mut both) = machine(front_config(), BackConfig::default());
    let mut plugs = both.plugs.take().unwrap();
    let state = path::join(&nodes(ID).0, "state");
    let may = |access| {
        [(DomId(0), NodeAccess::None), (BACK, access), (FRONT, NodeAccess::Read)]
            .map(|(id, access)| Permission::new(id, access))
    };
    let deadline = Instant::now() + PATIENCE;
    let mut served = None;
    // The store takes nothing any more where the back end says how far it is.
    loop {
        assert!(Instant::now() < deadline, "no disconnection: {both:?}");
        both.step();
        match plugs.poll().unwrap() {
            Polled::Vif(id, BackEvent::Connect(connection)) => {
                served = Some(connection);
                machine.tools.set_permissions(&state, &may(NodeAccess::Read)).unwrap();
                plugs.connected(id).unwrap();
                machine.tools.set_permissions(&state, &may(NodeAccess::Both)).unwrap();
            }
            Polled::Vif(id, BackEvent::Disconnect) => {
                assert!(served.take().is_some(), "disconnected before it was served");
                plugs.disconnected(id);
                break;
            }
            _ => std::thread::sleep(Duration::from_millis(1)),
        }
    }
    both.plugs = Some(plugs);
    both.until("an end", |both| both.closed == [0]);
    machine.fake.assert_nothing_left();
    // Others are served by the same driver.
    let other = VifId { front: DomId(6), device: 3 };
    machine.plug(other);
    both.front = Some(machine.front(other, front_config()));
    both.connect();
    end(&machine, both);
}

#[test]
fn xsa_391_a_guest_that_writes_all_the_time_waits_like_any_other() {
    let mut machine = Machine::new();
    machine.plug(ID);
    let other = VifId { front: DomId(6), device: 3 };
    machine.plug(other);
    let mut both =
        Both::new(Some(machine.front(other, front_config())), Some(machine.plugs(BackConfig::default())));
    let mut guest = machine.client(FRONT);
    std::thread::scope(|scope| {
        let (stop, stopped) = std::sync::mpsc::channel::<()>();
        scope.spawn(move || {
            let states = ["1", "4", "5", "6", "x"];
            for state in states.iter().cycle() {
                guest.write("device/vif/0/state", state).unwrap();
                if stopped.try_recv().is_ok() {
                    return;
                }
            }
        });
        both.connect();
        both.until("Connected of both", |_| machine.states(other) == CONNECTED);
        stop.send(()).unwrap();
    });
    assert_eq!(both.connection.as_ref().unwrap().id, other);
    assert_eq!(both.connection.as_ref().unwrap().queues.len(), 1);
    end(&machine, both);
}

#[test]
fn ports_that_are_no_channels_are_refused() {
    let (mut machine, mut both) = machine(front_config(), BackConfig::default());
    // The front end stops halfway: it has announced, and then somebody changes its nodes.
    let plugs = both.plugs.take();
    machine.write(&path::join(&nodes(ID).0, "feature-rx-copy"), "1");
    machine.write(&path::join(&nodes(ID).0, "state"), "2");
    both.until("an announcement", |_| machine.states(ID).1 == Some(State::Connected));
    let port = EventPort(u32::MAX);
    machine.write(&path::join(&nodes(ID).1, "event-channel"), port.0.to_string());
    both.plugs = plugs;
    both.until("a refusal", |both| both.refused.len() == 1 && both.closed == [0]);
    machine.fake.assert_nothing_left();
}

#[test]
fn xsa_396_a_back_end_that_keeps_pages_mapped_is_told_of_and_gets_nothing_new() {
    let (mut machine, mut both) = connected();
    // It says that it has closed, and has not let go.
    let kept = both.connection.take();
    both.plugs = None;
    machine.write(&path::join(&nodes(ID).0, "state"), "6");
    both.until("the front end's end", |both| both.closed.len() == 1);
    assert_eq!((both.closed[0], machine.fake.mapped_pages()), (3, 3));
    assert_eq!(machine.fake.granted_pages(), 0);
    // An honest one that comes later is served from other pages.
    machine.plug(ID);
    both.plugs = Some(machine.plugs(BackConfig::default()));
    both.connect();
    drop(kept);
    end(&machine, both);
}
