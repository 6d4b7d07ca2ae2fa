//! The helper: a process that serves one switch within its [`Charter`], until that switch ends.

use std::io;
use std::os::fd::OwnedFd;

use ringferry_sys::socket::{Stream, remove_if_stale};

use super::wire::{Connection, Reply, Request};
use super::{Bytes, Charter};
use crate::config::{Config, Edit, KeepError, keep};

/// Reads a charter from `stream`, gives up with `confine` all rights that it does not need, and answers
/// requests until the other end is closed.
///
/// # Errors
/// The stream breaks, or carries bytes that are no message.
pub fn serve(stream: Stream, confine: impl FnOnce(&Charter)) -> io::Result<()> {
    let mut connection = Connection::new(stream);
    let Some((charter, _)) = connection.receive::<Charter>()? else { return Ok(()) };
    confine(&charter);
    connection.send(&Reply::Done, None)?;
    while let Some((request, _)) = connection.receive::<Request>()? {
        let (reply, fd) = charter.answer(request);
        connection.send(&reply, fd)?;
    }
    Ok(())
}

impl Charter {
    /// Carries out a request. The switch may have been taken over, so the charter alone decides.
    pub(super) fn answer(&self, request: Request) -> (Reply, Option<OwnedFd>) {
        match request {
            Request::Connect { port } => match self.connected(&port) {
                Ok(fd) => (Reply::Done, Some(fd)),
                Err(error) => (error.into(), None),
            },
            Request::Keep { port, keys } => (self.keep(&port, &keys).unwrap_or_else(|refusal| refusal), None),
            Request::Tidy => {
                for socket in self.sockets.iter().map(Bytes::path) {
                    let _ = remove_if_stale(socket);
                }
                (Reply::Done, None)
            }
        }
    }

    fn connected(&self, port: &str) -> io::Result<OwnedFd> {
        let none = || io::Error::new(io::ErrorKind::PermissionDenied, "the port connects to no socket");
        Stream::connect(self.connect.get(port).ok_or_else(none)?.path()).map(OwnedFd::from)
    }

    fn keep(&self, port: &str, keys: &[String]) -> Result<Reply, Reply> {
        let failed = |text: &str| Reply::Failed { code: None, text: text.to_owned() };
        let (file, ports) = self.file.as_ref().ok_or_else(|| failed("there is no configuration file"))?;
        let mut config = Config::builder()
            .toml("the port", port)
            .build()
            .map_err(|error| Reply::Refused { text: error.to_string() })?;
        let (Some(port), true) = (config.ports.pop(), config.ports.is_empty()) else {
            return Err(failed("that is not one port"));
        };
        if !ports.contains(&port.name) {
            return Err(failed("the configuration file has no such port"));
        }
        let edit = Edit::of_keys(keys).ok_or_else(|| failed("that is no rule of a port"))?;
        match keep(file.path(), &port.name, &edit, &port.rules) {
            Ok(same) => Ok(Reply::Kept { same }),
            Err(KeepError::NotKept(text)) => Err(Reply::Failed { code: None, text }),
            Err(KeepError::Refused(error)) => Err(Reply::Refused { text: error.to_string() }),
        }
    }
}
