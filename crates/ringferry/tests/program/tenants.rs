//! What one guest, or its front end, does to the others on a switch: attacks go on while an innocent pair talks, and the control plane is asked.
//!
//! The names of most tests begin with the number of a finding of a security review. How long somebody waits depends on the machine, so what is counted is how
//! much of the attacker's work was done meanwhile.

use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use ringferry_memory::RegionSpec;
use ringferry_packet::ether::Mac;
use ringferry_packet::vnet::{F_NEEDS_CSUM, GSO_TCPV4, GSO_TCPV6, GSO_UDP_L4, Header};
use ringferry_rig::frames::{arp, frame, mac, pattern, tagged, tcp};
use ringferry_rig::guest::{Guest, Options, acquaint, converse};
use ringferry_rig::handmade::{Front, HEADER, Shape};
use ringferry_rig::process::eventually;
use ringferry_rig::switch::{Place, Switch, ringferry};
use ringferry_vhost_user::FrontendError;
use ringferry_virtio_net::Features;
use rustix::fs::MemfdFlags;

/// Address of the guest that attacks.
const VILLAIN: Mac = mac(9);
/// Address of a guest that receives from that one, and sends nothing.
const SINK_ADDRESS: Mac = mac(8);
/// Bytes of a buffer that a front end which nobody reads gives for what it receives.
const SINK: u32 = 2048;

/// Ends an attack's thread, also when the test fails.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Carries out `attack` again and again on a thread of its own while `meanwhile` runs.
fn during<T>(mut attack: impl FnMut() + Send, meanwhile: impl FnOnce() -> T) -> T {
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                attack();
            }
        });
        let _over = Over(&over);
        meanwhile()
    })
}

fn median(mut counts: Vec<u64>) -> u64 {
    counts.sort_unstable();
    counts[counts.len() / 2]
}

/// Plugs in the innocent pair, guests 1 and 2 of the ports `a` and `b`, which know each other's addresses.
fn innocent_pair(switch: &Switch<'_>) -> (Guest, Guest) {
    let mut a = switch.plug("a", 1, Options::default());
    let mut b = switch.plug("b", 2, Options::default());
    acquaint(&mut [&mut a, &mut b]);
    (a, b)
}

/// A front end that takes all that it is sent, without offloads, into one buffer, and reads none of it.
fn sink(place: &Place, port: &str, entries: u16) -> Front {
    let shape = Shape { receive: entries, buffers: SINK as usize, ..Shape::default() };
    let mut front = Front::new(&place.socket(port), shape).unwrap();
    front.receive_into(0, SINK).unwrap();
    front.start().unwrap();
    front
}

/// A front end every entry of whose transmitqs is this frame.
fn flooder(place: &Place, port: &str, shape: Shape, (header, frame): (Header, Vec<u8>)) -> Front {
    let shape = Shape { buffers: HEADER + frame.len(), ..shape };
    let mut front = Front::new(&place.socket(port), shape).unwrap();
    let len = front.write_frame(0, &header, &frame).unwrap();
    front.send_from(0, len).unwrap();
    front.start().unwrap();
    front
}

/// The used indices of a front end's rings, from which [`since`] counts.
fn used(front: &Front) -> Vec<u16> {
    front.rings.iter().map(|ring| ring.used().unwrap()).collect()
}

/// The chains that the device has used since the indices were `before`, in all rings together.
fn since(front: &Front, before: &[u16]) -> u64 {
    used(front).iter().zip(before).map(|(now, before)| u64::from(now.wrapping_sub(*before))).sum()
}

/// Writes a configuration file that begins with these lines and has a vhost-user port for each of `ports`.
fn write_file(place: &Place, lines: &str, ports: &[&str]) -> PathBuf {
    let ports = ports.iter().map(|port| {
        format!("[[port]]\nkind = 'vhost-user'\nname = '{port}'\nsocket = {:?}\n", place.socket(port))
    });
    let path = place.path().join("switch.toml");
    let text = format!("control = {:?}\n{lines}\n{}", place.control(), ports.collect::<String>());
    std::fs::write(&path, text).unwrap();
    path
}

/// Broadcast frames of 2000 packets each, for eight receivers that have to get the packets, are in 16 full rings. A worker that took whole bursts of them
/// had hundreds, which are millions of packets, before it looked at the ring of anybody else.
#[test]
fn h3_few_frames_that_become_many_packets_are_served_before_a_frame_of_others() {
    const PAIRS: u16 = 16;
    const MSS: u16 = 32;
    const PACKETS: usize = 2000;
    const RECEIVERS: u8 = 8;
    const ROUNDS: u32 = 40;
    /// Far below a burst, and far above the one frame that is under way.
    const MOST: u64 = 16;
    let place = Place::new();
    let receivers: Vec<String> = (0..RECEIVERS).map(|number| format!("sink{number}")).collect();
    let mut ports = vec!["a,vlan=10".to_owned(), "b,vlan=10".to_owned(), "villain,vlan=20".to_owned()];
    ports.extend(receivers.iter().map(|name| format!("{name},vlan=20")));
    let switch = place.switch(&ports.iter().map(String::as_str).collect::<Vec<_>>());
    let (mut a, mut b) = innocent_pair(&switch);
    // Each has room for several frames.
    let sinks: Vec<_> = receivers.iter().map(|name| sink(&place, name, 16_384)).collect();
    let mut offered = vec![0; sinks.len()];
    let offer_buffers = |offered: &mut Vec<u16>| {
        for (sink, used) in sinks.iter().zip(offered) {
            sink.rings[0].offer(used).unwrap();
        }
    };
    offer_buffers(&mut offered);
    let large = tcp(Mac::BROADCAST, VILLAIN, false, &pattern(1, usize::from(MSS) * PACKETS), MSS);
    let features = Features::CSUM | Features::HOST_TSO4;
    let shape = Shape { pairs: PAIRS, transmit: 256, features, ..Shape::default() };
    let villain = flooder(&place, "villain", shape, large);
    let mut sent = used(&villain);
    let attack = || {
        for (ring, used) in villain.rings.iter().zip(&mut sent).skip(1).step_by(2) {
            ring.offer(used).unwrap();
        }
        offer_buffers(&mut offered);
        std::thread::yield_now();
    };
    let start = used(&villain);
    let between = during(attack, || {
        eventually("the attack has begun", || (since(&villain, &start) > 0).then_some(()));
        let between: Vec<_> = (0..ROUNDS)
            .map(|number| {
                let before = used(&villain);
                let request = frame(b.mac, a.mac, 100, number);
                a.send(&request);
                assert_eq!(b.receive_plain(), request);
                since(&villain, &before)
            })
            .collect();
        // It has its share.
        let packets = || switch.port("sink0").counters["tx_packets"];
        let before = packets();
        eventually("the villain is served, too", || (packets() > before + 10 * PACKETS as u64).then_some(()));
        between
    });
    assert!(median(between.clone()) <= MOST, "frames of the villain before one of others: {between:?}");
    assert_eq!(switch.drops("b", "no-receive-buffers"), 0);
    drop(villain);
    converse(&mut a, &mut b, 1, 40);
    switch.stop();
}

/// Chains of so many buffers, on a page each, that reading one takes longer than to deliver a packet: a frame that becomes 60 packets had one read for each,
/// and in as many queues as the receiver has. What is read in a burst is bounded for the port, and the rest of the packets are not delivered.
#[test]
fn h3_a_receiver_with_long_chains_in_many_queues_is_given_what_one_burst_may_cost() {
    const LINKS: u16 = 64;
    const MSS: usize = 1000;
    const PACKETS: usize = 60;
    const FRAMES: usize = 4;
    let place = Place::new();
    let switch = place.switch(&["sink", "villain"]);
    let shape = Shape { pairs: 4, receive: 4096, buffers: 4096 * 4096, ..Shape::default() };
    let mut sink = Front::new(&place.socket("sink"), shape).unwrap();
    sink.receive_into_chains(0, LINKS, SINK).unwrap();
    sink.start().unwrap();
    sink.receiveqs().for_each(|ring| ring.set_available(PACKETS as u16).unwrap());
    // Each frame is of a flow of its own.
    let frames = (0..FRAMES).map(|flow| {
        let (header, mut frame) = tcp(Mac::BROADCAST, VILLAIN, false, &pattern(1, MSS * PACKETS), MSS as u16);
        frame[35] ^= flow as u8;
        (header, frame)
    });
    let frames: Vec<_> = frames.collect();
    let apart = HEADER + frames[0].1.len();
    let features = Features::CSUM | Features::HOST_TSO4;
    let (transmit, buffers) = (FRAMES as u16, (FRAMES + 1) * apart);
    let shape = Shape { buffers, transmit, features, ..Shape::default() };
    let mut villain = Front::new(&place.socket("villain"), shape).unwrap();
    for (at, (header, frame)) in frames.iter().enumerate() {
        villain.write_frame(at * apart, header, frame).unwrap();
    }
    // A port's first turn is one frame.
    let small = frame(Mac::BROADCAST, VILLAIN, 60, 0);
    let small = villain.write_frame(FRAMES * apart, &Header::default(), &small).unwrap();
    villain.send_from(FRAMES * apart, small).unwrap();
    villain.start().unwrap();
    villain.rings[1].set_available(1).unwrap();
    villain.rings[1].kick.signal().unwrap();
    eventually("the first turn is over", || (villain.rings[1].used().unwrap() == 1).then_some(()));
    villain.send_from_all_over(apart, apart).unwrap();
    villain.rings[1].offer(&mut 0).unwrap();
    let outcome = || {
        let (passed, refused) =
            (switch.port("sink").counters["tx_packets"], switch.drops("sink", "dear-buffers"));
        (passed + refused == (1 + FRAMES * PACKETS) as u64).then_some((passed, refused))
    };
    let (passed, refused) = eventually("all packets are delivered or dropped", outcome);
    // 44 of each chain are more than is usual, and what is read ahead counts, too.
    assert!((20..=60).contains(&passed), "{passed} were delivered and {refused} were not");
    switch.stop();
}

/// A front end sends its memory map as fast as the socket takes it; each time 32 rings are stopped and started. A question of another one is answered after a few of these
/// messages, and who disturbs the worker so often is made to wait.
#[test]
fn h5_a_question_is_answered_between_the_messages_of_who_sets_its_memory_map_without_end() {
    const ROUNDS: u32 = 60;
    /// Far below the 64 messages that a session may have served in a turn.
    const MOST: u64 = 16;
    /// Disturbances in a row that a port may cause, and those that it may cause in each second after that.
    const ALLOWANCE: [u64; 2] = [200, 20];
    let place = Place::new();
    let switch = place.switch(&["a", "b", "villain", "asks"]);
    let (mut a, mut b) = innocent_pair(&switch);
    let mut asks = Front::new(&place.socket("asks"), Shape::default()).unwrap();
    let shape = Shape { pairs: 16, acknowledged: false, ..Shape::default() };
    let mut villain = Front::new(&place.socket("villain"), shape).unwrap();
    villain.start().unwrap();
    // The answer comes when all before it was served.
    villain.frontend().get_features().unwrap();
    let served = || switch.port("villain").counters["messages"];
    let (first, begin) = (served(), Instant::now());
    let attack = || drop(villain.set_mem_table());
    let between = during(attack, || {
        let question = |number| {
            let before = served();
            asks.frontend().get_features().unwrap();
            let between = served() - before;
            converse(&mut a, &mut b, number, 4);
            between
        };
        (0..ROUNDS).map(question).collect::<Vec<_>>()
    });
    let (all, seconds) = (served() - first, begin.elapsed().as_secs() + 1);
    let served: Vec<_> = between.iter().copied().filter(|count| *count > 0).collect();
    assert!(!served.is_empty(), "the villain is served, too");
    assert!(median(served) <= MOST, "messages of the villain before an answer to another: {between:?}");
    assert!(all <= ALLOWANCE[0] + ALLOWANCE[1] * seconds, "{all} messages in {seconds} s");
    drop(villain);
    converse(&mut a, &mut b, 1, 40);
    switch.stop();
}

/// Regions of memory files that have no pages and fill the address space.
#[test]
fn h2_memory_beyond_the_budget_is_refused_and_its_front_end_is_told_by_name() {
    const GIB: u64 = 1 << 30;
    /// Configured limits of a port and of all of them.
    const PORT: u64 = 4;
    const ALL: u64 = 8;
    /// Addresses that the villain makes up, far more than the table of addresses holds.
    const ADDRESSES: u32 = 5_000;
    let place = Place::new();
    let lines =
        format!("[switch]\nport_memory_gib = {PORT}\nguest_memory_gib = {ALL}\nmac_table_size = 1024");
    let file = write_file(&place, &lines, &["a", "b", "villain", "second"]);
    let switch = place.start(ringferry().arg("run").arg(file), Vec::new());
    let (mut a, mut b) = innocent_pair(&switch);
    let add = |front: &mut Front, gib: u64| {
        let file = rustix::fs::memfd_create("sparse", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, gib * GIB).unwrap();
        // Each where there is room: far from the rings, and apart from the others.
        let at = (1 << 50) + gib * (1 << 44);
        let region = RegionSpec { guest_addr: at, size: gib * GIB, user_addr: at, mmap_offset: 0 };
        match front.frontend().add_mem_reg(region, file.as_fd()) {
            Ok(()) => true,
            Err(FrontendError::Refused(_)) => false,
            Err(error) => panic!("{error}"),
        }
    };
    let front = |port: &str| Front::new(&place.socket(port), Shape::default()).unwrap();
    let mut villain = front("villain");
    assert_eq!(
        [128 << 10, PORT + 1, PORT - 1, 1].map(|gib| add(&mut villain, gib)),
        [false, false, true, true]
    );
    assert!(!add(&mut villain, 2), "its port has all that it may have");
    let why = switch.port("villain").fault.unwrap();
    assert!(why.ends_with("2 GiB of guest memory cannot be mapped beside the 4 GiB that are: [switch] port_memory_gib allows 4 GiB"), "{why}");
    assert!(place.ctl(&["show", "villain"]).contains(&why));
    // A front end of its own is no way around it.
    let mut second = front("second");
    assert!(
        !add(&mut second, PORT),
        "all ports together have what they may have, with the memory of the innocent pair"
    );
    let why = switch.port("second").fault.unwrap();
    assert!(why.contains("[switch] guest_memory_gib allows 8 GiB"), "{why}");
    drop(second);
    converse(&mut a, &mut b, 1, 40);
    // Somebody sends from as many addresses as there are, while the villain has what it has; and the switch tells of both.
    let mut second = switch.plug("second", 9, Options::default());
    for number in 0..ADDRESSES {
        let [_, c, d, e] = number.to_be_bytes();
        second.put(&Header::default(), &frame(b.mac, Mac([2, 0, 0, c, d, e]), 60, number));
    }
    second.drain();
    b.pump();
    while b.take().is_some() {}
    let shown = place.ctl(&["show"]);
    assert!(shown.contains("[switch] port_memory_gib allows 4 GiB"), "{shown}");
    assert!(switch.show().fdb.addresses() > 100, "the flood is learned");
    converse(&mut a, &mut b, 100, 40);
    switch.stop();
}

/// From an access port in a trunk's native VLAN, for a next hop that strips the first tag and takes the second for the VLAN.
#[test]
fn m1_a_tag_behind_a_tag_does_not_leave_a_trunk_from_an_access_port() {
    const NATIVE: u16 = 10;
    const OTHER: u16 = 20;
    const CUSTOMER: [u8; 2] = [0x81, 0];
    const SERVICE: [u8; 2] = [0x88, 0xa8];
    let place = Place::new();
    let trunk = format!("trunk,trunk={NATIVE},{OTHER},native={NATIVE}");
    let switch = place.switch(&[&format!("a,vlan={NATIVE}"), &trunk]);
    let mut a = switch.plug("a", 1, Options::default());
    let mut t = switch.plug("trunk", 2, Options::default());
    let hidden = |to: Mac, number| tagged(&frame(to, a.mac, 100, number), OTHER);
    let behind = |kind: [u8; 2], vid: u16, inner: &[u8]| {
        [&inner[..12], &kind, &vid.to_be_bytes(), &inner[12..]].concat()
    };
    // Behind a priority tag or a service tag, and at once.
    let mut hops = Vec::new();
    for to in [Mac::BROADCAST, t.mac] {
        for (kind, vid) in [(CUSTOMER, 0), (SERVICE, 0), (SERVICE, OTHER)] {
            hops.push(behind(kind, vid, &hidden(to, hops.len() as u32)));
        }
        hops.push(hidden(to, hops.len() as u32));
    }
    // Behind the tag of the VLAN that both are in, which would not be removed in front of another one.
    hops.push(behind(CUSTOMER, NATIVE, &hidden(t.mac, 98)));
    // The switch knows where both are, so that frames to one address take the short way.
    acquaint(&mut [&mut a, &mut t]);
    hops.iter().for_each(|hop| a.put(&Header::default(), hop));
    let honest = frame(t.mac, a.mac, 100, 99);
    a.send(&honest);
    assert_eq!(t.receive_plain(), honest, "nothing of the frames before it");
    assert_eq!(switch.drops("a", "vlan"), hops.len() as u64);
    // A priority tag alone says nothing of a VLAN, and is taken off.
    let plain = frame(t.mac, a.mac, 100, 100);
    a.send(&behind(CUSTOMER, 0xe000, &plain));
    assert_eq!(t.receive_plain(), plain);
    switch.stop();
}

/// Every one of these reached another guest, which trusts its device.
#[test]
fn m2_virtual_headers_that_are_not_true_of_their_frames_reach_no_other_guest() {
    const MSS: u16 = 1000;
    /// Offsets of TCP's checksum, of the source address and of TCP in a frame of IPv4.
    const CHECKSUM: u16 = 16;
    const SOURCE: u16 = 26;
    const TCP: u16 = 34;
    let place = Place::new();
    let switch = place.switch(&["a", "b", "villain"]);
    let (mut a, mut b) = innocent_pair(&switch);
    let (to_be_cut, large) = tcp(b.mac, VILLAIN, false, &pattern(1, 4 * usize::from(MSS)), MSS);
    let small = tcp(b.mac, VILLAIN, false, &pattern(2, 100), 0).1;
    let arp = {
        let any = [10, 0, 0, 9].into();
        let mut arp = arp(b.mac, VILLAIN, 1, any, Mac::BROADCAST, any);
        arp.resize(large.len(), 0);
        arp
    };
    let cut = |gso_type, gso_size| Header { gso_type, gso_size, ..to_be_cut };
    let sum = |csum_start, csum_offset| Header {
        flags: F_NEEDS_CSUM,
        csum_start,
        csum_offset,
        ..Header::default()
    };
    let lies = [
        ("TCP over IPv4, of ARP", cut(GSO_TCPV4, MSS), &arp),
        ("the same with the size that is the kernel's own mark", cut(GSO_TCPV4, 0xffff), &arp),
        ("TCP over IPv6, of ARP", cut(GSO_TCPV6, MSS), &arp),
        ("UDP, of ARP", cut(GSO_UDP_L4, MSS), &arp),
        ("TCP over IPv6, of IPv4", cut(GSO_TCPV6, MSS), &large),
        ("UDP, of TCP", cut(GSO_UDP_L4, MSS), &large),
        ("packets of one byte", cut(GSO_TCPV4, 1), &large),
        ("the size that is the kernel's own mark", cut(GSO_TCPV4, 0xffff), &large),
        ("a checksum in the source address", sum(SOURCE, 0), &small),
        ("a checksum in the addresses of Ethernet", sum(0, 0), &small),
        (
            "a checksum in the source address, by way of TCP's",
            Header { csum_start: SOURCE - CHECKSUM, ..to_be_cut },
            &large,
        ),
        ("a checksum behind the frame", sum(TCP, 4000), &small),
    ];
    let honest = tcp(b.mac, VILLAIN, false, &pattern(3, 4 * usize::from(MSS)), MSS);
    // Last, the whole truth: at first from a guest that has not negotiated any of it.
    for features in
        [Features::empty(), Features::CSUM | Features::HOST_TSO4 | Features::HOST_TSO6 | Features::HOST_USO]
    {
        let sent: Vec<_> =
            lies.iter().map(|(_, header, frame)| (header, *frame)).chain([(&honest.0, &honest.1)]).collect();
        let plain = frame(b.mac, VILLAIN, 100, features.bits() as u32);
        let last = (&Header::default(), &plain);
        let sent: Vec<_> = sent.into_iter().chain([last]).collect();
        const APART: usize = 8192;
        let shape = Shape { features, transmit: 32, buffers: 32 * APART, ..Shape::default() };
        let mut villain = Front::new(&place.socket("villain"), shape).unwrap();
        let mut lens = vec![0; usize::from(shape.transmit)];
        for (at, (header, frame)) in sent.iter().enumerate() {
            lens[at] = villain.write_frame(at * APART, header, frame).unwrap() as u32;
        }
        let buffers = villain.buffers;
        let buffer = |at: u16| (buffers + u64::from(at) * APART as u64, lens[usize::from(at)]);
        villain.rings[1].fill(buffer, false).unwrap();
        villain.start().unwrap();
        let before = switch.drops("villain", "rx-bad-header");
        villain.rings[1].set_available(sent.len() as u16).unwrap();
        villain.rings[1].kick.signal().unwrap();
        let negotiated = !features.is_empty();
        if negotiated {
            let received = b.receive();
            assert_eq!((received.header.gso_type, received.header.gso_size), (GSO_TCPV4, MSS));
            assert_eq!(received.frame, honest.1);
        }
        assert_eq!(
            b.receive_plain(),
            plain,
            "something came that is not true: one of {:?}",
            lies.map(|(what, ..)| what)
        );
        let lied = lies.len() as u64 + u64::from(!negotiated);
        assert_eq!(switch.drops("villain", "rx-bad-header") - before, lied);
        drop(villain);
    }
    converse(&mut a, &mut b, 1, 40);
    switch.stop();
}

/// What counts is the packets that a frame becomes. The bucket grants one more in a second.
#[test]
fn m4_storm_control_counts_the_packets_of_a_frame_that_is_to_be_cut() {
    const MSS: u16 = 100;
    const PACKETS: usize = 50;
    /// Two frames, and a third that borrows.
    const BURST: usize = 2 * PACKETS;
    const FRAMES: u32 = 40;
    let place = Place::new();
    let switch = place.switch(&[&format!("a,storm=1pps,storm_burst={BURST}"), "b"]);
    let (mut a, mut b) = {
        let plug = |port, number| switch.plug(port, number, Options::default());
        (plug("a", 1), plug("b", 2))
    };
    let begin = Instant::now();
    for number in 0..FRAMES {
        let (header, frame) =
            tcp(Mac::BROADCAST, a.mac, false, &pattern(number, PACKETS * usize::from(MSS)), MSS);
        a.put(&header, &frame);
    }
    a.drain();
    let stormed = switch.drops("a", "storm");
    let through = switch.port("b").counters["tx_packets"];
    let granted = BURST + begin.elapsed().as_secs() as usize + 1;
    assert_eq!(through + stormed, u64::from(FRAMES));
    assert!(through >= 2, "a burst is let through: {through}");
    assert!(through as usize <= granted / PACKETS + 1, "{through} frames of {PACKETS} packets went through");
    for _ in 0..through {
        assert_eq!(b.receive().header.gso_size, MSS);
    }
    switch.stop();
}

/// A flood from one worker to the other is more than that takes: each of its frames becomes many packets there. The innocent pair goes the same way, and no frame of it is
/// lost.
#[test]
fn m5_a_flood_between_two_workers_costs_an_innocent_pair_no_frame() {
    const MSS: u16 = 32;
    const PACKETS: usize = 1000;
    const ROUNDS: u32 = 200;
    /// Frames that the pair has under way.
    const BURST: u32 = 48;
    let place = Place::new();
    let sink_port = format!("sink,worker=1,static_macs={SINK_ADDRESS}");
    let ports = ["a,worker=0", "b,worker=1", "villain,worker=0", &sink_port];
    let switch = place.start(place.run(&ports).args(["--workers", "2"]), Vec::new());
    let (mut a, mut b) = innocent_pair(&switch);
    let sink = sink(&place, "sink", 16_384);
    let large = tcp(SINK_ADDRESS, VILLAIN, false, &pattern(1, usize::from(MSS) * PACKETS), MSS);
    let features = Features::CSUM | Features::HOST_TSO4;
    let villain = flooder(&place, "villain", Shape { features, ..Shape::default() }, large);
    let (mut taken, mut sent) = (0, 0);
    let attack = || {
        sink.rings[0].offer(&mut taken).unwrap();
        villain.rings[1].offer(&mut sent).unwrap();
        std::thread::yield_now();
    };
    let held = || switch.port("villain").counters["rx_held_microseconds"];
    during(attack, || {
        eventually("the flood is more than the other worker takes", || (held() > 0).then_some(()));
        for number in 0..ROUNDS {
            converse(&mut a, &mut b, BURST * number, BURST);
        }
        let before = held();
        eventually("the flood still is", || (held() > before).then_some(()));
    });
    assert_eq!(["a", "b"].map(|port| switch.drops(port, "worker-busy")), [0, 0]);
    switch.stop();
}

/// SET_VRING_ENABLE(0) on a ring of 32768 entries, each a chain of 256 descriptors. All that it held was forwarded in one command, for which everybody waited.
#[test]
fn h4_a_full_ring_that_is_disabled_is_not_emptied_in_one_go() {
    const ENTRIES: u16 = 32_768;
    const CHAIN: u16 = 256;
    const ROUNDS: u32 = 5;
    let place = Place::new();
    let switch = place.switch(&["a", "b", "villain", &format!("sink,static_macs={SINK_ADDRESS}")]);
    let (mut a, mut b) = innocent_pair(&switch);
    let shape = Shape { transmit: ENTRIES, acknowledged: false, enabled: false, ..Shape::default() };
    let mut villain = Front::new(&place.socket("villain"), shape).unwrap();
    let len = villain.write_frame(0, &Header::default(), &frame(SINK_ADDRESS, VILLAIN, 1514, 1)).unwrap();
    let (buffers, part) = (villain.buffers, (len as u32).div_ceil(CHAIN.into()));
    villain.rings[1].chain(CHAIN, buffers, part).unwrap();
    villain.start().unwrap();
    let mut offered = 0;
    let forwarded = || switch.port("villain").counters["rx_packets"];
    let mut rounds = Vec::new();
    for number in 0..ROUNDS {
        villain.rings[1].offer(&mut offered).unwrap();
        let before = forwarded();
        for enable in [true, false] {
            villain.frontend().set_vring_enable(1, enable).unwrap();
        }
        villain.frontend().get_features().unwrap();
        converse(&mut a, &mut b, number, 4);
        rounds.push(forwarded() - before);
    }
    // The ring is served between the two messages, too, for as long as the machine likes.
    assert!(rounds.iter().any(|count| *count < u64::from(ENTRIES) / 2), "forwarded of {ENTRIES}: {rounds:?}");
    drop(villain);
    converse(&mut a, &mut b, 1, 40);
    switch.stop();
}

/// A rule of weight holds from the moment it is set, is shown, and is kept. Two ports always have frames that cost the same, and what counts is the work that was done for each.
#[test]
fn h3_a_weight_that_is_set_on_a_running_switch_is_kept_and_shares_the_worker() {
    const WEIGHT: u16 = 8;
    const ENTRIES: u16 = 32_768;
    const MSS: u16 = 1448;
    const LEN: usize = 64_000;
    /// Bytes of a buffer that holds the largest frame.
    const BUFFER: u32 = 1 << 17;
    /// Work after which the shares of the ports are compared, in nanoseconds.
    const WORK: u64 = 50_000_000;
    let place = Place::new();
    let file = write_file(&place, "[switch]\nworkers = 1", &["heavy", "light", "sink"]);
    let switch = place.start(ringferry().arg("run").arg(&file), Vec::new());
    let shape = Shape {
        receive: ENTRIES,
        buffers: BUFFER as usize,
        features: Features::GUEST_CSUM | Features::GUEST_TSO4,
        ..Shape::default()
    };
    let mut sink = Front::new(&place.socket("sink"), shape).unwrap();
    sink.receive_into(0, BUFFER).unwrap();
    sink.start().unwrap();
    switch.set("sink", &[&format!("static_macs={SINK_ADDRESS}")]);
    let send = |port: &str, number: u8| {
        let large = tcp(SINK_ADDRESS, mac(number), false, &pattern(1, LEN), MSS);
        let features = Features::CSUM | Features::HOST_TSO4;
        flooder(&place, port, Shape { transmit: ENTRIES, features, ..Shape::default() }, large)
    };
    let (heavy, light) = (send("heavy", 1), send("light", 2));
    let rings = [&sink.rings[0], &heavy.rings[1], &light.rings[1]];
    let mut used = [0; 3];
    let attack = || {
        for (ring, used) in rings.iter().zip(&mut used) {
            ring.offer(used).unwrap();
        }
        std::thread::yield_now();
    };
    let work = || ["heavy", "light"].map(|port| switch.port(port).counters["work_nanoseconds"]);
    // How many times as much is done for one of them as for the other, from now on.
    let ratio = || {
        let before = work();
        eventually("work is done for both", || {
            let now = work();
            let [heavy, light] = [now[0] - before[0], now[1] - before[1]];
            (heavy.min(light) > WORK).then(|| heavy as f64 / light as f64)
        })
    };
    let ratios = during(attack, || {
        let even = ratio();
        let answer = place.ctl(&["set", "heavy", &format!("weight={WEIGHT}")]);
        assert_eq!(answer, format!("rules of heavy:\n  weight={WEIGHT}\nkept: in {}\n", file.display()));
        switch.show();
        [even, ratio()]
    });
    assert!(ratios[0] < f64::from(WEIGHT) / 2.0 && ratios[1] > f64::from(WEIGHT) / 2.0, "{ratios:?}");
    assert_eq!(place.ctl(&["rules", "heavy"]), format!("rules of heavy:\n  weight={WEIGHT}\n"));
    assert!(place.ctl(&["dump"]).contains(&format!("weight = {WEIGHT}\n")));
    assert!(std::fs::read_to_string(&file).unwrap().contains(&format!("weight = {WEIGHT}\n")));
    switch.stop();
}

/// Frames between neighbours, and those from addresses that no station has, are a switch's own affair, but for a port that is a wire.
#[test]
fn reserved_addresses_are_forwarded_from_a_port_that_says_so_and_from_no_other() {
    let reserved = |last: u8| Mac([0x01, 0x80, 0xc2, 0, 0, last]);
    let place = Place::new();
    let switch = place.switch(&["wire,reserved=forward", "guest", "b"]);
    let mut wire = switch.plug("wire", 1, Options::default());
    let mut guest = switch.plug("guest", 2, Options::default());
    let mut b = switch.plug("b", 3, Options::default());
    acquaint(&mut [&mut wire, &mut guest, &mut b]);
    // Spanning tree, PAUSE, LACP, LLDP and all the others; and sources that are a group, everybody, and nobody.
    let neighbours = |from: Mac| (0..16).map(move |last| frame(reserved(last), from, 60, last.into()));
    let forged =
        |to: Mac| [Mac([1, 0, 0, 0, 0, 1]), Mac::BROADCAST, Mac([0; 6])].map(|from| frame(to, from, 60, 1));
    let all = |from: Mac, to: Mac| neighbours(from).chain(forged(to)).collect::<Vec<_>>();
    for frame in all(wire.mac, b.mac) {
        wire.send(&frame);
        assert_eq!(b.receive_plain(), frame);
    }
    // What is flooded from the wire reaches the guest, too.
    converse(&mut wire, &mut b, 1, 10);
    guest.pump();
    while guest.take().is_some() {}
    let from_guest = all(guest.mac, b.mac);
    from_guest.iter().for_each(|frame| guest.put(&Header::default(), frame));
    converse(&mut guest, &mut b, 1, 10);
    let drops = |port: &str| switch.drops(port, "reserved");
    assert_eq!((drops("guest"), drops("wire")), (from_guest.len() as u64, 0));
    // On the running switch, either way.
    switch.set("guest", &["reserved=forward"]);
    guest.send(&from_guest[0]);
    assert_eq!((wire.receive_plain(), b.receive_plain()), (from_guest[0].clone(), from_guest[0].clone()));
    place.ctl(&["unset", "wire", "reserved"]);
    wire.send(&frame(reserved(0), wire.mac, 60, 1));
    converse(&mut wire, &mut b, 2, 10);
    assert_eq!(drops("wire"), 1);
    switch.stop();
}
