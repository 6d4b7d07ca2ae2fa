//! Whose turn it is in the control plane, when several have something to be done.
//!
//! What the switch itself waits for (signals, the control socket, faults) is served first, then ports, whoever has used least of the thread's time of late before
//! others: a session that says something now and then does not wait for those that never stop. A look at what is ready is over after [`LOOK`]; whoever
//! was not served then is ready still, and is seen by the next look.

use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Time that ports may take before the control plane looks again at what is ready. A turn of one port takes a millisecond, with a worker that is
/// waited for rarely more than three.
const LOOK: Duration = Duration::from_millis(2);

/// How much time each port has used of late.
#[derive(Debug, Default)]
pub(crate) struct Turns {
    used: HashMap<u64, Duration>,
}

impl Turns {
    /// Serves what is `ready`: tokens below `ports` all, the others in order until the time of a look is used up, at least one.
    ///
    /// # Errors
    /// The first error of `serve`, which ends the look.
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

    /// Forgets the past. To be called about once a second.
    pub(crate) fn forget(&mut self) {
        self.used.clear();
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::convert::Infallible;

    use super::*;

    /// The tokens that are served in a look, if each takes so many milliseconds.
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
        // All of them have had as many turns.
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
