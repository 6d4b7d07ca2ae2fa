//! The hand-off rings between workers: frames for queues that another worker owns, and addresses that were learned.
//!
//! [`Handoff::mesh`] makes the ends of all workers before their threads start; each worker owns one [`Handoff`] and is the only one who calls
//! it. From every worker to every other lead two single-producer, single-consumer rings: one with messages, one with the empty buffers
//! that come back. Nothing is locked and, once buffers have their size, nothing allocated. A frame is copied into a buffer here, and from
//! there to its receiver: its sender's memory is given back without waiting for another worker. (A worker that
//! owns a queue of the receiver uses that one, so that frames are handed off only where they must be.)
//!
//! A worker that sleeps is woken by an eventfd, by the handshake of [`sleep`](super::sleep).

use std::sync::Arc;

use ringferry_memory::{ReadSlice, WriteSlice};
use ringferry_packet::ether::Mac;
use ringferry_packet::vnet::Header;
use ringferry_sys::eventfd::EventFd;
use rtrb::{Consumer, Producer, RingBuffer};

use crate::counters::DropReason;
use crate::fdb::PortId;
use crate::plane::handoff::sleep::SleepFlag;
use crate::rules::Vid;

/// Messages under way from one worker to another at most: as many frames as a ring of the usual size holds. Sixteen
/// bursts; a worker that is that far behind would only be given more than it can do.
pub(crate) const DEPTH: usize = 512;

/// A frame that crosses.
#[derive(Debug)]
pub(crate) struct HandoffFrame {
    /// The port that it leaves by.
    pub(crate) port: PortId,
    /// What is left to be done with it; the receiver takes it as it is.
    pub(crate) header: Header,
    /// The frame.
    pub(crate) frame: Vec<u8>,
}

/// What one worker tells another.
#[derive(Debug)]
pub(crate) enum Message {
    /// Deliver this.
    Frame(HandoffFrame),
    /// This address is behind that port, in this VLAN.
    Learn(Vid, Mac, PortId),
}

/// How a worker is woken.
#[derive(Debug)]
pub(crate) struct Doorbell {
    bell: EventFd,
    asleep: SleepFlag,
}

impl Doorbell {
    /// A worker that is awake; `bell` wakes it.
    pub(crate) fn new(bell: EventFd) -> Self {
        Self { bell, asleep: SleepFlag::default() }
    }

    fn wake(&self) {
        if self.asleep.must_wake() {
            let _ = self.bell.signal();
        }
    }
}

/// The way to one other worker.
#[derive(Debug)]
struct Out {
    messages: Producer<Message>,
    /// Buffers that come back.
    empty: Consumer<Vec<u8>>,
    doorbell: Arc<Doorbell>,
    /// Something was put in since the other was last woken.
    dirty: bool,
}

/// The way from one other worker.
#[derive(Debug)]
struct In {
    messages: Consumer<Message>,
    empty: Producer<Vec<u8>>,
}

/// One worker's ends of all ways.
#[derive(Debug)]
pub(crate) struct Handoff {
    me: usize,
    out: Vec<Option<Out>>,
    inn: Vec<Option<In>>,
    doorbell: Arc<Doorbell>,
    /// Buffers that nobody needs now.
    spare: Vec<Vec<u8>>,
    /// Who is asked first for the next message.
    turn: usize,
}

impl Handoff {
    /// The ends of as many workers as there are doorbells.
    pub(crate) fn mesh(doorbells: &[Arc<Doorbell>]) -> Vec<Handoff> {
        let workers = doorbells.len();
        let none = || (0..workers).map(|_| None).collect::<Vec<_>>();
        let mut mesh: Vec<Handoff> = (0..workers)
            .map(|me| Handoff {
                me,
                out: none(),
                inn: (0..workers).map(|_| None).collect(),
                doorbell: Arc::clone(&doorbells[me]),
                spare: Vec::new(),
                turn: 0,
            })
            .collect();
        for from in 0..workers {
            for to in (0..workers).filter(|to| *to != from) {
                let (messages, received) = RingBuffer::new(DEPTH);
                let (returned, empty) = RingBuffer::new(DEPTH);
                let doorbell = Arc::clone(&doorbells[to]);
                mesh[from].out[to] = Some(Out { messages, empty, doorbell, dirty: false });
                mesh[to].inn[from] = Some(In { messages: received, empty: returned });
            }
        }
        mesh
    }

    /// Number of this worker.
    #[inline]
    pub(crate) fn me(&self) -> usize {
        self.me
    }

    /// Messages that wait for this worker at most. Receiving as many leaves none of those that wait now.
    pub(crate) fn most(&self) -> usize {
        self.inn.iter().flatten().count() * DEPTH
    }

    /// Hands a frame to the worker that owns the queue it goes to.
    ///
    /// # Errors
    /// That worker is too far behind.
    pub(crate) fn send(
        &mut self,
        worker: usize,
        port: PortId,
        header: Header,
        first: &[u8],
        rest: &[ReadSlice<'_>],
    ) -> Result<(), DropReason> {
        let Some(out) = self.out.get_mut(worker).and_then(Option::as_mut) else {
            return Err(DropReason::LinkDown);
        };
        if out.messages.is_full() {
            return Err(DropReason::WorkerBusy);
        }
        let buffer = out.empty.pop().ok().or_else(|| self.spare.pop());
        let mut frame = buffer.unwrap_or_default();
        gather(first, rest, &mut frame);
        let sent = out.messages.push(Message::Frame(HandoffFrame { port, header, frame }));
        out.dirty |= sent.is_ok();
        sent.map_err(|_| DropReason::WorkerBusy)
    }

    /// Tells all others where an address is. One who is too far behind floods frames to it until it is told again.
    #[cold]
    pub(crate) fn announce(&mut self, vid: Vid, mac: Mac, port: PortId) {
        for out in self.out.iter_mut().flatten() {
            out.dirty |= out.messages.push(Message::Learn(vid, mac, port)).is_ok();
        }
    }

    /// Wakes everybody who was given something.
    #[inline]
    pub(crate) fn flush(&mut self) {
        for out in self.out.iter_mut().flatten() {
            if std::mem::take(&mut out.dirty) {
                out.doorbell.wake();
            }
        }
    }

    /// The next message of any other worker; they take turns.
    #[inline]
    pub(crate) fn receive(&mut self) -> Option<(usize, Message)> {
        let workers = self.inn.len();
        for _ in 0..workers {
            let from = self.turn;
            self.turn = if from + 1 == workers { 0 } else { from + 1 };
            if let Some(Some(way)) = self.inn.get_mut(from)
                && let Ok(message) = way.messages.pop()
            {
                return Some((from, message));
            }
        }
        None
    }

    /// Returns a buffer to the worker that it came from.
    #[inline]
    pub(crate) fn give_back(&mut self, from: usize, frame: Vec<u8>) {
        if let Some(Some(way)) = self.inn.get_mut(from)
            && let Err(rtrb::PushError::Full(frame)) = way.empty.push(frame)
        {
            self.spare.push(frame);
            self.spare.truncate(DEPTH);
        }
    }

    /// To be called before the worker sleeps, and [`Handoff::awake`] after it: false if it must not, as there is
    /// something to do.
    pub(crate) fn about_to_sleep(&self) -> bool {
        self.doorbell.asleep.about_to_sleep(|| self.inn.iter().flatten().all(|way| way.messages.is_empty()))
    }

    /// The worker has slept.
    pub(crate) fn awake(&self) {
        self.doorbell.asleep.awake();
    }
}

/// Makes one piece of a frame, in `frame`.
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
    use super::*;

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
        handoff.send(1, PortId(3), Header::default(), first, &rest)
    }

    #[test]
    fn frames_arrive_in_order_and_buffers_come_back() {
        let (mut a, mut b) = two();
        for round in 0..3 * DEPTH {
            let frame: Vec<u8> = (0..round % 2000).map(|byte| (byte + round) as u8).collect();
            send(&mut a, &frame).unwrap();
            let (from, Message::Frame(parcel)) = b.receive().unwrap() else { panic!("not a frame") };
            assert_eq!((from, parcel.port, &parcel.frame), (0, PortId(3), &frame));
            b.give_back(from, parcel.frame);
        }
        assert!(b.receive().is_none());
        assert_eq!(a.out[1].as_ref().unwrap().empty.slots(), 1, "one buffer was enough");
    }

    #[test]
    fn a_worker_that_is_behind_costs_frames_and_nothing_else() {
        let (mut a, mut b) = two();
        for _ in 0..DEPTH {
            send(&mut a, &[7; 60]).unwrap();
        }
        assert_eq!(send(&mut a, &[7; 60]), Err(DropReason::WorkerBusy));
        a.announce(0, Mac([2; 6]), PortId(0));
        assert!(b.receive().is_some());
        send(&mut a, &[7; 60]).unwrap();
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
        assert!(!b.doorbell.bell.drain().unwrap(), "it is awake");
        assert!(matches!(b.receive(), Some((0, Message::Learn(0, Mac([2, ..]), PortId(1))))));
    }

    #[test]
    fn who_says_much_does_not_keep_others_waiting() {
        let doorbell = || Arc::new(Doorbell::new(EventFd::new().unwrap()));
        let mut mesh = Handoff::mesh(&[doorbell(), doorbell(), doorbell()]);
        let mut to = mesh.pop().unwrap();
        let learn = Mac([2; 6]);
        for from in &mut mesh {
            from.announce(0, learn, PortId(0));
        }
        assert_eq!(to.most(), 2 * DEPTH);
        for _ in 0..DEPTH {
            mesh[0].announce(0, learn, PortId(0));
        }
        let order: Vec<_> = (0..3).map(|_| to.receive().unwrap().0).collect();
        assert_eq!(order, [0, 1, 0]);
    }
}
