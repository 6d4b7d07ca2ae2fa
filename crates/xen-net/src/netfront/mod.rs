//! The front end of a virtual interface: a driver of the framework in `ringferry-nic`.
//!
//! | file | idea | owns |
//! |---|---|---|
//! | [`arena`] | pages that are shared from the beginning, and which grant an address belongs to | the grants |
//! | [`tx`] | segments become slots | the slots that the back end has |
//! | [`rx`] | slots become packets | the pages that are posted |
//! | [`pair`] | a queue pair with its buffers | both of the above |
//! | [`statics`] | grants handed over on the control ring | the control ring |
//!
//! All buffers of the framework's pools lie in pages that were granted before the first packet, and stay granted until the
//! interface is closed. So nothing is granted, ended or copied for a packet, whatever the back end does with the
//! grants: copies, maps for a packet, or maps for good. With stock drivers a front end grants and ends a page for every slot,
//! or copies every packet into a second set of pages.
//!
//! Pages hold packets and nothing else, and are zeroed before they are shared: the back end sees whole pages, and learns nothing
//! but packets (XSA-403).

pub mod arena;
pub mod pair;
pub mod rx;
pub mod statics;
pub mod tx;

pub use arena::{Arena, ArenaError, GrantMap};
pub use pair::{Pair, PairConfig, PairError};
pub use rx::NetfrontRx;
pub use tx::NetfrontTx;
