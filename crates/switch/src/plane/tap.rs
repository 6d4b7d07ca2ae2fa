//! The host's network stack behind a tap.

use std::io;

use ringferry_memory::{ReadSlice, WriteSlice};
use ringferry_packet::frame::Burst;
use ringferry_packet::vnet::{Header, Offloads};
use ringferry_sys::tap::{MAX_READ, Offloads as TapOffloads, Tap};

use crate::counters::{DropReason, PortCounters};

/// Bytes read before the burst is forwarded. Several large frames amortise a burst as well as many
/// small ones do, and more than this would push them out of the second-level cache.
pub(super) const BURST_BYTES: usize = 256 * 1024;

/// Most pieces the kernel takes in one call (`UIO_MAXIOV`).
pub(super) const MAX_PIECES: usize = 1024;

/// Pieces that need no list on the heap: those of a burst that became one frame, where each packet is one, or two.
const FEW_PIECES: usize = 72;

/// A tap's port.
pub(super) struct TapPort {
    pub(super) tap: Tap,
    /// What the kernel takes.
    pub(super) offloads: Offloads,
    /// The pair of the only receiver that large frames were lately for: the next burst is read straight into its buffers.
    pub(super) straight: Option<u16>,
    /// A buffer for each frame of a burst.
    buffers: Vec<Box<[u8]>>,
    lengths: Vec<usize>,
    scratch: Vec<u8>,
}

impl TapPort {
    /// A tap of which no frames are read yet.
    pub(super) fn new(tap: Tap) -> Self {
        let has = |offload| tap.offloads().contains(offload);
        let mut offloads = Offloads::empty();
        offloads.set(Offloads::CSUM, has(TapOffloads::CSUM));
        offloads.set(Offloads::TSO4, has(TapOffloads::TSO4));
        offloads.set(Offloads::TSO6, has(TapOffloads::TSO6));
        offloads.set(Offloads::ECN, has(TapOffloads::ECN));
        offloads.set(Offloads::USO, has(TapOffloads::USO4));
        Self { tap, offloads, straight: None, buffers: Vec::new(), lengths: Vec::new(), scratch: Vec::new() }
    }

    /// From now on bursts of up to so many frames are read here: 0 if another worker does that.
    pub(super) fn set_burst(&mut self, burst: usize) {
        self.buffers.truncate(burst);
        self.buffers.resize_with(burst, || vec![0; MAX_READ].into_boxed_slice());
    }

    /// Reads a burst into our buffers; returns how many frames, and whether more may be waiting.
    pub(super) fn read(&mut self) -> (usize, bool) {
        self.lengths.clear();
        let mut bytes = 0;
        for buffer in &mut self.buffers {
            match self.tap.read(buffer) {
                Ok(len) => {
                    bytes += len;
                    self.lengths.push(len);
                    if bytes >= BURST_BYTES {
                        break;
                    }
                }
                // Nothing there, or the interface is down or gone: epoll tells when that changes.
                Err(_) => return (self.lengths.len(), false),
            }
        }
        (self.lengths.len(), true)
    }

    /// The buffers of the last burst, lent out so that the port can be used while they are forwarded.
    pub(super) fn lend(&mut self) -> (Vec<Box<[u8]>>, Vec<usize>) {
        (std::mem::take(&mut self.buffers), std::mem::take(&mut self.lengths))
    }

    /// Takes the buffers back.
    pub(super) fn give_back(&mut self, (buffers, lengths): (Vec<Box<[u8]>>, Vec<usize>)) {
        self.buffers = buffers;
        self.lengths = lengths;
    }

    /// Hands a frame to the kernel, from where it lies.
    #[inline]
    pub(super) fn deliver(
        &mut self,
        header: Header,
        first: &[u8],
        rest: &[ReadSlice<'_>],
    ) -> Result<(), DropReason> {
        let bytes = header.to_bytes();
        let mut pieces = [ReadSlice::EMPTY; FEW_PIECES];
        let result = if rest.len() + 2 <= pieces.len() {
            pieces[0] = ReadSlice::from(&bytes[..]);
            pieces[1] = ReadSlice::from(first);
            pieces[2..2 + rest.len()].copy_from_slice(rest);
            self.tap.writev(&pieces[..2 + rest.len()])
        } else if rest.len() + 2 <= MAX_PIECES {
            let mut pieces = Vec::with_capacity(rest.len() + 2);
            pieces.extend([ReadSlice::from(&bytes[..]), ReadSlice::from(first)]);
            pieces.extend_from_slice(rest);
            self.tap.writev(&pieces)
        } else {
            let len = bytes.len() + first.len() + rest.iter().map(ReadSlice::len).sum::<usize>();
            self.scratch.resize(len, 0);
            let mut to = WriteSlice::from(&mut self.scratch[..]);
            for piece in [ReadSlice::from(&bytes[..]), ReadSlice::from(first)].iter().chain(rest) {
                to = to.skip(piece.copy_to_slice(&to));
            }
            self.tap.write(&self.scratch)
        };
        match result {
            Ok(_) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Err(DropReason::TapBusy),
            // EIO: the interface is down.
            Err(error) if error.raw_os_error() == Some(rustix::io::Errno::IO.raw_os_error()) => {
                Err(DropReason::LinkDown)
            }
            Err(_) => Err(DropReason::TapWriteError),
        }
    }
}

/// Frames for what was read from a tap: each buffer holds a virtual header and a frame.
pub(super) fn frames<'m>(
    buffers: &'m [Box<[u8]>],
    lengths: &[usize],
    burst: &mut Burst<'m>,
    counters: &PortCounters,
) {
    for (buffer, &len) in buffers.iter().zip(lengths) {
        let read = ReadSlice::from(&buffer[..len]);
        if let Some(header) = admit(read, len, counters) {
            burst.push(header, read.skip(Header::LEN));
        }
    }
}

/// Counts what was read: `len` bytes that begin with `head`. Its virtual header, if it is a frame.
#[inline]
pub(super) fn admit(head: ReadSlice<'_>, len: usize, counters: &PortCounters) -> Option<Header> {
    let Some(bytes) = head.array() else {
        counters.drops.add(DropReason::RxTooShort, 1);
        return None;
    };
    let header = Header::from_bytes(&bytes).sanitised_from_device();
    counters.rx_packets.add(1);
    counters.rx_bytes.add((len - Header::LEN) as u64);
    let sound = header.check(len - Header::LEN).is_ok();
    if !sound {
        counters.drops.add(DropReason::RxBadHeader, 1);
    }
    sound.then_some(header)
}
