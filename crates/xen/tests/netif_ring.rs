//! Tests both halves of a ring against each other, against a model, and against hostile peers.

use std::collections::VecDeque;

use proptest::prelude::*;
use ringferry_memory::{Area, GuestMemory, SharedMem, Words};
use ringferry_xen::netif::ring::slots;
use ringferry_xen::netif::wire::{RxSlot, TxSlot};
use ringferry_xen::netif::{BackRing, Fault, FrontRing, LayoutError};

type Slot = TxSlot;
const SIZE: u32 = slots::<Slot>();
const REQ_PROD: usize = 0;
const RSP_PROD: usize = 8;

fn page() -> Area {
    let memory = SharedMem::new("ring", 4096).unwrap();
    GuestMemory::new(vec![memory.map_at(0x1000).unwrap()]).unwrap().area(0x1000, 4096).unwrap()
}

fn pair() -> (Area, FrontRing<Area, Slot>, BackRing<Area, Slot>) {
    let page = page();
    let front = FrontRing::new(page.clone()).unwrap();
    let back = BackRing::attach(page.clone()).unwrap();
    (page, front, back)
}

/// Moves both indexes of an idle ring close to where they wrap around.
fn wound(start: u32) -> (Area, FrontRing<Area, Slot>, BackRing<Area, Slot>) {
    let (page, mut front, mut back) = pair();
    for _ in 0..start {
        front.push([0; 3]);
        let _ = front.publish();
        back.refresh();
        back.take().unwrap();
        back.respond([0; 3]);
        let _ = back.publish();
        front.refresh();
        front.take().unwrap();
    }
    (page, front, back)
}

#[test]
fn ring_h_sizes() {
    assert_eq!((slots::<TxSlot>(), slots::<RxSlot>(), slots::<[u32; 4]>()), (256, 256, 128));
}

#[test]
fn ring_h_a_new_ring_asks_for_the_first_event_on_both_sides() {
    let (page, mut front, mut back) = pair();
    assert_eq!([4, 12].map(|at| page.load32(at)), [1, 1]);
    front.push([1; 3]);
    assert!(front.publish());
    front.push([2; 3]);
    assert!(!front.publish(), "nobody asked again");
    assert_eq!(back.refresh(), 2);
    back.take().unwrap();
    back.respond([3; 3]);
    assert!(back.publish());
    assert!(!back.publish(), "nothing new");
}

#[test]
fn a_page_that_is_too_small_or_crooked_is_refused() {
    let page = page();
    let memory = SharedMem::new("ring", 8192).unwrap();
    let memory = GuestMemory::new(vec![memory.map_at(0x1000).unwrap()]).unwrap();
    drop(page);
    let area = |at, len| memory.area(at, len).unwrap();
    assert_eq!(BackRing::<_, Slot>::attach(area(0x1000, 4095)).unwrap_err(), LayoutError::Page);
    assert_eq!(FrontRing::<_, Slot>::new(area(0x1004, 4096)).unwrap_err(), LayoutError::Page);
}

#[test]
fn a_back_end_that_comes_back_serves_what_was_not_answered() {
    let (page, mut front, mut back) = pair();
    for i in 0..5 {
        front.push([i; 3]);
    }
    let _ = front.publish();
    back.refresh();
    for _ in 0..3 {
        back.take().unwrap();
    }
    back.respond([0; 3]);
    let _ = back.publish();
    back.respond([9; 3]); // never shown
    drop(back);
    let mut back = BackRing::<_, Slot>::attach(page.clone()).unwrap();
    assert_eq!(back.available(), 4);
    assert_eq!(back.take(), Some([9; 3]), "the slot of the response that was written and not shown");
    assert_eq!(back.take(), Some([2; 3]));
    page.store32(REQ_PROD, 2 + SIZE);
    assert_eq!(BackRing::<_, Slot>::attach(page).unwrap_err(), LayoutError::Outstanding(SIZE + 1));
}

#[test]
fn xsa_39_a_request_producer_that_runs_away_breaks_the_ring_for_good() {
    for bad in [SIZE + 1, u32::MAX, 1 << 31] {
        let (page, mut front, mut back) = pair();
        front.push([1; 3]);
        let _ = front.publish();
        assert_eq!(back.refresh(), 1);
        page.store32(REQ_PROD, bad);
        assert_eq!(back.refresh(), 0, "what was seen is not served either");
        assert_eq!(back.fault(), Some(Fault::Index));
        page.store32(REQ_PROD, 1);
        assert_eq!(back.refresh(), 0);
        assert_eq!((back.take(), back.final_check(1), back.publish()), (None, false, false));
    }
}

#[test]
fn xsa_39_a_request_producer_that_goes_back_breaks_the_ring() {
    let (page, mut front, mut back) = pair();
    for _ in 0..3 {
        front.push([1; 3]);
    }
    let _ = front.publish();
    back.refresh();
    back.take().unwrap();
    page.store32(REQ_PROD, 2);
    assert_eq!((back.refresh(), back.fault()), (0, Some(Fault::Index)));
}

#[test]
fn xsa_391_a_response_producer_that_runs_away_breaks_the_ring_for_good() {
    for bad in [2, u32::MAX, SIZE] {
        let (page, mut front, _) = pair();
        front.push([1; 3]);
        let _ = front.publish();
        front.push([2; 3]); // not published: no back end can have answered it
        page.store32(RSP_PROD, bad);
        assert_eq!((front.refresh(), front.take()), (0, None));
        assert_eq!(front.fault(), Some(Fault::Index));
        assert!(!front.publish() && !front.final_check(1));
    }
}

#[test]
fn a_broken_ring_is_not_written() {
    let (page, mut front, mut back) = pair();
    for i in 1..=4 {
        front.push([i; 3]);
    }
    let _ = front.publish();
    back.refresh();
    back.take().unwrap();
    back.break_with(Fault::CrossesPage);
    back.break_with(Fault::Index);
    assert_eq!(back.fault(), Some(Fault::CrossesPage), "the first is the reason");
    back.respond([7; 3]);
    assert!(!back.publish());
    assert_eq!((page.load32(64), page.load32(RSP_PROD)), (1, 0));
}

#[test]
fn requests_that_were_put_back_are_taken_again() {
    let (_, mut front, mut back) = pair();
    for i in 0..4 {
        front.push([i; 3]);
    }
    let _ = front.publish();
    back.refresh();
    for _ in 0..4 {
        back.take().unwrap();
    }
    back.respond([0; 3]);
    back.untake(2);
    assert_eq!((back.available(), back.unanswered()), (2, 1));
    assert_eq!(back.take(), Some([2; 3]));
}

#[test]
#[should_panic(expected = "only what was taken")]
fn what_was_answered_cannot_be_put_back() {
    let (_, mut front, mut back) = pair();
    front.push([1; 3]);
    let _ = front.publish();
    back.refresh();
    back.take().unwrap();
    back.respond([0; 3]);
    back.untake(1);
}

#[test]
fn a_final_check_for_several_is_told_when_the_last_of_them_comes() {
    let (_, mut front, mut back) = wound(10);
    assert!(!back.final_check(3));
    for expect in [false, false, true, false] {
        front.push([1; 3]);
        assert_eq!(front.publish(), expect);
    }
    assert!(back.final_check(4), "they are there");
    assert!(!back.final_check(5));
    front.push([1; 3]);
    assert!(front.publish());
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Push(u32),
    PublishRequests,
    Take(u32),
    Untake(u32),
    Respond(u32),
    PublishResponses,
    Collect(u32),
    FrontSleeps,
    BackSleeps,
}

fn step() -> impl Strategy<Value = Step> {
    let n = prop_oneof![1u32..4, 1u32..SIZE + 9];
    prop_oneof![
        n.clone().prop_map(Step::Push),
        Just(Step::PublishRequests),
        n.clone().prop_map(Step::Take),
        n.clone().prop_map(Step::Untake),
        n.clone().prop_map(Step::Respond),
        Just(Step::PublishResponses),
        n.prop_map(Step::Collect),
        Just(Step::FrontSleeps),
        Just(Step::BackSleeps),
    ]
}

proptest! {
    /// Requests and responses arrive once and in order whatever the two halves do, and a half that
    /// sleeps is woken.
    #[test]
    fn front_and_back_agree_with_two_queues(start in 0u32..600, steps in prop::collection::vec(step(), 1..200)) {
        let (_, mut front, mut back) = wound(start);
        let mut number = 0u32;
        // Numbers of requests that were written, published and taken; then the same of responses.
        let (mut written, mut shown, mut taken) = (VecDeque::new(), VecDeque::new(), VecDeque::new());
        let (mut answered, mut visible) = (VecDeque::new(), VecDeque::new());
        let (mut front_sleeps, mut back_sleeps) = (false, false);
        for step in steps {
            match step {
                Step::Push(n) => for _ in 0..n.min(front.free()) {
                    number += 1;
                    front.push([number, !number, 7]);
                    written.push_back(number);
                },
                Step::PublishRequests => {
                    let notify = front.publish();
                    prop_assert!(notify || !back_sleeps || written.is_empty(), "lost wake-up");
                    back_sleeps &= written.is_empty();
                    shown.extend(written.drain(..));
                }
                Step::Take(n) => {
                    prop_assert_eq!(back.refresh() as usize, shown.len());
                    for _ in 0..n {
                        let Some(slot) = back.take() else { break };
                        let expected: u32 = shown.pop_front().unwrap();
                        prop_assert_eq!(slot, [expected, !expected, 7]);
                        taken.push_back(expected);
                    }
                }
                Step::Untake(n) => {
                    let n = n.min(back.unanswered());
                    back.untake(n);
                    for _ in 0..n {
                        shown.push_front(taken.pop_back().unwrap());
                    }
                }
                Step::Respond(n) => for _ in 0..n.min(back.unanswered()) {
                    let number = taken.pop_front().unwrap();
                    back.respond([number, 1, 2]);
                    answered.push_back(number);
                },
                Step::PublishResponses => {
                    let notify = back.publish();
                    prop_assert!(notify || !front_sleeps || answered.is_empty(), "lost wake-up");
                    front_sleeps &= answered.is_empty();
                    visible.extend(answered.drain(..));
                }
                Step::Collect(n) => {
                    prop_assert_eq!(front.refresh() as usize, visible.len());
                    for _ in 0..n {
                        let Some(slot) = front.take() else { break };
                        prop_assert_eq!(slot, [visible.pop_front().unwrap(), 1, 2]);
                    }
                }
                Step::FrontSleeps => {
                    front_sleeps = !front.final_check(1);
                    prop_assert_eq!(front_sleeps, visible.is_empty());
                }
                Step::BackSleeps => {
                    back_sleeps = !back.final_check(1);
                    prop_assert_eq!(back_sleeps, shown.is_empty());
                }
            }
            prop_assert_eq!(front.fault(), None);
            prop_assert_eq!(back.fault(), None);
        }
    }

    /// For every index that a peer publishes: nothing is taken that is not in the ring, and nothing
    /// panics.
    #[test]
    fn any_producer_index_is_sane_or_breaks_the_ring(indexes in prop::collection::vec(prop_oneof![any::<u32>(), 0u32..600], 1..20)) {
        let (page, mut front, mut back) = pair();
        for index in indexes {
            page.store32(REQ_PROD, index);
            prop_assert!(back.refresh() <= SIZE);
            while back.take().is_some() {}
            prop_assert!(back.unanswered() <= SIZE);
            if back.unanswered() > 3 {
                back.respond([0; 3]);
                let _ = back.publish();
            }
            while front.free() > 0 {
                front.push([1; 3]);
            }
            let _ = front.publish();
            page.store32(RSP_PROD, index);
            prop_assert!(front.refresh() <= SIZE);
            while front.take().is_some() {}
            prop_assert!(front.in_flight() <= SIZE);
        }
    }
}
