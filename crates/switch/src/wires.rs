//! The wires of a switch, on the control plane's side: which port is an end of which, and the seeds that were drawn.
//!
//! The [table of ports](crate::ports::table::PortTable) has one [`Wires`], and asks it for each port's end when it gives workers the port's rules. So a port that is opened anew
//! is an end again before its first frame.

use std::collections::BTreeMap;

use crate::impairments::{Wire, WireEnd};

/// Seeds that are drawn are below this, so that one can be typed in again.
const DRAWN: u64 = 1_000_000;

/// See the head of this file.
#[derive(Debug, Default)]
pub(crate) struct Wires {
    wires: Vec<Wire>,
    /// Seeds of wires that have none of their own, by name.
    drawn: BTreeMap<String, u64>,
}

impl Wires {
    /// Sets all wires. Those that stay keep the seeds that were drawn for them.
    pub(crate) fn set(&mut self, wires: &[Wire]) {
        self.wires = wires.to_vec();
        self.drawn.retain(|name, _| wires.iter().any(|wire| wire.name == *name));
        for wire in wires {
            self.drawn.entry(wire.name.clone()).or_insert_with(draw);
        }
    }

    /// Returns what a port is as an end of a wire; `None` if it is none.
    pub(crate) fn end(&self, port: &str) -> Option<WireEnd> {
        self.wires.iter().find_map(|wire| wire.end(port, self.drawn.get(&wire.name).copied().unwrap_or(0)))
    }

    /// Returns the seeds that were drawn, for another process.
    pub(crate) fn drawn(&self) -> BTreeMap<String, u64> {
        self.drawn.clone()
    }

    /// Goes on with seeds of another process.
    pub(crate) fn take_over(&mut self, drawn: &BTreeMap<String, u64>) {
        for (name, seed) in &mut self.drawn {
            *seed = drawn.get(name).copied().unwrap_or(*seed);
        }
    }
}

/// Draws a seed. Where the kernel has no random numbers it is 0, which is as good as any: nothing here is secret.
fn draw() -> u64 {
    let mut random = [0; 8];
    let _ = rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty());
    u64::from_le_bytes(random) % DRAWN
}
