//! The command line of `ringferry guest`, and the features that follow from it.

use std::net::IpAddr;
use std::os::fd::RawFd;
use std::path::PathBuf;

use ringferry_nic::rx::PolicyKind;
use ringferry_packet::ether::Mac;
use ringferry_vhost_user::message::MAX_VIRTQUEUES;
use ringferry_virtio_net::Features;
use ringferry_virtio_net::driver::MAX_SEGS;

use crate::tap::parse_address;

/// Most queue pairs that vhost-user can address.
const MAX_PAIRS: i64 = MAX_VIRTQUEUES as i64 / 2;

/// Default of `--spread-at`: short of a whole processor, as a thread that has to wait for one at times never has all of it.
const SPREAD_AT: u8 = 80;

/// Shown below the options by `ringferry guest --help`.
const EXAMPLES: &str = "\
Examples:
  A network namespace as a guest of a running switch:
    ip netns add blue
    ip netns exec blue ringferry guest --socket /run/ringferry/vm0.sock --tap eth0 --address 10.0.0.2/24

  A container's namespace, by process number:
    nsenter --net=/proc/PID/ns/net ringferry guest --socket /run/ringferry/vm1.sock --tap eth1

  With four queue pairs, two of them in use from then on:
    ringferry guest --socket /run/ringferry/vm0.sock --tap eth0 --queues 4 --control /run/ringferry/eth0.ctl
    ringferry ctl --control /run/ringferry/eth0.ctl channels eth0 combined 2

  Any other vhost-user back end that connects to us (DPDK's net_vhost with client=1):
    ringferry guest --socket /tmp/vhost.sock --mode listen --tap tap0 --rx small";

/// Attaches a tap to a vhost-user back end as a virtio-net driver.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct GuestArgs {
    /// Socket of the back end, such as the path of a vhost-user port of `ringferry run`.
    #[arg(long, value_name = "PATH")]
    pub(super) socket: PathBuf,

    /// Whether to connect to the socket, again and again until someone listens, or to listen on it.
    #[arg(long, value_enum, default_value_t = Mode::Connect)]
    pub(super) mode: Mode,

    /// Name of the tap, made in the current network namespace if it does not exist there.
    #[arg(long, value_name = "NAME")]
    pub(super) tap: String,

    /// IPv4 or IPv6 address with prefix length to give to the tap; may be given several times.
    #[arg(long = "address", value_name = "ADDRESS/PREFIX", value_parser = parse_address)]
    pub(super) addresses: Vec<(IpAddr, u8)>,

    /// MAC address of the tap [default: the one it has].
    #[arg(long, value_name = "ADDRESS")]
    pub(super) mac: Option<Mac>,

    /// MTU of the tap [default: the one it has].
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u16).range(68..))]
    pub(super) mtu: Option<u16>,

    /// How receive buffers are laid out, as far as the back end allows it.
    #[arg(long, value_enum, default_value_t = Rx::Mergeable)]
    pub(super) rx: Rx,

    /// How long mergeable receive buffers are.
    #[arg(long, value_enum, default_value_t = Buffers::Best)]
    pub(super) buffers: Buffers,

    /// Most pieces of memory that a packet is sent in; one of more is copied together.
    #[arg(long, value_name = "N", default_value_t = MAX_SEGS, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(super) max_segs: u16,

    /// Read packets from the tap into buffers of so many bytes each, as a network stack that was fed in small
    /// pieces would hand them over [default: one buffer per packet].
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u32).range(64..))]
    pub(super) pieces: Option<u32>,

    /// The layout of the rings. A back end that lacks the one asked for is an error.
    #[arg(long, value_enum, default_value_t = Ring::Auto)]
    pub(super) ring: Ring,

    /// Whether to agree, where the back end can, that buffers are used in the order in which they
    /// were made available, which saves work on both sides.
    #[arg(long, value_enum, default_value_t = Switch::On)]
    pub(super) in_order: Switch,

    /// Neither checksum nor segmentation offloads, in either direction.
    #[arg(long)]
    pub(super) no_offloads: bool,

    /// Entries of the receive queue, a power of two. The transmit queue has at most 256.
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = parse_queue_size)]
    pub(super) queue_size: u16,

    /// Queue pairs, each with a thread and a tap queue of its own; fewer if the back end has fewer. A tap that exists must
    /// have been made with `multi_queue` for more than one.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=MAX_PAIRS))]
    pub(super) queues: u16,

    /// Socket for `ringferry ctl --control PATH`, which shows and changes the queue pairs in use [default: none].
    #[arg(long, value_name = "PATH")]
    pub(super) control: Option<PathBuf>,

    /// Load of a pair, in per cent of a processor, from which flows are spread over all pairs in use, if processors are
    /// free for that. With less to do they stay on the first pair, where more packets make one batch. 0 spreads them always.
    #[arg(long, value_name = "PER CENT", default_value_t = SPREAD_AT, value_parser = clap::value_parser!(u8).range(..=100))]
    pub(super) spread_at: u8,

    /// Whether the thread of each pair stays on a processor of its own while flows are spread, where there are as many
    /// as pairs in use.
    #[arg(long, value_enum, default_value_t = Switch::On)]
    pub(super) pin: Switch,

    /// Write "READY" and a newline to this descriptor when the link is up for the first time, then close it.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(RawFd).range(3..))]
    pub(super) ready_fd: Option<RawFd>,

    /// At the end, print what was counted to standard output, as JSON.
    #[arg(long)]
    pub(super) json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Mode {
    Connect,
    Listen,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Rx {
    /// Buffers whose length follows the traffic, as many per packet as it needs.
    Mergeable,
    /// Buffers of 64 KiB, one per packet.
    Big,
    /// Buffers of one MTU, one per packet; no segmentation offload on receive.
    Small,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Buffers {
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
pub(super) enum Ring {
    /// Packed if the back end has it, else split.
    Auto,
    /// The three-part ring that every back end has.
    Split,
    /// One ring of descriptors that both sides write (VIRTIO 1.1 and later).
    Packed,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Switch {
    On,
    Off,
}

fn parse_queue_size(text: &str) -> Result<u16, String> {
    let range = 64..=32768;
    match text.parse() {
        Ok(size) if range.contains(&size) && u16::is_power_of_two(size) => Ok(size),
        _ => Err("a queue has a power of two of entries, from 64 to 32768".into()),
    }
}

/// The features without which there is nothing to be done.
pub(super) fn required(args: &GuestArgs) -> Features {
    match args.ring {
        Ring::Packed => Features::VERSION_1 | Features::RING_PACKED,
        Ring::Auto | Ring::Split => Features::VERSION_1,
    }
}

/// The features to ask for.
pub(super) fn wanted(args: &GuestArgs) -> Features {
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
    // The control queue that MQ needs is ours, and nothing a back end has to do with.
    let pairs = if args.queues > 1 { Features::MQ } else { Features::empty() };
    features.consistent() | pairs
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn several_pairs_are_asked_for_only_where_they_are_wanted() {
        assert!(!wanted(&args("")).contains(Features::MQ));
        assert!(wanted(&args("--queues 2")).contains(Features::MQ));
        assert_eq!(required(&args("--queues 2")), Features::VERSION_1);
    }
}
