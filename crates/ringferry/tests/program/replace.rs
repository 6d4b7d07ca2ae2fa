//! A running switch that another process replaces: `ringferry run --replace`. Guests send all the time, and notice nothing.

use std::net::UdpSocket;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicBool, Ordering};

use ringferry_control::snapshot::PortState;
use ringferry_memory::RegionSpec;
use ringferry_packet::ether::Mac;
use ringferry_packet::vnet::Header;
use ringferry_rig::frames::frame;
use ringferry_rig::guest::{Guest, Options, acquaint, converse};
use ringferry_rig::process::{PATIENCE, eventually, in_a_namespace, may, readable};
use ringferry_rig::raw::{Raw, region};
use ringferry_rig::switch::{Place, Switch, program, ringferry};
use ringferry_sys::eventfd::EventFd;
use ringferry_sys::socket::{Listener, Stream};
use ringferry_sys::{netif, program as programs};
use ringferry_vhost_user::message::{FLAG_REPLY, Request, VERSION};
use ringferry_virtio_net::Features;
use rustix::fs::FallocateFlags;
use rustix::process::Signal;

use crate::hostile::spring;
use crate::lifecycle::bystanders;

/// Replacements in a row for each kind of ring.
const ROUNDS: u32 = 10;

/// Frames of one direction that are under way at most: fewer than the receiver has buffers.
const WINDOW: u32 = 200;

/// The command that replaces the switch of a place.
pub fn replace(place: &Place) -> Command {
    let mut command = ringferry();
    command.arg("run").arg("--replace").arg("--control").arg(place.control());
    command
}

/// One direction of numbered frames.
#[derive(Default)]
pub struct Flow {
    sent: u32,
    received: u32,
}

impl Flow {
    /// Sends what the window allows.
    pub fn send(&mut self, from: &mut Guest, to: Mac) {
        from.pair.reclaim();
        while self.sent - self.received < WINDOW
            && from.pair.send_frame(&Header::default(), &frame(to, from.mac, 100, self.sent))
        {
            self.sent += 1;
        }
        from.flush();
    }

    /// Receives what is there: every frame, once, in order and unharmed.
    #[track_caller]
    pub fn receive(&mut self, to: &mut Guest, from: Mac) {
        to.pump();
        while let Some(received) = to.take() {
            assert_eq!(received.frame, frame(to.mac, from, 100, self.received), "frame {}", self.received);
            self.received += 1;
        }
    }
}

/// Both directions, as fast as it goes, until `done`, and then until all has arrived.
#[track_caller]
pub fn stream(a: &mut Guest, b: &mut Guest, flows: &mut [Flow; 2], done: impl Fn() -> bool) {
    let [there, back] = flows;
    let (one, other) = (a.mac, b.mac);
    while !done() {
        there.send(a, other);
        back.send(b, one);
        there.receive(b, one);
        back.receive(a, other);
    }
    while there.received < there.sent {
        let received = b.receive();
        assert_eq!(received.frame, frame(other, one, 100, there.received));
        there.received += 1;
    }
    while back.received < back.sent {
        let received = a.receive();
        assert_eq!(received.frame, frame(one, other, 100, back.received));
        back.received += 1;
    }
}

/// Replaces a switch while a task goes on that is told when to end.
pub fn replaced<'a>(
    place: &'a Place,
    old: Switch<'a>,
    task: impl FnOnce(&(dyn Fn() -> bool + Sync)) + Send,
) -> Switch<'a> {
    replaced_by(place, &mut replace(place), old, task)
}

/// Replaces a switch by what a command starts, as [`replaced`] does.
fn replaced_by<'a>(
    place: &'a Place,
    command: &mut Command,
    mut old: Switch<'a>,
    task: impl FnOnce(&(dyn Fn() -> bool + Sync)) + Send,
) -> Switch<'a> {
    let done = AtomicBool::new(false);
    // Processes of this test end with the thread that has started them.
    let new = std::thread::scope(|scope| {
        scope.spawn(|| task(&|| done.load(Ordering::Relaxed)));
        let new = place.start(command, Vec::new());
        done.store(true, Ordering::Relaxed);
        new
    });
    let (status, output) = old.process.wait();
    assert!(status.success(), "{status}: {:#?}", old.process.log());
    assert_eq!(output, "");
    new
}

fn replaced_under_load(features: Features) {
    let place = Place::new();
    let mut command = place.run(&["a,worker=0", "b,worker=1", "c"]);
    let mut switch = place.start(command.args(["--workers", "2"]), Vec::new());
    let options = Options { features, ..Options::default() };
    let [mut a, mut b, mut c] =
        [("a", 1), ("b", 2), ("c", 3)].map(|(port, number)| switch.plug(port, number, options));
    acquaint(&mut [&mut a, &mut b, &mut c]);
    let mut flows = <[Flow; 2]>::default();
    for _ in 0..ROUNDS {
        switch = replaced(&place, switch, |done| stream(&mut a, &mut b, &mut flows, done));
        switch.assert_no_drops();
    }
    // Nobody has connected anew, and everything was counted.
    for (port, flow) in [("a", &flows[0]), ("b", &flows[1])] {
        let counters = switch.port(port).counters;
        assert_eq!(counters["connections"], 1);
        assert_eq!(counters["rx_packets"], u64::from(flow.sent) + 1);
    }
    // What was learned is known: only the third guest gets what is for it.
    c.send_numbered(a.mac, 0, 1);
    a.expect_numbered(c.mac, 0, 1);
    a.send_numbered(c.mac, 0, 1);
    c.expect_numbered(a.mac, 0, 1);
    b.pump();
    assert_eq!(b.take(), None);
    assert_eq!(place.files(), ["a.sock", "b.sock", "c.sock", "control"]);
    switch.stop();
    assert_eq!(place.files(), [""; 0]);
}

#[test]
fn a_switch_is_replaced_under_load_split() {
    replaced_under_load(Features::DEVICE - Features::RING_PACKED - Features::IN_ORDER);
}

#[test]
fn a_switch_is_replaced_under_load_split_in_order() {
    replaced_under_load(Features::DEVICE - Features::RING_PACKED);
}

#[test]
fn a_switch_is_replaced_under_load_packed() {
    replaced_under_load(Features::DEVICE - Features::IN_ORDER);
}

#[test]
fn a_switch_is_replaced_under_load_packed_in_order() {
    replaced_under_load(Features::DEVICE);
}

/// A front end that is in the middle of its messages is answered by the successor.
/// The process that takes over touches its memory before, and is not held up for long; nor is anybody else.
#[test]
fn a_guest_whose_pages_are_taken_away_meanwhile_holds_up_no_replacement() {
    let place = Place::new();
    let mut switch = place.start(&mut place.run(&["a", "b", "hostile"]), Vec::new());
    let [mut a, mut b] =
        [("a", 1), ("b", 2)].map(|(port, number)| switch.plug(port, number, Options::default()));
    acquaint(&mut [&mut a, &mut b]);
    let hostile = switch.plug("hostile", 3, Options::default());
    let (file, size) = (hostile.arena.fd().try_clone_to_owned().unwrap(), hostile.arena.region().size);
    let over = AtomicBool::new(false);
    let mut flows = <[Flow; 2]>::default();
    let switch = std::thread::scope(|scope| {
        scope.spawn(|| {
            let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            while !over.load(Ordering::Relaxed) {
                for flags in [FallocateFlags::empty(), hole] {
                    rustix::fs::fallocate(&file, flags, 0, size).unwrap();
                }
            }
        });
        for _ in 0..3 {
            switch = replaced(&place, switch, |done| stream(&mut a, &mut b, &mut flows, done));
        }
        over.store(true, Ordering::Relaxed);
        switch
    });
    for port in ["a", "b"] {
        let port = switch.port(port);
        assert_eq!((port.counters["connections"], port.drops.values().sum::<u64>()), (1, 0));
    }
    switch.stop();
}

#[test]
fn half_a_message_is_completed_in_the_other_process() {
    let place = Place::new();
    let mut switch = place.switch(&["a", "b", "half"]);
    let (mut a, mut b) = bystanders(&switch);
    let half = switch.connect("half");
    let words = [Request::GetFeatures as u32, VERSION, 0];
    let message: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    for cut in 1..message.len() {
        half.send(&message[..cut], &[]).unwrap();
        switch = replaced(&place, switch, |_| ());
        half.send(&message[cut..], &[]).unwrap();
        let mut reply = [0; 20];
        assert!(readable(&half, PATIENCE));
        assert_eq!(half.recv(&mut reply, &mut Vec::new()).unwrap().bytes, 20);
        assert_eq!(reply[..8], [words[0], VERSION | FLAG_REPLY].map(u32::to_ne_bytes).concat());
    }
    converse(&mut a, &mut b, 0, 20);
    switch.stop();
}

/// Front ends come, go and stop their rings while the switch is replaced: what they say is carried out by one process or by the other.
#[test]
fn front_ends_that_come_and_go_meanwhile_are_served() {
    let place = Place::new();
    let mut switch = place.switch(&["a", "b", "restless"]);
    let (mut a, mut b) = bystanders(&switch);
    let mut flows = <[Flow; 2]>::default();
    for _ in 0..ROUNDS {
        switch = replaced(&place, switch, |done| {
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    while !done() {
                        let stream = loop {
                            match Stream::connect(place.socket("restless")) {
                                Ok(stream) => break stream,
                                Err(_) => std::thread::yield_now(),
                            }
                        };
                        let mut guest = Guest::plug(stream, 3, Options::default());
                        // It stops its rings, and starts them where they stood.
                        for _ in 0..20 {
                            let bases = guest.connection.stop().unwrap();
                            guest.start(&bases).unwrap();
                        }
                    }
                });
                stream(&mut a, &mut b, &mut flows, done);
            });
        });
        // To everybody, also to a guest that was just starting.
        switch.until("restless", "gone", |port| port.state == PortState::Listening);
        for port in ["a", "b"] {
            assert_eq!(switch.port(port).counters["connections"], 1);
            assert_eq!(switch.port(port).drops.values().sum::<u64>(), 0, "{port}");
        }
    }
    switch.stop();
}

/// What rules have used up and what they hold back goes along.
#[test]
fn rates_rules_and_frames_that_wait_go_along() {
    let place = Place::new();
    let mut switch = place.switch(&["a,vlan=7", "b,rate_out=1mbit,rate_out_burst=72kib,vlan=7"]);
    let (mut a, mut b) = bystanders(&switch);
    // A burst passes at once, and the rest waits in the switch: a frame takes 11 ms.
    let numbered = |b: &Guest, a: &Guest, number| frame(b.mac, a.mac, 1400, number);
    let before = switch.port("b").counters["tx_packets"];
    for number in 0..90 {
        let frame = numbered(&b, &a, number);
        a.put(&Header::default(), &frame);
    }
    a.drain();
    switch = replaced(&place, switch, |_| ());
    let passed = switch.port("b").counters["tx_packets"] - before;
    assert!(passed < 90, "all have passed before the switch was replaced");
    // In order, but for those by which the sender is told of the delay.
    let (mut next, mut received) = (0, 0);
    while next < 90 {
        let frame = b.receive_plain();
        next = 1 + (next..90).find(|number| frame == numbered(&b, &a, *number)).expect("in order");
        received += 1;
    }
    assert_eq!(received + switch.drops("b", "rate-out"), 90);
    assert!(place.ctl(&["rules", "a"]).contains("vlan=7"));
    // The rules can still be changed.
    switch.set("b", &["rate_out=1gbit"]);
    converse(&mut a, &mut b, 100, 20);
    switch.stop();
}

/// What a process that asks to take over may do then, before it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// It is killed.
    Killed,
    /// It stands still.
    Hangs,
    /// It says something else.
    Babbles,
}

/// Asks a question of the hand-over and receives the answer; its kind.
fn ask(stream: &Stream, kind: u32) -> u32 {
    stream.send(&[&b"RFHO"[..], &kind.to_le_bytes(), &[0; 24]].concat(), &[]).unwrap();
    let (mut header, mut fds): (_, Vec<OwnedFd>) = ([0; 32], Vec::new());
    assert_eq!(stream.recv(&mut header, &mut fds).unwrap().bytes, 32);
    u32::from_le_bytes(header[4..8].try_into().unwrap())
}

/// Begins to take over, and asks the first questions.
fn successor(place: &Place, questions: u32) -> Stream {
    let stream = Stream::connect(place.control()).unwrap();
    stream.set_timeout(Some(PATIENCE)).unwrap();
    stream.send(b"{\"command\":\"replace\",\"format\":1}\n", &[]).unwrap();
    let mut line = [0; 200];
    let bytes = stream.recv(&mut line, &mut Vec::new()).unwrap().bytes;
    let line = String::from_utf8_lossy(&line[..bytes]).into_owned();
    assert!(line.starts_with("{\"ok\":{\"replacing\":{\"format\":1,\"pid\":"), "{line}");
    for kind in 1..=questions {
        assert_eq!(ask(&stream, kind), kind);
    }
    stream
}

#[test]
fn a_successor_that_fails_at_any_step_leaves_everything_to_the_switch() {
    let place = Place::new();
    let mut switch = place.switch(&["a", "b"]);
    let (mut a, mut b) = bystanders(&switch);
    let before = switch.process.descriptors();
    let mut first = 0;
    for questions in 0..=3 {
        for end in [End::Killed, End::Hangs, End::Babbles] {
            let stream = successor(&place, questions);
            match end {
                End::Killed => drop(stream),
                End::Babbles => {
                    let _ = stream.send(&[0x55; 100], &[]);
                }
                End::Hangs => {
                    // Packets go on after a moment, and everybody is answered; it gives up in the end.
                    converse(&mut a, &mut b, first, 20);
                    first += 20;
                    assert_eq!(switch.show().ports.len(), 2);
                    drop(stream);
                }
            }
            converse(&mut a, &mut b, first, 20);
            first += 20;
            let logged = 3 * questions as usize + end as usize + 1;
            switch.process.until_logged_times("another process does not take over after all", logged);
        }
    }
    switch.assert_no_drops();
    switch.process.until_no_more_than(&before);
    // After all that it can be replaced.
    let mut flows = <[Flow; 2]>::default();
    switch = replaced(&place, switch, |done| stream(&mut a, &mut b, &mut flows, done));
    switch.stop();
}

#[test]
fn only_one_takes_over_and_not_what_has_changed_meanwhile() {
    let place = Place::new();
    let mut switch = place.switch(&["a", "b"]);
    let (mut a, mut b) = bystanders(&switch);
    let stream = successor(&place, 2);
    let output = replace(&place).output().unwrap();
    let words = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        output.status.code() == Some(1)
            && words.contains(&format!("another process {} is taking over already", std::process::id())),
        "{words}"
    );
    place.ctl(&["add", &format!("vhost-user:{}", place.socket("c").display())]);
    // "Refused": the configuration is another one than the draft's.
    assert_eq!(ask(&stream, 3), 5);
    converse(&mut a, &mut b, 0, 20);
    drop(stream);
    switch.process.until_logged("the configuration has changed meanwhile");
    // A port that was added goes along.
    switch = replaced(&place, switch, |_| ());
    let mut c = switch.plug("c", 3, Options::default());
    acquaint(&mut [&mut a, &mut b, &mut c]);
    converse(&mut a, &mut c, 20, 20);
    switch.stop();
    assert_eq!(place.files(), [""; 0]);
}

/// One that was stopped between two questions, say.
#[test]
fn a_successor_that_says_nothing_any_more_keeps_nobody_else_from_taking_over() {
    let place = Place::new();
    let mut switch = place.switch(&["a", "b"]);
    let (mut a, mut b) = bystanders(&switch);
    let _stream = successor(&place, 1);
    switch.process.until_logged("was about to take over and says nothing");
    switch = replaced(&place, switch, |_| ());
    converse(&mut a, &mut b, 0, 20);
    switch.stop();
}

/// A port that connects has nothing but its session to hand over, and finds its next front end by itself.
#[test]
fn a_port_that_connects_goes_along_and_connects_again() {
    let place = Place::new();
    let mut switch = place.switch(&["a", "later,mode=connect"]);
    let mut a = switch.plug("a", 1, Options::default());
    // Nobody is there yet.
    switch = replaced(&place, switch, |_| ());
    assert_eq!(switch.port("later").state, PortState::Connecting);
    let listener = Listener::bind(place.socket("later")).unwrap();
    for number in 2..4 {
        let socket = eventually("the switch connects", || listener.accept().unwrap());
        let mut b = Guest::plug(socket, number, Options::default());
        switch.until_state("later", PortState::Up);
        acquaint(&mut [&mut a, &mut b]);
        let mut flows = <[Flow; 2]>::default();
        for _ in 0..3 {
            switch = replaced(&place, switch, |done| stream(&mut a, &mut b, &mut flows, done));
        }
        assert_eq!(switch.port("later").counters["connections"], u64::from(number) - 1);
    }
    switch.stop();
}

/// What is set for the next connection does not reach the one that goes along, and holds for the next one, though another process had it set.
#[test]
fn settings_for_the_next_connection_wait_for_it_also_in_the_next_process() {
    let place = Place::new();
    let mut switch = place.switch(&["a", "b"]);
    let (mut a, mut b) = bystanders(&switch);
    place.ctl(&["set", "a", "queue_size=64", "mtu=9000"]);
    let mtu = switch.port("a").mtu;
    let mut flows = <[Flow; 2]>::default();
    for _ in 0..3 {
        switch = replaced(&place, switch, |done| stream(&mut a, &mut b, &mut flows, done));
        let port = switch.port("a");
        assert_eq!((port.state, port.mtu), (PortState::Up, mtu));
        assert_eq!(port.counters["connections"], 1);
    }
    switch.assert_no_drops();
    drop(a);
    let large = Guest::plug(switch.connect("a"), 1, Options::default());
    let port = switch.until("a", "is broken", |port| port.state == PortState::Broken);
    let why = port.queues[0].broken.as_deref();
    assert!(why.is_some_and(|why| why.contains("the port's queue_size allows 64")), "{why:?}");
    drop((large, b));
    switch.stop();
}

/// A front end that has held up a worker gains nothing by the replacement.
#[test]
fn a_port_out_of_service_stays_so() {
    let place = Place::new();
    let mut switch = place.switch(&["a", "b", "villain"]);
    let (mut a, mut b) = bystanders(&switch);
    let villain = switch.plug("villain", 9, Options::default());
    let (trap, kick) = (EventFd::new().unwrap(), EventFd::new().unwrap());
    let mut villain = villain.connection;
    villain.frontend().set_vring_call(0, Some(trap.as_fd())).unwrap();
    spring(&trap);
    let _ = villain.frontend().set_vring_kick(0, Some(kick.as_fd()));
    let before = switch.until("villain", "out of service", |port| port.fault.is_some());
    for _ in 0..2 {
        switch = replaced(&place, switch, |_| ());
        let port = switch.port("villain");
        assert_eq!((port.fault, port.state), (before.fault.clone(), PortState::Down));
        // Whoever comes next waits in the backlog.
        let again = switch.connect("villain");
        converse(&mut a, &mut b, 0, 20);
        assert_eq!(switch.port("villain").counters["connections"], 1);
        drop(again);
    }
    switch.stop();
}

/// What the two processes give up is for each of them to say, and does not hinder the other.
#[test]
fn a_switch_in_a_sandbox_and_one_without_replace_each_other() {
    let place = Place::new();
    let mut switch = place.start(place.run(&["a", "b"]).args(["--sandbox", "off"]), Vec::new());
    let (mut a, mut b) = bystanders(&switch);
    let mut flows = <[Flow; 2]>::default();
    for sandbox in ["off", "on", "on", "off"] {
        let mut command = replace(&place);
        command.args(["--sandbox", sandbox]);
        switch = replaced_by(&place, &mut command, switch, |done| stream(&mut a, &mut b, &mut flows, done));
        assert_eq!(place.files(), ["a.sock", "b.sock", "control"]);
        switch.assert_no_drops();
        // Whoever connects, or finds a socket in use, is told of the process that serves it now.
        for path in [place.socket("a"), place.control()] {
            let peer = Stream::connect(&path).unwrap().peer_credentials().unwrap();
            assert_eq!(peer.pid, Some(switch.process.pid()), "{}", path.display());
        }
    }
    let output = place.run(&["c"]).output().unwrap();
    let in_use =
        format!("is in use by a running program (process {}): end it, or choose", switch.process.pid());
    let said = failure(&output);
    assert!(said.contains(&in_use) && said.contains("`ringferry run --replace` takes over"), "{said}");
    switch.stop();
    assert_eq!(place.files(), [""; 0]);
}

/// A socket of a service manager, and a connection that was inherited: the successor has inherited neither.
#[test]
fn inherited_sockets_go_along_and_stay_in_place() {
    let place = Place::new();
    let mut run = place.run(&["a"]);
    run.args([
        "--port",
        "vhost-user-activation:vm0",
        "--port",
        "vhost-user-fd:5",
        "--port",
        "vhost-user-fd:6",
    ]);
    // LISTEN_PID is the number of the process itself, so it is set from within.
    let mut shell = Command::new("sh");
    shell.args(["-c", "LISTEN_PID=$$ exec \"$0\" \"$@\""]).arg(run.get_program()).args(run.get_args());
    shell.env("LISTEN_FDS", "1").env("LISTEN_FDNAMES", "vm0");
    let listener: OwnedFd = UnixListener::bind(place.socket("vm0")).unwrap().into();
    let [(ours, theirs), (late, waiting)] = [(); 2].map(|()| Stream::pair().unwrap());
    let fds = vec![(listener, 3), (theirs.into(), 5), (waiting.into(), 6)];
    let mut switch = place.start(&mut shell, fds);
    let mut a = switch.plug("a", 1, Options::default());
    let mut b = switch.plug("vm0", 2, Options::default());
    let mut c = Guest::plug(ours, 3, Options::default());
    switch.until_state("fd5", PortState::Up);
    acquaint(&mut [&mut a, &mut b, &mut c]);
    let mut flows = <[Flow; 2]>::default();
    for _ in 0..2 {
        switch = replaced(&place, switch, |done| stream(&mut b, &mut c, &mut flows, done));
    }
    converse(&mut a, &mut b, 0, 20);
    drop((b, c));
    // The one listens again, the other has had its only front end.
    switch.until_state("fd5", PortState::Down);
    switch.until_state("vm0", PortState::Listening);
    switch = replaced(&place, switch, |_| ());
    assert_eq!(switch.port("fd5").state, PortState::Down);
    let mut b = switch.plug("vm0", 4, Options::default());
    let mut d = Guest::plug(late, 5, Options::default());
    switch.until_state("fd6", PortState::Up);
    acquaint(&mut [&mut a, &mut b, &mut d]);
    converse(&mut b, &mut d, 0, 20);
    switch.stop();
    assert_eq!(place.files(), ["vm0.sock"]);
}

/// The file of a socket may be gone, or another's by now: guests that are connected go on, and what is another's is left alone.
#[test]
fn a_socket_whose_file_was_removed_goes_along_and_the_next_one_is_left_alone() {
    let place = Place::new();
    let mut switch = place.switch(&["a", "b"]);
    let (mut a, mut b) = bystanders(&switch);
    let mut flows = <[Flow; 2]>::default();
    std::fs::remove_file(place.socket("a")).unwrap();
    switch = replaced(&place, switch, |done| stream(&mut a, &mut b, &mut flows, done));
    let another = UnixListener::bind(place.socket("a")).unwrap();
    switch = replaced(&place, switch, |done| stream(&mut a, &mut b, &mut flows, done));
    switch.assert_no_drops();
    switch.stop();
    assert_eq!(place.files(), ["a.sock"]);
    drop(another);
}

fn failure(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(1));
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn who_finds_no_switch_or_one_that_breaks_off_says_so() {
    let place = Place::new();
    let words = failure(&replace(&place).output().unwrap());
    assert!(words.contains("no ringferry is running with control socket"), "{words}");
    let answer = |number: u32, text: &[u8], bytes: &[u8]| {
        let header =
            [&b"RFHO"[..], &number.to_le_bytes(), &(text.len() as u64).to_le_bytes(), &[0; 16]].concat();
        [&header, bytes].concat()
    };
    for (reply, error) in [
        (b"{\"error\":\"not today\"}\n".to_vec(), "the switch refuses: not today"),
        (b"{\"ok\":{\"dump\":\"\"}}\n".to_vec(), "it has not understood the question"),
        (
            [&b"{\"ok\":{\"replacing\":{\"format\":1,\"pid\":1}}}\n"[..], &[7; 32]].concat(),
            "this is no message",
        ),
        (
            [&b"{\"ok\":{\"replacing\":{\"format\":1,\"pid\":1}}}\n"[..], &answer(1, b"{}", b"")].concat(),
            "the running switch has broken off",
        ),
    ] {
        let listener = Listener::bind(place.control()).unwrap();
        let output = std::thread::scope(|scope| {
            let server = scope.spawn(|| {
                let stream = listener.wait().unwrap();
                stream.recv(&mut [0; 4096], &mut Vec::new()).unwrap();
                let (line, rest) = reply.split_at(reply.iter().position(|byte| *byte == b'\n').unwrap() + 1);
                stream.send(line, &[]).unwrap();
                if !rest.is_empty() {
                    stream.recv(&mut [0; 4096], &mut Vec::new()).unwrap();
                    stream.send(rest, &[]).unwrap();
                }
            });
            let output = replace(&place).output().unwrap();
            server.join().unwrap();
            output
        });
        let words = failure(&output);
        assert!(words.contains(error), "{error}: {words}");
    }
}

/// A switch that says of its state what this program cannot know is left as it is.
#[test]
fn a_switch_of_a_later_form_or_with_what_is_unknown_is_not_replaced() {
    for (format, needs, error) in [
        (2, "[]", "the running switch (9.9) cannot be replaced by this program: it hands over in form 2"),
        (1, "[\"tap\",\"teleport\"]", "it has what this program does not know: [\"teleport\"]"),
    ] {
        let place = Place::new();
        let listener = Listener::bind(place.control()).unwrap();
        let text = format!(
            "{{\"format\":{format},\"needs\":{needs},\"program\":\"9.9\",\"config\":\"\",\"workers\":1,\"began\":0,\"started\":0}}"
        );
        let file = rustix::fs::memfd_create("hello", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::io::write(&file, text.as_bytes()).unwrap();
        let header =
            [&b"RFHO"[..], &1_u32.to_le_bytes(), &(text.len() as u64).to_le_bytes(), &[0; 16]].concat();
        let (output, rest) = std::thread::scope(|scope| {
            let server = scope.spawn(|| {
                let stream = listener.wait().unwrap();
                stream.set_timeout(Some(PATIENCE)).unwrap();
                stream.recv(&mut [0; 4096], &mut Vec::new()).unwrap();
                stream.send(b"{\"ok\":{\"replacing\":{\"format\":1,\"pid\":1}}}\n", &[]).unwrap();
                stream.recv(&mut [0; 32], &mut Vec::new()).unwrap();
                stream.send(&header, &[file.as_fd()]).unwrap();
                // It asks for nothing more.
                stream.recv(&mut [0; 32], &mut Vec::new()).unwrap().bytes
            });
            let output = replace(&place).output().unwrap();
            (output, server.join().unwrap())
        });
        let words = failure(&output);
        assert!(words.contains(error), "{error}: {words}");
        assert_eq!(rest, 0);
    }
}

#[test]
fn in_the_background_and_only_if_the_program_is_another_one() {
    let place = Place::new();
    let mut switch = place.switch(&["a", "b"]);
    let (mut a, mut b) = bystanders(&switch);
    let run = |words: &[&str]| {
        // The process in the background keeps the log open.
        assert!(replace(&place).args(words).status().unwrap().success());
    };
    // Nobody may look at a process in its sandbox, so it says itself what it executes.
    for words in [&["--background", "--if-changed"][..], &["--if-changed"]] {
        run(words);
        assert_eq!(switch.show().pid, switch.process.pid());
    }
    assert_eq!(switch.process.logged("does not take over after all"), 0);
    // The same bytes in another file are another program: who has installed it wants it to run.
    let installed = place.path().join("installed");
    // By another process: what a fork of another test's has open for writing cannot be executed.
    assert!(Command::new("cp").arg(program()).arg(&installed).status().unwrap().success());
    let mut command = Command::new(&installed);
    command.args(replace(&place).get_args()).args(["--background", "--if-changed"]);
    assert!(command.status().unwrap().success());
    std::fs::remove_file(&installed).unwrap();
    // When that returns, the other one has taken over.
    let pid = switch.show().pid;
    assert_ne!(pid, switch.process.pid());
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap();
    assert_eq!(name, "ringferry\n", "as tools show it");
    assert!(switch.process.wait().0.success());
    converse(&mut a, &mut b, 0, 20);
    let pid = rustix::process::Pid::from_raw(pid as i32).unwrap();
    rustix::process::kill_process(pid, Signal::TERM).unwrap();
    eventually("the sockets are gone", || place.files().is_empty().then_some(()));
}

fn an_uplink_stays_in_the_namespace() {
    if !may("needs the program ip", programs::installed("ip").is_some()) {
        return;
    }
    let place = Place::new();
    let mut command = place.run(&["a"]);
    let mut switch = place.start(command.args(["--port", "tap:rf0"]), Vec::new());
    let mut a = switch.plug("a", 1, Options::default());
    netif::add_address("rf0", "10.0.0.1".parse().unwrap(), 24).unwrap();
    let neighbour = ["neigh", "add", "10.0.0.9", "lladdr", &a.mac.to_string(), "dev", "rf0"];
    assert!(Command::new("ip").args(neighbour).status().unwrap().success());
    let index = netif::index("rf0").unwrap();
    let socket = UdpSocket::bind("10.0.0.1:7000").unwrap();
    socket.connect("10.0.0.9:7000").unwrap();
    let host = netif::mac("rf0").unwrap();
    let mut next = 0_u32;
    let mut sent = 0_u32;
    // Datagrams of the host, numbered: each arrives once, in order.
    let look = |a: &mut Guest, next: &mut u32| {
        a.pump();
        while let Some(received) = a.take() {
            let bytes = received.frame;
            if bytes[6..12] == host && bytes[12..14] == [8, 0] && bytes[23] == 17 {
                assert_eq!(bytes[42..46], next.to_be_bytes(), "datagram {next}");
                *next += 1;
            }
        }
    };
    for _ in 0..ROUNDS {
        switch = replaced(&place, switch, |done| {
            while !done() {
                // Fewer than the tap's queue has room for.
                if sent - next < 200 {
                    socket.send(&sent.to_be_bytes()).unwrap();
                    sent += 1;
                }
                look(&mut a, &mut next);
            }
        });
        eventually("all have arrived", || {
            look(&mut a, &mut next);
            (next == sent).then_some(())
        });
        assert_eq!(netif::index("rf0").unwrap(), index);
        assert!(netif::is_up("rf0").unwrap());
    }
    // A process in another namespace could not look after the tap.
    let pid = switch.process.pid();
    let mut elsewhere = Command::new("unshare");
    elsewhere.arg("--net").arg(ringferry().get_program()).args(["run", "--replace", "--control"]);
    let refused = elsewhere.arg(place.control()).output().unwrap();
    let said = failure(&refused);
    assert!(said.contains(&format!("nsenter --net=/proc/{pid}/ns/net ringferry run --replace")), "{said}");
    switch.stop();
    assert_eq!(netif::index("rf0").unwrap(), None);
}

#[test]
fn an_uplink_stays() {
    in_a_namespace(an_uplink_stays_in_the_namespace);
}

/// A process that may not map what a guest shares would disconnect it: the one that runs can, and goes on.
#[test]
fn a_successor_that_cannot_map_the_memory_of_a_guest_gives_up() {
    let place = Place::new();
    let mut switch = place.switch(&["a", "b", "large"]);
    let (mut a, mut b) = bystanders(&switch);
    let mut large = Raw::plug(switch.connect("large"));
    // Sparse, and more address space than the program itself needs by far.
    let size = 16 << 30;
    rustix::fs::ftruncate(&large.file, size).unwrap();
    let spec = RegionSpec { size, ..region() };
    large.connection.frontend().set_mem_table(&[(spec, large.file.as_fd())]).unwrap();
    let successor = replace(&place);
    let mut limited = Command::new("sh");
    limited.args(["-c", "ulimit -S -v 12000000; exec \"$0\" \"$@\""]);
    limited.arg(successor.get_program()).args(successor.get_args());
    let output = limited.output().unwrap();
    let words = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{words}");
    assert!(
        words.contains("port large: its front end would be disconnected: cannot map guest memory"),
        "{words}"
    );
    assert!(words.contains("ulimit -v"), "{words}");
    converse(&mut a, &mut b, 0, 20);
    // Nothing was lost, so one with more goes on with all of them.
    switch = replaced(&place, switch, |_| ());
    assert_eq!(switch.port("large").counters["connections"], 1);
    converse(&mut a, &mut b, 20, 20);
    drop(large);
    switch.stop();
}
