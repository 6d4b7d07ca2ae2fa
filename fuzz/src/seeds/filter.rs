//! Scenarios for filter programs.

use super::Seed;
use crate::filter::Step;
use crate::ring::Reached;
use crate::script::Field;

/// What libpcap makes of `tcp port 80` on Ethernet.
const TCP_PORT_80: [(u16, u8, u8, u32); 20] = [
    (40, 0, 0, 12),
    (21, 0, 6, 0x86dd),
    (48, 0, 0, 20),
    (21, 0, 15, 6),
    (40, 0, 0, 54),
    (21, 12, 0, 80),
    (40, 0, 0, 56),
    (21, 10, 11, 80),
    (21, 0, 10, 0x800),
    (48, 0, 0, 23),
    (21, 0, 8, 6),
    (40, 0, 0, 20),
    (69, 6, 0, 8191),
    (177, 0, 0, 14),
    (72, 0, 0, 14),
    (21, 2, 0, 80),
    (72, 0, 0, 16),
    (21, 0, 1, 80),
    (6, 0, 0, 262_144),
    (6, 0, 0, 0),
];

/// Each instruction that is not in the other, one after the other, with what they need to be executed.
const OTHERS: [(u16, u8, u8, u32); 34] = [
    (128, 0, 0, 0),
    (2, 0, 0, 15),
    (1, 0, 0, 2),
    (3, 0, 0, 0),
    (96, 0, 0, 15),
    (97, 0, 0, 0),
    (129, 0, 0, 0),
    (7, 0, 0, 0),
    (135, 0, 0, 0),
    (1, 0, 0, 2),
    (32, 0, 0, 4),
    (64, 0, 0, 4),
    (80, 0, 0, 4),
    (4, 0, 0, 7),
    (20, 0, 0, 1),
    (36, 0, 0, 3),
    (52, 0, 0, 2),
    (148, 0, 0, 1000),
    (68, 0, 0, 0xf0),
    (84, 0, 0, 0xff),
    (164, 0, 0, 1),
    (100, 0, 0, 3),
    (116, 0, 0, 1),
    (132, 0, 0, 0),
    (12, 0, 0, 0),
    (60, 0, 0, 0),
    (156, 0, 0, 0),
    (108, 0, 0, 0),
    (5, 0, 0, 0),
    (37, 0, 0, 5),
    (61, 0, 0, 0),
    (77, 0, 0, 0),
    (0, 0, 0, 1),
    (22, 0, 0, 0),
];

fn program(instructions: &[(u16, u8, u8, u32)]) -> Vec<Step> {
    instructions.iter().map(|&(code, jt, jf, k)| Step::Add { code, jt, jf, k }).collect()
}

pub(super) fn seeds() -> Vec<Seed> {
    let seed = |name, steps: &[Step], chains, longest, frames, broken| {
        let mut bytes = Vec::new();
        steps.iter().for_each(|step| step.put(&mut bytes));
        Seed { target: "capture_filter", name, bytes, reaches: Reached { chains, longest, frames, broken } }
    };
    let run = |first| Step::Run { first, second: first + 7 };
    // Ethernet, IPv4 without options, TCP from port 80.
    let tcp = [
        Step::Write { at: 12, value: 0x45_00_08 },
        Step::Write { at: 23, value: 6 },
        Step::Write { at: 34, value: 0x50_00 },
    ];
    let found = [program(&TCP_PORT_80), tcp.to_vec(), (0..70).map(run).collect()].concat();
    let cut = [program(&TCP_PORT_80), tcp.to_vec(), vec![Step::Resize { len: 35 }, run(14)]].concat();
    let others = [program(&OTHERS), vec![run(0), run(5)]].concat();
    let longest = [
        program(&[(0, 0, 0, 1)]),
        vec![Step::Repeat { count: 4094 }],
        program(&[(22, 0, 0, 0)]),
        vec![run(0)],
    ];
    let wrong: Vec<_> = [
        &[(5, 0, 0, 0)][..],
        &[(21, 0, 1, 0), (6, 0, 0, 1)],
        &[(2, 0, 0, 16), (6, 0, 0, 1)],
        &[(52, 0, 0, 0), (6, 0, 0, 1)],
        &[(100, 0, 0, 32), (6, 0, 0, 1)],
        &[(0xffff, 0, 0, 0), (6, 0, 0, 1)],
        &[(0, 0, 0, 1)],
    ]
    .into_iter()
    .flat_map(|wrong| [program(wrong), vec![run(0), Step::Clear {}]].concat())
    .collect();
    vec![
        seed("tcp-port", &found, 70, 20, 70, false),
        seed("cut", &cut, 1, 20, 0, false),
        seed("instructions", &others, 2, 34, 2, false),
        seed("longest", &longest.concat(), 1, 4096, 1, false),
        seed("wrong", &wrong, 0, 0, 0, true),
    ]
}
