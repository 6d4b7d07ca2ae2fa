//! Why a port is slow, loses packets or carries none: the answer to `ringferry ctl why`.

use std::fmt::Write as _;

use serde::{Deserialize, Serialize};

use crate::explain::Way;

/// What was found at a port, the most important first.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Diagnosis {
    /// The port.
    pub port: String,
    /// The other end, if the question was about one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer: Option<String>,
    /// The seconds over which rates were measured; 0 in a switch that was just started.
    pub seconds: f64,
    /// What was found.
    pub findings: Vec<Finding>,
    /// What becomes of packets in both directions between the two ports, if the question was about two.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ways: Vec<Way>,
}

/// One thing that was found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Finding {
    /// A stable name for it, in kebab case.
    pub situation: String,
    /// The port that it was found at; none for what all ports share.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<String>,
    /// What it does to packets.
    pub effect: Effect,
    /// How much of the traffic or time it concerns, 0 to 100, as far as that was measured. Among findings of one effect larger ones come first.
    pub percent: f64,
    /// What was found, in whole sentences.
    pub text: String,
    /// What to do about it.
    pub remedy: String,
}

/// What a [`Finding`] does to packets, the worst first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Effect {
    /// None pass.
    Stops,
    /// Some are lost.
    Loses,
    /// They cost or wait more than they need to.
    Slows,
    /// It may explain what somebody sees.
    Notes,
}

impl Effect {
    /// For people.
    const fn words(self) -> &'static str {
        match self {
            Effect::Stops => "nothing passes",
            Effect::Loses => "packets are lost",
            Effect::Slows => "slower than need be",
            Effect::Notes => "to be known",
        }
    }
}

impl Diagnosis {
    /// Puts the most important finding first.
    pub fn sort(&mut self) {
        self.findings
            .sort_by(|one, other| one.effect.cmp(&other.effect).then(other.percent.total_cmp(&one.percent)));
    }

    /// For people.
    pub fn to_text(&self) -> String {
        let about = match &self.peer {
            Some(peer) => format!("{} and {peer}", self.port),
            None => self.port.clone(),
        };
        let mut text = if self.seconds > 0.0 {
            format!("{about}, measured over the last {:.0} s\n", self.seconds)
        } else {
            format!("{about}, of which nothing was measured yet: ask again in a second\n")
        };
        if self.findings.is_empty() {
            text += "\nNothing was found that stops, drops or slows down its packets. If it is slow all the same, measure between the two ends: \
                     `ringferry traffic --help`.\n";
        }
        for (number, finding) in (1..).zip(&self.findings) {
            // Writing to a string cannot fail.
            let _ = writeln!(text, "\n{number}. {} [{}]", finding.text, finding.effect.words());
            if !finding.remedy.is_empty() {
                let _ = writeln!(text, "   What to do: {}", finding.remedy);
            }
        }
        for way in &self.ways {
            text += &way.to_text();
        }
        text
    }
}

/// Describes what was found at all ports, for people: the worst of each where packets are stopped, lost or slow, and how many others there are.
pub fn all_to_text(all: &[Diagnosis]) -> String {
    let seconds = all.iter().map(|of| of.seconds).fold(0.0, f64::max);
    let mut text = format!("{} ports, measured over the last {seconds:.0} s\n", all.len());
    // What all ports share is said once.
    let shared = all.first().into_iter().flat_map(|of| &of.findings).filter(|found| found.port.is_none());
    for finding in shared {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "\n{} [{}]", finding.text, finding.effect.words());
    }
    // A port that serves nobody else stops nothing yet.
    let is_bad = |found: &&Finding| {
        found.port.is_some() && (found.effect != Effect::Notes || found.situation == OUT_OF_SERVICE)
    };
    let (mut waiting, mut listed) = (Vec::new(), Vec::new());
    for of in all {
        let mut bad = of.findings.iter().filter(is_bad);
        match bad.next() {
            None => {}
            Some(first) if first.situation == NOT_CONNECTED => waiting.push(&*of.port),
            Some(first) => listed.push((first, &*of.port, bad.count())),
        }
    }
    listed.sort_by(|(one, ..), (other, ..)| {
        one.effect.cmp(&other.effect).then(other.percent.total_cmp(&one.percent))
    });
    for (finding, port, more) in &listed {
        let more = if *more > 0 { format!(", and {more} more") } else { String::new() };
        let _ = writeln!(text, "\n{port}: {} [{}]{more}", finding.text, finding.effect.words());
    }
    let well = all.len() - listed.len() - waiting.len();
    let nothing = "Nothing that stops, drops or slows down packets was found";
    let _ = match well {
        0 if listed.is_empty() || !waiting.is_empty() => writeln!(text),
        0 => Ok(()),
        1 => writeln!(text, "\n{nothing} at 1 port."),
        _ => writeln!(text, "\n{nothing} at {well} ports."),
    };
    if !waiting.is_empty() {
        let named = if waiting.len() <= FEW { format!(": {}", waiting.join(", ")) } else { String::new() };
        let wait = if waiting.len() == 1 { "waits for its guest" } else { "wait for their guests" };
        let _ = writeln!(text, "{} {wait}{named}.", waiting.len());
    }
    if !listed.is_empty() {
        text += "`ringferry ctl why PORT` says more of one, and what to do.\n";
    }
    text
}

/// Most ports that are named though nothing is wrong with them.
const FEW: usize = 8;

/// The situation of a port that serves nobody, or nobody else.
pub const OUT_OF_SERVICE: &str = "out-of-service";

/// The situation of a port whose guest has not been started.
pub const NOT_CONNECTED: &str = "not-connected";

#[cfg(test)]
mod tests {
    use super::*;

    fn finding(situation: &str, effect: Effect, percent: f64) -> Finding {
        let (text, remedy) = (format!("It is {situation}."), "Mend it.".to_owned());
        let (situation, port) = (situation.to_owned(), Some("vm0".to_owned()));
        Finding { situation, port, effect, percent, text, remedy }
    }

    #[test]
    fn the_worst_comes_first() {
        let mut diagnosis = Diagnosis {
            port: "vm0".to_owned(),
            seconds: 10.4,
            findings: vec![
                finding("odd", Effect::Notes, 100.0),
                finding("slow", Effect::Slows, 3.0),
                finding("slower", Effect::Slows, 90.0),
                finding("lossy", Effect::Loses, 1.0),
            ],
            ..Diagnosis::default()
        };
        diagnosis.sort();
        let expected = "\
vm0, measured over the last 10 s

1. It is lossy. [packets are lost]
   What to do: Mend it.

2. It is slower. [slower than need be]
   What to do: Mend it.

3. It is slow. [slower than need be]
   What to do: Mend it.

4. It is odd. [to be known]
   What to do: Mend it.
";
        assert_eq!(diagnosis.to_text(), expected);
        let json = serde_json::to_string(&diagnosis).unwrap();
        assert_eq!(serde_json::from_str::<Diagnosis>(&json).unwrap(), diagnosis);
    }

    #[test]
    fn of_all_ports_the_worst_come_first_and_those_that_are_well_are_counted() {
        let of = |port: &str, findings: Vec<Finding>| Diagnosis {
            port: port.to_owned(),
            seconds: 10.0,
            findings,
            ..Diagnosis::default()
        };
        let shared = || Finding { port: None, ..finding("troubled", Effect::Notes, 95.0) };
        let all = [
            of("vm0", vec![shared(), finding("odd", Effect::Notes, 1.0)]),
            of(
                "vm1",
                vec![finding("lossy", Effect::Loses, 20.0), shared(), finding("slow", Effect::Slows, 3.0)],
            ),
            of(
                "vm2",
                vec![
                    finding(NOT_CONNECTED, Effect::Stops, 100.0),
                    shared(),
                    finding("slow", Effect::Slows, 3.0),
                ],
            ),
            of("vm3", vec![finding("stuck", Effect::Stops, 100.0), shared()]),
        ];
        let expected = "\
4 ports, measured over the last 10 s

It is troubled. [to be known]

vm3: It is stuck. [nothing passes]

vm1: It is lossy. [packets are lost], and 1 more

Nothing that stops, drops or slows down packets was found at 1 port.
1 waits for its guest: vm2.
`ringferry ctl why PORT` says more of one, and what to do.
";
        assert_eq!(all_to_text(&all), expected);
    }

    #[test]
    fn what_was_not_measured_is_said_to_be_so() {
        let text = Diagnosis { port: "vm0".to_owned(), ..Diagnosis::default() }.to_text();
        assert!(text.starts_with("vm0, of which nothing was measured yet"), "{text}");
        assert!(text.contains("Nothing was found that stops"), "{text}");
    }
}
