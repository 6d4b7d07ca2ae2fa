//! The device half of a ring of either layout.

use ringferry_memory::Words;

use crate::chain::{Chain, Chains, Done, Tables};
use crate::parts::{LayoutError, Parts};
use crate::{Fault, RingFeatures, packed, split};

/// One side of one virtqueue, owned by one thread. Every call finds its layout with one branch.
#[derive(Debug)]
pub enum Device<A: Words> {
    /// VIRTIO 1.4, 2.7.
    Split(split::Device<A>),
    /// VIRTIO 1.4, 2.8.
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
    /// Takes over the ring that `parts` are. Kicks start off.
    ///
    /// `base` says where, as in the low half of vhost-user's SET_VRING_BASE: for a packed ring the
    /// index of the next descriptor in bits 0 to 14 and the wrap counter in bit 15. A split ring goes
    /// on from the used index in its memory whatever `base` says; see [`split::Device::new`].
    /// `inflight` is where a packed ring keeps its position for whoever comes after a crash.
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

    /// Number of entries.
    pub fn size(&self) -> u16 {
        each!(self, ring => ring.size())
    }

    /// The next chain to take: what vhost-user's GET_VRING_BASE returns, in the form of `base` in
    /// [`Device::new`].
    pub fn base(&self) -> u16 {
        each!(self, ring => ring.base())
    }

    /// Where the next completion goes, unpublished ones included, in the same form.
    pub fn used_index(&self) -> u16 {
        each!(self, ring => ring.used_index())
    }

    /// The violation that broke this ring, if any.
    #[inline]
    pub fn fault(&self) -> Option<Fault> {
        each!(self, ring => ring.fault())
    }

    /// Breaks the ring for a violation found outside it (a buffer in no memory, say).
    #[cold]
    pub fn break_with(&mut self, fault: Fault) {
        each!(self, ring => ring.break_with(fault));
    }

    /// Whether there is a chain to take.
    #[inline]
    pub fn has_chains(&mut self) -> bool {
        each!(self, ring => ring.has_chains())
    }

    /// Appends up to `max` chains to `out` and returns how many. A violation breaks the ring; the
    /// chains before it are still returned.
    #[inline]
    pub fn take(&mut self, max: usize, tables: &mut impl Tables, out: &mut Chains) -> usize {
        each!(self, ring => ring.take(max, tables, out))
    }

    /// Gives back the last chains taken, none of which was completed.
    pub fn untake(&mut self, chains: &[Chain]) {
        each!(self, ring => ring.untake(chains));
    }

    /// Says that a chain was used. Not visible to the driver until [`Device::publish`].
    #[inline]
    pub fn complete(&mut self, chain: Done) {
        self.complete_all([chain]);
    }

    /// Says that chains were used, in this order; see [`Device::complete`]. With IN_ORDER, chains
    /// are completed in the order they were taken, and those that had nothing to write share one
    /// used element (2.7.9, 2.8.8).
    #[inline]
    pub fn complete_all(&mut self, chains: impl IntoIterator<Item = Done>) {
        each!(self, ring => ring.complete_all(chains));
    }

    /// Shows all completions to the driver with one store; says whether it wants a call (an
    /// interrupt). A call that is not wanted is legal, one that is left out is a hang.
    #[inline]
    pub fn publish(&mut self) -> bool {
        each!(self, ring => ring.publish())
    }

    /// Tells the driver not to kick: the device polls.
    #[inline]
    pub fn disable_kicks(&mut self) {
        each!(self, ring => ring.disable_kicks());
    }

    /// Asks the driver to kick at the next chain it makes available. True when there is work
    /// already, for which no kick may come: the caller must not sleep.
    #[inline]
    pub fn enable_kicks(&mut self) -> bool {
        each!(self, ring => ring.enable_kicks())
    }
}

/// Groups chains that IN_ORDER lets share a used element (2.7.9, 2.8.8): calls `element` with the
/// entry of the ring where each group begins (`at` plus what was completed before it), the last
/// chain's id, and the bytes written. Returns the entries passed over.
///
/// Chains with nothing to write go into one group; the first that has something ends it, since the
/// length in the element is its own.
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
        if !chain.silent {
            element(begin, chain.id, chain.written, true);
            open = None;
        }
    }
    if let Some((begin, id)) = open {
        element(begin, id, 0, false);
    }
    passed
}
