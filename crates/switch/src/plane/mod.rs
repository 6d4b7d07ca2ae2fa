//! The data plane: one worker thread that owns every queue it serves.
//!
//! | file | idea |
//! |---|---|
//! | `worker` | the loop: poll what is active, arm what is idle, sleep when nothing is active |
//! | `port` | a port as the worker sees it, and the two kinds of it |
//! | `guest` | the queues of a virtual machine |
//! | `tap` | the host's network stack behind a tap |
//! | `forward` | where each frame of a burst goes |
//! | `software` | offloads a receiver lacks, done here |
//! | `command` | what the control plane asks a worker to do, between bursts |
//!
//! Nothing here takes a lock or allocates per packet, and nothing waits but the worker, in epoll.

pub mod command;
mod forward;
mod guest;
mod port;
mod software;
mod tap;
mod worker;

pub use command::{Command, Plane, QueueState, RingStart};
