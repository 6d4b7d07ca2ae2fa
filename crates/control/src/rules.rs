//! The rules of a port as they are shown and reported: the answers to `ringferry ctl rules`, `set` and `unset`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Rules of a port that are not as they are by default: keys and values are those of the configuration file.
pub type RulesByKey = BTreeMap<String, serde_json::Value>;

/// The rules of a port: the answer to `ringferry ctl rules`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PortRules {
    /// The port.
    pub port: String,
    /// Its rules.
    pub rules: RulesByKey,
}

/// What became of a change of settings: the answer to `ringferry ctl set` and `unset`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct SettingsChange {
    /// The port.
    pub port: String,
    /// Its rules now.
    pub rules: RulesByKey,
    /// The other settings that were asked for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub settings: Vec<SettingChange>,
    /// Whether the configuration file says the same, so that the next start has them, too.
    pub persistent: bool,
    /// Where they are kept, or why they are not, for people.
    pub note: String,
    /// Remarks on ports, a sentence each, for people: on each thing that is strange now and was not before.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

/// A setting other than a rule, as it is now.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct SettingChange {
    /// The key.
    pub key: String,
    /// Its value, that of the configuration file; absent: it is not set.
    pub value: Option<serde_json::Value>,
    /// When it holds.
    pub holds: Holds,
}

/// When a setting holds that was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Holds {
    /// It holds now.
    AtOnce,
    /// A front end is connected that has agreed on the value before, and keeps that until it disconnects.
    NextConnection,
    /// Nothing is there to be set back: the interface keeps the value that it has, until it is made anew.
    Kept,
}

impl SettingChange {
    /// Says what is set and when it holds, in the words of `ringferry ctl set`.
    fn to_text(&self) -> String {
        let SettingChange { key, value, holds } = self;
        let setting = match value {
            Some(value) => format!("{key}={}", flag(value)),
            None => format!("{key} is not set"),
        };
        let when = match holds {
            Holds::AtOnce => "holds now",
            Holds::Kept => "the interface keeps the value that it has, until it is made anew",
            Holds::NextConnection => {
                "holds with the next connection; the front end that is connected keeps what it has agreed on"
            }
        };
        format!("  {setting}: {when}\n")
    }
}

/// A value of the configuration file as `ringferry ctl set` takes it.
fn flag(value: &serde_json::Value) -> String {
    match value {
        serde_json::Value::String(text) => text.clone(),
        serde_json::Value::Array(items) if items.is_empty() => "none".to_owned(),
        serde_json::Value::Array(items) => items.iter().map(flag).collect::<Vec<_>>().join(","),
        other => other.to_string(),
    }
}

/// Rules in the words of `ringferry ctl set`.
pub fn settings(rules: &RulesByKey) -> impl Iterator<Item = String> {
    rules.iter().map(|(key, value)| format!("{key}={}", flag(value)))
}

/// Whether a change is in the configuration file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Kept {
    /// Whether the configuration file says the same, so that it holds after the next start, too.
    pub persistent: bool,
    /// Where it is kept, or why it is not, for people.
    pub note: String,
}

impl Kept {
    /// Says so in a line.
    pub fn to_text(&self) -> String {
        format!("{}: {}\n", kept(self.persistent), self.note)
    }
}

/// Says whether a change is in the configuration file.
pub fn kept(persistent: bool) -> &'static str {
    if persistent { "kept" } else { "not kept when the switch ends" }
}

impl PortRules {
    /// A rule a line, in the words of `ringferry ctl set`.
    pub fn to_text(&self) -> String {
        rules_to_text(&self.port, &self.rules)
    }
}

impl SettingsChange {
    /// The rules now, the other settings that were asked for with the time from which they hold, and whether all of that is kept.
    pub fn to_text(&self) -> String {
        let mut text = String::new();
        if self.settings.is_empty() || !self.rules.is_empty() {
            text += &rules_to_text(&self.port, &self.rules);
        }
        if !self.settings.is_empty() {
            text += &format!("settings of {}:\n", self.port);
        }
        text.extend(self.settings.iter().map(SettingChange::to_text));
        format!("{text}{}: {}\n{}", kept(self.persistent), self.note, notes_to_text(&self.notes))
    }
}

/// Each note in a line of its own.
pub(crate) fn notes_to_text(notes: &[String]) -> String {
    notes.iter().map(|note| format!("note: {note}\n")).collect()
}

fn rules_to_text(port: &str, rules: &RulesByKey) -> String {
    if rules.is_empty() {
        return format!("{port} has no rules\n");
    }
    let lines = settings(rules).map(|setting| format!("  {setting}\n"));
    format!("rules of {port}:\n{}", lines.collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_says_from_when_each_setting_holds() {
        let setting = |key: &str, value: Option<serde_json::Value>, holds| SettingChange {
            key: key.to_owned(),
            value,
            holds,
        };
        let settings = vec![
            setting("worker", Some(1.into()), Holds::AtOnce),
            setting("mtu", None, Holds::NextConnection),
        ];
        let (port, note) = ("vm0".to_owned(), "in rf.toml".to_owned());
        let mut change =
            SettingsChange { port, settings, persistent: true, note, ..SettingsChange::default() };
        let settings = "settings of vm0:\n  worker=1: holds now\n  mtu is not set: holds with the next connection; the front end \
                        that is connected keeps what it has agreed on\nkept: in rf.toml\n";
        assert_eq!(change.to_text(), settings);
        change.rules.insert("vlan".to_owned(), 10.into());
        assert_eq!(change.to_text(), format!("rules of vm0:\n  vlan=10\n{settings}"));
        change.settings.clear();
        assert_eq!(change.to_text(), "rules of vm0:\n  vlan=10\nkept: in rf.toml\n");
        change.notes = vec!["port vm1 has no vlan".to_owned()];
        assert_eq!(
            change.to_text(),
            "rules of vm0:\n  vlan=10\nkept: in rf.toml\nnote: port vm1 has no vlan\n"
        );
    }
}
