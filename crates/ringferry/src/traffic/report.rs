//! The report of a test, for people and as JSON. All figures are of payload that *arrived*, without any header.

use super::latency::Latency;
use super::protocol::{Direction, Flow, Test, one};
use super::session::Finished;
use super::{Error, Mode};
use ringferry_control::text::{bit_rate, micros, scaled};
use serde::{Deserialize, Serialize};
use std::fmt;

/// One direction of a test, all sessions together.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Stream {
    /// The direction in which payload flowed.
    pub direction: Direction,
    /// Payload bytes that arrived.
    pub bytes: u64,
    /// Seconds from the first byte to the last, in the session that took longest.
    pub seconds: f64,
    /// `bytes` over `seconds`, in bits.
    pub bits_per_second: f64,
}

/// The result of one test.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Report {
    /// The kind of the test.
    pub mode: Mode,
    /// The server's address and port.
    pub server: String,
    /// Bytes of a write, datagram or request.
    pub size: usize,
    /// How many times over all of it happened at once.
    #[serde(default = "one")]
    pub sessions: u16,
    /// Length of the longest stream, in seconds.
    pub seconds: f64,
    /// Payload bytes that arrived, all directions together (request/response: responses only).
    pub bytes: u64,
    /// Sum over the directions.
    pub bits_per_second: f64,
    /// Payload bytes that were sent, all directions together.
    pub sent_bytes: u64,
    /// Datagrams sent (UDP only).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sent_packets: Option<u64>,
    /// Datagrams that arrived, each counted once (UDP only).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub packets: Option<u64>,
    /// Datagrams per second that arrived (UDP only).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub packets_per_second: Option<f64>,
    /// Completed transactions (modes that have them only).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transactions: Option<u64>,
    /// Transactions per second, of all sessions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transactions_per_second: Option<f64>,
    /// Datagrams that never arrived.
    pub lost: u64,
    /// Datagrams overtaken by a later one.
    pub reordered: u64,
    /// Extra copies of datagrams.
    pub duplicated: u64,
    /// Blocks with a wrong byte: always an error.
    pub corrupt: u64,
    /// How long transactions took, connecting included, in microseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub latency_us: Option<Latency>,
    /// The directions, one entry each.
    pub streams: Vec<Stream>,
    /// CPU time of the client process during the test, in seconds.
    pub cpu_seconds: f64,
    /// CPU time of the server process during the test, in seconds.
    pub server_cpu_seconds: f64,
}

fn sum(flows: &[Flow], field: impl Fn(&Flow) -> u64) -> u64 {
    flows.iter().map(field).sum()
}

impl Report {
    /// Puts together what the client (`finished.ours`) and the server saw.
    pub fn new(test: &Test, server: String, finished: &Finished) -> Self {
        let (client, remote) = (&finished.ours, &finished.theirs);
        let sent: Vec<Flow> = client.sent.iter().chain(&remote.sent).copied().collect();
        let all: Vec<Flow> = client.received.iter().chain(&remote.received).copied().collect();
        // A transaction has both directions; it is measured where it is complete.
        let received = if test.mode.is_transactional() { &client.received } else { &all };
        let streams: Vec<Stream> = received
            .iter()
            .map(|flow| Stream {
                direction: flow.direction,
                bytes: flow.bytes,
                seconds: flow.seconds,
                bits_per_second: if flow.seconds > 0.0 {
                    flow.bytes as f64 * 8.0 / flow.seconds
                } else {
                    0.0
                },
            })
            .collect();
        let seconds = streams.iter().map(|stream| stream.seconds).fold(0.0, f64::max);
        let per_second = |count: u64| if seconds > 0.0 { count as f64 / seconds } else { 0.0 };
        let blocks = sum(received, |flow| flow.blocks);
        let sent_blocks = sum(&sent, |flow| flow.blocks);
        let udp = (test.mode == Mode::Udp).then_some(());
        let rr = test.mode.is_transactional().then_some(());
        Self {
            mode: test.mode,
            server,
            size: test.size,
            sessions: test.sessions,
            seconds,
            bytes: sum(received, |flow| flow.bytes),
            bits_per_second: streams.iter().map(|stream| stream.bits_per_second).sum(),
            sent_bytes: sum(&sent, |flow| flow.bytes),
            sent_packets: udp.map(|()| sent_blocks),
            packets: udp.map(|()| blocks),
            packets_per_second: udp.map(|()| per_second(blocks)),
            transactions: rr.map(|()| blocks),
            transactions_per_second: rr.map(|()| per_second(blocks)),
            lost: udp.map_or(0, |()| sent_blocks.saturating_sub(blocks)),
            reordered: sum(&all, |flow| flow.reordered),
            duplicated: sum(&all, |flow| flow.duplicated),
            corrupt: sum(&all, |flow| flow.corrupt),
            latency_us: finished.latency,
            streams,
            cpu_seconds: client.cpu_seconds,
            server_cpu_seconds: remote.cpu_seconds,
        }
    }

    /// The reason why the path under test is broken, if it is. Lost datagrams are UDP's right, as long as
    /// some arrive.
    pub fn verdict(&self) -> Result<(), Error> {
        if self.corrupt > 0 {
            return Err(Error::Corrupt(self.corrupt));
        }
        if self.bytes == 0 {
            return Err(Error::Nothing);
        }
        if matches!(self.mode, Mode::Tcp | Mode::TcpReverse | Mode::TcpBoth) && self.bytes != self.sent_bytes
        {
            return Err(Error::Cut { sent: self.sent_bytes, arrived: self.bytes });
        }
        Ok(())
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} with {}, {} B, {:.2} s", self.mode, self.server, self.size, self.seconds)?;
        let sessions =
            if self.sessions == 1 { String::new() } else { format!(", {} sessions", self.sessions) };
        writeln!(f, "{sessions}")?;
        for stream in &self.streams {
            let direction = match stream.direction {
                _ if self.mode.is_transactional() => "responses",
                Direction::ToServer => "to the server",
                Direction::ToClient => "from the server",
            };
            writeln!(
                f,
                "  {direction:<16} {:>12}  {:>10} arrived",
                bit_rate(stream.bits_per_second),
                scaled(stream.bytes as f64, "B")
            )?;
        }
        if let (Some(packets), Some(rate), Some(sent)) =
            (self.packets, self.packets_per_second, self.sent_packets)
        {
            let percent = self.lost as f64 * 100.0 / sent.max(1) as f64;
            writeln!(
                f,
                "  datagrams        {:>12}  {packets} of {sent} arrived, {} lost ({percent:.2} %)",
                scaled(rate, "pps"),
                self.lost
            )?;
            writeln!(
                f,
                "  order            {:>12}  reordered, {} duplicated",
                self.reordered, self.duplicated
            )?;
        }
        if let (Some(count), Some(rate)) = (self.transactions, self.transactions_per_second) {
            writeln!(f, "  transactions     {:>12}  {count} done", scaled(rate, "/s"))?;
        }
        if let Some(latency) = self.latency_us {
            write!(f, "  round trip       {:>12}  p50", micros(latency.p50))?;
            for (name, value) in
                [("p90", latency.p90), ("p99", latency.p99), ("p99.9", latency.p999), ("max", latency.max)]
            {
                write!(f, ", {} {name}", micros(value))?;
            }
            writeln!(f)?;
        }
        writeln!(f, "  payload          {:>12}  corrupt blocks", self.corrupt)?;
        write!(
            f,
            "  CPU seconds      {:>12.2}  client, {:.2} server",
            self.cpu_seconds, self.server_cpu_seconds
        )
    }
}

#[cfg(test)]
mod tests {
    use super::super::protocol::{Outcome, VERSION};
    use super::*;

    fn flow(direction: Direction, blocks: u64, bytes: u64) -> Flow {
        Flow { blocks, bytes, seconds: 2.0, ..Flow::new(direction) }
    }

    fn test(mode: Mode) -> Test {
        Test { version: VERSION, mode, seconds: 2.0, size: 1000, rate: None, sessions: 3, ports: Vec::new() }
    }

    fn finished(ours: Outcome, theirs: Outcome) -> Finished {
        Finished { ours, theirs, latency: None }
    }

    #[test]
    fn what_the_receiver_counted_is_reported() {
        let mut arrived = flow(Direction::ToServer, 90, 90_000);
        (arrived.reordered, arrived.duplicated) = (3, 2);
        let ours = Outcome {
            sent: vec![flow(Direction::ToServer, 100, 100_000)],
            cpu_seconds: 1.5,
            ..Outcome::default()
        };
        let theirs = Outcome { received: vec![arrived], cpu_seconds: 0.5, ..Outcome::default() };
        let report = Report::new(&test(Mode::Udp), "host".into(), &finished(ours, theirs));
        assert_eq!((report.bytes, report.packets, report.sent_packets), (90_000, Some(90), Some(100)));
        assert_eq!((report.lost, report.reordered, report.duplicated), (10, 3, 2));
        assert_eq!((report.bits_per_second, report.packets_per_second), (360_000.0, Some(45.0)));
        assert_eq!((report.cpu_seconds, report.server_cpu_seconds), (1.5, 0.5));
        assert!(report.verdict().is_ok());
    }

    #[test]
    fn corruption_silence_and_a_cut_stream_are_failures() {
        let outcome = |sent, arrived, corrupt| {
            let ours = Outcome { sent: vec![flow(Direction::ToServer, 1, sent)], ..Outcome::default() };
            let theirs = Outcome {
                received: vec![Flow { corrupt, ..flow(Direction::ToServer, 0, arrived) }],
                ..Outcome::default()
            };
            Report::new(&test(Mode::Tcp), "host".into(), &finished(ours, theirs)).verdict()
        };
        assert!(outcome(1000, 1000, 0).is_ok());
        assert!(matches!(outcome(1000, 1000, 1), Err(Error::Corrupt(1))));
        assert!(matches!(outcome(1000, 0, 0), Err(Error::Nothing)));
        assert!(matches!(outcome(1000, 999, 0), Err(Error::Cut { sent: 1000, arrived: 999 })));
    }

    #[test]
    fn json_names_are_stable_and_absent_figures_are_left_out() {
        let ours = Outcome { received: vec![flow(Direction::ToClient, 0, 4000)], ..Outcome::default() };
        let theirs = Outcome { sent: vec![flow(Direction::ToClient, 4, 4000)], ..Outcome::default() };
        let report = Report::new(&test(Mode::TcpReverse), "host".into(), &finished(ours, theirs));
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["mode"], "tcp-reverse");
        assert_eq!(json["streams"][0]["direction"], "to-client");
        assert_eq!(json["bits_per_second"], 16_000.0);
        assert_eq!(json["corrupt"], 0);
        assert!(json.get("packets").is_none() && json.get("latency_us").is_none());
        assert_eq!(serde_json::from_value::<Report>(json).unwrap(), report);
        assert!(report.to_string().contains("16.0 kbit/s"), "{report}");
        assert!(report.to_string().contains(", 3 sessions\n"), "{report}");
    }
}
