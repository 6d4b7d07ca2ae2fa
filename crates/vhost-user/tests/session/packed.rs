//! Packed rings (VIRTIO 1.4, 2.8): sizes, bases, and messages in every order.

use std::os::fd::AsFd;

use ringferry_memory::Words;
use ringferry_sys::eventfd::EventFd;
use ringferry_vhost_user::Offer;
use ringferry_vhost_user::message::{
    F_PROTOCOL_FEATURES, F_RING_PACKED, F_VERSION_1, MemoryRegion, NO_FD, Request, VringAddr, VringState,
};
use zerocopy::IntoBytes;

use crate::rig::{Event, F_MRG_RXBUF, Rig, USER, guest, mem_table, packed_offer, ring_addr, view};

const FEATURES: u64 = F_VERSION_1 | F_RING_PACKED;
/// A size that no split ring has.
const ODD: u16 = 300;

fn started(base: u16) -> Event {
    Event::Started { index: 0, size: ODD, base, enabled: false }
}

/// Descriptors, then the driver's and the device's event suppression.
fn addr() -> VringAddr {
    VringAddr { index: 0, flags: 0, desc: USER, avail: USER + 0x2000, used: USER + 0x2004, log: 0 }
}

fn ready() -> (Rig, (MemoryRegion, ringferry_memory::SharedMem)) {
    let mut rig = Rig::packed();
    let guest = guest(0x4_0000);
    assert!(rig.mem_table(&[(guest.0, &guest.1)]));
    rig.dev.take();
    (rig, guest)
}

/// Size, base, addresses and a kick without event.
fn start(rig: &mut Rig, base: u32) -> bool {
    rig.state(Request::SetVringNum, 0, ODD.into())
        && rig.state(Request::SetVringBase, 0, base)
        && rig.ack(Request::SetVringAddr, addr().as_bytes(), &[])
        && rig.event(Request::SetVringKick, NO_FD, &[])
}

#[test]
fn virtio_2_8_10_1_a_packed_ring_of_any_size_starts_and_stops() {
    let (mut rig, _guest) = ready();
    assert!(start(&mut rig, 0x8000_8000));
    assert_eq!(rig.dev.take(), [started(0x8000)]);
    assert!(rig.dev.rings[&0].packed());
    // Both halves of the answer, the wrap counters of the second lap.
    rig.dev.processed = ODD + 7;
    assert_eq!(rig.base(0), 7 << 16 | 7);
    assert_eq!(rig.base(0), 7 << 16 | 7);
    rig.dev.processed = ODD;
    assert!(rig.event(Request::SetVringKick, NO_FD, &[]));
    assert_eq!(rig.base(0), 0x8007_8007);
}

#[test]
fn the_areas_are_those_of_the_front_end() {
    let (mut rig, (region, mem)) = ready();
    let ours = view(region, &mem);
    for (at, mark) in [(addr().desc, 1), (addr().avail, 2), (addr().used, 3)] {
        ours.user_area(at, 2).unwrap().store16(0, mark);
    }
    assert!(start(&mut rig, 0x8000));
    let parts = &rig.dev.rings[&0].parts;
    assert_eq!((parts.desc.load16(0), parts.driver.load16(0), parts.device.load16(0)), (1, 2, 3));
}

#[test]
fn a_base_has_both_halves_or_the_lower_one_and_none_means_the_beginning() {
    for (base, position) in [
        (0x8000_8000, 0x8000), // QEMU
        (0x8000, 0x8000),      // DPDK's virtio_user
        (0x812b_812b, 0x812b),
        (0x0001_0001, 1),
        (0, 0), // the beginning of the second lap
        // Chains taken and not completed: from the used index.
        (0x8005_8010, 0x8005),
        (0x812b_0002, 0x812b),
    ] {
        let (mut rig, _guest) = ready();
        assert!(start(&mut rig, base));
        assert_eq!(rig.dev.take(), [started(position)], "{base:#x}");
    }
    let (mut rig, _guest) = ready();
    assert!(rig.state(Request::SetVringNum, 0, ODD.into()));
    assert!(rig.ack(Request::SetVringAddr, addr().as_bytes(), &[]));
    assert_eq!(rig.base(0), 0x8000_8000, "never started");
    assert!(rig.event(Request::SetVringKick, NO_FD, &[]));
    assert_eq!(rig.dev.take(), [started(0x8000)]);
}

#[test]
fn a_base_outside_the_ring_is_refused_at_once_or_when_it_starts() {
    let outside = [u32::from(ODD), 0x8000 | u32::from(ODD), 0x812c_8000, 0x7fff, 0xffff, u32::MAX];
    let (mut rig, _guest) = ready();
    assert!(rig.state(Request::SetVringNum, 0, ODD.into()));
    for base in outside {
        assert!(!rig.state(Request::SetVringBase, 0, base), "{base:#x}");
    }
    for base in outside {
        // The size is not known yet.
        let (mut rig, _guest) = ready();
        assert!(rig.state(Request::SetVringBase, 0, base));
        assert!(rig.state(Request::SetVringNum, 0, ODD.into()));
        assert!(rig.ack(Request::SetVringAddr, addr().as_bytes(), &[]));
        assert!(!rig.event(Request::SetVringKick, NO_FD, &[]), "{base:#x}");
        assert_eq!(rig.session.counters().failed_starts, 1);
        assert!(rig.dev.take().is_empty());
        // And it starts once the base is put right.
        assert!(rig.state(Request::SetVringBase, 0, 0x8000));
        assert_eq!(rig.dev.take(), [started(0x8000)]);
    }
}

#[test]
fn a_split_ring_takes_neither_an_upper_half_nor_an_odd_size() {
    let mut rig = Rig::with(packed_offer());
    rig.tell(Request::SetProtocolFeatures, packed_offer().protocol.bits().as_bytes(), &[]);
    let guest = guest(0x4_0000);
    assert!(rig.mem_table(&[(guest.0, &guest.1)]));
    // As long as either layout is possible.
    assert!(rig.state(Request::SetVringNum, 0, ODD.into()));
    assert!(rig.state(Request::SetVringBase, 0, 0x8000_8000));
    assert!(rig.ack(Request::SetVringAddr, ring_addr(0).as_bytes(), &[]));
    assert!(rig.event(Request::SetVringKick, NO_FD, &[]));
    assert!(rig.features(F_VERSION_1));
    assert_eq!(rig.session.counters().failed_starts, 1);
    assert!(!rig.state(Request::SetVringNum, 0, ODD.into()));
    assert!(!rig.state(Request::SetVringBase, 0, 0x8000_8000));
    assert!(!rig.state(Request::SetVringNum, 0, 256), "the base is still no good");
    assert_eq!(rig.session.counters().failed_starts, 2);
    rig.dev.take();
    // The wrap bit alone is a split ring's index like any other.
    assert!(rig.state(Request::SetVringBase, 0, 0x8000));
    let split = Event::Started { index: 0, size: 256, base: 0x8000, enabled: false };
    assert_eq!(rig.dev.take(), [split]);
    assert_eq!(rig.base(0), 0x8000);
    // A back end that offers no packed rings refuses at once, before any features.
    let mut rig = Rig::new();
    let (num, base) = (VringState { index: 0, num: 300 }, VringState { index: 0, num: 0x8000_8000 });
    rig.tell(Request::SetVringNum, num.as_bytes(), &[]);
    rig.tell(Request::SetVringBase, base.as_bytes(), &[]);
    assert_eq!(rig.session.counters().rejected, 2);
}

#[test]
fn virtio_2_8_10_event_areas_are_aligned_and_inside_memory() {
    let (mut rig, (region, _)) = ready();
    let end = USER + region.size;
    for (avail, used) in [(2, 0), (0, 2), (1, 0), (0, 1)] {
        let bad = VringAddr { avail: USER + 0x2000 + avail, used: USER + 0x3000 + used, ..addr() };
        assert!(!rig.ack(Request::SetVringAddr, bad.as_bytes(), &[]));
    }
    assert!(start(&mut rig, 0x8000));
    rig.dev.take();
    for bad in [VringAddr { avail: end, ..addr() }, VringAddr { used: end, ..addr() }] {
        assert!(!rig.ack(Request::SetVringAddr, bad.as_bytes(), &[]));
        assert!(!rig.ack(Request::SetVringAddr, VringAddr { desc: end - 4784, ..bad }.as_bytes(), &[]));
    }
    assert!(rig.dev.take().is_empty(), "it runs on");
    let last = VringAddr { desc: end - 4800, avail: USER, used: end - 4804, ..addr() };
    assert!(rig.ack(Request::SetVringAddr, last.as_bytes(), &[]));
    assert_eq!(rig.dev.take(), [Event::Stopped(0), started(0x8000)]);
}

#[test]
fn an_address_good_enough_for_a_split_ring_is_judged_again_when_a_packed_one_starts() {
    let mut rig = Rig::with(packed_offer());
    rig.tell(Request::SetProtocolFeatures, packed_offer().protocol.bits().as_bytes(), &[]);
    let guest = guest(0x4_0000);
    assert!(rig.mem_table(&[(guest.0, &guest.1)]));
    assert!(rig.state(Request::SetVringNum, 0, ODD.into()));
    assert!(rig.ack(Request::SetVringAddr, VringAddr { avail: USER + 0x2002, ..addr() }.as_bytes(), &[]));
    assert!(rig.features(FEATURES));
    assert!(!rig.event(Request::SetVringKick, NO_FD, &[]));
    rig.dev.take();
    assert!(rig.ack(Request::SetVringAddr, addr().as_bytes(), &[]));
    assert_eq!(rig.dev.take(), [started(0x8000)]);
}

/// Every order of the six messages that a ring needs starts it, once, when the last has come.
#[test]
fn set_up_in_every_order() {
    let (region, mem) = guest(0x4_0000);
    let kick = EventFd::new().unwrap();
    let mut order = [0, 1, 2, 3, 4, 5];
    let mut orders = Vec::new();
    permutations(&mut order, 0, &mut orders);
    assert_eq!(orders.len(), 720);
    for order in orders {
        let mut rig = Rig::with(packed_offer());
        rig.tell(Request::SetProtocolFeatures, packed_offer().protocol.bits().as_bytes(), &[]);
        for (nth, step) in order.into_iter().enumerate() {
            let done = match step {
                0 => rig.features(FEATURES),
                1 => rig.ack(Request::SetMemTable, &mem_table([region].into_iter()), &[mem.fd()]),
                2 => rig.state(Request::SetVringNum, 0, ODD.into()),
                3 => {
                    // The base has a default, and cannot be set once the ring runs.
                    let running = rig.dev.rings.contains_key(&0);
                    rig.state(Request::SetVringBase, 0, 0x8003_8003) != running
                }
                4 => rig.ack(Request::SetVringAddr, addr().as_bytes(), &[]),
                _ => rig.event(Request::SetVringKick, 0, &[kick.as_fd()]),
            };
            assert!(done, "step {step} of {order:?}");
            let needed = [0, 1, 2, 4, 5];
            let all = needed.iter().all(|step| order[..=nth].contains(step));
            assert_eq!(rig.dev.rings.contains_key(&0), all, "after {nth} of {order:?}");
        }
        let base = if order[5] == 3 { 0x8000 } else { 0x8003 };
        let starts: Vec<_> =
            rig.dev.take().into_iter().filter(|event| matches!(event, Event::Started { .. })).collect();
        assert_eq!(starts, [started(base)], "{order:?}");
    }
}

fn permutations(order: &mut [usize; 6], from: usize, all: &mut Vec<[usize; 6]>) {
    if from == order.len() {
        all.push(*order);
    }
    for at in from..order.len() {
        order.swap(from, at);
        permutations(order, from + 1, all);
        order.swap(from, at);
    }
}

#[test]
fn repeated_messages_while_it_runs_leave_it_where_it_was() {
    let (mut rig, guest) = ready();
    assert!(start(&mut rig, 0x8000));
    rig.dev.take();
    rig.dev.processed = 7;
    let restarted = |base| [Event::Stopped(0), started(base)];
    assert!(rig.state(Request::SetVringNum, 0, ODD.into()));
    assert_eq!(rig.dev.take(), restarted(0x8007));
    assert!(rig.ack(Request::SetVringAddr, addr().as_bytes(), &[]));
    assert!(rig.dev.take().is_empty(), "it lies where it lay");
    assert!(rig.event(Request::SetVringKick, NO_FD, &[]));
    assert_eq!(rig.dev.take(), restarted(0x800e));
    // A new memory map resolves it anew.
    let mark = view(guest.0, &guest.1).user_area(USER, 2).unwrap();
    mark.store16(0, 0xbeef);
    assert!(rig.mem_table(&[(guest.0, &guest.1)]));
    let [stopped, started] = restarted(0x8015);
    assert_eq!(rig.dev.take(), [stopped, Event::Memory(1), started]);
    assert_eq!(rig.dev.rings[&0].parts.desc.load16(0), 0xbeef);
    assert!(rig.features(FEATURES));
    assert_eq!(rig.dev.take(), [Event::Features(FEATURES)], "nothing has changed");
    assert!(!rig.state(Request::SetVringBase, 0, 0x8000), "it runs");
    assert!(!rig.state(Request::SetVringNum, 0, 256), "its position would mean nothing");
    assert!(rig.dev.take().is_empty());
    rig.dev.processed = 0;
    assert_eq!(rig.base(0), 0x8015_8015);
}

#[test]
fn memory_that_comes_back_finds_the_ring_where_it_was() {
    let (mut rig, guest) = ready();
    assert!(start(&mut rig, 0x8000));
    rig.dev.processed = 299;
    assert!(rig.mem_table(&[]));
    rig.dev.take();
    assert!(rig.mem_table(&[(guest.0, &guest.1)]));
    assert_eq!(rig.dev.take(), [Event::Memory(1), started(0x812b)]);
}

#[test]
fn other_features_keep_the_position_and_another_layout_does_not() {
    let (mut rig, _guest) = ready();
    assert!(start(&mut rig, 0x8000));
    rig.dev.take();
    rig.dev.processed = 3;
    assert!(rig.features(FEATURES | F_MRG_RXBUF));
    assert_eq!(rig.dev.take()[2], started(0x8003));
    assert!(rig.features(F_VERSION_1));
    assert_eq!(rig.dev.take(), [Event::Stopped(0), Event::Features(F_VERSION_1)]);
    assert_eq!(rig.session.counters().failed_starts, 1);
}

#[test]
fn without_protocol_features_packed_rings_work_too() {
    let mut offer = packed_offer();
    offer.protocol = ringferry_vhost_user::ProtocolFeatures::empty();
    let mut rig = Rig::with(Offer { ..offer });
    let (region, mem) = guest(0x4_0000);
    rig.tell(Request::SetFeatures, FEATURES.as_bytes(), &[]);
    rig.tell(Request::SetMemTable, &mem_table([region].into_iter()), &[mem.fd()]);
    rig.tell(Request::SetVringNum, VringState { index: 0, num: ODD.into() }.as_bytes(), &[]);
    rig.tell(Request::SetVringAddr, addr().as_bytes(), &[]);
    rig.tell(Request::SetVringKick, NO_FD.as_bytes(), &[]);
    assert!(rig.dev.take().contains(&Event::Started { index: 0, size: ODD, base: 0x8000, enabled: true }));
    assert_eq!(rig.session.features(), Some(FEATURES & !F_PROTOCOL_FEATURES));
}
