//! Numbers as C's `%g` writes them, which is how ministat prints.
//!
//! This is not `ringferry_control::text`, which the program's own tables use: that one chooses a unit for its reader (`9.41 Gbit/s`) and
//! rounds to its prefix. Here the unit is the row's and stands above the column, a reader may paste the values into ministat, and a column of
//! them is only comparable without prefixes. Neither can be made of the other.

/// `%.{digits}g`: `digits` significant digits, trailing zeros dropped, an exponent when it is below -4 or
/// not below `digits`.
pub fn general(value: f64, digits: usize) -> String {
    if value.is_nan() {
        return "nan".into();
    }
    if value.is_infinite() {
        return if value > 0.0 { "inf".into() } else { "-inf".into() };
    }
    let digits = digits.max(1);
    if value == 0.0 {
        return if value.is_sign_negative() { "-0".into() } else { "0".into() };
    }
    // The exponent after rounding to so many digits, which may be one more than before.
    let scientific = format!("{value:.*e}", digits - 1);
    let (mantissa, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if exponent < -4 || exponent >= digits as i32 {
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{}e{sign}{:02}", trimmed(mantissa), exponent.unsigned_abs());
    }
    let decimals = (digits as i32 - 1 - exponent).max(0) as usize;
    trimmed(&format!("{value:.decimals$}")).into()
}

/// `%g`: six significant digits.
pub fn g(value: f64) -> String {
    general(value, 6)
}

fn trimmed(text: &str) -> &str {
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_look_as_printf_writes_them() {
        // What `printf '%g'` and `printf '%.8g'` of the C library print.
        for (value, six, eight) in [
            (0.0, "0", "0"),
            (100.0, "100", "100"),
            (238.047_614_284_762, "238.048", "238.04761"),
            (1_066_666_668.333, "1.06667e+09", "1.0666667e+09"),
            (999_999.5, "1e+06", "999999.5"),
            (99_999.95, "99999.9", "99999.95"),
            (999_999.7, "1e+06", "999999.7"),
            (0.000_123_456_789, "0.000123457", "0.00012345679"),
            (0.000_012_345_678_9, "1.23457e-05", "1.2345679e-05"),
            (-17.35, "-17.35", "-17.35"),
            (1e100, "1e+100", "1e+100"),
            (123_456.0, "123456", "123456"),
            (1_234_567.0, "1.23457e+06", "1234567"),
        ] {
            assert_eq!((g(value).as_str(), general(value, 8).as_str()), (six, eight));
        }
        assert_eq!(
            [g(f64::NAN), g(f64::INFINITY), g(f64::NEG_INFINITY), g(-0.0)],
            ["nan", "inf", "-inf", "-0"]
        );
    }
}
