//! A terminal for a program under test: a pty, and at its other end a terminal emulator, whose screen tests read as a person would.
//!
//! [`Terminal::start`] starts the program with the pty as its standard streams; a thread feeds the emulator with what it writes. Tests press keys, change the size, and wait until the
//! screen is as it should be. The program is killed when the terminal is dropped.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::process::{Child, Command, ExitStatus};
use std::sync::{Arc, Mutex, PoisonError};

use ringferry_sys::process::{Spawn, spawn};
use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, Signal, kill_process};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};

use crate::process::eventually;

/// See the head of this file.
pub struct Terminal {
    program: Child,
    /// The end of whoever sits at the terminal, and the program's, which stays open so that what it has written is not lost with it.
    keys: File,
    line: OwnedFd,
    emulator: Arc<Mutex<vt100::Parser>>,
    /// Everything that was written.
    written: Arc<Mutex<Vec<u8>>>,
}

impl Terminal {
    /// Starts a program on a terminal of so many columns and rows.
    pub fn start(command: &mut Command, columns: u16, rows: u16) -> Terminal {
        let keys = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        grantpt(&keys).unwrap();
        unlockpt(&keys).unwrap();
        let name = ptsname(&keys, Vec::new()).unwrap();
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
        let line = rustix::fs::open(name.as_c_str(), flags, Mode::empty()).unwrap();
        let stream = || line.try_clone().unwrap();
        command.env("TERM", "xterm").stdin(stream()).stdout(stream()).stderr(stream());
        tcsetwinsize(&line, size(columns, rows)).unwrap();
        // In a session of its own it has no other terminal that it could find.
        let options = Spawn { die_with_parent: true, new_session: true, ..Spawn::default() };
        let program = spawn(command, options).unwrap();
        let emulator = Arc::new(Mutex::new(vt100::Parser::new(rows, columns, 0)));
        let written = Arc::default();
        let terminal = Terminal { program, keys: keys.into(), line, emulator, written };
        terminal.listen();
        terminal
    }

    /// Feeds the emulator, until the program's end of the pty is closed everywhere.
    fn listen(&self) {
        let (emulator, written) = (Arc::clone(&self.emulator), Arc::clone(&self.written));
        let mut from = self.keys.try_clone().unwrap();
        std::thread::spawn(move || {
            let mut piece = [0; 4096];
            while let Ok(count @ 1..) = from.read(&mut piece) {
                written.lock().unwrap().extend_from_slice(&piece[..count]);
                emulator.lock().unwrap().process(&piece[..count]);
            }
        });
    }

    /// The screen, a line for each row.
    pub fn screen(&self) -> String {
        // An emulator that panicked is told by its own thread; this is also asked while a test fails.
        self.emulator.lock().unwrap_or_else(PoisonError::into_inner).screen().contents()
    }

    /// Everything that the program has written so far.
    pub fn written(&self) -> Vec<u8> {
        self.written.lock().unwrap().clone()
    }

    /// Waits until the screen is as wanted, and returns it.
    #[track_caller]
    pub fn until(&self, what: &str, wanted: impl Fn(&str) -> bool) -> String {
        eventually(&format!("the screen shows {what}"), || {
            Some(self.screen()).filter(|screen| wanted(screen))
        })
    }

    /// Types.
    pub fn press(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).unwrap();
    }

    /// Changes the size of the terminal, and tells the program.
    pub fn resize(&mut self, columns: u16, rows: u16) {
        // The emulator panics where a line is wrapped in a screen of one row (the program may still write for the size before), or a wide
        // character comes where there is one column.
        self.emulator.lock().unwrap().screen_mut().set_size(rows.max(2), columns.max(2));
        tcsetwinsize(&self.line, size(columns, rows)).unwrap();
        self.signal(Signal::WINCH);
    }

    pub fn signal(&mut self, signal: Signal) {
        assert!(self.program.try_wait().unwrap().is_none(), "it has ended: {}", self.screen());
        kill_process(Pid::from_child(&self.program), signal).unwrap();
    }

    /// Waits for the end of the program.
    #[track_caller]
    pub fn wait(&mut self) -> ExitStatus {
        eventually("the program ends", || self.program.try_wait().unwrap())
    }

    /// Returns true if the terminal is as a shell needs it: it echoes, has a cursor, and shows the screen that was there before.
    pub fn is_as_before(&self) -> bool {
        let modes = tcgetattr(&self.line).unwrap().local_modes;
        let emulator = self.emulator.lock().unwrap();
        let screen = emulator.screen();
        modes.contains(LocalModes::ECHO | LocalModes::ICANON | LocalModes::ISIG)
            && !screen.alternate_screen()
            && !screen.hide_cursor()
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.program.kill();
        let _ = self.program.wait();
        if std::thread::panicking() {
            eprintln!("the screen:\n{}", self.screen());
        }
    }
}

fn size(columns: u16, rows: u16) -> Winsize {
    Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 }
}
