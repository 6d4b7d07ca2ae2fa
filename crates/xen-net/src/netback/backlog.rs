//! [`Backlog`]: a FIFO of frames that wait until the front end has posted pages for them, each
//! copied once, bounded in bytes and in time. It belongs to a [`Queue`](super::Queue), which pushes
//! frames that find no pages, delivers the oldest when there are some, and expires those that
//! waited too long.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use ringferry_memory::ReadSlice;
use ringferry_packet::vnet::Header;

/// Longest wait of a frame. A sender retransmits what was not acknowledged for so long; Linux's
/// netback drops after 10 seconds, when a connection has long backed off.
const MAX_WAIT: Duration = Duration::from_secs(1);

/// A copy of a frame that waits.
#[derive(Debug)]
pub(super) struct WaitingFrame {
    pub(super) header: Header,
    pub(super) bytes: Vec<u8>,
    since: Instant,
}

/// The waiting frames of a queue, oldest first.
#[derive(Debug)]
pub(super) struct Backlog {
    frames: VecDeque<WaitingFrame>,
    bytes: usize,
    /// Most bytes that may wait.
    limit: usize,
    /// Number of frames that ever waited.
    waited: u64,
}

impl Backlog {
    /// Creates a backlog with room for `limit` bytes of frames.
    pub(super) fn new(limit: usize) -> Self {
        Self { frames: VecDeque::new(), bytes: 0, limit, waited: 0 }
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// Returns the number of frames that ever waited.
    pub(super) fn waited(&self) -> u64 {
        self.waited
    }

    /// Returns the oldest waiting frame.
    pub(super) fn front(&self) -> Option<&WaitingFrame> {
        self.frames.front()
    }

    /// Returns how many more bytes may wait.
    pub(super) fn room(&self) -> usize {
        self.limit.saturating_sub(self.bytes)
    }

    /// Appends a copy of a frame; returns false when there is no room.
    #[cold]
    pub(super) fn push(&mut self, header: Header, first: &[u8], rest: &[ReadSlice<'_>]) -> bool {
        let len = first.len() + rest.iter().map(ReadSlice::len).sum::<usize>();
        if len > self.room() {
            return false;
        }
        let mut bytes = vec![0; len];
        let (begin, mut end) = bytes.split_at_mut(first.len());
        begin.copy_from_slice(first);
        for piece in rest {
            let (here, after) = end.split_at_mut(piece.len());
            piece.copy_to(here);
            end = after;
        }
        self.waited += 1;
        self.bytes += len;
        self.frames.push_back(WaitingFrame { header, bytes, since: Instant::now() });
        true
    }

    /// Removes the oldest waiting frame, if any.
    pub(super) fn pop(&mut self) {
        if let Some(frame) = self.frames.pop_front() {
            self.bytes -= frame.bytes.len();
        }
    }

    /// Removes the frames that have waited too long at `now`; returns how many.
    pub(super) fn expire(&mut self, now: Instant) -> u64 {
        let late = |frame: &WaitingFrame| now.saturating_duration_since(frame.since) >= MAX_WAIT;
        let mut count = 0;
        while self.frames.front().is_some_and(late) {
            self.pop();
            count += 1;
        }
        count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn xsa_392_what_waits_is_bounded_in_bytes_and_in_time() {
        let mut backlog = Backlog::new(1000);
        let mut push = |len| backlog.push(Header::default(), &vec![1; len], &[]);
        assert_eq!([600, 401, 400, 1].map(&mut push), [true, false, true, false]);
        let now = Instant::now();
        assert_eq!(backlog.expire(now), 0);
        assert_eq!(backlog.expire(now + MAX_WAIT), 2);
        assert!(backlog.is_empty());
        assert!(backlog.push(Header::default(), &[0; 10], &[ReadSlice::from(&[2; 990][..])]));
        let frame = backlog.front().unwrap();
        assert!(frame.bytes[..10] == [0; 10] && frame.bytes[10..] == [2; 990]);
        backlog.pop();
        assert!(backlog.push(Header::default(), &[0; 1000], &[]));
        assert!(!Backlog::new(0).push(Header::default(), &[0; 14], &[]));
    }
}
