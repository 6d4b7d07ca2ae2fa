//! What a port counts: packets, bytes, notifications, and every drop with its reason.
//!
//! **Point of view.** Names follow the *switch*: `rx` is what the switch received from the port (the guest
//! sent it), `tx` is what the switch sent to the port (the guest receives it). So `rx_packets` of a virtual
//! machine's port equals `tx_packets` of the machine's own interface, as it does for a tap or a switch port
//! in hardware.
//!
//! **Ownership.** A counter is written by one worker thread (each has its own of every port) and read by anyone at any
//! time. A plain load and store is therefore enough, where an atomic read-modify-write costs a locked
//! instruction per packet. Values are exact per counter; two counters read one after the other may be one
//! burst apart. Counters never go back while the port exists.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// A number that only one thread increases and any thread reads.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds `n`. Only the owning thread may call this: with two writers, additions are lost (nothing worse).
    #[inline]
    pub fn add(&self, n: u64) {
        self.0.store(self.get().wrapping_add(n), Ordering::Relaxed);
    }

    /// The value now.
    #[inline]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Makes [`DropReason`] from one table: variant, stable name, meaning.
macro_rules! drop_reasons {
    ($($(#[doc = $doc:literal])+ $variant:ident = $name:literal,)+) => {
        /// Why a packet was dropped. The name is part of the interface (JSON, metrics): never change one,
        /// only add.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(usize)]
        pub enum DropReason {
            $($(#[doc = $doc])+ $variant,)+
        }

        impl DropReason {
            /// Every reason, in the order of the table.
            pub const ALL: [DropReason; [$($name),+].len()] = [$(DropReason::$variant),+];

            /// The stable name, in kebab case.
            pub const fn name(self) -> &'static str {
                match self { $(DropReason::$variant => $name,)+ }
            }

            /// What the reason means, for people.
            pub const fn meaning(self) -> &'static str {
                match self { $(DropReason::$variant => concat!($($doc),+).trim_ascii(),)+ }
            }
        }
    };
}

drop_reasons! {
    /// The frame's virtio-net header contradicts itself or the frame.
    RxBadHeader = "rx-bad-header",
    /// The frame is shorter than an Ethernet header.
    RxTooShort = "rx-too-short",
    /// The frame is longer than any the switch carries (65600 bytes).
    RxTooBig = "rx-too-big",
    /// The frame lies in memory the guest did not share; it broke its queue.
    RxBadMemory = "rx-bad-memory",
    /// The frame's own destination is the port it came from.
    SamePort = "same-port",
    /// The frame is for everybody, and no other port is in its VLAN, or may be reached by it.
    NoDestination = "no-destination",
    /// The receiving guest posted too few buffers: it is slower than its senders.
    NoReceiveBuffers = "no-receive-buffers",
    /// The receiving guest's buffers are too small for the frame.
    TxTooBig = "tx-too-big",
    /// The receiving port is not connected, its driver has not started, or its queue is broken.
    LinkDown = "link-down",
    /// The receiver lacks an offload the frame needs and it could not be done in software.
    OffloadUnsupported = "offload-unsupported",
    /// The tap's queue in the kernel is full: the host is slower than its senders.
    TapBusy = "tap-busy",
    /// The kernel refused the frame written to the tap.
    TapWriteError = "tap-write-error",
    /// The worker that serves the receiving queue is too far behind.
    WorkerBusy = "worker-busy",
    /// The slots of a Xen guest's packet do not add up.
    RxBadSlots = "rx-bad-slots",
    /// The receiving guest has asked not to get this multicast frame.
    Filtered = "filtered",
    /// The frame is tagged for a VLAN that the port is not in, or lacks a tag that the port demands.
    Vlan = "vlan",
    /// Sender and receiver are isolated ports.
    Isolated = "isolated",
    /// The frame's source address may not be used behind this port (anti-spoofing).
    Spoofed = "spoofed",
    /// The port has as many source addresses as it may have, and this frame is from another, or from one that is fixed to another
    /// port.
    MacLimit = "mac-limit",
    /// The port floods more frames than it may.
    Storm = "storm",
    /// The port sends more than it may.
    RateIn = "rate-in",
    /// The port is sent more than it may receive.
    RateOut = "rate-out",
    /// The frame does not fit the receiving port, and its sender was told so (ICMP).
    TooBigAnswered = "too-big-answered",
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

    /// Packets dropped for `reason`.
    pub fn get(&self, reason: DropReason) -> u64 {
        self.0[reason as usize].get()
    }

    /// Packets dropped for any reason.
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
            /// Drops by reason.
            pub drops: Drops,
        }

        impl PortCounters {
            /// Every counter but the drops, by stable name.
            pub fn by_name(&self) -> BTreeMap<String, u64> {
                [$((stringify!($field).to_owned(), self.$field.get())),+].into()
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
    /// Frames sent to the port.
    tx_packets,
    /// Bytes of those frames, from the Ethernet header on, without the virtio-net header.
    tx_bytes,
    /// Frames for the port whose checksums were finished, or that were cut, here, as its receiver takes no such frames.
    tx_software,
    /// Packets for the port that left it merged into larger frames.
    tx_coalesced,
    /// Notifications received from the port's peer (a guest's doorbell).
    kicks,
    /// Notifications sent to the port's peer (a guest's interrupt).
    calls,
    /// Times a queue of the port broke because its peer broke the rules.
    ring_errors,
    /// Times a peer connected.
    connections,
}

/// The counters of one port in every worker: each writes its own, and what is shown is their sum.
#[derive(Clone, Debug)]
pub struct PortTotals(Vec<Arc<PortCounters>>);

impl PortTotals {
    /// For so many workers.
    pub fn new(workers: usize) -> Self {
        Self((0..workers.max(1)).map(|_| Arc::default()).collect())
    }

    /// Those of one worker.
    pub fn of(&self, worker: usize) -> Arc<PortCounters> {
        Arc::clone(&self.0[worker % self.0.len()])
    }

    /// Every counter but the drops, by stable name.
    pub fn by_name(&self) -> BTreeMap<String, u64> {
        self.sum(PortCounters::by_name)
    }

    /// The drops by reason.
    pub fn drops_by_name(&self) -> BTreeMap<String, u64> {
        self.sum(|counters| counters.drops.by_name())
    }

    fn sum(&self, of: impl Fn(&PortCounters) -> BTreeMap<String, u64>) -> BTreeMap<String, u64> {
        let mut sum = BTreeMap::new();
        for (name, value) in self.0.iter().flat_map(|counters| of(counters)) {
            *sum.entry(name).or_insert(0) += value;
        }
        sum
    }
}

/// What the queues of one pair count. Like a port's, from the switch's point of view: the guest's transmitq is `rx`.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct PairCounters {
    /// Frames that the guest sent on it.
    pub rx_packets: Counter,
    /// Their bytes.
    pub rx_bytes: Counter,
    /// Doorbells of its transmitq.
    pub kicks: Counter,
    /// Frames that the guest received on it.
    pub tx_packets: Counter,
    /// Their bytes.
    pub tx_bytes: Counter,
    /// Frames for it that found no buffers.
    pub tx_dropped: Counter,
    /// Interrupts for both queues.
    pub calls: Counter,
}

/// What a worker thread counts about itself.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct WorkerCounters {
    /// Rounds over all ports.
    pub polls: Counter,
    /// Rounds that moved at least one packet.
    pub busy_polls: Counter,
    /// Times it went to sleep.
    pub sleeps: Counter,
    /// Times it was woken by an event, not by a timer.
    pub wakeups: Counter,
    /// Nanoseconds asleep.
    pub sleep_nanoseconds: Counter,
    /// Whether it sleeps now.
    pub asleep: AtomicBool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_kebab_case_and_explained() {
        let mut names: Vec<_> = DropReason::ALL.iter().map(|reason| reason.name()).collect();
        for reason in DropReason::ALL {
            assert!(
                reason.name().bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'-'),
                "{}",
                reason.name()
            );
            assert!(
                reason.meaning().ends_with('.') && !reason.meaning().starts_with(' '),
                "{:?}",
                reason.meaning()
            );
        }
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), DropReason::ALL.len());
    }

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
