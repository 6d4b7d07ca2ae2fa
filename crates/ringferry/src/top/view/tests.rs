//! Screens as they look: screens/ has one file for each, at 80 columns and 24 rows. `UPDATE_EXPECT=1 cargo test -p ringferry top::view` writes them.

use std::path::Path;

use ratatui_core::backend::TestBackend;
use ratatui_core::buffer::Cell;
use ratatui_core::style::Color;
use ratatui_core::terminal::Terminal;
use ringferry_control::snapshot::Snapshot;

use super::super::keys::Key;
use super::super::tests::{busy, diagnosis, model, port, switch};
use super::*;

const ASCII: Look = Look { colour: false, unicode: false };
const BLOCKS: Look = Look { colour: true, unicode: true };

/// Draws on a terminal of this size, and returns what it shows.
fn drawn(model: &mut Model, look: Look, width: u16, height: u16) -> Buffer {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| screen(model, look, frame.area(), frame.buffer_mut())).unwrap();
    terminal.backend().buffer().clone()
}

/// The lines of a screen, without spaces at their ends.
fn lines(buffer: &Buffer) -> Vec<String> {
    let rows = buffer.content().chunks(buffer.area().width.into());
    let line = |row: &[Cell]| row.iter().map(Cell::symbol).collect::<String>();
    rows.map(|row| line(row).trim_end().to_owned()).collect()
}

#[track_caller]
fn looks_like(name: &str, model: &mut Model, look: Look) {
    let shown = lines(&drawn(model, look, 80, 24)).join("\n") + "\n";
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/top/screens").join(name);
    if std::env::var_os("UPDATE_EXPECT").is_some() {
        std::fs::write(&path, &shown).unwrap();
    }
    let expected = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(shown == expected, "{name} is another one:\n{shown}");
}

fn showing(snapshot: Snapshot, keys: &[Key]) -> Model {
    let mut model = model();
    for _ in 0..3 {
        model.update(snapshot.clone(), Some(Ok(diagnosis())));
    }
    model.fit(snapshot.ports.len(), 10);
    for key in keys {
        model.press(*key);
    }
    model
}

#[test]
fn each_view_looks_as_it_should() {
    for (key, name) in
        [('1', "ports"), ('2', "queues"), ('3', "workers"), ('4', "drops"), ('5', "fdb"), ('?', "help")]
    {
        looks_like(&format!("{name}.txt"), &mut showing(busy(), &[Key::Char(key)]), ASCII);
    }
    looks_like("ports-utf8.txt", &mut showing(busy(), &[]), BLOCKS);
}

#[test]
fn the_page_of_a_port_looks_as_it_should() {
    let mut model = showing(busy(), &[Key::Enter]);
    for rate in [2.0e9, 5.0e9, 9.0e9, 1.0e9] {
        let mut snapshot = busy();
        snapshot.ports[0].rates[0].counters.insert("tx_bytes".to_owned(), rate / 8.0);
        model.update(snapshot, Some(Ok(diagnosis())));
    }
    looks_like("port.txt", &mut model, ASCII);
    looks_like("port-utf8.txt", &mut model, BLOCKS);
    model.update(switch(vec![]), None);
    let text = lines(&drawn(&mut model, ASCII, 80, 24)).join("\n");
    assert!(text.contains("There is no port \"vm0\". Escape leads back"), "{text}");
}

#[test]
fn a_switch_that_has_gone_is_said_to_be_gone() {
    let mut model = showing(busy(), &[]);
    model.fail("no ringferry is running with control socket \"/run/ringferry/control.sock\": start one with `ringferry run`".to_owned());
    looks_like("gone.txt", &mut model, ASCII);
    let text = text(&model, ASCII, 80);
    assert!(text.contains("! no ringferry is running"), "{text}");
}

#[test]
fn text_is_the_screen_however_long() {
    let ports: Vec<_> =
        (0..500).map(|number| port(&format!("vm{number}"), 1e6 - f64::from(number), 0.0)).collect();
    let mut model = showing(switch(ports), &[]);
    let text = text(&model, ASCII, 80);
    let screen = lines(&drawn(&mut model, ASCII, 80, 24));
    let shown: Vec<&str> = text.lines().collect();
    assert_eq!(shown.len(), 503);
    for (number, line) in screen[..23].iter().enumerate() {
        assert_eq!(line.replacen('>', " ", 1).trim_end(), shown[number], "{number}");
    }
    assert!(shown[502].starts_with(" vm499 "));
}

#[test]
fn no_size_is_too_small_and_no_name_too_bad() {
    let hostile = "\x1b[2J\x1b]0;x\x07\n\r\u{202e}虚拟\u{200b}".repeat(20);
    let mut snapshot = busy();
    let mut bad = port(&hostile, f64::NAN, -1.0);
    bad.peer.clone_from(&hostile);
    bad.fault = Some(hostile.clone());
    bad.drops = [(hostile.clone(), 7)].into();
    bad.rates[0].drops = [(hostile.clone(), f64::INFINITY)].into();
    snapshot.ports.push(bad);
    snapshot.fdb.entries[0].port.clone_from(&hostile);
    snapshot.workers[0].load[0].ports = [(hostile.clone(), 1e300)].into();
    snapshot.workers[0].load[0].busy_percent = f64::NAN;
    let mut why = diagnosis();
    why.port.clone_from(&hostile);
    why.findings[0].text.clone_from(&hostile);
    let all = ['1', '2', '3', '4', '5', '?'].map(Key::Char);
    for first in all {
        let mut model = showing(snapshot.clone(), &[first, Key::End, Key::Enter]);
        model.update(snapshot.clone(), Some(Ok(why.clone())));
        for trouble in [false, true] {
            if trouble {
                model.fail(hostile.clone());
            }
            for look in [ASCII, BLOCKS] {
                for (width, height) in [(1, 1), (2, 3), (5, 5), (17, 2), (80, 24), (300, 100), (1000, 1)] {
                    let buffer = drawn(&mut model, look, width, height);
                    let seen = buffer.content().iter().flat_map(|cell| cell.symbol().chars());
                    let bad = seen.filter(|c| c.is_control() || matches!(c, '\u{202e}' | '\u{200b}')).count();
                    assert_eq!(bad, 0, "{first:?} {width} x {height}");
                    model.press(Key::Down);
                }
                let text = text(&model, look, 80);
                assert!(!text.chars().any(|c| c.is_control() && c != '\n'), "{text:?}");
            }
        }
    }
}

#[test]
fn without_colours_nothing_is_lost() {
    let plain = drawn(&mut showing(busy(), &[]), Look { colour: false, ..BLOCKS }, 80, 24);
    let coloured = drawn(&mut showing(busy(), &[]), BLOCKS, 80, 24);
    assert_eq!(lines(&plain), lines(&coloured));
    assert!(plain.content().iter().all(|cell| (cell.fg, cell.bg) == (Color::Reset, Color::Reset)));
    assert!(coloured.content().iter().any(|cell| cell.fg == Color::Red));
}
