//! Changes of a configuration that is in force: a port that is to be added, and a file that says something else than before.
//!
//! Nothing is opened or changed here. What is asked for is checked as a whole, against everything that there is, and comes back as what has
//! to be done ([`Changes`]).

use super::*;

/// The differences between a running switch and its file.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Changes {
    /// Names of ports that are not in the file any more.
    pub(crate) removed: Vec<String>,
    /// Ports that are in the file with settings for which they have to be opened anew.
    pub(crate) replaced: Vec<PortConfig>,
    /// Ports that are in the file with other settings that can change while they are open.
    pub(crate) changed: Vec<PortConfig>,
    /// Ports that are new in the file.
    pub(crate) added: Vec<PortConfig>,
    /// Settings of the file that are not those in force, and that a running switch cannot change.
    pub(crate) restart: Vec<String>,
    /// All wires, as they are to be.
    pub(crate) wires: Vec<Wire>,
    /// Names of all ports in their new order.
    pub(crate) order: Vec<String>,
}

#[cfg(test)]
impl Changes {
    /// Returns true if the switch is as its file has it.
    pub(super) fn is_empty(&self) -> bool {
        *self == Changes { order: self.order.clone(), wires: self.wires.clone(), ..Changes::default() }
    }
}

impl Config {
    /// Reads a port that is to be added, in the syntax of `--port`, and checks it against the others. Returns the port, and
    /// true if it is new and false if this very port exists.
    ///
    /// # Errors
    /// Everything that is wrong with the text; there is another port of that name, or one that has something that only one can have.
    pub(crate) fn to_add(&self, text: &str, workers: usize) -> Result<(PortConfig, bool), String> {
        let place = Place::new(text, None);
        let mut problems = Vec::new();
        let port = parse_flag(text, &place, &mut problems).filter(|_| problems.is_empty());
        let port = port.ok_or_else(|| ConfigError { problems }.to_string())?;
        if let Claim::Socket(path) = port.kind.claim()
            && path.is_relative()
        {
            return Err(format!(
                "{text}: the path must be absolute, as the working directory of the switch may be another than yours"
            ));
        }
        if let Some(there) = self.ports.iter().find(|there| there.name == port.name) {
            let differences =
                there.differences(&port, |key, has, asked| format!("{key} is {has}, not {asked}"));
            if differences.is_empty() {
                return Ok((port, false));
            }
            return Err(format!(
                "there is another port {:?}: {differences}; remove it first, or give this one another name",
                port.name
            ));
        }
        self.check_with([(place, port.clone())])?;
        match port.without_worker(workers) {
            Some(message) => Err(format!("{text}: port.worker: {message}")),
            None => Ok((port, true)),
        }
    }

    /// Compares this configuration, that of a running switch, with what its file says now.
    ///
    /// # Errors
    /// What is in the file does not go with the ports that are not from the file.
    pub(crate) fn changes(&self, read: &Config) -> Result<Changes, String> {
        let (mine, theirs) = (self.file.as_ref(), read.file.as_ref());
        let was_in_file = |name: &str| mine.is_some_and(|file| file.ports.iter().any(|port| port == name));
        let is_in_file = |name: &str| read.ports.iter().any(|port| port.name == name);
        let others = self.ports.iter().filter(|port| !was_in_file(&port.name) && !is_in_file(&port.name));
        let others: Vec<_> = others.cloned().collect();
        let file = theirs.or(mine).map_or_else(String::new, |file| file.path.display().to_string());
        let place = Place::new(&file, None);
        let had_wire = |name: &str| mine.is_some_and(|file| file.wires.iter().any(|wire| wire == name));
        let has_wire = |name: &str| read.wires.iter().any(|wire| wire.name == name);
        let further = self.wires.iter().filter(|wire| !had_wire(&wire.name) && !has_wire(&wire.name));
        let wires: Vec<_> = read.wires.iter().chain(further).cloned().collect();
        let beside = Config { ports: others.clone(), wires: wires.clone(), ..self.clone() };
        beside.check_with(read.ports.iter().map(|port| (place.clone(), port.clone())))?;
        if let (Some(mine), Some(theirs)) = (mine, theirs) {
            mine.check_not_half(theirs)?;
        }
        let mut changes = Changes { wires, ..Changes::default() };
        for port in self.ports.iter().filter(|port| was_in_file(&port.name) && !is_in_file(&port.name)) {
            changes.removed.push(port.name.clone());
        }
        for port in &read.ports {
            match self.ports.iter().find(|there| there.name == port.name) {
                None => changes.added.push(port.clone()),
                Some(there) if there == port => {}
                Some(there) if there.can_become(port) => changes.changed.push(port.clone()),
                Some(_) => changes.replaced.push(port.clone()),
            }
        }
        changes.order = read.ports.iter().chain(&others).map(|port| port.name.clone()).collect();
        let lines = |file: Option<&ConfigFile>| -> BTreeSet<String> {
            let lines = file.iter().flat_map(|file| file.settings.lines());
            lines.filter(|line| line.contains('=')).map(str::to_owned).collect()
        };
        let (before, now) = (lines(mine), lines(theirs));
        changes.restart.extend(now.difference(&before).cloned());
        let key = |line: &str| line.split(" = ").next().unwrap_or_default().to_owned();
        let named: BTreeSet<_> = now.iter().map(|line| key(line)).collect();
        changes.restart.extend(
            before
                .iter()
                .map(|line| key(line))
                .filter(|key| !named.contains(key))
                .map(|key| format!("{key} is not set")),
        );
        Ok(changes)
    }

    /// Checks whether the port at index `at` could be `port` beside the others.
    ///
    /// # Errors
    /// Another port has something that only one can have, or there is no such worker.
    pub(crate) fn check_change(&self, at: usize, port: &PortConfig, workers: usize) -> Result<(), String> {
        let others = self.ports.iter().enumerate().filter(|(other, _)| *other != at);
        let beside = Config { ports: others.map(|(_, port)| port.clone()).collect(), ..self.clone() };
        beside.check_with([(Place::default(), port.clone())])?;
        match port.without_worker(workers) {
            Some(message) if port.workers != self.ports[at].workers => Err(format!("port.worker: {message}")),
            _ => Ok(()),
        }
    }

    /// Checks whether there could be further ports beside these.
    pub(super) fn check_with(
        &self,
        further: impl IntoIterator<Item = (Place, PortConfig)>,
    ) -> Result<(), String> {
        let place = |port: &PortConfig| Place::new(&format!("port {:?}", port.name), None);
        let ports = self.ports.iter().map(|port| (place(port), port.clone())).chain(further).collect();
        let control = self.control.clone().map(|path| (Place::new("the control socket", None), path));
        let place = |wire: &Wire| Place::new(&format!("wire {:?}", wire.name), None);
        let wires = self.wires.iter().map(|wire| (place(wire), wire.clone())).collect();
        let all = ConfigBuilder { control, switch: self.switch, ports, wires, ..ConfigBuilder::default() };
        all.may_be_empty().build().map(drop).map_err(|error| error.to_string())
    }
}

/// Compares a switch that runs as its file had it with what that says now, and follows what comes out, for fuzz targets. Returns how many ports differ; `None` if that is
/// refused.
///
/// # Panics
/// If that does not lead to what the file says now.
#[cfg(feature = "testing")]
pub fn follow(before: &Config, now: &Config) -> Option<usize> {
    let with_file = |config: &Config| {
        let file = ConfigFile::of(Path::new("/rf.toml"), config, BTreeMap::new(), BTreeSet::new());
        Config { file: Some(file), ..config.clone() }
    };
    let (running, read) = (with_file(before), with_file(now));
    let same = read.changes(&read).expect("a file goes with itself");
    let none = Changes { order: same.order.clone(), wires: same.wires.clone(), ..Changes::default() };
    assert_eq!(same, none, "nothing differs");
    let Changes { removed, replaced, changed, added, order, .. } = running.changes(&read).ok()?;
    let count = removed.len() + replaced.len() + changed.len() + added.len();
    let mut ports = running.ports;
    for name in &removed {
        ports
            .remove(ports.iter().position(|port| port.name == *name).expect("only what is there is removed"));
    }
    for (port, opened) in
        replaced.iter().map(|port| (port, true)).chain(changed.iter().map(|port| (port, false)))
    {
        let there = ports.iter_mut().find(|there| there.name == port.name).expect("it is there");
        assert_eq!(there.can_become(port), !opened, "of {port:?}");
        assert!(!there.differing(port).is_empty(), "{port:?} differs in nothing");
        *there = port.clone();
    }
    ports.extend(added);
    ports.sort_by_key(|port| order.iter().position(|name| *name == port.name).expect("a place for each"));
    assert_eq!(ports, read.ports);
    Some(count)
}

impl ConfigFile {
    /// Takes a file without any port that had some for half of one, in `now`, and the lack of the directory of drop-in files likewise: neither removes a port. One
    /// that is in another file by now is not removed.
    ///
    /// # Errors
    /// There is such a one.
    fn check_not_half(&self, now: &ConfigFile) -> Result<(), String> {
        let gone = self.ports.iter().filter(|name| !now.ports.contains(name));
        for (name, file) in gone.filter_map(|name| Some((name, self.with_port(name)?))) {
            if now.blank.contains(file) {
                return Err(format!(
                    "{} has no port any more; if that is meant and not half of a file, remove its ports with `ringferry ctl remove` ({name} ...)",
                    file.display()
                ));
            }
            let directory = self.drop_ins.get(name).and_then(|file| file.parent());
            if let Some(directory) = directory.filter(|directory| now.blank.contains(*directory)) {
                return Err(format!(
                    "{} is not there any more, which has the port {name}; if that is meant, make it anew and leave it empty",
                    directory.display()
                ));
            }
        }
        Ok(())
    }
}

impl PortConfig {
    /// Describes the keys in which this port differs from another, for people, each by what `tell` makes of the key and the two values; empty
    /// if it is the same.
    pub(crate) fn differences(
        &self,
        other: &PortConfig,
        tell: impl Fn(&str, &str, &str) -> String,
    ) -> String {
        let [mine, others] = [self, other].map(|port| port.entries().into_iter().collect::<BTreeMap<_, _>>());
        let value =
            |value: Option<&toml::Value>| value.map_or_else(|| "unset".to_owned(), toml::Value::to_string);
        let told = self.differing(other);
        let told = told.iter().map(|key| tell(key, &value(mine.get(key)), &value(others.get(key))));
        told.collect::<Vec<_>>().join(", ")
    }

    /// Returns the keys in which this port differs from another.
    pub(crate) fn differing(&self, other: &PortConfig) -> Vec<&'static str> {
        let [mine, others] = [self, other].map(|port| port.entries().into_iter().collect::<BTreeMap<_, _>>());
        let keys: BTreeSet<_> = mine.keys().chain(others.keys()).copied().collect();
        keys.into_iter().filter(|key| mine.get(key) != others.get(key)).collect()
    }
}
