//! The limit of open files (`RLIMIT_NOFILE`), raised once when the process starts, and the kernel's table of them.

use std::io;
use std::os::fd::AsFd;

use rustix::io::fcntl_dupfd_cloexec;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises the limit of open files to `wanted`, or as far as the hard limit allows, and returns the limit in force.
/// Never lowers it. A vhost-user port can hold some 50 descriptors (memory regions, and two per queue), and the
/// usual limit is 1024.
///
/// # Errors
/// None that a caller can cause.
pub fn raise_open_files(wanted: u64) -> io::Result<u64> {
    let now = getrlimit(Resource::Nofile);
    // `None` stands for no limit.
    let (Some(current), hard) = (now.current, now.maximum) else { return Ok(u64::MAX) };
    let new = wanted.min(hard.unwrap_or(u64::MAX));
    if new <= current {
        return Ok(current);
    }
    setrlimit(Resource::Nofile, Rlimit { current: Some(new), maximum: hard })?;
    Ok(new)
}

/// Has the kernel's table of this process's open files hold `files` of them from now on, for eight bytes each. It doubles by itself when it is full, but in a
/// process with threads whoever opens the file for which there was no place then waits for a grace period of RCU: 8 ms, seen where a switch with 64 queue pairs
/// was replaced, for which all packets waited. So this is to be called before there are threads. `any` is an open file.
///
/// # Errors
/// There is no memory for it, or `files` is above the [limit](raise_open_files).
pub fn make_room(any: impl AsFd, files: u64) -> io::Result<()> {
    let last = i32::try_from(files.saturating_sub(1)).unwrap_or(i32::MAX);
    Ok(fcntl_dupfd_cloexec(any, last).map(drop)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_is_made_for_files_that_are_not_open_yet() {
        let room = || {
            let status = std::fs::read_to_string("/proc/self/status").unwrap();
            let size = status.lines().find_map(|line| line.strip_prefix("FDSize:")).unwrap();
            size.trim().parse::<u64>().unwrap()
        };
        let limit = raise_open_files(0).unwrap();
        let wanted = limit.min(4 * room());
        make_room(io::stderr(), wanted).unwrap();
        assert!(room() >= wanted, "{} of {wanted}", room());
        assert!(make_room(io::stderr(), u64::MAX).is_err());
    }

    #[test]
    fn the_limit_rises_to_the_hard_one_and_never_falls() {
        let before = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        assert_eq!(raise_open_files(0).unwrap(), before);
        let hard = getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX);
        assert_eq!(raise_open_files(u64::MAX).unwrap(), hard);
        assert_eq!(getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX), hard);
        assert_eq!(raise_open_files(1).unwrap(), hard);
    }
}
