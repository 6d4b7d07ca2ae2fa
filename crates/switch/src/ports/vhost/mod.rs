//! Ports for virtual machines, and any other vhost-user front end.
//!
//! | file | idea |
//! |---|---|
//! | `control` | the control side: its socket, and the one session on it |
//! | `allowance` | rate limit on the disturbance of workers by its front ends |
//! | `config` | the port's keys, flags and checks |
//! | `faults` | a worker's reaction to a front end that breaks the rules |
//! | `device` | turns the messages of a session into commands for the workers |
//! | `handover` | the port on its way to another process |
//! | `queues` | the queue side: virtqueues |

mod ahead;
mod allowance;
pub(crate) mod config;
pub(crate) mod control;
pub(crate) mod device;
mod faults;
mod handover;
pub(crate) mod queues;
#[cfg(test)]
mod testing;

pub(super) use control::{acquire, open};
pub(super) use handover::{VhostState, adopt};
