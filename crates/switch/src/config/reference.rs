//! The table of keys as data, for what is made from it: docs/configuration.md, and the manual page of the file.

use super::*;

/// An example of a file.
pub const EXAMPLE: &str = "\
control = \"/run/ringferry/control.sock\"

[switch]
workers = 2

[[port]]
kind = \"vhost-user\"
socket = \"/run/ringferry/vm0.sock\"
vlan = 10
rate_in = \"1gbit\"

[[port]]
kind = \"tap\"
tap = \"rf0\"
vlan = 10";

/// The keys of one place in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReferenceSection {
    /// The place, as it is written in a file: `[switch]`, `kind = "tap"`. In words where a file has nothing to write.
    pub place: String,
    /// Sentences on all keys of the place.
    pub about: &'static str,
    /// The keys.
    pub keys: Vec<ReferenceKey>,
}

/// One key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReferenceKey {
    /// The key.
    pub name: &'static str,
    /// The values that it takes, in words.
    pub values: String,
    /// What holds without the key; code is in backticks.
    pub without: String,
    /// The meaning of the key, and the other key that it needs, in a sentence or two; code is in backticks.
    pub meaning: String,
    /// A line of a file.
    pub example: String,
    /// When a change of the key comes into force at a port that is open; empty if all keys of the place are alike in this.
    pub change: &'static str,
}

/// Returns the whole table, in the order of a file.
pub fn reference() -> Vec<ReferenceSection> {
    sections().map(|(scope, keys)| section(scope, keys)).collect()
}

pub(super) fn section(scope: Scope, keys: &[Key]) -> ReferenceSection {
    let (place, about) = match scope {
        Scope::Top => (
            "Top level".to_owned(),
            "Before all tables. A change takes effect when the switch is started again.",
        ),
        Scope::Switch => (
            "[switch]".to_owned(),
            "The switch as a whole. A change takes effect when the switch is started again.",
        ),
        Scope::Port => ("[[port]]".to_owned(), "Keys of every port."),
        Scope::Kind(kind) => (format!("kind = {kind:?}"), "Keys that only such a port has."),
        Scope::Rules => (
            "Rules".to_owned(),
            "Keys of every port: what its frames must obey. A change holds at once.\n`in` is what the switch takes from the port, \
             what its guest sends.",
        ),
        Scope::Wire => (
            "[[wire]]".to_owned(),
            "A wire between two ports. A change holds at once; `ringferry ctl wire` makes one as well.",
        ),
        Scope::Impairments => (
            "[wire.a_to_b]".to_owned(),
            "What becomes of frames on a wire. In `[[wire]]` these keys are for both directions; in the tables `[wire.a_to_b]` and `[wire.b_to_a]` behind it \
             for one, where they hold in place of those. A change holds at once, for frames that come.",
        ),
    };
    let keys = keys.iter().map(|key| ReferenceKey {
        name: key.name,
        values: key.shape().to_string(),
        without: match key.default {
            Unset::Value(value) => format!("`{value}`"),
            Unset::Means(meaning) => meaning.to_owned(),
            Unset::Required => "must be given".to_owned(),
        },
        meaning: match key.only_with {
            Some((with, _)) if !key.help.contains(&format!("`{with}`")) => {
                format!("{} It needs `{with}`.", key.help)
            }
            _ => key.help.to_owned(),
        },
        example: format!("{} = {}", key.name, key.shape().in_file(key.example)),
        change: match (scope, key.change) {
            (Scope::Top | Scope::Switch | Scope::Rules | Scope::Wire | Scope::Impairments, _) => "",
            (_, Effect::Live) => "holds at once",
            (_, Effect::NextConnection) => "holds with the next connection",
            (_, Effect::Reopen | Effect::Restart) => "has the port opened anew",
        },
    });
    ReferenceSection { place, about, keys: keys.collect() }
}
