//! The data path of `ringferry guest`: packets between a tap and a pair of virtqueues, on one thread.
//!
//! A tap's virtual header and virtio-net's are the same bytes, so the kernel reads and writes packets
//! right where the device sees them, and nothing is copied here.

use std::io;
use std::time::Duration;

use arrayvec::ArrayVec;
use ringferry_memory::ReadSlice;
use ringferry_packet::buffer::Chain;
use ringferry_ring::Fault;
use ringferry_sys::epoll::{Epoll, EventBuf, Interest};
use ringferry_sys::signal::Signals;
use ringferry_sys::tap::Tap;
use ringferry_vhost_user::Connection;
use ringferry_virtio_net::driver::Pair;
use serde::Serialize;

use super::read;
use super::rings::Rings;

/// Packets moved in one direction before the other gets its turn.
const BURST: usize = 32;

/// Most buffers of a packet that go to the kernel, the header among them: a frame of any length in buffers of an
/// MTU, and some.
const PIECES: usize = 64;

/// Busy rounds between looks at the other descriptors; see the switch's worker.
const BUSY_ROUNDS: u32 = 16;

/// What passed, from the guest's point of view as in `ip -s link`: `tx` is what the kernel behind the
/// tap sent.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(super) struct Counts {
    rx_packets: u64,
    rx_bytes: u64,
    /// Packets whose lengths made no sense.
    rx_length_errors: u64,
    /// Packets the kernel did not take from us.
    rx_tap_errors: u64,
    tx_packets: u64,
    tx_bytes: u64,
    /// Packets that no ring takes: longer than any may be, or the ring is broken.
    tx_dropped: u64,
    /// Packets that were on their way through rings that had to be made anew; some may have arrived.
    pub(super) tx_lost: u64,
    kicks: u64,
    wakeups: u64,
}

/// Why packets no longer pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// SIGTERM or SIGINT.
    Signal,
    /// The back end closed the connection.
    Disconnected,
    /// The back end broke the rules of a ring.
    Broken(Fault),
    /// The tap was deleted.
    TapGone,
}

/// Everything a session needs.
pub(super) struct Bridge<'a> {
    pub(super) tap: &'a Tap,
    pub(super) signals: &'a Signals,
    pub(super) connection: &'a mut Connection,
    pub(super) rings: &'a mut Rings,
    pub(super) counts: &'a mut Counts,
    /// Bytes of the buffers that packets are read into; one buffer for all of a packet if not given.
    pub(super) pieces: Option<usize>,
}

const SIGNALS: u64 = 0;
const CONNECTION: u64 = 1;
const TAP: u64 = 2;
const RX_CALL: u64 = 3;
const TX_CALL: u64 = 4;

impl Bridge<'_> {
    /// Carries packets until something ends it.
    pub(super) fn run(mut self) -> io::Result<End> {
        let epoll = Epoll::new()?;
        epoll.add(self.signals, SIGNALS, Interest::READABLE)?;
        epoll.add(&*self.connection, CONNECTION, Interest::READABLE | Interest::HANGUP)?;
        epoll.add(self.tap, TAP, Interest::READABLE)?;
        epoll.add(&self.rings.rx.call, RX_CALL, Interest::READABLE)?;
        epoll.add(&self.rings.tx.call, TX_CALL, Interest::READABLE)?;
        let mut events = EventBuf::with_capacity(8);
        let mut tap_ready = true;
        let mut tap_watched = true;
        self.refill();
        // Rounds since the descriptors were looked at.
        let mut rounds = 0;
        loop {
            let sent = tap_ready && self.transmit(&mut tap_ready);
            let received = self.receive();
            if let Some(fault) = self.rings.pair.fault() {
                return Ok(End::Broken(fault));
            }
            rounds += 1;
            // While packets pass, the other descriptors are looked at now and then; a tap that was empty
            // can only be looked at there.
            let timeout = if sent || received {
                if tap_ready && rounds < BUSY_ROUNDS {
                    continue;
                }
                Some(Duration::ZERO)
            } else if self.arm(tap_ready) {
                self.rings.pair.disable_calls();
                continue;
            } else {
                None
            };
            rounds = 0;
            // A tap that has packets we have no slots for would wake us all the time.
            let watch = !tap_ready;
            if watch != tap_watched {
                epoll.modify(self.tap, TAP, if watch { Interest::READABLE } else { Interest::empty() })?;
                tap_watched = watch;
            }
            epoll.wait(&mut events, timeout)?;
            if timeout.is_none() {
                self.counts.wakeups += 1;
                self.rings.pair.disable_calls();
            }
            for event in events.iter() {
                match event.token {
                    SIGNALS if self.signals.next()?.is_some() => return Ok(End::Signal),
                    CONNECTION if self.connection.frontend().check().is_err() => {
                        return Ok(End::Disconnected);
                    }
                    TAP if event.hangup => return Ok(End::TapGone),
                    TAP => tap_ready = true,
                    RX_CALL => drop(self.rings.rx.call.drain()),
                    TX_CALL => drop(self.rings.tx.call.drain()),
                    _ => {}
                }
            }
        }
    }

    /// Asks to be woken; true when there is work already.
    fn arm(&mut self, tap_ready: bool) -> bool {
        // Packets wait in the tap, but no slot is free: wait for a good part of them.
        let Pair { receiveq, transmitq, .. } = &mut self.rings.pair;
        let full = tap_ready && transmitq.driver().ring().enable_calls_delayed();
        receiveq.driver().ring().enable_calls() || full
    }

    /// From the tap to the device; whether anything moved. Clears `tap_ready` when the tap is empty.
    fn transmit(&mut self, tap_ready: &mut bool) -> bool {
        let Bridge { rings: Rings { pair, tx, waiting, .. }, tap, counts, pieces, .. } = self;
        let Pair { transmitq, pools, .. } = pair;
        transmitq.reclaim(pools);
        let mut count = 0;
        while count < BURST && transmitq.free() > 0 {
            let packet = match waiting
                .take()
                .map_or_else(|| read::packet(tap, pools, *pieces), |packet| Ok(Some(packet)))
            {
                Ok(Some(packet)) => packet,
                Ok(None) => break,
                Err(_) => {
                    *tap_ready = false;
                    break;
                }
            };
            let len = packet.len();
            if let Err(unsent) = transmitq.send(packet, pools) {
                if unsent.reason.is_retryable() {
                    // A packet of many pieces needs more room than is left.
                    *waiting = Some(unsent.chain);
                    break;
                }
                counts.tx_dropped += 1;
                transmitq.give_up(unsent, pools);
                continue;
            }
            counts.tx_packets += 1;
            counts.tx_bytes += len as u64;
            count += 1;
        }
        if transmitq.flush() {
            counts.kicks += 1;
            let _ = tx.kick.signal();
        }
        count > 0
    }

    /// From the device to the tap; whether anything moved.
    fn receive(&mut self) -> bool {
        let Bridge { rings: Rings { pair, length_errors, .. }, tap, counts, .. } = self;
        let Pair { receiveq, pools, .. } = pair;
        let received = receiveq.lend(BURST, pools, |packet, _| {
            counts.rx_packets += 1;
            counts.rx_bytes += packet.len() as u64;
            if !write(tap, &packet) {
                counts.rx_tap_errors += 1;
            }
            Some(packet)
        });
        if received > 0 {
            let errors = receiveq.stats().rx_length_errors;
            counts.rx_length_errors += errors - std::mem::replace(length_errors, errors);
            self.refill();
        }
        received > 0
    }

    fn refill(&mut self) {
        if self.rings.pair.refill() {
            self.counts.kicks += 1;
            let _ = self.rings.rx.kick.signal();
        }
    }
}

/// Hands a packet to the kernel; false when it does not take it.
fn write(tap: &Tap, packet: &Chain) -> bool {
    let header = packet.header.to_bytes();
    let mut slices = ArrayVec::<ReadSlice<'_>, PIECES>::new();
    slices.push(ReadSlice::from(&header[..]));
    slices.extend(packet.pieces().take(PIECES - 1));
    packet.bufs().len() < PIECES && tap.writev(&slices).is_ok()
}
