//! Looks for what a valid configuration says and hardly means: `ringferry run --check`.

use super::{Config, PortConfig, PortKind};
use crate::rules::{Rules, Vlans};

/// Something that a valid configuration says of a port and hardly means.
#[derive(Clone, Debug)]
pub(crate) struct Oddity {
    pub(crate) port: String,
    /// Tells it from the others of its port.
    about: String,
    /// A sentence, for people.
    pub(crate) text: String,
}

impl Oddity {
    /// Returns those that were not there `before`, so that nobody is told again and again.
    pub(crate) fn news(now: Vec<Oddity>, before: &[Oddity]) -> impl Iterator<Item = Oddity> {
        let is_old = |odd: &Oddity| {
            before.iter().any(|before| (&before.port, &before.about) == (&odd.port, &odd.about))
        };
        now.into_iter().filter(move |odd| !is_old(odd))
    }
}

impl Config {
    /// Says what is strange about the configuration and the rules of its ports, in a sentence each, for people.
    pub fn oddities(&self) -> Vec<String> {
        let empty = self.ports.is_empty().then(|| {
            "there is no port: if the file is not half of one, ports come with `ringferry ctl add`, or with files beside it and `ringferry ctl reload`".to_owned()
        });
        let of_ports = self.oddities_of_ports(self.switch.workers());
        empty.into_iter().chain(of_ports.into_iter().map(|odd| odd.text)).collect()
    }

    /// Returns what is strange about ports in a switch with so many workers: of each port by itself, and beside the others.
    pub(crate) fn oddities_of_ports(&self, workers: usize) -> Vec<Oddity> {
        self.ports.iter().flat_map(|port| self.odd(port, workers)).collect()
    }

    fn odd(&self, port: &PortConfig, workers: usize) -> Vec<Oddity> {
        let PortConfig { kind, rules, name, .. } = port;
        let mut odd = Vec::new();
        let mut add = |about: Option<&str>, text: String| {
            let about = about.unwrap_or(&text).to_owned();
            odd.push(Oddity { port: name.clone(), about, text });
        };
        let is_guest = !kind.is_of_the_host();
        let access = self.ports.iter().find_map(|port| Some((&port.name, port.rules.vlans.access()?)));
        if let Some((access, vid)) = access
            && is_guest
            && rules.vlans == Vlans::default()
        {
            // Whichever it reaches first.
            let text = format!(
                "port {name} has no vlan, so it is a trunk of all VLANs: what its guest sends with a tag of {vid} reaches {access}. \
                 Give it a vlan, or a trunk of those that it is to reach; trunk=1-4094 with native=0 says that it is meant"
            );
            add(Some("no vlan"), text);
        }
        let mac_of = |port: &PortConfig| match &port.kind {
            PortKind::VhostUser(vhost) => vhost.mac,
            _ => None,
        };
        // Of two that have one it is the second that is odd.
        let before = self.ports.iter().take_while(|other| other.name != *name);
        let is_same = |other: &&PortConfig| mac_of(other).is_some() && mac_of(other) == mac_of(port);
        if let Some(other) = before.into_iter().find(is_same) {
            let text = format!(
                "port {name} has the mac of {}: what is sent to it reaches whoever spoke last",
                other.name
            );
            add(None, text);
        }
        if let Some(only) = &rules.quarantine {
            // The ports of a Xen host are named after their guests.
            let is_there =
                |other: &PortConfig| other.name == *only || matches!(other.kind, PortKind::XenVif(_));
            if only == name {
                add(None, format!("port {name} is in quarantine with itself: nothing passes"));
            } else if !self.ports.iter().any(is_there) {
                let text = format!(
                    "port {name} is in quarantine with {only}, and there is no such port: nothing passes"
                );
                add(None, text);
            }
        }
        if let Some(without) = port.without_worker(workers) {
            add(None, format!("port {name}: {without}: another worker has its place"));
        }
        for mac in locked_out(rules) {
            let text = format!(
                "port {name} has {mac} among its static_macs, which is not one of its allowed_macs: what comes from there is dropped"
            );
            add(None, text);
        }
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
            found.starts_with("port b has no vlan") && found.contains("a tag of 10 reaches a."),
            "{found}"
        );
        let (one, other) = ("52:54:00:00:00:01", "52:54:00:00:00:02");
        let with = |socket: &str, mac: &str| format!("vhost-user:/{socket}.sock,mac={mac}");
        assert_eq!(odd(&[&with("a", one), &with("b", other), "vhost-user:/c.sock"]), [""; 0]);
        let [found] = odd(&[&with("a", one), &with("b", one)]).try_into().unwrap();
        assert!(found.starts_with("port b has the mac of a:"), "{found}");
        assert_eq!(odd(&[&format!("tap:t0,static_macs={one},allowed_macs={one}")]), [""; 0]);
        assert_eq!(odd(&[&format!("tap:t0,static_macs={one}")]), [""; 0]);
        let [found] = odd(&[&format!("tap:t0,static_macs={one},allowed_macs={other}")]).try_into().unwrap();
        assert!(
            found.starts_with("port t0 has 52:54:00:00:00:01 among its static_macs, which is not one"),
            "{found}"
        );
    }

    /// Also of a port that did not change: what made it so is another one.
    #[test]
    fn only_what_a_change_makes_strange_is_told() {
        let of = |ports: &[&str]| {
            let builder = ports.iter().fold(Config::builder(), |builder, port| builder.port_flag(port));
            builder.build().unwrap().oddities_of_ports(1)
        };
        let (a, b, c) = ("vhost-user:/a.sock", "vhost-user:/b.sock", "vhost-user:/c.sock");
        let tagged = |port: &str, vid: u16| format!("{port},vlan={vid}");
        let names = |now: &[&str], before: &[&str]| {
            Oddity::news(of(now), &of(before)).map(|odd| odd.port).collect::<Vec<_>>()
        };
        assert_eq!(names(&[a, b, &tagged(c, 10)], &[a, b]), ["a", "b"]);
        assert_eq!(names(&[a, &tagged(b, 10), &tagged(c, 10)], &[a, b, &tagged(c, 10)]), [""; 0]);
        assert_eq!(names(&[a, &tagged(b, 10), c], &[a, &tagged(b, 10)]), ["c"]);
        let alone = |only: &str| format!("{a},quarantine={only}");
        assert_eq!(names(&[&alone("b"), b], &[a, b]), [""; 0]);
        assert_eq!(names(&[&alone("b")], &[&alone("b"), b]), ["a"]);
        assert_eq!(names(&[&alone("x"), b], &[&alone("y"), b]), ["a"]);
    }
}
