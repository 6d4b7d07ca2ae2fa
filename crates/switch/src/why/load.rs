//! Rings, rates, work that is done in software, and the workers that do it.

use ringferry_control::snapshot::{
    Negotiated, PortSnapshot, PortState, QueueRole, QueueSnapshot, Rates, WorkerLoad,
};
use ringferry_control::text::bit_rate;
use ringferry_control::why::Effect;
use ringferry_control::{CountedAt, DropReason};
use ringferry_packet::vnet::Offloads;

use super::{Findings, Known, WINDOW, count, percent, recent, states, ways};
use crate::explain::{Abilities, Plug};
use crate::rules::Rate;

/// A share of the time, or of what passes, from which on it is worth a sentence, in percent.
const NOTEWORTHY: f64 = 1.0;

/// Load of a worker, in percent, from which on it has little time left.
const BUSY: f64 = 80.0;

/// Share of the time, in percent, from which on it matters that a worker waits for a processor. A machine with a few other programs has 1 or 2 %.
const DELAYED: f64 = 5.0;

/// Packets a second from which on their batches matter.
const MANY: f64 = 5_000.0;

/// Packets a second that are lost at one port from which on whoever sends most of them is told.
const MANY_LOST: f64 = 1_000.0;

/// Frames a second to every port from which on they are no accident: resolution of addresses and discovery of services take a few.
const FLOOD: f64 = 1_000.0;

/// Kicks without a packet within the window from which on they are no accident.
const MANY_KICKS: f64 = 5.0;

/// Bits a second from which on work in software matters.
const MUCH: f64 = 1e6;

/// Looks at the load of one port.
pub(super) fn look(known: &Known<'_>, port: &PortSnapshot, findings: &mut Findings) {
    // Of memory that the switch does not see it cannot tell more.
    let is_blind = states::has_blind_rings(port);
    let is_stalled = is_blind || look_at_stalls(port, findings);
    look_at_rings(port, is_stalled, findings);
    look_at_workers(known, port, findings);
    let Some(rates) = recent(port) else { return };
    if !is_stalled {
        look_at_buffers(known, port, rates, findings);
    }
    look_at_floods(port, rates, findings);
    look_at_overruns(known, port, findings);
    look_at_limits(known, port, rates, findings);
    look_at_software(port, rates, findings);
    if !is_blind {
        look_at_notifications(port, rates, findings);
        look_at_silence(port, findings);
    }
}

/// A guest that takes no packets. Returns true if it is so: then it has no buffers because of that.
fn look_at_stalls(port: &PortSnapshot, findings: &mut Findings) -> bool {
    let running =
        |queue: &&QueueSnapshot| queue.role == QueueRole::Receiveq && queue.started && queue.enabled;
    let receiveqs = port.queues.iter().filter(running);
    let stalled: Vec<_> = receiveqs.clone().filter_map(|queue| Some((queue.index, queue.stalled?))).collect();
    let Some((index, stall)) = stalled.iter().max_by_key(|(_, stall)| stall.seconds) else { return false };
    let (name, all) = (&port.name, receiveqs.count());
    let which = match (stalled.len(), all) {
        (1, 1) => format!(" from its receiveq {index}"),
        (some, all) => format!(" from {some} of its {all} receiveqs, as from receiveq {index}"),
    };
    let entries = match stall.entries {
        0 => "It has posted no buffers".to_owned(),
        1 => "1 entry that the switch has used lies there".to_owned(),
        entries => format!("{entries} entries that the switch has used lie there"),
    };
    findings.add(
        "guest-stalled",
        if stalled.len() == all { Effect::Stops } else { Effect::Loses },
        100.0,
        format!("The guest of {name} has taken no packets{which} for {} s. {entries}.", stall.seconds),
        "See whether the guest hangs or is paused (`virsh domstate`; `ps -o stat` of its VMM says T for a process that was stopped), and whether its vCPUs get processors. If one of several queues is stalled, \
         see in the guest whether its interrupt is served (`/proc/interrupts`).",
    );
    true
}

/// Rings as they are at this moment.
fn look_at_rings(port: &PortSnapshot, is_stalled: bool, findings: &mut Findings) {
    for queue in port.queues.iter().filter(|queue| queue.runs()) {
        let (Some(available), name) = (queue.available, &port.name) else { continue };
        match queue.role {
            QueueRole::Receiveq if available == 0 && !is_stalled => findings.add(
                "no-buffers-posted",
                Effect::Loses,
                0.0,
                format!("{name} has no buffer in its receiveq {} at this moment: the next packet for it is lost.", queue.index),
                "See whether the guest runs and has a processor: its driver posts buffers when it handles the interrupt.",
            ),
            QueueRole::Transmitq if queue.size > 0 && available == queue.size => findings.add(
                "transmit-ring-full",
                Effect::Slows,
                0.0,
                format!("The transmitq {} of {name} is full at this moment: the guest waits for the switch.", queue.index),
                "See whether a rate_in holds it back, or its worker is busy.",
            ),
            _ => {}
        }
    }
}

/// How often the guest had no buffers.
fn look_at_buffers(known: &Known<'_>, port: &PortSnapshot, rates: &Rates, findings: &mut Findings) {
    let (time, bursts) = (rates.percent_of_time("tx_starved_microseconds"), rates.counter("tx_bursts"));
    let ran_out = if bursts > 0.0 { 100.0 * rates.counter("tx_starved") / bursts } else { 0.0 };
    if time.max(ran_out) < NOTEWORTHY {
        return;
    }
    let size = port.queues.iter().find(|queue| queue.role == QueueRole::Receiveq).map(|queue| queue.size);
    // Whoever floods it is not to be overlooked for the guest that cannot follow.
    let flood = loudest(known, port);
    let flooded = flood.map_or_else(String::new, |(name, rate, share)| {
        format!(
            " Of all that comes from ports which {} can hear, {} is of {name}, {} packets a second.",
            port.name,
            percent(share),
            count(rate)
        )
    });
    let ring = size.map_or_else(String::new, |size| format!(", with a ring of {size}"));
    let calls = rates.counter("calls");
    let late = if calls > 0.0 {
        format!(
            "It is told by {} interrupts a second, and takes packets out of its ring too late.",
            count(calls)
        )
    } else {
        "It takes packets out of its ring too late.".to_owned()
    };
    findings.add(
        "out-of-buffers",
        Effect::Loses,
        time.max(ran_out),
        format!(
            "{} had no receive buffers for {} of the time, and ran out of them in {} of the bursts for it{ring}. {late}{flooded}",
            port.name,
            percent(time),
            percent(ran_out)
        ),
        format!(
            "{}Give the guest {}more queue pairs with vCPUs of their own (`ethtool -L eth0 combined N`). A `rate_out` of its port spares the guest, and drops what is wanted as well. Look at `si` of `top` in the guest.",
            flood.map_or_else(String::new, |flood| format!("{} ", bound(known, flood))),
            // The largest that QEMU has.
            if size.is_some_and(|size| size >= 1024) { "" } else { "a larger ring (`rx_queue_size=1024` in QEMU), " }
        ),
    );
}

/// The command that bounds a port which sends more than another can take.
pub(super) fn bound(known: &Known<'_>, (name, rate, _): Loudest<'_>) -> String {
    let mut ports = known.snapshot.ports.iter();
    let sent = ports.find(|port| port.name == name).and_then(recent);
    if sent.is_some_and(|rates| rates.counter("rx_flooded") > rate / 2.0) {
        return format!(
            "If {name} is not to send so much to everybody, `ringferry ctl set {name} storm=1kpps` bounds that alone."
        );
    }
    // A tenth of what it sends now, in whole thousands.
    let less = (rate / 10_000.0).ceil();
    format!(
        "If {name} is not to send so much, `ringferry ctl set {name} rate_in_packets={less:.0}kpps` bounds it, to a tenth, and nobody else."
    )
}

/// What others lose as this port sends more than they take.
fn look_at_overruns(known: &Known<'_>, port: &PortSnapshot, findings: &mut Findings) {
    for other in known.snapshot.ports.iter().filter(|other| other.name != port.name) {
        let dropped =
            recent(other).and_then(|rates| rates.drops.get("no-receive-buffers").copied()).unwrap_or(0.0);
        if dropped < MANY_LOST {
            continue;
        }
        let Some(flood) = loudest(known, other).filter(|(name, ..)| *name == port.name) else { continue };
        let (_, rate, share) = flood;
        findings.add(
            "overruns",
            Effect::Loses,
            share,
            format!(
                "{} sends {} packets a second, {} of all that comes from ports which {} can hear, and at {} {} a second are dropped for want of receive buffers, whoever has sent them.",
                port.name,
                count(rate),
                percent(share),
                other.name,
                other.name,
                count(dropped)
            ),
            bound(known, flood),
        );
    }
}

/// A port that sends many packets: its name, packets a second, and its share of what all send but one, in percent.
pub(super) type Loudest<'s> = (&'s str, f64, f64);

/// Of the ports that this one can hear, the one that sends most, if it sends many packets, and most of all. What is dropped where it comes from reaches nobody.
pub(super) fn loudest<'s>(known: &Known<'s>, port: &PortSnapshot) -> Option<Loudest<'s>> {
    let own = Abilities::of(port)?;
    let others = known.snapshot.ports.iter().filter(|other| other.name != port.name);
    let can_hear = |other: &&PortSnapshot| {
        Abilities::of(other).is_some_and(|other| !ways::are_apart(known, &other, &own))
    };
    let rate = |other: &'s PortSnapshot| {
        let rates = recent(other)?;
        let stopped = DropReason::ALL.into_iter().filter(|reason| reason.counted_at() != CountedAt::Receiver);
        let stopped: f64 = stopped.filter_map(|reason| rates.drops.get(reason.name())).sum();
        Some((other.name.as_str(), (rates.counter("rx_packets") - stopped).max(0.0)))
    };
    let rates: Vec<_> = others.filter(can_hear).filter_map(rate).collect();
    let all: f64 = rates.iter().map(|(_, rate)| rate).sum();
    let (name, rate) = rates.into_iter().max_by(|(_, one), (_, other)| one.total_cmp(other))?;
    (rate >= MANY && rate > all / 2.0).then(|| (name, rate, 100.0 * rate / all))
}

/// What the port sends to everybody.
fn look_at_floods(port: &PortSnapshot, rates: &Rates, findings: &mut Findings) {
    let (name, flooded) = (&port.name, rates.counter("rx_flooded"));
    if flooded < FLOOD {
        return;
    }
    let share = 100.0 * flooded / rates.counter("rx_packets").max(flooded);
    let bound = match port.rules.get("storm").and_then(|storm| storm.as_str()) {
        Some(storm) => format!("These are what `storm={storm}` lets pass; a lower one bounds them further."),
        None => format!("`ringferry ctl set {name} storm=RATE` bounds them, in packets a second."),
    };
    findings.add(
        "floods",
        Effect::Slows,
        share,
        format!(
            "{} of the packets from {name}, {} a second, are for everybody or for addresses that the switch does not know: every port of their VLAN that may hear from {name} gets them.",
            percent(share),
            count(flooded)
        ),
        format!(
            "{bound} To see what they are: `ringferry capture {name} | tcpdump -nr -`. If they are for one machine that never sends, `ringferry ctl fdb add MAC PORT` says where it is."
        ),
    );
}

/// Returns those of these limits that the port has, as they are set; empty if it has none.
pub(super) fn limits(port: &PortSnapshot, keys: &[&str]) -> String {
    let set = keys.iter().filter_map(|key| Some(format!("{key}={}", port.rules.get(*key)?.as_str()?)));
    set.collect::<Vec<_>>().join(", ")
}

/// Limits of the port that are reached.
fn look_at_limits(known: &Known<'_>, port: &PortSnapshot, rates: &Rates, findings: &mut Findings) {
    let rule = |keys: &[&str]| limits(port, keys);
    let (name, paused) = (&port.name, rates.percent_of_time("rx_paused_microseconds"));
    // A limit that was taken away holds nobody back.
    let rate_out = rule(&["rate_out", "rate_out_packets"]);
    // Of two limits the one that it is nearer to.
    let limits = (known.rules)(name).rate_in;
    let rate_in = match (limits.bytes, limits.packets) {
        (Some(bytes), Some(packets)) => {
            let used = |counter, limit: Rate| rates.counter(counter) / limit.per_second as f64;
            let by_bytes = used("rx_bytes", bytes) > used("rx_packets", packets);
            rule(&[if by_bytes { "rate_in" } else { "rate_in_packets" }])
        }
        _ => rule(&["rate_in", "rate_in_packets"]),
    };
    if paused >= NOTEWORTHY && !rate_in.is_empty() {
        // A guest's ring holds it back. The queue of an interface of the host is full after 500 packets, and the host drops what comes then.
        let (effect, host) = match &port.negotiated {
            Negotiated::Tap(_) => (
                Effect::Loses,
                format!(
                    " What does not fit into the queue of {} meanwhile is dropped by the host (`ip -s link show {}`).",
                    port.peer, port.peer
                ),
            ),
            _ => (Effect::Slows, String::new()),
        };
        findings.add(
            "paused-by-rate-in",
            effect,
            paused,
            format!("{name} has to wait {} of the time because of {rate_in}.{host}", percent(paused)),
            format!(
                "Raise the limit, if the guest is to send more: `ringferry ctl set {name} {}=RATE`.",
                rate_in.split('=').next().unwrap_or_default()
            ),
        );
    }
    let held = rates.percent_of_time("rx_held_microseconds");
    if held >= NOTEWORTHY {
        findings.add(
            "held-by-worker",
            Effect::Slows,
            held,
            format!("{name} has to wait {} of the time for a worker that it sends to and that is behind.", percent(held)),
            "See which worker is busy, or not let run: `ringferry ctl show`, `ringferry ctl why`. Add workers, or put the pairs that talk to each other on one: `ringferry ctl assign PORT PAIR WORKER`.",
        );
    }
    let marked = rates.counter("tx_marked");
    if marked > 0.0 && !rate_out.is_empty() {
        let share = 100.0 * marked / rates.counter("tx_packets").max(marked);
        findings.add(
            "marked-by-rate-out",
            Effect::Slows,
            share,
            format!(
                "{} of the packets for {name} are marked (ECN), {} a second, because they have waited too long for {rate_out}.",
                percent(share),
                count(marked)
            ),
            format!("Nothing: it tells senders how fast they may be. Raise the limit, if the guest is to receive more: `ringferry ctl set {name} rate_out=RATE`."),
        );
    }
}

/// Work that the switch does in the place of a guest's missing offloads.
fn look_at_software(port: &PortSnapshot, rates: &Rates, findings: &mut Findings) {
    let Some(abilities) = Abilities::of(port) else { return };
    let (name, all) = (&port.name, rates.bits("tx_bytes"));
    let share = |bits: f64| if all > 0.0 { 100.0 * bits / all } else { 100.0 };
    let cut = rates.bits("tx_segmented_bytes");
    if cut >= MUCH {
        let lacks = if abilities.takes.intersects(Offloads::TSO4 | Offloads::TSO6) {
            "not all of TSO and USO"
        } else {
            "no TSO"
        };
        findings.add(
            "segmented-in-software",
            Effect::Slows,
            share(cut),
            format!("{} for {name} are cut into segments by the switch, as {name} takes {lacks}.", bit_rate(cut)),
            match abilities.plug {
                Plug::VhostUser => "Set guest_tso4=on,guest_tso6=on,guest_uso4=on,guest_uso6=on for the guest's device (as QEMU has it; an older one knows no guest_uso4), and no tso=off or uso=off for the port.",
                Plug::Xen => "Let the guest's interface offload TCP segments: `ethtool -K DEVICE tx on tso on sg on`.",
                Plug::Tap => "Set offloads=on for the port.",
                Plug::Xdp => BY_AF_XDP,
            },
        );
    }
    let summed = rates.bits("tx_checksummed_bytes");
    if summed >= MUCH {
        findings.add(
            "checksummed-in-software",
            Effect::Slows,
            share(summed),
            format!("The switch computes checksums over {} for {name}, every byte once more, as {name} needs them finished.", bit_rate(summed)),
            match abilities.plug {
                Plug::VhostUser => "Set guest_csum=on for the guest's device (as QEMU has it), and no csum=off for the port.",
                Plug::Xen => "Let the guest's interface offload checksums: `ethtool -K DEVICE rx on tx on`.",
                Plug::Tap => "Set offloads=on for the port.",
                Plug::Xdp => BY_AF_XDP,
            },
        );
    }
}

/// What to do about work that the switch does on packets for an interface.
const BY_AF_XDP: &str = "AF_XDP leaves nothing to the interface. Where most of the traffic is TCP, a tap in a bridge with the interface (`tap:NAME,bridge=BRIDGE`) may carry more.";

/// Notifications and batches.
fn look_at_notifications(port: &PortSnapshot, rates: &Rates, findings: &mut Findings) {
    let (name, packets, bursts) = (&port.name, rates.counter("rx_packets"), rates.counter("rx_bursts"));
    if packets >= MANY && bursts > 0.0 && packets / bursts < 1.5 {
        let batch = packets / bursts;
        findings.add(
            "small-batches",
            Effect::Slows,
            20.0,
            format!("The {} packets a second from {name} come {batch:.1} at a time, with {} kicks: each of them wakes somebody.", count(packets), count(rates.counter("kicks"))),
            "One request at a time cannot do better. If several queue pairs carry little each, one with all of it is cheaper: `ethtool -L eth0 combined 1` in the guest.",
        );
    }
    // A ring is kicked when it is started, and by a guest that has seen no packet of it taken; one of which packets were taken is merely idle.
    let (kicks, ever) = (rates.counter("kicks"), port.counters.get("rx_packets").copied().unwrap_or(0));
    if port.state == PortState::Up && kicks * rates.seconds >= MANY_KICKS && ever == 0 {
        findings.add(
            "kicks-without-packets",
            Effect::Notes,
            60.0,
            format!("The guest of {name} kicks {} times a second, and there is nothing in its rings.", count(kicks)),
            "If it believes that it sends, the switch does not see its memory: `share=on` is missing at the VMM's memory.",
        );
    }
}

/// A port that is up, and silent.
fn look_at_silence(port: &PortSnapshot, findings: &mut Findings) {
    let Some(minute) = port.rates_over(60) else { return };
    let (name, enough) = (&port.name, minute.seconds >= WINDOW as f64);
    let moved = minute.counter("rx_packets");
    if port.state == PortState::Up && enough && moved == 0.0 && minute.counter("kicks") == 0.0 {
        let received = minute.counter("tx_packets");
        let other = if received > 0.0 {
            format!("It has received {} a second meanwhile.", count(received))
        } else {
            "It has received nothing either.".to_owned()
        };
        findings.add(
            "sends-nothing",
            Effect::Notes,
            40.0,
            format!("{name} has sent nothing for {:.0} s. {other}", minute.seconds),
            "See whether the guest is running, and its interface is up.",
        );
    }
}

/// The workers that serve a port.
fn look_at_workers(known: &Known<'_>, port: &PortSnapshot, findings: &mut Findings) {
    let workers = &known.snapshot.workers;
    let load = |number: usize| workers.get(number).and_then(|worker| worker.load_over(WINDOW));
    let mut served: Vec<usize> = port.pairs.iter().map(|pair| pair.worker.into()).collect();
    served.sort_unstable();
    served.dedup();
    let idle = (0..workers.len()).filter_map(|number| Some((number, load(number)?.busy_percent)));
    let idlest = idle.min_by(|(_, one), (_, other)| one.total_cmp(other));
    for number in served {
        look_at_delay(number, load(number), port, findings);
        // Time in which it had frames and no processor is no work: that is the finding above.
        let works = |load: &&WorkerLoad| load.busy_percent - load.run_delay_percent >= BUSY;
        let Some(WorkerLoad { busy_percent, .. }) = load(number).filter(works) else {
            continue;
        };
        let name = &port.name;
        let by_share = load(number).map(WorkerLoad::by_share).unwrap_or_default();
        let most = by_share.first().map_or_else(String::new, |(most, share)| {
            format!(", {} of it with what {} sends", percent(*share), if most == name { "it" } else { most })
        });
        let pair =
            port.pairs.iter().find(|pair| usize::from(pair.worker) == number).map_or(0, |pair| pair.pair);
        let remedy = match idlest {
            // Those of a tap stay where they are, one queue with each worker.
            Some((other, busy)) if other != number && busy < BUSY / 2.0 && !matches!(port.negotiated, Negotiated::Tap(_)) => format!(
                "Move a pair to worker {other}, which is {} busy: `ringferry ctl assign {name} {pair} {other}`.",
                percent(busy)
            ),
            _ => "Give the switch more workers (`workers` in `[switch]`) and the guest more queue pairs; `weight` shares a worker that is full.".to_owned(),
        };
        findings.add(
            "worker-busy",
            Effect::Slows,
            *busy_percent,
            format!("Worker {number}, which serves {name}, is {} busy{most}.", percent(*busy_percent)),
            remedy,
        );
    }
}

/// A worker that is not let run.
fn look_at_delay(number: usize, load: Option<&WorkerLoad>, port: &PortSnapshot, findings: &mut Findings) {
    let Some(delay) = load.map(|load| load.run_delay_percent).filter(|delay| *delay >= DELAYED) else {
        return;
    };
    findings.add(
        "worker-delayed",
        Effect::Slows,
        delay,
        format!(
            "Worker {number}, which serves {}, had to wait for a processor {} of the time: packets wait meanwhile.",
            port.name,
            percent(delay)
        ),
        "See what else runs on the host (`top -H`), and whether the switch has a limit on CPU time (`CPUQuota=` of its unit, `cpu.max` of its cgroup: `cpu.stat` there counts `nr_throttled`). \
         Give it processors of its own (`CPUAffinity=`), or a larger share (`CPUWeight=`, `Nice=`).",
    );
}

/// Looks at what all ports share.
pub(super) fn look_at_switch(known: &Known<'_>, findings: &mut Findings) {
    for trouble in &known.snapshot.troubles {
        findings.add(
            "switch-troubled",
            Effect::Notes,
            95.0,
            format!("Of the switch itself: {trouble}."),
            "Packets pass meanwhile. The command that is named there mends it, without a loss.",
        );
    }
    let fdb = &known.snapshot.fdb;
    let (entries, capacity) = (fdb.addresses(), fdb.capacity as u64);
    let is_nearly = |count: u64, of: u64| of > 0 && count >= of / 10 * 9;
    let Some((port, &count)) = fdb.behind.iter().max_by_key(|(_, count)| **count) else { return };
    // A port gets no more than half of the table.
    if is_nearly(entries, capacity) || is_nearly(count, capacity / 2) {
        findings.add(
            "addresses-full",
            Effect::Slows,
            50.0,
            format!("The switch knows {entries} MAC addresses, {count} of them behind {port}, and has room for {capacity}, half of them behind one port. What is for an address that it does not know goes to every port."),
            format!("If {port} floods addresses, `ringferry ctl set {port} max_macs=N static_macs=MAC` bounds it and keeps a place for its own, and `ringferry ctl fdb flush --port {port}` forgets the others. If they are machines, raise mac_table_size in `[switch]`."),
        );
    }
}
