//! Xen's devices: grants of other domains ([`GrantDevice`], `/dev/xen/gntdev`), our own grants ([`GrantAllocator`],
//! `/dev/xen/gntalloc`) and event channels ([`EventDevice`], `/dev/xen/evtchn`).
//!
//! A connection opens the devices that it needs and closes them by dropping them; they may be used from any thread. Each
//! owns its descriptor only: mappings belong to the caller and stay when the device is closed. A foreign page is
//! mapped by [`GrantDevice::map_grant_refs`], `mmap` at the offset that it returns, and
//! [`GrantDevice::unmap_grant_refs`]. The caller must keep the rules between these calls (one mapping per offset, of
//! exactly its size).

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use ringferry_memory::{ReadSlice, WriteSlice};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

/// Size of a page in bytes, the unit of grants.
const PAGE: usize = 4096;

/// Number of copies that the kernel passes to the hypervisor in one call (`GNTDEV_COPY_BATCH`).
const COPY_BATCH: usize = 16;

/// Initial status of a copy, which stays if the kernel does not reach it. `GNTST_okay` is 0, all errors are negative.
const NOT_DONE: i16 = -1;

/// Returns the number of a request whose argument has `size` bytes: `_IOC(_IOC_NONE, kind, number, size)`.
const fn request(kind: u8, number: u32, size: usize) -> libc::Ioctl {
    ((size as libc::Ioctl) << 16) | ((kind as libc::Ioctl) << 8) | number as libc::Ioctl
}

/// The size in the request number is that of `struct ioctl_gntdev_map_grant_ref` with one reference.
const MAP_GRANT_REF: libc::Ioctl = request(b'G', 0, 24);
const UNMAP_GRANT_REF: libc::Ioctl = request(b'G', 1, size_of::<Range>());
const ALLOC_GREF: libc::Ioctl = request(b'G', 5, 24);
const DEALLOC_GREF: libc::Ioctl = request(b'G', 6, size_of::<Range>());
const GRANT_COPY: libc::Ioctl = request(b'G', 8, size_of::<CopyList>());
const BIND_INTERDOMAIN: libc::Ioctl = request(b'E', 1, 8);
const BIND_UNBOUND: libc::Ioctl = request(b'E', 2, 4);
const NOTIFY: libc::Ioctl = request(b'E', 4, 4);
const RESET: libc::Ioctl = request(b'E', 5, 0);

/// Layout of `struct ioctl_gntdev_unmap_grant_ref` and of `struct ioctl_gntalloc_dealloc_gref`.
#[repr(C)]
struct Range {
    index: u64,
    count: u32,
    pad: u32,
}

/// Layout of `struct ioctl_gntdev_grant_copy`.
#[repr(C)]
struct CopyList {
    count: libc::c_uint,
    segments: *mut RawSegment,
}

/// A page of another domain as source or destination in a `struct gntdev_grant_copy_segment`.
#[derive(Clone, Copy)]
#[repr(C)]
struct ForeignSide {
    gref: u32,
    offset: u16,
    domain: u16,
}

#[derive(Clone, Copy)]
#[repr(C)]
union Side {
    local: *mut libc::c_void,
    foreign: ForeignSide,
}

/// Layout of `struct gntdev_grant_copy_segment`.
#[derive(Clone, Copy)]
#[repr(C)]
struct RawSegment {
    source: Side,
    dest: Side,
    len: u16,
    flags: u16,
    status: i16,
}

/// `GNTCOPY_source_gref`: the source is foreign.
const FOREIGN_SOURCE: u16 = 1;
/// `GNTCOPY_dest_gref`: the destination is foreign.
const FOREIGN_DEST: u16 = 2;

fn open(path: &str) -> io::Result<OwnedFd> {
    Ok(rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK, Mode::empty())?)
}

/// Calls a device with the argument at `argument` and returns the result, which is never negative.
///
/// # Safety
/// `argument` points to what `request` takes, which is also what it may write.
unsafe fn call<T>(fd: &OwnedFd, request: libc::Ioctl, argument: *mut T) -> io::Result<u32> {
    // SAFETY: fd is open; the caller vouches for the argument.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), request, argument) };
    u32::try_from(result).map_err(|_| io::Error::last_os_error())
}

/// Joins two adjacent words of memory, in native byte order.
fn pair(first: u32, second: u32) -> u64 {
    let ([a, b, c, d], [e, f, g, h]) = (first.to_ne_bytes(), second.to_ne_bytes());
    u64::from_ne_bytes([a, b, c, d, e, f, g, h])
}

/// Splits into two adjacent words of memory, in native byte order.
fn unpair(both: u64) -> [u32; 2] {
    let [a, b, c, d, e, f, g, h] = both.to_ne_bytes();
    [u32::from_ne_bytes([a, b, c, d]), u32::from_ne_bytes([e, f, g, h])]
}

fn count_of(len: usize) -> io::Result<u32> {
    u32::try_from(len).map_err(|_| io::ErrorKind::InvalidInput.into())
}

/// Access to pages that other domains have granted.
#[derive(Debug)]
pub struct GrantDevice(OwnedFd);

impl GrantDevice {
    /// Opens `/dev/xen/gntdev`.
    ///
    /// # Errors
    /// `NotFound` without the kernel module `xen-gntdev`; `PermissionDenied`.
    pub fn open() -> io::Result<GrantDevice> {
        open("/dev/xen/gntdev").map(GrantDevice)
    }

    /// Prepares a mapping of the pages `refs` of `domain`, one after the other (`IOCTL_GNTDEV_MAP_GRANT_REF`). Returns
    /// the offset at which exactly that many pages must then be mapped from this descriptor, once; only `mmap` finds
    /// out if the references are valid. The caller must call [`unmap_grant_refs`](Self::unmap_grant_refs) afterwards,
    /// whether it has mapped them or not.
    ///
    /// # Errors
    /// `InvalidInput` without references or for more than the kernel accepts at once; `OutOfMemory`.
    pub fn map_grant_refs(&self, domain: u16, refs: &[u32]) -> io::Result<u64> {
        let count = count_of(refs.len())?;
        if refs.is_empty() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // struct ioctl_gntdev_map_grant_ref: count, pad, index (out), then {domid, ref} each.
        let mut argument = Vec::with_capacity(2 + refs.len());
        argument.extend([pair(count, 0), 0]);
        argument.extend(refs.iter().map(|gref| pair(u32::from(domain), *gref)));
        // SAFETY: the structure above, with as many references as it says.
        unsafe { call(&self.0, MAP_GRANT_REF, argument.as_mut_ptr())? };
        Ok(argument[1])
    }

    /// Releases the offset of a prepared mapping (`IOCTL_GNTDEV_UNMAP_GRANT_REF`). Pages that were mapped stay mapped
    /// until `munmap`.
    pub fn unmap_grant_refs(&self, offset: u64, pages: usize) {
        let Ok(count) = count_of(pages) else { return };
        let mut range = Range { index: offset, count, pad: 0 };
        // SAFETY: a Range is what it takes. It fails only for what was not booked, and then there is nothing to do.
        let _ = unsafe { call(&self.0, UNMAP_GRANT_REF, &mut range) };
    }
}

impl AsFd for GrantDevice {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// The local side of a copy, and its direction.
#[derive(Debug)]
pub enum CopyLocal<'a> {
    /// Copies from the other domain to this slice.
    To(WriteSlice<'a>),
    /// Copies from this slice to the other domain.
    From(ReadSlice<'a>),
}

/// One grant copy, within one page of the other domain.
#[derive(Debug)]
pub struct Copy<'a> {
    /// Grant reference of the other domain's page.
    pub gref: u32,
    /// Offset of the first byte in that page.
    pub offset: u16,
    /// The local bytes, which also determine the length.
    pub local: CopyLocal<'a>,
}

/// A reusable buffer for a batch of copies.
#[derive(Default)]
pub struct CopyBatch(Vec<RawSegment>);

// SAFETY: the addresses in it are used only within `run`, which puts them there.
unsafe impl Send for CopyBatch {}

impl std::fmt::Debug for CopyBatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CopyBatch({})", self.0.len())
    }
}

impl CopyBatch {
    /// Makes all of `copies` between this domain and `domain` in one system call, and returns the number of hypercalls
    /// that it took. The success of each copy is available from [`done`](Self::done) afterwards.
    ///
    /// # Errors
    /// `InvalidInput`, if a copy crosses the end of the other domain's page; nothing was copied then. Otherwise the
    /// errors of the ioctl, such as `EFAULT` if local memory is not mapped; some copies may have been made then.
    pub fn run<'a>(
        &mut self,
        device: &GrantDevice,
        domain: u16,
        copies: impl Iterator<Item = Copy<'a>>,
    ) -> io::Result<u64> {
        self.0.clear();
        let mut operations = 0;
        for Copy { gref, offset, local } in copies {
            let foreign = Side { foreign: ForeignSide { gref, offset, domain } };
            let (address, len) = match &local {
                CopyLocal::To(slice) => parts(slice.as_read()),
                CopyLocal::From(slice) => parts(*slice),
            };
            if usize::from(offset) + len > PAGE {
                self.0.clear();
                let text = format!("a copy of {len} bytes at {offset} goes past the end of its page");
                return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
            }
            // The kernel splits a copy that crosses a local page boundary.
            operations += (address.addr() % PAGE + len).div_ceil(PAGE) * usize::from(len > 0);
            let here = Side { local: address };
            let (source, dest, flags) = match local {
                CopyLocal::To(_) => (foreign, here, FOREIGN_SOURCE),
                CopyLocal::From(_) => (here, foreign, FOREIGN_DEST),
            };
            self.0.push(RawSegment { source, dest, len: len as u16, flags, status: NOT_DONE });
        }
        if self.0.is_empty() {
            return Ok(0);
        }
        let mut list = CopyList { count: count_of(self.0.len())?, segments: self.0.as_mut_ptr() };
        // SAFETY: the list names as many segments as there are. Each names bytes that a slice stands for, writable ones where the
        // kernel writes; the slices' lifetime 'a spans this call.
        unsafe { call(&device.0, GRANT_COPY, &mut list)? };
        Ok(operations.div_ceil(COPY_BATCH) as u64)
    }

    /// Iterates over the copies of the last batch, in order: true for each that was made.
    pub fn done(&self) -> impl Iterator<Item = bool> + '_ {
        self.0.iter().map(|segment| segment.status == 0)
    }
}

/// Returns address and length of a slice.
fn parts(slice: ReadSlice<'_>) -> (*mut libc::c_void, usize) {
    // SAFETY: ReadSlice is repr(transparent) over iovec.
    let iov = unsafe { &*std::ptr::from_ref(&slice).cast::<libc::iovec>() };
    (iov.iov_base, iov.iov_len)
}

/// Allocates pages of the kernel and grants them to other domains.
#[derive(Debug)]
pub struct GrantAllocator(OwnedFd);

impl GrantAllocator {
    /// Opens `/dev/xen/gntalloc`.
    ///
    /// # Errors
    /// `NotFound` without the kernel module `xen-gntalloc`; `PermissionDenied`.
    pub fn open() -> io::Result<GrantAllocator> {
        open("/dev/xen/gntalloc").map(GrantAllocator)
    }

    /// Allocates `count` zeroed pages and grants each to `domain`. Returns the offset at which they can be mapped from
    /// this descriptor, one after the other, and their grant references.
    ///
    /// # Errors
    /// `StorageFull` (`ENOSPC`), if the limit of pages granted by this device or the grant table is exhausted.
    pub fn allocate(&self, domain: u16, count: usize, writable: bool) -> io::Result<(u64, Vec<u32>)> {
        if count == 0 {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // struct ioctl_gntalloc_alloc_gref: domid and flags, count, index (out), then the references (out).
        let [[a, b], [c, d]] = [domain.to_ne_bytes(), u16::from(writable).to_ne_bytes()];
        let mut argument = vec![0u64; 2 + count.div_ceil(2)];
        argument[0] = pair(u32::from_ne_bytes([a, b, c, d]), count_of(count)?);
        // SAFETY: the structure above, with room for as many references as it says.
        unsafe { call(&self.0, ALLOC_GREF, argument.as_mut_ptr())? };
        let refs = argument[2..].iter().flat_map(|both| unpair(*both)).take(count).collect();
        Ok((argument[1], refs))
    }

    /// Frees pages. A page stays granted until it is unmapped here, and the kernel keeps it as long as the other
    /// domain has it mapped.
    pub fn free(&self, offset: u64, count: usize) {
        let Ok(count) = count_of(count) else { return };
        let mut range = Range { index: offset, count, pad: 0 };
        // SAFETY: a Range is what it takes. It fails only for what was not allocated, and then there is nothing to do.
        let _ = unsafe { call(&self.0, DEALLOC_GREF, &mut range) };
    }
}

impl AsFd for GrantAllocator {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// One end of an event channel. Dropping it closes the port.
#[derive(Debug)]
pub struct EventDevice {
    fd: OwnedFd,
    port: u32,
}

impl EventDevice {
    /// Allocates a port to which `domain` may bind.
    ///
    /// # Errors
    /// `NotFound` without the kernel module `xen-evtchn`; `PermissionDenied`; no port is left.
    pub fn unbound(domain: u16) -> io::Result<EventDevice> {
        let fd = open("/dev/xen/evtchn")?;
        let mut argument = u32::from(domain);
        // SAFETY: struct ioctl_evtchn_bind_unbound_port is the number of the domain.
        let port = unsafe { call(&fd, BIND_UNBOUND, &mut argument)? };
        Ok(EventDevice { fd, port })
    }

    /// Binds to a port that `domain` has allocated for this domain.
    ///
    /// # Errors
    /// The same as [`unbound`](Self::unbound), and if there is no such port, or it is for another domain or bound
    /// already.
    pub fn interdomain(domain: u16, port: u32) -> io::Result<EventDevice> {
        let fd = open("/dev/xen/evtchn")?;
        let mut argument = [u32::from(domain), port];
        // SAFETY: struct ioctl_evtchn_bind_interdomain is the numbers of the domain and of its port.
        let port = unsafe { call(&fd, BIND_INTERDOMAIN, &mut argument)? };
        Ok(EventDevice { fd, port })
    }

    /// Returns the number of the port in this domain.
    pub fn port(&self) -> u32 {
        self.port
    }

    /// Notifies the other end.
    ///
    /// # Errors
    /// None that a peer can cause.
    pub fn notify(&self) -> io::Result<()> {
        let mut argument = self.port;
        // SAFETY: struct ioctl_evtchn_notify is the number of the port.
        unsafe { call(&self.fd, NOTIFY, &mut argument).map(drop) }
    }

    /// Consumes a pending event, if any, and unmasks the port. Returns true if there was one. Never blocks.
    ///
    /// # Errors
    /// None that a peer can cause.
    pub fn drain(&self) -> io::Result<bool> {
        let mut port = [0; 4];
        match rustix::io::read(&self.fd, &mut port) {
            Ok(4) => {}
            Ok(_) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Err(Errno::AGAIN | Errno::INTR) => return Ok(false),
            // The kernel's queue has overflowed, which should not be possible with one port.
            Err(Errno::FBIG) => {
                // SAFETY: it takes no argument.
                unsafe { call(&self.fd, RESET, std::ptr::null_mut::<u32>())? };
                port = self.port.to_ne_bytes();
            }
            Err(error) => return Err(error.into()),
        }
        rustix::io::write(&self.fd, &port)?;
        Ok(true)
    }
}

impl AsFd for EventDevice {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_have_the_numbers_of_the_public_headers() {
        assert_eq!((MAP_GRANT_REF, UNMAP_GRANT_REF, GRANT_COPY), (0x18_4700, 0x10_4701, 0x10_4708));
        assert_eq!((ALLOC_GREF, DEALLOC_GREF), (0x18_4705, 0x10_4706));
        assert_eq!(
            (BIND_INTERDOMAIN, BIND_UNBOUND, NOTIFY, RESET),
            (0x08_4501, 0x04_4502, 0x04_4504, 0x4505)
        );
    }

    #[test]
    fn a_segment_lies_in_memory_as_in_gntdev_h() {
        assert_eq!((size_of::<Side>(), size_of::<RawSegment>()), (8, 24));
        let at = |field: &str| match field {
            "dest" => std::mem::offset_of!(RawSegment, dest),
            "len" => std::mem::offset_of!(RawSegment, len),
            "flags" => std::mem::offset_of!(RawSegment, flags),
            _ => std::mem::offset_of!(RawSegment, status),
        };
        assert_eq!([at("dest"), at("len"), at("flags"), at("status")], [8, 16, 18, 20]);
    }

    #[test]
    fn words_side_by_side_survive() {
        assert_eq!(unpair(pair(1, 2)), [1, 2]);
        let bytes = pair(0x0102_0304, 0x0506_0708).to_ne_bytes();
        assert_eq!(bytes[..4], 0x0102_0304u32.to_ne_bytes());
    }

    #[test]
    fn a_copy_past_the_end_of_a_page_is_refused_before_the_kernel_sees_it() {
        let device = GrantDevice(rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap());
        let long = [0; PAGE + 1];
        for (offset, len) in [(0, PAGE + 1), (PAGE, 1), (u16::MAX.into(), 1)] {
            let local = CopyLocal::From(ReadSlice::from(&long[..len]));
            let mut batch = CopyBatch::default();
            let copies = std::iter::once(Copy { gref: 0, offset: offset as u16, local });
            assert_eq!(batch.run(&device, 0, copies).unwrap_err().kind(), io::ErrorKind::InvalidInput);
            assert_eq!(batch.done().count(), 0);
        }
    }

    #[test]
    fn what_the_kernel_refuses_is_not_done() {
        // No Xen device answers here, so every call fails.
        let device = GrantDevice(rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap());
        let local = CopyLocal::From(ReadSlice::from(&b"x"[..]));
        let mut batch = CopyBatch::default();
        assert!(batch.run(&device, 0, std::iter::once(Copy { gref: 0, offset: 0, local })).is_err());
        assert_eq!(batch.done().collect::<Vec<_>>(), [false]);
        assert_eq!(batch.run(&device, 0, std::iter::empty()).unwrap(), 0);
        assert!(device.map_grant_refs(0, &[1]).is_err() && device.map_grant_refs(0, &[]).is_err());
    }
}
