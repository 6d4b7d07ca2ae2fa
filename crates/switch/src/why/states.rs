//! Ports that carry nothing, and why.

use std::time::Duration;

use ringferry_control::snapshot::{
    FdbEntry, FdbLost, FdbRestless, FdbSnapshot, Negotiated, PortSnapshot, PortState, QueueRole,
    QueueSnapshot, SessionEnd,
};
use ringferry_control::why::{Effect, NOT_CONNECTED, OUT_OF_SERVICE};

use super::{Findings, Known, recent, times};
use crate::ports::tap::{BRIDGE_DOWN, INTERFACE_AWAY, INTERFACE_LOST, INTERFACE_MOVED, NO_BRIDGE};
use crate::ports::vhost::control::{MEMORY_REFUSED, SOCKET_REMOVED, SOCKET_REPLACED};
use crate::ports::vhost::device::QUEUE_SIZE_ALLOWS;
use crate::ports::xdp::NO_CARRIER;
use crate::stalls::is_start;

/// Looks for states in which a port carries nothing.
pub(super) fn look(known: &Known<'_>, port: &PortSnapshot, findings: &mut Findings) {
    let PortSnapshot { name, peer, .. } = port;
    // Before what is said of this moment.
    look_at_connections(port, findings);
    if port.state == PortState::Broken {
        look_at_broken(port, findings);
    }
    let mut stops = |situation, text: String, remedy: &str| {
        findings.add(situation, Effect::Stops, 100.0, text, remedy);
    };
    let is_tap = port.negotiated.is_interface();
    match port.state {
        PortState::Up if has_blind_rings(port) => stops(
            "memory-not-seen",
            format!(
                "The guest of {name} has never posted a buffer nor sent a packet since its rings were started: most likely its VMM has shared a copy of the memory, which the guest does not write to."
            ),
            "`share=on` at the VMM's memory: `-object memory-backend-memfd,id=mem,size=SIZE,share=on` (QEMU), `<access mode='shared'/>` (libvirt). It counts from the VMM's next start.",
        ),
        PortState::Up => {}
        // The fault below says why nobody can connect.
        PortState::Listening if port.fault.is_some() => {}
        PortState::Listening if port.ended.is_some() => {}
        PortState::Listening => stops(
            NOT_CONNECTED,
            format!("No front end is connected to {name}, at {peer}."),
            "Start the VM. If it runs, compare the path of its socket, and see whether its user may write to the socket.",
        ),
        PortState::Connecting => stops(
            "connecting",
            format!("{name} connects to {peer}, where nobody listens."),
            "Start the VM with `server=on` at its socket. The switch tries again for as long as it takes.",
        ),
        // The fault below says what became of it, where that is more than a setting.
        PortState::Down if is_tap && port.fault.as_ref().is_some_and(|fault| !is_setting(fault)) => {}
        PortState::Down if is_tap => stops(
            "interface-down",
            format!("The interface of {name} ({peer}) is down."),
            &match port.negotiated {
                Negotiated::Tap(_) => format!("`ip link set {peer} up`, or `up=on` at the port."),
                _ => format!("`ip link set {peer} up`."),
            },
        ),
        // The fault below says why.
        PortState::Down if port.fault.is_some() && port.queues.is_empty() => {}
        PortState::Down if port.fault.as_ref().is_some_and(|fault| fault.starts_with(MEMORY_REFUSED)) => {}
        PortState::Down if port.queues.iter().any(|queue| queue.started && queue.enabled) => {}
        PortState::Down if port.stopped_seconds.is_some() => stops(
            "rings-stopped",
            format!(
                "The front end of {name} has stopped its rings {} s ago, which ran before: the guest is paused or shut down, its link is off, or its driver has let go of the device.",
                port.stopped_seconds.unwrap_or_default()
            ),
            "See whether the guest is paused (`virsh domstate`, `info status` in QEMU's monitor: `cont` goes on) and its link is on (`set_link NIC on`); in the guest `ip link set eth0 up`.",
        ),
        PortState::Down if let Some(silent) = port.front_end.filter(|front_end| !front_end.heard) => stops(
            "front-end-silent",
            format!("A front end has connected to {name}, {}, and has sent no message.", silent.to_text()),
            "A VMM speaks at once. See what that process is (`ps -fp PID`): nobody else is served on this port until it disconnects.",
        ),
        PortState::Down => stops(
            "driver-not-started",
            format!("The driver of the guest of {name} has not started the device."),
            "Wait for the guest to boot, and in the guest `ip link set eth0 up`. See whether its VMM still runs.",
        ),
        PortState::NoMemory => stops(
            "memory-not-shared",
            format!(
                "The guest of {name} has started its device, and its VMM does not share the guest's memory."
            ),
            "QEMU: `-object memory-backend-memfd,id=mem,size=SIZE,share=on -machine memory-backend=mem`. \
             libvirt: `<memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking>`.",
        ),
        // Said above.
        PortState::Broken => {}
        PortState::AdminDown => stops(
            "taken-down",
            format!("Somebody has taken the link of {name} down."),
            &format!("`ringferry ctl link {name} up`."),
        ),
    }
    if let Some(SessionEnd { why, seconds }) = port.ended.as_ref().filter(|_| port.state != PortState::Up) {
        stops(
            "connection-ended",
            format!(
                "The switch has ended the connection of the last front end of {name}, {seconds} s ago: {why}{}",
                if why.ends_with('?') { "" } else { "." }
            ),
            "Mend that, then connect again: a VMM with `reconnect=1` does so by itself. The log has such ends, of many a few.",
        );
    }
    if (known.is_drained)(name) {
        stops(
            "drained",
            format!("{name} is being drained, and is removed then."),
            "Nothing, if that is wanted. `ringferry ctl add` brings the port back.",
        );
    }
    // What the state says already need not be said again.
    if let Some(fault) = port.fault.as_ref().filter(|_| !is_tap && port.state != PortState::NoMemory) {
        let next = if fault.starts_with(SOCKET_REMOVED) {
            "Find out who did that: a script that cleans up, or a second program with the same path. Then `ringferry ctl reload`: whoever is connected stays.".to_owned()
        } else if fault.starts_with(SOCKET_REPLACED) {
            "See whose file that is (`ls -l`, and `ss -xlp` for a socket): a second program with the same path gets the front ends that connect. End that program, or remove the file, then `ringferry ctl reload`: whoever is connected stays.".to_owned()
        } else if fault.starts_with(MEMORY_REFUSED) {
            "Once there is room for it, its front end has to share its memory again: connect it anew (restart the machine, or unplug its interface and plug it in).".to_owned()
        } else {
            "The port serves again by itself once the cause has gone.".to_owned()
        };
        // Whoever is connected goes on.
        let (effect, whom) = match port.state {
            PortState::Up => (Effect::Notes, "nobody else"),
            _ => (Effect::Stops, "nobody"),
        };
        findings.add(
            OUT_OF_SERVICE,
            effect,
            90.0,
            format!("{name} serves {whom}: {fault}."),
            format!("{next} docs/operating.md has a row for each fault, below the table of states."),
        );
    }
    // Somebody has deleted the interface, or renamed it or moved it to where packets still pass.
    if let Some(fault) = port.fault.as_ref().filter(|_| is_tap) {
        findings.add(
            OUT_OF_SERVICE,
            match port.state {
                PortState::Up if fault.starts_with(INTERFACE_AWAY) => Effect::Notes,
                PortState::Up => Effect::Loses,
                _ => Effect::Stops,
            },
            100.0,
            format!("{name}: {fault}."),
            if fault.contains(INTERFACE_MOVED) {
                format!("Rename it back while it is down (`ip link set NAME name {peer}`), or move it back (`ip -n NETNS link set NAME netns PID`, with the number of the switch's process). The switch then sets it up as the port has it; without `up` at the port also `ip link set {peer} up`.")
            } else if fault == NO_CARRIER {
                format!("See to the cable, or to whoever has the other end (`ip -details link show {peer}`, `ethtool {peer}`).")
            } else if fault.starts_with(BRIDGE_DOWN) {
                "Set the bridge up, as it says.".to_owned()
            } else if fault.starts_with(INTERFACE_LOST) {
                "Have it set again as it says. `ip monitor link address` shows who changes it.".to_owned()
            } else {
                "Mend the cause: the switch sees it within a second or two. `ip -details link` shows the interfaces, and `ip monitor link` who changes them.".to_owned()
            },
        );
    }
    if let Some(renewed) = (known.renewed)(name).filter(|renewed| *renewed < RENEWED) {
        findings.add(
            "made-anew",
            Effect::Notes,
            90.0,
            format!(
                "The interface of {name} ({peer}) was deleted and made anew {} s ago: addresses, routes and a bridge that were given to it by hand are gone.",
                renewed.as_secs()
            ),
            if matches!(port.negotiated, Negotiated::Tap(_)) {
                "Give them to it again. With `address` and `bridge` at the port the switch does that by itself."
            } else {
                "Give them to it again, if it had any."
            },
        );
    }
    look_at_queues(port, findings);
    look_at_mirrors(known, port, findings);
    look_at_captures(known, port, findings);
    look_at_addresses(known, port, findings);
    look_at_past(port, findings);
}

/// A port of which a ring is broken; the others go on, whatever the state of the port is called.
fn look_at_broken(port: &PortSnapshot, findings: &mut Findings) {
    let PortSnapshot { name, queues, .. } = port;
    let broken = queues.iter().find_map(|queue| Some((queue, queue.broken.as_ref()?)));
    let which = broken.map_or_else(String::new, |(queue, reason)| {
        format!(": queue {}, a {}: {reason}", queue.index, queue.role.name())
    });
    let effect = if queues.iter().any(QueueSnapshot::runs) { Effect::Loses } else { Effect::Stops };
    if which.contains(QUEUE_SIZE_ALLOWS) {
        return findings.add(
            "queue-refused",
            effect,
            100.0,
            format!("A ring of {name} is not served{which}."),
            format!(
                "`ringferry ctl set {name} queue_size=ENTRIES`, or a smaller ring in the VM's configuration (rx_queue_size, tx_queue_size); then stop the VM and start it: a guest that \
                 reboots keeps the connection, and with it what was agreed on."
            ),
        );
    }
    findings.add(
        "queue-broken",
        effect,
        100.0,
        format!("The guest's driver has broken the rules of a ring of {name}{which}."),
        "Reboot the guest, or bind its driver anew: the queue stays broken until then. Report it, if the driver is a released one.",
    );
}

/// Returns true if no ring of a port that runs has ever had an entry. Drivers post receive buffers before they start a device, so the guest has, and the
/// switch looks at other memory than the guest's.
pub(super) fn has_blind_rings(port: &PortSnapshot) -> bool {
    let is_new = |queue: &QueueSnapshot| queue.available == Some(0) && is_start(queue.last_avail);
    let (mut running, mut any) = (port.queues.iter().filter(|queue| queue.runs()), false);
    running.all(|queue| {
        any |= queue.role == QueueRole::Receiveq;
        is_new(queue)
    }) && any
}

/// A port of which one direction runs, and the other does not.
fn look_at_queues(port: &PortSnapshot, findings: &mut Findings) {
    let runs = |role| port.queues.iter().any(|queue| queue.role == role && queue.started && queue.enabled);
    for (role, other) in
        [(QueueRole::Receiveq, QueueRole::Transmitq), (QueueRole::Transmitq, QueueRole::Receiveq)]
    {
        if runs(role) || !runs(other) {
            continue;
        }
        let direction = if role == QueueRole::Receiveq { "to its guest" } else { "from its guest" };
        findings.add(
            "no-queue-runs",
            Effect::Stops,
            100.0,
            format!("No {} of {} runs, so no packet passes {direction}.", role.name(), port.name),
            "See the table of queues in `ringferry ctl show`. The front end enables them when the guest's driver has set them up.",
        );
    }
}

fn look_at_mirrors(known: &Known<'_>, port: &PortSnapshot, findings: &mut Findings) {
    let name = &port.name;
    for mirror in &known.snapshot.mirrors {
        let (from, to) = (&mirror.from, &mirror.to);
        if from == name {
            findings.add(
                "mirrored",
                Effect::Notes,
                0.0,
                format!(
                    "What passes {name} is copied to {to}, which costs its worker time: {} copies, {} lost.",
                    mirror.copied, mirror.lost
                ),
                format!("`ringferry ctl mirror remove {from} {to}`, when it is needed no more."),
            );
        }
        if to == name {
            findings.add(
                "gets-copies",
                Effect::Notes,
                0.0,
                format!("{name} gets copies of what passes {from}, to which no rules apply."),
                format!("`ringferry ctl mirror remove {from} {to}`, if that is not wanted."),
            );
        }
    }
}

/// Returns true if the fault of a tap is one of its settings, and its interface is where it was.
fn is_setting(fault: &str) -> bool {
    [INTERFACE_LOST, NO_BRIDGE, BRIDGE_DOWN].iter().any(|begin| fault.starts_with(begin))
}

fn look_at_captures(known: &Known<'_>, port: &PortSnapshot, findings: &mut Findings) {
    let mut captures =
        known.snapshot.captures.iter().filter(|capture| capture.ports.contains(&port.name)).peekable();
    if captures.peek().is_none() {
        return;
    }
    let (by, end): (Vec<_>, Vec<_>) = captures.map(|capture| (capture.by_text(), capture.end_text())).unzip();
    findings.add(
        "captured",
        Effect::Notes,
        0.0,
        format!("What passes {} is {}, which costs its worker time.", port.name, by.join(", ")),
        format!("{}, when it is needed no more.", end.join(", ")),
    );
}

/// Seconds for which it is the first thing to be said of a port that it has lost an address. A machine that misses it has been missed by then.
pub(super) const NEWS: u32 = 60;

fn look_at_addresses(known: &Known<'_>, port: &PortSnapshot, findings: &mut Findings) {
    let name = &port.name;
    let fdb = &known.snapshot.fdb;
    // One that was held somewhere since moves no more.
    let moves = |address: &&FdbRestless| {
        let is_it = |entry: &FdbEntry| (entry.vlan, entry.mac) == (address.vlan, address.mac);
        !fdb.entries.iter().any(|entry| entry.fixed && is_it(entry))
    };
    for address in fdb.restless.iter().filter(|address| address.ports.contains(name)).filter(moves) {
        findings.add(
            "address-moves",
            Effect::Loses,
            90.0,
            format!("{}: what is for it goes to whoever has sent last.", address.to_text()),
            format!(
                "Two machines have it: give each an address of its own, and `ringferry ctl fdb flush --mac {}` then. If it is one machine there is a loop: see what is bridged behind the two ports. If it belongs to {name}, `ringferry ctl fdb add {} {name} --vlan {}` holds it there.",
                address.mac, address.mac, address.vlan
            ),
        );
    }
    // Behind a tap is the host itself, which has an address there only if the interface does.
    let remedy = match &port.negotiated {
        Negotiated::Tap(_) => format!(
            "See whether the interface has an address or a bridge (`ip addr show {peer}`); `ping` from the host. If it has sent and nothing is learned, see the drops of the port.",
            peer = port.peer
        ),
        Negotiated::Xdp(_) => format!(
            "See whether anything comes in (`ip -s link show {peer}`, `ringferry capture {name}`), and, if the switch has not all queues of the interface, on which (`ethtool -S {peer}`).",
            peer = port.peer
        ),
        _ => "See whether the guest's interface is up and has an address; `ping` from the guest. If it has sent and nothing is learned, see the drops of the port.".to_owned(),
    };
    let FdbSnapshot { restless, lost, .. } = &known.snapshot.fdb;
    let is_restless =
        |lost: &FdbLost| restless.iter().any(|address| (address.vlan, address.mac) == (lost.vlan, lost.mac));
    for lost in lost.iter().filter(|lost| lost.from == *name || lost.to == *name) {
        if is_restless(lost) {
            continue;
        }
        let FdbLost { from, to, mac, vlan, .. } = lost;
        let has_lost = lost.from == *name && port.state == PortState::Up;
        // Whose it is may be known by the rules.
        let may_have =
            |port: &String| (known.rules)(port).guard.is_some_and(|guard| guard.macs.contains(mac));
        let owner = match [from, to].map(may_have) {
            [true, false] => Some(from),
            [false, true] => Some(to),
            _ => None,
        };
        let held = match owner {
            Some(owner) => format!(
                "By `allowed_macs` it is {owner}'s: `ringferry ctl fdb add {mac} {owner} --vlan {vlan}` holds it there"
            ),
            None => format!(
                "`ringferry ctl fdb add {mac} {from} --vlan {vlan}`, or the same with {to}, holds it there"
            ),
        };
        findings.add(
            "address-lost",
            if has_lost && lost.seconds < NEWS { Effect::Loses } else { Effect::Notes },
            80.0,
            format!("{}: what is for it goes to {to} alone.", lost.to_text()),
            format!(
                "Nothing, if the machine itself has moved. Else {from} and {to} both use it, and it is one's own: find out whose (`ip link` in the guests). {held}, and `allowed_macs` at the other port says what that one may send from."
            ),
        );
    }
    let has_lost = lost.iter().any(|lost| lost.from == *name)
        || restless.iter().any(|address| address.ports.contains(name));
    let has_none = !known.snapshot.fdb.entries.iter().any(|entry| entry.port == *name);
    // On a wire nothing is learned.
    let is_in_wire = (known.rules)(name).wire.is_some();
    if port.state == PortState::Up && has_none && !has_lost && !is_in_wire {
        findings.add(
            "no-address",
            Effect::Notes,
            50.0,
            format!(
                "No MAC address is known behind {name}: it has sent nothing that was forwarded lately, and what is for it goes to every port."
            ),
            remedy,
        );
    }
}

/// So long it is told that an interface was made anew.
const RENEWED: Duration = Duration::from_secs(600);

/// Connections in the window from which on they are no restart of a machine.
const AGAIN: f64 = 3.0;

/// A front end that comes again and again. What else is said of the port is of a moment.
fn look_at_connections(port: &PortSnapshot, findings: &mut Findings) {
    let PortSnapshot { name, .. } = port;
    let Some(rates) = recent(port) else { return };
    let again = rates.counter("connections") * rates.seconds;
    if again < AGAIN {
        return;
    }
    findings.add(
        "connects-again-and-again",
        if port.state == PortState::Up { Effect::Loses } else { Effect::Stops },
        100.0,
        format!(
            "Front ends have connected to {name} {} in the last {:.0} s: each was gone again before the next one.",
            times(again.round() as u64),
            rates.seconds
        ),
        format!(
            "See which process that is and what its log says: the log has the number of the first ones (`pid=`) and why they ended, `ringferry ctl show {name}` the one that is connected. \
             A program that is started again and again, or a VMM that is refused and tries again."
        ),
    );
}

/// Counters that should be zero, however long ago, and whoever waits.
fn look_at_past(port: &PortSnapshot, findings: &mut Findings) {
    if port.another_waits {
        findings.add(
            "another-waits",
            Effect::Notes,
            80.0,
            format!("Another front end has connected to {} while this one is there. It waits until this one has disconnected: a port serves one machine.", port.peer),
            "Give each machine a port of its own: compare the paths of the sockets in their definitions.",
        );
    }
    let PortSnapshot { name, .. } = port;
    let counter = |counter: &str| port.counters.get(counter).copied().unwrap_or(0);
    let mut notes = |situation, number: u64, text: String, remedy: &str| {
        if number > 0 {
            findings.add(situation, Effect::Notes, 0.0, text, remedy);
        }
    };
    let errors = counter("ring_errors");
    notes(
        "rings-broke",
        errors,
        format!(
            "Rings of {name} have broken {} since the switch was started, because the guest's driver broke their rules.",
            times(errors)
        ),
        "The log has the reason of each.",
    );
    let rejected = counter("messages_rejected");
    notes(
        "messages-rejected",
        rejected,
        format!("The switch has refused {rejected} of the messages of the front end of {name}."),
        "The log says which, and why, of many a few: a limit such as port_memory_gib, or a front end that breaks the protocol.",
    );
    let failed = counter("failed_ring_starts");
    notes(
        "rings-failed-to-start",
        failed,
        format!("A ring of {name} could not be started, {}.", times(failed)),
        "The log says why; mostly their addresses are outside the memory that is shared.",
    );
    let connections = counter("connections");
    notes(
        "reconnected",
        connections.saturating_sub(1),
        format!("Front ends have connected to {name} {}.", times(connections)),
        "Each time the guest has lost its link for a moment. See the log of the VMM, if it was not restarted on purpose.",
    );
}
