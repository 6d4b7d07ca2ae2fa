//! Progress on standard error: a bar with the time left on a terminal, a line per round elsewhere.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

/// Characters of the bar.
const BAR: usize = 24;

/// Columns used when the terminal does not tell its width.
const COLUMNS: usize = 80;

#[derive(Clone, Copy, PartialEq)]
enum Style {
    Silent,
    Lines,
    Terminal,
}

/// Where the session is.
pub struct Progress {
    style: Style,
    /// When the steps began that tell the pace, and how many had been begun before them. Counting goes at
    /// a pace of its own, which says nothing about the rounds.
    paced: Option<(Instant, usize)>,
    /// Steps begun, and all there are.
    done: usize,
    total: usize,
    round: String,
}

impl Progress {
    /// Shown on standard error.
    pub fn stderr() -> Self {
        Self::new(if std::io::stderr().is_terminal() { Style::Terminal } else { Style::Lines })
    }

    /// Not shown.
    pub fn silent() -> Self {
        Self::new(Style::Silent)
    }

    fn new(style: Style) -> Self {
        Self { style, paced: None, done: 0, total: 0, round: String::new() }
    }

    /// The work begins: so many steps, of about the same length.
    pub(crate) fn begin(&mut self, total: usize) {
        self.paced = None;
        (self.done, self.total) = (0, total);
        self.round = "counting".into();
    }

    /// A round begins; 0 is the warm-up.
    pub(crate) fn round(&mut self, round: usize, of: usize) {
        self.paced.get_or_insert_with(|| (Instant::now(), self.done));
        self.round = if round == 0 { "warm-up".into() } else { format!("round {round}/{of}") };
        if self.style == Style::Lines {
            eprintln!(
                "{}{}",
                self.round,
                self.left().map_or_else(String::new, |time| format!(", {}", left(time)))
            );
        }
    }

    /// The next step begins.
    pub(crate) fn step(&mut self, name: &str) {
        if self.style == Style::Terminal {
            let fraction = self.done as f64 / self.total.max(1) as f64;
            let line = format!(
                "{} {:<11} {:<14} {name}",
                bar(fraction),
                self.round,
                self.left().map_or_else(String::new, left)
            );
            let columns = rustix::termios::tcgetwinsize(std::io::stderr())
                .map_or(COLUMNS, |size| usize::from(size.ws_col).max(COLUMNS / 2));
            self.rewrite(&line.chars().take(columns - 1).collect::<String>());
        }
        self.done += 1;
    }

    /// Time left, once enough is done to tell.
    fn left(&self) -> Option<Duration> {
        let (since, before) = self.paced?;
        let done = self.done.min(self.total);
        let paced = done.saturating_sub(before);
        (paced > 0).then(|| since.elapsed().mul_f64((self.total - done) as f64 / paced as f64))
    }

    fn rewrite(&self, line: &str) {
        // To the line's start, the text, erase what is left of the text before (ECMA-48 EL). Progress that
        // cannot be shown is no error.
        let _ = write!(std::io::stderr(), "\r{line}\x1b[K");
    }
}

impl Drop for Progress {
    /// Leaves the terminal with an empty line for whatever comes next.
    fn drop(&mut self) {
        if self.style == Style::Terminal {
            self.rewrite("");
        }
    }
}

fn bar(fraction: f64) -> String {
    let full = ((fraction.clamp(0.0, 1.0) * BAR as f64) as usize).min(BAR);
    format!("[{}{}]", "#".repeat(full), "-".repeat(BAR - full))
}

fn left(time: Duration) -> String {
    match time.as_secs() {
        seconds if seconds < 3600 => format!("{}:{:02} left", seconds / 60, seconds % 60),
        seconds => format!("{}:{:02}:{:02} left", seconds / 3600, seconds / 60 % 60, seconds % 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_is_as_full_as_the_work_is_done() {
        assert_eq!(bar(0.0), format!("[{}]", "-".repeat(24)));
        assert_eq!(bar(0.5), format!("[{}{}]", "#".repeat(12), "-".repeat(12)));
        assert_eq!(bar(7.0), format!("[{}]", "#".repeat(24)));
    }

    #[test]
    fn the_time_left_is_told_in_the_largest_unit_needed() {
        let text = |seconds| left(Duration::from_secs(seconds));
        assert_eq!([text(5), text(83), text(3723)], ["0:05 left", "1:23 left", "1:02:03 left"]);
    }

    #[test]
    fn the_time_left_follows_the_pace_so_far() {
        let mut progress = Progress::silent();
        progress.begin(5);
        progress.step("counting");
        assert_eq!(progress.left(), None);
        progress.round(0, 3);
        assert_eq!(progress.left(), None);
        progress.paced = Some((Instant::now().checked_sub(Duration::from_secs(10)).unwrap(), 1));
        progress.step("a");
        let after_one = progress.left().unwrap().as_secs_f64();
        assert!((29.0..32.0).contains(&after_one), "{after_one}");
        for _ in 0..5 {
            progress.step("more than planned");
        }
        assert_eq!(progress.left(), Some(Duration::ZERO));
    }
}
