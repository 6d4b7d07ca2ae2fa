//! Scenarios for the control queue.

use super::{DATA, F_EVENT, F_IN_ORDER, F_INDIRECT, NOWHERE, Seed, Size, setup, table, table_at};
use crate::control::Step;
use crate::net::PACKED;
use crate::pen::{Stroke, offer};
use crate::ring::{INDIRECT, Reached, WRITE};
use crate::script::Field;

/// Numbers of commands, as in [`command`](crate::control::command).
const MAC_TABLE: u8 = 6;
const MAC: u8 = 7;
const VLAN: u8 = 8;
const ANNOUNCE: u8 = 9;
const PAIRS: u8 = 10;
const RSS: u8 = 11;
const HASH: u8 = 12;
const OFFLOADS: u8 = 13;
const COALESCE: u8 = 14;
const QUEUE: u8 = 15;

/// A device with five pairs, and all features.
const FIVE: [u8; 2] = [0, 2];
/// A device with five pairs and hardly any feature.
const FEW: [u8; 2] = [1, 2];

fn ask(kind: u8, few: u8, value: u64) -> Step {
    Step::Ask { at: 0, kind, few, value, cut: 0, room: 1 }
}

/// Returns the value of an RSS command: the last queue of its table, `max_tx`, types, and bytes of its key.
fn rss(last: u8, max_tx: u8, types: u8, key: u8) -> u64 {
    u64::from_le_bytes([last, 0, max_tx, 0, types, 0, key, 0])
}

/// Returns the step that writes one word, as it lies in memory.
fn write(at: u32, value: u64) -> Step {
    Step::Driver { stroke: Stroke::Write { at, value } }
}

pub(super) fn seeds() -> Vec<Seed> {
    let mut seeds = Vec::new();
    for packed in [false, true] {
        let layout = |split, packed_name| if packed { packed_name } else { split };
        let mut seed = |name, flags: u8, device: [u8; 2], steps: &[Step], chains, frames, broken| {
            let mut bytes = Vec::new();
            setup(packed, flags | if packed { PACKED } else { 0 }, Size::Small).put(&mut bytes);
            bytes.extend(device);
            steps.iter().for_each(|step| step.put(&mut bytes));
            let reaches = Reached { chains, longest: 0, frames, broken };
            seeds.push(Seed { target: "control_queue", name, bytes, reaches });
        };
        let driver = |strokes: Vec<Stroke>| -> Vec<Step> {
            strokes.into_iter().map(|stroke| Step::Driver { stroke }).collect()
        };
        let each = |steps: &[Step]| -> Vec<Step> {
            steps.iter().flat_map(|step| [*step, Step::Enable {}, Step::Poll {}]).collect()
        };
        let filters = [
            ask(0, 0, 1),
            ask(5, 0, 1),
            ask(MAC_TABLE, 65, 2),
            ask(MAC_TABLE, 3, 1 << 56 | 3),
            ask(MAC, 0, 2),
            ask(MAC, 0, 1),
            ask(VLAN, 1, 4095),
            ask(VLAN, 0, 4095),
            ask(VLAN, 1, 4096),
            Step::Announce {},
            ask(ANNOUNCE, 0, 0),
            ask(OFFLOADS, 0, 1 << 54 | 2),
            ask(OFFLOADS, 0, 1 << 63),
        ];
        seed(layout("split_filters", "packed_filters"), F_EVENT, FIVE, &each(&filters), 12, 9, false);
        seed(layout("split_not_negotiated", "packed_not_negotiated"), 0, FEW, &each(&filters), 12, 0, false);
        let steering = [
            ask(PAIRS, 0, 5),
            ask(PAIRS, 0, 0),
            ask(PAIRS, 0, 6),
            ask(RSS, 2, rss(3, 4, 0x3f, 40)),
            ask(RSS, 2, rss(5, 4, 0x3f, 40)),
            ask(RSS, 2, rss(3, 6, 0x3f, 40)),
            ask(RSS, 8, rss(3, 4, 0x3f, 40)),
            ask(RSS, 2, rss(3, 4, 0x3f, 41)),
            ask(RSS, 2, rss(3, 4, 0x3f, 0)),
            ask(RSS, 7, rss(1, 1, 0, 0)),
            ask(HASH, 40, u64::from(0x12u8) << 32),
            ask(HASH, 40, 1 << 38),
            ask(HASH, 0, 1 << 32),
        ];
        seed(layout("split_steering", "packed_steering"), 0, FIVE, &each(&steering), 13, 4, false);
        let query = |queue, room| Step::Ask { at: 1, kind: QUEUE, few: 0, value: queue, cut: 0, room };
        let coalescing = [
            ask(COALESCE, 0, 7 << 16),
            ask(COALESCE, 1, 8 << 16),
            ask(QUEUE, 1, 9 << 16 | 1),
            ask(QUEUE, 1, 9 << 16 | 2),
            query(1, 9),
            query(1, 255),
            query(1, 8),
            query(2, 9),
            ask(PAIRS, 0, 2),
            query(2, 9),
        ];
        seed(layout("split_coalescing", "packed_coalescing"), 0, FIVE, &each(&coalescing), 10, 7, false);
        // Several commands are served at once, cut anywhere, with a reset between them.
        let cut = |at, cut| Step::Ask { at, kind: PAIRS, few: 0, value: 3, cut, room: 1 };
        let burst = [cut(0, 1), cut(1, 0), Step::Poll {}, Step::Reset {}, cut(0, 0), Step::Poll {}];
        seed(layout("split_burst", "packed_burst"), F_IN_ORDER, FIVE, &burst, 3, 2, false);
        // A result in pieces, from an indirect table: the command, its answer in one byte, three and six.
        let rest = table_at(setup(packed, 0, Size::Small), packed);
        let pieces = [
            (DATA, 6, 0),
            (DATA + 64, 0, WRITE),
            (DATA + 65, 1, WRITE),
            (DATA + 80, 3, WRITE),
            (DATA + 90, 6, WRITE),
        ];
        let indirect = [
            vec![ask(COALESCE, 0, 7 << 16), Step::Poll {}, write(DATA, 0x0306)],
            driver(table(0, &pieces)),
            driver(offer(packed, 4, &[(rest, 16 * pieces.len() as u32, INDIRECT)])),
            vec![Step::Poll {}],
        ];
        let name = layout("split_result_in_pieces", "packed_result_in_pieces");
        seed(name, F_INDIRECT, FIVE, &indirect.concat(), 2, 2, false);
        // CVE-2014-0150: a table announces more addresses than there are bytes; then one is too long to be
        // read.
        let lists = [
            vec![write(DATA, 0xffff_ffff << 16 | 1)],
            driver(offer(packed, 0, &[(DATA, 18, 0), (DATA + 64, 1, WRITE)])),
            driver(offer(packed, 2, &[(DATA, 8193, 0), (DATA, 1, WRITE)])),
            vec![Step::Poll {}],
        ];
        seed(layout("split_lists", "packed_lists"), 0, FIVE, &lists.concat(), 2, 0, false);
        for (split, packed_name, buffers) in [
            ("split_no_answer", "packed_no_answer", vec![(DATA, 3, 0), (DATA, 0, WRITE)]),
            ("split_nowhere", "packed_nowhere", vec![(DATA, 3, 0), (NOWHERE, 1, WRITE)]),
            ("split_from_nowhere", "packed_from_nowhere", vec![(NOWHERE, 3, 0), (DATA, 1, WRITE)]),
            (
                "split_result_nowhere",
                "packed_result_nowhere",
                vec![(DATA, 6, 0), (DATA, 1, WRITE), (NOWHERE, 9, WRITE)],
            ),
        ] {
            let bad = [
                vec![ask(PAIRS, 0, 2), write(DATA, 0x0306)],
                driver(offer(packed, 4, &buffers)),
                vec![Step::Poll {}, ask(PAIRS, 0, 3), Step::Poll {}],
            ];
            seed(layout(split, packed_name), 0, FIVE, &bad.concat(), 1, 1, true);
        }
        // The ring changes between two loads.
        let surprise = driver(vec![Stroke::Surprise { after: 1, flip: 1, value: 0x100 }]);
        let parts = [vec![ask(PAIRS, 0, 2)], surprise, vec![Step::Poll {}, Step::Poll {}]];
        let broken = !packed;
        seed(layout("split_changed", "packed_changed"), 0, FIVE, &parts.concat(), 0, 0, broken);
    }
    seeds
}
