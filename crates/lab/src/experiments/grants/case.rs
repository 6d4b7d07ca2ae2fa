//! The rows: which way, how large, over how many queues, and how pages are reached.

use std::fmt;

use ringferry_xen::domain::PAGE;
use ringferry_xen_net::netback;
use serde::{Deserialize, Serialize};

use crate::experiment::Published;
use crate::frames::segments::Frames;
use crate::labels::Labels;

/// Bytes of the frames, as published.
pub(super) const SIZES: [usize; 3] = [64, 1496, 65_535];

/// Bytes that a queue handles at a time, if that is fewer than [`BURST`] frames: a quarter of a ring of pages.
const BURST_BYTES: usize = 256 * 1024;

/// Frames that a queue handles at a time: the switch's choice.
const BURST: usize = 32;

/// Bounds of the cache that are tried: from one that never evicts here to one that does little else.
pub(super) const BOUNDS: [usize; 6] = [1024, 512, 256, 128, 64, 16];

/// The direction of frames, as always with Xen seen from the front end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Direction {
    Transmit,
    Receive,
}

impl fmt::Display for Direction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Direction::Transmit => "transmit",
            Direction::Receive => "receive",
        })
    }
}

/// How the back end reaches the front end's pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Mode {
    /// Each is mapped at its second use and stays.
    Persistent,
    /// All are mapped before the first packet, as the front end has asked on the control ring.
    Static,
    /// Each is mapped for one burst.
    Map,
    Copy,
}

impl Mode {
    /// All modes. The first is the one that others are compared with.
    const ALL: [Mode; 4] = [Mode::Persistent, Mode::Static, Mode::Map, Mode::Copy];

    /// How the back end deals with pages that are not static.
    pub(super) fn netback(self) -> netback::Mode {
        match self {
            Mode::Persistent => netback::Mode::Persistent,
            Mode::Map => netback::Mode::Map,
            Mode::Static | Mode::Copy => netback::Mode::Copy,
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Mode::Persistent => "persistent",
            Mode::Static => "static",
            Mode::Map => "map",
            Mode::Copy => "copy",
        })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Case {
    pub direction: Direction,
    pub size: usize,
    pub queues: usize,
    pub mode: Mode,
    /// Pages that a queue may keep mapped.
    pub pages: usize,
    /// True if the row is about that bound.
    bound: bool,
}

impl Case {
    /// The modes against each other, over each of these numbers of queues.
    pub(super) fn all(queues: &[usize]) -> Vec<Case> {
        let mut cases = Vec::new();
        for &queues in queues {
            for direction in [Direction::Transmit, Direction::Receive] {
                for size in SIZES {
                    let pages = netback::DEFAULT_PAGES;
                    cases.extend(Mode::ALL.map(|mode| Case {
                        direction,
                        size,
                        queues,
                        mode,
                        pages,
                        bound: false,
                    }));
                }
            }
        }
        cases
    }

    /// Caches of fewer and fewer pages against none.
    pub(super) fn bounds() -> Vec<Case> {
        let mut cases = Vec::new();
        for direction in [Direction::Transmit, Direction::Receive] {
            let copy = Case {
                direction,
                size: 1496,
                queues: 1,
                mode: Mode::Copy,
                pages: netback::DEFAULT_PAGES,
                bound: true,
            };
            cases.push(copy);
            cases.extend(BOUNDS.map(|pages| Case { mode: Mode::Persistent, pages, ..copy }));
        }
        cases
    }

    pub(super) fn labels(&self) -> Labels {
        let labels = if self.bound { Labels::new().with("test", "bound") } else { Labels::new() };
        let labels = labels.with("direction", self.direction).with("size", self.size);
        let labels = labels.with("queues", self.queues).with("mode", self.mode);
        if self.bound && self.mode == Mode::Persistent { labels.with("pages", self.pages) } else { labels }
    }

    pub(super) fn group(&self) -> String {
        let Case { direction, size, queues, .. } = self;
        match (self.bound, queues) {
            (true, _) => format!("bound of the cache, {direction} {size} bytes"),
            (false, 1) => format!("{direction} {size} bytes, 1 queue"),
            (false, _) => format!("{direction} {size} bytes, {queues} queues"),
        }
    }

    /// The case it is compared with: persistent grants, so that the comparisons with all others have intervals; caches with
    /// none.
    pub(super) fn baseline(&self) -> Option<Case> {
        let first = if self.bound {
            Case { mode: Mode::Copy, pages: netback::DEFAULT_PAGES, ..*self }
        } else {
            Case { mode: Mode::Persistent, ..*self }
        };
        (first != *self).then_some(first)
    }

    /// Frames that a queue handles at a time, in every mode.
    pub(super) fn burst(&self) -> usize {
        (BURST_BYTES / self.size).clamp(1, BURST)
    }

    /// Frames of each queue that are looked at whole before anything is timed.
    pub(super) fn checked(&self) -> u64 {
        if self.size > 4096 { 300 } else { 3000 }
    }

    /// The frames of a queue: those larger than a page are to be cut.
    pub(super) fn frames(&self) -> Frames {
        Frames::new(self.size, self.size > PAGE, self.checked())
    }

    /// The figure that was published for it.
    pub(super) fn published(&self) -> Option<Published> {
        if self.bound || self.queues != 1 {
            return None;
        }
        let [base, persistent] = match (self.direction, self.size) {
            (Direction::Transmit, 64) => [1240.0, 1820.0],
            (Direction::Transmit, 1496) => [518.0, 1480.0],
            (Direction::Transmit, 65_535) => [66.4, 205.1],
            (Direction::Receive, 64) => [1330.0, 2780.0],
            (Direction::Receive, 1496) => [1030.0, 1660.0],
            (Direction::Receive, 65_535) => [52.5, 97.8],
            _ => return None,
        };
        let source = "Xen 4.5, Xeon E5-1650 v2, guest and host, kernel drivers";
        match self.mode {
            Mode::Copy => Some(Published::new("before persistent grants", base, "kpps", source)),
            Mode::Persistent => Some(Published::new("with persistent grants", persistent, "kpps", source)),
            Mode::Map | Mode::Static => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_row_has_a_name_of_its_own_and_a_baseline_in_its_group() {
        let cases: Vec<_> = Case::all(&[1, 2, 4]).into_iter().chain(Case::bounds()).collect();
        let names: BTreeSet<_> = cases.iter().map(|case| case.labels().to_string()).collect();
        assert_eq!((names.len(), cases.len()), (86, 86));
        for case in &cases {
            match case.baseline() {
                Some(first) => assert!(cases.contains(&first) && first.group() == case.group()),
                // The first of its group: what is measured twice.
                None => assert_eq!(cases.iter().find(|other| other.group() == case.group()), Some(case)),
            }
        }
        assert_eq!(cases.iter().filter(|case| case.published().is_some()).count(), 12);
    }
}
