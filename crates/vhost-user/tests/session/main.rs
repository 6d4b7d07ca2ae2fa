//! The protocol as seen from outside the crate: a session is fed messages by hand, or by our own
//! front end, and a recording device says what became of them.

mod both_ends;
mod bounds;
mod closing;
mod cve;
mod inflight;
mod log;
mod memory;
mod packed;
mod qemu;
mod queue_counts;
mod random;
mod rig;
mod rings;
mod turns;
