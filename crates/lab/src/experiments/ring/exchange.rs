//! The exchange: buffers go round between two threads until there were enough of them.
//!
//! One thread adds a batch, publishes it, and reaps what came back; the other takes, returns, publishes.
//! In *polling* mode both look again when there is nothing to do. In *notified* mode they ask to be told,
//! look once more, and sleep on an eventfd; a side rings the other's when the ring says that it is wanted.

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ringferry_sys::eventfd::EventFd;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::sides::{Back, Front, Visit};
use super::variant::Variant;
use crate::experiment::{RowError, Run};

/// Buffers between two looks at the clock, which costs as much as a few buffers.
const CLOCK: usize = 4096;

/// Looks without result between two looks at whether to give up.
const PATIENCE: u32 = 1 << 14;

/// The longest sleep, after which it is looked whether to give up.
const NAP: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// Nothing reaped for so long: a wake-up was lost, which is a bug worth reporting and no speed.
const STUCK: Duration = Duration::from_secs(5);

/// The time or the number of buffers after which to stop.
#[derive(Clone, Copy, Debug)]
pub enum Goal {
    Time(Duration),
    Buffers(usize),
}

/// The figures of an exchange.
#[derive(Clone, Copy, Debug)]
pub struct Exchanged {
    /// Buffers that went all the way round.
    pub buffers: usize,
    /// From the first add to the last reap.
    pub elapsed: Duration,
    /// Times the adding side rang, and the other one.
    pub signals: [usize; 2],
}

/// An exchange between two threads.
pub struct Threads<'a> {
    pub variant: Variant,
    pub goal: Goal,
    /// Where the threads run, and whether to give up.
    pub run: &'a Run<'a>,
}

impl Visit for Threads<'_> {
    type Output = Result<Exchanged, RowError>;

    fn visit(self, mut front: impl Front, mut back: impl Back) -> Self::Output {
        let (kick, call) = (Bell::new()?, Bell::new()?);
        let over = AtomicBool::new(false);
        let room = [self.run.cpu(0), self.run.cpu(1)];
        let place = |side: usize| match room {
            // Two threads on one processor are better left to the scheduler.
            [Some(_), Some(_)] => room[side].map_or(Ok(()), ringferry_sys::cpu::pin_current_thread),
            _ => Ok(()),
        };
        let alone = room[1].is_none();
        std::thread::scope(|scope| {
            let worker = scope.spawn(|| {
                place(1)?;
                work(&mut back, &self.variant, [&kick, &call], &over, alone)
            });
            // A thread of its own, so that this one stays where it may run.
            let driver = scope.spawn(|| {
                let driven = place(0)
                    .map_err(RowError::from)
                    .and_then(|()| drive(&mut front, &self, [&kick, &call], alone, &|| worker.is_finished()));
                over.store(true, Ordering::Release);
                // A worker that sleeps finds out.
                kick.0.signal()?;
                let rung = worker.join().map_err(|_| RowError::failed("the worker thread panicked"))??;
                let mut exchanged = driven?;
                exchanged.signals[1] = rung;
                Ok(exchanged)
            });
            driver.join().map_err(|_| RowError::failed("the driving thread panicked"))?
        })
    }
}

/// An exchange by one thread that plays both sides in turn: what each side does is the same every time,
/// so it can be counted.
pub struct Alone {
    pub batch: usize,
    pub buffers: usize,
}

impl Visit for Alone {
    type Output = Result<(), RowError>;

    fn visit(self, mut front: impl Front, mut back: impl Back) -> Self::Output {
        let mut reaped = 0;
        while reaped < self.buffers {
            let added = front.add(self.batch);
            front.publish();
            back.turn(self.batch);
            let back_again = front.reap();
            if back_again != added || added == 0 {
                front.check()?;
                back.check()?;
                return Err(RowError::failed(format!("{added} buffers added, {back_again} came back")));
            }
            reaped += back_again;
        }
        Ok(())
    }
}

/// A doorbell one side waits for.
struct Bell(EventFd);

impl Bell {
    fn new() -> Result<Self, RowError> {
        Ok(Self(EventFd::new()?))
    }

    /// Sleeps until it rings, or a while.
    fn wait(&self) -> Result<(), RowError> {
        let mut fds = [PollFd::from_borrowed_fd(self.0.as_fd(), PollFlags::IN)];
        match poll(&mut fds, Some(&NAP)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(RowError::failed(error)),
        }
        self.0.drain()?;
        Ok(())
    }
}

fn drive(
    front: &mut impl Front,
    threads: &Threads<'_>,
    [kick, call]: [&Bell; 2],
    alone: bool,
    worker_gone: &dyn Fn() -> bool,
) -> Result<Exchanged, RowError> {
    let Variant { notified, batch, .. } = threads.variant;
    let (mut wanted, limit) = match threads.goal {
        Goal::Time(limit) => (usize::MAX, limit),
        Goal::Buffers(buffers) => (buffers.next_multiple_of(batch), Duration::MAX),
    };
    let (mut added, mut reaped, mut kicks) = (0, 0, 0);
    let (mut clock, mut idle) = (CLOCK, 0u32);
    let start = Instant::now();
    let mut moved = start;
    while reaped < wanted {
        let mut busy = false;
        if added < wanted {
            let more = front.add(batch);
            if more > 0 {
                busy = true;
                added += more;
                if front.publish() && notified {
                    kick.0.signal()?;
                    kicks += 1;
                }
            }
        }
        let more = front.reap();
        reaped += more;
        if reaped >= clock {
            clock = reaped + CLOCK;
            moved = Instant::now();
            if moved - start >= limit {
                wanted = wanted.min(added);
            }
            if threads.run.stopped() {
                return Err(RowError::Stopped);
            }
        }
        if busy || more > 0 {
            idle = 0;
            continue;
        }
        idle += 1;
        if notified {
            if !front.arm() {
                call.wait()?;
            }
            front.disarm();
        } else if alone {
            std::thread::yield_now();
        } else {
            std::hint::spin_loop();
        }
        if notified || idle.is_multiple_of(PATIENCE) {
            if threads.run.stopped() {
                return Err(RowError::Stopped);
            }
            front.check()?;
            if worker_gone() {
                return Err(RowError::failed("the worker thread ended early"));
            }
            if moved.elapsed() > STUCK + limit.min(STUCK) && idle > 1 {
                return Err(RowError::failed(format!("stuck after {reaped} buffers: a wake-up was lost")));
            }
        }
    }
    let elapsed = start.elapsed();
    front.check()?;
    Ok(Exchanged { buffers: reaped, elapsed, signals: [kicks, 0] })
}

/// Takes and returns until it is over; returns how often it called.
fn work(
    back: &mut impl Back,
    variant: &Variant,
    [kick, call]: [&Bell; 2],
    over: &AtomicBool,
    alone: bool,
) -> Result<usize, RowError> {
    let mut calls = 0;
    while !over.load(Ordering::Acquire) {
        let (taken, wanted) = back.turn(variant.batch);
        if wanted && variant.notified {
            call.0.signal()?;
            calls += 1;
        }
        if taken > 0 {
            continue;
        }
        back.check()?;
        if variant.notified {
            if !back.arm() {
                kick.wait()?;
            }
            back.disarm();
        } else if alone {
            std::thread::yield_now();
        } else {
            std::hint::spin_loop();
        }
    }
    Ok(calls)
}
