//! Where a capture is written to: a file, files that follow each other, a FIFO, or standard output.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{self, IsTerminal, Seek, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use super::CaptureError;
use super::pcapng::blocks_of;

/// Permissions of a file that is made: tenants' packets are nobody else's to read.
const MODE: u32 = 0o600;

/// See the head of this file.
pub(super) struct Output {
    file: File,
    name: String,
    stdout: bool,
    /// Bytes of whole blocks that were written, and where the first of them is, if this is a file.
    written: u64,
    start: Option<u64>,
    /// Bytes of what it begins with.
    head: u64,
    series: Option<Series>,
}

/// When another file is begun.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rotation {
    /// Most bytes of a file, unless a single packet needs more.
    pub(super) size: u64,
    /// Most files that are kept.
    pub(super) files: Option<u32>,
}

/// Files that follow each other.
struct Series {
    rotation: Rotation,
    /// The name without its numbers.
    path: PathBuf,
    number: u32,
    files: VecDeque<PathBuf>,
}

impl Series {
    /// Returns the path of the next file, and makes room for it.
    fn next(&mut self) -> PathBuf {
        self.number += 1;
        let mut name = self.path.file_stem().unwrap_or_default().to_owned();
        name.push(format!("_{:05}", self.number));
        if let Some(extension) = self.path.extension() {
            name.push(".");
            name.push(extension);
        }
        let path = self.path.with_file_name(name);
        self.files.push_back(path.clone());
        if self.rotation.files.is_some_and(|most| self.files.len() > most as usize) {
            // Somebody may have taken it away.
            let _ = self.files.pop_front().map(std::fs::remove_file);
        }
        path
    }
}

/// Returns how many bytes of whole blocks fit into so many.
fn whole_blocks(blocks: &[u8], room: u64) -> usize {
    let ends = blocks_of(blocks).scan(0, |end, block| {
        *end += block.len();
        Some(*end)
    });
    ends.take_while(|end| *end as u64 <= room).last().unwrap_or(0)
}

/// Says so if nothing can be written to a path, whatever is written: packets are not for a terminal.
///
/// # Errors
/// See [`CaptureError::Terminal`].
pub(super) fn check(path: &Path) -> Result<(), CaptureError> {
    if path == Path::new("-") && io::stdout().is_terminal() { Err(CaptureError::Terminal) } else { Ok(()) }
}

impl Output {
    /// Opens a file, which is overwritten, the first of several, or standard output.
    ///
    /// # Errors
    /// It cannot be opened.
    pub(super) fn open(path: &Path, rotation: Option<Rotation>) -> Result<Output, CaptureError> {
        let mut series = rotation.map(|rotation| Series {
            rotation,
            path: path.to_owned(),
            number: 0,
            files: VecDeque::new(),
        });
        let opened = match &mut series {
            Some(series) => Output::create_anew(&series.next())?,
            None => Output::create(path)?,
        };
        Ok(Output { series, ..opened })
    }

    /// Makes a file of a series, whose name anybody can guess: what is there, also a link, is removed and not written to.
    fn create_anew(path: &Path) -> Result<Output, CaptureError> {
        let name = path.display().to_string();
        let make = || {
            match std::fs::remove_file(path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
            OpenOptions::new().write(true).create_new(true).mode(MODE).open(path)
        };
        let file = make().map_err(|error| CaptureError::Write { path: name.clone(), error })?;
        Ok(Output::new(file, name, false))
    }

    fn create(path: &Path) -> Result<Output, CaptureError> {
        let name = path.display().to_string();
        let failed = |error| CaptureError::Write { path: name.clone(), error };
        if path == Path::new("-") {
            let file = File::from(io::stdout().as_fd().try_clone_to_owned().map_err(failed)?);
            return Ok(Output::new(file, "standard output".to_owned(), true));
        }
        let mut options = OpenOptions::new();
        let file = options.write(true).create(true).truncate(true).mode(MODE).open(path).map_err(failed)?;
        Ok(Output::new(file, name, false))
    }

    fn new(mut file: File, name: String, stdout: bool) -> Output {
        let start =
            file.metadata().is_ok_and(|file| file.is_file()).then(|| file.stream_position().ok()).flatten();
        Output { file, name, stdout, written: 0, start, head: 0, series: None }
    }

    /// Returns how many bytes of whole blocks go into this file, and not into the next one: all, if there is no other.
    pub(super) fn fits(&self, blocks: &[u8]) -> usize {
        let Some(Series { rotation, .. }) = &self.series else { return blocks.len() };
        let fits = whole_blocks(blocks, rotation.size.saturating_sub(self.written));
        // A packet that is longer than any file is written all the same.
        if fits == 0 && self.written == self.head {
            blocks_of(blocks).next().map_or(blocks.len(), <[u8]>::len)
        } else {
            fits
        }
    }

    /// Writes what the file begins with.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub(super) fn begin(&mut self, head: &[u8]) -> Result<bool, CaptureError> {
        let is_read = self.write(head)?;
        self.head = self.written;
        Ok(is_read)
    }

    /// Ends this file with `tail`, and begins the next one with `head`.
    ///
    /// # Errors
    /// It cannot be written, or the next one not be opened.
    pub(super) fn begin_next(&mut self, tail: &[u8], head: &[u8]) -> Result<(), CaptureError> {
        self.write(tail)?;
        let Some(mut series) = self.series.take() else { return Ok(()) };
        let next = Output::create_anew(&series.next())?;
        *self = Output { series: Some(series), ..next };
        self.begin(head).map(drop)
    }

    /// Returns the files that follow each other and were not removed.
    pub(super) fn files(&self) -> Vec<String> {
        let files = self.series.iter().flat_map(|series| &series.files);
        files.map(|file| file.display().to_string()).collect()
    }

    /// Returns the number of bytes of whole blocks that were written to this file.
    pub(super) fn written(&self) -> u64 {
        self.written
    }

    pub(super) fn is_stdout(&self) -> bool {
        self.stdout
    }

    /// Writes whole blocks; false if nobody reads them any more. A file that cannot take all of them keeps those that fit, so that it ends with a block.
    ///
    /// # Errors
    /// They cannot be written: the disk is full, say.
    pub(super) fn write(&mut self, blocks: &[u8]) -> Result<bool, CaptureError> {
        let (mut left, mut failed) = (blocks, None);
        while !left.is_empty() && failed.is_none() {
            match self.file.write(left) {
                Ok(0) => failed = Some(io::ErrorKind::WriteZero.into()),
                Ok(written) => left = &left[written..],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => failed = Some(error),
            }
        }
        match failed {
            None => {
                self.written += blocks.len() as u64;
                Ok(true)
            }
            Some(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
            Some(error) => {
                self.written += whole_blocks(blocks, (blocks.len() - left.len()) as u64) as u64;
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
