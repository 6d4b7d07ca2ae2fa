//! A window of time on the receiving thread: what the queue counted at both of its ends.

use std::time::{Duration, Instant};

use ringferry_nic::rx::RxStats;

use super::sink::Sink;
use crate::experiment::{RowError, Run, Sample};

/// Before the window: the policy has come to its length, and buffers of before are gone.
const WARM_UP: Duration = Duration::from_millis(50);
/// The same in packets: sixteen rings, and many windows of any policy.
const WARM_UP_PACKETS: u64 = 4096;
/// The longest warm-up, and the longest window in which nothing comes, for a machine that is busy with something else.
const LONGEST: Duration = Duration::from_secs(2);

/// Share of its processor that each side must have had for a window to count, and how many are tried. Then the one
/// with the largest share stands.
const SHARE: f64 = 0.95;
const ATTEMPTS: usize = 2;

/// Rounds between two looks at the clock.
const ROUNDS: usize = 16;

/// The figures of one window.
#[derive(Clone, Copy, Debug)]
pub(super) struct Window {
    seconds: f64,
    before: RxStats,
    after: RxStats,
    /// Bytes of the next buffer at its end.
    buffer: usize,
    /// Of its processor, the side that had less.
    share: f64,
}

impl Window {
    /// Receives for as long as the run says, in the first window in which both sides had their processors. `used` is the
    /// processor time of both sides, `alive` whether the other one still works.
    pub(super) fn measure(
        sink: &mut Sink,
        run: &Run<'_>,
        used: impl Fn() -> Result<[Duration; 2], RowError>,
        alive: impl Fn() -> bool,
    ) -> Result<Self, RowError> {
        let (begin, packets) = (Instant::now(), sink.stats().packets);
        go(sink, run, &alive, |sink| {
            let time = begin.elapsed();
            let settled = sink.stats().packets >= packets + WARM_UP_PACKETS;
            time >= LONGEST || (time >= WARM_UP.min(run.seconds) && settled)
        })?;
        let mut best: Option<Self> = None;
        for _ in 0..ATTEMPTS {
            let window = Self::once(sink, run, &used, &alive)?;
            if best.is_none_or(|best| window.share > best.share) {
                best = Some(window);
            }
            if window.share >= SHARE {
                break;
            }
        }
        best.ok_or_else(|| RowError::failed("no window was measured"))
    }

    fn once(
        sink: &mut Sink,
        run: &Run<'_>,
        used: &impl Fn() -> Result<[Duration; 2], RowError>,
        alive: &impl Fn() -> bool,
    ) -> Result<Self, RowError> {
        let (from, before, begin) = (used()?, sink.stats(), Instant::now());
        go(sink, run, alive, |sink| {
            let (time, came) = (begin.elapsed(), sink.stats().packets > before.packets);
            time >= run.seconds && (came || time >= LONGEST)
        })?;
        let (seconds, after, to) = (begin.elapsed().as_secs_f64(), sink.stats(), used()?);
        let share = |side: usize| to[side].saturating_sub(from[side]).as_secs_f64() / seconds;
        let share = share(0).min(share(1)).min(1.0);
        Ok(Self { seconds, before, after, buffer: sink.next_buffer_len(), share })
    }

    /// Gbit/s, and the other figures.
    pub(super) fn sample(&self) -> Sample {
        let Self { seconds, before, after, buffer, share } = self;
        let packets = (after.packets - before.packets) as f64;
        let bytes = (after.bytes - before.bytes) as f64;
        let drops = |stats: &RxStats| stats.rx_length_errors + stats.unknown;
        Sample::new(bytes * 8.0 / seconds / 1e9)
            .with("Mpps", packets / seconds / 1e6)
            .with("descriptors/packet", (after.descriptors - before.descriptors) as f64 / packets)
            .with("truesize/payload", (after.truesize_bytes - before.truesize_bytes) as f64 / bytes)
            .with("drops", (drops(after) - drops(before)) as f64)
            .with("buffer", *buffer as f64)
            .with("CPU share", *share)
    }
}

fn go(
    sink: &mut Sink,
    run: &Run<'_>,
    alive: &impl Fn() -> bool,
    done: impl Fn(&Sink) -> bool,
) -> Result<(), RowError> {
    while !done(sink) {
        for _ in 0..ROUNDS {
            sink.round(|_| Ok(()))?;
        }
        if run.stopped() {
            return Err(RowError::Stopped);
        }
        if !alive() {
            return Err(RowError::failed("the other side has ended"));
        }
    }
    Ok(())
}
