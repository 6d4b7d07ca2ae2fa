//! Huge pages for large private tables, requested once, after a table's memory is allocated and before it is
//! written.

use std::mem::MaybeUninit;

use rustix::mm::Advice;

/// Asks the kernel to back memory that has not been written yet with huge pages (`MADV_HUGEPAGE`, madvise(2)).
/// Random accesses to it then cause fewer page walks, which are most expensive in a virtual machine. Only whole
/// pages inside the range are affected; if the kernel cannot do it, nothing changes.
pub fn prefer_huge_pages<T>(room: &mut [MaybeUninit<T>]) {
    let page = rustix::param::page_size();
    let bytes = room.as_mut_ptr_range();
    let start = bytes.start.map_addr(|addr| addr.next_multiple_of(page));
    let len = (bytes.end.addr() & !(page - 1)).saturating_sub(start.addr());
    if len > 0 {
        // SAFETY: the advice concerns whole pages of a range that is borrowed for writing, and does not change what they hold.
        let _ = unsafe { rustix::mm::madvise(start.cast(), len, Advice::LinuxHugepage) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_pages_inside_are_concerned_and_nothing_changes() {
        for len in [0, 1, 4095, 4097, 5 << 20] {
            let mut bytes: Vec<u8> = Vec::with_capacity(len);
            prefer_huge_pages(bytes.spare_capacity_mut());
            bytes.resize(len, 7);
            assert!(bytes.iter().all(|byte| *byte == 7));
        }
        // In the lines that the kernel has of the mapping: `hg`.
        let mut bytes: Vec<u8> = Vec::with_capacity(64 << 20);
        prefer_huge_pages(bytes.spare_capacity_mut());
        let inside = bytes.as_ptr().addr() + (32 << 20);
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut lines = maps.lines().skip_while(|line| {
            let range = line.split_once(' ').and_then(|(range, _)| range.split_once('-'));
            let parse = |text| usize::from_str_radix(text, 16).ok();
            let range = range.and_then(|(from, to)| Some(parse(from)?..parse(to)?));
            range.is_none_or(|range| !range.contains(&inside))
        });
        let flags = lines.find(|line| line.starts_with("VmFlags:")).unwrap();
        let has = std::path::Path::new("/sys/kernel/mm/transparent_hugepage").exists();
        assert_eq!(flags.split(' ').any(|flag| flag == "hg"), has, "{flags}");
    }
}
