//! Wires between two ports: the answers to `ringferry ctl wire`.

use serde::{Deserialize, Serialize};

use crate::rules::{RulesByKey, kept, settings};
use crate::snapshot::PortState;
use crate::text::{Table, short_count};

/// A wire, with what it does to frames and what has become of them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Wire {
    /// Its name.
    pub name: String,
    /// The number from which all chance on it follows.
    pub seed: u64,
    /// Whether the configuration says so; else it was drawn when the wire was made.
    pub seed_is_set: bool,
    /// Both directions, the one from end A first.
    pub directions: Vec<WireDirection>,
}

/// The ends of a wire.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct WireEnds {
    /// The name of the wire.
    pub wire: String,
    /// The ports at its ends.
    pub ports: [String; 2],
}

/// One direction of a wire.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct WireDirection {
    /// The port that sends.
    pub from: String,
    /// The port that receives, at which everything is counted.
    pub to: String,
    /// Whether both ports are there.
    pub joined: bool,
    /// The state of the receiving port; absent: that port is not there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to_state: Option<PortState>,
    /// The impairments that are not as they are by default: keys and values are those of the configuration file.
    pub impairments: RulesByKey,
    /// Frames that have reached the receiver.
    pub passed: u64,
    /// Frames that `loss` has lost.
    pub lost: u64,
    /// Frames for which there was no room, by `limit` or `limit_bytes`.
    pub no_room: u64,
    /// Frames that were carried twice.
    pub duplicated: u64,
    /// Frames that were not delayed, and have overtaken others.
    pub reordered: u64,
    /// Frames of which one bit was inverted.
    pub corrupted: u64,
    /// Frames that are under way now.
    pub waiting: u64,
    /// Memory that those take, in bytes.
    pub waiting_bytes: u64,
    /// How late those have left that had to wait, since this process became the switch.
    pub late: Lateness,
}

/// How late frames have left, after they were due.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Lateness {
    /// Numbers of frames, by how late they were; each bucket begins where the one before it ends.
    pub buckets: Vec<LateFrames>,
    /// How late the latest was, in microseconds.
    pub max_microseconds: u64,
}

/// Frames that have left about equally late.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct LateFrames {
    /// At most so many microseconds late; absent: later than all other buckets.
    pub at_most_microseconds: Option<u64>,
    /// The number of frames.
    pub frames: u64,
}

impl Lateness {
    /// Returns the frames of all buckets.
    fn count(&self) -> u64 {
        self.buckets.iter().map(|bucket| bucket.frames).sum()
    }

    /// Returns the bound of the bucket below which this share of the frames lies; `None` if there are none, or the bucket has no bound.
    pub fn quantile(&self, share: f64) -> Option<u64> {
        let (count, mut seen) = (self.count(), 0);
        let bucket = self.buckets.iter().find(|bucket| {
            seen += bucket.frames;
            count > 0 && seen as f64 >= count as f64 * share
        });
        bucket?.at_most_microseconds
    }

    /// Says how late frames were, in a line; empty if none had to wait.
    fn to_text(&self) -> String {
        let count = self.count();
        if count == 0 {
            return String::new();
        }
        let part = |share| match self.quantile(share) {
            // The bound of a bucket may be above the latest frame in it.
            Some(bound) => format!("at most {} µs", bound.min(self.max_microseconds)),
            None => "more".to_owned(),
        };
        format!(
            "late: half of {} frames {}, 99% {}, all at most {} µs\n",
            short_count(count),
            part(0.5),
            part(0.99),
            self.max_microseconds
        )
    }
}

/// All wires of a switch, or one.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Wires {
    /// In the order of the configuration.
    pub wires: Vec<Wire>,
}

impl Wires {
    /// A table of both directions of each wire, with the settings of each and how late frames were.
    pub fn to_text(&self) -> String {
        if self.wires.is_empty() {
            return "there is no wire\n".to_owned();
        }
        let header = [
            "<WIRE",
            "<FROM",
            "<TO",
            "<STATE",
            ">PASSED",
            ">LOST",
            ">NO-ROOM",
            ">TWICE",
            ">REORDERED",
            ">CORRUPT",
            ">WAITING",
        ];
        let mut table = Table::new(&header);
        for wire in &self.wires {
            for one in &wire.directions {
                let counts = [
                    one.passed,
                    one.lost,
                    one.no_room,
                    one.duplicated,
                    one.reordered,
                    one.corrupted,
                    one.waiting,
                ];
                let names = [&wire.name, &one.from, &one.to, one.state()].map(str::to_owned);
                table.row(names.into_iter().chain(counts.map(short_count)).collect::<Vec<_>>());
            }
        }
        let mut text = table.to_string();
        for wire in &self.wires {
            text += &wire.details();
        }
        text
    }
}

impl WireDirection {
    /// Returns the state of the receiving port, in a word.
    fn state(&self) -> &str {
        self.to_state.map_or("no-port", PortState::name)
    }
}

impl Wire {
    /// Says what the wire does to frames, a line for each direction, and one for what is missing.
    fn details(&self) -> String {
        let mut text = format!("\n{}: seed {}", self.name, self.seed);
        text += if self.seed_is_set { "\n" } else { ", drawn\n" };
        for one in &self.directions {
            let all: Vec<_> = settings(&one.impairments).collect();
            let all = if all.is_empty() { "no impairments".to_owned() } else { all.join(" ") };
            text += &format!("  {} to {}: {all}\n", one.from, one.to);
            let late = one.late.to_text();
            if !late.is_empty() {
                text += &format!("    {late}");
            }
        }
        if self.directions.iter().any(|one| !one.joined) {
            text += "  nothing passes: one of its ports is not there\n";
            return text;
        }
        for one in self.directions.iter().filter(|one| one.to_state != Some(PortState::Up)) {
            let to = &one.to;
            text += &format!(
                "  nothing reaches {to}, which is {}: `ringferry ctl why {to}` says why\n",
                one.state()
            );
        }
        text
    }
}

/// What became of a change of a wire: the answer to `ringferry ctl wire set`, `reset`, `add` and `remove`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct WireChange {
    /// The wire as it is now; of one that was removed as it was.
    pub wire: Wire,
    /// Whether it was removed.
    pub removed: bool,
    /// Whether the configuration file says the same, so that it holds after the next start, too.
    pub persistent: bool,
    /// Where it is kept, or why it is not, for people.
    pub note: String,
}

impl WireChange {
    /// Says what the wire is now, and whether that is kept.
    pub fn to_text(&self) -> String {
        let WireChange { wire, removed, persistent, note } = self;
        let kept = kept(*persistent);
        if *removed {
            return format!("{} removed\nthe removal is {kept}: {note}\n", wire.name);
        }
        format!("{}{kept}: {note}\n", wire.details().trim_start())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn direction(from: &str, to: &str) -> WireDirection {
        let buckets = [(Some(5), 40), (Some(10), 50), (Some(50), 9), (None, 1)];
        let buckets =
            buckets.map(|(at_most_microseconds, frames)| LateFrames { at_most_microseconds, frames });
        WireDirection {
            from: from.to_owned(),
            to: to.to_owned(),
            joined: true,
            to_state: Some(PortState::Up),
            impairments: [("delay".to_owned(), "10ms".into()), ("loss".to_owned(), "0.1%".into())].into(),
            passed: 98,
            lost: 2,
            late: Lateness { buckets: buckets.to_vec(), max_microseconds: 812 },
            ..WireDirection::default()
        }
    }

    fn wire() -> Wire {
        let back = WireDirection {
            impairments: RulesByKey::new(),
            late: Lateness::default(),
            ..direction("r2", "r1")
        };
        Wire {
            name: "w".to_owned(),
            seed: 42,
            seed_is_set: true,
            directions: vec![direction("r1", "r2"), back],
        }
    }

    #[test]
    fn wires_are_a_table_and_what_they_do() {
        assert_eq!(Wires::default().to_text(), "there is no wire\n");
        let text = Wires { wires: vec![wire()] }.to_text();
        let rows: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(rows[1], ["w", "r1", "r2", "up", "98", "2", "0", "0", "0", "0", "0"]);
        assert_eq!(rows[2][..3], ["w", "r2", "r1"]);
        let rest: Vec<_> = text.lines().skip(4).collect();
        let expected = [
            "w: seed 42",
            "  r1 to r2: delay=10ms loss=0.1%",
            "    late: half of 100 frames at most 10 µs, 99% at most 50 µs, all at most 812 µs",
            "  r2 to r1: no impairments",
        ];
        assert_eq!(rest, expected);
    }

    #[test]
    fn a_port_that_takes_nothing_is_named_with_its_state() {
        let mut wire = wire();
        wire.directions[1].to_state = Some(PortState::Listening);
        let text = Wires { wires: vec![wire.clone()] }.to_text();
        let row = text.lines().nth(2).unwrap();
        assert_eq!(row.split_whitespace().nth(3), Some("listening"));
        let said = "  nothing reaches r1, which is listening: `ringferry ctl why r1` says why";
        assert_eq!(text.lines().last(), Some(said));
        (wire.directions[1].to_state, wire.directions[0].joined) = (None, false);
        let text = Wires { wires: vec![wire] }.to_text();
        assert_eq!(text.lines().nth(2).unwrap().split_whitespace().nth(3), Some("no-port"));
        assert_eq!(text.lines().last(), Some("  nothing passes: one of its ports is not there"));
    }

    #[test]
    fn a_change_says_what_the_wire_is_now_and_whether_that_is_kept() {
        let mut wire = Wire { seed_is_set: false, ..wire() };
        wire.directions.truncate(1);
        wire.directions[0].late = Lateness::default();
        wire.directions[0].joined = false;
        let note = "in /etc/rf.toml".to_owned();
        let change = WireChange { wire, removed: false, persistent: true, note };
        let expected = "w: seed 42, drawn\n  r1 to r2: delay=10ms loss=0.1%\n  nothing passes: one of its ports is not there\nkept: in /etc/rf.toml\n";
        assert_eq!(change.to_text(), expected);
        let removed = WireChange { removed: true, persistent: false, ..change };
        assert_eq!(
            removed.to_text(),
            "w removed\nthe removal is not kept when the switch ends: in /etc/rf.toml\n"
        );
    }

    #[test]
    fn quantiles_are_bounds_of_buckets() {
        let late = direction("a", "b").late;
        assert_eq!(
            [0.0, 0.4, 0.41, 0.99, 1.0].map(|share| late.quantile(share)),
            [Some(5), Some(5), Some(10), Some(50), None]
        );
        assert_eq!(Lateness::default().quantile(0.5), None);
    }
}
