//! A vhost-user back end's session against a hostile front end.
//!
//! For any messages and descriptors, in any pieces: there is no panic, the device is told of rings only as
//! they are, nothing stays open or mapped when the session is gone, and a well-behaved front end is served
//! afterwards.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Instant;

use ringferry_memory::{DirtyLog, GuestMemory, SharedMem, Words};
use ringferry_ring::part_bytes;
use ringferry_sys::closer::Closer;
use ringferry_sys::eventfd::EventFd;
use ringferry_sys::socket::Stream;
use ringferry_vhost_user::message::{
    F_LOG_ALL, F_PROTOCOL_FEATURES, F_RING_PACKED, F_VERSION_1, FLAG_NEED_REPLY, Header, LogBase, MAX_FDS,
    MemoryRegion, MemoryTable, Request, SingleRegion, VERSION, VringAddr, VringState,
};
use ringferry_vhost_user::{Device, Offer, ProtocolFeatures, Resources, RingSetup, Session, Unanswered};
use serde_json::Value;
use zerocopy::IntoBytes;

use crate::ring::Reached;
use crate::script::{Bytes, Field};

/// Address at which guest memory begins in the front end's address space.
pub const USER: u64 = 0x7000_0000_0000;
/// Size of the file that is guest memory, in bytes.
pub const MEMORY: u64 = 0x1_0000;
/// Number of queue pairs on offer.
const PAIRS: u16 = 2;
/// Descriptors a session may hold at a time: three events for each ring, twice while it runs, the socket for
/// the back end's requests, and those of a message that has not come to its end.
const MAX_HELD: usize = 6 * 2 * PAIRS as usize + 1 + MAX_FDS + MAX_FILES;
/// Files of memory, of the dirty log and of the in-flight region that a session keeps for a hand-over.
const MAX_FILES: usize = 32 + 2;

/// A message, or some bytes that are none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Number of the request in the protocol.
    pub request: u8,
    /// Bit 0: wants a reply, 1: the header promises one byte more than follows, 2: a reply itself, 3: another
    /// version, 4: only the payload is sent, 5: the session is not served before the next message, 6: another process takes the session over first, 7: a number of
    /// the state that it gets is another one, by the payload.
    pub flags: u8,
    /// Descriptors: bits 0 and 1 say how many, then two bits for each what: an event, memory, a pipe, a
    /// socket.
    pub fds: u8,
    /// Bytes that follow the header.
    pub payload: Vec<u8>,
}

impl Field for Message {
    fn get(bytes: &mut Bytes<'_>) -> Option<Self> {
        let (request, flags, fds) = (u8::get(bytes)?, u8::get(bytes)?, u8::get(bytes)?);
        let len = usize::from(u8::get(bytes)?).min(bytes.0.len());
        let (payload, rest) = bytes.0.split_at(len);
        let message = Self { request, flags, fds, payload: payload.to_vec() };
        bytes.0 = rest;
        Some(message)
    }

    fn put(&self, out: &mut Vec<u8>) {
        out.extend([self.request, self.flags, self.fds, self.payload.len() as u8]);
        out.extend(&self.payload);
    }
}

/// A device that checks the promises of the session.
#[derive(Default)]
struct Witness {
    rings: BTreeMap<u16, RingSetup>,
}

impl Device for Witness {
    fn features_acked(&mut self, _: u64) {}

    fn memory_changed(&mut self, _: Option<Arc<GuestMemory>>) {
        assert!(self.rings.is_empty(), "a ring ran while the map changed");
    }

    fn ring_started(&mut self, index: u16, ring: RingSetup) {
        let size = ring.parts.size;
        assert!(index < 2 * PAIRS && size > 0 && (ring.packed() || size.is_power_of_two()));
        assert!(!ring.packed() || ring.base & 0x7fff < size);
        let areas = [&ring.parts.desc, &ring.parts.driver, &ring.parts.device];
        assert_eq!(areas.map(Words::len), part_bytes(size, ring.packed()));
        for area in areas {
            // The last word of the area can be read.
            area.load16(area.len() - 2);
        }
        assert!(self.rings.insert(index, ring).is_none(), "started twice");
    }

    fn ring_call_changed(&mut self, index: u16, call: Option<EventFd>) {
        self.rings.get_mut(&index).expect("a ring that runs").call = call;
    }

    fn ring_enabled(&mut self, index: u16, enabled: bool) {
        self.rings.get_mut(&index).expect("a ring that runs").enabled = enabled;
    }

    fn rings_logged(&mut self, rings: &[u16], log: Option<&Arc<DirtyLog>>) -> Result<bool, Unanswered> {
        for index in rings {
            self.rings.get_mut(index).expect("a ring that runs").log = log.cloned();
        }
        Ok(true)
    }

    fn ring_stopped(&mut self, index: u16) -> u16 {
        self.rings.remove(&index).expect("a ring that runs").base
    }
}

/// The descriptors that a front end can send, by kind.
struct Files {
    event: EventFd,
    memory: SharedMem,
    pipe: std::io::PipeWriter,
    _reader: std::io::PipeReader,
    socket: Stream,
    _other: Stream,
}

impl Files {
    fn new() -> std::io::Result<Self> {
        let (reader, pipe) = std::io::pipe()?;
        let (socket, other) = Stream::pair()?;
        let memory = SharedMem::new("fuzz", MEMORY as usize)?;
        Ok(Self { event: EventFd::new()?, memory, pipe, _reader: reader, socket, _other: other })
    }

    fn choose(&self, fds: u8) -> Vec<BorrowedFd<'_>> {
        let all = [self.event.as_fd(), self.memory.fd(), self.pipe.as_fd(), self.socket.as_fd()];
        (0..fds & 3).map(|i| all[usize::from(fds >> (2 + 2 * i) & 3)]).collect()
    }
}

/// A session and the front end's end of its connection.
struct Rig {
    peer: Stream,
    session: Session,
    device: Witness,
}

/// What the session offers.
fn offer() -> Offer {
    let features = F_VERSION_1 | F_RING_PACKED | 1 << 15 | 1 << 28 | 1 << 29 | 1 << 35;
    let mut offer = Offer::net(features, PAIRS).with_dirty_log();
    offer.protocol |= ProtocolFeatures::CONFIG;
    offer
}

/// The test counts descriptors, so they are closed at once and not by a thread.
fn resources() -> Resources {
    Resources { closer: Closer::inline(), ..Resources::default() }
}

/// Changes one number of a state: which, and to what, is in the bytes. Returns false if there is none.
fn change_number(state: &mut Value, how: &[u8]) -> bool {
    let mut numbers = Vec::new();
    collect(state, &mut numbers);
    let (which, to) = how.split_at(how.len().min(1));
    let Some(number) = which.first().and_then(|which| {
        let count = numbers.len().max(1);
        numbers.into_iter().nth(usize::from(*which) % count)
    }) else {
        return false;
    };
    let to = to.iter().take(8).fold(0, |number: u64, byte| number << 8 | u64::from(*byte));
    *number = to.into();
    true
}

fn collect<'v>(value: &'v mut Value, numbers: &mut Vec<&'v mut Value>) {
    match value {
        Value::Number(_) => numbers.push(value),
        Value::Array(items) => items.iter_mut().for_each(|item| collect(item, numbers)),
        Value::Object(fields) => fields.values_mut().for_each(|field| collect(field, numbers)),
        _ => {}
    }
}

impl Rig {
    fn new() -> Self {
        let (peer, ours) = Stream::pair().expect("a connection");
        peer.set_nonblocking(true).expect("a socket that does not block");
        let session = Session::with_resources(ours, offer(), resources()).expect("a session");
        Self { peer, session, device: Witness::default() }
    }

    /// Sends a message; returns false if there is no room.
    fn send(&self, message: &Message, files: &Files) -> bool {
        let has = |bit: u8| u32::from(message.flags >> bit & 1);
        let header = Header {
            request: message.request.into(),
            flags: (VERSION + has(3)) | (has(0) * FLAG_NEED_REPLY) | (has(2) << 2),
            size: message.payload.len() as u32 + has(1),
        };
        let mut bytes = if has(4) == 0 { header.as_bytes().to_vec() } else { Vec::new() };
        bytes.extend(&message.payload);
        bytes.is_empty() || self.peer.send(&bytes, &files.choose(message.fds)).is_ok()
    }

    /// Hands the session over, as to another process; returns false if that does not take it, which it must if the state is as it was.
    fn hand_over(&mut self, alter: Option<&[u8]>) -> bool {
        self.session.suspend(&mut self.device).expect("a device that answers");
        assert!(self.device.rings.is_empty(), "a ring runs on");
        let mut fds = Vec::new();
        let state = self.session.state(&mut |fd, id| {
            fds.push(Some((fd.try_clone_to_owned()?, id)));
            Ok(fds.len() as u32 - 1)
        });
        let state = state.expect("descriptors");
        let mut text = serde_json::to_value(&state).expect("a state is JSON");
        let altered = alter.is_some_and(|how| change_number(&mut text, how));
        let Ok(read) = serde_json::from_value(text) else {
            assert!(altered, "a state that cannot be read again");
            return false;
        };
        assert!(altered || read == state, "a state that is read as another one");
        let mut take = |number: u32| fds.get_mut(number as usize)?.take();
        match Session::adopt(&read, &mut take, offer(), resources()) {
            Ok(mut session) => {
                self.session.let_go();
                std::mem::swap(&mut self.session, &mut session);
                drop(session);
                self.session.resume(&mut self.device);
                true
            }
            Err(error) => {
                assert!(altered, "what a front end has brought about is refused: {error}");
                false
            }
        }
    }

    /// Serves the messages that wait and reads the answers; returns false if the session is over.
    fn serve(&mut self) -> bool {
        let served = self.session.on_readable(&mut self.device).is_ok()
            && self.session.tick(Instant::now(), &mut self.device).is_ok();
        let (mut bytes, mut fds) = ([0; 4096], Vec::new());
        while self.peer.recv(&mut bytes, &mut fds).is_ok_and(|got| got.bytes > 0) {}
        for (index, ring) in self.session.rings().enumerate() {
            assert_eq!(self.device.rings.contains_key(&(index as u16)), ring.started, "ring {index}");
        }
        let log = self.session.dirty_log().map(Arc::as_ptr);
        for ring in self.device.rings.values() {
            assert_eq!(ring.log.as_ref().map(Arc::as_ptr), log, "a ring has another log than its session");
            // Whatever its size is, and wherever it lies: nothing outside it is touched.
            if let Some(log) = &ring.log {
                [0, 1 << 20, 1 << 40, u64::MAX].iter().for_each(|at| log.mark(*at, 1 << 16));
            }
        }
        assert!(served || self.device.rings.is_empty(), "a ring outlived its session");
        served
    }
}

/// Returns the number of open descriptors of this process. The listing has one of its own, in every count
/// alike.
pub(crate) fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count)
}

/// Plays a front end that sends what the input says.
pub fn session(input: &[u8]) -> Reached {
    let files = Files::new().expect("descriptors");
    let before = open_files();
    let mut rig = Rig::new();
    let mut input = Bytes(input);
    while let Some(message) = Message::get(&mut input) {
        if message.flags >> 6 & 1 != 0
            && !rig.hand_over((message.flags >> 7 != 0).then_some(&*message.payload))
        {
            break;
        }
        let sent = rig.send(&message, &files);
        if (message.flags >> 5 & 1 == 0 || !sent) && !rig.serve() {
            break;
        }
    }
    rig.serve();
    // The upper bound includes two ends of a connection, and the descriptors that a session may hold. It is
    // checked once, as counting is slow.
    let held = open_files().saturating_sub(before + 2);
    assert!(held <= MAX_HELD, "{held} descriptors are held");
    let reached = Reached {
        chains: (rig.session.counters().messages as usize)
            .saturating_sub(rig.session.counters().rejected as usize),
        longest: rig.device.rings.len(),
        ..Reached::default()
    };
    rig.session.disconnect(&mut rig.device);
    assert!(rig.device.rings.is_empty(), "a ring outlived its session");
    drop(rig);
    assert_eq!(open_files(), before, "descriptors were leaked");
    let mut rig = Rig::new();
    for message in set_up(false) {
        assert!(rig.send(&message, &files) && rig.serve());
    }
    assert_eq!(rig.device.rings.len(), 1, "a well-behaved front end is served");
    rig.session.disconnect(&mut rig.device);
    reached
}

/// Makes a message of its parts.
pub fn message(request: Request, payload: &[u8], fds: &[u8]) -> Message {
    let kinds = fds.iter().rev().fold(0, |bits, kind| bits << 2 | kind);
    Message { request: request as u8, flags: 1, fds: kinds << 2 | fds.len() as u8, payload: payload.to_vec() }
}

/// Kind of descriptor in [`Message::fds`]: an eventfd.
pub const EVENT: u8 = 0;
/// Kind of descriptor in [`Message::fds`]: guest memory.
pub const MEMORY_FILE: u8 = 1;

/// Returns the region that is all of guest memory.
pub fn region() -> MemoryRegion {
    MemoryRegion { guest_addr: 0, size: MEMORY, user_addr: USER, mmap_offset: 0 }
}

/// Returns the messages that start ring 0 with 16 entries.
pub fn set_up(packed: bool) -> Vec<Message> {
    let features = F_VERSION_1 | F_PROTOCOL_FEATURES | if packed { F_RING_PACKED } else { 0 };
    let protocol = (Offer::NET_PROTOCOL | ProtocolFeatures::LOG_SHMFD).bits();
    let table = [MemoryTable { count: 1, padding: 0 }.as_bytes(), region().as_bytes()].concat();
    let mut messages = vec![
        message(Request::GetFeatures, &[], &[]),
        message(Request::GetProtocolFeatures, &[], &[]),
        message(Request::SetProtocolFeatures, protocol.as_bytes(), &[]),
        message(Request::SetOwner, &[], &[]),
        message(Request::SetFeatures, features.as_bytes(), &[]),
        message(Request::SetMemTable, &table, &[MEMORY_FILE]),
    ];
    messages.extend(start(0, if packed { 0x8000_8000 } else { 0 }));
    messages
}

/// Returns the messages that start a ring, by its index.
pub fn start(index: u32, base: u32) -> Vec<Message> {
    let state = |request, num| message(request, VringState { index, num }.as_bytes(), &[]);
    let at = USER + 0x2000 * u64::from(index);
    let addr = VringAddr { index, flags: 0, desc: at, avail: at + 0x800, used: at + 0x1000, log: 0 };
    vec![
        state(Request::SetVringNum, 16),
        state(Request::SetVringBase, base),
        message(Request::SetVringAddr, addr.as_bytes(), &[]),
        message(Request::SetVringCall, u64::from(index).as_bytes(), &[EVENT]),
        message(Request::SetVringKick, u64::from(index).as_bytes(), &[EVENT]),
        state(Request::SetVringEnable, 1),
    ]
}

/// Returns the messages that turn logging of ring 0 on, in a log of `size` bytes, or off, as QEMU sends them. The log is the file of
/// guest memory, as the fuzzer has no other.
pub fn log(size: Option<u64>) -> Vec<Message> {
    let features = F_VERSION_1 | F_PROTOCOL_FEATURES | size.map_or(0, |_| F_LOG_ALL);
    let place = |size| message(Request::SetLogBase, LogBase { size, offset: 0 }.as_bytes(), &[MEMORY_FILE]);
    let flags = u32::from(size.is_some());
    let addr =
        VringAddr { index: 0, flags, desc: USER, avail: USER + 0x800, used: USER + 0x1000, log: 0x1000 };
    let mut messages: Vec<_> = size.map(place).into_iter().collect();
    messages.push(message(Request::SetFeatures, features.as_bytes(), &[]));
    messages.push(message(Request::SetVringAddr, addr.as_bytes(), &[]));
    messages
}

/// Returns the message that adds or removes a memory slot.
pub fn slot(request: Request, guest_addr: u64) -> Message {
    let region = MemoryRegion { guest_addr, user_addr: USER + guest_addr, ..region() };
    let fds: &[u8] = if request == Request::AddMemReg { &[MEMORY_FILE] } else { &[] };
    message(request, SingleRegion { padding: 0, region }.as_bytes(), fds)
}
