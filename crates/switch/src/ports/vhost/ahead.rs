//! What a worker touches first of a guest's memory, mapped while nobody waits.
//!
//! A process that takes over from another has mapped the memory of all guests, and none of its pages. Sixteen guests with rings of 256 entries made it fault
//! some five thousand times when packets went on, which was most of the time for which they stood still. So the rings, and the buffers that their
//! descriptors tell of, are [mapped](ringferry_memory::words::Area::map_ahead) before the process before is stopped.
//!
//! What a descriptor says is a hint here, whoever has it: nothing depends on it, and what is no guest memory is passed over. It is read, and mapped, by
//! a thread that is [not waited for long](crate::handover), as a guest can take its pages away meanwhile.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ringferry_memory::GuestMemory;
use ringferry_memory::words::{Area, Words};
use ringferry_ring::Parts;

/// Bytes of a descriptor: of both layouts, address and length lie at the same places of it (VIRTIO 1.4, clauses 2.7.5 and 2.8.13).
const DESCRIPTOR: usize = 16;
const LENGTH: usize = 8;

/// Pages of a guest's buffers that are mapped at most: those of four pairs with rings of the usual size, and no more than 8 MiB of memory that a guest has posted and
/// not touched, which is made. (Which pages are there mincore(2) tells, which systemd's filters for services kill a process for.)
const MOST: usize = 2048;

/// Bytes of a page, as far as it matters here: of a larger one several are asked for together.
const PAGE: u64 = 4096;

/// Maps these rings of a guest, and the buffers that they tell of, until that is `enough`.
pub(super) fn map(memory: &Arc<GuestMemory>, rings: &[Parts<Area>], enough: &AtomicBool) {
    // Each as often as it is told of: a guest can have a million descriptors tell of the same pages.
    let mut pages = Vec::new();
    let goes_on = || !enough.load(Ordering::Relaxed);
    for Parts { size, desc, driver, device } in rings {
        for area in [desc, driver, device].into_iter().filter(|_| goes_on()) {
            area.map_ahead();
        }
        for at in (0..usize::from(*size)).map(|index| index * DESCRIPTOR).take_while(|_| goes_on()) {
            let (addr, len) = (desc.load64(at), u64::from(desc.load32(at + LENGTH)));
            let last = addr.saturating_add(len.saturating_sub(1)) / PAGE;
            pages.extend((addr / PAGE..=last).take(MOST - pages.len()));
        }
    }
    pages.sort_unstable();
    pages.dedup();
    for run in pages.chunk_by(|page, next| page + 1 == *next).take_while(|_| goes_on()) {
        // One that is not in one region is of no guest in order, or on the border of two.
        if let Some(area) = memory.area(run[0].saturating_mul(PAGE), run.len() * PAGE as usize) {
            area.map_ahead();
        }
    }
}

#[cfg(test)]
mod tests {
    use ringferry_memory::SharedMem;

    use super::*;

    const START: u64 = 0x10_0000;
    const PAGES: u64 = 1024;

    /// Kilobytes that this process has mapped of the memfd of that name.
    fn mapped(name: &str) -> u64 {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let lines = maps.lines().skip_while(|line| !line.contains(&format!("memfd:{name}")));
        let rss = lines.into_iter().find_map(|line| line.strip_prefix("Rss:"));
        rss.unwrap().trim().trim_end_matches(" kB").parse().unwrap()
    }

    #[test]
    fn rings_and_what_they_tell_of_are_mapped_and_what_is_told_wrongly_is_passed_over() {
        let shared = SharedMem::new("ahead", (PAGES * PAGE) as usize).unwrap();
        for page in 0..PAGES {
            rustix::io::pwrite(shared.fd(), &[1; PAGE as usize], page * PAGE).unwrap();
        }
        let describe = |index: u64, addr: u64, len: u32| {
            let bytes = [&addr.to_le_bytes()[..], &len.to_le_bytes()].concat();
            rustix::io::pwrite(shared.fd(), &bytes, index * DESCRIPTOR as u64).unwrap();
        };
        let page = |page: u64| START + page * PAGE;
        let told = [
            (page(200) + 100, 1500),
            // It ends in its third page.
            (page(400) + 4000, 4200),
            (page(400), 1),
            // Beyond the memory, around all addresses, and far more than there may be.
            (u64::MAX - 5, 100),
            (page(600), 0),
            (page(0), 0),
            (page(PAGES - 1), u32::MAX),
            (0, u32::MAX),
        ];
        (0..).zip(told).for_each(|(index, (addr, len))| describe(index, addr, len));
        let memory = Arc::new(GuestMemory::new(vec![shared.map_at(START).unwrap()]).unwrap());
        let area = |at: u64, len| memory.area(page(at), len).unwrap();
        let ring = Parts { size: 8, desc: area(0, 128), driver: area(1, 6), device: area(2, 70) };
        assert_eq!(mapped("ahead"), 0);
        map(&memory, std::slice::from_ref(&ring), &AtomicBool::new(true));
        assert_eq!(mapped("ahead"), 0, "it was enough before it began");
        map(&memory, &[ring], &AtomicBool::new(false));
        let kilobytes = mapped("ahead");
        if kilobytes == 0 {
            eprintln!("skipped: this kernel does not know MADV_POPULATE_READ (Linux 5.14)");
            return;
        }
        // The kernel maps sixteen pages around one that is there.
        let touched = 4 * (3 + 1 + 3 + 1);
        assert!((touched..=4 * 16 * 6).contains(&kilobytes), "{kilobytes}");
    }
}
