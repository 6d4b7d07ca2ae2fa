//! Xen guests on a switch, beside guests over vhost-user: our front end, in domains that are processes.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use ringferry_control::snapshot::{GrantSnapshot, PortSnapshot, PortState};
use ringferry_control::{self as control, Request};
use ringferry_memory::Words;
use ringferry_packet::ether::Mac;
use ringferry_packet::vnet::{F_NEEDS_CSUM, GSO_TCPV4, GSO_TCPV6, Header};
use ringferry_rig::domu::{BACK, DomU, Machine, Raw, nodes, small};
use ringferry_rig::frames::{arp, frame, pattern, tcp};
use ringferry_rig::guest::{Guest, Options, Received};
use ringferry_rig::process::{Process, eventually, may_network};
use ringferry_rig::switch::{Place, Switch};
use ringferry_sys::process::Spawn;
use ringferry_xen::domain::{DomId, Domain, EventPort, PAGE};
use ringferry_xen::grant::GrantRef;
use ringferry_xen::netif::wire::{ERROR, TxFlags, TxResponse};
use ringferry_xen::process::ProcessDomain;
use ringferry_xen::store::wire::Kind;
use ringferry_xen::store::{Nodes, path};
use ringferry_xen_net::xenbus::FrontConfig;
use rustix::process::Signal;

use crate::keep::{kept, kill};
use crate::replace::replaced;

/// The first Xen guest's domain and its port.
const ONE: u16 = 5;
const PORT: &str = "xen5.0";

/// Lets the switch learn where both are.
#[track_caller]
fn acquaint(xen: &mut DomU, guest: &mut Guest) {
    let hello = frame(Mac::BROADCAST, xen.mac, 60, 0);
    xen.send(&hello);
    assert_eq!(guest.receive_plain(), hello);
    let answer = frame(xen.mac, guest.mac, 60, 1);
    guest.send(&answer);
    assert_eq!(xen.receive_plain(), answer);
}

/// Starts a switch in `place` with a guest over vhost-user at its port `vm` and a guest in domain [`ONE`], whose port has the rules `keys`.
/// When this returns, packets flow and the switch has learnt where both are.
fn bed<'a>(
    place: &'a Place,
    keys: &str,
    workers: u16,
    config: FrontConfig,
) -> (Machine, Switch<'a>, Guest, DomU) {
    let mut machine = Machine::new(place);
    machine.create(DomId(ONE), 0);
    let switch = place.start(&mut machine.run(place, &["vm"], keys, workers), Vec::new());
    let mut vm = switch.plug("vm", 1, Options::default());
    let mut xen = machine.guest(ONE, config);
    xen.plug(&switch, PORT);
    acquaint(&mut xen, &mut vm);
    (machine, switch, vm, xen)
}

/// Sends and receives `count` frames each way.
#[track_caller]
fn converse(xen: &mut DomU, guest: &mut Guest, first: u32, count: u32) {
    xen.send_numbered(guest.mac, first, count);
    guest.expect_numbered(xen.mac, first, count);
    guest.send_numbered(xen.mac, first, count);
    xen.expect_numbered(guest.mac, first, count);
}

/// The grant counters of a port's queues.
fn grants(switch: &Switch<'_>, port: &str) -> Vec<GrantSnapshot> {
    switch.port(port).queues.iter().filter_map(|queue| queue.grants).collect()
}

#[test]
fn a_xen_guest_and_a_vhost_user_guest_exchange_frames_with_offloads_kept() {
    for (keys, persistent, statics) in [
        ("", true, true),
        ("static_grants=off", true, false),
        ("static_grants=off,persistent=off", true, true),
        ("transfer=map", false, false),
        ("transfer=map,pages=8", true, false),
    ] {
        let place = Place::new();
        let (machine, switch, mut vm, mut xen) =
            bed(&place, keys, 1, FrontConfig { persistent, static_grants: statics, ..small(1) });
        converse(&mut xen, &mut vm, 10, 50);
        for v6 in [false, true] {
            for (payload, mss) in [(60_000, 1448), (9000, 0), (3, 0), (1448 * 3, 1448)] {
                let seed = payload as u32 + u32::from(v6);
                let (header, sent) = tcp(vm.mac, xen.mac, v6, &pattern(seed, payload), mss);
                xen.send_on(0, &header, &sent);
                let Received { header: got, frame } = vm.receive();
                assert!(frame == sent, "{keys} v6={v6} {payload}: harmed on the way to the other guest");
                assert_eq!(got.flags & F_NEEDS_CSUM, F_NEEDS_CSUM);
                assert_eq!((got.gso_type, got.gso_size), (header.gso_type, header.gso_size));
                assert_eq!((got.csum_start, got.csum_offset), (header.csum_start, header.csum_offset));

                let (header, sent) = tcp(xen.mac, vm.mac, v6, &pattern(!seed, payload), mss);
                vm.put(&header, &sent);
                vm.flush();
                let Received { header: got, frame } = xen.receive();
                assert!(frame == sent, "{keys} v6={v6} {payload}: harmed on the way to the Xen guest");
                let kind = if v6 { GSO_TCPV6 } else { GSO_TCPV4 };
                assert_eq!(got.gso_type, if mss == 0 { 0 } else { kind });
                assert_eq!((got.gso_size, got.csum_start), (header.gso_size, header.csum_start));
                assert!(got.needs_csum());
            }
        }
        vm.drain();
        let port = switch.port(PORT);
        assert_eq!(port.state, PortState::Up);
        assert_eq!(port.counters["tx_packets"], port.queues.len() as u64 / 2 * 59);
        assert_eq!(port.counters["rx_packets"], 59);
        assert_eq!(port.drops.values().sum::<u64>(), 0, "{:?}", port.drops);
        xen.close();
        switch.until_state(PORT, PortState::Listening);
        machine.assert_nothing_left();
        switch.stop();
    }
}

#[test]
fn xsa_392_a_burst_that_finds_too_few_pages_waits_for_more_and_nothing_is_lost() {
    let place = Place::new();
    let (machine, switch, mut vm, mut xen) =
        bed(&place, "", 1, FrontConfig { split_events: true, ..small(1) });
    // Sixteen slots each, of 256.
    const BURST: u32 = 24;
    let mut sent = Vec::new();
    for seed in 0..BURST {
        let (header, frame) = tcp(xen.mac, vm.mac, false, &pattern(seed, 60_000), 1448);
        vm.put(&header, &frame);
        vm.flush();
        sent.push(frame);
    }
    switch.until(PORT, "waiting frames", |port| port.counters["tx_waited"] > 5);
    assert!(switch.port(PORT).counters["tx_packets"] < u64::from(BURST));
    for frame in sent {
        assert!(xen.receive().frame == frame);
    }
    let port = switch.until(PORT, "all frames", |port| port.counters["tx_packets"] == u64::from(BURST) + 1);
    assert_eq!(port.drops.values().sum::<u64>(), 0, "{:?}", port.drops);
    // One that takes nothing loses what is too much, and then what is too old.
    for seed in 0..100 {
        let (header, frame) = tcp(xen.mac, vm.mac, false, &pattern(seed, 60_000), 1448);
        vm.put(&header, &frame);
        vm.flush();
        vm.drain();
    }
    let dropped = |port: &PortSnapshot| port.drops["no-receive-buffers"];
    let full = switch.until(PORT, "drops", |port| dropped(port) > 40);
    eventually("what waits is too old", || {
        vm.send(&frame(xen.mac, vm.mac, 60, 0));
        (dropped(&switch.port(PORT)) > dropped(&full) + 20).then_some(())
    });
    xen.close();
    machine.assert_nothing_left();
    switch.stop();
}

#[test]
fn persistent_grants_hit_and_are_shown_with_their_queue() {
    let place = Place::new();
    let (machine, switch, mut vm, mut xen) = bed(&place, "static_grants=off", 1, small(1));
    for round in 0..20 {
        converse(&mut xen, &mut vm, 100 * round, 50);
    }
    let [queue] = grants(&switch, PORT)[..] else { panic!("one queue") };
    assert!(queue.hits > 1000, "{queue:?}");
    assert!(queue.learned_pages > 0 && queue.learned_pages <= queue.max_pages, "{queue:?}");
    assert_eq!((queue.static_pages, queue.failed, queue.max_pages), (0, 0, 1024));
    let shown = switch.ctl_show().ports.into_iter().find(|port| port.name == PORT).unwrap();
    assert_eq!(shown.counters["grant_hits"], queue.hits);
    let stats = place.ctl(&["stats", PORT, "--queues"]);
    for line in [format!("queue_0_grant_hits: {}", queue.hits), "rx_queue_0_packets: 1001".to_owned()] {
        assert!(stats.contains(&line), "{line} in {stats}");
    }
    xen.close();
    let after = switch.until_state(PORT, PortState::Listening);
    assert_eq!(after.counters["grant_hits"], queue.hits, "what was counted stays");
    machine.assert_nothing_left();
}

#[test]
fn a_front_end_that_is_killed_is_replaced_by_the_next() {
    let place = Place::new();
    let mut machine = Machine::new(&place);
    machine.create(DomId(ONE), 0);
    let switch = place.start(&mut machine.run(&place, &["vm"], "", 1), Vec::new());
    let mut vm = switch.plug("vm", 1, Options::default());
    for round in 0..3 {
        let mut xen = machine.guest(ONE, small(1));
        xen.plug(&switch, PORT);
        // Of what the last one had sent before it ended, whatever was taken in time has arrived: pages of a domain that is
        // gone cannot be read.
        vm.pump();
        for number in 1000.. {
            let Some(late) = vm.take() else { break };
            assert!(number < 1005 && late.frame == frame(vm.mac, xen.mac, 100, number), "frame {number}");
        }
        acquaint(&mut xen, &mut vm);
        converse(&mut xen, &mut vm, 10, 20);
        // Packets are on their way when it ends without a word.
        if round < 2 {
            xen.send_numbered(vm.mac, 1000, 5);
            drop(xen);
        } else {
            xen.close();
        }
    }
    let port = switch.until_state(PORT, PortState::Listening);
    assert_eq!(port.counters["connections"], 3);
    machine.assert_nothing_left();
    switch.stop();
}

#[test]
fn a_switch_that_is_restarted_takes_live_rings_over() {
    let place = Place::new();
    let mut machine = Machine::new(&place);
    machine.create(DomId(ONE), 0);
    machine.create(DomId(ONE + 1), 0);
    let start = || place.start(&mut machine.run(&place, &[], "", 1), Vec::new());
    let mut switch = start();
    let mut one = machine.guest(ONE, small(1));
    let mut two = machine.guest(ONE + 1, FrontConfig { static_grants: false, ..small(1) });
    one.plug(&switch, PORT);
    two.plug(&switch, "xen6.0");
    for signal in [Signal::TERM, Signal::KILL] {
        one.send_numbered(two.mac, 1, 20);
        two.expect_numbered(one.mac, 1, 20);
        two.send_numbered(one.mac, 1, 20);
        one.expect_numbered(two.mac, 1, 20);
        switch.process.signal(signal);
        switch.process.wait();
        // While nobody is there.
        one.send_numbered(two.mac, 21, 10);
        switch = start();
        two.plug(&switch, "xen6.0");
        one.plug(&switch, PORT);
        // The first frames may have come before their receiver was served again.
        one.send_numbered(two.mac, 100, 1);
        eventually("frames flow again", || {
            (two.receive_plain() == frame(two.mac, one.mac, 100, 100)).then_some(())
        });
    }
    assert_eq!((one.connected, two.connected), (1, 1), "the front ends did not notice");
    for mut guest in [one, two] {
        guest.front.close();
        // What the killed switch had mapped is counted for ever: a broker is told, and the dead tell nothing.
        guest.until("the end", |guest| !guest.closed.is_empty());
    }
    let broker = &machine.broker;
    eventually("nothing is granted", || (broker.granted_pages() + broker.open_ports() == 0).then_some(()));
    switch.stop();
}

/// Numbered frames between a Xen guest and one over vhost-user, one each way at a time.
#[derive(Debug, Default)]
struct Stream {
    /// Sent by the Xen guest, and received from it.
    there: (u32, u32),
    /// Sent to the Xen guest, and the number after that of the last one that it has received.
    back: (u32, u32),
    /// Frames to the Xen guest that never came.
    lost: u32,
    /// Frames from the Xen guest that came once more, or never.
    astray: (u32, u32),
}

impl Stream {
    /// Sends a frame each way, and receives what is there: in order and unharmed.
    fn turn(&mut self, xen: &mut DomU, vm: &mut Guest) {
        let of = |to: Mac, from: Mac, number: u32| frame(to, from, 100, number);
        xen.step();
        let (to, from) = (vm.mac, xen.mac);
        let pair = xen.pair(0);
        pair.reclaim();
        self.there.0 += u32::from(pair.send_frame(&Header::default(), &of(to, from, self.there.0)));
        if pair.transmit.flush() {
            pair.events().notify_transmit().unwrap();
        }
        vm.pair.reclaim();
        self.back.0 += u32::from(vm.pair.send_frame(&Header::default(), &of(from, to, self.back.0)));
        vm.flush();
        vm.pump();
        while let Some(received) = vm.take() {
            let number = (0..self.there.0).rev().find(|number| received.frame == of(to, from, *number));
            let number = number.expect("a frame that was sent");
            self.astray.0 += u32::from(number < self.there.1);
            self.astray.1 += number.saturating_sub(self.there.1);
            self.there.1 = self.there.1.max(number + 1);
        }
        while let Some((_, received)) = xen.take() {
            let mut numbers = self.back.1..self.back.0;
            let number = numbers.find(|number| received.frame == of(from, to, *number)).expect("in order");
            self.lost += number - self.back.1;
            self.back.1 = number + 1;
        }
        std::thread::sleep(Duration::from_micros(100));
    }

    /// Goes on until frames get through again either way.
    #[track_caller]
    fn until_it_flows(&mut self, xen: &mut DomU, vm: &mut Guest) {
        let (there, back) = (self.there.0, self.back.0);
        eventually("frames flow both ways", || {
            (0..20).for_each(|_| self.turn(xen, vm));
            (self.there.1 > there && self.back.1 > back).then_some(())
        });
    }
}

/// What a guest has granted to one process cannot be passed to another, so the successor opens the port anew, which is late for what comes from others meanwhile. The
/// guest's own frames wait in its ring.
#[test]
fn a_switch_that_is_replaced_leaves_live_rings_to_its_successor() {
    let place = Place::new();
    let (machine, mut switch, mut vm, mut xen) = bed(&place, "", 1, small(1));
    let mut stream = Stream::default();
    for _ in 0..10 {
        stream.until_it_flows(&mut xen, &mut vm);
        switch = replaced(&place, switch, |done| {
            while !done() {
                stream.turn(&mut xen, &mut vm);
            }
        });
        stream.until_it_flows(&mut xen, &mut vm);
        assert_eq!(switch.port(PORT).state, PortState::Up);
        // It did not begin before the other process had let go.
        for text in ["trying again", "cannot be served"] {
            assert_eq!(switch.process.logged(text), 0, "{text}");
        }
    }
    eprintln!("ten replacements: {stream:?}");
    assert_eq!(stream.astray, (0, 0), "what the guest has sent came once");
    assert_eq!(xen.connected, 1, "the front end did not notice");
    xen.front.close();
    xen.until("the end", |guest| !guest.closed.is_empty());
    machine.assert_nothing_left();
    switch.stop();
}

/// Nothing of the port is kept but that it is there.
#[test]
fn a_front_end_outlives_a_killed_switch_that_is_kept() {
    let place = Place::new();
    let mut machine = Machine::new(&place);
    machine.create(DomId(ONE), 0);
    let mut command = kept(&machine.run(&place, &["vm"], "", 1));
    let switch = place.start(&mut command, Vec::new());
    let mut vm = switch.plug("vm", 1, Options::default());
    let mut xen = machine.guest(ONE, small(1));
    xen.plug(&switch, PORT);
    acquaint(&mut xen, &mut vm);
    let mut stream = Stream::default();
    for _ in 0..5 {
        stream.until_it_flows(&mut xen, &mut vm);
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                kill(&place);
                done.store(true, Ordering::Relaxed);
            });
            while !done.load(Ordering::Relaxed) {
                stream.turn(&mut xen, &mut vm);
            }
        });
        stream.until_it_flows(&mut xen, &mut vm);
    }
    eprintln!("five kills: {stream:?}");
    assert_eq!(xen.connected, 1, "the front end did not notice");
    assert!(vm.connection.frontend().check().is_ok());
    xen.front.close();
    xen.until("the end", |guest| !guest.closed.is_empty());
    switch.stop();
}

#[test]
fn interfaces_come_and_go() {
    let place = Place::new();
    let mut machine = Machine::new(&place);
    let switch = place.start(&mut machine.run(&place, &["vm"], "", 1), Vec::new());
    let mut vm = switch.plug("vm", 1, Options::default());
    let ports =
        |switch: &Switch<'_>| switch.show().ports.into_iter().map(|port| port.name).collect::<Vec<_>>();
    assert_eq!(ports(&switch), ["vm", "xen"]);
    for device in [0, 1, 0] {
        machine.create(DomId(ONE), device);
        let name = format!("xen{ONE}.{device}");
        eventually("there is a port", || ports(&switch).contains(&name).then_some(()));
        let mut xen = machine.guest(ONE, FrontConfig { device, ..small(1) });
        xen.plug(&switch, &name);
        acquaint(&mut xen, &mut vm);
        xen.send_numbered(vm.mac, 1, 10);
        vm.expect_numbered(xen.mac, 1, 10);
        machine.unplug(DomId(ONE), device);
        // The toolstack said so to both at once: the front end does not know how far the back end is.
        xen.until("the end", |xen| !xen.closed.is_empty());
        drop(xen);
        eventually("the port is gone", || (ports(&switch) == ["vm", "xen"]).then_some(()));
        assert_eq!(switch.show().fdb.entries.iter().filter(|entry| entry.port == name).count(), 0);
        machine.destroy(DomId(ONE), device);
        machine.assert_nothing_left();
    }
    switch.stop();
}

#[test]
fn one_interface_alone_has_a_port_with_the_name_of_its_entry() {
    let place = Place::new();
    let mut machine = Machine::new(&place);
    machine.create(DomId(ONE), 0);
    machine.create(DomId(ONE), 1);
    let switch = place.start(&mut machine.run(&place, &["vm"], "vif=5.1,name=web", 1), Vec::new());
    let mut vm = switch.plug("vm", 1, Options::default());
    let mut xen = machine.guest(ONE, FrontConfig { device: 1, ..small(1) });
    xen.plug(&switch, "web");
    acquaint(&mut xen, &mut vm);
    assert_eq!(switch.show().ports.len(), 2);
    let (back, _) = nodes(DomId(ONE), 0);
    use ringferry_xen::store::Nodes;
    assert_eq!(machine.tools.text(&format!("{back}/state")).unwrap().as_deref(), Some("1"), "left to others");
    xen.close();
    switch.stop();
}

/// Several times the pause that a flow makes before it moves (half a millisecond).
const PAUSE: Duration = Duration::from_millis(5);

#[test]
fn two_queues_are_served_by_two_workers_and_flows_stay_where_the_guest_sends_them() {
    let place = Place::new();
    let mut machine = Machine::new(&place);
    machine.create(DomId(ONE), 0);
    let switch = place.start(&mut machine.run(&place, &["vm"], "", 2), Vec::new());
    let mut vm = switch.plug("vm", 1, Options::default());
    let mut xen = machine.guest(ONE, small(2));
    xen.plug(&switch, PORT);
    assert_eq!(xen.session.as_ref().unwrap().pairs.len(), 2);
    acquaint(&mut xen, &mut vm);
    for queue in [0, 1, 1, 0] {
        let (header, sent) = tcp(vm.mac, xen.mac, false, &pattern(queue as u32, 500), 0);
        for _ in 0..20 {
            xen.send_on(queue, &header, &sent);
            assert!(vm.receive().frame == sent);
        }
        // A flow follows its sender only after a pause: what is under way to the guest must not be overtaken.
        std::thread::sleep(PAUSE);
        // The same flow the other way round.
        let (header, mut answer) = tcp(xen.mac, vm.mac, false, &pattern(7, 900), 0);
        let (addresses, ports) = (answer[26..34].to_vec(), answer[34..38].to_vec());
        answer[26..34].copy_from_slice(&[&addresses[4..], &addresses[..4]].concat());
        answer[34..38].copy_from_slice(&[&ports[2..], &ports[..2]].concat());
        vm.put(&header, &answer);
        vm.flush();
        let (at, received) = xen.receive_on();
        assert!(received.frame == answer);
        assert_eq!(at, queue, "a flow goes to the queue that it comes from");
    }
    let port = switch.port(PORT);
    assert_eq!(port.queues.len(), 4);
    // Each queue's grants were handed over, whichever worker has it.
    xen.until("static grants", |_| grants(&switch, PORT).iter().all(|queue| queue.static_pages > 300));
    xen.close();
    machine.assert_nothing_left();
    switch.stop();
}

#[test]
fn queues_of_a_xen_guest_change_workers_and_keep_what_they_have_mapped() {
    for queues in [1, 2] {
        let place = Place::new();
        let (machine, switch, mut vm, mut xen) = bed(&place, "", 2, small(queues));
        let mapped = || grants(&switch, PORT).iter().all(|queue| queue.static_pages > 300);
        xen.until("static grants", |_| mapped());
        for round in 0..16 {
            let (queue, worker) = (round % queues, round / queues % 2);
            let request = Request::Assign { port: PORT.into(), queue, worker, runtime: false };
            control::call(&place.control(), &request).unwrap();
            converse(&mut xen, &mut vm, 10, 20);
        }
        assert!(mapped(), "they were handed over once");
        switch.assert_no_drops();
        xen.close();
        machine.assert_nothing_left();
        switch.stop();
    }
}

/// Each does something that only a hostile front end does, after which it must be disconnected.
#[test]
fn hostile_front_ends_harm_only_themselves() {
    type Attack = fn(&mut Raw);
    let attacks: [(&str, Attack); 6] = [
        ("XSA-39: a producer index that runs away", |raw| {
            raw.page.store32_release(0, 100_000);
            raw.channel.notify().unwrap();
        }),
        ("XSA-39: a packet of too many slots", |raw| {
            for id in 0..40 {
                raw.send(id, 0, 10, TxFlags::MORE_DATA);
            }
            raw.publish();
        }),
        ("XSA-39: a packet that never ends", |raw| {
            raw.send(0, 0, 100, TxFlags::MORE_DATA);
            raw.publish();
        }),
        ("XSA-39: bytes beyond the page", |raw| {
            raw.send(0, 4000, 1000, TxFlags::empty());
            raw.publish();
        }),
        ("extras without end", |raw| {
            raw.send(0, 0, 100, TxFlags::EXTRA_INFO);
            for _ in 0..50 {
                raw.tx.push([0x0101, 0, 0]);
            }
            raw.publish();
        }),
        ("an extra of no known kind", |raw| {
            raw.send(0, 0, 100, TxFlags::EXTRA_INFO);
            raw.tx.push([0xee, 0, 0]);
            raw.publish();
        }),
    ];
    let place = Place::new();
    let (mut machine, switch, mut vm, mut good) = bed(&place, "", 1, small(1));
    for (number, (what, attack)) in attacks.into_iter().enumerate() {
        let domain = 20 + number as u16;
        machine.create(DomId(domain), 0);
        let name = format!("xen{domain}.0");
        let mut raw = Raw::plug(&machine, domain);
        switch.until_state(&name, PortState::Up);
        attack(&mut raw);
        switch.until(&name, what, |port| port.state == PortState::Listening);
        switch.process.until_logged_times("is disconnected: ", number + 1);
        converse(&mut good, &mut vm, 10, 20);
        // It never closes anything: the toolstack takes the interface away.
        drop(raw);
        machine.destroy(DomId(domain), 0);
        eventually("its port is gone", || {
            switch.show().ports.iter().all(|port| port.name != name).then_some(())
        });
    }
    assert_eq!(good.connected, 1);
    good.close();
    machine.assert_nothing_left();
    switch.stop();
}

/// XSA-332 and 331: a front end that sends events all the time.
#[test]
fn xsa_332_event_storms_and_bad_grants_are_borne() {
    let place = Place::new();
    let (mut machine, switch, mut vm, mut good) = bed(&place, "", 1, small(1));
    machine.create(DomId(9), 0);
    let mut raw = Raw::plug(&machine, 9);
    for round in 0..10u16 {
        for _ in 0..1000 {
            raw.channel.notify().unwrap();
        }
        // Pages that were never granted: one answer with an error each.
        raw.data[0] = GrantRef(70_000 + u32::from(round));
        raw.send(round, 0, 200, TxFlags::empty());
        raw.publish();
        converse(&mut good, &mut vm, 10, 10);
        let answer = eventually("an answer", || {
            raw.tx.refresh();
            raw.tx.take()
        });
        assert_eq!(TxResponse::from_slot(answer), TxResponse { id: round, status: ERROR });
    }
    assert_eq!(switch.port("xen9.0").drops["rx-bad-memory"], 10);
    assert_eq!(switch.port("xen9.0").state, PortState::Up);
    drop(raw);
    machine.unplug(DomId(9), 0);
    good.close();
    machine.assert_nothing_left();
    switch.stop();
}

/// `ringferry netfront`: a tap is the guest's interface, and the kernel behind it answers.
#[test]
fn a_tap_is_plugged_in_by_the_front_end_program_and_leaves_nothing_behind() {
    if !may_network() {
        return;
    }
    let place = Place::new();
    let mut machine = Machine::new(&place);
    machine.create(DomId(ONE), 0);
    let switch = place.start(&mut machine.run(&place, &["vm"], "", 2), Vec::new());
    let mut vm = switch.plug("vm", 1, Options::default());
    let words = ["--address", "10.99.0.2/24", "--queues", "2", "--json"];
    let mut netfront = Process::start(&mut machine.netfront(ONE, &words), Spawn::default());
    // Not before its pages to receive into are posted.
    netfront.until_logged("the link is up");
    assert_eq!(switch.port(PORT).queues.len(), 4);
    // The address that the toolstack has chosen.
    let tap = Mac([0, 0x16, 0x3e, 0, 0, 9]);
    let (ours, theirs) = (Ipv4Addr::new(10, 99, 0, 1), Ipv4Addr::new(10, 99, 0, 2));
    for _ in 0..50 {
        vm.send(&arp(Mac::BROADCAST, vm.mac, 1, ours, Mac::default(), theirs));
        // The kernel behind the tap may say things of its own.
        let reply = arp(vm.mac, tap, 2, theirs, vm.mac, ours);
        eventually("an answer", || (vm.receive().frame == reply).then_some(()));
    }
    netfront.signal(Signal::TERM);
    let (status, output) = netfront.wait();
    assert!(status.success(), "{:#?}", netfront.log());
    let report: serde_json::Value = serde_json::from_str(&output).unwrap();
    assert_eq!((&report["left_mapped"], &report["connections"]), (&0.into(), &1.into()), "{output}");
    assert!(
        report["rx_packets"].as_u64() >= Some(50) && report["tx_packets"].as_u64() >= Some(50),
        "{output}"
    );
    switch.until_state(PORT, PortState::Listening);
    machine.assert_nothing_left();
    switch.stop();
}

/// A store whose keys a guest makes nonsense of.
#[test]
fn nodes_that_make_no_sense_connect_nothing() {
    let place = Place::new();
    let (mut machine, switch, mut vm, mut good) = bed(&place, "", 1, small(1));
    machine.create(DomId(9), 0);
    let mut raw = Raw::plug(&machine, 9);
    switch.until_state("xen9.0", PortState::Up);
    for (key, value) in [("tx-ring-ref", "-1"), ("multi-queue-num-queues", "4000000000"), ("state", "1")] {
        raw.say(key, value);
    }
    switch.until_state("xen9.0", PortState::Listening);
    raw.say("state", "4");
    switch.process.until_logged("cannot be served");
    converse(&mut good, &mut vm, 10, 10);
    drop(raw);
    machine.unplug(DomId(9), 0);
    good.close();
    machine.assert_nothing_left();
    switch.stop();
}

/// A netback made of nothing but its nodes in the store: it connects, breaks a ring the first time, and lets go when asked.
#[test]
fn d6_a_ring_that_a_back_end_breaks_costs_the_ring_and_not_the_tap() {
    if !may_network() {
        return;
    }
    let place = Place::new();
    let mut machine = Machine::new(&place);
    machine.create(DomId(ONE), 0);
    let (back, front) = nodes(DomId(ONE), 0);
    machine.tools.write(&path::join(&back, "feature-rx-copy"), "1").unwrap();
    let domain = ProcessDomain::connect(place.path().join("broker"), Some(BACK)).unwrap();
    let words = ["--address", "10.99.0.2/24", "--json", "--no-static-grants", "--no-split-events"];
    let mut netfront = Process::start(&mut machine.netfront(ONE, &words), Spawn::default());
    let (mut told, mut ring, mut told_to_end) = ("", None, false);
    let (status, output) = eventually("it has begun anew and ended", || {
        let mut read = |key: &str| machine.tools.text(&path::join(&front, key)).unwrap().unwrap_or_default();
        let now = match (read("state").as_str(), told) {
            // Begins anew, and is offered something; has announced its rings; closes; has closed.
            ("1", "" | "6") => "2",
            ("4", "2") => "4",
            ("5", "4") => "6",
            (_, told) => told,
        };
        if now == "4" && told == "2" && netfront.logged("the link is up") == 0 {
            let gref = GrantRef(read("tx-ring-ref").parse().unwrap());
            let port = EventPort(read("event-channel").parse().unwrap());
            let channel = domain.bind_interdomain(DomId(ONE), port).unwrap();
            let page = domain.foreign(DomId(ONE)).unwrap().map_region(&[gref]).unwrap();
            ring = Some((page, channel));
        }
        if now == "6" {
            ring = None;
        }
        if now != told {
            machine.tools.write(&path::join(&back, "state"), now).unwrap();
            told = now;
        }
        if let Some((page, channel)) = &ring {
            // More responses than there can be requests.
            page.area(0, PAGE).unwrap().store32(8, 4000);
            channel.notify().unwrap();
        }
        if netfront.logged("the link is up") == 2 && !told_to_end {
            netfront.signal(Signal::TERM);
            told_to_end = true;
        }
        (!netfront.is_running()).then(|| netfront.wait())
    });
    assert!(status.success() && told_to_end, "{:#?}", netfront.log());
    netfront.until_logged_times("the back end broke a ring", 1);
    let report: serde_json::Value = serde_json::from_str(&output).unwrap();
    assert_eq!(report["connections"], 2, "{output}");
}

/// A header of the store's messages: the type, the request's number, the transaction's, and the length of what follows.
const STORE_HEADER: usize = 16;

/// Reads a message of the store: its type, and all of it.
fn store_message(stream: &mut UnixStream) -> std::io::Result<(u32, Vec<u8>)> {
    let mut message = vec![0; STORE_HEADER];
    stream.read_exact(&mut message)?;
    let word = |at: usize| u32::from_le_bytes(message[at..at + 4].try_into().unwrap());
    let (kind, len) = (word(0), word(12));
    message.resize(STORE_HEADER + len as usize, 0);
    stream.read_exact(&mut message[STORE_HEADER..])?;
    Ok((kind, message))
}

/// Stands between clients and their store at `socket`: has `look` at each request, by its type and what it is about, before it goes on or, if that returns false,
/// the connection ends, and puts what `chatter` returns before each answer.
fn stand_between(
    socket: PathBuf,
    look: impl Fn(u32, &[u8]) -> bool + Clone + Send + 'static,
    chatter: impl Fn() -> Vec<u8> + Clone + Send + 'static,
) {
    let real = socket.with_extension("real");
    std::fs::rename(&socket, &real).unwrap();
    let listener = UnixListener::bind(&socket).unwrap();
    std::thread::spawn(move || {
        for client in listener.incoming() {
            let client = client.unwrap();
            // The store's socket is gone when the test has ended.
            let Ok(mut store) = UnixStream::connect(&real) else { return };
            let (mut from_client, mut to_client) = (client.try_clone().unwrap(), client.try_clone().unwrap());
            let mut to_store = store.try_clone().unwrap();
            let (look, chatter) = (look.clone(), chatter.clone());
            std::thread::spawn(move || {
                while let Ok((kind, message)) = store_message(&mut from_client) {
                    if !look(kind, &message[STORE_HEADER..]) || to_store.write_all(&message).is_err() {
                        break;
                    }
                }
                let _ = to_store.shutdown(Shutdown::Both);
            });
            std::thread::spawn(move || {
                while let Ok((kind, message)) = store_message(&mut store) {
                    let answers = kind != Kind::WatchEvent as u32;
                    let change = if answers { chatter() } else { Vec::new() };
                    if to_client.write_all(&[change, message].concat()).is_err() {
                        break;
                    }
                }
                let _ = client.shutdown(Shutdown::Both);
            });
        }
    });
}

/// Stands between a client and its store at `socket`. Once `chatters` is set, it tells before every answer that the state which the client watches has been
/// written, as if its peer did nothing else: whoever asks once for each change has always another one.
fn chatter(socket: PathBuf, chatters: Arc<AtomicBool>) {
    // What is told of a change is what was said when the watch began: the path, and the client's mark.
    let watch = Arc::new(Mutex::new(Vec::new()));
    let watched = Arc::clone(&watch);
    let look = move |kind, about: &[u8]| {
        let path = about.split(|byte| *byte == 0).next().unwrap();
        if kind == Kind::Watch as u32 && path.ends_with(b"/state") {
            let header = [Kind::WatchEvent as u32, 0, 0, about.len() as u32].map(u32::to_le_bytes);
            *watched.lock().unwrap() = [header.as_flattened(), about].concat();
        }
        true
    };
    let change = move || {
        if chatters.load(Ordering::Relaxed) { watch.lock().unwrap().clone() } else { Vec::new() }
    };
    stand_between(socket, look, change);
}

/// There is always a step for the front end to take, and it hears its signals all the same.
#[test]
fn d7_a_state_that_is_written_without_end_does_not_keep_the_front_end_from_its_signals() {
    if !may_network() {
        return;
    }
    let place = Place::new();
    let mut machine = Machine::new(&place);
    machine.create(DomId(ONE), 0);
    let (back, front) = nodes(DomId(ONE), 0);
    machine.tools.write(&path::join(&back, "feature-rx-copy"), "1").unwrap();
    let words = ["--address", "10.99.0.2/24", "--no-static-grants", "--no-split-events"];
    let mut command = machine.netfront(ONE, &words);
    let chatters = Arc::new(AtomicBool::new(false));
    chatter(place.path().join(format!("store-{ONE}")), Arc::clone(&chatters));
    let mut netfront = Process::start(&mut command, Spawn::default());
    let state = path::join(&back, "state");
    for (announced, answer) in [("1", "2"), ("4", "4")] {
        eventually("the front end goes on", || {
            let now = machine.tools.text(&path::join(&front, "state")).unwrap();
            (now.as_deref() == Some(announced)).then_some(())
        });
        machine.tools.write(&state, answer).unwrap();
    }
    netfront.until_logged("the link is up");
    chatters.store(true, Ordering::Relaxed);
    machine.tools.write(&state, "4").unwrap();
    netfront.signal(Signal::TERM);
    eventually("it ends", || (!netfront.is_running()).then_some(()));
    assert!(netfront.wait().0.success(), "{:#?}", netfront.log());
    // It has waited for a back end that never let go, and no longer than for any.
    netfront.until_logged_times("the back end does not let go of the interface", 1);
}

/// The switch's store, which can be stopped: what the switch says is then not read.
#[derive(Clone, Default)]
struct StoppableStore {
    /// Held while it is stopped.
    stopped: Arc<Mutex<()>>,
    /// Requests that wait for it.
    waiting: Arc<AtomicUsize>,
    /// The connection ends with the next request.
    ends: Arc<AtomicBool>,
}

impl StoppableStore {
    fn of(place: &Place) -> StoppableStore {
        let store = StoppableStore::default();
        let StoppableStore { stopped, waiting, ends } = store.clone();
        let look = move |_, _: &[u8]| {
            waiting.fetch_add(1, Ordering::SeqCst);
            drop(stopped.lock());
            waiting.fetch_sub(1, Ordering::SeqCst);
            !ends.swap(false, Ordering::SeqCst)
        };
        stand_between(place.path().join("store"), look, Vec::new);
        store
    }

    /// Stops it while the switch asks it something because of `change`. It goes on when what this returns is dropped.
    #[track_caller]
    fn stop(&self, change: impl FnOnce()) -> MutexGuard<'_, ()> {
        let stopped = self.stopped.lock().unwrap();
        change();
        self.until_asked(1);
        stopped
    }

    /// Waits until so many have asked it something while it is stopped, those among them that have ended since.
    #[track_caller]
    fn until_asked(&self, processes: usize) {
        eventually("a request that is not answered", || {
            (self.waiting.load(Ordering::SeqCst) >= processes).then_some(())
        });
    }
}

/// A check for what was done while the store was stopped: the switch has not given it up.
#[track_caller]
fn assert_waits(switch: &Switch<'_>) {
    assert_eq!(switch.process.logged("the store cannot be used any more"), 0);
}

/// The store is for all guests, and may be slow: whoever wants nothing of it does not wait for it.
#[test]
fn a_store_that_is_stopped_holds_up_neither_questions_nor_front_ends_nor_the_end() {
    let place = Place::new();
    let mut machine = Machine::new(&place);
    let store = StoppableStore::of(&place);
    machine.create(DomId(ONE), 0);
    let mut switch = place.start(&mut machine.run(&place, &["vm", "late"], "", 1), Vec::new());
    let mut vm = switch.plug("vm", 1, Options::default());
    let mut xen = machine.guest(ONE, small(1));
    xen.plug(&switch, PORT);
    acquaint(&mut xen, &mut vm);

    let stopped = store.stop(|| machine.create(DomId(ONE + 1), 0));
    assert_eq!(switch.ctl_show().ports.iter().filter(|port| port.state == PortState::Up).count(), 2);
    let mut late = switch.plug("late", 2, Options::default());
    late.send_numbered(vm.mac, 0, 10);
    vm.expect_numbered(late.mac, 0, 10);
    converse(&mut xen, &mut vm, 10, 20);
    assert_waits(&switch);
    drop(stopped);
    let mut other = machine.guest(ONE + 1, small(1));
    other.plug(&switch, "xen6.0");
    other.send_numbered(xen.mac, 30, 10);
    xen.expect_numbered(other.mac, 30, 10);

    let stopped = store.stop(|| machine.create(DomId(ONE + 2), 0));
    switch.process.signal(Signal::TERM);
    let (status, _) = switch.process.wait();
    assert!(status.success(), "{:#?}", switch.process.log());
    assert_waits(&switch);
    drop(stopped);
}

/// A thread that waits for the store lets go of everything at once, so the hypervisor takes whoever comes next, and asks for nothing more.
#[test]
fn a_store_that_is_stopped_holds_up_neither_a_replacement_nor_a_removal() {
    let place = Place::new();
    let mut machine = Machine::new(&place);
    let store = StoppableStore::of(&place);
    machine.create(DomId(ONE), 0);
    let switch = place.start(&mut machine.run(&place, &["vm", "late"], "", 1), Vec::new());
    let mut vm = switch.plug("vm", 1, Options::default());
    let mut late = switch.plug("late", 2, Options::default());
    let mut xen = machine.guest(ONE, small(1));
    xen.plug(&switch, PORT);
    acquaint(&mut xen, &mut vm);

    let stopped = store.stop(|| machine.create(DomId(ONE + 1), 0));
    let switch = replaced(&place, switch, |_| {});
    late.send_numbered(vm.mac, 0, 10);
    vm.expect_numbered(late.mac, 0, 10);
    assert_eq!(switch.process.logged("trying again"), 0, "the process before has let go");
    store.until_asked(2);
    assert_waits(&switch);
    drop(stopped);
    xen.plug(&switch, PORT);
    converse(&mut xen, &mut vm, 10, 20);
    assert_eq!(xen.connected, 1, "the front end did not notice");

    let stopped = store.stop(|| machine.create(DomId(ONE + 2), 0));
    place.ctl(&["remove", "xen"]);
    assert!(switch.show().ports.iter().all(|port| !port.name.starts_with("xen")));
    assert_eq!(machine.broker.mapped_pages(), 0);
    assert!(ProcessDomain::connect(place.path().join("broker"), Some(BACK)).is_ok(), "the domain is free");
    assert_waits(&switch);
    drop(stopped);
    late.send_numbered(vm.mac, 10, 10);
    vm.expect_numbered(late.mac, 10, 10);
    let (back, _) = nodes(DomId(ONE + 2), 0);
    let state = machine.tools.text(&path::join(&back, "state")).unwrap();
    assert_eq!(state.as_deref(), Some("1"), "nobody offers the new interface anything");
    switch.stop();
}

/// Its ring is found broken while the switch is about to learn that it leaves: it is let go once, and its next connection is not taken for the one before.
#[test]
fn a_front_end_that_is_disconnected_while_it_leaves_may_come_back() {
    let place = Place::new();
    let mut machine = Machine::new(&place);
    let store = StoppableStore::of(&place);
    let switch = place.start(&mut machine.run(&place, &["vm"], "", 1), Vec::new());
    let mut vm = switch.plug("vm", 1, Options::default());
    for round in 0..3 {
        let domain = 20 + round;
        let port = format!("xen{domain}.0");
        machine.create(DomId(domain), 0);
        let mut raw = Raw::plug(&machine, domain);
        switch.until_state(&port, PortState::Up);
        let stopped = store.stop(|| raw.say("state", "5"));
        raw.page.store32_release(0, 100_000);
        raw.channel.notify().unwrap();
        switch.until_state(&port, PortState::Listening);
        switch.process.until_logged_times("is disconnected: ", usize::from(round) + 1);
        drop(raw);
        drop(stopped);
        let mut xen = machine.guest(domain, small(1));
        xen.plug(&switch, &port);
        acquaint(&mut xen, &mut vm);
        xen.close();
    }
    machine.assert_nothing_left();
    switch.stop();
}

#[test]
fn a_store_that_is_lost_is_reached_again_and_the_front_end_does_not_notice() {
    let place = Place::new();
    let mut machine = Machine::new(&place);
    let store = StoppableStore::of(&place);
    machine.create(DomId(ONE), 0);
    let switch = place.start(&mut machine.run(&place, &["vm"], "", 1), Vec::new());
    let mut vm = switch.plug("vm", 1, Options::default());
    let mut xen = machine.guest(ONE, small(1));
    xen.plug(&switch, PORT);
    acquaint(&mut xen, &mut vm);
    for times in 1..=3 {
        store.ends.store(true, Ordering::SeqCst);
        machine.create(DomId(ONE + times), 0);
        switch.process.until_logged_times("the store cannot be used any more", times.into());
        switch.process.until_logged_times("the store is there", 1 + usize::from(times));
        xen.plug(&switch, PORT);
        converse(&mut xen, &mut vm, 10, 20);
        // Those that are new as well as those that were there.
        let new = format!("xen{}.0", ONE + times);
        eventually("a port", || switch.show().ports.iter().any(|port| port.name == new).then_some(()));
    }
    assert_eq!((xen.connected, switch.process.logged("trying again")), (1, 0));
    xen.close();
    machine.assert_nothing_left();
    switch.stop();
}
