//! DPDK's testpmd as a peer of our driver half: two `net_vhost` devices, and one worker that forwards between them.

use std::path::PathBuf;

use ringferry_sys::socket::Stream;
use ringferry_virtio_net::Features;

use super::{CommandLine, Device, MEGABYTES, Testpmd, find};
use crate::guest::{Guest, Options};
use crate::process::{eventually, may};

/// testpmd with two `net_vhost` devices and one worker that forwards between them. Where a test fails, it tells what testpmd said last.
pub struct Bed {
    testpmd: Testpmd,
    sockets: [PathBuf; 2],
    _directory: tempfile::TempDir,
}

impl Bed {
    /// Starts it; none where it is not installed and a test may be skipped.
    pub fn start() -> Option<Bed> {
        let program = find();
        if !may("needs dpdk-testpmd: apt-get install dpdk-dev", program.is_some()) {
            return None;
        }
        let directory = tempfile::tempdir().unwrap();
        let sockets = ["a", "b"].map(|name| directory.path().join(name));
        let line = sockets
            .iter()
            .fold(CommandLine::anywhere(MEGABYTES), |line, socket| line.port(Device::Vhost(socket), ",tso=1"))
            .option("--total-num-mbufs=16384");
        let testpmd = Testpmd::start(&program?, &line, directory.path(), || false).unwrap();
        let mut bed = Bed { testpmd, sockets, _directory: directory };
        eventually("testpmd listens", || {
            bed.testpmd.check().unwrap();
            bed.sockets.iter().all(|socket| socket.exists()).then_some(())
        });
        Some(bed)
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

impl Drop for Bed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.testpmd.explain("was the peer of the test that failed"));
        }
    }
}
