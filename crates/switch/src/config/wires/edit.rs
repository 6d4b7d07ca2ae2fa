//! Changes of wires while the switch runs, `ringferry ctl wire`: checked as a file would be, against all ports and wires.

use super::super::parse::{Value, check_port_name};
use super::*;

/// Returns true for a time or a share of nothing, in whatever unit.
fn means_nothing(value: &str) -> bool {
    value.starts_with('0') && !value.contains(|digit: char| ('1'..='9').contains(&digit))
}

impl Wire {
    /// Returns the wire with other impairments: `KEY=VALUE`, in both directions or in the one from a port. `seed` is a key as well.
    ///
    /// # Errors
    /// A file with these keys would be refused.
    pub(crate) fn edited(&self, settings: &[String], from: Option<&str>) -> Result<Wire, ConfigError> {
        let mut problems = Vec::new();
        let mut report = |key: &str, message: String| problems.push(Place::default().problem(key, message));
        let directions = self.directions_from(from).unwrap_or_else(|message| {
            report("", message);
            0..0
        });
        let mut values = BTreeMap::new();
        for setting in settings {
            match setting.split_once('=') {
                None => report(&format!("{setting:?}"), "is not KEY=VALUE".to_owned()),
                Some((key, _)) if values.contains_key(key) => report(key, "is given twice".to_owned()),
                Some((key, value)) => drop(values.insert(key.to_owned(), value.to_owned())),
            }
        }
        if settings.is_empty() {
            report("", "nothing is to be set: give KEY=VALUE".to_owned());
        }
        if !problems.is_empty() {
            return Err(ConfigError { problems });
        }
        let mut wire = self.clone();
        if let Some(seed) = values.remove("seed") {
            let mut fields =
                Fields::of_values([("seed".to_owned(), Value::Flag(seed))].into_iter(), &mut problems);
            wire.seed = fields.read("seed", &number(0..=i64::MAX as u64)).or(wire.seed);
        }
        for direction in &mut wire.directions[directions] {
            let kept = impairment_entries(direction).into_iter();
            let kept = kept.map(|(key, value)| (key.to_owned(), Value::from_written(value)));
            // What depends on a key that is taken back goes with it.
            let is_nothing = |key: &str| values.get(key).is_some_and(|value| means_nothing(value));
            let goes = |key: &str| match key {
                "distribution" => is_nothing("jitter"),
                "gap" => is_nothing("reorder"),
                "reorder" => is_nothing("delay"),
                _ => false,
            };
            let kept: Vec<_> = kept.filter(|(key, _)| !goes(key)).collect();
            let set = values.iter().map(|(key, value)| (key.clone(), Value::Flag(value.clone())));
            let mut fields = Fields::of_values(kept.into_iter().chain(set), &mut problems);
            let (made, wrong) = ImpairmentKeys::read(&mut fields).impairments();
            wrong.into_iter().for_each(|(key, message)| fields.report(key, message));
            fields.finish(" of a wire that can be set");
            *direction = made;
        }
        // Both directions have the same to say of the same keys.
        let mut seen = BTreeSet::new();
        problems.retain(|problem| seen.insert(problem.to_string()));
        if problems.is_empty() { Ok(wire) } else { Err(ConfigError { problems }) }
    }

    /// Returns the wire without impairments, in both directions or in the one from a port.
    ///
    /// # Errors
    /// The port is not one of its ends.
    pub(crate) fn without_impairments(&self, from: Option<&str>) -> Result<Wire, String> {
        let mut wire = self.clone();
        wire.directions[self.directions_from(from)?].fill(Impairments::default());
        Ok(wire)
    }

    /// Returns the directions from a port, or both.
    fn directions_from(&self, from: Option<&str>) -> Result<std::ops::Range<usize>, String> {
        let Some(from) = from else { return Ok(0..2) };
        let [a, b] = &self.ports;
        match [a, b].into_iter().position(|port| port == from) {
            Some(at) => Ok(at..at + 1),
            None => Err(format!("{from:?} is no end of the wire {:?}, which joins {a} and {b}", self.name)),
        }
    }
}

impl Config {
    /// Returns the wire of this name.
    ///
    /// # Errors
    /// There is none, for people.
    pub(crate) fn wire(&self, name: &str) -> Result<&Wire, String> {
        let found =
            self.wires.iter().find(|wire| wire.name == name || wire.ports.iter().any(|port| port == name));
        found.ok_or_else(|| match &self.wires[..] {
            [] => format!("there is no wire {name:?}: the switch has none (`ringferry ctl wire add`)"),
            all => {
                let names: Vec<_> = all.iter().map(|wire| wire.name.as_str()).collect();
                format!("there is no wire {name:?}; the wires are: {}", names.join(", "))
            }
        })
    }

    /// Returns the wire of which a port is an end, if it is one.
    pub(crate) fn wire_of(&self, port: &str) -> Option<&Wire> {
        self.wires.iter().find(|wire| wire.opposite(port).is_some())
    }

    /// Makes a wire that is to be added.
    ///
    /// # Errors
    /// It cannot be, for people.
    pub(crate) fn wire_to_add(
        &self,
        name: Option<&str>,
        ports: [String; 2],
        settings: &[String],
    ) -> Result<Wire, String> {
        ports.iter().try_for_each(|port| check_port_name(port))?;
        let name = name.map_or_else(|| ports.join("--"), str::to_owned);
        (WIRE_NAME.read)(&name)?;
        let wire = Wire { name, ports, seed: None, directions: Default::default() };
        let wire = if settings.is_empty() {
            wire
        } else {
            wire.edited(settings, None).map_err(|error| error.to_string())?
        };
        let mut wires = self.wires.clone();
        wires.push(wire.clone());
        self.check_with_wires(wires)?;
        Ok(wire)
    }

    /// Checks whether these could be the wires of the ports that there are.
    ///
    /// # Errors
    /// They could not, for people.
    pub(crate) fn check_with_wires(&self, wires: Vec<Wire>) -> Result<(), String> {
        Config { wires, ..self.clone() }.check_with([])
    }
}
