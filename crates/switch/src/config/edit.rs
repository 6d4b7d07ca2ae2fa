//! Changes of the settings of one port while it is open: `ringferry ctl set` and `unset`.
//!
//! An [`Edit`] is made of a request and says which keys get another value. [`PortConfig::edited`] makes the port that it leads to, and refuses keys
//! that can only change when the port is opened anew: the table of keys says which ([`Effect`]).

use super::parse::{Value, is_list, nearest};
use super::*;

/// A change of settings of a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Edit {
    set: BTreeMap<String, String>,
    /// Keys that are removed, together with the keys that are set.
    remove: Vec<&'static str>,
}

impl Edit {
    /// Makes an edit that sets keys: `KEY=VALUE`, the value as in a flag. Setting `vlan` removes `trunk`, and
    /// the other way round.
    ///
    /// # Errors
    /// A setting has no value, or a key is given twice. [`PortConfig::edited`] checks keys and values.
    pub(crate) fn set(settings: &[String]) -> Result<Edit, ConfigError> {
        let mut set = BTreeMap::new();
        let mut problems = Vec::new();
        let mut report = |key: &str, message: &str| problems.push(Place::default().problem(key, message));
        for setting in settings {
            match setting.split_once('=') {
                None => report(&format!("{setting:?}"), "is not KEY=VALUE"),
                Some((key, value)) => {
                    if value.is_empty()
                        || value == "none" && key != "native" && !is_list(key)
                        || ["0", "off"].contains(&value) && is_rate(key)
                    {
                        report(
                            key,
                            &format!("{value:?} is no value: `ringferry ctl unset` takes a key back"),
                        );
                    }
                    if set.insert(key.to_owned(), value.to_owned()).is_some() {
                        report(key, "is given twice");
                    }
                }
            }
        }
        if settings.is_empty() {
            report("", "nothing is to be set: give KEY=VALUE");
        }
        if !problems.is_empty() {
            return Err(ConfigError { problems });
        }
        let replaced: &[&str] = match (set.contains_key("vlan"), set.contains_key("trunk")) {
            (true, false) => &["trunk", "native"],
            (false, true) => &["vlan"],
            _ => &[],
        };
        let remove = replaced.iter().copied().filter(|key| !set.contains_key(*key)).collect();
        Ok(Edit { set, remove })
    }

    /// Makes an edit that removes keys, and those that make no sense without them.
    ///
    /// # Errors
    /// One of the names is not a key of a port.
    pub(crate) fn unset(keys: &[String]) -> Result<Edit, ConfigError> {
        let mut remove = Vec::new();
        let mut problems = Vec::new();
        for key in keys {
            match named(key) {
                Some(known) => remove.push(known),
                None => problems.push(Place::default().problem(key, unknown(key, changeable()))),
            }
        }
        if keys.is_empty() {
            problems.push(Place::default().problem("", "nothing is to be unset: give keys"));
        }
        if !problems.is_empty() {
            return Err(ConfigError { problems });
        }
        let companions =
            changeable().filter(|key| key.only_with.is_some_and(|(with, _)| remove.contains(&with)));
        let companions: Vec<_> = companions.map(|key| key.name).collect();
        remove.extend(companions);
        Ok(Edit { set: BTreeMap::new(), remove })
    }

    /// Makes an edit that has these workers serve the first queue pairs, or the usual ones if there are none.
    pub(crate) fn worker(workers: &[u16]) -> Edit {
        let text = workers.iter().map(u16::to_string).collect::<Vec<_>>().join(",");
        let set = (!workers.is_empty()).then(|| ("worker".to_owned(), text));
        let remove = if workers.is_empty() { vec!["worker"] } else { Vec::new() };
        Edit { set: set.into_iter().collect(), remove }
    }

    /// Returns the edit that sets these keys, to whatever values, removes those, and touches no others; `None` if one of the names is no key that
    /// can change while a port is open.
    pub(crate) fn of_keys(set: &[String], remove: &[String]) -> Option<Edit> {
        let can_change = |key: &&'static str| changeable().any(|known| known.name == *key);
        let known = |key: &String| named(key).filter(can_change);
        let set = set.iter().map(|key| Some((known(key)?.to_owned(), String::new())));
        Some(Edit {
            set: set.collect::<Option<_>>()?,
            remove: remove.iter().map(known).collect::<Option<_>>()?,
        })
    }

    /// Returns true if the edit sets this key.
    pub(crate) fn sets(&self, key: &str) -> bool {
        self.set.contains_key(key)
    }

    /// Returns the keys that the edit sets.
    pub(crate) fn keys_set(&self) -> impl Iterator<Item = &str> {
        self.set.keys().map(String::as_str)
    }

    /// Returns the keys that the edit removes.
    pub(crate) fn keys_removed(&self) -> impl Iterator<Item = &'static str> {
        self.remove.iter().copied()
    }

    /// Returns the keys other than rules that the edit touches, each with its value in the port that it has led to.
    pub(crate) fn settings(&self, port: &PortConfig) -> Vec<(&'static str, Option<toml::Value>)> {
        let is_rule = |key: &str| RulesKeys::KEYS.iter().any(|rule| rule.name == key);
        self.values(port).into_iter().filter(|(key, _)| !is_rule(key)).collect()
    }

    /// Returns the keys that the edit touches, each with its value in the file of the port that it has led to, or `None` where the file is not to
    /// have the key.
    pub(super) fn values(&self, port: &PortConfig) -> Vec<(&'static str, Option<toml::Value>)> {
        let said: BTreeMap<_, _> = port.entries().into_iter().collect();
        let needed: BTreeMap<_, _> = port.written().into_iter().collect();
        let value = |key: &'static str| match (self.set.contains_key(key), self.remove.contains(&key)) {
            (true, _) => Some((key, said.get(key).cloned())),
            (false, true) => Some((key, needed.get(key).cloned())),
            (false, false) => None,
        };
        port.keys().filter_map(|key| value(key.name)).collect()
    }
}

/// Returns true if a key is a limit that does not hold where it is not given, for which people write `0` or `off`.
fn is_rate(key: &str) -> bool {
    key == "storm" || key.starts_with("rate_") && !key.ends_with("_burst")
}

/// The keys of ports that can change while a port of some kind is open.
fn changeable() -> impl Iterator<Item = &'static Key> {
    let keys = sections().filter(|(scope, _)| scope.is_of_port()).flat_map(|(_, keys)| keys);
    keys.filter(|key| key.change != Effect::Reopen)
}

/// Returns the name of a key of ports, as the table has it.
fn named(key: &str) -> Option<&'static str> {
    let mut keys = sections().filter(|(scope, _)| scope.is_of_port()).flat_map(|(_, keys)| keys);
    keys.find(|known| known.name == key).map(|known| known.name)
}

/// Explains in a message that there is no such key, where there are these.
fn unknown(key: &str, known: impl Iterator<Item = &'static Key>) -> String {
    let mut seen = std::collections::HashSet::new();
    let known: Vec<_> = known.map(|key| key.name).filter(|name| seen.insert(*name)).collect();
    let wrong = "is not a setting that can change while the port is open";
    // A key of another table is not a misspelling, so nothing is suggested for it.
    match nearest(key, &known).filter(|_| !sections().flat_map(|(_, keys)| keys).any(|row| row.name == key)) {
        Some(nearest) => format!("{wrong}: did you mean {nearest}?"),
        None => format!("{wrong}; known: {}", known.join(", ")),
    }
}

impl PortConfig {
    /// Returns the keys that a port of this kind may have.
    pub(super) fn keys(&self) -> impl Iterator<Item = &'static Key> {
        PortKeys::KEYS.iter().chain(self.kind.own_keys()).chain(RulesKeys::KEYS)
    }

    /// Returns the effect of a change of a key; `None` if a port of this kind has no such key.
    pub(crate) fn effect(&self, key: &str) -> Option<Effect> {
        let effect = self.keys().find(|known| known.name == key)?.change;
        Some(if effect == Effect::NextConnection && !self.kind.has_sessions() {
            Effect::Live
        } else {
            effect
        })
    }

    /// Explains in a message that ports of other kinds have this key; `None` if none has it.
    fn foreign(&self, key: &str) -> Option<String> {
        let kinds = sections().filter_map(|(scope, keys)| match scope {
            Scope::Kind(kind) if keys.iter().any(|known| known.name == key) => Some(kind),
            _ => None,
        });
        let kinds: Vec<_> = kinds.collect();
        let own = self.kind.name();
        (!kinds.is_empty())
            .then(|| format!("is a key of {} ports, and this is a {own} port", kinds.join(" and ")))
    }

    /// Returns true if this port can become `other` while it is open: no key differs that has it opened anew.
    pub(crate) fn can_become(&self, other: &PortConfig) -> bool {
        self.name == other.name
            && self.kind.name() == other.kind.name()
            && self.differing(other).iter().all(|key| self.effect(key) != Some(Effect::Reopen))
    }

    /// Returns the port after an edit.
    ///
    /// # Errors
    /// A file with these keys would be refused, or one of the keys can only change when the port is opened anew.
    pub(crate) fn edited(&self, edit: &Edit) -> Result<PortConfig, ConfigError> {
        let mut problems = Vec::new();
        for key in edit.keys_set().chain(edit.remove.iter().copied()) {
            let message = match self.effect(key) {
                Some(Effect::Live | Effect::NextConnection) => continue,
                Some(_) => "can change only when the port is opened anew, and its guest has to connect again: write it into the configuration \
                            file and use `ringferry ctl reload`, or remove the port and add it with the other value"
                    .to_owned(),
                None => self.foreign(key).unwrap_or_else(|| {
                    unknown(key, self.keys().filter(|key| key.change != Effect::Reopen))
                }),
            };
            problems.push(Place::default().problem(key, message));
        }
        if !problems.is_empty() {
            return Err(ConfigError { problems });
        }
        // What holds by default is left out, as defaults may depend on the keys that change.
        let kept = self.written().into_iter().filter(|(key, _)| !edit.remove.contains(key));
        let kept = kept.map(|(key, value)| (key.to_owned(), Value::from_written(value)));
        let set = edit.set.iter().map(|(key, value)| (key.clone(), Value::Flag(value.clone())));
        // The settings of the edit come later, so they replace those that the port has.
        let port = parse_port(Fields::of_values(kept.chain(set), &mut problems));
        port.filter(|_| problems.is_empty()).ok_or(ConfigError { problems })
    }
}
