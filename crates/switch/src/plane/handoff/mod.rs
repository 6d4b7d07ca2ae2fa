//! Hand-off between workers: rings for frames, the choice of a frame's queue, and the migration of queues.
//!
//! | file | idea |
//! |---|---|
//! | `ring` | the hand-off rings, and the doorbells of workers that sleep |
//! | `sleep` | the sleep handshake: no frame is left waiting for a worker that sleeps |
//! | `selector` | selects the queue pair of a port that a frame goes to |
//! | `shared` | the state of a port's pairs that all workers and the control plane share |
//! | `migration` | moves a queue from one worker to another under traffic |
//! | `primitives` | traits for the shared memory that all of this uses |
//! | `model` | all of it under the model checker loom |

pub(crate) mod migration;
#[cfg(test)]
mod model;
pub(crate) mod primitives;
pub(crate) mod ring;
pub(crate) mod selector;
pub(crate) mod shared;
pub(crate) mod sleep;
