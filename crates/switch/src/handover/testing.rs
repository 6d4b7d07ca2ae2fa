//! Reading the state of another process, for fuzz targets: it comes from one of the same user, and is checked as a peer's words are all the same.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};

use ringferry_sys::eventfd::EventId;

use super::bulk::{Ports, Reader};
use super::state::{Draft, EntryState, Final, Hello, InForce};
use crate::config::{Config, PortConfig};
use crate::fdb::PortId;
use crate::ports::handed::{Descriptors, HandedPort};
use crate::ports::{Before, adopt};
use crate::privileged::Privileges;

/// Reads a message as each of those that there are, with its bulk data and copies of `fds` as its descriptors, as far as a successor does before it has ports. Returns
/// how many messages, entries and records it can be.
///
/// # Panics
/// If what was read would be read differently once it is written again.
pub fn read(text: &[u8], bulk: &[u8], fds: &[OwnedFd]) -> usize {
    let mut read = 0;
    if let Ok(hello) = serde_json::from_slice::<Hello>(text) {
        let written = serde_json::to_vec(&hello).expect("what was read can be written");
        assert_eq!(serde_json::from_slice::<Hello>(&written).expect("and read"), hello);
        if let Ok(config) = hello.in_force.read() {
            let again = InForce::of(&config, hello.in_force.workers).read();
            assert_eq!(again.expect("a configuration is one").dump(), config.dump());
        }
        read += 1;
    }
    let reader = Reader(bulk);
    if let Ok(draft) = serde_json::from_slice::<Draft>(text) {
        let ports = numbers(draft.numbers.values().copied());
        read += 1 + reader.addresses(draft.addresses, &ports).len() + entries(draft.entries, fds);
    }
    if let Ok(last) = serde_json::from_slice::<Final>(text) {
        let ports = numbers(last.ports.values().map(|port| port.number));
        read += 1 + reader.addresses(last.addresses, &ports).len() + entries(last.entries, fds);
        read += last.ports.values().map(|port| reader.flows(port.flows).count()).sum::<usize>();
        read += last.workers.iter().map(|worker| reader.waiting(worker.waiting, &ports).len()).sum::<usize>();
    }
    read
}

/// Numbers that ports have in the other process, each with one here.
fn numbers(theirs: impl Iterator<Item = u16>) -> Ports {
    theirs.zip((0..).map(PortId)).collect::<BTreeMap<_, _>>()
}

/// Makes ports of entries, which are never plugged in; returns of how many that can be done.
fn entries(entries: Vec<EntryState>, fds: &[OwnedFd]) -> usize {
    let mut message = fds.iter().filter_map(|fd| fd.as_fd().try_clone_to_owned().ok());
    let mut made = 0;
    for mut entry in entries {
        let descriptors = entry.descriptors(&mut message);
        let Some(state) = entry.state.take() else { continue };
        let port = match &state {
            HandedPort::VhostUser(_) => port("vhost-user:/nowhere/a.sock"),
            HandedPort::Tap(_) => port("tap:rf0"),
            HandedPort::Xdp(_) => port("xdp:eth0"),
            HandedPort::XenVif => port("xen-vif:xen"),
        };
        made += usize::from(adopt(&port, state, descriptors, &Privileges::default(), Before::GoesOn).is_ok());
    }
    // Of those that nobody took.
    drop(Descriptors::new(message.map(|fd| (fd, None::<EventId>))));
    made
}

fn port(flag: &str) -> PortConfig {
    Config::builder().port_flag(flag).build().expect("a port").ports.remove(0)
}
