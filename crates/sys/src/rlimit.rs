//! The limit of open files (`RLIMIT_NOFILE`), raised once when the process starts.

use std::io;

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

#[cfg(test)]
mod tests {
    use super::*;

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
