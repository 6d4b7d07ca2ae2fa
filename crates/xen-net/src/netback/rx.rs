//! [`Rx`]: the back end's side of a receive ring. It writes frames to the front end's pages, with
//! one copy where a page is mapped.
//!
//! A [`Queue`](super::Queue) owns it and calls it on its thread, for each burst: [`Rx::expect`],
//! [`Rx::deliver`] for each frame, and [`Rx::flush`], which copies what could not be written to
//! mapped pages and publishes the responses.

use smallvec::SmallVec;

use ringferry_memory::{ReadSlice, Words, WriteSlice};
use ringferry_packet::vnet::Header;
use ringferry_xen::domain::PAGE;
use ringferry_xen::grant::{Access, GrantRef, Local};
use ringferry_xen::netif::BackRing;
use ringferry_xen::netif::wire::{ERROR, Extra, MAX_PACKET, RxFlags, RxRequest, RxResponse, RxSlot};

use super::cache::Slot;
use super::pages::{Pages, segment};
use crate::offload::{Gso, NetifOffload};

/// Size of a frame in bytes from which its unmapped pages get a batch of copies of their own,
/// straight from where the frame lies. Smaller frames are staged and copied together.
const DIRECT: usize = 16 * 1024;

/// Most bytes that are staged: a burst of frames below [`DIRECT`] is less, and a caller that never
/// flushes stages no more.
const STAGED_BYTES: usize = 1024 * 1024;

/// The reason why a frame was not delivered. Nothing was written and no page was consumed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// The front end has not posted enough pages for the frame.
    #[error("no receive pages")]
    NoBuffers,
    /// The frame is longer than one page without scatter-gather, or longer than any packet.
    #[error("frame larger than the front end takes")]
    TooBig,
    /// The frame has an offload that the network interface cannot express.
    #[error("the frame needs an offload that the network interface does not have; do it in software")]
    Offload,
    /// The ring is broken by a violation of its front end.
    #[error("the ring is broken")]
    Broken,
    /// The queue's pages are lent out with a transmit burst.
    #[error("the queue's pages are lent out; give them back first")]
    Lent,
}

/// A posted page that was taken from the ring.
#[derive(Clone, Copy, Debug)]
struct Posted {
    id: u16,
    gref: GrantRef,
    /// The slot into which the page is mapped, if it is.
    slot: Option<Slot>,
}

/// Bytes in the staging buffer that belong in a page.
#[derive(Clone, Copy, Debug)]
struct Staged {
    gref: GrantRef,
    at: u32,
    len: u16,
    /// Index of the response that covers the bytes.
    response: u32,
}

/// The back end's side of a receive ring, with the burst that is being delivered.
#[derive(Debug)]
pub(super) struct Rx<A: Words> {
    pub(super) ring: BackRing<A, RxSlot>,
    sg: bool,
    /// Pages taken for this burst; those before `next` are consumed.
    posted: Vec<Posted>,
    next: usize,
    /// Number of pages to take at a time: the frames left of the announced burst.
    ahead: usize,
    /// Responses for the consumed pages.
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

    /// Announces that about `frames` frames follow until [`flush`](Self::flush).
    #[inline]
    pub(super) fn expect(&mut self, frames: usize) {
        self.ahead = frames.max(1);
    }

    /// Writes one frame, `first` and then `rest`, into the next pages.
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
        let (offload, slots) = self.shape(&header, len)?;
        let count = len.div_ceil(PAGE);
        self.reserve(slots, pages)?;
        self.ahead = self.ahead.saturating_sub(1).max(1);
        // Fast path: most frames fit one page, and it is mapped.
        let Posted { id, slot, .. } = self.posted[self.next];
        if count == 1
            && offload.gso.is_none()
            && let Some(room) = slot.and_then(|slot| pages.write(slot, len))
        {
            let mut room = room.skip(room.copy_from(first));
            for piece in rest {
                room = room.skip(piece.copy_to_slice(&room));
            }
            let response = RxResponse { id, offset: 0, flags: flags(offload), status: len as i16 };
            self.responses.push(response.to_slot());
            self.next += 1;
            return Ok(());
        }
        self.scatter(pages, offload, len, FrameBytes { first, rest, piece: ReadSlice::EMPTY })
    }

    /// Returns a frame's offloads and the number of slots that it takes.
    #[inline]
    pub(super) fn shape(&self, header: &Header, len: usize) -> Result<(NetifOffload, usize), Refused> {
        let offload = NetifOffload::of(header).ok_or(Refused::Offload)?;
        let count = len.div_ceil(PAGE);
        if len > MAX_PACKET || count > 1 && !self.sg {
            return Err(Refused::TooBig);
        }
        Ok((offload, count.max(1) + usize::from(offload.gso.is_some())))
    }

    /// Writes a frame page by page, with an extra if it needs one, into pages that may not be
    /// mapped.
    fn scatter(
        &mut self,
        pages: &mut Pages,
        offload: NetifOffload,
        len: usize,
        mut source: FrameBytes<'_, '_>,
    ) -> Result<(), Refused> {
        let gather = len < DIRECT && self.staged_bytes() + len <= STAGED_BYTES;
        // Pieces that are copied straight from where they lie, with the indices of their responses.
        let mut direct = SmallVec::<[_; 32]>::new();
        let mut left = len;
        let mut response_flags = flags(offload);
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
                    let piece = source.next_piece(here - offset);
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
                (offload.gso, response_flags.contains(RxFlags::EXTRA_INFO))
            {
                // The extra takes the next slot, and the page that was posted there stays as it is.
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
                    mark_error(&mut responses[written[i] as usize]);
                }
            });
        }
        Ok(())
    }

    fn staged_bytes(&self) -> usize {
        self.staged.last().map_or(0, |last| last.at as usize + usize::from(last.len))
    }

    /// Makes sure that `need` pages are taken from `next` on.
    #[inline]
    fn reserve(&mut self, need: usize, pages: &mut Pages) -> Result<(), Refused> {
        let have = self.posted.len() - self.next;
        if have >= need { Ok(()) } else { self.take_pages(need, need.max(self.ahead) - have, pages) }
    }

    fn take_pages(&mut self, need: usize, want: usize, pages: &mut Pages) -> Result<(), Refused> {
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
            self.posted.push(Posted { id, gref, slot: pages.lookup(gref, Access::Write) });
        }
        let all_mapped = pages.map_pending(Access::Write);
        for posted in &mut self.posted[taken..] {
            let Some(slot) = posted.slot else { continue };
            if !all_mapped && pages.is_poisoned(slot) {
                pages.release(slot);
                posted.slot = None;
                continue;
            }
            // The cache lines that will be written first are fetched together, so that their misses
            // overlap.
            if let Some(room) = pages.write(slot, PAGE) {
                room.prefetch();
                room.skip(64).prefetch();
            }
        }
        Ok(())
    }

    /// Copies the staged bytes in one batch, returns unused pages to the ring, and publishes the
    /// responses; returns true if the front end wants an event.
    pub(super) fn flush(&mut self, pages: &mut Pages) -> bool {
        if !self.staged.is_empty() {
            let Self { staged, staging, responses, .. } = self;
            let segments = staged.iter().map(|piece| {
                let bytes = &staging[piece.at as usize..][..piece.len.into()];
                segment(piece.gref, 0, Local::From(ReadSlice::from(bytes)))
            });
            pages.copy(segments, |i, done| {
                if !done {
                    mark_error(&mut responses[staged[i].response as usize]);
                }
            });
            self.staged.clear();
        }
        for slot in self.posted.iter().filter_map(|posted| posted.slot) {
            pages.release(slot);
        }
        // Pages are unmapped before the responses are visible, because they belong to the front end
        // from then on.
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

/// Returns the flags of a packet's first slot, as if it were the only one.
#[inline]
fn flags(offload: NetifOffload) -> RxFlags {
    let mut flags = RxFlags::empty();
    flags.set(RxFlags::CSUM_BLANK, offload.csum_blank);
    flags.set(RxFlags::DATA_VALIDATED, offload.data_validated);
    flags.set(RxFlags::EXTRA_INFO, offload.gso.is_some());
    flags
}

/// Turns a response into an error, because its page was not written.
#[cold]
fn mark_error(slot: &mut RxSlot) {
    *slot = RxResponse { status: ERROR, ..RxResponse::from_slot(*slot) }.to_slot();
}

/// The bytes of a frame that are not yet written, in order.
struct FrameBytes<'a, 's> {
    first: &'a [u8],
    rest: &'a [ReadSlice<'s>],
    /// The rest of the piece that is being copied.
    piece: ReadSlice<'s>,
}

impl<'a, 's: 'a> FrameBytes<'a, 's> {
    /// Returns the next contiguous bytes, at most `max`; empty at the end.
    #[inline]
    fn next_piece(&mut self, max: usize) -> ReadSlice<'a> {
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

    /// Fills `room`, or writes all bytes that are left.
    #[inline]
    fn fill(&mut self, mut room: WriteSlice<'_>) {
        while !room.is_empty() {
            let piece = self.next_piece(room.len());
            if piece.is_empty() {
                break;
            }
            room = room.skip(piece.copy_to_slice(&room));
        }
    }
}
