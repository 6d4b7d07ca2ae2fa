//! Borrowed pieces of packet buffers in shared or private memory.
//!
//! [`Translator`](crate::Translator), [`Area`](crate::Area) and [`Window`](crate::Window) make them for the time
//! of a burst, and they end with the borrow. A slice of shared memory must not become `&[u8]`, because the peer
//! may write it at any time; these two types hold only an address and a length and offer only copies. Both
//! have the layout of `iovec`, so an array of them can be passed to `readv` and `writev`. Neither is `Send`: a
//! slice made from a private `&mut [u8]` stays on the thread that borrowed it.

use std::marker::PhantomData;
use std::sync::atomic::{Ordering, compiler_fence};

/// Bytes that can be copied from; it borrows the memory that it points to.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct ReadSlice<'a> {
    iov: libc::iovec,
    lender: PhantomData<&'a [u8]>,
}

/// Bytes that can be copied to; it borrows the memory that it points to.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct WriteSlice<'a> {
    iov: libc::iovec,
    lender: PhantomData<&'a mut [u8]>,
}

macro_rules! common {
    ($name:ident) => {
        impl<'a> $name<'a> {
            /// A slice without bytes.
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

            /// Returns the length in bytes.
            #[inline]
            pub fn len(&self) -> usize {
                self.iov.iov_len
            }

            /// Returns true if the length is 0.
            #[inline]
            pub fn is_empty(&self) -> bool {
                self.iov.iov_len == 0
            }

            /// Returns the first `n` bytes, or all bytes if there are fewer.
            #[inline]
            pub fn first(self, n: usize) -> Self {
                let len = n.min(self.len());
                Self { iov: libc::iovec { iov_base: self.iov.iov_base, iov_len: len }, lender: PhantomData }
            }

            /// Returns the bytes behind the first `n`; an empty slice if there are no more than `n`.
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

/// Copies `n` bytes as `memmove` does, so the two sides may overlap. Headers and small frames are copied by a few
/// inline loads and stores, since a call costs more than the copy. If source and destination are the same,
/// nothing is done: the kernel may have written a frame directly to its destination.
///
/// # Safety
/// `src..src + n` may be read and `dst..dst + n` written.
#[inline(always)]
unsafe fn copy(src: *const u8, dst: *mut u8, n: usize) {
    /// Copies `n` bytes as two possibly overlapping parts of type `T`, with
    /// `size_of::<T>() <= n <= 2 * size_of::<T>()`.
    ///
    /// # Safety
    /// As for `copy`.
    #[inline(always)]
    unsafe fn parts<T: Copy>(src: *const u8, dst: *mut u8, n: usize) {
        let last = n - size_of::<T>();
        // SAFETY: both parts lie inside the n bytes; they are read before any is written.
        unsafe {
            let (a, b) = (src.cast::<T>().read_unaligned(), src.add(last).cast::<T>().read_unaligned());
            dst.cast::<T>().write_unaligned(a);
            dst.add(last).cast::<T>().write_unaligned(b);
        }
    }
    // SAFETY: the caller vouches for n bytes on both sides.
    unsafe {
        match n {
            8..=16 => parts::<u64>(src, dst, n),
            17..=32 => parts::<u128>(src, dst, n),
            33..=64 => parts::<[u128; 2]>(src, dst, n),
            _ if std::ptr::eq(src, dst) => {}
            _ => std::ptr::copy(src, dst, n),
        }
    }
}

/// Follows a copy of bytes that a peer may be writing, of which decisions are made: forbids the compiler to read them from the
/// peer's memory once more in place of the copy, as it may with memory that nobody writes. No instruction.
#[inline(always)]
fn fetched() {
    compiler_fence(Ordering::SeqCst);
}

impl<'a> ReadSlice<'a> {
    /// Copies to `dst` as many bytes as both sides have, and returns their number.
    #[inline]
    pub fn copy_to(&self, dst: &mut [u8]) -> usize {
        let n = self.len().min(dst.len());
        // SAFETY: both sides are valid for n bytes.
        unsafe { copy(self.base(), dst.as_mut_ptr(), n) };
        fetched();
        n
    }

    /// Returns a copy of the first `N` bytes, or `None` if there are fewer.
    #[inline(always)]
    pub fn array<const N: usize>(&self) -> Option<[u8; N]> {
        // SAFETY: N bytes are readable; an array of bytes has no alignment.
        let bytes = (self.len() >= N).then(|| unsafe { self.base().cast::<[u8; N]>().read() });
        fetched();
        bytes
    }

    /// Copies to `dst`, which may be shared memory too, as many bytes as both sides have, and returns their
    /// number. The two may overlap, as source and destination of a frame can belong to one guest.
    #[inline]
    pub fn copy_to_slice(&self, dst: &WriteSlice<'_>) -> usize {
        let n = self.len().min(dst.len());
        // SAFETY: both sides are valid for n bytes.
        unsafe { copy(self.base(), dst.base(), n) };
        // The copy may be private memory, and be judged.
        fetched();
        n
    }

    /// Prefetches the first cache line for reading. Never faults.
    #[inline]
    pub fn prefetch(&self) {
        prefetch_read(self.base());
    }
}

impl<'a> WriteSlice<'a> {
    /// Copies from `src` as many bytes as both sides have, and returns their number.
    #[inline]
    pub fn copy_from(&self, src: &[u8]) -> usize {
        let n = self.len().min(src.len());
        // SAFETY: both sides are valid for n bytes.
        unsafe { copy(src.as_ptr(), self.base(), n) };
        n
    }

    /// Writes two little-endian words, 12 bytes together, unless the same bytes are there already. Returns false
    /// if the slice is shorter. Writing equal bytes again would invalidate the cache line in the caches of its
    /// readers; this leaves it shared.
    #[inline(always)]
    pub fn update(&self, low: u64, high: u32) -> bool {
        let fits = self.len() >= 12;
        if fits {
            // SAFETY: 12 bytes are readable and writable; the accesses need no alignment.
            unsafe {
                let (first, second) = (self.base().cast::<u64>(), self.base().add(8).cast::<u32>());
                if first.read_unaligned() != low.to_le() || second.read_unaligned() != high.to_le() {
                    first.write_unaligned(low.to_le());
                    second.write_unaligned(high.to_le());
                }
            }
        }
        fits
    }

    /// Returns the same bytes for reading.
    #[inline]
    pub fn as_read(&self) -> ReadSlice<'a> {
        ReadSlice { iov: self.iov, lender: PhantomData }
    }

    /// Prefetches the first cache line for writing, which takes it from other CPUs. Never faults.
    #[inline]
    pub fn prefetch(&self) {
        prefetch_write(self.base());
    }
}

/// Prefetches the cache line in which a value of this process begins, which will soon be read and changed. Unlike a load that is thrown away it lets the
/// processor go on at once, so that more of them are under way together.
#[inline(always)]
pub fn prefetch<T>(value: &T) {
    prefetch_write(std::ptr::from_ref(value).cast());
}

/// Prefetches the cache line of a byte that will soon be read. Never faults.
#[inline(always)]
pub(crate) fn prefetch_read(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch is a hint; it has no architectural effect, whatever the address.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(at.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// Prefetches the cache line of a byte that will soon be written. Never faults.
#[inline(always)]
pub(crate) fn prefetch_write(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch is a hint; it has no architectural effect, whatever the address. Every
    // 64-bit processor takes this one, if only to do nothing. (The intrinsic for it becomes a
    // prefetch for reading unless the whole program is built for newer processors.)
    unsafe {
        std::arch::asm!("prefetchw [{}]", in(reg) at, options(nostack, preserves_flags));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
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
    fn copies_of_any_length_and_overlap_move_each_byte() {
        for n in 0..=130usize {
            for shift in [0isize, 1, 7, 8, 33, -1, -7, -8, -33] {
                let before: Vec<u8> = (0..200).map(|i| i as u8).collect();
                let mut bytes = before.clone();
                let (from, to) = (35, (35 + shift) as usize);
                let base = bytes.as_mut_ptr();
                // SAFETY: 35 + 33 + 130 < 200; nothing else uses the vector meanwhile.
                unsafe { copy(base.add(from), base.add(to), n) };
                let mut expect = before.clone();
                expect.copy_within(from..from + n, to);
                assert_eq!(bytes, expect, "{n} {shift}");
            }
        }
    }

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
