//! The buffer of a descriptor: a plain value, not checked yet.

/// A buffer that one descriptor describes: a guest physical address and a length. Neither is checked;
/// [`Translator`](crate::Translator) does that when it translates the address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Buffer {
    /// Guest physical address of the first byte.
    pub addr: u64,
    /// Length in bytes, possibly 0.
    pub len: u32,
}
