//! Wires between two ports: everything passes, byte for byte, to the other end alone; impairments, changed while frames are under way and read again from the file; and
//! a wire that another process goes on with.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use ringferry_control::snapshot::PortState;
use ringferry_control::wire::{WireDirection, Wires};
use ringferry_packet::ether::Mac;
use ringferry_packet::vnet::Header;
use ringferry_rig::frames::{frame, tagged};
use ringferry_rig::front::{Front, wanted};
use ringferry_rig::guest::{Guest, Options, acquaint};
use ringferry_rig::process::{in_a_namespace, may};
use ringferry_rig::switch::{Place, Switch, ringferry};
use ringferry_sys::{namespace, netif, program};
use ringferry_virtio_net::Features;
use ringferry_virtio_net::driver::{Pair, PairConfig};

use crate::replace::replace;

/// A configuration file with three guests, of which `a` and `b` are joined by a wire with these settings.
fn write_file(place: &Place, settings: &str) -> PathBuf {
    let path = place.path().join("switch.toml");
    let port = |name: &str| format!("[[port]]\nkind = 'vhost-user'\nsocket = {:?}\n", place.socket(name));
    let text = format!(
        "control = {:?}\n{}{}{}\n# The cable.\n[[wire]]\nname = 'w'\nports = ['a', 'b']\n{settings}",
        place.control(),
        port("a"),
        port("b"),
        port("c"),
    );
    std::fs::write(&path, text).unwrap();
    path
}

fn run_file(path: &PathBuf) -> Command {
    let mut command = ringferry();
    command.arg("run").arg(path);
    command
}

fn start<'a>(place: &'a Place, settings: &str) -> (Switch<'a>, [Guest; 3]) {
    let path = write_file(place, settings);
    let switch = place.start(&mut run_file(&path), Vec::new());
    let guests =
        [("a", 1), ("b", 2), ("c", 3)].map(|(port, number)| switch.plug(port, number, Options::default()));
    (switch, guests)
}

/// Returns what `ringferry ctl wire show w --json` says of the direction to `b`.
fn to_b(place: &Place) -> WireDirection {
    let text = place.ctl(&["wire", "show", "w", "--json"]);
    let Wires { wires } = serde_json::from_str(&text).unwrap();
    wires[0].directions[0].clone()
}

/// A frame to this address, of this type, with this behind it.
fn of_type(to: [u8; 6], from: Mac, rest: &[u8]) -> Vec<u8> {
    let mut frame = [&to[..], &from.0, rest].concat();
    frame.resize(60, 0x33);
    frame
}

/// What no switch forwards, changes or does not know: LACP, spanning tree, PAUSE, LLDP, two tags, a priority tag before another one, the reserved VLAN, and a type that nobody
/// has.
fn strange(from: Mac) -> Vec<Vec<u8>> {
    let reserved = |last| [0x01, 0x80, 0xc2, 0, 0, last];
    vec![
        of_type(reserved(2), from, &[0x88, 0x09, 1, 1]),
        of_type(reserved(0), from, &[0, 38, 0x42, 0x42, 3]),
        of_type(reserved(1), from, &[0x88, 0x08, 0, 1, 0xff, 0xff]),
        of_type(reserved(14), from, &[0x88, 0xcc, 2, 7]),
        of_type([2, 9, 9, 9, 9, 9], from, &[0x88, 0xa8, 0, 100, 0x81, 0, 0, 200, 8, 0]),
        of_type([0xff; 6], from, &[0x81, 0, 0xe0, 0, 0x81, 0, 0, 200, 8, 0]),
        of_type([0xff; 6], from, &[0x81, 0, 0x0f, 0xff, 8, 0]),
        of_type([2, 9, 9, 9, 9, 9], from, &[0xfe, 0xdc]),
        tagged(&frame(Mac::BROADCAST, from, 1514, 7), 100),
    ]
}

#[test]
fn everything_passes_a_wire_byte_for_byte_and_nobody_else_sees_it() {
    let place = Place::new();
    let (switch, [mut a, mut b, mut c]) = start(&place, "");
    for settings in [None, Some("delay=2ms")] {
        if let Some(settings) = settings {
            place.ctl(&["wire", "set", "w", settings]);
        }
        for frame in strange(a.mac) {
            a.send(&frame);
            assert_eq!(b.receive_plain(), frame);
        }
        for frame in strange(b.mac) {
            b.send(&frame);
            assert_eq!(a.receive_plain(), frame);
        }
        // What the third sends to everybody reaches neither.
        c.send(&frame(Mac::BROADCAST, c.mac, 60, 1));
        switch.until("c", "it has sent", |port| port.counters["rx_packets"] > 0);
    }
    for port in ["a", "b"] {
        assert_eq!(switch.port(port).drops.values().sum::<u64>(), 0, "{port}");
    }
    assert_eq!(switch.port("c").counters["tx_packets"], 0);
    let way = to_b(&place);
    assert_eq!((way.from.as_str(), way.to.as_str(), way.joined), ("a", "b", true));
    assert_eq!(way.passed, 2 * strange(a.mac).len() as u64);
    // What it is is said wherever somebody asks.
    let why = place.ctl(&["why", "a"]);
    assert!(why.contains("a is an end of the wire w: it exchanges frames with b alone"), "{why}");
    let trace = place.ctl(&["trace", "a", "b"]);
    assert!(trace.contains("a is an end of the wire w: all that it sends goes to b, as it is."), "{trace}");
    assert!(trace.contains("On the wire w it meets delay=2ms."), "{trace}");
    assert!(place.ctl(&["show"]).contains("wire w: a and b (ringferry ctl wire)\n"));
    assert!(place.ctl(&["show", "b"]).contains("wire w: a and b"));
    assert!(!place.ctl(&["show", "c"]).contains("wire w"));
    let explained = place.ctl(&["explain", "a"]);
    assert!(explained.contains("the wire w, with delay=2ms: everything passes as it is"), "{explained}");
    assert!(explained.contains("a is an end of the wire w, with b at the other"), "{explained}");
    switch.stop();
}

/// Whoever looks at one end is told of the other one, of which nobody is there.
#[test]
fn who_asks_for_one_end_hears_that_the_other_takes_nothing() {
    let place = Place::new();
    let (switch, [_a, b, _c]) = start(&place, "");
    assert_eq!(to_b(&place).to_state, Some(PortState::Up));
    drop(b);
    switch.until("b", "its guest has gone", |port| port.state == PortState::Listening);
    assert_eq!(to_b(&place).to_state, Some(PortState::Listening));
    let shown = place.ctl(&["wire"]);
    assert!(
        shown.contains("nothing reaches b, which is listening: `ringferry ctl why b` says why"),
        "{shown}"
    );
    let why = place.ctl(&["why", "a"]);
    assert!(
        why.contains("a is an end of the wire w, and nothing passes, as b at the other is listening."),
        "{why}"
    );
}

#[test]
fn impairments_change_while_frames_are_under_way_and_are_kept_in_the_file() {
    let place = Place::new();
    let (switch, [mut a, mut b, _c]) = start(&place, "delay = '60s' # to the moon and back\nseed = 42\n");
    let path = place.path().join("switch.toml");
    a.send(&frame(b.mac, a.mac, 100, 1));
    switch.until("a", "it has sent", |port| port.counters["rx_packets"] == 1);
    assert_eq!(to_b(&place).waiting, 1);
    // The first is under way for a minute; those that come now overtake it.
    let answer = place.ctl(&["wire", "set", "a", "delay=1ms"]);
    let kept = format!("kept: in {}\n", path.display());
    assert_eq!(answer, format!("w: seed 42\n  a to b: delay=1ms\n  b to a: delay=1ms\n{kept}"));
    a.send(&frame(b.mac, a.mac, 100, 2));
    assert_eq!(b.receive_plain(), frame(b.mac, a.mac, 100, 2));
    assert_eq!(to_b(&place).waiting, 1);
    let text = std::fs::read_to_string(&path).unwrap();
    assert!(
        text.contains("# The cable.\n[[wire]]\n")
            && text.contains("delay = \"1ms\" # to the moon and back\n"),
        "{text}"
    );

    // One direction loses everything, and says so.
    place.ctl(&["wire", "set", "w", "loss=100%", "--from", "a", "--runtime"]);
    let trace = place.ctl(&["trace", "a", "b"]);
    assert!(trace.contains("The wire w loses all that it carries to b (loss=100%)."), "{trace}");
    assert!(!place.ctl(&["trace", "b", "a"]).contains("loses all"));
    assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
    a.send(&frame(b.mac, a.mac, 100, 3));
    b.send(&frame(a.mac, b.mac, 100, 4));
    assert_eq!(a.receive_plain(), frame(a.mac, b.mac, 100, 4));
    switch.until("b", "it is lost", |port| port.drops["wire-loss"] == 1);
    assert_eq!(to_b(&place).lost, 1);

    // The file is read again, and has not lost anything.
    let reload = place.ctl(&["reload"]);
    assert!(reload.contains("~ wire w: loss from a \"100%\" -> unset\n"), "{reload}");
    a.send(&frame(b.mac, a.mac, 100, 5));
    assert_eq!(b.receive_plain(), frame(b.mac, a.mac, 100, 5));
    std::fs::write(&path, text.replace("1ms", "quick")).unwrap();
    let error = place.refused_in_a_line(&["reload"]);
    assert!(error.contains("wire.delay: \"quick\" is not a number with one of the units"), "{error}");
    std::fs::write(&path, &text).unwrap();
    a.send(&frame(b.mac, a.mac, 100, 6));
    assert_eq!(b.receive_plain(), frame(b.mac, a.mac, 100, 6), "the old settings are in force");

    // The wire is taken out: what was under way arrives, and the ports are as others are.
    let answer = place.ctl(&["wire", "remove", "w"]);
    assert_eq!(answer, format!("w removed\nthe removal is {kept}"));
    assert_eq!(b.receive_plain(), frame(b.mac, a.mac, 100, 1));
    assert!(!std::fs::read_to_string(&path).unwrap().contains("wire"));
    acquaint(&mut [&mut a, &mut b]);
    let answer = place.ctl(&["wire", "add", "a", "b", "delay=1ms", "loss=0.5%", "--name", "again"]);
    assert!(
        answer.starts_with("again: seed ") && answer.contains("  a to b: delay=1ms loss=0.5%\n"),
        "{answer}"
    );
    let text = std::fs::read_to_string(&path).unwrap();
    assert!(
        text.ends_with(
            "[[wire]]\nname = \"again\"\nports = [\"a\", \"b\"]\ndelay = \"1ms\"\nloss = \"0.5%\"\n"
        ),
        "{text}"
    );
    switch.stop();
    let switch = place.start(&mut run_file(&path), Vec::new());
    assert!(place.ctl(&["wire"]).contains("a to b: delay=1ms loss=0.5%"));
    switch.stop();
}

#[test]
fn what_cannot_be_is_refused_in_a_line_and_changes_nothing() {
    let place = Place::new();
    let (switch, _guests) = start(&place, "delay = '1ms'\n");
    for (words, said) in [
        (
            &["wire", "set", "w", "delay=fast"][..],
            "delay: \"fast\" is not a number with one of the units s, ms, us, ns",
        ),
        (&["wire", "set", "w", "loss=2"], "loss: \"2\" is not a share such as \"0.1%\""),
        (&["wire", "set", "w", "gap=3"], "gap: needs reorder"),
        (&["wire", "set", "w", "speed=3"], "speed: is not a key of a wire that can be set"),
        (&["wire", "set", "v", "delay=1ms"], "there is no wire \"v\"; the wires are: w"),
        (
            &["wire", "set", "w", "delay=1ms", "--from", "c"],
            "\"c\" is no end of the wire \"w\", which joins a and b",
        ),
        (&["wire", "add", "a", "c"], "\"a\" is an end of the wire \"w\" already"),
        (&["wire", "add", "c", "d"], "there is no port \"d\""),
        (&["wire", "add", "c", "c"], "\"c\" is an end of the wire \"c--c\" already"),
        (&["set", "a", "vlan=10"], "port a has vlan, which an end of the wire w cannot have"),
        (&["set", "b", "rate_out=1gbit"], "port b has rate_out, which an end of the wire w cannot have"),
        (&["remove", "a"], "a is an end of the wire w: take that out first (`ringferry ctl wire remove w`)"),
        (&["remove", "a", "--drain"], "a is an end of the wire w"),
    ] {
        let text = place.refused_in_a_line(words);
        assert!(text.contains(said), "{words:?}: {text}");
    }
    assert_eq!(to_b(&place).impairments["delay"], "1ms");
    switch.stop();
    // What a start makes of the same.
    let path = write_file(&place, "loss = 'sometimes'\n");
    let output = run_file(&path).output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success());
    let said = "wire.loss: \"sometimes\" is not a share such as \"0.1%\"";
    assert!(text.contains(said) && text.lines().count() == 1, "{text}");
}

/// Another process goes on with the frames that are under way and with the chance of the wire; frames of the time between wait in their rings.
#[test]
fn frames_on_a_wire_survive_a_replacement() {
    let place = Place::new();
    let (mut old, [mut a, mut b, _c]) = start(&place, "delay = '700ms'\nloss = '30%'\n");
    let seed = |place: &Place| {
        let text = place.ctl(&["wire", "--json"]);
        serde_json::from_str::<Wires>(&text).unwrap().wires[0].seed
    };
    let drawn = seed(&place);
    for number in 0..100 {
        a.send(&frame(b.mac, a.mac, 100, number));
    }
    old.until("a", "all are taken", |port| port.counters["rx_packets"] == 100);
    let before = to_b(&place);
    assert!(before.lost > 5, "{before:?}");
    let switch = place.start(&mut replace(&place), Vec::new());
    let (status, _) = old.process.wait();
    assert!(status.success(), "{status}: {:#?}", old.process.log());
    let mut numbers = Vec::new();
    for _ in 0..100 - before.lost {
        numbers.push(ringferry_rig::frames::number(&b.receive_plain()));
    }
    assert!(numbers.is_sorted() && numbers.len() as u64 == 100 - before.lost, "{numbers:?}");
    let after = to_b(&place);
    assert_eq!((after.lost, after.passed, after.waiting), (before.lost, 100 - before.lost, 0));
    assert_eq!(seed(&place), drawn);
    switch.stop();
}

/// TCP of two kernels over two taps, in namespaces of their own.
#[test]
fn kernels_speak_tcp_over_a_wire_with_a_delay() {
    in_a_namespace(|| {
        if !may("needs the program ip", program::installed("ip").is_some()) {
            return;
        }
        let place = Place::new();
        let path = place.path().join("switch.toml");
        let text = format!(
            "control = {:?}\n[[port]]\nkind = 'tap'\ntap = 'rf0'\n[[port]]\nkind = 'tap'\ntap = 'rf1'\n\
             [[wire]]\nports = ['rf0', 'rf1']\ndelay = '25ms'\n",
            place.control()
        );
        std::fs::write(&path, text).unwrap();
        let switch = place.start(&mut run_file(&path), Vec::new());
        netif::add_address("rf0", [10, 9, 0, 1].into(), 24).unwrap();
        netif::set_up("rf0", true).unwrap();
        // The other kernel is a thread in another namespace, which the tap is moved to.
        let (tell, told) = std::sync::mpsc::channel();
        let (begin, begun) = std::sync::mpsc::channel();
        let other = std::thread::spawn(move || {
            namespace::unshare_net().unwrap();
            tell.send(rustix::thread::gettid().as_raw_nonzero()).unwrap();
            begun.recv().unwrap();
            netif::add_address("rf1", [10, 9, 0, 2].into(), 24).unwrap();
            netif::set_up("rf1", true).unwrap();
            let listener = TcpListener::bind("10.9.0.2:9").unwrap();
            tell.send(rustix::thread::gettid().as_raw_nonzero()).unwrap();
            let (mut stream, _) = listener.accept().unwrap();
            let mut all = Vec::new();
            stream.read_to_end(&mut all).unwrap();
            stream.write_all(&(all.len() as u64).to_be_bytes()).unwrap();
            all
        });
        let thread = told.recv().unwrap();
        let moved = Command::new("ip").args(["link", "set", "rf1", "netns", &thread.to_string()]).status();
        assert!(moved.unwrap().success());
        begin.send(()).unwrap();
        told.recv().unwrap();
        let sent: Vec<u8> = (0..3_000_000u32).map(|byte| (byte * 7 / 3) as u8).collect();
        let since = Instant::now();
        let mut stream = TcpStream::connect("10.9.0.2:9").unwrap();
        // ARP and the handshake: two times there and back.
        let took = since.elapsed();
        assert!(took >= Duration::from_millis(2 * 50), "{took:?}");
        stream.write_all(&sent).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let mut count = [0; 8];
        stream.read_exact(&mut count).unwrap();
        assert_eq!(u64::from_be_bytes(count), sent.len() as u64);
        assert!(other.join().unwrap() == sent, "it arrives as it was");
        switch.until_state("rf0", PortState::Up);
        let [there, back] = ["rf1", "rf0"].map(|port| switch.port(port).counters["tx_packets"]);
        assert!(there > 2_000 && back > 100, "packet by packet: {there} and {back}");
        switch.stop();
    });
}

/// Frames a second in both directions together while the accuracy is measured, for how long, and the delay.
const RATE: u64 = 1_000_000;
const TIME: Duration = Duration::from_secs(5);
const DELAY: Duration = Duration::from_millis(10);

/// A guest that polls, with what it has sent.
struct End {
    front: Front,
    frame: Vec<u8>,
    sent: u64,
}

impl End {
    fn start(switch: &Switch<'_>, port: &str) -> End {
        let config = PairConfig { receive: 1024, transmit: 1024, ..PairConfig::default() };
        let features = Features::VERSION_1 | Features::MRG_RXBUF;
        let front =
            Front::start(switch.connect(port), &wanted(features, Features::VERSION_1), &config).unwrap();
        End { front, frame: frame(Mac::BROADCAST, Mac([2, 0, 0, 0, 0, 1]), 60, 0), sent: 0 }
    }

    /// Sends what is due, up to a burst, each frame with the time.
    fn send(&mut self, due: u64, since: Instant) {
        let Pair { transmitq, pools, .. } = &mut self.front.pair;
        transmitq.make_room(32, pools);
        self.frame[14..22].copy_from_slice(&(since.elapsed().as_nanos() as u64).to_be_bytes());
        for _ in self.sent..due.min(self.sent + 32) {
            if !self.front.pair.send_frame(&Header::default(), &self.frame) {
                break;
            }
            self.sent += 1;
        }
        self.front.publish();
    }

    /// Takes what has come, and notes how long each frame was on its way.
    fn receive(&mut self, since: Instant, took: &mut Vec<u64>) {
        let Pair { receiveq, pools, .. } = &mut self.front.pair;
        receiveq.lend(64, pools, |packet, _| {
            let mut first = [0; 22];
            packet.prefix(&mut first);
            let sent = u64::from_be_bytes(first[14..22].try_into().unwrap());
            took.push((since.elapsed().as_nanos() as u64).saturating_sub(sent));
            Some(packet)
        });
        self.front.top_up();
    }
}

/// How late frames leave a wire, as the switch counts it and as its guests see it. The guests poll on one processor, the worker on another.
#[test]
#[ignore = "prints figures, and checks nothing"]
fn accuracy() {
    for rate in [1_000, 10_000, 100_000, RATE] {
        let place = Place::new();
        let mut command = place.run(&["a", "b"]);
        let switch = place.start(command.args(["--workers", "1"]), Vec::new());
        let mut ends = ["a", "b"].map(|port| End::start(&switch, port));
        place.ctl(&["wire", "add", "a", "b", &format!("delay={}ms", DELAY.as_millis())]);
        let (since, mut took) = (Instant::now(), Vec::new());
        loop {
            let now = since.elapsed();
            if now > TIME + 10 * DELAY {
                break;
            }
            let due = now.min(TIME).as_nanos() as u64 * rate / 2 / 1_000_000_000;
            for end in &mut ends {
                end.send(due, since);
                end.receive(since, &mut took);
            }
        }
        let text = place.ctl(&["wire", "--json"]);
        let Wires { wires } = serde_json::from_str(&text).unwrap();
        println!("{rate} frames a second, both directions together, {:?} each:", DELAY);
        for way in &wires[0].directions {
            let at_most = [0.5, 0.99, 0.999].map(|share| way.late.quantile(share));
            let shown =
                at_most.map(|bound| bound.map_or_else(|| "more".to_owned(), |bound| format!("{bound} µs")));
            let within: u64 = way
                .late
                .buckets
                .iter()
                .filter(|bucket| bucket.at_most_microseconds.is_some_and(|bound| bound <= 50))
                .map(|bucket| bucket.frames)
                .sum();
            let share = 100.0 * within as f64 / way.passed.max(1) as f64;
            println!(
                "  the switch, {} to {}: {} frames, late by at most {} (50 %), {} (99 %), {} (99.9 %), {} µs (all); {share:.3} % within 50 µs",
                way.from, way.to, way.passed, shown[0], shown[1], shown[2], way.late.max_microseconds
            );
        }
        took.sort_unstable();
        let at = |share: f64| {
            took[((took.len() - 1) as f64 * share) as usize].saturating_sub(DELAY.as_nanos() as u64) / 1000
        };
        let sent: u64 = ends.iter().map(|end| end.sent).sum();
        println!(
            "  the guests: {} of {sent} frames, above the delay by {} µs (50 %), {} µs (99 %), {} µs (99.9 %), {} µs (all)",
            took.len(),
            at(0.5),
            at(0.99),
            at(0.999),
            at(1.0)
        );
        drop(ends);
        switch.stop();
    }
}
