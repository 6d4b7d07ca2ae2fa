//! `--ready-fd`: tells whoever has started this program that it is ready, by a line on a descriptor that is passed on to it.
//!
//! A program takes the descriptor when it has read its arguments ([`Ready::take`]), so that a number that is none is found at once, and says the
//! line once ([`Ready::say`]), which closes the descriptor.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::RawFd;

use crate::inherited;

/// The descriptor, on which nothing was said yet.
#[derive(Debug)]
pub struct Ready(File);

/// The number of `--ready-fd` is that of no open descriptor.
#[derive(Debug, thiserror::Error)]
#[error("--ready-fd {0}: {1}: pass the number of an open pipe or socket")]
pub struct ReadyError(pub RawFd, pub io::Error);

impl Ready {
    /// Takes the descriptor with this number.
    ///
    /// # Errors
    /// See [`ReadyError`].
    pub fn take(number: RawFd) -> Result<Ready, ReadyError> {
        let taken = inherited::take(number).map_err(|error| ReadyError(number, error))?;
        Ok(Ready(taken.into()))
    }

    /// Says that the program is ready.
    pub fn say(mut self) {
        // Whoever asked may have gone; that is their business.
        let _ = self.0.write_all(b"READY\n");
    }
}
