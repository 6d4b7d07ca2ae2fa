//! CPU affinity of the calling thread and of the threads that it starts later (sched_setaffinity(2)).

use std::io;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Returns the processors that the calling thread may run on, in ascending order: those of the machine without
/// those excluded by a container, `taskset` or [`pin_current_thread`].
///
/// # Errors
/// `EINVAL` on a machine with more than 1024 processors.
pub fn allowed() -> io::Result<Vec<usize>> {
    let set = sched_getaffinity(None)?;
    Ok((0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect())
}

/// Pins the calling thread, and threads that it starts later, to processor `cpu`.
///
/// # Errors
/// `InvalidInput`, if there is no such processor or the container does not allow it.
pub fn pin_current_thread(cpu: usize) -> io::Result<()> {
    restrict_current_thread(&[cpu])
}

/// Restricts the calling thread, and threads that it starts later, to the processors `cpus`.
///
/// # Errors
/// `InvalidInput`, if none of them exists or the container allows none.
pub fn restrict_current_thread(cpus: &[usize]) -> io::Result<()> {
    if cpus.iter().any(|&cpu| cpu >= CpuSet::MAX_CPU) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut set = CpuSet::new();
    cpus.iter().for_each(|&cpu| set.set(cpu));
    Ok(sched_setaffinity(None, &set)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pinned_thread_runs_where_it_was_pinned() {
        let all = allowed().unwrap();
        assert!(!all.is_empty());
        for &cpu in &all {
            let all = all.clone();
            std::thread::spawn(move || {
                pin_current_thread(cpu).unwrap();
                assert_eq!(allowed().unwrap(), [cpu]);
                assert_eq!(rustix::thread::sched_getcpu(), cpu);
                restrict_current_thread(&all).unwrap();
                assert_eq!(allowed().unwrap(), all);
                assert!(restrict_current_thread(&[]).is_err());
            })
            .join()
            .unwrap();
        }
        assert_eq!(allowed().unwrap(), all);
    }

    #[test]
    fn a_missing_processor_is_an_error() {
        for cpu in [1023, 1024, usize::MAX] {
            assert_eq!(pin_current_thread(cpu).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        }
    }
}
