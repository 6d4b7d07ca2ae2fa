//! Numbers for people.

/// A count with at most four digits, exact below 10 000 and with three significant digits and a decimal unit
/// above.
pub fn humane(count: u64) -> String {
    if count < 10_000 {
        return count.to_string();
    }
    let mut value = count as f64;
    let mut units = ["k", "M", "G", "T", "P", "E"].into_iter();
    let mut unit = "";
    // 999.5 would be rounded to 1000.
    while value >= 999.5 {
        value /= 1000.0;
        unit = units.next().unwrap_or("?");
    }
    let decimals = if value < 9.995 {
        2
    } else if value < 99.95 {
        1
    } else {
        0
    };
    format!("{value:.decimals$}{unit}")
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
    fn numbers_are_short() {
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
            assert_eq!(humane(count), expected, "{count}");
        }
        for (seconds, expected) in [(59, "59 s"), (60, "1 min 0 s"), (3600, "1 h 0 min"), (90_000, "1 d 1 h")]
        {
            assert_eq!(duration(seconds), expected);
        }
    }
}
