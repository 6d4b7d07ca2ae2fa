//! Settings of a transmit queue, and the errors of attaching one.
//!
//! The operator's [`TxConfig`] is passed to [`TxQueue::attach`](super::TxQueue::attach) once per queue and
//! does not change afterwards.

use std::num::NonZeroU16;

use super::entry::Entry;
use crate::limits::LimitError;

/// Settings of a transmit queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TxConfig {
    /// Number of ring entries that are used before completed packets are reclaimed; a lack of space
    /// reclaims earlier. `None` stands for [a quarter of the ring](super::reclaim::QUARTER).
    pub reclaim_after: Option<NonZeroU16>,
    /// The way in which several threads send into the queue: see [`TxPort`](super::entry::TxPort).
    pub entry: Entry,
    /// Capacity, in packets, of the shared ring in front of the queue, for the entries that have one.
    pub waiting: NonZeroU16,
}

/// Default capacity of the shared ring: the smallest frames of 10 Gbit/s in a seventh of a millisecond. That
/// is longer than a worker takes to wake up, and too short to add much delay. FreeBSD's iflib uses the same
/// number.
const WAITING: NonZeroU16 = NonZeroU16::new(2048).expect("not 0");

impl Default for TxConfig {
    fn default() -> Self {
        Self { reclaim_after: None, entry: Entry::InlineLock, waiting: WAITING }
    }
}

/// The reason for which a transmit queue cannot be attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AttachError {
    /// The ring has no entries.
    #[error("the transmit ring has no entries; give it at least one")]
    Empty,
    /// Every packet can be mapped, but the largest takes more entries than the ring has.
    #[error(
        "a packet of {segments} segments takes {cost} entries of a ring of {ring}; lower max_segs or make the ring larger"
    )]
    Ring {
        /// Largest number of segments of a packet.
        segments: u16,
        /// Number of ring entries that such a packet takes.
        cost: usize,
        /// Number of entries that the ring has.
        ring: u16,
    },
    /// The limits of the device do not allow every packet to be mapped.
    #[error(transparent)]
    Limits(#[from] LimitError),
}
