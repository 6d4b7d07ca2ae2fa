//! The state that a switch hands over to the process that replaces it, or leaves behind when it is killed.
//!
//! An input is the text of a message, in front of which are two bytes with its length, and the bulk data behind it.

use std::os::fd::OwnedFd;

use ringferry_switch::handed;
use ringferry_sys::eventfd::EventFd;
use ringferry_sys::socket::Stream;

use crate::ring::Reached;
use crate::script::{Bytes, Field};

/// Reads a message, and panics if a check fails.
pub fn handover(input: &[u8]) -> Reached {
    let mut bytes = Bytes(input);
    let Some(len) = u16::get(&mut bytes) else { return Reached::default() };
    let (text, bulk) = bytes.0.split_at(usize::from(len).min(bytes.0.len()));
    Reached { chains: handed::read(text, bulk, &descriptors()), ..Reached::default() }
}

/// Of each kind that a state refers to: memory, an event, a connection.
fn descriptors() -> Vec<OwnedFd> {
    let memory = rustix::fs::memfd_create("handed", rustix::fs::MemfdFlags::CLOEXEC).expect("memory");
    rustix::fs::ftruncate(&memory, 1 << 16).expect("its size");
    let (ours, theirs) = Stream::pair().expect("a pair");
    vec![memory, EventFd::new().expect("an event").into(), ours.into(), theirs.into()]
}
