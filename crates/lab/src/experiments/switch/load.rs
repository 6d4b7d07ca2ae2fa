//! Generator and receiver at work: how much is sent, at full load or at a rate, and what arrives of it.
//!
//! One thread does both in turn, a burst each, so that the switch has the other processor to itself. Where the kernel
//! switches in the very call that sends, the generator has that processor, and the receiver this one.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use ringferry_sys::cpu;
use rustix::time::{ClockId, clock_gettime};

use super::end::{BURST, End};
use super::pace::Pace;
use crate::experiment::RowError;
use crate::frames::ways::{Format, HEAD, Mark, Stream, WHOLE};

/// All that is under way has arrived when nothing has for so long. RFC 2544 waits two seconds, for networks; what is in
/// these rings takes less than a millisecond, and a scheduler on a busy machine tens.
const DRAIN: Duration = Duration::from_millis(50);

/// Frames under way while each is checked: so few that none is lost.
const WINDOW: u64 = 32;

/// How long frames may be missing while they are checked, until they count as lost: longer than a busy machine lets a switch
/// wait for its processor. And how long a pass may take in which many are.
const MISSING: Duration = Duration::from_millis(500);
const PASS: Duration = Duration::from_secs(10);

/// Rounds at full load between looks at the clock, which take a twelfth of the ends' time if it is looked at in each.
const BLIND: u32 = 16;

/// How long the first frame may take: rings are polled, ports come up, addresses are learnt.
const FIRST: Duration = Duration::from_secs(15);

/// The longest latency that is told apart from longer ones, in nanoseconds: a minute. Latencies are told within 1 %
/// ([`DIGITS`]): the spread between runs is far above that, and the counts stay in the first-level cache.
const LONGEST: u64 = 60_000_000_000;
const DIGITS: u8 = 2;

/// A histogram without latencies yet.
fn latencies() -> Histogram<u64> {
    Histogram::new_with_max(LONGEST, DIGITS)
        .expect("a minute and two digits are within hdrhistogram's limits")
}

/// The load that is offered.
#[derive(Clone, Copy, Debug)]
pub(super) enum Load {
    /// As much as goes in.
    Full,
    /// So many frames a second, all ways together.
    Rate(f64),
}

/// The counters of one window.
#[derive(Clone, Debug, Default)]
pub(super) struct Window {
    pub seconds: f64,
    /// Frames that were due; at full load, that were sent.
    pub offered: u64,
    /// Frames that arrived, and their bytes; of them within the time.
    pub received: u64,
    pub in_time: u64,
    pub bytes_in_time: u64,
    /// Frames that came after a later one, and those among them of the same flow.
    pub late: u64,
    pub misordered: u64,
    /// Frames that came to another's port.
    pub strays: u64,
    /// Of the times that there was something to send, how often there was no room for all of it.
    pub full_share: f64,
    /// The longest that the generator was away from its work.
    pub stall: Duration,
    /// Processor time of the generator, if it has a thread of its own.
    pub generator_cpu: Option<Duration>,
    pub latency: Option<Histogram<u64>>,
}

impl Window {
    /// Of the frames that were due, the share that did not arrive.
    pub(super) fn loss(&self) -> f64 {
        self.offered.saturating_sub(self.received) as f64 / self.offered.max(1) as f64
    }
}

/// The first end of a way.
pub(super) struct Source {
    end: End,
    stream: Stream,
    /// Frames that were sent in this window.
    sent: u64,
}

/// The second end of a way.
pub(super) struct Sink {
    end: End,
    format: Format,
    /// True if the switch writes addresses.
    rewritten: bool,
    /// True if every frame is compared whole.
    whole: bool,
    /// The first number of this window, and the one behind the highest that has come.
    first: u64,
    expected: u64,
    received: u64,
    bytes: u64,
    late: u64,
    misordered: u64,
    strays: u64,
    latency: Option<Histogram<u64>>,
    scratch: [Vec<u8>; 2],
}

impl Sink {
    fn begin(&mut self, number: u64, latency: bool) {
        (self.first, self.expected) = (number, number);
        (self.received, self.bytes, self.late, self.misordered, self.strays) = (0, 0, 0, 0, 0);
        self.latency = latency.then(latencies);
    }

    #[inline]
    fn round(&mut self, clock: Instant) -> Result<usize, RowError> {
        let Self {
            end, format, rewritten, whole, first, expected, received, bytes, late, misordered, ..
        } = self;
        let Self { strays, latency, scratch: [scratch, copy], .. } = self;
        let (mut now, mut good) = (None, Ok(()));
        // Twice what is sent: the receiver is never what limits.
        let count = end.receive(2 * BURST, |seen| {
            let mut front = [0; HEAD];
            let (number, time) = match format.read(seen.prefix(&mut front)) {
                Mark::Own { number, time } => (number, time),
                Mark::Stray => {
                    *strays += 1;
                    return;
                }
                Mark::Foreign => return,
            };
            if number < *first {
                // Of an earlier window, which has counted it as lost.
                return;
            }
            *received += 1;
            *bytes += seen.len() as u64;
            if number >= *expected {
                *expected = number + 1;
            } else {
                *late += 1;
                // The flow's next frame has a number that is higher by that of the flows.
                *misordered += u64::from(*expected > number + u64::from(format.flows()));
            }
            if let Some(latency) = latency {
                let now = *now.get_or_insert_with(|| clock.elapsed().as_nanos() as u64);
                latency.saturating_record(now.saturating_sub(time));
            }
            if seen.is_gso() != format.header.is_gso() {
                good = Err(RowError::failed(format!(
                    "frame {number} came with other offloads than it was sent with"
                )));
            } else if seen.len() != format.size(number) {
                good = Err(RowError::failed(format!(
                    "frame {number} of {} bytes came as one of {}",
                    format.size(number),
                    seen.len()
                )));
            } else if (*whole || number.is_multiple_of(WHOLE)) && good.is_ok() {
                seen.copy_to(copy);
                good = format.check(copy, number, time, *rewritten, scratch).map_err(RowError::from);
            }
        })?;
        good.map(|()| count)
    }
}

/// All ways, and the thread that serves them.
pub(super) struct Bench {
    sources: Vec<Source>,
    sinks: Vec<Sink>,
    /// The generator's processor, where it has a thread of its own.
    apart: Option<usize>,
    clock: Instant,
}

/// The generator's counters.
#[derive(Clone, Copy, Default)]
struct Sent {
    offered: u64,
    rounds: u64,
    full: u64,
    stall: Duration,
}

impl Bench {
    pub(super) fn new(ways: Vec<([End; 2], Format)>, rewritten: bool, apart: Option<usize>) -> Self {
        let (mut sources, mut sinks) = (Vec::new(), Vec::new());
        for ([from, to], format) in ways {
            sources.push(Source { end: from, stream: Stream::new(format.clone()), sent: 0 });
            sinks.push(Sink {
                end: to,
                format,
                rewritten,
                whole: true,
                first: 0,
                expected: 0,
                received: 0,
                bytes: 0,
                late: 0,
                misordered: 0,
                strays: 0,
                latency: None,
                scratch: Default::default(),
            });
        }
        Self { sources, sinks, apart, clock: Instant::now() }
    }

    /// Shows the switch where every address is, and looks at frames whole: of each flow one, and then again, of which none
    /// may be lost.
    pub(super) fn check(&mut self, alive: &mut impl FnMut() -> Result<(), RowError>) -> Result<(), RowError> {
        self.first(alive)?;
        let flows = u64::from(self.sinks.first().map_or(1, |sink| sink.format.flows()));
        for _ in 0..3 {
            self.announce()?;
            let [lost, strays] = self.pass(flows, alive)?;
            if 100 * (lost + strays) <= flows {
                break;
            }
        }
        let frames = flows.clamp(500, 5000);
        let mut lost = 0;
        for _ in 0..3 {
            [lost, _] = self.pass(frames, alive)?;
            if lost == 0 {
                self.sources.iter_mut().for_each(|source| source.stream.whole = false);
                self.sinks.iter_mut().for_each(|sink| sink.whole = false);
                return Ok(());
            }
        }
        Err(RowError::failed(format!("{lost} of {frames} frames were lost with {WINDOW} at most under way")))
    }

    /// Sends a frame now and then until one arrives on every way.
    fn first(&mut self, alive: &mut impl FnMut() -> Result<(), RowError>) -> Result<(), RowError> {
        let begin = Instant::now();
        self.sinks.iter_mut().for_each(|sink| sink.begin(0, false));
        while self.sinks.iter().any(|sink| sink.received == 0) {
            if begin.elapsed() >= FIRST {
                return Err(RowError::failed(format!("no frame came through within {FIRST:?}")));
            }
            alive()?;
            for (source, sink) in self.sources.iter_mut().zip(&mut self.sinks) {
                if sink.received == 0 {
                    sink.end.say(&sink.format.hello(0))?;
                    source.end.send(1, &mut source.stream, |_| 0)?;
                }
                // What was said before goes by.
                source.end.receive(2 * BURST, |_| ())?;
            }
            let next = Instant::now() + Duration::from_millis(10);
            while Instant::now() < next {
                for sink in &mut self.sinks {
                    sink.round(self.clock)?;
                }
            }
        }
        Ok(())
    }

    /// One frame from every address that frames will go to, at a pace that the slowest switch learns at.
    fn announce(&mut self) -> Result<(), RowError> {
        /// Open vSwitch looks at each new address in its slow path, some ten thousand in a second.
        const PAUSE: Duration = Duration::from_micros(20);
        for (source, sink) in self.sources.iter_mut().zip(&mut self.sinks) {
            for flow in 0..sink.format.flows() {
                let hello = sink.format.hello(flow);
                let begin = Instant::now();
                while !sink.end.say(&hello)? && begin.elapsed() < MISSING {}
                // So that what nobody needs blocks nobody.
                while begin.elapsed() < PAUSE {
                    source.end.receive(2 * BURST, |_| ())?;
                    sink.round(self.clock)?;
                }
            }
        }
        Ok(())
    }

    /// So many frames on each way, few at a time; returns how many were lost, and how many came to a wrong port.
    fn pass(
        &mut self,
        frames: u64,
        alive: &mut impl FnMut() -> Result<(), RowError>,
    ) -> Result<[u64; 2], RowError> {
        let clock = self.clock;
        let [mut lost, mut strays] = [0; 2];
        for way in 0..self.sources.len() {
            let source = &mut self.sources[way];
            self.sinks.iter_mut().for_each(|sink| sink.begin(source.stream.number(), false));
            let begin = Instant::now();
            let (mut sent, mut missing, mut last) = (0_u64, 0_u64, Instant::now());
            loop {
                let received = self.sinks[way].received;
                let under_way = (sent - missing).saturating_sub(received);
                let due = (frames - sent).min(WINDOW.saturating_sub(under_way)) as usize;
                sent += source.end.send(due.min(BURST), &mut source.stream, |_| 0)? as u64;
                for sink in &mut self.sinks {
                    sink.round(clock)?;
                }
                if self.sinks[way].received > received {
                    last = Instant::now();
                } else if last.elapsed() >= MISSING {
                    alive()?;
                    missing = sent.saturating_sub(received);
                    last = Instant::now();
                    if sent == frames || begin.elapsed() >= PASS {
                        break;
                    }
                }
                if sent == frames && self.sinks[way].received >= frames {
                    break;
                }
            }
            lost += frames.saturating_sub(self.sinks[way].received);
            strays += self.sinks.iter().map(|sink| sink.strays).sum::<u64>();
        }
        Ok([lost, strays])
    }

    /// Sends for `time`, and waits for what is under way.
    pub(super) fn run(&mut self, load: Load, time: Duration, latency: bool) -> Result<Window, RowError> {
        let Self { sources, sinks, apart, clock } = self;
        let clock = *clock;
        for (source, sink) in sources.iter_mut().zip(sinks.iter_mut()) {
            source.sent = 0;
            sink.begin(source.stream.number(), latency);
        }
        let ways = sources.len() as f64;
        let pace = match load {
            Load::Full => None,
            Load::Rate(rate) => Some(Pace::new((rate / ways).max(1.0))),
        };
        let mut window = Window::default();
        let ready = &Barrier::new(2);
        let begin = clock.elapsed();
        let sent = match *apart {
            None => {
                let mut generator = Generator::new(sources, pace, clock, time);
                while generator.round()? {
                    for sink in sinks.iter_mut() {
                        sink.round(clock)?;
                    }
                }
                window.close(sinks, clock.elapsed() - begin);
                let sent = generator.sent;
                drain(sinks, sources, clock)?;
                sent
            }
            Some(cpu) => std::thread::scope(|scope| {
                let sources = &mut *sources;
                let generator = scope.spawn(move || -> Result<(Sent, Duration), RowError> {
                    let pinned = cpu::pin_current_thread(cpu);
                    ready.wait();
                    pinned?;
                    let mut generator = Generator::new(sources, pace, clock, time);
                    while generator.round()? {}
                    Ok((generator.sent, thread_time()))
                });
                ready.wait();
                let begin = clock.elapsed();
                while clock.elapsed() < begin + time && !generator.is_finished() {
                    for sink in sinks.iter_mut() {
                        sink.round(clock)?;
                    }
                }
                window.close(sinks, clock.elapsed() - begin);
                let mut quiet = Instant::now();
                while quiet.elapsed() < DRAIN {
                    for sink in sinks.iter_mut() {
                        if sink.round(clock)? > 0 {
                            quiet = Instant::now();
                        }
                    }
                }
                let ended = generator.join();
                let (sent, used) =
                    ended.unwrap_or_else(|_| Err(RowError::failed("the generator panicked")))?;
                window.generator_cpu = Some(used);
                Ok::<_, RowError>(sent)
            })?,
        };
        window.offered = sent.offered;
        window.full_share = sent.full as f64 / sent.rounds.max(1) as f64;
        window.stall = sent.stall;
        for sink in sinks.iter_mut() {
            window.received += sink.received;
            window.late += sink.late;
            window.misordered += sink.misordered;
            window.strays += sink.strays;
            if let Some(found) = sink.latency.take() {
                let all = window.latency.get_or_insert_with(latencies);
                all.add(found).map_err(RowError::failed)?;
            }
        }
        Ok(window)
    }
}

impl Window {
    /// Ends the window: the time is over.
    fn close(&mut self, sinks: &[Sink], time: Duration) {
        self.seconds = time.as_secs_f64();
        self.in_time = sinks.iter().map(|sink| sink.received).sum();
        self.bytes_in_time = sinks.iter().map(|sink| sink.bytes).sum();
    }
}

/// Processor time of this thread.
fn thread_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}

/// Waits until all that was sent has arrived, or nothing does any more.
fn drain(sinks: &mut [Sink], sources: &[Source], clock: Instant) -> Result<(), RowError> {
    let sent: u64 = sources.iter().map(|source| source.sent).sum();
    let mut quiet = Instant::now();
    while quiet.elapsed() < DRAIN && sinks.iter().map(|sink| sink.received).sum::<u64>() < sent {
        for sink in sinks.iter_mut() {
            if sink.round(clock)? > 0 {
                quiet = Instant::now();
            }
        }
    }
    Ok(())
}

/// The sending half of a window.
struct Generator<'a> {
    sources: &'a mut [Source],
    pace: Option<Pace>,
    clock: Instant,
    begin: Duration,
    time: Duration,
    sent: Sent,
    /// The last look at the clock, and rounds since.
    last: Duration,
    blind: u32,
}

impl<'a> Generator<'a> {
    fn new(sources: &'a mut [Source], pace: Option<Pace>, clock: Instant, time: Duration) -> Self {
        let begin = clock.elapsed();
        Self { sources, pace, clock, begin, time, sent: Sent::default(), last: begin, blind: 0 }
    }

    /// A burst on every way; false when the time is over. A frame that is due then and finds no room has not been sent.
    #[inline]
    fn round(&mut self) -> Result<bool, RowError> {
        let Self { sources, pace, clock, begin, time, sent, last, blind } = self;
        *blind += 1;
        if pace.is_some() || *blind == BLIND {
            *blind = 0;
            let now = clock.elapsed();
            sent.stall = sent.stall.max(now.saturating_sub(*last));
            *last = now;
        }
        let now = *last;
        let over = now >= *begin + *time;
        let elapsed = (now - *begin).min(*time).as_nanos() as u64;
        let origin = begin.as_nanos() as u64;
        for source in sources.iter_mut() {
            let first = source.stream.number() - source.sent;
            match pace {
                None if over => sent.offered += source.sent,
                None => {
                    let now = origin + elapsed;
                    let count = source.end.send(BURST, &mut source.stream, |_| now)?;
                    source.sent += count as u64;
                    sent.rounds += 1;
                    sent.full += u64::from(count < BURST);
                }
                Some(pace) => {
                    let due = pace.due(elapsed);
                    loop {
                        let wanted = (due - source.sent).min(BURST as u64) as usize;
                        if wanted == 0 {
                            break;
                        }
                        let time = |number| origin + pace.time(number - first);
                        let count = source.end.send(wanted, &mut source.stream, time)?;
                        source.sent += count as u64;
                        sent.rounds += 1;
                        sent.full += u64::from(count < wanted);
                        // Once more at the end, for what fits: the rings may be empty.
                        if count < wanted || !over {
                            break;
                        }
                    }
                    if over {
                        sent.offered += due;
                    }
                }
            }
        }
        Ok(!over)
    }
}
