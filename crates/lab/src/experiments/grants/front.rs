//! The front end, in a process of its own: `lab child grants front ...`, which the lab talks to over its standard input and
//! output, a line at a time.
//!
//! | line | from | meaning |
//! |---|---|---|
//! | `ready` | front | connected, buffers posted, static grants handed over: packets flow |
//! | `end [N...]` | lab | end, when as many frames have arrived in each queue; a sender ends at once |
//! | `done [N...]` | front | frames sent or received, by queue, every one of them answered |
//! | `closed N` | front | the interface is closed, and so many pages of it were mapped still |

use std::io::{self, BufRead, Write};
use std::path::PathBuf;
use std::sync::mpsc::{self, Receiver, TryRecvError};
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};

use ringferry_nic::rx::RxConfig;
use ringferry_xen::domain::PAGE;
use ringferry_xen_net::netfront::{Pair, PairConfig};
use ringferry_xen_net::xenbus::{FrontConfig, FrontEvent, FrontendDriver};
use serde::{Deserialize, Serialize};

use super::case::{Case, Direction, Mode};
use super::machine::{self, CLASS, Provider};
use super::processors::Processor;
use crate::experiment::RowError;
use crate::experiments::txmap::clock::{Finally, Gauge, Over, PATIENCE, joined};
use crate::frames::segments::Frames;

/// How often to look at the other side's words, without taking time from the threads that work.
const LOOK: Duration = Duration::from_millis(10);

/// The order that the process gets on its command line.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Order {
    pub folder: PathBuf,
    pub provider: Provider,
    pub case: Case,
    /// Processors of both sides.
    pub cpus: Vec<usize>,
}

/// Runs the front end's process.
pub(super) fn child(order: &Order) -> Result<(), RowError> {
    let (sender, lines) = mpsc::channel();
    std::thread::spawn(move || {
        for line in io::stdin().lock().lines().map_while(Result::ok) {
            if sender.send(line).is_err() {
                return;
            }
        }
    });
    let mut front = Front::connect(order)?;
    let pairs = std::mem::take(&mut front.pairs);
    let pairs = run(order, pairs, &lines)?;
    front.close(pairs)
}

fn say(line: &str) -> Result<(), RowError> {
    let mut out = io::stdout().lock();
    writeln!(out, "{line}")?;
    Ok(out.flush()?)
}

/// Reads the numbers behind a word.
fn numbers(line: &str, word: &str) -> Result<Vec<u64>, RowError> {
    let bad = || RowError::failed(format!("`{word} NUMBERS` was expected, and `{line}` came"));
    let rest = line.strip_prefix(word).ok_or_else(bad)?;
    rest.split_whitespace().map(|number| number.parse().map_err(|_| bad())).collect()
}

/// A line about so many frames, which [`done`] reads.
fn tell(word: &str, numbers: &[u64]) -> String {
    numbers.iter().fold(word.to_owned(), |line, number| format!("{line} {number}"))
}

/// The line that orders the process to end.
pub(super) fn end(given: &[u64]) -> String {
    tell("end", given)
}

/// The frames that a front end says it is done with.
pub(super) fn done(line: &str) -> Result<Vec<u64>, RowError> {
    numbers(line, "done")
}

/// The front end's interface and its queues.
struct Front {
    front: FrontendDriver,
    pairs: Vec<Pair>,
}

impl Front {
    /// Connects, and waits until the back end has what it is to have.
    fn connect(order: &Order) -> Result<Self, RowError> {
        let (domain, store) = machine::front(order.provider, &order.folder)?;
        let case = &order.case;
        let (persistent, static_grants) = machine::features(case);
        // Frames are looked at where they lie and given back at once: copying small ones would be work for nothing.
        let rx = RxConfig { copy_break: 0, ..RxConfig::default() };
        let config = FrontConfig {
            class: CLASS.into(),
            queues: case.queues as u16,
            pair: PairConfig { rx, ..PairConfig::default() },
            persistent,
            static_grants,
            ..FrontConfig::default()
        };
        let mut front = FrontendDriver::new(store, domain, config).map_err(RowError::failed)?;
        let mut pairs = Vec::new();
        let begin = Instant::now();
        loop {
            match front.poll().map_err(RowError::failed)? {
                Some(FrontEvent::Connected(session)) => pairs = session.pairs,
                Some(FrontEvent::Busy) => {}
                Some(event) => return Err(RowError::failed(format!("while connecting: {event:?}"))),
                None => std::thread::sleep(Duration::from_millis(1)),
            }
            // All pages but those of the rings, of the control ring and its list.
            let expected = front.granted().saturating_sub(2 * pairs.len() + 2);
            let handed_over = case.mode != Mode::Static || front.static_grants() == expected;
            if !pairs.is_empty() && handed_over {
                return Ok(Self { front, pairs });
            }
            if begin.elapsed() > PATIENCE {
                return Err(RowError::failed(format!("the front end was not connected within {PATIENCE:?}")));
            }
        }
    }

    /// Closes the interface and says how many of its pages were mapped then.
    fn close(mut self, pairs: Vec<Pair>) -> Result<(), RowError> {
        self.front.close();
        let mut pairs = Some(pairs);
        let begin = Instant::now();
        while begin.elapsed() < PATIENCE {
            match self.front.poll().map_err(RowError::failed)? {
                Some(FrontEvent::Stop) => {
                    self.front.stopped(pairs.take().unwrap_or_default()).map_err(RowError::failed)?;
                }
                Some(FrontEvent::Closed { mapped }) => return say(&tell("closed", &[mapped as u64])),
                Some(_) => {}
                None => std::thread::sleep(Duration::from_millis(1)),
            }
        }
        Err(RowError::failed(format!("the front end was not closed within {PATIENCE:?}")))
    }
}

/// Lets packets flow until the lab has had enough.
fn run(order: &Order, pairs: Vec<Pair>, lines: &Receiver<String>) -> Result<Vec<Pair>, RowError> {
    let case = &order.case;
    let processors = Processor::of_side(&order.cpus, true, case.queues);
    let over = &Over::default();
    let wanted: Vec<Gauge> = pairs.iter().map(|_| Gauge::default()).collect();
    std::thread::scope(|scope| {
        let _finally = Finally([over]);
        let mut threads = Vec::new();
        for ((mut pair, processor), wanted) in pairs.into_iter().zip(processors).zip(&wanted) {
            // All are there before the first packet comes.
            if pair.refill() {
                pair.events().notify_receive()?;
            }
            let mut side = Side { pair, case: *case, frames: case.frames() };
            threads.push(scope.spawn(move || -> Result<(Pair, u64), RowError> {
                processor.pin()?;
                side.work(processor, over, wanted)?;
                Ok((side.pair, side.frames.count))
            }));
        }
        say("ready")?;
        let line = listen(lines, &threads)?;
        let numbers = numbers(&line, "end")?;
        for (wanted, number) in wanted.iter().zip(numbers) {
            wanted.set(number);
        }
        over.tell();
        let mut pairs = Vec::new();
        let mut counts = Vec::new();
        for thread in threads {
            let (pair, count) = joined(thread.join())?;
            pairs.push(pair);
            counts.push(count);
        }
        say(&tell("done", &counts))?;
        Ok(pairs)
    })
}

/// The lab's next word, or what one of the threads died of.
fn listen<T>(
    lines: &Receiver<String>,
    threads: &[ScopedJoinHandle<'_, Result<T, RowError>>],
) -> Result<String, RowError> {
    loop {
        match lines.try_recv() {
            Ok(line) => return Ok(line),
            Err(TryRecvError::Disconnected) => return Err(RowError::failed("the lab is gone")),
            // Whoever joins them hears why.
            Err(TryRecvError::Empty) if threads.iter().any(ScopedJoinHandle::is_finished) => {
                return Ok("end".into());
            }
            Err(TryRecvError::Empty) => std::thread::sleep(LOOK),
        }
    }
}

/// The front end's side of a queue.
struct Side {
    pair: Pair,
    case: Case,
    frames: Frames,
}

impl Side {
    /// Works until it is told to end and the back end has answered everything that was sent, or has given all that is
    /// `wanted`.
    fn work(&mut self, processor: Processor, over: &Over, wanted: &Gauge) -> Result<(), RowError> {
        let mut told = None;
        loop {
            let done = match self.case.direction {
                Direction::Transmit if told.is_some() => self.pair.reclaim(),
                Direction::Transmit => self.send()?,
                Direction::Receive => self.receive()?,
            };
            if done > 0 {
                continue;
            }
            if let Some(fault) = self.pair.fault() {
                return Err(RowError::failed(format!("the back end broke a ring: {fault}")));
            }
            if told.is_none() && over.told() {
                told = Some(Instant::now());
                continue;
            }
            if let Some(told) = told {
                let ended = match self.case.direction {
                    Direction::Transmit => self.pair.transmit.in_flight() == 0,
                    Direction::Receive => self.frames.count >= wanted.get(),
                };
                if ended {
                    return Ok(());
                }
                if told.elapsed() > PATIENCE {
                    return Err(RowError::failed("frames were lost: not all arrived, or were answered"));
                }
            }
            processor.idle();
        }
    }

    /// Sends a burst, as far as there is room; returns how many frames it had.
    #[inline]
    fn send(&mut self) -> Result<usize, RowError> {
        let Self { pair, case, frames } = self;
        // A frame with an extra takes one more.
        let slots = case.size.div_ceil(PAGE) + usize::from(case.size > PAGE);
        let burst = case.burst();
        pair.transmit.make_room(burst * slots, &mut pair.pools);
        let room = (pair.transmit.free() / slots).min(burst);
        let mut sent = 0;
        while sent < room {
            let header = frames.header;
            if !pair.send_frame(&header, frames.next()) {
                break;
            }
            frames.count += 1;
            sent += 1;
        }
        if sent > 0 && pair.transmit.flush() {
            pair.events().notify_transmit()?;
        }
        Ok(sent)
    }

    /// Receives a burst and posts its pages again; returns how many frames it had.
    #[inline]
    fn receive(&mut self) -> Result<usize, RowError> {
        let Self { pair, case, frames } = self;
        let Pair { receive, pools, .. } = pair;
        let mut good = Ok(());
        let got = receive.lend(case.burst(), pools, |chain, _| {
            if good.is_ok() {
                let arrived = frames.arrived(chain.len(), |whole| chain.copy_to(whole));
                good = arrived.map_err(RowError::from);
            }
            Some(chain)
        });
        if got > 0 && receive.top_up() {
            pair.events().notify_receive()?;
        }
        good.map(|()| got)
    }
}
