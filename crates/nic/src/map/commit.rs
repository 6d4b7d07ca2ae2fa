//! Execution of a mapping plan: allocates all buffers first, then changes the packet.
//!
//! [`Mapper::map`](super::Mapper::map) calls an `alloc_*` function, which may fail and then leaves everything
//! as it was, and after it [`prepend`], [`collapse`] or [`defrag`], which cannot fail: no packet is ever left
//! half mapped.

use ringferry_packet::buffer::{Buf, Chain, Pools};

use super::plan::{Full, Group, Job, alloc};

/// Makes an empty packet with the offloads and the flow hash of `chain`.
fn successor(chain: &Chain) -> Chain {
    let mut next = Chain::default();
    next.header = chain.header;
    next.hash = chain.hash;
    next
}

/// Recycles buffers that were allocated in vain, or whose data has been copied.
fn give_back(bufs: impl Iterator<Item = Buf>, pools: &mut Pools) {
    for buf in bufs {
        pools.recycle(buf);
    }
}

/// Moves the start of an empty buffer's data `skip` bytes into its room.
fn leave_out(buf: &mut Buf, skip: usize) {
    buf.grow(skip);
    buf.pull(skip);
}

/// Allocates the new buffers of the groups, in order, into `fresh`. Returns false, and keeps none, if the
/// pools have too few.
pub(super) fn alloc_groups(groups: &[Group], pools: &mut Pools, fresh: &mut Vec<Buf>) -> bool {
    groups.iter().filter(|group| group.need > 0).all(|group| {
        let buf = alloc(pools, group.need);
        let done = buf.is_some();
        fresh.extend(buf);
        done
    }) || {
        give_back(fresh.drain(..), pools);
        false
    }
}

/// Allocates `buffers` large buffers into `fresh`. Returns false, and keeps none, if the pool has fewer.
pub(super) fn alloc_large(buffers: usize, pools: &mut Pools, fresh: &mut Vec<Buf>) -> bool {
    fresh.extend((0..buffers).map_while(|_| pools.large.alloc()));
    if fresh.len() < buffers {
        give_back(fresh.drain(..), pools);
    }
    fresh.len() == buffers
}

/// Puts the header room in front of the packet, in the separate buffer `buf`.
pub(super) fn prepend(job: &Job, mut chain: Chain, mut buf: Buf) -> Chain {
    let skip = job.limits.skip(buf.addr(), job.header, buf.tailroom());
    leave_out(&mut buf, skip);
    buf.grow(job.header);
    chain.push_front(buf);
    chain
}

/// Merges neighbours by plan. Returns the packet with the header room in front, and the number of bytes
/// copied.
///
/// Buffers whose data was copied are collected in `spent` and recycled together at the end: dropping one that
/// does not belong to `pools` is an atomic operation, which would wait for the stores of the copy before it.
pub(super) fn collapse(
    job: &Job,
    mut chain: Chain,
    groups: &[Group],
    fresh: &mut Vec<Buf>,
    spent: &mut Vec<Buf>,
    pools: &mut Pools,
) -> (Chain, usize) {
    let mut next = successor(&chain);
    let in_place = !job.own && groups.first().is_some_and(|group| group.need == 0);
    if in_place {
        // The plan found this head room, and nobody can have used it since.
        chain.push(job.header);
    }
    let mut header = if in_place { 0 } else { job.header };
    let mut copied = 0;
    let mut bufs = chain.into_bufs().into_iter();
    let mut fresh = fresh.drain(..);
    for group in groups {
        // Data is copied to the new buffer, or behind the data of the last buffer that is kept.
        let mut last = if group.need > 0 { fresh.next() } else { None };
        if let Some(buf) = &mut last {
            let skip = job.limits.skip(buf.addr(), group.len, buf.tailroom());
            leave_out(buf, skip);
            buf.grow(std::mem::take(&mut header));
        }
        for buf in bufs.by_ref().take(group.kept) {
            last.replace(buf).into_iter().for_each(|buf| next.push_back(buf));
        }
        let Some(mut last) = last else { continue };
        for buf in bufs.by_ref().take(group.copied) {
            copied += last.append_slice(&buf.read());
            spent.push(buf);
        }
        next.push_back(last);
    }
    give_back(spent.drain(..).chain(bufs), pools);
    (next, copied)
}

/// Copies the whole packet to large buffers and returns it with the header room in front.
pub(super) fn defrag(job: &Job, chain: Chain, full: &Full, fresh: &mut Vec<Buf>, pools: &mut Pools) -> Chain {
    let mut next = successor(&chain);
    let mut pieces = chain.pieces();
    let (mut piece, mut left) = (pieces.next(), job.total);
    for mut buf in fresh.drain(..) {
        let (skip, mut part) = full.part(&job.limits, &buf, left);
        if part == 0 {
            pools.recycle(buf);
            continue;
        }
        leave_out(&mut buf, skip);
        if left == job.total {
            // The first segment has room for the header, as the limits were checked with it.
            buf.grow(job.header);
            part -= job.header;
            left -= job.header;
        }
        left -= part;
        let mut room = buf.room().first(part);
        while let Some(rest) = piece
            && !room.is_empty()
        {
            let n = rest.copy_to_slice(&room);
            room = room.skip(n);
            piece = if n < rest.len() { Some(rest.skip(n)) } else { pieces.next() };
        }
        let unused = room.len();
        buf.grow(part - unused);
        next.push_back(buf);
    }
    drop(pieces);
    pools.recycle_chain(chain);
    next
}
