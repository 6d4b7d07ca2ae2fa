//! Inclusive counts of functions, from what callgrind writes.

use std::collections::{BTreeMap, HashMap};

/// The events that are asked for: instructions, conditional branches, indirect ones.
const EVENTS: [&str; 3] = ["Ir", "Bc", "Bi"];

/// The cost of the calls of a function, with all that they called.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Cost {
    pub calls: u64,
    pub instructions: u64,
    pub branches: u64,
}

/// Sums up the calls of each of `functions`, which are found by the last part of their names. `None` if the text is no output of callgrind.
///
/// A call is three lines: `cfn=(ID) NAME`, where the name stands only the first time, `calls=N POSITION`, and the position with the counts
/// of the call, those that are zero at the end left out.
pub(super) fn inclusive<'a>(text: &str, functions: &[&'a str]) -> Option<BTreeMap<&'a str, Cost>> {
    let line = text.lines().find_map(|line| line.strip_prefix("events:"))?;
    let named: Vec<&str> = line.split_whitespace().collect();
    let [instructions, conditional, indirect] =
        EVENTS.map(|event| named.iter().position(|name| *name == event));
    let (instructions, conditional, indirect) = (instructions?, conditional?, indirect?);
    let (mut names, mut costs) = (HashMap::new(), BTreeMap::new());
    let mut lines = text.lines();
    let mut called = None;
    while let Some(line) = lines.next() {
        if let Some(function) = line.strip_prefix("fn=") {
            learn(&mut names, function);
        } else if let Some(function) = line.strip_prefix("cfn=") {
            let name = learn(&mut names, function);
            called = functions.iter().find(|wanted| name.is_some_and(|name| is_named(name, wanted))).copied();
        } else if let Some(calls) = line.strip_prefix("calls=") {
            let calls: u64 = calls.split_whitespace().next()?.parse().ok()?;
            let counts = lines.next()?;
            let Some(function) = called.take() else { continue };
            let count = |at: usize| {
                counts.split_whitespace().nth(1 + at).and_then(|word| word.parse::<u64>().ok()).unwrap_or(0)
            };
            let cost: &mut Cost = costs.entry(function).or_default();
            cost.calls += calls;
            cost.instructions += count(instructions);
            cost.branches += count(conditional) + count(indirect);
        }
    }
    Some(costs)
}

/// Returns the name of `(ID) NAME` or `(ID)`, and remembers it.
fn learn<'a, 't>(names: &'a mut HashMap<&'t str, &'t str>, function: &'t str) -> Option<&'a str> {
    let (id, name) = function.split_once(')').unwrap_or((function, ""));
    if !name.trim().is_empty() {
        names.insert(id, name.trim());
    }
    names.get(id).copied()
}

/// Returns true if a path such as `lab::costs::poll` names that function. Behind it may be a hash of the compiler's.
fn is_named(path: &str, function: &str) -> bool {
    path.split("::").any(|part| part == function)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "version: 1\npositions: line\nevents: Ir Bc Bcm Bi Bim\n\nfl=(1) a.rs\nfn=(1) lab::main\n1 10\n\
        cfn=(2) lab::stages::poll\ncalls=3 5\n+2 300 40 1 2\ncfn=(3) lab::stages::pollute\ncalls=1 5\n* 7000 1\n\n\
        fn=(3)\n5 1\ncfn=(2)\ncalls=1 5\n6 100 10\n\nfn=(2)\n5 77 5\ncfi=(1)\ncfn=(4) lab::stages::deliver::h0123\ncalls=1 9\n7 50\n";

    #[test]
    fn calls_are_summed_up_over_all_callers() {
        let costs = inclusive(TEXT, &["poll", "deliver", "absent"]).unwrap();
        assert_eq!(costs.get("poll"), Some(&Cost { calls: 4, instructions: 400, branches: 52 }));
        assert_eq!(costs.get("deliver"), Some(&Cost { calls: 1, instructions: 50, branches: 0 }));
        assert_eq!(costs.len(), 2, "pollute is another function, and nobody called absent: {costs:?}");
    }

    #[test]
    fn other_texts_are_none_of_callgrinds() {
        assert_eq!(inclusive("", &["poll"]), None);
        assert_eq!(inclusive("events: Ir\n", &["poll"]), None, "branches were not asked for");
        assert_eq!(inclusive(&TEXT[..TEXT.len() - 5], &["poll"]), None, "it ends in a call");
    }
}
