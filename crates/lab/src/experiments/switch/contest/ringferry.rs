//! `ringferry run`, with one worker, a table for all addresses, and the polling that was asked for; otherwise as it comes.

use std::ffi::OsString;
use std::path::Path;

use ringferry_sys::process::Spawn;

use super::{Contest, Order, tap_name};
use crate::experiment::RowError;
use crate::experiments::network::{ready, words};

pub(super) fn start(order: &Order, program: &Path) -> Result<Contest, RowError> {
    let config = order.folder.join("switch.toml");
    // Two addresses of each flow; a port may fill half of the table.
    let addresses = 4 * u64::from(order.case.flows) * order.case.ports as u64;
    let mut text = format!("[switch]\nmac_table_size = {}\n", addresses.clamp(16384, 1 << 20));
    text.extend(order.poll.map(|micros| format!("poll_microseconds = {micros}\n")));
    std::fs::write(&config, text)?;
    let mut arguments = words(&["run", "--workers", "1", "--control"]);
    arguments.push(order.folder.join("control.sock").into());
    for (port, tap) in order.taps().enumerate() {
        let mut place = OsString::from(if tap { "tap:" } else { "vhost-user:" });
        if tap {
            place.push(tap_name(port));
        } else {
            place.push(order.socket(port));
        }
        arguments.extend([OsString::from("--port"), place]);
    }
    arguments.push(config.into());
    let process = ready(program, &order.folder, "switch", arguments, Spawn::default())?;
    Ok(Contest { processes: vec![process], log: order.folder.join("switch.log"), places: order.places()? })
}
