//! Making the sockets of an interface, and attaching the program that gives them packets: what needs privileges.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use ringferry_memory::{MapError, Region, SharedMem};
use ringferry_sys::bpf::{Attach, BpfError, Redirect};
use rustix::io::Errno;
use rustix::net::xdp::{SocketAddrXdp, SocketAddrXdpFlags, XdpOptionsFlags, XdpUmemReg, XdpUmemRegFlags};
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

use crate::queue::{MEMORY, Queue, UMEM};
use crate::{ENTRIES, FRAME};

/// How packets get between the interface and the memory of a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// The best of the following that the interface has.
    Auto,
    /// The interface reads and writes the memory itself.
    ZeroCopy,
    /// The driver runs the program, and the kernel copies.
    Copy,
    /// The kernel runs the program for whatever driver, and copies.
    Generic,
}

/// The reason why an interface has no sockets. Each message says what to do.
#[derive(Debug, thiserror::Error)]
pub enum XdpError {
    /// The program is not attached.
    #[error(transparent)]
    Program(#[from] BpfError),
    /// This user may not make AF_XDP sockets.
    #[error("no permission for AF_XDP sockets: run as root, or give the program CAP_NET_RAW")]
    Permission,
    /// The kernel was built without them.
    #[error(
        "this kernel has no AF_XDP sockets (CONFIG_XDP_SOCKETS): use a tap in a bridge with the interface instead"
    )]
    Missing,
    /// The memory of the sockets may not be locked.
    #[error("{} MiB for each queue may not be locked in memory: raise the limit (ulimit -l, or LimitMEMLOCK= of the systemd unit), or give the program CAP_IPC_LOCK", MEMORY >> 20)]
    Locked,
    /// The interface does not have the mode that was asked for.
    #[error("the interface has no {0}: leave mode out, and the best that it has is used")]
    NoMode(&'static str),
    /// A queue has a socket of another program.
    #[error(
        "queue {0} of the interface has an AF_XDP socket of another program: end that, or leave it that queue"
    )]
    Busy(u32),
    /// It has fewer queues than were asked for.
    #[error(
        "the interface has {}: ask for no more, or give it more (ethtool -L INTERFACE combined N)",
        queues(*.0)
    )]
    Queues(u32),
    /// The interface is down, and its driver binds no socket then.
    #[error("the interface is down: set it up (ip link set INTERFACE up)")]
    Down,
    /// Another system call failed.
    #[error("{step}: {source}")]
    Os {
        /// The step that failed, in words.
        step: &'static str,
        /// The error of the system call.
        source: io::Error,
    },
}

fn queues(count: u32) -> String {
    if count == 1 { "one queue".to_owned() } else { format!("{count} queues") }
}

fn failed(step: &'static str) -> impl Fn(Errno) -> XdpError {
    move |error| match error {
        Errno::NOBUFS => XdpError::Locked,
        Errno::PERM | Errno::ACCESS => XdpError::Permission,
        Errno::NETDOWN => XdpError::Down,
        error => XdpError::Os { step, source: error.into() },
    }
}

/// What was made for an interface. Whoever has it all needs no privileges to serve it.
#[derive(Debug)]
pub struct Opened {
    /// The attachment of the program; once its last copy is closed the interface is as it was.
    pub program: OwnedFd,
    /// Socket and memory of each queue.
    pub queues: Vec<(OwnedFd, OwnedFd)>,
}

/// Returns true if the interface reads and writes the memory of a socket, which is bound, itself.
pub fn is_zero_copy(socket: impl AsFd) -> bool {
    let options = sockopt::xdp_options(socket);
    options.is_ok_and(|options| options.contains(XdpOptionsFlags::XDP_OPTIONS_ZEROCOPY))
}

/// Packets up to this many bytes lie in one frame, as the kernel leaves 256 bytes of it free in front (`XDP_PACKET_HEADROOM`), and 320 behind for what it
/// knows of a packet in zero-copy mode.
const ONE_FRAME: u32 = 3520;

/// Returns true if packets of an interface with this MTU, in bytes, lie in several frames.
pub fn several_frames(mtu: u32) -> bool {
    mtu + 18 > ONE_FRAME
}

/// Time for which a queue is tried again whose socket was closed just now, and an interface whose program was: the kernel frees them some milliseconds later.
const FREED: Duration = Duration::from_millis(200);

/// Tries something again for [`FREED`] as long as its error is one of what is busy.
fn once_freed<T, E>(mut attempt: impl FnMut() -> Result<T, E>, is_busy: impl Fn(&E) -> bool) -> Result<T, E> {
    let until = Instant::now() + FREED;
    loop {
        let result = attempt();
        if !result.as_ref().is_err_and(&is_busy) || Instant::now() >= until {
            return result;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Makes a socket for each of the first `queues` queues of the interface with this index, in this network namespace, or of all that it has, up to `most`; `mtu` is the
/// interface's. `None` for `queues`: all.
///
/// # Errors
/// [`XdpError`]; the interface is as it was.
pub fn open(ifindex: u32, queues: Option<u32>, most: u32, mtu: u32, mode: Mode) -> Result<Opened, XdpError> {
    let program = attach(ifindex, most, mode)?;
    let mut opened = Vec::new();
    let wanted = queues.unwrap_or(most);
    for queue in 0..wanted {
        match socket(ifindex, queue, mtu, mode) {
            Ok(made) => opened.push(made),
            // There is no such queue.
            Err(XdpError::Os { source, .. }) if queue > 0 && source.kind() == io::ErrorKind::InvalidInput => {
                if queues.is_some() {
                    return Err(XdpError::Queues(queue));
                }
                break;
            }
            Err(error) => return Err(error),
        }
    }
    for (queue, (socket, _)) in (0..).zip(&opened) {
        let added = program.add(queue, socket.as_fd());
        added.map_err(|source| XdpError::Os { step: "giving the program a socket", source })?;
    }
    Ok(Opened { program: program.into_link(), queues: opened })
}

/// Attaches the program: by the driver if it runs programs and nothing else was asked for.
fn attach(ifindex: u32, queues: u32, mode: Mode) -> Result<Redirect, XdpError> {
    let attach = |how| {
        let attach = || Redirect::attach(ifindex, queues, how);
        once_freed(attach, |error| matches!(error, BpfError::Busy))
    };
    if mode == Mode::Generic {
        return Ok(attach(Attach::Generic)?);
    }
    match attach(Attach::Driver) {
        Err(BpfError::Os { source, .. })
            if matches!(source.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EINVAL | libc::ERANGE)) =>
        {
            match mode {
                Mode::Auto => Ok(attach(Attach::Generic)?),
                _ => Err(XdpError::NoMode("driver that runs XDP programs")),
            }
        }
        attached => Ok(attached?),
    }
}

/// Makes the socket of a queue with its memory, and binds it.
fn socket(ifindex: u32, queue: u32, mtu: u32, mode: Mode) -> Result<(OwnedFd, OwnedFd), XdpError> {
    let os = |step| move |source: io::Error| XdpError::Os { step, source };
    let kind = SocketType::RAW;
    let socket = rustix::net::socket_with(AddressFamily::XDP, kind, SocketFlags::CLOEXEC, None);
    let socket = socket.map_err(|error| match error {
        Errno::AFNOSUPPORT => XdpError::Missing,
        error => failed("making the socket")(error),
    })?;
    let memory = SharedMem::new("ringferry-xdp", MEMORY).map_err(os("making the memory of the socket"))?;
    let map = |error: MapError| os("mapping the memory of the socket")(io::Error::other(error));
    let mapped = Region::map_exact(memory.fd(), 0, MEMORY).map_err(map)?;
    let umem = XdpUmemReg {
        addr: mapped.spec().user_addr,
        len: UMEM as u64,
        chunk_size: FRAME as u32,
        headroom: 0,
        flags: XdpUmemRegFlags::empty(),
        tx_metadata_len: 0,
    };
    sockopt::set_xdp_umem_reg(&socket, umem).map_err(failed("registering the memory of the socket"))?;
    let sized = failed("sizing the rings of the socket");
    sockopt::set_xdp_umem_fill_ring_size(&socket, ENTRIES).map_err(&sized)?;
    sockopt::set_xdp_umem_completion_ring_size(&socket, ENTRIES).map_err(&sized)?;
    sockopt::set_xdp_rx_ring_size(&socket, ENTRIES).map_err(&sized)?;
    sockopt::set_xdp_tx_ring_size(&socket, ENTRIES).map_err(&sized)?;
    bind(&socket, ifindex, queue, mtu, mode)?;
    let memory = memory.fd().try_clone_to_owned().map_err(os("passing the memory of the socket on"))?;
    let copy = socket.try_clone().map_err(os("passing the socket on"))?;
    Queue::new(copy, memory.as_fd(), false).map_err(os("mapping the rings of the socket"))?.begin();
    Ok((socket, memory))
}

fn bind(socket: &OwnedFd, ifindex: u32, queue: u32, mtu: u32, mode: Mode) -> Result<(), XdpError> {
    let mut flags = SocketAddrXdpFlags::XDP_USE_NEED_WAKEUP;
    flags |= match mode {
        Mode::Auto => SocketAddrXdpFlags::empty(),
        Mode::ZeroCopy => SocketAddrXdpFlags::XDP_ZEROCOPY,
        Mode::Copy | Mode::Generic => SocketAddrXdpFlags::XDP_COPY,
    };
    // Only then, as drivers that have zero copy may not have it with several frames.
    if several_frames(mtu) {
        flags |= SocketAddrXdpFlags::XDP_USE_SG;
    }
    let address = SocketAddrXdp::new(flags, ifindex, queue);
    let bound = once_freed(|| rustix::net::bind(socket, &address), |error| *error == Errno::BUSY);
    bound.map_err(|error| match error {
        Errno::BUSY => XdpError::Busy(queue),
        Errno::OPNOTSUPP if mode == Mode::ZeroCopy => XdpError::NoMode("zero copy"),
        error => failed("binding the socket")(error),
    })
}
