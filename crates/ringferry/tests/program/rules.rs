//! Rules of ports: changed on a running switch, kept in its configuration file or said not to be, and obeyed.

use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use ringferry_packet::ether::Mac;
use ringferry_packet::vnet::Header;
use ringferry_rig::domu::{Machine, small};
use ringferry_rig::frames::{frame, mac, pattern, tagged, tcp};
use ringferry_rig::guest::{Guest, Options, acquaint, converse};
use ringferry_rig::process::{Process, may};
use ringferry_rig::switch::{Place, Switch, ringferry};
use ringferry_sys::process::{Spawn, is_root};
use ringferry_xen::domain::DomId;

/// A configuration file with two ports, the second with rules.
fn write_file(place: &Place) -> PathBuf {
    let path = place.path().join("switch.toml");
    let text = format!(
        "\
# Rack 7.
control = {control:?}

[[port]]  # the first
kind = 'vhost-user'
socket = {a:?}

# Of a tenant.
[[port]]
kind = 'vhost-user'
socket = {b:?}
vlan = 10      # agreed on
# Twice what they asked for.
rate_in = '1gbit'
",
        control = place.control(),
        a = place.socket("a"),
        b = place.socket("b"),
    );
    std::fs::write(&path, text).unwrap();
    path
}

fn run_file(path: &PathBuf) -> Command {
    let mut command = ringferry();
    command.arg("run").arg(path);
    command
}

fn text(path: &PathBuf) -> String {
    std::fs::read_to_string(path).unwrap()
}

/// Returns the message of `ringferry ctl` for a request that is refused.
#[track_caller]
fn refused(place: &Place, words: &[&str]) -> String {
    let output = ringferry().arg("ctl").arg("--control").arg(place.control()).args(words).output().unwrap();
    assert!(!output.status.success() && output.stdout.is_empty(), "{words:?} was carried out");
    String::from_utf8(output.stderr).unwrap()
}

fn rules_in_force(switch: &Switch<'_>, port: &str) -> serde_json::Value {
    serde_json::to_value(switch.port(port).rules).unwrap()
}

#[test]
fn changed_rules_are_in_force_at_once_and_after_a_restart() {
    let place = Place::new();
    let path = write_file(&place);
    let before = text(&path);
    let switch = place.start(&mut run_file(&path), Vec::new());
    assert_eq!(rules_in_force(&switch, "a"), serde_json::json!({}));
    assert_eq!(rules_in_force(&switch, "b"), serde_json::json!({"vlan": 10, "rate_in": "1gbit"}));

    let answer = place.ctl(&["set", "b", "vlan=20", "isolated=on", "allowed_macs=52:54:00:00:00:02"]);
    let rules = "  allowed_macs=52:54:00:00:00:02\n  isolated=true\n  rate_in=1gbit\n  vlan=20\n";
    assert_eq!(answer, format!("rules of b:\n{rules}kept: in {}\n", path.display()));
    let after = before.replace("vlan = 10      #", "vlan = 20      #")
        + "isolated = true\nallowed_macs = [\"52:54:00:00:00:02\"]\n";
    assert_eq!(text(&path), after, "only these keys have changed");
    assert_eq!(place.ctl(&["rules", "b"]), format!("rules of b:\n{rules}"));
    assert_eq!(place.ctl(&["rules", "a"]), "a has no rules\n");
    let in_force = serde_json::json!({
        "vlan": 20, "rate_in": "1gbit", "isolated": true, "allowed_macs": ["52:54:00:00:00:02"]
    });
    assert_eq!(rules_in_force(&switch, "b"), in_force);
    let json: serde_json::Value = serde_json::from_str(&place.ctl(&["rules", "b", "--json"])).unwrap();
    assert_eq!(json, serde_json::json!({"port": "b", "rules": in_force}));
    let shown = "  rules: allowed_macs=52:54:00:00:00:02 isolated=true rate_in=1gbit vlan=20\n";
    assert!(place.ctl(&["show"]).contains(shown));
    assert!(place.ctl(&["dump"]).contains("vlan = 20\nisolated = true\n"));

    // What is changed for the moment is gone with it.
    let answer = place.ctl(&["unset", "b", "rate_in", "--runtime"]);
    assert!(
        answer
            .ends_with("not kept when the switch ends: a change of the running switch alone was asked for\n")
    );
    assert_eq!(text(&path), after);
    assert!(!place.ctl(&["dump"]).contains("rate_in"));
    switch.stop();
    let switch = place.start(&mut run_file(&path), Vec::new());
    assert_eq!(rules_in_force(&switch, "b"), in_force);

    place.ctl(&["unset", "b", "rate_in", "vlan"]);
    let kept = text(&path);
    assert!(kept.contains("# Twice what they asked for.\n") && !kept.contains("rate_in"), "{kept}");
    switch.stop();
    let switch = place.start(&mut run_file(&path), Vec::new());
    let rules = serde_json::json!({"isolated": true, "allowed_macs": ["52:54:00:00:00:02"]});
    assert_eq!(rules_in_force(&switch, "b"), rules);
    switch.stop();
}

/// A guest in quarantine has all that it sends go to the port that it is left with, whoever it is for, over a restart, too; and it hears that port alone.
#[test]
fn a_guest_in_quarantine_reaches_one_port_alone_until_it_is_released() {
    let place = Place::new();
    let path = write_file(&place);
    let (socket, kept) = (place.socket("c"), format!("kept: in {}\n", path.display()));
    std::fs::write(&path, text(&path).replace("vlan = 10", "max_macs = 9")).unwrap();
    let start = || {
        let switch = place.start(&mut run_file(&path), Vec::new());
        let plug = |name, number| Guest::plug(switch.connect(name), number, Options::default());
        let guests = [plug("a", 1), plug("b", 2)];
        (switch, guests)
    };
    let (switch, [mut a, mut b]) = start();
    place.ctl(&["add", &format!("vhost-user:{}", socket.display())]);
    let mut c = Guest::plug(switch.connect("c"), 3, Options::default());
    acquaint(&mut [&mut a, &mut b, &mut c]);

    let answer = place.ctl(&["quarantine", "a", "c"]);
    assert_eq!(answer, format!("rules of a:\n  quarantine=c\n{kept}"));
    let cut_off = |switch: &Switch<'_>, a: &mut Guest, b: &mut Guest, c: &mut Guest, first: u32| {
        let dropped = switch.port("a").drops["quarantine"];
        a.send(&frame(b.mac, a.mac, 64, first));
        a.send(&frame(Mac::BROADCAST, a.mac, 64, first + 1));
        b.send(&frame(a.mac, b.mac, 64, first + 2));
        c.send(&frame(a.mac, c.mac, 64, first + 3));
        assert_eq!(a.receive_plain(), frame(a.mac, c.mac, 64, first + 3));
        assert_eq!(c.receive_plain(), frame(b.mac, a.mac, 64, first));
        assert_eq!(c.receive_plain(), frame(Mac::BROADCAST, a.mac, 64, first + 1));
        // Another worker may be the one that drops it.
        switch.until("a", "the other is not heard", |port| port.drops["quarantine"] == dropped + 1);
        // Nothing of that has reached the other one.
        converse(b, c, first + 10, 5);
    };
    cut_off(&switch, &mut a, &mut b, &mut c, 100);
    let why = place.ctl(&["why", "a"]);
    assert!(why.contains("a is in quarantine: it exchanges frames with c alone"), "{why}");
    let trace = place.ctl(&["trace", "a", "b"]);
    assert!(trace.contains("a is in quarantine: all that it sends goes to c."), "{trace}");
    switch.stop();
    drop((a, b, c));

    let (switch, [mut a, mut b]) = start();
    let mut c = Guest::plug(switch.connect("c"), 3, Options::default());
    acquaint(&mut [&mut b, &mut c]);
    // It has heard the one of the two that it may.
    assert_eq!(a.receive_plain()[..12], [Mac::BROADCAST.0, c.mac.0].concat());
    // The port that it is left with hears it, and so the switch knows where both are.
    a.send(&frame(c.mac, a.mac, 64, 1));
    assert_eq!(c.receive_plain(), frame(c.mac, a.mac, 64, 1));
    cut_off(&switch, &mut a, &mut b, &mut c, 200);

    // Nobody is left.
    place.ctl(&["remove", "c"]);
    let why = place.ctl(&["why", "a"]);
    assert!(why.contains("a is in quarantine: nothing passes, as there is no c"), "{why}");
    let dropped = switch.port("a").drops["quarantine"];
    a.send(&frame(b.mac, a.mac, 64, 2));
    switch.until("a", "nothing passes", |port| port.drops["quarantine"] == dropped + 1);

    assert_eq!(place.ctl(&["release", "a"]), format!("a has no rules\n{kept}"));
    converse(&mut a, &mut b, 300, 5);
    let answer = refused(&place, &["quarantine", "a", "a"]);
    assert!(answer.contains("a is the port that is to be cut off"), "{answer}");
    let answer = refused(&place, &["quarantine", "a", "nobody", "--runtime"]);
    assert!(
        answer.contains(r#"there is no port "nobody" in the configuration; the ports are: a, b"#),
        "{answer}"
    );
    let answer = place.ctl(&["set", "a", "quarantine=nobody", "--runtime"]);
    let note = "note: port a is in quarantine with nobody, and there is no such port: nothing passes\n";
    assert!(answer.ends_with(note), "{answer}");
    switch.stop();
}

#[test]
fn edits_that_cannot_be_had_change_nothing() {
    let place = Place::new();
    let path = write_file(&place);
    let before = text(&path);
    let switch = place.start(&mut run_file(&path), Vec::new());
    place.ctl(&["set", "a", "static_macs=52:54:00:00:00:07@10", "--runtime"]);
    let in_force = rules_in_force(&switch, "b");
    for (words, part) in [
        (&["set", "b", "isolated=on", "vlan=5000"][..], "vlan: 5000 is outside 0 to 4094"),
        (&["set", "b", "isolated=on", "native=3"], "native: only goes with trunk"),
        (&["set", "b", "isolated=on", "socket=/x"], "socket: can change only when the port is opened anew"),
        (
            &["set", "b", "isolated=on", "rate_out=fast"],
            "rate_out: \"fast\" is not a number with one of the units",
        ),
        (&["set", "b", "isolated=on", "vlan"], "\"vlan\": is not KEY=VALUE"),
        (&["set", "b", "static_macs=52:54:00:00:00:07"], "in VLAN 10 is already used by port \"a\""),
        (&["set", "c", "vlan=7"], "there is no port \"c\" in the configuration; the ports are: a, b"),
        (&["unset", "b", "vlan", "speed"], "speed: is not a setting that can change"),
        (&["rules", "c"], "there is no port \"c\""),
    ] {
        let error = refused(&place, words);
        assert!(error.starts_with("ringferry: the switch refuses: ") && error.contains(part), "{error}");
    }
    assert_eq!((rules_in_force(&switch, "b"), text(&path)), (in_force.clone(), before.clone()));

    // The switch could, but what was written into its file since could not.
    let meanwhile = before.replace("rate_in = '1gbit'", "static_macs = ['52:54:00:00:00:07@10']");
    std::fs::write(&path, &meanwhile).unwrap();
    let error = refused(&place, &["set", "b", "vlan=20"]);
    assert!(
        error.contains("would be refused at the next start") && error.contains("switch.toml:14"),
        "{error}"
    );
    assert_eq!((rules_in_force(&switch, "b"), text(&path)), (in_force, meanwhile));
    switch.stop();
}

#[test]
fn what_cannot_be_kept_is_in_force_and_said_so() {
    let place = Place::new();
    let path = write_file(&place);
    let mut command = run_file(&path);
    command.arg("--port").arg(format!("vhost-user:{}", place.socket("c").display()));
    let switch = place.start(&mut command, Vec::new());
    let change = |port: &str, vlan: u16, part: &str| {
        let answer = place.ctl(&["set", port, &format!("vlan={vlan}")]);
        let (_, note) =
            answer.split_once("not kept when the switch ends: ").unwrap_or_else(|| panic!("{answer}"));
        assert!(note.contains(part), "{answer}");
        assert_eq!(rules_in_force(&switch, port)["vlan"], vlan);
    };
    let before = text(&path);
    change("c", 2, "the port was given by a flag and is not in ");
    assert_eq!(text(&path), before);
    std::fs::write(&path, before.replace("vlan = 10", "vlan = 10000")).unwrap();
    change("b", 3, "cannot be used as it is: ");
    std::fs::write(&path, before.replace("[[port]]\nkind", "[[port]]\nname = 'tenant'\nkind")).unwrap();
    change("b", 4, "has no such port any more");
    std::fs::remove_file(&path).unwrap();
    change("b", 5, "cannot be read: No such file or directory");
    switch.stop();

    let switch = place.switch(&["a"]);
    let answer = place.ctl(&["set", "a", "vlan=6", "--json"]);
    let json: serde_json::Value = serde_json::from_str(&answer).unwrap();
    assert_eq!(json["persistent"], false);
    assert_eq!(json["note"], "the switch was started without a configuration file");
    assert_eq!(rules_in_force(&switch, "a"), serde_json::json!({"vlan": 6}));
    switch.stop();
}

#[test]
fn a_file_that_may_not_be_written_is_said_so() {
    const NOBODY: u32 = 65534;
    if !may("needs root, to become a user without rights", is_root()) {
        return;
    }
    let place = Place::new();
    let path = write_file(&place);
    // The sockets are the user's, the directory of the file and the program is not.
    let (home, program) = (place.path().join("home"), place.path().join("ringferry"));
    std::fs::create_dir(&home).unwrap();
    chown(&home, Some(NOBODY), Some(NOBODY)).unwrap();
    // By another process: a file that is open for writing in this one, or a child of its, cannot be run.
    assert!(
        Command::new("cp").arg(env!("CARGO_BIN_EXE_ringferry")).arg(&program).status().unwrap().success()
    );
    let mode = std::fs::Permissions::from_mode;
    std::fs::set_permissions(place.path(), mode(0o755)).unwrap();
    std::fs::set_permissions(&program, mode(0o755)).unwrap();
    let here = place.path().display().to_string();
    let moved = ["control", "a.sock", "b.sock"].iter().fold(text(&path), |text, name| {
        text.replace(&format!("{here}/{name}"), &format!("{here}/home/{name}"))
    });
    std::fs::write(&path, &moved).unwrap();
    let mut command = Command::new(&program);
    command.uid(NOBODY).gid(NOBODY).current_dir("/").env_remove("XDG_RUNTIME_DIR").arg("run").arg(&path);
    // Where its control socket is, as far as the helpers know.
    let control = place.path().join("home/control");
    std::os::unix::fs::symlink(&control, place.control()).unwrap();
    let switch = place.start(&mut command, Vec::new());
    let answer = place.ctl(&["set", "a", "vlan=6"]);
    assert!(
        answer.contains("not kept when the switch ends: ") && answer.contains("cannot be written: "),
        "{answer}"
    );
    assert_eq!(rules_in_force(&switch, "a"), serde_json::json!({"vlan": 6}));
    assert_eq!(text(&path), moved);
    switch.stop();
}

fn plug<const N: usize>(switch: &Switch<'_>, ports: [&str; N]) -> [Guest; N] {
    let mut number = 0;
    ports.map(|port| {
        number += 1;
        switch.plug(port, number, Options::default())
    })
}

#[test]
fn access_ports_meet_in_their_vlan_and_trunks_carry_tags() {
    let place = Place::new();
    let switch = place.switch(&["a,vlan=10", "b,vlan=20", "t,trunk=10,20-29"]);
    let [mut a, mut b, mut t] = plug(&switch, ["a", "b", "t"]);
    let hello = |from: &Guest, number| frame(Mac::BROADCAST, from.mac, 100, number);
    let from_a = hello(&a, 1);
    a.send(&from_a);
    assert_eq!(t.receive_plain(), tagged(&from_a, 10));
    let from_t = hello(&t, 2);
    t.send(&tagged(&from_t, 20));
    assert_eq!(b.receive_plain(), from_t, "nothing of a's before it");
    // Neither without a tag, nor with one of a VLAN that the trunk does not carry.
    t.send(&from_t);
    t.send(&tagged(&from_t, 30));
    // An access port has no tags.
    b.send(&tagged(&hello(&b, 3), 10));
    t.drain();
    b.drain();
    // Live, and without a moment in both.
    switch.set("b", &["vlan=10"]);
    let from_t = hello(&t, 4);
    t.send(&tagged(&from_t, 10));
    assert_eq!((a.receive_plain(), b.receive_plain()), (from_t.clone(), from_t));
    // b begins, as nobody knows it here yet.
    converse(&mut b, &mut a, 1, 10);
    switch.set("t", &["native=10"]);
    let from_b = hello(&b, 5);
    b.send(&from_b);
    assert_eq!((a.receive_plain(), t.receive_plain()), (from_b.clone(), from_b));
    assert_eq!((switch.drops("t", "vlan"), switch.drops("b", "vlan")), (2, 1));
    switch.stop();
}

#[test]
fn isolated_ports_reach_others_and_not_each_other() {
    let place = Place::new();
    let switch = place.switch(&["a,isolated=on", "b,isolated=on", "up"]);
    let [mut a, mut b, mut up] = plug(&switch, ["a", "b", "up"]);
    for number in 0..10 {
        let frame = frame(Mac::BROADCAST, a.mac, 100, number);
        a.send(&frame);
        assert_eq!(up.receive_plain(), frame);
    }
    // The first that b gets, and a to begin with.
    let hello = frame(Mac::BROADCAST, up.mac, 100, 99);
    up.send(&hello);
    assert_eq!((a.receive_plain(), b.receive_plain()), (hello.clone(), hello));
    converse(&mut a, &mut up, 1, 10);
    converse(&mut b, &mut up, 2, 10);
    a.send(&frame(b.mac, a.mac, 100, 3));
    a.drain();
    switch.set("b", &["isolated=off"]);
    converse(&mut a, &mut b, 4, 10);
    switch.stop();
}

#[test]
fn what_is_for_everybody_and_reaches_nobody_is_counted() {
    let place = Place::new();
    let switch = place.switch(&["a,vlan=10,isolated=on", "b,vlan=10,isolated=on", "t,trunk=20"]);
    let [mut a, b, mut t] = plug(&switch, ["a", "b", "t"]);
    a.send(&frame(Mac::BROADCAST, a.mac, 100, 1));
    a.send(&frame(b.mac, a.mac, 100, 2));
    t.send(&tagged(&frame(Mac::BROADCAST, t.mac, 100, 3), 20));
    a.drain();
    t.drain();
    assert_eq!((switch.drops("a", "no-destination"), switch.drops("t", "no-destination")), (2, 1));
    // Reached by one of several.
    switch.set("t", &["trunk=10,20"]);
    let to_all = frame(Mac::BROADCAST, a.mac, 100, 4);
    a.send(&to_all);
    assert_eq!(t.receive_plain(), tagged(&to_all, 10));
    a.drain();
    assert_eq!(switch.drops("a", "no-destination"), 2);
    switch.stop();
}

#[test]
fn a_port_speaks_for_its_own_addresses_alone() {
    let place = Place::new();
    let switch = place.switch(&["a,allowed_macs=52:54:00:00:00:01", "b,max_macs=1", "c"]);
    let [mut a, mut b, mut c] = plug(&switch, ["a", "b", "c"]);
    acquaint(&mut [&mut a, &mut b, &mut c]);
    // As c, and as a stranger: neither is heard nor learned.
    a.send(&frame(Mac::BROADCAST, c.mac, 100, 1));
    a.send(&frame(b.mac, mac(9), 100, 2));
    // b has had its one address.
    b.send(&frame(a.mac, mac(8), 100, 3));
    converse(&mut a, &mut c, 4, 10);
    converse(&mut b, &mut c, 5, 10);
    assert_eq!((switch.drops("a", "spoofed"), switch.drops("b", "mac-limit")), (2, 1));
    // What a port has for ever nobody else can take.
    switch.set("c", &["static_macs=52:54:00:00:00:03"]);
    switch.set("a", &["allowed_macs=52:54:00:00:00:01,52:54:00:00:00:03"]);
    a.send(&frame(b.mac, c.mac, 100, 6));
    converse(&mut b, &mut c, 7, 10);
    switch.stop();
}

#[test]
fn what_is_above_a_limit_waits_or_is_dropped_and_counted() {
    const FRAMES: u32 = 400;
    let place = Place::new();
    let switch = place.switch(&["a,storm=1pps,storm_burst=3", "b"]);
    let [mut a, mut b] = plug(&switch, ["a", "b"]);
    // However slow this machine is, one a second is not all of them.
    for number in 0..FRAMES {
        let frame = frame(Mac::BROADCAST, a.mac, 100, number);
        a.send(&frame);
        b.pump();
    }
    a.drain();
    let through = |switch: &Switch<'_>, before: u64| switch.port("b").counters["tx_packets"] - before;
    let stormed = switch.drops("a", "storm");
    assert!(stormed > 0 && stormed <= u64::from(FRAMES) - 3, "{stormed}");
    assert_eq!(through(&switch, 0), u64::from(FRAMES) - stormed);
    // Both directions; the switch knows where both are now.
    b.send(&frame(a.mac, b.mac, 100, 0));
    a.receive_plain();
    // What is above the rate of a receiver waits for it: as much as it may get in 50 ms, which is one packet.
    switch.set("b", &["rate_out_packets=1pps", "rate_out_packets_burst=128"]);
    let before = switch.port("b").counters["tx_packets"];
    for number in 0..FRAMES {
        a.send(&frame(b.mac, a.mac, 100, number));
        b.pump();
    }
    a.drain();
    let dropped = switch.drops("b", "rate-out");
    assert!(dropped > 0 && dropped <= u64::from(FRAMES) - 128, "{dropped}");
    place.ctl(&["unset", "b", "rate_out_packets"]);
    switch.show();
    assert_eq!(through(&switch, before), u64::from(FRAMES) - dropped, "what waited is delivered");
    // What is above the rate of a sender stays in its ring.
    switch.set("a", &["rate_in_packets=1pps", "rate_in_packets_burst=128"]);
    let before = switch.port("b").counters["tx_packets"];
    for number in 0..FRAMES {
        b.pump();
        a.send(&frame(b.mac, a.mac, 100, number));
        if number == FRAMES / 2 {
            switch.until("a", "more than its burst is sent", |port| port.counters["rx_paused"] > 0);
            assert!(through(&switch, before) < u64::from(FRAMES / 2), "it is not paced");
            place.ctl(&["unset", "a", "rate_in_packets"]);
        }
    }
    a.drain();
    switch.show();
    assert_eq!(through(&switch, before), u64::from(FRAMES), "nothing is lost");
    switch.show();
    b.pump();
    while b.take().is_some() {}
    converse(&mut a, &mut b, 1, 100);
    switch.stop();
}

/// A bucket whose burst is two frames, and that would grant another only after ten minutes: a third borrows, and the fourth waits. They are as
/// long as all of their segments, whose headers are two fifths of that.
#[test]
fn a_byte_rate_lets_its_burst_through_counted_in_segments() {
    const SEGMENTS: usize = 288;
    const MSS: usize = (36 << 10) / SEGMENTS - 54;
    let place = Place::new();
    let switch = place.switch(&["a", "b"]);
    let [mut a, mut b] = plug(&switch, ["a", "b"]);
    acquaint(&mut [&mut a, &mut b]);
    let frames: Vec<_> =
        (0..4).map(|number| tcp(b.mac, a.mac, false, &pattern(number, SEGMENTS * MSS), MSS as u16)).collect();
    for (port, key) in [("a", "rate_in"), ("b", "rate_out")] {
        switch.set(port, &[&format!("{key}=1kbit"), &format!("{key}_burst=72kib")]);
        let before = switch.port("b").counters["tx_packets"];
        frames.iter().for_each(|(header, frame)| a.put(header, frame));
        a.flush();
        let mut expect = |frames: &[(Header, Vec<u8>)]| {
            frames.iter().for_each(|(_, frame)| assert_eq!(b.receive().frame, *frame));
        };
        expect(&frames[..3]);
        if port == "a" {
            switch.until("a", "the fourth waits in its ring", |port| port.counters["rx_paused"] > 0);
        } else {
            a.drain();
        }
        assert_eq!(switch.port("b").counters["tx_packets"] - before, 3, "{key}");
        place.ctl(&["unset", port, key]);
        expect(&frames[3..]);
        a.drain();
        // Without the limit all of them are taken.
        frames.iter().for_each(|(header, frame)| a.put(header, frame));
        a.drain();
        expect(&frames);
        assert_eq!((switch.drops("a", "no-destination"), switch.drops("b", "rate-out")), (0, 0));
    }
    switch.stop();
}

#[test]
fn a_change_under_traffic_is_made_at_one_moment_and_loses_nothing_else() {
    const BURST: u32 = 16;
    let place = Place::new();
    let switch = place.switch(&["a,vlan=10,isolated=on", "b,vlan=10"]);
    let [mut a, mut b] = plug(&switch, ["a", "b"]);
    acquaint(&mut [&mut a, &mut b]);
    let mut next = 0;
    // Sends a burst to b; for each of its frames, whether it has arrived.
    let mut send = || {
        let numbers = next..next + BURST;
        next += BURST;
        a.send_numbered(b.mac, numbers.start, BURST);
        a.drain();
        b.pump();
        let arrived: Vec<_> = std::iter::from_fn(|| b.take()).map(|received| received.frame).collect();
        numbers.map(|number| arrived.contains(&frame(b.mac, a.mac, 100, number))).collect::<Vec<_>>()
    };
    for (port, close, open, reason) in [
        ("b", ["set", "vlan=20"], ["set", "vlan=10"], "vlan"),
        ("b", ["set", "isolated=on"], ["unset", "isolated"], "isolated"),
        ("a", ["set", "allowed_macs=52:54:00:00:00:09"], ["unset", "allowed_macs"], "spoofed"),
    ] {
        let mut lost = 0;
        for ([verb, what], opens) in [(close, false), (open, true)] {
            let mut command = ringferry();
            command.arg("ctl").arg("--control").arg(place.control()).args([verb, port, what]);
            let mut ctl = Process::start(&mut command, Spawn::default());
            let mut arrived = send();
            while ctl.is_running() {
                arrived.extend(send());
            }
            assert!(ctl.wait().0.success(), "{:#?}", ctl.log());
            // Every worker knows of it.
            switch.show();
            let before = arrived.len();
            arrived.extend((0..4).flat_map(|_| send()));
            assert!(arrived[before..].iter().all(|arrived| *arrived == opens), "{verb} {what}: not in force");
            let changes = arrived.windows(2).filter(|pair| pair[0] != pair[1]).count();
            assert!(changes <= 1, "{verb} {what}: {changes} changes");
            lost += arrived.iter().filter(|arrived| !*arrived).count() as u64;
        }
        assert_eq!(switch.drops(port, reason), lost, "{reason}");
    }
    switch.stop();
}

#[test]
fn interfaces_of_a_xen_entry_have_its_rules() {
    const ONE: u16 = 5;
    let place = Place::new();
    let mut machine = Machine::new(&place);
    machine.create(DomId(ONE), 0);
    let command = &mut machine.run(&place, &["vm,vlan=7", "other"], "vlan=7", 1);
    let switch = place.start(command, Vec::new());
    let [mut vm, mut other] = plug(&switch, ["vm", "other"]);
    let mut xen = machine.guest(ONE, small(1));
    xen.plug(&switch, "xen5.0");
    for port in ["xen", "xen5.0"] {
        assert_eq!(rules_in_force(&switch, port), serde_json::json!({"vlan": 7}));
        assert_eq!(place.ctl(&["rules", port]), format!("rules of {port}:\n  vlan=7\n"));
    }
    let hello = frame(Mac::BROADCAST, xen.mac, 100, 1);
    xen.send(&hello);
    assert_eq!(vm.receive_plain(), hello);
    // A port without rules is a trunk.
    assert_eq!(other.receive_plain(), tagged(&hello, 7));
    let error = refused(&place, &["set", "xen5.0", "vlan=8"]);
    assert!(error.contains("\"xen5.0\" is one interface of an entry"), "{error}");
    switch.set("xen", &["vlan=8"]);
    xen.send(&hello);
    assert_eq!(other.receive_plain(), tagged(&hello, 8));
    assert_eq!(rules_in_force(&switch, "xen5.0"), serde_json::json!({"vlan": 8}));
    let last = frame(Mac::BROADCAST, other.mac, 100, 2);
    other.send(&tagged(&last, 7));
    assert_eq!(vm.receive_plain(), last, "nothing of VLAN 8 before it");
    xen.close();
    switch.stop();
}
