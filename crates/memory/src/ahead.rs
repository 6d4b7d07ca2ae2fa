//! Pages of shared memory that this process maps before it touches them.
//!
//! A process that has mapped a file has none of its pages yet: the first touch of each is a fault, of a microsecond or more. Whoever is about
//! to touch thousands of them, while somebody waits, has them mapped while nobody does.

use rustix::mm::Advice;

use crate::words::{Area, Words};

impl Area {
    /// Maps the area's pages into this process, as if each were read (`MADV_POPULATE_READ`, madvise(2), Linux 5.14): those that the file does not have are made, so ask for what will be
    /// used. On an older kernel nothing happens.
    ///
    /// It may sleep, as any touch of the memory may, while its owner [takes pages away](crate::region). A file that was truncated raises no SIGBUS.
    pub fn map_ahead(&self) {
        let page = rustix::param::page_size();
        let (start, end) = (self.base().addr(), self.base().addr() + self.len());
        let first = start & !(page - 1);
        let at = self.base().with_addr(first);
        // SAFETY: the advice concerns the pages of the area, which is mapped, and does not change what they hold.
        let _ = unsafe {
            rustix::mm::madvise(at.cast(), end.next_multiple_of(page) - first, Advice::LinuxPopulateRead)
        };
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
    fn all_pages_of_an_area_are_mapped_and_no_others_are_made() {
        let page = rustix::param::page_size();
        let shared = SharedMem::new("test", 64 * page).unwrap();
        let memory = GuestMemory::new(vec![shared.map_at(0x1000_0000).unwrap()]).unwrap();
        let whole = memory.area(0x1000_0000, 64 * page).unwrap();
        // It begins and ends within pages.
        memory.area(0x1000_0000 + 20 * page as u64 + 100, 2 * page).unwrap().map_ahead();
        memory.area(0x1000_0000, 0).unwrap().map_ahead();
        let now = mapped(&whole);
        if !now[20] {
            eprintln!("skipped: this kernel does not know MADV_POPULATE_READ (Linux 5.14)");
            return;
        }
        assert!(now[20..23].iter().all(|mapped| *mapped), "{now:?}");
        // Unless the kernel gives a tmpfs huge pages.
        if rustix::fs::fstat(shared.fd()).unwrap().st_blocks as usize * 512 == 3 * page {
            assert_eq!(now.iter().filter(|mapped| **mapped).count(), 3, "{now:?}");
        }
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
