//! Sends every message of the table at the bounds of its payload and descriptors, and checks how it
//! is refused beyond them.

use std::os::fd::{AsFd, BorrowedFd};

use ringferry_sys::eventfd::EventFd;
use ringferry_sys::socket::Stream;
use ringferry_vhost_user::message::{
    ConfigHeader, F_PROTOCOL_FEATURES, F_VERSION_1, FLAG_NEED_REPLY, FLAG_REPLY, Header, MAX_FDS,
    MAX_PAYLOAD, Reply, Request, TABLE, VERSION,
};
use ringferry_vhost_user::{Offer, ProtocolFeatures, SessionError, WireError};
use zerocopy::{FromBytes, IntoBytes};

use crate::rig::{Event, Rig, copies_of, offer};

/// Sends a message that must be refused, and checks that the refusal has the row's form: an answer
/// that says failure, or the end of the session where no answer can say so.
fn refused(mut rig: Rig, request: Request, payload: &[u8], fds: &[BorrowedFd<'_>]) {
    let row = request.spec();
    rig.send(request as u32, VERSION | FLAG_NEED_REPLY, payload, fds);
    match (row.reply, rig.serve()) {
        (Reply::Value, Err(SessionError::Unanswerable { message, .. })) => assert_eq!(message, row.name),
        (Reply::Config, Ok(_)) => assert!(rig.reply().unwrap().1.is_empty()),
        (Reply::Ack | Reply::Status | Reply::Echo, Ok(_)) => {
            let (header, payload) = rig.reply().unwrap_or_else(|| panic!("{request} was not answered"));
            assert_eq!(header.request, request as u32);
            assert_ne!(u64::read_from_bytes(&payload).unwrap(), 0, "{request} with {payload:x?}");
        }
        (_, outcome) => panic!("{request}: {outcome:?}"),
    }
    assert!(rig.reply().is_none());
    assert_eq!(rig.session.counters().rejected, 1);
    assert!(rig.dev.take().iter().all(|event| *event == Event::Memory(0)));
}

#[test]
fn payloads_outside_their_bounds_are_refused() {
    for row in TABLE {
        let event = EventFd::new().unwrap();
        let fds = vec![event.as_fd(); row.fds.0];
        if row.min > 0 {
            refused(Rig::negotiated(), row.request, &vec![0; row.min - 1], &fds);
        }
        if row.max < MAX_PAYLOAD {
            refused(Rig::negotiated(), row.request, &vec![0; row.max + 1], &fds);
        }
        assert_eq!(copies_of(&event), 1, "{}", row.name);
    }
}

#[test]
fn descriptors_outside_their_bounds_are_refused_and_closed() {
    for row in TABLE {
        let event = EventFd::new().unwrap();
        let payload = vec![0; row.min];
        if row.fds.0 > 0 {
            refused(Rig::negotiated(), row.request, &payload, &vec![event.as_fd(); row.fds.0 - 1]);
        }
        if row.fds.1 < MAX_FDS {
            refused(Rig::negotiated(), row.request, &payload, &vec![event.as_fd(); row.fds.1 + 1]);
        }
        assert_eq!(copies_of(&event), 1, "{}", row.name);
    }
}

#[test]
fn messages_whose_feature_was_not_agreed_on_are_refused() {
    use ringferry_vhost_user::message::Needs;
    for row in TABLE {
        let old = Offer { protocol: ProtocolFeatures::empty(), ..offer() };
        let rig = match row.needs {
            Needs::Nothing => continue,
            Needs::ProtocolFeatures | Needs::Offered(_) => Rig::with(old),
            Needs::Negotiated(_) | Needs::Virtio(_) => Rig::new(),
        };
        let event = EventFd::new().unwrap();
        let (payload, fds) = (vec![0; row.min], vec![event.as_fd(); row.fds.0]);
        let mut rig = rig;
        rig.send(row.request as u32, VERSION, &payload, &fds);
        let outcome = rig.serve();
        match row.reply {
            Reply::Value => {
                assert!(matches!(outcome, Err(SessionError::Unanswerable { .. })), "{}", row.name);
            }
            Reply::Config => assert!(rig.reply().unwrap().1.is_empty()),
            // A front end that may not send the message does not wait for a reply.
            Reply::Ack | Reply::Status | Reply::Echo => {
                assert!(outcome.is_ok() && rig.reply().is_none(), "{}", row.name);
            }
        }
        assert_eq!(rig.session.counters().rejected, 1, "{}", row.name);
        assert_eq!(copies_of(&event), 1, "{}", row.name);
    }
}

#[test]
fn unknown_messages_are_refused_and_the_session_goes_on() {
    let mut rig = Rig::negotiated();
    let event = EventFd::new().unwrap();
    for number in [0, TABLE.len() as u32 + 1, 1000, u32::MAX] {
        rig.send(number, VERSION, &[1; 100], &[event.as_fd(); 3]);
        rig.serve().unwrap();
        assert!(rig.reply().is_none());
        rig.send(number, VERSION | FLAG_NEED_REPLY, &[], &[]);
        rig.serve().unwrap();
        let (header, payload) = rig.reply().unwrap();
        assert_eq!((header.request, header.flags), (number, VERSION | FLAG_REPLY));
        assert_ne!(u64::read_from_bytes(&payload).unwrap(), 0);
    }
    assert_eq!(copies_of(&event), 1);
    assert_eq!(rig.session.counters().unexpected_fds_closed, 12);
    assert_eq!(rig.session.counters().rejected, 8);
    assert_ne!(rig.ask_u64(Request::GetFeatures), 0);
}

#[test]
fn need_reply_means_nothing_before_it_was_agreed_on() {
    let mut rig = Rig::new();
    rig.send(Request::SetOwner as u32, VERSION | FLAG_NEED_REPLY, &[], &[]);
    rig.send(1000, VERSION | FLAG_NEED_REPLY, &[], &[]);
    rig.serve().unwrap();
    assert!(rig.reply().is_none());
}

#[test]
fn need_reply_changes_nothing_for_messages_that_have_a_reply() {
    let mut rig = Rig::negotiated();
    rig.send(Request::GetFeatures as u32, VERSION | FLAG_NEED_REPLY, &[], &[]);
    rig.serve().unwrap();
    let (_, payload) = rig.reply().unwrap();
    assert_eq!(u64::read_from_bytes(&payload).unwrap(), offer().features | F_PROTOCOL_FEATURES);
    assert!(rig.reply().is_none());
}

#[test]
fn features_that_were_not_offered_are_refused() {
    let mut rig = Rig::negotiated();
    for features in [1u64 << 34, F_VERSION_1 | 1 << 26, u64::MAX] {
        assert!(!rig.ack(Request::SetFeatures, features.as_bytes(), &[]));
    }
    for protocol in [ProtocolFeatures::LOG_SHMFD.bits(), 1 << 40, u64::MAX] {
        assert!(!rig.ack(Request::SetProtocolFeatures, protocol.as_bytes(), &[]));
    }
    assert!(rig.dev.take().is_empty());
    assert_eq!(rig.session.features(), Some(F_VERSION_1));
    assert_eq!(rig.session.protocol(), offer().protocol);
    // The bit that opens protocol features is only offered with them.
    let mut rig = Rig::with(Offer { protocol: ProtocolFeatures::empty(), ..offer() });
    assert_eq!(rig.ask_u64(Request::GetFeatures), offer().features);
}

#[test]
fn broken_streams_end_the_session() {
    let header = |request, flags, size| Header { request, flags, size }.as_bytes().to_vec();
    let version = |bits| header(Request::SetOwner as u32, bits, 0);
    type Matches = fn(&SessionError) -> bool;
    let cases: [(Vec<u8>, Matches); 5] = [
        (version(0), |err| matches!(err, SessionError::Wire(WireError::Version(0)))),
        (version(2), |err| matches!(err, SessionError::Wire(WireError::Version(2)))),
        (version(VERSION | FLAG_REPLY), |err| matches!(err, SessionError::Reply)),
        (header(1, VERSION, MAX_PAYLOAD as u32 + 1), |err| {
            matches!(err, SessionError::Wire(WireError::Oversize(_)))
        }),
        (header(1, VERSION, u32::MAX), |err| matches!(err, SessionError::Wire(WireError::Oversize(_)))),
    ];
    for (bytes, is_it) in cases {
        let mut rig = Rig::negotiated();
        let event = EventFd::new().unwrap();
        rig.peer.send(&bytes, &[event.as_fd()]).unwrap();
        let err = rig.serve().unwrap_err();
        assert!(is_it(&err), "{err:?}");
        drop(rig);
        assert_eq!(copies_of(&event), 1);
    }
}

#[test]
fn more_descriptors_than_any_message_has_end_the_session() {
    for count in [MAX_FDS + 1, 64] {
        let mut rig = Rig::negotiated();
        let event = EventFd::new().unwrap();
        rig.send(Request::SetMemTable as u32, VERSION, &[0; 8], &vec![event.as_fd(); count]);
        assert!(matches!(rig.serve(), Err(SessionError::Wire(WireError::TooManyFds))));
        drop(rig);
        assert_eq!(copies_of(&event), 1);
    }
}

#[test]
fn a_message_may_come_byte_by_byte() {
    let mut rig = Rig::negotiated();
    let event = EventFd::new().unwrap();
    let header = Header { request: Request::SetVringCall as u32, flags: VERSION | FLAG_NEED_REPLY, size: 8 };
    let message = [header.as_bytes(), 1u64.as_bytes()].concat();
    let mut fds = vec![event.as_fd()];
    for (at, byte) in message.iter().enumerate() {
        assert!(rig.reply().is_none());
        rig.peer.send(&[*byte], &std::mem::take(&mut fds)).unwrap();
        let progress = rig.serve().unwrap();
        assert_eq!(progress.messages, usize::from(at + 1 == message.len()));
    }
    assert_eq!(u64::read_from_bytes(&rig.reply().unwrap().1).unwrap(), 0);
    assert_eq!(copies_of(&event), 2);
    // Descriptors that come with a later part of a message count as its own.
    rig.peer.send(&message[..13], &[event.as_fd()]).unwrap();
    rig.serve().unwrap();
    rig.peer.send(&message[13..], &[event.as_fd()]).unwrap();
    rig.serve().unwrap();
    assert_eq!(u64::read_from_bytes(&rig.reply().unwrap().1).unwrap(), 1);
    assert_eq!(copies_of(&event), 2);
}

#[test]
fn a_front_end_that_leaves_a_message_unfinished_leaks_nothing() {
    let mut rig = Rig::negotiated();
    let event = EventFd::new().unwrap();
    let header = Header { request: Request::SetVringCall as u32, flags: VERSION, size: 8 };
    rig.peer.send(header.as_bytes(), &[event.as_fd()]).unwrap();
    rig.serve().unwrap();
    assert_eq!(copies_of(&event), 2);
    rig.session.disconnect(&mut rig.dev);
    drop(rig);
    assert_eq!(copies_of(&event), 1);
}

#[test]
fn one_call_serves_a_bounded_number_of_messages() {
    let mut rig = Rig::negotiated();
    for _ in 0..100 {
        rig.send(Request::SetOwner as u32, VERSION, &[], &[]);
    }
    let first = rig.serve().unwrap();
    assert!(first.more && first.messages < 100);
    let second = rig.serve().unwrap();
    assert!(!second.more);
    assert_eq!(first.messages + second.messages, 100);
}

#[test]
fn a_front_end_that_never_reads_is_dropped_rather_than_waited_for() {
    let mut rig = Rig::negotiated();
    let outcome = loop {
        rig.send(Request::GetFeatures as u32, VERSION, &[], &[]);
        if let Err(err) = rig.serve() {
            break err;
        }
    };
    assert!(matches!(outcome, SessionError::Wire(WireError::WouldBlock)), "{outcome}");
}

#[test]
fn get_queue_num_counts_pairs() {
    assert_eq!(Rig::negotiated().ask_u64(Request::GetQueueNum), 2);
    assert_eq!(Rig::negotiated().session.rings().len(), 4);
    let all = Offer::net(0, u16::MAX);
    assert_eq!((all.queue_num, all.max_queues), (128, 256));
}

#[test]
fn configuration_space_is_read_and_written_within_bounds() {
    let config = |offset, size: u32| {
        let mut payload = ConfigHeader { offset, size, flags: 0 }.as_bytes().to_vec();
        payload.resize(payload.len() + size as usize, 0xaa);
        payload
    };
    let mut rig = Rig::negotiated();
    let reply = rig.ask(Request::GetConfig, &config(3, 4));
    assert_eq!(reply[..12], config(3, 4)[..12]);
    assert_eq!(reply[12..], [3, 4, 5, 6]);
    assert!(rig.ack(Request::SetConfig, &config(0, 2), &[]));
    assert_eq!(rig.dev.config[..3], [0xaa, 0xaa, 2]);
    // Beyond what the device has, beyond any configuration space, and with a size that lies.
    for bad in [config(13, 4), config(200, 100), config(u32::MAX, 4)] {
        assert!(rig.ask(Request::GetConfig, &bad).is_empty());
        assert!(!rig.ack(Request::SetConfig, &bad, &[]));
    }
    let mut lie = config(0, 4);
    lie[4] = 200;
    assert!(rig.ask(Request::GetConfig, &lie).is_empty());
    assert!(!rig.ack(Request::SetConfig, &lie, &[]));
}

#[test]
fn mtu_announcement_and_status_reach_the_device() {
    let mut rig = Rig::negotiated();
    for (mtu, good) in [(0u64, false), (67, false), (68, true), (9000, true), (9001, false), (65536, false)] {
        assert_eq!(rig.ack(Request::NetSetMtu, mtu.as_bytes(), &[]), good, "{mtu}");
    }
    assert!(!rig.ack(Request::NetSetMtu, (65536u64 + 1500).as_bytes(), &[]));
    assert_eq!(rig.dev.take(), [Event::Mtu(68), Event::Mtu(9000), Event::Mtu(9001)]);
    assert!(rig.ack(Request::SendRarp, &[0x52, 0x54, 0, 1, 2, 3, 9, 9], &[]));
    assert!(rig.ack(Request::SetStatus, 0xfu64.as_bytes(), &[]));
    assert!(!rig.ack(Request::SetStatus, 0x100u64.as_bytes(), &[]));
    assert_eq!(rig.ask_u64(Request::GetStatus), 0xf);
    assert_eq!(rig.dev.take(), [Event::Announce([0x52, 0x54, 0, 1, 2, 3]), Event::Status(0xf)]);
}

#[test]
fn the_back_end_socket_is_kept_and_closed_when_replaced() {
    let mut rig = Rig::negotiated();
    let [(first, _a), (second, _b)] = [(); 2].map(|()| Stream::pair().unwrap());
    let event = EventFd::new().unwrap();
    assert!(!rig.ack(Request::SetBackendReqFd, &[], &[event.as_fd()]));
    assert_eq!(copies_of(&event), 1);
    assert!(rig.ack(Request::SetBackendReqFd, &[], &[first.as_fd()]));
    assert_eq!(copies_of(&first), 2);
    assert!(rig.ack(Request::SetBackendReqFd, &[], &[second.as_fd()]));
    assert_eq!((copies_of(&first), copies_of(&second)), (1, 2));
    rig.session.disconnect(&mut rig.dev);
    assert_eq!(copies_of(&second), 1);
}
