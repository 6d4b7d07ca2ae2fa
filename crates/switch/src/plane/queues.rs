//! The seam between the engine and the kinds of ports: [`Queues`], one port's queues as one worker owns them.
//!
//! **Life cycle.** The control plane makes one `Queues` of a port for every worker and hands each to its worker
//! ([`Workers::add_port`](super::Workers::add_port)); from then on only that worker's thread calls it. Queues begin with
//! [`start`](Queues::start) and end with [`stop`](Queues::stop); in between a queue may go to another worker
//! ([`detach`](Queues::detach), [`attach`](Queues::attach)) while packets flow. [`close`](Queues::close) and
//! dropping the value end the port.
//!
//! ```text
//!   frames from the port:   lease ─► frames ─► (the engine forwards) ─► complete        a burst of one queue
//!   frames to the port:     expect ─► deliver_run, deliver, ... ─► flush                a burst of one sender
//!   nothing to do:          arm ─► (the worker sleeps in epoll) ─► wake                 per queue
//! ```
//!
//! **A burst that was leased is completed.** The engine calls [`complete`](Queues::complete) with every loan that [`lease`](Queues::lease) gave out,
//! once nothing borrows from it, whatever has happened to the queue meanwhile: it may have broken, or have been disabled, and the frames may all have
//! been dropped. Commands, so also `stop` and `detach`, are carried out between two bursts, when no loan of the queue is out. The loan keeps the
//! memory of its frames mapped by itself, so that `complete` need not find the queue as it was; if the queue cannot be served any more the loan is
//! dropped, and that is all.
//!
//! A queue that frames come from is *active* (polled every round) or *armed* (its descriptor is watched, it costs nothing). The
//! engine instantiates the trait once, with an enum of the kinds that there are (`ports::queues`), so calls are a predicted branch and not a
//! virtual call; its tests use ports on the heap.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

use ringferry_memory::{GuestMemory, ReadSlice, Translator, WriteSlice};
use ringferry_packet::frame::Burst;
use ringferry_packet::vnet::Header;
use ringferry_sys::epoll::{Epoll, Interest};
use ringferry_virtio_net::device::Run;
use smallvec::SmallVec;

use crate::counters::{DropReason, PortCounters};
use crate::fdb::PortId;

/// Pieces of a receiver's memory that need no list on the heap: the largest frame in buffers of 1536 bytes, which Linux's are at
/// least.
const FEW_PIECES: usize = 64;

/// Bytes taken from a port before the burst is forwarded, where frames may be large. Several large frames amortise a burst as well as
/// many small ones do, and more than this would push them out of the second-level cache.
pub const MAX_BURST_BYTES: usize = 256 * 1024;

/// The memory of a receiver that a frame is read into directly.
pub type Room<'m> = SmallVec<[WriteSlice<'m>; FEW_PIECES]>;

/// A port's identity and counters in one worker.
#[derive(Clone, Debug)]
pub struct PortHandle {
    /// Number of the port, which is an index of the engine's tables and part of epoll tokens.
    pub id: PortId,
    /// Name of the port in the configuration, for log lines.
    pub name: Arc<str>,
    /// The counters that this worker, and no other, adds to.
    pub counters: Arc<PortCounters>,
}

/// The result of [`Queues::lease`], with the frames if there are any.
#[derive(Debug)]
pub enum Lease<L> {
    /// The queue is empty, as far as a look at it tells.
    Empty,
    /// The queue is empty, or served no more, and its descriptor will tell when that changes: it need not be armed.
    Exhausted,
    /// There are frames; they borrow from this until [`Queues::complete`].
    Frames(L),
}

/// The result of [`Queues::frames`], besides the frames themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Taken {
    /// True if the queue had packets, though maybe none that can be forwarded.
    pub any: bool,
    /// True if the frames are to be forwarded; the frames of a disabled queue are discarded.
    pub forward: bool,
    /// True if nobody but this process can write the memory that the frames lie in.
    pub private: bool,
    /// True if the queue is empty now and its descriptor will tell when that changes.
    pub exhausted: bool,
    /// Descriptors of packets in several that were read, whether a frame came of them or not.
    pub further: usize,
}

/// The result of delivering a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    /// The receiver has the frame; the engine counts it.
    Done,
    /// The frame is in a queue of the receiver or of another worker, and is counted when it is delivered.
    Queued,
    /// This worker does not have the queue; nothing was done.
    NotHere,
}

/// The cost of a frame to its receiver, which decides whether packets are merged for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameCost {
    /// A system call: any two packets that can be merged are.
    SystemCall,
    /// A descriptor of a ring: merging has to pay for itself.
    Descriptor,
}

/// Buffers beyond what usual drivers have frames take that a receiver has frames of one burst take, on all its queues: the frame that exceeds it is the
/// last. So a turn of its sender takes at most 0.3 ms longer, whatever the receiver's rings look like. Without it, a frame
/// that was cut into 1875 packets had as many chains of 65 buffers read, and 16 queues had 16 times the buffers of one filled.
pub const MOST_UNUSUAL: usize = 2048;

/// The result of [`Queues::read_direct`]; the frame itself is in the receiver's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DirectRead {
    /// The kind of port cannot do it.
    Unsupported,
    /// No frame waits at the port.
    Nothing,
    /// The port could not be read, or the bytes read are no frame; the failure is counted.
    Failed,
    /// A frame: its virtual header, and the bytes behind it.
    Frame(Header, usize),
}

/// Registers descriptors of one port with the worker's epoll instance.
#[derive(Clone, Copy, Debug)]
pub struct Watch<'w> {
    epoll: &'w Epoll,
    port: PortId,
}

impl<'w> Watch<'w> {
    /// Makes a registrar for the descriptors of `port`.
    pub(crate) fn new(epoll: &'w Epoll, port: PortId) -> Self {
        Self { epoll, port }
    }

    /// Has [`Queues::wake`] called for `queue` whenever `fd` is readable.
    ///
    /// # Errors
    /// The user's limit of watched descriptors is reached, or `fd` cannot be watched.
    pub fn add(&self, fd: impl AsFd, queue: u16) -> io::Result<()> {
        self.epoll.add(fd, Source { port: self.port, queue }.token(), Interest::READABLE)
    }

    /// Stops watching a descriptor. Called before it is closed, as a peer may hold the same open file.
    pub fn remove(&self, fd: impl AsFd) {
        let _ = self.epoll.remove(fd);
    }
}

/// A queue of a port, as a source of packets.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Source {
    pub(crate) port: PortId,
    pub(crate) queue: u16,
}

impl Source {
    /// Queue number that stands for [the frames of a port that were put off](crate::plane::forward::slow).
    pub(crate) const SLOW: u16 = u16::MAX;
    /// Queue number that stands for the frames of a port that other workers have handed off to this one.
    pub(crate) const HANDED: u16 = u16::MAX - 1;

    /// The epoll token of the queue's descriptor.
    pub(crate) fn token(self) -> u64 {
        u64::from(self.port.0) << 16 | u64::from(self.queue)
    }

    /// Returns the queue that a token belongs to.
    pub(crate) fn of(token: u64) -> Source {
        Source { port: PortId((token >> 16) as u16), queue: token as u16 }
    }
}

/// One port's queues in one worker: see the head of this file.
///
/// Queues are numbered from 0; queue `q` is a pair of one queue on which the port sends and one on which it
/// receives. A method that is given a queue this worker does not have does nothing.
pub trait Queues: Send + Sized + 'static {
    /// A lease on the buffers of a burst: they stay valid, whatever happens to the queue meanwhile.
    type Loan;
    /// A queue (or one direction of it) that is ready to be served.
    type Start: Send;
    /// The state of a stopped queue that the control side needs, such as its position.
    type Stopped: Send;
    /// A command of the control side for this kind of port, executed between two bursts.
    type Request: Send;
    /// A queue on its way from one worker to another.
    type Detached: Send;
    /// The state of one queue for display.
    type State: Send;

    /// Looks for up to `max` packets that the port has sent on `queue`.
    fn lease(&mut self, queue: u16, max: usize) -> Lease<Self::Loan>;

    /// Puts up to `max` packets of a lease into the empty `burst`, and counts them. Packets that break the rules are dropped with a reason.
    fn frames<'m>(&mut self, queue: u16, loan: &'m Self::Loan, max: usize, burst: &mut Burst<'m>) -> Taken;

    /// Gives the sender its buffers back, now that nothing borrows from them.
    fn complete(&mut self, queue: u16, loan: Self::Loan);

    /// Packets that may lie in `queue` at most and that have to be forwarded before it is disabled or stopped; 0 if none has to be.
    fn backlog(&mut self, queue: u16) -> usize;

    /// Asks the sender to wake us; false if there is work already, or if it has no way to.
    fn arm(&mut self, queue: u16) -> bool;

    /// Returns true if `queue` is empty and has no way to wake us.
    fn is_kickless(&mut self, queue: u16) -> bool;

    /// Handles an event of the descriptor of `queue`: it is readable, or (`hangup`) will never be again.
    /// Returns true if the queue is to be polled.
    fn wake(&mut self, queue: u16, hangup: bool, watch: Watch<'_>) -> bool;

    /// Stops serving `queue` for a while, as its port has sent as much as it may: it is neither polled nor
    /// armed. A descriptor that stays readable, and would keep the worker awake, is not watched meanwhile.
    fn pause(&mut self, queue: u16, watch: Watch<'_>) {
        let _ = (queue, watch);
    }

    /// Polls `queue`, which was paused, again.
    fn resume(&mut self, queue: u16, watch: Watch<'_>) {
        let _ = (queue, watch);
    }

    /// Returns the cost of a frame to the receiver.
    fn frame_cost(&self) -> FrameCost;

    /// Returns true if the receiver takes offloads also of frames with a VLAN tag. Other receivers get such
    /// frames finished.
    #[inline]
    fn offloads_tagged(&self) -> bool {
        true
    }

    /// Announces about how many frames follow until [`Queues::flush`].
    fn expect(&mut self, frames: usize);

    /// Writes a frame of `len` bytes, the concatenation of `first` and `rest`, to the receiver's `queue`. The
    /// receiver takes the offloads that the header asks for.
    ///
    /// # Errors
    /// The frame was dropped, for this reason; the engine counts it.
    fn deliver(
        &mut self,
        queue: u16,
        header: Header,
        first: &[u8],
        rest: &[ReadSlice<'_>],
        len: u64,
    ) -> Result<Delivery, DropReason>;

    /// Writes frames of a burst, those whose indexes are in `picks`, to the receiver's `queue`, in order, for
    /// as long as each takes nothing but a copy into one of its buffers; the receiver takes the offloads that
    /// their headers ask for. The next one is for [`deliver`](Self::deliver), which returns the reason, and
    /// [`Run::end`] says whether another run may begin behind it. A kind of port without such a short way
    /// writes none.
    #[inline]
    fn deliver_run(&mut self, queue: u16, burst: &Burst<'_>, picks: &[u32]) -> Run {
        let _ = (queue, burst, picks);
        Run::NONE
    }

    /// Returns what [`deliver`](Self::deliver) would say now to these frames, each with its header, one after the other; [`Delivery::NotHere`] for all
    /// if this worker does not have the queue. Nothing is written, counted or published. Called between two bursts, for an imaginary frame
    /// (`ringferry ctl trace`).
    fn probe(&mut self, queue: u16, packets: &[(Header, Vec<u8>)]) -> Vec<Result<Delivery, DropReason>>;

    /// Publishes the delivered frames to the receiver and notifies it if it wants to be. Returns how many buffers of the receiver's were taken, or looked at,
    /// beyond what usual drivers have frames take: what they cost is the receiver's own. Above [`MOST_UNUSUAL`] no frame is
    /// [delivered](Self::deliver) before this is called.
    fn flush(&mut self) -> usize;

    /// Starts serving one more queue. Returns its number if packets come from it now.
    fn start(&mut self, start: Self::Start, watch: Watch<'_>) -> Option<u16>;

    /// Stops serving a queue. `index` is the kind's own number, as given to [`start`](Self::start). Returns
    /// what remains of the queue, and its number if packets came from it until now.
    fn stop(&mut self, index: u16, watch: Watch<'_>) -> Option<(Self::Stopped, Option<u16>)>;

    /// Stops watching all descriptors: the port is about to be dropped.
    fn close(&mut self, watch: Watch<'_>);

    /// Executes a command that only this kind of port has.
    fn request(&mut self, request: Self::Request, watch: Watch<'_>);

    /// Gives a queue up for another worker. Senders see no difference.
    fn detach(&mut self, queue: u16, watch: Watch<'_>) -> Option<Self::Detached>;

    /// Starts serving a queue that another worker has given up. Returns true if packets may come from it.
    fn attach(&mut self, queue: u16, detached: Self::Detached, watch: Watch<'_>) -> bool;

    /// Takes the port out of service, because its peer holds up the worker: from now on none of its queues in this worker touches anything of the peer's.
    /// The control plane is told, and ends the connection. A kind of port whose peer cannot hold up anybody does nothing.
    fn take_out_of_service(&mut self, why: &str, watch: Watch<'_>) {
        let _ = (why, watch);
    }

    /// Appends the state of every queue of this worker.
    fn inspect(&mut self, states: &mut Vec<Self::State>);

    /// Returns true if [`Queues::read_direct`] is supported by this port.
    #[inline]
    fn reads_directly(&self) -> bool {
        false
    }

    /// Returns the memory that frames for `queue` are written to, if another port may be read into it
    /// directly.
    fn direct_memory(&mut self, queue: u16) -> Option<Arc<GuestMemory>> {
        let _ = queue;
        None
    }

    /// Appends to `room` the memory of the next frame for `queue`, without its first `prefix` bytes; returns
    /// false if there is no room for one of `most` bytes.
    fn room<'m>(
        &mut self,
        queue: u16,
        translator: &mut Translator<'m>,
        prefix: usize,
        most: usize,
        room: &mut Room<'m>,
    ) -> bool {
        let _ = (queue, translator, prefix, most, room);
        false
    }

    /// Reads the next frame, with its virtual header in front, into the memory of `room`.
    fn read_direct(&mut self, room: &mut [WriteSlice<'_>]) -> DirectRead {
        let _ = room;
        DirectRead::Unsupported
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_a_port_and_a_queue_and_never_the_bell() {
        for (port, queue) in [(0, 0), (1, 0), (0, 1), (7, 15), (u16::MAX, u16::MAX)] {
            let source = Source { port: PortId(port), queue };
            assert_eq!(Source::of(source.token()), source);
            assert_ne!(source.token(), crate::plane::worker::BELL);
        }
    }
}
