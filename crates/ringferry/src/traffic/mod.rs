//! `ringferry traffic`: real kernel TCP and UDP between two hosts, guests or namespaces, every payload byte
//! verified at the far end.
//!
//! One process per end. The client asks the server over a TCP control connection for a test ([`protocol`]);
//! payload ([`pattern`]) flows over connections of its own between one thread per session and end, of [`workers`] or
//! [`transactions`]; [`session`] owns a test from its first to its last message; [`report`] is what the client prints.

mod client;
mod latency;
mod pattern;
mod protocol;
mod report;
mod server;
mod session;
mod transactions;
mod workers;

pub use client::Progress;
pub use latency::Latency;
pub use report::Report;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::io;
use std::net::IpAddr;

/// The port a server listens on unless told otherwise.
pub const DEFAULT_PORT: u16 = 5210;

const EXAMPLES: &str = "\
Examples:
  ringferry traffic server
  ringferry traffic client --to 10.0.0.2 --mode tcp --seconds 10 --interval 1
  ringferry traffic client --to fd00::2 --mode udp --size 1472 --rate 2G
  ringferry traffic client --to 10.0.0.2 --mode rr --size 1 --json
  ringferry traffic client --to 10.0.0.2 --mode crr --sessions 100

The client exits with 1 when a payload byte was wrong, nothing arrived, or the test could not be finished.";

/// Generate and verify kernel TCP and UDP traffic between two ends
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[command(subcommand)]
    end: End,
}

#[derive(Debug, clap::Subcommand)]
enum End {
    /// Wait for clients and serve one test after another
    Server(ServerArgs),
    /// Run one test against a server and report it
    #[command(after_help = EXAMPLES)]
    Client(ClientArgs),
}

#[derive(Debug, clap::Args)]
struct ServerArgs {
    /// Address to listen on; all of both families by default
    #[arg(long, value_name = "ADDRESS")]
    bind: Option<IpAddr>,
    /// TCP port to listen on
    #[arg(long, default_value_t = DEFAULT_PORT)]
    port: u16,
    /// Serve one test, then exit: with 1 if it failed
    #[arg(long)]
    once: bool,
}

#[derive(Debug, clap::Args)]
struct ClientArgs {
    /// Address or name of the server
    #[arg(long, value_name = "ADDRESS")]
    to: String,
    /// TCP port of the server
    #[arg(long, default_value_t = DEFAULT_PORT)]
    port: u16,
    /// The test
    #[arg(long, value_enum, default_value_t = Mode::Tcp)]
    mode: Mode,
    /// How long to send, in seconds
    #[arg(long, default_value_t = 5.0, value_name = "SECONDS", value_parser = seconds)]
    seconds: f64,
    /// Bytes of a TCP write (131072), a UDP datagram's payload (1472, which is an MTU of 1500 over IPv4) or
    /// a request and its response (1)
    #[arg(long, value_name = "BYTES")]
    size: Option<usize>,
    /// How many times over to do it at once: so many connections, sockets or callers, each with a thread at
    /// either end
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=i64::from(protocol::MAX_SESSIONS)))]
    sessions: u16,
    /// Payload bits per second that each sender may send, like 500M or 2.5G; as fast as possible by default
    #[arg(long, value_name = "BITS", value_parser = rate)]
    rate: Option<u64>,
    /// Keep trying to reach the server for this many seconds
    #[arg(long, default_value_t = 0.0, value_name = "SECONDS", value_parser = seconds)]
    wait: f64,
    /// Print progress on stderr every so many seconds (at least 0.25)
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    interval: Option<f64>,
    /// Print progress on stderr as JSON lines, four a second
    #[arg(long, conflicts_with = "interval")]
    progress_json: bool,
    /// Print the report as one line of JSON
    #[arg(long)]
    json: bool,
}

/// The kind of a test.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// One TCP stream from the client to the server
    Tcp,
    /// One TCP stream from the server to the client
    TcpReverse,
    /// One TCP stream each way at once
    TcpBoth,
    /// UDP datagrams from the client to the server, without segmentation offload
    Udp,
    /// Request and response over TCP, one at a time: latency
    Rr,
    /// Connect, request, response and the connection's end, over and over
    Crr,
}

impl Mode {
    fn default_size(self) -> usize {
        match self {
            // As iperf3 writes.
            Mode::Tcp | Mode::TcpReverse | Mode::TcpBoth => 128 << 10,
            Mode::Udp => 1472,
            Mode::Rr | Mode::Crr => 1,
        }
    }

    /// Returns true if every request has its response, and what counts is how many.
    fn is_transactional(self) -> bool {
        matches!(self, Mode::Rr | Mode::Crr)
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Mode::Tcp => "tcp",
            Mode::TcpReverse => "tcp-reverse",
            Mode::TcpBoth => "tcp-both",
            Mode::Udp => "udp",
            Mode::Rr => "rr",
            Mode::Crr => "crr",
        })
    }
}

/// A reason why a test failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No connection to the server.
    #[error(
        "cannot reach {to} port {port}: {source}; is `ringferry traffic server --port {port}` running there?"
    )]
    Unreachable { to: String, port: u16, source: io::Error },
    #[error("cannot listen on {address}: {source}; choose another --port or --bind")]
    Listen { address: String, source: io::Error },
    #[error("the control connection failed: {0}; see the other end's output")]
    Control(io::Error),
    #[error("the data connection failed: {0}; is there a firewall or a too small MTU on the path?")]
    Data(io::Error),
    /// More sessions than there can be threads.
    #[error("cannot start a thread for each session: {0}; use fewer --sessions")]
    Threads(io::Error),
    /// The other end went away.
    #[error("the other end closed the connection before the test was over; see its output")]
    Closed,
    /// The path or the other end stopped.
    #[error("nothing moved for {} s; is the path still up, and is another test running on the server?", protocol::PATIENCE.as_secs())]
    Silent,
    /// The other end says why it cannot go on.
    #[error("the other end reports: {0}")]
    Peer(String),
    /// The client asked for something impossible.
    #[error("refused: {0}")]
    Refused(String),
    /// The other end is something else.
    #[error("the other end does not speak this protocol: {0}; use the same ringferry on both ends")]
    Protocol(String),
    #[error("payload was damaged on the way: {0} corrupt blocks")]
    Corrupt(u64),
    /// The path swallowed everything.
    #[error(
        "no payload arrived; send smaller datagrams (--size) if the path's MTU is small, or slower (--rate)"
    )]
    Nothing,
    /// A stream lost its end.
    #[error("{sent} bytes were sent but {arrived} arrived")]
    Cut { sent: u64, arrived: u64 },
}

/// Runs `ringferry traffic`. Prints the report on stdout; an error is for the caller to print, with exit
/// code 1.
pub fn run(args: &Args) -> Result<(), Error> {
    match &args.end {
        End::Server(args) => server::run(args),
        End::Client(args) => client::run(args),
    }
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(seconds) if (0.0..=86_400.0).contains(&seconds) => Ok(seconds),
        _ => Err("give a number of seconds between 0 and 86400".into()),
    }
}

fn rate(text: &str) -> Result<u64, String> {
    let (number, factor) = match text.char_indices().last() {
        Some((at, 'k' | 'K')) => (&text[..at], 1e3),
        Some((at, 'm' | 'M')) => (&text[..at], 1e6),
        Some((at, 'g' | 'G')) => (&text[..at], 1e9),
        _ => (text, 1.0),
    };
    match number.parse::<f64>() {
        Ok(value) if value * factor >= 1.0 && value * factor <= 1e15 => Ok((value * factor) as u64),
        _ => Err("give a number of bits per second, like 800000, 500M or 2.5G".into()),
    }
}

#[cfg(test)]
mod tests;
