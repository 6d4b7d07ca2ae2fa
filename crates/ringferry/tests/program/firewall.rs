//! Firewalls of ports: what a guest's kernel reaches behind one, policies that change while it talks, and policies with mistakes.

use std::fs;
use std::net::UdpSocket;
use std::path::PathBuf;

use ringferry_rig::process::{Process, eventually, in_a_namespace};
use ringferry_rig::switch::{Place, Switch, ringferry};
use ringferry_sys::{namespace, netif};

use crate::kernels;
use crate::replace::replaced;

/// The host's address, at the tap, and the guest's.
const HOST: &str = "10.6.0.1";
const GUEST: &str = "10.6.0.2";

fn policy(place: &Place) -> PathBuf {
    place.path().join("policies/web.policy")
}

fn write(place: &Place, text: &str) {
    fs::create_dir_all(place.path().join("policies")).unwrap();
    fs::write(policy(place), text).unwrap();
}

/// A switch with a guest's port behind the firewall `web`, and a tap for the host.
fn start<'a>(place: &'a Place, text: &str) -> Switch<'a> {
    write(place, text);
    let file = place.path().join("rf.toml");
    let a = place.socket("a");
    fs::write(
        &file,
        format!(
            "[[port]]\nkind = 'vhost-user'\nsocket = {a:?}\nfirewall = 'web'\n[[port]]\nkind = 'tap'\ntap = 'rf0'\n"
        ),
    )
    .unwrap();
    let switch =
        place.start(ringferry().arg("run").arg(file).arg("--control").arg(place.control()), Vec::new());
    netif::add_address("rf0", HOST.parse().unwrap(), 24).unwrap();
    switch
}

fn guest(place: &Place) -> Process {
    kernels::guest(place, GUEST)
}

fn server() -> Process {
    kernels::server(HOST)
}

fn client(guest: &Process, options: &str) -> Process {
    kernels::client(guest, HOST, &format!("--wait 2 {options}"))
}

#[track_caller]
fn expect_whole(mut client: Process) {
    let (status, output) = client.wait();
    assert!(status.success(), "{:#?}", client.log());
    let report: serde_json::Value = serde_json::from_str(&output).unwrap();
    assert_eq!(report["corrupt"], 0, "{report}");
    assert!(report["bytes"].as_u64().unwrap() > 0, "{report}");
}

fn report(place: &Place, words: &[&str]) -> serde_json::Value {
    let words = [&["firewall", "a", "--json"], words].concat();
    serde_json::from_str(&place.ctl(&words)).unwrap()
}

/// Waits until packets have passed by a rule.
fn until_they_talk(place: &Place, rule: usize) {
    eventually("they talk", || {
        (report(place, &[])["rules"][rule]["packets"].as_u64() > Some(20)).then_some(())
    });
}

fn a_guest_reaches_what_its_policy_allows() {
    let place = Place::new();
    let switch = start(&place, "allow out tcp port 5210 to 10.6.0.0/24\n");
    let (guest, _server) = (guest(&place), server());
    expect_whole(client(&guest, "--mode tcp-both --seconds 0.3"));
    switch.set("a", &["firewall=web"]);
    let mut denied = client(&guest, "--mode udp --size 1000 --rate 1M --seconds 0.3");
    assert!(!denied.wait().0.success(), "only TCP is allowed");
    // Nobody reaches the guest, which is told apart from what it has opened.
    let socket = UdpSocket::bind((HOST, 0)).unwrap();
    let seen = eventually("a datagram for the guest is denied", || {
        socket.send_to(b"knock", (GUEST, 9)).unwrap();
        let seen = report(&place, &["--conversations"]);
        (seen["ingress"]["packets"] != 0).then_some(seen)
    });
    assert!(switch.drops("a", "firewall") > 0);
    let denials = seen["denials"].as_array().unwrap();
    assert!(denials.iter().any(|denial| denial["rule"] == "by default: egress deny"), "{seen}");
    let knock = denials.iter().find(|denial| denial["direction"] == "in").unwrap();
    assert_eq!((&knock["local"], &knock["local_port"]), (&GUEST.into(), &9.into()), "{seen}");
    let flow = &seen["conversations"][0];
    assert_eq!((&flow["remote"], &flow["remote_port"]), (&HOST.into(), &5210.into()), "{seen}");
    let text = place.ctl(&["firewall", "a", "--conversations=5"]);
    assert!(text.contains("line 1: allow out tcp port 5210 to 10.6.0.0/24"), "{text}");
    // The same as an audit log: a line each, told once.
    let lines = place.ctl(&["denials", "a"]);
    let lines: Vec<serde_json::Value> =
        lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let line = lines.iter().find(|line| line["local_port"] == 9).unwrap();
    assert_eq!(
        (&line["port"], &line["policy"], &line["passed"]),
        (&"a".into(), &"web".into(), &false.into())
    );
    ringferry_rig::schema::assert_described(&["ctl", "denials"], &line.to_string());
    // What would become of a frame, and by which rule.
    let trace = |words: &[&str]| {
        place.ctl(&[&["trace", "a", "rf0", "--from-ip", GUEST, "--to-ip", HOST], words].concat())
    };
    let (udp, tcp) = (trace(&["udp4"]), trace(&["tcp4", "--to-port", "5210"]));
    assert!(udp.contains("The firewall of a denies it: by default: egress deny."), "{udp}");
    assert!(tcp.contains("The firewall of a lets it out: line 1: allow out tcp port 5210"), "{tcp}");
    let why = place.ctl(&["why", "a", "rf0"]);
    assert!(!why.contains("would not arrive"), "{why}");
    switch.stop();
}

#[test]
fn a_guests_kernel_reaches_what_its_policy_allows() {
    in_a_namespace(a_guest_reaches_what_its_policy_allows);
}

fn a_policy_changes() {
    let place = Place::new();
    let switch = start(&place, "allow out tcp port 5210\n");
    let (guest, _server) = (guest(&place), server());
    let talking = client(&guest, "--mode tcp-reverse --seconds 1.5");
    until_they_talk(&place, 0);
    // Somebody adds a rule.
    write(&place, "deny out udp\nallow out tcp port 5210\n");
    let said = place.ctl(&["reload"]);
    assert!(said.contains("the policy of its firewall has changed"), "{said}");
    // And then makes mistakes.
    let mistakes =
        format!("allow out tcp port 5210\n{}allow out to 10.0.0.300\n", "# no rule\n".repeat(4709));
    write(&place, &mistakes);
    for words in [&["reload"][..], &["set", "a", "firewall=web"]] {
        let said = place.refused(words);
        assert!(
            said.contains("policies/web.policy:4711: \"10.0.0.300\" is not an IP address or network"),
            "{said}"
        );
        assert_eq!(said.trim_end().lines().count(), 1, "{said}");
    }
    fs::remove_file(policy(&place)).unwrap();
    let said = place.refused(&["reload"]);
    assert!(said.contains("policies/web.policy: cannot be read"), "{said}");
    let said = place.refused(&["set", "a", "firewall=none.such"]);
    assert!(said.contains("policies/none.such.policy: cannot be read"), "{said}");
    let rules = report(&place, &[])["rules"].clone();
    assert_eq!(rules[0]["text"], "deny out udp", "the old policy is in force");
    expect_whole(talking);
    assert_eq!(switch.drops("a", "firewall"), 0);
    // What is allowed no more ends.
    let mut talking = client(&guest, "--mode tcp-reverse --seconds 30");
    until_they_talk(&place, 1);
    write(&place, "egress deny\n");
    place.ctl(&["reload"]);
    switch.until("a", "packets are denied", |port| port.drops["firewall"] > 1);
    talking.signal(ringferry_sys::signal::Signal::TERM);
    place.ctl(&["unset", "a", "firewall"]);
    expect_whole(client(&guest, "--mode tcp --seconds 0.2"));
    assert!(place.refused(&["firewall", "a"]).contains("a has no firewall"));
    switch.stop();
}

#[test]
fn a_policy_changes_while_a_guest_talks_and_mistakes_change_nothing() {
    in_a_namespace(a_policy_changes);
}

fn a_replaced_switch_knows() {
    let place = Place::new();
    // What the host sends passes only as an answer.
    let switch = start(&place, "allow out tcp port 5210\n");
    let (guest, _server) = (guest(&place), server());
    let talking = client(&guest, "--mode tcp-reverse --seconds 1.5");
    until_they_talk(&place, 0);
    let known = report(&place, &[])["flows"].as_u64().unwrap();
    // The policy that is in force goes along, whatever the file says by now.
    write(&place, "allow everything\n");
    let switch = replaced(&place, switch, |_| {});
    let seen = report(&place, &[]);
    assert_eq!(
        (seen["flows"].as_u64(), &seen["rules"][0]["text"]),
        (Some(known), &"allow out tcp port 5210".into())
    );
    expect_whole(talking);
    assert_eq!(switch.drops("a", "firewall"), 0);
    switch.stop();
}

#[test]
fn a_switch_that_takes_over_knows_the_conversations_and_the_policy() {
    in_a_namespace(a_replaced_switch_knows);
}

/// Asks the host for the address of a name, as a stub does; returns the code of the answer.
fn ask(socket: &UdpSocket, name: &str) -> u8 {
    let mut question = vec![7, 9, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    for label in name.split('.') {
        question.push(label.len() as u8);
        question.extend(label.as_bytes());
    }
    question.extend([0, 0, 1, 0, 1]);
    socket.send_to(&question, (HOST, 53)).unwrap();
    let mut answer = [0; 512];
    let received = socket.recv(&mut answer).unwrap();
    assert_eq!((answer[..2] == [7, 9], received >= question.len()), (true, true));
    answer[3] & 15
}

fn names_open_their_addresses() {
    let place = Place::new();
    let policy = format!("resolver {HOST}\nallow out tcp port 5210 to files.example.com\n");
    let switch = start(&place, &policy);
    let (guest, _server) = (guest(&place), server());
    let resolver = UdpSocket::bind((HOST, 53)).unwrap();
    let net = namespace::open_net(guest.pid()).unwrap();
    std::thread::scope(|scope| {
        // The name server has one address, that of the host, for whatever it is asked for.
        scope.spawn(|| {
            let mut question = [0; 512];
            let (len, from) = resolver.recv_from(&mut question).unwrap();
            let mut answer = question[..len].to_vec();
            (answer[2], answer[7]) = (0x81, 1);
            answer.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4]);
            answer.extend(HOST.parse::<std::net::Ipv4Addr>().unwrap().octets());
            resolver.send_to(&answer, from).unwrap();
        });
        assert!(!client(&guest, "--mode tcp --seconds 0.2").wait().0.success(), "the name was not asked for");
        let asks = scope.spawn(move || {
            namespace::join_net(net).unwrap();
            let socket = UdpSocket::bind((GUEST, 0)).unwrap();
            socket.set_read_timeout(Some(ringferry_rig::process::PATIENCE)).unwrap();
            [ask(&socket, "files.evil.org"), ask(&socket, "Files.example.com")]
        });
        assert_eq!(asks.join().unwrap(), [5, 0], "refused by the switch, and answered by the server");
    });
    expect_whole(client(&guest, "--mode tcp --seconds 0.2"));
    let lines = place.ctl(&["denials", "a"]);
    assert!(lines.contains(r#""name":"files.evil.org""#), "{lines}");
    let text = place.ctl(&["firewall", "a"]);
    let names = text.lines().find(|line| line.starts_with("files.example.com"));
    assert!(names.is_some_and(|line| line.ends_with(HOST)), "{text}");
    let all = place.ctl(&["firewall"]);
    let row: Vec<_> = all.lines().nth(1).unwrap_or_default().split_whitespace().collect();
    assert_eq!(row[..5], ["a", "web", "in", "force", "1"], "{all}");
    switch.stop();
}

#[test]
fn names_open_the_addresses_that_answers_have_for_them() {
    in_a_namespace(names_open_their_addresses);
}

#[test]
fn a_policy_is_checked_before_a_start() {
    let place = Place::new();
    let socket = place.socket("a");
    let port = format!("vhost-user:{},firewall=web", socket.display());
    let run = |directory: Option<&str>| {
        let mut command = ringferry();
        command.args(["run", "--check", "--port", &port]);
        command.args(
            directory.map(|directory| format!("--policies={}", place.path().join(directory).display())),
        );
        let output = command.output().unwrap();
        (output.status.success(), String::from_utf8(output.stderr).unwrap())
    };
    let (valid, said) = run(None);
    assert!(
        !valid && said.contains("no directory of policies is known: give --policies DIRECTORY"),
        "{said}"
    );
    write(&place, "allow out tpc\nallow up\n");
    let (valid, said) = run(Some("policies"));
    assert!(!valid && said.contains("web.policy:1: \"tpc\" is no protocol"), "{said}");
    assert!(said.contains("web.policy:2: \"up\" is no direction"), "{said}");
    write(&place, "allow out tcp\n");
    assert_eq!(run(Some("policies")), (true, String::new()));
}
