//! `ringferry capture`: what guests say to each other, as Wireshark's tshark reads it, and what a capture cannot do to a switch.

use std::fs::File;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use ringferry_control::snapshot::PortState;
use ringferry_packet::ether::Mac;
use ringferry_packet::vnet::GSO_TCPV4;
use ringferry_rig::frames::{frame, mac, pattern, tcp};
use ringferry_rig::guest::{Options, acquaint, converse};
use ringferry_rig::process::{Process, eventually, may};
use ringferry_rig::schema::assert_described;
use ringferry_rig::switch::{Place, Switch, ringferry};
use ringferry_sys::process::{Spawn, is_root};
use rustix::process::Signal;

use crate::lifecycle::bystanders;
use crate::reload_faults::Disk;
use crate::replace::replaced;

/// Whether tshark is there, or a test may be skipped.
fn may_read() -> bool {
    let found = Command::new("tshark").arg("--version").output().is_ok();
    may("tshark is not installed (apt install tshark)", found)
}

/// Whether tcpdump is there, which compiles filters, or a test may be skipped.
fn may_filter() -> bool {
    let found = Command::new("tcpdump").arg("--version").output().is_ok();
    may("tcpdump is not installed (apt install tcpdump)", found)
}

/// The command `ringferry capture` with these words.
fn command(place: &Place, words: &[&str]) -> Command {
    let mut command = ringferry();
    command.arg("capture").arg("--control").arg(place.control()).args(words);
    command
}

/// Starts a capture to a file. When this returns, the switch captures.
fn start(place: &Place, switch: &Switch<'_>, file: &Path, words: &[&str]) -> Process {
    let before = switch.process.logged("a capture begins");
    let mut command = command(place, words);
    command.arg("--json").arg("-w").arg(file);
    let process = Process::start(&mut command, Spawn::default());
    switch.process.until_logged_times("a capture begins", before + 1);
    process
}

/// Waits for the end of a capture, and returns what it says of itself.
#[track_caller]
fn summary(mut process: Process) -> serde_json::Value {
    let (status, output) = process.wait();
    assert!(status.success(), "{status}: {:#?}", process.log());
    serde_json::from_str(&output).unwrap()
}

#[track_caller]
fn stop(mut process: Process) -> serde_json::Value {
    process.signal(Signal::INT);
    summary(process)
}

/// Waits until a frame is in a file.
#[track_caller]
fn until_written(file: &Path, frame: &[u8]) {
    // The client makes the file after the switch has said that a capture begins.
    let bytes = || std::fs::read(file).unwrap_or_default();
    let has = || bytes().windows(frame.len()).any(|window| window == frame);
    eventually("the frame is written", || has().then_some(()));
}

/// Reads a file with tshark: the fields of each packet.
#[track_caller]
fn read(file: &Path, fields: &[&str]) -> Vec<Vec<String>> {
    let mut tshark = Command::new("tshark");
    tshark.arg("-nr").arg(file).args(["-T", "fields", "-E", "separator=|", "-E", "aggregator=;"]);
    for field in fields {
        tshark.args(["-e", field]);
    }
    let output = tshark.stderr(Stdio::piped()).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    text.lines().map(|line| line.split('|').map(str::to_owned).collect()).collect()
}

#[test]
fn tshark_reads_what_two_guests_say_to_each_other() {
    let place = Place::new();
    let switch = place.switch(&["a", "b"]);
    let mut a = switch.plug("a", 1, Options::default());
    let mut b = switch.plug("b", 2, Options::default());
    acquaint(&mut [&mut a, &mut b]);
    let file = place.path().join("all.pcapng");
    let capture = start(&place, &switch, &file, &["a,b", "--count", "4"]);
    let sent = frame(b.mac, a.mac, 100, 1);
    a.send(&sent);
    assert_eq!(b.receive_plain(), sent);
    let (header, segmented) = tcp(a.mac, b.mac, false, &pattern(1, 5000), 1000);
    b.put(&header, &segmented);
    b.flush();
    let received = a.receive();
    assert_eq!((received.header.gso_type, received.frame.len()), (GSO_TCPV4, segmented.len()));
    let summary = summary(capture);
    assert_eq!((&summary["captured"], &summary["lost"]), (&4.into(), &0.into()));
    assert_eq!(
        (&summary["interfaces"][0]["name"], &summary["interfaces"][1]["captured"]),
        (&"a".into(), &2.into())
    );
    if may_read() {
        let fields = [
            "frame.interface_name",
            "frame.packet_flags_direction",
            "frame.interface_queue",
            "frame.len",
            "frame.comment",
        ];
        let found = read(&file, &fields);
        let len = segmented.len().to_string();
        // Directions are numbers, in hexadecimal in some versions.
        let seen: Vec<_> = found
            .iter()
            .map(|line| {
                (&*line[0], line[1].trim_start_matches("0x").trim_start_matches('0'), &*line[2], &*line[3])
            })
            .collect();
        assert_eq!(
            seen,
            [("a", "1", "0", "100"), ("b", "2", "0", "100"), ("b", "1", "0", &len), ("a", "2", "0", &len)]
        );
        let comment = "virtio-net header: csum=partial start=34 offset=16 gso=tcpv4 size=1000 hdr_len=54";
        assert_eq!((&*found[0][4], &*found[2][4]), ("", comment));
        // Nanoseconds of today, whole packets, and their bytes.
        let times =
            read(&file, &["frame.time_epoch", "eth.src", "frame.cap_len", "frame.packet_flags_crc_error"]);
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
        assert!(times.iter().all(|line| line[0].split('.').next().unwrap().parse::<u64>().unwrap().abs_diff(now) < 86_400));
        assert_eq!((&*times[0][1], &*times[2][2]), (&*a.mac.to_string(), &*len));
    }
    switch.stop();
}

#[test]
fn a_filter_is_compiled_by_libpcap_and_obeyed_by_the_workers() {
    if !may_filter() {
        return;
    }
    let place = Place::new();
    let switch = place.switch(&["a", "b"]);
    let mut a = switch.plug("a", 1, Options::default());
    let mut b = switch.plug("b", 2, Options::default());
    acquaint(&mut [&mut a, &mut b]);
    let file = place.path().join("tcp.pcapng");
    // The port of `tcp`.
    let expression = "tcp src port 4660";
    let capture =
        start(&place, &switch, &file, &["a", "--filter", expression, "--direction", "in", "--snaplen", "60"]);
    converse(&mut a, &mut b, 10, 30);
    let (header, segmented) = tcp(b.mac, a.mac, true, &pattern(1, 300), 0);
    a.put(&header, &segmented);
    a.flush();
    b.receive();
    until_written(&file, &segmented[..60]);
    let summary = stop(capture);
    assert_eq!((&summary["captured"], &summary["lost"]), (&1.into(), &0.into()));
    assert_eq!(summary["interfaces"][0]["seen"], 31);
    if may_read() {
        let found = read(&file, &["frame.len", "frame.cap_len", "tcp.srcport"]);
        assert_eq!(found, [[segmented.len().to_string(), "60".to_owned(), "4660".to_owned()]]);
    }
    switch.stop();
}

#[test]
fn what_is_dropped_is_captured_with_its_reason() {
    let place = Place::new();
    let switch = place.switch(&["a", "b,vlan=10", "c"]);
    let mut a = switch.plug("a", 1, Options::default());
    let c = switch.plug("c", 3, Options { posts: false, ..Options::default() });
    let file = place.path().join("drops.pcapng");
    let capture = start(&place, &switch, &file, &["--drops", "--count", "3"]);
    // Nobody knows c, so it is flooded, and c has no buffers.
    a.send(&frame(c.mac, a.mac, 200, 1));
    // For a protocol between neighbours; and from all zeros.
    a.send(&frame(Mac([1, 0x80, 0xc2, 0, 0, 0]), a.mac, 61, 2));
    a.send(&frame(Mac::BROADCAST, Mac([0; 6]), 62, 3));
    let summary = summary(capture);
    assert_eq!((&summary["captured"], &summary["lost"]), (&3.into(), &0.into()));
    if may_read() {
        let found = read(&file, &["frame.interface_name", "frame.len", "frame.comment"]);
        let mut seen: Vec<_> =
            found.iter().map(|line| (&*line[0], &*line[1], line[2].split(':').nth(1).unwrap())).collect();
        // Of a burst, what goes nowhere comes before what does not arrive.
        seen.sort_unstable();
        let expected =
            [("a", "61", " reserved"), ("a", "62", " reserved"), ("c", "200", " no-receive-buffers")];
        assert_eq!(seen, expected);
    }
    switch.stop();
}

#[test]
fn a_port_that_is_added_again_is_captured_again() {
    let place = Place::new();
    let switch = place.switch(&["a", "b"]);
    let file = place.path().join("again.pcapng");
    let capture = start(&place, &switch, &file, &["a", "--direction", "in", "--count", "2"]);
    let mut a = switch.plug("a", 1, Options::default());
    let sent = frame(Mac::BROADCAST, a.mac, 60, 1);
    a.send(&sent);
    until_written(&file, &sent);
    drop(a);
    place.ctl(&["remove", "a"]);
    place.ctl(&["add", &format!("vhost-user:{}", place.socket("a").display())]);
    let mut a = switch.plug("a", 1, Options::default());
    // Its taps come with a tick.
    let mut capture = Some(capture);
    eventually("it is captured again", || {
        a.send(&frame(Mac::BROADCAST, a.mac, 60, 2));
        (!capture.as_mut()?.is_running()).then_some(())
    });
    assert_eq!(summary(capture.take().unwrap())["captured"], 2);
    switch.stop();
}

#[test]
fn a_reader_that_is_stopped_holds_nobody_up() {
    let place = Place::new();
    let switch = place.switch(&["a", "b"]);
    let mut a = switch.plug("a", 1, Options::default());
    let mut b = switch.plug("b", 2, Options::default());
    acquaint(&mut [&mut a, &mut b]);
    let file = place.path().join("stopped.pcapng");
    let mut capture = start(&place, &switch, &file, &["a", "--direction", "in", "--buffer", "64"]);
    // Whoever looks sees that it is captured, and by whom.
    let pid = capture.pid();
    for (words, said) in [
        (&["show"][..], format!("capture 0: a, captured by process {pid} for ")),
        (&["show", "a"], format!("`kill {pid}` ends it")),
        (&["why", "a"], format!("What passes a is captured by process {pid} for ")),
    ] {
        let text = place.ctl(words);
        assert!(text.contains(&said), "{said}: {text}");
    }
    assert!(!place.ctl(&["show", "b"]).contains("captured by"));
    switch.process.until_logged(&format!("pid={pid}"));
    capture.signal(Signal::STOP);
    // More than fits its ring, and each frame arrives.
    for number in 0..300 {
        let sent = frame(b.mac, a.mac, 1500, number);
        a.send(&sent);
        assert_eq!(b.receive_plain(), sent);
    }
    switch.assert_no_drops();
    capture.signal(Signal::CONT);
    let summary = stop(capture);
    let count = |name: &str| summary["interfaces"][0][name].as_u64().unwrap();
    assert_eq!((count("seen"), count("captured") + count("lost")), (300, 300));
    assert!(count("captured") >= 40 && count("lost") >= 200, "{summary}");
    switch.stop();
}

#[test]
fn two_hundred_captures_at_once_are_refused_with_a_clear_line() {
    let place = Place::new();
    let switch = place.switch(&["a", "b"]);
    let mut a = switch.plug("a", 1, Options::default());
    let mut b = switch.plug("b", 2, Options::default());
    acquaint(&mut [&mut a, &mut b]);
    let mut running: Vec<Process> = Vec::new();
    for number in 0..200 {
        let mut command = command(&place, &["a", "-w", "/dev/null", "--json"]);
        let mut capture = Process::start(&mut command, Spawn::default());
        if number < 16 {
            switch.process.until_logged_times("a capture begins", number + 1);
            running.push(capture);
        } else {
            let (status, told) = capture.wait();
            let told: serde_json::Value = serde_json::from_str(&told).unwrap();
            assert_eq!((status.code(), told["kind"].as_str()), (Some(1), Some("refused")));
            let said = "16 captures run, and there may be no more at a time: end one of them first";
            assert_eq!(told["error"], said);
        }
    }
    converse(&mut a, &mut b, 1, 30);
    for capture in running {
        assert_eq!(stop(capture)["lost"], 0);
    }
    // What they had is free again, also of one that was killed.
    let file = place.path().join("more.pcapng");
    for round in 1..4 {
        let mut capture = start(&place, &switch, &file, &["b", "--buffer", "1024"]);
        capture.signal(Signal::KILL);
        capture.wait();
        switch.process.until_logged_times("a capture ends", 16 + round);
    }
    eventually("nothing is left", || (switch.process.mappings("ringferry-capture") == 0).then_some(()));
    switch.stop();
}

#[test]
fn a_capture_ends_with_its_switch_and_its_file_is_whole() {
    let place = Place::new();
    let switch = place.switch(&["a", "b"]);
    let mut a = switch.plug("a", 1, Options::default());
    let file = place.path().join("ended.pcapng");
    let mut capture = start(&place, &switch, &file, &[]);
    let sent = frame(Mac::BROADCAST, a.mac, 60, 1);
    a.send(&sent);
    until_written(&file, &sent);
    switch.stop();
    let (status, output) = capture.wait();
    assert_eq!(status.code(), Some(1));
    assert!(
        capture.log()[0]
            .contains("the switch has ended, and the capture with it, as no other process goes on with it"),
        "{:?}",
        capture.log()
    );
    assert!(output.contains("\"captured\": 1"), "{output}");
    if may_read() {
        assert_eq!(read(&file, &["frame.len"]), [["60"]]);
    }
}

/// The client begins anew in the process that has taken over, and says between which packets some may be missing.
#[test]
fn a_capture_goes_on_when_the_switch_is_replaced_and_tells_the_gap() {
    let place = Place::new();
    let mut switch = place.switch(&["a", "b"]);
    let mut a = switch.plug("a", 1, Options::default());
    let file = place.path().join("replaced.pcapng");
    // All ports, of which there is one more afterwards: packets refer to them by number.
    let capture = start(&place, &switch, &file, &["--direction", "in"]);
    place.ctl(&["add", &format!("vhost-user:{}", place.socket("0").display())]);
    for number in 1..4 {
        let sent = frame(Mac::BROADCAST, a.mac, 60, number);
        a.send(&sent);
        until_written(&file, &sent);
        if number < 3 {
            switch = replaced(&place, switch, |_| ());
            switch.process.until_logged("a capture begins");
        }
    }
    let summary = stop(capture);
    assert_eq!((&summary["captured"], &summary["lost"]), (&3.into(), &0.into()));
    assert_eq!(
        (&summary["interfaces"][0]["name"], &summary["interfaces"][0]["seen"]),
        (&"a".into(), &3.into())
    );
    assert_eq!(summary["interfaces"].as_array().unwrap().len(), 2);
    let gaps = summary["gaps"].as_array().unwrap();
    assert_eq!(gaps.len(), 2);
    assert!(gaps.iter().all(|gap| gap["from"].as_u64().unwrap() < gap["to"].as_u64().unwrap()), "{gaps:?}");
    if may_read() {
        let read = read(&file, &["frame.interface_name", "frame.comment"]);
        let notes: Vec<_> =
            read.iter().map(|line| (&*line[0], line[1].contains("another process"))).collect();
        assert_eq!(notes, [("a", false), ("a", true), ("a", true)], "{read:?}");
    }
    switch.stop();
}

/// No signal interrupts who waits for the reader of a pipe.
#[test]
fn a_capture_that_nobody_reads_ends_when_it_is_told_to() {
    let place = Place::new();
    let switch = place.switch(&["a"]);
    let fifo = place.path().join("fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    let mut timed = start(&place, &switch, &fifo, &["--duration", "100ms"]);
    let mut told = start(&place, &switch, &fifo, &[]);
    told.signal(Signal::TERM);
    for capture in [&mut timed, &mut told] {
        assert_eq!(capture.wait().0.code(), Some(1));
        assert!(capture.log().join("\n").contains("nobody reads the capture, which was to end"));
    }
    eventually("the switch has no capture", || switch.show().captures.is_empty().then_some(()));
    switch.stop();
}

#[test]
fn files_follow_each_other_and_the_latest_are_kept() {
    let place = Place::new();
    let switch = place.switch(&["a", "b"]);
    let (mut a, mut b) = bystanders(&switch);
    let file = place.path().join("night.of.pcapng");
    // Somebody has guessed the next names.
    let precious = place.path().join("precious");
    std::fs::write(&precious, "mine").unwrap();
    std::os::unix::fs::symlink(&precious, place.path().join("night.of_00002.pcapng")).unwrap();
    std::fs::write(place.path().join("night.of_00003.pcapng"), "theirs").unwrap();
    let words = ["a", "--direction", "in", "--file-size", "100K", "--files", "3"];
    let capture = start(&place, &switch, &file, &words);
    for number in 0..500 {
        a.send(&frame(b.mac, a.mac, 1400, number));
        b.receive();
    }
    let last = frame(b.mac, a.mac, 777, 500);
    a.send(&last);
    let latest = || {
        let mut files: Vec<_> =
            std::fs::read_dir(place.path()).unwrap().map(|file| file.unwrap().path()).collect();
        files.retain(|file| file.extension().is_some_and(|kind| kind == "pcapng"));
        files.sort();
        files
    };
    eventually("the last is written", || {
        let bytes = std::fs::read(latest().pop()?).ok()?;
        bytes.windows(last.len()).any(|window| window == last).then_some(())
    });
    let summary = stop(capture);
    assert_eq!((&summary["captured"], &summary["lost"]), (&501.into(), &0.into()));
    let files = latest();
    let names: Vec<_> = files.iter().map(|file| file.to_str().unwrap()).collect();
    assert_eq!(summary["files"], serde_json::json!(names));
    assert_eq!(names.len(), 3);
    // 69 frames of 1448 bytes beside 152 bytes and the statistics.
    assert!(names[2].ends_with("/night.of_00008.pcapng"), "{names:?}");
    for path in &files {
        let length = std::fs::metadata(path).unwrap().len();
        assert!(length <= 100_000 + 500, "{length}");
        assert_eq!(std::fs::metadata(path).unwrap().permissions().mode() & 0o777, 0o600);
    }
    assert_eq!(std::fs::read(&precious).unwrap(), b"mine");
    if may_read() {
        let counts: Vec<_> = files.iter().map(|file| read(file, &["frame.len"]).len()).collect();
        assert!(counts[0] == counts[1] && counts[0] >= 65 && counts[2] > 0, "{counts:?}");
    }
    let output = command(&place, &["a", "--file-size", "1M"]).output().unwrap();
    assert!(String::from_utf8(output.stderr).unwrap().contains("--write <FILE>"));
    switch.stop();
}

#[test]
fn a_full_disk_costs_no_packet_that_was_written_and_the_count_is_the_files() {
    let place = Place::new();
    let disk = place.path().join("disk");
    std::fs::create_dir(&disk).unwrap();
    let mounted = is_root().then(|| Disk::mount(disk.clone())).flatten();
    if !may("mount a tmpfs", mounted.is_some()) {
        return;
    }
    let switch = place.switch(&["a", "b"]);
    let (mut a, mut b) = bystanders(&switch);
    let file = disk.join("a.pcapng");
    let mut capture = start(&place, &switch, &file, &["a", "--direction", "in"]);
    // All at once, more than there is room for: what of it fits is kept.
    capture.signal(Signal::STOP);
    for number in 0..100 {
        a.send(&frame(b.mac, a.mac, 1400, number));
        b.receive();
    }
    capture.signal(Signal::CONT);
    let (status, said) = capture.wait();
    assert_eq!(
        (status.code(), capture.logged("No space left on device")),
        (Some(1), 1),
        "{:?}",
        capture.log()
    );
    let summary: serde_json::Value = serde_json::from_str(&said).unwrap();
    let captured = summary["captured"].as_u64().unwrap();
    assert!((30..50).contains(&captured), "{captured} of 1432 bytes each go into 64 KiB");
    if may_read() {
        assert_eq!(read(&file, &["frame.len"]).len() as u64, captured);
    }
    switch.stop();
}

#[test]
fn what_cannot_be_captured_or_written_is_one_clear_line() {
    let place = Place::new();
    let mut switch = place.switch(&["a", "b"]);
    let mut a = switch.plug("a", 1, Options::default());
    let refused = |words: &[&str]| {
        let output = command(&place, words).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{words:?}");
        assert!(output.stdout.is_empty(), "{words:?}");
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(text.lines().count(), 1, "{text}");
        text
    };
    // A mistake in a name costs no earlier capture.
    let earlier = place.path().join("earlier.pcapng");
    std::fs::write(&earlier, "packets").unwrap();
    refused(&["vm9", "-w", earlier.to_str().unwrap()]);
    assert_eq!(std::fs::read(&earlier).unwrap(), b"packets");
    for (words, expected) in [
        (&["vm9", "-w", "/dev/null"][..], "there is no port \"vm9\" now; the ports are: a, b"),
        (&["a", "-w", "/nonexistent/x"], "cannot write /nonexistent/x: No such file"),
        (&["a", "-w", "/dev/null", "--buffer", "1000000"], "KiB for each of"),
    ] {
        let text = refused(words);
        assert!(text.contains(expected), "{text}");
    }
    if may_filter() {
        let text = refused(&["a", "-w", "/dev/null", "--filter", "tcp prt 80"]);
        assert!(text.contains("--filter: can't parse filter expression: syntax error"), "{text}");
    }
    // Whoever reads JSON reads it here, too.
    for (words, kind, expected) in [
        (&["vm9", "-w", "/dev/null", "--json"][..], "refused", "there is no port \"vm9\" now"),
        (&["a", "-w", "-", "--file-size", "1M", "--json"], "usage", "--file-size: only files"),
        (&["a", "-w", "/nonexistent/x", "--json"], "failed", "cannot write /nonexistent/x: No such file"),
    ] {
        let output = command(&place, words).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{words:?}");
        // What is captured has standard output for itself.
        let [told, empty] = if words.contains(&"-") {
            [output.stderr, output.stdout]
        } else {
            [output.stdout, output.stderr]
        };
        assert!(empty.is_empty(), "{words:?}: {empty:?}");
        assert_described(&[&["capture"], words].concat(), std::str::from_utf8(&told).unwrap());
        let error: serde_json::Value = serde_json::from_slice(&told).unwrap();
        assert_eq!(error["kind"], kind, "{error}");
        assert!(error["error"].as_str().unwrap().starts_with(expected), "{error}");
    }
    // A disk that is full: the line says so, the packet passes, and the capture is gone.
    let mut full = command(&place, &["a", "-w", "/dev/full", "--json"]);
    let mut process = Process::start(&mut full, Spawn::default());
    assert_eq!(process.wait().0.code(), Some(1));
    assert!(
        process.log()[0].contains("cannot write /dev/full: No space left on device"),
        "{:?}",
        process.log()
    );
    a.send(&frame(Mac::BROADCAST, a.mac, 60, 1));
    switch.until("a", "the packet is counted", |port| port.counters["rx_packets"] == 1);
    switch.until_state("a", PortState::Up);
    // A switch that hangs.
    switch.process.signal(Signal::STOP);
    let output = command(&place, &["a", "-w", "/dev/null", "--duration", "1", "--json"]).output().unwrap();
    let error: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((output.status.code(), &error["kind"]), (Some(1), &"silent".into()), "{error}");
    switch.process.signal(Signal::CONT);
    // A reader that has seen enough.
    let mut piped = command(&place, &["a"]);
    let mut child = piped.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    drop(child.stdout.take());
    assert!(child.wait().unwrap().success());
    switch.stop();
}

#[test]
fn a_stream_is_read_while_it_is_written() {
    if !may_filter() {
        return;
    }
    let place = Place::new();
    let switch = place.switch(&["a", "b"]);
    let mut a = switch.plug("a", 1, Options::default());
    let mut b = switch.plug("b", 2, Options::default());
    acquaint(&mut [&mut a, &mut b]);
    let mut capture = command(&place, &["a,b"]).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let stream = capture.stdout.take().unwrap();
    // It ends when it has read two packets, and the capture with it.
    let reader = Command::new("tcpdump")
        .args(["-nr", "-", "-c", "2", "-e"])
        .stdin(stream)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    switch.process.until_logged("a capture begins");
    let (header, segmented) = tcp(b.mac, a.mac, false, &pattern(1, 300), 0);
    a.put(&header, &segmented);
    a.flush();
    b.receive();
    let output = reader.wait_with_output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(
        text.lines().filter(|line| line.contains("10.0.0.1.4660 > 10.0.0.2.22136")).count(),
        2,
        "{text}"
    );
    assert!(capture.wait().unwrap().success());
    switch.stop();
}

/// The program that makes ports appear in Wireshark's list, run as Wireshark runs it.
#[test]
fn ports_are_interfaces_of_wireshark() {
    let place = Place::new();
    let switch = place.switch(&["a", "b"]);
    let mut a = switch.plug("a", 1, Options::default());
    let script = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../contrib/wireshark/ringferry");
    let extcap = |words: &[&str]| {
        let mut extcap = Command::new(&script);
        extcap
            .env("RINGFERRY", ringferry().get_program())
            .env("RINGFERRY_CONTROL", place.control())
            .args(words);
        extcap
    };
    let say = |words: &[&str]| String::from_utf8(extcap(words).output().unwrap().stdout).unwrap();
    let listed = say(&["--extcap-interfaces", "--extcap-version=4.0"]);
    assert!(listed.contains("interface {value=ringferry-b}{display=ringferry: port b}\n"), "{listed}");
    assert!(say(&["--extcap-dlts", "--extcap-interface", "ringferry-a"]).contains("{number=1}{name=EN10MB}"));
    assert!(say(&["--extcap-config", "--extcap-interface", "ringferry-a"]).contains("{call=--drops}"));
    if may_filter() {
        assert_eq!(say(&["--extcap-interface", "ringferry-a", "--extcap-capture-filter", "tcp port 80"]), "");
        assert!(
            say(&["--extcap-interface=ringferry-a", "--extcap-capture-filter=tcp prt 80"])
                .contains("syntax error")
        );
    }
    let fifo = place.path().join("fifo");
    rustix::fs::mkfifoat(rustix::fs::CWD, &fifo, rustix::fs::Mode::RWXU).unwrap();
    let words = [
        "--capture",
        "--extcap-interface",
        "ringferry-a",
        "--fifo",
        fifo.to_str().unwrap(),
        "--direction",
        "in",
        "--snaplen",
        "80",
    ];
    let mut capture = extcap(&words).stderr(Stdio::null()).spawn().unwrap();
    let mut read = File::open(&fifo).unwrap();
    switch.process.until_logged("a capture begins");
    let sent = frame(mac(9), a.mac, 100, 7);
    a.send(&sent);
    let mut stream = Vec::new();
    eventually("the frame is in the stream", || {
        use std::io::Read;
        let mut part = [0; 4096];
        let count = read.read(&mut part).unwrap();
        stream.extend_from_slice(&part[..count]);
        stream.windows(80).any(|window| *window == sent[..80]).then_some(())
    });
    // Wireshark closes the FIFO.
    drop(read);
    assert!(capture.wait().unwrap().success());
    switch.stop();
}
