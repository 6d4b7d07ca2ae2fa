//! A guest with a kernel of its own, which is a network namespace behind `ringferry guest`, and the traffic that it has with the host's.

use std::process::Stdio;

use ringferry_rig::process::Process;
use ringferry_rig::switch::{Place, ringferry};
use ringferry_sys::namespace;
use ringferry_sys::process::Spawn;

/// `ringferry guest` at port `a`, whose kernel has this address.
pub(crate) fn guest(place: &Place, address: &str) -> Process {
    let mut command = ringferry();
    command.args(["guest", "--tap", "eth0", "--address", &format!("{address}/24"), "--socket"]);
    command.arg(place.socket("a"));
    let guest = Process::start(&mut command, Spawn { new_net: true, ..Spawn::default() });
    guest.until_logged("the link is up");
    guest
}

/// `ringferry traffic server` at an address of the host.
pub(crate) fn server(address: &str) -> Process {
    let mut server = ringferry();
    server.args(["traffic", "server", "--bind", address]);
    Process::start(&mut server, Spawn::default())
}

/// `ringferry traffic client` in the guest, with these options.
pub(crate) fn client(guest: &Process, to: &str, options: &str) -> Process {
    let net = namespace::open_net(guest.pid()).unwrap();
    let mut command = ringferry();
    command.args(["traffic", "client", "--to", to, "--json"]);
    command.args(options.split(' ')).stdout(Stdio::piped());
    Process::start(&mut command, Spawn { join_net: Some(net), ..Spawn::default() })
}
