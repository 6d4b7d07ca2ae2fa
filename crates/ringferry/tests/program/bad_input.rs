//! Whatever cannot work is refused: exit code not 0, one clear line with the remedy, nothing started and
//! nothing left behind.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use ringferry_control::snapshot::PortState;
use ringferry_memory::{GuestMemory, RegionSpec};
use ringferry_packet::ether::Mac;
use ringferry_rig::frames::frame;
use ringferry_rig::guest::{Options, acquaint, converse};
use ringferry_rig::process::{PATIENCE, Process, eventually, may, may_network, readable};
use ringferry_rig::raw::{BASE, Raw, SIZE, memory_file, region};
use ringferry_rig::switch::{Place, ringferry};
use ringferry_sys::eventfd::EventFd;
use ringferry_sys::namespace;
use ringferry_sys::process::{Spawn, is_root};
use ringferry_sys::socket::Listener;
use ringferry_sys::tap::{Tap, TapConfig};
use ringferry_vhost_user::message::MAX_FDS;
use ringferry_vhost_user::{Device, FrontendError, Offer, RingSetup, Session};
use ringferry_virtio_net::Features;
use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags};
use rustix::process::Signal;

/// The user that may do nothing.
const NOBODY: u32 = 65534;

/// Runs `command` to its end, which is a failure; returns its error output.
#[track_caller]
fn refused_in(command: &mut Command, spawn: Spawn) -> Vec<String> {
    let mut process = Process::start(command, spawn);
    let (status, output) = process.wait();
    assert!(status.code().is_some_and(|code| code != 0), "{status}: {:#?}", process.log());
    assert_eq!(output, "", "standard output is for what was asked for");
    process.log()
}

/// The same for a command that says one line; returns that.
#[track_caller]
fn refused(command: &mut Command) -> String {
    one_line(refused_in(command, Spawn::default()))
}

#[track_caller]
fn one_line(mut lines: Vec<String>) -> String {
    assert_eq!(lines.len(), 1, "{lines:#?}");
    lines.remove(0)
}

fn contains(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in {text:?}");
    }
}

/// Runs with a configuration file; returns its name and what was said.
fn run_file(place: &Place, text: &str) -> (String, Vec<String>) {
    let file = place.path().join("switch.toml");
    std::fs::write(&file, text).unwrap();
    let lines =
        refused_in(ringferry().arg("run").arg(&file).arg("--control").arg(place.control()), Spawn::default());
    assert_eq!(place.files(), ["switch.toml"], "nothing was started");
    (file.display().to_string(), lines)
}

#[test]
fn a_config_error_names_file_line_and_key() {
    let place = Place::new();
    let good = format!("[[port]]\nkind = 'vhost-user'\nsocket = '{}'\n", place.socket("a").display());
    for (text, line, parts) in [
        ("mtu = 70000\n", 4, &["port.mtu", "70000", "68 to 65535"][..]),
        ("mtuu = 1500\n", 4, &["port.mtuu", "is not a key", "mtu"]),
        ("mode = 'lissten'\n", 4, &["port.mode", "lissten", "listen"]),
        ("mac = '01:00:00:00:00:00'\n", 4, &["port.mac", "01:00:00:00:00:00"]),
        ("queue_size = 100\n", 4, &["port.queue_size", "power of two"]),
        ("csum = false\ntso = true\n", 5, &["port.tso", "needs csum"]),
        ("[switch]\nmac_age_seconds = 0\n", 5, &["switch.mac_age_seconds", "1 to"]),
        ("name = \n", 4, &[]),
    ] {
        let (file, lines) = run_file(&place, &format!("{good}{text}"));
        // A syntax error is shown with the piece of the file.
        let first = if parts.is_empty() { lines[0].clone() } else { one_line(lines) };
        contains(&first, &[&format!("{file}:{line}"), "ringferry: "]);
        contains(&first, parts);
    }
}

#[test]
fn all_mistakes_are_named_at_once_and_duplicates_with_both_places() {
    let place = Place::new();
    let port = format!("[[port]]\nkind = 'vhost-user'\nsocket = '{}'\n", place.socket("a").display());
    let (file, lines) = run_file(&place, &format!("{port}{port}nonsense = 1\n"));
    let said = lines.join("\n");
    contains(&said, &["a.sock is already used", &format!("{file}:7"), "nonsense", &format!("{file}:1")]);

    let flags = ["tap:rf0", "tap:rf1,name=rf0"];
    let line = refused(place.run(&[]).args(flags.iter().flat_map(|flag| ["--port", flag])));
    contains(&line, &["--port tap:rf1,name=rf0", "the name \"rf0\" is already used by --port tap:rf0"]);
    let line = refused(place.run(&[]).args(["--port", "vhostuser:/x"]));
    contains(&line, &["vhost-user:PATH"]);
    for flag in ["--background", "--if-changed"] {
        contains(&refused(place.run(&["a"]).arg(flag)), &["give --replace as well"]);
    }
    let line = refused(&mut place.run(&[]));
    contains(&line, &["port"]);
    let line = refused(place.run(&[]).arg(place.path().join("missing.toml")));
    contains(&line, &["missing.toml"]);
    assert_eq!(place.files(), ["switch.toml"]);
}

#[test]
fn a_socket_of_a_living_switch_is_not_taken_from_it() {
    let place = Place::new();
    let switch = place.switch(&["a", "b"]);
    let mut a = switch.plug("a", 1, Options::default());
    switch.until_state("a", PortState::Up);
    // In whichever order they come.
    for line in ["features agreed on", "a front end has connected"] {
        switch.process.until_logged(line);
    }
    let lines = switch.process.log().len();
    let other = Place::new();
    for name in ["a", "b"] {
        let port = format!("vhost-user:{}", place.socket(name).display());
        let line = refused(other.run(&["x"]).args(["--port", &port]));
        contains(&line, &[&format!("port {name}"), "in use by a running program", "choose another path"]);
    }
    let line =
        refused(ringferry().args(["run", "--port", "tap:never"]).arg("--control").arg(place.control()));
    contains(&line, &["control", "in use by a running program"]);
    // All of those that cannot be had are named.
    let ports = ["a", "b"].map(|name| format!("vhost-user:{}", place.socket(name).display()));
    let said =
        refused_in(other.run(&["x"]).args(["--port", &ports[0], "--port", &ports[1]]), Spawn::default());
    contains(&said[0], &["2 ports cannot be opened"]);
    contains(&said.join("\n"), &["port a: ", "port b: "]);
    assert_eq!(other.files(), [""; 0], "the port that could be had is gone again");
    // To find out that somebody listens there is no connection of a front end.
    assert_eq!(["a", "b"].map(|port| switch.port(port).counters["connections"]), [1, 0]);
    assert_eq!(switch.process.log()[lines..], [""; 0]);
    // All of this has not hurt the first one.
    let mut b = switch.plug("b", 2, Options::default());
    acquaint(&mut [&mut a, &mut b]);
    converse(&mut a, &mut b, 1, 10);
    switch.stop();
}

#[test]
fn socket_paths_that_cannot_be_are_refused_with_the_reason() {
    let place = Place::new();
    let long = place.path().join("x".repeat(100));
    let missing = place.path().join("no/such/a.sock");
    let file = place.path().join("file");
    std::fs::write(&file, "precious").unwrap();
    for (path, parts) in [
        (&long, &["bytes", "107", "shorter"][..]),
        (&missing, &["does not exist", "mkdir -p"]),
        (&file, &["is not a socket", "remove it"]),
    ] {
        for line in [
            refused(place.run(&["a"]).args(["--port", &format!("vhost-user:{},name=p", path.display())])),
            refused(ringferry().args(["run", "--port", "tap:never", "--control"]).arg(path)),
        ] {
            contains(&line, parts);
            contains(&line, &[path.to_str().unwrap()]);
        }
    }
    assert_eq!(place.files(), ["file"]);
    assert_eq!(std::fs::read(&file).unwrap(), b"precious");
}

/// The program where every user can run it, and a directory of that user's.
fn for_nobody(place: &Place) -> (PathBuf, PathBuf) {
    let mode = |mode| std::fs::Permissions::from_mode(mode);
    std::fs::set_permissions(place.path(), mode(0o755)).unwrap();
    let program = place.path().join("ringferry");
    // By another process: were it open for writing in this one, another thread's child would inherit that,
    // and a file that is open for writing cannot be run.
    let copied = Command::new("cp").arg(env!("CARGO_BIN_EXE_ringferry")).arg(&program).status().unwrap();
    assert!(copied.success());
    std::fs::set_permissions(&program, mode(0o755)).unwrap();
    let home = place.path().join("home");
    std::fs::create_dir(&home).unwrap();
    std::os::unix::fs::chown(&home, Some(NOBODY), Some(NOBODY)).unwrap();
    (program, home)
}

#[test]
fn a_user_without_rights_is_told_what_is_missing() {
    if !may("needs root, to become a user without rights", is_root()) {
        return;
    }
    let place = Place::new();
    let (program, home) = for_nobody(&place);
    let nobody = |arguments: &[&str]| {
        let mut command = Command::new(&program);
        command.uid(NOBODY).gid(NOBODY).current_dir("/").env_remove("XDG_RUNTIME_DIR").args(arguments);
        command
    };
    let control = home.join("control").display().to_string();
    let path = place.socket("a").display().to_string();
    // A directory that is not writable.
    let line = refused(&mut nobody(&["run", "--control", &control, "--port", &format!("vhost-user:{path}")]));
    contains(&line, &["port a", "no permission to make socket", &path, "writable"]);
    let port = format!("vhost-user:{}", home.join("b.sock").display());
    let line = refused(&mut nobody(&["run", "--control", &path, "--port", &port]));
    contains(&line, &["control socket", "no permission", &path]);
    // A tap.
    let line =
        refused(&mut nobody(&["run", "--control", &control, "--port", &port, "--port", "tap:rfnobody"]));
    contains(&line, &["port rfnobody", "root"]);
    let line = refused(&mut nobody(&["guest", "--socket", &path, "--tap", "rfnobody"]));
    contains(&line, &["root"]);
    assert_eq!(std::fs::read_dir(&home).unwrap().count(), 0);
    // A switch of another user.
    let switch = place.switch(&["a"]);
    let line = refused(&mut nobody(&["ctl", "--control", place.control().to_str().unwrap(), "show"]));
    contains(&line, &["no permission", "sudo", "--control"]);
    // And what needs no rights works.
    let ready = home.join("c.sock");
    let port = format!("vhost-user:{}", ready.display());
    let mut own =
        Process::start(&mut nobody(&["run", "--control", &control, "--port", &port]), Spawn::default());
    eventually("it runs", || ready.exists().then_some(()));
    own.until_logged("the switch is up");
    own.signal(Signal::TERM);
    assert!(own.wait().0.success());
    assert_eq!(std::fs::read_dir(&home).unwrap().count(), 0);
    switch.stop();
}

#[test]
fn taps_that_do_not_fit_are_refused_and_stay_as_they_are() {
    if !may_network() {
        return;
    }
    // A namespace of this thread's own; children start in it.
    std::thread::spawn(|| {
        namespace::unshare_net().unwrap();
        let place = Place::new();
        let several = Tap::open(&TapConfig { multi_queue: true, ..TapConfig::new("several") }).unwrap();
        let held = Tap::open(&TapConfig::new("held")).unwrap();
        for (port, parts) in [
            ("tap:several", &["port several", "several"][..]),
            ("tap:held", &["port held", "held"]),
            ("tap:lo", &["port lo", "lo"]),
            ("tap:absent,existing=yes", &["port absent", "there is no tap absent", "ip tuntap add"]),
            ("tap:held,existing=no", &["port held", "exists already", "ip link delete held"]),
        ] {
            let line = refused(place.run(&["a"]).args(["--port", port]));
            contains(&line, parts);
            assert!(
                line.contains("ip ") || line.contains("another") || line.contains("other"),
                "no remedy: {line}"
            );
        }
        assert_eq!(place.files(), [""; 0]);
        let lines =
            refused_in(ringferry().args(["guest", "--socket", "/x", "--tap", "several"]), Spawn::default());
        contains(&one_line(lines), &["several"]);
        let interfaces = std::fs::read_dir("/proc/thread-self/net/dev_snmp6");
        if let Ok(interfaces) = interfaces {
            let names: Vec<_> =
                interfaces.map(|name| name.unwrap().file_name().to_string_lossy().into_owned()).collect();
            assert!(!names.iter().any(|name| name == "absent" || name == "a"), "{names:?}");
        }
        drop((several, held));
    })
    .join()
    .unwrap();
}

#[test]
fn inherited_descriptors_that_do_not_fit_are_refused() {
    let place = Place::new();
    let line = refused(place.run(&["a"]).args(["--port", "vhost-user-fd:77"]));
    contains(&line, &["port fd77", "descriptor 77"]);
    let line = refused(place.run(&["a"]).args(["--port", "vhost-user-activation:vm0"]));
    contains(&line, &["port vm0", "FileDescriptorName=vm0", "socket unit"]);
    let with_file = |port: &str| {
        let file = OwnedFd::from(tempfile::tempfile().unwrap());
        let keep_fds = vec![(file, 7)];
        one_line(refused_in(place.run(&["a"]).args(["--port", port]), Spawn { keep_fds, ..Spawn::default() }))
    };
    contains(&with_file("vhost-user-fd:7"), &["port fd7", "descriptor 7"]);
    contains(&with_file("tap-fd:7"), &["port fd7"]);
    let line = refused(place.run(&["a"]).args(["--ready-fd", "77"]));
    contains(&line, &["--ready-fd 77"]);
    assert_eq!(place.files(), [""; 0]);
}

#[test]
fn ctl_without_a_switch_says_how_to_start_one() {
    let place = Place::new();
    let ctl = |control: &Path| {
        let mut command = ringferry();
        command.args(["ctl", "show", "--control"]).arg(control);
        command
    };
    let line = refused(&mut ctl(&place.control()));
    contains(&line, &["no ringferry is running", "ringferry run", "--control PATH"]);
    // A socket that nobody listens on any more.
    drop(UnixListener::bind(place.control()).unwrap());
    let line = refused(&mut ctl(&place.control()));
    contains(&line, &["no ringferry is running"]);
    // One that belongs to something else.
    let stranger = UnixListener::bind(place.socket("stranger")).unwrap();
    let answering = std::thread::spawn(move || {
        use std::io::{Read, Write};
        let (mut stream, _) = stranger.accept().unwrap();
        stream.write_all(b"220 mail.example.org ESMTP\r\n").unwrap();
        let _ = stream.read(&mut [0; 100]);
    });
    let line = refused(&mut ctl(&place.socket("stranger")));
    contains(&line, &["does not answer like ringferry"]);
    answering.join().unwrap();
}

#[test]
fn memory_that_is_not_shared_or_cannot_be_mapped_is_refused_and_logged() {
    let place = Place::new();
    let switch = place.switch(&["a", "b", "odd"]);
    let mut a = switch.plug("a", 1, Options::default());
    let mut b = switch.plug("b", 2, Options::default());
    acquaint(&mut [&mut a, &mut b]);
    let mut raw = Raw::plug(switch.connect("odd"));
    switch.until_state("odd", PortState::Up);

    let (pipe, _write) = rustix::pipe::pipe().unwrap();
    let short = rustix::fs::memfd_create("short", MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&short, SIZE / 2).unwrap();
    let whole = memory_file();
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&whole));
    let read_only = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).unwrap();
    let sealed = rustix::fs::memfd_create("sealed", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&sealed, SIZE).unwrap();
    rustix::fs::fcntl_add_seals(&sealed, SealFlags::WRITE).unwrap();
    let spec = region();
    let tables: [(&str, &[(RegionSpec, BorrowedFd<'_>)]); 7] = [
        ("a pipe", &[(spec, pipe.as_fd())]),
        ("a file that is too short", &[(spec, short.as_fd())]),
        ("a file that may not be written", &[(spec, read_only.as_fd())]),
        ("a file sealed against writing", &[(spec, sealed.as_fd())]),
        ("an empty region", &[(RegionSpec { size: 0, ..spec }, whole.as_fd())]),
        ("an end that wraps", &[(RegionSpec { guest_addr: u64::MAX - 4096, ..spec }, whole.as_fd())]),
        ("regions that overlap", &[(spec, whole.as_fd()), (spec, whole.as_fd())]),
    ];
    for (what, table) in tables {
        let refused = raw.connection.frontend().set_mem_table(table);
        assert!(matches!(refused, Err(FrontendError::Refused(_))), "{what}: {refused:?}");
    }
    let far = RegionSpec { guest_addr: 1 << 40, user_addr: 1 << 40, ..spec };
    for fd in [pipe.as_fd(), read_only.as_fd(), short.as_fd()] {
        let refused = raw.connection.frontend().add_mem_reg(far, fd);
        assert!(matches!(refused, Err(FrontendError::Refused(_))));
    }
    // More regions than the port offers.
    let slots = raw.connection.frontend().get_max_mem_slots().unwrap();
    assert_eq!(slots, MAX_FDS as u64);
    let many = |count: u64| -> Vec<(RegionSpec, BorrowedFd<'_>)> {
        let at = |index| BASE + (1 + index) * SIZE;
        (0..count)
            .map(|i| (RegionSpec { guest_addr: at(i), user_addr: at(i), ..spec }, whole.as_fd()))
            .collect()
    };
    for (spec, fd) in many(slots - 1) {
        raw.connection.frontend().add_mem_reg(spec, fd).unwrap();
    }
    let refused = raw.connection.frontend().add_mem_reg(far, whole.as_fd());
    assert!(matches!(refused, Err(FrontendError::Refused(_))));

    // The port goes on with the memory it had, the others anyway.
    switch.until_state("odd", PortState::Up);
    raw.send(&frame(Mac::BROADCAST, Mac([2, 0, 0, 0, 0, 9]), 60, 1));
    assert_eq!((a.receive_plain().len(), b.receive_plain().len()), (60, 60));
    converse(&mut a, &mut b, 1, 20);
    switch.process.until_logged("message refused");
    switch.process.until_logged("sealed against writing");
    switch.process.until_logged("readonly=on");
    // With several guests, each line says which of them it is about.
    let log = switch.process.log();
    let refusals: Vec<&String> = log.iter().filter(|line| line.contains("refused")).collect();
    assert!(refusals.iter().all(|line| line.contains("port=\"odd\"")), "{refusals:#?}");
    switch.stop();
}

/// A device that does nothing.
struct Idle;

impl Device for Idle {
    fn features_acked(&mut self, _: u64) {}
    fn memory_changed(&mut self, _: Option<Arc<GuestMemory>>) {}
    fn ring_started(&mut self, _: u16, _: RingSetup) {}
    fn ring_call_changed(&mut self, _: u16, _: Option<EventFd>) {}
    fn ring_enabled(&mut self, _: u16, _: bool) {}
    fn ring_stopped(&mut self, _: u16) -> u16 {
        0
    }
}

#[test]
fn a_back_end_without_version_1_is_refused() {
    if !may_network() {
        return;
    }
    let place = Place::new();
    let path = place.socket("old");
    let listener = Listener::bind(&path).unwrap();
    let mut command = ringferry();
    command.args(["guest", "--tap", "rf0", "--socket"]).arg(&path);
    let mut guest = Process::start(&mut command, Spawn { new_net: true, ..Spawn::default() });
    let stream = eventually("the guest connects", || listener.accept().unwrap());
    let legacy = Features::MRG_RXBUF | Features::CSUM;
    let mut session = Session::new(stream, Offer::net(legacy.bits(), 1)).unwrap();
    eventually("the guest hangs up", || {
        readable(&session, PATIENCE);
        session.on_readable(&mut Idle).is_err().then_some(())
    });
    let (status, _) = guest.wait();
    assert_eq!(status.code(), Some(1));
    let line = "the back end lacks required features";
    guest.until_logged_times(line, 1);
    let said = guest.log().into_iter().find(|said| said.contains(line)).unwrap();
    contains(&said, &["VERSION_1", "VIRTIO 1.0"]);
}

#[test]
fn the_lab_is_a_program_of_its_own_and_its_absence_says_how_to_build_it() {
    // Alone in a folder, so that no lab is beside it.
    let folder = tempfile::tempdir().unwrap();
    let alone = folder.path().join("ringferry");
    std::fs::copy(env!("CARGO_BIN_EXE_ringferry"), &alone).unwrap();
    let lab = |args: &[&str]| {
        let mut command = Command::new(&alone);
        command.arg("lab").args(args).env("PATH", folder.path().join("bin"));
        command
    };
    let line = refused(&mut lab(&["ring"]));
    contains(&line, &["ringferry-lab is neither", "cargo build --release -p ringferry-lab"]);
    // In PATH, and then beside: it gets every argument as it is.
    for (at, name) in [("bin", "in PATH"), (".", "beside")] {
        let at = folder.path().join(at);
        std::fs::create_dir_all(&at).unwrap();
        std::fs::write(at.join("ringferry-lab"), format!("#!/bin/sh\necho {name}: \"$@\"\nexit 3\n"))
            .unwrap();
        std::fs::set_permissions(at.join("ringferry-lab"), PermissionsExt::from_mode(0o755)).unwrap();
        let output = lab(&["ring", "--filter", "a b", "--help"]).output().unwrap();
        assert_eq!(output.status.code(), Some(3), "{output:?}");
        assert_eq!(String::from_utf8_lossy(&output.stdout), format!("{name}: ring --filter a b --help\n"));
    }
}

/// Nor is a file of the program's own taken for it.
#[test]
fn a_descriptor_that_nobody_has_passed_is_missed_by_its_number() {
    let place = Place::new();
    let line = refused(place.run(&[]).args(["--port", "vhost-user-fd:3"]));
    contains(&line, &["port fd3: descriptor 3", "Bad file descriptor"]);
}
