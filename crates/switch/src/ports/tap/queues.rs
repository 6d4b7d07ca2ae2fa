//! The queue side of a tap: the host's network stack behind it.
//!
//! Every worker has a [`TapQueues`] of a tap, with a descriptor of its own, and writes to it; only a worker on which the queue was
//! [started](TapStart), or to which it has migrated, reads it. A read or a write is a system call for each frame, so there is nothing to publish or complete.

use std::io;

use ringferry_memory::{ReadSlice, WriteSlice};
use ringferry_packet::frame::Burst;
use ringferry_packet::vnet::{Header, Offloads, VALIDATED_HEAD};
use ringferry_sys::tap::{MAX_READ, Offloads as TapOffloads, Tap};
use rustix::io::Errno;

use crate::counters::{DropReason, PortCounters};
use crate::plane::queues::MAX_BURST_BYTES;
use crate::plane::{Delivery, DirectRead, FrameCost, Lease, PortHandle, Queues, Taken, Watch};
use crate::ports::queues::QueueState;

/// Upper bound on the pieces that the kernel takes in one call (`UIO_MAXIOV`).
const MAX_PIECES: usize = 1024;

/// Pieces that need no list on the heap: those of a burst that became one frame, where each packet is one, or two.
const FEW_PIECES: usize = 72;

/// A worker's queue of a tap.
pub struct TapQueues {
    port: PortHandle,
    tap: Tap,
    /// Offloads that the kernel takes.
    offloads: Offloads,
    /// [`MAX_READ`] bytes for each frame of a burst; empty in a worker that does not read the tap.
    buffers: Box<[u8]>,
    scratch: Vec<u8>,
}

/// The right to read queue `.0` of a tap.
#[derive(Clone, Copy, Debug)]
pub struct TapStart(pub u16);

/// A burst that was read: buffers that hold a virtual header and a frame each.
pub struct TapLoan {
    buffers: Box<[u8]>,
    lengths: [u32; MAX_FRAMES],
    frames: usize,
    more: bool,
}

/// Upper bound on the frames of a burst.
const MAX_FRAMES: usize = 32;

/// The offloads that the kernel behind a tap takes, in terms of virtio-net.
pub(crate) fn offloads(kernel: TapOffloads) -> Offloads {
    let has = |offload| kernel.contains(offload);
    let mut offloads = Offloads::empty();
    offloads.set(Offloads::CSUM, has(TapOffloads::CSUM));
    offloads.set(Offloads::TSO4, has(TapOffloads::TSO4));
    offloads.set(Offloads::TSO6, has(TapOffloads::TSO6));
    offloads.set(Offloads::ECN, has(TapOffloads::ECN));
    offloads.set(Offloads::USO, has(TapOffloads::USO4));
    offloads
}

impl TapQueues {
    /// Makes the queue of a worker that writes to the tap and does not read it.
    pub(super) fn new(port: PortHandle, tap: Tap) -> Self {
        let offloads = offloads(tap.offloads());
        Self { port, tap, offloads, buffers: Box::default(), scratch: Vec::new() }
    }

    fn begin_reading(&mut self, queue: u16, watch: Watch<'_>) {
        // In one piece, which one system call gets. A buffer each was 30 for a tap, 90 us, for which everybody waits when the switch is replaced.
        self.buffers = vec![0; MAX_FRAMES * MAX_READ].into();
        self.resume(queue, watch);
    }

    fn end_reading(&mut self, watch: Watch<'_>) {
        watch.remove(&self.tap);
        self.buffers = Box::default();
    }
}

impl Queues for TapQueues {
    type Loan = TapLoan;
    type Start = TapStart;
    type Stopped = ();
    type Request = std::convert::Infallible;
    type Detached = ();
    type State = QueueState;

    /// Reads a burst, a system call for each frame.
    fn lease(&mut self, _: u16, max: usize) -> Lease<TapLoan> {
        let mut lengths = [0; MAX_FRAMES];
        let (mut frames, mut bytes, mut more) = (0, 0, true);
        for (buffer, length) in self.buffers.chunks_exact_mut(MAX_READ).zip(&mut lengths).take(max) {
            match self.tap.read(buffer) {
                Ok(len) => {
                    bytes += len;
                    *length = len as u32;
                    frames += 1;
                    if bytes >= MAX_BURST_BYTES {
                        break;
                    }
                }
                // Nothing waits, or the interface is down or gone: epoll tells when that changes.
                Err(_) => {
                    more = false;
                    break;
                }
            }
        }
        match frames {
            0 if more => Lease::Empty,
            0 => Lease::Exhausted,
            _ => Lease::Frames(TapLoan { buffers: std::mem::take(&mut self.buffers), lengths, frames, more }),
        }
    }

    fn frames<'m>(&mut self, _: u16, loan: &'m TapLoan, _: usize, burst: &mut Burst<'m>) -> Taken {
        for (buffer, len) in loan.buffers.chunks_exact(MAX_READ).zip(&loan.lengths[..loan.frames]) {
            let read = ReadSlice::from(&buffer[..*len as usize]);
            if let Some(header) = admit(&[read], read.len(), self.offloads, &self.port.counters) {
                burst.push(header, read.skip(Header::LEN));
            }
        }
        Taken { any: true, forward: true, private: true, exhausted: !loan.more, further: 0 }
    }

    fn complete(&mut self, _: u16, loan: TapLoan) {
        self.buffers = loan.buffers;
    }

    fn backlog(&mut self, _: u16) -> usize {
        0
    }

    fn arm(&mut self, _: u16) -> bool {
        true
    }

    fn is_kickless(&mut self, _: u16) -> bool {
        false
    }

    fn wake(&mut self, _: u16, hangup: bool, watch: Watch<'_>) -> bool {
        if hangup {
            // The device was deleted while we had it open: no frame will ever come again.
            tracing::warn!(tap = self.tap.name(), "the tap is gone");
            watch.remove(&self.tap);
        }
        !hangup
    }

    /// The descriptor of a tap is readable as long as frames wait.
    fn pause(&mut self, _: u16, watch: Watch<'_>) {
        watch.remove(&self.tap);
    }

    fn resume(&mut self, queue: u16, watch: Watch<'_>) {
        if let Err(error) = watch.add(&self.tap, queue) {
            tracing::error!(tap = self.tap.name(), "cannot wait for the tap: {error}");
        }
    }

    fn frame_cost(&self) -> FrameCost {
        FrameCost::SystemCall
    }

    fn expect(&mut self, _: usize) {}

    /// Hands a frame to the kernel, from where it lies.
    #[inline]
    fn deliver(
        &mut self,
        _: u16,
        header: Header,
        first: &[u8],
        rest: &[ReadSlice<'_>],
        _: u64,
    ) -> Result<Delivery, DropReason> {
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
            Ok(_) => Ok(Delivery::Done),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Err(DropReason::TapBusy),
            Err(error) => Err(match Errno::from_io_error(&error) {
                // The interface is down, or gone: the frame is dropped.
                Some(Errno::IO | Errno::BADFD) => DropReason::LinkDown,
                _ => DropReason::TapWriteError,
            }),
        }
    }

    /// The kernel says only of a frame that is written what becomes of it, and takes any while the interface is up: whether it is, the control plane knows.
    fn probe(&mut self, _: u16, packets: &[(Header, Vec<u8>)]) -> Vec<Result<Delivery, DropReason>> {
        vec![Ok(Delivery::Done); packets.len()]
    }

    fn flush(&mut self) -> usize {
        0
    }

    fn start(&mut self, TapStart(queue): TapStart, watch: Watch<'_>) -> Option<u16> {
        self.begin_reading(queue, watch);
        Some(queue)
    }

    fn stop(&mut self, index: u16, watch: Watch<'_>) -> Option<((), Option<u16>)> {
        self.end_reading(watch);
        Some(((), Some(index)))
    }

    fn close(&mut self, watch: Watch<'_>) {
        self.end_reading(watch);
    }

    fn request(&mut self, request: std::convert::Infallible, _: Watch<'_>) {
        match request {}
    }

    fn detach(&mut self, _: u16, watch: Watch<'_>) -> Option<()> {
        self.end_reading(watch);
        Some(())
    }

    fn attach(&mut self, queue: u16, (): (), watch: Watch<'_>) -> bool {
        self.begin_reading(queue, watch);
        true
    }

    fn inspect(&mut self, _: &mut Vec<QueueState>) {}

    #[inline]
    fn reads_directly(&self) -> bool {
        true
    }

    fn read_direct(&mut self, room: &mut [WriteSlice<'_>]) -> DirectRead {
        if room.len() > MAX_PIECES {
            return DirectRead::Unsupported;
        }
        let len = match self.tap.readv(room) {
            Ok(len) => len,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return DirectRead::Nothing,
            // The tap is down or gone, which the usual way of reading finds out; or the receiver's memory is
            // gone, which the kernel does not report and the next write to that memory finds out.
            Err(_) => return DirectRead::Failed,
        };
        let mut pieces = [ReadSlice::EMPTY; 4];
        let mut left = len;
        for (piece, room) in pieces.iter_mut().zip(&*room) {
            *piece = room.as_read().first(left);
            left -= piece.len();
        }
        match admit(&pieces, len, self.offloads, &self.port.counters) {
            Some(header) => DirectRead::Frame(header, len - Header::LEN),
            None => DirectRead::Failed,
        }
    }
}

/// Counts a frame that was read: `len` bytes that begin with `pieces`, the first of which has the virtual
/// header. Returns the header if it fits the frame: other guests may write to the host's network stack, which
/// passes their headers on.
#[inline]
fn admit(
    pieces: &[ReadSlice<'_>],
    len: usize,
    offloads: Offloads,
    counters: &PortCounters,
) -> Option<Header> {
    let Some((head, bytes)) = pieces.first().and_then(|head| Some((head, head.array()?))) else {
        counters.drops.add(DropReason::RxTooShort, 1);
        return None;
    };
    counters.rx_packets.add(1);
    counters.rx_bytes.add((len - Header::LEN) as u64);
    let header = Header::from_bytes(&bytes).sanitised_from_device();
    let mut first = [0; VALIDATED_HEAD];
    let mut have = 0;
    if header != Header::NONE {
        have = head.skip(Header::LEN).copy_to(&mut first);
        for piece in &pieces[1..] {
            have += piece.copy_to(&mut first[have..]);
        }
    }
    let header = header.validated(&first[..have], len - Header::LEN, offloads);
    if header.is_err() {
        counters.drops.add(DropReason::RxBadHeader, 1);
    }
    header.ok()
}
