//! Both halves in one thread, stage after stage: the process that callgrind counts.

use std::num::NonZeroU16;
use std::sync::Arc;

use ringferry_memory::{Area, GuestMemory, Region};
use ringferry_nic::forward::Forwarder;
use ringferry_nic::rx::{PolicyKind, RxConfig};
use ringferry_nic::tx::TxConfig;
use ringferry_packet::buffer::Chain;
use ringferry_packet::frame::Burst;
use ringferry_ring::{Device, Parts, part_bytes};
use ringferry_virtio_net::Features;
use ringferry_virtio_net::device::{Receiveq, Transmitq};
use ringferry_virtio_net::driver::{Arena, Pair, PairConfig, Queue};

use super::Case;
use crate::experiment::RowError;
use crate::frames::numbered::{BURST, EACH};

/// Entries of each ring.
const RING: u16 = 256;

/// Ethernet, IPv4 and UDP of a frame.
const HEADERS: [u8; 42] = [7; 42];

/// The functions whose calls are counted, in the order of a frame's way.
pub(super) const STAGES: [&str; 5] =
    ["send_burst", "poll_burst", "deliver_burst", "receive_burst", "forward_burst"];

/// Both halves of one pair: what the device takes from the transmit queue, it delivers to the receive queue.
struct Halves {
    driver: Pair,
    memory: Arc<GuestMemory>,
    transmitq: Transmitq<Area>,
    receiveq: Receiveq<Area>,
    spare: Burst<'static>,
    forwarder: Forwarder,
    size: usize,
}

/// Has the driver send and receive `rounds` bursts, then forward one burst as often.
pub(super) fn run(case: &Case, rounds: usize) -> Result<(), RowError> {
    let mut halves = Halves::new(case)?;
    for _ in 0..rounds {
        whole("sent", send_burst(&mut halves))?;
        halves.serve()?;
        whole("received", receive_burst(&mut halves))?;
    }
    whole("sent", send_burst(&mut halves))?;
    for _ in 0..rounds {
        halves.serve()?;
        whole("forwarded", forward_burst(&mut halves))?;
    }
    Ok(())
}

fn whole(what: &str, frames: usize) -> Result<(), RowError> {
    match frames {
        BURST => Ok(()),
        frames => Err(RowError::failed(format!("{frames} of {BURST} frames are {what}"))),
    }
}

impl Halves {
    fn new(case: &Case) -> Result<Self, RowError> {
        let mut features = Features::VERSION_1 | Features::MRG_RXBUF;
        features.set(Features::RING_PACKED, case.packed);
        features.set(Features::IN_ORDER, case.in_order);
        let config = PairConfig {
            receive: RING,
            transmit: RING,
            rx: RxConfig { copy_break: 0, fetch_frame: false, policy: PolicyKind::FixedMtu },
            tx: TxConfig { reclaim_after: NonZeroU16::new(RING), ..TxConfig::default() },
            ..PairConfig::default()
        };
        let mut arena = Arena::new(config.arena_bytes(features)).map_err(RowError::failed)?;
        let mut driver = Pair::new(&mut arena, features, &config).map_err(RowError::failed)?;
        let region = Region::map(arena.fd(), arena.region()).map_err(RowError::failed)?;
        let memory = Arc::new(GuestMemory::new(vec![region]).map_err(RowError::failed)?);
        let [receive, transmit] = &driver.queues;
        let transmitq = Transmitq::new(device(&memory, transmit, features)?, features);
        let receiveq = Receiveq::new(device(&memory, receive, features)?, features);
        driver.refill();
        Ok(Self {
            driver,
            memory,
            transmitq,
            receiveq,
            spare: Burst::new(),
            forwarder: Forwarder::new(1, BURST),
            size: case.size,
        })
    }

    /// The device's turn.
    fn serve(&mut self) -> Result<(), RowError> {
        let memory = Arc::clone(&self.memory);
        let mut burst = Burst::reuse(std::mem::take(&mut self.spare));
        poll_burst(self, &memory, &mut burst);
        whole("taken", burst.len())?;
        let delivered = deliver_burst(self, &memory, &burst);
        self.transmitq.complete();
        self.spare = Burst::reuse(burst);
        whole("delivered", delivered)
    }
}

/// The device's side of a ring.
fn device(memory: &GuestMemory, queue: &Queue, features: Features) -> Result<Device<Area>, RowError> {
    let [desc, driver, device] = part_bytes(queue.size, features.ring().packed);
    let area = |addr, len| {
        memory.user_area(addr, len).ok_or_else(|| RowError::failed("a ring is outside of memory"))
    };
    let parts = Parts {
        size: queue.size,
        desc: area(queue.desc, desc)?,
        driver: area(queue.avail, driver)?,
        device: area(queue.used, device)?,
    };
    Device::new(parts, features.ring(), 1 << 15, None).map_err(RowError::failed)
}

/// The driver sends: makes room, writes the headers of frames into buffers, and publishes them. What is behind the headers costs a program that makes it,
/// not the driver.
#[inline(never)]
fn send_burst(halves: &mut Halves) -> usize {
    let Pair { transmitq, pools, .. } = &mut halves.driver;
    transmitq.make_room(BURST, pools);
    let sent = (0..BURST).take_while(|_| {
        let Some(mut buf) = pools.alloc(halves.size) else { return false };
        buf.room().copy_from(&HEADERS);
        buf.grow(halves.size);
        transmitq.try_send(Chain::from(buf), pools)
    });
    let sent = sent.count();
    transmitq.flush();
    sent
}

/// The device takes what was sent.
#[inline(never)]
fn poll_burst<'m>(halves: &mut Halves, memory: &'m GuestMemory, burst: &mut Burst<'m>) {
    halves.transmitq.poll(memory, BURST, burst);
}

/// The device delivers it, as the switch does to one plain port.
#[inline(never)]
fn deliver_burst(halves: &mut Halves, memory: &GuestMemory, burst: &Burst<'_>) -> usize {
    halves.receiveq.expect(BURST);
    let run = halves.receiveq.deliver_run(&mut memory.translator(), burst, &EACH);
    halves.receiveq.flush();
    run.frames
}

/// The driver receives: lends each frame out, and gives its buffers to the device again.
#[inline(never)]
fn receive_burst(halves: &mut Halves) -> usize {
    let Pair { receiveq, pools, .. } = &mut halves.driver;
    let received = receiveq.lend(BURST, pools, |packet, _| Some(packet));
    receiveq.top_up();
    received
}

/// The driver forwards what it receives by its transmit queue, and gives the device other buffers for it.
#[inline(never)]
fn forward_burst(halves: &mut Halves) -> usize {
    let Pair { receiveq, transmitq, pools, .. } = &mut halves.driver;
    let outputs = std::slice::from_mut(transmitq);
    let forwarded = halves.forwarder.forward(receiveq, outputs, pools, |_| Some(0), |_, _| {});
    receiveq.top_up();
    forwarded
}
