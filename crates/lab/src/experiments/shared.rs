//! One run, several rows: what was measured once has several figures, and each is compared with its like.
//!
//! The lab asks rows in any order, and the first of a group twice. A run is made for whoever finds none; the figures of the
//! other rows wait until they are asked in the same round, oldest first. No value is used twice.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;

use crate::experiment::{Measure, RowError, Run, Sample};

/// The figures that wait for each row, and the round that they were measured in.
type Waiting = Rc<RefCell<Vec<VecDeque<(usize, Sample)>>>>;

/// The measure functions of `N` rows.
pub(super) fn shared<const N: usize>(
    measure: impl Fn(&Run<'_>) -> Result<[Sample; N], RowError> + 'static,
) -> [Measure; N] {
    let (measure, waiting) = (Rc::new(measure), Waiting::default());
    waiting.borrow_mut().resize(N, VecDeque::new());
    std::array::from_fn(|row| -> Measure {
        let (measure, waiting) = (Rc::clone(&measure), Rc::clone(&waiting));
        Box::new(move |run: &Run<'_>| {
            for queue in waiting.borrow_mut().iter_mut() {
                queue.retain(|(round, _)| *round == run.round);
            }
            let found = waiting.borrow_mut()[row].pop_front();
            if let Some((_, sample)) = found {
                return Ok(sample);
            }
            let samples = measure(run)?;
            for (queue, sample) in waiting.borrow_mut().iter_mut().zip(samples) {
                queue.push_back((run.round, sample));
            }
            let own = waiting.borrow_mut()[row].pop_front();
            own.map(|(_, sample)| sample).ok_or_else(|| RowError::failed("a run had no figure for this row"))
        })
    })
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::time::Duration;

    use super::*;
    use crate::stop::Stop;

    #[test]
    fn a_run_gives_each_row_one_value_and_none_twice() {
        let runs = Rc::new(Cell::new(0));
        let count = Rc::clone(&runs);
        let [mut first, mut second] = shared(move |_| {
            count.set(count.get() + 1);
            if count.get() == 4 {
                return Err(RowError::failed("the fourth"));
            }
            Ok([Sample::new(f64::from(count.get())), Sample::new(-f64::from(count.get()))])
        });
        let stop = Stop::new();
        let run = |round| Run { seconds: Duration::ZERO, seed: 0, round, cpus: &[0], stop: &stop };
        let value = |sample: Result<Sample, RowError>| sample.unwrap().value;
        // In either order; again is another run.
        assert_eq!((value(first(&run(0))), value(second(&run(0)))), (1.0, -1.0));
        assert_eq!((value(second(&run(1))), value(second(&run(1)))), (-2.0, -3.0));
        // What both runs had for the first row waits, the oldest first; but not for the next round.
        assert_eq!(value(first(&run(1))), 2.0);
        assert!(first(&run(2)).is_err());
        assert_eq!((value(first(&run(2))), value(second(&run(2))), runs.get()), (5.0, -5.0, 5));
    }
}
