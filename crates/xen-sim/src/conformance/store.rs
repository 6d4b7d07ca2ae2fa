//! The properties of every store that a [`Client`] can be connected to: ours, and Xen's in each of
//! the ways to it.
//!
//! Each function works below one node, which it removes again, and panics when the property does not hold.

use std::os::fd::AsFd;
use std::time::Duration;

use ringferry_sys::epoll::{Epoll, EventBuf, Interest};
use ringferry_xen::domain::DomId;
use ringferry_xen::store::{Client, Code, Event, NodeAccess, Nodes, Permission, StoreError, path};

/// Longest wait for an event: far longer than one ever takes, so that only a lost one is too late.
const EVENT: Duration = Duration::from_secs(20);

/// The store under test, as a way to connect to it.
pub struct Subject<'a> {
    /// Opens a connection; each speaks for the same domain.
    pub connect: &'a dyn Fn() -> Client,
    /// The domain for which connections speak.
    pub domain: DomId,
    /// A node that the domain owns, absolute or relative to its own node.
    pub base: &'a str,
}

/// A property of a store, as a function that checks it.
type Property = fn(&Subject<'_>);

/// All properties with their names.
pub const PROPERTIES: &[(&str, Property)] = &[
    ("nodes are written, read, listed and removed", nodes_live_and_die),
    ("any bytes are a value, up to the limit", values_are_bytes),
    ("names that do not fit into one answer come in parts", long_lists_come_in_parts),
    ("permissions can be set and read back", permissions_are_kept),
    ("a watch tells at once, and of every change below", watches_tell),
    ("an ended watch tells nothing more", watches_end),
    ("a watched node that goes with its parent is told", watches_tell_of_removal_above),
    ("a transaction is seen as a whole", transactions_are_whole),
    ("a transaction that fails leaves no trace", transactions_are_undone),
    ("a transaction that collides is done again", transactions_collide),
    ("what is wrong is refused with its code, and the connection lives on", refusals_have_codes),
];

/// Checks all properties, and calls `passed` after each.
///
/// # Panics
/// Panics if a property does not hold.
pub fn all(subject: &Subject<'_>, mut passed: impl FnMut(&str)) {
    for (name, property) in PROPERTIES {
        property(subject);
        (subject.connect)().remove(&subject.at("t")).expect("clean up");
        passed(name);
    }
}

impl Subject<'_> {
    fn at(&self, name: &str) -> String {
        path::join(self.base, name)
    }

    fn client(&self) -> Client {
        (self.connect)()
    }
}

/// Waits for the next event.
fn event(client: &mut Client) -> Event {
    let epoll = Epoll::new().expect("epoll");
    epoll.add(client.as_fd(), 0, Interest::READABLE).expect("epoll");
    loop {
        if let Some(event) = client.event().expect("event") {
            return event;
        }
        let ready = epoll.wait(&mut EventBuf::with_capacity(1), Some(EVENT)).expect("epoll");
        assert!(ready > 0, "an event is missing");
    }
}

fn changed(path: String, token: u64) -> Event {
    Event::Changed { path, token }
}

fn nodes_live_and_die(subject: &Subject<'_>) {
    let mut client = subject.client();
    client.write(&subject.at("t/a/b"), "value").unwrap();
    assert_eq!(client.read(&subject.at("t/a/b")).unwrap().unwrap(), b"value");
    assert_eq!(client.read(&subject.at("t/a")).unwrap().unwrap(), b"");
    assert_eq!(client.read(&subject.at("t/x")).unwrap(), None);
    client.mkdir(&subject.at("t/a/c")).unwrap();
    client.mkdir(&subject.at("t/a/b")).unwrap();
    assert_eq!(client.read(&subject.at("t/a/b")).unwrap().unwrap(), b"value");
    let mut names = client.directory(&subject.at("t/a")).unwrap();
    names.sort();
    assert_eq!(names, ["b", "c"]);
    assert_eq!(client.directory(&subject.at("t/a/b")).unwrap(), [""; 0]);
    client.remove(&subject.at("t/a")).unwrap();
    client.remove(&subject.at("t/a")).unwrap();
    assert_eq!(client.directory(&subject.at("t")).unwrap(), [""; 0]);
    assert_eq!(client.directory(&subject.at("t/a")).unwrap(), [""; 0]);
}

fn values_are_bytes(subject: &Subject<'_>) {
    let mut client = subject.client();
    for value in [&b""[..], b"\0", b"a\0b\0", b"\xff\n\x1b", &[7; 2000]] {
        client.write(&subject.at("t"), value).unwrap();
        assert_eq!(client.read(&subject.at("t")).unwrap().unwrap(), value);
    }
    let result = client.write(&subject.at("t"), vec![0; 4096]);
    assert!(matches!(result, Err(StoreError::TooLong { .. })), "{result:?}");
}

fn long_lists_come_in_parts(subject: &Subject<'_>) {
    let mut client = subject.client();
    // Xen's store counts the names of its children as part of a node, of which only domain 0 may have long ones.
    let count = if subject.domain == DomId(0) { 150 } else { 20 };
    let names: Vec<String> = (0..count).map(|n| format!("a-name-of-{n:04}-{}", "x".repeat(40))).collect();
    let made =
        client.transaction(|t| names.iter().try_for_each(|name| t.mkdir(&subject.at(&format!("t/{name}")))));
    made.unwrap();
    let mut listed = client.directory(&subject.at("t")).unwrap();
    listed.sort();
    assert_eq!(listed, names);
}

fn permissions_are_kept(subject: &Subject<'_>) {
    let mut client = subject.client();
    let entries = [
        Permission::new(subject.domain, NodeAccess::None),
        Permission::new(DomId(7), NodeAccess::Read),
        Permission::new(DomId(8), NodeAccess::Both),
    ];
    client.write(&subject.at("t"), "").unwrap();
    assert_eq!(client.permissions(&subject.at("t")).unwrap()[0].domain, subject.domain);
    client.set_permissions(&subject.at("t"), &entries).unwrap();
    assert_eq!(client.permissions(&subject.at("t")).unwrap(), entries);
}

fn watches_tell(subject: &Subject<'_>) {
    let (mut client, mut other) = (subject.client(), subject.client());
    client.watch(&subject.at("t"), 5).unwrap();
    assert_eq!(event(&mut client), changed(subject.at("t"), 5));
    other.write(&subject.at("t/a/b"), "1").unwrap();
    assert_eq!(event(&mut client), changed(subject.at("t/a/b"), 5));
    other.write(&subject.at("tx"), "1").unwrap();
    other.remove(&subject.at("tx")).unwrap();
    client.write(&subject.at("t/own"), "1").unwrap();
    assert_eq!(event(&mut client), changed(subject.at("t/own"), 5));
    other.remove(&subject.at("t")).unwrap();
    assert_eq!(event(&mut client), changed(subject.at("t"), 5));
}

fn watches_end(subject: &Subject<'_>) {
    let (mut client, mut other) = (subject.client(), subject.client());
    client.watch(&subject.at("t/a"), 1).unwrap();
    client.watch(&subject.at("t/b"), 2).unwrap();
    other.write(&subject.at("t/a"), "").unwrap();
    client.unwatch(&subject.at("t/a"), 1).unwrap();
    other.write(&subject.at("t/a"), "").unwrap();
    other.write(&subject.at("t/b/last"), "").unwrap();
    let mut told = Vec::new();
    while told.last() != Some(&changed(subject.at("t/b/last"), 2)) {
        told.push(event(&mut client));
    }
    assert!(told.iter().all(|event| matches!(event, Event::Changed { token: 2, .. })), "{told:?}");
}

fn watches_tell_of_removal_above(subject: &Subject<'_>) {
    let (mut client, mut other) = (subject.client(), subject.client());
    other.write(&subject.at("t/p/q"), "1").unwrap();
    client.watch(&subject.at("t/p/q"), 1).unwrap();
    assert_eq!(event(&mut client), changed(subject.at("t/p/q"), 1));
    other.remove(&subject.at("t")).unwrap();
    assert_eq!(event(&mut client), changed(subject.at("t/p/q"), 1));
    assert_eq!(client.read(&subject.at("t/p/q")).unwrap(), None);
}

fn transactions_are_whole(subject: &Subject<'_>) {
    let (mut a, mut b) = (subject.client(), subject.client());
    b.watch(&subject.at("t"), 1).unwrap();
    assert_eq!(event(&mut b), changed(subject.at("t"), 1));
    a.transaction(|t| {
        t.write(&subject.at("t/x"), "1")?;
        t.write(&subject.at("t/y"), "2")?;
        assert_eq!(t.read(&subject.at("t/x"))?.unwrap(), b"1");
        assert_eq!(b.read(&subject.at("t/x"))?, None);
        assert_eq!(b.event()?, None);
        Ok(())
    })
    .unwrap();
    let mut told = [event(&mut b), event(&mut b)];
    told.sort_by_key(|event| format!("{event:?}"));
    assert_eq!(told, [changed(subject.at("t/x"), 1), changed(subject.at("t/y"), 1)]);
    assert_eq!(b.read(&subject.at("t/y")).unwrap().unwrap(), b"2");
}

fn transactions_are_undone(subject: &Subject<'_>) {
    let mut client = subject.client();
    client.write(&subject.at("t/x"), "text").unwrap();
    let result = client.transaction(|t| {
        t.write(&subject.at("t/y"), "2")?;
        t.number::<u8>(&subject.at("t/x")).map(drop)
    });
    assert!(matches!(result, Err(StoreError::Malformed { .. })));
    assert_eq!(client.directory(&subject.at("t")).unwrap(), ["x"]);
}

fn transactions_collide(subject: &Subject<'_>) {
    let (mut a, mut b) = (subject.client(), subject.client());
    a.write(&subject.at("t/count"), "1").unwrap();
    let mut runs = 0;
    a.transaction(|t| {
        runs += 1;
        let count: u32 = t.number(&subject.at("t/count"))?.unwrap();
        if runs == 1 {
            b.write(&subject.at("t/count"), "10")?;
        }
        t.write(&subject.at("t/count"), (count + 1).to_string())
    })
    .unwrap();
    assert_eq!((runs, a.number(&subject.at("t/count")).unwrap()), (2, Some(11u32)));
}

fn refusals_have_codes(subject: &Subject<'_>) {
    let mut client = subject.client();
    assert!(client.permissions(&subject.at("t/nothing")).unwrap_err().is(Code::Missing));
    if subject.domain != DomId(0) {
        assert!(client.write("/not-ours", "").unwrap_err().is(Code::Denied));
        let others = [Permission::new(DomId(0), NodeAccess::Both)];
        client.write(&subject.at("t"), "").unwrap();
        assert!(client.set_permissions(&subject.at("t"), &others).is_err());
    }
    client.write(&subject.at("t"), "still here").unwrap();
    assert_eq!(client.text(&subject.at("t")).unwrap().unwrap(), "still here");
}
