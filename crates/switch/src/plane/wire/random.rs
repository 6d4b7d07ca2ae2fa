//! Chance that can be repeated: xoshiro256** (Blackman and Vigna, 2018), seeded by SplitMix64 (Steele, Lea and Flood, 2014), and the distributions
//! of delays made of it.
//!
//! The same seed gives the same numbers in every version of the program: tests hold the generators against published outputs. The distributions are
//! formulas, not tables, so each value of a distribution follows from the generator and the C library's logarithm and roots.

use crate::impairments::{Distribution, Share};

/// The shape of the Pareto distribution. It has a variance above 2; at 3 the formulas below are short.
const PARETO_SHAPE: f64 = 3.0;

/// Deviations from the mean are cut here, in standard deviations: the Pareto distribution has no end, and one frame in some ten thousand would else wait for
/// a time that nobody has asked for.
const MAX_DEVIATION: f64 = 16.0;

/// One stream of random numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Random([u64; 4]);

/// The next number of SplitMix64, whose state is `state`.
pub(crate) fn split_mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut mixed = *state;
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

impl Random {
    /// Begins the stream of a seed.
    pub(crate) fn new(mut seed: u64) -> Random {
        Random(std::array::from_fn(|_| split_mix(&mut seed)))
    }

    /// Goes on with a stream where another process has stood. All zeros, which is no state, begin the stream of seed 0.
    pub(crate) fn of_state(state: [u64; 4]) -> Random {
        if state == [0; 4] { Random::new(0) } else { Random(state) }
    }

    /// Returns where the stream stands.
    pub(crate) fn state(&self) -> [u64; 4] {
        self.0
    }

    /// Returns the next number.
    pub(crate) fn next(&mut self) -> u64 {
        let [a, b, c, d] = &mut self.0;
        let result = b.wrapping_mul(5).rotate_left(7).wrapping_mul(9);
        let shifted = *b << 17;
        *c ^= *a;
        *d ^= *b;
        *b ^= *c;
        *a ^= *d;
        *c ^= shifted;
        *d = d.rotate_left(45);
        result
    }

    /// Returns a number below `bound`; 0 if that is 0.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(bound)) >> 64) as u64
    }

    /// Returns whether something of this probability happens. The stream goes on only if there is a doubt.
    pub(crate) fn happens(&mut self, share: Share) -> bool {
        match share {
            Share::NONE => false,
            Share::ALL => true,
            share => self.below(Share::ALL.billionths().into()) < share.billionths().into(),
        }
    }

    /// Returns a number above 0 and not above 1.
    fn unit(&mut self) -> f64 {
        // The upper 53 bits, as many as a mantissa has.
        ((self.next() >> 11) + 1) as f64 / (1u64 << 53) as f64
    }

    /// Returns a normal deviate by the transform of Box and Muller: mean 0, standard deviation 1.
    fn normal(&mut self) -> f64 {
        let (radius, angle) = ((-2.0 * self.unit().ln()).sqrt(), std::f64::consts::TAU * self.unit());
        radius * angle.cos()
    }

    /// Returns a Pareto deviate by inversion, moved and scaled to mean 0 and standard deviation 1.
    fn pareto(&mut self) -> f64 {
        let mean = PARETO_SHAPE / (PARETO_SHAPE - 1.0);
        let deviation = (mean / (PARETO_SHAPE - 2.0)).sqrt() / (PARETO_SHAPE - 1.0).sqrt();
        (self.unit().powf(-1.0 / PARETO_SHAPE) - mean) / deviation
    }

    /// Returns the deviation of a delay from its mean, as a multiple of the jitter.
    pub(crate) fn deviation(&mut self, distribution: Distribution) -> f64 {
        let deviation = match distribution {
            Distribution::Uniform => 2.0 * self.unit() - 1.0,
            Distribution::Normal => self.normal(),
            Distribution::Pareto => self.pareto(),
            // Variances of independent parts add up: 1 and 9 make 10.
            Distribution::ParetoNormal => (self.normal() + 3.0 * self.pareto()) / 10f64.sqrt(),
        };
        deviation.clamp(-MAX_DEVIATION, MAX_DEVIATION)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The outputs that the authors' programs give, and that other libraries have in their tests.
    #[test]
    fn the_generators_are_the_published_ones() {
        let mut state = 1_234_567;
        let numbers: Vec<_> = (0..3).map(|_| split_mix(&mut state)).collect();
        assert_eq!(
            numbers,
            [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]
        );
        let mut random = Random([1, 2, 3, 4]);
        let numbers: Vec<_> = (0..5).map(|_| random.next()).collect();
        assert_eq!(numbers, [11520, 0, 1_509_978_240, 1_215_971_899_390_074_240, 1_216_172_134_540_287_360]);
    }

    #[test]
    fn a_share_happens_as_often_as_it_says() {
        let mut random = Random::new(7);
        for (billionths, least, most) in
            [(1_000_000, 800, 1_200), (100_000_000, 99_000, 101_000), (500_000_000, 498_500, 501_500)]
        {
            let share = Share::of_billionths(billionths).unwrap();
            let count = (0..1_000_000).filter(|_| random.happens(share)).count();
            assert!((least..most).contains(&count), "{billionths}: {count}");
        }
        let before = random.clone();
        assert!(random.happens(Share::ALL) && !random.happens(Share::NONE));
        assert_eq!(random, before, "what is certain takes no number");
    }

    #[test]
    fn deviations_have_the_mean_and_the_spread_of_their_distribution() {
        const COUNT: u32 = 400_000;
        for (distribution, deviation) in [
            (Distribution::Uniform, 1.0 / 3f64.sqrt()),
            (Distribution::Normal, 1.0),
            // The cut takes the far end of the tail away, and with it a part of the variance.
            (Distribution::Pareto, 0.93),
            (Distribution::ParetoNormal, 0.93),
        ] {
            let mut random = Random::new(42);
            let all: Vec<_> = (0..COUNT).map(|_| random.deviation(distribution)).collect();
            let mean = all.iter().sum::<f64>() / f64::from(COUNT);
            let variance = all.iter().map(|one| (one - mean).powi(2)).sum::<f64>() / f64::from(COUNT);
            assert!(mean.abs() < 0.02, "{distribution:?}: {mean}");
            assert!((variance.sqrt() - deviation).abs() < 0.07, "{distribution:?}: {}", variance.sqrt());
            assert!(all.iter().all(|one| one.abs() <= MAX_DEVIATION));
        }
        // Half of all Pareto delays are below the median, which is far below the mean.
        let mut random = Random::new(1);
        let early = (0..10_000).filter(|_| random.deviation(Distribution::Pareto) < 0.0).count();
        assert!((6_900..7_200).contains(&early), "{early}");
    }

    #[test]
    fn a_stream_goes_on_where_it_stood() {
        let mut random = Random::new(9);
        random.next();
        let mut other = Random::of_state(random.state());
        assert_eq!(
            (0..9).map(|_| random.next()).collect::<Vec<_>>(),
            (0..9).map(|_| other.next()).collect::<Vec<_>>()
        );
        assert_eq!(Random::of_state([0; 4]), Random::new(0));
    }
}
