//! The fixed policy: every buffer has the same length, set when the queue is attached. Queues whose packets
//! must fit one buffer use it, and it is the base of comparison for the other policies.

/// The length of every buffer in bytes, the driver's header included.
#[derive(Debug)]
pub(crate) struct Fixed(pub usize);
