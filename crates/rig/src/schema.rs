//! The JSON schemas in docs/schema/: they are written from the types that programs print, and what programs print is held against them.
//!
//! [`assert_committed`] compares a schema with its file. [`assert_described`] takes the output of a command, looks up in the table of docs/json.md which
//! schema is the command's, and validates with a validator that is not ours. The files let readers ignore fields that only a later version has; tests
//! refuse every field that is not in the schema, so that none is printed that is not described.

use std::path::PathBuf;

use schemars::generate::SchemaSettings;
use schemars::transform::RecursiveTransform;
use schemars::{JsonSchema, Schema};
use serde_json::Value;

/// The variable in the environment with which tests write the files instead of comparing them.
const UPDATE: &str = "UPDATE_EXPECT";

/// The schema of everything that says why there is no answer.
const ERROR: &str = "error";

/// Asserts that docs/schema/ has the schema of `T` under this name.
#[track_caller]
pub fn assert_committed<T: JsonSchema>(name: &str, version: &str, title: &str) {
    let mut schema = SchemaSettings::draft2020_12()
        .for_serialize()
        .with_transform(RecursiveTransform(without_links))
        .into_generator()
        .into_root_schema_for::<T>();
    schema.insert("$id".to_owned(), format!("urn:ringferry:{name}/{version}").into());
    schema.insert("title".to_owned(), title.into());
    let generated = format!("{:#}\n", schema.as_value());
    let path = file(name);
    if std::env::var_os(UPDATE).is_some() {
        std::fs::write(&path, &generated).unwrap();
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    let package = std::env::var("CARGO_PKG_NAME").unwrap_or_default();
    assert!(
        committed == generated,
        "docs/schema/{name}.json is not what `{title}` prints: write it with `{UPDATE}=1 cargo test -p {package} schemas`, \
         and read in docs/json.md whether the version has to be raised"
    );
}

/// Asserts that each document in `output` is as docs/json.md says of this command of `ringferry`.
#[track_caller]
pub fn assert_described(command: &[&str], output: &str) {
    let names = of_command(command);
    assert!(!names.is_empty(), "docs/json.md has no row for `ringferry {}`", command.join(" "));
    let documents = serde_json::Deserializer::from_str(output).into_iter::<Value>();
    let mut count = 0;
    for document in documents.map(Result::unwrap) {
        let is_error = document.get("error").is_some() && document.get("kind").is_some();
        let names = if is_error { vec![ERROR.to_owned()] } else { names.clone() };
        let mistakes: Vec<String> = names.iter().map(|name| mistakes(name, &document)).collect();
        assert!(
            mistakes.iter().any(String::is_empty),
            "`ringferry {}` prints what docs/schema/ does not describe:\n{}\n{document:#}",
            command.join(" "),
            mistakes.concat()
        );
        count += 1;
    }
    assert!(count > 0, "`ringferry {}` has printed no JSON", command.join(" "));
}

/// The names of the schemas of a command, by the row of docs/json.md that names most of its words.
pub fn of_command(command: &[&str]) -> Vec<String> {
    let is_of = |row: &str| {
        let mut words = command.iter();
        row.split(' ').skip(1).all(|word| words.any(|said| *said == word))
    };
    let of = rows().into_iter().filter(|(row, _)| is_of(row));
    of.max_by_key(|(row, _)| row.split(' ').count()).map(|(_, names)| names).unwrap_or_default()
}

/// The table of docs/json.md: each command, as it begins, with the names of its schemas.
fn rows() -> Vec<(String, Vec<String>)> {
    let page = page();
    let mut rows = Vec::new();
    for line in page.lines().filter(|line| line.starts_with("| `ringferry")) {
        let commands = line.split('|').nth(1).unwrap();
        let names: Vec<String> = links(line).collect();
        // Between backticks is every second piece.
        rows.extend(
            commands.split('`').skip(1).step_by(2).map(|command| (command.to_owned(), names.clone())),
        );
    }
    rows
}

/// The names of the schemas that docs/json.md links to, in order.
pub fn linked() -> Vec<String> {
    let mut names: Vec<String> = links(&page()).collect();
    names.sort();
    names
}

fn links(text: &str) -> impl Iterator<Item = String> {
    text.split("](schema/").skip(1).filter_map(|rest| Some(rest.split_once(".json)")?.0.to_owned()))
}

fn page() -> String {
    std::fs::read_to_string(docs().join("json.md")).unwrap()
}

/// The names of the files in docs/schema/, in order.
pub fn files() -> Vec<String> {
    let entries = std::fs::read_dir(docs().join("schema")).unwrap();
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .map(|name| name.strip_suffix(".json").unwrap_or(&name).to_owned())
        .collect();
    names.sort();
    names
}

/// The schema of this name, as docs/schema/ has it.
pub fn committed(name: &str) -> Value {
    serde_json::from_str(&std::fs::read_to_string(file(name)).unwrap()).unwrap()
}

/// What is wrong with a document by the schema of this name, a line each.
fn mistakes(name: &str, document: &Value) -> String {
    let mut schema = committed(name);
    refuse_unknown(&mut schema);
    let validator = jsonschema::validator_for(&schema).unwrap_or_else(|error| panic!("{name}.json: {error}"));
    let errors = validator.iter_errors(document);
    errors.map(|error| format!("  {name}.json, at {:?}: {error}\n", error.instance_path().as_str())).collect()
}

/// Has a schema refuse the fields that it does not describe.
fn refuse_unknown(schema: &mut Value) {
    match schema {
        Value::Object(members) => {
            members.values_mut().for_each(refuse_unknown);
            if members.get("properties").is_some_and(Value::is_object) && members.get("type").is_some() {
                members.entry("additionalProperties").or_insert(false.into());
            }
        }
        Value::Array(items) => items.iter_mut().for_each(refuse_unknown),
        _ => {}
    }
}

/// Takes the links of a description away, which are rustdoc's.
fn without_links(schema: &mut Schema) {
    let Some(Value::String(description)) = schema.get_mut("description") else { return };
    let mut text = String::new();
    let mut rest = description.as_str();
    while let Some((before, link)) = rest.split_once('[') {
        text += before;
        let (words, after) = link.split_once(']').unwrap_or((link, ""));
        text += words;
        rest = match after.strip_prefix('(').and_then(|target| target.split_once(')')) {
            Some((_, after)) => after,
            None => after,
        };
    }
    *description = text + rest;
}

fn docs() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs"))
}

fn file(name: &str) -> PathBuf {
    docs().join("schema").join(format!("{name}.json"))
}
