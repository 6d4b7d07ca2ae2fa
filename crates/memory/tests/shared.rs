//! Memory of our own in the hands of a peer that received its descriptor.

use ringferry_memory::{MapError, SharedMem};
use rustix::fs::SealFlags;
use rustix::io::Errno;

#[test]
fn d_low_a_peer_can_neither_resize_nor_seal_what_it_was_given() {
    let memory = SharedMem::new("given", 8192).unwrap();
    let peer = memory.fd().try_clone_to_owned().unwrap();
    for seal in [SealFlags::FUTURE_WRITE, SealFlags::WRITE] {
        assert_eq!(rustix::fs::fcntl_add_seals(&peer, seal), Err(Errno::PERM), "{seal:?}");
    }
    for size in [4096, 16384] {
        assert_eq!(rustix::fs::ftruncate(&peer, size), Err(Errno::PERM), "{size}");
    }
}

#[test]
fn a_process_without_room_is_not_advised_to_share_what_is_shared() {
    let text = MapError::Os(Errno::NOMEM).to_string();
    assert!(text.contains("ulimit -v") && !text.contains("share=on"), "{text}");
    assert!(MapError::Os(Errno::INVAL).to_string().contains("share=on"));
}
