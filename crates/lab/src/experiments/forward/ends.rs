//! The vhost-user ends at work, on one thread: a generator that feeds the receive ring of the forwarder's first NIC, and
//! a receiver that takes what its second one sends.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ringferry_memory::{Area, GuestMemory};
use ringferry_packet::frame::Burst;
use ringferry_packet::vnet::Header;
use ringferry_ring::{Device, RingFeatures};
use ringferry_vhost_user::RingSetup;
use ringferry_virtio_net::Features;
use ringferry_virtio_net::device::{Receiveq, Refused, Transmitq};

use super::case::{BURST, Case, QUEUE};
use super::port::Rings;
use crate::experiment::RowError;
use crate::frames::flows::{Checker, FLOWS, FRAME, Flows, HELLO};

/// Frames that are looked at whole before anything is timed: each flow twice.
pub(super) const CHECKED: u64 = 2 * FLOWS as u64;

/// Frames under way while they are checked: so few that none is lost.
const WINDOW: u64 = QUEUE as u64 / 4;

/// Time between frames that are sent until one comes out: a forwarder may lose what comes while it starts.
const GREETING: Duration = Duration::from_millis(10);

/// Counters of generator and receiver.
#[derive(Clone, Debug, Default)]
pub(super) struct Counts {
    /// Frames that the forwarder's ring took.
    pub offered: u64,
    /// Frames that the forwarder has delivered.
    pub received: u64,
    /// Those among them that were checked.
    pub checked: u64,
    pub bursts: u64,
    /// Those among them for which the ring had not enough room: the forwarder is behind.
    pub cut_short: u64,
    /// Frames by the queue that they came out of.
    pub queues: Vec<u64>,
}

/// The ends at either side of the forwarder: the generator and the receiver.
pub(super) struct Ends {
    near: Receiveq<Area>,
    near_memory: Arc<GuestMemory>,
    far: Vec<Transmitq<Area>>,
    far_memory: Arc<GuestMemory>,
    flows: Flows,
    checker: Checker,
    /// The flow of the next frame.
    flow: usize,
    spare: Burst<'static>,
    whole: Vec<u8>,
    /// When the last greeting was sent; `None` once one has come out.
    greeting: Option<Instant>,
    counts: Counts,
}

fn device(setup: RingSetup, told: bool) -> Result<Device<Area>, RowError> {
    let ring = RingFeatures::from_bits(setup.features);
    let mut device = Device::new(setup.parts, ring, setup.base, setup.inflight).map_err(RowError::failed)?;
    if told {
        device.enable_kicks();
    } else {
        device.disable_kicks();
    }
    Ok(device)
}

impl Ends {
    /// Serves the rings of both NICs. Those that nothing goes through are left alone.
    pub(super) fn new([near, far]: [Rings; 2], case: &Case) -> Result<Self, RowError> {
        let missing = || RowError::failed("the forwarder started too few rings");
        let near = near.into_iter().next().ok_or_else(missing)?;
        let (near_memory, features) = (Arc::clone(&near.memory), Features::from_bits_retain(near.features));
        let far_memory = far.first().map(|ring| Arc::clone(&ring.memory)).ok_or_else(missing)?;
        let transmit = far.into_iter().skip(1).step_by(2);
        let far: Result<Vec<_>, _> = transmit
            .map(|ring| Ok::<_, RowError>(Transmitq::new(device(ring, case.how.doorbell.rings())?, features)))
            .collect();
        let far = far?;
        let counts = Counts { queues: vec![0; far.len()], ..Counts::default() };
        Ok(Self {
            near: Receiveq::new(device(near, false)?, features),
            near_memory,
            far,
            far_memory,
            flows: Flows::new(),
            checker: Checker::new(),
            flow: 0,
            spare: Burst::new(),
            whole: Vec::new(),
            greeting: Instant::now().checked_sub(GREETING),
            counts,
        })
    }

    /// A burst in, and what has come out. The first [`CHECKED`] frames are checked.
    pub(super) fn round(&mut self) -> Result<&Counts, RowError> {
        if let Some(last) = self.greeting {
            if last.elapsed() >= GREETING {
                self.greeting = Some(Instant::now());
                self.greet()?;
            }
        } else if self.counts.checked < CHECKED {
            let end = CHECKED.min(self.counts.received + WINDOW);
            let frames = (end.saturating_sub(self.counts.offered) as usize).min(BURST);
            self.offer(frames, true)?;
        } else {
            self.offer(BURST, false)?;
        }
        for queue in 0..self.far.len() {
            self.receive(queue)?;
        }
        match self.near.ring().fault() {
            Some(fault) => Err(RowError::failed(format!("the forwarder broke its receive ring: {fault}"))),
            None => Ok(&self.counts),
        }
    }

    /// Offers a frame that does not count.
    fn greet(&mut self) -> Result<(), RowError> {
        let frame = self.flows.numbered(0, HELLO);
        self.near.expect(1);
        match self.near.deliver(&mut self.near_memory.translator(), Header::default(), &frame, &[]) {
            // The forwarder may not have posted its buffers yet.
            Ok(()) | Err(Refused::NoBuffers | Refused::Broken) => {}
            Err(refused @ (Refused::TooBig | Refused::Dear)) => return Err(RowError::failed(refused)),
        }
        self.near.flush();
        Ok(())
    }

    #[inline]
    fn offer(&mut self, frames: usize, numbered: bool) -> Result<(), RowError> {
        let Self { near, near_memory, flows, flow, counts, .. } = self;
        let mut translator = near_memory.translator();
        near.expect(frames);
        counts.bursts += u64::from(frames > 0);
        for _ in 0..frames {
            let frame = if numbered {
                &flows.numbered(*flow, counts.offered / FLOWS as u64)
            } else {
                flows.frame(*flow)
            };
            match near.deliver(&mut translator, Header::default(), frame, &[]) {
                Ok(()) => {
                    counts.offered += 1;
                    *flow = if *flow + 1 == FLOWS { 0 } else { *flow + 1 };
                }
                Err(Refused::NoBuffers | Refused::Broken) => {
                    counts.cut_short += 1;
                    break;
                }
                Err(refused @ (Refused::TooBig | Refused::Dear)) => return Err(RowError::failed(refused)),
            }
        }
        // The forwarder polls.
        near.flush();
        Ok(())
    }

    #[inline]
    fn receive(&mut self, queue: usize) -> Result<(), RowError> {
        let Self { far, far_memory, checker, spare, whole, greeting, counts, .. } = self;
        let far = &mut far[queue];
        let mut burst = Burst::reuse(std::mem::take(spare));
        let (mut good, mut greetings) = (Ok(()), 0);
        if far.poll(far_memory, BURST, &mut burst) > 0 {
            for frame in burst.frames() {
                if counts.checked < CHECKED && good.is_ok() {
                    burst.flatten(frame, whole);
                    if Flows::is_greeting(whole) {
                        *greeting = None;
                        greetings += 1;
                        continue;
                    }
                    good = checker.check(whole).map_err(RowError::from);
                    counts.checked = checker.checked();
                } else if frame.len as usize != FRAME {
                    good = Err(RowError::failed(format!("a frame of {} bytes came", frame.len)));
                }
            }
            let frames = burst.len() as u64 - greetings;
            counts.received += frames;
            counts.queues[queue] += frames;
            far.complete();
        }
        *spare = Burst::reuse(burst);
        good?;
        let rejected = far.rejected();
        match far.ring().fault() {
            Some(fault) => Err(RowError::failed(format!("the forwarder broke its transmit ring: {fault}"))),
            None if rejected != Default::default() => {
                Err(RowError::failed(format!("the forwarder sent what are no frames: {rejected:?}")))
            }
            None => Ok(()),
        }
    }
}
