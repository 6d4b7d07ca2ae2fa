//! Open vSwitch with DPDK: a database, a switch and a bridge of the run's own, with the `netdev` datapath and its usual
//! `NORMAL` action, which is to learn addresses.
//!
//! [`start`] starts the two processes of it for one run, with everything they would keep elsewhere in the run's folder; both end when they are
//! dropped. It has one thread for its datapath (PMD), on the processor that was named.
//!
//! Without huge pages it runs with `--legacy-mem --no-huge`: left to itself it adds `--in-memory`, which DPDK does not take
//! together with `--no-huge`.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use ringferry_sys::process::Spawn;
use ringferry_sys::program::installed;
use ringferry_sys::socket::Stream;

use super::network::{Process, logged};
use crate::experiment::{Peer, RowError};

/// The Debian package of all of it.
pub(in crate::experiments) const PACKAGES: &str = "openvswitch-switch-dpdk";

/// Its memory, in megabytes: it wants 262144 buffers, and does not do with fewer where its memory cannot grow. In pages of
/// 4 KiB a buffer has one to itself.
pub(in crate::experiments) const MEGABYTES: u64 = 1024;
const IN_SMALL_PAGES: u64 = 1536;

/// How long the database may take to listen.
const PATIENCE: Duration = Duration::from_secs(15);

/// Where Debian has the switch with DPDK in it, and the database's schema.
const SWITCH: &str = "/usr/lib/openvswitch-switch-dpdk/ovs-vswitchd-dpdk";
const SCHEMA: &str = "/usr/share/openvswitch/vswitch.ovsschema";

/// The switch, if all that it takes is installed.
pub(in crate::experiments) fn find() -> Option<PathBuf> {
    let tools = ["ovsdb-tool", "ovsdb-server", "ovs-vsctl"]
        .into_iter()
        .all(|tool| installed(tool).is_some() || Path::new("/usr/sbin").join(tool).is_file());
    (tools && Path::new(SCHEMA).is_file()).then(|| PathBuf::from(SWITCH)).filter(|file| file.is_file())
}

/// The version that it reports.
fn version(program: &Path) -> String {
    let output = Command::new(program).arg("--version").stdin(Stdio::null()).output();
    let text = output.map(|output| output.stdout).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let mut lines = text.lines().filter_map(|line| line.split_whitespace().last().map(str::to_owned));
    let version = lines.next().unwrap_or_else(|| "unknown".into());
    match lines.next() {
        Some(dpdk) => format!("{version}, DPDK {dpdk}"),
        None => version,
    }
}

/// A bridge that is to be started.
pub(in crate::experiments) struct Bridge<'a> {
    /// The folder of the run.
    pub folder: &'a Path,
    /// The processor of its datapath.
    pub cpu: usize,
    /// Huge pages are reserved.
    pub huge_pages: bool,
    /// It takes frames that are to be cut from guests that send them (`userspace-tso-enable`), which it does not by default.
    pub tso: bool,
    /// Entries of its table of addresses; its own default if `None`.
    pub addresses: Option<u64>,
    pub ports: Vec<Port>,
    /// It makes its interfaces in a network namespace of its own.
    pub new_net: bool,
}

/// A port of its bridge.
pub(in crate::experiments) struct Port {
    pub name: String,
    pub kind: Kind,
    /// The VLAN of which it is an access port.
    pub vlan: Option<u16>,
}

/// How a port is reached.
pub(in crate::experiments) enum Kind {
    /// It is a tap of that name.
    Tap,
    /// It connects to this socket (`dpdkvhostuserclient`), at which somebody listens: it would try again after a second only.
    Connects(PathBuf),
    /// It listens at a socket of its own name in the run's folder (`dpdkvhostuser`).
    Listens,
}

/// Open vSwitch at work. Fields end in this order.
pub(in crate::experiments) struct Ovs {
    pub switch: Process,
    pub server: Process,
    /// The file that has the switch's log.
    pub log: PathBuf,
}

/// The socket at which the switch answers `ovs-appctl`.
pub(in crate::experiments) fn control(folder: &Path) -> PathBuf {
    folder.join("switch.ctl")
}

/// It and its version, for the machine facts, if all that it takes is installed.
pub(in crate::experiments) fn peer() -> Option<Peer> {
    find().map(|program| Peer { name: "Open vSwitch".into(), version: version(&program) })
}

/// Starts it. Its ports need not be there yet when this returns.
pub(in crate::experiments) fn start(bridge: &Bridge<'_>) -> Result<Ovs, RowError> {
    let folder = bridge.folder;
    let database = folder.join("conf.db");
    let socket = format!("unix:{}", folder.join("db.sock").display());
    run(here(Command::new(tool("ovsdb-tool")).arg("create").arg(&database).arg(SCHEMA), folder))?;
    let mut words = vec![database.into_os_string(), format!("--remote=p{socket}").into()];
    words.extend(common(folder, "ovsdb"));
    let mut command = logged(&tool("ovsdb-server"), folder, "ovsdb", words)?;
    let server = Process::spawn("ovsdb-server", here(&mut command, folder), Spawn::default())?;
    let begin = Instant::now();
    // The socket is there a moment before anybody listens at it, and a tool with `--no-wait` tries once.
    while Stream::connect(folder.join("db.sock")).is_err() && begin.elapsed() < PATIENCE {
        std::thread::sleep(Duration::from_millis(2));
    }
    let mut command = Command::new(tool("ovs-vsctl"));
    command.args([format!("--db={socket}"), "--timeout=15".into(), "--no-wait".into()]);
    command.args(settings(bridge));
    for port in &bridge.ports {
        command.args(["--", "add-port", "br0", &port.name]);
        command.args(port.vlan.map(|vlan| format!("tag={vlan}")));
        command.args(["--", "set", "Interface", &port.name]);
        match &port.kind {
            Kind::Tap => command.arg("type=tap"),
            Kind::Listens => command.arg("type=dpdkvhostuser"),
            Kind::Connects(path) => command
                .arg("type=dpdkvhostuserclient")
                .arg(format!("options:vhost-server-path={}", path.display())),
        };
    }
    run(here(&mut command, folder))?;
    let mut words = vec![socket.into()];
    words.extend(common(folder, "switch"));
    let mut command = logged(Path::new(SWITCH), folder, "switch", words)?;
    let options = Spawn { new_net: bridge.new_net, ..Spawn::default() };
    let switch = Process::spawn("ovs-vswitchd", here(&mut command, folder), options)?;
    Ok(Ovs { switch, server, log: folder.join("switch.ovs") })
}

fn tool(name: &str) -> PathBuf {
    installed(name).unwrap_or_else(|| Path::new("/usr/sbin").join(name))
}

/// Everything that it would keep elsewhere is in the run's folder.
fn here<'a>(command: &'a mut Command, folder: &Path) -> &'a mut Command {
    for name in ["OVS_RUNDIR", "OVS_DBDIR", "OVS_LOGDIR", "OVS_SYSCONFDIR", "RUNTIME_DIRECTORY"] {
        command.env(name, folder);
    }
    command
}

/// Where a daemon listens for its tools, and writes what it has to say.
fn common(folder: &Path, name: &str) -> Vec<std::ffi::OsString> {
    let file = |end: &str| folder.join(format!("{name}.{end}")).display().to_string();
    vec![
        format!("--unixctl={}", file("ctl")).into(),
        format!("--log-file={}", file("ovs")).into(),
        "-vconsole:off".into(),
        "-vsyslog:off".into(),
    ]
}

/// Runs a tool to its end.
fn run(command: &mut Command) -> Result<(), RowError> {
    let output = command.stdin(Stdio::null()).output();
    let name = command.get_program().to_string_lossy().into_owned();
    let output = output.map_err(|error| RowError::failed(format!("cannot run {name}: {error}")))?;
    if output.status.success() {
        return Ok(());
    }
    Err(RowError::failed(format!("{name}: {}", String::from_utf8_lossy(&output.stderr).trim())))
}

/// Settings of the whole switch, and its bridge: words for `ovs-vsctl`.
fn settings(bridge: &Bridge<'_>) -> Vec<String> {
    let mask = 1u128 << bridge.cpu.min(127);
    let memory = match bridge.huge_pages {
        true => format!("-m {MEGABYTES}"),
        false => format!("--no-huge --legacy-mem -m {IN_SMALL_PAGES}"),
    };
    let mut words = vec![
        "init".into(),
        "--".into(),
        "set".into(),
        "Open_vSwitch".into(),
        ".".into(),
        "other_config:dpdk-init=true".into(),
        // A value with spaces wants quotes of its own.
        format!("other_config:dpdk-extra=\"{memory} --no-pci --no-telemetry\""),
        format!("other_config:pmd-cpu-mask={mask:#x}"),
        format!("other_config:dpdk-lcore-mask={mask:#x}"),
    ];
    if bridge.tso {
        words.push("other_config:userspace-tso-enable=true".into());
    }
    for word in ["--", "add-br", "br0", "--", "set", "bridge", "br0", "datapath_type=netdev"] {
        words.push(word.into());
    }
    words.extend(bridge.addresses.map(|addresses| format!("other_config:mac-table-size={addresses}")));
    words
}
