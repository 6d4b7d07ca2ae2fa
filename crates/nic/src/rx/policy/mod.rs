//! How long the next receive buffer is.
//!
//! Short buffers waste no memory on short packets, long ones take fewer descriptors for long packets. Four
//! policies behind one interface: two fixed sizes, the average that Linux uses, and one that looks at the
//! distribution.

mod best;
mod ewma;
mod fixed;

use best::Best;
pub use ewma::Average;
use ewma::Ewma;
use fixed::Fixed;

/// Bytes of a cache line: lengths are multiples of it.
pub(super) const LINE: usize = 64;

/// Bytes of a page: the longest buffer of every policy but [`PolicyKind::Best`].
const PAGE: usize = 4096;

/// Bytes of a frame that every buffer holds: Ethernet, a VLAN tag and MTU 1500.
pub(super) const GOOD_FRAME: usize = 1518;

/// Bytes at the end of a buffer that are worth being posted by themselves, for the policies that do so.
/// A page: what the fixed policy would have posted for it.
const TRIM: usize = PAGE;

/// Which policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PolicyKind {
    /// One frame of MTU 1500: least memory for small packets.
    FixedMtu,
    /// One page: fewest descriptors that others dare.
    FixedPage,
    /// The moving average of packet lengths, at least a frame and at most a page.
    Ewma,
    /// What costs least for the packets of late, up to a chunk.
    #[default]
    Best,
}

impl PolicyKind {
    /// All of them.
    pub const ALL: [PolicyKind; 4] = [Self::FixedMtu, Self::FixedPage, Self::Ewma, Self::Best];

    /// Its name in configuration and reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::FixedMtu => "mtu",
            Self::FixedPage => "page",
            Self::Ewma => "ewma",
            Self::Best => "best",
        }
    }
}

/// What bounds the lengths, known when a queue is attached. All in bytes, the driver's header included, all but
/// `header` and `copy_break` whole cache lines.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    /// The driver's header in front of every packet.
    pub header: usize,
    /// Shortest buffer.
    pub minimum: usize,
    /// What a chunk holds.
    pub room: usize,
    /// Buffers that a chunk must be carved into at least, so that the pool fills the ring and there are as many
    /// again that packets are in.
    pub per_chunk: usize,
    /// Packets up to this length are copied.
    pub copy_break: usize,
    /// Ends of buffers may be cut off and posted again.
    pub trims: bool,
}

/// A policy at work on one queue.
#[derive(Debug)]
pub(super) enum Policy {
    Fixed(Fixed),
    Ewma(Ewma),
    Best(Box<Best>),
}

impl Policy {
    pub fn new(kind: PolicyKind, bounds: &Bounds) -> Self {
        match kind {
            PolicyKind::FixedMtu => Self::fixed(bounds.minimum),
            PolicyKind::FixedPage => Self::fixed(bounds.page()),
            PolicyKind::Ewma => Self::Ewma(Ewma::new(bounds)),
            PolicyKind::Best => Self::Best(Box::new(Best::new(bounds))),
        }
    }

    /// Always `len` bytes.
    pub fn fixed(len: usize) -> Self {
        Self::Fixed(Fixed(len))
    }

    /// Bytes of the next buffer, the driver's header included; a whole number of cache lines.
    #[inline]
    pub fn len(&self) -> usize {
        match self {
            Self::Fixed(fixed) => fixed.0,
            Self::Ewma(ewma) => ewma.len(),
            Self::Best(best) => best.len(),
        }
    }

    /// A packet with a frame of `len` bytes was delivered.
    #[inline(always)]
    pub fn delivered(&mut self, len: usize) {
        match self {
            Self::Fixed(_) => {}
            Self::Ewma(ewma) => ewma.delivered(len),
            Self::Best(best) => best.delivered(len),
        }
    }

    /// Bytes at the end of a buffer from which on they are to be posted again by themselves.
    pub fn trim(&self, bounds: &Bounds) -> Option<usize> {
        (bounds.trims && matches!(self, Self::Best(_))).then_some(bounds.trim())
    }
}

impl Bounds {
    /// The longest buffer of a policy that stops at the page.
    fn page(&self) -> usize {
        PAGE.clamp(self.minimum, self.room)
    }

    /// Bytes that are worth being posted by themselves, and long enough to be.
    fn trim(&self) -> usize {
        TRIM.max(self.minimum)
    }
}
