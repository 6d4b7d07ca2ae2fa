#![doc = include_str!("../README.md")]
//!
//! # In detail
//!
//! The vhost-user protocol, both ends: the VMM of a guest (the *front end*) hands the rings of a
//! virtio device to another process (the *back end*) over a Unix socket.
//!
//! A back end creates one [`Session`] for each accepted connection, calls [`Session::on_readable`]
//! from its epoll loop, and implements [`Device`] to be told which rings start and stop. The
//! session ends when `on_readable` fails or its owner calls [`Session::disconnect`]. A front end
//! calls [`connect_device`], then [`Connection::start`] and [`Connection::stop`] as often as it
//! likes, and ends the connection by dropping it. Neither end starts a thread: every call runs on
//! its caller's, a session never blocks, and a connection blocks for at most its timeout.
//!
//! | module | idea | owns |
//! |---|---|---|
//! | [`message`] | one table of all messages, and the layouts of their payloads | nothing |
//! | `wire` | framing: messages with their descriptors, over partial reads | the socket |
//! | [`base`] | the encoding of the position at which a ring resumes | nothing |
//! | [`inflight`] | the redo log from which packed rings resume after a crash | the shared region |
//! | `vring` | one ring as described, checked and resolved | the ring's events |
//! | [`backend`] | [`Session`]: the back end of one connection as a state machine | features, memory map, rings |
//! | [`frontend`] | [`Frontend`]: one call per message | its end of the socket |
//! | [`connection`] | [`Connection`]: the set-up of a whole device | a [`Frontend`] |
//!
//! # States of a ring
//!
//! ```text
//!            SET_VRING_KICK, once size, addresses, features and memory are known
//!   stopped ------------------------------------------------------------------> started
//!      ^                                                                           |
//!      +---------------------------------------------------------------------------+
//!            GET_VRING_BASE (tells where it stopped), SET_STATUS(0), RESET_DEVICE, disconnect
//!
//!   disabled <-- SET_VRING_ENABLE --> enabled          independent of the above
//! ```
//!
//! A ring begins stopped and disabled. `SET_FEATURES` without `F_PROTOCOL_FEATURES` enables all
//! rings; with it nothing changes, and `SET_VRING_ENABLE` may come before or after. A change of the
//! memory map, the size or the addresses of a running ring stops and starts it behind the scenes.
//!
//! # Packed rings
//!
//! With `RING_PACKED` the address of the available ring is that of the driver's event suppression
//! structure, and the address of the used ring that of the device's; [`base`] describes what
//! `SET_VRING_BASE` means. Size, addresses and base may come before `SET_FEATURES`: they are
//! checked at once when the layout is known, and in any case when the ring starts.
//!
//! # Order of messages
//!
//! QEMU sends `GET_FEATURES`, `GET_PROTOCOL_FEATURES`, `SET_PROTOCOL_FEATURES`, `GET_QUEUE_NUM`,
//! `SET_BACKEND_REQ_FD`, `SET_OWNER`, `GET_FEATURES`, then `SET_VRING_CALL` and `SET_VRING_ERR` per
//! ring, `SET_VRING_ENABLE` many times, then `SET_FEATURES`, status, `SET_MEM_TABLE`, and per ring
//! `NUM`, `BASE`, `ADDR`, `KICK`, `CALL`. To stop, it sends `GET_VRING_BASE` per ring. [`Session`]
//! depends on none of this order; [`Connection`] keeps to it.
#![forbid(unsafe_code)]

pub mod backend;
pub mod base;
pub mod connection;
pub mod frontend;
pub mod inflight;
pub mod message;
mod vring;
mod wire;

pub use backend::{
    Counters, Device, Offer, Progress, Refusal, Resources, RingState, Session, SessionError, Unanswered,
};
pub use connection::{Connection, Negotiated, RingPlan, Wanted, connect_device, connect_device_until};
pub use frontend::{Frontend, FrontendError};
pub use inflight::{InflightError, InflightRegion, resume_base};
pub use message::ProtocolFeatures;
pub use vring::{RingError, RingSetup};
pub use wire::WireError;
