//! One run, two rows: what was measured once has two figures, and each is compared with its like.
//!
//! The lab asks rows in any order, and the first of a group twice. A run is made for whoever asks first; the figure of the
//! other row waits until it is asked in the same round. Who asks again gets another run, so no value is used twice.

use std::cell::RefCell;
use std::rc::Rc;

use crate::experiment::{Measure, RowError, Run, Sample};

/// The figure that waits for each row, and the round that it was measured in.
type Waiting = Rc<RefCell<[Option<(usize, Sample)>; 2]>>;

/// The measure functions of both rows.
pub(super) fn both(measure: impl Fn(&Run<'_>) -> Result<[Sample; 2], RowError> + 'static) -> [Measure; 2] {
    let (measure, waiting) = (Rc::new(measure), Waiting::default());
    [0, 1].map(|row| -> Measure {
        let (measure, waiting) = (Rc::clone(&measure), Rc::clone(&waiting));
        Box::new(move |run: &Run<'_>| {
            let found = waiting.borrow_mut()[row].take();
            if let Some((_, sample)) = found.filter(|(round, _)| *round == run.round) {
                return Ok(sample);
            }
            let [first, second] = measure(run)?;
            let (own, other) = if row == 0 { (first, second) } else { (second, first) };
            waiting.borrow_mut()[1 - row] = Some((run.round, other));
            Ok(own)
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
        let [mut first, mut second] = both(move |_| {
            count.set(count.get() + 1);
            if count.get() == 5 {
                return Err(RowError::failed("the fifth"));
            }
            Ok([Sample::new(f64::from(count.get())), Sample::new(-f64::from(count.get()))])
        });
        let stop = Stop::new();
        let run = |round| Run { seconds: Duration::ZERO, seed: 0, round, cpus: &[0], stop: &stop };
        let value = |sample: Result<Sample, RowError>| sample.unwrap().value;
        // In either order; again is another run.
        assert_eq!((value(first(&run(0))), value(second(&run(0)))), (1.0, -1.0));
        assert_eq!(
            (value(second(&run(1))), value(second(&run(1))), value(first(&run(1)))),
            (-2.0, -3.0, 3.0)
        );
        // What waits from the last round is not of this one.
        assert_eq!(value(second(&run(1))), -4.0);
        assert!(first(&run(2)).is_err());
        assert_eq!((value(first(&run(2))), value(second(&run(2))), runs.get()), (6.0, -6.0, 6));
    }
}
