//! The matrix: what becomes of the switch, and what rings its guests have. One [`Case`] is one run, and its figures are rows.

use std::fmt;

use ringferry_virtio_net::Features;
use serde::{Deserialize, Serialize};

use crate::experiment::Better;
use crate::labels::Labels;

/// What becomes of the switch while its guests send.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Event {
    /// Nothing: the baseline.
    None,
    /// Another process takes its place (`run --replace`).
    Replace,
    /// It is killed, and `ringferry keep` starts the next one.
    Kill,
}

impl Event {
    pub(super) const ALL: [Event; 3] = [Event::None, Event::Replace, Event::Kill];
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Event::None => "none",
            Event::Replace => "replace",
            Event::Kill => "kill",
        })
    }
}

/// The partner of each guest, at the other end of its flows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Partner {
    /// Another guest.
    Guest,
    /// The kernel, behind a tap of the switch's.
    Tap,
    /// The kernel, behind a tap of `ringferry guest`.
    Program,
}

impl Partner {
    pub(super) const ALL: [Partner; 3] = [Partner::Guest, Partner::Tap, Partner::Program];

    /// Returns true if it takes a network namespace, with taps in it.
    pub(super) fn needs_network(self) -> bool {
        self != Partner::Guest
    }
}

impl fmt::Display for Partner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Partner::Guest => "guest",
            Partner::Tap => "tap",
            Partner::Program => "ringferry-guest",
        })
    }
}

/// The guests' rings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Layout {
    Split,
    Packed,
    PackedInOrder,
}

impl Layout {
    pub(super) const ALL: [Layout; 3] = [Layout::Split, Layout::Packed, Layout::PackedInOrder];

    pub(super) fn features(self) -> Features {
        match self {
            Layout::Split => Features::empty(),
            Layout::Packed => Features::RING_PACKED,
            Layout::PackedInOrder => Features::RING_PACKED | Features::IN_ORDER,
        }
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Layout::Split => "split",
            Layout::Packed => "packed",
            Layout::PackedInOrder => "packed-in-order",
        })
    }
}

/// Frames that a worker has in its hands at most: a burst.
const IN_HANDS: u16 = 32;

/// A figure of a run, each in a row of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Figure {
    /// The longest pause of any flow around an event: of all events of the run the one in the middle.
    GapMedian,
    /// The longest of all events.
    GapMax,
    /// Frames that were sent and never arrived.
    Lost,
    /// Frames that arrived twice, or behind a later one of their flow.
    Disordered,
}

impl Figure {
    pub(super) const ALL: [Figure; 4] = [Figure::GapMedian, Figure::GapMax, Figure::Lost, Figure::Disordered];

    pub(super) fn unit(self) -> &'static str {
        match self {
            Figure::GapMedian | Figure::GapMax => "ms",
            Figure::Lost | Figure::Disordered => "frames",
        }
    }

    pub(super) fn better(self) -> Better {
        Better::Lower
    }

    /// The worst value that is good enough, in the figure's unit, of so many events with so many workers.
    pub(super) fn bound(self, event: Event, events: u16, workers: u16) -> Option<f64> {
        match (self, event) {
            (_, Event::None) => None,
            (Figure::GapMedian | Figure::GapMax, Event::Replace) => Some(5.0),
            (Figure::GapMedian | Figure::GapMax, Event::Kill) => Some(100.0),
            // What a worker that is killed has in its hands is lost with it, or comes twice.
            (Figure::Lost | Figure::Disordered, Event::Kill) => {
                Some(f64::from(IN_HANDS) * f64::from(events) * f64::from(workers))
            }
            (Figure::Lost | Figure::Disordered, Event::Replace) => Some(0.0),
        }
    }
}

impl fmt::Display for Figure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Figure::GapMedian => "gap-median",
            Figure::GapMax => "gap-max",
            Figure::Lost => "lost",
            Figure::Disordered => "disordered",
        })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Case {
    pub event: Event,
    pub partner: Partner,
    pub layout: Layout,
}

impl Case {
    /// All cases, the baselines first.
    pub(super) fn all() -> impl Iterator<Item = Case> {
        Event::ALL.into_iter().flat_map(|event| {
            Partner::ALL.into_iter().flat_map(move |partner| {
                Layout::ALL.into_iter().map(move |layout| Case { event, partner, layout })
            })
        })
    }

    pub(super) fn labels(&self, figure: Figure) -> Labels {
        let labels = Labels::new().with("event", self.event).with("figure", figure);
        labels.with("partner", self.partner).with("ring", self.layout)
    }

    /// Rows of one figure, one partner and one kind of ring stand together.
    pub(super) fn group(&self, figure: Figure) -> String {
        format!("{figure}, {}, {}", self.partner, self.layout)
    }

    /// The same without the event.
    pub(super) fn quiet(&self) -> Case {
        Case { event: Event::None, ..*self }
    }
}
