//! The back end of a virtual interface: it carries packets for a front end in another domain.
//!
//! An owner creates a [`Queue`] from each [`MappedQueue`](crate::xenbus::MappedQueue) of a
//! connected interface, and a [`Control`] from its control ring, uses each from one thread, and
//! drops them when the xenbus driver disconnects the interface, which unmaps every page.
//!
//! | module | idea |
//! |---|---|
//! | `queue` | [`Queue`]: a pair of rings with the pages behind them, as a port uses it |
//! | `tx` | packets from the front end: slots to frames |
//! | `rx` | packets to the front end: frames to pages |
//! | `backlog` | frames that wait for pages |
//! | `pages` | pages mapped for one burst, mapped for longer, or copied |
//! | [`cache`] | the map from grant to slot of the window: O(1), bounded, with 2Q-like replacement |
//! | `control` | [`Control`]: the control ring, static grants |
//! | `multicast` | [`Multicast`]: the multicast filter |
//!
//! # Modes
//! In [`Mode::Copy`] the hypervisor copies each packet, once per burst; in [`Mode::Map`] pages are
//! mapped and unmapped again, each once per burst; in [`Mode::Persistent`] they stay mapped and a
//! packet costs one copy by the processor and no hypercall. Static grants stay mapped in every
//! mode.
//!
//! Persistence depends on a promise of the front end: a reference means the same page until it
//! disconnects or, if the grant is static, takes it back. Pages that it transmits from are mapped
//! for reading, and pages that it receives into for reading and writing; a page may be used for
//! both. A front end that breaks the promise reads and writes a page of its own that it did not
//! mean; nobody else is harmed.
//!
//! # A front end is hostile
//! Each slot is loaded once. An invalid packet is answered with an error; a packet that no front
//! end could send by mistake breaks the ring, and the interface is to be disconnected
//! ([`Queue::fault`]). Pages are read after the checks, so everything that depends on their bytes
//! (headers, look-ups) works on private copies. A burst is bounded by the ring.

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
