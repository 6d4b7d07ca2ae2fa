//! A sandbox that a process puts itself into once it has opened what it needs.
//!
//! A program describes in [`Sandbox`] what it still has to do and calls [`Sandbox::enter`] once, from its main thread, before it starts
//! others: threads inherit the sandbox, and nothing leads out of it. There are five parts, in this order:
//!
//! | part | what it takes away |
//! |---|---|
//! | [`Part::NoNewPrivileges`] | privileges by executing a set-user-ID program; the next two need it |
//! | [`Part::Capabilities`] | all capabilities but those that are kept |
//! | [`Part::Landlock`] | opening, making and removing files outside the given places; TCP; signals and abstract sockets of others |
//! | [`Part::Undumpable`] | core dumps, ptrace and `/proc/PID/mem` by processes of the same user |
//! | [`Part::Seccomp`] | all system calls but those of a list ([`Calls`]) |
//!
//! Each part degrades alone: what the kernel lacks is returned as [`Missing`], and the others hold. A refused system call fails with
//! `EPERM` and is logged by the kernel (see [`Calls`] for the reason).

mod calls;
mod files;

use std::fmt;
use std::path::PathBuf;

pub use calls::Calls;
pub use files::Access;
pub use rustix::thread::CapabilitySet;

/// What a process still has to do.
#[derive(Clone, Debug)]
pub struct Sandbox {
    /// Places that it may open: a file, or a directory with all below it. Those that do not exist are left out.
    pub files: Vec<(PathBuf, Access)>,
    /// Capabilities that it keeps if it has them.
    pub capabilities: CapabilitySet,
    /// System calls that it may make.
    pub calls: Calls,
}

/// A part of the sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// `PR_SET_NO_NEW_PRIVS`.
    NoNewPrivileges,
    /// capset(2) and the bounding set.
    Capabilities,
    /// landlock(7).
    Landlock,
    /// `PR_SET_DUMPABLE` 0.
    Undumpable,
    /// seccomp(2).
    Seccomp,
    /// Threads that existed already, which only [`Part::Seccomp`] reaches.
    Threads,
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Part::NoNewPrivileges => "no new privileges",
            Part::Capabilities => "dropped capabilities",
            Part::Landlock => "Landlock",
            Part::Undumpable => "no core dumps",
            Part::Seccomp => "the filter of system calls",
            Part::Threads => "all threads",
        })
    }
}

/// A part of the sandbox that could not be had, as a whole or in part.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the sandbox lacks {part}: {why}")]
pub struct Missing {
    /// The part.
    pub part: Part,
    /// The reason, in words.
    pub why: String,
}

impl Sandbox {
    /// Puts the process into the sandbox and returns what could not be had. The calling thread should be the only one: others keep
    /// their capabilities and files, and that is returned as missing. There is no way back.
    #[must_use]
    pub fn enter(&self) -> Vec<Missing> {
        let mut missing = Vec::new();
        let mut part = |part, result: Result<(), String>| {
            if let Err(why) = result {
                missing.push(Missing { part, why });
            }
        };
        part(Part::Threads, alone());
        part(Part::NoNewPrivileges, rustix::thread::set_no_new_privs(true).map_err(|e| e.to_string()));
        part(Part::Capabilities, keep_capabilities(self.capabilities));
        part(Part::Landlock, files::restrict(&self.files));
        part(Part::Undumpable, undumpable());
        part(Part::Seccomp, calls::restrict(self.calls));
        missing
    }
}

/// Takes all rights from the calling thread but to use `files` as anybody may: user root becomes nobody, and no capability is left. System calls are
/// not filtered: that is the process's business, and a thread with a filter of its own would keep it from [entering](Sandbox::enter) its own.
/// Returns what could not be had.
#[must_use]
pub(crate) fn confine_thread(files: &[(PathBuf, Access)]) -> Vec<Missing> {
    let mut missing = Vec::new();
    let mut part = |part, result: Result<(), String>| {
        missing.extend(result.err().map(|why| Missing { part, why }));
    };
    part(Part::NoNewPrivileges, rustix::thread::set_no_new_privs(true).map_err(|e| e.to_string()));
    if rustix::process::geteuid().is_root() {
        let nobody = rustix::process::Uid::from_raw(NOBODY);
        part(Part::Capabilities, rustix::thread::set_thread_uid(nobody).map_err(|e| e.to_string()));
    }
    part(Part::Capabilities, keep_capabilities(CapabilitySet::empty()));
    part(Part::Landlock, files::restrict(files));
    missing
}

/// The user that has no files, by convention.
const NOBODY: u32 = 65534;

/// Looks whether this is the only thread.
fn alone() -> Result<(), String> {
    let threads = std::fs::read_dir("/proc/self/task").map_err(|e| format!("/proc/self/task: {e}"))?.count();
    match threads.saturating_sub(1) {
        0 => Ok(()),
        others => Err(format!("{others} others exist already, of which only system calls are filtered")),
    }
}

/// Drops all capabilities but `kept`, from all sets of the calling thread.
fn keep_capabilities(kept: CapabilitySet) -> Result<(), String> {
    let error = |e: rustix::io::Errno| e.to_string();
    let had = rustix::thread::capabilities(None).map_err(error)?;
    if had.effective.contains(CapabilitySet::SETPCAP) {
        for capability in CapabilitySet::all().difference(kept) {
            // The kernel may know fewer.
            let _ = rustix::thread::remove_capability_from_bounding_set(capability);
        }
    }
    // The ambient set follows, as nothing can be in it that is not inheritable.
    let left = had.permitted & kept;
    let sets = rustix::thread::CapabilitySets {
        effective: left,
        permitted: left,
        inheritable: CapabilitySet::empty(),
    };
    rustix::thread::set_capabilities(None, sets).map_err(error)
}

fn undumpable() -> Result<(), String> {
    use rustix::process::DumpableBehavior::NotDumpable;
    rustix::process::set_dumpable_behavior(NotDumpable).map_err(|e| e.to_string())
}
