//! testpmd as a peer: `net_vhost` is its device, `net_virtio_user` its driver.

use std::path::Path;

use ringferry_rig::testpmd::{CommandLine, Device, MEGABYTES, Testpmd, VirtioUser};

use super::case::{Case, Direction, LARGE_BUFFER, Ring};
use crate::experiment::RowError;
use crate::stop::Stop;

/// The Debian packages of it and of the two drivers it needs.
pub(in crate::experiments) const PACKAGES: &str = "dpdk-dev librte-net-vhost23 librte-net-virtio23";

/// Bytes in front of the data in each of DPDK's buffers.
const HEADROOM: usize = 128;
/// The largest buffer DPDK can have.
const LARGEST_BUFFER: usize = 65_535;

/// The half of virtio-net that testpmd plays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::experiments) enum Part {
    Driver,
    Device,
}

/// Where and with what it runs.
pub(in crate::experiments) struct Place<'a> {
    pub program: &'a Path,
    /// The processor of its worker, and of its main thread, which sleeps.
    pub cpu: usize,
    /// The vhost-user socket: the device listens at it.
    pub socket: &'a Path,
    /// A folder of the run's own, for its lock files.
    pub folder: &'a Path,
    pub huge_pages: bool,
}

/// Starts it; it is not ready yet.
pub(in crate::experiments) fn start(
    part: Part,
    case: &Case,
    place: &Place<'_>,
    stop: &Stop,
) -> Result<Testpmd, RowError> {
    let stop = stop.clone();
    let line = command_line(part, case, place);
    Ok(Testpmd::start(place.program, &line, place.folder, move || stop.requested())?)
}

/// Bursts that it puts into a loop: where both play a part, the driver is the one that does.
pub(in crate::experiments) fn first(part: Part, case: &Case) -> u32 {
    let origin = part == Part::Driver && case.device == case.driver;
    if case.direction == Direction::Loopback && origin { 8 } else { 0 }
}

fn command_line(part: Part, case: &Case, place: &Place<'_>) -> CommandLine {
    let mut line = CommandLine::new(place.cpu, MEGABYTES, place.huge_pages);
    let vectorized = case.ring == Ring::PackedVectorized;
    line = match part {
        Part::Device => line.port(Device::Vhost(place.socket), ""),
        Part::Driver => {
            if vectorized {
                line = line.environment("--force-max-simd-bitwidth=512");
            }
            let user = VirtioUser {
                queue: case.queue,
                packed: case.ring.packed(),
                in_order: case.ring.in_order(),
                mergeable: case.mergeable,
            };
            line.port(
                Device::VirtioUser(place.socket, user),
                &format!(",vectorized={}", u8::from(vectorized)),
            )
        }
    };
    let mode = match (part, case.direction) {
        (_, Direction::Loopback) => "io",
        (Part::Driver, Direction::Transmit) | (Part::Device, Direction::Receive) => "txonly",
        (Part::Driver, Direction::Receive) | (Part::Device, Direction::Transmit) => "rxonly",
    };
    let buffer = buffer(case);
    line = line
        .mode(mode)
        .option("-i")
        .option(format!("--mbuf-size={buffer}"))
        .option(format!("--total-num-mbufs={}", buffers(case)))
        .option(format!("--txpkts={}", segments(case.size, buffer - HEADROOM)));
    // A frame in several buffers, on the sending side.
    if case.size > buffer - HEADROOM { line.option("--tx-offloads=0x8000") } else { line }
}

/// Bytes of one of its buffers, headroom included: what it has by default while a frame fits into it;
/// then that of ringferry's mergeable buffers, or room for a whole frame.
fn buffer(case: &Case) -> usize {
    const DEFAULT: usize = 2048 + HEADROOM;
    if case.size <= DEFAULT - HEADROOM {
        DEFAULT
    } else if case.mergeable {
        LARGE_BUFFER + HEADROOM
    } else {
        LARGEST_BUFFER
    }
}

/// How many buffers: two rings full, and what a core keeps in reserve. testpmd takes no number up to 1024.
fn buffers(case: &Case) -> usize {
    let whole = case.size > LARGE_BUFFER && !case.mergeable;
    2 * usize::from(case.queue) + if whole { 1024 } else { 4096 }
}

/// A frame cut into buffers, as `--txpkts` wants it.
fn segments(size: usize, room: usize) -> String {
    let mut lengths = vec![room.to_string(); size / room];
    if !size.is_multiple_of(room) {
        lengths.push((size % room).to_string());
    }
    lengths.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_add_up_and_fit() {
        for (size, room) in [(64, 2048), (2048, 2048), (65_000, 4096), (65_000, 65_407)] {
            let lengths: Vec<usize> =
                segments(size, room).split(',').map(|length| length.parse().unwrap()).collect();
            assert_eq!(lengths.iter().sum::<usize>(), size);
            assert!(lengths.iter().all(|&length| (1..=room).contains(&length)));
        }
    }
}
