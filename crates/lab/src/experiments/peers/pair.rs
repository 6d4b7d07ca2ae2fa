//! One run: both ends are set up, frames are checked where ringferry receives them, the rate is
//! measured, what was counted is compared, and everything is taken down.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ringferry_rig::testpmd::{MEGABYTES, Stats, Testpmd};
use ringferry_sys::process;

use super::case::{Case, Direction, Who};
use super::engine::{Control, Engaged, Phase, engage};
use super::huge_pages::HugePages;
use super::testpmd::{self, Part, Place};
use super::{device, driver};
use crate::experiment::{RowError, Sample};
use crate::stop::Stop;

/// Before the rate is read: caches, page tables and branch predictors are warm long before, and a loop that
/// began with more frames than fit has lost them.
const WARM_UP: Duration = Duration::from_millis(150);

/// How long a set-up or a check may take. Both are done in a fraction of a second on an idle machine.
const PATIENCE: Duration = Duration::from_secs(15);

/// How often to look while waiting for something.
const LOOK: Duration = Duration::from_millis(2);

/// Share of its processor that each side must have had for a rate to count, as when DPDK was measured in
/// advance. A loop over two processors of which one was taken away for a moment measures the scheduler.
const SHARE: f64 = 0.95;

/// How often a rate is read anew because a side had less. Then the one with the largest share stands.
const ATTEMPTS: usize = 4;

/// Memory for one testpmd in huge pages: what it is told to take.
const HUGE_BYTES: u64 = MEGABYTES << 20;

/// The conditions of a run besides its case.
pub(super) struct Conditions<'a> {
    pub seconds: Duration,
    /// The processors of driver and device.
    pub cpus: [usize; 2],
    /// testpmd, where it takes part.
    pub program: Option<&'a Path>,
    pub stop: &'a Stop,
}

enum End {
    Ringferry(Engaged),
    Dpdk(Testpmd),
}

impl End {
    fn received(&mut self) -> Result<u64, RowError> {
        match self {
            End::Ringferry(engine) => Ok(engine.received()),
            End::Dpdk(testpmd) => Ok(testpmd.stats()?.rx_packets),
        }
    }
}

/// Measures one run of `case`, in millions of frames received per second.
pub(super) fn measure(case: &Case, conditions: &Conditions<'_>) -> Result<Sample, RowError> {
    let folder = crate::experiments::folder()?;
    let socket = folder.path().join("vhost.sock");
    let testpmds = [case.driver, case.device].iter().filter(|&&who| who == Who::Dpdk).count() as u64;
    let pages = if testpmds > 0 { HugePages::reserve(testpmds * HUGE_BYTES, conditions.stop)? } else { None };
    let mut pair = Pair::start(case, conditions, folder.path(), socket, pages.is_some())?;
    pair.check()?;
    let Window { rate, share } = pair.run(conditions.seconds)?;
    pair.finish()?;
    let sample = Sample::new(rate / 1e6).with("CPU share", share);
    Ok(if testpmds > 0 { sample.with("huge pages", f64::from(u8::from(pages.is_some()))) } else { sample })
}

/// The rates of one window.
struct Window {
    /// Frames a second.
    rate: f64,
    /// Of its processor, the side that had less.
    share: f64,
}

/// Both ends, connected. Fields go in this order: engines and testpmds first, then the session they use.
struct Pair<'a> {
    case: Case,
    stop: &'a Stop,
    control: Arc<Control>,
    driver: End,
    device: End,
    _port: Option<device::Port>,
}

impl<'a> Pair<'a> {
    fn start(
        case: &Case,
        conditions: &Conditions<'a>,
        folder: &Path,
        socket: PathBuf,
        huge_pages: bool,
    ) -> Result<Pair<'a>, RowError> {
        let control = Arc::new(Control::default());
        let stop = conditions.stop;
        let testpmd = |part: Part, cpu: usize| -> Result<Testpmd, RowError> {
            let program = conditions.program.ok_or_else(|| RowError::failed("testpmd is not installed"))?;
            let place = Place { program, cpu, socket: &socket, folder, huge_pages };
            testpmd::start(part, case, &place, stop)
        };
        let [driver_cpu, device_cpu] = conditions.cpus;

        // The device listens before the driver connects.
        let mut device = None;
        let mut port = None;
        match case.device {
            Who::Ringferry => port = Some(device::Port::listen(case, &socket)?),
            Who::Dpdk => {
                let mut testpmd = testpmd(Part::Device, device_cpu)?;
                testpmd.wait_ready()?;
                device = Some(End::Dpdk(testpmd));
            }
        }
        let mut driver = match case.driver {
            Who::Ringferry => End::Ringferry(engage_driver(case, driver_cpu, &control, &socket)?),
            // Not waited for yet: it is not ready before the port has answered.
            Who::Dpdk => End::Dpdk(testpmd(Part::Driver, driver_cpu)?),
        };
        match &mut driver {
            End::Ringferry(engine) => {
                let answered = wait(stop, &control, "the device to answer", || Ok(engine.is_ready()));
                answered.map_err(|error| match &mut device {
                    Some(End::Dpdk(testpmd)) => error.with_peer(testpmd),
                    _ => error,
                })?;
            }
            End::Dpdk(testpmd) => testpmd.wait_ready()?,
        }
        let device = match (device, &port) {
            (Some(device), _) => device,
            (None, Some(port)) => {
                let mut end = None;
                wait(stop, &control, "the driver to start its rings", || {
                    end = port.take(case)?;
                    Ok(end.is_some())
                })?;
                let end = end.ok_or_else(|| RowError::failed("no rings"))?;
                End::Ringferry(engage_device(case, device_cpu, &control, end)?)
            }
            (None, None) => return Err(RowError::failed("no device")),
        };
        let mut pair = Pair { case: *case, stop, control, driver, device, _port: port };
        // The receiver first, so that nothing waits for it.
        for (part, end) in [(Part::Device, &mut pair.device), (Part::Driver, &mut pair.driver)] {
            if let End::Dpdk(testpmd) = end {
                testpmd.begin(testpmd::first(part, case))?;
            }
        }
        Ok(pair)
    }

    /// The end that receives what is counted, and the one that sends it. In a loop each frame passes
    /// both; it is counted where it can be checked, or at the driver.
    fn ends(&mut self) -> (&mut End, &mut End) {
        let at_device = match self.case.direction {
            Direction::Transmit => true,
            Direction::Receive => false,
            Direction::Loopback => self.case.driver == Who::Dpdk && self.case.device == Who::Ringferry,
        };
        if at_device { (&mut self.device, &mut self.driver) } else { (&mut self.driver, &mut self.device) }
    }

    /// Frames are sent slowly enough that none is lost, and each is looked at whole.
    fn check(&mut self) -> Result<(), RowError> {
        let (case, stop, control) = (self.case, self.stop, Arc::clone(&self.control));
        let count = case.checked();
        let (receiver, sender) = self.ends();
        control.set(Phase::Check);
        if let End::Ringferry(engine) = receiver {
            return wait(stop, &control, "frames to be checked", || Ok(engine.checked() >= count));
        }
        if let End::Ringferry(engine) = sender {
            // rxonly cannot look at frames; that it got each of them, once and whole, its counters say.
            wait(stop, &control, "frames to be sent", || Ok(engine.sent() >= count))?;
            return arrived(receiver, count, &case, stop, &control);
        }
        Ok(())
    }

    /// The rate at which frames arrive, in the first window in which both sides had their processors.
    fn run(&mut self, seconds: Duration) -> Result<Window, RowError> {
        self.control.set(Phase::Run);
        sleep(self.stop, &self.control, WARM_UP.min(seconds))?;
        let mut best = Window { rate: 0.0, share: 0.0 };
        for _ in 0..ATTEMPTS {
            let window = self.window(seconds)?;
            if window.share > best.share {
                best = window;
            }
            if best.share >= SHARE {
                break;
            }
        }
        Ok(best)
    }

    fn window(&mut self, seconds: Duration) -> Result<Window, RowError> {
        let (stop, control) = (self.stop, Arc::clone(&self.control));
        let (used, began) = (self.processor_time()?, Instant::now());
        let (receiver, _) = self.ends();
        let rate = match receiver {
            End::Ringferry(engine) => {
                let (from, begin) = (engine.received(), Instant::now());
                sleep(stop, &control, seconds)?;
                let (to, end) = (engine.received(), Instant::now());
                (to - from) as f64 / (end - begin).as_secs_f64()
            }
            End::Dpdk(testpmd) => {
                testpmd.stats()?;
                sleep(stop, &control, seconds)?;
                testpmd.stats()?.rx_rate as f64
            }
        };
        let time = began.elapsed().as_secs_f64();
        let share = |at: usize, now: [Duration; 2]| now[at].saturating_sub(used[at]).as_secs_f64() / time;
        let now = self.processor_time()?;
        Ok(Window { rate, share: share(0, now).min(share(1, now)).min(1.0) })
    }

    /// Processor time that driver and device have used.
    fn processor_time(&self) -> Result<[Duration; 2], RowError> {
        let ours = process::cpu_time(std::process::id())?;
        // Where both are threads of this process, which has little else to do, each gets half.
        let both = matches!((&self.driver, &self.device), (End::Ringferry(_), End::Ringferry(_)));
        let time = |end: &End| match end {
            End::Ringferry(_) if both => Ok::<_, RowError>(ours / 2),
            End::Ringferry(_) => Ok(ours),
            End::Dpdk(testpmd) => Ok(testpmd.processor_time()?),
        };
        Ok([time(&self.driver)?, time(&self.device)?])
    }

    /// Checks that all frames that were sent have arrived, and nothing else.
    fn finish(mut self) -> Result<(), RowError> {
        let (case, stop, control) = (self.case, self.stop, Arc::clone(&self.control));
        control.set(Phase::Hold);
        if let End::Dpdk(testpmd) = self.ends().1 {
            testpmd.end()?;
        }
        let (receiver, sender) = self.ends();
        if case.direction != Direction::Loopback
            && let End::Ringferry(engine) = sender
        {
            wait(stop, &control, "the sender to hold", || Ok(engine.holds()))?;
            arrived(receiver, engine.sent(), &case, stop, &control)?;
        }
        for end in [self.driver, self.device] {
            let End::Ringferry(engine) = end else { continue };
            let counts = engine.stop()?;
            if counts.bytes != counts.received * case.size as u64 {
                let text =
                    format!("{} frames of {} bytes had {} bytes", counts.received, case.size, counts.bytes);
                return Err(RowError::failed(text));
            }
        }
        Ok(())
    }
}

/// Waits until `count` frames have arrived, and makes sure that no more come and that none is cut short.
fn arrived(
    receiver: &mut End,
    count: u64,
    case: &Case,
    stop: &Stop,
    control: &Control,
) -> Result<(), RowError> {
    let mut found = 0;
    let outcome = wait(stop, control, "frames to arrive", || {
        found = receiver.received()?;
        Ok(found >= count)
    });
    if found != count {
        let text = format!("{count} frames were sent, and {found} arrived");
        return Err(if outcome == Err(RowError::Stopped) {
            RowError::Stopped
        } else {
            RowError::failed(text)
        });
    }
    if let End::Dpdk(testpmd) = receiver {
        let Stats { rx_bytes, .. } = testpmd.stats()?;
        if rx_bytes != count * case.size as u64 {
            let text = format!("{count} frames of {} bytes arrived with {rx_bytes} bytes", case.size);
            return Err(RowError::failed(text));
        }
    }
    Ok(())
}

/// Starts ringferry's driver; it connects on its own thread.
fn engage_driver(
    case: &Case,
    cpu: usize,
    control: &Arc<Control>,
    socket: &Path,
) -> Result<Engaged, RowError> {
    let (of, socket) = (*case, socket.to_owned());
    let connect = move || driver::connect(&of, &socket);
    let cpu = Some(cpu);
    match case.direction {
        Direction::Transmit => {
            engage("driver", cpu, control, move || Ok(driver::Source::new(connect()?, &of)))
        }
        Direction::Receive => engage("driver", cpu, control, move || Ok(driver::Sink::new(connect()?, &of))),
        Direction::Loopback => {
            engage("driver", cpu, control, move || Ok(driver::Forward::new(connect()?, &of)))
        }
    }
}

/// Starts ringferry's device on the rings that a driver has started.
fn engage_device(
    case: &Case,
    cpu: usize,
    control: &Arc<Control>,
    end: device::End,
) -> Result<Engaged, RowError> {
    let (of, cpu) = (*case, Some(cpu));
    match case.direction {
        Direction::Transmit => engage("device", cpu, control, move || Ok(device::Sink::new(end, &of))),
        Direction::Receive => engage("device", cpu, control, move || Ok(device::Source::new(end, &of))),
        Direction::Loopback => engage("device", cpu, control, move || Ok(device::Forward::new(end, &of))),
    }
}

/// Waits until `done`, or until something has gone wrong.
fn wait(
    stop: &Stop,
    control: &Control,
    what: &str,
    mut done: impl FnMut() -> Result<bool, RowError>,
) -> Result<(), RowError> {
    let deadline = Instant::now() + PATIENCE;
    while !done()? {
        control.check()?;
        if stop.requested() {
            return Err(RowError::Stopped);
        }
        if Instant::now() >= deadline {
            return Err(RowError::failed(format!("waited {PATIENCE:?} for {what}")));
        }
        std::thread::sleep(LOOK);
    }
    control.check()
}

/// Sleeps for `time` unless something goes wrong.
fn sleep(stop: &Stop, control: &Control, time: Duration) -> Result<(), RowError> {
    let end = Instant::now() + time;
    loop {
        control.check()?;
        if stop.requested() {
            return Err(RowError::Stopped);
        }
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(());
        }
        // Long sleeps: each wake-up takes time from the core of one end.
        std::thread::sleep(left.min(Duration::from_millis(100)));
    }
}
