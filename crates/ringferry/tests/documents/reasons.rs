//! Every reason to drop a packet has the row in docs/operating.md that `ctl show --reasons` prints, every state of a port, has a row in docs/operating.md, and no row is about something that does
//! not exist.

use std::collections::BTreeSet;

use ringferry_control::DropReason;
use ringferry_control::snapshot::PortState;

/// The names in the first column of the first table below a heading. A cell may have several.
fn rows(page: &str, heading: &str) -> BTreeSet<String> {
    let section =
        page.split_once(&format!("\n{heading}\n")).unwrap_or_else(|| panic!("no section {heading:?}")).1;
    let table =
        section.lines().skip_while(|line| !line.starts_with('|')).take_while(|line| line.starts_with('|'));
    // Between backticks is every second piece.
    let cells = table.skip(2).map(|row| row.split('|').nth(1).unwrap().split('`').skip(1).step_by(2));
    cells.flatten().map(str::to_owned).collect()
}

fn names<'a>(all: impl IntoIterator<Item = &'a str>) -> BTreeSet<String> {
    all.into_iter().map(str::to_owned).collect()
}

/// A cell without the targets of its links.
fn without_links(cell: &str) -> String {
    let mut text = String::new();
    let mut rest = cell;
    while let Some((before, link)) = rest.split_once('[') {
        let (words, after) = link.split_once("](").unwrap_or_else(|| panic!("no link in {cell:?}"));
        text += before;
        text += words;
        rest = after.split_once(')').unwrap_or_else(|| panic!("an open link in {cell:?}")).1;
    }
    text + rest
}

#[test]
fn every_drop_reason_has_the_row_that_ctl_prints() {
    let page = super::read("docs/operating.md");
    assert_eq!(rows(&page, "## Drop reasons"), names(DropReason::ALL.map(DropReason::name)));
    for reason in DropReason::ALL {
        let begins = format!("| `{}` |", reason.name());
        let row = page.lines().find(|line| line.starts_with(&begins)).unwrap();
        let (at, meaning, remedy) = (reason.counted_at().name(), reason.meaning(), reason.remedy());
        assert_eq!(without_links(row), format!("{begins} {at} | {meaning} | {remedy} |"));
    }
}

#[test]
fn every_state_of_a_port_has_a_row() {
    use PortState::{AdminDown, Broken, Connecting, Down, Listening, NoMemory, Up};
    // A new state makes this match incomplete: add it here and to the page.
    let all = [Up, Listening, Connecting, Down, NoMemory, Broken, AdminDown].map(|state| match state {
        Up | Listening | Connecting | Down | NoMemory | Broken | AdminDown => state.name(),
    });
    assert_eq!(rows(&super::read("docs/operating.md"), "### States"), names(all));
}

#[test]
fn rows_are_read_from_the_section_s_own_table() {
    let page = "# T\n\n## A\n\ntext\n\n| n | m |\n|---|---|\n| `a`, `b` | `c` |\n| `d` | |\n\n## B\n\n| n |\n|---|\n| `e` |\n";
    assert_eq!(rows(page, "## A"), names(["a", "b", "d"]));
    assert_eq!(rows(page, "## B"), names(["e"]));
}
