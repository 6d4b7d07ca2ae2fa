//! A front end of a few lines, which can also send what no front end should.

use std::io;
use std::sync::{Arc, Mutex};

use ringferry_memory::{Area, ReadSlice, Window, Words};
use ringferry_packet::frame::Burst;
use ringferry_packet::testing::Packet;
use ringferry_packet::vnet::Header;
use ringferry_xen::domain::{DomId, Domain, PAGE};
use ringferry_xen::grant::{Access, CopySegment, Foreign, ForeignCounters, GrantError, GrantRef, Granted};
use ringferry_xen::netif::FrontRing;
use ringferry_xen::netif::control::{ControlFront, Message, Request, Response};
use ringferry_xen::netif::wire::{
    Extra, RxFlags, RxRequest, RxResponse, RxSlot, TxFlags, TxRequest, TxResponse, TxSlot,
};
use ringferry_xen_net::netback::{Control, Mode, Multicast, Queue, QueueConfig};
use ringferry_xen_sim::fake::Fake;

pub const HOST: DomId = DomId(0);
pub const GUEST: DomId = DomId(7);
pub const MODES: [Mode; 3] = [Mode::Copy, Mode::Map, Mode::Persistent];

/// Calls of the hypervisor, by kind: pages whose slots lie side by side are mapped and unmapped by one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Calls {
    pub map: usize,
    pub unmap: usize,
    pub copy: usize,
}

/// Counts the runs of consecutive slots.
fn runs(slots: impl Iterator<Item = usize>) -> usize {
    let mut last = None;
    slots.filter(|slot| last.replace(*slot).is_none_or(|last| last + 1 != *slot)).count()
}

/// A [`Foreign`] whose calls are counted.
#[derive(Debug)]
struct Counting {
    inner: Box<dyn Foreign>,
    calls: Arc<Mutex<Calls>>,
}

impl Foreign for Counting {
    fn domain(&self) -> DomId {
        self.inner.domain()
    }
    fn map_region(&mut self, refs: &[GrantRef]) -> Result<Arc<ringferry_memory::Region>, GrantError> {
        self.inner.map_region(refs)
    }
    fn map(
        &mut self,
        window: &mut Window,
        pages: &[(usize, GrantRef)],
        access: Access,
        mapped: &mut Vec<bool>,
    ) {
        assert!(!pages.is_empty(), "a call for nothing");
        self.calls.lock().unwrap().map += runs(pages.iter().map(|(slot, _)| *slot));
        self.inner.map(window, pages, access, mapped);
    }
    fn unmap(&mut self, window: &mut Window, slots: &[usize]) {
        assert!(slots.iter().all(|slot| window.is_mapped(*slot)), "nothing to unmap in {slots:?}");
        self.calls.lock().unwrap().unmap += runs(slots.iter().copied());
        self.inner.unmap(window, slots);
    }
    fn copy(&mut self, segments: &mut [CopySegment<'_>]) -> io::Result<()> {
        assert!(!segments.is_empty(), "a call for nothing");
        self.calls.lock().unwrap().copy += 1;
        self.inner.copy(segments)
    }
    fn counters(&self) -> ForeignCounters {
        self.inner.counters()
    }
}

/// A frame as it was received.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Received {
    pub bytes: Vec<u8>,
    pub flags: RxFlags,
    pub gso: Option<(u16, u8)>,
    /// A slot of it was an error.
    pub failed: bool,
}

/// A front end with a queue, whose pages are used for whatever a test likes.
pub struct Front {
    /// The hypervisor, if it is the fake one.
    pub fake: Fake,
    pub domain: Box<dyn Domain>,
    pub host: Box<dyn Domain>,
    pub tx: FrontRing<Area, TxSlot>,
    pub rx: FrontRing<Area, RxSlot>,
    pub control: ControlFront<Area>,
    pub rings: Box<dyn Granted>,
    /// Pages for packets and for anything else.
    pub pool: Box<dyn Granted>,
    pub pages: Area,
    /// Requests on the receive ring, by slot.
    posted: Vec<Option<(u16, usize)>>,
    next_page: usize,
    pub calls: Arc<Mutex<Calls>>,
    pub multicast: Multicast,
}

pub fn area(granted: &dyn Granted) -> Area {
    granted.region().area(0, granted.refs().len() * PAGE).unwrap()
}

impl Front {
    pub fn new(pages: usize) -> Front {
        Self::with_access(pages, Access::Write)
    }

    pub fn with_access(pages: usize, access: Access) -> Front {
        let fake = Fake::new();
        let (domain, host) = (fake.domain(GUEST), fake.domain(HOST));
        Self::between(fake, Box::new(domain), Box::new(host), pages, access)
    }

    /// A front end in `domain` whose back end is in `host`, of any hypervisor.
    pub fn between(
        fake: Fake,
        domain: Box<dyn Domain>,
        host: Box<dyn Domain>,
        pages: usize,
        access: Access,
    ) -> Front {
        let mut table = domain.grants().unwrap();
        let rings = table.grant(HOST, 3, Access::Write).unwrap();
        let page = |i| rings.region().area(i * PAGE, PAGE).unwrap();
        let (tx, rx) = (FrontRing::new(page(0)).unwrap(), FrontRing::new(page(1)).unwrap());
        let control = FrontRing::new(page(2)).unwrap();
        let pool = table.grant(HOST, pages, access).unwrap();
        Front {
            tx,
            rx,
            control,
            pages: area(&*pool),
            rings,
            pool,
            posted: vec![None; 256],
            next_page: 0,
            calls: Arc::default(),
            multicast: Multicast::default(),
            fake,
            domain,
            host,
        }
    }

    pub fn foreign(&self) -> Box<dyn Foreign> {
        let inner = self.host.foreign(GUEST).unwrap();
        Box::new(Counting { inner, calls: Arc::clone(&self.calls) })
    }

    /// The back end, as [`QueueConfig`] says.
    pub fn back(&self, config: QueueConfig) -> Queue {
        let mut foreign = self.foreign();
        let mut ring =
            |i: usize| foreign.map_region(&self.rings.refs()[i..=i]).unwrap().area(0, PAGE).unwrap();
        let (tx, rx) = (ring(0), ring(1));
        Queue::new(tx, rx, foreign, config).unwrap()
    }

    pub fn queue(&self, mode: Mode) -> Queue {
        self.back(QueueConfig::new(mode, true))
    }

    pub fn control(&self) -> Control<Area> {
        let mut foreign = self.foreign();
        let ring = foreign.map_region(&self.rings.refs()[2..3]).unwrap();
        Control::new(ring.area(0, PAGE).unwrap(), foreign).unwrap()
    }

    pub fn calls(&self) -> Calls {
        std::mem::take(&mut self.calls.lock().unwrap())
    }

    pub fn gref(&self, page: usize) -> GrantRef {
        self.pool.refs()[page]
    }

    pub fn write(&self, page: usize, offset: usize, bytes: &[u8]) {
        let room = self.pages.write(page * PAGE + offset, bytes.len()).unwrap();
        assert_eq!(room.copy_from(bytes), bytes.len());
    }

    pub fn read(&self, page: usize, offset: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.pages.read(page * PAGE + offset, len).unwrap().copy_to(&mut bytes);
        bytes
    }

    fn page(&mut self) -> usize {
        self.next_page = (self.next_page + 1) % self.pool.refs().len();
        self.next_page
    }

    /// A request as it is.
    pub fn request(&mut self, gref: GrantRef, offset: u16, flags: TxFlags, id: u16, size: u16) {
        self.tx.push(TxRequest { gref, offset, flags, id, size }.to_slot());
    }

    pub fn extra(&mut self, extra: Extra, more: bool) {
        let [low, high] = extra.encode(more);
        self.tx.push([low, high, 0]);
    }

    /// Sends a frame in pieces of these lengths, which may be empty and must add up; each at some offset of the next page.
    pub fn send(&mut self, frame: &[u8], cuts: &[usize], flags: TxFlags, extras: &[Extra]) {
        assert_eq!(cuts.iter().sum::<usize>(), frame.len());
        let mut at = 0;
        for (i, &len) in cuts.iter().enumerate() {
            let page = self.page();
            let offset = (i * 64) % (PAGE - len + 1);
            self.write(page, offset, &frame[at..at + len]);
            at += len;
            let mut all = if i == 0 { flags } else { TxFlags::empty() };
            all.set(TxFlags::MORE_DATA, i + 1 < cuts.len());
            all.set(TxFlags::EXTRA_INFO, i == 0 && !extras.is_empty());
            let size = if i == 0 { frame.len() } else { len };
            self.request(self.gref(page), offset as u16, all, 100 + i as u16, size as u16);
            if i == 0 {
                for (j, extra) in extras.iter().enumerate() {
                    self.extra(*extra, j + 1 < extras.len());
                }
            }
        }
    }

    /// Sends a frame in whole pages.
    pub fn send_frame(&mut self, frame: &[u8]) {
        let cuts: Vec<usize> = frame.chunks(PAGE).map(<[u8]>::len).collect();
        self.send(frame, &cuts, TxFlags::empty(), &[]);
    }

    /// Takes the responses that have come.
    pub fn answers(&mut self) -> Vec<TxResponse> {
        self.tx.refresh();
        std::iter::from_fn(|| self.tx.take()).map(TxResponse::from_slot).collect()
    }

    pub fn statuses(&mut self) -> Vec<i16> {
        self.answers().iter().map(|answer| answer.status).collect()
    }

    /// Posts `count` pages on the receive ring.
    pub fn post(&mut self, count: usize) {
        for _ in 0..count {
            let page = self.page();
            self.post_page(self.gref(page), page);
        }
        let _ = self.rx.publish();
    }

    /// Posts a reference that should be of `page`.
    pub fn post_page(&mut self, gref: GrantRef, page: usize) {
        let index = self.rx.next_request();
        let id = (index % 256) as u16 ^ 0x55;
        self.posted[index as usize % 256] = Some((id, page));
        self.rx.push(RxRequest { id, gref }.to_slot());
    }

    /// The frames received so far. Checks that each answer is in the slot of its request.
    pub fn received(&mut self) -> Vec<Received> {
        let mut frames = Vec::new();
        self.rx.refresh();
        while self.rx.available() > 0 {
            let mut frame = Received::default();
            let mut first = true;
            loop {
                let index = self.rx.next_response() as usize % 256;
                let response = RxResponse::from_slot(self.rx.take().expect("a whole packet"));
                let (id, page) = self.posted[index].take().expect("an answer to a request");
                assert_eq!((response.id, response.offset), (id, 0));
                match response.len() {
                    Some(len) => frame.bytes.extend(self.read(page, 0, len)),
                    None => frame.failed = true,
                }
                if std::mem::take(&mut first) {
                    frame.flags = response.flags - RxFlags::MORE_DATA;
                    if response.flags.contains(RxFlags::EXTRA_INFO) {
                        self.posted[self.rx.next_response() as usize % 256] = None;
                        let extra = Extra::decode(self.rx.take().expect("an extra"));
                        let Some((Extra::Gso { size, kind }, false)) = extra else { panic!("{extra:?}") };
                        frame.gso = Some((size, kind));
                    }
                }
                if !response.flags.contains(RxFlags::MORE_DATA) {
                    break;
                }
            }
            frames.push(frame);
        }
        frames
    }

    /// Publishes what was pushed, lets the back end forward it, and returns the frames that came out.
    pub fn forward(&mut self, queue: &mut Queue) -> Vec<(Header, Vec<u8>)> {
        let _ = self.tx.publish();
        let mut frames = Vec::new();
        while queue.poll(32, &mut self.multicast) > 0 {
            let lent = queue.lend().unwrap();
            let mut burst = Burst::new();
            lent.frames(&mut burst);
            for frame in burst.frames() {
                let mut bytes = Vec::new();
                burst.flatten(frame, &mut bytes);
                assert_eq!(bytes.len(), frame.len as usize);
                frames.push((frame.header, bytes));
            }
            drop(burst);
            queue.give_back(lent);
            queue.complete();
        }
        frames
    }

    /// Asks on the control ring and returns the answer.
    pub fn ask(
        &mut self,
        control: &mut Control<Area>,
        queues: &mut [&mut Queue],
        message: Message,
    ) -> Response {
        self.control.push(Request::new(42, message).to_slot());
        let _ = self.control.publish();
        control.poll(queues);
        self.control.refresh();
        let response = Response::from_slot(self.control.take().expect("an answer"));
        assert_eq!((response.id, response.kind), (42, Request::new(42, message).kind));
        response
    }

    /// Ends the front end and checks that nothing is left of either side.
    pub fn finish(self, queue: Queue) {
        drop(queue);
        assert_eq!(self.fake.mapped_pages(), 0, "pages are still mapped");
        let Front { fake, tx, rx, control, rings, pool, pages, .. } = self;
        drop((tx, rx, control, pages));
        assert_eq!((rings.end(), pool.end()), (0, 0));
        fake.assert_nothing_left();
    }
}

/// Bytes that differ from place to place.
pub fn frame(len: usize, seed: u8) -> Vec<u8> {
    let mut frame: Vec<u8> =
        (0..len).map(|i| (i as u8).wrapping_mul(31).wrapping_add((i >> 8) as u8 ^ seed)).collect();
    // No protocol that anyone would look into.
    if let Some(ether_type) = frame.get_mut(12..14) {
        ether_type.copy_from_slice(&[0x88, 0xb5]);
    }
    frame
}

/// Ethernet, IPv4 and TCP with a blank checksum.
pub fn tcp4(payload: usize, seed: u8) -> Vec<u8> {
    Packet::plain(false, true, frame(payload, seed)).partial()
}

/// Delivers a frame cut into its first bytes and pieces of `cut` bytes.
pub fn deliver<A: Words>(
    queue: &mut Queue<A>,
    header: Header,
    frame: &[u8],
    cut: usize,
) -> Result<(), ringferry_xen_net::netback::Refused> {
    let (first, rest) = frame.split_at(frame.len().min(64));
    let rest: Vec<ReadSlice<'_>> = rest.chunks(cut).map(ReadSlice::from).collect();
    queue.deliver(header, first, &rest)
}
