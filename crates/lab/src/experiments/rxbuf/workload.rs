//! The traffic that arrives: five kinds, as lengths of frames and the order they come in.

use fastrand::Rng;
use ringferry_nic::rx::PolicyKind;

/// A full TCP frame at MTU 1500: as many segments of 1448 bytes as 64 KiB hold, and headers. Linux sends these.
pub(super) const GSO: usize = 45 * SEGMENT + HEADERS;
/// Payload bytes of a segment.
pub(super) const SEGMENT: usize = 1448;
/// Ethernet, IPv4 and TCP with time stamps.
pub(super) const HEADERS: usize = 14 + 20 + 32;

/// About how many frames a sequence has before it begins again.
const LONG: usize = 4096;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Workload {
    Small,
    /// 64, 570 and 1518 bytes, 7 : 4 : 1.
    Imix,
    /// Frames of MTU 1500.
    Mtu,
    /// 64 KiB that nobody has cut up yet.
    Gso,
    /// Those, and acknowledgements of 64 bytes: what a host sees that sends and receives.
    Bimodal,
}

impl Workload {
    pub(super) const ALL: [Workload; 5] =
        [Workload::Small, Workload::Imix, Workload::Mtu, Workload::Gso, Workload::Bimodal];

    pub(super) fn name(self) -> &'static str {
        match self {
            Workload::Small => "64",
            Workload::Imix => "imix",
            Workload::Mtu => "1500",
            Workload::Gso => "gso",
            Workload::Bimodal => "bimodal",
        }
    }

    /// For the title of its rows.
    pub(super) fn title(self) -> &'static str {
        match self {
            Workload::Small => "64-byte frames",
            Workload::Imix => "IMIX",
            Workload::Mtu => "MTU 1500",
            Workload::Gso => "64 KiB GSO",
            Workload::Bimodal => "acknowledgements and 64 KiB GSO",
        }
    }

    /// The fixed length that suits it: short buffers waste less on short frames, long ones take fewer descriptors for
    /// long frames.
    pub(super) fn better_fixed(self) -> PolicyKind {
        match self {
            Workload::Small | Workload::Imix | Workload::Mtu => PolicyKind::FixedMtu,
            Workload::Gso | Workload::Bimodal => PolicyKind::FixedPage,
        }
    }

    /// Lengths of frames, and how many there are of each. `acks` to every long frame of the bimodal mix.
    pub(super) fn mix(self, acks: usize) -> Vec<(usize, usize)> {
        match self {
            Workload::Small => vec![(64, 1)],
            Workload::Imix => vec![(64, 7), (570, 4), (1518, 1)],
            Workload::Mtu => vec![(1514, 1)],
            Workload::Gso => vec![(GSO, 1)],
            Workload::Bimodal => vec![(64, acks), (GSO, 1)],
        }
    }
}

/// Frames in a random order, which begins again after some thousand.
#[derive(Clone, Debug)]
pub(super) struct Sequence {
    lengths: Vec<usize>,
    order: Vec<u8>,
}

impl Sequence {
    /// Shuffles so many frames of each length.
    pub(super) fn new(mix: &[(usize, usize)], seed: u64) -> Self {
        let once = mix.iter().enumerate().flat_map(|(at, &(_, count))| std::iter::repeat_n(at as u8, count));
        let once: Vec<u8> = once.collect();
        let mut order = once.repeat((LONG / once.len()).max(1));
        Rng::with_seed(seed).shuffle(&mut order);
        Self { lengths: mix.iter().map(|&(length, _)| length).collect(), order }
    }

    pub(super) fn lengths(&self) -> &[usize] {
        &self.lengths
    }

    pub(super) fn longest(&self) -> usize {
        self.lengths.iter().copied().max().unwrap_or(0)
    }

    /// Bytes of all frames once, over their number.
    pub(super) fn mean(&self) -> f64 {
        let bytes: usize = self.order.iter().map(|&at| self.lengths[usize::from(at)]).sum();
        bytes as f64 / self.order.len() as f64
    }

    /// Returns the index of the length that the `number`-th frame has.
    #[inline]
    pub(super) fn at(&self, number: u64) -> usize {
        usize::from(self.order[(number % self.order.len() as u64) as usize])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sequence_has_its_mix_whatever_the_order() {
        for workload in Workload::ALL {
            for acks in [1, 40] {
                let mix = workload.mix(acks);
                let orders = [1, 2].map(|seed| Sequence::new(&mix, seed));
                for sequence in &orders {
                    let total: usize = mix.iter().map(|&(_, count)| count).sum();
                    let rounds = sequence.order.len() / total;
                    for (at, &(_, count)) in mix.iter().enumerate() {
                        let found =
                            (0..sequence.order.len() as u64).filter(|&n| sequence.at(n) == at).count();
                        assert_eq!(found, rounds * count, "{workload:?}");
                    }
                }
                assert_eq!(orders[0].order != orders[1].order, mix.len() > 1, "{workload:?}");
            }
        }
    }

    #[test]
    fn imix_is_what_it_is_everywhere() {
        let mean = Sequence::new(&Workload::Imix.mix(1), 7).mean();
        assert!((mean - 353.83).abs() < 0.01, "{mean}");
    }
}
