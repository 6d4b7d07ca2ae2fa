//! `ringferry ctl trace SRC DST`: walks an imaginary frame through the switch and says of each step what it would do.
//!
//! The control plane makes the frame ([`frame`]) and the words; what would become of it the workers say, by the code that decides on real frames
//! ([`plane::forward::walk`](crate::plane)). Addresses that nobody has named are those that the ports are known by.

mod frame;

use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ringferry_control::DropReason;
use ringferry_control::snapshot::{FdbEntry, Negotiated, PortSnapshot, PortState, Snapshot};
use ringferry_control::trace::{
    Trace, TraceDelivery, TraceDrop, TraceProtocol, TraceRequest, TraceStep, TraceVerdict, TracedFrame,
};
use ringferry_packet::ether::Mac;
use ringferry_packet::frame::PREFIX;
use ringferry_packet::vnet::{Header, Offloads, VALIDATED_HEAD};
use ringferry_virtio_net::queue_index;

use crate::explain::{Abilities, in_words};
use crate::fdb::{Learned, PortId};
use crate::impairments::{Loss, Share, WireEnd};
use crate::plane::capture::CaptureId;
use crate::plane::walk::{Entry, Exit, Imaginary, Owner, Software, Target, Walk};
use crate::plane::{Delivery, Late, Membership, Retag, tag};
use crate::rules::{Guard, MAX_VID, Network, Rules, Vid, Vlans};
use crate::snapshot::wire_settings;
use frame::Spec;

/// Receivers of a flood of which each step is said. Of the others only what keeps the frame from them is.
const FEW: usize = 8;

/// The state of the switch that a walk is told by, and the workers that it asks.
pub(crate) struct Known<'s> {
    /// Its state, with addresses.
    pub(crate) snapshot: &'s Snapshot,
    /// The rules of each port.
    pub(crate) rules: &'s dyn Fn(&str) -> Rules,
    /// The number of each port.
    pub(crate) id: &'s dyn Fn(&str) -> Option<PortId>,
    /// The name of each capture and mirror.
    pub(crate) capture: &'s dyn Fn(CaptureId) -> String,
    /// Asks the workers.
    pub(crate) walk: &'s dyn Fn(Imaginary) -> Result<Option<Walk>, Late>,
}

impl Known<'_> {
    fn port(&self, id: PortId) -> Option<&PortSnapshot> {
        self.snapshot.ports.iter().find(|port| (self.id)(&port.name) == Some(id))
    }

    fn name(&self, id: PortId) -> String {
        self.port(id).map_or_else(|| format!("port {}", id.0), |port| port.name.clone())
    }

    /// Returns an address behind a port: one that is known there, best in this VLAN; else one that its rules name, or its own.
    fn address_of(&self, port: &PortSnapshot, vid: Option<Vid>) -> Option<Mac> {
        let behind = self.snapshot.fdb.entries.iter().filter(|entry| entry.port == port.name);
        let rank = |entry: &&FdbEntry| (Some(entry.vlan) != vid, !entry.fixed, entry.age_seconds, entry.mac);
        // What another port has taken from it is what is for it, too.
        let lost = || self.snapshot.fdb.lost.iter().find(|lost| lost.from == port.name).map(|lost| lost.mac);
        let known = behind.min_by_key(rank).map(|entry| entry.mac).or_else(lost);
        let rules = (self.rules)(&port.name);
        let allowed = || rules.guard.as_ref().and_then(|guard| guard.macs.first().copied());
        known.or_else(allowed).or(port.mac)
    }
}

/// Traces a frame.
///
/// # Errors
/// There is no such port or frame, or a worker does not answer; for people.
pub(crate) fn trace(known: &Known<'_>, request: &TraceRequest) -> Result<Trace, String> {
    let from = crate::channels::find(known.snapshot, &request.from)?;
    let id = (known.id)(&from.name)
        .ok_or_else(|| format!("{:?} has no queues yet: no Xen guest is connected", from.name))?;
    if let Some(vlan) = request.vlan.filter(|vlan| *vlan > MAX_VID) {
        return Err(format!("{vlan} is no VLAN: 0 (a tag for its priority alone) to {MAX_VID}"));
    }
    let (spec, to) = frame_of(known, from, request)?;
    let (header, bytes) = spec.build()?;
    let imaginary = Imaginary { from: id, queue: request.queue, header, bytes };
    let mut said = Words { known, steps: Vec::new(), delivered: Vec::new(), dropped: Vec::new() };
    said.state_of_sender(from, &spec, to);
    let traced = TracedFrame {
        from: from.name.clone(),
        queue: request.queue,
        source: spec.source.to_string(),
        destination: spec.destination.to_string(),
        vlan: request.vlan,
        protocol: request.protocol,
        size: imaginary.bytes.len() as u32,
        gso: request.gso,
        csum: request.csum || request.gso.is_some(),
    };
    let refused = said.header(from, &imaginary);
    if !refused {
        let walked = (known.walk)(imaginary).map_err(|error| format!("{error}: ask again"))?;
        let Walk { worker, entry, exits } =
            walked.ok_or_else(|| format!("the workers do not know {:?}: ask again", from.name))?;
        said.entry(from, worker, &entry);
        said.exits(worker, &entry, exits);
        said.end(from, &entry);
        said.lost(to, &spec);
    }
    let Words { steps, delivered, dropped, .. } = said;
    let missed = to.filter(|to| is_missed(to, from, &delivered, &dropped)).map(|port| &*port.name);
    let verdict = verdict(&delivered, &dropped, missed);
    let remedy = remedy(known, (from, to), &dropped, missed);
    Ok(Trace { frame: traced, steps, delivered, dropped, verdict, remedy })
}

/// Returns what a frame is made of, and the port that it is meant for, if one was named.
fn frame_of<'k>(
    known: &Known<'k>,
    from: &PortSnapshot,
    request: &TraceRequest,
) -> Result<(Spec, Option<&'k PortSnapshot>), String> {
    let address = |text: &str| text.parse::<Mac>().map_err(|error| error.to_string());
    let to = known.snapshot.ports.iter().find(|port| port.name == request.to);
    let rules = (known.rules)(&from.name);
    // Where the frame will be, if it is admitted.
    let vid = match request.vlan {
        None | Some(0) => rules.vlans.untagged(),
        tagged => tagged,
    };
    let source = match &request.source {
        Some(text) => address(text)?,
        None => known.address_of(from, vid).unwrap_or(MADE_UP[0]),
    };
    let destination = match to {
        Some(port) => known.address_of(port, vid).unwrap_or(MADE_UP[1]),
        None if request.to == "broadcast" => Mac::BROADCAST,
        None if request.to.parse::<IpAddr>().is_ok() => {
            return Err(format!(
                "{} is an IP address, and a switch knows MAC addresses: name the port, or the MAC address, and give the IP address as --to-ip",
                request.to
            ));
        }
        None if request.to.contains(':') => address(&request.to)?,
        None => {
            let names: Vec<_> = known.snapshot.ports.iter().map(|port| port.name.as_str()).collect();
            return Err(format!(
                "{:?} is neither a port, nor an address, nor broadcast; the ports are: {}",
                request.to,
                names.join(", ")
            ));
        }
    };
    let theirs = to.map(|port| (known.rules)(&port.name)).unwrap_or_default();
    let mut v4 = [(&rules, 1), (&theirs, 2)].map(|(rules, host)| address_v4(rules.guard.as_ref(), host));
    let mut v6 = [(&rules, 1), (&theirs, 2)].map(|(rules, host)| address_v6(rules.guard.as_ref(), host));
    for (side, asked) in [request.source_ip, request.destination_ip].into_iter().enumerate() {
        if let Some(address) = asked.filter(|address| !request.protocol.has(*address)) {
            return Err(format!(
                "a frame of the protocol {} has no address {address}: name another protocol",
                request.protocol.name()
            ));
        }
        match asked {
            Some(IpAddr::V4(address)) => v4[side] = address,
            Some(IpAddr::V6(address)) => v6[side] = address,
            None => {}
        }
    }
    let destination = match destination {
        // IPv6 has groups in the place of a broadcast (RFC 2464, 7).
        Mac::BROADCAST if request.protocol == TraceProtocol::Nd => {
            let [.., a, b, c] = v6[1].octets();
            Mac([0x33, 0x33, 0xff, a, b, c])
        }
        other => other,
    };
    let TraceRequest { vlan, protocol, size, gso, csum, .. } = *request;
    let ports = [request.source_port, request.destination_port];
    Ok((Spec { source, destination, vlan, protocol, size, gso, csum, v4, v6, ports }, to))
}

/// Says what a frame meets on its way to an end of a wire.
fn meets(end: &WireEnd) -> String {
    let impairments = wire_settings(&end.impairments);
    match impairments.is_empty() {
        true => format!("Nothing happens to it on the wire {}.", end.wire),
        false => format!("On the wire {} it meets {impairments}.", end.wire),
    }
}

/// Addresses of stations that are known nowhere: locally administered ones.
const MADE_UP: [Mac; 2] = [Mac([0x02, 0, 0x5e, 0x10, 0, 1]), Mac([0x02, 0, 0x5e, 0x10, 0, 2])];

/// Returns an IPv4 address that a port may send from: the first that it is allowed, or one for documentation (RFC 5737).
fn address_v4(guard: Option<&Guard>, host: u8) -> Ipv4Addr {
    let networks = guard.and_then(|guard| guard.ips.as_deref()).unwrap_or_default();
    let allowed = networks.iter().find_map(|Network { address, bits }| match address {
        IpAddr::V4(address) => Some(Ipv4Addr::from_bits(address.to_bits() + u32::from(*bits < 31))),
        IpAddr::V6(_) => None,
    });
    allowed.unwrap_or_else(|| Ipv4Addr::new(192, 0, 2, host))
}

/// Returns an IPv6 address that a port may send from: the first that it is allowed, or one for documentation (RFC 3849).
fn address_v6(guard: Option<&Guard>, host: u16) -> Ipv6Addr {
    let networks = guard.and_then(|guard| guard.ips.as_deref()).unwrap_or_default();
    let allowed = networks.iter().find_map(|Network { address, bits }| match address {
        IpAddr::V6(address) => Some(Ipv6Addr::from_bits(address.to_bits() + u128::from(*bits < 127))),
        IpAddr::V4(_) => None,
    });
    allowed.unwrap_or_else(|| Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, host))
}

/// The words for the walk of a frame, as they are found.
struct Words<'k> {
    known: &'k Known<'k>,
    steps: Vec<TraceStep>,
    delivered: Vec<TraceDelivery>,
    dropped: Vec<TraceDrop>,
}

impl Words<'_> {
    fn say(&mut self, port: &str, step: &str, verdict: TraceVerdict, text: impl Into<String>) {
        let (port, step, text) = (port.to_owned(), step.to_owned(), text.into());
        self.steps.push(TraceStep { port, step, verdict, reason: None, text });
    }

    /// Says why packets are dropped.
    fn drop(&mut self, port: &str, step: &str, reason: DropReason, packets: u64, text: impl Into<String>) {
        let (at, step, name) = (port.to_owned(), step.to_owned(), reason.name().to_owned());
        self.dropped.push(TraceDrop { port: at.clone(), reason: name.clone(), packets });
        let text = text.into();
        self.steps.push(TraceStep { port: at, step, verdict: TraceVerdict::Drops, reason: Some(name), text });
    }

    fn captures(&mut self, port: &str, seen: &[CaptureId]) {
        if !seen.is_empty() {
            let names: Vec<_> = seen.iter().map(|capture| (self.known.capture)(*capture)).collect();
            self.say(port, "captures", TraceVerdict::Notes, format!("Seen by {}.", names.join(", ")));
        }
    }

    /// Says whether a frame can come from its port at all, and what was made up.
    fn state_of_sender(&mut self, port: &PortSnapshot, spec: &Spec, to: Option<&PortSnapshot>) {
        let name = &port.name;
        if !matches!(port.state, PortState::Up | PortState::AdminDown) {
            self.say(
                name,
                "link",
                TraceVerdict::Notes,
                format!(
                    "{name} is {}, so nothing comes from it now: what follows is what would become of a frame if it did. `ringferry ctl why {name}` says more.",
                    port.state.name()
                ),
            );
        }
        if spec.source == MADE_UP[0] {
            let text = format!("No address is known behind {name}: {} is made up.", spec.source);
            self.say(name, "addresses", TraceVerdict::Notes, text);
        }
        if let Some(to) = to.filter(|_| spec.destination == MADE_UP[1]) {
            let text = format!("No address is known behind {}: {} is made up.", to.name, spec.destination);
            self.say(name, "addresses", TraceVerdict::Notes, text);
        }
    }

    /// Says whether the virtual header is one that the guest may send; true if it is not.
    fn header(&mut self, port: &PortSnapshot, frame: &Imaginary) -> bool {
        let Imaginary { header, bytes, .. } = frame;
        if *header == Header::NONE || port.state != PortState::Up {
            return false;
        }
        // The back end of netif knows no features of what a guest sends.
        let Some(sends) = Abilities::of(port).filter(|_| !matches!(port.negotiated, Negotiated::XenVif(_)))
        else {
            return false;
        };
        let name = &port.name;
        match header.validated(&bytes[..bytes.len().min(VALIDATED_HEAD)], bytes.len(), sends.sends) {
            Ok(_) => {
                let text =
                    format!("{name} may leave that undone: it has negotiated {}.", offloads(sends.sends));
                self.say(name, "header", TraceVerdict::Passes, text);
                false
            }
            Err(error) => {
                let text = format!(
                    "Its virtual header is refused: {error}. {name} has negotiated {}.",
                    offloads(sends.sends)
                );
                self.drop(name, "header", DropReason::RxBadHeader, 1, text);
                true
            }
        }
    }

    /// Says what happens where the frame comes in.
    fn entry(&mut self, port: &PortSnapshot, worker: usize, entry: &Entry) {
        let (name, rules) = (&port.name, (self.known.rules)(&port.name));
        self.say(
            name,
            "worker",
            TraceVerdict::Passes,
            format!("Taken by worker {worker}, which has the queue."),
        );
        self.captures(name, &entry.seen);
        match entry.wait {
            Some(0) => self.say(name, "rate-in", TraceVerdict::Passes, "Its rate_in has tokens now."),
            Some(micros) => {
                let text = format!("It waits in the ring of {name} for {} first: rate_in.", time(micros));
                self.say(name, "rate-in", TraceVerdict::Waits, text);
            }
            None => {}
        }
        let dropped = entry.dropped;
        if dropped == Some(DropReason::LinkDown) {
            let text = format!("Somebody has taken the link of {name} down: nothing is taken from it.");
            return self.drop(name, "link", DropReason::LinkDown, 1, text);
        }
        if let Some(WireEnd { wire, peer, .. }) = &rules.wire {
            if dropped == Some(DropReason::WireDown) {
                let text =
                    format!("{name} is an end of the wire {wire}, and {peer}, its other end, is not there.");
                return self.drop(name, "wire", DropReason::WireDown, 1, text);
            }
            let text =
                format!("{name} is an end of the wire {wire}: all that it sends goes to {peer}, as it is.");
            return self.say(name, "wire", TraceVerdict::Passes, text);
        }
        let Some(tagged) = entry.tagged else {
            let text = format!("{name} is {}, and takes no frame like this one.", vlans_in_words(&rules));
            return self.drop(name, "vlan", DropReason::Vlan, 1, text);
        };
        let text = match tagged.vid {
            0 => "It is in no VLAN.".to_owned(),
            vid => format!("It is in VLAN {vid}: {name} is {}.", vlans_in_words(&rules)),
        };
        self.say(name, "vlan", TraceVerdict::Passes, text);
        if dropped == Some(DropReason::Spoofed) {
            let text = format!("{name} may not send from these addresses: {}.", allowed(&rules));
            return self.drop(name, "source-guard", DropReason::Spoofed, 1, text);
        }
        if entry.is_guarded {
            self.say(name, "source-guard", TraceVerdict::Passes, "Its source addresses are allowed.");
        }
        if dropped == Some(DropReason::Firewall) {
            let text = format!("The firewall of {name} denies it: {}.", rule(entry.rule.as_deref(), false));
            return self.drop(name, "firewall", DropReason::Firewall, 1, text);
        }
        if rules.firewall.is_some() {
            let text = format!("The firewall of {name} lets it out: {}.", rule(entry.rule.as_deref(), true));
            self.say(name, "firewall", TraceVerdict::Passes, text);
        }
        match (entry.learned, dropped) {
            (None, Some(reason)) => {
                return self.drop(name, "source", reason, 1, "No station has such a source address.");
            }
            (Some(Learned::Limited), _) => {
                let text = match entry.known_at {
                    Some(other) => format!(
                        "Its source is behind {}, and may not move to {name}.",
                        self.known.name(other)
                    ),
                    None => format!("{name} has as many addresses as max_macs allows."),
                };
                return self.drop(name, "source", DropReason::MacLimit, 1, text);
            }
            (Some(Learned::Refused), _) => {
                let text = "There is no place for its source in the table: what is for it will be flooded (mac_table_size).";
                self.say(name, "source", TraceVerdict::Notes, text);
            }
            (Some(Learned::News), _) => {
                let text = match entry.known_at {
                    Some(other) => format!(
                        "Its source is known behind {}, and would move to {name}.",
                        self.known.name(other)
                    ),
                    None => format!("Its source would be learned behind {name}."),
                };
                self.say(name, "source", TraceVerdict::Passes, text);
            }
            (Some(Learned::Known | Learned::Due), _) => {
                self.say(name, "source", TraceVerdict::Passes, format!("Its source is known behind {name}."));
            }
            (None, None) => {}
        }
        let vid = tagged.vid;
        match dropped {
            Some(DropReason::SamePort) => {
                let text = format!("Its destination is behind {name} itself.");
                self.drop(name, "destination", DropReason::SamePort, 1, text);
            }
            Some(DropReason::Reserved) => {
                let text =
                    "It is for a protocol between neighbours, which no switch forwards (reserved=forward).";
                self.drop(name, "destination", DropReason::Reserved, 1, text);
            }
            Some(DropReason::Quarantine) => {
                let text =
                    format!("{name} is in quarantine, and the port that it is left with is not there.");
                self.drop(name, "destination", DropReason::Quarantine, 1, text);
            }
            Some(DropReason::Storm) => {
                let text = format!("It is for everybody, and storm of {name} has no tokens now.");
                self.drop(name, "storm", DropReason::Storm, 1, text);
            }
            _ => {
                let all = entry.outputs.len();
                let is_cut_off = (self.known.rules)(name).quarantine.is_some();
                let text = match (entry.target, entry.outputs.first()) {
                    (Some(Target::Port), Some(port)) if is_cut_off => {
                        let only = self.known.name(*port);
                        format!("{name} is in quarantine: all that it sends goes to {only}.")
                    }
                    (_, None) => format!("It would be flooded in VLAN {vid}."),
                    (Some(Target::Port), Some(port)) => {
                        format!("Its destination is known behind {} in VLAN {vid}.", self.known.name(*port))
                    }
                    (Some(Target::Unknown), _) => format!(
                        "Nobody has sent from its destination in VLAN {vid} lately: it is flooded to those of the {all} other ports that may have it."
                    ),
                    _ => {
                        format!(
                            "It is for a group: it is flooded to those of the {all} other ports that may have it."
                        )
                    }
                };
                self.say(name, "destination", TraceVerdict::Passes, text);
                if entry.storm {
                    self.say(name, "storm", TraceVerdict::Passes, "Storm control has tokens for it.");
                }
            }
        }
    }

    /// Says what happens at the ports that the frame leaves by.
    fn exits(&mut self, worker: usize, entry: &Entry, exits: Vec<Exit>) {
        let Some(tagged) = entry.tagged else { return };
        let is_flooded = entry.target != Some(Target::Port);
        let mut told = 0;
        let mut apart: Vec<(DropReason, Vec<String>)> = Vec::new();
        for mut exit in exits {
            let name = self.known.name(exit.port);
            let state = self.known.port(exit.port).map(|port| (port.state, port.negotiated.is_interface()));
            // What the kernel would say, the worker cannot tell.
            if state == Some((PortState::Down, true)) {
                exit.fates.fill(Err(DropReason::LinkDown));
            }
            match exit.way {
                Err(reason) if is_flooded => match apart.iter_mut().find(|(other, _)| *other == reason) {
                    Some((_, names)) => names.push(name),
                    None => apart.push((reason, vec![name])),
                },
                Err(DropReason::Firewall) => {
                    let text =
                        format!("The firewall of {name} denies it: {}.", rule(exit.rule.as_deref(), false));
                    self.drop(&name, "firewall", DropReason::Firewall, 1, text);
                }
                Err(reason) => {
                    let text = self.apart(&name, reason, tagged.vid);
                    self.drop(&name, "rules", reason, 1, text);
                }
                Ok(retag) => {
                    told += 1;
                    self.exit(&name, worker, tagged.vid, retag, &exit, is_flooded && told > FEW);
                }
            }
        }
        for (reason, names) in apart {
            let why = match reason {
                DropReason::Isolated => "isolated, as the sender is".to_owned(),
                DropReason::Quarantine => "in quarantine".to_owned(),
                DropReason::WireDown => "an end of a wire".to_owned(),
                DropReason::Vlan => format!("not in VLAN {}", tagged.vid),
                DropReason::Firewall => "kept from it by a firewall".to_owned(),
                other => other.name().to_owned(),
            };
            let text = format!(
                "Not flooded to there, as {} {why}.",
                if names.len() == 1 { "it is" } else { "they are" }
            );
            self.say(&names.join(", "), "rules", TraceVerdict::Skips, text);
            if let Some(step) = self.steps.last_mut() {
                step.reason = Some(reason.name().to_owned());
            }
        }
    }

    /// Says which rule keeps a frame from the port behind which its destination is.
    fn apart(&self, name: &str, reason: DropReason, vid: Vid) -> String {
        match reason {
            DropReason::Isolated => format!("{name} is isolated, as the sender is."),
            DropReason::Quarantine => format!("{name} is in quarantine, without the sender."),
            DropReason::WireDown => {
                format!("{name} is an end of a wire, and the sender is not the other one.")
            }
            DropReason::Vlan => {
                format!(
                    "{name} is {}, and the frame is in {}.",
                    vlans_in_words(&(self.known.rules)(name)),
                    in_words(&[vid])
                )
            }
            _ => format!("{name} is being drained: nothing more is sent to it."),
        }
    }

    /// Says what happens at one port; in short, only what is lost there.
    fn exit(&mut self, name: &str, worker: usize, vid: Vid, retag: Retag, exit: &Exit, in_short: bool) {
        let before = std::mem::take(&mut self.steps);
        self.leaves(name, worker, vid, retag, exit);
        let steps = std::mem::replace(&mut self.steps, before);
        let is_loss = |step: &TraceStep| step.verdict == TraceVerdict::Drops;
        self.steps.extend(steps.into_iter().filter(|step| !in_short || is_loss(step)));
    }

    /// Says what happens at one port.
    fn leaves(&mut self, name: &str, worker: usize, vid: Vid, retag: Retag, exit: &Exit) {
        let tag_text = match retag {
            Retag::Keep => "It leaves with the tag that it has, or has not.".to_owned(),
            Retag::Strip => "Its tag is removed.".to_owned(),
            Retag::Insert(_) => format!("It gets a tag of VLAN {vid}."),
            Retag::Replace(_) => format!("Its tag becomes one of VLAN {vid}."),
        };
        let wire = (self.known.rules)(name).wire;
        match &wire {
            Some(end) if end.impairments.loss == Loss::Random(Share::ALL) => {
                let text = format!("The wire {} loses all that it carries to {name} (loss=100%).", end.wire);
                return self.drop(name, "wire", DropReason::WireLoss, 1, text);
            }
            Some(end) => self.say(name, "wire", TraceVerdict::Passes, meets(end)),
            None => {
                self.say(name, "rules", TraceVerdict::Passes, format!("{name} is in its VLAN. {tag_text}"));
            }
        }
        if let Some(PortSnapshot { fault: Some(fault), .. }) = self.known.port(exit.port) {
            self.say(name, "link", TraceVerdict::Notes, format!("{name} has a fault: {fault}."));
        }
        if let Some(micros) = exit.wait {
            let (step, text) = match wire {
                Some(_) => ("wire", format!("It is on its way for about {}.", time(micros))),
                None => ("rate-out", format!("It waits for about {}: rate_out of {name}.", time(micros))),
            };
            self.say(name, step, TraceVerdict::Waits, text);
        }
        for reason in &exit.lost {
            self.drop(name, "offloads", *reason, 1, reason.meaning());
        }
        match exit.software {
            Some(Software::Checksum) => {
                let text =
                    format!("{name} takes {}: the switch computes the checksum.", offloads(exit.accepts));
                self.say(name, "offloads", TraceVerdict::Notes, text);
            }
            Some(Software::Segments(number)) if number > 0 => {
                let text = format!(
                    "{name} takes {}: the switch cuts it into {number} packets.",
                    offloads(exit.accepts)
                );
                self.say(name, "offloads", TraceVerdict::Notes, text);
            }
            _ => {}
        }
        let longest = exit.packets.iter().map(|(_, frame)| frame.len()).max().unwrap_or(0);
        let is_plain = exit.packets.iter().all(|(header, _)| !header.is_gso());
        if let Some(mtu) = exit.mtu.filter(|mtu| is_plain && longest > 18 + usize::from(*mtu)) {
            let text =
                format!("It is longer than the MTU of {name}, {mtu}: its buffers say whether it gets it.");
            self.say(name, "mtu", TraceVerdict::Notes, text);
        }
        if let Some(queue) = exit.queue {
            let text = match exit.owner {
                Some(Owner::Other(other)) => {
                    format!(
                        "Queue pair {queue}, which worker {other} has: worker {worker} hands it off, with one more copy."
                    )
                }
                Some(Owner::Soon) => {
                    format!("Queue pair {queue}, which is migrating to worker {worker}: it waits for that.")
                }
                _ => format!("Queue pair {queue}, which worker {worker} has, too."),
            };
            self.say(name, "queue", TraceVerdict::Passes, text);
        }
        self.ring(name, exit);
        self.captures(name, &exit.seen);
        let got = exit.packets.iter().zip(&exit.fates).filter(|(_, fate)| fate.is_ok());
        let (mut packets, mut longest, mut waits, mut vlan) = (0, 0, exit.wait.is_some(), None);
        for ((_, frame), fate) in got {
            packets += 1;
            longest = longest.max(frame.len() as u32);
            waits |= *fate == Ok(Delivery::Queued);
            vlan = tag(&frame[..frame.len().min(PREFIX)]);
        }
        if packets > 0 {
            self.delivered.push(TraceDelivery { port: name.to_owned(), packets, longest, vlan, waits });
        }
    }

    /// Says what the receiver's ring has to say to the packets.
    fn ring(&mut self, name: &str, exit: &Exit) {
        let mut reasons: Vec<(DropReason, u64)> = Vec::new();
        for reason in exit.fates.iter().filter_map(|fate| fate.err()) {
            match reasons.iter_mut().find(|(other, _)| *other == reason) {
                Some((_, number)) => *number += 1,
                None => reasons.push((reason, 1)),
            }
        }
        let taken = exit.fates.iter().filter(|fate| fate.is_ok()).count();
        if taken > 0 {
            let waits = exit.fates.contains(&Ok(Delivery::Queued));
            let text = match (taken, waits) {
                (_, true) => format!("It waits until {name} takes it."),
                (1, _) => format!("{name} has room for it."),
                (number, _) => format!("{name} has room for {number} packets."),
            };
            self.say(name, "ring", if waits { TraceVerdict::Waits } else { TraceVerdict::Passes }, text);
        }
        let receiveq = exit.queue.map(queue_index::receiveq);
        let mut queues = self.known.port(exit.port).into_iter().flat_map(|port| &port.queues);
        if let Some(stall) =
            queues.find(|queue| Some(queue.index) == receiveq).and_then(|queue| queue.stalled)
        {
            let text = format!(
                "The guest of {name} has taken nothing out of its ring for {} s: `ringferry ctl why {name}` says more.",
                stall.seconds
            );
            self.say(name, "ring", TraceVerdict::Notes, text);
        }
        for (reason, number) in reasons {
            let state = self.known.port(exit.port).map(|port| port.state);
            let text = match (reason, state) {
                (DropReason::LinkDown, Some(state)) if state != PortState::Up => {
                    format!("{name} is {}: `ringferry ctl why {name}` says more.", state.name())
                }
                _ => reason.meaning().to_owned(),
            };
            self.drop(name, "ring", reason, number, text);
        }
    }

    /// Says which addresses the port that a frame was meant for has lost to another one, as frames to these go elsewhere.
    fn lost(&mut self, to: Option<&PortSnapshot>, spec: &Spec) {
        let Some(PortSnapshot { name, .. }) = to else { return };
        let all = &self.known.snapshot.fdb.lost;
        for lost in all.iter().filter(|lost| lost.from == *name && lost.mac != spec.destination) {
            let text = format!("{}: what is for it goes there.", lost.to_text());
            self.say(name, "destination", TraceVerdict::Notes, text);
        }
    }

    /// Says what is left to be said when all ports were asked.
    fn end(&mut self, from: &PortSnapshot, entry: &Entry) {
        if entry.dropped == Some(DropReason::NoDestination) {
            let text = "No other port may have it.";
            self.drop(&from.name, "destination", DropReason::NoDestination, 1, text);
        }
    }
}

/// Returns the end of a walk in a sentence, for a frame that was meant for a port which it has `missed`, if it has.
fn verdict(delivered: &[TraceDelivery], dropped: &[TraceDrop], missed: Option<&str>) -> String {
    let mut text = String::new();
    let to = |delivery: &TraceDelivery| match delivery.packets {
        1 => delivery.port.clone(),
        packets => format!("{} as {packets} packets", delivery.port),
    };
    if !delivered.is_empty() {
        let names: Vec<_> = delivered.iter().map(to).collect();
        // Writing to a string cannot fail.
        let _ = write!(text, "Delivered to {}.", names.join(", "));
    }
    // A frame for everybody may be dropped at many ports for one reason.
    let mut at = Vec::<(&str, u64, Vec<&str>)>::new();
    for TraceDrop { port, reason, packets } in dropped {
        match at.iter_mut().find(|(why, count, _)| (*why, *count) == (reason, *packets)) {
            Some((.., ports)) => ports.push(port),
            None => at.push((reason, *packets, vec![port])),
        }
    }
    for (reason, packets, ports) in at {
        let (space, ports) = (if text.is_empty() { "" } else { " " }, ports.join(", "));
        let _ = match packets {
            1 => write!(text, "{space}Dropped at {ports} as `{reason}`."),
            packets => write!(text, "{space}{packets} packets dropped at {ports} as `{reason}`."),
        };
    }
    if text.is_empty() {
        text = "Delivered to nobody.".to_owned();
    }
    if let Some(missed) = missed {
        let _ = write!(text, " {missed} does not get it.");
    }
    text
}

/// Returns true if a frame has come from its port, and then neither to the one that it was meant for nor to its end there.
fn is_missed(
    to: &PortSnapshot,
    from: &PortSnapshot,
    delivered: &[TraceDelivery],
    dropped: &[TraceDrop],
) -> bool {
    !delivered.iter().any(|delivery| delivery.port == to.name)
        && !dropped.iter().any(|drop| drop.port == to.name || drop.port == from.name)
}

/// Returns the remedy for what is lost on the way of a frame, or does not come to the port that it was meant for; what is lost elsewhere needs none then.
fn remedy(
    known: &Known<'_>,
    (from, to): (&PortSnapshot, Option<&PortSnapshot>),
    dropped: &[TraceDrop],
    missed: Option<&str>,
) -> String {
    let mut remedies: Vec<String> = Vec::new();
    if let Some(name) = missed {
        remedies.push(format!("The steps above say why; `ringferry ctl rules {name}` has its rules."));
    }
    let is_meant = |at: &str| to.is_none_or(|to| at == to.name || at == from.name);
    for TraceDrop { port: at, reason, .. } in dropped.iter().filter(|drop| is_meant(&drop.port)) {
        let Some(reason) = DropReason::from_name(reason) else { continue };
        let port = known.snapshot.ports.iter().find(|known| known.name == *at);
        let remedy = match port.filter(|_| reason == DropReason::LinkDown) {
            Some(PortSnapshot { name, state: PortState::AdminDown, .. }) => {
                format!("`ringferry ctl link {name} up`.")
            }
            Some(PortSnapshot { name, state, fault, .. }) if *state != PortState::Up || fault.is_some() => {
                format!("See `ringferry ctl why {name}`.")
            }
            _ => reason.remedy_at(at),
        };
        if !remedies.contains(&remedy) {
            remedies.push(remedy);
        }
    }
    remedies.join(" ")
}

/// The VLANs of a port, for a sentence.
pub(crate) fn vlans_in_words(rules: &Rules) -> String {
    let membership = Membership::new(&rules.vlans);
    match &rules.vlans {
        Vlans::Access(vid) => format!("an access port of {}", in_words(&[*vid])),
        Vlans::Trunk { allowed: None, native: Some(0) } => "a trunk of all VLANs".to_owned(),
        Vlans::Trunk { native, .. } => {
            let all: Vec<_> = (1..=MAX_VID).filter(|vid| membership.leaves(*vid).is_some()).collect();
            let native = match native {
                Some(vid) => format!(
                    "frames without a tag are in {}",
                    if *vid == 0 { "no VLAN".to_owned() } else { in_words(&[*vid]) }
                ),
                None => "frames without a tag are not taken".to_owned(),
            };
            format!("a trunk of {} ({native})", in_words(&all))
        }
    }
}

/// The source addresses that a port may use, for a sentence.
fn allowed(rules: &Rules) -> String {
    let written = crate::snapshot::rules_by_key(rules);
    let keys = ["allowed_macs", "allowed_ips"];
    let said = keys.iter().filter_map(|key| Some(format!("{key} is {}", written.get(*key)?)));
    said.collect::<Vec<_>>().join(", ")
}

/// Offloads, for a sentence.
fn offloads(offloads: Offloads) -> String {
    let names: Vec<_> = offloads.iter_names().map(|(name, _)| name.to_lowercase()).collect();
    if names.is_empty() { "no offloads".to_owned() } else { names.join(", ") }
}

/// A time in microseconds, for a sentence.
fn time(micros: u64) -> String {
    match micros {
        0..=9_999 => format!("{micros} µs"),
        10_000..=9_999_999 => format!("{} ms", micros / 1000),
        _ => format!("{} s", micros / 1_000_000),
    }
}

/// The rule of a firewall by which a frame is dropped or passes, in words.
fn rule(rule: Option<&str>, passes: bool) -> &str {
    match (rule, passes) {
        (Some(rule), _) => rule,
        (None, true) => "it passes whatever the rules are",
        (None, false) => {
            "no conversation can be told of it (a question to a resolver is judged by its name, and this frame has none)"
        }
    }
}
