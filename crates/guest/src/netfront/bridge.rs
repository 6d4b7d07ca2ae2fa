//! The data path of `ringferry netfront`: packets between a tap and the queues of a front end, on one thread.
//!
//! Packets to send are read where they can be of any length and copied to a buffer of their own length: large buffers are
//! dear, as every page of them is granted. Received ones are written to the tap from where the back end put them.

use ringferry_packet::flow::flow_hash;
use ringferry_packet::vnet::{Header, Offloads};
use ringferry_sys::tap::{MAX_READ, Tap};
use ringferry_xen::netif::Fault;
use ringferry_xen_net::netfront::Pair;
use serde::Serialize;

use crate::tap::{self, Undelivered};

/// Packets moved in one direction before the other gets its turn.
const BURST: usize = 32;

/// Busy rounds between looks at the other descriptors.
const BUSY_ROUNDS: u32 = 16;

/// Counters of what passed, from the guest's point of view: `tx` is what the kernel behind the tap sent.
#[derive(Clone, Copy, Debug, Default, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Counts {
    /// Packets that came from the back end.
    rx_packets: u64,
    /// Bytes in them.
    rx_bytes: u64,
    /// Packets that ask the kernel for what was not agreed on, or cannot be.
    rx_bad_headers: u64,
    /// Packets the kernel did not take from us.
    rx_tap_errors: u64,
    /// Packets that went to the back end.
    tx_packets: u64,
    /// Bytes in them.
    tx_bytes: u64,
    /// Packets that the back end takes in no way.
    tx_dropped: u64,
    /// Notifications of the back end.
    kicks: u64,
    /// Times that there was nothing to do.
    waits: u64,
}

/// The step that is to be done next.
pub(super) enum Turn {
    /// There is more to move: turn again.
    Again,
    /// Look at the descriptors, without waiting.
    Look,
    /// Wait for events.
    Wait,
    /// The back end broke a ring.
    Broken(Fault),
}

/// The data path between the pairs and the tap.
pub(super) struct Bridge {
    pub(super) counts: Counts,
    /// The tap may have packets.
    pub(super) tap_ready: bool,
    /// Offloads that the back end may leave unfinished in a packet.
    agreed: Offloads,
    buffer: Box<[u8]>,
    /// Bytes in the buffer that wait for room in a queue.
    waiting: Option<usize>,
    rounds: u32,
}

impl Bridge {
    /// A bridge whose back end may leave unfinished what was `agreed`.
    pub(super) fn new(agreed: Offloads) -> Self {
        let buffer = vec![0; MAX_READ].into_boxed_slice();
        Self { counts: Counts::default(), tap_ready: true, agreed, buffer, waiting: None, rounds: 0 }
    }

    /// Posts pages to receive into.
    pub(super) fn begin(&mut self, pairs: &mut [Pair]) {
        pairs.iter_mut().for_each(|pair| refill(pair, &mut self.counts));
        self.tap_ready = true;
    }

    /// Moves the packets that there are, both ways.
    pub(super) fn turn(&mut self, pairs: &mut [Pair], tap: &Tap) -> Turn {
        let mut moved = false;
        // Whether or not there is more to send: what has been sent is answered later, and arming looks at the answers.
        for pair in &mut *pairs {
            moved |= pair.reclaim() > 0;
        }
        if self.tap_ready {
            moved |= self.transmit(pairs, tap);
        }
        for pair in &mut *pairs {
            moved |= receive(pair, tap, self.agreed, &mut self.counts);
        }
        if let Some(fault) = pairs.iter_mut().find_map(Pair::fault) {
            return Turn::Broken(fault);
        }
        if moved {
            self.rounds += 1;
            if self.tap_ready && self.rounds < BUSY_ROUNDS {
                return Turn::Again;
            }
            self.rounds = 0;
            return Turn::Look;
        }
        self.rounds = 0;
        // Each is armed, whatever the one before it says.
        let mut work = false;
        for pair in pairs {
            work |= pair.arm();
        }
        if work {
            // Signals and the store are heard even when a back end always has more.
            return Turn::Look;
        }
        self.counts.waits += 1;
        Turn::Wait
    }

    /// From the tap to the back end; whether anything moved.
    fn transmit(&mut self, pairs: &mut [Pair], tap: &Tap) -> bool {
        let mut moved = false;
        for _ in 0..BURST {
            let len = match self.waiting.take() {
                Some(len) => len,
                None => match tap.read(&mut self.buffer) {
                    Ok(len) => len,
                    Err(_) => {
                        self.tap_ready = false;
                        break;
                    }
                },
            };
            let Some((header, frame)) = self.buffer[..len].split_first_chunk::<{ Header::LEN }>() else {
                continue;
            };
            let header = Header::from_bytes(header).sanitised();
            let at = flow_hash(frame) as usize % pairs.len().max(1);
            let Some(pair) = pairs.get_mut(at) else { break };
            match send(pair, header, frame) {
                Sent::Yes => {
                    self.counts.tx_packets += 1;
                    self.counts.tx_bytes += frame.len() as u64;
                    moved = true;
                }
                Sent::Never => self.counts.tx_dropped += 1,
                Sent::Later => {
                    self.waiting = Some(len);
                    break;
                }
            }
        }
        for pair in pairs {
            if pair.transmit.flush() {
                self.counts.kicks += 1;
                // A back end that is gone says so in the store.
                let _ = pair.events().notify_transmit();
            }
        }
        moved
    }
}

/// The outcome of sending a packet.
enum Sent {
    Yes,
    /// When the back end has taken others.
    Later,
    Never,
}

fn send(pair: &mut Pair, header: Header, frame: &[u8]) -> Sent {
    // With nothing on its way nothing comes back: then there will never be room.
    let nothing = pair.transmit.in_flight() == 0;
    let later = if nothing { Sent::Never } else { Sent::Later };
    let Some(mut chain) = pair.pools.chain_of(frame) else { return later };
    chain.header = header;
    match pair.transmit.send(chain, &mut pair.pools) {
        Ok(()) => Sent::Yes,
        Err(unsent) if unsent.reason.is_retryable() => {
            pair.pools.recycle_chain(unsent.chain);
            later
        }
        Err(unsent) => {
            pair.transmit.give_up(unsent, &mut pair.pools);
            Sent::Never
        }
    }
}

/// From the back end to the tap; whether anything moved.
fn receive(pair: &mut Pair, tap: &Tap, agreed: Offloads, counts: &mut Counts) -> bool {
    let Pair { receive, pools, .. } = pair;
    let received = receive.lend(BURST, pools, |packet, _| {
        let delivered = tap::deliver(tap, &packet, agreed);
        if delivered == Err(Undelivered::BadHeader) {
            counts.rx_bad_headers += 1;
            return Some(packet);
        }
        counts.rx_packets += 1;
        counts.rx_bytes += packet.len() as u64;
        counts.rx_tap_errors += u64::from(delivered.is_err());
        Some(packet)
    });
    if received > 0 {
        refill(pair, counts);
    }
    received > 0
}

fn refill(pair: &mut Pair, counts: &mut Counts) {
    if pair.refill() {
        counts.kicks += 1;
        let _ = pair.events().notify_receive();
    }
}
