//! The protocols of service managers: notification of state (sd_notify(3)) and socket activation
//! (sd_listen_fds(3)).
//!
//! A service calls [`listen_fds`] at the start of `main`, [`ready`] when it serves, and [`stopping`] when it begins
//! to end. One that gives up its privileges before that connects a [`Notifier`] first. Neither protocol needs systemd, and without a
//! manager the functions do nothing.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{OwnedFd, RawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::inherited;

/// The number of the first inherited socket, `SD_LISTEN_FDS_START`.
const FIRST_FD: RawFd = 3;

/// A connection to the service manager, for a process that cannot make one later. It owns the socket.
#[derive(Debug)]
pub struct Notifier(Option<UnixDatagram>);

impl Notifier {
    /// Connects to the service manager, if there is one.
    ///
    /// # Errors
    /// The manager's socket cannot be reached.
    pub fn connect() -> io::Result<Notifier> {
        Ok(Notifier(match manager() {
            Some(socket) => {
                let connection = UnixDatagram::unbound()?;
                connection.connect_addr(&address(&socket)?)?;
                Some(connection)
            }
            None => None,
        }))
    }

    /// Makes one that tells nobody.
    pub fn nobody() -> Notifier {
        Notifier(None)
    }

    /// Does the same as [`ready()`].
    ///
    /// # Errors
    /// The manager has gone. A service may ignore that.
    pub fn ready(&self) -> io::Result<bool> {
        self.send("READY=1")
    }

    /// Does the same as [`stopping()`].
    ///
    /// # Errors
    /// The same as [`Notifier::ready`].
    pub fn stopping(&self) -> io::Result<bool> {
        self.send("STOPPING=1")
    }

    /// Says that another process is the service's main one from now on, and this one is about to end.
    ///
    /// # Errors
    /// The same as [`Notifier::ready`].
    pub fn main_pid(&self, pid: u32) -> io::Result<bool> {
        self.send(&format!("MAINPID={pid}"))
    }

    fn send(&self, message: &str) -> io::Result<bool> {
        match &self.0 {
            Some(connection) => connection.send(message.as_bytes()).map(|_| true),
            None => Ok(false),
        }
    }
}

/// Tells the service manager that the service is ready. Returns false if there is no manager.
///
/// # Errors
/// The manager's socket cannot be reached. A service may ignore that.
pub fn ready() -> io::Result<bool> {
    notify("READY=1")
}

/// Tells the service manager that the service has begun to end.
///
/// # Errors
/// The same as [`ready`].
pub fn stopping() -> io::Result<bool> {
    notify("STOPPING=1")
}

/// Gives the service manager one line of text to show as the service's status.
///
/// # Errors
/// The same as [`ready`].
pub fn status(line: &str) -> io::Result<bool> {
    notify(&format!("STATUS={}", line.replace('\n', " ")))
}

fn notify(message: &str) -> io::Result<bool> {
    match manager() {
        Some(socket) => send(&socket, message).map(|()| true),
        None => Ok(false),
    }
}

/// The manager's socket, from the environment.
fn manager() -> Option<OsString> {
    std::env::var_os("NOTIFY_SOCKET").filter(|socket| !socket.is_empty())
}

fn send(socket: &OsStr, message: &str) -> io::Result<()> {
    UnixDatagram::unbound()?.send_to_addr(message.as_bytes(), &address(socket)?)?;
    Ok(())
}

/// The address of a socket that is given as a path, or as an abstract name after an `@`.
fn address(socket: &OsStr) -> io::Result<SocketAddr> {
    match socket.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name),
        _ => SocketAddr::from_pathname(socket),
    }
}

/// Takes the sockets that this process inherited, with their names (`FileDescriptorName=`, or "unknown"), and has
/// them closed on exec. Only the first call returns them.
///
/// It must be called at the start of `main`, before any other file is opened, because it trusts the numbers in the
/// environment (`LISTEN_PID`, `LISTEN_FDS`, `LISTEN_FDNAMES`). The variables are not removed; children ignore
/// them, as their process numbers differ.
pub fn listen_fds() -> Vec<(String, OwnedFd)> {
    static TAKEN: AtomicBool = AtomicBool::new(false);
    if TAKEN.swap(true, Ordering::Relaxed) {
        return Vec::new();
    }
    let [pid, count, names] =
        ["LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"].map(|name| std::env::var(name).unwrap_or_default());
    let names = announced(std::process::id(), &pid, &count, &names);
    (FIRST_FD..).zip(names).map_while(|(number, name)| Some((name, inherited::take(number).ok()?))).collect()
}

/// Returns the names of the sockets announced to process `own_pid`, in the order of their numbers.
fn announced<'a>(
    own_pid: u32,
    pid: &str,
    count: &str,
    names: &'a str,
) -> impl Iterator<Item = String> + use<'a> {
    let for_us = pid.parse() == Ok(own_pid);
    let count: usize = if for_us { count.parse().unwrap_or(0) } else { 0 };
    let given = names.split(':').filter(|name| !name.is_empty()).map(str::to_owned);
    given.chain(std::iter::repeat_with(|| "unknown".to_owned())).take(count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notifications_reach_path_and_abstract_sockets() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let manager = UnixDatagram::bind(&path).unwrap();
        let name = format!("@ringferry-test-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name[1..]).unwrap();
        let other = UnixDatagram::bind_addr(&address).unwrap();
        let mut got = [0; 64];
        for (socket, receiver) in [(path.as_os_str(), manager), (OsStr::new(&name), other)] {
            send(socket, "READY=1").unwrap();
            let n = receiver.recv(&mut got).unwrap();
            assert_eq!(&got[..n], b"READY=1");
        }
        assert!(send(dir.path().join("nobody").as_os_str(), "READY=1").is_err());
    }

    #[test]
    fn sockets_are_announced_by_count_and_name() {
        let names = |pid, count, names| announced(42, pid, count, names).collect::<Vec<_>>();
        assert_eq!(names("42", "2", "vm0.socket:vm1.socket"), ["vm0.socket", "vm1.socket"]);
        assert_eq!(names("42", "2", "only"), ["only", "unknown"]);
        assert_eq!(names("42", "1", ""), ["unknown"]);
        assert_eq!(names("42", "0", "a:b"), [""; 0]);
        assert_eq!(names("41", "2", "a:b"), [""; 0]);
        assert_eq!(names("", "", ""), [""; 0]);
        assert_eq!(names("42", "-1", "a"), [""; 0]);
    }
}
