//! `ringferry guest`: a tap plugged into any vhost-user back end, as a virtio-net driver would be.
//!
//! The kernel behind the tap plays the guest: what it sends goes through our driver half and shared
//! memory into the back end, what the back end delivers is written to the tap. The tap stays while
//! back ends come and go; rings and memory stay too where the next back end can go on with them.

mod bridge;
mod queues;
mod read;
mod rings;

use std::io::{self, Write};
use std::net::IpAddr;
use std::os::fd::RawFd;
use std::path::PathBuf;
use std::time::Duration;

use ringferry_nic::rx::{PolicyKind, RxConfig};
use ringferry_packet::ether::Mac;
use ringferry_packet::vnet::Offloads;
use ringferry_sys::epoll::{Epoll, EventBuf, Interest};
use ringferry_sys::signal::{Signal, Signals};
use ringferry_sys::socket::{BindError, Listener, Stream};
use ringferry_sys::tap::{Offloads as TapOffloads, Tap, TapConfig, TapError};
use ringferry_sys::{inherited, netif};
use ringferry_vhost_user::{FrontendError, Wanted, connect_device};
use ringferry_virtio_net::Features;
use ringferry_virtio_net::driver::{ArenaError, MAX_SEGS, PairConfig, PairError};

use bridge::{Bridge, Counts, End};
use queues::QueuePair;
use rings::Rings;

/// Shown below the options by `ringferry guest --help`.
const EXAMPLES: &str = "\
Examples:
  A network namespace as a guest of a running switch:
    ip netns add blue
    ip netns exec blue ringferry guest --socket /run/ringferry/vm0.sock --tap eth0 --address 10.0.0.2/24

  A container's namespace, by process number:
    nsenter --net=/proc/PID/ns/net ringferry guest --socket /run/ringferry/vm1.sock --tap eth1

  Any other vhost-user back end that connects to us (DPDK's net_vhost with client=1):
    ringferry guest --socket /tmp/vhost.sock --mode listen --tap tap0 --rx small";

/// Attaches a tap to a vhost-user back end as a virtio-net driver.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct GuestArgs {
    /// Socket of the back end, such as the path of a vhost-user port of `ringferry run`.
    #[arg(long, value_name = "PATH")]
    socket: PathBuf,

    /// Whether to connect to the socket, again and again until someone listens, or to listen on it.
    #[arg(long, value_enum, default_value_t = Mode::Connect)]
    mode: Mode,

    /// Name of the tap, made in the current network namespace if it does not exist there.
    #[arg(long, value_name = "NAME")]
    tap: String,

    /// IPv4 or IPv6 address with prefix length to give to the tap; may be given several times.
    #[arg(long = "address", value_name = "ADDRESS/PREFIX", value_parser = parse_address)]
    addresses: Vec<(IpAddr, u8)>,

    /// MAC address of the tap [default: the one it has].
    #[arg(long, value_name = "ADDRESS")]
    mac: Option<Mac>,

    /// MTU of the tap [default: the one it has].
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u16).range(68..))]
    mtu: Option<u16>,

    /// How receive buffers are laid out, as far as the back end allows it.
    #[arg(long, value_enum, default_value_t = Rx::Mergeable)]
    rx: Rx,

    /// How long mergeable receive buffers are.
    #[arg(long, value_enum, default_value_t = Buffers::Best)]
    buffers: Buffers,

    /// Most pieces of memory that a packet is sent in; one of more is copied together.
    #[arg(long, value_name = "N", default_value_t = MAX_SEGS, value_parser = clap::value_parser!(u16).range(1..=64))]
    max_segs: u16,

    /// Read packets from the tap into buffers of so many bytes each, as a network stack that was fed in small
    /// pieces would hand them over [default: one buffer per packet].
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u32).range(64..))]
    pieces: Option<u32>,

    /// The layout of the rings. A back end that lacks the one asked for is an error.
    #[arg(long, value_enum, default_value_t = Ring::Auto)]
    ring: Ring,

    /// Whether to agree, where the back end can, that buffers are used in the order in which they
    /// were made available, which saves work on both sides.
    #[arg(long, value_enum, default_value_t = Switch::On)]
    in_order: Switch,

    /// Neither checksum nor segmentation offloads, in either direction.
    #[arg(long)]
    no_offloads: bool,

    /// Entries of the receive queue, a power of two. The transmit queue has at most 256.
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = parse_queue_size)]
    queue_size: u16,

    /// Write "READY" and a newline to this descriptor when the link is up for the first time, then close it.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(RawFd).range(3..))]
    ready_fd: Option<RawFd>,

    /// At the end, print what was counted to standard output, as JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Mode {
    Connect,
    Listen,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Rx {
    /// Buffers whose length follows the traffic, as many per packet as it needs.
    Mergeable,
    /// Buffers of 64 KiB, one per packet.
    Big,
    /// Buffers of one MTU, one per packet; no segmentation offload on receive.
    Small,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Buffers {
    /// A frame of MTU 1500: least memory for small packets.
    Mtu,
    /// A page: fewer pieces for large packets.
    Page,
    /// The moving average of packet lengths, between those two.
    Ewma,
    /// What costs least for the packets of late, up to 32 KiB.
    Best,
}

impl From<Buffers> for PolicyKind {
    fn from(buffers: Buffers) -> Self {
        match buffers {
            Buffers::Mtu => Self::FixedMtu,
            Buffers::Page => Self::FixedPage,
            Buffers::Ewma => Self::Ewma,
            Buffers::Best => Self::Best,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Ring {
    /// Packed if the back end has it, else split.
    Auto,
    /// The three-part ring that every back end has.
    Split,
    /// One ring of descriptors that both sides write (VIRTIO 1.1 and later).
    Packed,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Switch {
    On,
    Off,
}

fn parse_address(text: &str) -> Result<(IpAddr, u8), String> {
    let (address, prefix) = text.split_once('/').ok_or("write ADDRESS/PREFIX, such as 10.0.0.2/24")?;
    let address: IpAddr = address.parse().map_err(|error| format!("{error}"))?;
    let longest = if address.is_ipv4() { 32 } else { 128 };
    match prefix.parse() {
        Ok(prefix) if prefix <= longest => Ok((address, prefix)),
        _ => Err(format!("the prefix length is a number from 0 to {longest}")),
    }
}

fn parse_queue_size(text: &str) -> Result<u16, String> {
    let range = 64..=32768;
    match text.parse() {
        Ok(size) if range.contains(&size) && u16::is_power_of_two(size) => Ok(size),
        _ => Err("a queue has a power of two of entries, from 64 to 32768".into()),
    }
}

/// Entries of the transmit queue at most: as many packets as can be on their way. More only adds
/// delay; each has a slot of 64 KiB.
const TRANSMIT_QUEUE: u16 = 256;

/// Time between attempts to connect.
const RETRY: Duration = Duration::from_millis(250);

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
    tap: Tap,
    signals: Signals,
    ready: Option<std::fs::File>,
    counts: Counts,
    /// Statistics of the queue pair that was last in use.
    queues: Option<QueuePair>,
    /// The rings of the last back end, which ended without a word.
    kept: Option<Rings>,
}

/// What is printed at the end.
#[derive(serde::Serialize)]
struct Report<'a> {
    #[serde(flatten)]
    counts: &'a Counts,
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
    let tap = open_tap(args)?;
    let listener = match args.mode {
        Mode::Listen => Some(Listener::bind(&args.socket)?),
        Mode::Connect => None,
    };
    let mut program =
        Program { args, tap, signals, ready, counts: Counts::default(), queues: None, kept: None };
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
        let report = Report { counts: &program.counts, queues: program.queues.as_slice() };
        let text = serde_json::to_string_pretty(&report).map_err(io::Error::from)?;
        writeln!(io::stdout(), "{text}")?;
    }
    Ok(())
}

fn open_tap(args: &GuestArgs) -> Result<Tap, GuestError> {
    let tap = Tap::open(&TapConfig::new(args.tap.clone()))?;
    let name = tap.name();
    netif::quiet_ipv6(name);
    if let Some(mac) = args.mac {
        netif::set_mac(name, mac.0)?;
    }
    if let Some(mtu) = args.mtu {
        netif::set_mtu(name, mtu.into())?;
    }
    for &(address, prefix) in &args.addresses {
        netif::add_address(name, address, prefix)?;
    }
    netif::set_up(name, true)?;
    Ok(tap)
}

impl Program<'_> {
    /// Waits for a connection with a back end; `None` when a signal came first.
    fn meet(&self, listener: Option<&Listener>, said: &mut String) -> io::Result<Option<Stream>> {
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

    /// Sleeps, unless a signal comes, which is then said.
    fn pause(&self, time: Duration) -> io::Result<bool> {
        let epoll = Epoll::new()?;
        epoll.add(&self.signals, 0, Interest::READABLE)?;
        epoll.wait(&mut EventBuf::with_capacity(1), Some(time))?;
        Ok(self.signals.next()?.is_some())
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
        // What the kernel may leave unfinished is what the back end finishes.
        self.tap.set_offloads(tap_offloads(features.host_offloads())).map_err(GuestError::from)?;
        let mtu = netif::mtu(self.tap.name()).map_err(GuestError::from)?;
        let config = PairConfig {
            receive: args.queue_size,
            transmit: args.queue_size.min(TRANSMIT_QUEUE),
            mtu: u16::try_from(mtu).unwrap_or(u16::MAX),
            max_segs: args.max_segs,
            rx: RxConfig { policy: args.buffers.into(), ..RxConfig::default() },
            ..PairConfig::default()
        };

        let kept = self.kept.take();
        let bases = kept.as_ref().and_then(|rings| rings.resume(features, config.mtu));
        let mut rings = match (kept, bases) {
            (Some(rings), Some(_)) => rings,
            (kept, _) => {
                self.abandon(kept);
                Rings::new(features, &config)?
            }
        };
        if let Err(error) = rings.start(&mut connection, bases) {
            self.abandon(Some(rings));
            return Err(error.into());
        }
        tracing::info!(features = features.names().join(" "), resumed = bases.is_some(), "the link is up");
        if let Some(mut ready) = self.ready.take() {
            // Whoever asked may have gone; that is their business.
            let _ = ready.write_all(b"READY\n");
            let _ = ringferry_sys::systemd::ready();
        }
        let bridge = Bridge {
            tap: &self.tap,
            signals: &self.signals,
            connection: &mut connection,
            rings: &mut rings,
            counts: &mut self.counts,
            pieces: args.pieces.map(|bytes| bytes as usize),
        };
        let end = bridge.run()?;
        self.queues = Some(QueuePair::of(&rings.pair));
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
        if let Some(mut rings) = rings {
            self.counts.tx_lost += rings.sent_and_open();
        }
    }
}

/// The features without which there is nothing to be done.
fn required(args: &GuestArgs) -> Features {
    match args.ring {
        Ring::Packed => Features::VERSION_1 | Features::RING_PACKED,
        Ring::Auto | Ring::Split => Features::VERSION_1,
    }
}

/// The features to ask for.
fn wanted(args: &GuestArgs) -> Features {
    let mut features = Features::DEVICE;
    match args.rx {
        Rx::Mergeable => {}
        Rx::Big => features.remove(Features::MRG_RXBUF),
        Rx::Small => features.remove(Features::MRG_RXBUF | Features::GUEST_SEGMENTATION),
    }
    if args.ring == Ring::Split {
        features.remove(Features::RING_PACKED);
    }
    if args.in_order == Switch::Off {
        features.remove(Features::IN_ORDER);
    }
    if args.no_offloads {
        features.remove(Features::CSUM | Features::GUEST_CSUM);
    }
    features.consistent()
}

fn tap_offloads(host: Offloads) -> TapOffloads {
    let pairs = [
        (Offloads::CSUM, TapOffloads::CSUM),
        (Offloads::TSO4, TapOffloads::TSO4),
        (Offloads::TSO6, TapOffloads::TSO6),
        (Offloads::ECN, TapOffloads::ECN),
        (Offloads::USO, TapOffloads::USO4 | TapOffloads::USO6),
    ];
    let taken = pairs.into_iter().filter(|(offload, _)| host.contains(*offload));
    taken.map(|(_, tap)| tap).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_need_a_prefix_that_fits() {
        assert_eq!(parse_address("10.0.0.2/24").unwrap(), ("10.0.0.2".parse().unwrap(), 24));
        assert_eq!(parse_address("fd00::1/64").unwrap().1, 64);
        for text in ["10.0.0.2", "10.0.0.2/33", "fd00::1/129", "x/8", "10.0.0.2/"] {
            assert!(parse_address(text).is_err(), "{text}");
        }
    }

    #[test]
    fn queue_sizes_are_powers_of_two() {
        assert_eq!(parse_queue_size("1024"), Ok(1024));
        for text in ["0", "100", "32", "65536", "x"] {
            assert!(parse_queue_size(text).is_err(), "{text}");
        }
    }

    fn args(options: &str) -> GuestArgs {
        #[derive(clap::Parser)]
        struct Cli {
            #[command(flatten)]
            args: GuestArgs,
        }
        let words = ["guest", "--socket", "s", "--tap", "t"].into_iter().chain(options.split_whitespace());
        <Cli as clap::Parser>::try_parse_from(words).unwrap().args
    }

    #[test]
    fn ring_and_order_are_taken_where_they_are_offered_unless_told_otherwise() {
        let both = Features::RING_PACKED | Features::IN_ORDER;
        for (options, wants, needs) in [
            ("", both, Features::empty()),
            ("--ring auto --in-order on", both, Features::empty()),
            ("--ring split", Features::IN_ORDER, Features::empty()),
            ("--ring packed --in-order off", Features::RING_PACKED, Features::RING_PACKED),
        ] {
            let args = args(options);
            assert_eq!(wanted(&args) & both, wants, "{options}");
            assert_eq!(required(&args), Features::VERSION_1 | needs, "{options}");
        }
    }

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

    #[test]
    fn the_kernel_leaves_unfinished_only_what_the_back_end_finishes() {
        assert_eq!(tap_offloads(Offloads::empty()), TapOffloads::empty());
        assert_eq!(tap_offloads(Features::DEVICE.host_offloads()), TapOffloads::all());
    }
}
