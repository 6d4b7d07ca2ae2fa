//! Borrowed pieces of packet buffers, in shared or private memory.
//!
//! A slice of shared memory must not become `&[u8]`: the peer may write it at any time. These two
//! types hold only an address and a length and offer only copies. Both are laid out as `iovec`, so
//! an array of them goes to `readv` and `writev` as it is. Neither is `Send`: a slice made from a
//! private `&mut [u8]` stays on the thread that borrowed it.

use std::marker::PhantomData;

/// Bytes that can be copied from. Shares the lifetime of the memory it points into.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct ReadSlice<'a> {
    iov: libc::iovec,
    lender: PhantomData<&'a [u8]>,
}

/// Bytes that can be copied to. Shares the lifetime of the memory it points into.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct WriteSlice<'a> {
    iov: libc::iovec,
    lender: PhantomData<&'a mut [u8]>,
}

macro_rules! common {
    ($name:ident) => {
        impl<'a> $name<'a> {
            /// A slice of no bytes.
            pub const EMPTY: Self = Self {
                iov: libc::iovec {
                    iov_base: std::ptr::NonNull::<u8>::dangling().as_ptr().cast(),
                    iov_len: 0,
                },
                lender: PhantomData,
            };

            /// # Safety
            /// `base..base + len` stays mapped (and for a [`WriteSlice`] writable) for `'a`, and no
            /// Rust reference to it is used meanwhile, except shared ones under a [`ReadSlice`].
            pub(crate) unsafe fn from_raw(base: *mut u8, len: usize) -> Self {
                Self { iov: libc::iovec { iov_base: base.cast(), iov_len: len }, lender: PhantomData }
            }

            /// Length in bytes.
            #[inline]
            pub fn len(&self) -> usize {
                self.iov.iov_len
            }

            /// Whether there are no bytes.
            #[inline]
            pub fn is_empty(&self) -> bool {
                self.iov.iov_len == 0
            }

            /// The first `n` bytes, or all of them when there are fewer.
            #[inline]
            pub fn first(self, n: usize) -> Self {
                let len = n.min(self.len());
                Self { iov: libc::iovec { iov_base: self.iov.iov_base, iov_len: len }, lender: PhantomData }
            }

            /// What is left after the first `n` bytes; empty when there are no more than `n`.
            #[inline]
            pub fn skip(self, n: usize) -> Self {
                let n = n.min(self.len());
                // SAFETY: n <= len, so the result is inside (or one past) the same allocation.
                let base = unsafe { self.base().add(n) };
                Self {
                    iov: libc::iovec { iov_base: base.cast(), iov_len: self.len() - n },
                    lender: PhantomData,
                }
            }

            #[inline]
            fn base(&self) -> *mut u8 {
                self.iov.iov_base.cast()
            }
        }

        impl std::fmt::Debug for $name<'_> {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                write!(f, concat!(stringify!($name), "({} bytes)"), self.len())
            }
        }
    };
}

common!(ReadSlice);
common!(WriteSlice);

impl<'a> ReadSlice<'a> {
    /// Copies as many bytes as both sides have; returns how many.
    #[inline]
    pub fn copy_to(&self, dst: &mut [u8]) -> usize {
        let n = self.len().min(dst.len());
        // SAFETY: both sides are valid for n bytes; `copy` allows them to overlap.
        unsafe { std::ptr::copy(self.base(), dst.as_mut_ptr(), n) };
        n
    }

    /// Copies as many bytes as both sides have, from (shared) memory to (shared) memory; returns
    /// how many. The two may overlap: both rings of a frame can belong to one guest.
    #[inline]
    pub fn copy_to_slice(&self, dst: &WriteSlice<'_>) -> usize {
        let n = self.len().min(dst.len());
        // SAFETY: both sides are valid for n bytes; `copy` allows them to overlap.
        unsafe { std::ptr::copy(self.base(), dst.base(), n) };
        n
    }

    /// Asks the CPU to fetch the first cache line for reading. Never faults.
    #[inline]
    pub fn prefetch(&self) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a prefetch is a hint; it has no architectural effect, whatever the address.
        unsafe {
            std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(self.base().cast());
        }
    }
}

impl<'a> WriteSlice<'a> {
    /// Copies as many bytes as both sides have; returns how many.
    #[inline]
    pub fn copy_from(&self, src: &[u8]) -> usize {
        let n = self.len().min(src.len());
        // SAFETY: both sides are valid for n bytes; `copy` allows them to overlap.
        unsafe { std::ptr::copy(src.as_ptr(), self.base(), n) };
        n
    }

    /// The same bytes, for reading.
    #[inline]
    pub fn as_read(&self) -> ReadSlice<'a> {
        ReadSlice { iov: self.iov, lender: PhantomData }
    }

    /// Asks the CPU to fetch the first cache line for writing. Never faults.
    #[inline]
    pub fn prefetch(&self) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a prefetch is a hint; it has no architectural effect, whatever the address.
        unsafe {
            std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_ET0 }>(self.base().cast());
        }
    }
}

impl<'a> From<&'a [u8]> for ReadSlice<'a> {
    fn from(bytes: &'a [u8]) -> Self {
        // SAFETY: the borrow keeps the bytes valid and unwritten for 'a; ReadSlice never writes.
        unsafe { Self::from_raw(bytes.as_ptr().cast_mut(), bytes.len()) }
    }
}

impl<'a> From<&'a mut [u8]> for WriteSlice<'a> {
    fn from(bytes: &'a mut [u8]) -> Self {
        // SAFETY: the exclusive borrow keeps the bytes ours for 'a, and the type is not Send.
        unsafe { Self::from_raw(bytes.as_mut_ptr(), bytes.len()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_stop_at_the_shorter_side() {
        let src = [1u8, 2, 3, 4];
        let mut dst = [0u8; 6];
        assert_eq!(ReadSlice::from(&src[..]).copy_to(&mut dst), 4);
        assert_eq!(dst, [1, 2, 3, 4, 0, 0]);
        let w = WriteSlice::from(&mut dst[..]);
        assert_eq!(w.skip(4).copy_from(&[9, 9, 9]), 2);
        assert_eq!(ReadSlice::from(&src[..]).skip(2).copy_to_slice(&w.first(1)), 1);
        assert_eq!(dst, [3, 2, 3, 4, 9, 9]);
    }

    #[test]
    fn skip_and_first_never_leave_the_slice() {
        let src = [7u8; 3];
        let s = ReadSlice::from(&src[..]);
        assert_eq!(s.skip(9).len(), 0);
        assert_eq!(s.first(9).len(), 3);
        assert!(ReadSlice::EMPTY.is_empty());
        assert_eq!(ReadSlice::EMPTY.copy_to(&mut [0; 4]), 0);
    }

    #[test]
    fn overlapping_copy_is_a_move() {
        let mut bytes = [1u8, 2, 3, 4, 5];
        let w = WriteSlice::from(&mut bytes[..]);
        w.as_read().first(4).copy_to_slice(&w.skip(1));
        assert_eq!(bytes, [1, 1, 2, 3, 4]);
    }
}
