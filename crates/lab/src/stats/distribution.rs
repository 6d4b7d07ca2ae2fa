//! Quantiles of Student's t distribution: exact for Welch's test, and rounded as in ministat's table for
//! Student's.

use std::f64::consts::PI;

use serde::{Deserialize, Serialize};

/// The confidence levels ministat knows, two-sided.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Confidence {
    /// 80 %.
    #[serde(rename = "80")]
    C80,
    /// 90 %.
    #[serde(rename = "90")]
    C90,
    /// 95 %, the usual.
    #[default]
    #[serde(rename = "95")]
    C95,
    /// 98 %.
    #[serde(rename = "98")]
    C98,
    /// 99 %.
    #[serde(rename = "99")]
    C99,
    /// What ministat calls 99.5 %: its column holds the values of 99.8 %.
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

/// What the last column holds there: the true values are 4.785, 4.501, 4.297, 4.144, 4.025 and 3.930.
const MISPRINTS: [f64; 6] = [4.782, 4.499, 4.296, 4.143, 4.024, 3.929];

/// Above this many degrees of freedom t is the normal distribution to more digits than are ever printed.
const NORMAL: f64 = 1e8;

/// The t that a fraction `level` of the distribution lies within, on both sides of zero.
fn quantile(level: f64, df: f64) -> f64 {
    let df = df.clamp(1e-3, NORMAL);
    // The probability within ±t grows with t: find an upper end, then halve.
    let within = |t: f64| 1.0 - incomplete_beta(df / 2.0, 0.5, df / (df + t * t));
    let mut high = 1.0;
    while within(high) < level && high < 1e150 {
        high *= 2.0;
    }
    let mut low = 0.0;
    // 60 halvings exhaust the bits of any interval found above.
    for _ in 0..60 {
        let middle = (low + high) / 2.0;
        if within(middle) < level { low = middle } else { high = middle }
    }
    (low + high) / 2.0
}

/// The regularised incomplete beta function, by its continued fraction (DLMF 8.17.22), evaluated by Lentz's
/// method.
fn incomplete_beta(a: f64, b: f64, x: f64) -> f64 {
    if x <= 0.0 || x >= 1.0 {
        return x.clamp(0.0, 1.0);
    }
    // The fraction converges fast on one side only; the other side is its complement (8.17.4).
    if x > (a + 1.0) / (a + b + 2.0) {
        return 1.0 - incomplete_beta(b, a, 1.0 - x);
    }
    let front = (a * x.ln() + b * (-x).ln_1p() + ln_gamma(a + b) - ln_gamma(a) - ln_gamma(b)).exp() / a;
    let tiny = 1e-300;
    let guard = |v: f64| if v.abs() < tiny { tiny } else { v };
    let (mut c, mut d) = (1.0, 1.0 / guard(1.0 - (a + b) * x / (a + 1.0)));
    let mut fraction = d;
    for m in 1..10_000 {
        let m = f64::from(m);
        let even = m * (b - m) * x / ((a + 2.0 * m - 1.0) * (a + 2.0 * m));
        let odd = -(a + m) * (a + b + m) * x / ((a + 2.0 * m) * (a + 2.0 * m + 1.0));
        let mut step = 1.0;
        for term in [even, odd] {
            d = 1.0 / guard(1.0 + term * d);
            c = guard(1.0 + term / c);
            step = c * d;
            fraction *= step;
        }
        if (step - 1.0).abs() < 1e-15 {
            break;
        }
    }
    front * fraction
}

/// The logarithm of the gamma function of a positive number: Stirling's series (DLMF 5.11.1) after
/// shifting the argument to where it is exact to the last digits.
fn ln_gamma(x: f64) -> f64 {
    let mut x = x;
    let mut shift = 0.0;
    while x < 15.0 {
        shift += x.ln();
        x += 1.0;
    }
    let square = x * x;
    let series = (1.0 / 12.0
        - (1.0 / 360.0 - (1.0 / 1260.0 - (1.0 / 1680.0 - 1.0 / (1188.0 * square)) / square) / square)
            / square)
        / x;
    (x - 0.5) * x.ln() - x + 0.5 * (2.0 * PI).ln() + series - shift
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gamma_is_factorial() {
        let mut factorial = 1.0f64;
        for n in 1..30 {
            let error = ln_gamma(f64::from(n)) - factorial.ln();
            assert!(error.abs() < 1e-12 * factorial.ln().max(1.0), "{n}: {error}");
            factorial *= f64::from(n);
        }
        assert!((ln_gamma(0.5) - PI.sqrt().ln()).abs() < 1e-13);
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
