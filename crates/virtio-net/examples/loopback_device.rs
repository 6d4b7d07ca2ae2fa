//! Both halves of a virtio-net device in one process: what the driver sends, the device returns to it.
//!
//!     cargo run -p ringferry-virtio-net --example loopback_device
//!
//! The driver's rings and buffers lie in a memfd of its own; the device maps it a second time, as a back end in another
//! process would. Nobody sleeps here, so the kicks and calls that `flush` and `complete` ask for have no one to wake.

use std::error::Error;

use ringferry_memory::{GuestMemory, Region};
use ringferry_packet::frame::Burst;
use ringferry_packet::vnet::Header;
use ringferry_ring as ring;
use ringferry_virtio_net::device::{Receiveq, Transmitq};
use ringferry_virtio_net::driver::{Arena, Pair, PairConfig};
use ringferry_virtio_net::{Features, MAX_FRAME};

/// Returns a thousand frames, and compares them.
pub fn main() -> Result<(), Box<dyn Error>> {
    // What driver and device have negotiated: on a packed ring, with receive buffers that frames are spread over.
    let features = Features::VERSION_1 | Features::RING_PACKED | Features::MRG_RXBUF;

    // The driver: a queue pair in an arena, with all its receive buffers posted.
    let config = PairConfig::default();
    let mut arena = Arena::new(config.arena_bytes(features))?;
    let mut driver = Pair::new(&mut arena, features, &config)?;
    driver.refill();

    // The device: the same memory, and the rings where the driver says they are.
    let memory = GuestMemory::new(vec![Region::map(arena.fd(), arena.region())?])?;
    let [receiveq, transmitq] = driver.queues.map(|queue| queue.parts(&memory, features.ring()));
    let [receiveq, transmitq] = [receiveq.ok_or("no receiveq")?, transmitq.ok_or("no transmitq")?];
    let mut receive = Receiveq::new(ring::Device::fresh(receiveq, features.ring())?, features);
    let mut transmit = Transmitq::new(ring::Device::fresh(transmitq, features.ring())?, features);

    let (mut frames, mut bytes) = (0, 0);
    for len in [60, 1514, 9014, MAX_FRAME].into_iter().cycle().take(1000) {
        let frame: Vec<u8> = (0..len).map(|i| (i * 31 + frames) as u8).collect();

        // The driver copies the frame to a buffer, puts the buffer on the ring, and shows the ring to the device.
        assert!(driver.send_frame(&Header::default(), &frame));
        driver.transmitq.flush();

        // The device takes the chain and lends the frame where it lies, copies it once to the driver's receive
        // buffers, shows those, and then gives the sent buffer back.
        let mut burst = Burst::new();
        transmit.poll(&memory, 32, &mut burst);
        let mut translator = memory.translator();
        for frame in burst.frames() {
            receive.deliver(&mut translator, frame.header, frame.prefix(), burst.rest(frame))?;
        }
        receive.flush();
        transmit.complete();

        // The driver receives, takes back what was sent, and posts buffers for those that are spent.
        driver.receiveq.receive(32, &mut driver.pools, |packet, pools| {
            assert_eq!(packet.to_vec(), frame);
            (frames, bytes) = (frames + 1, bytes + packet.len());
            pools.recycle_chain(packet);
        });
        driver.reclaim();
        driver.refill();
    }
    assert_eq!((frames, driver.fault()), (1000, None));
    println!("{frames} frames, {bytes} bytes, all as they were sent");
    Ok(())
}
