//! `ringferry capture`: packets of a running switch's ports, as a pcapng file or stream.
//!
//! The client compiles the filter, asks the switch for a capture, and from then on takes frames out of the rings of the switch's workers and writes them,
//! until it is told to stop, has enough, or nobody reads any more. It looks into the rings every few milliseconds: the workers do not wake it, as that
//! would be a system call of theirs. If it is slow, or stopped, frames are lost for the capture and for nobody else.
//!
//! When the process ends that it captures in, another one may have taken over from it, or be started in its place. The client begins a capture of the same ports
//! there, goes on with the same file, and says where the gap is.

mod filter;
mod output;
mod pcapng;

use std::io::{self, IsTerminal, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use ringferry_control::capture::ring::{Counts, Layout, Record, RingError, RingReader};
use ringferry_control::capture::{CaptureDrops, CaptureRequest, CaptureStarted, DESCRIPTORS, Direction};
use ringferry_control::{self as control, Answer, ControlError, Patience, Request};
use ringferry_sys::signal::{Signal, Signals};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use output::{Output, Rotation};

use crate::error_report::{ErrorKind, ErrorReport};

/// Shown below the options by `ringferry capture --help`.
const EXAMPLES: &str = "\
`in` is what comes into the switch: what the guest behind the port sends. `out` is what the guest receives.

Examples:
  ringferry capture vm0 -w vm0.pcapng                      everything that vm0 sends and receives, until Ctrl-C
  ringferry capture vm0,uplink --filter 'tcp port 80' | tcpdump -nr -
  ringferry capture --drops                                what is dropped, at any port, each packet with its reason
  ringferry capture vm0 --direction in --snaplen 96 --duration 10s -w headers.pcapng
  ringferry capture vm0 -w - | wireshark -k -i -
  ringferry capture vm0 -w vm0.pcapng --file-size 100M --files 10      the last gigabyte, for as long as it takes

A capture never slows down a switch by more than a seventh: what would is lost for the capture, and counted at the end of the file
(Wireshark: Statistics, Capture File Properties). Keep less of each packet (--snaplen), or fewer packets (--filter), to lose none.";

/// How often rings are looked into while they have something, and when they have had nothing for a while.
const BUSY: Duration = Duration::from_millis(2);
const IDLE: Duration = Duration::from_millis(20);

/// How long another process is waited for that has the switch now, and how often it is looked for.
const RESUME: Duration = Duration::from_secs(2);
const LOOK: Duration = Duration::from_millis(20);

/// Captures packets of a running switch.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct CaptureArgs {
    /// The ports; all of the switch, if none is named.
    #[arg(value_name = "PORT", value_delimiter = ',')]
    pub ports: Vec<String>,
    /// Capture only packets that match: an expression in tcpdump's language (pcap-filter(7)). tcpdump compiles it.
    #[arg(long, short, value_name = "EXPRESSION")]
    pub filter: Option<String>,
    /// Capture one direction only, as the switch sees it: `in` is what the guest sends, `out` what it receives.
    #[arg(long, value_enum)]
    pub direction: Option<DirectionArg>,
    /// Capture packets that are dropped, with the reason of each in a comment; with =too beside the others.
    #[arg(long, value_enum, num_args = 0..=1, require_equals = true, default_missing_value = "only")]
    pub drops: Option<DropsArg>,
    /// Keep so many bytes of each packet at most.
    #[arg(long, short, value_name = "BYTES", value_parser = clap::value_parser!(u32).range(1..))]
    pub snaplen: Option<u32>,
    /// End after so many packets.
    #[arg(long, short, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub count: Option<u64>,
    /// End after so long: 500ms, 10s, 5m, 1h, or seconds.
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    pub duration: Option<Duration>,
    /// Where to write to; `-` is standard output, and the default.
    #[arg(long, short, value_name = "FILE", default_value = "-")]
    pub write: PathBuf,
    /// Begin another file when one has so many bytes: 500K, 100M, 1G (10^3, 10^6, 10^9), 100K at least. The files are FILE with a number: vm0_00001.pcapng.
    #[arg(long, value_name = "SIZE", value_parser = parse_size, requires = "write")]
    pub file_size: Option<u64>,
    /// Keep only so many files, the latest: the oldest is removed when another one begins.
    #[arg(long, value_name = "N", requires = "file_size", value_parser = clap::value_parser!(u32).range(1..))]
    pub files: Option<u32>,
    /// Memory between each worker of the switch and this program; more for bursts that the disk cannot follow.
    #[arg(long, value_name = "KIB")]
    pub buffer: Option<u32>,
    /// Say nothing of how it went, unless packets are missing.
    #[arg(long, short)]
    pub quiet: bool,
    /// In place of capturing: print the names of the ports that can be captured.
    #[arg(long, conflicts_with_all = ["filter", "direction", "drops", "snaplen", "count", "duration", "buffer", "file_size"])]
    pub list: bool,
    /// Print what was captured and lost as JSON at the end, to standard output if packets go elsewhere. With --list, the list.
    #[arg(long)]
    pub json: bool,
    /// Control socket of the switch [default: as for `ringferry ctl`].
    #[arg(long, value_name = "PATH")]
    pub control: Option<PathBuf>,
}

/// A direction on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum DirectionArg {
    /// What the guest sends.
    In,
    /// What the guest receives.
    Out,
}

impl From<DirectionArg> for Direction {
    fn from(direction: DirectionArg) -> Self {
        match direction {
            DirectionArg::In => Direction::In,
            DirectionArg::Out => Direction::Out,
        }
    }
}

/// What of dropped packets is captured, on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum DropsArg {
    /// They, and no others.
    Only,
    /// They, beside the others.
    Too,
}

/// A reason why a capture did not begin, or could not go on.
#[derive(Debug, thiserror::Error)]
pub enum CaptureError {
    #[error(transparent)]
    Control(#[from] ControlError),
    #[error("ringferry answered another question: is it the same version as this program?")]
    Mismatch,
    #[error("--filter: {0}")]
    Filter(String),
    #[error("--filter: tcpdump, which compiles filters, is not installed (apt install tcpdump)")]
    NoTcpdump,
    #[error(
        "packets are not for a terminal: write them to a file with -w FILE, or pipe them into a reader (| tcpdump -nr -)"
    )]
    Terminal,
    #[error("--file-size: only files are begun anew: say which with -w FILE")]
    NoFile,
    #[error("cannot write {path}: {error}")]
    Write { path: String, error: io::Error },
    #[error(transparent)]
    Rings(#[from] RingError),
    #[error(
        "the switch has ended, and the capture with it, as no other process goes on with it ({0}); what was captured is complete"
    )]
    SwitchEnded(Box<CaptureError>),
    #[error("another switch with other ports was started in its place")]
    OtherPorts,
    /// It was printed as JSON.
    #[error("the output says what is wrong")]
    Told,
    #[error("{0}")]
    Os(#[from] io::Error),
}

impl CaptureError {
    /// Returns true if the output says all that is to be said of the error.
    pub fn is_told(&self) -> bool {
        matches!(self, CaptureError::Told)
    }

    /// The error as JSON.
    fn report(&self) -> ErrorReport {
        let error = match self {
            CaptureError::Control(error) => ErrorKind::text(error),
            error => error.to_string(),
        };
        ErrorReport { error, kind: self.kind() }
    }

    fn kind(&self) -> ErrorKind {
        match self {
            CaptureError::Control(error) => ErrorKind::of(error),
            CaptureError::Mismatch => ErrorKind::NotSupported,
            CaptureError::Filter(_)
            | CaptureError::NoTcpdump
            | CaptureError::Terminal
            | CaptureError::NoFile => ErrorKind::Usage,
            CaptureError::Write { .. }
            | CaptureError::Rings(_)
            | CaptureError::SwitchEnded(_)
            | CaptureError::OtherPorts
            | CaptureError::Told
            | CaptureError::Os(_) => ErrorKind::Failed,
        }
    }
}

fn parse_duration(text: &str) -> Result<Duration, String> {
    let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let unit = match unit {
        "ms" => 0.001,
        "" | "s" => 1.0,
        "m" | "min" => 60.0,
        "h" => 3600.0,
        _ => return Err(format!("{unit:?} is no unit of time: ms, s, m or h")),
    };
    let number: f64 = number.parse().map_err(|_| format!("{number:?} is no number"))?;
    Duration::try_from_secs_f64(number * unit).map_err(|error| error.to_string())
}

/// Fewest bytes of a file: what each begins and ends with has to fit beside a packet.
const SMALLEST_FILE: u64 = 100_000;

fn parse_size(text: &str) -> Result<u64, String> {
    let split = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let unit = match unit {
        "" => 1,
        "k" | "K" => 1_000,
        "m" | "M" => 1_000_000,
        "g" | "G" => 1_000_000_000,
        _ => return Err(format!("{unit:?} is no unit of bytes: K, M or G")),
    };
    let number: u64 = number.parse().map_err(|_| format!("{number:?} is no number"))?;
    let size = number.checked_mul(unit).ok_or("that is too much")?;
    if size < SMALLEST_FILE { Err(format!("at least {}K", SMALLEST_FILE / 1000)) } else { Ok(size) }
}

/// What was captured, as `--json` prints it.
#[derive(Clone, Debug, Default, serde::Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Summary {
    /// Packets that were captured.
    captured: u64,
    /// Packets that were lost, as they came faster than they were written or would have held up the switch.
    lost: u64,
    /// The ports that were captured.
    interfaces: Vec<InterfaceSummary>,
    /// The times in which nothing was captured.
    gaps: Vec<Gap>,
    /// The files that there are, the latest last, where one follows another.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    files: Vec<String>,
}

/// A time in which nothing was captured, as the process of the switch was another one afterwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct Gap {
    /// Its begin, in nanoseconds since 1970.
    from: u64,
    /// Its end, in nanoseconds since 1970.
    to: u64,
}

impl Gap {
    fn milliseconds(&self) -> u64 {
        self.to.saturating_sub(self.from).div_ceil(1_000_000)
    }
}

/// One port of a capture.
#[derive(Clone, Debug, Default, serde::Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct InterfaceSummary {
    /// The port.
    name: String,
    /// Packets that passed and that the filter wanted.
    seen: u64,
    /// Packets that were captured.
    captured: u64,
    /// Packets that were lost.
    lost: u64,
}

impl Summary {
    fn to_text(&self) -> String {
        let packets = |count: u64| format!("{count} packet{}", if count == 1 { "" } else { "s" });
        let mut text = format!("{} captured", packets(self.captured));
        if self.lost > 0 {
            text += &format!(
                "; {} lost, as they came faster than they were written or would have held up the switch (--snaplen, --filter, --buffer help)",
                packets(self.lost)
            );
        }
        for gap in &self.gaps {
            text += &format!(
                "; another process has taken over the switch, and what passed in about {} ms is missing",
                gap.milliseconds()
            );
        }
        text
    }
}

/// Runs `ringferry capture`. With `--json` an error for which nothing was captured is JSON as well.
///
/// # Errors
/// See [`CaptureError`].
pub fn run(args: &CaptureArgs) -> Result<(), CaptureError> {
    let path = args.control.clone().unwrap_or_else(control::default_path);
    let begun = if args.list { list(&path, args.json).map(|()| None) } else { begin(args, path).map(Some) };
    match begun {
        Ok(None) => Ok(()),
        Ok(Some(begun)) => begun.run(args),
        Err(error) if args.json => {
            print_json(&error.report(), args.write == Path::new("-"))?;
            Err(CaptureError::Told)
        }
        Err(error) => Err(error),
    }
}

/// Prints JSON where no packets go. Who asked for it may have gone.
fn print_json(value: &impl serde::Serialize, are_packets_printed: bool) -> io::Result<()> {
    let text = serde_json::to_string_pretty(value)? + "\n";
    let _ = if are_packets_printed {
        io::stderr().write_all(text.as_bytes())
    } else {
        io::stdout().write_all(text.as_bytes())
    };
    Ok(())
}

/// A capture that has begun, and where it goes.
struct Begun {
    signals: Signals,
    capture: Capture,
    output: Output,
}

fn begin(args: &CaptureArgs, path: PathBuf) -> Result<Begun, CaptureError> {
    // Before the switch is asked for anything, and so that no signal is lost.
    let signals = Signals::new(&[Signal::INT, Signal::TERM, Signal::HUP])?;
    let program = args.filter.as_deref().map(filter::compile).transpose()?;
    let request = CaptureRequest {
        ports: args.ports.clone(),
        direction: args.direction.map(Into::into),
        drops: match args.drops {
            None => CaptureDrops::None,
            Some(DropsArg::Only) => CaptureDrops::Only,
            Some(DropsArg::Too) => CaptureDrops::Too,
        },
        snaplen: args.snaplen.unwrap_or(0),
        filter: program.unwrap_or_default(),
        buffer_kib: args.buffer.unwrap_or(0),
    };
    output::check(&args.write)?;
    let rotation = args.file_size.map(|size| Rotation { size, files: args.files });
    if rotation.is_some() && args.write == Path::new("-") {
        return Err(CaptureError::NoFile);
    }
    let capture = Capture::begin(path, request, args.filter.as_deref().unwrap_or(""))?;
    end_if_held(&signals, args.duration)?;
    // Not before there is something to write: it may be an earlier capture that a mistake in a port's name is not to cost.
    let output = Output::open(&args.write, rotation)?;
    Ok(Begun { signals, capture, output })
}

impl Begun {
    fn run(self, args: &CaptureArgs) -> Result<(), CaptureError> {
        let Begun { signals, mut capture, mut output } = self;
        if !args.quiet && !output.is_stdout() && io::stderr().is_terminal() {
            let _ = writeln!(io::stderr(), "ringferry: capturing {}, until Ctrl-C", capture.names());
        }
        let ended = capture.run(args, &signals, &mut output);
        let summary = capture.summary(output.files());
        if args.json {
            print_json(&summary, output.is_stdout())?;
        } else if !args.quiet || summary.lost > 0 || !summary.gaps.is_empty() {
            let _ = writeln!(io::stderr(), "ringferry: {}", summary.to_text());
        }
        ended
    }
}

/// How long it may take to write what is left, once it is to end.
const HELD: Duration = Duration::from_secs(2);

/// Has the process end when it was told to, or its time is over, and whoever reads what it writes holds it: no signal interrupts that, and it would keep its place
/// among the captures of the switch.
fn end_if_held(signals: &Signals, duration: Option<Duration>) -> io::Result<()> {
    let told = signals.as_fd().try_clone_to_owned()?;
    let wait = duration.and_then(|time| Timespec::try_from(time).ok());
    let held = move || {
        if poll(&mut [PollFd::new(&told, PollFlags::IN)], wait.as_ref()).is_err() {
            return;
        }
        thread::sleep(HELD);
        let _ = writeln!(
            io::stderr(),
            "ringferry: nobody reads the capture, which was to end: its last packets are missing"
        );
        std::process::exit(1);
    };
    thread::Builder::new().name("end-if-held".to_owned()).spawn(held).map(drop)
}

/// Captures everything of one port into memory, as a whole file, for a while: until the time is over, there are so many bytes, the switch has ended, or `is_over` says so.
///
/// # Errors
/// See [`CaptureError`].
pub fn to_memory(
    path: &Path,
    port: &str,
    time: Duration,
    most: usize,
    is_over: impl Fn() -> bool,
) -> Result<Vec<u8>, CaptureError> {
    let request = CaptureRequest {
        ports: vec![port.to_owned()],
        direction: None,
        drops: CaptureDrops::None,
        snaplen: 0,
        filter: Default::default(),
        buffer_kib: 0,
    };
    let mut capture = Capture::begin(path.to_owned(), request, "")?;
    capture.blocks = capture.head();
    let due = Instant::now() + time;
    let mut switch_ended = false;
    while Instant::now() < due && capture.blocks.len() < most && !switch_ended && !is_over() {
        switch_ended = capture.switch_ended(IDLE)?;
        capture.take(u64::MAX)?;
    }
    capture.blocks.extend(capture.tail());
    Ok(capture.blocks)
}

/// Prints the names of the ports.
fn list(path: &Path, json: bool) -> Result<(), CaptureError> {
    let Answer::Show(snapshot) = control::call(path, &Request::Show { addresses: Some(0) })? else {
        return Err(CaptureError::Mismatch);
    };
    let names: Vec<_> = snapshot.ports.into_iter().map(|port| port.name).collect();
    let text = if json {
        serde_json::to_string(&names).map_err(io::Error::from)? + "\n"
    } else {
        names.iter().map(|name| format!("{name}\n")).collect()
    };
    match io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(()),
    }
}

/// A capture in one process of the switch. Dropping it ends it there.
struct Source {
    started: CaptureStarted,
    reader: RingReader,
    pipe: OwnedFd,
}

impl Source {
    fn open(path: &Path, request: &CaptureRequest) -> Result<Source, CaptureError> {
        let (answer, fds) =
            control::call_with_fds(path, &Request::Capture(request.clone()), Patience::SHORT)?;
        let (Answer::Capture(started), Ok([index, contents, pipe])) =
            (answer, <[OwnedFd; DESCRIPTORS]>::try_from(fds))
        else {
            return Err(CaptureError::Mismatch);
        };
        let layout = Layout {
            rings: started.rings.into(),
            ring_bytes: started.ring_bytes as usize,
            interfaces: started.interfaces.len(),
        };
        let reader = RingReader::new(layout, index, contents)?;
        Ok(Source { started, reader, pipe })
    }

    /// Returns true if packets of the other one have the same interfaces.
    fn is_like(&self, other: &Source) -> bool {
        let names = |source: &Source| -> Vec<_> {
            source.started.interfaces.iter().map(|port| port.name.clone()).collect()
        };
        self.started.snaplen == other.started.snaplen && names(self) == names(other)
    }
}

/// A capture that runs.
struct Capture {
    source: Source,
    path: PathBuf,
    /// What is asked of the next process.
    request: CaptureRequest,
    filter: String,
    began: u64,
    /// Packets of each interface that were written, or are among `blocks`.
    written: Vec<u64>,
    /// What was counted of each interface in the processes before.
    past: Vec<Counts>,
    gaps: Vec<Gap>,
    /// A comment for the next packet.
    note: Option<String>,
    /// Why no other process goes on.
    not_resumed: Option<CaptureError>,
    /// Storage: what was read from a ring, the records of all rings, and blocks to be written.
    buffer: Vec<u8>,
    records: Vec<(Record, std::ops::Range<usize>)>,
    frames: Vec<u8>,
    blocks: Vec<u8>,
}

/// Nanoseconds since 1970.
fn wall() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_nanos() as u64
}

impl Capture {
    fn begin(path: PathBuf, request: CaptureRequest, filter: &str) -> Result<Capture, CaptureError> {
        let source = Source::open(&path, &request)?;
        let interfaces = &source.started.interfaces;
        // The next process is asked for the same ones, also where all were asked for, as packets refer to them by number.
        let ports = interfaces.iter().map(|port| port.name.clone()).collect();
        Ok(Capture {
            written: vec![0; interfaces.len()],
            past: vec![Counts::default(); interfaces.len()],
            source,
            path,
            request: CaptureRequest { ports, ..request },
            filter: filter.to_owned(),
            began: wall(),
            gaps: Vec::new(),
            note: None,
            not_resumed: None,
            buffer: Vec::new(),
            records: Vec::new(),
            frames: Vec::new(),
            blocks: Vec::new(),
        })
    }

    /// The names of the ports that are captured; of many, how many there are.
    fn names(&self) -> String {
        match self.request.ports.as_slice() {
            few if few.len() <= 4 => few.join(", "),
            many => format!("{} ports", many.len()),
        }
    }

    fn captured(&self) -> u64 {
        self.written.iter().sum()
    }

    /// Writes the whole file: until a signal, the count, the end of the time, or that of the reader or of the switch.
    fn run(
        &mut self,
        args: &CaptureArgs,
        signals: &Signals,
        output: &mut Output,
    ) -> Result<(), CaptureError> {
        let due = args.duration.and_then(|duration| Instant::now().checked_add(duration));
        let most = args.count.unwrap_or(u64::MAX);
        if !output.begin(&self.head())? {
            return Ok(());
        }
        let mut ended = None;
        let mut nothing = 0u32;
        while ended.is_none() {
            let before = self.captured();
            self.take(most)?;
            if !self.flush(output)? {
                return Ok(());
            }
            nothing = if self.captured() > before { 0 } else { nothing.saturating_add(1) };
            if self.captured() >= most {
                break;
            }
            let wait = if nothing < 10 { BUSY } else { IDLE };
            let left = due.map_or(wait, |due| due.saturating_duration_since(Instant::now()).min(wait));
            ended = self.wait(left, true, signals, output)?;
            if ended == Some(Ended::SwitchGone) {
                // What it has left.
                self.take(most)?;
                ended = if self.captured() < most { self.resume(due, signals, output)? } else { None };
            }
            if due.is_some_and(|due| due <= Instant::now()) {
                break;
            }
        }
        if let Some(Ended::ReaderGone) = ended {
            return Ok(());
        }
        // What was captured until now.
        self.take(most)?;
        self.blocks.extend(self.tail());
        self.flush(output)?;
        match ended {
            Some(Ended::SwitchGone) => {
                let why = self.not_resumed.take().unwrap_or(CaptureError::Mismatch);
                Err(CaptureError::SwitchEnded(Box::new(why)))
            }
            _ => Ok(()),
        }
    }

    /// Goes on in the process that has the switch now, if there is one soon. Returns what has ended the capture if not.
    fn resume(
        &mut self,
        due: Option<Instant>,
        signals: &Signals,
        output: &Output,
    ) -> Result<Option<Ended>, CaptureError> {
        let (gone, from) = (Instant::now(), wall());
        loop {
            match Source::open(&self.path, &self.request) {
                Ok(source) if source.is_like(&self.source) => {
                    for (number, past) in (0u16..).zip(&mut self.past) {
                        *past = sum(*past, self.source.reader.counts(number));
                    }
                    self.source = source;
                    let gap = Gap { from, to: wall() };
                    let missing = format!(
                        "another process has taken over the switch, and what passed in about {} ms before this is missing",
                        gap.milliseconds()
                    );
                    let _ = writeln!(io::stderr(), "ringferry: {missing}");
                    self.note = Some(missing);
                    self.gaps.push(gap);
                    return Ok(None);
                }
                Ok(_) => self.not_resumed = Some(CaptureError::OtherPorts),
                Err(error) => self.not_resumed = Some(error),
            }
            // The ports of Xen guests come after the others.
            if gone.elapsed() >= RESUME || due.is_some_and(|due| due <= Instant::now()) {
                return Ok(Some(Ended::SwitchGone));
            }
            if let Some(ended) = self.wait(LOOK, false, signals, output)? {
                return Ok(Some(ended));
            }
        }
    }

    /// Waits for something that ends the capture; for the end of the switch only where there is one.
    fn wait(
        &self,
        time: Duration,
        has_switch: bool,
        signals: &Signals,
        output: &Output,
    ) -> Result<Option<Ended>, CaptureError> {
        let output = output.as_fd();
        let mut fds = [
            PollFd::new(signals, PollFlags::IN),
            PollFd::from_borrowed_fd(output, PollFlags::empty()),
            PollFd::new(&self.source.pipe, PollFlags::empty()),
        ];
        let watched = if has_switch { 3 } else { 2 };
        let time = Timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos().into() };
        match poll(&mut fds[..watched], Some(&time)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(io::Error::from(error).into()),
        }
        let gone = |fd: &PollFd<'_>| fd.revents().intersects(PollFlags::ERR | PollFlags::HUP);
        if !fds[0].revents().is_empty() && signals.next()?.is_some() {
            return Ok(Some(Ended::Signal));
        }
        if gone(&fds[1]) {
            return Ok(Some(Ended::ReaderGone));
        }
        Ok((has_switch && gone(&fds[2])).then_some(Ended::SwitchGone))
    }

    /// Waits for so long for the end of the switch.
    fn switch_ended(&self, time: Duration) -> io::Result<bool> {
        let mut fds = [PollFd::new(&self.source.pipe, PollFlags::empty())];
        let time = Timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos().into() };
        match poll(&mut fds, Some(&time)) {
            Ok(_) => Ok(fds[0].revents().intersects(PollFlags::ERR | PollFlags::HUP)),
            Err(rustix::io::Errno::INTR) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Returns the blocks with which a file begins.
    fn head(&self) -> Vec<u8> {
        let mut blocks = Vec::new();
        pcapng::section(&mut blocks);
        let Source { started, .. } = &self.source;
        for port in &started.interfaces {
            pcapng::interface(&mut blocks, &port.name, &port.description, started.snaplen, &self.filter);
        }
        blocks
    }

    /// What became of the frames of an interface.
    fn counts(&self, interface: u16) -> Counts {
        let past = self.past.get(usize::from(interface)).copied().unwrap_or_default();
        sum(past, self.source.reader.counts(interface))
    }

    /// Returns the blocks with which a file ends. Their counts are those since the begin of the capture.
    fn tail(&self) -> Vec<u8> {
        let (mut blocks, times) = (Vec::new(), [self.began, wall()]);
        for (interface, written) in (0u16..).zip(&self.written) {
            pcapng::statistics(&mut blocks, interface, self.counts(interface), *written, times);
        }
        blocks
    }

    /// Takes what is in the rings and makes blocks of it, in the order of time, until there are `most` packets in all.
    fn take(&mut self, most: u64) -> Result<(), CaptureError> {
        let Self { source: Source { reader, .. }, buffer, records, frames, .. } = self;
        records.clear();
        frames.clear();
        for ring in 0..reader.rings() {
            reader.read(ring, buffer, &mut |record, frame| {
                let from = frames.len();
                frames.extend_from_slice(frame);
                records.push((record, from..frames.len()));
            })?;
        }
        // Stable, so that packets of a worker stay in order.
        records.sort_by_key(|(record, _)| record.stamp);
        let left = most.saturating_sub(self.written.iter().sum());
        for (record, frame) in self.records.iter().take(left.try_into().unwrap_or(usize::MAX)) {
            let note = self.note.take();
            pcapng::packet(&mut self.blocks, record, &self.frames[frame.clone()], note.as_deref());
            if let Some(written) = self.written.get_mut(usize::from(record.interface)) {
                *written += 1;
            }
        }
        Ok(())
    }

    /// Writes the blocks, to as many files as they need; false if nobody reads them any more.
    fn flush(&mut self, output: &mut Output) -> Result<bool, CaptureError> {
        let blocks = std::mem::take(&mut self.blocks);
        let mut rest = &blocks[..];
        let done = loop {
            let (now, later) = rest.split_at(output.fits(rest));
            let had = output.written();
            let done = output.write(now);
            // A file that cannot take all of them has some of them.
            rest = if done.is_err() { &rest[(output.written() - had) as usize..] } else { later };
            match done {
                Ok(true) if rest.is_empty() => break Ok(true),
                Ok(true) => {}
                other => break other,
            }
            if let Err(error) = output.begin_next(&self.tail(), &self.head()) {
                break Err(error);
            }
        };
        if done.is_err() {
            for interface in pcapng::interfaces_of(rest) {
                if let Some(written) = self.written.get_mut(interface as usize) {
                    *written -= 1;
                }
            }
        }
        self.blocks = blocks;
        self.blocks.clear();
        done
    }

    fn summary(&self, files: Vec<String>) -> Summary {
        let interface = |(number, port): (u16, &control::capture::CaptureInterface)| {
            let Counts { seen, lost, .. } = self.counts(number);
            let captured = self.written.get(usize::from(number)).copied().unwrap_or(0);
            InterfaceSummary { name: port.name.clone(), seen, captured, lost }
        };
        let interfaces: Vec<_> = (0u16..).zip(&self.source.started.interfaces).map(interface).collect();
        let lost = interfaces.iter().map(|interface| interface.lost).sum();
        Summary { captured: self.captured(), lost, interfaces, gaps: self.gaps.clone(), files }
    }
}

fn sum(a: Counts, b: Counts) -> Counts {
    Counts { seen: a.seen + b.seen, accepted: a.accepted + b.accepted, lost: a.lost + b.lost }
}

/// What has ended a capture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ended {
    Signal,
    ReaderGone,
    SwitchGone,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_units() {
        for (text, milliseconds) in
            [("10", 10_000), ("1.5s", 1500), ("500ms", 500), ("2m", 120_000), ("1h", 3_600_000)]
        {
            assert_eq!(parse_duration(text), Ok(Duration::from_millis(milliseconds)), "{text}");
        }
        for wrong in ["", "s", "-1s", "5 s", "1d", "1.2.3s", "99999999999999999999h"] {
            assert!(parse_duration(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn sizes_have_units() {
        for (text, bytes) in
            [("100000", 100_000), ("500K", 500_000), ("100M", 100_000_000), ("2G", 2_000_000_000)]
        {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
        for wrong in ["", "M", "-1M", "1.5G", "10", "1T", "99999999999G", "9999999999999999999999"] {
            assert!(parse_size(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn what_was_lost_is_said_with_what_helps() {
        let summary = Summary { captured: 1, ..Summary::default() };
        assert_eq!(summary.to_text(), "1 packet captured");
        let summary = Summary { captured: 2, lost: 3, ..summary };
        assert!(summary.to_text().starts_with("2 packets captured; 3 packets lost, as they came faster"));
        let gaps = vec![Gap { from: 5_000_000, to: 17_000_001 }];
        let summary = Summary { lost: 0, gaps, ..summary };
        let said = "2 packets captured; another process has taken over the switch, and what passed in about 13 ms is missing";
        assert_eq!(summary.to_text(), said);
    }
}
