//! Guest memory of a VMM that is built on rust-vmm: a `GuestMemoryMmap` of the crate `vm-memory`.
//!
//! The VMM calls [`GuestMemory::from_vm_memory`] once per memory map. Regions become [existing
//! mappings](Region::existing): nothing is mapped twice, and each of our regions keeps rust-vmm's region alive.
//! A VMM that plugs memory in or out makes a new `GuestMemoryMmap` and a new [`GuestMemory`] of it, and gives that
//! to the queues, as after `SET_MEM_TABLE`.

use std::ptr::NonNull;

use ::vm_memory::{Address, FileOffset, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

use crate::guest::{GuestMemory, MemoryError};
use crate::region::{MapError, Region, RegionSpec, Truncation};

/// The reason for which rust-vmm's memory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum VmMemoryError {
    /// A region cannot be taken over.
    #[error(transparent)]
    Region(#[from] MapError),
    /// Regions overlap, which `GuestMemoryMmap` does not allow either.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// A region is not mapped both readable and writable (ROM), or is not mapped as a whole (Xen grants on demand).
    #[error("memory region at guest address {0:#x} is not mapped readable and writable as a whole")]
    Inaccessible(u64),
}

impl GuestMemory {
    /// Makes a map of the same memory as `memory`, at the same guest addresses. User addresses are those of this
    /// process.
    ///
    /// Regions with a file are guarded against its truncation ([`Truncation::Possible`]). Only memory without a dirty
    /// bitmap (`GuestMemoryMmap<()>`, the default) is accepted, as this crate would not mark it: a VMM that migrates
    /// a guest through rust-vmm's bitmap would lose writes of devices.
    ///
    /// ```
    /// use ringferry_memory::{GuestMemory, ReadSlice};
    /// use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
    ///
    /// let theirs: GuestMemoryMmap = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 1 << 20)])?;
    /// let ours = GuestMemory::from_vm_memory(&theirs)?;
    /// theirs.write_slice(b"frame", GuestAddress(0x100))?;
    /// drop(theirs); // `ours` keeps the mapping
    /// let mut bytes = [0; 5];
    /// ours.translator().read(0x100, 5).unwrap_or(ReadSlice::EMPTY).copy_to(&mut bytes);
    /// assert_eq!(&bytes, b"frame");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// See [`VmMemoryError`].
    pub fn from_vm_memory(memory: &GuestMemoryMmap<()>) -> Result<GuestMemory, VmMemoryError> {
        let mut regions = Vec::with_capacity(memory.num_regions());
        for theirs in memory.iter() {
            let guest_addr = theirs.start_addr().raw_value();
            let both = libc::PROT_READ | libc::PROT_WRITE;
            let base = NonNull::new(theirs.as_ptr()).filter(|_| theirs.prot() & both == both);
            let base = base.ok_or(VmMemoryError::Inaccessible(guest_addr))?;
            let file = theirs.file_offset();
            let spec = RegionSpec {
                guest_addr,
                size: theirs.len(),
                user_addr: base.addr().get() as u64,
                mmap_offset: file.map_or(0, FileOffset::start),
            };
            let truncation = if file.is_some() { Truncation::Possible } else { Truncation::Impossible };
            // SAFETY: an `MmapRegion` keeps its mapping, at one place and with one protection, until it is dropped
            // (who makes one of a raw pointer vouches for that), and the owner given here is such a region. rust-vmm
            // makes no references to guest memory; its own accesses are volatile or atomic. Memory without a file is
            // anonymous and raises no SIGBUS; with one, the mapping begins a page of it and has its last page for itself.
            regions.push(unsafe { Region::existing(base, spec, truncation, theirs.get_mmap()) }?);
        }
        Ok(GuestMemory::new(regions)?)
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use ::vm_memory::mmap::MmapRegionBuilder;
    use ::vm_memory::{Bytes, GuestAddress, GuestRegionMmap};

    use super::*;
    use crate::shared::SharedMem;
    use crate::words::Words;

    #[test]
    fn regions_keep_their_addresses_and_end_where_theirs_do() {
        let ranges = [(GuestAddress(0), 0x3000), (GuestAddress(1 << 32), 0x1000)];
        let theirs: GuestMemoryMmap = GuestMemoryMmap::from_ranges(&ranges).unwrap();
        let ours = GuestMemory::from_vm_memory(&theirs).unwrap();
        assert!(ours.area(0, 0x3000).is_some() && ours.area(1 << 32, 0x1000).is_some());
        assert!(ours.area(0x2fff, 2).is_none() && ours.area((1 << 32) + 0xfff, 2).is_none());
        ours.area((1 << 32) + 8, 8).unwrap().store64(0, 0x0102_0304_0506_0708);
        assert_eq!(
            theirs.read_obj::<[u8; 8]>(GuestAddress((1 << 32) + 8)).unwrap(),
            [8, 7, 6, 5, 4, 3, 2, 1]
        );
        let host = theirs.get_host_address(GuestAddress(0x10)).unwrap().addr() as u64;
        theirs.write_obj(7u16, GuestAddress(0x10)).unwrap();
        assert_eq!(ours.user_area(host, 2).unwrap().load16(0), u16::from_ne_bytes(7u16.to_le_bytes()));
    }

    #[test]
    fn a_region_that_cannot_be_written_is_refused() {
        let rom = MmapRegionBuilder::new(0x1000)
            .with_mmap_prot(libc::PROT_READ)
            .with_mmap_flags(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        let rom = GuestRegionMmap::new(rom.build().unwrap(), GuestAddress(0xf000)).unwrap();
        let theirs = GuestMemoryMmap::from_regions(vec![rom]).unwrap();
        let error = GuestMemory::from_vm_memory(&theirs).unwrap_err();
        assert!(matches!(error, VmMemoryError::Inaccessible(0xf000)), "{error}");
    }

    #[test]
    fn a_truncated_file_loses_the_region_in_every_map_of_it() {
        let file = SharedMem::new("vm-memory", 0x4000).unwrap();
        let offset = FileOffset::new(File::from(file.fd().try_clone_to_owned().unwrap()), 0);
        let theirs: GuestMemoryMmap =
            GuestMemoryMmap::from_ranges_with_files([(GuestAddress(0), 0x4000, Some(offset))]).unwrap();
        let before = GuestMemory::from_vm_memory(&theirs).unwrap();
        let after = GuestMemory::from_vm_memory(&theirs).unwrap();
        let area = after.area(0x3000, 8).unwrap();
        area.store64(0, 42);
        rustix::fs::ftruncate(file.fd(), 0).unwrap();
        assert_eq!(area.load64(0), 0);
        assert!(before.is_lost() && after.is_lost());
        // A registration that goes takes no other with it.
        drop(before);
        drop(area);
        assert!(after.is_lost());
        assert!(!GuestMemory::from_vm_memory(&theirs).unwrap().is_lost(), "a new map begins anew");
    }
}
