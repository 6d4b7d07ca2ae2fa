//! Generates docs/configuration.md from the table of keys, and tests that the file in the repository is the
//! same.

use std::fmt::Write as _;

use expect_test::expect_file;

use super::reference::{EXAMPLE, section};
use super::*;

const HEAD: &str = "\
<!-- Made from the table of keys by crates/switch/src/config/page.rs. Change a row there, then:
     UPDATE_EXPECT=1 cargo test -p ringferry-switch configuration_page -->

# Configuration

`ringferry run` takes a TOML file, `--port` flags, or both: the file is the source of truth, and flags add ports to it. A mistake stops
the switch before it opens anything; every mistake is named with its line or flag, its key and what would do. `ringferry ctl dump`
prints what is in force as a file that makes the same switch; with `ringferry ctl set` and `unset` the settings of a port change
while it is open, as far as the column *a change* says so, and, unless `--runtime` is given, in the file, whose comments stay. `ringferry ctl add` and `remove` do the same
with whole ports, and `ringferry ctl reload` (or SIGHUP) carries out what somebody has changed in the file
([ports that come and go](operating.md#ports-that-come-and-go)).

Beside `ringferry.toml` there may be a directory `ringferry.d` of drop-in files: each `*.toml` in it that does not begin with a dot is read
after the main file, in the order of the names. A drop-in file has `[[port]]` and `[[wire]]` tables only, so that a program that manages machines can
write a file for each.

```toml
{example}
```

The same ports as flags:

```sh
ringferry run --port vhost-user:/run/ringferry/vm0.sock,vlan=10,rate_in=1gbit --port tap:rf0,vlan=10
```

In a flag a value has no quotes, the entries of a list have commas between them, and `on`, `off`, `yes` and `no` stand for `true` and
`false`. A path with a comma in it can only be given in a file.

What a change of a key does to a port that is open stands in the last column. *At once*: while packets flow. *With the next connection*: the front end
that is connected has agreed on the old value and keeps it until it disconnects; of a tap, which has no front end, at once. *Opened anew*: `ringferry ctl
set` refuses the key, and a reload closes the port and opens it again, so that its guest has to connect again.

A flag begins with the kind of the port and where it is found:

";

/// Generates the whole page as Markdown.
fn page() -> String {
    let mut out = HEAD.replace("{example}", EXAMPLE);
    let _ = writeln!(out, "| flag begins with | in a file | the port |\n|---|---|---|");
    for (kind, Flag { word, key, place, help }) in PortKind::flags() {
        let _ = writeln!(out, "| `{word}:{place}` | `kind = {kind:?}`, `{key}` | {help} |");
    }
    for (scope, keys) in sections() {
        let ReferenceSection { place, about, keys } = section(scope, keys);
        let (level, more) = match scope {
            Scope::Top => ("## ", ""),
            Scope::Switch | Scope::Port => ("## `", ""),
            Scope::Kind(_) => ("### `", ""),
            Scope::Rules => ("### ", " What they do, with examples: [rules](rules.md)."),
            Scope::Wire => ("## `", " What wires are, with examples: [wires](wires.md)."),
            Scope::Impairments => ("### `", ""),
        };
        let end = if level.ends_with('`') { "`" } else { "" };
        let _ = writeln!(out, "\n{level}{place}{end}\n\n{about}{more}\n");
        let with_changes = matches!(scope, Scope::Port | Scope::Kind(_));
        let (head, line) = if with_changes { (" a change |", "---|") } else { ("", "") };
        let _ = writeln!(
            out,
            "| key | values | without it | meaning | example |{head}\n|---|---|---|---|---|{line}"
        );
        for ReferenceKey { name, values, without, meaning, example, change } in keys {
            let cells = [format!("`{name}`"), values, without, meaning, format!("`{example}`")];
            let change = if with_changes { format!(" {change} |") } else { String::new() };
            let _ = writeln!(out, "| {} |{change}", cells.map(|cell| cell.replace('|', "\\|")).join(" | "));
        }
    }
    out
}

#[test]
fn configuration_page_is_what_the_table_makes() {
    expect_file!["../../../../docs/configuration.md"].assert_eq(&page());
}

/// People copy the example of the page, so it must be valid.
#[test]
fn example_of_the_page_is_valid() {
    let file = Config::builder().toml("page", EXAMPLE).build().unwrap();
    let flags = HEAD.lines().find_map(|line| line.strip_prefix("ringferry run ")).unwrap();
    let flags = flags.split(' ').filter(|word| *word != "--port");
    let flags = flags.fold(Config::builder(), ConfigBuilder::port_flag).build().unwrap();
    assert_eq!(file.ports, flags.ports);
}
