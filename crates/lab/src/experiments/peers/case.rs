//! The matrix: who drives, who serves, and how. One [`Case`] is one row.

use std::fmt;

use ringferry_virtio_net::Features;

use crate::experiment::Published;
use crate::frames::numbered::{BURST, Checker, Format};
use crate::labels::Labels;

/// Sizes of frames in bytes, without checksum: smallest, small, largest of Ethernet, and as large as
/// a frame with its virtual header can be in one of DPDK's buffers (65535 bytes, 128 of them headroom).
pub(in crate::experiments) const SIZES: [usize; 4] = [64, 256, 1518, 65_000];

/// Bytes of a receive buffer in a mergeable ring when frames are larger than that: ringferry's own
/// choice, and DPDK is given the same. With smaller frames each side has its own default, one frame to a
/// buffer.
pub(in crate::experiments) const LARGE_BUFFER: usize = 4096;

/// The program that plays a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::experiments) enum Who {
    Ringferry,
    Dpdk,
}

impl fmt::Display for Who {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Who::Ringferry => "ringferry",
            Who::Dpdk => "dpdk",
        })
    }
}

/// The format of the virtqueues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::experiments) enum Ring {
    Split,
    SplitInOrder,
    Packed,
    PackedInOrder,
    /// The same ring, served by the vector routines of DPDK's driver where DPDK is the driver. They need
    /// buffers that are not mergeable.
    PackedVectorized,
}

impl Ring {
    pub(in crate::experiments) const ALL: [Ring; 5] =
        [Ring::Split, Ring::SplitInOrder, Ring::Packed, Ring::PackedInOrder, Ring::PackedVectorized];

    pub(in crate::experiments) fn packed(self) -> bool {
        !matches!(self, Ring::Split | Ring::SplitInOrder)
    }

    pub(in crate::experiments) fn in_order(self) -> bool {
        !matches!(self, Ring::Split | Ring::Packed)
    }
}

impl fmt::Display for Ring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Ring::Split => "split",
            Ring::SplitInOrder => "split-in-order",
            Ring::Packed => "packed",
            Ring::PackedInOrder => "packed-in-order",
            Ring::PackedVectorized => "packed-in-order-vectorized",
        })
    }
}

/// The direction of frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::experiments) enum Direction {
    /// From the driver to the device.
    Transmit,
    /// From the device to the driver.
    Receive,
    /// The same frames go round and round.
    Loopback,
}

impl Direction {
    pub(in crate::experiments) const ALL: [Direction; 3] =
        [Direction::Transmit, Direction::Receive, Direction::Loopback];
}

impl fmt::Display for Direction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Direction::Transmit => "transmit",
            Direction::Receive => "receive",
            Direction::Loopback => "loopback",
        })
    }
}

/// One row of the matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::experiments) struct Case {
    pub driver: Who,
    pub device: Who,
    pub ring: Ring,
    pub mergeable: bool,
    pub size: usize,
    pub direction: Direction,
    pub queue: u16,
}

impl Case {
    /// All of them, by size and direction, then ring, then pair.
    pub(in crate::experiments) fn all(queue: u16) -> Vec<Case> {
        let mut cases = Vec::new();
        let pairs = [
            (Who::Dpdk, Who::Dpdk),
            (Who::Ringferry, Who::Ringferry),
            (Who::Ringferry, Who::Dpdk),
            (Who::Dpdk, Who::Ringferry),
        ];
        for size in SIZES {
            for direction in Direction::ALL {
                for ring in Ring::ALL {
                    for mergeable in [true, false] {
                        if mergeable && ring == Ring::PackedVectorized {
                            continue;
                        }
                        for (driver, device) in pairs {
                            cases.push(Case { driver, device, ring, mergeable, size, direction, queue });
                        }
                    }
                }
            }
        }
        cases
    }

    /// Returns true if the row is measured even when not all are asked for: the rows that tell most, in minutes.
    pub(in crate::experiments) fn by_default(&self) -> bool {
        self.mergeable && matches!(self.size, 64 | 1518)
    }

    pub(in crate::experiments) fn labels(&self) -> Labels {
        Labels::new()
            .with("size", self.size)
            .with("direction", self.direction)
            .with("ring", self.ring)
            .with("mergeable", if self.mergeable { "on" } else { "off" })
            .with("driver", self.driver)
            .with("device", self.device)
    }

    /// DPDK with itself in the same circumstances.
    pub(in crate::experiments) fn baseline(&self) -> Case {
        Case { driver: Who::Dpdk, device: Who::Dpdk, ..*self }
    }

    /// Rows that are drawn together.
    pub(in crate::experiments) fn group(&self) -> String {
        format!("{} bytes, {}", self.size, self.direction)
    }

    pub(in crate::experiments) fn needs_dpdk(&self) -> bool {
        self.driver == Who::Dpdk || self.device == Who::Dpdk
    }

    /// The features both ends agree on: what DPDK's driver takes when it is told of this ring (no EVENT_IDX,
    /// no offloads), and so what ringferry asks for and offers too.
    pub(in crate::experiments) fn features(&self) -> Features {
        let mut features = Features::VERSION_1 | Features::INDIRECT_DESC;
        features.set(Features::MRG_RXBUF, self.mergeable);
        features.set(Features::RING_PACKED, self.ring.packed());
        features.set(Features::IN_ORDER, self.ring.in_order());
        features
    }

    /// The checker for the frames that `sender` sends: testpmd does not number its own.
    pub(in crate::experiments) fn checker(&self, sender: Who) -> Checker {
        let format = Format::new(self.size);
        match sender {
            Who::Ringferry => Checker::numbered(format, self.checked()),
            Who::Dpdk => Checker::txonly(format),
        }
    }

    /// Frames that go round in a loop: what testpmd's `tx_first 8` sends; of frames that take several receive buffers,
    /// what half of those hold. A frame that finds no buffer is dropped, and a loop in which too many go round can lose all
    /// of them.
    pub(in crate::experiments) fn circulating(&self) -> u64 {
        if self.size <= LARGE_BUFFER { 8 * BURST as u64 } else { self.window() }
    }

    /// Frames that may be under way while they are checked: half of what fits into the receive buffers,
    /// so that none is lost.
    pub(in crate::experiments) fn window(&self) -> u64 {
        let buffers = self.size.div_ceil(LARGE_BUFFER / 2) as u64;
        (u64::from(self.queue) / (2 * buffers)).clamp(1, 4 * BURST as u64)
    }

    /// Frames that are checked before anything is measured: 32 MiB of them, which is many times round the
    /// ring with the smallest and a moment with the largest.
    pub(in crate::experiments) fn checked(&self) -> u64 {
        (32 * 1024 * 1024 / self.size as u64).clamp(500, 20_000)
    }

    /// The figure that DPDK was measured at in advance.
    pub(in crate::experiments) fn published(&self) -> Option<Published> {
        let column = match (self.size, self.direction) {
            (64, Direction::Receive) => 0,
            (64, Direction::Transmit) => 1,
            (64, Direction::Loopback) => 2,
            (1518, Direction::Receive) => 3,
            (1518, Direction::Transmit) => 4,
            (1518, Direction::Loopback) => 5,
            _ => return None,
        };
        let (.., values) = PUBLISHED
            .iter()
            .find(|(ring, mergeable, _)| (*ring, *mergeable) == (self.ring, self.mergeable))?;
        let what = format!("DPDK with itself, {}", self.baseline().labels());
        let source = "DPDK 22.11.11 on two cores of a virtual machine, measured in advance, median of 3";
        Some(Published::new(&what, values[column], "Mpps", source))
    }
}

/// DPDK with itself, in Mpps: 64 bytes receive, transmit, loopback, then 1518 bytes. Queues of 256 entries.
const PUBLISHED: [(Ring, bool, [f64; 6]); 9] = [
    (Ring::Split, true, [20.97, 18.80, 14.05, 8.60, 10.83, 5.07]),
    (Ring::SplitInOrder, true, [21.56, 28.22, 15.04, 8.77, 11.07, 5.28]),
    (Ring::Packed, true, [23.21, 24.39, 15.61, 9.36, 12.19, 6.14]),
    (Ring::PackedInOrder, true, [24.46, 27.25, 17.35, 9.40, 12.83, 6.39]),
    (Ring::Split, false, [21.80, 19.10, 14.74, 8.74, 10.76, 5.16]),
    (Ring::SplitInOrder, false, [21.41, 28.95, 14.93, 8.88, 11.03, 5.36]),
    (Ring::Packed, false, [24.47, 24.61, 15.40, 9.38, 12.06, 6.21]),
    (Ring::PackedInOrder, false, [23.70, 26.81, 17.74, 9.31, 13.04, 6.36]),
    (Ring::PackedVectorized, false, [23.35, 32.14, 18.17, 9.17, 13.12, 6.46]),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_has_a_name_of_its_own_and_its_baseline_is_a_row() {
        let cases = Case::all(256);
        let names: std::collections::BTreeSet<_> =
            cases.iter().map(|case| case.labels().to_string()).collect();
        assert_eq!(names.len(), cases.len());
        assert!(cases.iter().all(|case| names.contains(&case.baseline().labels().to_string())));
        assert!(cases.iter().filter(|case| case.by_default()).count() < 100);
        // 4 sizes, 3 directions, 4 pairs; 5 rings, of which one only without mergeable buffers.
        assert_eq!(cases.len(), 4 * 3 * 4 * 9);
    }

    #[test]
    fn vector_routines_are_never_asked_for_with_mergeable_buffers() {
        assert!(Case::all(256).iter().all(|case| !(case.mergeable && case.ring == Ring::PackedVectorized)));
    }

    #[test]
    fn frames_under_check_fit_the_receive_buffers() {
        for case in Case::all(256) {
            let buffers = if case.mergeable { case.size.div_ceil(LARGE_BUFFER / 2) } else { 1 };
            assert!(case.window() * buffers as u64 <= 256, "{case:?}");
        }
    }
}
