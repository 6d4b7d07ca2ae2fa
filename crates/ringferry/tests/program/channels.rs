//! Several queue pairs between the kernels of two network namespaces: `ringferry guest --queues`, and how the number of
//! pairs in use changes under traffic.

use std::collections::BTreeMap;
use std::net::UdpSocket;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use ringferry_control::channels::Channels;
use ringferry_control::{self as control, Answer, ControlError, Request};
use ringferry_rig::process::{PATIENCE, Process, eventually, may, may_network, readable};
use ringferry_rig::switch::{Place, Switch, ringferry};
use ringferry_sys::eventfd::EventFd;
use ringferry_sys::namespace;
use ringferry_sys::process::Spawn;
use ringferry_sys::socket::{Listener, Stream};
use ringferry_sys::{cpu, usage};
use ringferry_vhost_user::{Device, Offer, RingSetup, Session};
use ringferry_virtio_net::{Features, queue_index};
use rustix::process::Signal;

use crate::replace::replaced;

const TAP: &str = "eth0";

/// `ringferry guest` with a namespace of its own.
struct Guest {
    process: Process,
    control: PathBuf,
}

impl Guest {
    /// Starts one that plugs into `socket`, and uses all its pairs whatever there is to do.
    fn start(place: &Place, name: &str, address: &str, queues: u16, socket: &Path) -> Guest {
        Guest::start_with(
            place,
            name,
            address,
            &["--queues", &queues.to_string(), "--spread-at", "0"],
            socket,
        )
    }

    fn start_with(place: &Place, name: &str, address: &str, options: &[&str], socket: &Path) -> Guest {
        let control = place.path().join(format!("{name}.ctl"));
        let mut command = ringferry();
        command.args(["-v", "guest", "--tap", TAP, "--address", &format!("{address}/24")]);
        command.args(options).arg("--control").arg(&control).arg("--socket").arg(socket);
        let process = Process::start(&mut command, Spawn { new_net: true, ..Spawn::default() });
        Guest { process, control }
    }

    /// Waits until a back end serves it.
    #[track_caller]
    fn until_up(&self) {
        eventually("the link is up", || {
            match control::call(&self.control, &Request::Show { addresses: None }) {
                Ok(Answer::Guest(guest)) => guest.up.then_some(()),
                Err(ControlError::NotRunning(_)) => None,
                other => panic!("{other:?}"),
            }
        });
    }

    fn change(&self, combined: Option<u16>) -> Result<Channels, ControlError> {
        match control::call(&self.control, &Request::Channels { port: TAP.to_owned(), combined })? {
            Answer::Channels(channels) => Ok(channels),
            other => panic!("{other:?}"),
        }
    }

    /// Most pairs, and those in use.
    #[track_caller]
    fn channels(&self) -> (u16, u16) {
        let channels = self.change(None).unwrap();
        (channels.max_combined, channels.combined)
    }

    #[track_caller]
    fn set(&self, combined: u16) {
        assert_eq!(self.change(Some(combined)).unwrap().combined, combined);
    }

    #[track_caller]
    fn stats(&self) -> BTreeMap<String, u64> {
        match control::call(&self.control, &Request::Stats { port: TAP.to_owned(), queues: true }).unwrap() {
            Answer::Stats(stats) => stats.counters,
            other => panic!("{other:?}"),
        }
    }

    /// Returns the output of `ringferry ctl`.
    #[track_caller]
    fn ctl(&self, arguments: &[&str]) -> String {
        let output =
            ringferry().arg("ctl").arg("--control").arg(&self.control).args(arguments).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    /// A line `Name: N kB` of its status.
    fn status(&self, name: &str) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.process.pid())).unwrap();
        let line = status.lines().find(|line| line.starts_with(name)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }

    /// Starts another process in its namespace.
    fn beside(&self, arguments: &[&str]) -> Process {
        let net = namespace::open_net(self.process.pid()).unwrap();
        let mut command = ringferry();
        command.args(arguments).stdout(Stdio::piped());
        Process::start(&mut command, Spawn { join_net: Some(net), ..Spawn::default() })
    }

    /// Has its kernel send broadcasts of so many flows.
    fn broadcast(&self, flows: usize) {
        let net = namespace::open_net(self.process.pid()).unwrap();
        let send = move || {
            namespace::join_net(net).unwrap();
            for _ in 0..flows {
                let socket = UdpSocket::bind("10.9.0.1:0").unwrap();
                socket.set_broadcast(true).unwrap();
                socket.connect("10.9.0.255:9").unwrap();
                socket.send(b"x").unwrap();
            }
        };
        std::thread::spawn(send).join().unwrap();
    }
}

/// Two guests on a switch, and a traffic server in the second one's namespace.
struct Rig<'a> {
    place: &'a Place,
    switch: Switch<'a>,
    a: Guest,
    b: Guest,
    _server: Process,
}

impl<'a> Rig<'a> {
    fn new(place: &'a Place, queues: u16) -> Rig<'a> {
        Rig::new_with(place, |name, address| Guest::start(place, name, address, queues, &place.socket(name)))
    }

    fn new_with(place: &'a Place, guest: impl Fn(&str, &str) -> Guest) -> Rig<'a> {
        let switch = place.switch(&["a", "b"]);
        let [a, b] = [("a", "10.9.0.1"), ("b", "10.9.0.2")].map(|(name, address)| guest(name, address));
        a.until_up();
        b.until_up();
        let server = b.beside(&["traffic", "server", "--bind", "10.9.0.2"]);
        Rig { place, switch, a, b, _server: server }
    }

    /// Starts traffic from the first guest to the second.
    fn traffic(&self, options: &str) -> Process {
        let mut arguments = vec!["traffic", "client", "--to", "10.9.0.2", "--json", "--wait", "10"];
        arguments.extend(options.split_whitespace());
        self.a.beside(&arguments)
    }

    /// Kernel's count of datagrams that found a socket of the second guest full.
    fn sockets_full(&self) -> u64 {
        let snmp = std::fs::read_to_string(format!("/proc/{}/net/snmp", self.b.process.pid())).unwrap();
        let mut lines = snmp.lines().filter(|line| line.starts_with("Udp: "));
        let (names, counts) = (lines.next().unwrap(), lines.next().unwrap());
        let at = names.split(' ').position(|name| name == "RcvbufErrors").unwrap();
        counts.split(' ').nth(at).unwrap().parse().unwrap()
    }
}

impl Guest {
    /// Kernel's count of packets that found the queue of the tap full, as their reader waited for a processor.
    fn tap_full(&self) -> u64 {
        let devices = std::fs::read_to_string(format!("/proc/{}/net/dev", self.process.pid())).unwrap();
        let tap = devices.lines().find_map(|line| line.trim_start().strip_prefix(TAP)?.strip_prefix(':'));
        let tap = tap.unwrap();
        tap.split_whitespace().nth(TX_DROP).unwrap().parse().unwrap()
    }
}

/// The column of packets that were dropped before they were sent, in `/proc/net/dev`.
const TX_DROP: usize = 11;

/// The client's report; nothing that arrived was wrong.
#[track_caller]
fn report(client: &mut Process) -> serde_json::Value {
    let (status, output) = client.wait();
    assert!(status.success(), "{:#?}", client.log());
    let report: serde_json::Value = serde_json::from_str(&output).unwrap();
    assert_eq!(report["corrupt"], 0);
    assert!(report["bytes"].as_u64().unwrap() > 0);
    report
}

#[test]
fn several_pairs_carry_traffic_and_each_counts_its_own() {
    if !may_network() {
        return;
    }
    let place = Place::new();
    let rig = Rig::new(&place, 3);
    assert_eq!(rig.a.channels(), (3, 3));
    // Flows find their queue by a hash: that none of so many finds one of three has a chance of 1 in 50000.
    report(&mut rig.traffic("--mode tcp-both --sessions 32 --seconds 1"));
    report(&mut rig.traffic("--mode udp --sessions 32 --size 64 --rate 100k --seconds 1"));
    for guest in [&rig.a, &rig.b] {
        let stats = guest.stats();
        for way in ["rx", "tx"] {
            let queue = |pair: u16, what: &str| stats[&format!("{way}_queue_{pair}_{what}")];
            assert!((0..3).all(|pair| queue(pair, "packets") > 0 && queue(pair, "bytes") > 0), "{stats:#?}");
            // Packets may pass while the counters of one queue after another are read.
            let sum: u64 = (0..3).map(|pair| queue(pair, "packets")).sum();
            assert_eq!(sum, stats[&format!("{way}_packets")]);
        }
        assert!((0..3).all(|pair| stats[&format!("rx_queue_{pair}_next_buffer")] >= 1514), "{stats:#?}");
        assert_eq!((stats["rx_drops"], stats["tx_drops"], stats["tx_lost"]), (0, 0, 0));
    }

    let text = rig.a.ctl(&["channels", TAP]);
    assert!(text.starts_with("Channel parameters for eth0:\n") && text.matches("Combined: 3\n").count() == 2);
    let steering = rig.a.ctl(&["steering", TAP]);
    assert_eq!(steering.matches(" enabled ").count(), 3, "{steering}");
    assert!(rig.a.ctl(&["stats", TAP, "--queues"]).contains("\n     rx_queue_2_next_buffer: "));
    assert!(!rig.a.ctl(&["stats", TAP]).contains("queue_"));
    let show = rig.a.ctl(&["show"]);
    assert!(show.contains("rx_queue_0_next_buffer: ") && show.contains("link up"), "{show}");

    // The switch tells what the guest did, and changes nothing of it.
    let ask =
        |combined| control::call(&rig.place.control(), &Request::Channels { port: "a".to_owned(), combined });
    let Answer::Channels(channels) = ask(None).unwrap() else { panic!("channels") };
    assert_eq!((channels.combined, channels.started), (3, 3));
    assert!(channels.max_combined > 3);
    let refused = ask(Some(1)).unwrap_err().to_string();
    assert!(refused.contains("the guest on port \"a\" decides"), "{refused}");
    rig.a.set(2);
    eventually("the switch has heard of it", || {
        let Answer::Channels(channels) = ask(None).unwrap() else { panic!("channels") };
        (channels.combined == 2 && channels.started == 3).then_some(())
    });
    rig.switch.stop();
}

/// Flows stay on the first pair while that is enough, spread when it is not, those that are there already among them, and return.
#[test]
fn flows_take_more_pairs_when_one_is_not_enough_and_leave_them_again() {
    if !may_network() {
        return;
    }
    let place = Place::new();
    // One per cent of a processor is soon too much for one pair.
    let options = ["--queues", "3", "--spread-at", "1"];
    let rig = Rig::new_with(&place, |name, address| {
        Guest::start_with(&place, name, address, &options, &place.socket(name))
    });
    let used = |guest: &Guest| guest.ctl(&["steering", TAP]).matches(" enabled ").count();
    let packets = |guest: &Guest| {
        let stats = guest.stats();
        [0, 1, 2].map(|pair| {
            stats[&format!("rx_queue_{pair}_packets")] + stats[&format!("tx_queue_{pair}_packets")]
        })
    };
    // For longer than a guest may post no buffers: those of pairs that are not enabled are not missed.
    report(&mut rig.traffic("--mode tcp --sessions 1 --size 1024 --rate 100k --seconds 6"));
    let stalled = |port: &str| rig.switch.port(port).queues.iter().any(|queue| queue.stalled.is_some());
    assert!(!stalled("a") && !stalled("b"));
    assert_eq!(rig.switch.process.logged("its guest has"), 0, "{:#?}", rig.switch.process.log());
    let guests = [&rig.a, &rig.b];
    for guest in guests {
        assert_eq!(guest.channels(), (3, 3));
        let [first, rest @ ..] = packets(guest);
        assert!(first > 0);
        assert!(rest == [0; 2] || used(guest) == 3, "{rest:?}");
    }
    let mut client = rig.traffic("--mode tcp-both --sessions 100 --size 1024 --rate 100k --seconds 200");
    // Nothing spreads where no processor is free for it: until the tests beside this one are done, perhaps.
    let idle = || usage::idle_time(&cpu::allowed().unwrap()).unwrap();
    let patience = 2 * PATIENCE;
    let (end, idle_before) = (Instant::now() + patience, idle());
    let spread = || guests.iter().all(|guest| used(guest) == 3);
    while !spread() && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(50));
    }
    let free = idle() - idle_before > patience / 4;
    if !may("needs half a processor that nobody else keeps busy", spread() || free) {
        return;
    }
    assert!(spread(), "a processor is free, and flows do not spread");
    // Connections that were there before move, too, to any pair alike: no other packets come. Of 200 flows on three pairs one in
    // 30 000 times a pair has less than a fifth.
    for guest in guests {
        let mut before = packets(guest);
        eventually("all pairs carry a fair share", || {
            let now = packets(guest);
            let passed = [0, 1, 2].map(|pair| now[pair] - before[pair]);
            let sum: u64 = passed.iter().sum();
            (sum >= 1000).then(|| before = now)?;
            passed.iter().all(|count| 5 * count >= sum).then_some(())
        });
    }
    client.signal(Signal::TERM);
    client.wait();
    for guest in guests {
        eventually("flows have returned", || (used(guest) == 1).then_some(()));
    }
    report(&mut rig.traffic("--mode tcp --sessions 4 --seconds 0.2"));
    for guest in guests {
        assert_eq!((guest.stats()["tx_drops"], guest.stats()["tx_lost"]), (0, 0));
    }
    rig.switch.stop();
}

/// The kernels at both ends, with all the pairs in use, do not notice that another process takes over the switch between them.
#[test]
fn a_switch_between_kernels_is_replaced_and_no_packet_is_lost() {
    if !may_network() {
        return;
    }
    let place = Place::new();
    let mut rig = Rig::new(&place, 2);
    for options in ["--mode udp --sessions 8 --size 64 --rate 1M --seconds 3", "--mode tcp-both --seconds 2"]
    {
        let mut client = rig.traffic(options);
        let (end, mut replacements) = (Instant::now() + Duration::from_millis(1500), 0);
        while Instant::now() < end || replacements < 3 {
            rig.switch = replaced(&place, rig.switch, |_| ());
            replacements += 1;
        }
        let report = report(&mut client);
        let drops = |reason: &str| rig.switch.show().ports.iter().map(|port| port.drops[reason]).sum::<u64>();
        assert_eq!(drops("link-down"), 0);
        if options.contains("udp") {
            let taps = rig.a.tap_full() + rig.b.tap_full();
            let late = rig.sockets_full() + taps + drops("no-receive-buffers");
            let (lost, sent) = (report["lost"].as_u64().unwrap(), &report["sent_packets"]);
            eprintln!("{replacements} replacements, {sent} packets, {lost} lost");
            assert!(lost <= late, "{lost} packets of {sent} lost, {late} of them by slow readers");
            assert_eq!((&report["duplicated"], &report["reordered"]), (&0.into(), &0.into()));
        }
    }
    for guest in [&rig.a, &rig.b] {
        assert_eq!(guest.process.logged("the back end has disconnected"), 0);
    }
    for port in ["a", "b"] {
        assert_eq!(rig.switch.port(port).counters["connections"], 1);
    }
    rig.switch.stop();
}

/// VIRTIO 1.4, 5.1.6.5.6: packets that were accepted survive a change of the number of pairs.
#[test]
fn pairs_come_and_go_under_traffic_and_no_packet_is_lost() {
    if !may_network() {
        return;
    }
    let place = Place::new();
    let rig = Rig::new(&place, 4);
    let before = [&rig.a, &rig.b].map(|guest| guest.process.descriptors());
    // Few packets, so that none is lost in a socket whose reader waits for a processor, of many flows.
    let mut client = rig.traffic("--mode udp --sessions 8 --size 64 --rate 256k --seconds 8");
    let end = Instant::now() + Duration::from_secs(7);
    let mut changes = 0;
    while Instant::now() < end {
        for combined in [1, 4, 2, 3] {
            rig.a.set(combined);
            rig.b.set(5 - combined);
            changes += 2;
        }
    }
    let report = report(&mut client);
    let permitted = rig.a.process.logged("cannot tell the tap") == 0;
    if !may("needs CAP_BPF, without which a tap loses packets when a queue is detached", permitted) {
        return;
    }
    let show = rig.switch.show();
    let drops = |reason: &str| show.ports.iter().map(|port| port.drops[reason]).sum::<u64>();
    assert_eq!(drops("link-down"), 0, "sent on a ring that was not enabled, or not any more");
    eprintln!("{changes} changes, {} packets, {} lost", report["sent_packets"], report["lost"]);
    assert!(changes >= 8);
    let late = rig.sockets_full() + drops("no-receive-buffers");
    let lost = report["lost"].as_u64().unwrap();
    assert!(
        lost <= late,
        "{lost} packets of {} lost, {late} of them by slow receivers",
        report["sent_packets"]
    );
    assert_eq!(report["duplicated"], 0);
    for (guest, before) in [&rig.a, &rig.b].into_iter().zip(&before) {
        guest.process.until_no_more_than(before);
        assert_eq!((guest.stats()["tx_drops"], guest.stats()["rx_drops"]), (0, 0));
    }
    rig.switch.stop();
}

#[test]
fn a_thousand_changes_take_no_memory_and_no_descriptors() {
    if !may_network() {
        return;
    }
    let place = Place::new();
    let switch = place.switch(&["a"]);
    let guest = Guest::start(&place, "a", "10.9.0.1", 4, &place.socket("a"));
    guest.until_up();
    let change = |times: usize| (0..times).for_each(|round| guest.set([1, 2, 4][round % 3]));
    change(30);
    let before = (guest.process.descriptors(), guest.status("Threads"));
    let memory = guest.status("VmRSS");
    let switch_before = switch.process.descriptors();
    change(1000);
    guest.process.until_no_more_than(&before.0);
    assert_eq!(guest.status("Threads"), before.1);
    // In kB: a leak of 200 bytes per change would show.
    assert!(guest.status("VmRSS") <= memory + 200, "{memory} kB became {}", guest.status("VmRSS"));
    switch.process.until_no_more_than(&switch_before);
    switch.stop();
}

#[test]
fn numbers_out_of_range_are_refused_and_change_nothing() {
    if !may_network() {
        return;
    }
    let place = Place::new();
    let guest = Guest::start(&place, "a", "10.9.0.1", 3, &place.socket("a"));
    let refused = |combined| guest.change(Some(combined)).unwrap_err().to_string();
    // Without a back end. A socket is there before anyone listens on it.
    let channels = eventually("the guest answers", || guest.change(None).ok());
    assert_eq!((channels.max_combined, channels.combined), (3, 3));
    assert!(refused(2).contains("no back end now; try again"), "{}", refused(2));
    let switch = place.switch(&["a"]);
    guest.until_up();
    guest.set(2);
    for wrong in [0, 4, u16::MAX] {
        let why = refused(wrong);
        assert!(why.contains(&format!("{wrong} queue pairs are not between 1 and 3")), "{why}");
    }
    let other = control::call(&guest.control, &Request::Channels { port: "eth1".into(), combined: Some(1) });
    assert!(other.unwrap_err().to_string().contains("no port \"eth1\""));
    assert_eq!(guest.channels(), (3, 2));
    switch.stop();
}

/// A switch that comes back finds the pairs as they were, and connections go on.
#[test]
fn pairs_survive_a_restart_of_the_back_end() {
    if !may_network() {
        return;
    }
    let place = Place::new();
    let mut rig = Rig::new(&place, 3);
    rig.a.set(2);
    let mut client = rig.traffic("--mode tcp --sessions 8 --seconds 4");
    for _ in 0..3 {
        std::thread::sleep(Duration::from_millis(500));
        let ups = rig.a.process.logged("the link is up");
        rig.switch.process.signal(Signal::KILL);
        rig.switch.process.wait();
        rig.switch = place.switch(&["a", "b"]);
        eventually("the guest is back", || (rig.a.process.logged("the link is up") > ups).then_some(()));
        rig.b.until_up();
    }
    report(&mut client);
    assert_eq!((rig.a.channels(), rig.b.channels()), ((3, 2), (3, 3)));
    rig.a.process.until_logged_times("resumed=true", 3);
    assert_eq!(rig.a.stats()["tx_lost"], 0);
    rig.a.set(3);
    report(&mut rig.traffic("--mode tcp --sessions 8 --seconds 1"));
    rig.switch.stop();
}

/// A back end that agrees to everything and moves nothing.
#[derive(Default)]
struct Idle {
    enabled: Vec<u16>,
    started: Vec<RingSetup>,
}

impl Device for Idle {
    fn features_acked(&mut self, _: u64) {}
    fn memory_changed(&mut self, _: Option<std::sync::Arc<ringferry_memory::GuestMemory>>) {}
    fn ring_started(&mut self, index: u16, setup: RingSetup) {
        if setup.enabled {
            self.enabled.push(index);
        }
        self.started.push(setup);
    }
    fn ring_call_changed(&mut self, _: u16, _: Option<EventFd>) {}
    fn ring_enabled(&mut self, index: u16, enabled: bool) {
        self.enabled.retain(|ring| *ring != index);
        if enabled {
            self.enabled.push(index);
        }
    }
    fn ring_stopped(&mut self, _: u16) -> u16 {
        0
    }
}

/// Serves one front end as `device` while `during` runs.
fn serve<T: Send>(
    stream: Stream,
    features: Features,
    pairs: u16,
    during: impl FnOnce() -> T + Send,
) -> (T, Idle) {
    let mut session = Session::new(stream, Offer::net(features.bits(), pairs)).unwrap();
    let mut device = Idle::default();
    let result = std::thread::scope(|scope| {
        let during = scope.spawn(during);
        while !during.is_finished() {
            if readable(&session, Duration::from_millis(10)) {
                session.on_readable(&mut device).unwrap();
            }
        }
        during.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    });
    (result, device)
}

#[test]
fn a_back_end_with_fewer_pairs_gets_fewer_and_the_next_one_more_again() {
    if !may_network() {
        return;
    }
    let place = Place::new();
    let listener = Listener::bind(place.socket("x").as_path()).unwrap();
    let guest = Guest::start(&place, "a", "10.9.0.1", 3, &place.socket("x"));
    let multiqueue = Features::DEVICE | Features::MQ;
    for (features, offered, pairs) in
        [(multiqueue, 2, 2), (multiqueue, 16, 3), (Features::DEVICE, 16, 1), (multiqueue, 3, 3)]
    {
        let stream = eventually("the guest connects", || listener.accept().unwrap());
        let (channels, device) = serve(stream, features, offered, || {
            guest.until_up();
            guest.channels()
        });
        assert_eq!(channels, (pairs, pairs));
        assert_eq!(
            (device.started.len(), device.enabled.len()),
            (queue_index::count(pairs), queue_index::count(pairs))
        );
    }
}

/// A change that cannot be completed leaves the old number: here the back end never takes what is in a pair's rings.
#[test]
fn a_pair_that_cannot_be_emptied_stays_in_use() {
    if !may_network() {
        return;
    }
    let place = Place::new();
    let listener = Listener::bind(place.socket("x").as_path()).unwrap();
    let guest = Guest::start(&place, "a", "10.9.0.1", 2, &place.socket("x"));
    let stream = eventually("the guest connects", || listener.accept().unwrap());
    let ((), mut device) = serve(stream, Features::DEVICE | Features::MQ, 2, || {
        guest.until_up();
        guest.broadcast(64);
        let why = guest.change(Some(1)).unwrap_err().to_string();
        assert!(why.contains("queue pair 1 does not come to an end"), "{why}");
        assert_eq!(guest.channels(), (2, 2));
        // It is still used: what the kernel sends goes there, too.
        let sent = guest.stats()["tx_queue_1_packets"];
        guest.broadcast(64);
        let deadline = Instant::now() + PATIENCE;
        while guest.stats()["tx_queue_1_packets"] == sent {
            assert!(Instant::now() < deadline, "the tap's queue stays detached");
        }
    });
    device.enabled.sort_unstable();
    assert_eq!(device.enabled, [0, 1, 2, 3]);
}
