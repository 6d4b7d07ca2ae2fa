//! 2000 UDP flows, 20 sources by 100 destinations, of the smallest frames.

use ringferry_nic::tx::select_queue;
use ringferry_packet::flow::flow_hash;

use super::{Between, UDP as HEADERS, Wrong};

/// Bytes of a frame without its checksum.
pub const FRAME: usize = 60;
const SOURCES: usize = 20;
const DESTINATIONS: usize = 100;
pub const FLOWS: usize = SOURCES * DESTINATIONS;

/// Behind the headers is a number, and as many bytes that depend on it.
const NUMBER: std::ops::Range<usize> = HEADERS..HEADERS + 8;

/// The number of a frame that does not count.
pub const HELLO: u64 = u64::MAX;

/// Where frames go that are to be forwarded, and where they come from.
const ARRIVING: [u8; 12] = [2, 0, 0, 0, 0x0a, 0, 2, 0, 0, 0, 0x0a, 1];
/// Addresses of the next hop and of the forwarder's output.
pub const NEXT_HOP: [u8; 6] = [2, 0, 0, 0, 0x0b, 1];
pub const OUTPUT: [u8; 6] = [2, 0, 0, 0, 0x0b, 0];

/// The addresses that a forwarder writes: destination, then source.
pub fn departing() -> [u8; 12] {
    let mut macs = [0; 12];
    macs[..6].copy_from_slice(&NEXT_HOP);
    macs[6..].copy_from_slice(&OUTPUT);
    macs
}

/// The frames of all flows, one each.
#[derive(Debug)]
pub struct Flows(Vec<[u8; FRAME]>);

impl Flows {
    pub fn new() -> Self {
        Self((0..FLOWS).map(frame).collect())
    }

    /// The frame of a flow, with the number 0 in it.
    #[inline]
    pub fn frame(&self, flow: usize) -> &[u8; FRAME] {
        &self.0[flow]
    }

    /// The frame of a flow with a number.
    pub fn numbered(&self, flow: usize, number: u64) -> [u8; FRAME] {
        let mut frame = self.0[flow];
        number_it(&mut frame, number);
        frame
    }

    /// Returns true for a frame with the number of one that does not count.
    pub fn is_greeting(frame: &[u8]) -> bool {
        frame.get(NUMBER).is_some_and(|number| number == HELLO.to_le_bytes())
    }

    /// How many flows each of `queues` gets: the most and the least.
    pub fn spread(&self, queues: usize) -> [usize; 2] {
        let mut spread = vec![0; queues];
        for frame in &self.0 {
            spread[select_queue(Some(flow_hash(frame)), queues, 0)] += 1;
        }
        [spread.iter().copied().max().unwrap_or(0), spread.iter().copied().min().unwrap_or(0)]
    }
}

fn number_it(frame: &mut [u8; FRAME], number: u64) {
    frame[NUMBER].copy_from_slice(&number.to_le_bytes());
    let mark = number.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes();
    frame[NUMBER.end..NUMBER.end + 8].copy_from_slice(&mark);
}

fn frame(flow: usize) -> [u8; FRAME] {
    let between = Between {
        macs: ARRIVING,
        // The networks of RFC 2544.
        source: [198, 18, 10, 1 + (flow % SOURCES) as u8],
        destination: [198, 19, 10, 1 + (flow / SOURCES) as u8],
        ports: [2000, 2000],
        whole: false,
    };
    let mut frame = [0; FRAME];
    frame[..HEADERS].copy_from_slice(&between.udp(FRAME));
    number_it(&mut frame, 0);
    frame
}

/// Checks what a forwarder has made of numbered frames.
#[derive(Debug)]
pub struct Checker {
    flows: Flows,
    /// The next number of each flow.
    next: Vec<u64>,
    checked: u64,
}

impl Checker {
    pub fn new() -> Self {
        Self { flows: Flows::new(), next: vec![0; FLOWS], checked: 0 }
    }

    /// Frames that were good.
    pub fn checked(&self) -> u64 {
        self.checked
    }

    /// Looks at the next frame: its addresses are the forwarder's, it is the next of its flow, and nothing else of it
    /// has changed.
    pub fn check(&mut self, frame: &[u8]) -> Result<(), Wrong> {
        let wrong = |what: &str| Err(Wrong(format!("{what}: {frame:02x?}")));
        let Ok(frame) = <&[u8; FRAME]>::try_from(frame) else {
            return wrong("a frame of another length came");
        };
        if frame[..12] != departing() {
            return wrong("a frame came with wrong Ethernet addresses");
        }
        let (source, destination) = (usize::from(frame[29]), usize::from(frame[33]));
        if !(1..=SOURCES).contains(&source) || !(1..=DESTINATIONS).contains(&destination) {
            return wrong("a frame of no flow came");
        }
        let flow = source - 1 + (destination - 1) * SOURCES;
        let expected = self.flows.numbered(flow, self.next[flow]);
        if frame[12..] != expected[12..] {
            return wrong("a frame was lost, repeated, out of order in its flow, or damaged");
        }
        self.next[flow] += 1;
        self.checked += 1;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use ringferry_packet::checksum::Sum;
    use ringferry_packet::parse::Layers;

    use super::*;

    fn forwarded(flows: &Flows, flow: usize, number: u64) -> [u8; FRAME] {
        let mut frame = flows.numbered(flow, number);
        frame[..12].copy_from_slice(&departing());
        frame
    }

    #[test]
    fn flows_are_all_different_and_good_udp() {
        let flows = Flows::new();
        let hashes: std::collections::BTreeSet<_> =
            (0..FLOWS).map(|flow| flow_hash(flows.frame(flow))).collect();
        // Two of 2000 hashes of 32 bits are hardly ever the same.
        assert!(hashes.len() >= FLOWS - 2);
        for flow in 0..FLOWS {
            let mut sum = Sum::default();
            sum.add(&flows.frame(flow)[14..34]);
            assert_eq!(sum.finish(), 0, "{flow}");
            assert!(Layers::parse(flows.frame(flow)).is_ok());
        }
    }

    #[test]
    fn flows_spread_over_queues() {
        for queues in [2, 4, 8] {
            let [most, least] = Flows::new().spread(queues);
            let fair = FLOWS / queues;
            assert!(most < fair * 5 / 4 && least > fair * 3 / 4, "{queues}: {least} to {most}");
        }
        assert_eq!(Flows::new().spread(1), [FLOWS; 2]);
    }

    #[test]
    fn order_counts_within_a_flow_and_not_between_flows() {
        let (flows, mut checker) = (Flows::new(), Checker::new());
        for (flow, number) in [(5, 0), (1999, 0), (5, 1), (0, 0), (5, 2), (1999, 1)] {
            checker.check(&forwarded(&flows, flow, number)).unwrap();
        }
        assert_eq!(checker.checked(), 6);
        assert!(checker.check(&forwarded(&flows, 5, 4)).is_err(), "one lost");
        assert!(checker.check(&forwarded(&flows, 5, 2)).is_err(), "one repeated");
        checker.check(&forwarded(&flows, 5, 3)).unwrap();
        assert!(Flows::is_greeting(&forwarded(&flows, 5, HELLO)) && !Flows::is_greeting(flows.frame(5)));
    }

    #[test]
    fn a_frame_that_is_not_rewritten_or_damaged_is_found() {
        let (flows, mut checker) = (Flows::new(), Checker::new());
        assert!(checker.check(&flows.numbered(7, 0)).is_err(), "not rewritten");
        let good = forwarded(&flows, 7, 0);
        assert!(checker.check(&good[..59]).is_err());
        for at in 0..FRAME {
            let mut bad = good;
            bad[at] ^= 0x20;
            assert!(checker.check(&bad).is_err(), "byte {at}");
        }
        checker.check(&good).unwrap();
    }
}
