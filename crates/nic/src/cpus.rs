//! Placement of queues on CPUs: a pure function, called once per queue at set-up.
//!
//! User space binds no interrupts: the *call* of a queue, the event that wakes its thread, is handled by that
//! thread on its own CPU. The table of placements is in [the guide](crate::guide::cpus).

/// The direction of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// The queue receives packets.
    Rx,
    /// The queue transmits packets.
    Tx,
}

/// Options for the placement of a device's queues on CPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuOptions {
    /// Number of receive queues of the device.
    pub rx_queues: usize,
    /// Places the transmit queues on the CPUs behind those of all receive queues, instead of on the CPU of
    /// the receive queue with the same number.
    pub separate_txrx: bool,
    /// Number of CPUs to skip at the beginning, for example those used by another device's queues.
    pub core_offset: usize,
}

/// Returns the CPU out of `online` for a queue and its call, or `None` if `online` is empty.
///
/// By default both queues of pair i get the i-th CPU, because packets received by one are often sent by the
/// other. If there are more queues than CPUs, CPUs are used again from the first.
///
/// ```
/// # use ringferry_nic::cpus::{CpuOptions, Direction::*, cpu_for_queue};
/// let options = CpuOptions { rx_queues: 2, separate_txrx: true, core_offset: 1 };
/// assert_eq!(cpu_for_queue(1, Rx, &[0, 2, 4, 6, 8], &options), Some(4));
/// assert_eq!(cpu_for_queue(1, Tx, &[0, 2, 4, 6, 8], &options), Some(8));
/// ```
pub fn cpu_for_queue(
    queue: usize,
    direction: Direction,
    online: &[usize],
    options: &CpuOptions,
) -> Option<usize> {
    let before = if options.separate_txrx && direction == Direction::Tx { options.rx_queues } else { 0 };
    let at = options.core_offset.wrapping_add(before).wrapping_add(queue).checked_rem(online.len())?;
    online.get(at).copied()
}

#[cfg(test)]
mod tests {
    use super::Direction::{Rx, Tx};
    use super::*;

    /// Formats a row of the table in the guide: CPUs of the receive queues, then of the transmit queues.
    fn row(pairs: usize, online: &[usize], separate_txrx: bool, core_offset: usize) -> String {
        let options = CpuOptions { rx_queues: pairs, separate_txrx, core_offset };
        let cpus = |direction| {
            let of = |queue| cpu_for_queue(queue, direction, online, &options).unwrap().to_string();
            (0..pairs).map(of).collect::<Vec<_>>().join(" ")
        };
        let online: Vec<_> = online.iter().map(ToString::to_string).collect();
        let separate = if separate_txrx { "yes" } else { "no" };
        format!(
            "| {pairs} | {} | {separate} | {core_offset} | {} | {} |",
            online.join(" "),
            cpus(Rx),
            cpus(Tx)
        )
    }

    #[test]
    fn the_table_in_the_guide_is_what_the_function_says() {
        let rows = [
            row(2, &[0, 1, 2, 3], false, 0),
            row(2, &[0, 1, 2, 3], true, 0),
            row(2, &[0, 1, 2, 3], false, 2),
            row(2, &[0, 1, 2, 3], true, 1),
            row(4, &[0, 1, 2, 3], true, 0),
            row(4, &[0, 1], false, 0),
            row(3, &[2, 3, 6, 7], true, 0),
        ];
        let guide = include_str!("../docs/cpus.md");
        let table: Vec<_> = guide.lines().filter(|line| line.starts_with("| ")).skip(1).collect();
        assert_eq!(table, rows);
    }

    #[test]
    fn no_cpu_and_absurd_numbers_are_not_a_panic() {
        let options = CpuOptions { rx_queues: usize::MAX, separate_txrx: true, core_offset: usize::MAX };
        assert_eq!(cpu_for_queue(usize::MAX, Tx, &[], &options), None);
        assert!(cpu_for_queue(usize::MAX, Tx, &[4, 5], &options).is_some());
    }
}
