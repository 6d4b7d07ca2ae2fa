//! Where a capture is written to: a file, a FIFO, or standard output.

use std::fs::File;
use std::io::{self, IsTerminal, Seek, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

use super::CaptureError;

/// See the head of this file.
pub(super) struct Output {
    file: File,
    name: String,
    stdout: bool,
    /// Bytes of whole blocks that were written, and where the first of them is, if this is a file.
    written: u64,
    start: Option<u64>,
}

/// Says so if nothing can be written to a path, whatever is written: packets are not for a terminal.
///
/// # Errors
/// See [`CaptureError::Terminal`].
pub(super) fn check(path: &Path) -> Result<(), CaptureError> {
    if path == Path::new("-") && io::stdout().is_terminal() { Err(CaptureError::Terminal) } else { Ok(()) }
}

impl Output {
    /// Opens a file, which is overwritten, or standard output.
    ///
    /// # Errors
    /// It cannot be opened.
    pub(super) fn open(path: &Path) -> Result<Output, CaptureError> {
        let name = path.display().to_string();
        let failed = |error| CaptureError::Write { path: name.clone(), error };
        if path == Path::new("-") {
            let file = File::from(io::stdout().as_fd().try_clone_to_owned().map_err(failed)?);
            return Ok(Output::new(file, "standard output".to_owned(), true));
        }
        let file = File::create(path).map_err(failed)?;
        Ok(Output::new(file, name, false))
    }

    fn new(mut file: File, name: String, stdout: bool) -> Output {
        let start =
            file.metadata().is_ok_and(|file| file.is_file()).then(|| file.stream_position().ok()).flatten();
        Output { file, name, stdout, written: 0, start }
    }

    pub(super) fn is_stdout(&self) -> bool {
        self.stdout
    }

    /// Writes whole blocks; false if nobody reads them any more. A file that cannot take all of them keeps none of them, so that it ends with a block.
    ///
    /// # Errors
    /// They cannot be written: the disk is full, say.
    pub(super) fn write(&mut self, blocks: &[u8]) -> Result<bool, CaptureError> {
        match self.file.write_all(blocks) {
            Ok(()) => {
                self.written += blocks.len() as u64;
                Ok(true)
            }
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
            Err(error) => {
                if let Some(start) = self.start {
                    let _ = self.file.set_len(start + self.written);
                }
                Err(CaptureError::Write { path: self.name.clone(), error })
            }
        }
    }
}

impl AsFd for Output {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}
