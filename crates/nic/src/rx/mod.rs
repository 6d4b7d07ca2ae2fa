//! The receive half of a driver: buffers posted, packets delivered, buffers posted again.
//!
//! # The life of a received packet
//!
//! 1. [`RxQueue::refill`] asks the [policy] how long buffers are to be now, takes as many as the ring has
//!    room for, up to [`queue::POSTED`] bytes (first those that came back, then new ones carved from 32 KiB chunks), and posts
//!    each under a token. The queue keeps a buffer only once the ring has accepted it.
//! 2. The device fills one buffer or more and says how many bytes it wrote.
//! 3. [`RxQueue::receive`] collects a burst of completions and fetches their headers before it looks at any.
//!    What the device says is checked against what was posted. A packet that cannot be right is counted
//!    (`rx_length_errors`) and dropped, and all of its buffers wait to be posted again.
//! 4. A packet of up to `copy_break` bytes is copied into a small buffer; its receive buffer is posted
//!    again. Of any other, the driver's header is taken off the front, buffers that adjoin are joined, and the
//!    policy learns its length.
//! 5. The packet is delivered as a [`Chain`](ringferry_packet::buffer::Chain), which owns its buffers.
//! 6. Buffers that come back by [`RxQueue::recycle`] are posted again, without an atomic operation, as long
//!    as they are about as long as the policy wants them. Those that are dropped elsewhere return to
//!    their chunk, which can be carved again when all of it has returned.
//!
//! | file | idea |
//! |---|---|
//! | [`queue`] | what is posted, what came back, what is a packet |
//! | `supply` | where buffers come from and where they go back to |
//! | [`policy`] | how long the next buffer is |
//! | [`stats`] | what was counted |

pub mod policy;
pub mod queue;
pub mod stats;
mod supply;

pub use policy::PolicyKind;
pub use queue::{AttachError, RxConfig, RxQueue};
pub use stats::RxStats;
