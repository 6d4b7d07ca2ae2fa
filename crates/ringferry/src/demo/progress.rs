//! Live progress on standard error: one line rewritten on a terminal, a line a second elsewhere, nothing
//! for `--json`.

use crate::traffic::Progress;
use ringferry_control::text::{bit_rate, scaled};
use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

/// Time between lines when standard error is not a terminal: every fourth update, which may come a little
/// early.
const PLAIN: Duration = Duration::from_millis(900);

#[derive(PartialEq)]
enum Style {
    Silent,
    Plain,
    Terminal,
}

/// The display of progress.
pub struct Display {
    style: Style,
    title: String,
    printed: Option<Instant>,
}

impl Display {
    /// Nothing is printed when `silent`.
    pub fn new(silent: bool) -> Self {
        let style = match silent {
            true => Style::Silent,
            false if std::io::stderr().is_terminal() => Style::Terminal,
            false => Style::Plain,
        };
        Self { style, title: String::new(), printed: None }
    }

    /// Begins a step.
    pub fn begin(&mut self, title: String) {
        self.title = title;
        self.printed = Some(Instant::now());
        match self.style {
            Style::Terminal => self.rewrite(&self.title),
            Style::Plain => eprintln!("{}", self.title),
            Style::Silent => {}
        }
    }

    /// Shows how far the step is.
    pub fn update(&mut self, progress: Progress) {
        let line = line(&self.title, progress);
        match self.style {
            Style::Terminal => self.rewrite(&line),
            Style::Plain if self.printed.is_none_or(|printed| printed.elapsed() >= PLAIN) => {
                self.printed = Some(Instant::now());
                eprintln!("{line}");
            }
            _ => {}
        }
    }

    fn rewrite(&self, line: &str) {
        // To the line's start, the text, erase what is left of the text before (ECMA-48 EL). Progress that
        // cannot be shown is no error.
        let _ = write!(std::io::stderr(), "\r{line}\x1b[K");
    }
}

impl Drop for Display {
    /// Leaves the terminal with an empty line for whatever comes next.
    fn drop(&mut self) {
        if self.style == Style::Terminal {
            self.rewrite("");
        }
    }
}

fn line(title: &str, progress: Progress) -> String {
    let packets = match progress.packets_per_second {
        0.0 => String::new(),
        rate => format!("{:>12}", scaled(rate, "pps")),
    };
    format!("{title:<36} {:5.1} s {:>13}{packets}", progress.seconds, bit_rate(progress.bits_per_second))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_shows_time_and_rates() {
        let mut progress =
            Progress { seconds: 1.26, bytes: 0, bits_per_second: 9.41e9, packets_per_second: 0.0 };
        assert_eq!(
            line("[1/5] TCP a to b", progress).trim_end(),
            "[1/5] TCP a to b                       1.3 s   9.41 Gbit/s"
        );
        progress.packets_per_second = 812_000.0;
        assert!(line("x", progress).ends_with("9.41 Gbit/s    812 kpps"));
    }
}
