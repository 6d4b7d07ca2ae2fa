//! Ports that were removed a moment ago.
//!
//! Another worker may still announce an address of a port that this one serves no more: it has a burst of that port in hand, or its news lie in the ring
//! between them. What is heard of a port within [`REST`] of its removal is therefore ignored, and what is heard later is about the next port of that
//! number, which a worker may hear of before it has been told of the port itself.

use std::time::Duration;

use crate::fdb::PortId;
use crate::plane::now::Clock;

/// How long the number of a removed port rests before it may be another port's. After that, no frame for its last port is under way between two workers,
/// nor an address that was learned behind that port.
pub(crate) const REST: Duration = Duration::from_secs(10);

/// The ports that were removed within the last [`REST`], and the seconds of the coarse clock at which that was.
#[derive(Debug, Default)]
pub(super) struct Departed(Vec<(PortId, u32)>);

impl Departed {
    /// A port was removed.
    pub(super) fn add(&mut self, port: PortId, clock: Clock) {
        // Not the seconds of the last round: a worker that has slept since would take the port to have been removed long ago.
        let now = clock.seconds();
        self.0.retain(|(other, since)| *other != port && is_resting(*since, now));
        self.0.push((port, now));
    }

    /// A number is a port's again.
    pub(super) fn remove(&mut self, port: PortId) {
        self.0.retain(|(other, _)| *other != port);
    }

    /// Returns whether what is heard of a port is about one that was removed.
    pub(super) fn contains(&self, port: PortId, clock: Clock) -> bool {
        self.0.iter().any(|(other, since)| *other == port && is_resting(*since, clock.seconds()))
    }
}

fn is_resting(since: u32, now: u32) -> bool {
    u64::from(now.saturating_sub(since)) < REST.as_secs()
}
