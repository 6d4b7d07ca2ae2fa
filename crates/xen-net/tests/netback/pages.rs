//! Pages that stay mapped: cached, bounded, static.

use ringferry_packet::vnet::Header;
use ringferry_xen::grant::{Access, GrantRef};
use ringferry_xen::netif::control::{GrefEntry, GrefList, Message, Status};
use ringferry_xen::netif::wire::{ERROR, OKAY, TxFlags};
use ringferry_xen_net::netback::{Mode, QueueConfig};
use ringferry_xen_sim::fake::Op;

use crate::front::{Calls, Front, GUEST, HOST, deliver, frame};

fn small(mode: Mode, pages: usize) -> QueueConfig {
    QueueConfig { pages, ..QueueConfig::new(mode, true) }
}

#[test]
fn more_pages_than_the_bound_are_served_and_no_more_than_the_bound_are_mapped() {
    let mut front = Front::new(64);
    let mut queue = front.back(small(Mode::Persistent, 16));
    let rings = front.fake.mapped_pages();
    for round in 0..10u8 {
        for i in 0..64 {
            front.send_frame(&frame(100, round ^ i));
            assert_eq!(front.forward(&mut queue), [(Header::default(), frame(100, round ^ i))]);
            assert!(front.fake.mapped_pages() - rings <= 16);
        }
        assert!(front.statuses().iter().all(|status| *status == OKAY));
    }
    let counters = queue.counters();
    let (held, _) = queue.mapped();
    assert_eq!(counters.mapped - counters.evicted, held as u64);
    assert!(held >= 12 && counters.hits >= 64, "some pages stay: {held}, {counters:?}");
    front.finish(queue);
}

#[test]
fn a_front_end_that_changes_its_pages_is_followed() {
    let mut front = Front::new(32);
    let mut queue = front.back(small(Mode::Persistent, 16));
    let mut run = |front: &mut Front, pages: std::ops::Range<usize>, rounds: usize| {
        for _ in 0..rounds {
            for page in pages.clone() {
                front.write(page, 0, &frame(100, page as u8));
                front.request(front.gref(page), 0, TxFlags::empty(), 1, 100);
                assert_eq!(front.forward(&mut queue)[0].1, frame(100, page as u8));
                front.answers();
            }
        }
        front.calls()
    };
    run(&mut front, 0..16, 60);
    assert_eq!(run(&mut front, 0..16, 1), Calls::default());
    run(&mut front, 16..32, 60);
    assert_eq!(run(&mut front, 16..32, 1), Calls::default());
    assert_eq!(queue.counters().evicted, 16);
    front.finish(queue);
}

#[test]
fn a_page_that_cannot_be_mapped_is_copied() {
    let mut front = Front::new(1);
    let mut queue = front.queue(Mode::Persistent);
    for (round, fails) in [false, true, false, false, false].into_iter().enumerate() {
        if fails {
            front.fake.fail(HOST, Op::Map, 0);
        }
        let sent = frame(100, round as u8);
        front.send_frame(&sent);
        assert_eq!(front.forward(&mut queue), [(Header::default(), sent)]);
    }
    assert_eq!((queue.counters().failed, queue.counters().mapped, queue.mapped()), (1, 1, (1, 0)));
    front.finish(queue);
}

#[test]
fn xsa_396_a_grant_that_ends_while_it_is_mapped_harms_only_its_owner() {
    let mut front = Front::new(2);
    let mut queue = front.queue(Mode::Persistent);
    for _ in 0..4 {
        front.send_frame(&frame(100, 1));
        front.forward(&mut queue);
    }
    assert_eq!(queue.mapped(), (2, 0));
    for page in 0..2 {
        assert!(front.fake.invalidate_grant(GUEST, front.gref(page)));
    }
    // A mapped page stays mapped, and is kept until we unmap it.
    front.send_frame(&frame(100, 9));
    assert_eq!(front.forward(&mut queue), [(Header::default(), frame(100, 9))]);
    let rings = 2;
    assert_eq!(front.fake.mapped_pages(), rings + 2);
    drop(queue);
    assert_eq!(front.fake.mapped_pages(), 0);
    // Nobody can have it again.
    let mut queue = front.queue(Mode::Persistent);
    for _ in 0..4 {
        front.send_frame(&frame(100, 1));
        assert!(front.forward(&mut queue).is_empty());
    }
    assert_eq!(front.statuses().iter().filter(|status| **status == ERROR).count(), 4);
    front.finish(queue);
}

/// Writes a list of grants into page 0 of the pool.
fn list(front: &Front, entries: &[(GrantRef, bool)]) -> GrefList {
    let bytes: Vec<u8> =
        entries.iter().flat_map(|(gref, readonly)| GrefEntry::new(*gref, *readonly).to_bytes()).collect();
    front.write(0, 0, &bytes);
    GrefList { queue: 0, page: front.gref(0), count: entries.len() as u32 }
}

#[test]
fn static_grants_are_hits_from_the_first_use_on() {
    for mode in crate::front::MODES {
        let mut front = Front::new(16);
        let (mut queue, mut control) = (front.queue(mode), front.control());
        let entries: Vec<_> = (1..16).map(|page| (front.gref(page), page < 8)).collect();
        let size = front.ask(&mut control, &mut [&mut queue], Message::GetGrefMappingSize { queue: 0 });
        assert_eq!((size.status, size.data), (Status::Success, 1024));
        let add = Message::AddGrefMapping(list(&front, &entries));
        assert_eq!(front.ask(&mut control, &mut [&mut queue], add).status, Status::Success);
        assert_eq!(queue.mapped(), (0, 15));
        front.calls();
        for page in 1..8 {
            front.write(page, 0, &frame(100, page as u8));
            front.request(front.gref(page), 0, TxFlags::empty(), 1, 100);
            front.post_page(front.gref(page + 8), page + 8);
        }
        let _ = front.rx.publish();
        assert_eq!(front.forward(&mut queue).len(), 7);
        for i in 0..7 {
            deliver(&mut queue, Header::default(), &frame(100, i), 100).unwrap();
        }
        queue.flush();
        assert!(front.received().iter().zip(0..).all(|(received, i)| received.bytes == frame(100, i)));
        assert_eq!(front.calls(), Calls::default());
        assert_eq!(queue.counters().hits, 14);
        let remove = Message::DelGrefMapping(list(&front, &entries));
        let removed = front.ask(&mut control, &mut [&mut queue], remove);
        assert_eq!((removed.status, removed.data, queue.mapped()), (Status::Success, 15, (0, 0)));
        drop(control);
        front.finish(queue);
    }
}

#[test]
fn static_grants_are_added_all_or_none() {
    let mut front = Front::new(16);
    let (mut queue, mut control) = (front.back(small(Mode::Copy, 8)), front.control());
    let mapped = front.fake.mapped_pages();
    let good = [(front.gref(1), false), (front.gref(2), true)];
    let all: Vec<_> = (1..10).map(|page| (front.gref(page), false)).collect();
    for (bad, status) in [
        ([good[0], good[0]].to_vec(), Status::InvalidParameter),
        ([good[0], (GrantRef(u32::MAX), false)].to_vec(), Status::InvalidParameter),
        (all, Status::BufferOverflow),
    ] {
        let message = Message::AddGrefMapping(list(&front, &bad));
        assert_eq!(front.ask(&mut control, &mut [&mut queue], message).status, status);
        assert_eq!((queue.mapped(), front.fake.mapped_pages()), ((0, 0), mapped));
    }
    let message = Message::AddGrefMapping(list(&front, &good));
    assert_eq!(front.ask(&mut control, &mut [&mut queue], message).status, Status::Success);
    // Once more is a duplicate, and takes nothing away.
    assert_eq!(front.ask(&mut control, &mut [&mut queue], message).status, Status::InvalidParameter);
    assert_eq!(queue.mapped(), (0, 2));
    drop(control);
    front.finish(queue);
}

#[test]
fn a_static_grant_for_reading_cannot_be_one_for_writing() {
    let mut front = Front::with_access(4, Access::Read);
    let mut table = front.domain.grants().unwrap();
    let lists = table.grant(HOST, 1, Access::Write).unwrap();
    let (mut queue, mut control) = (front.queue(Mode::Copy), front.control());
    let mut ask = |front: &mut Front, readonly| {
        let bytes = GrefEntry::new(front.gref(1), readonly).to_bytes();
        lists.region().area(0, 8).unwrap().write(0, 8).unwrap().copy_from(&bytes);
        let list = GrefList { queue: 0, page: lists.refs()[0], count: 1 };
        front.ask(&mut control, &mut [&mut queue], Message::AddGrefMapping(list)).status
    };
    assert_eq!(ask(&mut front, false), Status::InvalidParameter);
    assert_eq!(ask(&mut front, true), Status::Success);
    drop((control, lists));
    front.finish(queue);
}

#[test]
fn a_static_grant_in_use_is_not_removed() {
    let mut front = Front::new(4);
    let (mut queue, mut control) = (front.queue(Mode::Copy), front.control());
    let both = [(front.gref(1), false), (front.gref(2), false)];
    let add = Message::AddGrefMapping(list(&front, &both));
    assert_eq!(front.ask(&mut control, &mut [&mut queue], add).status, Status::Success);
    front.request(front.gref(1), 0, TxFlags::empty(), 1, 100);
    let _ = front.tx.publish();
    queue.poll(32, &mut front.multicast);
    let never = front.gref(3);
    let remove = Message::DelGrefMapping(list(&front, &[both[0], both[1], (never, false), both[1]]));
    let removed = front.ask(&mut control, &mut [&mut queue], remove);
    assert_eq!((removed.status, removed.data), (Status::Success, 1));
    let statuses: Vec<_> =
        (0..4).map(|i| GrefEntry::from_bytes(front.read(0, 8 * i, 8).try_into().unwrap()).status).collect();
    let invalid = Status::InvalidParameter;
    assert_eq!(statuses, [invalid, Status::Success, invalid, invalid], "in use, removed, never added, twice");
    queue.complete();
    let removed = front.ask(&mut control, &mut [&mut queue], remove).data;
    assert_eq!(removed, 1, "not in use any more");
    drop(control);
    front.finish(queue);
}

#[test]
fn control_messages_that_make_no_sense_are_refused() {
    let mut front = Front::new(4);
    let (mut queue, mut control) = (front.queue(Mode::Copy), front.control());
    let page = front.gref(0);
    let bad = GrantRef(12345678);
    let lists = |list| [Message::AddGrefMapping(list), Message::DelGrefMapping(list)];
    let mut refused = vec![Message::GetGrefMappingSize { queue: 1 }, Message::SetHashAlgorithm(1)];
    refused.extend(lists(GrefList { queue: u32::MAX, page, count: 1 }));
    for count in [0, 513, u32::MAX, 1 << 29] {
        refused.extend(lists(GrefList { queue: 0, page, count }));
    }
    refused.extend(lists(GrefList { queue: 0, page: bad, count: 1 }));
    for message in refused {
        let status = front.ask(&mut control, &mut [&mut queue], message).status;
        assert_eq!(status, Status::InvalidParameter, "{message:?}");
    }
    for message in [Message::GetHashFlags, Message::SetHashKey { page, size: u32::MAX }] {
        let status = front.ask(&mut control, &mut [&mut queue], message).status;
        assert_eq!(status, Status::NotSupported, "{message:?}");
    }
    let none = front.ask(&mut control, &mut [&mut queue], Message::SetHashAlgorithm(0));
    assert_eq!(none.status, Status::Success);
    drop(control);
    front.finish(queue);
}

/// Offsets and lengths that overflow, and some that a table would have. There is no table that they could be outside of.
#[test]
fn xsa_270_a_part_of_the_hash_mapping_is_refused_wherever_it_lies() {
    let mut front = Front::new(4);
    let (mut queue, mut control) = (front.queue(Mode::Copy), front.control());
    let page = front.gref(0);
    for (count, offset) in
        [(1, 0), (128, 0), (0, u32::MAX), (1, u32::MAX), (u32::MAX, 1), (u32::MAX, u32::MAX)]
    {
        let mapping = Message::SetHashMapping { page, count, offset };
        let status = front.ask(&mut control, &mut [&mut queue], mapping).status;
        assert_eq!(status, Status::NotSupported, "{count} {offset}");
    }
    drop(control);
    front.finish(queue);
}
