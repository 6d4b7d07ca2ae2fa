//! The end that asks for a test and reports it.

use super::protocol::{Control, Message, PATIENCE, Test, VERSION};
use super::report::Report;
use super::session::{self, Data, End, Socket};
use super::workers::{prepare_tcp, prepare_udp};
use super::{ClientArgs, Error, Mode};
use ringferry_control::text::{bit_rate, scaled};
use serde::{Deserialize, Serialize};
use std::io;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs, UdpSocket};
use std::time::{Duration, Instant};

/// How long one attempt to connect may take: a lost SYN is sent again after 1 s and 3 s.
const CONNECT: Duration = Duration::from_secs(5);
/// Pause between attempts while `--wait` lasts.
const RETRY: Duration = Duration::from_millis(100);

/// One line of `--progress-json`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Progress {
    /// Seconds since the start of the test.
    pub seconds: f64,
    /// Payload bytes that arrived since the line before.
    pub bytes: u64,
    /// Payload bits per second since the line before.
    pub bits_per_second: f64,
    /// Datagrams or transactions per second since the line before; 0 for TCP streams.
    pub packets_per_second: f64,
}

/// Runs the test and prints its report on stdout. Errors with the report's verdict.
pub fn run(args: &ClientArgs) -> Result<(), Error> {
    let report = measure(args)?;
    if args.json {
        let json = serde_json::to_string(&report).map_err(|error| Error::Protocol(error.to_string()))?;
        println!("{json}");
    } else {
        println!("{report}");
    }
    report.verdict()
}

/// Runs the test.
pub fn measure(args: &ClientArgs) -> Result<Report, Error> {
    let stream = reach(&args.to, args.port, Duration::from_secs_f64(args.wait))?;
    let server = stream.peer_addr().map_err(Error::Control)?;
    let mut local = stream.local_addr().map_err(Error::Control)?;
    let mut control = Control::new(stream)?;
    let mut test = Test {
        version: VERSION,
        mode: args.mode,
        seconds: args.seconds,
        size: args.size.unwrap_or_else(|| args.mode.default_size()),
        rate: args.rate,
        sessions: args.sessions,
        ports: Vec::new(),
    };
    let mut udp = Vec::new();
    if test.mode == Mode::Udp {
        local.set_port(0);
        for _ in 0..test.sessions {
            let socket = UdpSocket::bind(local).map_err(Error::Data)?;
            test.ports.push(socket.local_addr().map_err(Error::Data)?.port());
            udp.push(socket);
        }
    }
    control.send(&Message::Test(test.clone()))?;
    let (token, ports) = match control.expect()? {
        Message::Ready { token, ports } => (token, ports),
        other => return Err(Error::Protocol(format!("unexpected {other:?}"))),
    };
    let needed = if matches!(test.mode, Mode::Udp | Mode::Crr) { usize::from(test.sessions) } else { 0 };
    if ports.len() != needed {
        return Err(Error::Protocol(format!("{} ports for {needed} sessions", ports.len())));
    }
    let to = |session: u16| SocketAddr::new(server.ip(), ports[usize::from(session)]);
    let mut data = Vec::new();
    for (session, socket) in (0..).zip(udp) {
        socket.connect(to(session)).map_err(Error::Data)?;
        prepare_udp(&socket)?;
        data.push(Data { session, socket: Socket::Udp(socket) });
    }
    for session in 0..test.sessions {
        if test.mode == Mode::Crr {
            data.push(Data { session, socket: Socket::Call(to(session)) });
        }
        for &direction in session::tcp_directions(test.mode) {
            let stream = data_connection(server, Message::Data { token, direction, session })?;
            prepare_tcp(&stream, test.mode)?;
            data.push(Data { session, socket: Socket::Tcp(stream, direction) });
        }
    }
    control.send(&Message::Start)?;
    let mut printer = Printer::new(args);
    let finished = session::run(&mut control, End::Client, &test, token, &data, &mut |bytes, blocks| {
        printer.update(bytes, blocks);
    })?;
    Ok(Report::new(&test, server.to_string(), &finished))
}

/// Opens a data connection with its first line.
fn data_connection(server: SocketAddr, first: Message) -> Result<TcpStream, Error> {
    let stream = TcpStream::connect_timeout(&server, CONNECT).map_err(Error::Data)?;
    let mut opening = Control::new(stream)?;
    opening.send(&first)?;
    match opening.expect()? {
        Message::Go => opening.into_stream(),
        other => Err(Error::Protocol(format!("unexpected {other:?}"))),
    }
}

/// Connects to the server, trying again for `wait`.
fn reach(to: &str, port: u16, wait: Duration) -> Result<TcpStream, Error> {
    let deadline = Instant::now() + wait;
    loop {
        let error = match (to, port).to_socket_addrs().and_then(|mut addresses| connect(&mut addresses)) {
            Ok(stream) => return Ok(stream),
            Err(error) => error,
        };
        if Instant::now() >= deadline {
            return Err(Error::Unreachable { to: to.into(), port, source: error });
        }
        std::thread::sleep(RETRY);
    }
}

fn connect(addresses: &mut dyn Iterator<Item = SocketAddr>) -> io::Result<TcpStream> {
    let mut result = Err(io::Error::new(io::ErrorKind::NotFound, "the name has no address"));
    for address in addresses {
        result = TcpStream::connect_timeout(&address, CONNECT.min(PATIENCE));
        if result.is_ok() {
            break;
        }
    }
    result
}

/// Prints progress on stderr, as the options ask.
struct Printer {
    every: Option<Duration>,
    json: bool,
    start: Instant,
    last: Instant,
    bytes: u64,
    blocks: u64,
}

impl Printer {
    fn new(args: &ClientArgs) -> Self {
        let every = if args.progress_json {
            Some(session::PROGRESS)
        } else {
            args.interval.map(Duration::from_secs_f64)
        };
        let now = Instant::now();
        Self { every, json: args.progress_json, start: now, last: now, bytes: 0, blocks: 0 }
    }

    fn update(&mut self, bytes: u64, blocks: u64) {
        let now = Instant::now();
        let passed = now - self.last;
        // The updates come at their own pace: half of one of them early is in time.
        if self.every.is_none_or(|every| passed + session::PROGRESS / 2 < every) {
            return;
        }
        // Figures of the other end may arrive late, never lower.
        let per_second = |count: u64| count as f64 / passed.as_secs_f64();
        let progress = Progress {
            seconds: (now - self.start).as_secs_f64(),
            bytes: bytes.saturating_sub(self.bytes),
            bits_per_second: per_second(bytes.saturating_sub(self.bytes)) * 8.0,
            packets_per_second: per_second(blocks.saturating_sub(self.blocks)),
        };
        (self.last, self.bytes, self.blocks) = (now, bytes, blocks);
        if self.json {
            eprintln!("{}", serde_json::json!(progress));
        } else if blocks > 0 {
            eprintln!(
                "{:6.1} s  {:>12}  {:>9}",
                progress.seconds,
                bit_rate(progress.bits_per_second),
                scaled(progress.packets_per_second, "/s")
            );
        } else {
            eprintln!("{:6.1} s  {:>12}", progress.seconds, bit_rate(progress.bits_per_second));
        }
    }
}
