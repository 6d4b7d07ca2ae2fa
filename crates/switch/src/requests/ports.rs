//! Ports that come and go while the switch runs: `ringferry ctl add`, `remove` and `reload`.
//!
//! A port is opened by the [helper](crate::privileged), plugged in on the control plane's thread, and then kept in the configuration file.
//! A reload reads the file, compares it as a whole with what runs, and carries out the differences port by port; ports that are as the file
//! has them are not touched.

use ringferry_control::{PortAction, PortChange, Reload, ReloadStep};

use super::{Requests, changes};
use crate::config::PortConfig;
use crate::ports::{self, OpenError};
use crate::privileged::NotKept;
use crate::snapshot::rules_by_key;

impl Requests<'_> {
    /// Adds the port that `text` describes, and keeps it in the configuration file unless only the running switch is meant.
    pub(super) fn add(&mut self, text: &str, runtime: bool) -> Result<PortChange, String> {
        let (port, is_new) = self.config.to_add(text, self.workers.count())?;
        if !is_new {
            let persistent = self.is_in_file(&port.name);
            let note = "there is this very port already".to_owned();
            return Ok(PortChange { port: port.name, done: PortAction::Nothing, persistent, note });
        }
        self.plug(&port)?;
        let name = port.name.clone();
        let (persistent, note) = self.note(runtime, |requests| {
            let file = requests.config.file.as_mut()?;
            let kept = requests.privileges.keep_port(&file.path, &port);
            if kept.is_ok() {
                file.ports.push(port.name.clone());
            }
            Some(kept)
        });
        self.config.ports.push(port);
        tracing::info!(port = name, persistent, "the port is added ({note})");
        Ok(PortChange { port: name, done: PortAction::Added, persistent, note })
    }

    /// Removes a port, also from the configuration file unless only the running switch is meant.
    pub(super) fn remove(
        &mut self,
        name: &str,
        if_exists: bool,
        runtime: bool,
    ) -> Result<PortChange, String> {
        let Some(at) = self.config.ports.iter().position(|port| port.name == name) else {
            if if_exists && self.ports.entry_of(name).is_none() {
                let note = "there is no such port".to_owned();
                return Ok(PortChange {
                    port: name.to_owned(),
                    done: PortAction::Nothing,
                    persistent: true,
                    note,
                });
            }
            return Err(self.not_an_entry(name));
        };
        self.unplug(name);
        self.config.ports.remove(at);
        let (persistent, note) = if self.is_in_file(name) {
            self.note(runtime, |requests| {
                let file = requests.config.file.as_mut()?;
                let kept = requests.privileges.forget_port(&file.path, name);
                if kept.is_ok() {
                    file.ports.retain(|port| port != name);
                }
                Some(kept)
            })
        } else {
            (
                false,
                "it is not in a configuration file: if it was given by a flag, change that, too".to_owned(),
            )
        };
        tracing::info!(port = name, persistent, "the port is removed ({note})");
        Ok(PortChange { port: name.to_owned(), done: PortAction::Removed, persistent, note })
    }

    /// Makes the switch what its configuration file says now, or says what that would take.
    pub(crate) fn reload(&mut self, dry_run: bool) -> Result<Reload, String> {
        let file = self.config.file.as_ref().ok_or("the switch was started without a configuration file")?;
        let shown = file.path.display().to_string();
        let read = self.privileges.read(&file.path, self.workers.count())?;
        let found = self.config.changes(&read, self.workers.count())?;
        let mut reload = Reload { file: shown, dry_run, restart: found.restart, ..Reload::default() };
        let mut step = |port: &str, action, what: String, result: Result<(), String>| {
            match &result {
                _ if dry_run => {}
                Ok(()) => tracing::info!(port, "reload: {what}"),
                Err(error) => tracing::warn!(port, "reload: {what}: not done: {error}"),
            }
            reload.steps.push(ReloadStep { port: port.to_owned(), action, what, error: result.err() });
        };
        for name in &found.removed {
            if !dry_run {
                self.unplug(name);
                self.config.ports.retain(|port| port.name != *name);
            }
            step(name, PortAction::Removed, "it is not in the file any more".to_owned(), Ok(()));
        }
        for port in &found.replaced {
            let differences = self.find(&port.name).map(|there| there.differences(port)).unwrap_or_default();
            let what = format!("{differences}; it is replaced, and its peer has to connect again");
            let done = if dry_run { self.can_plug(port) } else { self.replace(port) };
            step(&port.name, PortAction::Replaced, what, done);
        }
        for port in &found.rules {
            let before = self.find(&port.name).map(|there| rules_by_key(&there.rules)).unwrap_or_default();
            let what = changes(&before, &rules_by_key(&port.rules));
            if !dry_run {
                self.ports.set_rules(&port.name, &port.rules);
                self.put(port.clone());
            }
            step(&port.name, PortAction::Changed, what, Ok(()));
        }
        for port in &found.added {
            let done = if dry_run { self.can_plug(port) } else { self.plug(port) };
            if done.is_ok() && !dry_run {
                self.put(port.clone());
            }
            step(&port.name, PortAction::Added, format!("a {} port", port.kind.name()), done);
        }
        if !dry_run {
            let place = |port: &PortConfig| found.order.iter().position(|name| *name == port.name);
            self.config.ports.sort_by_key(place);
            let in_file =
                read.file.or_else(|| self.config.file.clone()).map(|file| file.ports).unwrap_or_default();
            if let Some(file) = &mut self.config.file {
                file.ports = in_file
                    .into_iter()
                    .filter(|name| self.config.ports.iter().any(|port| port.name == *name))
                    .collect();
            }
        }
        Ok(reload)
    }

    /// Opens a port and plugs it in. If it fails nothing is left of the port.
    fn plug(&mut self, port: &PortConfig) -> Result<(), String> {
        self.can_plug(port)?;
        let workers = self.workers.count();
        let opened = self
            .privileges
            .open(port, workers)
            .and_then(|mut passed| ports::open(port, workers, &mut passed));
        let plugged = opened.and_then(|plug| self.ports.add(port.clone(), plug, self.epoll));
        match plugged {
            Ok(entry) => {
                self.ports.begin_entry(entry, self.epoll);
                Ok(())
            }
            Err(error) => {
                self.privileges.close(&port.name);
                Err(error.to_string())
            }
        }
    }

    /// Opens a port anew whose tap was deleted. The old one goes when the new one is open.
    pub(crate) fn renew(&mut self, port: &PortConfig) -> Result<(), String> {
        let workers = self.workers.count();
        let opened = self
            .privileges
            .open(port, workers)
            .and_then(|mut passed| ports::open(port, workers, &mut passed));
        let plug = opened.map_err(|error| error.to_string())?;
        self.ports.remove(&port.name, self.epoll);
        let entry = self.ports.add(port.clone(), plug, self.epoll).map_err(|error| error.to_string())?;
        self.ports.begin_entry(entry, self.epoll);
        Ok(())
    }

    fn can_plug(&self, port: &PortConfig) -> Result<(), String> {
        if port.kind.is_passed() { Err(OpenError::OnlyAtStart.to_string()) } else { Ok(()) }
    }

    fn unplug(&mut self, name: &str) {
        self.ports.remove(name, self.epoll);
        self.privileges.close(name);
    }

    /// Replaces a port by one of the same name. If the new one cannot be opened the old one is opened again.
    fn replace(&mut self, port: &PortConfig) -> Result<(), String> {
        self.can_plug(port)?;
        let before = self.find(&port.name).cloned();
        if before.as_ref().is_some_and(|before| before.kind.is_passed()) {
            return Err(
                "its descriptor was passed at the start, and could not be had again: restart the switch"
                    .to_owned(),
            );
        }
        self.unplug(&port.name);
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

    /// Has a change kept in the configuration file, and returns whether it is, with the file or the reason.
    fn note(
        &mut self,
        runtime: bool,
        keep: impl FnOnce(&mut Self) -> Option<Result<(), NotKept>>,
    ) -> (bool, String) {
        if runtime {
            return (false, "a change of the running switch alone was asked for".to_owned());
        }
        match keep(self) {
            None => (false, "the switch was started without a configuration file".to_owned()),
            Some(Ok(())) => {
                let path = self.config.file.as_ref().map(|file| file.path.display().to_string());
                (true, format!("in {}", path.unwrap_or_default()))
            }
            Some(Err(NotKept::Because(why) | NotKept::Refused(why))) => (false, why),
        }
    }
}
