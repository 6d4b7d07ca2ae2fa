//! The transmit half of a driver: packets mapped, shown to the device in batches, taken back when it is done.
//!
//! | file | idea |
//! |---|---|
//! | [`queue`] | which packets the device has, and what became of the others |
//! | [`doorbell`] | when the device is told |
//! | [`reclaim`] | when sent buffers are taken back |
//! | [`choose`] | which queue a packet goes to |
//! | [`entry`] | how several threads send into one queue |
//! | [`config`] | what an operator may choose |
//! | [`stats`] | what was counted |
//!
//! The way of a packet through all of them: [`guide::transmit`](crate::guide::transmit).

pub mod choose;
pub mod config;
pub mod doorbell;
pub mod entry;
pub mod queue;
pub mod reclaim;
pub mod stats;

pub use choose::{Chooser, NoHash, select_queue};
pub use config::{AttachError, TxConfig};
pub use doorbell::{Rings, doorbell_threshold};
pub use entry::{Entry, Progress, TxPort};
pub use queue::{SendError, TxQueue, Unsent};
pub use reclaim::{reclaim_due, reclaim_threshold};
pub use stats::TxStats;
