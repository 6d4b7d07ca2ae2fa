//! The dirty log of a live migration: a bitmap in shared memory with one bit for each page of 4 KiB of guest memory.
//!
//! The control plane maps a [`DirtyLog`] when a front end passes its file (vhost-user's `SET_LOG_BASE`). From then on whoever
//! writes to guest memory calls [`DirtyLog::mark`] after the write, on any thread; the front end clears the bits and sends their
//! pages to the other host. The last `Arc` unmaps the log. Other processes, and other ports of ours, set bits in the same words, so
//! each bit is set by an atomic OR.
//!
//! The size of the log is the peer's choice, and so is whether its file keeps that size: a page without a bit is passed over, the
//! mapping counts towards a [`MapBudget`], and a truncated file is survived as that of any other [`Region`].

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use crate::budget::MapBudget;
use crate::guest::GuestMemory;
use crate::region::{MapError, Region, RegionSpec};

/// Size in bytes of the piece of guest memory that a bit stands for, whatever the size of a page of either host
/// (vhost-user, "Migration").
pub const LOG_PAGE: u64 = 4096;

/// A bitmap in which writes to guest memory are recorded; see the [module](self).
#[derive(Debug)]
pub struct DirtyLog {
    region: Arc<Region>,
}

impl DirtyLog {
    /// Maps `size` bytes of `fd` from `offset` on, and takes them from `budget` until they are unmapped. Any size will do; bit
    /// `n % 8` of byte `n / 8` is that of guest page `n`.
    ///
    /// # Errors
    /// As for [`Region::map_within`]; nothing stays mapped then.
    pub fn map_within(
        fd: BorrowedFd<'_>,
        size: u64,
        offset: u64,
        budget: &Arc<MapBudget>,
    ) -> Result<Arc<DirtyLog>, MapError> {
        let spec = RegionSpec { guest_addr: 0, size, user_addr: 0, mmap_offset: offset };
        Ok(Arc::new(DirtyLog { region: Region::map_within(fd, spec, budget)? }))
    }

    /// Records that `len` bytes of guest memory from `guest_addr` on were written. Call it after the write: whoever sees the bit
    /// sees the bytes. Pages for which the log has no bit are passed over.
    pub fn mark(&self, guest_addr: u64, len: usize) {
        let Some(further) = (len as u64).checked_sub(1) else { return };
        let last = guest_addr.saturating_add(further) / LOG_PAGE;
        let mut page = guest_addr / LOG_PAGE;
        while page <= last {
            let Some(byte) = self.byte(page / 8) else { return };
            // The bits of this byte from `page` to `last`, of which there is at least one.
            let end = (page | 7).min(last);
            let mask = (0xff << (page % 8)) as u8 & 0xff >> (7 - end % 8);
            // Release: the bytes become visible before their bit.
            byte.fetch_or(mask, Ordering::Release);
            page = end + 1;
        }
    }

    /// Records that all of this guest memory may have been written, as by a writer that was killed before it could say what. What else the log has bits for, which
    /// may be as many as its peer likes, is not touched.
    pub fn mark_all(&self, memory: &GuestMemory) {
        for RegionSpec { guest_addr, size, .. } in memory.regions().iter().map(|region| *region.spec()) {
            self.mark(guest_addr, usize::try_from(size).unwrap_or(usize::MAX));
        }
    }

    /// Returns a byte of the bitmap, or `None` behind its end.
    fn byte(&self, at: u64) -> Option<&AtomicU8> {
        // SAFETY: the byte is inside the region, which is mapped as long as self lives; a byte needs no alignment.
        (at < self.region.spec().size)
            .then(|| unsafe { AtomicU8::from_ptr(self.region.base().add(at as usize)) })
    }

    /// Clears the log and returns the numbers of the pages that were marked, in ascending order: the front end's half.
    pub fn take(&self) -> Vec<u64> {
        let bytes = 0..self.region.spec().size;
        let marked = bytes.filter_map(|at| Some((at, self.byte(at)?)));
        let taken = marked.filter(|(_, byte)| byte.load(Ordering::Relaxed) != 0);
        // Acquire: what is read of a page is read after its bit.
        let taken = taken.map(|(at, byte)| (at, byte.swap(0, Ordering::Acquire)));
        taken
            .flat_map(|(at, bits)| {
                (0..8).filter(move |bit| bits & 1 << bit != 0).map(move |bit| 8 * at + bit)
            })
            .collect()
    }

    /// Returns true if the peer truncated the file, so that what is marked reaches nobody any more.
    pub fn is_lost(&self) -> bool {
        self.region.is_lost()
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::sync::atomic::AtomicBool;

    use super::*;
    use crate::shared::SharedMem;

    fn log(file: &SharedMem, size: u64) -> Arc<DirtyLog> {
        DirtyLog::map_within(file.fd(), size, 0, &MapBudget::unlimited()).unwrap()
    }

    /// The numbers of all bits that are set in the file, which are cleared.
    fn bits(file: &SharedMem, size: u64) -> Vec<u64> {
        log(file, size).take()
    }

    #[test]
    fn exactly_the_pages_of_a_write_are_marked() {
        // (address, length) and the pages, first and last.
        for (addr, len, first, last) in [
            (0, 1, 0, 0),
            (4095, 1, 0, 0),
            (4095, 2, 0, 1),
            (7 * 4096, 4096, 7, 7),
            (7 * 4096, 4097, 7, 8),
            (3 * 4096 + 5, 65536, 3, 19),
            (8 * 4096, 8 * 4096, 8, 15),
            (63 * 4096 + 4000, 200, 63, 64),
        ] {
            let file = SharedMem::new("log", 4096).unwrap();
            log(&file, 100).mark(addr, len);
            assert_eq!(bits(&file, 4096), (first..=last).collect::<Vec<_>>(), "{addr} {len}");
        }
    }

    #[test]
    fn cve_2020_10722_nothing_is_written_outside_the_log() {
        let file = SharedMem::new("log", 4096).unwrap();
        let short = log(&file, 3);
        short.mark(0, 0);
        short.mark(24 * 4096, 1);
        short.mark(u64::MAX, usize::MAX);
        short.mark(1 << 52, 1 << 30);
        assert!(bits(&file, 4096).is_empty());
        short.mark(22 * 4096, 1 << 40);
        assert_eq!(bits(&file, 4096), [22, 23]);
        for (size, offset) in [(0, 0), (4097, 0), (1, 4096), (u64::MAX, 1), (4096, u64::MAX - 4095)] {
            assert!(DirtyLog::map_within(file.fd(), size, offset, &MapBudget::unlimited()).is_err());
        }
    }

    /// A log of terabytes, which holds nothing, would be filled.
    #[test]
    fn no_more_is_marked_than_there_is_of_guest_memory() {
        let (file, memory) =
            (SharedMem::new("log", 1 << 30).unwrap(), SharedMem::new("ram", 0x4000).unwrap());
        let region = |guest_addr, mmap_offset| {
            let spec = RegionSpec { guest_addr, size: 0x2000, user_addr: guest_addr, mmap_offset };
            Region::map(memory.fd(), spec).unwrap()
        };
        let memory = GuestMemory::new(vec![region(0x3000, 0), region(0x10_0000, 0x2000)]).unwrap();
        log(&file, 1 << 30).mark_all(&memory);
        let blocks = rustix::fs::fstat(file.fd()).unwrap().st_blocks * 512;
        assert!((1..=0x2000).contains(&blocks), "{blocks} bytes were written to");
        assert_eq!(bits(&file, 4096), [3, 4, 256, 257]);
    }

    #[test]
    fn an_offset_is_that_of_the_first_byte() {
        let file = SharedMem::new("log", 8192).unwrap();
        let log = DirtyLog::map_within(file.fd(), 16, 4100, &MapBudget::unlimited()).unwrap();
        log.mark(9 * 4096, 1);
        assert_eq!(bits(&file, 8192), [8 * 4101 + 1]);
    }

    #[test]
    fn a_log_counts_towards_the_budget_and_survives_its_truncation() {
        let file = SharedMem::new("log", 0x4000).unwrap();
        let budget = MapBudget::new(0x4000, "port_memory_gib");
        let log = DirtyLog::map_within(file.fd(), 0x4000, 0, &budget).unwrap();
        assert!(DirtyLog::map_within(file.fd(), 1, 0, &budget).is_err());
        rustix::fs::ftruncate(file.fd().as_fd(), 0).unwrap();
        log.mark(0, 1 << 40);
        assert!(log.is_lost());
        drop(log);
        assert_eq!(budget.taken(), 0);
    }

    #[test]
    fn bits_that_several_threads_set_while_a_front_end_clears_them_are_all_seen() {
        const PAGES: u64 = 4096;
        const THREADS: u64 = 3;
        let file = SharedMem::new("log", (PAGES / 8) as usize).unwrap();
        let front_end = log(&file, PAGES / 8);
        let done = AtomicBool::new(false);
        let mut seen = std::thread::scope(|scope| {
            let markers: Vec<_> = (0..THREADS)
                .map(|thread| {
                    let log = log(&file, PAGES / 8);
                    // Neighbouring pages belong to different threads, so that all of them write to each byte.
                    let own = move |page: &u64| page % THREADS == thread;
                    scope.spawn(move || (0..PAGES).filter(own).for_each(|page| log.mark(page * 4096, 1)))
                })
                .collect();
            let done = &done;
            let taker = scope.spawn(move || {
                let mut seen = Vec::new();
                loop {
                    let last = done.load(Ordering::Acquire);
                    seen.extend(front_end.take());
                    if last {
                        return seen;
                    }
                }
            });
            markers.into_iter().for_each(|marker| marker.join().unwrap());
            done.store(true, Ordering::Release);
            taker.join().unwrap()
        });
        seen.sort_unstable();
        assert_eq!(seen, (0..PAGES).collect::<Vec<_>>());
    }
}
