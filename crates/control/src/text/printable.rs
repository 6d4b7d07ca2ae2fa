//! Names and sentences that somebody else chose, made harmless for a terminal.

use std::borrow::Cow;

/// Returns the text with every character escaped that would not be seen as itself: control characters, which command a terminal, those that change the
/// direction of writing or take no room, and line ends. What is left has one line.
pub fn printable(text: &str) -> Cow<'_, str> {
    // A backslash is doubled by escape_debug, so that an escaped character cannot be mistaken for one that was written so.
    let is_itself = |c: char| matches!(c, '"' | '\'') || c.escape_debug().eq([c]);
    if text.chars().all(is_itself) {
        return Cow::Borrowed(text);
    }
    let mut escaped = String::with_capacity(text.len() + 8);
    for c in text.chars() {
        if is_itself(c) { escaped.push(c) } else { escaped.extend(c.escape_debug()) }
    }
    Cow::Owned(escaped)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_seen_as_itself_is_left() {
        for (text, expected) in [
            ("vm0", "vm0"),
            ("größe \"a\" 'b' 虚拟机", "größe \"a\" 'b' 虚拟机"),
            ("\x1b[2J\x07", "\\u{1b}[2J\\u{7}"),
            ("a\nb\tc\r", "a\\nb\\tc\\r"),
            ("\u{202e}gpj.exe\u{200b}", "\\u{202e}gpj.exe\\u{200b}"),
            ("\u{9b}31m", "\\u{9b}31m"),
            ("\\n", "\\\\n"),
        ] {
            assert_eq!(printable(text), expected, "{text:?}");
        }
    }
}
