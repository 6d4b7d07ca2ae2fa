//! Messages between a domain and the broker: one fixed request, one fixed reply, at most two
//! descriptors. This is not an interface of the library: the broker in `ringferry-xen-sim` is its
//! only other user.
#![allow(missing_docs)]

use crate::domain::DomId;
use crate::grant::{Access, GrantRef};

/// Size of a request or a reply in bytes: eight words in the host's byte order, as both ends run on
/// one host.
pub const MESSAGE: usize = 32;

/// A message as words in the host's byte order.
type Words = [u32; MESSAGE / 4];

/// A request of a domain to the broker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// Asks to become a domain, with this number if that is not `None`. It comes first, once.
    Hello(Option<DomId>),
    /// Asks whether a domain exists.
    Find(DomId),
    /// Asks for pages that are granted to a domain.
    Grant { to: DomId, count: u32, access: Access },
    /// Ends the grants whose first reference this is.
    End(GrantRef),
    /// Asks for the segment of another domain's reference.
    Resolve { domain: DomId, gref: GrantRef },
    /// Allocates an event channel port to which `remote` may bind.
    Alloc { remote: DomId },
    /// Binds to another domain's port.
    Bind { maker: DomId, port: u32 },
    /// Closes this domain's end of a port.
    Close { maker: DomId, port: u32, binder: bool },
}

/// A reply of the broker; the meaning of the words depends on the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reply {
    /// The request was carried out.
    Done([u32; 3]),
    /// The request was refused with this `errno`.
    Refused(i32),
}

pub fn access_word(access: Access) -> u32 {
    match access {
        Access::Read => 0,
        Access::Write => 1,
    }
}

pub fn access(word: u32) -> Option<Access> {
    match word {
        0 => Some(Access::Read),
        1 => Some(Access::Write),
        _ => None,
    }
}

fn dom(word: u32) -> Option<DomId> {
    u16::try_from(word).ok().map(DomId)
}

fn pack(words: Words) -> [u8; MESSAGE] {
    let mut bytes = [0; MESSAGE];
    for (to, word) in bytes.chunks_exact_mut(4).zip(words) {
        to.copy_from_slice(&word.to_ne_bytes());
    }
    bytes
}

fn unpack(bytes: &[u8; MESSAGE]) -> Words {
    let mut words = [0; MESSAGE / 4];
    for (word, from) in words.iter_mut().zip(bytes.chunks_exact(4)) {
        *word = u32::from_ne_bytes([from[0], from[1], from[2], from[3]]);
    }
    words
}

impl Request {
    pub fn encode(self) -> [u8; MESSAGE] {
        let [op, a, b, c] = match self {
            Request::Hello(id) => [1, id.is_some().into(), id.unwrap_or_default().0.into(), 0],
            Request::Find(id) => [2, id.0.into(), 0, 0],
            Request::Grant { to, count, access } => [3, to.0.into(), count, access_word(access)],
            Request::End(first) => [4, first.0, 0, 0],
            Request::Resolve { domain, gref } => [5, domain.0.into(), gref.0, 0],
            Request::Alloc { remote } => [6, remote.0.into(), 0, 0],
            Request::Bind { maker, port } => [7, maker.0.into(), port, 0],
            Request::Close { maker, port, binder } => [8, maker.0.into(), port, binder.into()],
        };
        pack([op, a, b, c, 0, 0, 0, 0])
    }

    /// Decodes a request; `None` if it is invalid.
    pub fn decode(bytes: &[u8; MESSAGE]) -> Option<Request> {
        let [op, a, b, c, ..] = unpack(bytes);
        Some(match op {
            1 if a == 0 => Request::Hello(None),
            1 => Request::Hello(Some(dom(b)?)),
            2 => Request::Find(dom(a)?),
            3 => Request::Grant { to: dom(a)?, count: b, access: access(c)? },
            4 => Request::End(GrantRef(a)),
            5 => Request::Resolve { domain: dom(a)?, gref: GrantRef(b) },
            6 => Request::Alloc { remote: dom(a)? },
            7 => Request::Bind { maker: dom(a)?, port: b },
            8 => Request::Close { maker: dom(a)?, port: b, binder: c != 0 },
            _ => return None,
        })
    }
}

impl Reply {
    pub fn encode(self) -> [u8; MESSAGE] {
        match self {
            Reply::Done([a, b, c]) => pack([0, a, b, c, 0, 0, 0, 0]),
            Reply::Refused(errno) => pack([errno.unsigned_abs().max(1), 0, 0, 0, 0, 0, 0, 0]),
        }
    }

    pub fn decode(bytes: &[u8; MESSAGE]) -> Reply {
        match unpack(bytes) {
            [0, a, b, c, ..] => Reply::Done([a, b, c]),
            [errno, ..] => Reply::Refused(i32::try_from(errno).unwrap_or(i32::MAX)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_come_out_as_they_went_in() {
        let (id, gref) = (DomId(0x1234), GrantRef(u32::MAX));
        for request in [
            Request::Hello(None),
            Request::Hello(Some(DomId(0))),
            Request::Hello(Some(id)),
            Request::Find(id),
            Request::Grant { to: id, count: 77, access: Access::Read },
            Request::Grant { to: id, count: u32::MAX, access: Access::Write },
            Request::End(gref),
            Request::Resolve { domain: id, gref },
            Request::Alloc { remote: id },
            Request::Bind { maker: id, port: 9 },
            Request::Close { maker: id, port: 9, binder: true },
            Request::Close { maker: id, port: 9, binder: false },
        ] {
            assert_eq!(Request::decode(&request.encode()), Some(request));
        }
        for reply in [Reply::Done([1, 2, u32::MAX]), Reply::Refused(22)] {
            assert_eq!(Reply::decode(&reply.encode()), reply);
        }
    }

    #[test]
    fn nonsense_is_no_request() {
        for words in [
            [0, 0, 0, 0, 0, 0, 0, 0],
            [9, 0, 0, 0, 0, 0, 0, 0],
            [u32::MAX; 8],
            [2, 0x1_0000, 0, 0, 0, 0, 0, 0],
            [3, 0, 1, 2, 0, 0, 0, 0],
        ] {
            assert_eq!(Request::decode(&pack(words)), None, "{words:?}");
        }
    }
}
