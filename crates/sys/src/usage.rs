//! CPU time of a thread of this process, and idle time of processors.
//!
//! A thread makes its [`ThreadClock`] when it starts; any other thread of the process may read the copy, also after
//! the thread has ended.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::time::Duration;

/// The CPU-time clock of a thread, which any thread of the process can read.
#[derive(Clone, Copy, Debug)]
pub struct ThreadClock(libc::clockid_t);

impl ThreadClock {
    /// Returns the clock of the calling thread.
    ///
    /// # Errors
    /// None that a caller can cause.
    pub fn current() -> io::Result<ThreadClock> {
        let mut clock = 0;
        // SAFETY: writes the number of the calling thread's clock, which exists.
        match unsafe { libc::pthread_getcpuclockid(libc::pthread_self(), &mut clock) } {
            0 => Ok(ThreadClock(clock)),
            error => Err(io::Error::from_raw_os_error(error)),
        }
    }

    /// Returns the CPU time that the thread has used so far, or `None` if it has ended.
    #[must_use]
    pub fn used(self) -> Option<Duration> {
        read_clock(self.0)
    }
}

/// The time for which a thread could have run and had no processor, which any thread of the process can read.
#[derive(Debug)]
pub struct RunDelay(File);

impl RunDelay {
    /// Opens that of the calling thread. Later nothing is opened, so it can be read in a sandbox, too.
    ///
    /// # Errors
    /// The kernel keeps no such account, or `/proc` is not mounted.
    pub fn of_this_thread() -> io::Result<RunDelay> {
        File::open("/proc/thread-self/schedstat").map(RunDelay)
    }

    /// Returns the time so far: in the queue of a processor, or held back by a limit on CPU time. `None` if the thread has ended.
    #[must_use]
    pub fn so_far(&self) -> Option<Duration> {
        // Three numbers of at most 20 digits: time on a processor, time that waited for one, and slices.
        let mut text = [0; 64];
        let len = self.0.read_at(&mut text, 0).ok()?;
        let delay = std::str::from_utf8(&text[..len]).ok()?.split_ascii_whitespace().nth(1)?;
        Some(Duration::from_nanos(delay.parse().ok()?))
    }
}

/// Reads a CPU-time clock; `None` if its thread or process has ended.
pub(crate) fn read_clock(clock: libc::clockid_t) -> Option<Duration> {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: it writes one timespec, to ours; a clock that is gone is an error.
    let result = unsafe { libc::clock_gettime(clock, &mut time) };
    // The time is never negative, and its nanoseconds are less than a second.
    (result == 0).then(|| Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32))
}

/// Returns the sum of the times that `cpus` have been idle since the machine was started, with a resolution of about
/// 10 ms each. Processors that are offline are not counted.
///
/// # Errors
/// `/proc/stat` is missing or cannot be parsed (`InvalidData`).
pub fn idle_time(cpus: &[usize]) -> io::Result<Duration> {
    let tick = rustix::param::clock_ticks_per_second().max(1);
    let ticks =
        idle_ticks(&std::fs::read_to_string("/proc/stat")?, cpus).ok_or(io::ErrorKind::InvalidData)?;
    Ok(Duration::from_millis(ticks * 1000 / tick))
}

/// Sums up idle and iowait ticks (proc_stat(5)) of `cpus`.
fn idle_ticks(stat: &str, cpus: &[usize]) -> Option<u64> {
    let mut sum = 0;
    for line in stat.lines() {
        let mut words = line.split_ascii_whitespace();
        let Some(cpu) = words.next().and_then(|name| name.strip_prefix("cpu")).and_then(|n| n.parse().ok())
        else {
            continue;
        };
        if cpus.contains(&cpu) {
            let mut idle = words.skip(3).map(|word| word.parse::<u64>().ok());
            sum += idle.next()?? + idle.next()??;
        }
    }
    Some(sum)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::Instant;

    use super::*;

    #[test]
    fn a_thread_that_works_uses_time_and_one_that_waits_none() {
        let (sender, clocks) = channel();
        let (done, wait) = channel::<()>();
        let waiting = std::thread::spawn(move || {
            sender.send(ThreadClock::current().unwrap()).unwrap();
            let _ = wait.recv();
        });
        let other = clocks.recv().unwrap();
        let mine = ThreadClock::current().unwrap();
        // The wall clock begins first, so that it holds all the work; the two clocks differ in rate by far less than half.
        let start = Instant::now();
        let (other_before, before) = (other.used().unwrap(), mine.used().unwrap());
        while mine.used().unwrap() < before + Duration::from_millis(20) {}
        assert!(start.elapsed() >= Duration::from_millis(10), "a thread uses one processor at most");
        assert!(other.used().unwrap() - other_before < Duration::from_millis(10));
        drop(done);
        waiting.join().unwrap();
    }

    #[test]
    fn threads_that_share_a_processor_are_delayed() {
        let cpu = crate::cpu::allowed().unwrap()[0];
        let until = Instant::now() + Duration::from_millis(200);
        let spin = || {
            crate::cpu::pin_current_thread(cpu).unwrap();
            let delay = RunDelay::of_this_thread().unwrap();
            while Instant::now() < until {}
            delay.so_far().unwrap()
        };
        let delays = std::thread::scope(|scope| {
            [scope.spawn(spin), scope.spawn(spin)].map(|thread| thread.join().unwrap())
        });
        assert!(delays.iter().sum::<Duration>() >= Duration::from_millis(50), "{delays:?}");
    }

    #[test]
    fn idle_time_is_that_of_the_processors_asked_for() {
        let stat = "cpu  1 2 3 999 5 6\ncpu0 1 0 1 100 20 0 0\ncpu1 0 0 0 7 1\ncpu10 0 0 0 5000 0\nintr 1 2 3 4 5 6\n";
        assert_eq!(idle_ticks(stat, &[0, 1]), Some(128));
        assert_eq!(idle_ticks(stat, &[10, 11]), Some(5000));
        assert_eq!(idle_ticks("cpu0 1 2 3 4\n", &[0]), None, "cut off");
        let cpus = crate::cpu::allowed().unwrap();
        let first = idle_time(&cpus).unwrap();
        assert!(idle_time(&cpus).unwrap() >= first);
    }
}
