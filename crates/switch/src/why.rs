//! `ringferry ctl why PORT [PEER]`: finds out why a port carries nothing, loses packets or is slow, from its state and from what was counted lately.
//!
//! A *situation* is something that can be wrong, with a stable name. Each file looks for those of one kind and says what it finds in whole sentences; the worst comes
//! first. Nothing is measured for the question: [`Snapshot`] has it all, with the [rates](crate::series) of the last minute.
//!
//! | file | situations |
//! |---|---|
//! | `states` | ports that carry nothing: not connected, down, broken, taken down, drained |
//! | `losses` | drops, each by its reason |
//! | `load` | rings, rates, work in software, workers |
//! | `ways` | what keeps two ports apart, or makes the way between them dear |

mod load;
mod losses;
mod states;
mod ways;

#[cfg(test)]
mod tests;

use std::time::Duration;

use ringferry_control::snapshot::{PortSnapshot, Rates, Snapshot};
use ringferry_control::trace::{Trace, TraceRequest};
use ringferry_control::why::{Diagnosis, Effect, Finding};

use crate::rules::Rules;

/// The window in seconds in which most things are looked for: the shortest that tells more than a moment.
const WINDOW: u64 = 10;

/// What is known of the switch.
pub(crate) struct Known<'s> {
    /// Its state, with addresses and rates.
    pub(crate) snapshot: &'s Snapshot,
    /// The rules of each port.
    pub(crate) rules: &'s dyn Fn(&str) -> Rules,
    /// Returns true for a port that is being drained.
    pub(crate) is_drained: &'s dyn Fn(&str) -> bool,
    /// Returns the time since a port was opened anew, if what it stands for had been deleted.
    pub(crate) renewed: &'s dyn Fn(&str) -> Option<Duration>,
    /// Finds out what would become of a frame.
    pub(crate) trace: &'s dyn Fn(&TraceRequest) -> Result<Trace, String>,
}

/// Collects findings.
#[derive(Default)]
struct Findings {
    found: Vec<Finding>,
    /// The port that is being looked at.
    port: Option<String>,
}

impl Findings {
    fn add(
        &mut self,
        situation: &str,
        effect: Effect,
        percent: f64,
        text: String,
        remedy: impl Into<String>,
    ) {
        let (situation, port, remedy) = (situation.to_owned(), self.port.clone(), remedy.into());
        let percent = percent.clamp(0.0, 100.0);
        self.found.push(Finding { situation, port, effect, percent, text, remedy });
    }
}

/// Finds out what is wrong with a port, or between two.
///
/// # Errors
/// There is no such port; the message lists the ports.
pub(crate) fn why(known: &Known<'_>, name: &str, peer: Option<&str>) -> Result<Diagnosis, String> {
    let port = find(known, name)?;
    let peer = peer.map(|peer| find(known, peer)).transpose()?;
    if peer.is_some_and(|peer| peer.name == name) {
        return Err(format!("{name:?} is one port: name another one as PEER"));
    }
    let mut findings = Findings::default();
    for port in [Some(port), peer].into_iter().flatten() {
        findings.port = Some(port.name.clone());
        states::look(known, port, &mut findings);
        losses::look(known, port, &mut findings);
        load::look(known, port, &mut findings);
    }
    findings.port = Some(name.to_owned());
    let ways = match peer {
        Some(peer) => ways::look(known, port, peer, &mut findings),
        None => {
            ways::look_at_all(known, port, &mut findings);
            Vec::new()
        }
    };
    findings.port = None;
    load::look_at_switch(known, &mut findings);
    let seconds = port.rates_over(WINDOW).map_or(0.0, |rates| rates.seconds);
    let (port, peer) = (name.to_owned(), peer.map(|peer| peer.name.clone()));
    let mut diagnosis = Diagnosis { port, peer, seconds, findings: findings.found, ways };
    diagnosis.sort();
    Ok(diagnosis)
}

fn find<'s>(known: &Known<'s>, name: &str) -> Result<&'s PortSnapshot, String> {
    crate::channels::find(known.snapshot, name)
}

/// The rates of the last ten seconds, or none.
fn recent(port: &PortSnapshot) -> Option<&Rates> {
    port.rates_over(WINDOW)
}

/// A number for a sentence.
fn count(number: f64) -> String {
    let text = ringferry_control::text::short_rate(number);
    match text.split_once('.') {
        _ if number > 0.0 && number < 0.1 => "less than 0.1".to_owned(),
        // 9.99 and 10 are the same to a reader.
        Some((whole, digits)) if digits.bytes().all(|digit| digit == b'0') => whole.to_owned(),
        _ => text,
    }
}

/// A number of times for a sentence.
fn times(number: u64) -> String {
    match number {
        1 => "once".to_owned(),
        2 => "twice".to_owned(),
        number => format!("{number} times"),
    }
}

/// A share for a sentence.
fn percent(share: f64) -> String {
    match share {
        small if small > 0.0 && small < 0.1 => "less than 0.1 %".to_owned(),
        small if small < 10.0 => format!("{small:.1} %"),
        share => format!("{share:.0} %"),
    }
}
