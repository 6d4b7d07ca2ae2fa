//! The queue side of an xdp port: sockets of an interface, as one worker owns them.
//!
//! A queue is served as a pair of virtqueues is: one worker owns it, and others hand frames for it off to that one. Packets are forwarded from the frames in which the
//! kernel has put them, which nobody writes to until they are given back, and are copied once on their way out, where one call sends a burst. The kernel takes no work
//! off a packet that a socket sends, and says nothing of one that it receives, so packets leave finished and in pieces of the MTU.

use std::sync::Arc;

use ringferry_memory::ReadSlice;
use ringferry_packet::checksum;
use ringferry_packet::frame::{Burst, PREFIX};
use ringferry_packet::vnet::Header;
use ringferry_virtio_net::queue_index;
use ringferry_xdp::{Lent, Queue, Refused};

use crate::counters::DropReason;
use crate::plane::{Delivery, FrameCost, Lease, PortHandle, PortShared, Queues, Taken, Watch};
use crate::ports::queues::{QueueState, put};

/// A queue of an interface that is open.
pub struct XdpStart {
    /// Index of the queue in its interface.
    pub number: u16,
    /// Its rings and memory.
    pub queue: Queue,
}

/// The queues of an interface that this worker has. Index `q` is queue `q`.
pub struct XdpQueues {
    port: PortHandle,
    queues: Vec<Option<XdpQueue>>,
    shared: Arc<PortShared>,
    /// Checksums that hold the sum of the pseudo header alone are finished.
    finishes: bool,
}

/// One queue of an interface.
pub struct XdpQueue {
    queue: Queue,
    /// Frames, and their bytes, that were put and not flushed.
    unseen: (u64, u64),
    /// Frames that found no room since the last flush.
    dropped: u64,
}

impl XdpQueues {
    /// Makes a port without queues.
    pub(super) fn new(port: PortHandle, shared: Arc<PortShared>, finishes: bool) -> Self {
        Self { port, queues: Vec::new(), shared, finishes }
    }

    #[inline]
    fn queue(&mut self, number: u16) -> Option<&mut XdpQueue> {
        self.queues.get_mut(usize::from(number))?.as_mut()
    }

    fn watch(&mut self, number: u16, watch: Watch<'_>) {
        let name = Arc::clone(&self.port.name);
        let Some(queue) = self.queue(number) else { return };
        if let Err(error) = watch.add(&queue.queue, number) {
            tracing::error!(port = %name, "cannot wait for packets of the interface: {error}");
        }
    }
}

impl Queues for XdpQueues {
    type Loan = Lent;
    type Start = XdpStart;
    type Stopped = ();
    type Request = std::convert::Infallible;
    type Detached = XdpQueue;
    type State = QueueState;

    #[inline]
    fn lease(&mut self, number: u16, max: usize) -> Lease<Lent> {
        let lent = self.queue(number).and_then(|queue| queue.queue.lend(max));
        // The socket is readable as long as packets wait.
        lent.map_or(Lease::Exhausted, Lease::Frames)
    }

    #[inline]
    fn frames<'m>(&mut self, number: u16, lent: &'m Lent, _: usize, burst: &mut Burst<'m>) -> Taken {
        for mut pieces in lent.packets() {
            let (Some(first), second) = (pieces.next(), pieces.next()) else { continue };
            let header = if self.finishes { unfinished(&first) } else { Header::NONE };
            let Some(second) = second else {
                burst.push(header, first);
                continue;
            };
            let rest: Vec<_> = pieces.collect();
            let len = first.len() + second.len() + rest.iter().map(ReadSlice::len).sum::<usize>();
            let mut builder = burst.build(header, len as u32);
            [first, second].into_iter().chain(rest).for_each(|piece| builder.piece(piece));
            builder.finish();
        }
        if let Some(pair) = self.shared.pairs.get(usize::from(number)) {
            for (packets, bytes) in [
                (&self.port.counters.rx_packets, &self.port.counters.rx_bytes),
                (&pair.rx_packets, &pair.rx_bytes),
            ] {
                packets.add(burst.len() as u64);
                bytes.add(burst.bytes());
            }
        }
        Taken { any: true, forward: true, private: true, exhausted: false, further: 0 }
    }

    #[inline]
    fn complete(&mut self, number: u16, lent: Lent) {
        if let Some(queue) = self.queue(number) {
            queue.queue.give_back(lent);
        }
    }

    fn backlog(&mut self, _: u16) -> usize {
        0
    }

    /// Also sends what the kernel has not taken at once, as nobody would later.
    fn arm(&mut self, number: u16) -> bool {
        self.queue(number).is_none_or(|queue| queue.queue.settle() && !queue.queue.has_packets())
    }

    fn is_kickless(&mut self, _: u16) -> bool {
        false
    }

    fn wake(&mut self, number: u16, hangup: bool, watch: Watch<'_>) -> bool {
        self.port.counters.kicks.add(1);
        if let Some(pair) = self.shared.pairs.get(usize::from(number)) {
            pair.kicks.add(1);
        }
        if let Some(queue) = self.queue(number).filter(|_| hangup) {
            // The interface was deleted, or is down: the control plane sees which, and opens it anew.
            watch.remove(&queue.queue);
        }
        !hangup
    }

    /// The socket is readable as long as packets wait.
    fn pause(&mut self, number: u16, watch: Watch<'_>) {
        if let Some(queue) = self.queue(number) {
            watch.remove(&queue.queue);
        }
    }

    fn resume(&mut self, number: u16, watch: Watch<'_>) {
        self.watch(number, watch);
    }

    #[inline]
    fn frame_cost(&self) -> FrameCost {
        FrameCost::Descriptor
    }

    #[inline]
    fn expect(&mut self, _: usize) {}

    /// Copies a frame to where it is sent from.
    #[inline]
    fn deliver(
        &mut self,
        number: u16,
        _: Header,
        first: &[u8],
        rest: &[ReadSlice<'_>],
        len: u64,
    ) -> Result<Delivery, DropReason> {
        let Some(queue) = self.queue(number) else { return Ok(Delivery::NotHere) };
        match queue.queue.put(first, rest, len as usize) {
            Ok(()) => {
                queue.unseen.0 += 1;
                queue.unseen.1 += len;
                Ok(Delivery::Done)
            }
            Err(Refused::Full) => {
                queue.dropped += 1;
                Err(DropReason::InterfaceBusy)
            }
            Err(Refused::TooLong) => Err(DropReason::TxTooBig),
        }
    }

    fn probe(&mut self, number: u16, packets: &[(Header, Vec<u8>)]) -> Vec<Result<Delivery, DropReason>> {
        let Some(queue) = self.queue(number) else { return vec![Ok(Delivery::NotHere); packets.len()] };
        let takes = |len: usize| match queue.queue.takes(len) {
            true => Ok(Delivery::Done),
            false => Err(DropReason::TxTooBig),
        };
        packets.iter().map(|(_, frame)| takes(frame.len())).collect()
    }

    /// Has the kernel send what was put.
    #[inline]
    fn flush(&mut self) -> usize {
        for (pair, queue) in self.shared.pairs.iter().zip(&mut self.queues) {
            let Some(queue) = queue else { continue };
            if queue.dropped > 0 {
                pair.tx_dropped.add(std::mem::take(&mut queue.dropped));
            }
            let (packets, bytes) = std::mem::take(&mut queue.unseen);
            if packets == 0 {
                continue;
            }
            pair.tx_packets.add(packets);
            pair.tx_bytes.add(bytes);
            if queue.queue.flush() {
                self.port.counters.calls.add(1);
                pair.calls.add(1);
            } else {
                self.port.counters.calls_suppressed.add(1);
                pair.calls_suppressed.add(1);
            }
        }
        0
    }

    fn start(&mut self, XdpStart { number, queue }: XdpStart, watch: Watch<'_>) -> Option<u16> {
        put(&mut self.queues, number.into(), XdpQueue { queue, unseen: (0, 0), dropped: 0 });
        self.shared.set_ready(number, true);
        self.watch(number, watch);
        Some(number)
    }

    fn stop(&mut self, number: u16, watch: Watch<'_>) -> Option<((), Option<u16>)> {
        let queue = self.queues.get_mut(usize::from(number))?.take()?;
        watch.remove(&queue.queue);
        self.shared.set_ready(number, false);
        Some(((), Some(number)))
    }

    fn close(&mut self, watch: Watch<'_>) {
        self.queues.iter().flatten().for_each(|queue| watch.remove(&queue.queue));
    }

    fn request(&mut self, request: std::convert::Infallible, _: Watch<'_>) {
        match request {}
    }

    fn detach(&mut self, number: u16, watch: Watch<'_>) -> Option<XdpQueue> {
        let queue = self.queues.get_mut(usize::from(number))?.take()?;
        watch.remove(&queue.queue);
        Some(queue)
    }

    fn attach(&mut self, number: u16, queue: XdpQueue, watch: Watch<'_>) -> bool {
        put(&mut self.queues, number.into(), queue);
        self.watch(number, watch);
        true
    }

    fn inspect(&mut self, states: &mut Vec<QueueState>) {
        for (number, queue) in (0u16..).zip(&self.queues) {
            let Some(XdpQueue { queue, .. }) = queue else { continue };
            let [received, sent] = queue.positions();
            let ring = |index, at: u32| QueueState {
                index,
                last_avail: at as u16,
                last_used: at as u16,
                available: None,
                posted: None,
                unanswered: None,
                broken: None,
                pages: None,
            };
            states.extend([
                ring(queue_index::receiveq(number), sent),
                ring(queue_index::transmitq(number), received),
            ]);
        }
    }
}

/// Returns a header that asks for the checksum of a packet that begins with `first`, if it holds the sum of its pseudo header alone.
#[inline]
fn unfinished(first: &ReadSlice<'_>) -> Header {
    let mut prefix = [0; 2 * PREFIX];
    let have = first.copy_to(&mut prefix);
    checksum::unfinished(&prefix[..have])
}
