//! [`Tree`]: the nodes of the store with their values, permissions and children, and a generation
//! by which a change is noticed. It is a persistent tree (copy on write): the server owns one, and
//! each transaction a copy.
//!
//! Nodes are shared between trees until one of them changes, so a copy of the whole tree is one
//! pointer.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use ringferry_xen::domain::DomId;
use ringferry_xen::store::path;
use ringferry_xen::store::wire::{Code, NodeAccess, Permission};

use super::Limits;

/// A node of the store.
#[derive(Clone, Debug)]
pub(super) struct Node {
    pub(super) value: Vec<u8>,
    /// Permissions, never empty: the owner comes first.
    pub(super) permissions: Vec<Permission>,
    pub(super) children: BTreeMap<String, Arc<Node>>,
    /// A number that differs after each change of the value, the permissions, or the set of
    /// children.
    pub(super) generation: u64,
}

impl Node {
    pub(super) fn owner(&self) -> DomId {
        self.permissions[0].domain
    }

    /// Returns the access of a domain to the node.
    pub(super) fn access(&self, who: DomId) -> NodeAccess {
        if is_privileged(who) || who == self.owner() {
            return NodeAccess::Both;
        }
        let entry = self.permissions[1..].iter().find(|entry| entry.domain == who);
        entry.unwrap_or(&self.permissions[0]).access
    }
}

/// Returns true for domain 0, which has full access and no quota.
pub(super) fn is_privileged(who: DomId) -> bool {
    who == DomId(0)
}

/// A change of the tree, from which watch events are made.
#[derive(Debug)]
pub(super) struct Change {
    pub(super) path: String,
    /// The node before the change, if it existed.
    pub(super) before: Option<Arc<Node>>,
}

/// A request that changes the tree.
#[derive(Clone, Debug)]
pub(super) enum Edit {
    Write(Vec<u8>),
    Mkdir,
    Remove,
    SetPermissions(Vec<Permission>),
}

/// All nodes, and the number that each domain owns.
#[derive(Clone, Debug)]
pub(super) struct Tree {
    root: Arc<Node>,
    owned: HashMap<DomId, usize>,
    generation: u64,
}

impl Tree {
    pub(super) fn new() -> Tree {
        let permissions = vec![Permission::new(DomId(0), NodeAccess::Read)];
        let root = Node { value: Vec::new(), permissions, children: BTreeMap::new(), generation: 0 };
        Tree { root: Arc::new(root), owned: HashMap::from([(DomId(0), 1)]), generation: 0 }
    }

    /// Returns the node at an absolute path.
    pub(super) fn node(&self, path: &str) -> Option<&Arc<Node>> {
        names(path).try_fold(&self.root, |node, name| node.children.get(name))
    }

    /// Returns the node at a path, if this domain may read it.
    pub(super) fn read(&self, who: DomId, path: &str) -> Result<&Arc<Node>, Code> {
        match self.node(path) {
            Some(node) if node.access(who).reads() => Ok(node),
            Some(_) => Err(Code::Denied),
            None if self.ancestor(path).0.access(who).reads() => Err(Code::Missing),
            // The existence of nodes below an unreadable one is not disclosed.
            None => Err(Code::Denied),
        }
    }

    /// Returns the number of nodes that a domain owns.
    pub(super) fn owned(&self, who: DomId) -> usize {
        self.owned.get(&who).copied().unwrap_or(0)
    }

    /// Applies an edit of a domain. `None`: nothing had to be changed.
    pub(super) fn edit(
        &mut self,
        who: DomId,
        path: &str,
        edit: Edit,
        limits: &Limits,
    ) -> Result<Option<Change>, Code> {
        let before = self.node(path).cloned();
        let changed = match (edit, &before) {
            (Edit::Mkdir, Some(_)) => false,
            (Edit::Mkdir, None) => self.create(who, path, Vec::new(), limits)?,
            (Edit::Write(value), _) if value.len() > limits.value_bytes && !is_privileged(who) => {
                drop(value);
                return Err(Code::TooLong);
            }
            (Edit::Write(value), None) => self.create(who, path, value, limits)?,
            (Edit::Write(value), Some(node)) => {
                node.access(who).writes().then_some(()).ok_or(Code::Denied)?;
                self.modify(path, |node| node.value = value)
            }
            (Edit::Remove, node) => self.remove(who, path, node.as_deref())?,
            (Edit::SetPermissions(_), None) => {
                return Err(self.read(who, path).err().unwrap_or(Code::Missing));
            }
            (Edit::SetPermissions(new), Some(node)) => self.set_permissions(who, path, node, new, limits)?,
        };
        Ok(changed.then(|| Change { path: path.to_owned(), before }))
    }

    /// Creates a node and its missing parents, all with the permissions of the nearest existing
    /// node, but owned by the domain that creates them.
    fn create(&mut self, who: DomId, path: &str, value: Vec<u8>, limits: &Limits) -> Result<bool, Code> {
        let (ancestor, depth) = self.ancestor(path);
        ancestor.access(who).writes().then_some(()).ok_or(Code::Denied)?;
        let mut permissions = ancestor.permissions.clone();
        if !is_privileged(who) {
            permissions[0].domain = who;
        }
        let missing = names(path).count() - depth;
        if !is_privileged(who) && self.owned(who) + missing > limits.nodes {
            return Err(Code::Quota);
        }
        *self.owned.entry(permissions[0].domain).or_default() += missing;
        self.generation += 1;
        let generation = self.generation;
        let mut node = Arc::make_mut(&mut self.root);
        for (at, name) in names(path).enumerate() {
            if at == depth {
                node.generation = generation; // it has a child more
            }
            let fresh = || {
                let permissions = permissions.clone();
                Arc::new(Node { value: Vec::new(), permissions, children: BTreeMap::new(), generation })
            };
            node = Arc::make_mut(node.children.entry(name.to_owned()).or_insert_with(fresh));
        }
        node.value = value;
        Ok(true)
    }

    fn remove(&mut self, who: DomId, path: &str, node: Option<&Node>) -> Result<bool, Code> {
        let Some(above) = path::parent(path) else { return Err(Code::Invalid) };
        let Some(node) = node else {
            // It is no error if only the last name is missing.
            return self.read(who, above).map(|_| false);
        };
        node.access(who).writes().then_some(()).ok_or(Code::Denied)?;
        let mut nodes = vec![node];
        while let Some(node) = nodes.pop() {
            self.disown(node.owner());
            nodes.extend(node.children.values().map(|child| &**child));
        }
        let name = path.rsplit('/').next().unwrap_or_default();
        Ok(self.modify(above, |node| drop(node.children.remove(name))))
    }

    fn set_permissions(
        &mut self,
        who: DomId,
        path: &str,
        node: &Node,
        new: Vec<Permission>,
        limits: &Limits,
    ) -> Result<bool, Code> {
        let Some(first) = new.first().copied() else { return Err(Code::Invalid) };
        if new.len() > limits.permissions {
            return Err(Code::Quota);
        }
        if who != node.owner() && !is_privileged(who) {
            return Err(Code::Denied);
        }
        if first.domain != node.owner() {
            // Nodes that are given away would count against another domain's quota.
            if !is_privileged(who) {
                return Err(Code::NotPermitted);
            }
            self.disown(node.owner());
            *self.owned.entry(first.domain).or_default() += 1;
        }
        Ok(self.modify(path, |node| node.permissions = new))
    }

    fn disown(&mut self, owner: DomId) {
        if let Some(count) = self.owned.get_mut(&owner) {
            *count -= 1;
            if *count == 0 {
                self.owned.remove(&owner);
            }
        }
    }

    /// Changes a node that exists.
    fn modify(&mut self, path: &str, change: impl FnOnce(&mut Node)) -> bool {
        self.generation += 1;
        let mut node = Arc::make_mut(&mut self.root);
        for name in names(path) {
            match node.children.get_mut(name) {
                Some(child) => node = Arc::make_mut(child),
                None => return false,
            }
        }
        node.generation = self.generation;
        change(node);
        true
    }

    /// Returns the nearest existing node at or above a path, and how many names lead to it.
    fn ancestor(&self, path: &str) -> (&Node, usize) {
        let mut found = (&*self.root, 0);
        for name in names(path) {
            let Some(child) = found.0.children.get(name) else { break };
            found = (child, found.1 + 1);
        }
        found
    }
}

fn names(path: &str) -> impl Iterator<Item = &str> {
    path.split('/').filter(|name| !name.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits { nodes: 10, ..Limits::DEFAULT };
    const GUEST: DomId = DomId(5);

    fn write(tree: &mut Tree, who: DomId, path: &str, value: &str) -> Result<bool, Code> {
        tree.edit(who, path, Edit::Write(value.into()), &LIMITS).map(|change| change.is_some())
    }

    fn tree() -> Tree {
        let mut tree = Tree::new();
        write(&mut tree, DomId(0), "/g", "").unwrap();
        let own = vec![Permission::new(GUEST, NodeAccess::None)];
        tree.edit(DomId(0), "/g", Edit::SetPermissions(own), &LIMITS).unwrap();
        tree
    }

    #[test]
    fn a_domain_writes_only_where_it_may_and_owns_what_it_makes() {
        let mut tree = tree();
        assert_eq!(write(&mut tree, GUEST, "/x", "1"), Err(Code::Denied));
        assert_eq!(write(&mut tree, GUEST, "/g/a/b", "1"), Ok(true));
        assert_eq!(tree.node("/g/a").unwrap().owner(), GUEST);
        assert_eq!(tree.owned(GUEST), 3);
        assert_eq!(tree.read(DomId(6), "/g/a/b").err(), Some(Code::Denied));
        assert_eq!(tree.read(DomId(6), "/g/nothing").err(), Some(Code::Denied));
        assert_eq!(tree.read(DomId(0), "/g/a/b").unwrap().value, b"1");
        let open =
            vec![Permission::new(GUEST, NodeAccess::None), Permission::new(DomId(6), NodeAccess::Read)];
        tree.edit(GUEST, "/g/a/b", Edit::SetPermissions(open), &LIMITS).unwrap();
        assert_eq!(tree.read(DomId(6), "/g/a/b").unwrap().value, b"1");
        assert_eq!(write(&mut tree, DomId(6), "/g/a/b", "2"), Err(Code::Denied));
    }

    #[test]
    fn nodes_are_not_given_away() {
        let mut tree = tree();
        write(&mut tree, GUEST, "/g/a", "").unwrap();
        let other = vec![Permission::new(DomId(6), NodeAccess::Both)];
        let gift = tree.edit(GUEST, "/g/a", Edit::SetPermissions(other.clone()), &LIMITS);
        assert_eq!(gift.err(), Some(Code::NotPermitted));
        tree.edit(DomId(0), "/g/a", Edit::SetPermissions(other), &LIMITS).unwrap();
        assert_eq!((tree.owned(GUEST), tree.owned(DomId(6))), (1, 1));
    }

    #[test]
    fn xsa_326_a_domain_cannot_fill_the_store() {
        let mut tree = tree();
        let made = (0..100).filter(|n| write(&mut tree, GUEST, &format!("/g/{n}"), "").is_ok()).count();
        assert_eq!(made, LIMITS.nodes - 1);
        assert_eq!(write(&mut tree, GUEST, "/g/0", &"x".repeat(LIMITS.value_bytes + 1)), Err(Code::TooLong));
        assert!(write(&mut tree, DomId(0), "/g/one/more", "").is_ok());
        tree.edit(GUEST, "/g/0", Edit::Remove, &LIMITS).unwrap();
        tree.edit(GUEST, "/g/1", Edit::Remove, &LIMITS).unwrap();
        tree.edit(DomId(0), "/g/one", Edit::Remove, &LIMITS).unwrap();
        assert_eq!(tree.owned(GUEST), LIMITS.nodes - 2);
        assert!(write(&mut tree, GUEST, "/g/again", "").is_ok());
    }

    #[test]
    fn removal_takes_what_is_below_and_gives_its_quota_back() {
        let mut tree = tree();
        write(&mut tree, GUEST, "/g/a/b/c", "").unwrap();
        let change = tree.edit(GUEST, "/g/a", Edit::Remove, &LIMITS).unwrap().unwrap();
        assert!(change.before.unwrap().children.contains_key("b"));
        assert_eq!((tree.owned(GUEST), tree.node("/g/a/b").is_none()), (1, true));
        assert!(tree.edit(GUEST, "/g/a", Edit::Remove, &LIMITS).unwrap().is_none());
        assert_eq!(tree.edit(DomId(0), "/n/o", Edit::Remove, &LIMITS).err(), Some(Code::Missing));
        assert_eq!(tree.edit(DomId(0), "/", Edit::Remove, &LIMITS).err(), Some(Code::Invalid));
    }

    #[test]
    fn a_generation_changes_with_its_node_and_its_children_only() {
        let mut tree = tree();
        write(&mut tree, GUEST, "/g/a/b", "").unwrap();
        let generation = |tree: &Tree, path| tree.node(path).map(|node| node.generation);
        let before = (generation(&tree, "/g"), generation(&tree, "/g/a"));
        write(&mut tree, GUEST, "/g/a/b", "x").unwrap();
        assert_eq!((generation(&tree, "/g"), generation(&tree, "/g/a")), before);
        write(&mut tree, GUEST, "/g/a/c", "x").unwrap();
        assert_eq!(generation(&tree, "/g"), before.0);
        assert_ne!(generation(&tree, "/g/a"), before.1);
    }
}
