//! seccomp: which system calls the process may still make.
//!
//! An allow list: what is not on it fails with `EPERM` and is written to the kernel's log (`type=1326` of the audit log, with the number
//! of the call). It does not kill: the list is made from what the program, the C library and Rust's standard library do today, and a call
//! that one of them makes tomorrow, on a path that no test takes, should fail that one operation and not take the network away from every
//! guest. An attacker gains nothing from that, as the call is not made in either case.
//!
//! Pointers cannot be looked at, so which file is opened is Landlock's business (`files`), and which socket is connected to cannot be
//! restricted at all: a process that need not connect must not have [`Calls::CONNECT`], as a root process could otherwise ask the
//! service manager, over its socket, to do anything.

use std::collections::BTreeMap;

use bitflags::bitflags;
use libc::c_long;
use seccompiler::SeccompCmpArgLen::{Dword, Qword};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule, TargetArch,
};

bitflags! {
    /// Groups of system calls beyond those that any program needs (memory, clocks, signals of its own, and reading, writing and waiting on
    /// descriptors that it has).
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Calls: u16 {
        /// Starting threads. Processes can never be started.
        const THREADS = 1;
        /// Opening files; which ones is for Landlock.
        const OPEN = 1 << 1;
        /// Making, replacing and removing files, and changing their owner and mode.
        const EDIT = 1 << 2;
        /// Connecting Unix stream sockets to any path.
        const CONNECT = 1 << 3;
        /// The requests of Xen's devices.
        const XEN = 1 << 4;
        /// Copying from and to the memory of other processes.
        const PEERS = 1 << 5;
        /// Listening on Unix sockets, and giving them owner and permissions; where they may be made is for Landlock.
        const LISTEN = 1 << 6;
        /// What may be asked and set of a tap that is attached: its header and its offloads.
        const TAPS = 1 << 7;
        /// Attaching to taps and making them, and setting up interfaces: state, MTU, Ethernet and IP addresses, bridge.
        const INTERFACES = 1 << 8;
        /// Making AF_XDP sockets, and attaching programs that give them packets.
        const XDP = 1 << 9;
    }
}

/// Calls without conditions that any program may make.
const ALWAYS: &[c_long] = &[
    // Memory.
    libc::SYS_brk,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_msync,
    libc::SYS_mincore,
    libc::SYS_membarrier,
    libc::SYS_memfd_create,
    libc::SYS_ftruncate,
    libc::SYS_fallocate,
    // Descriptors.
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_preadv,
    libc::SYS_pwritev,
    libc::SYS_preadv2,
    libc::SYS_pwritev2,
    libc::SYS_lseek,
    libc::SYS_close,
    libc::SYS_close_range,
    libc::SYS_dup,
    libc::SYS_dup3,
    libc::SYS_fcntl,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    // A socket that comes from another process listens again, under this one's name.
    libc::SYS_listen,
    libc::SYS_fstatfs,
    libc::SYS_pipe2,
    libc::SYS_eventfd2,
    libc::SYS_timerfd_create,
    libc::SYS_timerfd_settime,
    libc::SYS_timerfd_gettime,
    libc::SYS_signalfd4,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_ppoll,
    // Sockets that there are.
    libc::SYS_accept4,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_getsockopt,
    libc::SYS_setsockopt,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
    libc::SYS_shutdown,
    // Threads, waiting, time.
    libc::SYS_futex,
    libc::SYS_set_robust_list,
    libc::SYS_get_robust_list,
    libc::SYS_set_tid_address,
    libc::SYS_rseq,
    libc::SYS_gettid,
    libc::SYS_getpid,
    libc::SYS_getppid,
    libc::SYS_getuid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getegid,
    libc::SYS_getpriority,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_setaffinity,
    libc::SYS_sched_getscheduler,
    libc::SYS_sched_getparam,
    libc::SYS_getcpu,
    libc::SYS_getrusage,
    libc::SYS_times,
    libc::SYS_nanosleep,
    libc::SYS_clock_nanosleep,
    libc::SYS_clock_gettime,
    libc::SYS_clock_getres,
    libc::SYS_gettimeofday,
    libc::SYS_restart_syscall,
    libc::SYS_getrandom,
    libc::SYS_uname,
    libc::SYS_sysinfo,
    libc::SYS_exit,
    libc::SYS_exit_group,
    // Signals of its own.
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_rt_sigpending,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_sigaltstack,
];

/// Calls that x86-64 has beside those of all processors.
#[cfg(target_arch = "x86_64")]
const ALWAYS_HERE: &[c_long] = &[
    libc::SYS_poll,
    libc::SYS_epoll_wait,
    libc::SYS_dup2,
    libc::SYS_time,
    libc::SYS_arch_prctl,
    libc::SYS_accept,
    libc::SYS_select,
    libc::SYS_pselect6,
];
#[cfg(not(target_arch = "x86_64"))]
const ALWAYS_HERE: &[c_long] = &[];

#[cfg(target_arch = "x86_64")]
const OPEN_HERE: &[c_long] = &[libc::SYS_open, libc::SYS_stat, libc::SYS_lstat, libc::SYS_readlink];
#[cfg(not(target_arch = "x86_64"))]
const OPEN_HERE: &[c_long] = &[];

#[cfg(target_arch = "x86_64")]
const EDIT_HERE: &[c_long] = &[libc::SYS_unlink, libc::SYS_rename];
#[cfg(not(target_arch = "x86_64"))]
const EDIT_HERE: &[c_long] = &[];

#[cfg(target_arch = "x86_64")]
const LISTEN_HERE: &[c_long] = &[libc::SYS_chmod];
#[cfg(not(target_arch = "x86_64"))]
const LISTEN_HERE: &[c_long] = &[];

/// Requests of ioctl(2), whose type is another one with each C library, that any program may make: whether a descriptor blocks, what waits in it, and what an interface is like.
const REQUESTS: &[u32] = &[
    libc::FIONBIO as u32,
    libc::FIONREAD as u32,
    libc::TIOCOUTQ as u32,
    libc::TCGETS as u32,
    libc::SIOCGIFINDEX as u32,
    libc::SIOCGIFNAME as u32,
    libc::SIOCGIFFLAGS as u32,
    libc::SIOCGIFMTU as u32,
    libc::SIOCGIFHWADDR as u32,
];

/// Requests about a tap that is attached ([`Calls::TAPS`]).
const TAP_REQUESTS: &[u32] = &[
    libc::TUNGETIFF as u32,
    libc::TUNSETVNETHDRSZ as u32,
    libc::TUNSETVNETLE as u32,
    libc::TUNSETOFFLOAD as u32,
];

/// Requests that make and change interfaces ([`Calls::INTERFACES`]).
const INTERFACE_REQUESTS: &[u32] = &[
    libc::TUNSETIFF as u32,
    libc::TUNSETOWNER as u32,
    libc::TUNSETPERSIST as u32,
    libc::SIOCSIFFLAGS as u32,
    libc::SIOCSIFMTU as u32,
    libc::SIOCSIFHWADDR as u32,
];

/// Types (the second byte) of the requests of gntdev and gntalloc, and of evtchn.
const XEN_REQUESTS: [u8; 2] = [b'G', b'E'];

/// Linux 6.4; not in libc yet.
const PR_GET_AUXV: libc::c_int = 0x4155_5856;

type Rules = BTreeMap<i64, Vec<SeccompRule>>;
type Built<T> = Result<T, seccompiler::BackendError>;

/// Restricts all threads of the process to `calls`. `PR_SET_NO_NEW_PRIVS` must be set.
pub(super) fn restrict(calls: Calls) -> Result<(), String> {
    // glibc starts threads with clone3, whose flags lie behind a pointer. Where there is no such call it takes clone, which can be looked at.
    let no_clone3 = Rules::from([(libc::SYS_clone3, Vec::new())]);
    let missing = program(no_clone3, SeccompAction::Allow, SeccompAction::Errno(libc::ENOSYS as u32));
    let denied = SeccompAction::Errno(libc::EPERM as u32);
    let list = rules(calls).and_then(|rules| program(rules, denied, SeccompAction::Allow));
    // That clone3 is missing is nothing to log.
    for (filter, logged) in [(missing, false), (list, true)] {
        install(&filter.map_err(|error| error.to_string())?, logged)?;
    }
    Ok(())
}

fn program(rules: Rules, others: SeccompAction, these: SeccompAction) -> Built<BpfProgram> {
    let arch = TargetArch::try_from(std::env::consts::ARCH)?;
    SeccompFilter::new(rules, others, these, arch)?.try_into()
}

fn rules(calls: Calls) -> Built<Rules> {
    let mut rules = Rules::new();
    let mut allow = |list: &[c_long]| rules.extend(list.iter().map(|call| (*call, Vec::new())));
    allow(ALWAYS);
    allow(ALWAYS_HERE);
    if calls.contains(Calls::OPEN) {
        allow(&[libc::SYS_openat, libc::SYS_getdents64, libc::SYS_readlinkat, libc::SYS_getcwd]);
        allow(OPEN_HERE);
    }
    if calls.contains(Calls::EDIT) {
        allow(&[libc::SYS_unlinkat, libc::SYS_renameat, libc::SYS_renameat2, libc::SYS_fchmod]);
        allow(&[libc::SYS_fchown, libc::SYS_fsync, libc::SYS_fdatasync]);
        allow(EDIT_HERE);
    }
    if calls.contains(Calls::CONNECT) {
        allow(&[libc::SYS_connect]);
    }
    if calls.contains(Calls::LISTEN) {
        allow(&[libc::SYS_bind, libc::SYS_fchmod, libc::SYS_fchmodat, libc::SYS_fchownat]);
        allow(LISTEN_HERE);
    }
    if calls.contains(Calls::PEERS) {
        allow(&[libc::SYS_process_vm_readv, libc::SYS_process_vm_writev]);
    }

    // Memory that is executable is made by the loader alone, before.
    let data = || one(masked(2, libc::PROT_EXEC as u64, 0)?);
    rules.insert(libc::SYS_mmap, vec![data()?]);
    rules.insert(libc::SYS_mprotect, vec![data()?]);
    // Unix stream sockets; the queries of `netif` are made on one, too. No datagrams, which need no connection to reach a path.
    let flags = (libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK) as u64;
    let stream =
        [equal(0, libc::AF_UNIX as u64)?, masked(1, 0xffff_ffff & !flags, libc::SOCK_STREAM as u64)?];
    let mut sockets = vec![SeccompRule::new(stream.into())?];
    // A pair is connected to nobody.
    rules.insert(libc::SYS_socketpair, sockets.clone());
    if calls.contains(Calls::INTERFACES) {
        // IP addresses and bridges are set by rtnetlink.
        let netlink = [equal(0, libc::AF_NETLINK as u64)?, equal(2, libc::NETLINK_ROUTE as u64)?];
        sockets.push(SeccompRule::new(netlink.into())?);
    }
    if calls.contains(Calls::XDP) {
        for family in [libc::AF_XDP, libc::AF_PACKET] {
            sockets.push(one(equal(0, family as u64)?)?);
        }
        rules.insert(libc::SYS_bpf, Vec::new());
        rules.insert(libc::SYS_bind, Vec::new());
    }
    rules.insert(libc::SYS_socket, sockets);
    // To where the socket is connected.
    let connected = SeccompCondition::new(4, Qword, SeccompCmpOp::Eq, 0)?;
    rules.insert(libc::SYS_sendto, vec![one(connected)?]);
    // Signals to threads of its own: abort(3), and interrupting a blocked worker.
    let own = u64::from(std::process::id());
    rules.insert(libc::SYS_tgkill, vec![one(equal(0, own)?)?]);
    // Which of its descriptors are of the same open file.
    let files = [equal(0, own)?, equal(1, own)?, equal(2, crate::eventfd::KCMP_FILE as u64)?];
    rules.insert(libc::SYS_kcmp, vec![SeccompRule::new(files.into())?]);
    // Names of threads, and how exact their timers are; and rustix reads the auxiliary vector when it first needs the size of a page.
    let names = [libc::PR_SET_NAME, libc::PR_GET_NAME, libc::PR_SET_TIMERSLACK, PR_GET_AUXV]
        .map(|what| one(equal(0, what as u64)?));
    rules.insert(libc::SYS_prctl, names.into_iter().collect::<Built<_>>()?);
    // A thread's own priority.
    let own = [equal(0, libc::PRIO_PROCESS as u64)?, equal(1, 0)?];
    rules.insert(libc::SYS_setpriority, vec![SeccompRule::new(own.into())?]);
    // Limits are read, not set.
    let read = SeccompCondition::new(2, Qword, SeccompCmpOp::Eq, 0)?;
    rules.insert(libc::SYS_prlimit64, vec![one(read)?]);
    // The kernel looks at the lower half alone, and musl's ioctl fills the upper one with the sign.
    let request = |number: &u32| one(masked(1, 0xffff_ffff, u64::from(*number))?);
    let mut requests = REQUESTS.iter().map(request).collect::<Built<Vec<_>>>()?;
    for (group, list) in [(Calls::TAPS, TAP_REQUESTS), (Calls::INTERFACES, INTERFACE_REQUESTS)] {
        if calls.contains(group) {
            for number in list {
                requests.push(request(number)?);
            }
        }
    }
    if calls.contains(Calls::XEN) {
        for kind in XEN_REQUESTS {
            requests.push(one(masked(1, 0xff00, u64::from(kind) << 8)?)?);
        }
    }
    rules.insert(libc::SYS_ioctl, requests);
    if calls.contains(Calls::THREADS) {
        let namespaces = libc::CLONE_NEWNS
            | libc::CLONE_NEWCGROUP
            | libc::CLONE_NEWUTS
            | libc::CLONE_NEWIPC
            | libc::CLONE_NEWUSER
            | libc::CLONE_NEWPID
            | libc::CLONE_NEWNET;
        let thread = libc::CLONE_THREAD as u64;
        rules.insert(libc::SYS_clone, vec![one(masked(0, thread | namespaces as u64, thread)?)?]);
        // Answered by the other filter.
        rules.insert(libc::SYS_clone3, Vec::new());
    }
    Ok(rules)
}

fn one(condition: SeccompCondition) -> Built<SeccompRule> {
    SeccompRule::new(vec![condition])
}

fn equal(argument: u8, value: u64) -> Built<SeccompCondition> {
    SeccompCondition::new(argument, Dword, SeccompCmpOp::Eq, value)
}

fn masked(argument: u8, mask: u64, value: u64) -> Built<SeccompCondition> {
    SeccompCondition::new(argument, Dword, SeccompCmpOp::MaskedEq(mask), value)
}

/// Adds a filter to all threads of the process, with refusals in the kernel's log if they are `logged`. seccompiler's own function has no
/// flag for that.
fn install(program: &BpfProgram, logged: bool) -> Result<(), String> {
    let count = u16::try_from(program.len()).map_err(|_| "the filter is too long".to_owned())?;
    let filter = libc::sock_fprog {
        len: count,
        // seccompiler's instruction is the kernel's, laid out as in C.
        filter: program.as_ptr().cast::<libc::sock_filter>().cast_mut(),
    };
    let log = if logged { libc::SECCOMP_FILTER_FLAG_LOG } else { 0 };
    // Before Linux 5.16 a filter turns speculation past stores off, for programs that run code of others. This one costs packets, and there
    // is no code of others.
    let flags = libc::SECCOMP_FILTER_FLAG_TSYNC | libc::SECCOMP_FILTER_FLAG_SPEC_ALLOW | log;
    // SAFETY: the kernel reads `len` instructions from the program, which lives until the call returns.
    let result = unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::c_ulong::from(libc::SECCOMP_SET_MODE_FILTER),
            flags,
            std::ptr::from_ref(&filter),
        )
    };
    match result {
        0 => Ok(()),
        -1 => Err(format!("seccomp: {}", std::io::Error::last_os_error())),
        thread => Err(format!("thread {thread} has a filter of its own already")),
    }
}
