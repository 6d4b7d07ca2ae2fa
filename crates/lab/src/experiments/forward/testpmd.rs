//! DPDK's testpmd as the forwarder: two `virtio_user` ports, `--forward-mode=mac`. It begins as soon as it runs; what it
//! forwards is counted by who receives it.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use ringferry_sys::process::{Spawn, cpu_time, spawn};

use super::case::{Case, QUEUE, Ring};
use super::flows::{NEXT_HOP, OUTPUT};
use crate::experiment::RowError;
use crate::experiments::testpmd::{self, MEGABYTES};

/// The Debian packages of it and of the driver it needs.
pub(super) const PACKAGES: &str = "dpdk-dev librte-net-virtio23";

/// The running program. Dropping it kills it.
#[derive(Debug)]
pub(super) struct Testpmd {
    child: Child,
    log: PathBuf,
}

impl Testpmd {
    /// Starts it on one processor; it connects to the sockets, and forwards from the first to the second.
    pub(super) fn start(
        program: &Path,
        case: &Case,
        cpu: usize,
        sockets: [&Path; 2],
        folder: &Path,
        huge_pages: bool,
    ) -> Result<Self, RowError> {
        let log = folder.join("testpmd.log");
        let output = File::create(&log)?;
        let mut command = Command::new(program);
        command.args(arguments(case, cpu, sockets, huge_pages)).env("RUNTIME_DIRECTORY", folder);
        // It ends when its input does.
        command.stdin(Stdio::piped()).stdout(output.try_clone()?).stderr(output);
        let child = spawn(&mut command, Spawn { die_with_parent: true, ..Spawn::default() });
        let child = child.map_err(|error| RowError::failed(format!("cannot start testpmd: {error}")))?;
        Ok(Self { child, log })
    }

    /// An error, with its last words, once it has ended.
    pub(super) fn check(&mut self) -> Result<(), RowError> {
        match self.child.try_wait()? {
            None => Ok(()),
            Some(status) => {
                Err(RowError::failed(format!("testpmd ended by itself ({status}):\n  {}", self.last_words())))
            }
        }
    }

    /// Processor time it has used, all threads together.
    pub(super) fn processor_time(&self) -> Result<Duration, RowError> {
        Ok(cpu_time(self.child.id())?)
    }

    /// The last it printed.
    pub(super) fn last_words(&self) -> String {
        testpmd::last_words(&std::fs::read_to_string(&self.log).unwrap_or_default())
    }
}

impl Drop for Testpmd {
    fn drop(&mut self) {
        // Nothing of it is worth waiting for: its memory has no name, its files are in the run's folder.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn mac(bytes: [u8; 6]) -> String {
    bytes.map(|byte| format!("{byte:02x}")).join(":")
}

/// Its command line.
fn arguments(case: &Case, cpu: usize, sockets: [&Path; 2], huge_pages: bool) -> Vec<String> {
    let packed = u8::from(case.ring == Ring::PackedInOrder);
    let mut arguments = testpmd::environment(cpu, MEGABYTES, huge_pages);
    for (at, socket) in sockets.into_iter().enumerate() {
        let mut own = OUTPUT;
        own[5] = own[5].wrapping_sub(1 - at as u8);
        arguments.push(format!(
            "--vdev=net_virtio_user{at},path={},queues=1,queue_size={QUEUE},packed_vq={packed},in_order={packed},mrg_rxbuf=1,mac={}",
            socket.display(),
            mac(own),
        ));
    }
    arguments.push("--".into());
    arguments.extend(testpmd::options());
    arguments.extend([
        "--forward-mode=mac".into(),
        format!("--eth-peer=1,{}", mac(NEXT_HOP)),
        "--txd=1024".into(),
        "--rxd=1024".into(),
        // Four rings full, and what a core keeps in reserve.
        "--total-num-mbufs=8192".into(),
    ]);
    arguments
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn testpmd_is_told_the_addresses_that_are_checked() {
        for case in Case::all() {
            let arguments = arguments(&case, 1, [Path::new("/a.sock"), Path::new("/b.sock")], false);
            assert!(arguments.iter().any(|argument| argument == "--eth-peer=1,02:00:00:00:0b:01"));
            let output = arguments.iter().find(|argument| argument.contains("path=/b.sock")).unwrap();
            assert!(output.ends_with("mac=02:00:00:00:0b:00"), "{output}");
            assert_eq!(output.contains("packed_vq=1"), case.ring == Ring::PackedInOrder);
        }
    }
}
