//! The xenbus drivers of both halves: they negotiate an interface over the store before any page is
//! shared, connect it, and disconnect it again.
//!
//! A control thread creates a [`FrontendDriver`] for one interface, or a [`BackendDriver`] for all
//! interfaces of a class, polls its descriptors, and calls `poll` when one is readable. The events
//! that `poll` returns hand over connected queues, and ask for them back. Dropping a driver leaves
//! the store as it is.
//!
//! | file | idea | owns |
//! |---|---|---|
//! | [`state`] | the state that each side publishes | nothing |
//! | [`features`] | the features that each side publishes | nothing |
//! | [`rings`] | grants and event channels of a front end's rings | nothing |
//! | [`frontend_driver`] | the front end of one interface | its memory, its control ring |
//! | [`backend_device`] | the back end of one interface | nothing: its caller gets all mappings |
//! | [`backend_driver`] | all interfaces of a back end | the connection to the store |
//!
//! ```text
//!            front end                         back end
//!   Initialising                      Initialising
//!                                     features ->
//!                                     InitWait
//!   rings, events, features ->
//!   Connected
//!                                     maps rings, binds events
//!                                     Connected
//!   ... packets ...                   ... packets ...
//!   Closing (either side first)
//!                                     unmaps all, Closing
//!   ends its grants, Closed
//!                                     Closed
//! ```
//!
//! Neither state machine has a thread or blocks on the other side: each has descriptors to poll and
//! a `poll` method, which reads the store and returns what is to be done next. It acts on the
//! present content of the store and never on its history, because store events merge, and either
//! side may have been killed and started again between two polls. The content of the store is
//! hostile: it can be any bytes, and gone at the next read.

pub mod backend_device;
pub mod backend_driver;
pub mod features;
pub mod frontend_driver;
pub mod rings;
pub mod state;

pub use backend_device::{BackEvent, Connection, MappedQueue, Refusal};
pub use backend_driver::{BackConfig, BackendDriver, Polled, VifId};
pub use features::{BackFeatures, FrontFeatures};
pub use frontend_driver::{FrontConfig, FrontEvent, FrontendDriver, Session};
pub use state::State;
