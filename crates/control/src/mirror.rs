//! Mirrors, which are copies of what passes one port that another one gets; links that were taken up or down; and addresses that are forgotten.

use serde::{Deserialize, Serialize};

use crate::capture::Direction;
use crate::snapshot::PortState;
use crate::text::Table;

/// A mirror: the answer to `ringferry ctl mirror` has all of them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Mirror {
    /// The port that is mirrored.
    pub from: String,
    /// The port that gets the copies.
    pub to: String,
    /// One direction only.
    pub direction: Option<Direction>,
    /// One VLAN only.
    pub vlan: Option<u16>,
    /// Frames that were copied.
    pub copied: u64,
    /// Frames that were not, as that would have held up the port.
    pub lost: u64,
    /// The state of the port that gets the copies, if it takes none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to_state: Option<PortState>,
}

/// All mirrors of a switch.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Mirrors {
    /// In the order in which they were added.
    pub mirrors: Vec<Mirror>,
}

impl Mirrors {
    /// A mirror a line.
    pub fn to_text(&self) -> String {
        if self.mirrors.is_empty() {
            return "no port is mirrored\n".to_owned();
        }
        let mut table = Table::new(&["<FROM", "<TO", "<DIRECTION", ">VLAN", ">COPIED", ">LOST"]);
        for Mirror { from, to, direction, vlan, copied, lost, .. } in &self.mirrors {
            let direction = match direction {
                None => "both",
                Some(Direction::In) => "in",
                Some(Direction::Out) => "out",
            };
            let vlan = vlan.map_or("any".to_owned(), |vlan| vlan.to_string());
            let row =
                [from.clone(), to.clone(), direction.to_owned(), vlan, copied.to_string(), lost.to_string()];
            table.row(row);
        }
        let mut text = table.to_string();
        for Mirror { from, to, to_state, .. } in &self.mirrors {
            if let Some(state) = to_state {
                let state = state.name();
                text += &format!(
                    "{to} is {state}: the copies of what passes {from} are dropped there (link-down)\n"
                );
            }
        }
        text
    }
}

/// What became of addresses that were to be forgotten: the answer to `ringferry ctl fdb flush`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FdbFlush {
    /// Addresses that were forgotten, of the worker that knew most of them.
    pub forgotten: u64,
}

impl FdbFlush {
    /// One line.
    pub fn to_text(&self) -> String {
        match self.forgotten {
            1 => "1 address forgotten\n".to_owned(),
            count => format!("{count} addresses forgotten\n"),
        }
    }
}

/// What became of a link: the answer to `ringferry ctl link`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct LinkChange {
    /// The port.
    pub port: String,
    /// Whether packets pass it from now on.
    pub up: bool,
    /// Whether its guest was told.
    pub told: bool,
}

impl LinkChange {
    /// One line.
    pub fn to_text(&self) -> String {
        let state = if self.up { "up" } else { "down: no packet passes it" };
        let told = match self.told {
            true => "its guest was told",
            false => "whoever is behind it was not told: a front end is told that asks for such messages",
        };
        format!("{} is {state}; {told}\n", self.port)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mirrors_are_a_table() {
        assert_eq!(Mirrors::default().to_text(), "no port is mirrored\n");
        let mirror = |direction, vlan| Mirror {
            from: "vm0".into(),
            to: "probe".into(),
            direction,
            vlan,
            copied: 12,
            lost: 0,
            to_state: vlan.map(|_| PortState::Listening),
        };
        let mirrors = vec![mirror(None, None), mirror(Some(Direction::In), Some(10))];
        let text = Mirrors { mirrors }.to_text();
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines[1], ["vm0", "probe", "both", "any", "12", "0"]);
        assert_eq!(lines[2], ["vm0", "probe", "in", "10", "12", "0"]);
        let said = "probe is listening: the copies of what passes vm0 are dropped there (link-down)";
        assert_eq!(text.lines().skip(3).collect::<Vec<_>>(), [said]);
        let link = LinkChange { port: "vm0".into(), up: false, told: true };
        assert_eq!(link.to_text(), "vm0 is down: no packet passes it; its guest was told\n");
        assert_eq!(FdbFlush { forgotten: 1 }.to_text(), "1 address forgotten\n");
        assert_eq!(FdbFlush::default().to_text(), "0 addresses forgotten\n");
    }
}
