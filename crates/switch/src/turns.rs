//! The order in which the control plane serves what is ready.
//!
//! The switch's own descriptors (signals, the control socket, faults) are served first, then the ports in
//! ascending order of the thread's time that they have used in the last second: a session that says something
//! now and then does not wait for those that never stop. A round ends after [`LOOK`]; descriptors that were
//! not served then are still ready, and the next round finds them.

use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Time that ports may take before the control plane polls again. A turn of one port takes a millisecond; if
/// a worker is waited for, rarely more than three.
const LOOK: Duration = Duration::from_millis(2);

/// The thread's time that each port has used since [`forget`](Self::forget) was called.
#[derive(Debug, Default)]
pub(crate) struct Turns {
    used: HashMap<u64, Duration>,
}

impl Turns {
    /// Serves the tokens in `ready`: those below `ports` all, the others in order until the time of a round
    /// is used up, at least one.
    ///
    /// # Errors
    /// The first error of `serve`, which ends the round.
    pub(crate) fn serve<E>(
        &mut self,
        ready: &mut [u64],
        ports: u64,
        now: impl Fn() -> Instant,
        mut serve: impl FnMut(u64) -> Result<(), E>,
    ) -> Result<(), E> {
        let used = |token: &u64| self.used.get(token).copied().unwrap_or_default();
        ready.sort_by_key(|token| (*token >= ports, used(token)));
        let mut left = LOOK;
        for &token in &*ready {
            let began = now();
            serve(token)?;
            if token < ports {
                continue;
            }
            let time = now().saturating_duration_since(began);
            *self.used.entry(token).or_default() += time;
            left = left.saturating_sub(time);
            if left.is_zero() {
                break;
            }
        }
        Ok(())
    }

    /// Clears the times used. Called about once a second.
    pub(crate) fn forget(&mut self) {
        self.used.clear();
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::convert::Infallible;

    use super::*;

    /// Returns the tokens that one round serves, if each takes so many milliseconds.
    fn look(turns: &mut Turns, ready: &[u64], milliseconds: impl Fn(u64) -> u64) -> Vec<u64> {
        let now = Cell::new(Instant::now());
        let mut served = Vec::new();
        let serve = |token| {
            served.push(token);
            now.set(now.get() + Duration::from_millis(milliseconds(token)));
            Ok::<_, Infallible>(())
        };
        let Ok(()) = turns.serve(&mut ready.to_vec(), 10, || now.get(), serve);
        served
    }

    #[test]
    fn h5_who_says_little_does_not_wait_for_those_that_never_stop() {
        let mut turns = Turns::default();
        let storm: Vec<u64> = (10..30).collect();
        let each = |token| if token == 50 { 0 } else { 1 };
        for _ in 0..20 {
            assert_eq!(look(&mut turns, &storm, each).len(), 2);
        }
        // All of them have had the same number of turns.
        assert!(storm.iter().all(|token| turns.used[token] == Duration::from_millis(2)));
        let with_others: Vec<u64> = storm.iter().copied().chain([50, 1]).collect();
        assert_eq!(look(&mut turns, &with_others, each)[..2], [1, 50]);
        turns.forget();
        assert_eq!(look(&mut turns, &with_others, each).len(), 3);
    }

    #[test]
    fn whoever_takes_long_is_served_alone() {
        let mut turns = Turns::default();
        assert_eq!(look(&mut turns, &[11, 12], |_| 30), [11]);
        assert_eq!(look(&mut turns, &[11, 12], |_| 30), [12]);
    }
}
