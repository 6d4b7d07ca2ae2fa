//! All engines go round on a thread of their own, pinned to its core, and the
//! one who measures tells them what to do and reads how far they are.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use ringferry_sys::cpu;

use crate::experiment::RowError;

/// The phase of a run, which engines follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Phase {
    Hold,
    /// A fixed number of numbered frames is sent, and each is checked whole.
    Check,
    /// As fast as it goes, with the same work per frame as testpmd.
    Run,
    /// Engines end.
    Stop,
}

impl Phase {
    const ALL: [Phase; 4] = [Phase::Hold, Phase::Check, Phase::Run, Phase::Stop];
}

/// How far an engine is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    pub sent: u64,
    pub received: u64,
    /// Bytes of the frames that were received.
    pub bytes: u64,
    /// Those among them that were checked.
    pub checked: u64,
    /// Frames of a loop that did not fit the other ring.
    pub dropped: u64,
}

/// One end of the connection at work.
pub(super) trait Engine {
    /// Handles a burst, or finds that there is none.
    fn round(&mut self, phase: Phase) -> Result<(), RowError>;

    /// Returns the counters of the engine.
    fn counts(&self) -> Counts;
}

/// A number on cache lines of its own: two, as some processors fetch them in pairs.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Line(AtomicU64);

/// The phase that all engines of a run are told, and the first error of any.
#[derive(Debug, Default)]
pub(super) struct Control {
    phase: AtomicU8,
    failure: Mutex<Option<RowError>>,
}

impl Control {
    /// Tells all engines. [`Phase::Stop`] is for good: an engine that has failed stops the other.
    pub(super) fn set(&self, phase: Phase) {
        let _ = self.phase.fetch_update(Ordering::Release, Ordering::Relaxed, |now| {
            (now != Phase::Stop as u8).then_some(phase as u8)
        });
    }

    #[inline]
    fn phase(&self) -> Phase {
        Phase::ALL[usize::from(self.phase.load(Ordering::Acquire)) % Phase::ALL.len()]
    }

    /// Returns the error of an engine that failed.
    pub(super) fn check(&self) -> Result<(), RowError> {
        match &*self.failure.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(error) => Err(error.clone()),
            None => Ok(()),
        }
    }

    fn fail(&self, error: RowError) {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        self.set(Phase::Stop);
    }
}

/// The counters that an engine shows while it runs. Each number has one writer, the engine.
#[derive(Debug, Default)]
struct Gauge {
    ready: AtomicBool,
    /// The phase that the engine was told at its last round.
    told: AtomicU8,
    sent: Line,
    received: Line,
    checked: Line,
}

/// A running engine. Dropping it stops all engines of the run and waits for this one.
#[derive(Debug)]
pub(super) struct Engaged {
    control: Arc<Control>,
    gauge: Arc<Gauge>,
    thread: Option<JoinHandle<Counts>>,
}

/// Starts the engine that `make` makes, on processor `cpu`. All of it, its memory too, comes into being
/// there.
pub(super) fn engage<E: Engine>(
    name: &str,
    cpu: Option<usize>,
    control: &Arc<Control>,
    make: impl FnOnce() -> Result<E, RowError> + Send + 'static,
) -> Result<Engaged, RowError> {
    let (control, gauge) = (Arc::clone(control), Arc::new(Gauge::default()));
    let (shared, shown) = (Arc::clone(&control), Arc::clone(&gauge));
    let body = move || {
        let pinned = cpu.map_or(Ok(()), |cpu| cpu::pin_current_thread(cpu).map_err(RowError::from));
        match pinned.and_then(|()| make()) {
            Ok(engine) => drive(engine, &shared, &shown),
            Err(error) => {
                shared.fail(error);
                Counts::default()
            }
        }
    };
    let thread = std::thread::Builder::new().name(format!("lab-{name}")).spawn(body)?;
    Ok(Engaged { control, gauge, thread: Some(thread) })
}

fn drive<E: Engine>(mut engine: E, control: &Control, gauge: &Gauge) -> Counts {
    gauge.ready.store(true, Ordering::Release);
    loop {
        let phase = control.phase();
        if phase == Phase::Stop {
            return engine.counts();
        }
        if let Err(error) = engine.round(phase) {
            control.fail(error);
        }
        let counts = engine.counts();
        gauge.sent.0.store(counts.sent, Ordering::Relaxed);
        gauge.received.0.store(counts.received, Ordering::Relaxed);
        gauge.checked.0.store(counts.checked, Ordering::Relaxed);
        // Last: who has seen it sees the counts.
        gauge.told.store(phase as u8, Ordering::Release);
    }
}

impl Engaged {
    /// Returns true once the engine goes round: an engine that connects first needs a moment.
    pub(super) fn is_ready(&self) -> bool {
        self.gauge.ready.load(Ordering::Acquire)
    }

    /// Returns true once a round has gone by in [`Phase::Hold`]: a source has sent its last.
    pub(super) fn holds(&self) -> bool {
        self.gauge.told.load(Ordering::Acquire) == Phase::Hold as u8
    }

    pub(super) fn sent(&self) -> u64 {
        self.gauge.sent.0.load(Ordering::Relaxed)
    }

    pub(super) fn received(&self) -> u64 {
        self.gauge.received.0.load(Ordering::Relaxed)
    }

    /// Frames received and checked so far.
    pub(super) fn checked(&self) -> u64 {
        self.gauge.checked.0.load(Ordering::Relaxed)
    }

    /// Stops all engines of the run and waits for this one; where it was at the end.
    pub(super) fn stop(mut self) -> Result<Counts, RowError> {
        self.control.set(Phase::Stop);
        let counts = self.thread.take().and_then(|thread| thread.join().ok());
        self.control.check()?;
        counts.ok_or_else(|| RowError::failed("an engine of the lab panicked; its message is above"))
    }
}

impl Drop for Engaged {
    fn drop(&mut self) {
        self.control.set(Phase::Stop);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
