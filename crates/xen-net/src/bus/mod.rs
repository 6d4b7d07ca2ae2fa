//! How both halves of a virtual interface find each other and agree, over the store, before any page is shared, and how they
//! part again.
//!
//! | file | idea | owns |
//! |---|---|---|
//! | [`state`] | what each side says of itself | nothing |
//! | [`features`] | what each side takes, and what comes of it | nothing |
//! | [`rings`] | where a front end's rings and events are | nothing |
//! | [`front`] | the front end's side of one interface | its memory, its control ring |
//! | [`back`] | the back end's side of one interface | nothing: what it maps it hands on |
//! | [`plugs`] | all interfaces of a back end | the connection to the store |
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
//! Neither machine has a thread or waits: there are descriptors to poll and a `step`, which looks at the store and says what
//! is to be done next. It looks at what *is*, never at how it came to be: events of the store merge, and either side may have been
//! killed and started again between two looks. What the store says is hostile: any bytes, and gone at the next look.

pub mod back;
pub mod features;
pub mod front;
pub mod plugs;
pub mod rings;
pub mod state;

pub use back::{BackEvent, Connection, MappedQueue, Refusal};
pub use features::{BackFeatures, FrontFeatures};
pub use front::{FrontConfig, FrontEvent, Frontend, Session};
pub use plugs::{BackConfig, Plugs, VifId};
pub use state::State;
