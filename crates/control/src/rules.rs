//! The rules of a port as they are shown and reported: the answers to `ringferry ctl rules`, `set` and `unset`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Rules of a port that are not as they are by default: keys and values are those of the configuration file.
pub type RulesByKey = BTreeMap<String, serde_json::Value>;

/// The rules of a port: the answer to `ringferry ctl rules`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PortRules {
    /// The port.
    pub port: String,
    /// Its rules.
    pub rules: RulesByKey,
}

/// What became of a change of rules: the answer to `ringferry ctl set` and `unset`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RulesChange {
    /// The port.
    pub port: String,
    /// Its rules now.
    pub rules: RulesByKey,
    /// Whether the configuration file says the same, so that the next start has them, too.
    pub persistent: bool,
    /// Where they are kept, or why they are not, for people.
    pub note: String,
}

/// Rules in the words of `ringferry ctl set`.
pub(crate) fn settings(rules: &RulesByKey) -> impl Iterator<Item = String> {
    fn flag(value: &serde_json::Value) -> String {
        match value {
            serde_json::Value::String(text) => text.clone(),
            serde_json::Value::Array(items) if items.is_empty() => "none".to_owned(),
            serde_json::Value::Array(items) => items.iter().map(flag).collect::<Vec<_>>().join(","),
            other => other.to_string(),
        }
    }
    rules.iter().map(|(key, value)| format!("{key}={}", flag(value)))
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

impl RulesChange {
    /// The rules now, and whether they are kept.
    pub fn to_text(&self) -> String {
        format!("{}{}: {}\n", rules_to_text(&self.port, &self.rules), kept(self.persistent), self.note)
    }
}

fn rules_to_text(port: &str, rules: &RulesByKey) -> String {
    if rules.is_empty() {
        return format!("{port} has no rules\n");
    }
    let lines = settings(rules).map(|setting| format!("  {setting}\n"));
    format!("rules of {port}:\n{}", lines.collect::<String>())
}
