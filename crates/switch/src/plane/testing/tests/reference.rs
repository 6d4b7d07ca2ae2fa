//! A reference switch: what the standards and the rules say becomes of a frame, one frame at a time, in plain collections. It shares no code
//! with the engine but the types of the rules.

use std::collections::BTreeMap;

use crate::counters::DropReason;
use crate::rules::{MAX_VID, Rules, Vid, Vlans};

pub(super) type Mac = [u8; 6];

/// A frame of the tests: addresses, at most two tags, and a payload that begins with an EtherType.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Frame {
    pub(super) destination: Mac,
    pub(super) source: Mac,
    pub(super) tags: Vec<u16>,
    pub(super) payload: Vec<u8>,
}

impl Frame {
    pub(super) fn bytes(&self) -> Vec<u8> {
        let mut bytes = [self.destination, self.source].concat();
        for tci in &self.tags {
            bytes.extend([0x81, 0x00]);
            bytes.extend(tci.to_be_bytes());
        }
        bytes.extend(&self.payload);
        bytes
    }
}

/// What the switch did with a frame.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Outcome {
    /// By port, what left it.
    pub(super) delivered: BTreeMap<usize, Vec<u8>>,
    /// Where it was dropped, and why.
    pub(super) dropped: Vec<(usize, DropReason)>,
}

/// An address that was learned: the port, and when it was last seen. Static ones are in the rules.
type Learned = BTreeMap<(Vid, Mac), (usize, u32)>;

pub(super) struct Reference {
    pub(super) ports: Vec<Option<Rules>>,
    learned: Learned,
    max_age: u32,
}

fn number(mac: Mac) -> u64 {
    mac.iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

fn is_group(mac: Mac) -> bool {
    mac[0] & 1 != 0
}

/// Whether frames of `vid` leave a port with a tag; `None` if not at all (IEEE 802.1Q, 8.6.1 and 8.8.2).
fn egress(vlans: &Vlans, vid: Vid) -> Option<bool> {
    let (allowed, native) = match vlans {
        Vlans::Access(vid) => (Some(&[][..]), Some(*vid)),
        Vlans::Trunk { allowed, native } => (allowed.as_deref(), *native),
    };
    if native == Some(vid) {
        return Some(false);
    }
    let allows = (1..=MAX_VID).contains(&vid) && allowed.is_none_or(|allowed| allowed.contains(&vid));
    allows.then_some(true)
}

/// The VLAN of a frame with these tags, at a port.
fn ingress(vlans: &Vlans, tags: &[u16]) -> Option<Vid> {
    let native = match vlans {
        Vlans::Access(vid) => Some(*vid),
        Vlans::Trunk { native, .. } => *native,
    };
    match tags.first().map(|tci| tci & 0xfff) {
        None | Some(0) => native,
        vid if vid == native && tags.len() > 1 && *vlans != Vlans::default() => None,
        Some(vid) => egress(vlans, vid).map(|_| vid),
    }
}

impl Reference {
    pub(super) fn new(ports: Vec<Rules>, max_age: u32) -> Self {
        Self { ports: ports.into_iter().map(Some).collect(), learned: BTreeMap::new(), max_age }
    }

    pub(super) fn remove(&mut self, port: usize) {
        self.ports[port] = None;
        self.learned.retain(|_, (behind, _)| *behind != port);
    }

    fn rules(&self, port: usize) -> &Rules {
        self.ports[port].as_ref().expect("the port is plugged in")
    }

    /// The port that an address is fixed to. Whoever names it last has it.
    fn fixed(&self, vid: Vid, mac: Mac) -> Option<usize> {
        let names =
            |rules: &Rules| rules.static_macs.iter().any(|(own, in_vid)| own.0 == mac && *in_vid == vid);
        self.ports.iter().rposition(|rules| rules.as_ref().is_some_and(names))
    }

    /// Learns a source address; false if the port may not have it.
    fn learn(&mut self, port: usize, vid: Vid, mac: Mac, now: u32) -> bool {
        if is_group(mac) || mac == [0; 6] {
            return true;
        }
        if let Some(fixed) = self.fixed(vid, mac) {
            return fixed == port;
        }
        let (max_age, most) = (self.max_age, self.rules(port).max_macs);
        if !matches!(self.learned.get(&(vid, mac)), Some((behind, _)) if *behind == port)
            && let Some(most) = most
        {
            // Silent addresses give way.
            self.learned.retain(|_, (behind, seen)| *behind != port || now - *seen <= max_age);
            if self.learned.values().filter(|(behind, _)| *behind == port).count() >= most as usize {
                return false;
            }
        }
        self.learned.insert((vid, mac), (port, now));
        true
    }

    pub(super) fn forward(&mut self, from: usize, frame: &Frame, now: u32) -> Outcome {
        let mut outcome = Outcome::default();
        let sender = self.rules(from).clone();
        let Some(vid) = ingress(&sender.vlans, &frame.tags) else {
            outcome.dropped.push((from, DropReason::Vlan));
            return outcome;
        };
        if let Some(guard) = &sender.guard
            && !guard.macs.iter().any(|own| own.0 == frame.source)
        {
            outcome.dropped.push((from, DropReason::Spoofed));
            return outcome;
        }
        if !sender.forward_reserved && (is_group(frame.source) || frame.source == [0; 6]) {
            outcome.dropped.push((from, DropReason::Reserved));
            return outcome;
        }
        if !self.learn(from, vid, frame.source, now) {
            outcome.dropped.push((from, DropReason::MacLimit));
            return outcome;
        }
        // IEEE 802.1Q, table 8-1.
        if !sender.forward_reserved
            && (0x0180_c200_0000..=0x0180_c200_000f).contains(&number(frame.destination))
        {
            outcome.dropped.push((from, DropReason::Reserved));
            return outcome;
        }
        let known = self.fixed(vid, frame.destination).or_else(|| {
            let found = self.learned.get(&(vid, frame.destination));
            found.filter(|(_, seen)| now - seen <= self.max_age).map(|(port, _)| *port)
        });
        let mut known = known.filter(|_| !is_group(frame.destination));
        if let Some(name) = &sender.quarantine {
            let is_it = |to: &usize| *to != from && self.ports[*to].is_some() && *name == format!("heap{to}");
            known = (0..self.ports.len()).find(is_it);
            if known.is_none() {
                outcome.dropped.push((from, DropReason::Quarantine));
                return outcome;
            }
        }
        if known == Some(from) {
            outcome.dropped.push((from, DropReason::SamePort));
            return outcome;
        }
        for to in 0..self.ports.len() {
            if to == from || known.is_some_and(|port| port != to) {
                continue;
            }
            let Some(receiver) = &self.ports[to] else { continue };
            let is_cut_off = |name: &String| *name != format!("heap{from}");
            let refused = if receiver.quarantine.as_ref().is_some_and(is_cut_off) {
                Err(DropReason::Quarantine)
            } else if sender.isolated && receiver.isolated {
                Err(DropReason::Isolated)
            } else {
                egress(&receiver.vlans, vid).ok_or(DropReason::Vlan)
            };
            match refused {
                Err(reason) if known.is_some() => outcome.dropped.push((to, reason)),
                // It is flooded where it may be, and nowhere else.
                Err(_) => {}
                Ok(tagged) => match retag(frame, vid, tagged, &receiver.vlans) {
                    Some(frame) => {
                        outcome.delivered.insert(to, frame.bytes());
                    }
                    None => outcome.dropped.push((to, DropReason::Vlan)),
                },
            }
        }
        if known.is_none() && outcome.delivered.is_empty() && outcome.dropped.is_empty() {
            outcome.dropped.push((from, DropReason::NoDestination));
        }
        outcome
    }
}

/// The frame as it leaves by a port; `None` if a second tag would come to light. A tag for the priority alone passes only a port without VLAN rules.
fn retag(frame: &Frame, vid: Vid, tagged: bool, vlans: &Vlans) -> Option<Frame> {
    let mut frame = frame.clone();
    let first = frame.tags.first().copied();
    match (tagged, first) {
        (false, Some(tci)) if tci & 0xfff != 0 || *vlans != Vlans::default() => {
            frame.tags.remove(0);
            if !frame.tags.is_empty() {
                return None;
            }
        }
        (true, None) => frame.tags.insert(0, vid),
        (true, Some(tci)) => frame.tags[0] = tci & 0xf000 | vid,
        (false, _) => {}
    }
    Some(frame)
}
