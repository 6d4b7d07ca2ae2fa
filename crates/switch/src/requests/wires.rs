//! Wires that are shown, changed, added and removed while the switch runs: `ringferry ctl wire`.
//!
//! A change is checked against all ports and wires, is in force at once, and is then kept in the configuration file, as those of ports are.

use std::collections::BTreeMap;

use ringferry_control::snapshot::PortState;
use ringferry_control::wire::{
    LateFrames, Lateness, Wire as Shown, WireChange, WireDirection, WireEnds, Wires,
};
use ringferry_control::{Answer, PortAction, RulesByKey, WireStep};

use super::Requests;
use super::ports::{until_reload, warn_of_lost};
use crate::config::wires::impairment_entries;
use crate::counters::DropReason;
use crate::fdb::PortId;
use crate::impairments::Wire;
use crate::plane::{BUCKETS, WireState};
use crate::privileged::NotKept;
use crate::snapshot::wire_by_key;

/// What is asked of the workers and of the ports for all wires at once.
struct Known {
    /// What waits at the ends of wires.
    waiting: BTreeMap<PortId, WireState>,
    /// What each port can do.
    ports: BTreeMap<String, PortState>,
}

/// Returns the ends of a wire, as they are shown.
pub(super) fn ends(wire: &Wire) -> WireEnds {
    WireEnds { wire: wire.name.clone(), ports: wire.ports.clone() }
}

/// Returns what has to be done for the wires before to be those now, for people.
pub(super) fn wire_steps(before: &[Wire], now: &[Wire]) -> Vec<WireStep> {
    let step = |wire: &Wire, action, what| WireStep { wire: wire.name.clone(), action, what };
    let joins = |wire: &Wire| format!("it joins {} and {}", wire.ports[0], wire.ports[1]);
    let there = |wires: &'_ [Wire], name: &str| wires.iter().any(|wire| wire.name == name);
    let gone = before.iter().filter(|wire| !there(now, &wire.name));
    let gone = gone.map(|wire| step(wire, PortAction::Removed, "it is not in the file any more".to_owned()));
    let others = now.iter().filter_map(|wire| match before.iter().find(|there| there.name == wire.name) {
        None => Some(step(wire, PortAction::Added, joins(wire))),
        Some(there) if there == wire => None,
        Some(there) if there.ports != wire.ports => Some(step(wire, PortAction::Changed, joins(wire))),
        Some(there) => Some(step(wire, PortAction::Changed, differences(there, wire))),
    });
    gone.chain(others).collect()
}

/// Describes the impairments in which a wire differs from what it was.
fn differences(before: &Wire, now: &Wire) -> String {
    let of = |wire: &Wire, at: usize| -> BTreeMap<_, _> {
        impairment_entries(&wire.directions[at])
            .into_iter()
            .map(|(key, value)| (key, value.to_string()))
            .collect()
    };
    let mut told = Vec::new();
    for (at, port) in now.ports.iter().enumerate() {
        let (was, is) = (of(before, at), of(now, at));
        let keys: std::collections::BTreeSet<_> = was.keys().chain(is.keys()).copied().collect();
        for key in keys.into_iter().filter(|key| was.get(key) != is.get(key)) {
            let [was, is] = [was.get(key), is.get(key)].map(|value| value.map_or("unset", String::as_str));
            told.push(format!("{key} from {port} {was} -> {is}"));
        }
    }
    if before.seed != now.seed {
        told.push("another seed".to_owned());
    }
    told.join(", ")
}

impl Requests<'_> {
    /// Shows all wires, or one.
    pub(super) fn wires(&self, name: Option<&str>) -> Result<Wires, String> {
        let wires = match name {
            Some(name) => std::slice::from_ref(self.config.wire(name)?),
            None => &self.config.wires,
        };
        let known = self.known_of_wires();
        Ok(Wires { wires: wires.iter().map(|wire| self.shown(wire, &known)).collect() })
    }

    /// Returns what waits at the ends of wires, of all workers together, and what ports can do.
    fn known_of_wires(&self) -> Known {
        let mut known = Known { waiting: BTreeMap::new(), ports: self.port_states() };
        for (port, state) in self.workers.wires() {
            known.waiting.entry(port).or_default().add(&state);
        }
        known
    }

    fn shown(&self, wire: &Wire, known: &Known) -> Shown {
        let seeds = self.ports.drawn_seeds();
        let seed = wire.seed.or_else(|| seeds.get(&wire.name).copied());
        let [a, b] = &wire.ports;
        let ways = [(a, b), (b, a)].into_iter().zip(&wire.directions);
        let directions =
            ways.map(|((from, to), impairments)| self.direction(from, to, wire_by_key(impairments), known));
        Shown {
            name: wire.name.clone(),
            seed: seed.unwrap_or_default(),
            seed_is_set: wire.seed.is_some(),
            directions: directions.collect(),
        }
    }

    fn direction(&self, from: &str, to: &str, impairments: RulesByKey, known: &Known) -> WireDirection {
        let (there, receiver) = (self.ports.interface(from).is_some(), self.ports.interface(to));
        let shown = WireDirection {
            from: from.to_owned(),
            to: to.to_owned(),
            joined: there && receiver.is_some(),
            to_state: known.ports.get(to).copied(),
            impairments,
            ..WireDirection::default()
        };
        let Some(receiver) = receiver else { return shown };
        let counters = receiver.counters;
        let drops = |reason: DropReason| counters.drops_by_name().get(reason.name()).copied().unwrap_or(0);
        let WireState { frames, bytes, lateness } =
            known.waiting.get(&receiver.id).cloned().unwrap_or_default();
        let bounds = BUCKETS.iter().map(|nanos| Some(nanos / 1000)).chain([None]);
        let bucket = |(at_most_microseconds, frames)| LateFrames { at_most_microseconds, frames };
        WireDirection {
            passed: counters.sum_of(|counters| &counters.tx_packets),
            lost: drops(DropReason::WireLoss),
            no_room: drops(DropReason::WireLimit),
            duplicated: counters.sum_of(|counters| &counters.tx_duplicated),
            reordered: counters.sum_of(|counters| &counters.tx_reordered),
            corrupted: counters.sum_of(|counters| &counters.tx_corrupted),
            waiting: frames,
            waiting_bytes: bytes,
            late: Lateness {
                buckets: bounds.zip(lateness.frames).map(bucket).collect(),
                max_microseconds: lateness.max / 1000,
            },
            ..shown
        }
    }

    /// Changes impairments of a wire.
    pub(super) fn set_wire(
        &mut self,
        name: &str,
        settings: &[String],
        from: Option<&str>,
        runtime: bool,
    ) -> Result<Answer, String> {
        let wire = self.config.wire(name)?.edited(settings, from).map_err(|error| error.to_string())?;
        self.change_wire(wire, runtime)
    }

    /// Takes the impairments of a wire away.
    pub(super) fn reset_wire(
        &mut self,
        name: &str,
        from: Option<&str>,
        runtime: bool,
    ) -> Result<Answer, String> {
        let wire = self.config.wire(name)?.without_impairments(from)?;
        self.change_wire(wire, runtime)
    }

    fn change_wire(&mut self, wire: Wire, runtime: bool) -> Result<Answer, String> {
        let mut wires = self.config.wires.clone();
        wires.iter_mut().filter(|there| there.name == wire.name).for_each(|there| there.clone_from(&wire));
        self.rewire(wires);
        let is_in_file = self.is_wire_in_file(&wire.name);
        let (persistent, note) = match is_in_file {
            true => self.keep_wire(&wire, runtime),
            false => (false, "the wire is not in the configuration file".to_owned()),
        };
        tracing::info!(wire = wire.name, persistent, "the impairments of a wire have changed ({note})");
        Ok(self.wire_changed(&wire, persistent, note))
    }

    /// Joins two ports by a wire.
    pub(super) fn add_wire(
        &mut self,
        name: Option<&str>,
        ports: &[String; 2],
        settings: &[String],
        runtime: bool,
    ) -> Result<Answer, String> {
        let wire = self.config.wire_to_add(name, ports.clone(), settings)?;
        let mut wires = self.config.wires.clone();
        wires.push(wire.clone());
        self.rewire(wires);
        let (persistent, note) = self.keep_wire(&wire, runtime);
        if persistent && let Some(file) = &mut self.config.file {
            file.wires.push(wire.name.clone());
        }
        tracing::info!(wire = wire.name, persistent, "two ports are joined by a wire ({note})");
        Ok(self.wire_changed(&wire, persistent, note))
    }

    /// Takes a wire out.
    pub(super) fn remove_wire(&mut self, name: &str, runtime: bool) -> Result<Answer, String> {
        let wire = self.config.wire(name)?.clone();
        let shown = self.shown(&wire, &self.known_of_wires());
        let mut wires = self.config.wires.clone();
        wires.retain(|there| there.name != wire.name);
        self.rewire(wires);
        let (persistent, note) = if !self.is_wire_in_file(&wire.name) {
            (false, "the wire is not in the configuration file".to_owned())
        } else {
            let privileges = self.privileges;
            self.note_wire(runtime, |requests, path| {
                privileges.forget_wire(path, &wire.name, &mut || requests.serve_ports())
            })
        };
        if persistent && let Some(file) = &mut self.config.file {
            file.wires.retain(|there| *there != wire.name);
        }
        tracing::info!(wire = wire.name, persistent, "a wire is taken out ({note})");
        Ok(Answer::WireChanged(Box::new(WireChange { wire: shown, removed: true, persistent, note })))
    }

    /// Has ports be the ends of these wires. When this returns, frames go by them.
    pub(super) fn rewire(&mut self, wires: Vec<Wire>) {
        self.config.wires = wires;
        self.ports.set_wires(&self.config.wires);
        self.workers.settled();
    }

    fn is_wire_in_file(&self, name: &str) -> bool {
        self.config.file.as_ref().is_some_and(|file| file.wires.iter().any(|wire| wire == name))
    }

    fn wire_changed(&self, wire: &Wire, persistent: bool, note: String) -> Answer {
        let wire = self.shown(wire, &self.known_of_wires());
        Answer::WireChanged(Box::new(WireChange { wire, removed: false, persistent, note }))
    }

    /// Has a wire kept in the configuration file.
    fn keep_wire(&mut self, wire: &Wire, runtime: bool) -> (bool, String) {
        let privileges = self.privileges;
        self.note_wire(runtime, |requests, path| {
            privileges.keep_wire(path, wire, &mut || requests.serve_ports())
        })
    }

    /// Has a change kept in the configuration file, and returns whether it is, with the file or the reason.
    fn note_wire(
        &mut self,
        runtime: bool,
        keep: impl FnOnce(&mut Self, &std::path::Path) -> Result<std::path::PathBuf, NotKept>,
    ) -> (bool, String) {
        if runtime {
            return (false, "a change of the running switch alone was asked for".to_owned());
        }
        let Some(path) = self.config.file.as_ref().map(|file| file.path.clone()) else {
            return (false, "the switch was started without a configuration file".to_owned());
        };
        match keep(self, &path) {
            Ok(path) => (true, format!("in {}", path.display())),
            Err(NotKept::Because(why) | NotKept::Refused(why)) => {
                warn_of_lost(&why);
                (false, until_reload(&why))
            }
        }
    }

    /// Refuses to remove a port that is an end of a wire.
    pub(super) fn check_no_end(&self, port: &str) -> Result<(), String> {
        match self.config.wire_of(port) {
            None => Ok(()),
            Some(wire) => Err(format!(
                "{port} is an end of the wire {}: take that out first (`ringferry ctl wire remove {}`)",
                wire.name, wire.name
            )),
        }
    }
}
