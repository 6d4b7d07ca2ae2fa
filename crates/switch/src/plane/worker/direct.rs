//! A port that is read directly into the buffers of the sole receiver: the kernel's copy is the only one.
//!
//! The kernel says what a frame of a tap is when it has written it somewhere. So this is done only where there is one port that it can
//! be for, as a guest must not see what is for another; and for the same reason neither port has rules: what they keep from the
//! guest would have been in its memory. The virtual header and the first bytes, from which all is decided, are
//! written to memory of ours, and the rest to where one of the guest's queues would put it next. The frame then goes the way of all
//! frames, on which what lies where it is to go is not copied. One that has to be changed on its way, and so might be written over what is
//! still to be read of it, is taken back into memory of ours first.

use ringferry_memory::{ReadSlice, WriteSlice};
use ringferry_packet::frame::{Burst, PREFIX};
use ringferry_packet::vnet::Header;
use ringferry_virtio_net::MAX_FRAME;

use super::holes::Touch;
use super::{BURST, Polled, Worker};
use crate::fdb::PortId;
use crate::plane::forward::{self, Origin};
use crate::plane::now::Now;
use crate::plane::port::Port;
use crate::plane::queues::{DirectRead, MAX_BURST_BYTES, Queues, Room};

/// Mean length of a burst's frames from which on the next burst is read this way. Room for the largest frame is looked up for
/// each, and several small ones may be worth more as one large frame (`offload::gro`), for which they must lie beside each other.
const LARGE: usize = 4096;

/// What became of one look at the port.
enum Read {
    /// A frame of this many bytes, virtual header included, was forwarded as it lay. The next frame is read to this queue of the receiver.
    Frame(usize, u16),
    /// A frame was read that cannot stay where it lay, and was forwarded from a copy; or what was read is no frame, or nothing could be read. The
    /// next burst is read in the usual way.
    Other,
    /// The receiver has no room for the largest frame, or no such queue, or the port cannot be read directly; nothing was read.
    NoRoom,
    /// The port has no frame.
    Nothing,
}

impl<P: Queues> Worker<P> {
    /// Forwards a burst, read directly into the sole receiver's buffers; `None` if nothing was read, as that
    /// is not possible now or would not pay.
    pub(super) fn poll_direct(&mut self, id: PortId) -> Option<Polled> {
        let mut queue = self.port(id)?.direct.take()?;
        let (to, _) = sole_receiver(&mut self.ports, id)?;
        let (mut count, mut bytes) = (0, 0);
        let last = loop {
            let read = self.read_direct(id, to, queue);
            let Read::Frame(len, next) = read else { break read };
            (count, bytes, queue) = (count + 1, bytes + len, next);
            if count == BURST || bytes >= MAX_BURST_BYTES {
                break read;
            }
        };
        // Also buffers that were looked at and not filled go back.
        self.flush(to);
        self.forwarder.holes.touch_nothing();
        if matches!(last, Read::Frame(..) | Read::Nothing) && bytes >= count * LARGE {
            self.port(id)?.direct = Some(queue);
        }
        match last {
            Read::NoRoom if count == 0 => None,
            Read::Nothing => Some(Polled { moved: count > 0, exhausted: true }),
            _ => Some(Polled { moved: true, exhausted: false }),
        }
    }

    /// Notes whether to read the next burst of a port directly, now that this one has been forwarded.
    pub(super) fn consider_direct(&mut self, id: PortId, burst: &Burst<'_>, now: &Now) {
        if burst.bytes() < (burst.len() * LARGE) as u64 {
            return;
        }
        let queue = self.direct_queue(id, burst, now);
        if let Some(port) = self.port(id) {
            port.direct = queue;
        }
    }

    /// The queue that the last of a burst is for, if all of it goes to the sole receiver as it is.
    fn direct_queue(&mut self, id: PortId, burst: &Burst<'_>, now: &Now) -> Option<u16> {
        let (_, to) = sole_receiver(&mut self.ports, id)?;
        to.selector()?.refresh(&self.handoff);
        let offloads = to.offloads();
        let as_it_is = burst.frames().iter().all(|frame| offloads.accepts(&frame.header));
        let last = burst.frames().last().filter(|_| as_it_is)?;
        let queue = to.selector()?.select(last.prefix(), now).ok()?;
        to.queues.direct_memory(queue).map(|_| queue)
    }

    /// Reads a frame to where the receiver's `queue` would put it, and forwards it.
    fn read_direct(&mut self, id: PortId, to: PortId, queue: u16) -> Read {
        self.forwarder.holes.touch(Touch::of(to));
        let Some(receiver) = self.port(to) else { return Read::NoRoom };
        // Keeps the memory mapped while the frame borrows it, whatever happens to the queue.
        let Some(memory) = receiver.queues.direct_memory(queue) else { return Read::NoRoom };
        let mut head = [0; Header::LEN + PREFIX];
        let mut room = Room::new();
        room.push(WriteSlice::from(&mut head[..]));
        if !receiver.queues.room(queue, &mut memory.translator(), PREFIX, MAX_FRAME, &mut room) {
            return Read::NoRoom;
        }
        let Some(port) = self.port(id) else { return Read::NoRoom };
        let (header, len) = match port.queues.read_direct(&mut room) {
            DirectRead::Frame(header, len) => (header, len),
            DirectRead::Nothing => return Read::Nothing,
            DirectRead::Failed => return Read::Other,
            DirectRead::Unsupported => return Read::NoRoom,
        };
        port.handle.counters.rx_in_place.add(1);
        let mut pieces = room.iter().map(WriteSlice::as_read);
        let head = pieces.next().unwrap_or(ReadSlice::EMPTY).skip(Header::LEN);
        let mut left = len;
        let mut burst = Burst::reuse(std::mem::take(&mut self.storage));
        let mut frame = burst.build(header, left as u32);
        for piece in std::iter::once(head).chain(pieces) {
            let piece = piece.first(left);
            left -= piece.len();
            frame.piece(piece);
        }
        frame.finish();
        let now = Now::new(self.clock, self.seconds);
        let queue = self.direct_queue(id, &burst, &now);
        if queue.is_some() {
            self.forward(Origin { port: id, private: false, queue: None }, &burst, &now);
        } else {
            let copy = [forward::copy(&burst, &burst.frames()[0])];
            self.forward(Origin { port: id, private: true, queue: None }, &forward::burst_of(&copy), &now);
        }
        self.storage = Burst::reuse(burst);
        queue.map_or(Read::Other, |queue| Read::Frame(Header::LEN + len, queue))
    }
}

/// The only port that what comes from `from` can be for, if its buffers may be written to directly and neither of the two has rules.
fn sole_receiver<P: Queues>(ports: &mut [Option<Port<P>>], from: PortId) -> Option<(PortId, &mut Port<P>)> {
    let mut sole = None;
    for (id, port) in (0u16..).zip(ports).filter_map(|(id, port)| Some((PortId(id), port.as_mut()?))) {
        if port.policy.is_some() || port.link_down || id != from && sole.is_some() {
            return None;
        }
        if id != from {
            sole = Some((id, port));
        }
    }
    sole
}
