//! What one call of a session may do, so that no front end occupies the loop that serves them all.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ringferry_memory::GuestMemory;
use ringferry_sys::eventfd::EventFd;
use ringferry_vhost_user::message::{Request, VERSION, VringState};
use ringferry_vhost_user::{Device, RingSetup, SessionError, Unanswered};
use zerocopy::IntoBytes;

use crate::rig::{Event, Rig, guest, mem_table};

/// A rig with two running rings, and its memory.
fn running() -> (Rig, ringferry_vhost_user::message::MemoryRegion, ringferry_memory::SharedMem) {
    let mut rig = Rig::negotiated();
    let (region, mem) = guest(0x10000);
    assert!(rig.mem_table(&[(region, &mem)]));
    assert!(rig.start(0, 0) && rig.start(1, 0));
    rig.dev.take();
    (rig, region, mem)
}

#[test]
fn h5_a_turn_ends_with_the_message_that_has_stopped_rings() {
    let (mut rig, region, mem) = running();
    let table = mem_table([region].into_iter());
    for _ in 0..3 {
        rig.send(Request::SetMemTable as u32, VERSION, &table, &[mem.fd()]);
    }
    rig.send(Request::SetOwner as u32, VERSION, &[], &[]);
    for _ in 0..3 {
        let progress = rig.serve().unwrap();
        assert_eq!((progress.messages, progress.disturbed, progress.more), (1, true, true));
    }
    let progress = rig.serve().unwrap();
    assert_eq!((progress.messages, progress.disturbed, progress.more), (1, false, false));
    // The same for each message that calls the device for a ring that runs.
    let kick = EventFd::new().unwrap();
    let state = |index, num| VringState { index, num }.as_bytes().to_vec();
    for (request, payload, fds) in [
        (Request::SetVringEnable, state(0, 1), vec![]),
        (Request::SetVringKick, 0u64.as_bytes().to_vec(), vec![kick.as_fd()]),
        (Request::SetVringErr, 0u64.as_bytes().to_vec(), vec![kick.as_fd()]),
        (Request::SetStatus, 0u64.as_bytes().to_vec(), vec![]),
    ] {
        rig.send(request as u32, VERSION, &payload, &fds);
        rig.send(Request::SetOwner as u32, VERSION, &[], &[]);
        assert!(rig.serve().unwrap().disturbed, "{request}");
        assert!(!rig.serve().unwrap().disturbed);
    }
}

/// A device that takes longer than a turn for an announcement.
struct Slow(u32);

impl Device for Slow {
    fn ring_started(&mut self, _: u16, _: RingSetup) {}

    fn ring_call_changed(&mut self, _: u16, _: Option<EventFd>) {}

    fn ring_enabled(&mut self, _: u16, _: bool) {}

    fn ring_stopped(&mut self, _: u16) -> u16 {
        0
    }

    fn announce(&mut self, _: [u8; 6]) {
        self.0 += 1;
        let began = Instant::now();
        while began.elapsed() < Duration::from_millis(2) {
            std::thread::yield_now();
        }
    }
}

#[test]
fn h5_a_turn_ends_with_its_time() {
    let mut rig = Rig::negotiated();
    for _ in 0..5 {
        rig.send(Request::SendRarp as u32, VERSION, &[0; 8], &[]);
    }
    let mut slow = Slow(0);
    for served in 1..=5 {
        let progress = rig.session.on_readable(&mut slow).unwrap();
        assert_eq!((progress.messages, progress.more, slow.0), (1, true, served));
    }
    assert_eq!(rig.session.on_readable(&mut slow).unwrap().messages, 0);
}

/// A device with rings that something serves which does not answer any more.
#[derive(Default)]
struct Stuck {
    stops: Vec<Vec<u16>>,
    starts: usize,
    memory: Vec<bool>,
}

impl Device for Stuck {
    fn ring_started(&mut self, _: u16, _: RingSetup) {
        self.starts += 1;
    }

    fn ring_call_changed(&mut self, _: u16, _: Option<EventFd>) {}

    fn ring_enabled(&mut self, _: u16, _: bool) {}

    fn ring_stopped(&mut self, _: u16) -> u16 {
        unreachable!("all are stopped at once")
    }

    fn rings_stopped(&mut self, rings: &[u16]) -> Result<Vec<u16>, Unanswered> {
        self.stops.push(rings.to_vec());
        Err(Unanswered("the worker is busy".to_owned()))
    }

    fn memory_changed(&mut self, memory: Option<Arc<GuestMemory>>) {
        self.memory.push(memory.is_some());
    }
}

#[test]
fn h5_rings_that_do_not_stop_end_the_session_without_an_answer() {
    let (mut rig, region, mem) = running();
    rig.send(
        Request::SetMemTable as u32,
        VERSION | ringferry_vhost_user::message::FLAG_NEED_REPLY,
        &mem_table([region].into_iter()),
        &[mem.fd()],
    );
    let mut stuck = Stuck::default();
    let error = rig.session.on_readable(&mut stuck).unwrap_err();
    assert!(matches!(error, SessionError::Unanswered(_)), "{error}");
    assert_eq!(error.to_string(), "the worker is busy");
    // It is asked once, for all rings, and starts nothing.
    assert_eq!((stuck.stops, stuck.starts), (vec![vec![0, 1]], 0));
    assert_eq!(stuck.memory.last(), Some(&false));
    assert!(rig.reply().is_none());
    // A single ring is no exception: nobody is told that it has stopped.
    let (mut rig, ..) = running();
    let state = VringState { index: 1, num: 0 };
    rig.send(Request::GetVringBase as u32, VERSION, state.as_bytes(), &[]);
    assert!(rig.session.on_readable(&mut Stuck::default()).is_err());
    assert!(rig.reply().is_none());
    assert!(!rig.dev.take().contains(&Event::Stopped(1)));
}
