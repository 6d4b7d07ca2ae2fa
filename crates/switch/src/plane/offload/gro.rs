//! Generic receive offload (GRO): packets of one flow that go to a receiver of segmentation offloads are
//! merged into one frame on the way: one write to a tap, one chain of a guest, in place of up to 64.
//!
//! Nothing is copied. The frame consists of changed headers, which are a private copy anyway, and slices of
//! the senders' memory; [`ringferry_packet::gro`] decides which packets can be merged, and a merged frame
//! that is segmented again yields the packets that were sent. Checksums that were not verified yet are
//! verified over the sender's memory before. A sender that changes its memory afterwards harms its own flow
//! only: it could have sent the result openly.
//!
//! **Order.** A burst's frames to one receiver become [`Unit`]s. A unit has the place of its first packet,
//! and takes later packets of the same flow only as long as it has taken every packet of that flow since:
//! thus packets of a flow never overtake each other. A packet that may belong to any flow (a fragment,
//! headers that cannot be read) ends all units before it. Between flows there is no order to keep. Merging
//! only neighbours would be simpler, but a guest with several connections, or a burst of many senders'
//! answers, interleaves them packet by packet, and then nothing has a neighbour of its own.
//!
//! **Cost.** A packet that cannot begin a unit (small ones to guests, unsegmented ones) costs a comparison.
//! Otherwise a few loads tell whether the packet is the only one of its flow in the burst
//! ([`RepeatedFlows`]); if it is not, its headers are parsed, which takes several hundred instructions.
//! Nothing is held from burst to burst, so nothing is delayed.

use ringferry_memory::ReadSlice;
use ringferry_packet::ether::{TYPE_IPV4, TYPE_IPV6, TYPE_VLAN};
use ringferry_packet::flow::one_way_flow_hash;
use ringferry_packet::frame::{Burst, Frame};
use ringferry_packet::gro::{Candidate, Flow, MAX_FLOWS, MAX_HEAD, Run, Unfit, behind};
use ringferry_packet::vnet::{Header, Offloads};

use crate::plane::offload::gso::{beginning, whole};
use crate::plane::queues::FrameCost;

/// Least payload of the first packet of a unit, in bytes, where each frame costs a system call: any.
const LEAST_FOR_SYSTEM_CALL: usize = 1;
/// Least payload of the first packet of a unit, in bytes, where each frame costs a descriptor. With less
/// payload there is less to save in the guest than is spent on reading headers here, of every packet, merged
/// or not; and packets with little payload are those that come by the million. Datagrams are not merged for a
/// guest either, which would have to cut them again for its sockets: merging costs this side some 1300
/// instructions per packet, 4000 with a checksum to verify. TCP pays that back with fewer acknowledgements.
const LEAST_FOR_DESCRIPTOR: usize = 512;
/// Headers of the shortest packet: Ethernet, IPv4, UDP.
const SHORTEST_HEADERS: usize = 42;

/// The terms of merging for a receiver: the least payload, and the protocols.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Terms {
    accepts: Offloads,
    /// Least payload of a unit's first packet, in bytes.
    least: usize,
    /// If true, datagrams are not merged.
    only_tcp: bool,
}

impl Terms {
    /// Returns the terms of a receiver that takes `accepts`; `None` if nothing can be merged for it.
    #[inline]
    pub(crate) fn new(accepts: Offloads, cost: FrameCost) -> Option<Terms> {
        let (accepts, least, only_tcp) = match cost {
            FrameCost::SystemCall => (accepts, LEAST_FOR_SYSTEM_CALL, false),
            FrameCost::Descriptor => (accepts - Offloads::USO, LEAST_FOR_DESCRIPTOR, true),
        };
        let merged = Offloads::TSO4 | Offloads::TSO6 | Offloads::USO;
        let any = accepts.contains(Offloads::CSUM) && accepts.intersects(merged);
        any.then_some(Terms { accepts, least, only_tcp })
    }

    /// Returns true if other packets may be appended to this frame, as far as its length and flags tell.
    #[inline]
    pub(crate) fn may_begin(&self, frame: &Frame) -> bool {
        frame.len as usize >= self.least + SHORTEST_HEADERS
            && !frame.header.is_gso()
            && (!self.only_tcp || may_be_tcp(frame.prefix()))
    }
}

/// Returns true if a frame with at most one tag may be TCP; its headers are checked fully later.
#[inline]
fn may_be_tcp(prefix: &[u8]) -> bool {
    const TCP: Option<&u8> = Some(&6);
    let be16 = |at: usize| prefix.get(at..at + 2).map(|bytes| u16::from_be_bytes([bytes[0], bytes[1]]));
    let l2 = if be16(12) == Some(TYPE_VLAN) { 4 } else { 0 };
    match be16(12 + l2) {
        Some(TYPE_IPV4) => prefix.get(l2 + 23) == TCP,
        Some(TYPE_IPV6) => prefix.get(l2 + 20) == TCP,
        _ => false,
    }
}

/// One delivery to a receiver.
#[derive(Debug)]
pub(crate) enum Unit<'a> {
    /// A frame of the burst, unchanged.
    Single(&'a Frame),
    /// Several packets of a flow, merged into one frame.
    Merged(Merged<'a>),
}

/// A frame made of several.
#[derive(Debug)]
pub(crate) struct Merged<'a> {
    /// The virtual header, which says how the frame is to be segmented.
    pub(crate) header: Header,
    /// The frame's first bytes: its headers, and maybe payload.
    pub(crate) first: &'a [u8],
    /// The bytes behind `first`, as slices of the senders' memory.
    pub(crate) rest: &'a [ReadSlice<'a>],
    /// Number of merged packets, at least 2.
    pub(crate) packets: usize,
}

/// A unit of the burst, as planned: a list of frames linked by `Coalescer::next`.
#[derive(Debug)]
struct Planned {
    first: u32,
    last: u32,
    /// The number of its run, if other packets were to be appended to it.
    run: Option<u32>,
}

/// A unit that packets may still be appended to.
#[derive(Debug)]
struct Open {
    flow: Flow,
    unit: u32,
    run: u32,
    /// True if the checksums of its first packet were verified.
    verified: bool,
}

/// Scratch storage for one receiver's part of a burst, reused from burst to burst.
#[derive(Debug, Default)]
pub(crate) struct Coalescer {
    units: Vec<Planned>,
    runs: Vec<Run>,
    open: Vec<Open>,
    /// For each frame of the burst, the frame that follows it in its unit.
    next: Vec<u32>,
    repeated: RepeatedFlows,
    pieces: Vec<ReadSlice<'static>>,
}

impl Coalescer {
    /// Plans the units of a receiver with these `terms`, and returns them in order. `frames` are indexes of frames of
    /// `burst`.
    pub(crate) fn units<'c, 'b>(
        &'c mut self,
        burst: &'b Burst<'_>,
        frames: impl Iterator<Item = usize> + Clone,
        terms: Terms,
    ) -> Units<'c, 'b> {
        self.units.clear();
        self.runs.clear();
        self.open.clear();
        self.next.resize(burst.len(), 0);
        self.repeated = RepeatedFlows::default();
        for index in frames.clone() {
            self.repeated.add(&burst.frames()[index]);
        }
        for index in frames {
            self.plan(burst, index as u32, terms);
        }
        let pieces = std::mem::take(&mut self.pieces);
        let Self { units, runs, next, pieces: storage, .. } = self;
        Units { burst, units: units.iter(), runs, next, pieces, storage }
    }

    /// Appends a frame to an open unit of its flow, or starts a new unit.
    #[inline]
    fn plan(&mut self, burst: &Burst<'_>, index: u32, terms: Terms) {
        let frame = &burst.frames()[index as usize];
        let may_begin = terms.may_begin(frame);
        if (may_begin || !self.open.is_empty()) && !self.repeated.is_single(frame) {
            match read(burst, frame) {
                Ok(packet) if !packet.is_fragment() => {
                    return self.join(burst, index, may_begin, packet, terms);
                }
                Err(Unfit::Foreign) => {}
                Ok(_) | Err(Unfit::Unreadable) => self.open.clear(),
            }
        }
        self.single(index, None);
    }

    fn join(&mut self, burst: &Burst<'_>, index: u32, may_begin: bool, packet: Candidate, terms: Terms) {
        let flow = packet.flow();
        let fits = packet.fits(terms.accepts);
        if let Some(at) = self.open.iter().position(|open| open.flow == flow) {
            let open = &mut self.open[at];
            let (unit, run) = (&mut self.units[open.unit as usize], &mut self.runs[open.run as usize]);
            let frames = burst.frames();
            // The first packet of a unit is summed up only when a second one comes.
            let good = |packet: &Candidate, index: u32| {
                packet.has_good_checksums(whole(burst, &frames[index as usize]))
            };
            if fits && run.takes(&packet) {
                open.verified |= good(run.first(), unit.first);
                if open.verified && good(&packet, index) {
                    self.next[unit.last as usize] = index;
                    unit.last = index;
                    if run.append(&packet) {
                        self.open.swap_remove(at);
                    }
                    return;
                }
            }
            self.open.swap_remove(at);
        }
        if !(may_begin && fits && packet.size() >= terms.least && packet.may_be_first()) {
            return self.single(index, None);
        }
        if self.open.len() == MAX_FLOWS {
            self.open.swap_remove(0);
        }
        let (unit, run) = (self.units.len() as u32, self.runs.len() as u32);
        self.open.push(Open { flow, unit, run, verified: false });
        self.runs.push(Run::new(packet));
        self.single(index, Some(run));
    }

    #[inline]
    fn single(&mut self, index: u32, run: Option<u32>) {
        self.units.push(Planned { first: index, last: index, run });
    }
}

/// The units of one receiver's part of a burst, returned one by one.
#[derive(Debug)]
pub(crate) struct Units<'c, 'b> {
    burst: &'b Burst<'b>,
    units: std::slice::Iter<'c, Planned>,
    runs: &'c mut [Run],
    next: &'c [u32],
    /// The slices of the last merged frame.
    pieces: Vec<ReadSlice<'b>>,
    /// Where the storage of `pieces` goes in the end.
    storage: &'c mut Vec<ReadSlice<'static>>,
}

impl Units<'_, '_> {
    /// Returns the next unit. It must be used before the next call.
    #[inline]
    pub(crate) fn next_unit(&mut self) -> Option<Unit<'_>> {
        let unit = self.units.next()?;
        match unit.run {
            Some(run) if unit.first != unit.last => {
                Some(Unit::Merged(self.merge(unit.first, unit.last, run as usize)))
            }
            _ => Some(Unit::Single(&self.burst.frames()[unit.first as usize])),
        }
    }

    /// Makes one frame of the packets of a run, which lie between the frames `first` and `last` of the burst.
    fn merge(&mut self, first: u32, last: u32, run: usize) -> Merged<'_> {
        let frames = self.burst.frames();
        let (frame, run) = (&frames[first as usize], &mut self.runs[run]);
        let (headers, packets) = (run.first().headers(), run.packets());
        let begins = headers.max(frame.prefix().len());
        self.pieces.clear();
        self.pieces.extend(behind(whole(self.burst, frame), begins));
        let mut index = first;
        while index != last {
            index = self.next[index as usize];
            self.pieces.extend(behind(whole(self.burst, &frames[index as usize]), headers));
        }
        let (header, first) = run.finish();
        Merged { header, first: &first[..begins], rest: &self.pieces, packets }
    }
}

impl Drop for Units<'_, '_> {
    fn drop(&mut self) {
        let mut pieces = std::mem::take(&mut self.pieces);
        pieces.clear();
        // Collecting an emptied vector's iterator in place keeps its allocation.
        *self.storage = pieces.into_iter().map(|_| ReadSlice::EMPTY).collect();
    }
}

/// Parses a frame's headers, and finds out whether it can be merged.
#[inline]
fn read(burst: &Burst<'_>, frame: &Frame) -> Result<Candidate, Unfit> {
    let mut head = [0; MAX_HEAD];
    beginning(burst, frame, &mut head);
    Candidate::read(frame.header, head, frame.len as usize)
}

/// A Bloom filter of the flows that have more than one packet in a burst: a set of the flow hashes that were seen, and
/// one of those seen again. Flows that share a hash are taken for one, which costs time and nothing else.
#[derive(Debug, Default)]
struct RepeatedFlows {
    once: [u64; 8],
    again: [u64; 8],
}

impl RepeatedFlows {
    #[inline]
    fn add(&mut self, frame: &Frame) {
        if let Some((word, bit)) = Self::place(frame) {
            self.again[word] |= self.once[word] & bit;
            self.once[word] |= bit;
        }
    }

    /// Returns true if a frame that was added is known to be the only one of its flow.
    #[inline]
    fn is_single(&self, frame: &Frame) -> bool {
        Self::place(frame).is_some_and(|(word, bit)| self.again[word] & bit == 0)
    }

    /// Returns the place of a frame's flow; `None` if its headers have to be read to tell the flow.
    #[inline]
    fn place(frame: &Frame) -> Option<(usize, u64)> {
        let hash = one_way_flow_hash(frame.full_prefix()?)?;
        Some(((hash >> 29) as usize, 1 << (hash >> 23 & 63)))
    }
}

#[cfg(test)]
mod tests;
