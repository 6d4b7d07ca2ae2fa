//! Support for tests, of this crate and of others.

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::net::sockopt;

use crate::namespace;

/// How long a socket lingers: longer than any test runs.
const LINGER: Duration = Duration::from_secs(3600);

/// Returns true if a test may run that needs something special. Where it may not, says so; with `CI=true` nothing is left out.
pub fn may(what: &str, possible: bool) -> bool {
    let ci = std::env::var_os("CI").is_some_and(|ci| ci == "true");
    assert!(possible || !ci, "{what}, and CI=true allows no test to be skipped");
    if !possible {
        eprintln!("skipped: {what}");
    }
    possible
}

/// Runs `test` on a new thread in a new network namespace. Without the permission for that it prints a message and
/// skips the test, or panics if `CI=true`, where no test may be skipped.
pub fn in_new_net(test: impl FnOnce() + Send) {
    let outcome = std::thread::scope(|scope| {
        scope
            .spawn(|| match namespace::unshare_net() {
                Ok(()) => test(),
                Err(e) => drop(may(&e.to_string(), false)),
            })
            .join()
    });
    if let Err(panic) = outcome {
        std::panic::resume_unwind(panic);
    }
}

/// Returns a TCP socket whose last close waits until its peer, the other one that is returned, has read everything or ends.
///
/// A process that is started meanwhile has a copy of it until it runs its program, and would be the one that waits.
pub fn lingering() -> (OwnedFd, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (peer, _) = listener.accept().unwrap();
    ours.set_nonblocking(true).unwrap();
    while ours.write(&[0; 65536]).is_ok() {}
    ours.set_nonblocking(false).unwrap();
    sockopt::set_socket_linger(&ours, Some(LINGER)).unwrap();
    (ours.into(), peer)
}
