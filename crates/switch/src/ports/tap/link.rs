//! The interface of a tap: its addresses, MTU, state and bridge, as the configuration has them.
//!
//! [`begin`] does what belongs to the making of a device, before it is up. [`set_up`] does what can be repeated: when the port is opened, and
//! when its bridge has come back. Both need CAP_NET_ADMIN as far as the configuration asks for something.

use std::os::unix::fs::MetadataExt;

use ringferry_packet::ether::Mac;
use ringferry_sys::netif;
use ringferry_sys::process::user_id;
use ringferry_sys::tap::Tap;

use crate::config::{LinkConfig, PortConfig, PortKind, TapConfig};
use crate::ports::OpenError;

/// The file with the identity of this machine (machine-id(5)).
pub(crate) const MACHINE: &str = "/etc/machine-id";

/// Gives a tap its Ethernet address, and makes it outlive the switch, before it is up.
///
/// # Errors
/// No permission, or an address that the interface cannot have.
pub(super) fn begin(tap: &Tap, config: &TapConfig, made: bool) -> Result<(), OpenError> {
    let LinkConfig { persistent, mac, .. } = config.link;
    let derived = made.then(|| lasting_mac(tap.name()));
    // Asked first, as a user without privileges may attach to a tap that is set up already.
    if let Some(mac) = mac.or(derived).filter(|mac| netif::mac(tap.name()).ok() != Some(mac.0)) {
        netif::set_mac(tap.name(), mac.0)?;
    }
    if made && persistent {
        tap.make_persistent(user_id())?;
    }
    Ok(())
}

/// Undoes what `before` asked of the interface `name` of a port and `now` does not: the bridge and addresses. MTU, Ethernet address and state
/// stay as they are, as nobody says what else they should be.
///
/// # Errors
/// No permission.
pub(in crate::ports) fn undo(before: &PortConfig, now: &PortConfig, name: &str) -> Result<(), OpenError> {
    let (PortKind::Tap(asked), PortKind::Tap(asks)) = (&before.kind, &now.kind) else { return Ok(()) };
    if asked.link.bridge.is_some() && asks.link.bridge.is_none() {
        netif::leave_bridge(name)?;
    }
    for (address, bits) in
        asked.link.addresses.iter().filter(|address| !asks.link.addresses.contains(address))
    {
        netif::remove_address(name, *address, *bits)?;
    }
    Ok(())
}

/// Sets up the interface `name` of a port: MTU, Ethernet address, bridge, state, addresses. A bridge that does not exist is left out.
///
/// # Errors
/// No permission, or a setting that the interface cannot have.
pub(in crate::ports) fn set_up(port: &PortConfig, name: &str) -> Result<(), OpenError> {
    let PortKind::Tap(config) = &port.kind else { return Ok(()) };
    if let Some(mtu) = port.mtu {
        netif::set_mtu(name, mtu.into())?;
    }
    if let Some(mac) = config.link.mac.filter(|mac| netif::mac(name).ok() != Some(mac.0)) {
        netif::set_mac(name, mac.0)?;
    }
    if let Some(bridge) = bridge_name(port).filter(|_| bridge_of(port).is_some()) {
        netif::join_bridge(name, bridge)?;
    }
    if let Some(up) = config.link.up {
        netif::set_up(name, up)?;
    }
    for (address, bits) in &config.link.addresses {
        netif::add_address(name, *address, *bits)?;
    }
    Ok(())
}

/// Returns what of the settings of a port its interface `name` has not. Whether an interface is up is its state; its addresses and its bridge cannot
/// be asked for in the sandbox.
pub(in crate::ports) fn astray(port: &PortConfig, name: &str) -> Vec<String> {
    let PortKind::Tap(config) = &port.kind else { return Vec::new() };
    let mut all = Vec::new();
    if let (Some(bridge), Some(index)) = (bridge_name(port), bridge_of(port))
        && netif::master(name).is_ok_and(|has| has != Some(index))
    {
        all.push(format!("the bridge {bridge}"));
    }
    if let Some(has) =
        Some(&config.link.addresses).filter(|all| !all.is_empty()).and_then(|_| netif::addresses(name).ok())
    {
        let lost = config.link.addresses.iter().filter(|address| !has.contains(address));
        all.extend(lost.map(|(address, bits)| format!("the address {address}/{bits}")));
    }
    if let Some(mac) = config.link.mac.filter(|mac| netif::mac(name).is_ok_and(|has| has != mac.0)) {
        all.push(format!("the Ethernet address {mac}"));
    }
    if let Some(mtu) = port.mtu.filter(|mtu| netif::mtu(name).is_ok_and(|has| has != u32::from(*mtu))) {
        all.push(format!("the MTU {mtu}"));
    }
    all
}

/// Returns the name of the bridge that a tap is to be in, if it is to be in one.
pub(super) fn bridge_name(port: &PortConfig) -> Option<&str> {
    match &port.kind {
        PortKind::Tap(config) => config.link.bridge.as_deref(),
        _ => None,
    }
}

/// Returns the index of the bridge that a tap is to be in, if there is one now.
pub(super) fn bridge_of(port: &PortConfig) -> Option<u32> {
    bridge_name(port).and_then(|name| netif::index(name).ok().flatten())
}

/// Returns the Ethernet address that a tap of this name always has in this network namespace of this machine: guests go on sending to the
/// one that they have learned when the tap is made anew. A bridge without an address of its own takes the lowest one of its ports, and so the
/// host's address would change with the ports; this one begins with the highest byte that a local address can begin with.
fn lasting_mac(name: &str) -> Mac {
    let mut machine = std::fs::read_to_string(MACHINE).unwrap_or_default();
    // Taps of one name in two namespaces may meet on one network. The host's own namespace has the same number after each boot.
    if let Ok(namespace) = std::fs::metadata("/proc/self/ns/net") {
        machine = format!("{} {}", machine.trim(), namespace.ino());
    }
    // FNV-1a: the address only has to differ between names and machines, and must never change with a version of a library.
    let hash = machine
        .trim()
        .bytes()
        .chain([0])
        .chain(name.bytes())
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
    let [a, b, c, d, e, ..] = hash.to_be_bytes();
    Mac([0xfe, a, b, c, d, e])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lasting_address_is_the_same_for_a_name_and_another_for_another() {
        let [one, again, other] = ["rf0", "rf0", "rf1"].map(lasting_mac);
        assert_eq!(one, again);
        assert_ne!(one, other);
        assert!(!one.is_multicast() && one.0[0] & 2 != 0, "{one} is a local address of one station");
    }
}
