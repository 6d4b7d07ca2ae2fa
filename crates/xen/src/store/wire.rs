//! Messages of the store as encoded on a connection (Xen's `docs/misc/xenstore.txt`, `xs_wire.h`):
//! a header of four little-endian words and up to 4096 bytes of payload, mostly strings that end
//! with a zero byte. Clients and servers keep one [`Decoder`] per connection, on the connection's
//! thread.

use crate::domain::DomId;

/// Size of a header in bytes.
pub const HEADER: usize = 16;

/// Largest payload of any message in bytes.
pub const MAX_PAYLOAD: usize = 4096;

/// Largest payload of a request of ours in bytes: the kernel's `/dev/xen/xenbus` has 4096 bytes for
/// the header and the payload.
pub const MAX_REQUEST: usize = MAX_PAYLOAD - HEADER;

/// Type of a message: a request (its reply has the same type), a watch event, or an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Kind {
    /// Lists the names of a node's children.
    Directory = 1,
    /// Reads the value of a node.
    Read = 2,
    /// Reads the permissions of a node.
    GetPermissions = 3,
    /// Begins to watch a node.
    Watch = 4,
    /// Ends a watch of the connection.
    Unwatch = 5,
    /// Begins a transaction; the reply holds its number.
    TransactionStart = 6,
    /// Commits or aborts a transaction.
    TransactionEnd = 7,
    /// Asks for the path of a domain.
    DomainPath = 10,
    /// Writes a value, and creates the node and its parents if necessary.
    Write = 11,
    /// Creates a node, unless it exists.
    Mkdir = 12,
    /// Removes a node and all below it.
    Remove = 13,
    /// Sets the permissions of a node.
    SetPermissions = 14,
    /// Reports a change of a watched node.
    WatchEvent = 15,
    /// Reports that a request failed.
    Error = 16,
    /// Ends all watches of the connection.
    ResetWatches = 21,
    /// Lists a part of the names of a node's children, when they do not fit into one message.
    DirectoryPart = 22,
}

impl Kind {
    /// Returns the type with this number; `None` for those that only a toolstack uses.
    pub fn from_number(number: u32) -> Option<Kind> {
        use Kind::*;
        let all = [
            Directory,
            Read,
            GetPermissions,
            Watch,
            Unwatch,
            TransactionStart,
            TransactionEnd,
            DomainPath,
            Write,
            Mkdir,
            Remove,
            SetPermissions,
            WatchEvent,
            Error,
            ResetWatches,
            DirectoryPart,
        ];
        all.into_iter().find(|kind| *kind as u32 == number)
    }
}

macro_rules! codes {
    ($($(#[$doc:meta])* $code:ident = $name:literal,)*) => {
        /// Error code of a refused request: the name of an error number, as it stands in the
        /// message.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Code {
            $($(#[$doc])* $code,)*
            /// A name that is not on the list.
            Unknown,
        }

        impl Code {
            /// Returns the name in the message.
            pub fn name(self) -> &'static str {
                match self {
                    $(Code::$code => $name,)*
                    Code::Unknown => "EIO",
                }
            }

            /// Returns the code of a name in a message.
            pub fn from_name(name: &[u8]) -> Code {
                match name {
                    $(name if name == $name.as_bytes() => Code::$code,)*
                    _ => Code::Unknown,
                }
            }
        }
    };
}

codes! {
    /// The request or one of its arguments is malformed.
    Invalid = "EINVAL",
    /// The domain has no permission for the request.
    Denied = "EACCES",
    /// Only a privileged domain may send the request.
    NotPermitted = "EPERM",
    /// The watch or node exists already.
    Exists = "EEXIST",
    /// The node does not exist.
    Missing = "ENOENT",
    /// The store is out of memory.
    NoMemory = "ENOMEM",
    /// A quota of the domain is exhausted.
    Quota = "ENOSPC",
    /// The store had an internal error.
    Io = "EIO",
    /// The store does not support the request.
    Unsupported = "ENOSYS",
    /// The domain has too many transactions.
    Busy = "EBUSY",
    /// The transaction collided with another and must be repeated.
    Again = "EAGAIN",
    /// The reply or the request is too long.
    TooLong = "E2BIG",
}

/// The access of a domain to a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeAccess {
    /// Neither reading nor writing is allowed.
    None,
    /// Reading is allowed, writing is not.
    Read,
    /// Writing is allowed, reading is not.
    Write,
    /// Reading and writing are allowed.
    Both,
}

impl NodeAccess {
    /// Returns true if reading is allowed.
    pub fn reads(self) -> bool {
        matches!(self, NodeAccess::Read | NodeAccess::Both)
    }

    /// Returns true if writing is allowed.
    pub fn writes(self) -> bool {
        matches!(self, NodeAccess::Write | NodeAccess::Both)
    }
}

/// One entry of a node's permissions. The first entry names the owner, who has full access, and
/// holds the access of all domains that no other entry names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Permission {
    /// The domain that the entry names.
    pub domain: DomId,
    /// Access of the domain; in the first entry, access of the other domains.
    pub access: NodeAccess,
}

impl Permission {
    /// Creates an entry for a domain.
    pub fn new(domain: DomId, access: NodeAccess) -> Permission {
        Permission { domain, access }
    }

    /// Encodes the entry for a message, without the terminating zero byte.
    pub fn encode(self) -> String {
        let letter = match self.access {
            NodeAccess::None => 'n',
            NodeAccess::Read => 'r',
            NodeAccess::Write => 'w',
            NodeAccess::Both => 'b',
        };
        format!("{letter}{}", self.domain)
    }

    /// Decodes an entry of a message, without its terminating zero byte.
    pub fn decode(text: &[u8]) -> Option<Permission> {
        let (letter, number) = text.split_first()?;
        let access = match letter {
            b'n' => NodeAccess::None,
            b'r' => NodeAccess::Read,
            b'w' => NodeAccess::Write,
            b'b' => NodeAccess::Both,
            _ => return None,
        };
        Some(Permission { domain: DomId(number_of(number)?), access })
    }
}

/// Parses a number in plain decimal digits, without sign, space or anything after it.
pub fn number_of<T: std::str::FromStr>(text: &[u8]) -> Option<T> {
    if text.is_empty() || !text.iter().all(u8::is_ascii_digit) {
        return None;
    }
    std::str::from_utf8(text).ok()?.parse().ok()
}

/// Splits a payload into its strings, each without its zero byte; `None` when the last one has
/// none.
pub fn strings(payload: &[u8]) -> Option<Vec<&[u8]>> {
    let Some((0, body)) = payload.split_last() else {
        return payload.is_empty().then(Vec::new);
    };
    Some(body.split(|byte| *byte == 0).collect())
}

/// A message with its decoded header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Number of a [`Kind`], or any other number from a hostile peer.
    pub kind: u32,
    /// Identifier of the request, which its reply repeats.
    pub request: u32,
    /// Number of the transaction, 0 outside of one.
    pub transaction: u32,
    /// Payload of at most [`MAX_PAYLOAD`] bytes.
    pub payload: Vec<u8>,
}

impl Message {
    /// Appends the encoded message to `out`; returns false and appends nothing when the payload is
    /// too long.
    pub fn encode(&self, out: &mut Vec<u8>) -> bool {
        let fits = self.payload.len() <= MAX_PAYLOAD;
        if fits {
            for word in [self.kind, self.request, self.transaction, self.payload.len() as u32] {
                out.extend_from_slice(&word.to_le_bytes());
            }
            out.extend_from_slice(&self.payload);
        }
        fits
    }
}

/// The error for a header that announces too long a payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a message of the store is longer than {MAX_PAYLOAD} bytes")]
pub struct Oversized;

/// Splits a stream of bytes into messages.
#[derive(Debug, Default)]
pub struct Decoder {
    bytes: Vec<u8>,
    /// Offset in `bytes` at which the next message begins.
    start: usize,
}

impl Decoder {
    /// Appends received bytes. The caller takes all messages out before it appends more, so no more
    /// than one incomplete message is ever kept.
    pub fn push(&mut self, bytes: &[u8]) {
        self.bytes.drain(..self.start);
        self.start = 0;
        self.bytes.extend_from_slice(bytes);
    }

    /// Takes the next complete message, if there is one.
    ///
    /// # Errors
    /// The stream is invalid from here on.
    pub fn take(&mut self) -> Result<Option<Message>, Oversized> {
        let rest = &self.bytes[self.start..];
        let Some((header, rest)) = rest.split_first_chunk::<HEADER>() else { return Ok(None) };
        let word =
            |at: usize| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        let len = word(12) as usize;
        if len > MAX_PAYLOAD {
            return Err(Oversized);
        }
        let Some(payload) = rest.get(..len) else { return Ok(None) };
        let message =
            Message { kind: word(0), request: word(4), transaction: word(8), payload: payload.to_vec() };
        self.start += HEADER + len;
        Ok(Some(message))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use proptest::prelude::*;

    #[test]
    fn a_message_lies_in_memory_as_in_xs_wire_h() {
        let message =
            Message { kind: Kind::Read as u32, request: 7, transaction: 9, payload: b"a\0".to_vec() };
        let mut bytes = Vec::new();
        assert!(message.encode(&mut bytes));
        assert_eq!(bytes, [2, 0, 0, 0, 7, 0, 0, 0, 9, 0, 0, 0, 2, 0, 0, 0, b'a', 0]);
        let too_long = Message { payload: vec![0; MAX_PAYLOAD + 1], ..message };
        assert!(!too_long.encode(&mut bytes));
        assert_eq!(bytes.len(), 18);
    }

    #[test]
    fn a_payload_longer_than_4096_is_refused_by_its_header_alone() {
        let mut decoder = Decoder::default();
        decoder.push(&[2, 0, 0, 0, 7, 0, 0, 0, 9, 0, 0, 0, 1, 0x10, 0, 0]);
        assert_eq!(decoder.take(), Err(Oversized));
    }

    #[test]
    fn kinds_and_codes_survive_the_wire() {
        for number in 0..64 {
            assert!(Kind::from_number(number).is_none_or(|kind| kind as u32 == number));
        }
        assert_eq!(Kind::from_number(16), Some(Kind::Error));
        assert_eq!(Code::from_name(Code::Again.name().as_bytes()), Code::Again);
        assert_eq!(Code::from_name(b"EWHATEVER"), Code::Unknown);
    }

    #[test]
    fn numbers_are_digits_only() {
        assert_eq!(number_of::<u16>(b"65535"), Some(65535));
        for bad in [&b""[..], b"+1", b"-1", b" 1", b"1 ", b"65536", b"0x1", b"1\n", b"\xff"] {
            assert_eq!(number_of::<u16>(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn permissions_survive_the_wire() {
        for access in [NodeAccess::None, NodeAccess::Read, NodeAccess::Write, NodeAccess::Both] {
            let entry = Permission::new(DomId(77), access);
            assert_eq!(Permission::decode(entry.encode().as_bytes()), Some(entry));
        }
        for bad in [&b""[..], b"r", b"x1", b"r-1", b"r99999"] {
            assert_eq!(Permission::decode(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn strings_end_with_a_zero_byte() {
        assert_eq!(strings(b""), Some(vec![]));
        assert_eq!(strings(b"a\0\0b\0"), Some(vec![&b"a"[..], b"", b"b"]));
        assert_eq!(strings(b"a\0b"), None);
    }

    proptest! {
        #[test]
        fn messages_come_out_as_they_went_in_however_they_are_cut(
            messages in prop::collection::vec((any::<u32>(), any::<u32>(), any::<u32>(), prop::collection::vec(any::<u8>(), 0..200)), 1..8),
            step in 1usize..64,
        ) {
            let messages: Vec<Message> = messages.into_iter()
                .map(|(kind, request, transaction, payload)| Message { kind, request, transaction, payload })
                .collect();
            let mut bytes = Vec::new();
            messages.iter().for_each(|message| assert!(message.encode(&mut bytes)));
            let (mut decoder, mut out) = (Decoder::default(), Vec::new());
            for part in bytes.chunks(step) {
                decoder.push(part);
                while let Some(message) = decoder.take().unwrap() {
                    out.push(message);
                }
            }
            prop_assert_eq!(out, messages);
        }
    }
}
