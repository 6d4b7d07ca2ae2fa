//! [`Arena`]: the memory of a driver, one shared file that holds its rings and buffers and that the
//! device maps.
//!
//! A driver creates it with a size computed from its queues, allocates rings and buffers from it
//! once on its set-up thread (a bump allocator: nothing is ever freed), tells the device its
//! [`Arena::region`] and descriptor, and drops it with the driver.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use ringferry_memory::{Area, GuestMemory, MapError, MemoryError, RegionSpec, SharedMem};
use ringferry_ring::{Driver, IndirectTables, LayoutError, Parts, RingFeatures, part_bytes};

/// Guest physical address at which the device sees the arena. Any value does; one that is not 0
/// catches addresses that nobody set.
const GUEST_ADDR: u64 = 1 << 32;

/// Alignment of every allocation in bytes: a page, so that no two allocations share a cache line
/// and buffers can be handed to the kernel.
const ALIGN: u64 = 4096;

/// The reason why an arena or a queue in it cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum ArenaError {
    /// The shared memory file cannot be created.
    #[error("cannot make shared memory: {0}")]
    Shared(#[from] io::Error),
    /// The file cannot be mapped.
    #[error(transparent)]
    Map(#[from] MapError),
    /// Cannot happen with one region; it exists so that nothing is unwrapped.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// An allocation exceeds the arena's size, which is given in bytes.
    #[error("the driver's memory of {0} bytes is used up")]
    Full(usize),
    /// The ring cannot have the queue's size.
    #[error(transparent)]
    Layout(#[from] LayoutError),
}

/// Shared memory from which allocations live as long as the driver.
#[derive(Debug)]
pub struct Arena {
    shared: SharedMem,
    memory: Arc<GuestMemory>,
    next: u64,
}

/// The addresses of one queue's parts, which the device has to be told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Queue {
    /// Number of entries of the queue.
    pub size: u16,
    /// Address of the descriptor area: descriptor table or descriptor ring.
    pub desc: u64,
    /// Address of the driver area: available ring or driver event suppression.
    pub avail: u64,
    /// Address of the device area: used ring or device event suppression.
    pub used: u64,
}

impl Queue {
    /// The parts of the queue in the device's map of the same memory; `None` where that does not hold all of them.
    pub fn parts(&self, memory: &GuestMemory, features: RingFeatures) -> Option<Parts<Area>> {
        let [desc, driver, device] = part_bytes(self.size, features.packed);
        Some(Parts {
            size: self.size,
            desc: memory.area(self.desc, desc)?,
            driver: memory.area(self.avail, driver)?,
            device: memory.area(self.used, device)?,
        })
    }
}

impl Arena {
    /// Creates an arena of `size` bytes. Its pages cost memory only once they are touched.
    ///
    /// # Errors
    /// See [`ArenaError`].
    pub fn new(size: usize) -> Result<Self, ArenaError> {
        let shared = SharedMem::new("ringferry-driver", size)?;
        let region = shared.map_at(GUEST_ADDR)?;
        let memory = Arc::new(GuestMemory::new(vec![region])?);
        Ok(Self { shared, memory, next: GUEST_ADDR })
    }

    /// Returns the descriptor of the file, for the device to map.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.shared.fd()
    }

    /// Returns the arena's place in guest memory, for the device. User addresses equal guest
    /// addresses.
    pub fn region(&self) -> RegionSpec {
        RegionSpec {
            guest_addr: GUEST_ADDR,
            size: self.shared.size() as u64,
            user_addr: GUEST_ADDR,
            mmap_offset: 0,
        }
    }

    /// Returns the memory map that translates the arena's addresses.
    pub fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    /// Allocates `len` bytes, page-aligned and zeroed; returns their guest address.
    ///
    /// # Errors
    /// [`ArenaError::Full`] when the arena has not that many bytes left.
    pub fn alloc(&mut self, len: usize) -> Result<u64, ArenaError> {
        let addr = self.next;
        let end = GUEST_ADDR + self.shared.size() as u64;
        let next = addr.checked_add(len as u64).map(|next| next.next_multiple_of(ALIGN));
        match next {
            Some(next) if next <= end => {
                self.next = next;
                Ok(addr)
            }
            _ => Err(ArenaError::Full(self.shared.size())),
        }
    }

    fn alloc_area(&mut self, len: usize) -> Result<(u64, Area), ArenaError> {
        let addr = self.alloc(len)?;
        let area = self.memory.area(addr, len).ok_or_else(|| ArenaError::Full(self.shared.size()))?;
        Ok((addr, area))
    }

    /// Returns the most bytes that [`Arena::queue`] allocates, for sizing the arena.
    pub fn queue_bytes(size: u16, indirect: u16) -> usize {
        // A packed ring takes less than a split one.
        let parts = part_bytes(size, false).into_iter().chain([table_bytes(size, indirect)]);
        parts.map(|len| len.next_multiple_of(ALIGN as usize)).sum()
    }

    /// Creates a queue of `size` entries, with indirect tables for chains of up to `indirect`
    /// buffers if that is not 0.
    ///
    /// # Errors
    /// See [`ArenaError`].
    pub fn queue<T>(
        &mut self,
        size: u16,
        features: RingFeatures,
        indirect: u16,
    ) -> Result<(Queue, Driver<Area, T>), ArenaError> {
        let [desc, driver, device] = part_bytes(size, features.packed);
        let (desc, desc_area) = self.alloc_area(desc)?;
        let (avail, driver) = self.alloc_area(driver)?;
        let (used, device) = self.alloc_area(device)?;
        let tables = if indirect > 0 {
            let (addr, area) = self.alloc_area(table_bytes(size, indirect))?;
            Some(IndirectTables { area, addr, entries: indirect })
        } else {
            None
        };
        let parts = Parts { size, desc: desc_area, driver, device };
        Ok((Queue { size, desc, avail, used }, Driver::new(parts, features, tables)?))
    }
}

/// Returns the size in bytes of one table of `entries` descriptors for each entry of the queue.
fn table_bytes(size: u16, entries: u16) -> usize {
    16 * usize::from(size) * usize::from(entries)
}
