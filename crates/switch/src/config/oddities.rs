//! Looks for what a valid configuration says and hardly means: `ringferry run --check`.

use super::{Config, PortConfig, PortKind};
use crate::rules::{Rules, Vlans};

impl Config {
    /// Says what is strange about the configuration and the rules of its ports, in a sentence each, for people.
    pub fn oddities(&self) -> Vec<String> {
        let workers = self.switch.workers();
        let empty = self.ports.is_empty().then(|| {
            "there is no port: if the file is not half of one, ports come with `ringferry ctl add`, or with files beside it and `ringferry ctl reload`".to_owned()
        });
        let odd =
            |port| self.odd(port, workers).into_iter().map(move |odd| format!("port {}: {odd}", port.name));
        empty.into_iter().chain(self.ports.iter().flat_map(odd)).collect()
    }

    /// Says what is strange about one port in a switch with so many workers, each behind a semicolon.
    pub(crate) fn oddities_of(&self, name: &str, workers: usize) -> String {
        let port = self.ports.iter().find(|port| port.name == name);
        port.into_iter().flat_map(|port| self.odd(port, workers)).map(|odd| format!("; {odd}")).collect()
    }

    /// Returns what is strange about a port beside the others.
    fn odd(&self, port: &PortConfig, workers: usize) -> Vec<String> {
        let PortConfig { kind, rules, .. } = port;
        let mut odd = Vec::new();
        let is_guest = !matches!(kind, PortKind::Tap(_));
        let access = self.ports.iter().find_map(|port| Some((&port.name, port.rules.vlans.access()?)));
        if let Some((access, vid)) = access
            && is_guest
            && rules.vlans == Vlans::default()
        {
            odd.push(format!(
                "it has no vlan, so it is a trunk of all VLANs: what its guest sends with a tag of {vid} reaches {access}. \
                 Give it a vlan, or a trunk of those that it is to reach; trunk=1-4094 with native=0 says that it is meant"
            ));
        }
        let mac_of = |port: &PortConfig| match &port.kind {
            PortKind::VhostUser(vhost) => vhost.mac,
            _ => None,
        };
        // Of two that have one it is the second that is odd.
        let before = self.ports.iter().take_while(|other| other.name != port.name);
        let is_same = |other: &&PortConfig| mac_of(other).is_some() && mac_of(other) == mac_of(port);
        if let Some(other) = before.into_iter().find(is_same) {
            odd.push(format!(
                "its mac is that of {}, too: what is sent to it reaches whoever spoke last",
                other.name
            ));
        }
        if let Some(only) = &rules.quarantine {
            // The ports of a Xen host are named after their guests.
            let is_there =
                |other: &PortConfig| other.name == *only || matches!(other.kind, PortKind::XenVif(_));
            if *only == port.name {
                odd.push("it is in quarantine with itself: nothing passes".to_owned());
            } else if !self.ports.iter().any(is_there) {
                odd.push(format!(
                    "it is in quarantine with {only}, and there is no such port: nothing passes"
                ));
            }
        }
        if let Some(without) = port.without_worker(workers) {
            odd.push(format!("{without}: another worker has its place"));
        }
        odd.extend(locked_out(rules).map(|mac| {
            format!(
                "static_macs has {mac}, which is not one of its allowed_macs: what comes from there is dropped"
            )
        }));
        odd
    }
}

/// Addresses that are behind a port for ever, and that it may not send from.
fn locked_out(rules: &Rules) -> impl Iterator<Item = String> {
    let allowed = rules.guard.as_ref().map(|guard| &guard.macs);
    let fixed = rules.static_macs.iter().map(|(mac, _)| *mac);
    fixed.filter(move |mac| allowed.is_some_and(|allowed| !allowed.contains(mac))).map(|mac| mac.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_hardly_meant_is_said_and_what_is_usual_is_not() {
        let odd = |ports: &[&str]| {
            let builder = ports.iter().fold(Config::builder(), |builder, port| builder.port_flag(port));
            builder.build().unwrap().oddities()
        };
        // An uplink is a trunk beside access ports; a switch without VLANs has none.
        assert_eq!(odd(&["vhost-user:/a.sock,vlan=10", "tap:t0"]), [""; 0]);
        assert_eq!(odd(&["vhost-user:/a.sock", "vhost-user:/b.sock", "tap:t0"]), [""; 0]);
        assert_eq!(odd(&["vhost-user:/a.sock,vlan=10", "vhost-user:/b.sock,trunk=10"]), [""; 0]);
        assert_eq!(odd(&["vhost-user:/a.sock,vlan=10", "vhost-user:/b.sock,trunk=1-4094,native=0"]), [""; 0]);
        let [found] = odd(&["vhost-user:/a.sock,vlan=10", "vhost-user:/b.sock"]).try_into().unwrap();
        assert!(
            found.starts_with("port b: it has no vlan") && found.contains("a tag of 10 reaches a."),
            "{found}"
        );
        let (one, other) = ("52:54:00:00:00:01", "52:54:00:00:00:02");
        let with = |socket: &str, mac: &str| format!("vhost-user:/{socket}.sock,mac={mac}");
        assert_eq!(odd(&[&with("a", one), &with("b", other), "vhost-user:/c.sock"]), [""; 0]);
        let [found] = odd(&[&with("a", one), &with("b", one)]).try_into().unwrap();
        assert!(found.starts_with("port b: its mac is that of a, too"), "{found}");
        assert_eq!(odd(&[&format!("tap:t0,static_macs={one},allowed_macs={one}")]), [""; 0]);
        assert_eq!(odd(&[&format!("tap:t0,static_macs={one}")]), [""; 0]);
        let [found] = odd(&[&format!("tap:t0,static_macs={one},allowed_macs={other}")]).try_into().unwrap();
        assert!(found.starts_with("port t0: static_macs has 52:54:00:00:00:01, which is not one"), "{found}");
    }
}
