#![doc = include_str!("../README.md")]
//!
//! # In detail
//!
//! Shared memory: mappings, translation of guest addresses, atomic words and raw copies.
//!
//! A front end's memory table becomes a set of [`Region`]s, one per file, and these a [`GuestMemory`], which is
//! replaced as a whole when the table changes. Rings resolve their parts to [`Area`]s when they are set up;
//! a worker makes a [`Translator`] for each burst and gets [`ReadSlice`]s and [`WriteSlice`]s of buffers from
//! it. A mapping ends with the last `Arc` of its region. All types may be used from any thread, except the
//! slices, which stay on the thread that borrowed them.
//!
//! | module | contents | owner of the bytes |
//! |---|---|---|
//! | [`region`] | one mapping of a peer's (or our own) file | the [`Region`], as long as an `Arc` of it exists |
//! | [`budget`] | a bound on the bytes that are mapped on behalf of peers | nobody: it counts |
//! | [`guest`] | an immutable set of regions; translation of guest addresses | [`GuestMemory`] |
//! | [`dirty_log`] | the bitmap in which writes to guest memory are recorded for a live migration | a [`DirtyLog`] |
//! | [`words`] | atomic words of a resolved range, for rings | an [`Area`], which keeps its region alive |
//! | [`mod@slice`] | borrowed pieces of buffers, which are only copied | the lender |
//! | [`counters`] | atomic counters that several processes change | [`Counters`], which keeps its region alive |
//! | [`shared`] | a memfd of our own, for driver halves | [`SharedMem`] |
//! | [`window`] | reserved addresses into which single pages are mapped | [`Window`] |
//! | [`huge`] | huge pages for large private tables | the caller |
//! | [`mod@spare`] | reuse of a vector's storage | the [`Spare`] |
//! | [`sigbus`] | survival of a peer that truncates the file under a mapping | a handler for the whole process |
//!
//! The feature `testing` adds the module `testing`: words for the tests of other crates.
//!
//! A peer may change any shared byte at any moment, so this crate never makes a Rust reference to shared
//! memory: words are accessed by atomics, buffers by [`ReadSlice`] and [`WriteSlice`], which only copy. Only
//! this crate and `ringferry-sys` contain `unsafe`.

mod ahead;
pub mod budget;
pub mod buffer;
pub mod counters;
pub mod dirty_log;
pub mod guest;
pub mod huge;
pub mod region;
pub mod shared;
pub mod sigbus;
pub mod slice;
pub mod spare;
#[cfg(feature = "testing")]
pub mod testing;
#[cfg(feature = "vm-memory")]
mod vm_memory;
pub mod window;
pub mod words;

pub use budget::{MapBudget, OverBudget};
pub use buffer::Buffer;
pub use counters::Counters;
pub use dirty_log::DirtyLog;
pub use guest::{GuestMemory, MemoryError, Translator};
pub use huge::prefer_huge_pages;
pub use region::{MapError, Region, RegionSpec, Truncation};
pub use shared::SharedMem;
pub use slice::{ReadSlice, WriteSlice, prefetch};
pub use spare::Spare;
#[cfg(feature = "vm-memory")]
pub use vm_memory::VmMemoryError;
pub use window::Window;
pub use words::{Area, AreaSlots, AreaTable, Entry, Slots, Table, WordSlots, WordTable, Words};
