//! The back end of a virtual interface: carries packets for a front end in another domain.
//!
//! | module | idea |
//! |---|---|
//! | `queue` | [`Queue`]: a pair of rings with the pages behind them, as a port uses it |
//! | `tx` | what the front end sends: slots to frames |
//! | `rx` | what it receives: frames to pages |
//! | `backlog` | frames that wait for pages |
//! | `pages` | pages mapped for one burst, mapped for longer, or copied |
//! | [`cache`] | which page has which slot of the window: O(1), bounded, evicting |
//! | `control` | [`Control`]: the control ring, static grants |
//! | `multicast` | [`Multicast`]: which multicast frames the front end wants |
//!
//! # Modes
//! In [`Mode::Copy`] the hypervisor copies each packet, once per burst; in [`Mode::Map`] pages are mapped and unmapped again,
//! each once per burst; in [`Mode::Persistent`] they stay mapped and a packet costs one copy by the processor and no call
//! at all. Static grants are mapped for good in any mode.
//!
//! Persistence rests on a promise: a reference means the same page until the front end disconnects or, if it is static, takes
//! it back. Pages that are sent from are mapped for reading, and those that are received into for both; a page may be used
//! for either. A front end that breaks it reads and writes a page of its own that it did not mean; nobody else is harmed.
//!
//! # A front end is hostile
//! Each slot is loaded once. A packet that makes no sense is answered with an error; one that no front end could send by mistake
//! breaks the ring, and the interface is to be disconnected ([`Queue::fault`]). Pages are read after
//! the checks, so whatever depends on bytes (headers, look-ups) works on private copies. A burst is bounded by the ring.

mod backlog;
pub mod cache;
mod control;
mod multicast;
mod pages;
mod queue;
mod rx;
mod tx;

pub use control::{Control, StaticGrants};
pub use multicast::{MAX_ADDRESSES, Multicast};
pub use pages::{Mode, PageCounters};
pub use queue::{DEFAULT_PAGES, Delivery, Drained, Lent, Queue, QueueConfig, QueueError};
pub use rx::Refused;
pub use tx::Rejected;
