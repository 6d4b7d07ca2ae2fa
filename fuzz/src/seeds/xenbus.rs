//! Scenarios for the hand-shakes of Xen's network interface.

use super::Seed;
use crate::ring::Reached;
use crate::script::Field;
use crate::xenbus::{KEYS, Step, VALUES};

/// Halves under test: a back end that offers everything, or a front end that wants it.
const BACK: u8 = 0b11_1110;
const FRONT: u8 = 0b01_1111;

fn key(name: &str) -> u8 {
    KEYS.iter().position(|key| *key == name).expect("a key") as u8
}

fn value(text: &str) -> u8 {
    VALUES.iter().position(|value| *value == text).expect("a value") as u8
}

fn front(name: &str, text: &str) -> Step {
    Step::Front { key: key(name), value: value(text) }
}

fn back(name: &str, text: &str) -> Step {
    Step::Back { key: key(name), value: value(text) }
}

const LOOK: Step = Step::Look {};

pub(super) fn seeds() -> Vec<Seed> {
    let mut seeds = Vec::new();
    // The result counts connections, errors and refusals, disconnections, and whether an interface was
    // removed.
    let mut seed = |name, side: u8, steps: &[Step], [chains, longest, frames]: [usize; 3], broken| {
        let mut bytes = vec![side];
        steps.iter().for_each(|step| step.put(&mut bytes));
        seeds.push(Seed {
            target: "xenbus",
            name,
            bytes,
            reaches: Reached { chains, longest, frames, broken },
        });
    };
    let announce = |queues, flags| Step::Announce { queues, flags };
    let close = [front("state", "5"), LOOK, front("state", "6"), LOOK];
    let mut there_and_back = vec![LOOK, announce(1, 0), LOOK];
    there_and_back.extend(close);
    there_and_back.extend([front("state", "1"), LOOK, announce(2, 5), LOOK]);
    seed("back_twice", BACK, &there_and_back, [2, 0, 1], false);
    let unplugged = [LOOK, announce(3, 1), LOOK, Step::Unplug {}, LOOK, front("state", "6"), LOOK];
    seed("back_unplugged", BACK, &unplugged, [1, 0, 1], true);
    let refused = [
        LOOK,
        announce(1, 2),
        LOOK,
        Step::Plug {},
        LOOK,
        announce(0, 0),
        LOOK,
        Step::Plug {},
        LOOK,
        announce(1, 0),
        Step::Front { key: key("tx-ring-ref"), value: value("65536") },
        LOOK,
    ];
    seed("back_refuses", BACK, &refused, [0, 3, 0], false);
    let faults = [
        LOOK,
        Step::Fail { op: 0, after: 1 },
        announce(2, 0),
        LOOK,
        Step::Plug {},
        Step::Fail { op: 1, after: 2 },
        announce(2, 1),
        LOOK,
    ];
    seed("back_faults", BACK, &faults, [0, 2, 0], false);
    let hidden = [LOOK, announce(1, 0), LOOK, Step::Hide { hidden: 1 }, LOOK, Step::Hide { hidden: 0 }, LOOK];
    seed("back_hidden", BACK, &hidden, [1, 0, 1], false);
    let elsewhere = [
        back("frontend", "/local/domain/7/device/vif/0"),
        LOOK,
        back("frontend", "/local/domain/5/../2"),
        LOOK,
        Step::Remote {},
        LOOK,
    ];
    seed("back_elsewhere", BACK, &elsewhere, [0, 0, 0], false);
    let restarted = [LOOK, announce(2, 4), LOOK, Step::Restart {}, LOOK, Step::Reject {}, LOOK];
    seed("back_restarted", BACK, &restarted, [2, 0, 0], false);

    let offer = [back("feature-rx-copy", "1"), back("multi-queue-max-queues", "2"), back("state", "2"), LOOK];
    let mut served = vec![LOOK];
    served.extend(offer);
    served.extend([back("state", "4"), LOOK, back("state", "5"), LOOK, back("state", "6"), LOOK]);
    served.extend([back("state", "1"), LOOK]);
    served.extend(offer);
    served.extend([back("state", "4"), LOOK, Step::Close {}, LOOK, back("state", "6"), LOOK]);
    seed("front_twice", FRONT, &served, [2, 0, 2], false);
    let mut gone = vec![LOOK];
    gone.extend(offer);
    gone.extend([back("feature-ctrl-ring", "1"), back("state", "4"), LOOK, Step::Remote {}, LOOK]);
    seed("front_removed", FRONT, &gone, [1, 0, 1], false);
    let mut wrong = vec![LOOK, back("state", "2"), LOOK];
    wrong.extend([back("feature-rx-copy", "1"), Step::Fail { op: 2, after: 0 }, back("state", "2"), LOOK]);
    wrong.extend([front("backend", "/local/domain/7/device/vif/0"), LOOK]);
    seed("front_errors", FRONT, &wrong, [0, 3, 0], false);
    seeds
}
