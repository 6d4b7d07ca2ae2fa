//! The threads of tests that ask and answer, one per session and end: all transactions over one connection, as
//! netperf's TCP_RR, or each over a connection of its own, as its TCP_CRR.
//!
//! In the latter the server listens on a port per session, and the connection is nothing but the transaction: SYN,
//! request, response, and the end, which the server says first. So ports that wait for late packets are the server's, and
//! the client does not run out of them.

use super::Error;
use super::latency::Histogram;
use super::protocol::{Flow, PATIENCE};
use super::workers::{Job, Moved, Pacer, Shared, Span, data_error};
use rustix::net::sockopt::{Timeout, set_socket_timeout, set_tcp_nodelay};
use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, socket_with};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

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

/// The counters of one end's transactions, and the blocks of the one that is under way.
struct Exchange {
    sends: Job,
    receives: Job,
    sent: Flow,
    received: Flow,
    out: Vec<u8>,
    into: Vec<u8>,
}

impl Exchange {
    fn new(sends: Job, receives: Job) -> Self {
        let [sent, received] = [sends, receives].map(|job| Flow::new(job.direction));
        Self { sends, receives, sent, received, out: vec![0; sends.size], into: vec![0; receives.size] }
    }

    /// A transaction is over; `good` if what was received was what it should be.
    fn count(&mut self, good: bool) {
        self.received.corrupt += u64::from(!good);
        for flow in [&mut self.sent, &mut self.received] {
            flow.blocks += 1;
            flow.bytes += self.sends.size as u64;
        }
    }

    /// Returns what was moved in `seconds`.
    fn finish(self, seconds: f64, latency: Option<Histogram>) -> Moved {
        let over = |flow| Some(Flow { seconds, ..flow });
        Moved { sent: over(self.sent), received: over(self.received), latency }
    }
}

/// Asks again and again, for the test's time. `transact` sends the request and awaits the response; false when that had
/// more to it than a response has.
fn ask_all(
    ask: Job,
    answer: Job,
    shared: &Shared,
    mut transact: impl FnMut(&[u8], &mut [u8]) -> Result<bool, Error>,
) -> Result<Moved, Error> {
    let mut exchange = Exchange::new(ask, answer);
    let mut histogram = Histogram::new();
    let mut pacer = Pacer::new(ask.rate);
    while pacer.pace(ask.size) < ask.duration && !shared.stopped() {
        let Exchange { sent, out, into, .. } = &mut exchange;
        ask.pattern.fill(sent.blocks, out);
        let start = Instant::now();
        let whole = transact(out, into)?;
        histogram.record(u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX));
        let good = whole && answer.pattern.matches(sent.blocks, into);
        exchange.count(good);
        shared.count(ask.size, 1);
    }
    Ok(exchange.finish(pacer.start.elapsed().as_secs_f64(), Some(histogram)))
}

/// The end that answers requests.
struct Answers {
    exchange: Exchange,
    span: Span,
}

impl Answers {
    fn new(ask: Job, answer: Job) -> Self {
        Self { exchange: Exchange::new(answer, ask), span: Span::default() }
    }

    /// Checks and answers a request; false when the stream ended in front of it.
    fn next(&mut self, mut stream: &TcpStream) -> Result<bool, Error> {
        let Exchange { sends, receives, sent, out, into, .. } = &mut self.exchange;
        if !read_block(stream, into)? {
            return Ok(false);
        }
        sends.pattern.fill(sent.blocks, out);
        stream.write_all(out).map_err(data_error)?;
        let good = receives.pattern.matches(sent.blocks, into);
        self.span.note();
        self.exchange.count(good);
        Ok(true)
    }

    fn finish(self) -> Moved {
        self.exchange.finish(self.span.seconds(), None)
    }
}

/// Sends a request, awaits its response, and again, for the test's time. `flow.blocks` of what it received
/// counts transactions.
pub fn request(mut stream: &TcpStream, ask: Job, answer: Job, shared: &Shared) -> Result<Moved, Error> {
    let moved = ask_all(ask, answer, shared, |request, response| {
        stream.write_all(request).map_err(data_error)?;
        if read_block(stream, response)? { Ok(true) } else { Err(Error::Closed) }
    })?;
    stream.shutdown(std::net::Shutdown::Write).map_err(Error::Data)?;
    Ok(moved)
}

/// Checks and answers requests until the client ends the stream.
pub fn respond(stream: &TcpStream, ask: Job, answer: Job, shared: &Shared) -> Result<Moved, Error> {
    let mut answers = Answers::new(ask, answer);
    while !shared.stopped() && answers.next(stream)? {}
    Ok(answers.finish())
}

/// Bounds every call on a socket in time, and lets short segments go at once.
fn prepare(socket: impl AsFd) -> io::Result<()> {
    for direction in [Timeout::Recv, Timeout::Send] {
        set_socket_timeout(&socket, direction, Some(PATIENCE))?;
    }
    Ok(set_tcp_nodelay(&socket, true)?)
}

/// Opens a connection. The standard library's way with a time limit takes four system calls more, and this is part of
/// what is measured.
fn open(address: SocketAddr) -> io::Result<TcpStream> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket = socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    prepare(&socket)?;
    match connect(&socket, &address) {
        Ok(()) => Ok(socket.into()),
        // How a connection that was not made in time ends.
        Err(rustix::io::Errno::INPROGRESS) => Err(ErrorKind::TimedOut.into()),
        Err(error) => Err(error.into()),
    }
}

/// Connects, sends a request, awaits its response and the end of the connection, and again, for the test's time.
/// `flow.blocks` of what it received counts transactions.
pub fn call(address: SocketAddr, ask: Job, answer: Job, shared: &Shared) -> Result<Moved, Error> {
    ask_all(ask, answer, shared, |request, response| {
        let mut stream = open(address).map_err(data_error)?;
        stream.write_all(request).map_err(data_error)?;
        if !read_block(&stream, response)? {
            return Err(Error::Closed);
        }
        Ok(!read_block(&stream, &mut [0])?)
    })
}

/// A listener at `address`, with any port, for [`answer_calls`].
pub fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let listener = TcpListener::bind(address)?;
    // Connections inherit it, so that it need not be done for each.
    prepare(&listener)?;
    Ok(listener)
}

/// Checks and answers a request on each connection from `client`, until the listener is shut down.
pub fn answer_calls(
    listener: &TcpListener,
    client: IpAddr,
    ask: Job,
    answer: Job,
    shared: &Shared,
) -> Result<Moved, Error> {
    let mut answers = Answers::new(ask, answer);
    let over = || shared.stopped() || shared.peer_done.load(Relaxed);
    loop {
        let stream = match listener.accept() {
            Ok((stream, peer)) if peer.ip() == client => stream,
            Ok(_) => continue,
            Err(_) if over() => return Ok(answers.finish()),
            // Whoever connected gave up, or a signal came.
            Err(error) if matches!(error.kind(), ErrorKind::ConnectionAborted | ErrorKind::Interrupted) => {
                continue;
            }
            Err(error) => return Err(data_error(error)),
        };
        if !answers.next(&stream)? {
            return Err(Error::Closed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::pattern::Pattern;
    use super::super::protocol::Direction;
    use super::*;
    use std::time::Duration;

    /// A job and its answer.
    fn jobs(size: usize) -> [Job; 2] {
        [Direction::ToServer, Direction::ToClient].map(|direction| Job {
            direction,
            pattern: Pattern::new(5, direction.salt()),
            size,
            duration: Duration::from_millis(50),
            rate: None,
        })
    }

    fn block(job: Job, number: u64) -> Vec<u8> {
        let mut block = vec![0; job.size];
        job.pattern.fill(number, &mut block);
        block
    }

    #[test]
    fn a_wrong_response_is_corrupt() {
        let [ask, answer] = jobs(8);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let server = listener.accept().unwrap().0;
        client.write_all(&[block(ask, 0), vec![0; 8], block(ask, 2)].concat()).unwrap();
        client.shutdown(std::net::Shutdown::Write).unwrap();
        let moved = respond(&server, ask, answer, &Shared::default()).unwrap();
        let received = moved.received.unwrap();
        assert_eq!((received.blocks, received.corrupt), (3, 1));
    }

    /// Answers calls with what `say` makes of the number of the call, until the caller has had enough.
    fn called(say: impl Fn(u64) -> Vec<u8> + Sync) -> Result<Moved, Error> {
        let [ask, answer] = jobs(8);
        let listener = listen("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = listener.local_addr().unwrap();
        std::thread::scope(|scope| {
            let server = scope.spawn(|| {
                for number in 0.. {
                    let Ok((mut stream, _)) = listener.accept() else { return };
                    let mut request = [0; 8];
                    assert!(
                        read_block(&stream, &mut request).unwrap() && ask.pattern.matches(number, &request)
                    );
                    // The caller may have heard enough.
                    let _ = stream.write_all(&say(number));
                }
            });
            let moved = call(address, ask, answer, &Shared::default());
            rustix::net::shutdown(&listener, rustix::net::Shutdown::Both).unwrap();
            server.join().unwrap();
            moved
        })
    }

    #[test]
    fn every_call_has_a_connection_whose_response_is_checked_to_its_end() {
        let [_, answer] = jobs(8);
        let good = called(|number| block(answer, number)).unwrap();
        let received = good.received.unwrap();
        assert!(received.blocks > 0 && received.corrupt == 0);
        assert_eq!(received.bytes, received.blocks * 8);
        assert!(crate::traffic::Latency::of(&good.latency.unwrap()).is_some());
        // A wrong byte, a byte too many, the response of another call.
        for bad in [
            &(|number| [&block(answer, number)[..7], &[!block(answer, number)[7]]].concat())
                as &(dyn Fn(u64) -> Vec<u8> + Sync),
            &|number| [block(answer, number), vec![0]].concat(),
            &|number| block(answer, number + 1),
        ] {
            let received = called(bad).unwrap().received.unwrap();
            assert!(received.blocks > 0);
            assert_eq!(received.corrupt, received.blocks);
        }
        // No response, and half of one.
        assert!(matches!(called(|_| Vec::new()), Err(Error::Closed)));
        assert!(matches!(called(|number| block(answer, number)[..4].to_vec()), Err(Error::Data(_))));
    }

    #[test]
    fn only_the_client_is_answered_and_a_wrong_request_is_corrupt() {
        let [ask, answer] = jobs(8);
        let shared = Shared::default();
        let serve = |client: IpAddr, requests: Vec<Vec<u8>>| {
            let listener = listen("127.0.0.1:0".parse().unwrap()).unwrap();
            let address = listener.local_addr().unwrap();
            std::thread::scope(|scope| {
                let server = scope.spawn(|| answer_calls(&listener, client, ask, answer, &shared));
                for request in &requests {
                    let mut stream = TcpStream::connect(address).unwrap();
                    let _ = stream.write_all(request);
                    let _ = stream.read_to_end(&mut Vec::new());
                }
                shared.peer_done.store(true, Relaxed);
                rustix::net::shutdown(&listener, rustix::net::Shutdown::Both).unwrap();
                server.join().unwrap().unwrap().received.unwrap()
            })
        };
        let requests = || vec![block(ask, 0), block(ask, 7), block(ask, 2)];
        let received = serve("127.0.0.1".parse().unwrap(), requests());
        assert_eq!((received.blocks, received.corrupt), (3, 1));
        let received = serve("127.0.0.9".parse().unwrap(), requests());
        assert_eq!(received.blocks, 0);
    }
}
