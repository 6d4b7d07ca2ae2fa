//! Burst forwarding: from one queue to others, a burst at a time.
//!
//! One packet at a time would pay for a doorbell, a look at the ring and a line of counters each. So a burst is
//! taken, sorted by output, and every output is dealt with once.

use ringferry_packet::buffer::{Chain, Pools};

use crate::driver::{RxDriver, TxDriver};
use crate::map::MapError;
use crate::rx::RxQueue;
use crate::tx::{SendError, TxQueue, Unsent};

/// What a forwarder counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ForwardStats {
    /// Packets taken from receive queues, good ones.
    pub received: u64,
    /// Packets handed to outputs.
    pub forwarded: u64,
    /// Bytes of their frames.
    pub bytes: u64,
    /// Groups: `forwarded` per group is what batching has to work with.
    pub groups: u64,
    /// Dropped: no output was chosen.
    pub no_output: u64,
    /// Dropped: what the sender says is left to be done does not fit the frame.
    pub bad_header: u64,
    /// Dropped: the ring of the output was full.
    pub ring_full: u64,
    /// Dropped: there were no buffers to map it with.
    pub no_buffers: u64,
    /// Dropped: the output could never send it, or is broken.
    pub unsendable: u64,
}

impl ForwardStats {
    /// Packets dropped, whatever the reason. [`ForwardStats::received`] is this and
    /// [`ForwardStats::forwarded`].
    pub fn dropped(&self) -> u64 {
        self.no_output + self.bad_header + self.ring_full + self.no_buffers + self.unsendable
    }
}

/// Takes bursts and sends them on. One for each worker.
#[derive(Debug)]
pub struct Forwarder {
    /// The packets of the burst, by output; empty between bursts, and their memory kept.
    groups: Box<[Vec<Chain>]>,
    burst: usize,
    stats: ForwardStats,
}

impl Forwarder {
    /// A forwarder to so many outputs, of bursts of at most `burst` packets.
    pub fn new(outputs: usize, burst: usize) -> Self {
        let groups = (0..outputs).map(|_| Vec::with_capacity(burst)).collect();
        Self { groups, burst, stats: ForwardStats::default() }
    }

    /// What was counted.
    pub fn stats(&self) -> ForwardStats {
        self.stats
    }

    /// Forwards a burst; returns how many packets it had, 0 when there was nothing to do.
    ///
    /// `choose` says which output a packet goes to, or none, in which case it is dropped. It may rewrite the packet. `ring` is called with the
    /// number of each output whose device wants its doorbell rung, and the output. Completed packets are taken back
    /// as needed, and go back to `input` where they came from it. Posting them again is up to the caller, by
    /// [`RxQueue::top_up`]: the input has a doorbell of its own.
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
            // What a device says of a received frame is not what a driver may say of one it sends.
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

/// A packet was not sent: once more after a look at what the device is done with, if that may help. True when it was
/// sent; otherwise it is dropped and counted.
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
        // A device that has not been shown the packets before this one cannot make room for it.
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
