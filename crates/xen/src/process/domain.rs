//! [`ProcessDomain`]: a process that acts as a domain of a broker, with its handles for grants and
//! event channels. [`ProcessDomain::connect`] makes it one; it is a domain until all clones and all
//! handles are dropped.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ringferry_memory::window::is_steady;
use ringferry_sys::eventfd::EventFd;

use crate::domain::{DomId, Domain, EventPort, PAGE};
use crate::event::EventChannel;
use crate::grant::{Access, Foreign, GrantError, GrantRef, GrantTable, Granted};
use crate::segment::{Files, Lookup, Segment, SegmentForeign, SegmentGranted, Use};

use super::connection::Connection;
use super::wire::{Request, access};

/// Most segments of one peer that are kept. Others are resolved again, so that a peer cannot make
/// us hold as many descriptors as it likes; rings and buffers of one interface are a few.
const MAX_KEPT: usize = 64;

/// The reason why a process cannot become a domain.
#[derive(Debug, thiserror::Error)]
#[error(
    "cannot be a domain of the broker at {path:?} ({source}): start the broker first, and give each domain its own number"
)]
pub struct ConnectError {
    /// Path of the broker's socket.
    pub path: PathBuf,
    /// Error of the connection or of the broker.
    pub source: io::Error,
}

/// This process (or a part of it) as a domain of a broker.
#[derive(Clone, Debug)]
pub struct ProcessDomain {
    id: DomId,
    connection: Arc<Connection>,
}

impl ProcessDomain {
    /// Makes this process a domain of the broker at `path`, with the number `wanted` or else the
    /// lowest free one from 1.
    ///
    /// # Errors
    /// Any [`ConnectError`].
    pub fn connect(path: impl AsRef<Path>, wanted: Option<DomId>) -> Result<ProcessDomain, ConnectError> {
        let path = path.as_ref();
        let connect = || {
            let connection = Connection::open(path)?;
            let ([id, ..], _) = connection.request(Request::Hello(wanted))?;
            let id = u16::try_from(id).map_err(|_| io::ErrorKind::InvalidData)?;
            Ok(ProcessDomain { id: DomId(id), connection: Arc::new(connection) })
        };
        connect().map_err(|source| ConnectError { path: path.to_owned(), source })
    }
}

impl Domain for ProcessDomain {
    fn id(&self) -> DomId {
        self.id
    }

    fn grants(&self) -> io::Result<Box<dyn GrantTable>> {
        Ok(Box::new(self.clone()))
    }

    fn foreign(&self, domain: DomId) -> io::Result<Box<dyn Foreign>> {
        self.connection.request(Request::Find(domain))?;
        let connection = Arc::clone(&self.connection);
        let peer = Peer { me: self.id, domain, connection, known: BTreeMap::new(), gone: false };
        Ok(Box::new(SegmentForeign::new(domain, peer)))
    }

    fn alloc_unbound(&self, remote: DomId) -> io::Result<(EventPort, Box<dyn EventChannel>)> {
        let ([port, ..], fds) = self.connection.request_with_two_fds(Request::Alloc { remote })?;
        let close = Request::Close { maker: self.id, port, binder: false };
        Ok((EventPort(port), Box::new(Channel::new(fds, &self.connection, close)?)))
    }

    fn bind_interdomain(&self, remote: DomId, port: EventPort) -> io::Result<Box<dyn EventChannel>> {
        let (_, fds) = self.connection.request_with_two_fds(Request::Bind { maker: remote, port: port.0 })?;
        let close = Request::Close { maker: remote, port: port.0, binder: true };
        Ok(Box::new(Channel::new(fds, &self.connection, close)?))
    }
}

impl GrantTable for ProcessDomain {
    fn grant(&mut self, to: DomId, count: usize, access: Access) -> Result<Box<dyn Granted>, GrantError> {
        let asked =
            u32::try_from(count).map_err(|_| GrantError::Exhausted(io::ErrorKind::OutOfMemory.into()))?;
        let request = Request::Grant { to, count: asked, access };
        let ([first, ..], [data, words]) =
            self.connection.request_with_two_fds(request).map_err(GrantError::Exhausted)?;
        let connection = Arc::clone(&self.connection);
        let tell = move |first: GrantRef| {
            // An error means that the broker is gone, and the grants with it.
            let _ = connection.request(Request::End(first));
        };
        let first = GrantRef(first);
        match Segment::new(first, count, to, access, Files { data, words }) {
            Ok(segment) => Ok(Box::new(SegmentGranted::new(segment, tell)?)),
            Err(error) => {
                tell(first);
                Err(GrantError::Exhausted(error))
            }
        }
    }
}

/// The references of another domain that were resolved.
#[derive(Debug)]
struct Peer {
    me: DomId,
    domain: DomId,
    connection: Arc<Connection>,
    /// Segments by their first reference; none overlaps another.
    known: BTreeMap<u32, Arc<Segment>>,
    gone: bool,
}

impl Peer {
    /// Finds the kept segment that holds a reference; returns its first reference and the page.
    fn known(&self, gref: GrantRef) -> Option<(u32, usize)> {
        let (first, segment) = self.known.range(..=gref.0).next_back()?;
        let page = (gref.0 - first) as usize;
        (page < segment.count() && !segment.has_ended(page)).then_some((*first, page))
    }

    /// Resolves a reference through the broker, and keeps its segment.
    fn resolve(&mut self, gref: GrantRef) -> io::Result<()> {
        let request = Request::Resolve { domain: self.domain, gref };
        let ([first, count, access_word], [data, words]) = self.connection.request_with_two_fds(request)?;
        let access = access(access_word).ok_or(io::ErrorKind::InvalidData)?;
        // The broker created the files; a few calls verify that their sizes are fixed.
        let count = count as usize;
        let steady = is_steady(data.as_fd(), (count * PAGE) as u64)?
            && is_steady(words.as_fd(), (count * size_of::<u32>()) as u64)?;
        if !steady {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let segment = Segment::new(GrantRef(first), count, self.me, access, Files { data, words })?;
        // Kept segments with the same references have ended.
        let end = first.saturating_add(count as u32);
        self.known.retain(|at, old| *at >= end || at.saturating_add(old.count() as u32) <= first);
        if self.known.len() >= MAX_KEPT {
            self.known.pop_first();
        }
        self.known.insert(first, segment);
        Ok(())
    }
}

impl Lookup for Peer {
    fn find(&mut self, gref: GrantRef, _: Use) -> Option<(&Arc<Segment>, usize)> {
        let known = match self.known(gref) {
            Some(known) => Some(known),
            None => {
                let resolved = self.resolve(gref);
                // ESRCH means that the domain is gone; without a broker all domains are.
                let gone = |error: &io::Error| {
                    error.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error())
                        || error.kind() == io::ErrorKind::NotConnected
                };
                self.gone |= resolved.as_ref().is_err_and(gone);
                resolved.is_ok().then(|| self.known(gref)).flatten()
            }
        };
        let (first, page) = known?;
        Some((self.known.get(&first)?, page))
    }

    fn alive(&mut self) -> io::Result<()> {
        if self.gone {
            return Err(io::Error::new(io::ErrorKind::NotFound, format!("domain {} is gone", self.domain)));
        }
        Ok(())
    }
}

/// One end of an event channel, made of two eventfds.
#[derive(Debug)]
struct Channel {
    mine: EventFd,
    theirs: EventFd,
    connection: Arc<Connection>,
    /// The request that closes this end.
    close: Request,
}

impl Channel {
    fn new(
        [mine, theirs]: [std::os::fd::OwnedFd; 2],
        connection: &Arc<Connection>,
        close: Request,
    ) -> io::Result<Channel> {
        let bells = || Ok((EventFd::from_fd(mine)?, EventFd::from_fd(theirs)?));
        match bells() {
            Ok((mine, theirs)) => Ok(Channel { mine, theirs, connection: Arc::clone(connection), close }),
            Err(error) => {
                let _ = connection.request(close);
                Err(error)
            }
        }
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.mine.as_fd()
    }
}

impl EventChannel for Channel {
    fn notify(&self) -> io::Result<()> {
        self.theirs.signal()
    }

    fn drain(&self) -> io::Result<bool> {
        self.mine.drain()
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        let _ = self.connection.request(self.close); // without a broker there is nobody to tell
    }
}
