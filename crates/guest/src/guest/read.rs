//! From the tap into buffers: the kernel copies a packet to where the device will read it.

use std::io;

use ringferry_memory::WriteSlice;
use ringferry_packet::buffer::{Bufs, Chain, Pools};
use ringferry_packet::vnet::Header;
use ringferry_sys::tap::Tap;
use ringferry_virtio_net::MAX_FRAME;
use smallvec::SmallVec;

/// Most pieces of a packet: the kernel takes no more in one call.
const MAX_PIECES: usize = 1024;

/// Reads a packet, in one buffer or in `pieces` bytes each; its virtual header is taken off the front. `None`
/// when there are not enough buffers, or the packet was none.
///
/// # Errors
/// What the kernel says: `WouldBlock` when there is no packet.
pub(super) fn packet(tap: &Tap, pools: &mut Pools, pieces: Option<usize>) -> io::Result<Option<Chain>> {
    let longest = Header::LEN + MAX_FRAME;
    let piece = pieces.unwrap_or(longest);
    let count = longest.div_ceil(piece).min(MAX_PIECES);
    // The kernel says how long a packet is when it has copied it: there is room for the longest.
    let mut bufs = Bufs::with_capacity(count);
    while bufs.len() < count {
        let Some(mut buf) = pools.alloc(piece) else {
            bufs.drain(..).for_each(|buf| pools.recycle(buf));
            return Ok(None);
        };
        if bufs.is_empty() {
            // So that the frame begins where a packet of its own would.
            buf.reserve_front(Header::LEN);
        }
        bufs.push(buf);
    }
    let mut rooms: SmallVec<[WriteSlice<'_>; 1]> =
        bufs.iter_mut().map(|buf| buf.room().first(piece)).collect();
    let read = tap.readv(&mut rooms);
    drop(rooms);
    let mut left = *read.as_ref().unwrap_or(&0);
    let mut chain = Chain::default();
    for mut buf in bufs {
        let len = left.min(piece);
        left -= len;
        if len == 0 {
            pools.recycle(buf);
            continue;
        }
        buf.grow(len);
        chain.push_back(buf);
    }
    if read? <= Header::LEN {
        pools.recycle_chain(chain);
        return Ok(None);
    }
    let mut header = [0; Header::LEN];
    chain.copy_to(&mut header);
    chain.pull(Header::LEN);
    // A driver may say only NEEDS_CSUM (5.1.6.2); the kernel says more.
    chain.header = Header::from_bytes(&header).sanitised();
    Ok(Some(chain))
}
