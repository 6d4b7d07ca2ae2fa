//! A framework for drivers of paravirtual NICs: what every one of them needs and none should write.
//!
//! A driver supplies one small trait for each direction and the limits of its device. The framework owns
//! everything else: packets and buffers, mapping, doorbells, reclaim, refill, statistics.
//!
//! | module | idea | owns |
//! |---|---|---|
//! | [`driver`] | what a driver supplies | nothing |
//! | [`limits`] | what rings and devices take, checked once | nothing |
//! | [`map`] | any packet to at most so many segments | nothing: packets pass through |
//! | [`tx`] | the transmit half | packets, from sent to completed |
//! | [`rx`] | the receive half | buffers, from carved to delivered |
//! | [`forward`] | bursts from one queue to others | a burst |
//! | [`cpus`] | which CPU a queue gets | nothing |
//! | [`drivers`] | a driver without a device, and one with a device of its own | their rings |
//!
//! Begin with the [guide]: a packet's life on a page, in each direction.
//!
//! Queues belong to one thread and borrow the [pools](ringferry_packet::buffer::Pools) of that thread for each
//! call. On the way of an ordinary packet nothing is allocated, locked or counted atomically.
#![forbid(unsafe_code)]

pub mod cpus;
pub mod driver;
pub mod drivers;
pub mod forward;
pub mod limits;
pub mod map;
pub mod rx;
pub mod tx;

/// Pages to read before the code.
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
