//! The device that a front end talks to: it turns the messages of a session into commands for the workers
//! that have the rings.
//!
//! The port makes one and keeps it; each session drives it through [`Device`]. A ring starts when the front
//! end has sent everything that it needs; when [`ring_stopped`](Device::ring_stopped) returns no worker
//! touches the ring any more.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ringferry_memory::{DirtyLog, GuestMemory};
use ringferry_packet::ether::{Mac, rarp_announcement};
use ringferry_sys::eventfd::EventFd;
use ringferry_vhost_user::RingSetup;
use ringferry_vhost_user::Unanswered;
use ringferry_vhost_user::backend::Device;
use ringferry_virtio_net::config::{NetConfig, S_LINK_UP};
use ringferry_virtio_net::{Features, queue_index};

use super::queues::{NewCalls, RingStart, VhostRequest};
use crate::config::{DEFAULT_MTU, FeatureToggles};
use crate::counters::PortCounters;
use crate::fdb::PortId;
use crate::log_limit::LogLimit;
use crate::plane::{Late, PAIRS, PortShared, Stopping};
use crate::ports::queues::{AnyQueues, AnyRequest, AnyStart, AnyStopped, Workers};
use crate::rules::Rules;

/// Least time between two announcements of a guest that has moved.
const ANNOUNCE_INTERVAL: Duration = Duration::from_millis(20);

/// Most addresses of one guest that are announced.
const STATIONS: usize = 8;

/// The virtio-net device of a port.
pub(super) struct PortDevice {
    pub(super) workers: Arc<Workers>,
    pub(super) id: PortId,
    pub(super) name: String,
    /// The number of the session, so that the next session is not blamed for a fault that a worker reports
    /// late.
    pub(super) session: u32,
    /// The features that the front end has acknowledged.
    pub(super) features: Features,
    pub(super) memory: Option<Arc<GuestMemory>>,
    pub(super) mac: Option<Mac>,
    /// The MTU of the configuration, which a front end may not exceed.
    pub(super) mtu_limit: Option<u16>,
    /// The MTU in force, in bytes.
    pub(super) mtu: u16,
    /// False if the port's administrator has taken the link down.
    pub(super) link_up: bool,
    /// Upper bound on the size of a ring.
    pub(super) queue_limit: Option<u16>,
    /// The index at which each ring was started, for a ring that the worker never got.
    pub(super) bases: Vec<u16>,
    /// Rings that the front end has started and that nobody serves, with the reason.
    pub(super) refused: BTreeMap<u16, String>,
    /// Rings that [were asked](PortDevice::begin_to_stop) to stop.
    pub(super) stopping: Option<Stopping<AnyQueues>>,
    /// The port's rules, by which more of the guest's addresses may be known; see [`stations`].
    pub(super) rules: Rules,
    /// When rings were last stopped, if none was started since.
    pub(super) stopped: Option<Instant>,
    /// Time of the last announcement.
    pub(super) announced: Option<Instant>,
    pub(super) limit: LogLimit,
    /// Set when a worker has not answered: the reason why the port rests.
    pub(super) unanswered: Option<Unanswered>,
    /// The port's counters, of which only connections are counted here.
    pub(super) counters: Arc<PortCounters>,
    pub(super) shared: Arc<PortShared>,
    pub(super) calls: Arc<NewCalls>,
}

impl PortDevice {
    /// Makes a device without rings, whose log lines are limited by `limit`.
    pub(super) fn new(
        workers: Arc<Workers>,
        id: PortId,
        name: String,
        limit: LogLimit,
        counters: Arc<PortCounters>,
        shared: Arc<PortShared>,
        calls: Arc<NewCalls>,
    ) -> Self {
        Self {
            workers,
            id,
            name,
            session: 0,
            features: Features::empty(),
            memory: None,
            mac: None,
            mtu_limit: None,
            mtu: DEFAULT_MTU,
            link_up: true,
            queue_limit: None,
            bases: Vec::new(),
            refused: BTreeMap::new(),
            rules: Rules::default(),
            stopping: None,
            stopped: None,
            announced: None,
            limit,
            unanswered: None,
            counters,
            shared,
            calls,
        }
    }

    /// Clears the state of a session that is over. Returns true if it had ever started a ring, and so
    /// disturbed the workers.
    pub(super) fn reset(&mut self) -> bool {
        // If the front end never started a ring, there is no state to clear.
        let had_rings = !self.bases.is_empty();
        if had_rings {
            self.bases.clear();
            self.workers.forget(self.id);
        }
        self.refused.clear();
        self.stopped = None;
        self.features = Features::empty();
        self.mtu = self.mtu_limit.unwrap_or(DEFAULT_MTU);
        had_rings
    }

    /// Returns the reason why a ring that the front end has started is not served, if it is not.
    pub(super) fn refusal(&self, index: u16) -> Option<&str> {
        self.refused.get(&index).map(String::as_str)
    }

    /// Assembles a ring's start for its worker, which is the first to touch it: this thread must not wait for a page of a guest.
    fn ring(&mut self, index: u16, setup: RingSetup) -> Result<RingStart, TooLarge> {
        let size = setup.parts.size;
        if let Some(limit) = self.queue_limit.filter(|limit| size > *limit) {
            return Err(TooLarge { size, limit });
        }
        self.shared.set_offloads(Features::from_bits_retain(setup.features).guest_offloads());
        self.shared.set_mtu(self.mtu);
        Ok(RingStart { session: self.session, index, setup })
    }

    /// Announces these addresses by RARP, as though the guest did, unless something was announced just now. Each announcement is flooded to every port:
    /// a few per migration are needed, and more would only keep the worker busy.
    fn announce_stations(&mut self, stations: &[Mac]) {
        let now = Instant::now();
        if self.announced.is_some_and(|last| now.duration_since(last) < ANNOUNCE_INTERVAL) {
            return;
        }
        self.announced = Some(now);
        for station in stations {
            self.workers.inject(self.id, rarp_announcement(*station).to_vec());
        }
    }

    fn ask_to_stop(&self, rings: &[u16]) -> Stopping<AnyQueues> {
        let queues = rings.iter().map(|index| (queue_index::pair(*index), *index));
        self.workers.begin_to_stop(self.id, queues)
    }

    /// Asks the workers to stop rings, all that run, without waiting for them. The next call of [`rings_stopped`](Device::rings_stopped), for the same
    /// rings, waits.
    pub(super) fn begin_to_stop(&mut self, rings: &[u16]) {
        self.stopping = Some(self.ask_to_stop(rings));
    }

    /// Records that a worker has not answered.
    fn note(&mut self, late: Late) -> Unanswered {
        self.unanswered.insert(Unanswered(late.to_string())).clone()
    }
}

/// What tells a ring that is refused from one that has broken, in what is said of either.
pub(crate) const QUEUE_SIZE_ALLOWS: &str = "the port's queue_size allows";

/// The reason why a ring that a front end has started is not served.
#[derive(Debug, thiserror::Error)]
#[error(
    "it has {size} entries, and {QUEUE_SIZE_ALLOWS} {limit}: raise that, or make the VM's ring smaller, and have its front end connect anew"
)]
struct TooLarge {
    size: u16,
    limit: u16,
}

impl Device for PortDevice {
    fn features_acked(&mut self, features: u64) {
        let features = Features::from_bits_retain(features);
        if self.features != features && self.limit.allows(&self.name) {
            tracing::info!(port = self.name, features = features.names().join(" "), "features agreed on");
        }
        self.features = features;
    }

    fn memory_changed(&mut self, memory: Option<Arc<GuestMemory>>) {
        self.memory = memory;
    }

    fn ring_started(&mut self, index: u16, setup: RingSetup) {
        self.rings_started(vec![(index, setup)]);
    }

    fn rings_started(&mut self, rings: Vec<(u16, RingSetup)>) {
        let mut starts = Vec::with_capacity(rings.len());
        self.stopped = None;
        let resumed = rings.iter().any(|(_, setup)| !setup.is_new());
        for (index, setup) in rings {
            let at = usize::from(index);
            if self.bases.len() <= at {
                self.bases.resize(at + 1, 0);
            }
            self.bases[at] = setup.base;
            // A call event that the worker has not taken yet is older than the one it gets now.
            drop(self.calls.take(index));
            let (size, base) = (setup.parts.size, setup.base);
            tracing::debug!(port = self.name, index, size, base, "ring starts");
            self.refused.remove(&index);
            match self.ring(index, setup) {
                Ok(start) => starts.push((queue_index::pair(index), AnyStart::Vhost(start))),
                Err(why) => {
                    if self.limit.allows(&self.name) {
                        tracing::warn!(port = self.name, "queue {index} cannot be served: {why}");
                    }
                    self.refused.insert(index, why.to_string());
                }
            }
        }
        self.workers.start_queues(self.id, starts);
        // A guest that was migrated or restored to this port does not know that, and would be looked for elsewhere until it speaks. Not every front end has it
        // speak (feature GUEST_ANNOUNCE), or asks for this (SEND_RARP).
        if resumed {
            self.announce_stations(&stations(self.mac, &self.rules));
        }
    }

    fn ring_call_changed(&mut self, index: u16, call: Option<EventFd>) {
        if self.calls.put(index, call) {
            self.workers.request(
                self.id,
                queue_index::pair(index),
                AnyRequest::Vhost(VhostRequest::SetCall(index)),
            );
        }
    }

    fn ring_enabled(&mut self, index: u16, enabled: bool) {
        // `rings_enabled` records whether the worker has answered.
        let _ = self.rings_enabled(&[index], enabled);
    }

    fn rings_enabled(&mut self, rings: &[u16], enabled: bool) -> Result<(), Unanswered> {
        for index in rings.iter().filter(|index| !enabled && queue_index::is_transmitq(**index)) {
            self.workers.drain(self.id, queue_index::pair(*index));
        }
        // All workers are awaited before the reply: a front end that is answered earlier could send on a ring
        // that its worker still empties.
        let requests = rings.iter().map(|index| {
            let index = *index;
            (queue_index::pair(index), move |reply| {
                AnyRequest::Vhost(VhostRequest::Enable(index, enabled, reply))
            })
        });
        self.workers.ask_queues(self.id, requests).map_err(|late| self.note(late))
    }

    fn rings_logged(&mut self, rings: &[u16], log: Option<&Arc<DirtyLog>>) -> Result<bool, Unanswered> {
        if self.limit.allows(&self.name) {
            let what = if log.is_some() {
                "are logged now: it is being migrated"
            } else {
                "are not logged any more"
            };
            tracing::info!(port = self.name, "writes to the guest's memory {what}");
        }
        let requests = rings.iter().map(|index| {
            let (index, log) = (*index, log.cloned());
            (queue_index::pair(index), move |reply| {
                AnyRequest::Vhost(VhostRequest::SetLog(index, log, reply))
            })
        });
        self.workers.ask_queues(self.id, requests).map_err(|late| self.note(late))?;
        Ok(true)
    }

    fn ring_stopped(&mut self, index: u16) -> u16 {
        // `rings_stopped` records whether the worker has answered.
        self.rings_stopped(&[index]).map_or(0, |bases| bases[0])
    }

    fn rings_stopped(&mut self, rings: &[u16]) -> Result<Vec<u16>, Unanswered> {
        self.refused.retain(|index, _| !rings.contains(index));
        self.stopped = Some(Instant::now());
        let stopping = match self.stopping.take() {
            Some(stopping) => stopping,
            None => self.ask_to_stop(rings),
        };
        let stopped = self.workers.stopped(stopping).map_err(|late| self.note(late))?;
        let base = |index: &u16| {
            let stopped = stopped.iter().find_map(|(at, stopped)| match stopped {
                AnyStopped::Vhost(base) if at == index => Some(*base),
                _ => None,
            });
            // A ring that no worker got is where it was started.
            let base = stopped.or_else(|| self.bases.get(usize::from(*index)).copied()).unwrap_or(0);
            tracing::debug!(port = self.name, index, base, "ring stops");
            base
        };
        Ok(rings.iter().map(base).collect())
    }

    fn config(&self, offset: usize, buf: &mut [u8]) -> bool {
        let config = NetConfig {
            mac: self.mac.unwrap_or_default().0,
            status: if self.link_up { S_LINK_UP } else { 0 },
            max_virtqueue_pairs: PAIRS,
            mtu: self.mtu,
        };
        config.read(offset, buf);
        true
    }

    fn mtu_set(&mut self, mtu: u16) -> bool {
        // A frame of any MTU passes through the switch; only the configuration sets a limit.
        if let Some(limit) = self.mtu_limit.filter(|limit| mtu > *limit) {
            if self.limit.allows(&self.name) {
                tracing::warn!(
                    port = self.name,
                    "the front end wants MTU {mtu}, and the port allows {limit}"
                );
            }
            return false;
        }
        self.mtu = mtu;
        true
    }

    fn announce(&mut self, mac: [u8; 6]) {
        self.announce_stations(&[Mac(mac)]);
    }
}

/// Returns the addresses that are certainly those of the guest at a port with this `mac` and these rules, in the VLAN of frames without a tag. There are at most
/// [`STATIONS`].
///
/// What was learned from an earlier session is not among them: that guest may live on elsewhere, and must not lose its frames to this port.
fn stations(mac: Option<Mac>, rules: &Rules) -> Vec<Mac> {
    let untagged = rules.vlans.untagged();
    let statics = rules.static_macs.iter().filter(|(_, vid)| Some(*vid) == untagged).map(|(mac, _)| *mac);
    // Of several addresses that a port may use, some may be in use elsewhere.
    let only = rules.guard.as_ref().and_then(|guard| match guard.macs[..] {
        [mac] => Some(mac),
        _ => None,
    });
    let mut stations: Vec<Mac> = Vec::new();
    for station in mac.into_iter().chain(statics).chain(only) {
        if stations.len() < STATIONS && !stations.contains(&station) {
            stations.push(station);
        }
    }
    stations
}

/// Returns the features that a port with these toggles offers.
pub(super) fn features(toggles: FeatureToggles) -> Features {
    let mut features = Features::DEVICE | Features::MTU | Features::MQ | Features::GUEST_ANNOUNCE;
    let groups = [
        (toggles.mergeable, Features::MRG_RXBUF),
        (toggles.csum, Features::CSUM | Features::GUEST_CSUM),
        (
            toggles.tso,
            Features::GUEST_TSO4
                | Features::GUEST_TSO6
                | Features::GUEST_ECN
                | Features::HOST_TSO4
                | Features::HOST_TSO6
                | Features::HOST_ECN,
        ),
        (toggles.uso, Features::GUEST_USO4 | Features::GUEST_USO6 | Features::HOST_USO),
        (toggles.event_idx, Features::EVENT_IDX),
        (toggles.indirect, Features::INDIRECT_DESC),
        (toggles.packed, Features::RING_PACKED),
        (toggles.in_order, Features::IN_ORDER),
    ];
    for (on, group) in groups {
        if !on {
            features.remove(group);
        }
    }
    // MQ and GUEST_ANNOUNCE need the control queue, which the front end serves itself; it is not offered
    // here.
    let served_by_front_end = Features::MQ | Features::GUEST_ANNOUNCE;
    features.difference(served_by_front_end).consistent() | features & served_by_front_end
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::{Guard, Vlans};

    #[test]
    fn stations_are_the_addresses_that_can_only_be_the_guests() {
        let (own, fixed, other) = (Mac([2, 0, 0, 0, 0, 1]), Mac([2, 0, 0, 0, 0, 2]), Mac([2, 0, 0, 0, 0, 3]));
        let guard = |macs: &[Mac]| Some(Guard { macs: macs.to_vec(), ips: None });
        assert!(stations(None, &Rules::default()).is_empty());
        // A static address of another VLAN is announced by none of its frames, and of two allowed ones each may be somebody else's.
        let statics = vec![(fixed, 5), (other, 6), (own, 5)];
        let rules = Rules {
            vlans: Vlans::Access(5),
            static_macs: statics,
            guard: guard(&[own, other]),
            ..Rules::default()
        };
        assert_eq!(stations(Some(own), &rules), [own, fixed]);
        let rules =
            Rules { vlans: Vlans::Trunk { allowed: None, native: None }, guard: guard(&[own]), ..rules };
        assert_eq!(stations(None, &rules), [own]);
        let many: Vec<_> = (0..100).map(|number| (Mac([2, 0, 0, 0, 1, number]), 0)).collect();
        let rules = Rules { static_macs: many, ..Rules::default() };
        assert_eq!(stations(None, &rules).len(), STATIONS);
    }

    #[test]
    fn toggles_take_their_dependants_along() {
        let toggles = FeatureToggles { csum: false, ..FeatureToggles::default() };
        let offered = features(toggles);
        assert!(
            !offered
                .intersects(Features::CSUM | Features::HOST_TSO4 | Features::GUEST_USO6 | Features::HOST_ECN)
        );
        assert!(offered.contains(Features::MQ | Features::MRG_RXBUF | Features::VERSION_1));
    }
}
