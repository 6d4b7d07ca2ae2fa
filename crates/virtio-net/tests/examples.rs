//! The examples do what they say. They are compiled into this program, as cargo does not run them.

#[path = "../examples/echo_backend.rs"]
#[allow(dead_code, reason = "main is the example's")]
mod echo_backend;

#[path = "../examples/loopback_device.rs"]
mod loopback_device;

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use ringferry_packet::vnet::Header;
use ringferry_sys::eventfd::EventFd;
use ringferry_sys::socket::{Listener, Stream};
use ringferry_vhost_user::{RingPlan, Wanted, connect_device};
use ringferry_virtio_net::Features;
use ringferry_virtio_net::driver::{Arena, Pair, PairConfig};

/// A guest of `echo_backend`, whose back end sleeps between the frames.
fn guest_of_echo_backend(wanted: Features) {
    let dir = tempfile::tempdir().unwrap();
    let listener = Listener::bind(dir.path().join("echo.sock")).unwrap();
    let path = listener.path().unwrap().to_owned();
    let back_end =
        std::thread::spawn(move || echo_backend::serve(&listener).map_err(|error| error.to_string()));

    let wanted = Wanted {
        features: wanted.bits(),
        required: (wanted | Features::VERSION_1).bits(),
        protocol: Wanted::NET_PROTOCOL,
    };
    let mut device = connect_device(Stream::connect(path).unwrap(), &wanted).unwrap();
    let features = Features::from_bits_retain(device.negotiated().features);
    assert!(!features.intersects(Features::OFFLOADS));
    let config = PairConfig { receive: 64, transmit: 64, ..PairConfig::default() };
    let mut arena = Arena::new(config.arena_bytes(features)).unwrap();
    let mut pair = Pair::new(&mut arena, features, &config).unwrap();
    let kicks = [EventFd::new().unwrap(), EventFd::new().unwrap()];
    let plans = std::array::from_fn::<_, 2, _>(|i| RingPlan {
        size: pair.queues[i].size,
        base: None,
        desc: pair.queues[i].desc,
        avail: pair.queues[i].avail,
        used: pair.queues[i].used,
        kick: Some(kicks[i].as_fd()),
        call: None,
        err: None,
        enabled: true,
    });
    pair.refill();
    device.start(&[(arena.region(), arena.fd())], &plans).unwrap();

    for (number, len) in [14, 60, 64, 65, 1514, 9014, 60].into_iter().enumerate() {
        // Long enough for the back end to fall asleep.
        std::thread::sleep(Duration::from_millis(5));
        let frame: Vec<u8> = (0..len).map(|i| (i * 7 + number) as u8).collect();
        assert!(pair.send_frame(&Header::default(), &frame));
        if pair.transmitq.flush() {
            kicks[1].signal().unwrap();
        }
        let mut back = Vec::new();
        let begin = Instant::now();
        while back.is_empty() {
            assert!(begin.elapsed() < Duration::from_secs(10), "frame {number} does not come back");
            pair.receiveq.receive(8, &mut pair.pools, |chain, pools| {
                back.push(chain.to_vec());
                pools.recycle_chain(chain);
            });
            std::thread::yield_now();
        }
        pair.reclaim();
        pair.refill();
        let expected = [&frame[6..12], &frame[..6], &frame[12..]].concat();
        assert_eq!(back, [expected], "frame {number} of {len} bytes");
    }
    device.stop().unwrap();
    drop(device);
    back_end.join().unwrap().unwrap();
}

#[test]
fn echo_backend_swaps_addresses_on_either_ring() {
    let split = Features::VERSION_1 | Features::MRG_RXBUF | Features::EVENT_IDX;
    guest_of_echo_backend(split);
    guest_of_echo_backend(split | Features::RING_PACKED | Features::IN_ORDER | Features::INDIRECT_DESC);
}

#[test]
fn loopback_device_returns_every_frame() {
    loopback_device::main().unwrap();
}
