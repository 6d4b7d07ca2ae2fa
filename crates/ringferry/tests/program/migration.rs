//! Live migration: what a switch writes to a guest is in the dirty log, from the moment when the front end is answered until it turns
//! logging off, while frames flow. With real VMs: `tests/interop`, `migrate-*`.

use std::collections::BTreeSet;
use std::sync::Arc;

use ringferry_control::snapshot::PortState;
use ringferry_memory::{DirtyLog, MapBudget, SharedMem};
use ringferry_packet::ether::rarp_announcement;
use ringferry_rig::frames::mac;
use ringferry_rig::guest::{Guest, Options, acquaint, converse};
use ringferry_rig::process::eventually;
use ringferry_rig::switch::{Place, Switch};
use ringferry_vhost_user::ProtocolFeatures;
use ringferry_vhost_user::message::{F_LOG_ALL, F_PROTOCOL_FEATURES};
use ringferry_virtio_net::Features;

use crate::replace::replaced;

const PAGE: usize = 4096;

/// The front end's side of a migration.
struct Migration {
    file: SharedMem,
    log: Arc<DirtyLog>,
}

impl Migration {
    fn begin(guest: &mut Guest) -> Migration {
        let region = guest.arena.region();
        let bytes = ((region.guest_addr + region.size) as usize).div_ceil(PAGE).div_ceil(8);
        let file = SharedMem::new("dirty-log", bytes).unwrap();
        let log = DirtyLog::map_within(file.fd(), bytes as u64, 0, &MapBudget::unlimited()).unwrap();
        let features = guest.features.bits() | F_PROTOCOL_FEATURES | F_LOG_ALL;
        let front = guest.connection.frontend();
        front.set_protocol_features(front.protocol() | ProtocolFeatures::LOG_SHMFD).unwrap();
        front.set_log_base(file.fd(), bytes as u64, 0).unwrap();
        front.set_features(features).unwrap();
        Migration { file, log }
    }

    fn end(&self, guest: &mut Guest) {
        let features = guest.features.bits() | F_PROTOCOL_FEATURES;
        guest.connection.frontend().set_features(features).unwrap();
        guest.connection.frontend().check().unwrap();
    }
}

fn snapshot(guest: &Guest) -> Vec<u8> {
    let region = guest.arena.region();
    let mut bytes = vec![0; region.size as usize];
    let area = guest.arena.memory().area(region.guest_addr, bytes.len()).unwrap();
    area.read(0, bytes.len()).unwrap().copy_to(&mut bytes);
    bytes
}

/// The pages of a guest's memory that differ from what they were.
fn changed(guest: &Guest, before: &[u8]) -> BTreeSet<u64> {
    let after = snapshot(guest);
    let first = guest.arena.region().guest_addr / PAGE as u64;
    let pages = (first..).zip(before.chunks(PAGE).zip(after.chunks(PAGE)));
    pages.filter(|(_, (before, after))| before != after).map(|(page, _)| page).collect()
}

/// How many frames the port has delivered.
fn delivered(switch: &Switch<'_>, port: &str) -> u64 {
    let snapshot = switch.show();
    snapshot.ports.iter().find(|shown| shown.name == port).unwrap().counters["tx_packets"]
}

#[test]
fn every_page_that_the_switch_writes_is_in_the_log_and_none_before_or_after() {
    for ring in [Features::empty(), Features::RING_PACKED] {
        let place = Place::new();
        let switch = place.switch(&["a", "b"]);
        let mut a = switch.plug("a", 1, Options::default());
        let without = Features::RING_PACKED.difference(ring);
        let options = Options { features: Features::DEVICE - without, ..Options::default() };
        let mut b = switch.plug("b", 2, options);
        assert_eq!(b.features.contains(Features::RING_PACKED), !ring.is_empty());
        acquaint(&mut [&mut a, &mut b]);
        for round in 0..3 {
            let migration = Migration::begin(&mut b);
            // The driver does nothing while frames come in, so that whatever differs was written by the switch.
            let (before, count) = (snapshot(&b), delivered(&switch, "b"));
            a.send_numbered(b.mac, round * 100, 40);
            eventually("forty frames are delivered", || {
                (delivered(&switch, "b") == count + 40).then_some(())
            });
            let differ = changed(&b, &before);
            assert!(differ.len() >= 2, "a ring and buffers: {differ:?}");
            // A worker may still be between its last write and the bit for it.
            let mut marked = BTreeSet::new();
            eventually("all that differs is marked", || {
                marked.extend(migration.log.take());
                differ.is_subset(&marked).then_some(())
            });
            b.expect_numbered(a.mac, round * 100, 40);
            // No frame is lost when logging is turned off, or on.
            migration.end(&mut b);
            migration.log.take();
            converse(&mut a, &mut b, round * 100 + 50, 20);
            assert!(migration.log.take().is_empty(), "the migration was cancelled");
            drop(migration.file);
        }
        switch.stop();
    }
}

/// A guest that cannot announce itself, and a front end that asks for no announcement, as cloud-hypervisor's: whoever sends to the guest finds it where it
/// is, before it has said a word.
#[test]
fn a_guest_that_arrives_is_announced_if_its_address_is_known() {
    for ring in [Features::empty(), Features::RING_PACKED] {
        let place = Place::new();
        let own = mac(2);
        let switch = place.switch(&[
            "a",
            "old",
            &format!("mac,mac={own}"),
            &format!("rule,allowed_macs={own}"),
            "later",
            "none",
        ]);
        switch.set("later", &[&format!("mac={own}")]);
        let mut a = switch.plug("a", 1, Options::default());
        let without = Features::RING_PACKED.difference(ring);
        let options = Options { features: Features::DEVICE - without, ..Options::default() };
        let mut b = switch.plug("old", 2, options);
        acquaint(&mut [&mut a, &mut b]);
        converse(&mut a, &mut b, 0, 10);
        for (port, known) in [("mac", true), ("rule", true), ("later", true), ("none", false)] {
            // As a VMM that migrates does: the port that it leaves must not bring it its own announcement.
            for index in [0, 1] {
                b.connection.frontend().get_vring_base(index).unwrap();
            }
            b.move_to(switch.connect(port));
            switch.until_state(port, PortState::Up);
            if known {
                assert_eq!(a.receive_plain(), rarp_announcement(own), "{port}");
                a.send_numbered(own, 100, 20);
                b.expect_numbered(a.mac, 100, 20);
            }
            // Nothing else was announced: the next frame is the guest's own.
            acquaint(&mut [&mut b, &mut a]);
            converse(&mut a, &mut b, 200, 10);
        }
        // A guest that boots speaks for itself.
        drop(b);
        switch.until_state("none", PortState::Listening);
        let mut c = switch.plug("mac", 2, options);
        acquaint(&mut [&mut c, &mut a]);
        switch.stop();
    }
}

/// A switch that is replaced in the middle of a migration: what its successor writes is in the same log.
#[test]
fn a_successor_goes_on_with_the_log_of_a_migration() {
    for ring in [Features::empty(), Features::RING_PACKED] {
        let place = Place::new();
        let mut switch = place.switch(&["a", "b"]);
        let mut a = switch.plug("a", 1, Options::default());
        let features = Features::DEVICE - Features::RING_PACKED.difference(ring);
        let mut b = switch.plug("b", 2, Options { features, ..Options::default() });
        acquaint(&mut [&mut a, &mut b]);
        let migration = Migration::begin(&mut b);
        for round in 0..3 {
            switch = replaced(&place, switch, |_| ());
            // What starts rings may mark pages of its own.
            migration.log.take();
            let (before, count) = (snapshot(&b), delivered(&switch, "b"));
            a.send_numbered(b.mac, round * 100, 40);
            eventually("forty frames are delivered", || {
                (delivered(&switch, "b") == count + 40).then_some(())
            });
            let differ = changed(&b, &before);
            assert!(differ.len() >= 2, "a ring and buffers: {differ:?}");
            let mut marked = BTreeSet::new();
            eventually("all that differs is marked", || {
                marked.extend(migration.log.take());
                differ.is_subset(&marked).then_some(())
            });
            b.expect_numbered(a.mac, round * 100, 40);
        }
        migration.end(&mut b);
        migration.log.take();
        converse(&mut a, &mut b, 50, 20);
        assert!(migration.log.take().is_empty(), "the migration was cancelled");
        switch.stop();
    }
}
