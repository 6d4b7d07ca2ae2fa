//! A port kind of your own on the switch's engine: frames come from and go to channels of this process.
//!
//!     cargo run -p ringferry-switch --example custom_port
//!
//! The engine (workers, learning, VLANs, rates, offloads, hand-off) knows no kind of port, only the trait `Queues`. Here a port is a pair of
//! channels and an eventfd. Three of them are plugged into two workers; the first sends a broadcast, the second answers, and the third
//! sees only the broadcast, as the switch has learned where the first one is.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use ringferry_memory::ReadSlice;
use ringferry_packet::frame::Burst;
use ringferry_packet::vnet::{Header, Offloads};
use ringferry_switch::config::SwitchConfig;
use ringferry_switch::counters::{DropReason, PortTotals};
use ringferry_switch::fdb::PortId;
use ringferry_switch::plane::{
    Delivery, FrameCost, Lease, Owners, Placement, PortHandle, Queues, Steering, Taken, Watch, Workers,
};
use ringferry_sys::eventfd::EventFd;

/// One worker's end of a port. Every worker writes to `out`; the one that was given `inbox` reads it.
struct ChannelQueues {
    port: PortHandle,
    out: Sender<Vec<u8>>,
    inbox: Option<(Receiver<Vec<u8>>, Arc<EventFd>)>,
}

impl Queues for ChannelQueues {
    // Frames of a burst borrow from these copies until they have been forwarded.
    type Loan = Vec<Vec<u8>>;
    // A queue is started by handing its inbox to a worker, and so it migrates.
    type Start = (Receiver<Vec<u8>>, Arc<EventFd>);
    type Stopped = ();
    type Request = Infallible;
    type Detached = (Receiver<Vec<u8>>, Arc<EventFd>);
    type State = ();

    fn lease(&mut self, _: u16, max: usize) -> Lease<Self::Loan> {
        let frames: Vec<_> = self.inbox.iter().flat_map(|(inbox, _)| inbox.try_iter().take(max)).collect();
        if frames.is_empty() { Lease::Empty } else { Lease::Frames(frames) }
    }

    fn frames<'m>(&mut self, _: u16, loan: &'m Self::Loan, _: usize, burst: &mut Burst<'m>) -> Taken {
        for frame in loan {
            burst.push(Header::default(), ReadSlice::from(&frame[..]));
            self.port.counters.rx_packets.add(1);
            self.port.counters.rx_bytes.add(frame.len() as u64);
        }
        Taken { any: true, forward: true, private: true, exhausted: false, further: 0 }
    }

    fn complete(&mut self, _: u16, _: Self::Loan) {}

    fn backlog(&mut self, _: u16) -> usize {
        0
    }

    // The eventfd is signalled for every frame, so it needs no arming: whatever comes after the last look wakes the worker.
    fn arm(&mut self, _: u16) -> bool {
        true
    }

    fn is_kickless(&mut self, _: u16) -> bool {
        false
    }

    fn wake(&mut self, _: u16, _: bool, _: Watch<'_>) -> bool {
        self.inbox.iter().for_each(|(_, bell)| drop(bell.drain()));
        true
    }

    fn frame_cost(&self) -> FrameCost {
        FrameCost::Descriptor
    }

    fn expect(&mut self, _: usize) {}

    fn deliver(
        &mut self,
        _: u16,
        _: Header,
        first: &[u8],
        rest: &[ReadSlice<'_>],
        _: u64,
    ) -> Result<Delivery, DropReason> {
        let mut frame = first.to_vec();
        for piece in rest {
            let at = frame.len();
            frame.resize(at + piece.len(), 0);
            piece.copy_to(&mut frame[at..]);
        }
        self.out.send(frame).map(|()| Delivery::Done).map_err(|_| DropReason::LinkDown)
    }

    // A channel takes whatever there is.
    fn probe(&mut self, _: u16, packets: &[(Header, Vec<u8>)]) -> Vec<Result<Delivery, DropReason>> {
        vec![Ok(Delivery::Done); packets.len()]
    }

    fn flush(&mut self) -> usize {
        0
    }

    fn start(&mut self, start: Self::Start, watch: Watch<'_>) -> Option<u16> {
        self.attach(0, start, watch).then_some(0)
    }

    fn stop(&mut self, queue: u16, watch: Watch<'_>) -> Option<((), Option<u16>)> {
        self.detach(queue, watch).map(|_| ((), Some(queue)))
    }

    fn close(&mut self, watch: Watch<'_>) {
        self.detach(0, watch);
    }

    fn request(&mut self, request: Infallible, _: Watch<'_>) {
        match request {}
    }

    fn detach(&mut self, _: u16, watch: Watch<'_>) -> Option<Self::Detached> {
        self.inbox.take().inspect(|(_, bell)| watch.remove(&**bell))
    }

    fn attach(&mut self, queue: u16, inbox: Self::Detached, watch: Watch<'_>) -> bool {
        let watched = watch.add(&*inbox.1, queue).is_ok();
        self.inbox = Some(inbox);
        watched
    }

    fn inspect(&mut self, _: &mut Vec<()>) {}
}

/// The program's end of a port.
struct Port {
    send: Sender<Vec<u8>>,
    bell: Arc<EventFd>,
    received: Receiver<Vec<u8>>,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let config = SwitchConfig { workers: Some(2), ..SwitchConfig::default() };
    let workers = Workers::start(&config)?;
    let mut ports = Vec::new();
    for number in 0..3 {
        let (send, inbox) = channel();
        let (out, received) = channel();
        let bell = Arc::new(EventFd::new()?);
        // No receiver here lacks an offload that a sender here asks for. The worker of the one queue is `number` modulo two.
        let placement = Placement {
            steering: Steering::Local(Offloads::empty()),
            owners: Owners(vec![usize::from(number) % 2]),
            queues: 1,
        };
        workers.add_port(PortId(number), "channel", &PortTotals::new(2), placement, |_, port| {
            ChannelQueues { port: port.clone(), out: out.clone(), inbox: None }
        });
        workers.start_queue(PortId(number), 0, (inbox, Arc::clone(&bell)));
        ports.push(Port { send, bell, received });
    }
    let send = |port: &Port, destination: [u8; 6], source: u8| -> std::io::Result<()> {
        let mut frame = [destination, [2, 0, 0, 0, 0, source]].concat();
        frame.extend([0x88, 0xb5]);
        frame.resize(60, source);
        port.send.send(frame).map_err(|_| std::io::ErrorKind::BrokenPipe)?;
        port.bell.signal()
    };
    let wait = Duration::from_secs(10);
    send(&ports[0], [0xff; 6], 1)?;
    for port in &ports[1..] {
        println!("a broadcast of {} bytes", port.received.recv_timeout(wait)?.len());
    }
    send(&ports[1], [2, 0, 0, 0, 0, 1], 2)?;
    println!("an answer of {} bytes", ports[0].received.recv_timeout(wait)?.len());
    assert!(ports[2].received.try_recv().is_err(), "the switch knows where the first port's station is");
    Ok(())
}
