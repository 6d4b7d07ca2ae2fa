//! One run against our own device half: driver on the first processor, device on the second, both polling.

use std::time::Instant;

use ringferry_nic::rx::PolicyKind;
use ringferry_packet::buffer::Chain;
use ringferry_sys::process;

use super::sink::Sink;
use super::source::Source;
use super::window::Window;
use super::workload::Sequence;
use crate::experiment::{RowError, Run, Sample};
use crate::experiments::txmap::clock::{Finally, Over, PATIENCE, joined, pin};
use crate::frames::numbered::Format;

pub(super) fn measure(policy: PolicyKind, mix: &[(usize, usize)], run: &Run<'_>) -> Result<Sample, RowError> {
    let sequence = Sequence::new(mix, run.seed);
    let checked = checked(&sequence);
    let mut sink = Sink::new(policy)?;
    let mut source = Source::new(&sink, sequence.clone(), checked)?;
    let (over, ended) = (Over::default(), Over::default());
    std::thread::scope(|scope| {
        let _finally = Finally([&over]);
        let device = scope.spawn(|| -> Result<(), RowError> {
            let _finally = Finally([&ended]);
            pin(run.cpu(1))?;
            while !over.told() {
                source.round()?;
            }
            Ok(())
        });
        let driver = scope.spawn(|| -> Result<Sample, RowError> {
            let _finally = Finally([&over]);
            pin(run.cpu(0))?;
            let alive = || !ended.told();
            sink.begin();
            let mut checker = Checker::new(&sequence);
            check(&mut sink, run, checked, alive, |packet| checker.numbered(packet))?;
            // Both are threads of this process, which has little else to do: each gets half.
            let used = || Ok([process::cpu_time(std::process::id())? / 2; 2]);
            Ok(Window::measure(&mut sink, run, used, alive)?.sample())
        });
        let measured = joined(driver.join());
        // What the device says went wrong is why the driver had nothing to do.
        joined(device.join())?;
        measured
    })
}

/// Frames that are looked at whole before anything is timed: 16 MiB, many times round the ring with the smallest.
pub(super) fn checked(sequence: &Sequence) -> u64 {
    ((16u32 << 20) as f64 / sequence.mean()).clamp(500.0, 10_000.0) as u64
}

/// Receives until `count` frames were good.
pub(super) fn check(
    sink: &mut Sink,
    run: &Run<'_>,
    count: u64,
    alive: impl Fn() -> bool,
    mut look: impl FnMut(&Chain) -> Result<(), RowError>,
) -> Result<(), RowError> {
    let deadline = Instant::now() + PATIENCE;
    let mut seen = 0;
    while seen < count {
        sink.round(|packet| {
            // Of the last burst some may be beyond.
            seen += 1;
            if seen > count { Ok(()) } else { look(packet) }
        })?;
        if run.stopped() {
            return Err(RowError::Stopped);
        }
        if !alive() || Instant::now() >= deadline {
            let text = format!("{seen} frames of {count} that were to be checked came within {PATIENCE:?}");
            return Err(RowError::failed(text));
        }
    }
    let errors = sink.stats().rx_length_errors;
    if errors > 0 { Err(RowError::failed(format!("{errors} frames had impossible lengths"))) } else { Ok(()) }
}

/// Tells good frames from bad ones.
pub(super) struct Checker<'a> {
    sequence: &'a Sequence,
    formats: Vec<Format>,
    whole: Vec<u8>,
    next: u64,
}

impl<'a> Checker<'a> {
    pub(super) fn new(sequence: &'a Sequence) -> Self {
        let formats = sequence.lengths().iter().map(|&len| Format::new(len)).collect();
        Self { sequence, formats, whole: Vec::new(), next: 0 }
    }

    fn flatten(&mut self, packet: &Chain) {
        self.whole.resize(packet.len(), 0);
        packet.copy_to(&mut self.whole);
    }

    /// The next frame of our own device: each byte, and that none is missing.
    pub(super) fn numbered(&mut self, packet: &Chain) -> Result<(), RowError> {
        self.flatten(packet);
        let format = &self.formats[self.sequence.at(self.next)];
        format.check(self.next, &self.whole)?;
        self.next += 1;
        Ok(())
    }

    /// A frame of testpmd's, which does not number them: one of the lengths, with headers that agree.
    pub(super) fn txonly(&mut self, packet: &Chain) -> Result<(), RowError> {
        self.flatten(packet);
        let len = self.whole.len();
        match self.formats.iter().find(|format| format.size() == len) {
            Some(format) => Ok(format.check_txonly(&self.whole)?),
            None => Err(RowError::failed(format!("a frame of {len} bytes came"))),
        }
    }
}
