//! Completion in shells: subcommands and options, and what only a running switch knows, the names of its ports.
//!
//! The script of a shell runs the program with [`VARIABLE`] set, which then prints what could follow on the line and ends. So completions are always those
//! of the program that is installed.

use std::collections::HashSet;
use std::env;
use std::path::PathBuf;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use clap::{Arg, Command, CommandFactory};
use clap_complete::env::{Bash, EnvCompleter, Fish, Zsh};
use clap_complete::{ArgValueCandidates, CompleteEnv, CompletionCandidate};
use ringferry_control::{self as control, Answer, Request};
use ringferry_switch::config;

/// Set by the script of a shell, to the shell's name.
const VARIABLE: &str = "RINGFERRY_COMPLETE";
/// How long a switch may take to name its ports: who presses a key waits for it.
const PATIENCE: Duration = Duration::from_secs(1);

/// Answers the shell and ends the process if a shell has started it.
pub fn answer_shell() {
    CompleteEnv::with_factory(completed).var(VARIABLE).complete();
}

/// The scripts of the shells, by their paths below the directory for shared files.
pub fn scripts() -> [(&'static str, Vec<u8>); 3] {
    let shells: [(&str, &dyn EnvCompleter); 3] = [
        ("bash-completion/completions/ringferry", &Bash),
        ("zsh/site-functions/_ringferry", &Zsh),
        ("fish/vendor_completions.d/ringferry.fish", &Fish),
    ];
    shells.map(|(path, shell)| {
        let mut script = Vec::new();
        // Writing to memory does not fail.
        let _ = shell.write_registration(VARIABLE, "ringferry", "ringferry", "ringferry", &mut script);
        (path, script)
    })
}

/// The command line without hidden subcommands, and with candidates for values.
fn completed() -> Command {
    let all = crate::Cli::command();
    let subcommands = all.get_subcommands().filter(|child| !child.is_hide_set()).cloned();
    let root = Command::new("ringferry").version(env!("CARGO_PKG_VERSION")).propagate_version(true);
    with_candidates(root.args(all.get_arguments().cloned()).subcommands(subcommands))
}

fn with_candidates(command: Command) -> Command {
    command.mut_args(with_candidates_of).mut_subcommands(with_candidates)
}

/// Gives an argument the candidates for what its value is said to be.
fn with_candidates_of(arg: Arg) -> Arg {
    let of =
        |arg: Arg, candidates: fn() -> Vec<CompletionCandidate>| arg.add(ArgValueCandidates::new(candidates));
    match arg.get_value_names().and_then(|names| names.first()).map(clap::builder::Str::as_str) {
        Some("PORT" | "PEER" | "FROM" | "TO" | "PORT[/MAC]" | "PORT|MAC|broadcast") => of(arg, ports),
        Some("KEY") => of(arg, || settings("")),
        Some("KEY=VALUE") => of(arg, || settings("=")),
        _ => arg,
    }
}

/// The keys of a port that can change, with what follows each.
fn settings(suffix: &str) -> Vec<CompletionCandidate> {
    let mut known = HashSet::new();
    let keys = config::setting_keys().filter(|(name, _)| known.insert(*name));
    let candidate = |(name, help): (&str, &str)| {
        CompletionCandidate::new(format!("{name}{suffix}")).help(Some(help.replace('`', "").into()))
    };
    keys.map(candidate).collect()
}

/// The ports of the switch that the line is about; none if it does not answer at once, as nothing may be printed into a line that is being written.
fn ports() -> Vec<CompletionCandidate> {
    let control = control_of(env::args_os().filter_map(|word| word.into_string().ok()));
    let (answer, answered) = mpsc::channel();
    thread::spawn(move || {
        // Nobody waits any more for one that comes late.
        let _ = answer.send(control::call(&control, &Request::Show { addresses: Some(0) }));
    });
    match answered.recv_timeout(PATIENCE) {
        Ok(Ok(Answer::Show(snapshot))) => {
            let ports = snapshot.ports.iter();
            ports
                .map(|port| CompletionCandidate::new(&port.name).help(Some(port.peer.clone().into())))
                .collect()
        }
        _ => Vec::new(),
    }
}

/// The control socket that a line names, or the default one.
fn control_of(mut words: impl Iterator<Item = String>) -> PathBuf {
    while let Some(word) = words.next() {
        // A shell may make three words of `--control=PATH`.
        let path = match word.strip_prefix("--control") {
            Some("") => words.next().and_then(|next| if next == "=" { words.next() } else { Some(next) }),
            Some(rest) => rest.strip_prefix('=').map(str::to_owned),
            None => None,
        };
        if let Some(path) = path {
            return path.into();
        }
    }
    control::default_path()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_says_which_switch_is_asked() {
        let control = |line: &str| control_of(line.split(' ').map(str::to_owned));
        assert_eq!(control("ctl --control /a show x"), PathBuf::from("/a"));
        assert_eq!(control("ctl show --control=/a"), PathBuf::from("/a"));
        assert_eq!(control("top --control = /a"), PathBuf::from("/a"));
        assert_eq!(control("top --control"), control::default_path());
        assert_eq!(control("ctl show vm0"), control::default_path());
    }

    #[test]
    fn what_can_change_is_offered_once_with_its_meaning() {
        let keys = settings("=");
        let count = |name: &str| keys.iter().filter(|key| key.get_value() == name).count();
        assert_eq!(["vlan=", "mtu=", "worker=", "mac="].map(count), [1, 1, 1, 1]);
        assert_eq!(count("path="), 0, "that opens another port");
        assert!(keys.iter().all(|key| key.get_help().is_some_and(|help| !help.to_string().contains('`'))));
    }

    #[test]
    fn every_argument_that_names_a_port_has_candidates() {
        fn look(command: &Command, without: &mut Vec<String>) {
            // What `run` and `add` make has no name yet.
            let known = command
                .get_arguments()
                .filter(|arg| arg.get_value_names().is_none_or(|names| !names[0].starts_with("KIND:")));
            for arg in known {
                let id = arg.get_id().as_str();
                let named = ["port", "ports", "peer", "source", "destination", "from"].contains(&id);
                if named && arg.get::<ArgValueCandidates>().is_none() {
                    without.push(format!("{} {id}", command.get_name()));
                }
            }
            command.get_subcommands().for_each(|child| look(child, without));
        }
        let mut without = Vec::new();
        look(&completed(), &mut without);
        assert_eq!(without, [""; 0]);
    }
}
