//! `ringferry guest`: a tap plugged into any vhost-user back end, as a virtio-net driver would be.
//!
//! The kernel behind the tap plays the guest: what it sends goes through our driver half and shared
//! memory into the back end, what the back end delivers is written to the tap. The tap stays while
//! back ends come and go; rings and memory stay too where the next back end can go on with them.
//!
//! | file | idea | owner of |
//! |---|---|---|
//! | `args` | the command line | nothing |
//! | `taps` | the tap's queues, and which of them are in use | the tap |
//! | `rings` | queue pairs, and how they go on with another back end | rings, buffers, events |
//! | `session` | what happens while there is a back end; changes of the number of pairs | the pairs' threads |
//! | `bridge` | the data path: one pair, one thread | while it runs, a pair |
//! | `read` | from the tap into buffers | nothing |
//! | `counts` | what is counted | nothing |
//! | `status` | answers on the control socket | nothing |

mod args;
mod bridge;
mod counts;
mod read;
mod rings;
mod session;
mod spread;
mod status;
mod taps;

use std::io::{self, Write};
use std::os::fd::RawFd;
use std::time::{Duration, Instant};

use ringferry_control::{Answer, ControlServer, Request};
use ringferry_nic::rx::RxConfig;
use ringferry_sys::epoll::{Epoll, EventBuf, Interest};
use ringferry_sys::signal::{Signal, Signals};
use ringferry_sys::socket::{BindError, Listener, Stream};
use ringferry_sys::tap::TapError;
use ringferry_sys::{inherited, netif};
use ringferry_vhost_user::{FrontendError, Wanted, connect_device};
use ringferry_virtio_net::Features;
use ringferry_virtio_net::driver::{ArenaError, PairConfig, PairError};

pub use args::GuestArgs;
use args::{Mode, required, wanted};
use bridge::End;
use counts::{Counts, QueuePair, Report};
use rings::Rings;
use session::Session;
use status::{Status, check_range, respond};
use taps::Taps;

/// Entries of the transmit queue at most: as many packets as can be on their way. More only adds
/// delay; each has a slot of 64 KiB.
const TRANSMIT_QUEUE: u16 = 256;

/// Time between attempts to connect.
const RETRY: Duration = Duration::from_millis(250);

/// Only the user that runs the program, and root, may connect to its control socket.
const CONTROL_MODE: u32 = 0o600;

/// How long a back end may take to answer a set-up message.
const PATIENCE: Duration = Duration::from_secs(5);

/// Why the program ended.
#[derive(Debug, thiserror::Error)]
pub enum GuestError {
    /// No tap.
    #[error(transparent)]
    Tap(#[from] TapError),
    /// The tap cannot be configured.
    #[error(transparent)]
    Interface(#[from] netif::InterfaceError),
    /// The socket to listen on cannot be had.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// No memory to share.
    #[error(transparent)]
    Arena(#[from] ArenaError),
    /// Queues that cannot be with these settings.
    #[error(transparent)]
    Pair(#[from] PairError),
    /// The tap was deleted under us.
    #[error("the tap {0} was deleted; start again to make a new one")]
    TapGone(String),
    /// The back end lacks what no driver can do without, or what the options ask for.
    #[error("the back end lacks required features: {}; {}", .0.names().join(" "), advice(*.0))]
    Unusable(Features),
    /// The ready descriptor.
    #[error("--ready-fd {0}: {1}")]
    ReadyFd(RawFd, io::Error),
    /// The system has no descriptors left, or the like.
    #[error("{0}")]
    Os(#[from] io::Error),
}

/// What to do about a back end without these features.
fn advice(missing: Features) -> &'static str {
    if missing.contains(Features::VERSION_1) {
        "it speaks only the legacy interface: use a back end of VIRTIO 1.0 or later"
    } else {
        "use --ring auto or --ring split"
    }
}

/// Why a session with a back end ended, or did not begin.
#[derive(Debug, thiserror::Error)]
enum SessionError {
    #[error(transparent)]
    Frontend(#[from] FrontendError),
    #[error(transparent)]
    Guest(#[from] GuestError),
}

impl From<io::Error> for SessionError {
    fn from(error: io::Error) -> Self {
        SessionError::Guest(error.into())
    }
}

/// The tap, and what outlives sessions.
struct Program<'a> {
    args: &'a GuestArgs,
    taps: Taps,
    signals: Signals,
    control: Option<ControlServer>,
    started: Instant,
    ready: Option<std::fs::File>,
    /// Pairs to use of those that there are: as many as were last asked for.
    combined: u16,
    /// By pair; of those that the last back end lacked, too.
    counts: Vec<Counts>,
    /// Statistics of the queue pairs that were last in use.
    queues: Vec<QueuePair>,
    /// The rings of the last back end, which ended without a word.
    kept: Option<Rings>,
}

/// What is printed at the end.
#[derive(serde::Serialize)]
struct Summary<'a> {
    #[serde(flatten)]
    counts: Counts,
    /// One entry per queue pair; none before the first back end.
    queues: &'a [QueuePair],
}

/// Runs `ringferry guest` until SIGTERM or SIGINT.
///
/// # Errors
/// See [`GuestError`]. A back end that is not there, goes away or misbehaves is no error: the program
/// says so and tries again. One that lacks VERSION_1, or the ring that was asked for, will never do,
/// and ends it.
pub fn run(args: &GuestArgs) -> Result<(), GuestError> {
    let ready = match args.ready_fd {
        Some(fd) => Some(inherited::take(fd).map_err(|error| GuestError::ReadyFd(fd, error))?.into()),
        None => None,
    };
    let signals = Signals::new(&[Signal::TERM, Signal::INT])?;
    let taps = Taps::open(args)?;
    let control = args.control.as_ref().map(|path| ControlServer::bind(path, CONTROL_MODE)).transpose()?;
    let listener = match args.mode {
        Mode::Listen => Some(Listener::bind(&args.socket)?),
        Mode::Connect => None,
    };
    let mut program = Program {
        args,
        taps,
        signals,
        control,
        started: Instant::now(),
        ready,
        combined: args.queues,
        counts: vec![Counts::default(); args.queues.into()],
        queues: Vec::new(),
        kept: None,
    };
    let mut last_failure = String::new();
    while let Some(stream) = program.meet(listener.as_ref(), &mut last_failure)? {
        match program.session(stream) {
            Ok(End::Signal) => break,
            Ok(End::Disconnected) => {
                tracing::info!("the back end has disconnected; waiting for it to come back");
                last_failure.clear();
            }
            Ok(End::TapGone) => return Err(GuestError::TapGone(args.tap.clone())),
            Ok(End::Broken(fault)) => tracing::warn!("the back end broke the ring ({fault}); starting anew"),
            Err(SessionError::Guest(error)) => return Err(error),
            Err(SessionError::Frontend(FrontendError::MissingFeatures(missing))) => {
                return Err(GuestError::Unusable(Features::from_bits_retain(missing)));
            }
            Err(SessionError::Frontend(error)) => {
                let failure = error.to_string();
                if failure != last_failure {
                    tracing::warn!("the back end cannot be used: {failure}; trying again");
                    last_failure = failure;
                }
            }
        }
        if program.pause(RETRY)? {
            break;
        }
    }
    if args.json {
        let summary = Summary { counts: program.counts.iter().copied().sum(), queues: &program.queues };
        let text = serde_json::to_string_pretty(&summary).map_err(io::Error::from)?;
        writeln!(io::stdout(), "{text}")?;
    }
    Ok(())
}

impl Program<'_> {
    /// Waits for a connection with a back end; `None` when a signal came first.
    fn meet(&mut self, listener: Option<&Listener>, said: &mut String) -> io::Result<Option<Stream>> {
        let path = self.args.socket.display();
        loop {
            let attempt = match listener {
                Some(listener) => listener.accept(),
                None => Stream::connect(&self.args.socket).map(Some),
            };
            match attempt {
                Ok(Some(stream)) => return Ok(Some(stream)),
                Ok(None) => {}
                Err(error) => {
                    let failure = format!("no back end at {path} yet ({error}); trying again");
                    if *said != failure {
                        tracing::info!("{failure}");
                        *said = failure;
                    }
                }
            }
            if self.pause(RETRY)? {
                return Ok(None);
            }
        }
    }

    /// Sleeps, unless a signal comes, which is then said. Requests are answered meanwhile.
    fn pause(&mut self, time: Duration) -> io::Result<bool> {
        let Self { args, signals, control, started, combined, counts, queues, .. } = self;
        let epoll = Epoll::new()?;
        epoll.add(&*signals, 0, Interest::READABLE)?;
        if let Some(control) = control {
            control.tick();
            epoll.add(&*control, 1, Interest::READABLE)?;
        }
        let status = Status {
            args,
            started: *started,
            up: false,
            features: Features::empty(),
            max: args.queues,
            combined: *combined,
            used: *combined,
            cpus: &[],
        };
        let answer = |request: Request| -> Result<Answer, String> {
            if let Request::Channels { combined: Some(wanted), .. } = request {
                check_range(wanted, args.queues)?;
                return Err("there is no back end now; try again when the link is up".into());
            }
            let report = |(pair, counts): (usize, &Counts)| Report {
                counts: *counts,
                queues: queues.get(pair).copied(),
            };
            status.answer(&request, || Ok(counts.iter().enumerate().map(report).collect()))
        };
        let deadline = Instant::now() + time;
        let mut events = EventBuf::with_capacity(2);
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            epoll.wait(&mut events, Some(left))?;
            if signals.next()?.is_some() {
                return Ok(true);
            }
            match control {
                Some(control) if !left.is_zero() => control.serve(&mut |request| respond(answer(request))),
                _ => return Ok(false),
            }
        }
    }

    /// Negotiates, starts the device and carries packets until something ends it.
    fn session(&mut self, stream: Stream) -> Result<End, SessionError> {
        let args = self.args;
        let wanted = Wanted {
            features: wanted(args).bits(),
            required: required(args).bits(),
            protocol: Wanted::NET_PROTOCOL,
        };
        let mut connection = connect_device(stream, &wanted)?;
        connection.frontend().set_timeout(PATIENCE);
        let features = Features::from_bits_retain(connection.negotiated().features);
        let negotiated = connection.negotiated();
        let pairs = if features.contains(Features::MQ) { negotiated.queue_num } else { 1 };
        let pairs = pairs.clamp(1, args.queues);
        if pairs < args.queues {
            tracing::info!(asked = args.queues, pairs, "the back end has fewer queue pairs");
        }
        let combined = self.combined.min(pairs);
        // The first is enough until there is more to do, unless it was not enough for the back end before.
        let used = if args.spread_at > 0 && self.taps.attached() == 1 { 1 } else { combined };
        // What the kernel may leave unfinished is what the back end finishes.
        self.taps.set_offloads(features.host_offloads()).map_err(GuestError::from)?;
        self.taps.attach(used).map_err(GuestError::from)?;
        let mtu = netif::mtu(&args.tap).map_err(GuestError::from)?;
        let config = PairConfig {
            receive: args.queue_size,
            transmit: args.queue_size.min(TRANSMIT_QUEUE),
            mtu: u16::try_from(mtu).unwrap_or(u16::MAX),
            max_segs: args.max_segs,
            rx: RxConfig { policy: args.buffers.into(), ..RxConfig::default() },
            ..PairConfig::default()
        };

        let kept = self.kept.take();
        let bases = kept.as_ref().and_then(|rings| rings.resume(features, config.mtu, pairs));
        let mut rings = match (kept, &bases) {
            (Some(rings), Some(_)) => rings,
            (kept, _) => {
                self.abandon(kept);
                Rings::new(features, &config, pairs)?
            }
        };
        if let Err(error) = rings.start(&mut connection, bases.as_deref(), used) {
            self.abandon(Some(rings));
            return Err(error.into());
        }
        tracing::info!(
            features = features.names().join(" "),
            pairs,
            combined,
            resumed = bases.is_some(),
            "the link is up"
        );
        if let Some(mut ready) = self.ready.take() {
            // Whoever asked may have gone; that is their business.
            let _ = ready.write_all(b"READY\n");
            let _ = ringferry_sys::systemd::ready();
        }
        let session =
            Session::new(args, &self.taps, &mut connection, features, self.started, [combined, used]);
        let (end, now) = session.run(&self.signals, self.control.as_mut(), &mut rings, &mut self.counts)?;
        // A back end with fewer pairs is no reason to use fewer of the next.
        if now != combined {
            self.combined = now;
        }
        self.queues = rings.pairs.iter().map(|rings| QueuePair::of(&rings.pair)).collect();
        match end {
            // Leave the back end in order. It may be gone, too.
            End::Signal => drop(connection.stop()),
            End::Disconnected => self.kept = Some(rings.keep(&mut connection)),
            End::Broken(_) => self.abandon(Some(rings)),
            End::TapGone => {}
        }
        Ok(end)
    }

    /// Gives up rings with what is in them.
    fn abandon(&mut self, rings: Option<Rings>) {
        let pairs = rings.into_iter().flat_map(|rings| rings.pairs);
        for (mut rings, counts) in pairs.zip(&mut self.counts) {
            counts.tx_lost += rings.sent_and_open();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_back_end_that_lacks_something_is_named_with_what_to_do() {
        let legacy = GuestError::Unusable(Features::VERSION_1 | Features::RING_PACKED).to_string();
        assert!(legacy.contains("VERSION_1 RING_PACKED") && legacy.contains("VIRTIO 1.0"), "{legacy}");
        let split = GuestError::Unusable(Features::RING_PACKED).to_string();
        assert_eq!(
            split,
            "the back end lacks required features: RING_PACKED; use --ring auto or --ring split"
        );
    }
}
