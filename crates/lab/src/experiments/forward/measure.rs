//! One run: the forwarder connects, frames are checked, and those that come out are counted.

use std::path::Path;
use std::thread::ScopedJoinHandle;
use std::time::Duration;

use ringferry_rig::testpmd::{MEGABYTES, Testpmd};
use ringferry_sys::process;

use super::case::{Case, Who};
use super::ends::{CHECKED, Counts, Ends};
use super::nics::Nics;
use super::port::Ports;
use super::testpmd::command_line;
use crate::experiment::{RowError, Run, Sample};
use crate::experiments::peers::huge_pages::HugePages;
use crate::experiments::txmap::clock::{Finally, Gauge, Over, joined, pin, sleep, wait};

/// Before the rate is read: caches and branch predictors are warm long before.
const WARM_UP: Duration = Duration::from_millis(30);

/// The forwarder at work.
enum Forwarder<'scope> {
    /// A thread; it ends with the number of doorbells that it rang.
    Ringferry(ScopedJoinHandle<'scope, Result<u64, RowError>>),
    Testpmd(Testpmd),
}

impl Forwarder<'_> {
    /// Processor time that the ends and the forwarder have used.
    fn processor_time(&self) -> Result<[Duration; 2], RowError> {
        let ours = process::cpu_time(std::process::id())?;
        Ok(match self {
            // Both are threads of this process, which has nothing else to do: each gets half.
            Forwarder::Ringferry(_) => [ours / 2; 2],
            Forwarder::Testpmd(testpmd) => [ours, testpmd.processor_time()?],
        })
    }

    fn is_alive(&self) -> bool {
        match self {
            Forwarder::Ringferry(thread) => !thread.is_finished(),
            Forwarder::Testpmd(_) => true,
        }
    }
}

/// The counters of one window.
struct Window {
    received: u64,
    offered: u64,
    seconds: f64,
    /// Of its processor, the side that had less.
    share: f64,
}

/// Measures one run, in millions of frames per second that came out of the forwarder.
pub(super) fn measure(case: &Case, run: &Run<'_>, program: Option<&Path>) -> Result<Sample, RowError> {
    let (Some(ends_cpu), Some(cpu)) = (run.cpu(0), run.cpu(1)) else {
        return Err(RowError::failed("needs two processors, one for the ends and one for the forwarder"));
    };
    let folder = crate::experiments::folder()?;
    let sockets = ["near.sock", "far.sock"].map(|name| folder.path().join(name));
    let sockets = [sockets[0].as_path(), sockets[1].as_path()];
    let ports = Ports::listen(case, sockets)?;
    let (stopping, ending) = (&Over::default(), &Over::default());
    let [checked, received, offered] = &[(); 3].map(|()| Gauge::default());
    // testpmd is up to twice as fast with huge pages: it gets them where they can be had, for the length of the run.
    let pages = match case.who {
        Who::Testpmd => HugePages::reserve(MEGABYTES << 20, run.stop)?,
        Who::Ringferry => None,
    };
    let huge = pages.is_some();
    std::thread::scope(|scope| {
        let _finally = Finally([ending, stopping]);
        let mut forwarder = match case.who {
            Who::Ringferry => Forwarder::Ringferry(scope.spawn(move || {
                pin(Some(cpu))?;
                let mut nics = Nics::connect(case, sockets)?;
                while !stopping.told() {
                    nics.round()?;
                }
                Ok(nics.rang())
            })),
            Who::Testpmd => {
                let program = program.ok_or_else(|| RowError::failed("testpmd is not installed"))?;
                let (line, stop) = (command_line(case, cpu, sockets, huge), run.stop.clone());
                let testpmd = Testpmd::start(program, &line, folder.path(), move || stop.requested())?;
                Forwarder::Testpmd(testpmd)
            }
        };
        let mut rings = None;
        let started = wait(
            run,
            "the forwarder to start its rings",
            || true,
            || {
                match &mut forwarder {
                    Forwarder::Testpmd(testpmd) => testpmd.check()?,
                    Forwarder::Ringferry(thread) if thread.is_finished() => return Ok(true),
                    Forwarder::Ringferry(_) => {}
                }
                rings = ports.take(case)?;
                Ok(rings.is_some())
            },
        );
        let Some(rings) = rings else {
            stopping.tell();
            return Err(why(forwarder, started));
        };
        let ends = scope.spawn(move || -> Result<Counts, RowError> {
            pin(Some(ends_cpu))?;
            let mut ends = Ends::new(rings, case)?;
            loop {
                let over = ending.told();
                let counts = ends.round()?;
                checked.set(counts.checked);
                received.set(counts.received);
                offered.set(counts.offered);
                if over {
                    return Ok(counts.clone());
                }
            }
        });
        let alive = || !ends.is_finished() && forwarder.is_alive();
        let measured = wait(run, "frames to be checked", alive, || Ok(checked.get() >= CHECKED))
            .and_then(|()| sleep(run, WARM_UP.min(run.seconds), alive))
            .and_then(|_| {
                let (used, from) = (forwarder.processor_time()?, (received.get(), offered.get()));
                let time = sleep(run, run.seconds, alive)?;
                let (now, to) = (forwarder.processor_time()?, (received.get(), offered.get()));
                let shares =
                    [0, 1].map(|at| now[at].saturating_sub(used[at]).as_secs_f64() / time.as_secs_f64());
                Ok(Window {
                    received: to.0 - from.0,
                    offered: to.1 - from.1,
                    seconds: time.as_secs_f64(),
                    share: shares[0].min(shares[1]).min(1.0),
                })
            });
        ending.tell();
        let counts = joined(ends.join());
        stopping.tell();
        // What a thread says went wrong is why the measurement did.
        let rang = match forwarder {
            Forwarder::Ringferry(thread) => Some(joined(thread.join())?),
            Forwarder::Testpmd(_) => None,
        };
        Ok(describe(case, &measured?, &counts?, rang, huge))
    })
}

/// Why the rings were not started.
fn why(forwarder: Forwarder<'_>, waited: Result<(), RowError>) -> RowError {
    let early = || RowError::failed("the forwarder ended before its rings were started");
    match (forwarder, waited.err().unwrap_or_else(early)) {
        (_, RowError::Stopped) => RowError::Stopped,
        (Forwarder::Ringferry(thread), waited) => joined(thread.join()).err().unwrap_or(waited),
        (Forwarder::Testpmd(mut testpmd), waited) => waited.with_peer(&mut testpmd),
    }
}

fn describe(case: &Case, window: &Window, counts: &Counts, rang: Option<u64>, huge: bool) -> Sample {
    let share = |part: u64, of: u64| part as f64 / of.max(1) as f64;
    let lost = window.offered.saturating_sub(window.received);
    let mut sample = Sample::new(window.received as f64 / window.seconds / 1e6)
        .with("CPU share", window.share)
        .with("lost share", share(lost, window.offered))
        .with("input full share", share(counts.cut_short, counts.bursts));
    for (queue, frames) in counts.queues.iter().enumerate() {
        sample = sample.with(&format!("queue {queue} share"), share(*frames, counts.received));
    }
    match rang {
        Some(rang) if case.how.doorbell.rings() => {
            sample.with("doorbells/packet", share(rang, counts.received))
        }
        Some(_) => sample,
        None => sample.with("huge pages", f64::from(u8::from(huge))),
    }
}
