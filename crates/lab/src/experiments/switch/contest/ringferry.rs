//! `ringferry run`, with one worker, a table for all addresses, and the polling that was asked for; otherwise as it comes.

use std::ffi::OsString;
use std::net::Ipv4Addr;
use std::path::Path;

use ringferry_sys::process::Spawn;

use super::{Contest, Order, tap_name};
use crate::experiment::RowError;
use crate::experiments::network::{ready, words};
use crate::experiments::switch::case::Who;

pub(super) fn start(order: &Order, program: &Path) -> Result<Contest, RowError> {
    let config = order.folder.join("switch.toml");
    // Two addresses of each flow; a port may fill half of the table.
    let addresses = 4 * u64::from(order.case.flows) * order.case.ports as u64;
    let mut text = format!("[switch]\nmac_table_size = {}\n", addresses.clamp(16384, 1 << 20));
    text.extend(order.poll.map(|micros| format!("poll_microseconds = {micros}\n")));
    std::fs::write(&config, text)?;
    let mut arguments = words(&["run", "--workers", "1", "--control"]);
    arguments.push(order.folder.join("control.sock").into());
    let has_firewall = order.case.who == Who::Firewall;
    if has_firewall {
        write_policy(order)?;
    }
    for (port, tap) in order.taps().enumerate() {
        let mut place = OsString::from(if tap { "tap:" } else { "vhost-user:" });
        if tap {
            place.push(tap_name(port));
        } else {
            place.push(order.socket(port));
        }
        if has_firewall {
            place.push(format!(",firewall={POLICY}"));
        }
        arguments.extend([OsString::from("--port"), place]);
    }
    arguments.push(config.into());
    let process = ready(program, &order.folder, "switch", arguments, Spawn::default())?;
    Ok(Contest { processes: vec![process], log: order.folder.join("switch.log"), places: order.places()? })
}

/// The policy of each port.
const POLICY: &str = "lab";

/// Networks that it denies.
const NETWORKS: u32 = 10_000;

/// Writes the policy beside the configuration. It has room for all flows, and no frame is of a network that it denies.
fn write_policy(order: &Order) -> std::io::Result<()> {
    let folder = order.folder.join("policies");
    std::fs::create_dir(&folder)?;
    // Of 100.64.0.0/10.
    let networks = (0..NETWORKS).map(|number| Ipv4Addr::from_bits(0x6440_0000 | number << 8));
    let networks: String = networks.map(|network| format!("{network}/24\n")).collect();
    std::fs::write(folder.join("denied"), networks)?;
    let flows = (2 * order.case.flows).clamp(1 << 15, 1 << 22);
    let text = format!(
        "flows {flows}\nset denied file denied\ndeny out to @denied\ndeny in from @denied\nallow both\n"
    );
    std::fs::write(folder.join(POLICY).with_extension("policy"), text)
}
