//! Looks for what a valid configuration needs of its host: `ringferry run --check`.

use std::path::Path;

use ringferry_control::{default_path, makes_directory};
use ringferry_sys::accounts;

use super::{Config, PortKind, VhostUserEndpoint};

/// Names and directories that a configuration needs of this host, and that are not there now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Missing {
    /// A switch would not start.
    pub names: Vec<String>,
    /// It would not start now; whoever starts it may make them first, as systemd does (`RuntimeDirectory=`).
    pub directories: Vec<String>,
}

impl Config {
    /// Returns the configuration, if there are all users and groups that it names.
    ///
    /// # Errors
    /// Those that there are not, for people.
    pub(crate) fn with_names(self) -> Result<Config, String> {
        let names = self.missing().names;
        if names.is_empty() { Ok(self) } else { Err(names.join("\n")) }
    }

    /// Looks for users, groups and directories of sockets, and opens nothing.
    pub fn missing(&self) -> Missing {
        let mut missing = Missing::default();
        let control = self.control.clone().unwrap_or_else(default_path);
        for port in &self.ports {
            let PortKind::VhostUser(vhost) = &port.kind else { continue };
            let VhostUserEndpoint::Listen(path) = &vhost.endpoint else { continue };
            let (owner, group) = (&vhost.access.owner, &vhost.access.group);
            let owner = owner.as_deref().map(|name| ("socket_owner", accounts::user(name)));
            let group = group.as_deref().map(|name| ("socket_group", accounts::group(name)));
            for (key, found) in owner.into_iter().chain(group) {
                missing.names.extend(found.err().map(|why| format!("port {}: {key}: {why}", port.name)));
            }
            let directory = path.parent().filter(|directory| *directory != Path::new(""));
            let is_there = |directory: &Path| directory.is_dir() || makes_directory(&control, directory);
            if let Some(directory) = directory.filter(|directory| !is_there(directory)) {
                let text = format!("port {}: there is no directory {} now", port.name, directory.display());
                missing.directories.push(text);
            }
        }
        missing
    }
}
