//! testpmd with a port for each end, in pairs: `io` sends frames on as they are, `mac` writes both addresses. It begins as
//! soon as it runs.

use std::process::Stdio;

use ringferry_rig::testpmd::{CommandLine, Device};
use ringferry_sys::process::Spawn;

use super::{Contest, Order, tap_name};
use crate::experiment::RowError;
use crate::experiments::network::{Process, logged};
use crate::experiments::switch::case::Who;
use crate::frames::ways::NEXT_HOP;

/// The Debian packages of it and of the drivers it needs.
pub(in crate::experiments::switch) const PACKAGES: &str = "dpdk-dev librte-net-vhost23";
pub(in crate::experiments::switch) const TAP_PACKAGES: &str = "dpdk-dev librte-net-vhost23 librte-net-tap23";

/// Its memory: enough for eight ports.
pub(in crate::experiments::switch) const MEGABYTES: u64 = 256;

pub(super) fn start(order: &Order) -> Result<Contest, RowError> {
    let program = order.testpmd.as_deref().ok_or_else(|| RowError::failed("testpmd is not installed"))?;
    let arguments = command_line(order).words().map(Into::into).collect();
    let mut command = logged(program, &order.folder, "switch", arguments)?;
    // It ends when its input does.
    command.env("RUNTIME_DIRECTORY", &order.folder).stdin(Stdio::piped());
    let process = Process::spawn("testpmd", &mut command, Spawn::default())?;
    Ok(Contest { processes: vec![process], log: order.folder.join("switch.out"), places: order.places()? })
}

fn command_line(order: &Order) -> CommandLine {
    // What is to be cut stays so: flags of what was received are those of what is sent, and checksums stay blank.
    let tso = if order.tso() { ",tso=1,legacy-ol-flags=1" } else { "" };
    let mut line = CommandLine::new(order.cpus[1], MEGABYTES, order.huge_pages);
    for (port, tap) in order.taps().enumerate() {
        line = match tap {
            true => line.port(Device::Tap(&tap_name(port)), ""),
            false => line.port(Device::Vhost(&order.socket(port)), tso),
        };
    }
    line = match order.case.who {
        Who::TestpmdMac => {
            (0..order.case.ports).fold(line.mode("mac"), |line, port| line.peer(port, NEXT_HOP))
        }
        _ => line.mode("io"),
    };
    if order.tso() {
        // A frame in one buffer: the largest that there is, and few of them.
        line.option("--mbuf-size=65535").option("--total-num-mbufs=1600")
    } else {
        let buffers = 8192 + 2048 * order.taps().filter(|&tap| tap).count();
        line.option(format!("--total-num-mbufs={buffers}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiments::switch::case::{Case, Ends, Ring};
    use crate::frames::ways::Frames;

    fn order(case: Case) -> Order {
        Order {
            case,
            folder: "/run/lab".into(),
            cpus: [0, 1],
            ring: Ring::Split,
            queue: 256,
            poll: None,
            seconds: 1.0,
            trial: 1.0,
            loss: 0.001,
            precision: 0.01,
            huge_pages: false,
            testpmd: None,
        }
    }

    #[test]
    fn every_port_has_a_device_of_its_kind_and_mac_mode_its_next_hops() {
        let case =
            Case { ends: Ends::GuestTap, ports: 8, flows: 1, frames: Frames::Mtu, who: Who::TestpmdMac };
        let line = command_line(&order(case));
        let words: Vec<&str> = line.words().collect();
        let count = |start: &str| words.iter().filter(|word| word.starts_with(start)).count();
        assert_eq!([count("--vdev=net_vhost"), count("--vdev=net_tap"), count("--eth-peer=")], [4, 4, 8]);
        assert!(words.contains(&"--eth-peer=7,02:00:00:00:0b:01"));
        let case =
            Case { who: Who::TestpmdIo, frames: Frames::Tso, ends: Ends::GuestGuest, ports: 2, ..case };
        let line = command_line(&order(case));
        let words: Vec<&str> = line.words().collect();
        assert!(
            words.iter().any(|word| word.ends_with("/1.sock,queues=1,tso=1,legacy-ol-flags=1")),
            "{words:?}"
        );
        assert!(!words.iter().any(|word| word.starts_with("--eth-peer")));
    }
}
