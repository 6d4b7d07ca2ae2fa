//! Survival of a peer that truncates the file behind its memory.
//!
//! Touching a shared mapping beyond the end of its file raises SIGBUS. A front end holds the file
//! and can shrink it at any time, so without care any guest's VMM could kill the switch. Every
//! [`Region`](crate::Region) is registered here; when SIGBUS hits one, the handler puts private zero
//! pages in its place, marks it lost, and the interrupted access goes on. Any other SIGBUS ends the
//! process as it would without us.
//!
//! Alternatives considered: demanding `F_SEAL_SHRINK` (refuses stock memory-backend-file), and
//! `process_vm_readv` (a system call per packet).

use std::sync::Once;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

/// Mappings that can exist at once in a process: 256 ports with 8 regions each.
pub const MAX_REGIONS: usize = 2048;

struct Slot {
    /// Raised by every change, so that the handler knows that what it read belongs together.
    generation: AtomicUsize,
    /// First address, or 0 when the slot is free. Written last on entry, first on release.
    start: AtomicUsize,
    len: AtomicUsize,
    lost: AtomicPtr<AtomicBool>,
}

static SLOTS: [Slot; MAX_REGIONS] = [const {
    Slot {
        generation: AtomicUsize::new(0),
        start: AtomicUsize::new(0),
        len: AtomicUsize::new(0),
        lost: AtomicPtr::new(std::ptr::null_mut()),
    }
}; MAX_REGIONS];

/// A slot that is being filled: neither free nor found by the handler.
const RESERVED: usize = usize::MAX;

/// Registers a mapping; `lost` must stay where it is until [`release`]. False when all slots are taken.
pub(crate) fn guard(start: usize, len: usize, lost: &AtomicBool) -> bool {
    static INSTALL: Once = Once::new();
    INSTALL.call_once(install);
    for slot in &SLOTS {
        if slot.start.load(Ordering::Relaxed) == 0
            && slot.start.compare_exchange(0, RESERVED, Ordering::Acquire, Ordering::Relaxed).is_ok()
        {
            slot.generation.fetch_add(1, Ordering::AcqRel);
            slot.len.store(len, Ordering::Release);
            slot.lost.store(std::ptr::from_ref(lost).cast_mut(), Ordering::Release);
            slot.start.store(start, Ordering::Release);
            return true;
        }
    }
    false
}

/// Forgets the mapping that starts at `start`.
pub(crate) fn release(start: usize) {
    for slot in &SLOTS {
        if slot.start.compare_exchange(start, 0, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            return;
        }
    }
}

fn install() {
    // SAFETY: the handler does only what is allowed in a signal handler: atomics, mmap, sigaction.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_sigbus as extern "C" fn(_, _, _) as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_NODEFER;
        libc::sigemptyset(&raw mut action.sa_mask);
        libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut());
    }
}

extern "C" fn on_sigbus(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid siginfo.
    let info = unsafe { &*info };
    // Sent by a process, it carries no address and concerns no mapping.
    let addr = if info.si_code > 0 {
        // SAFETY: a SIGBUS of the kernel's own carries an address.
        unsafe { info.si_addr() }.addr()
    } else {
        0
    };
    for slot in &SLOTS {
        let generation = slot.generation.load(Ordering::Acquire);
        let start = slot.start.load(Ordering::Acquire);
        if start == 0 || start == RESERVED {
            continue;
        }
        let len = slot.len.load(Ordering::Acquire);
        let lost = slot.lost.load(Ordering::Acquire);
        // A slot that changed meanwhile was not the faulting one: that thread holds its region.
        let changed = slot.generation.load(Ordering::Acquire) != generation;
        if changed || addr.wrapping_sub(start) >= len {
            continue;
        }
        // SAFETY: the range is a live mapping of ours (release comes before munmap) of which the
        // faulting thread holds a borrow; private zero pages in its place keep every address valid.
        let mapped = unsafe {
            libc::mmap(
                std::ptr::without_provenance_mut(start),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_FIXED | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if mapped != libc::MAP_FAILED {
            // SAFETY: the flag lives inside the Region, which releases its slot before it goes.
            unsafe { (*lost).store(true, Ordering::Relaxed) };
            return;
        }
    }
    // Not ours: die of it, as without this handler, when the access is repeated.
    // SAFETY: resetting a disposition is async-signal-safe.
    unsafe { libc::signal(libc::SIGBUS, libc::SIG_DFL) };
}
