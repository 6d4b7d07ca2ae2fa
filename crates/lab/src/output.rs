//! Files that results are written to: checked before hours of measuring, replaced as a whole.

use std::fs::Permissions;
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;

/// Readable by everyone, as a shell's `>` makes files; a temporary file is not.
const MODE: u32 = 0o644;

/// A file to be written at the end. `-` is standard output.
#[derive(Debug)]
pub struct Output {
    path: PathBuf,
    /// In the same folder, so that renaming it is atomic. None for standard output.
    file: Option<NamedTempFile>,
}

/// A file that cannot be written.
#[derive(Debug, thiserror::Error)]
#[error("cannot write {}: {error}: choose a folder that exists and that you may write to", path.display())]
pub struct OutputError {
    path: PathBuf,
    error: io::Error,
}

impl Output {
    /// Opens a temporary file where the result will be. A file at `path` stays until
    /// [`Output::write`].
    ///
    /// # Errors
    /// The folder is missing or not writable, or `path` is a folder.
    pub fn open(path: &Path) -> Result<Self, OutputError> {
        let fail = |error| OutputError { path: path.into(), error };
        if path == Path::new("-") {
            return Ok(Self { path: path.into(), file: None });
        }
        if path.is_dir() {
            return Err(fail(io::ErrorKind::IsADirectory.into()));
        }
        let folder = match path.parent() {
            Some(folder) if folder != Path::new("") => folder,
            _ => Path::new("."),
        };
        let file = tempfile::Builder::new().permissions(Permissions::from_mode(MODE)).tempfile_in(folder);
        Ok(Self { path: path.into(), file: Some(file.map_err(fail)?) })
    }

    /// Returns true for standard output.
    pub fn is_stdout(&self) -> bool {
        self.file.is_none()
    }

    /// Writes all of it and puts it in its place.
    ///
    /// # Errors
    /// No space left, for example; what was at the path before is still there.
    pub fn write(self, content: &str) -> Result<(), OutputError> {
        let Self { path, file } = self;
        let fail = |error| OutputError { path: path.clone(), error };
        let Some(mut file) = file else {
            return io::stdout().write_all(content.as_bytes()).map_err(fail);
        };
        file.write_all(content.as_bytes()).and_then(|()| file.as_file().sync_all()).map_err(fail)?;
        file.persist(&path).map_err(|error| fail(error.error))?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_replaced_as_a_whole_and_only_in_the_end() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("result.json");
        std::fs::write(&path, "old and long").unwrap();
        let output = Output::open(&path).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "old and long");
        output.write("new").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "new");
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o444, 0o444);
        // Nothing else is left, also when it is not written.
        drop(Output::open(&path).unwrap());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_path_that_cannot_be_written_is_found_at_once() {
        let folder = tempfile::tempdir().unwrap();
        for path in [folder.path().join("missing/result.json"), folder.path().to_owned()] {
            let error = Output::open(&path).unwrap_err().to_string();
            assert!(error.contains(path.to_str().unwrap()) && error.contains("choose a folder"), "{error}");
        }
    }
}
