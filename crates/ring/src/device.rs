//! The device half of a virtqueue of either layout.
//!
//! [`Device::new`] takes over a ring when the driver has enabled its queue. From then on one thread owns
//! the half and calls, per burst: [`Device::take`], then [`Device::complete_all`] when the buffers are
//! done with, then [`Device::publish`] once. Before it sleeps it calls [`Device::enable_kicks`]. The half is
//! dropped when the queue stops; [`Device::base`] is what the next device continues from.
//!
//! ```text
//!           take                   complete, complete_all            publish
//! available ────► taken (in burst) ──────────────────────► completed ───────► used
//!           ◄────
//!           untake
//!
//! any call that finds a violation: ──► broken (fault() is Some), until the ring is set up anew
//! ```

use ringferry_memory::{DirtyLog, Words};

use crate::chain::{Chain, Chains, Done, Tables};
use crate::parts::{LayoutError, Parts};
use crate::write_log::WriteLog;
use crate::{Fault, RingFeatures, packed, split};

/// Published completions of a driver that asks for calls by position: it is called for the first of them, and moves the position once it has taken them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unanswered {
    /// The position at which it asks, in the encoding of `base` in [`Device::new`].
    pub since: u16,
    /// The entries from there on: elements in a split ring, slots in a packed one. 0: it has taken all.
    pub entries: u16,
}

/// The device half of one virtqueue, owned by one thread. The layout is chosen at set-up; each call
/// dispatches on it with one branch, so calls that work on a whole burst are cheaper per chain.
#[derive(Debug)]
pub enum Device<A: Words> {
    /// A split ring (VIRTIO 1.4, 2.7).
    Split(split::Device<A>),
    /// A packed ring (VIRTIO 1.4, 2.8).
    Packed(packed::Device<A>),
}

macro_rules! each {
    ($self:ident, $ring:ident => $call:expr) => {
        match $self {
            Device::Split($ring) => $call,
            Device::Packed($ring) => $call,
        }
    };
}

impl<A: Words> Device<A> {
    /// Begins a ring that no device has used yet: at index 0, a packed ring with a wrap counter of 1 (VIRTIO 1.4, 2.8.1).
    /// Kicks start off.
    ///
    /// # Errors
    /// See [`LayoutError`].
    pub fn fresh(parts: Parts<A>, features: RingFeatures) -> Result<Self, LayoutError> {
        Self::new(parts, features, if features.packed { 1 << 15 } else { 0 }, None)
    }

    /// Takes over the ring in the memory areas `parts`. Kicks start off.
    ///
    /// `base` is the position to continue from, encoded like the low half of vhost-user's SET_VRING_BASE:
    /// for a packed ring the index of the next descriptor in bits 0 to 14 and the wrap counter in bit 15.
    /// A split ring ignores it and continues from the used index in its memory, which survives a crash.
    /// `inflight` is shared memory in which a packed ring logs its position and the burst being
    /// published (see [`crate::inflight`]), so that another process can take over after a crash.
    ///
    /// # Errors
    /// See [`LayoutError`].
    pub fn new(
        parts: Parts<A>,
        features: RingFeatures,
        base: u16,
        inflight: Option<A>,
    ) -> Result<Self, LayoutError> {
        Ok(if features.packed {
            Self::Packed(packed::Device::new(parts, features, base, inflight)?)
        } else {
            Self::Split(split::Device::new(parts, features)?)
        })
    }

    /// Returns the queue size: the number of descriptors the ring holds.
    pub fn size(&self) -> u16 {
        each!(self, ring => ring.size())
    }

    /// Returns the position of the next chain to take, as vhost-user's GET_VRING_BASE does, in the encoding
    /// of `base` in [`Device::new`].
    pub fn base(&self) -> u16 {
        each!(self, ring => ring.base())
    }

    /// Returns the position of the next completion, unpublished ones included, in the same encoding.
    pub fn used_index(&self) -> u16 {
        each!(self, ring => ring.used_index())
    }

    /// Returns the violation that broke this ring, or `None` while the ring works.
    #[inline]
    pub fn fault(&self) -> Option<Fault> {
        each!(self, ring => ring.fault())
    }

    /// Breaks the ring because of a violation found above it, for example a buffer outside guest memory.
    /// A ring that is broken already keeps its first fault.
    #[cold]
    pub fn break_with(&mut self, fault: Fault) {
        each!(self, ring => ring.break_with(fault));
    }

    /// Records all writes to the ring in `log` from now on, or in none. The words by which the device asks for kicks, which it may
    /// have written before, are marked at once.
    pub fn set_log(&mut self, log: Option<WriteLog>) {
        if let Some(log) = &log {
            log.kicks_changed();
        }
        each!(self, ring => ring.set_log(log));
    }

    /// Returns the dirty log in which writes to buffers are to be [marked](DirtyLog::mark), if there is one: before the chain is
    /// published or after, but before this thread lets go of the ring.
    #[inline]
    pub fn log(&self) -> Option<&DirtyLog> {
        each!(self, ring => ring.log()).map(WriteLog::log)
    }

    /// Returns true if there is a chain to take. Reads shared memory; always false once the ring is
    /// broken.
    #[inline]
    pub fn has_chains(&mut self) -> bool {
        each!(self, ring => ring.has_chains())
    }

    /// Returns how full the ring is: the entries that the driver has made available and that were not taken yet, which are chains in a split ring and
    /// descriptors in a packed one. It is for display: a driver that breaks the rules gets a wrong number, and nothing else happens.
    pub fn waiting(&self) -> u16 {
        each!(self, ring => ring.waiting())
    }

    /// Returns the position behind the last entry that the driver has made available, in the encoding of `base` in [`Device::new`]: while it stays,
    /// the driver has made nothing available. For display, as [`waiting`](Self::waiting).
    pub fn posted(&self) -> u16 {
        each!(self, ring => ring.posted())
    }

    /// Returns which completions a driver has not looked at that asks for calls by position (EVENT_IDX); `None` if it does not, as far as can be told. For
    /// display, as [`waiting`](Self::waiting): the position of a driver that polls is an old one.
    pub fn unanswered(&self) -> Option<Unanswered> {
        each!(self, ring => ring.unanswered())
    }

    /// Appends up to `max` available chains to `out`, fewer if `out` is [bounded](Chains::bounded), and returns how many: 0 only if there is none. Indirect tables are read through
    /// `tables`. A violation breaks the ring; the chains before it are still returned.
    #[inline]
    pub fn take(&mut self, max: usize, tables: &mut impl Tables, out: &mut Chains) -> usize {
        each!(self, ring => ring.take(max, tables, out))
    }

    /// Returns `chains`, which must be the last ones taken and not completed, to the ring: the next
    /// [`Device::take`] takes them again.
    pub fn untake(&mut self, chains: &[Chain]) {
        each!(self, ring => ring.untake(chains));
    }

    /// Completes one chain, that is, writes its used element. The driver does not see it until
    /// [`Device::publish`].
    #[inline]
    pub fn complete(&mut self, chain: Done) {
        self.complete_all([chain]);
    }

    /// Completes chains in the order given; see [`Device::complete`]. If IN_ORDER was negotiated, the
    /// caller must complete chains in the order in which they were taken, and chains without writable
    /// buffers share one used element (2.7.9, 2.8.8).
    #[inline]
    pub fn complete_all(&mut self, chains: impl IntoIterator<Item = Done>) {
        each!(self, ring => ring.complete_all(chains));
    }

    /// Makes all completions visible to the driver with one store. Returns true if the driver wants a call
    /// (an interrupt). A call that is not wanted is legal; one that is left out can hang the guest.
    #[inline]
    pub fn publish(&mut self) -> bool {
        each!(self, ring => ring.publish())
    }

    /// Turns the driver's kicks off, because the device polls.
    #[inline]
    pub fn disable_kicks(&mut self) {
        each!(self, ring => ring.disable_kicks());
    }

    /// Asks the driver to kick at the next chain it makes available. Returns true if a chain is available
    /// already: no kick may come for it, so the caller must not sleep.
    #[inline]
    pub fn enable_kicks(&mut self) -> bool {
        each!(self, ring => ring.enable_kicks())
    }
}

/// Groups chains that IN_ORDER lets share a used element (2.7.9, 2.8.8). Calls `element` for each group
/// with: the number of ring entries between the first chain and the group's begin, the last chain's id,
/// the bytes written, and whether it had writable buffers. Returns the number of entries of all chains.
///
/// A group is a run of chains without writable buffers, up to and including the first chain with some:
/// the length in the used element belongs to the last chain, so only that one may have been written to.
#[inline(always)]
pub(crate) fn group_in_order(
    chains: impl IntoIterator<Item = Done>,
    mut element: impl FnMut(u16, u16, u32, bool),
) -> u16 {
    let mut passed = 0u16;
    let mut open: Option<(u16, u16)> = None;
    for chain in chains {
        let begin = open.map_or(passed, |(begin, _)| begin);
        passed = passed.wrapping_add(chain.slots);
        open = Some((begin, chain.id));
        if !chain.readable_only {
            element(begin, chain.id, chain.written, true);
            open = None;
        }
    }
    if let Some((begin, id)) = open {
        element(begin, id, 0, false);
    }
    passed
}
