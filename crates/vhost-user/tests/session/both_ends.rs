//! Our front end against our back end, each in its own thread.

use std::os::fd::AsFd;
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ringferry_memory::{GuestMemory, Region, RegionSpec, SharedMem, Words};
use ringferry_ring::Parts;
use ringferry_sys::eventfd::EventFd;
use ringferry_sys::socket::Stream;
use ringferry_vhost_user::message::{F_LOG_ALL, F_PROTOCOL_FEATURES, F_VERSION_1, Header, Request, VERSION};
use ringferry_vhost_user::{
    Connection, Counters, Frontend, FrontendError, Offer, ProtocolFeatures, RingPlan, Session, Wanted,
    WireError, connect_device, connect_device_until, resume_base,
};
use rustix::event::{PollFd, PollFlags, Timespec};
use zerocopy::IntoBytes;

use crate::rig::{Event, F_MRG_RXBUF, Recorder, USER, offer};

/// Serves one connection until it ends; returns what the device saw.
fn back_end(stream: Stream, offer: Offer) -> JoinHandle<(Vec<Event>, Counters)> {
    std::thread::spawn(move || {
        let mut dev = Recorder { config: (0..16).collect(), processed: 3, ..Recorder::default() };
        let mut session = Session::new(stream, offer).unwrap();
        loop {
            rustix::event::poll(&mut [PollFd::new(&session, PollFlags::IN)], None).unwrap();
            if let Err(err) = session.on_readable(&mut dev) {
                assert!(err.is_disconnect(), "{err}");
                return (dev.events, session.counters());
            }
        }
    })
}

const WANTED: Wanted =
    Wanted { features: F_MRG_RXBUF | 1 << 34, required: F_VERSION_1, protocol: Wanted::NET_PROTOCOL };

fn connect(offer: Offer) -> (Connection, JoinHandle<(Vec<Event>, Counters)>) {
    let (ours, theirs) = Stream::pair().unwrap();
    let back = back_end(theirs, offer);
    (connect_device(ours, &WANTED).unwrap(), back)
}

fn memory() -> (SharedMem, RegionSpec) {
    let mem = SharedMem::new("guest", 0x10_0000).unwrap();
    let spec = RegionSpec { guest_addr: 0, size: 0x10_0000, user_addr: USER, mmap_offset: 0 };
    (mem, spec)
}

fn plan(index: u64, kick: &EventFd) -> RingPlan<'_> {
    let start = USER + index * 0x4000;
    RingPlan {
        size: 256,
        base: None,
        desc: start,
        avail: start + 0x1000,
        used: start + 0x2000,
        kick: Some(kick.as_fd()),
        call: Some(kick.as_fd()),
        err: None,
        enabled: true,
    }
}

fn start_and_stop(offer: Offer) -> (Vec<Event>, Counters) {
    let (mut device, back) = connect(offer);
    let (mem, spec) = memory();
    let kick = EventFd::new().unwrap();
    let mut rings = [plan(0, &kick), plan(1, &kick)];
    device.start(&[(spec, mem.fd())], &rings).unwrap();
    assert_eq!(device.stop().unwrap(), [3, 3]);
    assert!(device.stop().unwrap().is_empty());
    rings[1].base = Some(3);
    rings[1].enabled = false;
    device.start(&[(spec, mem.fd())], &rings).unwrap();
    device.set_enabled(1, true).unwrap();
    device.frontend().check().unwrap();
    drop(device);
    back.join().unwrap()
}

#[test]
fn a_device_starts_stops_and_starts_again() {
    let (events, counters) = start_and_stop(offer());
    assert_eq!(counters.rejected, 0);
    let status: Vec<_> = events.iter().filter(|event| matches!(event, Event::Status(_))).collect();
    let one_life = [3, 11, 15].map(Event::Status);
    let two_lives = [one_life.as_slice(), &[Event::Status(0)], &one_life].concat();
    assert_eq!(status, two_lives.iter().collect::<Vec<_>>());
    let started = |index, base, enabled| Event::Started { index, size: 256, base, enabled };
    let life: Vec<_> =
        events.into_iter().filter(|event| !matches!(event, Event::Call { .. } | Event::Status(_))).collect();
    let features = Event::Features(F_VERSION_1 | F_MRG_RXBUF);
    assert_eq!(
        life,
        [
            features,
            Event::Memory(1),
            // Enabled before they run: a ring that runs disabled discards what waits in it.
            started(0, 0, true),
            started(1, 0, true),
            Event::Stopped(0),
            Event::Stopped(1),
            features,
            Event::Memory(1),
            started(0, 0, true),
            started(1, 3, false),
            Event::Enabled(1, true),
            Event::Stopped(0),
            Event::Stopped(1),
            Event::Memory(0),
        ]
    );
}

#[test]
fn a_back_end_without_protocol_features_works_too() {
    let (events, counters) = start_and_stop(Offer { protocol: ProtocolFeatures::empty(), ..offer() });
    assert_eq!(counters.rejected, 0);
    assert!(events.contains(&Event::Started { index: 1, size: 256, base: 3, enabled: true }));
    assert!(!events.iter().any(|event| matches!(event, Event::Status(_) | Event::Enabled(..))));
}

#[test]
fn a_dirty_log_is_passed_and_used_while_the_feature_is_on() {
    let (mut device, back) = connect(offer().with_dirty_log());
    let (mem, spec) = memory();
    let kick = EventFd::new().unwrap();
    device.start(&[(spec, mem.fd())], &[plan(0, &kick)]).unwrap();
    let log = SharedMem::new("log", 0x1000).unwrap();
    let front = device.frontend();
    let refused = front.set_log_base(log.fd(), 32, 0);
    assert!(matches!(refused, Err(FrontendError::NotNegotiated { .. })));
    front.set_protocol_features(Wanted::NET_PROTOCOL | ProtocolFeatures::LOG_SHMFD).unwrap();
    front.set_log_base(log.fd(), 32, 0).unwrap();
    let features = F_VERSION_1 | F_MRG_RXBUF | F_PROTOCOL_FEATURES;
    front.set_features(features | F_LOG_ALL).unwrap();
    front.set_features(features).unwrap();
    front.check().unwrap();
    drop(device);
    let (events, counters) = back.join().unwrap();
    let logged: Vec<_> = events.iter().filter(|event| matches!(event, Event::Logged { .. })).collect();
    assert_eq!(logged, [true, false].map(|log| Event::Logged { rings: 1, log }).iter().collect::<Vec<_>>());
    assert_eq!(counters.rejected, 0);
}

#[test]
fn typed_calls_arrive() {
    let (mut device, back) = connect(offer());
    assert_eq!(device.negotiated().queue_num, 2);
    assert_eq!(device.negotiated().features, F_VERSION_1 | F_MRG_RXBUF);
    let (mem, spec) = memory();
    let kick = EventFd::new().unwrap();
    device.start(&[(spec, mem.fd())], &[plan(0, &kick)]).unwrap();
    let front = device.frontend();
    assert!(!front.protocol().contains(ProtocolFeatures::CONFIG));
    assert!(matches!(front.get_config(0, &mut [0; 4]), Err(FrontendError::NotNegotiated { .. })));
    front
        .set_protocol_features(
            Wanted::NET_PROTOCOL | ProtocolFeatures::CONFIG | ProtocolFeatures::RESET_DEVICE,
        )
        .unwrap();
    let mut config = [0; 4];
    front.get_config(2, &mut config).unwrap();
    assert_eq!(config, [2, 3, 4, 5]);
    assert!(matches!(front.get_config(100, &mut config), Err(FrontendError::Refused(_))));
    front.set_config(0, &[9]).unwrap();
    front.net_set_mtu(1500).unwrap();
    assert!(matches!(front.net_set_mtu(9001), Err(FrontendError::Refused("NET_SET_MTU"))));
    front.send_rarp([1, 2, 3, 4, 5, 6]).unwrap();
    assert_eq!(front.get_max_mem_slots().unwrap(), 32);
    let dimm = RegionSpec { guest_addr: 1 << 32, user_addr: 1 << 32, ..spec };
    front.add_mem_reg(dimm, mem.fd()).unwrap();
    front.rem_mem_reg(dimm).unwrap();
    assert!(matches!(front.rem_mem_reg(dimm), Err(FrontendError::Refused("REM_MEM_REG"))));
    front.set_vring_err(0, Some(kick.as_fd())).unwrap();
    front.set_vring_err(0, None).unwrap();
    front.set_status(7).unwrap();
    assert_eq!(front.get_status().unwrap(), 7);
    front.reset_device().unwrap();
    assert_eq!(front.get_status().unwrap(), 0);
    drop(device);
    let (events, counters) = back.join().unwrap();
    assert_eq!(counters.rejected, 3);
    assert!(events.contains(&Event::Announce([1, 2, 3, 4, 5, 6])));
    assert!(events.contains(&Event::Reset));
}

#[test]
fn a_packed_device_is_tracked_and_resumes_on_the_next_connection() {
    let offer = crate::rig::packed_offer();
    let (mem, spec) = memory();
    let kick = EventFd::new().unwrap();
    let rings = [plan(0, &kick), plan(1, &kick)];
    let started = |index, base| Event::Started { index, size: 256, base, enabled: true };

    let (mut device, back) = connect(offer);
    assert!(device.negotiated().packed());
    device.start(&[(spec, mem.fd())], &rings).unwrap();
    let region = device.take_inflight().unwrap();
    let view = GuestMemory::new(vec![Region::map(mem.fd(), spec).unwrap()]).unwrap();
    let area = |addr| view.user_area(addr, 256 * 16).unwrap();
    let parts = |size, plan: &RingPlan<'_>| {
        let RingPlan { desc, avail, used, .. } = *plan;
        Parts { size, desc: area(desc), driver: area(avail), device: area(used) }
    };
    assert_eq!(resume_base(0, &parts(256, &rings[0]), true, Some(&region)), Some(0x8000_8000));
    assert_eq!(resume_base(0, &parts(255, &rings[0]), true, Some(&region)), None, "another size");
    assert_eq!(resume_base(2, &parts(256, &rings[0]), true, Some(&region)), None, "another ring");
    assert_eq!(resume_base(0, &parts(256, &rings[0]), true, None), None, "not tracked");
    area(rings[1].used).store16(2, 0xfffe);
    assert_eq!(resume_base(1, &parts(256, &rings[1]), false, None), Some(0xfffe), "a split ring says itself");
    // The back end dies without a word, which is as if it had stopped where it began.
    drop(device);
    assert!(back.join().unwrap().0.contains(&started(1, 0x8000)));

    let (mut device, back) = connect(offer);
    device.set_inflight(region);
    device.start(&[(spec, mem.fd())], &rings).unwrap();
    // The recorder pretends to have used three, and says so when it is asked to stop.
    assert_eq!(device.stop().unwrap(), [0x8003_8003, 0x8003_8003]);
    assert!(device.take_inflight().is_none(), "stopped in order, nothing is in flight");
    let resumed = [RingPlan { base: Some(0x8003), ..rings[0] }, rings[1]];
    device.start(&[(spec, mem.fd())], &resumed).unwrap();
    drop(device);
    let (events, counters) = back.join().unwrap();
    assert_eq!(counters.rejected, 0);
    assert!(events.contains(&started(0, 0x8003)) && events.contains(&started(1, 0x8000)));
}

#[test]
fn a_back_end_that_does_not_track_is_used_all_the_same() {
    let mut offer = crate::rig::packed_offer();
    offer.protocol.remove(ProtocolFeatures::INFLIGHT_SHMFD);
    let (mut device, back) = connect(offer);
    let (mem, spec) = memory();
    let kick = EventFd::new().unwrap();
    device.start(&[(spec, mem.fd())], &[plan(0, &kick)]).unwrap();
    assert!(device.take_inflight().is_none());
    let front = device.frontend();
    assert!(matches!(front.get_inflight_fd(1, 256), Err(FrontendError::NotNegotiated { .. })));
    drop(device);
    assert_eq!(back.join().unwrap().1.rejected, 0);
}

/// The front end's judgement of a back end's reply to `GET_INFLIGHT_FD`.
fn inflight_answer(payload: &[u8], fds: usize) -> Result<bool, FrontendError> {
    let (ours, theirs) = Stream::pair().unwrap();
    let mut front = Frontend::new(ours).unwrap();
    let answer = |request: Request, payload: &[u8], fds: &[std::os::fd::BorrowedFd<'_>]| {
        let header = Header { request: request as u32, flags: VERSION | 4, size: payload.len() as u32 };
        theirs.send(&[header.as_bytes(), payload].concat(), fds).unwrap();
    };
    let protocol = ProtocolFeatures::INFLIGHT_SHMFD;
    answer(Request::GetProtocolFeatures, protocol.bits().as_bytes(), &[]);
    front.get_protocol_features().unwrap();
    front.set_protocol_features(protocol).unwrap();
    let file = SharedMem::new("inflight", 0x1000).unwrap();
    answer(Request::GetInflightFd, payload, &vec![file.fd(); fds]);
    let outcome = front.get_inflight_fd(2, 256).map(|region| region.is_some());
    crate::rig::until_closed(file.fd());
    outcome
}

#[test]
fn answers_about_the_in_flight_region_make_sense_or_are_errors() {
    let answer = |mmap_size: u64| [mmap_size, 0, 256 << 16 | 2].as_bytes().to_vec();
    assert!(inflight_answer(&answer(0x1000), 1).unwrap());
    assert!(inflight_answer(&answer(0x1000)[..20], 1).unwrap());
    // DPDK's way to say that it has none.
    assert!(!inflight_answer(&answer(0), 0).unwrap());
    for (payload, fds) in [(answer(0x1000), 0), (answer(0x1000), 2), (answer(0), 1), (vec![0; 16], 1)] {
        assert!(matches!(inflight_answer(&payload, fds), Err(FrontendError::BadReply("GET_INFLIGHT_FD"))));
    }
}

#[test]
fn a_back_end_that_lacks_features_is_named_in_one_line() {
    let (ours, theirs) = Stream::pair().unwrap();
    let back = back_end(theirs, Offer { features: 0, ..offer() });
    let err = connect_device(ours, &WANTED).unwrap_err();
    assert_eq!(err.to_string(), "the back end lacks required features: bit 32");
    back.join().unwrap();
}

#[test]
fn rings_outside_memory_are_refused_with_the_message_named() {
    let (mut device, back) = connect(offer());
    let (mem, spec) = memory();
    let kick = EventFd::new().unwrap();
    let outside = RingPlan { used: USER + 0x10_0000, ..plan(0, &kick) };
    let err = device.start(&[(spec, mem.fd())], &[plan(0, &kick), outside]).unwrap_err();
    assert!(matches!(err, FrontendError::Refused("SET_VRING_KICK")), "{err}");
    // The connection is as good as before.
    device.start(&[(spec, mem.fd())], &[plan(0, &kick), plan(1, &kick)]).unwrap();
    drop(device);
    assert_eq!(back.join().unwrap().1.failed_starts, 1);
}

#[test]
fn a_silent_back_end_is_not_waited_for_for_ever() {
    let (ours, _theirs) = Stream::pair().unwrap();
    let mut front = Frontend::new(ours).unwrap();
    front.set_timeout(Duration::from_millis(10));
    assert!(matches!(front.get_features(), Err(FrontendError::Timeout { message: "GET_FEATURES", .. })));
}

#[test]
fn a_lost_back_end_is_noticed() {
    let (ours, theirs) = Stream::pair().unwrap();
    let mut front = Frontend::new(ours).unwrap();
    front.check().unwrap();
    drop(theirs);
    let hung_up = |err| matches!(err, FrontendError::Wire(WireError::Disconnected));
    assert!(hung_up(front.check().unwrap_err()));
    assert!(hung_up(front.set_owner().unwrap_err()));
    assert!(hung_up(front.get_features().unwrap_err()));
}

#[test]
fn replies_that_make_no_sense_are_errors() {
    let reply = |request: Request, flags, payload: &[u8]| {
        let header = Header { request: request as u32, flags, size: payload.len() as u32 };
        [header.as_bytes(), payload].concat()
    };
    let replies = [
        reply(Request::GetFeatures, VERSION, 0u64.as_bytes()),
        reply(Request::SetFeatures, VERSION | 4, 0u64.as_bytes()),
        reply(Request::GetFeatures, VERSION | 4, &[0; 4]),
        reply(Request::GetFeatures, VERSION | 4, &[]),
    ];
    for bytes in replies {
        let (ours, theirs) = Stream::pair().unwrap();
        theirs.send(&bytes, &[]).unwrap();
        let mut front = Frontend::new(ours).unwrap();
        assert!(matches!(front.get_features(), Err(FrontendError::BadReply("GET_FEATURES"))));
    }
    let (ours, theirs) = Stream::pair().unwrap();
    theirs.send(&reply(Request::GetFeatures, VERSION | 4, &[0; 8]), &[]).unwrap();
    assert!(matches!(Frontend::new(ours).unwrap().check(), Err(FrontendError::Unsolicited)));
}

#[test]
fn a_back_end_that_is_slow_to_read_is_waited_for() {
    let (ours, theirs) = Stream::pair().unwrap();
    let (go, wait) = mpsc::channel::<()>();
    let back = std::thread::spawn(move || {
        wait.recv().unwrap();
        back_end(theirs, offer()).join().unwrap()
    });
    let mut front = Frontend::new(ours).unwrap();
    // More than the socket holds, without acknowledgements that would pace us.
    let mut go = Some(go);
    for sent in 0..5000 {
        front.set_owner().unwrap();
        if sent == 200 {
            go.take().unwrap().send(()).unwrap();
        }
    }
    drop(front);
    assert_eq!(back.join().unwrap().1.messages, 5000);
}

/// To close a descriptor can take as long as the one who passed it likes, so none is received that nobody asked for.
#[test]
fn d1_a_descriptor_with_an_answer_that_has_none_is_left_in_the_socket() {
    for payload in [8, 4] {
        let (ours, theirs) = Stream::pair().unwrap();
        let (open, witness) = std::io::pipe().unwrap();
        let header = Header { request: Request::GetFeatures as u32, flags: VERSION | 4, size: 8 };
        // All of the answer, or half of it.
        let bytes = [header.as_bytes(), &[0; 8][..payload]].concat();
        theirs.send(&bytes, &[witness.as_fd()]).unwrap();
        drop(witness);
        let mut front = Frontend::new(ours).unwrap();
        let error = front.get_features().unwrap_err();
        assert!(matches!(error, FrontendError::Wire(WireError::UnwantedFds)), "{error}");
        assert!(front.check().is_err());
        // The other end of the pipe sees when the descriptor is closed.
        let mut poll = [PollFd::new(&open, PollFlags::IN)];
        assert_eq!(
            rustix::event::poll(&mut poll, Some(&Timespec::default())),
            Ok(0),
            "closed by the front end"
        );
        drop(front);
        // By a thread, at some time.
        let patience = Timespec { tv_sec: 60, tv_nsec: 0 };
        assert_eq!(rustix::event::poll(&mut poll, Some(&patience)), Ok(1), "closed with the socket");
    }
}

/// A back end that answers each message just in time would keep its front end for minutes.
#[test]
fn d4_all_calls_together_have_a_deadline() {
    let (ours, theirs) = Stream::pair().unwrap();
    let wanted = Wanted { features: 0, required: 0, protocol: ProtocolFeatures::empty() };
    let answers = std::thread::spawn(move || {
        let mut count = 0u32;
        // It answers whatever it is asked, one message at a time, until nobody asks any more.
        let mut question = [0; 64];
        while theirs.recv(&mut question, &mut Vec::new()).is_ok_and(|got| got.bytes > 0) {
            std::thread::sleep(Duration::from_millis(20));
            let header = Header { request: Request::GetFeatures as u32, flags: VERSION | 4, size: 8 };
            if theirs.send(&[header.as_bytes(), &[0; 8]].concat(), &[]).is_err() {
                break;
            }
            count += 1;
        }
        count
    });
    let deadline = Instant::now() + Duration::from_millis(300);
    let mut device = connect_device_until(ours, &wanted, Some(deadline)).unwrap();
    let error = loop {
        if let Err(error) = device.frontend().get_features() {
            break error;
        }
    };
    assert!(matches!(error, FrontendError::Deadline("GET_FEATURES")), "{error}");
    drop(device);
    assert!(answers.join().unwrap() > 0);
}
