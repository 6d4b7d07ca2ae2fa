//! Quantiles of Student's t distribution: exact for Welch's test, and rounded as in ministat's table for
//! Student's.

use serde::{Deserialize, Serialize};
use statrs::distribution::{ContinuousCDF, Normal, StudentsT};

/// The confidence levels ministat knows, two-sided.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub enum Confidence {
    #[serde(rename = "80")]
    C80,
    #[serde(rename = "90")]
    C90,
    /// The usual level.
    #[default]
    #[serde(rename = "95")]
    C95,
    #[serde(rename = "98")]
    C98,
    #[serde(rename = "99")]
    C99,
    /// The level that ministat calls 99.5 %: its column holds the values of 99.8 %.
    #[serde(rename = "99.5")]
    C995,
}

impl Confidence {
    /// All of them, lowest first.
    pub const ALL: [Self; 6] = [Self::C80, Self::C90, Self::C95, Self::C98, Self::C99, Self::C995];

    /// Per cent, as in its name.
    pub fn percent(self) -> f64 {
        match self {
            Self::C80 => 80.0,
            Self::C90 => 90.0,
            Self::C95 => 95.0,
            Self::C98 => 98.0,
            Self::C99 => 99.0,
            Self::C995 => 99.5,
        }
    }

    /// The level of that many per cent, if it is one of ministat's.
    pub fn from_percent(percent: f64) -> Option<Self> {
        Self::ALL.into_iter().find(|level| level.percent() == percent)
    }

    /// The critical t for `df` degrees of freedom, which need not be whole.
    pub fn t(self, df: f64) -> f64 {
        quantile(self.percent() / 100.0, df)
    }

    /// The critical t from ministat's table: three decimals up to 100 degrees of freedom, then the
    /// normal distribution. Its last column, named 99.5, holds the two-sided values of 99.8 %, six of
    /// them a little off.
    pub fn table_t(self, df: usize) -> f64 {
        let misprint = df.checked_sub(MISPRINTED).and_then(|at| MISPRINTS.get(at));
        if let (Self::C995, Some(t)) = (self, misprint) {
            return *t;
        }
        let level = if self == Self::C995 { 0.998 } else { self.percent() / 100.0 };
        let exact = quantile(level, if df > TABLE { f64::INFINITY } else { df as f64 });
        (exact * 1000.0).round() / 1000.0
    }
}

/// Degrees of freedom in ministat's table.
const TABLE: usize = 100;

/// The first degrees of freedom where the last column is off.
const MISPRINTED: usize = 7;

/// The values of the last column there: the true values are 4.785, 4.501, 4.297, 4.144, 4.025 and 3.930.
const MISPRINTS: [f64; 6] = [4.782, 4.499, 4.296, 4.143, 4.024, 3.929];

/// From this many degrees of freedom on t is expanded around the normal distribution: statrs inverts the incomplete beta function,
/// which loses more digits the more degrees there are (at a million three are right), and here the expansion has seven.
const EXPANDED: f64 = 500.0;

/// The t that a fraction `level` of the distribution lies within, on both sides of zero.
fn quantile(level: f64, df: f64) -> f64 {
    let below = (1.0 + level) / 2.0;
    if let (true, Ok(student)) = (df < EXPANDED, StudentsT::new(0.0, 1.0, df)) {
        return student.inverse_cdf(below);
    }
    // Abramowitz and Stegun 26.7.5, two terms.
    let z = Normal::standard().inverse_cdf(below);
    let first = (z.powi(3) + z) / (4.0 * df);
    let second = (5.0 * z.powi(5) + 16.0 * z.powi(3) + 3.0 * z) / (96.0 * df * df);
    z + first + second
}

#[cfg(test)]
mod tests {
    use std::f64::consts::PI;

    use super::*;

    /// Degrees of freedom and the quantiles of all levels, as this crate computed them by itself (a continued fraction and
    /// bisection) before statrs did.
    #[allow(
        clippy::approx_constant,
        reason = "2.718 is a number of degrees of freedom between two whole ones"
    )]
    const BEFORE: [(f64, [f64; 6]); 14] = [
        (
            1.0,
            [
                3.077683537175,
                6.313751514675,
                12.706204736175,
                31.820515953774,
                63.656741162871,
                127.321336468870,
            ],
        ),
        (
            1.5,
            [
                2.196398417566,
                3.705180820097,
                6.016663104428,
                11.197316179568,
                17.820310514463,
                28.316730404480,
            ],
        ),
        (
            2.0,
            [1.885618083164, 2.919985580354, 4.302652729749, 6.964556734283, 9.924843200918, 14.089047275555],
        ),
        (
            2.718,
            [1.684694481147, 2.456321045196, 3.377645252202, 4.939758402898, 6.484127856089, 8.451790695579],
        ),
        (
            3.06,
            [1.629114708038, 2.334670024693, 3.147434385722, 4.470277259565, 5.728793318042, 7.281452319711],
        ),
        (
            4.0,
            [1.533206274059, 2.131846786327, 2.776445105198, 3.746947387979, 4.604094871350, 5.597568367075],
        ),
        (
            5.5,
            [1.455977033464, 1.975279704039, 2.501858617589, 3.240725680694, 3.849911466001, 4.516046975994],
        ),
        (
            8.0,
            [1.396815309744, 1.859548037531, 2.306004135204, 2.896459447710, 3.355387331333, 3.832518685344],
        ),
        (
            13.37,
            [1.348175002114, 1.767193155578, 2.154306952431, 2.640254136738, 2.998461974036, 3.354216280564],
        ),
        (
            30.0,
            [1.310415025391, 1.697260886594, 2.042272456301, 2.457261542401, 2.749995653567, 3.029798223648],
        ),
        (
            64.25,
            [1.294867255159, 1.668917646379, 1.997579958809, 2.385799180963, 2.654538120098, 2.907208429683],
        ),
        (
            100.0,
            [1.290074761346, 1.660234326085, 1.983971518524, 2.364217366238, 2.625890521438, 2.870651523837],
        ),
        (
            1000.5,
            [1.282398297809, 1.646378054360, 1.962337892459, 2.330080805425, 2.580752232174, 2.813274733561],
        ),
        (
            1000000.0,
            [1.281552411158, 1.644855148978, 1.959966356927, 2.326351603148, 2.575834220181, 2.807039999667],
        ),
    ];

    #[test]
    fn quantiles_are_what_they_were() {
        for (df, values) in BEFORE {
            for (level, before) in Confidence::ALL.into_iter().zip(values) {
                let error = level.t(df) / before - 1.0;
                assert!(error.abs() < 1e-6, "{level:?} {df}: {} and {before} before", level.t(df));
            }
        }
    }

    #[test]
    fn the_table_is_what_it_was() {
        // All of it in thousandths, put together to a number for each level.
        let digest = |level: Confidence| {
            let thousandths = |df| (level.table_t(df) * 1000.0).round() as u64;
            (1..=110).fold(0u64, |sum, df| sum.wrapping_mul(1_000_003) ^ thousandths(df))
        };
        let before = [
            0xd2b8_0790_dcf5_6724,
            0x04e6_c5b5_1090_9117,
            0xa90f_dd58_6cad_e04a,
            0x22ac_8c8a_50d7_f2fc,
            0xdf39_7e6c_a7c9_0c71,
            0xa1bd_07d4_2c96_0b30,
        ];
        assert_eq!(Confidence::ALL.map(digest), before);
    }

    #[test]
    fn the_expansion_takes_over_without_a_step() {
        for level in Confidence::ALL {
            let [before, after] = [EXPANDED - 0.001, EXPANDED].map(|df| level.t(df));
            assert!((before - after).abs() < 1e-6 && after <= before, "{level:?}: {before} {after}");
        }
    }

    #[test]
    fn quantiles_are_those_of_the_closed_forms() {
        for level in Confidence::ALL {
            let p = level.percent() / 100.0;
            // One and two degrees of freedom have closed forms.
            let one = (PI * p / 2.0).tan();
            let two = p * (2.0 / (1.0 - p * p)).sqrt();
            assert!((level.t(1.0) / one - 1.0).abs() < 1e-10, "{level:?}");
            assert!((level.t(2.0) / two - 1.0).abs() < 1e-10, "{level:?}");
        }
        // The normal distribution, to ten digits.
        assert!((Confidence::C95.t(f64::INFINITY) - 1.959_963_984_5).abs() < 1e-6);
    }

    #[test]
    fn quantiles_between_whole_degrees_of_freedom_lie_between_their_neighbours() {
        for tenths in 11..300 {
            let df = f64::from(tenths) / 10.0;
            let t = |df| Confidence::C95.t(df);
            assert!(t(df.ceil()) <= t(df) && t(df) <= t(df.floor()), "{df}");
        }
    }

    #[test]
    fn the_table_has_the_printed_values() {
        // From any printed table of Student's t.
        for (df, values) in [
            (4, [1.533, 2.132, 2.776, 3.747, 4.604]),
            (8, [1.397, 1.860, 2.306, 2.896, 3.355]),
            (30, [1.310, 1.697, 2.042, 2.457, 2.750]),
            (100, [1.290, 1.660, 1.984, 2.364, 2.626]),
            (101, [1.282, 1.645, 1.960, 2.326, 2.576]),
        ] {
            for (level, value) in Confidence::ALL.into_iter().zip(values) {
                assert_eq!(level.table_t(df), value, "{df} {level:?}");
            }
        }
    }

    #[test]
    fn the_last_column_is_odd_as_in_ministat() {
        // Two-sided 99.5 % at infinity would be 2.807.
        assert_eq!(Confidence::C995.table_t(1000), 3.090);
        assert!((Confidence::C995.t(f64::INFINITY) - 2.807).abs() < 1e-3);
    }

    #[test]
    fn levels_are_found_by_their_per_cent() {
        for level in Confidence::ALL {
            assert_eq!(Confidence::from_percent(level.percent()), Some(level));
        }
        assert_eq!(Confidence::from_percent(97.0), None);
    }
}
