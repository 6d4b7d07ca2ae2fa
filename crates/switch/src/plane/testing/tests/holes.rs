//! Front ends that punch holes into their memory: which port pays for the worker's sleep. What the kernel would say of the worker is scripted.

use std::sync::Arc;
use std::time::Duration;

use ringferry_packet::ether::Mac;
use ringferry_packet::vnet::Header;

use crate::config::SwitchConfig;
use crate::fdb::PortId;
use crate::plane::testing::{Bed, HeapFrame, HeapPort, Punched, Wire};
use crate::rules::{Limits, Rate, Rules};

/// A sleep of 10 ms, which may happen once or twice.
const SHORT: u32 = 2;
/// A sleep of 40 ms, which is what a hole of 300 MiB takes.
const USUAL: u32 = 8;

fn mac(port: u16) -> Mac {
    Mac([2, 0, 0, 0, 0, port as u8])
}

/// Three ports of a worker, whose addresses are known.
struct Ports {
    bed: Bed,
    wires: Vec<Arc<Wire>>,
}

impl Ports {
    fn new() -> Self {
        let mut bed = Bed::new(&SwitchConfig::default(), 1);
        let wires = (0..3).map(|id| {
            let rules = Rules { static_macs: vec![(mac(id), 0)], ..Rules::default() };
            bed.add(&HeapPort { rules, ..HeapPort::default() }).1
        });
        let wires = wires.collect();
        Ports { bed, wires }
    }

    /// Sends a frame in several pieces, in a burst of its own; how many frames arrive.
    fn send(&mut self, from: u16, to: u16) -> usize {
        let mut bytes = [&mac(to).0[..], &mac(from).0, &[0x88, 0xb5]].concat();
        bytes.resize(1000, 0);
        let frame = HeapFrame { header: Header::default(), bytes, cuts: vec![200, 500] };
        self.wires[usize::from(from)].send(0, frame);
        self.bed.run();
        self.wires[usize::from(to)].received(0).len()
    }

    /// Which of the ports are out of service.
    fn out_of_service(&self) -> Vec<u16> {
        let out = |id: &u16| self.wires[usize::from(*id)].out_of_service().is_some();
        (0..3).filter(out).collect()
    }
}

#[test]
fn holes_punched_under_a_worker_take_the_port_out_of_service_whose_memory_it_is() {
    for sleep in [SHORT, USUAL] {
        for punched in
            [Punched { rings: sleep, ..Punched::default() }, Punched { buffers: sleep, ..Punched::default() }]
        {
            let mut ports = Ports::new();
            ports.wires[0].punch(punched);
            ports.bed.slow_round(0);
            let mut bursts = 0;
            while ports.out_of_service().is_empty() {
                let (from, to) = if punched.rings > 0 { (0, 1) } else { (1, 0) };
                ports.send(from, to);
                bursts += 1;
                assert!(bursts < 10, "nobody is to blame for {punched:?}");
            }
            assert_eq!(ports.out_of_service(), [0], "{punched:?}");
            assert!(bursts <= 4, "{bursts} bursts of {punched:?}");
            let why = ports.wires[0].out_of_service().unwrap();
            assert!(why.contains("punches holes"), "{why}");
            // The others go on.
            assert_eq!(ports.send(1, 2), 1);
        }
    }
}

/// While frames are copied from a sender to a receiver, the memory of both is touched: the worker finds out whose it is before it blames anybody.
#[test]
fn holes_under_the_frames_of_a_sender_are_never_put_down_to_the_receiver() {
    let mut ports = Ports::new();
    ports.wires[0].punch(Punched { frames: USUAL, ..Punched::default() });
    ports.bed.slow_round(0);
    for _ in 0..10 {
        assert_eq!(ports.send(0, 1), 1);
    }
    // Frames are copied before they are delivered, once one has put the worker to sleep.
    assert_eq!((ports.out_of_service(), ports.wires[1].read_in_place(0)), (vec![], 1));
    // It is then the sender that is found out, when its memory is read for the copy.
    ports.wires[0].punch(Punched { rings: USUAL, ..Punched::default() });
    (0..2).for_each(|_| _ = ports.send(0, 1));
    assert_eq!(ports.out_of_service(), [0]);
}

#[test]
fn a_worker_that_is_slow_for_other_reasons_blames_nobody() {
    let mut ports = Ports::new();
    // Nobody looks as long as no round was slow.
    ports.wires[0].punch(Punched { rings: USUAL, buffers: USUAL, ..Punched::default() });
    (0..10).for_each(|_| _ = ports.send(0, 1));
    ports.wires[0].punch(Punched::default());
    for _ in 0..10 {
        ports.bed.slow_round(0);
        assert_eq!(ports.send(0, 1) + ports.send(1, 0), 2);
    }
    assert!(ports.out_of_service().is_empty());
}

/// A balloon that takes back a page which is touched just then is no attack.
#[test]
fn sleeps_that_are_rare_or_short_are_forgotten() {
    let mut ports = Ports::new();
    for _ in 0..10 {
        ports.bed.slow_round(0);
        ports.wires[0].punch(Punched { rings: SHORT, ..Punched::default() });
        (0..2).for_each(|_| _ = ports.send(0, 1));
        ports.wires[0].punch(Punched::default());
        ports.bed.quiet_for(0, Duration::from_secs(11));
    }
    assert!(ports.out_of_service().is_empty());
    // Another port of the same number does not inherit what was put down to the one before.
    ports.bed.slow_round(0);
    ports.wires[0].punch(Punched { rings: SHORT, ..Punched::default() });
    (0..2).for_each(|_| _ = ports.send(0, 1));
    ports.bed.remove(PortId(0));
    let rules = Rules { static_macs: vec![(mac(0), 0)], ..Rules::default() };
    ports.wires[0] = ports.bed.add_as(PortId(0), &HeapPort { rules, ..HeapPort::default() });
    ports.wires[0].punch(Punched { rings: SHORT, ..Punched::default() });
    (0..2).for_each(|_| _ = ports.send(0, 1));
    assert!(ports.out_of_service().is_empty());
}

/// An IPv4 datagram that must not be cut.
fn large(from: u16, to: u16) -> HeapFrame {
    let mut ip =
        vec![0x45, 0, 986_u16.to_be_bytes()[0], 986_u16.to_be_bytes()[1], 0, 1, 0x40, 0, 64, 17, 0, 0];
    ip.extend([10, 0, 0, from as u8, 10, 0, 0, to as u8]);
    let sum = ip.chunks(2).map(|word| u32::from(word[0]) << 8 | u32::from(word[1])).sum::<u32>();
    let sum = !((sum & 0xffff) + (sum >> 16)) as u16;
    ip[10..12].copy_from_slice(&sum.to_be_bytes());
    let mut bytes = [&mac(to).0[..], &mac(from).0, &[8, 0], &ip].concat();
    bytes.resize(1000, 0);
    HeapFrame::new(Header::default(), bytes)
}

/// Who sends what is too large for its receiver is answered in the receiver's name, and it is memory of the sender that the answer is written to.
#[test]
fn holes_under_an_answer_are_those_of_the_port_that_is_answered() {
    for paced in [false, true] {
        let mut bed = Bed::new(&SwitchConfig::default(), 1);
        let wires: Vec<_> = (0..2)
            .map(|id| {
                let bytes = (paced && id == 1).then_some(Rate { per_second: 1 << 30, burst: 1 });
                let rate_out = Limits { bytes, ..Limits::default() };
                let rules = Rules { static_macs: vec![(mac(id), 0)], rate_out, ..Rules::default() };
                bed.add(&HeapPort { rules, mtu: 600, pairs: Some(1), ..HeapPort::default() }).1
            })
            .collect();
        wires[1].take_at_most(614);
        wires[0].punch(Punched { buffers: USUAL, ..Punched::default() });
        bed.slow_round(0);
        for _ in 0..20 {
            wires[0].send(0, large(0, 1));
            bed.run_for(200_000);
        }
        assert!(!wires[0].received(0).is_empty(), "it is answered");
        assert!(wires[1].out_of_service().is_none(), "the receiver is not to blame");
        assert!(wires[0].out_of_service().is_some_and(|why| why.contains("punches holes")));
    }
}
