//! [`Server`]: a store of our own, which serves domains that are processes, and tests, as xenstored
//! serves the domains of Xen.
//!
//! A test or a program creates it, attaches connections or listens, and either calls
//! [`Server::poll`] itself or gives it a thread with [`Server::start`]; dropping it closes all
//! connections. The domain that a connection speaks for is set by its creator ([`Server::attach`],
//! [`Server::listen`]), never by the peer. Domain 0 has full access; for the others, permissions
//! and quotas hold ([`Limits`]), so that none can fill the store or slow it down for long.

mod connection;
mod request;
mod running;
#[cfg(test)]
mod tests;
mod transaction;
mod tree;

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use ringferry_sys::epoll::{self, Epoll, EventBuf, Interest};
use ringferry_sys::socket::{BindError, Listener, Stream};
use ringferry_xen::domain::DomId;
use ringferry_xen::store::{Client, NodeAccess, Permission, path};

pub use running::Running;

use self::connection::{Connection, Watch};
use self::tree::{Change, Edit, Node, Tree, is_privileged};

/// The quotas of a domain; domain 0 is only bound by those of transactions.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Most nodes that the domain may own.
    pub nodes: usize,
    /// Largest value of a node in bytes.
    pub value_bytes: usize,
    /// Most entries in the permissions of a node.
    pub permissions: usize,
    /// Most watches of one connection.
    pub watches: usize,
    /// Most open transactions of one connection (domain 0, too).
    pub transactions: usize,
    /// Most nodes that one transaction reads or edits (domain 0, too).
    pub transaction_nodes: usize,
}

impl Limits {
    /// Quotas similar to those of xenstored.
    pub const DEFAULT: Limits = Limits {
        nodes: 1000,
        value_bytes: 2048,
        permissions: 5,
        watches: 128,
        transactions: 10,
        transaction_nodes: 1024,
    };
}

/// Most connections at the same time. More wait until others close.
const MAX_CONNECTIONS: usize = 1024;

/// Most events of the poller that are taken at once.
const POLL_EVENTS: usize = 64;

/// Special watch of toolstacks that reports new domains.
const INTRODUCED: &str = "@introduceDomain";

/// Special watch of toolstacks that reports destroyed domains.
const RELEASED: &str = "@releaseDomain";

/// Poller token of the first listener; connections count from 0 and never get this far.
const LISTENERS: u64 = 1 << 62;

/// A store. Readable ([`AsFd`]) when [`poll`](Server::poll) has something to do.
#[derive(Debug)]
pub struct Server {
    poller: Arc<Epoll>,
    listeners: Vec<(Listener, DomId)>,
    /// True while the listeners are not polled, because there is no room for another connection.
    full: bool,
    connections: HashMap<u64, Connection>,
    next: u64,
    tree: Tree,
    limits: Limits,
}

impl Server {
    /// Creates an empty store.
    ///
    /// # Errors
    /// Too many open files.
    pub fn new(limits: Limits) -> io::Result<Server> {
        Ok(Server {
            poller: Arc::new(Epoll::new()?),
            listeners: Vec::new(),
            full: false,
            connections: HashMap::new(),
            next: 0,
            tree: Tree::new(),
            limits,
        })
    }

    /// Creates a domain's own node, as a toolstack does: the domain may read it and owns `data` in
    /// it.
    pub fn introduce(&mut self, domain: DomId) {
        let base = path::domain(domain);
        let read =
            vec![Permission::new(DomId(0), NodeAccess::None), Permission::new(domain, NodeAccess::Read)];
        let own = vec![Permission::new(domain, NodeAccess::None)];
        let mut changes = Vec::new();
        for (name, value, permissions) in [
            ("", String::new(), &read),
            ("/domid", domain.to_string(), &read),
            ("/device", String::new(), &read),
            ("/data", String::new(), &own),
        ] {
            let path = format!("{base}{name}");
            for edit in [Edit::Write(value.into_bytes()), Edit::SetPermissions(permissions.clone())] {
                // Domain 0 may do all of this.
                changes.extend(self.tree.edit(DomId(0), &path, edit, &self.limits).ok().flatten());
            }
        }
        self.queue_watch_events(&changes);
        self.queue_special_events(INTRODUCED);
    }

    /// Removes a domain's own node and closes its connections, as when it is destroyed. Its other
    /// nodes remain for the toolstack.
    pub fn release(&mut self, domain: DomId) {
        let removed = self.tree.edit(DomId(0), &path::domain(domain), Edit::Remove, &self.limits);
        let changes: Vec<Change> = removed.ok().flatten().into_iter().collect();
        self.connections.values_mut().filter(|c| c.domain == domain).for_each(|c| c.dead = true);
        self.queue_watch_events(&changes);
        self.queue_special_events(RELEASED);
    }

    /// Listens at `path`. A process that may open that file speaks for `domain`.
    ///
    /// # Errors
    /// Any [`BindError`].
    pub fn listen(&mut self, path: impl AsRef<Path>, domain: DomId) -> Result<(), BindError> {
        let path = path.as_ref();
        let listener = Listener::bind_with_mode(path, 0o600)?;
        let token = LISTENERS + self.listeners.len() as u64;
        let os = |source| BindError::Os { path: path.to_owned(), source };
        self.poller.add(&listener, token, Interest::READABLE).map_err(os)?;
        self.listeners.push((listener, domain));
        Ok(())
    }

    /// Serves a connection whose other end speaks for `domain`.
    ///
    /// # Errors
    /// Any error of `epoll_ctl`.
    pub fn attach(&mut self, stream: Stream, domain: DomId) -> io::Result<()> {
        stream.set_nonblocking(true)?;
        self.poller.add(&stream, self.next, Interest::READABLE)?;
        self.connections.insert(self.next, Connection::new(stream, domain));
        self.next += 1;
        Ok(())
    }

    /// Opens a new connection that speaks for `domain`.
    ///
    /// # Errors
    /// Too many open files.
    pub fn client(&mut self, domain: DomId) -> io::Result<Client> {
        let (ours, theirs) = Stream::pair()?;
        self.attach(ours, domain)?;
        Client::from_stream(theirs)
    }

    /// Waits for requests, up to `timeout` (`None`: for ever), and serves some.
    ///
    /// # Errors
    /// None that a caller or a peer can cause.
    pub fn poll(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        let mut events = EventBuf::with_capacity(POLL_EVENTS);
        self.poller.wait(&mut events, timeout)?;
        events.iter().for_each(|event| self.handle(event));
        Ok(())
    }

    fn handle(&mut self, event: epoll::Event) {
        match event.token.checked_sub(LISTENERS) {
            Some(at) => self.accept(at as usize),
            None => self.serve(event.token),
        }
        self.flush_and_update_interest();
    }

    fn accept(&mut self, at: usize) {
        let Some((listener, domain)) = self.listeners.get(at) else { return };
        let domain = *domain;
        let accepted = match listener.accept() {
            Ok(None) => return,
            Ok(Some(stream)) if self.connections.len() < MAX_CONNECTIONS => {
                self.attach(stream, domain).is_ok()
            }
            Ok(Some(_)) | Err(_) => false,
        };
        if !accepted {
            // A listener that stays readable would keep us busy. It is taken back when a connection goes.
            self.full = true;
            self.listeners.iter().for_each(|(listener, _)| drop(self.poller.remove(listener)));
        }
    }

    /// Serves the requests that one connection has sent, up to what one receive brings.
    fn serve(&mut self, token: u64) {
        let mut received = false;
        while let Some(connection) = self.connections.get_mut(&token) {
            connection.flush();
            let Some(message) = connection.next(&mut received) else { return };
            let mut changes = Vec::new();
            let result = request::serve(connection, &mut self.tree, &self.limits, &message, &mut changes);
            connection.reply(&message, result);
            self.queue_watch_events(&changes);
        }
    }

    /// Queues events about changes for every watch that may see them.
    fn queue_watch_events(&mut self, changes: &[Change]) {
        for change in changes {
            let now = self.tree.node(&change.path);
            for connection in self.connections.values_mut() {
                let who = connection.domain;
                let event_of = |watch: &Watch| seen_by(who, watch, change, now).map(|path| watch.event(path));
                let events: Vec<Vec<u8>> = connection.watches.iter().filter_map(event_of).collect();
                events.into_iter().for_each(|event| connection.queue_event(event));
            }
        }
    }

    /// Queues events for every special watch of this name.
    fn queue_special_events(&mut self, name: &str) {
        for connection in self.connections.values_mut().filter(|c| is_privileged(c.domain)) {
            let its = connection.watches.iter().filter(|watch| watch.path == name);
            let events: Vec<Vec<u8>> = its.map(|watch| watch.event(name)).collect();
            events.into_iter().for_each(|event| connection.queue_event(event));
        }
        self.flush_and_update_interest();
    }

    /// Sends what waits, updates the poller, and removes dead connections.
    fn flush_and_update_interest(&mut self) {
        for (token, connection) in &mut self.connections {
            connection.flush();
            let waits = connection.has_output();
            if waits != connection.waits_for_room && !connection.dead {
                let interest = if waits { Interest::WRITABLE } else { Interest::READABLE };
                connection.dead |= self.poller.modify(&connection.stream, *token, interest).is_err();
                connection.waits_for_room = waits;
            }
        }
        let before = self.connections.len();
        let poller = &self.poller;
        self.connections.retain(|_, connection| {
            if connection.dead {
                let _ = poller.remove(&connection.stream);
            }
            !connection.dead
        });
        if self.full && self.connections.len() < before {
            self.full = false;
            for (at, (listener, _)) in self.listeners.iter().enumerate() {
                let _ = self.poller.add(listener, LISTENERS + at as u64, Interest::READABLE);
            }
        }
    }
}

/// Returns the path that a watch of domain `who` reports after a change, if it may know of it.
/// `now` is the node after the change.
fn seen_by<'c>(who: DomId, watch: &'c Watch, change: &'c Change, now: Option<&Arc<Node>>) -> Option<&'c str> {
    let reads = |node: Option<&Arc<Node>>| node.is_some_and(|node| node.access(who).reads());
    if path::is_within(&change.path, &watch.path) {
        return (reads(now) || reads(change.before.as_ref())).then_some(&change.path);
    }
    // The watched node may have been removed with one above it.
    let below =
        watch.path.strip_prefix(&change.path).filter(|rest| now.is_none() && rest.starts_with('/'))?;
    let node = change.before.as_ref().and_then(|node| descendant(node, below));
    reads(node).then_some(&watch.path)
}

/// Returns the node at the end of a path that begins below `node`.
fn descendant<'n>(node: &'n Arc<Node>, path: &str) -> Option<&'n Arc<Node>> {
    let mut names = path.split('/').filter(|name| !name.is_empty());
    names.try_fold(node, |node, name| node.children.get(name))
}

impl AsFd for Server {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.poller.as_fd()
    }
}
