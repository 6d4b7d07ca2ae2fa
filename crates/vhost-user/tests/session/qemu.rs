//! Replays the messages that QEMU's virtio-net sends, recorded from 7.2 with `-netdev
//! vhost-user,queues=2`; 10.0 sends the same. QEMU resets the status sometimes before it stops the
//! rings, and sometimes after.

use std::os::fd::AsFd;

use ringferry_memory::SharedMem;
use ringferry_sys::eventfd::EventFd;
use ringferry_sys::socket::Stream;
use ringferry_vhost_user::message::{
    F_PROTOCOL_FEATURES, F_VERSION_1, MemoryRegion, NO_FD, Request, VringAddr, VringState,
};
use ringferry_vhost_user::{Offer, ProtocolFeatures};
use zerocopy::IntoBytes;

use crate::rig::{Event, F_MRG_RXBUF, RING_SIZE, Rig, copies_of, guest, mem_table, offer, ring_addr};

const FEATURES: u64 = F_VERSION_1 | F_MRG_RXBUF;

/// One pair's share of the negotiation.
fn negotiate(rig: &mut Rig, first: bool) {
    assert_eq!(rig.ask_u64(Request::GetFeatures), FEATURES | F_PROTOCOL_FEATURES);
    let protocol = rig.ask_u64(Request::GetProtocolFeatures);
    // QEMU masks CONFIG out for a network device.
    let protocol = protocol & !ProtocolFeatures::CONFIG.bits();
    rig.tell(Request::SetProtocolFeatures, protocol.as_bytes(), &[]);
    if first {
        assert_eq!(rig.ask_u64(Request::GetQueueNum), 2);
    }
    if protocol & ProtocolFeatures::CONFIGURE_MEM_SLOTS.bits() != 0 {
        assert_eq!(rig.ask_u64(Request::GetMaxMemSlots), 32);
    }
    if first {
        let (_ours, channel) = Stream::pair().unwrap();
        assert!(rig.ack(Request::SetBackendReqFd, &[], &[channel.as_fd()]));
        rig.tell(Request::SetOwner, &[], &[]);
    }
    assert_eq!(rig.ask_u64(Request::GetFeatures), FEATURES | F_PROTOCOL_FEATURES);
}

fn tell_state(rig: &mut Rig, request: Request, index: u32, num: u32) {
    rig.tell(request, VringState { index, num }.as_bytes(), &[]);
}

/// The driver has said `DRIVER_OK`. Memory slots are sent once, a table each time.
fn start(rig: &mut Rig, base: u32, (region, mem): &(MemoryRegion, SharedMem), first: bool) {
    assert!(rig.ack(Request::SetFeatures, (FEATURES | F_PROTOCOL_FEATURES).as_bytes(), &[]));
    let status = rig.ask_u64(Request::GetStatus);
    rig.tell(Request::SetStatus, (status | 8).as_bytes(), &[]);
    if !rig.session.protocol().contains(ProtocolFeatures::CONFIGURE_MEM_SLOTS) {
        assert!(rig.ack(Request::SetMemTable, &mem_table([*region].into_iter()), &[mem.fd()]));
    } else if first {
        assert!(rig.slot(Request::AddMemReg, *region, &[mem.fd()]));
    }
    for index in [0, 1] {
        let event = EventFd::new().unwrap();
        tell_state(rig, Request::SetVringNum, index, RING_SIZE.into());
        tell_state(rig, Request::SetVringBase, index, base);
        assert!(rig.ack(Request::SetVringAddr, ring_addr(index).as_bytes(), &[]));
        rig.tell(Request::SetVringKick, u64::from(index).as_bytes(), &[event.as_fd()]);
        rig.tell(Request::SetVringCall, u64::from(index).as_bytes(), &[event.as_fd()]);
    }
    let status = rig.ask_u64(Request::GetStatus);
    rig.tell(Request::SetStatus, (status | 7).as_bytes(), &[]);
}

fn boot_order(mem_slots: bool) {
    let mut protocol = Offer::NET_PROTOCOL;
    protocol.set(ProtocolFeatures::CONFIGURE_MEM_SLOTS, mem_slots);
    let mut rig = Rig::with(Offer { protocol, ..offer() });
    for first in [true, false] {
        negotiate(&mut rig, first);
    }
    let event = EventFd::new().unwrap();
    for index in 0..4u64 {
        rig.tell(Request::SetVringCall, index.as_bytes(), &[event.as_fd()]);
        rig.tell(Request::SetVringErr, index.as_bytes(), &[event.as_fd()]);
    }
    // Before the guest's driver has said anything: pair 0 on, the other off, again and again.
    for _ in 0..3 {
        for index in 0..4 {
            tell_state(&mut rig, Request::SetVringEnable, index, u32::from(index < 2));
        }
    }
    assert!(rig.dev.take().is_empty());
    let guest = guest(0x10_0000);
    start(&mut rig, 0, &guest, true);
    let started = |index, base: u16| Event::Started { index, size: RING_SIZE, base, enabled: true };
    let call = |index| Event::Call { index, polled: false };
    assert_eq!(
        rig.dev.take(),
        [
            Event::Features(FEATURES),
            Event::Status(8),
            Event::Memory(1),
            started(0, 0),
            call(0),
            started(1, 0),
            call(1),
            Event::Status(15)
        ]
    );
    // The guest masks and unmasks interrupts, and changes the number of its queues.
    rig.tell(Request::SetVringCall, 0u64.as_bytes(), &[event.as_fd()]);
    rig.tell(Request::SetVringCall, (1 | NO_FD).as_bytes(), &[]);
    tell_state(&mut rig, Request::SetVringEnable, 2, 1);
    tell_state(&mut rig, Request::SetVringEnable, 2, 0);
    assert_eq!(rig.dev.take(), [call(0), Event::Call { index: 1, polled: true }]);
    // The guest reboots: the status is reset first, and then the rings are asked where they were.
    rig.dev.processed = 77;
    rig.tell(Request::SetStatus, 0u64.as_bytes(), &[]);
    assert_eq!(rig.dev.take(), [Event::Stopped(0), Event::Stopped(1), Event::Status(0)]);
    assert_eq!([0, 1].map(|index| rig.base(index)), [77, 77]);
    start(&mut rig, 0, &guest, false);
    assert!(rig.dev.take().contains(&started(1, 0)));
    // Or the other way round.
    assert_eq!([0, 1].map(|index| rig.base(index)), [77, 77]);
    rig.tell(Request::SetStatus, 0u64.as_bytes(), &[]);
    assert_eq!(rig.dev.take(), [Event::Stopped(0), Event::Stopped(1), Event::Status(0)]);
    start(&mut rig, 0, &guest, false);
    assert!(rig.dev.take().contains(&started(1, 0)));
    assert_eq!(rig.session.counters().rejected, 0);
    rig.session.disconnect(&mut rig.dev);
    assert_eq!(copies_of(&event), 1);
}

#[test]
fn qemu_order_with_memory_slots() {
    boot_order(true);
}

#[test]
fn qemu_order_with_a_memory_table() {
    boot_order(false);
}

/// After the back end was killed and has come back, QEMU sets the base to the used index it finds
/// in memory, and the driver's rings go on.
#[test]
fn qemu_reconnects_to_a_back_end_that_was_killed() {
    let mut rig = Rig::new();
    negotiate(&mut rig, true);
    start(&mut rig, 0xfffe, &guest(0x10_0000), true);
    rig.dev.processed = 4;
    assert_eq!(rig.base(0), 2);
    assert_eq!(rig.base(1), 2);
}

/// The log address is always filled in; it means nothing while no log was agreed on.
#[test]
fn log_flags_of_ring_addresses_mean_nothing_without_a_log() {
    let mut rig = Rig::negotiated();
    let addr = VringAddr { flags: 1, log: 0xdead_beef, ..ring_addr(0) };
    assert!(rig.ack(Request::SetVringAddr, addr.as_bytes(), &[]));
}
