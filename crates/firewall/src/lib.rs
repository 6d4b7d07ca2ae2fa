#![doc = include_str!("../README.md")]
//!
//! # In detail
//!
//! **Life cycle.** The control plane reads a policy file ([`read`]) and makes a [`Firewall`] of it for each port that has the policy. All workers share it: for
//! each frame that the guest has sent, and for each that is for it, they call [`Firewall::judge`]. When the file or the choice of it changes, a new
//! firewall takes over the flows of the old one ([`Firewall::following`]), and judges each anew when its next packet comes.
//!
//! | file | idea |
//! |---|---|
//! | `file` | the language of policy files |
//! | `address` | prefixes, and sets of them in which the longest match decides |
//! | `policy` | rules, compiled by classes of addresses |
//! | `headers` | which conversation a frame belongs to; strict about what could be read in two ways |
//! | `plain` | the short way to the flow of what most packets are |
//! | `flows` | the table of flows that were allowed, shared without locks |
//! | `dns` | messages of the domain name system, by whose answers names are reached |
//! | `refusal` | the answer to a question for a name that is not allowed |
//! | `firewall` | the verdict on a frame |
//! | `counters`, `denials` | what is told of it |
#![forbid(unsafe_code)]

mod address;
mod counters;
mod denials;
mod dns;
mod file;
mod firewall;
mod flows;
mod headers;
mod plain;
mod policy;
mod refusal;

pub use address::{Member, Prefix, PrefixError};
pub use counters::Counts;
pub use denials::{Cursor, Denial};
pub use dns::Pattern;
pub use file::{Mistake, Mistakes, read};
pub use firewall::{Denied, Firewall, Verdict};
pub use flows::{FLOWS, Flow, Record};
pub use headers::{Doubt, Ends, HEAD, Odd, Part, Subject, View};
pub use policy::{
    Action, BY_DEFAULT, DEFAULT_FLOWS, Decision, Direction, Draft, MAX_PREFIXES, MAX_RULES, Policy, Protocol,
    Remote, Rule, Source, is_in,
};
