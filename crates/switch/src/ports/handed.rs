//! Ports on their way to another process: what every kind says of itself, and the descriptors that go along.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use ringferry_sys::eventfd::EventId;
use serde::{Deserialize, Serialize};

use super::tap::TapState;
use super::vhost::VhostState;
use super::xdp::XdpState;

/// The state of an entry of the configuration, by its kind.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum HandedPort {
    /// See [`VhostState`].
    VhostUser(Box<VhostState>),
    /// See [`TapState`].
    Tap(TapState),
    /// See [`XdpState`].
    Xdp(XdpState),
    /// Nothing of it is handed over: what front ends have granted to one process cannot be passed to another. The successor opens it when this
    /// process has ended, and finds the rings in the store.
    XenVif,
}

impl HandedPort {
    /// Takes the session of a front end out of it, whose connection is closed with its descriptors, and says whether there was one.
    pub(crate) fn forget_session(&mut self) -> bool {
        match self {
            HandedPort::VhostUser(state) => state.forget_session(),
            HandedPort::Tap(_) | HandedPort::Xdp(_) | HandedPort::XenVif => false,
        }
    }
}

/// Descriptors that a state refers to by number, with the marks of events.
#[derive(Debug, Default)]
pub(crate) struct Descriptors(Vec<Option<Descriptor>>);

type Descriptor = (OwnedFd, Option<EventId>);

impl Descriptors {
    /// Those that were received, in the order of their numbers.
    pub(crate) fn new(descriptors: impl IntoIterator<Item = Descriptor>) -> Self {
        Self(descriptors.into_iter().map(Some).collect())
    }

    /// Takes a copy along, and returns its number.
    ///
    /// # Errors
    /// No descriptor is left.
    pub(crate) fn put(&mut self, fd: BorrowedFd<'_>, id: Option<EventId>) -> io::Result<u32> {
        self.0.push(Some((fd.try_clone_to_owned()?, id)));
        Ok(self.0.len() as u32 - 1)
    }

    /// Returns the descriptor of a number, the first time that it is asked for.
    pub(crate) fn take(&mut self, number: u32) -> Option<OwnedFd> {
        self.take_marked(number).map(|(fd, _)| fd)
    }

    /// Returns the descriptor of a number likewise, with the mark of an event.
    pub(crate) fn take_marked(&mut self, number: u32) -> Option<Descriptor> {
        self.0.get_mut(number as usize)?.take()
    }

    /// Takes those that nobody has asked for.
    pub(crate) fn rest(&mut self) -> impl Iterator<Item = OwnedFd> {
        std::mem::take(&mut self.0).into_iter().flatten().map(|(fd, _)| fd)
    }

    /// Returns those that were not taken.
    pub(crate) fn into_inner(self) -> impl Iterator<Item = Descriptor> {
        self.0.into_iter().flatten()
    }
}
