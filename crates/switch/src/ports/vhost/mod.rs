//! Ports for virtual machines, and any other vhost-user front end.
//!
//! | file | idea |
//! |---|---|
//! | `control` | the control side: its socket, and the one session on it |
//! | `config` | its configuration |
//! | `device` | what a front end says on its session, as commands for the workers |
//! | `queues` | the queue side: virtqueues |

pub(crate) mod config;
pub(crate) mod control;
mod device;
pub(crate) mod queues;

pub(super) use control::open;
