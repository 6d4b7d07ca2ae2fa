//! DPDK's testpmd as a peer of our driver half: two `net_vhost` devices, and one worker that forwards between them.

use std::path::{Path, PathBuf};
use std::process::Command;

use ringferry_sys::process::Spawn;
use ringferry_sys::socket::Stream;
use ringferry_virtio_net::Features;

use crate::guest::{Guest, Options};
use crate::process::{Process, eventually, may};

/// Where Debian's package dpdk-dev puts it.
const TESTPMD: &str = "/usr/bin/dpdk-testpmd";

/// testpmd with two `net_vhost` devices and one worker that forwards between them.
pub struct Testpmd {
    _process: Process,
    sockets: [PathBuf; 2],
    _directory: tempfile::TempDir,
}

impl Testpmd {
    /// Starts it; none where it is not installed and a test may be skipped.
    pub fn start() -> Option<Testpmd> {
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

    /// Plugs in a guest with `features` at either device.
    pub fn plug(&self, features: Features) -> [Guest; 2] {
        [0u8, 1].map(|number| {
            let socket = &self.sockets[usize::from(number)];
            let stream = eventually("testpmd accepts", || Stream::connect(socket).ok());
            Guest::plug(stream, number + 1, Options { features, ..Options::default() })
        })
    }
}
