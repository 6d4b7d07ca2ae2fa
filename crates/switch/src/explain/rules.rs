//! Describes the effect of two ports' rules on frames from one to the other: whether a rule keeps the ports
//! apart, and the limits.
//!
//! The data plane decides by the same [`Membership`]; limits are said in the words in which they were
//! written.

use ringferry_control::explain::Way;

use super::NOTHING_PASSES;
use crate::impairments::WireEnd;
use crate::plane::{Egress, Membership};
use crate::rules::{MAX_VID, Rules, Vid, Vlans};
use crate::snapshot::{rules_by_key, wire_settings};

/// A port's name with its rules.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ruled<'a> {
    pub(super) name: &'a str,
    pub(super) rules: &'a Rules,
}

/// Adds the effect of the rules on frames from one port to another; returns false if none of them passes.
pub(super) fn explain(way: &mut Way, from: Ruled<'_>, to: Ruled<'_>) -> bool {
    if from.rules == &Rules::default() && to.rules == &Rules::default() {
        return true;
    }
    if from.rules.wire.is_some() || to.rules.wire.is_some() {
        return explain_wire(way, from, to);
    }
    let mut passes = true;
    if from.rules.isolated && to.rules.isolated {
        passes = false;
        way.notes.push(format!("{NOTHING_PASSES} {} and {} are both isolated", from.name, to.name));
        way.hints.push(format!("`ringferry ctl unset {} isolated`, if they are to talk", from.name));
    }
    for (port, other) in [(from, to), (to, from)] {
        if let Some(only) = port.rules.quarantine.as_ref().filter(|only| *only != other.name) {
            passes = false;
            way.notes.push(format!("{NOTHING_PASSES} {} is in quarantine, with {only} alone", port.name));
            way.hints.push(format!("`ringferry ctl release {}`, if that is over", port.name));
        }
    }
    for port in [from, to] {
        if let Some(firewall) = &port.rules.firewall {
            let tries = firewall.policy.as_ref().is_some_and(|policy| policy.draft().dry_run);
            let tried = if tries { ", which is tried out and drops nothing (dry-run)" } else { "" };
            way.notes.push(format!("{} has the firewall {}{tried}", port.name, firewall.name));
            way.hints.push(format!("`ringferry ctl firewall {}`, for what it lets pass", port.name));
        }
    }
    passes &= explain_vlans(way, from, to);
    if let Some(guard) = &from.rules.guard
        && guard.macs.is_empty()
    {
        passes = false;
        way.notes.push(format!("{NOTHING_PASSES} {} may send from no address (allowed_macs)", from.name));
        way.hints.push(format!("`ringferry ctl set {} allowed_macs=ADDRESS`, if it is to send", from.name));
    }
    if passes {
        explain_limits(way, from, to);
    }
    passes
}

/// Adds what a wire has to say, of which at least one of the ports is an end; returns false if it is not one wire with both at its ends.
fn explain_wire(way: &mut Way, from: Ruled<'_>, to: Ruled<'_>) -> bool {
    for (port, other) in [(from, to), (to, from)] {
        let Some(WireEnd { wire, peer, .. }) = &port.rules.wire else { continue };
        if peer != other.name {
            way.notes.push(format!(
                "{NOTHING_PASSES} {} is an end of the wire {wire}, with {peer} at the other",
                port.name
            ));
            way.hints.push(format!("`ringferry ctl wire remove {wire}`, if they are to talk"));
            return false;
        }
    }
    if let Some(WireEnd { wire, impairments, .. }) = &to.rules.wire {
        let settings = wire_settings(impairments);
        let meets = if settings.is_empty() { "no impairments".to_owned() } else { settings };
        way.notes
            .push(format!("the wire {wire}, with {meets}: everything passes as it is, and to nobody else"));
    }
    true
}

fn explain_vlans(way: &mut Way, from: Ruled<'_>, to: Ruled<'_>) -> bool {
    let unlimited = Vlans::default();
    if from.rules.vlans == unlimited && to.rules.vlans == unlimited {
        return true;
    }
    let (sends, takes) = (Membership::new(&from.rules.vlans), Membership::new(&to.rules.vlans));
    let has = |port: &Membership| (0..=MAX_VID).filter(|vid| port.leaves(*vid).is_some()).collect::<Vec<_>>();
    let common: Vec<_> = has(&sends).into_iter().filter(|vid| takes.leaves(*vid).is_some()).collect();
    match common[..] {
        [] => {
            let of = |port: Ruled<'_>, vids: &[Vid]| format!("{} is in {}", port.name, in_words(vids));
            way.notes.push(format!(
                "{NOTHING_PASSES} {} and {}",
                of(from, &has(&sends)),
                of(to, &has(&takes))
            ));
            way.hints.push(format!(
                "`ringferry ctl set {} vlan=VLAN` (or trunk=VLANS), if they are to talk",
                from.name
            ));
            return false;
        }
        [vid] => way.notes.push(format!(
            "only frames of VLAN {vid} pass: {} sends them {}, and {} gets them {}",
            from.name,
            tag(sends.leaves(vid)),
            to.name,
            tag(takes.leaves(vid))
        )),
        _ => way.notes.push(format!("only frames of {} pass", in_words(&common))),
    }
    true
}

fn tag(egress: Option<Egress>) -> &'static str {
    if egress == Some(Egress::Tagged) { "with that tag" } else { "without a tag" }
}

/// VLANs in ascending order, rows of them as ranges.
pub(crate) fn in_words(vids: &[Vid]) -> String {
    let ranges = vids.chunk_by(|one, next| one + 1 == *next).map(|row| match row {
        [first, .., last] => format!("{first}-{last}"),
        _ => row[0].to_string(),
    });
    let ranges: Vec<_> = ranges.collect();
    match vids.len() {
        0 => "no VLAN".to_owned(),
        1 => format!("VLAN {}", ranges[0]),
        _ => format!("VLANs {}", ranges.join(", ")),
    }
}

/// Adds the ingress limits of the sender and the egress limits of the receiver.
fn explain_limits(way: &mut Way, from: Ruled<'_>, to: Ruled<'_>) {
    type Words = fn(&str, &str) -> String;
    let of_sender: [(&str, Words); 6] = [
        ("allowed_macs", |name, value| format!("{name} sends only from {value} (allowed_macs)")),
        ("allowed_ips", |name, value| format!("{name} sends only from {value} (allowed_ips)")),
        ("max_macs", |name, value| format!("at most {value} addresses are learned behind {name} (max_macs)")),
        ("rate_in", |name, value| {
            format!("{name} sends at most {value} (rate_in); the rest waits in its ring")
        }),
        ("rate_in_packets", |name, value| {
            format!("{name} sends at most {value} (rate_in_packets); the rest waits in its ring")
        }),
        ("storm", |name, value| {
            format!("of what {name} sends to groups and unknown addresses at most {value} pass (storm)")
        }),
    ];
    let of_receiver: [(&str, Words); 2] = [
        ("rate_out", |name, value| {
            format!("{name} gets at most {value} (rate_out), from all ports together")
        }),
        ("rate_out_packets", |name, value| {
            format!("{name} gets at most {value} (rate_out_packets), from all ports together")
        }),
    ];
    for (port, limits) in [(from, &of_sender[..]), (to, &of_receiver[..])] {
        let written = rules_by_key(port.rules);
        way.notes.extend(
            limits.iter().filter_map(|(key, words)| Some(words(port.name, &in_short(written.get(*key)?)))),
        );
    }
}

/// Formats a value as it is written with `ringferry ctl set`.
fn in_short(value: &serde_json::Value) -> String {
    match value {
        serde_json::Value::String(text) => text.clone(),
        serde_json::Value::Array(items) if items.is_empty() => "no address".to_owned(),
        serde_json::Value::Array(items) => items.iter().map(in_short).collect::<Vec<_>>().join(", "),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, Edit};

    /// Explains frames from a port with some rules to one with others: whether any pass, and the notes.
    fn said(from: &[&str], to: &[&str]) -> (bool, Vec<String>) {
        let rules = |settings: &[&str]| {
            let settings: Vec<_> = settings.iter().map(|setting| (*setting).to_owned()).collect();
            if settings.is_empty() {
                return Rules::default();
            }
            let port = Config::builder().port_flag("tap:t").build().unwrap().ports.remove(0);
            port.edited(&Edit::set(&settings).unwrap()).unwrap().rules
        };
        let mut way = Way {
            from: "a".into(),
            to: "b".into(),
            traffic: Vec::new(),
            notes: Vec::new(),
            hints: Vec::new(),
        };
        let (a, b) = (rules(from), rules(to));
        let passes = explain(&mut way, Ruled { name: "a", rules: &a }, Ruled { name: "b", rules: &b });
        assert_eq!(passes, way.hints.is_empty() && !way.notes.iter().any(|note| note.starts_with("nothing")));
        (passes, way.notes)
    }

    #[test]
    fn ports_without_rules_are_not_told_of_any() {
        assert_eq!(said(&[], &[]), (true, vec![]));
        assert_eq!(said(&["weight=3"], &["isolated=on"]), (true, vec![]), "nothing that concerns this way");
    }

    #[test]
    fn a_wire_says_what_happens_on_it_and_keeps_others_out() {
        let end = |peer: &str, delay| {
            let impairments = crate::impairments::Impairments { delay, ..Default::default() };
            let (wire, peer) = ("w".to_owned(), peer.to_owned());
            Rules {
                wire: Some(WireEnd { wire, peer, seed: 1, direction: 0, impairments }),
                ..Rules::default()
            }
        };
        let told = |one: &Rules, other: &Rules| {
            let (from, to) = ("a".to_owned(), "b".to_owned());
            let mut way = Way { from, to, traffic: Vec::new(), notes: Vec::new(), hints: Vec::new() };
            let passes =
                explain(&mut way, Ruled { name: "a", rules: one }, Ruled { name: "b", rules: other });
            (passes, way.notes.join("; "), way.hints.join("; "))
        };
        let (passes, notes, hints) = told(&end("b", 5), &end("a", 10_000_000));
        assert_eq!(notes, "the wire w, with delay=10ms: everything passes as it is, and to nobody else");
        assert!(passes && hints.is_empty());
        assert!(told(&end("b", 5), &end("a", 0)).1.starts_with("the wire w, with no impairments"));
        let apart = "nothing passes: a is an end of the wire w, with c at the other".to_owned();
        let hint = "`ringferry ctl wire remove w`, if they are to talk".to_owned();
        assert_eq!(told(&end("c", 0), &Rules::default()), (false, apart, hint));
    }

    #[test]
    fn rules_that_keep_two_ports_apart_are_named() {
        let apart = |from: &[&str], to: &[&str]| {
            let (passes, notes) = said(from, to);
            assert!(!passes && notes.len() == 1, "{notes:?}");
            notes[0].clone()
        };
        assert_eq!(apart(&["isolated=on"], &["isolated=on"]), "nothing passes: a and b are both isolated");
        assert_eq!(
            apart(&["vlan=10"], &["trunk=20-29,31,32", "native=5"]),
            "nothing passes: a is in VLAN 10 and b is in VLANs 5, 20-29, 31-32"
        );
        assert_eq!(apart(&["quarantine=probe"], &[]), "nothing passes: a is in quarantine, with probe alone");
        assert_eq!(apart(&[], &["quarantine=probe"]), "nothing passes: b is in quarantine, with probe alone");
        assert_eq!(said(&["quarantine=b"], &[]), (true, vec![]));
        assert_eq!(apart(&["vlan=10"], &["vlan=11"]), "nothing passes: a is in VLAN 10 and b is in VLAN 11");
        assert!(apart(&["allowed_macs=none"], &[]).contains("from no address"));
    }

    #[test]
    fn the_vlans_that_pass_and_their_tags_are_named() {
        let one = |from: &[&str], to: &[&str]| said(from, to).1.concat();
        assert_eq!(
            one(&["vlan=10"], &[]),
            "only frames of VLAN 10 pass: a sends them without a tag, and b gets them with that tag"
        );
        assert_eq!(
            one(&["trunk=9,10"], &["vlan=10"]),
            "only frames of VLAN 10 pass: a sends them with that tag, and b gets them without a tag"
        );
        assert_eq!(one(&["trunk=1-20,30"], &["trunk=19-40"]), "only frames of VLANs 19-20, 30 pass");
        assert_eq!(one(&["native=none", "trunk=all"], &[]), "only frames of VLANs 1-4094 pass");
    }

    #[test]
    fn limits_are_those_of_the_way_of_the_frame() {
        let limits = [
            "rate_in=1gbit",
            "rate_out=2gbit",
            "storm=1kpps",
            "max_macs=8",
            "allowed_macs=52:54:00:00:00:01",
        ];
        let (passes, sent) = said(&limits, &[]);
        assert!(passes && sent.len() == 4, "{sent:?}");
        assert!(sent.iter().any(|note| note.contains("a sends at most 1gbit (rate_in)")), "{sent:?}");
        let (_, received) = said(&[], &limits);
        assert_eq!(received, ["b gets at most 2gbit (rate_out), from all ports together"]);
    }
}
