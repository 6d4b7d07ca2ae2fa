//! Drivers that need no device. Tests and experiments create them and attach queues to them as to real ones.
//!
//! | driver | a packet that is sent | packets received | purpose |
//! |---|---|---|---|
//! | [`null`] | is completed at once | none | measuring the cost of the framework itself |
//! | [`loopback`] | is received again | those sent | tests; an example to read before writing a driver |

pub mod loopback;
pub mod null;

/// Gives out the tokens of a ring whose device completes everything in order: each in its turn, so one that is given out is free.
#[derive(Debug)]
struct InTurn {
    next: u16,
    ring: u16,
}

impl InTurn {
    /// Creates the tokens of a ring of so many entries.
    fn new(ring: u16) -> Self {
        Self { next: 0, ring }
    }

    fn take(&mut self) -> u16 {
        let next = if self.next + 1 < self.ring { self.next + 1 } else { 0 };
        std::mem::replace(&mut self.next, next)
    }
}
