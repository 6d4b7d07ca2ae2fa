//! The matrix: which attack, on which switch. One [`Case`] is one run, and its figures are rows.

use std::fmt;

use ringferry_switch::config::SwitchConfig;
use serde::{Deserialize, Serialize};

use super::attacks::Attack;
use crate::experiment::Better;
use crate::labels::Labels;

/// The switch that is attacked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Who {
    Ringferry,
    /// testpmd in mode `io`: it forwards between the ports of each pair and knows no addresses.
    Testpmd,
    /// Open vSwitch with DPDK, which learns addresses, and knows VLANs.
    Ovs,
}

impl Who {
    pub(super) const ALL: [Who; 3] = [Who::Ringferry, Who::Testpmd, Who::Ovs];
}

impl fmt::Display for Who {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Who::Ringferry => "ringferry",
            Who::Testpmd => "testpmd",
            Who::Ovs => "ovs-dpdk",
        })
    }
}

/// A figure of a run, each in a row of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Figure {
    /// 99 of 100 requests of the innocent guests are answered within this time.
    WaitP99,
    /// The same, less the time for which the guests' own thread had no processor, as the attacker beside it had it.
    ServiceP99,
    /// The longest time until a request was answered.
    WaitMax,
    /// Share of the stream that arrives while the attack lasts.
    Share,
    /// Frames that the switch took from one innocent guest and never gave to the other.
    Lost,
    /// 99 of 100 fresh vhost-user connections to another port have the answer to GET_FEATURES within this time.
    Connect,
    /// The same of `ctl show`, or of `ovs-appctl dpif/show`.
    Control,
    /// Growth of the switch's resident memory.
    Resident,
    /// Growth of the switch's address space.
    Mapped,
    /// Growth of the number of the switch's descriptors.
    Descriptors,
    /// Lines that the switch writes to its log.
    Log,
}

impl Figure {
    pub(super) const ALL: [Figure; 11] = [
        Figure::WaitP99,
        Figure::ServiceP99,
        Figure::WaitMax,
        Figure::Share,
        Figure::Lost,
        Figure::Connect,
        Figure::Control,
        Figure::Resident,
        Figure::Mapped,
        Figure::Descriptors,
        Figure::Log,
    ];

    pub(super) fn unit(self) -> &'static str {
        match self {
            Figure::WaitP99 | Figure::ServiceP99 | Figure::WaitMax | Figure::Connect | Figure::Control => {
                "µs"
            }
            Figure::Share => "% of 1 Gbit/s",
            Figure::Lost => "frames",
            Figure::Resident | Figure::Mapped => "MiB",
            Figure::Descriptors => "descriptors",
            Figure::Log => "lines/s",
        }
    }

    pub(super) fn better(self) -> Better {
        match self {
            Figure::Share => Better::Higher,
            _ => Better::Lower,
        }
    }

    /// The worst value that is good enough, in the figure's unit.
    pub(super) fn bound(self) -> Option<f64> {
        match self {
            Figure::ServiceP99 => Some(3000.0),
            Figure::WaitP99 | Figure::WaitMax => None,
            Figure::Share => Some(80.0),
            Figure::Lost => Some(0.0),
            Figure::Connect | Figure::Control => Some(10_000.0),
            // Rings and buffers of one guest more, and what an allocator keeps.
            Figure::Resident => Some(64.0),
            // The attacker has one port, which may have as much mapped as the switch allows by default, with some room for what is not
            // guest memory.
            Figure::Mapped => Some(f64::from(SwitchConfig::default().port_memory_gib) * 1024.0 + 1024.0),
            // Two rings of 16 pairs with three events each, and as many memory regions as a message has, for each attacker.
            Figure::Descriptors => Some(1024.0),
            Figure::Log => Some(10.0),
        }
    }
}

impl fmt::Display for Figure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Figure::WaitP99 => "wait-p99",
            Figure::ServiceP99 => "service-p99",
            Figure::WaitMax => "wait-max",
            Figure::Share => "share",
            Figure::Lost => "lost",
            Figure::Connect => "connect-p99",
            Figure::Control => "ctl-p99",
            Figure::Resident => "rss",
            Figure::Mapped => "vmsize",
            Figure::Descriptors => "descriptors",
            Figure::Log => "log",
        })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Case {
    /// `None` is the baseline.
    pub attack: Option<Attack>,
    pub who: Who,
}

impl Case {
    /// All cases that make sense, the baselines first.
    pub(super) fn all() -> Vec<Case> {
        let attacks = std::iter::once(None).chain(Attack::ALL.map(Some));
        let cases = attacks.flat_map(|attack| Who::ALL.map(|who| Case { attack, who }));
        cases.filter(|case| case.who != Who::Testpmd || case.attack.is_none_or(Attack::on_testpmd)).collect()
    }

    pub(super) fn labels(&self, figure: Figure) -> Labels {
        let attack = self.attack.map_or("none", Attack::name);
        Labels::new().with("attack", attack).with("figure", figure).with("switch", self.who)
    }

    /// Rows of one figure and one switch stand together.
    pub(super) fn group(&self, figure: Figure) -> String {
        format!("{figure}, {}", self.who)
    }

    /// The same without the attack.
    pub(super) fn quiet(&self) -> Case {
        Case { attack: None, who: self.who }
    }

    /// Number of ports for the attacker, beside those of the innocent guests and the one that is asked for its features.
    pub(super) fn ports(&self) -> usize {
        self.attack.map_or(0, Attack::ports)
    }
}
