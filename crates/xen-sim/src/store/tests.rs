//! The store through its own client: what goes over the wire, seen from both sides.

use std::os::fd::AsFd;

use ringferry_sys::socket::Stream;
use ringferry_xen::domain::DomId;
use ringferry_xen::store::wire::{Kind, Message};
use ringferry_xen::store::{Client, Code, Event, NodeAccess, Nodes, Permission, StoreError};

use super::{Limits, Running, Server};
use crate::conformance::store as conformance;

const DOM0: DomId = DomId(0);
const GUEST: DomId = DomId(3);

fn store() -> Running {
    let store = Server::new(Limits::DEFAULT).unwrap().start().unwrap();
    store.introduce(DOM0);
    store.introduce(GUEST);
    store
}

/// Waits for the next event.
fn event(client: &mut Client) -> Event {
    loop {
        if let Some(event) = client.event().unwrap() {
            return event;
        }
        let mut fds = [rustix::event::PollFd::from_borrowed_fd(client.as_fd(), rustix::event::PollFlags::IN)];
        rustix::event::poll(&mut fds, None).unwrap();
    }
}

fn changed(path: &str, token: u64) -> Event {
    Event::Changed { path: path.into(), token }
}

#[test]
fn it_is_as_every_store_must_be() {
    let store = store();
    for (domain, base) in [(DOM0, "/tool"), (GUEST, "data"), (GUEST, "/local/domain/3/data")] {
        let connect = || store.client(domain).unwrap();
        conformance::all(&conformance::Subject { connect: &connect, domain, base }, |_| ());
    }
}

#[test]
fn what_a_transaction_does_not_look_at_does_not_disturb_it() {
    let store = store();
    let (mut a, mut b) = (store.client(DOM0).unwrap(), store.client(DOM0).unwrap());
    let mut runs = 0;
    a.transaction(|t| {
        runs += 1;
        b.write("/elsewhere", runs.to_string())?;
        t.write("/count", "0")
    })
    .unwrap();
    assert_eq!(runs, 1);
}

#[test]
fn relative_paths_begin_at_the_domains_own_node() {
    let store = store();
    let mut guest = store.client(GUEST).unwrap();
    assert_eq!(guest.number("domid").unwrap(), Some(3u16));
    guest.write("data/x", "1").unwrap();
    assert_eq!(store.client(DOM0).unwrap().read("/local/domain/3/data/x").unwrap().unwrap(), b"1");
    guest.watch("data", 9).unwrap();
    assert_eq!(event(&mut guest), changed("data", 9));
    guest.write("/local/domain/3/data/x", "2").unwrap();
    assert_eq!(event(&mut guest), changed("data/x", 9));
}

#[test]
fn what_others_wrote_is_checked_before_it_is_used() {
    let store = store();
    let mut client = store.client(DOM0).unwrap();
    for (value, good) in
        [(&b"7"[..], true), (b"", false), (b" 7", false), (b"70000", false), (b"\xff", false)]
    {
        client.write("/n", value).unwrap();
        let number = client.number::<u16>("/n");
        assert_eq!(number.as_ref().ok(), good.then_some(&Some(7)), "{value:?}");
        assert!(number.is_ok() || matches!(number, Err(StoreError::Malformed { .. })));
    }
    assert_eq!(client.number::<u16>("/absent").unwrap(), None);
    for (value, good) in [(&b"text"[..], true), (b"a\nb", false), (b"\x1b[2J", false), (b"\xff\xfe", false)] {
        client.write("/t", value).unwrap();
        assert_eq!(client.text("/t").is_ok(), good, "{value:?}");
    }
    for (value, yes) in [("1", true), ("0", false), ("", false), ("yes", false), ("11", false)] {
        client.write("/f", value).unwrap();
        assert_eq!(client.flag("/f").unwrap(), yes, "{value}");
    }
    assert!(matches!(client.write("/t", vec![0; 4096]), Err(StoreError::TooLong { .. })));
    assert!(matches!(client.read("no spaces"), Err(StoreError::Path(_))));
    assert!(client.read("/t").is_ok());
}

#[test]
fn permissions_hold_and_can_be_read_back() {
    let store = store();
    let (mut dom0, mut guest) = (store.client(DOM0).unwrap(), store.client(GUEST).unwrap());
    dom0.write("/secret", "x").unwrap();
    let entries = [Permission::new(DOM0, NodeAccess::None), Permission::new(GUEST, NodeAccess::Write)];
    dom0.set_permissions("/secret", &entries).unwrap();
    assert_eq!(dom0.permissions("/secret").unwrap(), entries);
    assert!(guest.read("/secret").unwrap_err().is(Code::Denied));
    guest.write("/secret", "y").unwrap();
    assert_eq!(dom0.read("/secret").unwrap().unwrap(), b"y");
    assert!(guest.write("/elsewhere", "").unwrap_err().is(Code::Denied));
    assert!(guest.remove("device").unwrap_err().is(Code::Denied));
    assert!(guest.set_permissions("device", &entries).unwrap_err().is(Code::Denied));
}

#[test]
fn xsa_115_a_watch_does_not_tell_of_what_one_may_not_read() {
    let store = store();
    let (mut dom0, mut guest) = (store.client(DOM0).unwrap(), store.client(GUEST).unwrap());
    dom0.write("/local/domain/9/name", "x").unwrap();
    let closed = [Permission::new(DOM0, NodeAccess::None)];
    dom0.set_permissions("/local/domain/9", &closed).unwrap();
    dom0.set_permissions("/local/domain/9/name", &closed).unwrap();
    guest.watch("/", 1).unwrap();
    guest.watch("@introduceDomain", 2).unwrap();
    assert_eq!((event(&mut guest), event(&mut guest)), (changed("/", 1), changed("@introduceDomain", 2)));
    dom0.write("/local/domain/9/name", "y").unwrap();
    dom0.remove("/local/domain/9").unwrap();
    store.introduce(DomId(11));
    dom0.write("/visible", "").unwrap();
    loop {
        match event(&mut guest) {
            Event::Changed { path, token } => {
                assert!(!path.starts_with("/local/domain/9") && token == 1, "{path}");
                if path == "/visible" {
                    break;
                }
            }
            Event::Flood => panic!("a flood of three"),
        }
    }
}

#[test]
fn a_transaction_that_always_collides_is_given_up() {
    let store = store();
    let (mut a, mut b) = (store.client(DOM0).unwrap(), store.client(DOM0).unwrap());
    let mut runs = 0;
    let result = a.transaction(|t| {
        runs += 1;
        t.read("/x")?;
        b.write("/x", runs.to_string())
    });
    assert!(matches!(result, Err(StoreError::Busy)), "{result:?}");
}

#[test]
fn a_guest_cannot_open_transactions_or_watches_without_end() {
    let store = store();
    let mut guest = store.client(GUEST).unwrap();
    let open = (0..100).take_while(|_| guest.request(Kind::TransactionStart, "/", b"").is_ok()).count();
    assert_eq!(open, Limits::DEFAULT.transactions);
    let watches = (0..1000).take_while(|n| guest.watch(&format!("data/{n}"), *n).is_ok()).count();
    assert_eq!(watches, Limits::DEFAULT.watches);
    assert!(guest.watch("data/0", 0).unwrap_err().is(Code::Exists));
    assert!(guest.unwatch("data/0", 1).unwrap_err().is(Code::Missing));
    guest.unwatch("data/0", 0).unwrap();
    guest.watch("data/0", 0).unwrap();
}

#[test]
fn a_released_domain_loses_its_connection_and_its_nodes() {
    let store = store();
    let (mut dom0, mut guest) = (store.client(DOM0).unwrap(), store.client(GUEST).unwrap());
    dom0.watch("@releaseDomain", 4).unwrap();
    assert_eq!(event(&mut dom0), changed("@releaseDomain", 4));
    store.release(GUEST);
    assert_eq!(event(&mut dom0), changed("@releaseDomain", 4));
    assert_eq!(dom0.read("/local/domain/3").unwrap(), None);
    assert!(guest.read("domid").unwrap_err().is_fatal());
    assert!(matches!(guest.read("domid"), Err(StoreError::Closed)));
}

#[test]
fn a_socket_speaks_for_the_domain_it_was_made_for() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    let store = store();
    store.listen(&path, GUEST).unwrap();
    let mut guest = Client::connect(&path).unwrap();
    assert_eq!(guest.number("domid").unwrap(), Some(3u16));
    drop(store);
    assert!(guest.read("domid").is_err());
    assert!(!path.exists());
}

/// One who floods and never reads: its answers wait, then its events, and at last it is closed. Others notice nothing.
#[test]
fn xsa_326_who_does_not_read_is_closed_and_disturbs_nobody() {
    let store = store();
    let (ours, flood) = Stream::pair().unwrap();
    store.attach(ours, GUEST).unwrap();
    flood.set_nonblocking(true).unwrap();
    let mut bytes = Vec::new();
    for path in [&b"/\x001\0"[..], b"data\x002\0"] {
        let payload = path.to_vec();
        Message { kind: Kind::Watch as u32, request: 1, transaction: 0, payload }.encode(&mut bytes);
    }
    let read = Message { kind: Kind::Directory as u32, request: 2, transaction: 0, payload: b"/\0".to_vec() };
    (0..50).for_each(|_| assert!(read.encode(&mut bytes)));
    let mut dom0 = store.client(DOM0).unwrap();
    // Until nothing more is taken: the store waits for us to read.
    let mut at = 0;
    loop {
        match flood.send(&bytes[at..], &[]) {
            Ok(n) => at = (at + n) % bytes.len(),
            Err(error) => {
                assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
                dom0.read("/local").unwrap();
                // The store has had its turn; is there still no room?
                if flood.send(&bytes[at..at + 1], &[]).is_err() {
                    break;
                }
                at = (at + 1) % bytes.len();
            }
        }
    }
    for n in 0..20_000 {
        dom0.write(&format!("/f/{}", n % 9000), "x").unwrap();
    }
    flood.set_nonblocking(false).unwrap();
    let mut buffer = vec![0; 1 << 16];
    let end = loop {
        match flood.recv(&mut buffer, &mut Vec::new()) {
            Ok(received) if received.bytes > 0 => {}
            other => break other,
        }
    };
    assert!(end.is_ok_and(|received| received.bytes == 0) || flood.send(b"x", &[]).is_err());
}

#[test]
fn garbage_ends_only_the_connection_it_came_from() {
    let store = store();
    for garbage in [&[0xff; 64][..], b"\x02\0\0\0\x01\0\0\0\0\0\0\0\x00\x20\0\0"] {
        let (ours, peer) = Stream::pair().unwrap();
        store.attach(ours, GUEST).unwrap();
        peer.send(garbage, &[]).unwrap();
        let received = peer.recv(&mut [0; 64], &mut Vec::new());
        assert!(received.is_err() || received.is_ok_and(|r| r.bytes == 0));
    }
    let (ours, peer) = Stream::pair().unwrap();
    store.attach(ours, GUEST).unwrap();
    let mut bytes = Vec::new();
    for (kind, payload) in [
        (2, &b"no zero byte"[..]),
        (11, b""),
        (99, b"x\0"),
        (15, b"a\0b\0"),
        (4, b"a\0"),
        (22, b"/\0x\0"),
        (14, b"data\0q9\0"),
        (7, b"T\0"),
    ] {
        Message { kind, request: 1, transaction: 5, payload: payload.to_vec() }.encode(&mut bytes);
    }
    peer.send(&bytes, &[]).unwrap();
    let mut decoder = ringferry_xen::store::wire::Decoder::default();
    let mut refused = 0;
    while refused < 8 {
        let mut buffer = [0; 4096];
        let n = peer.recv(&mut buffer, &mut Vec::new()).unwrap().bytes;
        assert_ne!(n, 0);
        decoder.push(&buffer[..n]);
        while let Some(message) = decoder.take().unwrap() {
            assert_eq!(message.kind, Kind::Error as u32);
            refused += 1;
        }
    }
    assert!(store.client(DOM0).unwrap().read("/local").unwrap().is_some());
}
