//! The engine's test bed: ports on the heap, and workers that a test drives step by step, under scripted time.

mod bed;
mod heap;
#[cfg(test)]
mod lone;
#[cfg(test)]
mod tests;

pub use bed::{Bed, HeapPort};
pub use heap::{HeapFrame, HeapQueues, Punched, Wire};
#[cfg(test)]
pub(crate) use lone::Lone;
