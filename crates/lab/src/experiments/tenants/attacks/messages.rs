//! The attacker has no need of frames: messages, connections and whatever makes the switch write to its log.

use std::io;
use std::os::fd::AsFd;

use ringferry_rig::handmade::{Front, Shape, connect};
use ringferry_sys::socket::Stream;
use ringferry_vhost_user::Frontend;
use ringferry_vhost_user::message::{NO_FD, Request, VERSION};

use super::{Place, Step};
use crate::experiment::RowError;

/// Messages that are written at once.
const BATCH: usize = 64;
/// A number that no request has.
const UNKNOWN: u32 = 250;

fn first(place: &Place) -> Result<&std::path::PathBuf, RowError> {
    place.sockets.first().ok_or_else(|| RowError::failed("the attacker has no port"))
}

/// Finding H5: SET_MEM_TABLE as fast as the socket takes it, each of which stops and starts 32 rings.
pub(super) fn mem_table(place: &Place) -> Result<Step, RowError> {
    let pairs = match place.who {
        super::Who::Ringferry | super::Who::Ovs => 16,
        // Its ports have one pair.
        super::Who::Testpmd => 1,
    };
    let shape = Shape { pairs, acknowledged: false, ..Shape::default() };
    let mut front = Front::new(first(place)?, shape)?;
    front.start()?;
    Ok(Box::new(move || {
        front.set_mem_table()?;
        front.check()?;
        Ok(1)
    }))
}

/// A message, byte by byte.
fn message(request: u32, payload: &[u8]) -> Vec<u8> {
    let header = [request, VERSION, payload.len() as u32];
    header.iter().flat_map(|word| word.to_ne_bytes()).chain(payload.iter().copied()).collect()
}

/// Sends the same bytes again and again, each time once all `answer` bytes of the answers to those before have come: who leaves
/// many unread is thrown out.
fn storm(place: &Place, bytes: Vec<u8>, messages: u64, answer: usize) -> Result<Step, RowError> {
    let stream = connect(first(place)?)?;
    stream.set_nonblocking(true)?;
    let (mut at, mut came, mut answers) = (0, 0, vec![0; 64 * 1024]);
    Ok(Box::new(move || {
        let mut done = 0;
        if at < bytes.len() {
            match stream.send(&bytes[at..], &[]) {
                Ok(sent) => at += sent,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => std::thread::yield_now(),
                Err(error) => return Err(error.into()),
            }
        }
        match stream.recv(&mut answers, &mut Vec::new()) {
            Ok(received) if received.bytes == 0 => {
                return Err(RowError::failed("the switch closed the connection"));
            }
            Ok(received) => came += received.bytes,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => std::thread::yield_now(),
            Err(error) => return Err(error.into()),
        }
        if at == bytes.len() && came >= answer {
            (at, came) = (0, 0);
            done = messages;
        }
        Ok(done)
    }))
}

/// Messages that are in order: questions, and calls that are taken away.
pub(super) fn messages(place: &Place) -> Result<Step, RowError> {
    let question = message(Request::GetFeatures as u32, &[]);
    let call = message(Request::SetVringCall as u32, &NO_FD.to_ne_bytes());
    // A header and 8 bytes are the answer to each question.
    storm(place, [question, call].concat().repeat(BATCH), 2 * BATCH as u64, 20 * BATCH)
}

/// Messages that no peer knows, and messages that are too short.
pub(super) fn malformed(place: &Place) -> Result<Step, RowError> {
    let unknown = message(UNKNOWN, &[]);
    let short = message(Request::SetVringNum as u32, &[0; 3]);
    storm(place, [unknown, short].concat().repeat(BATCH), 2 * BATCH as u64, 0)
}

/// Connects, asks for the features, and is gone.
pub(super) fn connections(place: &Place) -> Result<Step, RowError> {
    let socket = first(place)?.clone();
    // Whoever cannot connect at all has nothing to measure.
    drop(connect(&socket)?);
    Ok(Box::new(move || {
        let stream = match Stream::connect(&socket) {
            Ok(stream) => stream,
            // The queue of those who wait is full.
            Err(_) => {
                std::thread::yield_now();
                return Ok(0);
            }
        };
        let mut frontend = Frontend::new(stream)?;
        frontend.get_features().map_err(RowError::failed)?;
        Ok(1)
    }))
}

/// Connects, starts a device, and is gone.
pub(super) fn devices(place: &Place) -> Result<Step, RowError> {
    let socket = first(place)?.clone();
    Front::new(&socket, Shape::default())?.start()?;
    Ok(Box::new(move || {
        Front::new(&socket, Shape::default())?.start()?;
        Ok(1)
    }))
}

/// Finding D1: a TCP socket that is closed by whoever holds it last, and that waits in its close for as long as its peer
/// likes. It is sent with the first bytes of a message; then the attacker closes all that it has of both.
pub(super) fn lingering(place: &Place) -> Result<Step, RowError> {
    use std::net::{TcpListener, TcpStream};
    use std::time::Duration;

    /// How long the close of such a socket waits, at most.
    const LINGER: Duration = Duration::from_secs(10);
    /// Sockets whose other ends are kept, unread.
    const KEPT: usize = 64;

    let socket = first(place)?.clone();
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    drop(connect(&socket)?);
    let mut kept = std::collections::VecDeque::new();
    let fill = vec![0; 64 * 1024];
    Ok(Box::new(move || {
        let sender = TcpStream::connect(address)?;
        kept.push_back(listener.accept()?.0);
        if kept.len() > KEPT {
            kept.pop_front();
        }
        sender.set_nonblocking(true)?;
        while io::Write::write(&mut &sender, &fill).is_ok_and(|sent| sent > 0) {}
        sender.set_nonblocking(false)?;
        rustix::net::sockopt::set_socket_linger(&sender, Some(LINGER)).map_err(io::Error::from)?;
        let stream = connect(&socket)?;
        // Half a header.
        stream.send(&message(Request::SetVringKick as u32, &[])[..6], &[sender.as_fd()])?;
        drop(sender);
        drop(stream);
        Ok(1)
    }))
}
