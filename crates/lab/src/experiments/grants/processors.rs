//! Assigns processors to threads.

use ringferry_sys::cpu;

use crate::experiment::RowError;

/// The processor of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Processor {
    cpu: Option<usize>,
    /// True if other threads of the run need it, too.
    shared: bool,
}

impl Processor {
    /// Processors of the threads of one side, the back end's or the front end's: one for each, or else half of them for
    /// either side, as host and guest have their own.
    pub(super) fn of_side(cpus: &[usize], front: bool, queues: usize) -> Vec<Processor> {
        let shared = cpus.len() < 2 * queues;
        let (back, rest) = cpus.split_at(if shared { cpus.len() / 2 } else { queues });
        let own = if front { rest } else { back };
        // Both on the only one there is.
        let own = if own.is_empty() || cpus.len() < 2 { &[] } else { own };
        let cpu = |queue: usize| own.get(queue % own.len().max(1)).copied();
        (0..queues).map(|queue| Processor { cpu: cpu(queue), shared }).collect()
    }

    /// How many processors so many threads can keep busy.
    pub(super) fn count(side: &[Processor]) -> usize {
        let mut cpus: Vec<_> = side.iter().map(|processor| processor.cpu).collect();
        cpus.sort_unstable();
        cpus.dedup();
        cpus.len()
    }

    /// Binds the calling thread to it.
    pub(super) fn pin(&self) -> Result<(), RowError> {
        Ok(self.cpu.map_or(Ok(()), cpu::pin_current_thread)?)
    }

    /// There was nothing to do.
    #[inline]
    pub(super) fn idle(&self) {
        if self.shared { std::thread::yield_now() } else { std::hint::spin_loop() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sides_never_share_a_processor_while_there_are_two() {
        let cpus = |cpus: &[usize], front, queues| {
            let side = Processor::of_side(cpus, front, queues);
            (side.iter().map(|processor| processor.cpu).collect::<Vec<_>>(), side[0].shared)
        };
        assert_eq!(cpus(&[3, 4], false, 1), (vec![Some(3)], false));
        assert_eq!(cpus(&[3, 4], true, 1), (vec![Some(4)], false));
        assert_eq!(cpus(&[3, 4], false, 2), (vec![Some(3); 2], true));
        assert_eq!(cpus(&[3, 4], true, 2), (vec![Some(4); 2], true));
        assert_eq!(cpus(&[0, 1, 2, 3], true, 2), (vec![Some(2), Some(3)], false));
        assert_eq!(cpus(&[0, 1, 2], true, 2), (vec![Some(1), Some(2)], true));
        for front in [false, true] {
            assert_eq!(cpus(&[5], front, 2), (vec![None; 2], true));
        }
        assert_eq!(Processor::count(&Processor::of_side(&[3, 4], true, 2)), 1);
        assert_eq!(Processor::count(&Processor::of_side(&[0, 1, 2, 3], true, 2)), 2);
    }
}
