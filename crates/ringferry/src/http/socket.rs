//! The sockets at which a server listens: Unix sockets, and addresses, of loopback unless others are allowed.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::str::FromStr;

use ringferry_sys::socket::{BindError, Listener, SocketAccess};

/// Permissions of a Unix socket: who may read what is served need not be who may change the switch.
const MODE: u32 = 0o660;

/// A place to listen at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Endpoint {
    Unix(PathBuf),
    Tcp(SocketAddr),
}

impl FromStr for Endpoint {
    type Err = String;

    fn from_str(text: &str) -> Result<Endpoint, String> {
        if text.starts_with('/') {
            return Ok(Endpoint::Unix(text.into()));
        }
        text.parse().map(Endpoint::Tcp).map_err(|_| {
            format!("{text:?} is neither an absolute path nor ADDRESS:PORT, such as 127.0.0.1:PORT (names are not looked up)")
        })
    }
}

/// The reason for which nothing is served.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// A Unix socket cannot be had.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// An address cannot be had.
    #[error("cannot listen at {0}: {1}")]
    Address(SocketAddr, io::Error),
    /// Others could read what is meant for this host.
    #[error("{0} is no address of loopback: other hosts could read what is served; --public allows it")]
    Public(SocketAddr),
    /// The system has no descriptors or threads left.
    #[error(transparent)]
    Os(#[from] io::Error),
}

/// A socket that listens.
pub enum Socket {
    /// The same socket twice: the first removes its file at the end.
    Unix(Listener, UnixListener),
    Tcp(TcpListener),
}

impl Socket {
    /// Listens; at addresses other than loopback only where that is allowed.
    ///
    /// # Errors
    /// See [`ServeError`].
    pub fn bind(endpoint: &Endpoint, public: bool) -> Result<Socket, ServeError> {
        match endpoint {
            Endpoint::Unix(path) => {
                let file =
                    Listener::bind_for(path, SocketAccess { mode: Some(MODE), ..SocketAccess::default() })?;
                let socket = UnixListener::from(file.as_fd().try_clone_to_owned()?);
                socket.set_nonblocking(true)?;
                Ok(Socket::Unix(file, socket))
            }
            Endpoint::Tcp(address) if !public && !address.ip().is_loopback() => {
                Err(ServeError::Public(*address))
            }
            Endpoint::Tcp(address) => {
                let bound = TcpListener::bind(address)
                    .and_then(|socket| socket.set_nonblocking(true).map(|()| socket));
                Ok(Socket::Tcp(bound.map_err(|error| ServeError::Address(*address, error))?))
            }
        }
    }

    /// Returns where it listens, with the port that the kernel has chosen for port 0.
    pub fn name(&self) -> io::Result<String> {
        match self {
            Socket::Unix(file, _) => {
                Ok(file.path().map_or_else(String::new, |path| path.display().to_string()))
            }
            Socket::Tcp(socket) => Ok(socket.local_addr()?.to_string()),
        }
    }

    pub fn accept(&self) -> io::Result<Peer> {
        let peer = match self {
            Socket::Unix(_, socket) => Peer::Unix(socket.accept()?.0),
            Socket::Tcp(socket) => Peer::Tcp(socket.accept()?.0),
        };
        match &peer {
            Peer::Unix(stream) => stream.set_nonblocking(true)?,
            Peer::Tcp(stream) => stream.set_nonblocking(true)?,
        }
        Ok(peer)
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Socket::Unix(file, _) => file.as_fd(),
            Socket::Tcp(socket) => socket.as_fd(),
        }
    }
}

/// The other end of a connection.
pub enum Peer {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl Peer {
    /// Whether it came by a Unix socket, to which a browser cannot be lured.
    pub fn is_unix(&self) -> bool {
        matches!(self, Peer::Unix(_))
    }

    pub fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Peer::Unix(stream) => stream.read(into),
            Peer::Tcp(stream) => stream.read(into),
        }
    }

    pub fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        match self {
            Peer::Unix(stream) => stream.write(data),
            Peer::Tcp(stream) => stream.write(data),
        }
    }
}

impl AsFd for Peer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Peer::Unix(stream) => stream.as_fd(),
            Peer::Tcp(stream) => stream.as_fd(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_is_a_path_or_an_address_of_this_host() {
        assert_eq!("/run/m.sock".parse(), Ok(Endpoint::Unix("/run/m.sock".into())));
        assert_eq!("[::1]:9482".parse(), Ok(Endpoint::Tcp("[::1]:9482".parse().unwrap())));
        for wrong in ["9482", "m.sock", "127.0.0.1", ":9482", ""] {
            assert!(Endpoint::from_str(wrong).is_err(), "{wrong}");
        }
        let everybody = "0.0.0.0:0".parse().unwrap();
        assert!(matches!(Socket::bind(&everybody, false), Err(ServeError::Public(_))));
        assert!(matches!(Socket::bind(&everybody, true), Ok(Socket::Tcp(_))));
    }
}
