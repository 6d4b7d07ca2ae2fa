//! Processes as domains have the properties of every provider, in one process and in two, and a
//! broker outlives all of them.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use ringferry_memory::{ReadSlice, Window, WriteSlice};
use ringferry_xen::domain::{DomId, Domain, EventPort, PAGE};
use ringferry_xen::event::EventChannel;
use ringferry_xen::grant::{Access, CopySegment, GrantError, GrantRef, Local};
use ringferry_xen::process::ProcessDomain;
use ringferry_xen_sim::Broker;
use ringferry_xen_sim::conformance::provider::{self as conformance, Pair};

struct Bed {
    broker: Broker,
    path: PathBuf,
    _dir: tempfile::TempDir,
}

fn bed() -> Bed {
    // Tests run at once, each with a broker and all its domains in this process.
    ringferry_sys::rlimit::raise_open_files(16_384).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("broker");
    Bed { broker: Broker::bind(&path).unwrap(), path, _dir: dir }
}

impl Bed {
    fn domain(&self, id: u16) -> ProcessDomain {
        ProcessDomain::connect(&self.path, Some(DomId(id))).unwrap()
    }

    fn left(&self) -> (usize, usize, usize) {
        (self.broker.granted_pages(), self.broker.mapped_pages(), self.broker.open_ports())
    }

    /// Waits until so many domains are there; the broker learns of an end by itself, a moment later.
    fn settle(&self, domains: usize) {
        while self.broker.domains() != domains {
            std::thread::yield_now();
        }
    }
}

#[test]
fn processes_do_what_every_provider_must() {
    let bed = bed();
    let (front, back) = (bed.domain(1), bed.domain(0));
    conformance::all(&Pair { front: &front, back: &back, counts_uses: true }, |name| {
        println!("{name}");
        assert_eq!(bed.left(), (0, 0, 0), "{name}");
    });
    conformance::all(&Pair { front: &back, back: &back, counts_uses: true }, |name| {
        assert_eq!(bed.left(), (0, 0, 0), "{name}, one domain");
    });
}

/// The other process of the tests below: this program again, told by the environment what to be.
fn other_process(test: &str, path: &Path, words: &[u32]) -> Child {
    let words: Vec<_> = words.iter().map(u32::to_string).collect();
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env("XEN_OTHER_PROCESS", path)
        .env("XEN_WORDS", words.join(" "))
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

/// In the other process: the broker's path and the words.
fn told() -> Option<(PathBuf, Vec<u32>)> {
    let path = std::env::var_os("XEN_OTHER_PROCESS")?;
    let words = std::env::var("XEN_WORDS").unwrap();
    Some((path.into(), words.split(' ').map(|word| word.parse().unwrap()).collect()))
}

fn wait(channel: &dyn EventChannel, other: &mut Child) {
    while !channel.drain().unwrap() {
        assert!(other.try_wait().unwrap().is_none(), "the other process ended too early");
        std::thread::yield_now();
    }
}

#[test]
fn pages_and_events_cross_from_process_to_process() {
    if let Some((path, words)) = told() {
        let back = ProcessDomain::connect(path, Some(DomId(0))).unwrap();
        let (front, refs) = (DomId(5), [GrantRef(words[1]), GrantRef(words[2])]);
        let channel = back.bind_interdomain(front, EventPort(words[0])).unwrap();
        let (mut foreign, mut window) = (back.foreign(front).unwrap(), Window::reserve(1).unwrap());
        let mut mapped = Vec::new();
        foreign.map(&mut window, &[(0, refs[0])], Access::Write, &mut mapped);
        assert_eq!(mapped, [true]);
        let mut hello = [0; 5];
        window.read(0, 0, 5).unwrap().copy_to(&mut hello);
        assert_eq!(&hello, b"hello");
        window.write(0, 0, 5).unwrap().copy_from(b"world");
        let slice = ReadSlice::from(&b"copied"[..]);
        let mut copy = [CopySegment { gref: refs[1], offset: 9, local: Local::From(slice), done: false }];
        foreign.copy(&mut copy).unwrap();
        assert!(copy[0].done);
        channel.notify().unwrap();
        std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
        return; // with the page mapped
    }
    let bed = bed();
    let front = bed.domain(5);
    let granted = front.grants().unwrap().grant(DomId(0), 2, Access::Write).unwrap();
    let area = granted.region().area(0, 2 * PAGE).unwrap();
    area.write(0, 5).unwrap().copy_from(b"hello");
    let (port, channel) = front.alloc_unbound(DomId(0)).unwrap();
    let words = [port.0, granted.refs()[0].0, granted.refs()[1].0];
    let mut child = other_process("pages_and_events_cross_from_process_to_process", &bed.path, &words);
    wait(channel.as_ref(), &mut child);
    let (mut mapped, mut copied) = ([0; 5], [0; 6]);
    area.read(0, 5).unwrap().copy_to(&mut mapped);
    area.read(PAGE + 9, 6).unwrap().copy_to(&mut copied);
    assert_eq!((&mapped, &copied), (b"world", b"copied"));
    assert_eq!(bed.left(), (2, 1, 2));
    drop(child.stdin.take());
    assert!(child.wait().unwrap().success());
    bed.settle(1);
    assert_eq!(bed.left(), (2, 0, 1));
    drop((area, channel));
    assert_eq!(granted.end(), 0);
    assert_eq!(bed.left(), (0, 0, 0));
}

#[test]
fn a_killed_front_end_leaves_its_pages_readable_and_no_reference_valid() {
    if let Some((path, words)) = told() {
        let front = ProcessDomain::connect(path, Some(DomId(7))).unwrap();
        let granted = front.grants().unwrap().grant(DomId(0), 1, Access::Write).unwrap();
        assert_eq!(granted.refs()[0].0, words[0]);
        granted.region().area(0, 4).unwrap().write(0, 4).unwrap().copy_from(b"last");
        let channel = front.bind_interdomain(DomId(0), EventPort(words[1])).unwrap();
        channel.notify().unwrap();
        std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
        return;
    }
    let bed = bed();
    let back = bed.domain(0);
    let (port, channel) = back.alloc_unbound(DomId(7)).unwrap();
    let test = "a_killed_front_end_leaves_its_pages_readable_and_no_reference_valid";
    let mut child = other_process(test, &bed.path, &[8, port.0]);
    wait(channel.as_ref(), &mut child);
    let (mut foreign, mut window) = (back.foreign(DomId(7)).unwrap(), Window::reserve(2).unwrap());
    let mut mapped = Vec::new();
    foreign.map(&mut window, &[(0, GrantRef(8))], Access::Write, &mut mapped);
    assert_eq!(mapped, [true]);
    child.kill().unwrap();
    child.wait().unwrap();
    bed.settle(1);
    let mut last = [0; 4];
    window.read(0, 0, 4).unwrap().copy_to(&mut last);
    assert_eq!(&last, b"last");
    foreign.map(&mut window, &[(1, GrantRef(8))], Access::Write, &mut mapped);
    assert_eq!(mapped, [false]);
    let mut copy = [CopySegment {
        gref: GrantRef(8),
        offset: 0,
        local: Local::To(WriteSlice::from(&mut last[..])),
        done: false,
    }];
    // Found out by the look-up before: the domain is gone.
    assert!(foreign.copy(&mut copy).is_err());
    assert!(!copy[0].done);
    assert!(back.foreign(DomId(7)).is_err());
    assert_eq!(bed.left(), (0, 1, 1));
    foreign.unmap(&mut window, &[0]);
    assert_eq!(bed.left(), (0, 0, 1));
}

#[test]
fn numbers_are_given_once_and_come_back() {
    let bed = bed();
    let first = bed.domain(0);
    let error = ProcessDomain::connect(&bed.path, Some(DomId(0))).unwrap_err();
    assert_eq!(error.source.kind(), std::io::ErrorKind::AlreadyExists);
    assert!(ProcessDomain::connect(&bed.path, Some(DomId(0x7ff0))).is_err());
    let any: Vec<_> = (0..3).map(|_| ProcessDomain::connect(&bed.path, None).unwrap()).collect();
    assert_eq!(any.iter().map(|domain| domain.id().0).collect::<Vec<_>>(), [1, 2, 3]);
    drop(first);
    bed.settle(3);
    assert_eq!(bed.domain(0).id(), DomId(0));
    let nowhere = bed.path.with_file_name("nowhere");
    let error = ProcessDomain::connect(&nowhere, None).unwrap_err();
    assert!(error.to_string().contains("start the broker first"), "{error}");
}

#[test]
fn a_domain_cannot_have_more_than_its_share() {
    let bed = bed();
    let (front, other) = (bed.domain(1), bed.domain(2));
    let mut grants = front.grants().unwrap();
    let error = grants.grant(other.id(), 1 << 20, Access::Write).unwrap_err();
    assert!(matches!(error, GrantError::Exhausted(_)), "{error}");
    assert!(grants.grant(other.id(), 0, Access::Write).is_err());
    assert!(grants.grant(other.id(), usize::MAX, Access::Write).is_err());
    let mut many = Vec::new();
    let error = loop {
        match grants.grant(other.id(), 1, Access::Read) {
            Ok(granted) => many.push(granted),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, GrantError::Exhausted(_)) && many.len() >= 64, "{error} after {}", many.len());
    other.grants().unwrap().grant(front.id(), 4, Access::Write).unwrap();
    many.pop();
    many.push(grants.grant(other.id(), 1, Access::Read).unwrap());
    drop(many);
    let mut ports = Vec::new();
    while let Ok(port) = front.alloc_unbound(other.id()) {
        ports.push(port);
    }
    assert!(ports.len() >= 64);
    other.alloc_unbound(front.id()).unwrap();
    drop(ports);
    assert_eq!(bed.left(), (0, 0, 0));
}

#[test]
fn more_segments_than_are_remembered_can_be_used() {
    let bed = bed();
    let (front, back) = (bed.domain(1), bed.domain(2));
    let mut grants = front.grants().unwrap();
    let many: Vec<_> = (0..100).map(|_| grants.grant(back.id(), 1, Access::Write).unwrap()).collect();
    let mut foreign = back.foreign(front.id()).unwrap();
    for _ in 0..2 {
        for granted in &many {
            let slice = ReadSlice::from(&b"all"[..]);
            let gref = granted.refs()[0];
            let mut copy = [CopySegment { gref, offset: 0, local: Local::From(slice), done: false }];
            foreign.copy(&mut copy).unwrap();
            assert!(copy[0].done);
        }
    }
}

#[test]
fn references_that_are_given_out_again_mean_the_new_pages() {
    let bed = bed();
    let (front, back) = (bed.domain(1), bed.domain(2));
    let mut grants = front.grants().unwrap();
    let mut foreign = back.foreign(front.id()).unwrap();
    // Sizes that make old and new ranges overlap in every way.
    for count in [4, 1, 6, 2, 8, 3] {
        let granted = grants.grant(back.id(), count, Access::Write).unwrap();
        assert_eq!(granted.refs()[0], GrantRef(8));
        for (page, gref) in granted.refs().iter().enumerate() {
            let byte = [count as u8 * 16 + page as u8];
            let local = Local::From(ReadSlice::from(&byte[..]));
            let mut copy = [CopySegment { gref: *gref, offset: 0, local, done: false }];
            foreign.copy(&mut copy).unwrap();
            assert!(copy[0].done);
            let mut there = [0];
            granted.region().area(page * PAGE, 1).unwrap().read(0, 1).unwrap().copy_to(&mut there);
            assert_eq!(there, byte);
        }
        assert_eq!(granted.end(), 0);
    }
}

#[test]
fn runs_of_bytes_are_copied_in_one_call() {
    let bed = bed();
    let (front, back) = (bed.domain(1), bed.domain(2));
    let granted = front.grants().unwrap().grant(back.id(), 16, Access::Write).unwrap();
    let mut foreign = back.foreign(front.id()).unwrap();
    let data: Vec<u8> = (0..16 * PAGE).map(|at| (at / 7) as u8).collect();
    let mut batch: Vec<_> = data
        .chunks(PAGE)
        .zip(granted.refs())
        .map(|(page, gref)| CopySegment {
            gref: *gref,
            offset: 0,
            local: Local::From(ReadSlice::from(page)),
            done: false,
        })
        .collect();
    foreign.copy(&mut batch).unwrap();
    assert!(batch.iter().all(|segment| segment.done));
    let counters = foreign.counters();
    assert_eq!((counters.calls, counters.copies, counters.copied_bytes), (1, 16, 65536));
    let mut there = vec![0; data.len()];
    granted.region().area(0, data.len()).unwrap().read(0, data.len()).unwrap().copy_to(&mut there);
    assert_eq!(there, data);
}

#[test]
fn a_client_that_talks_nonsense_is_cut_off_and_nobody_else() {
    let bed = bed();
    let front = bed.domain(1);
    for (bytes, cut) in [(&[0xffu8; 32][..], true), (&[0; 32], true), (&[1; 31], false)] {
        let mut stream = UnixStream::connect(&bed.path).unwrap();
        stream.write_all(bytes).unwrap();
        if cut {
            assert_eq!(stream.read(&mut [0; 32]).unwrap(), 0);
        }
    }
    // Requests before the first are refused, and the rest of them still works.
    let mut stream = UnixStream::connect(&bed.path).unwrap();
    let mut request = [0u8; 32];
    request[..4].copy_from_slice(&3u32.to_ne_bytes());
    request[8..12].copy_from_slice(&1u32.to_ne_bytes());
    stream.write_all(&request).unwrap();
    let mut reply = [0u8; 32];
    stream.read_exact(&mut reply).unwrap();
    assert_ne!(reply[..4], [0; 4]);
    // One that floods and never reads an answer is cut off as well.
    stream.set_nonblocking(true).unwrap();
    let flood = vec![0u8; 32 * 1024];
    let flood: Vec<u8> = flood.chunks(32).flat_map(|_| request).collect();
    loop {
        match stream.write(&flood) {
            Ok(_) => {}
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => std::thread::yield_now(),
            Err(_) => break,
        }
    }
    front.grants().unwrap().grant(DomId(0), 1, Access::Write).unwrap();
    assert_eq!(bed.broker.domains(), 1);
}

#[test]
fn without_a_broker_everything_ends_in_errors() {
    let bed = bed();
    let (front, back) = (bed.domain(1), bed.domain(2));
    let granted = front.grants().unwrap().grant(back.id(), 2, Access::Write).unwrap();
    let (port, channel) = front.alloc_unbound(back.id()).unwrap();
    let mut foreign = back.foreign(front.id()).unwrap();
    let refs = granted.refs().to_vec();
    let region = foreign.map_region(&refs[..1]).unwrap();
    drop(bed);
    assert!(front.grants().unwrap().grant(back.id(), 1, Access::Read).is_err());
    assert!(back.bind_interdomain(front.id(), port).is_err());
    assert!(back.foreign(front.id()).is_err());
    // Grants and channels from before still work.
    region.area(0, 2).unwrap().write(0, 2).unwrap().copy_from(b"ok");
    channel.notify().unwrap();
    assert_eq!(granted.end(), 1);
}

/// Open descriptors, and mappings of granted pages and tables, of this process.
fn held() -> (usize, usize) {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let mapped = maps.lines().filter(|line| line.contains("/memfd:grant")).count();
    (std::fs::read_dir("/proc/self/fd").unwrap().count(), mapped)
}

/// Counting needs a process without other tests, so this one runs as a child of itself.
#[test]
fn no_descriptor_and_no_mapping_is_left_behind() {
    let Some((path, _)) = told() else {
        let mut child =
            other_process("no_descriptor_and_no_mapping_is_left_behind", Path::new("/dev/null"), &[0]);
        assert!(child.wait().unwrap().success());
        return;
    };
    assert_eq!(path, Path::new("/dev/null"));
    let run = || {
        let bed = bed();
        let (front, back) = (bed.domain(1), bed.domain(0));
        conformance::all(&Pair { front: &front, back: &back, counts_uses: true }, |_| ());
        // And what a peer leaves when it goes without a word: the order is not ours to choose.
        let granted = front.grants().unwrap().grant(back.id(), 4, Access::Write).unwrap();
        let mut foreign = back.foreign(front.id()).unwrap();
        let region = foreign.map_region(granted.refs()).unwrap();
        let (port, one) = front.alloc_unbound(back.id()).unwrap();
        let two = back.bind_interdomain(front.id(), port).unwrap();
        drop((front, granted, one));
        drop((back, bed));
        drop((foreign, region, two));
    };
    run(); // what the first run sets up for good is no leak
    let before = held();
    (0..3).for_each(|_| run());
    assert_eq!(held(), before);
    assert_eq!(before.1, 0);
}
