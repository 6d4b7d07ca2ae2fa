//! Unix stream sockets that pass file descriptors: the set-up channel of vhost-user, and the control socket.
//!
//! A server makes a [`Listener`] and calls [`Listener::accept`] whenever it is readable; a client calls
//! [`Stream::connect`]. Both exchange bytes and descriptors by [`Stream::send`] and [`Stream::recv`] until one side
//! drops its [`Stream`]. A [`Listener`] made by [`Listener::bind`] owns its file and removes it when it is dropped;
//! the file of an inherited one is left alone. All sockets are closed on exec. Listeners are non-blocking, except
//! in [`Listener::wait`]; streams block until [`Stream::set_nonblocking`].

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::linux::fs::MetadataExt;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, Uid};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, sockopt,
};
use rustix::pipe::PipeFlags;

use crate::closer::Closer;

/// Length of the longest socket path in bytes: `sun_path` without the terminating zero.
pub const MAX_PATH: usize = 107;

/// Largest number of descriptors in one [`Stream::send`], and that a [`Stream::recv`] expects. The largest vhost-user
/// message has 32.
pub const MAX_FDS: usize = 64;

/// Largest number of descriptors that the kernel passes with one message (`SCM_MAX_FD`). There is room for all of them
/// when receiving: the kernel closes those for which there is none within our `recvmsg`, which a peer can make wait.
const SCM_MAX_FD: usize = 253;

/// Number of connections that may wait to be accepted. A port has one client; the others are for its retries.
const BACKLOG: i32 = 16;

/// What is wrong where the kernel passes no descriptors on.
const TOO_MANY_IN_FLIGHT: &str = "the kernel passes no descriptors on, as too many of this user lie unread in sockets: see which of its processes leaves \
                                  them there, run front ends as users of their own, or raise the limit of open files (ulimit -n, LimitNOFILE=)";

/// A process in brackets, for a message.
fn process(pid: Option<u32>) -> String {
    pid.map_or_else(String::new, |pid| format!(" (process {pid})"))
}

/// The reason for which a socket cannot listen at a path. Each message says what to do.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// The path is longer than the kernel allows, is empty, or contains a zero byte.
    #[error("socket path {0:?} is not possible: use 1 to {MAX_PATH} bytes (it has {len}), none of them zero", len = .0.as_os_str().len())]
    Path(PathBuf),
    /// A running process listens at the path.
    #[error("socket {path:?} is in use by a running program{}: end it, or choose another path", process(*.pid))]
    InUse {
        /// The path.
        path: PathBuf,
        /// The process that has made the socket, if it can be seen from here. It may have handed it to another one.
        pid: Option<u32>,
    },
    /// A file that is not a socket exists at the path.
    #[error("{0:?} exists and is not a socket: remove it, or choose another path")]
    NotASocket(PathBuf),
    /// The directory of the path does not exist.
    #[error("the directory of socket {0:?} does not exist: create it (mkdir -p {dir:?})", dir = directory(.0))]
    NoDirectory(PathBuf),
    /// The directory of the path, or a stale socket in it, may not be written.
    #[error("no permission to make socket {0:?}: make directory {dir:?} writable for this user, remove what another user left there, or choose another path", dir = directory(.0))]
    Permission(PathBuf),
    /// The socket cannot be given to that owner or group.
    #[error(
        "socket {0:?} cannot be given to that owner or group by this user: only root, or who has CAP_CHOWN, gives a socket to another owner; a group, who was a member of it (usermod -aG) when the switch was started (`ringferry run --replace` starts it anew)"
    )]
    Owner(PathBuf),
    /// An inherited descriptor is not a listening Unix stream socket.
    #[error(
        "the inherited descriptor is not a listening Unix stream socket: pass one (systemd: ListenStream=/path)"
    )]
    NotAListener,
    /// Another system call failed.
    #[error("socket {path:?}: {source}")]
    Os {
        /// Path of the socket.
        path: PathBuf,
        /// The error of the system call.
        source: io::Error,
    },
}

fn directory(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// Who may connect to a socket: the owner, group and permissions of its file. What is absent is as the process makes files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SocketAccess {
    /// Number of the user who owns the file.
    pub owner: Option<u32>,
    /// Number of its group.
    pub group: Option<u32>,
    /// Permissions, such as 0o660; who may write may connect.
    pub mode: Option<u32>,
}

/// A non-blocking socket that accepts connections.
#[derive(Debug)]
pub struct Listener {
    fd: OwnedFd,
    file: Option<SocketFile>,
    /// Another process listens on the same socket, and it is that one's to end it.
    shared: bool,
}

/// The file of a bound socket. It is removed on drop, if it is still the file that was made.
#[derive(Debug)]
struct SocketFile {
    path: PathBuf,
    id: (u64, u64),
    /// The file itself, wherever it is, to ask whether it has a name. That takes no rights, and while it is open no other file has its
    /// number.
    fd: OwnedFd,
    /// Somebody else removes it.
    left: bool,
}

impl SocketFile {
    /// The file that is at `path` now, which another process removes if it is `left` to it.
    fn at(path: &Path, left: bool) -> Result<SocketFile, BindError> {
        let os = |source: io::Error| BindError::Os { path: path.to_owned(), source };
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = rustix::fs::open(path, flags, Mode::empty()).map_err(|e| os(e.into()))?;
        let id = SocketFile::id_at(path).map_err(os)?;
        // The path is made absolute, so that the file is found on drop even if the working directory changes.
        Ok(SocketFile { path: std::path::absolute(path).map_err(os)?, id, fd, left })
    }

    /// Returns device and inode of the file that is at `path` now.
    fn id_at(path: &Path) -> io::Result<(u64, u64)> {
        let status = std::fs::symlink_metadata(path)?;
        Ok((status.st_dev(), status.st_ino()))
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if !self.left && SocketFile::id_at(&self.path).is_ok_and(|id| id == self.id) {
            let _ = std::fs::remove_file(&self.path); // it may have been removed already
        }
    }
}

/// The file at the path of a [`Listener`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// The file that it made, as far as can be seen; also if it made none.
    Own,
    /// Nothing: somebody has removed or moved the file.
    Empty,
    /// Another file, such as a socket of somebody else's.
    Taken,
}

impl Listener {
    /// Listens at `path`. A stale socket file that a dead process left there is replaced. The test for that is a
    /// connection attempt, so a live listener sees one connection that is closed at once.
    ///
    /// The file's permissions follow the umask. It is removed when the listener is dropped, unless another file has
    /// taken its place.
    ///
    /// # Errors
    /// [`BindError`], whose message says what to do.
    pub fn bind(path: impl AsRef<Path>) -> Result<Listener, BindError> {
        Self::bind_with(path.as_ref(), None)
    }

    /// Does the same as [`bind`](Self::bind) with the permissions `mode`, masked by the umask. The file has them from
    /// the moment it exists, as it inherits them from the socket. The umask, which all threads share, is not changed.
    ///
    /// # Errors
    /// [`BindError`], as for [`bind`](Self::bind).
    pub fn bind_with_mode(path: impl AsRef<Path>, mode: u32) -> Result<Listener, BindError> {
        Self::bind_with(path.as_ref(), Some(mode))
    }

    /// Does the same as [`bind`](Self::bind) for a file with this owner, group and these permissions, whatever the umask is. Nobody can connect
    /// before it has them.
    ///
    /// # Errors
    /// [`BindError`], as for [`bind`](Self::bind), and if the process may not give files away.
    pub fn bind_for(path: impl AsRef<Path>, access: SocketAccess) -> Result<Listener, BindError> {
        let path = path.as_ref();
        let os = |source: Errno| BindError::Os { path: path.to_owned(), source: source.into() };
        // Until the permissions are set only its owner may connect.
        let listener = Self::bound(path, access.mode.map(|_| 0o600))?;
        if let Some(file) = &listener.file {
            // The file is named by its descriptor, as another may have taken its name.
            let named = format!("/proc/self/fd/{}", file.fd.as_raw_fd());
            if access.owner.is_some() || access.group.is_some() {
                let (owner, group) = (access.owner.map(Uid::from_raw), access.group.map(Gid::from_raw));
                let given = rustix::fs::chownat(&file.fd, "", owner, group, AtFlags::EMPTY_PATH);
                given.map_err(|error| match error {
                    Errno::PERM => BindError::Owner(path.to_owned()),
                    error => os(error),
                })?;
            }
            if let Some(mode) = access.mode {
                rustix::fs::chmod(&named, Mode::from_raw_mode(mode)).map_err(os)?;
            }
        }
        listener.listen(path)
    }

    fn bind_with(path: &Path, mode: Option<u32>) -> Result<Listener, BindError> {
        Self::bound(path, mode)?.listen(path)
    }

    fn listen(self, path: &Path) -> Result<Listener, BindError> {
        let os = |source: Errno| BindError::Os { path: path.to_owned(), source: source.into() };
        rustix::net::listen(&self.fd, BACKLOG).map_err(os)?;
        Ok(self)
    }

    /// Makes a socket at `path` that does not listen yet.
    fn bound(path: &Path, mode: Option<u32>) -> Result<Listener, BindError> {
        let address = unix_address(path).ok_or_else(|| BindError::Path(path.to_owned()))?;
        let os = |source: io::Error| BindError::Os { path: path.to_owned(), source };
        let fd = stream_socket(SocketFlags::NONBLOCK).map_err(os)?;
        if let Some(mode) = mode {
            rustix::fs::fchmod(&fd, Mode::from_raw_mode(mode)).map_err(|e| os(e.into()))?;
        }
        match rustix::net::bind(&fd, &address) {
            Err(Errno::ADDRINUSE) => {
                remove_stale(path, &address)?;
                rustix::net::bind(&fd, &address).map_err(|e| bind_error(path, e))?;
            }
            result => result.map_err(|e| bind_error(path, e))?,
        }
        let file = SocketFile::at(path, false)?;
        Ok(Listener { fd, file: Some(file), shared: false })
    }

    /// Takes over a listening socket from a parent or service manager, which keeps its file.
    ///
    /// # Errors
    /// [`BindError::NotAListener`]; the descriptor is closed then.
    pub fn from_fd(fd: OwnedFd) -> Result<Listener, BindError> {
        let listener = Self::taken(fd)?;
        listener.claim();
        Ok(listener)
    }

    /// Has the kernel name this process to whoever connects, and no more the one that has made the socket: whoever is told to end it would end another
    /// one, such as a service manager, or whoever has got the number of one that is long gone.
    fn claim(&self) {
        // Whoever listens last is named (unix_listen of Linux's net/unix/af_unix.c). Nothing else changes, and nothing depends on it.
        let _ = rustix::net::listen(&self.fd, BACKLOG);
    }

    fn taken(fd: OwnedFd) -> Result<Listener, BindError> {
        let suits = || -> rustix::io::Result<bool> {
            let suits = sockopt::socket_domain(&fd)? == AddressFamily::UNIX
                && sockopt::socket_type(&fd)? == SocketType::STREAM
                && sockopt::socket_acceptconn(&fd)?;
            adopt(&fd)?;
            rustix::fs::fcntl_setfl(&fd, rustix::fs::fcntl_getfl(&fd)? | OFlags::NONBLOCK)?;
            Ok(suits)
        };
        if suits() != Ok(true) {
            return Err(BindError::NotAListener);
        }
        Ok(Listener { fd, file: None, shared: false })
    }

    /// Takes over a listening socket that another process has made at `path` for this one, and whose file that process removes.
    ///
    /// # Errors
    /// As [`from_fd`](Self::from_fd), and if the file cannot be looked at.
    pub fn from_fd_at(fd: OwnedFd, path: impl AsRef<Path>) -> Result<Listener, BindError> {
        let file = SocketFile::at(path.as_ref(), true)?;
        Ok(Listener { file: Some(file), ..Self::from_fd(fd)? })
    }

    /// Takes over a socket on which another process listens, and on which it goes on listening if this one does not
    /// [keep](Self::keep) it: dropping it changes nothing for that process. `path` is where its file was made, if that is known.
    ///
    /// # Errors
    /// As [`from_fd`](Self::from_fd).
    pub fn from_predecessor(fd: OwnedFd, path: Option<&Path>) -> Result<Listener, BindError> {
        // The file may have been removed, which says nothing against the socket.
        let file = path.and_then(|path| SocketFile::at(path, true).ok());
        Ok(Listener { file, shared: true, ..Self::taken(fd)? })
    }

    /// Makes the socket this process's own, which removes its file at the end if `removes`.
    pub fn keep(&mut self, removes: bool) {
        self.shared = false;
        self.claim();
        if let Some(file) = &mut self.file {
            file.left = !removes;
        }
    }

    /// Leaves the socket, with its file, to a process that has [taken it over](Self::from_predecessor).
    pub fn let_go(&mut self) {
        self.shared = true;
        self.leave_file();
    }

    /// Gives the socket away, and leaves its file where it is.
    pub fn into_fd(mut self) -> OwnedFd {
        self.leave_file();
        self.fd
    }

    /// Accepts one waiting connection, or returns `None` if there is none (any more).
    ///
    /// # Errors
    /// In practice `EMFILE` or `ENFILE`, if too many files are open. The connection still waits then and the listener
    /// stays readable, so the caller must stop polling it for a while, or its event loop spins.
    pub fn accept(&self) -> io::Result<Option<Stream>> {
        match rustix::net::accept_with(&self.fd, SocketFlags::CLOEXEC) {
            Ok(fd) => Ok(Some(Stream::of(fd)?)),
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => Ok(None),
            Err(e) => Err(e.into()),
        }
    }

    /// Blocks until there is a connection, and accepts it. For programs that have nothing else to do meanwhile.
    ///
    /// # Errors
    /// The same as [`accept`](Self::accept), and the errors of `poll`.
    pub fn wait(&self) -> io::Result<Stream> {
        loop {
            if let Some(stream) = self.accept()? {
                return Ok(stream);
            }
            let mut fds = [PollFd::new(&self.fd, PollFlags::IN)];
            match rustix::event::poll(&mut fds, None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Removes the file that this listener owns, and has `closer` close the socket with the connections that wait in it. If the
    /// listener owns a file, nobody can connect any more when this returns.
    pub fn close_by(self, closer: &Closer) {
        self.shut();
        let Listener { fd, file, .. } = self;
        drop(file);
        closer.close(fd);
    }

    /// Nobody can connect any more, whoever has copies of the socket: a file that was left is stale at once, for whoever removes it. An inherited socket
    /// is another process's, too, and stays as it is.
    pub fn shut(&self) {
        if self.file.is_some() && !self.shared {
            let _ = rustix::net::shutdown(&self.fd, rustix::net::Shutdown::Both);
        }
    }

    /// Leaves the file where it is when the listener is dropped: for a process that may not remove it any more then. The next
    /// [`bind`](Self::bind) replaces it, if nobody has removed it before ([`remove_if_stale`]).
    pub fn leave_file(&mut self) {
        if let Some(file) = &mut self.file {
            file.left = true;
        }
    }

    /// Returns what has become of the file that this listener made. It takes two system calls, and no rights but to look into the directory: where these are
    /// missing, only a removed file is missed. An inherited listener has no file of its own.
    pub fn place(&self) -> Place {
        let Some(file) = &self.file else { return Place::Own };
        let is_removed = rustix::fs::fstat(&file.fd).map(|status| status.st_nlink) == Ok(0);
        match SocketFile::id_at(&file.path) {
            Ok(id) if id == file.id && !is_removed => Place::Own,
            Ok(_) => Place::Taken,
            Err(error) => match error.kind() {
                io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => Place::Empty,
                _ if is_removed => Place::Empty,
                _ => Place::Own,
            },
        }
    }

    /// Returns true if the file that this listener made is seen to be where it was made. [`Place::Own`] is also said where that cannot be seen.
    pub fn is_in_its_place(&self) -> bool {
        let own = |file: &SocketFile| SocketFile::id_at(&file.path).is_ok_and(|id| id == file.id);
        self.file.as_ref().is_some_and(own) && self.place() == Place::Own
    }

    /// Returns true if nobody who knows the path of this listener can connect any more: see [`place`](Self::place).
    pub fn is_file_gone(&self) -> bool {
        self.place() != Place::Own
    }

    /// Returns the path of the file that this listener owns, or `None` if the listener was inherited.
    pub fn path(&self) -> Option<&Path> {
        self.file.as_ref().map(|file| file.path.as_path())
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Removes the socket file at `path` if no process listens on it, as [`Listener::bind`] does before it makes its own. It is no error if
/// there is none.
///
/// # Errors
/// [`BindError::InUse`] if a process listens, [`BindError::NotASocket`], [`BindError::Permission`].
pub fn remove_if_stale(path: &Path) -> Result<(), BindError> {
    remove_stale(path, &unix_address(path).ok_or_else(|| BindError::Path(path.to_owned()))?)
}

/// Removes a stale socket file, one that no process listens on.
///
/// Two programs that find the same stale file at the same time can both get here. The second check of the file just
/// before its removal reduces that race to the time between two system calls.
fn remove_stale(path: &Path, address: &SocketAddrUnix) -> Result<(), BindError> {
    let os = |source: io::Error| BindError::Os { path: path.to_owned(), source };
    let status = match std::fs::symlink_metadata(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()), // its owner has just removed it
        status => status.map_err(os)?,
    };
    if !status.file_type().is_socket() {
        return Err(BindError::NotASocket(path.to_owned()));
    }
    let probe = stream_socket(SocketFlags::NONBLOCK).map_err(os)?;
    match rustix::net::connect(&probe, address) {
        Err(Errno::CONNREFUSED) => {}
        Err(Errno::NOENT) => return Ok(()),
        Err(Errno::ACCESS | Errno::PERM) => return Err(BindError::Permission(path.to_owned())),
        // A process listens (perhaps with a full queue), or it is a socket of another type.
        Ok(()) | Err(Errno::AGAIN | Errno::PROTOTYPE) => {
            let pid = Stream(probe).peer_credentials().ok().and_then(|peer| peer.pid);
            return Err(BindError::InUse { path: path.to_owned(), pid });
        }
        Err(e) => return Err(os(e.into())),
    }
    if SocketFile::id_at(path).is_ok_and(|id| id != (status.st_dev(), status.st_ino())) {
        return Err(BindError::InUse { path: path.to_owned(), pid: None });
    }
    match std::fs::remove_file(path) {
        Err(e) if e.kind() == io::ErrorKind::PermissionDenied => Err(BindError::Permission(path.to_owned())),
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(os(e)),
        _ => Ok(()),
    }
}

fn bind_error(path: &Path, error: Errno) -> BindError {
    let path = path.to_owned();
    match error {
        Errno::ADDRINUSE => BindError::InUse { path, pid: None },
        Errno::NOENT | Errno::NOTDIR => BindError::NoDirectory(path),
        Errno::ACCESS | Errno::PERM | Errno::ROFS => BindError::Permission(path),
        e => BindError::Os { path, source: e.into() },
    }
}

/// Makes the address of a path; `None` if the path is not possible.
fn unix_address(path: &Path) -> Option<SocketAddrUnix> {
    let len = path.as_os_str().len();
    if len == 0 || len > MAX_PATH {
        return None;
    }
    SocketAddrUnix::new(path).ok()
}

/// Returns the names of a connected socket and of its peer, whatever a peer has chosen as one.
fn names(fd: BorrowedFd<'_>) -> io::Result<[SocketAddr; 2]> {
    // A copy, which is never the last to be closed.
    let copy = UnixStream::from(fd.try_clone_to_owned()?);
    Ok([copy.local_addr()?, copy.peer_addr()?])
}

fn stream_socket(flags: SocketFlags) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | flags;
    Ok(rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?)
}

/// Sets up a socket from another process: it is closed on exec, and its messages carry no credentials, which a service
/// manager may have turned on.
fn adopt(fd: &OwnedFd) -> rustix::io::Result<()> {
    rustix::io::fcntl_setfd(fd, rustix::io::FdFlags::CLOEXEC)?;
    sockopt::set_socket_passcred(fd, false)
}

/// The result of one [`Stream::recv`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Received {
    /// Number of bytes of data; 0 if the peer has closed the connection.
    pub bytes: usize,
    /// True if more than [`MAX_FDS`] descriptors came, or some were lost because this process has too many open files.
    pub fds_lost: bool,
}

/// The process at the other end, as of the time when it connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerCredentials {
    /// Number of the process, or `None` if its PID namespace is not visible from ours.
    pub pid: Option<u32>,
    /// Effective user id of the process.
    pub uid: u32,
    /// Effective group id of the process.
    pub gid: u32,
}

/// A connected Unix stream socket, blocking unless [`Stream::set_nonblocking`] was called.
#[derive(Debug)]
pub struct Stream(OwnedFd);

impl Stream {
    /// Takes a socket of which nothing was received yet. A byte that is sent out of band (`MSG_OOB`), with the descriptors that go with it, is
    /// to arrive as any other: left out of band, it is looked at by nobody, keeps what it has open for as long as the connection lasts, and is
    /// closed by the thread that happens to receive what follows.
    fn of(fd: OwnedFd) -> io::Result<Stream> {
        sockopt::set_socket_oobinline(&fd, true)?;
        Ok(Stream(fd))
    }

    /// Connects to the listener at `path`. It never blocks: a listener whose queue is full is an error, and the
    /// caller may try again later, as for one that is not there.
    ///
    /// # Errors
    /// `NotFound`, if there is no such file; `ConnectionRefused`, if no process listens; `PermissionDenied`, if the
    /// file is not writable for this user; `WouldBlock`, if the queue is full; `InvalidInput`, if the path is empty
    /// or longer than [`MAX_PATH`].
    pub fn connect(path: impl AsRef<Path>) -> io::Result<Stream> {
        let address = unix_address(path.as_ref()).ok_or_else(|| {
            io::Error::new(io::ErrorKind::InvalidInput, format!("a socket path has 1 to {MAX_PATH} bytes"))
        })?;
        let stream = Stream::of(stream_socket(SocketFlags::NONBLOCK)?)?;
        rustix::net::connect(&stream.0, &address)?;
        stream.set_nonblocking(false)?;
        Ok(stream)
    }

    /// Connects to the listener at `path` as [`connect`](Self::connect) does, unless a symbolic link is there: for a process that has more
    /// rights than those who can write to the directory, and might put a link to a socket of others there. Links among the directories of
    /// the path are followed. It needs `/proc`.
    ///
    /// # Errors
    /// As [`connect`](Self::connect); `InvalidInput`, if `path` is a symbolic link.
    pub fn connect_nofollow(path: impl AsRef<Path>) -> io::Result<Stream> {
        let path = path.as_ref();
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::open(path, flags, Mode::empty())?;
        if FileType::from_raw_mode(rustix::fs::fstat(&file)?.st_mode).is_symlink() {
            let text = format!("{path:?} is a symbolic link: name the socket itself");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        // The file that was looked at, whatever has its name by now.
        Self::connect(format!("/proc/self/fd/{}", file.as_raw_fd()))
    }

    /// Takes over a connected socket from a parent or service manager. One that a peer has made and passed is a [`LentStream`](crate::lent::LentStream).
    ///
    /// # Errors
    /// `InvalidInput`, if it is not a connected Unix stream socket; the descriptor is closed then.
    pub fn from_fd(fd: OwnedFd) -> io::Result<Stream> {
        if !Self::is_one(&fd) || adopt(&fd).is_err() {
            let text = "the descriptor is not a connected Unix stream socket";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        Stream::of(fd)
    }

    /// Creates a new connection and returns both ends.
    ///
    /// # Errors
    /// `EMFILE` or `ENFILE`, if too many files are open.
    pub fn pair() -> io::Result<(Stream, Stream)> {
        let (a, b) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        Ok((Stream::of(a)?, Stream::of(b)?))
    }

    /// Makes sending and receiving fail with `WouldBlock` instead of blocking, or block again.
    ///
    /// # Errors
    /// None that a caller can cause.
    pub fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()> {
        Ok(rustix::io::ioctl_fionbio(&self.0, nonblocking)?)
    }

    /// Sets the time after which a blocking [`recv`](Self::recv) or [`send`](Self::send) fails with `WouldBlock`;
    /// `None` removes the limit.
    ///
    /// # Errors
    /// `InvalidInput` for zero.
    pub fn set_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        sockopt::set_socket_timeout(&self.0, sockopt::Timeout::Recv, timeout)?;
        Ok(sockopt::set_socket_timeout(&self.0, sockopt::Timeout::Send, timeout)?)
    }

    /// Waits until there is something to receive, or the connection has ended; false if that takes longer than `timeout`.
    ///
    /// # Errors
    /// The system has no memory left.
    pub fn is_readable_within(&self, timeout: Duration) -> io::Result<bool> {
        let end = Instant::now() + timeout;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
            let mut fds = [PollFd::new(&self.0, PollFlags::IN)];
            match rustix::event::poll(&mut fds, Some(&left)) {
                Err(Errno::INTR) => {}
                result => return Ok(result? > 0),
            }
        }
    }

    /// Receives up to `data.len()` bytes and appends the descriptors that came with them to `fds`. The kernel ends a
    /// read where descriptors of another message begin, so they belong to the bytes of this call, or to a message
    /// that began with them. The caller must close descriptors that it did not expect, also those beyond [`MAX_FDS`],
    /// where closing them may take as long as the peer likes ([`closer`](crate::closer)).
    ///
    /// # Errors
    /// `WouldBlock`, if there is no data (yet); `ConnectionReset`, if the peer closed without reading all data.
    pub fn recv(&self, data: &mut [u8], fds: &mut Vec<OwnedFd>) -> io::Result<Received> {
        let before = fds.len();
        let Received { bytes, fds_lost } = receive(self.0.as_fd(), data, fds, RecvFlags::empty())?;
        Ok(Received { bytes, fds_lost: fds_lost || fds.len() - before > MAX_FDS })
    }

    /// Returns the number of bytes that can be received, of which [`peek`](Self::peek) shows those up to the first that was sent out of band.
    ///
    /// # Errors
    /// None that a peer can cause.
    pub fn unread(&self) -> io::Result<u64> {
        Ok(rustix::io::ioctl_fionread(&self.0)?)
    }

    /// Returns true if the peer has received all that was sent, and the descriptors with it, or has closed its last copy of the other end.
    pub fn is_drained(&self) -> bool {
        let mut unread: libc::c_int = 0;
        // SAFETY: SIOCOUTQ, which is TIOCOUTQ, writes an int; `unread` is one and outlives the call.
        let result = unsafe { libc::ioctl(self.0.as_raw_fd(), libc::TIOCOUTQ, &raw mut unread) };
        result == 0 && unread == 0
    }

    /// Ends the connection in both directions at once, for both ends; data that was sent can still be received. Who hands
    /// the stream to a [`Closer`] tells the peer so that it is over.
    pub fn shutdown(&self) {
        // It fails only if the connection is over already.
        let _ = rustix::net::shutdown(&self.0, rustix::net::Shutdown::Both);
    }

    /// Returns true if the peer has closed its end, whatever it has sent before.
    pub fn has_hung_up(&self) -> bool {
        let gone = PollFlags::RDHUP | PollFlags::HUP;
        let mut fds = [PollFd::new(&self.0, gone)];
        rustix::event::poll(&mut fds, Some(&Timespec::default())).is_ok() && fds[0].revents().intersects(gone)
    }

    /// Returns true if `fd` is a connected Unix stream socket, so that [`from_fd`](Self::from_fd) takes it. Unlike that it
    /// does not close what is none.
    pub fn is_one(fd: impl AsFd) -> bool {
        let suits = || -> rustix::io::Result<bool> {
            Ok(sockopt::socket_domain(&fd)? == AddressFamily::UNIX
                && sockopt::socket_type(&fd)? == SocketType::STREAM
                && rustix::net::getpeername(&fd)?.is_some())
        };
        suits() == Ok(true)
    }

    /// Returns true if `fd` [is one](Self::is_one) of a pair (`socketpair`): neither end has a name. A connection to a socket that listens
    /// has one, at the end that was accepted as its own, at the other as its peer's.
    pub fn is_of_a_pair(fd: impl AsFd) -> bool {
        let is_unnamed = |names: [SocketAddr; 2]| names.iter().all(SocketAddr::is_unnamed);
        Self::is_one(&fd) && names(fd.as_fd()).is_ok_and(is_unnamed)
    }

    /// Returns true if `fd` is the other end of a connection by way of the same named socket as this one: perhaps this one's own other end.
    pub fn has_other_end(&self, fd: impl AsFd) -> bool {
        if !Self::is_one(&fd) {
            return false;
        }
        let (Ok([ours, our_peer]), Ok([theirs, their_peer])) = (names(self.as_fd()), names(fd.as_fd()))
        else {
            return false;
        };
        // What has a name is the socket that listens, and whatever was accepted there.
        let is_same = |one: &SocketAddr, other: &SocketAddr| {
            one.as_pathname().is_some_and(|name| other.as_pathname() == Some(name))
        };
        is_same(&ours, &their_peer) || is_same(&our_peer, &theirs)
    }

    /// Receives up to `data.len()` bytes from a peer that has no descriptors to send, and returns their number; 0 if the
    /// peer has closed the connection.
    ///
    /// A descriptor that arrives all the same is never received, since the kernel would have this thread close it, and a
    /// close may wait for as long as the peer likes (a TCP socket that lingers, a file of FUSE). So the data is looked at
    /// before it is taken. The connection is unusable after that error, and closing it is where the descriptors are
    /// closed: do that on a thread that may wait.
    ///
    /// # Errors
    /// `InvalidData`, if descriptors came; otherwise as for [`recv`](Self::recv).
    pub fn recv_bytes(&self, data: &mut [u8]) -> io::Result<usize> {
        let length = self.peek(data)?;
        // What was looked at has no descriptors, and stays first in the queue. There is nothing else to wait for.
        let taken = loop {
            match rustix::net::recv(&self.0, &mut data[..length], RecvFlags::DONTWAIT) {
                Err(Errno::INTR) => {}
                result => break result?.0,
            }
        };
        Ok(taken)
    }

    /// Copies up to `data.len()` bytes that can be received, and leaves them and whatever comes with them where they are.
    /// Returns their number; 0 if the peer has closed the connection.
    ///
    /// # Errors
    /// As for [`recv_bytes`](Self::recv_bytes).
    pub fn peek(&self, data: &mut [u8]) -> io::Result<usize> {
        let message = loop {
            let mut control = RecvAncillaryBuffer::default();
            let mut data = [IoSliceMut::new(data)];
            match rustix::net::recvmsg(&self.0, &mut data, &mut control, RecvFlags::PEEK) {
                Err(Errno::INTR) => {}
                result => break result?,
            }
        };
        // There is no room for any control message, and descriptors are the only ones.
        if message.flags.contains(ReturnFlags::CTRUNC) {
            let text = "the peer passed a descriptor that nobody asked for";
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        Ok(message.bytes)
    }

    /// Sends as much of `data` as there is room for, with `fds` attached to its first byte, and returns the number of
    /// bytes sent. The caller must send the rest without `fds`.
    ///
    /// # Errors
    /// `WouldBlock`, if there is no room; `BrokenPipe`, if the peer has closed (no SIGPIPE is raised);
    /// `InvalidInput` for more than [`MAX_FDS`] descriptors, or descriptors without data; `QuotaExceeded`, if the kernel passes none of
    /// these on now (see [`Passage`]).
    pub fn send(&self, data: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
        self.send_with(data, fds, SendFlags::NOSIGNAL)
    }

    fn send_with(&self, data: &[u8], fds: &[BorrowedFd<'_>], flags: SendFlags) -> io::Result<usize> {
        if fds.len() > MAX_FDS || (data.is_empty() && !fds.is_empty()) {
            let text = format!("at most {MAX_FDS} descriptors, with at least one byte, can be sent");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            let fits = control.push(SendAncillaryMessage::ScmRights(fds));
            debug_assert!(fits, "the space is for MAX_FDS");
        }
        loop {
            match rustix::net::sendmsg(&self.0, &[IoSlice::new(data)], &mut control, flags) {
                Err(Errno::INTR) => {}
                Err(Errno::TOOMANYREFS) => {
                    return Err(io::Error::new(io::ErrorKind::QuotaExceeded, TOO_MANY_IN_FLIGHT));
                }
                result => return Ok(result?),
            }
        }
    }

    /// Returns the credentials of the process at the other end.
    ///
    /// # Errors
    /// None that a caller can cause.
    pub fn peer_credentials(&self) -> io::Result<PeerCredentials> {
        // rustix cannot be used here: its `Pid` cannot be 0, the number of an invisible process.
        let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
        let mut len = size_of_val(&peer) as libc::socklen_t;
        // SAFETY: SO_PEERCRED writes at most `len` bytes of a ucred, to a ucred of ours.
        let result = unsafe {
            libc::getsockopt(
                self.0.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERCRED,
                std::ptr::from_mut(&mut peer).cast(),
                &mut len,
            )
        };
        if result < 0 {
            return Err(io::Error::last_os_error());
        }
        let pid = u32::try_from(peer.pid).ok().filter(|&pid| pid != 0);
        Ok(PeerCredentials { pid, uid: peer.uid, gid: peer.gid })
    }
}

/// Receives from any socket up to `data.len()` bytes, with all descriptors that came with them, which are appended to `fds`, and says whether some were lost because this process has
/// too many open files.
///
/// # Errors
/// Those of `recvmsg`, but for interruptions.
pub(crate) fn receive(
    socket: BorrowedFd<'_>,
    data: &mut [u8],
    fds: &mut Vec<OwnedFd>,
    flags: RecvFlags,
) -> rustix::io::Result<Received> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(SCM_MAX_FD))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut data = [IoSliceMut::new(data)];
    let message = loop {
        match rustix::net::recvmsg(socket, &mut data, &mut control, RecvFlags::CMSG_CLOEXEC | flags) {
            Err(Errno::INTR) => {}
            result => break result?,
        }
    };
    for part in control.drain() {
        if let RecvAncillaryMessage::ScmRights(passed) = part {
            fds.extend(passed);
        }
    }
    Ok(Received { bytes: message.bytes, fds_lost: message.flags.contains(ReturnFlags::CTRUNC) })
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl From<Stream> for OwnedFd {
    fn from(stream: Stream) -> OwnedFd {
        stream.0
    }
}

/// Finds out whether the kernel passes a descriptor to another process.
///
/// Before Linux 6.10 it passes no Unix socket in which a socket lies unread, in which a socket lies unread, and so on, four deep; whoever has the other end
/// of a socket brings that about. So of sockets that peers have passed, or are connected to, each is tried before it is sent with those of others.
///
/// It also passes nothing for a user without privileges of whose descriptors more lie unread in sockets than the sender may have open. Other processes of
/// the same user bring that about.
#[derive(Debug)]
pub struct Passage {
    here: Stream,
    there: Stream,
    /// A descriptor that can always be passed, if any can.
    harmless: OwnedFd,
}

impl Passage {
    /// Makes a connection to try descriptors on.
    ///
    /// # Errors
    /// `EMFILE` or `ENFILE`, if too many files are open.
    pub fn new() -> io::Result<Passage> {
        let (here, there) = Stream::pair()?;
        here.set_nonblocking(true)?;
        Ok(Passage { here, there, harmless: rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?.0 })
    }

    /// Returns true if `fd` can be passed, and false if it alone cannot. Never waits: what is tried stays open here, so that nothing is closed.
    ///
    /// # Errors
    /// `QuotaExceeded`, if no descriptor can be passed now.
    pub fn takes(&self, fd: impl AsFd) -> io::Result<bool> {
        // Any other file can be passed.
        if sockopt::socket_domain(&fd) != Ok(AddressFamily::UNIX) {
            return Ok(true);
        }
        takes(&mut |fd| self.pass(fd), fd.as_fd(), self.harmless.as_fd())
    }

    fn pass(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        self.here.send(&[0], &[fd])?;
        // The kernel drops its copy.
        rustix::net::recv(&self.there, &mut [0; 1], RecvFlags::DONTWAIT)?;
        Ok(())
    }
}

/// Whether `pass` takes `fd`; an error, if it does not take what is `harmless` either.
fn takes(
    pass: &mut dyn FnMut(BorrowedFd<'_>) -> io::Result<()>,
    fd: BorrowedFd<'_>,
    harmless: BorrowedFd<'_>,
) -> io::Result<bool> {
    match pass(fd) {
        Err(error) if error.kind() == io::ErrorKind::QuotaExceeded => pass(harmless).map(|()| false),
        passed => passed.map(|()| true),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::eventfd::EventFd;
    use crate::testing::may;
    use std::os::unix::net::{UnixDatagram, UnixListener};

    fn fd_count() -> usize {
        std::fs::read_dir("/proc/self/fd").unwrap().count()
    }

    #[test]
    fn an_end_of_a_pair_is_told_from_a_connection_to_a_socket_that_listens() {
        let folder = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(folder.path().join("socket")).unwrap();
        let connected = UnixStream::connect(folder.path().join("socket")).unwrap();
        let (accepted, _) = listener.accept().unwrap();
        for end in [&connected, &accepted] {
            assert!(Stream::is_one(end) && !Stream::is_of_a_pair(end), "{end:?}");
        }
        let [ours, theirs] =
            [&accepted, &connected].map(|end| Stream::from_fd(end.try_clone().unwrap().into()).unwrap());
        assert!(ours.has_other_end(&connected) && theirs.has_other_end(&accepted));
        assert!(!ours.has_other_end(&accepted) && !ours.has_other_end(UnixStream::pair().unwrap().0));
        assert!(!ours.has_other_end(EventFd::new().unwrap()));
        let (one, other) = UnixStream::pair().unwrap();
        assert!(Stream::is_of_a_pair(&one) && Stream::is_of_a_pair(&other));
        assert!(!Stream::is_of_a_pair(UnixDatagram::pair().unwrap().0));
        assert!(!Stream::is_of_a_pair(EventFd::new().unwrap()));
        drop(other);
        assert!(
            Stream::is_of_a_pair(&one),
            "a channel whose other end is gone is found by what can be read there"
        );
    }

    #[test]
    fn l_a_socket_that_cannot_be_passed_is_told_from_a_time_when_nothing_can() {
        let (socket, _other) = Stream::pair().unwrap();
        let (event, refused) = (EventFd::new().unwrap(), || io::Error::from(io::ErrorKind::QuotaExceeded));
        let with = |bad: &[BorrowedFd<'_>]| {
            let bad: Vec<_> = bad.iter().map(AsRawFd::as_raw_fd).collect();
            let mut pass =
                |fd: BorrowedFd<'_>| if bad.contains(&fd.as_raw_fd()) { Err(refused()) } else { Ok(()) };
            takes(&mut pass, socket.as_fd(), event.as_fd())
        };
        assert!(with(&[]).unwrap());
        assert!(!with(&[socket.as_fd()]).unwrap());
        let error = with(&[socket.as_fd(), event.as_fd()]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::QuotaExceeded);
    }

    /// What the kernel does about a user with too many descriptors under way.
    #[test]
    fn l_descriptors_of_the_same_user_that_lie_unread_are_what_a_refusal_is_about() {
        if !may("needs root, to have another user", rustix::process::geteuid().is_root()) {
            return;
        }
        let passage = Passage::new().unwrap();
        let (socket, _other) = Stream::pair().unwrap();
        let before = fd_count();
        for _ in 0..1000 {
            assert!(passage.takes(&socket).unwrap() && passage.takes(io::stdin()).unwrap());
        }
        // Other tests of this process have some, too.
        assert!(fd_count() < before + 1000, "descriptors stay open that were tried");
        let passes = std::thread::spawn(move || {
            // Of this thread alone, which has no privileges then. No process has this user.
            let user = Uid::from_raw(0x7fff_0000 | std::process::id());
            rustix::thread::set_thread_res_uid(user, user, user).unwrap();
            assert!(passage.takes(&socket).unwrap());
            let most = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap();
            let (mut full, mut sent) = (Vec::new(), 0);
            let fds = [passage.harmless.as_fd(); MAX_FDS];
            let error = loop {
                let pair = Stream::pair().unwrap();
                pair.0.set_nonblocking(true).unwrap();
                let refused = loop {
                    match pair.0.send(&[0], &fds) {
                        Ok(_) => sent += MAX_FDS as u64,
                        Err(error) if error.kind() == io::ErrorKind::WouldBlock => break None,
                        Err(error) => break Some(error),
                    }
                };
                full.push(pair);
                if let Some(error) = refused {
                    break error;
                }
                assert!(sent <= most + 2 * MAX_FDS as u64, "the kernel knows no limit");
            };
            assert!(error.to_string().contains("lie unread"), "{error}");
            assert_eq!(passage.takes(&socket).unwrap_err().kind(), io::ErrorKind::QuotaExceeded);
            full.clear();
            passage.takes(&socket).unwrap()
        });
        assert!(passes.join().unwrap());
    }

    #[test]
    fn what_was_sent_is_drained_when_it_was_received_or_the_last_copy_of_the_other_end_closed() {
        let (socket, other) = Stream::pair().unwrap();
        let event = EventFd::new().unwrap();
        assert!(socket.is_drained());
        socket.send(&[1, 2], &[event.as_fd()]).unwrap();
        assert!(!socket.is_drained());
        let mut fds = Vec::new();
        other.recv(&mut [0], &mut fds).unwrap();
        assert!(!socket.is_drained(), "a part of it waits");
        other.recv(&mut [0], &mut fds).unwrap();
        assert!(socket.is_drained());
        socket.send(&[1], &[event.as_fd()]).unwrap();
        let copy = other.as_fd().try_clone_to_owned().unwrap();
        socket.shutdown();
        drop(other);
        assert!(!socket.is_drained());
        drop(copy);
        assert!(socket.is_drained());
    }

    #[test]
    fn bytes_and_descriptors_arrive_together() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let listener = Listener::bind(&path).unwrap();
        assert!(listener.accept().unwrap().is_none());
        let client = Stream::connect(&path).unwrap();
        let server = listener.accept().unwrap().unwrap();

        let file = tempfile::tempfile().unwrap();
        let passed = [file.as_fd(), client.as_fd()];
        assert_eq!(client.send(b"hello", &passed).unwrap(), 5);
        assert_eq!(client.send(b"again", &[]).unwrap(), 5);
        let (mut data, mut fds) = ([0u8; 64], Vec::new());
        let got = server.recv(&mut data, &mut fds).unwrap();
        assert!(!got.fds_lost && data.starts_with(b"hello"));
        assert_eq!(fds.len(), 2);
        let same = |fd: BorrowedFd<'_>| rustix::fs::fstat(fd).map(|s| (s.st_dev, s.st_ino)).unwrap();
        assert_eq!(same(fds[0].as_fd()), same(file.as_fd()));
        for fd in &fds {
            assert!(rustix::io::fcntl_getfd(fd).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
        }
        let me = server.peer_credentials().unwrap();
        assert_eq!(me.pid, Some(std::process::id()));
        assert_eq!(me.uid, rustix::process::geteuid().as_raw());
    }

    /// Left out of band, a byte is passed over by a look, and freed with its descriptors by the next read.
    #[test]
    fn l_descriptors_that_are_sent_out_of_band_arrive_as_others_do() {
        let dir = tempfile::tempdir().unwrap();
        let listener = Listener::bind(dir.path().join("socket")).unwrap();
        let client = Stream::connect(dir.path().join("socket")).unwrap();
        let accepted = listener.accept().unwrap().unwrap();
        let inherited = Stream::from_fd(OwnedFd::from(Stream::pair().unwrap().0)).unwrap();
        for end in [&accepted, &client, &inherited] {
            assert!(sockopt::socket_oobinline(end).unwrap());
        }
        let (reader, writer) = rustix::pipe::pipe_with(PipeFlags::NONBLOCK).unwrap();
        if let Err(error) = client.send_with(b"o", &[writer.as_fd()], SendFlags::OOB) {
            return eprintln!("not tried: this kernel sends nothing out of band on Unix sockets ({error})");
        }
        drop(writer);
        assert!(accepted.peek(&mut [0; 8]).is_err(), "a look finds it");
        let mut fds = Vec::new();
        let received = accepted.recv(&mut [0; 8], &mut fds).unwrap();
        assert_eq!((received.bytes, received.fds_lost, fds.len()), (1, false, 1));
        assert_eq!(rustix::io::read(&reader, &mut [0; 1]), Err(Errno::AGAIN), "it is open");
        // A look ends before a byte that was sent out of band.
        client.send(b"more", &[]).unwrap();
        client.send_with(b"o", &[], SendFlags::OOB).unwrap();
        assert_eq!(accepted.peek(&mut [0; 8]).unwrap(), 4);
        assert_eq!(accepted.unread().unwrap(), 5);
    }

    #[test]
    fn a_file_gets_owner_and_permissions_whatever_the_umask_is() {
        use std::os::unix::fs::MetadataExt;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let mine = std::fs::metadata(dir.path()).unwrap();
        // Others may give files to themselves alone.
        let gid = if rustix::process::geteuid().is_root() { 4321 } else { mine.gid() };
        for mode in [0o666, 0o660, 0o700] {
            let access = SocketAccess { owner: Some(mine.uid()), group: Some(gid), mode: Some(mode) };
            let listener = Listener::bind_for(&path, access).unwrap();
            let made = std::fs::metadata(&path).unwrap();
            assert_eq!((made.mode() & 0o7777, made.uid(), made.gid()), (mode, mine.uid(), gid));
            Stream::connect(&path).unwrap();
            drop(listener);
            assert!(!path.exists());
        }
        let plain = Listener::bind_for(&path, SocketAccess::default()).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().gid(), mine.gid());
        drop(plain);
    }

    #[test]
    fn a_socket_of_another_process_is_taken_over_with_its_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let fd = Listener::bind(&path).unwrap().into_fd();
        let taken = Listener::from_fd_at(fd, &path).unwrap();
        assert_eq!(taken.path(), Some(path.as_path()));
        assert!(!taken.is_file_gone());
        Stream::connect(&path).unwrap();
        drop(taken);
        assert!(path.exists(), "whoever made it removes it");
        remove_if_stale(&path).unwrap();
        assert!(!path.exists());
        assert!(Listener::from_fd_at(tempfile::tempfile().unwrap().into(), dir.path()).is_err());
    }

    #[test]
    fn a_connection_is_not_led_elsewhere_by_a_link() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let listener = Listener::bind(path("s")).unwrap();
        std::os::unix::fs::symlink("s", path("link")).unwrap();
        std::os::unix::fs::symlink(".", path("here")).unwrap();
        std::fs::write(path("file"), "").unwrap();
        for (name, error) in [
            ("link", io::ErrorKind::InvalidInput),
            ("file", io::ErrorKind::ConnectionRefused),
            ("none", io::ErrorKind::NotFound),
        ] {
            assert_eq!(Stream::connect_nofollow(path(name)).unwrap_err().kind(), error, "{name}");
        }
        assert!(listener.accept().unwrap().is_none());
        // A link among the directories is the caller's word.
        for name in ["s", "here/s"] {
            let client = Stream::connect_nofollow(path(name)).unwrap();
            let server = listener.accept().unwrap().unwrap();
            assert_eq!(client.send(b"hello", &[]).unwrap(), 5);
            assert_eq!(server.recv(&mut [0; 8], &mut Vec::new()).unwrap().bytes, 5);
        }
    }

    #[test]
    fn a_file_that_was_removed_or_replaced_is_missed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let (removed, replaced) =
            (Listener::bind(&path).unwrap(), Listener::bind(dir.path().join("t")).unwrap());
        assert!(!removed.is_file_gone() && !replaced.is_file_gone());
        let moved = dir.path().join("u");
        std::fs::rename(&path, &moved).unwrap();
        assert!(removed.is_file_gone());
        std::fs::rename(&moved, &path).unwrap();
        assert!(!removed.is_file_gone());
        std::fs::remove_file(&path).unwrap();
        assert!(removed.is_file_gone());
        std::fs::rename(tempfile::NamedTempFile::new_in(&dir).unwrap().path(), dir.path().join("t")).unwrap();
        assert!(replaced.is_file_gone());
        let inherited = Listener::from_fd(UnixListener::bind(&path).unwrap().into()).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert!(!inherited.is_file_gone(), "its file is another process's");
    }

    #[test]
    fn nothing_waits_when_nonblocking() {
        let (a, b) = Stream::pair().unwrap();
        a.set_nonblocking(true).unwrap();
        let mut fds = Vec::new();
        assert_eq!(a.recv(&mut [0; 8], &mut fds).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        let full = loop {
            if let Err(e) = a.send(&[0; 65536], &[]) {
                break e;
            }
        };
        assert_eq!(full.kind(), io::ErrorKind::WouldBlock);
        drop(b);
        assert_eq!(a.send(b"x", &[]).unwrap_err().kind(), io::ErrorKind::BrokenPipe);
        let (c, d) = Stream::pair().unwrap();
        drop(d);
        assert_eq!(c.recv(&mut [0; 8], &mut fds).unwrap().bytes, 0);
    }

    #[test]
    fn waiting_for_a_connection_ends_with_one_and_not_before() {
        let dir = tempfile::tempdir().unwrap();
        let listener = Listener::bind(dir.path().join("s")).unwrap();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| listener.wait().unwrap());
            std::thread::sleep(Duration::from_millis(20));
            assert!(!waiting.is_finished());
            let client = Stream::connect(listener.path().unwrap()).unwrap();
            let server = waiting.join().unwrap();
            assert_eq!(client.send(b"hello", &[]).unwrap(), 5);
            assert_eq!(server.recv(&mut [0; 8], &mut Vec::new()).unwrap().bytes, 5);
        });
    }

    #[test]
    fn a_timeout_ends_a_wait() {
        let (a, _b) = Stream::pair().unwrap();
        a.set_timeout(Some(Duration::from_millis(1))).unwrap();
        let error = a.recv(&mut [0; 8], &mut Vec::new()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
    }

    /// Counting descriptors needs a process without other tests, so this one runs as a child of itself.
    #[test]
    fn surplus_descriptors_are_reported_and_closed() {
        if std::env::var_os("SURPLUS_CHILD").is_none() {
            let status = std::process::Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "socket::tests::surplus_descriptors_are_reported_and_closed"])
                .env("SURPLUS_CHILD", "1")
                .stdout(std::process::Stdio::null())
                .status()
                .unwrap();
            assert!(status.success());
            return;
        }
        let (ours, theirs) = Stream::pair().unwrap();
        let file = tempfile::tempfile().unwrap();
        let many = vec![file.as_fd(); 253];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&many)));
        let before = fd_count();
        rustix::net::sendmsg(&theirs, &[IoSlice::new(b"x")], &mut control, SendFlags::empty()).unwrap();
        let mut fds = Vec::new();
        let got = ours.recv(&mut [0; 8], &mut fds).unwrap();
        assert_eq!(got, Received { bytes: 1, fds_lost: true });
        assert_eq!(fds.len(), 253, "closing them is for us");
        drop(fds);
        assert_eq!(fd_count(), before);
        assert!(theirs.send(b"x", &many).is_err());
        assert!(theirs.send(b"", &many[..1]).is_err());

        // The same when this process may open no more than two.
        theirs.send(b"y", &many[..4]).unwrap();
        let highest = [ours.as_fd(), theirs.as_fd(), file.as_fd()].map(|fd| fd.as_raw_fd()).into_iter().max();
        let resource = rustix::process::Resource::Nofile;
        let limit = rustix::process::getrlimit(resource);
        let tight = rustix::process::Rlimit { current: highest.map(|n| n as u64 + 3), ..limit };
        rustix::process::setrlimit(resource, tight).unwrap();
        let mut fds = Vec::new();
        let got = ours.recv(&mut [0; 8], &mut fds).unwrap();
        assert_eq!(got, Received { bytes: 1, fds_lost: true });
        assert!(fds.len() < 4);
        drop(fds);
        rustix::process::setrlimit(resource, limit).unwrap();
        assert_eq!(fd_count(), before);
    }

    #[test]
    fn a_stale_file_is_replaced_and_a_living_listener_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        drop(UnixListener::bind(&path).unwrap()); // leaves its file
        assert!(path.exists());
        let listener = Listener::bind(&path).unwrap();
        let error = Listener::bind(&path).unwrap_err();
        let own = format!("(process {})", std::process::id());
        assert!(matches!(error, BindError::InUse { .. }) && error.to_string().contains(&own), "{error}");
        assert!(listener.accept().unwrap().is_some(), "the probe");
        drop(listener);
        assert!(!path.exists());

        let _datagram = UnixDatagram::bind(&path).unwrap();
        assert!(matches!(Listener::bind(&path), Err(BindError::InUse { .. })));
    }

    #[test]
    fn nobody_connects_to_a_listener_that_somebody_else_is_to_close() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let mut listener = Listener::bind(&path).unwrap();
        listener.leave_file();
        // As long as it is not closed.
        let _open = listener.fd.try_clone().unwrap();
        listener.close_by(&Closer::inline());
        assert_eq!(Stream::connect(&path).unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
        assert!(path.exists());
    }

    #[test]
    fn only_our_own_file_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let listener = Listener::bind(&path).unwrap();
        assert_eq!(listener.path(), Some(path.as_path()));
        std::fs::rename(&path, dir.path().join("elsewhere")).unwrap();
        let _other = UnixListener::bind(&path).unwrap();
        drop(listener);
        assert!(path.exists());
        drop(UnixStream::connect(&path).unwrap());
    }

    #[test]
    fn impossible_paths_say_what_to_do() {
        let dir = tempfile::tempdir().unwrap();
        let fill = MAX_PATH - dir.path().as_os_str().len() - 1;
        Listener::bind(dir.path().join("x".repeat(fill))).unwrap();
        let error = Listener::bind(dir.path().join("x".repeat(fill + 1))).unwrap_err();
        assert!(error.to_string().contains("use 1 to 107 bytes (it has 108)"), "{error}");
        assert!(matches!(Listener::bind(""), Err(BindError::Path(_))));

        let error = Listener::bind(dir.path().join("no/where")).unwrap_err();
        assert!(matches!(error, BindError::NoDirectory(_)), "{error}");
        assert!(error.to_string().contains("mkdir -p"), "{error}");
        let file = dir.path().join("file");
        std::fs::write(&file, "precious").unwrap();
        assert!(matches!(Listener::bind(&file), Err(BindError::NotASocket(_))));
        assert_eq!(std::fs::read(&file).unwrap(), b"precious");
        let dangling = dir.path().join("dangling");
        std::os::unix::fs::symlink("/nonexistent", &dangling).unwrap();
        assert!(matches!(Listener::bind(&dangling), Err(BindError::NotASocket(_))));
        assert!(matches!(Listener::bind("/proc/version/s"), Err(BindError::NoDirectory(_))));
        assert!(matches!(
            Listener::bind("/proc/s"),
            Err(BindError::Permission(_) | BindError::NoDirectory(_))
        ));
    }

    #[test]
    fn connect_fails_at_once_and_says_why() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        assert_eq!(Stream::connect(&path).unwrap_err().kind(), io::ErrorKind::NotFound);
        drop(UnixListener::bind(&path).unwrap());
        assert_eq!(Stream::connect(&path).unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
        let _listener = Listener::bind(&path).unwrap();
        let waiting: Vec<_> = (0..=BACKLOG).map(|_| Stream::connect(&path).unwrap()).collect();
        assert_eq!(Stream::connect(&path).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        drop(waiting);
        assert!(Stream::connect("x".repeat(MAX_PATH + 1)).is_err());
    }

    #[test]
    fn inherited_descriptors_are_checked() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let listener = Listener::from_fd(UnixListener::bind(&path).unwrap().into()).unwrap();
        assert!(listener.accept().unwrap().is_none());
        assert_eq!(listener.path(), None);
        let client = Stream::from_fd(UnixStream::connect(&path).unwrap().into()).unwrap();
        listener.accept().unwrap().unwrap().send(b"x", &[]).unwrap();
        assert_eq!(client.recv(&mut [0; 8], &mut Vec::new()).unwrap().bytes, 1);
        drop(listener);
        assert!(path.exists());

        let (a, _b) = UnixStream::pair().unwrap();
        assert!(matches!(Listener::from_fd(a.into()), Err(BindError::NotAListener)));
        let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        assert!(matches!(Listener::from_fd(tcp.into()), Err(BindError::NotAListener)));
        assert!(Stream::from_fd(tempfile::tempfile().unwrap().into()).is_err());
        assert!(Stream::from_fd(stream_socket(SocketFlags::empty()).unwrap()).is_err());
    }
}
