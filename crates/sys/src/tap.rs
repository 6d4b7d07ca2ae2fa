//! A tap device: an Ethernet link to the kernel's network stack, through `/dev/net/tun`.
//!
//! The control plane opens a [`Tap`] per queue ([`Tap::open`], or [`Tap::from_fd`] for one that a parent opened) and
//! gives it to a worker, which reads and writes frames without blocking. The [`Tap`] owns its descriptor; closing
//! the last one removes a device that was created by it, but not one that existed before. A tap belongs to the
//! network namespace of the thread that opened it.
//!
//! Each frame is preceded by a virtio network header of [`HEADER_LEN`] bytes (VIRTIO 1.4, 5.1.6, little-endian,
//! with `num_buffers`), and offloads let whole TCP and UDP segments of up to 64 KiB pass without checksums. The
//! kernel's choice of a queue is documented in `queues`.
//!
//! Behaviour of the kernel that a caller must know (measured on Linux 6.18):
//! - A read into a buffer that is too small truncates the frame silently; if not even the header fits, the frame is
//!   lost with `EINVAL`. Buffers must have at least [`MAX_READ`] bytes.
//! - `num_buffers` is 0 in a header that was read.
//! - While the interface is down, reads return `WouldBlock` and writes fail with `EIO`.
//! - A write whose header contradicts its frame fails with `EINVAL`; the caller should count it and go on.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use bitflags::bitflags;
use ringferry_memory::{ReadSlice, WriteSlice};
use rustix::event::{PollFd, PollFlags};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::time::Timespec;

use crate::{ifreq, netif};

mod queues;

/// Size in bytes of the virtio header in front of each frame.
pub const HEADER_LEN: usize = 12;

/// The largest read in bytes: the header, an Ethernet header with a VLAN tag, and the largest IP packet.
pub const MAX_READ: usize = HEADER_LEN + 18 + 65536;

const DEVICE: &str = "/dev/net/tun";

bitflags! {
    /// Offloads that the reader of a tap accepts, that is, work that the kernel may leave undone in frames. Writes may
    /// use all of them, whatever is set here. The values are those of `TUNSETOFFLOAD`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Offloads: u32 {
        /// Checksums may be missing (`NEEDS_CSUM`). All other offloads need this one.
        const CSUM = libc::TUN_F_CSUM;
        /// TCP over IPv4 may be longer than the MTU.
        const TSO4 = libc::TUN_F_TSO4;
        /// TCP over IPv6 may be longer than the MTU.
        const TSO6 = libc::TUN_F_TSO6;
        /// Long TCP frames may have the congestion bits ECE and CWR. It needs `TSO4` or `TSO6`.
        const ECN = libc::TUN_F_TSO_ECN;
        /// UDP over IPv4 may be longer than the MTU. The kernel accepts it only together with `USO6`.
        const USO4 = libc::TUN_F_USO4;
        /// UDP over IPv6 may be longer than the MTU. The kernel accepts it only together with `USO4`.
        const USO6 = libc::TUN_F_USO6;
    }
}

impl Offloads {
    /// Both UDP offloads, which the kernel accepts only together.
    const USO: Offloads = Offloads::USO4.union(Offloads::USO6);

    /// Returns the largest subset that obeys the kernel's rules: nothing without `CSUM`, `ECN` only with `TSO4` or
    /// `TSO6`, and both of `USO4` and `USO6` or neither.
    fn possible(self) -> Offloads {
        if !self.contains(Offloads::CSUM) {
            return Offloads::empty();
        }
        let mut set = self;
        if !set.intersects(Offloads::TSO4 | Offloads::TSO6) {
            set.remove(Offloads::ECN);
        }
        if !set.contains(Offloads::USO) {
            set.remove(Offloads::USO);
        }
        set
    }
}

/// The handling of a device that exists already, or does not exist yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Existing {
    /// Attaches to the device if it exists, and creates it otherwise.
    #[default]
    Either,
    /// Attaches to the device, which must exist.
    Require,
    /// Creates the device, which must not exist.
    Refuse,
}

/// The tap to open, and its options.
#[derive(Clone, Debug)]
pub struct TapConfig {
    /// Interface name, at most 15 bytes.
    pub name: String,
    /// True if the device has several queues, each opened as a [`Tap`] of its own.
    pub multi_queue: bool,
    /// The handling of a device that exists already, or does not exist yet.
    pub existing: Existing,
    /// Offloads that the reader accepts. The kernel may support fewer: see [`Tap::offloads`].
    pub offloads: Offloads,
}

impl TapConfig {
    /// Makes a configuration for one queue of a device that is attached to or created, with all offloads.
    pub fn new(name: impl Into<String>) -> TapConfig {
        TapConfig {
            name: name.into(),
            multi_queue: false,
            existing: Existing::default(),
            offloads: Offloads::all(),
        }
    }
}

/// The reason for which a tap cannot be used. Each message says what to do.
#[derive(Debug, thiserror::Error)]
pub enum TapError {
    /// The name is not possible for an interface.
    #[error(
        "tap name {0:?} is not possible: use 1 to 15 letters, digits, '-', '_' or '.' (no space, '/', ':', '%')"
    )]
    Name(String),
    /// `/dev/net/tun` does not exist, or its driver is not loaded.
    #[error(
        "/dev/net/tun is missing: load the driver (modprobe tun); in a container, pass the device in (--device /dev/net/tun)"
    )]
    NoDriver,
    /// `/dev/net/tun` may not be opened.
    #[error(
        "/dev/net/tun may not be opened by this user: run as root, or allow it (chmod 0666 /dev/net/tun; in a container, --device /dev/net/tun)"
    )]
    NoAccess,
    /// This user may not create the tap or attach to it.
    #[error(
        "no permission for tap {0}: run as root, give the program CAP_NET_ADMIN, or let root make a tap for this user (ip tuntap add dev {0} mode tap user $USER vnet_hdr)"
    )]
    Permission(String),
    /// The interface should be created, but exists already.
    #[error(
        "interface {0} exists already: choose another name, or delete it if it is a tap that nobody needs (ip link delete {0})"
    )]
    Exists(String),
    /// The interface should exist, but does not.
    #[error(
        "there is no tap {0} in this network namespace: make it (ip tuntap add dev {0} mode tap vnet_hdr) or let it be created"
    )]
    Missing(String),
    /// The interface exists, but is not a tap, or a tap with other properties.
    #[error(
        "interface {name} exists, but not as a tap with {queues}: choose another name, or, if it is a tap that nobody needs, delete it and make it again (ip link delete {name}; ip tuntap add dev {name} mode tap vnet_hdr{option})"
    )]
    OtherKind {
        /// Name of the interface.
        name: String,
        /// The number of queues that was requested, in words.
        queues: &'static str,
        /// The option of `ip tuntap` that makes such a tap.
        option: &'static str,
    },
    /// All queues of the tap are open already, in this or another process.
    #[error("tap {name} is in use: end the program that has it open, or choose another name{}", whose(*.pid))]
    InUse {
        /// Name of the interface.
        name: String,
        /// A process that has it open, if that can be seen from here.
        pid: Option<u32>,
    },
    /// An inherited descriptor is not an attached tap.
    #[error(
        "the inherited descriptor is not an attached tap: pass an open /dev/net/tun after TUNSETIFF with IFF_TAP, IFF_NO_PI and IFF_VNET_HDR"
    )]
    NotATap,
    /// An inherited tap lacks the virtio header or has the packet information header.
    #[error(
        "the inherited tap {0} was opened without IFF_VNET_HDR or without IFF_NO_PI: open it with both (libvirt and QEMU: vnet_hdr=on)"
    )]
    NoHeader(String),
    /// Another system call failed.
    #[error("tap {name}: {step}: {source}")]
    Os {
        /// Name of the interface.
        name: String,
        /// The step that failed, in words.
        step: &'static str,
        /// The error of the system call.
        source: io::Error,
    },
}

impl TapError {
    /// The error of a tap whose queues are all open already, with whoever has one.
    pub fn in_use(name: String) -> TapError {
        TapError::InUse { pid: holder(&name), name }
    }
}

/// An open, non-blocking queue of a tap device; see the [module](self).
#[derive(Debug)]
pub struct Tap {
    fd: OwnedFd,
    name: String,
    offloads: Offloads,
}

impl Tap {
    /// Opens a queue of the tap that `config` names, in the calling thread's network namespace. An existing
    /// interface stays up or down as it is; a new one is down.
    ///
    /// # Errors
    /// [`TapError`], whose message says what to do.
    pub fn open(config: &TapConfig) -> Result<Tap, TapError> {
        let name = &config.name;
        let wanted_name = || TapError::Name(name.clone());
        if !ifreq::is_valid_name(name) {
            return Err(wanted_name());
        }
        let mut request = ifreq::for_name(name).ok_or_else(wanted_name)?;
        let index_before =
            netif::index(name).map_err(|e| os_error(name, "looking it up", io::Error::other(e)))?;
        match (config.existing, index_before) {
            (Existing::Refuse, Some(_)) => return Err(TapError::Exists(name.clone())),
            (Existing::Require, None) => return Err(TapError::Missing(name.clone())),
            _ => {}
        }

        let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let fd = rustix::fs::open(DEVICE, flags, Mode::empty()).map_err(|e| match e {
            Errno::NOENT | Errno::NODEV | Errno::NXIO => TapError::NoDriver,
            Errno::ACCESS | Errno::PERM => TapError::NoAccess,
            e => os_error(name, "opening /dev/net/tun", e.into()),
        })?;

        let mut wanted = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
        if config.multi_queue {
            wanted |= libc::IFF_MULTI_QUEUE;
        }
        if config.existing == Existing::Refuse {
            wanted |= libc::IFF_TUN_EXCL; // someone may create it between the look-up and now
        }
        request.ifr_ifru.ifru_flags = wanted as libc::c_short;
        // SAFETY: TUNSETIFF takes an ifreq with a name and flags.
        unsafe { ifreq::ioctl(&fd, libc::TUNSETIFF, &mut request) }
            .map_err(|e| attach_error(config, index_before.is_some(), e))?;

        let tap = Tap::set_up(fd, name.clone(), config.offloads)?;
        // TUNSETIFF creates a device that does not exist: it may have been removed since the look-up.
        if config.existing == Existing::Require && tap.ifindex().ok() != index_before {
            return Err(TapError::Missing(name.clone()));
        }
        Ok(tap)
    }

    /// Returns how many queues of the multi-queue tap `name` are attached, in whatever process: 1 also if it is none, and 0 if that cannot be seen, as the
    /// interface is not in the network namespace of the `/sys` that is mounted here.
    pub fn attached_queues(name: &str) -> usize {
        if !ifreq::is_valid_name(name) {
            return 0;
        }
        // The driver sets the number of the device's queues when one is attached or detached, and the device has at least one.
        let queues = std::fs::read_dir(format!("/sys/class/net/{name}/queues"));
        let is_tx = |entry: &std::fs::DirEntry| entry.file_name().as_encoded_bytes().starts_with(b"tx-");
        queues.map_or(0, |queues| queues.flatten().filter(is_tx).count())
    }

    /// Makes a second handle of this queue. Frames written through either take the same path; frames that are read
    /// are divided between the two.
    ///
    /// # Errors
    /// `EMFILE`, if too many files are open.
    pub fn try_clone(&self) -> io::Result<Tap> {
        Ok(Tap { fd: self.fd.try_clone()?, name: self.name.clone(), ..*self })
    }

    /// Takes over a queue that another program has opened and attached, and makes it non-blocking.
    ///
    /// # Errors
    /// [`TapError::NotATap`], [`TapError::NoHeader`] or [`TapError::Os`]; the descriptor is closed.
    pub fn from_fd(fd: OwnedFd, offloads: Offloads) -> Result<Tap, TapError> {
        let mut request = ifreq::zeroed();
        // SAFETY: TUNGETIFF fills in an ifreq; other files refuse the request.
        unsafe { ifreq::ioctl(&fd, libc::TUNGETIFF, &mut request) }.map_err(|_| TapError::NotATap)?;
        let name = ifreq::name_of(&request);
        // SAFETY: TUNGETIFF has just written this member; any bit pattern is a short.
        let flags = i32::from(unsafe { request.ifr_ifru.ifru_flags });
        if flags & libc::IFF_TAP == 0 {
            return Err(TapError::NotATap);
        }
        if flags & libc::IFF_VNET_HDR == 0 || flags & libc::IFF_NO_PI == 0 {
            return Err(TapError::NoHeader(name));
        }
        let attempt = |step, result: Result<(), Errno>| result.map_err(|e| os_error(&name, step, e.into()));
        attempt("close on exec", rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC))?;
        let status = rustix::fs::fcntl_getfl(&fd).unwrap_or(OFlags::RDWR);
        attempt("making it non-blocking", rustix::fs::fcntl_setfl(&fd, status | OFlags::NONBLOCK))?;
        Tap::set_up(fd, name, offloads)
    }

    /// Takes over a queue of another process, in which it was of the interface `name`. If that was deleted meanwhile the queue is as any whose interface is deleted under
    /// it, and [`is_attached`](Self::is_attached) says so.
    ///
    /// # Errors
    /// As [`Tap::from_fd`].
    pub fn from_predecessor(fd: OwnedFd, name: &str, offloads: Offloads) -> Result<Tap, TapError> {
        let mut request = ifreq::zeroed();
        // SAFETY: TUNGETIFF fills in an ifreq; other files refuse the request.
        let attached = unsafe { ifreq::ioctl(&fd, libc::TUNGETIFF, &mut request) };
        match attached {
            Err(error) if error.raw_os_error() == Some(libc::EBADFD) => {
                Ok(Tap { fd, name: name.to_owned(), offloads: offloads.possible() })
            }
            _ => Tap::from_fd(fd, offloads),
        }
    }

    /// Sets header size, byte order and offloads of an attached queue.
    fn set_up(fd: OwnedFd, name: String, offloads: Offloads) -> Result<Tap, TapError> {
        let mut size = HEADER_LEN as libc::c_int;
        // SAFETY: TUNSETVNETHDRSZ takes the address of an int.
        unsafe { ifreq::ioctl(&fd, libc::TUNSETVNETHDRSZ, &mut size) }
            .map_err(|e| os_error(&name, "setting the header size (TUNSETVNETHDRSZ)", e))?;
        let mut little_endian: libc::c_int = 1;
        // SAFETY: TUNSETVNETLE takes the address of an int.
        let order = unsafe { ifreq::ioctl(&fd, libc::TUNSETVNETLE, &mut little_endian) };
        // Kernels before 4.0 do not have it; the header has the byte order of the machine there.
        if cfg!(target_endian = "big") {
            order.map_err(|e| os_error(&name, "setting the byte order (TUNSETVNETLE)", e))?;
        }
        let mut tap = Tap { fd, name, offloads: Offloads::empty() };
        tap.set_offloads(offloads)?;
        Ok(tap)
    }

    /// Sets the offloads for frames read from now on, and returns those that the kernel accepted. `USO4` and `USO6`
    /// need Linux 6.2 and are left out on older kernels. Frames that are queued in the device already may still use
    /// the previous offloads.
    ///
    /// # Errors
    /// [`TapError::Os`], if even the other offloads are refused.
    pub fn set_offloads(&mut self, wanted: Offloads) -> Result<Offloads, TapError> {
        let wanted = wanted.possible();
        self.offloads = match self.offload(wanted) {
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) && wanted.intersects(Offloads::USO) => {
                let without = wanted - Offloads::USO;
                self.offload(without).map(|()| without)
            }
            result => result.map(|()| wanted),
        }
        .map_err(|e| os_error(&self.name, "setting offloads (TUNSETOFFLOAD)", e))?;
        Ok(self.offloads)
    }

    fn offload(&self, set: Offloads) -> io::Result<()> {
        // SAFETY: TUNSETOFFLOAD takes the flags as the argument itself, and no memory.
        let result =
            unsafe { libc::ioctl(self.fd.as_raw_fd(), libc::TUNSETOFFLOAD, libc::c_ulong::from(set.bits())) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Lets the device outlive its last queue, and lets the user `owner` alone attach to it beside root: a device without an owner is
    /// open to everybody.
    ///
    /// # Errors
    /// [`TapError::Os`], without CAP_NET_ADMIN.
    pub fn make_persistent(&self, owner: u32) -> Result<(), TapError> {
        for (request, argument, step) in [
            (libc::TUNSETOWNER, owner, "setting its owner (TUNSETOWNER)"),
            (libc::TUNSETPERSIST, 1, "making it persistent (TUNSETPERSIST)"),
        ] {
            // SAFETY: both requests take a number as the argument itself, and no memory.
            let result = unsafe { libc::ioctl(self.fd.as_raw_fd(), request, libc::c_ulong::from(argument)) };
            if result < 0 {
                return Err(os_error(&self.name, step, io::Error::last_os_error()));
            }
        }
        Ok(())
    }

    /// Returns true if the device exists, in whatever network namespace and under whatever name.
    pub fn is_attached(&self) -> bool {
        self.name_now().is_some()
    }

    /// Returns the name that the device has now, in whatever network namespace it is; `None`, if it was deleted.
    pub fn name_now(&self) -> Option<String> {
        let mut request = ifreq::zeroed();
        // SAFETY: TUNGETIFF fills in an ifreq.
        unsafe { ifreq::ioctl(&self.fd, libc::TUNGETIFF, &mut request) }.ok()?;
        Some(ifreq::name_of(&request))
    }

    /// Returns true if the device exists and is administratively up, in whatever network namespace and under whatever name: only then a queue can be
    /// written to, and poll(2) says so.
    pub fn is_up(&self) -> bool {
        let mut queue = [PollFd::new(&self.fd, PollFlags::OUT)];
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        rustix::event::poll(&mut queue, Some(&at_once)).is_ok() && queue[0].revents().contains(PollFlags::OUT)
    }

    /// Returns the name that the interface had when it was opened.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the offloads in force, which may be fewer than those requested.
    pub fn offloads(&self) -> Offloads {
        self.offloads
    }

    /// Looks up the interface's index in the calling thread's network namespace.
    ///
    /// # Errors
    /// `NotFound`, if the interface is not in this namespace.
    pub fn ifindex(&self) -> io::Result<u32> {
        netif::index(&self.name).map_err(io::Error::other)?.ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// Reads one frame with the header in front of it, and returns the length of both together.
    ///
    /// # Errors
    /// `WouldBlock`, if there is no frame.
    pub fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        Ok(rustix::io::read(&self.fd, buffer)?)
    }

    /// Writes one frame with its header in front, and returns the length of both together.
    ///
    /// # Errors
    /// `InvalidInput`, if the header contradicts the frame; `EIO` while the interface is down.
    pub fn write(&self, frame: &[u8]) -> io::Result<usize> {
        Ok(rustix::io::write(&self.fd, frame)?)
    }

    /// Reads one frame with its header into the pieces of `buffers` (at most 1024), in order.
    ///
    /// # Errors
    /// The same as [`read`](Self::read), and `EFAULT`, if the memory for the header is not mapped any more; the frame
    /// is lost then. The kernel (6.18) does not report bytes of the frame that could not be written.
    pub fn readv(&self, buffers: &mut [WriteSlice<'_>]) -> io::Result<usize> {
        let count = libc::c_int::try_from(buffers.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
        // SAFETY: WriteSlice is repr(transparent) over iovec and stands for memory that may be
        // written for its lifetime, which spans the call; `count` is the slice's own length.
        let n = unsafe { libc::readv(self.fd.as_raw_fd(), buffers.as_mut_ptr().cast(), count) };
        usize::try_from(n).map_err(|_| io::Error::last_os_error())
    }

    /// Writes one frame with its header, gathered from the pieces of `frame` (at most 1024).
    ///
    /// # Errors
    /// The same as [`write`](Self::write), and `EFAULT`, if memory of a peer is not mapped any more.
    pub fn writev(&self, frame: &[ReadSlice<'_>]) -> io::Result<usize> {
        let count = libc::c_int::try_from(frame.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
        // SAFETY: ReadSlice is repr(transparent) over iovec and stands for memory that may be
        // read for its lifetime, which spans the call; `count` is the slice's own length.
        let n = unsafe { libc::writev(self.fd.as_raw_fd(), frame.as_ptr().cast(), count) };
        usize::try_from(n).map_err(|_| io::Error::last_os_error())
    }
}

impl From<Tap> for OwnedFd {
    fn from(tap: Tap) -> OwnedFd {
        tap.fd
    }
}

impl AsFd for Tap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn os_error(name: &str, step: &'static str, source: io::Error) -> TapError {
    TapError::Os { name: name.to_owned(), step, source }
}

/// Makes the error for a TUNSETIFF that failed.
/// Says which process has a tap.
fn whose(pid: Option<u32>) -> String {
    pid.map_or_else(String::new, |pid| format!(" (process {pid} has it)"))
}

/// Returns a process that has a queue of the tap `name` open, in whatever network namespace. A user who is not root sees only processes of its own, and
/// in a sandbox there is no `/proc`.
fn holder(name: &str) -> Option<u32> {
    let line = format!("iff:\t{name}");
    let has = |pid: u32| {
        let files = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        files.filter(|file| std::fs::read_link(file.path()).is_ok_and(|file| file == Path::new(DEVICE))).any(
            |file| {
                let about = format!("/proc/{pid}/fdinfo/{}", file.file_name().display());
                std::fs::read_to_string(about).is_ok_and(|about| about.lines().any(|about| about == line))
            },
        )
    };
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    processes.filter_map(|process| process.file_name().to_str()?.parse().ok()).find(|pid| has(*pid))
}

fn attach_error(config: &TapConfig, existed: bool, error: io::Error) -> TapError {
    let name = config.name.clone();
    match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => TapError::Permission(name),
        Some(libc::EBUSY) if config.existing == Existing::Refuse => TapError::Exists(name),
        Some(libc::EBUSY | libc::E2BIG) => TapError::in_use(name),
        Some(libc::EINVAL) if existed => {
            let (queues, option) =
                if config.multi_queue { ("many queues", " multi_queue") } else { ("one queue", "") };
            TapError::OtherKind { name, queues, option }
        }
        _ => os_error(&name, "attaching (TUNSETIFF)", error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{in_new_net, may};
    use std::net::{IpAddr, Ipv4Addr, UdpSocket};

    fn open(name: &str) -> Tap {
        Tap::open(&TapConfig::new(name)).unwrap()
    }

    #[test]
    fn possible_offloads_obey_the_kernels_rules() {
        assert_eq!(Offloads::all().possible(), Offloads::all());
        assert_eq!((Offloads::TSO4 | Offloads::USO).possible(), Offloads::empty());
        assert_eq!((Offloads::CSUM | Offloads::USO4).possible(), Offloads::CSUM);
        assert_eq!((Offloads::CSUM | Offloads::ECN).possible(), Offloads::CSUM);
        assert_eq!((Offloads::CSUM | Offloads::TSO6).possible(), Offloads::CSUM | Offloads::TSO6);
    }

    #[test]
    fn impossible_names_are_refused_before_any_call() {
        for name in ["", "a-name-too-long-for-linux", "tap%d", "a/b"] {
            let error = Tap::open(&TapConfig::new(name)).unwrap_err();
            assert!(matches!(error, TapError::Name(_)), "{error}");
        }
    }

    #[test]
    fn every_subset_of_offloads_is_accepted() {
        in_new_net(|| {
            let mut tap = open("t0");
            for bits in 0..=Offloads::all().bits() {
                let Some(set) = Offloads::from_bits(bits) else { continue };
                let accepted = tap.set_offloads(set).unwrap();
                assert!(set.contains(accepted));
                assert_eq!(accepted, tap.offloads());
                let basic = set.possible() - Offloads::USO;
                assert!(accepted.contains(basic), "{set:?} gave {accepted:?}");
            }
        });
    }

    #[test]
    fn a_created_tap_disappears_with_its_descriptor() {
        in_new_net(|| {
            let tap = open("t0");
            assert_eq!(tap.name(), "t0");
            assert_eq!(Some(tap.ifindex().unwrap()), netif::index("t0").unwrap());
            drop(tap);
            assert_eq!(netif::index("t0").unwrap(), None);
        });
    }

    #[test]
    fn the_name_and_the_state_of_a_tap_are_known_wherever_it_is() {
        if !may("needs the program ip", crate::program::installed("ip").is_some()) {
            return;
        }
        in_new_net(|| {
            let ip = |command: &str| {
                assert!(
                    std::process::Command::new("ip").args(command.split(' ')).status().unwrap().success()
                );
            };
            let tap = open("t0");
            assert_eq!((tap.name_now().as_deref(), tap.is_up()), (Some("t0"), false));
            netif::set_up("t0", true).unwrap();
            assert!(tap.is_up());
            netif::set_up("t0", false).unwrap();
            ip("link set t0 name t1");
            netif::set_up("t1", true).unwrap();
            assert_eq!((tap.name_now().as_deref(), tap.name(), tap.is_up()), (Some("t1"), "t0", true));
            ip("link add br0 type bridge");
            assert_eq!(netif::master("t1").unwrap(), None);
            netif::join_bridge("t1", "br0").unwrap();
            assert_eq!(netif::master("t1").unwrap(), netif::index("br0").unwrap());
            assert!(netif::master("t0").is_err());
            ip("link delete t1");
            assert_eq!((tap.name_now(), tap.is_up(), tap.is_attached()), (None, false, false));
        });
    }

    #[test]
    fn an_existing_tap_is_required_or_refused() {
        in_new_net(|| {
            let mut config = TapConfig::new("t0");
            config.existing = Existing::Require;
            assert!(matches!(Tap::open(&config), Err(TapError::Missing(_))));
            assert_eq!(netif::index("t0").unwrap(), None);
            config.existing = Existing::Refuse;
            let first = Tap::open(&config).unwrap();
            assert!(matches!(Tap::open(&config), Err(TapError::Exists(_))));
            config.existing = Existing::Either;
            let error = Tap::open(&config).unwrap_err();
            assert!(
                matches!(&error, TapError::InUse { pid: Some(pid), .. } if *pid == std::process::id()),
                "{error}"
            );

            // A persistent tap outlives its queue and can be attached again.
            // SAFETY: TUNSETPERSIST takes a plain number.
            assert_eq!(unsafe { libc::ioctl(first.fd.as_raw_fd(), libc::TUNSETPERSIST, 1) }, 0);
            let index = first.ifindex().unwrap();
            drop(first);
            config.existing = Existing::Require;
            let again = Tap::open(&config).unwrap();
            assert_eq!(again.ifindex().unwrap(), index);
            assert_eq!(again.offloads(), Tap::open(&TapConfig::new("t1")).unwrap().offloads());
        });
    }

    #[test]
    fn an_interface_of_another_kind_is_named_as_such() {
        in_new_net(|| {
            assert!(matches!(Tap::open(&TapConfig::new("lo")), Err(TapError::OtherKind { .. })));
            let _single = open("t0");
            let mut config = TapConfig::new("t0");
            config.multi_queue = true;
            let error = Tap::open(&config).unwrap_err();
            assert!(matches!(error, TapError::OtherKind { option: " multi_queue", .. }), "{error}");
        });
    }

    #[test]
    fn a_multi_queue_tap_opens_more_than_once() {
        in_new_net(|| {
            let mut config = TapConfig::new("t0");
            config.multi_queue = true;
            let first = Tap::open(&config).unwrap();
            let second = Tap::open(&config).unwrap();
            assert_eq!(first.ifindex().unwrap(), second.ifindex().unwrap());
        });
    }

    #[test]
    fn from_fd_takes_only_taps_with_a_virtio_header() {
        let file = tempfile::tempfile().unwrap();
        assert!(matches!(Tap::from_fd(file.into(), Offloads::all()), Err(TapError::NotATap)));
        in_new_net(|| {
            let attach = |name: &str, flags: i32| {
                let fd = rustix::fs::open(DEVICE, OFlags::RDWR, Mode::empty()).unwrap();
                let mut request = ifreq::for_name(name).unwrap();
                request.ifr_ifru.ifru_flags = flags as libc::c_short;
                // SAFETY: TUNSETIFF takes an ifreq with a name and flags.
                unsafe { ifreq::ioctl(&fd, libc::TUNSETIFF, &mut request) }.unwrap();
                fd
            };
            let detached = rustix::fs::open(DEVICE, OFlags::RDWR, Mode::empty()).unwrap();
            assert!(matches!(Tap::from_fd(detached, Offloads::all()), Err(TapError::NotATap)));
            let tun = attach("u0", libc::IFF_TUN | libc::IFF_NO_PI | libc::IFF_VNET_HDR);
            assert!(matches!(Tap::from_fd(tun, Offloads::all()), Err(TapError::NotATap)));
            let bare = attach("t0", libc::IFF_TAP | libc::IFF_NO_PI);
            assert!(matches!(Tap::from_fd(bare, Offloads::all()), Err(TapError::NoHeader(_))));

            let good = attach("t1", libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR);
            let tap = Tap::from_fd(good, Offloads::CSUM).unwrap();
            assert_eq!((tap.name(), tap.offloads()), ("t1", Offloads::CSUM));
            let error = tap.read(&mut [0; MAX_READ]).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
            let flags = rustix::io::fcntl_getfd(&tap).unwrap();
            assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
            let again = tap.as_fd().try_clone_to_owned().unwrap();
            assert!(Tap::from_predecessor(again, "t1", Offloads::CSUM).unwrap().is_attached());
        });
    }

    #[test]
    fn a_queue_of_another_process_may_have_lost_its_interface() {
        let file = tempfile::tempfile().unwrap();
        let taken = Tap::from_predecessor(file.into(), "t0", Offloads::all());
        assert!(matches!(taken, Err(TapError::NotATap)));
        in_new_net(|| {
            let deleted = rustix::fs::open(DEVICE, OFlags::RDWR, Mode::empty()).unwrap();
            let tap = Tap::from_predecessor(deleted, "t0", Offloads::CSUM).unwrap();
            assert_eq!((tap.name(), tap.is_attached()), ("t0", false));
            assert!(tap.read(&mut [0; MAX_READ]).is_err());
        });
    }

    #[test]
    fn frames_cross_in_pieces_with_the_header_in_front() {
        in_new_net(|| {
            let tap = open("t0");
            netif::quiet_ipv6("t0");
            netif::add_address("t0", IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1)), 24).unwrap();
            netif::set_up("t0", true).unwrap();
            let host = UdpSocket::bind("10.0.0.1:7777").unwrap();

            // Out of the stack: it asks who 10.0.0.2 is. Read in three uneven pieces.
            host.send_to(b"x", "10.0.0.2:9").unwrap();
            let (mut a, mut b, mut c) = ([0u8; 5], [0u8; 21], vec![0u8; MAX_READ]);
            let n = loop {
                let mut pieces = [
                    WriteSlice::from(&mut a[..]),
                    WriteSlice::from(&mut b[..]),
                    WriteSlice::from(&mut c[..]),
                ];
                let n = tap.readv(&mut pieces).unwrap();
                if [&a[..], &b, &c].concat()[24..26] == [0x08, 0x06] {
                    break n;
                }
            };
            let request = [&a[..], &b, &c].concat();
            assert_eq!(n, HEADER_LEN + 42);
            assert_eq!(&request[HEADER_LEN + 38..n], &[10, 0, 0, 2]);

            // Into the stack: a UDP datagram from 10.0.0.2, header and payload apart.
            let mac = netif::mac("t0").unwrap();
            let mut head = vec![0u8; HEADER_LEN];
            head.extend_from_slice(&mac);
            head.extend_from_slice(&[2, 0, 0, 0, 0, 2, 0x08, 0x00]);
            let mut ip = [0x45, 0, 0, 33, 0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 0, 2, 10, 0, 0, 1];
            let sum = ip.chunks(2).map(|w| u32::from(w[0]) << 8 | u32::from(w[1])).sum::<u32>();
            ip[10..12].copy_from_slice(&(!((sum & 0xffff) + (sum >> 16)) as u16).to_be_bytes());
            head.extend_from_slice(&ip);
            let udp = [0, 9, 0x1e, 0x61, 0, 13, 0, 0];
            let pieces = [
                ReadSlice::from(&head[..]),
                ReadSlice::from(&udp[..]),
                ReadSlice::EMPTY,
                ReadSlice::from(&b"hello"[..]),
            ];
            assert_eq!(tap.writev(&pieces).unwrap(), HEADER_LEN + 14 + 33);
            let mut got = [0u8; 16];
            host.set_read_timeout(Some(std::time::Duration::from_secs(10))).unwrap();
            let (n, from) = host.recv_from(&mut got).unwrap();
            assert_eq!((&got[..n], from.to_string().as_str()), (&b"hello"[..], "10.0.0.2:9"));
        });
    }

    #[test]
    fn a_header_that_contradicts_its_frame_is_an_error() {
        in_new_net(|| {
            let tap = open("t0");
            let mut frame = [0u8; HEADER_LEN + 60];
            assert_eq!(tap.write(&frame).unwrap_err().raw_os_error(), Some(libc::EIO));
            netif::set_up("t0", true).unwrap();
            assert_eq!(tap.write(&frame).unwrap(), frame.len());
            frame[0] = 1; // NEEDS_CSUM, with a start beyond the end
            frame[6] = 200;
            assert_eq!(tap.write(&frame).unwrap_err().kind(), io::ErrorKind::InvalidInput);
            assert!(tap.write(&frame[..HEADER_LEN]).is_err());
        });
    }
}
