//! `ringferry top`: the screens of a switch with traffic, on a terminal that a test reads; and how the terminal is left behind.

use std::os::fd::OwnedFd;

use ringferry_control::snapshot::Snapshot;
use ringferry_rig::guest::{Guest, converse};
use ringferry_rig::process::{PATIENCE, eventually};
use ringferry_rig::switch::{Place, ringferry};
use ringferry_rig::terminal::Terminal;
use rustix::process::Signal;

use crate::lifecycle::bystanders;

/// Starts `ringferry top` on a terminal of 80 columns and 24 rows.
fn top(place: &Place, words: &[&str]) -> Terminal {
    let mut command = ringferry();
    command.arg("top").arg("--control").arg(place.control()).args(words);
    command.env("LC_ALL", "C").env("NO_COLOR", "1");
    Terminal::start(&mut command, 80, 24)
}

/// Two guests that talk to each other until the test has seen enough.
struct Talk {
    guests: (Guest, Guest),
    next: u32,
}

impl Talk {
    /// Goes on talking until the screen is as wanted.
    #[track_caller]
    fn until(&mut self, terminal: &Terminal, what: &str, wanted: impl Fn(&str) -> bool) -> String {
        eventually(&format!("the screen shows {what}"), || {
            converse(&mut self.guests.0, &mut self.guests.1, self.next, 20);
            self.next += 20;
            Some(terminal.screen()).filter(|screen| wanted(screen))
        })
    }
}

/// The words of the row of a port, without the mark of the cursor.
fn row<'s>(screen: &'s str, port: &str) -> Vec<&'s str> {
    let rows =
        screen.lines().map(|line| line.trim_start_matches(['>', ' ']).split_whitespace().collect::<Vec<_>>());
    rows.into_iter().find(|words: &Vec<&str>| words.first() == Some(&port)).unwrap_or_default()
}

#[test]
fn a_screen_shows_traffic_and_follows_keys_sizes_and_the_fate_of_the_switch() {
    let place = Place::new();
    let switch = place.switch(&["a", "b", "idle"]);
    let mut talk = Talk { guests: bystanders(&switch), next: 0 };
    let mut terminal = top(&place, &[]);
    let is_moving = |screen: &str| {
        // Port, state, bits in with their bar, bits out with theirs, packets in.
        let row = row(screen, "a");
        row.len() > 6 && row[1] == "up" && row[2] != "0" && row[6] != "0" && row[6] != "-"
    };
    let screen = talk.until(&terminal, "traffic of a", is_moving);
    assert!(screen.contains("3 ports, 2 up; over 1 s, by traffic"), "{screen}");
    assert_eq!(row(&screen, "idle")[1], "listening", "{screen}");
    assert!(screen.contains("worker 0 ") && screen.contains(" % busy"), "{screen}");
    assert!(!terminal.is_as_before());

    terminal.press("2");
    let screen = terminal.until("queues", |screen| screen.contains("PAIR WORKER"));
    assert_eq!(row(&screen, "a")[1..3], ["0", "0"], "{screen}");
    terminal.press("3");
    talk.until(&terminal, "for whom the worker works", |screen| {
        row(screen, "a").len() > 2 && row(screen, "b").len() > 2 && screen.contains("WORKS FOR")
    });
    terminal.press("5");
    let screen = terminal.until("addresses", |screen| screen.contains("ADDRESS"));
    assert!(screen.contains("52:54:00:00:00:01"), "{screen}");
    terminal.press("?");
    terminal.until("the help", |screen| screen.contains("sort by the next or the last thing"));
    terminal.press("1/IDL\r");
    let screen = terminal.until("one port", |screen| screen.contains("only \"IDL\""));
    assert_eq!((row(&screen, "a").len(), row(&screen, "idle")[1]), (0, "listening"), "{screen}");
    terminal.press("\r");
    let screen = terminal.until("the page of idle", |screen| screen.contains("idle: vhost-user, listening"));
    let screen = if screen.contains("1. ") { screen } else { terminal.until("why", |s| s.contains("1. ")) };
    assert!(screen.contains("at most 0 bit/s"), "{screen}");
    terminal.press("\x1b");
    terminal.until("the table again", |screen| screen.contains("STATE"));

    terminal.resize(40, 8);
    let screen = terminal.until("a smaller screen", |screen| screen.lines().all(|line| line.len() <= 40));
    assert!(screen.lines().count() <= 8, "{screen}");
    terminal.resize(1, 1);
    terminal.resize(120, 30);
    terminal.until("a larger screen", |screen| screen.lines().any(|line| line.len() > 100));

    switch.stop();
    terminal.until("that the switch has gone", |screen| {
        screen.contains("! no ringferry is running") && row(screen, "idle").len() > 1
    });
    let again = place.switch(&["idle", "new"]);
    terminal.press("/\x15\r");
    let screen = terminal.until("the next switch", |screen| row(screen, "new").len() > 1);
    assert!(!screen.contains("no ringferry is running"), "{screen}");
    terminal.press("q");
    assert!(terminal.wait().success());
    eventually("the terminal is as it was", || terminal.is_as_before().then_some(()));
    again.stop();
}

#[test]
fn signals_end_it_and_leave_the_terminal_as_it_was() {
    let place = Place::new();
    let switch = place.switch(&["a"]);
    for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
        let mut terminal = top(&place, &[]);
        terminal.until("a screen", |screen| screen.contains("STATE"));
        terminal.signal(signal);
        assert!(terminal.wait().success(), "{signal:?}");
        eventually("the terminal is as it was", || terminal.is_as_before().then_some(()));
    }
    switch.stop();
}

#[test]
fn a_switch_that_does_not_answer_holds_up_no_key() {
    let place = Place::new();
    let mut switch = place.switch(&["a"]);
    let mut terminal = top(&place, &[]);
    terminal.until("a screen", |screen| screen.contains("STATE"));
    switch.process.signal(Signal::STOP);
    terminal.press("?");
    terminal.until("the help", |screen| screen.contains("sort by the next or the last thing"));
    terminal.press("?");
    terminal.until("the silence", |screen| screen.contains("! the switch has not answered for"));
    switch.process.signal(Signal::CONT);
    terminal.until("an answer", |screen| !screen.contains("has not answered") && screen.contains("STATE"));
    switch.process.signal(Signal::STOP);
    terminal.press("q");
    assert!(terminal.wait().success());
    switch.process.signal(Signal::CONT);
    switch.stop();
}

#[test]
fn a_terminal_that_can_show_nothing_gets_lines() {
    let place = Place::new();
    let switch = place.switch(&["a"]);
    let mut command = ringferry();
    command.arg("top").arg("--control").arg(place.control()).args(["-n", "1"]);
    // Terminal::start says which one it is; the shell says it is another one.
    let mut shell = std::process::Command::new("env");
    shell.arg("TERM=dumb").arg(command.get_program()).args(command.get_args());
    let mut terminal = Terminal::start(&mut shell, 80, 24);
    assert!(terminal.wait().success());
    let screen = terminal.until("a screen", |screen| screen.contains("listening"));
    assert!(row(&screen, "a").len() > 2, "{screen}");
    assert!(!terminal.written().contains(&0x1b), "{screen}");

    // Without a terminal it says what to do; and a reader that has seen enough ends it.
    let mut command = ringferry();
    command.arg("top").arg("--control").arg(place.control()).stdin(std::process::Stdio::null());
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("--batch"), "{said}");
    let (reader, writer) = std::io::pipe().unwrap();
    let mut command = ringferry();
    command.arg("top").arg("--control").arg(place.control()).arg("--json").stdout(OwnedFd::from(writer));
    let mut process = command.spawn().unwrap();
    drop(command);
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(reader));
    let snapshots: Vec<Snapshot> =
        lines.by_ref().take(2).map(|line| serde_json::from_str(&line.unwrap()).unwrap()).collect();
    assert!(snapshots[0].clock_nanoseconds < snapshots[1].clock_nanoseconds);
    switch.stop();
    let gone = eventually("a line says that the switch has gone", || {
        let line: serde_json::Value = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
        line.get("kind").cloned()
    });
    assert_eq!(gone, "not-running");
    drop(lines);
    let deadline = std::time::Instant::now() + PATIENCE;
    let status = loop {
        if let Some(status) = process.try_wait().unwrap() {
            break status;
        }
        assert!(std::time::Instant::now() < deadline, "nobody reads it any more");
        std::thread::sleep(std::time::Duration::from_millis(10));
    };
    assert!(status.success());
}
