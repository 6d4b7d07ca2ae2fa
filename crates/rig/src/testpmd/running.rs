//! The running program: commands through standard input, answers from its output.

use std::io::{self, PipeReader, Read, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use ringferry_sys::process::{Spawn, cpu_time, spawn};

use super::{CommandLine, last_words};

/// How long testpmd may take to start or to answer. It starts in a quarter of a second on an idle machine.
const PATIENCE: Duration = Duration::from_secs(15);

/// Why testpmd is of no use, or not any more.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The message says what went wrong, and what testpmd said last.
    #[error("{0}")]
    Failed(String),
    /// It was waited for, and need not be any more.
    #[error("stopped")]
    Stopped,
    /// The system has no more pipes, threads or processes.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// The counters of a port.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Stats {
    pub rx_packets: u64,
    pub rx_bytes: u64,
    /// Received per second since the last time the port was asked, by testpmd's own clock, read with
    /// the counter.
    pub rx_rate: u64,
}

/// The running program. Dropping it kills it and waits until it is gone.
pub struct Testpmd {
    child: Child,
    output: Receiver<Vec<u8>>,
    text: String,
    /// Returns true once nobody wants to wait for it any more.
    stopped: Box<dyn Fn() -> bool + Send>,
}

impl Testpmd {
    /// Starts it, with files in a folder of its own. One that takes commands (`-i`) is ready after [`Testpmd::wait_ready`]; any
    /// other forwards as soon as it runs.
    pub fn start(
        program: &Path,
        line: &CommandLine,
        folder: &Path,
        stopped: impl Fn() -> bool + Send + 'static,
    ) -> Result<Testpmd, Error> {
        let (reader, writer) = io::pipe()?;
        // Its output would otherwise come in blocks of 4 KiB.
        let mut command = Command::new("stdbuf");
        command.arg("-oL").arg(program).args(line.words()).env("RUNTIME_DIRECTORY", folder);
        // It ends when its input does.
        command.stdin(Stdio::piped()).stdout(writer.try_clone()?).stderr(writer);
        let child = spawn(&mut command, Spawn { die_with_parent: true, ..Spawn::default() });
        let child = child.map_err(|error| Error::Failed(format!("cannot start testpmd: {error}")))?;
        let (sender, output) = channel();
        std::thread::Builder::new().name("testpmd-output".into()).spawn(move || {
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
        Ok(Testpmd { child, output, text: String::new(), stopped: Box::new(stopped) })
    }

    /// Waits until it takes commands.
    pub fn wait_ready(&mut self) -> Result<(), Error> {
        self.wait_for(0, "testpmd> ")
    }

    /// Begins to forward, after so many bursts of its own.
    pub fn begin(&mut self, first: u32) -> Result<(), Error> {
        let from = self.text.len();
        match first {
            0 => self.command("start")?,
            first => self.command(&format!("start tx_first {first}"))?,
        }
        self.wait_for(from, "packets/burst=")
    }

    /// Stops forwarding.
    pub fn end(&mut self) -> Result<(), Error> {
        let from = self.text.len();
        self.command("stop")?;
        self.wait_for(from, "Done.")
    }

    /// Asks for the counters of its first port.
    pub fn stats(&mut self) -> Result<Stats, Error> {
        let from = self.text.len();
        self.command("show port stats 0")?;
        self.wait_for(from, "Tx-bps:")?;
        let answer = &self.text[from..];
        let field = |name: &str| -> Result<u64, Error> {
            let value = answer.split_once(name).and_then(|(_, rest)| rest.split_whitespace().next());
            let value = value.and_then(|value| value.parse().ok());
            value.ok_or_else(|| Error::Failed(format!("testpmd's statistics have no {name}: {answer}")))
        };
        Ok(Stats {
            rx_packets: field("RX-packets:")?,
            rx_bytes: field("RX-bytes:")?,
            rx_rate: field("Rx-pps:")?,
        })
    }

    /// The number of its process.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Processor time it has used, all threads together.
    pub fn processor_time(&self) -> Result<Duration, Error> {
        Ok(cpu_time(self.child.id())?)
    }

    /// An error, with its last words, once it has ended.
    pub fn check(&mut self) -> Result<(), Error> {
        match self.child.try_wait()? {
            None => Ok(()),
            Some(status) => Err(self.explain(&format!("ended by itself ({status})"))),
        }
    }

    /// Gives it a command that needs no answer.
    pub fn command(&mut self, line: &str) -> Result<(), Error> {
        let stdin = self.child.stdin.as_mut();
        let written = stdin.map(|stdin| stdin.write_all(format!("{line}\n").as_bytes()));
        match written {
            Some(Ok(())) => Ok(()),
            _ => Err(self.failure("takes no commands any more")),
        }
    }

    /// Waits until `needle` is in what was printed from `from` on.
    fn wait_for(&mut self, from: usize, needle: &str) -> Result<(), Error> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if self.text[from..].contains(needle) {
                return Ok(());
            }
            if (self.stopped)() {
                return Err(Error::Stopped);
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
    pub fn explain(&mut self, what: &str) -> Error {
        while let Ok(bytes) = self.output.try_recv() {
            self.text.push_str(&String::from_utf8_lossy(&bytes));
        }
        self.failure(what)
    }

    fn failure(&self, what: &str) -> Error {
        Error::Failed(format!("testpmd {what}; the last it printed:\n  {}", last_words(&self.text)))
    }
}

impl Drop for Testpmd {
    fn drop(&mut self) {
        // Nothing of it is worth waiting for: its memory has no name, its files are in the run's folder.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
