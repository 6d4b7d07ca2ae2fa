//! A switch that is killed while its descriptors are kept outside of it: `ringferry keep`. Front ends stay connected, and packets go on.

use std::io::ErrorKind;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ringferry_control::snapshot::PortState;
use ringferry_control::{self as control, Answer, Request};
use ringferry_memory::SharedMem;
use ringferry_packet::vnet::Header;
use ringferry_rig::frames::frame;
use ringferry_rig::guest::{Guest, Options, acquaint, converse};
use ringferry_rig::process::{PATIENCE, eventually, in_a_namespace, may};
use ringferry_rig::switch::{Place, Switch, ringferry};
use ringferry_sys::netif;
use ringferry_sys::socket::Stream;
use ringferry_sys::testing::lingering;
use ringferry_virtio_net::Features;
use rustix::process::{Pid, Signal, kill_process};

use crate::hostile::pass_channel;
use crate::replace::replace;

/// Kills for each kind of ring.
const ROUNDS: u32 = 8;

/// The command that keeps a switch with these ports.
fn keep(place: &Place, ports: &[&str]) -> Command {
    kept(&place.run(ports))
}

/// The command that keeps the switch that another one runs.
pub fn kept(run: &Command) -> Command {
    let mut command = ringferry();
    command.arg("keep").args(run.get_args().skip(1));
    command
}

/// The number of the switch's own process.
pub fn pid(place: &Place) -> Option<u32> {
    match control::call(&place.control(), &Request::Show { addresses: None }) {
        Ok(Answer::Show(snapshot)) => Some(snapshot.pid),
        _ => None,
    }
}

/// Starts a kept switch.
fn start<'a>(place: &'a Place, ports: &[&str]) -> Switch<'a> {
    place.start(&mut keep(place, ports), Vec::<(OwnedFd, i32)>::new())
}

/// Waits until a state is kept that says this so often, and of which no front end has said anything else since. It is stored a moment after it has changed.
#[track_caller]
pub fn until_kept(switch: &Switch<'_>, what: &str, count: usize) {
    until_stored(switch, what, count, |marks| marks.iter().all(|byte| *byte == 0));
}

/// Waits until a state is kept that says this so often, with such marks.
#[track_caller]
fn until_stored(switch: &Switch<'_>, what: &str, count: usize, marks: fn(&[u8]) -> bool) {
    let folder = format!("/proc/{}/fd", switch.process.pid());
    // Of a state that is closed between two looks nothing is known.
    let is_kept = |path: &Path| {
        let is_state =
            std::fs::read_link(path).is_ok_and(|link| link.to_string_lossy().contains("ringferry-state"));
        let text = if is_state { std::fs::read(path).unwrap_or_default() } else { Vec::new() };
        let Some((length, rest)) = text.split_first_chunk() else { return false };
        let (text, rest) = rest.split_at(u64::from_le_bytes(*length) as usize);
        String::from_utf8_lossy(text).matches(what).count() == count && marks(rest)
    };
    eventually("the state is kept", || {
        let mut kept = std::fs::read_dir(&folder).unwrap();
        kept.any(|fd| fd.is_ok_and(|fd| is_kept(&fd.path()))).then_some(())
    });
}

/// Kills the switch, and returns when the next one answers.
#[track_caller]
pub fn kill(place: &Place) {
    let before = pid(place).unwrap();
    kill_process(Pid::from_raw(before as i32).unwrap(), Signal::KILL).unwrap();
    eventually("the next switch answers", || pid(place).filter(|pid| *pid != before));
}

/// Sends a frame of its own and receives whatever is still on its way until it has come. What a switch had in its hands when it was killed is lost.
#[track_caller]
pub fn flush_out(from: &mut Guest, to: &mut Guest, number: u32) {
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
    until_kept(&switch, "\"enabled\":true", 4);
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

#[test]
fn what_was_set_at_run_time_outlives_a_killed_switch_whatever_the_file_says() {
    let place = Place::new();
    let file = place.path().join("rf.toml");
    let port = |name: &str| {
        format!(
            "[[port]]\nkind = 'vhost-user'\nname = '{name}'\nsocket = '{}'\n",
            place.socket(name).display()
        )
    };
    std::fs::write(&file, ["a", "b"].map(port).concat()).unwrap();
    let mut command = keep(&place, &[]);
    let switch = place.start(command.arg(&file), Vec::new());
    let [mut a, mut b] =
        [("a", 1), ("b", 2)].map(|(port, number)| switch.plug(port, number, Options::default()));
    acquaint(&mut [&mut a, &mut b]);
    let added = format!("vhost-user:{}", place.socket("c").display());
    for words in [
        &["set", "--runtime", "a", "queue_size=512", "max_macs=7"][..],
        &["add", "--runtime", &added],
        &["link", "c", "down"],
        &["mirror", "add", "a", "c"],
    ] {
        place.ctl(words);
    }
    let in_force = || ["dump", "mirror"].map(|word| place.ctl(&[word]));
    let before = in_force();
    assert!(before[0].contains("queue_size = 512") && before[1].contains('c'), "{before:?}");
    // Of what is said in JSON the configuration is a text.
    until_kept(&switch, "\"links_down\":[\"c\"],\"mirrors\":[{\"from\":\"a\"", 1);
    std::fs::write(&file, "this is = no file\n").unwrap();
    for _ in 0..2 {
        kill(&place);
        assert_eq!(in_force(), before);
        assert_eq!(switch.port("c").state, PortState::AdminDown);
        converse(&mut a, &mut b, 0, 20);
    }
    assert!(a.connection.frontend().check().is_ok() && b.connection.frontend().check().is_ok());
    // The file counts again when somebody asks for it.
    std::fs::write(&file, ["a", "b"].map(port).concat()).unwrap();
    place.ctl(&["reload"]);
    assert!(!in_force()[0].contains("queue_size"));
    switch.stop();
}

/// Whoever is in the middle of a message has its descriptors looked at by nobody, and harms nobody else.
#[test]
fn descriptors_of_half_a_message_are_not_kept() {
    let place = Place::new();
    let switch = start(&place, &["a", "b", "c"]);
    let [mut a, mut b] =
        [("a", 1), ("b", 2)].map(|(port, number)| switch.plug(port, number, Options::default()));
    acquaint(&mut [&mut a, &mut b]);
    let hostile = switch.connect("c");
    hostile.set_timeout(Some(PATIENCE)).unwrap();
    let strange = SharedMem::new("strange", 4096).unwrap();
    until_kept(&switch, "\"name\":\"c\"", 1);
    assert_eq!(hostile.send(&[1], &[strange.fd()]).unwrap(), 1);
    until_kept(&switch, "\"name\":\"c\"", 0);
    until_kept(&switch, "\"enabled\":true", 4);
    let kept = std::fs::read_dir(format!("/proc/{}/fd", switch.process.pid())).unwrap();
    let kept: Vec<_> = kept.map(|fd| std::fs::read_link(fd.unwrap().path()).unwrap()).collect();
    assert!(!kept.iter().any(|link| link.to_string_lossy().contains("strange")), "{kept:?}");
    kill(&place);
    converse(&mut a, &mut b, 0, 20);
    assert!(a.connection.frontend().check().is_ok() && b.connection.frontend().check().is_ok());
    // It is disconnected, and may connect again.
    assert_eq!(hostile.recv_bytes(&mut [0; 8]).unwrap(), 0);
    let mut c = switch.plug("c", 3, Options::default());
    acquaint(&mut [&mut a, &mut c]);
    converse(&mut a, &mut c, 0, 20);
    switch.stop();
}

/// Passes one end of a channel to a switch that is kept, and waits until its keeper has a copy. Returns the other end, and what the file is called.
#[track_caller]
fn channel_to(switch: &Switch<'_>, stream: &Stream) -> (Stream, PathBuf) {
    let (given, other) = Stream::pair().unwrap();
    let name = std::fs::read_link(format!("/proc/self/fd/{}", given.as_fd().as_raw_fd())).unwrap();
    pass_channel(stream, given.as_fd());
    until_it_has(switch, &name, true);
    (other, name)
}

/// Waits until a keeper has a file, or has it no more.
#[track_caller]
fn until_it_has(switch: &Switch<'_>, name: &Path, expected: bool) {
    let folder = format!("/proc/{}/fd", switch.process.pid());
    eventually("the keeper has it, or has let go of it", || {
        let mut files = std::fs::read_dir(&folder).unwrap().map_while(Result::ok);
        let has = files.any(|fd| std::fs::read_link(fd.path()).is_ok_and(|link| link == name));
        (has == expected).then_some(())
    });
}

/// In a channel, of which the keeper has the last copy once the switch has given it up, lies the front end's own end of the connection.
#[test]
fn a_front_end_that_leaves_its_own_end_with_the_keeper_is_seen_to_go() {
    let place = Place::new();
    let switch = start(&place, &["a"]);
    let stream = switch.connect("a");
    let (other, name) = channel_to(&switch, &stream);
    other.send(b"x", &[stream.as_fd(), other.as_fd()]).unwrap();
    drop((other, stream));
    until_it_has(&switch, &name, false);
    switch.until_state("a", PortState::Listening);
    switch.stop();
}

/// There lies a socket that waits for its receiver when it is closed.
#[test]
fn d1_a_keeper_does_not_wait_for_what_a_front_end_has_passed() {
    let place = Place::new();
    let switch = start(&place, &["a", "b"]);
    let hostile = switch.connect("b");
    let (other, name) = channel_to(&switch, &hostile);
    let (waits, _receiver) = lingering();
    other.send(b"x", &[waits.as_fd()]).unwrap();
    drop(waits);
    until_it_has(&switch, &name, false);
    kill(&place);
    let [mut a, mut b] = [switch.plug("a", 1, Options::default()), {
        drop(hostile);
        switch.plug("b", 2, Options::default())
    }];
    acquaint(&mut [&mut a, &mut b]);
    converse(&mut a, &mut b, 0, 20);
    switch.stop();
}

/// A front end has passed much memory with half a message, so that the switch alone has it. Its port, of which nothing is kept, has its socket until the kernel has freed that,
/// which takes longer than whoever keeps the switch waits for its end.
#[test]
fn a_switch_that_is_killed_and_takes_long_to_end_is_followed_by_one_that_goes_on() {
    const MUCH: usize = 1 << 30;
    let place = Place::new();
    let switch = start(&place, &["a", "b", "c"]);
    let [mut a, mut b] =
        [("a", 1), ("b", 2)].map(|(port, number)| switch.plug(port, number, Options::default()));
    acquaint(&mut [&mut a, &mut b]);
    for _ in 0..3 {
        until_kept(&switch, "\"name\":\"c\"", 1);
        let much = SharedMem::new("much", MUCH).unwrap();
        let allocate = rustix::fs::FallocateFlags::empty();
        rustix::fs::fallocate(much.fd(), allocate, 0, MUCH as u64).unwrap();
        let hostile = switch.connect("c");
        assert_eq!(hostile.send(&[1], &[much.fd()]).unwrap(), 1);
        drop(much);
        until_kept(&switch, "\"name\":\"c\"", 0);
        until_kept(&switch, "\"enabled\":true", 4);
        kill(&place);
        converse(&mut a, &mut b, 0, 20);
        assert!(a.connection.frontend().check().is_ok() && b.connection.frontend().check().is_ok());
        drop(hostile);
        // One that has replaced another is watched in the same way, though it is no child of whoever keeps it.
        let before = pid(&place).unwrap();
        assert!(replace(&place).arg("--background").status().unwrap().success());
        let is_there = || Path::new(&format!("/proc/{before}")).exists();
        eventually("the one before has ended", || (!is_there()).then_some(()));
        let threads = || std::fs::read_dir(format!("/proc/{}/task", switch.process.pid())).unwrap();
        let is_watched = || {
            let name = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("comm")).ok();
            threads().filter_map(|task| name(task.ok()?)).any(|name| name == "ringferry-life\n")
        };
        eventually("its lifeline is watched", || is_watched().then_some(()));
    }
    let mut c = switch.plug("c", 3, Options::default());
    acquaint(&mut [&mut a, &mut c]);
    converse(&mut a, &mut c, 100, 20);
    switch.stop();
}

/// Requests that a front end sends at once, and the length of an answer.
const AT_ONCE: usize = 32;
const ANSWER: usize = 20;

/// A front end whose request was read by a switch that was killed gets an answer, or its connection ends: it does not wait for ever.
#[test]
fn a_front_end_whose_request_was_lost_is_disconnected() {
    let place = Place::new();
    let switch = start(&place, &["a", "b", "c"]);
    let [mut a, mut b] =
        [("a", 1), ("b", 2)].map(|(port, number)| switch.plug(port, number, Options::default()));
    acquaint(&mut [&mut a, &mut b]);
    until_kept(&switch, "\"enabled\":true", 4);
    // Many at once, so that the switch has some of them in its hands at any moment.
    let get_features = [1u32, 1, 0].map(u32::to_le_bytes).concat().repeat(AT_ONCE);
    for _ in 0..ROUNDS {
        let (answered, over) = (AtomicU64::new(0), AtomicBool::new(false));
        let c = switch.connect("c");
        let ask = || {
            while !over.load(Ordering::Relaxed) && c.send(&get_features, &[]).is_ok() {
                let mut left = AT_ONCE * ANSWER;
                while left > 0 {
                    match c.recv_bytes(&mut vec![0; left]) {
                        Ok(count @ 1..) => left -= count,
                        Err(error) if error.kind() == ErrorKind::WouldBlock => panic!("it waits in vain"),
                        Ok(0) | Err(_) => return,
                    }
                }
                answered.fetch_add(1, Ordering::Relaxed);
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(ask);
            until_stored(&switch, "\"socket\":", 3, |_| true);
            let victim = pid(&place).unwrap();
            let before = answered.load(Ordering::Relaxed);
            eventually("it is answered", || (answered.load(Ordering::Relaxed) > before).then_some(()));
            kill_process(Pid::from_raw(victim as i32).unwrap(), Signal::KILL).unwrap();
            eventually("the next switch answers", || pid(&place).filter(|pid| *pid != victim));
            over.store(true, Ordering::Relaxed);
        });
    }
    converse(&mut a, &mut b, 0, 20);
    assert!(a.connection.frontend().check().is_ok() && b.connection.frontend().check().is_ok());
    switch.stop();
}

/// The usual limit of open files is far below what a few guests with many queues need, twice.
#[test]
fn a_keeper_needs_no_raised_limit_of_open_files() {
    let place = Place::new();
    let kept = keep(&place, &["a", "b", "c", "d"]);
    let mut limited = Command::new("sh");
    limited.args(["-c", "ulimit -S -n 64; exec \"$0\" \"$@\""]).arg(kept.get_program()).args(kept.get_args());
    let switch = place.start(&mut limited, Vec::new());
    let mut guests = [("a", 1), ("b", 2), ("c", 3), ("d", 4)]
        .map(|(port, number)| switch.plug(port, number, Options::default()));
    let [a, b, c, d] = &mut guests;
    acquaint(&mut [a, b, c, d]);
    until_kept(&switch, "\"enabled\":true", 8);
    kill(&place);
    for guest in [&mut *a, &mut *b, &mut *c, &mut *d] {
        assert!(guest.connection.frontend().check().is_ok());
    }
    acquaint(&mut [a, b, c, d]);
    converse(a, b, 0, 20);
    converse(c, d, 0, 20);
    switch.stop();
}

/// A state with which no switch can start costs what is in it, and not the switch.
#[test]
fn a_killed_keeper_is_noticed_and_another_one_takes_over() {
    let place = Place::new();
    let mut switch = start(&place, &["a"]);
    let before = pid(&place).unwrap();
    until_kept(&switch, "\"name\":\"a\"", 1);
    switch.process.signal(Signal::KILL);
    let said = |expected: bool| {
        eventually("the switch has noticed", || {
            let shown = place.ctl(&["why", "a"]);
            (shown.contains("Of the switch itself: nobody starts another one if this process is killed")
                == expected)
                .then_some(())
        });
    };
    said(true);
    switch.process.until_logged("nobody starts another one if this process is killed");
    assert_eq!(pid(&place), Some(before));
    let take_over = || {
        let mut command = ringferry();
        command.args(["keep", "--", "--replace", "--control"]).arg(place.control());
        place.start(&mut command, Vec::<(OwnedFd, i32)>::new())
    };
    let keeper = take_over();
    said(false);
    until_kept(&keeper, "\"name\":\"a\"", 1);
    kill(&place);
    kill(&place);
    keeper.stop();
    // A switch that nobody has kept before is kept, too.
    let switch = place.switch(&["a"]);
    let keeper = take_over();
    until_kept(&keeper, "\"name\":\"a\"", 1);
    drop(switch);
    kill(&place);
    keeper.stop();
}

/// Either keeper would start another switch, and end it at its own end.
#[test]
fn a_switch_that_is_kept_is_not_kept_by_a_second_one() {
    let place = Place::new();
    let switch = start(&place, &["a"]);
    let before = pid(&place);
    let mut command = ringferry();
    command.args(["keep", "--", "--replace", "--control"]).arg(place.control());
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        !output.status.success() && said.contains("is kept by another `ringferry keep` already"),
        "{said}"
    );
    assert_eq!(pid(&place), before);
    // To take over from the switch alone is another matter.
    let mut command = ringferry();
    command.args(["run", "--replace", "--background", "--control"]).arg(place.control());
    // Its log goes on where this one's does.
    assert!(command.stderr(Stdio::null()).status().unwrap().success());
    assert_ne!(pid(&place), before);
    until_kept(&switch, "\"name\":\"a\"", 1);
    kill(&place);
    switch.stop();
}

/// A keeper that stands still does not hear which process follows: it would take the end of the one before for that of the switch, and start another one.
#[test]
fn a_switch_is_not_replaced_while_its_keeper_hears_nothing() {
    let place = Place::new();
    let (mut switch, notify) = start_heard(&place);
    let before = pid(&place);
    switch.process.signal(Signal::STOP);
    let socket = UnixDatagram::unbound().unwrap();
    socket.connect(notify).unwrap();
    socket.set_nonblocking(true).unwrap();
    while socket.send(b"X=1").is_ok() {}
    let mut command = replace(&place);
    let output = command.arg("--background").output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && said.contains("does not read what it is told"), "{said}");
    assert_eq!(pid(&place), before);
    switch.process.signal(Signal::CONT);
    // Until there is room again.
    eventually("the switch is replaced", || {
        let status = replace(&place).arg("--background").stderr(Stdio::null()).status().unwrap();
        status.success().then_some(())
    });
    assert_ne!(pid(&place), before);
    until_kept(&switch, "\"name\":\"a\"", 1);
    kill(&place);
    switch.stop();
    assert_eq!(place.files(), ["temporary"], "nobody is left behind");
}

/// Starts a kept switch with the port `a`, and returns the socket on which its keeper listens, in the folder `temporary` of the place.
fn start_heard(place: &Place) -> (Switch<'_>, PathBuf) {
    let temporary = place.path().join("temporary");
    std::fs::create_dir(&temporary).unwrap();
    let mut command = keep(place, &["a"]);
    let switch = place.start(command.env("TMPDIR", &temporary), Vec::<(OwnedFd, i32)>::new());
    until_kept(&switch, "\"name\":\"a\"", 1);
    let sockets = std::fs::read_dir(temporary).unwrap().map(|entry| entry.unwrap().path().join("notify"));
    (switch, sockets.into_iter().find(|path| path.exists()).expect("a keeper listens"))
}

/// After an upgrade the switch that follows one that was killed is not the old one.
#[test]
fn the_program_that_is_started_is_the_one_that_lies_there_if_it_can_serve() {
    let place = Place::new();
    let path = place.path().join("ringferry");
    let install = || {
        let newer = place.path().join("newer");
        std::fs::copy(ringferry().get_program(), &newer).unwrap();
        std::fs::rename(&newer, &path).unwrap();
        std::fs::metadata(&path).unwrap().ino()
    };
    let first = install();
    let mut command = Command::new(&path);
    command.args(keep(&place, &["a", "b"]).get_args());
    let switch = place.start(&mut command, Vec::<(OwnedFd, i32)>::new());
    let options = Options { inflight: false, ..Options::default() };
    let [mut a, mut b] = [("a", 1), ("b", 2)].map(|(port, number)| switch.plug(port, number, options));
    acquaint(&mut [&mut a, &mut b]);
    let runs = || std::fs::metadata(format!("/proc/{}/exe", pid(&place).unwrap())).map(|file| file.ino());
    let mut follows = |program: u64| {
        until_kept(&switch, "\"enabled\":true", 4);
        kill(&place);
        // A process in its sandbox is looked at by root alone.
        assert!(runs().is_ok_and(|inode| inode == program) || may("root, to look at the switch", false));
        flush_out(&mut a, &mut b, 1);
        converse(&mut a, &mut b, 1000, 20);
    };
    follows(first);
    let second = install();
    follows(second);
    // What an upgrade leaves that failed.
    let fail = |how: &str| {
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, format!("#!/bin/sh\n{how}\n")).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    };
    fail("exit 3");
    follows(first);
    switch.process.until_logged("cannot serve (exit status: 3): the one that keeps the switch is started");
    // One that does not even end, and the next upgrade, which does not.
    fail("exec sleep 1000");
    follows(first);
    switch.process.until_logged("cannot serve (it was not ready after 10 s)");
    follows(install());
    switch.stop();
}

#[test]
fn nobody_else_tells_a_keeper_anything_whatever_the_umask() {
    let place = Place::new();
    let run = keep(&place, &["a"]);
    let mut shell = Command::new("sh");
    shell.args(["-c", "umask 0; exec \"$0\" \"$@\""]).arg(run.get_program()).args(run.get_args());
    let switch = place.start(&mut shell, Vec::<(OwnedFd, i32)>::new());
    let environment = std::fs::read(format!("/proc/{}/environ", pid(&place).unwrap())).unwrap();
    let variables = environment.split(|byte| *byte == 0);
    let socket = variables.into_iter().find_map(|variable| variable.strip_prefix(b"NOTIFY_SOCKET=")).unwrap();
    let socket = Path::new(std::str::from_utf8(socket).unwrap());
    let mode = std::fs::metadata(socket.parent().unwrap()).unwrap().permissions().mode();
    assert_eq!(mode & 0o7777, 0o700);
    switch.stop();
}

#[test]
fn a_switch_that_cannot_go_on_begins_afresh() {
    let place = Place::new();
    let mut switch = start(&place, &["a", "b"]);
    let a = switch.plug("a", 1, Options::default());
    until_kept(&switch, "\"enabled\":true", 2);
    // Half a message with a descriptor has the port left out of what is kept, and something else takes its socket.
    let half = switch.connect("b");
    let strange = SharedMem::new("strange", 4096).unwrap();
    until_kept(&switch, "\"socket\":", 2);
    assert_eq!(half.send(&[1], &[strange.fd()]).unwrap(), 1);
    until_kept(&switch, "\"name\":\"b\"", 0);
    std::fs::remove_file(place.socket("b")).unwrap();
    let taken = std::os::unix::net::UnixListener::bind(place.socket("b")).unwrap();
    let before = pid(&place).unwrap();
    kill_process(Pid::from_raw(before as i32).unwrap(), Signal::KILL).unwrap();
    // The reason is still there, so the fresh one ends, too, and says why.
    assert_eq!(switch.process.wait().0.code(), Some(1));
    switch.process.until_logged_times("one is started without anything of the one that was killed", 1);
    // Once more where the one that was killed had not ended yet.
    let said = || switch.process.logged("is in use");
    eventually("each says so", || (said() >= 2).then_some(()));
    assert!(said() <= 3);
    drop((taken, a, half));
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

/// Whoever keeps a tap has it open.
fn a_kept_tap_is_opened_anew_in_the_namespace() {
    if !may("needs the program ip", ringferry_sys::program::installed("ip").is_some()) {
        return;
    }
    let place = Place::new();
    let file = place.path().join("rf.toml");
    let vm = format!("[[port]]\nkind = 'vhost-user'\nsocket = '{}'\n", place.socket("a").display());
    let tap = "[[port]]\nkind = 'tap'\ntap = 'rf0'\n";
    std::fs::write(&file, format!("{vm}{tap}")).unwrap();
    let mut command = ringferry();
    command.arg("keep").arg(&file).arg("--control").arg(place.control());
    let switch = place.start(&mut command, Vec::new());
    until_kept(&switch, "\"tap\":", 1);
    std::fs::write(&file, format!("{vm}{tap}offloads = false\n")).unwrap();
    let plan = place.ctl(&["reload"]);
    assert!(
        plan.contains("~ rf0: offloads true -> false; it is opened anew") && !plan.contains("not done"),
        "{plan}"
    );
    assert!(place.ctl(&["remove", "rf0", "--runtime"]).contains("rf0 removed"));
    assert!(place.ctl(&["add", "tap:rf0", "--runtime"]).contains("rf0 added"));
    // One that was deleted is kept again when it is made anew.
    let before = netif::index("rf0").unwrap();
    let gone = Command::new("ip").args(["link", "delete", "rf0"]).status().unwrap();
    assert!(gone.success());
    let anew = || netif::index("rf0").unwrap().filter(|index| Some(*index) != before);
    let anew = eventually("the tap is made anew", anew);
    let folder = format!("/proc/{}/fdinfo", switch.process.pid());
    let is_tap = |file: std::fs::DirEntry| {
        std::fs::read_to_string(file.path()).is_ok_and(|about| about.contains("iff:\trf0"))
    };
    eventually("it is kept", || {
        std::fs::read_dir(&folder).unwrap().any(|file| file.is_ok_and(is_tap)).then_some(())
    });
    until_kept(&switch, "\"tap\":", 1);
    kill(&place);
    assert_eq!(netif::index("rf0").unwrap(), Some(anew), "it is the same interface");
    switch.stop();
}

#[test]
fn a_kept_tap_is_opened_anew() {
    in_a_namespace(a_kept_tap_is_opened_anew_in_the_namespace);
}

#[test]
fn a_control_socket_that_was_removed_is_back_after_a_kill() {
    let place = Place::new();
    let mut switch = start(&place, &["a"]);
    until_kept(&switch, "\"name\":\"a\"", 1);
    let before = pid(&place).unwrap();
    std::fs::remove_file(place.control()).unwrap();
    switch.process.until_logged("somebody has removed the control socket");
    kill_process(Pid::from_raw(before as i32).unwrap(), Signal::KILL).unwrap();
    eventually("the next switch answers", || pid(&place).filter(|pid| *pid != before));
    switch.process.until_logged("somebody had removed the control socket, which is made anew");
    kill(&place);
    // One that is made anew without a kill is kept, too.
    std::fs::remove_file(place.control()).unwrap();
    switch.process.signal(Signal::HUP);
    switch.process.until_logged("control is made anew");
    until_kept(&switch, "\"name\":\"a\"", 1);
    kill(&place);
    kill(&place);
    switch.stop();
}

/// A switch that somebody has taken over names any process.
#[test]
fn a_process_that_is_no_switch_is_not_ended_as_its_successor() {
    let place = Place::new();
    let (switch, notify) = start_heard(&place);
    let mut other = Command::new("sleep").arg("1000").spawn().unwrap();
    let socket = UnixDatagram::unbound().unwrap();
    socket.send_to(format!("MAINPID={}", other.id()).as_bytes(), notify).unwrap();
    switch.process.until_logged("as its successor, which is none");
    // It goes on as if nothing had been said.
    kill(&place);
    switch.stop();
    assert!(other.try_wait().unwrap().is_none(), "it was ended");
    other.kill().unwrap();
    other.wait().unwrap();
}

#[test]
fn a_tap_outlives_a_killed_switch() {
    in_a_namespace(a_tap_outlives_in_the_namespace);
}
