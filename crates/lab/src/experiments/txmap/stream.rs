//! One run of a synthetic row.

use std::time::Instant;

use ringferry_sys::process;

use super::case::{Path, Synthetic};
use super::clock::{Finally, Gauge, Over, PATIENCE, joined, pin, sleep, wait};
use super::paths;
use super::sender::{Sender, Sent, bits};
use super::stack::{POOLS, Stack};
use crate::experiment::{RowError, Run, Sample};
use crate::frames::stream::Payload;

/// Packets whose every byte is looked at before anything is timed: 13 MiB, many times round the window.
const CHECKED: u64 = 200;

/// Measures one run, in Gbit/s of payload.
pub(super) fn measure(case: &Synthetic, run: &Run<'_>) -> Result<Sample, RowError> {
    match case.path {
        Path::Null => null(case, run),
        Path::Virtio => virtio(case, run),
    }
}

/// `share`: of its processor, what each thread had.
fn sample(bits: f64, seconds: f64, share: f64, sent: &Sent) -> Sample {
    sent.describe(Sample::new(bits / seconds / 1e9)).with("CPU share", share.min(1.0))
}

/// Seconds of processor time that this process has used.
fn processor_time() -> Result<f64, RowError> {
    Ok(process::cpu_time(std::process::id())?.as_secs_f64())
}

/// One thread: stack and framework, and nothing behind them.
fn null(case: &Synthetic, run: &Run<'_>) -> Result<Sample, RowError> {
    let body = || -> Result<Sample, RowError> {
        pin(run.cpu(0))?;
        let (driver, pools) = paths::null(case.limit, POOLS())?;
        let mut sender = Sender::new(driver, pools, Stack::new(case.send, case.coalesces))?;
        while sender.round()? < CHECKED {}
        let (used, from, begin) = (processor_time()?, sender.round()?, Instant::now());
        let to = loop {
            let sent = sender.round()?;
            if begin.elapsed() >= run.seconds {
                break sent;
            }
            if run.stopped() {
                return Err(RowError::Stopped);
            }
        };
        let seconds = begin.elapsed().as_secs_f64();
        let share = (processor_time()? - used) / seconds;
        Ok(sample(bits(to - from), seconds, share, &sender.finish()?))
    };
    // A thread of its own, so that nothing else is pinned.
    joined(std::thread::scope(|scope| scope.spawn(body).join()))
}

/// Two threads: stack and framework on the first processor, the device on the second.
fn virtio(case: &Synthetic, run: &Run<'_>) -> Result<Sample, RowError> {
    let (ring, pools, end) = paths::virtio(case.limit, POOLS())?;
    let (taken, sending, taking) = (&Gauge::default(), &Over::default(), &Over::default());
    std::thread::scope(|scope| {
        let _finally = Finally([sending, taking]);
        let sender = scope.spawn(move || -> Result<Sent, RowError> {
            pin(run.cpu(0))?;
            let mut sender = Sender::new(ring, pools, Stack::new(case.send, case.coalesces))?;
            while !sending.told() {
                sender.round()?;
            }
            let deadline = Instant::now() + PATIENCE;
            while !sender.is_drained() {
                if Instant::now() >= deadline {
                    return Err(RowError::failed("the device has not given back what it was sent"));
                }
            }
            sender.finish()
        });
        let taker = scope.spawn(move || -> Result<u64, RowError> {
            pin(run.cpu(1))?;
            let (mut taker, payload) = (end.taker(), Payload::new());
            loop {
                // Before the look: what was sent until then is found by it.
                let over = taking.told();
                let count = taker.round(|number, frame| match number {
                    0..CHECKED => Ok(payload.check(number, frame)?),
                    _ => Ok(()),
                })?;
                taken.set(count);
                if over {
                    return Ok(count);
                }
            }
        });
        let alive = || !sender.is_finished() && !taker.is_finished();
        let measured =
            wait(run, "packets to be checked", alive, || Ok(taken.get() >= CHECKED)).and_then(|()| {
                let (used, from) = (processor_time()?, taken.get());
                let seconds = sleep(run, run.seconds, alive)?.as_secs_f64();
                // Two threads, and this process has nothing else to do.
                let share = (processor_time()? - used) / seconds / 2.0;
                Ok((taken.get() - from, seconds, share))
            });
        sending.tell();
        // What the thread says went wrong is why the measurement did.
        let sent = joined(sender.join());
        taking.tell();
        let arrived = joined(taker.join())?;
        let ((packets, seconds, share), sent) = (measured?, sent?);
        if arrived != sent.packets() {
            let text = format!("{} packets were sent, and {arrived} arrived", sent.packets());
            return Err(RowError::failed(text));
        }
        Ok(sample(bits(packets), seconds, share, &sent))
    })
}
