//! Plans come true: allocate everything first, then change the packet. Nothing here can fail half-way.

use ringferry_packet::buffer::{Buf, Chain, Pools};

use super::plan::{Full, Group, Job, alloc};

/// A packet that takes over the offloads and the flow of another, and no data.
fn successor(chain: &Chain) -> Chain {
    let mut next = Chain::default();
    next.header = chain.header;
    next.hash = chain.hash;
    next
}

/// Gives buffers back that were allocated in vain, or have been copied.
fn give_back(bufs: impl Iterator<Item = Buf>, pools: &mut Pools) {
    for buf in bufs {
        pools.recycle(buf);
    }
}

/// Leaves out the first bytes of an empty buffer's room.
fn leave_out(buf: &mut Buf, skip: usize) {
    buf.grow(skip);
    buf.pull(skip);
}

/// The new buffers of the groups, in order; false, and none, when there are not as many.
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

/// As many large buffers; false, and none, when there are fewer.
pub(super) fn alloc_large(buffers: usize, pools: &mut Pools, fresh: &mut Vec<Buf>) -> bool {
    fresh.extend((0..buffers).map_while(|_| pools.large.alloc()));
    if fresh.len() < buffers {
        give_back(fresh.drain(..), pools);
    }
    fresh.len() == buffers
}

/// Puts the header room in front of the packet, in a buffer of its own.
pub(super) fn prepend(job: &Job, mut chain: Chain, mut buf: Buf) -> Chain {
    let skip = job.limits.skip(buf.addr(), job.header, buf.tailroom());
    leave_out(&mut buf, skip);
    buf.grow(job.header);
    chain.push_front(buf);
    chain
}

/// Merges neighbours. Returns the packet, header room in front, and how many bytes were copied.
///
/// What has been copied is `spent`, and given back all at once: dropping a buffer is an atomic operation if it is not
/// of `pools`, and that would wait each time for the copy before it to leave the store buffer.
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
        // Planned with this room, which nobody can have taken since.
        chain.push(job.header);
    }
    let mut header = if in_place { 0 } else { job.header };
    let mut copied = 0;
    let mut bufs = chain.into_bufs().into_iter();
    let mut fresh = fresh.drain(..);
    for group in groups {
        // Copies go to the new buffer, or behind the last that stays.
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

/// Copies all of the packet to large buffers. Returns it, header room in front.
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
            // The first segment has room for the header: limits were checked with it.
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
