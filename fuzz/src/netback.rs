//! The Xen network back end against a front end that writes anything: to ring pages, also between two loads,
//! to its pages, to lists of grants and on the control ring; and whose grants fail at any moment.
//!
//! Every slot that was taken is answered by its own id, or the ring is broken for good. Frames are exactly
//! the bytes that slots name. Only pages that are posted, and may be written, change. No more pages are
//! mapped than allowed, and none in the end.

use ringferry_memory::{Area, ReadSlice};
use ringferry_packet::frame::Burst;
use ringferry_packet::vnet::{F_NEEDS_CSUM, GSO_TCPV4, Header};
use ringferry_xen::domain::{DomId, Domain, PAGE};
use ringferry_xen::grant::{Access, GrantRef, Granted};
use ringferry_xen::netif::control::{GrefEntry, Request};
use ringferry_xen::netif::wire::{ERROR, NULL, OKAY, RxRequest, RxResponse, TxFlags, TxRequest, TxResponse};
use ringferry_xen_net::netback::{Control, Lent, Mode, Multicast, Queue, QueueConfig, Refused};
use ringferry_xen_sim::fake::{Fake, Op};

use crate::guest::{BASE, Guest, Hostile, Memory, Surprise};
use crate::ring::Reached;
use crate::script::{Bytes, Field, operations};

const HOST: DomId = DomId(0);
const GUEST: DomId = DomId(7);

/// Number of pages that the front end grants for reading and writing; behind them lie those for reading only.
pub const WRITABLE: u8 = 8;
const PAGES: u8 = 12;
/// Number of slots of a ring of packets.
const SLOTS: u32 = 256;
/// Upper bound on the packets of a poll. A switch takes 32.
const MAX_POLL: u8 = 64;
/// Upper bound on the loads of a ring in one call: every slot of both rings, a few words each, and the
/// indexes.
const MAX_LOADS: u64 = 4 * 2 * SLOTS as u64 + 64;
/// Limits on the mapped pages, to choose from.
const MAPPED: [usize; 4] = [64, 1, 3, 16];

/// Bit of the first byte: the front end takes frames of more than a page. The bits below it are the
/// [mode](Mode).
pub const SG: u8 = 1 << 2;
/// Bit of the first byte: the front end wants only the multicast frames that it names.
const FILTER: u8 = 1 << 3;

operations! {
    /// One step of a script. Pages are numbers of granted ones, and of none from 12 on.
    Step {
        /// Writes the next request to send.
        Send { page: u8, offset: u16, flags: u16, id: u16, size: u16 },
        /// Writes an extra info slot in place of the next request.
        Extra { kind: u8, more: u8, low: u16, high: u32 },
        /// Writes the next request to receive.
        Post { page: u8, id: u16 },
        /// Writes the next request on the control ring: its kind, queue, the page of its list, and how many are in that.
        Order { kind: u8, queue: u8, page: u8, count: u16 },
        /// Writes an entry into a list of grants.
        Entry { list: u8, at: u16, page: u8, flags: u16 },
        /// Publishes the requests written to a ring (sending, receiving, control), and `more` entries beyond
        /// that.
        Show { ring: u8, more: u32 },
        /// Writes eight bytes anywhere in the rings.
        Write { at: u16, value: u64 },
        /// Fills a page with a frame: of no protocol, or of TCP or UDP with a blank checksum.
        Fill { page: u8, kind: u8 },
        /// Will write one word between two loads of the back end.
        Surprise { after: u8, flip: u8, value: u64 },
        /// Makes a call of the hypervisor fail: mapping, copying, a batch of copies.
        Fail { op: u8, after: u8 },
        /// Ends a grant too early.
        Spoil { page: u8 },
        /// The back end takes packets and reads their frames.
        Poll { max: u8 },
        /// The back end answers the packets that it took.
        Complete {},
        /// The back end delivers a frame: plain, of TCP to be cut, or in more pieces.
        Deliver { len: u16, kind: u8 },
        /// The back end announces frames.
        Expect { frames: u8 },
        /// The back end publishes the frames that it delivered.
        Flush {},
        /// The back end asks for events.
        Arm { len: u16 },
        /// The back end serves the control ring.
        Control {},
        /// The back end is started again, and takes the rings over as they are.
        Again {},
    }
}

/// Addresses of the rings in the guest's memory.
const RINGS: [u64; 3] = [BASE, BASE + PAGE as u64, BASE + 2 * PAGE as u64];
/// Offset of the first slot in a ring's page.
const FIRST_SLOT: u64 = 64;
/// Bytes of a slot, by ring.
const SLOT: [u64; 3] = [12, 8, 16];

/// A packet as a second reader finds it on the ring.
struct Packet {
    /// The packet's slots, and whether each is an extra.
    slots: Vec<([u8; 12], bool)>,
    /// The packet's bytes, if it can be a frame: the pages are granted, and the sizes add up.
    bytes: Option<Vec<u8>>,
    /// True if the packet may also be refused: it has an order in it, or headers that are parsed.
    open: bool,
}

/// A burst that was taken and not answered.
struct Taken {
    /// The expected packets, unless the front end wrote meanwhile.
    packets: Option<Vec<Packet>>,
    frames: Vec<Vec<u8>>,
}

/// The front end, and the expected state of its back end.
struct Subject {
    fake: Fake,
    guest: Guest,
    granted: [Box<dyn Granted>; 2],
    pages: [Area; 2],
    config: QueueConfig,
    queue: Option<Queue<Hostile>>,
    control: Option<Control<Hostile>>,
    multicast: Multicast,
    /// Index up to which the front end has written each ring.
    next: [u32; 3],
    /// True if a grant may have changed: the content of pages cannot be predicted.
    doubtful: bool,
    burst: Option<Taken>,
    delivery: Option<Delivery>,
    reached: Reached,
}

/// The frames delivered since the last flush.
struct Delivery {
    /// Copies of the front end's pages before the first of them.
    before: Vec<Vec<u8>>,
    /// True for each page that may have been written.
    posted: [bool; PAGES as usize],
    /// Length of each frame, and whether it has an extra.
    frames: Vec<(usize, bool)>,
    /// True if the front end wrote while the back end read.
    struck: bool,
}

/// Runs a script on a back end, and panics if a check fails.
pub fn netback(input: &[u8]) -> Reached {
    run(input).unwrap_or_default()
}

fn run(input: &[u8]) -> Option<Reached> {
    let mut input = Bytes(input);
    let mut subject = Subject::new(u8::get(&mut input)?, u8::get(&mut input)?);
    subject.attach();
    while let Some(step) = Step::get(&mut input) {
        subject.step(step);
        assert!(subject.fake.mapped_pages() <= subject.config.pages, "more is mapped than may be");
    }
    Some(subject.finish())
}

impl Subject {
    /// Makes both ends. `flags`: the mode, [`SG`], and whether multicast is filtered; `pages` chooses one of
    /// [`MAPPED`].
    fn new(flags: u8, pages: u8) -> Self {
        let fake = Fake::new();
        let front = fake.domain(GUEST);
        fake.domain(HOST);
        let mut table = front.grants().expect("a table");
        let mut grant = |count: u8, access| table.grant(HOST, count.into(), access).expect("pages");
        let granted = [grant(WRITABLE, Access::Write), grant(PAGES - WRITABLE, Access::Read)];
        let area = |granted: &dyn Granted| granted.region().area(0, granted.refs().len() * PAGE);
        let mode = [Mode::Copy, Mode::Map, Mode::Persistent][usize::from(flags % 4) % 3];
        Self {
            pages: [0, 1].map(|at| area(&*granted[at]).expect("all of it")),
            granted,
            guest: Guest::new(),
            config: QueueConfig {
                mode,
                pages: MAPPED[usize::from(pages) % MAPPED.len()],
                sg: flags & SG != 0,
            },
            queue: None,
            control: None,
            multicast: Multicast::new(flags & FILTER != 0),
            next: [0; 3],
            doubtful: false,
            burst: None,
            delivery: None,
            reached: Reached::default(),
            fake,
        }
    }

    /// Starts the back end on the rings as they are.
    fn attach(&mut self) {
        (self.queue, self.control, self.burst, self.delivery) = (None, None, None, None);
        assert_eq!(self.fake.mapped_pages(), 0, "pages are still mapped");
        let host = self.fake.domain(HOST);
        let [tx, rx, control] = RINGS.map(|at| self.guest.area(at, PAGE, true));
        let foreign = || host.foreign(GUEST).expect("a front end");
        self.queue = Queue::new(tx, rx, foreign(), self.config).ok();
        self.control = Control::new(control, foreign()).ok();
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Send { page, offset, flags, id, size } => {
                let flags = TxFlags::from_bits_retain(flags);
                let slot = TxRequest { gref: self.gref(page), offset, flags, id, size }.to_slot();
                self.push(0, &slot);
            }
            Step::Extra { kind, more, low, high } => {
                let first = u32::from_le_bytes([kind, more & 1, low as u8, (low >> 8) as u8]);
                self.push(0, &[first, high, 0]);
            }
            Step::Post { page, id } => self.push(1, &RxRequest { id, gref: self.gref(page) }.to_slot()),
            Step::Order { kind, queue, page, count } => {
                let gref = if kind < 8 { count.into() } else { self.gref(page).0 };
                let data = [queue.into(), gref, count.into()];
                self.push(2, &Request { id: 7, kind: kind.into(), data }.to_slot());
            }
            Step::Entry { list, at, page, flags } => {
                let mut entry = GrefEntry::new(self.gref(page), false).to_bytes();
                entry[4..6].copy_from_slice(&flags.to_le_bytes());
                self.write(list, usize::from(at % 512) * GrefEntry::BYTES, &entry);
            }
            Step::Show { ring, more } => {
                let ring = usize::from(ring % 3);
                self.guest.write(RINGS[ring], &self.next[ring].wrapping_add(more).to_le_bytes());
            }
            Step::Write { at, value } => {
                let at = u64::from(at) % (3 * PAGE as u64 - 7);
                self.guest.write(BASE + at, &value.to_le_bytes());
            }
            Step::Fill { page, kind } => self.write(page, 0, &frame(kind)),
            Step::Surprise { after, flip, value } => {
                self.guest.plan(Surprise { after, flip: flip & 1 != 0, value });
            }
            Step::Fail { op, after } => {
                self.doubtful = true;
                self.fake.fail(HOST, [Op::Map, Op::Copy, Op::Batch][usize::from(op) % 3], after.into());
            }
            Step::Spoil { page } => {
                self.doubtful = true;
                self.fake.invalidate_grant(GUEST, self.gref(page));
            }
            Step::Again {} => self.attach(),
            Step::Control {} => self.serve_control(),
            _ => self.work(step),
        }
    }

    /// Carries out a step of the back end, as the owner of a queue does.
    fn work(&mut self, step: Step) {
        let Some(mut queue) = self.queue.take() else { return };
        let broken = queue.fault();
        let (_, loads, struck) = self.guest.clone().watch(|| match step {
            Step::Poll { max } => self.poll(&mut queue, usize::from(max % (MAX_POLL + 1))),
            Step::Complete {} => self.complete(&mut queue),
            Step::Deliver { len, kind } => self.deliver(&mut queue, len.into(), kind),
            Step::Expect { frames } => queue.expect(frames.into()),
            Step::Flush {} => self.flush(&mut queue),
            Step::Arm { len } => {
                queue.arm();
                queue.arm_receive(len.into());
                queue.has_packets();
            }
            _ => {}
        });
        assert!(loads <= MAX_LOADS, "{loads} loads in one call");
        assert!(broken.is_none() || queue.fault().is_some(), "a fault stays");
        if struck {
            if let Some(burst) = &mut self.burst {
                burst.packets = None;
            }
            if let Some(delivery) = &mut self.delivery {
                delivery.struck = true;
            }
        }
        self.reached.broken |= queue.fault().is_some();
        if self.burst.is_none() && self.delivery.is_none() {
            let (cached, fixed) = queue.mapped();
            assert_eq!(self.fake.mapped_pages(), cached + fixed, "a burst's pages stay mapped");
        }
        self.queue = Some(queue);
    }

    /// Takes packets and reads their frames.
    fn poll(&mut self, queue: &mut Queue<Hostile>, max: usize) {
        let ring = self.ring(0);
        let mut at = queue.positions()[0].0;
        let shown = word(&ring, 0).wrapping_sub(at);
        let (broken, pending) = (queue.fault().is_some(), self.burst.is_some());
        let taken = queue.poll(max, &mut self.multicast);
        assert!(taken <= max && (taken == 0 || !pending), "{taken} packets of {max}");
        let lent = queue.lend().expect("a queue that has its pages");
        assert_eq!(queue.deliver(Header::default(), &[0; 60], &[]), Err(Refused::Lent));
        let mut frames = Vec::new();
        if !pending {
            look(&lent, &mut frames);
        }
        queue.give_back(lent);
        self.reached.frames += frames.len();
        self.reached.chains += taken;
        assert!(frames.len() <= taken, "{} frames of {taken} packets", frames.len());
        if taken == 0 {
            return;
        }
        let fault = queue.fault().is_some();
        let read: Option<Vec<_>> = (0..taken).map(|_| self.packet(&ring, &mut at)).collect();
        let moved = at.wrapping_sub(queue.positions()[0].0);
        // The result is predicted only if no surprise was due and the ring is not broken.
        let packets = read.filter(|_| !fault && !broken && shown <= SLOTS && moved == 0);
        self.burst = Some(Taken { packets, frames });
    }

    /// Answers the burst, and checks the answers.
    fn complete(&mut self, queue: &mut Queue<Hostile>) {
        let [(end, start), _] = queue.positions();
        queue.complete();
        let Some(Taken { packets, frames }) = self.burst.take() else { return };
        if queue.fault().is_some() {
            return;
        }
        assert_eq!(queue.positions()[0], (end, end), "every slot that was taken is answered");
        let (ring, mut at) = (self.ring(0), start);
        let mut frames = frames.into_iter();
        let Some(packets) = packets else { return };
        for packet in packets {
            let mut first = None;
            for (request, extra) in packet.slots {
                let TxResponse { id, status } = TxResponse::from_slot(tx_words(&slot(&ring, at)));
                at = at.wrapping_add(1);
                assert!(
                    extra == (status == NULL) && [OKAY, ERROR, NULL].contains(&status),
                    "status {status}"
                );
                assert!(extra || id == TxRequest::from_slot(tx_words(&request)).id, "an answer to another");
                first.get_or_insert(status);
            }
            match (packet.bytes, first) {
                (Some(bytes), Some(OKAY)) => {
                    assert!(frames.next() == Some(bytes), "a frame's bytes");
                }
                (Some(_), Some(ERROR)) => assert!(packet.open || self.doubtful, "a good packet was refused"),
                (None, Some(OKAY)) => assert!(packet.open, "a bad packet was taken"),
                _ => {}
            }
        }
        assert_eq!((at, frames.next()), (end, None), "frames that nobody sent");
    }

    /// Returns the next packet of a ring, read once more and naively; `None` if it breaks a rule.
    fn packet(&self, ring: &[u8], at: &mut u32) -> Option<Packet> {
        let mut slots = Vec::new();
        let mut next = |extra| {
            let slot: [u8; 12] = slot(ring, *at);
            *at = at.wrapping_add(1);
            slots.push((slot, extra));
            slot
        };
        let first = TxRequest::from_slot(tx_words(&next(false)));
        let mut open = first.flags.contains(TxFlags::CSUM_BLANK);
        let (mut order, mut kinds) = (false, 0u32);
        if first.flags.contains(TxFlags::EXTRA_INFO) {
            loop {
                let [kind, flags, ..] = next(true);
                if !(1..=4).contains(&kind) || kinds >> kind & 1 != 0 {
                    return None;
                }
                kinds |= 1 << kind;
                order |= kind == 2 || kind == 3;
                open |= kind == 1;
                if flags & 1 == 0 {
                    break;
                }
            }
        }
        let mut pieces = vec![first];
        while pieces[pieces.len() - 1].flags.contains(TxFlags::MORE_DATA) {
            let piece = TxRequest::from_slot(tx_words(&next(false)));
            pieces.push(piece);
            if pieces.len() > 20 || usize::from(piece.offset) + usize::from(piece.size) > PAGE {
                return None;
            }
        }
        if order {
            return Some(Packet { slots, bytes: None, open: true });
        }
        let rest: u32 = pieces[1..].iter().map(|piece| u32::from(piece.size)).sum();
        let own = u32::from(first.size).checked_sub(rest).filter(|_| pieces.len() <= 18);
        let Some(own) = own else { return Some(Packet { slots, bytes: None, open: false }) };
        if u32::from(first.offset) + own > PAGE as u32 {
            return None;
        }
        if first.size < 14 {
            return Some(Packet { slots, bytes: None, open: false });
        }
        pieces[0].size = own as u16;
        let mut bytes = Some(Vec::new());
        for TxRequest { gref, offset, size, .. } in pieces.into_iter().filter(|piece| piece.size > 0) {
            match (self.find(gref), &mut bytes) {
                (Some(page), Some(bytes)) => bytes.extend(self.read(page, offset.into(), size.into())),
                _ => bytes = None,
            }
        }
        Some(Packet { slots, bytes, open })
    }

    /// Delivers a frame to the front end.
    fn deliver(&mut self, queue: &mut Queue<Hostile>, len: usize, kind: u8) {
        let rx = self.ring(1);
        let posted: Vec<_> =
            (0..SLOTS).filter_map(|at| self.find(GrantRef(word(&slot::<8>(&rx, at), 4)))).collect();
        if self.delivery.is_none() {
            let before = (0..PAGES).map(|page| self.read(page.into(), 0, PAGE)).collect();
            let new = Delivery { before, posted: [false; PAGES as usize], frames: Vec::new(), struck: false };
            self.delivery = Some(new);
        }
        let delivery = self.delivery.as_mut().expect("just made");
        posted.into_iter().for_each(|page| delivery.posted[page] = true);
        let cut = kind & 1 != 0;
        let mut header = Header::default();
        if cut {
            header =
                Header { flags: F_NEEDS_CSUM, gso_type: GSO_TCPV4, gso_size: 1448, hdr_len: 54, ..header };
            (header.csum_start, header.csum_offset) = (34, 16);
        }
        let bytes: Vec<u8> = (0..len).map(|at| (at % 251) as u8 ^ kind).collect();
        let (first, rest) = bytes.split_at(len.min(64));
        let rest: Vec<_> = rest.chunks(usize::from(kind >> 1) * 64 + 100).map(ReadSlice::from).collect();
        match queue.deliver(header, first, &rest) {
            Ok(()) => delivery.frames.push((len, cut)),
            Err(Refused::TooBig) => assert!(len > if self.config.sg { 65535 } else { PAGE }),
            Err(Refused::Broken) => assert!(queue.fault().is_some()),
            Err(Refused::NoBuffers) => {}
            Err(refused @ (Refused::Lent | Refused::Offload)) => panic!("{refused}"),
        }
    }

    /// Flushes the queue, and checks the answers, and that only pages that the front end posted have changed.
    fn flush(&mut self, queue: &mut Queue<Hostile>) {
        let mut at = queue.positions()[1].1;
        queue.flush();
        let Some(Delivery { before, posted, frames, struck }) = self.delivery.take() else { return };
        if struck {
            return;
        }
        for page in 0..PAGES {
            let may = posted[usize::from(page)] && page < WRITABLE;
            let same = || self.read(page.into(), 0, PAGE) == before[usize::from(page)];
            assert!(may || same(), "page {page} was not posted, and has changed");
        }
        if queue.fault().is_some() {
            return;
        }
        let rx = self.ring(1);
        let mut next = || {
            let bytes: [u8; 8] = slot(&rx, at);
            at = at.wrapping_add(1);
            RxResponse::from_slot([word(&bytes, 0), word(&bytes, 4)])
        };
        for (len, extra) in &frames {
            let mut left = *len;
            for number in 0.. {
                let response = next();
                let here = left.min(PAGE);
                left -= here;
                assert!(
                    [here as i16, ERROR].contains(&response.status) && response.offset == 0,
                    "{response:?}"
                );
                let flags = response.flags.bits();
                assert_eq!(flags & 12, (u16::from(left > 0) * 4) | (u16::from(number == 0 && *extra) * 8));
                if number == 0 && *extra {
                    next();
                }
                if left == 0 {
                    break;
                }
            }
        }
        self.reached.longest += frames.len();
        assert_eq!(at, queue.positions()[1].1, "as many answers as pages that were spent");
    }

    fn serve_control(&mut self) {
        let Some(mut control) = self.control.take() else { return };
        let guest = self.guest.clone();
        let (_, loads, _) = guest.watch(|| match &mut self.queue {
            Some(queue) => control.poll(&mut [queue]),
            None => control.poll(&mut []),
        });
        assert!(loads <= MAX_LOADS, "{loads} loads in one call");
        control.arm();
        self.reached.broken |= control.fault().is_some();
        self.control = Some(control);
        // An answer may have been written into a list on a page.
        let now: Vec<_> = (0..PAGES).map(|page| self.read(page.into(), 0, PAGE)).collect();
        if let Some(delivery) = &mut self.delivery {
            delivery.before = now;
        }
    }

    /// Ends both sides, and checks that nothing is left mapped or granted.
    fn finish(self) -> Reached {
        let Self { fake, granted, pages, queue, control, reached, .. } = self;
        drop((queue, control));
        assert_eq!(fake.mapped_pages(), 0, "pages are still mapped");
        drop(pages);
        granted.into_iter().for_each(|granted| assert_eq!(granted.end(), 0));
        fake.assert_nothing_left();
        reached
    }

    /// Writes the next slot of a ring, without publishing it.
    fn push(&mut self, ring: usize, words: &[u32]) {
        let size = SLOT[ring];
        let at = RINGS[ring] + FIRST_SLOT + size * u64::from(self.next[ring] % slots(ring));
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.guest.write(at, &bytes);
        self.next[ring] = self.next[ring].wrapping_add(1);
    }

    fn ring(&self, ring: usize) -> Vec<u8> {
        self.guest.read(RINGS[ring], PAGE).expect("a page")
    }

    fn gref(&self, page: u8) -> GrantRef {
        let refs = self.granted.iter().flat_map(|granted| granted.refs()).copied();
        refs.into_iter().nth(page.into()).unwrap_or_else(|| GrantRef(1 << 20 | u32::from(page)))
    }

    /// Returns the number of the page that a reference grants.
    fn find(&self, gref: GrantRef) -> Option<usize> {
        self.granted.iter().flat_map(|granted| granted.refs()).position(|known| *known == gref)
    }

    fn place(&self, page: usize) -> (&Area, usize) {
        let writable = usize::from(WRITABLE);
        if page < writable {
            (&self.pages[0], page * PAGE)
        } else {
            (&self.pages[1], (page - writable) * PAGE)
        }
    }

    fn read(&self, page: usize, offset: usize, len: usize) -> Vec<u8> {
        let (area, start) = self.place(page);
        let mut bytes = vec![0; len];
        area.read(start + offset, len).expect("in a page").copy_to(&mut bytes);
        bytes
    }

    /// Writes to a page as the front end that owns it.
    fn write(&mut self, page: u8, offset: usize, bytes: &[u8]) {
        let page = usize::from(page % PAGES);
        let (area, start) = self.place(page);
        area.write(start + offset, bytes.len()).expect("in a page").copy_from(bytes);
        if let Some(delivery) = &mut self.delivery {
            // A burst that was taken is not affected: its frames were read before.
            delivery.before[page][offset..offset + bytes.len()].copy_from_slice(bytes);
        }
    }
}

/// Copies the frames of a burst.
fn look(lent: &Lent, frames: &mut Vec<Vec<u8>>) {
    let mut burst = Burst::new();
    lent.frames(&mut burst);
    for frame in burst.frames() {
        let mut bytes = Vec::new();
        burst.flatten(frame, &mut bytes);
        assert!(frame.header.check(bytes.len()).is_ok(), "a header that contradicts itself");
        assert_eq!((bytes.len(), bytes.len() >= 14), (frame.len as usize, true));
        assert_eq!(frame.prefix(), &bytes[..frame.prefix().len()], "the prefix is a copy");
        frames.push(bytes);
    }
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn tx_words(slot: &[u8; 12]) -> [u32; 3] {
    [word(slot, 0), word(slot, 4), word(slot, 8)]
}

/// Returns the number of slots of a ring.
fn slots(ring: usize) -> u32 {
    1 << ((PAGE as u64 - FIRST_SLOT) / SLOT[ring]).ilog2()
}

/// Returns the bytes of a slot of a ring of packets.
fn slot<const N: usize>(ring: &[u8], at: u32) -> [u8; N] {
    let at = FIRST_SLOT as usize + N * (at % SLOTS) as usize;
    ring[at..at + N].try_into().expect("a slot")
}

/// Fills a page with a frame: no protocol, TCP or UDP over IPv4.
fn frame(kind: u8) -> Vec<u8> {
    let mut bytes: Vec<u8> = (0..PAGE).map(|at| (at % 253) as u8 ^ kind).collect();
    let (ether, proto) = [([0x88, 0xb5], 0), ([8, 0], 6), ([8, 0], 17)][usize::from(kind) % 3];
    bytes[12..14].copy_from_slice(&ether);
    if proto > 0 {
        bytes[14..34]
            .copy_from_slice(&[0x45, 0, 0, 0, 0, 0, 0, 0, 64, proto, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
        bytes[46] = 0x50;
    }
    bytes
}
