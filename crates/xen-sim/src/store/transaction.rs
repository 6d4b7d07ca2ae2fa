//! A transaction: a copy of the tree, the edits made to it, and what it looked at. It commits when nobody has
//! changed any of that since it began.

use std::collections::HashMap;

use ringferry_xen::domain::DomId;
use ringferry_xen::store::wire::Code;

use super::Limits;
use super::tree::{Change, Edit, Tree};

/// A transaction of one connection.
#[derive(Debug)]
pub(super) struct Transaction {
    /// As it was when the transaction began.
    base: Tree,
    /// With the edits.
    tree: Tree,
    edits: Vec<(String, Edit)>,
    /// Generation, in `base`, of all that was looked at or edited; `None`: was not there.
    seen: HashMap<String, Option<u64>>,
}

fn generation(tree: &Tree, path: &str) -> Option<u64> {
    tree.node(path).map(|node| node.generation)
}

impl Transaction {
    pub(super) fn new(tree: &Tree) -> Transaction {
        Transaction { base: tree.clone(), tree: tree.clone(), edits: Vec::new(), seen: HashMap::new() }
    }

    /// The tree as it is within the transaction, for a look at `path`.
    pub(super) fn look(&mut self, path: &str, limits: &Limits) -> Result<&Tree, Code> {
        self.see(path, limits)?;
        Ok(&self.tree)
    }

    pub(super) fn edit(&mut self, who: DomId, path: &str, edit: Edit, limits: &Limits) -> Result<(), Code> {
        self.see(path, limits)?;
        if self.edits.len() >= limits.transaction_nodes {
            return Err(Code::Quota);
        }
        if self.tree.edit(who, path, edit.clone(), limits)?.is_some() {
            self.edits.push((path.to_owned(), edit));
        }
        Ok(())
    }

    fn see(&mut self, path: &str, limits: &Limits) -> Result<(), Code> {
        if !self.seen.contains_key(path) {
            if self.seen.len() >= limits.transaction_nodes {
                return Err(Code::Quota);
            }
            self.seen.insert(path.to_owned(), generation(&self.base, path));
        }
        Ok(())
    }

    /// Does the edits in the real tree, all or none.
    pub(super) fn commit(self, who: DomId, tree: &mut Tree, limits: &Limits) -> Result<Vec<Change>, Code> {
        if self.seen.iter().any(|(path, seen)| generation(tree, path) != *seen) {
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
