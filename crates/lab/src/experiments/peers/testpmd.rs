//! DPDK's testpmd as a child process: `net_vhost` is its device, `net_virtio_user` its driver. One worker on
//! one processor; commands through standard input, answers from its output.

use std::io::{PipeReader, Read, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use ringferry_sys::process::{Spawn, cpu_time, spawn};

use super::case::{Case, Direction, LARGE_BUFFER, Ring};
use crate::experiment::RowError;
use crate::experiments::testpmd::{self, MEGABYTES};
use crate::stop::Stop;

/// The Debian packages of it and of the two drivers it needs.
pub(in crate::experiments) const PACKAGES: &str = "dpdk-dev librte-net-vhost23 librte-net-virtio23";

/// How long testpmd may take to start or to answer. It starts in a quarter of a second on an idle machine.
const PATIENCE: Duration = Duration::from_secs(15);

/// Bytes in front of the data in each of DPDK's buffers.
const HEADROOM: usize = 128;
/// The largest buffer DPDK can have.
const LARGEST_BUFFER: usize = 65_535;

/// The part it plays.
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

/// What a port has counted.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(in crate::experiments) struct Stats {
    pub rx_packets: u64,
    pub rx_bytes: u64,
    /// Received per second since the last time the port was asked, by testpmd's own clock, read with
    /// the counter.
    pub rx_rate: u64,
}

/// The running program. Dropping it kills it and waits until it is gone.
#[derive(Debug)]
pub(in crate::experiments) struct Testpmd {
    child: Child,
    output: Receiver<Vec<u8>>,
    text: String,
    part: Part,
    stop: Stop,
}

impl Testpmd {
    /// Starts it; [`Testpmd::wait_ready`] says when it can be used.
    pub(in crate::experiments) fn start(
        part: Part,
        case: &Case,
        place: &Place<'_>,
        stop: &Stop,
    ) -> Result<Testpmd, RowError> {
        let (reader, writer) = std::io::pipe()?;
        // Its output would otherwise come in blocks of 4 KiB.
        let mut command = Command::new("stdbuf");
        command.arg("-oL").arg(place.program).args(arguments(part, case, place));
        command.env("RUNTIME_DIRECTORY", place.folder);
        command.stdin(Stdio::piped()).stdout(writer.try_clone()?).stderr(writer);
        let child = spawn(&mut command, Spawn { die_with_parent: true, ..Spawn::default() });
        let child = child.map_err(|error| RowError::failed(format!("cannot start testpmd: {error}")))?;
        let (sender, output) = channel();
        std::thread::Builder::new().name("lab-testpmd".into()).spawn(move || {
            let mut reader: PipeReader = reader;
            let mut bytes = [0; 4096];
            while let Ok(n @ 1..) = reader.read(&mut bytes) {
                if sender.send(bytes[..n].to_vec()).is_err() {
                    break;
                }
            }
        })?;
        // The command still holds the writing end, and the reader would never see the end.
        drop(command);
        Ok(Testpmd { child, output, text: String::new(), part, stop: stop.clone() })
    }

    /// Waits until it takes commands.
    pub(in crate::experiments) fn wait_ready(&mut self) -> Result<(), RowError> {
        self.wait_for(0, "testpmd> ")
    }

    /// Begins to forward; in a loop between two of them the driver's is the one that puts frames in.
    pub(in crate::experiments) fn begin(&mut self, case: &Case) -> Result<(), RowError> {
        let from = self.text.len();
        let origin = self.part == Part::Driver && case.device == case.driver;
        match case.direction {
            Direction::Loopback if origin => self.command("start tx_first 8")?,
            _ => self.command("start")?,
        }
        self.wait_for(from, "packets/burst=")
    }

    /// Stops to forward.
    pub(in crate::experiments) fn end(&mut self) -> Result<(), RowError> {
        let from = self.text.len();
        self.command("stop")?;
        self.wait_for(from, "Done.")
    }

    /// What its port has counted.
    pub(in crate::experiments) fn stats(&mut self) -> Result<Stats, RowError> {
        let from = self.text.len();
        self.command("show port stats 0")?;
        self.wait_for(from, "Tx-bps:")?;
        let answer = &self.text[from..];
        let field = |name: &str| -> Result<u64, RowError> {
            let value = answer.split_once(name).and_then(|(_, rest)| rest.split_whitespace().next());
            let value = value.and_then(|value| value.parse().ok());
            value.ok_or_else(|| RowError::failed(format!("testpmd's statistics have no {name}: {answer}")))
        };
        Ok(Stats {
            rx_packets: field("RX-packets:")?,
            rx_bytes: field("RX-bytes:")?,
            rx_rate: field("Rx-pps:")?,
        })
    }

    /// The number of its process.
    pub(in crate::experiments) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Processor time it has used, all threads together.
    pub(in crate::experiments) fn processor_time(&self) -> Result<Duration, RowError> {
        Ok(cpu_time(self.child.id())?)
    }

    /// Gives it a command that needs no answer.
    pub(in crate::experiments) fn command(&mut self, line: &str) -> Result<(), RowError> {
        let stdin = self.child.stdin.as_mut();
        let written = stdin.map(|stdin| stdin.write_all(format!("{line}\n").as_bytes()));
        match written {
            Some(Ok(())) => Ok(()),
            _ => Err(self.failure("takes no commands any more")),
        }
    }

    /// Waits until `needle` is in what was printed from `from` on.
    fn wait_for(&mut self, from: usize, needle: &str) -> Result<(), RowError> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if self.text[from..].contains(needle) {
                return Ok(());
            }
            if self.stop.requested() {
                return Err(RowError::Stopped);
            }
            match self.output.recv_timeout(Duration::from_millis(50)) {
                Ok(bytes) => self.text.push_str(&String::from_utf8_lossy(&bytes)),
                Err(RecvTimeoutError::Disconnected) => return Err(self.failure("ended by itself")),
                Err(RecvTimeoutError::Timeout) if Instant::now() >= deadline => {
                    return Err(self.failure(&format!("did not say {needle:?} within {PATIENCE:?}")));
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    /// An error with the last lines of its output: of its own, or of a peer that waits for it.
    pub(in crate::experiments) fn explain(&mut self, error: RowError) -> RowError {
        while let Ok(bytes) = self.output.try_recv() {
            self.text.push_str(&String::from_utf8_lossy(&bytes));
        }
        match error {
            RowError::Failed(text) => self.failure(&format!("was the peer when this happened: {text}")),
            RowError::Stopped => RowError::Stopped,
        }
    }

    fn failure(&self, what: &str) -> RowError {
        let last = testpmd::last_words(&self.text);
        RowError::failed(format!("testpmd {what}; the last it printed:\n  {last}"))
    }
}

impl Drop for Testpmd {
    fn drop(&mut self) {
        // Nothing of it is worth waiting for: its memory has no name, its files are in the run's folder.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Its command line.
fn arguments(part: Part, case: &Case, place: &Place<'_>) -> Vec<String> {
    let socket = place.socket.display();
    let mut arguments = testpmd::environment(place.cpu, MEGABYTES, place.huge_pages);
    let vectorized = case.ring == Ring::PackedVectorized;
    match part {
        Part::Device => arguments.push(format!("--vdev=net_vhost0,iface={socket},queues=1")),
        Part::Driver => {
            if vectorized {
                arguments.push("--force-max-simd-bitwidth=512".into());
            }
            let number = u8::from;
            arguments.push(format!(
                "--vdev=net_virtio_user0,path={socket},queues=1,queue_size={},packed_vq={},in_order={},mrg_rxbuf={},vectorized={}",
                case.queue,
                number(case.ring.packed()),
                number(case.ring.in_order()),
                number(case.mergeable),
                number(vectorized),
            ));
        }
    }
    let mode = match (part, case.direction) {
        (_, Direction::Loopback) => "io",
        (Part::Driver, Direction::Transmit) | (Part::Device, Direction::Receive) => "txonly",
        (Part::Driver, Direction::Receive) | (Part::Device, Direction::Transmit) => "rxonly",
    };
    let buffer = buffer(case);
    arguments.extend(["--".into(), "-i".into()]);
    arguments.extend(testpmd::options());
    arguments.extend([
        format!("--forward-mode={mode}"),
        format!("--txd={DESCRIPTORS}"),
        format!("--rxd={DESCRIPTORS}"),
        format!("--mbuf-size={buffer}"),
        format!("--total-num-mbufs={}", buffers(case)),
        format!("--txpkts={}", segments(case.size, buffer - HEADROOM)),
    ]);
    if case.size > buffer - HEADROOM {
        // A frame in several buffers, on the sending side.
        arguments.push("--tx-offloads=0x8000".into());
    }
    arguments
}

/// Descriptors of a port's queue. The virtqueue's own size counts, which is not more.
const DESCRIPTORS: u16 = 1024;

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
