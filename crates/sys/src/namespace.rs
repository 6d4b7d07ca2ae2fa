//! User and network namespaces: a private network stack, with or without root.
//!
//! A namespace lives as long as a thread is in it or a descriptor of it is open. Network namespaces
//! belong to threads, and children start in their parent thread's one.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{Mode, OFlags};
use rustix::thread::{LinkNameSpaceType, UnshareFlags};

/// The kernel does not let this user make a namespace.
#[derive(Debug, thiserror::Error)]
pub enum NamespaceError {
    /// No user namespace: it is switched off, or used up.
    #[error("this system does not allow user namespaces ({source}): {remedy}, or run as root")]
    User {
        /// What to change.
        remedy: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
    /// The process has threads already.
    #[error("a user namespace must be entered before the first thread starts")]
    Threads,
    /// The user namespace is there, and its identities cannot be set.
    #[error("cannot become root in a new user namespace: writing {file}: {source}: run as root")]
    Identity {
        /// The file of `/proc/self` that refused.
        file: &'static str,
        /// What it said.
        source: io::Error,
    },
    /// No network namespace.
    #[error(
        "cannot make or enter a network namespace: {0}: run as root, or in a user namespace (unshare --user --map-root-user)"
    )]
    Net(#[source] io::Error),
}

/// Enters a new user namespace, in which the current user is root: it may then make network
/// namespaces and taps in them without having been root before. There is no way back.
///
/// The process must have one thread only.
///
/// # Errors
/// [`NamespaceError::User`] names the setting that forbids it; [`NamespaceError::Threads`];
/// [`NamespaceError::Identity`].
pub fn enter_user_namespace() -> Result<(), NamespaceError> {
    let uid = rustix::process::geteuid().as_raw();
    let gid = rustix::process::getegid().as_raw();
    // SAFETY: a new user namespace changes credentials only; it leaves descriptors, memory and the
    // working directory alone, so nothing Rust relies on changes.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWUSER) }.map_err(|e| match e {
        rustix::io::Errno::INVAL => NamespaceError::Threads,
        e => NamespaceError::User { remedy: remedy(read_setting), source: e.into() },
    })?;
    let write = |file, text: String| {
        std::fs::write(format!("/proc/self/{file}"), text)
            .map_err(|source| identity_error(file, source, remedy(read_setting)))
    };
    // A process without rights outside may map its group only after giving up setgroups.
    write("setgroups", "deny".into())?;
    write("uid_map", format!("0 {uid} 1"))?;
    write("gid_map", format!("0 {gid} 1"))
}

/// AppArmor lets the namespace be made, and then grants it no rights: writing the maps fails.
fn identity_error(file: &'static str, source: io::Error, remedy: &'static str) -> NamespaceError {
    if source.kind() == io::ErrorKind::PermissionDenied && remedy == APPARMOR {
        NamespaceError::User { remedy, source }
    } else {
        NamespaceError::Identity { file, source }
    }
}

const APPARMOR: &str = "allow it with `sysctl kernel.apparmor_restrict_unprivileged_userns=0`";

/// What to change, found by looking at the settings known to forbid user namespaces.
fn remedy(read: impl Fn(&str) -> Option<u64>) -> &'static str {
    if read("/proc/sys/user/max_user_namespaces") == Some(0) {
        "allow it with `sysctl user.max_user_namespaces=10000`"
    } else if read("/proc/sys/kernel/unprivileged_userns_clone") == Some(0) {
        "allow it with `sysctl kernel.unprivileged_userns_clone=1`"
    } else if read("/proc/sys/kernel/apparmor_restrict_unprivileged_userns") == Some(1) {
        APPARMOR
    } else {
        "a container or security policy forbids it (in a container: --security-opt seccomp=unconfined)"
    }
}

fn read_setting(path: &str) -> Option<u64> {
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Moves the calling thread into a new network namespace, with nothing in it but a loopback
/// interface that is down.
///
/// # Errors
/// [`NamespaceError::Net`]: it needs CAP_SYS_ADMIN in the user namespace.
pub fn unshare_net() -> Result<(), NamespaceError> {
    // SAFETY: a new network namespace affects only sockets and interfaces made from now on; open
    // descriptors, memory and the file system stay as they are.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }.map_err(net_error)
}

/// The network namespace of process `pid`.
///
/// # Errors
/// [`NamespaceError::Net`]: there is no such process, or it belongs to another user.
pub fn open_net(pid: u32) -> Result<OwnedFd, NamespaceError> {
    open(&format!("/proc/{pid}/ns/net"))
}

/// The calling thread's network namespace.
///
/// # Errors
/// [`NamespaceError::Net`]: `/proc` is not mounted.
pub fn current_net() -> Result<OwnedFd, NamespaceError> {
    open("/proc/thread-self/ns/net")
}

fn open(path: &str) -> Result<OwnedFd, NamespaceError> {
    rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).map_err(net_error)
}

/// Moves the calling thread into the network namespace `net`.
///
/// # Errors
/// [`NamespaceError::Net`]: it is no network namespace, or it needs CAP_SYS_ADMIN in it.
pub fn join_net(net: impl AsFd) -> Result<(), NamespaceError> {
    join(net.as_fd()).map_err(net_error)
}

/// As [`join_net`], fit for a forked child: one system call and no memory.
pub(crate) fn join(net: BorrowedFd<'_>) -> rustix::io::Result<()> {
    rustix::thread::move_into_link_name_space(net, Some(LinkNameSpaceType::Network))
}

fn net_error(error: rustix::io::Errno) -> NamespaceError {
    NamespaceError::Net(error.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netif;
    use crate::tap::{Tap, TapConfig};
    use crate::testing::in_new_net;

    #[test]
    fn a_thread_moves_between_namespaces() {
        in_new_net(|| {
            let first = current_net().unwrap();
            let _tap = Tap::open(&TapConfig::new("t0")).unwrap();
            unshare_net().unwrap();
            assert_eq!(netif::index("t0").unwrap(), None);
            assert!(netif::index("lo").unwrap().is_some());
            join_net(&first).unwrap();
            assert!(netif::index("t0").unwrap().is_some());
            let ours = open_net(std::process::id()).unwrap();
            join_net(&ours).unwrap();
            assert_eq!(netif::index("t0").unwrap(), None);
        });
    }

    #[test]
    fn a_file_is_no_namespace() {
        let error = join_net(tempfile::tempfile().unwrap()).unwrap_err();
        assert!(matches!(error, NamespaceError::Net(_)), "{error}");
        assert!(open_net(u32::MAX).is_err());
    }

    #[test]
    fn a_process_with_threads_is_told_so() {
        // The test harness is one.
        assert!(matches!(enter_user_namespace(), Err(NamespaceError::Threads)));
    }

    #[test]
    fn the_remedy_names_the_setting_that_forbids() {
        let with = |name: &'static str, value| remedy(move |path| path.ends_with(name).then_some(value));
        assert!(with("max_user_namespaces", 0).contains("user.max_user_namespaces=10000"));
        assert!(with("unprivileged_userns_clone", 0).contains("kernel.unprivileged_userns_clone=1"));
        assert_eq!(with("apparmor_restrict_unprivileged_userns", 1), APPARMOR);
        assert!(with("max_user_namespaces", 5).contains("container"));
        let denied = || io::ErrorKind::PermissionDenied.into();
        assert!(matches!(identity_error("uid_map", denied(), APPARMOR), NamespaceError::User { .. }));
        assert!(matches!(identity_error("uid_map", denied(), "else"), NamespaceError::Identity { .. }));
    }
}
