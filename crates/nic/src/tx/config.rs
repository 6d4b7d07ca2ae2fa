//! What an operator may choose for a transmit queue, and why a queue is not made.

use std::num::NonZeroU16;

use super::entry::Entry;
use crate::limits::LimitError;

/// Settings of a transmit queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TxConfig {
    /// Entries that are used before reclaim looks at the ring again, unless it is short of space. `None`:
    /// [a quarter of the ring](super::reclaim::QUARTER).
    pub reclaim_after: Option<NonZeroU16>,
    /// How several threads send into the queue, if they do: see [`TxPort`](super::entry::TxPort).
    pub entry: Entry,
    /// Packets that wait in front of the queue at most, for the entries that have a waiting room.
    pub waiting: NonZeroU16,
}

/// What ten gigabits of the smallest frames bring in a seventh of a millisecond: longer than a worker takes to wake,
/// and too short for a queue that is only delay. FreeBSD's framework takes as many.
const WAITING: NonZeroU16 = NonZeroU16::new(2048).expect("not 0");

impl Default for TxConfig {
    fn default() -> Self {
        Self { reclaim_after: None, entry: Entry::InlineLock, waiting: WAITING }
    }
}

/// Why a transmit queue is not made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AttachError {
    /// A ring without entries.
    #[error("the transmit ring has no entries; give it at least one")]
    Empty,
    /// There is no packet that could not be mapped, but one that could not be sent.
    #[error(
        "a packet of {segments} segments takes {cost} entries of a ring of {ring}; lower max_segs or make the ring larger"
    )]
    Ring {
        /// Most segments of a packet.
        segments: u16,
        /// Entries that it takes.
        cost: usize,
        /// Entries of the ring.
        ring: u16,
    },
    /// Not every packet could be mapped.
    #[error(transparent)]
    Limits(#[from] LimitError),
}
