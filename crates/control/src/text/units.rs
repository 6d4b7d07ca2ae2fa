//! Numbers for people: three significant digits and a decimal prefix.

/// What a number is multiples of, by powers of 1000.
const PREFIXES: [&str; 7] = ["", "k", "M", "G", "T", "P", "E"];

/// Counts below this are written in full.
const EXACT: u64 = 10_000;

/// Divides a number by 1000 until it is below that; returns what is left, and the prefix.
fn reduce(mut value: f64) -> (f64, &'static str) {
    let mut prefix = "";
    for next in PREFIXES {
        prefix = next;
        // 999.5 would be rounded to 1000.
        if value < 999.5 {
            break;
        }
        if next != PREFIXES[PREFIXES.len() - 1] {
            value /= 1000.0;
        }
    }
    (value, prefix)
}

/// Returns how many decimals make three significant digits of a number from 1 to 1000.
fn decimals(value: f64) -> usize {
    match value {
        large if large >= 99.95 => 0,
        medium if medium >= 9.995 => 1,
        _ => 2,
    }
}

/// A count with at most four digits: `9999`, `12.3k`.
pub fn short_count(count: u64) -> String {
    if count < EXACT {
        return count.to_string();
    }
    let (value, prefix) = reduce(count as f64);
    let decimals = decimals(value);
    format!("{value:.decimals$}{prefix}")
}

/// A rate with three significant digits and a prefix: `0`, `0.25`, `12.3k`.
pub fn short_rate(rate: f64) -> String {
    let (value, prefix) = reduce(rate);
    let decimals = if prefix.is_empty() && value.fract() == 0.0 { 0 } else { decimals(value) };
    format!("{value:.decimals$}{prefix}")
}

/// A number with a prefix and a unit: `9.41 Gbit/s`, `812 kpps`, `17 B`.
pub fn scaled(value: f64, unit: &str) -> String {
    let (value, prefix) = reduce(value);
    let decimals = if prefix.is_empty() && value.fract() == 0.0 { 0 } else { decimals(value) };
    format!("{value:.decimals$} {prefix}{unit}")
}

/// A rate in bits per second.
pub fn bit_rate(bits_per_second: f64) -> String {
    scaled(bits_per_second, "bit/s")
}

/// A duration given in microseconds.
pub fn micros(value: f64) -> String {
    if value < 999.5 { format!("{value:.1} µs") } else { format!("{:.2} ms", value / 1000.0) }
}

/// Seconds in the two largest units that matter.
pub fn duration(seconds: u64) -> String {
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86400);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds} s"),
        (0, 0, _) => format!("{minutes} min {} s", seconds % 60),
        (0, _, _) => format!("{hours} h {} min", minutes % 60),
        _ => format!("{days} d {} h", hours % 24),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_short() {
        let cases = [
            (0, "0"),
            (9999, "9999"),
            (10_000, "10.0k"),
            (99_949, "99.9k"),
            (99_950, "100k"),
            (999_499, "999k"),
            (999_500, "1.00M"),
            (1_234_567, "1.23M"),
            (u64::MAX, "18.4E"),
        ];
        for (count, expected) in cases {
            assert_eq!(short_count(count), expected, "{count}");
        }
    }

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
            (5e16, "50.0 PB"),
            (5e21, "5000 EB"),
        ] {
            assert_eq!(scaled(value, "B"), text);
        }
        assert_eq!([0.0, 0.25, 7.0, 12_345.0, 3.1e9].map(short_rate), ["0", "0.25", "7", "12.3k", "3.10G"]);
        assert_eq!(bit_rate(1e10), "10.0 Gbit/s");
        assert_eq!((micros(12.34), micros(1500.0)), ("12.3 µs".into(), "1.50 ms".into()));
    }

    #[test]
    fn durations_have_two_units() {
        for (seconds, expected) in [(59, "59 s"), (60, "1 min 0 s"), (3600, "1 h 0 min"), (90_000, "1 d 1 h")]
        {
            assert_eq!(duration(seconds), expected);
        }
    }
}
