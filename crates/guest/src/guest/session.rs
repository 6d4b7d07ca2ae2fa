//! A session of `ringferry guest` with a back end: a thread for each queue pair carries packets, while this one waits
//! for signals, for the end of the connection, and for requests to show or change something.
//!
//! # How the number of pairs in use changes under traffic
//!
//! `ctl channels` says how many there may be; whether they are all needed, [`spread`](super::spread).
//!
//! More: the new pairs post receive buffers; the back end is told to use them (`SET_VRING_ENABLE`); the kernel is told to
//! (their tap queues are attached).
//!
//! Fewer: the kernel sends its packets elsewhere; those pairs send what is left in their tap queues, which are detached,
//! and wait until the back end has taken all of it; then it is told to use them no more. What it delivered before
//! it knew is received as always: the threads stay.
//!
//! A step that fails is undone together with those before it, and the old number stays.

use std::cmp::Ordering;
use std::io;
use std::ops::Range;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::{Builder, ScopedJoinHandle, scope};
use std::time::{Duration, Instant};

use ringferry_control::{Answer, ControlServer, Request};
use ringferry_nic::cpus::{CpuOptions, Direction, cpu_for_queue};
use ringferry_sys::cpu;
use ringferry_sys::epoll::{Epoll, EventBuf, Interest};
use ringferry_sys::eventfd::EventFd;
use ringferry_sys::signal::Signals;
use ringferry_sys::watchdog::Watchdog;
use ringferry_vhost_user::{Connection, FrontendError};
use ringferry_virtio_net::{Features, queue_index};

use super::args::{GuestArgs, Switch};
use super::bridge::{Bridge, End, Line, Order};
use super::counts::Counts;
use super::rings::Rings;
use super::spread::{Gauge, Spread, WINDOW};
use super::status::{Status, check_range, respond};
use super::taps::Taps;

/// How long a pair may take to send what is left when it is switched off, and a thread to answer. A ring full takes
/// milliseconds; a back end that takes nothing is stuck. Whoever asked waits for five seconds.
const PATIENCE: Duration = Duration::from_secs(2);

/// How often things that nobody announces are looked at: threads that a back end holds in a kick, silent control
/// clients, processors that come and go.
const TICK: Duration = Duration::from_secs(1);

/// How often threads that were told to end are looked at, and freed where a back end holds them.
const LOOK: Duration = Duration::from_millis(2);

const SIGNALS: u64 = 0;
const CONNECTION: u64 = 1;
const CONTROL: u64 = 2;
const ENDED: u64 = 3;

/// What a session works on.
pub(super) struct Session<'a> {
    pub(super) args: &'a GuestArgs,
    pub(super) taps: &'a Taps,
    pub(super) connection: &'a mut Connection,
    /// The features agreed on.
    pub(super) features: Features,
    pub(super) started: Instant,
    /// Pairs that may be used.
    pub(super) combined: u16,
    /// Pairs in use, the first.
    used: u16,
    /// The back end cannot be spoken with any more.
    lost: bool,
    /// Processors that this process may use.
    online: Vec<usize>,
    /// The processor of each pair; `None`: any.
    placed: Vec<Option<usize>>,
    /// When flows take all of them.
    spread: Spread,
    /// One line to each pair's thread. When they are dropped the threads are told to stop.
    lines: Lines,
}

#[derive(Default)]
struct Lines(Vec<Line>);

impl Drop for Lines {
    fn drop(&mut self) {
        self.0.iter().for_each(|line| line.give(Order::Stop));
    }
}

impl<'a> Session<'a> {
    /// With a back end whose device was started, of whose pairs all `combined` or, for the time being, the first is enabled.
    pub(super) fn new(
        args: &'a GuestArgs,
        taps: &'a Taps,
        connection: &'a mut Connection,
        features: Features,
        started: Instant,
        [combined, used]: [u16; 2],
    ) -> Self {
        let spread = Spread::new(args.spread_at);
        let (online, placed, lines) = (Vec::new(), Vec::new(), Lines::default());
        Self {
            args,
            taps,
            connection,
            features,
            started,
            combined,
            used,
            lost: false,
            online,
            placed,
            spread,
            lines,
        }
    }

    /// Carries packets until something ends it; returns that, and the number of pairs that were in use.
    pub(super) fn run(
        mut self,
        signals: &Signals,
        control: Option<&mut ControlServer>,
        rings: &mut Rings,
        counts: &mut [Counts],
    ) -> io::Result<(End, u16)> {
        let ended = EventFd::new()?;
        let epoll = Epoll::new()?;
        epoll.add(signals, SIGNALS, Interest::READABLE)?;
        epoll.add(&*self.connection, CONNECTION, Interest::READABLE | Interest::HANGUP)?;
        epoll.add(&ended, ENDED, Interest::READABLE)?;
        if let Some(control) = &control {
            epoll.add(&**control, CONTROL, Interest::READABLE)?;
        }
        let (taps, pieces) = (self.taps.queues(), self.args.pieces.map(|bytes| bytes as usize));
        let gauges: Vec<_> = rings.pairs.iter().map(|_| Gauge::default()).collect();
        let agreed = self.features.guest_offloads();
        // A back end can make a kick wait; this thread makes none.
        let watchdog = Watchdog::start("kick-watch")?;
        scope(|scope| {
            let mut threads = Vec::new();
            for (number, ((rings, counts), gauge)) in
                rings.pairs.iter_mut().zip(counts).zip(&gauges).enumerate()
            {
                let (line, inbox) = Line::new()?;
                let shared = (counts, gauge, watchdog.watcher());
                let bridge = Bridge::new((number, taps), rings, shared, (pieces, agreed), inbox);
                let ended = &ended;
                let run = move || {
                    let end = bridge.run();
                    let _ = ended.signal();
                    end
                };
                threads.push(Builder::new().name(format!("pair-{number}")).spawn_scoped(scope, run)?);
                self.lines.0.push(line);
            }
            self.settle();
            let mut told = self.wait(&epoll, signals, control, &gauges);
            let combined = self.combined;
            drop(self);
            let mut told_to_end = matches!(told, Ok(Some(End::Signal)));
            let deadline = Instant::now() + PATIENCE;
            while !threads.iter().all(ScopedJoinHandle::is_finished) {
                if signals.next()?.is_some() {
                    told_to_end = true;
                    told = Ok(Some(End::Signal));
                }
                // Nothing is known that holds a thread for longer; whoever wants the process to end need not wait for it.
                if told_to_end && Instant::now() >= deadline {
                    tracing::error!("a queue pair's thread does not end; leaving it behind");
                    std::process::exit(1);
                }
                std::thread::sleep(LOOK);
            }
            let mut end = told?;
            for thread in threads {
                let its = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
                // A broken ring is no ring to go on with, whatever else has happened.
                if let Some(its) = its.filter(|_| end != Some(End::Signal)) {
                    end = Some(its);
                }
            }
            Ok((end.unwrap_or(End::Disconnected), combined))
        })
    }

    /// Waits until the session is over; `None` when a thread has ended, which says why.
    fn wait(
        &mut self,
        epoll: &Epoll,
        signals: &Signals,
        mut control: Option<&mut ControlServer>,
        gauges: &[Gauge],
    ) -> io::Result<Option<End>> {
        let mut events = EventBuf::with_capacity(8);
        let mut tick = Instant::now() + self.tick();
        loop {
            epoll.wait(&mut events, Some(tick.saturating_duration_since(Instant::now())))?;
            for event in events.iter() {
                match event.token {
                    SIGNALS if signals.next()?.is_some() => return Ok(Some(End::Signal)),
                    CONNECTION if self.connection.frontend().check().is_err() => {
                        return Ok(Some(End::Disconnected));
                    }
                    CONTROL => {
                        if let Some(control) = &mut control {
                            control.serve(&mut |request| respond(self.answer(request)));
                        }
                    }
                    ENDED => return Ok(None),
                    _ => {}
                }
            }
            if self.lost {
                return Ok(Some(End::Disconnected));
            }
            if Instant::now() >= tick {
                tick = Instant::now() + self.tick();
                if let Some(control) = &mut control {
                    control.tick();
                }
                self.adapt(gauges);
                self.settle();
            }
        }
    }

    /// Time between looks at what nobody announces.
    fn tick(&self) -> Duration {
        if self.combined > 1 && self.spread.adapts() { WINDOW } else { TICK }
    }

    /// Flows have more than the first pair.
    fn is_spread(&self) -> bool {
        self.used > 1
    }

    /// Looks whether there is more to do than one pair does, or not any more, and has flows follow.
    fn adapt(&mut self, gauges: &[Gauge]) {
        let spread = self.is_spread();
        if self.combined == 1 || !self.spread.look(spread, gauges.iter(), &self.online) {
            return;
        }
        let (old, wanted) = (self.used, if spread { 1 } else { self.combined });
        if wanted < old && !self.taps.steer_to_first(Some(wanted)) {
            // The last packets of a queue that is detached would be lost, and nobody has asked for that.
            self.spread.give_up();
        } else if let Err(error) = self.use_pairs(wanted) {
            tracing::debug!("flows stay on {old} of {} pairs: {error}", self.combined);
        } else {
            tracing::debug!(old, new = wanted, "flows have moved");
        }
    }

    /// Uses so many pairs. After an error those in use are as before.
    fn use_pairs(&mut self, wanted: u16) -> Result<(), String> {
        let old = self.used;
        match wanted.cmp(&old) {
            Ordering::Greater => {
                self.more(wanted)?;
                self.lines.0.iter().take(wanted.into()).for_each(|line| line.give(Order::Share(wanted)));
            }
            Ordering::Less => self.fewer(wanted)?,
            Ordering::Equal => {}
        }
        self.used = wanted;
        self.settle();
        Ok(())
    }

    /// Pairs that there are.
    fn pairs(&self) -> u16 {
        self.lines.0.len() as u16
    }

    fn answer(&mut self, request: Request) -> Result<Answer, String> {
        if let Request::Channels { port, combined: Some(wanted) } = &request
            && *port == self.args.tap
        {
            check_range(*wanted, self.pairs())?;
            let used = if self.spread.adapts() && !self.is_spread() { 1 } else { *wanted };
            self.use_pairs(used)?;
            let old = std::mem::replace(&mut self.combined, *wanted);
            if *wanted != old {
                tracing::info!(old, new = *wanted, used = self.used, "the number of queue pairs has changed");
            }
        }
        let reports = || self.ask(0..self.pairs(), Order::Report);
        let status = Status {
            args: self.args,
            started: self.started,
            up: true,
            features: self.features,
            max: self.pairs(),
            combined: self.combined,
            used: self.used,
            cpus: &self.placed,
        };
        status.answer(&request, reports)
    }

    /// Uses more pairs.
    fn more(&mut self, wanted: u16) -> Result<(), String> {
        let old = self.used;
        self.ask(old..wanted, Order::Post)?;
        self.enable(old..wanted, true)?;
        if let Err(error) = self.taps.attach(wanted) {
            let undone = self.taps.attach(old).map_err(|error| error.to_string());
            let undone = undone.and_then(|()| self.ask(old..wanted, Order::Drain));
            // What cannot be undone does no harm: a pair that is enabled and gets nothing to send.
            if undone.is_ok() {
                let _ = self.enable(old..wanted, false);
            }
            return Err(error.to_string());
        }
        Ok(())
    }

    /// Uses fewer pairs.
    fn fewer(&mut self, wanted: u16) -> Result<(), String> {
        self.taps.steer_to_first(Some(wanted));
        let result = self.withdraw(wanted..self.used);
        if result.is_err() {
            let _ = self.taps.attach(self.used);
        }
        self.taps.steer_to_first(None);
        result
    }

    fn withdraw(&mut self, pairs: Range<u16>) -> Result<(), String> {
        // What is in a queue of the tap when it is detached is lost.
        self.ask(pairs.clone(), Order::Drain)?;
        self.taps.attach(pairs.start).map_err(|error| error.to_string())?;
        // What is in a ring when it is disabled is lost, too (a disabled transmitq discards).
        self.ask(pairs.clone(), Order::Drain)?;
        self.enable(pairs, false)
    }

    /// Enables or disables both rings of these pairs, or changes none.
    fn enable(&mut self, pairs: Range<u16>, enabled: bool) -> Result<(), String> {
        // All of them together: meanwhile nobody else is heard.
        self.connection.frontend().set_deadline(Some(Instant::now() + PATIENCE));
        let result = self.enable_each(pairs, enabled);
        self.connection.frontend().set_deadline(None);
        result
    }

    fn enable_each(&mut self, pairs: Range<u16>, enabled: bool) -> Result<(), String> {
        let rings = queue_index::receiveq(pairs.start)..queue_index::receiveq(pairs.end);
        for ring in rings.clone() {
            let Err(error) = self.connection.set_enabled(ring, enabled) else { continue };
            let intact = matches!(error, FrontendError::Refused(_) | FrontendError::NotNegotiated { .. });
            self.lost |= !intact;
            // A connection that does not work any more ends, and with it what this one said.
            let mut changed = rings.start..ring;
            let _ = changed.try_for_each(|ring| self.connection.set_enabled(ring, !enabled));
            return Err(error.to_string());
        }
        Ok(())
    }

    /// Gives an order to the threads of these pairs; returns their answers when all have answered.
    fn ask<T>(&self, pairs: Range<u16>, order: impl Fn(SyncSender<T>) -> Order) -> Result<Vec<T>, String> {
        let lines = &self.lines.0[usize::from(pairs.start)..usize::from(pairs.end)];
        let answers = lines.iter().map(|line| {
            let (sender, receiver) = sync_channel(1);
            line.give(order(sender));
            receiver
        });
        let answers: Vec<_> = answers.collect();
        let deadline = Instant::now() + PATIENCE;
        let answers = pairs.zip(answers).map(|(pair, answer)| {
            let left = deadline.saturating_duration_since(Instant::now());
            answer.recv_timeout(left).map_err(|_| {
                format!("queue pair {pair} does not come to an end: the back end takes nothing from it; try again later")
            })
        });
        answers.collect()
    }

    /// Looks which processors there are, and sends each thread where it belongs if that has changed.
    fn settle(&mut self) {
        self.online = cpu::allowed().unwrap_or_default();
        let pinned = if self.args.pin == Switch::On { self.used } else { 0 };
        let places = places(self.pairs(), pinned, &self.online);
        self.placed.resize(places.len(), None);
        for ((line, now), before) in self.lines.0.iter().zip(&places).zip(&self.placed) {
            if now != before {
                line.give(Order::Place(now.map_or_else(|| self.online.clone(), |cpu| vec![cpu])));
            }
        }
        self.placed = places;
    }
}

/// The processor of each of `pairs` pairs, of which the first `used` are in use: one for each of several, if there are
/// enough, in rising order.
fn places(pairs: u16, used: u16, online: &[usize]) -> Vec<Option<usize>> {
    let enough = used > 1 && online.len() >= usize::from(used);
    let options = CpuOptions { rx_queues: used.into(), ..CpuOptions::default() };
    let cpu = |pair: u16| cpu_for_queue(pair.into(), Direction::Rx, online, &options);
    (0..pairs).map(|pair| cpu(pair).filter(|_| enough && pair < used)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_in_use_have_a_processor_each_where_there_are_enough() {
        assert_eq!(places(4, 2, &[0, 3]), [Some(0), Some(3), None, None]);
        assert_eq!(places(2, 2, &[5, 6, 7]), [Some(5), Some(6)]);
        assert_eq!(places(4, 3, &[0, 3]), [None; 4]);
        assert_eq!(places(2, 1, &[0, 3]), [None; 2], "a single pair goes where there is room");
        assert_eq!(places(2, 2, &[]), [None; 2]);
    }
}
