//! `ringferry netfront`: a tap plugged into any netback, through our netfront.
//!
//! The kernel behind the tap plays the guest: what it sends goes through granted pages into the back end, what the back end
//! delivers is written to the tap. In a domain of Xen it takes the place of the kernel's xen-netfront, for an interface whose
//! class the kernel does not know, or that it has let go of.

mod bridge;

use std::io::{self, Write};
use std::net::IpAddr;
use std::os::fd::RawFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ringferry_packet::ether::Mac;
use ringferry_packet::vnet::Offloads;
use ringferry_sys::epoll::{Epoll, EventBuf, Interest};
use ringferry_sys::netif;
use ringferry_sys::ready::{Ready, ReadyError};
use ringferry_sys::signal::{Signal, Signals};
use ringferry_sys::tap::{Tap, TapConfig, TapError};
use ringferry_xen::domain::{DomId, Domain};
use ringferry_xen::provider::{OpenError, Provider};
use ringferry_xen::store::Client;
use ringferry_xen_net::netfront::PairConfig;
use ringferry_xen_net::offload::Accepts;
use ringferry_xen_net::xenbus::frontend_driver::FrontError;
use ringferry_xen_net::xenbus::{FrontConfig, FrontEvent, FrontendDriver, Session};

use crate::backoff::Backoff;
use crate::tap::{self, parse_address};
use bridge::{Bridge, Counts, Turn};

/// Shown below the options by `ringferry netfront --help`.
const EXAMPLES: &str = "\
Examples:
  In a domU whose interface 0 the kernel has let go of (echo vif-0 > /sys/bus/xen/drivers/vif/unbind):
    ringferry netfront --tap xn0 --address 10.0.0.2/24

  A class of its own, which no kernel driver takes, in dom0 or domU, with ringferry run --port xen-vif:xen,class=rfvif:
    ringferry netfront --tap xn0 --class rfvif --device 0 --queues 2";

/// Attaches a tap to a Xen network back end as a front end.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct NetfrontArgs {
    /// Name of the tap, made in the current network namespace if it does not exist there.
    #[arg(long, value_name = "NAME")]
    tap: String,

    /// Number of the interface in this domain.
    #[arg(long, value_name = "N", default_value_t = 0)]
    device: u32,

    /// Class of the interface in the store.
    #[arg(long, value_name = "NAME", default_value = "vif")]
    class: String,

    /// Queues to use, if the back end has so many. Each has 980 granted pages; a guest's kernel allows 1024 in all unless
    /// /sys/module/xen_gntalloc/parameters/limit says more.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=16))]
    queues: u16,

    /// The provider that plays the hypervisor.
    #[arg(long, value_enum, default_value_t = ProviderKind::Xen)]
    provider: ProviderKind,

    /// Socket of the broker of domains.
    #[arg(long, value_name = "PATH", required_if_eq("provider", "process"))]
    broker: Option<PathBuf>,

    /// Socket of the store, for this domain.
    #[arg(long, value_name = "PATH", required_if_eq("provider", "process"))]
    store: Option<PathBuf>,

    /// Number of this domain.
    #[arg(long, value_name = "N", required_if_eq("provider", "process"))]
    domain: Option<u16>,

    /// IPv4 or IPv6 address with prefix length to give to the tap; may be given several times.
    #[arg(long = "address", value_name = "ADDRESS/PREFIX", value_parser = parse_address)]
    addresses: Vec<(IpAddr, u8)>,

    /// MAC address of the tap [default: the one that the toolstack has chosen].
    #[arg(long, value_name = "ADDRESS")]
    mac: Option<Mac>,

    /// MTU of the tap [default: the one it has].
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u16).range(68..))]
    mtu: Option<u16>,

    /// Do not say that grants stay with their pages (feature-persistent).
    #[arg(long)]
    no_persistent: bool,

    /// Do not hand grants over on the control ring.
    #[arg(long)]
    no_static_grants: bool,

    /// One event channel for both directions.
    #[arg(long)]
    no_split_events: bool,

    /// Neither checksum nor segmentation offloads, in either direction.
    #[arg(long)]
    no_offloads: bool,

    /// Write "READY" and a newline to this descriptor when the link is up for the first time, then close it.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(RawFd).range(3..))]
    ready_fd: Option<RawFd>,

    /// At the end, print what was counted to standard output, as JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum ProviderKind {
    /// Xen, in one of whose domains we run.
    Xen,
    /// A broker whose domains are processes, for tests; not in every build.
    Process,
}

/// How long the back end may take to let go when we end. Without it the grants end with us all the same, and the hypervisor
/// waits for the back end.
const PARTING: Duration = Duration::from_secs(5);

/// Time between attempts to go on after a failure.
const RETRY: Duration = Duration::from_millis(500);

/// How long the rings must have been whole for the next failure to count as the first.
const STEADY: Duration = Duration::from_secs(60);

/// Most steps that follow from the store in one turn. A back end that keeps writing its state has one step for us after the
/// other, and signals and packets wait meanwhile.
const STEPS: usize = 16;

/// A reason why the program ended.
#[derive(Debug, thiserror::Error)]
pub enum NetfrontError {
    /// The tap cannot be opened.
    #[error(transparent)]
    Tap(#[from] TapError),
    /// The tap cannot be configured.
    #[error(transparent)]
    Interface(#[from] netif::InterfaceError),
    /// The tap was deleted under us.
    #[error("the tap {0} was deleted; start again to make a new one")]
    TapGone(String),
    /// The hypervisor or the store cannot be reached.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The interface cannot be used.
    #[error("the interface cannot be used: {0}")]
    Front(#[from] FrontError),
    /// The descriptor of `--ready-fd` is not open.
    #[error("--ready-fd {0}: {1}")]
    ReadyFd(RawFd, io::Error),
    /// The system has no descriptors left, or the like.
    #[error("{0}")]
    Os(#[from] io::Error),
}

/// The counters that are printed at the end.
#[derive(serde::Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Report<'a> {
    #[serde(flatten)]
    counts: &'a Counts,
    /// Times that a back end was connected.
    connections: u64,
    /// Pages that were granted when a back end was last connected, static ones among them.
    granted_pages: usize,
    /// Pages that were handed over on the control ring.
    static_grants: usize,
    /// Pages that the back end had not let go of when the interface was closed, as far as that can be known.
    left_mapped: usize,
}

const SIGNALS: u64 = 0;
const BUS: u64 = 1;
const TAP: u64 = 2;
const EVENTS: u64 = 3;

/// The tap, and what outlives sessions.
struct Program<'a> {
    args: &'a NetfrontArgs,
    tap: Tap,
    signals: Signals,
    front: FrontendDriver,
    ready: Option<Ready>,
    session: Option<Session>,
    bridge: Bridge,
    connections: u64,
    granted: (usize, usize),
    left_mapped: usize,
    /// When we were told to end; and until when the back end may take.
    ending: Option<Instant>,
    closed: bool,
    /// The rings were broken, and are made anew.
    rebuild: Rebuild,
    backoff: Backoff,
    connected_at: Instant,
    /// When the store is looked at again after a failure.
    resting: Option<Instant>,
}

/// The stage of handling broken rings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rebuild {
    No,
    /// The back end is to let go of them.
    LettingGo,
    /// Nothing is shared any more; when we begin anew.
    At(Instant),
}

/// The outcome of a look at the store.
#[derive(Debug, Default)]
struct BusTurn {
    /// There are other descriptors to watch now.
    changed: bool,
    /// There may be more to do, and the descriptors do not say so.
    more: bool,
}

/// Does steps until there are none, and no more than are good for whoever else waits; whether there may be more.
fn bounded<E>(mut step: impl FnMut() -> Result<bool, E>) -> Result<bool, E> {
    for _ in 0..STEPS {
        if !step()? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Runs `ringferry netfront` until SIGTERM or SIGINT.
///
/// # Errors
/// See [`NetfrontError`]. A back end that is not there, goes away or breaks a ring is no error: the program waits for the next,
/// or begins anew, later each time.
pub fn run(args: &NetfrontArgs) -> Result<(), NetfrontError> {
    let ready = args.ready_fd.map(Ready::take).transpose();
    let ready = ready.map_err(|ReadyError(fd, error)| NetfrontError::ReadyFd(fd, error))?;
    let signals = Signals::new(&[Signal::TERM, Signal::INT])?;
    let (domain, store) = connect(args)?;
    let accepts = if args.no_offloads { Accepts { sg: true, ..Accepts::default() } } else { Accepts::ALL };
    let config = FrontConfig {
        class: args.class.clone(),
        device: args.device,
        queues: args.queues,
        pair: PairConfig::default(),
        accepts,
        split_events: !args.no_split_events,
        persistent: !args.no_persistent,
        static_grants: !args.no_static_grants,
    };
    let front = FrontendDriver::new(store, domain, config)?;
    let tap = open_tap(args)?;
    let mut program = Program {
        args,
        tap,
        signals,
        front,
        ready,
        session: None,
        bridge: Bridge::new(accepts.offloads()),
        connections: 0,
        granted: (0, 0),
        left_mapped: 0,
        ending: None,
        closed: false,
        rebuild: Rebuild::No,
        backoff: Backoff::new(RETRY),
        connected_at: Instant::now(),
        resting: None,
    };
    program.serve()?;
    if args.json {
        let report = Report {
            counts: &program.bridge.counts,
            connections: program.connections,
            granted_pages: program.granted.0,
            static_grants: program.granted.1,
            left_mapped: program.left_mapped,
        };
        let text = serde_json::to_string_pretty(&report).map_err(io::Error::from)?;
        writeln!(io::stdout(), "{text}")?;
    }
    Ok(())
}

fn connect(args: &NetfrontArgs) -> Result<(Arc<dyn Domain>, Client), NetfrontError> {
    let provider = match (args.provider, &args.broker, &args.store, args.domain) {
        (ProviderKind::Process, Some(broker), Some(store), Some(domain)) => {
            Provider::Process { broker: broker.clone(), store: store.clone(), domain: DomId(domain) }
        }
        _ => Provider::Xen,
    };
    Ok(provider.open()?)
}

fn open_tap(args: &NetfrontArgs) -> Result<Tap, NetfrontError> {
    let tap = Tap::open(&TapConfig::new(args.tap.clone()))?;
    tap::set_up(tap.name(), args.mac, args.mtu, &args.addresses)?;
    Ok(tap)
}

impl Program<'_> {
    /// Carries packets, and follows the back end, until the end.
    fn serve(&mut self) -> Result<(), NetfrontError> {
        let mut events = EventBuf::with_capacity(64);
        let (mut epoll, mut tap_watched) = (self.watch()?, true);
        loop {
            if matches!(self.rebuild, Rebuild::At(time) if self.ending.is_none() && Instant::now() >= time) {
                self.rebuild = Rebuild::No;
                self.front.reopen()?;
            }
            let bus = self.bus()?;
            if bus.changed {
                (epoll, tap_watched) = (self.watch()?, true);
            }
            let late = self.ending.is_some_and(|until| Instant::now() >= until);
            if late && !self.closed {
                tracing::warn!("the back end does not let go of the interface");
            }
            if self.closed || late {
                return Ok(());
            }
            let turn = match &mut self.session {
                Some(session) if self.rebuild == Rebuild::No => {
                    self.bridge.turn(&mut session.pairs, &self.tap)
                }
                _ => Turn::Wait,
            };
            let timeout = match turn {
                Turn::Again if !bus.more => continue,
                Turn::Again | Turn::Look => Some(Duration::ZERO),
                Turn::Wait if bus.more => Some(Duration::ZERO),
                Turn::Wait => {
                    let reopens = if let Rebuild::At(time) = self.rebuild { Some(time) } else { None };
                    let next = [self.ending, self.resting, reopens].into_iter().flatten().min();
                    next.map(|until| until.saturating_duration_since(Instant::now()))
                }
                Turn::Broken(fault) => {
                    tracing::warn!("the back end broke a ring ({fault}); starting anew");
                    self.begin_anew();
                    Some(Duration::ZERO)
                }
            };
            // A tap whose packets there is no room for would wake us all the time.
            let watch = !self.bridge.tap_ready && self.session.is_some();
            if watch != tap_watched {
                epoll.modify(&self.tap, TAP, if watch { Interest::READABLE } else { Interest::empty() })?;
                tap_watched = watch;
            }
            epoll.wait(&mut events, timeout)?;
            for event in events.iter() {
                match event.token {
                    SIGNALS if self.signals.next()?.is_some() => self.end(),
                    TAP if event.hangup => return Err(NetfrontError::TapGone(self.args.tap.clone())),
                    TAP => self.bridge.tap_ready = true,
                    EVENTS.. => {
                        let pairs = self.session.iter().flat_map(|session| &session.pairs);
                        if let Some(pair) = pairs.into_iter().nth((event.token - EVENTS) as usize) {
                            pair.events().drain()?;
                        }
                    }
                    _ => {}
                }
            }
        }
    }

    /// Closes the interface, after which the program ends.
    fn end(&mut self) {
        if self.ending.is_none() {
            self.ending = Some(Instant::now() + PARTING);
            self.front.close();
            // Then there is nothing left to close.
            self.closed |= matches!(self.rebuild, Rebuild::At(_));
        }
    }

    /// Gives these rings up, and makes new ones once the back end has let go of them. The tap stays.
    fn begin_anew(&mut self) {
        if self.ending.is_none() && self.rebuild == Rebuild::No {
            self.backoff.ended(self.connected_at.elapsed() >= STEADY);
            self.rebuild = Rebuild::LettingGo;
            self.front.close();
        }
    }

    /// Does what the store asks for.
    fn bus(&mut self) -> Result<BusTurn, NetfrontError> {
        let mut turn = BusTurn::default();
        if self.resting.is_some_and(|until| Instant::now() < until) {
            return Ok(turn);
        }
        self.resting = None;
        turn.more = bounded(|| self.step(&mut turn.changed))?;
        Ok(turn)
    }

    /// Does one thing that the store asks for; whether there may be more.
    fn step(&mut self, changed: &mut bool) -> Result<bool, NetfrontError> {
        let event = match self.front.poll() {
            Ok(Some(event)) => event,
            Ok(None) => return Ok(false),
            Err(FrontError::Store(error)) if error.is_fatal() => {
                return Err(FrontError::Store(error).into());
            }
            Err(error) if self.ending.is_none() => {
                // Maybe the next back end, or more memory, is better; the tap is there for it.
                tracing::warn!("cannot go on with the back end: {error}; trying again");
                if self.session.is_some() {
                    self.begin_anew();
                }
                self.resting = Some(Instant::now() + RETRY);
                *changed = true;
                return Ok(false);
            }
            Err(error) => return Err(error.into()),
        };
        match event {
            FrontEvent::Connected(session) => self.connected(session)?,
            FrontEvent::Stop => {
                tracing::info!("the back end lets go");
                let pairs = self.session.take().map_or(Vec::new(), |session| session.pairs);
                self.front.stopped(pairs)?;
            }
            FrontEvent::Closed { mapped } => {
                self.left_mapped = mapped;
                self.closed = self.ending.is_some();
                if self.rebuild == Rebuild::LettingGo {
                    self.rebuild = Rebuild::At(Instant::now() + self.backoff.time());
                }
            }
            FrontEvent::Busy => return Ok(true),
        }
        *changed = true;
        Ok(true)
    }

    fn connected(&mut self, mut session: Session) -> Result<(), NetfrontError> {
        // What the kernel may leave unfinished is what the back end finishes.
        let offloads = if self.args.no_offloads { Offloads::empty() } else { session.accepts.offloads() };
        self.tap.set_offloads(tap::offloads(offloads))?;
        if let (Some(mac), None) = (session.mac, self.args.mac) {
            netif::set_mac(self.tap.name(), mac.0)?;
        }
        self.bridge.begin(&mut session.pairs);
        self.connections += 1;
        self.connected_at = Instant::now();
        self.granted = (self.front.granted(), self.front.static_grants());
        tracing::info!(queues = session.pairs.len(), granted = self.granted.0, "the link is up");
        self.session = Some(session);
        if let Some(ready) = self.ready.take() {
            ready.say();
            let _ = ringferry_sys::systemd::ready();
        }
        Ok(())
    }

    /// Everything that may wake us now.
    fn watch(&self) -> io::Result<Epoll> {
        let epoll = Epoll::new()?;
        epoll.add(&self.signals, SIGNALS, Interest::READABLE)?;
        epoll.add(&self.tap, TAP, Interest::READABLE)?;
        for fd in self.front.fds() {
            epoll.add(fd, BUS, Interest::READABLE)?;
        }
        let pairs = self.session.iter().flat_map(|session| &session.pairs);
        for (token, pair) in (EVENTS..).zip(pairs) {
            for fd in pair.events().fds() {
                epoll.add(fd, token, Interest::READABLE)?;
            }
        }
        Ok(epoll)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn d7_a_store_that_always_has_more_gets_its_turn_and_no_more() {
        let mut steps = 0;
        let mut endless = || {
            steps += 1;
            Ok::<_, ()>(true)
        };
        assert_eq!(bounded(&mut endless), Ok(true), "there is more, and everybody else is heard first");
        assert_eq!(steps, STEPS);
        let mut left = 3;
        let mut few = || {
            left -= 1;
            Ok::<_, ()>(left > 0)
        };
        assert_eq!(bounded(&mut few), Ok(false));
        assert_eq!(bounded(|| Err::<bool, _>("the store is gone")), Err("the store is gone"));
    }
}
