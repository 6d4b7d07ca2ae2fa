//! Receive coalescing in software (GRO): segments of one TCP stream, or datagrams of one UDP flow, that arrive
//! in one burst become a frame that asks for segmentation, as if its sender had left it unsegmented.
//!
//! The opposite of [`segment`](crate::segment): what comes out of here, cut again, is what went in, byte for
//! byte but for the checksums of frames that were trusted unseen. No payload is copied: the buffers of a
//! segment, its headers pulled off, are appended to the packet before it. Only the first packet's headers
//! are written.
//!
//! The rules are those of Linux (`inet_gro_receive`, `tcp_gro_receive`, `udp_gro_receive_segment`), where not
//! stricter: packets with IPv4 options or IPv6 extension headers are left alone, as are packets that ask
//! for segmentation already, and padded ones. Each flow stays in order: before a packet that cannot be merged, what
//! is held of its flow is delivered.
//!
//! A device may write to the packets' memory at any time. Headers are copied once, judged, and written
//! from that copy if they change; payload that changes after its checksum was verified is payload a
//! device could have sent in the first place.

mod rules;

use crate::buffer::Chain;
use crate::vnet::{F_DATA_VALID, Offloads};

pub use rules::{Candidate, Flow, MAX_FRAME, MAX_HEAD, MAX_PACKETS, Run, Unfit, behind};

/// Flows of which packets are held at a time. A burst has 64 packets at most: more flows than this in one
/// leave less than four packets to merge for each. (Linux: eight hash buckets of eight.)
pub const MAX_FLOWS: usize = 16;

/// What became of the packets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroCounters {
    /// Packets that came in.
    pub packets: u64,
    /// Of those, packets that were appended to another.
    pub merged: u64,
    /// Frames delivered that are made of more than one packet.
    pub frames: u64,
    /// Packets left alone because a checksum was wrong.
    pub bad_checksum: u64,
}

/// Merges the packets of a queue. [Push](Gro::push) the packets of a burst, then [flush](Gro::flush): what is held
/// when this is dropped is lost.
#[derive(Debug)]
pub struct Gro {
    accepted: Offloads,
    held: Vec<Held>,
    /// Who goes next when there are too many flows.
    turn: usize,
    counters: GroCounters,
}

impl Default for Gro {
    fn default() -> Self {
        Self::new()
    }
}

impl Gro {
    /// For a receiver that takes unsegmented TCP. UDP, where a datagram more or less is a matter of
    /// latency, is merged only [for receivers](Gro::for_receiver) that ask for it.
    #[must_use]
    pub fn new() -> Self {
        Self::for_receiver(Offloads::CSUM | Offloads::TSO4 | Offloads::TSO6 | Offloads::ECN)
    }

    /// Makes frames of the kinds that `accepted` has only; none without [`Offloads::CSUM`].
    #[must_use]
    pub fn for_receiver(accepted: Offloads) -> Self {
        let accepted = if accepted.contains(Offloads::CSUM) { accepted } else { Offloads::empty() };
        Self { accepted, held: Vec::with_capacity(MAX_FLOWS), turn: 0, counters: GroCounters::default() }
    }

    /// What became of the packets so far.
    pub fn counters(&self) -> GroCounters {
        self.counters
    }

    /// Whether nothing is held.
    pub fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// Takes a packet: holds it, appends it to one that is held, or delivers it, after what is held of its
    /// flow. Packets whose checksum was verified for this are delivered with `F_DATA_VALID`.
    pub fn push(&mut self, mut chain: Chain, mut deliver: impl FnMut(Chain)) {
        self.counters.packets += 1;
        if self.accepted.is_empty() {
            return deliver(chain);
        }
        let mut head = [0; MAX_HEAD];
        chain.copy_to(&mut head);
        let packet = match Candidate::read(chain.header, head, chain.len()) {
            Ok(packet) => packet,
            Err(Unfit::Foreign) => return deliver(chain),
            Err(Unfit::Unreadable) => {
                // Whatever it is, nothing that came before it is late.
                self.flush(&mut deliver);
                return deliver(chain);
            }
        };
        let flow = packet.flow();
        if packet.is_fragment() {
            while let Some(at) = self.held.iter().position(|held| held.flow.is_between(&flow)) {
                self.release(at, &mut deliver);
            }
            return deliver(chain);
        }
        let found = self.held.iter().position(|held| held.flow == flow);
        if !self.may_merge(&packet, &mut chain) {
            if let Some(at) = found {
                self.release(at, &mut deliver);
            }
            return deliver(chain);
        }
        if let Some(at) = found {
            let held = &mut self.held[at];
            if !held.run.takes(&packet) {
                self.release(at, &mut deliver);
            } else {
                self.counters.merged += 1;
                if held.append(&packet, chain) {
                    self.release(at, &mut deliver);
                }
                return;
            }
        }
        // Its headers will be written, in one place.
        let first = chain.bufs().first();
        let writable = first.is_some_and(|buf| buf.len() >= packet.headers() && buf.is_exclusive());
        if !packet.may_be_first() || !writable {
            return deliver(chain);
        }
        if self.held.len() == MAX_FLOWS {
            self.turn = (self.turn + 1) % MAX_FLOWS;
            self.release(self.turn, &mut deliver);
        }
        self.held.push(Held { flow, run: Run::new(packet), chain });
    }

    /// Delivers all that is held.
    pub fn flush(&mut self, mut deliver: impl FnMut(Chain)) {
        for held in self.held.drain(..) {
            self.counters.frames += u64::from(held.run.packets() > 1);
            deliver(held.finish());
        }
    }

    fn release(&mut self, at: usize, deliver: &mut impl FnMut(Chain)) {
        let held = self.held.swap_remove(at);
        self.counters.frames += u64::from(held.run.packets() > 1);
        deliver(held.finish());
    }

    /// Whether a packet can be part of a larger frame: as its headers say, and with good checksums, which its header says
    /// from then on.
    fn may_merge(&mut self, packet: &Candidate, chain: &mut Chain) -> bool {
        if !packet.fits(self.accepted) {
            return false;
        }
        let good = packet.has_good_checksums(chain.pieces());
        self.counters.bad_checksum += u64::from(!good);
        if good && !chain.header.needs_csum() {
            chain.header.flags |= F_DATA_VALID;
        }
        good
    }
}

/// A packet that waits for more of its flow.
#[derive(Debug)]
struct Held {
    flow: Flow,
    run: Run,
    /// The first packet, and the payload of the others behind it.
    chain: Chain,
}

impl Held {
    /// Takes a packet's payload; true when it is the last.
    fn append(&mut self, packet: &Candidate, mut chain: Chain) -> bool {
        chain.pull(packet.headers());
        self.chain.append(chain);
        self.run.append(packet)
    }

    /// The packet, with the headers of the frame it has become.
    fn finish(self) -> Chain {
        let Held { mut run, mut chain, .. } = self;
        if run.packets() == 1 {
            return chain;
        }
        let headers = run.first().headers();
        let (header, head) = run.finish();
        if let Some(first) = chain.first_mut() {
            first.write().copy_from(&head[..headers]);
        }
        chain.header = header;
        chain
    }
}

#[cfg(test)]
mod tests;
