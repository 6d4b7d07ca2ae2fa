//! Workers that stand still, as another process takes over, or go on, each at a moment of its own.

use std::sync::Arc;

use ringferry_packet::ether::Mac;
use ringferry_packet::vnet::Header;

use crate::config::SwitchConfig;
use crate::fdb::PortId;
use crate::plane::handoff::ring::DEPTH;
use crate::plane::testing::{Bed, HeapFrame, HeapPort, Wire};
use crate::rules::Rules;

/// Frames that a guest sends in a burst: more than there may be under way to another worker.
const FRAMES: usize = 2 * DEPTH;

/// The worker of the sender, and that of the receiver.
const SENDING: usize = 0;
const RECEIVING: usize = 1;

fn mac(port: usize) -> Mac {
    Mac([2, 0, 0, 0, 0, port as u8])
}

/// A port of each worker; all of its frames for the second one are handed off.
struct Two {
    bed: Bed,
    sender: (PortId, Arc<Wire>),
    receiver: (PortId, Arc<Wire>),
}

impl Two {
    fn new() -> Two {
        let mut bed = Bed::new(&SwitchConfig::default(), 2);
        let mut add = |port: usize| {
            let rules = Rules { static_macs: vec![(mac(port), 0)], ..Rules::default() };
            bed.add(&HeapPort { rules, first: port, ..HeapPort::default() })
        };
        let (sender, receiver) = (add(SENDING), add(RECEIVING));
        Two { bed, sender, receiver }
    }

    fn send(&self) {
        for number in 0..FRAMES {
            let mut frame = [mac(RECEIVING).0, mac(SENDING).0].concat();
            frame.extend([0x88, 0xb5]);
            frame.extend((number as u64).to_be_bytes());
            frame.resize(60, 0);
            self.sender.1.send(0, HeapFrame::new(Header::default(), frame));
        }
    }

    /// The worker of the sender has the processor for itself for a while: for longer than it takes to forward all that was sent.
    fn run_the_sending_one(&mut self) {
        self.bed.serve_events(SENDING);
        (0..FRAMES).for_each(|_| {
            self.bed.round(SENDING);
        });
    }

    /// Each frame was received, once and in order.
    #[track_caller]
    fn assert_all_received(&self) {
        let (id, receiver) = &self.receiver;
        assert_eq!(self.bed.totals(*id).drops_by_name()["worker-busy"], 0);
        let number = |frame: &HeapFrame| u64::from_be_bytes(frame.bytes[14..22].try_into().unwrap());
        let received: Vec<_> = receiver.received(0).iter().map(number).collect();
        assert_eq!(received, (0..FRAMES as u64).collect::<Vec<_>>());
    }

    /// Both are paused, as by [`Workers::pause`](crate::plane::Workers), and then go on, the sending one first. The other one has no processor in between.
    fn pause_and_go_on(&mut self, between: fn(&mut Two)) {
        between(self);
        self.bed.pause(SENDING);
        for _ in 0..2 {
            self.bed.settle(SENDING);
            self.bed.settle(RECEIVING);
        }
        self.bed.unpause(SENDING);
        self.run_the_sending_one();
        self.bed.unpause(RECEIVING);
        self.bed.run();
    }
}

/// What a worker drops that goes on first looked like a receiver that is too slow: `worker-busy`.
#[test]
fn a_worker_that_goes_on_before_another_costs_no_frame() {
    let mut two = Two::new();
    two.pause_and_go_on(|two| {
        two.bed.pause(RECEIVING);
        two.send();
    });
    two.assert_all_received();
}

#[test]
fn a_worker_that_stands_still_before_another_costs_no_frame() {
    let mut two = Two::new();
    two.send();
    two.pause_and_go_on(|two| {
        two.bed.pause(RECEIVING);
        two.run_the_sending_one();
    });
    two.assert_all_received();
}

/// A paused worker delivers what the other one has taken before it saw that, and is woken for it.
#[test]
fn a_paused_worker_delivers_what_it_is_handed() {
    let mut two = Two::new();
    two.send();
    two.bed.begin_round(SENDING);
    two.bed.pause(RECEIVING);
    two.bed.serve_events(SENDING);
    assert!(two.bed.under_way(SENDING, RECEIVING) > 0);
    two.bed.round(RECEIVING);
    assert_eq!(two.bed.under_way(SENDING, RECEIVING), 0);
    two.pause_and_go_on(|_| {});
    two.assert_all_received();
}

/// A tap tells as long as it has something, which nobody reads; each time took the processor from the process that takes over.
#[test]
fn a_paused_worker_is_not_woken_by_what_it_does_not_take() {
    let mut two = Two::new();
    two.bed.run();
    two.bed.pause(SENDING);
    two.send();
    two.bed.round(SENDING);
    assert_eq!(two.bed.totals(two.sender.0).by_name()["kicks"], 0);
    two.pause_and_go_on(|two| two.bed.pause(RECEIVING));
    two.assert_all_received();
}

/// Behind a switch that was killed under load the next one knows no address, and every port has much to send.
#[test]
fn of_ports_of_which_nothing_is_known_one_frame_each_goes_to_all() {
    const PORTS: usize = 16;
    const EACH: usize = 200;
    let mut bed = Bed::new(&SwitchConfig::default(), 1);
    let ports: Vec<_> = (0..PORTS).map(|_| bed.add(&HeapPort::default())).collect();
    bed.pause(0);
    for (at, (_, wire)) in ports.iter().enumerate() {
        for _ in 0..EACH {
            let mut frame = [mac(at ^ 1).0, mac(at).0].concat();
            frame.extend([0x88, 0xb5]);
            frame.resize(60, 0);
            wire.send(0, HeapFrame::new(Header::default(), frame));
        }
    }
    bed.unpause(0);
    bed.run();
    for (at, (_, wire)) in ports.iter().enumerate() {
        let (own, others): (Vec<_>, Vec<_>) =
            wire.received(0).into_iter().partition(|frame| frame.bytes[..6] == mac(at).0);
        assert_eq!(own.len(), EACH, "port {at}");
        // The second of each pair answers one that is known by then.
        assert!(others.len() <= PORTS / 2, "port {at} has {} frames for others", others.len());
    }
}
