//! Guest memory on hugetlbfs, of whose pages the system has too few.

use std::os::fd::AsFd;

use ringferry_memory::{GuestMemory, Region, RegionSpec, SharedMem, Words};
use rustix::fs::MemfdFlags;

/// Size of the pages that are asked for, in bytes.
const PAGE: u64 = 2 << 20;

/// Returns the number of pages that the system can give, now or on demand.
fn available() -> u64 {
    let about = |name: &str| {
        let text = std::fs::read_to_string(format!("/sys/kernel/mm/hugepages/hugepages-2048kB/{name}"));
        text.ok().and_then(|text| text.trim().parse::<u64>().ok()).unwrap_or(0)
    };
    about("nr_hugepages") + about("nr_overcommit_hugepages")
}

/// A file on hugetlbfs may be longer than there are pages, and whoever touches a page too many gets SIGBUS.
#[test]
fn l_a_huge_page_that_cannot_be_had_costs_its_region_and_nothing_else() {
    let Ok(file) =
        rustix::fs::memfd_create("huge", MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB)
    else {
        eprintln!("skipped: this kernel has no huge pages");
        return;
    };
    let pages = available() + 1;
    if pages > 64 {
        eprintln!("skipped: {pages} huge pages would have to be touched");
        return;
    }
    rustix::fs::ftruncate(&file, pages * PAGE).unwrap();
    let spec = |size| RegionSpec { guest_addr: 0, size, user_addr: 0, mmap_offset: 0 };
    // Its last bytes are left out: the mapping has whole pages all the same.
    let size = pages * PAGE - 100;
    let map = GuestMemory::new(vec![Region::map(file.as_fd(), spec(size)).unwrap()]).unwrap();
    let small = SharedMem::new("small", 0x1000).unwrap();
    let other = GuestMemory::new(vec![Region::map(small.fd(), spec(0x1000)).unwrap()]).unwrap();
    let area = map.area(0, size as usize).unwrap();
    let starts = (0..pages).map(|page| (page * PAGE) as usize);
    for (index, at) in starts.clone().enumerate() {
        // A read is enough.
        assert_eq!(area.load64(at), 0, "page {index}");
    }
    assert!(map.is_lost() && !other.is_lost());
    for at in starts {
        area.store64(at, 7);
        assert_eq!(area.load64(at), 7, "what is there instead can be used");
    }
}
