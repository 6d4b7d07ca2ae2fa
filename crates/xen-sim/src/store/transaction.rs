//! [`Transaction`]: an optimistic transaction of one connection, with a copy of the tree, its
//! edits, and the generations of the nodes that it used. It commits if none of those nodes has
//! changed since it began; otherwise its client repeats it.

use std::collections::HashMap;

use ringferry_xen::domain::DomId;
use ringferry_xen::store::wire::Code;

use super::Limits;
use super::tree::{Change, Edit, Tree};

/// A transaction of one connection.
#[derive(Debug)]
pub(super) struct Transaction {
    /// The tree when the transaction began.
    base: Tree,
    /// The tree with the edits applied.
    tree: Tree,
    edits: Vec<(String, Edit)>,
    /// Generation in `base` of every node that was read or edited; `None` if it did not exist.
    read_set: HashMap<String, Option<u64>>,
}

fn generation(tree: &Tree, path: &str) -> Option<u64> {
    tree.node(path).map(|node| node.generation)
}

impl Transaction {
    pub(super) fn new(tree: &Tree) -> Transaction {
        Transaction { base: tree.clone(), tree: tree.clone(), edits: Vec::new(), read_set: HashMap::new() }
    }

    /// Returns the tree within the transaction, for reading `path`.
    pub(super) fn read_tree(&mut self, path: &str, limits: &Limits) -> Result<&Tree, Code> {
        self.record_use(path, limits)?;
        Ok(&self.tree)
    }

    pub(super) fn edit(&mut self, who: DomId, path: &str, edit: Edit, limits: &Limits) -> Result<(), Code> {
        self.record_use(path, limits)?;
        if self.edits.len() >= limits.transaction_nodes {
            return Err(Code::Quota);
        }
        if self.tree.edit(who, path, edit.clone(), limits)?.is_some() {
            self.edits.push((path.to_owned(), edit));
        }
        Ok(())
    }

    fn record_use(&mut self, path: &str, limits: &Limits) -> Result<(), Code> {
        if !self.read_set.contains_key(path) {
            if self.read_set.len() >= limits.transaction_nodes {
                return Err(Code::Quota);
            }
            self.read_set.insert(path.to_owned(), generation(&self.base, path));
        }
        Ok(())
    }

    /// Applies the edits to the real tree, all or none.
    pub(super) fn commit(self, who: DomId, tree: &mut Tree, limits: &Limits) -> Result<Vec<Change>, Code> {
        if self.read_set.iter().any(|(path, read_set)| generation(tree, path) != *read_set) {
            return Err(Code::Again);
        }
        let mut result = tree.clone();
        let mut changes = Vec::new();
        for (path, edit) in self.edits {
            changes.extend(result.edit(who, &path, edit, limits)?);
        }
        *tree = result;
        Ok(changes)
    }
}
