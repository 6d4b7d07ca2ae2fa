//! The tap of `ringferry guest`, one queue for each pair, and which of them the kernel gives packets to.
//!
//! The queues are attached in the order of their numbers, and detached the other way round, so that queue `i` of
//! the tap is always that of pair `i`.

use std::cell::Cell;

use ringferry_packet::vnet::Offloads;
use ringferry_sys::netif;
use ringferry_sys::tap::{Offloads as TapOffloads, Tap, TapConfig, TapError};

use super::GuestError;
use super::args::GuestArgs;

/// See the head of this file.
pub(super) struct Taps {
    queues: Vec<Tap>,
    /// The first so many are attached.
    attached: Cell<u16>,
}

impl Taps {
    /// Opens all queues, attached, and sets the interface up as `args` say.
    pub(super) fn open(args: &GuestArgs) -> Result<Taps, GuestError> {
        let config = TapConfig { multi_queue: args.queues > 1, ..TapConfig::new(args.tap.clone()) };
        let queues = (0..args.queues).map(|_| Tap::open(&config)).collect::<Result<Vec<_>, _>>()?;
        let name = &args.tap;
        netif::quiet_ipv6(name);
        if let Some(mac) = args.mac {
            netif::set_mac(name, mac.0)?;
        }
        if let Some(mtu) = args.mtu {
            netif::set_mtu(name, mtu.into())?;
        }
        for &(address, prefix) in &args.addresses {
            netif::add_address(name, address, prefix)?;
        }
        netif::set_up(name, true)?;
        Ok(Taps { queues, attached: Cell::new(args.queues) })
    }

    /// The queues, by number of their pair.
    pub(super) fn queues(&self) -> &[Tap] {
        &self.queues
    }

    /// Has the kernel leave unfinished what the back end finishes.
    pub(super) fn set_offloads(&mut self, host: Offloads) -> Result<(), TapError> {
        // They are the device's, not the queue's.
        self.queues.iter_mut().take(1).try_for_each(|tap| tap.set_offloads(tap_offloads(host)).map(drop))
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
    /// attached. Where this process may not, packets that come in the instant in which their queue is detached are lost.
    pub(super) fn steer_to_first(&self, queues: Option<u16>) {
        if let Some(tap) = self.queues.first()
            && let Err(error) = tap.steer_to_first(queues)
        {
            tracing::debug!("cannot tell the tap where to send packets: {error}");
        }
    }
}

fn tap_offloads(host: Offloads) -> TapOffloads {
    let pairs = [
        (Offloads::CSUM, TapOffloads::CSUM),
        (Offloads::TSO4, TapOffloads::TSO4),
        (Offloads::TSO6, TapOffloads::TSO6),
        (Offloads::ECN, TapOffloads::ECN),
        (Offloads::USO, TapOffloads::USO4 | TapOffloads::USO6),
    ];
    let taken = pairs.into_iter().filter(|(offload, _)| host.contains(*offload));
    taken.map(|(_, tap)| tap).collect()
}

#[cfg(test)]
mod tests {
    use ringferry_virtio_net::Features;

    use super::*;

    #[test]
    fn the_kernel_leaves_unfinished_only_what_the_back_end_finishes() {
        assert_eq!(tap_offloads(Offloads::empty()), TapOffloads::empty());
        assert_eq!(tap_offloads(Features::DEVICE.host_offloads()), TapOffloads::all());
    }
}
