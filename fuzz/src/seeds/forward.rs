//! Scenarios for the switch between its ports.

use super::Seed;
use crate::forward::Step;
use crate::ring::Reached;
use crate::script::Field;

/// Four ports: a tap and a guest with all offloads, a guest with checksums alone, a guest with none.
const OPEN: [u8; 4] = [0xe8, 0xe0, 0x20, 0x00];
/// The same ports in VLANs: the tap is a trunk, two guests are in VLAN 5, isolated, and one is a trunk with
/// limits.
const VLANS: [u8; 4] = [0xeb, 0xe6, 0x26, 0x13];

const TCP: u8 = 2;
const V6: u8 = 1;
const TAG: u8 = 4;
const FINISHED: u8 = 8;

/// Returns a frame by which the switch learns the address of a port.
fn hello(from: u8, shape: u8) -> Step {
    Step::Flow { from, to: 255, shape: shape | FINISHED, parts: 0, len: 20, gso: 0, cut: 0 }
}

fn flow(from: u8, to: u8, shape: u8, parts: u8, len: u16, gso: u16) -> Step {
    Step::Flow { from, to, shape, parts, len, gso, cut: 70 }
}

pub(super) fn seeds() -> Vec<Seed> {
    let mut seeds = Vec::new();
    let mut seed = |name, ports: [u8; 4], steps: &[Step], [chains, frames, longest]: [usize; 3]| {
        let mut bytes = ports.to_vec();
        steps.iter().for_each(|step| step.put(&mut bytes));
        let reaches = Reached { chains, frames, longest, broken: false };
        seeds.push(Seed { target: "switch_forward", name, bytes, reaches });
    };
    let hellos = |shape| (0..4).map(move |port| hello(port, shape));

    let cut = [TCP, TCP | V6, 0, V6].map(|shape| (0..4).map(move |to| flow(1, to, shape, 0, 9000, 1448)));
    let steps: Vec<_> = hellos(TCP).chain(cut.into_iter().flatten()).collect();
    seed("frames-to-be-cut-reach-receivers-of-every-kind", OPEN, &steps, [20, 72, 9074]);

    let merged =
        [TCP, TCP | V6, 0].map(|shape| (0..3).map(move |to| flow(3, to, shape | FINISHED, 7, 1400, 0)));
    let steps: Vec<_> = hellos(TCP).chain(merged.into_iter().flatten()).collect();
    seed("packets-of-a-flow-become-one-frame", OPEN, &steps, [76, 49, 11_274]);

    let flood =
        [flow(1, 255, TCP, 2, 3000, 1000), flow(2, 255, 0, 2, 900, 0), flow(0, 255, V6 | TCP, 0, 9000, 900)];
    seed("a-flood-reaches-all", OPEN, &flood, [7, 50, 9074]);

    let tagged: Vec<_> =
        hellos(TCP | TAG).chain((0..4).map(|to| flow(3, to, TCP | TAG, 1, 4000, 1200))).collect();
    seed("tags-come-and-go-and-isolated-ports-stay-apart", VLANS, &tagged, [12, 18, 4058]);

    let room = [hello(3, TCP), Step::Room { port: 3, buffers: 2 }, flow(0, 3, TCP, 3, 9000, 1448)];
    seed("a-receiver-runs-out-of-buffers", OPEN, &room, [5, 5, 1502]);

    let large = [hello(1, TCP), flow(2, 1, TCP | FINISHED, 0, 9000, 0), Step::Wait { seconds: 200 }];
    seed("a-large-frame-passes", OPEN, &large, [2, 4, 9054]);

    let cut = flow(0, 255, TCP, 3, 15_000, 32);
    let shaped: Vec<_> = hellos(TCP)
        .chain((1..4).map(|port| Step::Limit { port, limits: 1 }))
        .chain((1..4).map(|port| Step::Renegotiate { port, offloads: 0 }))
        .chain([cut, Step::Pause { micros: 300 }, cut, Step::Wait { seconds: 1 }, cut])
        .chain([Step::Limit { port: 1, limits: 0x42 }, Step::Wait { seconds: 1 }])
        .collect();
    seed("frames-that-wait-for-tokens-are-cut-in-turns", OPEN, &shaped, [16, 16_896, 86]);

    let dear: Vec<_> = hellos(TCP)
        .chain([Step::Spread { port: 2, buffers: 200 }, flow(1, 2, TCP | FINISHED, 7, 60, 0)])
        .chain((0..8).map(|_| flow(1, 2, TCP | FINISHED, 7, 60, 0)))
        .collect();
    seed("a-receiver-whose-buffers-are-dear", OPEN, &dear, [76, 84, 114]);

    // The fields are flags, kind of segmentation, length of headers, size of segments; then where the
    // checksum begins and where it is.
    let forged = |first: [u8; 8], last: [u8; 4]| Step::Forge {
        from: 1,
        to: 255,
        shape: TCP,
        len: 3000,
        cut: 33,
        first: u64::from_le_bytes(first),
        last: u32::from_le_bytes(last),
    };
    let lies = [
        forged([1, 1, 0, 0, 0xff, 0xff, 34, 0], [16, 0, 0, 0]),
        forged([1, 4, 0, 0, 8, 0, 34, 0], [16, 0, 0, 0]),
        forged([1, 5, 0, 0, 200, 0, 34, 0], [16, 0, 0, 0]),
        forged([1, 0, 0, 0, 0, 0, 200, 0], [100, 0, 0, 0]),
        forged([2, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0]),
    ];
    // The queue refuses three of them.
    seed("headers-that-lie", OPEN, &lies, [2, 6, 3054]);
    seeds
}
