//! Generic receive offload in software (GRO): merges segments of one TCP stream, or datagrams of one UDP flow, that
//! arrive in one burst to a frame that needs segmentation, as if its sender had not segmented it.
//!
//! A receiver keeps one [`Gro`] per queue, calls [`Gro::push`] for each packet of a burst and [`Gro::flush`] at its
//! end. It is the reverse of [`segment`](crate::segment): segmenting its output gives its input byte for byte, except for
//! checksums that were accepted without verification. No payload is copied: the buffers of a segment without its headers
//! are appended to the packet before it. Only the headers of the first packet are written.
//!
//! The rules are those of Linux (`inet_gro_receive`, `tcp_gro_receive`, `udp_gro_receive_segment`) or stricter: packets
//! with IPv4 options or IPv6 extension headers are not merged, nor are padded packets and those that need segmentation
//! already. Each flow stays in order: a packet that cannot be merged is delivered after the held packets of its flow.
//!
//! A device may write to the packets' memory at any time. Headers are copied once, checked, and written from that copy if
//! they change. Payload that changes after its checksum was verified is payload that the device could have sent.

mod rules;

use crate::buffer::Chain;
use crate::vnet::{F_DATA_VALID, Offloads};

pub use rules::{Candidate, Flow, MAX_FRAME, MAX_HEAD, MAX_PACKETS, Run, Unfit, behind};

/// Largest number of flows whose packets are held. A burst has up to 64 packets, so with more flows there are fewer than
/// four packets of each to merge. (Linux has eight hash buckets of eight.)
pub const MAX_FLOWS: usize = 16;

/// Counters of a [`Gro`] since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroCounters {
    /// Packets that were pushed.
    pub packets: u64,
    /// Packets that were appended to another one.
    pub merged: u64,
    /// Delivered frames that consist of more than one packet.
    pub frames: u64,
    /// Packets that were not merged because a checksum was wrong.
    pub bad_checksum: u64,
}

/// Merges the packets of a queue; see the [module](self). Packets that are held when it is dropped are lost.
#[derive(Debug)]
pub struct Gro {
    accepted: Offloads,
    held: Vec<Held>,
    /// Index of the flow that was released last because there were too many (round robin).
    victim: usize,
    counters: GroCounters,
}

impl Default for Gro {
    fn default() -> Self {
        Self::new()
    }
}

impl Gro {
    /// Makes one for a receiver that accepts unsegmented TCP. UDP, which is more sensitive to latency, is merged only
    /// [for receivers](Gro::for_receiver) that request it.
    #[must_use]
    pub fn new() -> Self {
        Self::for_receiver(Offloads::CSUM | Offloads::TSO4 | Offloads::TSO6 | Offloads::ECN)
    }

    /// Makes one for a receiver that accepts the offloads `accepted`: only such frames are made, and none without
    /// [`Offloads::CSUM`].
    #[must_use]
    pub fn for_receiver(accepted: Offloads) -> Self {
        let accepted = if accepted.contains(Offloads::CSUM) { accepted } else { Offloads::empty() };
        Self { accepted, held: Vec::with_capacity(MAX_FLOWS), victim: 0, counters: GroCounters::default() }
    }

    /// Returns a copy of the counters.
    pub fn counters(&self) -> GroCounters {
        self.counters
    }

    /// Returns true if no packet is held.
    pub fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// Adds a packet: appends it to a held packet of its flow, holds it, or delivers it after the held packets of its
    /// flow. Packets whose checksum was verified here are delivered with `F_DATA_VALID`.
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
                // The packet may belong to any flow, so all packets that arrived before it are delivered first.
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
        // The headers of a first packet will be rewritten, so they must be in one buffer with a single owner.
        let first = chain.bufs().first();
        let writable = first.is_some_and(|buf| buf.len() >= packet.headers() && buf.is_exclusive());
        if !packet.may_be_first() || !writable {
            return deliver(chain);
        }
        if self.held.len() == MAX_FLOWS {
            self.victim = (self.victim + 1) % MAX_FLOWS;
            self.release(self.victim, &mut deliver);
        }
        self.held.push(Held { flow, run: Run::new(packet), chain });
    }

    /// Delivers all held packets, at the end of a burst.
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

    /// Returns true if a packet can be part of a larger frame: its headers allow it and its checksums are valid. If so,
    /// its virtual header records that the checksum is valid.
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

/// A held packet, which waits for more packets of its flow.
#[derive(Debug)]
struct Held {
    flow: Flow,
    run: Run,
    /// The first packet, followed by the payload of the others.
    chain: Chain,
}

impl Held {
    /// Appends the payload of a packet. Returns true if no other may follow it.
    fn append(&mut self, packet: &Candidate, mut chain: Chain) -> bool {
        chain.pull(packet.headers());
        self.chain.append(chain);
        self.run.append(packet)
    }

    /// Writes the headers of the merged frame and returns it.
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
