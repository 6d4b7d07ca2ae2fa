//! A vhost-user back end for one front end: every frame that the guest sends comes back with its MAC addresses swapped.
//!
//!     cargo run --release -p ringferry-virtio-net --example echo_backend -- /tmp/echo.sock
//!     dpdk-testpmd --no-pci --no-huge -m 192 --vdev net_virtio_user0,path=/tmp/echo.sock -- --forward-mode=flowgen
//!
//! QEMU (`-netdev vhost-user`, guest memory with `share=on`) and `ringferry guest` are front ends as well. `Session` speaks the protocol and
//! tells `Echo`, the device, when a ring starts and stops; kicks of the transmitq wake the same thread, which sleeps when nothing happens.

use ringferry_memory::Area;
use ringferry_packet::frame::Burst;
use ringferry_sys::epoll::{Epoll, EventBuf, Interest};
use ringferry_sys::{eventfd::EventFd, socket::Listener};
use ringferry_vhost_user::{Device, Offer, RingSetup, Session};
use ringferry_virtio_net::Features;
use ringferry_virtio_net::device::{Receiveq, Transmitq};

/// The device: ring 0 is the guest's receiveq, ring 1 its transmitq, each with the memory and the events it came with.
struct Echo {
    epoll: Epoll,
    rings: [Option<RingSetup>; 2],
    receive: Option<Receiveq<Area>>,
    transmit: Option<Transmitq<Area>>,
}

impl Echo {
    /// Echoes one burst; true if there may be another, so that the caller must not sleep.
    fn echo(&mut self) -> std::io::Result<bool> {
        let [Some(to), Some(from)] = &self.rings else { return Ok(false) };
        let receive = self.receive.as_mut().expect("its ring runs");
        let transmit = self.transmit.as_mut().expect("its ring runs");
        let mut burst = Burst::new();
        let taken = transmit.poll(&from.memory, 32, &mut burst);
        // The first bytes of each frame are a copy; the rest still lies in the guest's transmit buffers.
        burst.frames_mut().iter_mut().for_each(|frame| frame.prefix_mut()[..12].rotate_left(6));
        let mut memory = to.memory.translator();
        for frame in burst.frames().iter().filter(|_| from.enabled && to.enabled) {
            // An error is a guest without receive buffers: the frame is lost, as on any wire.
            let _ = receive.deliver(&mut memory, frame.header, frame.prefix(), burst.rest(frame));
        }
        to.signal_used(receive.flush())?;
        from.signal_used(transmit.complete())?;
        let Some(kick) = from.kick.as_ref().filter(|_| taken == 0) else { return Ok(true) };
        kick.drain()?;
        Ok(transmit.ring().enable_kicks())
    }
}

impl Device for Echo {
    fn ring_started(&mut self, index: u16, setup: RingSetup) {
        let features = Features::from_bits_retain(setup.features);
        let ring = setup.ring().expect("the session has checked it");
        match index {
            0 => self.receive = Some(Receiveq::new(ring, features)),
            _ => self.transmit = Some(Transmitq::new(ring, features)),
        }
        let kick = setup.kick.iter().filter(|_| index == 1);
        kick.for_each(|kick| self.epoll.add(kick, 0, Interest::READABLE).expect("an eventfd"));
        self.rings[usize::from(index)] = Some(setup);
    }

    fn ring_call_changed(&mut self, index: u16, call: Option<EventFd>) {
        self.rings[usize::from(index)].as_mut().expect("it runs").call = call;
    }

    fn ring_enabled(&mut self, index: u16, enabled: bool) {
        self.rings[usize::from(index)].as_mut().expect("it runs").enabled = enabled;
    }

    fn ring_stopped(&mut self, index: u16) -> u16 {
        let setup = self.rings[usize::from(index)].take().expect("it runs");
        if index == 0 {
            return self.receive.take().expect("it runs").ring().base();
        }
        setup.kick.iter().for_each(|kick| self.epoll.remove(kick).expect("it was added"));
        self.transmit.take().expect("it runs").ring().base()
    }
}

/// Serves the first front end that connects, until it leaves.
pub fn serve(listener: &Listener) -> Result<(), Box<dyn std::error::Error>> {
    // No offloads: a frame that comes back asks nothing of the guest that it did not agree to.
    let features = Features::DEVICE - Features::OFFLOADS;
    let mut session = Session::new(listener.wait()?, Offer::net(features.bits(), 1))?;
    let mut echo = Echo { epoll: Epoll::new()?, rings: [None, None], receive: None, transmit: None };
    echo.epoll.add(&session, 0, Interest::READABLE)?;
    let mut events = EventBuf::with_capacity(2);
    loop {
        let more = echo.echo()?;
        echo.epoll.wait(&mut events, more.then_some(std::time::Duration::ZERO))?;
        match session.on_readable(&mut echo) {
            Err(error) if error.is_disconnect() => return Ok(()),
            result => result?,
        };
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    serve(&Listener::bind(std::env::args().nth(1).ok_or("usage: echo_backend SOCKET")?)?)
}
