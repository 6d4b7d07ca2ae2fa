//! The sandbox of `ringferry run`, and the helper process beside it.
//!
//! [`begin`] starts the helper, before any port is opened and any thread started; [`enter`] puts the switch into its sandbox when the ports are
//! open. The rights that each keeps are listed in [`switch`] and [`helper`], and their purposes in [`ringferry_switch::privileged`].

use std::io;
use std::os::fd::{AsFd, RawFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use ringferry_control::make_directory;
use ringferry_switch::config::{Config, PortKind, XenProvider};
use ringferry_switch::privileged::{Charter, Privileges, serve};
use ringferry_sys::process::{Spawn, spawn_without};
use ringferry_sys::sandbox::{Access, Calls, CapabilitySet, Part, Sandbox};
use ringferry_sys::signal::{Signal, Signals};
use ringferry_sys::socket::Stream;
use ringferry_sys::{accounts, inherited};

use crate::keep::KEPT;

/// The number of the helper's end of the socketpair.
const SOCKET: RawFd = 3;

/// Starts the helper for a configuration whose control socket is `control`.
///
/// # Errors
/// It cannot be started.
pub fn begin(config: &Config, control: &Path) -> io::Result<Privileges> {
    make_directory(control);
    let (ours, theirs) = Stream::pair()?;
    // This program, also if another has its name by now.
    let mut command = Command::new("/proc/self/exe");
    command.arg0("ringferry").arg("privileged-helper").env_clear();
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let options = || {
        let keep_fds = vec![(theirs.as_fd().try_clone_to_owned()?, SOCKET)];
        Ok(Spawn { keep_fds, ..Spawn::default() })
    };
    // It ends by itself when the socket is closed, and must not end before: see `helper`. What `ringferry keep` has passed is not for it.
    drop(spawn_without(&mut command, KEPT as u32, options)?);
    drop(theirs);
    Privileges::helper(ours, &Charter::of(config, control))
}

/// Puts the switch into its sandbox, and logs what of it could not be had.
pub fn enter(config: &Config) {
    let missing = switch(config).enter();
    missing.iter().for_each(|missing| tracing::warn!("{missing}"));
    if missing.is_empty() {
        tracing::info!("in a sandbox: no capabilities, no files but its own, no further processes");
    }
}

/// The sandbox of a running switch: it moves packets, starts threads, and answers on sockets that are open.
fn switch(config: &Config) -> Sandbox {
    let mut sandbox = Sandbox {
        // What threads do and descriptors are, of this process; and how many mappings there may be, which is read once more.
        files: vec![
            (PathBuf::from("/proc/self"), Access::READ),
            (PathBuf::from("/proc/sys/vm/max_map_count"), Access::READ),
        ],
        capabilities: CapabilitySet::empty(),
        calls: Calls::THREADS | Calls::OPEN | Calls::TAPS,
    };
    for port in &config.ports {
        match &port.kind {
            PortKind::XenVif(xen) => match &xen.provider {
                // Its devices are opened again for each guest, and when the store was lost.
                XenProvider::Xen => {
                    sandbox.files.push((PathBuf::from("/dev/xen"), Access::READ | Access::WRITE));
                    sandbox.files.push((PathBuf::from("/sys/hypervisor"), Access::READ));
                    sandbox.calls |= Calls::XEN;
                }
                // Simulated, for tests.
                XenProvider::Process { .. } => sandbox.calls |= Calls::CONNECT | Calls::PEERS,
            },
            PortKind::VhostUser(_) | PortKind::Tap(_) | PortKind::Xdp(_) => {}
        }
    }
    sandbox
}

/// The sandbox of the helper: it edits the configuration, makes sockets, connects to some and removes some, and makes taps. To do so for
/// files of other users and for interfaces it keeps the capabilities that are about them, if it has them.
fn helper(charter: &Charter) -> Sandbox {
    // What an interface needs to be opened again, once it has come back.
    let (capabilities, calls) = match charter.opens_interfaces() {
        true => (CapabilitySet::NET_RAW | CapabilitySet::BPF | CapabilitySet::IPC_LOCK, Calls::XDP),
        false => (CapabilitySet::empty(), Calls::empty()),
    };
    Sandbox {
        files: charter.places(),
        capabilities: capabilities
            | CapabilitySet::CHOWN
            | CapabilitySet::DAC_OVERRIDE
            | CapabilitySet::DAC_READ_SEARCH
            | CapabilitySet::FOWNER
            | CapabilitySet::NET_ADMIN,
        calls: calls
            | Calls::OPEN
            | Calls::EDIT
            | Calls::CONNECT
            | Calls::LISTEN
            | Calls::TAPS
            | Calls::INTERFACES,
    }
}

/// `ringferry privileged-helper`: runs the helper until the switch closes the socket.
///
/// # Errors
/// It was not started by a switch, or the switch broke the protocol.
pub fn run_helper() -> io::Result<()> {
    // Whoever sends a signal to the switch, a terminal or a service manager, may send it to all its processes. The switch needs
    // the helper to the end, and ends it.
    let signals = [Signal::TERM, Signal::INT, Signal::HUP, Signal::USR1, Signal::USR2];
    let _blocked = Signals::new(&signals)?;
    let stream = Stream::from_fd(inherited::take(SOCKET)?)?;
    // Owners of sockets are given by name, also of users that come later.
    accounts::read_by_a_thread()?;
    // The switch has said what is missing in its own.
    serve(stream, |charter| helper(charter).enter().iter().all(|missing| missing.part != Part::Landlock))
}
