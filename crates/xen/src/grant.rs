//! Grants: pages of one domain that another may use, as traits of the domain that grants and of the
//! one that uses them.
//!
//! The granting domain allocates pages together with their grants ([`GrantTable`], [`Granted`])
//! when an interface connects, and drops them when it closes; a program cannot grant memory that it
//! already has, so everything to be shared lives in such pages from the beginning. The other domain
//! accesses them through [`Foreign`]: it maps them, one by one into a [`Window`] or for good as a
//! [`Region`], or has the hypervisor copy. Each handle is used by one thread.

use std::fmt::{self, Debug};
use std::io;
use std::sync::Arc;

use ringferry_memory::{ReadSlice, Region, Window, WriteSlice};

use crate::domain::DomId;

/// Number of a grant within the granting domain. A reference that a peer sends can be any number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GrantRef(pub u32);

impl fmt::Display for GrantRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

/// The access that a grant, or a mapping of it, allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// The page may only be read.
    Read,
    /// The page may be read and written.
    Write,
}

/// The reason why pages could not be granted or mapped.
#[derive(Debug, thiserror::Error)]
pub enum GrantError {
    /// The peer's reference does not name a page that it granted to this domain with this access.
    #[error("grant reference {0} is not one that the peer has granted to us")]
    BadRef(GrantRef),
    /// No grants or pages are left in this domain.
    #[error("no grants are left ({0}); raise the limit of xen_gntalloc, or use fewer queues")]
    Exhausted(io::Error),
    /// The operating system reported another error.
    #[error(transparent)]
    Os(#[from] io::Error),
}

/// Allocates and grants pages of this domain.
pub trait GrantTable: Send + Debug {
    /// Allocates `count` zeroed, contiguous pages and grants each to `to`.
    ///
    /// # Errors
    /// Any [`GrantError`]; nothing was allocated.
    fn grant(&mut self, to: DomId, count: usize, access: Access) -> Result<Box<dyn Granted>, GrantError>;
}

/// Pages of this domain that another may use until their grants end, by a call of [`Granted::end`]
/// or by a drop.
///
/// A page that the peer still has mapped when its grant ends is not reused before the peer unmaps
/// it (XSA-396): the provider keeps it.
pub trait Granted: Send + Debug {
    /// Returns one reference per page, in order.
    fn refs(&self) -> &[GrantRef];

    /// Returns the memory of the pages.
    fn region(&self) -> &Arc<Region>;

    /// Ends the grants. Returns how many pages the peer still has mapped, as far as that can be
    /// known; those stay allocated until it unmaps them. Other handles of the
    /// [`region`](Self::region) must be dropped before: under Xen the kernel ends a grant only when
    /// this domain itself does not have the page mapped any more.
    fn end(self: Box<Self>) -> usize;
}

/// This domain's side of a copy.
#[derive(Debug)]
pub enum Local<'a> {
    /// The destination of bytes from the peer's page.
    To(WriteSlice<'a>),
    /// The source of bytes for the peer's page.
    From(ReadSlice<'a>),
}

/// One piece of a batch of copies, within one page of the peer.
#[derive(Debug)]
pub struct CopySegment<'a> {
    /// Reference of the peer's page.
    pub gref: GrantRef,
    /// Offset of the first byte in the page.
    pub offset: u16,
    /// Local bytes, as many as are copied; offset and length together must end within the page.
    pub local: Local<'a>,
    /// Set by the copy: true if this segment was copied. A batch continues after a segment that
    /// failed.
    pub done: bool,
}

/// Counters of accesses to another domain's pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ForeignCounters {
    /// Pages that were mapped, each time counted.
    pub mapped: u64,
    /// Pages that were unmapped, each time counted.
    pub unmapped: u64,
    /// Copy segments that were carried out.
    pub copies: u64,
    /// Number of bytes in those segments.
    pub copied_bytes: u64,
    /// Hypercalls (or calls of the kernel that simulates the hypervisor).
    pub calls: u64,
}

/// Access to the pages that another domain granted to this one. Everything mapped through it is
/// unmapped when both it and the memory are dropped.
pub trait Foreign: Send + Debug {
    /// Returns the domain that owns the pages.
    fn domain(&self) -> DomId;

    /// Maps pages contiguously and writable until the region is dropped, for rings.
    ///
    /// # Errors
    /// Any [`GrantError`]; nothing was mapped.
    fn map_region(&mut self, refs: &[GrantRef]) -> Result<Arc<Region>, GrantError>;

    /// Maps each page to its slot of `window`, all slots being free. `mapped` gets one entry per
    /// page, true if the page is mapped now. A bad reference does not affect the other pages.
    fn map(
        &mut self,
        window: &mut Window,
        pages: &[(usize, GrantRef)],
        access: Access,
        mapped: &mut Vec<bool>,
    );

    /// Unmaps the pages in these slots of `window`, which must have been mapped through this
    /// handle.
    fn unmap(&mut self, window: &mut Window, slots: &[usize]);

    /// Copies each segment, in as few hypercalls as possible.
    ///
    /// # Errors
    /// Nothing can be copied any more: the domain is gone, or a segment does not lie within a page
    /// (a caller's bug). Some segments may have been copied.
    fn copy(&mut self, segments: &mut [CopySegment<'_>]) -> io::Result<()>;

    /// Returns the counters since the handle was opened.
    fn counters(&self) -> ForeignCounters;
}
