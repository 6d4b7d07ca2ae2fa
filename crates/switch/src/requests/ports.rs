//! Ports that come and go while the switch runs: `ringferry ctl add`, `remove` and `reload`.
//!
//! A port is opened by the [helper](crate::privileged), plugged in on the control plane's thread, and then kept in the configuration file.
//! A reload reads the file, compares it as a whole with what runs, and carries out the differences port by port; ports that are as the file
//! has them are not touched.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ringferry_control::{Answer, PortAction, PortChange, Reload, ReloadStep, Response, WireStep, kept};
use ringferry_sys::tap::TapError;

use super::wires::wire_steps;
use super::{Requests, changes};
use crate::Passed;
use crate::config::oddities::Oddity;
use crate::config::{Effect, PortConfig, PortKind, TapConfig, TapSource, VhostUserConfig, VhostUserEndpoint};
use crate::drains::Drained;
use crate::ports::{self, OpenError, Plug};
use crate::privileged::{NotKept, tap_exists};
use crate::snapshot::rules_by_key;

/// The part of the configuration file that was not carried out when it was last read again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum NotReloaded {
    /// All of it: it could not be read, or was refused.
    File,
    /// These ports are not as it has them.
    Ports(Vec<String>),
}

impl NotReloaded {
    /// Says for people what that means, where the file is `file`.
    pub(crate) fn describe(&self, since: Duration, file: &str) -> String {
        let seconds = since.as_secs();
        match self {
            NotReloaded::File => format!(
                "its configuration file could not be read again {seconds} s ago, and the next start may fail: `ringferry run {file} --check` says why, and `ringferry ctl reload` reads it again"
            ),
            NotReloaded::Ports(ports) => format!(
                "not all ports could be made what their configuration file has {seconds} s ago ({}): `ringferry ctl reload` tries it again, and says why",
                ports.join(", ")
            ),
        }
    }
}

/// Upper bound on the ports whose changes a reload logs one by one. What failed is logged in any case, and the whole is summed up.
const MAX_LOGGED: usize = 30;

/// How long a tap is waited for that somebody has open still, and how often that is looked at.
const LET_GO: Duration = Duration::from_millis(500);
const LOOK: Duration = Duration::from_millis(5);

/// What is said where nothing can be read anew.
const NO_FILE: &str = "the switch was started without a configuration file, so there is nothing to read again, and no socket or interface to be mended: `ringferry ctl add`, `set` and `remove` change \
                       ports; `ringferry ctl dump` prints a file to start it with the next time (`ringferry run FILE`)";

impl Requests<'_> {
    /// Adds the port that `text` describes, and keeps it in the configuration file unless only the running switch is meant.
    pub(super) fn add(&mut self, text: &str, runtime: bool) -> Result<PortChange, String> {
        let (mut port, is_new) = self.config.to_add(text, self.workers.count())?;
        if is_new {
            self.load_policies(std::slice::from_mut(&mut port))?;
            self.plug(&port)?;
        }
        let name = port.name.clone();
        let in_file = self.config.file.as_ref().and_then(|file| file.with_port(&name));
        let (persistent, note) = if let Some(path) = in_file {
            (true, format!("it is in {} already", path.display()))
        } else {
            self.note(runtime, in_no_file, |requests| {
                let path = requests.config.file.as_ref()?.path.clone();
                let privileges = requests.privileges;
                let kept = privileges.keep_port(&path, &port, &mut || requests.serve_ports());
                if let (Ok(()), Some(file)) = (&kept, &mut requests.config.file) {
                    file.ports.push(port.name.clone());
                }
                Some(kept.map(|()| path))
            })
        };
        if !is_new {
            let note = format!("there is this very port already; {}: {note}", kept(persistent));
            return Ok(PortChange::new(&name, PortAction::Nothing, persistent, note));
        }
        let before = self.oddities();
        self.config.ports.push(port);
        tracing::info!(port = name, persistent, "the port is added ({note})");
        let notes = self.remark(&before);
        Ok(PortChange { notes, ..PortChange::new(&name, PortAction::Added, persistent, note) })
    }

    /// Removes a port, also from the configuration file unless only the running switch is meant.
    pub(super) fn remove(
        &mut self,
        name: &str,
        if_exists: bool,
        runtime: bool,
    ) -> Result<PortChange, String> {
        let Some(at) = self.config.ports.iter().position(|port| port.name == name) else {
            if self.ports.entry_of(name).is_none() && self.is_in_file(name) && !runtime {
                // It was removed from the running switch alone, or could not be opened.
                let (persistent, note) = self.forget(name, false);
                return Ok(PortChange::new(name, PortAction::Removed, persistent, note));
            }
            if if_exists && self.ports.entry_of(name).is_none() {
                let note = "there is no such port".to_owned();
                return Ok(PortChange::new(name, PortAction::Nothing, true, note));
            }
            return Err(self.not_an_entry(name));
        };
        self.check_no_end(name)?;
        let forgotten = self.forget_changes(name);
        let before = self.oddities();
        let left = self.unplug(name);
        let port = self.config.ports.remove(at);
        let (persistent, mut note) = if self.is_in_file(name) {
            self.forget(name, runtime)
        } else {
            (
                false,
                "it is not in a configuration file; if a flag of `ringferry run` gave it, change that, too"
                    .to_owned(),
            )
        };
        if let Some(tap) = port.kind.lasting_interface() {
            note += &format!("; the interface {tap} stays until you remove it (ip link delete {tap})");
        }
        note += &left;
        note += &forgotten;
        tracing::info!(port = name, persistent, "the port is removed ({note})");
        let notes = self.remark(&before);
        Ok(PortChange { notes, ..PortChange::new(name, PortAction::Removed, persistent, note) })
    }

    /// Forgets what was changed of a port for a while, as it is removed for good: its link, and mirrors of it and to it. Says what of that there was, each
    /// behind a semicolon. Call it while the port is there.
    fn forget_changes(&mut self, name: &str) -> String {
        let mut told = String::new();
        for interface in self.ports.names_of(name) {
            for (from, to) in self.mirrors.forget(&interface, self.workers) {
                told += &format!("; {from} is mirrored to {to} no more");
            }
            if self.links.forget(&interface) {
                told += "; that its link is down is forgotten with it";
            }
        }
        told
    }

    /// Removes a port that was drained, or whose time to be drained is up.
    pub(crate) fn remove_drained(&mut self, drained: &Drained) -> Response {
        if drained.is_gone {
            let note = "it was removed meanwhile".to_owned();
            let change = PortChange::new(&drained.port, PortAction::Nothing, true, note);
            return Response::Ok(Answer::PortChanged(change));
        }
        let seconds = drained.seconds;
        let how = match drained.is_empty {
            true => "what was queued has gone out".to_owned(),
            false => format!("after {seconds} s it still had packets to send or to take, which are lost"),
        };
        match self.remove(&drained.port, true, drained.runtime) {
            Ok(change) => {
                let note = format!("{}; {how}", change.note);
                Response::Ok(Answer::PortChanged(PortChange { note, ..change }))
            }
            Err(error) => Response::Error(error),
        }
    }

    /// Returns what is strange about the ports that there are.
    pub(super) fn oddities(&self) -> Vec<Oddity> {
        self.config.oddities_of_ports(self.workers.count())
    }

    /// Says what is strange about ports and was not `before`, and logs it, as a start does.
    pub(super) fn remark(&self, before: &[Oddity]) -> Vec<String> {
        let news = Oddity::news(self.oddities(), before);
        news.inspect(|odd| tracing::warn!(port = odd.port, "{}", odd.text)).map(|odd| odd.text).collect()
    }

    /// Makes the switch what its configuration file says now, or says what that would take.
    pub(crate) fn reload(&mut self, dry_run: bool) -> Result<Reload, String> {
        let reloaded = self.read_again(dry_run);
        if let (Err(error), false, true) = (&reloaded, dry_run, self.config.file.is_some()) {
            // A line for each mistake, as whoever reads the log looks for lines.
            for line in error.lines() {
                tracing::error!("the configuration was not read again, and nothing has changed: {line}");
            }
        }
        let failed = match &reloaded {
            Err(_) => Some(NotReloaded::File),
            // The file is read, and what it asks for was not tried.
            Ok(_) if dry_run => {
                self.not_reloaded.take_if(|(_, what)| *what == NotReloaded::File);
                return reloaded;
            }
            Ok(reload) => {
                let failed = reload.steps.iter().filter(|step| step.error.is_some());
                let ports: Vec<_> = failed.map(|step| step.port.clone()).collect();
                (!ports.is_empty()).then_some(NotReloaded::Ports(ports))
            }
        };
        *self.not_reloaded = failed.map(|what| (Instant::now(), what));
        reloaded
    }

    fn read_again(&mut self, dry_run: bool) -> Result<Reload, String> {
        let path = self.config.file.as_ref().map(|file| file.path.clone());
        let shown = path.as_ref().map(|path| path.display().to_string()).unwrap_or_default();
        let mut read = match &path {
            Some(path) => {
                let privileges = self.privileges;
                let read = privileges.read(path, &mut || self.serve_ports())?;
                self.serve_ports();
                read
            }
            // What somebody has undone at the host is mended all the same.
            None => self.config.clone(),
        };
        self.load_policies(&mut read.ports)?;
        let found = self.config.changes(&read)?;
        let odd_before = self.oddities();
        let wires = wire_steps(&self.config.wires, &found.wires);
        // Frames of a port that comes go by its wire from the first one on.
        for WireStep { wire, action, what } in wires.iter().filter(|_| !dry_run) {
            tracing::info!(wire, "reload: {}: {what}", action.participle());
        }
        if !dry_run && !wires.is_empty() {
            self.rewire(found.wires.clone());
        }
        let mut reload = Reload { file: shown, dry_run, restart: found.restart, wires, ..Reload::default() };
        let mut step = |port: &str, action: PortAction, what: String, result: Result<(), String>| {
            let logged = reload.steps.len() < MAX_LOGGED && !dry_run;
            match &result {
                Ok(()) if logged => tracing::info!(port, "reload: {}: {what}", action.participle()),
                Err(error) if !dry_run => {
                    tracing::warn!(port, "reload: not {}: {error}", action.participle());
                }
                _ => {}
            }
            reload.steps.push(ReloadStep { port: port.to_owned(), action, what, error: result.err() });
        };
        for name in &found.removed {
            let mut what = "it is not in the file any more".to_owned();
            if !dry_run {
                what += &self.forget_changes(name);
                what += &self.unplug(name);
                self.config.ports.retain(|port| port.name != *name);
            }
            step(name, PortAction::Removed, what, Ok(()));
            self.serve_ports();
        }
        // All go before the first comes, as one may have the socket of another.
        let before: Vec<_> = found.replaced.iter().map(|port| self.find(&port.name).cloned()).collect();
        let can: Vec<_> = found.replaced.iter().map(|port| self.can_replace(port)).collect();
        for (port, _) in found.replaced.iter().zip(&can).filter(|(_, can)| !dry_run && can.is_ok()) {
            self.unplug(&port.name);
        }
        for ((port, before), can) in found.replaced.iter().zip(before).zip(can) {
            let becomes = |key: &str, has: &str, becomes: &str| format!("{key} {has} -> {becomes}");
            let differences =
                before.as_ref().map(|there| there.differences(port, becomes)).unwrap_or_default();
            let what = match port.kind.is_of_the_host() {
                true => format!("{differences}; it is opened anew"),
                false => format!("{differences}; it is opened anew, and its guest has to connect again"),
            };
            let done = can.and_then(|()| if dry_run { Ok(()) } else { self.replace(before, port) });
            step(&port.name, PortAction::Replaced, what, done);
            self.serve_ports();
        }
        for port in &found.changed {
            let what = self.find(&port.name).map(|there| describe(there, port)).unwrap_or_default();
            let done = if dry_run { Ok(()) } else { self.become_another(port) };
            step(&port.name, PortAction::Changed, what, done);
            self.serve_ports();
        }
        // Of the others somebody may have undone something at the host.
        let touched = |name: &str| {
            let all = [&found.replaced, &found.changed, &found.added].into_iter().flatten();
            all.into_iter().any(|port| port.name == name)
        };
        for port in read.ports.iter().filter(|port| !touched(&port.name)) {
            let astray = self.privileges.astray(port);
            if astray.is_empty() {
                continue;
            }
            let mut set_up = || {
                self.privileges.set_up(port, None).map_err(|error| error.to_string())?;
                self.ports.change(port)
            };
            let done = if dry_run { Ok(()) } else { set_up() };
            step(
                &port.name,
                PortAction::Changed,
                format!("its interface has lost {}: that is set again", astray.join(", ")),
                done,
            );
            self.serve_ports();
        }
        for name in self.ports.without_sockets() {
            let again = self.find(&name).filter(|_| !touched(&name)).cloned();
            let Some(port) = again else { continue };
            let done = if dry_run { Ok(()) } else { self.listen_again(&port) };
            let what = "its socket was removed: that is made anew".to_owned();
            step(&name, PortAction::Changed, what, done);
            self.serve_ports();
        }
        for port in &found.added {
            let done = if dry_run { self.can_plug(port) } else { self.plug(port) };
            if done.is_ok() && !dry_run {
                self.put(port.clone());
            }
            step(&port.name, PortAction::Added, format!("a {} port", port.kind.name()), done);
            self.serve_ports();
        }
        if dry_run {
            let odd = read.oddities_of_ports(self.workers.count());
            reload.notes = odd.into_iter().map(|odd| odd.text).collect();
        } else {
            reload.notes = self.remark(&odd_before);
            let place = |port: &PortConfig| found.order.iter().position(|name| *name == port.name);
            self.config.ports.sort_by_key(place);
            let names = read.ports.iter().map(|port| port.name.clone());
            let in_file = names.filter(|name| self.find(name).is_some()).collect();
            if let Some(file) = &mut self.config.file {
                file.ports = in_file;
                file.wires = read.wires.iter().map(|wire| wire.name.clone()).collect();
                file.drop_ins = read.file.map(|file| file.drop_ins).unwrap_or_default();
            }
        }
        let is_beside = |name: &String| {
            !found.removed.contains(name) && !read.ports.iter().any(|port| port.name == *name)
        };
        reload.beside = self.config.ports.iter().map(|port| port.name.clone()).filter(is_beside).collect();
        // What a step has seen to is not seen to be mended yet.
        let is_seen_to = |name: &str| reload.steps.iter().any(|step| step.port == name);
        let left = self.ports.snapshots().into_iter().filter(|port| !is_seen_to(&port.name));
        reload.faults = left.filter_map(|port| Some(format!("{}: {}", port.name, port.fault?))).collect();
        if path.is_none() && reload.steps.is_empty() && reload.wires.is_empty() {
            return Err(NO_FILE.to_owned());
        }
        Ok(reload)
    }

    /// Gives a port that is open other settings.
    fn become_another(&mut self, port: &PortConfig) -> Result<(), String> {
        self.ports.change(port).map_err(|error| format!("{error}; it is as it was before"))?;
        if self.find(&port.name).is_some_and(|there| there.rules != port.rules) {
            self.ports.set_rules(&port.name, &port.rules);
        }
        self.put(port.clone());
        Ok(())
    }

    /// Opens a port and plugs it in. If it fails nothing is left of the port.
    pub(crate) fn plug(&mut self, port: &PortConfig) -> Result<(), String> {
        self.can_plug(port)?;
        let plugged = self.open_when_free(port).and_then(|plug| self.begin(port, plug));
        plugged.inspect_err(|_| drop(self.close(&port.name)))
    }

    /// Opens a port anew whose tap was deleted. The old one goes when the new one is open.
    pub(crate) fn renew(&mut self, port: &PortConfig) -> Result<(), String> {
        let plug = self.open(port)?;
        self.ports.remove(&port.name, self.epoll);
        self.release(&port.name);
        self.begin(port, plug)?;
        self.ports.set_renewed(&port.name);
        Ok(())
    }

    /// Makes the socket of a port anew whose file was removed.
    fn listen_again(&mut self, port: &PortConfig) -> Result<(), String> {
        // The helper takes the port for open.
        self.close(&port.name)?;
        let opened = self.acquire(port);
        let done = opened.and_then(|mut passed| self.ports.listen_again(port, &mut passed, self.epoll));
        done.map_err(|error| error.to_string())
    }

    /// Does the same as [`open`](Self::open), and waits for a moment for who keeps descriptors for the next process: systemd 257 closes what it was to forget a while after
    /// it has said so, and a tap that anybody has open cannot be opened.
    fn open_when_free(&mut self, port: &PortConfig) -> Result<Plug, String> {
        let until = Instant::now() + LET_GO;
        loop {
            let opened = self.open(port);
            let is_held = opened.as_ref().is_err_and(|error| self.keeper.is_some() && is_held(port, error));
            if !is_held || Instant::now() >= until {
                return opened;
            }
            self.serve_ports();
            std::thread::sleep(LOOK);
        }
    }

    /// Opens what a port is made of.
    fn open(&mut self, port: &PortConfig) -> Result<Plug, String> {
        let workers = self.workers.count();
        let plug = self.acquire(port).and_then(|mut passed| ports::open(port, workers, &mut passed));
        plug.map_err(|error| error.to_string())
    }

    /// Has the helper open what a port is made of, if there is a helper.
    fn acquire(&mut self, port: &PortConfig) -> Result<Passed, OpenError> {
        let (privileges, workers) = (self.privileges, self.workers.count());
        privileges.open(port, workers, &mut || self.serve_ports())
    }

    /// Plugs in a port that was opened.
    fn begin(&mut self, port: &PortConfig, plug: Plug) -> Result<(), String> {
        let entry = self.ports.add(port.clone(), plug, self.epoll).map_err(|error| error.to_string())?;
        self.ports.begin_entry(entry, self.epoll);
        Ok(())
    }

    fn can_plug(&mut self, port: &PortConfig) -> Result<(), String> {
        if port.kind.is_passed() {
            return Err(OpenError::OnlyAtStart.to_string());
        }
        let privileges = self.privileges;
        privileges.can_open(port, &mut || self.serve_ports())
    }

    /// Closes a port, and says what of it is left all the same, for people, behind a semicolon.
    fn unplug(&mut self, name: &str) -> String {
        let socket = self.find(name).and_then(socket_of).map(Path::to_owned);
        self.ports.remove(name, self.epoll);
        self.release(name);
        match (socket, self.close(name)) {
            (Some(path), Err(_)) => {
                format!("; nobody could remove the file of its socket: rm {}", path.display())
            }
            _ => String::new(),
        }
    }

    /// Has whoever keeps descriptors for the next process let go of those of a port that is closed.
    fn release(&mut self, name: &str) {
        self.keeper.iter_mut().for_each(|keeper| keeper.release(name));
    }

    /// Has the helper forget a port that is closed, with the file of its socket.
    ///
    /// # Errors
    /// There is no helper any more, for people.
    fn close(&mut self, name: &str) -> Result<(), String> {
        let privileges = self.privileges;
        privileges.close(name, &mut || self.serve_ports())
    }

    /// Says why a port cannot be replaced by this one, if that is known before it is tried.
    fn can_replace(&mut self, port: &PortConfig) -> Result<(), String> {
        self.can_plug(port)?;
        if self.find(&port.name).is_some_and(|before| before.kind.is_passed()) {
            return Err(
                "its descriptor was passed at the start, and could not be had again: restart the switch"
                    .to_owned(),
            );
        }
        Ok(())
    }

    /// Opens the port that replaces `before`, which is unplugged. If that cannot be done the one before is opened again.
    fn replace(&mut self, before: Option<PortConfig>, port: &PortConfig) -> Result<(), String> {
        let Err(error) = self.plug(port) else {
            self.put(port.clone());
            return Ok(());
        };
        match before.map(|before| self.plug(&before)) {
            Some(Err(again)) => {
                self.config.ports.retain(|there| there.name != port.name);
                Err(format!("{error}; and it could not be opened as it was before ({again}), so it is gone"))
            }
            _ => Err(format!("{error}; it is as it was before")),
        }
    }

    /// Removes a port from the configuration file unless only the running switch is meant, and returns whether it is gone there, with the file
    /// or the reason.
    fn forget(&mut self, name: &str, runtime: bool) -> (bool, String) {
        self.note(runtime, until_reload, |requests| {
            let path = requests.config.file.as_ref()?.path.clone();
            let privileges = requests.privileges;
            let kept = privileges.forget_port(&path, name, &mut || requests.serve_ports());
            if let (Ok(_), Some(file)) = (&kept, &mut requests.config.file) {
                file.forget(name);
            }
            Some(kept)
        })
    }

    fn find(&self, name: &str) -> Option<&PortConfig> {
        self.config.ports.iter().find(|port| port.name == name)
    }

    /// Puts a port into the configuration, in place of the one of its name.
    fn put(&mut self, port: PortConfig) {
        match self.config.ports.iter_mut().find(|there| there.name == port.name) {
            Some(there) => *there = port,
            None => self.config.ports.push(port),
        }
    }

    fn is_in_file(&self, name: &str) -> bool {
        self.config.file.as_ref().is_some_and(|file| file.ports.iter().any(|port| port == name))
    }

    /// Has a change kept in the configuration file, and returns whether it is, with the file or the reason, of which `becomes` says what that means.
    fn note(
        &mut self,
        runtime: bool,
        becomes: fn(&str) -> String,
        keep: impl FnOnce(&mut Self) -> Option<Result<PathBuf, NotKept>>,
    ) -> (bool, String) {
        if runtime {
            return (false, "a change of the running switch alone was asked for".to_owned());
        }
        match keep(self) {
            None => (false, "the switch was started without a configuration file".to_owned()),
            Some(Ok(path)) => (true, format!("in {}", path.display())),
            Some(Err(NotKept::Because(why) | NotKept::Refused(why))) => {
                warn_of_lost(&why);
                (false, becomes(&why))
            }
        }
    }
}

/// Logs that a change is not in the file though it was to be, for whoever looks for warnings only: `ctl` succeeds, as it is in force.
pub(super) fn warn_of_lost(why: &str) {
    tracing::warn!("what was asked for is in force, and not kept in the configuration file: {why}");
}

/// Says what becomes of a change that the file should have and has not, for people.
pub(super) fn until_reload(why: &str) -> String {
    format!("{why}; a reload, also for another port, takes it back: mend that, and ask for the same again")
}

/// Says what becomes of a port that the file should have and has not, for people.
fn in_no_file(why: &str) -> String {
    format!(
        "{why}; the port is open and in no file, so that a start has it no more: mend that, and add the very same again"
    )
}

/// Returns the path at which a port listens.
fn socket_of(port: &PortConfig) -> Option<&Path> {
    match &port.kind {
        PortKind::VhostUser(VhostUserConfig { endpoint: VhostUserEndpoint::Listen(path), .. }) => Some(path),
        _ => None,
    }
}

/// Returns true if a port could not be opened because somebody has its tap open, or has not let it vanish yet.
fn is_held(port: &PortConfig, error: &str) -> bool {
    let PortKind::Tap(TapConfig { source: TapSource::Name { name, .. }, .. }) = &port.kind else {
        return false;
    };
    let in_use = TapError::InUse { name: name.clone(), pid: None }.to_string();
    error.starts_with(&in_use) || error.starts_with(&tap_exists(name))
}

/// Describes how a port that is open becomes another, for people.
pub(super) fn describe(before: &PortConfig, now: &PortConfig) -> String {
    let (rules_before, rules) = (rules_by_key(&before.rules), rules_by_key(&now.rules));
    let mut told = Vec::new();
    if rules_before != rules {
        told.push(changes(&rules_before, &rules));
    }
    let settings = PortConfig { rules: before.rules.clone(), ..now.clone() };
    let differences = before.differences(&settings, |key, has, becomes| {
        let later = before.effect(key) == Some(Effect::NextConnection);
        format!("{key} {has} -> {becomes}{}", if later { " with the next connection" } else { "" })
    });
    if !differences.is_empty() {
        told.push(differences);
    }
    let policy =
        |port: &PortConfig| port.rules.firewall.as_ref().and_then(|firewall| firewall.policy.clone());
    if rules_before == rules && policy(before) != policy(now) {
        told.push("the policy of its firewall has changed".to_owned());
    }
    if told.is_empty() { "none has another value".to_owned() } else { told.join(", ") }
}
