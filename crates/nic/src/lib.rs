#![doc = include_str!("../README.md")]
//!
//! # In detail
//!
//! A framework for drivers of paravirtual NICs, like iflib in FreeBSD: it contains the parts that all such
//! drivers have in common.
//!
//! A driver supplies one small trait for each direction and the limits of its device. The framework does
//! everything else: packets and buffers, mapping, doorbells, reclaim, refill, statistics.
//!
//! | module | contents | owns |
//! |---|---|---|
//! | [`driver`] | the traits that a driver implements | nothing |
//! | [`limits`] | limits of rings and devices, checked when a queue is attached | nothing |
//! | [`map`] | mapping of packets to the number of segments that a device allows | nothing |
//! | [`tx`] | the transmit queue | packets, from sent to reclaimed |
//! | [`rx`] | the receive queue | buffers, from carved to delivered |
//! | [`forward`] | burst forwarding from one queue to others | a burst |
//! | [`cpus`] | placement of queues on CPUs | nothing |
//! | [`drivers`] | a null driver and a loopback driver | their rings |
//!
//! Begin with the [guide], which has the life of a packet in each direction on one page.
//!
//! A queue is attached at set-up, belongs to one thread, borrows that thread's
//! [pools](ringferry_packet::buffer::Pools) for each call, and is detached at the end. An ordinary packet
//! needs no allocation from the heap, no lock and no atomic operation.
#![forbid(unsafe_code)]

pub mod cpus;
pub mod driver;
pub mod drivers;
pub mod forward;
pub mod limits;
pub mod map;
pub mod rx;
pub mod tx;

/// Guides to the framework, to be read before the code.
pub mod guide {
    #[doc = include_str!("../docs/transmit.md")]
    pub mod transmit {}

    #[doc = include_str!("../docs/receive.md")]
    pub mod receive {}

    #[doc = include_str!("../docs/cpus.md")]
    pub mod cpus {}

    #[doc = include_str!("../docs/writing-a-driver.md")]
    pub mod writing_a_driver {}
}
