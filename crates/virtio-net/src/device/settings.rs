//! [`Settings`]: the state that a driver sets through the control queue, and the checks of its
//! range (VIRTIO 1.4, 5.1.6.5).
//!
//! A device creates its settings when features are negotiated, passes them to
//! [`Controlq::poll`](super::Controlq::poll), which applies commands, and derives [`Steering`],
//! coalescing limits and filters from them after each change. They belong to one thread, and reset
//! replaces them by new ones.

use std::sync::Arc;

use ringferry_packet::flow::{HashTypes, RssHasher};

use super::flows::FlowTable;
use super::steering::{Indirection, Steering};
use crate::Features;
use crate::config::{HashLimits, MAX_PAIRS};
use crate::control::{Coalesce, Command, Rss, RxMode};
use crate::queue_index;

/// Most addresses kept per table, as in QEMU. A longer table is answered by receiving the whole
/// kind, as a device may (5.1.6.5.2.1).
const MAC_TABLE: usize = 64;

/// The filter of one kind of address, unicast or multicast.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Filter {
    /// Frames to every address of this kind are received.
    pub all: bool,
    /// No frame to an address of this kind is received, whatever the other fields say.
    pub none: bool,
    /// Frames to these addresses are received.
    pub table: Vec<[u8; 6]>,
}

impl Filter {
    fn set(&mut self, table: Vec<[u8; 6]>, overflowed: &mut bool) {
        *overflowed = table.len() > MAC_TABLE;
        self.table = if *overflowed { Vec::new() } else { table };
    }
}

/// The state that a driver sets through the control queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    features: Features,
    /// The device's own unicast address.
    pub mac: [u8; 6],
    /// True if every frame is received.
    pub promiscuous: bool,
    /// True if no broadcast frame is received.
    pub no_broadcast: bool,
    /// Filter of unicast addresses, beside the device's own.
    pub unicast: Filter,
    /// Filter of multicast addresses, broadcast excepted.
    pub multicast: Filter,
    unicast_overflow: bool,
    multicast_overflow: bool,
    /// One bit per VLAN ID; all VLANs are received if the driver cannot filter (5.1.6.5.3.1).
    vlans: Box<[u64; 64]>,
    /// True from the request to the guest to announce itself until it acknowledges.
    pub announce: bool,
    /// Number of queue pairs in use; [`Settings::steering`] selects among them.
    pub pairs: u16,
    max_pairs: u16,
    hash_limits: HashLimits,
    hasher: Option<Arc<RssHasher>>,
    /// The driver's indirection table; without one, steering is automatic.
    table: Option<Arc<Indirection>>,
    /// Coalescing limits of receiveqs and transmitqs, which a queue starts with.
    coalesce_all: [Coalesce; 2],
    /// Coalescing limits of each queue in use, by its index.
    coalesce: Vec<Coalesce>,
    /// True while the device is being reset, and commands are refused.
    resetting: bool,
    /// Receive offloads in use, a subset of the negotiated ones.
    pub guest_offloads: Features,
}

/// The feature bits that VIRTIO_NET_CTRL_GUEST_OFFLOADS_SET may carry (5.1.6.5.9).
const OFFLOAD_BITS: Features = Features::GUEST_CSUM
    .union(Features::GUEST_TSO4)
    .union(Features::GUEST_TSO6)
    .union(Features::GUEST_ECN)
    .union(Features::GUEST_UFO)
    .union(Features::GUEST_USO4)
    .union(Features::GUEST_USO6);

impl Settings {
    /// Creates the state after reset, in which a driver finds every setting before its first
    /// command (5.1.6.5).
    pub fn new(features: Features, mac: [u8; 6], max_pairs: u16) -> Self {
        let filtered = features.contains(Features::CTRL_VLAN);
        Self {
            features,
            mac,
            promiscuous: !features.contains(Features::CTRL_RX),
            no_broadcast: false,
            unicast: Filter::default(),
            multicast: Filter::default(),
            unicast_overflow: false,
            multicast_overflow: false,
            vlans: Box::new([if filtered { 0 } else { u64::MAX }; 64]),
            announce: false,
            pairs: 1,
            max_pairs: max_pairs.clamp(1, MAX_PAIRS),
            hash_limits: HashLimits::DEVICE,
            hasher: None,
            table: None,
            coalesce_all: [Coalesce::default(); 2],
            coalesce: vec![Coalesce::default(); 2],
            resetting: false,
            guest_offloads: features & OFFLOAD_BITS,
        }
    }

    /// Returns true if a frame to `dst`, tagged with `vlan` if any, is to be delivered.
    pub fn accepts(&self, dst: [u8; 6], vlan: Option<u16>) -> bool {
        // Promiscuous mode that the driver chose includes every VLAN; without CTRL_RX the driver
        // cannot choose the mode, and its VLAN filter applies.
        if self.promiscuous && self.features.contains(Features::CTRL_RX) {
            return true;
        }
        if vlan.is_some_and(|id| self.vlans[usize::from(id & 0xfff) / 64] >> (id % 64) & 1 == 0) {
            return false;
        }
        if self.promiscuous {
            return true;
        }
        if dst == [0xff; 6] {
            return !self.no_broadcast;
        }
        let (filter, overflow) = if dst[0] & 1 != 0 {
            (&self.multicast, self.multicast_overflow)
        } else {
            (&self.unicast, self.unicast_overflow)
        };
        let own = dst == self.mac;
        !filter.none && (own || filter.all || overflow || filter.table.contains(&dst))
    }

    /// Replaces the device's hash limits, which are [`HashLimits::DEVICE`] otherwise.
    #[must_use]
    pub fn with_hash_limits(self, hash_limits: HashLimits) -> Self {
        Self { hash_limits, ..self }
    }

    /// Refuses every command from now on, because the device is being reset (2.4). New settings
    /// hold the state after reset.
    pub fn begin_reset(&mut self) {
        self.resetting = true;
    }

    /// Creates the receive steering over the pairs in use; automatic steering remembers flows in
    /// `flows`.
    #[must_use]
    pub fn steering(&self, flows: Arc<FlowTable>) -> Steering {
        let mut steering = Steering::automatic(flows);
        steering.set_pairs(self.pairs);
        let reports = self.features.contains(Features::HASH_REPORT);
        if let Some(hasher) = &self.hasher
            && (reports || self.table.is_some())
            && !hasher.types().is_empty()
        {
            steering = steering.with_hasher(Arc::clone(hasher));
        }
        match &self.table {
            Some(table) => steering.with_table(Arc::clone(table)),
            None => steering,
        }
    }

    /// Returns the coalescing limits of a queue, by its index. A queue that is not in use has the
    /// limits that it will start with.
    #[must_use]
    pub fn coalesce(&self, queue: u16) -> Coalesce {
        let all = self.coalesce_all[usize::from(queue_index::is_transmitq(queue))];
        self.coalesce.get(usize::from(queue)).copied().unwrap_or(all)
    }

    /// Returns the result of a command that has one, if the driver may send it.
    pub(super) fn query(&self, command: &Command) -> Option<Coalesce> {
        match command {
            Command::QueryQueue(queue) if self.permits(command) => {
                self.coalesce.get(usize::from(*queue)).copied()
            }
            _ => None,
        }
    }

    /// Returns true if the command's feature was negotiated and the device is not being reset.
    fn permits(&self, command: &Command) -> bool {
        let needs = match command {
            Command::Rx(RxMode::Promiscuous | RxMode::AllMulticast, _) | Command::MacTable { .. } => {
                Features::CTRL_RX
            }
            Command::Rx(..) => Features::CTRL_RX_EXTRA,
            Command::MacAddress(_) => Features::CTRL_MAC_ADDR,
            Command::VlanAdd(_) | Command::VlanDel(_) => Features::CTRL_VLAN,
            Command::AnnounceAck => Features::GUEST_ANNOUNCE,
            Command::QueuePairs(_) => Features::MQ,
            Command::Rss(_) => Features::RSS,
            Command::Hash { .. } => Features::HASH_REPORT,
            Command::GuestOffloads(_) => Features::CTRL_GUEST_OFFLOADS,
            Command::CoalesceTransmit(_) | Command::CoalesceReceive(_) => Features::NOTF_COAL,
            Command::CoalesceQueue(..) | Command::QueryQueue(_) => Features::VQ_NOTF_COAL,
        };
        !self.resetting && self.features.contains(needs)
    }

    /// Sets the number of pairs in use. A queue that was not in use starts with the limits of all
    /// queues of its kind (5.1.6.5.10.6).
    fn set_pairs(&mut self, pairs: u16) {
        self.pairs = pairs;
        self.coalesce.truncate(queue_index::count(pairs));
        while self.coalesce.len() < queue_index::count(pairs) {
            self.coalesce.extend(self.coalesce_all);
        }
    }

    /// Creates the hasher that a driver asks for, if the device supports it.
    fn hasher(&self, types: u32, key: &[u8]) -> Option<Arc<RssHasher>> {
        let types = HashTypes::from_bits_retain(types);
        let HashLimits { max_key, types: supported, .. } = self.hash_limits;
        // An empty key makes every hash 0, so it is accepted only if nothing is hashed.
        let good = supported.contains(types)
            && key.len() <= usize::from(max_key)
            && (types.is_empty() || !key.is_empty());
        good.then(|| Arc::new(RssHasher::new(types, key)))
    }

    /// Applies VIRTIO_NET_CTRL_MQ_RSS_CONFIG; returns false, and changes nothing, if it is out of
    /// range.
    fn set_rss(&mut self, rss: &Rss) -> bool {
        let Rss { types, unclassified, table, max_tx, key } = rss;
        if table.len() > usize::from(self.hash_limits.max_table) || !(1..=self.max_pairs).contains(max_tx) {
            return false;
        }
        let (Some(hasher), Some(indirection)) =
            (self.hasher(*types, key), Indirection::new(table, *unclassified, self.max_pairs))
        else {
            return false;
        };
        (self.hasher, self.table) = (Some(hasher), Some(Arc::new(indirection)));
        // Receiveqs named by the table are in use, and transmitqs up to max_tx: a pair is in use if
        // either queue is.
        let receive = table.iter().chain([unclassified]).max().map_or(1, |last| last + 1);
        self.set_pairs(receive.max(*max_tx));
        true
    }

    /// Applies a command. Returns false, and changes nothing, if it was not negotiated or is out of
    /// range.
    pub fn apply(&mut self, command: Command) -> bool {
        if !self.permits(&command) {
            return false;
        }
        match command {
            Command::Rx(mode, on) => {
                *match mode {
                    RxMode::Promiscuous => &mut self.promiscuous,
                    RxMode::AllMulticast => &mut self.multicast.all,
                    RxMode::AllUnicast => &mut self.unicast.all,
                    RxMode::NoMulticast => &mut self.multicast.none,
                    RxMode::NoUnicast => &mut self.unicast.none,
                    RxMode::NoBroadcast => &mut self.no_broadcast,
                } = on;
            }
            Command::MacTable { unicast, multicast } => {
                self.unicast.set(unicast, &mut self.unicast_overflow);
                self.multicast.set(multicast, &mut self.multicast_overflow);
            }
            Command::MacAddress(mac) => {
                if mac[0] & 1 != 0 {
                    return false;
                }
                self.mac = mac;
            }
            Command::VlanAdd(id) | Command::VlanDel(id) if id > 4095 => return false,
            Command::VlanAdd(id) => self.vlans[usize::from(id) / 64] |= 1 << (id % 64),
            Command::VlanDel(id) => self.vlans[usize::from(id) / 64] &= !(1 << (id % 64)),
            Command::AnnounceAck => self.announce = false,
            // 5.1.6.5.6.1: 0 or more than the maximum is an error and changes nothing.
            Command::QueuePairs(pairs) if pairs == 0 || pairs > self.max_pairs => return false,
            Command::QueuePairs(pairs) => {
                // The last command decides (5.1.6.5.5), so steering is automatic again. The hash
                // that is reported stays.
                self.table = None;
                self.set_pairs(pairs);
            }
            Command::Rss(rss) => return self.set_rss(&rss),
            Command::Hash { types, key } => {
                let Some(hasher) = self.hasher(types, &key) else { return false };
                (self.hasher, self.table) = (Some(hasher), None);
            }
            Command::CoalesceTransmit(coalesce) => self.coalesce_kind(1, coalesce),
            Command::CoalesceReceive(coalesce) => self.coalesce_kind(0, coalesce),
            // A queue that is not in use is an error (5.1.6.5.10.6).
            Command::CoalesceQueue(queue, coalesce) => match self.coalesce.get_mut(usize::from(queue)) {
                Some(own) => *own = coalesce,
                None => return false,
            },
            Command::QueryQueue(queue) => return usize::from(queue) < self.coalesce.len(),
            Command::GuestOffloads(bits) => {
                let wanted = Features::from_bits_retain(bits);
                if !(self.features & OFFLOAD_BITS).contains(wanted) {
                    return false;
                }
                self.guest_offloads = wanted;
            }
        }
        true
    }

    /// Sets the limits of all receiveqs (0) or transmitqs (1), and replaces those of single queues.
    fn coalesce_kind(&mut self, kind: usize, coalesce: Coalesce) {
        self.coalesce_all[kind] = coalesce;
        self.coalesce.iter_mut().skip(kind).step_by(2).for_each(|own| *own = coalesce);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Features = Features::all();

    #[test]
    fn clause_5_1_6_5_6_queue_pairs_out_of_range_change_nothing() {
        let mut settings = Settings::new(ALL, [2; 6], 4);
        assert!(settings.apply(Command::QueuePairs(4)));
        assert!(!settings.apply(Command::QueuePairs(0)));
        assert!(!settings.apply(Command::QueuePairs(5)));
        assert_eq!(settings.pairs, 4);
    }

    #[test]
    fn commands_that_were_not_negotiated_are_refused() {
        let mut settings = Settings::new(Features::CTRL_VQ, [2; 6], 1);
        assert!(!settings.apply(Command::Rx(RxMode::Promiscuous, false)));
        assert!(!settings.apply(Command::AnnounceAck));
        assert!(settings.promiscuous, "a driver that cannot filter receives everything");
    }

    #[test]
    fn clause_5_1_6_5_1_receive_filters() {
        let own = [2, 0, 0, 0, 0, 1];
        let (group, other) = ([1, 0, 0x5e, 0, 0, 1], [2, 0, 0, 0, 0, 9]);
        let mut settings = Settings::new(ALL, own, 1);
        assert!(settings.accepts(own, None) && settings.accepts([0xff; 6], None));
        assert!(!settings.accepts(other, None) && !settings.accepts(group, None));
        assert!(settings.apply(Command::MacTable { unicast: vec![other], multicast: vec![group] }));
        assert!(settings.accepts(other, None) && settings.accepts(group, None));
        assert!(settings.apply(Command::Rx(RxMode::NoMulticast, true)));
        assert!(!settings.accepts(group, None));
        assert!(settings.apply(Command::Rx(RxMode::NoBroadcast, true)));
        assert!(!settings.accepts([0xff; 6], None));
        assert!(settings.apply(Command::Rx(RxMode::Promiscuous, true)));
        assert!(settings.accepts(group, None));
    }

    #[test]
    fn clause_5_1_6_5_2_an_overlong_table_receives_the_whole_kind() {
        let mut settings = Settings::new(ALL, [2; 6], 1);
        let many = vec![[3, 0, 0, 0, 0, 0]; MAC_TABLE + 1];
        assert!(settings.apply(Command::MacTable { unicast: vec![], multicast: many }));
        assert!(settings.accepts([1, 2, 3, 4, 5, 6], None));
        assert!(!settings.accepts([4, 2, 3, 4, 5, 6], None));
        assert!(settings.apply(Command::MacTable { unicast: vec![], multicast: vec![] }));
        assert!(!settings.accepts([1, 2, 3, 4, 5, 6], None));
    }

    #[test]
    fn clause_5_1_6_5_3_vlan_filter() {
        let mut settings = Settings::new(ALL, [2; 6], 1);
        assert!(!settings.accepts([2; 6], Some(100)));
        assert!(settings.apply(Command::VlanAdd(100)));
        assert!(settings.accepts([2; 6], Some(100)));
        assert!(settings.apply(Command::VlanDel(100)));
        assert!(!settings.accepts([2; 6], Some(100)));
        assert!(!settings.apply(Command::VlanAdd(4096)));
        assert!(settings.apply(Command::Rx(RxMode::Promiscuous, true)));
        assert!(settings.accepts([2; 6], Some(101)), "promiscuous");
        assert!(Settings::new(Features::empty(), [2; 6], 1).accepts([2; 6], Some(100)));
        let unfiltered = Settings::new(Features::CTRL_VLAN, [2; 6], 1);
        assert!(unfiltered.accepts([3; 6], None) && !unfiltered.accepts([2; 6], Some(100)), "no CTRL_RX");
    }

    #[test]
    fn clause_5_1_6_5_9_offloads_that_were_not_negotiated_are_refused() {
        let mut settings = Settings::new(Features::CTRL_GUEST_OFFLOADS | Features::GUEST_CSUM, [2; 6], 1);
        assert!(settings.apply(Command::GuestOffloads(0)));
        assert!(!settings.apply(Command::GuestOffloads(Features::GUEST_TSO4.bits())));
        assert_eq!(settings.guest_offloads, Features::empty());
    }

    fn rss(table: &[u16], unclassified: u16, max_tx: u16) -> Rss {
        Rss { types: HashTypes::SHORT.bits(), unclassified, table: table.to_vec(), max_tx, key: vec![7; 40] }
    }

    /// Summarises the steering that follows from the settings: whether it is RSS, and over which
    /// pairs.
    fn steering(settings: &Settings) -> (bool, Vec<u16>) {
        let steering = settings.steering(Arc::default());
        (steering.is_rss(), steering.ready().to_vec())
    }

    #[test]
    fn clause_5_1_6_5_7_rss_out_of_range_changes_nothing() {
        let mut settings = Settings::new(ALL, [2; 6], 4);
        assert!(settings.apply(Command::Rss(rss(&[0, 2], 2, 1))));
        assert_eq!(steering(&settings), (true, vec![0, 1, 2]));
        let before = format!("{settings:?}");
        let good = || rss(&[3, 2, 1, 0], 0, 4);
        let bad = [
            rss(&[3, 2, 1, 4], 0, 4),
            rss(&[3, 2, 1, 0x8000], 0, 4),
            rss(&[3, 2, 1, 0], 4, 4),
            rss(&[3, 2, 1, 0], 0, 0),
            rss(&[3, 2, 1, 0], 0, 5),
            rss(&[3, 2, 1], 0, 4),
            rss(&[0; 256], 0, 4),
            Rss { key: vec![7; 41], ..good() },
            Rss { key: vec![], ..good() },
            Rss { types: HashTypes::IP_EX.bits(), ..good() },
            Rss { types: 1 << 31, ..good() },
        ];
        for rss in bad {
            assert!(!settings.apply(Command::Rss(rss.clone())), "{rss:?}");
            assert_eq!(format!("{settings:?}"), before, "{rss:?}");
        }
        let bad_hashes = [(1 << 9, 40), (HashTypes::SHORT.bits(), 0), (1, 41), (u32::MAX, 40)];
        for (types, key) in bad_hashes {
            assert!(!settings.apply(Command::Hash { types, key: vec![1; key] }));
            assert_eq!(format!("{settings:?}"), before);
        }
        assert!(settings.apply(Command::Rss(good())));
        assert!(settings.apply(Command::Rss(Rss { types: 0, key: vec![], ..good() })), "nothing is hashed");
    }

    #[test]
    fn clause_5_1_6_5_5_the_last_command_decides_how_frames_are_steered() {
        let mut settings = Settings::new(ALL, [2; 6], 4);
        assert_eq!(steering(&settings), (false, vec![0]));
        assert!(settings.apply(Command::Rss(rss(&[0, 1], 0, 2))));
        assert_eq!(steering(&settings), (true, vec![0, 1]));
        assert!(settings.apply(Command::QueuePairs(3)));
        assert_eq!(steering(&settings), (false, vec![0, 1, 2]));
        assert!(settings.apply(Command::Rss(rss(&[0, 1], 0, 4))));
        assert_eq!((settings.pairs, steering(&settings).0), (4, true), "max_tx counts, too");
        assert!(settings.apply(Command::Hash { types: 1, key: vec![1; 40] }));
        assert_eq!(steering(&settings), (false, vec![0, 1, 2, 3]));
    }

    #[test]
    fn clause_5_1_6_5_10_the_example_of_the_specification() {
        let mut settings = Settings::new(ALL, [2; 6], 2);
        assert!(settings.apply(Command::QueuePairs(2)));
        let of = |settings: &Settings| [0, 1, 2, 3].map(|queue| settings.coalesce(queue).max_packets);
        let limits = |max_packets| Coalesce { max_packets, max_usecs: 10 };
        assert_eq!(of(&settings), [0; 4], "off after reset");
        let steps = [
            (Command::CoalesceReceive(limits(1)), [1, 0, 1, 0]),
            (Command::CoalesceQueue(0, limits(2)), [2, 0, 1, 0]),
            (Command::CoalesceQueue(1, limits(3)), [2, 3, 1, 0]),
            (Command::CoalesceTransmit(limits(4)), [2, 4, 1, 4]),
        ];
        for (command, expected) in steps {
            assert!(settings.apply(command));
            assert_eq!(of(&settings), expected);
        }
        // A queue that was disabled and enabled again has the limits of all queues (5.1.6.5.10.6).
        assert!(settings.apply(Command::CoalesceQueue(2, limits(9))));
        assert!(settings.apply(Command::QueuePairs(1)));
        assert!(!settings.apply(Command::CoalesceQueue(2, limits(9))), "not in use");
        assert!(!settings.apply(Command::QueryQueue(2)));
        assert!(settings.apply(Command::QueuePairs(2)));
        assert_eq!(of(&settings), [2, 4, 1, 4]);
        assert!(!settings.apply(Command::CoalesceQueue(4, limits(9))), "the control queue");
        assert_eq!(settings.query(&Command::QueryQueue(3)), Some(limits(4)));
        assert_eq!(settings.query(&Command::QueryQueue(4)), None);
    }

    #[test]
    fn commands_during_reset_are_refused_and_change_nothing() {
        let mut settings = Settings::new(ALL, [2; 6], 4);
        settings.apply(Command::QueuePairs(2));
        settings.begin_reset();
        let before = format!("{settings:?}");
        let commands = [
            Command::QueuePairs(1),
            Command::Rss(rss(&[0, 1], 0, 2)),
            Command::Hash { types: 0, key: vec![] },
            Command::CoalesceTransmit(Coalesce::default()),
            Command::QueryQueue(0),
            Command::MacAddress([4; 6]),
        ];
        for command in commands {
            assert_eq!(settings.query(&command), None);
            assert!(!settings.apply(command));
        }
        assert_eq!(format!("{settings:?}"), before);
    }
}
