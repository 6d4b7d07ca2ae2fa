//! Every frame goes where it belongs, whole and in order, whatever each guest negotiated.

use ringferry_control::snapshot::{Negotiated, PortState};
use ringferry_packet::checksum;
use ringferry_packet::ether::Mac;
use ringferry_packet::vnet::{F_NEEDS_CSUM, GSO_TCPV4, Header};
use ringferry_rig::frames::{SEQUENCE, frame, mac, number, pattern, tcp, tcp_headers};
use ringferry_rig::guest::{Guest, Options, Received, acquaint, converse};
use ringferry_rig::switch::Place;
use ringferry_virtio_net::{Features, MAX_FRAME};

const SEGMENTATION: Features = Features::GUEST_SEGMENTATION
    .union(Features::HOST_TSO4)
    .union(Features::HOST_TSO6)
    .union(Features::HOST_ECN)
    .union(Features::HOST_USO);
const CHECKSUMS: Features = Features::CSUM.union(Features::GUEST_CSUM);

/// Sets of offloads that a guest can do itself, from all to none.
const OFFLOADS: [(&str, Features); 3] = [
    ("csum and tso", Features::DEVICE),
    ("csum", Features::DEVICE.difference(SEGMENTATION)),
    ("nothing", Features::DEVICE.difference(SEGMENTATION.union(CHECKSUMS))),
];

fn with(features: Features) -> Options {
    Options { features, ..Options::default() }
}

#[test]
fn unknown_and_broadcast_reach_all_others_and_learnt_unicast_only_its_port() {
    let place = Place::new();
    let switch = place.switch(&["a", "b", "c"]);
    let mut a = switch.plug("a", 1, Options::default());
    let mut b = switch.plug("b", 2, Options::default());
    let mut c = switch.plug("c", 3, Options::default());

    // Nobody knows b yet.
    let unknown = frame(b.mac, a.mac, 80, 1);
    a.send(&unknown);
    assert_eq!(b.receive_plain(), unknown);
    assert_eq!(c.receive_plain(), unknown);
    // Now a is known, so the answer goes to it alone; and with it b is.
    converse(&mut b, &mut a, 10, 30);
    let multicast = frame(Mac([0x33, 0x33, 0, 0, 0, 1]), a.mac, 90, 2);
    a.send(&multicast);
    assert_eq!(b.receive_plain(), multicast);
    // The first that c sees since: not one of the conversation's 60 frames.
    assert_eq!(c.receive_plain(), multicast);
    let broadcast = frame(Mac::BROADCAST, b.mac, 1514, 3);
    b.send(&broadcast);
    assert_eq!(c.receive_plain(), broadcast);
    // And none of its own for a, or b.
    assert_eq!(a.receive_plain(), broadcast);
    let last = frame(Mac::BROADCAST, c.mac, 60, 4);
    c.send(&last);
    assert_eq!((a.receive_plain(), b.receive_plain()), (last.clone(), last));

    let fdb = switch.show().fdb;
    let entries: Vec<_> = fdb.entries.iter().map(|entry| (entry.mac, entry.port.as_str())).collect();
    let known = [(mac(1), "a"), (mac(2), "b"), (mac(3), "c")];
    assert_eq!(entries, known);
    switch.stop();
}

#[test]
fn a_guest_that_moves_is_found_at_its_new_port() {
    let place = Place::new();
    let switch = place.switch(&["a", "b", "c"]);
    let mut a = switch.plug("a", 1, Options::default());
    let mut b = switch.plug("b", 2, Options::default());
    let mut c = switch.plug("c", 3, Options::default());
    acquaint(&mut [&mut a, &mut b, &mut c]);
    // The guest behind b is migrated to c: its back end announces it there.
    c.connection.frontend().send_rarp(b.mac.0).unwrap();
    assert_eq!(a.receive_plain().len(), 60);
    assert_eq!(b.receive_plain().len(), 60);
    c.mac = b.mac;
    converse(&mut a, &mut c, 1, 10);
    // Nothing of that went to the old place.
    let end = frame(Mac::BROADCAST, a.mac, 60, 2);
    a.send(&end);
    assert_eq!(b.receive_plain(), end);
    switch.stop();
}

#[test]
fn eight_guests_all_to_all_keep_every_flow_in_order() {
    const GUESTS: u8 = 8;
    const ROUNDS: u32 = 24;
    const BURST: u32 = 8;
    let names: Vec<String> = (0..GUESTS).map(|number| format!("vm{number}")).collect();
    let place = Place::new();
    let switch = place.switch(&names.iter().map(String::as_str).collect::<Vec<_>>());
    let mut guests: Vec<Guest> = (0..GUESTS)
        .map(|number| switch.plug(&names[usize::from(number)], number, Options::default()))
        .collect();
    acquaint(&mut guests.iter_mut().collect::<Vec<_>>());
    // Sizes that differ from frame to frame, within one buffer and beyond.
    let size = |number: u32| 18 + (number as usize * 131) % 5000;
    for round in 0..ROUNDS {
        for from in &mut guests {
            let me = from.mac;
            for to in (0..GUESTS).map(mac).filter(|to| *to != me) {
                for number in round * BURST..(round + 1) * BURST {
                    let frame = frame(to, me, size(number), number);
                    from.put(&Header::default(), &frame);
                }
            }
            from.flush();
        }
        for guest in &mut guests {
            let mut next = [round * BURST; GUESTS as usize];
            for _ in 0..u32::from(GUESTS - 1) * BURST {
                let bytes = guest.receive_plain();
                let sender = bytes[11];
                let expected = &mut next[usize::from(sender)];
                assert_eq!(number(&bytes), *expected, "out of order");
                assert!(bytes == frame(guest.mac, mac(sender), size(*expected), *expected), "changed");
                *expected += 1;
            }
        }
    }
    switch.assert_no_drops();
    switch.stop();
}

/// Every size of a frame up to an MTU of 1500, and beyond it every size at which something begins: a
/// buffer, a page, a piece. Through receive buffers of each layout, in both directions.
#[test]
fn payload_of_every_size_arrives_byte_for_byte() {
    let place = Place::new();
    let switch = place.switch(&["a", "b"]);
    let large = (1..=16).flat_map(|pages| {
        let edge = pages * 4096 - Header::LEN;
        [edge - 1, edge, edge + 1, edge + 12, edge + 13]
    });
    let large: Vec<usize> =
        large.filter(|len| *len > 1514).chain([9014, 65_549, 65_550, MAX_FRAME]).collect();
    let layouts = [
        ("mergeable", Features::DEVICE, &large[..]),
        ("mergeable, no event index", Features::DEVICE.difference(Features::EVENT_IDX), &large[..]),
        ("big", Features::DEVICE.difference(Features::MRG_RXBUF), &large[..]),
        ("small", Features::DEVICE.difference(Features::MRG_RXBUF | SEGMENTATION), &[1518][..]),
        ("bare", Features::VERSION_1, &[1518][..]),
    ];
    for (name, features, large) in layouts {
        let mut a = switch.plug("a", 1, with(features));
        let mut b = switch.plug("b", 2, with(features));
        assert_eq!(a.features.difference(features), Features::empty());
        acquaint(&mut [&mut a, &mut b]);
        let sizes: Vec<usize> = (14..=1514).chain(large.iter().copied()).collect();
        // Four of the longest fit what is posted, however short the buffers are.
        for (index, sizes) in sizes.chunks(4).enumerate() {
            let (from, to) = if index % 2 == 0 { (&mut a, &mut b) } else { (&mut b, &mut a) };
            for &len in sizes {
                let frame = frame(to.mac, from.mac, len, len as u32);
                from.put(&Header::default(), &frame);
            }
            from.flush();
            for &len in sizes {
                let received = to.receive_plain();
                assert!(received == frame(to.mac, from.mac, len, len as u32), "{name}: {len} bytes");
            }
        }
        drop((a, b));
        switch.until_state("a", PortState::Listening);
        switch.until_state("b", PortState::Listening);
    }
    switch.stop();
}

/// A frame too large for the buffers that its receiver posts is counted, and the next one arrives.
#[test]
fn a_frame_larger_than_small_buffers_is_dropped_and_counted() {
    let place = Place::new();
    let switch = place.switch(&["a", "b"]);
    let mut a = switch.plug("a", 1, Options::default());
    let small = Features::DEVICE.difference(Features::MRG_RXBUF | SEGMENTATION);
    let mut b = switch.plug("b", 2, with(small));
    acquaint(&mut [&mut a, &mut b]);
    a.send(&frame(b.mac, a.mac, 1600, 1));
    converse(&mut a, &mut b, 2, 1);
    assert_eq!(switch.port("b").drops["tx-too-big"], 1);
    switch.stop();
}

/// Receives a TCP frame with `payload` and checks it segment by segment; returns how many segments there were.
#[track_caller]
fn check_segments(
    case: &str,
    receiver: &mut Guest,
    sent: &(Header, Vec<u8>),
    v6: bool,
    payload: &[u8],
    mss: usize,
) -> usize {
    let head = tcp_headers(v6);
    let takes = receiver.features.guest_offloads();
    let mut at = 0;
    let mut count = 0;
    while at < payload.len() || count == 0 {
        let Received { header, mut frame } = receiver.receive();
        // Nothing the receiver has not agreed to.
        assert!(takes.accepts(&header), "{header:?}");
        if header.is_gso() {
            assert_eq!((header.gso_type, header.gso_size), (sent.0.gso_type, sent.0.gso_size));
            assert_eq!(frame, sent.1, "a whole frame is as it was sent");
        }
        if header.needs_csum() {
            let header = Header { gso_type: 0, gso_size: 0, ..header };
            checksum::complete(&header, &mut frame).unwrap();
        }
        let layers = checksum::verify(&frame).unwrap();
        assert_eq!((layers.l4, layers.payload), (head - 20, head));
        assert!(header.is_gso() || mss == 0 || frame.len() <= head + mss);
        let sequence = u32::from_be_bytes(frame[head - 16..head - 12].try_into().unwrap());
        assert_eq!(sequence.wrapping_sub(SEQUENCE), at as u32, "{case}: segments in order");
        let part = &frame[head..];
        assert!(part == &payload[at..at + part.len()], "{case}: payload differs behind byte {at}");
        // PSH only on the last one.
        assert_eq!(frame[head - 7] & 8 != 0, at + part.len() == payload.len());
        at += part.len();
        count += 1;
    }
    count
}

/// VIRTIO 1.4, 5.1.6.4: a device delivers nothing that the driver has not negotiated. Each kind of sender
/// to each kind of receiver, with mergeable buffers and without.
#[test]
fn every_sender_reaches_every_receiver_with_the_offloads_it_takes() {
    let place = Place::new();
    let switch = place.switch(&["a", "b"]);
    for (sender_has, sender) in OFFLOADS {
        for (receiver_has, receiver) in OFFLOADS {
            for mergeable in [true, false] {
                let layout = if mergeable { Features::empty() } else { Features::MRG_RXBUF };
                let case = format!("from {sender_has} to {receiver_has}, mergeable {mergeable}");
                let mut a = switch.plug("a", 1, with(sender.difference(layout)));
                let mut b = switch.plug("b", 2, with(receiver.difference(layout)));
                acquaint(&mut [&mut a, &mut b]);
                for v6 in [false, true] {
                    if sender.contains(Features::CSUM) {
                        let payload = pattern(7, 1401);
                        let sent = tcp(b.mac, a.mac, v6, &payload, 0);
                        a.put(&sent.0, &sent.1);
                        a.flush();
                        assert_eq!(check_segments(&case, &mut b, &sent, v6, &payload, 0), 1, "{case}");
                    }
                    if sender.contains(Features::HOST_TSO4) {
                        // The largest IPv4 packet, and one whose last segment has a single byte.
                        for (len, mss) in [(65_535 - 40, 1440), (1428 * 3 + 1, 1428), (500, 1428)] {
                            let payload = pattern(len as u32, len);
                            let sent = tcp(b.mac, a.mac, v6, &payload, mss);
                            a.put(&sent.0, &sent.1);
                            a.flush();
                            let mss = usize::from(mss);
                            let count = check_segments(&case, &mut b, &sent, v6, &payload, mss);
                            let whole = receiver.contains(Features::GUEST_TSO4);
                            assert_eq!(count, if whole { 1 } else { len.div_ceil(mss) }, "{case}");
                        }
                    }
                }
                converse(&mut a, &mut b, 100, 5);
                drop((a, b));
                switch.until_state("a", PortState::Listening);
                switch.until_state("b", PortState::Listening);
            }
        }
    }
    switch.assert_no_drops();
    switch.stop();
}

#[test]
fn features_switched_off_for_a_port_are_not_offered_there() {
    let place = Place::new();
    let switch = place.switch(&[
        "a,csum=off,mergeable=off,event_idx=off,indirect=off,packed=off,in_order=off",
        "b,tso=off,uso=off",
    ]);
    let mut a = switch.plug("a", 1, Options::default());
    let mut b = switch.plug("b", 2, Options::default());
    assert_eq!(a.features, Features::VERSION_1);
    assert_eq!(b.features, Features::DEVICE.difference(SEGMENTATION));
    assert_eq!(switch.port("a").negotiated, Negotiated::VhostUser(Features::VERSION_1));
    acquaint(&mut [&mut a, &mut b]);
    converse(&mut a, &mut b, 1, 10);
    switch.stop();
}

#[test]
fn a_guest_without_buffers_loses_only_its_own_frames_and_they_are_counted() {
    let place = Place::new();
    let switch = place.switch(&["a", "b", "lazy"]);
    let mut a = switch.plug("a", 1, Options::default());
    let mut b = switch.plug("b", 2, Options::default());
    let mut lazy = switch.plug("lazy", 3, Options { posts: false, ..Options::default() });
    acquaint(&mut [&mut a, &mut b]);
    for number in 0..200 {
        let frame = frame(Mac::BROADCAST, a.mac, 300, number);
        a.send(&frame);
        assert_eq!(b.receive_plain(), frame);
    }
    // 200, and the two with which a and b made themselves known.
    let port = switch.port("lazy");
    assert_eq!((port.drops["no-receive-buffers"], port.counters["tx_packets"]), (202, 0));
    assert_eq!(port.state, PortState::Up);
    // With buffers it takes part like everyone.
    let late = frame(Mac::BROADCAST, lazy.mac, 60, 1);
    lazy.send(&late);
    assert_eq!((a.receive_plain(), b.receive_plain()), (late.clone(), late));
    assert!(lazy.pair.fault().is_none());
    drop(lazy);
    switch.until_state("lazy", PortState::Listening);
    let mut eager = switch.plug("lazy", 3, Options::default());
    converse(&mut a, &mut eager, 1, 100);
    switch.stop();
}

/// Every frame that was sent is found again: delivered, or dropped for one reason at one port.
#[test]
fn counters_account_for_every_frame() {
    let place = Place::new();
    let switch = place.switch(&["a", "b", "lazy", "empty"]);
    let mut a = switch.plug("a", 1, Options::default());
    let small = Features::DEVICE.difference(Features::MRG_RXBUF | SEGMENTATION);
    let mut b = switch.plug("b", 2, with(small));
    let _lazy = switch.plug("lazy", 3, Options { posts: false, ..Options::default() });
    // b makes itself known: a takes it, the other two do not.
    b.send(&frame(Mac::BROADCAST, b.mac, 60, 0));
    a.receive_plain();

    a.send_numbered(b.mac, 0, 100);
    b.expect_numbered(a.mac, 0, 100);
    for number in 0..50 {
        a.send(&frame(Mac::BROADCAST, a.mac, 200, number));
        b.receive_plain();
    }
    for number in 0..10 {
        a.send(&frame(a.mac, a.mac, 60, number));
    }
    for number in 0..5 {
        a.send(&frame(b.mac, a.mac, 3000, number));
    }
    a.send_unchecked(&[]);
    for len in 1..13 {
        a.send(&frame(b.mac, a.mac, 14, 0)[..len]);
    }
    for _ in 0..3 {
        a.send_unchecked(&frame(b.mac, a.mac, MAX_FRAME + 1, 0));
    }
    let impossible = [
        Header { flags: F_NEEDS_CSUM, csum_start: 90, csum_offset: 9, ..Header::default() },
        Header { gso_type: GSO_TCPV4, gso_size: 100, ..Header::default() },
        Header { flags: F_NEEDS_CSUM, gso_type: 2, gso_size: 100, csum_start: 34, ..Header::default() },
        Header { flags: F_NEEDS_CSUM, gso_type: GSO_TCPV4, csum_start: 34, ..Header::default() },
    ];
    for header in &impossible {
        a.put(header, &frame(b.mac, a.mac, 100, 0));
    }
    a.flush();
    let payload = pattern(1, 14_000);
    let sent = tcp(b.mac, a.mac, false, &payload, 1400);
    a.put(&sent.0, &sent.1);
    a.flush();
    assert_eq!(check_segments("counted", &mut b, &sent, false, &payload, 1400), 10);
    a.drain();

    let show = switch.ctl_show();
    let port = |name: &str| show.ports.iter().find(|port| port.name == name).unwrap();
    let dropped = |name: &str| -> Vec<(&str, u64)> {
        let drops = port(name).drops.iter().filter(|(_, count)| **count > 0);
        drops.map(|(reason, count)| (reason.as_str(), *count)).collect()
    };
    assert_eq!(
        dropped("a"),
        [("rx-bad-header", 4), ("rx-too-big", 3), ("rx-too-short", 13), ("same-port", 10)]
    );
    assert_eq!(dropped("b"), [("tx-too-big", 5)]);
    assert_eq!(dropped("lazy"), [("no-receive-buffers", 51)]);
    assert_eq!(dropped("empty"), [("link-down", 51)]);
    let counter = |name: &str, counter: &str| port(name).counters[counter];
    assert_eq!(counter("a", "rx_packets"), 100 + 50 + 10 + 5 + 13 + 3 + 4 + 1);
    assert_eq!(counter("b", "rx_packets"), 1);
    assert_eq!((counter("a", "tx_packets"), counter("b", "tx_packets")), (1, 100 + 50 + 10));
    assert_eq!(counter("b", "tx_bytes"), 100 * 100 + 50 * 200 + 10 * 54 + 14_000);
    assert_eq!((counter("lazy", "tx_packets"), counter("empty", "tx_packets")), (0, 0));

    // In sum: a flooded frame has three outcomes, a segmented one as many as segments.
    let sum = |counters: &dyn Fn(&ringferry_control::snapshot::PortSnapshot) -> u64| -> u64 {
        show.ports.iter().map(counters).sum()
    };
    let received = sum(&|port| port.counters["rx_packets"]);
    let delivered = sum(&|port| port.counters["tx_packets"]);
    let drops = sum(&|port| port.drops.values().sum());
    let (floods, segments) = (51, 10);
    assert_eq!(received + 2 * floods + (segments - 1), delivered + drops);
    switch.stop();
}
