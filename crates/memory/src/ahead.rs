//! Pages of shared memory that this process maps before it touches them.
//!
//! A process that has mapped a file has none of its pages yet: the first touch of each is a fault, of a microsecond or more. Whoever is about
//! to touch thousands of them, while somebody waits, has them mapped while nobody does.

use rustix::mm::Advice;

use crate::words::{Area, Words};

/// Pages that the kernel is asked about at a time.
const PAGES: usize = 512;

impl Area {
    /// Maps what the file has of the area's pages into this process (`MADV_POPULATE_READ`, madvise(2), Linux 5.14). Pages that the file does not have stay missing: nobody is charged for
    /// memory that is not used. (Of a file that this process's user may not write by its mode, the kernel does not tell which those are, and they are made.) On an older kernel nothing happens.
    ///
    /// It may sleep, as any touch of the memory may, while its owner [takes pages away](crate::region). A file that was truncated raises no SIGBUS.
    pub fn map_ahead(&self) {
        let page = rustix::param::page_size();
        let (start, end) = (self.base().addr(), self.base().addr() + self.len());
        let first = start & !(page - 1);
        let mut is_there = [0u8; PAGES];
        for from in (first..end).step_by(PAGES * page) {
            let pages = (end.next_multiple_of(page) - from).min(PAGES * page) / page;
            let at = self.base().with_addr(from);
            // SAFETY: the pages are those of the area, which is mapped, and the kernel writes one byte for each of them.
            let asked = unsafe { libc::mincore(at.cast(), pages * page, is_there.as_mut_ptr()) };
            if asked != 0 {
                return;
            }
            let mut next = 0;
            for run in is_there[..pages].chunk_by(|a, b| a & 1 == b & 1) {
                let at = at.wrapping_add(next * page);
                next += run.len();
                if run[0] & 1 == 1 {
                    // SAFETY: the advice concerns pages of the area, which is mapped, and does not change what they hold.
                    let _ = unsafe {
                        rustix::mm::madvise(at.cast(), run.len() * page, Advice::LinuxPopulateRead)
                    };
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guest::GuestMemory;
    use crate::shared::SharedMem;

    /// Which of a mapping's pages this process has mapped, by its own page table.
    fn mapped(area: &Area) -> Vec<bool> {
        use std::os::unix::fs::FileExt;

        let page = rustix::param::page_size();
        let start = area.base().addr() / page;
        let table = std::fs::File::open("/proc/self/pagemap").unwrap();
        let entry = |at: usize| {
            let mut entry = [0; 8];
            table.read_exact_at(&mut entry, 8 * (start + at) as u64).unwrap();
            u64::from_le_bytes(entry) >> 63 == 1
        };
        (0..area.len() / page).map(entry).collect()
    }

    #[test]
    fn pages_that_are_there_are_mapped_and_no_others_are_made() {
        let page = rustix::param::page_size();
        // More than are asked about at a time.
        let pages = 2 * PAGES + 40;
        let shared = SharedMem::new("test", pages * page).unwrap();
        // Pages that somebody else has written: a run, a lone one, and the last.
        let there = |at: usize| (3..50).contains(&at) || at == 700 || at == pages - 1;
        for at in (0..pages).filter(|at| there(*at)) {
            rustix::io::pwrite(shared.fd(), b"x", (at * page) as u64).unwrap();
        }
        let memory = GuestMemory::new(vec![shared.map_at(0x1000_0000).unwrap()]).unwrap();
        let area = memory.area(0x1000_0000, pages * page).unwrap();
        let blocks = || rustix::fs::fstat(shared.fd()).unwrap().st_blocks as usize * 512;
        let before = blocks();
        assert!(mapped(&area).iter().all(|mapped| !mapped));
        area.map_ahead();
        let now = mapped(&area);
        if !now[700] {
            eprintln!("skipped: this kernel does not know MADV_POPULATE_READ (Linux 5.14)");
            return;
        }
        assert!((0..pages).filter(|at| there(*at)).all(|at| now[at]), "{now:?}");
        assert_eq!(blocks(), before, "pages were made");
        // Where the kernel gives a tmpfs huge pages, more than was written is there.
        if before == (0..pages).filter(|at| there(*at)).count() * page {
            assert!((0..pages).all(|at| now[at] == there(at)), "{now:?}");
        }
        // A part that begins and ends within pages, and nothing at all.
        memory.area(0x1000_0000 + 100, page).unwrap().map_ahead();
        memory.area(0x1000_0000, 0).unwrap().map_ahead();
    }

    #[test]
    fn a_file_that_was_truncated_raises_nothing() {
        let page = rustix::param::page_size();
        let shared = SharedMem::sealable("test", 8 * page).unwrap();
        rustix::io::pwrite(shared.fd(), &vec![1; 8 * page], 0).unwrap();
        let memory = GuestMemory::new(vec![shared.map_at(0).unwrap()]).unwrap();
        rustix::fs::ftruncate(shared.fd(), page as u64).unwrap();
        memory.area(0, 8 * page).unwrap().map_ahead();
        assert!(!memory.is_lost());
    }
}
