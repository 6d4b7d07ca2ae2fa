//! Events that do not behave: an eventfd is shared with whoever made it, who can change it at any time.

use std::os::fd::{AsFd, OwnedFd};

use ringferry_packet::vnet::Header;
use ringferry_rig::handmade::{Front, Shape};
use ringferry_virtio_net::Features;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

use super::floods::{frame, mac};
use super::{Place, Step};
use crate::experiment::RowError;

/// The most that the counter of an eventfd can be at: whoever adds to it waits, or is told to try again.
const FULL: u64 = u64::MAX - 1;

fn start(place: &Place) -> Result<Front, RowError> {
    let socket = place.sockets.first().ok_or_else(|| RowError::failed("the attacker has no port"))?;
    let shape = Shape { features: Features::empty(), ..Shape::default() };
    let mut front = Front::new(socket, shape)?;
    let len = front.write_frame(0, &Header::default(), &frame(mac(1), mac(0), 64))?;
    front.send_from(0, len)?;
    front.start()?;
    Ok(front)
}

/// Finding H1: an eventfd whose counter is full and that blocks, as the call of a ring that is at work.
pub(super) fn call(place: &Place) -> Result<Step, RowError> {
    let mut front = start(place)?;
    let mut used = 0;
    Ok(Box::new(move || {
        let call: OwnedFd = eventfd(0, EventfdFlags::CLOEXEC).map_err(std::io::Error::from)?;
        rustix::io::write(&call, &FULL.to_ne_bytes()).map_err(std::io::Error::from)?;
        front.frontend().set_vring_call(1, Some(call.as_fd())).map_err(RowError::failed)?;
        // The switch has just set the flag of the open file that both share.
        let flags = fcntl_getfl(&call).map_err(std::io::Error::from)?;
        fcntl_setfl(&call, flags - OFlags::NONBLOCK).map_err(std::io::Error::from)?;
        let kick = front.rings[1].kick.try_clone()?;
        front.frontend().set_vring_kick(1, Some(kick.as_fd())).map_err(RowError::failed)?;
        front.rings[1].offer(&mut used)?;
        front.rings[1].kick.signal()?;
        front.check()?;
        Ok(1)
    }))
}

/// Finding M6: a semaphore with a full counter as kick, from which can be read 2^64 times.
pub(super) fn kick(place: &Place) -> Result<Step, RowError> {
    let mut front = start(place)?;
    let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK | EventfdFlags::SEMAPHORE;
    let kick = eventfd(0, flags).map_err(std::io::Error::from)?;
    rustix::io::write(&kick, &FULL.to_ne_bytes()).map_err(std::io::Error::from)?;
    let mut sent = false;
    Ok(Box::new(move || {
        if !sent {
            sent = true;
            front.frontend().set_vring_kick(1, Some(kick.as_fd())).map_err(RowError::failed)?;
            return Ok(1);
        }
        // It has done all that there is to do.
        std::thread::sleep(std::time::Duration::from_millis(5));
        front.check()?;
        Ok(0)
    }))
}
