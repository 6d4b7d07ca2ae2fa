//! Scenarios that reach deep, from which the fuzzer starts. Each states what it reaches, and a test checks
//! that; `cargo run --bin seeds` writes them to `corpus/`.

mod control;
mod filter;
mod firewall;
mod forward;
mod handover;
mod helper;
mod netback;
mod netfront;
mod reload;
mod store;
mod xenbus;

use crate::device::{self, INFLIGHT};
use crate::driver::{self, TABLES};
use crate::guest::BASE;
use crate::net::{LEGACY, MERGEABLE, PACKED, ReceiveStep, TransmitStep};
use crate::pen::{Stroke, offer};
use crate::ring::{INDIRECT, NEXT, OWNER, Reached, Setup, WRITE};
use crate::script::Field;
use crate::session::{self, EVENT, MEMORY_FILE, Message, message};
use ringferry_vhost_user::message::{InflightDescription, Request, VringState};
use zerocopy::IntoBytes;

/// Offset of the buffers: behind rings and tables, in the first region.
const DATA: u32 = 0x1_8000;
/// The last bytes of the first region, which the second follows.
const BORDER: u32 = 0x2_0000 - 20;
/// An offset that lies in no region.
const NOWHERE: u32 = 0x3_0000;

const F_INDIRECT: u8 = 1;
const F_EVENT: u8 = 2;
const F_IN_ORDER: u8 = 4;

/// An input, and the result that a run of it must have.
#[derive(Clone, Debug)]
pub struct Seed {
    /// Name of the target that the input is for.
    pub target: &'static str,
    /// Name of the seed's file.
    pub name: &'static str,
    /// The bytes of the input.
    pub bytes: Vec<u8>,
    /// The result of a run, which a test compares.
    pub reaches: Reached,
}

/// Returns all seeds of all targets.
pub fn all() -> Vec<Seed> {
    let layouts = [false, true];
    let rings = layouts.into_iter().flat_map(|packed| [devices(packed), drivers(packed)].concat());
    rings
        .chain(filter::seeds())
        .chain(firewall::seeds())
        .chain(transmitqs())
        .chain(receiveqs())
        .chain(sessions())
        .chain(control::seeds())
        .chain(forward::seeds())
        .chain(helper::seeds())
        .chain(handover::seeds())
        .chain(reload::seeds())
        .chain(netback::seeds())
        .chain(netfront::seeds())
        .chain(store::seeds())
        .chain(xenbus::seeds())
        .collect()
}

fn script(setup: Setup, steps: &[impl Field]) -> Vec<u8> {
    let mut bytes = Vec::new();
    setup.put(&mut bytes);
    steps.iter().for_each(|step| step.put(&mut bytes));
    bytes
}

/// Index into the sizes: 8 entries in a split ring, 5 in a packed one for `small`, 2048 and 2047 for
/// `large`.
fn setup(packed: bool, flags: u8, size: Size) -> Setup {
    let size = match size {
        Size::One => 0,
        Size::Small => 3,
        Size::Large => 7,
    };
    Setup { size, flags, base: if packed { 1 << 15 } else { 0 } }
}

#[derive(Clone, Copy)]
enum Size {
    One,
    Small,
    Large,
}

fn reaches(chains: usize, longest: usize, broken: bool) -> Reached {
    Reached { chains, longest, frames: 0, broken }
}

/// The strokes that write an indirect table.
fn table(number: u16, entries: &[(u32, u32, u16)]) -> Vec<Stroke> {
    let entry = |(at, (addr, len, flags)): (u16, &(u32, u32, u16))| {
        let more = if usize::from(at) + 1 < entries.len() { NEXT } else { 0 };
        Stroke::Entry { table: number, at, addr: *addr, len: *len, flags: flags | more, link: at + 1 }
    };
    (0..).zip(entries).map(entry).collect()
}

/// Returns the offset of the first indirect table for a ring.
fn table_at(setup: Setup, packed: bool) -> u32 {
    (setup.ring(packed).0.rest - BASE) as u32
}

fn devices(packed: bool) -> Vec<Seed> {
    use device::Step;
    let target = if packed { "packed_device" } else { "split_device" };
    let mut seeds = Vec::new();
    let mut seed = |name, setup: Setup, parts: &[Vec<Step>], reaches| {
        seeds.push(Seed { target, name, bytes: script(setup, &parts.concat()), reaches });
    };
    let driver = |strokes: Vec<Stroke>| -> Vec<Step> {
        strokes.into_iter().map(|stroke| Step::Driver { stroke }).collect()
    };
    let take = vec![Step::Take { max: 32 }];
    let done = vec![Step::CompleteAll {}, Step::Publish {}];
    let one = |at| driver(offer(packed, at, &[(DATA, 64, 0)]));
    let three = [(DATA, 12, 0), (DATA + 64, 1500, 0), (DATA + 4096, 1, WRITE)];
    let small = setup(packed, 0, Size::Small);

    let lap: Vec<Step> = [one(0), take.clone(), done.clone()].concat();
    seed("one_entry", setup(packed, F_EVENT, Size::One), &vec![lap; 5], reaches(5, 1, false));
    let chain = |at| driver(offer(packed, at, &three));
    // These go round the ring, over its end and, in a split ring, over that of the index.
    let lap = [chain(1), take.clone(), done.clone(), one(6), take.clone(), done.clone()].concat();
    let late = Setup { base: if packed { 3 } else { 0xfffd }, ..small };
    seed("laps", late, &vec![lap.clone(); 6], reaches(12, 3, false));
    let kept = Setup { flags: INFLIGHT, ..small };
    seed("laps_inflight", kept, &vec![lap; 6], reaches(12, 3, false));

    // Event suppression: notifications are asked for before and behind the present position, and not at all.
    let asked = [
        vec![Step::Enable {}],
        one(0),
        driver(vec![Stroke::Show { jump: 0 }]),
        vec![Step::Look {}, Step::Enable {}],
        take.clone(),
        done.clone(),
        vec![Step::Disable {}],
        one(1),
        vec![Step::Enable {}],
        take.clone(),
        done.clone(),
    ];
    for (name, flags) in [("signals", 0), ("signals_event_idx", F_EVENT)] {
        seed(name, setup(packed, flags, Size::Small), &asked, reaches(2, 1, false));
    }

    // Four chains are in hand; they are completed out of order, given back, taken again.
    let four = [one(0), one(1), one(2), one(3)].concat();
    let parts = [
        four.clone(),
        take.clone(),
        vec![Step::Untake { count: 2 }, Step::Complete { which: 1, written: 0 }, Step::Publish {}],
        take.clone(),
        vec![Step::Complete { which: 2, written: 0 }],
        done.clone(),
    ];
    seed("out_of_order", small, &parts, reaches(6, 1, false));
    let mixed = [one(0), chain(1), one(4), take.clone(), done.clone()];
    let mixed_reaches = reaches(3, 3, false);
    seed("in_order", setup(packed, F_IN_ORDER, Size::Small), &mixed, mixed_reaches);
    seed("in_order_event_idx", setup(packed, F_IN_ORDER | F_EVENT, Size::Small), &mixed, mixed_reaches);

    // Indirect tables: with readable and writable entries, longer than allowed, in no memory, ragged.
    let with = setup(packed, F_INDIRECT, Size::Small);
    let at = table_at(with, packed);
    let entries = driver(table(0, &three));
    let indirect = |at: u32, len: u32, flags: u16| driver(offer(packed, 2, &[(at, len, INDIRECT | flags)]));
    let parts = |table: Vec<Step>| [entries.clone(), table, take.clone(), done.clone()];
    seed("indirect", with, &parts(indirect(at, 48, 0)), reaches(1, 3, false));
    seed("indirect_unasked", small, &parts(indirect(at, 48, 0)), reaches(0, 0, true));
    seed("indirect_nowhere", with, &parts(indirect(NOWHERE, 48, 0)), reaches(0, 0, true));
    seed("indirect_ragged", with, &parts(indirect(at, 47, 0)), reaches(0, 0, true));
    seed("indirect_next", with, &parts(indirect(at, 48, NEXT)), reaches(0, 0, true));
    // The table lies across the border of two regions: it is all zeroes, so one (split) or all entries
    // (packed) have no bytes.
    let entries_there = if packed { 2 } else { 1 };
    seed("indirect_border", with, &parts(indirect(BORDER, 32, 0)), reaches(1, entries_there, false));
    let large = setup(packed, F_INDIRECT, Size::Large);
    let zeroes = if packed { 1024 } else { 1 };
    seed("indirect_1024", large, &parts(indirect(DATA, 16384, 0)), reaches(1, zeroes, false));
    let long = driver(vec![Stroke::Entry { table: 0, at: 0, addr: 0, len: 0, flags: NEXT, link: 0 }]);
    let at = table_at(large, packed);
    let parts = [long, indirect(at, 16 * 1025, 0), take.clone(), done.clone()];
    seed("indirect_too_long", large, &parts, reaches(0, 0, true));

    // Chains that break rules: those before the bad chain are taken all the same, those behind it never.
    let broken = |bad: &[(u32, u32, u16)]| {
        [one(0), driver(offer(packed, 1, bad)), one(0), take.clone(), done.clone(), take.clone()]
    };
    seed("write_then_read", small, &broken(&[(DATA, 1, WRITE), (DATA, 1, 0)]), reaches(1, 1, true));
    let huge = [(DATA, u32::MAX, 0), (DATA, 1, WRITE)];
    seed("too_large", small, &broken(&huge), reaches(1, 1, true));
    let endless = if packed {
        (0..5).map(|at| Stroke::Desc { at, addr: DATA, len: 1, flags: NEXT, link: 0 }).collect()
    } else {
        let desc = |at, link| Stroke::Desc { at, addr: DATA, len: 1, flags: NEXT, link };
        vec![desc(0, 1), desc(1, 0), Stroke::Offer { head: 0 }, Stroke::Show { jump: 0 }]
    };
    seed("endless", small, &[driver(endless), take.clone()], reaches(0, 0, true));
    if packed {
        // The driver makes slots available again that the device has in hand.
        let again = driver(vec![Stroke::Desc { at: 0, addr: DATA, len: 1, flags: 0, link: 9 }]);
        let lap = [one(0), one(1), one(2), one(3), one(4), take.clone(), again, take.clone()];
        seed("slots_in_hand", small, &lap, reaches(5, 1, false));
        let raw = driver(vec![Stroke::Desc { at: 0, addr: DATA, len: 1, flags: OWNER, link: 0 }]);
        seed("not_available", small, &[raw, take.clone()], reaches(0, 0, false));
    } else {
        let jump = driver(vec![Stroke::Show { jump: 9 }]);
        seed("index_jump", small, &[one(0), take.clone(), jump, take.clone()], reaches(1, 1, true));
        let outside = driver(vec![Stroke::Offer { head: 8 }, Stroke::Show { jump: 0 }]);
        seed("head_outside", small, &[one(0), outside, take.clone(), done.clone()], reaches(1, 1, true));
    }

    // The driver changes a word between two loads; the name tells after how many.
    for (name, after) in [("changed_0", 0), ("changed_1", 1), ("changed_2", 2), ("changed_4", 4)] {
        let change = driver(vec![Stroke::Surprise { after, flip: 1, value: 0x0001_0001_0000_0001 }]);
        let parts = [chain(1), change, take.clone(), done.clone(), chain(1), take.clone(), done.clone()];
        let expected = match (packed, after) {
            // The index, or its flags, step back and forth; chains in hand are seen again later.
            (true, 0 | 2) => reaches(3, 3, false),
            (true, 4) => reaches(0, 0, true),
            _ => reaches(2, 3, false),
        };
        seed(name, small, &parts, expected);
    }
    seeds
}

fn drivers(packed: bool) -> Vec<Seed> {
    use driver::Step;
    let target = if packed { "packed_driver" } else { "split_driver" };
    let mut seeds = Vec::new();
    let mut seed = |name, flags: u8, size: Size, parts: &[Vec<Step>], reaches| {
        let bytes = script(setup(packed, flags, size), &parts.concat());
        seeds.push(Seed { target, name, bytes, reaches });
    };
    let add = |readable, writable| vec![Step::Add { readable, writable, len: 64 }];
    let publish = vec![Step::Publish {}];
    let answer = |skip| vec![Step::Answer { skip, len: 5 }];
    let show = vec![Step::Show { jump: 0 }];
    let collect = vec![Step::Collect { max: 8 }];
    let back = [show.clone(), collect.clone()].concat();

    let lap = [add(1, 0), publish.clone(), answer(0), back.clone()].concat();
    seed("one_entry", F_EVENT, Size::One, &vec![lap; 5], reaches(5, 1, false));
    let two = [add(2, 1), add(1, 0), publish.clone()].concat();
    let lap = [two.clone(), answer(0), answer(0), back.clone()].concat();
    for (name, flags) in [
        ("laps", 0),
        ("laps_in_order", F_IN_ORDER),
        ("laps_tables", F_INDIRECT | TABLES),
        ("laps_all", F_INDIRECT | TABLES | F_EVENT | F_IN_ORDER),
    ] {
        seed(name, flags, Size::Small, &vec![lap.clone(); 6], reaches(12, 3, false));
    }
    let batch = [add(1, 0), add(0, 1), add(1, 0), publish.clone(), answer(2), back.clone()].concat();
    seed("in_order_batch", F_IN_ORDER, Size::Small, &vec![batch; 4], reaches(12, 1, false));
    let parts =
        [add(9, 0), add(0, 0), add(5, 0), add(3, 0), add(1, 0), publish.clone(), answer(0), back.clone()];
    seed("full", 0, Size::Small, &parts, reaches(1, 5, false));
    let asked = [
        vec![Step::Enable {}],
        two.clone(),
        vec![Step::EnableDelayed {}],
        answer(0),
        show.clone(),
        vec![Step::Look {}, Step::Enable {}],
        collect.clone(),
        vec![Step::Disable {}, Step::Show { jump: 2 }],
        add(1, 0),
        publish.clone(),
    ];
    for (name, flags) in [("signals", 0), ("signals_event_idx", F_EVENT)] {
        // In a split ring the index published last is a lie.
        seed(name, flags, Size::Small, &asked, reaches(1, 3, false));
    }
    let claim = |id, slots| vec![Step::Claim { id, len: 5, slots }];
    for (name, id) in [("id_outside", 0x1_0008), ("id_not_out", 4)] {
        seed(name, 0, Size::Small, &[two.clone(), claim(id, 1), back.clone(), back.clone()], {
            // Ids of a packed ring have 16 bits.
            reaches(0, 0, true)
        });
    }
    let twice = [add(1, 0), add(1, 0), publish.clone(), claim(0, 1), claim(0, 1), back.clone()];
    seed("id_twice", 0, Size::Small, &twice, reaches(1, 1, true));
    let early = [add(1, 0), publish.clone(), answer(0), answer(0), back.clone()];
    // The driver of a packed ring does not read slots that it has not published.
    seed("early", 0, Size::Small, &early, if packed { reaches(1, 1, false) } else { reaches(0, 0, true) });
    for (name, after) in [("changed_0", 0), ("changed_1", 1), ("changed_2", 2)] {
        let change = vec![Step::Surprise { after, flip: 1, value: 3 }];
        let parts = [two.clone(), answer(0), answer(0), show.clone(), change, collect.clone()];
        let expected = match (packed, after) {
            (false, 0) => reaches(1, 3, false),
            (false, 1) => reaches(1, 1, true),
            _ => reaches(2, 3, false),
        };
        seed(name, 0, Size::Small, &parts, expected);
    }
    seeds
}

/// Returns the strokes that write a virtual header: checksum wanted, segments of TCP over IPv4.
fn gso_header(at: u32) -> [Stroke; 2] {
    // The fields are flags, gso_type, hdr_len, gso_size, csum_start; then csum_offset, num_buffers.
    let first = u64::from_le_bytes([1, 1, 54, 0, 0xa8, 5, 34, 0]);
    [Stroke::Write { at, value: first }, Stroke::Write { at: at + 8, value: 16 }]
}

/// Returns the strokes that make a frame of 1501 bytes behind such a header TCP over IPv4.
fn tcp_frame(at: u32) -> [Stroke; 3] {
    // The parts are: EtherType, version, length; no fragment, protocol; length of the TCP header, ACK.
    let parts = [
        (12, [8, 0, 0x45, 0, 5, 0xcf, 0, 0]),
        (20, [0x40, 0, 64, 6, 0, 0, 10, 0]),
        (44, [0, 0, 0x50, 0x10, 0, 0, 0, 0]),
    ];
    parts.map(|(offset, bytes)| Stroke::Write { at: at + offset, value: u64::from_le_bytes(bytes) })
}

fn transmitqs() -> Vec<Seed> {
    let mut seeds = Vec::new();
    for packed in [false, true] {
        let mut seed = |name, flags: u8, strokes: &[Vec<Stroke>], chains, frames, broken| {
            let flags = flags | if packed { PACKED } else { 0 };
            let mut steps: Vec<_> =
                strokes.concat().into_iter().map(|stroke| TransmitStep::Driver { stroke }).collect();
            steps.extend([
                TransmitStep::Poll { max: 32 },
                TransmitStep::Enable {},
                TransmitStep::Poll { max: 1 },
            ]);
            let bytes = script(setup(packed, flags, Size::Small), &steps);
            let reaches = Reached { chains, longest: 0, frames, broken };
            seeds.push(Seed { target: "net_transmitq", name, bytes, reaches });
        };
        let fill = vec![Stroke::Fill { at: DATA + 12, len: 0x4000, seed: 7 }];
        let layout = |split, packed_name| if packed { packed_name } else { split };
        let plain = |at, len| offer(packed, at, &[(DATA, len, 0)]);
        let frames = [fill.clone(), plain(0, 12 + 60), plain(1, 12 + 1514)];
        seed(layout("split_plain", "packed_plain"), 0, &frames, 2, 2, false);
        let cut = offer(packed, 0, &[(DATA, 5, 0), (DATA + 5, 0, 0), (DATA + 5, 8, 0), (DATA + 13, 1500, 0)]);
        let frames = [fill.clone(), gso_header(DATA).to_vec(), tcp_frame(DATA + 12).to_vec(), cut];
        seed(layout("split_cut_header_gso", "packed_cut_header_gso"), F_EVENT, &frames, 1, 1, false);
        let border = offer(packed, 0, &[(BORDER, 12 + 100, 0)]);
        seed(layout("split_border", "packed_border"), LEGACY, &[border], 1, 1, false);
        let rest = table_at(setup(packed, 0, Size::Small), packed);
        let list = table(0, &[(DATA, 12, 0), (DATA + 12, 1000, 0), (DATA + 2048, 60_000, 0)]);
        let large = offer(packed, 0, &[(rest, 48, INDIRECT)]);
        let frames = [fill.clone(), list, large];
        seed(layout("split_indirect", "packed_indirect"), F_INDIRECT, &frames, 1, 0, true);
        let list = table(0, &[(DATA, 12, 0), (DATA + 12, 1000, 0), (DATA + 2048, 30_000, 0)]);
        let frames = [fill.clone(), list, offer(packed, 0, &[(rest, 48, INDIRECT)])];
        let name = layout("split_indirect_large", "packed_indirect_large");
        seed(name, F_INDIRECT | F_IN_ORDER, &frames, 1, 1, false);
        let bad =
            [fill, plain(0, 72), plain(1, 20), plain(2, 70_000), offer(packed, 3, &[(NOWHERE, 100, 0)])];
        seed(layout("split_rejected", "packed_rejected"), F_IN_ORDER, &bad, 4, 1, true);
    }
    seeds
}

fn receiveqs() -> Vec<Seed> {
    let mut seeds = Vec::new();
    for packed in [false, true] {
        let mut seed =
            |name, flags: u8, strokes: &[Vec<Stroke>], steps: &[ReceiveStep], chains, frames, broken| {
                let flags = flags | if packed { PACKED } else { 0 };
                let mut all: Vec<_> =
                    strokes.concat().into_iter().map(|stroke| ReceiveStep::Driver { stroke }).collect();
                all.extend(steps);
                let bytes = script(setup(packed, flags, Size::Small), &all);
                let reaches = Reached { chains, longest: 0, frames, broken };
                seeds.push(Seed { target: "net_receiveq", name, bytes, reaches });
            };
        let layout = |split, packed_name| if packed { packed_name } else { split };
        let post = |at, len| offer(packed, at, &[(DATA + 0x1000 * u32::from(at), len, WRITE)]);
        let (deliver, flush) = (|len| ReceiveStep::Deliver { len }, ReceiveStep::Flush {});
        let expect = |frames| ReceiveStep::Expect { frames };
        let whole =
            [expect(2), deliver(60), deliver(1514), flush, ReceiveStep::Enable {}, deliver(60), flush];
        let two = [post(0, 1526), post(1, 1526)];
        seed(layout("split_plain", "packed_plain"), F_EVENT, &two, &whole, 2, 2, false);
        let many = [post(0, 600), post(1, 600), post(2, 600), post(3, 600)];
        let name = layout("split_merged", "packed_merged");
        seed(name, MERGEABLE, &many, &[expect(4), deliver(1514), deliver(60), flush], 2, 2, false);
        let name = layout("split_merged_in_order", "packed_merged_in_order");
        let steps = [expect(1), deliver(1000), deliver(2000), flush];
        seed(name, MERGEABLE | F_IN_ORDER, &many, &steps, 1, 1, false);
        let in_place = |len| ReceiveStep::InPlace { len };
        let steps = [expect(2), in_place(1000), flush, in_place(60), deliver(60), in_place(3000), flush];
        seed(layout("split_in_place", "packed_in_place"), MERGEABLE, &many, &steps, 3, 3, false);
        let endless = offer(packed, 1, &[(DATA, u32::MAX, WRITE), (DATA, 1, WRITE)]);
        let name = layout("split_in_place_broken", "packed_in_place_broken");
        let steps = [expect(2), in_place(500), deliver(60), flush];
        seed(name, MERGEABLE, &[post(0, 600), endless], &steps, 0, 0, true);
        let name = layout("split_too_small", "packed_too_small");
        seed(name, LEGACY, &many, &[deliver(1514), deliver(64), flush], 1, 1, false);
        let parts = [(BORDER, 100, WRITE), (DATA, 0, WRITE), (DATA, 2000, WRITE)];
        let pieces = [offer(packed, 0, &parts), post(3, 600)];
        let steps = [deliver(1000), ReceiveStep::Echo { at: DATA, len: 200 }, flush];
        seed(layout("split_pieces_echo", "packed_pieces_echo"), 0, &pieces, &steps, 2, 2, false);
        let rest = table_at(setup(packed, 0, Size::Small), packed);
        let list = [
            table(0, &[(DATA, 12, WRITE), (DATA + 64, 2000, WRITE)]),
            offer(packed, 0, &[(rest, 32, INDIRECT)]),
        ];
        seed(
            layout("split_indirect", "packed_indirect"),
            F_INDIRECT,
            &list,
            &[deliver(900), flush],
            1,
            1,
            false,
        );
        let name = layout("split_nowhere", "packed_nowhere");
        let bad = [post(0, 600), offer(packed, 1, &[(DATA, 30, WRITE), (NOWHERE, 600, WRITE)])];
        seed(name, 0, &bad, &[expect(2), deliver(60), deliver(60), flush, deliver(60)], 1, 1, true);
        let name = layout("split_readable", "packed_readable");
        let bad = [offer(packed, 0, &[(DATA, 600, 0)])];
        seed(name, 0, &bad, &[deliver(60), flush], 0, 0, true);
    }
    seeds
}

fn sessions() -> Vec<Seed> {
    let mut seeds = Vec::new();
    let mut seed = |name, parts: &[Vec<Message>], messages, rings| {
        let mut bytes = Vec::new();
        parts.concat().iter().for_each(|message| message.put(&mut bytes));
        let reaches = Reached { chains: messages, longest: rings, ..Reached::default() };
        seeds.push(Seed { target: "vhost_user_session", name, bytes, reaches });
    };
    let state = |request, num| vec![message(request, VringState { index: 0, num }.as_bytes(), &[])];
    let word = |request, word: u64| vec![message(request, word.as_bytes(), &[])];
    let empty = |request| vec![message(request, &[], &[])];
    for (name, packed) in [("split", false), ("packed", true)] {
        seed(name, &[session::set_up(packed)], 12, 1);
    }
    let both = [session::set_up(false), session::start(1, 0), state(Request::GetVringBase, 0)];
    seed("second_ring_first_stopped", &both, 19, 1);
    let slots = [
        session::set_up(false),
        vec![session::slot(Request::AddMemReg, session::MEMORY), session::slot(Request::RemMemReg, 0)],
        vec![session::slot(Request::AddMemReg, 0)],
    ];
    seed("memory_slots", &slots, 15, 1);
    let get = InflightDescription { num_queues: 2, queue_size: 16, ..InflightDescription::default() };
    let set = InflightDescription { mmap_size: 0x1000, ..get };
    let inflight = [
        session::set_up(true),
        vec![message(Request::GetInflightFd, get.as_bytes(), &[])],
        state(Request::GetVringBase, 0),
        vec![message(Request::SetInflightFd, set.as_bytes(), &[MEMORY_FILE])],
        session::start(0, 0x8003_8003),
    ];
    seed("inflight", &inflight, 21, 1);
    let reset = [
        session::set_up(false),
        word(Request::SetStatus, 15),
        empty(Request::GetStatus),
        empty(Request::GetQueueNum),
        empty(Request::GetMaxMemSlots),
        word(Request::SendRarp, 0x0102_0304_0506),
        word(Request::SetStatus, 0),
        empty(Request::ResetDevice),
        session::start(0, 0),
    ];
    // The reset has cleared the features, and without them no ring starts.
    seed("status_reset_again", &reset, 25, 0);
    let migrations = [
        session::set_up(false),
        session::log(Some(16)),
        session::log(None),
        session::log(Some(8)),
        state(Request::GetVringBase, 0),
        session::start(0, 0),
    ];
    seed("migration_cancelled_and_done", &migrations, 27, 1);
    // It cannot be mapped, so the ring is held; and in the second, started anew, until the log comes.
    seed("migration_without_a_log", &[session::set_up(false), session::log(Some(u64::MAX))], 15, 0);
    let late = [
        session::set_up(false),
        session::log(Some(16)),
        state(Request::GetVringBase, 0),
        session::log(Some(16))[1..].to_vec(),
        word(Request::SetVringKick, 1 << 8),
    ];
    seed("migration_log_comes_late", &late, 19, 0);
    // Before each message another process takes over, while rings of either layout start, and while one is logged.
    let handed = |messages: Vec<Message>| -> Vec<Message> {
        messages.into_iter().map(|message| Message { flags: message.flags | 1 << 6, ..message }).collect()
    };
    for (name, packed) in [("handed_over_split", false), ("handed_over_packed", true)] {
        let parts =
            [handed(session::set_up(packed)), handed(session::start(1, u32::from(packed) * 0x8000_8000))];
        seed(name, &parts, 18, 2);
    }
    let logged =
        [session::set_up(false), handed(session::log(Some(16))), handed(empty(Request::GetQueueNum))];
    seed("handed_over_with_log", &logged, 16, 1);
    // The faults are: descriptors where none belong, a pipe for memory, a kick that is no event, more
    // promised than sent.
    let pipe = 2;
    let wrong = vec![
        message(Request::GetFeatures, &[], &[EVENT, MEMORY_FILE, pipe]),
        message(Request::SetVringKick, 1u64.as_bytes(), &[pipe]),
        Message { flags: 2, ..message(Request::SetFeatures, &[0; 7], &[EVENT]) },
        Message { flags: 1 << 4, ..message(Request::SetFeatures, &[0], &[MEMORY_FILE]) },
    ];
    // The last seed leaves the stream in the middle of a message: the session ends, its ring stopped.
    seed("wrong_descriptors", &[session::set_up(false), wrong], 12, 0);
    seed("another_version", &[vec![Message { flags: 8, ..message(Request::GetFeatures, &[], &[]) }]], 0, 0);
    seeds
}
