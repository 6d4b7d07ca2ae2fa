//! Decodes what a terminal in raw mode sends into keys (ECMA-48 control sequences, as xterm and its like send them).
//!
//! The decoder is fed with whatever a read has returned, and keeps the beginning of a sequence until its end comes. Escape alone is the beginning of
//! every sequence: whoever has waited in vain for the rest calls [`Decoder::flush`].

/// A key that somebody pressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Key {
    Char(char),
    /// A letter with Ctrl, in lower case.
    Ctrl(char),
    Enter,
    Escape,
    Tab,
    Backspace,
    Up,
    Down,
    Left,
    Right,
    PageUp,
    PageDown,
    Home,
    End,
}

/// Longest sequence, in bytes; what is longer is none, and is thrown away.
const LONGEST: usize = 32;

const ESCAPE: u8 = 0x1b;

/// See the head of this file.
#[derive(Debug, Default)]
pub struct Decoder {
    /// The beginning of a sequence, or of a character.
    rest: Vec<u8>,
}

impl Decoder {
    /// Returns the keys that are complete with these bytes.
    pub fn feed(&mut self, bytes: &[u8]) -> Vec<Key> {
        self.rest.extend_from_slice(bytes);
        let mut keys = Vec::new();
        let mut at = 0;
        while let Some((key, len)) = first(&self.rest[at..]) {
            keys.extend(key);
            at += len;
        }
        self.rest.drain(..at);
        if self.rest.len() > LONGEST {
            self.rest.clear();
        }
        keys
    }

    /// Returns true if a sequence has begun and not ended.
    pub fn is_partial(&self) -> bool {
        !self.rest.is_empty()
    }

    /// Returns the key that the beginning of a sequence is by itself, as nothing follows it.
    pub fn flush(&mut self) -> Option<Key> {
        let escape = self.rest == [ESCAPE];
        self.rest.clear();
        escape.then_some(Key::Escape)
    }
}

/// Returns the first key, or `None` in its place for a sequence that means nothing here, and how many bytes it takes. `None` if it is not complete.
fn first(bytes: &[u8]) -> Option<(Option<Key>, usize)> {
    match *bytes {
        [] | [ESCAPE] | [ESCAPE, b'O'] => None,
        [ESCAPE, b'O', letter, ..] => Some((cursor(letter), 3)),
        [ESCAPE, b'[', ref rest @ ..] => {
            let end = rest.iter().position(|byte| (0x40..=0x7e).contains(byte))?;
            Some((control_sequence(&rest[..end], rest[end]), end + 3))
        }
        [ESCAPE, ..] => Some((Some(Key::Escape), 1)),
        [b'\r' | b'\n', ..] => Some((Some(Key::Enter), 1)),
        [b'\t', ..] => Some((Some(Key::Tab), 1)),
        [0x7f | 0x08, ..] => Some((Some(Key::Backspace), 1)),
        [letter @ 1..=26, ..] => Some((Some(Key::Ctrl((letter - 1 + b'a') as char)), 1)),
        [..0x20, ..] => Some((None, 1)),
        _ => character(bytes),
    }
}

/// The key of a sequence of Escape, `O` or `[`, and one letter.
fn cursor(letter: u8) -> Option<Key> {
    Some(match letter {
        b'A' => Key::Up,
        b'B' => Key::Down,
        b'C' => Key::Right,
        b'D' => Key::Left,
        b'H' => Key::Home,
        b'F' => Key::End,
        _ => return None,
    })
}

fn control_sequence(parameters: &[u8], end: u8) -> Option<Key> {
    match (parameters.split(|byte| *byte == b';').next().unwrap_or_default(), end) {
        (b"1" | b"7", b'~') => Some(Key::Home),
        (b"4" | b"8", b'~') => Some(Key::End),
        (b"5", b'~') => Some(Key::PageUp),
        (b"6", b'~') => Some(Key::PageDown),
        _ => cursor(end),
    }
}

/// A character in UTF-8; what is no UTF-8 is left out.
fn character(bytes: &[u8]) -> Option<(Option<Key>, usize)> {
    let piece = &bytes[..bytes.len().min(4)];
    let text = match str::from_utf8(piece) {
        Ok(text) => text,
        Err(error) if error.valid_up_to() > 0 => str::from_utf8(&piece[..error.valid_up_to()]).ok()?,
        // The rest of it is still to come.
        Err(error) if error.error_len().is_none() => return None,
        Err(_) => return Some((None, 1)),
    };
    let first = text.chars().next()?;
    Some((Some(Key::Char(first)), first.len_utf8()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequences_are_keys_however_they_are_cut() {
        let sent = "q/vm√\x1b[A\x1b[5~\x1bOB\x1b[1;5H\x7f\r\x03\x1b[200~";
        let expected = [
            Key::Char('q'),
            Key::Char('/'),
            Key::Char('v'),
            Key::Char('m'),
            Key::Char('√'),
            Key::Up,
            Key::PageUp,
            Key::Down,
            Key::Home,
            Key::Backspace,
            Key::Enter,
            Key::Ctrl('c'),
        ];
        assert_eq!(Decoder::default().feed(sent.as_bytes()), expected);
        for size in 1..sent.len() {
            let mut decoder = Decoder::default();
            let keys: Vec<Key> = sent.as_bytes().chunks(size).flat_map(|piece| decoder.feed(piece)).collect();
            assert_eq!(keys, expected, "{size} bytes at a time");
            assert!(!decoder.is_partial());
        }
    }

    #[test]
    fn escape_alone_is_known_when_nothing_follows() {
        let mut decoder = Decoder::default();
        assert_eq!((decoder.feed(b"\x1b"), decoder.is_partial()), (vec![], true));
        assert_eq!((decoder.flush(), decoder.is_partial()), (Some(Key::Escape), false));
        assert_eq!(decoder.feed(b"\x1bq"), [Key::Escape, Key::Char('q')]);
        assert_eq!((decoder.feed(b"\x1b[1"), decoder.flush()), (vec![], None));
    }

    #[test]
    fn what_means_nothing_is_left_out_and_kept_by_nobody() {
        let mut decoder = Decoder::default();
        assert_eq!(decoder.feed(b"\x00\xff\xc3(\x1b[99~\x1bOZ"), [Key::Char('(')]);
        assert!(decoder.feed(&[&b"\x1b["[..], &[b'1'; 100]].concat()).is_empty());
        assert!(!decoder.is_partial());
        assert_eq!(decoder.feed(b"q"), [Key::Char('q')]);
    }
}
