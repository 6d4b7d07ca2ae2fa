//! The matrix: which ends, how many ports, flows and frames, and who switches. One [`Case`] is one run, and its figures are
//! rows.

use std::fmt;

use ringferry_virtio_net::Features;
use serde::{Deserialize, Serialize};

use crate::experiment::{Better, Published};
use crate::frames::ways::Frames;
use crate::labels::Labels;

/// The kinds of the two ends of each way. A way is a pair of ports: frames go from its first to its second.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Ends {
    GuestGuest,
    GuestTap,
    TapGuest,
}

impl Ends {
    pub(super) const ALL: [Ends; 3] = [Ends::GuestGuest, Ends::GuestTap, Ends::TapGuest];

    /// Says of the first and the second port of a way whether they are taps.
    pub(super) fn taps(self) -> [bool; 2] {
        match self {
            Ends::GuestGuest => [false, false],
            Ends::GuestTap => [false, true],
            Ends::TapGuest => [true, false],
        }
    }
}

impl fmt::Display for Ends {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Ends::GuestGuest => "guest-guest",
            Ends::GuestTap => "guest-tap",
            Ends::TapGuest => "tap-guest",
        })
    }
}

/// The switch that is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Who {
    Ringferry,
    /// And with a firewall at each port: 10 000 networks that it denies, of which no frame is, and all else allowed.
    Firewall,
    /// From port to port as it comes.
    TestpmdIo,
    /// And with new Ethernet addresses.
    TestpmdMac,
    Ovs,
    /// The kernel's bridge between taps, which stand for guests, too.
    Bridge,
}

impl Who {
    pub(super) const ALL: [Who; 6] =
        [Who::Ringferry, Who::Firewall, Who::TestpmdIo, Who::TestpmdMac, Who::Ovs, Who::Bridge];

    pub(super) fn is_ringferry(self) -> bool {
        matches!(self, Who::Ringferry | Who::Firewall)
    }

    pub(super) fn is_testpmd(self) -> bool {
        matches!(self, Who::TestpmdIo | Who::TestpmdMac)
    }
}

impl fmt::Display for Who {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Who::Ringferry => "ringferry",
            Who::Firewall => "ringferry-firewall",
            Who::TestpmdIo => "testpmd-io",
            Who::TestpmdMac => "testpmd-mac",
            Who::Ovs => "ovs-dpdk",
            Who::Bridge => "bridge",
        })
    }
}

/// The virtqueues of the guests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Ring {
    /// The rings that every guest has.
    #[default]
    Split,
    Packed,
    PackedInOrder,
}

impl std::str::FromStr for Ring {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "split" => Ok(Ring::Split),
            "packed" => Ok(Ring::Packed),
            "packed-in-order" => Ok(Ring::PackedInOrder),
            _ => Err("`split`, `packed` or `packed-in-order`"),
        }
    }
}

/// Shares of the NDR at which latency is measured, in per cent.
pub(super) const LOADS: [u32; 3] = [10, 50, 90];

/// Frames a second that come one by one: nobody polls for as long as it takes until the next.
pub(super) const SINGLE: f64 = 1000.0;

/// The figures of a run, each in a row of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Figure {
    /// The rate that arrives when as much is sent as goes in.
    Rate,
    /// The most that passes without a loss (RFC 2544, 26.1).
    Ndr,
    /// The most that passes with a loss of a given share (RFC 8204, "partial drop rate").
    Pdr,
    /// 99 of 100 frames take no longer, at one of [`LOADS`].
    Latency(u32),
    /// The time that half of single frames take at most, each of which finds everybody asleep who sleeps at all: at [`SINGLE`].
    WakeUp,
    /// Processor time of the switch for what it carries at full load.
    CpuPerGigabyte,
    /// Processor time of the switch while nothing happens.
    IdleCpu,
}

impl Figure {
    pub(super) const ALL: [Figure; 9] = [
        Figure::Rate,
        Figure::Ndr,
        Figure::Pdr,
        Figure::Latency(LOADS[0]),
        Figure::Latency(LOADS[1]),
        Figure::Latency(LOADS[2]),
        Figure::WakeUp,
        Figure::CpuPerGigabyte,
        Figure::IdleCpu,
    ];

    pub(super) fn unit(self) -> &'static str {
        match self {
            Figure::Rate | Figure::Ndr | Figure::Pdr => "Mpps",
            Figure::Latency(_) | Figure::WakeUp => "µs",
            Figure::CpuPerGigabyte => "CPU s/GB",
            Figure::IdleCpu => "% of a CPU",
        }
    }

    pub(super) fn better(self) -> Better {
        match self {
            Figure::Rate | Figure::Ndr | Figure::Pdr => Better::Higher,
            _ => Better::Lower,
        }
    }
}

impl fmt::Display for Figure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Figure::Rate => f.write_str("rate"),
            Figure::Ndr => f.write_str("ndr"),
            Figure::Pdr => f.write_str("pdr"),
            Figure::Latency(load) => write!(f, "p99-at-{load}%"),
            Figure::WakeUp => f.write_str("wake-up"),
            Figure::CpuPerGigabyte => f.write_str("cpu"),
            Figure::IdleCpu => f.write_str("idle-cpu"),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Case {
    pub ends: Ends,
    /// Number of ports, which is even.
    pub ports: usize,
    /// Flows of each way. A flow has Ethernet addresses, IP addresses and a source port of its own.
    pub flows: u32,
    pub frames: Frames,
    pub who: Who,
}

/// Most flows, and numbers that are measured.
const FLOWS: [u32; 3] = [1, 1000, 100_000];
const PORTS: [usize; 2] = [2, 8];

impl Case {
    /// The whole matrix, or what tells most of it in a few minutes.
    pub(super) fn matrix(all: bool) -> Vec<Case> {
        let mut cases = Vec::new();
        for ends in Ends::ALL {
            for ports in PORTS {
                for frames in Frames::ALL {
                    for flows in FLOWS {
                        for who in Who::ALL {
                            cases.push(Case { ends, ports, flows, frames, who });
                        }
                    }
                }
            }
        }
        cases.retain(|case| all || case.by_default());
        cases
    }

    fn by_default(&self) -> bool {
        let guests = self.ends == Ends::GuestGuest;
        let asked = match self.flows {
            1000 => guests || self.frames == Frames::Mtu,
            // One stream to or from the host, which is what people measure with.
            1 => !guests && self.frames == Frames::Mtu,
            _ => false,
        };
        // What a firewall costs shows with small frames.
        let shows = self.who != Who::Firewall || guests && self.frames == Frames::Smallest;
        self.ports == 2 && asked && shows
    }

    pub(super) fn labels(&self, figure: Figure) -> Labels {
        Labels::new()
            .with("ends", self.ends)
            .with("ports", self.ports)
            .with("frames", self.frames)
            .with("flows", self.flows)
            .with("figure", figure)
            .with("switch", self.who)
    }

    /// Rows that are drawn together: a figure of all who switch.
    pub(super) fn group(&self, figure: Figure) -> String {
        let what = match figure {
            Figure::Rate => "full load".into(),
            Figure::Ndr => "no-drop rate".into(),
            Figure::Pdr => "partial-drop rate".into(),
            Figure::Latency(load) => format!("latency at {load} % of the no-drop rate, 99th percentile"),
            Figure::WakeUp => "latency of single frames, median".into(),
            Figure::CpuPerGigabyte => "processor time for what was carried".into(),
            Figure::IdleCpu => "processor time while idle".into(),
        };
        let Case { ends, ports, frames, flows, .. } = self;
        format!("{ends}, {ports} ports, frames {frames}, {flows} flows: {what}")
    }

    /// The row that all others of a group are compared with.
    pub(super) fn ours(&self) -> Case {
        Case { who: Who::Ringferry, ..*self }
    }

    /// How many times as good as this row ringferry's is to be.
    pub(super) fn goal(&self, figure: Figure) -> Option<f64> {
        let taps = self.ends != Ends::GuestGuest;
        // What is carried by one core: as much as one can, and for the time that it is used.
        let per_core = matches!(figure, Figure::Rate | Figure::Ndr | Figure::CpuPerGigabyte);
        match (figure, self.frames, self.who) {
            (_, Frames::Smallest, Who::TestpmdMac) if per_core && !taps => Some(1.3),
            (_, Frames::Smallest, Who::Ovs) if per_core && !taps => Some(2.0),
            (_, Frames::Mtu, Who::TestpmdMac | Who::Ovs) if per_core && !taps => Some(1.5),
            // testpmd's mac mode cannot carry these.
            (_, Frames::Tso, Who::TestpmdIo | Who::Ovs) if per_core && !taps => Some(1.5),
            (Figure::Rate | Figure::Latency(10), Frames::Mtu, Who::Bridge) if taps => Some(1.0),
            _ => None,
        }
    }

    /// The figures that were measured in advance, on two cores of a virtual machine.
    pub(super) fn published(&self, figure: Figure) -> Vec<Published> {
        let taps = self.ends != Ends::GuestGuest;
        let figures: &[(&str, f64, &str)] = match (figure, self.frames, self.who) {
            (Figure::Rate, Frames::Mtu, Who::Bridge) if taps => &[
                ("a copy loop between two taps, no offloads, a direction, about", 0.25, "Mpps"),
                ("the same", 2.7, "Gbit/s"),
            ],
            (Figure::Rate, Frames::Tso, Who::Bridge) => &[
                ("veth, TCP", 12.9, "Gbit/s"),
                ("a copy loop between two taps with offloads, at least", 12.0, "Gbit/s"),
                ("at most", 15.0, "Gbit/s"),
            ],
            _ => &[],
        };
        let source = "measured in advance, kernel sockets at both ends, two cores of a virtual machine";
        figures.iter().map(|&(what, value, unit)| Published::new(what, value, unit, source)).collect()
    }

    /// Features that the guests ask for, and none less.
    pub(super) fn features(&self, ring: Ring) -> Features {
        let mut features = Features::VERSION_1 | Features::MRG_RXBUF;
        features.set(Features::RING_PACKED, ring != Ring::Split);
        features.set(Features::IN_ORDER, ring == Ring::PackedInOrder);
        if self.frames == Frames::Tso {
            features |= Features::CSUM | Features::GUEST_CSUM | Features::HOST_TSO4 | Features::GUEST_TSO4;
        }
        features
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_row_has_a_name_of_its_own_and_ours_is_in_its_group() {
        for (all, count) in [(true, 3 * 2 * 4 * 3 * 6), (false, 8 * 5 + 1)] {
            let cases = Case::matrix(all);
            assert_eq!(cases.len(), count);
            let rows = || cases.iter().flat_map(|case| Figure::ALL.map(|figure| (case, figure)));
            let names: BTreeSet<String> =
                rows().map(|(case, figure)| case.labels(figure).to_string()).collect();
            assert_eq!(names.len(), count * Figure::ALL.len());
            for (case, figure) in rows() {
                assert!(cases.contains(&case.ours()));
                assert_eq!(case.ours().group(figure), case.group(figure));
            }
        }
    }

    #[test]
    fn goals_are_those_of_peers_and_never_our_own() {
        let cases = Case::matrix(true);
        assert!(
            cases
                .iter()
                .filter(|case| case.who == Who::Ringferry)
                .all(|case| { Figure::ALL.iter().all(|&figure| case.goal(figure).is_none()) })
        );
        let goal = |who, frames, figure| {
            Case { ends: Ends::GuestGuest, ports: 2, flows: 1, frames, who }.goal(figure)
        };
        assert_eq!(goal(Who::TestpmdMac, Frames::Smallest, Figure::Rate), Some(1.3));
        assert_eq!(goal(Who::Ovs, Frames::Smallest, Figure::Ndr), Some(2.0));
        assert_eq!(goal(Who::Ovs, Frames::Tso, Figure::Rate), Some(1.5));
        assert_eq!(goal(Who::TestpmdMac, Frames::Mtu, Figure::CpuPerGigabyte), Some(1.5));
        assert_eq!(goal(Who::TestpmdIo, Frames::Tso, Figure::Rate), Some(1.5));
        assert_eq!(goal(Who::TestpmdIo, Frames::Mtu, Figure::Rate), None);
    }
}
