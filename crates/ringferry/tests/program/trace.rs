//! `ringferry ctl trace` on a whole switch: what it says of a frame, against what becomes of one that a guest sends. That it is right about every rule is
//! tried in `crates/switch/src/plane/testing/tests/trace.rs`.

use ringferry_control::trace::{Trace, TraceProtocol};
use ringferry_packet::ether::Mac;
use ringferry_packet::vnet::Header;
use ringferry_rig::frames::{frame, mac};
use ringferry_rig::guest::{Options, acquaint};
use ringferry_rig::switch::{Place, ringferry};

/// Traces a frame.
#[track_caller]
fn trace(place: &Place, words: &[&str]) -> Trace {
    serde_json::from_str(&place.ctl(&[&["trace", "--json"], words].concat())).unwrap()
}

/// Returns what is said when a frame cannot be traced: one line.
#[track_caller]
fn refused(place: &Place, words: &[&str]) -> String {
    let output = ringferry()
        .arg("ctl")
        .arg("--control")
        .arg(place.control())
        .arg("trace")
        .args(words)
        .output()
        .unwrap();
    assert!(!output.status.success() && output.stdout.is_empty(), "{words:?}");
    let said = String::from_utf8(output.stderr).unwrap();
    said.lines().next().unwrap_or_default().to_owned()
}

/// The ports that would get a frame, and where it would be dropped and why.
fn ends(trace: &Trace) -> (Vec<&str>, Vec<(&str, &str)>) {
    let delivered = trace.delivered.iter().map(|delivery| &*delivery.port).collect();
    (delivered, trace.dropped.iter().map(|drop| (&*drop.port, &*drop.reason)).collect())
}

#[test]
fn an_imaginary_frame_ends_where_a_real_one_does() {
    let place = Place::new();
    let switch = place.switch(&["a", "b", "c"]);
    let mut a = switch.plug("a", 1, Options::default());
    let mut b = switch.plug("b", 2, Options::default());
    acquaint(&mut [&mut a, &mut b]);
    let counted = || {
        let ports = switch.show().ports;
        ports.into_iter().map(|port| (port.counters, port.drops)).collect::<Vec<_>>()
    };
    let before = counted();

    // To a port that is known, and to one behind which nobody is.
    let known = trace(&place, &["a", "b", "tcp4"]);
    assert_eq!(ends(&known), (vec!["b"], vec![]), "{}", known.to_text());
    assert_eq!(
        (&*known.frame.source, &*known.frame.destination),
        (&*mac(1).to_string(), &*mac(2).to_string())
    );
    assert_eq!(known.verdict, "Delivered to b.");
    let everybody = trace(&place, &["a", "broadcast", "arp"]);
    assert_eq!(ends(&everybody), (vec!["b"], vec![("c", "link-down")]), "{}", everybody.to_text());
    let own = trace(&place, &["a", &mac(1).to_string()]);
    assert_eq!(ends(&own), (vec![], vec![("a", "same-port")]));
    let text = place.ctl(&["trace", "a", "b", "udp6"]);
    assert!(
        text.starts_with("an imaginary frame from a (queue 0): ") && text.ends_with("\n\nDelivered to b.\n"),
        "{text}"
    );
    assert_eq!(counted(), before, "an imaginary frame leaves nothing");

    // Where the frame is flooded past the port that was named.
    switch.set("c", &["vlan=20"]);
    let past = trace(&place, &["a", "c"]);
    assert_eq!(past.verdict, "Delivered to b. c does not get it.", "{}", past.to_text());
    assert!(past.remedy.contains("`ringferry ctl rules c`"), "{}", past.remedy);
    place.ctl(&["unset", "c", "vlan"]);

    // Rules, each with the step that says so, and what becomes of a real frame then.
    switch.set("b", &["vlan=10"]);
    switch.set("a", &[&format!("allowed_macs={}", mac(1))]);
    let apart = trace(&place, &["a", "b"]);
    assert_eq!(ends(&apart), (vec![], vec![("b", "vlan")]), "{}", apart.to_text());
    let step = apart.steps.iter().find(|step| step.reason.is_some()).unwrap();
    assert_eq!(step.text, "b is an access port of VLAN 10, and the frame is in VLAN 0.");
    a.put(&Header::default(), &frame(mac(2), mac(1), 60, 0));
    a.flush();
    switch.until("b", "the real frame is dropped there", |port| port.drops.get("vlan") == Some(&1));
    let tagged = trace(&place, &["a", "b", "--vlan", "10"]);
    assert_eq!(ends(&tagged), (vec!["b"], vec![("c", "link-down")]), "{}", tagged.to_text());
    assert_eq!(tagged.remedy, "", "what becomes of the copy for c is another matter");
    assert!(tagged.to_text().contains("Its tag is removed."), "{}", tagged.to_text());
    let spoofed = trace(&place, &["a/52:54:00:00:00:99", "b"]);
    assert_eq!(ends(&spoofed), (vec![], vec![("a", "spoofed")]), "{}", spoofed.to_text());
    assert!(spoofed.remedy.contains("a source address of the guest's, add it"), "{}", spoofed.remedy);
    place.ctl(&["link", "b", "down"]);
    let down = trace(&place, &["a", "b", "--vlan", "10"]);
    assert!(ends(&down).1.contains(&("b", "link-down")), "{}", down.to_text());
    assert_eq!(down.remedy, "`ringferry ctl link b up`.");
    let unplugged = trace(&place, &["a", "c"]);
    assert_eq!(unplugged.remedy, "See `ringferry ctl why c`.", "{}", unplugged.to_text());
    switch.stop();
}

#[test]
fn a_frame_that_cannot_be_traced_is_refused_in_a_line() {
    let place = Place::new();
    let switch = place.switch(&["a", "b"]);
    for (words, said) in [
        (&["x", "b"][..], "ringferry: the switch refuses: there is no port \"x\"; the ports are: a, b"),
        (
            &["a", "x"],
            "ringferry: the switch refuses: \"x\" is neither a port, nor an address, nor broadcast; the ports are: a, b",
        ),
        (
            &["a", "b", "--vlan", "4095"],
            "ringferry: the switch refuses: 4095 is no VLAN: 0 (a tag for its priority alone) to 4094",
        ),
        (
            &["a", "b", "arp", "--gso", "100"],
            "ringferry: the switch refuses: a frame of arp has no offloads: --gso and --csum are for tcp4, tcp6, udp4 and udp6",
        ),
        (
            &["a", "b", "tcp4", "--size", "10"],
            "ringferry: the switch refuses: a frame of tcp4 like this has 54 to 65549 bytes, not 10",
        ),
        (
            &["a", "b", "raw", "--from-ip", "10.0.0.1"],
            "ringferry: the switch refuses: a frame of the protocol raw has no address 10.0.0.1: name another protocol",
        ),
        (
            &["a", "b", "tcp4", "--to-ip", "fd00::1"],
            "ringferry: the switch refuses: a frame of the protocol tcp4 has no address fd00::1: name another protocol",
        ),
    ] {
        assert_eq!(refused(&place, words), said);
    }
    // An address without a protocol is that of a packet that has some.
    let traced = trace(&place, &["a", "b", "--from-ip", "10.0.0.1"]);
    assert_eq!(traced.frame.protocol, TraceProtocol::Udp4);
    let error = refused(&place, &["a", "52:54:00:00:00"]);
    assert!(error.contains("`52:54:00:00:00` is not an Ethernet address"), "{error}");
    let error = refused(&place, &["a/52:54:00:00:00:zz", "b"]);
    assert!(
        error.contains("'a/52:54:00:00:00:zz'") && error.contains("is not an Ethernet address"),
        "{error}"
    );
    let error = refused(&place, &["a", "b", "tcp"]);
    assert!(error.contains("there is no protocol \"tcp\"; the protocols are: tcp4, tcp6, udp4"), "{error}");
    switch.stop();
}

#[test]
fn an_address_that_a_port_has_lost_is_said() {
    let place = Place::new();
    let switch = place.switch(&["a", "b", "c"]);
    let mut a = switch.plug("a", 1, Options::default());
    let mut b = switch.plug("b", 2, Options::default());
    let mut c = switch.plug("c", 3, Options::default());
    acquaint(&mut [&mut a, &mut b, &mut c]);
    let hello = frame(Mac::BROADCAST, mac(9), 60, 0);
    b.send(&hello);
    a.receive();
    c.receive();
    c.send(&hello);
    a.receive();
    b.receive();
    let moved = format!("{} was behind b and has moved to c", mac(9));
    let text = trace(&place, &["a", "b"]).to_text();
    assert!(text.contains(&moved) && text.contains("\nDelivered to b."), "{text}");
    for port in ["b", "c"] {
        let why = place.ctl(&["why", port]);
        assert!(why.contains(&moved), "{why}");
    }
    switch.stop();
}
