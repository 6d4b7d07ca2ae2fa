//! Messages of the control ring, and the lists of grants they point to.

use super::ring::{BackRing, FrontRing};
use crate::grant::GrantRef;

/// A slot of a control ring, as it lies there.
pub type ControlSlot = [u32; 4];
/// The back end's half of a control ring.
pub type ControlBack<A> = BackRing<A, ControlSlot>;
/// The front end's half.
pub type ControlFront<A> = FrontRing<A, ControlSlot>;

/// Entries of a list of grants, which fills one page at most.
pub const MAX_GREFS: usize = crate::domain::PAGE / GrefEntry::BYTES;

/// What the front end asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message {
    /// Which headers can be hashed?
    GetHashFlags,
    /// Hash these headers.
    SetHashFlags(u32),
    /// Take the hash's key, so many bytes, from a page.
    SetHashKey {
        /// The page.
        page: GrantRef,
        /// Bytes of the key.
        size: u32,
    },
    /// How long may the table from hash to queue be?
    GetHashMappingSize,
    /// Make it so long.
    SetHashMappingSize(u32),
    /// Take a part of the table from a page.
    SetHashMapping {
        /// The page.
        page: GrantRef,
        /// Entries of the part.
        count: u32,
        /// First entry of the part.
        offset: u32,
    },
    /// Hash in this way; 0 is not at all.
    SetHashAlgorithm(u32),
    /// How many grants can a queue keep mapped?
    GetGrefMappingSize {
        /// The queue.
        queue: u32,
    },
    /// Keep these grants mapped.
    AddGrefMapping(GrefList),
    /// Let go of these.
    DelGrefMapping(GrefList),
}

/// Where a list of grants lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GrefList {
    /// The queue that the grants are for.
    pub queue: u32,
    /// The page, readable and writable, that holds [`GrefEntry`]s from its beginning on.
    pub page: GrantRef,
    /// How many there are. Any number a peer likes; more than [`MAX_GREFS`] are not in one page.
    pub count: u32,
}

/// A request on the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// What the response will name.
    pub id: u16,
    /// Kind of message, as on the wire.
    pub kind: u16,
    /// Its parameters.
    pub data: [u32; 3],
}

impl Request {
    /// A message as a request.
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

    /// What is asked for; `None` for a kind that is not defined.
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

    /// From a slot.
    #[must_use]
    pub const fn from_slot([head, a, b, c]: ControlSlot) -> Self {
        Self { id: head as u16, kind: (head >> 16) as u16, data: [a, b, c] }
    }

    /// To a slot.
    #[must_use]
    pub const fn to_slot(self) -> ControlSlot {
        let [a, b, c] = self.data;
        [self.id as u32 | (self.kind as u32) << 16, a, b, c]
    }
}

/// What became of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Status {
    /// It was done.
    Success = 0,
    /// The back end does not know how, or does not want to.
    NotSupported = 1,
    /// It makes no sense.
    InvalidParameter = 2,
    /// It asks for more than there is room for.
    BufferOverflow = 3,
}

impl Status {
    /// From the wire; what is not defined is a failure, too.
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

/// The answer to a [`Request`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Response {
    /// Of the request.
    pub id: u16,
    /// Its kind.
    pub kind: u16,
    /// What became of it.
    pub status: Status,
    /// What was asked for, if anything was.
    pub data: u32,
}

impl Response {
    /// The answer to `request`.
    #[must_use]
    pub const fn to(request: &Request, status: Status, data: u32) -> Self {
        Self { id: request.id, kind: request.kind, status, data }
    }

    /// From a slot.
    #[must_use]
    pub const fn from_slot([head, status, data, _]: ControlSlot) -> Self {
        Self { id: head as u16, kind: (head >> 16) as u16, status: Status::from_wire(status), data }
    }

    /// To a slot.
    #[must_use]
    pub const fn to_slot(self) -> ControlSlot {
        [self.id as u32 | (self.kind as u32) << 16, self.status as u32, self.data, 0]
    }
}

/// An entry of a list of grants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GrefEntry {
    /// The grant.
    pub gref: GrantRef,
    /// It can only be read: for transmit.
    pub readonly: bool,
    /// Set in answer to [`Message::DelGrefMapping`]: what became of this entry.
    pub status: Status,
}

impl GrefEntry {
    /// Bytes of an entry.
    pub const BYTES: usize = 8;
    const READONLY: u16 = 1;

    /// A grant to be added or let go of.
    #[must_use]
    pub const fn new(gref: GrantRef, readonly: bool) -> Self {
        Self { gref, readonly, status: Status::Success }
    }

    /// From the list.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        let [a, b, c, d, e, f, g, h] = bytes;
        Self {
            gref: GrantRef(u32::from_le_bytes([a, b, c, d])),
            readonly: u16::from_le_bytes([e, f]) & Self::READONLY != 0,
            status: Status::from_wire(u16::from_le_bytes([g, h]) as u32),
        }
    }

    /// Into the list.
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
