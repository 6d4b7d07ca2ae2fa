//! The mirrors of a switch: `ringferry ctl mirror`.
//!
//! A mirror is a [`Tap`] in each worker that copies what passes one port for another. It lives in the control plane's memory, from `add` to `remove`, to the
//! removal of either port, or to the end of the switch; the configuration knows none. As a [capture](crate::captures) it is about names of ports, which the
//! [tick](Mirrors::tick) turns into numbers.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use ringferry_control::capture::Direction;
use ringferry_control::mirror::{Mirror, Mirrors as Listed};

use crate::fdb::PortId;
use crate::plane::capture::{CaptureId, MirrorCounts, Tap};
use crate::ports::queues::Workers;
use crate::ports::table::PortTable;
use crate::rules::{MAX_VID, Vid};

/// Most mirrors at a time.
const MAX_MIRRORS: usize = 16;

/// Numbers from here on are mirrors', those below captures'.
const FIRST: u32 = 1 << 31;

/// One mirror.
struct Running {
    id: CaptureId,
    from: String,
    to: String,
    direction: Option<Direction>,
    vlan: Option<Vid>,
    counts: Arc<MirrorCounts>,
    /// The numbers of both ports that its taps know.
    attached: Option<(PortId, PortId)>,
}

impl Running {
    fn attach(&mut self, ports: &PortTable, workers: &Workers) {
        let number = |name: &str| ports.interface(name).map(|port| port.id);
        let now = number(&self.from).zip(number(&self.to));
        if now == self.attached {
            return;
        }
        workers.end_capture(self.id);
        self.attached = now;
        if let Some((from, to)) = now {
            let Self { id, direction, vlan, counts, .. } = self;
            workers.capture(from, |_| Some(Tap::mirror(*id, *direction, to, *vlan, Arc::clone(counts))));
        }
    }
}

/// See the head of this file. Owned by the switch and used on the control plane's thread.
#[derive(Default)]
pub(crate) struct Mirrors {
    running: Vec<Running>,
    begun: u32,
}

impl Mirrors {
    /// Adds a mirror. When this returns, what passes is copied.
    ///
    /// # Errors
    /// It cannot be, for people.
    pub(crate) fn add(
        &mut self,
        (from, to): (&str, &str),
        direction: Option<Direction>,
        vlan: Option<Vid>,
        ports: &PortTable,
        workers: &Workers,
    ) -> Result<(), String> {
        for name in [from, to] {
            if ports.interface(name).is_none() {
                let names: Vec<_> = ports.interfaces().map(|port| port.name.to_owned()).collect();
                return Err(format!("there is no port {name:?} now; the ports are: {}", names.join(", ")));
            }
        }
        if from == to {
            return Err(format!("{from:?} cannot be mirrored to itself"));
        }
        if let Some(vlan) = vlan.filter(|vlan| *vlan > MAX_VID) {
            return Err(format!("{vlan} is no VLAN: 0 (none) to {MAX_VID}"));
        }
        // What a port gets as copies must not be copied again, or it goes round in circles.
        if let Some(other) = self.running.iter().find(|other| other.to == from || other.from == to) {
            return Err(format!(
                "{:?} is mirrored to {:?}: a port that gets copies cannot be mirrored itself",
                other.from, other.to
            ));
        }
        if self.running.iter().any(|other| other.from == from && other.to == to) {
            return Err(format!("{from:?} is mirrored to {to:?} already: remove that mirror first"));
        }
        if self.running.len() >= MAX_MIRRORS {
            return Err(format!("there are {MAX_MIRRORS} mirrors, and there may be no more"));
        }
        let mut running = Running {
            id: CaptureId(FIRST + self.begun),
            from: from.to_owned(),
            to: to.to_owned(),
            direction,
            vlan,
            counts: Arc::default(),
            attached: None,
        };
        self.begun += 1;
        running.attach(ports, workers);
        workers.settled();
        tracing::info!(from, to, "a port is mirrored");
        self.running.push(running);
        Ok(())
    }

    /// Takes over the mirrors of another process. Of one whose ports are not there nothing can be copied.
    pub(crate) fn take_over(&mut self, mirrors: &[Mirror], ports: &PortTable, workers: &Workers) {
        for Mirror { from, to, direction, vlan, .. } in mirrors {
            if let Err(error) = self.add((from, to), *direction, *vlan, ports, workers) {
                tracing::warn!(from, to, "the port is mirrored no more: {error}");
            }
        }
    }

    /// Removes a mirror. When this returns, nothing is copied any more.
    ///
    /// # Errors
    /// There is none.
    pub(crate) fn remove(&mut self, from: &str, to: &str, workers: &Workers) -> Result<(), String> {
        let found = self.running.iter().position(|mirror| mirror.from == from && mirror.to == to);
        let Some(at) = found else { return Err(format!("{from:?} is not mirrored to {to:?}")) };
        workers.end_capture(self.running.remove(at).id);
        workers.settled();
        tracing::info!(from, to, "a port is mirrored no more");
        Ok(())
    }

    /// Removes the mirrors of a port that is removed, and to it, and returns both ends of each: what another port sends that gets its name is not to be
    /// copied, and what others send not for it.
    pub(crate) fn forget(&mut self, name: &str, workers: &Workers) -> Vec<(String, String)> {
        let is_of = |mirror: &mut Running| mirror.from == name || mirror.to == name;
        let gone = self.running.extract_if(.., is_of).map(|mirror| {
            workers.end_capture(mirror.id);
            tracing::info!(
                from = mirror.from,
                to = mirror.to,
                "a port is mirrored no more, as {name} is removed"
            );
            (mirror.from, mirror.to)
        });
        gone.collect()
    }

    /// Returns what the mirror of this number is called, if it is one.
    pub(crate) fn name_of(&self, id: CaptureId) -> Option<String> {
        let mirror = self.running.iter().find(|mirror| mirror.id == id)?;
        Some(format!("the mirror to {}", mirror.to))
    }

    /// Returns all mirrors.
    pub(crate) fn list(&self) -> Listed {
        let mirror = |running: &Running| Mirror {
            from: running.from.clone(),
            to: running.to.clone(),
            direction: running.direction,
            vlan: running.vlan,
            copied: running.counts.copied.load(Ordering::Relaxed),
            lost: running.counts.lost.load(Ordering::Relaxed),
            to_state: None,
        };
        Listed { mirrors: self.running.iter().map(mirror).collect() }
    }

    /// Follows ports that were opened anew. Called about once a second.
    pub(crate) fn tick(&mut self, ports: &PortTable, workers: &Workers) {
        for running in &mut self.running {
            running.attach(ports, workers);
        }
    }
}
