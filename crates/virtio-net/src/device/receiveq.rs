//! What the guest receives: frames to chains, one copy.

use ringferry_memory::{ReadSlice, Translator, Words, WriteSlice};
use ringferry_packet::flow::PacketHash;
use ringferry_packet::vnet::Header;
use ringferry_ring::{Chain, Chains, Device, Done, Fault};

use crate::{Features, header};

/// Buffers looked at for one frame. The largest frame then still fits buffers of 64 bytes; a driver that
/// posts smaller ones, or empty ones by the thousand, would only keep the device busy.
const MAX_BUFFERS: usize = 1024;

/// Why a frame was not delivered. Nothing was written and no buffer was spent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// The driver has not posted enough buffers.
    #[error("no receive buffers")]
    NoBuffers,
    /// The next buffer is too small for the frame, and frames may not be spread over several.
    #[error("frame larger than the receive buffer")]
    TooBig,
    /// The ring is broken.
    #[error("the ring is broken")]
    Broken,
}

/// The device's side of a receiveq.
#[derive(Debug)]
pub struct Receiveq<A: Words> {
    ring: Device<A>,
    header_len: usize,
    mergeable: bool,
    /// Chains taken for this burst; those before `next` are spent.
    chains: Chains,
    next: usize,
    /// Chains of frames that were written whole, with their lengths: completed together.
    written: Vec<Done>,
    /// Chains to take at a time: what is left of the burst.
    ahead: usize,
}

impl<A: Words> Receiveq<A> {
    /// Serves `ring` as negotiated.
    pub fn new(ring: Device<A>, features: Features) -> Self {
        Self {
            ring,
            header_len: features.header_len(),
            mergeable: features.contains(Features::MRG_RXBUF),
            chains: Chains::new(),
            next: 0,
            written: Vec::new(),
            ahead: 1,
        }
    }

    /// The ring, for its notifications and its state.
    pub fn ring(&mut self) -> &mut Device<A> {
        &mut self.ring
    }

    /// Announces that about `frames` frames follow until [`Receiveq::flush`], so that so many chains
    /// are taken in one go.
    #[inline]
    pub fn expect(&mut self, frames: usize) {
        self.ahead = frames.max(1);
    }

    /// Where the next packet would lie: adds to `room` the pieces of the driver's next buffers that are left behind a virtual
    /// header and `skip` bytes, for a packet of `most` bytes. False, and nothing to rely on in `room`, if there is not
    /// enough. Nothing is spent: who has filled them, wholly or in part, delivers the packet's first `skip` bytes and
    /// then these pieces, which are not copied as they lie where they are to go.
    pub fn room<'m>(
        &mut self,
        memory: &mut Translator<'m>,
        skip: usize,
        most: usize,
        room: &mut impl Extend<WriteSlice<'m>>,
    ) -> bool {
        let found = self.find(self.header_len + most, memory);
        // The ring may have broken behind chains that are good: they are there, but no frame is delivered to them any more.
        let (Ok(count), None) = (found, self.ring.fault()) else { return false };
        let mut skip = self.header_len + skip;
        for i in self.next..self.next + count {
            let chain = self.chains.chain(i);
            for buffer in self.chains.writable(&chain) {
                let mut done = 0;
                while done < buffer.len as usize {
                    let addr = buffer.addr.checked_add(done as u64);
                    let piece = addr.and_then(|addr| memory.write(addr, buffer.len as usize - done));
                    // Its delivery finds that out and says so.
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

    /// Writes one frame, `first` and then `rest`, into the driver's next buffers. The driver does not
    /// see it before [`Receiveq::flush`].
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

    /// The same, with the hash that the driver is told if it negotiated HASH_REPORT (5.1.6.4.5).
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
        // Chains may be left that were taken before the ring broke: its memory is no longer touched.
        if self.ring.fault().is_some() {
            return Err(Refused::Broken);
        }
        let len = first.len() + rest.iter().map(ReadSlice::len).sum::<usize>();
        let need = self.header_len + len;
        let count = self.reserve(need, memory)?;
        if count == 1 && self.deliver_whole(memory, header, hash, first, rest, need) {
            return Ok(());
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
        self.ahead = self.ahead.saturating_sub(1).max(1);
        Ok(())
    }

    /// Writes a packet of `need` bytes into the next chain, if that is one piece of memory.
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
        // Most packets have the header that the packet before them in this buffer had.
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

    /// Makes sure that the chains from `next` on hold `need` bytes; returns how many it takes. Buffers that cannot be break the
    /// ring.
    #[inline]
    fn reserve(&mut self, need: usize, memory: &mut Translator<'_>) -> Result<usize, Refused> {
        let found = self.find(need, memory);
        if found == Err(Refused::Broken) {
            // What the ring itself found first stays its fault.
            self.ring.break_with(Fault::Unusable);
        }
        found
    }

    /// The same, but leaves the ring as it is.
    #[inline]
    fn find(&mut self, need: usize, memory: &mut Translator<'_>) -> Result<usize, Refused> {
        // Most frames fit the next buffer, and that is known already.
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
                // A buffer at least holds the header (5.1.6.3.1), and the driver only lends buffers
                // to be written here.
                buffers += usize::from(chain.writable);
                if chain.readable > 0
                    || (chain.writable_len as usize) < self.header_len
                    || buffers > MAX_BUFFERS
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
            let taken = self.chains.len();
            if self.ring.take(self.ahead, memory, &mut self.chains) == 0 {
                let broken = self.ring.fault().is_some();
                return Err(if broken { Refused::Broken } else { Refused::NoBuffers });
            }
            // The lines that will be written first, all at once rather than one miss after the other.
            for chain in self.chains.iter().skip(taken) {
                if let [buffer, ..] = self.chains.writable(chain)
                    && let Some(room) = memory.write(buffer.addr, buffer.len as usize)
                {
                    room.prefetch();
                    room.skip(64).prefetch();
                }
            }
        }
    }

    /// Shows what was delivered to the driver and gives unspent chains back to the ring; true when
    /// the driver wants a call.
    #[inline]
    pub fn flush(&mut self) -> bool {
        self.ring.untake(&self.chains.all()[self.next..]);
        self.chains.clear();
        self.next = 0;
        self.ring.complete_all(self.written.drain(..));
        self.ring.publish()
    }
}

/// The bytes of a packet, virtual header first, in the order they are written.
struct Source<'a, 's> {
    inline: [&'a [u8]; 2],
    rest: &'a [ReadSlice<'s>],
    /// What is left of the piece that was begun.
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

    /// Copies as much as both sides have; returns how many bytes.
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
