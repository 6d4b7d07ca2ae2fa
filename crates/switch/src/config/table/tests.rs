//! Generator of random configurations, made from the table itself.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use proptest::prelude::*;
use proptest::sample::select;
use proptest::strategy::ValueTree as _;
use proptest::string::string_regex;
use proptest::test_runner::TestRunner;

use super::*;
use crate::config::values::with_unit;
use crate::config::{Config, Flag, PortKind, Scope, sections};

/// Converts a value of a file to the text of a flag.
fn in_flag(value: &Toml) -> String {
    match value {
        Toml::String(text) => text.clone(),
        Toml::Array(entries) if entries.is_empty() => "none".to_owned(),
        Toml::Array(entries) => entries.iter().map(in_flag).collect::<Vec<_>>().join(","),
        other => other.to_string(),
    }
}

/// Generates values of a shape, as in a flag.
fn value(shape: &Shape) -> BoxedStrategy<String> {
    match shape {
        Shape::Boolean => {
            select(vec!["true", "on", "yes", "false", "off", "no"]).prop_map(str::to_owned).boxed()
        }
        Shape::Number { range, power_of_two: false, .. } => {
            let ends = select(vec![*range.start(), *range.end()]);
            prop_oneof![1 => ends, 4 => range.clone()].prop_map(|number| number.to_string()).boxed()
        }
        Shape::Number { range, .. } => {
            let exponents = range.start().ilog2()..=range.end().ilog2();
            exponents.prop_map(|exponent| (1u64 << exponent).to_string()).boxed()
        }
        Shape::Span { range } => {
            let one = range.clone().prop_map(|number| number.to_string());
            let two = (range.clone(), range.clone()).prop_map(|(a, b)| format!("{}-{}", a.min(b), a.max(b)));
            prop_oneof![3 => one, 1 => two].boxed()
        }
        Shape::Choice(words) => select(words.clone()).prop_map(str::to_owned).boxed(),
        Shape::Quantity { range, units, .. } => {
            let units = *units;
            let round = (range.clone(), select(units.to_vec()))
                .prop_map(|(number, (_, scale))| number / scale * scale);
            let round = round.prop_filter("rounded away", {
                let range = range.clone();
                move |number| range.contains(number)
            });
            prop_oneof![range.clone(), round].prop_map(move |number| with_unit(number, units)).boxed()
        }
        Shape::List(of) => {
            let entries = proptest::collection::vec(value(of), 0..4);
            let joined = entries.prop_map(|mut entries| {
                entries.sort();
                entries.dedup();
                if entries.is_empty() { "none".to_owned() } else { entries.join(",") }
            });
            joined.boxed()
        }
        Shape::Each(of) => {
            let entries = proptest::collection::vec(value(of), 1..4);
            entries.prop_map(|entries| entries.join(",")).boxed()
        }
        Shape::Or(word, of) => prop_oneof![1 => Just((*word).to_owned()), 4 => value(of)].boxed(),
        Shape::Text { placeholder, .. } => text(placeholder),
    }
}

fn text(placeholder: &str) -> BoxedStrategy<String> {
    let mac = "[0-9a-f][02468ace]:[0-9a-f]{2}:[0-9a-f]{2}:[0-9a-f]{2}:[0-9a-f]{2}:0[1-9]";
    match placeholder {
        // Some paths have characters that a port's name may not have.
        "PATH" => "/[a-z]{1,5}/[a-zA-Z0-9 _-]{1,9}(\\.sock)?".boxed(),
        "NAME" | "PORT" => "[a-z][a-z0-9._@-]{0,10}".boxed(),
        "IP/BITS" => "10\\.[0-9]\\.[1-9][0-9]\\.[0-9]/(8|24|32)|fd00::[1-9a-f]{1,4}/(64|128)".boxed(),
        "ACCOUNT" => "[a-z][a-z0-9_-]{0,10}|[0-9]{1,5}".boxed(),
        "MODE" => "0?[0-7]{3}".boxed(),
        "MAC" => mac.boxed(),
        "MAC[@VLAN]" => string_regex(&format!("{mac}(@[1-3]?[0-9]{{1,3}})?")).unwrap().boxed(),
        "IP[/BITS]" => {
            let v4 = (any::<u32>(), 0u32..=32).prop_map(|(address, bits)| {
                let mask = u32::MAX.checked_shl(32 - bits).unwrap_or(0);
                format!("{}/{bits}", std::net::Ipv4Addr::from(address & mask))
            });
            let host = any::<u128>().prop_map(|address| std::net::Ipv6Addr::from(address).to_string());
            prop_oneof![v4, host].boxed()
        }
        "POLICY" => "[a-z0-9][a-z0-9_.-]{0,20}".boxed(),
        "CLASS" => "[a-zA-Z0-9_-]{1,32}".boxed(),
        "DOMAIN.DEVICE" => {
            (0u16..0x7ff0, any::<u32>()).prop_map(|(domain, device)| format!("{domain}.{device}")).boxed()
        }
        other => panic!("no strategy for {other}"),
    }
}

/// A port as a user might write it: the beginning of the flag, a value for every other key, and the set of
/// keys that are given.
#[derive(Clone, Debug)]
struct Draft {
    kind: &'static str,
    flag: &'static Flag,
    at: String,
    values: BTreeMap<&'static str, String>,
    given: BTreeSet<&'static str>,
}

impl Draft {
    fn in_flag(&self) -> String {
        let keys = self.given.iter().map(|key| format!(",{key}={}", self.values[key]));
        format!("{}:{}{}", self.flag.word, self.at, keys.collect::<String>())
    }

    fn in_file(&self) -> String {
        let line = |key: &Key, value: &str| format!("{} = {}\n", key.name, key.shape().in_file(value));
        let begin = keys_of(self.kind).find(|key| key.name == self.flag.key).unwrap();
        let keys = keys_of(self.kind).filter(|key| self.given.contains(key.name));
        let keys: String = keys.map(|key| line(key, &self.values[key.name])).collect();
        format!("[[port]]\nkind = {:?}\n{}{keys}", self.kind, line(begin, &self.at))
    }

    /// The configuration, after keys were dropped that do not go with others and those were added without which others make no
    /// sense. Every refusal names such a key.
    fn accepted(mut self) -> (Draft, Config) {
        for _ in 0..12 {
            let error = match flag(&self.in_flag()) {
                Ok(config) => return (self, config),
                Err(error) => error,
            };
            let wrong: BTreeSet<_> = error.problems.iter().map(|problem| problem.key.clone()).collect();
            for key in wrong {
                let key = self.values.keys().copied().find(|known| *known == key);
                let key = key.unwrap_or_else(|| panic!("names no key: {error}"));
                if !self.given.remove(key) {
                    self.given.insert(key);
                }
            }
        }
        panic!("still refused: {}", self.in_flag());
    }
}

fn flag(text: &str) -> Result<Config, crate::config::ConfigError> {
    Config::builder().workers(16).port_flag(text).build()
}

fn file(text: &str) -> Config {
    Config::builder()
        .workers(16)
        .toml("rf.toml", text)
        .build()
        .unwrap_or_else(|error| panic!("{error}\n{text}"))
}

/// Returns the keys of a port of a kind, without `kind`.
fn keys_of(kind: &str) -> impl Iterator<Item = &'static Key> {
    let here = sections().filter(move |(scope, _)| match scope {
        Scope::Port | Scope::Rules => true,
        Scope::Kind(other) => *other == kind,
        Scope::Top | Scope::Switch | Scope::Wire | Scope::Impairments => false,
    });
    here.flat_map(|(_, keys)| keys).filter(|key| key.name != "kind")
}

/// Generates a value for each key.
fn values(keys: impl Iterator<Item = &'static Key>) -> impl Strategy<Value = BTreeMap<&'static str, String>> {
    let all: Vec<_> = keys.map(|key| value(&key.shape()).prop_map(|value| (key.name, value))).collect();
    all.prop_map(|all| all.into_iter().collect())
}

fn draft() -> impl Strategy<Value = Draft> {
    select(PortKind::flags().collect::<Vec<_>>()).prop_flat_map(|(kind, flag)| {
        let begin = keys_of(kind).find(|key| key.name == flag.key).expect("a flag begins with a key");
        let begins: Vec<_> =
            PortKind::flags().filter(|(other, _)| *other == kind).map(|(_, flag)| flag.key).collect();
        let others: Vec<_> = keys_of(kind).filter(|key| !begins.contains(&key.name)).collect();
        let names: Vec<_> = others.iter().map(|key| key.name).collect();
        let some = proptest::sample::subsequence(names.clone(), 0..=names.len());
        (value(&begin.shape()), values(others.into_iter()), some).prop_map(move |(at, values, some)| Draft {
            kind,
            flag,
            at,
            values,
            given: some.into_iter().collect(),
        })
    })
}

/// Generates the keys of a file that are not a port's.
fn rest() -> impl Strategy<Value = String> {
    let keys = |wanted| sections().filter(move |(scope, _)| *scope == wanted).flat_map(|(_, keys)| keys);
    let lines = |wanted| {
        let given = any::<u64>();
        (values(keys(wanted)), given).prop_map(move |(values, given)| {
            let given = keys(wanted).enumerate().filter(|(at, _)| given >> at & 1 == 1);
            given
                .map(|(_, key)| format!("{} = {}\n", key.name, key.shape().in_file(&values[key.name])))
                .collect::<String>()
        })
    };
    (lines(Scope::Top), lines(Scope::Switch)).prop_map(|(top, switch)| format!("{top}[switch]\n{switch}"))
}

/// Returns the flag that makes the same port.
fn written_as_a_flag(config: &Config) -> String {
    let mut entries: BTreeMap<_, _> = config.ports[0].entries().into_iter().collect();
    let kind = entries.remove("kind").unwrap();
    let (flag, at) = PortKind::flags()
        .filter(|(other, _)| kind.as_str() == Some(other))
        .find_map(|(_, flag)| Some((flag, entries.remove(flag.key)?)))
        .unwrap();
    let keys = entries.iter().map(|(key, value)| format!(",{key}={}", in_flag(value)));
    format!("{}:{}{}", flag.word, in_flag(&at), keys.collect::<String>())
}

proptest! {
    #[test]
    fn ports_are_the_same_from_flags_and_files_and_written_and_read_again(draft in draft()) {
        let (draft, config) = draft.accepted();
        let workers = file(&format!("[switch]\nworkers = 16\n{}", draft.in_file()));
        prop_assert_eq!(&workers, &config, "{}", draft.in_file());
        prop_assert_eq!(&file(&config.dump()), &config, "{}", config.dump());
        let again = written_as_a_flag(&config);
        prop_assert_eq!(&flag(&again).unwrap(), &config, "{}", again);
    }

    #[test]
    fn the_rest_of_a_file_is_written_and_read_again(rest in rest()) {
        let port = "[[port]]\nkind = 'tap'\ntap = 'rf0'\n";
        let config = Config::builder().toml("rf.toml", &format!("{rest}{port}")).build().unwrap();
        let again = Config::builder().toml("rf.toml", &config.dump()).build().unwrap();
        prop_assert_eq!(&again, &config, "{}", config.dump());
        // An empty list says what none says.
        for line in rest.lines().filter(|line| !line.ends_with("= []")) {
            prop_assert!(config.dump().contains(line), "{}\n{}", line, config.dump());
        }
    }
}

/// The generator above leaves no key out.
#[test]
fn random_ports_have_every_key() {
    let mut runner = TestRunner::deterministic();
    let mut seen = BTreeSet::new();
    for _ in 0..400 {
        let (draft, _) = draft().new_tree(&mut runner).unwrap().current().accepted();
        let given = draft.given.iter().chain([&draft.flag.key]);
        seen.extend(given.map(|key| (draft.kind, *key)));
    }
    let kinds: BTreeSet<_> = PortKind::flags().map(|(kind, _)| kind).collect();
    let all: BTreeSet<_> = kinds.iter().flat_map(|kind| keys_of(kind).map(|key| (*kind, key.name))).collect();
    assert_eq!(seen, all);
}

/// Makes a draft with one key and the keys that it needs.
fn with(kind: &'static str, flag: &'static Flag, at: &str, key: &Key, value: &str) -> Option<Draft> {
    let values: BTreeMap<_, _> = keys_of(kind).map(|key| (key.name, key.example.to_owned())).collect();
    // `allowed_ips` needs `allowed_macs`, which has a meaning of its own.
    let guard = (key.name == "allowed_ips").then_some("allowed_macs");
    let needed = key.only_with.map(|(with, _)| with).or(guard);
    let given = [key.name].into_iter().chain(needed).collect();
    let mut draft = Draft { kind, flag, at: at.to_owned(), values, given };
    draft.values.insert(keys_of(kind).find(|known| known.name == key.name)?.name, value.to_owned());
    let begins = flag.key == key.name;
    if begins {
        draft.given.remove(key.name);
        draft.at = value.to_owned();
    }
    let (draft, _) = draft.accepted();
    (begins || draft.given.contains(key.name)).then_some(draft)
}

/// Returns all ways to begin a flag, with an example of the place.
fn begins() -> impl Iterator<Item = (&'static str, &'static Flag, String)> {
    PortKind::flags().flat_map(|(kind, flag)| {
        let key = keys_of(kind).find(|key| key.name == flag.key).unwrap();
        let places = match key.shape() {
            Shape::Choice(words) => words.into_iter().map(str::to_owned).collect(),
            _ => vec![key.example.to_owned()],
        };
        places.into_iter().map(move |place| (kind, flag, place))
    })
}

/// Returns the configurations with and without this key, made by a file or by the first way to begin a flag
/// that takes it.
fn with_and_without(scope: Scope, key: &Key, value: &str) -> Option<(Config, Config)> {
    let port = "[[port]]\nkind = 'tap'\ntap = 'rf0'\n";
    let line = format!("{} = {}\n", key.name, key.shape().in_file(value));
    match scope {
        Scope::Top => Some((file(&format!("{line}{port}")), file(port))),
        Scope::Switch => Some((file(&format!("[switch]\n{line}{port}")), file(port))),
        Scope::Wire | Scope::Impairments => {
            let ends = if key.name == "ports" { "" } else { "ports = ['r1-eth1', 'r2-eth1']\n" };
            let needs = match key.name {
                "distribution" => "jitter = '1ms'\n",
                "reorder" => "delay = '10ms'\n",
                "gap" => "delay = '10ms'\nreorder = '25%'\n",
                "limit" => "rate = '1gbit'\n",
                _ => "",
            };
            let ports =
                ["r1-eth1", "r2-eth1"].map(|tap| format!("[[port]]\nkind = 'tap'\ntap = '{tap}'\n")).concat();
            let with = file(&format!("{ports}[[wire]]\n{ends}{needs}{line}"));
            let without =
                if ends.is_empty() { with.clone() } else { file(&format!("{ports}[[wire]]\n{ends}{needs}")) };
            Some((with, without))
        }
        Scope::Port if key.name == "kind" => Some((file(port), file(port))),
        Scope::Port | Scope::Kind(_) | Scope::Rules => begins().find_map(|(kind, flag, at)| {
            if matches!(scope, Scope::Kind(other) if other != kind) {
                return None;
            }
            let mut draft = with(kind, flag, &at, key, value)?;
            let config = draft.clone().accepted().1;
            if flag.key == key.name {
                let without = format!(
                    "[switch]\nworkers = 16\n[[port]]\nkind = {kind:?}\nname = {:?}\n",
                    config.ports[0].name
                );
                let without =
                    Config::builder().toml("rf.toml", &without).build().unwrap_or_else(|_| config.clone());
                return Some((config, without));
            }
            draft.given.remove(key.name);
            Some((config, draft.accepted().1))
        }),
    }
}

#[test]
fn every_key_is_explained_and_its_example_and_default_are_accepted() {
    for (scope, key) in sections().flat_map(|(scope, keys)| keys.iter().map(move |key| (scope, key))) {
        let name = key.name;
        assert!(key.help.len() > 10 && key.help.ends_with('.'), "{name}: {}", key.help);
        assert!(!key.shape().to_string().is_empty(), "{name}");
        assert!(with_and_without(scope, key, key.example).is_some(), "example of {name} refused");
        match key.default {
            Unset::Required => {}
            Unset::Means(meaning) => assert!(!meaning.is_empty(), "{name}"),
            Unset::Value(default) => {
                let both = with_and_without(scope, key, default);
                let (with, without) = both.unwrap_or_else(|| panic!("default of {name} refused: {default}"));
                assert_eq!(with, without, "{name} without a value is not {default}");
            }
        }
    }
}

/// People copy the example of the package, so it must be valid.
#[test]
fn example_of_the_package_is_valid() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../contrib/ringferry.toml");
    assert_eq!(Config::from_file(&path).unwrap().ports.len(), 3);
    let text = std::fs::read_to_string(path).unwrap();
    assert!(text.contains("docs/configuration.md"), "it says where all keys are");
}
