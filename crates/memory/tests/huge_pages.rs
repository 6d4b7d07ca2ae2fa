//! Guest memory on hugetlbfs, of whose pages the system has too few.

use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::process::Command;

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

/// A tmpfs that is mounted while this lives.
struct Tmpfs(tempfile::TempDir);

impl Tmpfs {
    fn mount(options: &str) -> Option<Tmpfs> {
        let at = tempfile::tempdir().unwrap();
        let mount =
            Command::new("mount").args(["-t", "tmpfs", "-o", options, "none"]).arg(at.path()).output();
        mount.is_ok_and(|mount| mount.status.success()).then_some(Tmpfs(at))
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.0.path()).status();
    }
}

/// Whoever touches a page of a tmpfs with huge=always clears all of the 2 MiB around it, if it may: a guest chooses what others touch, and its owner how it
/// is mounted.
#[test]
fn a_byte_on_a_tmpfs_of_huge_pages_costs_a_page_and_not_two_mebibytes() {
    let Some(tmpfs) = Tmpfs::mount("huge=always,size=16m") else {
        assert!(
            std::env::var_os("CI").is_none_or(|ci| ci != "true"),
            "no tmpfs of huge pages can be mounted"
        );
        eprintln!(
            "skipped: no tmpfs of huge pages can be mounted: needs root, and a kernel with huge pages on tmpfs"
        );
        return;
    };
    let path = tmpfs.0.path().join("memory");
    let file = std::fs::File::options().read(true).write(true).create_new(true).open(path).unwrap();
    file.set_len(4 * PAGE).unwrap();
    let spec = RegionSpec { guest_addr: 0, size: 4 * PAGE, user_addr: 0, mmap_offset: 0 };
    let map = GuestMemory::new(vec![Region::map(file.as_fd(), spec).unwrap()]).unwrap();
    let area = map.area(0, 4 * PAGE as usize).unwrap();
    area.store64(PAGE as usize, 1);
    assert_eq!(area.load64(2 * PAGE as usize), 0);
    let allocated = 512 * file.metadata().unwrap().blocks();
    assert!((4096..=2 * 65_536).contains(&allocated), "{allocated} bytes for two that were touched");
}
