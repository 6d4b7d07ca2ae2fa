//! The guests: our drivers in pairs, each of which sends numbered frames to the other as fast as they are taken. One thread has all of
//! them, and polls.

use std::num::NonZeroU16;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use ringferry_nic::rx::{PolicyKind, RxConfig};
use ringferry_nic::tx::TxConfig;
use ringferry_packet::vnet::Header;
use ringferry_rig::front::{Front, wanted};
use ringferry_rig::handmade::connect;
use ringferry_virtio_net::Features;
use ringferry_virtio_net::driver::{Pair, PairConfig};

use crate::experiment::RowError;

/// Bytes of a frame.
const FRAME: usize = 60;
/// Entries of each ring.
const RING: u16 = 256;
/// Frames of a flow that are under way at most: fewer than its receiver has buffers, so that none is dropped for want of one.
const WINDOW: u64 = 200;
/// Frames that are handled together.
const BURST: usize = 32;
/// How long it may take until every flow flows.
const FIRST: Duration = Duration::from_secs(15);
/// How long nothing may arrive at the end until what is missing is lost.
const SILENCE: Duration = Duration::from_millis(500);

/// EtherType for experiments, then the frame's number.
const TYPE: [u8; 2] = [0x88, 0xb5];
const NUMBER: usize = 16;
const HEADERS: usize = 24;

/// The longest pauses of one phase of a run.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Phase {
    /// Of any flow, between two of its frames.
    pub gap: Duration,
    /// Of this thread itself, between two looks at its guests.
    pub away: Duration,
}

/// What became of the frames of all flows.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Frames {
    pub received: u64,
    pub lost: u64,
    pub disordered: u64,
}

/// A guest, and the flow that it receives.
struct Guest {
    front: Front,
    /// Number of the next frame that it sends.
    next: u64,
    /// Number of the frame that it expects.
    expected: u64,
    received: u64,
    /// Those that were passed over and have not come since.
    missing: u64,
    disordered: u64,
    last: Duration,
}

/// All guests; the neighbours of each pair send to each other.
pub(super) struct Guests {
    guests: Vec<Guest>,
    begin: Instant,
}

impl Guests {
    /// Connects them, and waits until every flow flows.
    pub(super) fn start(sockets: &[impl AsRef<Path>], layout: Features) -> Result<Self, RowError> {
        let features = Features::VERSION_1 | Features::MRG_RXBUF | layout;
        let config = PairConfig {
            receive: RING,
            transmit: RING,
            rx: RxConfig { copy_break: 0, fetch_frame: true, policy: PolicyKind::FixedMtu },
            tx: TxConfig { reclaim_after: NonZeroU16::new(RING), ..TxConfig::default() },
            ..PairConfig::default()
        };
        let guest = |socket: &Path| {
            let front = Front::start(connect(socket)?, &wanted(features, features), &config)?;
            let (next, expected, received, missing, disordered) = (0, 0, 0, 0, 0);
            Ok(Guest { front, next, expected, received, missing, disordered, last: Duration::ZERO })
        };
        let guests = sockets.iter().map(|socket| guest(socket.as_ref())).collect::<Result<_, RowError>>()?;
        let mut all = Self { guests, begin: Instant::now() };
        all.meet()?;
        Ok(all)
    }

    /// Has each send a frame until all have received one, after which all addresses are known. What was sent until then does not count.
    fn meet(&mut self) -> Result<(), RowError> {
        let mut deadline = Duration::ZERO;
        while self.guests.iter().any(|guest| guest.received == 0) {
            let now = self.begin.elapsed();
            if now >= FIRST {
                return Err(RowError::failed("the switch does not carry the frames of every guest"));
            }
            if now >= deadline {
                deadline = now + Duration::from_millis(50);
                (0..self.guests.len()).try_for_each(|at| self.send(at, 1).map(drop))?;
            }
            self.receive(&mut Phase::default())?;
        }
        let mut last = Instant::now();
        while last.elapsed() < Duration::from_millis(20) {
            if self.receive(&mut Phase::default())? > 0 {
                last = Instant::now();
            }
        }
        for at in 0..self.guests.len() {
            let sent = self.guests[at ^ 1].next;
            let guest = &mut self.guests[at];
            (guest.expected, guest.received, guest.missing, guest.disordered) = (sent, sent, 0, 0);
        }
        Ok(())
    }

    /// Sends as fast as frames are taken until `done`, and then receives what is on its way. `phases` has the longest pauses of each `phase`.
    pub(super) fn run(
        &mut self,
        phase: &AtomicUsize,
        done: &AtomicBool,
        phases: &mut Vec<Phase>,
    ) -> Result<Frames, RowError> {
        let begin = self.begin.elapsed();
        self.guests.iter_mut().for_each(|guest| guest.last = begin);
        let mut looked = begin;
        while !done.load(Ordering::Acquire) {
            phases.resize(phase.load(Ordering::Acquire) + 1, Phase::default());
            let Some(current) = phases.last_mut() else { continue };
            let now = self.begin.elapsed();
            current.away = current.away.max(now - std::mem::replace(&mut looked, now));
            self.receive(current)?;
            for at in 0..self.guests.len() {
                let under_way = self.guests[at].next - self.guests[at ^ 1].received;
                let some = WINDOW.saturating_sub(under_way).min(BURST as u64);
                self.send(at, some as usize)?;
            }
        }
        let mut last = Instant::now();
        while last.elapsed() < SILENCE {
            if self.receive(&mut Phase::default())? > 0 {
                last = Instant::now();
            }
            for guest in &mut self.guests {
                let Pair { transmitq, pools, .. } = &mut guest.front.pair;
                transmitq.reclaim(pools);
            }
        }
        let mut frames = Frames::default();
        for (at, guest) in self.guests.iter().enumerate() {
            let sent = self.guests[at ^ 1].next;
            frames.received += guest.received;
            frames.lost += guest.missing + sent.saturating_sub(guest.expected);
            frames.disordered += guest.disordered;
        }
        Ok(frames)
    }

    /// Has a guest send up to so many frames; returns how many there was room for.
    fn send(&mut self, at: usize, most: usize) -> Result<usize, RowError> {
        let guest = &mut self.guests[at];
        guest.front.pair.transmitq.make_room(most, &mut guest.front.pair.pools);
        let mut frame = [0; FRAME];
        frame[..6].copy_from_slice(&mac(at ^ 1));
        frame[6..12].copy_from_slice(&mac(at));
        frame[12..14].copy_from_slice(&TYPE);
        let mut sent = 0;
        while sent < most {
            frame[NUMBER..HEADERS].copy_from_slice(&guest.next.to_be_bytes());
            if !guest.front.pair.send_frame(&Header::default(), &frame) {
                break;
            }
            guest.next += 1;
            sent += 1;
        }
        if sent > 0 {
            guest.front.publish();
        }
        Ok(guest.front.check().map(|()| sent)?)
    }

    /// Takes what has arrived at all guests; returns how many frames that were.
    fn receive(&mut self, phase: &mut Phase) -> Result<usize, RowError> {
        let mut all = 0;
        for (at, guest) in self.guests.iter_mut().enumerate() {
            let Guest { front, expected, received, missing, disordered, last, .. } = guest;
            let Pair { receiveq, pools, .. } = &mut front.pair;
            let from = mac(at ^ 1);
            let mut counted = 0;
            receiveq.lend(BURST, pools, |packet, _| {
                let mut head = [0; HEADERS];
                let head = packet.prefix(&mut head);
                // Frames that are flooded are for others.
                if head.len() == HEADERS && head[..6] == mac(at) && head[6..12] == from {
                    let number = head[NUMBER..].try_into().map_or(0, u64::from_be_bytes);
                    counted += 1;
                    match number.checked_sub(*expected) {
                        Some(passed_over) => {
                            *missing += passed_over;
                            *expected = number + 1;
                            *received += 1;
                        }
                        None => *disordered += 1,
                    }
                }
                Some(packet)
            });
            if counted > 0 {
                let now = self.begin.elapsed();
                phase.gap = phase.gap.max(now - std::mem::replace(last, now));
                front.refill();
            }
            front.check()?;
            all += counted;
        }
        Ok(all)
    }
}

fn mac(guest: usize) -> [u8; 6] {
    [2, 0, 0, 0, 0x2e, guest as u8]
}
