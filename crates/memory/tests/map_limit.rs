//! A window in a process that has as many mappings as it may have. In a program of its own, as nothing else could map then.

use std::io;
use std::os::fd::AsFd;

use ringferry_memory::Window;
use rustix::fs::MemfdFlags;

/// Bytes of a page.
const SLOT: usize = 4096;

/// Mappings that are made at most, in some seconds: some systems allow so many that the kernel would need gigabytes for them.
const MOST: usize = 2_000_000;

/// Returns true if a test may run that needs something special. Where it may not, says so; with `CI=true` nothing is left out.
fn may(what: &str, possible: bool) -> bool {
    let ci = std::env::var_os("CI").is_some_and(|ci| ci == "true");
    assert!(possible || !ci, "{what}, and CI=true allows no test to be skipped");
    if !possible {
        eprintln!("skipped: {what}");
    }
    possible
}

#[test]
fn a_window_at_the_limit_of_mappings_refuses_and_stays_as_it_was() {
    let limit = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap();
    let limit: usize = limit.trim().parse().unwrap();
    if !may(&format!("needs a vm.max_map_count of at most {MOST}, not {limit}"), limit <= MOST) {
        return;
    }
    let file = rustix::fs::memfd_create("window", MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, SLOT as u64).unwrap();
    rustix::io::pwrite(&file, b"x", 0).unwrap();
    let mut window = Window::reserve(2 * limit).unwrap();
    // Every other page, so that no two mappings become one.
    let mut refused = None;
    let mut last = 0;
    for slot in (1..2 * limit).step_by(2) {
        match window.map(slot, 1, file.as_fd(), 0, true) {
            Ok(()) => last = slot,
            Err(error) => {
                refused = Some((slot, error));
                break;
            }
        }
    }
    let (slot, error) = refused.expect("the limit holds");
    assert_eq!(error.kind(), io::ErrorKind::OutOfMemory);
    assert!(!window.is_mapped(slot) && window.read(slot, 0, 1).is_none());
    assert_eq!(window.read(last, 0, 1).unwrap().array(), Some(*b"x"));
    // With room again the slot is as good as new.
    window.unmap(1, last).unwrap();
    window.map(slot, 1, file.as_fd(), 0, true).unwrap();
    assert_eq!(window.read(slot, 0, 1).unwrap().array(), Some(*b"x"));
}
