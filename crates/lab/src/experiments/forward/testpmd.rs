//! DPDK's testpmd as the forwarder: two `virtio_user` ports, `--forward-mode=mac`. It begins as soon as it runs; what it
//! forwards is counted by who receives it.

use std::path::Path;

use ringferry_rig::testpmd::{CommandLine, Device, MEGABYTES, VirtioUser, address};

use super::case::{Case, QUEUE, Ring};
use crate::frames::flows::{NEXT_HOP, OUTPUT};

/// The Debian packages of it and of the driver it needs.
pub(super) const PACKAGES: &str = "dpdk-dev librte-net-virtio23";

/// From the first socket to the second, on one processor.
pub(super) fn command_line(case: &Case, cpu: usize, sockets: [&Path; 2], huge_pages: bool) -> CommandLine {
    let packed = case.ring == Ring::PackedInOrder;
    let user = VirtioUser { queue: QUEUE, packed, in_order: packed, mergeable: true };
    let mut line = CommandLine::new(cpu, MEGABYTES, huge_pages);
    for (at, socket) in sockets.into_iter().enumerate() {
        let mut own = OUTPUT;
        own[5] = own[5].wrapping_sub(1 - at as u8);
        line = line.port(Device::VirtioUser(socket, user), &format!(",mac={}", address(own)));
    }
    // Four rings full, and what a core keeps in reserve.
    line.mode("mac").peer(1, NEXT_HOP).option("--total-num-mbufs=8192")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn testpmd_is_told_the_addresses_that_are_checked() {
        for case in Case::all() {
            let line = command_line(&case, 1, [Path::new("/a.sock"), Path::new("/b.sock")], false);
            assert!(line.words().any(|word| word == "--eth-peer=1,02:00:00:00:0b:01"));
            let output = line.words().find(|word| word.contains("path=/b.sock")).unwrap();
            assert!(output.ends_with("mac=02:00:00:00:0b:00"), "{output}");
            assert_eq!(output.contains("packed_vq=1"), case.ring == Ring::PackedInOrder);
        }
    }
}
