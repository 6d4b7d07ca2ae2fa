//! Tests of the engine as a whole, on the [`Bed`](super::Bed).

mod forwarder;
mod reference;
mod worker;
