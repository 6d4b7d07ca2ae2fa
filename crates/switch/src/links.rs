//! Ports whose links were taken down: `ringferry ctl link`.
//!
//! A port that is down stays down, also when it is opened anew, until it is taken up, removed, or the switch ends; the configuration knows nothing of it. No frame
//! passes it in the workers, in either direction, and its guest is told where the front end takes such messages.

use std::collections::BTreeMap;

use ringferry_control::mirror::LinkChange;

use crate::fdb::PortId;
use crate::ports::queues::Workers;
use crate::ports::table::PortTable;

/// See the head of this file. Owned by the switch and used on the control plane's thread.
#[derive(Default)]
pub(crate) struct Links {
    /// Names of ports that are down, each with the number for which that was said.
    down: BTreeMap<String, Option<PortId>>,
}

impl Links {
    /// Takes the link of a port up or down. When this returns, frames pass or do not.
    ///
    /// # Errors
    /// There is no such port.
    pub(crate) fn set(
        &mut self,
        name: &str,
        up: bool,
        ports: &mut PortTable,
        workers: &Workers,
    ) -> Result<LinkChange, String> {
        let id = ports.interface(name).map(|port| port.id);
        if id.is_none() && !self.down.contains_key(name) {
            let names: Vec<_> = ports.interfaces().map(|port| port.name.to_owned()).collect();
            return Err(format!("there is no port {name:?} now; the ports are: {}", names.join(", ")));
        }
        if up {
            self.down.remove(name);
        } else {
            self.down.insert(name.to_owned(), id);
        }
        let told = id.is_some_and(|id| {
            workers.set_link(id, up);
            workers.settled();
            ports.set_link(id, up)
        });
        tracing::info!(port = name, told, "the link is taken {}", if up { "up" } else { "down" });
        Ok(LinkChange { port: name.to_owned(), up, told })
    }

    /// Returns whether the link of a port was taken down.
    pub(crate) fn is_down(&self, name: &str) -> bool {
        self.down.contains_key(name)
    }

    /// Forgets a port that is removed: another one that gets its name is up. Returns true if it was down.
    pub(crate) fn forget(&mut self, name: &str) -> bool {
        self.down.remove(name).is_some()
    }

    /// Returns the names of ports whose links are down, for another process.
    pub(crate) fn down(&self) -> Vec<String> {
        self.down.keys().cloned().collect()
    }

    /// Takes over the ports whose links are down in another process; [`follow`](Self::follow) carries it out.
    pub(crate) fn take_over(&mut self, down: &[String]) {
        self.down.extend(down.iter().map(|name| (name.clone(), None)));
    }

    /// Follows ports that were opened anew. Called about once a second, and after each request.
    pub(crate) fn follow(&mut self, ports: &mut PortTable, workers: &Workers) {
        for (name, known) in &mut self.down {
            let now = ports.interface(name).map(|port| port.id);
            if now != *known {
                *known = now;
                if let Some(id) = now {
                    workers.set_link(id, false);
                    ports.set_link(id, false);
                }
            }
        }
    }
}
