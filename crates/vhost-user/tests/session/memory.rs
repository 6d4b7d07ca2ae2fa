//! The memory map: whole, in slots, and changed while rings run.

use std::os::fd::AsFd;
use std::sync::Arc;

use ringferry_memory::{MapBudget, SharedMem, Words};
use ringferry_sys::closer::Closer;
use ringferry_vhost_user::message::{MemoryRegion, NO_FD, Request};
use ringferry_vhost_user::{ProtocolFeatures, Resources};
use zerocopy::IntoBytes;

use crate::rig::{Event, RING_SIZE, Rig, USER, copies_of, guest, mem_table, offer, ring_addr};

fn restarted(base: u16) -> [Event; 2] {
    [Event::Stopped(0), Event::Started { index: 0, size: RING_SIZE, base, enabled: false }]
}

#[test]
fn hot_plug_and_unplug_while_a_ring_runs() {
    let mut rig = Rig::negotiated();
    let (region, mem) = guest(0x10_0000);
    assert!(rig.slot(Request::AddMemReg, region, &[mem.fd()]));
    assert!(rig.start(0, 0));
    rig.dev.take();
    rig.dev.processed = 10;
    let more = SharedMem::new("more", 0x1000).unwrap();
    let dimm =
        MemoryRegion { guest_addr: 1 << 32, size: 0x1000, user_addr: USER + (1 << 32), mmap_offset: 0 };
    assert!(rig.slot(Request::AddMemReg, dimm, &[more.fd()]));
    let [stopped, started] = restarted(10);
    assert_eq!(rig.dev.take(), [stopped, Event::Memory(2), started]);
    assert!(rig.dev.rings[&0].memory.area(1 << 32, 0x1000).is_some());
    assert!(rig.slot(Request::RemMemReg, dimm, &[]));
    let [stopped, started] = restarted(20);
    assert_eq!(rig.dev.take(), [stopped, Event::Memory(1), started]);
    assert!(rig.dev.rings[&0].memory.area(1 << 32, 1).is_none());
    // The same region cannot be removed twice, nor another added on top.
    assert!(!rig.slot(Request::RemMemReg, dimm, &[]));
    let on_top = MemoryRegion { user_addr: region.user_addr + (1 << 40), ..region };
    assert!(!rig.slot(Request::AddMemReg, on_top, &[mem.fd()]));
    assert!(rig.dev.take().is_empty());
}

#[test]
fn qemu_before_8_adds_and_removes_each_region_once_per_queue_pair() {
    let mut rig = Rig::negotiated();
    let (region, mem) = guest(0x10_0000);
    assert!(rig.slot(Request::AddMemReg, region, &[mem.fd()]));
    assert!(rig.start(0, 0));
    rig.dev.take();
    for _ in 0..3 {
        assert!(rig.slot(Request::AddMemReg, region, &[mem.fd()]));
    }
    for _ in 0..3 {
        assert!(rig.slot(Request::RemMemReg, region, &[]));
    }
    assert!(rig.dev.take().is_empty(), "the ring runs on");
    assert!(rig.slot(Request::RemMemReg, region, &[]));
    assert_eq!(rig.dev.take(), [Event::Stopped(0), Event::Memory(0)]);
    assert!(!rig.slot(Request::RemMemReg, region, &[]));
}

#[test]
fn a_ring_whose_memory_is_removed_stops_and_resumes_when_it_is_back() {
    let mut rig = Rig::negotiated();
    let (region, mem) = guest(0x10_0000);
    assert!(rig.slot(Request::AddMemReg, region, &[mem.fd()]));
    assert!(rig.start(0, 5));
    rig.dev.take();
    assert!(rig.slot(Request::RemMemReg, region, &[]));
    assert_eq!(rig.dev.take(), [Event::Stopped(0), Event::Memory(0)]);
    assert!(rig.slot(Request::AddMemReg, region, &[mem.fd()]));
    assert_eq!(rig.dev.take(), [Event::Memory(1), restarted(5)[1]]);
}

#[test]
fn rings_are_resolved_anew_when_the_map_changes() {
    let mut rig = Rig::negotiated();
    let (region, mem) = guest(0x10_0000);
    assert!(rig.mem_table(&[(region, &mem)]));
    assert!(rig.start(0, 0));
    rig.dev.rings[&0].parts.desc.store16(0, 1);
    let (_, other) = guest(0x10_0000);
    assert!(rig.mem_table(&[(region, &other)]));
    assert_eq!(rig.dev.rings[&0].parts.desc.load16(0), 0);
    rig.dev.rings[&0].parts.desc.store16(0, 2);
    let view = crate::rig::view(region, &other);
    assert_eq!(view.user_area(USER, 2).unwrap().load16(0), 2);
}

#[test]
fn a_ring_may_lie_in_the_last_of_many_slots() {
    let mut rig = Rig::negotiated();
    let slots = rig.ask_u64(Request::GetMaxMemSlots);
    assert_eq!(slots, u64::from(offer().max_mem_slots));
    for slot in (0..slots).rev() {
        let mem = SharedMem::new("slot", 0x4000).unwrap();
        let at = slot * 0x1_0000;
        let region = MemoryRegion { guest_addr: at, size: 0x4000, user_addr: USER + at, mmap_offset: 0 };
        assert!(rig.slot(Request::AddMemReg, region, &[mem.fd()]), "slot {slot}");
    }
    let mem = SharedMem::new("slot", 0x1000).unwrap();
    let region = MemoryRegion { guest_addr: 1 << 40, size: 0x1000, user_addr: 1 << 40, mmap_offset: 0 };
    assert!(!rig.slot(Request::AddMemReg, region, &[mem.fd()]));
    let addr = (slots - 1) * 0x1_0000;
    let shift = ringferry_vhost_user::message::VringAddr {
        desc: USER + addr,
        avail: USER + addr + 0x1000,
        used: USER + addr + 0x2000,
        ..ring_addr(0)
    };
    assert!(rig.state(Request::SetVringNum, 0, RING_SIZE.into()));
    assert!(rig.ack(Request::SetVringAddr, shift.as_bytes(), &[]));
    assert!(rig.event(Request::SetVringKick, NO_FD, &[]));
    assert!(rig.dev.rings.contains_key(&0));
}

#[test]
fn a_refused_map_leaves_the_old_one_and_its_rings_running() {
    let mut rig = Rig::negotiated();
    let (region, mem) = guest(0x10_0000);
    assert!(rig.mem_table(&[(region, &mem)]));
    assert!(rig.start(0, 0));
    rig.dev.take();
    let bad = [
        MemoryRegion { size: 0, ..region },
        MemoryRegion { size: 0x20_0000, ..region },
        MemoryRegion { guest_addr: u64::MAX - 0xfff, ..region },
        MemoryRegion { user_addr: u64::MAX - 0xfff, ..region },
        MemoryRegion { mmap_offset: u64::MAX - 0xfff, ..region },
        MemoryRegion { mmap_offset: 0x1000, ..region },
    ];
    for region in bad {
        assert!(!rig.mem_table(&[(region, &mem)]), "{region:x?}");
    }
    // Overlapping, and one good region before a bad one.
    assert!(!rig.mem_table(&[(region, &mem), (region, &mem)]));
    let other = MemoryRegion { guest_addr: 1 << 40, size: 0, ..region };
    assert!(!rig.mem_table(&[(region, &mem), (other, &mem)]));
    // Memory that cannot be mapped.
    let (reader, _writer) = std::io::pipe().unwrap();
    assert!(!rig.ack(Request::SetMemTable, &mem_table([region].into_iter()), &[reader.as_fd()]));
    assert!(rig.dev.take().is_empty());
    assert!(rig.dev.rings.contains_key(&0));
    // That of the old map is kept, for a hand-over.
    assert_eq!(copies_of(mem.fd()), 2);
}

#[test]
fn a_table_may_come_as_a_full_array_or_empty() {
    let mut rig = Rig::negotiated();
    let (region, mem) = guest(0x10_0000);
    let mut payload = mem_table([region].into_iter());
    payload.resize(8 + 8 * size_of::<MemoryRegion>(), 0xff);
    assert!(rig.ack(Request::SetMemTable, &payload, &[mem.fd()]));
    assert!(rig.start(0, 0));
    rig.dev.take();
    assert!(rig.mem_table(&[]));
    assert_eq!(rig.dev.take(), [Event::Stopped(0), Event::Memory(0)]);
    assert!(rig.session.memory().is_none());
}

#[test]
fn an_unmapped_descriptor_may_come_with_rem_mem_reg_and_is_closed() {
    let mut rig = Rig::negotiated();
    let (region, mem) = guest(0x10_0000);
    assert!(rig.slot(Request::AddMemReg, region, &[mem.fd()]));
    assert!(rig.slot(Request::RemMemReg, region, &[mem.fd()]));
    assert_eq!(copies_of(mem.fd()), 1);
}

/// A front end that passes sparse files would otherwise fill the address space, in which the
/// allocator needs room, too.
#[test]
fn h2_no_more_is_mapped_than_the_budget_allows() {
    let process = MapBudget::new(5 << 40, "the process's key");
    let port = || MapBudget::within(&process, 4 << 40, "the port's key");
    let rig = |memory| {
        let resources = Resources { closer: Closer::inline(), memory, ..Resources::default() };
        Rig::with_resources(offer(), resources)
    };
    let (one, two) = (port(), port());
    let (mut a, mut b) = (rig(Arc::clone(&one)), rig(Arc::clone(&two)));
    let slots = ProtocolFeatures::CONFIGURE_MEM_SLOTS | ProtocolFeatures::REPLY_ACK;
    for rig in [&mut a, &mut b] {
        rig.tell(Request::SetProtocolFeatures, slots.bits().as_bytes(), &[]);
    }
    let sparse = SharedMem::new("sparse", 1 << 40).unwrap();
    let tera =
        |at: u64| MemoryRegion { guest_addr: at << 40, size: 1 << 40, user_addr: at << 40, mmap_offset: 0 };
    let add = |rig: &mut Rig, at| rig.slot(Request::AddMemReg, tera(at), &[sparse.fd()]);
    for at in 0..4 {
        assert!(add(&mut a, at));
    }
    assert!(!add(&mut a, 4), "the port's budget is used up");
    assert!(add(&mut b, 0));
    assert!(!add(&mut b, 1), "the process's budget is used up");
    assert_eq!((process.taken(), one.taken(), two.taken()), (5 << 40, 4 << 40, 1 << 40));
    // A change of the map has both maps for a moment; what is refused changes nothing.
    assert!(!a.mem_table(&[(tera(9), &sparse)]));
    assert_eq!(a.session.memory().unwrap().regions().len(), 4);
    assert!(a.slot(Request::RemMemReg, tera(3), &[]));
    assert!(add(&mut b, 1));
    a.session.disconnect(&mut a.dev);
    b.session.disconnect(&mut b.dev);
    assert_eq!(process.taken(), 0);
}
