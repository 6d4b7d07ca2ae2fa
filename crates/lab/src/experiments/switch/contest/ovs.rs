//! Open vSwitch with DPDK: a database, a switch and a bridge of the run's own, with the `netdev` datapath and its usual
//! `NORMAL` action, which is to learn addresses. Its guests are ports of type `dpdkvhostuserclient`: it connects.
//!
//! Without huge pages it runs with `--legacy-mem --no-huge`: left to itself it adds `--in-memory`, which DPDK does not take
//! together with `--no-huge`.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use ringferry_sys::process::Spawn;
use ringferry_sys::socket::Listener;

use super::{Contest, Order, taps};
use crate::experiment::RowError;
use crate::experiments::network::{Process, logged};
use crate::experiments::switch::end::Place;
use ringferry_sys::program::installed;

/// The Debian package of all of it.
pub(in crate::experiments::switch) const PACKAGES: &str = "openvswitch-switch-dpdk";

/// Its memory, in megabytes: it wants 262144 buffers, and does not do with fewer where its memory cannot grow. In pages of
/// 4 KiB a buffer has one to itself.
pub(in crate::experiments::switch) const MEGABYTES: u64 = 1024;
const IN_SMALL_PAGES: u64 = 1536;

/// How long the database may take to listen.
const PATIENCE: Duration = Duration::from_secs(15);

/// Where Debian has the switch with DPDK in it, and the database's schema.
const SWITCH: &str = "/usr/lib/openvswitch-switch-dpdk/ovs-vswitchd-dpdk";
const SCHEMA: &str = "/usr/share/openvswitch/vswitch.ovsschema";

/// The switch, if all that it takes is installed.
pub(in crate::experiments::switch) fn find() -> Option<PathBuf> {
    let tools = ["ovsdb-tool", "ovsdb-server", "ovs-vsctl"]
        .into_iter()
        .all(|tool| installed(tool).is_some() || Path::new("/usr/sbin").join(tool).is_file());
    (tools && Path::new(SCHEMA).is_file()).then(|| PathBuf::from(SWITCH)).filter(|file| file.is_file())
}

/// The version that it reports.
pub(in crate::experiments::switch) fn version(program: &Path) -> String {
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

pub(super) fn start(order: &Order) -> Result<Contest, RowError> {
    let folder = &order.folder;
    let database = folder.join("conf.db");
    let socket = format!("unix:{}", folder.join("db.sock").display());
    run(here(Command::new(tool("ovsdb-tool")).arg("create").arg(&database).arg(SCHEMA), folder))?;
    let mut words = vec![database.into_os_string(), format!("--remote=p{socket}").into()];
    words.extend(common(folder, "ovsdb"));
    let mut command = logged(&tool("ovsdb-server"), folder, "ovsdb", words)?;
    let server = Process::spawn("ovsdb-server", here(&mut command, folder), Spawn::default())?;
    let begin = Instant::now();
    while !folder.join("db.sock").exists() && begin.elapsed() < PATIENCE {
        std::thread::sleep(Duration::from_millis(2));
    }
    let mut places = Vec::new();
    let mut command = Command::new(tool("ovs-vsctl"));
    command.args([format!("--db={socket}"), "--timeout=15".into(), "--no-wait".into()]);
    command.args(settings(order));
    for (port, tap) in order.taps().enumerate() {
        let name = taps::name(port);
        command.args(["--", "add-port", "br0", &name, "--", "set", "Interface", &name]);
        if tap {
            command.arg("type=tap");
        } else {
            let path = order.socket(port);
            // Before it tries: it would try again after a second only.
            places.push(Some(Place::Listen(Listener::bind(&path).map_err(RowError::failed)?)));
            command.arg("type=dpdkvhostuserclient");
            command.arg(format!("options:vhost-server-path={}", path.display()));
            continue;
        }
        places.push(None);
    }
    run(here(&mut command, folder))?;
    let mut words = vec![socket.into()];
    words.extend(common(folder, "switch"));
    let mut command = logged(Path::new(SWITCH), folder, "switch", words)?;
    let switch = Process::spawn("ovs-vswitchd", here(&mut command, folder), Spawn::default())?;
    let places = places.into_iter().enumerate().map(|(port, place)| match place {
        Some(place) => Ok(place),
        None => Ok(Place::Tap(taps::behind(order, port)?)),
    });
    let places = places.collect::<Result<_, RowError>>()?;
    Ok(Contest { processes: vec![switch, server], log: folder.join("switch.ovs"), places })
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
fn settings(order: &Order) -> Vec<String> {
    let mask = 1u128 << order.cpus[1].min(127);
    let memory = match order.huge_pages {
        true => format!("-m {MEGABYTES}"),
        false => format!("--no-huge --legacy-mem -m {IN_SMALL_PAGES}"),
    };
    // As many addresses as there are, twice.
    let addresses = (2 * u64::from(order.case.flows) * order.case.ports as u64).clamp(2048, 1_000_000);
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
    if order.tso() {
        words.push("other_config:userspace-tso-enable=true".into());
    }
    for word in ["--", "add-br", "br0", "--", "set", "bridge", "br0", "datapath_type=netdev"] {
        words.push(word.into());
    }
    words.push(format!("other_config:mac-table-size={addresses}"));
    words
}
