//! Between workers: frames that are handed off, which queue a frame is for, and queues that migrate.
//!
//! | file | idea |
//! |---|---|
//! | `ring` | the hand-off rings, and how a worker that sleeps is woken |
//! | `sleep` | the handshake by which nothing waits for a worker that sleeps |
//! | `selector` | which queue pair of a port a frame goes to |
//! | `shared` | what all workers, and the control plane, know of a port's pairs |
//! | `migration` | how a queue goes from one worker to another under traffic |
//! | `primitives` | what all of this asks of memory that workers share |
//! | `model` | all of it under the model checker loom |

pub(crate) mod migration;
#[cfg(test)]
mod model;
pub(crate) mod primitives;
pub(crate) mod ring;
pub(crate) mod selector;
pub(crate) mod shared;
pub(crate) mod sleep;
