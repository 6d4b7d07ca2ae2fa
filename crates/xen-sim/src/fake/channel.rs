//! Event channels of the fake, made of two eventfds each. A port exists from its allocation until
//! its maker's end is dropped.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use ringferry_sys::eventfd::EventFd;
use ringferry_xen::domain::{DomId, EventPort};
use ringferry_xen::event::EventChannel;

use super::{Fake, fault::Op};

/// An allocated port: the end of its maker, and possibly another that is bound to it.
#[derive(Debug)]
pub(super) struct Port {
    /// Domain that may bind to the port.
    remote: DomId,
    bound: bool,
    /// Event that wakes the maker.
    to_maker: EventFd,
    /// Event that wakes the domain that bound.
    to_binder: EventFd,
}

impl Port {
    /// Returns the number of open ends.
    pub(super) fn ends(&self) -> usize {
        1 + usize::from(self.bound)
    }
}

/// One end of a port, closed when it is dropped.
#[derive(Debug)]
pub(super) struct FakeChannel {
    fake: Fake,
    /// Domain that owns this end.
    me: DomId,
    /// Domain that allocated the port.
    maker: DomId,
    port: EventPort,
    /// True if this is the end of the domain that bound.
    binder: bool,
    mine: EventFd,
    theirs: EventFd,
}

impl Fake {
    /// Allocates a port of `maker` to which `remote` may bind.
    pub(super) fn alloc(&self, maker: DomId, remote: DomId) -> io::Result<(EventPort, FakeChannel)> {
        let (mine, theirs) = (EventFd::new()?, EventFd::new()?);
        let entry =
            Port { remote, bound: false, to_maker: mine.try_clone()?, to_binder: theirs.try_clone()? };
        let mut state = self.lock();
        state.faults.check(maker, Op::Channel)?;
        state.last_port += 1;
        let port = EventPort(state.last_port);
        state.tables(maker)?.ports.insert(port.0, entry);
        drop(state);
        let fake = self.clone();
        Ok((port, FakeChannel { fake, me: maker, maker, port, binder: false, mine, theirs }))
    }

    /// Binds `me` to a port that `maker` allocated for it.
    pub(super) fn bind(&self, me: DomId, maker: DomId, port: EventPort) -> io::Result<FakeChannel> {
        let mut state = self.lock();
        state.faults.check(me, Op::Channel)?;
        state.tables(maker)?;
        let entry = state.port(maker, port).filter(|entry| entry.remote == me && !entry.bound);
        let Some(entry) = entry else {
            let text = format!("port {} of domain {maker} is not one that domain {me} may bind to", port.0);
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        };
        let (mine, theirs) = (entry.to_binder.try_clone()?, entry.to_maker.try_clone()?);
        entry.bound = true;
        drop(state);
        // Xen does so too: the maker may have sent an event before anyone was bound.
        mine.signal()?;
        Ok(FakeChannel { fake: self.clone(), me, maker, port, binder: true, mine, theirs })
    }

    /// Signals all channels of a domain.
    pub(super) fn raise_all(&self, domain: DomId) {
        let state = self.lock();
        for (maker, tables) in &state.domains {
            for port in tables.ports.values() {
                // Signalling our own eventfd cannot fail.
                if *maker == domain {
                    let _ = port.to_maker.signal();
                }
                if port.bound && port.remote == domain {
                    let _ = port.to_binder.signal();
                }
            }
        }
    }
}

impl AsFd for FakeChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.mine.as_fd()
    }
}

impl EventChannel for FakeChannel {
    fn notify(&self) -> io::Result<()> {
        self.theirs.signal()
    }

    fn drain(&self) -> io::Result<bool> {
        let pending = self.mine.drain()?;
        if pending && self.fake.lock().storms(self.me) {
            self.mine.signal()?;
        }
        Ok(pending)
    }
}

impl Drop for FakeChannel {
    fn drop(&mut self) {
        let mut state = self.fake.lock();
        if self.binder {
            if let Some(port) = state.port(self.maker, self.port) {
                port.bound = false;
            }
        } else if let Ok(tables) = state.tables(self.maker) {
            tables.ports.remove(&self.port.0);
        }
    }
}
