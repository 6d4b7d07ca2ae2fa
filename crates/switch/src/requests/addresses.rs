//! Addresses that are forgotten, or put behind a port for ever: `ringferry ctl fdb flush`, `add` and `del`.
//!
//! A static address is a rule of its port (`static_macs`), so adding one is a change of rules, with its checks, and is kept as such.

use ringferry_control::Answer;
use ringferry_control::mirror::FdbFlush;
use ringferry_packet::ether::Mac;

use super::Requests;
use crate::config::Edit;
use crate::fdb::Flush;
use crate::rules::Vid;
use crate::snapshot::rules_by_key;

/// The rule that holds static addresses.
const STATIC: &str = "static_macs";

impl Requests<'_> {
    /// Forgets learned addresses.
    pub(super) fn flush(
        &self,
        port: Option<&str>,
        vid: Option<Vid>,
        address: Option<&str>,
    ) -> Result<FdbFlush, String> {
        let port = match port {
            None => None,
            Some(name) => Some(self.ports.interface(name).ok_or_else(|| self.no_such_port(name))?.id),
        };
        let mac = address.map(parse).transpose()?;
        let forgotten = self.workers.flush(Flush { port, vid, mac }) as u64;
        tracing::info!(forgotten, "learned addresses are forgotten");
        Ok(FdbFlush { forgotten })
    }

    /// Puts an address behind a port for ever.
    pub(super) fn add_static(
        &mut self,
        address: &str,
        port: &str,
        vid: Option<Vid>,
        runtime: bool,
    ) -> Result<Answer, String> {
        let mac = parse(address)?;
        let mut stations = self.stations(port)?;
        let new = vid.map_or_else(|| mac.to_string(), |vid| format!("{mac}@{vid}"));
        if !stations.contains(&new) {
            stations.push(new);
        }
        self.set_stations(port, &stations, runtime)
    }

    /// Takes a static address away from the port that has it.
    pub(super) fn remove_static(
        &mut self,
        address: &str,
        vid: Option<Vid>,
        runtime: bool,
    ) -> Result<Answer, String> {
        let mac = parse(address)?;
        let is_meant = |(station, its): &(Mac, Vid)| *station == mac && vid.is_none_or(|vid| vid == *its);
        let holders = self.config.ports.iter().filter_map(|port| {
            let found: Vec<Vid> =
                port.rules.static_macs.iter().filter(|it| is_meant(it)).map(|it| it.1).collect();
            (!found.is_empty()).then(|| (port.name.clone(), found))
        });
        let holders: Vec<(String, Vec<Vid>)> = holders.collect();
        let (port, vid) = match &holders[..] {
            [] => {
                return Err(format!(
                    "{mac} is no static address: `ringferry ctl fdb flush --mac` forgets learned ones"
                ));
            }
            [(port, vids)] if vids.len() == 1 => (port.clone(), vids[0]),
            _ => return Err(format!("{mac} is static in several VLANs: say which with --vlan")),
        };
        let stations: Vec<String> =
            self.config.ports.iter().find(|it| it.name == port).map_or_else(Vec::new, |it| {
                let left = it.rules.static_macs.iter().filter(|it| **it != (mac, vid));
                left.map(|(mac, vid)| format!("{mac}@{vid}")).collect()
            });
        self.set_stations(&port, &stations, runtime)
    }

    /// Returns the static addresses of a port, as its rule has them.
    fn stations(&self, name: &str) -> Result<Vec<String>, String> {
        let Some(port) = self.config.ports.iter().find(|port| port.name == name) else {
            return Err(self.not_an_entry(name));
        };
        let rules = rules_by_key(&port.rules);
        let stations =
            rules.get(STATIC).and_then(|stations| stations.as_array()).cloned().unwrap_or_default();
        Ok(stations.iter().filter_map(|station| station.as_str()).map(str::to_owned).collect())
    }

    fn set_stations(&mut self, port: &str, stations: &[String], runtime: bool) -> Result<Answer, String> {
        let edit = match stations {
            [] => Edit::unset(&[STATIC.to_owned()]),
            _ => Edit::set(&[format!("{STATIC}={}", stations.join(","))]),
        };
        self.change(port, &edit.map_err(|error| error.to_string())?, runtime)
    }
}

fn parse(address: &str) -> Result<Mac, String> {
    address.parse().map_err(|error| format!("{address:?}: {error}"))
}
