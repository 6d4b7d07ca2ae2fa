//! One run: both halves connect, frames are checked, then counted, and nothing may be left mapped or granted.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use ringferry_sys::process::{self, Spawn};
use ringferry_xen::domain::PAGE;
use ringferry_xen_net::netback::Control;
use ringferry_xen_net::xenbus::backend_device::MappedControl;
use ringferry_xen_net::xenbus::{BackConfig, BackEvent, BackendDriver, Connection, Polled, VifId};

use super::NAME;
use super::back::{Back, Snapshot, Watch, page};
use super::case::{Case, Direction};
use super::front::{self, Order};
use super::machine::{self, CLASS, Machine, Provider};
use super::processors::Processor;
use crate::experiment::{RowError, Run, Sample, Setup};
use crate::experiments::txmap::clock::{Finally, Over, PATIENCE, joined, sleep, wait};

/// Before the rate is read: as long as it takes until every page was used often enough to be learnt.
const WARM_UP: Duration = Duration::from_millis(50);

/// Windows that are tried until both sides had their processors, and how much of them is enough. The best one counts.
const ATTEMPTS: u64 = 4;
const SHARE: f64 = 0.95;

/// Frames that may be on their way: a ring full.
const RING: u64 = 256;

/// The front end's process. It ends with this.
struct Guest {
    child: Child,
    input: ChildStdin,
    lines: Receiver<String>,
}

impl Guest {
    fn start(setup: &Setup, order: &Order) -> Result<Self, RowError> {
        let mut command = setup.child(NAME);
        command.arg("front").arg(serde_json::to_string(order).map_err(RowError::failed)?);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let options = Spawn { die_with_parent: true, ..Spawn::default() };
        let mut child = process::spawn(&mut command, options)?;
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(RowError::failed("the front end's process has no pipes"));
        };
        let (sender, lines) = mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        Ok(Self { child, input, lines })
    }

    /// Its next word, if there is one.
    fn line(&mut self) -> Result<Option<String>, RowError> {
        match self.lines.try_recv() {
            Ok(line) => Ok(Some(line)),
            Err(mpsc::TryRecvError::Empty) => Ok(None),
            Err(mpsc::TryRecvError::Disconnected) => Err(self.last_words()),
        }
    }

    fn say(&mut self, line: &str) -> Result<(), RowError> {
        writeln!(self.input, "{line}").map_err(|_| self.last_words())
    }

    /// Says why the process has ended.
    fn last_words(&mut self) -> RowError {
        let _ = self.child.kill();
        let mut errors = String::new();
        let told = self.child.stderr.take().map(|mut pipe| pipe.read_to_string(&mut errors));
        let last = errors.lines().rev().find(|line| !line.trim().is_empty());
        match (told, last) {
            (Some(Ok(_)), Some(line)) => {
                RowError::failed(format!("the front end: {}", line.trim_start_matches("ringferry: ")))
            }
            _ => RowError::failed("the front end ended"),
        }
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The back end, and what it takes to connect and close.
struct Host {
    plugs: BackendDriver,
    id: Option<VifId>,
    queues: Vec<Back>,
    control: Option<(Control<ringferry_memory::Area>, Box<dyn ringferry_xen::event::EventChannel>)>,
}

impl Host {
    fn new(machine: &mut Machine, case: &Case) -> Result<Self, RowError> {
        let (domain, store) = machine.back()?;
        let (persistent, static_grants) = machine::features(case);
        let config = BackConfig {
            class: CLASS.into(),
            max_queues: case.queues as u16,
            persistent,
            static_grants,
            ..BackConfig::default()
        };
        let plugs = BackendDriver::new(store, domain, config).map_err(RowError::failed)?;
        Ok(Self { plugs, id: None, queues: Vec::new(), control: None })
    }

    /// Goes on with connecting, handing grants over, and closing.
    fn step(&mut self, case: &Case) -> Result<(), RowError> {
        loop {
            match self.plugs.poll().map_err(RowError::failed)? {
                Polled::Vif(id, BackEvent::Connect(connection)) => self.serve(id, *connection, case)?,
                Polled::Vif(id, BackEvent::Disconnect) => {
                    // Everything is unmapped before the front end hears of it.
                    (self.queues, self.control) = (Vec::new(), None);
                    self.plugs.disconnected(id);
                }
                Polled::Vif(_, BackEvent::Refused(refusal)) => return Err(RowError::failed(refusal)),
                Polled::Vif(_, BackEvent::Removed) | Polled::Busy => {}
                Polled::Idle => break,
            }
        }
        if let Some((control, channel)) = &mut self.control {
            channel.drain()?;
            let mut queues: Vec<_> = self.queues.iter_mut().map(|back| &mut back.queue).collect();
            while control.poll(&mut queues) | control.arm() {
                channel.notify()?;
            }
            if let Some(fault) = control.fault() {
                return Err(RowError::failed(format!("the control ring: {fault}")));
            }
        }
        Ok(())
    }

    fn serve(&mut self, id: VifId, connection: Connection, case: &Case) -> Result<(), RowError> {
        let Connection { queues, control, front, .. } = connection;
        if queues.len() != case.queues {
            return Err(RowError::failed(format!("{} queues were connected", queues.len())));
        }
        let serve = |queue| Back::new(queue, case, front.accepts.sg);
        self.queues = queues.into_iter().map(serve).collect::<Result<_, _>>()?;
        self.control = match control {
            Some(MappedControl { ring, channel, foreign }) => {
                Some((Control::new(page(&ring)?, foreign).map_err(RowError::failed)?, channel))
            }
            None => None,
        };
        self.id = Some(id);
        self.plugs.connected(id).map_err(RowError::failed)
    }
}

/// The counters of one window.
struct Window {
    /// Of each queue, at its beginning and its end.
    queues: Vec<[Snapshot; 2]>,
    /// Of their processors, what the side had that had less.
    share: f64,
}

/// Measures one run, in thousands of frames per second that the back end took or gave.
pub(super) fn measure(
    case: &Case,
    provider: Provider,
    setup: &Setup,
    run: &Run<'_>,
) -> Result<Sample, RowError> {
    let mut machine = Machine::new(provider)?;
    let mut host = Host::new(&mut machine, case)?;
    let order = Order { folder: machine.folder().to_owned(), provider, case: *case, cpus: run.cpus.to_vec() };
    let mut guest = Guest::start(setup, &order)?;
    await_word(run, &mut host, &mut guest, case, "ready")?;
    let window = flow(case, run, &mut host, &mut guest)?;
    let closed = await_word(run, &mut host, &mut guest, case, "closed")?;
    if closed != "closed 0" {
        return Err(RowError::failed(format!("pages were mapped when the front end closed: {closed}")));
    }
    let gone = Instant::now();
    // The broker hears of it a little later.
    while machine.left().is_some_and(|left| left > 0) {
        if gone.elapsed() > PATIENCE {
            return Err(RowError::failed(format!("{:?} pages are granted or mapped still", machine.left())));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(describe(case, &window))
}

/// Serves the store and the control ring until the front end has said something that begins so.
fn await_word(
    run: &Run<'_>,
    host: &mut Host,
    guest: &mut Guest,
    case: &Case,
    word: &str,
) -> Result<String, RowError> {
    let mut said = None;
    wait(
        run,
        &format!("the front end to be {word}"),
        || true,
        || {
            host.step(case)?;
            said = guest.line()?;
            Ok(said.as_ref().is_some_and(|line| line.starts_with(word)))
        },
    )?;
    Ok(said.unwrap_or_default())
}

/// Lets packets flow, and measures.
fn flow(case: &Case, run: &Run<'_>, host: &mut Host, guest: &mut Guest) -> Result<Window, RowError> {
    let over = &Over::default();
    let watches: Vec<Watch> = host.queues.iter().map(|_| Watch::default()).collect();
    let processors = Processor::of_side(run.cpus, false, case.queues);
    let sides =
        [false, true].map(|front| Processor::count(&Processor::of_side(run.cpus, front, case.queues)) as f64);
    let child = guest.child.id();
    std::thread::scope(|scope| {
        let _finally = Finally([over]);
        let queues = std::mem::take(&mut host.queues);
        let threads: Vec<_> = queues
            .into_iter()
            .zip(processors)
            .zip(&watches)
            .map(|((back, processor), watch)| scope.spawn(move || back.work(processor, watch, over)))
            .collect();
        let alive = || !threads.iter().any(std::thread::ScopedJoinHandle::is_finished);
        let measured = (|| {
            let checked = case.checked() + 2 * RING;
            wait(run, "frames to be checked", alive, || {
                if let Some(line) = guest.line()? {
                    return Err(RowError::failed(format!("the front end says {line}")));
                }
                Ok(watches.iter().all(|watch| watch.frames.get() >= checked))
            })?;
            sleep(run, WARM_UP, alive)?;
            let mut best: Option<Window> = None;
            for attempt in 0..ATTEMPTS {
                let window = window(run, &watches, alive, 2 * attempt + 1, child, sides)?;
                if best.as_ref().is_none_or(|best| window.share > best.share) {
                    best = Some(window);
                }
                if best.as_ref().is_some_and(|best| best.share >= SHARE) {
                    break;
                }
            }
            best.ok_or_else(|| RowError::failed("nothing was measured"))
        })();
        let counts = || watches.iter().map(|watch| watch.frames.get()).collect::<Vec<_>>();
        // A sender ends first, and who receives has then got all of it.
        let mut sent = Ok(Vec::new());
        if case.direction == Direction::Transmit && measured.is_ok() {
            sent = guest.say(&front::end(&[])).and_then(|()| {
                let done = word(run, guest, "the front end to end", alive)?;
                let sent = front::done(&done)?;
                wait(run, "all frames to arrive", alive, || Ok(counts() == sent))?;
                Ok(sent)
            });
        }
        over.tell();
        let mut taken = Vec::new();
        for thread in threads {
            let (back, count) = joined(thread.join())?;
            taken.push(count);
            host.queues.push(back);
        }
        let window = measured?;
        let mut counted = sent?;
        if case.direction == Direction::Receive {
            guest.say(&front::end(&taken))?;
            counted = front::done(&word(run, guest, "the front end to end", || true)?)?;
        }
        if counted != taken {
            return Err(RowError::failed(format!("{counted:?} and {taken:?} frames were counted")));
        }
        Ok(window)
    })
}

/// The front end's next word.
fn word(run: &Run<'_>, guest: &mut Guest, what: &str, alive: impl Fn() -> bool) -> Result<String, RowError> {
    let mut said = None;
    wait(run, what, alive, || {
        said = guest.line()?;
        Ok(said.is_some())
    })?;
    said.ok_or_else(|| RowError::failed("a queue's thread has ended"))
}

fn window(
    run: &Run<'_>,
    watches: &[Watch],
    alive: impl Fn() -> bool + Copy,
    number: u64,
    child: u32,
    processors: [f64; 2],
) -> Result<Window, RowError> {
    let used = || -> Result<[Duration; 2], RowError> {
        Ok([process::cpu_time(std::process::id())?, process::cpu_time(child)?])
    };
    let take = |number: u64| -> Result<Vec<Snapshot>, RowError> {
        watches.iter().for_each(|watch| watch.ask(number));
        let mut snapshots = Vec::new();
        wait(run, "a snapshot", alive, || {
            snapshots = watches.iter().filter_map(|watch| watch.taken(number)).collect();
            Ok(snapshots.len() == watches.len())
        })?;
        Ok(snapshots)
    };
    let (before, begin): ([Duration; 2], _) = (used()?, Instant::now());
    let from = take(number)?;
    sleep(run, run.seconds, alive)?;
    let to = take(number + 1)?;
    let (after, time) = (used()?, begin.elapsed().as_secs_f64());
    if from.len() != watches.len() || to.len() != watches.len() {
        return Err(RowError::failed("a queue's thread has ended"));
    }
    let share =
        |side: usize| after[side].saturating_sub(before[side]).as_secs_f64() / (time * processors[side]);
    let queues = from.into_iter().zip(to).map(|(from, to)| [from, to]).collect();
    Ok(Window { queues, share: share(0).min(share(1)).min(1.0) })
}

fn describe(case: &Case, window: &Window) -> Sample {
    let sum = |of: &dyn Fn(&[Snapshot; 2]) -> f64| window.queues.iter().map(of).sum::<f64>();
    let grown = |of: &dyn Fn(&Snapshot) -> u64| sum(&|[from, to]| (of(to) - of(from)) as f64);
    let frames = grown(&|at| at.frames).max(1.0);
    let per_packet = |of: &dyn Fn(&Snapshot) -> u64| grown(of) / frames;
    let rate = sum(&|[from, to]| (to.frames - from.frames) as f64 / (to.at - from.at).as_secs_f64());
    let mapped = sum(&|[_, to]| to.mapped as f64);
    let uses = grown(&|at| at.pages.hits + at.pages.misses).max(1.0);
    Sample::new(rate / 1e3)
        .with("Gbit/s", rate * case.size as f64 * 8.0 / 1e9)
        .with("calls/packet", per_packet(&|at| at.foreign.calls))
        .with("copies/packet", per_packet(&|at| at.foreign.copies))
        .with("copied bytes/packet", per_packet(&|at| at.foreign.copied_bytes))
        .with("maps/packet", per_packet(&|at| at.foreign.mapped))
        .with("unmaps/packet", per_packet(&|at| at.foreign.unmapped))
        .with("hit share", grown(&|at| at.pages.hits) / uses)
        .with("evictions/packet", per_packet(&|at| at.pages.evicted))
        .with("KiB mapped", mapped * (PAGE / 1024) as f64)
        .with("CPU share", window.share)
}
