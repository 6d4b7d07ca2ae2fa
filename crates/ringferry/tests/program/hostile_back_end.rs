//! Back ends that break every rule, against `ringferry guest`: it says so, obeys SIGTERM and its control socket, and goes
//! on with the next back end; its tap stays as it is.

use std::net::UdpSocket;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use ringferry_control::{self as control, Answer, ControlError, GuestSnapshot, Request};
use ringferry_memory::{GuestMemory, Words};
use ringferry_packet::testing::{Packet, Sent};
use ringferry_packet::vnet::{GSO_TCPV6, Header};
use ringferry_rig::frames::pattern;
use ringferry_rig::process::{Process, eventually, may_network, readable};
use ringferry_rig::switch::{Place, ringferry};
use ringferry_ring::{Chains, Parts};
use ringferry_sys::eventfd::EventFd;
use ringferry_sys::namespace;
use ringferry_sys::process::Spawn;
use ringferry_sys::socket::{Listener, Stream};
use ringferry_sys::testing::lingering;
use ringferry_vhost_user::{Device, Offer, RingSetup, Session};
use ringferry_virtio_net::Features;
use ringferry_virtio_net::device::Receiveq;
use rustix::fs::OFlags;
use rustix::process::Signal;

const TAP: &str = "eth0";

/// `ringferry guest` in a namespace of its own, and the socket it connects to.
struct Scene {
    place: Place,
    listener: Listener,
    guest: Process,
    control: PathBuf,
}

impl Scene {
    fn new(options: &[&str]) -> Scene {
        Scene::at(options, "x")
    }

    /// With the guest at another socket than that of the scene.
    fn at(options: &[&str], socket: &str) -> Scene {
        let place = Place::new();
        let listener = Listener::bind(place.socket("x").as_path()).unwrap();
        let control = place.path().join("guest.ctl");
        let mut command = ringferry();
        command.args(["-v", "guest", "--tap", TAP, "--address", "10.9.0.1/24"]).args(options);
        command.arg("--control").arg(&control).arg("--socket").arg(place.socket(socket));
        let guest = Process::start(&mut command, Spawn { new_net: true, ..Spawn::default() });
        Scene { place, listener, guest, control }
    }

    /// Waits until the guest connects, as often as it takes.
    #[track_caller]
    fn accept(&self) -> Stream {
        eventually("the guest connects", || self.listener.accept().unwrap())
    }

    /// Asks its control socket; `None` before that exists.
    #[track_caller]
    fn show(&self) -> Option<GuestSnapshot> {
        match control::call(&self.control, &Request::Show { addresses: None }) {
            Ok(Answer::Guest(guest)) => Some(*guest),
            Err(ControlError::NotRunning(_)) => None,
            other => panic!("{other:?}"),
        }
    }

    /// Returns true if a back end serves it.
    #[track_caller]
    fn is_up(&self) -> bool {
        self.show().is_some_and(|guest| guest.up)
    }

    /// Has its kernel send a few broadcasts.
    fn broadcast(&self) {
        let net = namespace::open_net(self.guest.pid()).unwrap();
        let send = move || {
            namespace::join_net(net).unwrap();
            let socket = UdpSocket::bind("10.9.0.1:0").unwrap();
            socket.set_broadcast(true).unwrap();
            for _ in 0..8 {
                socket.send_to(&[1; 200], "10.9.0.255:9").unwrap();
            }
        };
        std::thread::spawn(send).join().unwrap();
    }

    /// It ends when it is told to, and leaves no socket behind.
    #[track_caller]
    fn ends(mut self) {
        self.guest.signal(Signal::TERM);
        let (status, _) = self.guest.wait();
        assert!(status.success(), "{status}");
        assert!(!self.control.exists());
        drop(self.place);
    }
}

/// A device that keeps what it is told.
#[derive(Default)]
struct Villain {
    rings: Vec<(u16, RingSetup)>,
    memory: Option<Arc<GuestMemory>>,
    /// Each kick eventfd holds whoever signals it.
    traps_kicks: bool,
}

impl Device for Villain {
    fn memory_changed(&mut self, memory: Option<Arc<GuestMemory>>) {
        self.memory = memory;
    }
    fn ring_started(&mut self, index: u16, setup: RingSetup) {
        if let Some(kick) = setup.kick.as_ref().filter(|_| self.traps_kicks) {
            trap(kick);
        }
        self.rings.push((index, setup));
    }
    fn ring_call_changed(&mut self, _: u16, _: Option<EventFd>) {}
    fn ring_enabled(&mut self, _: u16, _: bool) {}
    fn ring_stopped(&mut self, _: u16) -> u16 {
        0
    }
}

/// Makes the next signal of this event wait for as long as its counter is full.
fn trap(event: &EventFd) {
    let flags = rustix::fs::fcntl_getfl(event.as_fd()).unwrap();
    rustix::fs::fcntl_setfl(event.as_fd(), flags - OFlags::NONBLOCK).unwrap();
    let _ = event.drain();
    rustix::io::write(event.as_fd(), &(u64::MAX - 1).to_ne_bytes()).unwrap();
}

/// Serves the guest as `device` until `done`, which is asked every few milliseconds, or until the guest hangs up.
#[track_caller]
fn serve(
    stream: Stream,
    features: Features,
    device: &mut Villain,
    mut done: impl FnMut(&mut Villain) -> bool,
) {
    let mut session = Session::new(stream, Offer::net(features.bits(), 1)).unwrap();
    eventually("the back end is done", || {
        if readable(&session, Duration::from_millis(5)) && session.on_readable(device).is_err() {
            return Some(());
        }
        done(device).then_some(())
    });
}

/// Delivers frames with these virtual headers to the receiveq.
#[track_caller]
fn deliver(villain: &Villain, features: Features, frames: &[Sent]) {
    let (_, ring) = villain.rings.iter().find(|(index, _)| *index == 0).expect("a receiveq");
    let mut queue = Receiveq::new(ring.ring().unwrap(), features);
    for (header, frame) in frames {
        assert!(queue.deliver(&mut ring.memory.translator(), *header, frame, &[]).is_ok());
    }
    ring.signal_used(queue.flush()).unwrap();
}

#[test]
fn d5_headers_that_would_deceive_the_kernel_are_dropped() {
    if !may_network() {
        return;
    }
    let packet = Packet::plain(false, true, vec![7; 3000]);
    let (header, frame) = packet.sent(1000);
    let addresses = Header { csum_start: 14, csum_offset: 12, ..header };
    let other = Header { gso_type: GSO_TCPV6, ..header };
    let frames = [header, addresses, other, Header::NONE].map(|header| (header, frame.clone()));
    // Without offloads only the last one makes no false claim, and with them the first as well.
    let nothing = Features::VERSION_1 | Features::MRG_RXBUF;
    for (features, bad, good) in [(nothing, 3, 1), (Features::DEVICE, 2, 2)] {
        let scene = Scene::new(&[]);
        let mut sent = false;
        serve(scene.accept(), features, &mut Villain::default(), |villain| {
            let Some(guest) = scene.show().filter(|guest| guest.up) else { return false };
            if !std::mem::replace(&mut sent, true) {
                deliver(villain, features, &frames);
            }
            let counters = &guest.stats.counters;
            assert!(counters["rx_bad_headers"] <= bad && counters["rx_packets"] <= good, "{counters:?}");
            (counters["rx_bad_headers"], counters["rx_packets"]) == (bad, good)
        });
        scene.ends();
    }
}

#[test]
fn d2_a_kick_that_holds_whoever_rings_it_holds_the_guest_for_a_moment_only() {
    if !may_network() {
        return;
    }
    let scene = Scene::new(&[]);
    let said = |count| scene.guest.logged("held a thread in a kick") >= count;
    // From the first kick on.
    let mut villain = Villain { traps_kicks: true, ..Villain::default() };
    serve(scene.accept(), Features::DEVICE, &mut villain, |_| said(1));
    // And in the middle of things.
    let mut villain = Villain::default();
    serve(scene.accept(), Features::DEVICE, &mut villain, |villain| {
        if !villain.rings.is_empty() && scene.is_up() {
            villain.rings.drain(..).filter_map(|(_, ring)| ring.kick).for_each(|kick| trap(&kick));
            scene.broadcast();
        }
        said(2)
    });
    // It is there for the next.
    serve(scene.accept(), Features::DEVICE, &mut Villain::default(), |_| scene.is_up());
    scene.ends();
}

#[test]
fn d2_a_guest_whose_back_end_holds_its_threads_ends_when_it_is_told_to() {
    if !may_network() {
        return;
    }
    let scene = Scene::new(&[]);
    let mut villain = Villain { traps_kicks: true, ..Villain::default() };
    let stream = scene.accept();
    serve(stream, Features::DEVICE, &mut villain, |_| scene.guest.logged("the link is up") > 0);
    scene.ends();
}

/// Writes noise over everything of the rings that our driver half does not look at: it would find the ring broken.
fn scribble(villain: &Villain) {
    for (_, ring) in &villain.rings {
        let Parts { desc, driver, .. } = &ring.parts;
        for (area, slots) in [(desc, ring.packed()), (driver, false)] {
            let noise = pattern(area.len() as u32, area.len());
            for (at, pair) in (0..).step_by(2).zip(noise.chunks_exact(2)) {
                // The flags of a packed ring's slots say who owns them.
                if !slots || at % 16 != 14 {
                    area.store16(at, u16::from_le_bytes([pair[0], pair[1]]));
                }
            }
        }
    }
}

/// Counts the chains that an honest device can take from each ring.
#[track_caller]
fn chains(villain: &Villain) -> Vec<usize> {
    let count = |(_, ring): &(u16, RingSetup)| {
        let (mut device, mut chains) = (ring.ring().unwrap(), Chains::new());
        device.take(usize::from(device.size()), &mut ring.memory.translator(), &mut chains);
        assert_eq!(device.fault(), None);
        chains.len()
    };
    villain.rings.iter().map(count).collect()
}

#[test]
fn d3_rings_that_a_dead_back_end_scribbled_over_are_whole_for_the_next() {
    if !may_network() {
        return;
    }
    for layout in ["split", "packed"] {
        let scene = Scene::new(&["--ring", layout]);
        serve(scene.accept(), Features::DEVICE, &mut Villain::default(), |villain| {
            let up = scene.is_up();
            if up {
                scribble(villain);
            }
            up
        });
        let mut honest = Villain::default();
        serve(scene.accept(), Features::DEVICE, &mut honest, |_| scene.is_up());
        scene.guest.until_logged_times("resumed=true", 1);
        let found = chains(&honest);
        assert!(found[0] > 0, "the receiveq has its buffers: {found:?}");
        // It ends without having given anything back: it may be the one that scribbles, and still have the memory.
        drop(honest);
        serve(scene.accept(), Features::DEVICE, &mut Villain::default(), |_| scene.is_up());
        scene.guest.until_logged_times("resumed=false", 2);
        scene.guest.until_logged_times("resumed=true", 1);
        scene.ends();
    }
}

#[test]
fn d3_a_back_end_that_says_that_a_ring_is_broken_gets_new_ones() {
    if !may_network() {
        return;
    }
    let scene = Scene::new(&[]);
    serve(scene.accept(), Features::DEVICE, &mut Villain::default(), |villain| {
        if scene.is_up() {
            for (_, ring) in villain.rings.drain(..) {
                ring.err.expect("the guest passes an err event").signal().unwrap();
            }
        }
        scene.guest.logged("says that a ring is broken") > 0
    });
    serve(scene.accept(), Features::DEVICE, &mut Villain::default(), |_| scene.is_up());
    assert_eq!(scene.guest.logged("resumed=true"), 0);
    scene.ends();
}

#[test]
fn d4_a_back_end_that_takes_its_time_keeps_nobody_else_waiting() {
    if !may_network() {
        return;
    }
    let scene = Scene::new(&[]);
    let stream = scene.accept();
    // It waits for an answer, which does not come.
    eventually("the guest asks", || readable(&stream, Duration::from_millis(5)).then_some(()));
    for _ in 0..3 {
        let shown = eventually("it answers on its control socket", || scene.show());
        assert!(!shown.up);
    }
    // So does a switch whose port has another front end, and a user sees why nothing comes of it.
    scene.guest.until_logged("it may have another front end");
    scene.ends();
    drop(stream);
}

/// In listen mode anybody who connects is a back end.
#[test]
fn d4_clients_that_say_nothing_give_way_to_one_that_speaks() {
    if !may_network() {
        return;
    }
    let scene = Scene::at(&["--mode", "listen"], "y");
    let connect = || Stream::connect(scene.place.socket("y"));
    let silent: Vec<_> = (0..10).map(|_| eventually("the guest listens", || connect().ok())).collect();
    serve(connect().unwrap(), Features::DEVICE, &mut Villain::default(), |_| scene.is_up());
    drop(silent);
    scene.ends();
}

/// Closes a descriptor that may wait for long, if the guest is so quick that this is the last one.
pub fn let_go(trap: impl Send + 'static) {
    std::thread::spawn(move || drop(trap));
}

#[test]
fn d1_a_descriptor_whose_close_waits_holds_up_no_guest() {
    if !may_network() {
        return;
    }
    let scene = Scene::new(&[]);
    let mut peers = Vec::new();
    for _ in 0..3 {
        let stream = scene.accept();
        eventually("the guest asks", || readable(&stream, Duration::from_millis(5)).then_some(()));
        let (trap, peer) = lingering();
        peers.push(peer);
        // Half an answer, and a descriptor that from now on only the guest has, or its socket.
        let answer = [&1u32.to_le_bytes()[..], &5u32.to_le_bytes(), &8u32.to_le_bytes()].concat();
        stream.send(&answer, &[trap.as_fd()]).unwrap();
        let_go(trap);
        drop(stream);
        assert!(!eventually("it answers on its control socket", || scene.show()).up);
    }
    // Neither does one that comes later, with a message that nobody asked for.
    let (trap, peer) = lingering();
    peers.push(peer);
    let logged = scene.guest.logged("has disconnected");
    let mut trap = Some(trap);
    let stream = scene.accept();
    let other = rustix::io::dup(&stream).unwrap();
    let other = Stream::from_fd(other).unwrap();
    serve(stream, Features::DEVICE, &mut Villain::default(), |_| {
        if scene.is_up()
            && let Some(trap) = trap.take()
        {
            other.send(&[0; 12], &[trap.as_fd()]).unwrap();
            let_go(trap);
        }
        scene.guest.logged("has disconnected") > logged
    });
    drop(other);
    serve(scene.accept(), Features::DEVICE, &mut Villain::default(), |_| scene.is_up());
    scene.ends();
}

#[test]
fn d6_a_back_end_that_comes_back_with_less_does_not_cost_the_tap() {
    if !may_network() {
        return;
    }
    let mut scene = Scene::new(&["--ring", "packed"]);
    let everything = Features::DEVICE;
    let fewer = Features::VERSION_1 | Features::RING_PACKED;
    for features in [everything, fewer, everything - Features::RING_PACKED, everything] {
        let usable = features.contains(Features::RING_PACKED);
        let logged = scene.guest.logged("lacks required features: RING_PACKED");
        serve(scene.accept(), features, &mut Villain::default(), |_| {
            let refused = scene.guest.logged("lacks required features: RING_PACKED") > logged;
            assert!(usable || !scene.is_up());
            if usable { scene.is_up() } else { refused }
        });
        // What is missing is missing for now.
        assert!(scene.guest.is_running(), "{features:?}");
        let kept = || scene.show().filter(|guest| !guest.up);
        eventually("it waits for the next", kept);
    }
    // The address is there from the beginning to the end.
    scene.broadcast();
    scene.ends();
}

#[test]
fn d_low_a_transmit_queue_that_nobody_empties_is_seen() {
    if !may_network() {
        return;
    }
    let scene = Scene::new(&[]);
    let mut sent = false;
    serve(scene.accept(), Features::DEVICE, &mut Villain::default(), |_| {
        let Some(guest) = scene.show().filter(|guest| guest.up) else { return false };
        if !std::mem::replace(&mut sent, true) {
            scene.broadcast();
        }
        let counters = &guest.stats.counters;
        counters["tx_in_flight"] >= 8 && counters["tx_stalled_ms"] > 0
    });
    scene.ends();
}
