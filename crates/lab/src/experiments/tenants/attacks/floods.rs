//! Plain floods: one port sends as much as goes in, to a second one whose guest takes all of it, or does not.

use std::path::PathBuf;

use ringferry_packet::vnet::Header;
use ringferry_rig::handmade::{Front, HEADER, PAGE, Shape};
use ringferry_virtio_net::Features;

use super::{Place, Step};
use crate::experiment::RowError;
use crate::frames::to_be_cut;

const SMALL: usize = 64;
/// Bytes of the largest frame: what is behind Ethernet's header fits an IP packet.
const LARGE: usize = 65_535;
/// Payload of a packet that a large frame is cut into.
const MSS: usize = 1448;
/// Headers of Ethernet, IPv4 and TCP without options.
const HEADERS: usize = 54;
/// Room for whatever is received, which nobody reads.
const SINK: usize = 1 << 17;

/// Address of the attacker's port of that number.
pub(super) fn mac(port: usize) -> [u8; 6] {
    [2, 0, 0, 0, 0xa0, port as u8]
}

/// A frame of so many bytes of an EtherType for experiments.
pub(super) fn frame(destination: [u8; 6], source: [u8; 6], len: usize) -> Vec<u8> {
    let mut frame = [&destination[..], &source, &[0x88, 0xb5]].concat();
    frame.resize(len, 0x5a);
    frame
}

/// A TCP frame of so many bytes, with addresses and with checksums that the receiver is to finish.
pub(super) fn tcp(destination: [u8; 6], source: [u8; 6], len: usize) -> Vec<u8> {
    let mut frame = frame(destination, source, len);
    frame[12..HEADERS].fill(0);
    frame[12..16].copy_from_slice(&[0x08, 0x00, 0x45, 0x00]);
    frame[16..18].copy_from_slice(&((len - 14) as u16).to_be_bytes());
    frame[20..24].copy_from_slice(&[0x40, 0, 64, 6]);
    frame[26..34].copy_from_slice(&[198, 18, 0, 1, 198, 18, 0, 2]);
    frame[34..38].copy_from_slice(&[0x30, 0x39, 0x16, 0x2e]);
    frame[46..50].copy_from_slice(&[0x50, 0x10, 0xff, 0xff]);
    let mut sum = ringferry_packet::checksum::Sum::new();
    sum.add(&frame[14..34]);
    let sum = sum.finish().to_be_bytes();
    frame[24..26].copy_from_slice(&sum);
    let pseudo =
        ringferry_packet::checksum::pseudo_header_v4([198, 18, 0, 1], [198, 18, 0, 2], 6, (len - 34) as u16);
    frame[50..52].copy_from_slice(&pseudo.partial().to_be_bytes());
    frame
}

/// A flood: frames for every sending queue, and receivers.
pub(super) struct Flood {
    pub header: Header,
    pub frame: Vec<u8>,
    pub sender: Shape,
    pub receiver: Shape,
    pub buffers: Buffers,
}

/// The buffers that a receiver offers.
#[derive(Clone, Copy, Debug)]
pub(super) enum Buffers {
    None,
    /// As many as the ring has entries, each of so many bytes.
    Single(u32),
    /// Chains of so many buffers of so many bytes, each of which has a page of its own behind the first [`SINK`] bytes.
    Chains(u16, u32),
}

impl Flood {
    pub(super) fn new(frame: Vec<u8>) -> Self {
        let receiver = Shape { receive: 1024, buffers: SINK, ..Shape::default() };
        let sender = Shape { buffers: SINK, ..Shape::default() };
        Self { header: Header::default(), frame, sender, receiver, buffers: Buffers::Single(2048) }
    }

    /// Starts the first port as the sender, all others as receivers, which make their addresses known.
    pub(super) fn start(self, place: &Place) -> Result<Step, RowError> {
        let (first, others) =
            place.sockets.split_first().ok_or_else(|| RowError::failed("the attacker has no port"))?;
        let mut receivers = Receivers::start(others, self.receiver, self.buffers)?;
        let mut sender = Front::new(first, self.sender)?;
        let len = sender.write_frame(0, &self.header, &self.frame)?;
        sender.send_from(0, len)?;
        sender.start()?;
        let mut used = vec![0; sender.rings.len()];
        let mut turn = 0u32;
        Ok(Box::new(move || {
            let mut sent = 0;
            for (ring, used) in std::iter::zip(&sender.rings, &mut used).skip(1).step_by(2) {
                sent += ring.offer(used)?;
            }
            receivers.offer()?;
            turn = turn.wrapping_add(1);
            if turn.is_multiple_of(1024) {
                sender.check()?;
                receivers.check()?;
            }
            if sent == 0 {
                std::thread::yield_now();
            }
            Ok(sent)
        }))
    }
}

/// The attacker's ports that frames go to. Nobody reads what they receive.
struct Receivers {
    /// Each with the used index of each of its rings.
    fronts: Vec<(Front, Vec<u16>)>,
    buffers: Buffers,
}

impl Receivers {
    /// Starts a receiver at each of the sockets, the first of which is that of port 1. They make their addresses known.
    fn start(sockets: &[PathBuf], shape: Shape, buffers: Buffers) -> Result<Self, RowError> {
        let mut fronts = Vec::new();
        for (at, socket) in sockets.iter().enumerate() {
            let mut front = Front::new(socket, shape)?;
            match buffers {
                Buffers::None => {}
                Buffers::Single(len) => front.receive_into(0, len)?,
                Buffers::Chains(links, len) => front.receive_into_chains(SINK, links, len)?,
            }
            // Of the other half of the buffers.
            let hello = frame(mac(0), mac(at + 1), SMALL);
            let len = front.write_frame(SINK / 2, &Header::default(), &hello)?;
            front.send_from(SINK / 2, len)?;
            front.start()?;
            let transmitq = &front.rings[1];
            transmitq.set_available(1)?;
            transmitq.kick.signal()?;
            let used = vec![0; front.rings.len()];
            fronts.push((front, used));
        }
        Ok(Self { fronts, buffers })
    }

    /// Offers all buffers that are not on offer.
    fn offer(&mut self) -> Result<(), RowError> {
        if let Buffers::None = self.buffers {
            return Ok(());
        }
        for (front, used) in &mut self.fronts {
            for (ring, used) in std::iter::zip(&front.rings, used).step_by(2) {
                ring.offer(used)?;
            }
        }
        Ok(())
    }

    /// Fails once the switch has ended one of the connections.
    fn check(&mut self) -> Result<(), RowError> {
        Ok(self.fronts.iter_mut().try_for_each(|(front, _)| front.check())?)
    }
}

/// Frames of 64 bytes to another port.
pub(super) fn small(place: &Place) -> Result<Step, RowError> {
    Flood::new(frame(mac(1), mac(0), SMALL)).start(place)
}

/// Frames of 64 KiB that are to be cut, to a port that takes them as they are.
pub(super) fn tso(place: &Place) -> Result<Step, RowError> {
    let mut flood = Flood::new(tcp(mac(1), mac(0), LARGE));
    flood.header = to_be_cut(HEADERS, MSS);
    flood.sender.features = Features::CSUM | Features::HOST_TSO4;
    flood.receiver.features = Features::GUEST_CSUM | Features::GUEST_TSO4;
    flood.buffers = Buffers::Single((SINK / 2) as u32);
    flood.start(place)
}

/// Frames of 64 bytes to everybody, with eight receivers.
pub(super) fn broadcast(place: &Place) -> Result<Step, RowError> {
    Flood::new(frame([0xff; 6], mac(0), SMALL)).start(place)
}

/// Frames of 64 bytes through 16 queue pairs at once.
pub(super) fn pairs(place: &Place) -> Result<Step, RowError> {
    let mut flood = Flood::new(frame(mac(1), mac(0), SMALL));
    flood.sender.pairs = 16;
    flood.receiver.pairs = 16;
    flood.start(place)
}

/// Frames of 1500 bytes to a port whose receive buffers have one byte each.
pub(super) fn tiny_buffers(place: &Place) -> Result<Step, RowError> {
    let mut flood = Flood::new(frame(mac(1), mac(0), 1500));
    flood.receiver.receive = 32_768;
    flood.buffers = Buffers::Single(1);
    flood.start(place)
}

/// Frames of 1500 bytes to a port that never has a receive buffer.
pub(super) fn no_buffers(place: &Place) -> Result<Step, RowError> {
    let mut flood = Flood::new(frame(mac(1), mac(0), 1500));
    flood.buffers = Buffers::None;
    flood.start(place)
}

/// Frames of 64 bytes to a port whose buffers are long chains of short pieces. A switch reads 60 descriptors for each frame and writes to four pages.
/// ringferry breaks a ring whose driver has it read more than 65 for such a frame.
pub(super) fn dear_chains(place: &Place) -> Result<Step, RowError> {
    /// Buffers of a chain, and bytes of each.
    const LINKS: u16 = 60;
    const PIECE: u32 = 24;
    let mut flood = Flood::new(frame(mac(1), mac(0), SMALL));
    flood.receiver.receive = 32_768;
    flood.receiver.buffers = SINK + usize::from(flood.receiver.receive) * PAGE;
    flood.buffers = Buffers::Chains(LINKS, PIECE);
    flood.start(place)
}

/// Finding M5: frames of 64 bytes, each from another address, to a port that another worker serves. The ring between the two workers is
/// wanted for the frames, and for the news of the addresses.
pub(super) fn other_worker(place: &Place) -> Result<Step, RowError> {
    let Flood { receiver, buffers, .. } = Flood::new(Vec::new());
    let mut receivers = Receivers::start(place.sockets.get(1..).unwrap_or_default(), receiver, buffers)?;
    let mut send = macs(place)?;
    let mut turn = 0u32;
    Ok(Box::new(move || {
        receivers.offer()?;
        turn = turn.wrapping_add(1);
        if turn.is_multiple_of(1024) {
            receivers.check()?;
        }
        send()
    }))
}

/// Frames of 64 bytes, each from another address.
pub(super) fn macs(place: &Place) -> Result<Step, RowError> {
    let Some(first) = place.sockets.first() else {
        return Err(RowError::failed("the attacker has no port"));
    };
    let size = 1024u16;
    let slot = HEADER + SMALL;
    let shape = Shape { transmit: size, buffers: usize::from(size) * slot, ..Shape::default() };
    let mut front = Front::new(first, shape)?;
    let frame = frame(mac(1), mac(0), SMALL);
    for at in 0..usize::from(size) {
        front.write_frame(at * slot, &Header::default(), &frame)?;
    }
    let buffers = front.buffers;
    front.rings[1].fill(|at| (buffers + u64::from(at) * slot as u64, slot as u32), false)?;
    front.start()?;
    let (mut random, mut used, mut turn) = (fastrand::Rng::with_seed(1), 0u16, 0u32);
    Ok(Box::new(move || {
        // Those that were used since last time get a new source address before they are offered again.
        let now = front.rings[1].used()?;
        let mut at = used;
        while at != now {
            let [a, b, c, d, ..] = random.u64(..).to_le_bytes();
            front.write(usize::from(at % size) * slot + HEADER + 6, &[2, 1, a, b, c, d])?;
            at = at.wrapping_add(1);
        }
        turn = turn.wrapping_add(1);
        if turn.is_multiple_of(1024) {
            front.check()?;
        }
        Ok(front.rings[1].offer(&mut used)?)
    }))
}
