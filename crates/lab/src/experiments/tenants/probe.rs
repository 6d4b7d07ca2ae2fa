//! Probes of a switch that is attacked: the answers of its control plane to others, and what it takes of the machine.
//!
//! [`Probe::start`] starts a thread for each question. Each asks again and again until the process ends, as one that waits
//! for an answer cannot be ended; what they found is asked with [`Probe::finish`], and a question that is then still without
//! an answer counts with the time it has waited.

use std::fs::File;
use std::io::{BufRead, BufReader, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use ringferry_sys::socket::Stream;
use ringferry_vhost_user::Frontend;
use serde_json::Value;

use super::pair::waits;
use crate::experiment::RowError;

/// The port that others than the attacker connect to. Lines of the log that name it are not the attacker's.
pub(super) const PORT: &str = "probe";

/// How often each question is asked.
const PAUSE: Duration = Duration::from_millis(10);

/// How long an answer of the control socket may take.
const PATIENCE: Duration = Duration::from_secs(30);

/// Answers to one question.
#[derive(Clone, Debug)]
struct Answers {
    /// Waits in nanoseconds.
    wait: Histogram<u64>,
    /// Questions with an error for an answer.
    failed: u64,
    /// Since when the present question waits.
    since: Option<Instant>,
}

/// The answers to a question, which are still being collected.
#[derive(Clone, Debug)]
pub(super) struct Probe(Arc<Mutex<Answers>>);

/// How long answers took, in microseconds, and how many there were.
#[derive(Clone, Debug)]
pub(super) struct Found {
    pub p99: f64,
    pub max: f64,
    pub answers: u64,
    pub failed: u64,
}

impl Probe {
    fn start(ask: impl Fn() -> bool + Send + 'static) -> Result<Self, RowError> {
        let wait = waits()?;
        let answers = Arc::new(Mutex::new(Answers { wait, failed: 0, since: None }));
        let own = Arc::clone(&answers);
        std::thread::Builder::new().name("lab-probe".into()).spawn(move || {
            loop {
                let begin = Instant::now();
                own.lock().unwrap_or_else(PoisonError::into_inner).since = Some(begin);
                let good = ask();
                let mut answers = own.lock().unwrap_or_else(PoisonError::into_inner);
                answers.since = None;
                answers.failed += u64::from(!good);
                answers.wait.saturating_record(begin.elapsed().as_nanos() as u64);
                drop(answers);
                std::thread::sleep(PAUSE);
            }
        })?;
        Ok(Self(answers))
    }

    /// GET_FEATURES over a fresh connection to a port.
    pub(super) fn connections(socket: PathBuf) -> Result<Self, RowError> {
        let ask = move || {
            let Ok(stream) = Stream::connect(&socket) else { return false };
            Frontend::new(stream).is_ok_and(|mut frontend| frontend.get_features().is_ok())
        };
        Self::start(ask)
    }

    /// Asks a switch for its ports, again and again.
    pub(super) fn control(control: Control) -> Result<Self, RowError> {
        Self::start(move || control.ask().is_ok_and(|good| good))
    }

    /// Forgets what was so far.
    pub(super) fn reset(&self) {
        let mut answers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        answers.wait.reset();
        answers.failed = 0;
    }

    /// Returns the figures since [`Probe::reset`], in microseconds.
    pub(super) fn finish(&self) -> Found {
        let mut answers = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(since) = answers.since {
            answers.wait.saturating_record(since.elapsed().as_nanos() as u64);
        }
        let micros = |nanos: u64| nanos as f64 / 1000.0;
        Found {
            p99: micros(answers.wait.value_at_percentile(99.0)),
            max: micros(answers.wait.max()),
            answers: answers.wait.len(),
            failed: answers.failed,
        }
    }
}

/// The control socket of a switch.
#[derive(Clone, Debug)]
pub(super) enum Control {
    Ringferry(PathBuf),
    /// What `ovs-appctl` speaks: JSON-RPC, without anything between its messages.
    Ovs(PathBuf),
}

impl Control {
    /// Asks once, over a fresh connection, for all ports and what they have counted: `ctl show`, and `dpif/show`. Returns whether that was answered.
    pub(super) fn ask(&self) -> std::io::Result<bool> {
        let (socket, question): (_, &[u8]) = match self {
            // Without the addresses of the forwarding database, as what is printed has only their number.
            Control::Ringferry(socket) => (socket, b"{\"command\":\"show\",\"addresses\":0}\n"),
            Control::Ovs(socket) => (socket, br#"{"id":0,"method":"dpif/show","params":[]}"#),
        };
        let stream = Stream::connect(socket)?;
        stream.set_timeout(Some(PATIENCE))?;
        stream.send(question, &[])?;
        let (mut answer, mut piece) = (Vec::new(), vec![0; 64 * 1024]);
        loop {
            let bytes = stream.recv(&mut piece, &mut Vec::new())?.bytes;
            answer.extend_from_slice(&piece[..bytes]);
            match self {
                Control::Ringferry(_) if answer.ends_with(b"\n") => return Ok(answer.starts_with(b"{\"ok\"")),
                Control::Ovs(_) => {
                    if let Ok(answer) = serde_json::from_slice::<Value>(&answer) {
                        return Ok(answer["error"].is_null() && answer["result"].is_string());
                    }
                }
                Control::Ringferry(_) => {}
            }
            if bytes == 0 {
                return Ok(false);
            }
        }
    }
}

/// The memory and descriptors that a process has.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Usage {
    /// Resident memory in MiB.
    pub resident: f64,
    pub mapped: f64,
    pub descriptors: f64,
}

impl Usage {
    /// Of a process. Where its descriptors may not be listed (it cannot be dumped, and this is not root) the size of their
    /// table is taken.
    pub(super) fn of(pid: u32) -> Result<Self, RowError> {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
        let field = |name: &str| -> Result<f64, RowError> {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            let value = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
            value.ok_or_else(|| RowError::failed(format!("no {name} in the status of the switch")))
        };
        let descriptors = match std::fs::read_dir(format!("/proc/{pid}/fd")) {
            Ok(entries) => entries.count() as f64,
            Err(_) => field("FDSize:")?,
        };
        Ok(Self { resident: field("VmRSS:")? / 1024.0, mapped: field("VmSize:")? / 1024.0, descriptors })
    }

    /// The larger of each.
    pub(super) fn max(self, other: Self) -> Self {
        Self {
            resident: self.resident.max(other.resident),
            mapped: self.mapped.max(other.mapped),
            descriptors: self.descriptors.max(other.descriptors),
        }
    }
}

/// A log that is being written, and where its reader is.
#[derive(Debug)]
pub(super) struct Log {
    path: PathBuf,
    at: u64,
}

impl Log {
    /// Reads from the end of the file on.
    pub(super) fn new(path: &Path) -> Result<Self, RowError> {
        Ok(Self { path: path.to_owned(), at: std::fs::metadata(path)?.len() })
    }

    /// Lines since last time that do not name the [`PORT`] of the probe.
    pub(super) fn lines(&mut self) -> Result<u64, RowError> {
        let mut file = File::open(&self.path)?;
        file.seek(SeekFrom::Start(self.at))?;
        let (mut reader, mut line, mut lines) = (BufReader::new(file), Vec::new(), 0);
        loop {
            line.clear();
            let bytes = reader.read_until(b'\n', &mut line)?;
            if bytes == 0 {
                return Ok(lines);
            }
            self.at += bytes as u64;
            let named = line.windows(PORT.len()).any(|word| word == PORT.as_bytes());
            lines += u64::from(!named);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_is_read_from_where_the_reader_was_and_lines_of_the_probe_do_not_count() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("switch.log");
        std::fs::write(&path, "before\n").unwrap();
        let mut log = Log::new(&path).unwrap();
        std::fs::write(&path, "before\none\nport probe: connected\ntwo\n").unwrap();
        assert_eq!(log.lines().unwrap(), 2);
        assert_eq!(log.lines().unwrap(), 0);
    }

    #[test]
    fn the_usage_of_a_process_is_more_than_none_and_grows_only() {
        let usage = Usage::of(std::process::id()).unwrap();
        assert!(usage.resident > 0.0 && usage.mapped >= usage.resident && usage.descriptors > 2.0);
        let other = Usage { descriptors: 1e9, ..Usage::default() };
        assert_eq!(usage.max(other), Usage { descriptors: 1e9, ..usage });
    }

    #[test]
    fn a_question_without_an_answer_counts_with_the_time_it_has_waited() {
        let (_sender, never) = std::sync::mpsc::channel::<()>();
        let never = Mutex::new(never);
        let probe = Probe::start(move || never.lock().unwrap().recv().is_ok()).unwrap();
        while probe.0.lock().unwrap().since.is_none() {
            std::thread::yield_now();
        }
        let found = probe.finish();
        assert_eq!((found.answers, found.failed), (1, 0));
    }
}
