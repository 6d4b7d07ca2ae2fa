//! Ports for virtual machines, and any other vhost-user front end.
//!
//! | file | idea |
//! |---|---|
//! | `control` | the control side: its socket, and the one session on it |
//! | `allowance` | how often its front ends may disturb the workers |
//! | `config` | its configuration |
//! | `faults` | what a worker does about a front end that breaks the rules |
//! | `device` | what a front end says on its session, as commands for the workers |
//! | `queues` | the queue side: virtqueues |

mod allowance;
pub(crate) mod config;
pub(crate) mod control;
mod device;
mod faults;
pub(crate) mod queues;

pub(super) use control::open;
