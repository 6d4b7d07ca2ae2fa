//! The kernel's bridge between taps of the lab's, as a virtual machine without vhost has them. It works in whoever writes.

use super::{Contest, Order, tap_name};
use crate::experiment::RowError;
use crate::experiments::switch::end::Place;
use crate::experiments::taps;

pub(super) fn start(order: &Order) -> Result<Contest, RowError> {
    taps::bridge("br0")?;
    let mut places = Vec::new();
    for port in 0..order.case.ports {
        let name = tap_name(port);
        let tap = taps::open(&name, order.offloads())?;
        taps::join(&name, "br0", true)?;
        places.push(Place::Tap(tap));
    }
    Ok(Contest { processes: Vec::new(), log: order.folder.join("none"), places })
}
