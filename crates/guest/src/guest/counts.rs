//! What `ringferry guest` counts, for the report at its end and for its control socket.
//!
//! [`Counts`] live as long as the program, one of each queue pair. [`QueuePair`] is what the framework counted since
//! the pair's rings were made: how packets lay in receive buffers, and what became of those that were sent. A back
//! end that makes new rings necessary begins the latter anew.

use std::collections::BTreeMap;
use std::iter::Sum;
use std::ops::Add;
use std::time::Duration;

use ringferry_virtio_net::driver::Pair;
use serde::Serialize;

/// What passed through one pair, or all, from the guest's point of view as in `ip -s link`: `tx` is what the kernel
/// behind the tap sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Counts {
    /// Packets that the kernel has taken.
    pub(super) rx_packets: u64,
    /// Bytes in them.
    pub(super) rx_bytes: u64,
    /// Packets whose lengths made no sense.
    pub(super) rx_length_errors: u64,
    /// Packets whose virtual header asks for what was not agreed on, or cannot be.
    pub(super) rx_bad_headers: u64,
    /// Packets the kernel did not take from us.
    pub(super) rx_tap_errors: u64,
    /// Packets that were sent.
    pub(super) tx_packets: u64,
    /// Bytes in them.
    pub(super) tx_bytes: u64,
    /// Packets that no ring takes: longer than any may be, or the ring is broken.
    pub(super) tx_dropped: u64,
    /// Packets that were on their way through rings that had to be made anew; some may have arrived.
    pub(super) tx_lost: u64,
    /// Kicks for buffers that were posted.
    pub(super) rx_kicks: u64,
    /// Kicks for packets.
    pub(super) tx_kicks: u64,
    /// Kicks for either.
    pub(super) kicks: u64,
    /// Times that a thread was woken by the back end or the tap.
    pub(super) wakeups: u64,
}

impl Counts {
    /// Packets that were received and not delivered.
    fn rx_drops(&self) -> u64 {
        self.rx_length_errors + self.rx_bad_headers + self.rx_tap_errors
    }
}

impl Add for Counts {
    type Output = Counts;

    fn add(self, other: Counts) -> Counts {
        Counts {
            rx_packets: self.rx_packets + other.rx_packets,
            rx_bytes: self.rx_bytes + other.rx_bytes,
            rx_length_errors: self.rx_length_errors + other.rx_length_errors,
            rx_bad_headers: self.rx_bad_headers + other.rx_bad_headers,
            rx_tap_errors: self.rx_tap_errors + other.rx_tap_errors,
            tx_packets: self.tx_packets + other.tx_packets,
            tx_bytes: self.tx_bytes + other.tx_bytes,
            tx_dropped: self.tx_dropped + other.tx_dropped,
            tx_lost: self.tx_lost + other.tx_lost,
            rx_kicks: self.rx_kicks + other.rx_kicks,
            tx_kicks: self.tx_kicks + other.tx_kicks,
            kicks: self.kicks + other.kicks,
            wakeups: self.wakeups + other.wakeups,
        }
    }
}

impl Sum for Counts {
    fn sum<I: Iterator<Item = Counts>>(counts: I) -> Counts {
        counts.fold(Counts::default(), Add::add)
    }
}

/// One queue pair, since its rings were made.
#[derive(Clone, Copy, Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct QueuePair {
    /// What was received.
    rx: Rx,
    /// What was sent.
    tx: Tx,
}

/// A receive queue.
#[derive(Clone, Copy, Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
struct Rx {
    /// Bytes of the next buffer, virtual header included.
    rx_buffer_len: usize,
    /// Packets that were received.
    packets: u64,
    /// Bytes in them.
    bytes: u64,
    /// Buffers that the packets took.
    descriptors: u64,
    /// Bytes of memory charged to the packets.
    truesize_bytes: u64,
    /// Packets copied out of their buffers.
    copied: u64,
    /// Buffers joined with the adjacent one in front of them.
    coalesced: u64,
    /// Buffers whose unused end was posted again as a buffer of its own.
    trimmed: u64,
    /// Packets whose lengths made no sense.
    rx_length_errors: u64,
    /// Refills that ended early for want of memory.
    no_replacement: u64,
    /// Posted buffers that were newly carved from chunks.
    carved: u64,
    /// Buffers taken back from packets that were delivered.
    recycled: u64,
}

/// A transmit queue. Each packet is in one of `direct`, `collapsed`, `defragged` and `dropped`.
#[derive(Clone, Copy, Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
struct Tx {
    /// Packets that were given to be sent.
    packets: u64,
    /// Bytes in them.
    bytes: u64,
    /// Packets mapped as they were.
    direct: u64,
    /// Packets of which some neighbours were merged.
    collapsed: u64,
    /// Packets that were copied together.
    defragged: u64,
    /// Packets that could not be mapped.
    dropped: u64,
    /// Packets that had to wait for room, once for each time.
    retries: u64,
    /// Bytes copied in order to map packets.
    copied_bytes: u64,
    /// Notifications of the back end.
    kicks: u64,
}

impl QueuePair {
    /// What `pair` has counted so far.
    pub(super) fn of(pair: &Pair) -> Self {
        let (rx, tx) = (pair.receiveq.stats(), pair.transmitq.stats());
        Self {
            rx: Rx {
                rx_buffer_len: pair.receiveq.next_buffer_len(),
                packets: rx.packets,
                bytes: rx.bytes,
                descriptors: rx.descriptors,
                truesize_bytes: rx.truesize_bytes,
                copied: rx.copied,
                coalesced: rx.coalesced,
                trimmed: rx.trimmed,
                rx_length_errors: rx.rx_length_errors,
                no_replacement: rx.no_replacement,
                carved: rx.carved,
                recycled: rx.recycled,
            },
            tx: Tx {
                packets: tx.packets(),
                bytes: tx.bytes,
                direct: tx.map.direct,
                collapsed: tx.map.collapsed,
                defragged: tx.map.defragged,
                dropped: tx.dropped(),
                retries: tx.map.retries,
                copied_bytes: tx.map.copied_bytes,
                kicks: tx.kicks,
            },
        }
    }
}

/// What there is to say of one pair at one moment.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Report {
    pub(super) counts: Counts,
    /// None before the first back end.
    pub(super) queues: Option<QueuePair>,
    /// Packets that were sent and have not come back.
    pub(super) in_flight: u64,
    /// How long none of them has.
    pub(super) stalled: Duration,
}

fn millis(time: Duration) -> u64 {
    time.as_millis() as u64
}

/// The sums of all pairs under the names of `ethtool -S`, and, if `queues`, what each counted.
pub(super) fn by_name(reports: &[Report], queues: bool) -> BTreeMap<String, u64> {
    let total: Counts = reports.iter().map(|report| report.counts).sum();
    let mut names: BTreeMap<String, u64> = [
        ("rx_packets", total.rx_packets),
        ("rx_bytes", total.rx_bytes),
        ("rx_drops", total.rx_drops()),
        ("rx_length_errors", total.rx_length_errors),
        ("rx_bad_headers", total.rx_bad_headers),
        ("rx_tap_errors", total.rx_tap_errors),
        ("tx_packets", total.tx_packets),
        ("tx_bytes", total.tx_bytes),
        ("tx_drops", total.tx_dropped),
        ("tx_lost", total.tx_lost),
        ("tx_in_flight", reports.iter().map(|report| report.in_flight).sum()),
        ("tx_stalled_ms", millis(reports.iter().map(|report| report.stalled).max().unwrap_or_default())),
        ("kicks", total.kicks),
        ("wakeups", total.wakeups),
    ]
    .map(|(name, count)| (name.to_owned(), count))
    .into();
    for (pair, Report { counts, queues, in_flight, stalled }) in reports.iter().enumerate().filter(|_| queues)
    {
        let rx = [
            ("packets", counts.rx_packets),
            ("bytes", counts.rx_bytes),
            ("drops", counts.rx_drops()),
            ("kicks", counts.rx_kicks),
            ("wakeups", counts.wakeups),
        ];
        let tx = [
            ("packets", counts.tx_packets),
            ("bytes", counts.tx_bytes),
            ("drops", counts.tx_dropped),
            ("lost", counts.tx_lost),
            ("in_flight", *in_flight),
            ("stalled_ms", millis(*stalled)),
            ("kicks", counts.tx_kicks),
        ];
        names.extend(rx.map(|(name, count)| (format!("rx_queue_{pair}_{name}"), count)));
        names.extend(tx.map(|(name, count)| (format!("tx_queue_{pair}_{name}"), count)));
        let Some(QueuePair { rx, tx }) = queues else { continue };
        let rx = [
            ("next_buffer", rx.rx_buffer_len as u64),
            ("descriptors", rx.descriptors),
            ("truesize_bytes", rx.truesize_bytes),
            ("copied", rx.copied),
            ("coalesced", rx.coalesced),
            ("trimmed", rx.trimmed),
            ("no_replacement", rx.no_replacement),
            ("carved", rx.carved),
            ("recycled", rx.recycled),
        ];
        let tx = [
            ("direct", tx.direct),
            ("collapsed", tx.collapsed),
            ("defragged", tx.defragged),
            ("retries", tx.retries),
            ("copied_bytes", tx.copied_bytes),
        ];
        names.extend(rx.map(|(name, count)| (format!("rx_queue_{pair}_{name}"), count)));
        names.extend(tx.map(|(name, count)| (format!("tx_queue_{pair}_{name}"), count)));
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_ethtool_and_totals_are_sums() {
        let of = |packets| Report {
            counts: Counts { rx_packets: packets, tx_kicks: 1, kicks: 1, ..Counts::default() },
            ..Report::default()
        };
        let names = by_name(&[of(3), of(4)], true);
        assert_eq!(
            (names["rx_packets"], names["rx_queue_0_packets"], names["rx_queue_1_packets"]),
            (7, 3, 4)
        );
        assert_eq!((names["kicks"], names["tx_queue_1_kicks"], names["rx_queue_1_kicks"]), (2, 1, 0));
        assert!(!by_name(&[of(3)], false).contains_key("rx_queue_0_packets"));
    }
}
