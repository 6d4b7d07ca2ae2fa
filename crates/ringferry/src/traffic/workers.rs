//! The threads that move payload, one per data socket: TCP stream, UDP datagrams and request/response,
//! sender and receiver of each.
//!
//! A worker owns its socket's data path and returns what it moved. All of its calls have a time limit;
//! [`Shared::stop`] ends it early.

use super::histogram::{Histogram, Latency};
use super::pattern::{HEADER, Ledger, Pattern, StreamVerifier};
use super::protocol::{Direction, Flow, PATIENCE, Test};
use super::{Error, Mode};
use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::net::{TcpStream, UdpSocket};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Bytes asked of a TCP socket at once: large enough that the system call is noise, small enough to stay in
/// the second-level cache until it is checked.
const READ: usize = 256 << 10;
/// A UDP receiver takes this much silence, after the sender has finished, for the end; also how often it
/// looks for the end.
const QUIET: Duration = Duration::from_millis(200);
/// Socket buffer asked for in UDP tests, in bytes; the kernel may grant less (net.core.rmem_max). The
/// default of 208 KiB holds fewer than 100 datagrams of 1472 bytes, and then the receiver's scheduling is
/// measured instead of the path.
const UDP_BUFFER: usize = 4 << 20;

/// What the workers of one end share with its control loop.
#[derive(Default)]
pub struct Shared {
    /// Give up now.
    pub stop: AtomicBool,
    /// The other end has sent everything it will.
    pub peer_done: AtomicBool,
    bytes: AtomicU64,
    blocks: AtomicU64,
}

impl Shared {
    /// Payload bytes and blocks that have arrived so far.
    pub fn arrived(&self) -> (u64, u64) {
        (self.bytes.load(Relaxed), self.blocks.load(Relaxed))
    }

    fn count(&self, bytes: usize, blocks: u64) {
        self.bytes.fetch_add(bytes as u64, Relaxed);
        self.blocks.fetch_add(blocks, Relaxed);
    }

    fn stopped(&self) -> bool {
        self.stop.load(Relaxed)
    }
}

/// What a worker moved.
#[derive(Default)]
pub struct Moved {
    /// Payload sent.
    pub sent: Option<Flow>,
    /// Payload received.
    pub received: Option<Flow>,
    /// Latencies, of a client in request/response mode.
    pub latency: Option<Latency>,
}

/// One direction of a test.
#[derive(Clone, Copy)]
pub struct Job {
    direction: Direction,
    pattern: Pattern,
    size: usize,
    duration: Duration,
    rate: Option<u64>,
}

impl Job {
    /// The part of `test` that flows in `direction`.
    pub fn new(test: &Test, token: u64, direction: Direction) -> Self {
        Self {
            direction,
            pattern: Pattern::new(token, direction.salt()),
            size: test.size,
            duration: Duration::from_secs_f64(test.seconds),
            rate: test.rate,
        }
    }
}

/// Holds a sender to a number of bits per second.
struct Pacer {
    start: Instant,
    rate: Option<u64>,
    bits: u128,
}

impl Pacer {
    fn new(rate: Option<u64>) -> Self {
        Self { start: Instant::now(), rate, bits: 0 }
    }

    /// Waits until the `bytes` counted before this call are due; returns the time since the start.
    fn pace(&mut self, bytes: usize) -> Duration {
        let elapsed = self.start.elapsed();
        let Some(rate) = self.rate else { return elapsed };
        let due = Duration::from_nanos(
            u64::try_from(self.bits * 1_000_000_000 / u128::from(rate)).unwrap_or(u64::MAX),
        );
        self.bits += bytes as u128 * 8;
        let wait = due.saturating_sub(elapsed);
        if !wait.is_zero() {
            // Not longer than QUIET, so that the end of the test is not slept through.
            std::thread::sleep(wait.min(QUIET));
        }
        self.start.elapsed()
    }
}

/// Time from the first to the last event.
#[derive(Default)]
struct Span {
    ends: Option<(Instant, Instant)>,
}

impl Span {
    fn note(&mut self) {
        let now = Instant::now();
        self.ends = Some((self.ends.map_or(now, |(first, _)| first), now));
    }

    fn seconds(&self) -> f64 {
        self.ends.map_or(0.0, |(first, last)| (last - first).as_secs_f64())
    }
}

fn timed_out(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut)
}

/// An error of a data socket, for the user.
fn data_error(error: io::Error) -> Error {
    if timed_out(&error) { Error::Silent } else { Error::Data(error) }
}

/// Prepares a connected TCP socket for a worker.
pub fn prepare_tcp(stream: &TcpStream, mode: Mode) -> Result<(), Error> {
    (|| {
        stream.set_nodelay(mode == Mode::Rr)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))
    })()
    .map_err(Error::Data)
}

/// Prepares a UDP socket for a worker.
pub fn prepare_udp(socket: &UdpSocket) -> Result<(), Error> {
    (|| {
        rustix::net::sockopt::set_socket_recv_buffer_size(socket, UDP_BUFFER)?;
        socket.set_read_timeout(Some(QUIET))?;
        socket.set_write_timeout(Some(PATIENCE))
    })()
    .map_err(Error::Data)
}

/// Writes blocks for the test's time, then ends the stream.
pub fn send_stream(mut stream: &TcpStream, job: Job, shared: &Shared) -> Result<Moved, Error> {
    let mut flow = Flow::new(job.direction);
    let mut pacer = Pacer::new(job.rate);
    while pacer.pace(job.size) < job.duration && !shared.stopped() {
        let header = job.pattern.header(flow.blocks, job.size);
        let mut rest = [IoSlice::new(&header), IoSlice::new(job.pattern.body(flow.blocks, job.size))];
        let mut rest = rest.as_mut_slice();
        while !rest.is_empty() {
            match stream.write_vectored(rest) {
                Ok(count) => IoSlice::advance_slices(&mut rest, count),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(data_error(error)),
            }
        }
        flow.blocks += 1;
        flow.bytes += job.size as u64;
    }
    flow.seconds = pacer.start.elapsed().as_secs_f64();
    stream.shutdown(std::net::Shutdown::Write).map_err(Error::Data)?;
    Ok(Moved { sent: Some(flow), ..Moved::default() })
}

/// Reads a stream to its end and checks every byte.
pub fn receive_stream(mut stream: &TcpStream, job: Job, shared: &Shared) -> Result<Moved, Error> {
    let mut flow = Flow::new(job.direction);
    let mut verifier = StreamVerifier::new(job.pattern, job.size);
    let mut buffer = vec![0; READ];
    let mut span = Span::default();
    while !shared.stopped() {
        match stream.read(&mut buffer) {
            Ok(0) => break,
            Ok(count) => {
                span.note();
                verifier.feed(&buffer[..count]);
                flow.bytes += count as u64;
                shared.count(count, 0);
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(data_error(error)),
        }
    }
    (flow.corrupt, flow.seconds) = (verifier.corrupt(), span.seconds());
    Ok(Moved { received: Some(flow), ..Moved::default() })
}

/// Sends datagrams for the test's time. One system call per datagram: no segmentation offload, every
/// datagram crosses the network as it is.
pub fn send_datagrams(socket: &UdpSocket, job: Job, shared: &Shared) -> Result<Moved, Error> {
    let mut flow = Flow::new(job.direction);
    let mut datagram = vec![0; job.size];
    let mut pacer = Pacer::new(job.rate);
    while pacer.pace(job.size) < job.duration && !shared.stopped() {
        job.pattern.fill(flow.blocks, &mut datagram);
        match socket.send(&datagram) {
            Ok(_) => {}
            // ENOBUFS: the network card's queue dropped it. It counts as sent and will be missing at the
            // receiver.
            Err(error) if error.raw_os_error() == Some(rustix::io::Errno::NOBUFS.raw_os_error()) => {}
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(error) => return Err(data_error(error)),
        }
        flow.blocks += 1;
        flow.bytes += job.size as u64;
    }
    flow.seconds = pacer.start.elapsed().as_secs_f64();
    Ok(Moved { sent: Some(flow), ..Moved::default() })
}

/// Receives datagrams until the sender has finished and none come any more.
pub fn receive_datagrams(socket: &UdpSocket, job: Job, shared: &Shared) -> Result<Moved, Error> {
    let mut flow = Flow::new(job.direction);
    let mut ledger = Ledger::new();
    let mut span = Span::default();
    // One byte more than expected, so that a datagram that grew on the way is noticed.
    let mut datagram = vec![0; job.size + 1];
    while !shared.stopped() {
        match socket.recv(&mut datagram) {
            Ok(count) => {
                span.note();
                match job.pattern.identify(&datagram[..count]) {
                    Some(number) if count == job.size => ledger.record(number),
                    _ => flow.corrupt += 1,
                }
                shared.count(count, 1);
            }
            Err(error) if timed_out(&error) && shared.peer_done.load(Relaxed) => break,
            Err(error) if timed_out(&error) || error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(Error::Data(error)),
        }
    }
    flow.blocks = ledger.arrived;
    flow.bytes = ledger.arrived * job.size as u64;
    (flow.reordered, flow.duplicated, flow.seconds) = (ledger.reordered, ledger.duplicated, span.seconds());
    Ok(Moved { received: Some(flow), ..Moved::default() })
}

/// Fills `buffer` from `stream`; false when the stream ended before its first byte.
fn read_block(mut stream: &TcpStream, buffer: &mut [u8]) -> Result<bool, Error> {
    let mut filled = 0;
    while filled < buffer.len() {
        match stream.read(&mut buffer[filled..]) {
            Ok(0) if filled == 0 => return Ok(false),
            Ok(0) => return Err(Error::Data(ErrorKind::UnexpectedEof.into())),
            Ok(count) => filled += count,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(data_error(error)),
        }
    }
    Ok(true)
}

/// Sends a request, awaits its response, and again, for the test's time. `flow.blocks` of what it received
/// counts transactions.
pub fn request(mut stream: &TcpStream, ask: Job, answer: Job, shared: &Shared) -> Result<Moved, Error> {
    let (mut sent, mut received) = (Flow::new(ask.direction), Flow::new(answer.direction));
    let mut histogram = Histogram::new();
    let (mut request, mut response) = (vec![0; ask.size], vec![0; answer.size]);
    let mut pacer = Pacer::new(ask.rate);
    while pacer.pace(ask.size) < ask.duration && !shared.stopped() {
        ask.pattern.fill(sent.blocks, &mut request);
        let start = Instant::now();
        stream.write_all(&request).map_err(data_error)?;
        if !read_block(stream, &mut response)? {
            return Err(Error::Closed);
        }
        histogram.record(start.elapsed());
        received.corrupt += u64::from(!answer.pattern.matches(sent.blocks, &response));
        for flow in [&mut sent, &mut received] {
            flow.blocks += 1;
            flow.bytes += ask.size as u64;
        }
        shared.count(ask.size, 1);
    }
    sent.seconds = pacer.start.elapsed().as_secs_f64();
    received.seconds = sent.seconds;
    stream.shutdown(std::net::Shutdown::Write).map_err(Error::Data)?;
    Ok(Moved { sent: Some(sent), received: Some(received), latency: histogram.latency() })
}

/// Checks and answers requests until the client ends the stream.
pub fn respond(mut stream: &TcpStream, ask: Job, answer: Job, shared: &Shared) -> Result<Moved, Error> {
    let (mut sent, mut received) = (Flow::new(answer.direction), Flow::new(ask.direction));
    let (mut request, mut response) = (vec![0; ask.size], vec![0; answer.size]);
    let mut span = Span::default();
    while !shared.stopped() && read_block(stream, &mut request)? {
        answer.pattern.fill(sent.blocks, &mut response);
        stream.write_all(&response).map_err(data_error)?;
        span.note();
        received.corrupt += u64::from(!ask.pattern.matches(sent.blocks, &request));
        for flow in [&mut sent, &mut received] {
            flow.blocks += 1;
            flow.bytes += ask.size as u64;
            flow.seconds = span.seconds();
        }
    }
    Ok(Moved { sent: Some(sent), received: Some(received), latency: None })
}

/// Smallest and largest block of `mode`, in bytes.
pub fn sizes(mode: Mode) -> std::ops::RangeInclusive<usize> {
    match mode {
        Mode::Tcp | Mode::TcpReverse | Mode::TcpBoth => HEADER..=super::pattern::MAX_BLOCK,
        // 65507: the largest payload of UDP over IPv4 (RFC 768, RFC 791).
        Mode::Udp => HEADER..=65_507,
        Mode::Rr => 1..=super::pattern::MAX_BLOCK,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    fn job(size: usize) -> Job {
        Job {
            direction: Direction::ToServer,
            pattern: Pattern::new(5, 1),
            size,
            duration: Duration::ZERO,
            rate: None,
        }
    }

    fn block(job: Job, number: u64) -> Vec<u8> {
        let mut block = vec![0; job.size];
        job.pattern.fill(number, &mut block);
        block
    }

    #[test]
    fn a_stream_with_one_wrong_byte_has_one_corrupt_block() {
        let job = job(1000);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut sender = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let receiver = listener.accept().unwrap().0;
        let mut data: Vec<u8> = (0..5).flat_map(|number| block(job, number)).collect();
        data[2500] ^= 1;
        sender.write_all(&data).unwrap();
        drop(sender);
        let flow = receive_stream(&receiver, job, &Shared::default()).unwrap().received.unwrap();
        assert_eq!((flow.bytes, flow.corrupt), (5000, 1));
    }

    #[test]
    fn wrong_late_doubled_cut_and_missing_datagrams_are_counted_apart() {
        let job = job(100);
        let receiver = UdpSocket::bind("127.0.0.1:0").unwrap();
        let sender = UdpSocket::bind("127.0.0.1:0").unwrap();
        sender.connect(receiver.local_addr().unwrap()).unwrap();
        prepare_udp(&receiver).unwrap();
        for number in [0, 2, 1, 1, 5] {
            sender.send(&block(job, number)).unwrap();
        }
        let mut wrong = block(job, 6);
        wrong[99] ^= 0x10;
        sender.send(&wrong).unwrap();
        sender.send(&block(job, 7)[..99]).unwrap();
        let mut longer = block(Job { size: 101, ..job }, 8);
        sender.send(&longer).unwrap();
        longer.resize(2000, 0);
        sender.send(&longer).unwrap();
        let shared = Shared { peer_done: true.into(), ..Shared::default() };
        let flow = receive_datagrams(&receiver, job, &shared).unwrap().received.unwrap();
        assert_eq!((flow.blocks, flow.bytes), (4, 400));
        assert_eq!((flow.corrupt, flow.reordered, flow.duplicated), (4, 1, 1));
        assert_eq!(shared.arrived().1, 9);
    }

    #[test]
    fn a_wrong_response_is_corrupt() {
        let (ask, answer) = (job(8), Job { pattern: Pattern::new(5, 2), ..job(8) });
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let server = listener.accept().unwrap().0;
        client.write_all(&[block(ask, 0), vec![0; 8], block(ask, 2)].concat()).unwrap();
        client.shutdown(std::net::Shutdown::Write).unwrap();
        let moved = respond(&server, ask, answer, &Shared::default()).unwrap();
        let received = moved.received.unwrap();
        assert_eq!((received.blocks, received.corrupt), (3, 1));
    }
}
