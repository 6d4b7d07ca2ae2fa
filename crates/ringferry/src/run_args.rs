//! The command line of `ringferry run`, and the configuration it stands for.

use std::os::fd::RawFd;
use std::path::PathBuf;

use ringferry_control as control;
use ringferry_switch::config::{self, Config, ConfigError, MAX_WORKERS};

/// Shown below the options by `ringferry run -h` and `--help`.
const EXAMPLES: &str = "\
Two virtual machines and the host:
  ringferry run --port vhost-user:/run/ringferry/vm0.sock --port vhost-user:/run/ringferry/vm1.sock --port tap:rf0

A busy guest with several queues (mq=on,vectors=10 and queues=4 in QEMU's -netdev):
  ringferry run --workers 4 --port vhost-user:/run/ringferry/vm0.sock --port tap:rf0

QEMU, one per guest; its memory must be shared for the switch to reach it:
  qemu-system-x86_64 -m 1G -object memory-backend-memfd,id=mem,size=1G,share=on -machine memory-backend=mem \\
    -chardev socket,id=net0,path=/run/ringferry/vm0.sock,reconnect=1 \\
    -netdev vhost-user,id=net0,chardev=net0 -device virtio-net-pci,netdev=net0

QEMU as the server (its -chardev has server=on,wait=off instead of reconnect=1):
  ringferry run --port vhost-user:/run/vm0.sock,mode=connect --port tap:rf0

Ports with rules, which `ringferry ctl set` changes while the switch runs:
  ringferry run --port vhost-user:/run/ringferry/vm0.sock,vlan=10,rate_in=1gbit --port tap:rf0,trunk=10,20-29,native=5

A configuration file, checked before the switch is told to read it again:
  ringferry run /etc/ringferry/ringferry.toml --check
  ringferry ctl reload --dry-run

A newer program in place of the one that runs, while packets flow:
  ringferry run --replace

All kinds of ports and their keys: `ringferry run --help`, docs/configuration.md.";

/// Shown below the options by `ringferry run --help`: every key that a `--port` flag may have.
fn keys_and_examples() -> String {
    format!("{}\n{EXAMPLES}", config::port_keys_help())
}

/// Starts a switch: a configuration file, flags, or both.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = EXAMPLES, after_long_help = keys_and_examples())]
pub struct RunArgs {
    /// Configuration file. Flags add to it.
    #[arg(value_name = "CONFIG.toml")]
    pub file: Option<PathBuf>,

    /// A port to add; may be given several times.
    #[arg(long = "port", value_name = "KIND:WHERE[,KEY=VALUE...]")]
    pub ports: Vec<String>,

    /// A port that listens at PATH, and a tap for it if there is no other port: short for --port vhost-user:PATH --port tap:rf-STEM, with the
    /// stem of PATH. Management programs start vhost-user back ends so (vhost-user.rst, "Backend program conventions").
    #[arg(long, value_name = "PATH", conflicts_with = "fd")]
    pub socket_path: Option<PathBuf>,

    /// The same for an inherited socket, connected or listening.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(RawFd).range(3..))]
    pub fd: Option<RawFd>,

    /// Print what kind of vhost-user back end this is, as JSON, and do nothing else.
    #[arg(long)]
    pub print_capabilities: bool,

    /// Threads that move packets, 1 to 16 [default: the file's, or one for each two processors, at most 4]. Queue pair P of
    /// a guest is served by thread P modulo their number.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=i64::from(MAX_WORKERS)))]
    pub workers: Option<u16>,

    /// Control socket for `ringferry ctl` [default: the file's, or /run/ringferry/control.sock for root and
    /// $XDG_RUNTIME_DIR/ringferry.sock for others, without that variable /tmp/ringferry-UID/control.sock].
    #[arg(long, value_name = "PATH")]
    pub control: Option<PathBuf>,

    /// Directory of the policies that ports name as their `firewall` [default: the file's, or `policies` beside the file].
    #[arg(long, value_name = "DIRECTORY", conflicts_with = "replace")]
    pub policies: Option<PathBuf>,

    /// Write "READY" and a newline to this descriptor when all ports are set up, then close it.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(RawFd).range(3..))]
    pub ready_fd: Option<RawFd>,

    /// Take over from the switch that runs (the one with this control socket), without a lost packet: its ports, connections, rules, addresses and counters,
    /// as they are; it ends then. If anything fails it goes on. Ports and settings are those in force: `ringferry ctl reload` reads the file.
    #[arg(long, conflicts_with_all = ["ports", "socket_path", "fd", "workers", "check", "print_capabilities"])]
    pub replace: bool,

    /// With --replace: return when this has happened; a process of its own goes on, in a session of its own. Its log goes to the standard error of this one, where whoever reads from a pipe waits for its end: give it a file or /dev/null.
    #[arg(long, requires = "replace", conflicts_with = "ready_fd")]
    pub background: bool,

    /// With --replace: do nothing if the switch that runs is of this very program.
    #[arg(long, requires = "replace")]
    pub if_changed: bool,

    /// Only check the file and the flags, as a start and a reload would, and say what is wrong with them.
    #[arg(long)]
    pub check: bool,

    /// With --check: print what was found as JSON.
    #[arg(long, requires = "check")]
    pub json: bool,

    /// Makes the switch give up its privileges once its ports are open: capabilities, files (Landlock), system calls (seccomp), and
    /// core dumps. Off is for debuggers, and for a kernel or container in which it gets in the way.
    #[arg(long, value_name = "on|off", value_enum, default_value_t, hide_possible_values = true)]
    pub sandbox: OnOff,
}

/// A switch of the other kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum OnOff {
    /// On.
    #[default]
    On,
    /// Off.
    Off,
}

impl RunArgs {
    /// The configuration that file and flags make together, its control socket always set.
    ///
    /// # Errors
    /// Everything that is wrong with the file and the flags.
    pub fn config(&self) -> Result<Config, ConfigError> {
        let mut builder = Config::builder();
        if let Some(file) = &self.file {
            builder = builder.file(file);
        }
        if let Some(path) = &self.control {
            builder = builder.control(path);
        }
        if let Some(directory) = &self.policies {
            builder = builder.policies(directory);
        }
        if let Some(workers) = self.workers {
            builder = builder.workers(workers);
        }
        if let Some(fd) = self.ready_fd {
            builder = builder.reserve_fd("--ready-fd", fd);
        }
        let ports = self.ports.iter().cloned().chain(self.conventional_ports());
        let builder = ports.fold(builder, |builder, port| builder.port_flag(&port));
        let mut config = builder.build_to_start()?;
        config.control.get_or_insert_with(control::default_path);
        Ok(config)
    }
}

impl RunArgs {
    /// The control socket of the switch that is to be replaced.
    ///
    /// # Errors
    /// Everything that is wrong with the file, if that has to say.
    pub fn control_of_running(&self) -> Result<PathBuf, ConfigError> {
        let named = match (&self.control, &self.file) {
            (Some(path), _) => Some(path.clone()),
            (None, Some(file)) => Config::builder().file(file).policies_unread().build()?.control,
            (None, None) => None,
        };
        Ok(named.unwrap_or_else(control::default_path))
    }

    /// The ports that `--socket-path` and `--fd` stand for.
    fn conventional_ports(&self) -> Vec<String> {
        let (port, stem) = match (&self.socket_path, self.fd) {
            (Some(path), _) => {
                let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
                (format!("vhost-user:{}", path.display()), stem)
            }
            (None, Some(fd)) => (format!("vhost-user-fd:{fd}"), format!("fd{fd}")),
            (None, None) => return Vec::new(),
        };
        let alone = self.file.is_none() && self.ports.is_empty();
        // An interface name has 15 characters at most, and no odd ones.
        let name = stem.chars().filter(|c| c.is_ascii_alphanumeric() || "-_.".contains(*c)).take(12);
        let tap = format!("tap:rf-{}", name.collect::<String>());
        [Some(port), alone.then_some(tap)].into_iter().flatten().collect()
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(clap::Parser)]
    struct Program {
        #[command(flatten)]
        run: RunArgs,
    }

    fn parse(arguments: &[&str]) -> RunArgs {
        Program::try_parse_from([&["run"], arguments].concat()).unwrap().run
    }

    #[test]
    fn flags_make_a_configuration() {
        let run =
            parse(&["--port", "vhost-user:/tmp/vm0.sock", "--port", "tap:rf0,mtu=9000", "--ready-fd", "3"]);
        assert_eq!(run.ready_fd, Some(3));
        let config = run.config().unwrap();
        let names: Vec<_> = config.ports.iter().map(|port| port.name.as_str()).collect();
        assert_eq!(names, ["vm0", "rf0"]);
        assert_eq!(config.control, Some(control::default_path()));
    }

    #[test]
    fn file_and_flags_add_up() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("rf.toml");
        std::fs::write(&file, "control = '/c.sock'\n[[port]]\nkind = 'tap'\ntap = 'rf0'\n").unwrap();
        let file = file.to_str().unwrap();
        let config = parse(&[file, "--port", "tap:rf1"]).config().unwrap();
        assert_eq!((config.ports.len(), config.control), (2, Some("/c.sock".into())));
        let config = parse(&[file, "--control", "/d.sock"]).config().unwrap();
        assert_eq!(config.control, Some("/d.sock".into()));
        let error = parse(&[file, "--port", "tap:rf0,name=x"]).config().unwrap_err().to_string();
        assert_eq!(error, format!("--port tap:rf0,name=x: port: the tap rf0 is already used by {file}:2"));
    }

    #[test]
    fn a_mistake_in_a_policy_keeps_no_switch_from_being_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("rf.toml");
        std::fs::write(&file, "control = '/c.sock'\n[[port]]\nkind = 'tap'\ntap = 'a'\nfirewall = 'web'\n")
            .unwrap();
        std::fs::create_dir(directory.path().join("policies")).unwrap();
        std::fs::write(directory.path().join("policies/web.policy"), "alow in\n").unwrap();
        let file = file.to_str().unwrap();
        assert!(parse(&[file]).config().is_err());
        assert_eq!(parse(&[file, "--replace"]).control_of_running().unwrap(), PathBuf::from("/c.sock"));
    }

    #[test]
    fn a_management_program_names_one_socket_and_gets_a_tap() {
        let names = |arguments: &[&str]| {
            let config = parse(arguments).config().unwrap();
            config.ports.iter().map(|port| port.name.clone()).collect::<Vec<_>>()
        };
        assert_eq!(
            names(&["--socket-path=/run/vm0-of_many.guests.sock"]),
            ["vm0-of_many.guests", "rf-vm0-of_many."]
        );
        assert_eq!(names(&["--fd=7"]), ["fd7", "rf-fd7"]);
        assert_eq!(names(&["--fd=7", "--port", "tap:x"]), ["x", "fd7"]);
        assert!(Program::try_parse_from(["run", "--fd=7", "--socket-path=/a"]).is_err());
    }

    #[test]
    fn ready_descriptor_is_not_a_port() {
        assert!(parse(&["--port", "tap-fd:5", "--ready-fd", "5"]).config().is_err());
        assert!(Program::try_parse_from(["run", "--ready-fd", "0"]).is_err());
    }

    /// The examples are what people copy.
    #[test]
    fn examples_are_valid() {
        let lines = EXAMPLES.lines().filter_map(|line| line.trim().strip_prefix("ringferry run --"));
        // What is replaced brings its configuration along.
        let lines = lines.filter(|flags| *flags != "replace").map(|flags| format!("--{flags}"));
        let configs: Vec<_> =
            lines.map(|line| parse(&line.split(' ').collect::<Vec<_>>()).config().unwrap()).collect();
        assert_eq!(configs.iter().map(|config| config.ports.len()).collect::<Vec<_>>(), [3, 2, 2, 2]);
    }
}
