//! The sending end: packets of the stack through the framework's queue.

use std::time::{Duration, Instant};

use ringferry_nic::driver::TxDriver;
use ringferry_nic::tx::{TxConfig, TxQueue, TxStats};
use ringferry_packet::buffer::{Chain, Pools};

use super::stack::Stack;
use crate::experiment::{RowError, Sample};
use crate::frames::stream::PAYLOAD;

/// Packets under way: 1 MiB, as a TCP window for a short path would have it. More would only leave the caches.
pub(super) const WINDOW: usize = 16;

#[derive(Debug)]
pub(super) struct Sender<D> {
    queue: TxQueue<D>,
    pools: Pools,
    stack: Stack,
    /// A packet that the queue did not take.
    unsent: Option<Chain>,
    sent: u64,
    mapping: Duration,
}

impl<D: TxDriver> Sender<D> {
    pub(super) fn new(driver: D, pools: Pools, stack: Stack) -> Result<Self, RowError> {
        let queue = TxQueue::attach(driver, &pools, TxConfig::default()).map_err(RowError::failed)?;
        let (unsent, sent, mapping) = (None, 0, Duration::ZERO);
        Ok(Self { queue, pools, stack, unsent, sent, mapping })
    }

    /// Fills the window. Packets sent so far.
    ///
    /// # Errors
    /// A packet was refused for good, for its shape or because the ring is broken.
    pub(super) fn round(&mut self) -> Result<u64, RowError> {
        self.queue.reclaim(&mut self.pools);
        while self.queue.in_flight() < WINDOW {
            let packet = self.unsent.take().or_else(|| self.stack.packet(&mut self.pools));
            let Some(packet) = packet else { break };
            let begin = Instant::now();
            let sent = self.queue.send(packet, &mut self.pools);
            self.mapping += begin.elapsed();
            match sent {
                Ok(()) => self.sent += 1,
                Err(unsent) if unsent.reason.is_retryable() => {
                    self.unsent = Some(unsent.chain);
                    break;
                }
                Err(unsent) => {
                    return Err(RowError::failed(format!("a packet was dropped: {}", unsent.reason)));
                }
            }
            // The device polls: nobody waits for the doorbell.
            self.queue.due();
        }
        self.queue.flush();
        Ok(self.sent)
    }

    /// Returns true once the device is done with everything.
    pub(super) fn is_drained(&mut self) -> bool {
        self.queue.reclaim(&mut self.pools);
        self.queue.in_flight() == 0
    }

    /// Returns the counters after a check: every packet has one outcome, and none was dropped.
    ///
    /// # Errors
    /// The counters do not add up, or say that a packet was dropped.
    pub(super) fn finish(&self) -> Result<Sent, RowError> {
        let stats = self.queue.stats();
        if stats.packets() != self.sent || stats.dropped() > 0 || stats.unknown > 0 {
            let text = format!("{} packets were sent, but the queue has counted {stats:?}", self.sent);
            return Err(RowError::failed(text));
        }
        Ok(Sent { stats, mapping: self.mapping })
    }
}

/// A sender's counters.
#[derive(Clone, Debug)]
pub(super) struct Sent {
    stats: TxStats,
    /// Time in the queue's `send`.
    mapping: Duration,
}

impl Sent {
    pub(super) fn packets(&self) -> u64 {
        self.stats.packets()
    }

    /// Adds what became of the packets to a sample.
    pub(super) fn describe(&self, sample: Sample) -> Sample {
        let map = &self.stats.map;
        let packets = self.packets().max(1) as f64;
        let segments: u64 = map.segments.iter().map(|(segments, packets)| segments as u64 * packets).sum();
        sample
            .with("packets", self.packets() as f64)
            .with("direct", map.direct as f64)
            .with("collapsed", map.collapsed as f64)
            .with("defragged", map.defragged as f64)
            .with("dropped", self.stats.dropped() as f64)
            .with("copied bytes/packet", map.copied_bytes as f64 / packets)
            .with("segments/packet", segments as f64 / packets)
            .with("send ns/packet", self.mapping.as_nanos() as f64 / packets)
    }
}

/// Bits of payload in so many packets.
pub(super) fn bits(packets: u64) -> f64 {
    (packets * PAYLOAD as u64 * 8) as f64
}
