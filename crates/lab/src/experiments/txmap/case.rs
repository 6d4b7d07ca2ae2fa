//! The rows: which stream, through which limit, over which path.

use crate::experiment::Published;
use crate::labels::Labels;

/// Bytes of one send: what the application hands to the stack at a time.
pub(super) const SENDS: [usize; 9] = [64, 128, 256, 512, 1024, 4096, 16 << 10, 64 << 10, 256 << 10];
/// The sends that all others are compared with.
pub(super) const LARGEST: usize = 256 << 10;
/// Most segments of a packet: what devices take for one that they are to cut up.
pub(super) const LIMITS: [u16; 4] = [8, 16, 32, 64];
/// The limit of kernel rows, unless all are asked for: what the driver has by itself.
const KERNEL_LIMIT: u16 = 32;
/// Largest buffer that a guest reads a packet into: all of a packet.
const LARGEST_PIECE: usize = 64 << 10;

/// The driver that the framework sends into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Path {
    /// A driver that takes everything at once.
    Null,
    /// A virtqueue, and our device half on another processor, which copies every byte out.
    Virtio,
}

impl Path {
    pub(super) const ALL: [Path; 2] = [Path::Null, Path::Virtio];

    pub(super) fn name(self) -> &'static str {
        match self {
            Path::Null => "null",
            Path::Virtio => "virtio",
        }
    }
}

/// A stream of sends that a stack made for the purpose turns into packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Synthetic {
    pub path: Path,
    pub send: usize,
    /// Most segments of a packet.
    pub limit: u16,
    /// True if the stack puts a send behind the one before, false if each goes into buffers of its own.
    pub coalesces: bool,
}

impl Synthetic {
    /// All of them. Packets of a stack that coalesces fit every limit, so they go through the smallest.
    pub(super) fn all() -> impl Iterator<Item = Synthetic> {
        let stacks = LIMITS.map(|limit| (limit, false)).into_iter().chain([(LIMITS[0], true)]);
        Path::ALL.into_iter().flat_map(move |path| {
            stacks.clone().flat_map(move |(limit, coalesces)| {
                // The baseline first: its A/A row shows what the others may be off by.
                SENDS.into_iter().rev().map(move |send| Synthetic { path, send, limit, coalesces })
            })
        })
    }

    pub(super) fn labels(&self) -> Labels {
        let labels =
            Labels::new().with("path", self.path.name()).with("limit", self.limit).with("send", self.send);
        if self.coalesces { labels.with("stack", "coalescing") } else { labels }
    }

    /// The largest sends through the same limit, over the same path.
    pub(super) fn baseline(&self) -> Option<Synthetic> {
        (self.send != LARGEST).then_some(Synthetic { send: LARGEST, ..*self })
    }

    pub(super) fn group(&self) -> String {
        let stack = if self.coalesces { ", a stack that coalesces" } else { "" };
        format!("{}, {} segments{stack}", self.path.name(), self.limit)
    }
}

/// A single-buffer packet, sent with or without the planner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Direct {
    pub path: Path,
    /// True if the framework's queue sends it, planner and all.
    pub planner: bool,
}

impl Direct {
    pub(super) fn all() -> impl Iterator<Item = Direct> {
        Path::ALL.into_iter().flat_map(|path| [false, true].map(|planner| Direct { path, planner }))
    }

    pub(super) fn labels(&self) -> Labels {
        let planner = if self.planner { "on" } else { "off" };
        Labels::new()
            .with("path", self.path.name())
            .with("frame", super::direct::FRAME)
            .with("planner", planner)
    }

    pub(super) fn baseline(&self) -> Option<Direct> {
        self.planner.then_some(Direct { planner: false, ..*self })
    }

    pub(super) fn group(&self) -> String {
        format!("{}, single buffers", self.path.name())
    }
}

/// A TCP stream of the kernel's, through two guests and the switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Kernel {
    /// Bytes that the application writes at a time.
    pub send: usize,
    /// Bytes of the buffers that the sending guest reads packets into.
    pub piece: usize,
    /// Most segments of a packet of the sending guest.
    pub limit: u16,
}

impl Kernel {
    /// Through one limit, or through every one.
    pub(super) fn all(every_limit: bool) -> impl Iterator<Item = Kernel> {
        let limits = LIMITS.into_iter().filter(move |limit| every_limit || *limit == KERNEL_LIMIT);
        limits.flat_map(|limit| {
            let sends = SENDS.into_iter().rev().map(|send| (send, send.min(LARGEST_PIECE)));
            // What small sends cost the socket has nothing to do with mapping: here only the pieces are small.
            let pieces = [512, 64].map(|piece| (LARGEST, piece));
            sends.chain(pieces).map(move |(send, piece)| Kernel { send, piece, limit })
        })
    }

    pub(super) fn labels(&self) -> Labels {
        Labels::new()
            .with("path", "kernel")
            .with("limit", self.limit)
            .with("send", self.send)
            .with("pieces", self.piece)
    }

    /// The largest sends in the largest pieces.
    pub(super) fn baseline(&self) -> Option<Kernel> {
        let largest = Kernel { send: LARGEST, piece: LARGEST_PIECE, ..*self };
        (*self != largest).then_some(largest)
    }

    pub(super) fn group(&self) -> String {
        format!("kernel TCP, {} segments", self.limit)
    }

    /// The figures that others measured with sends of this size.
    pub(super) fn published(&self) -> Vec<Published> {
        let figure = |what, mbit: f64| Published::new(what, mbit / 1000.0, "Gbit/s", SOURCE);
        match (self.send, self.piece) {
            (512, 512) => vec![
                figure("512-byte sends, packets dropped when collapse fails", 388.0),
                figure("512-byte sends, defrag after a failed collapse", 3119.0),
                figure("512-byte sends, and one segment fewer told to the stack", 3440.0),
            ],
            (LARGEST, LARGEST_PIECE) => vec![
                figure("256 KiB sends, packets dropped when collapse fails", 4372.0),
                figure("256 KiB sends, defrag after a failed collapse", 4367.0),
                figure("256 KiB sends, and one segment fewer told to the stack", 4361.0),
            ],
            _ => Vec::new(),
        }
    }
}

/// Where the published figures come from.
const SOURCE: &str = "netperf TCP stream through FreeBSD's iflib, 10 GbE, 20 runs";

/// Figures of the same measurements that belong to no row.
pub(super) fn published() -> Vec<Published> {
    let chains = |what, value| Published::new(what, value, "packets per queue", SOURCE);
    vec![
        Published::new(
            "512-byte sends, packets dropped when collapse fails, one run",
            0.391_77,
            "Gbit/s",
            SOURCE,
        ),
        chains("collapse failed, fewest", 7000.0),
        chains("collapse failed, most", 36_000.0),
        chains("collapse failed and defrag did not help, at most", 3.0),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_row_has_a_name_of_its_own_and_its_baseline_is_a_row() {
        let synthetic: Vec<_> = Synthetic::all().collect();
        let direct: Vec<_> = Direct::all().collect();
        let kernel: Vec<_> = Kernel::all(true).collect();
        let mut names = BTreeSet::new();
        names.extend(synthetic.iter().map(|case| case.labels().to_string()));
        names.extend(direct.iter().map(|case| case.labels().to_string()));
        names.extend(kernel.iter().map(|case| case.labels().to_string()));
        assert_eq!(names.len(), synthetic.len() + direct.len() + kernel.len());
        let baselines = synthetic.iter().filter_map(|case| Some(case.baseline()?.labels()));
        let baselines = baselines.chain(direct.iter().filter_map(|case| Some(case.baseline()?.labels())));
        let baselines = baselines.chain(kernel.iter().filter_map(|case| Some(case.baseline()?.labels())));
        assert!(baselines.map(|labels| labels.to_string()).all(|name| names.contains(&name)));
        assert_eq!(synthetic.len(), 2 * (4 + 1) * 9);
        assert_eq!(Kernel::all(false).count(), 9 + 2);
    }

    #[test]
    fn published_figures_stand_beside_the_sends_they_are_about() {
        let figures: Vec<_> = Kernel::all(false).flat_map(|case| case.published()).collect();
        let values: Vec<f64> = figures.iter().map(|figure| figure.value).collect();
        assert_eq!(values, [4.372, 4.367, 4.361, 0.388, 3.119, 3.44]);
    }
}
