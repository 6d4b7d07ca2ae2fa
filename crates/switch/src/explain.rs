//! `ringferry ctl explain PORT`: describes the path between a port and each other one in plain words: the
//! offloads in use, the work that the switch does in their place and its cost, the rules that keep the two
//! apart or limit them, and possible improvements.
//!
//! All of it follows from the [abilities](Abilities) of the two ports and from their rules (`rules`); nothing
//! is measured. The data plane decides by the same rules: `plane/offload/`, `plane/policy/`.

mod rules;

use ringferry_control::explain::{Checksums, Cost, Explanation, Protocol, Segments, Traffic, Way};
use ringferry_control::snapshot::{Negotiated, PortSnapshot, PortState, Snapshot, VifFeatures};
use ringferry_packet::vnet::Offloads;
use ringferry_virtio_net::Features;

use self::rules::Ruled;
pub(crate) use self::rules::in_words;
use crate::ports::tap;
use crate::rules::Rules;

/// How a note begins that says why no frame passes, given the rules.
pub(crate) const NOTHING_PASSES: &str = "nothing passes:";

/// Bytes of the largest packet that goes unsegmented, link and network headers included.
const LARGEST: u32 = 65_535;
/// Bytes of IPv4 and TCP headers with time stamps, as every stack sends today.
const HEADERS_V4: u32 = 52;
const HEADERS_V6: u32 = 72;
const HEADERS_UDP: u32 = 28;

/// The kind of peer behind a port, as far as advice depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plug {
    /// A guest that is plugged in by vhost-user.
    VhostUser,
    /// A Xen guest, which is plugged in by netif.
    Xen,
    /// The host's network stack.
    Tap,
    /// An interface of the host.
    Xdp,
}

/// The abilities of a port and its peer: offloads, buffers, MTU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Abilities {
    /// Name of the port in the configuration.
    pub name: String,
    /// The kind of peer behind the port.
    pub plug: Plug,
    /// True if the port carries packets; if not, the rest is as it was last, or empty.
    pub up: bool,
    /// Offloads of frames that the peer takes without help from the switch.
    pub takes: Offloads,
    /// Offloads that the peer may leave undone in frames that it sends.
    pub sends: Offloads,
    /// True if a packet may lie in several of the peer's receive buffers.
    pub mergeable: bool,
    /// Largest IP packet in bytes; 0 if it is not known.
    pub mtu: u16,
}

impl Abilities {
    /// Returns the abilities of a port. `None` for a kind that this version does not know, which a snapshot
    /// of its own never has.
    pub fn of(port: &PortSnapshot) -> Option<Abilities> {
        let (plug, takes, sends, mergeable) = match &port.negotiated {
            Negotiated::Tap(kernel) => {
                let both = tap::offloads(*kernel);
                (Plug::Tap, both, both, true)
            }
            Negotiated::XenVif(features) => {
                let mut takes = Offloads::empty();
                takes.set(Offloads::CSUM, features.contains(VifFeatures::CSUM));
                takes.set(Offloads::TSO4, features.contains(VifFeatures::GSO_TCPV4));
                takes.set(Offloads::TSO6, features.contains(VifFeatures::GSO_TCPV6));
                // The back end takes all offloads; the snapshot does not say whether the guest uses them.
                let segments = if features.contains(VifFeatures::SG) {
                    Offloads::TSO4 | Offloads::TSO6
                } else {
                    Offloads::empty()
                };
                (Plug::Xen, takes, Offloads::CSUM | segments, true)
            }
            Negotiated::VhostUser(features) => {
                let mergeable = features.contains(Features::MRG_RXBUF);
                (Plug::VhostUser, features.guest_offloads(), features.host_offloads(), mergeable)
            }
            // AF_XDP takes no work off a packet, and what was left undone in one that came in the port has seen.
            Negotiated::Xdp(_) => (Plug::Xdp, Offloads::empty(), Offloads::CSUM, true),
            Negotiated::Later { .. } => return None,
        };
        let up = port.state == PortState::Up;
        Some(Abilities { name: port.name.clone(), plug, up, takes, sends, mergeable, mtu: port.mtu })
    }
}

/// The kinds of traffic that are treated differently.
const KINDS: [(Protocol, Offloads, u32); 3] = [
    (Protocol::Tcp4, Offloads::TSO4, HEADERS_V4),
    (Protocol::Tcp6, Offloads::TSO6, HEADERS_V6),
    (Protocol::Udp, Offloads::USO, HEADERS_UDP),
];

/// Explains a port of a switch; `rules` returns the rules of each port.
///
/// # Errors
/// There is no such port; the message lists the ports.
pub fn explain(
    snapshot: &Snapshot,
    name: &str,
    rules: impl Fn(&str) -> Rules,
) -> Result<Explanation, String> {
    let ports: Vec<Abilities> = snapshot.ports.iter().filter_map(Abilities::of).collect();
    let Some(port) = ports.iter().find(|port| port.name == name) else {
        let names: Vec<_> = ports.iter().map(|port| port.name.as_str()).collect();
        return Err(format!("there is no port {name:?}; the ports are: {}", names.join(", ")));
    };
    let own = rules(name);
    let ways = ports.iter().filter(|other| other.name != name).flat_map(|other| {
        let theirs = rules(&other.name);
        [way((port, &own), (other, &theirs)), way((other, &theirs), (port, &own))]
    });
    Ok(Explanation {
        port: name.to_owned(),
        takes: port.takes,
        sends: port.sends,
        mtu: port.mtu,
        ways: ways.collect(),
    })
}

/// Describes the path of packets from one port to another, given the rules of both.
pub(crate) fn way((from, sends): (&Abilities, &Rules), (to, receives): (&Abilities, &Rules)) -> Way {
    let mut way = Way {
        from: from.name.clone(),
        to: to.name.clone(),
        traffic: Vec::new(),
        notes: Vec::new(),
        hints: Vec::new(),
    };
    for port in [from, to].into_iter().filter(|port| !port.up) {
        way.notes
            .push(format!("{} is not up, so nothing passes: `ringferry ctl show` says its state", port.name));
    }
    let (sender, receiver) =
        (Ruled { name: &from.name, rules: sends }, Ruled { name: &to.name, rules: receives });
    let passes = rules::explain(&mut way, sender, receiver);
    if !passes || !from.up || !to.up {
        return way;
    }
    way.traffic =
        KINDS.iter().map(|(kind, offload, headers)| traffic(*kind, *offload, *headers, from, to)).collect();
    if from.mtu > to.mtu && to.mtu > 0 {
        let longer = if to.mergeable {
            "the switch delivers a longer one, and the system behind the port may refuse it"
        } else {
            "a longer one is dropped, and its sender told with ICMP (too-big-answered) unless it is of a kind that nobody answers (tx-too-big)"
        };
        way.notes.push(format!(
            "{} may send packets of {} bytes, and {} has an MTU of {}: {longer}",
            from.name, from.mtu, to.name, to.mtu
        ));
        way.hints.push(format!("give both the same MTU: mtu={} for {}", to.mtu, from.name));
    }
    if !to.mergeable && to.takes.intersects(Offloads::TSO4 | Offloads::TSO6 | Offloads::USO) {
        way.notes.push(format!(
            "{} has no mergeable receive buffers: it keeps 64 KiB ready for each packet, however short",
            to.name
        ));
        way.hints.push(format!("{}: mrg_rxbuf=on", to.name));
    }
    advise(&mut way, from, to);
    way
}

fn traffic(kind: Protocol, offload: Offloads, headers: u32, from: &Abilities, to: &Abilities) -> Traffic {
    let needed = offload | Offloads::CSUM;
    // Datagrams are not merged for a guest, which would have to cut them again.
    let merged = to.plug == Plug::Tap || offload != Offloads::USO;
    let segments = match (from.sends.contains(needed), to.takes.contains(needed)) {
        (true, true) => Segments::Unsegmented,
        (true, false) => Segments::Cut,
        (false, true) if !merged => Segments::Single,
        (false, true) => Segments::Merged,
        (false, false) => Segments::Single,
    };
    let checksums = match (from.sends.contains(Offloads::CSUM), to.takes.contains(Offloads::CSUM)) {
        (true, true) => Checksums::LeftOut,
        (true, false) => Checksums::Computed,
        (false, _) if segments == Segments::Merged => Checksums::Verified,
        (false, _) => Checksums::Untouched,
    };
    let mtu = if from.mtu == 0 { to.mtu } else { from.mtu };
    let pieces = LARGEST.checked_div(u32::from(mtu).saturating_sub(headers)).unwrap_or(1).max(1);
    let (how, handling) = match segments {
        Segments::Unsegmented => ("packets of up to 64 KiB go through whole".to_owned(), Cost::Nothing),
        Segments::Cut => (
            format!("each packet of 64 KiB is cut into {pieces} by the switch, without another copy"),
            Cost::Packets,
        ),
        Segments::Merged if to.plug == Plug::Tap => (
            format!("packets of a burst become one of up to {pieces}, one system call for all"),
            Cost::Headers,
        ),
        Segments::Merged => (
            format!("large packets of a burst become one of up to {pieces}, which the guest handles once"),
            Cost::Headers,
        ),
        Segments::Single => ("each packet goes through as it is".to_owned(), Cost::Nothing),
    };
    let (what, summing) = match checksums {
        Checksums::LeftOut => ("checksums are left out, as memory needs none", Cost::Nothing),
        Checksums::Computed => ("checksums are computed by the switch, over every byte", Cost::Bytes),
        Checksums::Verified => ("checksums are verified by the switch, over every byte", Cost::Bytes),
        Checksums::Untouched => ("checksums are the two ends' own", Cost::Nothing),
    };
    let text = format!("{how}; {what}");
    Traffic { kind, segments, checksums, cost: handling.max(summing), text }
}

/// Suggests changes that leave less work to the switch. Only an ability that the other end has already is
/// suggested.
fn advise(way: &mut Way, from: &Abilities, to: &Abilities) {
    let lacking_receiver = from.sends - to.takes;
    let lacking_sender = to.takes - from.sends;
    for (port, lacking, receives) in [(to, lacking_receiver, true), (from, lacking_sender, false)] {
        match port.plug {
            Plug::Tap if !lacking.is_empty() => way.hints.push(format!("{}: offloads=on", port.name)),
            Plug::Tap | Plug::Xdp => {}
            Plug::Xen => {
                let words =
                    [(Offloads::CSUM, "checksums"), (Offloads::TSO4 | Offloads::TSO6, "TCP segments")];
                for (_, what) in words.iter().filter(|(offload, _)| lacking.intersects(*offload)) {
                    let who = &port.name;
                    way.hints.push(format!(
                        "{who}: let the guest's interface offload {what} (ethtool -K DEVICE tx on tso on sg on)"
                    ));
                }
            }
            Plug::VhostUser => {
                let words = if receives { QEMU_TAKES } else { QEMU_SENDS };
                let wanted = words.iter().filter(|(offload, ..)| lacking.intersects(*offload));
                for (_, qemu, toggle) in wanted {
                    way.hints.push(format!(
                        "{}: {qemu} for the guest's device (as QEMU has it), and no {toggle}=off for the port",
                        port.name
                    ));
                }
            }
        }
    }
}

/// For each offload that a guest may take: QEMU's properties for it, and the port's own key.
const QEMU_TAKES: [(Offloads, &str, &str); 3] = [
    (Offloads::CSUM, "guest_csum=on", "csum"),
    (Offloads::TSO4.union(Offloads::TSO6), "guest_tso4=on,guest_tso6=on", "tso"),
    (Offloads::USO, "guest_uso4=on,guest_uso6=on", "uso"),
];
/// For each offload that a guest may send: QEMU's properties for it, and the port's own key.
const QEMU_SENDS: [(Offloads, &str, &str); 3] = [
    (Offloads::CSUM, "csum=on", "csum"),
    (Offloads::TSO4.union(Offloads::TSO6), "host_tso4=on,host_tso6=on", "tso"),
    (Offloads::USO, "host_uso=on", "uso"),
];

#[cfg(test)]
mod tests {
    use ringferry_sys::tap::Offloads as TapOffloads;

    use super::*;

    /// Describes the path between two ports without rules.
    fn way(from: &Abilities, to: &Abilities) -> Way {
        super::way((from, &Rules::default()), (to, &Rules::default()))
    }

    const SEGMENTATION: Offloads = Offloads::TSO4.union(Offloads::TSO6).union(Offloads::USO);

    fn port(name: &str, plug: Plug, takes: Offloads, sends: Offloads) -> Abilities {
        Abilities { name: name.into(), plug, up: true, takes, sends, mergeable: true, mtu: 1500 }
    }

    fn both(name: &str, offloads: Offloads) -> Abilities {
        port(name, Plug::VhostUser, offloads, offloads)
    }

    /// Checks the result for each kind of traffic, for what a sender leaves undone and a receiver takes.
    #[test]
    fn every_pair_of_ends_is_explained() {
        use Checksums::{Computed, LeftOut, Untouched, Verified};
        use Cost::{Bytes, Headers, Nothing, Packets};
        use Segments::{Cut, Merged, Single, Unsegmented};
        let (none, csum, all) =
            (Offloads::empty(), Offloads::CSUM, Offloads::CSUM | SEGMENTATION | Offloads::ECN);
        let matrix = [
            (none, none, Single, Untouched, Nothing),
            (none, csum, Single, Untouched, Nothing),
            (none, all, Merged, Verified, Bytes),
            (csum, none, Single, Computed, Bytes),
            (csum, csum, Single, LeftOut, Nothing),
            (csum, all, Merged, LeftOut, Headers),
            (all, none, Cut, Computed, Bytes),
            (all, csum, Cut, LeftOut, Packets),
            (all, all, Unsegmented, LeftOut, Nothing),
        ];
        for (sends, takes, segments, checksums, cost) in matrix {
            let way = way(&port("a", Plug::VhostUser, none, sends), &port("b", Plug::VhostUser, takes, none));
            assert_eq!(way.traffic.len(), 3);
            for traffic in way.traffic.into_iter().filter(|traffic| traffic.kind != Protocol::Udp) {
                let got = (traffic.segments, traffic.checksums, traffic.cost);
                assert_eq!(got, (segments, checksums, cost), "{sends:?} to {takes:?}, {:?}", traffic.kind);
            }
            assert_eq!(way.hints.is_empty(), sends == takes, "{sends:?} to {takes:?}: {:?}", way.hints);
        }
    }

    #[test]
    fn each_protocol_goes_its_own_way() {
        let from = both("a", Offloads::CSUM | Offloads::TSO4 | Offloads::USO);
        let to = both("b", Offloads::CSUM | Offloads::TSO4 | Offloads::TSO6);
        let segments: Vec<_> = way(&from, &to).traffic.iter().map(|traffic| traffic.segments).collect();
        assert_eq!(segments, [Segments::Unsegmented, Segments::Merged, Segments::Cut]);
    }

    #[test]
    fn words_and_numbers_are_those_of_the_mtu() {
        let all = Offloads::CSUM | SEGMENTATION;
        let to = both("b", Offloads::empty());
        let text = |mtu| way(&Abilities { mtu, ..both("a", all) }, &to).traffic[0].text.clone();
        assert!(
            text(1500).starts_with("each packet of 64 KiB is cut into 45 by the switch"),
            "{}",
            text(1500)
        );
        assert!(text(9000).contains("cut into 7 "), "{}", text(9000));
        for odd in [0, 40, 68] {
            let to = Abilities { mtu: 0, ..to.clone() };
            assert_eq!(way(&Abilities { mtu: odd, ..both("a", all) }, &to).traffic.len(), 3);
        }
    }

    #[test]
    fn hints_are_what_a_person_can_type() {
        let all = Offloads::CSUM | SEGMENTATION;
        let way = |from: &Abilities, to: &Abilities| way(from, to).hints.join("\n");
        let hints = way(&both("a", all), &both("b", Offloads::CSUM));
        assert!(hints.contains("b: guest_tso4=on,guest_tso6=on") && !hints.contains("guest_csum"), "{hints}");
        let hints = way(&both("b", Offloads::CSUM), &both("a", all));
        assert!(hints.contains("b: host_tso4=on,host_tso6=on") && hints.contains("no uso=off"), "{hints}");
        let tap = port("t", Plug::Tap, Offloads::empty(), Offloads::empty());
        assert_eq!(way(&both("a", all), &tap), "t: offloads=on");
        assert_eq!(way(&both("a", all), &both("c", all)), "");
        let xen = port("x", Plug::Xen, Offloads::CSUM, Offloads::CSUM);
        assert!(way(&both("a", all), &xen).contains("ethtool -K"));
    }

    #[test]
    fn what_does_not_fit_and_who_is_down_are_said() {
        let small = both("small", Offloads::CSUM);
        let large = Abilities { mtu: 9000, ..both("large", Offloads::CSUM) };
        let notes = way(&large, &small).notes;
        assert!(
            notes.len() == 1 && notes[0].contains("9000") && notes[0].contains("may refuse"),
            "{notes:?}"
        );
        let fixed = Abilities { mergeable: false, ..small.clone() };
        let notes = way(&large, &fixed).notes;
        assert!(notes.len() == 1 && notes[0].contains("too-big-answered"), "{notes:?}");
        assert_eq!(way(&small, &large).notes, Vec::<String>::new());
        let down = Abilities { up: false, ..both("down", Offloads::CSUM) };
        let way = way(&small, &down);
        assert!(way.traffic.is_empty() && way.notes[0].starts_with("down is not up"), "{way:?}");
    }

    fn snapshot(name: &str, negotiated: Negotiated) -> PortSnapshot {
        PortSnapshot {
            name: name.into(),
            negotiated,
            state: PortState::Up,
            fault: None,
            peer: String::new(),
            mtu: 1500,
            mac: None,
            queues: Vec::new(),
            counters: [].into(),
            drops: [].into(),
            rules: [].into(),
            pairs: Vec::new(),
            rates: Vec::new(),
            another_waits: false,
            ended: None,
            stopped_seconds: None,
            front_end: None,
        }
    }

    #[test]
    fn abilities_are_those_that_were_negotiated() {
        let of = |negotiated| Abilities::of(&snapshot("p", negotiated));
        let features = Features::GUEST_CSUM | Features::GUEST_TSO4 | Features::CSUM | Features::MRG_RXBUF;
        let guest = of(Negotiated::VhostUser(features)).unwrap();
        assert_eq!((guest.plug, guest.takes), (Plug::VhostUser, Offloads::CSUM | Offloads::TSO4));
        assert_eq!((guest.sends, guest.mergeable), (Offloads::CSUM, true));
        let tap = of(Negotiated::Tap(TapOffloads::all())).unwrap();
        assert_eq!((tap.takes, tap.sends), (Offloads::all() - Offloads::UFO, tap.takes));
        let vif = VifFeatures::SG | VifFeatures::CSUM | VifFeatures::GSO_TCPV4 | VifFeatures::COPY;
        let xen = of(Negotiated::XenVif(vif)).unwrap();
        assert_eq!((xen.plug, xen.takes), (Plug::Xen, Offloads::CSUM | Offloads::TSO4));
        assert_eq!(xen.sends, Offloads::CSUM | Offloads::TSO4 | Offloads::TSO6);
        assert_eq!(of(Negotiated::Later { kind: "xdp".into(), features: Vec::new() }), None);
    }

    #[test]
    fn the_text_has_both_ways_to_every_other_port() {
        let mut known = Snapshot::default();
        assert!(explain(&known, "a", |_| Rules::default()).unwrap_err().contains("there is no port"));
        for name in ["a", "b", "c"] {
            known.ports.push(snapshot(name, Negotiated::Tap(TapOffloads::CSUM)));
        }
        let explanation = explain(&known, "b", |_| Rules::default()).unwrap();
        let ways: Vec<_> = explanation.ways.iter().map(|way| (way.from.as_str(), way.to.as_str())).collect();
        assert_eq!(ways, [("b", "a"), ("a", "b"), ("b", "c"), ("c", "b")]);
        let text = explanation.to_text();
        assert!(text.starts_with("b: takes csum; may leave to others csum; MTU 1500\n\nb -> a\n"), "{text}");
        let json = serde_json::to_string(&explanation).unwrap();
        assert_eq!(serde_json::from_str::<Explanation>(&json).unwrap(), explanation);
    }

    #[test]
    fn ports_that_rules_keep_apart_have_no_traffic() {
        let mut known = Snapshot::default();
        for name in ["a", "b", "c"] {
            known.ports.push(snapshot(name, Negotiated::Tap(TapOffloads::CSUM)));
        }
        let rules = |name: &str| Rules { isolated: name != "c", ..Rules::default() };
        let ways = explain(&known, "a", rules).unwrap().ways;
        let apart = |way: &&Way| way.traffic.is_empty() && way.notes[0].starts_with("nothing passes");
        assert_eq!(ways.iter().map(|way| apart(&way)).collect::<Vec<_>>(), [true, true, false, false]);
    }
}
