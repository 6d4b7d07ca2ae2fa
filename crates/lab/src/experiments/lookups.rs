//! Measures a look-up: bursts of keys are looked up, over and over, until the time is over.

use std::time::Instant;

use crate::experiment::{RowError, Run, Sample};

/// Keys that are looked up together.
pub(super) const BURST: usize = 32;

/// Bursts between two looks at the clock.
const BATCH: usize = 256;

/// Nanoseconds for one of `keys`, which are looked up in their order. `look_up` says whether all keys of a burst were found; if they
/// were not, the run has failed because of what `lost` says.
pub(super) fn time<K>(
    run: &Run<'_>,
    keys: &[K],
    lost: &str,
    mut look_up: impl FnMut(&[K]) -> bool,
) -> Result<Sample, RowError> {
    let mut bursts = keys.chunks_exact(BURST).cycle();
    let mut round = || {
        if run.stopped() {
            return Err(RowError::Stopped);
        }
        let all = (0..BATCH).all(|_| bursts.next().is_some_and(&mut look_up));
        if all { Ok(()) } else { Err(RowError::failed(lost)) }
    };
    // Once round everything first.
    for _ in 0..(keys.len() / (BURST * BATCH)).max(4) {
        round()?;
    }
    let (begin, mut count) = (Instant::now(), 0);
    while begin.elapsed() < run.seconds || count == 0 {
        round()?;
        count += BURST * BATCH;
    }
    Ok(Sample::new(begin.elapsed().as_secs_f64() * 1e9 / count as f64))
}
