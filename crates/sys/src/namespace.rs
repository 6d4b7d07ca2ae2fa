//! User and network namespaces: a private network stack, with or without root.
//!
//! A process enters a user namespace once, before it starts threads; any thread may then make, open and join
//! network namespaces. A namespace exists as long as a thread is in it or a descriptor of it is open. Network
//! namespaces belong to threads, and children start in the namespace of the thread that starts them.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{Mode, OFlags};
use rustix::thread::{LinkNameSpaceType, UnshareFlags};

/// The reason for which a namespace cannot be made or entered. Each message says what to do.
#[derive(Debug, thiserror::Error)]
pub enum NamespaceError {
    /// User namespaces are disabled, or their number is exhausted.
    #[error("this system does not allow user namespaces ({source}): {remedy}, or run as root")]
    User {
        /// The change of the system that would allow it.
        remedy: &'static str,
        /// The error of the system call.
        source: io::Error,
    },
    /// The process has threads already.
    #[error("a user namespace must be entered before the first thread starts")]
    Threads,
    /// The user namespace was made, but its user and group maps cannot be written.
    #[error("cannot become root in a new user namespace: writing {file}: {source}: run as root")]
    Identity {
        /// The file of `/proc/self` that could not be written.
        file: &'static str,
        /// The error of the write.
        source: io::Error,
    },
    /// A network namespace cannot be made, opened or joined.
    #[error(
        "cannot make or enter a network namespace: {0}: run as root, or in a user namespace (unshare --user --map-root-user)"
    )]
    Net(#[source] io::Error),
}

/// Enters a new user namespace in which the current user is root, so that an unprivileged user can make network
/// namespaces and taps in them. The process cannot leave it again, and it must have only one thread.
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
    // A process without privileges outside may map its group only after it has disabled setgroups.
    write("setgroups", "deny".into())?;
    write("uid_map", format!("0 {uid} 1"))?;
    write("gid_map", format!("0 {gid} 1"))
}

/// Makes the error for a map that cannot be written. AppArmor lets a namespace be made but grants no rights in it,
/// so that writing the maps fails; that is reported as a user namespace that is not allowed.
fn identity_error(file: &'static str, source: io::Error, remedy: &'static str) -> NamespaceError {
    if source.kind() == io::ErrorKind::PermissionDenied && remedy == APPARMOR {
        NamespaceError::User { remedy, source }
    } else {
        NamespaceError::Identity { file, source }
    }
}

const APPARMOR: &str = "allow it with `sysctl kernel.apparmor_restrict_unprivileged_userns=0`";

/// Finds the change that would allow user namespaces, by reading the settings that are known to forbid them.
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

/// Moves the calling thread into a new network namespace, which contains only a loopback interface that is down.
///
/// # Errors
/// [`NamespaceError::Net`], for example without CAP_SYS_ADMIN in the user namespace.
pub fn unshare_net() -> Result<(), NamespaceError> {
    // SAFETY: a new network namespace affects only sockets and interfaces made from now on; open
    // descriptors, memory and the file system stay as they are.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }.map_err(net_error)
}

/// Opens the network namespace of process `pid`.
///
/// # Errors
/// [`NamespaceError::Net`], if there is no such process or it belongs to another user.
pub fn open_net(pid: u32) -> Result<OwnedFd, NamespaceError> {
    open(&format!("/proc/{pid}/ns/net"))
}

/// Opens the calling thread's network namespace.
///
/// # Errors
/// [`NamespaceError::Net`], if `/proc` is not mounted.
pub fn current_net() -> Result<OwnedFd, NamespaceError> {
    open("/proc/thread-self/ns/net")
}

fn open(path: &str) -> Result<OwnedFd, NamespaceError> {
    rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).map_err(net_error)
}

/// Moves the calling thread into the network namespace `net`.
///
/// # Errors
/// [`NamespaceError::Net`], if it is not a network namespace or CAP_SYS_ADMIN in it is missing.
pub fn join_net(net: impl AsFd) -> Result<(), NamespaceError> {
    join(net.as_fd()).map_err(net_error)
}

/// Does the same as [`join_net`], by one system call and without allocation, as a forked child needs it.
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
