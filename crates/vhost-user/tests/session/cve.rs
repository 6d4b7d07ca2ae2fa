//! Replays messages that broke other back ends (published CVEs) against a session.

use std::os::fd::AsFd;

use ringferry_memory::SharedMem;
use ringferry_sys::closer::Closer;
use ringferry_sys::eventfd::EventFd;
use ringferry_vhost_user::backend::{RegionState, RingDescription, SessionState};
use ringferry_vhost_user::message::{
    InflightDescription, MemoryRegion, NO_FD, Request, TABLE, VringAddr, VringState,
};
use ringferry_vhost_user::{Offer, ProtocolFeatures, Resources, Session};
use zerocopy::IntoBytes;

use crate::rig::{
    RING_SIZE, Recorder, Rig, USER, copies_of, guest, mem_table, offer, packed_offer, ring_addr, until_gone,
};

#[test]
fn cve_2019_14818_extra_fds_closed_and_repeated_vring_num() {
    let mut rig = Rig::negotiated();
    let event = EventFd::new().unwrap();
    for request in [Request::SetVringKick, Request::SetVringCall, Request::SetVringErr, Request::SetLogFd] {
        for extra in 2..=8 {
            assert!(!rig.event(request, 0, &vec![event.as_fd(); extra]));
        }
    }
    assert_eq!(copies_of(&event), 1);
    assert_eq!(rig.session.counters().unexpected_fds_closed, 4 * (2..=8).sum::<u64>());
    for _ in 0..1000 {
        assert!(rig.state(Request::SetVringNum, 0, 32768));
    }
    assert!(rig.dev.take().is_empty());
}

#[test]
fn cve_2020_10723_vring_index_not_truncated() {
    let mut rig = Rig::negotiated();
    for index in [4, 0x1_0000, 0x1_0001, 0x8000_0000, u32::MAX] {
        let state = VringState { index, num: 1 };
        for request in [Request::SetVringNum, Request::SetVringBase, Request::SetVringEnable] {
            assert!(!rig.ack(request, state.as_bytes(), &[]), "{request} {index:#x}");
        }
        assert!(!rig.ack(Request::SetVringAddr, VringAddr { index, ..ring_addr(0) }.as_bytes(), &[]));
        let mut other = Rig::negotiated();
        other.send(Request::GetVringBase as u32, 1, state.as_bytes(), &[]);
        assert!(other.serve().is_err());
    }
    // The index of an event has 8 bits; the bits above it and the flag are not part of it.
    for payload in [0x200, 0x1_0000, 1 << 32, 1 << 63, u64::MAX] {
        assert!(!rig.event(Request::SetVringKick, payload | NO_FD, &[]), "{payload:#x}");
    }
    assert!(rig.session.rings().all(|ring| ring.size == 0 && !ring.enabled));
    assert!(rig.dev.take().is_empty());
}

#[test]
fn ring_256_is_the_last_and_257_does_not_exist() {
    let mut rig = Rig::with(Offer { max_queues: 257, ..offer() });
    assert_eq!(rig.session.rings().len(), 256);
    rig.tell(Request::SetVringEnable, VringState { index: 255, num: 1 }.as_bytes(), &[]);
    assert_eq!(rig.session.counters().rejected, 0);
    for index in [256, 257] {
        rig.tell(Request::SetVringEnable, VringState { index, num: 1 }.as_bytes(), &[]);
        rig.tell(Request::SetVringNum, VringState { index, num: 256 }.as_bytes(), &[]);
    }
    assert_eq!(rig.session.counters().rejected, 4);
    // As an event's index, 256 is ring 0 without a descriptor, and 255 is the last ring.
    let event = EventFd::new().unwrap();
    rig.tell(Request::SetVringCall, 256u64.as_bytes(), &[event.as_fd()]);
    assert_eq!(rig.session.counters().rejected, 5);
    assert_eq!(copies_of(&event), 1);
    rig.tell(Request::SetVringCall, 255u64.as_bytes(), &[event.as_fd()]);
    assert_eq!(rig.session.counters().rejected, 5);
    assert_eq!(copies_of(&event), 2);
}

#[test]
fn cve_2020_10722_a_log_that_was_not_agreed_on_is_refused_wherever_it_lies() {
    let mut rig = Rig::negotiated();
    let log = SharedMem::new("log", 0x1000).unwrap();
    for [size, offset] in [[0x1000u64, 0], [u64::MAX, u64::MAX], [0x1000, u64::MAX - 0xff]] {
        assert!(!rig.ack(Request::SetLogBase, [size, offset].as_bytes(), &[log.fd()]));
    }
    assert!(!rig.ack(Request::SetLogFd, &[], &[log.fd()]));
    assert_eq!(copies_of(log.fd()), 1);
    assert!(!offer().protocol.contains(ProtocolFeatures::LOG_SHMFD));
}

/// An "inflight description" of this many queues and entries, in 24 bytes.
fn description(mmap_size: u64, mmap_offset: u64, num_queues: u16, queue_size: u16) -> InflightDescription {
    InflightDescription { mmap_size, mmap_offset, num_queues, queue_size, padding: 0 }
}

#[test]
fn cve_2020_10726_repeated_get_inflight_fd_leaks_nothing() {
    let mut rig = Rig::packed();
    let wanted = description(0, 0, 4, 256);
    let mut given = Vec::new();
    for _ in 0..100 {
        rig.send(Request::GetInflightFd as u32, 1, wanted.as_bytes(), &[]);
        rig.serve().unwrap();
        given.extend(rig.reply_with_fds().unwrap().2);
    }
    // What a front end keeps of them is the back end's memory, so it is given few.
    assert_eq!(given.len(), 32);
    // The session has kept none of them, and gives up each it is told to use for the next.
    for file in &given {
        assert_eq!(copies_of(file), 1);
        let description = description(4 * (32 + 32 * 256 + 32), 0, 4, 256);
        assert!(rig.ack(Request::SetInflightFd, description.as_bytes(), &[file.as_fd()]));
        // One is kept, for a hand-over.
        assert_eq!(copies_of(file), 2);
    }
    assert_eq!(given.iter().filter(|file| copies_of(*file) == 2).count(), 1);
    let mapped = std::fs::read_to_string("/proc/self/maps").unwrap();
    let inode = rustix::fs::fstat(&given[0]).unwrap().st_ino.to_string();
    assert!(!mapped.lines().any(|line| line.contains("inflight") && line.contains(&format!(" {inode} "))));
}

#[test]
fn cve_2021_3839_inflight_num_queues_and_sizes_are_checked() {
    let part = 32 + 32 * 256 + 32;
    let mem = SharedMem::new("inflight", 4 * part).unwrap();
    let (part, size) = (part as u64, mem.size() as u64);
    let good = description(4 * part, 0, 4, 256);
    let mut rig = Rig::packed();
    assert!(rig.ack(Request::SetInflightFd, good.as_bytes(), &[mem.fd()]));
    for bad in [
        description(4 * part, 0, 0, 256),
        description(4 * part, 0, 5, 256),
        description(4 * part, 0, u16::MAX, 256),
        description(4 * part, 0, 4, 0),
        description(4 * part, 0, 4, 32769),
        description(4 * part, 0, 4, u16::MAX),
        // Less than the queues need, more than the file has, and sums that overflow.
        description(4 * part - 1, 0, 4, 256),
        description(0, 0, 1, 1),
        description(4 * part, size - 4 * part + 1, 4, 256),
        description(4 * part, u64::MAX - 4 * part, 4, 256),
        description(4 * part, u64::MAX, 4, 256),
        description(u64::MAX, u64::MAX, 4, 256),
        description(u64::MAX, 1 << 40, 4, 256),
    ] {
        assert!(!rig.ack(Request::SetInflightFd, bad.as_bytes(), &[mem.fd()]), "{bad:x?}");
    }
    // That of the good one is kept, for a hand-over.
    assert_eq!(copies_of(mem.fd()), 2);
    for bad in [description(0, 0, 0, 256), description(0, 0, 5, 256), description(0, 0, 1, u16::MAX)] {
        let mut rig = Rig::packed();
        rig.send(Request::GetInflightFd as u32, 1, bad.as_bytes(), &[]);
        assert!(rig.serve().is_err(), "{bad:x?}");
    }
}

#[test]
fn cve_2022_0669_fds_on_messages_that_take_none() {
    let event = EventFd::new().unwrap();
    for row in TABLE.iter().filter(|row| row.fds.1 == 0) {
        let mut rig = Rig::negotiated();
        rig.send(row.request as u32, 1, &vec![0; row.min], &[event.as_fd(); 8]);
        // The session ends where the reply cannot express a refusal; either way nothing stays open.
        let _ = rig.serve();
        assert_eq!(rig.session.counters().unexpected_fds_closed, 8, "{}", row.name);
        assert_eq!(rig.session.counters().rejected, 1, "{}", row.name);
        assert_eq!(copies_of(&event), 1, "{}", row.name);
    }
}

#[test]
fn cve_2018_1059_rings_do_not_run_across_regions() {
    let mut rig = Rig::negotiated();
    let (region, mem) = guest(0x2000);
    let next = MemoryRegion { guest_addr: 0x2000, user_addr: USER + 0x2000, ..region };
    assert!(rig.mem_table(&[(region, &mem), (next, &mem)]));
    assert!(rig.state(Request::SetVringNum, 0, RING_SIZE.into()));
    let across = VringAddr { desc: USER + 0x1800, avail: USER, used: USER + 0x2000, ..ring_addr(0) };
    assert!(rig.ack(Request::SetVringAddr, across.as_bytes(), &[]));
    assert!(!rig.event(Request::SetVringKick, NO_FD, &[]));
    let inside = VringAddr { desc: USER + 0x1000, ..across };
    assert!(rig.ack(Request::SetVringAddr, inside.as_bytes(), &[]));
    assert!(rig.dev.rings.contains_key(&0));
}

/// The same region in another place.
fn apart(region: &RegionState, number: u64) -> RegionState {
    let distance = number << 20;
    let (guest_addr, user_addr) = (region.guest_addr + distance, region.user_addr + distance);
    RegionState { guest_addr, user_addr, ..*region }
}

/// A change of the state that is handed over.
type Change = fn(&mut SessionState);

/// CVE-2013-4149 (a table longer than its room), CVE-2013-4150 (more queues in use than there are) and CVE-2013-4151 (more queues than there can be): a
/// process that goes on with the session of another holds each count, index and length of the state against the same bounds as a message of the front end.
#[test]
fn cve_2013_4149_to_4151_no_count_of_a_state_that_is_handed_over_is_believed() {
    let (region, mem) = guest(0x4_0000);
    let bad: [Change; 19] = [
        |state| state.rings[0].index = 4,
        |state| state.rings[0].index = u16::MAX,
        |state| state.rings.extend((0..300).map(|index| RingDescription { index, ..Default::default() })),
        |state| state.rings[0].size = Some(0),
        |state| state.rings[0].size = Some(32769),
        |state| state.rings[0].size = Some(u16::MAX),
        |state| state.rings[0].addr = Some((0, USER + 1, USER, USER, 0)),
        |state| state.memory = (0..33).map(|number| apart(&state.memory[0], number)).collect(),
        |state| state.memory.push(state.memory[0]),
        |state| state.repeated = vec![state.memory[0]; 100_000],
        |state| state.memory[0].size = u64::MAX,
        |state| state.memory[0].mmap_offset = u64::MAX,
        |state| state.memory[0].file = None,
        |state| state.inflight.as_mut().unwrap().num_queues = 5,
        |state| state.inflight.as_mut().unwrap().queue_size = 32769,
        |state| state.inflight.as_mut().unwrap().mmap_offset = u64::MAX,
        |state| state.received = vec![0; 100_000],
        |state| state.features = Some(u64::MAX),
        |state| state.protocol = u64::MAX,
    ];
    // The state of a session that runs, changed, and what becomes of it.
    let adopted = |change: Change| {
        let mut rig = Rig::packed();
        assert!(rig.mem_table(&[(region, &mem)]));
        let inflight = SharedMem::new("inflight", 4 * (32 + 32 * 256 + 32)).unwrap();
        let known = description(4 * (32 + 32 * 256 + 32), 0, 4, 256);
        assert!(rig.ack(Request::SetInflightFd, known.as_bytes(), &[inflight.fd()]));
        assert!(rig.start(1, 0x8000));
        let mut fds = Vec::new();
        let state = rig.session.state(&mut |fd, _| {
            fds.push(Some(fd.try_clone_to_owned()?));
            Ok(fds.len() as u32 - 1)
        });
        let mut state = state.unwrap();
        change(&mut state);
        // Many a number refers to the same descriptor, so that it fails for nothing but a count.
        let mut take = |number: u32| Some((fds.get(number as usize)?.as_ref()?.try_clone().ok()?, None));
        let resources = Resources { closer: Closer::inline(), ..Resources::default() };
        let adopted = Session::adopt(&state, &mut take, packed_offer(), resources);
        rig.session.let_go();
        adopted
    };
    for (number, change) in bad.into_iter().enumerate() {
        assert!(adopted(change).is_err(), "{number}");
    }
    assert_eq!(copies_of(mem.fd()), 1, "what was refused keeps nothing");
    // Positions come by themselves: fewer than there are rings, more, and some that are in no ring.
    for outside in [0x8100, 0x7fff, u32::MAX] {
        let mut session = adopted(|_| {}).unwrap();
        let mut bases = vec![Some(0x8000); 300];
        bases[1] = Some(outside);
        session.set_positions(&bases);
        let mut dev = Recorder::default();
        session.resume(&mut dev);
        assert!(dev.rings.is_empty(), "a ring that goes on outside itself");
        session.set_positions(&[]);
        session.set_positions(&[None, Some(0x8000)]);
        session.resume(&mut dev);
        assert!(dev.rings.contains_key(&1));
    }
}

#[test]
fn descriptors_of_the_wrong_number_of_regions_are_closed() {
    let mut rig = Rig::negotiated();
    let (region, mem) = guest(0x1000);
    for (claimed, sent) in [(1, 0), (1, 2), (2, 1), (0, 1), (8, 32)] {
        let regions = (0..claimed).map(|at| MemoryRegion { guest_addr: at * 0x1000, ..region });
        let payload = mem_table(regions.collect::<Vec<_>>().into_iter());
        assert!(!rig.ack(Request::SetMemTable, &payload, &vec![mem.fd(); sent]));
    }
    // A count that the payload does not hold.
    let mut payload = mem_table([region].into_iter());
    for count in [2u32, 33, u32::MAX] {
        payload[..4].copy_from_slice(count.as_bytes());
        assert!(!rig.ack(Request::SetMemTable, &payload, &[mem.fd(); 2]));
    }
    assert_eq!(copies_of(mem.fd()), 1);
    assert!(rig.session.memory().is_none());
}

#[test]
fn events_that_could_make_their_user_wait_are_refused() {
    let mut rig = Rig::negotiated();
    let (_reader, writer) = std::io::pipe().unwrap();
    for request in [Request::SetVringKick, Request::SetVringCall, Request::SetVringErr] {
        assert!(!rig.event(request, 0, &[writer.as_fd()]));
    }
    assert_eq!(copies_of(&writer), 2, "both ends of the pipe");
}

#[test]
fn repeated_set_up_and_loss_leaks_nothing() {
    let event = EventFd::new().unwrap();
    let (region, mem) = guest(0x10_0000);
    for _ in 0..20 {
        let mut rig = Rig::negotiated();
        for _ in 0..3 {
            rig.base(1);
            assert!(rig.mem_table(&[(region, &mem)]));
            for request in [Request::SetVringErr, Request::SetVringCall] {
                assert!(rig.event(request, 1, &[event.as_fd()]));
            }
            assert!(rig.start(1, 0));
            assert!(rig.event(Request::SetVringKick, 1, &[event.as_fd()]));
        }
        // Once ours, and the session's and the device's kick, call and error.
        assert_eq!(copies_of(&event), 7);
        drop(rig.peer);
        until_gone(&mut rig.session, &mut rig.dev);
        assert_eq!(copies_of(&event), 1);
        assert_eq!(copies_of(mem.fd()), 1);
    }
}
