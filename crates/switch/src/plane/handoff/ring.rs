//! The hand-off rings between workers: frames for queues that another worker owns, and addresses that were
//! learned.
//!
//! [`Handoff::mesh`] makes the ends of all workers before their threads start; each worker owns one
//! [`Handoff`], which only its thread calls. From every worker to every other lead three single-producer,
//! single-consumer rings: frames, addresses that were learned (news), and the empty buffers that come back.
//! Nothing is locked and, once buffers have their size, nothing allocated, unless more than [`BYTES`] are under way to several workers. A frame is copied into a buffer
//! here, and from there to its receiver: its sender's memory is given back without waiting for another
//! worker. (A worker that owns a queue of the receiver uses that one, so that frames are handed off only
//! where they must be.)
//!
//! **Shares.** The places are shared out between the ports that send, by dynamic thresholds (Choudhury and
//! Hahne, 1998): a port may have [`SHARE`] times as many frames under way as places are free. One port that
//! floods thus leaves a third of the places to others, which have less under way and therefore find room, and
//! a port that is alone has two thirds. An eighth of the places is left to ports that have next to nothing
//! under way, however many flood. A frame is under way until its buffer has come back. News have a ring of
//! their own, so that a guest that makes up addresses takes no place from a frame.
//!
//! **Bytes** are shared out as places are ([`BYTES`]): a frame of 64 KiB is the work of a hundred small ones, and a ring full of them fits into no cache. Who has
//! its share of them under way waits, as for places. Frames are dropped for them where twice as much is under way: when the other worker does not come back, and of what
//! does not wait here, copies of a flood and frames that were put off, or when many ports begin with frames of 64 KiB at once.
//!
//! **Back-pressure.** A worker that does not run for some milliseconds, as the machine has more to do than processors, is soon a whole ring behind. Whoever
//! has its share under way is not asked for more until something comes back ([`Handoff::room`]), so its frames wait in its own ring, where there is
//! room for them, and are not lost. That lasts for [`PATIENCE`]: who sends to several workers is not to wait longer for one of them.
//!
//! A worker that sleeps is woken by an eventfd, by the handshake of [`sleep`](super::sleep).

use std::sync::Arc;

use ringferry_memory::{ReadSlice, WriteSlice};
use ringferry_packet::ether::Mac;
use ringferry_packet::vnet::Header;

use crate::counters::DropReason;
use crate::fdb::PortId;
use crate::plane::handoff::primitives::{Bell, Pop, Primitives, Push, Std};
use crate::plane::handoff::sleep::SleepFlag;
use crate::plane::now::Now;
use crate::rules::Vid;

/// Upper bound on the frames under way from one worker to another; a port that is alone has up to 448, nearly
/// as many as a ring of the usual size holds. A worker that is sixteen bursts behind would only be given more
/// than it can do.
pub(crate) const DEPTH: usize = 768;

/// Frames that a port may have under way, as a multiple of the number of free places. With 1 a port that is
/// alone would have half of the places; with 8 one that floods would leave a ninth to all others.
const SHARE: usize = 2;

/// Places that only ports with less than [`LITTLE`] under way may take, as a part of all.
const RESERVED: usize = 8;

/// Frames under way that a port may have as long as there is any place.
const LITTLE: usize = 8;

/// Bytes under way from one worker to another beyond which ports wait: a millisecond of copying where memory is slow. With 48 MiB, all that the places take, five
/// ports of 64 KiB frames kept a sixth waiting for three times as long.
const BYTES: usize = 4 << 20;

/// Bytes under way that a port may have as long as there is any place: a frame of the largest.
const LITTLE_BYTES: usize = 64 << 10;

/// How long ports that have their share under way to a worker wait for it, in microseconds, if nothing comes back: as long as two or three others have a
/// processor on a machine that has more to do. A worker that sleeps in a hole of a guest's memory may not come back for seconds.
pub(crate) const PATIENCE: u64 = 10_000;

/// Upper bound on the news under way from one worker to another.
const NEWS_DEPTH: usize = 512;

/// A frame that is handed off to another worker.
#[derive(Debug)]
pub(crate) struct HandoffFrame {
    /// The port that sent the frame, which is charged for its delivery.
    pub(crate) from: PortId,
    /// The port that the frame leaves by.
    pub(crate) port: PortId,
    /// The offloads still to be done; the receiver took such frames when it was handed off.
    pub(crate) header: Header,
    /// The bytes of the frame, without the virtual header.
    pub(crate) frame: Vec<u8>,
}

/// An address that another worker has learned: it is behind that port, in this VLAN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct News(pub(crate) Vid, pub(crate) Mac, pub(crate) PortId);

/// The doorbell of a worker: its sleep flag, and the event that wakes it.
#[derive(Debug)]
pub(crate) struct Doorbell<M: Primitives = Std> {
    bell: M::Bell,
    asleep: SleepFlag<M::Flag>,
}

impl<M: Primitives> Doorbell<M> {
    /// Makes the doorbell of a worker that is awake; `bell` wakes it.
    pub(crate) fn new(bell: M::Bell) -> Self {
        Self { bell, asleep: SleepFlag::default() }
    }

    fn wake(&self) {
        if self.asleep.must_wake() {
            self.bell.ring();
        }
    }

    /// Returns the event that wakes the worker.
    #[cfg(test)]
    pub(crate) fn bell(&self) -> &M::Bell {
        &self.bell
    }
}

/// Frames that are under way.
#[derive(Clone, Copy, Debug, Default)]
struct UnderWay {
    frames: u32,
    bytes: u32,
}

impl UnderWay {
    #[inline]
    fn add(&mut self, len: usize) {
        self.frames += 1;
        self.bytes += len as u32;
    }

    #[inline]
    fn take(&mut self, len: usize) {
        self.frames -= 1;
        self.bytes -= len as u32;
    }
}

/// What a port sends to another worker.
#[derive(Clone, Copy, Debug)]
struct Flow {
    under_way: UnderWay,
    /// Length of the largest frame of the last dozens, as which those of the next burst are taken to be.
    largest: u32,
}

impl Flow {
    /// Of a port that has sent nothing: neither frames of the largest are expected nor small ones.
    const NEW: Flow = Flow { under_way: UnderWay { frames: 0, bytes: 0 }, largest: 16 << 10 };

    #[inline]
    fn add(&mut self, len: usize) {
        self.under_way.add(len);
        self.largest = (len as u32).max(self.largest - self.largest / 64);
    }
}

/// Empty buffers that are not in use, of [`BYTES`] together and one more at most. What comes back beyond that, from several workers, is given to the allocator.
#[derive(Debug, Default)]
struct Spare {
    buffers: Vec<Vec<u8>>,
    bytes: usize,
}

impl Spare {
    #[inline]
    fn put(&mut self, buffer: Vec<u8>) {
        if self.bytes < BYTES {
            self.bytes += buffer.capacity();
            self.buffers.push(buffer);
        }
    }

    #[inline]
    fn take(&mut self) -> Option<Vec<u8>> {
        let buffer = self.buffers.pop()?;
        self.bytes -= buffer.capacity();
        Some(buffer)
    }
}

/// The rings to one other worker.
#[derive(Debug)]
struct Out<M: Primitives> {
    frames: M::Producer<HandoffFrame>,
    news: M::Producer<News>,
    /// Buffers that come back, with the ports whose frames they held.
    empty: M::Consumer<(PortId, Vec<u8>)>,
    doorbell: Arc<Doorbell<M>>,
    /// True if something was put in since the other worker was last woken.
    dirty: bool,
    /// What is under way, of all ports together and of each port.
    under_way: UnderWay,
    of_port: Vec<Flow>,
    /// Since when nothing has come back although some port has waited for it, in microseconds.
    silent_since: Option<u64>,
}

impl<M: Primitives> Out<M> {
    #[inline]
    fn flow(&self, port: PortId) -> Flow {
        self.of_port.get(usize::from(port.0)).copied().unwrap_or(Flow::NEW)
    }

    /// Places that are free for ports that have more than [`LITTLE`] under way.
    #[inline]
    fn free(&self) -> usize {
        (M::DEPTH - M::DEPTH / RESERVED).saturating_sub(self.under_way.frames as usize)
    }

    /// Returns true if `port` has its share of places under way, or of bytes far more than anybody is let have while the other worker comes back.
    #[inline]
    fn is_full_for(&self, port: PortId) -> bool {
        let own = self.flow(port).under_way;
        let frames = own.frames as usize;
        frames >= SHARE * self.free() && (frames >= LITTLE || self.under_way.frames as usize >= M::DEPTH)
            || self.under_way.bytes as usize >= 2 * BYTES && own.bytes as usize >= LITTLE_BYTES
    }

    /// Returns how many more frames `port` may have under way, up to `max`, if all of them are sent at once.
    #[inline]
    fn room(&self, port: PortId, max: usize) -> usize {
        let flow = self.flow(port);
        let frames = flow.under_way.frames as usize;
        let share = (SHARE * self.free()).saturating_sub(frames) / (SHARE + 1);
        let left = M::DEPTH.saturating_sub(self.under_way.frames as usize);
        let places = share.max(LITTLE.saturating_sub(frames).min(left));
        max.min(places).min(self.fitting(flow, max))
    }

    /// Returns how many frames, up to `max`, as large as the largest of late, fit into the share of bytes of a port; of one that has nothing under way [`LITTLE`] always do.
    #[inline]
    fn fitting(&self, Flow { under_way, largest }: Flow, max: usize) -> usize {
        let (bytes, largest) = (under_way.bytes as usize, largest as usize);
        let free = BYTES.saturating_sub(self.under_way.bytes as usize);
        let share = (SHARE * free).saturating_sub(bytes) / (SHARE + 1);
        let left = share.max(LITTLE_BYTES.saturating_sub(bytes));
        // Hardly ever is there need to divide.
        if left >= max * largest {
            return max;
        }
        left.div_ceil(largest).max(if bytes == 0 { LITTLE } else { 0 })
    }

    /// Takes back the buffers that have returned.
    fn reclaim(&mut self, spare: &mut Spare) {
        while let Some((port, buffer)) = self.empty.pop() {
            self.silent_since = None;
            self.under_way.take(buffer.len());
            self.of_port[usize::from(port.0)].under_way.take(buffer.len());
            spare.put(buffer);
        }
    }

    /// Returns how many frames, up to `max`, may be taken from a port that has about its share under way.
    #[cold]
    fn wait_for(&mut self, port: PortId, max: usize, spare: &mut Spare, now: &Now) -> usize {
        self.reclaim(spare);
        match self.room(port, max) {
            0 => {
                let micros = now.micros();
                let silent = micros.saturating_sub(*self.silent_since.get_or_insert(micros));
                if silent < PATIENCE { 0 } else { max }
            }
            room => room,
        }
    }

    fn count(&mut self, port: PortId, len: usize) {
        let at = usize::from(port.0);
        if self.of_port.len() <= at {
            self.of_port.resize(at + 1, Flow::NEW);
        }
        self.of_port[at].add(len);
        self.under_way.add(len);
    }
}

/// The rings from one other worker.
#[derive(Debug)]
struct In<M: Primitives> {
    frames: M::Consumer<HandoffFrame>,
    news: M::Consumer<News>,
    empty: M::Producer<(PortId, Vec<u8>)>,
}

/// One worker's ends of all rings.
#[derive(Debug)]
pub(crate) struct Handoff<M: Primitives = Std> {
    me: usize,
    out: Vec<Option<Out<M>>>,
    inn: Vec<Option<In<M>>>,
    doorbell: Arc<Doorbell<M>>,
    spare: Spare,
    /// The worker whose rings are polled first for the next message.
    turn: usize,
    /// Workers are woken later.
    wakes_wait: bool,
}

/// The rings of a worker to each other one, with the messages that a test holds up on their way.
#[cfg(any(test, feature = "testing"))]
pub(crate) struct HeldUp<M: Primitives = Std>(Vec<Option<Diverted<M>>>);

/// The producer of the real ring, and the consumer of the ring that takes its place meanwhile.
#[cfg(any(test, feature = "testing"))]
type Diverted<M> = (<M as Primitives>::Producer<HandoffFrame>, <M as Primitives>::Consumer<HandoffFrame>);

impl<M: Primitives> Handoff<M> {
    /// Makes the ends of as many workers as there are doorbells.
    pub(crate) fn mesh(doorbells: &[Arc<Doorbell<M>>]) -> Vec<Self> {
        let workers = doorbells.len();
        let none = || (0..workers).map(|_| None).collect::<Vec<_>>();
        let mut mesh: Vec<Self> = (0..workers)
            .map(|me| Handoff {
                me,
                out: none(),
                inn: (0..workers).map(|_| None).collect(),
                doorbell: Arc::clone(&doorbells[me]),
                spare: Spare::default(),
                turn: 0,
                wakes_wait: false,
            })
            .collect();
        for from in 0..workers {
            for to in (0..workers).filter(|to| *to != from) {
                let (frames, received) = M::ring(M::DEPTH);
                let (news, heard) = M::ring(NEWS_DEPTH);
                let (returned, empty) = M::ring(M::DEPTH);
                let doorbell = Arc::clone(&doorbells[to]);
                mesh[from].out[to] = Some(Out {
                    frames,
                    news,
                    empty,
                    doorbell,
                    dirty: false,
                    under_way: UnderWay::default(),
                    of_port: Vec::new(),
                    silent_since: None,
                });
                mesh[to].inn[from] = Some(In { frames: received, news: heard, empty: returned });
            }
        }
        mesh
    }

    /// Returns the index of this worker.
    #[inline]
    pub(crate) fn me(&self) -> usize {
        self.me
    }

    /// Hands a frame that port `from` has sent to the worker that owns the queue it goes to.
    ///
    /// # Errors
    /// That worker is too far behind, or the port has its share under way.
    pub(crate) fn send(
        &mut self,
        worker: usize,
        from: PortId,
        port: PortId,
        header: Header,
        first: &[u8],
        rest: &[ReadSlice<'_>],
    ) -> Result<(), DropReason> {
        let Some(out) = self.out.get_mut(worker).and_then(Option::as_mut) else {
            return Err(DropReason::LinkDown);
        };
        if self.spare.buffers.is_empty() || out.is_full_for(from) {
            out.reclaim(&mut self.spare);
            if out.is_full_for(from) {
                return Err(DropReason::WorkerBusy);
            }
        }
        let mut frame = self.spare.take().unwrap_or_default();
        gather(first, rest, &mut frame);
        let len = frame.len();
        if out.frames.push(HandoffFrame { from, port, header, frame }).is_err() {
            return Err(DropReason::WorkerBusy);
        }
        out.count(from, len);
        out.dirty = true;
        Ok(())
    }

    /// Returns how many frames may be taken from a port, up to `max`, wherever they go; 0 if it has its share under way to a worker that has given nothing
    /// back for less than [`PATIENCE`].
    #[inline]
    pub(crate) fn room(&mut self, from: PortId, max: usize, now: &Now) -> usize {
        let Self { out, spare, .. } = self;
        let tight = out.iter_mut().flatten().filter(|out| out.room(from, max) < max);
        tight.fold(max, |room, out| room.min(out.wait_for(from, max, spare, now)))
    }

    /// Returns whether [`send`](Self::send) would refuse a frame of `from`.
    pub(crate) fn is_held_up(&self, worker: usize, from: PortId) -> bool {
        // Places whose buffers have come back are free, or will be when the next frame asks.
        let is_full = |out: &Out<M>| out.is_full_for(from) && out.empty.is_empty();
        self.out.get(worker).and_then(Option::as_ref).is_some_and(is_full)
    }

    /// Returns true if there is no other worker.
    pub(crate) fn is_alone(&self) -> bool {
        self.out.iter().flatten().next().is_none()
    }

    /// Announces to all other workers where an address is. Returns false, and tells nobody, if one of them is too far behind to be told: those who know
    /// of a move and those who do not would send to different ports for as long as the address is not announced again.
    #[cold]
    pub(crate) fn announce(&mut self, vid: Vid, mac: Mac, port: PortId) -> bool {
        if self.out.iter().flatten().any(|out| out.news.is_full()) {
            return false;
        }
        for out in self.out.iter_mut().flatten() {
            // Nobody else puts anything in, so there is room still.
            out.dirty |= out.news.push(News(vid, mac, port)).is_ok();
        }
        true
    }

    /// Has [`flush`](Self::flush) wake nobody, until this is taken back; whoever was given something meanwhile is woken then.
    pub(crate) fn let_wakes_wait(&mut self, wait: bool) {
        self.wakes_wait = wait;
        self.flush();
    }

    /// Wakes the workers that were given something and sleep.
    #[inline]
    pub(crate) fn flush(&mut self) {
        if self.wakes_wait {
            return;
        }
        for out in self.out.iter_mut().flatten() {
            if std::mem::take(&mut out.dirty) {
                out.doorbell.wake();
            }
        }
    }

    /// Wakes all other workers that sleep.
    pub(crate) fn wake_all(&self) {
        self.out.iter().flatten().for_each(|out| out.doorbell.wake());
    }

    /// Takes the next frame handed off to this worker, with the index of its sender; the senders take turns.
    #[inline]
    pub(crate) fn receive(&mut self) -> Option<(usize, HandoffFrame)> {
        self.next(|way| way.frames.pop())
    }

    /// Takes the next address that another worker has announced; the workers take turns.
    #[inline]
    pub(crate) fn hear(&mut self) -> Option<News> {
        Some(self.next(|way| way.news.pop())?.1)
    }

    #[inline]
    fn next<T>(&mut self, mut pop: impl FnMut(&mut In<M>) -> Option<T>) -> Option<(usize, T)> {
        let workers = self.inn.len();
        for _ in 0..workers {
            let from = self.turn;
            self.turn = if from + 1 == workers { 0 } else { from + 1 };
            if let Some(Some(way)) = self.inn.get_mut(from)
                && let Some(popped) = pop(way)
            {
                return Some((from, popped));
            }
        }
        None
    }

    /// Returns the buffer of a frame of `port` to the worker that it came from.
    #[inline]
    pub(crate) fn give_back(&mut self, from: usize, port: PortId, frame: Vec<u8>) {
        if let Some(Some(way)) = self.inn.get_mut(from) {
            // The ring has a place for every buffer that can be under way.
            let _ = way.empty.push((port, frame));
        }
    }

    /// Holds up what this worker sends until [`Handoff::let_pass`]: a test can let other workers go on
    /// between this worker's look at a queue's owner and the push that follows from it.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn hold_up(&mut self) -> HeldUp<M> {
        let divert = |out: &mut Out<M>| {
            let (frames, held) = M::ring(M::DEPTH);
            (std::mem::replace(&mut out.frames, frames), held)
        };
        HeldUp(self.out.iter_mut().map(|out| out.as_mut().map(divert)).collect())
    }

    /// Lets the messages that were held up arrive, in order, and wakes workers that sleep.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn let_pass(&mut self, HeldUp(held): HeldUp<M>) {
        for (out, (frames, mut held)) in self.out.iter_mut().flatten().zip(held.into_iter().flatten()) {
            out.frames = frames;
            while let Some(frame) = held.pop() {
                out.frames.push(frame).expect("there is a place for each frame under way");
                out.dirty = true;
            }
        }
        self.flush();
    }

    /// Announces that the worker is about to sleep; [`Handoff::awake`] ends the sleep. Returns false if it
    /// must not sleep, as there is something to do.
    pub(crate) fn about_to_sleep(&self) -> bool {
        self.doorbell.asleep.about_to_sleep(|| {
            self.inn.iter().flatten().all(|way| way.frames.is_empty() && way.news.is_empty())
        })
    }

    /// Returns the frames under way to another worker, after all returned buffers were taken back.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn under_way(&mut self, worker: usize) -> usize {
        let out = self.out[worker].as_mut().expect("another worker");
        out.reclaim(&mut self.spare);
        out.under_way.frames as usize
    }

    /// Records that the worker is awake again.
    pub(crate) fn awake(&self) {
        self.doorbell.asleep.awake();
    }
}

/// Copies the pieces of a frame into `frame`.
pub(crate) fn gather(first: &[u8], rest: &[ReadSlice<'_>], frame: &mut Vec<u8>) {
    frame.clear();
    frame.extend_from_slice(first);
    frame.resize(first.len() + rest.iter().map(ReadSlice::len).sum::<usize>(), 0);
    let mut to = WriteSlice::from(&mut frame[first.len()..]);
    for piece in rest {
        to = to.skip(piece.copy_to_slice(&to));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use ringferry_sys::eventfd::EventFd;

    use super::*;
    use crate::plane::now::Clock;

    fn two() -> (Handoff, Handoff) {
        let doorbell = || Arc::new(Doorbell::new(EventFd::new().unwrap()));
        let mut mesh = Handoff::mesh(&[doorbell(), doorbell()]);
        let second = mesh.pop().unwrap();
        (mesh.pop().unwrap(), second)
    }

    fn send(handoff: &mut Handoff, frame: &[u8]) -> Result<(), DropReason> {
        let (first, rest) = frame.split_at(frame.len() / 3);
        let (some, more) = rest.split_at(rest.len() / 2);
        let rest = [ReadSlice::from(some), ReadSlice::from(more)];
        handoff.send(1, PortId(9), PortId(3), Header::default(), first, &rest)
    }

    #[test]
    fn frames_arrive_in_order_and_buffers_come_back() {
        let (mut a, mut b) = two();
        for round in 0..3 * DEPTH {
            let frame: Vec<u8> = (0..round % 2000).map(|byte| (byte + round) as u8).collect();
            send(&mut a, &frame).unwrap();
            let (from, handed) = b.receive().unwrap();
            assert_eq!((from, handed.from, handed.port), (0, PortId(9), PortId(3)));
            assert_eq!(handed.frame, frame);
            b.give_back(from, handed.from, handed.frame);
        }
        assert!(b.receive().is_none());
        let out = a.out[1].as_ref().unwrap();
        assert_eq!((out.empty.slots(), out.under_way.frames), (1, 1), "one buffer was enough");
    }

    #[test]
    fn a_worker_that_is_behind_costs_frames_and_nothing_else() {
        let (mut a, mut b) = two();
        let sent = (0..DEPTH).take_while(|_| send(&mut a, &[7; 60]).is_ok()).count();
        assert_eq!(sent, 448, "all that a port may have");
        assert_eq!(send(&mut a, &[7; 60]), Err(DropReason::WorkerBusy));
        assert!(a.announce(0, Mac([2; 6]), PortId(0)));
        for _ in 0..2 {
            let (from, handed) = b.receive().unwrap();
            b.give_back(from, handed.from, handed.frame);
        }
        send(&mut a, &[7; 60]).unwrap();
    }

    /// M5: places used to be given to the first comer.
    #[test]
    fn m5_a_port_that_floods_leaves_places_to_others() {
        let (mut a, mut b) = two();
        let flood = |a: &mut Handoff, port| {
            let mut send = || a.send(1, PortId(port), PortId(3), Header::default(), &[7; 60], &[]).is_ok();
            (0..DEPTH).take_while(|_| send()).count()
        };
        let first = flood(&mut a, 0);
        let second = flood(&mut a, 1);
        assert!(first == 448 && second >= 128, "{first} {second}");
        // However many ports flood, a burst of one more finds room.
        (2..8).for_each(|port| {
            flood(&mut a, port);
        });
        assert!(flood(&mut a, 8) >= LITTLE);
        // Delivered frames make room for ports that have few under way.
        for _ in 0..300 {
            let (from, handed) = b.receive().unwrap();
            b.give_back(from, handed.from, handed.frame);
        }
        assert!(flood(&mut a, 9) >= 128);
    }

    fn at(micros: u64) -> Now {
        static START: AtomicU64 = AtomicU64::new(0);
        Now::new(Clock::Scripted(&START), 0).after(micros)
    }

    /// Asks for room for a burst, and sends as many frames of `len` bytes; how many that were.
    fn burst(handoff: &mut Handoff, port: u16, len: usize, micros: u64) -> usize {
        let room = handoff.room(PortId(port), 32, &at(micros));
        let frame = vec![7; len];
        for _ in 0..room {
            handoff.send(1, PortId(port), PortId(3), Header::default(), &frame, &[]).unwrap();
        }
        room
    }

    /// M5 with frames of 64 KiB: places for 48 MiB used to be shared out, and kept.
    #[test]
    fn m5_ports_wait_once_so_many_bytes_are_under_way() {
        const LARGE: usize = 65_000;
        let (mut a, mut b) = two();
        for port in 0..5 {
            while burst(&mut a, port, LARGE, 0) > 0 {}
        }
        let bytes = |a: &Handoff| a.out[1].as_ref().unwrap().under_way.bytes as usize;
        assert!((BYTES / 2..2 * BYTES).contains(&bytes(&a)), "{}", bytes(&a));
        // Whoever has nothing under way finds room for small frames, and for one of the largest.
        assert!((0..8).map(|_| burst(&mut a, 5, 60, 0)).sum::<usize>() >= 32);
        assert!(burst(&mut a, 6, LARGE, 0) > 0);
        // A worker that gives nothing back for long is sent more, up to a bound; beyond it frames are dropped, but for those who have little under way.
        let late = PATIENCE + 1;
        assert_eq!(a.room(PortId(0), 32, &at(late)), 32);
        let send = |a: &mut Handoff, port, len: usize| {
            (0..32)
                .take_while(|_| {
                    a.send(1, PortId(port), PortId(3), Header::default(), &vec![7; len], &[]).is_ok()
                })
                .count()
        };
        for _ in 0..10 {
            send(&mut a, 0, LARGE);
        }
        assert!(bytes(&a) < 2 * BYTES + LARGE, "{}", bytes(&a));
        assert_eq!(send(&mut a, 7, 60), 32);
        // What has come back is kept for the next frames, within the bound.
        while let Some((from, handed)) = b.receive() {
            b.give_back(from, handed.from, handed.frame);
        }
        assert!(burst(&mut a, 0, LARGE, late) > 0);
        assert!(a.spare.bytes < BYTES + 2 * LARGE, "{}", a.spare.bytes);
        let capacity: usize = a.spare.buffers.iter().map(Vec::capacity).sum();
        assert_eq!(capacity, a.spare.bytes);
    }

    #[test]
    fn m5_news_take_no_place_from_frames() {
        let (mut a, mut b) = two();
        let told = (0..DEPTH).take_while(|_| a.announce(0, Mac([2; 6]), PortId(0))).count();
        assert_eq!(told, NEWS_DEPTH);
        assert!(!a.announce(0, Mac([2; 6]), PortId(0)), "the caller knows who was not told");
        let sent = (0..DEPTH).take_while(|_| send(&mut a, &[7; 60]).is_ok()).count();
        assert_eq!(sent, 448, "as many as if nothing was announced");
        assert!(b.receive().is_some());
    }

    #[test]
    fn who_sleeps_is_woken_and_who_has_work_does_not_sleep() {
        let (mut a, mut b) = two();
        assert!(b.about_to_sleep());
        send(&mut a, &[1; 60]).unwrap();
        a.flush();
        assert!(b.doorbell.bell.drain().unwrap());
        b.awake();
        assert!(!b.about_to_sleep(), "there is a frame");
        assert!(b.receive().is_some());
        a.announce(0, Mac([2; 6]), PortId(1));
        a.flush();
        assert!(!b.doorbell.bell.drain().unwrap(), "it has not slept");
        assert_eq!(b.hear(), Some(News(0, Mac([2; 6]), PortId(1))));
        assert!(b.about_to_sleep());
        b.awake();
        send(&mut a, &[1; 60]).unwrap();
        a.flush();
        assert!(!b.doorbell.bell.drain().unwrap(), "it is awake");
        assert!(b.receive().is_some() && b.about_to_sleep());
        a.announce(0, Mac([2; 6]), PortId(1));
        a.flush();
        assert!(b.doorbell.bell.drain().unwrap());
        b.awake();
        assert!(!b.about_to_sleep(), "there is news");
    }

    #[test]
    fn who_says_much_does_not_keep_others_waiting() {
        let doorbell = || Arc::new(Doorbell::new(EventFd::new().unwrap()));
        let mut mesh = Handoff::mesh(&[doorbell(), doorbell(), doorbell()]);
        let mut to = mesh.pop().unwrap();
        let learn = Mac([2; 6]);
        for from in &mut mesh {
            assert!(from.announce(0, learn, PortId(0)));
        }
        for _ in 0..DEPTH {
            mesh[0].announce(0, learn, PortId(0));
        }
        let mut order = Vec::new();
        for _ in 0..3 {
            order.push(to.next(|way: &mut In<Std>| way.news.pop().ok()).unwrap().0);
        }
        assert_eq!(order, [0, 1, 0]);
    }
}
