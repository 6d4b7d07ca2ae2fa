//! The ends of the flows: guests, which are our drivers over vhost-user, and the kernel's side of taps. All poll.

use std::io::ErrorKind;
use std::num::NonZeroU16;
use std::path::{Path, PathBuf};

use ringferry_nic::rx::{PolicyKind, RxConfig};
use ringferry_nic::tx::TxConfig;
use ringferry_packet::vnet::Header;
use ringferry_rig::front::{Front, wanted};
use ringferry_rig::handmade::connect;
use ringferry_sys::tap::{HEADER_LEN, MAX_READ, Tap};
use ringferry_virtio_net::Features;
use ringferry_virtio_net::driver::{Pair, PairConfig};

use crate::experiment::RowError;

/// Bytes of a frame.
pub(super) const FRAME: usize = 60;
/// The first bytes of a frame: all that is looked at.
pub(super) const HEADERS: usize = 24;
/// Entries of each ring of a guest's.
const RING: u16 = 256;

/// The place where an end reaches the switch.
#[derive(Debug)]
pub(super) enum Place {
    /// A port's socket.
    Socket(PathBuf),
    /// A tap that a bridge joins to that of a port, or to that of a `ringferry guest`.
    Tap(Tap),
}

/// A guest, or the kernel's side of a tap.
pub(super) enum End {
    Guest(Box<Front>),
    Tap { tap: Tap, incoming: Vec<u8> },
}

impl End {
    /// Connects a guest whose rings have this layout, if it is one.
    pub(super) fn start(place: Place, layout: Features) -> Result<Self, RowError> {
        match place {
            Place::Socket(path) => Ok(End::Guest(Box::new(guest(&path, layout)?))),
            Place::Tap(tap) => Ok(End::Tap { tap, incoming: vec![0; MAX_READ] }),
        }
    }

    /// Looks for room for so many frames.
    pub(super) fn make_room(&mut self, most: usize) {
        if let End::Guest(front) = self {
            front.pair.transmitq.make_room(most, &mut front.pair.pools);
        }
    }

    /// Sends a frame. Returns false if there is no room for it.
    pub(super) fn send(&mut self, frame: &[u8; FRAME]) -> Result<bool, RowError> {
        match self {
            End::Guest(front) => Ok(front.pair.send_frame(&Header::default(), frame)),
            End::Tap { tap, .. } => {
                let mut outgoing = [0; HEADER_LEN + FRAME];
                outgoing[HEADER_LEN..].copy_from_slice(frame);
                match tap.write(&outgoing) {
                    Ok(_) => Ok(true),
                    Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(false),
                    Err(error) => Err(RowError::failed(format!("writing to tap {}: {error}", tap.name()))),
                }
            }
        }
    }

    /// Shows the switch what was sent.
    pub(super) fn publish(&mut self) -> Result<(), RowError> {
        match self {
            End::Guest(front) => {
                front.publish();
                Ok(front.check()?)
            }
            End::Tap { .. } => Ok(()),
        }
    }

    /// Takes up to `most` frames.
    pub(super) fn receive(&mut self, most: usize, mut see: impl FnMut(&[u8])) -> Result<(), RowError> {
        match self {
            End::Guest(front) => {
                let Pair { receiveq, pools, .. } = &mut front.pair;
                let received = receiveq.lend(most, pools, |packet, _| {
                    let mut head = [0; HEADERS];
                    see(packet.prefix(&mut head));
                    Some(packet)
                });
                if received > 0 {
                    front.refill();
                }
                Ok(front.check()?)
            }
            End::Tap { tap, incoming } => {
                for _ in 0..most {
                    match tap.read(incoming) {
                        Ok(bytes) => see(incoming[..bytes].get(HEADER_LEN..).unwrap_or_default()),
                        Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                        Err(error) => {
                            return Err(RowError::failed(format!("reading tap {}: {error}", tap.name())));
                        }
                    }
                }
                Ok(())
            }
        }
    }

    /// Takes back the buffers of what was sent.
    pub(super) fn reclaim(&mut self) {
        if let End::Guest(front) = self {
            let Pair { transmitq, pools, .. } = &mut front.pair;
            transmitq.reclaim(pools);
        }
    }
}

fn guest(socket: &Path, layout: Features) -> Result<Front, RowError> {
    let features = Features::VERSION_1 | Features::MRG_RXBUF | layout;
    let config = PairConfig {
        receive: RING,
        transmit: RING,
        rx: RxConfig { copy_break: 0, fetch_frame: true, policy: PolicyKind::FixedMtu },
        tx: TxConfig { reclaim_after: NonZeroU16::new(RING), ..TxConfig::default() },
        ..PairConfig::default()
    };
    Ok(Front::start(connect(socket)?, &wanted(features, features), &config)?)
}
