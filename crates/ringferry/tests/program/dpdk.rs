//! Our driver half, used as a library, against a device that no one here wrote: DPDK's `net_vhost` in
//! testpmd, which forwards between two guests.

use std::path::{Path, PathBuf};
use std::process::Command;

use ringferry_packet::vnet::Header;
use ringferry_sys::process::Spawn;
use ringferry_sys::socket::Stream;
use ringferry_virtio_net::Features;

use crate::frames::frame;
use crate::guest::{Guest, Options, converse};
use crate::process::{Process, eventually, may};

/// Where Debian's package dpdk-dev puts it.
const TESTPMD: &str = "/usr/bin/dpdk-testpmd";

/// testpmd with two `net_vhost` devices and one worker that forwards between them.
struct Testpmd {
    _process: Process,
    sockets: [PathBuf; 2],
    _directory: tempfile::TempDir,
}

impl Testpmd {
    fn start() -> Option<Testpmd> {
        if !may("needs dpdk-testpmd: apt-get install dpdk-dev", Path::new(TESTPMD).exists()) {
            return None;
        }
        let directory = tempfile::tempdir().unwrap();
        let sockets = ["a", "b"].map(|name| directory.path().join(name));
        let mut command = Command::new(TESTPMD);
        // No huge pages, and threads that go where there is room: this is a test, not a race.
        let last = std::thread::available_parallelism().map_or(0, |cpus| cpus.get() - 1);
        let lcores = format!("0@(0-{last}),1@(0-{last})");
        command.args(["--lcores", &lcores, "--no-pci", "--no-huge", "-m", "192", "--no-telemetry"]);
        command.env("RUNTIME_DIRECTORY", directory.path());
        command.arg(format!("--file-prefix=ringferry-{}", std::process::id()));
        for (number, socket) in sockets.iter().enumerate() {
            command.args(["--vdev", &format!("net_vhost{number},iface={},tso=1", socket.display())]);
        }
        command.args([
            "--",
            "--nb-cores=1",
            "--total-num-mbufs=16384",
            "--no-flush-rx",
            "--stats-period",
            "1",
        ]);
        let process = Process::start(&mut command, Spawn::default());
        eventually("testpmd listens", || sockets.iter().all(|socket| socket.exists()).then_some(()));
        Some(Testpmd { _process: process, sockets, _directory: directory })
    }

    fn plug(&self, features: Features) -> [Guest; 2] {
        [0u8, 1].map(|number| {
            let socket = &self.sockets[usize::from(number)];
            let stream = eventually("testpmd accepts", || Stream::connect(socket).ok());
            Guest::plug(stream, number + 1, Options { features, ..Options::default() })
        })
    }
}

/// Frames both ways between two guests with `features`; each one is compared with what was sent.
fn forwards(testpmd: &Testpmd, features: Features) {
    let [mut one, mut other] = testpmd.plug(features);
    assert_eq!(one.features & RINGS, features & RINGS, "{features:?}");
    // Whether the device is awake is its own affair; frames sent before are lost without a word.
    let hello = frame(other.mac, one.mac, 60, 0);
    eventually("testpmd forwards", || {
        one.send(&hello);
        std::thread::sleep(std::time::Duration::from_millis(20));
        other.pump();
        other.take()
    });
    while other.take().is_some() {}
    // More than three times round the rings, in both directions.
    for first in [0, 1000, 2000, 3000] {
        converse(&mut one, &mut other, first, 200);
    }
    // A frame of every size class, unharmed, in both directions.
    for size in [60, 64, 65, 1514] {
        let there = frame(other.mac, one.mac, size, 7);
        one.put(&Header::default(), &there);
        one.flush();
        assert_eq!(other.receive_plain(), there, "{size} bytes, {features:?}");
        let back = frame(one.mac, other.mac, size, 8);
        other.put(&Header::default(), &back);
        other.flush();
        assert_eq!(one.receive_plain(), back, "{size} bytes, {features:?}");
    }
}

/// What is negotiated about the rings themselves. DPDK offers all of it.
const RINGS: Features =
    Features::RING_PACKED.union(Features::IN_ORDER).union(Features::EVENT_IDX).union(Features::INDIRECT_DESC);

/// Every kind of ring with every layout of receive buffers, one after another on the same device.
fn forwards_in_every_receive_mode(ring: Features) {
    let Some(testpmd) = Testpmd::start() else { return };
    let all = (Features::DEVICE - Features::RING_PACKED - Features::IN_ORDER) | ring;
    let big = all - Features::MRG_RXBUF;
    for receive in [all, big, big - Features::GUEST_SEGMENTATION] {
        forwards(&testpmd, receive);
    }
    for without in
        [Features::EVENT_IDX, Features::INDIRECT_DESC, Features::EVENT_IDX | Features::INDIRECT_DESC]
    {
        forwards(&testpmd, all - without);
    }
}

#[test]
fn our_driver_speaks_with_dpdk_net_vhost_over_split_rings() {
    forwards_in_every_receive_mode(Features::empty());
}

#[test]
fn our_driver_speaks_with_dpdk_net_vhost_over_split_rings_in_order() {
    forwards_in_every_receive_mode(Features::IN_ORDER);
}

#[test]
fn our_driver_speaks_with_dpdk_net_vhost_over_packed_rings() {
    forwards_in_every_receive_mode(Features::RING_PACKED);
}

#[test]
fn our_driver_speaks_with_dpdk_net_vhost_over_packed_rings_in_order() {
    forwards_in_every_receive_mode(Features::RING_PACKED | Features::IN_ORDER);
}
