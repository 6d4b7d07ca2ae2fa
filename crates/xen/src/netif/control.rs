//! Messages of the control ring, and the lists of grants that they point to, as plain values (Xen's
//! `io/netif.h`, "Control ring").

use super::ring::{BackRing, FrontRing};
use crate::grant::GrantRef;

/// A raw slot of a control ring.
pub type ControlSlot = [u32; 4];
/// The back end's half of a control ring.
pub type ControlBack<A> = BackRing<A, ControlSlot>;
/// The front end's half of a control ring.
pub type ControlFront<A> = FrontRing<A, ControlSlot>;

/// Most entries of a list of grants, which has at most one page.
pub const MAX_GREFS: usize = crate::domain::PAGE / GrefEntry::BYTES;

/// A request of the front end with its parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message {
    /// Asks which headers can be hashed.
    GetHashFlags,
    /// Selects the headers that are hashed.
    SetHashFlags(u32),
    /// Sets the hash's key from a page.
    SetHashKey {
        /// Page that holds the key.
        page: GrantRef,
        /// Size of the key in bytes.
        size: u32,
    },
    /// Asks for the largest size of the table from hash to queue.
    GetHashMappingSize,
    /// Sets the number of entries of that table.
    SetHashMappingSize(u32),
    /// Sets a part of the table from a page.
    SetHashMapping {
        /// Page that holds the part.
        page: GrantRef,
        /// Number of entries in the part.
        count: u32,
        /// Index of the part's first entry in the table.
        offset: u32,
    },
    /// Selects the hash algorithm; 0 is none.
    SetHashAlgorithm(u32),
    /// Asks how many grants of a queue the back end can keep mapped.
    GetGrefMappingSize {
        /// Index of the queue, from 0.
        queue: u32,
    },
    /// Asks the back end to keep these grants mapped.
    AddGrefMapping(GrefList),
    /// Asks the back end to unmap these grants.
    DelGrefMapping(GrefList),
}

/// The place of a list of grants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GrefList {
    /// Index of the queue that the grants belong to.
    pub queue: u32,
    /// The page, readable and writable, that holds [`GrefEntry`]s from its beginning.
    pub page: GrantRef,
    /// Number of entries. A hostile peer can send any number; a page holds [`MAX_GREFS`].
    pub count: u32,
}

/// A request as it lies on the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Identifier that the response repeats.
    pub id: u16,
    /// Number of the message type.
    pub kind: u16,
    /// Parameters, whose meaning depends on the type.
    pub data: [u32; 3],
}

impl Request {
    /// Creates the request of a message.
    #[must_use]
    pub const fn new(id: u16, message: Message) -> Self {
        let (kind, data) = match message {
            Message::GetHashFlags => (1, [0; 3]),
            Message::SetHashFlags(flags) => (2, [flags, 0, 0]),
            Message::SetHashKey { page, size } => (3, [page.0, size, 0]),
            Message::GetHashMappingSize => (4, [0; 3]),
            Message::SetHashMappingSize(size) => (5, [size, 0, 0]),
            Message::SetHashMapping { page, count, offset } => (6, [page.0, count, offset]),
            Message::SetHashAlgorithm(algorithm) => (7, [algorithm, 0, 0]),
            Message::GetGrefMappingSize { queue } => (8, [queue, 0, 0]),
            Message::AddGrefMapping(list) => (9, [list.queue, list.page.0, list.count]),
            Message::DelGrefMapping(list) => (10, [list.queue, list.page.0, list.count]),
        };
        Self { id, kind, data }
    }

    /// Returns the message; `None` if its type is not defined.
    #[must_use]
    pub const fn message(&self) -> Option<Message> {
        let [a, b, c] = self.data;
        let list = GrefList { queue: a, page: GrantRef(b), count: c };
        Some(match self.kind {
            1 => Message::GetHashFlags,
            2 => Message::SetHashFlags(a),
            3 => Message::SetHashKey { page: GrantRef(a), size: b },
            4 => Message::GetHashMappingSize,
            5 => Message::SetHashMappingSize(a),
            6 => Message::SetHashMapping { page: GrantRef(a), count: b, offset: c },
            7 => Message::SetHashAlgorithm(a),
            8 => Message::GetGrefMappingSize { queue: a },
            9 => Message::AddGrefMapping(list),
            10 => Message::DelGrefMapping(list),
            _ => return None,
        })
    }

    /// Decodes a request from a raw slot.
    #[must_use]
    pub const fn from_slot([head, a, b, c]: ControlSlot) -> Self {
        Self { id: head as u16, kind: (head >> 16) as u16, data: [a, b, c] }
    }

    /// Encodes the request to a raw slot.
    #[must_use]
    pub const fn to_slot(self) -> ControlSlot {
        let [a, b, c] = self.data;
        [self.id as u32 | (self.kind as u32) << 16, a, b, c]
    }
}

/// The result of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Status {
    /// The request was carried out.
    Success = 0,
    /// The back end does not support the request.
    NotSupported = 1,
    /// A parameter of the request is invalid.
    InvalidParameter = 2,
    /// The request exceeds the back end's limit.
    BufferOverflow = 3,
}

impl Status {
    /// Decodes a status; a value that is not defined counts as a failure.
    #[must_use]
    pub const fn from_wire(status: u32) -> Self {
        match status {
            0 => Self::Success,
            1 => Self::NotSupported,
            3 => Self::BufferOverflow,
            _ => Self::InvalidParameter,
        }
    }
}

/// The response to a [`Request`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Response {
    /// Identifier that the request carried.
    pub id: u16,
    /// Message type of the request.
    pub kind: u16,
    /// Result that the back end reports.
    pub status: Status,
    /// Value that the request asked for, if any.
    pub data: u32,
}

impl Response {
    /// Creates the response to `request`.
    #[must_use]
    pub const fn to(request: &Request, status: Status, data: u32) -> Self {
        Self { id: request.id, kind: request.kind, status, data }
    }

    /// Decodes a response from a raw slot.
    #[must_use]
    pub const fn from_slot([head, status, data, _]: ControlSlot) -> Self {
        Self { id: head as u16, kind: (head >> 16) as u16, status: Status::from_wire(status), data }
    }

    /// Encodes the response to a raw slot.
    #[must_use]
    pub const fn to_slot(self) -> ControlSlot {
        [self.id as u32 | (self.kind as u32) << 16, self.status as u32, self.data, 0]
    }
}

/// An entry of a list of grants, 8 bytes in its page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GrefEntry {
    /// Grant reference of the page.
    pub gref: GrantRef,
    /// True if the back end may only read the page, as for transmit.
    pub readonly: bool,
    /// Result for this entry, set by the back end for [`Message::DelGrefMapping`].
    pub status: Status,
}

impl GrefEntry {
    /// Size of an entry in bytes.
    pub const BYTES: usize = 8;
    const READONLY: u16 = 1;

    /// Creates an entry of a grant to be added or removed.
    #[must_use]
    pub const fn new(gref: GrantRef, readonly: bool) -> Self {
        Self { gref, readonly, status: Status::Success }
    }

    /// Decodes an entry of a list.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        let [a, b, c, d, e, f, g, h] = bytes;
        Self {
            gref: GrantRef(u32::from_le_bytes([a, b, c, d])),
            readonly: u16::from_le_bytes([e, f]) & Self::READONLY != 0,
            status: Status::from_wire(u16::from_le_bytes([g, h]) as u32),
        }
    }

    /// Encodes the entry for a list.
    #[must_use]
    pub const fn to_bytes(self) -> [u8; Self::BYTES] {
        let [a, b, c, d] = self.gref.0.to_le_bytes();
        let [e, f] = (self.readonly as u16).to_le_bytes();
        let [g, h] = (self.status as u16).to_le_bytes();
        [a, b, c, d, e, f, g, h]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn netif_h_layout_of_control_messages() {
        let list = GrefList { queue: 1, page: GrantRef(7), count: 512 };
        let request = Request::new(0x0201, Message::AddGrefMapping(list));
        assert_eq!(request.to_slot(), [0x0009_0201, 1, 7, 512]);
        let response = Response::to(&request, Status::BufferOverflow, 5);
        assert_eq!(response.to_slot(), [0x0009_0201, 3, 5, 0]);
        let entry =
            GrefEntry { status: Status::InvalidParameter, ..GrefEntry::new(GrantRef(0x0403_0201), true) };
        assert_eq!(entry.to_bytes(), [1, 2, 3, 4, 1, 0, 2, 0]);
        assert_eq!(MAX_GREFS, 512);
    }

    proptest! {
        #[test]
        fn every_message_survives(slot: ControlSlot, kind in 0u32..12) {
            let request = Request::from_slot([slot[0] & 0xffff | kind << 16, slot[1], slot[2], slot[3]]);
            prop_assert_eq!(Request::from_slot(request.to_slot()), request);
            match request.message() {
                Some(message) => prop_assert_eq!(Request::new(request.id, message).message(), Some(message)),
                None => prop_assert!(kind == 0 || kind > 10),
            }
        }

        #[test]
        fn every_response_survives(slot: ControlSlot) {
            let response = Response::from_slot(slot);
            prop_assert_eq!(Response::from_slot(response.to_slot()), response);
            let entry = GrefEntry::from_bytes(std::array::from_fn(|i| (slot[i / 4] >> (8 * (i % 4))) as u8));
            prop_assert_eq!(GrefEntry::from_bytes(entry.to_bytes()), entry);
        }
    }
}
