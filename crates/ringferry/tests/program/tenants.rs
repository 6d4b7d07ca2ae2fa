//! What one guest, or its front end, does to the others on a switch: attacks go on while an innocent pair talks, and the control plane is asked.
//!
//! The names of most tests begin with the number of a finding of issue 16. How long somebody waits depends on the machine, so what is counted is how
//! much of the attacker's work was done meanwhile.

use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use ringferry_memory::RegionSpec;
use ringferry_packet::ether::Mac;
use ringferry_packet::vnet::Header;
use ringferry_rig::frames::{frame, mac, pattern, tcp};
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
    assert!(why.ends_with("[switch] guest_memory_gib allows 8 GiB"), "{why}");
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
