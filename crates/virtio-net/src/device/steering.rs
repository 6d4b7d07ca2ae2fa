//! Receive steering (VIRTIO 1.4, 5.1.6.5.5 to 5.1.6.5.7): [`Steering`] selects the receiveq of a
//! frame, automatically by flow or by the driver's indirection table (RSS).
//!
//! [`Settings::steering`](super::Settings::steering) creates one after each command that changes
//! steering. Each worker owns a clone and asks it once per frame, until a new one replaces it. Its
//! large parts (the indirection table, the tables of the hash and the flow table) are shared
//! between the workers of a port.

use std::sync::Arc;

use ringferry_nic::tx::select_queue;
use ringferry_packet::flow::{PacketHash, RssHasher, flow_hash};

use super::flows::FlowTable;
use crate::config::MAX_PAIRS;

/// The indirection table (5.1.6.5.7): the queue pair for each value of the hash.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Indirection {
    table: Box<[u16]>,
    unclassified: u16,
}

impl Indirection {
    /// Creates a table of pairs with the pair for packets without a hash. `None` unless the number
    /// of entries is a power of two and every entry is less than `pairs`.
    pub fn new(table: &[u16], unclassified: u16, pairs: u16) -> Option<Self> {
        let good =
            table.len().is_power_of_two() && table.iter().chain([&unclassified]).all(|pair| *pair < pairs);
        good.then(|| Self { table: table.into(), unclassified })
    }

    /// Returns the entries, indexed by the low bits of the hash.
    pub fn table(&self) -> &[u16] {
        &self.table
    }

    /// Returns the pair for packets without a hash.
    pub fn unclassified(&self) -> u16 {
        self.unclassified
    }

    /// Returns the pair for a packet with this hash.
    #[inline]
    fn get(&self, hash: PacketHash) -> u16 {
        match hash.get() {
            // The number of entries is a power of two, so there is one at least.
            Some(hash) => self.table[hash as usize & (self.table.len() - 1)],
            None => self.unclassified,
        }
    }
}

/// The way in which pairs are chosen.
#[derive(Clone, Debug)]
enum Mode {
    /// Automatic: by the pair on which the guest sends the flow (5.1.6.5.6).
    Automatic(Arc<FlowTable>),
    /// Receive-side scaling: by the driver's table (5.1.6.5.7).
    Table(Arc<Indirection>),
}

/// Selects the queue pair of a frame to the guest. It only chooses pairs that are
/// [ready](Steering::set_ready), whatever the driver configured.
#[derive(Clone, Debug)]
pub struct Steering {
    mode: Mode,
    hasher: Option<Arc<RssHasher>>,
    /// Ready pairs, in ascending order.
    ready: Vec<u16>,
    /// Readiness of each pair up to the last that is ready.
    usable: Vec<bool>,
    /// Preferred pairs for new flows, a subset of the ready ones; empty: all ready ones.
    near: Vec<u16>,
}

impl Steering {
    /// Creates automatic steering by the flows in `table`, with no hash and only pair 0 ready, as
    /// after reset.
    pub fn automatic(table: Arc<FlowTable>) -> Self {
        let mut steering = Self {
            mode: Mode::Automatic(table),
            hasher: None,
            ready: Vec::new(),
            usable: Vec::new(),
            near: Vec::new(),
        };
        steering.set_ready([0]);
        steering
    }

    /// Selects receive-side scaling by the driver's table.
    #[must_use]
    pub fn with_table(mut self, table: Arc<Indirection>) -> Self {
        self.mode = Mode::Table(table);
        self
    }

    /// Sets the hash of frames, which indexes the driver's table and is reported.
    #[must_use]
    pub fn with_hasher(mut self, hasher: Arc<RssHasher>) -> Self {
        self.hasher = Some(hasher);
        self
    }

    /// Sets the pairs that may be chosen from now on, which are those whose receiveqs are enabled
    /// and not being reset. Flows on other pairs move; the rest stay.
    pub fn set_ready(&mut self, pairs: impl IntoIterator<Item = u16>) {
        self.near.clear();
        self.ready.clear();
        self.ready.extend(pairs.into_iter().filter(|pair| *pair < MAX_PAIRS));
        self.ready.sort_unstable();
        self.ready.dedup();
        self.usable.clear();
        self.usable.resize(self.ready.last().map_or(0, |last| usize::from(*last) + 1), false);
        for pair in &self.ready {
            self.usable[usize::from(*pair)] = true;
        }
    }

    /// Spreads flows that are not yet known over those ready pairs for which `near` is true, if
    /// there are any. A worker names the pairs that it owns, so that a frame need not be handed off
    /// to another worker.
    pub fn prefer(&mut self, near: impl Fn(u16) -> bool) {
        self.near.clear();
        self.near.extend(self.ready.iter().copied().filter(|pair| near(*pair)));
    }

    /// Makes the first `count` pairs ready, and no others.
    pub fn set_pairs(&mut self, count: u16) {
        self.set_ready(0..count);
    }

    /// Returns the ready pairs, in ascending order.
    pub fn ready(&self) -> &[u16] {
        &self.ready
    }

    /// Returns true if the driver's table selects pairs.
    pub fn is_rss(&self) -> bool {
        matches!(self.mode, Mode::Table(_))
    }

    /// Returns true if [`Steering::learn`] has an effect, so that the flow hash of frames from the
    /// guest is needed.
    #[inline]
    pub fn learns(&self) -> bool {
        self.ready.len() > 1 && matches!(self.mode, Mode::Automatic(_))
    }

    /// Records that the guest sent a frame with this [`flow_hash`] on `pair`; `now` is in
    /// microseconds.
    #[inline]
    pub fn learn(&self, flow: u32, pair: u16, now: u64) {
        if let Mode::Automatic(table) = &self.mode
            && self.learns()
        {
            table.learn(flow, pair, now);
        }
    }

    /// Selects the pair for a frame that starts with `prefix`, and the hash to be reported with it.
    /// `now` is in microseconds. Without a pair the frame is to be dropped: no pair is ready, or
    /// the one that the driver's table names is not (5.1.6.5.7.2).
    ///
    /// With one pair ready and no hash required, the frame is not read.
    #[inline]
    pub fn choose(&self, prefix: &[u8], now: u64) -> (Option<u16>, PacketHash) {
        self.choose_flow(prefix, || flow_hash(prefix), now)
    }

    /// Does the same as [`Steering::choose`] for a caller that may know the frame's [`flow_hash`]
    /// already, because it was sent by a guest with automatic steering.
    #[inline]
    pub fn choose_flow(
        &self,
        prefix: &[u8],
        flow: impl FnOnce() -> u32,
        now: u64,
    ) -> (Option<u16>, PacketHash) {
        match (&self.mode, &self.hasher, &self.ready[..]) {
            (Mode::Automatic(_), None, [only]) => (Some(*only), PacketHash::NONE),
            (Mode::Automatic(_), None, []) => (None, PacketHash::NONE),
            _ => self.choose_of_many(prefix, flow, now),
        }
    }

    fn choose_of_many(
        &self,
        prefix: &[u8],
        flow: impl FnOnce() -> u32,
        now: u64,
    ) -> (Option<u16>, PacketHash) {
        let hash = self.hasher.as_ref().map_or(PacketHash::NONE, |hasher| hasher.hash(prefix));
        let pair = match &self.mode {
            Mode::Automatic(table) => self.by_flow(table, flow, now),
            Mode::Table(table) => Some(table.get(hash)).filter(|pair| self.is_usable(*pair)),
        };
        (pair, hash)
    }

    fn by_flow(&self, table: &FlowTable, flow: impl FnOnce() -> u32, now: u64) -> Option<u16> {
        if let [] | [_] = self.ready[..] {
            return self.ready.first().copied();
        }
        let (flow, spread) = self.spread(flow)?;
        Some(table.choose(flow, now, |pair| self.is_usable(pair), spread))
    }

    /// Returns the pair that [`choose`](Self::choose) would select for a frame of this flow with automatic steering, and takes note of nothing.
    pub fn peek(&self, prefix: &[u8], now: u64) -> Option<u16> {
        match (&self.mode, &self.ready[..]) {
            (_, []) => None,
            (Mode::Automatic(table), [_, _, ..]) => {
                let (flow, spread) = self.spread(|| flow_hash(prefix))?;
                Some(table.peek(flow, now, |pair| self.is_usable(pair), spread))
            }
            // It has no state that a look would change.
            _ => self.choose(prefix, now).0,
        }
    }

    /// Returns the hash of a flow, and the pair for it if it is new.
    #[inline]
    fn spread(&self, flow: impl FnOnce() -> u32) -> Option<(u32, u16)> {
        let flow = flow();
        let new = if self.near.is_empty() { &self.ready } else { &self.near };
        Some((flow, *new.get(select_queue(Some(flow), new.len(), 0))?))
    }

    #[inline]
    fn is_usable(&self, pair: u16) -> bool {
        self.usable.get(usize::from(pair)).copied().unwrap_or(false)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use ringferry_packet::flow::{HashTypes, SYMMETRIC_KEY};
    use ringferry_packet::testing::Packet;

    use super::*;

    /// UDP over IPv4 between two ports.
    fn frame(source: u16, destination: u16) -> Vec<u8> {
        let ports = [source.to_be_bytes(), destination.to_be_bytes()].concat();
        let mut packet = Packet::plain(false, false, vec![0; 18]);
        packet.ports.copy_from_slice(&ports);
        packet.addresses[..8].copy_from_slice(&[10, 0, 0, 1, 10, 0, 0, 2]);
        packet.partial()
    }

    /// The same flow in the other direction.
    fn reply(source: u16, destination: u16) -> Vec<u8> {
        let mut frame = frame(destination, source);
        frame[26..34].rotate_left(4);
        frame
    }

    fn automatic(pairs: u16) -> Steering {
        let mut steering = Steering::automatic(Arc::default());
        steering.set_pairs(pairs);
        steering
    }

    fn table(entries: &[u16], unclassified: u16, pairs: u16) -> Steering {
        let hasher = RssHasher::new(HashTypes::all(), &SYMMETRIC_KEY);
        let table = Indirection::new(entries, unclassified, 16).unwrap();
        automatic(pairs).with_hasher(Arc::new(hasher)).with_table(Arc::new(table))
    }

    #[test]
    fn clause_5_1_6_5_6_2_after_reset_only_receiveq1_is_used() {
        let steering = Steering::automatic(Arc::default());
        for port in 0..100 {
            let frame = frame(port, 80);
            steering.learn(flow_hash(&frame), 3, 0);
            assert_eq!(steering.choose(&frame, 1), (Some(0), PacketHash::NONE));
        }
        assert!(!steering.learns());
    }

    #[test]
    fn clause_5_1_6_5_6_replies_come_on_the_pair_that_sent() {
        let steering = automatic(4);
        for port in 0..100 {
            steering.learn(flow_hash(&reply(port, 80)), port % 4, 0);
        }
        for port in 0..100 {
            assert_eq!(steering.choose(&frame(port, 80), 1).0, Some(port % 4), "{port}");
        }
    }

    #[test]
    fn flows_that_were_never_sent_are_spread_and_stay() {
        let steering = automatic(4);
        let mut spread = [0; 4];
        for port in 0..2000 {
            let pair = steering.choose(&frame(port, 80), 0).0.unwrap();
            assert_eq!(steering.choose(&frame(port, 80), 1000).0, Some(pair));
            spread[usize::from(pair)] += 1;
        }
        assert!(spread.iter().all(|count| (400..600).contains(count)), "{spread:?}");
    }

    #[test]
    fn cve_2024_6505_entries_are_bounded_when_set() {
        assert!(Indirection::new(&[0, 1, 2, 3], 3, 4).is_some());
        assert!(Indirection::new(&[0, 1, 2, 4], 3, 4).is_none());
        assert!(Indirection::new(&[0, 1, 2, 3], 4, 4).is_none());
        assert!(Indirection::new(&[0x8000], 0, MAX_PAIRS).is_none(), "the reserved bit");
        for entries in [0, 3, 5, 127] {
            assert!(Indirection::new(&vec![0; entries], 0, 4).is_none(), "{entries}");
        }
    }

    #[test]
    fn cve_2024_6505_entries_are_bounded_when_used() {
        let mut steering = table(&[5, 5, 15, 15], 15, 16);
        assert!(steering.choose(&frame(1, 2), 0).0.is_some());
        for pairs in [0, 1, 5] {
            steering.set_pairs(pairs);
            for port in 0..100 {
                assert_eq!(steering.choose(&frame(port, 80), 0).0, None);
            }
            assert_eq!(steering.choose(&[0; 60], 0).0, None, "unclassified");
        }
    }

    #[test]
    fn clause_5_1_6_5_7_2_the_hash_indexes_the_table() {
        let steering = table(&[3, 1, 2, 0], 2, 4);
        let mut seen = [0; 4];
        for port in 0..400 {
            let (pair, hash) = steering.choose(&frame(port, 80), 0);
            assert_eq!(hash.report, HashTypes::UDPV4.report());
            assert_eq!(pair, Some([3, 1, 2, 0][hash.value as usize & 3]));
            seen[usize::from(pair.unwrap())] += 1;
        }
        assert!(seen.iter().all(|count| *count > 50), "{seen:?}");
        assert_eq!(steering.choose(&[0; 60], 0), (Some(2), PacketHash::NONE));
        // The table is asked even if only one pair is ready.
        let mut steering = steering;
        steering.set_ready([2]);
        assert_eq!(steering.choose(&[0; 60], 0).0, Some(2));
        assert!(!steering.learns());
    }

    #[test]
    fn clause_5_1_6_4_5_hashes_are_reported_with_automatic_steering_too() {
        let hasher = Arc::new(RssHasher::new(HashTypes::UDPV4, &SYMMETRIC_KEY));
        let mut steering = automatic(1).with_hasher(Arc::clone(&hasher));
        let frame = frame(1, 2);
        assert_eq!(steering.choose(&frame, 0), (Some(0), hasher.hash(&frame)));
        steering.set_pairs(2);
        assert_eq!(steering.choose(&frame, 0).1, hasher.hash(&frame));
    }

    #[test]
    fn clause_5_1_6_5_6_2_a_queue_that_is_being_reset_is_replaced() {
        let mut steering = automatic(4);
        let frame = frame(1, 2);
        steering.learn(flow_hash(&frame), 3, 0);
        steering.set_ready([2, 0, 2]);
        assert_eq!(steering.ready(), [0, 2]);
        assert!(matches!(steering.choose(&frame, 1).0, Some(0 | 2)));
        steering.set_ready([]);
        assert_eq!(steering.choose(&frame, 2).0, None, "all are being reset: dropped");
    }

    proptest! {
        #[test]
        fn only_ready_pairs_are_chosen(
            steps in proptest::collection::vec((0u16..60, 0u16..20, 0u16..18, 0u8..4, 0u64..3000), 1..300),
            rss: bool,
        ) {
            let mut steering = if rss { table(&[0, 3, 7, 15, 2, 9, 1, 1], 4, 3) } else { automatic(3) };
            let mut now = 0;
            for (port, pair, count, step, wait) in steps {
                now += wait;
                let frame = frame(port, 80);
                match step {
                    0 => steering.set_pairs(count),
                    1 => steering.set_ready([count, pair, 1]),
                    2 => steering.learn(flow_hash(&frame), pair, now),
                    _ => {
                        let (pair, _) = steering.choose(&frame, now);
                        prop_assert!(pair.is_none_or(|pair| steering.ready().contains(&pair)));
                        prop_assert!(rss || pair.is_some() || steering.ready().is_empty());
                    }
                }
            }
        }

        #[test]
        fn flows_that_need_not_move_stay_when_pairs_change(ports in proptest::collection::vec(any::<u16>(), 1..50)) {
            let mut steering = automatic(8);
            for port in &ports {
                steering.learn(flow_hash(&frame(*port, 80)), port % 8, 0);
            }
            for count in [4, 8, 2, 8, 1, 8] {
                steering.set_pairs(count);
                for port in ports.iter().filter(|port| **port % 8 < 2.min(count)) {
                    let pair = steering.choose(&frame(*port, 80), 0).0;
                    prop_assert_eq!(pair, Some(port % 8));
                }
            }
        }
    }

    #[test]
    fn new_flows_stay_near_and_known_ones_where_they_are() {
        let table = Arc::new(FlowTable::default());
        let mut steering = Steering::automatic(table);
        steering.set_pairs(4);
        steering.prefer(|pair| pair % 2 == 1);
        steering.learn(flow_hash(&frame(1, 2)), 2, 0);
        assert_eq!(steering.choose(&reply(1, 2), 1).0, Some(2));
        for port in 10..200 {
            let pair = steering.choose(&frame(port, 80), 1).0.unwrap();
            assert!([1, 3].contains(&pair), "{pair}");
        }
        steering.prefer(|_| false);
        let pairs: std::collections::BTreeSet<_> =
            (1000..1200).filter_map(|port| steering.choose(&frame(port, 80), 1).0).collect();
        assert_eq!(pairs.len(), 4, "none is near: all are");
    }
}
