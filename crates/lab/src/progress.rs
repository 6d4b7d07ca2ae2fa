//! Progress on standard error: indicatif's bar with the time left on a terminal, a line per round elsewhere.
//!
//! The bar is drawn when a step begins and never in between: no thread of its own would be worth disturbing what is measured.

use std::fmt::Write;
use std::time::Duration;

use indicatif::{FormattedDuration, ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};

/// Bar, round, time left and the name of the row, cut at the terminal's edge.
const TEMPLATE: &str = "[{bar:24}] {prefix:11} {left:13} {wide_msg}";

/// Where the session is. Made by its owner, told by the runner of rounds and steps as they begin.
pub struct Progress {
    bar: ProgressBar,
    /// Print a line per round.
    lines: bool,
    /// A step has begun that has not been counted as done.
    under_way: bool,
    /// Rounds have begun. Counting goes at a pace of its own, which says nothing about them.
    paced: bool,
}

impl Progress {
    /// A bar on standard error.
    pub fn stderr() -> Self {
        let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr());
        let lines = bar.is_hidden();
        let mut progress = Self::new(bar);
        progress.lines = lines;
        progress
    }

    /// A bar that is not shown.
    pub fn silent() -> Self {
        Self::new(ProgressBar::hidden())
    }

    fn new(bar: ProgressBar) -> Self {
        let left = |state: &ProgressState, out: &mut dyn Write| {
            // A bar that cannot be drawn is no error.
            let _ = out.write_str(&left(state.eta()));
        };
        let style = ProgressStyle::with_template(TEMPLATE).expect("the template is valid");
        bar.set_style(style.progress_chars("#-").with_key("left", left));
        Self { bar, lines: false, under_way: false, paced: false }
    }

    /// The work begins: so many steps, of about the same length.
    pub(crate) fn begin(&mut self, total: usize) {
        self.bar.reset();
        self.bar.set_length(total as u64);
        self.bar.set_prefix("counting");
        (self.under_way, self.paced) = (false, false);
    }

    /// So many steps come on top.
    pub(crate) fn more(&mut self, steps: usize) {
        self.bar.inc_length(steps as u64);
    }

    /// A round begins; 0 is the warm-up.
    pub(crate) fn round(&mut self, round: usize, of: usize) {
        self.finish_step();
        if !self.paced {
            self.bar.reset_eta();
            self.paced = true;
        }
        let round = if round == 0 { "warm-up".into() } else { format!("round {round}/{of}") };
        if self.lines {
            let left = left(self.bar.eta());
            eprintln!("{round}{}{left}", if left.is_empty() { "" } else { ", " });
        }
        self.bar.set_prefix(round);
    }

    /// Begins the next step.
    pub(crate) fn step(&mut self, name: &str) {
        self.finish_step();
        self.under_way = true;
        self.bar.set_message(name.to_owned());
    }

    fn finish_step(&mut self) {
        if std::mem::take(&mut self.under_way) {
            self.bar.inc(1);
        }
    }
}

impl Drop for Progress {
    /// Leaves the terminal with an empty line for whatever comes next.
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

/// The time left, or nothing while it is not known.
fn left(time: Duration) -> String {
    if time.is_zero() { String::new() } else { format!("{} left", FormattedDuration(time)) }
}

#[cfg(test)]
mod tests {
    use indicatif::InMemoryTerm;

    use super::*;

    #[test]
    fn the_bar_has_the_round_and_the_row_and_leaves_an_empty_line() {
        let term = InMemoryTerm::new(5, 80);
        let target = ProgressDrawTarget::term_like(Box::new(term.clone()));
        let mut progress = Progress::new(ProgressBar::with_draw_target(Some(0), target));
        progress.begin(4);
        progress.round(0, 1);
        progress.step("batch=1");
        progress.step(&"batch=2 ".repeat(20));
        progress.round(1, 1);
        progress.bar.tick();
        let line = term.contents();
        assert!(line.starts_with("[############------------] round 1/1"), "{line}");
        assert!(line.contains("batch=2 batch=2") && line.lines().all(|line| line.len() <= 80), "{line}");
        drop(progress);
        assert_eq!(term.contents(), "");
    }

    #[test]
    fn the_time_left_is_told_once_it_is_known() {
        assert_eq!(left(Duration::ZERO), "");
        assert_eq!(left(Duration::from_secs(3723)), "01:02:03 left");
        let mut progress = Progress::silent();
        progress.begin(5);
        progress.step("counting");
        std::thread::sleep(Duration::from_millis(20));
        progress.round(0, 3);
        assert_eq!(progress.bar.eta(), Duration::ZERO, "counting says nothing about the rounds");
        progress.step("a");
        std::thread::sleep(Duration::from_millis(50));
        progress.step("b");
        // Three more, of 50 ms at least each.
        let left = progress.bar.eta().as_secs_f64();
        assert!(left >= 0.14, "{left}");
    }
}
