//! What QEMU's virtio-net really sends (7.2 and 10.0 send the same), recorded from
//! `-netdev vhost-user,queues=2` with a guest that boots, uses one pair, and reboots.

use std::os::fd::AsFd;

use ringferry_sys::eventfd::EventFd;
use ringferry_sys::socket::Stream;
use ringferry_vhost_user::message::{
    F_PROTOCOL_FEATURES, F_VERSION_1, NO_FD, Request, VringAddr, VringState,
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
    assert_eq!(rig.ask_u64(Request::GetQueueNum), 2);
    if first {
        let (_ours, channel) = Stream::pair().unwrap();
        assert!(rig.ack(Request::SetBackendReqFd, &[], &[channel.as_fd()]));
    }
    rig.tell(Request::SetOwner, &[], &[]);
    assert_eq!(rig.ask_u64(Request::GetFeatures), FEATURES | F_PROTOCOL_FEATURES);
}

fn tell_state(rig: &mut Rig, request: Request, index: u32, num: u32) {
    rig.tell(request, VringState { index, num }.as_bytes(), &[]);
}

fn start(rig: &mut Rig, base: u32) {
    assert!(rig.ack(Request::SetFeatures, (FEATURES | F_PROTOCOL_FEATURES).as_bytes(), &[]));
    let status = rig.ask_u64(Request::GetStatus);
    rig.tell(Request::SetStatus, (status | 8).as_bytes(), &[]);
    for index in [0, 1] {
        let event = EventFd::new().unwrap();
        tell_state(rig, Request::SetVringNum, index, RING_SIZE.into());
        tell_state(rig, Request::SetVringBase, index, base);
        assert!(rig.ack(Request::SetVringAddr, ring_addr(index).as_bytes(), &[]));
        rig.tell(Request::SetVringKick, u64::from(index).as_bytes(), &[event.as_fd()]);
        rig.tell(Request::SetVringCall, u64::from(index).as_bytes(), &[event.as_fd()]);
    }
    for index in [0, 1] {
        tell_state(rig, Request::SetVringEnable, index, 1);
    }
    rig.tell(Request::SetStatus, 15u64.as_bytes(), &[]);
}

fn boot_order(mem_slots: bool) {
    let mut rig = Rig::with(Offer { protocol: Offer::NET_PROTOCOL | ProtocolFeatures::CONFIG, ..offer() });
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
    let (region, mem) = guest(0x10_0000);
    if mem_slots {
        assert_eq!(rig.ask_u64(Request::GetMaxMemSlots), 32);
        assert!(rig.slot(Request::AddMemReg, region, &[mem.fd()]));
    } else {
        assert!(rig.ack(Request::SetMemTable, &mem_table([region].into_iter()), &[mem.fd()]));
    }
    start(&mut rig, 0);
    let started = |index, base| Event::Started { index, size: RING_SIZE, base, enabled: true };
    let call = |index| Event::Call { index, polled: false };
    assert_eq!(
        rig.dev.take(),
        [
            Event::Memory(1),
            Event::Features(FEATURES),
            Event::Status(8),
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
    // The guest reboots: rings of both pairs are stopped, also those that never ran.
    rig.dev.processed = 77;
    assert_eq!([0, 1, 2, 3].map(|index| rig.base(index)), [77, 77, 0, 0]);
    rig.tell(Request::SetStatus, 0u64.as_bytes(), &[]);
    assert_eq!(rig.dev.take(), [Event::Stopped(0), Event::Stopped(1), Event::Status(0)]);
    start(&mut rig, 0);
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
    let (region, mem) = guest(0x10_0000);
    assert!(rig.slot(Request::AddMemReg, region, &[mem.fd()]));
    start(&mut rig, 0xfffe);
    rig.dev.processed = 4;
    assert_eq!(rig.base(0), 2);
    assert_eq!(rig.base(1), 2);
}

/// A stopped guest is resumed: QEMU's log of addresses may come with the log flag and address set,
/// which mean nothing while no log was agreed on.
#[test]
fn log_flags_of_ring_addresses_mean_nothing_without_a_log() {
    let mut rig = Rig::negotiated();
    let addr = VringAddr { flags: 1, log: 0xdead_beef, ..ring_addr(0) };
    assert!(rig.ack(Request::SetVringAddr, addr.as_bytes(), &[]));
}
