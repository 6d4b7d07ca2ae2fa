//! The innocent guests: two of our drivers, of which the first sends a stream and requests to the second, which answers.
//!
//! Both are made when the switch runs, are used by one thread, which sleeps whenever there is nothing to do, and end with the
//! run. Frames and requests are due at a constant rate, whatever has become of those before (open loop), and the wait of a
//! request is from the time it was due to its answer: what a stall delays is counted, not left out.

use std::collections::BTreeMap;
use std::num::NonZeroU16;
use std::path::Path;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use ringferry_nic::rx::{PolicyKind, RxConfig};
use ringferry_nic::tx::TxConfig;
use ringferry_packet::vnet::Header;
use ringferry_rig::front::{Front, wanted};
use ringferry_rig::handmade::connect;
use ringferry_virtio_net::Features;
use ringferry_virtio_net::driver::{Pair as QueuePair, PairConfig};

use super::absence::Absences;
use crate::experiment::RowError;

/// Bytes of a frame of the stream, and of requests and answers.
const FRAME: usize = 1500;
const REQUEST: usize = 64;
/// The stream in frames a second: 1 Gbit/s.
const STREAM: f64 = 1e9 / (8.0 * FRAME as f64);
/// Requests a second.
const REQUESTS: f64 = 2000.0;
/// Entries of each ring: what the stream brings in 12 ms, for which the guests may be away.
const RING: u16 = 1024;
/// Frames that are handled together.
const BURST: usize = 64;
/// A source that is later than this leaves out what is overdue, as one of live data does.
const LATEST: Duration = Duration::from_millis(10);
/// The time that the thread sleeps when there is nothing to do, so that whoever shares its processor can work.
const NAP: Duration = Duration::from_micros(20);
/// How long the first answer may take, and how long nothing may arrive at the end until what is missing is lost.
const FIRST: Duration = Duration::from_secs(15);
const SILENCE: Duration = Duration::from_millis(300);

const MACS: [[u8; 6]; 2] = [[2, 0, 0, 0, 0x1a, 0], [2, 0, 0, 0, 0x1a, 1]];
/// EtherType for experiments, then what the frame is, its number, and when it was due.
const TYPE: [u8; 2] = [0x88, 0xb5];
const KIND: usize = 14;
const NUMBER: usize = 16;
const HEADERS: usize = 24;
const STREAMED: u8 = 1;
const ASKED: u8 = 2;
const ANSWERED: u8 = 3;

/// The figures of one window.
pub(super) struct Window {
    /// Waits of requests in nanoseconds, those among them that were never answered.
    pub wait: Histogram<u64>,
    /// The same, less the time for which the guests' own thread had no processor.
    pub service: Histogram<u64>,
    /// Frames of the stream that were due, that arrived in time, and that were taken from the sender but never arrived.
    pub due: u64,
    pub arrived: u64,
    pub lost: u64,
    /// Requests that were never answered.
    pub unanswered: u64,
    /// The longest time between two turns of the guests' own thread.
    pub away: Duration,
    /// The time for which it had no processor, in all.
    pub delayed: Duration,
}

/// The innocent guests, with their stream and their requests.
pub(super) struct Pair {
    guests: [Front; 2],
    stream: Box<[u8; FRAME]>,
    begin: Instant,
    /// Frames of the stream that were sent and received, since the beginning.
    sent: u64,
    received: u64,
    /// When each request without an answer was due, in nanoseconds since the beginning.
    waiting: BTreeMap<u64, u64>,
    /// Requests that were sent so far.
    asked: u64,
    /// Answers that found no room yet.
    owed: Vec<u64>,
    waits: Waits,
}

impl Pair {
    /// Connects both guests and waits until the first request is answered.
    pub(super) fn start(
        sockets: [&Path; 2],
        mut alive: impl FnMut() -> Result<(), RowError>,
    ) -> Result<Self, RowError> {
        let guests = [guest(sockets[0])?, guest(sockets[1])?];
        let mut stream = Box::new([0x5a; FRAME]);
        stream[..HEADERS].fill(0);
        stream[..6].copy_from_slice(&MACS[1]);
        stream[6..12].copy_from_slice(&MACS[0]);
        stream[12..14].copy_from_slice(&TYPE);
        stream[KIND] = STREAMED;
        let (begin, waiting, owed) = (Instant::now(), BTreeMap::new(), Vec::new());
        let waits = Waits::new(begin)?;
        let mut pair = Self { guests, stream, begin, sent: 0, received: 0, waiting, asked: 0, owed, waits };
        pair.reach(&mut alive)?;
        Ok(pair)
    }

    /// Asks until a request is answered. Forgets all waits so far.
    ///
    /// # Errors
    /// None was within [`FIRST`]; those of `alive`.
    pub(super) fn reach(&mut self, mut alive: impl FnMut() -> Result<(), RowError>) -> Result<(), RowError> {
        self.waits = Waits::new(self.begin)?;
        self.waiting.clear();
        let begin = Instant::now();
        let mut next = Duration::ZERO;
        while self.waits.all.is_empty() {
            if begin.elapsed() >= FIRST {
                return Err(RowError::failed("the switch carries no frames between the innocent guests"));
            }
            if begin.elapsed() >= next {
                // A port may not yet be up: the first may be lost.
                next = begin.elapsed() + Duration::from_millis(50);
                self.ask(self.now())?;
            }
            self.receive()?;
            alive()?;
            std::thread::sleep(NAP);
        }
        self.waiting.clear();
        Ok(())
    }

    fn now(&self) -> u64 {
        self.begin.elapsed().as_nanos() as u64
    }

    /// Streams and asks for so long; `tick` is called now and then and may say that it is over. Then `calm` is called, which
    /// ends the attack, and what is on its way may still arrive.
    pub(super) fn run(
        &mut self,
        time: Duration,
        mut tick: impl FnMut() -> Result<(), RowError>,
        calm: impl FnOnce() -> Result<(), RowError>,
    ) -> Result<Window, RowError> {
        self.waits = Waits::new(self.begin)?;
        let (first, end) = (self.now(), self.now() + time.as_nanos() as u64);
        let (received, sent) = (self.received, self.sent);
        let (mut frames, mut requests) = (0u64, 0u64);
        let (mut last, mut away, mut turns) = (first, 0, 0u32);
        loop {
            let now = self.now();
            if now >= end {
                break;
            }
            away = away.max(now - last);
            self.waits.absences.look(now);
            last = now;
            turns = turns.wrapping_add(1);
            if turns.is_multiple_of(256) {
                tick()?;
            }
            let due = |rate: f64| ((now - first) as f64 * rate / 1e9) as u64;
            let mut work = self.receive()?;
            while requests < due(REQUESTS) {
                let at = first + (requests as f64 * 1e9 / REQUESTS) as u64;
                if !self.ask(at)? {
                    break;
                }
                requests += 1;
                work = true;
            }
            let overdue = due(STREAM).saturating_sub((LATEST.as_secs_f64() * STREAM) as u64);
            frames = frames.max(overdue);
            let some = (due(STREAM) - frames).min(BURST as u64);
            let sent = self.stream(some)?;
            frames += sent;
            if !work && sent == 0 {
                std::thread::sleep(NAP);
            }
        }
        let arrived = self.received - received;
        calm()?;
        self.receive_rest()?;
        // Requests that found no room until now wait since they were due.
        let all = (time.as_secs_f64() * REQUESTS) as u64;
        let now = self.now();
        for request in requests..all {
            self.waits.record(first + (request as f64 * 1e9 / REQUESTS) as u64, now);
        }
        let unanswered = self.waiting.len() as u64;
        for due in std::mem::take(&mut self.waiting).into_values() {
            self.waits.record(due, now);
        }
        let due = (time.as_secs_f64() * STREAM) as u64;
        // What still lies in the ring was not taken.
        let left = self.guests[0].pair.transmitq.in_flight() as u64;
        let lost = (self.sent - sent).saturating_sub(self.received - received).saturating_sub(left);
        let Waits { all, service, absences } = std::mem::replace(&mut self.waits, Waits::new(self.begin)?);
        Ok(Window {
            wait: all,
            service,
            due,
            arrived: arrived.min(due),
            lost,
            unanswered,
            away: Duration::from_nanos(away),
            delayed: absences.sum(),
        })
    }

    /// Receives until nothing is missing, or nothing comes any more.
    fn receive_rest(&mut self) -> Result<(), RowError> {
        let mut last = Instant::now();
        while last.elapsed() < SILENCE {
            self.waits.absences.look(self.now());
            if self.receive()? {
                last = Instant::now();
            }
            let QueuePair { transmitq, pools, .. } = &mut self.guests[0].pair;
            transmitq.reclaim(pools);
            if self.waiting.is_empty() && self.received >= self.sent {
                return Ok(());
            }
            std::thread::sleep(NAP);
        }
        Ok(())
    }

    /// Sends a request that was due at this time; says whether there was room.
    fn ask(&mut self, due: u64) -> Result<bool, RowError> {
        let number = self.asked;
        let asked = say(&mut self.guests[0], MACS[1], MACS[0], ASKED, number)?;
        if asked {
            self.waiting.insert(number, due);
            self.asked += 1;
        }
        Ok(asked)
    }

    /// Sends up to so many frames of the stream; returns how many.
    fn stream(&mut self, frames: u64) -> Result<u64, RowError> {
        let front = &mut self.guests[0];
        front.pair.transmitq.make_room(frames as usize, &mut front.pair.pools);
        let mut sent = 0;
        while sent < frames && front.pair.send_frame(&Header::default(), &self.stream[..]) {
            sent += 1;
        }
        if sent > 0 {
            front.publish();
            self.sent += sent;
        }
        front.check()?;
        Ok(sent)
    }

    /// Takes what has arrived at both guests, and answers; says whether there was anything.
    fn receive(&mut self) -> Result<bool, RowError> {
        let (received, owed) = (&mut self.received, &mut self.owed);
        let second = take(&mut self.guests[1], |kind, number| match kind {
            STREAMED => *received += 1,
            ASKED => owed.push(number),
            _ => {}
        })?;
        let mut answered = 0;
        for number in &self.owed {
            if !say(&mut self.guests[1], MACS[0], MACS[1], ANSWERED, *number)? {
                break;
            }
            answered += 1;
        }
        self.owed.drain(..answered);
        let (waiting, waits, begin) = (&mut self.waiting, &mut self.waits, self.begin);
        let first = take(&mut self.guests[0], |kind, number| {
            if let Some(due) = waiting.remove(&number).filter(|_| kind == ANSWERED) {
                waits.record(due, begin.elapsed().as_nanos() as u64);
            }
        })?;
        Ok(first + second > 0)
    }
}

/// The waits of requests in a window.
struct Waits {
    all: Histogram<u64>,
    /// Less the guests' own absences.
    service: Histogram<u64>,
    absences: Absences,
}

impl Waits {
    /// Begins a window now; times are since `begin`.
    fn new(begin: Instant) -> Result<Self, RowError> {
        let absences = Absences::new(begin.elapsed().as_nanos() as u64)?;
        Ok(Self { all: waits()?, service: waits()?, absences })
    }

    /// Records a request that was due, and answered or given up, at these times.
    fn record(&mut self, due: u64, now: u64) {
        self.absences.look(now);
        let wait = now.saturating_sub(due);
        self.all.saturating_record(wait);
        self.service.saturating_record(wait - self.absences.between(due, now));
    }
}

/// A histogram of nanoseconds, up to minutes.
pub(super) fn waits() -> Result<Histogram<u64>, RowError> {
    Histogram::new_with_bounds(1, 1 << 40, 3).map_err(RowError::failed)
}

/// A guest on a port.
fn guest(socket: &Path) -> Result<Front, RowError> {
    let features = Features::VERSION_1 | Features::MRG_RXBUF;
    let config = PairConfig {
        receive: RING,
        transmit: RING,
        rx: RxConfig { copy_break: 0, fetch_frame: true, policy: PolicyKind::FixedMtu },
        tx: TxConfig { reclaim_after: NonZeroU16::new(RING), ..TxConfig::default() },
        ..PairConfig::default()
    };
    Ok(Front::start(connect(socket)?, &wanted(features | Features::INDIRECT_DESC, features), &config)?)
}

/// Sends a small frame; says whether there was room.
fn say(front: &mut Front, to: [u8; 6], from: [u8; 6], kind: u8, number: u64) -> Result<bool, RowError> {
    let mut frame = [0; REQUEST];
    frame[..6].copy_from_slice(&to);
    frame[6..12].copy_from_slice(&from);
    frame[12..14].copy_from_slice(&TYPE);
    frame[KIND] = kind;
    frame[NUMBER..HEADERS].copy_from_slice(&number.to_be_bytes());
    front.pair.transmitq.make_room(1, &mut front.pair.pools);
    let sent = front.pair.send_frame(&Header::default(), &frame);
    front.publish();
    front.check()?;
    Ok(sent)
}

/// Takes all that has arrived, as a kernel does; tells of each frame that is one of ours what it is and its number. Returns how many there were. (With one
/// burst in a turn, in which as many are sent, a ring that a stall had filled stayed full, and frames were lost long after it.)
fn take(front: &mut Front, mut tell: impl FnMut(u8, u64)) -> Result<usize, RowError> {
    let mut all = 0;
    loop {
        let QueuePair { receiveq, pools, .. } = &mut front.pair;
        let received = receiveq.lend(BURST, pools, |packet, _| {
            let mut head = [0; HEADERS];
            let head = packet.prefix(&mut head);
            // Frames that are flooded everywhere are for nobody here.
            if head.len() == HEADERS && head[12..14] == TYPE && head[..5] == MACS[0][..5] {
                let number = head[NUMBER..].try_into().map_or(0, u64::from_be_bytes);
                tell(head[KIND], number);
            }
            Some(packet)
        });
        if received > 0 {
            front.refill();
        }
        all += received;
        // A flood of others' frames to everybody may have no end.
        if received < BURST || all >= usize::from(RING) {
            front.check()?;
            return Ok(all);
        }
    }
}
