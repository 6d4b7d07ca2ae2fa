//! The protocols of service managers: notification of state (sd_notify(3)) and socket activation
//! (sd_listen_fds(3)).
//!
//! A service calls [`listen_fds`] at the start of `main`, [`ready`] when it serves, and [`stopping`] when it begins
//! to end. One that gives up its privileges before that connects a [`Notifier`] first; that one also tells of reloads and that the service is alive
//! ([`watchdog_interval`] says how often). Neither protocol needs systemd, and without a
//! manager the functions do nothing.

use std::ffi::{OsStr, OsString};
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use rustix::pipe::PipeFlags;

use crate::socket::receive;
use crate::{inherited, lifeline};

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
                // A manager that does not read is not waited for.
                connection.set_nonblocking(true)?;
                Some(connection)
            }
            None => None,
        }))
    }

    /// Makes everything that is said fail with `WouldBlock` where the manager is behind, instead of waiting for it.
    ///
    /// # Errors
    /// None that a caller can cause.
    pub fn set_nonblocking(&self) -> io::Result<()> {
        self.0.as_ref().map_or(Ok(()), |connection| connection.set_nonblocking(true))
    }

    /// Takes over the connection of another process.
    pub fn from_fd(fd: OwnedFd) -> Notifier {
        Notifier(Some(fd.into()))
    }

    /// Returns the connection.
    pub fn connection(&self) -> Option<BorrowedFd<'_>> {
        self.0.as_ref().map(AsFd::as_fd)
    }

    /// Makes a second one of the same connection.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn try_clone(&self) -> io::Result<Notifier> {
        Ok(Notifier(self.0.as_ref().map(UnixDatagram::try_clone).transpose()?))
    }

    /// Returns true if both tell the same manager.
    pub fn has_manager_of(&self, other: &Notifier) -> bool {
        let peer = |notifier: &Notifier| {
            let address = notifier.0.as_ref()?.peer_addr().ok()?;
            let name = address.as_pathname().map(|path| path.as_os_str().as_bytes().to_vec());
            name.or_else(|| Some([b"@", address.as_abstract_name()?].concat()))
        };
        peer(self).is_some_and(|name| peer(other) == Some(name))
    }

    /// Makes one that tells the other end of a connected socket.
    pub fn of(connection: UnixDatagram) -> Notifier {
        Notifier(Some(connection))
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

    /// Says that another process is the service's main one from now on, and this one is about to end; or that this one is, with its [`lifeline`] for
    /// `ringferry keep`. Other managers close that.
    ///
    /// # Errors
    /// The same as [`Notifier::ready`].
    pub fn main_pid(&self, pid: u32) -> io::Result<bool> {
        let message = format!("MAINPID={pid}");
        match (&self.0, lifeline::held()) {
            (Some(connection), Some(held)) if pid == std::process::id() => {
                send_with(connection, &message, held).map(|()| true)
            }
            _ => self.send(&message),
        }
    }

    /// Has the manager keep a copy of a descriptor under a name, which [`listen_fds`] of the service's next process returns (`FDSTORE=1`). A manager that
    /// has the same open file already keeps it under its first name only.
    ///
    /// # Errors
    /// The same as [`Notifier::ready`]. Whether the manager keeps it, it does not say.
    pub fn store(&self, name: &str, fd: BorrowedFd<'_>) -> io::Result<bool> {
        let Some(connection) = &self.0 else { return Ok(false) };
        send_with(connection, &format!("FDSTORE=1\nFDNAME={name}\nFDPOLL=0"), fd)?;
        Ok(true)
    }

    /// Has the manager close what it keeps under a name.
    ///
    /// # Errors
    /// The same as [`Notifier::ready`].
    pub fn forget(&self, name: &str) -> io::Result<bool> {
        self.send(&format!("FDSTOREREMOVE=1\nFDNAME={name}"))
    }

    /// Waits until the manager has done what it was told before, for so long at most (`BARRIER=1`, sd_notify_barrier(3)): what it was to forget it has closed then. One
    /// that keeps to an earlier form of the protocol is waited for in vain.
    ///
    /// # Errors
    /// `TimedOut`; the same as [`Notifier::ready`].
    pub fn settle(&self, most: Duration) -> io::Result<()> {
        let Some(connection) = &self.0 else { return Ok(()) };
        let (closed, passed) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
        send_with(connection, "BARRIER=1", passed.as_fd())?;
        drop(passed);
        // The manager's copy is the only one that is left.
        let most = Timespec::try_from(most).map_err(io::Error::other)?;
        match rustix::event::poll(&mut [PollFd::new(&closed, PollFlags::empty())], Some(&most))? {
            0 => Err(io::ErrorKind::TimedOut.into()),
            _ => Ok(()),
        }
    }

    /// Says something else.
    ///
    /// # Errors
    /// The same as [`Notifier::ready`].
    pub fn say(&self, message: &str) -> io::Result<bool> {
        self.send(message)
    }

    /// Does the same as [`status()`].
    ///
    /// # Errors
    /// The same as [`Notifier::ready`].
    pub fn status(&self, line: &str) -> io::Result<bool> {
        self.send(&format!("STATUS={}", line.replace('\n', " ")))
    }

    /// Tells the service manager that the service is alive. One that does not do so within the time that the manager has set is killed.
    ///
    /// # Errors
    /// The same as [`Notifier::ready`].
    pub fn alive(&self) -> io::Result<bool> {
        self.send("WATCHDOG=1")
    }

    /// Tells the service manager that the service has begun to read its configuration again; [`ready`](Self::ready) says that this is done.
    ///
    /// # Errors
    /// The same as [`Notifier::ready`].
    pub fn reloading(&self) -> io::Result<bool> {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let microseconds = now.tv_sec * 1_000_000 + now.tv_nsec / 1000;
        self.send(&format!("RELOADING=1\nMONOTONIC_USEC={microseconds}"))
    }

    fn send(&self, message: &str) -> io::Result<bool> {
        match &self.0 {
            Some(connection) => {
                with_room(connection, || {
                    rustix::net::send(connection, message.as_bytes(), SendFlags::NOSIGNAL)
                })?;
                Ok(true)
            }
            None => Ok(false),
        }
    }
}

/// How long a connection that does not block waits all the same for a manager that reads: a queue has room for ten messages on some systems.
const MOMENT: Timespec = Timespec { tv_sec: 0, tv_nsec: 5_000_000 };

/// Sends a message with a descriptor.
fn send_with(connection: &UnixDatagram, message: &str, fd: BorrowedFd<'_>) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let (bytes, fds) = ([IoSlice::new(message.as_bytes())], [fd]);
    with_room(connection, || {
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(&fds));
        rustix::net::sendmsg(connection, &bytes, &mut control, SendFlags::NOSIGNAL)
    })?;
    Ok(())
}

/// Sends, if need be when there is room again.
fn with_room(
    connection: &UnixDatagram,
    mut send: impl FnMut() -> rustix::io::Result<usize>,
) -> rustix::io::Result<()> {
    loop {
        match send() {
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => {
                if rustix::event::poll(&mut [PollFd::new(connection, PollFlags::OUT)], Some(&MOMENT)) == Ok(0)
                {
                    return Err(Errno::AGAIN);
                }
            }
            sent => return sent.map(drop),
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

/// The manager's end, for a program that starts a service and keeps descriptors for it.
#[derive(Debug)]
pub struct Manager(UnixDatagram);

/// What a service has said: `KEY=VALUE` lines, and the descriptors that came with them.
#[derive(Debug, Default)]
pub struct Said {
    /// The lines.
    pub lines: Vec<String>,
    /// The descriptors.
    pub descriptors: Vec<OwnedFd>,
    /// Further descriptors came with them, for which this process had no room: they are lost.
    pub descriptors_lost: bool,
}

impl Manager {
    /// Makes the socket that a service finds in `NOTIFY_SOCKET`. Whoever may write to it may say anything.
    ///
    /// # Errors
    /// The path cannot be bound.
    pub fn bind(path: &Path) -> io::Result<Manager> {
        let socket = UnixDatagram::bind(path)?;
        socket.set_nonblocking(true)?;
        Ok(Manager(socket))
    }

    /// Receives what was said next, or `None` if nothing was.
    ///
    /// # Errors
    /// The errors of `recvmsg`.
    pub fn receive(&self) -> io::Result<Option<Said>> {
        let (mut bytes, mut descriptors) = ([0; 4096], Vec::new());
        let received = match receive(self.0.as_fd(), &mut bytes, &mut descriptors, RecvFlags::empty()) {
            Err(Errno::AGAIN) => return Ok(None),
            received => received?,
        };
        let lines = String::from_utf8_lossy(&bytes[..received.bytes]).lines().map(str::to_owned).collect();
        let said = Said { lines, descriptors, descriptors_lost: received.fds_lost };
        Ok(Some(said))
    }
}

impl AsFd for Manager {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// How many descriptors the manager keeps for this service, at most: what it says in `FDSTORE`, or 0 if it says nothing (systemd before version 254, whose units
/// say it themselves).
pub fn store_limit() -> usize {
    std::env::var("FDSTORE").ok().and_then(|limit| limit.parse().ok()).unwrap_or(0)
}

/// Returns the time within which the service manager wants to hear that this process is [alive](Notifier::alive), again and again
/// (sd_watchdog_enabled(3)); `None` if it does not.
pub fn watchdog_interval() -> Option<Duration> {
    let [pid, interval] = ["WATCHDOG_PID", "WATCHDOG_USEC"].map(|name| std::env::var(name).ok());
    watchdog_of(std::process::id(), pid.as_deref(), interval.as_deref()?)
}

/// Returns the interval that is asked of process `own_pid`.
fn watchdog_of(own_pid: u32, pid: Option<&str>, interval: &str) -> Option<Duration> {
    let is_for_us = pid.is_none_or(|pid| pid.parse() == Ok(own_pid));
    let interval = interval.parse().ok().filter(|interval| *interval > 0 && is_for_us);
    interval.map(Duration::from_micros)
}

/// The numbers of descriptors that this process inherits where they do not begin at 3, one after the other: `ringferry keep` announces so what it keeps, with the names in
/// `LISTEN_FDNAMES` and for the process of `LISTEN_PID`.
pub const LISTEN_FDNUMBERS: &str = "RINGFERRY_LISTEN_FDNUMBERS";

/// Takes the sockets that this process inherited, with their names (`FileDescriptorName=`, or "unknown"), and has
/// them closed on exec. Only the first call returns them.
///
/// It must be called at the start of `main`, before any other file is opened, because it trusts the numbers in the
/// environment (`LISTEN_PID`, `LISTEN_FDS` or [`LISTEN_FDNUMBERS`], `LISTEN_FDNAMES`). The variables are not removed; children ignore
/// them, as their process numbers differ.
pub fn listen_fds() -> Vec<(String, OwnedFd)> {
    static TAKEN: AtomicBool = AtomicBool::new(false);
    if TAKEN.swap(true, Ordering::Relaxed) {
        return Vec::new();
    }
    let [pid, count, names, numbers] = ["LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", LISTEN_FDNUMBERS]
        .map(|name| std::env::var(name).unwrap_or_default());
    let numbers: Vec<RawFd> = match numbers.as_str() {
        "" => (FIRST_FD..).take(count.parse().unwrap_or(0)).collect(),
        numbers => numbers.split(',').map_while(|number| number.parse().ok()).collect(),
    };
    let names = announced(std::process::id(), &pid, numbers.len(), &names);
    numbers
        .into_iter()
        .zip(names)
        .map_while(|(number, name)| Some((name, inherited::take(number).ok()?)))
        .collect()
}

/// Returns the names of the sockets announced to process `own_pid`, in the order of their numbers.
fn announced<'a>(
    own_pid: u32,
    pid: &str,
    count: usize,
    names: &'a str,
) -> impl Iterator<Item = String> + use<'a> {
    let for_us = pid.parse() == Ok(own_pid);
    let count = if for_us { count } else { 0 };
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
    fn a_watchdog_is_for_the_process_that_it_names() {
        let second = Some(Duration::from_secs(1));
        assert_eq!(watchdog_of(42, Some("42"), "1000000"), second);
        assert_eq!(watchdog_of(42, None, "1000000"), second);
        for (pid, interval) in [(Some("41"), "1000000"), (Some(""), "1000000"), (None, "0"), (None, "soon")] {
            assert_eq!(watchdog_of(42, pid, interval), None, "{pid:?} {interval}");
        }
    }

    #[test]
    fn a_notifier_tells_what_it_is_asked_to_and_never_waits() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let manager = UnixDatagram::bind(&path).unwrap();
        let connection = UnixDatagram::unbound().unwrap();
        connection.connect(&path).unwrap();
        connection.set_nonblocking(true).unwrap();
        let notifier = Notifier(Some(connection));
        let heard = || {
            let mut got = [0; 128];
            let n = manager.recv(&mut got).unwrap();
            String::from_utf8_lossy(&got[..n]).into_owned()
        };
        notifier.status("two\nlines").unwrap();
        assert_eq!(heard(), "STATUS=two lines");
        notifier.alive().unwrap();
        assert_eq!(heard(), "WATCHDOG=1");
        notifier.reloading().unwrap();
        let told = heard();
        let time = told.strip_prefix("RELOADING=1\nMONOTONIC_USEC=").unwrap().parse::<u64>();
        assert!(time.is_ok_and(|time| time > 0), "{told}");
        // Until the manager's queue is full.
        let full = (0..1_000_000).find_map(|_| notifier.alive().err());
        assert_eq!(full.map(|error| error.kind()), Some(io::ErrorKind::WouldBlock));
    }

    /// The limit of open files is the whole process's, so this runs as a child of itself.
    #[test]
    fn descriptors_for_which_there_is_no_room_are_said_to_be_lost() {
        if std::env::var_os("LOST_CHILD").is_none() {
            let status = std::process::Command::new(std::env::current_exe().unwrap())
                .args([
                    "--exact",
                    "systemd::tests::descriptors_for_which_there_is_no_room_are_said_to_be_lost",
                ])
                .env("LOST_CHILD", "1")
                .stdout(std::process::Stdio::null())
                .status()
                .unwrap();
            assert!(status.success());
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let manager = Manager::bind(&path).unwrap();
        let connection = UnixDatagram::unbound().unwrap();
        connection.connect(&path).unwrap();
        let notifier = Notifier::of(connection);
        let file = tempfile::tempfile().unwrap();
        let resource = rustix::process::Resource::Nofile;
        let limit = rustix::process::getrlimit(resource);
        for (most, kept, lost) in [(limit.current, 1, false), (Some(0), 0, true), (limit.current, 1, false)] {
            notifier.store("a", file.as_fd()).unwrap();
            let now = rustix::process::Rlimit { current: most, ..limit };
            rustix::process::setrlimit(resource, now).unwrap();
            let said = manager.receive().unwrap().unwrap();
            assert_eq!((said.descriptors.len(), said.descriptors_lost), (kept, lost));
            assert_eq!(said.lines, ["FDSTORE=1", "FDNAME=a", "FDPOLL=0"]);
            rustix::process::setrlimit(resource, limit).unwrap();
        }
    }

    #[test]
    fn sockets_are_announced_by_count_and_name() {
        let names = |pid, count, names| announced(42, pid, count, names).collect::<Vec<_>>();
        assert_eq!(names("42", 2, "vm0.socket:vm1.socket"), ["vm0.socket", "vm1.socket"]);
        assert_eq!(names("42", 2, "only"), ["only", "unknown"]);
        assert_eq!(names("42", 1, ""), ["unknown"]);
        assert_eq!(names("42", 0, "a:b"), [""; 0]);
        assert_eq!(names("41", 2, "a:b"), [""; 0]);
    }
}
