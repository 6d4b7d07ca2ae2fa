//! Tests of the engine as a whole, on the [`Bed`](super::Bed).

mod capture;
mod fairness;
mod firewall;
mod forwarder;
mod holes;
mod mirror;
mod pacing;
mod reference;
mod standing;
mod tenants;
mod trace;
mod wire;
mod worker;
