//! The front end of a virtual interface: a driver of the framework in `ringferry-nic`.
//!
//! The xenbus [`FrontendDriver`](crate::xenbus::FrontendDriver) creates an [`Arena`] and a [`Pair`]
//! per queue in it when the back end is ready, and hands the pairs out when it is connected. Each
//! pair is used from one thread until it is given back; then the arena ends all grants.
//!
//! | file | idea | owns |
//! |---|---|---|
//! | [`arena`] | pages that are shared from the beginning, and the grant of each address | the grants |
//! | [`tx`] | segments become slots | the slots that the back end has |
//! | [`rx`] | slots become packets | the pages that are posted |
//! | [`pair`] | a queue pair with its buffers | both of the above |
//! | [`static_grants`] | grants registered on the control ring | the control ring |
//!
//! All buffers of the framework's pools lie in pages that are granted before the first packet, and
//! stay granted until the interface is closed. So nothing is granted, revoked or copied for a
//! packet, whatever the back end does with the grants: copy, map for a burst, or map for good.
//! Stock front ends grant and revoke a page for every slot, or copy every packet into a second set
//! of pages.
//!
//! Pages hold packets and nothing else, and are zeroed before they are shared: the back end sees
//! whole pages, and must learn nothing but packets from them (XSA-403).

pub mod arena;
pub mod pair;
pub mod rx;
pub mod static_grants;
pub mod tx;

pub use arena::{Arena, ArenaError, GrantMap};
pub use pair::{Pair, PairConfig, PairError};
pub use rx::NetfrontRx;
pub use tx::NetfrontTx;
