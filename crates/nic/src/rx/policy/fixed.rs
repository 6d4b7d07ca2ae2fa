//! The same length for every buffer: what others do, to compare with, and what a queue needs whose packets
//! must fit one buffer.

/// Bytes of every buffer, the driver's header included.
#[derive(Debug)]
pub(crate) struct Fixed(pub usize);
