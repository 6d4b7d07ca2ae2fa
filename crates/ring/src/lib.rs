//! Virtqueues (VIRTIO 1.4, 2.6 to 2.8): the rings that carry buffers between a driver and a device.
//!
//! | module | what it holds |
//! |---|---|
//! | [`chain`] | what a ring carries: buffers, chains of them, and a burst of chains |
//! | [`device`] | the half that takes chains and completes them, of either layout |
//! | [`driver`] | the half that adds chains and collects them, of either layout |
//! | [`parts`] | where a ring lies in memory |
//! | [`split`] | the split ring: what both halves do alike, and the halves |
//! | [`packed`] | the packed ring, file for file the split one's twin |
//!
//! The layout is chosen once, when a ring is set up; [`Device`] and [`Driver`] look at it once per
//! burst. A half owns one side of a ring and everything private to it. It *shadows* what it writes
//! (shared words it owns are stored and never loaded) and *caches* what the peer writes (the peer's
//! index is loaded only when the cached one has run dry), so each cache line flows one way. Work is
//! done in bursts: [`Device::take`] / [`Device::complete`] / one [`Device::publish`];
//! [`Driver::add`] / one [`Driver::publish`] / [`Driver::collect`].
//!
//! What the peer wrote is read once, checked, then used. A violation breaks the ring: the half
//! remembers the [`Fault`], refuses all further work, and is only good for being dropped. Rings know
//! addresses and lengths; they never touch the bytes of a buffer.
#![forbid(unsafe_code)]

pub mod chain;
pub mod device;
pub mod driver;
mod outstanding;
pub mod packed;
pub mod parts;
pub mod split;

pub use chain::{Buffer, Chain, Chains, Done, Tables};
pub use device::Device;
pub use driver::{AddError, Driver, IndirectTables, Used};
pub use parts::{LayoutError, MAX_SIZE, Parts, check_size, part_bytes};

/// How a peer broke the rules of its ring. Sticky until the ring is set up anew.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// The peer's index ran ahead by more than the ring holds, chains not yet completed included
    /// (or, for a used index, more than was outstanding).
    #[error("index jumped by {0}, more than the ring can hold")]
    IndexJump(u16),
    /// A descriptor or used index outside the ring.
    #[error("descriptor index {0} is outside the ring")]
    BadIndex(u32),
    /// A chain longer than the queue size (VIRTIO 1.4, 2.7.5.3.1), hence possibly a loop, or longer
    /// than 1024.
    #[error("descriptor chain is longer than the queue size or 1024")]
    ChainTooLong,
    /// A chain of 2^32 bytes or more (2.7.5).
    #[error("descriptor chain has 2^32 bytes or more")]
    ChainTooLarge,
    /// A device-readable descriptor behind a device-writable one (2.7.4.2).
    #[error("device-readable descriptor behind a device-writable one")]
    ReadableAfterWritable,
    /// VIRTQ_DESC_F_INDIRECT without the feature, or inside an indirect table, or together with
    /// VIRTQ_DESC_F_NEXT (2.7.5.3.1).
    #[error("indirect descriptor where none is allowed")]
    BadIndirect,
    /// An indirect table that is empty, not a whole number of descriptors, or outside guest memory.
    #[error("indirect table is empty, ragged or outside memory")]
    BadTable,
    /// A chain its queue cannot use: buffers outside guest memory, of the wrong direction, or too
    /// short for a header. Found by the device type above the ring.
    #[error("chain of no use: buffers outside memory, of the wrong direction, or too short")]
    Unusable,
    /// The device returned a descriptor the driver had not given it.
    #[error("used descriptor {0} was not outstanding")]
    NotOutstanding(u32),
}

/// Feature bits that change how a ring works (VIRTIO 1.4, 6).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RingFeatures {
    /// VIRTIO_F_INDIRECT_DESC (28).
    pub indirect: bool,
    /// VIRTIO_F_EVENT_IDX (29).
    pub event_idx: bool,
    /// VIRTIO_F_RING_PACKED (34).
    pub packed: bool,
    /// VIRTIO_F_IN_ORDER (35).
    pub in_order: bool,
}

impl RingFeatures {
    /// The bits of a negotiated feature word that rings care for.
    pub fn from_bits(features: u64) -> Self {
        let has = |bit: u32| features & (1 << bit) != 0;
        Self { indirect: has(28), event_idx: has(29), packed: has(34), in_order: has(35) }
    }
}
