//! The folder of a run: the configuration, its sockets, and everything that the helper must not touch.
//!
//! ```text
//!   HERE/rf.toml         the configuration: vm0 listens, vm1 connects (rf.d/more.toml beside it: vm4 listens)
//!        listen.sock     socket of vm0                vm1.sock        socket that vm1 connects to
//!        control         the control socket           stranger.sock   socket whose listener is gone
//!        precious        a file                       other.sock      socket of another program
//!        machines/       in socket_directories        machines/peer.sock    socket that a port may connect to
//!                                                     machines/link.sock -> ../other.sock
//!                                                     machines/out -> ../elsewhere
//!        named -> behind in socket_directories        link -> machines
//!        elsewhere/      in no configuration          elsewhere/other.sock  socket of another program
//! ```

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, symlink};
use std::path::{Path, PathBuf};

use ringferry_switch::config::{Config, FeatureToggles, MAX_WORKERS, PortConfig, PortKind};
use ringferry_switch::privileged::Charter;
use ringferry_switch::rules::Rules;
use ringferry_sys::socket::Listener;
use tempfile::TempDir;

/// Flag: a listener is at the socket of `vm1`, which the charter lets the helper connect to.
pub const PEER: u8 = 1;
/// Flag: a listener is at the socket of `vm0`. Otherwise its file is stale.
pub const LISTENS: u8 = 2;
/// Flag: in the place of the control socket is a file.
pub const NO_SOCKET: u8 = 4;
/// Flag: the configuration file has changed since, and has only `vm1` and, in a directory that no configuration named before, `vm3`.
pub const CHANGED: u8 = 8;
/// Flag: the configuration file is not valid any more.
pub const NONSENSE: u8 = 16;
/// Flag: the configuration file was removed.
pub const GONE: u8 = 32;
/// Flag: the configuration file is a symbolic link.
pub const LINK: u8 = 64;
/// Flag: there is a drop-in file, with `vm4`.
pub const DROP_IN: u8 = 128;

/// The comment that the configuration begins with.
pub(super) const HEAD: &[u8] = b"# Rack 7.\n";
const TOP: &str = "\
# Rack 7.
socket_directories = ['HERE/machines', 'HERE/named']

";
const VM0: &str = "\
[[port]]
kind = 'vhost-user'
socket = 'HERE/listen.sock'  # of vm0
name = 'vm0'
vlan = 10 # as agreed
max_macs = 8

";
const VM1: &str = "\
# The firewall listens itself.
[[port]]
kind = 'vhost-user'
name = 'vm1'
socket = 'HERE/vm1.sock'
mode = 'connect'
";
const VM3: &str = "\
[[port]]
kind = 'vhost-user'
socket = 'HERE/elsewhere/vm3.sock'
";
const VM4: &str = "\
[[port]]
kind = 'vhost-user'
socket = 'HERE/vm4.sock'
";

/// The type and content of a name in the folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Entry {
    /// A socket with its inode.
    Socket(u64),
    File(Vec<u8>),
    Link(PathBuf),
    Folder,
}

/// The folder with its listeners.
pub(super) struct Folder {
    folder: TempDir,
    pub(super) charter: Charter,
    /// The ports of the start.
    pub(super) start: Vec<PortConfig>,
    /// The sockets that somebody listens on.
    pub(super) listeners: Vec<(&'static str, Listener)>,
}

impl Folder {
    pub(super) fn new(world: u8) -> io::Result<Self> {
        // The folder is in memory, if possible, as each change of the file is written through.
        let folder = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir())?;
        let path = |name: &str| folder.path().join(name);
        let has = |bit| world & bit != 0;
        let here = folder.path().to_string_lossy();
        let write = |name: &str, parts: &[&str]| fs::write(path(name), parts.concat().replace("HERE", &here));
        for name in ["machines", "behind", "elsewhere"] {
            fs::create_dir(path(name))?;
        }
        for (name, target) in [
            ("named", "behind"),
            ("link", "machines"),
            ("machines/out", "../elsewhere"),
            ("machines/link.sock", "../other.sock"),
        ] {
            symlink(target, path(name))?;
        }
        write("rf.toml", &[TOP, VM0, VM1])?;
        if has(DROP_IN) {
            fs::create_dir(path("rf.d"))?;
            write("rf.d/more.toml", &[VM4])?;
        }
        let config = Config::builder().file(&path("rf.toml")).port_flag("tap:rf0").build();
        let config = config.expect("a configuration");
        let charter = Charter::of(&config, &path("control"));
        if has(NONSENSE) {
            write("rf.toml", &["[[port]\nname = "])?;
        } else if has(CHANGED) {
            write("rf.toml", &[VM1, VM3])?;
        }
        if has(LINK) {
            fs::rename(path("rf.toml"), path("linked.toml"))?;
            symlink("linked.toml", path("rf.toml"))?;
        }
        if has(GONE) {
            fs::remove_file(path("rf.toml"))?;
        }
        fs::write(path("precious"), "precious")?;
        if has(NO_SOCKET) {
            fs::write(path("control"), "control")?;
        }
        let mut listeners = Vec::new();
        for (name, listens) in [
            ("vm1.sock", has(PEER)),
            ("listen.sock", has(LISTENS)),
            ("other.sock", true),
            ("machines/peer.sock", true),
            ("elsewhere/other.sock", true),
            ("stranger.sock", false),
            ("control", false),
        ] {
            if name == "control" && has(NO_SOCKET) {
                continue;
            }
            let mut listener = Listener::bind(path(name)).map_err(io::Error::other)?;
            listener.leave_file();
            if listens {
                listeners.push((name, listener));
            }
        }
        Ok(Self { folder, charter, start: config.ports, listeners })
    }

    pub(super) fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Returns everything in the folder, by its path below it.
    pub(super) fn entries(&self) -> BTreeMap<PathBuf, Entry> {
        let mut entries = BTreeMap::new();
        let mut folders = vec![PathBuf::new()];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(self.path().join(&folder)).expect("a folder") {
                let entry = entry.expect("an entry");
                let name = folder.join(entry.file_name());
                let kind = entry.file_type().expect("a type");
                let what = if kind.is_socket() {
                    Entry::Socket(entry.metadata().expect("a socket that was there").ino())
                } else if kind.is_symlink() {
                    Entry::Link(fs::read_link(entry.path()).expect("a link that was there"))
                } else if kind.is_dir() {
                    folders.push(name.clone());
                    Entry::Folder
                } else {
                    Entry::File(fs::read(entry.path()).expect("a file that was there"))
                };
                entries.insert(name, what);
            }
        }
        entries
    }

    /// Returns the ports of the configuration file and of its drop-in file, without their rules; `None` for a file that is not there or
    /// not valid.
    pub(super) fn ports(&self) -> [Option<Vec<PortConfig>>; 2] {
        ["rf.toml", "rf.d/more.toml"].map(|name| {
            let text = fs::read_to_string(self.path().join(name)).ok()?;
            let config = Config::builder().may_be_empty().toml(name, &text).workers(MAX_WORKERS).build();
            config.ok().map(|config| without_settings(config.ports))
        })
    }

    /// Returns true if the next start would take the configuration as it is.
    pub(super) fn is_valid(&self) -> bool {
        Config::from_file(&self.path().join("rf.toml")).is_ok()
    }
}

/// Takes away from ports what can change while they are open, which the helper keeps for whoever asks.
pub(super) fn without_settings(mut ports: Vec<PortConfig>) -> Vec<PortConfig> {
    for port in &mut ports {
        (port.rules, port.mtu, port.workers) = (Rules::default(), None, Vec::new());
        if let PortKind::VhostUser(vhost) = &mut port.kind {
            (vhost.queue_size, vhost.mac, vhost.features) = (None, None, FeatureToggles::default());
        }
    }
    ports
}
