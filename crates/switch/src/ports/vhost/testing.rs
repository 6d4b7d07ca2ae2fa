//! A worker and its guests in one thread, with true virtqueues between them: what a whole switch does to a frame, without threads.
//!
//! [`frame_cost`] says what that costs, which does not depend on how far processors are from each other: it is run by hand, before and after a change
//! of what every frame goes through.
//!
//! ```sh
//! cargo test --release -p ringferry-switch --lib -- --ignored --nocapture frame_cost
//! ```

use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Instant;

use ringferry_packet::vnet::Header;
use ringferry_sys::closer::Closer;
use ringferry_sys::eventfd::EventFd;
use ringferry_vhost_user::RingSetup;
use ringferry_virtio_net::Features;
use ringferry_virtio_net::driver::{Arena, Pair, PairConfig};

use super::queues::{NewCalls, RingStart, VhostQueues, VhostRequest};
use crate::config::SwitchConfig;
use crate::counters::PortTotals;
use crate::fdb::PortId;
use crate::plane::PortShared;
use crate::plane::testing::Lone;

/// A worker with guests.
struct RingBed {
    lone: Lone<VhostQueues>,
    /// Closes what workers let go of.
    closer: Closer,
    calls: Arc<NewCalls>,
}

/// The driver's half of a guest, which never kicks and wants no calls.
struct Guest {
    pair: Pair,
    /// Keeps the memory.
    _arena: Arena,
    totals: PortTotals,
}

impl RingBed {
    fn new() -> Self {
        let (closer, calls) = (Closer::inline(), Arc::default());
        Self { lone: Lone::new(&SwitchConfig::default()), closer, calls }
    }

    /// Plugs in a guest with one pair that has negotiated `features`.
    fn add(&mut self, features: Features) -> Guest {
        let config = PairConfig::default();
        let mut arena = Arena::new(config.arena_bytes(features)).expect("memory");
        let mut pair = Pair::new(&mut arena, features, &config).expect("a pair");
        pair.disable_calls();
        pair.refill();
        let starts = [0u16, 1].map(|index| {
            let parts =
                pair.queues[usize::from(index)].parts(arena.memory(), features.ring()).expect("in the arena");
            let setup = RingSetup {
                parts,
                base: if features.ring().packed { 0x8000 } else { 0 },
                inflight: None,
                kick: None,
                call: None,
                err: None,
                enabled: true,
                memory: Arc::clone(arena.memory()),
                features: features.bits(),
                log: None,
            };
            RingStart { session: 0, index, setup }
        });
        let shared = Arc::new(PortShared::default());
        shared.set_offloads(features.guest_offloads());
        shared.set_mtu(1500);
        let (of_queues, calls, closer) = (Arc::clone(&shared), Arc::clone(&self.calls), self.closer.clone());
        let make = |handle, reporter| VhostQueues::new(handle, of_queues, calls, reporter, closer);
        let (_, totals) = self.lone.add(&shared, make, starts);
        Guest { pair, _arena: arena, totals }
    }
}

/// Frames of a burst, as many as a worker takes at a time.
const BURST: usize = 32;

impl Guest {
    /// Receives all that was delivered; returns the frames.
    fn receive(&mut self) -> Vec<Vec<u8>> {
        let Pair { receiveq, pools, .. } = &mut self.pair;
        let mut frames = Vec::new();
        while receiveq.lend(BURST, pools, |packet, _| {
            let mut frame = vec![0; packet.len()];
            packet.copy_to(&mut frame);
            frames.push(frame);
            Some(packet)
        }) > 0
        {}
        receiveq.refill();
        frames
    }

    /// Drops all that was delivered.
    fn drain(&mut self) {
        let Pair { receiveq, pools, .. } = &mut self.pair;
        while receiveq.lend(BURST, pools, |packet, _| Some(packet)) > 0 {}
        receiveq.refill();
    }

    /// Sends frames, which the worker has to take before the next ones are sent.
    fn send<'f>(&mut self, frames: impl IntoIterator<Item = &'f Vec<u8>>) {
        let Pair { transmitq, pools, .. } = &mut self.pair;
        transmitq.make_room(BURST, pools);
        for frame in frames {
            assert!(self.pair.send_frame(&Header::default(), frame), "there is room for a burst");
        }
        self.pair.transmitq.flush();
    }
}

/// A frame of `len` bytes of a conversation between two guests: UDP as far as a switch looks at it.
fn frame(from: u8, to: u8, conversation: u32, len: usize) -> Vec<u8> {
    let number = conversation.to_be_bytes();
    let mut frame = [&[2, to][..], &number, &[2, from], &number, &[8, 0, 0x45, 0]].concat();
    frame.extend((len as u16 - 14).to_be_bytes());
    frame.extend([0, 0, 0, 0, 64, 17, 0, 0]);
    frame.extend([&[10][..], &number[1..], &[11], &number[1..]].concat());
    frame.resize(len, from);
    frame
}

/// A bed with two guests, the second of which is known as the destination of so many conversations.
fn two_guests(features: Features, conversations: u32) -> (RingBed, [Guest; 2]) {
    let mut bed = RingBed::new();
    let mut guests = [bed.add(features), bed.add(features)];
    for conversation in 0..conversations {
        guests[1].send([&frame(2, 1, conversation, 60)]);
        while bed.lone.round() {}
        guests[0].drain();
    }
    (bed, guests)
}

/// A worker closed what it had of a session itself, and that is the last of it where the session has ended before: of an event for which a million wait, or
/// of some gigabytes.
#[test]
fn d1_what_a_worker_lets_go_of_is_closed_elsewhere() {
    let mut bed = RingBed { closer: Closer::new(), ..RingBed::new() };
    // The closer is at one of these until the end, and whoever helps it with what is soon closed at the other, if at any.
    let [(go, wait), (go_soon, wait_soon)] = [channel::<()>(), channel::<()>()];
    bed.closer.close(Held(wait));
    bed.closer.close_soon(Held(wait_soon));
    let guest = bed.add(layouts()[0].1);
    let id = PortId(0);
    let mut expected = bed.closer.waiting();
    let mut set_call = |bed: &mut RingBed, replaced: usize| {
        bed.calls.put(0, EventFd::new().ok());
        bed.lone.request(id, VhostRequest::SetCall(0));
        expected += replaced;
        assert_eq!(bed.closer.waiting(), expected);
    };
    set_call(&mut bed, 1);
    set_call(&mut bed, 1);
    let before = bed.closer.waiting();
    assert!(bed.lone.stop(id, 0).is_some());
    assert_eq!(bed.closer.waiting(), before + 1, "the ring, with its memory and its events");
    bed.lone.remove(id);
    assert_eq!(bed.closer.waiting(), before + 2, "the other ring");
    drop((go, go_soon, guest));
}

/// A thing that can be dropped when its sender is.
struct Held(Receiver<()>);

impl Drop for Held {
    fn drop(&mut self) {
        let _ = self.0.recv();
    }
}

/// The layouts of rings.
fn layouts() -> [(&'static str, Features); 4] {
    let base = Features::VERSION_1 | Features::MRG_RXBUF;
    [
        ("split", base),
        ("split in order", base | Features::IN_ORDER),
        ("packed", base | Features::RING_PACKED),
        ("packed in order", base | Features::RING_PACKED | Features::IN_ORDER),
    ]
}

#[test]
fn bursts_of_any_mix_arrive_whole_and_in_order() {
    for (layout, features) in layouts() {
        let (mut bed, [mut from, mut to]) = two_guests(features, 300);
        for round in 0..20u32 {
            let sent: Vec<_> = (0..BURST as u32)
                .map(|at| frame(1, 2, (at / (round + 1) * 7) % 300, 60 + (at * 47 + round) as usize % 1400))
                .collect();
            from.send(&sent);
            while bed.lone.round() {}
            assert_eq!(to.receive(), sent, "{layout}, round {round}");
        }
    }
}

#[test]
#[ignore = "prints times, and checks nothing"]
fn frame_cost() {
    for (layout, features) in layouts() {
        for (conversations, len) in [(1, 60), (1, 1514), (1000, 60), (1000, 1514)] {
            let (mut bed, [mut from, mut to]) = two_guests(features, conversations);
            let frames: Vec<_> = (0..conversations).map(|number| frame(1, 2, number, len)).collect();
            let mut next = frames.iter().cycle();
            let counters = to.totals.of(0);
            let mut batch = |bursts: u32| {
                let mut time = std::time::Duration::ZERO;
                for _ in 0..bursts {
                    from.send(next.by_ref().take(BURST));
                    let until = counters.tx_packets.get() + BURST as u64;
                    let begin = Instant::now();
                    while counters.tx_packets.get() < until {
                        assert!(bed.lone.round(), "frames are delivered");
                    }
                    time += begin.elapsed();
                    to.drain();
                }
                time.as_nanos() as f64 / (f64::from(bursts) * BURST as f64)
            };
            let best = (0..50).map(|_| batch(200)).fold(f64::INFINITY, f64::min);
            println!("{layout}, {conversations} conversations, {len} bytes: {best:.1} ns a frame");
        }
    }
}
