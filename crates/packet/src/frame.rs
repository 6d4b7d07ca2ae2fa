//! A burst of frames that are still in their sender's memory (zero-copy forwarding).
//!
//! A worker keeps one [`Burst`], fills it from a queue ([`Burst::push`], [`Burst::build`]), delivers its frames to
//! other ports, returns the buffers to the sender, and reuses the storage for the next burst ([`Burst::reuse`]).
//! Of each frame only the virtual header and the first [`PREFIX`] bytes are copied, once. All decisions and the
//! delivery use that copy, so a sender that changes its memory meanwhile cannot make the receiver see other
//! addresses than those that were checked. The rest of the frame is borrowed as slices of the sender's memory.

use ringferry_memory::ReadSlice;

use crate::ether;
use crate::vnet::{Header, Invalid, Offloads, VALIDATED_HEAD};

/// Number of bytes of a frame that are copied for look-up: one cache line, which is sufficient for Ethernet, a VLAN tag,
/// IPv4 and ports, and for a whole frame of the smallest size.
pub const PREFIX: usize = 64;

/// One frame of a [`Burst`].
#[derive(Clone, Debug)]
pub struct Frame {
    /// The virtual header, checked by the caller; `num_buffers` is not used.
    pub header: Header,
    /// Length of the frame in bytes, virtual header excluded.
    pub len: u32,
    first: u32,
    pieces: u32,
    prefix: [u8; PREFIX],
}

impl Frame {
    /// Returns the private copy of the first `min(len, PREFIX)` bytes.
    #[inline]
    pub fn prefix(&self) -> &[u8] {
        &self.prefix[..(self.len as usize).min(PREFIX)]
    }

    /// Returns the private copy of the first [`PREFIX`] bytes, or `None` if the frame is shorter. An array is copied by a few
    /// instructions, without a look at its length.
    #[inline]
    pub fn full_prefix(&self) -> Option<&[u8; PREFIX]> {
        (self.len as usize >= PREFIX).then_some(&self.prefix)
    }

    /// Returns the first [`MIN_FRAME`](crate::ether::MIN_FRAME) bytes, both addresses and the EtherType, as one number, by which frames of one conversation are found
    /// with one comparison.
    #[inline]
    pub fn ethernet_header(&self) -> u128 {
        const HEADER: u128 = (1 << (8 * ether::MIN_FRAME)) - 1;
        let (first, _) = self.prefix.split_first_chunk().unwrap_or((&[0; 16], &[]));
        u128::from_le_bytes(*first) & HEADER
    }

    /// Returns true for a [MAC control frame](ether::is_mac_control). Nearly all frames are none, which takes a comparison.
    #[inline]
    pub fn is_mac_control(&self) -> bool {
        const TYPE: u32 = 8 * (ether::MIN_FRAME as u32 - 2);
        match ((self.ethernet_header() >> TYPE) as u16).swap_bytes() {
            ether::TYPE_MAC_CONTROL | ether::TYPE_VLAN => ether::is_mac_control(self.prefix()),
            _ => false,
        }
    }

    /// Returns the same bytes for rewriting, for example of addresses. The delivered frame begins with them.
    #[inline]
    pub fn prefix_mut(&mut self) -> &mut [u8] {
        &mut self.prefix[..(self.len as usize).min(PREFIX)]
    }
}

/// Frames in the order in which they were sent, in vectors that are reused from burst to burst.
#[derive(Debug, Default)]
pub struct Burst<'m> {
    frames: Vec<Frame>,
    pieces: Vec<ReadSlice<'m>>,
    /// Sum of the lengths of the frames, in bytes.
    bytes: u64,
    /// The offloads that the headers of the frames that were added ask for together.
    needs: Offloads,
}

impl<'m> Burst<'m> {
    /// Makes an empty burst without storage.
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes an empty burst in the storage of an old one, which may have borrowed other memory.
    #[inline]
    pub fn reuse(old: Burst<'_>) -> Burst<'m> {
        // Collecting an emptied vector's iterator in place keeps its allocation.
        fn recycle<'m>(mut pieces: Vec<ReadSlice<'_>>) -> Vec<ReadSlice<'m>> {
            pieces.clear();
            pieces.into_iter().map(|_| ReadSlice::EMPTY).collect()
        }
        let Burst { mut frames, pieces, .. } = old;
        frames.clear();
        Burst { frames, pieces: recycle(pieces), bytes: 0, needs: Offloads::empty() }
    }

    /// Returns the frames in the order in which they were added.
    #[inline]
    pub fn frames(&self) -> &[Frame] {
        &self.frames
    }

    /// Returns the frames for changes of their prefixes.
    #[inline]
    pub fn frames_mut(&mut self) -> &mut [Frame] {
        &mut self.frames
    }

    /// Returns the sum of the lengths of the frames, in bytes.
    #[inline]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the offloads that the headers of all frames [ask for](Header::needs) together, or more: a receiver that has these offloads takes every frame
    /// of the burst as it is.
    #[inline]
    pub fn needs(&self) -> Offloads {
        self.needs
    }

    /// Returns the number of frames.
    #[inline]
    pub fn len(&self) -> usize {
        self.frames.len()
    }

    /// Returns true if there are no frames.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// Returns the number of pieces that all frames have behind their prefixes.
    #[inline]
    pub fn pieces(&self) -> usize {
        self.pieces.len()
    }

    /// Returns the bytes of `frame` behind its prefix as slices of the sender's memory, in order.
    #[inline]
    pub fn rest(&self, frame: &Frame) -> &[ReadSlice<'m>] {
        &self.pieces[frame.first as usize..][..frame.pieces as usize]
    }

    /// Copies a whole frame to `out`, which is cleared first.
    pub fn flatten(&self, frame: &Frame, out: &mut Vec<u8>) {
        out.clear();
        out.extend_from_slice(frame.prefix());
        for piece in self.rest(frame) {
            let at = out.len();
            out.resize(at + piece.len(), 0);
            piece.copy_to(&mut out[at..]);
        }
    }

    /// Adds a frame that is in one piece.
    #[inline(always)]
    pub fn push(&mut self, header: Header, frame: ReadSlice<'m>) {
        let first = self.pieces.len() as u32;
        let rest = frame.skip(PREFIX);
        if !rest.is_empty() {
            self.pieces.push(rest);
        }
        let pieces = u32::from(!rest.is_empty());
        // The bytes are copied directly to their final place. If they were copied in parts and then moved as a whole,
        // the move would wait until the parts have left the store buffer.
        self.frames.push(Frame { header, len: frame.len() as u32, first, pieces, prefix: [0; PREFIX] });
        self.note(&header, frame.len() as u64);
        if let Some(added) = self.frames.last_mut() {
            frame.copy_to(&mut added.prefix);
        }
    }

    /// Adds a frame to what is known of all of them.
    #[inline(always)]
    fn note(&mut self, header: &Header, len: u64) {
        self.bytes += len;
        self.needs |= header.needs();
    }

    /// Removes the frame that was added last; what it [needs](Self::needs) stays noted.
    #[cold]
    fn take_back_last(&mut self) {
        if let Some(frame) = self.frames.pop() {
            self.pieces.truncate(frame.first as usize);
            self.bytes -= u64::from(frame.len);
        }
    }

    /// [Validates](Header::validated) the virtual header of the frame that was added last, whose sender may ask for
    /// `negotiated`, and replaces it by what may be passed on. Headers behind the prefix are looked at in a copy that is
    /// forgotten; if a verdict about where the transport header is rests on it, [software](Header::is_software_only)
    /// has to look again.
    ///
    /// # Errors
    /// [`Invalid`]; the frame is not in the burst any more.
    #[inline]
    pub fn validate_last(&mut self, negotiated: Offloads) -> Result<(), Invalid> {
        match self.frames.last() {
            Some(frame) if !frame.header.is_evident(&frame.prefix, frame.len as usize, negotiated) => {
                self.validate_last_in_full(negotiated)
            }
            _ => Ok(()),
        }
    }

    #[inline(never)]
    fn validate_last_in_full(&mut self, negotiated: Offloads) -> Result<(), Invalid> {
        let Some(frame) = self.frames.last_mut() else { return Ok(()) };
        let mut validated = frame.header.validated(frame.prefix(), frame.len as usize, negotiated);
        if validated == Err(Invalid::Beyond) {
            let mut head = [0; VALIDATED_HEAD];
            let mut have = frame.prefix().len();
            head[..have].copy_from_slice(frame.prefix());
            for piece in &self.pieces[frame.first as usize..] {
                have += piece.copy_to(&mut head[have..]);
            }
            validated = frame.header.validated(&head[..have], frame.len as usize, negotiated);
        }
        match validated {
            Ok(header) => {
                frame.header = header;
                self.needs |= header.needs();
            }
            Err(invalid) => {
                self.take_back_last();
                return Err(invalid);
            }
        }
        Ok(())
    }

    /// Starts a frame of `len` bytes. The caller adds its bytes with [`Builder::piece`] and completes it with
    /// [`Builder::finish`]; dropping the builder instead removes the frame.
    #[inline]
    pub fn build(&mut self, header: Header, len: u32) -> Builder<'_, 'm> {
        let first = self.pieces.len() as u32;
        // The frame is built in its final place, for the same reason as in `push`.
        self.frames.push(Frame { header, len, first, pieces: 0, prefix: [0; PREFIX] });
        self.note(&header, len.into());
        Builder { burst: self, have: 0 }
    }
}

/// A frame under construction, the last of its burst.
#[derive(Debug)]
pub struct Builder<'b, 'm> {
    burst: &'b mut Burst<'m>,
    have: usize,
}

impl<'m> Builder<'_, 'm> {
    /// Adds the next bytes of the frame: those of the prefix are copied, the others borrowed.
    #[inline]
    pub fn piece(&mut self, piece: ReadSlice<'m>) {
        let mut rest = piece;
        if self.have < PREFIX
            && let Some(frame) = self.burst.frames.last_mut()
        {
            let n = piece.copy_to(&mut frame.prefix[self.have..]);
            self.have += n;
            rest = piece.skip(n);
        }
        if !rest.is_empty() {
            self.have += rest.len();
            self.burst.pieces.push(rest);
        }
    }

    /// Completes the frame, which stays in the burst.
    ///
    /// # Panics
    /// In debug builds, if the pieces do not add up to the announced length.
    #[inline]
    pub fn finish(self) {
        let Burst { frames, pieces, .. } = &mut *self.burst;
        if let Some(frame) = frames.last_mut() {
            debug_assert_eq!(self.have, frame.len as usize, "a frame's pieces add up to its length");
            frame.pieces = pieces.len() as u32 - frame.first;
        }
        std::mem::forget(self);
    }
}

impl Drop for Builder<'_, '_> {
    fn drop(&mut self) {
        self.burst.take_back_last();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vnet::F_NEEDS_CSUM;

    #[test]
    fn a_frame_is_its_prefix_and_the_rest() {
        let bytes: Vec<u8> = (0..200u8).collect();
        let mut burst = Burst::new();
        let mut frame = burst.build(Header::default(), 200);
        for piece in [&bytes[..10], &bytes[10..10], &bytes[10..90], &bytes[90..]] {
            frame.piece(ReadSlice::from(piece));
        }
        frame.finish();
        let frame = &burst.frames()[0];
        assert_eq!(frame.prefix(), &bytes[..PREFIX]);
        assert_eq!(burst.rest(frame).iter().map(ReadSlice::len).sum::<usize>(), 200 - PREFIX);
        let mut flat = Vec::new();
        burst.flatten(frame, &mut flat);
        assert_eq!(flat, bytes);
    }

    #[test]
    fn a_frame_that_is_not_finished_leaves_no_trace() {
        let bytes = [7u8; 100];
        let mut burst = Burst::new();
        burst.build(Header::default(), 100).piece(ReadSlice::from(&bytes[..]));
        assert!(burst.is_empty());
        let mut short = burst.build(Header::default(), 20);
        short.piece(ReadSlice::from(&bytes[..20]));
        short.finish();
        assert_eq!(burst.frames()[0].prefix(), &bytes[..20]);
        assert!(burst.rest(&burst.frames()[0]).is_empty());
    }

    #[test]
    fn storage_is_reused_for_other_memory() {
        let burst: Burst<'static> = {
            let bytes = [1u8; 100];
            let mut burst = Burst::new();
            let mut frame = burst.build(Header::default(), 100);
            frame.piece(ReadSlice::from(&bytes[..]));
            frame.finish();
            Burst::reuse(burst)
        };
        assert!(burst.is_empty());
    }

    #[test]
    fn bytes_are_those_of_the_frames_that_stay() {
        let bytes = [1u8; 300];
        let mut burst = Burst::new();
        burst.push(Header::default(), ReadSlice::from(&bytes[..100]));
        drop(burst.build(Header::default(), 300));
        assert_eq!(burst.bytes(), 100);
        // A checksum behind the end of the frame.
        let header = Header { flags: F_NEEDS_CSUM, csum_start: 200, csum_offset: 6, ..Header::default() };
        burst.push(header, ReadSlice::from(&bytes[..150]));
        assert!(burst.validate_last(Offloads::all()).is_err());
        assert_eq!((burst.len(), burst.bytes(), burst.pieces()), (1, 100, 1));
    }
}
