//! Copies between memory of ours and memory that another process lends as a file, made by the kernel.
//!
//! Owns nothing. Slices may lie in memory that others write meanwhile.
//!
//! Considered instead: `process_vm_readv` and `process_vm_writev`, which take any number of places in one call. Measured with
//! 64 places per call, each costs 140 to 250 ns of a page or less, against 190 to 310 ns here; with one place per call
//! it is 460 to 850 ns against 220 to 380, and 16 pages that follow each other are one call here. They also need the
//! right to trace the other process, see only its mappings, and know it by a number that may be someone else's by
//! now.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use ringferry_memory::{ReadSlice, WriteSlice};

/// Most slices of one copy: what the kernel takes at once (`UIO_MAXIOV`).
pub const MAX_SLICES: usize = 1024;

/// Fills the slices, in order, from byte `at` of a file in memory (a memfd); returns how many bytes, fewer than there
/// is room for only at its end or when memory goes away. Slices past [`MAX_SLICES`] stay as they are.
///
/// # Errors
/// What `preadv` says.
pub fn read_at(fd: BorrowedFd<'_>, to: &[WriteSlice<'_>], at: u64) -> io::Result<usize> {
    let at = libc::off_t::try_from(at).map_err(|_| io::ErrorKind::InvalidInput)?;
    let count = to.len().min(MAX_SLICES) as libc::c_int;
    // SAFETY: WriteSlice is repr(transparent) over iovec and stands for memory that may be written.
    let n = unsafe { libc::preadv(fd.as_raw_fd(), to.as_ptr().cast(), count, at) };
    usize::try_from(n).map_err(|_| io::Error::last_os_error())
}

/// Writes the slices, in order, from byte `at` of a file in memory (a memfd) on; returns how many bytes. Slices past
/// [`MAX_SLICES`] are left out.
///
/// # Errors
/// What `pwritev` says.
pub fn write_at(fd: BorrowedFd<'_>, from: &[ReadSlice<'_>], at: u64) -> io::Result<usize> {
    let at = libc::off_t::try_from(at).map_err(|_| io::ErrorKind::InvalidInput)?;
    let count = from.len().min(MAX_SLICES) as libc::c_int;
    // SAFETY: ReadSlice is repr(transparent) over iovec and stands for memory that may be read.
    let n = unsafe { libc::pwritev(fd.as_raw_fd(), from.as_ptr().cast(), count, at) };
    usize::try_from(n).map_err(|_| io::Error::last_os_error())
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringferry_memory::SharedMem;

    #[test]
    fn slices_are_filled_and_written_in_order_and_end_with_the_file() {
        let file = SharedMem::new("copy", 4096).unwrap();
        let parts = [&b"one"[..], b"", b"two"].map(ReadSlice::from);
        assert_eq!(write_at(file.fd(), &parts, 4091).unwrap(), 5);
        assert!(write_at(file.fd(), &parts, 4096).is_err());
        let (mut a, mut b) = ([0; 4], [0xee; 4]);
        let to = [WriteSlice::from(&mut a[..]), WriteSlice::from(&mut b[..])];
        assert_eq!(read_at(file.fd(), &to, 4091).unwrap(), 5);
        assert_eq!((&a, &b), (b"onet", &[b'w', 0xee, 0xee, 0xee]));
        assert_eq!(read_at(file.fd(), &[], 0).unwrap(), 0);
        assert!(read_at(file.fd(), &[], u64::MAX).is_err());
    }

    #[test]
    fn more_slices_than_the_kernel_takes_are_left_out() {
        let file = SharedMem::new("copy", 4096).unwrap();
        let parts = [ReadSlice::from(&b"x"[..]); MAX_SLICES + 1];
        assert_eq!(write_at(file.fd(), &parts, 0).unwrap(), MAX_SLICES);
    }
}
