//! Huge pages for DPDK, for the length of one run. ringferry needs none; DPDK is up to twice as fast
//! with them, so it gets them wherever they can be had.
//!
//! A shell puts the number back: it waits until its standard input ends, which happens when the run is over
//! and also when this process is killed. A lock on the number keeps two labs from taking each other's
//! for their own.

use std::fs::File;
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};

use crate::experiment::RowError;
use crate::stop::Stop;

/// The kernel's number of huge pages of the default size.
const NUMBER: &str = "/proc/sys/vm/nr_hugepages";

/// How long to wait for another lab's run, which is over in a few seconds.
const PATIENCE: Duration = Duration::from_secs(60);

/// Reserved huge pages. Dropping it puts the number back. Fields go in this order: the lock last.
#[derive(Debug)]
pub(in crate::experiments) struct HugePages {
    _guard: Guard,
    _lock: File,
}

/// The shell that puts the number back, where it was changed.
#[derive(Debug)]
struct Guard(Option<Child>);

impl HugePages {
    /// Sees to it that `bytes` of huge pages are free; `None` where that cannot be done: no right to
    /// reserve them, or no memory in one piece.
    ///
    /// # Errors
    /// Another lab has not finished in time, or the user wants to stop.
    pub(in crate::experiments) fn reserve(bytes: u64, stop: &Stop) -> Result<Option<HugePages>, RowError> {
        let Ok(number) = File::open(NUMBER) else { return Ok(None) };
        let deadline = Instant::now() + PATIENCE;
        while flock(&number, FlockOperation::NonBlockingLockExclusive).is_err() {
            if stop.requested() {
                return Err(RowError::Stopped);
            }
            if Instant::now() >= deadline {
                return Err(RowError::failed(format!(
                    "another process has locked {NUMBER} for {PATIENCE:?}"
                )));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(raise(bytes).map(|guard| HugePages { _guard: guard, _lock: number }))
    }
}

/// Raises the number until `bytes` are free.
fn raise(bytes: u64) -> Option<Guard> {
    let (free, size) = free()?;
    let missing = bytes.div_ceil(size).saturating_sub(free);
    if missing == 0 {
        return Some(Guard(None));
    }
    let before: u64 = std::fs::read_to_string(NUMBER).ok()?.trim().parse().ok()?;
    // The guard comes first: from here on nothing can be left behind.
    let child = Command::new("sh")
        .args(["-c", "read -r end; echo \"$1\" > \"$2\"", "sh", &before.to_string(), NUMBER])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        // Not in the terminal's foreground group, so that Ctrl-C does not end it early.
        .process_group(0)
        .spawn()
        .ok()?;
    let guard = Guard(Some(child));
    std::fs::write(NUMBER, (before + missing).to_string()).ok()?;
    let (free, size) = self::free()?;
    (free.saturating_mul(size) >= bytes).then_some(guard)
}

impl Drop for Guard {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            drop(child.stdin.take());
            let _ = child.wait();
        }
    }
}

/// Number of free huge pages of the default size, and that size in bytes.
fn free() -> Option<(u64, u64)> {
    let mut text = String::new();
    File::open("/proc/meminfo").ok()?.read_to_string(&mut text).ok()?;
    let field = |name: &str| -> Option<u64> {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_whitespace().next()?.parse().ok()
    };
    let size = field("Hugepagesize:")? * 1024;
    (size > 0).then_some((field("HugePages_Free:")?, size))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_is_put_back() {
        let lock = File::open(NUMBER).unwrap();
        flock(&lock, FlockOperation::LockExclusive).unwrap();
        let number = || std::fs::read_to_string(NUMBER).unwrap();
        let before = number();
        let (free, size) = free().unwrap();
        match raise((free + 4) * size) {
            Some(guard) => {
                assert_ne!(number(), before);
                drop(guard);
            }
            None => eprintln!("no huge pages can be had here"),
        }
        assert_eq!(number(), before);
    }
}
