//! `ringferry ctl`: asks a running switch through its control socket and prints the answer.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use ringferry_switch::control::{self, Answer, ControlError, Request};
use ringferry_switch::snapshot::Snapshot;

/// Asks a running switch.
#[derive(Clone, Debug, clap::Args)]
pub struct CtlArgs {
    /// Control socket of the switch [default: /run/ringferry/control.sock for root,
    /// $XDG_RUNTIME_DIR/ringferry.sock for others, without that variable /tmp/ringferry-UID.sock].
    #[arg(long, value_name = "PATH", global = true)]
    pub control: Option<PathBuf>,

    /// What to ask.
    #[command(subcommand)]
    pub command: CtlCommand,
}

/// What can be asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::Subcommand)]
pub enum CtlCommand {
    /// Ports, their state, features, queues and counters.
    Show {
        /// Everything, as JSON.
        #[arg(long)]
        json: bool,
    },
    /// The forwarding database: which MAC address is behind which port.
    Fdb {
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// The configuration in force as a TOML file, ports given by flags included.
    Dump,
}

/// Why nothing was printed.
#[derive(Debug, thiserror::Error)]
pub enum CtlError {
    /// The switch did not answer.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// The answer belongs to another question.
    #[error("ringferry answered another question: is it the same version as this program?")]
    Mismatch,
    /// The answer could not be written.
    #[error("cannot write the answer: {0}")]
    Output(#[from] io::Error),
}

/// Runs `ringferry ctl` with output to `out`, usually standard output.
///
/// # Errors
/// No switch answers, or `out` cannot be written. A reader that has seen enough (`| head`) is not an error.
pub fn run(args: &CtlArgs, out: &mut dyn Write) -> Result<(), CtlError> {
    let path = args.control.clone().unwrap_or_else(control::default_path);
    print(&ask(&path, args.command)?, out)
}

fn print(text: &str, out: &mut dyn Write) -> Result<(), CtlError> {
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(()),
    }
}

fn ask(path: &Path, command: CtlCommand) -> Result<String, CtlError> {
    Ok(match command {
        CtlCommand::Show { json: true } => pretty(&snapshot(path)?)?,
        CtlCommand::Show { json: false } => snapshot(path)?.to_text(),
        CtlCommand::Fdb { json: true } => pretty(&snapshot(path)?.fdb)?,
        CtlCommand::Fdb { json: false } => snapshot(path)?.fdb_to_text(),
        CtlCommand::Dump => match control::call(path, &Request::Dump)? {
            Answer::Dump(text) => text,
            Answer::Show(_) => return Err(CtlError::Mismatch),
        },
    })
}

fn snapshot(path: &Path) -> Result<Snapshot, CtlError> {
    match control::call(path, &Request::Show)? {
        Answer::Show(snapshot) => Ok(*snapshot),
        Answer::Dump(_) => Err(CtlError::Mismatch),
    }
}

fn pretty(value: &impl serde::Serialize) -> io::Result<String> {
    Ok(serde_json::to_string_pretty(value)? + "\n")
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    use clap::Parser;
    use ringferry_switch::control::{ControlServer, Response};

    use super::*;

    #[derive(clap::Parser)]
    struct Program {
        #[command(flatten)]
        ctl: CtlArgs,
    }

    /// Runs `ringferry ctl` with these arguments against a switch that answers with a known state.
    fn ctl(arguments: &[&str]) -> Result<String, CtlError> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("control.sock");
        let mut server = ControlServer::bind(&path, 0o600).unwrap();
        let mut arguments = arguments.to_vec();
        arguments.extend(["--control", path.to_str().unwrap()]);
        let args = Program::try_parse_from([&["ctl"], arguments.as_slice()].concat()).unwrap().ctl;
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    server.serve(&mut |request| {
                        Response::Ok(match request {
                            Request::Show => {
                                Answer::Show(Box::new(Snapshot { pid: 42, ..Snapshot::default() }))
                            }
                            Request::Dump => Answer::Dump("[switch]\n".into()),
                        })
                    });
                    std::thread::sleep(Duration::from_millis(1));
                }
            });
            let mut out = Vec::new();
            let result = run(&args, &mut out);
            done.store(true, Ordering::Relaxed);
            result.map(|()| String::from_utf8(out).unwrap())
        })
    }

    #[test]
    fn show_prints_text_or_json() {
        assert!(ctl(&["show"]).unwrap().starts_with("ringferry, process 42, up 0 s"));
        let json: serde_json::Value = serde_json::from_str(&ctl(&["show", "--json"]).unwrap()).unwrap();
        assert_eq!(json["pid"], 42);
    }

    #[test]
    fn fdb_and_dump_print_their_part() {
        assert_eq!(ctl(&["fdb"]).unwrap(), "MAC  PORT  AGE\n");
        let json: serde_json::Value = serde_json::from_str(&ctl(&["fdb", "--json"]).unwrap()).unwrap();
        assert_eq!(json["entries"], serde_json::json!([]));
        assert_eq!(ctl(&["dump"]).unwrap(), "[switch]\n");
    }

    #[test]
    fn absent_switch_is_an_error_with_a_remedy() {
        let args = CtlArgs { control: Some("/nonexistent/c.sock".into()), command: CtlCommand::Dump };
        let error = run(&args, &mut Vec::new()).unwrap_err().to_string();
        assert!(error.contains("start one with `ringferry run`, or say which one with --control"), "{error}");
    }

    #[test]
    fn reader_that_leaves_is_no_error() {
        struct Full(io::ErrorKind);
        impl Write for Full {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(self.0.into())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        assert!(print("x", &mut Full(io::ErrorKind::BrokenPipe)).is_ok());
        assert!(matches!(print("x", &mut Full(io::ErrorKind::StorageFull)), Err(CtlError::Output(_))));
    }
}
