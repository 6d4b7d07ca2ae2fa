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
use std::time::Duration;

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

/// Most that one pause between two bursts adds to `tx_starved_microseconds`: after a longer one nobody knows what the receiver had meanwhile.
pub const STARVED_GAP: u64 = 10_000;

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

        /// The stable names of all counters of a port but its drops.
        pub(crate) const PORT_COUNTERS: &[&str] = &[$(stringify!($field)),+];

        impl PortCounters {
            /// Returns the values of all counters in the order of [`PORT_COUNTERS`], then drops in the order of their reasons.
            fn values(&self) -> [u64; PORT_VALUES] {
                let mut all = [$(&self.$field),+].into_iter().chain(&self.drops.0);
                std::array::from_fn(|_| all.next().expect("as many as there are").get())
            }

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
    /// Frames received from the port that went to every port of their VLAN that may have them: broadcast, groups, and addresses that are not known.
    rx_flooded,
    /// Bursts in which those frames were taken.
    rx_bursts,
    /// Times a queue of the port had to wait as the port had sent as much as its `rate_in` allows.
    rx_paused,
    /// Microseconds for which they waited, added when each wait begins.
    rx_paused_microseconds,
    /// Microseconds for which queues of the port waited as it had its share under way to a worker that is behind, added when each wait begins.
    rx_held_microseconds,
    /// Frames sent to the port.
    tx_packets,
    /// Bytes of those frames, from the Ethernet header on, without the virtio-net header.
    tx_bytes,
    /// Bursts with frames for the port, whether they were delivered or not.
    tx_bursts,
    /// Bursts of which at least one frame found no buffers of the receiver.
    tx_starved,
    /// Microseconds between such bursts that follow each other, of each pause at most [`STARVED_GAP`]: the time that is known to have passed without
    /// buffers.
    tx_starved_microseconds,
    /// Frames for the port whose checksums were finished, or that were cut, here, as its receiver takes no such frames.
    tx_software,
    /// Those of them that were cut into segments.
    tx_segmented,
    /// Bytes of the frames that were cut.
    tx_segmented_bytes,
    /// Bytes of the frames whose checksums were finished and that were not cut.
    tx_checksummed_bytes,
    /// Packets for the port that left it merged into larger frames.
    tx_coalesced,
    /// Packets for the port that were marked (ECN, congestion experienced) as they had waited too long for its `rate_out`.
    tx_marked,
    /// Frames for the port that its wire has carried twice.
    tx_duplicated,
    /// Frames for the port that have overtaken others on its wire, as they were not delayed.
    tx_reordered,
    /// Frames for the port of which one bit was inverted on its wire.
    tx_corrupted,
    /// Notifications received from the port's peer (a guest's doorbell).
    kicks,
    /// Notifications sent to the port's peer (a guest's interrupt).
    calls,
    /// Bursts shown to the port's peer that it wanted no notification for.
    calls_suppressed,
    /// Times a queue of the port broke because its peer broke the rules.
    ring_errors,
    /// Times a peer connected.
    connections,
    /// Estimated time of the workers that the frames the port sent have cost, wherever they went, in nanoseconds: copies, segments, checksums,
    /// receivers, system calls. Ports that have work share a worker by it.
    work_nanoseconds,
}

/// Numbers that are counted of a port: counters, then drops.
pub(crate) const PORT_VALUES: usize = PORT_COUNTERS.len() + DropReason::ALL.len();

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

    /// One counter, summed over the workers.
    pub(crate) fn sum_of(&self, counter: impl Fn(&PortCounters) -> &Counter) -> u64 {
        self.0.iter().map(|counters| counter(counters).get()).sum()
    }

    /// Every counter but the drops, by stable name.
    pub fn by_name(&self) -> BTreeMap<String, u64> {
        self.sum(PortCounters::by_name)
    }

    /// Returns the packets dropped, summed over the workers, by stable name of the reason.
    pub fn drops_by_name(&self) -> BTreeMap<String, u64> {
        self.sum(|counters| counters.drops.by_name())
    }

    /// Returns the values of all counters, summed over the workers: those of [`PORT_COUNTERS`], then drops in the order of their reasons.
    pub(crate) fn values(&self) -> [u64; PORT_VALUES] {
        let mut sum = [0; PORT_VALUES];
        for counters in &self.0 {
            sum.iter_mut().zip(counters.values()).for_each(|(sum, value)| *sum += value);
        }
        sum
    }

    /// Returns the work that each worker has done for the port, in nanoseconds.
    pub(crate) fn work(&self) -> impl Iterator<Item = u64> {
        self.0.iter().map(|counters| counters.work_nanoseconds.get())
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
    /// Bursts shown to the guest on either queue that it wanted no notification for.
    pub calls_suppressed: Counter,
}

/// The stable names of all [`PairCounters`], in the order of [`PairCounters::values`].
pub(crate) const PAIR_NAMES: [&str; PAIR_COUNTERS] =
    ["rx_packets", "rx_bytes", "kicks", "tx_packets", "tx_bytes", "tx_dropped", "calls", "calls_suppressed"];

/// Number of [`PairCounters`].
pub(crate) const PAIR_COUNTERS: usize = 8;

impl PairCounters {
    /// All of them, in a fixed order.
    fn all(&self) -> [&Counter; PAIR_COUNTERS] {
        let Self { rx_packets, rx_bytes, kicks, tx_packets, tx_bytes, tx_dropped, calls, calls_suppressed } =
            self;
        [rx_packets, rx_bytes, kicks, tx_packets, tx_bytes, tx_dropped, calls, calls_suppressed]
    }

    /// The values of all of them.
    pub(crate) fn values(&self) -> [u64; PAIR_COUNTERS] {
        self.all().map(Counter::get)
    }

    /// Adds what an earlier process has counted. No worker may count meanwhile.
    pub(crate) fn restore(&self, values: [u64; PAIR_COUNTERS]) {
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
    /// Time of sleeps that are over, in nanoseconds.
    pub sleep_nanoseconds: Counter,
    /// Time of rounds that moved at least one packet, in nanoseconds. It is added round by round, so whoever reads it lacks one round at most; what is
    /// neither busy nor polling is sleep, also while the sleep goes on.
    pub busy_nanoseconds: Counter,
    /// Time awake in which nothing was found, in nanoseconds, likewise.
    pub polling_nanoseconds: Counter,
    /// Time for which the worker could have run and had no processor, in nanoseconds. The control plane counts it, as the kernel tells it.
    pub run_delay_nanoseconds: Counter,
    /// Bursts by the number of packets in them: 1, 2, 3 to 4, 5 to 8, 9 to 16, and 17 to 32.
    pub bursts: [Counter; BURST_BUCKETS],
    /// Busy rounds by the time they took: less than 4 microseconds, less than 16, and so on, each bound four times the one before; the last has none.
    /// A frame waits for one round at most until its port is looked at.
    pub rounds: [Counter; ROUND_BUCKETS],
}

/// Buckets of [`WorkerCounters::bursts`].
pub(crate) const BURST_BUCKETS: usize = 6;
/// Buckets of [`WorkerCounters::rounds`].
pub(crate) const ROUND_BUCKETS: usize = 8;
/// Number of [`WorkerCounters`].
pub(crate) const WORKER_COUNTERS: usize = 8 + BURST_BUCKETS + ROUND_BUCKETS;
/// Where the bursts are in [`WorkerCounters::values`].
pub(crate) const BURSTS: std::ops::Range<usize> = 7..7 + BURST_BUCKETS;

impl WorkerCounters {
    /// Counts a burst of `packets`.
    #[inline]
    pub(crate) fn count_burst(&self, packets: usize) {
        let bucket = usize::BITS - packets.saturating_sub(1).leading_zeros();
        self.bursts[(bucket as usize).min(BURST_BUCKETS - 1)].add(1);
    }

    /// Counts a busy round that took so long. The bounds of the buckets count a microsecond as 1024 nanoseconds.
    #[inline]
    pub(crate) fn count_round(&self, took: Duration) {
        let nanos = took.as_nanos() as u64;
        self.busy_nanoseconds.add(nanos);
        let bucket = ((nanos >> 10) | 1).ilog2() / 2;
        self.rounds[(bucket as usize).min(ROUND_BUCKETS - 1)].add(1);
    }

    /// Counts time awake in which nothing was found.
    #[inline]
    pub(crate) fn count_polling(&self, took: Duration) {
        self.polling_nanoseconds.add(took.as_nanos() as u64);
    }

    /// All of them, in a fixed order.
    fn all(&self) -> [&Counter; WORKER_COUNTERS] {
        let Self { polls, busy_polls, sleeps, wakeups, sleep_nanoseconds, .. } = self;
        let Self { busy_nanoseconds, polling_nanoseconds, bursts, rounds, run_delay_nanoseconds, .. } = self;
        let first =
            [polls, busy_polls, sleeps, wakeups, sleep_nanoseconds, busy_nanoseconds, polling_nanoseconds];
        // What an earlier version does not know comes last: it hands over so many, and takes no more.
        let mut all = first.into_iter().chain(bursts).chain(rounds).chain([run_delay_nanoseconds]);
        std::array::from_fn(|_| all.next().expect("as many as there are"))
    }

    /// The values of all of them.
    pub(crate) fn values(&self) -> [u64; WORKER_COUNTERS] {
        self.all().map(Counter::get)
    }

    /// Adds what a worker of an earlier process has counted. The worker must be paused.
    pub(crate) fn restore(&self, values: [u64; WORKER_COUNTERS]) {
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
        totals.of(1).work_nanoseconds.add(9);
        let by_name: Vec<_> = PORT_COUNTERS.iter().map(|name| totals.by_name()[*name]).collect();
        let drops = DropReason::ALL.map(|reason| totals.drops_by_name()[reason.name()]);
        assert_eq!(totals.values()[..], [&by_name[..], &drops].concat());
        assert_eq!(totals.work().collect::<Vec<_>>(), [0, 9, 0]);
    }

    #[test]
    fn bursts_and_rounds_are_in_the_bucket_of_their_size() {
        let counters = WorkerCounters::default();
        (1..=33).for_each(|packets| counters.count_burst(packets));
        assert_eq!(counters.bursts.each_ref().map(Counter::get), [1, 1, 2, 4, 8, 17]);
        for micros in [0, 3, 4, 15, 16, 64, 256, 1024, 4096, 16_384, 1_000_000] {
            counters.count_round(Duration::from_nanos(micros << 10));
        }
        assert_eq!(counters.rounds.each_ref().map(Counter::get), [2, 2, 1, 1, 1, 1, 1, 2]);
        counters.count_polling(Duration::from_micros(3));
        let values = counters.values();
        assert_eq!(values[6..=8], [3000, 1, 1]);
        let successor = WorkerCounters::default();
        successor.restore(values);
        assert_eq!(successor.values(), values);
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
