//! [`Receiveq`]: the device's side of a receiveq. It copies frames once, into the chains that the
//! driver posted.
//!
//! The owner creates it when its ring starts, with the features negotiated by then, and uses it
//! from one thread. For each burst it calls [`Receiveq::expect`] with the number of frames,
//! [`Receiveq::deliver`] for each, and [`Receiveq::flush`] once, which publishes the burst.
//! [`Receiveq::deliver_run`] is a short way for frames each of which fits one buffer, as nearly all
//! do: what holds for all of them is asked once. A violation by the driver breaks the ring, and
//! every later delivery is refused. The queue ends by being dropped.
//!
//! While the ring has a [dirty log](Device::log), the flush marks the bytes that were delivered, too.

use ringferry_memory::{ReadSlice, Translator, Words, WriteSlice};
use ringferry_packet::flow::PacketHash;
use ringferry_packet::frame::Burst;
use ringferry_packet::vnet::Header;
use ringferry_ring::{Chain, Chains, Device, Done, Fault};

use crate::{Features, header};

/// Most buffers that are examined for one frame of `need` bytes with its header: each costs as much as a small frame, and whoever sends the frame pays for it. A
/// frame of any size fits buffers of 64 bytes, and 64 more are for drivers that post chains for larger frames. Real ones post at least some hundred bytes
/// at a time, and 18 buffers in a chain for 64 KiB; one that posts hundreds of a few bytes would only keep the device busy: 1020 of two bytes, on
/// as many pages, made of each frame 75 us.
const fn max_buffers(need: usize) -> usize {
    64 + need / 64
}

/// Buffers that a frame of `need` bytes is granted in the long run: what those of a real driver take, and twice as many where they have 256 bytes. Each is
/// a line and a page that nobody else has touched.
const fn granted_buffers(need: usize) -> usize {
    8 + need / 128
}

/// Buffers that frames of one burst which take several fill at most: 32 frames of 64 KiB take 1408 of Linux's. Each may lie on a page that nobody has
/// touched, which takes a microsecond or more: bursts of 32 frames into buffers of 128 bytes, each on such a page, took 20 ms.
const MOST_FILLED: usize = 2048;

/// Buffers in a chain that a driver posts for the largest frames: 17 pages and two more (Linux without mergeable buffers has 19).
const USUAL_CHAIN: usize = 20;

/// Bytes of the smallest buffer that a driver in order has a frame spread over: Linux's have 1280 at least, those of others 2048. With 512, one that had frames of
/// 64 KiB spread over buffers of 256 had twice its share of the worker.
const USUAL_BUFFER: usize = 1024;

/// Most granted buffers that are saved up: some frames may take as many as there are.
const MOST_GRANTED: usize = 4096;

/// The reason why a frame was not delivered. Nothing was published and no buffer was consumed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// The driver has not posted enough buffers for the frame.
    #[error("no receive buffers")]
    NoBuffers,
    /// The next buffer is too small for the frame, and frames may not be spread over several.
    #[error("frame larger than the receive buffer")]
    TooBig,
    /// Buffers are so small that each frame takes dozens, and the driver has had more of them filled than it is granted.
    #[error("frame spread over too many receive buffers")]
    Dear,
    /// The ring is broken by a violation of its driver.
    #[error("the ring is broken")]
    Broken,
}

/// The frames that [`Receiveq::deliver_run`] has written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Number of frames.
    pub frames: usize,
    /// Sum of their lengths in bytes.
    pub bytes: u64,
    /// Why no more were written.
    pub end: RunEnd,
}

impl Run {
    /// The run of a queue that has no short way.
    pub const NONE: Run = Run { frames: 0, bytes: 0, end: RunEnd::Queue };
}

/// Why a [`Run`] ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunEnd {
    /// All frames were written.
    Complete,
    /// The next frame does not fit the next buffer in one piece. A run may begin behind that frame.
    Frame,
    /// The queue has no buffers, or none that take a frame in one piece: no other run can begin in
    /// this burst.
    Queue,
}

/// The device's side of a receiveq, with the burst that is being delivered.
#[derive(Debug)]
pub struct Receiveq<A: Words> {
    ring: Device<A>,
    header_len: usize,
    mergeable: bool,
    /// Chains taken for this burst; those before `next` are consumed.
    chains: Chains,
    next: usize,
    /// Consumed chains with the bytes written to each, which the next flush completes together.
    written: Vec<Done>,
    /// Number of chains to take at a time: the frames left of the announced burst.
    ahead: usize,
    /// [Granted](granted_buffers) and not used.
    granted: usize,
    /// Chains of this burst that were filled beside the first of each frame, and the bytes of those frames.
    spread: usize,
    spread_bytes: usize,
    /// Buffers of this burst that were filled by frames which take several.
    filled: usize,
}

impl<A: Words> Receiveq<A> {
    /// Creates the queue on a ring, with the features that were negotiated.
    pub fn new(ring: Device<A>, features: Features) -> Self {
        Self {
            ring,
            header_len: features.header_len(),
            mergeable: features.contains(Features::MRG_RXBUF),
            chains: Chains::new(),
            next: 0,
            written: Vec::new(),
            ahead: 1,
            granted: MOST_GRANTED,
            spread: 0,
            spread_bytes: 0,
            filled: 0,
        }
    }

    /// Returns the ring, for its notifications and its state.
    pub fn ring(&mut self) -> &mut Device<A> {
        &mut self.ring
    }

    /// Announces that about `frames` frames follow until [`Receiveq::flush`], so that this many
    /// chains are taken from the ring at once.
    #[inline]
    pub fn expect(&mut self, frames: usize) {
        self.ahead = frames.max(1);
    }

    /// Finds the memory in which the next packet would lie: appends to `room` the pieces of the
    /// driver's next buffers after the virtual header and `skip` bytes, for a packet of at most
    /// `most` bytes. Returns false, with `room` in an undefined state, if there is not enough.
    /// Nothing is consumed: the caller fills the pieces, wholly or in part, and then delivers the
    /// packet's first `skip` bytes and these pieces, which are not copied because they already lie
    /// at their destination. There is no room while writes are recorded in a dirty log, as what the
    /// caller does with the pieces would be known to nobody.
    pub fn room<'m>(
        &mut self,
        memory: &mut Translator<'m>,
        skip: usize,
        most: usize,
        room: &mut impl Extend<WriteSlice<'m>>,
    ) -> bool {
        if self.ring.log().is_some() {
            return false;
        }
        let found = self.find(self.header_len + most, memory);
        // The ring may have broken after it yielded good chains: they are still here, but no frame
        // is delivered to them any more.
        let (Ok(count), None) = (found, self.ring.fault()) else { return false };
        let mut skip = self.header_len + skip;
        for i in self.next..self.next + count {
            let chain = self.chains.chain(i);
            for buffer in self.chains.writable(&chain) {
                let mut done = 0;
                while done < buffer.len as usize {
                    let addr = buffer.addr.checked_add(done as u64);
                    let piece = addr.and_then(|addr| memory.write(addr, buffer.len as usize - done));
                    // The delivery of the frame finds the same fault and breaks the ring.
                    let Some(piece) = piece else { return false };
                    done += piece.len();
                    let rest = piece.skip(skip);
                    skip -= piece.len() - rest.len();
                    room.extend((!rest.is_empty()).then_some(rest));
                }
            }
        }
        true
    }

    /// Returns what [`deliver`](Self::deliver) would say now to frames of these lengths, one after
    /// the other. Nothing is written, no buffer is consumed and the ring is not broken: chains that
    /// were read for it go back with the next [`flush`](Self::flush). Called when no burst is being
    /// delivered.
    pub fn probe(
        &mut self,
        memory: &mut Translator<'_>,
        lens: impl IntoIterator<Item = usize>,
    ) -> Vec<Result<(), Refused>> {
        let begin = self.next;
        let mut breaks = false;
        let results = lens.into_iter().map(|len| {
            // What breaks the ring at one frame refuses all that follow.
            let found = match self.ring.fault() {
                None if !breaks => self.find(self.header_len + len, memory),
                _ => Err(Refused::Broken),
            };
            breaks |= found == Err(Refused::Broken);
            self.next += found?;
            Ok(())
        });
        let results = results.collect();
        self.next = begin;
        results
    }

    /// Writes one frame, `first` and then `rest`, into the driver's next buffers. The driver does
    /// not see it before [`Receiveq::flush`].
    ///
    /// # Errors
    /// See [`Refused`].
    #[inline]
    pub fn deliver(
        &mut self,
        memory: &mut Translator<'_>,
        header: Header,
        first: &[u8],
        rest: &[ReadSlice<'_>],
    ) -> Result<(), Refused> {
        self.deliver_hashed(memory, header, PacketHash::NONE, first, rest)
    }

    /// Does the same as [`Receiveq::deliver`] with the hash that is reported to the driver if it
    /// negotiated HASH_REPORT (5.1.6.4.5).
    ///
    /// # Errors
    /// See [`Refused`].
    #[inline]
    pub fn deliver_hashed(
        &mut self,
        memory: &mut Translator<'_>,
        mut header: Header,
        hash: PacketHash,
        first: &[u8],
        rest: &[ReadSlice<'_>],
    ) -> Result<(), Refused> {
        // Chains may be left from before the ring broke; their memory is no longer touched.
        if self.ring.fault().is_some() {
            return Err(Refused::Broken);
        }
        let len = first.len() + rest.iter().map(ReadSlice::len).sum::<usize>();
        let need = self.header_len + len;
        let count = self.reserve(need, memory)?;
        if count == 1 && self.deliver_whole(memory, header, hash, first, rest, need) {
            return Ok(());
        }
        if !self.afford(count, need) {
            return Err(Refused::Dear);
        }
        // 5.1.6.4.1: num_buffers is 1 when the feature is not negotiated.
        header.num_buffers = count as u16;
        let bytes = header::to_bytes(&header, hash);
        let mut source = Source { inline: [&bytes[..self.header_len], first], rest, piece: ReadSlice::EMPTY };
        let whole = self.written.len();
        for i in self.next..self.next + count {
            let chain = self.chains.chain(i);
            let mut written = 0;
            for buffer in self.chains.writable(&chain) {
                let mut done = 0;
                while done < buffer.len as usize && !source.is_empty() {
                    let room = buffer.addr.checked_add(done as u64);
                    let Some(room) = room.and_then(|addr| memory.write(addr, buffer.len as usize - done))
                    else {
                        self.written.truncate(whole);
                        self.log_chains(self.next, self.next + count, |chain| chain.writable_len);
                        self.ring.break_with(Fault::Unusable);
                        return Err(Refused::Broken);
                    };
                    done += source.fill(room);
                }
                written += done;
            }
            // written <= writable_len, which fits 32 bits.
            self.written.push(chain.done(written as u32));
        }
        self.next += count;
        if count > 1 {
            self.spread += count - 1;
            self.spread_bytes += need;
        }
        self.ahead = self.ahead.saturating_sub(1).max(1);
        Ok(())
    }

    /// Does what [`Receiveq::deliver`] does for each of the frames of `burst` whose indexes are in
    /// `picks`, in order, as long as each fits one piece of memory in a chain of one buffer. Nothing
    /// was done for the frames behind the written ones: [`Receiveq::deliver`] says what there is to
    /// say of the next one, and [`Run::end`] whether another run may begin behind that.
    #[inline]
    pub fn deliver_run(&mut self, memory: &mut Translator<'_>, burst: &Burst<'_>, picks: &[u32]) -> Run {
        // With a longer header, or a legacy one, every byte of it is written.
        if self.header_len != Header::LEN || self.ring.fault().is_some() {
            return Run::NONE;
        }
        let (frames, mut done, mut bytes) = (burst.frames(), 0, 0);
        loop {
            let before = done;
            let chains = &self.chains.all()[self.next..];
            for (chain, pick) in chains.iter().zip(&picks[before..]) {
                let frame = &frames[*pick as usize];
                let need = Header::LEN + frame.len as usize;
                let Some(buffer) = chain.sole_writable().filter(|buffer| buffer.len as usize >= need) else {
                    break;
                };
                let Some(room) = memory.write(buffer.addr, need).filter(|room| room.len() == need) else {
                    break;
                };
                let (low, high) = Header { num_buffers: 1, ..frame.header }.to_words();
                room.update(low, high);
                let room = room.skip(Header::LEN);
                if let Some(first) = frame.full_prefix() {
                    room.copy_from(first);
                    let mut room = room.skip(first.len());
                    for piece in burst.rest(frame) {
                        room = room.skip(piece.copy_to_slice(&room));
                    }
                } else {
                    room.copy_from(frame.prefix());
                }
                // need <= buffer.len, which has 32 bits.
                self.written.push(chain.done(need as u32));
                bytes += u64::from(frame.len);
                done += 1;
            }
            let written = done - before;
            let sole = chains.get(written).map(|chain| chain.sole_writable().is_some());
            self.next += written;
            self.ahead = self.ahead.saturating_sub(written).max(1);
            let end = match sole {
                _ if done == picks.len() => RunEnd::Complete,
                Some(true) => RunEnd::Frame,
                // A driver that posts one chain of several buffers tends to post only such chains.
                Some(false) => RunEnd::Queue,
                None if self.take_ahead(memory) == 0 => RunEnd::Queue,
                None => continue,
            };
            return Run { frames: done, bytes, end };
        }
    }

    /// Writes a packet of `need` bytes into the next chain if its first buffer holds it in one
    /// piece of memory; returns false otherwise.
    #[inline(always)]
    fn deliver_whole(
        &mut self,
        memory: &mut Translator<'_>,
        header: Header,
        hash: PacketHash,
        first: &[u8],
        rest: &[ReadSlice<'_>],
        need: usize,
    ) -> bool {
        let chain = self.chains.chain(self.next);
        let [buffer, ..] = self.chains.writable(&chain) else { return false };
        let room = memory.write(buffer.addr, (buffer.len as usize).min(need));
        let Some(mut room) = room.filter(|room| room.len() == need) else { return false };
        let header = Header { num_buffers: 1, ..header };
        // Most packets have the header that the previous packet in this buffer had, and then
        // nothing is stored.
        if self.header_len == Header::LEN {
            let (low, high) = header.to_words();
            room.update(low, high);
        } else {
            room.copy_from(&header::to_bytes(&header, hash)[..self.header_len]);
        }
        room = room.skip(self.header_len);
        room.copy_from(first);
        room = room.skip(first.len());
        for piece in rest {
            room = room.skip(piece.copy_to_slice(&room));
        }
        // need <= writable_len, which fits 32 bits.
        self.written.push(chain.done(need as u32));
        self.next += 1;
        self.ahead = self.ahead.saturating_sub(1).max(1);
        true
    }

    /// Takes the buffers of the next `count` chains that a frame of `need` bytes fills from those granted. Returns false if there are not enough.
    fn afford(&mut self, count: usize, need: usize) -> bool {
        let chains = &self.chains.all()[self.next..self.next + count];
        let mut left = need;
        let buffers = chains.iter().flat_map(|chain| self.chains.writable(chain)).take_while(|buffer| {
            let is_filled = left > 0;
            left = left.saturating_sub(buffer.len as usize);
            is_filled
        });
        let buffers = buffers.count();
        let granted = (self.granted + granted_buffers(need)).min(MOST_GRANTED);
        let affords = buffers <= granted && self.filled + buffers <= MOST_FILLED;
        self.granted = granted;
        if affords {
            self.granted -= buffers;
            self.filled += buffers;
        }
        affords
    }

    /// Makes sure that the chains from `next` on hold `need` bytes, and returns how many chains
    /// that takes. Invalid buffers break the ring.
    #[inline]
    fn reserve(&mut self, need: usize, memory: &mut Translator<'_>) -> Result<usize, Refused> {
        let found = self.find(need, memory);
        if found == Err(Refused::Broken) {
            // A fault that the ring itself found first is kept.
            self.ring.break_with(Fault::Unusable);
        }
        found
    }

    /// Does the same as [`Receiveq::reserve`] but never breaks the ring.
    #[inline]
    fn find(&mut self, need: usize, memory: &mut Translator<'_>) -> Result<usize, Refused> {
        // Fast path: most frames fit the next buffer, which is already taken.
        if let Some(Chain { readable: 0, writable: 1, writable_len, .. }) = self.chains.get(self.next)
            && writable_len as usize >= need
        {
            return Ok(1);
        }
        let mut have = 0;
        let mut count = 0;
        let mut buffers = 0;
        loop {
            while let Some(chain) = self.chains.get(self.next + count) {
                // A buffer must hold at least the header (5.1.6.3.1), and the driver may only post
                // writable buffers here.
                buffers += usize::from(chain.writable);
                if chain.readable > 0
                    || (chain.writable_len as usize) < self.header_len
                    || buffers > max_buffers(need)
                {
                    return Err(Refused::Broken);
                }
                have += chain.writable_len as usize;
                count += 1;
                if have >= need {
                    return Ok(count);
                }
                if !self.mergeable {
                    return Err(Refused::TooBig);
                }
            }
            if self.take_ahead(memory) == 0 {
                let broken = self.ring.fault().is_some();
                return Err(if broken { Refused::Broken } else { Refused::NoBuffers });
            }
        }
    }

    /// Takes as many chains as frames are expected, behind those that are there. Returns their number.
    #[inline]
    fn take_ahead(&mut self, memory: &mut Translator<'_>) -> usize {
        let before = self.chains.len();
        let taken = self.ring.take(self.ahead, memory, &mut self.chains);
        // The cache lines that will be written first are fetched together, so that their misses
        // overlap.
        for chain in self.chains.iter().skip(before) {
            let first = || self.chains.writable(chain).first().copied();
            if let Some(buffer) = chain.sole_writable().or_else(first)
                && let Some(room) = memory.write(buffer.addr, buffer.len as usize)
            {
                room.prefetch();
                room.skip(64).prefetch();
            }
        }
        taken
    }

    /// Returns the number of buffers that this burst has taken beyond what frames take that a usual driver has posted for: those that were read of
    /// long chains, filled or not, and those of frames that are spread over small ones.
    #[inline]
    pub fn unusual_buffers(&self) -> usize {
        if self.chains.further_buffers() == 0 && self.spread == 0 { 0 } else { self.count_unusual() }
    }

    #[cold]
    fn count_unusual(&self) -> usize {
        let usual_chains = self.chains.len() * USUAL_CHAIN;
        self.chains.further_buffers().saturating_sub(usual_chains)
            + self.spread.saturating_sub(self.spread_bytes / USUAL_BUFFER)
    }

    /// Publishes the delivered frames to the driver and returns unused chains to the ring. Returns
    /// true if the driver wants a notification.
    #[inline]
    pub fn flush(&mut self) -> bool {
        if self.ring.log().is_some() {
            self.log_delivered();
        }
        self.ring.untake(&self.chains.all()[self.next..]);
        self.chains.clear();
        (self.next, self.spread, self.spread_bytes, self.filled) = (0, 0, 0, 0);
        self.ring.complete_all(self.written.drain(..));
        self.ring.publish()
    }

    /// Marks the bytes that were written since the last flush in the dirty log.
    #[cold]
    fn log_delivered(&self) {
        let mut written = self.written.iter();
        self.log_chains(0, self.next, |_| written.next().map_or(0, Done::written));
    }

    /// Marks the first bytes of some chains in the dirty log, if there is one: as many as `len` says of each, in order.
    #[cold]
    fn log_chains(&self, from: usize, to: usize, mut len: impl FnMut(&Chain) -> u32) {
        let Some(log) = self.ring.log() else { return };
        for i in from..to {
            let chain = self.chains.chain(i);
            let mut left = len(&chain);
            for buffer in self.chains.writable(&chain) {
                let marked = left.min(buffer.len);
                log.mark(buffer.addr, marked as usize);
                left -= marked;
            }
        }
    }
}

/// The bytes of a packet that are not yet written, virtual header first.
struct Source<'a, 's> {
    inline: [&'a [u8]; 2],
    rest: &'a [ReadSlice<'s>],
    /// The rest of the piece that is being copied.
    piece: ReadSlice<'s>,
}

impl Source<'_, '_> {
    #[inline]
    fn is_empty(&self) -> bool {
        self.piece.is_empty()
            && self.rest.is_empty()
            && self.inline[0].is_empty()
            && self.inline[1].is_empty()
    }

    /// Copies as many bytes as are left and `room` holds; returns how many.
    #[inline]
    fn fill(&mut self, room: WriteSlice<'_>) -> usize {
        let mut done = 0;
        for bytes in &mut self.inline {
            let n = room.skip(done).copy_from(bytes);
            *bytes = &bytes[n..];
            done += n;
        }
        while done < room.len() {
            if self.piece.is_empty() {
                let [next, rest @ ..] = self.rest else { break };
                self.piece = *next;
                self.rest = rest;
                continue;
            }
            let n = self.piece.copy_to_slice(&room.skip(done));
            self.piece = self.piece.skip(n);
            done += n;
        }
        done
    }
}
