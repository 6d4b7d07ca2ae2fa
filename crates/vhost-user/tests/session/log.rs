//! The dirty log of a live migration: the messages of QEMU and of cloud-hypervisor, in their order, and what becomes of a log that
//! comes late or cannot be mapped.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use ringferry_memory::{DirtyLog, MapBudget, SharedMem};
use ringferry_sys::closer::Closer;
use ringferry_sys::eventfd::EventFd;
use ringferry_vhost_user::message::{
    F_LOG_ALL, F_RING_PACKED, F_VERSION_1, FLAG_NEED_REPLY, LogBase, Request, VERSION, VringAddr, VringState,
};
use ringferry_vhost_user::{Offer, Resources, Session};
use zerocopy::IntoBytes;

use crate::rig::{Event, RING_SIZE, Rig, copies_of, guest, offer, ring_addr};

/// As much of guest memory as the rings of two pairs take.
const GUEST: usize = 0x1_0000;
/// QEMU's size for it.
const LOG: usize = 8;

fn log_file() -> SharedMem {
    SharedMem::new("log", LOG).unwrap()
}

/// Passes a log, and checks that the reply is the one that every front end takes: the request's own payload.
#[track_caller]
fn set_log_base(rig: &mut Rig, place: LogBase, fd: BorrowedFd<'_>, flags: u32) {
    rig.send(Request::SetLogBase as u32, VERSION | flags, place.as_bytes(), &[fd]);
    rig.serve().unwrap();
    let (header, payload) = rig.reply().expect("an answer");
    assert_eq!((header.request, payload.as_slice()), (Request::SetLogBase as u32, place.as_bytes()));
    assert!(rig.reply().is_none(), "answered twice");
}

fn pass_log(rig: &mut Rig, file: &SharedMem) {
    set_log_base(rig, LogBase { size: LOG as u64, offset: 0 }, file.fd(), 0);
}

fn addr(index: u32, flags: u32) -> VringAddr {
    VringAddr { flags, ..ring_addr(index) }
}

fn flag(rig: &mut Rig, index: u32, flags: u32) {
    assert!(rig.ack(Request::SetVringAddr, addr(index, flags).as_bytes(), &[]));
}

/// Marks a byte in the log that a ring has, and returns the pages that the front end finds in its file.
fn marked(rig: &Rig, index: u16, file: &SharedMem) -> Vec<u64> {
    if let Some(log) = &rig.dev.rings[&index].log {
        log.mark(0x3000 + u64::from(index) * 0x1000, 1);
    }
    DirtyLog::map_within(file.fd(), LOG as u64, 0, &MapBudget::unlimited()).unwrap().take()
}

/// A rig with two pairs that run.
fn running(packed: bool) -> (Rig, u64) {
    let mut rig = Rig::logging(packed);
    let (region, mem) = guest(GUEST);
    assert!(rig.mem_table(&[(region, &mem)]));
    for index in 0..4 {
        assert!(rig.start(index, 0));
    }
    rig.dev.take();
    (rig, F_VERSION_1 | if packed { F_RING_PACKED } else { 0 })
}

/// Turns logging on as QEMU 7.2 does with two pairs: everything once for each pair.
fn qemu_begins(rig: &mut Rig, features: u64, file: &SharedMem) {
    for pair in [0, 1] {
        pass_log(rig, file);
        assert!(rig.features(features | F_LOG_ALL));
        for ring in [2 * pair, 2 * pair + 1] {
            flag(rig, ring, 1);
        }
    }
}

/// Turns it off as QEMU does when a migration is cancelled: the last pair first.
fn qemu_cancels(rig: &mut Rig, features: u64) {
    for pair in [1, 0] {
        assert!(rig.features(features));
        for ring in [2 * pair, 2 * pair + 1] {
            flag(rig, ring, 0);
        }
    }
}

#[test]
fn qemu_migrates_and_cancels_while_rings_run_and_none_is_stopped() {
    for packed in [false, true] {
        let (mut rig, features) = running(packed);
        for _ in 0..3 {
            let file = log_file();
            qemu_begins(&mut rig, features, &file);
            let events = rig.dev.take();
            let stops = |event: &Event| matches!(event, Event::Stopped(_) | Event::Started { .. });
            assert!(!events.iter().any(stops), "{events:?}");
            assert!(events.contains(&Event::Logged { rings: 4, log: true }));
            // The device sees no bit that is none of the driver's.
            assert!(events.iter().all(|event| !matches!(event, Event::Features(bits) if *bits != features)));
            for ring in 0..4u16 {
                assert_eq!(marked(&rig, ring, &file), [3 + u64::from(ring)]);
            }
            qemu_cancels(&mut rig, features);
            let events = rig.dev.take();
            assert!(!events.iter().any(stops), "{events:?}");
            assert!(events.contains(&Event::Logged { rings: 4, log: false }));
            assert!(rig.dev.rings.values().all(|ring| ring.log.is_none()));
            assert!(rig.session.dirty_log().is_none());
            // Nothing is held of a migration that is over, as QEMU frees the file.
            assert!(marked(&rig, 0, &file).is_empty());
        }
        assert_eq!(rig.session.counters().rejected, 0);
    }
}

#[test]
fn a_migration_that_succeeds_ends_with_the_bases_of_all_rings() {
    let (mut rig, features) = running(false);
    let file = log_file();
    qemu_begins(&mut rig, features, &file);
    rig.dev.processed = 9;
    // QEMU 7.2 resets the status amid the stops.
    assert_eq!([rig.base(0), rig.base(1)], [9, 9]);
    rig.tell(Request::SetStatus, 0u64.as_bytes(), &[]);
    assert_eq!([rig.base(2), rig.base(3)], [9, 9]);
    assert!(rig.dev.rings.is_empty());
    assert_eq!(copies_of(file.fd()), 1);
}

#[test]
fn cloud_hypervisor_passes_a_new_log_in_each_iteration() {
    let (mut rig, features) = running(false);
    let files = [log_file(), log_file()];
    set_log_base(&mut rig, LogBase { size: 3, offset: 0 }, files[0].fd(), FLAG_NEED_REPLY);
    assert!(rig.features(features | F_LOG_ALL));
    for ring in 0..4 {
        flag(&mut rig, ring, 1);
    }
    assert_eq!(marked(&rig, 2, &files[0]), [5]);
    // Once it is answered nothing is written to the old one any more.
    set_log_base(&mut rig, LogBase { size: 3, offset: 0 }, files[1].fd(), FLAG_NEED_REPLY);
    assert!(marked(&rig, 2, &files[0]).is_empty());
    assert_eq!(marked(&rig, 2, &files[1]), [5]);
    assert_eq!(rig.dev.take().iter().filter(|event| matches!(event, Event::Logged { .. })).count(), 2);
}

#[test]
fn rings_that_start_while_the_guest_migrates_wait_for_the_log() {
    let mut rig = Rig::logging(false);
    assert!(rig.features(F_VERSION_1 | F_LOG_ALL));
    let (region, mem) = guest(GUEST);
    assert!(rig.mem_table(&[(region, &mem)]));
    let event = EventFd::new().unwrap();
    let start = |rig: &mut Rig, index: u32| {
        assert!(rig.state(Request::SetVringNum, index, RING_SIZE.into()));
        assert!(rig.state(Request::SetVringBase, index, 0));
        flag(rig, index, 1);
        assert!(rig.event(Request::SetVringKick, index.into(), &[event.as_fd()]));
    };
    let file = log_file();
    for round in 0..2 {
        start(&mut rig, 0);
        start(&mut rig, 1);
        assert!(rig.dev.rings.is_empty(), "nothing that they write would be logged, round {round}");
        assert!(rig.session.unlogged().is_some());
        pass_log(&mut rig, &file);
        assert_eq!((marked(&rig, 0, &file), marked(&rig, 1, &file)), (vec![3], vec![4]));
        // The guest reboots: QEMU frees the log and passes it again when the rings have started.
        assert_eq!([rig.base(0), rig.base(1)], [0, 0]);
        assert_eq!(
            rig.session.unlogged(),
            None,
            "a ring that is stopped waits for no log, as at a port that a guest has left"
        );
    }
    // One that did not ask for a log is not held.
    start(&mut rig, 0);
    flag(&mut rig, 0, 0);
    assert!(rig.dev.rings[&0].log.is_none());
    start(&mut rig, 1);
    assert!(!rig.dev.rings.contains_key(&1));
    assert!(rig.features(F_VERSION_1));
    assert_eq!(rig.dev.rings.len(), 2);
}

#[test]
fn without_a_usable_log_rings_are_held_until_the_migration_is_over() {
    let resources = Resources {
        closer: Closer::inline(),
        memory: MapBudget::new(GUEST as u64 + 0x1000, "port_memory_gib"),
        ..Resources::default()
    };
    let pipe = std::io::pipe().unwrap();
    let large = SharedMem::new("large", 0x2000).unwrap();
    let small = log_file();
    let bad = [
        (LogBase { size: 0x2000, offset: 0 }, large.fd()),
        (LogBase { size: 0x2000, offset: 0 }, small.fd()),
        (LogBase { size: u64::MAX, offset: u64::MAX }, small.fd()),
        (LogBase { size: 8, offset: u64::MAX - 7 }, small.fd()),
        (LogBase { size: 0, offset: 0 }, small.fd()),
        (LogBase { size: 8, offset: 0 }, pipe.0.as_fd()),
    ];
    let mut rig = Rig::with_resources(offer().with_dirty_log(), resources);
    rig.tell(Request::SetProtocolFeatures, offer().with_dirty_log().protocol.bits().as_bytes(), &[]);
    assert!(rig.features(F_VERSION_1));
    let (region, mem) = guest(GUEST);
    assert!(rig.mem_table(&[(region, &mem)]));
    assert!(rig.start(0, 0) && rig.start(1, 0));
    for (place, fd) in bad {
        // Neither may be refused: QEMU loses pages in silence, or aborts.
        set_log_base(&mut rig, place, fd, 0);
        assert_eq!(rig.dev.rings.len(), 2, "logging is not on yet");
        assert!(rig.features(F_VERSION_1 | F_LOG_ALL));
        assert!(rig.dev.rings.is_empty() && rig.session.unlogged().is_some(), "{place:?}");
        assert_eq!(rig.session.rings().next().unwrap().base, 0);
        assert!(rig.features(F_VERSION_1));
        assert_eq!(rig.dev.rings.len(), 2);
        assert!(rig.session.unlogged().is_none());
        // A log that can be mapped ends it, too.
        set_log_base(&mut rig, place, fd, 0);
        assert!(rig.features(F_VERSION_1 | F_LOG_ALL));
        pass_log(&mut rig, &small);
        assert_eq!(marked(&rig, 1, &small), [4]);
        assert!(rig.features(F_VERSION_1));
    }
    assert_eq!(rig.session.counters().rejected, 0);
    assert_eq!(copies_of(small.fd()), 1);
}

#[test]
fn a_device_that_cannot_change_logs_gets_its_rings_anew() {
    let (mut rig, features) = running(true);
    rig.dev.restarts_for_logs = true;
    rig.dev.processed = 5;
    let file = log_file();
    qemu_begins(&mut rig, features, &file);
    assert_eq!(rig.dev.take().iter().filter(|event| matches!(event, Event::Stopped(_))).count(), 8);
    assert_eq!(marked(&rig, 3, &file), [6]);
    qemu_cancels(&mut rig, features);
    assert!(rig.dev.rings.values().all(|ring| ring.log.is_none()));
}

#[test]
fn memory_that_is_plugged_in_meanwhile_is_logged() {
    let (mut rig, features) = running(false);
    let file = log_file();
    qemu_begins(&mut rig, features, &file);
    let (mut region, mem) = guest(GUEST);
    region.guest_addr = GUEST as u64;
    region.user_addr += GUEST as u64;
    assert!(rig.slot(Request::AddMemReg, region, &[mem.fd()]));
    assert_eq!(marked(&rig, 0, &file), [3]);
}

#[test]
fn the_log_event_is_taken_and_closed() {
    let mut rig = Rig::logging(false);
    let event = EventFd::new().unwrap();
    rig.tell(Request::SetLogFd, &[], &[event.as_fd()]);
    assert!(rig.ack(Request::SetLogFd, &[], &[]));
    assert_eq!(copies_of(&event), 1);
}

#[test]
fn a_reset_forgets_the_log() {
    let (mut rig, features) = running(false);
    let file = log_file();
    qemu_begins(&mut rig, features, &file);
    assert!(rig.ack(Request::ResetDevice, &[], &[]));
    assert!(rig.session.dirty_log().is_none());
    assert!(rig.features(features | F_LOG_ALL));
    assert!(rig.session.dirty_log().is_none());
}

/// The halves of [`RingSetup::ring`](ringferry_vhost_user::RingSetup::ring) mark where they write, whatever `log_guest_addr` says.
#[test]
fn a_ring_of_a_setup_marks_its_own_pages() {
    for packed in [false, true] {
        let (mut rig, features) = running(packed);
        let file = log_file();
        pass_log(&mut rig, &file);
        assert!(rig.features(features | F_LOG_ALL));
        let setup = &rig.dev.rings[&1];
        let mut ring = setup.ring().unwrap();
        ring.enable_kicks();
        let log = DirtyLog::map_within(file.fd(), LOG as u64, 0, &MapBudget::unlimited()).unwrap();
        // The used ring, or the device event suppression structure, of ring 1.
        assert_eq!(log.take(), [4 + 2]);
        drop(ring);
        let state = VringState { index: 1, num: 0 };
        rig.send(Request::GetVringBase as u32, VERSION, state.as_bytes(), &[]);
        rig.serve().unwrap();
        assert!(Arc::strong_count(rig.session.dirty_log().unwrap()) > 1, "other rings have it");
    }
}

#[test]
fn what_is_needed_for_a_migration_is_offered_only_if_asked_for() {
    let plain = Offer::net(F_VERSION_1, 1);
    assert_eq!(plain.features & F_LOG_ALL, 0);
    let (_peer, ours) = ringferry_sys::socket::Stream::pair().unwrap();
    assert!(Session::new(ours, plain).unwrap().dirty_log().is_none());
    let logged = plain.with_dirty_log();
    assert_eq!(logged.features, F_VERSION_1 | F_LOG_ALL);
}
