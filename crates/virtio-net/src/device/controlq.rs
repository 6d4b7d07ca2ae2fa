//! The control queue of an embedded device: commands to settings.
//!
//! Over vhost-user the VMM keeps this queue to itself; programs that embed the device half serve it
//! here and let [`Settings`] filter what they deliver.

use ringferry_memory::{GuestMemory, Translator, Words};
use ringferry_ring::{Chain, Chains, Device, Fault};

use crate::Features;
use crate::control::{Command, ERR, MAX_COMMAND, OK, RxMode};

/// Addresses kept per table; a longer table is answered by receiving the whole kind, as a device may
/// (5.1.6.5.2.1). 64 is what QEMU keeps.
const MAC_TABLE: usize = 64;

/// Commands served per poll: a driver sends one at a time, so more is a flood.
const BURST: usize = 16;

/// One kind of address: a table, or everything.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Filter {
    /// Receive all of this kind.
    pub all: bool,
    /// Receive none of this kind, whatever else says.
    pub none: bool,
    /// Receive these.
    pub table: Vec<[u8; 6]>,
}

impl Filter {
    fn set(&mut self, table: Vec<[u8; 6]>, overflowed: &mut bool) {
        *overflowed = table.len() > MAC_TABLE;
        self.table = if *overflowed { Vec::new() } else { table };
    }
}

/// What a driver has set through the control queue.
#[derive(Clone, Debug)]
pub struct Settings {
    features: Features,
    /// The device's own address.
    pub mac: [u8; 6],
    /// Receive every frame.
    pub promiscuous: bool,
    /// Receive no broadcast.
    pub no_broadcast: bool,
    /// Unicast addresses besides the device's own.
    pub unicast: Filter,
    /// Multicast addresses.
    pub multicast: Filter,
    unicast_overflow: bool,
    multicast_overflow: bool,
    /// Bit per VLAN ID; all VLANs are received while the driver cannot filter (5.1.6.5.3.1).
    vlans: Box<[u64; 64]>,
    /// The guest was asked to announce itself and has not yet answered.
    pub announce: bool,
    /// Queue pairs in use.
    pub pairs: u16,
    max_pairs: u16,
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
    /// The state after reset: everything a driver must have before it says otherwise (5.1.6.5).
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
            max_pairs,
            guest_offloads: features & OFFLOAD_BITS,
        }
    }

    /// Whether a frame to `dst`, tagged with `vlan` if any, is to be delivered.
    pub fn accepts(&self, dst: [u8; 6], vlan: Option<u16>) -> bool {
        // All means all, of any VLAN too; but where the driver cannot choose, its VLANs are what it chose.
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

    /// Applies a command; false when it is not negotiated or out of range, and then nothing changes.
    pub fn apply(&mut self, command: Command) -> bool {
        let needs = match &command {
            Command::Rx(RxMode::Promiscuous | RxMode::AllMulticast, _) | Command::MacTable { .. } => {
                Features::CTRL_RX
            }
            Command::Rx(..) => Features::CTRL_RX_EXTRA,
            Command::MacAddress(_) => Features::CTRL_MAC_ADDR,
            Command::VlanAdd(_) | Command::VlanDel(_) => Features::CTRL_VLAN,
            Command::AnnounceAck => Features::GUEST_ANNOUNCE,
            Command::QueuePairs(_) => Features::MQ,
            Command::GuestOffloads(_) => Features::CTRL_GUEST_OFFLOADS,
        };
        if !self.features.contains(needs) {
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
            Command::QueuePairs(pairs) => self.pairs = pairs,
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
}

/// The device's side of the control queue.
#[derive(Debug)]
pub struct Controlq<A: Words> {
    ring: Device<A>,
    chains: Chains,
}

impl<A: Words> Controlq<A> {
    /// Serves `ring`.
    pub fn new(ring: Device<A>) -> Self {
        Self { ring, chains: Chains::new() }
    }

    /// The ring, for its notifications and its state.
    pub fn ring(&mut self) -> &mut Device<A> {
        &mut self.ring
    }

    /// Serves the commands that are there, up to a bound; true when the driver wants a call.
    pub fn poll(&mut self, memory: &GuestMemory, settings: &mut Settings) -> bool {
        let mut translator = memory.translator();
        self.chains.clear();
        self.ring.take(BURST, &mut translator, &mut self.chains);
        for chain in self.chains.iter() {
            if serve(chain, &self.chains, &mut translator, settings).is_none() {
                self.ring.break_with(Fault::Unusable);
                return false;
            }
            self.ring.complete(chain.done(1));
        }
        self.ring.publish()
    }
}

/// Serves one command and writes its acknowledgement; `None` when the chain has no room for one, or
/// lies outside memory.
fn serve(chain: &Chain, chains: &Chains, memory: &mut Translator<'_>, settings: &mut Settings) -> Option<()> {
    // Found before anything is done: what cannot be answered must change nothing.
    let ack = chains.writable(chain).iter().find(|buffer| buffer.len > 0)?;
    let ack = memory.write(ack.addr, 1)?;
    let mut bytes = Vec::new();
    let fits = chain.readable_len as usize <= MAX_COMMAND;
    if fits {
        for buffer in chains.readable(chain) {
            let mut done = 0;
            while done < buffer.len as usize {
                let piece = memory.read(buffer.addr.checked_add(done as u64)?, buffer.len as usize - done)?;
                let at = bytes.len();
                bytes.resize(at + piece.len(), 0);
                done += piece.copy_to(&mut bytes[at..]);
            }
        }
    }
    let done = fits && Command::decode(&bytes).is_some_and(|command| settings.apply(command));
    ack.copy_from(&[if done { OK } else { ERR }]);
    Some(())
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
}
