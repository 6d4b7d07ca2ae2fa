//! Changes made while the switch runs, kept in the file that it was started from: settings of ports, and ports that come and go.
//!
//! The file is read when it is edited, so that what people wrote into it meanwhile stays, with comments and order; only the keys
//! that were changed are touched. It is replaced as a whole or not at all: a new file in the same directory, with
//! the same owner and permissions, takes its name once it is on the disk.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::unix::fs::{MetadataExt, PermissionsExt, fchown};

use toml_edit::{ArrayOfTables, DocumentMut, Item, KeyMut, Table, TableLike, Value};

use super::*;

pub(super) mod wires;

/// The error of an edit that is not in the file.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum KeepError {
    /// The file could not be changed, and is as it was; the text is the reason.
    #[error("{0}")]
    NotKept(String),
    /// The file would make no sense any more with this edit.
    #[error("{0}")]
    Refused(ConfigError),
}

/// Where the settings of a port were changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Kept {
    /// The file that has the port: the configuration file or one of its drop-in files.
    pub(crate) path: PathBuf,
    /// True if the file makes this very port now.
    pub(crate) same: bool,
}

/// Returns the drop-in files of a configuration file, in the order of their names: `*.toml` in the directory that has the name of the
/// file with `.d` in place of its extension (`ringferry.d` for `ringferry.toml`). Names that begin with a dot are left out. There need be no such directory, and what has such
/// a name need not be a file.
///
/// # Errors
/// The directory exists and cannot be read.
pub fn drop_ins(file: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(drop_in_directory(file)) {
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            return Ok(Vec::new());
        }
        entries => entries?,
    };
    let mut files = entries.map(|entry| Ok(entry?.path())).collect::<io::Result<Vec<_>>>()?;
    let hidden = |path: &Path| path.file_name().is_none_or(|name| name.as_encoded_bytes().starts_with(b"."));
    files.retain(|path| path.extension().is_some_and(|extension| extension == "toml") && !hidden(path));
    files.sort_unstable();
    Ok(files)
}

/// Returns the directory of a configuration file's drop-in files, which need not be there.
pub(super) fn drop_in_directory(file: &Path) -> PathBuf {
    file.with_extension("d")
}

/// One file of a configuration while it is edited.
struct Edited {
    /// The path by which people know it.
    path: PathBuf,
    /// The file itself. If the path is a link, the file that it leads to is replaced, not the link.
    target: PathBuf,
    text: String,
    ports: Vec<PortConfig>,
    wires: Vec<Wire>,
}

impl Edited {
    /// Reads a file.
    fn read(path: &Path) -> Result<Edited, KeepError> {
        let not_kept = |what: &str, error: &dyn Display| not_kept(path, what, error);
        let target = fs::canonicalize(path).map_err(|error| not_kept("cannot be read: ", &error))?;
        // A pipe must not be opened: reading it might wait for ever.
        if !fs::metadata(&target).is_ok_and(|metadata| metadata.is_file()) {
            return Err(not_kept("is not a file that could be written", &""));
        }
        let text = fs::read_to_string(&target).map_err(|error| not_kept("cannot be read: ", &error))?;
        let config = parsed(path, &text).map_err(|error| {
            KeepError::NotKept(format!(
                "it has changed since the switch was started and cannot be used as it is: {error}"
            ))
        })?;
        Ok(Edited { path: path.to_owned(), target, text, ports: config.ports, wires: config.wires })
    }

    /// Finds the file with the port `name`, the configuration file `main` or one of its drop-in files, and the port's index in it.
    fn with_port(main: &Path, name: &str) -> Result<(Edited, usize), KeepError> {
        for path in files(main)? {
            let file = Edited::read(&path)?;
            if let Some(at) = file.ports.iter().position(|port| port.name == name) {
                return Ok((file, at));
            }
        }
        Err(not_kept(main, "has changed since the switch was started and has no such port any more", &""))
    }

    /// Replaces the file by one with this text, if the configuration `main` with its drop-in files makes sense then, and returns the ports
    /// in the file.
    fn replace(self, main: &Path, text: Option<String>) -> Result<Vec<PortConfig>, KeepError> {
        let text = text.ok_or_else(|| not_kept(&self.path, "the port cannot be found", &""))?;
        let after = parsed(&self.path, &text).map_err(KeepError::Refused)?;
        if let Err(error) = self.check_whole(main, &text) {
            // A mistake in the file of another port is not this edit's.
            return Err(match (error, self.check_whole(main, &self.text)) {
                (KeepError::Refused(_), Err(before)) => KeepError::NotKept(format!(
                    "the configuration has changed since the switch was started and cannot be used as it is: {before}"
                )),
                (error, _) => error,
            });
        }
        replace(&self.target, &text).map_err(|error| not_kept(&self.path, "cannot be written: ", &error))?;
        Ok(after.ports)
    }

    /// Checks the whole configuration with this text in place of the file: what makes sense alone may have a name or an address that
    /// another file has.
    fn check_whole(&self, main: &Path, text: &str) -> Result<(), KeepError> {
        // What its wires join may have been given by flags.
        let mut builder = Config::builder().part_of_a_configuration();
        for path in files(main)? {
            let parse = if path == main { ConfigBuilder::document } else { ConfigBuilder::drop_in };
            builder = if path == self.path {
                builder.parse(&path.display().to_string(), text, parse)
            } else {
                builder.read(&path, parse)
            };
        }
        builder.build().map(drop).map_err(KeepError::Refused)
    }
}

/// Returns the configuration file `main` and its drop-in files.
fn files(main: &Path) -> Result<Vec<PathBuf>, KeepError> {
    let drop_ins = drop_ins(main);
    let drop_ins =
        drop_ins.map_err(|error| not_kept(main, "its drop-in files cannot be listed: ", &error))?;
    Ok([vec![main.to_owned()], drop_ins].concat())
}

fn not_kept(path: &Path, what: &str, error: &dyn Display) -> KeepError {
    KeepError::NotKept(format!("{}: {what}{error}", path.display()))
}

/// Reads the ports and wires in a text, that of the file at `path`.
fn parsed(path: &Path, text: &str) -> Result<Config, ConfigError> {
    let builder = Config::builder().part_of_a_configuration();
    builder.toml(&path.display().to_string(), text).build()
}

/// Changes the settings of a port in the configuration file `main` or one of its drop-in files, so that the keys of `edit` say what `port`
/// has. Others of its keys may be different there, as they were changed by hand, or here and not kept.
///
/// # Errors
/// See [`KeepError`]; the file is as it was.
pub(crate) fn keep(main: &Path, edit: &Edit, port: &PortConfig) -> Result<Kept, KeepError> {
    let (file, at) = Edited::with_port(main, &port.name)?;
    let text = edit_text(&file.text, at, edit, port);
    let path = file.path.clone();
    let after = file.replace(main, text)?;
    Ok(Kept { path, same: after.get(at) == Some(port) })
}

/// Adds a port at the end of the configuration file `main`.
///
/// # Errors
/// See [`KeepError`]; the file is as it was.
pub(crate) fn keep_port(main: &Path, port: &PortConfig) -> Result<(), KeepError> {
    let file = Edited::read(main)?;
    let text = with_port(&file.text, port);
    file.replace(main, text).map(drop)
}

/// Removes a port from the configuration file `main` or one of its drop-in files, with the comment lines right above it, and returns the file.
/// A drop-in file that has nothing else is left empty.
///
/// # Errors
/// See [`KeepError`]; the file is as it was.
pub(crate) fn forget_port(main: &Path, name: &str) -> Result<PathBuf, KeepError> {
    let (file, at) = Edited::with_port(main, name)?;
    let text = without(&file.text, "port", at);
    let path = file.path.clone();
    file.replace(main, text)?;
    Ok(path)
}

/// Returns the text with one more port.
fn with_port(text: &str, port: &PortConfig) -> Option<String> {
    let mut document: DocumentMut = text.parse().ok()?;
    let mut table = Table::new();
    for (key, value) in port.written() {
        table.insert(key, Item::Value(value.to_string().parse().ok()?));
    }
    match document.entry("port").or_insert_with(|| Item::ArrayOfTables(ArrayOfTables::new())) {
        Item::ArrayOfTables(tables) => tables.push(table),
        Item::Value(Value::Array(tables)) => tables.push(table.into_inline_table()),
        _ => return None,
    }
    Some(document.to_string())
}

/// Returns the text without the table of index `at` among those of a name.
fn without(text: &str, name: &str, at: usize) -> Option<String> {
    let mut document: DocumentMut = text.parse().ok()?;
    match document.get_mut(name)? {
        Item::ArrayOfTables(tables) => {
            let prefix =
                tables.get(at)?.decor().prefix().and_then(|prefix| prefix.as_str()).unwrap_or_default();
            // What an empty line divides from the table is about something else.
            let kept = prefix.rfind("\n\n").map_or(String::new(), |end| prefix[..=end].to_owned());
            if kept.contains('#') {
                prepend_after(&mut document, name, at, kept);
            }
            let Item::ArrayOfTables(tables) = document.get_mut(name)? else { return None };
            tables.remove(at);
        }
        Item::Value(Value::Array(tables)) if at < tables.len() => {
            tables.remove(at);
        }
        _ => return None,
    }
    Some(document.to_string())
}

/// Returns the text with the keys of `edit` changed in the `[[port]]` table of index `at`.
fn edit_text(text: &str, at: usize, edit: &Edit, port: &PortConfig) -> Option<String> {
    let mut document: DocumentMut = text.parse().ok()?;
    let mut orphans = String::new();
    let table = table_of(document.get_mut("port")?, at)?;
    for (key, value) in edit.values(port) {
        match value {
            Some(value) => put(table, key, value.to_string().parse().ok()?),
            None => orphans.push_str(&take_away(table, key)),
        }
    }
    if !orphans.is_empty() {
        prepend_after(&mut document, "port", at, orphans);
    }
    Some(document.to_string())
}

fn table_of(tables: &mut Item, at: usize) -> Option<&mut dyn TableLike> {
    match tables {
        Item::ArrayOfTables(tables) => tables.get_mut(at).map(|table| table as &mut dyn TableLike),
        Item::Value(Value::Array(tables)) => {
            tables.get_mut(at)?.as_inline_table_mut().map(|table| table as &mut dyn TableLike)
        }
        _ => None,
    }
}

/// Sets a key, which keeps its place and the comment behind it if it was there.
fn put(table: &mut dyn TableLike, key: &str, mut value: Value) {
    match table.get_mut(key) {
        Some(Item::Value(old)) => {
            *value.decor_mut() = old.decor().clone();
            *old = value;
        }
        _ => {
            table.insert(key, Item::Value(value));
        }
    }
}

/// Removes a key with its value and the comment on its line. Comment lines before it go to the next key of
/// the table; returned if there is none.
fn take_away(table: &mut dyn TableLike, key: &str) -> String {
    let comment = table.key(key).and_then(|key| key.leaf_decor().prefix()?.as_str().map(str::to_owned));
    let next = table.iter().skip_while(|(other, _)| *other != key).nth(1).map(|(next, _)| next.to_owned());
    table.remove(key);
    let comment = comment.filter(|comment| comment.contains('#')).unwrap_or_default();
    match next.and_then(|next| table.key_mut(&next)) {
        Some(mut next) => {
            prepend_to_key(&mut next, &comment);
            String::new()
        }
        None => comment,
    }
}

fn prepend_to_key(key: &mut KeyMut<'_>, comment: &str) {
    let prefix = key.leaf_decor().prefix().and_then(|prefix| prefix.as_str()).unwrap_or_default();
    let prefix = format!("{comment}{prefix}");
    key.leaf_decor_mut().set_prefix(prefix);
}

/// Puts comment lines behind the `at`th table of a name: before the table that follows it in the file, or at its end.
fn prepend_after(document: &mut DocumentMut, name: &str, at: usize, comment: String) {
    let position = |item: &Item| item.as_array_of_tables()?.get(at)?.position();
    let Some(from) = document.get(name).and_then(position) else { return };
    let tables = document.iter_mut().flat_map(|(_, item)| match item {
        Item::Table(table) => vec![table],
        Item::ArrayOfTables(tables) => tables.iter_mut().collect(),
        _ => Vec::new(),
    });
    let next = tables.filter(|table| table.position() > Some(from)).min_by_key(|table| table.position());
    match next {
        Some(table) => {
            let prefix = table.decor().prefix().and_then(|prefix| prefix.as_str()).unwrap_or_default();
            let prefix = format!("{comment}{prefix}");
            table.decor_mut().set_prefix(prefix);
        }
        None => {
            let trailing = document.trailing().as_str().unwrap_or_default();
            let trailing = format!("{comment}{trailing}");
            document.set_trailing(trailing);
        }
    }
}

/// Replaces a file by one with another content, atomically. If a step fails the temporary file is removed.
fn replace(target: &Path, text: &str) -> io::Result<()> {
    let before = fs::metadata(target)?;
    let directory = target.parent().unwrap_or_else(|| Path::new("/"));
    // The temporary file is readable by its owner alone until it gets the permissions of the old file.
    let mut file = tempfile::Builder::new().prefix(".ringferry-").tempfile_in(directory)?;
    let new = file.as_file().metadata()?;
    if (new.uid(), new.gid()) != (before.uid(), before.gid()) {
        fchown(file.as_file(), Some(before.uid()), Some(before.gid()))
            .map_err(|error| io::Error::new(error.kind(), format!("its owner would change ({error})")))?;
    }
    file.as_file().set_permissions(fs::Permissions::from_mode(before.mode() & 0o7777))?;
    file.write_all(text.as_bytes())?;
    file.as_file().sync_all()?;
    file.persist(target).map_err(|error| error.error)?;
    // The rename should reach the disk, too. Some file systems cannot sync a directory, so an error is
    // ignored.
    let _ = File::open(directory).and_then(|directory| directory.sync_all());
    Ok(())
}

#[cfg(test)]
mod tests;
