//! Open vSwitch with DPDK, and a table for all addresses. Its guests are ports of type `dpdkvhostuserclient`: it connects.

use ringferry_sys::socket::Listener;

use super::{Contest, Order, tap_name};
use crate::experiment::RowError;
use crate::experiments::ovs::{self, Bridge, Kind, Port};
use crate::experiments::switch::end::Place;
use crate::experiments::taps;

pub(super) fn start(order: &Order) -> Result<Contest, RowError> {
    let (mut ports, mut places) = (Vec::new(), Vec::new());
    for (port, tap) in order.taps().enumerate() {
        let kind = if tap {
            places.push(None);
            Kind::Tap
        } else {
            let path = order.socket(port);
            places.push(Some(Place::Listen(Listener::bind(&path).map_err(RowError::failed)?)));
            Kind::Connects(path)
        };
        ports.push(Port { name: tap_name(port), kind, vlan: None });
    }
    // As many addresses as there are, twice.
    let addresses = (2 * u64::from(order.case.flows) * order.case.ports as u64).clamp(2048, 1_000_000);
    let ovs = ovs::start(&Bridge {
        folder: &order.folder,
        cpu: order.cpus[1],
        huge_pages: order.huge_pages,
        tso: order.tso(),
        addresses: Some(addresses),
        ports,
        new_net: false,
    })?;
    let places = places.into_iter().enumerate().map(|(port, place)| match place {
        Some(place) => Ok(place),
        None => Ok(Place::Tap(taps::behind(&tap_name(port), order.offloads())?)),
    });
    let places = places.collect::<Result<_, RowError>>()?;
    Ok(Contest { processes: vec![ovs.switch, ovs.server], log: ovs.log, places })
}
