//! `ringferry manuals SHARE`: writes the manual pages and the completions of the three shells, for whoever packs or installs the program.
//!
//! All of it is made from what the program knows of itself: the command line (clap), of which each subcommand has a page, and the table of
//! configuration keys, which is ringferry.toml(5). So the program that is installed writes what fits it, also where it was built for another
//! machine and runs under an emulator, and building needs no script.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use clap::{Arg, ArgAction, Args, Command, CommandFactory};
use clap_mangen::Man;
use clap_mangen::roff::{Inline, Roff, bold, italic, roman};
use ringferry_switch::config::{EXAMPLE, ReferenceKey, reference};

use crate::completion;

/// The name of the collection, in the middle of each page's first line.
const MANUAL: &str = "ringferry";

/// The subcommands that users without rights run; the others are for administrators.
const FOR_USERS: [&str; 4] = ["demo", "guest", "lab", "traffic"];

/// Arguments of `ringferry manuals`.
#[derive(Debug, Args)]
pub struct ManualsArgs {
    /// Where `man/` and the directories of the shells are: /usr/share, /usr/local/share, or those of a package.
    #[arg(value_name = "SHARE")]
    share: PathBuf,
}

/// Why the pages cannot be written.
#[derive(Debug, thiserror::Error)]
#[error("cannot write {}: {error}", path.display())]
pub struct Error {
    path: PathBuf,
    error: io::Error,
}

/// Writes all pages and completions.
///
/// # Errors
/// A file cannot be written; those before it are.
pub fn run(args: &ManualsArgs) -> Result<(), Error> {
    for (name, content) in files() {
        let path = args.share.join(name);
        let written =
            path.parent().map_or(Ok(()), fs::create_dir_all).and_then(|()| fs::write(&path, content));
        written.map_err(|error| Error { path, error })?;
    }
    Ok(())
}

/// Every file, by its path below the directory for shared files, and what is in it.
fn files() -> Vec<(PathBuf, Vec<u8>)> {
    let mut root = crate::Cli::command().disable_help_subcommand(true);
    root.build();
    let mut files = Vec::new();
    pages(&root, section(&root), &mut files);
    files.push((Path::new("man/man5").join("ringferry.toml.5"), configuration().into_bytes()));
    files.extend(completion::scripts().map(|(path, script)| (path.into(), script)));
    files
}

/// The section of the manual that a subcommand of the program belongs to, or the program as a whole.
fn section(command: &Command) -> &'static str {
    if FOR_USERS.contains(&command.get_name()) { "1" } else { "8" }
}

/// Appends the page of a command and those of its subcommands.
fn pages(command: &Command, section: &'static str, files: &mut Vec<(PathBuf, Vec<u8>)>) {
    let man = Man::new(command.clone()).section(section).manual(MANUAL);
    let mut page = Vec::new();
    // Writing to memory does not fail.
    let _ = render(&man, command, section, &mut page);
    files.push((Path::new("man").join(format!("man{section}")).join(man.get_filename()), page));
    for (child, section) in children(command, section) {
        pages(child, section, files);
    }
}

/// The subcommands that have pages, and in which section.
fn children<'a>(
    command: &'a Command,
    own: &'static str,
) -> impl Iterator<Item = (&'a Command, &'static str)> {
    // clap gives a subcommand the words that lead to it.
    let is_root = !command.get_bin_name().unwrap_or_default().contains(' ');
    let shown = command.get_subcommands().filter(|child| !child.is_hide_set());
    shown.map(move |child| (child, if is_root { section(child) } else { own }))
}

fn render(man: &Man, command: &Command, section: &'static str, page: &mut Vec<u8>) -> io::Result<()> {
    man.render_title(page)?;
    // Words are not broken: people search for them.
    page.extend_from_slice(b".nh\n.ad l\n");
    man.render_name_section(page)?;
    let mut roff = Roff::new();
    roff.control("SH", ["SYNOPSIS"]).text(synopsis(command));
    roff.to_writer(page)?;
    man.render_description_section(page)?;
    man.render_options_section(page)?;
    let mut roff = Roff::new();
    if command.has_subcommands() {
        roff.control("SH", ["COMMANDS"]);
        for (child, section) in children(command, section) {
            roff.control("TP", []);
            roff.text(reference_to(&page_name(child), section));
            roff.text([roman(child.get_about().map(ToString::to_string).unwrap_or_default())]);
        }
    }
    if let Some(help) = command.get_after_help() {
        after_help(&help.to_string(), &mut roff);
    }
    roff.control("SH", ["SEE ALSO"]);
    let mut others = vec![("ringferry.toml".to_owned(), "5")];
    let words: Vec<_> = command.get_bin_name().unwrap_or_default().split(' ').collect();
    for length in 1..words.len() {
        let name = words[..length].join("-");
        let of_users = words[..length].get(1).is_some_and(|word| FOR_USERS.contains(word));
        others.push((name, if of_users { "1" } else { "8" }));
    }
    see_also(&others, &mut roff);
    roff.to_writer(page)
}

/// How a command is called, with the names of the values that its options take.
fn synopsis(command: &Command) -> Vec<Inline> {
    let mut line = vec![bold(command.get_bin_name().unwrap_or_else(|| command.get_name()))];
    let shown =
        |arg: &&Arg| !arg.is_hide_set() && !matches!(arg.get_action(), ArgAction::Help | ArgAction::Version);
    let (options, positionals): (Vec<_>, Vec<_>) =
        command.get_arguments().filter(shown).partition(|arg| !arg.is_positional());
    for arg in options.into_iter().chain(positionals) {
        let (open, close) = if arg.is_required_set() { (" ", "") } else { (" [", "]") };
        line.push(roman(open));
        let name = match (arg.get_long(), arg.get_short()) {
            (Some(long), _) => Some(format!("--{long}")),
            (None, Some(short)) => Some(format!("-{short}")),
            (None, None) => None,
        };
        let takes_values = arg.get_action().takes_values();
        let may_lack_value = arg.get_num_args().is_some_and(|number| number.min_values() == 0);
        let names = arg.get_value_names().unwrap_or_default();
        let values = names.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
        match name {
            Some(name) => {
                line.push(bold(name));
                match (takes_values, may_lack_value, arg.is_require_equals_set()) {
                    (false, ..) => {}
                    (true, true, true) => line.extend([roman("[="), italic(values), roman("]")]),
                    (true, true, false) => line.extend([roman(" ["), italic(values), roman("]")]),
                    (true, false, _) => line.extend([roman(" "), italic(values)]),
                }
            }
            None => line.push(italic(values)),
        }
        let is_list = matches!(arg.get_action(), ArgAction::Append | ArgAction::Count)
            || arg.get_num_args().is_some_and(|number| number.max_values() > names.len().max(1));
        if is_list {
            line.push(roman("..."));
        }
        line.push(roman(close));
    }
    if command.has_subcommands() {
        let (open, close) = if command.is_subcommand_required_set() { (" ", "") } else { (" [", "]") };
        line.extend([roman(open), italic("COMMAND"), roman(close)]);
    }
    line
}

/// The name of a command's page, which is its whole name with dashes.
fn page_name(command: &Command) -> String {
    command.get_display_name().unwrap_or_else(|| command.get_name()).to_owned()
}

fn reference_to(name: &str, section: &str) -> Vec<Inline> {
    vec![bold(name), roman(format!("({section})"))]
}

fn see_also(pages: &[(String, &str)], roff: &mut Roff) {
    let mut line = Vec::new();
    for (at, (name, section)) in pages.iter().enumerate() {
        if at > 0 {
            line.push(roman(", "));
        }
        line.extend(reference_to(name, section));
    }
    roff.text(line);
}

/// What stands behind the options in the help: paragraphs, and examples, which are shown as they are typed. What is indented is an example.
fn after_help(help: &str, roff: &mut Roff) {
    let mut heading = "NOTES";
    let mut examples = Vec::new();
    let flush = |examples: &mut Vec<&str>, roff: &mut Roff| {
        if !examples.is_empty() {
            roff.control("PP", []).control("nf", []);
            for line in examples.drain(..) {
                roff.text([roman(line)]);
            }
            roff.control("fi", []);
        }
    };
    if help.starts_with("Examples:") {
        heading = "EXAMPLES";
    }
    roff.control("SH", [heading]);
    let mut is_new = true;
    for line in help.lines() {
        if line.starts_with("  ") {
            examples.push(line);
            continue;
        }
        flush(&mut examples, roff);
        if line == "Examples:" {
            if heading != "EXAMPLES" {
                heading = "EXAMPLES";
                roff.control("SH", [heading]);
            }
            is_new = true;
        } else if line.is_empty() {
            is_new = true;
        } else {
            if std::mem::take(&mut is_new) {
                roff.control("PP", []);
            }
            roff.text([roman(line)]);
        }
    }
    flush(&mut examples, roff);
}

/// What ringferry.toml(5) begins with.
const CONFIGURATION: &str = "\
`ringferry run` takes a TOML file, ports as flags, or both: the file is the source of truth, and flags add ports to it. A mistake stops the switch before \
it opens anything; every mistake is named with its line or flag, its key and what would do. `ringferry run --check` only looks for mistakes.

Beside `ringferry.toml` there may be a directory `ringferry.d` of drop-in files: each `*.toml` in it that does not begin with a dot is read after the main \
file, in the order of the names. A drop-in file has `[[port]]` tables only.

`ringferry ctl dump` prints what is in force as a file that makes the same switch. `ringferry ctl set`, `unset`, `add` and `remove` change the file as \
well, whose comments stay, and `ringferry ctl reload` carries out what somebody has changed in it.

Of keys of a port it is said what a change does while the port is open: it holds at once, it holds with the next connection of a front end, or a reload has the \
port opened anew, so that its guest has to connect again.";

/// The page ringferry.toml(5).
fn configuration() -> String {
    let mut roff = Roff::new();
    let version = concat!("ringferry ", env!("CARGO_PKG_VERSION"));
    roff.control("TH", ["ringferry.toml", "5", "", version, MANUAL]);
    roff.control("nh", []).control("ad", ["l"]);
    roff.control("SH", ["NAME"]).text([roman("ringferry.toml - configuration of a ringferry switch")]);
    roff.control("SH", ["DESCRIPTION"]);
    for paragraph in CONFIGURATION.split("\n\n") {
        roff.control("PP", []).text(code(paragraph));
    }
    roff.control("SH", ["EXAMPLE"]).control("nf", []);
    for line in EXAMPLE.lines() {
        roff.text([roman(line)]);
    }
    roff.control("fi", []);
    for section in reference() {
        roff.control("SH", [section.place.as_str()]);
        roff.text(code(&section.about.replace('\n', " ")));
        section.keys.iter().for_each(|key| describe(key, &mut roff));
    }
    roff.control("SH", ["FILES"]);
    for (path, what) in [
        ("/etc/ringferry/ringferry.toml", "The file of the service."),
        ("/etc/ringferry/ringferry.d/*.toml", "Its drop-in files."),
        ("/run/ringferry/control.sock", "Where root's ringferry ctl asks."),
    ] {
        roff.control("TP", []).text([italic(path)]).text([roman(what)]);
    }
    roff.control("SH", ["SEE ALSO"]);
    see_also(&[("ringferry-run".to_owned(), "8"), ("ringferry-ctl".to_owned(), "8")], &mut roff);
    roff.render()
}

fn describe(key: &ReferenceKey, roff: &mut Roff) {
    let ReferenceKey { name, values, without, meaning, example, change } = key;
    roff.control("TP", []).text([bold(*name)]).text(code(meaning));
    let mut facts = format!("Values: {values}. Without it: {without}. ");
    if !change.is_empty() {
        facts += &format!("A change {change}. ");
    }
    roff.control("br", []).text(code(&facts));
    roff.control("br", []).text(code(&format!("Example: `{example}`")));
}

/// Text in which what stands in backticks is bold.
fn code(text: &str) -> Vec<Inline> {
    let parts = text.split('`').enumerate();
    parts.map(|(at, part)| if at % 2 == 1 { bold(part) } else { roman(part) }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(name: &str) -> String {
        let files = files();
        let found = files.iter().find(|(path, _)| path.as_os_str() == name);
        let known =
            || files.iter().map(|(path, _)| path.display().to_string()).collect::<Vec<_>>().join("\n");
        String::from_utf8(found.unwrap_or_else(|| panic!("no {name} in\n{}", known())).1.clone()).unwrap()
    }

    /// Calls `visit` with each command that users see, and its whole name.
    fn each(command: &Command, name: &str, visit: &mut dyn FnMut(&str, &Command)) {
        visit(name, command);
        for child in
            command.get_subcommands().filter(|child| !child.is_hide_set() && child.get_name() != "help")
        {
            each(child, &format!("{name}-{}", child.get_name()), visit);
        }
    }

    #[test]
    fn each_command_has_a_page_with_all_its_options_and_its_examples() {
        let mut seen = 0;
        each(&crate::Cli::command(), "ringferry", &mut |name, command| {
            let word = name.split('-').nth(1).unwrap_or_default();
            let section = if FOR_USERS.contains(&word) { 1 } else { 8 };
            let page = file(&format!("man/man{section}/{name}.{section}"));
            for option in command.get_arguments().filter_map(Arg::get_long) {
                let escaped = option.replace('-', "\\-");
                assert!(page.contains(&format!("\\-\\-{escaped}")), "{name}: no --{option} in {page}");
            }
            let examples = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            assert_eq!(
                examples.contains("  ringferry "),
                page.contains(".SH EXAMPLES") || page.contains(".nf"),
                "{name}"
            );
            seen += 1;
        });
        assert!(seen > 25, "{seen}");
    }

    #[test]
    fn the_synopsis_has_the_names_of_values() {
        let synopsis = |name: &str| {
            let page = file(&format!("man/man8/{name}.8"));
            let line = page.lines().skip_while(|line| *line != ".SH SYNOPSIS").nth(1).unwrap_or_default();
            ["\\fB", "\\fI", "\\fR", "\\"]
                .iter()
                .fold(line.to_owned(), |line, markup| line.replace(markup, ""))
        };
        let show = synopsis("ringferry-ctl-show");
        assert!(show.starts_with("ringferry ctl show ") && show.ends_with(" [PORT]"), "{show}");
        for option in [
            "[--json]",
            "[--columns NAMES...]",
            "[--window SECONDS]",
            "[--watch [SECONDS]]",
            "[--control PATH]",
        ] {
            assert!(show.contains(&format!(" {option}")), "{option} in {show}");
        }
        let remove = synopsis("ringferry-ctl-remove");
        assert!(remove.contains(" [--drain[=SECONDS]]"), "{remove}");
        let set = synopsis("ringferry-ctl-set");
        assert!(set.ends_with(" PORT KEY=VALUE..."), "{set}");
        assert!(synopsis("ringferry-ctl").ends_with(" COMMAND"), "{}", synopsis("ringferry-ctl"));
    }

    #[test]
    fn other_pages_are_named_with_the_section_they_are_in() {
        let root = file("man/man8/ringferry.8");
        for (name, section) in [("ringferry\\-traffic", 1), ("ringferry\\-run", 8), ("ringferry.toml", 5)] {
            assert!(root.contains(&format!("\\fB{name}\\fR({section})")), "{name} in {root}");
        }
        let set = file("man/man8/ringferry-ctl-set.8");
        assert!(set.contains("\\fBringferry\\fR(8), \\fBringferry\\-ctl\\fR(8)"), "{set}");
    }

    #[test]
    fn page_of_the_configuration_has_every_key() {
        let page = file("man/man5/ringferry.toml.5");
        let keys: Vec<_> = reference().into_iter().flat_map(|section| section.keys).collect();
        for key in &keys {
            assert!(page.contains(&format!(".TP\n\\fB{}\\fR\n", key.name)), "{} in {page}", key.name);
        }
        assert!(keys.len() > 40, "{}", keys.len());
        assert!(!page.contains('`'), "{page}");
    }

    #[test]
    fn example_of_the_configuration_is_one() {
        let config = ringferry_switch::config::Config::builder().toml("example", EXAMPLE).build().unwrap();
        assert_eq!(config.ports.len(), 2);
    }

    #[test]
    fn what_cannot_be_written_is_named() {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("man"), "").unwrap();
        let error = run(&ManualsArgs { share: directory.path().to_owned() }).unwrap_err().to_string();
        assert!(error.contains("/man/man8/ringferry.8: "), "{error}");
        let fresh = directory.path().join("fresh");
        run(&ManualsArgs { share: fresh.clone() }).unwrap();
        assert!(fresh.join("man/man5/ringferry.toml.5").is_file());
    }
}
