//! A test bed with both halves connected, which passes packets between them.

use ringferry_memory::{Area, ReadSlice};
use ringferry_packet::frame::Burst;
use ringferry_packet::testing::Packet;
use ringferry_packet::vnet::Header;
use ringferry_xen::domain::PAGE;
use ringferry_xen_net::events::Events;
use ringferry_xen_net::netback::{Control, Mode, Multicast, Queue, QueueConfig, Refused};
use ringferry_xen_net::netfront::Pair;
use ringferry_xen_net::xenbus::backend_device::MappedControl;
use ringferry_xen_net::xenbus::{BackConfig, FrontConfig, MappedQueue, Session};

use super::{Both, ID, Machine, Provider};

/// A frame with the header that holds its offloads.
pub type Frame = (Header, Vec<u8>);

/// The back end's access to pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharing {
    Copy,
    Map,
    Persistent,
    Static,
}

impl Sharing {
    pub const ALL: [Self; 4] = [Self::Copy, Self::Map, Self::Persistent, Self::Static];
}

/// A queue of the back end.
pub struct BackQueue {
    pub queue: Queue,
    events: Events,
}

/// Both halves of an interface, connected.
pub struct Wire {
    pub machine: Machine,
    pub both: Both,
    pub sharing: Sharing,
    pub session: Session,
    pub queues: Vec<BackQueue>,
    control: Option<(Control<Area>, MappedChannel)>,
    pub multicast: Multicast,
}

type MappedChannel = Box<dyn ringferry_xen::event::EventChannel>;

/// Serves the control ring, if there is one.
fn answer(control: &mut Option<(Control<Area>, MappedChannel)>, queues: &mut [BackQueue]) {
    let Some((control, channel)) = control else { return };
    channel.drain().unwrap();
    let mut queues: Vec<_> = queues.iter_mut().map(|queue| &mut queue.queue).collect();
    if control.poll(&mut queues) {
        channel.notify().unwrap();
    }
    assert_eq!(control.fault(), None);
}

fn page(region: &std::sync::Arc<ringferry_memory::Region>) -> Area {
    region.area(0, PAGE).unwrap()
}

impl Wire {
    pub fn new(provider: Provider, sharing: Sharing, front: FrontConfig, back: BackConfig) -> Self {
        let mut machine = Machine::of(provider);
        machine.plug(ID);
        let persistent = sharing == Sharing::Persistent;
        let static_grants = sharing == Sharing::Static;
        let front = machine.front(ID, FrontConfig { persistent, static_grants, ..front });
        let plugs = machine.plugs(BackConfig { persistent, static_grants, ..back });
        let mut both = Both::new(Some(front), Some(plugs));
        both.connect();
        let session = both.session.take().unwrap();
        let mut wire = Self {
            machine,
            both,
            sharing,
            session,
            queues: Vec::new(),
            control: None,
            multicast: Multicast::new(false),
        };
        wire.serve();
        for pair in &mut wire.session.pairs {
            if pair.refill() {
                pair.events().notify_receive().unwrap();
            }
        }
        wire
    }

    /// Makes a back end of the connection that was handed over.
    pub fn serve(&mut self) {
        let connection = self.both.connection.take().unwrap();
        let sg = connection.front.accepts.sg;
        let mode = match self.sharing {
            Sharing::Map => Mode::Map,
            Sharing::Persistent if connection.front.persistent => Mode::Persistent,
            _ => Mode::Copy,
        };
        let make = |MappedQueue { tx_ring, rx_ring, events, foreign }| {
            let config = QueueConfig::new(mode, sg);
            let queue = Queue::new(page(&tx_ring), page(&rx_ring), foreign, config).unwrap();
            BackQueue { queue, events }
        };
        self.queues = connection.queues.into_iter().map(make).collect();
        self.control = connection.control.map(|MappedControl { ring, channel, foreign }| {
            (Control::new(page(&ring), foreign).unwrap(), channel)
        });
        assert_eq!(self.control.is_some(), self.sharing == Sharing::Static);
        if self.control.is_some() {
            self.finish_static_grants();
        }
    }

    /// Serves the control ring until all grants are handed over.
    pub fn finish_static_grants(&mut self) {
        let Self { both, control, queues, .. } = self;
        // All pages but those of the rings, of the control ring and its list.
        let all = both.front.as_ref().unwrap().granted() - 2 * queues.len() - 2;
        both.until("static grants", |both| {
            answer(control, queues);
            let mapped: usize = queues.iter().map(|queue| queue.queue.mapped().1).sum();
            mapped == all && both.front.as_ref().unwrap().static_grants() == all
        });
    }

    /// Lets the front end ask, and answers, for longer than all that it can have to ask.
    pub fn answer_all(&mut self) {
        for _ in 0..100 {
            self.both.step();
            answer(&mut self.control, &mut self.queues);
        }
    }

    pub fn pair(&mut self, queue: usize) -> &mut Pair {
        &mut self.session.pairs[queue]
    }

    /// Sends a frame from the front end.
    pub fn send(&mut self, queue: usize, (header, frame): &Frame) -> bool {
        let pair = self.pair(queue);
        let sent = pair.send_frame(header, frame);
        if pair.transmit.flush() {
            pair.events().notify_transmit().unwrap();
        }
        sent
    }

    /// Takes the frames that the front end sent.
    pub fn taken(&mut self, queue: usize) -> Vec<Frame> {
        let BackQueue { queue, events } = &mut self.queues[queue];
        events.drain().unwrap();
        let mut frames = Vec::new();
        while queue.poll(32, &mut self.multicast) > 0 {
            let lent = queue.lend().unwrap();
            let mut burst = Burst::new();
            lent.frames(&mut burst);
            for frame in burst.frames() {
                let mut bytes = Vec::new();
                burst.flatten(frame, &mut bytes);
                frames.push((frame.header, bytes));
            }
            drop(burst);
            queue.give_back(lent);
            if queue.complete() {
                events.notify_transmit().unwrap();
            }
        }
        assert_eq!(queue.fault(), None);
        frames
    }

    /// Gives frames to the front end, in one burst.
    pub fn give(&mut self, queue: usize, frames: &[Frame]) -> Result<(), Refused> {
        let BackQueue { queue, events } = &mut self.queues[queue];
        queue.expect(frames.len());
        let mut result = Ok(());
        for (header, frame) in frames {
            let (first, rest) = frame.split_at(frame.len().min(64));
            // In pieces, as a sender's pages are.
            let rest: Vec<_> = rest.chunks(3000).map(ReadSlice::from).collect();
            result = result.and_then(|()| queue.deliver(*header, first, &rest));
        }
        if queue.flush() {
            events.notify_receive().unwrap();
        }
        result
    }

    /// Takes the frames that the front end received.
    pub fn received(&mut self, queue: usize) -> Vec<Frame> {
        let pair = self.pair(queue);
        pair.events().drain().unwrap();
        let mut frames = Vec::new();
        let Pair { pools, receive, .. } = pair;
        while receive.lend(32, pools, |chain, _| {
            frames.push((chain.header, chain.to_vec()));
            Some(chain)
        }) > 0
        {}
        if pair.refill() {
            pair.events().notify_receive().unwrap();
        }
        assert_eq!(pair.fault(), None);
        frames
    }

    /// Closes everything; nothing may be left.
    #[track_caller]
    pub fn end(self) {
        let Self { machine, both, session, queues, control, .. } = self;
        drop((queues, control));
        both.end(session, machine);
    }
}

/// A frame of `len` bytes that is no IP, all bytes others than in frames of another seed.
pub fn raw(len: usize, seed: u64) -> Frame {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut byte = || {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (state >> 56) as u8
    };
    let mut frame: Vec<u8> = (0..len).map(|_| byte()).collect();
    frame[12..14].copy_from_slice(&[0x88, 0xb5]);
    (Header::default(), frame)
}

/// A TCP segment of `len` bytes whose checksum is blank, to be cut if `gso_size` is not 0.
pub fn tcp(v6: bool, len: usize, gso_size: u16, seed: u64) -> Frame {
    let empty = Packet::plain(v6, true, Vec::new());
    let headers = empty.payload_at();
    let packet = Packet { payload: raw(len, seed).1.split_off(headers), ..empty };
    let (header, frame) = packet.sent(gso_size);
    let header = Header { hdr_len: if gso_size == 0 { 0 } else { headers as u16 }, ..header };
    (header, frame)
}

impl Wire {
    /// Ends the back end's process, without a word to anyone.
    pub fn kill_back(&mut self) {
        self.queues.clear();
        self.control = None;
        self.both.plugs = None;
    }

    /// Starts the back end again.
    pub fn start_back(&mut self) {
        let (persistent, static_grants) =
            (self.sharing == Sharing::Persistent, self.sharing == Sharing::Static);
        let config = BackConfig { persistent, static_grants, ..BackConfig::default() };
        self.both.plugs = Some(self.machine.plugs(config));
        self.both.until("the rings again", |both| both.connection.is_some());
        self.serve();
    }
}
