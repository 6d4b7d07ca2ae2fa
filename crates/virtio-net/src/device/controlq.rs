//! The control queue of an embedded device: it applies the driver's commands to [`Settings`].
//!
//! A program that embeds the device half creates the queue with its ring, calls [`Controlq::poll`]
//! on one thread when the driver kicks, and drops the queue at reset. A vhost-user back end has
//! none, because the VMM serves it.

use ringferry_memory::{GuestMemory, Translator, Words};
use ringferry_ring::{Buffer, Chain, Chains, Device, Fault};

use super::settings::Settings;
use crate::control::{Coalesce, Command, ERR, MAX_COMMAND, OK};

/// Most commands served per poll: a driver sends one at a time, so more is a flood.
const BURST: usize = 16;

/// The device's side of the control queue, which also bounds the work of one poll.
#[derive(Debug)]
pub struct Controlq<A: Words> {
    ring: Device<A>,
    chains: Chains,
}

impl<A: Words> Controlq<A> {
    /// Creates the queue on a ring.
    pub fn new(ring: Device<A>) -> Self {
        Self { ring, chains: Chains::new() }
    }

    /// Returns the ring, for its notifications and its state.
    pub fn ring(&mut self) -> &mut Device<A> {
        &mut self.ring
    }

    /// Serves up to 16 waiting commands; returns true if the driver wants a notification. A command
    /// whose chain has no room for an acknowledgement, or lies outside `memory`, breaks the ring.
    pub fn poll(&mut self, memory: &GuestMemory, settings: &mut Settings) -> bool {
        let mut translator = memory.translator();
        self.chains.clear();
        self.ring.take(BURST, &mut translator, &mut self.chains);
        for chain in self.chains.iter() {
            let Some(written) = serve(chain, &self.chains, &mut translator, settings) else {
                self.ring.break_with(Fault::Unusable);
                return false;
            };
            self.ring.complete(chain.done(written));
        }
        self.ring.publish()
    }
}

/// Serves one command, writes its acknowledgement, and its result if it has one that fits; returns
/// the number of bytes written. `None` when the chain has no room for an acknowledgement, or lies
/// outside memory.
fn serve(
    chain: &Chain,
    chains: &Chains,
    memory: &mut Translator<'_>,
    settings: &mut Settings,
) -> Option<u32> {
    // The room is found before the command is applied: a command that cannot be acknowledged must
    // change nothing.
    let at = chains.writable(chain).iter().position(|buffer| buffer.len > 0)?;
    let room = &chains.writable(chain)[at..];
    let ack = memory.write(room[0].addr, 1)?;
    let mut bytes = Vec::new();
    let fits = chain.readable_len as usize <= MAX_COMMAND;
    if fits {
        for buffer in chains.readable(chain) {
            let mut done = 0;
            while done < buffer.len as usize {
                let piece = memory.read(buffer.addr.checked_add(done as u64)?, buffer.len as usize - done)?;
                let at = bytes.len();
                bytes.resize(at + piece.len(), 0);
                done += piece.copy_to(&mut bytes[at..]);
            }
        }
    }
    let command = if fits { Command::decode(&bytes) } else { None };
    let Some(command) = command.filter(|command| command.result_len() < chain.writable_len as usize) else {
        ack.copy_from(&[ERR]);
        return Some(1);
    };
    // A query changes nothing, so its result may be written before the acknowledgement.
    let result = settings.query(&command).map(Coalesce::to_bytes);
    if let Some(result) = &result {
        write_behind(room, result, memory)?;
    }
    let done = settings.apply(command);
    ack.copy_from(&[if done { OK } else { ERR }]);
    Some(1 + result.map_or(0, |result| result.len() as u32))
}

/// Writes `bytes` into `buffers` after their first byte, wherever they are divided; `None` when
/// they lie outside memory or are too short.
fn write_behind(buffers: &[Buffer], mut bytes: &[u8], memory: &mut Translator<'_>) -> Option<()> {
    let mut skip = 1;
    for buffer in buffers {
        let mut at = std::mem::take(&mut skip);
        while at < buffer.len as usize && !bytes.is_empty() {
            let room = memory.write(buffer.addr.checked_add(at as u64)?, buffer.len as usize - at)?;
            let n = room.copy_from(bytes);
            bytes = &bytes[n..];
            at += n;
        }
    }
    bytes.is_empty().then_some(())
}
