//! The transmit half of a driver: maps packets, publishes them to the device in batches, reclaims them.
//!
//! A worker attaches a [`TxQueue`] to a ring at set-up, sends bursts through it, and detaches it at the end.
//! The path of a packet through these files is in [`guide::transmit`](crate::guide::transmit).
//!
//! | file | contents |
//! |---|---|
//! | [`queue`] | the transmit queue: packets in flight, errors |
//! | [`doorbell`] | doorbell batching by occupancy |
//! | [`reclaim`] | the moment at which completed packets are reclaimed |
//! | [`select`] | queue selection by flow hash |
//! | [`entry`] | a queue shared by several threads |
//! | [`config`] | settings |
//! | [`stats`] | counters |

pub mod config;
pub mod doorbell;
pub mod entry;
pub mod queue;
pub mod reclaim;
pub mod select;
pub mod stats;

pub use config::{AttachError, TxConfig};
pub use doorbell::{Rings, doorbell_threshold};
pub use entry::{Entry, Progress, TxPort};
pub use queue::{SendError, TxQueue, Unsent};
pub use reclaim::{reclaim_due, reclaim_threshold};
pub use select::{NoHash, QueueSelector, select_queue};
pub use stats::TxStats;
