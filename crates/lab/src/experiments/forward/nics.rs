//! ringferry as the forwarder: two NICs behind vhost-user sockets, the framework between them, and the addresses
//! rewritten on the way, as testpmd's `mac` does. Packets are sent from where they were received.

use std::collections::VecDeque;
use std::path::Path;

use ringferry_nic::forward::Forwarder;
use ringferry_nic::rx::RxConfig;
use ringferry_nic::tx::{NoHash, QueueSelector, TxConfig, TxPort};
use ringferry_packet::buffer::{Chain, Pools};
use ringferry_packet::flow::flow_hash;
use ringferry_packet::frame::PREFIX;
use ringferry_packet::vnet::Header;
use ringferry_rig::front::{ring, wanted};
use ringferry_sys::eventfd::EventFd;
use ringferry_sys::socket::Stream;
use ringferry_vhost_user::{Connection, connect_device};
use ringferry_virtio_net::Features;
use ringferry_virtio_net::driver::{Arena, Pair, PairConfig, Receiveq, Transmitq, TxRing};

use super::case::{Case, Doorbell, How, QUEUE};
use crate::experiment::RowError;
use crate::frames::flows::departing;

pub(super) struct Nics {
    input: Receiveq,
    pools: Pools,
    way: Way,
    how: How,
    selector: QueueSelector,
    macs: [u8; 12],
    kicks: Vec<EventFd>,
    rang: u64,
    /// The devices stop when these are closed.
    _connections: [Connection; 2],
}

/// How packets get into the output.
enum Way {
    /// The framework's forwarder sends bursts.
    Bursts { forwarder: Forwarder, outputs: Vec<Transmitq> },
    /// One by one, with a doorbell when it is due, or each time.
    Singly(Box<Transmitq>),
    /// Through a queue for several threads.
    Port { port: Box<TxPort<TxRing>>, burst: VecDeque<Chain> },
}

impl Nics {
    /// Connects the two NICs and posts buffers on the first.
    pub(super) fn connect(case: &Case, sockets: [&Path; 2]) -> Result<Self, RowError> {
        let features = case.features();
        let wanted = wanted(features, features);
        let connect = |socket: &Path| -> Result<Connection, RowError> {
            connect_device(Stream::connect(socket)?, &wanted).map_err(RowError::failed)
        };
        let mut connections = [connect(sockets[0])?, connect(sockets[1])?];
        let features = Features::from_bits_retain(connections[0].negotiated().features);
        let config = PairConfig {
            receive: QUEUE,
            transmit: QUEUE,
            // Packets are sent from where they lie.
            rx: RxConfig { copy_break: 0, ..RxConfig::default() },
            tx: TxConfig { entry: case.how.entry.unwrap_or_default(), ..TxConfig::default() },
            ..PairConfig::default()
        };
        // One arena for both: the second NIC reads what the first has written.
        let mut arena =
            Arena::new((1 + case.how.queues) * config.arena_bytes(features)).map_err(RowError::failed)?;
        let mut pair = || Pair::new(&mut arena, features, &config).map_err(RowError::failed);
        let near = pair()?;
        let far = (0..case.how.queues).map(|_| pair()).collect::<Result<Vec<_>, _>>()?;

        let call = EventFd::new()?;
        let start = |connection: &mut Connection, pairs: &[Pair]| -> Result<Vec<EventFd>, RowError> {
            let kicks = pairs.iter().map(|_| EventFd::new()).collect::<Result<Vec<_>, _>>()?;
            let plans: Vec<_> = pairs
                .iter()
                .zip(&kicks)
                .flat_map(|(pair, kick)| pair.queues.iter().map(|queue| ring(queue, kick, Some(&call))))
                .collect();
            connection.start(&[(arena.region(), arena.fd())], &plans).map_err(RowError::failed)?;
            Ok(kicks)
        };
        start(&mut connections[0], std::slice::from_ref(&near))?;
        let kicks = start(&mut connections[1], &far)?;

        let Pair { receiveq: mut input, .. } = near;
        input.driver().ring().disable_calls();
        // The device polls.
        input.refill();
        let mut pools = None;
        let mut outputs = Vec::new();
        for Pair { pools: buffers, mut transmitq, .. } in far {
            transmitq.driver().ring().disable_calls();
            outputs.push(transmitq);
            pools.get_or_insert(buffers);
        }
        let pools = pools.ok_or_else(|| RowError::failed("an output has no queues"))?;
        let selector = QueueSelector::new(0, case.how.queues, NoHash::Worker);
        let how = case.how;
        let way = Way::new(&how, outputs)?;
        let (macs, rang) = (departing(), 0);
        Ok(Self { input, pools, way, how, selector, macs, kicks, rang, _connections: connections })
    }

    /// Forwards a burst, or finds that there is none.
    #[inline]
    pub(super) fn round(&mut self) -> Result<(), RowError> {
        let Self { input, pools, way, how, selector, macs, kicks, rang, .. } = self;
        let mut ring = |queue: usize| {
            *rang += 1;
            let _ = kicks[queue].signal();
        };
        let taken = match way {
            Way::Bursts { forwarder, outputs } => {
                let queues = outputs.len();
                let choose = |packet: &mut Chain| {
                    rewrite(packet, macs);
                    if queues == 1 {
                        return Some(0);
                    }
                    let mut prefix = [0; PREFIX];
                    Some(selector.select(Some(flow_hash(packet.prefix(&mut prefix)))))
                };
                forwarder.forward(input, outputs, pools, choose, |queue, _| ring(queue))
            }
            Way::Singly(output) => {
                output.make_room_with(how.burst, |chain| input.recycle_chain(chain, pools));
                let taken = input.lend(how.burst, pools, |mut packet, pools| {
                    rewrite(&mut packet, macs);
                    packet.header = Header::default();
                    let unsent = output.send(packet, pools).err();
                    if if how.doorbell == Doorbell::Packet { output.flush() } else { output.due() } {
                        ring(0);
                    }
                    unsent.map(|unsent| unsent.chain)
                });
                if output.flush() {
                    ring(0);
                }
                taken
            }
            Way::Port { port, burst } => {
                port.with(|output| {
                    output.make_room_with(how.burst, |chain| input.recycle_chain(chain, pools));
                });
                let taken = input.receive(how.burst, pools, |mut packet, _| {
                    rewrite(&mut packet, macs);
                    packet.header = Header::default();
                    burst.push_back(packet);
                });
                let mut progress = port.send_burst(burst, pools);
                if progress.wake {
                    // The queue's worker is this thread.
                    progress = port.poll(pools);
                }
                if progress.doorbell {
                    ring(0);
                }
                // What found no room is dropped, as by the others.
                burst.drain(..).for_each(|chain| input.recycle_chain(chain, pools));
                taken
            }
        };
        if taken > 0 {
            // The device polls.
            input.top_up();
        }
        match input.driver().fault() {
            Some(fault) => Err(RowError::failed(format!("the device broke a ring: {fault}"))),
            None if input.stats().rx_length_errors > 0 => {
                Err(RowError::failed("frames had impossible lengths"))
            }
            None => Ok(()),
        }
    }

    pub(super) fn rang(&self) -> u64 {
        self.rang
    }
}

impl Way {
    fn new(how: &How, outputs: Vec<Transmitq>) -> Result<Self, RowError> {
        let one = |outputs: Vec<Transmitq>| {
            let only = outputs.into_iter().next();
            only.ok_or_else(|| RowError::failed("an output has no queues"))
        };
        Ok(match (how.entry, how.doorbell) {
            (Some(_), _) => Way::Port { port: Box::new(TxPort::new(one(outputs)?)), burst: VecDeque::new() },
            (None, Doorbell::Ladder | Doorbell::Packet) => Way::Singly(Box::new(one(outputs)?)),
            (None, Doorbell::Polled | Doorbell::Burst) => {
                Way::Bursts { forwarder: Forwarder::new(outputs.len(), how.burst), outputs }
            }
        })
    }
}

/// Writes the addresses of the next hop and of the output where the packet lies: it was just received, so nobody else
/// has it.
#[inline]
fn rewrite(packet: &mut Chain, macs: &[u8; 12]) {
    if let Some(first) = packet.first_mut() {
        first.write().copy_from(macs);
    }
}
