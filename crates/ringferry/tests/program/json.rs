//! What every command prints with `--json` is what its schema in docs/schema/ describes. `Place::ctl` and `Process::wait` hold all JSON that they read
//! against the schema of the command, so every other test does the same for what it asks. Here each command is asked once, with as much in its answer as can be.
//!
//! `ringferry netfront` and `demo` print theirs in the tests that are about them.

use std::net::TcpListener;

use ringferry_rig::guest::{Options, acquaint};
use ringferry_rig::process::{Process, in_a_namespace};
use ringferry_rig::schema::assert_described;
use ringferry_rig::switch::{Place, ringferry};
use ringferry_sys::process::Spawn;
use rustix::process::Signal;

/// Runs `ringferry` with these words to its end, whatever that is, and holds what it prints against the schema.
#[track_caller]
fn described(words: &[&str]) -> String {
    let output = ringferry().args(words).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert_described(words, &text);
    text
}

#[test]
fn every_answer_of_ctl_is_as_its_schema_says() {
    let place = Place::new();
    let file = place.path().join("rf.toml");
    let table = |name: &str, keys: &str| {
        format!("[[port]]\nkind = 'vhost-user'\nsocket = {:?}\n{keys}\n", place.socket(name))
    };
    let [a, b] = ["a", "b"].map(|name| table(name, ""));
    std::fs::write(&file, format!("{a}{b}")).unwrap();
    let switch =
        place.start(ringferry().arg("run").arg(&file).arg("--control").arg(place.control()), Vec::new());
    let mut a = switch.plug("a", 1, Options::default());
    let mut b = switch.plug("b", 2, Options::default());
    acquaint(&mut [&mut a, &mut b]);
    let port = format!("vhost-user:{},vlan=10", place.socket("c").display());
    for words in [
        &["show", "--json"][..],
        &["show", "a", "--json"],
        &["show", "--json", "--watch", "1", "--count", "2"],
        &["channels", "a", "--json"],
        &["steering", "a", "--json"],
        &["assign", "a", "0", "0", "--json"],
        &["stats", "a", "--queues", "--json"],
        &["set", "a", "vlan=10", "rate_in=1gbit", "mtu=1400", "worker=0", "--json"],
        &["rules", "a", "--json"],
        &["why", "a", "--json"],
        &["why", "a", "b", "--json"],
        &["explain", "a", "--json"],
        &["trace", "a", "b", "tcp4", "--gso", "1448", "--json"],
        &["trace", "a", "broadcast", "arp", "--json"],
        &["unset", "a", "vlan", "mtu", "--json"],
        &["fdb", "add", "52:54:00:00:00:09", "b", "--vlan", "10", "--json"],
        &["fdb", "--json"],
        &["fdb", "del", "52:54:00:00:00:09", "--json"],
        &["fdb", "flush", "--json"],
        &["mirror", "add", "a", "b", "--direction", "in", "--vlan", "7", "--json"],
        &["mirror", "list", "--json"],
        &["mirror", "--json"],
        &["mirror", "remove", "a", "b", "--json"],
        &["link", "b", "down", "--json"],
        &["why", "b", "--json"],
        &["trace", "a", "b", "--json"],
        &["link", "b", "up", "--json"],
        &["add", &port, "--json"],
        &["show", "--json"],
        &["remove", "c", "--json"],
        &["remove", "c", "--if-exists", "--json"],
    ] {
        place.ctl(words);
    }
    std::fs::write(&file, table("a", "") + &table("b", "vlan = 3") + &table("d", "")).unwrap();
    place.ctl(&["reload", "--dry-run", "--json"]);
    place.ctl(&["reload", "--json"]);

    let control = place.control();
    let control = control.to_str().unwrap();
    for words in [
        &["ctl", "--control", control, "show", "e", "--json"][..],
        &["ctl", "--control", "/nonexistent/control", "why", "a", "--json"],
        &["top", "--control", control, "--json", "--once"],
        &["top", "a", "--control", control, "--json", "--once"],
        &["top", "--control", "/nonexistent/control", "--json", "--once"],
        &["capture", "--control", control, "--list", "--json"],
        &["capture", "a", "--control", control, "-w", "/dev/null", "--duration", "100ms", "--json"],
    ] {
        described(words);
    }
    switch.stop();
}

#[test]
fn a_guest_prints_what_its_schemas_say() {
    in_a_namespace(|| {
        let place = Place::new();
        let switch = place.switch(&["a"]);
        let control = place.path().join("guest.ctl");
        let mut command = ringferry();
        command.args(["guest", "--tap", "eth0", "--address", "10.9.0.1/24", "--json", "--socket"]);
        command.arg(place.socket("a")).arg("--control").arg(&control);
        let mut guest = Process::start(&mut command, Spawn::default());
        guest.until_logged("the link is up");
        let control = control.to_str().unwrap();
        let shown = described(&["ctl", "--control", control, "show", "--json"]);
        assert!(shown.contains("\"steering\""), "{shown}");
        for command in ["channels", "steering", "stats"] {
            described(&["ctl", "--control", control, command, "eth0", "--json"]);
        }
        let refused = described(&["ctl", "--control", control, "fdb", "--json"]);
        assert!(refused.contains("not-supported"), "{refused}");
        guest.signal(Signal::TERM);
        let (status, output) = guest.wait();
        assert!(status.success() && output.contains("\"rx_packets\""), "{output}");
        switch.stop();
    });
}

#[test]
fn reports_of_traffic_and_their_progress_are_as_their_schemas_say() {
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
    let mut server = ringferry();
    server.args(["traffic", "server", "--bind", "127.0.0.1", "--port", &free]);
    let server = Process::start(&mut server, Spawn::default());
    for mode in ["tcp", "tcp-reverse", "tcp-both", "udp", "rr", "crr"] {
        let words =
            ["traffic", "client", "--to", "127.0.0.1", "--port", &free, "--mode", mode, "--wait", "10"];
        let mut client = ringferry();
        client.args(words).args(["--seconds", "0.6", "--json", "--progress-json"]);
        let mut client = Process::start(&mut client, Spawn::default());
        let (status, output) = client.wait();
        assert!(status.success() && output.contains("\"cpu_seconds\""), "{mode}: {:#?}", client.log());
        assert_described(&["traffic", "client", "--progress-json"], &client.log().join("\n"));
    }
    drop(server);
}
