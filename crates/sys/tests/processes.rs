//! Tests that need a process of their own: entering a user namespace (one thread only), dying with the parent, and
//! inheriting sockets. The program starts itself again in the roles below, so it does not use the threaded test
//! harness.

mod common;

use std::io::Read;
use std::os::fd::OwnedFd;
use std::process::{Command, Stdio};
use std::time::Duration;

use common::{role, run};
use ringferry_sys::namespace::{self, NamespaceError};
use ringferry_sys::process::{self, Spawn};
use ringferry_sys::socket::{BindError, Listener, Stream};
use ringferry_sys::tap::{Tap, TapConfig, TapError};
use ringferry_sys::{netif, systemd};

/// `NOBODY` of most systems: a user without rights.
const NOBODY: u32 = 65534;

fn main() {
    match std::env::args().nth(1).as_deref() {
        Some("role:user-namespace") => user_namespace(),
        Some("role:parent") => parent(),
        Some("role:survivor") => {
            std::thread::sleep(Duration::from_secs(30));
            println!("survived");
        }
        Some("role:service") => service(),
        // Test runners list tests first; there are none to list.
        Some("--list") => {}
        _ => {
            run("a user without rights gets a tap through a user namespace", || {
                let output = role("role:user-namespace").output().unwrap();
                assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
                eprint!("{}", String::from_utf8_lossy(&output.stdout));
            });
            run("a child dies with its parent", a_child_dies_with_its_parent);
            run("sockets are inherited by name, once", sockets_are_inherited_by_name_once);
        }
    }
}

fn user_namespace() {
    if process::is_root() {
        let gid = rustix::process::Gid::from_raw(NOBODY);
        let uid = rustix::process::Uid::from_raw(NOBODY);
        rustix::thread::set_thread_groups(&[]).unwrap();
        rustix::thread::set_thread_res_gid(gid, gid, gid).unwrap();
        rustix::thread::set_thread_res_uid(uid, uid, uid).unwrap();
        // Giving up rights hides /proc/self from its new owner, until this.
        rustix::process::set_dumpable_behavior(rustix::process::DumpableBehavior::Dumpable).unwrap();
        assert!(!process::is_root() && !process::has_net_admin());
        assert!(matches!(namespace::unshare_net(), Err(NamespaceError::Net(_))));
        let refused = Tap::open(&TapConfig::new("t0"));
        assert!(matches!(refused, Err(TapError::Permission(_) | TapError::NoAccess | TapError::NoDriver)));
        assert!(matches!(Listener::bind("/ringferry-test.sock"), Err(BindError::Permission(_))));
    }
    let may_skip = std::env::var("CI").as_deref() != Ok("true");
    match namespace::enter_user_namespace() {
        Err(e @ NamespaceError::User { .. }) if may_skip => {
            println!("skipped: {e}");
            return;
        }
        result => result.unwrap(),
    }
    assert!(process::is_root() && process::has_net_admin());
    namespace::unshare_net().unwrap();
    let tap = match Tap::open(&TapConfig::new("t0")) {
        // Some machines keep /dev/net/tun for root.
        Err(e @ TapError::NoAccess) if may_skip => {
            println!("skipped: {e}");
            return;
        }
        result => result.unwrap(),
    };
    netif::quiet_ipv6(tap.name());
    netif::add_address("t0", "10.0.0.1".parse().unwrap(), 24).unwrap();
    netif::add_address("t0", "fd00::1".parse().unwrap(), 64).unwrap();
    netif::set_up("t0", true).unwrap();
    std::net::UdpSocket::bind("[fd00::1]:0").unwrap();
    let child = process::spawn(&mut Command::new("true"), Spawn { new_net: true, ..Spawn::default() });
    assert!(child.unwrap().wait().unwrap().success());
}

/// Starts a child that must not outlive it, and ends without a word to it.
#[expect(clippy::zombie_processes, reason = "leaving the child behind is the test")]
fn parent() {
    let options = Spawn { die_with_parent: true, ..Spawn::default() };
    process::spawn(&mut role("role:survivor"), options).unwrap();
}

fn a_child_dies_with_its_parent() {
    let mut parent = role("role:parent").stdout(Stdio::piped()).spawn().unwrap();
    let mut text = String::new();
    // The end comes when the last holder of the pipe is gone: the child's child.
    parent.stdout.take().unwrap().read_to_string(&mut text).unwrap();
    assert!(parent.wait().unwrap().success());
    assert_eq!(text, "");
}

fn service() {
    let sockets = systemd::listen_fds();
    assert!(systemd::listen_fds().is_empty());
    let names: Vec<&str> = sockets.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["control", "vm0"]);
    for (name, fd) in sockets {
        let stream = Stream::from_fd(fd).unwrap();
        stream.send(name.as_bytes(), &[]).unwrap();
    }
    assert!(systemd::ready().unwrap());
    assert!(systemd::status("carrying\npackets").unwrap());
}

fn sockets_are_inherited_by_name_once() {
    let (control, control_end) = Stream::pair().unwrap();
    let (vm0, vm0_end) = Stream::pair().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let manager = std::os::unix::net::UnixDatagram::bind(dir.path().join("notify")).unwrap();
    // Only the child knows its number before exec, so a shell sets the variable.
    let mut command = Command::new("sh");
    command
        .args(["-c", "LISTEN_PID=$$ exec \"$0\" role:service"])
        .arg(std::env::current_exe().unwrap())
        .env("LISTEN_FDS", "2")
        .env("LISTEN_FDNAMES", "control:vm0")
        .env("NOTIFY_SOCKET", dir.path().join("notify"));
    let keep_fds = vec![(OwnedFd::from(control_end), 3), (OwnedFd::from(vm0_end), 4)];
    let mut child = process::spawn(&mut command, Spawn { keep_fds, ..Spawn::default() }).unwrap();
    assert!(child.wait().unwrap().success());
    for (stream, name) in [(control, "control"), (vm0, "vm0")] {
        let mut data = [0; 16];
        let got = stream.recv(&mut data, &mut Vec::new()).unwrap();
        assert_eq!(&data[..got.bytes], name.as_bytes());
    }
    for message in ["READY=1", "STATUS=carrying packets"] {
        let mut data = [0; 64];
        let n = manager.recv(&mut data).unwrap();
        assert_eq!(&data[..n], message.as_bytes());
    }
    // Listeners are told apart from streams.
    let (a, _b) = Stream::pair().unwrap();
    assert!(Listener::from_fd(a.into()).is_err());
}
