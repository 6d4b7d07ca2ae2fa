//! From a tap straight into the buffers of a virtual machine: the kernel's copy is the only one.
//!
//! The kernel says what a frame is when it has written it somewhere. So this is done only where there is one port that it can
//! be for, as a machine must not see what is for another; and for the same reason neither port has rules: what they keep from the
//! machine would have been in its memory. The virtual header and the first bytes, from which all is decided, are
//! written to memory of ours, and the rest to where one of the machine's queues would put it next. The frame then goes the way of all
//! frames, on which what lies where it is to go is not copied. One that has to be changed on its way, and so might be written over what is
//! still to be read of it, is taken back into memory of ours first.

use std::io;
use std::sync::Arc;

use ringferry_memory::{ReadSlice, WriteSlice};
use ringferry_packet::frame::{Burst, PREFIX};
use ringferry_packet::vnet::Header;
use ringferry_virtio_net::MAX_FRAME;
use smallvec::SmallVec;

use super::{BURST, Polled, Worker, guest, tap_port};
use crate::fdb::PortId;
use crate::plane::forward::{self, Origin};
use crate::plane::guest::Guest;
use crate::plane::moment::Moment;
use crate::plane::port::{Kind, Port};
use crate::plane::tap::{self, BURST_BYTES, MAX_PIECES};

/// Mean length of a burst's frames from which on the next burst is read this way. Room for the largest frame is looked up for
/// each, and several small ones may be worth more as one large frame (`coalesce`), for which they must lie beside each other.
const LARGE: usize = 4096;

/// Pieces that need no list on the heap: the largest frame in buffers of 1536 bytes, which Linux's are at least.
const FEW_PIECES: usize = 64;

/// What became of one look at the tap.
enum Read {
    /// A frame with so many bytes was forwarded, to this pair, and more of its kind may be waiting.
    Frame(usize, u16),
    /// One was, or got lost, that had better been read otherwise.
    Other,
    /// No room for the largest frame: the tap was not asked.
    NoRoom,
    /// The tap has none.
    Nothing,
}

impl Worker {
    /// Forwards a burst of what the host sent, read straight into the only receiver's buffers; `None` if nothing was read, as that
    /// is not possible now or would not pay.
    pub(super) fn poll_straight(&mut self, port: PortId) -> Option<Polled> {
        let mut pair = tap_port(&mut self.ports, port)?.0.straight.take()?;
        let (to, _) = sole_receiver(&mut self.ports, port)?;
        let (mut count, mut bytes) = (0, 0);
        let last = loop {
            let read = self.read_straight(port, to, pair);
            let Read::Frame(len, next) = read else { break read };
            (count, bytes, pair) = (count + 1, bytes + len, next);
            if count == BURST || bytes >= BURST_BYTES {
                break read;
            }
        };
        // Also buffers that were looked at and not filled go back.
        self.show(to);
        if matches!(last, Read::Frame(..) | Read::Nothing) && bytes >= count * LARGE {
            tap_port(&mut self.ports, port)?.0.straight = Some(pair);
        }
        match last {
            Read::NoRoom if count == 0 => None,
            Read::Nothing => Some(Polled { moved: count > 0, exhausted: true }),
            _ => Some(Polled { moved: true, exhausted: false }),
        }
    }

    /// Remembers whether to read the next burst straight, now that this one has been forwarded.
    pub(super) fn consider_straight(&mut self, port: PortId, burst: &Burst<'_>, now: &Moment) {
        let bytes: usize = burst.frames().iter().map(|frame| frame.len as usize).sum();
        if bytes < burst.len() * LARGE {
            return;
        }
        let pair = self.straight_pair(port, burst, now);
        if let Some((tap, _)) = tap_port(&mut self.ports, port) {
            tap.straight = pair;
        }
    }

    /// The pair that the last of a burst is for, if all of it goes to the only receiver as it is.
    fn straight_pair(&mut self, port: PortId, burst: &Burst<'_>, now: &Moment) -> Option<u16> {
        let (_, guest) = sole_receiver(&mut self.ports, port)?;
        guest.aim.look(&self.crossing);
        let offloads = guest.offloads();
        let as_it_is = burst.frames().iter().all(|frame| offloads.accepts(&frame.header));
        let last = burst.frames().last().filter(|_| as_it_is)?;
        guest.aim.choose(last.prefix(), now).ok()
    }

    /// Reads a frame to where the queue of `pair` would put it, and forwards it.
    fn read_straight(&mut self, port: PortId, to: PortId, pair: u16) -> Read {
        let Some(Some(queue)) =
            guest(&mut self.ports, to).and_then(|guest| guest.rx.get_mut(usize::from(pair)))
        else {
            return Read::NoRoom;
        };
        // Keeps the memory mapped while the frame borrows it, whatever happens to the queue.
        let memory = Arc::clone(&queue.common.memory);
        let mut head = [0; Header::LEN + PREFIX];
        let mut pieces = SmallVec::<[WriteSlice<'_>; FEW_PIECES]>::new();
        pieces.push(WriteSlice::from(&mut head[..]));
        let mut translator = memory.translator();
        if !queue.queue.room(&mut translator, PREFIX, MAX_FRAME, &mut pieces) || pieces.len() > MAX_PIECES {
            return Read::NoRoom;
        }
        let Some((tap, counters)) = tap_port(&mut self.ports, port) else { return Read::NoRoom };
        let len = match tap.tap.readv(&mut pieces) {
            Ok(len) => len,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Read::Nothing,
            // The tap is down or gone: reading it in the usual way finds that out. If it is the receiver's memory that is gone, the kernel
            // says nothing; whoever writes there next notices.
            Err(_) => return Read::Other,
        };
        let mut pieces = pieces.iter().map(WriteSlice::as_read);
        let head = pieces.next().unwrap_or(ReadSlice::EMPTY).first(len);
        let Some(header) = tap::admit(head, len, counters) else { return Read::Other };
        counters.rx_in_place.add(1);
        let mut left = len - Header::LEN;
        let mut burst = Burst::reuse(std::mem::take(&mut self.storage));
        let mut frame = burst.build(header, left as u32);
        for piece in std::iter::once(head.skip(Header::LEN)).chain(pieces) {
            let piece = piece.first(left);
            left -= piece.len();
            frame.piece(piece);
        }
        frame.finish();
        let now = Moment::new(self.started, self.now);
        let pair = self.straight_pair(port, &burst, &now);
        if pair.is_some() {
            self.forward(Origin { port, private: false }, &burst, &now);
        } else {
            let copy = [forward::copy(&burst, &burst.frames()[0])];
            self.forward(Origin { port, private: true }, &forward::burst_of(&copy), &now);
        }
        self.storage = Burst::reuse(burst);
        pair.map_or(Read::Other, |pair| Read::Frame(len, pair))
    }
}

/// The only port that what comes from `from` can be for, if it is a virtual machine's and neither of the two has rules.
fn sole_receiver(ports: &mut [Option<Port>], from: PortId) -> Option<(PortId, &mut Guest)> {
    let mut sole = None;
    for (id, port) in (0u16..).zip(ports).filter_map(|(id, port)| Some((PortId(id), port.as_mut()?))) {
        if port.gate.is_some() || id != from && sole.is_some() {
            return None;
        }
        match &mut port.kind {
            _ if id == from => {}
            Kind::Guest(guest) => sole = Some((id, guest)),
            Kind::Tap(_) | Kind::Vif(_) => return None,
        }
    }
    sole
}
