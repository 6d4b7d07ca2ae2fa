//! Our driver half, used as a library, against a device that no one here wrote: DPDK's `net_vhost` in
//! testpmd, which forwards between two guests.

use ringferry_packet::vnet::Header;
use ringferry_rig::frames::frame;
use ringferry_rig::guest::converse;
use ringferry_rig::process::eventually;
use ringferry_rig::testpmd::Bed;
use ringferry_virtio_net::Features;

/// Frames both ways between two guests with `features`; each one is compared with what was sent.
fn forwards(testpmd: &Bed, features: Features) {
    let [mut one, mut other] = testpmd.plug(features);
    assert_eq!(one.features & RINGS, features & RINGS, "{features:?}");
    // Whether the device is awake is its own affair; frames sent before are lost without a word.
    let hello = frame(other.mac, one.mac, 60, 0);
    eventually("testpmd forwards", || {
        one.send(&hello);
        std::thread::sleep(std::time::Duration::from_millis(20));
        other.pump();
        other.take()
    });
    while other.take().is_some() {}
    // More than three times round the rings, in both directions.
    for first in [0, 1000, 2000, 3000] {
        converse(&mut one, &mut other, first, 200);
    }
    // A frame of every size class, unharmed, in both directions.
    for size in [60, 64, 65, 1514] {
        let there = frame(other.mac, one.mac, size, 7);
        one.put(&Header::default(), &there);
        one.flush();
        assert_eq!(other.receive_plain(), there, "{size} bytes, {features:?}");
        let back = frame(one.mac, other.mac, size, 8);
        other.put(&Header::default(), &back);
        other.flush();
        assert_eq!(one.receive_plain(), back, "{size} bytes, {features:?}");
    }
}

/// The features that are about the rings themselves. DPDK offers all of it.
const RINGS: Features =
    Features::RING_PACKED.union(Features::IN_ORDER).union(Features::EVENT_IDX).union(Features::INDIRECT_DESC);

/// Every kind of ring with every layout of receive buffers, one after another on the same device.
fn forwards_in_every_receive_mode(ring: Features) {
    let Some(testpmd) = Bed::start() else { return };
    let all = (Features::DEVICE - Features::RING_PACKED - Features::IN_ORDER) | ring;
    let big = all - Features::MRG_RXBUF;
    for receive in [all, big, big - Features::GUEST_SEGMENTATION] {
        forwards(&testpmd, receive);
    }
    for without in
        [Features::EVENT_IDX, Features::INDIRECT_DESC, Features::EVENT_IDX | Features::INDIRECT_DESC]
    {
        forwards(&testpmd, all - without);
    }
}

#[test]
fn our_driver_speaks_with_dpdk_net_vhost_over_split_rings() {
    forwards_in_every_receive_mode(Features::empty());
}

#[test]
fn our_driver_speaks_with_dpdk_net_vhost_over_split_rings_in_order() {
    forwards_in_every_receive_mode(Features::IN_ORDER);
}

#[test]
fn our_driver_speaks_with_dpdk_net_vhost_over_packed_rings() {
    forwards_in_every_receive_mode(Features::RING_PACKED);
}

#[test]
fn our_driver_speaks_with_dpdk_net_vhost_over_packed_rings_in_order() {
    forwards_in_every_receive_mode(Features::RING_PACKED | Features::IN_ORDER);
}
