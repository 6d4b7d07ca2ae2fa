//! A watchdog for threads that call what a peer can block.
//!
//! A peer that shares the open file of an eventfd can make it blocking again and fill its counter, and `write` has no flag that would not wait
//! then ([`EventFd::signal`](crate::eventfd::EventFd::signal)). So such a call is bounded from outside: a [`Watchdog`] looks every [`INTERVAL`]
//! at each thread that it watches, and [interrupts](crate::interrupt) one that is blocked in such a call, which then fails with
//! `Interrupted`. That error is proof of a hostile peer, as no honest one lets the call block.
//!
//! ```text
//!   watched thread        calls += 1 (odd) ── write(2) ── calls += 1 (even)
//!   watchdog              calls odd, thread asleep in the kernel, calls unchanged: tgkill
//! ```
//!
//! Only a thread that the kernel has put to sleep is interrupted, so one that lost its processor in the middle of a call is
//! left alone, and a peer cannot stay below the interval for long: it is caught as soon as one look coincides with its block. Where
//! `/proc` is missing, a call is interrupted that is the same in more than ten looks in succession.
//!
//! After ten looks in which nobody made such a call the watchdog dozes, and the next call wakes it: an idle program does not wake up.
//!
//! **Holes.** A peer that shares a memory file can put to sleep whoever touches a page of it, by punching a hole into the file (fallocate(2)): the
//! page fault waits until all of the hole is punched, uses no processor time, and cannot be interrupted. A thread that has been slow may therefore
//! have its own sleeps looked at for a while ([`HoleWaits`]): the watchdog then reads in each look what the thread waits for in the kernel
//! (`/proc/thread-self/wchan`), and counts those looks in which that is a hole. Waits for locks, for memory, for swap and for a processor have other
//! names there, so no one is blamed for them. On a kernel without these names nothing is counted.
//!
//! A program makes one `Watchdog` for the threads that it starts; each of those calls [`Watcher::watch_this_thread`] once. Dropping the
//! `Watchdog` ends its thread, and the others are watched no more.

use std::cell::OnceCell;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::thread::{JoinHandle, Thread};
use std::time::Duration;

use crate::interrupt::Target;

/// Time between two looks, and so the longest that one call blocks, where `/proc` can be read. A look takes some microseconds, and others wait for
/// as long as a call blocks: at 50 ms a peer that did it once a minute was the slowest hundredth of their requests.
pub const INTERVAL: Duration = Duration::from_millis(5);

/// Looks in succession that say the same, after which the watchdog is sure: that nobody makes calls any more, and without `/proc` that a
/// call is blocked, and its thread not merely without a processor.
const LOOKS: u32 = 10;

/// What a thread waits for, as the kernel names it, that has touched a page of tmpfs or of a memfd in a range that is being punched. Linux has waited there
/// since 3.16, from 6.9 on in a function of its own, which may be inlined.
const HOLES: [&[u8]; 2] = [b"shmem_fault", b"shmem_falloc_wait"];

/// How many looks of one kind are counted in a lap, which is five minutes of them.
const LOOKS_BITS: u32 = 16;
const LOOKS_MASK: u32 = (1 << LOOKS_BITS) - 1;

/// What the watchdog knows of a thread.
#[derive(Debug)]
struct Watched {
    target: Target,
    /// Calls begun and ended: odd within one. Only the thread itself writes it.
    calls: AtomicU64,
    /// `calls` at the last look, and how many looks in succession have found the same, for where `stat` is missing.
    before: AtomicU64,
    same: AtomicU32,
    /// `/proc/thread-self/stat`, opened by the thread.
    stat: Option<File>,
    /// `/proc/thread-self/wchan`, likewise.
    waits: Option<File>,
    /// True while the thread has its sleeps looked at.
    looked_at: AtomicBool,
    /// The number of the thread's lap in the upper half, and the looks in that lap which found it blocked and waiting for a hole, of 16 bits each.
    lap: AtomicU64,
    /// Who looks.
    shared: Arc<Shared>,
}

/// What looks at a thread have found in one lap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Looks {
    /// Looks in which it waited for a hole to be punched.
    pub holes: u32,
    /// Looks in which the kernel had put it to sleep for something that cannot be interrupted: a page, a lock of a memory map, a disk. To wait for
    /// another thread or for a processor is not among it.
    pub blocked: u32,
}

/// The calling thread's waits for holes that a peer punches into memory it touches; see the [module](self). The thread asks for one after
/// [`Watcher::watch_this_thread`].
///
/// ```text
///   begin ─► lap ─► lap ─► ... ─► end         each lap returns what was counted since the one before
/// ```
#[derive(Clone, Debug)]
pub struct HoleWaits(Arc<Watched>);

impl HoleWaits {
    /// Those of the calling thread; `None` if it is not watched, or if what it waits for cannot be read.
    pub fn of_this_thread() -> Option<HoleWaits> {
        THIS.with(|this| this.get().filter(|this| this.waits.is_some()).cloned().map(HoleWaits))
    }

    /// Has the watchdog look, [`INTERVAL`] apart, until [`end`](Self::end).
    pub fn begin(&self) {
        self.lap();
        self.0.looked_at.store(true, Ordering::Relaxed);
        // With the fence in `Shared::doze`: one of both sees what the other wrote.
        fence(Ordering::SeqCst);
        if self.0.shared.dozing.load(Ordering::Relaxed) {
            self.0.shared.rouse();
        }
    }

    /// Ends a lap, and returns what looks in it have found. Only the thread itself may call this.
    #[inline]
    pub fn lap(&self) -> Looks {
        let next = (self.0.lap.load(Ordering::Relaxed) >> 32).wrapping_add(1) << 32;
        let lap = self.0.lap.swap(next, Ordering::Relaxed);
        Looks { holes: lap as u32 & LOOKS_MASK, blocked: lap as u32 >> LOOKS_BITS }
    }

    /// Has the watchdog look no more.
    pub fn end(&self) {
        self.0.looked_at.store(false, Ordering::Relaxed);
    }

    /// Returns true if the thread waits for a hole now. Any thread may ask.
    pub fn is_waiting(&self) -> bool {
        self.0.waits_for_hole()
    }
}

thread_local! {
    static THIS: OnceCell<Arc<Watched>> = const { OnceCell::new() };
}

/// Makes a call that a peer can block. If the calling thread is watched the call ends within [`INTERVAL`]; otherwise this
/// function just makes it.
#[inline]
pub fn guarded<T>(call: impl FnOnce() -> T) -> T {
    THIS.with(|this| match this.get() {
        None => call(),
        Some(this) => {
            let calls = this.calls.load(Ordering::Relaxed);
            this.calls.store(calls.wrapping_add(1), Ordering::Release);
            // With the fence in `Shared::doze`: one of both sees what the other wrote.
            fence(Ordering::SeqCst);
            if this.shared.dozing.load(Ordering::Relaxed) {
                this.shared.rouse();
            }
            let result = call();
            this.calls.store(calls.wrapping_add(2), Ordering::Release);
            result
        }
    })
}

#[derive(Debug, Default)]
struct Shared {
    watched: Mutex<Vec<Weak<Watched>>>,
    stop: AtomicBool,
    /// The watchdog waits to be roused.
    dozing: AtomicBool,
    thread: OnceLock<Thread>,
}

/// The watchdog thread; see the [module](self).
#[derive(Debug)]
pub struct Watchdog {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// Has threads watched by a [`Watchdog`].
#[derive(Clone, Debug)]
pub struct Watcher(Arc<Shared>);

impl Watchdog {
    /// Starts a watchdog on a thread of this name.
    ///
    /// # Errors
    /// The system has no thread left.
    pub fn start(name: &str) -> io::Result<Watchdog> {
        let shared = Arc::new(Shared::default());
        let thread = {
            let shared = Arc::clone(&shared);
            std::thread::Builder::new().name(name.to_owned()).spawn(move || shared.run())?
        };
        shared.thread.get_or_init(|| thread.thread().clone());
        Ok(Watchdog { shared, thread: Some(thread) })
    }

    /// For the threads that are to be watched.
    pub fn watcher(&self) -> Watcher {
        Watcher(Arc::clone(&self.shared))
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.shared.rouse();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Watcher {
    /// Watches the calling thread until it ends. Later calls on the same thread, by whichever watchdog, do nothing.
    pub fn watch_this_thread(&self) {
        THIS.with(|this| {
            let new = this.get().is_none();
            let this = this.get_or_init(|| {
                let file = |name| File::open(Path::new("/proc/thread-self").join(name)).ok();
                Arc::new(Watched::of_this_thread(file("stat"), file("wchan"), Arc::clone(&self.0)))
            });
            if new {
                self.0.watched.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::downgrade(this));
            }
        });
    }
}

impl Shared {
    fn run(&self) {
        let (mut before, mut quiet) = (None, 0);
        while !self.stop.load(Ordering::Relaxed) {
            let calls = self.look();
            quiet = if calls.is_some() && calls == before { quiet + 1 } else { 0 };
            before = calls;
            if quiet >= LOOKS && self.doze(calls) {
                quiet = 0;
                continue;
            }
            std::thread::park_timeout(INTERVAL);
        }
    }

    /// Looks at every thread. The sum of the calls they have made, or `None` if one is within a call or has its sleeps looked at.
    fn look(&self) -> Option<u64> {
        let mut watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
        watched.retain(|watched| watched.strong_count() > 0);
        let mut sum = Some(0u64);
        for watched in watched.iter().filter_map(Weak::upgrade) {
            let calls = watched.look();
            let quiet = calls % 2 == 0 && !watched.look_for_hole();
            sum = sum.filter(|_| quiet).map(|sum| sum.wrapping_add(calls));
        }
        sum
    }

    /// Waits until somebody makes a call, or the watchdog is to end; false if a look finds anything but `calls` now.
    fn doze(&self, calls: Option<u64>) -> bool {
        self.dozing.store(true, Ordering::Relaxed);
        // With the fence in `guarded`: one of both sees what the other wrote.
        fence(Ordering::SeqCst);
        let quiet = self.look() == calls;
        while quiet && self.dozing.load(Ordering::Relaxed) && !self.stop.load(Ordering::Relaxed) {
            std::thread::park();
        }
        self.dozing.store(false, Ordering::Relaxed);
        quiet
    }

    /// Ends a doze.
    #[cold]
    fn rouse(&self) {
        self.dozing.store(false, Ordering::Relaxed);
        if let Some(thread) = self.thread.get() {
            thread.unpark();
        }
    }
}

impl Watched {
    fn of_this_thread(stat: Option<File>, waits: Option<File>, shared: Arc<Shared>) -> Watched {
        Watched {
            target: Target::current(),
            calls: AtomicU64::new(0),
            before: AtomicU64::new(0),
            same: AtomicU32::new(0),
            stat,
            waits,
            looked_at: AtomicBool::new(false),
            lap: AtomicU64::new(0),
            shared,
        }
    }

    /// Interrupts the thread if it is blocked in a guarded call. The calls begun and ended so far.
    fn look(&self) -> u64 {
        let calls = self.calls.load(Ordering::Acquire);
        let before = self.before.swap(calls, Ordering::Relaxed);
        let same = if calls == before { self.same.load(Ordering::Relaxed).saturating_add(1) } else { 0 };
        self.same.store(same, Ordering::Relaxed);
        if calls % 2 == 1 {
            let blocked = self.is_asleep().unwrap_or(same >= LOOKS);
            if blocked && self.calls.load(Ordering::Acquire) == calls {
                self.target.interrupt();
            }
        }
        calls
    }

    /// Counts the look if the thread has its sleeps looked at and waits for a hole; whether it has them looked at.
    fn look_for_hole(&self) -> bool {
        let looked_at = self.looked_at.load(Ordering::Relaxed);
        if looked_at {
            let lap = self.lap.load(Ordering::Relaxed);
            let is_full = [lap as u32 & LOOKS_MASK, lap as u32 >> LOOKS_BITS].contains(&LOOKS_MASK);
            if self.state() == Some(b'D') && !is_full {
                let found = 1 << LOOKS_BITS | u64::from(self.waits_for_hole());
                // Not if the thread has got on meanwhile: its next lap is not to blame.
                let _ = self.lap.compare_exchange(lap, lap + found, Ordering::Relaxed, Ordering::Relaxed);
            }
        }
        looked_at
    }

    /// Whether the thread sleeps in a page fault until a hole has been punched.
    fn waits_for_hole(&self) -> bool {
        let mut name = [0; 64];
        let len = self.waits.as_ref().and_then(|waits| waits.read_at(&mut name, 0).ok());
        // Some kernels end it by a suffix of the compiler's, as in `shmem_fault.cold`.
        let function = name[..len.unwrap_or(0)].split(|byte| matches!(byte, b'.' | b'+')).next();
        function.is_some_and(|function| HOLES.contains(&function))
    }

    /// Whether the kernel has put the thread to sleep; `None` if that cannot be read.
    fn is_asleep(&self) -> Option<bool> {
        Some(self.state()? == b'S')
    }

    /// The thread's state, as proc(5) has it; `None` if that cannot be read.
    fn state(&self) -> Option<u8> {
        let mut line = [0; 128];
        let len = self.stat.as_ref()?.read_at(&mut line, 0).ok()?;
        // The name in parentheses may contain anything; the state follows the last one.
        let line = &line[..len];
        line.get(line.iter().rposition(|byte| *byte == b')')? + 2).copied()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use rustix::fs::OFlags;

    use super::*;
    use crate::eventfd::EventFd;
    use crate::testing::may;

    /// The watchdog's patience with a test.
    const PATIENCE: Duration = Duration::from_secs(30);

    #[test]
    fn h1_a_thread_that_a_peer_blocks_in_a_doorbell_gets_out_though_nobody_asks() {
        let bell = EventFd::new().unwrap();
        let flags = rustix::fs::fcntl_getfl(&bell).unwrap();
        rustix::fs::fcntl_setfl(&bell, flags - OFlags::NONBLOCK).unwrap();
        rustix::io::write(&bell, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        let watchdog = Watchdog::start("watchdog").unwrap();
        let watcher = watchdog.watcher();
        let (result, outcome) = channel();
        std::thread::spawn(move || {
            watcher.watch_this_thread();
            for _ in 0..2 {
                let _ = result.send(bell.signal());
            }
        });
        // Every time, not just once.
        for _ in 0..2 {
            let error = outcome.recv_timeout(PATIENCE).unwrap().unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::Interrupted);
        }
    }

    #[test]
    fn a_watchdog_of_quiet_threads_dozes_until_one_is_blocked() {
        let watchdog = Watchdog::start("watchdog").unwrap();
        let watcher = watchdog.watcher();
        let bell = EventFd::new().unwrap();
        let (go, gone) = channel::<()>();
        let thread = std::thread::spawn(move || {
            watcher.watch_this_thread();
            bell.signal().unwrap();
            gone.recv().unwrap();
            let flags = rustix::fs::fcntl_getfl(&bell).unwrap();
            rustix::fs::fcntl_setfl(&bell, flags - OFlags::NONBLOCK).unwrap();
            rustix::io::write(&bell, &(u64::MAX - 2).to_ne_bytes()).unwrap();
            bell.signal()
        });
        let since = std::time::Instant::now();
        while !watchdog.shared.dozing.load(Ordering::Relaxed) {
            assert!(since.elapsed() < PATIENCE, "nobody makes a call");
            std::thread::yield_now();
        }
        go.send(()).unwrap();
        assert_eq!(thread.join().unwrap().unwrap_err().kind(), io::ErrorKind::Interrupted);
    }

    #[test]
    fn without_proc_a_call_is_interrupted_that_is_the_same_for_many_looks() {
        let watchdog = Watchdog::start("watchdog").unwrap();
        let shared = Arc::clone(&watchdog.shared);
        let bell = EventFd::new().unwrap();
        let flags = rustix::fs::fcntl_getfl(&bell).unwrap();
        rustix::fs::fcntl_setfl(&bell, flags - OFlags::NONBLOCK).unwrap();
        rustix::io::write(&bell, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        let thread = std::thread::spawn(move || {
            let watched = Watched::of_this_thread(None, None, Arc::clone(&shared));
            let watched = THIS.with(|this| Arc::clone(this.get_or_init(|| Arc::new(watched))));
            shared.watched.lock().unwrap().push(Arc::downgrade(&watched));
            let result = bell.signal();
            (result, watched.same.load(Ordering::Relaxed))
        });
        let (result, same) = thread.join().unwrap();
        assert_eq!(result.unwrap_err().kind(), io::ErrorKind::Interrupted);
        assert!(same >= LOOKS, "{same}");
    }

    #[test]
    fn a_call_that_computes_for_long_is_not_interrupted() {
        let watchdog = Watchdog::start("watchdog").unwrap();
        let watcher = watchdog.watcher();
        let thread = std::thread::spawn(move || {
            watcher.watch_this_thread();
            THIS.with(|this| {
                let this = Arc::clone(this.get().unwrap());
                guarded(|| (this.calls.load(Ordering::Relaxed) % 2, this.is_asleep()))
            })
        });
        // Who asks is not asleep.
        assert_eq!(thread.join().unwrap(), (1, Some(false)));
    }

    #[test]
    fn a_thread_that_sleeps_elsewhere_is_seen_to_sleep_and_left_alone() {
        let watchdog = Watchdog::start("watchdog").unwrap();
        let watcher = watchdog.watcher();
        let (sender, watched) = channel();
        let (end, ended) = channel::<()>();
        let thread = std::thread::spawn(move || {
            watcher.watch_this_thread();
            THIS.with(|this| sender.send(Arc::clone(this.get().unwrap())).unwrap());
            ended.recv().unwrap_err();
        });
        let watched = watched.recv().unwrap();
        let since = std::time::Instant::now();
        while watched.is_asleep() != Some(true) {
            assert!(since.elapsed() < PATIENCE, "the thread waits");
            std::thread::yield_now();
        }
        assert_eq!(watched.calls.load(Ordering::Relaxed), 0);
        drop(end);
        thread.join().unwrap();
    }

    /// Bytes that are punched: some milliseconds each time, so that a look soon comes at the right moment.
    const PUNCHED: usize = 64 << 20;

    #[test]
    fn holes_punched_under_a_thread_are_counted_while_it_has_its_sleeps_looked_at() {
        let watchdog = Watchdog::start("watchdog").unwrap();
        let watcher = watchdog.watcher();
        watcher.watch_this_thread();
        let Some(waits) = HoleWaits::of_this_thread().filter(|_| kernel_names_waits()) else {
            may("needs a kernel that tells what a thread waits for", false);
            return;
        };
        let shared = ringferry_memory::SharedMem::new("ringferry-sys-test", PUNCHED).unwrap();
        let region = shared.map_at(0).unwrap();
        let file = shared.fd().try_clone_to_owned().unwrap();
        let over = Arc::new(AtomicBool::new(false));
        let puncher = {
            let over = Arc::clone(&over);
            std::thread::spawn(move || {
                use rustix::fs::FallocateFlags;
                while !over.load(Ordering::Relaxed) {
                    for flags in
                        [FallocateFlags::empty(), FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE]
                    {
                        rustix::fs::fallocate(&file, flags, 0, PUNCHED as u64).unwrap();
                    }
                }
            })
        };
        waits.begin();
        let since = std::time::Instant::now();
        let mut at = 0;
        while waits.lap().holes == 0 {
            assert!(since.elapsed() < PATIENCE, "no look has found the thread waiting");
            let memory = region.area(at, 8).unwrap();
            std::hint::black_box(memory.read(0, 8).unwrap().array::<8>());
            at = (at + 4096) % PUNCHED;
        }
        waits.end();
        over.store(true, Ordering::Relaxed);
        puncher.join().unwrap();
        // Nobody looks any more, and this thread waits for nothing.
        waits.lap();
        watchdog.shared.look();
        assert!(waits.lap() == Looks::default() && !waits.is_waiting());
    }

    #[test]
    fn a_thread_that_waits_for_anything_else_waits_for_no_hole() {
        let watchdog = Watchdog::start("watchdog").unwrap();
        let watcher = watchdog.watcher();
        let (sender, watched) = channel();
        let (end, ended) = channel::<()>();
        let thread = std::thread::spawn(move || {
            watcher.watch_this_thread();
            let waits = HoleWaits::of_this_thread();
            waits.iter().for_each(HoleWaits::begin);
            THIS.with(|this| sender.send(Arc::clone(this.get().unwrap())).unwrap());
            ended.recv().unwrap_err();
            waits.map(|waits| waits.lap()).unwrap_or_default()
        });
        let watched = watched.recv().unwrap();
        let since = std::time::Instant::now();
        while watched.is_asleep() != Some(true) {
            assert!(since.elapsed() < PATIENCE, "the thread waits");
            std::thread::yield_now();
        }
        // The watchdog does not doze while somebody has his sleeps looked at.
        assert_eq!(watchdog.shared.look(), None);
        drop(end);
        assert_eq!(thread.join().unwrap(), Looks::default());
    }

    /// Whether the kernel says what a thread that waits does so for.
    fn kernel_names_waits() -> bool {
        let (end, ended) = channel::<()>();
        let (sender, file) = channel();
        let thread = std::thread::spawn(move || {
            sender.send(File::open("/proc/thread-self/wchan")).unwrap();
            ended.recv().unwrap_err();
        });
        let file = file.recv().unwrap();
        let mut known = false;
        for _ in 0..1000 {
            let mut name = [0; 64];
            let len = file.as_ref().map_or(0, |file| file.read_at(&mut name, 0).unwrap_or(0));
            known |= len > 1;
            std::thread::yield_now();
        }
        drop(end);
        thread.join().unwrap();
        known
    }
}
