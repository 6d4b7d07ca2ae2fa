//! What the front end sends: slots to packets, packets to frames.
//!
//! [`Tx`] owns the ring, [`Sent`] the burst that was taken from it: what lies in the front end's pages is only referred to,
//! what the hypervisor copied is in the staging buffer. Frames borrow from both.

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
use crate::offload::{Gso, HEADERS, Marks};

/// Slots of a packet that are tolerated, as in Linux (`fatal_skb_slots`): up to here a packet with too many is answered with
/// errors, beyond the front end is malicious.
const FATAL_SLOTS: usize = 20;

/// Bytes to be copied after which no more packets are taken into a burst: several large ones amortise a batch as well as
/// many small ones do, and more than this would push them out of the second-level cache.
const STAGED_BYTES: usize = 256 * 1024;

/// Packets that were answered with an error, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rejected {
    /// Shorter than an Ethernet header.
    pub too_short: u64,
    /// Too many slots, or sizes that do not add up.
    pub bad_slots: u64,
    /// An offload that the frame does not agree with.
    pub bad_header: u64,
    /// Pages that are not granted to us.
    pub bad_memory: u64,
}

/// Where a piece of a packet lies.
#[derive(Clone, Copy, Debug)]
enum Place {
    /// In a slot of the window.
    Page(Slot),
    /// In the staging buffer, from this byte on.
    Staged(u32),
    /// Not here yet.
    Elsewhere,
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
    /// Bytes; 0 for a packet that goes nowhere.
    len: u32,
    /// Pieces.
    first: u32,
    count: u32,
    /// The answer to its first slot.
    answer: u32,
    /// Bytes from `at` on in `heads` that stand for the first of the packet.
    head: u32,
    head_len: u16,
    marks: Marks,
}

/// A burst of packets.
#[derive(Debug, Default)]
pub(super) struct Sent {
    packets: Vec<Packet>,
    pieces: Vec<Piece>,
    /// Private copies of the first bytes of packets that had to be looked into.
    heads: Vec<u8>,
    staging: Vec<u8>,
}

/// The back end's side of a transmit ring.
#[derive(Debug)]
pub(super) struct Tx<A: Words> {
    pub(super) ring: BackRing<A, TxSlot>,
    answers: Vec<TxResponse>,
    /// Packets of the staged pieces, in order.
    staged: Vec<u32>,
    pub(super) rejected: Rejected,
}

impl<A: Words> Tx<A> {
    pub(super) fn new(ring: BackRing<A, TxSlot>) -> Self {
        Self { ring, answers: Vec::new(), staged: Vec::new(), rejected: Rejected::default() }
    }

    /// Takes up to `max` packets; returns how many, frames or not. A packet that breaks the rules of the ring breaks the
    /// ring, and those before it are still good. The last burst must have been [completed](Self::complete).
    pub(super) fn poll(
        &mut self,
        max: usize,
        pages: &mut Pages,
        sent: &mut Sent,
        multicast: &mut Multicast,
    ) -> usize {
        if !self.answers.is_empty() {
            // The last burst has not been completed.
            return 0;
        }
        sent.heads.clear();
        if (self.ring.available() as usize) < max {
            self.ring.refresh();
        }
        let (mut taken, mut elsewhere) = (0, 0);
        while taken < max && elsewhere < STAGED_BYTES && self.ring.available() > 0 {
            let (answers, pieces) = (self.answers.len(), sent.pieces.len());
            match self.take(sent, multicast) {
                Ok(Some(packet)) => {
                    elsewhere += locate(&mut sent.pieces[pieces..], pages);
                    sent.packets.push(packet);
                }
                Ok(None) => sent.pieces.truncate(pieces),
                Err(fault) => {
                    self.ring.break_with(fault);
                    self.answers.truncate(answers);
                    sent.pieces.truncate(pieces);
                    break;
                }
            }
            taken += 1;
        }
        let settled = pages.settle(Access::Read);
        if elsewhere > 0 || !settled {
            self.fetch(pages, sent);
        }
        self.look_into(pages, sent);
        taken
    }

    /// The next slot, which must be there: the front end publishes whole packets.
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

    /// Takes one packet's slots, decides on the answers, and appends its pieces. `None` for what is no packet, and a
    /// packet that was refused.
    #[inline]
    fn take(&mut self, sent: &mut Sent, multicast: &mut Multicast) -> Result<Option<Packet>, Fault> {
        let first = TxRequest::from_slot(self.next()?);
        let answer = self.answers.len();
        self.answers.push(TxResponse { id: first.id, status: OKAY });
        let mut marks = Marks { csum_blank: first.flags.contains(TxFlags::CSUM_BLANK), ..Marks::default() };
        let mut order = None;
        if first.flags.contains(TxFlags::EXTRA_INFO) {
            order = self.take_extras(&mut marks, multicast)?;
        }
        let at = sent.pieces.len();
        let piece = |request: TxRequest| Piece {
            gref: request.gref,
            offset: request.offset,
            len: request.size,
            place: Place::Elsewhere,
        };
        sent.pieces.push(piece(first));
        let mut more = first.flags.contains(TxFlags::MORE_DATA);
        // The first slot's size is that of the whole packet.
        let mut own = Some(first.size);
        let mut slots = 1;
        while more {
            let request = TxRequest::from_slot(self.next()?);
            self.answers.push(TxResponse { id: request.id, status: OKAY });
            slots += 1;
            if slots > FATAL_SLOTS {
                return Err(Fault::TooManySlots);
            }
            if usize::from(request.offset) + usize::from(request.size) > PAGE {
                return Err(Fault::CrossesPage);
            }
            own = own.and_then(|own| own.checked_sub(request.size));
            // An empty piece is legal and nothing (XSA-448).
            if request.size > 0 {
                sent.pieces.push(piece(request));
            }
            more = request.flags.contains(TxFlags::MORE_DATA);
        }
        if let Some(okay) = order {
            self.answers[answer].status = if okay { OKAY } else { ERROR };
            return Ok(None);
        }
        let Some(own) = own.filter(|_| slots <= MAX_SLOTS) else {
            self.rejected.bad_slots += 1;
            return Ok(self.refuse(answer));
        };
        if usize::from(first.offset) + usize::from(own) > PAGE {
            return Err(Fault::CrossesPage);
        }
        if usize::from(first.size) < MIN_FRAME {
            self.rejected.too_short += 1;
            return Ok(self.refuse(answer));
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
            answer: answer as u32,
            head: 0,
            head_len: 0,
            marks,
        }))
    }

    /// Takes the extras behind a packet's first slot. If they are orders rather than about a packet: whether they were
    /// carried out.
    #[cold]
    fn take_extras(&mut self, marks: &mut Marks, multicast: &mut Multicast) -> Result<Option<bool>, Fault> {
        let (mut order, mut known) = (None, 0);
        loop {
            let [low, high, _] = self.next()?;
            self.answers.push(TxResponse { id: 0, status: NULL });
            let (extra, more) = Extra::decode([low, high]).ok_or(Fault::BadExtra)?;
            // One of each kind at most, so a chain of them ends.
            if known & extra.bit() != 0 {
                return Err(Fault::BadExtra);
            }
            known |= extra.bit();
            match extra {
                Extra::Gso { size, kind } => marks.gso = Some(Gso { size, kind }),
                Extra::MulticastAdd(mac) => order = Some(multicast.add(mac) && order != Some(false)),
                Extra::MulticastDel(mac) => {
                    multicast.remove(mac);
                    order = Some(order != Some(false));
                }
                // We compute our own, and a guest's says what the guest likes.
                Extra::Hash { .. } => {}
            }
            if !more {
                return Ok(order);
            }
        }
    }

    /// Turns the answers of a packet into errors, from its first slot on.
    #[cold]
    fn refuse(&mut self, answer: usize) -> Option<Packet> {
        for answer in &mut self.answers[answer..] {
            if answer.status != NULL {
                answer.status = ERROR;
            }
        }
        None
    }

    /// Copies, in one batch, every piece that is in no page.
    #[inline(never)]
    fn fetch(&mut self, pages: &mut Pages, sent: &mut Sent) {
        let Sent { packets, pieces, staging, .. } = sent;
        self.staged.clear();
        let mut bytes = 0;
        for (number, packet) in (0u32..).zip(&*packets) {
            for piece in &mut pieces[packet.first as usize..][..packet.count as usize] {
                if let Place::Page(slot) = piece.place {
                    if !pages.is_lost(slot) {
                        continue;
                    }
                    pages.release(slot);
                }
                piece.place = Place::Staged(bytes);
                // At most a ring of pages.
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
        let Self { staged, answers, rejected, .. } = self;
        pages.copy(segments, |i, done| {
            let packet = &mut packets[staged[i] as usize];
            if !done && packet.len > 0 {
                packet.len = 0;
                answers[packet.answer as usize].status = ERROR;
                rejected.bad_memory += 1;
            }
        });
    }

    /// Gathers the first bytes of packets with something left to do (XSA-423), finds out what, and refuses those that do
    /// not agree with it. The frame will have the bytes that were looked at, whatever the front end writes there.
    #[inline]
    fn look_into(&mut self, pages: &Pages, sent: &mut Sent) {
        let Sent { packets, pieces, heads, staging } = sent;
        for packet in packets.iter_mut() {
            if packet.len == 0 || packet.marks == Marks::default() {
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
            match packet.marks.header(&heads[at..], packet.len as usize) {
                Ok(header) => packet.header = header,
                Err(_) => {
                    packet.len = 0;
                    self.answers[packet.answer as usize].status = ERROR;
                    self.rejected.bad_header += 1;
                }
            }
        }
    }

    /// Lets go of the pages and answers every slot of the last [`poll`](Self::poll); true when the front end wants to be
    /// notified.
    pub(super) fn complete(&mut self, pages: &mut Pages, sent: &mut Sent) -> bool {
        for piece in &sent.pieces {
            if let Place::Page(slot) = piece.place {
                pages.release(slot);
            }
        }
        sent.packets.clear();
        sent.pieces.clear();
        // Before the answers: the front end may do with the pages what it likes as soon as it has them.
        pages.sweep();
        for answer in self.answers.drain(..) {
            self.ring.respond(answer.to_slot());
        }
        self.ring.publish()
    }
}

/// Finds out where the pieces of a packet are; returns how many bytes will have to be copied.
#[inline]
fn locate(pieces: &mut [Piece], pages: &mut Pages) -> usize {
    let mut elsewhere = 0;
    for (i, piece) in pieces.iter_mut().enumerate() {
        match pages.find(piece.gref, Access::Read) {
            Some(slot) => {
                piece.place = Place::Page(slot);
                // The lines that are copied first; all misses of a burst overlap.
                if i < 2
                    && let Some(bytes) = pages.read(slot, piece.offset, piece.len.into())
                {
                    bytes.prefetch();
                    bytes.skip(64).prefetch();
                }
            }
            None => elsewhere += usize::from(piece.len),
        }
    }
    elsewhere
}

#[inline(always)]
fn bytes<'m>(piece: &Piece, pages: &'m Pages, staging: &'m [u8]) -> ReadSlice<'m> {
    let len = usize::from(piece.len);
    match piece.place {
        Place::Page(slot) => pages.read(slot, piece.offset, len).unwrap_or(ReadSlice::EMPTY),
        Place::Staged(at) => ReadSlice::from(&staging[at as usize..][..len]),
        Place::Elsewhere => ReadSlice::EMPTY,
    }
}

impl Sent {
    /// Appends the frames of the burst.
    pub(super) fn frames<'m>(&'m self, pages: &'m Pages, burst: &mut Burst<'m>) {
        for packet in &self.packets {
            if packet.len == 0 {
                continue;
            }
            let pieces = &self.pieces[packet.first as usize..][..packet.count as usize];
            // Most packets lie in one piece and ask for nothing.
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
