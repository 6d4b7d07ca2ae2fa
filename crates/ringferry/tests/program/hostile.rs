//! Front ends and guests that break every rule: only their own queue or connection suffers, it is
//! counted and said once, and they can begin anew.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use ringferry_control::snapshot::PortState;
use ringferry_memory::RegionSpec;
use ringferry_packet::ether::Mac;
use ringferry_packet::vnet::Header;
use ringferry_rig::frames::{frame, mac, pattern};
use ringferry_rig::guest::{Guest, Options, acquaint, converse};
use ringferry_rig::handmade::{AVAIL, Front, Shape};
use ringferry_rig::process::{PATIENCE, eventually, may};
use ringferry_rig::raw::{BASE, BUFFERS, ENTRIES, INDIRECT, NEXT, RX, Raw, SIZE, TX, WRITE};
use ringferry_rig::switch::{Place, Switch};
use ringferry_sys::eventfd::EventFd;
use ringferry_sys::socket::Stream;
use ringferry_sys::testing::lingering;
use ringferry_vhost_user::message::{MAX_PAYLOAD, Request};
use ringferry_vhost_user::{FrontendError, ProtocolFeatures};
use ringferry_virtio_net::Features;
use rustix::fs::FallocateFlags;
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

use crate::hostile_back_end::let_go;

/// Address of the guest that breaks the rules.
const VILLAIN: Mac = mac(9);
/// The worker's message about a broken queue.
const BROKEN: &str = "queue is broken until the guest resets it";

/// A switch with two ports that talk, and one for the villain.
struct Scene<'a> {
    switch: Switch<'a>,
    a: Guest,
    b: Guest,
}

impl<'a> Scene<'a> {
    fn new(place: &'a Place) -> Scene<'a> {
        let switch = place.switch(&["a", "b", "villain"]);
        let mut a = switch.plug("a", 1, Options::default());
        let mut b = switch.plug("b", 2, Options::default());
        acquaint(&mut [&mut a, &mut b]);
        Scene { switch, a, b }
    }

    /// The others talk as if nothing had happened.
    #[track_caller]
    fn others_talk(&mut self) {
        converse(&mut self.a, &mut self.b, 1, 40);
    }

    /// Lets the others take what the villain made the switch say: some noise is a SEND_RARP.
    #[track_caller]
    fn swallow(&mut self) {
        let ends =
            [(self.a.mac, self.b.mac), (self.b.mac, self.a.mac)].map(|(to, from)| frame(to, from, 64, 7));
        self.b.send(&ends[0]);
        while self.a.receive_plain() != ends[0] {}
        self.a.send(&ends[1]);
        while self.b.receive_plain() != ends[1] {}
    }

    /// The villain, reformed, sends and receives.
    #[track_caller]
    fn villain_is_heard(&mut self, villain: &mut Raw) {
        self.switch.until_state("villain", PortState::Up);
        let hello = frame(Mac::BROADCAST, VILLAIN, 200, 1);
        villain.send(&hello);
        assert_eq!((self.a.receive_plain(), self.b.receive_plain()), (hello.clone(), hello));
        villain.post(8);
        let answer = frame(VILLAIN, self.a.mac, 300, 2);
        self.a.send(&answer);
        assert_eq!(villain.receive_first(300), answer);
    }
}

/// A message of a header (request, flags, size) and a payload.
fn message(request: u32, flags: u32, size: u32, payload: &[u8]) -> Vec<u8> {
    [&request.to_le_bytes()[..], &flags.to_le_bytes(), &size.to_le_bytes(), payload].concat()
}

/// Protocol version 1, in the flags.
const V1: u32 = 1;
/// The flag of a message whose result is wanted (REPLY_ACK).
const NEED_REPLY: u32 = 8;

/// Waits until the other end has closed the connection.
#[track_caller]
fn until_closed(stream: &Stream) {
    stream.set_nonblocking(true).unwrap();
    eventually("the switch closes the connection", || match stream.recv(&mut [0; 4096], &mut Vec::new()) {
        Ok(received) => (received.bytes == 0).then_some(()),
        Err(error) => (error.kind() != std::io::ErrorKind::WouldBlock).then_some(()),
    });
}

#[test]
fn bytes_that_are_no_protocol_end_only_their_connection() {
    let place = Place::new();
    let mut scene = Scene::new(&place);
    let before = scene.switch.process.descriptors();
    let closing: [(&str, Vec<u8>); 4] = [
        ("another version", message(1, 2, 0, &[])),
        ("a payload that is too large", message(1, V1, MAX_PAYLOAD as u32 + 1, &[])),
        ("the largest size there is", message(5, V1, u32::MAX, &[])),
        ("a reply", message(1, V1 | 4, 8, &[0; 8])),
    ];
    for (what, bytes) in &closing {
        let stream = scene.switch.connect("villain");
        assert_eq!(stream.send(bytes, &[]).unwrap(), bytes.len(), "{what}");
        until_closed(&stream);
        scene.others_talk();
    }
    scene.switch.process.until_logged_times("the connection is closed", closing.len());
    // Cut off in the header, and in the payload.
    for len in [0, 1, 11, 12, 15] {
        let stream = scene.switch.connect("villain");
        let bytes = message(Request::SetFeatures as u32, V1, 8, &[0; 8]);
        if len > 0 {
            stream.send(&bytes[..len], &[]).unwrap();
        }
        drop(stream);
    }
    // Random, with and without a header that makes sense.
    for seed in 0..60 {
        let stream = scene.switch.connect("villain");
        let noise = pattern(seed, 600);
        let bytes = match seed % 3 {
            0 => noise,
            // Any request and any payload.
            1 => message(u32::from(noise[0]) % 48, V1, 100, &noise[..100]),
            // A train of messages of the right sizes for many requests, all of them asking for an answer.
            _ => noise
                .chunks_exact(10)
                .flat_map(|part| message(u32::from(part[0]) % 48, V1 | 8, 8, &part[..8]))
                .collect(),
        };
        // The switch may have had enough before the end.
        let _ = stream.send(&bytes, &[]);
    }
    eventually("all of that is served", || {
        let port = scene.switch.port("villain");
        // Those that were cut off before the end of their first message are none.
        (port.counters["connections"] == 4 + 60 && port.state == PortState::Listening).then_some(())
    });
    scene.swallow();
    scene.others_talk();
    let mut late = scene.switch.plug("villain", 3, Options::default());
    converse(&mut late, &mut scene.a, 1, 20);
    drop(late);
    scene.switch.process.until_no_more_than(&before);
    scene.switch.stop();
}

#[test]
fn descriptors_that_nobody_asked_for_are_closed() {
    let place = Place::new();
    let mut scene = Scene::new(&place);
    let before = scene.switch.process.descriptors();
    let events: Vec<EventFd> = (0..64).map(|_| EventFd::new().unwrap()).collect();
    let fds: Vec<BorrowedFd<'_>> = events.iter().map(AsFd::as_fd).collect();
    // More than any message carries.
    let stream = scene.switch.connect("villain");
    stream.send(&message(Request::SetMemTable as u32, V1, 8, &[0; 8]), &fds).unwrap();
    until_closed(&stream);
    // As many as one may carry, with a message that takes none, with one that takes one, and with one that
    // is never completed.
    let stream = scene.switch.connect("villain");
    for request in [Request::SetOwner, Request::SetFeatures, Request::SetVringKick, Request::SetMemTable] {
        stream.send(&message(request as u32, V1, 8, &[0; 8]), &fds[..32]).unwrap();
    }
    stream.send(&message(200, V1, 0, &[]), &fds[..8]).unwrap();
    // An answer shows that all of these were served.
    stream.send(&message(Request::GetFeatures as u32, V1, 0, &[]), &[]).unwrap();
    assert_eq!(stream.recv(&mut [0; 64], &mut Vec::new()).unwrap().bytes, 20);
    let eventfds = |fds: &[String]| fds.iter().filter(|fd| *fd == "anon_inode").count();
    // A thread of the port closes them.
    eventually("what was not asked for is closed", || {
        (eventfds(&scene.switch.process.descriptors()) == eventfds(&before)).then_some(())
    });
    stream.send(&message(Request::SetVringCall as u32, V1, 8, &[0; 4]), &fds[..1]).unwrap();
    drop(stream);
    scene.switch.process.until_no_more_than(&before);
    scene.others_talk();
    scene.switch.stop();
}

/// Sends a descriptor as the channel of the switch's own requests.
fn send_channel(stream: &Stream, fd: BorrowedFd<'_>) {
    let features = message(Request::SetFeatures as u32, V1, 8, &(1u64 << 30).to_ne_bytes());
    let protocol = ProtocolFeatures::BACKEND_REQ | ProtocolFeatures::REPLY_ACK;
    let protocol = message(Request::SetProtocolFeatures as u32, V1, 8, &protocol.bits().to_ne_bytes());
    stream.send(&[&features[..], &protocol].concat(), &[]).unwrap();
    stream.send(&message(Request::SetBackendReqFd as u32, V1 | NEED_REPLY, 0, &[]), &[fd]).unwrap();
}

/// Passes a descriptor as that channel, and waits until it is taken for it.
#[track_caller]
pub fn pass_channel(stream: &Stream, fd: BorrowedFd<'_>) {
    send_channel(stream, fd);
    let mut answer = [0; 64];
    assert_eq!(stream.recv(&mut answer, &mut Vec::new()).unwrap().bytes, 20);
    assert_eq!(answer[12..20], [0; 8]);
}

#[test]
fn a_front_end_that_leaves_its_own_end_with_the_switch_is_seen_to_go() {
    let place = Place::new();
    let mut scene = Scene::new(&place);
    // As the channel of the switch's own requests, or of anything else: that ends the connection.
    let stream = scene.switch.connect("villain");
    send_channel(&stream, stream.as_fd());
    until_closed(&stream);
    drop(stream);
    scene.switch.until_state("villain", PortState::Listening);
    // Unread in a channel that is one, whose other end lies there, too.
    let stream = scene.switch.connect("villain");
    let (given, other) = Stream::pair().unwrap();
    pass_channel(&stream, given.as_fd());
    other.send(b"x", &[stream.as_fd(), other.as_fd()]).unwrap();
    drop((given, other, stream));
    scene.switch.until_state("villain", PortState::Listening);
    // Unread in connections that wait for the end of the first one, each of which has the one before.
    let stream = scene.switch.connect("villain");
    let hello = message(Request::GetFeatures as u32, V1, 0, &[]);
    stream.send(&hello, &[]).unwrap();
    assert_eq!(stream.recv(&mut [0; 64], &mut Vec::new()).unwrap().bytes, 20);
    let mut last = stream;
    for _ in 0..12 {
        let next = scene.switch.connect("villain");
        next.send(&hello, &[last.as_fd(), next.as_fd()]).unwrap();
        last = next;
    }
    drop(last);
    scene.switch.until_state("villain", PortState::Listening);
    // Likewise, but sent out of band: behind nothing, and behind what may wait.
    for before in [0, hello.len()] {
        let stream = scene.switch.connect("villain");
        stream.send(&hello, &[]).unwrap();
        assert_eq!(stream.recv(&mut [0; 64], &mut Vec::new()).unwrap().bytes, 20);
        let waits = scene.switch.connect("villain");
        let _ = waits.send(&hello[..before], &[]);
        send_out_of_band(&waits, &[stream.as_fd(), waits.as_fd()]);
        drop((stream, waits));
        scene.switch.until_state("villain", PortState::Listening);
    }
    scene.others_talk();
    scene.switch.stop();
}

/// Sends a byte with descriptors in a way that other bytes are not sent in, where the kernel has it for Unix sockets.
fn send_out_of_band(stream: &Stream, fds: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
    let sent = rustix::net::sendmsg(stream, &[IoSlice::new(b"o")], &mut control, SendFlags::OOB);
    assert!(matches!(sent, Ok(1) | Err(Errno::OPNOTSUPP)), "{sent:?}");
}

/// Behind a socket that lingers, in the queue of what the switch is to close, lies another one, and in that the front end's own end of the connection.
#[test]
fn d1_what_lies_behind_a_descriptor_that_cannot_be_closed_keeps_no_port() {
    let place = Place::new();
    let mut scene = Scene::new(&place);
    let hello = message(Request::GetFeatures as u32, V1, 0, &[]);
    let owner = message(Request::SetOwner as u32, V1, 0, &[]);
    let mut peers = Vec::new();
    // The second one finds what the first one has left.
    for _ in 0..2 {
        let stream = scene.switch.connect("villain");
        stream.send(&hello, &[]).unwrap();
        stream.set_timeout(Some(PATIENCE)).unwrap();
        assert_eq!(stream.recv(&mut [0; 64], &mut Vec::new()).unwrap().bytes, 20);
        let (ours, peer) = lingering();
        peers.push(peer);
        // The switch has the last copy when it refuses the message.
        stream.send(&owner[..4], &[ours.as_fd()]).unwrap();
        let_go(ours);
        scene.others_talk();
        stream.send(&owner[4..], &[]).unwrap();
        let (outer, inner) = Stream::pair().unwrap();
        inner.send(b"x", &[stream.as_fd()]).unwrap();
        stream.send(&owner, &[outer.as_fd()]).unwrap();
        drop((stream, outer, inner));
        scene.switch.until_state("villain", PortState::Listening);
    }
    scene.switch.process.until_logged("descriptors that front ends have passed cannot be closed");
    scene.others_talk();
    drop(peers);
    scene.switch.stop();
}

/// Messages that stop rings are read a few at a time; whoever has sent thousands and is gone is not waited for.
#[test]
fn a_front_end_that_is_gone_is_let_go_of_though_its_messages_are_rationed() {
    let place = Place::new();
    let mut scene = Scene::new(&place);
    let mut villain = Raw::plug(scene.switch.connect("villain"));
    villain.post(8);
    scene.switch.until_state("villain", PortState::Up);
    let enable = |on: u32| {
        let state = [0u32.to_ne_bytes(), on.to_ne_bytes()].concat();
        message(Request::SetVringEnable as u32, V1, 8, &state)
    };
    let toggles = [enable(0), enable(1)].concat().repeat(1500);
    let stream = villain.connection.frontend().as_fd().try_clone_to_owned().unwrap();
    let stream = Stream::from_fd(stream).unwrap();
    let mut sent = 0;
    eventually("all is sent", || {
        sent += stream.send(&toggles[sent..], &[]).unwrap_or_default();
        (sent == toggles.len()).then_some(())
    });
    drop((stream, villain));
    // At twenty in a second they would take longer than is waited here.
    scene.switch.until_state("villain", PortState::Listening);
    scene.others_talk();
    scene.switch.stop();
}

#[test]
fn a_front_end_that_never_reads_its_answers_is_disconnected() {
    let place = Place::new();
    let mut scene = Scene::new(&place);
    let stream = scene.switch.connect("villain");
    stream.set_nonblocking(true).unwrap();
    let question = message(Request::GetFeatures as u32, V1, 0, &[]);
    eventually("the switch hangs up", || {
        loop {
            match stream.send(&question, &[]) {
                Ok(_) => {}
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return None,
                Err(_) => return Some(()),
            }
        }
    });
    scene.others_talk();
    scene.switch.stop();
}

/// A rule that a guest can break, by the queue it breaks it on.
type Crime = (&'static str, u16, fn(&mut Raw));

const CRIMES: [Crime; 17] = [
    ("buffer in no memory", TX, |guest| {
        guest.desc(TX, 0, 0xdead_0000_0000, 64, 0, 0);
        guest.offer(TX, 0);
    }),
    ("buffer that ends behind the memory", TX, |guest| {
        guest.desc(TX, 0, BASE + SIZE - 32, 64, 0, 0);
        guest.offer(TX, 0);
    }),
    ("buffer that wraps around the address space", TX, |guest| {
        guest.desc(TX, 0, u64::MAX - 10, 64, 0, 0);
        guest.offer(TX, 0);
    }),
    ("available index that jumps", TX, |guest| guest.set_index(TX, ENTRIES + 1)),
    ("available index that goes back", TX, |guest| guest.set_index(TX, u16::MAX)),
    ("head outside the ring", TX, |guest| guest.offer(TX, ENTRIES)),
    ("chain that leaves the ring", TX, |guest| {
        guest.desc(TX, 0, BUFFERS, 64, NEXT, ENTRIES);
        guest.offer(TX, 0);
    }),
    ("loop of one descriptor", TX, |guest| {
        guest.desc(TX, 0, BUFFERS, 64, NEXT, 0);
        guest.offer(TX, 0);
    }),
    ("loop of empty descriptors", TX, |guest| {
        guest.desc(TX, 0, BUFFERS, 0, NEXT, 1);
        guest.desc(TX, 1, BUFFERS, 0, NEXT, 0);
        guest.offer(TX, 0);
    }),
    ("chain of 4 GiB", TX, |guest| {
        guest.desc(TX, 0, BUFFERS, u32::MAX, NEXT, 1);
        guest.desc(TX, 1, BUFFERS, u32::MAX, 0, 0);
        guest.offer(TX, 0);
    }),
    ("indirect table in no memory", TX, |guest| {
        guest.desc(TX, 0, BASE - 4096, 64, INDIRECT, 0);
        guest.offer(TX, 0);
    }),
    ("indirect table in an indirect table, which is itself", TX, |guest| {
        guest.table_entry(BUFFERS, 0, BUFFERS, 16, INDIRECT, 0);
        guest.desc(TX, 0, BUFFERS, 16, INDIRECT, 0);
        guest.offer(TX, 0);
    }),
    ("loop in an indirect table", TX, |guest| {
        guest.table_entry(BUFFERS, 0, BUFFERS, 1, NEXT, 0);
        guest.desc(TX, 0, BUFFERS, 32, INDIRECT, 0);
        guest.offer(TX, 0);
    }),
    ("buffer in no memory", RX, |guest| {
        guest.desc(RX, 0, 0xdead_0000_0000, 2048, WRITE, 0);
        guest.offer(RX, 0);
    }),
    ("buffer that is not to be written", RX, |guest| {
        guest.desc(RX, 0, BUFFERS, 2048, 0, 0);
        guest.offer(RX, 0);
    }),
    ("available index that jumps", RX, |guest| guest.set_index(RX, ENTRIES + 1)),
    ("loop", RX, |guest| {
        guest.desc(RX, 0, BUFFERS, 1, WRITE | NEXT, 0);
        guest.offer(RX, 0);
    }),
];

#[test]
fn a_guest_that_breaks_the_rules_breaks_one_queue_and_a_restart_heals_it() {
    let place = Place::new();
    let mut scene = Scene::new(&place);
    let mut villain = Raw::plug(scene.switch.connect("villain"));
    scene.villain_is_heard(&mut villain);
    for (count, (what, queue, commit)) in (1..).zip(CRIMES) {
        villain.connection.stop().unwrap();
        villain.start();
        scene.switch.until_state("villain", PortState::Up);
        commit(&mut villain);
        // A receiveq is looked at when there is something for it; the others receive it all the same.
        let bait = frame(Mac::BROADCAST, scene.a.mac, 60, count);
        scene.a.send(&bait);
        assert_eq!(scene.b.receive_plain(), bait);
        let port = scene.switch.until_state("villain", PortState::Broken);
        let [rx, tx] = &port.queues[..] else { panic!("{:?}", port.queues) };
        let (broken, whole) = if queue == RX { (rx, tx) } else { (tx, rx) };
        assert!(broken.broken.is_some(), "{what}");
        assert_eq!((&whole.broken, whole.started, whole.enabled), (&None, true, true), "{what}");
        // The front end is told, by the queue's event; it is counted and logged once, however often the
        // queue is kicked and sent to.
        let errors = villain.errors.each_ref().map(|event| event.drain().unwrap());
        assert_eq!(errors, [queue == RX, queue == TX], "{what}");
        villain.kick(queue);
        scene.others_talk();
        scene.a.send(&bait);
        assert_eq!(scene.b.receive_plain(), bait);
        let port = scene.switch.port("villain");
        assert_eq!(port.counters["ring_errors"], u64::from(count), "{what}");
        assert_eq!(port.state, PortState::Broken, "{what}: broken until it is reset");
        assert_eq!(scene.switch.port("a").state, PortState::Up);
    }
    villain.connection.stop().unwrap();
    villain.start();
    scene.villain_is_heard(&mut villain);
    assert!(scene.switch.process.logged(BROKEN) <= CRIMES.len());
    scene.switch.stop();
}

/// A rule that the driver of a packed transmitq can break, by what it writes into the ring, which has that many entries, and its buffers.
type PackedCrime = (&'static str, u16, fn(&Front));

const PACKED_CRIMES: [PackedCrime; 9] = [
    ("loop of all descriptors", ENTRIES, |front| chain(front, 0..ENTRIES, 64)),
    ("loop of empty descriptors", ENTRIES, |front| chain(front, 0..ENTRIES, 0)),
    ("more descriptors than a chain may have", 2048, |front| {
        chain(front, 0..1025, 1);
        front.rings[1].describe_packed(1025, front.buffers, 1, 0, AVAIL).unwrap();
    }),
    ("chain of 4 GiB", ENTRIES, |front| {
        front.rings[1].describe_packed(1, front.buffers, u32::MAX, 0, AVAIL).unwrap();
        front.rings[1].describe_packed(0, front.buffers, u32::MAX, 0, AVAIL | NEXT).unwrap();
    }),
    ("buffer in no memory", ENTRIES, |front| {
        front.rings[1].describe_packed(0, 0xdead_0000_0000, 64, 0, AVAIL).unwrap();
    }),
    ("indirect table in no memory", ENTRIES, |front| {
        front.rings[1].describe_packed(0, 0xdead_0000_0000, 64, 0, AVAIL | INDIRECT).unwrap();
    }),
    ("indirect table that ends within a descriptor", ENTRIES, |front| {
        front.rings[1].describe_packed(0, front.buffers, 17, 0, AVAIL | INDIRECT).unwrap();
    }),
    ("indirect table that is followed by a descriptor", ENTRIES, |front| {
        front.write(0, &descriptor(front.buffers, 64)).unwrap();
        front.rings[1].describe_packed(1, front.buffers, 64, 0, AVAIL).unwrap();
        front.rings[1].describe_packed(0, front.buffers, 16, 0, AVAIL | INDIRECT | NEXT).unwrap();
    }),
    ("indirect table of more descriptors than a chain may have", ENTRIES, |front| {
        front.write(0, &descriptor(front.buffers, 1).repeat(1025)).unwrap();
        front.rings[1].describe_packed(0, front.buffers, 16 * 1025, 0, AVAIL | INDIRECT).unwrap();
    }),
];

/// Makes descriptors of a packed transmitq available that all go on, the first one last.
fn chain(front: &Front, range: Range<u16>, len: u32) {
    for at in range.rev() {
        front.rings[1].describe_packed(at, front.buffers, len, 0, AVAIL | NEXT).unwrap();
    }
}

/// A descriptor of an indirect table in a packed ring.
fn descriptor(addr: u64, len: u32) -> Vec<u8> {
    [&addr.to_le_bytes()[..], &len.to_le_bytes(), &[0; 4]].concat()
}

/// The shapes that a driver of a split ring is tried with, and those of packed rings that went round for ever elsewhere.
#[test]
fn a_guest_that_breaks_the_rules_of_a_packed_ring_breaks_it_and_a_new_connection_heals_it() {
    let place = Place::new();
    let mut scene = Scene::new(&place);
    let features = Features::RING_PACKED | Features::INDIRECT_DESC;
    for (count, (what, transmit, commit)) in (1..).zip(PACKED_CRIMES) {
        let shape = Shape { features, transmit, ..Shape::default() };
        let mut villain = Front::new(&place.socket("villain"), shape).unwrap();
        villain.start().unwrap();
        scene.switch.until_state("villain", PortState::Up);
        commit(&villain);
        villain.rings[1].kick.signal().unwrap();
        let port = scene.switch.until_state("villain", PortState::Broken);
        let [rx, tx] = &port.queues[..] else { panic!("{:?}", port.queues) };
        assert!(tx.broken.is_some() && rx.broken.is_none(), "{what}: {:?}", port.queues);
        villain.rings[1].kick.signal().unwrap();
        scene.others_talk();
        let port = scene.switch.port("villain");
        assert_eq!(port.counters["ring_errors"], count, "{what}");
        drop(villain);
    }
    // A ring that breaks no rule, in the same layout.
    let shape = Shape { features, transmit: ENTRIES, ..Shape::default() };
    let mut reformed = Front::new(&place.socket("villain"), shape).unwrap();
    reformed.start().unwrap();
    scene.switch.until_state("villain", PortState::Up);
    let hello = frame(Mac::BROADCAST, VILLAIN, 200, 1);
    let len = reformed.write_frame(0, &Header::default(), &hello).unwrap() as u32;
    reformed.rings[1].describe_packed(0, reformed.buffers, len, 0, AVAIL).unwrap();
    reformed.rings[1].kick.signal().unwrap();
    assert_eq!((scene.a.receive_plain(), scene.b.receive_plain()), (hello.clone(), hello));
    scene.switch.stop();
}

#[test]
fn a_broken_queue_is_logged_once() {
    let place = Place::new();
    let mut scene = Scene::new(&place);
    let mut villain = Raw::plug(scene.switch.connect("villain"));
    scene.switch.until_state("villain", PortState::Up);
    for _ in 0..50 {
        villain.offer(TX, ENTRIES);
        scene.others_talk();
    }
    scene.switch.until_state("villain", PortState::Broken);
    scene.switch.process.until_logged_times(BROKEN, 1);
    let line = scene.switch.process.log().into_iter().find(|line| line.contains(BROKEN)).unwrap();
    assert!(line.contains("villain") && line.contains("transmitq"), "{line}");
    scene.switch.stop();
}

/// VIRTIO 1.4, 2.4, by way of RESET_DEVICE; and by a new connection.
#[test]
fn a_reset_heals_broken_queues_and_so_does_a_new_connection() {
    let place = Place::new();
    let mut scene = Scene::new(&place);
    let mut villain = Raw::plug(scene.switch.connect("villain"));
    for reset in [true, false] {
        scene.switch.until_state("villain", PortState::Up);
        villain.offer(TX, ENTRIES);
        scene.switch.until_state("villain", PortState::Broken);
        if reset {
            villain.connection.frontend().reset_device().unwrap();
            assert_eq!(scene.switch.port("villain").state, PortState::Down);
            villain.start();
        } else {
            drop(villain);
            villain = Raw::plug(scene.switch.connect("villain"));
        }
        scene.villain_is_heard(&mut villain);
    }
    scene.switch.stop();
}

/// A restart with rings as they are breaks the queue again, at once, and as cleanly.
#[test]
fn a_restart_on_garbage_breaks_the_queue_again() {
    let place = Place::new();
    let mut scene = Scene::new(&place);
    let mut villain = Raw::plug(scene.switch.connect("villain"));
    for seed in 0..30 {
        villain.connection.stop().unwrap();
        for queue in 0..2u64 {
            let ring = BASE + queue * 0x1_0000;
            villain.write(ring, &pattern(2 * seed + queue as u32, 0xc000));
        }
        villain.start_as_is();
        villain.kick(TX);
        let bait = frame(Mac::BROADCAST, scene.a.mac, 60, seed);
        scene.a.send(&bait);
        loop {
            // Noise may, by chance, have been a frame.
            if scene.b.receive().frame == bait {
                break;
            }
        }
        scene.a.pump();
        while scene.a.take().is_some() {}
    }
    scene.switch.until_state("villain", PortState::Broken);
    scene.others_talk();
    villain.connection.stop().unwrap();
    villain.start();
    scene.villain_is_heard(&mut villain);
    scene.switch.stop();
}

#[test]
fn rings_outside_memory_are_refused_and_the_session_goes_on() {
    let place = Place::new();
    let mut scene = Scene::new(&place);
    let mut villain = Raw::plug(scene.switch.connect("villain"));
    scene.switch.until_state("villain", PortState::Up);
    let frontend = villain.connection.frontend();
    let refused = |result: Result<(), FrontendError>| matches!(result, Err(FrontendError::Refused(_)));
    // Of a running ring: it runs on as it was.
    assert!(refused(frontend.set_vring_addr(1, 0x10_0000, BASE, BASE)));
    assert!(refused(frontend.set_vring_addr(1, BASE, BASE + SIZE - 16, BASE)));
    assert!(refused(frontend.set_vring_addr(1, !15, BASE, BASE)));
    assert!(refused(frontend.set_vring_num(1, 3)));
    assert!(refused(frontend.set_vring_base(1, 7)));
    assert!(refused(frontend.set_vring_num(200, 256)));
    scene.villain_is_heard(&mut villain);
    // Of a stopped one: it does not start.
    villain.connection.stop().unwrap();
    let frontend = villain.connection.frontend();
    frontend.set_vring_addr(1, 0x10_0000, BASE, BASE).unwrap();
    let kick = EventFd::new().unwrap();
    assert!(refused(frontend.set_vring_kick(1, Some(kick.as_fd()))));
    assert_eq!(scene.switch.port("villain").state, PortState::Down);
    scene.switch.process.until_logged("not inside one shared memory region");
    scene.others_talk();
    // The kick stays said until the ring is stopped.
    villain.connection.frontend().get_vring_base(1).unwrap();
    villain.start();
    scene.villain_is_heard(&mut villain);
    scene.switch.stop();
}

#[test]
fn h1_a_call_event_that_blocks_while_frames_are_delivered_costs_its_session() {
    let place = Place::new();
    let switch = place.switch(&["a", "b", "trap"]);
    let mut a = switch.plug("a", 1, Options::default());
    let mut b = switch.plug("b", 2, Options::default());
    let mut trap = switch.plug("trap", 3, Options::default());
    acquaint(&mut [&mut a, &mut b, &mut trap]);
    trap.set_trap();
    a.send(&frame(trap.mac, a.mac, 60, 1));
    converse(&mut a, &mut b, 2, 20);
    switch.process.until_logged("its call event blocks whoever signals it");
    switch.until("trap", "out of service", |port| port.fault.is_some() && port.state == PortState::Down);
    // What was delivered is there, for a guest that looks.
    assert_eq!(trap.receive_plain().len(), 60);
    drop(trap);
    converse(&mut a, &mut b, 100, 20);
    switch.stop();
}

/// A call event that the front end makes blocking again, and fills, once the switch has it.
pub fn spring(trap: &EventFd) {
    let flags = rustix::fs::fcntl_getfl(trap).unwrap();
    rustix::fs::fcntl_setfl(trap, flags - rustix::fs::OFlags::NONBLOCK).unwrap();
    trap.drain().unwrap();
    rustix::io::write(trap, &(u64::MAX - 1).to_ne_bytes()).unwrap();
}

#[test]
fn h1_a_call_event_that_blocks_while_a_command_is_carried_out_stops_nobody_and_costs_its_session() {
    let place = Place::new();
    let mut scene = Scene::new(&place);
    let mut villain = Raw::plug(scene.switch.connect("villain"));
    scene.switch.until_state("villain", PortState::Up);
    let (trap, kick) = (EventFd::new().unwrap(), EventFd::new().unwrap());
    villain.connection.frontend().set_vring_call(RX, Some(trap.as_fd())).unwrap();
    // The ring is started anew for its kick, and a ring that starts is called. Nothing else wakes the worker.
    spring(&trap);
    let _ = villain.connection.frontend().set_vring_kick(RX, Some(kick.as_fd()));
    scene.others_talk();
    let port = scene.switch.until("villain", "out of service", |port| port.fault.is_some());
    assert_eq!(port.fault.as_deref(), Some("its call event blocks whoever signals it"));
    scene.switch.until_state("villain", PortState::Down);
    // Whoever comes next waits in the backlog.
    let again = scene.switch.connect("villain");
    scene.others_talk();
    assert_eq!(scene.switch.port("villain").counters["connections"], 1);
    drop(again);
    scene.switch.stop();
}

#[test]
fn h1_an_error_event_that_blocks_when_a_ring_breaks_stops_nobody_and_costs_its_session() {
    let place = Place::new();
    let mut scene = Scene::new(&place);
    let mut villain = Raw::plug(scene.switch.connect("villain"));
    scene.switch.until_state("villain", PortState::Up);
    spring(&villain.errors[usize::from(TX)]);
    // A head that there is not, of which the front end is to be told.
    villain.offer(TX, ENTRIES);
    scene.others_talk();
    let port = scene.switch.until("villain", "out of service", |port| port.fault.is_some());
    assert_eq!(port.fault.as_deref(), Some("its error event blocks whoever signals it"));
    assert_eq!((port.state, port.counters["ring_errors"]), (PortState::Down, 1));
    scene.others_talk();
    scene.switch.stop();
}

#[test]
fn m3_a_front_end_that_connects_again_and_again_gains_no_log_lines() {
    let place = Place::new();
    let mut scene = Scene::new(&place);
    let before = scene.switch.process.log().len();
    let since = Instant::now();
    // No such message; the answer to the last one shows that all were served.
    let unknown = message(200, V1, 0, &[]).repeat(8);
    let features = message(Request::GetFeatures as u32, V1, 0, &[]);
    for _ in 0..60 {
        let stream = scene.switch.connect("villain");
        stream.send(&[&unknown[..], &features].concat(), &[]).unwrap();
        assert_eq!(stream.recv(&mut [0; 64], &mut Vec::new()).unwrap().bytes, 20);
    }
    scene.others_talk();
    // What the port and its sessions may log in each interval of ten seconds, of which one had begun before.
    let intervals = since.elapsed().as_secs() as usize / 10 + 2;
    let lines = scene.switch.process.log().len() - before;
    assert!(lines <= intervals * (12 + 8 + 1), "{lines} lines in {intervals} intervals");
    scene.switch.stop();
}

#[test]
fn h1_call_events_that_are_set_without_end_hold_nobody_and_the_last_one_is_called() {
    let place = Place::new();
    let mut scene = Scene::new(&place);
    let mut villain = Raw::plug(scene.switch.connect("villain"));
    scene.switch.until_state("villain", PortState::Up);
    let events: Vec<EventFd> = (0..200).map(|_| EventFd::new().unwrap()).collect();
    for event in &events {
        villain.connection.frontend().set_vring_call(RX, Some(event.as_fd())).unwrap();
    }
    let last = events.last().unwrap();
    eventually("the last event is called", || last.drain().unwrap().then_some(()));
    scene.others_talk();
    scene.villain_is_heard(&mut villain);
    assert_eq!(scene.switch.port("villain").fault, None);
    scene.switch.stop();
}

/// Bytes of memory into which holes are punched, which takes some tens of milliseconds each time.
const PUNCHED: u64 = 256 << 20;

#[test]
fn a_front_end_that_punches_holes_under_the_worker_is_found_and_nobody_else_is_blamed() {
    if !may("the kernel says what threads wait for", std::fs::read("/proc/self/wchan").is_ok()) {
        return;
    }
    let place = Place::new();
    let switch = place.switch(&["a", "b", "villain", "asks"]);
    let mut a = switch.plug("a", 1, Options::default());
    let mut b = switch.plug("b", 2, Options::default());
    acquaint(&mut [&mut a, &mut b]);
    let mut scene = Scene { switch, a, b };
    let mut asks = Raw::plug(scene.switch.connect("asks"));
    let mut villain = Raw::plug(scene.switch.connect("villain"));
    let file = rustix::fs::memfd_create("punched", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, PUNCHED).unwrap();
    let at = BASE + (1 << 32);
    let region = RegionSpec { guest_addr: at, size: PUNCHED, user_addr: at, mmap_offset: 0 };
    villain.connection.frontend().add_mem_reg(region, file.as_fd()).unwrap();
    scene.switch.until_state("villain", PortState::Up);
    for index in 0..ENTRIES {
        let frame = at + u64::from(index) * (PUNCHED / u64::from(ENTRIES));
        villain.desc(TX, index, frame, 1024, 0, 0);
    }
    let over = AtomicBool::new(false);
    let port = std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    for flags in
                        [FallocateFlags::empty(), FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE]
                    {
                        rustix::fs::fallocate(&file, flags, 0, PUNCHED).unwrap();
                    }
                }
            });
        }
        let mut offered = 0u16;
        let port = eventually("the villain is out of service", || {
            while offered.wrapping_sub(villain.used_index(TX)) < ENTRIES {
                villain.offer(TX, offered % ENTRIES);
                offered = offered.wrapping_add(1);
            }
            // Meanwhile another front end has its ring stopped, for which its worker is needed.
            asks.connection.frontend().get_vring_base(TX).unwrap();
            asks.start();
            Some(scene.switch.port("villain")).filter(|port| port.fault.is_some())
        });
        over.store(true, Ordering::Relaxed);
        port
    });
    assert_eq!(port.state, PortState::Down);
    assert_eq!(port.fault.unwrap(), "it punches holes into its memory while the switch uses it");
    scene.switch.process.until_logged("it punches holes into its memory");
    // Neither the traffic of the others nor their connections have suffered.
    scene.others_talk();
    assert_eq!(["a", "b", "asks"].map(|port| scene.switch.port(port).counters["connections"]), [1; 3]);
    scene.switch.stop();
}
