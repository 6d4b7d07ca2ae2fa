//! The pipe on which a program says that it is ready (`--ready-fd`).
//!
//! [`Ready::of`] gives the command its end of the pipe; the program is started; [`Ready::wait`] returns when it is ready, when it has ended
//! without a word, or when patience has run out. The tests' switch and the lab's processes are waited for so.

use std::io::{self, BufRead, BufReader, PipeReader};
use std::process::Command;
use std::time::Duration;

use ringferry_sys::process::Spawn;

use crate::process::readable;

/// The descriptor that the program writes to: above those that a service manager hands over, which begin at 3.
const FD: i32 = 9;

/// Our end of the pipe.
pub struct Ready(PipeReader);

impl Ready {
    /// Makes the pipe; `command` is told of its end, which `options` let the program keep.
    pub fn of(command: &mut Command, options: &mut Spawn) -> io::Result<Ready> {
        let (reader, writer) = io::pipe()?;
        command.arg("--ready-fd").arg(FD.to_string());
        options.keep_fds.push((writer.into(), FD));
        Ok(Ready(reader))
    }

    /// Waits until the program, which was started with these options, is ready; false if it has ended or `patience` has run out. The options
    /// must be gone, or the end of a program that says nothing is not seen.
    pub fn wait(self, patience: Duration) -> io::Result<bool> {
        if !readable(&self.0, patience) {
            return Ok(false);
        }
        let mut line = String::new();
        BufReader::new(self.0).read_line(&mut line)?;
        Ok(line == "READY\n")
    }
}
