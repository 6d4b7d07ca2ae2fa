//! Replacement of a running switch by another process, usually of a newer program, without a lost packet: `ringferry run --replace`.
//!
//! ```text
//!   successor                                   predecessor
//!     control socket: Replace  ───────────────►   hands the connection over to this protocol
//!   1 Hello?                   ───────────────►   configuration, clock
//!     (starts its helper)
//!   2 Draft?                   ───────────────►   state and descriptors of all ports, addresses; packets flow on
//!     (maps memory, goes into its sandbox, starts paused workers, and maps the pages that those touch first)
//!   3 Final?                   ───────────────►   pauses its workers, stops all rings
//!                              ◄───────────────   what has changed since the draft, positions of rings, counters
//!   4 takes the baton, starts rings and workers
//!     Running                  ───────────────►   leaves everything alone, and ends
//!                              ◄───────────────   End, if it was told to end meanwhile: by a SIGTERM, say, which is for whoever has the ports
//! ```
//!
//! **The baton** is an eventfd with a count of one, which both have. Whoever reads it owns the ports from then on. The successor reads it before it
//! touches any ring or queue; the predecessor when the successor has ended, or has said nothing for [`PATIENCE`]: then it goes on where it stood. So there
//! is no moment in which both own them, whoever is killed and whenever. Neither does if the successor is killed between the baton and `Running`: nobody knows
//! then where rings stand, so the predecessor ends, too, as if the switch had been killed ([`Outcome::Orphaned`]).
//!
//! **The service manager** follows the process that owns the ports. The successor tells it so before it reads the baton, the predecessor if it goes on after all.
//! What the manager keeps stays where it is, and the successor goes on with it ([`kept`]): a complete state is kept at any moment.
//!
//! A message of a front end between 2 and 3 makes the draft of its port out of date, and the port's whole state is sent again. A change of the
//! configuration meanwhile ends the attempt.
//!
//! | file | idea |
//! |---|---|
//! | `state` | the state as data, and its versions |
//! | `bulk` | the large parts of it |
//! | `channel` | messages with descriptors |
//! | `identity` | telling open files apart, of those that are kept |
//! | `kept` | what outlives a switch that is killed |
//! | `predecessor` | the side that gives |
//! | `successor` | the side that takes |
//!
//! What a kind of port has to say is in its folder ([`PortControl::hand_over`](crate::ports::PortControl)), and what workers have in
//! [`plane::worker::handover`](crate::plane).

mod bulk;
mod channel;
mod identity;
pub(crate) mod kept;
pub(crate) mod predecessor;
mod state;
pub(crate) mod successor;
#[cfg(feature = "testing")]
pub mod testing;

use std::time::Duration;

pub(crate) use predecessor::{Outcome, Predecessor};
pub(crate) use state::FORMAT;
pub(crate) use successor::Handed;
pub use successor::{SuccessionError, Successor};

/// How long the predecessor stands still for its successor at most. All packets of everybody wait meanwhile.
const PATIENCE: Duration = Duration::from_millis(250);

/// How long either waits for the other while packets flow.
const QUIET: Duration = Duration::from_secs(5);

/// How long the successor may take between two questions: it opens what it needs, and starts its helper.
const SILENCE: Duration = Duration::from_secs(15);
