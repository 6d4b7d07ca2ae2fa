//! A piece of memory as a device names it.

/// One buffer: an address in guest physical memory and a length in bytes; what one descriptor names.
/// Unchecked: translating it is the business of whoever owns the memory map.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Buffer {
    /// Guest physical address.
    pub addr: u64,
    /// Bytes.
    pub len: u32,
}
