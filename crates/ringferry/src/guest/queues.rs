//! What the queues of `ringferry guest` counted, for its JSON: how packets lay in receive buffers, and what became
//! of those that were sent.

use ringferry_virtio_net::driver::Pair;
use serde::Serialize;

/// One queue pair, since its rings were made. A back end that makes new rings necessary begins anew.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct QueuePair {
    rx: Rx,
    tx: Tx,
}

/// A receive queue.
#[derive(Clone, Copy, Debug, Serialize)]
struct Rx {
    /// Bytes of the next buffer, virtual header included.
    rx_buffer_len: usize,
    packets: u64,
    bytes: u64,
    /// Buffers that the packets took.
    descriptors: u64,
    /// Bytes of memory charged to the packets.
    truesize_bytes: u64,
    /// Packets copied out of their buffers.
    copied: u64,
    coalesced: u64,
    trimmed: u64,
    rx_length_errors: u64,
    /// Refills that ended early for want of memory.
    no_replacement: u64,
    carved: u64,
    recycled: u64,
}

/// A transmit queue. Each packet is in one of `direct`, `collapsed`, `defragged` and `dropped`.
#[derive(Clone, Copy, Debug, Serialize)]
struct Tx {
    packets: u64,
    bytes: u64,
    /// Packets mapped as they were.
    direct: u64,
    /// Packets of which some neighbours were merged.
    collapsed: u64,
    /// Packets that were copied together.
    defragged: u64,
    dropped: u64,
    /// Packets that had to wait for room, once for each time.
    retries: u64,
    /// Bytes copied in order to map packets.
    copied_bytes: u64,
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
