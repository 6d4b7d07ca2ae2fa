//! A queue pair of which one thread plays both halves in turn: a burst by the driver, the same burst by the device. No
//! thread is ever waited for, so what is measured is what the halves cost, and what one queue costs another.

use std::num::NonZeroU16;
use std::sync::Arc;

use ringferry_memory::{Area, GuestMemory, Region};
use ringferry_nic::rx::{PolicyKind, RxConfig};
use ringferry_nic::tx::TxConfig;
use ringferry_packet::buffer::Chain;
use ringferry_packet::frame::Burst;
use ringferry_packet::vnet::Header;
use ringferry_ring::{Device, Parts, part_bytes};
use ringferry_virtio_net::Features;
use ringferry_virtio_net::device::{Receiveq, Refused, Transmitq};
use ringferry_virtio_net::driver::{Arena, Pair, PairConfig, Queue};

use super::generator::Direction;
use crate::experiment::RowError;
use crate::frames::numbered::BURST;
use crate::frames::numbered::{Checker, Format, HEADERS, Pool};

/// Bytes of a frame, without checksum: the smallest, as the kernel's packet generator makes them.
const FRAME: usize = 60;

const RING: u16 = 256;

/// Frames that are looked at whole before anything is timed: many times round the ring.
pub(super) const CHECKED: u64 = 10_000;

/// Where a device takes over a fresh packed ring: index 0, wrap counter 1.
const FRESH: u16 = 1 << 15;

/// The features that driver and device agree on: those of DPDK's two ends, and the queues.
fn features() -> Features {
    Features::VERSION_1
        | Features::MRG_RXBUF
        | Features::INDIRECT_DESC
        | Features::RING_PACKED
        | Features::IN_ORDER
        | Features::CTRL_VQ
        | Features::MQ
}

fn config() -> PairConfig {
    PairConfig {
        receive: RING,
        transmit: RING,
        // Nobody reads frames or keeps them.
        rx: RxConfig { copy_break: 0, fetch_frame: false, policy: PolicyKind::FixedMtu },
        tx: TxConfig { reclaim_after: NonZeroU16::new(RING), ..TxConfig::default() },
        ..PairConfig::default()
    }
}

/// Both halves of a queue pair.
#[derive(Debug)]
pub(super) struct Halves {
    pair: Pair,
    receiveq: Receiveq<Area>,
    transmitq: Transmitq<Area>,
    memory: Arc<GuestMemory>,
}

impl Halves {
    /// So many pairs of one device, in one memory, which the device has mapped by itself.
    pub(super) fn new(pairs: usize) -> Result<Vec<Self>, RowError> {
        let (features, config) = (features(), config());
        let mut arena = Arena::new(pairs * config.arena_bytes(features)).map_err(RowError::failed)?;
        let region = Region::map(arena.fd(), arena.region()).map_err(RowError::failed)?;
        let memory = Arc::new(GuestMemory::new(vec![region]).map_err(RowError::failed)?);
        let pair = |_| {
            let mut pair = Pair::new(&mut arena, features, &config).map_err(RowError::failed)?;
            // Nobody waits for the other half.
            pair.disable_calls();
            pair.refill();
            let [rx, tx] = pair.queues;
            Ok(Self {
                receiveq: Receiveq::new(device(&memory, rx)?, features),
                transmitq: Transmitq::new(device(&memory, tx)?, features),
                memory: Arc::clone(&memory),
                pair,
            })
        };
        (0..pairs).map(pair).collect()
    }

    /// Gets to work on the calling thread.
    pub(super) fn generator(self, direction: Direction) -> Generator {
        Generator {
            halves: self,
            direction,
            format: Format::new(FRAME),
            checker: Checker::numbered(Format::new(FRAME), CHECKED),
            pool: Pool::new(FRAME),
            whole: Vec::new(),
            spare: Burst::new(),
            sent: 0,
            arrived: 0,
        }
    }

    /// An error once a half has broken a rule.
    fn check(&mut self) -> Result<(), RowError> {
        let fault = self.pair.fault().or_else(|| self.receiveq.ring().fault());
        let fault = fault.or_else(|| self.transmitq.ring().fault());
        let (rejected, errors) = (self.transmitq.rejected(), self.pair.receiveq.stats().rx_length_errors);
        match fault {
            Some(fault) => Err(RowError::failed(format!("a ring was broken: {fault}"))),
            None if rejected != Default::default() || errors > 0 => {
                Err(RowError::failed(format!("frames were refused: {rejected:?}, {errors} lengths")))
            }
            None => Ok(()),
        }
    }
}

fn device(memory: &GuestMemory, queue: Queue) -> Result<Device<Area>, RowError> {
    let ring = features().ring();
    let area =
        |addr, len| memory.user_area(addr, len).ok_or_else(|| RowError::failed("a ring outside its memory"));
    let [desc, driver, used] = part_bytes(queue.size, ring.packed);
    let parts = Parts {
        size: queue.size,
        desc: area(queue.desc, desc)?,
        driver: area(queue.avail, driver)?,
        device: area(queue.used, used)?,
    };
    let mut device = Device::new(parts, ring, FRESH, None).map_err(RowError::failed)?;
    device.disable_kicks();
    Ok(device)
}

/// A queue pair at work.
pub(super) struct Generator {
    halves: Halves,
    direction: Direction,
    format: Format,
    checker: Checker,
    pool: Pool,
    whole: Vec<u8>,
    spare: Burst<'static>,
    sent: u64,
    arrived: u64,
}

impl Generator {
    /// A burst from one half to the other; frames that have arrived so far. The first [`CHECKED`] carry numbers and are
    /// looked at from the first byte to the last.
    #[inline]
    pub(super) fn round(&mut self) -> Result<u64, RowError> {
        match self.direction {
            Direction::Transmit => {
                self.send();
                self.take()?;
            }
            Direction::Receive => {
                self.deliver()?;
                self.receive()?;
            }
        }
        self.halves.check()?;
        if self.arrived == self.sent {
            return Ok(self.arrived);
        }
        let text = format!("{} frames were sent and {} arrived", self.sent, self.arrived);
        Err(RowError::failed(text))
    }

    /// Sends a burst from the driver, as far as the ring has room.
    #[inline]
    fn send(&mut self) {
        let Self { halves: Halves { pair, .. }, format, pool, sent, .. } = self;
        let Pair { transmitq, pools, .. } = pair;
        transmitq.make_room(BURST, pools);
        for _ in 0..BURST {
            let Some(mut buf) = pools.alloc(FRAME) else { break };
            if *sent < CHECKED {
                let whole = &mut pool.frame(0)[..FRAME];
                format.write(*sent, whole);
                buf.append(whole);
            } else {
                buf.room().copy_from(format.headers());
                buf.grow(FRAME);
            }
            if !transmitq.try_send(Chain::from(buf), pools) {
                break;
            }
            *sent += 1;
        }
        // The device looks by itself.
        transmitq.flush();
    }

    /// The device takes what was sent and copies it to memory of its own.
    #[inline]
    fn take(&mut self) -> Result<(), RowError> {
        let Self { halves, checker, pool, spare, arrived, .. } = self;
        let mut burst = Burst::reuse(std::mem::take(spare));
        let mut good = Ok(());
        if halves.transmitq.poll(&halves.memory, BURST, &mut burst) > 0 {
            for (at, frame) in burst.frames().iter().enumerate() {
                if frame.len as usize != FRAME {
                    good = Err(RowError::failed(format!("a frame of {} bytes came", frame.len)));
                    break;
                }
                let whole = pool.frame(at);
                let prefix = frame.prefix();
                whole[..prefix.len()].copy_from_slice(prefix);
                let mut end = prefix.len();
                for piece in burst.rest(frame) {
                    end += piece.copy_to(&mut whole[end..]);
                }
                if *arrived < CHECKED && good.is_ok() {
                    good = checker.check(&whole[..FRAME]).map_err(RowError::from);
                }
                *arrived += 1;
            }
            halves.transmitq.complete();
        }
        *spare = Burst::reuse(burst);
        good
    }

    /// The device delivers frames from memory of its own.
    #[inline]
    fn deliver(&mut self) -> Result<(), RowError> {
        let Self { halves: Halves { receiveq, memory, .. }, format, pool, sent, .. } = self;
        let mut translator = memory.translator();
        receiveq.expect(BURST);
        for at in 0..BURST {
            let frame = &mut pool.frame(at)[..FRAME];
            if *sent < CHECKED {
                format.write(*sent, frame);
            } else {
                frame[..HEADERS].copy_from_slice(format.headers());
            }
            match receiveq.deliver(&mut translator, Header::default(), frame, &[]) {
                Ok(()) => *sent += 1,
                // What is broken is told by the check.
                Err(Refused::NoBuffers | Refused::Broken) => break,
                Err(refused @ (Refused::TooBig | Refused::Dear)) => return Err(RowError::failed(refused)),
            }
        }
        receiveq.flush();
        Ok(())
    }

    /// The driver receives and posts its buffers again.
    #[inline]
    fn receive(&mut self) -> Result<(), RowError> {
        let Self { halves: Halves { pair, .. }, checker, whole, arrived, .. } = self;
        let Pair { receiveq, pools, .. } = pair;
        let mut good = Ok(());
        receiveq.lend(BURST, pools, |packet, _| {
            if *arrived < CHECKED && good.is_ok() {
                whole.resize(packet.len(), 0);
                packet.copy_to(whole);
                good = checker.check(whole).map_err(RowError::from);
            }
            *arrived += 1;
            Some(packet)
        });
        receiveq.top_up();
        good
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_pairs_of_a_device_carry_frames_whole_and_in_order_both_ways() {
        for direction in Direction::ALL {
            for halves in Halves::new(3).unwrap() {
                let mut generator = halves.generator(direction);
                let mut arrived = 0;
                while arrived < 2 * CHECKED {
                    let before = arrived;
                    arrived = generator.round().unwrap();
                    assert!(arrived > before, "{direction}: stuck at {arrived}");
                }
                assert_eq!(generator.checker.checked(), CHECKED, "{direction}");
            }
        }
    }

    #[test]
    fn a_frame_that_is_not_the_next_one_fails_the_run() {
        for direction in Direction::ALL {
            let mut generator = Halves::new(1).unwrap().remove(0).generator(direction);
            generator.round().unwrap();
            generator.sent += 1;
            assert!(generator.round().is_err(), "{direction}");
        }
    }
}
