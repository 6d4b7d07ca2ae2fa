//! Front ends, switches and their parts come and go, in any order and at any moment.

use std::collections::BTreeSet;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::process::Command;
use std::time::Duration;

use ringferry_control::snapshot::PortState;
use ringferry_memory::{RegionSpec, SharedMem};
use ringferry_packet::ether::Mac;
use ringferry_packet::vnet::Header;
use ringferry_rig::frames::frame;
use ringferry_rig::guest::{Guest, Options, acquaint, converse};
use ringferry_rig::process::{PATIENCE, Process, eventually, in_a_namespace, may};
use ringferry_rig::raw::Raw;
use ringferry_rig::switch::{Place, Switch, ringferry};
use ringferry_ring::Buffer;
use ringferry_sys::cpu;
use ringferry_sys::eventfd::EventFd;
use ringferry_sys::process::Spawn;
use ringferry_sys::program;
use ringferry_sys::socket::{Listener, Stream};
use ringferry_vhost_user::FrontendError;
use rustix::event::{PollFd, PollFlags};
use rustix::process::{Pid, Resource, Rlimit, Signal};

use crate::straight::Host;

/// Two guests that talk to each other while things happen to others.
pub fn bystanders(switch: &Switch<'_>) -> (Guest, Guest) {
    let mut a = switch.plug("a", 1, Options::default());
    let mut b = switch.plug("b", 2, Options::default());
    acquaint(&mut [&mut a, &mut b]);
    (a, b)
}

#[test]
fn fifty_reconnects_in_mid_traffic_leak_nothing_and_disturb_nobody() {
    let place = Place::new();
    let switch = place.switch(&["a", "b", "restless"]);
    let (mut a, mut b) = bystanders(&switch);
    let before = switch.process.descriptors();
    for round in 0..50 {
        let mut restless = switch.plug("restless", 3, Options::default());
        // To and from it, at the moment it goes: nobody reads what it gets, nor waits for what it sent.
        restless.send_numbered(Mac::BROADCAST, 0, 20);
        a.send_numbered(restless.mac, 0, 20);
        drop(restless);
        a.pump();
        b.pump();
        // Whatever came of it, the two take part in traffic as before.
        b.send(&frame(a.mac, b.mac, 64, 1000 + round));
        let last = loop {
            let bytes = a.receive_plain();
            if bytes[..12] == frame(a.mac, b.mac, 14, 0)[..12] {
                break bytes;
            }
        };
        assert_eq!(last, frame(a.mac, b.mac, 64, 1000 + round));
        switch.until_state("restless", PortState::Listening);
    }
    let port = switch.port("restless");
    assert_eq!((port.counters["connections"], port.counters["ring_errors"]), (50, 0));
    assert_eq!(port.queues, []);
    switch.process.until_no_more_than(&before);
    assert_eq!(switch.process.mappings("ringferry-driver"), 2);
    // Its address went with it.
    let known = switch.show().fdb.entries;
    assert!(known.iter().all(|entry| entry.port != "restless"), "{known:?}");
    switch.stop();
}

#[test]
fn one_front_end_at_a_time_and_the_next_one_waits() {
    let place = Place::new();
    let switch = place.switch(&["a", "b"]);
    let (mut a, b) = bystanders(&switch);
    // Whoever only looks whether somebody listens waits for nothing.
    (0..40).for_each(|_| drop(switch.connect("b")));
    let waiting = switch.connect("b");
    switch.process.until_logged("waits until this one has disconnected");
    drop(waiting);
    let waits = || place.ctl(&["show", "b"]).contains("another front end has connected, and waits");
    eventually("who waited and went is forgotten", || (!waits()).then_some(()));
    let waiting = switch.connect("b");
    eventually("another one waits", || waits().then_some(()));
    let why = place.ctl(&["why", "b"]);
    assert!(
        why.contains("Another front end has connected to ") && why.contains("a port serves one machine"),
        "{why}"
    );
    drop(b);
    let mut next = Guest::plug(waiting, 3, Options::default());
    switch.until_state("b", PortState::Up);
    acquaint(&mut [&mut a, &mut next]);
    converse(&mut a, &mut next, 1, 10);
    switch.process.until_logged_times("waits until this one has disconnected", 1);
    switch.stop();
}

#[test]
fn a_front_end_that_shares_no_memory_is_told_what_to_do() {
    let place = Place::new();
    let switch = place.switch(&["a", "b"]);
    let mut raw = Raw::plug(switch.connect("a"));
    switch.until_state("a", PortState::Up);
    // All memory goes, and nothing else.
    raw.connection.frontend().set_mem_table(&[]).unwrap();
    let port = switch.until_state("a", PortState::NoMemory);
    assert!(
        port.fault
            .is_some_and(|fault| fault.contains("share=on") && fault.contains("<access mode='shared'/>"))
    );
    switch.process.until_logged_times("no packet can pass: the front end has started the device", 1);
    drop(raw);
    switch.until_state("a", PortState::Listening);
    // The next one does better.
    let (mut a, mut b) = bystanders(&switch);
    converse(&mut a, &mut b, 0, 20);
    assert_eq!(switch.port("a").fault, None);
    switch.stop();
}

#[test]
fn a_connecting_port_finds_front_ends_that_come_later_and_come_back() {
    let place = Place::new();
    let switch = place.switch(&["a", "later,mode=connect"]);
    let mut a = switch.plug("a", 1, Options::default());
    assert_eq!(switch.port("later").state, PortState::Connecting);
    switch.process.until_logged("no front end at");
    for number in 2..4 {
        let listener = Listener::bind(place.socket("later")).unwrap();
        let stream = eventually("the switch connects", || listener.accept().unwrap());
        let mut later = Guest::plug(stream, number, Options::default());
        switch.until_state("later", PortState::Up);
        acquaint(&mut [&mut a, &mut later]);
        converse(&mut a, &mut later, 1, 20);
        drop((listener, later));
        switch.until_state("later", PortState::Connecting);
    }
    switch.stop();
}

#[test]
fn sigterm_and_sigint_end_it_and_remove_its_sockets() {
    for signal in [Signal::TERM, Signal::INT] {
        let place = Place::new();
        let mut switch = place.switch(&["a", "b", "c", "d,mode=connect"]);
        let (mut a, mut b) = bystanders(&switch);
        assert_eq!(place.files(), ["a.sock", "b.sock", "c.sock", "control"]);
        a.send_numbered(b.mac, 0, 50);
        switch.process.signal(signal);
        let (status, _) = switch.process.wait();
        assert!(status.success(), "{status}");
        switch.process.until_logged_times("the switch ends, as SIG", 1);
        assert_eq!(place.files(), [""; 0]);
        // What was sent before either arrived or did not; the guests find the connection closed.
        b.pump();
        assert!(a.connection.frontend().check().is_err());
    }
}

#[test]
fn signals_that_mean_nothing_to_it_are_logged_and_ignored() {
    let place = Place::new();
    let mut switch = place.switch(&["a", "b"]);
    let (mut a, mut b) = bystanders(&switch);
    for (signal, line) in [
        (Signal::HUP, "INFO the switch was started without a configuration file"),
        (Signal::USR1, "nothing is re-read on SIGUSR1"),
        (Signal::USR2, "nothing is re-read on SIGUSR2"),
    ] {
        switch.process.signal(signal);
        switch.process.until_logged(line);
        converse(&mut a, &mut b, 1, 20);
    }
    switch.stop();
}

#[test]
fn after_sigkill_a_new_switch_takes_the_same_sockets_and_running_guests_go_on() {
    let place = Place::new();
    let mut switch = place.switch(&["a", "b"]);
    let (mut a, mut b) = bystanders(&switch);
    converse(&mut a, &mut b, 0, 30);
    switch.process.signal(Signal::KILL);
    switch.process.wait();
    assert_eq!(place.files(), ["a.sock", "b.sock", "control"]);
    // Sent while nobody is there: it is in the ring, and goes out when someone is.
    a.send_numbered(b.mac, 100, 20);
    drop(switch);

    let switch = place.switch(&["a", "b"]);
    b.move_to(switch.connect("b"));
    switch.until_state("b", PortState::Up);
    a.move_to(switch.connect("a"));
    b.expect_numbered(a.mac, 100, 20);
    switch.until_state("a", PortState::Up);
    converse(&mut a, &mut b, 200, 60);
    switch.stop();
    assert_eq!(place.files(), [""; 0]);
}

/// A second region for `guest`, of one page.
fn extra_region(at: u64) -> (SharedMem, RegionSpec) {
    let memory = SharedMem::new("extra", 4096).unwrap();
    let size = memory.size() as u64;
    (memory, RegionSpec { guest_addr: at, size, user_addr: at, mmap_offset: 0 })
}

/// Frames that a guest sends are never lost; those that others send to it while its rings are being moved may be
/// dropped, and is counted.
#[test]
fn the_memory_map_changes_under_traffic_and_every_packet_is_accounted_for() {
    const ROUNDS: u32 = 20;
    const BURST: u32 = 40;
    let place = Place::new();
    let switch = place.switch(&["a", "b"]);
    let (mut a, mut b) = bystanders(&switch);
    let mut arrived = 0;
    for round in 0..ROUNDS {
        // Under way while the map changes, in both directions.
        let first = round * BURST;
        a.send_numbered(b.mac, first, BURST);
        b.send_numbered(a.mac, first, BURST);
        let (memory, spec) = extra_region(0x8000_0000 + u64::from(round) * 0x10_0000);
        let region = [(a.arena.region(), a.arena.fd())];
        let frontend = a.connection.frontend();
        match round % 2 {
            0 => frontend.set_mem_table(&region).unwrap(),
            _ => {
                frontend.add_mem_reg(spec, memory.fd()).unwrap();
                frontend.rem_mem_reg(spec).unwrap();
            }
        }
        b.expect_numbered(a.mac, first, BURST);
        b.drain();
        // Behind all that b sent in this round.
        switch.until_state("a", PortState::Up);
        let end = frame(a.mac, b.mac, 60, u32::MAX);
        b.send(&end);
        let mut expected = first..first + BURST;
        loop {
            let received = a.receive_plain();
            if received == end {
                break;
            }
            let number = expected.find(|number| received == frame(a.mac, b.mac, 100, *number));
            assert!(number.is_some(), "in order, unharmed, and only once");
            arrived += 1;
        }
    }
    // No packet counts twice, and none is missing: the rings resumed just where they were.
    let port = switch.port("a");
    assert_eq!(port.counters["rx_packets"], u64::from(ROUNDS * BURST + 1));
    assert_eq!(port.counters["ring_errors"], 0);
    assert_eq!(port.counters["tx_packets"], arrived + u64::from(ROUNDS + 1));
    assert_eq!(arrived + port.drops["link-down"], u64::from(ROUNDS * BURST));
    switch.stop();
}

#[test]
fn plugged_memory_carries_packets_until_it_is_unplugged() {
    let place = Place::new();
    let switch = place.switch(&["a", "b"]);
    let (mut a, mut b) = bystanders(&switch);
    let (memory, spec) = extra_region(0x8000_0000);
    let mapped = memory.map_at(spec.guest_addr).unwrap();
    let map = ringferry_memory::GuestMemory::new(vec![mapped]).unwrap();
    let frame = frame(b.mac, a.mac, 500, 1);
    let bytes = [&[0; 12][..], &frame].concat();
    map.translator().write(spec.guest_addr, bytes.len()).unwrap().copy_from(&bytes);
    let send_from_it = |a: &mut Guest| {
        let buffer = Buffer { addr: spec.guest_addr, len: bytes.len() as u32 };
        // A token of no packet: it only comes back below.
        a.pair.transmitq.driver().ring().add(&[buffer], &[], ()).unwrap();
        a.publish_ring();
    };
    a.drain();

    a.connection.frontend().add_mem_reg(spec, memory.fd()).unwrap();
    send_from_it(&mut a);
    assert_eq!(b.receive_plain(), frame);
    eventually("the buffer comes back", || a.pair.transmitq.driver().ring().collect());
    assert_eq!(switch.process.mappings("extra"), 1);
    a.connection.frontend().rem_mem_reg(spec).unwrap();
    // Unmapping a guest's memory may take long, so a thread that serves nobody does it.
    eventually("the region is unmapped", || (switch.process.mappings("extra") == 0).then_some(()));
    // It is gone for good, not once more.
    assert!(matches!(a.connection.frontend().rem_mem_reg(spec), Err(FrontendError::Refused(_))));

    converse(&mut a, &mut b, 1, 20);
    send_from_it(&mut a);
    let port = switch.until_state("a", PortState::Broken);
    assert!(port.queues[1].broken.is_some());
    switch.stop();
}

/// vhost-user, "Ring states": GET_VRING_BASE stops a ring, and what it returns is where it resumes.
#[test]
fn rings_stopped_at_any_moment_resume_without_losing_or_repeating_a_packet() {
    let place = Place::new();
    let switch = place.switch(&["a", "b"]);
    let (mut a, mut b) = bystanders(&switch);
    for round in 0..50u32 {
        let first = round * 60;
        a.send_numbered(b.mac, first, 60);
        let bases = a.connection.stop().unwrap();
        // More, while nobody looks.
        a.send_numbered(b.mac, first + 1_000_000, 2);
        a.start(&bases).unwrap();
        b.expect_numbered(a.mac, first, 60);
        b.expect_numbered(a.mac, first + 1_000_000, 2);
    }
    switch.until_state("a", PortState::Up);
    converse(&mut a, &mut b, 1, 100);
    assert_eq!(switch.port("a").counters["rx_packets"], 50 * 62 + 1 + 100);
    switch.stop();
}

/// vhost-user, "Ring states": while a ring is disabled, what the guest sends is discarded and nothing
/// is delivered.
#[test]
fn a_disabled_ring_carries_nothing_and_every_frame_is_counted() {
    let place = Place::new();
    let switch = place.switch(&["a", "b"]);
    let (mut a, mut b) = bystanders(&switch);
    a.connection.set_enabled(1, false).unwrap();
    assert_eq!(switch.port("a").state, PortState::Down);
    a.send_numbered(b.mac, 0, 20);
    a.drain();
    a.connection.set_enabled(1, true).unwrap();
    a.connection.set_enabled(0, false).unwrap();
    // The sender is not held up.
    switch.show();
    a.send_numbered(b.mac, 100, 20);
    b.expect_numbered(a.mac, 100, 20);
    b.send_numbered(a.mac, 200, 30);
    b.drain();
    assert_eq!(switch.port("a").drops["link-down"], 20 + 30);
    a.connection.set_enabled(0, true).unwrap();
    switch.until_state("a", PortState::Up);
    converse(&mut a, &mut b, 300, 40);
    switch.stop();
}

#[test]
fn a_guest_that_shrinks_its_memory_file_loses_its_connection_and_nothing_else() {
    let place = Place::new();
    let mut switch = place.switch(&["a", "b", "shrinking"]);
    let (mut a, mut b) = bystanders(&switch);
    let before = switch.process.descriptors();
    for _ in 0..2 {
        let mut raw = Raw::plug(switch.connect("shrinking"));
        raw.post(16);
        switch.until_state("shrinking", PortState::Up);
        rustix::fs::ftruncate(&raw.file, 0).unwrap();
        // Both queues are looked at: its kick, and frames for it.
        raw.kick(ringferry_rig::raw::TX);
        a.send(&frame(Mac::BROADCAST, a.mac, 60, 1));
        b.receive_plain();
        switch.until_state("shrinking", PortState::Listening);
        assert!(raw.connection.frontend().check().is_err(), "the connection is closed");
        converse(&mut a, &mut b, 1, 50);
    }
    assert!(switch.process.is_running());
    switch.process.until_logged_times("guest memory was truncated", 2);
    switch.process.until_no_more_than(&before);
    assert_eq!(switch.process.mappings("raw-guest"), 0);
    // The port serves the next guest.
    let mut honest = switch.plug("shrinking", 3, Options::default());
    acquaint(&mut [&mut honest, &mut a, &mut b]);
    converse(&mut honest, &mut a, 1, 20);
    switch.stop();
}

#[test]
fn what_is_no_eventfd_is_refused_as_a_kick_and_the_ring_can_be_kicked_properly_afterwards() {
    let place = Place::new();
    let switch = place.switch(&["a", "b", "odd"]);
    let (mut a, mut b) = bystanders(&switch);
    let mut raw = Raw::plug(switch.connect("odd"));
    let (pipe, _write) = rustix::pipe::pipe().unwrap();
    let file = OwnedFd::from(tempfile::tempfile().unwrap());
    let (socket, _other) = Stream::pair().unwrap();
    let socket = OwnedFd::from(socket);
    for (index, fd) in [&pipe, &file, &socket].into_iter().enumerate() {
        let frontend = raw.connection.frontend();
        for refused in [
            frontend.set_vring_kick(1, Some(fd.as_fd())),
            frontend.set_vring_call(0, Some(fd.as_fd())),
            frontend.set_vring_err(0, Some(fd.as_fd())),
        ] {
            assert!(matches!(refused, Err(FrontendError::Refused(_))), "descriptor {index}");
        }
    }
    switch.process.until_logged("not an eventfd");
    // The session is intact, its rings run on.
    switch.until_state("odd", PortState::Up);
    raw.send(&frame(Mac::BROADCAST, Mac([2, 0, 0, 0, 0, 9]), 60, 1));
    assert_eq!((a.receive_plain().len(), b.receive_plain().len()), (60, 60));
    switch.stop();
}

/// A semaphore whose counter is full stays readable however often it is read: it must not keep the worker awake.
#[test]
fn m6_a_kick_that_never_falls_silent_costs_its_session_and_does_not_keep_the_switch_awake() {
    let place = Place::new();
    let switch = place.switch(&["a", "b", "odd"]);
    let (mut a, mut b) = bystanders(&switch);
    let mut raw = Raw::plug(switch.connect("odd"));
    switch.until_state("odd", PortState::Up);
    let flags = rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::SEMAPHORE;
    let semaphore = rustix::event::eventfd(0, flags).unwrap();
    rustix::io::write(&semaphore, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    let _ = raw.connection.frontend().set_vring_kick(1, Some(semaphore.as_fd()));
    let port = switch.until("odd", "out of service", |port| port.fault.is_some());
    assert_eq!(port.fault.as_deref(), Some("its kick event never falls silent"));
    // Its driver is not accused beside.
    assert_eq!((port.counters["ring_errors"], switch.process.logged("queue is broken")), (0, 0));
    converse(&mut a, &mut b, 1, 20);
    assert_idle(&switch.process);
    switch.stop();
}

/// Threads that wait for an event so often that whoever signals or reads it goes through hundreds of thousands of entries. They wait for what never comes,
/// until this is dropped.
struct Crowd {
    end: Option<std::io::PipeWriter>,
    threads: Vec<std::thread::JoinHandle<()>>,
}

impl Crowd {
    /// Entries in all: some milliseconds for each who goes through them.
    const ENTRIES: usize = 300_000;

    fn before(event: &impl AsFd) -> Crowd {
        let most = rustix::process::getrlimit(Resource::Nofile).current.map_or(4096, |most| most.min(20_000));
        let (end, writer) = std::io::pipe().unwrap();
        let ready = std::sync::Arc::new(std::sync::Barrier::new(Self::ENTRIES / most as usize + 1));
        let threads = (1..=Self::ENTRIES / most as usize).map(|_| {
            let (event, end, ready) =
                (event.as_fd().try_clone_to_owned().unwrap(), end.try_clone().unwrap(), ready.clone());
            std::thread::spawn(move || {
                let mut entries = vec![PollFd::new(&event, PollFlags::PRI); most as usize - 1];
                entries.push(PollFd::new(&end, PollFlags::IN));
                ready.wait();
                rustix::event::poll(&mut entries, None).unwrap();
            })
        });
        let threads = threads.collect();
        ready.wait();
        Crowd { end: Some(writer), threads }
    }
}

impl Drop for Crowd {
    fn drop(&mut self) {
        self.end.take();
        self.threads.drain(..).for_each(|thread| thread.join().unwrap());
    }
}

/// Who signals or reads an eventfd goes through all that wait for it, which may be millions. That is not blocked, but busy, in the kernel.
#[test]
fn events_for_which_a_crowd_waits_cost_their_session() {
    let place = Place::new();
    let switch = place.switch(&["a", "b", "called", "kicked"]);
    let (mut a, mut b) = bystanders(&switch);
    let flags = rustix::event::EventfdFlags::CLOEXEC;
    let why = "it makes whoever uses its events wait in the kernel";

    let mut called = Raw::plug(switch.connect("called"));
    called.post(200);
    switch.until_state("called", PortState::Up);
    let call = rustix::event::eventfd(0, flags).unwrap();
    called.connection.frontend().set_vring_call(0, Some(call.as_fd())).unwrap();
    let crowd = Crowd::before(&call);
    for _ in 0..100 {
        a.send(&frame(Mac::BROADCAST, a.mac, 60, 1));
        b.receive_plain();
    }
    let port = switch.until("called", "out of service", |port| port.fault.is_some());
    assert_eq!(port.fault.as_deref(), Some(why));
    drop(crowd);

    let mut kicked = Raw::plug(switch.connect("kicked"));
    switch.until_state("kicked", PortState::Up);
    let kick = rustix::event::eventfd(0, flags).unwrap();
    kicked.connection.frontend().set_vring_kick(1, Some(kick.as_fd())).unwrap();
    let crowd = Crowd::before(&kick);
    let port = switch.until("kicked", "out of service", |port| {
        rustix::io::write(&kick, &1u64.to_ne_bytes()).unwrap();
        port.fault.is_some()
    });
    assert_eq!(port.fault.as_deref(), Some(why));
    drop(crowd);
    // Nobody else is accused.
    assert!(["a", "b"].iter().all(|port| switch.port(port).fault.is_none()));
    converse(&mut a, &mut b, 1, 20);
    switch.stop();
}

/// The same for the end of a connection, which its front end is told of.
#[test]
fn a_crowd_that_waits_for_the_end_of_connections_has_its_port_wait() {
    let place = Place::new();
    let switch = place.switch(&["a", "b", "c"]);
    let (mut a, mut b) = bystanders(&switch);
    let was_ended = || {
        let villain = switch.connect("c");
        let crowd = Crowd::before(&villain);
        villain.set_timeout(Some(Duration::from_millis(500))).unwrap();
        villain.send(b"GET / HTTP/1.1\r\n\r\n", &[]).unwrap();
        let told = villain.recv(&mut [0], &mut Vec::new());
        drop((villain, crowd));
        // With what it has not read, as it was no message, it is reset.
        told.map_or_else(|error| error.kind() == std::io::ErrorKind::ConnectionReset, |_| true)
    };
    let rounds = (0..ROUNDS_OF_A_CROWD).take_while(|_| was_ended()).count();
    assert!((1..ROUNDS_OF_A_CROWD).contains(&rounds), "{rounds} rounds, and no end");
    converse(&mut a, &mut b, 1, 20);
    switch.stop();
}

/// Far more connections than a port has with whose ends it has used up its allowance, if each takes the switch a few milliseconds.
const ROUNDS_OF_A_CROWD: usize = 150;

/// All threads of the process sleep whenever they are looked at. One that spins is never asleep, however
/// little of a loaded machine it gets.
#[track_caller]
fn assert_idle(process: &Process) {
    const LOOKS: usize = 20;
    eventually("the process sleeps", || {
        let asleep = |_| {
            std::thread::sleep(Duration::from_millis(10));
            process.is_asleep()
        };
        (0..LOOKS).all(asleep).then_some(())
    });
}

fn netif_delete(name: &str) {
    assert!(Command::new("ip").args(["link", "delete", name]).status().unwrap().success());
}

/// A tap has no ring that is looked at: while a worker polls, it asks the kernel instead.
#[test]
fn a_worker_that_polls_finds_what_a_tap_has_without_sleeping() {
    in_a_namespace(|| {
        let place = Place::new();
        let file = place.path().join("switch.toml");
        std::fs::write(&file, "[switch]\nworkers = 1\npoll_microseconds = 100000\n").unwrap();
        // The switch has a processor to itself, as far as this test is concerned: the scheduler often lets threads that wake each other share one.
        let cpus = cpu::allowed().unwrap();
        cpu::pin_current_thread(cpus[0]).unwrap();
        let switch = place.start(place.run(&["a"]).args(["--port", "tap:rf0"]).arg(file), Vec::new());
        cpu::pin_current_thread(*cpus.last().unwrap()).unwrap();
        let host = Host::new();
        let mut a = switch.plug("a", 1, Options::default());
        let sleeps = || switch.show().workers[0].sleeps;
        // Then nothing but the tap is left to be looked at, as the guest never sends.
        let started = sleeps();
        eventually("the guest's queue is armed", || (sleeps() > started).then_some(()));
        // Asking takes the processor from the worker, so it is asked before and after many packets, not for each.
        const PACKETS: u64 = 50;
        eventually("packets are found by looking, which takes a processor that nobody else wants", || {
            let before = sleeps();
            for _ in 0..PACKETS {
                host.datagram(b"found");
                assert!(a.receive().frame.ends_with(b"found"));
            }
            (sleeps() - before < PACKETS).then_some(())
        });
        switch.stop();
    });
}

#[test]
fn a_tap_that_was_deleted_is_not_taken_for_another_interface_of_its_name() {
    in_a_namespace(|| {
        if !may("needs the program ip", program::installed("ip").is_some()) {
            return;
        }
        let place = Place::new();
        let switch = place.start(place.run(&["a"]).args(["--port", "tap:rf0"]), Vec::new());
        let mut a = switch.plug("a", 1, Options::default());
        // The switch makes the tap anew within a second, unless something else has its name by then.
        let batch = place.path().join("batch");
        std::fs::write(&batch, "link delete rf0\nlink add rf0 type bridge\nlink set rf0 up\n").unwrap();
        let replaced = || Command::new("ip").arg("-batch").arg(&batch).status().unwrap().success();
        eventually("another interface has the name", || replaced().then_some(()));
        switch.process.until_logged("the tap is gone");
        switch.process.until_logged("it cannot be opened anew yet: interface rf0 exists, but not as a tap");
        let port = switch.port("rf0");
        assert_eq!((port.state, port.mtu, port.mac), (PortState::Down, 0, None));
        assert!(port.fault.unwrap().contains("another interface has its name now"));
        // To set that one up would not help.
        let why = place.ctl(&["why", "rf0"]);
        assert!(
            why.contains("1. rf0: another interface has its name now") && !why.contains("is down"),
            "{why}"
        );
        // What is sent to it is lost because it is gone, and the frame is not to blame.
        a.send(&frame(Mac::BROADCAST, a.mac, 60, 1));
        let port = switch.until("rf0", "has dropped it", |port| port.drops["link-down"] > 0);
        assert_eq!(port.drops["tap-write-error"], 0);
        // When the name is free the tap is back.
        netif_delete("rf0");
        switch.until_state("rf0", PortState::Up);
        assert_eq!(switch.port("rf0").fault, None);
        switch.stop();
    });
}

#[test]
fn a_tap_that_was_renamed_or_moved_is_as_up_as_it_was() {
    in_a_namespace(|| {
        if !may("needs the program ip", program::installed("ip").is_some()) {
            return;
        }
        let place = Place::new();
        let switch = place.start(place.run(&["a"]).args(["--port", "tap:rf0"]), Vec::new());
        let mut a = switch.plug("a", 1, Options::default());
        let batch = place.path().join("batch");
        let ip = |lines: &str| {
            std::fs::write(&batch, lines).unwrap();
            assert!(Command::new("ip").arg("-batch").arg(&batch).status().unwrap().success(), "{lines}");
        };
        let mut sent = 0;
        let mut expect = |fault: &str| {
            let port = switch.port("rf0");
            assert!(port.state == PortState::Up && port.fault.unwrap().starts_with(fault));
            let why = place.ctl(&["why", "rf0"]);
            assert!(why.contains(&format!("rf0: {fault}")), "{why}");
            sent += 1;
            a.send(&frame(Mac::BROADCAST, a.mac, 60, 1));
            switch.until("rf0", "has got it", |port| port.counters["tx_packets"] >= sent);
            assert_eq!(switch.port("rf0").drops["link-down"], 0);
        };
        ip("link set rf0 down\nlink set rf0 name rf7\nlink set rf7 up\n");
        expect("packets still pass, but its interface is called rf7 now");
        switch.process.until_logged("its interface is called rf7 now");
        // What a name has in it moves no cursor.
        ip("link set rf7 down\nlink set rf7 name rf\x1b[2J\nlink set rf\x1b[2J up\n");
        expect("packets still pass, but its interface is called rf\\u{1b}[2J now");
        ip("link set rf\x1b[2J down\nlink set rf\x1b[2J name rf7\nlink set rf7 up\n");
        let mut other = Command::new("unshare").args(["--net", "sleep", "60"]).spawn().unwrap();
        let apart = || {
            let space = |process: &str| std::fs::read_link(format!("/proc/{process}/ns/net")).unwrap();
            (space(&other.id().to_string()) != space("thread-self")).then_some(())
        };
        eventually("it has a network namespace", apart);
        ip(&format!("link set rf7 netns {}\n", other.id()));
        // The kernel has taken it down on the way.
        let port = switch.until_state("rf0", PortState::Down);
        assert!(port.fault.unwrap().starts_with("its interface is in another network namespace, as rf7"));
        switch.process.until_logged("its interface is in another network namespace, as rf7");
        let up = format!("--target={}", other.id());
        let up = Command::new("nsenter").args([&up, "--net", "ip", "link", "set", "rf7", "up"]).status();
        assert!(up.unwrap().success());
        expect("packets still pass, but its interface is in another network namespace");
        other.kill().unwrap();
        other.wait().unwrap();
        // With the namespace its interfaces go.
        switch.until_state("rf0", PortState::Up);
        switch.until("rf0", "is made anew", |port| port.fault.is_none());
        let why = place.ctl(&["why", "rf0"]);
        assert!(why.contains("The interface of rf0 (rf0) was deleted and made anew "), "{why}");
        switch.stop();
    });
}

/// It has lost its addresses, its bridge and its state on the way.
#[test]
fn a_tap_that_comes_back_from_another_namespace_is_set_up_again() {
    in_a_namespace(|| {
        if !may("needs the program ip", program::installed("ip").is_some()) {
            return;
        }
        let place = Place::new();
        let tap = "tap:rf0,address=10.9.8.7/24,up=on,mtu=1400";
        let switch = place.start(place.run(&["a"]).args(["--port", tap]), Vec::new());
        let command = |text: &str| {
            let output = Command::new("sh").args(["-c", text]).output().unwrap();
            assert!(output.status.success(), "{text}: {output:?}");
            String::from_utf8(output.stdout).unwrap()
        };
        let mut other = Command::new("unshare").args(["--net", "sleep", "60"]).spawn().unwrap();
        let apart = || {
            let space = |process: &str| std::fs::read_link(format!("/proc/{process}/ns/net")).unwrap();
            (space(&other.id().to_string()) != space("thread-self")).then_some(())
        };
        eventually("it has a network namespace", apart);
        command(&format!("ip link set rf0 netns {}", other.id()));
        switch.process.until_logged("its interface is in another network namespace, as rf0");
        let why = place.ctl(&["why", "rf0"]);
        assert!(why.contains("The switch then sets it up as the port has it"), "{why}");
        command(&format!(
            "nsenter --target {} --net ip link set rf0 netns {}",
            other.id(),
            rustix::thread::gettid().as_raw_nonzero()
        ));
        switch.process.until_logged("the interface rf0 is where it was, and is set up as the port has it");
        assert!(command("ip -brief address show dev rf0").contains("10.9.8.7/24"));
        assert!(command("ip link show dev rf0 up").contains("mtu 1400"));
        switch.until_state("rf0", PortState::Up);
        other.kill().unwrap();
        other.wait().unwrap();
        switch.stop();
    });
}

/// The fault was told until a reload, which could not make it anew, as the switch itself listens there.
#[test]
fn l_a_socket_that_was_moved_away_and_back_is_as_it_was() {
    let place = Place::new();
    let switch = place.switch(&["a"]);
    let (socket, aside) = (place.socket("a"), place.path().join("aside"));
    std::fs::rename(&socket, &aside).unwrap();
    switch.until("a", "is missed", |port| port.fault.is_some());
    std::fs::rename(&aside, &socket).unwrap();
    switch.until("a", "is there again", |port| port.fault.is_none());
    switch.process.until_logged("its socket is where it was");
    let _guest = switch.plug("a", 1, Options::default());
    switch.stop();
}

#[test]
fn a_control_socket_that_was_removed_is_missed_in_the_log() {
    let place = Place::new();
    let mut switch = place.switch(&["a"]);
    std::fs::remove_file(place.control()).unwrap();
    switch.process.until_logged("somebody has removed the control socket");
    if may("root, for a network namespace", rustix::process::geteuid().is_root()) {
        let mut ctl = Command::new("unshare");
        ctl.arg("--net")
            .arg(ringferry().get_program())
            .args(["ctl", "show", "--control"])
            .arg(place.control());
        let said = String::from_utf8(ctl.output().unwrap().stderr).unwrap();
        assert!(said.contains("but somebody has removed its file"), "{said}");
    }
    // It is made anew when somebody asks for it, by the helper if there is one.
    switch.process.signal(Signal::HUP);
    switch.process.until_logged("is made anew");
    assert_eq!(switch.port("a").state, PortState::Listening);
    assert_eq!(switch.process.logged("somebody has removed the control socket"), 1);
    switch.stop();
    assert_eq!(place.files(), [""; 0]);
}

/// Whatever path it was given at its start.
#[test]
fn a_switch_with_a_relative_control_socket_whose_file_is_gone_is_not_started_again() {
    let place = Place::new();
    let mut run = ringferry();
    run.current_dir(place.control().parent().unwrap());
    run.args(["run", "--control"]).arg(place.control().file_name().unwrap());
    run.arg("--port").arg(format!("vhost-user:{}", place.socket("a").display()));
    let mut switch = place.start(&mut run, Vec::new());
    std::fs::remove_file(place.control()).unwrap();
    let output = ringferry().args(["ctl", "show", "--control"]).arg(place.control()).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("but somebody has removed its file"), "{said}");
    switch.process.signal(Signal::HUP);
    switch.process.until_logged("is made anew");
    assert_eq!(switch.port("a").state, PortState::Listening);
    switch.stop();
}

/// A reload has nothing to read again there, and mends what can be mended, also by SIGHUP.
#[test]
fn a_removed_socket_of_a_switch_without_a_file_is_made_anew_by_a_reload() {
    let place = Place::new();
    let mut switch = place.switch(&["a", "b"]);
    let (mut a, mut b) = bystanders(&switch);
    let lose = |switch: &Switch| {
        std::fs::remove_file(place.socket("a")).unwrap();
        switch.until("a", "misses its socket", |port| port.fault.is_some());
    };
    lose(&switch);
    assert!(place.ctl(&["why", "a"]).contains("`ringferry ctl reload` makes it anew"));
    let made = "~ a: its socket was removed: that is made anew\n";
    assert_eq!(place.ctl(&["reload"]), format!("{made}1 port has changed\n"));
    switch.until("a", "has its socket", |port| port.fault.is_none());
    lose(&switch);
    switch.process.signal(Signal::HUP);
    switch.until("a", "has its socket", |port| port.fault.is_none());
    converse(&mut a, &mut b, 1, 20);
    let output = ringferry().args(["ctl", "--control"]).arg(place.control()).arg("reload").output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("nothing to read again, and no socket or interface to be mended"), "{said}");
    switch.stop();
}

#[test]
fn a_ring_larger_than_the_port_allows_is_shown_as_broken_and_a_smaller_one_is_served() {
    let place = Place::new();
    let switch = place.switch(&["a,queue_size=128", "b"]);
    let large = Guest::plug(switch.connect("a"), 1, Options::default());
    let port = switch.until("a", "is broken", |port| port.state == PortState::Broken);
    let broken = |index: usize| port.queues[index].broken.as_deref();
    assert!(broken(0).is_some_and(|why| why.contains("256 entries, and the port's queue_size allows 128")));
    assert_eq!(broken(1), None, "64 entries are not too many");
    switch.process.until_logged("queue 0 cannot be served: it has 256 entries");
    drop(large);
    let mut a = switch.plug("a", 1, Options { rx: 128, ..Options::default() });
    let mut b = switch.plug("b", 2, Options::default());
    acquaint(&mut [&mut a, &mut b]);
    converse(&mut a, &mut b, 1, 20);
    drop((a, b));
    switch.stop();
}

#[test]
fn a_guest_without_events_is_polled() {
    let place = Place::new();
    let switch = place.switch(&["a", "b", "quiet"]);
    let (mut a, mut b) = bystanders(&switch);
    let mut quiet = switch.plug("quiet", 3, Options::default());
    acquaint(&mut [&mut quiet, &mut a, &mut b]);
    let bases = quiet.connection.stop().unwrap();
    quiet.start(&bases).unwrap();
    for index in [0, 1] {
        quiet.connection.frontend().set_vring_kick(index, None).unwrap();
        quiet.connection.frontend().set_vring_call(index, None).unwrap();
    }
    switch.until_state("quiet", PortState::Up);
    for number in 0..50 {
        let frame = frame(a.mac, quiet.mac, 100, number);
        quiet.put(&Header::default(), &frame);
        // Published, and nobody told.
        quiet.pair.transmitq.flush();
        assert_eq!(a.receive_plain(), frame);
    }
    a.send_numbered(quiet.mac, 0, 50);
    for number in 0..50 {
        let received = eventually("a frame arrives", || {
            quiet.pump();
            quiet.take()
        });
        assert_eq!(received.frame, frame(quiet.mac, a.mac, 100, number));
    }
    converse(&mut a, &mut b, 1, 20);
    switch.stop();
}

/// A listening socket, as a service manager makes it.
fn listening(place: &Place, name: &str) -> OwnedFd {
    UnixListener::bind(place.socket(name)).unwrap().into()
}

fn run_with(place: &Place, port: &str) -> Command {
    let mut command = place.run(&["a"]);
    command.args(["--port", port]);
    command
}

#[test]
fn a_socket_from_systemd_is_taken_over_and_left_in_place() {
    let place = Place::new();
    let run = run_with(&place, "vhost-user-activation:vm0");
    // LISTEN_PID is the number of the process itself, so it is set from within.
    let mut shell = Command::new("sh");
    shell.args(["-c", "LISTEN_PID=$$ exec \"$0\" \"$@\""]).arg(run.get_program()).args(run.get_args());
    shell.env("LISTEN_FDS", "2").env("LISTEN_FDNAMES", "other:vm0");
    let sockets = vec![(listening(&place, "other"), 3), (listening(&place, "vm0"), 4)];
    let switch = place.start(&mut shell, sockets);
    assert_eq!(switch.port("vm0").state, PortState::Listening);
    let mut a = switch.plug("a", 1, Options::default());
    for number in 2..4 {
        let mut b = switch.plug("vm0", number, Options::default());
        acquaint(&mut [&mut a, &mut b]);
        converse(&mut a, &mut b, 1, 20);
        drop(b);
        switch.until_state("vm0", PortState::Listening);
    }
    switch.stop();
    assert_eq!(place.files(), ["other.sock", "vm0.sock"]);
}

#[test]
fn an_inherited_listening_socket_serves_one_front_end_after_the_other() {
    let place = Place::new();
    let mut run = run_with(&place, "vhost-user-fd:7,name=vm7");
    let switch = place.start(&mut run, vec![(listening(&place, "vm7"), 7)]);
    let mut a = switch.plug("a", 1, Options::default());
    for number in 2..4 {
        let mut b = switch.plug("vm7", number, Options::default());
        acquaint(&mut [&mut a, &mut b]);
        converse(&mut a, &mut b, 1, 20);
        drop(b);
        switch.until_state("vm7", PortState::Listening);
    }
    switch.stop();
    assert_eq!(place.files(), ["vm7.sock"]);
}

#[test]
fn an_inherited_connection_is_served_once_and_its_end_is_no_load() {
    let place = Place::new();
    let (ours, theirs) = Stream::pair().unwrap();
    let theirs = OwnedFd::from(theirs);
    // The parent keeps its copy, so the socket stays open when the switch closes its own.
    let copy = theirs.try_clone().unwrap();
    let mut run = run_with(&place, "vhost-user-fd:5");
    let switch = place.start(&mut run, vec![(theirs, 5)]);
    let mut a = switch.plug("a", 1, Options::default());
    let mut b = Guest::plug(ours, 2, Options::default());
    switch.until_state("fd5", PortState::Up);
    acquaint(&mut [&mut a, &mut b]);
    converse(&mut a, &mut b, 1, 20);
    drop(b);
    switch.until_state("fd5", PortState::Down);
    assert_idle(&switch.process);
    drop(copy);
    switch.stop();
}

#[test]
fn the_service_manager_is_told_of_start_and_end() {
    let place = Place::new();
    let path = place.path().join("notify");
    let manager = UnixDatagram::bind(&path).unwrap();
    manager.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut run = place.run(&["a"]);
    run.env("NOTIFY_SOCKET", &path).env("WATCHDOG_USEC", "200000").args(["--workers", "2"]);
    let mut process = Process::start_as_is(&mut run, Spawn::default());
    let mut buffer = [0; 128];
    let mut alive = 0;
    let mut next = |alive: &mut u32| loop {
        let len = manager.recv(&mut buffer).unwrap();
        match &buffer[..len] {
            b"WATCHDOG=1" => *alive += 1,
            other => return String::from_utf8_lossy(other).into_owned(),
        }
    };
    assert_eq!(next(&mut alive), "READY=1");
    assert_eq!(next(&mut alive), "STATUS=0 of 1 port up, 2 workers");
    // Ready means that front ends can connect.
    let guest = Guest::plug(Stream::connect(place.socket("a")).unwrap(), 1, Options::default());
    assert_eq!(next(&mut alive), "STATUS=1 of 1 port up, 2 workers");
    // A reload begins and ends, also one that finds nothing to read.
    process.signal(Signal::HUP);
    let reloading = next(&mut alive);
    assert!(reloading.starts_with("RELOADING=1\nMONOTONIC_USEC="), "{reloading}");
    assert_eq!(next(&mut alive), "READY=1");
    drop(guest);
    assert_eq!(next(&mut alive), "STATUS=0 of 1 port up, 2 workers");
    assert!(alive > 0, "it is alive");
    process.signal(Signal::TERM);
    assert_eq!(next(&mut alive), "STOPPING=1");
    assert!(process.wait().0.success());
    assert_eq!(place.files(), ["notify"]);
}

/// `command`, started with its log on a full disk.
fn with_a_full_disk(command: &Command) -> Command {
    let mut shell = Command::new("sh");
    shell.args(["-c", "exec \"$0\" \"$@\" 2>/dev/full"]).arg(command.get_program()).args(command.get_args());
    shell
}

#[test]
fn a_log_on_a_full_disk_changes_nothing_but_the_log() {
    let place = Place::new();
    for sandbox in ["on", "off"] {
        let mut run = with_a_full_disk(place.run(&["a", "b"]).args(["--sandbox", sandbox]));
        let switch = place.start(&mut run, Vec::new());
        let (mut a, mut b) = bystanders(&switch);
        converse(&mut a, &mut b, 1, 20);
        switch.stop();
    }
    // What cannot start ends as it does with a log.
    let mut run = with_a_full_disk(&place.run(&["no/such/folder/a"]));
    let (status, _) = Process::start(&mut run, Spawn::default()).wait();
    assert_eq!(status.code(), Some(1), "{status}");
}

/// Sets how many descriptors a running switch may have; returns how many it might have before.
pub(crate) fn limit_descriptors(switch: &Switch<'_>, current: Option<u64>) -> Option<u64> {
    let pid = Pid::from_raw(switch.process.pid() as i32);
    // The hard limit, which it inherited from us, stays.
    let Rlimit { maximum, .. } = rustix::process::getrlimit(Resource::Nofile);
    let limit = Rlimit { current, maximum };
    rustix::process::prlimit(pid, Resource::Nofile, limit).unwrap().current
}

/// A table that grows while a switch changes hands has all packets wait for the kernel.
#[test]
fn a_switch_has_room_for_all_its_descriptors_from_the_start() {
    let place = Place::new();
    let switch = place.switch(&["a"]);
    let limit = limit_descriptors(&switch, rustix::process::getrlimit(Resource::Nofile).maximum);
    let status = std::fs::read_to_string(format!("/proc/{}/status", switch.process.pid())).unwrap();
    let size = status.lines().find_map(|line| line.strip_prefix("FDSize:")).unwrap().trim().parse::<u64>();
    assert!(size.clone().unwrap() >= limit.unwrap_or(u64::MAX).min(65_536), "{size:?} of {limit:?}");
    switch.stop();
}

/// The number that the next descriptor of a switch will have. What front ends have passed is closed by another thread, and would leave room: when all threads sleep, it is.
fn lowest_free_descriptor(switch: &Switch<'_>) -> u64 {
    let used = || -> BTreeSet<u64> {
        let fds = std::fs::read_dir(format!("/proc/{}/fd", switch.process.pid())).unwrap();
        fds.map(|fd| fd.unwrap().file_name().to_str().unwrap().parse().unwrap()).collect()
    };
    let used = eventually("what was passed is closed", || {
        let before = used();
        (switch.process.is_asleep() && used() == before).then_some(before)
    });
    (0..).find(|number| !used.contains(number)).unwrap()
}

#[test]
fn a_front_end_whose_descriptors_find_no_room_is_not_blamed_for_it() {
    let place = Place::new();
    let switch = place.switch(&["a", "b"]);
    let mut a = Guest::plug(switch.connect("a"), 1, Options::default());
    let mut raw = Raw::plug(switch.connect("b"));
    let limit = limit_descriptors(&switch, Some(3));
    let call = EventFd::new().unwrap();
    let _ = raw.connection.frontend().set_vring_call(1, Some(call.as_fd()));
    switch.process.until_logged("no room for the descriptors that came with a message");
    switch.process.until_logged_times("LimitNOFILE=", 1);
    limit_descriptors(&switch, limit);
    drop(raw);
    let mut b = switch.plug("b", 2, Options::default());
    acquaint(&mut [&mut a, &mut b]);
    converse(&mut a, &mut b, 1, 20);
    switch.stop();
}

#[test]
fn an_added_port_whose_descriptor_finds_no_room_says_so() {
    let place = Place::new();
    let switch = place.start(place.run(&["a"]).args(["--sandbox", "on"]), Vec::new());
    let add = || {
        let mut command = ringferry();
        let port = format!("vhost-user:{}", place.socket("late").display());
        command.args(["ctl", "--control"]).arg(place.control()).args(["add", &port]).output().unwrap()
    };
    // The client that asks takes the only one that is left.
    let limit = limit_descriptors(&switch, Some(lowest_free_descriptor(&switch) + 1));
    let refused = add();
    let said = String::from_utf8(refused.stderr).unwrap();
    assert!(
        !refused.status.success()
            && said.contains("there is no room for more: raise the limit of open files"),
        "{said}"
    );
    limit_descriptors(&switch, limit);
    assert!(add().status.success());
    switch.stop();
}

#[test]
fn the_environment_says_which_switch_and_what_is_logged() {
    let place = Place::new();
    let run = place.run(&["a"]);
    let mut shell = Command::new("env");
    shell.args(["RUST_LOG=info,ringferry_switch=warn"]).arg(run.get_program()).args(run.get_args());
    let switch = place.start(&mut shell, Vec::new());
    let show = ringferry().args(["ctl", "show"]).env("RINGFERRY_CONTROL", place.control()).output().unwrap();
    assert!(String::from_utf8(show.stdout).unwrap().contains("listening"));
    switch.process.until_logged("the switch is up");
    assert_eq!(switch.process.logged("a front end has connected"), 0);
    let guest = switch.plug("a", 1, Options::default());
    drop(guest);
    switch.until_state("a", PortState::Listening);
    assert_eq!(switch.process.logged("a front end has connected"), 0, "that is said by ringferry_switch");
    switch.stop();
    let mut shell = Command::new("env");
    shell.arg("RUST_LOG=a=b=c").arg(run.get_program()).args(run.get_args());
    let switch = place.start(&mut shell, Vec::new());
    switch.process.until_logged("RUST_LOG=\"a=b=c\" is not understood");
    switch.stop();
}

/// A port whose switch has no descriptor left for a connection waits until there is one, asleep.
#[test]
fn running_out_of_descriptors_is_survived_without_spinning() {
    let place = Place::new();
    let switch = place.switch(&["a", "b"]);
    // Nobody asks the switch anything meanwhile: that takes a descriptor, too.
    let mut a = Guest::plug(switch.connect("a"), 1, Options::default());
    let limit = limit_descriptors(&switch, Some(lowest_free_descriptor(&switch)));

    let waiting = switch.connect("b");
    switch.process.until_logged("cannot accept");
    assert_idle(&switch.process);
    limit_descriptors(&switch, limit);
    let mut b = Guest::plug(waiting, 2, Options::default());
    switch.until_state("b", PortState::Up);
    acquaint(&mut [&mut a, &mut b]);
    converse(&mut a, &mut b, 1, 20);
    switch.process.until_logged_times("cannot accept", 1);
    switch.process.until_logged_times("LimitNOFILE=", 1);
    switch.stop();
}

/// A device may die after it has shown buffers and before it has called for them. With EVENT_IDX no later
/// device would call for those, nor, once the index has passed the event, for any other.
#[test]
fn a_ring_that_starts_calls_once_whatever_was_shown_before() {
    let place = Place::new();
    let switch = place.switch(&["a", "b"]);
    let mut a = switch.plug("a", 1, Options::default());
    let mut b = switch.plug("b", 2, Options::default());
    acquaint(&mut [&mut a, &mut b]);
    let bases = a.connection.stop().unwrap();
    a.take_call();
    a.start(&bases).unwrap();
    a.expect_call();
    converse(&mut a, &mut b, 1, 20);
    switch.stop();
}
