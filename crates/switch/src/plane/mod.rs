//! The data plane: worker threads, each of which owns the queues it serves.
//!
//! Queue pair `p` of every port belongs to worker `p` modulo their number until it is moved, and so does queue `p` of a tap. A frame
//! from a queue of one worker to a queue of another crosses between them; where a port has a queue of the same worker, it
//! goes there, unless the guest sends that flow elsewhere.
//!
//! | file | idea |
//! |---|---|
//! | `worker` | the loop: poll what is active, arm what is idle, sleep when nothing is active |
//! | `worker/straight` | from a tap straight into a machine's buffers |
//! | `port` | a port as the worker sees it, and the kinds of it |
//! | `guest` | the queues of a virtual machine |
//! | `vif` | the queues of a Xen guest |
//! | `shared` | what all workers know of a machine's port |
//! | `aim` | which queue pair of a machine a frame goes to |
//! | `tap` | the host's network stack behind a tap |
//! | `forward` | where each frame of a burst goes |
//! | `software` | offloads a receiver lacks, done here |
//! | `coalesce` | packets of a flow as one frame, for a receiver that takes it |
//! | `too_big` | what a sender is told whose packet does not fit |
//! | `crossing` | what goes from worker to worker |
//! | `moving` | how a pair goes from worker to worker |
//! | `gate` | what a port's rules say about a frame |
//! | `vlan` | which VLAN a frame belongs to, and its tag |
//! | `guard` | whether a frame's sender is who it says |
//! | `bucket` | a token bucket that all workers share |
//! | `moment` | the time of a burst |
//! | `command` | what the control plane asks a worker to do, between bursts |
//!
//! Nothing here takes a lock or allocates per packet, and nothing waits but the worker, in epoll.

mod aim;
mod bucket;
mod coalesce;
pub mod command;
mod crossing;
mod forward;
mod gate;
mod guard;
mod guest;
mod moment;
mod moving;
mod port;
mod shared;
mod software;
mod tap;
#[cfg(test)]
mod testing;
mod too_big;
mod vif;
mod vlan;
mod worker;

pub use command::{Plane, QueueState, RingStart};
pub use moving::NotMoved;
pub(crate) use shared::PAIRS;
pub use shared::PortShared;
pub use vif::{Broken, Reporter, VifStart, VifState};
