//! The layout of the network interface in shared pages: slots, rings, control messages. Both halves
//! create their side of a ring when an interface connects, use it on one thread, and drop it when
//! the interface closes.
//!
//! | module | idea |
//! |---|---|
//! | [`wire`] | slots of the transmit and receive rings as plain values |
//! | [`ring`] | both halves of a ring in one page |
//! | [`control`] | messages of the control ring, and lists of grants |
//!
//! All numbers are little-endian, as on every machine that Xen runs guests on today. The module
//! follows Xen's `public/io/netif.h` and `public/io/ring.h`.

pub mod control;
pub mod ring;
pub mod wire;

pub use ring::{BackRing, Fault, FrontRing, LayoutError};
