//! The figures that sparklines are drawn from: the rates of each port at every screen so far, up to [`LONGEST`] of them.

use std::collections::{HashMap, VecDeque};

use ringferry_control::snapshot::Snapshot;

/// Screens that are remembered.
const LONGEST: usize = 240;
/// The window of the rates that are remembered, in seconds: that of a screen, unless it is asked for less often.
const WINDOW: u64 = 1;

/// The rates of a port at one screen.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sample {
    /// Bits per second that the switch received from the port.
    pub rx: f64,
    /// Bits per second that it sent to the port.
    pub tx: f64,
    /// Drops per second.
    pub drops: f64,
}

/// The samples of all ports that there are.
#[derive(Debug, Default)]
pub struct History(HashMap<String, VecDeque<Sample>>);

impl History {
    /// Adds a screen, and forgets ports that are no more.
    pub fn add(&mut self, snapshot: &Snapshot) {
        let mut before = std::mem::take(&mut self.0);
        for port in &snapshot.ports {
            let mut samples = before.remove(&port.name).unwrap_or_default();
            if samples.len() == LONGEST {
                samples.pop_front();
            }
            samples.push_back(port.rates_over(WINDOW).map_or_else(Sample::default, |rates| Sample {
                rx: rates.bits("rx_bytes"),
                tx: rates.bits("tx_bytes"),
                drops: rates.dropped(),
            }));
            self.0.insert(port.name.clone(), samples);
        }
    }

    /// The last samples of a port, the latest at the end, `most` at the most.
    pub fn last(&self, port: &str, most: usize) -> Vec<Sample> {
        let samples = self.0.get(port).into_iter().flatten();
        let skip = self.0.get(port).map_or(0, VecDeque::len).saturating_sub(most);
        samples.skip(skip).copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{port, switch};
    use super::*;

    #[test]
    fn samples_are_bounded_and_go_with_their_port() {
        let mut history = History::default();
        for number in 0..2 * LONGEST {
            history.add(&switch(vec![port("vm0", number as f64, 0.0)]));
        }
        let last = history.last("vm0", 3);
        let rx: Vec<f64> = last.iter().map(|sample| sample.rx).collect();
        assert_eq!(rx, [477.0, 478.0, 479.0]);
        assert_eq!(history.last("vm0", usize::MAX).len(), LONGEST);
        history.add(&switch(vec![port("vm1", 1.0, 0.0)]));
        assert!(history.last("vm0", 3).is_empty());
        assert_eq!(history.last("vm1", 3).len(), 1);
    }
}
