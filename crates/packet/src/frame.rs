//! Frames on their way through: a burst of packets that still lie where their sender put them.
//!
//! Of a frame only the virtual header and the first [`PREFIX`] bytes are copied, once. Whoever looks
//! at a frame looks at that copy, and whoever delivers it writes that copy: a sender that changes its
//! memory meanwhile cannot make the receiver see other addresses than the ones that were checked.
//! The rest are borrowed slices of the sender's memory, which the sender gets back when the burst has
//! been delivered.

use ringferry_memory::ReadSlice;

use crate::vnet::Header;

/// Bytes of a frame that are copied for look-up: one cache line, enough for Ethernet, a VLAN tag,
/// IPv4 and ports, and a whole frame of the smallest size.
pub const PREFIX: usize = 64;

/// One frame of a [`Burst`].
#[derive(Clone, Debug)]
pub struct Frame {
    /// The checked virtual header; `num_buffers` means nothing here.
    pub header: Header,
    /// Length of the frame in bytes, virtual header excluded.
    pub len: u32,
    first: u32,
    pieces: u32,
    prefix: [u8; PREFIX],
}

impl Frame {
    /// The first `min(len, PREFIX)` bytes.
    #[inline]
    pub fn prefix(&self) -> &[u8] {
        &self.prefix[..(self.len as usize).min(PREFIX)]
    }

    /// The same bytes, to be rewritten: addresses, say. What is delivered begins with them.
    #[inline]
    pub fn prefix_mut(&mut self) -> &mut [u8] {
        &mut self.prefix[..(self.len as usize).min(PREFIX)]
    }
}

/// Frames in the order they were sent, with flat storage that is reused from burst to burst.
#[derive(Debug, Default)]
pub struct Burst<'m> {
    frames: Vec<Frame>,
    pieces: Vec<ReadSlice<'m>>,
}

impl<'m> Burst<'m> {
    /// An empty burst.
    pub fn new() -> Self {
        Self::default()
    }

    /// An empty burst in the storage of an old one, whatever memory that one borrowed.
    #[inline]
    pub fn reuse(old: Burst<'_>) -> Burst<'m> {
        // Collecting an emptied vector's iterator in place keeps its allocation.
        fn recycle<'m>(mut pieces: Vec<ReadSlice<'_>>) -> Vec<ReadSlice<'m>> {
            pieces.clear();
            pieces.into_iter().map(|_| ReadSlice::EMPTY).collect()
        }
        let Burst { mut frames, pieces } = old;
        frames.clear();
        Burst { frames, pieces: recycle(pieces) }
    }

    /// The frames.
    #[inline]
    pub fn frames(&self) -> &[Frame] {
        &self.frames
    }

    /// The frames, for who changes their headers on the way.
    #[inline]
    pub fn frames_mut(&mut self) -> &mut [Frame] {
        &mut self.frames
    }

    /// Number of frames.
    #[inline]
    pub fn len(&self) -> usize {
        self.frames.len()
    }

    /// Whether there are no frames.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// What follows a frame's prefix, in order, where the sender put it.
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

    /// Adds a frame that lies in one piece.
    #[inline(always)]
    pub fn push(&mut self, header: Header, frame: ReadSlice<'m>) {
        let first = self.pieces.len() as u32;
        let rest = frame.skip(PREFIX);
        if !rest.is_empty() {
            self.pieces.push(rest);
        }
        let pieces = u32::from(!rest.is_empty());
        // The bytes go straight to where they stay: copied in parts and then moved on as a whole, the move would wait
        // for the parts to leave the store buffer.
        self.frames.push(Frame { header, len: frame.len() as u32, first, pieces, prefix: [0; PREFIX] });
        if let Some(added) = self.frames.last_mut() {
            frame.copy_to(&mut added.prefix);
        }
    }

    /// Starts a frame of `len` bytes. Its bytes are then added with [`Builder::piece`]; it stays in the
    /// burst with [`Builder::finish`], and a builder that is dropped leaves no trace.
    #[inline]
    pub fn build(&mut self, header: Header, len: u32) -> Builder<'_, 'm> {
        let first = self.pieces.len() as u32;
        // In its place from the beginning, for the reason that `push` has.
        self.frames.push(Frame { header, len, first, pieces: 0, prefix: [0; PREFIX] });
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
    /// Adds the next bytes of the frame: what still belongs to the prefix is copied, the rest borrowed.
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

    /// The frame is complete.
    ///
    /// # Panics
    /// In debug builds, when the pieces do not add up to the length that was announced.
    #[inline]
    pub fn finish(self) {
        let Burst { frames, pieces } = &mut *self.burst;
        if let Some(frame) = frames.last_mut() {
            debug_assert_eq!(self.have, frame.len as usize, "a frame's pieces add up to its length");
            frame.pieces = pieces.len() as u32 - frame.first;
        }
        std::mem::forget(self);
    }
}

impl Drop for Builder<'_, '_> {
    fn drop(&mut self) {
        if let Some(frame) = self.burst.frames.pop() {
            self.burst.pieces.truncate(frame.first as usize);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
