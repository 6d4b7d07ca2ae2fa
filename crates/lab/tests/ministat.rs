//! Our ministat against the real one, on many random data sets.
//!
//! Debian's program is of 2015 and differs from today's in three ways, which the test leaves out: its
//! median of an even number of values is the upper middle one, its error in per cent does not count
//! the baseline's scatter at the row's scale, and its plot is as high as the last set needs.

use std::io::Write;
use std::process::Command;

use fastrand::Rng;
use ringferry_lab::stats::Confidence;
use ringferry_lab::stats::ministat::{Set, report};
use ringferry_rig::process::may;

/// Values with few digits, exact in binary, so that both programs read the same, and few enough that some fall together.
fn values(random: &mut Rng, n: usize) -> Vec<f64> {
    let (base, spread) = (random.u32(..500), random.u32(1..=60));
    let scale = [0.25, 1.0, 1000.0][random.usize(..3)];
    (0..n).map(|_| f64::from(base + random.u32(..spread)) * scale).collect()
}

fn installed() -> bool {
    may("needs ministat: apt-get install ministat", Command::new("ministat").arg("-h").output().is_ok())
}

fn theirs(sets: &[Vec<f64>], level: Confidence) -> (Vec<String>, String) {
    let files: Vec<_> = sets
        .iter()
        .map(|values| {
            let mut file = tempfile::NamedTempFile::new().unwrap();
            for value in values {
                writeln!(file, "{value}").unwrap();
            }
            file
        })
        .collect();
    let names: Vec<String> = files.iter().map(|file| file.path().display().to_string()).collect();
    let output =
        Command::new("ministat").args(["-c", &level.percent().to_string()]).args(&names).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    (names, String::from_utf8(output.stdout).unwrap())
}

fn ours(sets: &[Vec<f64>], names: &[String], level: Confidence) -> String {
    let sets: Vec<_> = names.iter().zip(sets).map(|(name, values)| Set { name, values }).collect();
    report(&sets, level, true).unwrap()
}

fn without_percent(text: &str) -> Vec<&str> {
    text.lines().filter(|line| !(line.starts_with('\t') && line.contains('%'))).collect()
}

/// The plot's rows of points, lowest first, and all other lines.
fn split(text: &str) -> (Vec<&str>, Vec<&str>) {
    let lines = without_percent(text);
    let borders: Vec<usize> = (0..lines.len()).filter(|at| lines[*at].starts_with("+--")).collect();
    let [top, bottom] = borders[..] else { return (Vec::new(), lines) };
    let points = lines[top + 1..bottom - 1].iter().rev().copied().collect();
    (points, [&lines[..=top], &lines[bottom - 1..]].concat())
}

#[test]
fn everything_but_the_plots_height_is_printed_alike() {
    if !installed() {
        return;
    }
    let mut random = Rng::with_seed(0x5eed);
    for round in 0..150 {
        let count = random.usize(1..=4);
        // Odd numbers of values, for the sake of the median.
        let sets: Vec<_> = (0..count).map(|_| 3 + 2 * random.usize(..5)).collect();
        let sets: Vec<_> = sets.into_iter().map(|n| values(&mut random, n)).collect();
        let level = Confidence::ALL[round % 6];
        let (names, theirs) = theirs(&sets, level);
        let ours = ours(&sets, &names, level);
        let ((our_points, our_rest), (their_points, their_rest)) = (split(&ours), split(&theirs));
        assert_eq!(our_rest, their_rest, "{sets:?}\n{ours}\n{theirs}");
        // With three sets, rows of the first may also be lost inside the plot, but never the lowest.
        let whole = if count > 2 { 1 } else { usize::MAX };
        for (ours, theirs) in our_points.iter().zip(&their_points).take(whole) {
            assert_eq!(ours, theirs, "{sets:?}");
        }
    }
}

#[test]
fn differences_are_printed_alike_for_all_degrees_of_freedom() {
    if !installed() {
        return;
    }
    let mut random = Rng::with_seed(0xdf);
    for df in 4..=104 {
        for level in Confidence::ALL {
            let first = random.usize(3..df);
            let base: Vec<f64> = (0..first).map(|_| 100.0 + f64::from(random.u32(..10))).collect();
            let other: Vec<f64> = (0..df + 2 - first).map(|_| 900.0 + f64::from(random.u32(..10))).collect();
            let sets = [base, other];
            let (names, theirs) = theirs(&sets, level);
            let ours = ours(&sets, &names, level);
            let difference = |text: &str| -> Vec<String> {
                let at = text.find("ifference").expect("a line on the difference");
                without_percent(&text[at..]).into_iter().map(Into::into).collect()
            };
            assert_eq!(difference(&ours), difference(&theirs), "{df} {level:?}");
        }
    }
}
