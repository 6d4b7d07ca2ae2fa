//! Pieces of a screen: text that fits a width, bars and sparklines, and the few styles that there are.
//!
//! Every text that is not ours goes through [`printable`], so no name of a port can command the terminal or push a column aside. What a colour says is also said in words, or by
//! a mark: without colours nothing is lost.

use ratatui_core::style::{Color, Modifier, Style};
use ratatui_core::text::{Line, Span};
use ringferry_control::text::printable;
use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

/// What the terminal can show.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Look {
    pub colour: bool,
    /// Blocks of UTF-8 in place of ASCII.
    pub unicode: bool,
}

/// What a piece of text is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tone {
    Plain,
    Title,
    Heading,
    Good,
    Bad,
    Bar,
}

impl Look {
    pub fn style(self, tone: Tone) -> Style {
        let (modifier, colour) = match tone {
            Tone::Plain => return Style::new(),
            Tone::Title => (Modifier::BOLD, None),
            Tone::Heading => (Modifier::REVERSED, None),
            Tone::Good => (Modifier::empty(), Some(Color::Green)),
            Tone::Bad => (Modifier::BOLD, Some(Color::Red)),
            Tone::Bar => (Modifier::empty(), Some(Color::Cyan)),
        };
        let style = Style::new().add_modifier(modifier);
        colour.filter(|_| self.colour).map_or(style, |colour| style.fg(colour))
    }

    pub fn span(self, text: impl Into<String>, tone: Tone) -> Span<'static> {
        Span::styled(text.into(), self.style(tone))
    }

    /// A bar of this width, of which a part from 0 to 1 is full.
    pub fn bar(self, part: f64, width: usize) -> String {
        let part = if part.is_finite() { part.clamp(0.0, 1.0) } else { 0.0 };
        // The least that can be seen is shown of whatever is not nothing.
        let smallest = |pieces: f64| if part > 0.0 { pieces.max(1.0) } else { 0.0 };
        if !self.unicode {
            let full = smallest((part * width as f64).round()) as usize;
            return format!("{}{}", "#".repeat(full.min(width)), ".".repeat(width.saturating_sub(full)));
        }
        let eighths = smallest((part * 8.0 * width as f64).round()) as usize;
        let (full, rest) = ((eighths / 8).min(width), eighths % 8);
        let mut bar = "█".repeat(full);
        if full < width {
            bar.push([' ', '▏', '▎', '▍', '▌', '▋', '▊', '▉'][rest]);
            bar.push_str(&" ".repeat(width - full - 1));
        }
        bar
    }

    /// A column for each value, as high as it is in proportion to the largest.
    pub fn sparkline(self, values: &[f64]) -> String {
        let levels = if self.unicode {
            ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█']
        } else {
            ['_', '.', '-', '=', '+', 'x', '*', '#']
        };
        let most = values.iter().copied().fold(0.0, f64::max);
        let level = |value: f64| match value / most {
            part if part > 0.0 => levels[(((part * 8.0).ceil() as usize).clamp(1, 8)) - 1],
            _ => ' ',
        };
        values.iter().map(|value| level(*value)).collect()
    }

    /// What stands for the rest of a text that was cut off.
    fn ellipsis(self) -> char {
        if self.unicode { '…' } else { '~' }
    }

    /// Cuts a text off at this width, which it is told in columns of the terminal.
    pub fn cut(self, text: &str, width: usize) -> String {
        let text = printable(text);
        if text.width() <= width {
            return text.into_owned();
        }
        let mut cut = String::new();
        let mut left = width.saturating_sub(1);
        for c in text.chars() {
            let wide = c.width().unwrap_or_default();
            if wide > left {
                break;
            }
            left -= wide;
            cut.push(c);
        }
        if width > 0 {
            cut.push(self.ellipsis());
        }
        cut
    }

    /// Takes out of the middle of a text what is wider than this: names of machines begin alike, and differ at their ends.
    fn squeeze(self, text: &str, width: usize) -> String {
        let text = printable(text);
        if text.width() <= width || width == 0 {
            return self.cut(&text, width);
        }
        let tail_room = (width - 1) / 2;
        let mut ends = text.char_indices().map(|(at, c)| at + c.len_utf8());
        let tail = ends.find(|from| text[*from..].width() <= tail_room).unwrap_or(text.len());
        let head = self.cut(&text, width - text[tail..].width());
        head + &text[tail..]
    }

    /// The text in a column of this width, at its left.
    pub fn left(self, text: &str, width: usize) -> String {
        let text = self.squeeze(text, width);
        let room = width - text.width();
        text + &" ".repeat(room)
    }

    /// The text in a column of this width, at its right.
    pub fn right(self, text: &str, width: usize) -> String {
        let text = self.cut(text, width);
        " ".repeat(width - text.width()) + &text
    }
}

/// Breaks a text into lines of this width, between words where that is possible; lines after the first are indented.
pub fn wrap(text: &str, width: usize, indent: usize) -> Vec<String> {
    let text = printable(text);
    let indent = indent.min(width.saturating_sub(1));
    let room = |lines: usize| if lines == 0 { width } else { width - indent }.max(1);
    let mut lines: Vec<String> = Vec::new();
    let mut line = String::new();
    for word in text.split(' ') {
        let mut word = word;
        loop {
            let room = room(lines.len());
            let gap = usize::from(!line.is_empty());
            if line.width() + gap + word.width() <= room {
                if gap > 0 {
                    line.push(' ');
                }
                line.push_str(word);
                break;
            }
            if line.is_empty() {
                // A word that is longer than a line is broken anywhere; one character at least goes into each.
                let mut wide = 0;
                let end = word.char_indices().find(|(at, c)| {
                    wide += c.width().unwrap_or_default();
                    *at > 0 && wide > room
                });
                let (part, rest) = word.split_at(end.map_or(word.len(), |(at, _)| at));
                lines.push(part.to_owned());
                word = rest;
                if word.is_empty() {
                    break;
                }
            } else {
                lines.push(std::mem::take(&mut line));
            }
        }
    }
    if !line.is_empty() || lines.is_empty() {
        lines.push(line);
    }
    for line in lines.iter_mut().skip(1) {
        line.insert_str(0, &" ".repeat(indent));
    }
    lines
}

/// The text of a line, without spaces at its end.
pub fn text(line: &Line<'_>) -> String {
    let text: String = line.spans.iter().map(|span| span.content.as_ref()).collect();
    text.trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ASCII: Look = Look { colour: false, unicode: false };
    const BLOCKS: Look = Look { colour: true, unicode: true };

    #[test]
    fn bars_are_as_long_as_what_they_stand_for() {
        for (part, ascii, blocks) in [
            (0.0, "....", "    "),
            (0.001, "#...", "▏   "),
            (0.5, "##..", "██  "),
            (0.6, "##..", "██▍ "),
            (1.0, "####", "████"),
            (7.0, "####", "████"),
            (f64::NAN, "....", "    "),
        ] {
            assert_eq!(
                (ASCII.bar(part, 4).as_str(), BLOCKS.bar(part, 4).as_str()),
                (ascii, blocks),
                "{part}"
            );
        }
        assert_eq!((ASCII.bar(1.0, 0).as_str(), BLOCKS.bar(1.0, 0).as_str()), ("", ""));
    }

    #[test]
    fn a_sparkline_is_as_high_as_its_largest_value() {
        let values = [0.0, 1.0, 4.0, 8.0, f64::NAN];
        assert_eq!(BLOCKS.sparkline(&values), " ▁▄█ ");
        assert_eq!(ASCII.sparkline(&values), " _=# ");
        assert_eq!(ASCII.sparkline(&[0.0, 0.0]), "  ");
    }

    #[test]
    fn names_are_cut_in_their_middle() {
        for (width, expected) in
            [(20, "customer-vm-0012    "), (9, "cust~0012"), (8, "cust~012"), (2, "c~"), (1, "~"), (0, "")]
        {
            assert_eq!(ASCII.left("customer-vm-0012", width), expected);
        }
        assert_eq!(BLOCKS.left("虚拟机的名字", 6), "虚…字 ");
    }

    #[test]
    fn columns_have_their_width_whatever_is_in_them() {
        for text in ["", "vm0", "a rather long name", "虚拟机的名字", "\x1b[2J\n", "\u{202e}abc"] {
            for width in 0..12 {
                for look in [ASCII, BLOCKS] {
                    assert_eq!(look.left(text, width).width(), width, "{text:?}");
                    assert_eq!(look.right(text, width).width(), width, "{text:?}");
                }
            }
        }
        assert_eq!(BLOCKS.cut("a rather long name", 8), "a rathe…");
        assert_eq!(ASCII.right("vm0", 5), "  vm0");
        assert_eq!(ASCII.cut("\x1b[2J", 80), "\\u{1b}[2J");
    }

    #[test]
    fn lines_are_broken_between_words() {
        assert_eq!(wrap("one two three four", 9, 2), ["one two", "  three", "  four"]);
        assert_eq!(wrap("incomprehensibilities", 9, 2), ["incompreh", "  ensibil", "  ities"]);
        assert_eq!(wrap("", 9, 2), [""]);
        for width in 0..4 {
            let all: String = wrap("虚拟 ab\n", width, 2).concat().split_whitespace().collect();
            assert_eq!(all, "虚拟ab\\n", "{width}");
        }
    }
}
