//! Event channels of the hypervisor. Each has a descriptor of its own, so that it can be polled and
//! closed alone, and a flooded channel takes nothing from the others' queue.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use ringferry_sys::xen::EventDevice;

use crate::event::EventChannel;

/// One end of an event channel, closed when it is dropped.
#[derive(Debug)]
pub struct RealChannel(pub(super) EventDevice);

impl EventChannel for RealChannel {
    fn notify(&self) -> io::Result<()> {
        self.0.notify()
    }

    fn drain(&self) -> io::Result<bool> {
        self.0.drain()
    }
}

impl AsFd for RealChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
