//! Guests for tests. [`Guest`] is a driver half and a device half over one file that each of them maps
//! for itself, as over vhost-user. [`Raw`] is a device half's ring that the test writes word by word, as
//! a hostile driver would.
#![allow(dead_code, reason = "every test program uses its own part of this module")]

use std::sync::Arc;

use ringferry_memory::{Area, GuestMemory, Region, RegionSpec, SharedMem, Words};
use ringferry_nic::rx::{PolicyKind, RxConfig};
use ringferry_packet::buffer::{Buf, Chain, Pools};
use ringferry_packet::frame::Burst;
use ringferry_packet::vnet::Header;
use ringferry_ring::{Chains, Device, Parts, RingAddresses, part_bytes};
use ringferry_virtio_net::device::{self, Refused};
use ringferry_virtio_net::driver::{Arena, MAX_SEGS, Pair, PairConfig, Queue};
use ringferry_virtio_net::{Features, MAX_FRAME, MIN_FRAME};

/// Descriptor flag VIRTQ_DESC_F_NEXT (2.7.5).
pub const NEXT: u16 = 1;
/// Descriptor flag VIRTQ_DESC_F_WRITE (2.7.5).
pub const WRITE: u16 = 2;
/// Descriptor flag VIRTQ_DESC_F_INDIRECT (2.7.5).
pub const INDIRECT: u16 = 4;

/// Position at which a device starts a fresh ring: index 0, and in a packed ring a wrap counter of
/// 1.
const FRESH: u16 = 1 << 15;

/// A frame that differs from all others in its bytes. If it is long enough it is TCP over IPv4, as far as [`GSO`] says so.
pub fn payload(number: u64, len: usize) -> Vec<u8> {
    let seed = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    let mut frame: Vec<u8> = (0..len as u64).map(|i| (seed ^ i.wrapping_mul(167) ^ (i >> 8)) as u8).collect();
    if len >= 54 {
        TCP_OVER_IPV4.into_iter().for_each(|(at, byte)| frame[at] = byte);
    }
    frame
}

/// The bytes by which a frame is TCP over IPv4, without options and no fragment, and where they are.
pub const TCP_OVER_IPV4: [(usize, u8); 7] =
    [(12, 0x08), (13, 0x00), (14, 0x45), (20, 0), (21, 0), (23, 6), (46, 0x50)];

/// The header of a TCP segment to be cut, in a frame of at least 100 bytes.
pub const GSO: Header = Header {
    flags: 1,
    gso_type: 1,
    hdr_len: 54,
    gso_size: 40,
    csum_start: 34,
    csum_offset: 16,
    num_buffers: 0,
};

/// The layout of received packets in buffers (5.1.6.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// As many buffers as a packet needs.
    Mergeable,
    /// Buffers of the largest packet, each a chain of descriptors.
    Big,
    /// Buffers of one MTU-sized packet.
    Small {
        /// Largest packet behind the Ethernet header, in bytes.
        mtu: u16,
    },
}

impl Mode {
    pub const ALL: [Mode; 3] = [Mode::Mergeable, Mode::Big, Mode::Small { mtu: 1500 }];

    /// `features`, and those that call for this mode.
    pub fn with(self, mut features: Features) -> Features {
        features.set(Features::MRG_RXBUF, self == Mode::Mergeable);
        features.set(Features::GUEST_TSO4, self == Mode::Big);
        features
    }

    fn mtu(self) -> u16 {
        if let Mode::Small { mtu } = self { mtu } else { 1500 }
    }

    /// Longest frame that a driver takes in this mode: for [`Mode::Small`] with a VLAN tag.
    pub fn max_frame(self) -> usize {
        if let Mode::Small { mtu } = self { 22 + usize::from(mtu) } else { MAX_FRAME }
    }

    /// Entries that a ring needs at least: as many as the longest packet takes chunks.
    pub fn least(self) -> u16 {
        if matches!(self, Mode::Small { .. }) { 1 } else { LARGEST }
    }
}

/// Chunks of receive buffers that a frame of [`MAX_FRAME`] takes, rounded up to a ring size.
const LARGEST: u16 = 4;

/// Receive settings in which a buffer is a page and every frame stays where it was received.
pub const PLAIN: RxConfig = RxConfig { policy: PolicyKind::FixedPage, copy_break: 0, fetch_frame: true };

/// A packet as a driver received it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Received {
    pub header: Header,
    pub frame: Vec<u8>,
}

/// Both halves of a guest's queue pair, each on its own mapping of the same memory.
pub struct Guest {
    pub pair: Pair,
    pub device_tx: device::Transmitq<Area>,
    pub device_rx: device::Receiveq<Area>,
    /// The device's own mapping of the arena.
    pub memory: Arc<GuestMemory>,
}

/// The device's mapping of a driver's arena.
pub fn device_map(arena: &Arena) -> Arc<GuestMemory> {
    let region = Region::map(arena.fd(), arena.region()).unwrap();
    Arc::new(GuestMemory::new(vec![region]).unwrap())
}

/// The device half of a driver's queue.
pub fn device_ring(memory: &GuestMemory, queue: &Queue, features: Features) -> Device<Area> {
    let area = |addr, len| memory.user_area(addr, len).unwrap();
    let [desc, driver, device] = part_bytes(queue.size, features.ring().packed);
    let (desc, driver) = (area(queue.desc, desc), area(queue.avail, driver));
    let parts = Parts { size: queue.size, desc, driver, device: area(queue.used, device) };
    Device::new(parts, features.ring(), FRESH, None).unwrap()
}

impl Guest {
    /// A guest with queues of `size` entries and no receive buffers posted yet.
    pub fn new(features: Features, size: u16, mode: Mode, rx: RxConfig) -> Self {
        Self::segmented(features, size, mode, rx, MAX_SEGS)
    }

    /// A guest whose packets are sent in at most `max_segs` segments.
    pub fn segmented(features: Features, size: u16, mode: Mode, rx: RxConfig, max_segs: u16) -> Self {
        let config = PairConfig {
            receive: size,
            transmit: size,
            mtu: mode.mtu(),
            max_segs,
            rx,
            ..PairConfig::default()
        };
        let mut arena = Arena::new(config.arena_bytes(features)).unwrap();
        let pair = Pair::new(&mut arena, features, &config).unwrap();
        let memory = device_map(&arena);
        let [rx_queue, tx_queue] = &pair.queues;
        let device_tx = device::Transmitq::new(device_ring(&memory, tx_queue, features), features);
        let device_rx = device::Receiveq::new(device_ring(&memory, rx_queue, features), features);
        Self { pair, device_tx, device_rx, memory }
    }

    /// Queues a frame for the device.
    pub fn send(&mut self, header: &Header, frame: &[u8]) {
        assert!(self.pair.send_frame(header, frame), "no room");
    }

    /// Delivers a frame that lies in private memory.
    pub fn deliver(&mut self, header: Header, frame: &[u8]) -> Result<(), Refused> {
        let (first, rest) = frame.split_at(frame.len().min(64));
        self.device_rx.deliver(&mut self.memory.translator(), header, first, &[rest.into()])
    }

    /// Bytes of each receive buffer that the device has not taken yet, in order.
    pub fn room(&mut self) -> Vec<usize> {
        let mut chains = Chains::new();
        let ring = self.device_rx.ring();
        ring.take(usize::MAX, &mut self.memory.translator(), &mut chains);
        ring.untake(chains.all());
        chains.iter().map(|chain| chain.writable_len as usize).collect()
    }

    /// All packets that are there. Their buffers wait to be posted again.
    pub fn receive(&mut self) -> Vec<Received> {
        self.receive_some(usize::MAX)
    }

    /// Receives up to `max` packets.
    pub fn receive_some(&mut self, max: usize) -> Vec<Received> {
        let mut packets = Vec::new();
        let Pair { receiveq, pools, .. } = &mut self.pair;
        receiveq.lend(max, pools, |chain, _| {
            packets.push(received(&chain));
            Some(chain)
        });
        packets
    }

    /// Up to `max` packets, to be kept; see [`received`] and [`Guest::recycle`].
    pub fn keep(&mut self, max: usize) -> Vec<Chain> {
        let mut chains = Vec::new();
        self.pair.receiveq.receive(max, &mut self.pair.pools, |chain, _| chains.push(chain));
        chains
    }

    /// Gives a received packet back to its queue.
    pub fn recycle(&mut self, chain: Chain) {
        self.pair.receiveq.recycle_chain(chain, &mut self.pair.pools);
    }

    /// With no packet under way or kept, every buffer to send from is free, and the receiveq is full again.
    pub fn assert_all_home(&mut self) {
        let Pair { receiveq, transmitq, pools, .. } = &mut self.pair;
        transmitq.reclaim(pools);
        assert_eq!((transmitq.in_flight(), transmitq.driver().ring().in_flight()), (0, 0));
        assert_eq!(transmitq.free(), usize::from(transmitq.driver().ring().size()));
        assert_pools_full(pools);
        receiveq.refill();
        let stats = receiveq.stats();
        assert_eq!(usize::from(receiveq.driver().ring().in_flight()), receiveq.posted());
        assert_eq!((stats.unknown, stats.no_replacement), (0, 0));
        assert_eq!(receiveq.driver().ring().free(), 0, "entries that nothing is posted in");
        let faults = [self.device_tx.ring().fault(), self.device_rx.ring().fault(), self.pair.fault()];
        assert_eq!(faults, [None; 3]);
    }

    /// Takes the pair apart: nothing was lost, neither of what is sent nor of what is received.
    pub fn finish(mut self) {
        self.assert_all_home();
        dismantle(self.pair);
    }
}

/// Takes a pair apart, whatever state it is in, of which nobody keeps a packet. Every buffer comes back.
pub fn dismantle(pair: Pair) {
    let Pair { receiveq, transmitq, mut pools, .. } = pair;
    transmitq.detach(&mut pools);
    assert_pools_full(&pools);
    let (_, fragments) = receiveq.detach();
    let pool = fragments.into_pool();
    assert_eq!(pool.available(), pool.layout().count, "chunks of receive buffers");
}

/// No buffer of these pools is in use.
pub fn assert_pools_full(pools: &Pools) {
    for pool in [&pools.small, &pools.frame, &pools.large] {
        assert_eq!(pool.available(), pool.layout().count, "{:?}", pool.layout());
    }
}

/// Checks a received packet's invariants and returns its header and frame.
pub fn received(chain: &Chain) -> Received {
    assert!((MIN_FRAME..=MAX_FRAME).contains(&chain.len()), "{}", chain.len());
    assert!(chain.bufs().iter().all(|buf| !buf.is_empty() && buf.is_exclusive()));
    assert!(chain.truesize() >= chain.len());
    let frame = chain.to_vec();
    assert_eq!(frame.len(), chain.bufs().iter().map(Buf::len).sum::<usize>());
    Received { header: chain.header, frame }
}

/// Takes what `from` sent, up to `max` packets, and delivers it to `to`, as a switch does. Returns the
/// answer for each frame.
pub fn forward(from: &mut Guest, to: &mut Guest, max: usize) -> Vec<Result<(), Refused>> {
    let memory = Arc::clone(&from.memory);
    let mut answers = Vec::new();
    loop {
        let mut burst = Burst::new();
        if from.device_tx.poll(&memory, max - answers.len(), &mut burst) == 0 {
            break answers;
        }
        to.device_rx.expect(burst.len());
        let mut translator = to.memory.translator();
        for frame in burst.frames() {
            let (first, rest) = (frame.prefix(), burst.rest(frame));
            answers.push(to.device_rx.deliver(&mut translator, frame.header, first, rest));
        }
        to.device_rx.flush();
        from.device_tx.complete();
    }
}

/// Returns how many of the posted buffers, of `room` bytes each, a frame of `len` bytes takes, if
/// the device can deliver it.
pub fn buffers_for(mode: Mode, len: usize, room: impl IntoIterator<Item = usize>) -> Result<usize, Refused> {
    let mut left = Header::LEN + len;
    for (count, bytes) in (1..).zip(room) {
        left = left.saturating_sub(bytes);
        if left == 0 {
            return Ok(count);
        }
        if mode != Mode::Mergeable {
            return Err(Refused::TooBig);
        }
    }
    Err(Refused::NoBuffers)
}

/// First guest physical address of a [`Raw`] guest.
pub const BASE: u64 = 0x10_0000;
/// Bytes of its first region, which holds ring and buffers.
pub const SIZE: u64 = 0x10_0000;
/// A second region follows without a gap; behind it there is nothing.
pub const BORDER: u64 = BASE + SIZE;
/// First address behind all memory.
pub const END: u64 = BORDER + 0x1_0000;
/// First address at which buffers may lie.
pub const BUFFERS: u64 = BASE + 0x1_0000;

/// A guest whose ring the test writes itself.
pub struct Raw {
    /// Guest memory as the device sees it.
    pub memory: Arc<GuestMemory>,
    size: u16,
    desc: Area,
    avail: Area,
    used: Area,
    next_desc: u16,
    next_avail: u16,
    seen_used: u16,
}

/// A buffer: address, bytes, device-writable.
pub type Piece = (u64, u32, bool);

pub fn readable(addr: u64, len: usize) -> Piece {
    (addr, len as u32, false)
}

pub fn writable(addr: u64, len: usize) -> Piece {
    (addr, len as u32, true)
}

impl Raw {
    /// A guest with a ring of `size` entries.
    pub fn new(size: u16) -> Self {
        let region = |guest_addr: u64, len: u64| {
            let file = SharedMem::new("raw-guest", len as usize).unwrap();
            let spec = RegionSpec { guest_addr, size: len, user_addr: guest_addr, mmap_offset: 0 };
            Region::map(file.fd(), spec).unwrap()
        };
        let memory = GuestMemory::new(vec![region(BASE, SIZE), region(BORDER, END - BORDER)]).unwrap();
        Self::over(Arc::new(memory), BASE, size)
    }

    /// A second ring in the same memory.
    pub fn beside(&self, size: u16) -> Self {
        Self::over(Arc::clone(&self.memory), BASE + 0x8000, size)
    }

    fn over(memory: Arc<GuestMemory>, at: u64, size: u16) -> Self {
        let bytes = part_bytes(size, false);
        assert!(bytes.iter().all(|len| *len <= 0x2000));
        Self {
            size,
            desc: memory.area(at, bytes[0]).unwrap(),
            avail: memory.area(at + 0x2000, bytes[1]).unwrap(),
            used: memory.area(at + 0x4000, bytes[2]).unwrap(),
            memory,
            next_desc: 0,
            next_avail: 0,
            seen_used: 0,
        }
    }

    /// The device half of the ring, a split one whatever the features say.
    pub fn device(&self, features: Features) -> Device<Area> {
        let (desc, driver, device) = (self.desc.clone(), self.avail.clone(), self.used.clone());
        let parts = Parts { size: self.size, desc, driver, device };
        Device::new(parts, (features - Features::RING_PACKED).ring(), FRESH, None).unwrap()
    }

    /// The guest addresses of what the device writes in the ring.
    pub fn addresses(&self) -> RingAddresses {
        let (desc, driver, device) = (self.desc.clone(), self.avail.clone(), self.used.clone());
        RingAddresses::of(&Parts { size: self.size, desc, driver, device }, false)
    }

    /// The page in which the used ring begins.
    pub fn used_page(&self) -> u64 {
        self.used.guest_addr() / 4096
    }

    pub fn write_desc(&self, index: u16, addr: u64, len: u32, flags: u16, next: u16) {
        let at = 16 * usize::from(index % self.size);
        self.desc.store64(at, addr);
        self.desc.store64(at + 8, u64::from(len) | u64::from(flags) << 32 | u64::from(next) << 48);
    }

    /// Makes a chain available without more ado.
    pub fn offer(&mut self, head: u16) {
        let slot = usize::from(self.next_avail % self.size);
        self.avail.store16(4 + 2 * slot, head);
        self.next_avail = self.next_avail.wrapping_add(1);
        self.avail.store16_release(2, self.next_avail);
    }

    /// Chains `pieces`, one descriptor each, and makes them available; returns the head.
    pub fn chain(&mut self, pieces: &[Piece]) -> u16 {
        let head = self.next_desc;
        for (i, &(addr, len, write)) in pieces.iter().enumerate() {
            let index = self.next_desc;
            self.next_desc = (index + 1) % self.size;
            let more = if i + 1 < pieces.len() { NEXT } else { 0 };
            let flags = more | if write { WRITE } else { 0 };
            self.write_desc(index, addr, len, flags, self.next_desc);
        }
        self.offer(head);
        head
    }

    /// Collects the head and length of the chains that the device has used since the last call.
    pub fn used(&mut self) -> Vec<(u32, u32)> {
        let mut all = Vec::new();
        while self.seen_used != self.used.load16_acquire(2) {
            let at = 4 + 8 * usize::from(self.seen_used % self.size);
            all.push((self.used.load32(at), self.used.load32(at + 4)));
            self.seen_used = self.seen_used.wrapping_add(1);
        }
        all
    }

    /// Writes guest memory, across regions too.
    pub fn write(&self, addr: u64, bytes: &[u8]) {
        let mut translator = self.memory.translator();
        let mut done = 0;
        while done < bytes.len() {
            let piece = translator.write(addr + done as u64, bytes.len() - done).unwrap();
            done += piece.copy_from(&bytes[done..]);
        }
    }

    /// Lays `parts` out behind `at` with gaps between them, one device-readable buffer each.
    pub fn scatter(&self, mut at: u64, parts: &[&[u8]]) -> Vec<Piece> {
        let lay = |part: &&[u8]| {
            self.write(at, part);
            let piece = readable(at, part.len());
            at += part.len() as u64 + 3;
            piece
        };
        parts.iter().map(lay).collect()
    }

    /// Reads guest memory, across regions too.
    pub fn read(&self, addr: u64, len: usize) -> Vec<u8> {
        let mut translator = self.memory.translator();
        let mut bytes = vec![0; len];
        let mut done = 0;
        while done < len {
            let piece = translator.read(addr + done as u64, len - done).unwrap();
            done += piece.copy_to(&mut bytes[done..]);
        }
        bytes
    }
}
