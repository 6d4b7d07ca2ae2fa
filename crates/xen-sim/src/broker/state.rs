//! What the broker knows, and its answers. Nothing here waits or does input and output, but making files.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use ringferry_sys::eventfd::EventFd;
use ringferry_xen::domain::DomId;
use ringferry_xen::grant::{Access, GrantRef};
use ringferry_xen::process::wire::{Reply, Request, access_word};
use ringferry_xen::segment::{Files, Segment};
use rustix::io::Errno;

use crate::segments::{MAX_PAGES, Segments};

/// Most domains at once.
const MAX_DOMAINS: usize = 64;

/// Numbers from here on have a special meaning to Xen and are no domains.
const FIRST_RESERVED: u16 = 0x7ff0;

/// Most grants (calls of `grant`, of any number of pages) and ports a domain may have at once. Each costs the broker
/// two descriptors, and it must have some left for others whatever a domain does.
const MAX_GRANTS: usize = 128;
const MAX_PORTS: usize = 128;

/// Most domains that are gone whose pages are still counted.
const MAX_GRAVES: usize = 16;

/// All domains.
#[derive(Debug, Default)]
pub(super) struct State {
    domains: BTreeMap<DomId, Tables>,
    /// The highest port ever given out. None is used twice, until after 2^32.
    last_port: u32,
    /// What domains that are gone had granted, as long as it is mapped somewhere.
    graves: Vec<Segments>,
}

/// What one domain has.
#[derive(Debug, Default)]
struct Tables {
    grants: Segments,
    ports: BTreeMap<u32, Port>,
}

/// A port that someone made.
#[derive(Debug)]
struct Port {
    /// Who may bind.
    remote: DomId,
    bound: bool,
    /// Rings its maker.
    to_maker: EventFd,
    /// Rings whoever binds.
    to_binder: EventFd,
}

/// An answer, and the descriptors that go with it.
pub(super) type Answer = (Reply, Vec<OwnedFd>);

fn done(words: [u32; 3]) -> Answer {
    (Reply::Done(words), Vec::new())
}

fn copy(fds: [BorrowedFd<'_>; 2]) -> Result<Vec<OwnedFd>, Errno> {
    fds.into_iter().map(|fd| rustix::io::fcntl_dupfd_cloexec(fd, 3)).collect()
}

/// A segment, for someone who may use it.
fn described(segment: &Segment) -> Result<Answer, Errno> {
    let fds = copy([segment.files().data.as_fd(), segment.files().words.as_fd()])?;
    let words = [segment.first().0, segment.count() as u32, access_word(segment.access())];
    Ok((Reply::Done(words), fds))
}

/// The `errno` of an error, for the other end.
fn errno(error: &std::io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}

impl State {
    /// A new domain.
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

    /// A domain is gone: its grants end and its ports close. The ends it has bound become free.
    pub(super) fn leave(&mut self, id: DomId) {
        let Some(mut tables) = self.domains.remove(&id) else { return };
        tables.grants.end_all();
        self.graves.retain(|grants| grants.mapped() > 0);
        if self.graves.len() >= MAX_GRAVES {
            self.graves.remove(0); // who says that its pages are mapped may lie
        }
        self.graves.push(tables.grants);
        for port in self.domains.values_mut().flat_map(|tables| tables.ports.values_mut()) {
            if port.remote == id {
                port.bound = false;
            }
        }
    }

    /// The answer to a request of domain `me`.
    pub(super) fn answer(&mut self, me: DomId, request: Request) -> Answer {
        let answer = match request {
            Request::Hello(_) => Err(Errno::ALREADY),
            Request::Find(id) => self.tables(id).map(|_| done([0; 3])),
            Request::Grant { to, count, access } => self.grant(me, to, count, access),
            Request::End(first) => self.end(me, first),
            Request::Resolve { domain, gref } => self.resolve(me, domain, gref),
            Request::Alloc { remote } => self.alloc(me, remote),
            Request::Bind { maker, port } => self.bind(me, maker, port),
            Request::Close { maker, port, binder } => self.close(me, maker, port, binder),
        };
        answer.unwrap_or_else(|errno| (Reply::Refused(errno.raw_os_error()), Vec::new()))
    }

    fn tables(&mut self, id: DomId) -> Result<&mut Tables, Errno> {
        self.domains.get_mut(&id).ok_or(Errno::SRCH)
    }

    fn grant(&mut self, me: DomId, to: DomId, count: u32, access: Access) -> Result<Answer, Errno> {
        let tables = self.tables(me)?;
        let count = count as usize;
        let first = match tables.grants.place(count, MAX_PAGES) {
            Ok(first) if tables.grants.len() < MAX_GRANTS => first,
            _ => return Err(Errno::NOSPC),
        };
        let segment = Files::new(count).and_then(|files| Segment::new(first, count, to, access, files));
        let segment = segment.map_err(|error| errno(&error))?;
        let answer = described(&segment)?;
        tables.grants.insert(segment);
        Ok(answer)
    }

    fn end(&mut self, me: DomId, first: GrantRef) -> Result<Answer, Errno> {
        if self.tables(me)?.grants.end(first) { Ok(done([0; 3])) } else { Err(Errno::NOENT) }
    }

    fn resolve(&mut self, me: DomId, domain: DomId, gref: GrantRef) -> Result<Answer, Errno> {
        let tables = self.tables(domain)?;
        let (segment, page) = tables.grants.find(gref).ok_or(Errno::NOENT)?;
        if segment.to() != me || segment.has_ended(page) {
            return Err(Errno::NOENT);
        }
        described(segment)
    }

    fn alloc(&mut self, me: DomId, remote: DomId) -> Result<Answer, Errno> {
        let number = self.last_port.checked_add(1).ok_or(Errno::NOSPC)?;
        let tables = self.tables(me)?;
        if tables.ports.len() >= MAX_PORTS {
            return Err(Errno::NOSPC);
        }
        let bell = || EventFd::new().map_err(|error| errno(&error));
        let port = Port { remote, bound: false, to_maker: bell()?, to_binder: bell()? };
        let fds = copy([port.to_maker.as_fd(), port.to_binder.as_fd()])?;
        tables.ports.insert(number, port);
        self.last_port = number;
        Ok((Reply::Done([number, 0, 0]), fds))
    }

    fn bind(&mut self, me: DomId, maker: DomId, port: u32) -> Result<Answer, Errno> {
        let port = self.tables(maker)?.ports.get_mut(&port);
        let port = port.filter(|port| port.remote == me && !port.bound).ok_or(Errno::INVAL)?;
        let fds = copy([port.to_binder.as_fd(), port.to_maker.as_fd()])?;
        port.bound = true;
        // Xen does so too: the maker may have sent something while nobody listened.
        let _ = port.to_binder.signal();
        Ok((Reply::Done([0; 3]), fds))
    }

    fn close(&mut self, me: DomId, maker: DomId, number: u32, binder: bool) -> Result<Answer, Errno> {
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
        living.chain(&self.graves).map(Segments::mapped).sum()
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
                let (reply, fds) = state.answer(DomId(me), request);
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
        assert_eq!(state.answer(front, grant).0, Reply::Done([8, 2, 1]));
        let resolve = |gref| Request::Resolve { domain: front, gref: GrantRef(gref) };
        assert_eq!(state.answer(back, resolve(9)).0, Reply::Done([8, 2, 1]));
        for (me, gref) in [(other, 8), (front, 8), (back, 7), (back, 10)] {
            assert!(matches!(state.answer(me, resolve(gref)).0, Reply::Refused(_)), "{me} {gref}");
        }
        assert!(matches!(state.answer(back, Request::End(GrantRef(8))).0, Reply::Refused(_)));
        assert!(matches!(state.answer(front, Request::End(GrantRef(8))).0, Reply::Done(_)));
        assert!(matches!(state.answer(back, resolve(8)).0, Reply::Refused(_)));
    }

    #[test]
    fn only_its_ends_close_a_port() {
        let mut state = State::default();
        let [front, back, other] = [1, 2, 3].map(|id| state.enter(Some(DomId(id))).unwrap());
        let Reply::Done([port, ..]) = state.answer(front, Request::Alloc { remote: back }).0 else {
            panic!()
        };
        let close = |binder| Request::Close { maker: front, port, binder };
        let bind = Request::Bind { maker: front, port };
        for (me, request) in
            [(other, bind), (front, bind), (back, close(true)), (back, close(false)), (other, close(false))]
        {
            assert!(matches!(state.answer(me, request).0, Reply::Refused(_)), "{me} {request:?}");
        }
        assert!(matches!(state.answer(back, bind).0, Reply::Done(_)));
        assert!(matches!(state.answer(other, close(true)).0, Reply::Refused(_)));
        assert_eq!(state.open_ports(), 2);
        state.leave(back); // unbinds
        assert_eq!(state.open_ports(), 1);
        assert!(matches!(state.answer(front, close(false)).0, Reply::Done(_)));
        assert_eq!(state.open_ports(), 0);
    }
}
