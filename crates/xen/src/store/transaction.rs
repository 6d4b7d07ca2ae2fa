//! [`Nodes`]: requests about nodes, each alone on a [`Client`] or several as one in a
//! [`Transaction`]. A transaction is optimistic: it begins and ends within [`Client::transaction`],
//! which runs it again when the store reports a collision.

use std::str::FromStr;

use super::client::{Client, StoreError};
use super::path;
use super::wire::{self, Code, Kind, Permission};

/// Most attempts at a transaction that collides with others. Under Xen the toolstack writes its
/// nodes for a new device in one transaction that touches the same directories, so a few collisions
/// are normal.
const ATTEMPTS: usize = 64;

/// Most attempts at reading a list of names in parts while it changes.
const LIST_ATTEMPTS: usize = 16;

/// Largest list of names that is read in parts, in bytes.
const MAX_LIST_BYTES: usize = 65536;

/// Requests about nodes, carried out by a [`Client`] one by one, or in a [`Transaction`] as one.
/// Paths that do not begin with a slash are relative to the domain's own node.
pub trait Nodes {
    /// Sends a request about `path`, with `rest` as the rest of its payload, and returns the
    /// payload of the reply.
    ///
    /// # Errors
    /// Any [`StoreError`].
    fn request(&mut self, kind: Kind, path: &str, rest: &[u8]) -> Result<Vec<u8>, StoreError>;

    /// Reads the value of a node; `None` when it does not exist.
    ///
    /// # Errors
    /// Any [`StoreError`].
    fn read(&mut self, path: &str) -> Result<Option<Vec<u8>>, StoreError> {
        or_missing(self.request(Kind::Read, path, b""))
    }

    /// Reads the value of a node as text; `None` when it does not exist.
    ///
    /// # Errors
    /// [`StoreError::Malformed`] when the value is not UTF-8 or contains control characters (it may
    /// be printed); otherwise any [`StoreError`].
    fn text(&mut self, path: &str) -> Result<Option<String>, StoreError> {
        let Some(bytes) = self.read(path)? else { return Ok(None) };
        match String::from_utf8(bytes) {
            Ok(text) if !text.contains(char::is_control) => Ok(Some(text)),
            _ => Err(StoreError::Malformed { path: path.to_owned(), expected: "text" }),
        }
    }

    /// Reads the value of a node as a number in decimal digits; `None` when it does not exist.
    ///
    /// # Errors
    /// [`StoreError::Malformed`] when the value is not a number, or too large for `T`; otherwise
    /// any [`StoreError`].
    fn number<T: FromStr>(&mut self, path: &str) -> Result<Option<T>, StoreError> {
        let Some(bytes) = self.read(path)? else { return Ok(None) };
        let malformed = || StoreError::Malformed { path: path.to_owned(), expected: "a number" };
        wire::number_of(&bytes).map(Some).ok_or_else(malformed)
    }

    /// Reads a flag: true if the node has the value `1`, false if it is absent or has any other
    /// value.
    ///
    /// # Errors
    /// Any [`StoreError`].
    fn flag(&mut self, path: &str) -> Result<bool, StoreError> {
        Ok(self.read(path)?.is_some_and(|value| value == b"1"))
    }

    /// Writes a node. It is created with its parents if necessary, and then has its parent's
    /// permissions.
    ///
    /// # Errors
    /// Any [`StoreError`].
    fn write(&mut self, path: &str, value: impl AsRef<[u8]>) -> Result<(), StoreError> {
        self.request(Kind::Write, path, value.as_ref()).map(drop)
    }

    /// Creates a node with an empty value, unless it exists.
    ///
    /// # Errors
    /// Any [`StoreError`].
    fn mkdir(&mut self, path: &str) -> Result<(), StoreError> {
        self.request(Kind::Mkdir, path, b"").map(drop)
    }

    /// Removes a node and everything below it. It is no error if the node does not exist.
    ///
    /// # Errors
    /// Any [`StoreError`].
    fn remove(&mut self, path: &str) -> Result<(), StoreError> {
        or_missing(self.request(Kind::Remove, path, b"")).map(drop)
    }

    /// Lists the names of a node's children, in the store's order; empty when the node does not
    /// exist.
    ///
    /// # Errors
    /// [`StoreError::Malformed`] for an invalid name; otherwise any [`StoreError`].
    fn directory(&mut self, path: &str) -> Result<Vec<String>, StoreError> {
        match self.request(Kind::Directory, path, b"") {
            Ok(payload) => names(path, &payload),
            Err(error) if error.is(Code::Missing) => Ok(Vec::new()),
            Err(error) if error.is(Code::TooLong) => long_directory(self, path),
            Err(error) => Err(error),
        }
    }

    /// Reads the permissions of a node.
    ///
    /// # Errors
    /// Any [`StoreError`].
    fn permissions(&mut self, path: &str) -> Result<Vec<Permission>, StoreError> {
        let payload = self.request(Kind::GetPermissions, path, b"")?;
        let malformed = || StoreError::Malformed { path: path.to_owned(), expected: "a list of permissions" };
        let entries = wire::strings(&payload).ok_or_else(malformed)?;
        entries.into_iter().map(|entry| Permission::decode(entry).ok_or_else(malformed)).collect()
    }

    /// Sets the permissions of a node: the owner first, with the access of all other domains.
    ///
    /// # Errors
    /// Any [`StoreError`].
    fn set_permissions(&mut self, path: &str, permissions: &[Permission]) -> Result<(), StoreError> {
        let mut rest = Vec::new();
        for entry in permissions {
            rest.extend_from_slice(entry.encode().as_bytes());
            rest.push(0);
        }
        self.request(Kind::SetPermissions, path, &rest).map(drop)
    }
}

fn or_missing(result: Result<Vec<u8>, StoreError>) -> Result<Option<Vec<u8>>, StoreError> {
    match result {
        Err(error) if error.is(Code::Missing) => Ok(None),
        result => result.map(Some),
    }
}

fn names(path: &str, payload: &[u8]) -> Result<Vec<String>, StoreError> {
    let malformed = || StoreError::Malformed { path: path.to_owned(), expected: "a list of names" };
    let name = |bytes: &[u8]| {
        let name = std::str::from_utf8(bytes).ok().filter(|name| path::is_name(name))?;
        Some(name.to_owned())
    };
    let names = wire::strings(payload).ok_or_else(malformed)?;
    names.into_iter().map(|bytes| name(bytes).ok_or_else(malformed)).collect()
}

/// Reads a list of names that does not fit into one reply. Each part begins with the node's
/// generation; a different one means that the list has changed.
fn long_directory<N: Nodes + ?Sized>(nodes: &mut N, path: &str) -> Result<Vec<String>, StoreError> {
    let malformed = || StoreError::Malformed { path: path.to_owned(), expected: "a part of a list of names" };
    let mut list: Vec<u8> = Vec::new();
    let (mut generation, mut attempts) = (None, 0);
    while list.len() < MAX_LIST_BYTES {
        let payload = nodes.request(Kind::DirectoryPart, path, format!("{}\0", list.len()).as_bytes())?;
        let end = payload.iter().position(|byte| *byte == 0).ok_or_else(malformed)?;
        let (now, part) = (&payload[..end], &payload[end + 1..]);
        if generation.as_deref().is_some_and(|before| before != now) {
            attempts += 1;
            if attempts == LIST_ATTEMPTS {
                return Err(StoreError::Busy);
            }
            (generation, list) = (None, Vec::new());
            continue;
        }
        generation = Some(now.to_owned());
        match part {
            [] => return Err(malformed()),
            // The last part ends with an empty name.
            [0] => return names(path, &list),
            [.., 0, 0] => {
                list.extend_from_slice(&part[..part.len() - 1]);
                return names(path, &list);
            }
            _ => list.extend_from_slice(part),
        }
    }
    Err(malformed())
}

impl Nodes for Client {
    fn request(&mut self, kind: Kind, path: &str, rest: &[u8]) -> Result<Vec<u8>, StoreError> {
        self.call(kind, 0, path, rest)
    }
}

/// Requests that take effect together or not at all, created by [`Client::transaction`].
#[derive(Debug)]
pub struct Transaction<'c> {
    client: &'c mut Client,
    id: u32,
}

impl Nodes for Transaction<'_> {
    fn request(&mut self, kind: Kind, path: &str, rest: &[u8]) -> Result<Vec<u8>, StoreError> {
        self.client.call(kind, self.id, path, rest)
    }
}

impl Client {
    /// Runs `body` in a transaction and commits it; runs it again when it collided with another
    /// request. An error of `body` leaves the store unchanged.
    ///
    /// # Errors
    /// The error of `body`; [`StoreError::Busy`] after many collisions; otherwise any
    /// [`StoreError`].
    pub fn transaction<R>(
        &mut self,
        mut body: impl FnMut(&mut Transaction<'_>) -> Result<R, StoreError>,
    ) -> Result<R, StoreError> {
        for _ in 0..ATTEMPTS {
            let id = self.transaction_start()?;
            let result = body(&mut Transaction { client: self, id });
            let commit = result.is_ok();
            match (self.transaction_end(id, commit), result) {
                // A store may report the collision before the body has ended.
                (_, Err(error)) if error.is(Code::Again) => {}
                (_, Err(error)) => return Err(error),
                (Ok(()), Ok(value)) => return Ok(value),
                (Err(error), Ok(_)) if error.is(Code::Again) => {}
                (Err(error), Ok(_)) => return Err(error),
            }
        }
        Err(StoreError::Busy)
    }
}
