//! The one XDP program that a switch needs: it gives each packet of an interface to the AF_XDP socket of the queue that it came in on, and leaves to the host what
//! has none (bpf(2); Documentation/networking/af_xdp.rst of Linux).
//!
//! [`Redirect`] is the program, attached, with its table of sockets. Closing its descriptor detaches it, so that nothing is left at the interface of a process that was
//! killed. Making it needs CAP_BPF and CAP_NET_ADMIN; having it needs nothing.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// How a program is attached to an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attach {
    /// The driver runs it, before there is anything but the packet.
    Driver,
    /// The kernel runs it for any driver, on packets that it has made ready for the host already.
    Generic,
}

/// The reason why the program is not at an interface. Each message says what to do.
#[derive(Debug, thiserror::Error)]
pub enum BpfError {
    /// This user may not load or attach programs.
    #[error("no permission for XDP programs: run as root, or give the program CAP_BPF and CAP_NET_ADMIN")]
    Permission,
    /// The kernel has no bpf(2), or a security policy takes it away.
    #[error("this kernel has no bpf(2), which AF_XDP needs")]
    Missing,
    /// Another XDP program is attached.
    #[error(
        "another XDP program is at the interface: `ip -details link show` names it, `ip link set dev INTERFACE xdp off` takes one away that ip has attached"
    )]
    Busy,
    /// Another system call failed.
    #[error("{step}: {source}")]
    Os {
        /// The step that failed, in words.
        step: &'static str,
        /// The error of the system call.
        source: io::Error,
    },
}

/// Commands of bpf(2).
const MAP_CREATE: libc::c_int = 0;
const MAP_UPDATE_ELEM: libc::c_int = 2;
const PROG_LOAD: libc::c_int = 5;
const LINK_CREATE: libc::c_int = 28;

/// A map from numbers of queues to AF_XDP sockets.
const MAP_TYPE_XSKMAP: u32 = 17;
const PROG_TYPE_XDP: u32 = 6;
const ATTACH_TYPE_XDP: u32 = 37;
/// The program takes packets that lie in several buffers, as an interface with a large MTU has them.
const F_XDP_HAS_FRAGS: u32 = 1 << 5;
const XDP_FLAGS_SKB_MODE: u32 = 1 << 1;
const XDP_FLAGS_DRV_MODE: u32 = 1 << 2;
/// What the program returns for a packet that no socket takes: the host gets it.
const XDP_PASS: i32 = 2;
/// `rx_queue_index` in `struct xdp_md`.
const RX_QUEUE_INDEX: i16 = 16;
/// `bpf_redirect_map`, whose flags say what to return if the map has no such entry.
const REDIRECT_MAP: i32 = 51;
/// The number in a load of 64 bits is the descriptor of a map.
const PSEUDO_MAP_FD: u8 = 1;

/// `struct bpf_insn`.
#[repr(C)]
struct Instruction {
    code: u8,
    /// Destination in the lower half, source in the upper one.
    registers: u8,
    offset: i16,
    immediate: i32,
}

const fn instruction(code: u8, [to, from]: [u8; 2], offset: i16, immediate: i32) -> Instruction {
    Instruction { code, registers: from << 4 | to, offset, immediate }
}

/// The part of `union bpf_attr` that each command reads.
#[repr(C)]
#[derive(Default)]
struct MapCreate {
    map_type: u32,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
    map_flags: u32,
}

#[repr(C)]
#[derive(Default)]
struct MapUpdate {
    map_fd: u32,
    padding: u32,
    key: u64,
    value: u64,
    flags: u64,
}

#[repr(C)]
#[derive(Default)]
struct ProgLoad {
    prog_type: u32,
    insn_cnt: u32,
    insns: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log_buf: u64,
    kern_version: u32,
    prog_flags: u32,
    prog_name: [u8; 16],
    prog_ifindex: u32,
    expected_attach_type: u32,
}

#[repr(C)]
#[derive(Default)]
struct LinkCreate {
    prog_fd: u32,
    target_ifindex: u32,
    attach_type: u32,
    flags: u32,
}

/// Calls bpf(2) with the attributes of a command.
///
/// # Safety
/// `attributes` are those of the command, and pointers in them are valid for it.
unsafe fn bpf<T>(command: libc::c_int, attributes: &T) -> io::Result<libc::c_int> {
    // SAFETY: the kernel reads as many bytes as it is told; the rest is the caller's.
    let result =
        unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_ref(attributes), size_of::<T>()) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result as libc::c_int) }
}

/// Does the same for a command that makes a descriptor.
///
/// # Safety
/// As for [`bpf`], and the command makes a descriptor.
unsafe fn bpf_fd<T>(command: libc::c_int, attributes: &T) -> io::Result<OwnedFd> {
    // SAFETY: as the caller says; bpf(2) has made the descriptor for us, closed on exec.
    unsafe { Ok(OwnedFd::from_raw_fd(bpf(command, attributes)?)) }
}

fn failed(step: &'static str) -> impl FnOnce(io::Error) -> BpfError {
    move |source| match source.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => BpfError::Permission,
        Some(libc::ENOSYS) => BpfError::Missing,
        _ => BpfError::Os { step, source },
    }
}

/// The program at an interface, with its table of sockets; see the [module](self).
#[derive(Debug)]
pub struct Redirect {
    /// The attachment, which has the program, which has the table.
    link: OwnedFd,
    table: OwnedFd,
}

impl Redirect {
    /// Loads the program and attaches it to the interface with this index, in this network namespace. Until sockets are [added](Self::add) the host gets all packets.
    /// `queues` is the number of queues that may have one.
    ///
    /// # Errors
    /// [`BpfError`]; with [`BpfError::Os`] and `EOPNOTSUPP` the driver runs no programs, or none on packets in several buffers.
    pub fn attach(ifindex: u32, queues: u32, how: Attach) -> Result<Redirect, BpfError> {
        let create = MapCreate {
            map_type: MAP_TYPE_XSKMAP,
            key_size: 4,
            value_size: 4,
            max_entries: queues,
            map_flags: 0,
        };
        // SAFETY: these are the attributes of the command.
        let table = unsafe { bpf_fd(MAP_CREATE, &create) }.map_err(failed("making the table of sockets"))?;
        let program = load(&table, F_XDP_HAS_FRAGS).or_else(|_| load(&table, 0))?;
        let flags = match how {
            Attach::Driver => XDP_FLAGS_DRV_MODE,
            Attach::Generic => XDP_FLAGS_SKB_MODE,
        };
        let create = LinkCreate {
            prog_fd: program.as_raw_fd() as u32,
            target_ifindex: ifindex,
            attach_type: ATTACH_TYPE_XDP,
            flags,
        };
        // SAFETY: these are the attributes of the command.
        let link = unsafe { bpf_fd(LINK_CREATE, &create) }.map_err(|source| match source.raw_os_error() {
            Some(libc::EBUSY | libc::EEXIST) => BpfError::Busy,
            _ => failed("attaching the XDP program")(source),
        })?;
        Ok(Redirect { link, table })
    }

    /// Gives packets that come in on `queue` to an AF_XDP socket that is bound to that.
    ///
    /// # Errors
    /// The socket has no ring to receive on, or the table no such queue.
    pub fn add(&self, queue: u32, socket: BorrowedFd<'_>) -> io::Result<()> {
        let value = socket.as_raw_fd();
        let update = MapUpdate {
            map_fd: self.table.as_raw_fd() as u32,
            key: std::ptr::from_ref(&queue).addr() as u64,
            value: std::ptr::from_ref(&value).addr() as u64,
            ..MapUpdate::default()
        };
        // SAFETY: these are the attributes of the command, and key and value have the sizes that the table was made with.
        unsafe { bpf(MAP_UPDATE_ELEM, &update) }.map(drop)
    }

    /// Returns the attachment alone, which keeps the program and its table as they are.
    pub fn into_link(self) -> OwnedFd {
        self.link
    }
}

/// Loads the program that redirects to the sockets of `table`.
fn load(table: &OwnedFd, flags: u32) -> Result<OwnedFd, BpfError> {
    // The number of a descriptor is no address: whoever reads the registers as a machine does needs nothing else.
    let program = [
        // r2 = context->rx_queue_index
        instruction(0x61, [2, 1], RX_QUEUE_INDEX, 0),
        // r1 = table, in two slots
        instruction(0x18, [1, PSEUDO_MAP_FD], 0, table.as_raw_fd()),
        instruction(0, [0, 0], 0, 0),
        // r3 = what to return if there is no socket
        instruction(0xb7, [3, 0], 0, XDP_PASS),
        instruction(0x85, [0, 0], 0, REDIRECT_MAP),
        instruction(0x95, [0, 0], 0, 0),
    ];
    let mut prog_name = [0; 16];
    prog_name[..9].copy_from_slice(b"ringferry");
    let load = ProgLoad {
        prog_type: PROG_TYPE_XDP,
        insn_cnt: program.len() as u32,
        insns: program.as_ptr().addr() as u64,
        license: c"MIT OR Apache-2.0".as_ptr().addr() as u64,
        prog_flags: flags,
        prog_name,
        expected_attach_type: ATTACH_TYPE_XDP,
        ..ProgLoad::default()
    };
    // SAFETY: these are the attributes of the command; the program and the text live until it returns.
    unsafe { bpf_fd(PROG_LOAD, &load) }.map_err(failed("loading the XDP program"))
}
