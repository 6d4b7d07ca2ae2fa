//! A test stands between the two processes while the one replaces the other, and relays what they say: so either can be killed at a certain step, and a program of
//! another version be what it is at the other end.
//!
//! [`Between`] takes the place of the control socket, whose own it moves aside; the predecessor answers through it, and the successor asks.

use std::fs::File;
use std::io::{Read, Seek, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use ringferry_control::snapshot::PortState;
use ringferry_packet::ether::Mac;
use ringferry_rig::frames::frame;
use ringferry_rig::guest::{Guest, Options, acquaint, converse};
use ringferry_rig::process::{PATIENCE, Process, eventually, in_a_namespace, may};
use ringferry_rig::switch::{Place, Switch, program};
use ringferry_sys::process::{Spawn, is_root};
use ringferry_sys::socket::{Listener, MAX_FDS, Stream};
use ringferry_sys::{netif, program as programs};
use ringferry_virtio_net::Features;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::keep::{flush_out, kept, pid};
use crate::lifecycle::bystanders;
use crate::replace::replace;

/// Kinds of messages, as on the wire.
const HELLO: u32 = 1;
const DRAFT: u32 = 2;
const FINAL: u32 = 3;
const RUNNING: u32 = 4;

/// A message of either process.
struct Message {
    kind: u32,
    text: Vec<u8>,
    bulk: Vec<u8>,
    fds: Vec<OwnedFd>,
}

/// Receives a message; `None` at the end of the connection.
fn receive(from: &Stream) -> Option<Message> {
    let (mut header, mut fds) = ([0; 32], Vec::new());
    if from.recv(&mut header, &mut fds).ok()?.bytes == 0 {
        return None;
    }
    let word = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().unwrap());
    let long = |at: usize| u64::from_le_bytes(header[at..at + 8].try_into().unwrap());
    let (text, bulk) = (long(8), long(16));
    let count = word(24) as usize + usize::from(text + bulk > 0);
    while fds.len() < count {
        assert_eq!(from.recv(&mut [0], &mut fds).unwrap().bytes, 1);
    }
    let mut message = Message { kind: word(4), text: vec![0; text as usize], bulk: Vec::new(), fds };
    if text + bulk > 0 {
        let mut file = File::from(message.fds.remove(0));
        file.rewind().unwrap();
        file.read_exact(&mut message.text).unwrap();
        file.read_to_end(&mut message.bulk).unwrap();
        message.bulk.truncate(bulk as usize);
    }
    Some(message)
}

/// Sends a message. Whoever should receive it may be gone.
fn send(to: &Stream, message: &Message) {
    let Message { kind, text, bulk, fds } = message;
    let mut all: Vec<BorrowedFd<'_>> = Vec::new();
    let memory: File = rustix::fs::memfd_create("relayed", rustix::fs::MemfdFlags::CLOEXEC).unwrap().into();
    if text.len() + bulk.len() > 0 {
        (&memory).write_all(&[&text[..], bulk].concat()).unwrap();
        all.push(memory.as_fd());
    }
    all.extend(fds.iter().map(AsFd::as_fd));
    let mut header = [&b"RFHO"[..], &kind.to_le_bytes(), &(text.len() as u64).to_le_bytes()].concat();
    header.extend((bulk.len() as u64).to_le_bytes());
    header.extend((fds.len() as u32).to_le_bytes());
    header.resize(32, 0);
    let mut parts = all.chunks(MAX_FDS);
    let _ = to.send(&header, parts.next().unwrap_or_default());
    parts.for_each(|part| drop(to.send(&[0], part)));
}

/// Relays a line of text.
fn relay_line(from: &Stream, to: &Stream) {
    let (mut line, mut byte) = (Vec::new(), [0]);
    while line.last() != Some(&b'\n') {
        assert_eq!(from.recv(&mut byte, &mut Vec::new()).unwrap().bytes, 1);
        line.push(byte[0]);
    }
    to.send(&line, &[]).unwrap();
}

/// What stands between the two.
struct Between<'a> {
    place: &'a Place,
    listener: Listener,
}

/// Where a message is when something is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// The successor asks this, and the predecessor does not know yet.
    Asked(u32),
    /// The predecessor has answered, and the successor does not know yet.
    Answered(u32),
}

impl<'a> Between<'a> {
    /// Takes the place of the control socket.
    fn new(place: &'a Place) -> Between<'a> {
        std::fs::rename(place.control(), place.path().join("aside")).unwrap();
        Between { place, listener: Listener::bind(place.control()).unwrap() }
    }

    /// Relays what one successor and the predecessor say until either has nothing more to say, or `look` says no, and puts the control socket back where it was. Returns
    /// true if the successor has taken over and heard the end of the other one.
    fn relay(self, mut look: impl FnMut(Step, &mut Message) -> bool) -> bool {
        let successor = self.listener.wait().unwrap();
        let predecessor = Stream::connect(self.place.path().join("aside")).unwrap();
        [&successor, &predecessor].iter().for_each(|end| end.set_timeout(Some(PATIENCE)).unwrap());
        relay_line(&successor, &predecessor);
        relay_line(&predecessor, &successor);
        // Whoever asks next asks the process that goes on.
        std::fs::rename(self.place.path().join("aside"), self.place.control()).unwrap();
        while let Some(mut message) = receive(&successor) {
            let kind = message.kind;
            if !look(Step::Asked(kind), &mut message) {
                return false;
            }
            send(&predecessor, &message);
            if kind == RUNNING {
                // To that it says nothing, or that it was told to end. What the successor waits for is its end.
                while let Some(last) = receive(&predecessor) {
                    send(&successor, &last);
                }
                return look(Step::Answered(kind), &mut message);
            }
            let Some(mut message) = receive(&predecessor) else { return false };
            let goes_on = look(Step::Answered(kind), &mut message);
            send(&successor, &message);
            if !goes_on {
                return false;
            }
        }
        false
    }
}

fn start(place: &Place) -> Process {
    let mut command = replace(place);
    if !is_root() {
        command.args(["--sandbox", "off"]);
    }
    Process::start(&mut command, Spawn::default())
}

/// Sends a signal, and waits until the process is in one of the states that follow.
fn bring(pid: u32, signal: Signal, states: &str) {
    kill_process(Pid::from_raw(pid as i32).unwrap(), signal).unwrap();
    eventually("the process is in that state", || {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
        states.contains(state.unwrap_or('X')).then_some(())
    });
}

/// Kills a process. When this returns its descriptors are closed: it is a zombie, or gone.
fn kill(pid: u32) {
    bring(pid, Signal::KILL, "ZX");
}

/// Which of the two is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Victim {
    Successor,
    Predecessor,
}

/// All steps at which either process can be killed, in their order.
const STEPS: [Step; 7] = [
    Step::Asked(HELLO),
    Step::Answered(HELLO),
    Step::Asked(DRAFT),
    Step::Answered(DRAFT),
    Step::Asked(FINAL),
    Step::Answered(FINAL),
    Step::Asked(RUNNING),
];

/// Replaces the switch of a place, and kills a process at a step. Returns the successor's process.
fn killed_at(place: &Place, old: u32, victim: Victim, step: Step) -> Process {
    let mut met = false;
    loop {
        let between = Between::new(place);
        let mut new = start(place);
        between.relay(|now, message| {
            let (Step::Asked(kind) | Step::Answered(kind)) = now;
            // The predecessor may refuse.
            if now == step && message.kind == kind {
                met = true;
                if victim == Victim::Successor {
                    kill(new.pid());
                } else {
                    // It is not to hear the last words before the end of the connection, which comes with them where nobody stands between.
                    bring(new.pid(), Signal::STOP, "T");
                    kill(old);
                }
            }
            // The dead neither ask nor hear; what a process has answered before its end is heard.
            !met
        });
        if met {
            if victim == Victim::Predecessor {
                kill_process(Pid::from_raw(new.pid() as i32).unwrap(), Signal::CONT).unwrap();
            }
            return new;
        }
        // It was too late on a busy machine, and says so.
        assert_eq!(new.wait().0.code(), Some(1), "{:#?}", new.log());
    }
}

/// Whoever is killed, and at whatever step: there is one process that has the ports afterwards, or none if both have ended.
#[test]
fn either_process_is_killed_at_each_step() {
    let place = Place::new();
    for step in STEPS {
        for victim in [Victim::Successor, Victim::Predecessor] {
            let mut switch = place.switch(&["a", "b"]);
            let (mut a, mut b) = bystanders(&switch);
            let mut new = killed_at(&place, switch.process.pid(), victim, step);
            let what = format!("{victim:?} is killed at {step:?}");
            let (left, other) = match victim {
                Victim::Successor => (&mut switch.process, &mut new),
                Victim::Predecessor => (&mut new, &mut switch.process),
            };
            other.wait();
            // The successor goes on as soon as it has all that the other one has to say.
            let goes_on = match victim {
                Victim::Successor => step != Step::Asked(RUNNING),
                Victim::Predecessor => matches!(step, Step::Answered(FINAL) | Step::Asked(RUNNING)),
            };
            if goes_on {
                let left = left.pid();
                eventually(&what, || (pid(&place) == Some(left)).then_some(()));
                converse(&mut a, &mut b, 0, 20);
                switch.assert_no_drops();
                assert_eq!(switch.port("a").counters["connections"], 1, "{what}");
                if victim == Victim::Predecessor {
                    switch.process = new;
                }
                switch.stop();
                assert_eq!(place.files(), [""; 0], "{what}");
            } else {
                let (status, _) = left.wait();
                let (code, reason) = match victim {
                    // As sysexits(3) has it: EX_TEMPFAIL.
                    Victim::Successor => (75, "the process that has taken over was killed before it ran"),
                    Victim::Predecessor => (1, "ringferry: "),
                };
                assert_eq!(status.code(), Some(code), "{what}: {:#?}", left.log());
                assert!(left.log().join("\n").contains(reason), "{what}: {:#?}", left.log());
            }
        }
    }
}

/// Returns the switches of a place but for one.
fn others_than(place: &Place, serving: u32) -> Vec<u32> {
    let numbers = std::fs::read_dir("/proc").unwrap();
    let numbers = numbers.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let is_other = |number: &u32| {
        let words = std::fs::read_to_string(format!("/proc/{number}/cmdline")).unwrap_or_default();
        words.contains(&*place.control().to_string_lossy()) && !words.contains("keep\0") && *number != serving
    };
    numbers.filter(is_other).collect()
}

/// With a manager that keeps what a killed switch needs, nobody has to connect anew, whatever is killed and whenever; and never do two processes have the ports.
fn killed_and_kept(victim: Victim, features: Features) {
    let place = Place::new();
    let switch = place.start(&mut kept(&place.run(&["a", "b"])), Vec::new());
    let options = Options { features, inflight: false, ..Options::default() };
    let [mut a, mut b] = [("a", 1), ("b", 2)].map(|(port, number)| switch.plug(port, number, options));
    acquaint(&mut [&mut a, &mut b]);
    crate::keep::until_kept(&switch, "\"enabled\":true", 4);
    let (mut round, mut started) = (0, Vec::new());
    // At the last step the successor has not yet stored a state of its own: what the one before has stored is what the next one finds.
    let alone = [Step::Answered(RUNNING)];
    let steps =
        if victim == Victim::Successor { STEPS.iter().chain(&alone) } else { STEPS.iter().chain(&[]) };
    for step in steps.copied() {
        let old = pid(&place).unwrap();
        let new = killed_at(&place, old, victim, step);
        // Whoever has died does not go on.
        let dead = if victim == Victim::Successor { new.pid() } else { old };
        eventually("somebody goes on", || pid(&place).filter(|pid| *pid != dead));
        flush_out(&mut a, &mut b, round);
        flush_out(&mut b, &mut a, round + 1);
        round += 2;
        converse(&mut a, &mut b, 1000, 50);
        for guest in [&mut a, &mut b] {
            assert!(guest.connection.frontend().check().is_ok(), "{victim:?} {step:?}");
        }
        let serving = pid(&place).unwrap();
        // One process has the ports: any other ends.
        eventually("the others end", || others_than(&place, serving).is_empty().then_some(()));
        started.push(new);
        crate::keep::until_kept(&switch, "\"enabled\":true", 4);
    }
    switch.stop();
}

#[test]
fn a_kept_switch_outlives_a_successor_that_is_killed_at_any_step() {
    killed_and_kept(Victim::Successor, Features::DEVICE);
    killed_and_kept(Victim::Successor, Features::DEVICE - Features::RING_PACKED);
}

#[test]
fn a_kept_switch_outlives_a_predecessor_that_is_killed_at_any_step() {
    killed_and_kept(Victim::Predecessor, Features::DEVICE);
    killed_and_kept(Victim::Predecessor, Features::DEVICE - Features::RING_PACKED);
}

/// A front end that comes between the two messages changes the order in which the successor has the ports, and no port gets what is another's.
#[test]
fn a_front_end_that_comes_during_a_replacement_costs_no_port_its_socket() {
    let place = Place::new();
    let switch = place.switch(&["a", "b", "c"]);
    let options = Options::default();
    let mut c = switch.plug("c", 3, options);
    let mut came = None;
    let new = relayed(&place, |now, _| {
        if now == Step::Answered(DRAFT) {
            came = Some(switch.plug("a", 1, options));
        }
    });
    let (mut a, mut again) = (came.unwrap(), start(&place));
    eventually("the next one has taken over", || pid(&place).filter(|pid| *pid == again.pid()));
    acquaint(&mut [&mut a, &mut c]);
    converse(&mut a, &mut c, 0, 20);
    let mut b = switch.plug("b", 2, options);
    acquaint(&mut [&mut b, &mut c]);
    assert!(a.connection.frontend().check().is_ok() && c.connection.frontend().check().is_ok());
    drop((switch, new));
    again.signal(Signal::TERM);
    assert!(again.wait().0.success(), "{:#?}", again.log());
}

/// The same of a port that connects, whose front end comes or goes between the two messages.
#[test]
fn a_front_end_that_is_connected_to_comes_and_goes_during_a_replacement() {
    let place = Place::new();
    let mut switch = place.switch(&["a", "later,mode=connect"]);
    let options = Options::default();
    let mut a = switch.plug("a", 1, options);
    let (mut listener, mut later) = (None, None);
    let accept = |listener: &Listener, number| {
        let socket = eventually("the switch connects", || listener.accept().unwrap());
        Guest::plug(socket, number, options)
    };
    let new = relayed(&place, |now, _| {
        if now == Step::Answered(DRAFT) && later.is_none() {
            let bound = listener.insert(Listener::bind(place.socket("later")).unwrap());
            later = Some(accept(bound, 2));
            switch.until_state("later", PortState::Up);
        }
    });
    assert!(switch.process.wait().0.success());
    switch.process = new;
    let (Some(listener), Some(mut b)) = (listener, later) else { panic!("it has come") };
    eventually("it has taken over", || pid(&place).filter(|pid| *pid == switch.process.pid()));
    acquaint(&mut [&mut a, &mut b]);
    converse(&mut a, &mut b, 0, 20);
    assert_eq!(switch.port("later").counters["connections"], 1);
    let mut going = Some(b);
    let new = relayed(&place, |now, _| {
        if now == Step::Answered(DRAFT) && going.take().is_some() {
            switch.until_state("later", PortState::Connecting);
        }
    });
    assert!(switch.process.wait().0.success());
    switch.process = new;
    let mut c = accept(&listener, 3);
    switch.until_state("later", PortState::Up);
    acquaint(&mut [&mut a, &mut c]);
    converse(&mut a, &mut c, 0, 20);
    assert_eq!(switch.port("later").counters["connections"], 2);
    switch.stop();
}

fn ip(words: &[&str]) {
    assert!(Command::new("ip").args(words).status().unwrap().success(), "ip {words:?}");
}

/// Whoever has the ports in the end makes it anew.
#[test]
fn a_tap_that_is_deleted_at_any_step_of_a_replacement_is_made_anew() {
    in_a_namespace(|| {
        if !may("needs the program ip", programs::installed("ip").is_some()) {
            return;
        }
        let place = Place::new();
        let mut switch = place.start(place.run(&["a"]).args(["--port", "tap:rf0"]), Vec::new());
        let mut a = switch.plug("a", 1, Options::default());
        for step in &STEPS[..6] {
            let before = netif::index("rf0").unwrap();
            assert!(before.is_some(), "{step:?}");
            let mut exists = true;
            let new = relayed(&place, |now, _| {
                if now == *step && std::mem::take(&mut exists) {
                    ip(&["link", "delete", "rf0"]);
                }
            });
            assert!(switch.process.wait().0.success());
            switch.process = new;
            eventually("it has taken over", || pid(&place).filter(|pid| *pid == switch.process.pid()));
            eventually(&format!("{step:?}: the tap is made anew"), || {
                netif::index("rf0").unwrap().filter(|index| Some(*index) != before)
            });
            switch.until("rf0", "is served", |port| port.state == PortState::Up && port.fault.is_none());
            let sent = switch.port("rf0").counters["tx_packets"];
            a.send(&frame(Mac::BROADCAST, a.mac, 60, 1));
            switch.until("rf0", "has sent it", |port| port.counters["tx_packets"] > sent);
        }
        switch.stop();
    });
}

/// One that is not there, and that the switch is not to make, waits in the next process as it did in this one.
#[test]
fn a_tap_that_is_gone_keeps_no_switch_from_being_replaced() {
    in_a_namespace(|| {
        if !may("needs the program ip", programs::installed("ip").is_some()) {
            return;
        }
        let place = Place::new();
        let add = ["tuntap", "add", "dev", "rf0", "mode", "tap"];
        ip(&add);
        let mut command = place.run(&["a", "b"]);
        let mut switch = place.start(command.args(["--port", "tap:rf0,existing=true"]), Vec::new());
        let (mut a, mut b) = bystanders(&switch);
        ip(&["link", "delete", "rf0"]);
        switch.process.until_logged("it cannot be opened anew yet");
        let fault = switch.port("rf0").fault;
        for _ in 0..2 {
            let new = relayed(&place, |_, _| {});
            assert!(switch.process.wait().0.success());
            switch.process = new;
            eventually("it has taken over", || pid(&place).filter(|pid| *pid == switch.process.pid()));
            converse(&mut a, &mut b, 0, 20);
            assert_eq!(switch.port("rf0").fault, fault);
        }
        ip(&add);
        switch.until("rf0", "is there again", |port| port.fault.is_none());
        switch.stop();
    });
}

/// Has a successor try to replace the switch of a place that cannot start its helper: its program, a copy, can be executed no more from when it has heard whom it replaces.
/// Returns whether it has taken over, and its process.
fn replaced_without_helper(place: &Place, sandbox: &str) -> (bool, Process) {
    let copy = place.path().join("program");
    loop {
        // Another process writes it: a child of another test would have it open for writing for a moment, and then it could not be executed at all.
        assert!(Command::new("cp").arg("-f").arg(program()).arg(&copy).status().unwrap().success());
        let between = Between::new(place);
        let mut command = Command::new(&copy);
        command.args(replace(place).get_args()).args(["--sandbox", sandbox]);
        let mut new = Process::start(&mut command, Spawn::default());
        let taken = between.relay(|now, _| {
            if now == Step::Answered(HELLO) {
                std::fs::set_permissions(&copy, std::fs::Permissions::from_mode(0o600)).unwrap();
            }
            true
        });
        std::fs::remove_file(&copy).unwrap();
        if taken {
            return (true, new);
        }
        assert_eq!(new.wait().0.code(), Some(1), "{:#?}", new.log());
        if !new.log().join("\n").contains("try again") {
            return (false, new);
        }
    }
}

/// A process that could have no sandbox does not go on in the place of one that has one, but for one that has none, or if it is told to.
#[test]
fn a_switch_in_a_sandbox_is_not_replaced_by_one_that_can_have_none() {
    let place = Place::new();
    let mut switch = place.start(place.run(&["a", "b"]).args(["--sandbox", "on"]), Vec::new());
    let (mut a, mut b) = bystanders(&switch);
    let (taken, refused) = replaced_without_helper(&place, "on");
    let why = refused.log().join("\n");
    assert!(!taken && why.contains("there would be no sandbox"), "{why}");
    assert!(why.contains("give --sandbox off"), "{why}");
    assert_eq!(pid(&place), Some(switch.process.pid()));
    converse(&mut a, &mut b, 0, 20);
    // The second one replaces a switch that has none.
    for (sandbox, warning) in
        [("off", "no sandbox, as was asked for"), ("on", "its helper cannot be started")]
    {
        let (taken, new) = replaced_without_helper(&place, sandbox);
        assert!(taken, "{sandbox}: {:#?}", new.log());
        assert!(switch.process.wait().0.success());
        switch.process = new;
        eventually("it has taken over", || pid(&place).filter(|pid| *pid == switch.process.pid()));
        switch.process.until_logged_times(warning, 1);
        converse(&mut a, &mut b, 0, 20);
    }
    switch.assert_no_drops();
    switch.stop();
}

/// Whoever has started the successor can stop it until it has taken over.
#[test]
fn a_successor_that_is_interrupted_leaves_the_switch_as_it_is() {
    let place = Place::new();
    let switch = place.switch(&["a", "b"]);
    let (mut a, mut b) = bystanders(&switch);
    let (old, between) = (pid(&place).unwrap(), Between::new(&place));
    let mut new = start(&place);
    let number = new.pid();
    let taken = between.relay(|now, _| {
        if now == Step::Answered(FINAL) {
            kill_process(Pid::from_raw(number as i32).unwrap(), Signal::INT).unwrap();
        }
        true
    });
    assert!(!taken);
    assert_eq!(new.wait().0.code(), Some(1));
    assert!(new.log().join("\n").contains("interrupted: the running switch goes on"), "{:#?}", new.log());
    assert_eq!(pid(&place), Some(old));
    converse(&mut a, &mut b, 0, 20);
    switch.stop();
}

/// Waits until SIGTERM lies where a process that waits for its successor will find it.
fn until_pending(pid: u32) {
    eventually("the signal is pending", || {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let pending = status.lines().find_map(|line| line.strip_prefix("ShdPnd:")).unwrap();
        (u64::from_str_radix(pending.trim(), 16).unwrap() & 1 << (Signal::TERM.as_raw() - 1) != 0)
            .then_some(())
    });
}

/// Whoever stops the process that has the ports, as far as he knows, stops the switch: either process has ended in an orderly way when both have.
#[test]
fn a_switch_that_is_stopped_while_it_is_replaced_stops() {
    let place = Place::new();
    let mut switch = place.switch(&["a", "b"]);
    let (mut a, mut b) = bystanders(&switch);
    converse(&mut a, &mut b, 0, 20);
    let old = switch.process.pid();
    let mut new = relayed(&place, |now, _| {
        if now == Step::Asked(RUNNING) {
            switch.process.signal(Signal::TERM);
            until_pending(old);
        }
    });
    for process in [&mut switch.process, &mut new] {
        assert!(process.wait().0.success(), "{:#?}", process.log());
    }
    assert_eq!(new.logged("the switch ends, as the process before was told to end"), 1, "{:#?}", new.log());
    assert_eq!(place.files(), [""; 0]);
}

/// Whoever stops the keeper while the switch is replaced stops the successor, as the switch that was asked has nothing to stop any more.
#[test]
fn a_kept_switch_that_is_stopped_while_it_is_replaced_stops() {
    let place = Place::new();
    let mut switch = place.start(&mut kept(&place.run(&["a"])), Vec::new());
    let old = pid(&place).unwrap();
    let mut new = relayed(&place, |now, _| {
        if now == Step::Asked(RUNNING) {
            switch.process.signal(Signal::TERM);
            until_pending(old);
        }
    });
    assert!(new.wait().0.success(), "{:#?}", new.log());
    assert!(switch.process.wait().0.success());
    assert_eq!(switch.process.logged("is started again"), 0);
    assert_eq!(place.files(), [""; 0]);
}

/// Changes a message's text.
fn edit(message: &mut Message, change: impl FnOnce(&mut Value)) {
    let mut text: Value = serde_json::from_slice(&message.text).unwrap();
    change(&mut text);
    message.text = serde_json::to_vec(&text).unwrap();
}

/// Adds a field to an object and all objects in it, but for those whose keys are names.
fn add_novelty(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            let named = ["ports", "numbers", "counters", "drops"];
            let inner = fields.iter_mut().filter(|(key, _)| !named.contains(&key.as_str()));
            inner.for_each(|(_, inner)| add_novelty(inner));
            // What has one key says by it which of several things it is.
            if fields.len() != 1 {
                fields.insert("novelty".to_owned(), json!({ "of": ["a", 1] }));
            }
        }
        Value::Array(items) => items.iter_mut().for_each(add_novelty),
        _ => {}
    }
}

/// Replaces the switch of a place, with messages that are what `change` makes of them, and returns the successor. One that is too late on a busy machine is followed by
/// another one.
fn relayed(place: &Place, mut change: impl FnMut(Step, &mut Message)) -> Process {
    loop {
        let between = Between::new(place);
        let mut new = start(place);
        let is_over = between.relay(|now, message| {
            change(now, message);
            true
        });
        if is_over {
            return new;
        }
        assert_eq!(new.wait().0.code(), Some(1), "{:#?}", new.log());
        assert!(new.log().join("\n").contains("try again"), "{:#?}", new.log());
    }
}

/// Replaces a switch with running rings, whose messages and whose successor's are what `change` makes of them; returns the successor.
fn replaced_with<'a>(
    place: &'a Place,
    switch: &mut Switch<'a>,
    (a, b): (&mut Guest, &mut Guest),
    change: impl FnMut(Step, &mut Message),
) -> Process {
    converse(a, b, 0, 20);
    let new = relayed(place, change);
    let (status, _) = switch.process.wait();
    assert!(status.success(), "{:#?}", switch.process.log());
    eventually("the successor answers", || (pid(place) == Some(new.pid())).then_some(()));
    converse(a, b, 100, 20);
    switch.assert_no_drops();
    assert_eq!(switch.port("a").counters["connections"], 1);
    new
}

/// What the first form has not is taken out of what either says: the successor takes over from a program of that form, and is one.
#[test]
fn programs_of_the_first_form_are_replaced_and_replace() {
    let place = Place::new();
    // The predecessor is of that form, then the successor.
    for victim in [Step::Answered(FINAL), Step::Asked(RUNNING)] {
        let mut switch = place.switch(&["a", "b"]);
        let (mut a, mut b) = bystanders(&switch);
        let new = replaced_with(&place, &mut switch, (&mut a, &mut b), |now, message| match now {
            Step::Answered(FINAL) if now == victim => edit(message, |text| {
                text.as_object_mut().unwrap().remove("kept");
            }),
            Step::Asked(RUNNING) if now == victim => message.text.clear(),
            _ => {}
        });
        switch.process = new;
        switch.process.until_logged_times("has taken over", 1);
        switch.stop();
    }
}

/// A field that is not known is passed over, wherever it is.
#[test]
fn what_a_newer_program_says_besides_is_passed_over() {
    let place = Place::new();
    let mut switch = place.switch(&["a", "b"]);
    let (mut a, mut b) = bystanders(&switch);
    let new = replaced_with(&place, &mut switch, (&mut a, &mut b), |now, message| {
        if !message.text.is_empty() && now != Step::Asked(HELLO) {
            edit(message, add_novelty);
        }
    });
    switch.process = new;
    switch.stop();
}

/// A form or a need that this program does not know has it leave the switch that runs as it is.
#[test]
fn a_program_that_is_too_new_is_not_taken_over_from() {
    let place = Place::new();
    let switch = place.switch(&["a", "b"]);
    let (mut a, mut b) = bystanders(&switch);
    let changes = [
        ("/format", json!(9), "it hands over in form 9"),
        ("/needs/0", json!("submarine"), "it has what this program does not know: [\"submarine\"]"),
    ];
    for (place_of, value, why) in changes {
        let between = Between::new(&place);
        let mut new = start(&place);
        between.relay(|now, message| {
            if now == Step::Answered(HELLO) {
                edit(message, |text| *text.pointer_mut(place_of).unwrap() = value.clone());
            }
            true
        });
        let (status, _) = new.wait();
        assert_eq!(status.code(), Some(1));
        assert!(new.log().join("\n").contains(why), "{:#?}", new.log());
        converse(&mut a, &mut b, 0, 20);
    }
    assert_eq!(pid(&place), Some(switch.process.pid()));
    switch.stop();
}

/// With a program of an earlier commit at hand (`OLD_RINGFERRY`, an absolute path) that is replaced by this one, and replaces it.
#[test]
fn an_earlier_program_is_replaced_and_replaces() {
    let Some(old) = std::env::var_os("OLD_RINGFERRY") else {
        eprintln!("skipped: OLD_RINGFERRY names no program of an earlier version");
        return;
    };
    let place = Place::new();
    let with = |run: &Command| {
        let mut command = Command::new(&old);
        command.args(run.get_args());
        command
    };
    let mut switch = place.start(&mut with(&place.run(&["a", "b"])), Vec::new());
    let (mut a, mut b) = bystanders(&switch);
    for (round, by) in [replace(&place), with(&replace(&place)), replace(&place)].iter_mut().enumerate() {
        converse(&mut a, &mut b, 0, 20);
        if !is_root() {
            by.args(["--sandbox", "off"]);
        }
        let new = Process::start(by, Spawn::default());
        let (status, _) = switch.process.wait();
        assert!(status.success(), "{round}: {:#?}", switch.process.log());
        eventually("the successor answers", || (pid(&place) == Some(new.pid())).then_some(()));
        switch.process = new;
        converse(&mut a, &mut b, 100, 20);
        switch.assert_no_drops();
        assert_eq!(switch.port("a").counters["connections"], 1, "{round}");
    }
    switch.stop();
}
