//! An interface of the host as a port, by AF_XDP: one end of a veth pair, at whose other end is a kernel.

use std::process::Command;

use ringferry_control::snapshot::PortState;
use ringferry_rig::process::{Process, eventually, in_a_namespace, may};
use ringferry_rig::switch::{Place, Switch, ringferry};
use ringferry_sys::process::Spawn;
use ringferry_sys::program;

use crate::kernels;
use crate::replace::replaced;

/// The host's address, at the other end of the pair, and the guest's.
const HOST: &str = "10.7.0.1";
const GUEST: &str = "10.7.0.2";

/// Carries out a test in a network namespace with a veth pair `va`, `vb`, of which `vb` has [`HOST`].
fn with_a_pair(test: fn()) {
    if may("needs the program ip", program::installed("ip").is_some()) {
        in_a_namespace(test);
    }
}

fn ip(arguments: &str) {
    let output = Command::new("ip").args(arguments.split(' ')).output().unwrap();
    assert!(output.status.success(), "ip {arguments}: {output:?}");
}

fn make_pair(options: &str) {
    ip(&format!("link add va {options} type veth peer name vb {options}"));
    ip(&format!("address add {HOST}/24 dev vb"));
    ip("link set vb up");
}

fn guest(place: &Place) -> Process {
    kernels::guest(place, GUEST)
}

fn client(guest: &Process, options: &str) -> Process {
    kernels::client(guest, HOST, &format!("--wait 10 {options}"))
}

/// Traffic from the guest's kernel to the host's; returns the report.
fn traffic(guest: &Process, options: &str) -> serde_json::Value {
    let _server = kernels::server(HOST);
    let mut client = client(guest, options);
    let (status, output) = client.wait();
    assert!(status.success(), "{:#?}", client.log());
    serde_json::from_str(&output).unwrap()
}

/// What `ringferry ctl` says that is refused.
#[track_caller]
fn refusal(place: &Place, words: &[&str]) -> String {
    let output = ringferry().arg("ctl").arg("--control").arg(place.control()).args(words).output().unwrap();
    assert!(!output.status.success(), "{output:?}");
    String::from_utf8(output.stderr).unwrap()
}

#[track_caller]
fn expect_whole(report: &serde_json::Value) {
    assert_eq!(report["corrupt"], 0, "{report}");
    assert!(report["bytes"].as_u64().unwrap() > 0, "{report}");
}

fn start<'a>(place: &'a Place, port: &str) -> Switch<'a> {
    place.start(place.run(&["a"]).args(["--port", port]), Vec::new())
}

/// The guest's packets are cut and finished for the interface, and the kernel's unfinished ones are finished for nobody who need not have that.
#[test]
fn two_kernels_talk_over_an_interface() {
    with_a_pair(|| {
        make_pair("mtu 1500");
        let place = Place::new();
        let switch = start(&place, "xdp:va");
        let guest = guest(&place);
        expect_whole(&traffic(&guest, "--mode tcp-both --seconds 0.5"));
        let report = traffic(&guest, "--mode udp --size 1400 --rate 20M --seconds 0.5");
        expect_whole(&report);
        let port = switch.port("va");
        assert_eq!((port.state, port.peer.as_str(), port.fault.as_deref()), (PortState::Up, "va", None));
        assert!(port.counters["rx_packets"] > 100 && port.counters["tx_segmented"] > 0, "{port:?}");
        assert_eq!(port.drops["rx-missed"] + port.drops["interface-busy"], 0, "{port:?}");
        switch.stop();
        // Nothing is left at the interface.
        let shown = Command::new("ip").args(["-details", "link", "show", "va"]).output().unwrap();
        let shown = String::from_utf8(shown.stdout).unwrap();
        assert!(!shown.contains("xdp") && shown.contains("promiscuity 0 "), "{shown}");
    });
}

#[test]
fn an_interface_with_a_large_mtu_carries_packets_in_several_frames() {
    with_a_pair(|| {
        make_pair("mtu 9000");
        let place = Place::new();
        let switch = start(&place, "xdp:va");
        // A guest that knows of a small MTU only sends nothing large.
        let mut command = ringferry();
        command.args([
            "guest",
            "--tap",
            "eth0",
            "--mtu",
            "9000",
            "--address",
            &format!("{GUEST}/24"),
            "--socket",
        ]);
        let guest =
            Process::start(command.arg(place.socket("a")), Spawn { new_net: true, ..Spawn::default() });
        guest.until_logged("the link is up");
        expect_whole(&traffic(&guest, "--mode udp --size 8900 --rate 50M --seconds 0.5"));
        expect_whole(&traffic(&guest, "--mode tcp-both --seconds 0.5"));
        assert_eq!((switch.port("va").mtu, switch.port("va").drops["tx-too-big"]), (9000, 0));
        place.ctl(&["set", "va", "mtu=8000"]);
        assert_eq!(switch.port("va").mtu, 8000);
        let output = refusal(&place, &["set", "va", "mtu=1500"]);
        assert!(output.contains("packets lie in another number of frames"), "{output}");
        assert_eq!(switch.port("va").mtu, 8000);
        switch.stop();
    });
}

/// Each is served by one worker, and may go to another meanwhile.
#[test]
fn several_queues_of_an_interface_are_shared_among_the_workers() {
    with_a_pair(|| {
        make_pair("numrxqueues 2 numtxqueues 2");
        let place = Place::new();
        let mut run = place.run(&["a"]);
        let switch = place.start(run.args(["--port", "xdp:va", "--workers", "2"]), Vec::new());
        let guest = guest(&place);
        expect_whole(&traffic(&guest, "--mode tcp-both --sessions 16 --seconds 0.5"));
        let pairs = switch.port("va").pairs;
        assert_eq!(pairs.iter().map(|pair| pair.worker).collect::<Vec<_>>(), [0, 1]);
        assert!(pairs.iter().all(|pair| pair.counters["tx_packets"] > 0), "{pairs:?}");
        let _server = kernels::server(HOST);
        let mut client = client(&guest, "--mode tcp-both --sessions 16 --seconds 1");
        for worker in ["1", "0", "1", "0"] {
            let count = || switch.port("va").counters["tx_packets"];
            let before = count();
            eventually("packets pass", || (count() > before + 100).then_some(()));
            place.ctl(&["assign", "va", "0", worker]);
        }
        let (status, output) = client.wait();
        assert!(status.success(), "{:#?}", client.log());
        expect_whole(&serde_json::from_str(&output).unwrap());
        switch.stop();
    });
}

/// Its sockets go along, so the interface never notices.
#[test]
fn a_switch_with_an_interface_is_replaced_and_no_packet_is_lost() {
    with_a_pair(|| {
        make_pair("mtu 1500");
        let place = Place::new();
        let mut switch = start(&place, "xdp:va");
        let guest = guest(&place);
        let _server = kernels::server(HOST);
        let mut client = client(&guest, "--mode udp --size 200 --rate 8M --seconds 3");
        for _ in 0..3 {
            let before = switch.port("va").counters["rx_packets"] + switch.port("va").counters["tx_packets"];
            eventually("packets pass", || {
                let now = switch.port("va").counters["rx_packets"] + switch.port("va").counters["tx_packets"];
                (now > before + 100).then_some(())
            });
            switch = replaced(&place, switch, |_| ());
        }
        let (status, output) = client.wait();
        assert!(status.success(), "{:#?}", client.log());
        let report: serde_json::Value = serde_json::from_str(&output).unwrap();
        // One that is away meanwhile keeps nobody from it.
        ip("link delete va");
        switch.until("va", "is missed", |port| port.fault.is_some());
        switch = replaced(&place, switch, |_| ());
        make_pair("mtu 1500");
        switch.until("va", "is there again", |port| port.fault.is_none() && port.state == PortState::Up);
        expect_whole(&report);
        assert_eq!((&report["lost"], &report["reordered"]), (&0.into(), &0.into()), "{report}");
        switch.stop();
    });
}

#[test]
fn an_interface_that_was_deleted_and_made_anew_is_opened_again() {
    with_a_pair(|| {
        make_pair("mtu 1500");
        let place = Place::new();
        let switch = start(&place, "xdp:va");
        let guest = guest(&place);
        ip("link delete va");
        let port = switch.until("va", "is missed", |port| port.fault.is_some());
        assert_eq!(port.state, PortState::Down);
        make_pair("mtu 1500");
        switch.until("va", "is there again", |port| port.fault.is_none() && port.state == PortState::Up);
        expect_whole(&traffic(&guest, "--mode tcp --seconds 0.2"));
        // Down and up again by hand.
        ip("link set va down");
        switch.until_state("va", PortState::Down);
        switch.process.until_logged("the interface va is down: no packet passes it");
        ip("link set va up");
        switch.until_state("va", PortState::Up);
        expect_whole(&traffic(&guest, "--mode tcp --seconds 0.2"));
        for (old, new) in [("va", "vc"), ("vc", "va")] {
            ip(&format!("link set {old} down"));
            ip(&format!("link set {old} name {new}"));
            ip(&format!("link set {new} up"));
            switch.until("va", "is up", |port| port.state == PortState::Up);
            expect_whole(&traffic(&guest, "--mode tcp --seconds 0.1"));
            let fault = switch.port("va").fault;
            assert_eq!(
                fault.is_some_and(|fault| fault.contains("its interface is called vc now")),
                new == "vc"
            );
        }
        ip("link set vb down");
        switch.process.until_logged("its interface has no carrier");
        assert_eq!(switch.port("va").state, PortState::Down);
        assert!(place.ctl(&["why", "va"]).contains("See to the cable"));
        switch.stop();
    });
}

#[test]
fn an_interface_that_cannot_be_had_is_one_clear_line() {
    with_a_pair(|| {
        make_pair("mtu 1500");
        let place = Place::new();
        let refused = |port: &str, expected: &str| {
            let output = place.run(&[]).args(["--port", port]).output().unwrap();
            let said = String::from_utf8(output.stderr).unwrap();
            assert!(!output.status.success() && said.contains(expected), "{said}");
            assert_eq!(said.trim().lines().count(), 1, "{said}");
        };
        refused("xdp:nowhere", "there is no interface nowhere");
        refused("xdp:va,mode=zero-copy", "the interface has no zero copy: leave mode out");
        refused("xdp:va,queues=9", ": ask for no more");
        let switch = start(&place, "xdp:va");
        let other = Place::new();
        let output = other.run(&[]).args(["--port", "xdp:va"]).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(said.contains("another XDP program is at the interface"), "{said}");
        // A switch in its sandbox takes no interface that its file does not have.
        let said = refusal(&place, &["add", "xdp:vb"]);
        assert!(said.contains("only those interfaces that are in its configuration file"), "{said}");
        switch.stop();
        // One that had none at its start has not the rights.
        let switch = place.switch(&["a"]);
        let said = refusal(&place, &["add", "xdp:va"]);
        assert!(said.contains("stop the switch and start it anew"), "{said}");
        switch.stop();
    });
}
