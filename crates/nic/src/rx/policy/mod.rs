//! Policies for the length of the next receive buffer.
//!
//! A receive queue creates one `Policy` when it is attached, passes it the length of each delivered packet
//! (`Policy::sample`) and asks it for the length of buffers at each refill (`Policy::len`). Short buffers
//! waste no memory on short packets; long ones take fewer descriptors for long packets. There are four
//! policies: two fixed sizes, the moving average that Linux uses (EWMA), and one that minimises a cost over
//! the distribution of lengths.

mod best;
mod ewma;
mod fixed;

use best::Best;
pub use ewma::Average;
use ewma::Ewma;
use fixed::Fixed;

/// Size of a cache line in bytes; lengths of buffers are multiples of it.
pub(super) const LINE: usize = 64;

/// Size of a page in bytes: the longest buffer of every policy but [`PolicyKind::Best`].
const PAGE: usize = 4096;

/// Length in bytes of a frame that every buffer holds: Ethernet, a VLAN tag and MTU 1500.
pub(super) const GOOD_FRAME: usize = 1518;

/// Least number of unused bytes at the end of a buffer that are trimmed, for the policies that do so: a page,
/// the length of a buffer of the fixed policy.
const TRIM: usize = PAGE;

/// The choice of a policy, as in the configuration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PolicyKind {
    /// Every buffer holds one frame of MTU 1500, which takes the least memory for small packets.
    FixedMtu,
    /// Every buffer is one page.
    FixedPage,
    /// The length is the moving average of packet lengths, at least a frame and at most a page.
    Ewma,
    /// The length has the least cost for recent packets; at most a chunk.
    #[default]
    Best,
}

impl PolicyKind {
    /// All policies, in the order of their declaration.
    pub const ALL: [PolicyKind; 4] = [Self::FixedMtu, Self::FixedPage, Self::Ewma, Self::Best];

    /// Returns the name of the policy in configuration and reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::FixedMtu => "mtu",
            Self::FixedPage => "page",
            Self::Ewma => "ewma",
            Self::Best => "best",
        }
    }
}

/// Bounds of the length of buffers, known when a queue is attached. Lengths are in bytes and include the
/// driver's header; all but `header` and `copy_break` are whole cache lines.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    /// Length of the driver's header in front of each packet.
    pub header: usize,
    /// Length of the shortest buffer.
    pub minimum: usize,
    /// Capacity of a chunk.
    pub room: usize,
    /// Least number of buffers that a chunk must be carved into, so that the pool provides twice as many as
    /// the ring has entries: half of them for packets that are in use.
    pub per_chunk: usize,
    /// Length of the longest frame that is copied.
    pub copy_break: usize,
    /// True if ends of buffers may be trimmed and posted again.
    pub trims: bool,
}

/// The policy of one queue with its state.
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

    /// Creates a policy that always returns `len` bytes.
    pub fn fixed(len: usize) -> Self {
        Self::Fixed(Fixed(len))
    }

    /// Returns the length of the next buffer in bytes, the driver's header included; a whole number of cache
    /// lines.
    #[inline]
    pub fn len(&self) -> usize {
        match self {
            Self::Fixed(fixed) => fixed.0,
            Self::Ewma(ewma) => ewma.len(),
            Self::Best(best) => best.len(),
        }
    }

    /// Adds a sample: a packet with a frame of `len` bytes was delivered.
    #[inline(always)]
    pub fn sample(&mut self, len: usize) {
        match self {
            Self::Fixed(_) => {}
            Self::Ewma(ewma) => ewma.sample(len),
            Self::Best(best) => best.sample(len),
        }
    }

    /// Returns the least number of unused bytes that are trimmed, or `None` if the policy does not trim.
    pub fn trim(&self, bounds: &Bounds) -> Option<usize> {
        (bounds.trims && matches!(self, Self::Best(_))).then_some(bounds.trim())
    }
}

impl Bounds {
    /// Returns the longest buffer of a policy that is limited to a page.
    fn page(&self) -> usize {
        PAGE.clamp(self.minimum, self.room)
    }

    /// Returns the least number of bytes that are worth trimming and long enough to be posted.
    fn trim(&self) -> usize {
        TRIM.max(self.minimum)
    }
}
