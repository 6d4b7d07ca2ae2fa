//! [`State`]: the broker's domains with their grants and ports, and the replies to their requests.
//! The broker's thread changes it under a lock that tests share; nothing here blocks or does input
//! and output, except creating files.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use ringferry_sys::eventfd::EventFd;
use ringferry_xen::domain::DomId;
use ringferry_xen::grant::{Access, GrantRef};
use ringferry_xen::process::wire::{Reply, Request, access_word};
use ringferry_xen::segment::{Files, Segment};
use rustix::io::Errno;

use crate::segments::{MAX_PAGES, Segments};

/// Most domains that may be connected at once.
const MAX_DOMAINS: usize = 64;

/// First domain number with a special meaning to Xen; those from here on are not domains.
const FIRST_RESERVED: u16 = 0x7ff0;

/// Most grants (calls of `grant`, of any number of pages) and ports that a domain may have at once.
/// Each costs the broker two descriptors, and it must have some left for others whatever a domain
/// does.
const MAX_GRANTS: usize = 128;
const MAX_PORTS: usize = 128;

/// Most domains that are gone whose pages are still counted.
const MAX_GONE: usize = 16;

/// The tables of all domains.
#[derive(Debug, Default)]
pub(super) struct State {
    domains: BTreeMap<DomId, Tables>,
    /// The highest port ever allocated. No port is reused until after 2^32.
    last_port: u32,
    /// Grants of domains that are gone, as long as they are mapped somewhere.
    gone: Vec<Segments>,
}

/// The grants and ports of one domain.
#[derive(Debug, Default)]
struct Tables {
    grants: Segments,
    ports: BTreeMap<u32, Port>,
}

/// An allocated port with its two eventfds.
#[derive(Debug)]
struct Port {
    /// Domain that may bind to the port.
    remote: DomId,
    bound: bool,
    /// Event that wakes the maker.
    to_maker: EventFd,
    /// Event that wakes the domain that bound.
    to_binder: EventFd,
}

/// A reply, with the descriptors that go with it.
pub(super) type ReplyWithFds = (Reply, Vec<OwnedFd>);

fn done(words: [u32; 3]) -> ReplyWithFds {
    (Reply::Done(words), Vec::new())
}

fn duplicate(fds: [BorrowedFd<'_>; 2]) -> Result<Vec<OwnedFd>, Errno> {
    fds.into_iter().map(|fd| rustix::io::fcntl_dupfd_cloexec(fd, 3)).collect()
}

/// Returns the reply that hands a segment to a domain that may use it.
fn segment_reply(segment: &Segment) -> Result<ReplyWithFds, Errno> {
    let fds = duplicate([segment.files().data.as_fd(), segment.files().words.as_fd()])?;
    let words = [segment.first().0, segment.count() as u32, access_word(segment.access())];
    Ok((Reply::Done(words), fds))
}

/// Returns the `errno` of an error, for a reply.
fn errno(error: &std::io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}

impl State {
    /// Adds a domain with this number, or with the lowest free one.
    pub(super) fn enter(&mut self, wanted: Option<DomId>) -> Result<DomId, Errno> {
        if self.domains.len() >= MAX_DOMAINS {
            return Err(Errno::AGAIN);
        }
        let id = match wanted {
            Some(id) if id.0 >= FIRST_RESERVED => return Err(Errno::INVAL),
            Some(id) => id,
            None => (1..).map(DomId).find(|id| !self.domains.contains_key(id)).ok_or(Errno::AGAIN)?,
        };
        if self.domains.contains_key(&id) {
            return Err(Errno::EXIST);
        }
        self.domains.insert(id, Tables::default());
        Ok(id)
    }

    /// Removes a domain: its grants end, its ports close, and the ends that it bound become free.
    pub(super) fn leave(&mut self, id: DomId) {
        let Some(mut tables) = self.domains.remove(&id) else { return };
        tables.grants.end_all();
        self.gone.retain(|grants| grants.mapped() > 0);
        if self.gone.len() >= MAX_GONE {
            self.gone.remove(0); // who says that its pages are mapped may lie
        }
        self.gone.push(tables.grants);
        for port in self.domains.values_mut().flat_map(|tables| tables.ports.values_mut()) {
            if port.remote == id {
                port.bound = false;
            }
        }
    }

    /// Serves a request of domain `me`.
    pub(super) fn handle(&mut self, me: DomId, request: Request) -> ReplyWithFds {
        let reply = match request {
            Request::Hello(_) => Err(Errno::ALREADY),
            Request::Find(id) => self.tables(id).map(|_| done([0; 3])),
            Request::Grant { to, count, access } => self.grant(me, to, count, access),
            Request::End(first) => self.end(me, first),
            Request::Resolve { domain, gref } => self.resolve(me, domain, gref),
            Request::Alloc { remote } => self.alloc(me, remote),
            Request::Bind { maker, port } => self.bind(me, maker, port),
            Request::Close { maker, port, binder } => self.close(me, maker, port, binder),
        };
        reply.unwrap_or_else(|errno| (Reply::Refused(errno.raw_os_error()), Vec::new()))
    }

    fn tables(&mut self, id: DomId) -> Result<&mut Tables, Errno> {
        self.domains.get_mut(&id).ok_or(Errno::SRCH)
    }

    fn grant(&mut self, me: DomId, to: DomId, count: u32, access: Access) -> Result<ReplyWithFds, Errno> {
        let tables = self.tables(me)?;
        let count = count as usize;
        let first = match tables.grants.place(count, MAX_PAGES) {
            Ok(first) if tables.grants.len() < MAX_GRANTS => first,
            _ => return Err(Errno::NOSPC),
        };
        let segment = Files::new(count).and_then(|files| Segment::new(first, count, to, access, files));
        let segment = segment.map_err(|error| errno(&error))?;
        let reply = segment_reply(&segment)?;
        tables.grants.insert(segment);
        Ok(reply)
    }

    fn end(&mut self, me: DomId, first: GrantRef) -> Result<ReplyWithFds, Errno> {
        if self.tables(me)?.grants.end(first) { Ok(done([0; 3])) } else { Err(Errno::NOENT) }
    }

    fn resolve(&mut self, me: DomId, domain: DomId, gref: GrantRef) -> Result<ReplyWithFds, Errno> {
        let tables = self.tables(domain)?;
        let (segment, page) = tables.grants.find(gref).ok_or(Errno::NOENT)?;
        if segment.to() != me || segment.has_ended(page) {
            return Err(Errno::NOENT);
        }
        segment_reply(segment)
    }

    fn alloc(&mut self, me: DomId, remote: DomId) -> Result<ReplyWithFds, Errno> {
        let number = self.last_port.checked_add(1).ok_or(Errno::NOSPC)?;
        let tables = self.tables(me)?;
        if tables.ports.len() >= MAX_PORTS {
            return Err(Errno::NOSPC);
        }
        let bell = || EventFd::new().map_err(|error| errno(&error));
        let port = Port { remote, bound: false, to_maker: bell()?, to_binder: bell()? };
        let fds = duplicate([port.to_maker.as_fd(), port.to_binder.as_fd()])?;
        tables.ports.insert(number, port);
        self.last_port = number;
        Ok((Reply::Done([number, 0, 0]), fds))
    }

    fn bind(&mut self, me: DomId, maker: DomId, port: u32) -> Result<ReplyWithFds, Errno> {
        let port = self.tables(maker)?.ports.get_mut(&port);
        let port = port.filter(|port| port.remote == me && !port.bound).ok_or(Errno::INVAL)?;
        let fds = duplicate([port.to_binder.as_fd(), port.to_maker.as_fd()])?;
        port.bound = true;
        // Xen does so too: the maker may have sent an event before anyone was bound.
        let _ = port.to_binder.signal();
        Ok((Reply::Done([0; 3]), fds))
    }

    fn close(&mut self, me: DomId, maker: DomId, number: u32, binder: bool) -> Result<ReplyWithFds, Errno> {
        let ports = &mut self.tables(maker)?.ports;
        let port = ports.get_mut(&number).ok_or(Errno::NOENT)?;
        match binder {
            true if port.remote == me && port.bound => port.bound = false,
            false if maker == me => {
                ports.remove(&number);
            }
            _ => return Err(Errno::PERM),
        }
        Ok(done([0; 3]))
    }

    pub(super) fn domains(&self) -> usize {
        self.domains.len()
    }

    pub(super) fn granted_pages(&self) -> usize {
        self.domains.values().map(|tables| tables.grants.granted()).sum()
    }

    pub(super) fn mapped_pages(&self) -> usize {
        let living = self.domains.values().map(|tables| &tables.grants);
        living.chain(&self.gone).map(Segments::mapped).sum()
    }

    pub(super) fn open_ports(&self) -> usize {
        let ports = self.domains.values().flat_map(|tables| tables.ports.values());
        ports.map(|port| 1 + usize::from(port.bound)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn request() -> impl Strategy<Value = Request> {
        let id = (0u16..5).prop_map(DomId);
        let gref = prop_oneof![0u32..24, any::<u32>()].prop_map(GrantRef);
        let port = prop_oneof![0u32..12, any::<u32>()];
        let access = prop_oneof![Just(Access::Read), Just(Access::Write)];
        let count = prop_oneof![0u32..5, any::<u32>()];
        prop_oneof![
            id.clone().prop_map(|id| Request::Hello(Some(id))),
            id.clone().prop_map(Request::Find),
            (id.clone(), count, access).prop_map(|(to, count, access)| Request::Grant { to, count, access }),
            gref.clone().prop_map(Request::End),
            (id.clone(), gref).prop_map(|(domain, gref)| Request::Resolve { domain, gref }),
            id.clone().prop_map(|remote| Request::Alloc { remote }),
            (id.clone(), port.clone()).prop_map(|(maker, port)| Request::Bind { maker, port }),
            (id, port, any::<bool>()).prop_map(|(maker, port, binder)| Request::Close {
                maker,
                port,
                binder
            }),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn whatever_domains_ask_for_goes_with_them(
            requests in proptest::collection::vec((0u16..3, request(), 0u8..20), 1..150),
        ) {
            let mut state = State::default();
            for id in 0..3 {
                state.enter(Some(DomId(id))).unwrap();
            }
            for (me, request, leaves) in requests {
                let (reply, fds) = state.handle(DomId(me), request);
                let descriptors = match (reply, request) {
                    (Reply::Refused(errno), _) => {
                        prop_assert!(errno > 0);
                        0
                    }
                    (_, Request::Grant { .. } | Request::Resolve { .. }) => 2,
                    (_, Request::Alloc { .. } | Request::Bind { .. }) => 2,
                    _ => 0,
                };
                prop_assert_eq!(fds.len(), descriptors);
                prop_assert!(state.granted_pages() <= 3 * MAX_PAGES);
                if leaves == 0 {
                    state.leave(DomId(me));
                    state.enter(Some(DomId(me))).unwrap();
                }
            }
            (0..3).for_each(|id| state.leave(DomId(id)));
            prop_assert_eq!((state.domains(), state.granted_pages(), state.open_ports()), (0, 0, 0));
            prop_assert_eq!(state.mapped_pages(), 0);
        }
    }

    #[test]
    fn a_reference_is_resolved_for_its_domain_only_and_until_its_end() {
        let mut state = State::default();
        let [front, back, other] = [1, 2, 3].map(|id| state.enter(Some(DomId(id))).unwrap());
        let grant = Request::Grant { to: back, count: 2, access: Access::Write };
        assert_eq!(state.handle(front, grant).0, Reply::Done([8, 2, 1]));
        let resolve = |gref| Request::Resolve { domain: front, gref: GrantRef(gref) };
        assert_eq!(state.handle(back, resolve(9)).0, Reply::Done([8, 2, 1]));
        for (me, gref) in [(other, 8), (front, 8), (back, 7), (back, 10)] {
            assert!(matches!(state.handle(me, resolve(gref)).0, Reply::Refused(_)), "{me} {gref}");
        }
        assert!(matches!(state.handle(back, Request::End(GrantRef(8))).0, Reply::Refused(_)));
        assert!(matches!(state.handle(front, Request::End(GrantRef(8))).0, Reply::Done(_)));
        assert!(matches!(state.handle(back, resolve(8)).0, Reply::Refused(_)));
    }

    #[test]
    fn only_its_ends_close_a_port() {
        let mut state = State::default();
        let [front, back, other] = [1, 2, 3].map(|id| state.enter(Some(DomId(id))).unwrap());
        let Reply::Done([port, ..]) = state.handle(front, Request::Alloc { remote: back }).0 else {
            panic!()
        };
        let close = |binder| Request::Close { maker: front, port, binder };
        let bind = Request::Bind { maker: front, port };
        for (me, request) in
            [(other, bind), (front, bind), (back, close(true)), (back, close(false)), (other, close(false))]
        {
            assert!(matches!(state.handle(me, request).0, Reply::Refused(_)), "{me} {request:?}");
        }
        assert!(matches!(state.handle(back, bind).0, Reply::Done(_)));
        assert!(matches!(state.handle(other, close(true)).0, Reply::Refused(_)));
        assert_eq!(state.open_ports(), 2);
        state.leave(back); // unbinds
        assert_eq!(state.open_ports(), 1);
        assert!(matches!(state.handle(front, close(false)).0, Reply::Done(_)));
        assert_eq!(state.open_ports(), 0);
    }
}
