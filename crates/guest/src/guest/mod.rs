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
//! | `aside` | set-up and close of connections, which a back end may hold up | threads for that |
//! | `session` | what happens while there is a back end; changes of the number of pairs | the pairs' threads |
//! | `bridge` | the data path: one pair, one thread | while it runs, a pair |
//! | `read` | from the tap into buffers | nothing |
//! | `watch` | freeing a thread that a back end holds in a kick | nothing |
//! | `counts` | what is counted | nothing |
//! | `status` | answers on the control socket | nothing |

mod args;
mod aside;
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
use ringferry_sys::eventfd::EventFd;
use ringferry_sys::netif;
use ringferry_sys::ready::{Ready, ReadyError};
use ringferry_sys::signal::{Signal, Signals};
use ringferry_sys::socket::{BindError, Listener, Stream};
use ringferry_sys::tap::TapError;
use ringferry_vhost_user::message::ProtocolFeatures;
use ringferry_vhost_user::{Connection, FrontendError, Wanted, connect_device_until};
use ringferry_virtio_net::Features;
use ringferry_virtio_net::driver::{ArenaError, PairConfig, PairError};

use crate::backoff::Backoff;
pub use args::GuestArgs;
use args::{Mode, required, wanted};
use aside::{Aside, Job};
use bridge::End;
use counts::{Counts, QueuePair, Report};
use rings::{PairRings, Rings};
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

/// How long a back end may take to answer a message.
const PATIENCE: Duration = Duration::from_secs(5);

/// How long a back end may take for the whole set-up. One that maps (and touches) much memory needs seconds.
const SET_UP: Duration = Duration::from_secs(10);

/// How much longer than that we wait for the thread that does it, which gives up by itself.
const LEEWAY: Duration = Duration::from_secs(1);

/// How long a session must last to be worth the same again, if nothing passed in it.
const STEADY: Duration = Duration::from_secs(10);

/// How long one that connected to us may take to say something while others wait, too; and after how long it is said
/// that a back end is waited for.
const SILENCE: Duration = Duration::from_secs(1);

/// How long a back end may take to let go of the rings when we end.
const PARTING: Duration = Duration::from_secs(2);

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
    #[error("it is not set up within {SET_UP:?}")]
    Slow,
    #[error("it says nothing, and another one waits")]
    Silent,
    #[error(transparent)]
    Guest(#[from] GuestError),
}

impl GuestError {
    /// Whether another back end, or this one after an update, may do better.
    fn is_of_back_end(&self) -> bool {
        // Features decide how much memory queues need, and whether they can be.
        matches!(self, GuestError::Unusable(_) | GuestError::Arena(_) | GuestError::Pair(_))
    }
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
    ready: Option<Ready>,
    /// Pairs to use of those that there are: as many as were last asked for.
    combined: u16,
    /// By pair; of those that the last back end lacked, too.
    counts: Vec<Counts>,
    /// Statistics of the queue pairs that were last in use.
    queues: Vec<QueuePair>,
    /// The rings of the last back end, which ended without a word.
    kept: Option<Rings>,
    aside: Aside,
    backoff: Backoff,
    /// A back end has served us before.
    was_up: bool,
    /// It was said that this one is waited for.
    has_waited: bool,
}

/// What a session is to begin with.
struct Plan {
    /// The features agreed on.
    features: Features,
    /// Pairs that may be used, and of those the ones that are in use at first.
    combined: u16,
    used: u16,
    /// Where the rings go on; `None`: they are new.
    bases: Option<Vec<u32>>,
}

/// A device that was started.
struct Up {
    connection: Connection,
    rings: Rings,
    plan: Plan,
}

/// What a wait ended with.
enum Woken {
    /// The time is over.
    Late,
    /// SIGTERM or SIGINT.
    Signal,
    /// A job is done.
    Done,
    /// Another back end wants to connect.
    Rival,
}

/// What is printed at the end.
#[derive(serde::Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Summary<'a> {
    #[serde(flatten)]
    counts: Counts,
    /// One entry per queue pair; none before the first back end.
    queues: &'a [QueuePair],
}

/// Runs `ringferry guest` until SIGTERM or SIGINT.
///
/// # Errors
/// See [`GuestError`]. A back end that is not there, goes away or misbehaves is no error: the program
/// says so and tries again, and later each time that nothing comes of it. One that lacks VERSION_1, or the ring that was asked
/// for, will never do, and ends it, if it is the first: later the tap has addresses and routes that would go with it.
pub fn run(args: &GuestArgs) -> Result<(), GuestError> {
    let ready = args.ready_fd.map(Ready::take).transpose();
    let ready = ready.map_err(|ReadyError(fd, error)| GuestError::ReadyFd(fd, error))?;
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
        aside: Aside::default(),
        backoff: Backoff::new(RETRY),
        was_up: false,
        has_waited: false,
    };
    let mut last_failure = String::new();
    while let Some(stream) = program.meet(listener.as_ref(), &mut last_failure)? {
        let ended = program.session(stream, listener.as_ref());
        match ended {
            Ok(End::Signal) => break,
            Ok(End::Disconnected) => {
                tracing::info!("the back end has disconnected; waiting for it to come back");
                last_failure.clear();
            }
            Ok(End::TapGone) => return Err(GuestError::TapGone(args.tap.clone())),
            Ok(End::HeldInKick) => {
                tracing::warn!(
                    "the back end held a thread in a kick (its eventfd is full and waits); starting anew"
                );
            }
            Ok(End::Refused) => tracing::warn!("the back end says that a ring is broken; starting anew"),
            Ok(End::Broken(fault)) => tracing::warn!("the back end broke the ring ({fault}); starting anew"),
            Err(SessionError::Silent) => {
                tracing::warn!("the back end says nothing, and another one waits: that one is next");
                continue;
            }
            Err(error) => {
                let error = match error {
                    SessionError::Frontend(FrontendError::MissingFeatures(missing)) => {
                        SessionError::Guest(GuestError::Unusable(Features::from_bits_retain(missing)))
                    }
                    error => error,
                };
                let failure = error.to_string();
                if let SessionError::Guest(error) = error
                    && !(program.was_up && error.is_of_back_end())
                {
                    return Err(error);
                }
                if failure != last_failure {
                    tracing::warn!("the back end cannot be used: {failure}; trying again");
                    last_failure = failure;
                }
            }
        }
        let time = program.backoff.time();
        if program.pause(time)? {
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
                _ if self.aside.is_full() => Err(io::Error::other("earlier ones hold up their own close")),
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
        Ok(matches!(self.wait(Instant::now() + time, None, None)?, Woken::Signal))
    }

    /// Waits for a job, or for another back end to connect, and no longer than until `deadline`. Requests are answered
    /// meanwhile.
    fn wait(
        &mut self,
        deadline: Instant,
        job: Option<&EventFd>,
        rival: Option<&Listener>,
    ) -> io::Result<Woken> {
        let Self { args, signals, control, started, combined, counts, queues, .. } = self;
        let epoll = Epoll::new()?;
        epoll.add(&*signals, 0, Interest::READABLE)?;
        if let Some(control) = control {
            control.tick();
            epoll.add(&*control, 1, Interest::READABLE)?;
        }
        if let Some(job) = job {
            epoll.add(job, 2, Interest::READABLE)?;
        }
        if let Some(rival) = rival {
            epoll.add(rival, 3, Interest::READABLE)?;
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
                ..Report::default()
            };
            status.answer(&request, || Ok(counts.iter().enumerate().map(report).collect()))
        };
        let mut events = EventBuf::with_capacity(4);
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            epoll.wait(&mut events, Some(left))?;
            if signals.next()?.is_some() {
                return Ok(Woken::Signal);
            }
            let tokens = || events.iter().map(|event| event.token);
            if tokens().any(|token| token == 2) {
                return Ok(Woken::Done);
            }
            if tokens().any(|token| token == 3) {
                return Ok(Woken::Rival);
            }
            match control {
                _ if left.is_zero() => return Ok(Woken::Late),
                Some(control) => control.serve(&mut |request| respond(answer(request))),
                None => {}
            }
        }
    }

    /// Waits for a step of the set-up, which is done by `deadline`; `None` when a signal came first.
    fn finish<T>(
        &mut self,
        job: Job<T>,
        deadline: Instant,
        rival: Option<&Listener>,
    ) -> Result<Option<T>, SessionError> {
        let quiet = deadline.min(Instant::now() + SILENCE);
        let mut woken = self.wait(quiet, Some(&job.done), None)?;
        if matches!(woken, Woken::Late) {
            if !std::mem::replace(&mut self.has_waited, true) {
                tracing::info!(
                    "the back end at {} has not answered for {SILENCE:?}: it may have another front end, or map much memory",
                    self.args.socket.display()
                );
            }
            woken = self.wait(deadline, Some(&job.done), rival)?;
        }
        match woken {
            Woken::Done => job.result().map(Some).ok_or(SessionError::Slow),
            Woken::Signal => Ok(None),
            Woken::Rival => Err(SessionError::Silent),
            Woken::Late => Err(SessionError::Slow),
        }
    }

    /// Negotiates, starts the device and carries packets until something ends it.
    fn session(&mut self, stream: Stream, listener: Option<&Listener>) -> Result<End, SessionError> {
        let ended = self.set_up(stream, listener).and_then(|up| match up {
            Some(up) => self.carry(up),
            None => Ok((End::Signal, true)),
        });
        // Those who wait behind one that said nothing have done nothing wrong.
        if !matches!(ended, Err(SessionError::Silent)) {
            self.backoff.ended(matches!(ended, Ok((End::Disconnected, true))));
        }
        ended.map(|(end, _)| end)
    }

    /// Negotiates and starts the device; `None` when a signal came first.
    fn set_up(&mut self, stream: Stream, listener: Option<&Listener>) -> Result<Option<Up>, SessionError> {
        let deadline = Instant::now() + SET_UP;
        let wanted = Wanted {
            features: wanted(self.args).bits(),
            required: required(self.args).bits(),
            // What is on its way is known from private memory, and a front end that asks for no region is passed no
            // descriptors.
            protocol: Wanted::NET_PROTOCOL - ProtocolFeatures::INFLIGHT_SHMFD,
        };
        let job = self.aside.start("connect", move || {
            let mut connection = connect_device_until(stream, &wanted, Some(deadline))?;
            connection.frontend().set_timeout(PATIENCE);
            Ok(connection)
        })?;
        // The thread ends at the deadline by itself, if nothing else holds it up.
        let Some(connection) = self.finish::<Result<_, FrontendError>>(job, deadline + LEEWAY, listener)?
        else {
            return Ok(None);
        };
        let connection = connection?;
        let (mut rings, plan) = match self.prepare(&connection) {
            Ok(prepared) => prepared,
            Err(error) => {
                self.aside.let_go(connection);
                return Err(error.into());
            }
        };
        let open: Vec<_> = rings.pairs.iter_mut().map(PairRings::sent_and_open).collect();
        let job = self.aside.start("start", move || {
            let mut connection = connection;
            let started = rings.start(&mut connection, plan.bases.as_deref(), plan.used);
            (Up { connection, rings, plan }, started)
        })?;
        match self.finish(job, deadline + LEEWAY, None) {
            Ok(Some((up, Ok(())))) => Ok(Some(up)),
            Ok(Some((up, Err(error)))) => {
                self.aside.let_go(up.connection);
                self.abandon(Some(up.rings));
                Err(error.into())
            }
            Ok(None) => Ok(None),
            Err(error) => {
                // The rings are left behind with the thread.
                self.counts.iter_mut().zip(open).for_each(|(counts, open)| counts.tx_lost += open);
                Err(error)
            }
        }
    }

    /// Makes the tap and the rings what this back end needs.
    fn prepare(&mut self, connection: &Connection) -> Result<(Rings, Plan), GuestError> {
        let args = self.args;
        let negotiated = connection.negotiated();
        let features = Features::from_bits_retain(negotiated.features);
        let pairs = if features.contains(Features::MQ) { negotiated.queue_num } else { 1 };
        let pairs = pairs.clamp(1, args.queues);
        if pairs < args.queues {
            tracing::info!(asked = args.queues, pairs, "the back end has fewer queue pairs");
        }
        let combined = self.combined.min(pairs);
        // The first is enough until there is more to do, unless it was not enough for the back end before.
        let used = if args.spread_at > 0 && self.taps.attached() == 1 { 1 } else { combined };
        // What the kernel may leave unfinished is what the back end finishes.
        self.taps.set_offloads(features.host_offloads())?;
        self.taps.attach(used)?;
        let mtu = netif::mtu(&args.tap)?;
        let config = PairConfig {
            receive: args.queue_size,
            transmit: args.queue_size.min(TRANSMIT_QUEUE),
            mtu: u16::try_from(mtu).unwrap_or(u16::MAX),
            max_segs: args.max_segs,
            rx: RxConfig { policy: args.buffers.into(), ..RxConfig::default() },
            ..PairConfig::default()
        };

        let mut kept = self.kept.take();
        let bases = kept.as_mut().and_then(|rings| rings.resume(features, config.mtu, pairs));
        let rings = match (kept, &bases) {
            (Some(rings), Some(_)) => rings,
            (kept, _) => {
                self.abandon(kept);
                Rings::new(features, &config, pairs)?
            }
        };
        Ok((rings, Plan { features, combined, used, bases }))
    }

    /// Carries packets until something ends it; says why, and whether anything came of it.
    fn carry(&mut self, up: Up) -> Result<(End, bool), SessionError> {
        let Up { mut connection, mut rings, plan: Plan { features, combined, used, bases } } = up;
        tracing::info!(
            features = features.names().join(" "),
            pairs = rings.pairs.len(),
            combined,
            resumed = bases.is_some(),
            "the link is up"
        );
        (self.was_up, self.has_waited) = (true, false);
        if let Some(ready) = self.ready.take() {
            ready.say();
            let _ = ringferry_sys::systemd::ready();
        }
        connection.frontend().set_deadline(None);
        let (since, given_back) = (Instant::now(), rings.given_back());
        let session =
            Session::new(self.args, &self.taps, &mut connection, features, self.started, [combined, used]);
        let ended = session.run(&self.signals, self.control.as_mut(), &mut rings, &mut self.counts);
        if let Ok((End::Signal, _)) = ended {
            // Leave the back end in order. It may be gone, too.
            connection.frontend().set_deadline(Some(Instant::now() + PARTING));
            let _ = connection.stop();
        }
        self.aside.let_go(connection);
        let (end, now) = ended?;
        // A back end with fewer pairs is no reason to use fewer of the next.
        if now != combined {
            self.combined = now;
        }
        self.queues = rings.pairs.iter().map(|rings| QueuePair::of(&rings.pair)).collect();
        let well = rings.given_back() != given_back || since.elapsed() >= STEADY;
        match end {
            End::Signal | End::TapGone => {}
            End::Disconnected => self.kept = Some(rings),
            End::Broken(_) | End::Refused | End::HeldInKick => self.abandon(Some(rings)),
        }
        Ok((end, well))
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
