//! The tap of `ringferry guest`, one queue for each pair, and which of them the kernel gives packets to.
//!
//! The queues are attached in the order of their numbers, and detached the other way round, so that queue `i` of
//! the tap is always that of pair `i`.

use std::cell::Cell;

use ringferry_packet::vnet::Offloads;
use ringferry_sys::tap::{Tap, TapConfig, TapError};

use super::GuestError;
use super::args::GuestArgs;
use crate::tap;

/// See the head of this file.
pub(super) struct Taps {
    queues: Vec<Tap>,
    /// The first so many are attached.
    attached: Cell<u16>,
}

impl Taps {
    /// Opens all queues, and sets the interface up as `args` say. All are attached, or the first if flows may stay on it.
    pub(super) fn open(args: &GuestArgs) -> Result<Taps, GuestError> {
        let config = TapConfig { multi_queue: args.queues > 1, ..TapConfig::new(args.tap.clone()) };
        let queues = (0..args.queues).map(|_| Tap::open(&config)).collect::<Result<Vec<_>, _>>()?;
        let taps = Taps { queues, attached: Cell::new(args.queues) };
        if args.spread_at > 0 {
            taps.attach(1)?;
        }
        tap::set_up(&args.tap, args.mac, args.mtu, &args.addresses)?;
        Ok(taps)
    }

    /// How many are attached, the first.
    pub(super) fn attached(&self) -> u16 {
        self.attached.get()
    }

    /// The queues, by number of their pair.
    pub(super) fn queues(&self) -> &[Tap] {
        &self.queues
    }

    /// Has the kernel leave unfinished what the back end finishes.
    pub(super) fn set_offloads(&mut self, host: Offloads) -> Result<(), TapError> {
        // They are the device's, not the queue's.
        self.queues.iter_mut().take(1).try_for_each(|tap| tap.set_offloads(tap::offloads(host)).map(drop))
    }

    /// Attaches the first `wanted` queues, and no others. What waits in one that is detached is lost. After an error
    /// some of the change may have happened.
    pub(super) fn attach(&self, wanted: u16) -> Result<(), TapError> {
        loop {
            let now = self.attached.get();
            let (next, tap) = match now.cmp(&wanted) {
                std::cmp::Ordering::Less => (now + 1, self.queues.get(usize::from(now))),
                std::cmp::Ordering::Equal => return Ok(()),
                std::cmp::Ordering::Greater => (now - 1, self.queues.get(usize::from(now) - 1)),
            };
            let Some(tap) = tap else { return Ok(()) };
            tap.set_attached(next > now)?;
            self.attached.set(next);
        }
    }

    /// Has the kernel send packets on the first `queues` only, attached or not, or, with `None`, on all that are
    /// attached; whether it does. Where this process may not say so, packets that come in the instant in which their queue is
    /// detached are lost.
    pub(super) fn steer_to_first(&self, queues: Option<u16>) -> bool {
        let [first, _, ..] = &self.queues[..] else { return true };
        let result = first.steer_to_first(queues);
        if let Err(error) = &result {
            tracing::debug!("cannot tell the tap where to send packets: {error}");
        }
        result.is_ok()
    }
}
