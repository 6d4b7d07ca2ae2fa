//! "Inflight I/O tracking": the region is requested, handed over and handed back, and a packed ring
//! resumes from it.

use std::os::fd::{AsFd, OwnedFd};

use ringferry_memory::{GuestMemory, Region, RegionSpec, SharedMem, Words};
use ringferry_ring::inflight::POSITION;
use ringferry_sys::closer::Closer;
use ringferry_vhost_user::message::{
    F_RING_PACKED, F_VERSION_1, InflightDescription, MemoryRegion, NO_FD, Request, VringAddr,
};
use ringferry_vhost_user::{Resources, Session};
use zerocopy::{FromBytes, IntoBytes};

use crate::rig::{Event, Recorder, Rig, USER, copies_of, guest, packed_offer, position_word, view};

const SIZE: u16 = 100;
/// Bytes from one part to the next: a multiple of 64.
const PART: u64 = 3264;

/// A packed ring with room for its neighbours.
fn addr(index: u32) -> VringAddr {
    let start = USER + u64::from(index) * 0x1000;
    VringAddr { index, flags: 0, desc: start, avail: start + 0x800, used: start + 0x804, log: 0 }
}

fn started(index: u16, base: u16) -> Event {
    Event::Started { index, size: SIZE, base, enabled: false }
}

/// Connects a front end, with the memory it has kept.
fn connect(memory: &(MemoryRegion, SharedMem)) -> Rig {
    let mut rig = Rig::packed();
    assert!(rig.mem_table(&[(memory.0, &memory.1)]));
    rig.dev.take();
    rig
}

fn start(rig: &mut Rig, index: u32, base: u32) -> bool {
    rig.state(Request::SetVringNum, index, SIZE.into())
        && rig.state(Request::SetVringBase, index, base)
        && rig.ack(Request::SetVringAddr, addr(index).as_bytes(), &[])
        && rig.event(Request::SetVringKick, u64::from(index) | NO_FD, &[])
}

fn get(rig: &mut Rig, num_queues: u16, queue_size: u16, len: usize) -> (InflightDescription, OwnedFd) {
    let wanted = InflightDescription { num_queues, queue_size, ..InflightDescription::default() };
    rig.send(Request::GetInflightFd as u32, 1, &wanted.as_bytes()[..len], &[]);
    rig.serve().unwrap();
    let (_, payload, mut fds) = rig.reply_with_fds().unwrap();
    assert_eq!((payload.len(), fds.len()), (len, 1));
    let mut bytes = [0; 24];
    bytes[..len].copy_from_slice(&payload);
    (InflightDescription::read_from_bytes(&bytes).unwrap(), fds.remove(0))
}

fn set(rig: &mut Rig, (description, fd): &(InflightDescription, OwnedFd)) -> bool {
    rig.ack(Request::SetInflightFd, description.as_bytes(), &[fd.as_fd()])
}

/// The front end's own view of the region.
fn look((description, fd): &(InflightDescription, OwnedFd)) -> GuestMemory {
    let InflightDescription { mmap_size, mmap_offset, .. } = *description;
    let spec = RegionSpec { guest_addr: 0, size: mmap_size, user_addr: 0, mmap_offset };
    GuestMemory::new(vec![Region::map(fd.as_fd(), spec).unwrap()]).unwrap()
}

/// Writes the flags of a ring's descriptor: available in this lap, or used.
fn flag(memory: &(MemoryRegion, SharedMem), index: u32, at: u64, wrap: bool, used: bool) {
    let flags = if used {
        if wrap { 0x8080 } else { 0 }
    } else if wrap {
        0x80
    } else {
        0x8000
    };
    view(memory.0, &memory.1).user_area(addr(index).desc + 16 * at + 14, 2).unwrap().store16(0, flags);
}

#[test]
fn the_region_has_the_size_of_the_layout_and_comes_zeroed_and_sealed() {
    for (features, bytes) in [(1 << 32, 4 * 1664), (1 << 32 | 1 << 34, 4 * PART)] {
        // Peers send 20 or 24 bytes, and get as many.
        for len in [20, 24] {
            let mut rig = Rig::packed();
            assert!(rig.features(features));
            let size = if features >> 34 == 0 { 64 } else { SIZE };
            let bytes = if size == 64 { 4 * (16 + 16 * 64 + 48) } else { bytes };
            let (description, fd) = get(&mut rig, 4, size, len);
            let expected =
                InflightDescription { mmap_size: bytes, num_queues: 4, queue_size: size, ..description };
            assert_eq!(description, expected);
            assert_eq!(description.mmap_offset, 0);
            assert!(rustix::fs::fstat(&fd).unwrap().st_size as u64 >= bytes);
            assert!(rustix::fs::ftruncate(&fd, 0).is_err(), "sealed");
            let view = look(&(description, fd));
            let area = view.area(0, bytes as usize).unwrap();
            assert!((0..bytes as usize / 8).all(|word| area.load64(8 * word) == 0));
        }
    }
}

#[test]
fn before_features_the_region_is_large_enough_for_either_layout() {
    let mut rig = Rig::with(packed_offer());
    rig.tell(Request::SetProtocolFeatures, packed_offer().protocol.bits().as_bytes(), &[]);
    let region = get(&mut rig, 2, SIZE, 24);
    assert_eq!(region.0.mmap_size, 2 * PART);
    assert!(set(&mut rig, &region));
}

#[test]
fn a_packed_ring_gets_its_part_ready_to_be_written() {
    let memory = guest(0x4_0000);
    let mut rig = connect(&memory);
    let region = get(&mut rig, 2, SIZE, 24);
    assert!(set(&mut rig, &region));
    for (index, base) in [(0, 0x8000), (1, 0x8005_8005)] {
        assert!(start(&mut rig, index, base));
    }
    // A third ring has no part, and runs without.
    assert!(start(&mut rig, 2, 0x8000));
    assert!(rig.dev.rings[&2].inflight.is_none());
    assert_eq!(rig.dev.take(), [started(0, 0x8000), started(1, 0x8005), started(2, 0x8000)]);
    let view = look(&region);
    for (index, base) in [(0, 0x8000), (1, 0x8005)] {
        let part = view.area(index * PART, 64).unwrap();
        assert_eq!((part.load64(0), part.load16(8), part.load16(10)), (0, 1, SIZE));
        assert_eq!(part.load64(POSITION), position_word(base, base));
        // The device's writes are visible in the region that the front end keeps.
        rig.dev.rings[&(index as u16)].inflight.as_ref().unwrap().store64(POSITION, 77 << 32 | 77);
        assert_eq!(part.load64(POSITION), 77 << 32 | 77);
    }
}

#[test]
fn a_split_ring_needs_nothing_of_the_region() {
    let memory = guest(0x4_0000);
    let mut rig = Rig::packed();
    assert!(rig.features(1 << 32));
    assert!(rig.mem_table(&[(memory.0, &memory.1)]));
    let region = get(&mut rig, 4, 256, 24);
    assert!(set(&mut rig, &region));
    assert!(rig.start(0, 7));
    assert!(rig.dev.rings[&0].inflight.is_none());
    assert_eq!(look(&region).area(0, 64).unwrap().load64(8), 0);
}

#[test]
fn a_ring_resumes_after_a_crash_where_the_region_says() {
    let memory = guest(0x4_0000);
    let mut rig = connect(&memory);
    let region = get(&mut rig, 2, SIZE, 24);
    assert!(set(&mut rig, &region));
    assert!(start(&mut rig, 0, 0x8000) && start(&mut rig, 1, 0x8000));
    let write = |rig: &Rig, index: u16, new, old| {
        rig.dev.rings[&index].inflight.as_ref().unwrap().store64(POSITION, position_word(new, old));
    };
    // Killed before it published a burst across the end, and after.
    write(&rig, 0, 0x0010, 0x805f);
    flag(&memory, 0, 0x5f, true, false);
    write(&rig, 1, 0x0010, 0x805f);
    flag(&memory, 1, 0x5f, true, true);
    drop(rig);

    let mut rig = connect(&memory);
    assert!(set(&mut rig, &region));
    // The front end cannot know better: QEMU sends 0, others the beginning.
    assert!(start(&mut rig, 0, 0) && start(&mut rig, 1, 0x8000_8000));
    assert_eq!(rig.dev.take(), [started(0, 0x805f), started(1, 0x0010)]);
    // Once it runs, the session knows.
    rig.dev.processed = 3;
    assert!(rig.mem_table(&[(memory.0, &memory.1)]));
    let events = rig.dev.take();
    assert!(events.contains(&started(0, 0x8062)) && events.contains(&started(1, 0x0013)));
    assert_eq!(look(&region).area(0, 64).unwrap().load64(POSITION), position_word(0x8062, 0x8062));
}

#[test]
fn a_ring_that_was_stopped_or_reset_begins_where_it_is_told() {
    let memory = guest(0x4_0000);
    let mut rig = connect(&memory);
    let region = get(&mut rig, 1, SIZE, 24);
    assert!(set(&mut rig, &region));
    assert!(start(&mut rig, 0, 0x8000));
    rig.dev.processed = 42;
    assert_eq!(rig.base(0), 0x802a_802a);
    // The driver has made its ring anew.
    assert!(start(&mut rig, 0, 0x8000_8000));
    assert_eq!(rig.dev.take().last(), Some(&started(0, 0x8000)));
    assert_eq!(look(&region).area(0, 64).unwrap().load64(POSITION), position_word(0x8000, 0x8000));
    drop(rig);
    // A reset before the start makes the region's word void.
    for request in [Request::SetStatus, Request::ResetDevice] {
        let mut rig = connect(&memory);
        assert!(set(&mut rig, &region));
        let payload: &[u8] = if request == Request::SetStatus { &[0; 8] } else { &[] };
        assert!(rig.ack(request, payload, &[]));
        assert!(rig.features(1 << 32 | 1 << 34));
        assert!(start(&mut rig, 0, 0x8007));
        assert_eq!(rig.dev.take().last(), Some(&started(0, 0x8007)));
    }
}

#[test]
fn a_region_that_comes_while_a_ring_runs_is_taken_up_by_it() {
    let memory = guest(0x4_0000);
    let mut rig = connect(&memory);
    assert!(start(&mut rig, 0, 0x8000));
    rig.dev.processed = 9;
    let region = get(&mut rig, 1, SIZE, 24);
    for base in [0x8009, 0x8012, 0x801b] {
        rig.dev.take();
        assert!(set(&mut rig, &region));
        assert_eq!(rig.dev.take(), [Event::Stopped(0), started(0, base)]);
        assert!(rig.dev.rings[&0].inflight.is_some());
    }
}

#[test]
fn a_region_that_says_what_cannot_be_is_not_believed() {
    let memory = guest(0x4_0000);
    let mut rig = connect(&memory);
    let region = get(&mut rig, 1, SIZE, 24);
    assert!(set(&mut rig, &region));
    assert!(start(&mut rig, 0, 0x8000));
    drop(rig);
    let part = look(&region).area(0, 64).unwrap();
    for word in [u64::from(SIZE), u64::from(SIZE) << 16, u64::MAX] {
        part.store64(POSITION, word);
        let mut rig = connect(&memory);
        assert!(set(&mut rig, &region));
        assert!(!start(&mut rig, 0, 0x8000), "{word:#x}");
        assert_eq!(rig.session.counters().failed_starts, 1);
    }
    // Made for another size or in another version: as if it were new.
    for (at, value) in [(8, 0), (8, 2), (10, SIZE - 1)] {
        part.store64(POSITION, 5 << 16 | 5);
        let before = part.load16(at);
        part.store16(at, value);
        let mut rig = connect(&memory);
        assert!(set(&mut rig, &region));
        assert!(start(&mut rig, 0, 0x8003));
        assert_eq!(rig.dev.take(), [started(0, 0x8003)]);
        assert_eq!(part.load16(at), before);
    }
}

#[test]
fn a_region_too_small_for_the_layout_that_comes_later_is_left_alone() {
    let memory = guest(0x4_0000);
    let mut rig = connect(&memory);
    assert!(rig.features(1 << 32));
    // Split parts take less than half.
    let region = get(&mut rig, 1, 256, 24);
    assert!(set(&mut rig, &region));
    assert!(rig.features(1 << 32 | 1 << 34));
    rig.dev.take();
    assert!(start(&mut rig, 0, 0x8000));
    assert_eq!(rig.dev.take(), [started(0, 0x8000)]);
    let whole = rig.state(Request::SetVringNum, 0, 256);
    assert!(!whole, "the size of a running ring");
    rig.base(0);
    assert!(rig.ack(
        Request::SetVringAddr,
        VringAddr { avail: USER + 0x2000, used: USER + 0x2004, ..addr(0) }.as_bytes(),
        &[]
    ));
    assert!(rig.state(Request::SetVringNum, 0, 256));
    assert!(rig.state(Request::SetVringBase, 0, 0x8000));
    assert!(rig.event(Request::SetVringKick, NO_FD, &[]));
    assert!(rig.dev.rings[&0].inflight.is_none());
}

/// The part would not lie on the words that it is made of.
#[test]
fn a_region_off_its_alignment_is_left_alone() {
    let memory = guest(0x4_0000);
    let mut rig = connect(&memory);
    let mem = SharedMem::new("inflight", 0x2000).unwrap();
    for (mmap_offset, tracked) in [(0, true), (8, true), (4, false), (1, false), (0x1004, false)] {
        let description =
            InflightDescription { mmap_size: PART, mmap_offset, num_queues: 1, queue_size: SIZE, padding: 0 };
        let fits = mmap_offset + PART <= 0x2000;
        assert_eq!(rig.ack(Request::SetInflightFd, description.as_bytes(), &[mem.fd()]), fits);
        rig.base(0);
        assert!(start(&mut rig, 0, 0x8000));
        if fits {
            assert_eq!(rig.dev.rings[&0].inflight.is_some(), tracked, "{mmap_offset:#x}");
        }
    }
    // That of the last good one is kept, for a hand-over.
    assert_eq!(copies_of(mem.fd()), 2);
}

/// A file that is cut under the mapping costs the tracking and nothing else.
#[test]
fn a_region_that_is_truncated_kills_nobody() {
    let memory = guest(0x4_0000);
    let file = rustix::fs::memfd_create("inflight", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, PART).unwrap();
    let description =
        InflightDescription { mmap_size: PART, mmap_offset: 0, num_queues: 1, queue_size: SIZE, padding: 0 };
    let mut rig = connect(&memory);
    assert!(rig.ack(Request::SetInflightFd, description.as_bytes(), &[file.as_fd()]));
    rustix::fs::ftruncate(&file, 0).unwrap();
    assert!(start(&mut rig, 0, 0x8000));
    rig.dev.processed = 5;
    assert!(rig.mem_table(&[(memory.0, &memory.1)]));
    assert_eq!(rig.dev.take().last(), Some(&started(0, 0x8005)));
}

#[test]
fn the_region_goes_with_the_session() {
    let memory = guest(0x4_0000);
    let mut rig = connect(&memory);
    let region = get(&mut rig, 1, SIZE, 24);
    assert!(set(&mut rig, &region));
    assert!(start(&mut rig, 0, 0x8000));
    rig.session.disconnect(&mut rig.dev);
    let inode = rustix::fs::fstat(&region.1).unwrap().st_ino.to_string();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    assert!(!maps.lines().any(|line| line.contains("inflight") && line.contains(&format!(" {inode} "))));
}

/// A description that was right when it came is no reason to refuse the session to another process.
#[test]
fn a_region_that_came_before_another_layout_is_taken_over() {
    let memory = guest(0x4_0000);
    let mut rig = connect(&memory);
    let region = get(&mut rig, 1, SIZE, 24);
    assert!(set(&mut rig, &region));
    assert!(rig.features(F_VERSION_1));
    let mut fds = Vec::new();
    let state = rig.session.state(&mut |fd, id| {
        fds.push(Some((fd.try_clone_to_owned()?, id)));
        Ok(fds.len() as u32 - 1)
    });
    let state = state.unwrap();
    let mut take = |number: u32| fds[number as usize].take();
    let resources = || Resources { closer: Closer::inline(), ..Resources::default() };
    let mut adopted = Session::adopt(&state, &mut take, packed_offer(), resources()).unwrap();
    rig.session.let_go();
    std::mem::swap(&mut rig.session, &mut adopted);
    drop(adopted);
    rig.dev = Recorder::default();
    rig.session.resume(&mut rig.dev);
    assert!(!start(&mut rig, 0, 0), "no power of two");
    // Back to the layout that it was for.
    assert!(rig.features(F_VERSION_1 | F_RING_PACKED));
    assert!(start(&mut rig, 0, 0x8000));
    assert!(rig.dev.rings[&0].inflight.is_some());
}

/// The kernel counts descriptors that lie unread for the user of their sender, and at some number passes none of any of its processes.
#[test]
fn l_a_front_end_that_reads_no_answer_is_given_few_descriptors_also_when_it_comes_again() {
    let wanted = InflightDescription { num_queues: 2, queue_size: 256, ..Default::default() };
    let resources = Resources { closer: Closer::inline(), ..Resources::default() };
    let ask = |rig: &mut Rig| {
        rig.send(Request::GetInflightFd as u32, 1, wanted.as_bytes(), &[]);
        rig.serve().unwrap();
    };
    let reads = |rig: &mut Rig| {
        let (_, payload, fds) = rig.reply_with_fds()?;
        // Without a descriptor the region has no size.
        let size = u64::from_ne_bytes(payload[..8].try_into().unwrap());
        assert_eq!(fds.len(), usize::from(size > 0));
        Some(fds.len())
    };
    let mut peers = Vec::new();
    for _ in 0..6 {
        let mut rig = Rig::with_resources(packed_offer(), resources.clone());
        rig.tell(Request::SetProtocolFeatures, packed_offer().protocol.bits().as_bytes(), &[]);
        (0..3).for_each(|_| ask(&mut rig));
        // The switch ends it, and it keeps its end.
        rig.session.disconnect(&mut rig.dev);
        peers.push(rig);
    }
    let mut given = Vec::new();
    for rig in &mut peers {
        given.push(std::iter::from_fn(|| reads(rig)).sum::<usize>());
    }
    assert_eq!(given, [3, 3, 2, 0, 0, 0]);
    // It has read them all, or has gone.
    drop(peers);
    let mut rig = Rig::with_resources(packed_offer(), resources.clone());
    rig.tell(Request::SetProtocolFeatures, packed_offer().protocol.bits().as_bytes(), &[]);
    for _ in 0..20 {
        ask(&mut rig);
        assert_eq!(reads(&mut rig), Some(1));
    }
}
