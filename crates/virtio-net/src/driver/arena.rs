//! The memory of a driver: rings and buffers in one file that the device maps.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use ringferry_memory::{Area, GuestMemory, MapError, MemoryError, RegionSpec, SharedMem};
use ringferry_ring::{Driver, IndirectTables, LayoutError, Parts, RingFeatures, part_bytes};

/// Where the arena lies in the "guest physical" space that the device sees. Any value does; one
/// that is not 0 catches addresses nobody set.
const GUEST_ADDR: u64 = 1 << 32;

/// Alignment of every allocation: a page, so that no two of them share a cache line and buffers
/// can be handed to the kernel.
const ALIGN: u64 = 4096;

/// Why there is no arena.
#[derive(Debug, thiserror::Error)]
pub enum ArenaError {
    /// No memory file.
    #[error("cannot make shared memory: {0}")]
    Shared(#[from] io::Error),
    /// No mapping.
    #[error(transparent)]
    Map(#[from] MapError),
    /// Cannot happen with one region; here so that nothing is unwrapped.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// More was asked for than the arena was made for.
    #[error("the driver's memory of {0} bytes is used up")]
    Full(usize),
    /// A queue size the ring does not take.
    #[error(transparent)]
    Layout(#[from] LayoutError),
}

/// Memory that is handed out once and lives as long as the driver.
#[derive(Debug)]
pub struct Arena {
    shared: SharedMem,
    memory: Arc<GuestMemory>,
    next: u64,
}

/// Where the parts of one queue lie: what the device has to be told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Queue {
    /// Entries.
    pub size: u16,
    /// Address of the descriptor area: descriptor table or descriptor ring.
    pub desc: u64,
    /// Address of the driver area: available ring or driver event suppression.
    pub avail: u64,
    /// Address of the device area: used ring or device event suppression.
    pub used: u64,
}

impl Arena {
    /// Makes an arena of `size` bytes. Pages cost memory only once they are touched.
    ///
    /// # Errors
    /// See [`ArenaError`].
    pub fn new(size: usize) -> Result<Self, ArenaError> {
        let shared = SharedMem::new("ringferry-driver", size)?;
        let region = shared.map_at(GUEST_ADDR)?;
        let memory = Arc::new(GuestMemory::new(vec![region])?);
        Ok(Self { shared, memory, next: GUEST_ADDR })
    }

    /// The descriptor for the device.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.shared.fd()
    }

    /// Where it lies, for the device. User addresses equal guest addresses.
    pub fn region(&self) -> RegionSpec {
        RegionSpec {
            guest_addr: GUEST_ADDR,
            size: self.shared.size() as u64,
            user_addr: GUEST_ADDR,
            mmap_offset: 0,
        }
    }

    /// The memory map, for translation.
    pub fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    /// Hands out `len` bytes, page-aligned and zeroed; returns their guest address.
    ///
    /// # Errors
    /// [`ArenaError::Full`].
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

    /// Bytes that [`Arena::queue`] takes at most, for sizing the arena.
    pub fn queue_bytes(size: u16, indirect: u16) -> usize {
        // A packed ring takes less.
        let parts = part_bytes(size, false).into_iter().chain([table_bytes(size, indirect)]);
        parts.map(|len| len.next_multiple_of(ALIGN as usize)).sum()
    }

    /// Makes a queue of `size` entries, with tables for chains of up to `indirect` buffers if that
    /// is not 0.
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

/// Bytes of tables of `entries` descriptors for each entry of the queue.
fn table_bytes(size: u16, entries: u16) -> usize {
    16 * usize::from(size) * usize::from(entries)
}
