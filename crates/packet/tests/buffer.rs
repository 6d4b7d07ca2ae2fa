//! Buffers, pools, fragments and chains, one property at a time.

mod common;

use std::num::{NonZeroU32, NonZeroUsize};

use common::{BASE, bytes, fragments, memory, pool, pools, range};
use ringferry_memory::ReadSlice;
use ringferry_packet::buffer::{Buf, Chain, Fragments, Pool, PoolError, PoolLayout, Pools, PoolsLayout};
use ringferry_packet::flow;
use ringferry_packet::parse::Layers;
use ringferry_packet::vnet::Header;

const SMALL: PoolLayout = PoolLayout { chunk: 256, stride: 256, count: 4, headroom: 64 };

/// A buffer with these bytes.
fn filled(pool: &mut Pool, bytes: &[u8]) -> Buf {
    let mut buf = pool.alloc().unwrap();
    assert_eq!(buf.append(bytes), bytes.len());
    buf
}

/// A chain of the pieces, one buffer each.
fn chain(pool: &mut Pool, pieces: &[&[u8]]) -> Chain {
    let mut chain = Chain::default();
    for piece in pieces {
        chain.push_back(filled(pool, piece));
    }
    chain
}

#[test]
fn buffers_go_to_other_threads_and_fit_two_to_a_cache_line() {
    fn sent<T: Send>() {}
    sent::<Buf>();
    sent::<Chain>();
    sent::<Pools>();
    assert!(size_of::<Buf>() <= 32);
}

#[test]
fn an_empty_buffer_is_the_whole_chunk_behind_its_head_room() {
    let mut pool = pool(SMALL);
    let buf = pool.alloc().unwrap();
    assert_eq!((buf.headroom(), buf.len(), buf.tailroom(), buf.truesize()), (64, 0, 192, 256));
    assert!(buf.is_empty() && buf.is_exclusive() && pool.owns(&buf));
    assert_eq!(buf.addr() % 64, 0);
}

#[test]
fn data_lies_where_the_device_is_told() {
    let memory = memory(SMALL.bytes());
    let mut pool = Pool::new(&memory, BASE, SMALL).unwrap();
    let _first = pool.alloc();
    let buf = filled(&mut pool, b"where");
    let mut seen = [0; 5];
    memory.translator().read(buf.addr(), 5).unwrap().copy_to(&mut seen);
    assert_eq!(&seen, b"where");
    assert_eq!(buf.addr(), BASE + 256 + 64);
}

#[test]
fn head_and_tail_room_become_data_and_back() {
    let mut pool = pool(SMALL);
    let mut buf = filled(&mut pool, b"packet");
    assert!(buf.push(4));
    buf.write().copy_from(b"head");
    assert_eq!(buf.append_slice(&ReadSlice::from(&b"tail"[..])), 4);
    assert_eq!(bytes(&buf), b"headpackettail");
    assert_eq!(buf.pull(6), 6);
    buf.truncate(6);
    assert_eq!(bytes(&buf), b"cketta");
    assert_eq!((buf.headroom(), buf.tailroom()), (66, 256 - 66 - 6));
    // The bytes are still there.
    assert!(buf.push(2));
    buf.grow(2);
    assert_eq!(bytes(&buf), b"packettail");
}

#[test]
fn nothing_reaches_beyond_the_range() {
    let mut pool = pool(SMALL);
    let mut buf = pool.alloc().unwrap();
    assert!(!buf.push(65));
    assert_eq!(buf.append(&[7; 300]), 192);
    assert_eq!(buf.append(&[7; 1]), 0);
    assert!(buf.push(64) && !buf.push(1));
    assert_eq!((buf.len(), buf.pull(usize::MAX), buf.len()), (256, 256, 0));
    buf.truncate(usize::MAX);
    buf.grow(usize::MAX);
    assert_eq!((buf.headroom(), buf.len(), buf.tailroom()), (256, 0, 0));
}

#[test]
fn a_split_divides_the_range_and_a_join_restores_it() {
    let mut pool = pool(SMALL);
    let mut buf = filled(&mut pool, b"abcdef");
    let whole = range(&buf);
    let behind = buf.split_off(2);
    assert_eq!((bytes(&buf), bytes(&behind)), (b"ab".to_vec(), b"cdef".to_vec()));
    assert_eq!((buf.tailroom(), behind.headroom()), (0, 0));
    assert_eq!(
        (range(&buf).start, range(&buf).end, range(&behind).end),
        (whole.start, range(&behind).start, whole.end)
    );
    assert!(buf.is_exclusive() && behind.is_exclusive());
    assert!(buf.is_continued_by(&behind) && !behind.is_continued_by(&buf));
    buf.join(behind).unwrap();
    assert_eq!((bytes(&buf), range(&buf)), (b"abcdef".to_vec(), whole));
}

#[test]
fn a_border_behind_the_data_leaves_the_second_part_empty() {
    let mut pool = pool(SMALL);
    let mut buf = filled(&mut pool, b"abc");
    let behind = buf.split_off(10);
    assert_eq!((bytes(&buf), buf.tailroom()), (b"abc".to_vec(), 7));
    assert_eq!((behind.len(), behind.tailroom(), behind.truesize()), (0, 182, 182));
    let mut nothing = buf.split_off(usize::MAX);
    assert_eq!((nothing.truesize(), nothing.append(b"x")), (0, 0));
    assert_eq!(nothing.split_off(5).truesize(), 0);
}

#[test]
fn only_what_continues_is_joined() {
    let mut pool = pool(SMALL);
    let mut first = filled(&mut pool, b"abcdef");
    let mut second = first.split_off(2);
    let third = second.split_off(2);
    let third = first.join(third).unwrap_err();
    // Room between: what would be in the middle of the data is not data.
    second.truncate(1);
    let third = second.join(third).unwrap_err();
    second.grow(1);
    let mut third = third;
    third.pull(1);
    let third = second.join(third).unwrap_err();
    // The neighbouring chunk is no continuation, however close.
    let mut other = pool.alloc().unwrap();
    other.append(&[0; 192]);
    assert!(other.join(pool.alloc().unwrap()).is_err());
    assert_eq!(bytes(&third), b"f");
    first.join(second).unwrap();
    assert_eq!(bytes(&first), b"abcd");
}

#[test]
fn a_shared_range_is_written_by_nobody_until_one_owner_is_left() {
    let mut pool = pool(SMALL);
    let mut one = filled(&mut pool, b"same");
    let mut two = one.share();
    for buf in [&mut one, &mut two] {
        assert!(!buf.is_exclusive());
        assert_eq!(buf.write().copy_from(b"else"), 0);
        assert_eq!(buf.append(b"more"), 0);
        assert!(!buf.push(1));
        assert_eq!(bytes(buf), b"same");
    }
    // Each has a view of its own all the same.
    one.pull(2);
    assert_eq!((bytes(&one), bytes(&two)), (b"me".to_vec(), b"same".to_vec()));
    drop(one);
    assert!(two.is_exclusive());
    assert_eq!(two.write().copy_from(b"mine"), 4);
    assert_eq!(bytes(&two), b"mine");
}

#[test]
fn parts_of_a_shared_range_are_shared() {
    let mut pool = pool(SMALL);
    let mut one = filled(&mut pool, b"abcd");
    let two = one.share();
    let behind = one.split_off(2);
    assert!(!one.is_exclusive() && !behind.is_exclusive() && !two.is_exclusive());
    drop(two);
    // Nobody can tell from a count which part the other owner had: both stay unwritten until joined.
    assert!(!one.is_exclusive() && !behind.is_exclusive());
    one.join(behind).unwrap();
    assert!(one.is_exclusive());
}

#[test]
fn a_range_of_its_own_is_not_joined_to_a_shared_one() {
    let mut pool = pool(SMALL);
    let mut front = filled(&mut pool, b"abcd");
    let mut behind = front.split_off(2);
    let other = behind.share();
    assert!(front.is_exclusive() && !behind.is_exclusive());
    let behind = front.join(behind).unwrap_err();
    assert_eq!(
        (bytes(&front), bytes(&behind), bytes(&other)),
        (b"ab".to_vec(), b"cd".to_vec(), b"cd".to_vec())
    );
}

#[test]
fn chunks_come_back_when_their_last_range_is_dropped() {
    let mut pool = pool(SMALL);
    let mut all: Vec<Buf> = std::iter::from_fn(|| pool.alloc()).collect();
    assert_eq!((all.len(), pool.available()), (4, 0));
    let mut first = all.remove(0);
    let behind = first.split_off(10);
    let shared = first.share();
    drop(first);
    drop(shared);
    assert!(pool.alloc().is_none());
    drop(behind);
    assert_eq!(pool.available(), 1);
    drop(all);
    assert_eq!(pool.available(), 4);
    assert_eq!(std::iter::from_fn(|| pool.alloc()).collect::<Vec<_>>().len(), 4);
}

#[test]
fn a_recycled_buffer_is_the_next_one_and_as_new() {
    let mut pool = pool(SMALL);
    let mut buf = filled(&mut pool, b"old");
    let addr = range(&buf).start;
    buf.pull(1);
    buf.push(30);
    pool.recycle(buf);
    assert_eq!(pool.available(), 4);
    let buf = pool.alloc().unwrap();
    assert_eq!((range(&buf).start, buf.headroom(), buf.len(), buf.is_exclusive()), (addr, 64, 0, true));
}

#[test]
fn what_is_not_whole_or_not_alone_is_recycled_only_as_far_as_it_goes() {
    let mut pool = pool(SMALL);
    let mut buf = pool.alloc().unwrap();
    let behind = buf.split_off(10);
    pool.recycle(buf);
    assert_eq!(pool.available(), 3);
    pool.recycle(behind);
    assert_eq!(pool.available(), 4);

    let mut buf = pool.alloc().unwrap();
    let other = buf.share();
    pool.recycle(buf);
    assert_eq!(pool.available(), 3);
    pool.recycle(other);
    assert_eq!(pool.available(), 4);

    // Once whole and alone, even one that was shared is kept.
    let mut buf = pool.alloc().unwrap();
    drop(buf.share());
    pool.recycle(buf);
    let mut buf = pool.alloc().unwrap();
    let behind = buf.split_off(10);
    assert!(buf.is_exclusive() && behind.is_exclusive());
}

#[test]
fn another_pools_buffer_goes_home() {
    let (mut one, mut other) = (pool(SMALL), pool(SMALL));
    let buf = one.alloc().unwrap();
    assert!(!other.owns(&buf));
    other.recycle(buf);
    assert_eq!((one.available(), other.available()), (4, 4));
}

#[test]
fn buffers_dropped_on_other_threads_come_back() {
    let mut pool = pool(PoolLayout { count: 64, ..SMALL });
    let (send, receive) = std::sync::mpsc::channel::<Vec<Buf>>();
    let droppers: Vec<_> = {
        let receive = std::sync::Arc::new(std::sync::Mutex::new(receive));
        (0..3)
            .map(|_| {
                let receive = receive.clone();
                std::thread::spawn(move || {
                    loop {
                        let next = receive.lock().unwrap().recv();
                        let Ok(bufs) = next else { break };
                        for buf in bufs {
                            assert_eq!(bytes(&buf), [buf.len() as u8; 192][..buf.len()]);
                        }
                    }
                })
            })
            .collect()
    };
    let mut sent = 0;
    while sent < 20_000 {
        let Some(mut buf) = pool.alloc() else {
            std::thread::yield_now();
            continue;
        };
        let len = 2 + sent % 190;
        buf.append(&[len as u8; 192][..len]);
        sent += 1;
        // A share dropped elsewhere while this owner looks whether it is alone.
        if sent % 2 == 0 {
            send.send(vec![buf.share()]).unwrap();
            while !buf.is_exclusive() {
                std::thread::yield_now();
            }
            buf.write().copy_from(&[0xff; 192]);
            pool.recycle(buf);
        } else {
            send.send(vec![buf]).unwrap();
        }
    }
    drop(send);
    droppers.into_iter().for_each(|thread| thread.join().unwrap());
    assert_eq!(pool.available(), 64);
}

#[test]
fn buffers_outlive_their_pool() {
    let mut short_lived = pool(SMALL);
    let buf = filled(&mut short_lived, b"still here");
    drop(short_lived);
    assert_eq!(bytes(&buf), b"still here");
}

#[test]
fn pools_that_cannot_be_are_refused() {
    let memory = memory(4096);
    let fits = PoolLayout { chunk: 1024, stride: 1024, count: 4, headroom: 64 };
    assert!(Pool::new(&memory, BASE, fits).is_ok());
    for (addr, layout) in [
        (BASE + 64, fits),
        (BASE - 64, fits),
        (u64::MAX, fits),
        (BASE, PoolLayout { count: 5, ..fits }),
        (BASE, PoolLayout { count: u32::MAX, stride: 1 << 31, ..fits }),
    ] {
        assert_eq!(
            Pool::new(&memory, addr, layout).unwrap_err(),
            PoolError::Outside { addr, len: layout.bytes() }
        );
    }
    for layout in [
        PoolLayout { headroom: 1024, ..fits },
        PoolLayout { chunk: 1025, ..fits },
        PoolLayout { chunk: 1000, stride: 1000, ..fits },
        PoolLayout { chunk: 0, headroom: 0, ..fits },
    ] {
        assert_eq!(Pool::new(&memory, BASE, layout).unwrap_err(), PoolError::Layout(layout));
    }
    assert!(matches!(
        Pool::new(&memory, BASE + 32, PoolLayout { count: 1, ..fits }),
        Err(PoolError::Layout(_))
    ));
}

#[test]
fn layouts_keep_their_promises() {
    for (len, headroom) in [(1, 0), (64, 64), (192, 64), (1600, 64), (65_550, 64), (4096, 0)] {
        let fixed = PoolLayout::fixed(len, 3, headroom);
        assert!(fixed.room() >= len, "{fixed:?}");
        assert_eq!((fixed.stride / 64 % 2, fixed.stride % 64), (1, 0), "{fixed:?}");
        assert!(fixed.chunk <= fixed.stride && fixed.stride > 4096, "{fixed:?}");
        let chunks = PoolLayout::chunks(headroom + len, 3, headroom);
        assert_eq!((chunks.chunk, chunks.room(), chunks.stride % 64), (headroom + len, len, 0));
        assert_eq!(chunks.bytes(), chunks.stride as usize * 3);
    }
}

#[test]
fn carved_buffers_follow_each_other_and_add_up_to_the_chunk() {
    for (chunk, headroom, len) in [
        (32768, 0, 1536),
        (32768, 64, 1600),
        (32768, 0, 32768),
        (1024, 0, 256),
        (1024, 24, 1000),
        (1000, 0, 64),
    ] {
        let mut carved = fragments(PoolLayout::chunks(chunk, 2, headroom));
        let all: Vec<Buf> = std::iter::from_fn(|| carved.carve(len)).collect();
        for buf in &all {
            assert!(buf.tailroom() >= len && buf.is_empty() && buf.is_exclusive());
        }
        assert_eq!(all.iter().map(Buf::truesize).sum::<usize>(), 2 * chunk as usize);
        let per_chunk = (chunk - headroom) as usize / len;
        assert_eq!(all.len(), 2 * per_chunk);
        for pair in all.chunks(per_chunk).flat_map(|chunk| chunk.windows(2)) {
            assert_eq!(range(&pair[0]).end, range(&pair[1]).start);
        }
        drop(all);
        assert_eq!(carved.pool().available(), 2);
    }
}

#[test]
fn lengths_that_no_chunk_has_are_refused() {
    let mut carved = fragments(PoolLayout::chunks(1024, 1, 24));
    for len in [1001, u32::MAX as usize + 1, usize::MAX] {
        assert!(carved.carve(len).is_none());
    }
    assert_eq!(carved.carve(1000).unwrap().tailroom(), 1000);
}

#[test]
fn rolling_back_gives_the_same_memory_again() {
    let mut carved = fragments(PoolLayout::chunks(1024, 2, 24));
    for _ in 0..3 {
        let before: Vec<_> = (0..3).map(|_| carved.carve(300).unwrap()).collect();
        let ranges: Vec<_> = before.iter().map(range).collect();
        for mut buf in before.into_iter().rev() {
            // Whatever was done with it meanwhile.
            buf.append(b"used");
            buf.pull(3);
            carved.roll_back(buf);
        }
        let again: Vec<_> = (0..3).map(|_| carved.carve(300).unwrap()).collect();
        assert_eq!(again.iter().map(range).collect::<Vec<_>>(), ranges);
        assert!(again.iter().all(|buf| buf.is_empty() && buf.tailroom() >= 300));
        assert_eq!(again.iter().map(Buf::headroom).collect::<Vec<_>>(), [24, 0, 0]);
        again.into_iter().rev().for_each(|buf| carved.roll_back(buf));
    }
    let whole = carved.carve(1000).unwrap();
    assert_eq!((whole.truesize(), carved.pool().available()), (1024, 1));
}

#[test]
fn what_cannot_be_rolled_back_is_dropped() {
    let mut carved = fragments(PoolLayout::chunks(1024, 2, 0));
    let first = carved.carve(300).unwrap();
    let _second = carved.carve(300).unwrap();
    // Not the last one: the rest is not next to it.
    carved.roll_back(first);
    let mut third = carved.carve(300).unwrap();
    assert_eq!(range(&third).start, BASE + 600);
    // Shared: the other owner still reads it.
    third.append(b"third");
    let other = third.share();
    carved.roll_back(third);
    let fourth = carved.carve(300).unwrap();
    assert!(range(&fourth).start >= BASE + 1024 && fourth.is_exclusive());
    assert_eq!(bytes(&other), b"third");
    // Not from here, while there is a rest and while there is none.
    let mut other = pool(SMALL);
    carved.roll_back(other.alloc().unwrap());
    let _fifth = carved.carve(300).unwrap();
    let last = carved.carve(300).unwrap();
    assert_eq!(range(&last).end, BASE + 2048);
    carved.roll_back(other.alloc().unwrap());
    assert!(carved.carve(100).is_none());
    assert_eq!(other.available(), 4);
}

#[test]
fn what_is_given_up_last_makes_its_chunk_whole_again() {
    let mut carved = fragments(PoolLayout::chunks(1024, 1, 0));
    let all: Vec<Buf> = std::iter::from_fn(|| carved.carve(300)).collect();
    assert_eq!(all.iter().map(|buf| carved.is_last(buf)).collect::<Vec<_>>(), [false, false, true]);
    for buf in all {
        assert_eq!(carved.pool().available(), 0);
        carved.give_up(buf);
    }
    assert_eq!(carved.pool().available(), 1);
    let foreign = pool(SMALL).alloc().unwrap();
    carved.give_up(foreign);
    assert_eq!(carved.pool().available(), 1);
    let kept = carved.carve(300).unwrap();
    let pool = carved.into_pool();
    assert_eq!(pool.available(), 0);
    drop(kept);
    assert_eq!(pool.available(), 1);
}

#[test]
fn a_renewed_buffer_is_as_it_was_carved() {
    for header in [0, 12, 64, 70] {
        let mut carved = fragments(Fragments::layout(1, header));
        let all: Vec<Buf> = (0..4).map(|_| carved.carve(1536).unwrap()).collect();
        for mut buf in all {
            assert_eq!((buf.addr() + u64::from(header)) % 64, 0);
            let before = (range(&buf), buf.addr());
            buf.append(&[1; 700]);
            buf.pull(header as usize + 14);
            let buf = carved.renew(buf).unwrap();
            assert_eq!((range(&buf), buf.addr(), buf.len()), (before.0, before.1, 0));
        }
    }
    let mut carved = fragments(Fragments::layout(1, 0));
    let mut buf = carved.carve(1536).unwrap();
    buf.append(b"0123456789");
    let mut two = buf.share();
    let buf = carved.renew(buf).unwrap_err();
    assert_eq!(bytes(&buf), b"0123456789");
    // A part that begins anywhere would have its data where no line begins.
    let part = two.split_off(5);
    drop((two, buf));
    assert!(carved.renew(part).is_err());
    assert!(carved.renew(pool(SMALL).alloc().unwrap()).is_err());
}

#[test]
fn a_header_that_comes_with_the_data_takes_head_room() {
    let mut pool = pool(SMALL);
    let mut buf = pool.alloc().unwrap();
    buf.reserve_front(12);
    assert_eq!((buf.headroom(), buf.len(), buf.tailroom()), (52, 0, 204));
    buf.append(b"data");
    buf.reserve_front(12);
    assert_eq!((buf.headroom(), bytes(&buf)), (52, b"data".to_vec()));
    buf.truncate(0);
    buf.reserve_front(1000);
    assert_eq!((buf.headroom(), buf.tailroom()), (0, 256));
}

#[test]
fn a_rest_that_is_too_small_does_not_keep_the_last_chunk_from_being_used() {
    let mut carved = fragments(PoolLayout::chunks(1024, 1, 0));
    let small = carved.carve(400).unwrap();
    assert!(carved.carve(700).is_none());
    assert_eq!(carved.carve(400).unwrap().truesize(), 624);
    drop(small);
    let small = carved.carve(400).unwrap();
    drop(small);
    assert_eq!(carved.carve(700).unwrap().truesize(), 1024);
    assert_eq!(carved.carve(1024).unwrap().truesize(), 1024);
}

#[test]
fn the_pools_choose_by_length_and_take_back_by_owner() {
    let mut pools = pools(2, 65_550);
    let all = |pools: &Pools| [pools.small.available(), pools.frame.available(), pools.large.available()];
    let small = pools.alloc(PoolsLayout::SMALL as usize).unwrap();
    let frame = pools.alloc(1514).unwrap();
    let large = pools.alloc(1 << 20).unwrap();
    assert_eq!(all(&pools), [1, 1, 1]);
    assert!(pools.small.owns(&small) && pools.frame.owns(&frame) && pools.large.owns(&large));
    assert!(range(&small).end <= range(&frame).start && range(&frame).end <= range(&large).start);
    [large, frame, small].into_iter().for_each(|buf| pools.recycle(buf));
    assert_eq!(all(&pools), [2, 2, 2]);
    let foreign = pool(SMALL).alloc().unwrap();
    pools.recycle(foreign);
    assert_eq!(all(&pools), [2, 2, 2]);
}

#[test]
fn a_packet_for_which_there_are_not_enough_buffers_takes_none() {
    let mut pools = pools(2, 2048);
    let long: Vec<u8> = (0..5000).map(|n| n as u8).collect();
    assert!(pools.chain_of(&[1; 10_000]).is_none());
    let chain = pools.chain_of(&long).unwrap();
    assert_eq!((chain.len(), chain.to_vec()), (5000, long));
    pools.recycle_chain(chain);
    assert_eq!([pools.small.available(), pools.frame.available(), pools.large.available()], [2, 2, 2]);
    assert!(pools.chain_of(&[]).unwrap().is_empty());
}

#[test]
fn pieces_that_are_appended_share_buffers_and_none_is_written_that_others_have() {
    let mut pools = pools(16, 4096);
    let sent: Vec<u8> = (0..9000u32).map(|i| (i * 7 % 251) as u8).collect();
    for piece in [1, 64, 512, 5000, 9000] {
        let mut packet = Chain::default();
        for (number, bytes) in sent.chunks(piece).enumerate() {
            assert_eq!(pools.append(&mut packet, bytes, sent.len() - number * piece), bytes.len());
        }
        assert_eq!((packet.to_vec(), packet.len()), (sent.clone(), 9000), "{piece}");
        // 4096, 4096 and what is left, as if it had been one piece.
        assert_eq!(packet.bufs().len(), 3, "{piece}");
        let twin = packet.share();
        assert_eq!(pools.append(&mut packet, b"more", 4), 4);
        assert_eq!((packet.bufs().len(), twin.to_vec()), (4, sent.clone()));
        assert!(packet.to_vec().ends_with(b"more"));
    }
    // As much as there are buffers for; the rest is the caller's.
    let mut packet = Chain::default();
    let most = pools.append(&mut packet, &[1; 100_000], 0);
    assert_eq!((most, packet.len(), pools.large.available()), (16 * 4096, 16 * 4096, 0));
    assert_eq!(pools.append(&mut packet, &[1; 5000], 0), 0);
}

#[test]
fn a_chain_has_no_empty_buffers() {
    let mut pool = pool(SMALL);
    let mut packet = Chain::from(pool.alloc().unwrap());
    assert!(packet.is_empty() && packet.bufs().is_empty());
    packet.push_back(pool.alloc().unwrap());
    packet.push_front(pool.alloc().unwrap());
    assert!(packet.bufs().is_empty() && !packet.push(1));
    packet.push_back(filled(&mut pool, b"b"));
    packet.push_front(filled(&mut pool, b"a"));
    assert_eq!((packet.to_vec(), packet.bufs().len(), packet.len()), (b"ab".to_vec(), 2, 2));
    packet.pull(1);
    assert_eq!(packet.bufs().len(), 1);
    packet.truncate(0);
    assert_eq!((packet.bufs().len(), pool.available()), (0, 4));
}

#[test]
fn a_chain_is_cut_at_any_byte() {
    let whole = b"0123456789";
    for n in 0..=12 {
        let mut pool = pool(SMALL);
        let mut front = chain(&mut pool, &[b"012", b"345", b"6789"]);
        front.header = Header { gso_size: 77, ..Header::default() };
        front.hash = Some(5);
        let behind = front.split_off(n);
        let at = n.min(10);
        assert_eq!((front.to_vec(), behind.to_vec()), (whole[..at].to_vec(), whole[at..].to_vec()));
        assert_eq!((front.len(), behind.len()), (at, 10 - at));
        assert_eq!((behind.header, behind.hash), (front.header, front.hash));
        assert!(front.bufs().iter().chain(behind.bufs()).all(|buf| !buf.is_empty()));
        assert_eq!(front.truesize() + behind.truesize(), 3 * 256);
        front.append(behind);
        assert_eq!((front.to_vec(), front.len()), (whole.to_vec(), 10));
        front.coalesce();
        assert_eq!((front.to_vec(), front.bufs().len()), (whole.to_vec(), 3));
    }
}

#[test]
fn neighbours_of_one_chunk_coalesce_and_others_do_not() {
    let mut carved = fragments(PoolLayout::chunks(1024, 2, 0));
    let mut packet = Chain::default();
    for piece in [[1u8; 256], [2; 256], [3; 256], [4; 256], [5; 256]] {
        let mut buf = carved.carve(256).unwrap();
        buf.append(&piece);
        packet.push_back(buf);
    }
    let bytes = packet.to_vec();
    packet.coalesce();
    assert_eq!((packet.bufs().len(), packet.bufs()[0].len()), (2, 1024));
    assert_eq!((packet.to_vec(), packet.len(), packet.truesize()), (bytes, 1280, 1280));
}

#[test]
fn a_shared_chain_is_read_twice_and_written_never() {
    let mut pool = pool(SMALL);
    let mut one = chain(&mut pool, &[b"ab", b"cd"]);
    let mut two = one.share();
    one.pull(1);
    two.truncate(3);
    assert_eq!((one.to_vec(), two.to_vec()), (b"bcd".to_vec(), b"abc".to_vec()));
    assert!(!one.push(1) && !two.push(1));
    // The first buffer of one is gone: the other owner has it alone.
    one.pull(2);
    assert!(two.push(1) && !one.push(1));
    drop(two);
    assert!(one.push(1));
    assert_eq!(one.to_vec(), b"cd");
}

#[test]
fn the_first_bytes_are_copied_across_buffers() {
    let mut pool = pool(SMALL);
    let packet = chain(&mut pool, &[b"abc", b"def", b"g"]);
    for n in 0..10 {
        let mut out = vec![0; n];
        assert_eq!(packet.copy_to(&mut out), n.min(7));
        assert_eq!(out[..n.min(7)], b"abcdefg"[..n.min(7)]);
        let mut target = pool.alloc().unwrap();
        assert_eq!(packet.copy_to_slice(&target.room().first(n)), n.min(7));
        target.grow(n.min(7));
        assert_eq!(bytes(&target), b"abcdefg"[..n.min(7)]);
    }
    assert_eq!(packet.prefix(&mut [0; 4]), b"abcd");
    assert_eq!(packet.prefix(&mut [0; 64]), b"abcdefg");
}

#[test]
fn headers_are_parsed_wherever_the_buffers_end() {
    let mut frame = vec![0; 100];
    frame[12..15].copy_from_slice(&[0x08, 0x00, 0x45]);
    (frame[23], frame[46]) = (6, 0x50);
    frame[26..38].copy_from_slice(b"1234abcdABXY");
    let (layers, hash) = (Layers::parse(&frame).unwrap(), flow::flow_hash(&frame[..64]));
    for piece in 1..60 {
        let mut pools = pools(2, 2048);
        let packet = pools.chain_of(&frame).unwrap();
        let packet = packet.cut(piece);
        assert_eq!(packet.bufs().len(), 100usize.div_ceil(piece));
        assert_eq!(Layers::parse(packet.prefix(&mut [0; 128])), Ok(layers));
        assert_eq!(flow::flow_hash(packet.prefix(&mut [0; 64])), hash);
    }
}

#[test]
fn faults_happen_as_often_as_asked() {
    let mut pool = pool(PoolLayout { count: 100, ..SMALL });
    assert!(!pool.defrag_fails());
    pool.faults().fail_alloc = NonZeroU32::new(3);
    let failed: Vec<bool> = (0..9).map(|_| pool.alloc().is_none()).collect();
    assert_eq!(failed, [false, false, true].repeat(3));
    pool.faults().fail_alloc = None;
    assert!((0..9).all(|_| pool.alloc().is_some()));

    let failures = |share: u8| {
        let mut pool = common::pool(SMALL);
        pool.faults().fail_defrag = share;
        (0..10_000).filter(|_| pool.defrag_fails()).count()
    };
    assert_eq!(failures(0), 0);
    assert!((4_500..5_500).contains(&failures(128)));
    assert!((9_900..10_000).contains(&failures(255)));
}

#[test]
fn cutting_changes_no_byte() {
    let mut pool = pool(SMALL);
    let packet = chain(&mut pool, &[b"0123456", b"78", b"9abcdef"]);
    let mut packet = packet.cut(3);
    assert_eq!(packet.bufs().iter().map(Buf::len).collect::<Vec<_>>(), [3, 3, 1, 2, 3, 3, 1]);
    assert_eq!((packet.to_vec(), packet.len()), (b"0123456789abcdef".to_vec(), 16));
    packet.coalesce();
    assert_eq!(packet.bufs().len(), 3);
    drop(packet);
    assert_eq!(pool.available(), 4);
}

#[test]
fn shattering_leaves_the_bytes_and_no_two_buffers_adjoin() {
    let mut pools = pools(8, 2048);
    let bytes: Vec<u8> = (0..20).collect();
    let packet = pools.chain_of(&bytes).unwrap();
    let packet = pools.shatter(packet);
    assert_eq!(packet.bufs().len(), 1);
    pools.frame.faults().split = NonZeroUsize::new(3);
    let mut packet = pools.shatter(packet);
    packet.coalesce();
    assert_eq!((packet.bufs().len(), packet.to_vec()), (7, bytes.clone()));
    pools.recycle_chain(packet);
    // Without buffers the packet stays as it is.
    let packet = pools.chain_of(&bytes).unwrap();
    let rest: Vec<Buf> = std::iter::from_fn(|| pools.small.alloc()).take(3).collect();
    let packet = pools.shatter(packet);
    assert_eq!((packet.bufs().len(), packet.to_vec()), (1, bytes));
    drop(rest);
}
