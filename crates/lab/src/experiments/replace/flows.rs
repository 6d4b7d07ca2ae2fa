//! The flows: neighbouring ends send numbered frames to each other as fast as they are taken. One thread has all ends, and polls.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use ringferry_virtio_net::Features;

use super::end::{End, FRAME, HEADERS, Place};
use crate::experiment::RowError;

/// Frames of a flow that are under way at most: fewer than a guest has buffers and a tap has room, so that none is dropped for want of one.
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

/// The longest pauses of one phase of a run.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Phase {
    /// Of any flow, between two of its frames.
    pub gap: Duration,
    /// Of this thread itself, between two looks at its ends.
    pub away: Duration,
}

/// The fate of the frames of all flows.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Frames {
    pub received: u64,
    pub lost: u64,
    pub disordered: u64,
}

/// An end, and the flow that it receives.
struct Side {
    end: End,
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

/// All ends; the neighbours of each pair send to each other.
pub(super) struct Flows {
    sides: Vec<Side>,
    begin: Instant,
}

impl Flows {
    /// Connects the ends, and waits until every flow flows.
    pub(super) fn start(places: Vec<Place>, layout: Features) -> Result<Self, RowError> {
        let side = |place| {
            let (next, expected, received, missing, disordered) = (0, 0, 0, 0, 0);
            let end = End::start(place, layout)?;
            Ok(Side { end, next, expected, received, missing, disordered, last: Duration::ZERO })
        };
        let sides = places.into_iter().map(side).collect::<Result<_, RowError>>()?;
        let mut all = Self { sides, begin: Instant::now() };
        all.meet()?;
        Ok(all)
    }

    /// Has each send a frame until all have received one, after which all addresses are known. What was sent until then does not count.
    fn meet(&mut self) -> Result<(), RowError> {
        let mut deadline = Duration::ZERO;
        while self.sides.iter().any(|side| side.received == 0) {
            let now = self.begin.elapsed();
            if now >= FIRST {
                return Err(RowError::failed("the switch does not carry the frames of every port"));
            }
            if now >= deadline {
                deadline = now + Duration::from_millis(50);
                (0..self.sides.len()).try_for_each(|at| self.send(at, 1))?;
            }
            self.receive(&mut Phase::default())?;
        }
        self.settle(Duration::from_millis(20))?;
        for at in 0..self.sides.len() {
            let sent = self.sides[at ^ 1].next;
            let side = &mut self.sides[at];
            (side.expected, side.received, side.missing, side.disordered) = (sent, sent, 0, 0);
        }
        Ok(())
    }

    /// Receives until nothing has arrived for so long.
    fn settle(&mut self, silence: Duration) -> Result<(), RowError> {
        let mut last = Instant::now();
        while last.elapsed() < silence {
            if self.receive(&mut Phase::default())? > 0 {
                last = Instant::now();
            }
            self.sides.iter_mut().for_each(|side| side.end.reclaim());
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
        self.sides.iter_mut().for_each(|side| side.last = begin);
        let mut looked = begin;
        while !done.load(Ordering::Acquire) {
            phases.resize(phase.load(Ordering::Acquire) + 1, Phase::default());
            let Some(current) = phases.last_mut() else { continue };
            let now = self.begin.elapsed();
            current.away = current.away.max(now - std::mem::replace(&mut looked, now));
            self.receive(current)?;
            for at in 0..self.sides.len() {
                let under_way = self.sides[at].next - self.sides[at ^ 1].received;
                let some = WINDOW.saturating_sub(under_way).min(BURST as u64);
                self.send(at, some as usize)?;
            }
        }
        self.settle(SILENCE)?;
        let mut frames = Frames::default();
        for (at, side) in self.sides.iter().enumerate() {
            let sent = self.sides[at ^ 1].next;
            frames.received += side.received;
            frames.lost += side.missing + sent.saturating_sub(side.expected);
            frames.disordered += side.disordered;
        }
        Ok(frames)
    }

    /// Has an end send up to so many frames, as far as there is room.
    fn send(&mut self, at: usize, most: usize) -> Result<(), RowError> {
        if most == 0 {
            return Ok(());
        }
        let Side { end, next, .. } = &mut self.sides[at];
        end.make_room(most);
        let mut frame = [0; FRAME];
        frame[..6].copy_from_slice(&mac(at ^ 1));
        frame[6..12].copy_from_slice(&mac(at));
        frame[12..14].copy_from_slice(&TYPE);
        for _ in 0..most {
            frame[NUMBER..HEADERS].copy_from_slice(&next.to_be_bytes());
            if !end.send(&frame)? {
                break;
            }
            *next += 1;
        }
        end.publish()
    }

    /// Takes what has arrived at all ends; returns how many frames that were.
    fn receive(&mut self, phase: &mut Phase) -> Result<usize, RowError> {
        let mut all = 0;
        for (at, side) in self.sides.iter_mut().enumerate() {
            let Side { end, expected, received, missing, disordered, last, .. } = side;
            let from = mac(at ^ 1);
            let mut counted = 0;
            end.receive(BURST, |frame| {
                // Frames that are flooded are for others.
                let Some(head) = frame.first_chunk::<HEADERS>() else { return };
                if head[..6] == mac(at) && head[6..12] == from {
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
            })?;
            if counted > 0 {
                let now = self.begin.elapsed();
                phase.gap = phase.gap.max(now - std::mem::replace(last, now));
            }
            all += counted;
        }
        Ok(all)
    }
}

fn mac(end: usize) -> [u8; 6] {
    [2, 0, 0, 0, 0x2e, end as u8]
}
