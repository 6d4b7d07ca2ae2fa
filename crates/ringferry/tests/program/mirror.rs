//! Changes of what passes, by `ringferry ctl`: mirrors, links, and addresses that are forgotten or made static.

use std::fs;
use std::os::fd::AsFd;

use ringferry_control::snapshot::PortState;
use ringferry_packet::ether::Mac;
use ringferry_rig::frames::{frame, mac};
use ringferry_rig::guest::{Options, acquaint, converse};
use ringferry_rig::process::{PATIENCE, readable};
use ringferry_rig::switch::Place;
use ringferry_sys::lent::LentStream;
use ringferry_sys::socket::Stream;
use ringferry_vhost_user::message::{BACKEND_CONFIG_CHANGE, VERSION};
use ringferry_vhost_user::{Frontend, ProtocolFeatures};

#[test]
fn a_probe_gets_copies_until_the_mirror_is_removed() {
    let place = Place::new();
    let switch = place.switch(&["a", "b", "probe"]);
    let mut a = switch.plug("a", 1, Options::default());
    let mut b = switch.plug("b", 2, Options::default());
    let mut probe = switch.plug("probe", 3, Options::default());
    acquaint(&mut [&mut a, &mut b, &mut probe]);
    let added = place.ctl(&["mirror", "add", "a", "probe"]);
    assert!(added.lines().nth(1).unwrap().starts_with("a "), "{added}");
    let (there, back) = (frame(b.mac, a.mac, 100, 1), frame(a.mac, b.mac, 200, 2));
    a.send(&there);
    assert_eq!((b.receive_plain(), probe.receive_plain()), (there.clone(), there.clone()));
    b.send(&back);
    assert_eq!((a.receive_plain(), probe.receive_plain()), (back.clone(), back));
    let listed: serde_json::Value = serde_json::from_str(&place.ctl(&["mirror", "list", "--json"])).unwrap();
    assert_eq!((&listed["mirrors"][0]["copied"], &listed["mirrors"][0]["lost"]), (&2.into(), &0.into()));
    for (words, expected) in [
        (&["a", "a"][..], "cannot be mirrored to itself"),
        (&["a", "vm9"], "there is no port \"vm9\" now; the ports are: a, b, probe"),
        (&["a", "probe"], "is mirrored to \"probe\" already"),
        (&["probe", "b"], "a port that gets copies cannot be mirrored itself"),
        (&["b", "a"], "a port that gets copies cannot be mirrored itself"),
        (&["a", "b", "--vlan", "4095"], "4095 is no VLAN"),
    ] {
        let text = place.refused_in_a_line(&[&["mirror", "add"], words].concat());
        assert!(text.contains(expected), "{text}");
    }
    assert_eq!(place.ctl(&["mirror", "remove", "a", "probe"]), "no port is mirrored\n");
    assert!(
        place
            .refused_in_a_line(&["mirror", "remove", "a", "probe"])
            .contains("\"a\" is not mirrored to \"probe\"")
    );
    a.send(&there);
    assert_eq!(b.receive_plain(), there);
    // The first that the probe sees since.
    let last = frame(Mac::BROADCAST, a.mac, 60, 3);
    a.send(&last);
    assert_eq!(probe.receive_plain(), last);
    // Whoever gets the name of either port later has nothing to do with the mirror.
    for (removed, socket) in [("probe", place.socket("probe")), ("a", place.socket("a"))] {
        place.ctl(&["mirror", "add", "a", "probe"]);
        let said = place.ctl(&["remove", removed]);
        assert!(said.contains("a is mirrored to probe no more"), "{said}");
        place.ctl(&["add", &format!("vhost-user:{}", socket.display())]);
        assert_eq!(place.ctl(&["mirror", "list"]), "no port is mirrored\n");
    }
    switch.stop();
}

#[test]
fn a_link_is_taken_down_and_up_and_stays_as_it_is_when_the_port_is_opened_anew() {
    let place = Place::new();
    let switch = super::ports::start(&place, "");
    let mut a = switch.plug("a", 1, Options::default());
    let mut b = switch.plug("b", 2, Options::default());
    acquaint(&mut [&mut a, &mut b]);
    let said = place.ctl(&["link", "b", "down"]);
    assert!(said.starts_with("b is down: no packet passes it; whoever is behind it was not told"), "{said}");
    switch.until_state("b", PortState::AdminDown);
    a.send(&frame(b.mac, a.mac, 60, 1));
    b.send(&frame(a.mac, b.mac, 60, 2));
    switch.until("b", "both are dropped", |port| port.drops["link-down"] == 2);
    drop(b);
    let text = fs::read_to_string(super::ports::file(&place)).unwrap();
    fs::write(super::ports::file(&place), text + "socket_mode = '0600'\n").unwrap();
    let said = place.ctl(&["reload"]);
    assert!(said.contains("it is opened anew"), "{said}");
    switch.until_state("b", PortState::AdminDown);
    let mut b = ringferry_rig::guest::Guest::plug(switch.connect("b"), 2, Options::default());
    b.send(&frame(Mac::BROADCAST, b.mac, 60, 3));
    switch.until("b", "it is dropped", |port| port.drops["link-down"] == 1);
    place.ctl(&["link", "b", "up"]);
    switch.until_state("b", PortState::Up);
    acquaint(&mut [&mut a, &mut b]);
    converse(&mut a, &mut b, 10, 30);
    assert!(place.refused_in_a_line(&["link", "vm9", "down"]).contains("there is no port \"vm9\" now"));
    // Whoever gets its name later is another one.
    place.ctl(&["link", "b", "down"]);
    let said = place.ctl(&["remove", "b"]);
    assert!(said.contains("that its link is down is forgotten with it"), "{said}");
    place.ctl(&["add", &format!("vhost-user:{}", place.socket("b").display())]);
    switch.until_state("b", PortState::Listening);
    switch.stop();
}

#[test]
fn a_front_end_that_takes_the_configuration_is_told_of_the_link() {
    let place = Place::new();
    let switch = place.switch(&["a,mac=52:54:00:00:00:07"]);
    let mut frontend = Frontend::new(switch.connect("a")).unwrap();
    frontend.set_owner().unwrap();
    let features = frontend.get_features().unwrap();
    frontend.get_protocol_features().unwrap();
    let wanted = ProtocolFeatures::CONFIG | ProtocolFeatures::BACKEND_REQ | ProtocolFeatures::REPLY_ACK;
    frontend.set_protocol_features(wanted).unwrap();
    frontend.set_features(features).unwrap();
    let (ours, theirs) = Stream::pair().unwrap();
    frontend.set_backend_req_fd(theirs.as_fd()).unwrap();
    let status = |frontend: &mut Frontend| {
        let mut status = [0; 2];
        frontend.get_config(6, &mut status).unwrap();
        u16::from_le_bytes(status)
    };
    assert_eq!(status(&mut frontend), 1);
    for (state, expected) in [("down", 0), ("up", 1)] {
        let said = place.ctl(&["link", "a", state]);
        assert!(said.ends_with("its guest was told\n"), "{said}");
        assert!(readable(&ours, PATIENCE));
        let mut message = [0; 64];
        assert_eq!(ours.recv_bytes(&mut message).unwrap(), 12);
        let words: Vec<u32> =
            message[..12].chunks(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect();
        assert_eq!(words, [BACKEND_CONFIG_CHANGE, VERSION, 0]);
        assert_eq!(status(&mut frontend), expected);
    }
    // Whoever passes a channel in which there is no room has nobody wait for that, whatever it does to the open file meanwhile.
    let full = [0; 4096];
    let lent = LentStream::of(theirs.as_fd().try_clone_to_owned().unwrap());
    while lent.send(&full).is_ok() {}
    drop(lent);
    assert!(place.ctl(&["link", "a", "up"]).contains("whoever is behind it was not told"));
    let flags = rustix::fs::fcntl_getfl(&theirs).unwrap();
    assert!(!flags.contains(rustix::fs::OFlags::NONBLOCK), "nothing that it could undo was relied on");
    assert_eq!(status(&mut frontend), 1);
    drop(theirs);
    // When nobody reads there any more, it is said so, and the session goes on.
    drop(ours);
    assert!(place.ctl(&["link", "a", "down"]).contains("whoever is behind it was not told"));
    assert_eq!(status(&mut frontend), 0);
    switch.stop();
}

#[test]
fn addresses_are_forgotten_and_made_static() {
    let place = Place::new();
    let switch = place.switch(&["a", "b", "c,trunk=10,native=0"]);
    let mut a = switch.plug("a", 1, Options::default());
    let mut b = switch.plug("b", 2, Options::default());
    let mut c = switch.plug("c", 3, Options::default());
    acquaint(&mut [&mut a, &mut b, &mut c]);
    assert_eq!(place.ctl(&["fdb", "flush", "--port", "a"]), "1 address forgotten\n");
    assert_eq!(place.ctl(&["fdb", "flush", "--port", "a"]), "0 addresses forgotten\n");
    let flushed: serde_json::Value = serde_json::from_str(&place.ctl(&[
        "fdb",
        "flush",
        "--vlan",
        "0",
        "--mac",
        &b.mac.to_string(),
        "--json",
    ]))
    .unwrap();
    assert_eq!(flushed["forgotten"], 1);
    // What nobody knows is flooded.
    let sent = frame(a.mac, b.mac, 80, 1);
    b.send(&sent);
    assert_eq!((a.receive_plain(), c.receive_plain()), (sent.clone(), sent));
    let address = mac(9).to_string();
    assert!(place.ctl(&["fdb", "add", &address, "b"]).contains(&format!("static_macs={address}")));
    let said = place.ctl(&["fdb", "add", &address, "c", "--vlan", "10", "--runtime"]);
    assert!(said.contains(&format!("static_macs={address}@10")), "{said}");
    assert!(place.refused_in_a_line(&["fdb", "add", &address, "a"]).contains("static"));
    assert!(
        place
            .refused_in_a_line(&["fdb", "del", &address])
            .contains("static in several VLANs: say which with --vlan")
    );
    // It stays, and frames for it go there alone.
    place.ctl(&["fdb", "flush"]);
    let sent = frame(mac(9), a.mac, 90, 2);
    a.send(&sent);
    assert_eq!(b.receive_plain(), sent);
    assert_eq!(place.ctl(&["fdb", "del", &address, "--vlan", "10"]).lines().next(), Some("rules of c:"));
    let gone = place.ctl(&["fdb", "del", &address]);
    assert!(gone.starts_with("b has no rules\n"), "{gone}");
    assert!(place.refused_in_a_line(&["fdb", "del", &address]).contains("is no static address"));
    assert!(place.refused_in_a_line(&["fdb", "flush", "--mac", "52:54"]).contains("\"52:54\""));
    assert!(place.refused_in_a_line(&["fdb", "flush", "--port", "vm9"]).contains("there is no port \"vm9\""));
    // The frame for a static address of b was not for c.
    let last = frame(Mac::BROADCAST, a.mac, 60, 3);
    a.send(&last);
    assert_eq!(c.receive_plain(), last);
    switch.stop();
}
