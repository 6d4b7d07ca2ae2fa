//! Checks that the program understands what a page tells the reader to type: every `ringferry ...` in a code block is given to it with
//! `--help` behind, so that an option, a subcommand or a value that does not exist is an error. Ports and rules, which only a start would
//! look at, are given to the configuration's own parser, and so are blocks of TOML. Blocks of `text` are pictures and what programs print.

use std::process::Command;

use ringferry_rig::process::may;
use ringferry_switch::config::{Config, ConfigError};

use super::markdown::{Block, Page};

/// Takes the commands of a block apart: lines that end in a backslash are joined, pipes and lists are split.
fn commands(block: &Block) -> Vec<(usize, Vec<String>)> {
    let mut found = Vec::new();
    let (mut joined, mut begin) = (String::new(), 0);
    for (at, line) in block.lines.iter().enumerate() {
        if joined.is_empty() {
            begin = block.first_line + at;
        }
        match line.trim_end().strip_suffix('\\') {
            Some(more) => joined += more,
            None => {
                joined += line;
                // What cannot be split is the output of a command, with an apostrophe in it say.
                let words = shlex::split(&joined).unwrap_or_default();
                let lists = words
                    .split(|word| matches!(word.as_str(), "&&" | "||" | "|" | ";" | "&" | "$" | "(" | ")"));
                found.extend(lists.filter(|list| !list.is_empty()).map(|list| (begin, list.to_vec())));
                joined.clear();
            }
        }
    }
    found
}

/// The arguments of `ringferry` in a command, without what the command is run by and where its output goes.
fn arguments(command: &[String]) -> Option<Vec<String>> {
    let mut words = command.iter().map(String::as_str).peekable();
    loop {
        match words.next()? {
            "sudo" | "nice" | "time" | "exec" => {}
            "ip" if words.peek() == Some(&"netns") => {
                // ip netns exec NAME
                words.by_ref().nth(2)?;
            }
            "nsenter" | "unshare" => while words.next_if(|word| word.starts_with('-')).is_some() {},
            "cargo" if words.peek() == Some(&"run") => {
                words.by_ref().find(|word| *word == "--")?;
                break;
            }
            word if word == "ringferry" || word.ends_with("/ringferry") => break,
            word if word.contains('=') && !word.starts_with('-') => {}
            _ => return None,
        }
    }
    let rest = words
        .take_while(|word| !word.contains("...") && !word.starts_with(['>', '<']) && !word.starts_with("2>"));
    Some(rest.map(str::to_owned).collect())
}

/// Values of an option that may be given several times.
fn values<'a>(arguments: &'a [String], option: &str) -> Vec<&'a str> {
    let with_next = arguments.iter().zip(arguments.iter().skip(1));
    with_next.filter(|(word, _)| *word == option).map(|(_, value)| value.as_str()).collect()
}

/// Returns true if there is a program that can look at a command. `ringferry lab` is another one, which `cargo test --workspace` builds beside
/// this one and `cargo test -p ringferry` does not.
fn answered(arguments: &[String]) -> bool {
    let lab = std::path::Path::new(env!("CARGO_BIN_EXE_ringferry")).with_file_name("ringferry-lab");
    may("needs ringferry-lab: cargo build -p ringferry-lab", arguments[0] != "lab" || lab.is_file())
}

/// Says what is wrong with a command of ours.
fn wrong(arguments: &[String]) -> Result<(), String> {
    let output =
        Command::new(env!("CARGO_BIN_EXE_ringferry")).args(arguments).arg("--help").output().unwrap();
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).lines().next().unwrap_or("it fails").to_owned());
    }
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let ports: Vec<String> = match words.as_slice() {
        ["run", ..] => values(arguments, "--port").into_iter().map(str::to_owned).collect(),
        // Settings are the same behind a --port flag; those that are taken away have no value to look at.
        ["ctl", "set", _, settings @ ..] => {
            let settings: Vec<_> = settings.iter().copied().filter(|word| !word.starts_with("--")).collect();
            let of_some_kind = ["tap:rf0", "vhost-user:/a"].map(|port| {
                let builder = Config::builder().workers(16);
                builder.port_flag(&format!("{port},{}", settings.join(","))).build().map(drop)
            });
            let [of_tap, of_guest] = of_some_kind;
            return of_tap.or(of_guest).map_err(|error| error.to_string());
        }
        _ => return Ok(()),
    };
    if ports.is_empty() {
        return Ok(());
    }
    let workers = values(arguments, "--workers").first().map_or(Ok(1), |number| number.parse());
    let builder = Config::builder().workers(workers.map_err(|error| format!("--workers: {error}"))?);
    let builder = ports.iter().fold(builder, |builder, port| builder.port_flag(port));
    builder.build().map(drop).map_err(|error| error.to_string())
}

/// Reads a configuration, with the policy `web` and the file of a set that it may name.
fn configuration(text: &str, policy: &str) -> Result<Config, ConfigError> {
    let directory = tempfile::tempdir().unwrap();
    let (file, policies) = (directory.path().join("rf.toml"), directory.path().join("policies"));
    std::fs::create_dir(&policies).unwrap();
    std::fs::write(&file, text).unwrap();
    std::fs::write(policies.join("web.policy"), policy).unwrap();
    std::fs::write(policies.join("blocked.txt"), "198.51.100.0/24\n").unwrap();
    Config::from_file(&file)
}

/// Lists what is wrong with the code blocks of a page.
fn mistakes(path: &str, page: &Page) -> (usize, Vec<String>) {
    let (mut checked, mut found) = (0, Vec::new());
    for block in &page.blocks {
        let text = block.lines.join("\n");
        let read = match block.language.as_str() {
            "toml" => Some(configuration(&text, "")),
            "policy" => Some(configuration("[[port]]\nkind = 'tap'\ntap = 'a'\nfirewall = 'web'\n", &text)),
            _ => None,
        };
        checked += usize::from(read.is_some());
        if let Some(Err(error)) = read {
            found.push(format!("{path}:{}: {error}", block.first_line));
        }
        for (line, command) in commands(block).into_iter().filter(|_| block.language != "text") {
            let Some(arguments) = arguments(&command).filter(|arguments| !arguments.is_empty()) else {
                continue;
            };
            checked += 1;
            if !answered(&arguments) {
                continue;
            }
            if let Err(error) = wrong(&arguments) {
                found.push(format!("{path}:{line}: ringferry {}: {error}", arguments.join(" ")));
            }
        }
    }
    (checked, found)
}

#[test]
fn commands_of_all_pages_are_understood() {
    let (mut checked, mut found) = (0, Vec::new());
    for path in super::pages() {
        let (more, wrong) = mistakes(&path, &Page::parse(&super::read(&path)));
        checked += more;
        found.extend(wrong);
    }
    assert!(found.is_empty(), "commands that the program does not understand:\n  {}", found.join("\n  "));
    assert!(checked > 50, "only {checked} commands were found: are blocks still recognised?");
}

#[test]
fn wrong_commands_are_found() {
    let block = |lines: &str| {
        let page = Page::parse(&format!("```sh\n{lines}\n```\n"));
        mistakes("p.md", &page)
    };
    let good = "$ sudo ip netns exec b ringferry guest --socket /a \\\n  --tap eth0 && ringferry ctl set vm0 vlan=10 # a rule\n\
                cargo run --release -- demo\nsudo install target/release/ringferry /usr/bin/\nringferry: it's output\n\
                RUST_LOG=debug ringferry run --port tap:rf0,trunk=10,20-29 > log";
    assert_eq!(block(good), (4, Vec::new()));
    for (bad, why) in [
        ("ringferry guest --sockets /a", "p.md:2: ringferry guest --sockets /a: error: unexpected argument"),
        ("true && ringferry shout", "p.md:2: ringferry shout: error: unrecognized subcommand"),
        ("ringferry run --workers many", "invalid value 'many' for '--workers"),
        ("ringferry run --port tap:rf0,colour=red", "colour"),
        ("ringferry ctl set vm0 vlan=5000", "vlan"),
    ] {
        let (_, found) = block(bad);
        assert!(found.len() == 1 && found[0].contains(why), "{bad}: {found:?}");
    }
    let (_, found) =
        mistakes("p.md", &Page::parse("```toml\n[[port]]\nkind = \"tap\"\ntaps = \"rf0\"\n```\n"));
    assert!(found.len() == 1 && found[0].contains("taps"), "{found:?}");
    let (_, found) = mistakes("p.md", &Page::parse("```policy\nallow up\n```\n"));
    assert!(found.len() == 1 && found[0].contains("\"up\" is no direction"), "{found:?}");
}
