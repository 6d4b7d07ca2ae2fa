//! `ringferry ctl why`: states of ports and loads of workers, each produced by front ends and guests, and the sentence that says so. What workers alone
//! can produce is tried in `crates/switch/src/why/tests.rs`.

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ringferry_control::snapshot::{PortSnapshot, PortState, Snapshot};
use ringferry_control::why::{Effect, Finding};
use ringferry_control::{self as control, Answer, Request};
use ringferry_memory::RegionSpec;
use ringferry_packet::ether::Mac;
use ringferry_packet::vnet::Header;
use ringferry_rig::frames::frame;
use ringferry_rig::guest::{Guest, Options, acquaint, converse};
use ringferry_rig::process::{PATIENCE, in_a_namespace, may};
use ringferry_rig::raw::{self, Raw, region};
use ringferry_rig::schema::assert_described;
use ringferry_rig::switch::{Place, Switch, ringferry};
use ringferry_rig::terminal::Terminal;
use ringferry_sys::program;
use ringferry_sys::socket::Stream;
use ringferry_vhost_user::{Wanted, connect_device};
use ringferry_virtio_net::Features;

use crate::lifecycle::bystanders;

/// Asks the switch why until it has found a situation with a sentence that goes like this. What stops a port stays, so `ringferry ctl why` says it, too.
#[track_caller]
fn expect(place: &Place, ports: &[&str], situation: &str, effect: Effect, sentence: &str) {
    expect_while(&mut || {}, place, ports, situation, effect, sentence);
}

/// The same; between two questions it does something.
#[track_caller]
fn expect_while(
    act: &mut dyn FnMut(),
    place: &Place,
    ports: &[&str],
    situation: &str,
    effect: Effect,
    sentence: &str,
) {
    let control = place.control();
    let [port, peer] = [0, 1].map(|at| ports.get(at).map(|port| (*port).to_owned()));
    let request = Request::Why { port: port.unwrap(), peer };
    let deadline = Instant::now() + PATIENCE;
    let (finding, last) = loop {
        act();
        let Answer::Why(diagnosis) = control::call(&control, &request).unwrap() else {
            panic!("an answer to another question")
        };
        let last = diagnosis.to_text();
        let is_it = |finding: &Finding| finding.situation == situation && finding.text.contains(sentence);
        if let Some(finding) = diagnosis.findings.into_iter().find(is_it) {
            break (finding, last);
        }
        assert!(Instant::now() < deadline, "not {situation} ({sentence}): {last}");
        std::thread::sleep(Duration::from_millis(20));
    };
    assert_eq!(finding.effect, effect, "{situation}");
    assert!(last.contains(&finding.text) && !last.contains("Nothing was found"), "{last}");
    if effect == Effect::Stops {
        let text = place.ctl(&[&["why"], ports].concat());
        assert!(text.contains(&finding.text), "{situation}: {text}");
    }
}

#[test]
fn ports_that_carry_nothing_say_why() {
    let place = Place::new();
    let mut run = place.run(&["a", "b", "c,queue_size=128", "d"]);
    run.arg("--port").arg(format!("vhost-user:{},mode=connect", place.socket("nobody").display()));
    let switch = place.start(&mut run, Vec::new());
    let stops = |port: &str, situation: &str, sentence: &str| {
        expect(&place, &[port], situation, Effect::Stops, sentence);
    };
    stops("a", "not-connected", "No front end is connected to a, at ");
    stops("nobody", "connecting", "nobody.sock, where nobody listens.");

    let mut a = switch.plug("a", 1, Options::default());
    let mut b = switch.plug("b", 2, Options::default());
    acquaint(&mut [&mut a, &mut b]);
    place.ctl(&["link", "a", "down"]);
    stops("a", "taken-down", "Somebody has taken the link of a down.");
    expect(&place, &["b", "a"], "taken-down", Effect::Stops, "Somebody has taken the link of a down.");
    place.ctl(&["link", "a", "up"]);

    a.connection.set_enabled(1, false).unwrap();
    stops("a", "no-queue-runs", "No transmitq of a runs, so no packet passes from its guest.");
    a.connection.set_enabled(0, false).unwrap();
    stops("a", "driver-not-started", "The driver of the guest of a has not started the device.");
    a.connection.set_enabled(0, true).unwrap();
    a.connection.set_enabled(1, true).unwrap();
    converse(&mut a, &mut b, 1, 10);
    // As QEMU does for a guest that is paused.
    let bases = a.connection.stop().unwrap();
    stops("a", "rings-stopped", "The front end of a has stopped its rings ");
    a.start(&bases).unwrap();
    converse(&mut a, &mut b, 11, 10);

    // A ring that is larger than the port allows, then one that is not.
    let large = Guest::plug(switch.connect("c"), 3, Options::default());
    expect(
        &place,
        &["c"],
        "queue-refused",
        Effect::Loses,
        "A ring of c is not served: queue 0, a receiveq: it has 256 entries, and the port's queue_size allows 128",
    );
    drop(large);
    let small = switch.plug("c", 3, Options { rx: 128, ..Options::default() });
    expect(&place, &["c"], "reconnected", Effect::Notes, "Front ends have connected to c twice.");
    drop(small);

    let mut raw = Raw::plug(switch.connect("d"));
    switch.until_state("d", PortState::Up);
    raw.connection.frontend().set_mem_table(&[]).unwrap();
    stops(
        "d",
        "memory-not-shared",
        "The guest of d has started its device, and its VMM does not share the guest's memory.",
    );
    // The first ring is in that memory, and the second one is not.
    let small = RegionSpec { size: 0x1_0000, ..region() };
    raw.connection.frontend().set_mem_table(&[(small, raw.file.as_fd())]).unwrap();
    expect(&place, &["d"], "rings-failed-to-start", Effect::Notes, "A ring of d could not be started, ");
    drop(raw);

    std::fs::remove_file(place.socket("d")).unwrap();
    stops("d", "out-of-service", "the socket was removed");
    // To start a VM would not help.
    assert!(!place.ctl(&["why", "d"]).contains("No front end is connected"));
    switch.stop();
}

#[test]
fn a_trap_and_a_broken_ring_are_said() {
    let place = Place::new();
    let switch = place.switch(&["a", "b", "trap"]);
    let mut a = switch.plug("a", 1, Options::default());
    let mut b = switch.plug("b", 2, Options::default());
    let mut trap = switch.plug("trap", 3, Options::default());
    acquaint(&mut [&mut a, &mut b, &mut trap]);
    drop(b);
    trap.set_trap();
    a.send(&frame(trap.mac, a.mac, 60, 1));
    expect(&place, &["trap"], "out-of-service", Effect::Stops, "its call event blocks whoever signals it");
    drop(trap);

    let mut raw = Raw::plug(switch.connect("b"));
    raw.start();
    switch.until_state("b", PortState::Up);
    raw.set_index(1, 30_000);
    raw.kick(1);
    expect(
        &place,
        &["b"],
        "queue-broken",
        Effect::Loses,
        "The guest's driver has broken the rules of a ring of b: queue 1, a transmitq: ",
    );
    expect(
        &place,
        &["b"],
        "rings-broke",
        Effect::Notes,
        "Rings of b have broken once since the switch was started",
    );
    switch.stop();
}

#[test]
fn a_tap_that_is_down_says_so() {
    if !may("needs the program ip", program::installed("ip").is_some()) {
        return;
    }
    in_a_namespace(|| {
        let place = Place::new();
        let switch = place.start(place.run(&["a"]).args(["--port", "tap:rf0"]), Vec::new());
        let down = std::process::Command::new("ip").args(["link", "set", "rf0", "down"]).status().unwrap();
        assert!(down.success());
        expect(&place, &["rf0"], "interface-down", Effect::Stops, "The interface of rf0 (rf0) is down.");
        switch.process.until_logged("the interface rf0 is down");
        switch.stop();
    });
}

#[test]
fn a_tap_that_is_held_back_loses_at_the_host() {
    in_a_namespace(|| {
        let place = Place::new();
        let tap = "tap:rf0,address=10.0.0.1/24,rate_in=10kbit,rate_in_burst=72kib";
        let switch = place.start(place.run(&["a"]).args(["--port", tap]), Vec::new());
        let socket = std::net::UdpSocket::bind("10.0.0.1:0").unwrap();
        socket.set_broadcast(true).unwrap();
        let mut flood = || (0..50).for_each(|_| drop(socket.send_to(&[0; 1400], "10.0.0.255:9")));
        let sentence = "of the time because of rate_in=10kbit. What does not fit into the queue of rf0 meanwhile is dropped by the host";
        expect_while(&mut flood, &place, &["rf0"], "paused-by-rate-in", Effect::Loses, sentence);
        switch.stop();
    });
}

#[test]
fn a_port_that_is_held_back_and_drained_says_so() {
    let place = Place::new();
    let switch = place.switch(&["a,rate_in=10kbit,rate_in_burst=72kib", "b"]);
    let mut a = switch.plug("a", 1, Options::default());
    let mut b = switch.plug("b", 2, Options::default());
    acquaint(&mut [&mut a, &mut b]);
    // It has more in its ring than its rate lets out for a long time.
    let frame = frame(b.mac, a.mac, 1400, 1);
    let mut fill = || {
        a.pair.reclaim();
        while a.pair.send_frame(&Header::default(), &frame) {}
        a.flush();
    };
    let mut slows = |situation: &str, sentence: &str| {
        expect_while(&mut fill, &place, &["a"], situation, Effect::Slows, sentence);
    };
    slows("paused-by-rate-in", "of the time because of rate_in=10kbit.");
    slows(
        "transmit-ring-full",
        "The transmitq 1 of a is full at this moment: the guest waits for the switch.",
    );
    let control = place.control();
    let drain = Request::Remove { port: "a".to_owned(), if_exists: false, drain: Some(2), runtime: true };
    let drained = std::thread::spawn(move || control::call(&control, &drain));
    expect(&place, &["a"], "drained", Effect::Stops, "a is being drained, and is removed then.");
    drained.join().unwrap().unwrap();
    switch.stop();
}

/// Says that something has ended, however it has.
struct End<'d>(&'d AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Sends frames from `from` to `to` for as long as `test` takes; `to` does with them what `take` does, now and then.
fn under_load(
    switch: &Switch<'_>,
    from: &mut Guest,
    to: &mut Guest,
    take: fn(&mut Guest),
    test: impl FnOnce() + Send,
) {
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let _end = End(&done);
            test();
        });
        let frame = frame(to.mac, from.mac, 1400, 7);
        for burst in 1u32.. {
            if done.load(Ordering::Relaxed) {
                break;
            }
            for _ in 0..32 {
                from.put(&Header::default(), &frame);
            }
            from.flush();
            if burst.is_multiple_of(200) {
                take(to);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    });
    assert!(switch.show().workers[0].busy_nanoseconds > 0);
}

#[test]
fn sentences_are_broken_where_a_terminal_is_narrow() {
    let place = Place::new();
    let switch = place.switch(&["a"]);
    let mut why = ringferry();
    why.args(["ctl", "--control"]).arg(place.control()).args(["why", "a"]);
    let mut terminal = Terminal::start(&mut why, 48, 24);
    assert!(terminal.wait().success());
    let screen = terminal.until("all of it", |screen| screen.contains("write to the"));
    assert!(screen.contains("\n1. No front end is connected to a, at"), "{screen}");
    assert!(screen.contains("\n   What to do: Start the VM. If it runs,"), "{screen}");
    // A terminal breaks lines by itself, in the middle of words.
    let written = String::from_utf8(terminal.written()).unwrap();
    assert!(written.lines().filter(|line| !line.contains("/tmp/")).all(|line| line.len() <= 48), "{written}");
    switch.stop();
}

#[test]
fn a_guest_that_hangs_is_told_by_a_few_packets() {
    let place = Place::new();
    let switch = place.switch(&["a", "b"]);
    let (mut a, mut b) = bystanders(&switch);
    // It is looked at once a second, and is seen to take what comes.
    for number in 0..15 {
        std::thread::sleep(Duration::from_millis(200));
        a.send(&frame(b.mac, a.mac, 60, number));
        b.receive();
        b.sleep();
    }
    (0..3).for_each(|number| a.send(&frame(b.mac, a.mac, 60, number)));
    expect(&place, &["b"], "guest-stalled", Effect::Stops, "3 entries that the switch has used lie there");
    (0..3).for_each(|_| drop(b.receive()));
    b.sleep();
    let is_served = |port: &PortSnapshot| port.queues.iter().all(|queue| queue.stalled.is_none());
    switch.until("b", "takes packets", is_served);
    switch.stop();
}

#[test]
fn a_guest_without_buffers_and_the_worker_of_another_are_said() {
    let place = Place::new();
    let mut run = place.run(&["a", "b", "c,worker=1"]);
    let switch = place.start(run.args(["--workers", "2"]), Vec::new());
    let mut a = switch.plug("a", 1, Options::default());
    let mut b = switch.plug("b", 2, Options::default());
    let mut c = switch.plug("c", 3, Options::default());
    acquaint(&mut [&mut a, &mut b, &mut c]);
    // b takes what is in its ring far too late.
    let take_all = |b: &mut Guest| {
        b.pump();
        while b.take().is_some() {}
    };
    under_load(&switch, &mut a, &mut b, take_all, || {
        expect(
            &place,
            &["b"],
            "no-buffers-posted",
            Effect::Loses,
            "b has no buffer in its receiveq 0 at this moment",
        );
        expect(
            &place,
            &["b"],
            "drops-no-receive-buffers",
            Effect::Loses,
            "of the packets for b are dropped as `no-receive-buffers`",
        );
        expect(
            &place,
            &["b"],
            "out-of-buffers",
            Effect::Loses,
            " of the bursts for it, with a ring of 256. It ",
        );
        expect(
            &place,
            &["b", "c"],
            "different-workers",
            Effect::Slows,
            "b is served by worker 0 and c by worker 1",
        );
    });
    // Now it takes nothing out of it any more. That is why it has no buffers, so nothing else is said of them.
    under_load(
        &switch,
        &mut a,
        &mut b,
        |_| (),
        || {
            expect(
                &place,
                &["b"],
                "guest-stalled",
                Effect::Stops,
                "The guest of b has taken no packets from its receiveq 0 for ",
            );
            let text = place.ctl(&["why", "b"]);
            assert!(!text.contains("with a ring of") && !text.contains("at this moment"), "{text}");
            assert!(!text.contains("larger ring"), "{text}");
        },
    );
    assert!(place.ctl(&["show", "b"]).contains("stalled: its guest has taken nothing back for "));
    assert!(place.ctl(&["trace", "a", "b"]).contains("has taken nothing out of its ring for "));
    switch.process.until_logged("its guest has taken no packets for ");
    take_all(&mut b);
    let is_served = |port: &PortSnapshot| port.queues.iter().all(|queue| queue.stalled.is_none());
    switch.until("b", "takes packets", is_served);
    // Rates are there for whoever asks next, and in the snapshot.
    let Snapshot { ports, workers, clock_nanoseconds, .. } = switch.show();
    assert!(ports[0].rates.iter().any(|rates| rates.counter("rx_packets") > 0.0), "{:?}", ports[0].rates);
    assert_eq!(workers[0].load_over(10).unwrap().by_share()[0].0, "a");
    assert!(clock_nanoseconds > 0);
    let page = place.ctl(&["show", "b"]);
    assert!(
        page.contains("What to do: Some loss is normal") && page.contains("time without receive buffers"),
        "{page}"
    );
    switch.stop();
}

/// The commonest mistakes of all with QEMU, of which it says nothing.
#[test]
fn memory_that_the_switch_cannot_see_or_use_is_said() {
    let place = Place::new();
    let switch = place.switch(&["a", "b", "c"]);
    // What a guest writes to a copy the switch never sees: its rings stay as they were, in either layout.
    for ring in [Features::empty(), Features::RING_PACKED] {
        let features = (Features::DEVICE - Features::RING_PACKED) | ring;
        let mut b = switch.plug("b", 2, Options::default());
        let copy = switch.plug("a", 1, Options { posts: false, features, ..Options::default() });
        switch.until_state("a", PortState::Up);
        b.send(&frame(Mac::BROADCAST, b.mac, 60, 1));
        expect(
            &place,
            &["a"],
            "memory-not-seen",
            Effect::Stops,
            "The guest of a has never posted a buffer nor sent a packet since its rings were started",
        );
        let text = place.ctl(&["why", "a"]);
        assert!(text.contains("share=on") && !text.contains("at this moment"), "{text}");
        drop((copy, b));
        switch.until_state("a", PortState::Listening);
    }

    // A file on a disk, whose pages the kernel may write back while a guest changes them.
    let disk = std::fs::File::open(std::env::current_exe().unwrap()).unwrap();
    let mut raw = Raw::plug(switch.connect("c"));
    raw.connection.frontend().set_mem_table(&[]).unwrap();
    let refused = raw.connection.frontend().set_mem_table(&[(region(), disk.as_fd())]);
    assert!(refused.is_err());
    expect(
        &place,
        &["c"],
        "out-of-service",
        Effect::Stops,
        "c serves nobody: the memory that the front end shares cannot be used: guest memory must be a memfd or a file on tmpfs or hugetlbfs",
    );
    let text = place.ctl(&["why", "c"]);
    assert!(!text.contains("has not started the device") && !text.contains("does not share"), "{text}");
    raw.connection.frontend().set_mem_table(&[(region(), raw.file.as_fd())]).unwrap();
    switch.until("c", "has no fault", |port| port.fault.is_none());
    // Also of a guest that has shared some memory before, and no ring of which has run.
    let file = raw.file.try_clone().unwrap();
    drop(raw);
    switch.until_state("c", PortState::Listening);
    let wanted = Wanted { features: Features::VERSION_1.bits(), required: 0, protocol: Wanted::NET_PROTOCOL };
    let mut connection = connect_device(switch.connect("c"), &wanted).unwrap();
    connection.frontend().set_timeout(PATIENCE);
    connection.frontend().set_mem_table(&[(region(), file.as_fd())]).unwrap();
    assert!(connection.frontend().set_mem_table(&[(region(), disk.as_fd())]).is_err());
    let said = "c serves nobody: the memory that the front end shares cannot be used";
    expect(&place, &["c"], "out-of-service", Effect::Stops, said);
    // Who looks for the port with a problem finds it.
    let all = place.ctl(&["why"]);
    assert!(all.starts_with("3 ports, measured over") && all.contains(&format!("\nc: {said}")), "{all}");
    assert!(all.contains("\n2 wait for their guests: a, b.\n"), "{all}");
    assert_described(&["ctl", "why", "--json"], &place.ctl(&["why", "--json"]));
    switch.stop();
}

#[test]
fn what_a_front_end_does_wrong_is_remembered() {
    let place = Place::new();
    let switch = place.switch(&["a", "b"]);
    // Whoever says nothing is no guest that boots.
    let silent: Stream = switch.connect("b");
    let me = format!("process {} of user {}", std::process::id(), rustix::process::getuid().as_raw());
    let said = format!("A front end has connected to b, {me}, and has sent no message.");
    expect(&place, &["b"], "front-end-silent", Effect::Stops, &said);
    assert!(place.ctl(&["show", "b"]).contains(&format!("front end: {me}, which has sent nothing yet\n")));
    drop(silent);
    switch.until_state("b", PortState::Listening);
    let villain: Stream = switch.connect("a");
    // A message of a number that nobody has.
    villain.send(&[0xff, 0xff, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0], &[]).unwrap();
    expect(
        &place,
        &["a"],
        "messages-rejected",
        Effect::Notes,
        "The switch has refused 1 of the messages of the front end of a.",
    );
    drop(villain);
    // What speaks another protocol is not a VM that has not been started.
    let stranger: Stream = switch.connect("a");
    stranger.send(b"GET / HTTP/1.1\r\n\r\n", &[]).unwrap();
    expect(
        &place,
        &["a"],
        "connection-ended",
        Effect::Stops,
        "The switch has ended the connection of the last front end of a, ",
    );
    assert!(!place.ctl(&["why", "a"]).contains("No front end is connected"));
    assert!(place.ctl(&["show", "a"]).contains("the switch ended the last connection "));
    drop(stranger);
    // Nor is it why nobody is there once a front end that knows the protocol has come and gone.
    let hello = [1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0];
    let say_hello = || {
        let proper: Stream = switch.connect("a");
        proper.send(&hello, &[]).unwrap();
        assert_eq!(proper.recv(&mut [0; 64], &mut Vec::new()).unwrap().bytes, 20);
    };
    say_hello();
    expect(&place, &["a"], "not-connected", Effect::Stops, "No front end is connected to a");
    // One that comes again and again is told of as one that does.
    let said = "Front ends have connected to a ";
    expect_while(&mut || say_hello(), &place, &["a"], "connects-again-and-again", Effect::Stops, said);
    let all = place.ctl(&["why"]);
    assert!(all.contains("\na: Front ends have connected to a "), "{all}");
    assert!(switch.process.log().iter().any(|line| {
        line.contains(&format!("a front end has connected port=\"a\" pid={}", std::process::id()))
    }));
    let mut raw = Raw::plug(switch.connect("b"));
    raw.post(raw::ENTRIES);
    switch.until_state("b", PortState::Up);
    expect(&place, &["b"], "no-address", Effect::Notes, "No MAC address is known behind b");
    let shown = place.ctl(&["show", "b"]);
    assert!(shown.contains(&format!("front end: {me}, ")) && shown.contains(" mapped\n"), "{shown}");
    // Kicks, and nothing behind them.
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let _end = End(&done);
            expect(&place, &["b"], "kicks-without-packets", Effect::Notes, "The guest of b kicks ");
        });
        while !done.load(Ordering::Relaxed) {
            raw.kick(1);
            std::thread::sleep(Duration::from_millis(5));
        }
    });
    switch.stop();
}
