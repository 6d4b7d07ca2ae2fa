//! Scenarios for the Xen network front end.

use super::Seed;
use crate::netfront::Step;
use crate::ring::Reached;
use crate::script::Field;

/// Flags of a receive response (`NETRXF`).
const BLANK: u16 = 2;
const MORE: u16 = 4;
const EXTRA: u16 = 8;

fn fill(status: u16, flags: u16) -> Step {
    Step::Fill { offset: 0, status, flags, kind: 1 }
}

fn show(ring: u8) -> Step {
    Step::Show { ring, more: 0 }
}

fn extra(kind: u8, more: u8) -> Step {
    Step::Extra { kind, more, low: 1448, high: 1 }
}

const RECEIVE: Step = Step::Receive { max: 32 };
const REFILL: Step = Step::Refill {};

pub(super) fn seeds() -> Vec<Seed> {
    let mut seeds = Vec::new();
    let mut seed = |name, parts: &[Vec<Step>], chains, frames, broken| {
        let mut bytes = Vec::new();
        parts.concat().iter().for_each(|step| step.put(&mut bytes));
        let reaches = Reached { chains, longest: 32, frames, broken };
        seeds.push(Seed { target: "netfront", name, bytes, reaches });
    };
    let lap = vec![
        REFILL,
        fill(60, 0),
        fill(1514, 1),
        fill(4096, MORE),
        fill(4096, MORE),
        fill(100, 0),
        fill(3000, BLANK),
        fill(3000, BLANK | EXTRA | MORE),
        extra(4, 1),
        extra(1, 0),
        fill(500, 0),
        show(1),
        Step::Arm {},
        RECEIVE,
    ];
    seed("receive", &vec![lap.clone(); 8], 40, 40, false);
    let keep = vec![
        REFILL,
        fill(60, 0),
        fill(4096, MORE),
        fill(4096, 0),
        show(1),
        Step::Receive { max: 0x81 },
        RECEIVE,
    ];
    seed("receive_and_keep", &[keep.clone(), keep.clone(), vec![Step::Release {}], keep], 6, 6, false);
    let offsets = vec![
        REFILL,
        Step::Fill { offset: 2, status: 60, flags: 0, kind: 0 },
        Step::Fill { offset: 256, status: 3840, flags: MORE, kind: 0 },
        Step::Fill { offset: 4095, status: 1, flags: 0, kind: 0 },
        show(1),
        RECEIVE,
    ];
    seed("offsets", &vec![offsets; 2], 4, 4, false);
    let outside = vec![
        REFILL,
        Step::Fill { offset: 1, status: 4096, flags: 0, kind: 0 },
        Step::Fill { offset: 0xffff, status: 1, flags: 0, kind: 0 },
        fill(0x8000, 0),
        fill(0xffff, MORE),
        fill(100, 0),
        fill(13, 0),
        fill(0, MORE),
        fill(0, 0),
        // The packet does not have the payload that its header announces.
        Step::Fill { offset: 0, status: 100, flags: BLANK, kind: 0 },
        fill(60, 0),
        show(1),
        RECEIVE,
    ];
    seed("xsa_155_outside", &vec![outside; 2], 16, 2, false);
    for (name, slots, frames) in [
        ("receive_without_end", vec![fill(100, MORE); 20], 0),
        ("receive_incomplete", vec![fill(60, 0), fill(100, MORE)], 1),
        ("extra_missing", vec![fill(60, 0), fill(100, EXTRA)], 1),
        ("extra_twice", vec![fill(60, 0), fill(100, EXTRA), extra(1, 1), extra(1, 0)], 1),
        ("extra_unknown", vec![fill(60, 0), fill(100, EXTRA), extra(2, 0)], 1),
        ("extra_late", vec![fill(60, 0), fill(100, MORE), fill(100, EXTRA), extra(1, 0)], 1),
    ] {
        seed(name, &[vec![REFILL], slots, vec![show(1), RECEIVE, RECEIVE]], frames, frames, true);
    }
    let jump = |ring, more| {
        vec![REFILL, Step::Send { len: 60, kind: 0 }, Step::FlushSent {}, Step::Show { ring, more }]
    };
    seed("index_received", &[jump(1, 33), vec![RECEIVE]], 0, 0, true);
    // Two responses were seen and one taken: that there is one less is noticed when the front end looks again.
    let one = Step::Receive { max: 1 };
    let back = Step::Write { at: 4096 + 8, value: 1 };
    seed(
        "index_back",
        &[vec![REFILL, fill(60, 0), fill(1514, 0), show(1), one, back, one, RECEIVE]],
        2,
        2,
        true,
    );
    seed("index_sent", &[jump(0, 2), vec![Step::Reclaim {}]], 0, 0, true);
    let send = |kind| vec![Step::Send { len: 5000, kind }, Step::Send { len: 60, kind }, Step::FlushSent {}];
    let back = vec![Step::AnswerAll { count: 255 }, show(0), Step::Arm {}, Step::Reclaim {}];
    let sent = [send(0), back.clone(), send(1), back.clone(), send(2), back];
    seed("send", &vec![sent.concat(); 8], 0, 0, false);
    let answer = |id, status| vec![Step::Answer { id, status }, show(0), Step::Reclaim {}];
    seed("send_errors", &[send(0), answer(0, 0xffff), answer(1, 0xfffe), answer(2, 7)], 0, 0, false);
    for (name, answers) in [
        ("answer_outside", answer(700, 0)),
        ("answer_not_out", answer(100, 0)),
        ("answer_twice", [answer(0, 0), answer(0, 0)].concat()),
        ("answer_no_extra", answer(0, 1)),
    ] {
        seed(name, &[send(0), answers], 0, 0, true);
    }
    let reply = |status, data| vec![Step::Reply { id: 0, status, data }, show(2), Step::Look {}];
    let announce = vec![Step::Announce {}, Step::Look {}];
    let kept = [
        announce.clone(),
        reply(0, 600),
        reply(0, 0),
        reply(0, 9),
        reply(2, 0),
        announce.clone(),
        reply(0, u32::MAX),
    ];
    seed("statics", &kept, 0, 0, false);
    seed("statics_not_supported", &[announce.clone(), reply(1, 0), reply(0, 0)], 0, 0, true);
    let wrong = vec![Step::Reply { id: 1, status: 0, data: 9 }, show(2), Step::Look {}, Step::Announce {}];
    seed("statics_another_id", &[announce, wrong], 0, 0, true);
    seeds
}
