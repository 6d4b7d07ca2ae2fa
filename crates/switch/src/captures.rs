//! The captures that clients have begun: `ringferry capture`.
//!
//! A client's request becomes memory ([`SharedRings`]), a [`Tap`] in each worker for each of its ports, and a pipe. The switch keeps the reading end of
//! the pipe and closes the writing end once the client has it: when nobody has it any more the client is gone, and its capture ends. Nothing else is
//! ever said between the two, so a client that does nothing costs the switch nothing but the memory of its rings.
//!
//! A capture is about *names* of ports. A port that is opened anew (its tap was deleted, its guest of Xen has come back) has another number; the
//! [tick](Captures::tick) finds it and gives it its taps.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use ringferry_control::capture::ring::{Layout, MAX_RING, MIN_RING, RingWriter, SharedRings};
use ringferry_control::capture::{CaptureDrops, CaptureInterface, CaptureRequest, CaptureStarted, SNAPLEN};
use ringferry_control::snapshot::CaptureSnapshot;
use ringferry_packet::filter::Filter;
use ringferry_sys::epoll::{Epoll, Interest};

use crate::fdb::PortId;
use crate::log_limit::LogLimit;
use crate::plane::capture::{CaptureId, Tap, Wanted};
use crate::ports::queues::Workers;
use crate::ports::table::{FIRST_TOKEN, PortTable};

/// Most captures at a time.
const MAX_CAPTURES: usize = 16;

/// Most memory of one capture, and of all together, in bytes.
const MAX_CAPTURE_BYTES: usize = 64 << 20;
const MAX_ALL_BYTES: usize = 256 << 20;

/// Bytes of each ring if nobody says, and if all fit.
const RING: usize = 4 << 20;

/// The epoll token of the first capture. Those below are the switch's own, those from [`FIRST_TOKEN`] on the ports'.
pub(crate) const FIRST_CAPTURE: u64 = FIRST_TOKEN >> 1;

/// One capture.
struct Running {
    id: CaptureId,
    wanted: Wanted,
    /// Its ports, each with the number that has taps now.
    ports: Vec<(String, Option<PortId>)>,
    writers: Vec<Arc<RingWriter>>,
    bytes: usize,
    /// The process that it is for, if that can be seen from here.
    pid: Option<u32>,
    began: Instant,
    /// Nobody writes to it. It has come to its end when the client has.
    pipe: OwnedFd,
}

impl Running {
    fn token(&self) -> u64 {
        FIRST_CAPTURE + u64::from(self.id.0)
    }

    /// Names of its ports, for the log.
    fn names(&self) -> String {
        self.ports.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(",")
    }

    /// Gives taps to ports that have none.
    fn attach(&mut self, ports: &PortTable, workers: &Workers) -> bool {
        let Self { id, wanted, writers, .. } = self;
        let mut any = false;
        for (interface, (name, attached)) in (0u16..).zip(&mut self.ports) {
            let now = ports.interface(name).map(|port| port.id);
            if now != *attached {
                *attached = now;
                any = true;
                if let Some(port) = now {
                    let tap = |worker: usize| {
                        Some(Tap::new(*id, interface, wanted.clone(), Arc::clone(writers.get(worker)?)))
                    };
                    workers.capture(port, tap);
                }
            }
        }
        any
    }
}

/// See the head of this file. Owned by the switch and used on the control plane's thread.
pub(crate) struct Captures {
    running: Vec<Running>,
    /// Captures begun ever.
    begun: u32,
    /// The limit on lines about captures: whoever may open the page can begin and end one after the other.
    limit: LogLimit,
}

impl Default for Captures {
    fn default() -> Captures {
        Captures { running: Vec::new(), begun: 0, limit: LogLimit::new(100) }
    }
}

impl Captures {
    /// Begins a capture. When this returns, frames that come in are captured. The descriptors are for the client.
    ///
    /// # Errors
    /// What is asked for cannot be, for people.
    pub(crate) fn begin(
        &mut self,
        request: &CaptureRequest,
        pid: Option<u32>,
        ports: &PortTable,
        workers: &Workers,
        epoll: &Epoll,
    ) -> Result<(CaptureStarted, Vec<OwnedFd>), String> {
        if self.running.len() >= MAX_CAPTURES {
            return Err(format!(
                "{MAX_CAPTURES} captures run, and there may be no more at a time: end one of them first"
            ));
        }
        let filter = match &request.filter[..] {
            [] => None,
            _ => Some(Arc::new(Filter::new(&request.program()).map_err(|error| error.to_string())?)),
        };
        let interfaces = interfaces(&request.ports, ports)?;
        let snaplen = if request.snaplen == 0 { SNAPLEN } else { request.snaplen.min(SNAPLEN) };
        let ring_bytes = ring_bytes(request.buffer_kib, workers.count())?;
        let layout = Layout { rings: workers.count(), ring_bytes, interfaces: interfaces.len() };
        let bytes = layout.bytes();
        if self.running.iter().map(|running| running.bytes).sum::<usize>() + bytes > MAX_ALL_BYTES {
            return Err(format!(
                "all captures together may have {} MiB of memory: end one, or ask for less with --buffer",
                MAX_ALL_BYTES >> 20
            ));
        }
        let rings = SharedRings::new(layout).map_err(|error| error.to_string())?;
        let failed = |error: std::io::Error| format!("no descriptor for a capture: {error}");
        let mut fds = Vec::new();
        for fd in rings.fds() {
            fds.push(fd.try_clone_to_owned().map_err(failed)?);
        }
        let (pipe, theirs) = std::io::pipe().map_err(failed)?;
        fds.push(theirs.into());
        let wanted = Wanted {
            direction: request.direction,
            passing: request.drops != CaptureDrops::Only,
            dropped: request.drops != CaptureDrops::None,
            snaplen,
            filter,
        };
        let mut running = Running {
            id: CaptureId(self.begun),
            wanted,
            ports: interfaces.iter().map(|port| (port.name.clone(), None)).collect(),
            writers: (0..layout.rings).filter_map(|ring| rings.writer(ring)).map(Arc::new).collect(),
            bytes,
            pid,
            began: Instant::now(),
            pipe: pipe.into(),
        };
        epoll.add(&running.pipe, running.token(), Interest::READABLE).map_err(failed)?;
        running.attach(ports, workers);
        workers.settled();
        self.begun += 1;
        if self.limit.allows(&running.names()) {
            tracing::info!(capture = running.id.0, ports = running.names(), pid, "a capture begins");
        }
        self.running.push(running);
        let (rings, ring_bytes) = (layout.rings as u16, ring_bytes as u32);
        Ok((CaptureStarted { interfaces, rings, ring_bytes, snaplen }, fds))
    }

    /// The captures that run.
    pub(crate) fn list(&self) -> Vec<CaptureSnapshot> {
        let snapshot = |running: &Running| CaptureSnapshot {
            number: running.id.0,
            ports: running.ports.iter().map(|(name, _)| name.clone()).collect(),
            pid: running.pid,
            seconds: running.began.elapsed().as_secs(),
        };
        self.running.iter().map(snapshot).collect()
    }

    /// Serves an event of a capture's pipe: its client has gone.
    pub(crate) fn serve(&mut self, token: u64, workers: &Workers, epoll: &Epoll) {
        let limit = &mut self.limit;
        self.running.retain(|running| {
            let ends = running.token() == token;
            if ends {
                let _ = epoll.remove(running.pipe.as_fd());
                workers.end_capture(running.id);
                if limit.allows(&running.names()) {
                    tracing::info!(
                        capture = running.id.0,
                        ports = running.names(),
                        pid = running.pid,
                        "a capture ends"
                    );
                }
            }
            !ends
        });
    }

    /// Gives taps to ports that were opened anew. Called about once a second.
    pub(crate) fn tick(&mut self, ports: &PortTable, workers: &Workers) {
        for running in &mut self.running {
            running.attach(ports, workers);
        }
    }
}

/// Returns the ports of a capture, each once; all that there are if none is named.
fn interfaces(names: &[String], ports: &PortTable) -> Result<Vec<CaptureInterface>, String> {
    let all: Vec<CaptureInterface> = ports
        .interfaces()
        .map(|port| CaptureInterface {
            name: port.name.to_owned(),
            description: ports
                .entry_of(port.name)
                .map(|entry| format!("{} port of ringferry", entry.kind.name()))
                .unwrap_or_default(),
        })
        .collect();
    if all.is_empty() {
        return Err("the switch has no port that could be captured".to_owned());
    }
    if names.is_empty() {
        return Ok(all);
    }
    let mut found: Vec<CaptureInterface> = Vec::new();
    for name in names {
        let Some(port) = all.iter().find(|port| port.name == *name) else {
            let names: Vec<_> = all.iter().map(|port| port.name.as_str()).collect();
            return Err(format!("there is no port {name:?} now; the ports are: {}", names.join(", ")));
        };
        if !found.contains(port) {
            found.push(port.clone());
        }
    }
    Ok(found)
}

/// Returns the bytes of each ring of a capture with a ring for each of so many workers.
fn ring_bytes(asked_kib: u32, workers: usize) -> Result<usize, String> {
    let most = (MAX_CAPTURE_BYTES / workers.max(1)).clamp(MIN_RING, MAX_RING);
    let most = if most.is_power_of_two() { most } else { most.next_power_of_two() / 2 };
    let asked = (asked_kib as usize) << 10;
    if asked > most {
        return Err(format!(
            "a capture may have {} KiB for each of {workers} workers, and {asked_kib} KiB were asked for",
            most >> 10
        ));
    }
    Ok(if asked == 0 { RING.min(most) } else { asked.clamp(MIN_RING, most).next_power_of_two() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rings_are_powers_of_two_within_bounds() {
        assert_eq!(ring_bytes(0, 1), Ok(RING));
        assert_eq!(ring_bytes(0, 16), Ok(RING));
        assert_eq!(ring_bytes(0, 64), Ok(1 << 20));
        assert_eq!(ring_bytes(0, 100), Ok(512 << 10));
        assert_eq!(ring_bytes(1, 1), Ok(MIN_RING));
        assert_eq!(ring_bytes(3000, 2), Ok(4 << 20));
        assert_eq!(ring_bytes(65536, 1), Ok(MAX_RING));
        assert!(ring_bytes(65537, 1).unwrap_err().contains("may have 65536 KiB for each of 1 workers"));
        assert!(ring_bytes(u32::MAX, 3).is_err());
    }
}
