//! Packets that are dropped, by their reasons.

use ringferry_control::snapshot::{PortSnapshot, PortState, QueueRole, Rates};
use ringferry_control::why::Effect;
use ringferry_control::{CountedAt, DropReason};

use super::{Findings, Known, count, load, percent, recent};

/// Drops that are no loss: that is what the switch is for, and nothing is wrong.
const WANTED: [DropReason; 4] =
    [DropReason::Filtered, DropReason::SamePort, DropReason::Quarantine, DropReason::WireLoss];

/// Says for each reason for which a port has dropped packets in the last ten seconds which part of its packets that was, and what to do. Drops that were long ago are notes.
pub(super) fn look(known: &Known<'_>, port: &PortSnapshot, findings: &mut Findings) {
    let PortSnapshot { name, .. } = port;
    for reason in DropReason::ALL {
        let total = port.drops.get(reason.name()).copied().unwrap_or(0);
        if total == 0 {
            continue;
        }
        let situation = format!("drops-{}", reason.name());
        let has_some = |rates: &&Rates| dropped(rates, reason) > 0.0;
        // What was repaired half a minute ago is not what is wrong.
        let is_up = port.state == PortState::Up;
        let Some(rates) = recent(port).filter(has_some) else {
            // While a guest boots everybody loses some.
            if reason == DropReason::LinkDown
                && is_up
                && !port.rates_over(60).is_some_and(|rates| has_some(&rates))
            {
                continue;
            }
            let were = if total == 1 { "packet was" } else { "packets were" };
            let (when, remedy) = if reason == DropReason::LinkDown && is_up {
                ("It was not up then, and is now.", "Nothing, if it was down for a reason.".to_owned())
            } else {
                (reason.meaning(), remedy(known, reason, port))
            };
            findings.add(
                &situation,
                Effect::Notes,
                0.0,
                format!(
                    "{total} {were} dropped at {name} as `{}`, none of them in the last ten seconds. {when}",
                    reason.name()
                ),
                remedy,
            );
            continue;
        };
        let (rate, from_port) = (dropped(rates, reason), rates.counter("rx_packets"));
        // What was dropped on its way into the port is not in tx_packets.
        let lost = DropReason::ALL.into_iter().filter(|reason| reason.counted_at() == CountedAt::Receiver);
        let for_port = rates.counter("tx_packets") + lost.map(|reason| dropped(rates, reason)).sum::<f64>();
        let (whose, all) = match reason.counted_at() {
            CountedAt::Sender => (Some("from"), from_port),
            CountedAt::Receiver => (Some("for"), for_port),
            // Nobody knows of which of the two it is a part.
            CountedAt::Either => (None, from_port + for_port),
        };
        let share = if all > rate { 100.0 * rate / all } else { 100.0 };
        let what = match whose {
            Some(of) => format!("{} of the packets {of} {name}", percent(share)),
            None => format!("Packets from or for {name}"),
        };
        // They were, until it came up, or nobody was in quarantine any more.
        let over = match reason {
            DropReason::LinkDown if is_up && !port.rates_over(1).is_some_and(|rates| has_some(&rates)) => {
                Some(("it was not up", "Nothing, if its guest or interface has just come up."))
            }
            DropReason::Quarantine if !is_anybody_apart(known) => {
                Some(("a port was in quarantine", "Nothing: no port is in quarantine any more."))
            }
            _ => None,
        };
        if let Some((meanwhile, remedy)) = over {
            findings.add(
                &situation,
                Effect::Notes,
                0.0,
                format!(
                    "{total} packets from or for {name} were dropped as `{}` while {meanwhile}, the last of them within these seconds.",
                    reason.name()
                ),
                remedy,
            );
            continue;
        }
        let effect = if WANTED.contains(&reason) { Effect::Notes } else { Effect::Loses };
        findings.add(
            &situation,
            effect,
            share,
            format!(
                "{what} are dropped as `{}`, {} a second. {}",
                reason.name(),
                count(rate),
                reason.meaning()
            ),
            remedy(known, reason, port),
        );
    }
}

/// Returns true if a port is in quarantine.
fn is_anybody_apart(known: &Known<'_>) -> bool {
    known.snapshot.ports.iter().any(|port| (known.rules)(&port.name).quarantine.is_some())
}

/// Packets a second that were dropped for a reason.
fn dropped(rates: &Rates, reason: DropReason) -> f64 {
    rates.drops.get(reason.name()).copied().unwrap_or(0.0)
}

/// What to do about a reason at this port.
fn remedy(known: &Known<'_>, reason: DropReason, port: &PortSnapshot) -> String {
    let receiveq = port.queues.iter().find(|queue| queue.role == QueueRole::Receiveq);
    match (reason, receiveq) {
        (DropReason::NoReceiveBuffers, _) if port.queues.iter().any(|queue| queue.stalled.is_some()) => {
            "Its guest takes none: see whether it hangs or is paused.".to_owned()
        }
        (DropReason::NoReceiveBuffers, queue) => {
            // Whoever floods it is what to look at first.
            let bound = load::loudest(known, port);
            let bound = bound.map_or_else(String::new, |flood| format!("{} ", load::bound(known, flood)));
            let ring = queue.filter(|queue| queue.size < 1024);
            let ring = ring.map_or_else(String::new, |queue| {
                format!(" Its receive ring has {} entries now.", queue.size)
            });
            format!("{bound}{}{ring}", reason.remedy())
        }
        (DropReason::RateOut, _) => {
            let remedy = reason.remedy_at(&port.name);
            match load::limits(port, &["rate_out", "rate_out_packets"]) {
                limits if limits.is_empty() => remedy,
                limits => format!("{} is at its limit, {limits}. {remedy}", port.name),
            }
        }
        _ => reason.remedy_at(&port.name),
    }
}
