//! The matrix: which traffic, how much of it at once, over how many queues. One [`Case`] is two rows: what arrived in a
//! second, and what arrived for a second of processor time.

use std::fmt;

use crate::experiment::Published;
use crate::labels::Labels;

/// The traffic between the sockets. The first guest has the client, the second the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Test {
    /// Request and response over a connection that stays.
    Rr,
    /// Connect, request, response, and the end of the connection.
    Crr,
    /// TCP streams from the client.
    Transmit,
    /// TCP streams to the client.
    Receive,
}

impl Test {
    pub(super) const ALL: [Test; 4] = [Test::Rr, Test::Crr, Test::Transmit, Test::Receive];

    /// Mode of the traffic generator.
    pub(super) fn mode(self) -> &'static str {
        match self {
            Test::Rr => "rr",
            Test::Crr => "crr",
            Test::Transmit => "tcp",
            Test::Receive => "tcp-reverse",
        }
    }

    /// Returns true if transactions are counted, and not bits.
    pub(super) fn is_transactional(self) -> bool {
        matches!(self, Test::Rr | Test::Crr)
    }

    fn title(self) -> &'static str {
        match self {
            Test::Rr => "requests and responses",
            Test::Crr => "connections with one request",
            Test::Transmit => "streams from the client",
            Test::Receive => "streams to the client",
        }
    }
}

impl fmt::Display for Test {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Test::Rr => "rr",
            Test::Crr => "crr",
            Test::Transmit => "transmit",
            Test::Receive => "receive",
        })
    }
}

/// The divisor of a figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Per {
    /// A second of the clock.
    Second,
    /// A second of a processor's time, of all that takes part.
    CpuSecond,
}

impl Per {
    pub(super) const BOTH: [Per; 2] = [Per::Second, Per::CpuSecond];

    /// The unit of a figure: `unit` over this divisor.
    pub(super) fn unit(self, unit: &str) -> String {
        match self {
            Per::Second => format!("{unit}/s"),
            Per::CpuSecond => format!("{unit}/CPU s"),
        }
    }
}

impl fmt::Display for Per {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Per::Second => "second",
            Per::CpuSecond => "CPU-second",
        })
    }
}

/// Bytes of a request and its response, or of a write.
const SIZES: [usize; 7] = [1, 64, 256, 512, 1024, 4096, 16384];

/// Connections, or callers, at once.
const SESSIONS: [u16; 6] = [1, 2, 4, 20, 50, 100];

/// The cases that are measured when not all are asked for: the rows in which several queues once lost or won most, and one between.
const DEFAULT: [(Test, usize, &[u16]); 6] = [
    (Test::Rr, 256, &[1, 4, 100]),
    (Test::Crr, 1, &[1, 20, 100]),
    (Test::Transmit, 512, &[1, 2, 4]),
    (Test::Transmit, 16384, &[1, 4]),
    (Test::Receive, 512, &[4]),
    (Test::Receive, 16384, &[4]),
];

/// Queue pairs that both guests offer to use in the rows about idle ones.
pub(super) const OFFERED: u16 = 16;

/// Traffic between two guests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Case {
    pub test: Test,
    /// Bytes of a request and its response, or of a write.
    pub size: usize,
    pub sessions: u16,
    /// Queue pairs in use in both guests, and workers of the switch.
    pub queues: u16,
    /// Queue pairs that there are; those beyond `queues` are idle.
    pub offered: u16,
}

impl Case {
    /// The published matrix, or what is measured by default, for each of these numbers of queues.
    pub(super) fn matrix(all: bool, queues: &[u16]) -> Vec<Case> {
        let points: Vec<(Test, usize, u16)> = if all {
            let sizes = Test::ALL.into_iter().flat_map(|test| SIZES.map(|size| (test, size)));
            sizes.flat_map(|(test, size)| SESSIONS.map(|sessions| (test, size, sessions))).collect()
        } else {
            let points = DEFAULT.into_iter();
            points
                .flat_map(|(test, size, sessions)| {
                    sessions.iter().map(move |&sessions| (test, size, sessions))
                })
                .collect()
        };
        let cases = points.into_iter().flat_map(|(test, size, sessions)| {
            queues.iter().map(move |&queues| Case { test, size, sessions, queues, offered: queues })
        });
        cases.collect()
    }

    /// One queue pair of many, and of one: where latency shows most, and throughput.
    pub(super) fn idle() -> Vec<Case> {
        let points = [(Test::Rr, 1, 1), (Test::Transmit, 16384, 1)];
        let cases = points.into_iter().flat_map(|(test, size, sessions)| {
            [1, OFFERED].map(|offered| Case { test, size, sessions, queues: 1, offered })
        });
        cases.collect()
    }

    /// The labels of a row of the matrix.
    pub(super) fn labels(&self, per: Per) -> Labels {
        self.traffic().with("queues", self.queues).with("per", per)
    }

    /// The labels of a row about idle queues.
    pub(super) fn idle_labels(&self, per: Per) -> Labels {
        self.traffic().with("queues", self.queues).with("offered", self.offered).with("per", per)
    }

    fn traffic(&self) -> Labels {
        Labels::new().with("test", self.test).with("size", self.size).with("sessions", self.sessions)
    }

    /// The same over one queue.
    pub(super) fn single(&self) -> Case {
        Case { queues: 1, offered: 1, ..*self }
    }

    pub(super) fn unit(&self, per: Per) -> String {
        per.unit(if self.test.is_transactional() { "transactions" } else { "Mbit" })
    }

    pub(super) fn group(&self, per: Per) -> String {
        group(self.test.title(), per)
    }

    pub(super) fn idle_group(&self, per: Per) -> String {
        group(&format!("idle queues: {}", self.test.title()), per)
    }

    /// The change when several queues were new, in per cent.
    pub(super) fn published(&self, per: Per) -> Vec<Published> {
        if self.queues == 1 {
            return Vec::new();
        }
        let figures: &[(&str, f64)] = match (self.test, self.size, self.sessions, per) {
            (Test::Rr, _, 1, Per::Second) => &[("RR, one session", 0.0)],
            (Test::Rr, 256, 100, Per::Second) => &[("RR, 256 bytes, 100 sessions", 174.0)],
            (Test::Crr, _, 1, Per::Second) => &[("CRR, one session", -30.0)],
            (Test::Crr, _, 20.., Per::Second) => {
                &[("CRR, 20 to 100 sessions, least", 104.0), ("most", 136.0)]
            }
            (Test::Transmit, 512, 2, Per::Second) => &[("guest transmit, 512 bytes, two sessions", -42.0)],
            (Test::Transmit, 512, 4, Per::Second) => &[("guest transmit, 512 bytes, four sessions", -51.0)],
            (Test::Transmit, 512, 4, Per::CpuSecond) => {
                &[("guest transmit, 512 bytes, normalised by CPU", -60.0)]
            }
            (Test::Receive, _, _, Per::CpuSecond) => &[("guest receive, normalised by CPU, at worst", -58.0)],
            _ => &[],
        };
        figures.iter().map(|&(what, value)| Published::new(what, value, "%", SOURCE)).collect()
    }
}

/// The title of rows that are drawn together.
pub(super) fn group(what: &str, per: Per) -> String {
    match per {
        Per::Second => what.to_owned(),
        Per::CpuSecond => format!("{what}, per CPU second"),
    }
}

/// Where published figures come from.
pub(super) const SOURCE: &str = "Linux's virtio-net when multiqueue was new: netperf between guest and host, change against one queue; 4 \
                                 queues where the number is told";

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn the_whole_matrix_is_there_and_every_baseline_is_in_it() {
        for (all, count) in [(true, 4 * 7 * 6), (false, 13)] {
            let cases = Case::matrix(all, &[1, 2, 4]);
            assert_eq!(cases.len(), 3 * count);
            let names = |per| cases.iter().map(move |case| case.labels(per).to_string());
            let names: BTreeSet<String> = names(Per::Second).chain(names(Per::CpuSecond)).collect();
            assert_eq!(names.len(), 2 * 3 * count);
            assert!(cases.iter().all(|case| names.contains(&case.single().labels(Per::Second).to_string())));
        }
        let (all, some) = (Case::matrix(true, &[1, 2]), Case::matrix(false, &[1, 2]));
        assert!(some.iter().all(|case| all.contains(case)));
    }

    #[test]
    fn published_figures_stand_beside_changes_and_never_beside_one_queue() {
        let figures = |cases: &[Case], per| -> Vec<f64> {
            cases.iter().flat_map(|case| case.published(per)).map(|figure| figure.value).collect()
        };
        let some = Case::matrix(false, &[1, 2]);
        assert_eq!(
            figures(&some, Per::Second),
            [0.0, 174.0, -30.0, 104.0, 136.0, 104.0, 136.0, -42.0, -51.0]
        );
        assert_eq!(figures(&some, Per::CpuSecond), [-60.0, -58.0, -58.0]);
        assert!(figures(&Case::matrix(true, &[1]), Per::Second).is_empty());
    }

    #[test]
    fn rows_about_idle_queues_use_one_and_differ_in_what_is_offered() {
        let idle = Case::idle();
        assert!(idle.iter().all(|case| case.queues == 1));
        let names: BTreeSet<String> =
            idle.iter().map(|case| case.idle_labels(Per::Second).to_string()).collect();
        assert_eq!(names.len(), idle.len());
        assert!(idle.iter().all(|case| names.contains(&case.single().idle_labels(Per::Second).to_string())));
    }
}
