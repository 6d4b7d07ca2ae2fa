//! Rings that are expensive to stop, and rings that break.
//!
//! Finding H4: a ring of the largest size, every entry of which is on offer, is disabled again and again. Frames that wait in
//! a ring that is disabled are to be discarded.

use ringferry_packet::vnet::Header;
use ringferry_rig::handmade::{Front, Shape};
use ringferry_vhost_user::FrontendError;

use super::floods::{frame, mac};
use super::{Place, Step};
use crate::experiment::RowError;

/// The largest ring that there is.
const ENTRIES: u16 = 32_768;
/// Descriptors of each chain of the ring, all of which are the same chain.
const CHAIN: u16 = 256;
const FRAME: usize = 1514;
/// Turns between two looks at the connection.
const LOOK: u32 = 64;

fn first(place: &Place) -> Result<&std::path::PathBuf, RowError> {
    place.sockets.first().ok_or_else(|| RowError::failed("the attacker has no port"))
}

/// SET_VRING_ENABLE(0) on a full transmitq, and 1, and again.
pub(super) fn disable(place: &Place) -> Result<Step, RowError> {
    let shape = Shape { transmit: ENTRIES, acknowledged: false, enabled: false, ..Shape::default() };
    let mut front = Front::new(first(place)?, shape)?;
    let len = front.write_frame(0, &Header::default(), &frame(mac(1), mac(0), FRAME))?;
    let (buffers, part) = (front.buffers, (len as u32).div_ceil(CHAIN.into()));
    front.rings[1].chain(CHAIN, buffers, part)?;
    front.start()?;
    let (mut used, mut turn) = (0, 0u32);
    Ok(Box::new(move || {
        front.rings[1].offer(&mut used)?;
        for enable in [true, false] {
            front.frontend().set_vring_enable(1, enable).map_err(RowError::failed)?;
        }
        turn = turn.wrapping_add(1);
        if turn.is_multiple_of(LOOK) {
            front.check()?;
        }
        Ok(2)
    }))
}

/// A transmitq that breaks as soon as it runs, because more is on offer than it has entries; it is then stopped and started
/// again. Each time there is something to write to a log.
pub(super) fn broken(place: &Place) -> Result<Step, RowError> {
    let mut front = Front::new(first(place)?, Shape { transmit: 256, ..Shape::default() })?;
    front.rings[1].set_available(0x7fff)?;
    Ok(Box::new(move || {
        front.start()?;
        front.rings[1].kick.signal()?;
        // Long enough for the switch to look at it, which then waits for a reset.
        std::thread::sleep(std::time::Duration::from_millis(1));
        match front.frontend().set_status(0) {
            Ok(()) | Err(FrontendError::NotNegotiated { .. }) => Ok(1),
            Err(error) => Err(RowError::failed(error)),
        }
    }))
}
