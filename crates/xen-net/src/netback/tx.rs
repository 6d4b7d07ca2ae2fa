//! [`Tx`]: the back end's side of a transmit ring. It takes slots, assembles packets, and lends
//! them as frames.
//!
//! A [`Queue`](super::Queue) owns it and calls it on its thread: [`Tx::poll`] takes a burst into a
//! [`TxBurst`], whose frames borrow from the front end's mapped pages and from the staging buffer,
//! into which the hypervisor copied the rest; [`Tx::complete`] releases the pages and publishes the
//! responses.

use ringferry_memory::{ReadSlice, Words, WriteSlice};
use ringferry_packet::ether::MIN_FRAME;
use ringferry_packet::frame::Burst;
use ringferry_packet::vnet::Header;
use ringferry_xen::domain::PAGE;
use ringferry_xen::grant::{Access, GrantRef, Local};
use ringferry_xen::netif::wire::{
    ERROR, Extra, MAX_SLOTS, NULL, OKAY, TxFlags, TxRequest, TxResponse, TxSlot,
};
use ringferry_xen::netif::{BackRing, Fault};

use super::cache::Slot;
use super::multicast::Multicast;
use super::pages::{Pages, segment};
use crate::offload::{Gso, HEADERS, NetifOffload};

/// Most slots of a packet that are tolerated, as in Linux (`fatal_skb_slots`): a packet with more
/// than [`MAX_SLOTS`] is answered with errors, and with more than this its front end is malicious.
const FATAL_SLOTS: usize = 20;

/// Number of bytes to be copied after which no more packets are taken into a burst: several large
/// ones amortise a batch as well as many small ones do, and more than this would push them out of
/// the second-level cache.
const STAGED_BYTES: usize = 256 * 1024;

/// Counters of packets that were answered with an error, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rejected {
    /// Packets shorter than an Ethernet header.
    pub too_short: u64,
    /// Packets with too many slots, or with sizes that do not add up.
    pub bad_slots: u64,
    /// Packets with an offload that contradicts the frame.
    pub bad_header: u64,
    /// Packets in pages that are not granted to us.
    pub bad_memory: u64,
}

/// The place where a piece of a packet can be read.
#[derive(Clone, Copy, Debug)]
enum Place {
    /// The piece lies in a slot of the window.
    Page(Slot),
    /// The piece lies in the staging buffer, from this byte on.
    Staged(u32),
    /// The piece is still to be copied.
    Unmapped,
}

/// A piece of a packet, within one page.
#[derive(Clone, Copy, Debug)]
struct Piece {
    gref: GrantRef,
    offset: u16,
    len: u16,
    place: Place,
}

#[derive(Clone, Copy, Debug)]
struct Packet {
    header: Header,
    /// Length in bytes; 0 for a packet that was dropped.
    len: u32,
    /// Index of the first piece.
    first: u32,
    count: u32,
    /// Index of the response to the first slot.
    response: u32,
    /// Offset in `heads` of the private copy that replaces the first `head_len` bytes of the
    /// packet.
    head: u32,
    head_len: u16,
    offload: NetifOffload,
}

/// A burst of packets with the pieces that they consist of.
#[derive(Debug, Default)]
pub(super) struct TxBurst {
    packets: Vec<Packet>,
    pieces: Vec<Piece>,
    /// Private copies of the first bytes of packets with offloads.
    heads: Vec<u8>,
    staging: Vec<u8>,
}

/// The back end's side of a transmit ring, with the responses to the current burst.
#[derive(Debug)]
pub(super) struct Tx<A: Words> {
    pub(super) ring: BackRing<A, TxSlot>,
    responses: Vec<TxResponse>,
    /// The packet of each staged piece, in order.
    staged: Vec<u32>,
    pub(super) rejected: Rejected,
}

impl<A: Words> Tx<A> {
    pub(super) fn new(ring: BackRing<A, TxSlot>) -> Self {
        Self { ring, responses: Vec::new(), staged: Vec::new(), rejected: Rejected::default() }
    }

    /// Takes up to `max` packets; returns how many, valid or not. A packet that breaks the rules of
    /// the ring breaks the ring, and those before it remain valid. The last burst must have been
    /// [completed](Self::complete).
    pub(super) fn poll(
        &mut self,
        max: usize,
        pages: &mut Pages,
        sent: &mut TxBurst,
        multicast: &mut Multicast,
    ) -> usize {
        if !self.responses.is_empty() {
            // The last burst has not been completed.
            return 0;
        }
        sent.heads.clear();
        if (self.ring.available() as usize) < max {
            self.ring.refresh();
        }
        let (mut taken, mut unmapped) = (0, 0);
        while taken < max && unmapped < STAGED_BYTES && self.ring.available() > 0 {
            let (responses, pieces) = (self.responses.len(), sent.pieces.len());
            match self.take_packet(sent, multicast) {
                Ok(Some(packet)) => {
                    unmapped += locate(&mut sent.pieces[pieces..], pages);
                    sent.packets.push(packet);
                }
                Ok(None) => sent.pieces.truncate(pieces),
                Err(fault) => {
                    self.ring.break_with(fault);
                    self.responses.truncate(responses);
                    sent.pieces.truncate(pieces);
                    break;
                }
            }
            taken += 1;
        }
        let all_mapped = pages.map_pending(Access::Read);
        if unmapped > 0 || !all_mapped {
            self.fetch(pages, sent);
        }
        self.check_headers(pages, sent);
        taken
    }

    /// Takes the next slot, which must be there: the front end publishes whole packets.
    #[inline]
    fn next(&mut self) -> Result<TxSlot, Fault> {
        match self.ring.take() {
            Some(slot) => Ok(slot),
            None => {
                self.ring.refresh();
                self.ring.take().ok_or(Fault::Incomplete)
            }
        }
    }

    /// Takes one packet's slots, appends its pieces, and prepares its responses. `None` for slots
    /// that are no packet, and for a packet that was refused.
    #[inline]
    fn take_packet(
        &mut self,
        sent: &mut TxBurst,
        multicast: &mut Multicast,
    ) -> Result<Option<Packet>, Fault> {
        let first = TxRequest::from_slot(self.next()?);
        let response = self.responses.len();
        self.responses.push(TxResponse { id: first.id, status: OKAY });
        let mut offload =
            NetifOffload { csum_blank: first.flags.contains(TxFlags::CSUM_BLANK), ..NetifOffload::default() };
        let mut command = None;
        if first.flags.contains(TxFlags::EXTRA_INFO) {
            command = self.take_extras(&mut offload, multicast)?;
        }
        let at = sent.pieces.len();
        let piece = |request: TxRequest| Piece {
            gref: request.gref,
            offset: request.offset,
            len: request.size,
            place: Place::Unmapped,
        };
        sent.pieces.push(piece(first));
        let mut more = first.flags.contains(TxFlags::MORE_DATA);
        // The size in the first slot is that of the whole packet.
        let mut own = Some(first.size);
        let mut slots = 1;
        while more {
            let request = TxRequest::from_slot(self.next()?);
            self.responses.push(TxResponse { id: request.id, status: OKAY });
            slots += 1;
            if slots > FATAL_SLOTS {
                return Err(Fault::TooManySlots);
            }
            if usize::from(request.offset) + usize::from(request.size) > PAGE {
                return Err(Fault::CrossesPage);
            }
            own = own.and_then(|own| own.checked_sub(request.size));
            // An empty piece is legal and ignored (XSA-448).
            if request.size > 0 {
                sent.pieces.push(piece(request));
            }
            more = request.flags.contains(TxFlags::MORE_DATA);
        }
        if let Some(okay) = command {
            self.responses[response].status = if okay { OKAY } else { ERROR };
            return Ok(None);
        }
        let Some(own) = own.filter(|_| slots <= MAX_SLOTS) else {
            self.rejected.bad_slots += 1;
            return Ok(self.refuse(response));
        };
        if usize::from(first.offset) + usize::from(own) > PAGE {
            return Err(Fault::CrossesPage);
        }
        if usize::from(first.size) < MIN_FRAME {
            self.rejected.too_short += 1;
            return Ok(self.refuse(response));
        }
        sent.pieces[at].len = own;
        if own == 0 {
            sent.pieces.remove(at);
        }
        Ok(Some(Packet {
            header: Header::default(),
            len: first.size.into(),
            first: at as u32,
            count: (sent.pieces.len() - at) as u32,
            response: response as u32,
            head: 0,
            head_len: 0,
            offload,
        }))
    }

    /// Takes the extras after a packet's first slot. If they are commands rather than about a
    /// packet, returns whether they were carried out.
    #[cold]
    fn take_extras(
        &mut self,
        offload: &mut NetifOffload,
        multicast: &mut Multicast,
    ) -> Result<Option<bool>, Fault> {
        let (mut command, mut known) = (None, 0);
        loop {
            let [low, high, _] = self.next()?;
            self.responses.push(TxResponse { id: 0, status: NULL });
            let (extra, more) = Extra::decode([low, high]).ok_or(Fault::BadExtra)?;
            // Each kind may come once, so a chain of extras ends.
            if known & extra.bit() != 0 {
                return Err(Fault::BadExtra);
            }
            known |= extra.bit();
            match extra {
                Extra::Gso { size, kind } => offload.gso = Some(Gso { size, kind }),
                Extra::MulticastAdd(mac) => command = Some(multicast.add(mac) && command != Some(false)),
                Extra::MulticastDel(mac) => {
                    multicast.remove(mac);
                    command = Some(command != Some(false));
                }
                // The guest's hash is ignored: it is under the guest's control, and we compute our
                // own.
                Extra::Hash { .. } => {}
            }
            if !more {
                return Ok(command);
            }
        }
    }

    /// Turns the responses of a packet into errors, from its first slot on.
    #[cold]
    fn refuse(&mut self, response: usize) -> Option<Packet> {
        for response in &mut self.responses[response..] {
            if response.status != NULL {
                response.status = ERROR;
            }
        }
        None
    }

    /// Copies every piece that is not mapped, in one batch.
    #[inline(never)]
    fn fetch(&mut self, pages: &mut Pages, sent: &mut TxBurst) {
        let TxBurst { packets, pieces, staging, .. } = sent;
        self.staged.clear();
        let mut bytes = 0;
        for (number, packet) in (0u32..).zip(&*packets) {
            for piece in &mut pieces[packet.first as usize..][..packet.count as usize] {
                if let Place::Page(slot) = piece.place {
                    if !pages.is_poisoned(slot) {
                        continue;
                    }
                    pages.release(slot);
                }
                piece.place = Place::Staged(bytes);
                // The sum is at most a ring of pages.
                bytes += u32::from(piece.len);
                self.staged.push(number);
            }
        }
        if staging.len() < bytes as usize {
            staging.resize(bytes as usize, 0);
        }
        let mut room = &mut staging[..];
        let staged = pieces.iter().filter(|piece| matches!(piece.place, Place::Staged(_)));
        let segments = staged.map(|piece| {
            let (this, rest) = std::mem::take(&mut room).split_at_mut(piece.len.into());
            room = rest;
            segment(piece.gref, piece.offset, Local::To(WriteSlice::from(this)))
        });
        let Self { staged, responses, rejected, .. } = self;
        pages.copy(segments, |i, done| {
            let packet = &mut packets[staged[i] as usize];
            if !done && packet.len > 0 {
                packet.len = 0;
                responses[packet.response as usize].status = ERROR;
                rejected.bad_memory += 1;
            }
        });
    }

    /// Copies the first bytes of packets with offloads (XSA-423), derives their headers from the
    /// copies, and refuses packets that contradict their offloads. The frame will have the bytes
    /// that were checked, whatever the front end writes to its pages.
    #[inline]
    fn check_headers(&mut self, pages: &Pages, sent: &mut TxBurst) {
        let TxBurst { packets, pieces, heads, staging } = sent;
        for packet in packets.iter_mut() {
            if packet.len == 0 || packet.offload == NetifOffload::default() {
                continue;
            }
            let at = heads.len();
            let len = HEADERS.min(packet.len as usize);
            heads.resize(at + len, 0);
            let mut have = 0;
            for piece in &pieces[packet.first as usize..][..packet.count as usize] {
                have += bytes(piece, pages, staging).copy_to(&mut heads[at + have..]);
            }
            debug_assert_eq!(have, len);
            (packet.head, packet.head_len) = (at as u32, len as u16);
            match packet.offload.header(&heads[at..], packet.len as usize) {
                Ok(header) => packet.header = header,
                Err(_) => {
                    packet.len = 0;
                    self.responses[packet.response as usize].status = ERROR;
                    self.rejected.bad_header += 1;
                }
            }
        }
    }

    /// Releases the pages and publishes the responses to every slot of the last
    /// [`poll`](Self::poll); returns true if the front end wants an event.
    pub(super) fn complete(&mut self, pages: &mut Pages, sent: &mut TxBurst) -> bool {
        for piece in &sent.pieces {
            if let Place::Page(slot) = piece.place {
                pages.release(slot);
            }
        }
        sent.packets.clear();
        sent.pieces.clear();
        // Pages are unmapped before the responses are visible, because the front end may reuse them
        // from then on.
        pages.sweep();
        for response in self.responses.drain(..) {
            self.ring.respond(response.to_slot());
        }
        self.ring.publish()
    }
}

/// Looks up the pages of a packet's pieces; returns how many bytes have to be copied.
#[inline]
fn locate(pieces: &mut [Piece], pages: &mut Pages) -> usize {
    let mut unmapped = 0;
    for (i, piece) in pieces.iter_mut().enumerate() {
        match pages.lookup(piece.gref, Access::Read) {
            Some(slot) => {
                piece.place = Place::Page(slot);
                // The cache lines that are read first are fetched together, so that all misses of a
                // burst overlap.
                if i < 2
                    && let Some(bytes) = pages.read(slot, piece.offset, piece.len.into())
                {
                    bytes.prefetch();
                    bytes.skip(64).prefetch();
                }
            }
            None => unmapped += usize::from(piece.len),
        }
    }
    unmapped
}

#[inline(always)]
fn bytes<'m>(piece: &Piece, pages: &'m Pages, staging: &'m [u8]) -> ReadSlice<'m> {
    let len = usize::from(piece.len);
    match piece.place {
        Place::Page(slot) => pages.read(slot, piece.offset, len).unwrap_or(ReadSlice::EMPTY),
        Place::Staged(at) => ReadSlice::from(&staging[at as usize..][..len]),
        Place::Unmapped => ReadSlice::EMPTY,
    }
}

impl TxBurst {
    /// Appends the valid frames of the burst to `burst`.
    pub(super) fn frames<'m>(&'m self, pages: &'m Pages, burst: &mut Burst<'m>) {
        for packet in &self.packets {
            if packet.len == 0 {
                continue;
            }
            let pieces = &self.pieces[packet.first as usize..][..packet.count as usize];
            // Fast path: most packets lie in one piece and have no offload.
            if let ([piece], 0) = (pieces, packet.head_len) {
                burst.push(packet.header, bytes(piece, pages, &self.staging));
                continue;
            }
            let mut frame = burst.build(packet.header, packet.len);
            let mut skip = usize::from(packet.head_len);
            frame.piece(ReadSlice::from(&self.heads[packet.head as usize..][..skip]));
            for piece in pieces {
                let bytes = bytes(piece, pages, &self.staging);
                frame.piece(bytes.skip(skip));
                skip -= skip.min(bytes.len());
            }
            frame.finish();
        }
    }
}
