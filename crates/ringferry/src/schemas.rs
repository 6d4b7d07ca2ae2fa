//! The schemas of what `--json` prints, in docs/schema/: `UPDATE_EXPECT=1 cargo test -p ringferry schemas` writes them from the types that are printed.

use clap::CommandFactory;
use ringferry_control as control;
use ringferry_control::snapshot::{FdbSnapshot, Snapshot, VERSION};
use ringferry_rig::schema;
use serde_json::Value;

/// Makes a table of name and title of each schema, and the type that it is of.
macro_rules! schemas {
    ($($name:literal, $title:literal: $type:ty;)+) => {
        const NAMES: &[&str] = &[$($name),+];

        #[test]
        fn the_files_in_docs_are_what_the_program_prints() {
            $(schema::assert_committed::<$type>($name, &VERSION.to_string(), $title);)+
        }
    };
}

schemas! {
    "capture", "ringferry capture": crate::capture::Summary;
    "capture-list", "ringferry capture --list": Vec<String>;
    "channels", "ringferry ctl channels": control::channels::Channels;
    "check", "ringferry run --check": crate::run::check::Checked;
    "demo", "ringferry demo": crate::demo::report::Document;
    "denial", "ringferry ctl denials": control::firewall::DenialLine;
    "error", "errors of ringferry ctl, ringferry top and ringferry capture": crate::error_report::ErrorReport;
    "explain", "ringferry ctl explain": control::explain::Explanation;
    "fdb", "ringferry ctl fdb": FdbSnapshot;
    "fdb-flush", "ringferry ctl fdb flush": control::mirror::FdbFlush;
    "firewall", "ringferry ctl firewall PORT": control::firewall::FirewallReport;
    "firewalls", "ringferry ctl firewall": control::firewall::Firewalls;
    "guest", "ringferry guest": ringferry_guest::guest::Summary<'static>;
    "link", "ringferry ctl link": control::mirror::LinkChange;
    "mirrors", "ringferry ctl mirror": control::mirror::Mirrors;
    "netfront", "ringferry netfront": ringferry_guest::netfront::Report<'static>;
    "port-change", "ringferry ctl add, ringferry ctl remove": control::PortChange;
    "reload", "ringferry ctl reload": control::Reload;
    "rules", "ringferry ctl rules": control::PortRules;
    "settings-change", "ringferry ctl set, ringferry ctl unset": control::SettingsChange;
    "show", "ringferry ctl show": Snapshot;
    "show-guest", "ringferry ctl show, asked of a ringferry guest": control::GuestSnapshot;
    "stats", "ringferry ctl stats": control::channels::Stats;
    "steering", "ringferry ctl steering, ringferry ctl assign": control::channels::Steering;
    "top", "ringferry top": crate::top::Screen<'static>;
    "trace", "ringferry ctl trace": control::trace::Trace;
    "traffic", "ringferry traffic client": crate::traffic::Report;
    "traffic-progress", "ringferry traffic client --progress-json": crate::traffic::Progress;
    "why", "ringferry ctl why": control::why::Diagnosis;
    "why-all", "ringferry ctl why without a port": Vec<control::why::Diagnosis>;
    "wire-change", "ringferry ctl wire set, ringferry ctl wire reset, ringferry ctl wire add, ringferry ctl wire remove": control::wire::WireChange;
    "wires", "ringferry ctl wire": control::wire::Wires;
}

/// Fields of an object of a schema, and of all below it, that have no description.
fn undescribed(schema: &Value, found: &mut Vec<String>) {
    let fields = schema.get("properties").and_then(Value::as_object).into_iter().flatten();
    found
        .extend(fields.filter(|(_, field)| field.get("description").is_none()).map(|(name, _)| name.clone()));
    match schema {
        Value::Object(members) => members.values().for_each(|below| undescribed(below, found)),
        Value::Array(items) => items.iter().for_each(|below| undescribed(below, found)),
        _ => {}
    }
}

#[test]
fn every_field_has_a_description() {
    for name in NAMES {
        let mut found = Vec::new();
        undescribed(&schema::committed(name), &mut found);
        assert!(
            found.is_empty(),
            "fields without a comment, of what docs/schema/{name}.json describes: {found:?}"
        );
    }
}

/// The names of the commands that have an option whose name ends in `json`, each with that option.
fn commands(command: &clap::Command, path: &[&str], found: &mut Vec<Vec<String>>) {
    for argument in command.get_arguments().filter_map(|argument| argument.get_long()) {
        if argument == "json" || argument.ends_with("-json") {
            let option = format!("--{argument}");
            found.push(path.iter().copied().chain([option.as_str()]).map(str::to_owned).collect());
        }
    }
    for below in command.get_subcommands() {
        commands(below, &[path, &[below.get_name()]].concat(), found);
    }
}

#[test]
fn every_command_that_prints_json_has_a_schema() {
    let mut found = Vec::new();
    commands(&crate::Cli::command(), &[], &mut found);
    assert!(found.len() > 20, "only {} commands were found", found.len());
    for command in found {
        let words: Vec<&str> = command.iter().map(String::as_str).collect();
        assert!(!schema::of_command(&words).is_empty(), "docs/json.md has no row for {command:?}");
    }
}

#[test]
fn every_schema_is_in_the_table_and_has_a_file() {
    assert_eq!(schema::files(), schema::linked());
    let ours: Vec<String> = schema::files().into_iter().filter(|name| !name.starts_with("lab")).collect();
    assert_eq!(ours, NAMES);
}

#[test]
fn what_is_not_described_is_found() {
    schema::assert_described(&["ctl", "link", "a", "up", "--json"], r#"{"port":"a","up":true,"told":false}"#);
    schema::assert_described(&["ctl", "link", "a", "--json"], r#"{"error":"no","kind":"refused"}"#);
    for wrong in [
        r#"{"port":"a","up":true,"told":false,"more":1}"#,
        r#"{"port":"a","up":true}"#,
        r#"{"port":"a","up":1,"told":false}"#,
        r#"{"error":"no","kind":"unknown"}"#,
        "",
    ] {
        let result = std::panic::catch_unwind(|| schema::assert_described(&["ctl", "link"], wrong));
        assert!(result.is_err(), "{wrong:?} is described");
    }
}
