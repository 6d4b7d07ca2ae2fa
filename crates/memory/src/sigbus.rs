//! Survival of a peer that truncates the file behind its memory.
//!
//! Touching a shared mapping beyond the end of its file raises SIGBUS. A front end holds the file
//! and can shrink it at any time, so without care any guest's VMM could kill the switch. Every
//! [`Region`](crate::Region) whose file a peer may shrink is registered here; when SIGBUS hits one, the
//! handler puts private zero pages in its place, marks it lost, and the interrupted access goes on. Any
//! other SIGBUS goes to the handler that was installed before this one, or ends the process as it would
//! without us.
//!
//! A registered mapping is a slot of a fixed table, which the handler reads without a lock. Slots may
//! overlap, as several regions can be made of one existing mapping; the table is all that the handler
//! touches, so a region that another thread drops meanwhile does no harm.
//!
//! Alternatives considered: demanding `F_SEAL_SHRINK` (refuses stock memory-backend-file), and
//! `process_vm_readv` (a system call per packet).

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Once, OnceLock};

/// Mappings that can exist at once in a process: 256 ports with 8 regions each.
pub const MAX_REGIONS: usize = 2048;

struct Slot {
    /// Raised by every registration, so that the handler knows that what it read belongs together.
    generation: AtomicUsize,
    /// First address, or 0 when the slot is free. Written last on entry, first on release.
    start: AtomicUsize,
    len: AtomicUsize,
    /// The last generation whose memory was lost; generations begin at 1.
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

/// A slot that is being filled: neither free nor found by the handler.
const RESERVED: usize = usize::MAX;

/// The registration of one mapping, which must be dropped before the mapping goes.
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
    /// Registers `len` bytes from `start` on, both multiples of the page size. `None` when all slots are taken.
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

    /// Whether pages of the mapping were replaced.
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

/// What was done about SIGBUS before our handler was installed.
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();

fn install() {
    // SAFETY: zeroed is a valid sigaction. The handler does only what is allowed in a signal handler:
    // atomics, mmap, sigaction, and calling the handler that was there before.
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

/// The registered mappings as generation, start, end and slot. A slot that changes meanwhile is left out: the
/// faulting thread holds its region, so it was not that one.
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

/// Replaces the memory around a faulting address; false when it is not registered.
fn replace(addr: usize) -> bool {
    // Of mappings that overlap, only what they have in common is certainly mapped on behalf of the faulting
    // thread, which holds one of them; another thread may be about to unmap the rest.
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
        // Nobody's: die of it, as without this handler, when the access is repeated.
        // SAFETY: resetting a disposition is async-signal-safe.
        None => unsafe {
            libc::signal(libc::SIGBUS, libc::SIG_DFL);
        },
    }
}
