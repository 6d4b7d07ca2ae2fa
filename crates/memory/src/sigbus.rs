//! A SIGBUS handler that survives a peer truncating the file behind its memory.
//!
//! Touching a shared mapping beyond the end of its file raises SIGBUS. A front end holds the file and can shrink
//! it at any time, so without a handler the VMM of any guest could kill the switch. Each
//! [`Region`](crate::Region) whose file a peer may shrink registers a `Guard` when it is mapped and drops it
//! before it is unmapped. When SIGBUS hits a registered mapping, the handler, on the faulting thread, replaces
//! it by private zero pages, marks it lost, and the interrupted access is repeated. Any other SIGBUS goes to
//! the handler that was installed before this one, or ends the process as it would without a handler.
//!
//! Registered mappings are slots of a fixed table that the handler reads without a lock, by a generation count
//! per slot. Slots may overlap, as several regions can be made of one existing mapping. The handler touches
//! nothing but the table, so a region that another thread drops meanwhile does no harm.
//!
//! Alternatives considered: demanding `F_SEAL_SHRINK` (refuses stock memory-backend-file), and
//! `process_vm_readv` (a system call per packet).

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};
use std::sync::{Once, OnceLock};

/// Largest number of guarded mappings in a process: 256 ports with 32 regions each, of which a front end can use a few
/// hundred while those that it has replaced are not unmapped yet.
pub const MAX_REGIONS: usize = 8192;

struct Slot {
    /// Count of registrations in this slot. The handler reads it before and after the other fields to know that
    /// they belong together.
    generation: AtomicUsize,
    /// Address of the first byte, or 0 if the slot is free. Written last on registration, first on release.
    start: AtomicUsize,
    len: AtomicUsize,
    /// The generation whose memory was lost last, or 0; generations begin at 1.
    lost: AtomicUsize,
}

static SLOTS: [Slot; MAX_REGIONS] = [const {
    Slot {
        generation: AtomicUsize::new(0),
        start: AtomicUsize::new(0),
        len: AtomicUsize::new(0),
        lost: AtomicUsize::new(0),
    }
}; MAX_REGIONS];

/// Value of `start` in a slot that is being filled: the slot is not free, and the handler skips it.
const RESERVED: usize = usize::MAX;

/// The registration of one mapping. It must be dropped before the mapping is unmapped.
#[derive(Debug)]
pub(crate) struct Guard {
    slot: &'static Slot,
    generation: usize,
}

impl std::fmt::Debug for Slot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Slot")
    }
}

impl Guard {
    /// Registers `len` bytes from `start` on, both multiples of the page size, and installs the handler the first
    /// time. Returns `None` if all slots are taken.
    pub fn new(start: usize, len: usize) -> Option<Guard> {
        static INSTALL: Once = Once::new();
        INSTALL.call_once(install);
        for slot in &SLOTS {
            if slot.start.load(Ordering::Relaxed) == 0
                && slot.start.compare_exchange(0, RESERVED, Ordering::Acquire, Ordering::Relaxed).is_ok()
            {
                let generation = slot.generation.fetch_add(1, Ordering::AcqRel) + 1;
                slot.len.store(len, Ordering::Release);
                slot.start.store(start, Ordering::Release);
                return Some(Guard { slot, generation });
            }
        }
        None
    }

    /// Returns true if pages of the mapping were replaced.
    #[inline]
    pub fn is_lost(&self) -> bool {
        self.slot.lost.load(Ordering::Relaxed) == self.generation
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.slot.start.store(0, Ordering::Release);
    }
}

/// The descriptor of the event that tells of memory that was lost, or -1.
static EVENT: AtomicI32 = AtomicI32::new(-1);

/// Has an eventfd count whenever memory is lost, so that its owner need not look at all regions again and again: until the memory is let go of, whatever is written to it takes
/// memory of this process. It must not block. The process has one; a later one takes its place.
///
/// # Errors
/// No descriptor is left.
pub fn tell(event: OwnedFd) -> io::Result<()> {
    let fd = event.as_raw_fd();
    if EVENT.compare_exchange(-1, fd, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
        // It is the handler's from now on.
        std::mem::forget(event);
        return Ok(());
    }
    // The number stays, as the handler may be about to use it.
    // SAFETY: both descriptors are open, and the second one is nobody's but the handler's.
    match unsafe { libc::dup3(fd, EVENT.load(Ordering::Relaxed), libc::O_CLOEXEC) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// The disposition of SIGBUS before our handler was installed.
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();

fn install() {
    // SAFETY: zeroed is a valid sigaction. The handler does only what is allowed in a signal handler:
    // atomics, mmap, write, sigaction, and calling the handler that was there before.
    unsafe {
        let mut previous: libc::sigaction = std::mem::zeroed();
        if libc::sigaction(libc::SIGBUS, std::ptr::null(), &raw mut previous) == 0 {
            let _ = PREVIOUS.set(previous);
        }
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_sigbus as extern "C" fn(_, _, _) as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_NODEFER;
        libc::sigemptyset(&raw mut action.sa_mask);
        libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut());
    }
}

/// Iterates over the registered mappings as generation, start, end and slot. A slot that changes meanwhile is
/// skipped: the faulting thread holds its region, so the changing slot is not the faulting one.
fn registered() -> impl Iterator<Item = (usize, usize, usize, &'static Slot)> {
    SLOTS.iter().filter_map(|slot| {
        let generation = slot.generation.load(Ordering::Acquire);
        let start = slot.start.load(Ordering::Acquire);
        let len = slot.len.load(Ordering::Acquire);
        let steady = slot.generation.load(Ordering::Acquire) == generation;
        let taken = start != 0 && start != RESERVED;
        (steady && taken).then(|| (generation, start, start.saturating_add(len), slot))
    })
}

/// Replaces the memory around a faulting address by zero pages. Returns false if it is not registered.
fn replace(addr: usize) -> bool {
    // If registered mappings overlap, only their intersection is certain to stay mapped: the faulting thread
    // holds one of them, and another thread may be about to unmap the rest.
    let covers = |start, end| (start..end).contains(&addr);
    let common = registered()
        .filter(|&(_, start, end, _)| covers(start, end))
        .map(|(_, start, end, _)| (start, end))
        .reduce(|a, b| (a.0.max(b.0), a.1.min(b.1)));
    let Some((start, end)) = common else { return false };
    // SAFETY: the range is part of a mapping whose region the faulting thread has borrowed (a Guard goes
    // before its mapping); private zero pages in its place keep every address valid.
    let mapped = unsafe {
        libc::mmap(
            std::ptr::without_provenance_mut(start),
            end - start,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_FIXED | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    if mapped == libc::MAP_FAILED {
        return false;
    }
    for (generation, other_start, other_end, slot) in registered() {
        if other_start < end && start < other_end {
            slot.lost.store(generation, Ordering::Relaxed);
        }
    }
    true
}

extern "C" fn on_sigbus(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid siginfo. Sent by a process, the signal carries no address and concerns no
    // mapping; one of the kernel's own carries the address.
    let addr = unsafe { if (*info).si_code > 0 { (*info).si_addr().addr() } else { 0 } };
    if replace(addr) {
        let (event, one) = (EVENT.load(Ordering::Relaxed), 1_u64);
        // SAFETY: write(2) may be called in a handler, and the number lives until it returns. Nobody who touches memory looks at errno afterwards.
        unsafe { libc::write(event, std::ptr::from_ref(&one).cast(), size_of_val(&one)) };
        return;
    }
    let previous =
        PREVIOUS.get().filter(|action| ![libc::SIG_DFL, libc::SIG_IGN].contains(&action.sa_sigaction));
    match previous {
        // SAFETY: the kernel was given these functions as handlers of this signal; the flag says which kind each is.
        Some(action) => unsafe {
            if action.sa_flags & libc::SA_SIGINFO != 0 {
                type Handler = extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void);
                std::mem::transmute::<usize, Handler>(action.sa_sigaction)(signal, info, context);
            } else {
                std::mem::transmute::<usize, extern "C" fn(libc::c_int)>(action.sa_sigaction)(signal);
            }
        },
        // There was no other handler: the repeated access ends the process, as without this handler.
        // SAFETY: resetting a disposition is async-signal-safe.
        None => unsafe {
            libc::signal(libc::SIGBUS, libc::SIG_DFL);
        },
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use rustix::event::{EventfdFlags, eventfd};

    use super::*;
    use crate::SharedMem;

    /// Whoever waited for its next look at all regions meanwhile paid for each page that was written to.
    #[test]
    fn l_memory_that_is_lost_is_told_of_at_once() {
        let size = 4 * rustix::param::page_size();
        for _ in 0..2 {
            let event = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).unwrap();
            tell(event.try_clone().unwrap()).unwrap();
            let mut count = [0; 8];
            let file = SharedMem::new("lost", size).unwrap();
            let region = file.map_at(0).unwrap();
            rustix::fs::ftruncate(file.fd().as_fd(), 0).unwrap();
            let area = region.area(0, size).unwrap();
            area.write(0, 4).unwrap().copy_from(&[1; 4]);
            assert!(region.is_lost());
            // Other tests of this process may lose memory meanwhile.
            rustix::io::read(&event, &mut count).unwrap();
            assert!(u64::from_ne_bytes(count) > 0);
        }
    }
}
