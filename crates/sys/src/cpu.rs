//! Which processors a thread may run on.

use std::io;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// The processors the calling thread may run on, in rising order: those of the machine less what a container,
/// `taskset` or [`pin_current_thread`] took away.
///
/// # Errors
/// A machine with more than 1024 processors.
pub fn allowed() -> io::Result<Vec<usize>> {
    let set = sched_getaffinity(None)?;
    Ok((0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect())
}

/// Lets the calling thread, and threads it starts later, run on processor `cpu` only.
///
/// # Errors
/// `InvalidInput` when there is no such processor or the container does not allow it.
pub fn pin_current_thread(cpu: usize) -> io::Result<()> {
    restrict_current_thread(&[cpu])
}

/// Lets the calling thread, and threads it starts later, run on these processors only.
///
/// # Errors
/// `InvalidInput` when there is none of them, or the container allows none.
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
