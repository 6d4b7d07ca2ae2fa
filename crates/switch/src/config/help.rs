//! The table of keys as help on the command line.

use std::fmt::Write as _;

use super::*;

/// Columns of a line of help.
const WIDTH: usize = 100;

/// In front of what is said of a key.
const INDENT: &str = "      ";

/// Returns the help on `--port`: how a flag may begin, and the keys that may follow.
pub fn port_keys_help() -> String {
    let mut out = "Ports, as KIND:WHERE[,KEY=VALUE...]:\n".to_owned();
    for (_, Flag { word, place, help, .. }) in PortKind::flags() {
        // `fmt::Write` for `String` cannot fail.
        let _ = writeln!(out, "  {:28}  {help}", format!("{word}:{place}"));
    }
    // A key whose value the flag's first word or its place gives is not listed again.
    let said: Vec<_> = PortKind::flags().map(|(kind, flag)| (kind, flag.key)).collect();
    let said = |scope, key: &Key| matches!(scope, Scope::Kind(kind) if said.contains(&(kind, key.name)));
    out.push_str("\nKeys of every port (a configuration file has the same, and its own line for a path with a comma in it):\n");
    for (scope, keys) in sections() {
        match scope {
            Scope::Top | Scope::Switch | Scope::Wire | Scope::Impairments => continue,
            Scope::Port => {}
            Scope::Kind(kind) => {
                let _ = writeln!(out, "\nKeys of a {kind} port:");
            }
            Scope::Rules => {
                out.push_str("\nRules of a port of any kind:\n");
            }
        }
        let keys = keys.iter().filter(|key| key.name != "kind" && !said(scope, key));
        keys.for_each(|key| explain(key, &mut out));
    }
    out
}

/// Returns the help on the settings of a port that can change while it is open, for a program that changes them.
pub fn settings_help() -> String {
    let mut out = "Rules of a port of any kind, which hold at once:\n".to_owned();
    RulesKeys::KEYS.iter().for_each(|key| explain(key, &mut out));
    for (scope, keys) in sections() {
        let whose = match scope {
            Scope::Top | Scope::Switch | Scope::Rules | Scope::Wire | Scope::Impairments => continue,
            Scope::Port => "every port".to_owned(),
            Scope::Kind(kind) => format!("a {kind} port"),
        };
        let groups =
            [(Effect::Live, "hold at once"), (Effect::NextConnection, "hold with the next connection")];
        for (effect, when) in groups {
            let keys: Vec<_> = keys.iter().filter(|key| key.change == effect).collect();
            if !keys.is_empty() {
                let _ = writeln!(out, "\nKeys of {whose} that {when}:");
                keys.into_iter().for_each(|key| explain(key, &mut out));
            }
        }
    }
    out
}

/// Returns the help on the impairments of a wire.
pub fn wire_help() -> String {
    let mut out = String::new();
    ImpairmentKeys::KEYS.iter().for_each(|key| explain(key, &mut out));
    out
}

/// Returns the keys of a port that can change while it is open, each with its meaning, in which code is in backticks. A key that ports of several kinds
/// have comes once for each.
pub fn setting_keys() -> impl Iterator<Item = (&'static str, &'static str)> {
    let of_ports = sections().filter(|(scope, _)| !matches!(scope, Scope::Wire | Scope::Impairments));
    let keys = of_ports.flat_map(|(scope, keys)| {
        let is_rule = scope == Scope::Rules;
        keys.iter().filter(move |key| is_rule || matches!(key.change, Effect::Live | Effect::NextConnection))
    });
    keys.map(|key| (key.name, key.help))
}

/// Appends the help on one key: the key on one line, and on the next ones its meaning, its values and its
/// default.
fn explain(key: &Key, out: &mut String) {
    let shape = key.shape();
    let _ = writeln!(out, "  {}={}", key.name, shape.placeholder());
    let default = match key.default {
        Unset::Value(value) => format!("; default: {value}"),
        Unset::Means(meaning) => format!("; default: {meaning}"),
        Unset::Required => String::new(),
    };
    // The placeholder shows how to write a word or a number; other values need an example.
    let example = match shape {
        Shape::Boolean | Shape::Number { .. } | Shape::Choice(_) => String::new(),
        _ => format!("; example: {}", key.example),
    };
    let mut column = None;
    for word in format!("{} [{shape}{default}{example}]", key.help).split(' ') {
        match column {
            Some(at) if at + 1 + word.len() <= WIDTH => {
                let _ = write!(out, " {word}");
                column = Some(at + 1 + word.len());
            }
            begun => {
                let _ = write!(out, "{}{INDENT}{word}", if begun.is_some() { "\n" } else { "" });
                column = Some(INDENT.len() + word.len());
            }
        }
    }
    out.push('\n');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_broken_between_words_before_they_are_too_long() {
        for help in [port_keys_help(), settings_help()] {
            for line in help.lines().filter(|line| line.starts_with(INDENT)) {
                let said = line.trim_start();
                assert!(!said.contains("  "), "{line:?}");
                assert!(line.len() <= WIDTH || !said.contains(' '), "{line:?}");
            }
        }
    }
}
