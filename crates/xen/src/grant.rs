//! Grants: pages of one domain that another may use.
//!
//! The granting domain allocates pages together with their grants ([`GrantTable`], [`Granted`]); a program cannot grant memory
//! that it already has, so what is to be shared lives in such pages from the beginning. The other domain
//! reaches them through [`Foreign`]: it maps them, one by one into a [`Window`] or for good as a [`Region`], or has
//! the hypervisor copy.

use std::fmt::{self, Debug};
use std::io;
use std::sync::Arc;

use ringferry_memory::{ReadSlice, Region, Window, WriteSlice};

use crate::domain::DomId;

/// Number of a grant, within the granting domain. What a peer says is a grant reference may be anything.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GrantRef(pub u32);

impl fmt::Display for GrantRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

/// What a grant, or a mapping of it, allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// To read.
    Read,
    /// To read and write.
    Write,
}

/// Why pages could not be granted or mapped.
#[derive(Debug, thiserror::Error)]
pub enum GrantError {
    /// The peer's reference does not name a page that it granted to us in this way.
    #[error("grant reference {0} is not one that the peer has granted to us")]
    BadRef(GrantRef),
    /// No grants or pages are left.
    #[error("no grants are left ({0}); raise the limit of xen_gntalloc, or use fewer queues")]
    Exhausted(io::Error),
    /// The system refused.
    #[error(transparent)]
    Os(#[from] io::Error),
}

/// Where a domain grants its pages.
pub trait GrantTable: Send + Debug {
    /// Allocates `count` zeroed pages, side by side, and grants each to `to`.
    ///
    /// # Errors
    /// Nothing was allocated.
    fn grant(&mut self, to: DomId, count: usize, access: Access) -> Result<Box<dyn Granted>, GrantError>;
}

/// Pages of our own that another domain may use until they are ended or dropped.
///
/// A page that the peer still has mapped when its grant ends is never given to anyone else before the peer has let
/// go (XSA-396): the provider keeps it.
pub trait Granted: Send + Debug {
    /// One reference per page, in order.
    fn refs(&self) -> &[GrantRef];

    /// The pages.
    fn region(&self) -> &Arc<Region>;

    /// Ends the grants. Returns how many pages the peer still has mapped, as far as that can be known: those
    /// stay allocated until it lets go. Other handles of the [`region`](Self::region) go first: under Xen the kernel ends
    /// a grant only when we ourselves do not have its page mapped any more.
    fn end(self: Box<Self>) -> usize;
}

/// Our side of a copy.
#[derive(Debug)]
pub enum Local<'a> {
    /// The peer's page is read to here.
    To(WriteSlice<'a>),
    /// The peer's page is written from here.
    From(ReadSlice<'a>),
}

/// One piece of a batch of copies, within one page of the peer.
#[derive(Debug)]
pub struct CopySegment<'a> {
    /// The page.
    pub gref: GrantRef,
    /// First byte in the page.
    pub offset: u16,
    /// Our bytes, as many as are copied; offset and length together end within the page.
    pub local: Local<'a>,
    /// Set by the copy: whether it was done. A batch goes on after a segment that failed.
    pub done: bool,
}

/// What was done to another domain's pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ForeignCounters {
    /// Pages mapped.
    pub mapped: u64,
    /// Pages unmapped.
    pub unmapped: u64,
    /// Segments copied.
    pub copies: u64,
    /// Bytes copied.
    pub copied_bytes: u64,
    /// Calls of the hypervisor (or of the kernel that plays it).
    pub calls: u64,
}

/// Another domain's pages, as far as it granted them to us. Everything mapped through it is unmapped when it and the
/// memory are dropped.
pub trait Foreign: Send + Debug {
    /// Whose pages they are.
    fn domain(&self) -> DomId;

    /// Maps pages side by side, writable, until the region is dropped: for rings.
    ///
    /// # Errors
    /// Nothing was mapped.
    fn map_region(&mut self, refs: &[GrantRef]) -> Result<Arc<Region>, GrantError>;

    /// Maps each page to its slot of `window`, all slots being free. `mapped` gets one entry per page: whether it is
    /// mapped now. One bad reference does not spoil the others.
    fn map(
        &mut self,
        window: &mut Window,
        pages: &[(usize, GrantRef)],
        access: Access,
        mapped: &mut Vec<bool>,
    );

    /// Unmaps the pages in these slots of `window`, which this mapped.
    fn unmap(&mut self, window: &mut Window, slots: &[usize]);

    /// Copies each segment, in as few calls as can be.
    ///
    /// # Errors
    /// Nothing can be copied any more: the domain is gone, or a segment does not lie within a page (a bug of ours).
    /// Some segments may be done.
    fn copy(&mut self, segments: &mut [CopySegment<'_>]) -> io::Result<()>;

    /// What was done so far.
    fn counters(&self) -> ForeignCounters;
}
