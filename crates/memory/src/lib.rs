//! Shared memory of virtual machines: where every byte a peer can write is reached from.
//!
//! | module | idea | owner of the bytes |
//! |---|---|---|
//! | [`region`] | one `mmap` of a peer's (or our own) file | the [`Region`], for as long as an `Arc` of it lives |
//! | [`guest`] | an immutable set of regions and the translation of guest addresses | [`GuestMemory`], replaced as a whole when the map changes |
//! | [`words`] | atomic words of a resolved range, for rings | an [`Area`] keeps its region alive |
//! | [`mod@slice`] | borrowed pieces of buffers, copied and never referenced | the lender |
//! | [`counters`] | words that several processes count in | [`Counters`] keeps its region alive |
//! | [`shared`] | a memfd of our own, for driver halves | [`SharedMem`] |
//! | [`window`] | reserved addresses into which single pages are mapped | [`Window`] |
//! | [`huge`] | huge pages for tables of our own | whoever allocated them |
//! | [`mod@spare`] | storage that is used again | whoever keeps it |
//! | [`sigbus`] | survival of a peer that truncates the file under a mapping | process-wide handler |
//!
//! A peer may change any shared byte at any moment, so nothing here ever makes a Rust reference
//! to shared memory: words go through atomics, buffers through [`ReadSlice`] and [`WriteSlice`],
//! which only copy. This crate and `ringferry-sys` are where the project's `unsafe` lives.

pub mod buffer;
pub mod counters;
pub mod guest;
pub mod huge;
pub mod region;
pub mod shared;
pub mod sigbus;
pub mod slice;
pub mod spare;
#[cfg(feature = "vm-memory")]
mod vm_memory;
pub mod window;
pub mod words;

pub use buffer::Buffer;
pub use counters::Counters;
pub use guest::{GuestMemory, MemoryError, Translator};
pub use huge::prefer_huge_pages;
pub use region::{MapError, Region, RegionSpec, Truncation};
pub use shared::SharedMem;
pub use slice::{ReadSlice, WriteSlice};
pub use spare::Spare;
#[cfg(feature = "vm-memory")]
pub use vm_memory::VmMemoryError;
pub use window::Window;
pub use words::{Area, AreaSlots, AreaTable, Entry, Slots, Table, WordSlots, WordTable, Words};
