#![doc = include_str!("../README.md")]
//!
//! # In detail
//!
//! Virtqueues (VIRTIO 1.4, 2.6 to 2.8): the rings that carry buffers between a driver and a device.
//!
//! A half is created when a queue is enabled ([`Device::new`], [`Driver::new`]), is owned by one thread,
//! and is dropped when the queue stops. Work is done in bursts: [`Device::take`], [`Device::complete_all`],
//! one [`Device::publish`]; [`Driver::add`], one [`Driver::publish`], [`Driver::collect`].
//!
//! | module | contents |
//! |---|---|
//! | [`chain`] | buffers, descriptor chains and bursts of chains, as the device half takes them |
//! | [`device`] | the device half of either layout: takes available chains and completes them |
//! | [`driver`] | the driver half of either layout: adds chains and collects used ones |
//! | [`parts`] | the memory areas of a ring: sizes, alignments, checks |
//! | [`write_log`] | what the device half records of its writes while the driver's memory is migrated |
//! | [`inflight`] | format of the log from which a packed ring is taken over after a crash |
//! | `split`, `packed` | the two layouts, twins file for file; private |
//!
//! The layout is chosen once, at set-up; [`Device`] and [`Driver`] dispatch on it once per call. A half
//! *shadows* the shared words that it writes (they are stored and never loaded) and *caches* the peer's
//! (the peer's index is loaded only when the cached one has run dry), so each cache line moves in one
//! direction.
//!
//! A word written by the peer is read once, checked, then used. A violation breaks the ring: the half
//! stores the [`Fault`], refuses all further work, and must be dropped. Rings handle addresses and lengths;
//! they never touch the bytes of a buffer.
#![forbid(unsafe_code)]

pub mod chain;
pub mod device;
pub mod driver;
mod outstanding;
mod packed;
pub mod parts;
mod split;
pub mod write_log;

pub use chain::{Buffer, Chain, Chains, Done, Tables};
pub use device::{Device, Unanswered};
pub use driver::{AddError, Driver, IndirectTables, Used};
pub use packed::inflight;
pub use parts::{LayoutError, MAX_SIZE, Parts, check_size, part_bytes};
pub use write_log::{RingAddresses, WriteLog};

/// A violation of the ring's rules by the peer. It breaks the ring until the ring is set up anew.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// The peer's index jumped ahead by this many entries: more than the ring holds, chains not yet
    /// completed included, or, for a used index, more than were outstanding.
    #[error("index jumped by {0}, more than the ring can hold")]
    IndexJump(u16),
    /// A descriptor index, or the id in a used element, lies outside the ring.
    #[error("descriptor index {0} is outside the ring")]
    BadIndex(u32),
    /// A chain is longer than the queue size (VIRTIO 1.4, 2.7.5.3.1), and hence possibly a loop, or longer
    /// than 1024 descriptors.
    #[error("descriptor chain is longer than the queue size or 1024")]
    ChainTooLong,
    /// The buffers of a chain have 2^32 bytes or more together (2.7.5).
    #[error("descriptor chain has 2^32 bytes or more")]
    ChainTooLarge,
    /// A device-readable descriptor follows a device-writable one (2.7.4.2).
    #[error("device-readable descriptor behind a device-writable one")]
    ReadableAfterWritable,
    /// VIRTQ_DESC_F_INDIRECT is set without the feature, inside an indirect table, or together with
    /// VIRTQ_DESC_F_NEXT (2.7.5.3.1).
    #[error("indirect descriptor where none is allowed")]
    BadIndirect,
    /// An indirect table is empty, is not a whole number of descriptors, or lies outside guest memory.
    #[error("indirect table is empty, ragged or outside memory")]
    BadTable,
    /// A chain cannot be used by its queue: its buffers lie outside guest memory, have the wrong direction,
    /// or are too short for a header. The device type above the ring detects this, not the ring.
    #[error("chain of no use: buffers outside memory, of the wrong direction, or too short")]
    Unusable,
    /// The device returned a chain, by this id, that was not outstanding.
    #[error("used descriptor {0} was not outstanding")]
    NotOutstanding(u32),
}

/// Feature bits that change how a ring works (VIRTIO 1.4, 6).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RingFeatures {
    /// `VIRTIO_F_INDIRECT_DESC` (bit 28): a descriptor may refer to a table of descriptors.
    pub indirect: bool,
    /// `VIRTIO_F_EVENT_IDX` (bit 29): a side may ask for a signal at a certain entry.
    pub event_idx: bool,
    /// `VIRTIO_F_RING_PACKED` (bit 34): the ring is packed; otherwise it is split.
    pub packed: bool,
    /// `VIRTIO_F_IN_ORDER` (bit 35): the device uses chains in the order they were made available.
    pub in_order: bool,
}

impl RingFeatures {
    /// Extracts the ring features from a word of negotiated VIRTIO feature bits.
    pub fn from_bits(features: u64) -> Self {
        let has = |bit: u32| features & (1 << bit) != 0;
        Self { indirect: has(28), event_idx: has(29), packed: has(34), in_order: has(35) }
    }
}
