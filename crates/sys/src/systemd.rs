//! The two small protocols of service managers: telling that a service is ready, and taking over
//! sockets that were opened for it. Both work without systemd, and do nothing where nobody asks.
//!
//! See sd_notify(3) and sd_listen_fds(3).

use std::ffi::OsStr;
use std::io;
use std::os::fd::{OwnedFd, RawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::inherited;

/// The number of the first inherited socket, `SD_LISTEN_FDS_START`.
const FIRST_FD: RawFd = 3;

/// Tells the service manager that the service is ready. Returns whether there is a manager that asked.
///
/// # Errors
/// The manager's socket cannot be reached. A service may go on without.
pub fn ready() -> io::Result<bool> {
    notify("READY=1")
}

/// Tells the service manager that the service has begun to end.
///
/// # Errors
/// As [`ready`].
pub fn stopping() -> io::Result<bool> {
    notify("STOPPING=1")
}

/// Gives the service manager one line to show about the service.
///
/// # Errors
/// As [`ready`].
pub fn status(line: &str) -> io::Result<bool> {
    notify(&format!("STATUS={}", line.replace('\n', " ")))
}

fn notify(message: &str) -> io::Result<bool> {
    match std::env::var_os("NOTIFY_SOCKET") {
        Some(socket) if !socket.is_empty() => send(&socket, message).map(|()| true),
        _ => Ok(false),
    }
}

/// Sends `message` to a socket given as a path, or as an abstract name after an `@`.
fn send(socket: &OsStr, message: &str) -> io::Result<()> {
    let address = match socket.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
        _ => SocketAddr::from_pathname(socket)?,
    };
    UnixDatagram::unbound()?.send_to_addr(message.as_bytes(), &address)?;
    Ok(())
}

/// The sockets this process inherited, with their names (`FileDescriptorName=`, or "unknown"), closed on exec.
/// The first call gets them, later ones get none.
///
/// Call it at the start of `main`, before anything else is opened: the numbers are taken on the word of the
/// environment (`LISTEN_PID`, `LISTEN_FDS`, `LISTEN_FDNAMES`). The variables stay, and mean nothing
/// to children, whose process numbers differ.
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

/// The names of the sockets announced to process `own_pid`, in the order of their numbers.
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
