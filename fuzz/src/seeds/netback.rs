//! Scenarios for the Xen network back end.

use super::Seed;
use crate::netback::{SG, Step, WRITABLE};
use crate::ring::Reached;
use crate::script::Field;

/// Flags of a transmit request (`NETTXF`).
const BLANK: u16 = 1;
const MORE: u16 = 4;
const EXTRA: u16 = 8;
/// Types of messages on the control ring.
const SET_KEY: u8 = 3;
const SIZE: u8 = 8;
const ADD: u8 = 9;
const REMOVE: u8 = 10;
/// Calls of the hypervisor that a seed makes fail.
const MAP: u8 = 0;
const COPY: u8 = 1;
const BATCH: u8 = 2;

const POLL: Step = Step::Poll { max: 32 };
const COMPLETE: Step = Step::Complete {};
const FLUSH: Step = Step::Flush {};

fn send(page: u8, offset: u16, flags: u16, size: u16) -> Step {
    Step::Send { page, offset, flags, id: 100 + u16::from(page), size }
}

fn show(ring: u8) -> Step {
    Step::Show { ring, more: 0 }
}

fn post(pages: &[u8]) -> Vec<Step> {
    let post = |page: &u8| Step::Post { page: *page, id: u16::from(*page) };
    pages.iter().map(post).chain([show(1)]).collect()
}

fn gso(size: u16, kind: u8) -> Step {
    Step::Extra { kind: 1, more: 0, low: size, high: kind.into() }
}

fn deliver(len: u16, kind: u8) -> Step {
    Step::Deliver { len, kind }
}

pub(super) fn seeds() -> Vec<Seed> {
    let mut seeds = Vec::new();
    let mut seed = |name, flags: u8, pages: u8, parts: &[Vec<Step>], reached: [usize; 3], broken| {
        let mut bytes = vec![flags, pages];
        parts.concat().iter().for_each(|step| step.put(&mut bytes));
        let [chains, frames, longest] = reached;
        let reaches = Reached { chains, longest, frames, broken };
        seeds.push(Seed { target: "netback", name, bytes, reaches });
    };
    let fill = |kind| (0..12).map(|page| Step::Fill { page, kind }).collect::<Vec<_>>();
    // Three packets, of which the second lies in four pages and an empty one, in each mode; sent twice, so
    // that pages are known.
    let burst = vec![
        send(0, 64, 0, 100),
        send(1, 0, MORE, 9000),
        send(9, 0, MORE, 4096),
        send(2, 4095, MORE, 0),
        send(3, 1, 0, 4000),
        send(11, 4082, 0, 14),
        show(0),
        POLL,
        COMPLETE,
    ];
    let back = [
        post(&[0, 1, 2, 9, 4, 5]),
        vec![Step::Expect { frames: 3 }, deliver(60, 0), deliver(9000, 4), FLUSH],
    ];
    let both = [fill(0), burst.clone(), back.concat(), burst.clone(), back.concat(), burst.clone()];
    for (name, mode, pages) in
        [("copy", 0, 0), ("map", 1, 0), ("map_few", 1, 2), ("persistent", 2, 0), ("evict", 2, 1)]
    {
        seed(name, mode | SG, pages, &both, [9, 9, 4], false);
    }
    let offloads = vec![
        send(0, 0, BLANK, 100),
        send(1, 0, BLANK | EXTRA, 3000),
        gso(1448, 1),
        send(2, 0, BLANK | EXTRA, 3000),
        gso(1448, 2),
        send(3, 0, BLANK | EXTRA, 3000),
        gso(0, 1),
        show(0),
        POLL,
        COMPLETE,
    ];
    seed("offloads", 2 | SG, 0, &[fill(1), offloads.clone()], [4, 2, 0], false);
    seed("offloads_of_nothing", SG, 0, &[fill(0), offloads], [4, 0, 0], false);
    let cut = [post(&[0, 1, 2]), vec![deliver(3000, 1), deliver(60, 1), FLUSH]].concat();
    seed("deliver_cut", 1 | SG, 0, &[cut], [0, 0, 1], false);
    let large =
        [post(&[0, 1]), vec![deliver(4097, 0), deliver(4096, 0), deliver(60, 0), deliver(60, 0), FLUSH]]
            .concat();
    seed("deliver_too_much", 2, 0, &[large], [0, 0, 2], false);
    let readonly =
        [post(&[WRITABLE, 30, 0]), vec![deliver(60, 0), deliver(60, 0), deliver(60, 0), FLUSH]].concat();
    for (name, mode) in
        [("deliver_nowhere_copy", 0), ("deliver_nowhere_map", 1), ("deliver_nowhere_persistent", 2)]
    {
        seed(name, mode | SG, 0, std::slice::from_ref(&readonly), [0, 0, 3], false);
    }
    let refused = vec![
        send(30, 0, 0, 100),
        send(0, 0, MORE, 200),
        send(30, 0, 0, 100),
        send(0, 0, 0, 13),
        send(0, 0, MORE, 100),
        send(1, 0, 0, 101),
        show(0),
        POLL,
        COMPLETE,
    ];
    seed("refused", 2 | SG, 0, &[fill(0), refused], [4, 0, 0], false);
    let many = (1..20).map(|at| send(1, 0, if at < 19 { MORE } else { 0 }, 10));
    let many: Vec<_> =
        [send(0, 0, MORE, 1000)].into_iter().chain(many).chain([show(0), POLL, COMPLETE]).collect();
    seed("xsa_432_twenty_slots", 1, 0, std::slice::from_ref(&many), [1, 0, 0], false);
    let first = |rest: &[Step]| [&[send(0, 0, 0, 100)], rest, &[show(0), POLL, COMPLETE]].concat();
    let breaks: [(&str, Vec<Step>); 6] = [
        ("xsa_39_incomplete", first(&[send(1, 0, MORE, 100)])),
        ("too_many_slots", first(&[send(1, 0, MORE, 1000); 21])),
        ("crosses_page", first(&[send(1, 4000, 0, 97)])),
        (
            "extra_twice",
            first(&[send(1, 0, EXTRA, 100), Step::Extra { kind: 1, more: 1, low: 0, high: 0 }, gso(1, 1)]),
        ),
        (
            "extra_unknown",
            first(&[send(1, 0, EXTRA, 100), Step::Extra { kind: 5, more: 0, low: 0, high: 0 }]),
        ),
        (
            "extra_without_end",
            first(&[send(1, 0, EXTRA, 100), Step::Extra { kind: 2, more: 1, low: 0, high: 0 }]),
        ),
    ];
    for (name, steps) in breaks {
        seed(name, 2 | SG, 0, &[fill(0), steps], [1, 1, 0], true);
    }
    let jump = |ring, more| vec![Step::Show { ring, more }, POLL, deliver(60, 0), FLUSH];
    seed("xsa_39_index", 2, 0, &[jump(0, 257)], [0, 0, 0], true);
    seed("xsa_39_receive_index", 2, 0, &[jump(1, 1 << 31)], [0, 0, 0], true);
    // Static grants: asked for, added, twice, used, removed; one list that is no page, one that is too long.
    let order =
        |kind, page, count| vec![Step::Order { kind, queue: 0, page, count }, show(2), Step::Control {}];
    let list = vec![
        Step::Entry { list: 7, at: 0, page: 0, flags: 0 },
        Step::Entry { list: 7, at: 1, page: 9, flags: 1 },
        Step::Entry { list: 7, at: 2, page: 1, flags: 0 },
    ];
    let statics = [
        fill(0),
        list,
        order(SIZE, 0, 0),
        order(SET_KEY, 0, 40),
        order(ADD, 7, 3),
        order(ADD, 7, 3),
        burst.clone(),
        back.concat(),
        order(REMOVE, 7, 2),
        order(REMOVE, 30, 1),
        order(ADD, 7, 513),
        burst.clone(),
    ];
    for (name, mode) in [("statics_copy", 0), ("statics_map", 1), ("statics_persistent", 2)] {
        seed(name, mode | SG, 0, &statics, [6, 6, 2], false);
    }
    let orders: Vec<_> = (0..20).map(|_| Step::Order { kind: SIZE, queue: 1, page: 0, count: 0 }).collect();
    seed(
        "control_flood",
        0,
        0,
        &[orders, vec![show(2), Step::Control {}, Step::Control {}]],
        [0, 0, 0],
        false,
    );
    let multicast = vec![
        send(0, 0, EXTRA, 100),
        Step::Extra { kind: 2, more: 1, low: 1, high: 0 },
        Step::Extra { kind: 3, more: 0, low: 1, high: 0 },
        show(0),
        POLL,
        COMPLETE,
    ];
    seed("multicast", 8 | SG, 0, &[multicast], [1, 0, 0], false);
    // Calls of the hypervisor fail, and a grant ends too early.
    let fail = |op, after| vec![Step::Fail { op, after }];
    let faults = [
        fill(0),
        fail(MAP, 1),
        burst.clone(),
        fail(COPY, 2),
        back.concat(),
        fail(BATCH, 0),
        burst.clone(),
        vec![Step::Spoil { page: 0 }],
        burst.clone(),
        back.concat(),
    ];
    seed("xsa_361_faults_copy", SG, 0, &faults, [9, 5, 4], false);
    seed("xsa_361_faults_map", 1 | SG, 0, &faults, [9, 8, 4], false);
    seed("xsa_361_faults_persistent", 2 | SG, 0, &faults, [9, 8, 4], false);
    // The front end writes while the back end reads; the back end is started again.
    let surprise = |after, value| vec![Step::Surprise { after, flip: 1, value }];
    let again = vec![Step::Arm { len: 9000 }, Step::Again {}, Step::Arm { len: 60 }];
    let changed = [fill(0), surprise(2, 1), surprise(3, 1), burst.clone(), again, burst, back.concat()];
    seed("changed_and_again", 2 | SG, 0, &changed, [6, 6, 2], false);
    seeds
}
