//! The test bed of this folder: a session on one end of a socket, raw messages written to the
//! other, and a device that records the calls that it gets.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use ringferry_memory::{DirtyLog, GuestMemory, Region, RegionSpec, SharedMem, Words};
use ringferry_ring::inflight::POSITION;
use ringferry_ring::{Parts, part_bytes};
use ringferry_sys::closer::Closer;
use ringferry_sys::eventfd::EventFd;
use ringferry_sys::socket::Stream;
use ringferry_vhost_user::message::{
    F_PROTOCOL_FEATURES, F_RING_PACKED, F_VERSION_1, FLAG_NEED_REPLY, FLAG_REPLY, Header, MemoryRegion,
    MemoryTable, Request, SingleRegion, VERSION, VringAddr, VringState,
};
use ringferry_vhost_user::{
    Device, Offer, Progress, ProtocolFeatures, Resources, RingSetup, Session, SessionError, Unanswered,
};
use zerocopy::{FromBytes, IntoBytes};

/// User address at which the front end's memory begins.
pub const USER: u64 = 0x7f12_3400_0000;
/// Entries of the rings the rig describes.
pub const RING_SIZE: u16 = 256;
/// Memory given to each ring.
pub const RING_SPAN: u64 = 0x4000;
/// A feature to switch on and off.
pub const F_MRG_RXBUF: u64 = 1 << 15;

/// One call of the session to the device.
#[derive(Debug, PartialEq, Eq, Clone, Copy)]
pub enum Event {
    Features(u64),
    Memory(usize),
    Started {
        index: u16,
        size: u16,
        base: u16,
        enabled: bool,
    },
    Call {
        index: u16,
        polled: bool,
    },
    Enabled(u16, bool),
    Stopped(u16),
    /// Running rings got a dirty log, or lost it.
    Logged {
        rings: usize,
        log: bool,
    },
    Mtu(u16),
    Announce([u8; 6]),
    Status(u8),
    Reset,
}

/// A device that records every call of the session and asserts that it is allowed.
#[derive(Default)]
pub struct Recorder {
    pub events: Vec<Event>,
    /// Rings that run. Calls that a running device may not get are assertions.
    pub rings: BTreeMap<u16, RingSetup>,
    /// Number of entries that the device pretends to have processed by the time a ring is stopped.
    pub processed: u16,
    pub config: Vec<u8>,
    /// The device cannot change the log of running rings.
    pub restarts_for_logs: bool,
}

impl Recorder {
    pub fn take(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.events)
    }
}

impl Device for Recorder {
    fn features_acked(&mut self, features: u64) {
        self.events.push(Event::Features(features));
    }

    fn memory_changed(&mut self, memory: Option<Arc<GuestMemory>>) {
        assert!(self.rings.is_empty(), "a ring ran while the map changed");
        self.events.push(Event::Memory(memory.map_or(0, |memory| memory.regions().len())));
    }

    fn ring_started(&mut self, index: u16, ring: RingSetup) {
        let Parts { size, desc, driver, device } = &ring.parts;
        let event = Event::Started { index, size: *size, base: ring.base, enabled: ring.enabled };
        assert!(*size > 0 && (ring.packed() || size.is_power_of_two()));
        assert!(!ring.packed() || ring.base & 0x7fff < *size);
        assert_eq!([desc.len(), driver.len(), device.len()], part_bytes(*size, ring.packed()));
        // Every word of the ring can be reached, and of what it is tracked in.
        desc.load64(desc.len() - 8);
        driver.load16(driver.len() - 2);
        device.load16(device.len() - 2);
        if let Some(part) = &ring.inflight {
            assert!(ring.packed());
            assert_eq!(part.len(), 32 + 32 * usize::from(*size));
            assert_eq!(part.load64(POSITION), position_word(ring.base, ring.base));
        }
        self.events.push(event);
        assert!(self.rings.insert(index, ring).is_none(), "started twice");
    }

    fn ring_call_changed(&mut self, index: u16, call: Option<EventFd>) {
        assert!(self.rings.contains_key(&index), "not running");
        self.events.push(Event::Call { index, polled: call.is_none() });
        self.rings.get_mut(&index).unwrap().call = call;
    }

    fn ring_enabled(&mut self, index: u16, enabled: bool) {
        assert!(self.rings.contains_key(&index), "not running");
        self.events.push(Event::Enabled(index, enabled));
    }

    fn ring_stopped(&mut self, index: u16) -> u16 {
        self.events.push(Event::Stopped(index));
        let ring = self.rings.remove(&index).expect("stopped without having run");
        if !ring.packed() {
            return ring.base.wrapping_add(self.processed);
        }
        (0..self.processed).fold(ring.base, |at, _| {
            let wraps = at & 0x7fff == ring.parts.size - 1;
            if wraps { at & 0x8000 ^ 0x8000 } else { at + 1 }
        })
    }

    fn rings_logged(&mut self, rings: &[u16], log: Option<&Arc<DirtyLog>>) -> Result<bool, Unanswered> {
        assert!(!rings.is_empty());
        if self.restarts_for_logs {
            return Ok(false);
        }
        for index in rings {
            self.rings.get_mut(index).expect("a running ring").log = log.cloned();
        }
        self.events.push(Event::Logged { rings: rings.len(), log: log.is_some() });
        Ok(true)
    }

    fn config(&self, offset: usize, buf: &mut [u8]) -> bool {
        match self.config.get(offset..offset + buf.len()) {
            Some(data) => {
                buf.copy_from_slice(data);
                true
            }
            None => false,
        }
    }

    fn set_config(&mut self, offset: usize, data: &[u8]) -> bool {
        match self.config.get_mut(offset..offset + data.len()) {
            Some(place) => {
                place.copy_from_slice(data);
                true
            }
            None => false,
        }
    }

    fn mtu_set(&mut self, mtu: u16) -> bool {
        self.events.push(Event::Mtu(mtu));
        mtu <= 9000
    }

    fn announce(&mut self, mac: [u8; 6]) {
        self.events.push(Event::Announce(mac));
    }

    fn status(&mut self, status: u8) {
        self.events.push(Event::Status(status));
    }

    fn reset(&mut self) {
        assert!(self.rings.is_empty(), "a ring ran during a reset");
        self.events.push(Event::Reset);
    }
}

/// The word in which a packed ring's part of an in-flight region has its position.
pub fn position_word(new: u16, old: u16) -> u64 {
    let index = |position| u64::from(position & 0x7fff);
    let wrap = |position| u64::from(position >> 15);
    index(new) | index(old) << 16 | wrap(new) << 32 | wrap(old) << 40
}

/// The offer of the rig's sessions, with split rings.
pub fn offer() -> Offer {
    let mut offer = Offer::net(F_VERSION_1 | F_MRG_RXBUF, 2);
    offer.protocol |= ProtocolFeatures::CONFIG;
    offer
}

/// The offer of the rig's sessions, with packed rings.
pub fn packed_offer() -> Offer {
    let mut offer = offer();
    offer.features |= F_RING_PACKED;
    offer
}

pub struct Rig {
    pub peer: Stream,
    pub session: Session,
    pub dev: Recorder,
}

impl Rig {
    pub fn new() -> Rig {
        Rig::with(offer())
    }

    pub fn with(offer: Offer) -> Rig {
        Rig::with_resources(offer, Resources { closer: Closer::inline(), ..Resources::default() })
    }

    pub fn with_resources(offer: Offer, resources: Resources) -> Rig {
        let (peer, theirs) = Stream::pair().unwrap();
        peer.set_nonblocking(true).unwrap();
        let session = Session::with_resources(theirs, offer, resources).unwrap();
        Rig { peer, session, dev: Recorder { config: (0..16).collect(), ..Recorder::default() } }
    }

    /// A rig on which everything was agreed on, without memory or rings.
    pub fn negotiated() -> Rig {
        let mut rig = Rig::new();
        let protocol = offer().protocol.bits();
        rig.tell(Request::SetProtocolFeatures, protocol.as_bytes(), &[]);
        assert!(rig.ack(Request::SetFeatures, (F_VERSION_1 | F_PROTOCOL_FEATURES).as_bytes(), &[]));
        rig.dev.take();
        rig
    }

    /// A rig on which a dirty log was agreed on, with split or packed rings.
    pub fn logging(packed: bool) -> Rig {
        let offer = if packed { packed_offer() } else { offer() }.with_dirty_log();
        let mut rig = Rig::with(offer);
        rig.tell(Request::SetProtocolFeatures, offer.protocol.bits().as_bytes(), &[]);
        assert!(rig.features(F_VERSION_1 | if packed { F_RING_PACKED } else { 0 }));
        rig.dev.take();
        rig
    }

    /// A rig on which packed rings were agreed on.
    pub fn packed() -> Rig {
        let mut rig = Rig::with(packed_offer());
        rig.tell(Request::SetProtocolFeatures, packed_offer().protocol.bits().as_bytes(), &[]);
        assert!(rig.features(F_VERSION_1 | F_RING_PACKED));
        rig.dev.take();
        rig
    }

    /// Agrees on features, protocol features beside.
    pub fn features(&mut self, features: u64) -> bool {
        self.ack(Request::SetFeatures, (features | F_PROTOCOL_FEATURES).as_bytes(), &[])
    }

    /// Writes a message as it is.
    pub fn send(&mut self, request: u32, flags: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) {
        let header = Header { request, flags, size: payload.len() as u32 };
        let message = [header.as_bytes(), payload].concat();
        assert_eq!(self.peer.send(&message, fds).unwrap(), message.len());
    }

    /// Has the session serve what was sent.
    pub fn serve(&mut self) -> Result<Progress, SessionError> {
        self.session.on_readable(&mut self.dev)
    }

    /// The reply that waits, if one does.
    pub fn reply(&mut self) -> Option<(Header, Vec<u8>)> {
        let (header, payload, fds) = self.reply_with_fds()?;
        assert!(fds.is_empty());
        Some((header, payload))
    }

    /// The reply that waits, if one does, and what came with it.
    pub fn reply_with_fds(&mut self) -> Option<(Header, Vec<u8>, Vec<OwnedFd>)> {
        let mut header = [0; Header::LEN];
        let mut fds = Vec::new();
        match self.peer.recv(&mut header, &mut fds) {
            Ok(got) if got.bytes == Header::LEN => {}
            Ok(got) => {
                assert_eq!(got.bytes, 0, "a reply cut short");
                return None;
            }
            Err(err) => {
                assert_eq!(err.kind(), std::io::ErrorKind::WouldBlock);
                return None;
            }
        }
        let header = Header::read_from_bytes(&header).unwrap();
        let mut payload = vec![0; header.size as usize];
        if !payload.is_empty() {
            assert_eq!(self.peer.recv(&mut payload, &mut fds).unwrap().bytes, payload.len());
        }
        Some((header, payload, fds))
    }

    /// Sends a message that asks for no reply.
    pub fn tell(&mut self, request: Request, payload: &[u8], fds: &[BorrowedFd<'_>]) {
        self.send(request as u32, VERSION, payload, fds);
        self.serve().unwrap();
        assert!(self.reply().is_none(), "{request} was answered");
    }

    /// Sends a message with `NEED_REPLY`; returns true if it was served.
    pub fn ack(&mut self, request: Request, payload: &[u8], fds: &[BorrowedFd<'_>]) -> bool {
        self.send(request as u32, VERSION | FLAG_NEED_REPLY, payload, fds);
        self.serve().unwrap();
        let (header, payload) = self.reply().unwrap_or_else(|| panic!("{request} was not acknowledged"));
        assert_eq!((header.request, header.flags), (request as u32, VERSION | FLAG_REPLY));
        assert!(self.reply().is_none(), "{request} was answered twice");
        u64::read_from_bytes(&payload).unwrap() == 0
    }

    /// Sends a message that has a reply of its own, and returns the reply.
    pub fn ask(&mut self, request: Request, payload: &[u8]) -> Vec<u8> {
        self.send(request as u32, VERSION, payload, &[]);
        self.serve().unwrap();
        let (header, payload) = self.reply().unwrap_or_else(|| panic!("{request} was not answered"));
        assert_eq!((header.request, header.flags), (request as u32, VERSION | FLAG_REPLY));
        payload
    }

    pub fn ask_u64(&mut self, request: Request) -> u64 {
        u64::read_from_bytes(&self.ask(request, &[])).unwrap()
    }

    pub fn state(&mut self, request: Request, index: u32, num: u32) -> bool {
        self.ack(request, VringState { index, num }.as_bytes(), &[])
    }

    pub fn base(&mut self, index: u32) -> u32 {
        let reply = self.ask(Request::GetVringBase, VringState { index, num: 0 }.as_bytes());
        let reply = VringState::read_from_bytes(&reply).unwrap();
        assert_eq!(reply.index, index);
        reply.num
    }

    pub fn mem_table(&mut self, regions: &[(MemoryRegion, &SharedMem)]) -> bool {
        let fds: Vec<_> = regions.iter().map(|(_, mem)| mem.fd()).collect();
        self.ack(Request::SetMemTable, &mem_table(regions.iter().map(|(region, _)| *region)), &fds)
    }

    pub fn slot(&mut self, request: Request, region: MemoryRegion, fds: &[BorrowedFd<'_>]) -> bool {
        self.ack(request, SingleRegion { padding: 0, region }.as_bytes(), fds)
    }

    /// Kick, call or error event.
    pub fn event(&mut self, request: Request, payload: u64, fds: &[BorrowedFd<'_>]) -> bool {
        self.ack(request, payload.as_bytes(), fds)
    }

    /// Size, base, addresses and kick of a ring, in that order.
    pub fn start(&mut self, index: u32, base: u32) -> bool {
        let event = EventFd::new().unwrap();
        self.state(Request::SetVringNum, index, RING_SIZE.into())
            && self.state(Request::SetVringBase, index, base)
            && self.ack(Request::SetVringAddr, ring_addr(index).as_bytes(), &[])
            && self.event(Request::SetVringKick, index.into(), &[event.as_fd()])
    }
}

/// The addresses of ring `index` in the rig's memory.
pub fn ring_addr(index: u32) -> VringAddr {
    let start = USER + u64::from(index) * RING_SPAN;
    VringAddr { index, flags: 0, desc: start, avail: start + 0x1000, used: start + 0x2000, log: 0 }
}

pub fn mem_table(regions: impl ExactSizeIterator<Item = MemoryRegion>) -> Vec<u8> {
    let mut payload = MemoryTable { count: regions.len() as u32, padding: 0 }.as_bytes().to_vec();
    for region in regions {
        payload.extend_from_slice(region.as_bytes());
    }
    payload
}

/// Memory for the rings of the rig.
pub fn guest(size: usize) -> (MemoryRegion, SharedMem) {
    let mem = SharedMem::new("guest", size).unwrap();
    (MemoryRegion { guest_addr: 0, size: mem.size() as u64, user_addr: USER, mmap_offset: 0 }, mem)
}

/// The front end's own view of a region.
pub fn view(region: MemoryRegion, mem: &SharedMem) -> GuestMemory {
    GuestMemory::new(vec![Region::map(mem.fd(), RegionSpec::from(region)).unwrap()]).unwrap()
}

/// Counts the descriptors of this process that refer to the file of `fd`.
pub fn copies_of(fd: impl AsFd) -> usize {
    let fd = fd.as_fd().try_clone_to_owned().unwrap();
    let wanted = identity(&std::os::fd::AsRawFd::as_raw_fd(&fd).to_string()).unwrap();
    let all = std::fs::read_dir("/proc/self/fd").unwrap();
    let copies = all.filter(|entry| {
        let name = entry.as_ref().unwrap().file_name().into_string().unwrap();
        identity(&name) == Some(wanted.clone())
    });
    copies.count() - 1 // the clone made here
}

/// Waits until all descriptors of this process that refer to the file of `fd`, but that one, are
/// closed, which a thread of its own does.
#[track_caller]
pub fn until_closed(fd: impl AsFd) {
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while copies_of(&fd) != 1 {
        assert!(std::time::Instant::now() < deadline, "a descriptor is not closed");
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

/// Serves the session until it notices that its peer has closed the connection. That may take a
/// while: a test that reads the descriptor's entry in /proc meanwhile, as [`copies_of`] does, holds
/// the open file.
#[track_caller]
pub fn until_gone(session: &mut Session, dev: &mut Recorder) -> SessionError {
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
    loop {
        if let Err(error) = session.on_readable(dev) {
            return error;
        }
        assert!(std::time::Instant::now() < deadline, "the session does not notice that its peer is gone");
        std::thread::yield_now();
    }
}

/// Identifies an open file. Eventfds share an inode and are told apart by their id.
fn identity(fd: &str) -> Option<(u64, u64, String)> {
    let meta = std::fs::metadata(format!("/proc/self/fd/{fd}")).ok()?;
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{fd}")).ok()?;
    let event = info.lines().find(|line| line.starts_with("eventfd-id")).unwrap_or("");
    Some((meta.dev(), meta.ino(), event.to_owned()))
}
