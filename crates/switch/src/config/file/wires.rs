//! Changes of wires, kept in the configuration file as those of [ports](super) are.

use toml_edit::{ArrayOfTables, DocumentMut, Item, Table, TableLike, Value};

use super::*;
use crate::config::wires::{DIRECTIONS, ImpairmentKeys, WireKeys, Written, written};

/// Finds the file with the wire `name`, the configuration file `main` or one of its drop-in files, and the wire's index in it.
fn with_wire(main: &Path, name: &str) -> Result<Option<(Edited, usize)>, KeepError> {
    for path in files(main)? {
        let file = Edited::read(&path)?;
        if let Some(at) = file.wires.iter().position(|wire| wire.name == name) {
            return Ok(Some((file, at)));
        }
    }
    Ok(None)
}

/// Changes a wire in the configuration file `main` or one of its drop-in files so that it is this one, or adds it to `main`. Returns the file.
///
/// # Errors
/// See [`KeepError`]; the file is as it was.
pub(crate) fn keep_wire(main: &Path, wire: &Wire) -> Result<PathBuf, KeepError> {
    let (file, text) = match with_wire(main, &wire.name)? {
        Some((file, at)) => {
            let text = edited(&file.text, at, &file.wires[at], wire);
            (file, text)
        }
        None => {
            let file = Edited::read(main)?;
            let text = added(&file.text, wire);
            (file, text)
        }
    };
    let path = file.path.clone();
    file.replace(main, text)?;
    Ok(path)
}

/// Removes a wire from the configuration file `main` or one of its drop-in files, with the comment lines right above it, and returns the file.
///
/// # Errors
/// See [`KeepError`]; the file is as it was.
pub(crate) fn forget_wire(main: &Path, name: &str) -> Result<PathBuf, KeepError> {
    let gone =
        || not_kept(main, "has changed since the switch was started and has no such wire any more", &"");
    let (file, at) = with_wire(main, name)?.ok_or_else(gone)?;
    let text = without(&file.text, "wire", at);
    let path = file.path.clone();
    file.replace(main, text)?;
    Ok(path)
}

/// Returns the text with one more wire.
fn added(text: &str, wire: &Wire) -> Option<String> {
    let mut document: DocumentMut = text.parse().ok()?;
    let mut table = Table::new();
    let Written { table: entries, directions } = written(wire);
    put_all(&mut table, &entries)?;
    for (name, entries) in DIRECTIONS.into_iter().zip(&directions).filter(|(_, entries)| !entries.is_empty())
    {
        let mut direction = Table::new();
        put_all(&mut direction, entries)?;
        table.insert(name, Item::Table(direction));
    }
    match document.entry("wire").or_insert_with(|| Item::ArrayOfTables(ArrayOfTables::new())) {
        Item::ArrayOfTables(tables) => tables.push(table),
        Item::Value(Value::Array(tables)) => tables.push(table.into_inline_table()),
        _ => return None,
    }
    Some(document.to_string())
}

/// Returns the text with the wire of index `at`, which is `before`, as `wire` is. Keys whose values do not change are not touched.
fn edited(text: &str, at: usize, before: &Wire, wire: &Wire) -> Option<String> {
    let mut document: DocumentMut = text.parse().ok()?;
    let mut orphans = String::new();
    let (had, has) = (written(before), written(wire));
    let table = table_of(document.get_mut("wire")?, at)?;
    let keys = WireKeys::KEYS.iter().chain(ImpairmentKeys::KEYS).map(|key| key.name);
    for key in keys.filter(|key| !matches!(*key, "name" | "ports")) {
        orphans.push_str(&set(table, key, &had.table, &has.table)?);
    }
    for ((name, had), has) in DIRECTIONS.into_iter().zip(&had.directions).zip(&has.directions) {
        if has.is_empty() {
            table.remove(name);
            continue;
        }
        if table.get(name).is_none() {
            table.insert(name, Item::Table(Table::new()));
        }
        let direction = table.get_mut(name)?.as_table_like_mut()?;
        for key in ImpairmentKeys::KEYS {
            orphans.push_str(&set(direction, key.name, had, has)?);
        }
    }
    if !orphans.is_empty() {
        prepend_after(&mut document, "wire", at, orphans);
    }
    Some(document.to_string())
}

/// Makes a key of a table say what `has` has of it, or takes it away; returns the comments before it that nobody else takes. A key that is written as it should be, in
/// whatever way, stays as it is.
fn set(
    table: &mut dyn TableLike,
    key: &str,
    had: &[(&'static str, toml::Value)],
    has: &[(&'static str, toml::Value)],
) -> Option<String> {
    let of = |entries: &[(&'static str, toml::Value)]| {
        entries.iter().find(|(other, _)| *other == key).map(|(_, value)| value.clone())
    };
    let (before, now) = (of(had), of(has));
    let is_there = table.contains_key(key);
    match now {
        Some(value) if before.as_ref() != Some(&value) || !is_there => {
            put(table, key, value.to_string().parse().ok()?);
            Some(String::new())
        }
        None if is_there => Some(take_away(table, key)),
        _ => Some(String::new()),
    }
}

fn put_all(table: &mut Table, entries: &[(&'static str, toml::Value)]) -> Option<()> {
    for (key, value) in entries {
        table.insert(key, Item::Value(value.to_string().parse().ok()?));
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const PORTS: &str = "[[port]]\nkind = \"tap\"\ntap = \"r1\"\n\n[[port]]\nkind = \"tap\"\ntap = \"r2\"\n";

    fn read(text: &str) -> Wire {
        let config =
            Config::builder().toml("rf.toml", text).build().unwrap_or_else(|error| panic!("{text}: {error}"));
        config.wires.into_iter().next().expect("a wire")
    }

    fn settings(wire: &Wire, all: &[&str], from: Option<&str>) -> Wire {
        wire.edited(&all.iter().map(|one| (*one).to_owned()).collect::<Vec<_>>(), from).unwrap()
    }

    /// Edits the text, which must then make the wire; returns what follows the ports.
    fn edit(text: &str, all: &[&str], from: Option<&str>) -> String {
        let text = format!("{PORTS}{text}");
        let before = read(&text);
        let wire = settings(&before, all, from);
        let after = edited(&text, 0, &before, &wire).unwrap();
        assert_eq!(read(&after), wire, "{after}");
        after.strip_prefix(PORTS).unwrap().to_owned()
    }

    #[test]
    fn only_the_keys_that_change_are_touched() {
        let text = "\n# The backbone.\n[[wire]]\nports = [ \"r1\", \"r2\" ] # both\ndelay = '10ms' # as measured\n# rare\nloss = \"0.1%\"\n";
        let expected = text.replace("'10ms'", "\"20ms\"");
        assert_eq!(edit(text, &["delay=20ms"], None), expected);
        assert_eq!(edit(text, &["delay=10ms"], None), text);
        assert_eq!(edit(text, &["rate=1gbit"], None), format!("{text}rate = \"1gbit\"\n"));
        // A key at its default goes, and the comment before it stays.
        let left = text.replace("loss = \"0.1%\"\n", "");
        assert_eq!(edit(text, &["loss=0%"], None), left);
    }

    #[test]
    fn what_the_directions_do_not_share_stands_in_tables_of_their_own() {
        let text =
            "\n[[wire]]\nports = [\"r1\", \"r2\"]\ndelay = \"10ms\"\n\n[[wire]]\nports = [\"r3\", \"r4\"]\n";
        let ports = PORTS.to_owned() + &PORTS.replace("r1", "r3").replace("r2", "r4");
        let before = read(&format!("{ports}{text}"));
        let wire = settings(&before, &["loss=1%"], Some("r1"));
        let after = edited(&format!("{ports}{text}"), 0, &before, &wire).unwrap();
        assert_eq!(read(&after), wire, "{after}");
        let config = Config::builder().toml("rf.toml", &after).build().unwrap();
        assert!(config.wires[1].directions.iter().all(crate::impairments::Impairments::is_none), "{after}");
        // And back again.
        let back = edited(&after, 0, &wire, &before).unwrap();
        assert_eq!(back, format!("{ports}{text}"));
        let one =
            "\n[[wire]]\nports = [\"r1\", \"r2\"]\n\n[wire.a_to_b]\n# slow\ndelay = \"1ms\" # one way\n";
        assert_eq!(edit(one, &["delay=2ms"], Some("r1")), one.replace("1ms", "2ms"));
        let both = edit(one, &["delay=2ms"], None);
        assert!(
            both.contains("ports = [\"r1\", \"r2\"]\ndelay = \"2ms\"\n") && !both.contains("a_to_b"),
            "{both}"
        );
    }

    #[test]
    fn wires_are_added_and_removed() {
        let before =
            read(&format!("{PORTS}[[wire]]\nname = \"w\"\nports = [\"r1\", \"r2\"]\ndelay = \"1ms\"\n"));
        let wire = settings(&before, &["loss=1%"], Some("r2"));
        let after = added(PORTS, &wire).unwrap();
        assert_eq!(read(&after), wire);
        assert_eq!(without(&after, "wire", 0).unwrap(), PORTS);
    }
}
