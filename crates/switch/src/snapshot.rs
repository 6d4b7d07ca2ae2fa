//! Converts the state of the switch to the types of the control socket ([`ringferry_control::snapshot`]).

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::Duration;

use ringferry_control::RulesByKey;
use ringferry_control::snapshot::{
    FdbEntry, FdbLost, FdbRestless, FdbSnapshot as Merged, GrantSnapshot, WorkerSnapshot,
};
use ringferry_xen_net::netback::PageCounters;

use crate::config;
use crate::counters::{Counter, WorkerCounters};
use crate::fdb::{FdbPage, FdbStats, FdbWhole, LostAddress, PortId, Restless};
use crate::impairments::Impairments;
use crate::rules::Rules;

/// Returns rules as they are shown and reported.
pub(crate) fn rules_by_key(rules: &Rules) -> RulesByKey {
    let value = |value| serde_json::to_value(value).unwrap_or_default();
    config::rules_by_key(rules).into_iter().map(|(key, toml)| (key.to_owned(), value(toml))).collect()
}

/// Returns impairments in the words of `ringferry ctl wire set`; empty if there are none.
pub(crate) fn wire_settings(impairments: &Impairments) -> String {
    let all: Vec<_> = ringferry_control::settings(&wire_by_key(impairments)).collect();
    all.join(" ")
}

/// Returns impairments as they are shown and reported.
pub(crate) fn wire_by_key(impairments: &Impairments) -> RulesByKey {
    let value = |value| serde_json::to_value(value).unwrap_or_default();
    let entries = config::wires::impairment_entries(impairments).into_iter();
    entries.map(|(key, toml)| (key.to_owned(), value(toml))).collect()
}

/// Converts the counters of a Xen guest's queue, of which `max` pages may be mapped; the pair is the pages
/// mapped now, learned ones and static grants.
pub(crate) fn grants(counters: &PageCounters, (learned, fixed): (usize, usize), max: usize) -> GrantSnapshot {
    let PageCounters { hits, misses, mapped, evicted, failed, copies, copied_bytes } = *counters;
    let [learned_pages, static_pages, max_pages] = [learned, fixed, max].map(|pages| pages as u64);
    GrantSnapshot {
        hits,
        misses,
        mapped,
        evicted,
        failed,
        copies,
        copied_bytes,
        learned_pages,
        static_pages,
        max_pages,
    }
}

/// Converts the counters of a worker that is `age` old.
pub(crate) fn worker(counters: &WorkerCounters, age: Duration) -> WorkerSnapshot {
    let [busy, polling] = [&counters.busy_nanoseconds, &counters.polling_nanoseconds].map(Counter::get);
    let awake = Duration::from_nanos(busy + polling).as_secs_f64();
    let share = if age.is_zero() { 0.0 } else { 100.0 * awake / age.as_secs_f64() };
    WorkerSnapshot {
        polls: counters.polls.get(),
        busy_polls: counters.busy_polls.get(),
        sleeps: counters.sleeps.get(),
        wakeups: counters.wakeups.get(),
        sleep_nanoseconds: Some(counters.sleep_nanoseconds.get()),
        busy_percent: share.clamp(0.0, 100.0),
        busy_nanoseconds: busy,
        polling_nanoseconds: polling,
        run_delay_nanoseconds: counters.run_delay_nanoseconds.get(),
        bursts: counters.bursts.iter().map(Counter::get).collect(),
        rounds: counters.rounds.iter().map(Counter::get).collect(),
        load: Vec::new(),
    }
}

/// Merges the forwarding databases of all workers.
#[derive(Clone, Debug, Default)]
pub(crate) struct FdbMerge(Merged);

impl FdbMerge {
    /// Adds a page of a worker's table, with ports named by `name`; [`settle`](Self::settle) follows when all
    /// have been added.
    pub(crate) fn add(&mut self, page: FdbPage, name: impl Fn(PortId) -> String) {
        self.0.entries.extend(page.items.into_iter().map(|item| FdbEntry {
            vlan: item.vid,
            mac: item.mac,
            port: name(item.port),
            age_seconds: item.age,
            fixed: item.fixed,
        }));
        let Some(FdbWhole { capacity, stats, restless, lost, behind }) = page.whole else { return };
        self.0.capacity = self.0.capacity.max(capacity);
        for Restless { vid: vlan, mac, ports, moves, seconds } in restless {
            let ports = ports.into_iter().map(&name).collect();
            self.0.restless.push(FdbRestless { vlan, mac, ports, moves, seconds });
        }
        for LostAddress { vid: vlan, mac, from, to, age } in lost {
            self.0.lost.push(FdbLost { vlan, mac, from: name(from), to: name(to), seconds: age });
        }
        for (port, count) in behind {
            // Workers tell each other what they learn, so none knows less than it has told.
            let most = self.0.behind.entry(name(port)).or_default();
            *most = (*most).max(count as u64);
        }
        let FdbStats { learned, moved, replaced, refused, aged, limited } = stats;
        for (name, count) in [
            ("learned", learned),
            ("moved", moved),
            ("replaced", replaced),
            ("refused", refused),
            ("aged", aged),
            ("limited", limited),
        ] {
            *self.0.counters.entry(name.to_owned()).or_insert(0) += count;
        }
    }

    /// Sorts the addresses and returns the merged table, with at most so many. If several workers know one, the entry that was seen last stays.
    pub(crate) fn settle(mut self, are_all_listed: bool, most: Option<usize>) -> Merged {
        self.0.entries.sort_unstable_by_key(|entry| (entry.vlan, entry.mac, entry.age_seconds));
        self.0.entries.dedup_by(|later, first| (later.vlan, later.mac) == (first.vlan, first.mac));
        self.0.entries.sort_unstable_by(|a, b| (&a.port, a.vlan, a.mac).cmp(&(&b.port, b.vlan, b.mac)));
        // Each worker has seen the same moves, as they tell each other: whoever has counted most stays, and the names of ports in one order.
        let restless = &mut self.0.restless;
        restless.iter_mut().for_each(|address| address.ports.sort_unstable());
        restless.sort_unstable_by_key(|address| (address.vlan, address.mac, Reverse(address.moves)));
        restless.dedup_by_key(|address| (address.vlan, address.mac));
        // Of each port the last one; what another worker has seen elsewhere since is not lost.
        let Merged { lost, entries, behind, .. } = &mut self.0;
        lost.retain(|lost| {
            let is_it = |entry: &&FdbEntry| (entry.vlan, entry.mac) == (lost.vlan, lost.mac);
            entries.iter().find(is_it).is_none_or(|entry| entry.port == lost.to)
        });
        lost.sort_unstable_by(|a, b| (&a.from, a.seconds).cmp(&(&b.from, b.seconds)));
        lost.dedup_by(|later, first| later.from == first.from);
        if are_all_listed {
            // Without those that are too old. But no more than the table of one worker has: in a flood each of them remembers other addresses.
            let mut listed: BTreeMap<&str, u64> = BTreeMap::new();
            entries.iter().for_each(|entry| *listed.entry(&entry.port).or_default() += 1);
            behind.retain(|port, count| {
                *count = listed.get(&**port).map_or(0, |listed| (*listed).min(*count));
                *count > 0
            });
        }
        entries.truncate(most.unwrap_or(usize::MAX));
        self.0
    }
}

#[cfg(test)]
mod tests {
    use ringferry_packet::ether::Mac;
    use serde_json::json;

    use super::*;
    use crate::fdb::Fdb;
    use crate::rules::Vlans;

    /// Merges these workers' tables at tick 10.
    fn known<const N: usize>(tables: [&Fdb; N]) -> serde_json::Value {
        let mut all = FdbMerge::default();
        for table in tables {
            all.add(table.page(0, 10), |port| ["vm0", "uplink"][usize::from(port.0)].to_owned());
        }
        serde_json::to_value(all.settle(true, None)).unwrap()
    }

    #[test]
    fn addresses_are_in_order_of_their_ports() {
        let mut fdb = Fdb::new(64, 300, [1, 2]);
        let _ = fdb.learn(0, Mac([0x52, 0x54, 0, 0, 0, 2]), PortId(1), 0);
        let _ = fdb.learn(0, Mac([0x52, 0x54, 0, 0, 0, 1]), PortId(0), 5);
        let json = known([&fdb]);
        assert_eq!(json["capacity"], 64);
        assert_eq!(json["counters"]["learned"], 2);
        assert_eq!(
            json["entries"],
            json!([
                {"vlan": 0, "mac": "52:54:00:00:00:02", "port": "uplink", "age_seconds": 10},
                {"vlan": 0, "mac": "52:54:00:00:00:01", "port": "vm0", "age_seconds": 5}
            ])
        );
    }

    #[test]
    fn an_address_that_several_workers_know_is_shown_once() {
        let mac = Mac([0x52, 0x54, 0, 0, 0, 1]);
        let [mut one, mut other] = [Fdb::new(64, 300, [1, 2]), Fdb::new(64, 300, [3, 4])];
        let _ = one.learn(7, mac, PortId(0), 2);
        let _ = other.learn(7, mac, PortId(0), 5);
        one.set_static(PortId(1), &[(mac, 0)]);
        other.set_static(PortId(1), &[(mac, 0)]);
        let json = known([&one, &other]);
        assert_eq!(
            json["entries"],
            json!([
                {"vlan": 0, "mac": "52:54:00:00:00:01", "port": "uplink", "age_seconds": 0, "static": true},
                {"vlan": 7, "mac": "52:54:00:00:00:01", "port": "vm0", "age_seconds": 5}
            ])
        );
        assert_eq!(json["counters"]["learned"], 2);
    }

    #[test]
    fn two_workers_that_know_different_addresses_have_not_the_room_of_both() {
        let mut tables = [Fdb::new(64, 300, [1, 2]), Fdb::new(64, 300, [3, 4])];
        for (number, fdb) in (0..).zip(&mut tables) {
            for last in 0..40 {
                let _ = fdb.learn(0, Mac([0x52, 0x54, 0, 0, number, last]), PortId(0), 5);
            }
        }
        let json = known([&tables[0], &tables[1]]);
        assert_eq!(json["behind"]["vm0"], 32, "half of the table of one");
        assert!(json["entries"].as_array().unwrap().len() > 60);
    }

    #[test]
    fn addresses_that_are_not_listed_are_counted() {
        let mut fdb = Fdb::new(64, 300, [1, 2]);
        let mac = |last| Mac([0x52, 0x54, 0, 0, 0, last]);
        for (last, port) in [(1, 0), (2, 0), (3, 1), (4, 0), (4, 1)] {
            let _ = fdb.learn(0, mac(last), PortId(port), 5);
        }
        fdb.set_static(PortId(0), &[(mac(5), 0)]);
        let merged = |page: FdbPage, are_all_listed, most| {
            let mut all = FdbMerge::default();
            all.add(page, |port| ["vm0", "uplink"][usize::from(port.0)].to_owned());
            all.settle(are_all_listed, most)
        };
        let counted = merged(fdb.page(FdbPage::END, 10), false, Some(0));
        assert_eq!((counted.entries.len(), counted.capacity, counted.addresses()), (0, 64, 5));
        let behind = [("uplink".to_owned(), 2), ("vm0".to_owned(), 3)].into();
        assert_eq!(counted.behind, behind);
        assert_eq!(
            counted.lost[0].to_text(),
            "52:54:00:00:00:04 was behind vm0 and has moved to uplink, 5 s ago"
        );
        // Those that are too old are counted only where they are not looked at.
        let listed = merged(fdb.page(0, 400), true, None);
        assert_eq!((listed.entries.len(), listed.addresses()), (1, 1));
        assert_eq!(merged(fdb.page(FdbPage::END, 400), false, Some(0)).addresses(), 5);
        assert_eq!(merged(fdb.page(0, 10), true, Some(2)).entries.len(), 2);
    }

    #[test]
    fn rules_are_shown_as_the_configuration_file_has_them() {
        let rules = rules_by_key(&Rules { isolated: true, vlans: Vlans::Access(10), ..Rules::default() });
        assert_eq!(serde_json::to_value(rules).unwrap(), json!({"isolated": true, "vlan": 10}));
        assert!(rules_by_key(&Rules::default()).is_empty());
    }

    #[test]
    fn busy_share_is_the_time_awake_whatever_sleep_goes_on() {
        let counters = WorkerCounters::default();
        counters.count_round(Duration::from_millis(1500));
        counters.count_polling(Duration::from_secs(1));
        let snapshot = worker(&counters, Duration::from_secs(10));
        assert_eq!((snapshot.busy_percent, snapshot.busy_nanoseconds), (25.0, 1_500_000_000));
        assert_eq!((snapshot.bursts.len(), snapshot.rounds.len()), (6, 8));
        assert_eq!(worker(&counters, Duration::ZERO).busy_percent, 0.0);
        assert_eq!(worker(&counters, Duration::from_secs(2)).busy_percent, 100.0);
    }
}
