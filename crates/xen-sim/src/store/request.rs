//! Serves one request of a connection: parses it, applies it to the tree or to a transaction, and
//! returns the payload of the reply.

use ringferry_xen::domain::DomId;
use ringferry_xen::store::path;
use ringferry_xen::store::wire::{self, Code, Kind, MAX_PAYLOAD, Message, Permission};

use super::Limits;
use super::connection::{Connection, Watch};
use super::transaction::Transaction;
use super::tree::{Change, Edit, Node, Tree, is_privileged};

/// Longest token of a watch in bytes: with the longest path it fits into an event.
const MAX_TOKEN: usize = 256;

/// Reply to a request that returns nothing.
const OK: &[u8] = b"OK\0";

/// Serves a request. Its changes to `tree` are appended to `changes`; the first event of a new
/// watch goes to the connection's queue.
pub(super) fn serve(
    from: &mut Connection,
    tree: &mut Tree,
    limits: &Limits,
    message: &Message,
    changes: &mut Vec<Change>,
) -> Result<Vec<u8>, Code> {
    let kind = Kind::from_number(message.kind).ok_or(Code::Unsupported)?;
    let (first, rest) = match message.payload.iter().position(|byte| *byte == 0) {
        Some(end) => (&message.payload[..end], &message.payload[end + 1..]),
        None => return Err(Code::Invalid),
    };
    let first = std::str::from_utf8(first).map_err(|_| Code::Invalid)?;
    let context = RequestContext { from, tree, limits, transaction: message.transaction };
    match kind {
        Kind::Read => context.read_node(first, |node| Ok(node.value.clone())),
        Kind::Directory => context.read_node(first, |node| Ok(names(node))),
        Kind::DirectoryPart => {
            let offset = single(rest).and_then(wire::number_of).ok_or(Code::Invalid)?;
            context.read_node(first, |node| part(node, offset))
        }
        Kind::GetPermissions => context.read_node(first, |node| {
            Ok(node
                .permissions
                .iter()
                .flat_map(|entry| format!("{}\0", entry.encode()).into_bytes())
                .collect())
        }),
        Kind::Write => context.edit(first, Edit::Write(rest.to_vec()), changes),
        Kind::Mkdir => context.edit(first, Edit::Mkdir, changes),
        Kind::Remove => context.edit(first, Edit::Remove, changes),
        Kind::SetPermissions => {
            let entries = wire::strings(rest).ok_or(Code::Invalid)?;
            let entries = entries.into_iter().map(Permission::decode).collect::<Option<Vec<_>>>();
            context.edit(first, Edit::SetPermissions(entries.ok_or(Code::Invalid)?), changes)
        }
        Kind::Watch => context.watch(first, single(rest).ok_or(Code::Invalid)?),
        Kind::Unwatch => context.unwatch(first, single(rest).ok_or(Code::Invalid)?),
        Kind::ResetWatches => {
            context.from.watches.clear();
            Ok(OK.to_vec())
        }
        Kind::TransactionStart => context.start(),
        Kind::TransactionEnd => context.end(first, changes),
        Kind::DomainPath => {
            let domain = wire::number_of(first.as_bytes()).map(DomId).ok_or(Code::Invalid)?;
            Ok(format!("{}\0", path::domain(domain)).into_bytes())
        }
        Kind::WatchEvent | Kind::Error => Err(Code::Invalid),
    }
}

/// Returns the only string of a payload; `None` if it has another number of them.
fn single(payload: &[u8]) -> Option<&[u8]> {
    let text = payload.strip_suffix(b"\0")?;
    (!text.contains(&0)).then_some(text)
}

fn names(node: &Node) -> Vec<u8> {
    node.children.keys().flat_map(|name| name.bytes().chain([0])).collect()
}

/// Returns names from a byte offset on, as many as fit, after the node's generation; an empty name
/// follows the last.
fn part(node: &Node, offset: usize) -> Result<Vec<u8>, Code> {
    let names = names(node);
    let rest = names.get(offset..).ok_or(Code::Invalid)?;
    let mut payload = format!("{}\0", node.generation).into_bytes();
    let room = MAX_PAYLOAD - payload.len() - 1;
    if rest.len() <= room {
        payload.extend_from_slice(rest);
        payload.push(0);
    } else {
        let whole = rest[..room].iter().rposition(|byte| *byte == 0).map_or(0, |end| end + 1);
        payload.extend_from_slice(&rest[..whole]);
    }
    Ok(payload)
}

struct RequestContext<'a> {
    from: &'a mut Connection,
    tree: &'a mut Tree,
    limits: &'a Limits,
    transaction: u32,
}

impl RequestContext<'_> {
    /// Returns the absolute path, and how many bytes of it stand for the domain's own node.
    fn absolute(&self, path: &str) -> Result<(String, usize), Code> {
        path::check(path).map_err(|_| Code::Invalid)?;
        if path.starts_with('/') {
            return Ok((path.to_owned(), 0));
        }
        let base = path::domain(self.from.domain);
        Ok((path::join(&base, path), base.len() + 1))
    }

    fn node_path(&self, path: &str) -> Result<String, Code> {
        if path.starts_with('@') { Err(Code::Invalid) } else { Ok(self.absolute(path)?.0) }
    }

    fn read_node(
        self,
        path: &str,
        what: impl FnOnce(&Node) -> Result<Vec<u8>, Code>,
    ) -> Result<Vec<u8>, Code> {
        let path = self.node_path(path)?;
        let who = self.from.domain;
        let tree = match self.transaction {
            0 => self.tree,
            id => self.from.transactions.get_mut(&id).ok_or(Code::Missing)?.read_tree(&path, self.limits)?,
        };
        what(tree.read(who, &path)?)
    }

    fn edit(self, path: &str, edit: Edit, changes: &mut Vec<Change>) -> Result<Vec<u8>, Code> {
        let path = self.node_path(path)?;
        let who = self.from.domain;
        match self.transaction {
            0 => changes.extend(self.tree.edit(who, &path, edit, self.limits)?),
            id => {
                let transaction = self.from.transactions.get_mut(&id).ok_or(Code::Missing)?;
                transaction.edit(who, &path, edit, self.limits)?;
            }
        }
        Ok(OK.to_vec())
    }

    fn watch_of(&self, path: &str, token: &[u8]) -> Result<Watch, Code> {
        let (absolute, prefix) = match path.strip_prefix('@') {
            Some(_) => (path.to_owned(), 0),
            None => self.absolute(path)?,
        };
        Ok(Watch { path: absolute, token: token.to_owned(), prefix })
    }

    fn watch(self, path: &str, token: &[u8]) -> Result<Vec<u8>, Code> {
        let watch = self.watch_of(path, token)?;
        if token.len() > MAX_TOKEN {
            return Err(Code::TooLong);
        }
        let watches = &self.from.watches;
        if watches.iter().any(|other| other.path == watch.path && other.token == watch.token) {
            return Err(Code::Exists);
        }
        if watches.len() >= self.limits.watches && !is_privileged(self.from.domain) {
            return Err(Code::Quota);
        }
        self.from.queue_event(watch.event(&watch.path));
        self.from.watches.push(watch);
        Ok(OK.to_vec())
    }

    fn unwatch(self, path: &str, token: &[u8]) -> Result<Vec<u8>, Code> {
        let watch = self.watch_of(path, token)?;
        let watches = &mut self.from.watches;
        let at = watches.iter().position(|other| *other == watch).ok_or(Code::Missing)?;
        watches.remove(at);
        Ok(OK.to_vec())
    }

    fn start(self) -> Result<Vec<u8>, Code> {
        let Connection { transactions, last_transaction, .. } = self.from;
        if self.transaction != 0 {
            return Err(Code::Busy); // they do not nest
        }
        if transactions.len() >= self.limits.transactions {
            return Err(Code::Quota);
        }
        // Few are open, so a free number is found soon; 0 is not a transaction.
        loop {
            *last_transaction = last_transaction.wrapping_add(1);
            if *last_transaction != 0 && !transactions.contains_key(last_transaction) {
                break;
            }
        }
        transactions.insert(*last_transaction, Transaction::new(self.tree));
        Ok(format!("{last_transaction}\0").into_bytes())
    }

    fn end(self, decision: &str, changes: &mut Vec<Change>) -> Result<Vec<u8>, Code> {
        let commit = match decision {
            "T" => true,
            "F" => false,
            _ => return Err(Code::Invalid),
        };
        let transaction = self.from.transactions.remove(&self.transaction).ok_or(Code::Missing)?;
        if commit {
            changes.extend(transaction.commit(self.from.domain, self.tree, self.limits)?);
        }
        Ok(OK.to_vec())
    }
}
