//! The sandbox of `ringferry run`, from outside: what the kernel says of the process, what still works, and what becomes of it when the
//! helper is gone. The refusals of the sandbox are tested from inside in `ringferry-sys` (tests/sandbox.rs). All other tests of this
//! program run in it, too.

use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use landlock::{AccessFs, Ruleset, RulesetAttr};
use ringferry_control::snapshot::PortState;
use ringferry_rig::guest::{Guest, Options, acquaint, converse};
use ringferry_rig::process::{eventually, in_a_namespace, may, may_network};
use ringferry_rig::switch::{Place, Switch, ringferry};
use ringferry_sys::netif;
use ringferry_sys::process::is_root;
use ringferry_sys::socket::Listener;
use rustix::process::{Pid, Signal, kill_process};

/// Reads a line of /proc/PID/task/TID/status.
fn status(pid: u32, thread: u32, key: &str) -> Option<String> {
    let text = fs::read_to_string(format!("/proc/{pid}/task/{thread}/status")).ok()?;
    text.lines().find_map(|line| Some(line.strip_prefix(key)?.strip_prefix(":\t")?.to_owned()))
}

fn threads(pid: u32) -> Vec<u32> {
    let entries = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    entries.map(|entry| entry.unwrap().file_name().to_str().unwrap().parse().unwrap()).collect()
}

/// The children of a process.
pub(crate) fn helpers(pid: u32) -> Vec<u32> {
    let processes =
        fs::read_dir("/proc").unwrap().filter_map(|entry| entry.unwrap().file_name().to_str()?.parse().ok());
    processes
        .filter(|other| status(*other, *other, "PPid").is_some_and(|parent| parent == pid.to_string()))
        .collect()
}

fn is_alive(pid: u32) -> bool {
    status(pid, pid, "State").is_some_and(|state| !state.starts_with('Z'))
}

/// A configuration with a port that listens and one that connects.
fn write_file(place: &Place) -> PathBuf {
    let path = place.path().join("switch.toml");
    let text = format!(
        "control = {:?}\n[[port]]\nkind = 'vhost-user'\nsocket = {:?}\n[[port]]\nkind = 'vhost-user'\nsocket = {:?}\nmode = 'connect'\n",
        place.control(),
        place.socket("a"),
        place.socket("b"),
    );
    fs::write(&path, text).unwrap();
    path
}

fn start<'a>(place: &'a Place, file: &Path, words: &[&str]) -> Switch<'a> {
    place.start(ringferry().arg("run").arg(file).args(words), Vec::new())
}

/// A switch in its sandbox, with ports that listen.
fn confined<'a>(place: &'a Place, ports: &[&str]) -> Switch<'a> {
    place.start(place.run(ports).args(["--sandbox", "on"]), Vec::new())
}

/// Plugs guests into the port that listens and the one that connects.
fn plug(place: &Place, switch: &Switch<'_>) -> [Guest; 2] {
    let a = switch.plug("a", 1, Options::default());
    let listener = Listener::bind(place.socket("b")).unwrap();
    let stream = eventually("the switch connects", || listener.accept().unwrap());
    let b = Guest::plug(stream, 2, Options::default());
    switch.until_state("b", PortState::Up);
    [a, b]
}

#[test]
fn in_the_sandbox_traffic_flows_rules_are_kept_and_all_threads_are_confined() {
    let place = Place::new();
    let file = write_file(&place);
    let switch = start(&place, &file, &["--workers", "3", "--sandbox", "on"]);
    let pid = switch.process.pid();
    let [mut a, mut b] = plug(&place, &switch);
    acquaint(&mut [&mut a, &mut b]);
    converse(&mut a, &mut b, 1, 100);
    assert!(place.ctl(&["set", "a", "max_macs=7"]).contains("\nkept: in "));
    assert!(fs::read_to_string(&file).unwrap().contains("max_macs = 7"));
    assert!(place.ctl(&["unset", "a", "max_macs"]).contains("\nkept: in "));
    assert!(!fs::read_to_string(&file).unwrap().contains("max_macs"));
    converse(&mut a, &mut b, 101, 100);

    let threads = threads(pid);
    assert!(threads.len() >= 4, "{threads:?}");
    for thread in threads {
        let has =
            |key: &str, value: &str| assert_eq!(status(pid, thread, key).as_deref(), Some(value), "{key}");
        has("NoNewPrivs", "1");
        has("Seccomp", "2");
        for set in ["CapEff", "CapPrm", "CapInh", "CapAmb"] {
            has(set, "0000000000000000");
        }
    }
    let helpers = helpers(pid);
    let [helper] = helpers[..] else { panic!("{helpers:?}") };
    assert_eq!(status(helper, helper, "NoNewPrivs").as_deref(), Some("1"));
    assert_eq!(status(helper, helper, "Seccomp").as_deref(), Some("2"));
    // CHOWN, DAC_OVERRIDE, DAC_READ_SEARCH and FOWNER are the first four; NET_ADMIN makes taps.
    let left = u64::from_str_radix(&status(helper, helper, "CapEff").unwrap(), 16).unwrap();
    assert_eq!(left & !(0xf | 1 << 12), 0);
    switch.process.until_logged_times("in a sandbox", 1);
    drop((a, b));
    switch.stop();
    assert_eq!(place.files(), ["switch.toml"]);
    eventually("the helper ends", || (!is_alive(helper)).then_some(()));
}

/// Who adds a user puts a new file in the place of `/etc/passwd`, and does so for each new tenant.
#[test]
fn a_user_who_was_added_meanwhile_can_be_given_a_socket() {
    if !may("needs root: a directory is mounted at /etc", is_root()) {
        return;
    }
    let place = Place::new();
    let file = write_file(&place);
    let etc = place.path().join("etc");
    fs::create_dir(&etc).unwrap();
    let users = "root:x:0:0:root:/root:/bin/sh\n";
    fs::write(etc.join("passwd"), users).unwrap();
    fs::write(etc.join("group"), "root:x:0:\n").unwrap();
    let mut command = Command::new("unshare");
    command.args([
        "--mount",
        "--propagation",
        "private",
        "sh",
        "-c",
        "mount --bind \"$0\" /etc && exec \"$@\"",
    ]);
    command.arg(&etc).arg(ringferry().get_program()).arg("run").arg(&file);
    let switch = place.start(command.arg("--control").arg(place.control()), Vec::new());
    switch.process.until_logged_times("in a sandbox", 1);
    let tenant =
        format!("vhost-user:{},socket_owner=tenant,socket_group=tenants", place.socket("c").display());
    let refused =
        ringferry().args(["ctl", "--control"]).arg(place.control()).args(["add", &tenant]).output().unwrap();
    assert!(String::from_utf8_lossy(&refused.stderr).contains("there is no user \"tenant\""), "{refused:?}");
    for (name, text) in
        [("passwd", format!("{users}tenant:x:4711:4712::/:\n")), ("group", "tenants:x:4712:\n".to_owned())]
    {
        fs::write(etc.join("new"), text).unwrap();
        fs::rename(etc.join("new"), etc.join(name)).unwrap();
    }
    assert!(place.ctl(&["add", &tenant]).starts_with("c added\n"));
    let socket = fs::metadata(place.socket("c")).unwrap();
    assert_eq!((socket.uid(), socket.gid()), (4711, 4712));
    assert!(place.ctl(&["reload"]).contains("as "), "with the names of the ports in it");
    switch.stop();
}

/// The kernel has Landlock in so many layers, one for each sandbox in a sandbox; whoever asks for one more is refused.
const LAYERS: usize = 16;

#[test]
fn what_the_sandbox_lacks_is_said_and_the_switch_runs_without_it() {
    // The layers are this thread's, and that of what it starts.
    let thread = std::thread::spawn(|| {
        for _ in 0..LAYERS {
            let rules = Ruleset::default().handle_access(AccessFs::MakeBlock).unwrap().create().unwrap();
            rules.restrict_self().unwrap();
        }
        let place = Place::new();
        let switch = confined(&place, &["a", "b"]);
        switch.process.until_logged_times("the sandbox lacks Landlock: ", 1);
        let [mut a, mut b] =
            [("a", 1), ("b", 2)].map(|(port, number)| switch.plug(port, number, Options::default()));
        acquaint(&mut [&mut a, &mut b]);
        converse(&mut a, &mut b, 1, 10);
        assert_eq!(switch.process.logged("in a sandbox: "), 0, "it says that it has everything");
        let pid = switch.process.pid();
        assert_eq!(status(pid, pid, "Seccomp").as_deref(), Some("2"), "and the rest it has");
        switch.stop();
    });
    thread.join().unwrap();
}

#[test]
fn a_signal_to_both_processes_leaves_nothing() {
    let place = Place::new();
    let switch = confined(&place, &["a", "b"]);
    let helpers = helpers(switch.process.pid());
    let [helper] = helpers[..] else { panic!("{helpers:?}") };
    // A terminal and a service manager tell every process.
    for signal in [Signal::INT, Signal::TERM, Signal::HUP] {
        kill_process(Pid::from_raw(helper as i32).unwrap(), signal).unwrap();
    }
    assert_eq!(place.files(), ["a.sock", "b.sock", "control"]);
    switch.stop();
    assert_eq!(place.files(), [""; 0]);
    eventually("the helper ends", || (!is_alive(helper)).then_some(()));
}

#[test]
fn the_helper_ends_with_a_killed_switch_and_the_next_switch_takes_its_place() {
    let place = Place::new();
    let mut switch = confined(&place, &["a"]);
    let helpers = helpers(switch.process.pid());
    let [helper] = helpers[..] else { panic!("{helpers:?}") };
    switch.process.signal(Signal::KILL);
    eventually("the helper ends", || (!is_alive(helper)).then_some(()));
    // As without a sandbox, the sockets of a switch that was killed stay until somebody binds them.
    assert_eq!(place.files(), ["a.sock", "control"]);
    drop(switch);
    confined(&place, &["a"]).stop();
    assert_eq!(place.files(), [""; 0]);
}

#[test]
fn sockets_are_removed_from_a_directory_that_the_switch_has_made() {
    // In a chroot the root is no mount, and then unshare(1) cannot keep its mounts from others.
    let alone =
        || Command::new("unshare").args(["--mount", "true"]).status().is_ok_and(|status| status.success());
    if !may_network() || !may("needs a mount namespace of its own (unshare --mount)", alone()) {
        return;
    }
    // As after every boot, /run is empty; others do not see it.
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", "mount -t tmpfs none /run && exec \"$@\"", "sh"]);
    command.arg(ringferry().get_program()).args(["run", "--sandbox", "on"]);
    command.args(["--port", "vhost-user:/run/ringferry/a.sock"]);
    let place = Place::new();
    let switch = place.start(&mut command, Vec::new());
    let directory = fs::File::open(format!("/proc/{}/root/run/ringferry", switch.process.pid())).unwrap();
    let files = || fs::read_dir(format!("/proc/self/fd/{}", directory.as_raw_fd())).unwrap().count();
    assert_eq!(files(), 2);
    switch.stop();
    assert_eq!(files(), 0);
}

#[test]
fn without_its_helper_a_switch_serves_on_and_says_what_it_cannot_do() {
    let place = Place::new();
    let file = write_file(&place);
    let switch = start(&place, &file, &["--sandbox", "on"]);
    let [mut a, mut b] = plug(&place, &switch);
    acquaint(&mut [&mut a, &mut b]);
    let before = fs::read_to_string(&file).unwrap();
    for helper in helpers(switch.process.pid()) {
        kill_process(Pid::from_raw(helper as i32).unwrap(), Signal::KILL).unwrap();
        eventually("the helper ends", || (!is_alive(helper)).then_some(()));
    }
    // Before anybody needs it.
    switch.process.until_logged("the privileged helper does not answer any more");
    let why = place.ctl(&["why", "a"]);
    assert!(why.contains("Of the switch itself: the privileged helper has ended"), "{why}");
    assert!(place.ctl(&["show"]).contains("the privileged helper has ended"));
    converse(&mut a, &mut b, 1, 50);
    let answer = place.ctl(&["set", "a", "max_macs=7"]);
    assert!(answer.contains("not kept when the switch ends: the privileged helper has ended"), "{answer}");
    assert_eq!(fs::read_to_string(&file).unwrap(), before);
    drop(b);
    switch.until_state("b", PortState::Connecting);
    switch.process.until_logged("the privileged helper has ended: have `ringferry run --replace` take over, which starts another, or restart the switch");
    switch.stop();
}

#[test]
fn without_a_sandbox_there_is_no_helper() {
    let place = Place::new();
    let file = write_file(&place);
    let switch = start(&place, &file, &["--sandbox", "off"]);
    let pid = switch.process.pid();
    let [mut a, mut b] = plug(&place, &switch);
    acquaint(&mut [&mut a, &mut b]);
    assert_eq!(helpers(pid), [0; 0]);
    assert_eq!(status(pid, pid, "Seccomp"), status(std::process::id(), std::process::id(), "Seccomp"));
    assert!(place.ctl(&["set", "a", "max_macs=7"]).contains("\nkept: in "));
    switch.process.until_logged("settings have changed: max_macs=7 (in ");
    switch.process.until_logged_times("no sandbox, as was asked for", 1);
    drop((a, b));
    switch.stop();
    assert_eq!(place.files(), ["switch.toml"]);
}

#[test]
fn the_state_of_a_tap_is_known_in_the_sandbox() {
    in_a_namespace(|| {
        let place = Place::new();
        let switch = place.start(place.run(&["a"]).args(["--port", "tap:rf0"]), Vec::new());
        netif::set_mtu("rf0", 1400).unwrap();
        netif::set_up("rf0", true).unwrap();
        let port = switch.until("rf0", "is up", |port| port.state == PortState::Up && port.mtu == 1400);
        assert_eq!(port.mac.map(|mac| mac.0), Some(netif::mac("rf0").unwrap()));
        netif::set_up("rf0", false).unwrap();
        switch.until_state("rf0", PortState::Down);
        switch.stop();
    });
}
