//! Burst forwarding from one receive queue to several transmit queues.
//!
//! A worker creates one [`Forwarder`] for its lifetime and calls [`Forwarder::forward`] for each input queue,
//! in turn. A burst is received, grouped by output, and each output is reclaimed, filled and flushed once, so
//! that the cost of a doorbell and of reading the ring's shared words is paid per burst, not per packet.

use ringferry_packet::buffer::{Chain, Pools};

use crate::driver::{RxDriver, TxDriver};
use crate::map::MapError;
use crate::rx::RxQueue;
use crate::tx::{SendError, TxQueue, Unsent};

/// Counters of a forwarder since it was created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ForwardStats {
    /// Valid packets taken from receive queues.
    pub received: u64,
    /// Packets accepted by outputs.
    pub forwarded: u64,
    /// Bytes of the frames of forwarded packets.
    pub bytes: u64,
    /// Groups of packets of one burst with the same output; `forwarded` per group is the batch size.
    pub groups: u64,
    /// Packets dropped because `choose` selected no output.
    pub no_output: u64,
    /// Packets dropped because the offloads in their header do not agree with the frame.
    pub bad_header: u64,
    /// Packets dropped because the ring of the output was full.
    pub ring_full: u64,
    /// Packets dropped because there were no buffers to map them with.
    pub no_buffers: u64,
    /// Packets dropped because the output is broken or could never send them.
    pub unsendable: u64,
}

impl ForwardStats {
    /// Returns the number of packets dropped for any reason: [`ForwardStats::received`] less
    /// [`ForwardStats::forwarded`].
    pub fn dropped(&self) -> u64 {
        self.no_output + self.bad_header + self.ring_full + self.no_buffers + self.unsendable
    }
}

/// Forwards bursts; each worker has its own.
#[derive(Debug)]
pub struct Forwarder {
    /// The packets of the burst by output; empty between bursts, with their storage kept.
    groups: Box<[Vec<Chain>]>,
    burst: usize,
    stats: ForwardStats,
}

impl Forwarder {
    /// Creates a forwarder to `outputs` outputs, with bursts of at most `burst` packets.
    pub fn new(outputs: usize, burst: usize) -> Self {
        let groups = (0..outputs).map(|_| Vec::with_capacity(burst)).collect();
        Self { groups, burst, stats: ForwardStats::default() }
    }

    /// Returns a copy of the counters.
    pub fn stats(&self) -> ForwardStats {
        self.stats
    }

    /// Forwards one burst and returns the number of its packets, 0 if the input had none.
    ///
    /// `choose` returns the number of the output for a packet, or `None` to drop it; it may rewrite the
    /// packet. `ring` is called with the number and the queue of each output whose device wants its doorbell
    /// rung. Completed packets are reclaimed as needed, and buffers that came from `input` go back to it.
    /// The caller must post them again by [`RxQueue::top_up`], as the input has a doorbell of its own.
    #[inline]
    pub fn forward<R: RxDriver, T: TxDriver>(
        &mut self,
        input: &mut RxQueue<R>,
        outputs: &mut [TxQueue<T>],
        pools: &mut Pools,
        mut choose: impl FnMut(&mut Chain) -> Option<usize>,
        mut ring: impl FnMut(usize, &mut TxQueue<T>),
    ) -> usize {
        let Self { groups, burst, stats } = self;
        let known = groups.len().min(outputs.len());
        let taken = input.lend(*burst, pools, |mut chain, _| {
            stats.received += 1;
            // Some header flags are allowed only in received frames; they are removed before sending.
            chain.header = chain.header.sanitised();
            let asks = chain.header.needs_csum() || chain.header.is_gso();
            if asks && chain.header.check(chain.len()).is_err() {
                stats.bad_header += 1;
                return Some(chain);
            }
            match choose(&mut chain).filter(|output| *output < known) {
                Some(output) => groups[output].push(chain),
                None => {
                    stats.no_output += 1;
                    return Some(chain);
                }
            }
            None
        });
        for (number, (group, output)) in groups.iter_mut().zip(outputs).enumerate() {
            if group.is_empty() {
                continue;
            }
            output.make_room_with(group.len(), |chain| input.recycle_chain(chain, pools));
            let (mut packets, mut bytes) = (0, 0);
            for chain in group.drain(..) {
                let len = chain.len();
                let sent = output.send(chain, pools);
                if sent.is_ok() || retry(sent, input, (number, output), pools, &mut ring, stats) {
                    packets += 1;
                    bytes += len as u64;
                }
            }
            if output.flush() {
                ring(number, output);
            }
            stats.groups += 1;
            stats.forwarded += packets;
            stats.bytes += bytes;
        }
        taken
    }
}

/// Handles a packet that was not sent: if its error is retryable, flushes and reclaims, and sends it once
/// more. Returns true if it was sent; otherwise it has been dropped and counted.
#[cold]
#[inline(never)]
fn retry<R: RxDriver, T: TxDriver>(
    sent: Result<(), Unsent>,
    input: &mut RxQueue<R>,
    (number, output): (usize, &mut TxQueue<T>),
    pools: &mut Pools,
    ring: &mut impl FnMut(usize, &mut TxQueue<T>),
    stats: &mut ForwardStats,
) -> bool {
    let Err(mut unsent) = sent else { return true };
    if unsent.reason.is_retryable() {
        // The device cannot make room before it has seen the packets in front of this one.
        if output.flush() {
            ring(number, output);
        }
        if output.reclaim_with(|chain| input.recycle_chain(chain, pools)) > 0 {
            match output.send(unsent.chain, pools) {
                Ok(()) => return true,
                Err(again) => unsent = again,
            }
        }
    }
    *match unsent.reason {
        SendError::Map(MapError::RingFull) => &mut stats.ring_full,
        SendError::Map(MapError::NoBuffers) => &mut stats.no_buffers,
        _ => &mut stats.unsendable,
    } += 1;
    output.give_up(unsent, pools);
    false
}
