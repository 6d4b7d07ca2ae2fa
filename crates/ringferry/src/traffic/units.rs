//! Numbers for people: three significant digits and a decimal prefix.

/// `value` with a prefix of 1000 and `unit`: `9.41 Gbit/s`, `812 kpps`, `17 B`.
pub fn scaled(value: f64, unit: &str) -> String {
    let mut value = value;
    let mut prefixes = ["", "k", "M", "G", "T"].into_iter();
    let mut prefix = prefixes.next().unwrap_or_default();
    // 999.5 would print as 1000.
    while value >= 999.5 {
        let Some(next) = prefixes.next() else { break };
        (value, prefix) = (value / 1000.0, next);
    }
    let digits = match value {
        v if prefix.is_empty() && v.fract() == 0.0 => 0,
        v if v >= 99.95 => 0,
        v if v >= 9.995 => 1,
        _ => 2,
    };
    format!("{value:.digits$} {prefix}{unit}")
}

/// A rate in bits per second.
pub fn bit_rate(bits_per_second: f64) -> String {
    scaled(bits_per_second, "bit/s")
}

/// A duration given in microseconds.
pub fn micros(value: f64) -> String {
    if value < 999.5 { format!("{value:.1} µs") } else { format!("{:.2} ms", value / 1000.0) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_significant_digits() {
        for (value, text) in [
            (0.0, "0 B"),
            (17.0, "17 B"),
            (999.0, "999 B"),
            (999.7, "1.00 kB"),
            (9_412_000_000.0, "9.41 GB"),
            (94_120_000.0, "94.1 MB"),
            (812_345.0, "812 kB"),
            (9.996, "10.0 B"),
            (5e16, "50000 TB"),
        ] {
            assert_eq!(scaled(value, "B"), text);
        }
        assert_eq!(bit_rate(1e10), "10.0 Gbit/s");
        assert_eq!((micros(12.34), micros(1500.0)), ("12.3 µs".into(), "1.50 ms".into()));
    }
}
