//! The request structure of interface ioctls (`struct ifreq`) and the call that passes it.
//!
//! `tap` and `netif` make one per request and drop it after the call; it is private to this crate.

use std::ffi::c_char;
use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// Length of the longest interface name in bytes: the kernel's `IFNAMSIZ` without the terminating zero.
pub(crate) const MAX_NAME: usize = libc::IFNAMSIZ - 1;

/// Returns true if the kernel accepts `name` for a new interface.
///
/// `%` is refused although the kernel accepts it, because the kernel takes it as a pattern and invents a name.
pub(crate) fn is_valid_name(name: &str) -> bool {
    !name.is_empty()
        && name.len() <= MAX_NAME
        && name != "."
        && name != ".."
        && name.bytes().all(|b| b.is_ascii_graphic() && !matches!(b, b'/' | b':' | b'%'))
}

/// Makes a request about the interface `name`, with all other fields zero; `None` if the name does not fit.
pub(crate) fn for_name(name: &str) -> Option<libc::ifreq> {
    if name.is_empty() || name.len() > MAX_NAME || name.contains('\0') {
        return None;
    }
    let mut request = zeroed();
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as c_char;
    }
    Some(request)
}

/// Makes a request without a name, for calls that fill it in.
pub(crate) fn zeroed() -> libc::ifreq {
    // SAFETY: ifreq is integers and a union of integers, arrays and one raw pointer, for all of
    // which zero is a value.
    unsafe { std::mem::zeroed() }
}

/// Returns the name in a request that the kernel filled in.
pub(crate) fn name_of(request: &libc::ifreq) -> String {
    let bytes: Vec<u8> = request.ifr_name.iter().map(|&c| c as u8).take_while(|&b| b != 0).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Calls `ioctl(fd, request, argument)`, with the argument as a structure passed by address.
///
/// # Safety
/// `request` must be one whose argument is a `T` (or a prefix of it), and `argument` must hold
/// what that request reads, including any address inside it.
pub(crate) unsafe fn ioctl<T>(fd: impl AsFd, request: libc::Ioctl, argument: &mut T) -> io::Result<()> {
    let fd = fd.as_fd().as_raw_fd();
    // SAFETY: fd is open for the call; the caller vouches for the argument, which is exclusively
    // ours and lives until the call returns.
    if unsafe { libc::ioctl(fd, request, std::ptr::from_mut(argument)) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_follow_the_kernels_rules() {
        for good in ["a", "tap0", "rf-guest.1", "abcdefghijklmno"] {
            assert!(is_valid_name(good), "{good}");
        }
        for bad in ["", ".", "..", "a b", "a/b", "a:1", "tap%d", "ä", "a\0", "abcdefghijklmnop"] {
            assert!(!is_valid_name(bad), "{bad}");
        }
    }

    #[test]
    fn a_name_survives_the_request() {
        assert_eq!(name_of(&for_name("abcdefghijklmno").unwrap()), "abcdefghijklmno");
        assert!(for_name("abcdefghijklmnop").is_none());
        assert!(for_name("").is_none());
    }
}
