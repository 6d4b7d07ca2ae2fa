//! A guest that keeps the rules: the driver half on memory of its own, plugged into a vhost-user socket,
//! sending and receiving raw Ethernet frames.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use ringferry_packet::ether::Mac;
use ringferry_packet::vnet::Header;
use ringferry_ring::{Buffer, Parts, part_bytes};
use ringferry_sys::eventfd::EventFd;
use ringferry_sys::socket::Stream;
use ringferry_vhost_user::{
    Connection, FrontendError, ProtocolFeatures, RingPlan, Wanted, connect_device, resume_base,
};
use ringferry_virtio_net::Features;
use ringferry_virtio_net::driver::{Arena, Pair, PairConfig, Queue};

use crate::frames::{frame, mac};
use crate::front::ring;
use crate::process::{PATIENCE, readable};

/// How a guest is built.
#[derive(Clone, Copy)]
pub struct Options {
    /// Features that it takes where they are offered.
    pub features: Features,
    /// Entries of the receiveq.
    pub rx: u16,
    /// Entries of the transmitq.
    pub tx: u16,
    /// True if it posts receive buffers.
    pub posts: bool,
    /// True if it keeps the device's positions over its death (an in-flight region), which QEMU does for no network device.
    pub inflight: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self { features: Features::DEVICE, rx: 256, tx: 64, posts: true, inflight: true }
    }
}

#[derive(Debug, PartialEq, Eq)]
pub struct Received {
    pub header: Header,
    pub frame: Vec<u8>,
}

/// The two events of a queue.
struct Events {
    kick: EventFd,
    call: EventFd,
}

impl Events {
    fn new() -> Events {
        Events { kick: EventFd::new().unwrap(), call: EventFd::new().unwrap() }
    }

    fn plan(&self, queue: Queue, base: Option<u32>) -> RingPlan<'_> {
        RingPlan { base, ..ring(&queue, &self.kick, Some(&self.call)) }
    }
}

pub struct Guest {
    pub connection: Connection,
    pub mac: Mac,
    /// The features that were negotiated.
    pub features: Features,
    pub arena: Arena,
    pub pair: Pair,
    rx: Events,
    tx: Events,
    posts: bool,
    inbox: VecDeque<Received>,
}

fn negotiate(stream: Stream, features: Features, inflight: bool) -> Connection {
    let required = Features::VERSION_1.bits();
    let mut protocol = Wanted::NET_PROTOCOL;
    protocol.set(ProtocolFeatures::INFLIGHT_SHMFD, inflight);
    let wanted = Wanted { features: features.bits(), required, protocol };
    let mut connection = connect_device(stream, &wanted).unwrap();
    connection.frontend().set_timeout(PATIENCE);
    connection
}

impl Guest {
    /// Plugs guest `number` into a back end and starts its device.
    pub fn plug(stream: Stream, number: u8, options: Options) -> Guest {
        let connection = negotiate(stream, options.features, options.inflight);
        let features = Features::from_bits_retain(connection.negotiated().features);
        let config = PairConfig { receive: options.rx, transmit: options.tx, ..PairConfig::default() };
        let mut arena = Arena::new(config.arena_bytes(features)).unwrap();
        let pair = Pair::new(&mut arena, features, &config).unwrap();
        let mut guest = Guest {
            connection,
            mac: mac(number),
            features,
            arena,
            pair,
            rx: Events::new(),
            tx: Events::new(),
            posts: options.posts,
            inbox: VecDeque::new(),
        };
        guest.start(&[]).unwrap();
        guest.refill();
        guest
    }

    /// Starts the device with rings that resume at `bases`; without any, at the beginning.
    pub fn start(&mut self, bases: &[u32]) -> Result<(), FrontendError> {
        let base = |at: usize| bases.get(at).copied();
        let plans = [self.rx.plan(self.pair.queues[0], base(0)), self.tx.plan(self.pair.queues[1], base(1))];
        self.connection.start(&[(self.arena.region(), self.arena.fd())], &plans)
    }

    /// Goes on with another back end where the last one, which ended without a word, had got to: by the
    /// used index of a split ring, and by the in-flight region of a packed one.
    pub fn move_to(&mut self, stream: Stream) {
        let features = self.features;
        let region = self.connection.take_inflight();
        self.connection = negotiate(stream, features, true);
        assert_eq!(self.connection.negotiated().features, features.bits());
        let packed = features.contains(Features::RING_PACKED);
        let base = |index: u16| {
            let queue = self.pair.queues[usize::from(index)];
            let [desc, driver, device] = part_bytes(queue.size, packed);
            let area = |addr, len| self.arena.memory().area(addr, len).unwrap();
            let (desc, driver) = (area(queue.desc, desc), area(queue.avail, driver));
            let parts = Parts { size: queue.size, desc, driver, device: area(queue.used, device) };
            resume_base(index, &parts, packed, region.as_ref()).unwrap()
        };
        let bases = [base(0), base(1)];
        if let Some(region) = region {
            self.connection.set_inflight(region);
        }
        self.start(&bases).unwrap();
    }

    /// Copies a frame into the ring, waiting for room; not shown to the device before
    /// [`Guest::flush`], except to make room.
    #[track_caller]
    pub fn put(&mut self, header: &Header, frame: &[u8]) {
        let deadline = Instant::now() + PATIENCE;
        self.pair.reclaim();
        while !self.pair.send_frame(header, frame) {
            self.flush();
            assert!(Instant::now() < deadline, "the device takes nothing");
            if !self.pair.transmitq.driver().ring().enable_calls() {
                readable(&self.tx.call, WAIT);
                let _ = self.tx.call.drain();
            }
            self.pair.reclaim();
        }
        assert_eq!(self.pair.fault(), None);
    }

    /// Shows the device what was put.
    pub fn flush(&mut self) {
        if self.pair.transmitq.flush() {
            self.tx.kick.signal().unwrap();
        }
    }

    /// Sends a frame without offloads.
    #[track_caller]
    pub fn send(&mut self, frame: &[u8]) {
        self.put(&Header::default(), frame);
        self.flush();
    }

    /// Shows the device what was put into the ring past the queue, which knows nothing of it.
    pub fn publish_ring(&mut self) {
        if self.pair.transmitq.driver().ring().publish() {
            self.tx.kick.signal().unwrap();
        }
    }

    /// Sends a frame that the driver's own limits would refuse, and waits until the device is done with it.
    #[track_caller]
    pub fn send_unchecked(&mut self, frame: &[u8]) {
        self.drain();
        let mut buf = self.pair.pools.large.alloc().unwrap();
        let bytes = [&[0; Header::LEN][..], frame].concat();
        assert_eq!(buf.append(&bytes), bytes.len());
        let buffer = Buffer { addr: buf.addr(), len: bytes.len() as u32 };
        self.pair.transmitq.driver().ring().add(&[buffer], &[], ()).unwrap();
        self.publish_ring();
        let deadline = Instant::now() + PATIENCE;
        while self.pair.transmitq.driver().ring().collect().is_none() {
            assert!(Instant::now() < deadline, "the device keeps what was sent");
            std::thread::yield_now();
        }
    }

    /// Sends `count` frames of 100 bytes to `to`, numbered from `first`, in one burst.
    #[track_caller]
    pub fn send_numbered(&mut self, to: Mac, first: u32, count: u32) {
        for number in first..first + count {
            let frame = frame(to, self.mac, 100, number);
            self.put(&Header::default(), &frame);
        }
        self.flush();
    }

    /// Waits until the device has given back everything that was sent.
    #[track_caller]
    pub fn drain(&mut self) {
        let deadline = Instant::now() + PATIENCE;
        self.flush();
        while self.pair.transmitq.in_flight() > 0 {
            assert!(Instant::now() < deadline, "the device keeps what was sent");
            if !self.pair.transmitq.driver().ring().enable_calls() {
                readable(&self.tx.call, WAIT);
                let _ = self.tx.call.drain();
            }
            self.pair.reclaim();
        }
    }

    /// Asks to be called, through an event that was made to hold whoever rings it: blocking again, and
    /// full. Its open file is shared with the device.
    pub fn set_trap(&mut self) {
        self.sleep();
        let flags = rustix::fs::fcntl_getfl(&self.rx.call).unwrap();
        rustix::fs::fcntl_setfl(&self.rx.call, flags - rustix::fs::OFlags::NONBLOCK).unwrap();
        let _ = self.rx.call.drain();
        rustix::io::write(&self.rx.call, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    }

    /// Takes back a call on the receiveq, if there was one.
    pub fn take_call(&self) {
        let _ = self.rx.call.drain();
    }

    /// Waits for a call on the receiveq, and takes it back.
    #[track_caller]
    pub fn expect_call(&self) {
        assert!(readable(&self.rx.call, PATIENCE), "the device does not call");
        self.rx.call.drain().unwrap();
    }

    /// Posts free buffers, if this guest does.
    pub fn refill(&mut self) {
        if self.posts && self.pair.refill() {
            self.rx.kick.signal().unwrap();
        }
    }

    /// Takes what has arrived into the inbox.
    pub fn pump(&mut self) {
        let Guest { pair: Pair { receiveq, pools, .. }, inbox, .. } = self;
        receiveq.lend(usize::MAX, pools, |packet, _| {
            inbox.push_back(Received { header: packet.header, frame: packet.to_vec() });
            Some(packet)
        });
        assert_eq!(self.pair.fault(), None);
        assert_eq!(self.pair.receiveq.stats().rx_length_errors, 0);
        self.refill();
    }

    /// The next frame of those that were pumped.
    pub fn take(&mut self) -> Option<Received> {
        self.inbox.pop_front()
    }

    /// Waits for the next frame, asleep, as a guest's kernel does.
    #[track_caller]
    pub fn receive(&mut self) -> Received {
        let deadline = Instant::now() + PATIENCE;
        loop {
            self.pump();
            if let Some(received) = self.take() {
                return received;
            }
            assert!(Instant::now() < deadline, "guest {} received nothing", self.mac);
            if !self.pair.receiveq.driver().ring().enable_calls() {
                // With a bound that only saves the test from a call that is never made.
                let left = deadline.saturating_duration_since(Instant::now());
                readable(&self.rx.call, left);
                let _ = self.rx.call.drain();
            }
            self.pair.receiveq.driver().ring().disable_calls();
        }
    }

    /// Asks to be called for the next frame, as a guest does that has taken all there are.
    pub fn sleep(&mut self) {
        self.pair.receiveq.driver().ring().enable_calls();
    }

    /// The next frame, which came without offloads.
    #[track_caller]
    pub fn receive_plain(&mut self) -> Vec<u8> {
        let Received { header, frame } = self.receive();
        assert_eq!((header.flags, header.gso_type), (0, 0));
        frame
    }

    /// Receives the `count` frames that [`Guest::send_numbered`] sends, in order and unharmed, and
    /// nothing else before them.
    #[track_caller]
    pub fn expect_numbered(&mut self, from: Mac, first: u32, count: u32) {
        for number in first..first + count {
            assert_eq!(self.receive_plain(), frame(self.mac, from, 100, number));
        }
    }
}

/// How long to wait for a call that another thread's progress makes superfluous.
const WAIT: Duration = Duration::from_millis(10);

/// Lets the switch learn where each guest is, by a broadcast of each that all others receive.
#[track_caller]
pub fn acquaint(guests: &mut [&mut Guest]) {
    for speaker in 0..guests.len() {
        let hello = frame(Mac::BROADCAST, guests[speaker].mac, 60, 0);
        guests[speaker].send(&hello);
        for (listener, guest) in guests.iter_mut().enumerate() {
            if listener != speaker {
                assert_eq!(guest.receive_plain(), hello);
            }
        }
    }
}

/// `one` sends `count` frames to `other`, which receives them, and the other way round.
#[track_caller]
pub fn converse(one: &mut Guest, other: &mut Guest, first: u32, count: u32) {
    one.send_numbered(other.mac, first, count);
    other.expect_numbered(one.mac, first, count);
    other.send_numbered(one.mac, first, count);
    one.expect_numbered(other.mac, first, count);
}
