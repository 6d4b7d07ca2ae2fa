//! Checks the number of queues against each front end's meaning of it. QEMU's `queues=` counts
//! pairs; cloud-hypervisor's `num_queues=` counts virtqueues. Both compare their number with
//! `GET_QUEUE_NUM`, and both let a guest's driver use fewer: QEMU enables rings as the driver asks
//! for pairs, cloud-hypervisor only sets up the rings that the driver has set up.

use std::os::fd::AsFd;

use ringferry_memory::SharedMem;
use ringferry_sys::eventfd::EventFd;
use ringferry_vhost_user::message::{
    F_PROTOCOL_FEATURES, F_VERSION_1, FLAG_NEED_REPLY, FLAG_REPLY, MemoryRegion, Request, VERSION, VringState,
};
use ringferry_vhost_user::{Offer, ProtocolFeatures};
use zerocopy::{FromBytes, IntoBytes};

use crate::rig::{Event, RING_SIZE, Rig, guest, ring_addr};

/// Number of queue pairs of the device under test.
const PAIRS: u16 = 4;

fn rig() -> Rig {
    Rig::with(Offer::net(F_VERSION_1, PAIRS))
}

/// A request that has a reply of its own and asks for an acknowledgement beside: the reply is all there is.
fn ask_and_need_reply(rig: &mut Rig, request: Request, payload: &[u8]) -> Vec<u8> {
    rig.send(request as u32, VERSION | FLAG_NEED_REPLY, payload, &[]);
    rig.serve().unwrap();
    let (header, payload) = rig.reply().unwrap();
    assert_eq!((header.request, header.flags), (request as u32, VERSION | FLAG_REPLY));
    assert!(rig.reply().is_none(), "{request} was answered twice");
    payload
}

/// Sends the messages of cloud-hypervisor after its guest's driver has set up these rings.
fn activate(rig: &mut Rig, rings: &[u32], (region, mem): &(MemoryRegion, SharedMem)) {
    let event = EventFd::new().unwrap();
    assert!(rig.features(F_VERSION_1));
    assert!(rig.mem_table(&[(*region, mem)]));
    for &ring in rings {
        assert!(rig.state(Request::SetVringNum, ring, RING_SIZE.into()));
    }
    for &ring in rings {
        assert!(rig.ack(Request::SetVringAddr, ring_addr(ring).as_bytes(), &[]));
        assert!(rig.state(Request::SetVringBase, ring, 0));
        assert!(rig.event(Request::SetVringCall, ring.into(), &[event.as_fd()]));
        assert!(rig.event(Request::SetVringKick, ring.into(), &[event.as_fd()]));
    }
    for &ring in rings {
        assert!(rig.state(Request::SetVringEnable, ring, 1));
    }
}

/// Its driver has reset the device.
fn reset(rig: &mut Rig, rings: &[u32]) {
    for &ring in rings {
        assert!(rig.state(Request::SetVringEnable, ring, 0));
        let asked = VringState { index: ring, num: 0 };
        let reply = ask_and_need_reply(rig, Request::GetVringBase, asked.as_bytes());
        assert_eq!(VringState::read_from_bytes(&reply).unwrap(), asked);
    }
}

/// Rings that were started, and those that were enabled; nothing else may have happened to a ring.
fn used(events: Vec<Event>) -> (Vec<u16>, Vec<u16>) {
    let (mut started, mut enabled) = (Vec::new(), Vec::new());
    for event in events {
        match event {
            Event::Started { index, enabled: false, .. } => started.push(index),
            Event::Enabled(index, true) => enabled.push(index),
            Event::Features(_) | Event::Memory(_) | Event::Call { .. } => {}
            other => panic!("{other:?}"),
        }
    }
    (started, enabled)
}

/// cloud-hypervisor gives up where its virtqueues are more than `GET_QUEUE_NUM` says, so a device of N pairs serves it N
/// virtqueues. Firmware sets up one pair of them, and the operating system after it all.
#[test]
fn cloud_hypervisor_counts_virtqueues_and_speaks_of_those_in_use() {
    let mut rig = rig();
    rig.tell(Request::SetOwner, &[], &[]);
    let features = rig.ask_u64(Request::GetFeatures);
    assert_ne!(features & F_PROTOCOL_FEATURES, 0);
    let knows = ProtocolFeatures::MQ
        | ProtocolFeatures::CONFIGURE_MEM_SLOTS
        | ProtocolFeatures::REPLY_ACK
        | ProtocolFeatures::INFLIGHT_SHMFD
        | ProtocolFeatures::LOG_SHMFD;
    let protocol = rig.ask_u64(Request::GetProtocolFeatures) & knows.bits();
    rig.tell(Request::SetProtocolFeatures, protocol.as_bytes(), &[]);
    let reply = ask_and_need_reply(&mut rig, Request::GetQueueNum, &[]);
    let num_queues = u32::try_from(u64::read_from_bytes(&reply).unwrap()).unwrap();
    assert_eq!(num_queues, PAIRS.into());

    let memory = guest(0x10_0000);
    let all: Vec<_> = (0..num_queues).collect();
    for rings in [&all[..2], &all[..], &all[..2]] {
        activate(&mut rig, rings, &memory);
        let wanted: Vec<_> = rings.iter().map(|&ring| ring as u16).collect();
        assert_eq!(used(rig.dev.take()), (wanted.clone(), wanted));
        assert_eq!(rig.dev.rings.len(), rings.len());
        reset(&mut rig, rings);
        assert!(rig.dev.rings.is_empty());
        rig.dev.take();
    }
    assert_eq!(rig.session.counters().rejected, 0);
}

/// It asks nothing where the device has no `MQ`, and then uses one pair; with `MQ` and one pair the answer would be fewer than
/// the two virtqueues it has, and it would refuse to start.
#[test]
fn a_device_of_one_pair_does_not_offer_to_tell_their_number() {
    for (pairs, offered) in [(0, false), (1, false), (2, true), (128, true)] {
        assert_eq!(
            Offer::net(F_VERSION_1, pairs).protocol.contains(ProtocolFeatures::MQ),
            offered,
            "{pairs}"
        );
    }
}

/// QEMU with `queues=` as many pairs as `GET_QUEUE_NUM` says: the last ring of the last pair is there, and the next is not.
#[test]
fn qemu_counts_pairs_and_has_twice_as_many_rings() {
    let mut rig = rig();
    let protocol = rig.ask_u64(Request::GetProtocolFeatures);
    rig.tell(Request::SetProtocolFeatures, protocol.as_bytes(), &[]);
    assert_eq!(rig.ask_u64(Request::GetQueueNum), u64::from(PAIRS));
    let rings = 2 * u32::from(PAIRS);
    // Before the guest's driver has said how many it wants.
    for ring in 0..rings {
        rig.tell(
            Request::SetVringEnable,
            VringState { index: ring, num: u32::from(ring < 2) }.as_bytes(),
            &[],
        );
    }
    assert!(rig.features(F_VERSION_1));
    let (region, mem) = guest(0x10_0000);
    assert!(rig.mem_table(&[(region, &mem)]));
    for ring in 0..rings {
        assert!(rig.start(ring, 0), "{ring}");
    }
    rig.dev.take();
    // The driver asks for three pairs, and for one.
    for pairs in [3, 1] {
        for ring in 0..rings {
            assert!(rig.state(Request::SetVringEnable, ring, u32::from(ring < 2 * pairs)));
        }
    }
    let three = [2, 3, 4, 5].map(|ring| Event::Enabled(ring, true));
    let one = [2, 3, 4, 5].map(|ring| Event::Enabled(ring, false));
    assert_eq!(rig.dev.take(), [three, one].concat());
    for (request, num) in [(Request::SetVringEnable, 1), (Request::SetVringNum, RING_SIZE.into())] {
        assert!(!rig.state(request, rings, num), "{request} for a ring beyond the last pair");
    }
    assert_eq!(rig.dev.rings.len(), rings as usize);
    assert!(rig.dev.take().is_empty());
}
