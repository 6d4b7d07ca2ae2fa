//! The rows: who forwards, over which ring, and how.

use std::fmt;

use ringferry_nic::tx::Entry;
use ringferry_virtio_net::Features;

use crate::labels::Labels;

/// Packets that are handled together: testpmd's choice, and the switch's.
pub(super) const BURST: usize = 32;
/// Entries of each virtqueue: virtio_user's default.
pub(super) const QUEUE: u16 = 256;

/// The program that forwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Who {
    Ringferry,
    Testpmd,
}

/// The format of the virtqueues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ring {
    Split,
    PackedInOrder,
}

impl fmt::Display for Ring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Ring::Split => "split",
            Ring::PackedInOrder => "packed-in-order",
        })
    }
}

/// When the device at the output is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Doorbell {
    /// It polls and is never told.
    Polled,
    /// The doorbell is rung once per burst.
    Burst,
    /// When the framework's ladder says so, and at the end of the burst.
    Ladder,
    /// The doorbell is rung for each packet.
    Packet,
}

impl Doorbell {
    /// Returns true if the device wants to be told.
    pub(super) fn rings(self) -> bool {
        self != Doorbell::Polled
    }
}

impl fmt::Display for Doorbell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Doorbell::Polled => "polled",
            Doorbell::Burst => "burst",
            Doorbell::Ladder => "ladder",
            Doorbell::Packet => "packet",
        })
    }
}

/// The settings of ringferry's forwarder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct How {
    /// Packets that are forwarded at a time.
    pub burst: usize,
    pub doorbell: Doorbell,
    /// Through a queue that several threads could share.
    pub entry: Option<Entry>,
    /// Queue pairs of the output.
    pub queues: usize,
}

impl Default for How {
    /// The settings that a forwarder would choose.
    fn default() -> Self {
        Self { burst: BURST, doorbell: Doorbell::Polled, entry: None, queues: 1 }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Case {
    pub who: Who,
    pub ring: Ring,
    pub how: How,
    /// The question that it helps to answer.
    group: &'static str,
    /// True if it is what the others of its group are compared with.
    first: bool,
}

impl Case {
    /// All of them; each group's baseline is its first.
    pub(super) fn all() -> Vec<Case> {
        let mut cases = Vec::new();
        let mut group = |group: &'static str, of: &[(Who, Ring, How)]| {
            cases.extend(of.iter().enumerate().map(|(at, &(who, ring, how))| Case {
                who,
                ring,
                how,
                group,
                first: at == 0,
            }));
        };
        let plain = How::default();
        group(
            "forwarders, split ring",
            &[(Who::Testpmd, Ring::Split, plain), (Who::Ringferry, Ring::Split, plain)],
        );
        let packed = Ring::PackedInOrder;
        group("forwarders, packed ring", &[(Who::Testpmd, packed, plain), (Who::Ringferry, packed, plain)]);
        let ours = |how: How| (Who::Ringferry, packed, how);
        group("bursts", &[BURST, 8, 1].map(|burst| ours(How { burst, ..plain })));
        let bells = [Doorbell::Burst, Doorbell::Ladder, Doorbell::Packet];
        group("doorbells", &bells.map(|doorbell| ours(How { doorbell, ..plain })));
        let entries = [None, Some(Entry::InlineLock), Some(Entry::SharedRing), Some(Entry::HandOff)];
        group("transmit entries", &entries.map(|entry| ours(How { entry, ..plain })));
        group("output queues", &[1, 2, 4].map(|queues| ours(How { queues, ..plain })));
        cases
    }

    /// The labels say what the row is about; those of its group are in front, as rows of different groups may be the
    /// same otherwise.
    pub(super) fn labels(&self) -> Labels {
        let labels = Labels::new();
        let labels = match self.group {
            "bursts" => labels.with("burst", self.how.burst),
            "doorbells" => labels.with("doorbell", self.how.doorbell),
            "transmit entries" => labels.with("entry", entry(self.how.entry)),
            "output queues" => labels.with("queues", self.how.queues),
            _ => labels,
        };
        let who = match self.who {
            Who::Ringferry => "ringferry",
            Who::Testpmd => "testpmd",
        };
        labels.with("forwarder", who).with("ring", self.ring)
    }

    /// The first of its group, but for itself.
    pub(super) fn baseline(&self) -> Option<Case> {
        let first = |case: &Case| case.group == self.group && case.first;
        if self.first { None } else { Case::all().into_iter().find(first) }
    }

    pub(super) fn group(&self) -> &'static str {
        self.group
    }

    /// The features both ends agree on: what DPDK's driver takes when it is told of this ring.
    pub(super) fn features(&self) -> Features {
        let packed = self.ring == Ring::PackedInOrder;
        let mut features = Features::VERSION_1 | Features::INDIRECT_DESC | Features::MRG_RXBUF;
        features.set(Features::RING_PACKED, packed);
        features.set(Features::IN_ORDER, packed);
        features
    }
}

fn entry(entry: Option<Entry>) -> &'static str {
    match entry {
        None => "none",
        Some(Entry::InlineLock) => "inline-lock",
        Some(Entry::SharedRing) => "shared-ring",
        Some(Entry::HandOff) => "hand-off",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_row_has_a_name_of_its_own_and_a_baseline_in_its_group() {
        let cases = Case::all();
        let names: BTreeSet<_> = cases.iter().map(|case| case.labels().to_string()).collect();
        assert_eq!(names.len(), cases.len());
        for case in &cases {
            match case.baseline() {
                Some(baseline) => assert!(baseline.group() == case.group() && baseline != *case),
                None => assert!(case.first),
            }
        }
    }
}
