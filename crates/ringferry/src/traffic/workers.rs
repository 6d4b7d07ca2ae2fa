//! The threads that move payload, one per data socket: TCP streams and UDP datagrams, sender and receiver of
//! each. Those of requests and responses are in [`transactions`](super::transactions).
//!
//! A worker owns its socket's data path and returns what it moved. All of its calls have a time limit;
//! [`Shared::stop`] ends it early.

use super::latency::Histogram;
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
/// Socket buffer asked for in UDP tests, in bytes; to whoever does not administer the network the kernel may
/// grant less (net.core.rmem_max). The default of 208 KiB holds fewer than 100 datagrams of 1472 bytes, and
/// then the receiver's scheduling is measured instead of the path.
const UDP_BUFFER: usize = 4 << 20;

/// The words that the workers of one end share with its control loop.
#[derive(Default)]
pub struct Shared {
    /// Set when workers are to give up.
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

    /// Counts what has arrived.
    pub fn count(&self, bytes: usize, blocks: u64) {
        self.bytes.fetch_add(bytes as u64, Relaxed);
        self.blocks.fetch_add(blocks, Relaxed);
    }

    pub fn stopped(&self) -> bool {
        self.stop.load(Relaxed)
    }
}

/// The payload that a worker moved.
#[derive(Default)]
pub struct Moved {
    pub sent: Option<Flow>,
    pub received: Option<Flow>,
    /// Latencies of transactions, at the client.
    pub latency: Option<Histogram>,
}

/// One direction of a session.
#[derive(Clone, Copy)]
pub struct Job {
    /// The direction in which payload flows.
    pub direction: Direction,
    /// The bytes of the payload.
    pub pattern: Pattern,
    pub size: usize,
    pub duration: Duration,
    /// Bits per second, if limited.
    pub rate: Option<u64>,
}

impl Job {
    /// The part of `test` that flows in `direction` in a session. Its payload is unlike that of any other.
    pub fn new(test: &Test, token: u64, session: u16, direction: Direction) -> Self {
        Self {
            direction,
            pattern: Pattern::new(token, u64::from(session) << 2 | direction.salt()),
            size: test.size,
            duration: Duration::from_secs_f64(test.seconds),
            rate: test.rate,
        }
    }
}

/// Holds a sender to a number of bits per second.
pub struct Pacer {
    pub start: Instant,
    rate: Option<u64>,
    bits: u128,
}

impl Pacer {
    /// A clock that begins now.
    pub fn new(rate: Option<u64>) -> Self {
        Self { start: Instant::now(), rate, bits: 0 }
    }

    /// Waits until the `bytes` counted before this call are due; returns the time since the start.
    pub fn pace(&mut self, bytes: usize) -> Duration {
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
pub struct Span {
    ends: Option<(Instant, Instant)>,
}

impl Span {
    /// Notes that something happened.
    pub fn note(&mut self) {
        let now = Instant::now();
        self.ends = Some((self.ends.map_or(now, |(first, _)| first), now));
    }

    /// The time since it began, in seconds.
    pub fn seconds(&self) -> f64 {
        self.ends.map_or(0.0, |(first, last)| (last - first).as_secs_f64())
    }
}

fn timed_out(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut)
}

/// An error of a data socket, for the user.
pub fn data_error(error: io::Error) -> Error {
    if timed_out(&error) { Error::Silent } else { Error::Data(error) }
}

/// Prepares a connected TCP socket for a worker.
pub fn prepare_tcp(stream: &TcpStream, mode: Mode) -> Result<(), Error> {
    (|| {
        stream.set_nodelay(mode.is_transactional())?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))
    })()
    .map_err(Error::Data)
}

/// Prepares a UDP socket for a worker.
pub fn prepare_udp(socket: &UdpSocket) -> Result<(), Error> {
    (|| {
        rustix::net::sockopt::set_socket_recv_buffer_size_force(socket, UDP_BUFFER)
            .or_else(|_| rustix::net::sockopt::set_socket_recv_buffer_size(socket, UDP_BUFFER))?;
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
        let mut header = [0; HEADER];
        let (header, body) = job.pattern.parts(flow.blocks, job.size, &mut header);
        let mut rest = [IoSlice::new(header), IoSlice::new(body)];
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

/// Smallest and largest block of `mode`, in bytes.
pub fn sizes(mode: Mode) -> std::ops::RangeInclusive<usize> {
    match mode {
        // 65507: the largest payload of UDP over IPv4 (RFC 768, RFC 791).
        Mode::Udp => HEADER..=65_507,
        Mode::Tcp | Mode::TcpReverse | Mode::TcpBoth | Mode::Rr | Mode::Crr => 1..=super::pattern::MAX_BLOCK,
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
}
