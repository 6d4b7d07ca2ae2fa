//! The network interface as it lies in shared pages: slots, rings, control messages.
//!
//! | module | idea |
//! |---|---|
//! | [`wire`] | slots of the transmit and receive rings as plain values |
//! | [`ring`] | both halves of a ring in one page |
//! | [`control`] | messages of the control ring, and lists of grants |
//!
//! All numbers are little endian, as on every machine that Xen runs guests on today.
//! What is here follows Xen's `public/io/netif.h` and `public/io/ring.h`.

pub mod control;
pub mod ring;
pub mod wire;

pub use ring::{BackRing, Fault, FrontRing, LayoutError};
