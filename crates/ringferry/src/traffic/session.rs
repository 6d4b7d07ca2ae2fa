//! One test, seen from either end: the control connection, the data sockets, the workers on them, and how
//! all of it ends.
//!
//! A test has one or more sessions, which do the same at the same time, each with a worker and payload of its own. Both ends run the same loop. Each worker finishes by itself (its time is over, or its stream ended);
//! when all have, the end says [`Message::Done`]; when both ends have said it, the test is over. Any error
//! or silence stops every worker of this end and is told to the other.

use super::latency::{Histogram, Latency};
use super::protocol::{Control, Direction, Message, Outcome, PATIENCE, Test};
use super::workers::{self, Job, Moved, Shared};
use super::{Error, Mode, transactions};
use rustix::time::{ClockId, clock_gettime};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::atomic::Ordering::Relaxed;
use std::thread::{Builder, ScopedJoinHandle};
use std::time::{Duration, Instant};

/// How long the loop waits for a message before it looks at its workers.
const TICK: Duration = Duration::from_millis(10);
/// How often each end tells what arrived.
pub const PROGRESS: Duration = Duration::from_millis(250);

/// The end that this process is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The one that asked for the test.
    Client,
    /// The one that was asked.
    Server,
}

/// The socket of a worker and its direction.
pub struct Data {
    /// Number of the session that it is part of, from 0.
    pub session: u16,
    /// The socket that payload goes through.
    pub socket: Socket,
}

/// The socket that payload goes through.
pub enum Socket {
    /// A TCP connection and the direction its first line named.
    Tcp(TcpStream, Direction),
    Udp(UdpSocket),
    /// Where to connect to for each transaction.
    Call(SocketAddr),
    /// The address where a client connects.
    Listen(TcpListener, IpAddr),
}

/// The counters of both ends.
pub struct Finished {
    pub ours: Outcome,
    pub theirs: Outcome,
    /// Latencies of all transactions, at the client.
    pub latency: Option<Latency>,
}

/// The data connections that a session of `mode` needs over TCP.
pub fn tcp_directions(mode: Mode) -> &'static [Direction] {
    match mode {
        Mode::Tcp | Mode::Rr => &[Direction::ToServer],
        Mode::TcpReverse => &[Direction::ToClient],
        Mode::TcpBoth => &[Direction::ToServer, Direction::ToClient],
        Mode::Udp | Mode::Crr => &[],
    }
}

/// CPU time this process has used, in seconds.
pub fn cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

impl Data {
    fn run(&self, end: End, test: &Test, token: u64, shared: &Shared) -> Result<Moved, Error> {
        let job = |direction| Job::new(test, token, self.session, direction);
        let (ask, answer) = (job(Direction::ToServer), job(Direction::ToClient));
        match (&self.socket, end, test.mode) {
            (Socket::Tcp(stream, _), End::Client, Mode::Rr) => {
                transactions::request(stream, ask, answer, shared)
            }
            (Socket::Tcp(stream, _), End::Server, Mode::Rr) => {
                transactions::respond(stream, ask, answer, shared)
            }
            (Socket::Call(address), ..) => transactions::call(*address, ask, answer, shared),
            (Socket::Listen(listener, client), ..) => {
                transactions::answer_calls(listener, *client, ask, answer, shared)
            }
            (Socket::Tcp(stream, direction), ..) => match (end, direction) {
                (End::Client, Direction::ToServer) | (End::Server, Direction::ToClient) => {
                    workers::send_stream(stream, job(*direction), shared)
                }
                _ => workers::receive_stream(stream, job(*direction), shared),
            },
            (Socket::Udp(socket), End::Client, _) => workers::send_datagrams(socket, ask, shared),
            (Socket::Udp(socket), End::Server, _) => workers::receive_datagrams(socket, ask, shared),
        }
    }

    /// Wakes the worker that may be blocked on the socket, for good.
    fn wake(&self) {
        if let Socket::Tcp(stream, _) = &self.socket {
            // Fails when the other end has closed already, and then nobody is blocked.
            let _ = stream.shutdown(Shutdown::Both);
        }
        self.hang_up();
    }

    /// The client will not call again.
    fn hang_up(&self) {
        if let Socket::Listen(listener, _) = &self.socket {
            // On Linux this ends a blocked accept.
            let _ = rustix::net::shutdown(listener, rustix::net::Shutdown::Both);
        }
    }
}

/// Runs `test` over `data` to its end. `progress` hears of payload bytes and blocks that arrived so far at
/// either end, each time the other end tells.
pub fn run(
    control: &mut Control,
    end: End,
    test: &Test,
    token: u64,
    data: &[Data],
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Finished, Error> {
    let shared = Shared::default();
    let result = std::thread::scope(|scope| {
        let shared = &shared;
        let start = |data| {
            let work = move || Data::run(data, end, test, token, shared);
            Builder::new().name("traffic".into()).spawn_scoped(scope, work).map_err(Error::Threads)
        };
        let workers: Result<Vec<_>, Error> = data.iter().map(start).collect();
        let hang_up = || data.iter().for_each(Data::hang_up);
        let result = workers.and_then(|workers| converse(control, test, shared, workers, &hang_up, progress));
        if result.is_err() {
            shared.stop.store(true, Relaxed);
            data.iter().for_each(Data::wake);
        }
        result
    });
    if let Err(error) = &result
        && !matches!(error, Error::Peer(_) | Error::Closed | Error::Control(_))
    {
        // The other end may be gone; this end's error is the one to report.
        let _ = control.send(&Message::Failed { reason: error.to_string() });
    }
    result
}

fn converse(
    control: &mut Control,
    test: &Test,
    shared: &Shared,
    mut workers: Vec<ScopedJoinHandle<'_, Result<Moved, Error>>>,
    hang_up: &dyn Fn(),
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Finished, Error> {
    let cpu = cpu_seconds();
    let start = Instant::now();
    // Nothing that works takes longer: the senders stop by themselves and each step after that has PATIENCE.
    let limit = Duration::from_secs_f64(test.seconds) + 3 * PATIENCE;
    let mut told = start;
    let mut heard = start;
    let (mut ours, mut theirs, mut latency) = (None, None, None::<Histogram>);
    loop {
        let message = control.receive(TICK)?;
        if message.is_some() {
            heard = Instant::now();
        }
        match message {
            Some(Message::Progress { bytes, blocks }) => {
                // Shown when the other end's figures are fresh: its clock and ours would beat.
                let here = shared.arrived();
                progress(here.0 + bytes, here.1 + blocks);
            }
            Some(Message::Done(outcome)) => {
                shared.peer_done.store(true, Relaxed);
                hang_up();
                theirs = Some(outcome);
            }
            Some(Message::Failed { reason }) => return Err(Error::Peer(reason)),
            Some(other) => return Err(Error::Protocol(format!("unexpected {other:?}"))),
            None => {}
        }
        // An end that is not done sends progress all the time.
        if (theirs.is_none() && heard.elapsed() > PATIENCE) || start.elapsed() > limit {
            return Err(Error::Silent);
        }
        if ours.is_none() && workers.iter().all(ScopedJoinHandle::is_finished) {
            let mut outcome = Outcome::default();
            for worker in workers.drain(..) {
                let moved = worker.join().map_err(|_| Error::Protocol("a worker panicked".into()))??;
                moved.sent.into_iter().for_each(|flow| flow.add_to(&mut outcome.sent));
                moved.received.into_iter().for_each(|flow| flow.add_to(&mut outcome.received));
                match (&mut latency, moved.latency) {
                    (Some(all), Some(more)) => all.merge(&more),
                    (all, more) => *all = all.take().or(more),
                }
            }
            outcome.cpu_seconds = cpu_seconds() - cpu;
            control.send(&Message::Done(outcome.clone()))?;
            ours = Some(outcome);
        }
        if told.elapsed() >= PROGRESS && ours.is_none() {
            told = Instant::now();
            let (bytes, blocks) = shared.arrived();
            control.send(&Message::Progress { bytes, blocks })?;
        }
        if let (Some(ours), Some(theirs)) = (&ours, &theirs) {
            let latency = latency.as_ref().and_then(Latency::of);
            return Ok(Finished { ours: ours.clone(), theirs: theirs.clone(), latency });
        }
    }
}
