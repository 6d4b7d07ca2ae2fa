//! Scenarios for differences between configurations.

use super::Seed;
use crate::reload::Step;
use crate::ring::Reached;
use crate::script::Field;

pub(super) fn seeds() -> Vec<Seed> {
    let port = |number, kind| Step::Port { number, kind };
    let line = |line| Step::Line { line };
    let all = [
        ("same", vec![port(0, 0), Step::Next {}, port(0, 0), Step::Compare {}], (1, 0)),
        (
            "each",
            vec![
                port(0, 0),
                port(1, 2),
                port(2, 3),
                Step::Next {},
                port(3, 0),
                port(2, 3),
                line(17),
                port(1, 2),
                line(19),
                Step::Compare {},
            ],
            (1, 4),
        ),
        // A guest goes over to another socket, and a tap gets settings of its interface.
        (
            "moves",
            vec![
                port(0, 0),
                port(1, 2),
                Step::Next {},
                port(0, 1),
                port(1, 2),
                line(13),
                line(14),
                line(0),
                Step::Compare {},
            ],
            (1, 2),
        ),
        ("wrong", vec![port(0, 0), line(12), Step::Next {}, port(0, 0), Step::Compare {}], (0, 0)),
    ];
    let seed = |(name, steps, (chains, longest)): (&'static str, Vec<Step>, (usize, usize))| {
        let mut bytes = Vec::new();
        steps.iter().for_each(|step| step.put(&mut bytes));
        Seed {
            target: "config_changes",
            name,
            bytes,
            reaches: Reached { chains, longest, ..Reached::default() },
        }
    };
    all.map(seed).into()
}
