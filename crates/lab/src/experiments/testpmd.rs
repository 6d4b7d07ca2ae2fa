//! What is the same whenever DPDK's testpmd takes part: where it is, the beginning of its command line, its last words.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

/// The program.
const PROGRAM: &str = "dpdk-testpmd";
/// Its memory, in megabytes, unless many ports want more: buffers for one direction, with room.
pub(in crate::experiments) const MEGABYTES: u64 = 192;
/// Lines of output that go into an error message.
const LAST_LINES: usize = 8;

/// Where testpmd is, if it is installed.
pub(in crate::experiments) fn find() -> Option<PathBuf> {
    installed(PROGRAM)
}

/// Where a program is, if it is installed.
pub(in crate::experiments) fn installed(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join(program)).find(|file| file.is_file())
}

/// What it says its version is.
pub(in crate::experiments) fn version(program: &Path) -> String {
    let output = Command::new(program).arg("--version").stdin(Stdio::null()).output();
    let text = output.map(|output| [output.stdout, output.stderr].concat()).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let line = text.lines().find_map(|line| line.split_once("RTE Version:"));
    line.map_or_else(|| "unknown".into(), |(_, version)| version.trim().trim_matches('\'').to_owned())
}

/// Its arguments for DPDK's environment, up to the devices: one worker on a processor, memory, files of its own.
pub(in crate::experiments) fn environment(cpu: usize, megabytes: u64, huge_pages: bool) -> Vec<String> {
    static STARTED: AtomicU32 = AtomicU32::new(0);
    let number = STARTED.fetch_add(1, Ordering::Relaxed);
    let mut arguments = vec![
        // Both threads on one processor: the main thread only waits.
        format!("--lcores=0@{cpu},1@{cpu}"),
        "--no-pci".into(),
        "--no-telemetry".into(),
        format!("-m{megabytes}"),
        format!("--file-prefix=ringferry-lab-{}-{number}", std::process::id()),
    ];
    // virtio_user can share memory that is in few files only.
    let memory: &[&str] =
        if huge_pages { &["--in-memory", "--single-file-segments"] } else { &["--no-huge"] };
    arguments.extend(memory.iter().map(|&argument| argument.into()));
    arguments
}

/// Its own arguments, behind the devices: those that are always the same.
pub(in crate::experiments) fn options() -> impl Iterator<Item = String> {
    ["--nb-cores=1", "--disable-link-check", "--no-flush-rx"].into_iter().map(Into::into)
}

/// The last lines of what a program printed.
pub(in crate::experiments) fn last_words(text: &str) -> String {
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    lines[lines.len().saturating_sub(LAST_LINES)..].join("\n  ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_words_are_the_last_lines_that_say_something() {
        let text: String = (0..20).map(|line| format!("line {line}\n \n")).collect();
        let words = last_words(&text);
        assert_eq!(words.lines().count(), LAST_LINES);
        assert!(words.starts_with("line 12\n") && words.ends_with("line 19"), "{words}");
        assert_eq!(last_words(""), "");
    }

    #[test]
    fn each_start_has_files_of_its_own_and_memory_as_it_can_be_had() {
        let [small, huge] = [false, true].map(|pages| environment(3, 64, pages));
        assert!(small.contains(&"--no-huge".into()) && !huge.contains(&"--no-huge".into()));
        assert!(small.contains(&"-m64".into()) && small.contains(&"--lcores=0@3,1@3".into()));
        let prefix = |of: &[String]| of.iter().find(|word| word.starts_with("--file-prefix=")).cloned();
        assert_ne!(prefix(&small), prefix(&huge));
    }
}
