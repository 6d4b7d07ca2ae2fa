//! The sandbox from inside. There is no way back out of it, so the program starts itself again in the role of a process that enters it,
//! tries everything, and says what it could do; it does not use the threaded test harness.

mod common;

use std::fs;
use std::io::{self, BufRead, BufReader, ErrorKind, Write};
use std::net::{TcpListener, UdpSocket};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use common::{role, run};
use libc::c_long;
use ringferry_sys::eventfd::EventFd;
use ringferry_sys::interrupt::Target;
use ringferry_sys::sandbox::{Access, Calls, CapabilitySet, Part, Sandbox};

fn main() {
    let mut words = std::env::args().skip(1);
    match words.next().as_deref() {
        Some("role:inside") => inside(Path::new(&words.next().unwrap())),
        Some("role:late") => late(),
        Some("role:open") => open(),
        // Test runners list tests first; there are none to list.
        Some("--list") => {}
        _ => {
            run("what is not allowed is refused, and the rest works", everything_is_tried);
            run("threads that exist already are reported", threads_that_exist_are_reported);
        }
    }
}

/// The folder of the process in the sandbox, with a file and a socket, and a folder beside it with the same.
fn everything_is_tried() {
    let folder = tempfile::tempdir().unwrap();
    let _sockets = ["inside", "outside"].map(|name| {
        let folder = folder.path().join(name);
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join("file"), "text").unwrap();
        UnixListener::bind(folder.join("socket")).unwrap()
    });
    let mut child =
        role("role:inside").arg(folder.path()).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut said = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    assert_eq!(said.next().as_deref(), Some("inside"), "see above");
    let status = |file: &str| fs::read_to_string(format!("/proc/{}/{file}", child.id())).unwrap();
    for thread in fs::read_dir(format!("/proc/{}/task", child.id())).unwrap() {
        let status = status(&format!("task/{}/status", thread.unwrap().file_name().display()));
        let has = |line: &str| assert!(status.lines().any(|have| have == line), "{line}: {status}");
        has("NoNewPrivs:\t1");
        has("Seccomp:\t2");
        for set in ["CapInh", "CapPrm", "CapEff", "CapAmb"] {
            has(&format!("{set}:\t0000000000000000"));
        }
    }
    // Where dumps are off, another process of the same user may not look into it, unless it has the capability to look into any.
    let looks = |process: u32| {
        std::thread::scope(|scope| scope.spawn(|| without_ptrace(process)).join().unwrap())
            .map_err(|error| error.kind())
    };
    let mut open = role("role:open").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    assert_eq!(BufReader::new(open.stdout.take().unwrap()).lines().next().unwrap().unwrap(), "open");
    assert_eq!(looks(open.id()), Ok(()), "a process outside the sandbox can be looked into");
    drop(open.stdin.take());
    open.wait().unwrap();
    assert_eq!(looks(child.id()), Err(ErrorKind::PermissionDenied));
    child.stdin.take().unwrap().write_all(b"go on\n").unwrap();
    let rest: Vec<String> = said.collect();
    assert!(child.wait().unwrap().success(), "{rest:#?}");
    assert_eq!(rest.last().map(String::as_str), Some("done"), "{rest:#?}");
}

/// Looks at a descriptor of another process, without the capability that root has for it. The thread that called this is good for nothing else any more.
fn without_ptrace(process: u32) -> io::Result<()> {
    let mut sets = rustix::thread::capabilities(None)?;
    sets.effective.remove(CapabilitySet::SYS_PTRACE);
    sets.permitted.remove(CapabilitySet::SYS_PTRACE);
    rustix::thread::set_capabilities(None, sets)?;
    fs::read_link(format!("/proc/{process}/fd/0")).map(drop)
}

/// A process that has no more capabilities than one in the sandbox, and nothing else of it, until its input ends.
fn open() {
    let none = CapabilitySet::empty();
    let sets = rustix::thread::CapabilitySets { effective: none, permitted: none, inheritable: none };
    rustix::thread::set_capabilities(None, sets).unwrap();
    println!("open");
    io::stdin().read_line(&mut String::new()).unwrap();
}

fn inside(folder: &Path) {
    let [mine, other] = ["inside", "outside"].map(|name| folder.join(name));
    let before = UnixStream::connect(mine.join("socket")).unwrap();
    let sandbox = Sandbox {
        files: vec![
            (mine.clone(), Access::all()),
            (PathBuf::from("/proc/self"), Access::READ),
            (PathBuf::from("/there/is/no/such"), Access::READ),
        ],
        capabilities: CapabilitySet::empty(),
        calls: Calls::THREADS | Calls::OPEN | Calls::EDIT,
    };
    let missing = sandbox.enter();
    missing.iter().for_each(|missing| println!("{missing}"));
    // Where the kernel has no Landlock the others hold, and files are not looked at.
    assert!(missing.iter().all(|missing| missing.part == Part::Landlock), "{missing:?}");
    let landlock = missing.is_empty();
    let (tell, told) = std::sync::mpsc::channel::<()>();
    // A thread that is made later is in it, too.
    let thread = std::thread::Builder::new().name("later".to_owned()).spawn(move || {
        told.recv().unwrap();
        attempts(&mine, &other, landlock);
    });
    println!("inside");
    io::stdin().read_line(&mut String::new()).unwrap();
    let [mine, other] = ["inside", "outside"].map(|name| folder.join(name));
    attempts(&mine, &other, landlock);
    tell.send(()).unwrap();
    thread.unwrap().join().unwrap();
    // A panic unwinds and says where it was.
    assert!(std::thread::spawn(|| panic!("on purpose")).join().is_err());
    drop(before);
    println!("done");
}

/// What works, and what does not.
#[track_caller]
fn attempts(mine: &Path, other: &Path, landlock: bool) {
    let denied = |what: &str, result: io::Result<()>| {
        let kind = result.map_err(|error| error.kind());
        assert_eq!(kind, Err(ErrorKind::PermissionDenied), "{what}");
    };
    // Files.
    fs::write(mine.join("new"), "text").unwrap();
    fs::rename(mine.join("new"), mine.join("file")).unwrap();
    assert_eq!(fs::read_to_string(mine.join("file")).unwrap(), "text");
    // procfs may have forgotten what the rule was made for, and must not.
    assert!(!fs::read("/proc/thread-self/stat").unwrap().is_empty());
    fs::read_link("/proc/self/fd/0").unwrap();
    if landlock {
        denied("reading", fs::read("/etc/passwd").map(drop));
        denied("reading of others", fs::read("/proc/1/stat").map(drop));
        denied("reading by a detour", fs::read("/proc/self/root/etc/passwd").map(drop));
        denied("reading beside", fs::read(other.join("file")).map(drop));
        denied("listing", fs::read_dir("/").map(drop));
        denied("writing", fs::write(other.join("file"), "x"));
        denied("making", fs::write(other.join("new"), "x"));
        denied("removing", fs::remove_file(other.join("file")));
        denied("a device", fs::OpenOptions::new().write(true).open("/dev/null").map(drop));
    }
    // Sockets.
    denied("UDP", UdpSocket::bind("127.0.0.1:0").map(drop));
    denied("TCP", TcpListener::bind("127.0.0.1:0").map(drop));
    denied("datagrams", UnixDatagram::unbound().map(drop));
    denied("connecting", UnixStream::connect(mine.join("socket")).map(drop));
    denied("listening", UnixListener::bind(mine.join("another")).map(drop));
    // Programs and processes.
    denied("a process", Command::new("/bin/true").spawn().map(drop));
    denied("a program", Err(Command::new("/bin/true").exec()));
    // What there is no function for. Where a call has not been allowed its arguments do not matter.
    let call = |what: &str, number: c_long, arguments: [c_long; 4]| {
        let [a, b, c, d] = arguments;
        // SAFETY: the filter refuses all of these; what they would do if it did not (fail for their arguments, or change this process,
        // which is a test's) touches no memory of ours.
        let result = unsafe { libc::syscall(number, a, b, c, d) };
        let error = io::Error::last_os_error().raw_os_error();
        assert_eq!((result, error), (-1, Some(libc::EPERM)), "{what}");
    };
    let own = c_long::from(std::process::id());
    call("files of others", libc::SYS_kcmp, [own, c_long::from(std::os::unix::process::parent_id()), 0, 0]);
    call("memory of one's own", libc::SYS_kcmp, [own, own, 1, 0]);
    let (one, other) = (EventFd::new().unwrap(), EventFd::new().unwrap());
    let compared = [&one, &other].map(|event| {
        // SAFETY: a comparison of descriptors by their numbers.
        unsafe {
            libc::syscall(libc::SYS_kcmp, own, own, 0, one.as_fd().as_raw_fd(), event.as_fd().as_raw_fd())
        }
    });
    // A kernel without this call has none to allow.
    let has_none = io::Error::last_os_error().raw_os_error() == Some(libc::ENOSYS);
    assert!(compared[0] == 0 && compared[1] > 0 || has_none, "{compared:?}");
    for (what, number) in [
        ("ptrace", libc::SYS_ptrace),
        ("mount", libc::SYS_mount),
        ("pivot_root", libc::SYS_pivot_root),
        ("unshare", libc::SYS_unshare),
        ("setns", libc::SYS_setns),
        ("bpf", libc::SYS_bpf),
        ("io_uring_setup", libc::SYS_io_uring_setup),
        ("userfaultfd", libc::SYS_userfaultfd),
        ("perf_event_open", libc::SYS_perf_event_open),
        ("keyctl", libc::SYS_keyctl),
        ("init_module", libc::SYS_init_module),
        ("kexec_load", libc::SYS_kexec_load),
        ("process_vm_readv", libc::SYS_process_vm_readv),
        ("pidfd_getfd", libc::SYS_pidfd_getfd),
        ("open_by_handle_at", libc::SYS_open_by_handle_at),
        ("personality", libc::SYS_personality),
        ("setuid", libc::SYS_setuid),
        ("capset", libc::SYS_capset),
        ("socketpair", libc::SYS_socketpair),
        ("mknodat", libc::SYS_mknodat),
        ("symlinkat", libc::SYS_symlinkat),
        ("linkat", libc::SYS_linkat),
        ("a call of tomorrow", 4000),
    ] {
        call(what, number, [-1, -1, -1, -1]);
    }
    call("a signal to another process", libc::SYS_kill, [1, 0, 0, 0]);
    call("a signal to a thread of another", libc::SYS_tgkill, [1, 1, 0, 0]);
    call("a namespace", libc::SYS_clone, [c_long::from(libc::CLONE_NEWUSER), 0, 0, 0]);
    call("dumps", libc::SYS_prctl, [c_long::from(libc::PR_SET_DUMPABLE), 1, 0, 0]);
    call("typing into a terminal", libc::SYS_ioctl, [0, libc::TIOCSTI as c_long, 0, 0]);
    call("making a tap", libc::SYS_ioctl, [0, libc::TUNSETIFF as c_long, 0, 0]);
    call("executable memory", libc::SYS_mmap, [0, 4096, c_long::from(libc::PROT_EXEC), 0]);
    call("making memory executable", libc::SYS_mprotect, [0, 0, c_long::from(libc::PROT_EXEC), 0]);
    let limits = [1_u64; 2];
    call("limits", libc::SYS_prlimit64, [own, 0, limits.as_ptr() as c_long, 0]);
    // What the switch does all the time works.
    Target::current().interrupt();
    let processors = ringferry_sys::cpu::allowed().unwrap();
    assert!(!processors.is_empty());
    let memory = ringferry_memory::SharedMem::new("test", 1 << 20).unwrap();
    drop(memory);
    assert_eq!(ringferry_sys::netif::index("no-such-name").unwrap(), None);
}

/// A thread that is there before is not reached by capabilities and Landlock, and that is said.
fn threads_that_exist_are_reported() {
    let output = role("role:late").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

fn late() {
    let (tell, told) = std::sync::mpsc::channel::<()>();
    let thread = std::thread::spawn(move || {
        told.recv().unwrap();
        // The filter of system calls has reached it.
        assert_eq!(UnixDatagram::unbound().unwrap_err().kind(), ErrorKind::PermissionDenied);
    });
    let sandbox = Sandbox { files: Vec::new(), capabilities: CapabilitySet::empty(), calls: Calls::THREADS };
    let missing = sandbox.enter();
    assert!(missing.iter().any(|missing| missing.part == Part::Threads), "{missing:?}");
    tell.send(()).unwrap();
    thread.join().unwrap();
}
