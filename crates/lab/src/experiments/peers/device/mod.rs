//! ringferry as the device: the queue pair that a vhost-user front end has set up, used as any program would.

mod forward;
mod port;
mod sink;
mod source;

use std::sync::Arc;

use ringferry_memory::{Area, GuestMemory};
use ringferry_packet::frame::{Burst, Frame};
use ringferry_ring::{Device, RingFeatures};
use ringferry_sys::eventfd::EventFd;
use ringferry_vhost_user::RingSetup;
use ringferry_virtio_net::Features;
use ringferry_virtio_net::device::{Receiveq, Transmitq};

pub(super) use forward::Forward;
pub(super) use port::Port;
pub(super) use sink::Sink;
pub(super) use source::Source;

use crate::experiment::RowError;

/// A queue pair. Both sides poll: kicks are off from the start.
pub(super) struct End {
    receiveq: Receiveq<Area>,
    transmitq: Transmitq<Area>,
    memory: Arc<GuestMemory>,
    calls: [Option<EventFd>; 2],
}

impl End {
    /// Serves the rings of a queue pair, receiveq first.
    fn new(rings: [RingSetup; 2]) -> Result<End, RowError> {
        let [rx, tx] = rings;
        let memory = Arc::clone(&tx.memory);
        let features = Features::from_bits_retain(tx.features);
        let ring = |setup: RingSetup| {
            let ring = RingFeatures::from_bits(setup.features);
            let device = Device::new(setup.parts, ring, setup.base, setup.inflight);
            device.map(|device| (device, setup.call)).map_err(RowError::failed)
        };
        let ((rx, rx_call), (tx, tx_call)) = (ring(rx)?, ring(tx)?);
        Ok(End {
            receiveq: Receiveq::new(rx, features),
            transmitq: Transmitq::new(tx, features),
            memory,
            calls: [rx_call, tx_call],
        })
    }

    /// Shows what was delivered to the driver.
    #[inline]
    fn flush(&mut self) {
        if self.receiveq.flush() {
            call(&self.calls[0]);
        }
    }

    /// An error once the driver has broken a rule.
    #[inline]
    fn check(&mut self) -> Result<(), RowError> {
        let fault = self.receiveq.ring().fault();
        let fault = fault.or_else(|| self.transmitq.ring().fault());
        let rejected = self.transmitq.rejected();
        match fault {
            Some(fault) => Err(RowError::failed(format!("the driver broke a ring: {fault}"))),
            None if rejected != Default::default() => {
                Err(RowError::failed(format!("the driver sent what are no frames: {rejected:?}")))
            }
            None => Ok(()),
        }
    }
}

fn call(event: &Option<EventFd>) {
    if let Some(event) = event {
        let _ = event.signal();
    }
}

/// Copies a frame into private memory, whole, as DPDK copies it into one of its buffers.
#[inline]
fn copy_out(burst: &Burst<'_>, frame: &Frame, to: &mut [u8]) {
    let prefix = frame.prefix();
    to[..prefix.len()].copy_from_slice(prefix);
    let mut at = prefix.len();
    for piece in burst.rest(frame) {
        at += piece.copy_to(&mut to[at..]);
    }
}
