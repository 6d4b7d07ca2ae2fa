//! The terminal that `top` draws on: raw mode, the alternate screen, and what it takes to leave both behind whatever happens.
//!
//! [`Terminal::enter`] is called once, by the main thread, before anything is drawn. The settings of the terminal are put back when the [`Terminal`] is dropped, and before
//! the message of a panic is printed, in whichever thread. Signals that end the program must therefore come as events (`sys::signal`), not by their default action.
//!
//! ratatui draws into a buffer and passes on the cells that have changed; [`Ansi`] writes those as control sequences of ECMA-48, which every terminal of today has. The backends
//! that come with ratatui would bring an event loop and signal handlers of their own.

use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write};
use std::panic;
use std::sync::{Mutex, Once, PoisonError};

use ratatui_core::backend::{Backend, ClearType, WindowSize};
use ratatui_core::buffer::Cell;
use ratatui_core::layout::{Position, Size};
use ratatui_core::style::{Color, Modifier};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};

/// To the alternate screen, without a cursor; and back.
const ENTER: &[u8] = b"\x1b[?1049h\x1b[?25l\x1b[2J";
const LEAVE: &[u8] = b"\x1b[0m\x1b[?25h\x1b[?1049l";

/// Most columns and rows that are drawn: whatever size a terminal claims to have, a screen takes little memory.
const LARGEST: u16 = 1000;

/// The settings to put back, while they are changed.
static BEFORE: Mutex<Option<Termios>> = Mutex::new(None);

/// The terminal of this process while it is drawn on. There is one at a time.
pub struct Terminal(ratatui_core::terminal::Terminal<Ansi>);

impl Terminal {
    /// Takes the terminal over.
    ///
    /// # Errors
    /// Standard input is no terminal, or has gone.
    pub fn enter() -> io::Result<Terminal> {
        static HOOK: Once = Once::new();
        HOOK.call_once(|| {
            let before = panic::take_hook();
            panic::set_hook(Box::new(move |info| {
                leave();
                before(info);
            }));
        });
        take_over()?;
        let made = ratatui_core::terminal::Terminal::new(Ansi::default());
        made.map(Terminal).inspect_err(|_| leave())
    }

    /// Draws a screen; what is the same as before is not written again.
    ///
    /// # Errors
    /// The terminal has gone.
    pub fn draw(&mut self, draw: impl FnOnce(&mut ratatui_core::terminal::Frame<'_>)) -> io::Result<()> {
        self.0.draw(draw).map(drop)
    }

    /// Has everything written anew with the next screen.
    ///
    /// # Errors
    /// The terminal has gone.
    pub fn clear(&mut self) -> io::Result<()> {
        self.0.clear()
    }

    /// Gives the terminal back, stops this process as Ctrl-Z does elsewhere, and takes the terminal over again when the process goes on.
    ///
    /// # Errors
    /// The terminal has gone.
    pub fn suspend(&mut self) -> io::Result<()> {
        leave();
        rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::STOP)?;
        take_over()?;
        self.0.clear()
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        leave();
    }
}

fn take_over() -> io::Result<()> {
    let before = tcgetattr(io::stdin())?;
    let mut raw = before.clone();
    raw.make_raw();
    tcsetattr(io::stdin(), OptionalActions::Now, &raw)?;
    *BEFORE.lock().unwrap_or_else(PoisonError::into_inner) = Some(before);
    let mut out = io::stdout().lock();
    out.write_all(ENTER).and_then(|()| out.flush())
}

/// Puts everything back as it was; does nothing if it is.
fn leave() {
    let before = BEFORE.lock().unwrap_or_else(PoisonError::into_inner).take();
    if let Some(before) = before {
        let mut out = io::stdout().lock();
        // A terminal that has gone needs nothing.
        let _ = out.write_all(LEAVE).and_then(|()| out.flush());
        let _ = tcsetattr(io::stdin(), OptionalActions::Now, &before);
    }
}

/// Returns true if both what is written to and what keys come from is a terminal.
pub fn is_there() -> bool {
    io::stdin().is_terminal() && io::stdout().is_terminal()
}

/// The size of the terminal on standard output, in characters. One that does not know it is said to have 80 columns and 24 rows.
pub fn size() -> Size {
    match tcgetwinsize(io::stdout()) {
        Ok(size) if size.ws_col > 0 && size.ws_row > 0 => {
            Size::new(size.ws_col.min(LARGEST), size.ws_row.min(LARGEST))
        }
        _ => Size::new(80, 24),
    }
}

/// Writes control sequences to standard output, all of a screen at once.
#[derive(Default)]
struct Ansi {
    sequences: String,
}

impl Ansi {
    /// Sets colours and attributes, after everything before was reset.
    fn style(&mut self, cell: &Cell) {
        self.sequences.push_str("\x1b[0");
        for (modifier, code) in
            [(Modifier::BOLD, 1), (Modifier::DIM, 2), (Modifier::UNDERLINED, 4), (Modifier::REVERSED, 7)]
        {
            if cell.modifier.contains(modifier) {
                // Writing to a string cannot fail.
                let _ = write!(self.sequences, ";{code}");
            }
        }
        for (colour, first) in [(cell.fg, 30), (cell.bg, 40)] {
            if let Some(number) = number(colour) {
                let _ = write!(self.sequences, ";{}", first + number);
            }
        }
        self.sequences.push('m');
    }
}

/// The number of one of the eight colours that every terminal with colours has; `top` uses no others.
fn number(colour: Color) -> Option<u8> {
    let all = [
        Color::Black,
        Color::Red,
        Color::Green,
        Color::Yellow,
        Color::Blue,
        Color::Magenta,
        Color::Cyan,
        Color::Gray,
    ];
    (0..).zip(all).find(|(_, one)| *one == colour).map(|(number, _)| number)
}

impl Backend for Ansi {
    type Error = io::Error;

    fn draw<'a, I: Iterator<Item = (u16, u16, &'a Cell)>>(&mut self, cells: I) -> io::Result<()> {
        let mut next = None;
        let mut style = None;
        for (x, y, cell) in cells {
            if next != Some((x, y)) {
                let _ = write!(self.sequences, "\x1b[{};{}H", u32::from(y) + 1, u32::from(x) + 1);
            }
            next = x.checked_add(1).map(|x| (x, y));
            let wanted = (cell.fg, cell.bg, cell.modifier);
            if style != Some(wanted) {
                self.style(cell);
                style = Some(wanted);
            }
            self.sequences.push_str(cell.symbol());
        }
        if style.is_some() {
            self.sequences.push_str("\x1b[0m");
        }
        Ok(())
    }

    fn hide_cursor(&mut self) -> io::Result<()> {
        self.sequences.push_str("\x1b[?25l");
        Ok(())
    }

    fn show_cursor(&mut self) -> io::Result<()> {
        self.sequences.push_str("\x1b[?25h");
        Ok(())
    }

    /// The cursor is hidden; nobody needs to know where it is.
    fn get_cursor_position(&mut self) -> io::Result<Position> {
        Ok(Position::ORIGIN)
    }

    fn set_cursor_position<P: Into<Position>>(&mut self, position: P) -> io::Result<()> {
        let Position { x, y } = position.into();
        let _ = write!(self.sequences, "\x1b[{};{}H", u32::from(y) + 1, u32::from(x) + 1);
        Ok(())
    }

    fn clear(&mut self) -> io::Result<()> {
        self.sequences.push_str("\x1b[0m\x1b[2J");
        Ok(())
    }

    fn clear_region(&mut self, _: ClearType) -> io::Result<()> {
        // Only parts of a screen are cleared otherwise, which a screen as a whole has no use for.
        self.clear()
    }

    fn size(&self) -> io::Result<Size> {
        Ok(size())
    }

    fn window_size(&mut self) -> io::Result<WindowSize> {
        Ok(WindowSize { columns_rows: size(), pixels: Size::ZERO })
    }

    fn flush(&mut self) -> io::Result<()> {
        let mut out = io::stdout().lock();
        let written = out.write_all(self.sequences.as_bytes()).and_then(|()| out.flush());
        self.sequences.clear();
        written
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    /// Set for the child of the test below, which is this test again.
    const CHILD: &str = "RINGFERRY_TEST_TERMINAL";

    #[test]
    fn a_panic_leaves_the_terminal_as_it_was_and_is_read_there() {
        if std::env::var_os(CHILD).is_some() {
            let mut terminal = Terminal::enter().unwrap();
            let style = ratatui_core::style::Style::new();
            terminal
                .draw(|frame| {
                    frame.buffer_mut().set_string(0, 0, "SCREEN", style);
                })
                .unwrap();
            panic!("a mistake of somebody's");
        }
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.env(CHILD, "1").env("RUST_BACKTRACE", "0").args([
            "--exact",
            "--nocapture",
            "--test-threads=1",
        ]);
        command.arg("top::terminal::tests::a_panic_leaves_the_terminal_as_it_was_and_is_read_there");
        let mut seen = ringferry_rig::terminal::Terminal::start(&mut command, 80, 24);
        assert!(!seen.wait().success());
        let written = ringferry_rig::process::eventually("the message is written", || {
            let written = String::from_utf8_lossy(&seen.written()).into_owned();
            written.contains("a mistake of somebody's").then_some(written)
        });
        assert!(seen.is_as_before() && !seen.screen().contains("SCREEN"), "{}", seen.screen());
        let places = ["\x1b[?1049h", "SCREEN", "\x1b[?1049l", "a mistake of somebody's"];
        let places = places.map(|text| written.find(text));
        assert!(places[0].is_some() && places.is_sorted(), "{written:?}");
    }
}
