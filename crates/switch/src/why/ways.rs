//! What keeps two ports apart, or makes the way between them dear.

use ringferry_control::DropReason;
use ringferry_control::explain::{Cost, Way};
use ringferry_control::snapshot::{FdbEntry, Negotiated, PortSnapshot, PortState};
use ringferry_control::trace::{Trace, TraceProtocol, TraceRequest, TraceStep, TraceVerdict};
use ringferry_control::why::Effect;

use super::{Findings, Known};
use crate::explain::{self, Abilities, Plug};
use crate::impairments::WireEnd;
use crate::rules::{Rules, Vid, Vlans};

/// The port, or one of two, is in quarantine.
const IN_QUARANTINE: &str = "in-quarantine";

/// The port, or one of two, is an end of a wire.
const END_OF_WIRE: &str = "end-of-wire";

/// Most ports that a sentence names.
const NAMED: usize = 4;

/// Looks at what a port has to do with all other ones.
pub(super) fn look_at_all(known: &Known<'_>, port: &PortSnapshot, findings: &mut Findings) {
    let Some(own) = Abilities::of(port).filter(|own| own.up) else { return };
    let others =
        known.snapshot.ports.iter().filter(|other| other.name != port.name).filter_map(Abilities::of);
    let others: Vec<_> = others.filter(|other| other.up).collect();
    if look_at_wire(known, &own, findings) {
        return;
    }
    if !look_at_quarantine(known, &own, findings) {
        look_at_rules(known, &own, &others, findings);
    }
    look_at_tags(known, &own, &others, findings);
    look_at_breadth(known, &own, &others, findings);
    let smaller: Vec<_> = others.iter().filter(|other| (1..own.mtu).contains(&other.mtu)).collect();
    let Some(smallest) = smaller.iter().min_by_key(|other| other.mtu) else { return };
    let others = match smaller.len() - 1 {
        0 => String::new(),
        1 => ", and one other port has less than it, too".to_owned(),
        more => format!(", and {more} other ports have less than it, too"),
    };
    findings.add(
        "smaller-mtu-elsewhere",
        Effect::Notes,
        0.0,
        format!(
            "{} has an MTU of {}, and {} one of {}{others}: longer packets {} there.",
            own.name,
            own.mtu,
            smallest.name,
            smallest.mtu,
            if smallest.mergeable { "may be refused" } else { "are lost on the way to" }
        ),
        "If they talk to each other, give both the same MTU. `ringferry ctl why PORT PEER` says what is between two.",
    );
}

/// Says with whom a port in quarantine is left; false if it is not in quarantine. Then it goes without saying that it is kept apart from all others.
fn look_at_quarantine(known: &Known<'_>, own: &Abilities, findings: &mut Findings) -> bool {
    let Some(only) = (known.rules)(&own.name).quarantine else { return false };
    let (effect, rest) = if known.snapshot.ports.iter().any(|port| port.name == only) {
        (Effect::Notes, format!("it exchanges frames with {only} alone, which gets all that it sends."))
    } else {
        (Effect::Stops, format!("nothing passes, as there is no {only}, which it is left with."))
    };
    let text = format!("{} is in quarantine: {rest}", own.name);
    let remedy = format!("`ringferry ctl release {}`, if that is over.", own.name);
    findings.add(IN_QUARANTINE, effect, 100.0, text, remedy);
    true
}

/// Says where the other end of a port's wire is; false if it is no end of one. What other ports there are does not matter to it then.
fn look_at_wire(known: &Known<'_>, own: &Abilities, findings: &mut Findings) -> bool {
    let Some(WireEnd { wire, peer, .. }) = (known.rules)(&own.name).wire else { return false };
    let name = &own.name;
    let state = known.snapshot.ports.iter().find(|port| port.name == peer).map(|port| port.state);
    let is_end = format!("{name} is an end of the wire {wire}");
    if state == Some(PortState::Up) {
        let text = format!("{is_end}: it exchanges frames with {peer} alone, which gets all that it sends.");
        let remedy = format!(
            "`ringferry ctl wire show {wire}` says what happens on the way, `ringferry ctl wire remove {wire}` takes the wire out."
        );
        findings.add(END_OF_WIRE, Effect::Notes, 0.0, text, remedy);
    } else if let Some(state) = state {
        let text = format!("{is_end}, and nothing passes, as {peer} at the other is {}.", state.name());
        let remedy = format!("`ringferry ctl why {peer}` says why that is.");
        findings.add(END_OF_WIRE, Effect::Stops, 100.0, text, remedy);
    } else {
        let text = format!("{is_end}, and nothing passes, as there is no {peer} at the other.");
        let remedy = format!("Add that port, or take the wire out: `ringferry ctl wire remove {wire}`.");
        findings.add(END_OF_WIRE, Effect::Stops, 100.0, text, remedy);
    }
    true
}

/// Says which ports rules keep apart from this one. What is sent there is dropped at the other port, or not even flooded to it, so nothing that is counted at this one tells it.
fn look_at_rules(known: &Known<'_>, own: &Abilities, others: &[Abilities], findings: &mut Findings) {
    let apart: Vec<_> =
        others.iter().filter(|other| are_apart(known, own, other)).map(|other| other.name.as_str()).collect();
    let Some(first) = apart.first() else { return };
    let names = match apart.len() - apart.len().min(NAMED) {
        0 => apart.join(", "),
        more => format!("{} and {more} more", apart[..NAMED].join(", ")),
    };
    let remedy = format!(
        "Nothing, if that is wanted. `ringferry ctl why {} {first}` says which rule it is.",
        own.name
    );
    if apart.len() == others.len() {
        let text = format!(
            "Nothing passes from {} to any other port that is up ({names}): rules keep them apart.",
            own.name
        );
        findings.add("apart-from-all", Effect::Stops, 100.0, text, remedy);
    } else {
        let text = format!("Rules keep {} apart from {names}: nothing passes from here to there.", own.name);
        findings.add("apart-from-some", Effect::Notes, 0.0, text, remedy);
    }
}

/// Returns true if rules let nothing pass from one port to the other.
pub(super) fn are_apart(known: &Known<'_>, from: &Abilities, to: &Abilities) -> bool {
    let (own, theirs) = ((known.rules)(&from.name), (known.rules)(&to.name));
    let way = explain::way((from, &own), (to, &theirs));
    way.notes.iter().any(|note| note.starts_with(explain::NOTHING_PASSES))
}

/// What to do where frames of an access port in VLAN `vid` reach `trunk` with a tag only.
fn untag(known: &Known<'_>, vid: Vid, trunk: &str) -> String {
    let port = known.snapshot.ports.iter().find(|port| port.name == trunk);
    let tap = port.filter(|port| matches!(port.negotiated, Negotiated::Tap(_)));
    let interface = tap.map_or_else(String::new, |PortSnapshot { peer, .. }| {
        format!(", or an interface of the host that takes the tags: `ip link add link {peer} name {peer}.{vid} type vlan id {vid}`")
    });
    format!("`ringferry ctl set {trunk} vlan={vid}`, if what is behind {trunk} knows of no tags{interface}.")
}

/// Says where an access port's frames get a tag that the other side may not expect: a port without rules, which carries all VLANs, is the only other one in its VLAN, or
/// whoever is behind it has sent frames without a tag and none in that VLAN. All that passes there is delivered and nothing dropped, so no counter tells it.
fn look_at_tags(known: &Known<'_>, own: &Abilities, others: &[Abilities], findings: &mut Findings) {
    let all = || others.iter().chain([own]);
    let vlan = |port: &Abilities| (known.rules)(&port.name).vlans.access().filter(|vid| *vid != 0);
    let pairs = others.iter().flat_map(|other| [(own, other), (other, own)]);
    let mut tagged = pairs.filter_map(|(access, trunk)| {
        let Vlans::Trunk { allowed: None, native: Some(native) } = (known.rules)(&trunk.name).vlans else {
            return None;
        };
        let vid = vlan(access)?;
        let is_alone = all().filter(|port| vlan(port) == Some(vid)).count() == 1;
        let why = if is_alone {
            "no other port that is up is one".to_owned()
        } else if is_heard(known, trunk, native) && !is_heard(known, trunk, vid) {
            format!("frames have come from {} lately without a tag and none of VLAN {vid}", trunk.name)
        } else {
            return None;
        };
        Some((access, trunk, vid, why))
    });
    let Some((access, trunk, vid, why)) = tagged.next() else { return };
    findings.add(
        "tagged-on-the-way",
        Effect::Notes,
        70.0,
        format!(
            "{} is an access port of VLAN {vid}, and {why}: what it sends leaves {} with the tag of VLAN {vid}, and what comes from there without a tag does not reach it.",
            access.name, trunk.name
        ),
        untag(known, vid, &trunk.name),
    );
}

/// Returns true if a station behind a port has sent frames in a VLAN, and not so long ago that it was forgotten.
fn is_heard(known: &Known<'_>, port: &Abilities, vid: Vid) -> bool {
    // They are in this order.
    let (entries, place) = (&known.snapshot.fdb.entries, (port.name.as_str(), vid));
    let of = |entry: &FdbEntry| (entry.port.as_str(), entry.vlan).cmp(&place);
    let first = entries.partition_point(|entry| of(entry).is_lt());
    entries[first..].iter().take_while(|entry| of(entry).is_eq()).any(|entry| !entry.fixed)
}

/// Says that a guest's port carries all VLANs where others have their own: nothing that is dropped tells it.
fn look_at_breadth(known: &Known<'_>, own: &Abilities, others: &[Abilities], findings: &mut Findings) {
    if matches!(own.plug, Plug::Tap | Plug::Xdp) || (known.rules)(&own.name).vlans != Vlans::default() {
        return;
    }
    let vlan = |other: &Abilities| Some((other.name.clone(), (known.rules)(&other.name).vlans.access()?));
    let Some((access, vid)) = others.iter().find_map(vlan).filter(|(_, vid)| *vid != 0) else { return };
    findings.add(
        "in-all-vlans",
        Effect::Notes,
        90.0,
        format!(
            "{} has no vlan, so its guest is in all of them: what it sends with a tag of {vid} reaches {access}.",
            own.name
        ),
        format!(
            "`ringferry ctl set {} vlan=VID`, or a trunk of those that it is to reach; `trunk=1-4094 native=0` says that it is meant.",
            own.name
        ),
    );
}

/// Looks at the ways between a port and its peer, and returns them.
pub(super) fn look(
    known: &Known<'_>,
    port: &PortSnapshot,
    other: &PortSnapshot,
    findings: &mut Findings,
) -> Vec<Way> {
    let (Some(one), Some(two)) = (Abilities::of(port), Abilities::of(other)) else { return Vec::new() };
    let (own, theirs) = ((known.rules)(&port.name), (known.rules)(&other.name));
    let ways = vec![explain::way((&one, &own), (&two, &theirs)), explain::way((&two, &theirs), (&one, &own))];
    look_at_mtu(&one, &two, findings);
    let mut is_apart = false;
    for way in &ways {
        // What one rule keeps apart is said once for both directions.
        for note in way.notes.iter().filter(|note| note.starts_with(explain::NOTHING_PASSES)) {
            let text = note[explain::NOTHING_PASSES.len()..].trim_start();
            if !std::mem::replace(&mut is_apart, true) {
                let situation = if text.ends_with("(allowed_macs)") {
                    "no-address-allowed"
                } else if own.wire.is_some() || theirs.wire.is_some() {
                    END_OF_WIRE
                } else if own.quarantine.is_some() || theirs.quarantine.is_some() {
                    IN_QUARANTINE
                } else if own.isolated && theirs.isolated {
                    "isolated"
                } else {
                    "no-common-vlan"
                };
                let text = format!("Nothing passes from {} to {}: {text}.", way.from, way.to);
                findings.add(situation, Effect::Stops, 100.0, text, way.hints.join("; "));
            }
        }
        let dear = way.traffic.iter().filter(|traffic| traffic.cost >= Cost::Packets);
        let dear: Vec<_> = dear.map(|traffic| format!("{}: {}", traffic.kind.name(), traffic.text)).collect();
        if !dear.is_empty() {
            findings.add(
                "dear-way",
                Effect::Slows,
                0.0,
                format!("The way from {} to {} is dear. {}.", way.from, way.to, dear.join(". ")),
                way.hints.join("; "),
            );
        }
    }
    if !is_apart && one.up && two.up {
        look_at_frames(known, (&port.name, &own), (&other.name, &theirs), findings);
        look_at_frames(known, (&other.name, &theirs), (&port.name, &own), findings);
    }
    look_at_workers(port, other, findings);
    ways
}

/// Most VLANs of a port for which a frame is traced.
const VLANS: usize = 8;

/// Frames that a rule would drop.
struct Lost {
    /// The VLANs of their tags, or none, for which the reason is the same.
    vlans: Vec<Option<Vid>>,
    reason: DropReason,
    /// What was said of the first.
    text: String,
}

/// Traces frames from one port to another, without a tag and with those of the VLANs that the rules of both name, and says which of them a rule would
/// drop.
fn look_at_frames(
    known: &Known<'_>,
    (from, sends): (&str, &Rules),
    (to, takes): (&str, &Rules),
    findings: &mut Findings,
) {
    let named = |vlans: &Vlans| match vlans {
        Vlans::Access(vid) => vec![*vid],
        Vlans::Trunk { allowed, .. } => allowed.iter().flatten().copied().take(VLANS).collect(),
    };
    let tags = match &sends.vlans {
        // Its frames have no tags.
        Vlans::Access(_) => Vec::new(),
        Vlans::Trunk { allowed: Some(_), .. } => named(&sends.vlans),
        Vlans::Trunk { allowed: None, .. } => named(&takes.vlans),
    };
    let tags = tags.into_iter().filter(|vid| *vid != 0).map(Some);
    let (mut lost, mut any) = (Vec::<Lost>::new(), false);
    for vlan in std::iter::once(None).chain(tags) {
        // What a firewall lets pass is its policy's business, and not a matter of what is plugged in: address resolution passes by each.
        let protocol = match sends.firewall.is_some() || takes.firewall.is_some() {
            true => TraceProtocol::Arp,
            false => TraceProtocol::default(),
        };
        let (sender, receiver) = (from.to_owned(), to.to_owned());
        let request = TraceRequest { from: sender, to: receiver, vlan, protocol, ..TraceRequest::default() };
        let Ok(trace) = (known.trace)(&request) else { return };
        any |= trace.delivered.iter().any(|delivery| delivery.port == to);
        let Some((reason, text)) = refusal(&trace, to) else { continue };
        let same = lost.iter_mut().find(|lost| lost.vlans[0].is_some() && lost.reason == reason);
        match same.filter(|_| vlan.is_some()) {
            Some(lost) => lost.vlans.push(vlan),
            None => lost.push(Lost { vlans: vec![vlan], reason, text }),
        }
    }
    // Who was given no VLANs sends no tags, as far as anybody has said.
    let usual = matches!(sends.vlans, Vlans::Trunk { allowed: None, .. });
    for Lost { vlans, reason, text } in lost {
        let vlan = vlans[0];
        let (tag, flag) = match vlan {
            Some(vlan) if vlans.len() > 1 => {
                let all: Vec<_> = vlans.iter().flatten().map(Vid::to_string).collect();
                (format!("with a tag of one of the VLANs {}", all.join(", ")), format!(" --vlan {vlan}"))
            }
            Some(vlan) => (format!("with a tag of VLAN {vlan}"), format!(" --vlan {vlan}")),
            None => ("without a tag".to_owned(), String::new()),
        };
        let remedy = match (reason, vlan, takes.vlans.access()) {
            (DropReason::Vlan, None, Some(vid)) if usual => untag(known, vid, from),
            _ => reason.remedy_at(from),
        };
        findings.add(
            "would-be-dropped",
            match (any, vlan) {
                (false, _) => Effect::Stops,
                (true, None) if usual => Effect::Loses,
                (true, _) => Effect::Notes,
            },
            100.0,
            format!(
                "A frame from {from} to {to} {tag} would not arrive, by the rule behind `{}`: {text}",
                reason.name()
            ),
            format!("{remedy} Each step: `ringferry ctl trace {from} {to}{flag}`."),
        );
    }
}

/// Returns the reason for which a rule keeps a frame from a port, and what was said of it.
fn refusal(trace: &Trace, to: &str) -> Option<(DropReason, String)> {
    let is_rule = |reason: &DropReason| {
        use DropReason::{Isolated, MacLimit, Quarantine, Reserved, Spoofed, Storm, Vlan, WireDown};
        matches!(reason, Vlan | Isolated | Quarantine | WireDown | Spoofed | MacLimit | Reserved | Storm)
    };
    let of = |step: &TraceStep| step.reason.as_deref().and_then(DropReason::from_name);
    trace.steps.iter().find_map(|step| {
        let is_skipped = step.verdict == TraceVerdict::Skips && step.port.split(", ").any(|port| port == to);
        let reason = of(step).filter(is_rule)?;
        (is_skipped || step.verdict == TraceVerdict::Drops).then(|| (reason, step.text.clone()))
    })
}

fn look_at_mtu(one: &Abilities, two: &Abilities, findings: &mut Findings) {
    let (small, large) = if one.mtu < two.mtu { (one, two) } else { (two, one) };
    if !one.up || !two.up || small.mtu == 0 || small.mtu == large.mtu {
        return;
    }
    // Only buffers of a fixed size are a limit that the switch sees.
    let (effect, what) = if small.mergeable {
        (Effect::Notes, "the switch delivers longer packets, and the system behind the port may refuse them")
    } else {
        (
            Effect::Loses,
            "longer packets do not fit its buffers. Their sender is told with ICMP, if they are of a kind that is answered",
        )
    };
    findings.add(
        "mtu-mismatch",
        effect,
        0.0,
        format!(
            "{} has an MTU of {}, and {} one of {}: {what}.",
            large.name, large.mtu, small.name, small.mtu
        ),
        format!(
            "Give both the same MTU: `ringferry ctl set {} mtu={}`, and the same inside the guest.",
            large.name, small.mtu
        ),
    );
}

/// Two ports that talk to each other and are served by different workers.
fn look_at_workers(port: &PortSnapshot, other: &PortSnapshot, findings: &mut Findings) {
    let workers = |port: &PortSnapshot| port.pairs.iter().map(|pair| pair.worker).collect::<Vec<_>>();
    let (own, theirs) = (workers(port), workers(other));
    let (Some(here), Some(there)) = (own.first(), theirs.first()) else { return };
    if own.iter().any(|worker| theirs.contains(worker)) {
        return;
    }
    findings.add(
        "different-workers",
        Effect::Slows,
        10.0,
        format!(
            "{} is served by worker {here} and {} by worker {there}: each packet between them is copied once more.",
            port.name, other.name
        ),
        format!("If they talk to each other much: `ringferry ctl assign {} 0 {there}`.", port.name),
    );
}
