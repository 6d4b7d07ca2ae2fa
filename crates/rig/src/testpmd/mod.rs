//! DPDK's testpmd: where it is, its command line, and the running program.
//!
//! [`find`] says whether it is installed. A [`CommandLine`] says which devices its ports are and in what mode it forwards. [`Testpmd`] is the
//! process: [`Testpmd::start`] starts it, commands go through its standard input, and dropping it kills it. These return errors, as the lab
//! measures with them; [`Bed`] is for tests, and panics.

mod bed;
mod running;

pub use bed::Bed;
pub use running::{Error, Stats, Testpmd};

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use ringferry_sys::program;

const PROGRAM: &str = "dpdk-testpmd";
/// Its memory, in megabytes, unless many ports want more: buffers for one direction, with room.
pub const MEGABYTES: u64 = 192;
/// Lines of output that go into an error message.
const LAST_LINES: usize = 8;

/// Where testpmd is, if it is installed.
pub fn find() -> Option<PathBuf> {
    program::installed(PROGRAM)
}

/// The version that the program says it has.
pub fn version(program: &Path) -> String {
    let output = Command::new(program).arg("--version").stdin(Stdio::null()).output();
    let text = output.map(|output| [output.stdout, output.stderr].concat()).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let line = text.lines().find_map(|line| line.split_once("RTE Version:"));
    line.map_or_else(|| "unknown".into(), |(_, version)| version.trim().trim_matches('\'').to_owned())
}

#[derive(Clone, Copy, Debug)]
pub enum Device<'a> {
    /// `net_vhost`: the device half of virtio-net, which listens at the socket.
    Vhost(&'a Path),
    /// `net_virtio_user`: the driver half, which connects to the socket.
    VirtioUser(&'a Path, VirtioUser),
    /// `net_tap`, which makes the tap.
    Tap(&'a str),
}

/// The rings and features that the driver half offers.
#[derive(Clone, Copy, Debug)]
pub struct VirtioUser {
    /// Entries of each virtqueue.
    pub queue: u16,
    /// True for the features of that name.
    pub packed: bool,
    pub in_order: bool,
    pub mergeable: bool,
}

/// A command line: words for DPDK's environment, devices among them, then testpmd's own.
#[derive(Clone, Debug)]
pub struct CommandLine {
    environment: Vec<String>,
    options: Vec<String>,
    ports: usize,
}

impl CommandLine {
    /// One worker on a processor, so many megabytes of memory, files of its own, and no ports yet.
    pub fn new(cpu: usize, megabytes: u64, huge_pages: bool) -> Self {
        Self::on(&cpu.to_string(), megabytes, huge_pages)
    }

    /// As [`CommandLine::new`], but wherever the scheduler finds room, and without huge pages: for a test, which measures nothing.
    pub fn anywhere(megabytes: u64) -> Self {
        let last = std::thread::available_parallelism().map_or(0, |cpus| cpus.get() - 1);
        Self::on(&format!("(0-{last})"), megabytes, false)
    }

    fn on(cpus: &str, megabytes: u64, huge_pages: bool) -> Self {
        static STARTED: AtomicU32 = AtomicU32::new(0);
        let number = STARTED.fetch_add(1, Ordering::Relaxed);
        let mut environment = vec![
            // Both threads in the same place: the main thread only waits.
            format!("--lcores=0@{cpus},1@{cpus}"),
            "--no-pci".into(),
            "--no-telemetry".into(),
            format!("-m{megabytes}"),
            format!("--file-prefix=ringferry-{}-{number}", std::process::id()),
        ];
        // virtio_user can share memory that is in few files only.
        let memory: &[&str] =
            if huge_pages { &["--in-memory", "--single-file-segments"] } else { &["--no-huge"] };
        environment.extend(memory.iter().map(|&word| word.into()));
        let options = ["--nb-cores=1", "--disable-link-check", "--no-flush-rx", "--txd=1024", "--rxd=1024"];
        Self { environment, options: options.map(Into::into).into(), ports: 0 }
    }

    /// Another word for DPDK's environment.
    pub fn environment(mut self, word: impl Into<String>) -> Self {
        self.environment.push(word.into());
        self
    }

    /// The next port, with a queue each way. `more` are further parameters of its device, each behind a comma.
    pub fn port(mut self, device: Device<'_>, more: &str) -> Self {
        let at = self.ports;
        let device = match device {
            Device::Vhost(socket) => format!("net_vhost{at},iface={},queues=1", socket.display()),
            Device::Tap(name) => format!("net_tap{at},iface={name}"),
            Device::VirtioUser(socket, VirtioUser { queue, packed, in_order, mergeable }) => {
                let [packed, in_order, mergeable] = [packed, in_order, mergeable].map(u8::from);
                format!(
                    "net_virtio_user{at},path={},queues=1,queue_size={queue},packed_vq={packed},in_order={in_order},mrg_rxbuf={mergeable}",
                    socket.display()
                )
            }
        };
        self.ports += 1;
        self.environment(format!("--vdev={device}{more}"))
    }

    /// Another of testpmd's own words.
    pub fn option(mut self, word: impl Into<String>) -> Self {
        self.options.push(word.into());
        self
    }

    /// How it forwards: `io`, `mac`, `txonly`, `rxonly`.
    pub fn mode(self, mode: &str) -> Self {
        self.option(format!("--forward-mode={mode}"))
    }

    /// In mode `mac`, where the frames of a port go.
    pub fn peer(self, port: usize, mac: [u8; 6]) -> Self {
        self.option(format!("--eth-peer={port},{}", address(mac)))
    }

    /// All words in order: DPDK's environment, `--`, testpmd's options.
    pub fn words(&self) -> impl Iterator<Item = &str> {
        self.environment
            .iter()
            .map(String::as_str)
            .chain(["--"])
            .chain(self.options.iter().map(String::as_str))
    }
}

/// An Ethernet address as DPDK reads it.
pub fn address(mac: [u8; 6]) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

/// The last lines of what a program printed.
pub fn last_words(text: &str) -> String {
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
        let [small, huge] = [false, true].map(|pages| CommandLine::new(3, 64, pages));
        let has = |of: &CommandLine, wanted: &str| of.words().any(|word| word == wanted);
        assert!(has(&small, "--no-huge") && !has(&huge, "--no-huge"));
        assert!(has(&small, "-m64") && has(&small, "--lcores=0@3,1@3"));
        let prefix =
            |of: &CommandLine| of.words().find(|word| word.starts_with("--file-prefix=")).map(str::to_owned);
        assert_ne!(prefix(&small), prefix(&huge));
    }

    #[test]
    fn ports_are_counted_and_devices_stand_in_front_of_options() {
        let user = VirtioUser { queue: 256, packed: true, in_order: false, mergeable: true };
        let line = CommandLine::new(0, 64, false)
            .mode("mac")
            .port(Device::VirtioUser(Path::new("/a"), user), ",vectorized=0")
            .port(Device::Vhost(Path::new("/b")), "")
            .port(Device::Tap("t"), "")
            .peer(1, [2, 0, 0, 0, 0xb, 1]);
        let words: Vec<&str> = line.words().collect();
        let (environment, options) = words.split_at(words.iter().position(|word| *word == "--").unwrap());
        assert_eq!(
            environment[environment.len() - 3..],
            [
                "--vdev=net_virtio_user0,path=/a,queues=1,queue_size=256,packed_vq=1,in_order=0,mrg_rxbuf=1,vectorized=0",
                "--vdev=net_vhost1,iface=/b,queues=1",
                "--vdev=net_tap2,iface=t",
            ]
        );
        assert_eq!(options[options.len() - 2..], ["--forward-mode=mac", "--eth-peer=1,02:00:00:00:0b:01"]);
    }
}
