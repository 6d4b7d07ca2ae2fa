//! One run, several rows: what was measured once has several figures, and each is compared with its like.
//!
//! The lab asks the rows of a run one after the other for the figures of the same sample ([`Run::sample`]), which the first of them
//! measures. The rows say by [`Row::of_run`](crate::experiment::Row::of_run) that they belong together.

use std::cell::RefCell;
use std::rc::Rc;

use crate::experiment::{Measure, RowError, Run, Sample};

/// The last sample, its figures, and whether each row has had its own.
struct Last<const N: usize> {
    sample: u64,
    figures: Result<[Option<Sample>; N], RowError>,
}

/// The measure functions of `N` rows.
pub(super) fn shared<const N: usize>(
    measure: impl Fn(&Run<'_>) -> Result<[Sample; N], RowError> + 'static,
) -> [Measure; N] {
    let (measure, last) = (Rc::new(measure), Rc::new(RefCell::new(None::<Last<N>>)));
    std::array::from_fn(|row| -> Measure {
        let (measure, last) = (Rc::clone(&measure), Rc::clone(&last));
        Box::new(move |run: &Run<'_>| {
            let mut last = last.borrow_mut();
            let same = last.take().filter(|last| last.sample == run.sample);
            let last = last.insert(same.unwrap_or_else(|| Last {
                sample: run.sample,
                figures: measure(run).map(|figures| figures.map(Some)),
            }));
            match &mut last.figures {
                Ok(figures) => {
                    figures[row].take().ok_or_else(|| RowError::failed("a row has its figure already"))
                }
                Err(error) => Err(error.clone()),
            }
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
            if count.get() == 3 {
                return Err(RowError::failed("the third"));
            }
            Ok([Sample::new(f64::from(count.get())), Sample::new(-f64::from(count.get()))])
        });
        let stop = Stop::new();
        let run =
            |sample| Run { seconds: Duration::ZERO, seed: 0, round: 1, sample, cpus: &[0], stop: &stop };
        let value = |sample: Result<Sample, RowError>| sample.unwrap().value;
        // In either order.
        assert_eq!((value(first(&run(0))), value(second(&run(0)))), (1.0, -1.0));
        assert_eq!((value(second(&run(1))), value(first(&run(1)))), (-2.0, 2.0));
        assert!(first(&run(1)).is_err(), "no value is used twice");
        // A run that failed failed for all its rows, and is not made again for each.
        assert!(first(&run(2)).is_err() && second(&run(2)).is_err());
        assert_eq!((value(first(&run(3))), value(second(&run(4))), runs.get()), (4.0, -5.0, 5));
    }
}
