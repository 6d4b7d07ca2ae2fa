//! The engine: worker threads, each of which owns the queues it serves. It knows no kind of port, only the trait [`Queues`].
//!
//! Queue `q` of every port belongs to worker `q` modulo their number until it migrates. A frame
//! from a queue of one worker to a queue of another is handed off between them; if a port has a queue of the same worker, the
//! frame goes there, unless the guest sends that flow on another queue.
//!
//! | file, folder | idea |
//! |---|---|
//! | `queues` | the seam: what the engine asks of a port's queues |
//! | `worker` | the loop: poll what is active, arm what is idle, sleep when nothing is active; commands; the control plane's handles |
//! | `forward` | the decision for each frame of a burst: admit, learn, look up, group by output port |
//! | `capture` | copies of frames for whoever watches a port |
//! | `cost` | the price list of work, by which ports are charged |
//! | `port` | one port in one worker: policy, offloads, answers, delivery |
//! | `policy` | VLANs, source guard, storm control, rates |
//! | `offload` | offloads that a receiver lacks, or gains from |
//! | `wire` | what a frame meets on a wire between two ports: delay, loss, a rate |
//! | `handoff` | between workers: rings, queue selection, migration |
//! | `testing` | for tests: ports on the heap, and workers without threads under scripted time |
//! | `now` | the clock, and the instant of a burst |
//!
//! Nothing here takes a lock, and nothing waits but the worker, in epoll. A frame that is delivered at once, or handed off, allocates nothing; one
//! that has to be kept (for its `rate_out`, as it was put off, or as its queue is migrating) or to be judged in private memory is copied to memory of
//! its own.

pub(crate) mod capture;
mod cost;
mod forward;
mod handoff;
mod now;
mod offload;
mod policy;
mod port;
pub mod queues;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub(crate) mod wire;
mod worker;

pub(crate) use forward::walk;
pub use handoff::migration::MigrationError;
pub(crate) use handoff::shared::PAIRS;
pub use handoff::shared::PortShared;
pub(crate) use policy::WireCost;
pub(crate) use policy::shaper::{Delayed, Queued};
pub(crate) use policy::vlan::{Egress, Membership, Retag, tag};
pub use port::Steering;
pub use queues::{Delivery, DirectRead, FrameCost, Lease, PortHandle, Queues, Taken, Watch};
pub(crate) use wire::{BUCKETS, ModelState, WireState};
pub use worker::Workers;
pub(crate) use worker::departed::REST;
pub use worker::fault::{FaultReporter, PortFault};
pub(crate) use worker::handles::Stopping;
pub use worker::handles::{Late, Owners, Placement};
pub(crate) use worker::handover::{Address, Carried, Held, OnWires, Waiting, monotonic};
pub(crate) use worker::holes::{HOLES, Sleeps};
