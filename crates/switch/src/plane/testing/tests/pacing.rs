//! Rates that pace: what leaves is the rate, to the frame, and nobody sleeps while there are tokens and frames.

use std::sync::Arc;

use ringferry_packet::ether::Mac;
use ringferry_packet::vnet::{F_NEEDS_CSUM, GSO_TCPV4, Header, Offloads};

use crate::config::SwitchConfig;
use crate::fdb::PortId;
use crate::plane::testing::{Bed, HeapFrame, HeapPort, Wire};
use crate::rules::{Limits, Rate, Rules};

const SECOND: u64 = 1_000_000;
const KIB: u64 = 1024;
const MBIT: u64 = 125_000;

/// A TCP frame of `len` bytes from port 0 to port 1, marked as one that knows ECN; `flow` says which.
fn tcp(len: usize, flow: u8) -> Vec<u8> {
    let mut frame = [mac(1).0, mac(0).0].concat();
    frame.extend([8, 0, 0x45, 2]);
    frame.extend((len as u16 - 14).to_be_bytes());
    frame.extend([0, 0, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 0, 10, 0, 0, 1]);
    frame.extend([0x10, flow, 0x20, flow, 0, 0, 0, 0, 0, 0, 0, 0, 0x50, 0x10, 0, 64, 0, 0, 0, 0]);
    frame.resize(len, 0);
    frame
}

fn mac(port: u8) -> Mac {
    Mac([2, 0, 0, 0, 0, port])
}

fn bytes(per_second: u64, burst: u64) -> Limits {
    Limits { packets: None, bytes: Some(Rate { per_second, burst }) }
}

/// Port 0 sends to port 1.
struct Pair {
    bed: Bed,
    wires: [Arc<Wire>; 2],
}

impl Pair {
    fn new(workers: usize, port: impl Fn(u8) -> HeapPort) -> Pair {
        let mut bed = Bed::new(&SwitchConfig { mac_table_size: 64, ..SwitchConfig::default() }, workers);
        let wires = [0, 1].map(|number| {
            let mut port = port(number);
            port.rules.static_macs = vec![(mac(number), 0)];
            bed.add(&port).1
        });
        Pair { bed, wires }
    }

    /// What port 1 has got: frames and bytes.
    fn received(&self) -> (u64, u64) {
        let frames = (0..self.wires[1].queues()).flat_map(|queue| self.wires[1].received(queue));
        frames.fold((0, 0), |(count, bytes), frame| (count + 1, bytes + frame.bytes.len() as u64))
    }

    fn counter(&self, port: u16, name: &str) -> u64 {
        self.bed.totals(PortId(port)).by_name()[name]
    }

    fn drops(&self, port: u16, name: &str) -> u64 {
        self.bed.totals(PortId(port)).drops_by_name()[name]
    }

    /// Sends frames of `len` bytes on all queues of port 0, which are never empty, for `micros`; what port 1 got.
    fn saturate(&mut self, len: usize, micros: u64) -> (u64, u64) {
        let depth = (64 * 1024 / len).clamp(4, 64);
        let end = self.bed.now() + micros;
        let (mut frames, mut bytes) = (0, 0);
        while self.bed.now() < end {
            for queue in 0..self.wires[0].queues() {
                while self.wires[0].waiting(queue) < depth {
                    self.wires[0].send(queue, HeapFrame::new(Header::NONE, tcp(len, queue as u8)));
                }
            }
            self.bed.run();
            let got = self.received();
            (frames, bytes) = (frames + got.0, bytes + got.1);
            // Nobody waits as long as there are tokens for more.
            if let Some(next) = self.bed.next_wake() {
                self.bed.advance(next.min(end) - self.bed.now());
            }
        }
        (frames, bytes)
    }
}

const RATES: [u64; 4] = [10 * MBIT, 100 * MBIT, 1000 * MBIT, 10_000 * MBIT];

/// Each rate with frames of a length and a time in which so many pass that the burst is not most of it.
fn rates() -> impl Iterator<Item = (u64, usize, u64)> {
    let lens = |rate| [65_000, 1514].map(|len| (rate, len));
    let micros = |rate, len| (2 * default_burst(rate) + 200 * len as u64) * SECOND / rate;
    RATES.into_iter().flat_map(lens).map(move |(rate, len)| (rate, len, micros(rate, len)))
}

fn default_burst(rate: u64) -> u64 {
    (rate / 100).max(256 * KIB)
}

/// Whether so many bytes in a time are the rate: after the burst, to `frames` frames.
fn is_rate(got: u64, rate: u64, micros: u64, frames: u64) {
    let granted = rate * micros / SECOND;
    let burst = default_burst(rate);
    assert!(got <= granted + burst + frames, "{got} of {granted} and {burst}");
    // The burst may be left at the end, as far as an eighth.
    assert!(got + burst / 8 + frames >= granted + burst, "{got} of {granted} and {burst}");
    assert!(got * 100 >= granted * 95);
}

#[test]
fn what_a_port_sends_is_its_rate_whatever_it_sends_and_nothing_is_lost() {
    for (rate, len, micros) in rates() {
        let rules = |port| Rules {
            rate_in: if port == 0 { bytes(rate, default_burst(rate)) } else { Limits::default() },
            ..Rules::default()
        };
        let mut pair = Pair::new(1, |port| HeapPort { rules: rules(port), ..HeapPort::default() });
        let got = pair.saturate(len, micros);
        is_rate(got.1, rate, micros, len as u64);
        assert_eq!(got.0, pair.counter(0, "rx_packets"));
        assert!(pair.counter(0, "rx_paused") > 0);
        // All of the time but that in which the burst was sent; the last wait may end later.
        let (paused, burst) =
            (pair.counter(0, "rx_paused_microseconds"), default_burst(rate) * SECOND / rate);
        assert!(paused + burst >= micros * 9 / 10, "{paused} of {micros}");
        assert!(paused <= micros * 11 / 10 + len as u64 * SECOND / rate, "{paused} of {micros}");
        assert_eq!(pair.bed.totals(PortId(0)).drops_by_name().values().sum::<u64>(), 0);
    }
}

/// A worker that gets its processor late finds that a wait has lasted longer than was known when it began.
#[test]
fn a_wait_that_is_longer_than_it_had_to_be_is_counted_as_long_as_it_was() {
    let limit = Limits { packets: Some(Rate { per_second: 1000, burst: 1 }), bytes: None };
    let mut pair = Pair::new(1, |port| {
        let rate_in = if port == 0 { limit } else { Limits::default() };
        HeapPort { rules: Rules { rate_in, ..Rules::default() }, ..HeapPort::default() }
    });
    for _ in 0..64 {
        pair.wires[0].send(0, HeapFrame::new(Header::NONE, tcp(60, 0)));
    }
    pair.bed.run();
    let known = pair.counter(0, "rx_paused_microseconds");
    assert!(known > 0);
    pair.bed.advance(SECOND);
    pair.bed.run();
    let counted = pair.counter(0, "rx_paused_microseconds");
    assert!(counted >= SECOND, "{counted} after {known}");
}

#[test]
fn what_is_sent_to_a_port_is_its_rate_whatever_it_is() {
    for (rate, len, micros) in rates() {
        let rules = |port| Rules {
            rate_out: if port == 1 { bytes(rate, default_burst(rate)) } else { Limits::default() },
            ..Rules::default()
        };
        let mut pair = Pair::new(1, |port| HeapPort { rules: rules(port), ..HeapPort::default() });
        let got = pair.saturate(len, micros);
        is_rate(got.1, rate, micros, len as u64);
        pair.bed.run_out();
        let later = pair.received();
        let sent = pair.counter(0, "rx_packets");
        assert_eq!(got.0 + later.0 + pair.drops(1, "rate-out"), sent, "each frame is delivered or counted");
    }
}

#[test]
fn packets_are_paced_as_bytes_are_and_a_large_frame_is_its_segments() {
    let limits = Limits { packets: Some(Rate { per_second: 1000, burst: 100 }), bytes: None };
    for (rate_in, rate_out) in [(limits, Limits::default()), (Limits::default(), limits)] {
        let rules = |port| Rules {
            rate_in: if port == 0 { rate_in } else { Limits::default() },
            rate_out: if port == 1 { rate_out } else { Limits::default() },
            ..Rules::default()
        };
        let mut pair = Pair::new(1, |port| HeapPort { rules: rules(port), ..HeapPort::default() });
        let (frames, _) = pair.saturate(60, 2 * SECOND);
        assert!((2_080..=2_102).contains(&frames), "{frames}");
        pair.bed.run_out();
        let _ = pair.received();
        pair.bed.advance(SECOND);
        // 40 packets each.
        let header = Header {
            flags: F_NEEDS_CSUM,
            gso_type: GSO_TCPV4,
            hdr_len: 54,
            gso_size: 1000,
            csum_start: 34,
            csum_offset: 16,
            ..Header::NONE
        };
        for _ in 0..4 {
            pair.wires[0].send(0, HeapFrame::new(header, tcp(40_054, 0)));
            pair.bed.run();
        }
        assert_eq!(pair.received().0, 3, "the third borrows");
    }
}

#[test]
fn two_workers_share_one_rate() {
    let rate = 100 * MBIT;
    for out in [false, true] {
        let limited = bytes(rate, default_burst(rate));
        let rules = |port| match (port, out) {
            (0, false) => Rules { rate_in: limited, ..Rules::default() },
            (1, true) => Rules { rate_out: limited, ..Rules::default() },
            _ => Rules::default(),
        };
        let mut pair =
            Pair::new(2, |port| HeapPort { pairs: Some(2), rules: rules(port), ..HeapPort::default() });
        assert_eq!([0, 1].map(|queue| pair.bed.owner(PortId(0), queue)), [0, 1]);
        let (_, got) = pair.saturate(1514, SECOND / 4);
        is_rate(got, rate, SECOND / 4, 2 * 1514);
        let workers = [0, 1].map(|worker| pair.bed.totals(PortId(1)).of(worker).tx_packets.get());
        assert!(workers.iter().all(|packets| *packets > 500), "each has its turn: {workers:?}");
    }
}

#[test]
fn the_queues_of_a_port_take_turns() {
    let rules = |port| match port {
        0 => Rules { rate_in: bytes(10 * MBIT, 256 * KIB), ..Rules::default() },
        _ => Rules::default(),
    };
    let mut pair =
        Pair::new(1, |port| HeapPort { pairs: Some(4), rules: rules(port), ..HeapPort::default() });
    for queue in 0..4 {
        (0..100)
            .for_each(|_| pair.wires[0].send(queue, HeapFrame::new(Header::NONE, tcp(65_000, queue as u8))));
    }
    pair.bed.run_for(12 * SECOND);
    let waiting: Vec<_> = (0..4).map(|queue| pair.wires[0].waiting(queue)).collect();
    assert!(waiting.iter().all(|waiting| (38..=45).contains(waiting)), "{waiting:?}");
}

/// A port that is limited to `burst` bytes and 1000 bytes a second has used up its burst.
fn exhausted(tap: bool, burst: u64) -> Pair {
    let rules = |port| match port {
        0 => Rules { rate_in: bytes(1000, burst), ..Rules::default() },
        _ => Rules::default(),
    };
    let pairs = |port| if port == 0 && tap { None } else { Some(1) };
    let mut pair =
        Pair::new(1, |port| HeapPort { pairs: pairs(port), rules: rules(port), ..HeapPort::default() });
    for _ in 0..20 {
        pair.wires[0].send(0, HeapFrame::new(Header::NONE, tcp(1000, 0)));
    }
    pair.bed.run();
    pair
}

#[test]
fn a_paused_port_keeps_nobody_awake_and_sends_on_in_time() {
    for tap in [false, true] {
        let mut pair = exhausted(tap, 3000);
        assert_eq!(pair.received().0, 4, "three, and one that borrows");
        assert!(
            pair.bed.sleep(0) && !pair.bed.serve_events(0),
            "a descriptor that stays readable is not watched"
        );
        pair.wires[0].kick(0);
        pair.bed.run();
        assert_eq!(
            (pair.received().0, pair.wires[0].waiting(0)),
            (0, 16),
            "who kicks all the same is not heard"
        );
        pair.bed.run_for(SECOND * 10);
        let got = pair.received().0;
        assert!((9..=11).contains(&got), "{got}");
        pair.bed.run_out();
        assert_eq!((pair.received().0 + got, pair.wires[0].waiting(0)), (16, 0));
        assert_eq!(pair.bed.next_wake(), None, "nothing is left to be done");
        pair.wires[0].send(0, HeapFrame::new(Header::NONE, tcp(1000, 0)));
        pair.bed.run_out();
        assert_eq!(pair.received().0, 1);
    }
}

#[test]
fn a_paused_queue_can_be_stopped_and_started_and_unplugged() {
    let mut pair = exhausted(false, 3000);
    pair.bed.stop(PortId(0), 0);
    pair.bed.run();
    assert_eq!(pair.bed.next_wake(), None);
    pair.bed.start(PortId(0), 0);
    pair.bed.run_out();
    assert_eq!((pair.received().0, pair.wires[0].waiting(0)), (20, 0));
    let mut pair = exhausted(true, 3000);
    pair.bed.remove(PortId(0));
    pair.bed.run_out();
    assert_eq!((pair.received().0, pair.wires[0].waiting(0)), (4, 16));
}

#[test]
fn rules_that_change_are_obeyed_at_once_and_other_limits_go_on() {
    let mut pair = exhausted(true, 3000);
    assert_eq!(pair.received().0, 4);
    let statics = vec![(mac(0), 0)];
    let slow = Rules { rate_in: bytes(1000, 3000), static_macs: statics.clone(), ..Rules::default() };
    pair.bed.set_rules(PortId(0), &Rules { storm: Some(Rate { per_second: 1, burst: 1 }), ..slow.clone() });
    pair.bed.run();
    assert_eq!(pair.received().0, 0, "no new burst");
    pair.bed.set_rules(PortId(0), &Rules { rate_in: bytes(1000, 5000), ..slow });
    pair.bed.run();
    assert_eq!(pair.received().0, 6, "a new limit is a new one");
    pair.bed.set_rules(PortId(0), &Rules { static_macs: statics, ..Rules::default() });
    pair.bed.run();
    assert_eq!(pair.received().0, 10);
}

/// A port that gets 1000 bytes a second and has had its burst; `sent` frames of 1000 bytes were sent to it.
fn shaped(offloads: Offloads, header: Header, sent: usize) -> Pair {
    let rules = |port| match port {
        1 => Rules { rate_out: bytes(1000, 1000), ..Rules::default() },
        _ => Rules::default(),
    };
    let mut pair = Pair::new(1, |port| HeapPort { rules: rules(port), offloads, ..HeapPort::default() });
    for _ in 0..sent {
        pair.wires[0].send(0, HeapFrame::new(header, tcp(1000, 0)));
    }
    pair.bed.run();
    pair
}

#[test]
fn what_waits_is_delivered_when_the_limit_goes_and_counted_when_the_port_goes() {
    let mut pair = shaped(Offloads::all(), Header::NONE, 10);
    assert_eq!(pair.received().0, 2, "one, and one that borrows");
    pair.bed.set_rules(PortId(1), &Rules { static_macs: vec![(mac(1), 0)], ..Rules::default() });
    assert_eq!(pair.received().0, 8);
    pair.bed.run();
    assert_eq!(pair.bed.next_wake(), None);
    let mut pair = shaped(Offloads::all(), Header::NONE, 10);
    let totals = pair.bed.totals(PortId(1)).clone();
    pair.bed.remove(PortId(1));
    assert_eq!(totals.drops_by_name()["link-down"], 8);
    pair.bed.run();
    assert_eq!(pair.bed.next_wake(), None);
}

#[test]
fn what_a_receiver_takes_is_looked_at_when_it_gets_it() {
    let header = Header {
        flags: F_NEEDS_CSUM,
        gso_type: GSO_TCPV4,
        hdr_len: 54,
        gso_size: 100,
        csum_start: 34,
        csum_offset: 16,
        ..Header::NONE
    };
    let mut pair = shaped(Offloads::all(), header, 4);
    assert_eq!(pair.received().0, 1, "with the headers of its segments it is longer than the burst");
    pair.bed.set_offloads(PortId(1), Offloads::empty());
    pair.bed.run_out();
    let received = pair.wires[1].received(0);
    assert_eq!(received.len(), 3 * 10, "946 bytes in segments of 100");
    assert!(
        received.iter().all(|frame| !frame.header.is_gso() && !frame.header.needs_csum()),
        "a receiver that takes no offloads gets none"
    );
}

#[test]
fn a_queue_that_stands_is_marked_and_not_dropped() {
    let rules = |port| match port {
        1 => Rules { rate_out: bytes(100 * MBIT, 256 * KIB), ..Rules::default() },
        _ => Rules::default(),
    };
    let mut pair = Pair::new(1, |port| HeapPort { rules: rules(port), ..HeapPort::default() });
    // 20 ms wait, and as much as leaves comes in.
    (0..500).for_each(|_| pair.wires[0].send(0, HeapFrame::new(Header::NONE, tcp(1000, 0))));
    let mut marked = 0;
    for _ in 0..2000 {
        pair.bed.run_for(1000);
        let got = pair.wires[1].received(0);
        marked += got.iter().filter(|frame| frame.bytes[15] & 3 == 3).count() as u64;
        got.iter().for_each(|_| pair.wires[0].send(0, HeapFrame::new(Header::NONE, tcp(1000, 0))));
    }
    assert!(marked > 10, "{marked}");
    assert_eq!((pair.counter(1, "tx_marked"), pair.drops(1, "rate-out")), (marked, 0));
}

/// A migration does not wait for tokens, but what it lets pass is paid for.
#[test]
fn what_a_migration_lets_pass_is_charged() {
    let rate = Rate { per_second: 10, burst: 1 };
    let rate_out = Limits { packets: Some(rate), bytes: None };
    let rules = |port| if port == 1 { Rules { rate_out, ..Rules::default() } } else { Rules::default() };
    let mut pair = Pair::new(2, |port| HeapPort { rules: rules(port), ..HeapPort::default() });
    // No more may wait than the rate allows in a twentieth of a second, and one in any case.
    for _ in 0..3 {
        pair.wires[0].send(0, HeapFrame::new(Header::NONE, tcp(100, 0)));
    }
    pair.bed.run();
    let before = pair.received().0;
    pair.bed.migrate(PortId(0), 0, 1, &mut |_, _| {}).unwrap();
    pair.bed.run();
    let passed = before + pair.received().0;
    assert_eq!(passed + pair.drops(1, "rate-out"), 3);
    assert!(passed > before, "the migration let some pass");
    pair.wires[0].send(0, HeapFrame::new(Header::NONE, tcp(100, 0)));
    pair.bed.run_for((passed - 1) * SECOND / 10 - SECOND / 100);
    assert_eq!(pair.received().0, 0, "what has passed is not paid for");
    pair.bed.run_out();
    assert_eq!(pair.received().0, 1);
}
