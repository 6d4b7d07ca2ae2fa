//! The counters of ports: packets, bytes, notifications, and every drop with its reason.
//!
//! **Point of view.** Names follow the *switch*: `rx` counts frames that the switch received from the port
//! (the guest sent them), `tx` those that the switch sent to the port (the guest receives them). So
//! `rx_packets` of a virtual machine's port equals `tx_packets` of the machine's own interface, as it does
//! for a tap or a switch port in hardware.
//!
//! **Ownership.** A counter is written by one worker thread (each has its own of every port) and read by
//! anyone at any time. A plain load and store is therefore enough, where an atomic read-modify-write costs a
//! locked instruction per packet. Values are exact per counter; two counters read one after the other may be
//! one burst apart. Counters never go back while the port exists.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

pub use ringferry_control::DropReason;

/// A number that only one thread increases and any thread reads.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds `n`. Only the owning thread may call this: with two writers, additions are lost (nothing worse).
    #[inline]
    pub fn add(&self, n: u64) {
        self.0.store(self.get().wrapping_add(n), Ordering::Relaxed);
    }

    /// Returns the current value; any thread may call it.
    #[inline]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Drops by reason. A drop is counted at the port it would have left by, or at the port it came from when it
/// never got that far (`rx-…`, `same-port`, `no-destination`).
#[derive(Debug, Default)]
pub struct Drops([Counter; DropReason::ALL.len()]);

impl Drops {
    /// Counts `n` packets dropped for `reason`. Owning thread only, as for [`Counter::add`].
    #[inline]
    pub fn add(&self, reason: DropReason, n: u64) {
        self.0[reason as usize].add(n);
    }

    /// Returns the packets dropped for `reason` so far.
    pub fn get(&self, reason: DropReason) -> u64 {
        self.0[reason as usize].get()
    }

    /// Returns the packets dropped for any reason so far.
    pub fn total(&self) -> u64 {
        self.0.iter().map(Counter::get).sum()
    }

    /// Every reason with its count, by stable name.
    pub fn by_name(&self) -> BTreeMap<String, u64> {
        DropReason::ALL.iter().map(|reason| (reason.name().to_owned(), self.get(*reason))).collect()
    }
}

/// Makes [`PortCounters`] from one table: field (its name is the stable name) and meaning.
macro_rules! port_counters {
    ($($(#[doc = $doc:literal])+ $field:ident,)+) => {
        /// The counters of one port. Aligned so that two ports' counters never share a cache line (128:
        /// adjacent lines are fetched in pairs on x86).
        #[derive(Debug, Default)]
        #[repr(align(128))]
        pub struct PortCounters {
            $($(#[doc = $doc])+ pub $field: Counter,)+
            /// Packets dropped at the port, by reason.
            pub drops: Drops,
        }

        impl PortCounters {
            /// Every counter but the drops, by stable name.
            pub fn by_name(&self) -> BTreeMap<String, u64> {
                [$((stringify!($field).to_owned(), self.$field.get())),+].into()
            }

            /// The counter of this name, if there is one.
            fn of_name(&self, name: &str) -> Option<&Counter> {
                match name {
                    $(stringify!($field) => Some(&self.$field),)+
                    _ => None,
                }
            }
        }
    };
}

port_counters! {
    /// Frames received from the port, including those then dropped. A frame with segmentation offload counts
    /// once.
    rx_packets,
    /// Bytes of those frames, from the Ethernet header on, without the virtio-net header.
    rx_bytes,
    /// Frames received from the port that the kernel wrote straight into their receiver's buffers (taps only).
    rx_in_place,
    /// Times a queue of the port had to wait as the port had sent as much as its `rate_in` allows.
    rx_paused,
    /// Frames sent to the port.
    tx_packets,
    /// Bytes of those frames, from the Ethernet header on, without the virtio-net header.
    tx_bytes,
    /// Frames for the port whose checksums were finished, or that were cut, here, as its receiver takes no such frames.
    tx_software,
    /// Packets for the port that left it merged into larger frames.
    tx_coalesced,
    /// Packets for the port that were marked (ECN, congestion experienced) as they had waited too long for its `rate_out`.
    tx_marked,
    /// Notifications received from the port's peer (a guest's doorbell).
    kicks,
    /// Notifications sent to the port's peer (a guest's interrupt).
    calls,
    /// Times a queue of the port broke because its peer broke the rules.
    ring_errors,
    /// Times a peer connected.
    connections,
    /// Estimated time of the workers that the frames the port sent have cost, wherever they went, in nanoseconds: copies, segments, checksums,
    /// receivers, system calls. Ports that have work share a worker by it.
    work_nanoseconds,
}

/// The counters of one port in every worker: each worker writes its own, and their sum is shown.
#[derive(Clone, Debug)]
pub struct PortTotals(Vec<Arc<PortCounters>>);

impl PortTotals {
    /// Makes zeroed counters for so many workers.
    pub fn new(workers: usize) -> Self {
        Self((0..workers.max(1)).map(|_| Arc::default()).collect())
    }

    /// Returns the counters that worker `worker` writes.
    pub fn of(&self, worker: usize) -> Arc<PortCounters> {
        Arc::clone(&self.0[worker % self.0.len()])
    }

    /// Every counter but the drops, by stable name.
    pub fn by_name(&self) -> BTreeMap<String, u64> {
        self.sum(PortCounters::by_name)
    }

    /// Returns the packets dropped, summed over the workers, by stable name of the reason.
    pub fn drops_by_name(&self) -> BTreeMap<String, u64> {
        self.sum(|counters| counters.drops.by_name())
    }

    /// Adds what an earlier process has counted, by stable name. No worker may count meanwhile.
    pub(crate) fn restore(&self, counters: &BTreeMap<String, u64>, drops: &BTreeMap<String, u64>) {
        let first = &self.0[0];
        for (name, value) in counters {
            if let Some(counter) = first.of_name(name) {
                counter.add(*value);
            }
        }
        for reason in DropReason::ALL {
            first.drops.add(reason, drops.get(reason.name()).copied().unwrap_or(0));
        }
    }

    fn sum(&self, of: impl Fn(&PortCounters) -> BTreeMap<String, u64>) -> BTreeMap<String, u64> {
        let mut sum = BTreeMap::new();
        for (name, value) in self.0.iter().flat_map(|counters| of(counters)) {
            *sum.entry(name).or_insert(0) += value;
        }
        sum
    }
}

/// The counters of one queue pair. Like a port's, from the switch's point of view: the guest's transmitq is
/// `rx`.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct PairCounters {
    /// Frames that the guest sent on it.
    pub rx_packets: Counter,
    /// Bytes of those frames, without the virtio-net header.
    pub rx_bytes: Counter,
    /// Notifications (doorbells) received from the pair's transmitq.
    pub kicks: Counter,
    /// Frames that the guest received on it.
    pub tx_packets: Counter,
    /// Bytes of those frames, without the virtio-net header.
    pub tx_bytes: Counter,
    /// Frames for it that found no buffers.
    pub tx_dropped: Counter,
    /// Notifications (interrupts) sent to the guest for both queues.
    pub calls: Counter,
}

impl PairCounters {
    /// All of them, in a fixed order.
    fn all(&self) -> [&Counter; 7] {
        let Self { rx_packets, rx_bytes, kicks, tx_packets, tx_bytes, tx_dropped, calls } = self;
        [rx_packets, rx_bytes, kicks, tx_packets, tx_bytes, tx_dropped, calls]
    }

    /// The values of all of them.
    pub(crate) fn values(&self) -> [u64; 7] {
        self.all().map(Counter::get)
    }

    /// Adds what an earlier process has counted. No worker may count meanwhile.
    pub(crate) fn restore(&self, values: [u64; 7]) {
        self.all().into_iter().zip(values).for_each(|(counter, value)| counter.add(value));
    }
}

/// The counters of a worker thread about itself.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct WorkerCounters {
    /// Rounds over all ports, with or without work.
    pub polls: Counter,
    /// Rounds that moved at least one packet.
    pub busy_polls: Counter,
    /// Times the worker went to sleep in epoll.
    pub sleeps: Counter,
    /// Times it was woken by an event, not by a timer.
    pub wakeups: Counter,
    /// Time asleep, in nanoseconds.
    pub sleep_nanoseconds: Counter,
}

impl WorkerCounters {
    /// All of them, in a fixed order.
    fn all(&self) -> [&Counter; 5] {
        let Self { polls, busy_polls, sleeps, wakeups, sleep_nanoseconds } = self;
        [polls, busy_polls, sleeps, wakeups, sleep_nanoseconds]
    }

    /// The values of all of them.
    pub(crate) fn values(&self) -> [u64; 5] {
        self.all().map(Counter::get)
    }

    /// Adds what a worker of an earlier process has counted. The worker must be paused.
    pub(crate) fn restore(&self, values: [u64; 5]) {
        self.all().into_iter().zip(values).for_each(|(counter, value)| counter.add(value));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_reason_has_its_own_cell() {
        let drops = Drops::default();
        for (index, reason) in DropReason::ALL.into_iter().enumerate() {
            drops.add(reason, index as u64 + 1);
        }
        for (index, reason) in DropReason::ALL.into_iter().enumerate() {
            assert_eq!(drops.get(reason), index as u64 + 1);
            assert_eq!(drops.by_name()[reason.name()], index as u64 + 1);
        }
        let count = DropReason::ALL.len() as u64;
        assert_eq!(drops.total(), count * (count + 1) / 2);
    }

    #[test]
    fn ports_do_not_share_cache_lines() {
        assert_eq!(align_of::<PortCounters>(), 128);
        assert_eq!(size_of::<PortCounters>() % 128, 0);
    }

    #[test]
    fn counters_appear_under_their_field_names() {
        let counters = PortCounters::default();
        counters.rx_packets.add(3);
        counters.rx_packets.add(4);
        counters.tx_bytes.add(1500);
        let map = counters.by_name();
        assert_eq!((map["rx_packets"], map["tx_bytes"], map["kicks"]), (7, 1500, 0));
        assert!(!map.contains_key("drops"));
    }

    #[test]
    fn totals_are_the_sums_of_all_workers() {
        let totals = PortTotals::new(3);
        for worker in 0..3 {
            totals.of(worker).rx_packets.add(1 << worker);
            totals.of(worker).drops.add(DropReason::LinkDown, 10);
        }
        assert_eq!((totals.by_name()["rx_packets"], totals.drops_by_name()["link-down"]), (7, 30));
    }

    #[test]
    fn reader_sees_one_writers_additions_in_order() {
        let counter = Counter::default();
        std::thread::scope(|scope| {
            scope.spawn(|| (0..100_000).for_each(|_| counter.add(1)));
            let mut last = 0;
            while last < 100_000 {
                let now = counter.get();
                assert!(now >= last);
                last = now;
            }
        });
        assert_eq!(counter.get(), 100_000);
    }
}
