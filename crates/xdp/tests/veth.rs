//! Packets between two ends of a veth pair, each with AF_XDP sockets: the kernel's own half of the rings.

use std::os::fd::AsFd;
use std::process::Command;
use std::time::{Duration, Instant};

use ringferry_memory::ReadSlice;
use ringferry_sys::testing::{in_new_net, may};
use ringferry_sys::{netif, program};
use ringferry_xdp::{Mode, Opened, Queue, Refused, XdpError, is_zero_copy, open, several_frames};

/// Runs a test in a network namespace of its own with a veth pair a, b.
fn with_a_pair(options: &'static str, test: fn()) {
    if !may("needs the program ip", program::installed("ip").is_some()) {
        return;
    }
    in_new_net(|| {
        // The kernel says nothing of its own accord.
        std::fs::write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1").unwrap();
        ip(&format!("link add va {options} type veth peer name vb {options}"));
        ip("link set va up");
        ip("link set vb up");
        test();
    });
}

fn ip(arguments: &str) {
    let status = Command::new("ip").args(arguments.split(' ')).status().unwrap();
    assert!(status.success(), "ip {arguments}");
}

fn opened(name: &str, mode: Mode) -> Result<Opened, XdpError> {
    open(netif::index(name).unwrap().unwrap(), None, 16, netif::mtu(name).unwrap(), mode)
}

/// The first queue of an interface, with the program that has to stay.
fn queue(name: &str, mode: Mode) -> (Queue, Opened) {
    let mut opened = opened(name, mode).unwrap();
    assert!(!is_zero_copy(&opened.queues[0].0), "veth has none");
    let (socket, memory) = opened.queues.remove(0);
    let several = several_frames(netif::mtu(name).unwrap());
    (Queue::new(socket, memory.as_fd(), several).unwrap(), opened)
}

/// The `n`th packet of `len` bytes: for everybody, and different from all others.
fn packet(n: u32, len: usize) -> Vec<u8> {
    let mut packet = vec![0xff; 12];
    packet.extend([0x88, 0xb5]);
    packet.extend((0..).flat_map(|i: u32| (n.wrapping_mul(31).wrapping_add(i)).to_le_bytes()).take(len - 14));
    packet
}

/// Takes packets until `count` have come.
fn take(queue: &mut Queue, count: usize) -> Vec<Vec<u8>> {
    let mut taken = Vec::new();
    let until = Instant::now() + Duration::from_secs(10);
    while taken.len() < count && Instant::now() < until {
        let Some(lent) = queue.lend(32) else { continue };
        for pieces in lent.packets() {
            let mut packet = Vec::new();
            for piece in pieces {
                let at = packet.len();
                packet.resize(at + piece.len(), 0);
                piece.copy_to(&mut packet[at..]);
            }
            taken.push(packet);
        }
        queue.give_back(lent);
    }
    taken
}

/// Sends bursts both ways, many times the frames that there are.
fn converse(mode: Mode, lengths: &[usize]) {
    let ((mut a, _a), (mut b, _b)) = (queue("va", mode), queue("vb", mode));
    let mut n = 0;
    for _ in 0..200 {
        for (from, to) in [(0, 1), (1, 0)] {
            let ends = [&mut a, &mut b];
            let sent: Vec<_> =
                (0..48).map(|i| packet(n + i, lengths[(n + i) as usize % lengths.len()])).collect();
            n += 48;
            for (i, packet) in sent.iter().enumerate() {
                // In one piece, and in several of odd lengths.
                let (first, rest) = packet.split_at(if i % 2 == 0 { packet.len() } else { 31 });
                let pieces: Vec<_> = rest.chunks(1021).map(ReadSlice::from).collect();
                ends[from].put(first, &pieces, packet.len()).unwrap();
            }
            ends[from].flush();
            assert!(ends[from].settle());
            assert_eq!(take(ends[to], sent.len()), sent);
        }
    }
    assert_eq!(Queue::statistics(&a), Queue::statistics(&b));
    assert_eq!(Queue::statistics(&a), Default::default());
}

#[test]
fn packets_of_all_lengths_arrive_once_in_order_and_as_they_were() {
    with_a_pair("numrxqueues 1 numtxqueues 1", || converse(Mode::Auto, &[60, 61, 576, 1514]));
}

#[test]
fn the_kernel_can_run_the_program_for_any_driver() {
    with_a_pair("numrxqueues 1 numtxqueues 1", || converse(Mode::Generic, &[60, 1514, 700]));
}

#[test]
fn packets_larger_than_a_frame_take_several() {
    with_a_pair("mtu 9000", || converse(Mode::Auto, &[9014, 60, 4097, 4096, 8192]));
}

/// What is not taken is not sent either, and what was there before is.
#[test]
fn who_sends_more_than_there_is_room_for_is_told() {
    with_a_pair("mtu 1500", || {
        let ((mut a, _a), (mut b, _b)) = (queue("va", Mode::Auto), queue("vb", Mode::Auto));
        let long = packet(0, 5000);
        assert_eq!(a.put(&long, &[], long.len()), Err(Refused::TooLong));
        let sent: Vec<_> =
            (0..).map(|n| packet(n, 60)).take_while(|packet| a.put(packet, &[], 60).is_ok()).collect();
        assert_eq!(sent.len(), 2048);
        a.flush();
        assert_eq!(take(&mut b, 2048), sent);
        assert!(a.settle() && a.put(&sent[0], &[], 60).is_ok(), "there is room again");
    });
}

/// Nobody has to call again and again until it is up.
#[test]
fn what_an_interface_that_is_down_has_not_sent_waits_until_it_is_up() {
    with_a_pair("mtu 1500", || {
        let ((mut a, _a), (mut b, _b)) = (queue("va", Mode::Auto), queue("vb", Mode::Auto));
        ip("link set va down");
        let sent: Vec<_> = (0..40).map(|n| packet(n, 60)).collect();
        sent.iter().for_each(|packet| a.put(packet, &[], 60).unwrap());
        a.flush();
        assert!(a.settle() && b.lend(1).is_none());
        ip("link set va up");
        a.flush();
        assert!(a.settle());
        assert_eq!(take(&mut b, 40), sent);
        // Nothing is plugged in at the other end: what is sent is lost, and there is room again.
        ip("link set vb down");
        for _ in 0..100 {
            sent.iter().for_each(|packet| a.put(packet, &[], 60).unwrap());
            a.flush();
            assert!(a.settle());
        }
    });
}

/// Another process goes on with the descriptors where this one has stopped.
#[test]
fn a_socket_that_goes_to_another_process_has_lost_nothing() {
    with_a_pair("mtu 1500", || {
        let (mut b, _b) = queue("vb", Mode::Auto);
        let opened = opened("va", Mode::Auto).unwrap();
        let mut n = 0;
        for _ in 0..100 {
            let (socket, memory) = &opened.queues[0];
            let mut a = Queue::new(socket.try_clone().unwrap(), memory.as_fd(), false).unwrap();
            let sent: Vec<_> = (n..n + 40).map(|n| packet(n, 1000)).collect();
            n += 40;
            sent.iter().for_each(|packet| a.put(packet, &[], packet.len()).unwrap());
            a.flush();
            assert_eq!(take(&mut b, 40), sent);
            sent.iter().for_each(|packet| b.put(packet, &[], packet.len()).unwrap());
            b.flush();
            // Some are taken here, the others by the next one.
            assert_eq!(take(&mut a, 20)[..20], sent[..20]);
            drop(a);
            let mut next = Queue::new(socket.try_clone().unwrap(), memory.as_fd(), false).unwrap();
            let left = take(&mut next, 8);
            assert_eq!(left, sent[32..]);
        }
    });
}

#[test]
fn what_cannot_be_had_is_said_and_the_interface_is_as_it_was() {
    with_a_pair("mtu 1500", || {
        let error = opened("va", Mode::ZeroCopy).unwrap_err();
        assert!(error.to_string().starts_with("the interface has no zero copy"), "{error}");
        let index = netif::index("va").unwrap().unwrap();
        let error = open(index, Some(99), 99, 1500, Mode::Auto).unwrap_err();
        assert!(matches!(error, XdpError::Queues(queues) if queues < 99), "{error}");
        let first = opened("va", Mode::Auto).unwrap();
        let error = opened("va", Mode::Auto).unwrap_err();
        assert!(error.to_string().starts_with("another XDP program is at the interface"), "{error}");
        drop(first);
        // The kernel frees a queue some milliseconds after its socket.
        opened("va", Mode::Auto).unwrap();
        assert!(matches!(open(99_999, None, 1, 1500, Mode::Auto), Err(XdpError::Program(_))));
    });
}
