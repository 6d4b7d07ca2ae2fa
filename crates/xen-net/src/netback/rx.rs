//! What the front end receives: frames to pages, one copy where a page is mapped.

use smallvec::SmallVec;

use ringferry_memory::{ReadSlice, Words, WriteSlice};
use ringferry_packet::vnet::Header;
use ringferry_xen::domain::PAGE;
use ringferry_xen::grant::{Access, GrantRef, Local};
use ringferry_xen::netif::BackRing;
use ringferry_xen::netif::wire::{ERROR, Extra, MAX_PACKET, RxFlags, RxRequest, RxResponse, RxSlot};

use super::cache::Slot;
use super::pages::{Pages, segment};
use crate::offload::{Gso, Marks};

/// Bytes of a frame from which on it is worth a call of its own to copy it from where it lies, where the pages are not mapped.
/// Smaller ones are gathered and copied together.
const DIRECT: usize = 16 * 1024;

/// Bytes gathered at most: a burst of frames below [`DIRECT`] is less, and a caller that never flushes gets no more.
const STAGED_BYTES: usize = 1024 * 1024;

/// Why a frame was not delivered. Nothing was written and no page was spent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// The front end has not posted enough pages.
    #[error("no receive pages")]
    NoBuffers,
    /// Longer than one page without scatter-gather, or than any packet.
    #[error("frame larger than the front end takes")]
    TooBig,
    /// The frame asks for what the network interface cannot say.
    #[error("the frame needs an offload that the network interface does not have; do it in software")]
    Offload,
    /// The ring is broken.
    #[error("the ring is broken")]
    Broken,
    /// The queue's pages are lent to a burst of its own.
    #[error("the queue's pages are lent out; give them back first")]
    Lent,
}

/// A page that was posted and taken from the ring.
#[derive(Clone, Copy, Debug)]
struct Posted {
    id: u16,
    gref: GrantRef,
    /// Where it is mapped.
    slot: Option<Slot>,
}

/// Bytes in the staging buffer that belong into a page.
#[derive(Clone, Copy, Debug)]
struct Staged {
    gref: GrantRef,
    at: u32,
    len: u16,
    /// The response that says so.
    response: u32,
}

/// The back end's side of a receive ring.
#[derive(Debug)]
pub(super) struct Rx<A: Words> {
    pub(super) ring: BackRing<A, RxSlot>,
    sg: bool,
    /// Pages taken for this burst; those before `next` are spent.
    posted: Vec<Posted>,
    next: usize,
    /// Pages to take at a time: what is left of the burst.
    ahead: usize,
    /// The answers to those that are spent.
    responses: Vec<RxSlot>,
    staged: Vec<Staged>,
    staging: Vec<u8>,
}

impl<A: Words> Rx<A> {
    pub(super) fn new(ring: BackRing<A, RxSlot>, sg: bool) -> Self {
        Self {
            ring,
            sg,
            posted: Vec::new(),
            next: 0,
            ahead: 1,
            responses: Vec::new(),
            staged: Vec::new(),
            staging: Vec::new(),
        }
    }

    /// About how many frames follow until [`flush`](Self::flush).
    #[inline]
    pub(super) fn expect(&mut self, frames: usize) {
        self.ahead = frames.max(1);
    }

    /// Writes one frame, `first` and then `rest`.
    #[inline]
    pub(super) fn deliver(
        &mut self,
        pages: &mut Pages,
        header: Header,
        first: &[u8],
        rest: &[ReadSlice<'_>],
    ) -> Result<(), Refused> {
        if self.ring.fault().is_some() {
            return Err(Refused::Broken);
        }
        let len = first.len() + rest.iter().map(ReadSlice::len).sum::<usize>();
        let (marks, slots) = self.shape(&header, len)?;
        let count = len.div_ceil(PAGE);
        self.reserve(slots, pages)?;
        self.ahead = self.ahead.saturating_sub(1).max(1);
        // Most frames lie in one page, and that is mapped.
        let Posted { id, slot, .. } = self.posted[self.next];
        if count == 1
            && marks.gso.is_none()
            && let Some(room) = slot.and_then(|slot| pages.write(slot, len))
        {
            let mut room = room.skip(room.copy_from(first));
            for piece in rest {
                room = room.skip(piece.copy_to_slice(&room));
            }
            let response = RxResponse { id, offset: 0, flags: flags(marks), status: len as i16 };
            self.responses.push(response.to_slot());
            self.next += 1;
            return Ok(());
        }
        self.scatter(pages, marks, len, Source { first, rest, piece: ReadSlice::EMPTY })
    }

    /// What a frame asks for, and the slots that it takes.
    #[inline]
    pub(super) fn shape(&self, header: &Header, len: usize) -> Result<(Marks, usize), Refused> {
        let marks = Marks::of(header).ok_or(Refused::Offload)?;
        let count = len.div_ceil(PAGE);
        if len > MAX_PACKET || count > 1 && !self.sg {
            return Err(Refused::TooBig);
        }
        Ok((marks, count.max(1) + usize::from(marks.gso.is_some())))
    }

    /// Writes a frame page by page, where there may be an extra and pages may not be mapped.
    fn scatter(
        &mut self,
        pages: &mut Pages,
        marks: Marks,
        len: usize,
        mut source: Source<'_, '_>,
    ) -> Result<(), Refused> {
        let gather = len < DIRECT && self.staged_bytes() + len <= STAGED_BYTES;
        // Pieces that are copied from where they lie, with their responses.
        let mut direct = SmallVec::<[_; 32]>::new();
        let mut left = len;
        let mut response_flags = flags(marks);
        loop {
            let Posted { id, gref, slot } = self.posted[self.next];
            self.next += 1;
            let here = left.min(PAGE);
            left -= here;
            let response = self.responses.len() as u32;
            if let Some(room) = slot.and_then(|slot| pages.write(slot, here)) {
                source.fill(room);
            } else if gather {
                let at = self.staged_bytes();
                if self.staging.len() < at + here {
                    self.staging.resize(at + here, 0);
                }
                source.fill(WriteSlice::from(&mut self.staging[at..at + here]));
                self.staged.push(Staged { gref, at: at as u32, len: here as u16, response });
            } else {
                let mut offset = 0;
                while offset < here {
                    let piece = source.take(here - offset);
                    if piece.is_empty() {
                        break;
                    }
                    direct.push((segment(gref, offset as u16, Local::From(piece)), response));
                    offset += piece.len();
                }
            }
            response_flags.set(RxFlags::MORE_DATA, left > 0);
            let written = RxResponse { id, offset: 0, flags: response_flags, status: here as i16 };
            self.responses.push(written.to_slot());
            if let (Some(Gso { size, kind }), true) =
                (marks.gso, response_flags.contains(RxFlags::EXTRA_INFO))
            {
                // The extra takes the next slot, and what was posted there stays as it is.
                self.responses.push(Extra::Gso { size, kind }.encode(false));
                self.next += 1;
            }
            response_flags = RxFlags::empty();
            if left == 0 {
                break;
            }
        }
        if !direct.is_empty() {
            let written: SmallVec<[u32; 32]> = direct.iter().map(|(_, response)| *response).collect();
            let segments = direct.into_iter().map(|(segment, _)| segment);
            let responses = &mut self.responses;
            pages.copy(segments, |i, done| {
                if !done {
                    spoil(&mut responses[written[i] as usize]);
                }
            });
        }
        Ok(())
    }

    fn staged_bytes(&self) -> usize {
        self.staged.last().map_or(0, |last| last.at as usize + usize::from(last.len))
    }

    /// Makes sure that `need` pages are there from `next` on.
    #[inline]
    fn reserve(&mut self, need: usize, pages: &mut Pages) -> Result<(), Refused> {
        let have = self.posted.len() - self.next;
        if have >= need { Ok(()) } else { self.take(need, need.max(self.ahead) - have, pages) }
    }

    fn take(&mut self, need: usize, want: usize, pages: &mut Pages) -> Result<(), Refused> {
        if (self.ring.available() as usize) < want {
            self.ring.refresh();
        }
        let have = self.posted.len() - self.next;
        if have + (self.ring.available() as usize) < need {
            let broken = self.ring.fault().is_some();
            return Err(if broken { Refused::Broken } else { Refused::NoBuffers });
        }
        let taken = self.posted.len();
        for _ in 0..want {
            let Some(slot) = self.ring.take() else { break };
            let RxRequest { id, gref } = RxRequest::from_slot(slot);
            self.posted.push(Posted { id, gref, slot: pages.find(gref, Access::Write) });
        }
        let settled = pages.settle(Access::Write);
        for posted in &mut self.posted[taken..] {
            let Some(slot) = posted.slot else { continue };
            if !settled && pages.is_lost(slot) {
                pages.release(slot);
                posted.slot = None;
                continue;
            }
            // The lines that will be written first, all at once rather than one miss after the other.
            if let Some(room) = pages.write(slot, PAGE) {
                room.prefetch();
                room.skip(64).prefetch();
            }
        }
        Ok(())
    }

    /// Copies what was gathered, in one batch, and shows the front end what was delivered; true when it wants to be
    /// notified. Pages that were not spent go back to the ring.
    pub(super) fn flush(&mut self, pages: &mut Pages) -> bool {
        if !self.staged.is_empty() {
            let Self { staged, staging, responses, .. } = self;
            let segments = staged.iter().map(|piece| {
                let bytes = &staging[piece.at as usize..][..piece.len.into()];
                segment(piece.gref, 0, Local::From(ReadSlice::from(bytes)))
            });
            pages.copy(segments, |i, done| {
                if !done {
                    spoil(&mut responses[staged[i].response as usize]);
                }
            });
            self.staged.clear();
        }
        for slot in self.posted.iter().filter_map(|posted| posted.slot) {
            pages.release(slot);
        }
        // Before the front end sees its pages: they are its own then.
        pages.sweep();
        self.ring.untake((self.posted.len() - self.next) as u32);
        self.posted.clear();
        self.next = 0;
        for response in self.responses.drain(..) {
            self.ring.respond(response);
        }
        self.ring.publish()
    }
}

/// The flags of a packet's first slot, as if it were the only one.
#[inline]
fn flags(marks: Marks) -> RxFlags {
    let mut flags = RxFlags::empty();
    flags.set(RxFlags::CSUM_BLANK, marks.csum_blank);
    flags.set(RxFlags::DATA_VALIDATED, marks.data_validated);
    flags.set(RxFlags::EXTRA_INFO, marks.gso.is_some());
    flags
}

/// Makes a response one of an error: the page was not written.
#[cold]
fn spoil(slot: &mut RxSlot) {
    *slot = RxResponse { status: ERROR, ..RxResponse::from_slot(*slot) }.to_slot();
}

/// The bytes of a frame, in the order they are written.
struct Source<'a, 's> {
    first: &'a [u8],
    rest: &'a [ReadSlice<'s>],
    /// What is left of the piece that was begun.
    piece: ReadSlice<'s>,
}

impl<'a, 's: 'a> Source<'a, 's> {
    /// The next bytes that lie together, at most `max`; none at the end.
    #[inline]
    fn take(&mut self, max: usize) -> ReadSlice<'a> {
        if !self.first.is_empty() {
            let (now, later) = self.first.split_at(max.min(self.first.len()));
            self.first = later;
            return ReadSlice::from(now);
        }
        while self.piece.is_empty() {
            let [next, rest @ ..] = self.rest else { return ReadSlice::EMPTY };
            (self.piece, self.rest) = (*next, rest);
        }
        let now = self.piece.first(max);
        self.piece = self.piece.skip(max);
        now
    }

    /// Fills `room`, or writes what there is.
    #[inline]
    fn fill(&mut self, mut room: WriteSlice<'_>) {
        while !room.is_empty() {
            let piece = self.take(room.len());
            if piece.is_empty() {
                break;
            }
            room = room.skip(piece.copy_to_slice(&room));
        }
    }
}
