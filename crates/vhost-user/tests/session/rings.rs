//! Life of a ring: vhost-user, "Ring states" and "Starting and stopping rings".

use std::os::fd::AsFd;

use ringferry_memory::Words;
use ringferry_ring::Parts;
use ringferry_sys::closer::Closer;
use ringferry_sys::eventfd::{EventFd, EventId};
use ringferry_vhost_user::backend::{Resources, Session};
use ringferry_vhost_user::message::{F_PROTOCOL_FEATURES, F_VERSION_1, NO_FD, Request, VringAddr};
use zerocopy::IntoBytes;

use crate::rig::{
    Event, F_MRG_RXBUF, RING_SIZE, RING_SPAN, Rig, USER, guest, offer, ring_addr, until_gone, view,
};

fn started(index: u16, base: u16, enabled: bool) -> Event {
    Event::Started { index, size: RING_SIZE, base, enabled }
}

fn ready() -> (Rig, (ringferry_vhost_user::message::MemoryRegion, ringferry_memory::SharedMem)) {
    let mut rig = Rig::negotiated();
    let guest = guest(0x4_0000);
    assert!(rig.mem_table(&[(guest.0, &guest.1)]));
    rig.dev.take();
    (rig, guest)
}

#[test]
fn a_ring_starts_on_kick_and_stops_on_get_vring_base() {
    let (mut rig, _guest) = ready();
    assert!(rig.start(0, 7));
    assert_eq!(rig.dev.take(), [started(0, 7, false)]);
    rig.dev.processed = 5;
    assert_eq!(rig.base(0), 12);
    assert_eq!(rig.dev.take(), [Event::Stopped(0)]);
    // Stopped: asking again changes nothing, and only a new kick starts it, where it was.
    assert_eq!(rig.base(0), 12);
    assert!(rig.state(Request::SetVringNum, 0, RING_SIZE.into()));
    assert!(rig.dev.take().is_empty());
    assert!(rig.event(Request::SetVringKick, NO_FD, &[]));
    assert_eq!(rig.dev.take(), [started(0, 12, false)]);
    assert!(rig.dev.rings[&0].kick.is_none());
}

#[test]
fn the_areas_are_those_of_the_front_end() {
    let (mut rig, (region, mem)) = ready();
    let ours = view(region, &mem);
    for (offset, mark) in [(0u64, 1), (0x1000, 2), (0x2000, 3)] {
        ours.user_area(USER + 2 * RING_SPAN + offset, 2).unwrap().store16(0, mark);
    }
    assert!(rig.start(2, 0));
    let ring = &rig.dev.rings[&2];
    let Parts { desc, driver, device, .. } = &ring.parts;
    assert_eq!((desc.load16(0), driver.load16(0), device.load16(0)), (1, 2, 3));
    assert_eq!(ring.features, F_VERSION_1);
}

#[test]
fn events_reach_the_device() {
    let (mut rig, _guest) = ready();
    let [kick, call, err] = [(); 3].map(|()| EventFd::new().unwrap());
    assert!(rig.event(Request::SetVringCall, 1, &[call.as_fd()]));
    assert!(rig.event(Request::SetVringErr, 1, &[err.as_fd()]));
    assert!(rig.start(1, 0));
    assert!(rig.event(Request::SetVringKick, 1, &[kick.as_fd()]));
    kick.signal().unwrap();
    let ring = &rig.dev.rings[&1];
    assert!(ring.kick.as_ref().unwrap().drain().unwrap());
    ring.call.as_ref().unwrap().signal().unwrap();
    assert!(call.drain().unwrap());
    ring.err.as_ref().unwrap().signal().unwrap();
    assert!(err.drain().unwrap());
}

#[test]
fn a_ring_is_disabled_until_enabled_and_may_be_enabled_before_it_starts() {
    let (mut rig, _guest) = ready();
    assert!(rig.state(Request::SetVringEnable, 1, 1));
    assert!(rig.start(0, 0));
    assert!(rig.start(1, 0));
    assert_eq!(rig.dev.take(), [started(0, 0, false), started(1, 0, true)]);
    for _ in 0..3 {
        assert!(rig.state(Request::SetVringEnable, 0, 1));
    }
    assert!(rig.state(Request::SetVringEnable, 0, 0));
    assert_eq!(rig.dev.take(), [Event::Enabled(0, true), Event::Enabled(0, false)]);
    assert!(!rig.state(Request::SetVringEnable, 0, 2));
    // The state outlives a stop.
    rig.base(1);
    assert!(rig.start(1, 0));
    assert_eq!(rig.dev.take(), [Event::Stopped(1), started(1, 0, true)]);
}

#[test]
fn set_features_without_protocol_features_enables_all_rings_and_with_them_none_is_disabled() {
    let (mut rig, _guest) = ready();
    assert!(rig.start(0, 0));
    assert!(rig.ack(Request::SetFeatures, F_VERSION_1.as_bytes(), &[]));
    assert!(rig.session.rings().all(|ring| ring.enabled));
    assert_eq!(rig.dev.take(), [started(0, 0, false), Event::Features(F_VERSION_1), Event::Enabled(0, true)]);
    assert!(rig.ack(Request::SetFeatures, (F_VERSION_1 | F_PROTOCOL_FEATURES).as_bytes(), &[]));
    assert!(rig.session.rings().all(|ring| ring.enabled));
    assert_eq!(rig.dev.take(), [Event::Features(F_VERSION_1)]);
}

#[test]
fn the_kick_may_come_first_and_the_features_last() {
    let mut rig = Rig::new();
    let (region, mem) = guest(0x4_0000);
    let kick = EventFd::new().unwrap();
    rig.tell(Request::SetVringKick, 0u64.as_bytes(), &[kick.as_fd()]);
    rig.tell(Request::SetVringAddr, ring_addr(0).as_bytes(), &[]);
    rig.tell(Request::SetMemTable, &crate::rig::mem_table([region].into_iter()), &[mem.fd()]);
    rig.tell(Request::SetVringNum, [0u32, 256].as_bytes(), &[]);
    assert_eq!(rig.dev.take(), [Event::Memory(1)]);
    rig.tell(Request::SetFeatures, F_VERSION_1.as_bytes(), &[]);
    assert_eq!(rig.dev.take(), [Event::Features(F_VERSION_1), started(0, 0, true)]);
}

#[test]
fn changed_features_restart_running_rings() {
    let (mut rig, _guest) = ready();
    assert!(rig.start(0, 0));
    rig.dev.take();
    rig.dev.processed = 3;
    let features = F_VERSION_1 | F_MRG_RXBUF;
    assert!(rig.ack(Request::SetFeatures, (features | F_PROTOCOL_FEATURES).as_bytes(), &[]));
    assert_eq!(rig.dev.take(), [Event::Stopped(0), Event::Features(features), started(0, 3, false)]);
    assert_eq!(rig.dev.rings[&0].features, features);
}

#[test]
fn a_running_ring_moves_with_its_addresses() {
    let (mut rig, _guest) = ready();
    assert!(rig.start(0, 0));
    rig.dev.take();
    let addr = VringAddr { index: 0, ..ring_addr(9) };
    assert!(rig.ack(Request::SetVringAddr, addr.as_bytes(), &[]));
    assert!(rig.state(Request::SetVringNum, 0, 64));
    let small = Event::Started { index: 0, size: 64, base: 0, enabled: false };
    assert_eq!(rig.dev.take(), [Event::Stopped(0), started(0, 0, false), Event::Stopped(0), small]);
}

#[test]
fn cve_2026_5747_a_running_ring_goes_on_when_its_new_addresses_or_size_are_no_good() {
    let (mut rig, _guest) = ready();
    assert!(rig.start(0, 0));
    rig.dev.take();
    let outside = VringAddr { used: USER + 0x4_0000 - 64, ..ring_addr(0) };
    assert!(!rig.ack(Request::SetVringAddr, outside.as_bytes(), &[]));
    assert!(!rig.state(Request::SetVringNum, 0, 32768));
    assert!(rig.dev.take().is_empty());
    assert!(rig.dev.rings.contains_key(&0));
    assert_eq!(rig.session.counters().rejected, 2);
}

#[test]
fn a_ring_outside_memory_is_refused_and_starts_once_it_is_put_right() {
    let (mut rig, _guest) = ready();
    let outside = VringAddr { desc: USER + 0x4_0000, ..ring_addr(0) };
    assert!(rig.state(Request::SetVringNum, 0, 256));
    assert!(rig.ack(Request::SetVringAddr, outside.as_bytes(), &[]));
    assert!(!rig.event(Request::SetVringKick, NO_FD, &[]));
    assert_eq!(rig.session.counters().failed_starts, 1);
    assert!(rig.dev.take().is_empty());
    assert!(rig.ack(Request::SetVringAddr, ring_addr(0).as_bytes(), &[]));
    assert_eq!(rig.dev.take(), [started(0, 0, false)]);
}

#[test]
fn the_call_event_changes_under_a_running_ring_without_stopping_it() {
    let (mut rig, _guest) = ready();
    assert!(rig.start(0, 0));
    rig.dev.take();
    let call = EventFd::new().unwrap();
    assert!(rig.event(Request::SetVringCall, 0, &[call.as_fd()]));
    assert!(rig.event(Request::SetVringCall, NO_FD, &[]));
    let changed = |polled| Event::Call { index: 0, polled };
    assert_eq!(rig.dev.take(), [changed(false), changed(true)]);
}

#[test]
fn a_repeated_kick_starts_the_ring_anew_where_it_was() {
    let (mut rig, _guest) = ready();
    assert!(rig.start(0, 1));
    rig.dev.take();
    rig.dev.processed = 1;
    assert!(rig.event(Request::SetVringKick, NO_FD, &[]));
    assert_eq!(rig.dev.take(), [Event::Stopped(0), started(0, 2, false)]);
}

#[test]
fn the_base_of_a_running_ring_is_not_moved() {
    let (mut rig, _guest) = ready();
    assert!(!rig.state(Request::SetVringBase, 0, 0x1_0000));
    assert!(rig.start(0, 0xffff));
    rig.dev.processed = 1;
    assert!(!rig.state(Request::SetVringBase, 0, 3));
    assert_eq!(rig.base(0), 0);
}

#[test]
fn reset_device_keeps_the_connection_and_the_memory_only() {
    let (mut rig, _guest) = ready();
    assert!(rig.start(0, 9));
    assert!(rig.state(Request::SetVringEnable, 0, 1));
    assert!(rig.ack(Request::SetStatus, 15u64.as_bytes(), &[]));
    rig.dev.take();
    assert!(rig.ack(Request::ResetDevice, &[], &[]));
    assert_eq!(rig.dev.take(), [Event::Stopped(0), Event::Reset]);
    assert_eq!(rig.ask_u64(Request::GetStatus), 0);
    assert_eq!(rig.session.features(), None);
    assert!(rig.session.memory().is_some());
    assert!(
        rig.session.rings().all(|ring| !ring.enabled && !ring.started && ring.size == 0 && ring.base == 0)
    );
    // Ready to be set up again.
    assert!(rig.ack(Request::SetFeatures, (F_VERSION_1 | F_PROTOCOL_FEATURES).as_bytes(), &[]));
    assert!(rig.start(0, 0));
    assert_eq!(rig.dev.take(), [Event::Features(F_VERSION_1), started(0, 0, false)]);
}

#[test]
fn status_zero_stops_rings_until_the_next_kick() {
    let (mut rig, _guest) = ready();
    assert!(rig.start(0, 0));
    rig.dev.take();
    rig.dev.processed = 4;
    assert!(rig.ack(Request::SetStatus, 0u64.as_bytes(), &[]));
    assert_eq!(rig.dev.take(), [Event::Stopped(0), Event::Status(0)]);
    assert_eq!(rig.base(0), 4);
    assert!(rig.ack(Request::SetVringAddr, ring_addr(0).as_bytes(), &[]));
    assert!(rig.dev.take().is_empty());
    assert!(rig.event(Request::SetVringKick, NO_FD, &[]));
    assert_eq!(rig.dev.take(), [started(0, 4, false)]);
}

#[test]
fn a_front_end_that_goes_away_stops_its_rings_and_gives_memory_back() {
    let (mut rig, _guest) = ready();
    assert!(rig.start(0, 0));
    assert!(rig.start(3, 0));
    rig.dev.take();
    let Rig { peer, mut session, mut dev } = rig;
    drop(peer);
    assert!(until_gone(&mut session, &mut dev).is_disconnect());
    assert_eq!(dev.take(), [Event::Stopped(0), Event::Stopped(3), Event::Memory(0)]);
    assert!(session.on_readable(&mut dev).unwrap_err().is_disconnect());
    session.disconnect(&mut dev);
    assert!(dev.take().is_empty());
}

#[test]
fn reset_owner_has_no_effect() {
    let (mut rig, _guest) = ready();
    assert!(rig.start(0, 0));
    rig.dev.take();
    assert!(rig.ack(Request::SetOwner, &[], &[]));
    assert!(rig.ack(Request::ResetOwner, &[], &[]));
    assert!(rig.dev.take().is_empty());
}

/// Returns the descriptors that another process would be handed, with their marks, and adopts what that would; without the marks if it is told none.
fn adopted(rig: &Rig, with_marks: bool) -> (Vec<EventId>, Session) {
    let mut fds = Vec::new();
    let state = rig.session.state(&mut |fd, id| {
        fds.push((fd.try_clone_to_owned()?, id));
        Ok(fds.len() as u32 - 1)
    });
    let marks = fds.iter().filter_map(|(_, id)| *id).collect();
    let mut take = |number: u32| {
        let (fd, id) = &fds[number as usize];
        Some((fd.try_clone().ok()?, id.filter(|_| with_marks)))
    };
    let resources = Resources { closer: Closer::inline(), ..Resources::default() };
    let mut session = Session::adopt(&state.unwrap(), &mut take, offer(), resources).unwrap();
    session.let_go();
    (marks, session)
}

/// Whoever keeps the events of a session has each open file once: one that comes again, for another ring or in place of itself, is known.
#[test]
fn an_event_that_comes_again_has_the_mark_of_before() {
    let (mut rig, _guest) = ready();
    let [one, other] = [(); 2].map(|()| EventFd::new().unwrap());
    assert!(rig.event(Request::SetVringCall, 0, &[one.as_fd()]));
    assert!(rig.event(Request::SetVringCall, 1, &[other.as_fd()]));
    assert!(rig.event(Request::SetVringCall, 2, &[one.as_fd()]));
    assert!(rig.event(Request::SetVringErr, 1, &[other.as_fd()]));
    assert!(rig.event(Request::SetVringKick, 3, &[one.as_fd()]));
    let (marks, session) = adopted(&rig, true);
    let (a, b) = (marks[0], marks[1]);
    assert!(marks == [a, b, b, a, a] && a != b, "{marks:?}");
    assert!(rig.event(Request::SetVringCall, 0, &[one.as_fd()]));
    assert_eq!(adopted(&rig, true).0, marks);
    // Another process goes on with them, or, if it is told none, has its own.
    let same = |marks: &[EventId]| marks.iter().map(|mark| *mark == marks[0]).collect::<Vec<_>>();
    let mut successor = Rig { session, ..Rig::negotiated() };
    assert_eq!(adopted(&successor, true).0, marks);
    successor.session = adopted(&rig, false).1;
    let (others, mut session) = adopted(&successor, true);
    assert!(same(&others) == same(&marks) && others.iter().all(|mark| !marks.contains(mark)), "{others:?}");
    // The connections are those of one session.
    session.let_go();
    successor.session.let_go();
}
