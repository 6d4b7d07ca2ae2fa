//! Ports that are added and removed while the switch runs, and the configuration file read again: `ringferry ctl add`, `remove`, `reload`,
//! and SIGHUP. Two guests talk to each other meanwhile and notice nothing.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::{Command, Output};

use ringferry_control::snapshot::{Negotiated, PortState};
use ringferry_control::{self as control, Answer, PortAction, Request};
use ringferry_packet::ether::Mac;
use ringferry_rig::frames::frame;
use ringferry_rig::guest::{Guest, Options, acquaint, converse};
use ringferry_rig::process::{eventually, in_a_namespace, may};
use ringferry_rig::schema::assert_described;
use ringferry_rig::switch::{Place, Switch, ringferry};
use ringferry_sys::process::is_root;
use ringferry_sys::socket::{Listener, Stream};
use ringferry_sys::tap::{Tap, TapConfig};
use ringferry_sys::{netif, program};
use ringferry_virtio_net::Features;
use rustix::process::Signal;
use serde_json::json;

use crate::lifecycle::bystanders;

/// A `[[port]]` table with a socket in the place.
fn table(place: &Place, name: &str, keys: &str) -> String {
    format!("[[port]]\nkind = 'vhost-user'\nsocket = {:?}\n{keys}", place.socket(name))
}

/// The configuration file of the place.
pub fn file(place: &Place) -> PathBuf {
    place.path().join("rf.toml")
}

/// Writes the configuration file, with the ports `a` and `b` and what else is given.
fn write(place: &Place, more: &str) {
    fs::write(file(place), [table(place, "a", ""), table(place, "b", ""), more.to_owned()].concat()).unwrap();
}

/// A switch with a configuration file, in its sandbox where tests may be.
pub fn start<'a>(place: &'a Place, more: &str) -> Switch<'a> {
    write(place, more);
    place.start(ringferry().arg("run").arg(file(place)).arg("--control").arg(place.control()), Vec::new())
}

fn names(switch: &Switch<'_>) -> Vec<String> {
    switch.show().ports.into_iter().map(|port| port.name).collect()
}

#[test]
fn a_port_is_added_used_and_removed_beside_traffic_and_the_file_says_so() {
    let place = Place::new();
    let switch = start(&place, "");
    let (mut a, mut b) = bystanders(&switch);
    let (descriptors, text) = (switch.process.descriptors(), fs::read_to_string(file(&place)).unwrap());
    let flag = format!("vhost-user:{},isolated=on", place.socket("c").display());
    for number in 3..6 {
        let answer = place.ctl(&["add", &flag]);
        assert_eq!(answer, format!("c added\nkept: in {}\n", file(&place).display()));
        let again = place.ctl(&["add", &flag]);
        let there = file(&place);
        assert_eq!(
            again,
            format!("c: there is this very port already; kept: it is in {} already\n", there.display())
        );
        let error = place.refused(&["add", &flag.replace("on", "off")]);
        assert!(error.contains("there is another port \"c\": isolated is true, not unset"), "{error}");
        assert!(fs::read_to_string(file(&place)).unwrap().ends_with("isolated = true\n"));
        let mut c = switch.plug("c", number, Options::default());
        acquaint(&mut [&mut a, &mut b, &mut c]);
        converse(&mut a, &mut c, 0, 20);
        // It goes while it sends and is sent to.
        c.send_numbered(a.mac, 20, 20);
        a.send_numbered(c.mac, 20, 20);
        assert!(place.ctl(&["remove", "c"]).starts_with("c removed\nthe removal is kept: in "));
        assert!(Stream::connect(place.socket("c")).is_err());
        assert!(c.connection.frontend().check().is_err(), "it is disconnected");
        assert_eq!(place.files(), ["a.sock", "b.sock", "control", "rf.toml"]);
        assert_eq!(fs::read_to_string(file(&place)).unwrap(), text);
        assert!(place.refused(&["remove", "c"]).contains("there is no port \"c\""));
        assert_eq!(place.ctl(&["remove", "c", "--if-exists"]), "c: there is no such port\n");
        assert!(switch.show().fdb.entries.iter().all(|entry| entry.port != "c"));
        a.pump();
        while a.take().is_some() {}
        converse(&mut a, &mut b, number.into(), 20);
    }
    switch.process.until_no_more_than(&descriptors);
    assert_eq!(names(&switch), ["a", "b"]);
    switch.stop();
    assert_eq!(place.files(), ["rf.toml"]);
}

/// Nobody looks into the log before the next start.
#[test]
fn a_file_that_was_refused_is_told_of_until_it_is_read() {
    let place = Place::new();
    let mut switch = start(&place, "");
    write(&place, "[[port]]\nkind = 'tun'\n[[port]]\nkind = 'tup'\n");
    switch.process.signal(Signal::HUP);
    switch.process.until_logged("\"tup\" is not a kind of port");
    // Each mistake is a line of its own, with all that a line has.
    assert_eq!(switch.process.logged("the configuration was not read again"), 2);
    let said = place.ctl(&["why"]);
    let path = file(&place).display().to_string();
    assert!(said.contains("Of the switch itself: its configuration file could not be read again "), "{said}");
    assert!(said.contains(&format!("`ringferry run {path} --check` says why")), "{said}");
    write(&place, "");
    place.ctl(&["reload"]);
    assert!(!place.ctl(&["why"]).contains("could not be read again"));
    switch.stop();
}

#[test]
fn a_socket_that_was_removed_is_made_anew_by_a_reload_and_whoever_is_connected_stays() {
    for sandbox in ["on", "off"] {
        let place = Place::new();
        write(&place, "");
        let mut run = ringferry();
        run.args(["run", "--sandbox", sandbox]).arg(file(&place)).arg("--control").arg(place.control());
        let switch = place.start(&mut run, Vec::new());
        let (mut a, mut b) = bystanders(&switch);
        let descriptors = switch.process.descriptors();
        for name in ["a", "b"] {
            fs::remove_file(place.socket(name)).unwrap();
            switch.until(name, "misses its socket", |port| port.fault.is_some());
        }
        // Where another program listens meanwhile it stays, and so does the fault.
        let other = Listener::bind(place.socket("b")).unwrap();
        let said = place.refused(&["reload"]);
        let made = "~ a: its socket was removed: that is made anew\n";
        assert!(said.contains(made) && said.contains("is in use by a running program"), "{said}");
        // That is told of until it is done.
        let left =
            || place.ctl(&["why"]).contains("not all ports could be made what their configuration file has ");
        assert!(left());
        place.ctl(&["reload", "--dry-run"]);
        assert!(left());
        drop(other);
        let planned = place.ctl(&["reload", "--dry-run"]);
        assert!(planned.contains("~ b: its socket was removed: that is made anew\n"), "{planned}");
        assert!(!planned.contains("~ a: "), "{planned}");
        place.ctl(&["reload"]);
        assert!(!left());
        for name in ["a", "b"] {
            switch.until(name, "has its socket", |port| port.fault.is_none());
        }
        converse(&mut a, &mut b, 1, 20);
        switch.process.until_no_more_than(&descriptors);
        // Also a port that nobody is connected to.
        drop(a);
        switch.until_state("a", PortState::Listening);
        fs::remove_file(place.socket("a")).unwrap();
        switch.until("a", "misses its socket", |port| port.fault.is_some());
        place.ctl(&["reload"]);
        let mut a = switch.plug("a", 9, Options::default());
        acquaint(&mut [&mut a, &mut b]);
        converse(&mut a, &mut b, 30, 20);
        switch.stop();
        assert_eq!(place.files(), ["rf.toml"], "with the sandbox {sandbox}");
    }
}

/// A change of the running switch is remarked on as a start and `run --check` do: a guest without a VLAN beside guests with one is in all of them.
#[test]
fn a_port_that_would_be_in_the_vlans_of_others_is_remarked_on_by_whatever_makes_it() {
    let place = Place::new();
    let switch = start(&place, &table(&place, "blue", "vlan = 10\n"));
    let remark = "note: port c has no vlan, so it is a trunk of all VLANs: what its guest sends with a tag of 10 reaches blue.";
    let flag = format!("vhost-user:{}", place.socket("c").display());
    assert!(place.ctl(&["add", &flag]).contains(remark));
    switch.process.until_logged("WARN port c has no vlan");
    // Once.
    let answer = place.ctl(&["set", "c", "rate_out=10mbit"]);
    assert!(!answer.contains("no vlan"), "{answer}");
    let answer = place.ctl(&["set", "c", "vlan=20"]);
    assert!(!answer.contains("no vlan"), "{answer}");
    assert!(place.ctl(&["unset", "c", "vlan"]).contains(remark));
    assert!(place.ctl(&["why", "c"]).contains("No front end is connected"));
    // Also where it is another port that makes it so.
    assert!(!place.ctl(&["unset", "blue", "vlan"]).contains("no vlan"));
    assert!(place.ctl(&["set", "blue", "vlan=10"]).contains(remark));
    place.ctl(&["remove", "c"]);
    write(&place, &[table(&place, "blue", "vlan = 10\n"), table(&place, "d", "")].concat());
    // A plan has all that is strange, what is done only what was not so before.
    for (words, noted) in [(&["reload", "--dry-run"][..], "abd"), (&["reload"], "d")] {
        let plan = place.ctl(words);
        assert!(plan.starts_with("+ d: a vhost-user port\nnote: port "), "{plan}");
        let notes = plan.lines().filter_map(|line| line.strip_prefix("note: port ")?.chars().next());
        assert_eq!(notes.collect::<String>(), noted, "{plan}");
    }
    assert_eq!(place.ctl(&["reload"]), format!("all ports are as {} has them\n", file(&place).display()));
    for (port, times) in [("a", 2), ("b", 2), ("c", 3), ("d", 1)] {
        switch.process.until_logged_times(&format!("port {port} has no vlan"), times);
    }
    switch.stop();
}

#[test]
fn a_change_of_the_running_switch_alone_is_not_kept() {
    let place = Place::new();
    let switch = start(&place, "");
    let text = fs::read_to_string(file(&place)).unwrap();
    let flag = format!("vhost-user:{}", place.socket("c").display());
    let note = "not kept when the switch ends: a change of the running switch alone was asked for\n";
    assert_eq!(place.ctl(&["add", &flag, "--runtime"]), format!("c added\n{note}"));
    let again = place.ctl(&["add", &flag, "--runtime"]);
    assert!(
        again.starts_with("c: there is this very port already; not kept when the switch ends: "),
        "{again}"
    );
    assert_eq!(place.ctl(&["remove", "a", "--runtime"]), format!("a removed\nthe removal is {note}"));
    assert_eq!(fs::read_to_string(file(&place)).unwrap(), text);
    assert_eq!(names(&switch), ["b", "c"]);
    // What was removed so comes back with the file; what was added so stays.
    let reload = place.ctl(&["reload"]);
    assert!(
        reload.starts_with("+ a: a vhost-user port\n  c is not in ")
            && reload.contains("it goes with the switch"),
        "{reload}"
    );
    let again = place.ctl(&["reload", "--dry-run"]);
    assert!(again.starts_with("  c is not in ") && again.contains("\nnothing differs from what "), "{again}");
    assert_eq!(names(&switch), ["b", "c", "a"]);
    // To add it again without that has it kept; and what is only in the file any more is removed from there.
    let kept = place.ctl(&["add", &flag]);
    assert!(kept.starts_with("c: there is this very port already; kept: in "), "{kept}");
    place.ctl(&["remove", "c", "--runtime"]);
    assert!(place.ctl(&["remove", "c"]).starts_with("c removed\nthe removal is kept: in "));
    assert_eq!(fs::read_to_string(file(&place)).unwrap(), text);
    // All may go.
    for port in ["a", "b"] {
        place.ctl(&["remove", port]);
    }
    assert_eq!(names(&switch), [""; 0]);
    switch.stop();
    assert_eq!(place.files(), ["rf.toml"]);
}

#[test]
fn what_cannot_be_added_is_refused_with_a_remedy_and_leaves_nothing() {
    let place = Place::new();
    let elsewhere = Place::new();
    let switch = start(&place, "");
    let here = |name: &str| place.socket(name).display().to_string();
    fs::write(place.path().join("file.sock"), "precious").unwrap();
    for (flag, error) in [
        ("vhost-user:nowhere.sock".to_owned(), "the path must be absolute"),
        ("vhost-user-fd:7".to_owned(), "its descriptor is passed when the switch is started"),
        ("vhost-user-activation:x".to_owned(), "its descriptor is passed when the switch is started"),
        (format!("vhost-user:{},mtu=1", here("c")), "mtu: 1 is outside 68 to 65535"),
        (format!("vhost-user:{},name=c", here("a")), "is already used by port \"a\""),
        (format!("vhost-user:{}", here("file")), "exists and is not a socket"),
    ] {
        let words = place.refused(&["add", &flag]);
        assert!(words.contains(error), "{words}");
    }
    if may("sandbox", is_root()) {
        let flag = format!("vhost-user:{}", elsewhere.socket("c").display());
        let words = place.refused(&["add", &flag]);
        assert!(
            words.contains("the sandbox keeps the switch out of") && words.contains("socket_directories"),
            "{words}"
        );
        let words = place.refused(&["add", &format!("vhost-user:{},mode=connect", here("c"))]);
        assert!(
            words.contains("lets added ports connect only to sockets in the socket_directories"),
            "{words}"
        );
        // With the authority of the file it can listen nowhere else either, as the helper is in a sandbox, too.
        write(&place, &table(&elsewhere, "c", ""));
        let words = place.refused(&["reload"]);
        assert!(
            words.contains("+ c: a vhost-user port\n  not done: the sandbox keeps the switch out of "),
            "{words}"
        );
        // To connect it needs no directory.
        write(&place, &table(&elsewhere, "d", "mode = 'connect'\n"));
        assert!(place.ctl(&["reload"]).starts_with("+ d: "));
    }
    assert_eq!(fs::read_to_string(place.path().join("file.sock")).unwrap(), "precious");
    fs::remove_file(place.path().join("file.sock")).unwrap();
    assert_eq!(place.files(), ["a.sock", "b.sock", "control", "rf.toml"]);
    switch.stop();
}

/// A reload would find it out only when it is too late for the port that is to move there.
#[test]
fn a_directory_that_the_sandbox_leaves_out_is_foreseen() {
    let place = Place::new();
    let switch = start(&place, "");
    // What it has logged is read by another thread.
    switch.process.until_logged("the switch is up");
    if switch.process.logged("in a sandbox: ") == 0 {
        may("a kernel with all of the sandbox", false);
        return switch.stop();
    }
    let elsewhere = place.path().join("elsewhere");
    fs::create_dir(&elsewhere).unwrap();
    let other = format!("[[port]]\nkind = 'vhost-user'\nname = 'b'\nsocket = {:?}\n", elsewhere.join("b"));
    fs::write(file(&place), [table(&place, "a", ""), other, table(&place, "c", "")].concat()).unwrap();
    for words in [&["reload", "--dry-run"][..], &["reload"]] {
        let said = place.refused(words);
        assert!(said.contains("not done: the sandbox keeps the switch out of "), "{said}");
    }
    assert_eq!(names(&switch), ["a", "b", "c"]);
    // The one that was to move is where it was.
    drop(switch.connect("b"));
    switch.stop();
}

#[test]
fn a_reload_carries_out_what_has_changed_and_nothing_else() {
    let place = Place::new();
    let mut switch = start(&place, &table(&place, "c", "").replace("[[port]]", "[[port]]\nmtu = 1500"));
    let (mut a, mut b) = bystanders(&switch);
    let mut c = switch.plug("c", 3, Options::default());
    acquaint(&mut [&mut a, &mut b, &mut c]);
    assert!(place.ctl(&["reload"]).starts_with("all ports are as "));
    let connected = |switch: &Switch<'_>, port| switch.port(port).counters["connections"];
    let before = ["a", "b", "c"].map(|port| connected(&switch, port));

    // Rules only: nobody is disconnected.
    write(&place, &table(&place, "c", "mtu = 1500\nisolated = true\n"));
    let plan = place.ctl(&["reload", "--dry-run"]);
    assert_eq!(plan, "~ c: isolated=true\n1 port would change; nothing was done\n");
    assert_eq!(place.ctl(&["rules", "c"]), "c has no rules\n");
    assert_eq!(place.ctl(&["reload"]), "~ c: isolated=true\n1 port has changed\n");
    assert_eq!(place.ctl(&["rules", "c"]), "rules of c:\n  isolated=true\n");
    assert_eq!(["a", "b", "c"].map(|port| connected(&switch, port)), before);
    converse(&mut a, &mut c, 0, 20);

    // A mistake anywhere changes nothing.
    write(&place, &[table(&place, "d", ""), table(&place, "c", "mtu = 1\n")].concat());
    let error = place.refused(&["reload"]);
    assert!(error.contains("rf.toml:13: port.mtu: 1 is outside"), "{error}");
    assert_eq!(names(&switch), ["a", "b", "c"]);
    converse(&mut a, &mut c, 20, 20);

    // One goes, one comes from a drop-in file, one is another.
    write(&place, &table(&place, "c", "mtu = 9000\nsocket_mode = '0600'\n"));
    let text = fs::read_to_string(file(&place)).unwrap();
    fs::write(file(&place), text.replace(&table(&place, "b", ""), "")).unwrap();
    fs::create_dir(place.path().join("rf.d")).unwrap();
    fs::write(place.path().join("rf.d/d.toml"), table(&place, "d", "vlan = 7\n")).unwrap();
    switch.process.signal(Signal::HUP);
    switch.process.until_logged("the configuration was read again");
    assert_eq!(names(&switch), ["a", "c", "d"]);
    assert!(b.connection.frontend().check().is_err() && c.connection.frontend().check().is_err());
    assert_eq!(switch.port("c").mtu, 9000);
    let mut c = switch.plug("c", 3, Options::default());
    acquaint(&mut [&mut a, &mut c]);
    converse(&mut a, &mut c, 0, 20);
    assert_eq!(connected(&switch, "a"), before[0]);
    // A rule of a port of a drop-in file is kept there.
    let answer = place.ctl(&["set", "d", "vlan=8"]);
    assert!(answer.contains("kept: in ") && answer.ends_with("/rf.d/d.toml\n"), "{answer}");
    assert!(fs::read_to_string(place.path().join("rf.d/d.toml")).unwrap().ends_with("vlan = 8\n"));

    // What needs a restart is said, again and again.
    let text = fs::read_to_string(file(&place)).unwrap();
    fs::write(file(&place), format!("[switch]\nmac_age_seconds = 60\n{text}")).unwrap();
    for _ in 0..2 {
        let plan = place.ctl(&["reload"]);
        assert!(
            plan.starts_with("! mac_age_seconds = 60; this needs a stop and a start\nall ports are as "),
            "{plan}"
        );
    }
    drop((b, c));
    switch.stop();
}

#[test]
fn settings_change_while_guests_talk_and_those_of_a_connection_with_the_next_one() {
    let place = Place::new();
    let switch = start(&place, "[switch]\nworkers = 2\n");
    let (mut a, mut b) = bystanders(&switch);
    let later = "holds with the next connection; the front end that is connected keeps what it has agreed on";
    let answer = place.ctl(&["set", "a", "mtu=9000", "queue_size=64", "mergeable=off"]);
    let path = file(&place).display().to_string();
    let kept = format!("kept: in {path}\n");
    assert_eq!(
        answer,
        format!(
            "settings of a:\n  mtu=9000: {later}\n  queue_size=64: {later}\n  mergeable=false: {later}\n{kept}"
        )
    );
    let features = |switch: &Switch<'_>| match switch.port("a").negotiated {
        Negotiated::VhostUser(features) => features,
        _ => panic!("a vhost-user port"),
    };
    // Its rings may even be started anew.
    let bases = a.connection.stop().unwrap();
    a.start(&bases).unwrap();
    converse(&mut a, &mut b, 0, 20);
    assert_eq!((switch.port("a").mtu, switch.port("a").state), (1500, PortState::Up));
    assert!(features(&switch).contains(Features::MRG_RXBUF));
    // A worker is another at once, beside a rule.
    let answer = place.ctl(&["set", "b", "worker=1", "isolated=on"]);
    assert_eq!(
        answer,
        format!("rules of b:\n  isolated=true\nsettings of b:\n  worker=1: holds now\n{kept}")
    );
    let owners = |port: &str| {
        let steering = control::call(&place.control(), &Request::Steering { port: port.to_owned() });
        let Ok(Answer::Steering(steering)) = steering else { panic!("another answer") };
        steering.queues.iter().map(|queue| queue.worker).collect::<Vec<_>>()
    };
    assert_eq!((owners("a"), owners("b")), (vec![Some(0)], vec![Some(1)]));
    converse(&mut a, &mut b, 20, 20);
    for port in ["a", "b"] {
        assert_eq!(switch.port(port).counters["connections"], 1);
    }
    assert!(place.ctl(&["reload"]).starts_with("all ports are as "));
    let text = fs::read_to_string(file(&place)).unwrap();
    assert!(text.contains("mtu = 9000\nqueue_size = 64\nmergeable = false\n"), "{text}");

    // So is a pair that is assigned, which the next start and a reload leave where it is.
    let answer = place.ctl(&["assign", "a", "0", "1"]);
    assert!(answer.ends_with(&kept), "{answer}");
    let text = fs::read_to_string(file(&place)).unwrap();
    assert!(text.contains("mergeable = false\nworker = [1, 1]\n"), "{text}");
    assert!(place.ctl(&["reload"]).starts_with("all ports are as "));
    assert_eq!(owners("a"), [Some(1)]);
    let answer = place.ctl(&["assign", "a", "0", "0", "--runtime"]);
    assert!(
        answer
            .ends_with("not kept when the switch ends: a change of the running switch alone was asked for\n")
    );
    assert_eq!(owners("a"), [Some(0)]);
    assert!(place.ctl(&["reload"]).starts_with("~ a: worker unset -> [1, 1]\n"));
    assert_eq!(owners("a"), [Some(1)]);
    place.ctl(&["assign", "a", "0", "0"]);
    let text = fs::read_to_string(file(&place)).unwrap();
    assert!(!text.contains("worker = ["), "what holds by default need not be said: {text}");
    converse(&mut a, &mut b, 30, 10);

    // What cannot be changes nothing, and says what can.
    for (words, error) in [
        (&["set", "a", "vlan=7", "socket=/x"][..], "socket: can change only when the port is opened anew"),
        (&["set", "a", "vlan=7", "worker=2"], "worker: there is no worker 2"),
        (&["set", "a", "vlan=7", "csum=off", "tso=on"], "tso: needs csum"),
        (
            &["set", "a", "vlan=7", "bridge=br0"],
            "bridge: is a key of tap ports, and this is a vhost-user port",
        ),
        (&["unset", "a", "vlan", "mode"], "mode: can change only when the port is opened anew"),
    ] {
        let said = place.refused(words);
        assert!(said.contains(error), "{said}");
    }
    assert_eq!(fs::read_to_string(file(&place)).unwrap(), text);
    assert_eq!(place.ctl(&["rules", "a"]), "a has no rules\n");

    drop(a);
    switch.until_state("a", PortState::Listening);
    let a = Guest::plug(switch.connect("a"), 1, Options::default());
    let port = switch.until("a", "is broken", |port| port.state == PortState::Broken);
    assert_eq!(port.mtu, 9000);
    assert!(!features(&switch).contains(Features::MRG_RXBUF));
    // Without a front end everything holds at once.
    drop(a);
    switch.until_state("a", PortState::Listening);
    let answer = place.ctl(&["unset", "a", "mtu", "queue_size", "mergeable"]);
    assert!(answer.contains("  mtu is not set: holds now\n") && answer.ends_with(&kept), "{answer}");
    assert_eq!(switch.port("a").mtu, 1500);
    let text = fs::read_to_string(file(&place)).unwrap();
    assert!(!text.contains("mtu") && !text.contains("queue_size") && !text.contains("mergeable"), "{text}");
    let mut a = switch.plug("a", 1, Options::default());
    acquaint(&mut [&mut a, &mut b]);
    converse(&mut a, &mut b, 40, 20);
    assert!(features(&switch).contains(Features::MRG_RXBUF));

    // A reload goes the same way: nobody is disconnected.
    write(&place, "[switch]\nworkers = 2\n");
    let text = fs::read_to_string(file(&place)).unwrap();
    fs::write(file(&place), text.replacen("[[port]]", "[[port]]\nmtu = 1400\nvlan = 3\nworker = 1", 1))
        .unwrap();
    let plan = place.ctl(&["reload"]);
    let steps: Vec<_> = plan.lines().collect();
    assert_eq!(steps[0], "~ a: vlan=3, mtu unset -> 1400 with the next connection, worker unset -> 1");
    // And that it is in the VLAN of a now.
    assert_eq!(steps[1], "~ b: isolated unset, worker 1 -> unset");
    assert!(steps[2].starts_with("note: port b has no vlan"), "{plan}");
    assert_eq!(steps[3..], ["2 ports have changed"]);
    assert_eq!((owners("a"), owners("b")), (vec![Some(1)], vec![Some(0)]));
    assert_eq!((switch.port("a").counters["connections"], switch.port("b").counters["connections"]), (3, 1));
    place.ctl(&["unset", "a", "vlan"]);
    converse(&mut a, &mut b, 60, 20);
    switch.stop();
}

#[test]
fn ports_may_exchange_their_sockets() {
    let place = Place::new();
    let switch = start(&place, "");
    let exchanged = [table(&place, "a", "name = 'b'\n"), table(&place, "b", "name = 'a'\n")].concat();
    fs::write(file(&place), exchanged).unwrap();
    assert!(place.ctl(&["reload"]).ends_with("2 ports have changed\n"));
    assert_eq!(switch.port("a").peer, place.socket("b").display().to_string());
    switch.stop();
}

#[test]
fn what_is_no_order_to_remove_everything_removes_nothing() {
    let place = Place::new();
    let switch = start(&place, "");
    for text in ["", "[switch]\nworkers = 1\n"] {
        fs::write(file(&place), text).unwrap();
        let error = place.refused(&["reload"]);
        assert!(error.contains("has no port any more"), "{error}");
    }
    // Nobody waits for a pipe in the place of the file.
    fs::remove_file(file(&place)).unwrap();
    assert!(Command::new("mkfifo").arg(file(&place)).status().unwrap().success());
    let error = place.refused(&["reload"]);
    assert!(error.contains("is not a file that could be read again"), "{error}");
    assert_eq!(names(&switch), ["a", "b"]);
    fs::remove_file(file(&place)).unwrap();
    write(&place, "");
    assert!(place.ctl(&["reload"]).starts_with("all ports are as "));
    switch.stop();
}

/// A mistake in the file of one machine is not to cost the others what they are given.
#[test]
fn a_mistake_in_one_file_keeps_no_other_port_from_being_changed() {
    let place = Place::new();
    let switch = start(&place, "");
    let drop_ins = place.path().join("rf.d");
    fs::create_dir(&drop_ins).unwrap();
    fs::write(drop_ins.join("c.toml"), table(&place, "c", "")).unwrap();
    place.ctl(&["reload"]);
    fs::write(drop_ins.join("c.toml"), table(&place, "c", "mca = 'x'\n")).unwrap();
    for port in ["a", "c"] {
        let said = place.ctl(&["set", port, "vlan=10"]);
        assert!(said.contains("not kept when the switch ends: ") && said.contains("mca"), "{said}");
    }
    let said = place.ctl(&["unset", "a", "vlan"]);
    assert!(
        said.contains("not kept when the switch ends: ") && said.contains("a reload, also for"),
        "{said}"
    );
    let flag = format!("vhost-user:{}", place.socket("d").display());
    let said = place.ctl(&["add", &flag]);
    assert!(said.contains("the port is open and in no file") && !said.contains("a reload"), "{said}");
    place.ctl(&["remove", "d"]);
    // A file that makes no sense with the change is another matter: here the address is another port's by then.
    fs::write(drop_ins.join("c.toml"), table(&place, "c", "static_macs = ['52:54:00:00:00:09']\n")).unwrap();
    let error = place.refused(&["set", "a", "static_macs=52:54:00:00:00:09"]);
    assert!(error.contains("would be refused at the next start"), "{error}");
    // Half of a file is none, whichever it is.
    for file in [drop_ins.join("c.toml"), file(&place)] {
        fs::write(&file, "").unwrap();
        let error = place.refused(&["reload"]);
        assert!(error.contains(&format!("{} has no port any more", file.display())), "{error}");
        write(&place, "");
    }
    fs::rename(&drop_ins, place.path().join("away")).unwrap();
    let error = place.refused(&["reload", "--dry-run"]);
    assert!(error.contains("rf.d is not there any more, which has the port c"), "{error}");
    assert_eq!(names(&switch), ["a", "b", "c"]);
    switch.stop();
}

/// A worker that a port was given when there were more of them is a hint, and no reason for anybody not to have a network.
#[test]
fn a_worker_that_there_is_not_any_more_keeps_no_switch_from_starting() {
    let place = Place::new();
    let run = |keys: &str| {
        write(&place, keys);
        let mut command = ringferry();
        command.arg("run").arg(file(&place)).arg("--control").arg(place.control());
        command
    };
    let switch = place.start(&mut run("[switch]\nworkers = 2\n"), Vec::new());
    place.ctl(&["assign", "b", "0", "1"]);
    let text = fs::read_to_string(file(&place)).unwrap();
    assert!(text.contains("worker = [1, 1]"), "{text}");
    switch.stop();
    fs::write(file(&place), text.replace("workers = 2", "workers = 1")).unwrap();
    let mut command = ringferry();
    command.arg("run").arg(file(&place)).arg("--control").arg(place.control());
    let switch = place.start(&mut command, Vec::new());
    switch.process.until_logged("port b: there is no worker 1: the switch has 1, from 0 on");
    let (mut a, mut b) = bystanders(&switch);
    converse(&mut a, &mut b, 0, 20);
    // Whoever asks for such a one is told.
    let error = place.refused(&["set", "a", "worker=1"]);
    assert!(error.contains("there is no worker 1"), "{error}");
    place.ctl(&["set", "b", "vlan=10"]);
    switch.stop();
}

#[test]
fn a_port_that_cannot_become_another_is_as_it_was_before() {
    let place = Place::new();
    let switch = start(&place, "");
    fs::write(place.path().join("c.sock"), "no socket").unwrap();
    fs::write(file(&place), [table(&place, "c", "name = 'a'\n"), table(&place, "b", "")].concat()).unwrap();
    let words = place.refused(&["reload"]);
    assert!(
        words.contains("exists and is not a socket") && words.contains("it is as it was before"),
        "{words}"
    );
    assert!(
        words.ends_with("ringferry: not all of the configuration file could be carried out\n"),
        "{words}"
    );
    let (mut a, mut b) = bystanders(&switch);
    converse(&mut a, &mut b, 0, 20);
    assert_eq!(switch.port("a").peer, place.socket("a").display().to_string());
    switch.stop();
}

fn ip(words: &[&str]) {
    assert!(Command::new("ip").args(words).status().unwrap().success(), "{words:?}");
}

/// The way out of the sandbox leads through a file also for a switch that has none.
#[test]
fn what_only_a_file_may_say_is_refused_with_the_way_to_one() {
    if !may("sandbox", is_root()) {
        return;
    }
    in_a_namespace(|| {
        let place = Place::new();
        let switch = place.switch(&["a"]);
        let words = place.refused(&["add", "tap:rf9,address=10.0.0.1/24"]);
        assert!(words.contains("started without one; `ringferry ctl dump` writes one"), "{words}");
        switch.stop();
    });
}

fn taps_come_and_go_in_the_namespace() {
    if !may("needs the program ip", program::installed("ip").is_some()) {
        return;
    }
    let place = Place::new();
    let switch = start(&place, "");
    place.ctl(&["add", "tap:rf0,mtu=9000"]);
    assert_eq!((netif::mtu("rf0").unwrap(), netif::is_up("rf0").unwrap()), (9000, true));
    assert_eq!(switch.port("rf0").state, PortState::Up);
    place.ctl(&["remove", "rf0"]);
    assert_eq!(netif::index("rf0").unwrap(), None);
    // One that exists may be somebody else's.
    ip(&["tuntap", "add", "dev", "rf1", "mode", "tap", "vnet_hdr"]);
    let words = place.refused(&["add", "tap:rf1"]);
    assert!(words.contains("the interface rf1 exists") && words.contains("ringferry ctl reload"), "{words}");
    write(&place, "[[port]]\nkind = 'tap'\ntap = 'rf1'\n");
    assert!(place.ctl(&["reload"]).starts_with("+ rf1: a tap port\n"));
    assert!(Tap::open(&TapConfig::new("rf1")).is_err(), "its queues are open");
    place.ctl(&["remove", "rf1"]);
    assert!(netif::index("rf1").unwrap().is_some(), "it stays, as it was not made by the switch");
    // Packets of the host arrive.
    place.ctl(&["add", "tap:rf2", "--runtime"]);
    let mut a = switch.plug("a", 1, Options::default());
    netif::add_address("rf2", "10.0.0.1".parse().unwrap(), 24).unwrap();
    let host = netif::mac("rf2").unwrap();
    ip(&["neigh", "add", "10.0.0.9", "lladdr", &a.mac.to_string(), "dev", "rf2"]);
    let socket = std::net::UdpSocket::bind("10.0.0.1:0").unwrap();
    socket.send_to(b"hello", "10.0.0.9:9").unwrap();
    while a.receive().frame[6..12] != host {}
    switch.stop();
    assert_eq!(netif::index("rf2").unwrap(), None);
}

/// The interface's bridge and addresses, as `ip` shows them.
fn link(name: &str) -> String {
    let shown = Command::new("ip").args(["-o", "addr", "show", "dev", name]).output().unwrap();
    let master = Command::new("ip").args(["-o", "link", "show", "dev", name]).output().unwrap();
    [shown.stdout, master.stdout].map(|bytes| String::from_utf8(bytes).unwrap()).concat()
}

fn is_set_up() -> bool {
    let link = link("rf0");
    link.contains("master br0") && link.contains("inet 10.0.0.1/24") && netif::is_up("rf0").unwrap_or(false)
}

fn an_uplink_survives_everything_in_the_namespace() {
    if !may("needs the program ip", program::installed("ip").is_some()) {
        return;
    }
    ip(&["link", "add", "br0", "up", "type", "bridge"]);
    let place = Place::new();
    let keys = "persistent = true\nbridge = 'br0'\naddress = ['10.0.0.1/24']\nmtu = 1400\n";
    let tap = format!("[[port]]\nkind = 'tap'\ntap = 'rf0'\n{keys}");
    let switch = start(&place, &tap);
    assert!(is_set_up(), "{}", link("rf0"));
    let (mac, index) = (netif::mac("rf0").unwrap(), netif::index("rf0").unwrap());
    switch.stop();
    // It stays, and so does all that others know of it.
    assert_eq!((netif::mac("rf0").unwrap(), netif::index("rf0").unwrap()), (mac, index));
    let switch = start(&place, &tap);
    assert!(is_set_up() && netif::index("rf0").unwrap() == index);
    // It comes back when it is deleted, as it was.
    ip(&["link", "delete", "rf0"]);
    eventually("the tap is made anew", || netif::index("rf0").unwrap().filter(|_| is_set_up()));
    assert_ne!(netif::index("rf0").unwrap(), index);
    assert_eq!((netif::mac("rf0").unwrap(), netif::mtu("rf0").unwrap()), (mac, 1400));
    switch.until_state("rf0", PortState::Up);
    // And it is in the bridge again when that is deleted and made anew.
    ip(&["link", "delete", "br0"]);
    switch.process.until_logged("there is no bridge br0 any more");
    switch.until("rf0", "misses its bridge", |port| {
        port.fault.as_ref().is_some_and(|fault| fault.contains("no bridge br0"))
    });
    assert!(!is_set_up());
    ip(&["link", "add", "br0", "up", "type", "bridge"]);
    eventually("the tap joins the bridge", || is_set_up().then_some(()));
    // What somebody has undone is said, and a reload sets it again.
    ip(&["address", "delete", "10.0.0.1/24", "dev", "rf0"]);
    let why = place.ctl(&["why", "rf0"]);
    assert!(
        why.contains("rf0: its interface has lost the address 10.0.0.1/24; `ringferry ctl reload`"),
        "{why}"
    );
    ip(&["link", "set", "rf0", "mtu", "1200"]);
    let lost = "the MTU 1400";
    switch.until("rf0", "misses it", |port| port.fault.as_ref().is_some_and(|fault| fault.contains(lost)));
    // Whoever does not ask for reasons sees it, too.
    switch.until("rf0", "misses its address", |port| {
        port.fault.as_ref().is_some_and(|fault| fault.contains("the address 10.0.0.1/24"))
    });
    switch.process.until_logged("its interface has lost the address 10.0.0.1/24");
    let again = "~ rf0: its interface has lost the address 10.0.0.1/24, the MTU 1400: that is set again\n";
    assert!(place.ctl(&["reload", "--dry-run"]).starts_with(again) && !is_set_up());
    assert!(place.ctl(&["reload"]).starts_with(again) && is_set_up());
    assert_eq!((netif::mtu("rf0").unwrap(), switch.port("rf0").fault), (1400, None));
    assert!(place.ctl(&["reload"]).starts_with("all ports are as "));
    // So does whoever sets it to what it is to be: a switch need not have a file.
    ip(&["address", "delete", "10.0.0.1/24", "dev", "rf0"]);
    assert!(place.ctl(&["why", "rf0"]).contains("`ringferry ctl set` with the value"));
    let set = place.ctl(&["set", "rf0", "address=10.0.0.1/24"]);
    assert!(is_set_up() && set.contains("kept: in "), "{set}");
    // And whoever takes it out of its bridge.
    ip(&["link", "set", "rf0", "nomaster"]);
    assert!(place.ctl(&["why", "rf0"]).contains("its interface has lost the bridge br0; "));
    assert!(
        place
            .ctl(&["reload"])
            .starts_with("~ rf0: its interface has lost the bridge br0: that is set again\n")
    );
    assert!(is_set_up());
    // A bridge that is down, and an interface that is.
    ip(&["link", "set", "br0", "down"]);
    assert!(place.ctl(&["why", "rf0"]).contains("its bridge is down, and passes nothing on"));
    ip(&["link", "set", "rf0", "down"]);
    let why = place.ctl(&["why", "rf0"]);
    assert!(
        why.contains("its bridge is down") && why.contains("The interface of rf0 (rf0) is down"),
        "{why}"
    );
    ip(&["link", "set", "br0", "up"]);
    ip(&["link", "set", "rf0", "up"]);
    assert_eq!(switch.port("rf0").fault, None);
    // Another bridge in the file is another one for the tap, too, which stays open; and what cannot be leaves the port as it was.
    let before = netif::index("rf0").unwrap();
    ip(&["link", "add", "br1", "up", "type", "bridge"]);
    write(&place, &tap.replace("br0", "br1").replace("10.0.0.1", "10.0.0.2").replace("1400", "1300"));
    let plan = place.ctl(&["reload"]);
    assert!(plan.contains("bridge \"br0\" -> \"br1\"") && !plan.contains("anew"), "{plan}");
    let shown = link("rf0");
    assert!(shown.contains("master br1") && shown.contains("10.0.0.2/24"), "{shown}");
    assert!(!shown.contains("10.0.0.1/24"), "an address that the file does not have any more goes: {shown}");
    assert_eq!(netif::mtu("rf0").unwrap(), 1300);
    write(&place, &tap.replace("br0", "br1"));
    place.ctl(&["reload"]);
    write(&place, &tap.replace("br0", "lo"));
    let words = place.refused(&["reload"]);
    assert!(words.contains("lo is no bridge; it is as it was before"), "{words}");
    assert!(link("rf0").contains("master br1"), "{}", link("rf0"));
    write(&place, &tap.replace("bridge = 'br0'\n", ""));
    place.ctl(&["reload"]);
    assert!(!link("rf0").contains("master"), "{}", link("rf0"));
    write(&place, &tap);
    place.ctl(&["reload"]);
    assert!(is_set_up() && netif::index("rf0").unwrap() == before);
    // The MTU of a tap holds at once, and is no matter of trust.
    assert!(place.ctl(&["set", "rf0", "mtu=1350"]).contains("  mtu=1350: holds now\nkept: in "));
    assert_eq!(netif::mtu("rf0").unwrap(), 1350);
    let unset = place.ctl(&["unset", "rf0", "mtu"]);
    assert!(
        unset
            .contains("  mtu is not set: the interface keeps the value that it has, until it is made anew\n"),
        "{unset}"
    );
    assert_eq!(netif::mtu("rf0").unwrap(), 1350);
    if may("sandbox", is_root()) {
        let words = place.refused(&["set", "rf0", "bridge=br1"]);
        assert!(words.contains("only as its configuration file has them"), "{words}");
        assert!(is_set_up());
    }
    // Packets pass.
    let mut a = switch.plug("a", 1, Options::default());
    a.send(&frame(Mac(mac), a.mac, 60, 1));
    switch.until("rf0", "a frame arrives", |port| port.counters["tx_packets"] > 0);
    // What is set up so must be in the file.
    if may("sandbox", is_root()) {
        let words = place.refused(&["add", "tap:rf1,bridge=br0"]);
        assert!(words.contains("only as its configuration file has them"), "{words}");
    }
    let removed = place.ctl(&["remove", "rf0"]);
    assert!(
        removed.contains("the interface rf0 stays until you remove it (ip link delete rf0)"),
        "{removed}"
    );
    assert!(netif::index("rf0").unwrap().is_some(), "a persistent tap is removed by hand");
    switch.stop();
}

#[test]
fn an_uplink_survives_everything() {
    in_a_namespace(an_uplink_survives_everything_in_the_namespace);
}

#[test]
fn taps_come_and_go() {
    in_a_namespace(taps_come_and_go_in_the_namespace);
}

/// Each sends the other a frame, and receives it, whatever else comes before it.
fn converse_among_others(a: &mut Guest, b: &mut Guest, number: u32) {
    for _ in 0..2 {
        let sent = frame(b.mac, a.mac, 100, number);
        a.send(&sent);
        while b.receive_plain() != sent {}
        std::mem::swap(a, b);
    }
}

#[test]
fn a_socket_has_the_permissions_that_its_port_asks_for() {
    let place = Place::new();
    let switch = start(&place, &table(&place, "c", "socket_mode = '0600'\n"));
    let access = |name: &str| {
        let made = fs::metadata(place.socket(name)).unwrap();
        (made.mode() & 0o777, made.gid())
    };
    assert_eq!(access("c").0, 0o600);
    let owner = if may("give files away", is_root()) { ",socket_owner=root,socket_group=9876" } else { "" };
    place.ctl(&["add", &format!("vhost-user:{},socket_mode=0666{owner}", place.socket("d").display())]);
    assert_eq!(access("d").0, 0o666);
    if is_root() {
        assert_eq!(access("d").1, 9876);
    }
    let flag = format!("vhost-user:{},socket_group=nobody-has-this", place.socket("e").display());
    assert!(place.refused(&["add", &flag]).contains("there is no group \"nobody-has-this\" in /etc/group"));
    assert_eq!(place.files(), ["a.sock", "b.sock", "c.sock", "control", "d.sock", "rf.toml"]);
    switch.stop();
}

#[test]
fn a_port_that_is_drained_takes_nothing_more_and_gives_away_what_it_has() {
    let place = Place::new();
    let switch =
        start(&place, &[table(&place, "c", "rate_out = '2mbit'\n"), table(&place, "d", "")].concat());
    let (mut a, mut b) = bystanders(&switch);
    let mut c = switch.plug("c", 3, Options::default());
    acquaint(&mut [&mut a, &mut b, &mut c]);
    // More than its rate lets pass at once waits in the shaper; what c itself has sent is on its way.
    const WAITING: u32 = 300;
    for number in 0..WAITING {
        a.send_unchecked(&frame(c.mac, a.mac, 1400, number));
    }
    switch.until("a", "has sent it all", |port| port.counters["rx_packets"] >= u64::from(WAITING));
    c.send_numbered(b.mac, 0, 20);
    let control = place.control();
    let drain = Request::Remove { port: "c".to_owned(), if_exists: false, drain: Some(20), runtime: false };
    let drained = std::thread::spawn(move || control::call(&control, &drain));
    switch.process.until_logged("the port is drained before it is removed");
    // Others are answered meanwhile, and talk; no frame is sent to it any more.
    assert_eq!(names(&switch), ["a", "b", "c", "d"]);
    a.send_unchecked(&frame(c.mac, a.mac, 100, 1000));
    switch.until("c", "takes nothing more", |port| port.drops["link-down"] > 0);
    // What waited comes, at its rate.
    let mut received = Vec::new();
    let mut dropped = 0;
    while !drained.is_finished() {
        if let Some(port) = switch.show().ports.iter().find(|port| port.name == "c") {
            dropped = port.drops["rate-out"];
        }
        c.pump();
        received.extend(std::iter::from_fn(|| c.take()).map(|packet| packet.frame));
    }
    let Ok(Answer::PortChanged(change)) = drained.join().unwrap() else { panic!("another answer") };
    assert_eq!((change.done, change.persistent), (PortAction::Removed, true));
    assert!(change.note.ends_with("; what was queued has gone out"), "{}", change.note);
    c.pump();
    received.extend(std::iter::from_fn(|| c.take()).map(|packet| packet.frame));
    let of_a = received.iter().filter(|frame| frame[6..12] == a.mac.0);
    let (waited, late): (Vec<_>, Vec<_>) = of_a.partition(|frame| frame.len() == 1400);
    let all = (waited.len() as u64 + dropped, late.len());
    assert_eq!(all, (u64::from(WAITING), 0), "{dropped} were dropped by the shaper");
    for number in 0..20 {
        assert_eq!(b.receive_plain(), frame(b.mac, c.mac, 100, number));
    }
    assert_eq!(names(&switch), ["a", "b", "d"]);
    // A port that has nothing is removed at once; one that would go on for ever is removed when the time is up.
    let idle = place.ctl(&["remove", "d", "--drain"]);
    assert!(idle.ends_with("; what was queued has gone out\n"), "{idle}");
    place.ctl(&["set", "b", "rate_in_packets=1pps", "--runtime"]);
    // The least burst that there may be is 128 packets, its default 256: the fifth batch waits in the ring.
    for batch in 0..4 {
        b.send_numbered(a.mac, 60 * batch, 60);
        b.drain();
    }
    b.send_numbered(a.mac, 240, 60);
    let cut = place.ctl(&["remove", "b", "--drain=1", "--runtime"]);
    assert!(cut.ends_with("; after 1 s it still had packets to send or to take, which are lost\n"), "{cut}");
    assert_eq!(place.ctl(&["remove", "x", "--if-exists", "--drain=3"]), "x: there is no such port\n");
    assert!(place.refused(&["remove", "x", "--drain"]).contains("there is no port \"x\""));
    switch.stop();
}

/// The state that a thousand changes should lead to: the ports beside `a` and `b`, with their keys.
type Model = BTreeMap<String, String>;

#[test]
fn a_thousand_changes_lose_no_packet_of_others_and_leak_nothing() {
    let place = Place::new();
    let switch = start(&place, "");
    let (mut a, mut b) = bystanders(&switch);
    let descriptors = switch.process.descriptors();
    let mappings = switch.process.mappings("ringferry-driver");
    let threads = || fs::read_dir(format!("/proc/{}/task", switch.process.pid())).unwrap().count();
    let before = threads();
    let mut rng = fastrand::Rng::with_seed(1);
    let mut model = Model::new();
    let mut plugged: BTreeMap<String, Guest> = BTreeMap::new();
    let call = |request: Request| control::call(&place.control(), &request);
    for change in 0..1000_u32 {
        let name = format!("p{}", rng.u8(..6));
        let keys = ["", "vlan = 5\n", "isolated = true\n", "mtu = 9000\n"][rng.usize(..4)];
        match rng.u8(..12) {
            0..4 => {
                let flag = keys.trim_end().replace(" = ", "=");
                let comma = if flag.is_empty() { "" } else { "," };
                let port = format!("vhost-user:{}{comma}{flag}", place.socket(&name).display());
                let answer = call(Request::Add { port, runtime: false });
                let same = model.get(&name).map(|there| there == keys);
                match (same, answer) {
                    (None, Ok(Answer::PortChanged(change))) => {
                        assert_eq!(
                            (change.done, change.persistent),
                            (PortAction::Added, true),
                            "{}",
                            change.note
                        );
                        model.insert(name, keys.to_owned());
                    }
                    (Some(true), Ok(Answer::PortChanged(change))) => {
                        assert_eq!(change.done, PortAction::Nothing);
                    }
                    (Some(false), Err(_)) => {}
                    (same, answer) => panic!("{name} {keys:?} {same:?}: {answer:?}"),
                }
            }
            4..7 => {
                // Some ports are drained before, whether a guest is there or not.
                let drain = rng.bool().then_some(5);
                let removed =
                    call(Request::Remove { port: name.clone(), if_exists: true, drain, runtime: false });
                let Answer::PortChanged(removed) = removed.unwrap() else { panic!("another answer") };
                assert_eq!(removed.done == PortAction::Removed, model.remove(&name).is_some());
                plugged.remove(&name);
            }
            7 => {
                if rng.bool() {
                    model.insert(name, keys.to_owned());
                } else {
                    model.remove(&name);
                }
                let tables = model.iter().map(|(name, keys)| table(&place, name, keys));
                write(&place, &tables.collect::<String>());
                let Ok(Answer::Reloaded(reload)) = call(Request::Reload { dry_run: false }) else {
                    panic!("the file is valid")
                };
                assert!(!reload.has_failed() && reload.steps.len() <= 1, "{reload:?}");
                for step in reload.steps.iter().filter(|step| step.action != PortAction::Changed) {
                    plugged.remove(&step.port);
                }
            }
            8 | 9 => {
                // Settings change in two steps, of which the first or the second may have nothing to do.
                let key = |keys: &str| keys.split(" = ").next().unwrap().to_owned();
                let before = model.get(&name).cloned();
                let unset = before.as_deref().filter(|keys| !keys.is_empty()).map(key);
                let (port, runtime) = (name.clone(), false);
                if let Some(key) = unset {
                    let unset = Request::Unset { port: port.clone(), keys: vec![key], runtime };
                    let Ok(Answer::SettingsChanged(unset)) = call(unset) else { panic!("it is set") };
                    assert!(unset.persistent && unset.rules.is_empty(), "{unset:?}");
                }
                if !keys.is_empty() {
                    let settings = vec![keys.trim_end().replace(" = ", "=")];
                    match (before.is_some(), call(Request::Set { port, settings, runtime })) {
                        (true, Ok(Answer::SettingsChanged(set))) => {
                            assert!(set.persistent && set.rules.len() + set.settings.len() == 1, "{set:?}");
                        }
                        (false, Err(_)) => {}
                        (there, answer) => panic!("{name} {keys:?} {there}: {answer:?}"),
                    }
                }
                if before.is_some() {
                    model.insert(name, keys.to_owned());
                }
            }
            10 => {
                if model.contains_key(&name) && !plugged.contains_key(&name) {
                    let guest = switch.plug(&name, 10 + change as u8 % 100, Options::default());
                    plugged.insert(name, guest);
                }
            }
            _ => {
                if let Some(guest) = plugged.get_mut(&name) {
                    guest.send_unchecked(&frame(a.mac, guest.mac, 64, 0));
                }
            }
        }
        converse_among_others(&mut a, &mut b, change);
    }
    let mut found: Vec<_> = names(&switch);
    found.sort();
    let wanted: Vec<_> = ["a", "b"].into_iter().map(str::to_owned).chain(model.keys().cloned()).collect();
    assert_eq!(found, wanted);
    for name in model.keys() {
        place.ctl(&["remove", name]);
    }
    drop(plugged);
    switch.process.until_no_more_than(&descriptors);
    assert_eq!(switch.process.mappings("ringferry-driver"), mappings);
    // Each port has a thread that closes what its front ends have passed; it ends when that is done.
    eventually("the threads of removed ports end", || (threads() == before).then_some(()));
    for port in ["a", "b"] {
        assert_eq!(switch.port(port).counters["connections"], 1);
    }
    switch.assert_no_drops();
    switch.stop();
    assert_eq!(place.files(), ["rf.toml"]);
}

#[test]
fn a_group_that_there_is_not_costs_no_guest_its_connection() {
    let place = Place::new();
    write(&place, "");
    let switch = start(&place, "");
    let guest = switch.plug("a", 1, Options::default());
    let text = fs::read_to_string(file(&place)).unwrap();
    let group = table(&place, "a", "socket_group = 'no-such-group'\n");
    fs::write(file(&place), text.replacen(&table(&place, "a", ""), &group, 1)).unwrap();
    for words in [&["reload", "--dry-run"][..], &["reload"]] {
        let said = place.refused(words);
        assert!(said.contains("port a: socket_group: there is no group \"no-such-group\""), "{said}");
    }
    assert_eq!(switch.port("a").counters["connections"], 1);
    drop(guest);
    switch.stop();
}

#[test]
fn a_configuration_is_checked_without_a_start() {
    let place = Place::new();
    write(&place, "");
    let check = || ringferry().arg("run").arg(file(&place)).arg("--check").output().unwrap();
    let good = check();
    assert_eq!(String::from_utf8_lossy(&good.stdout), "the configuration is valid; it has 2 ports\n");
    assert!(good.status.success());
    let as_json = || ringferry().arg("run").arg(file(&place)).args(["--check", "--json"]).output().unwrap();
    let described = |output: &Output| {
        let text = String::from_utf8(output.stdout.clone()).unwrap();
        assert_described(&["run", "--check", "--json"], &text);
        serde_json::from_str::<serde_json::Value>(&text).unwrap()
    };
    assert_eq!(described(&as_json()), json!({"valid": true, "ports": 2, "problems": [], "notes": []}));
    write(&place, "[[port]]\nkind = 'tun'\n");
    let bad = as_json();
    let found = described(&bad);
    let problem = &found["problems"][0];
    assert!(!bad.status.success() && found["valid"] == false, "{found}");
    assert!(
        problem["place"].as_str().unwrap().contains(".toml:") && problem["key"] == "port.kind",
        "{found}"
    );
    let bad = check();
    assert!(
        !bad.status.success()
            && String::from_utf8_lossy(&bad.stderr).contains("\"tun\" is not a kind of port")
    );
    // What the host has not.
    let socket = "[[port]]\nkind = 'vhost-user'\nsocket = '/nowhere/vm0.sock'\n";
    write(&place, &format!("{socket}socket_group = 'no-such-group'\nsocket_owner = 'root'\n"));
    let bad = String::from_utf8(check().stderr).unwrap();
    assert!(
        bad.contains("port vm0: socket_group: there is no group \"no-such-group\" in /etc/group"),
        "{bad}"
    );
    write(&place, socket);
    let output = check();
    let note = String::from_utf8(output.stderr).unwrap();
    assert!(
        output.status.success() && note.contains("port vm0: there is no directory /nowhere now"),
        "{note}"
    );
    assert_eq!(place.files(), ["rf.toml"], "nothing was opened");
}

fn a_back_end_by_convention_in_the_namespace() {
    let place = Place::new();
    let capabilities = ringferry().args(["run", "--print-capabilities"]).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&capabilities.stdout), "{\"type\":\"net\"}\n");
    let socket = format!("--socket-path={}", place.socket("vm0").display());
    let switch =
        place.start(ringferry().arg("run").arg("--control").arg(place.control()).arg(socket), Vec::new());
    assert_eq!(names(&switch), ["vm0", "rf-vm0"]);
    let mut vm0 = switch.plug("vm0", 1, Options::default());
    vm0.send(&frame(Mac(netif::mac("rf-vm0").unwrap()), vm0.mac, 60, 1));
    switch.until("rf-vm0", "a frame arrives", |port| port.counters["tx_packets"] > 0);
    switch.stop();
}

#[test]
fn a_management_program_starts_a_back_end_by_convention() {
    in_a_namespace(a_back_end_by_convention_in_the_namespace);
}

/// The kernel would divide the packets of such a tap among the two, and neither would know.
#[test]
fn a_tap_with_several_queues_has_one_switch() {
    let may_mount = || {
        let words = ["--map-root-user", "--net", "--mount", "mount", "-t", "sysfs", "s", "/sys"];
        Command::new("unshare").args(words).status().is_ok_and(|status| status.success())
    };
    if !may("needs user namespaces in which /sys can be mounted", may_mount()) {
        return;
    }
    let place = Place::new();
    let script = "mount -t sysfs s /sys
        \"$1\" run --workers 2 --control \"$2/one\" --port tap:rf0 2> \"$2/log\" &
        for try in $(seq 600); do \"$1\" ctl --control \"$2/one\" show > /dev/null 2>&1 && break; sleep 0.05; done
        \"$1\" run --workers 2 --control \"$2/two\" --port tap:rf0
        echo status $?
        kill $!; wait";
    let mut command = Command::new("unshare");
    command.args(["--map-root-user", "--net", "--mount", "sh", "-c", script, "sh"]);
    let output = command.arg(ringferry().get_program()).arg(place.path()).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("tap rf0 is in use"), "{said}");
    assert_eq!(output.stdout, b"status 1\n");
}

/// A port that comes and goes leaves nothing of itself in the heap.
#[test]
fn l_ports_that_come_and_go_leave_no_memory_behind() {
    let place = Place::new();
    let switch = place.switch(&["a"]);
    let port = format!("vhost-user:{}", place.socket("l").display());
    let heap = || {
        let status = fs::read_to_string(format!("/proc/{}/status", switch.process.pid())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap()
    };
    let come_and_go = || {
        for _ in 0..150 {
            let add = Request::Add { port: port.clone(), runtime: true };
            control::call(&place.control(), &add).unwrap();
            let remove =
                Request::Remove { port: "l".to_owned(), if_exists: false, drain: None, runtime: true };
            control::call(&place.control(), &remove).unwrap();
        }
        heap()
    };
    // It was 64 KiB for each, so nine MiB more.
    let before = come_and_go();
    let after = come_and_go();
    assert!(after < before + 3000, "{before} kB, then {after}");
    switch.stop();
}
