//! Answers about the queue pairs behind ports, in ethtool's words ([`ringferry_control::channels`]).

use std::collections::BTreeMap;

use ringferry_control::channels::{Channels, QueueSteering, Stats, Steering};
use ringferry_control::snapshot::{PortSnapshot, Snapshot};

use ringferry_packet::flow::HashTypes;
use ringferry_virtio_net::queue_index;

use crate::counters::PairCounters;

/// Returns, for each pair, whether the receiveq and the transmitq are set up, and whether both are in use.
fn pairs(port: &PortSnapshot) -> BTreeMap<u16, (bool, bool)> {
    let mut pairs = BTreeMap::new();
    for queue in &port.queues {
        let (rings, started, enabled) =
            pairs.entry(queue_index::pair(queue.index)).or_insert((0, true, true));
        *rings += 1;
        *started &= queue.started;
        *enabled &= queue.started && queue.enabled;
    }
    let whole = |(pair, (rings, started, enabled))| (pair, (rings == 2 && started, rings == 2 && enabled));
    pairs.into_iter().map(whole).collect()
}

/// Returns the channels of a port whose guest is offered `max` queue pairs.
pub fn channels(port: &PortSnapshot, max: u16) -> Channels {
    let pairs = pairs(port);
    let count = |wanted: fn(&(bool, bool)) -> bool| pairs.values().filter(|pair| wanted(pair)).count() as u16;
    Channels {
        port: port.name.clone(),
        max_combined: max,
        combined: count(|&(_, enabled)| enabled),
        started: count(|&(started, _)| started),
    }
}

/// Describes the owners of a port's queue pairs; `worker` returns that of each, `by` names the algorithm that
/// spreads packets.
pub fn steering(port: &PortSnapshot, by: &str, worker: impl Fn(u16) -> u16) -> Steering {
    let queues = pairs(port).into_iter().map(|(queue, (_, enabled))| QueueSteering {
        queue,
        enabled,
        cpu: None,
        worker: Some(worker(queue)),
    });
    Steering {
        port: port.name.clone(),
        by: by.to_owned(),
        hash_types: HashTypes::empty(),
        queues: queues.collect(),
        kept: None,
    }
}

/// Returns a port's counters, with drops as `drop_REASON`, and those of its queue pairs, if they are given.
/// Names follow the switch: frames that a guest transmits are `rx_queue_N_…` here, as they are `rx` of the
/// port.
pub fn stats<'a>(port: &PortSnapshot, pairs: impl IntoIterator<Item = (u16, &'a PairCounters)>) -> Stats {
    let mut counters = port.counters.clone();
    let drops =
        port.drops.iter().map(|(reason, count)| (format!("drop_{}", reason.replace('-', "_")), *count));
    counters.extend(drops);
    for (pair, counted) in pairs {
        let named = [
            ("rx", "packets", &counted.rx_packets),
            ("rx", "bytes", &counted.rx_bytes),
            ("rx", "kicks", &counted.kicks),
            ("tx", "packets", &counted.tx_packets),
            ("tx", "bytes", &counted.tx_bytes),
            ("tx", "drops", &counted.tx_dropped),
            ("tx", "calls", &counted.calls),
            ("tx", "calls_suppressed", &counted.calls_suppressed),
        ];
        counters.extend(named.map(|(way, name, count)| (format!("{way}_queue_{pair}_{name}"), count.get())));
    }
    for queue in &port.queues {
        let Some(grants) = &queue.grants else { continue };
        let (pair, named) =
            (queue_index::pair(queue.index), grants.by_name().into_iter().chain(grants.gauges_by_name()));
        counters.extend(named.map(|(name, count)| (format!("queue_{pair}_grant_{name}"), count)));
    }
    Stats { port: port.name.clone(), counters }
}

/// Finds the port that a request names.
///
/// # Errors
/// There is none; the message lists the ports.
pub fn find<'a>(snapshot: &'a Snapshot, name: &str) -> Result<&'a PortSnapshot, String> {
    let names = || snapshot.ports.iter().map(|port| port.name.as_str()).collect::<Vec<_>>().join(", ");
    let found = snapshot.ports.iter().find(|port| port.name == name);
    found.ok_or_else(|| format!("there is no port {name:?}; the ports are: {}", names()))
}

/// Explains that a switch does not change a port's number of pairs.
pub fn refuse(port: &str) -> String {
    format!(
        "the guest on port {port:?} decides how many queue pairs it uses: change it there (ethtool -L DEVICE combined \
         N; of `ringferry guest`, ringferry ctl channels on its own control socket)"
    )
}

/// The queues of a tap, which are all in use.
pub fn of_tap(port: &str, queues: u16) -> Channels {
    Channels { port: port.to_owned(), max_combined: queues, combined: queues, started: queues }
}

/// Describes the queues of a tap; `worker` returns the worker that reads each.
pub fn steering_of_tap(port: &str, by: &str, queues: u16, worker: impl Fn(u16) -> u16) -> Steering {
    let queue = |queue| QueueSteering { queue, enabled: true, cpu: None, worker: Some(worker(queue)) };
    Steering {
        port: port.to_owned(),
        by: by.to_owned(),
        hash_types: HashTypes::empty(),
        queues: (0..queues).map(queue).collect(),
        kept: None,
    }
}

/// Explains that the number of a tap's queues is not changed.
pub fn refuse_tap(port: &str) -> String {
    format!(
        "port {port:?} is a tap, which has a queue for each worker: set queues in its configuration, or workers, and \
         start the switch again"
    )
}

#[cfg(test)]
mod tests {
    use ringferry_virtio_net::Features;

    use super::*;
    use ringferry_control::snapshot::{Negotiated, PortState, QueueRole, QueueSnapshot};

    /// A port whose guest has set up three pairs and uses two; of a fourth it has one ring.
    fn port() -> PortSnapshot {
        let queues = (0..7).map(|index| QueueSnapshot {
            index,
            role: QueueRole::of(index),
            size: 256,
            enabled: index < 4 || index == 6,
            started: true,
            broken: None,
            last_avail: 0,
            last_used: 0,
            available: None,
            stalled: None,
            grants: None,
        });
        PortSnapshot {
            name: "vm0".into(),
            negotiated: Negotiated::VhostUser(Features::empty()),
            state: PortState::Up,
            fault: None,
            peer: "/run/vm0.sock".into(),
            mtu: 1500,
            mac: None,
            queues: queues.collect(),
            counters: [("rx_packets".to_owned(), 7)].into(),
            drops: [("no-receive-buffers".to_owned(), 3)].into(),
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
    fn a_pair_is_in_use_when_both_of_its_rings_are() {
        let wanted = Channels { port: "vm0".into(), max_combined: 16, combined: 2, started: 3 };
        assert_eq!(channels(&port(), 16), wanted);
        assert_eq!(
            wanted.to_text(),
            "Channel parameters for vm0:\nPre-set maximums:\nCombined: 16\nCurrent hardware settings:\nCombined: 2\n\
             Set up:   3\n"
        );
    }

    #[test]
    fn steering_names_each_pair_with_who_serves_it() {
        let steering = steering(&port(), "the flow of a packet", |pair| pair % 2);
        assert_eq!(
            steering.to_text(),
            "\
Steering of vm0: the flow of a packet
QUEUE  STATE     CPU  WORKER
    0  enabled   any       0
    1  enabled   any       1
    2  disabled  any       0
    3  disabled  any       1
"
        );
    }

    #[test]
    fn counters_of_a_pair_take_the_point_of_view_of_its_port() {
        let [first, second] = [PairCounters::default(), PairCounters::default()];
        first.tx_packets.add(1);
        second.rx_packets.add(2);
        let stats = stats(&port(), [(0, &first), (1, &second)]);
        let text = stats.to_text();
        assert!(
            text.starts_with("Statistics for vm0:\n     drop_no_receive_buffers: 3\n     rx_packets: 7\n"),
            "{text}"
        );
        assert!(
            text.contains("\n     tx_queue_0_packets: 1\n")
                && text.contains("\n     rx_queue_1_packets: 2\n")
        );
        assert!(
            text.contains("\n     tx_queue_0_packets: 1\n")
                && text.contains("\n     rx_queue_0_packets: 0\n")
        );
        assert_eq!(super::stats(&port(), []).counters.len(), 2);
    }

    #[test]
    fn a_port_that_is_not_there_is_answered_with_those_that_are() {
        let snapshot = Snapshot { ports: vec![port()], ..Snapshot::default() };
        assert_eq!(find(&snapshot, "vm0").unwrap().name, "vm0");
        assert_eq!(find(&snapshot, "vm1").unwrap_err(), "there is no port \"vm1\"; the ports are: vm0");
    }
}
