//! The end that waits: serves one test after another.

use super::protocol::{Control, Direction, MAX_SESSIONS, Message, PATIENCE, Test, VERSION};
use super::session::{self, Data, End, Socket};
use super::workers::{prepare_tcp, prepare_udp, sizes};
use super::{Error, Mode, ServerArgs, transactions};
use rustix::event::{PollFd, PollFlags, poll};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::time::{Duration, Instant};

/// Longest test accepted, in seconds: a day.
const MAX_SECONDS: f64 = 86_400.0;

/// Serves tests until killed, or one with `--once`.
pub fn run(args: &ServerArgs) -> Result<(), Error> {
    let listener = listen(args.bind, args.port)?;
    let address = listener.local_addr().map_err(Error::Control)?;
    eprintln!("waiting for tests on {address}");
    loop {
        let Some((stream, peer)) = accept(&listener, None)? else { continue };
        let from = peer.ip().to_canonical();
        let result = serve(&listener, stream, peer);
        if let Err(error) = &result {
            eprintln!("test from {from}: {error}");
        }
        if args.once {
            return result;
        }
    }
}

fn listen(bind: Option<IpAddr>, port: u16) -> Result<TcpListener, Error> {
    // Without --bind: every address of both families, or of IPv4 where the kernel has no IPv6.
    let addresses = match bind {
        Some(address) => vec![address],
        None => vec![IpAddr::V6(Ipv6Addr::UNSPECIFIED), IpAddr::V4(Ipv4Addr::UNSPECIFIED)],
    };
    let mut result = Err(ErrorKind::AddrNotAvailable.into());
    for address in addresses {
        let address = SocketAddr::new(address, port);
        result = TcpListener::bind(address).and_then(|listener| {
            listener.set_nonblocking(true)?;
            Ok(listener)
        });
        match result {
            Ok(listener) => return Ok(listener),
            // The other family would not help, and would hide the reason.
            Err(source) if source.kind() == ErrorKind::AddrInUse => {
                return Err(Error::Listen { address: address.to_string(), source });
            }
            Err(_) => {}
        }
    }
    result.map_err(|source| Error::Listen {
        address: bind.map_or_else(|| format!("port {port}"), |ip| format!("{ip}:{port}")),
        source,
    })
}

/// The next connection, or nothing if none comes in `wait` (for ever if nothing).
fn accept(listener: &TcpListener, wait: Option<Duration>) -> Result<Option<(TcpStream, SocketAddr)>, Error> {
    let timeout = wait.map(|wait| wait.try_into().unwrap_or_default());
    let ready = match poll(&mut [PollFd::new(listener, PollFlags::IN)], timeout.as_ref()) {
        Ok(ready) => ready,
        Err(rustix::io::Errno::INTR) => return Ok(None),
        Err(error) => return Err(Error::Control(error.into())),
    };
    if ready == 0 {
        return Ok(None);
    }
    match listener.accept() {
        Ok(connection) => Ok(Some(connection)),
        // The client may give up between poll and accept.
        Err(error)
            if matches!(
                error.kind(),
                ErrorKind::WouldBlock | ErrorKind::ConnectionAborted | ErrorKind::Interrupted
            ) =>
        {
            Ok(None)
        }
        Err(error) => Err(Error::Control(error)),
    }
}

/// Checks that this server can run `test`.
fn check(test: &Test) -> Result<(), String> {
    if test.version != VERSION {
        return Err(format!(
            "the server speaks version {VERSION} of the test protocol, the client {}: use the same ringferry on both ends",
            test.version
        ));
    }
    if !(test.seconds > 0.0 && test.seconds <= MAX_SECONDS) {
        return Err(format!("{} is not a number of seconds between 0 and {MAX_SECONDS}", test.seconds));
    }
    if !sizes(test.mode).contains(&test.size) {
        return Err(format!(
            "{} is not a size between {} and {}",
            test.size,
            sizes(test.mode).start(),
            sizes(test.mode).end()
        ));
    }
    if !(1..=MAX_SESSIONS).contains(&test.sessions) {
        return Err(format!("{} is not a number of sessions between 1 and {MAX_SESSIONS}", test.sessions));
    }
    if test.mode == Mode::Udp && test.ports.len() != usize::from(test.sessions) {
        return Err(format!("{} ports for {} sessions", test.ports.len(), test.sessions));
    }
    if test.rate == Some(0) {
        return Err("a rate of 0 sends nothing".into());
    }
    Ok(())
}

/// Runs one test over the control connection `stream`.
fn serve(listener: &TcpListener, stream: TcpStream, peer: SocketAddr) -> Result<(), Error> {
    let local = stream.local_addr().map_err(Error::Control)?;
    let mut control = Control::new(stream)?;
    let test = match control.expect()? {
        Message::Test(test) => test,
        other => return Err(Error::Protocol(format!("unexpected {other:?}"))),
    };
    if let Err(reason) = check(&test) {
        control.send(&Message::Failed { reason: reason.clone() })?;
        return Err(Error::Refused(reason));
    }
    let token = RandomState::new().build_hasher().finish();
    let mut data = Vec::new();
    let mut ports = Vec::new();
    for session in 0..test.sessions {
        let socket = match test.mode {
            Mode::Udp => {
                let socket = UdpSocket::bind(with_port(local, 0)).map_err(Error::Data)?;
                socket.connect(with_port(peer, test.ports[usize::from(session)])).map_err(Error::Data)?;
                prepare_udp(&socket)?;
                ports.push(socket.local_addr().map_err(Error::Data)?.port());
                Socket::Udp(socket)
            }
            Mode::Crr => {
                let socket = transactions::listen(with_port(local, 0)).map_err(Error::Data)?;
                ports.push(socket.local_addr().map_err(Error::Data)?.port());
                Socket::Listen(socket, peer.ip())
            }
            Mode::Tcp | Mode::TcpReverse | Mode::TcpBoth | Mode::Rr => break,
        };
        data.push(Data { session, socket });
    }
    control.send(&Message::Ready { token, ports })?;
    for _ in 0..session::tcp_directions(test.mode).len() * usize::from(test.sessions) {
        let (stream, direction, session) = data_connection(listener, token)?;
        if session >= test.sessions {
            return Err(Error::Protocol(format!("session {session} of {}", test.sessions)));
        }
        prepare_tcp(&stream, test.mode)?;
        data.push(Data { session, socket: Socket::Tcp(stream, direction) });
    }
    match control.expect()? {
        Message::Start => {}
        other => return Err(Error::Protocol(format!("unexpected {other:?}"))),
    }
    let finished = session::run(&mut control, End::Server, &test, token, &data, &mut |_, _| {})?;
    let corrupt = finished.ours.received.iter().map(|flow| flow.corrupt).sum();
    if corrupt > 0 { Err(Error::Corrupt(corrupt)) } else { Ok(()) }
}

fn with_port(mut address: SocketAddr, port: u16) -> SocketAddr {
    address.set_port(port);
    address
}

/// Waits for a data connection of test `token`. Whoever else connects meanwhile is told that the server is
/// busy.
fn data_connection(listener: &TcpListener, token: u64) -> Result<(TcpStream, Direction, u16), Error> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Error::Silent);
        }
        let Some((stream, _)) = accept(listener, Some(left))? else { continue };
        let mut control = Control::new(stream)?;
        match control.expect() {
            Ok(Message::Data { token: theirs, direction, session }) if theirs == token => {
                control.send(&Message::Go)?;
                return Ok((control.into_stream()?, direction, session));
            }
            Ok(_) => {
                // A stranger that is gone already does not concern this test.
                let _ =
                    control.send(&Message::Failed { reason: "the server is busy with another test".into() });
            }
            Err(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn test(seconds: f64, size: usize) -> Test {
        let (sessions, ports) = (2, vec![1, 2]);
        Test { version: VERSION, mode: Mode::Udp, seconds, size, rate: None, sessions, ports }
    }

    #[test]
    fn impossible_requests_are_refused() {
        assert_eq!(check(&test(1.0, 1472)), Ok(()));
        for bad in [
            test(0.0, 1472),
            test(-1.0, 1472),
            test(f64::NAN, 1472),
            test(f64::INFINITY, 1472),
            test(1.0, 15),
            test(1.0, 65_508),
        ] {
            assert!(check(&bad).is_err(), "{bad:?}");
        }
        assert!(check(&Test { version: VERSION + 1, ..test(1.0, 1472) }).is_err());
        assert!(check(&Test { rate: Some(0), ..test(1.0, 1472) }).is_err());
        // Sessions without a port, none, and more than there are threads for.
        for sessions in [0, 1, 3] {
            assert!(check(&Test { sessions, ..test(1.0, 1472) }).is_err(), "{sessions}");
        }
        let rr = |sessions| Test { mode: Mode::Rr, sessions, ..test(1.0, 1) };
        assert_eq!(check(&rr(MAX_SESSIONS)), Ok(()));
        assert!(check(&rr(MAX_SESSIONS + 1)).is_err());
    }
}
