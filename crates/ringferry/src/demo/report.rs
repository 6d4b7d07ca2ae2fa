//! The result of the demo: one document, as JSON or as a table for people.

use super::measure::{Cost, Cpu, Drops, Port};
use crate::traffic::Report;
use ringferry_control::text::{Table, bit_rate, micros, scaled};
use serde::Serialize;
use std::collections::BTreeSet;

const LEGEND: &str = "
throughput: verified payload that arrived; frames/s: what the switch delivered, up to 64 KiB each with offloads;
s/GB: CPU seconds per 10^9 bytes of payload; guests: the two driver processes, without what runs behind them.

";

/// The machine the demo ran on.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Machine {
    /// Kernel name, release and architecture.
    pub kernel: String,
    /// Processor model, as the kernel tells it.
    pub cpu: String,
    /// Processors this program may use.
    pub cpus: usize,
    /// Bytes of memory.
    pub memory: u64,
}

impl Machine {
    /// Reads the facts of this machine.
    pub fn here() -> Self {
        let name = rustix::system::uname();
        let text = |part: &std::ffi::CStr| part.to_string_lossy().into_owned();
        let cpu_info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let model = cpu_info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
        let info = rustix::system::sysinfo();
        Self {
            kernel: format!("{} {} {}", text(name.sysname()), text(name.release()), text(name.machine())),
            cpu: model.map_or_else(|| "unknown".into(), |(_, model)| model.trim().into()),
            cpus: std::thread::available_parallelism().map_or(1, Into::into),
            memory: info.totalram as u64 * u64::from(info.mem_unit),
        }
    }
}

/// One test: what the traffic generator measured and what it cost.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Outcome {
    /// The test's name for people.
    pub name: String,
    /// The report of the traffic client, or nothing when the test failed.
    pub traffic: Option<Report>,
    /// The reason, if it failed.
    pub error: Option<String>,
    /// Frames per second that both guests received through the switch; one frame holds up to 64 KiB with
    /// segmentation offload.
    pub frames_per_second: f64,
    /// CPU seconds per 10^9 payload bytes. Absent for request/response, which is about time, not bytes.
    pub cpu_seconds_per_gigabyte: Option<Cpu>,
    /// Lost datagrams that no counter below accounts for.
    pub unaccounted: u64,
    /// Processor time and drops.
    pub cost: Cost,
}

impl Outcome {
    /// Joins the two sides of a test.
    pub fn new(name: &str, traffic: Result<Report, String>, cost: Cost) -> Self {
        let (traffic, error) = match traffic {
            Ok(report) => (Some(report), None),
            Err(error) => (None, Some(error)),
        };
        let bulk = traffic.as_ref().filter(|report| report.latency_us.is_none() && report.bytes > 0);
        let per_gigabyte = |report: &Report| {
            let gigabytes = report.bytes as f64 / 1e9;
            let Cpu { switch, guest_a, guest_b } = cost.cpu_seconds;
            Cpu { switch: switch / gigabytes, guest_a: guest_a / gigabytes, guest_b: guest_b / gigabytes }
        };
        let lost = traffic.as_ref().map_or(0, |report| report.lost);
        Self {
            name: name.into(),
            frames_per_second: traffic
                .as_ref()
                .map_or(0.0, |report| cost.frames as f64 / report.seconds.max(1e-9)),
            cpu_seconds_per_gigabyte: bulk.map(per_gigabyte),
            unaccounted: lost.saturating_sub(cost.drops.values().sum()),
            traffic,
            error,
            cost,
        }
    }
}

/// CPU use while nothing was sent.
#[derive(Clone, Copy, Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Idle {
    /// Seconds that were measured.
    pub seconds: f64,
    /// CPU time spent meanwhile.
    pub cpu_seconds: Cpu,
}

/// The report of the whole demo.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Document {
    /// The version of the program.
    pub ringferry: &'static str,
    /// The command line.
    pub command: String,
    /// The machine.
    pub machine: Machine,
    /// Without root, in a user namespace.
    pub user_namespace: bool,
    /// The tests in order.
    pub tests: Vec<Outcome>,
    /// Processor time between tests.
    pub idle: Idle,
    /// The switch's ports at the end.
    pub ports: Vec<Port>,
    /// Every drop of all tests, by place and reason.
    pub drops: Drops,
}

impl Document {
    /// Renders the report for people.
    pub fn render(&self) -> String {
        let machine = &self.machine;
        let rights = if self.user_namespace { "in a user namespace" } else { "as root" };
        let mut text = format!(
            "ringferry {} on {}, {} x {}, {} memory, {rights}\ncommand: {}\n\n",
            self.ringferry,
            machine.kernel,
            machine.cpus,
            machine.cpu,
            scaled(machine.memory as f64, "B"),
            self.command,
        );
        text += &self.tests().to_string();
        text += LEGEND;
        text += &self.losses();
        let percent = |seconds: f64| seconds * 100.0 / self.idle.seconds.max(1e-9);
        let idle = self.idle.cpu_seconds;
        text += &format!(
            "Idle CPU: switch {:.1} %, guests {:.1} %\n\nNegotiated features\n",
            percent(idle.switch),
            percent(idle.guests())
        );
        text + &self.features()
    }

    fn tests(&self) -> Table {
        let mut table = Table::new(&[
            "<test",
            ">throughput",
            ">packets/s",
            ">frames/s",
            ">p50",
            ">p99",
            ">switch s/GB",
            ">guests s/GB",
            ">lost",
            ">drops",
        ])
        .ruled();
        for test in &self.tests {
            let Some(traffic) = &test.traffic else {
                table.row(vec![test.name.clone(), "failed".into()]);
                continue;
            };
            let dash = || "-".to_owned();
            let latency = |pick: fn(&crate::traffic::Latency) -> f64| {
                traffic.latency_us.as_ref().map_or_else(dash, |latency| micros(pick(latency)))
            };
            let cpu = |pick: fn(&Cpu) -> f64| {
                test.cpu_seconds_per_gigabyte.as_ref().map_or_else(dash, |cpu| format!("{:.3}", pick(cpu)))
            };
            table.row(vec![
                test.name.clone(),
                bit_rate(traffic.bits_per_second),
                traffic
                    .packets_per_second
                    .or(traffic.transactions_per_second)
                    .map_or_else(dash, |rate| scaled(rate, "")),
                scaled(test.frames_per_second, ""),
                latency(|latency| latency.p50),
                latency(|latency| latency.p99),
                cpu(|cpu| cpu.switch),
                cpu(Cpu::guests),
                match traffic.sent_packets {
                    Some(sent) => format!("{:.2} %", traffic.lost as f64 * 100.0 / sent.max(1) as f64),
                    None => dash(),
                },
                scaled(test.cost.drops.values().sum::<u64>() as f64, ""),
            ]);
        }
        table
    }

    fn losses(&self) -> String {
        let mut text = String::new();
        for test in &self.tests {
            if let Some(error) = &test.error {
                text += &format!("{} FAILED: {error}\n", test.name);
            }
        }
        let mut table = Table::new(&["<drops by reason", ">packets"]).ruled();
        for test in &self.tests {
            for (reason, count) in &test.cost.drops {
                table.row(vec![format!("{}: {reason}", test.name), count.to_string()]);
            }
            if test.unaccounted > 0 {
                table.row(vec![format!("{}: not accounted for", test.name), test.unaccounted.to_string()]);
            }
        }
        table.row(vec!["total".into(), self.drops.values().sum::<u64>().to_string()]);
        text + &table.to_string() + "\n"
    }

    fn features(&self) -> String {
        // Ports that agreed on the same share a line.
        let kinds: BTreeSet<&[String]> = self.ports.iter().map(|port| port.features.as_slice()).collect();
        let mut text = String::new();
        for kind in kinds {
            let ports: Vec<&str> = self
                .ports
                .iter()
                .filter(|port| port.features == kind)
                .map(|port| port.name.as_str())
                .collect();
            let features = if kind.is_empty() { "none".into() } else { kind.join(" ") };
            text += &format!("  {}: {features}\n", ports.join(", "));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn udp() -> Report {
        serde_json::from_value(json!({
            "mode": "udp", "server": "b", "size": 1000, "seconds": 2.0, "bytes": 2_000_000_000u64, "bits_per_second": 8e9,
            "sent_bytes": 2_500_000_000u64, "sent_packets": 2_500_000, "packets": 2_000_000, "packets_per_second": 1e6,
            "lost": 500_000, "reordered": 0, "duplicated": 0, "corrupt": 0, "streams": [], "cpu_seconds": 1.0, "server_cpu_seconds": 1.0,
        }))
        .unwrap()
    }

    fn cost() -> Cost {
        Cost {
            seconds: 2.5,
            cpu_seconds: Cpu { switch: 2.0, guest_a: 0.5, guest_b: 1.5 },
            frames: 2_000_010,
            retransmitted: 0,
            drops: [("vm-b: no-receive-buffers".to_owned(), 499_000)].into(),
        }
    }

    fn document() -> Document {
        let port = |name: &str, feature: &str| Port {
            name: name.into(),
            features: vec![feature.into()],
            ..Port::default()
        };
        Document {
            ringferry: "1.2.3",
            command: "ringferry demo".into(),
            machine: Machine {
                kernel: "Linux 6.1 x86_64".into(),
                cpu: "Test CPU".into(),
                cpus: 2,
                memory: 16 << 30,
            },
            user_namespace: true,
            tests: vec![
                Outcome::new("UDP", Ok(udp()), cost()),
                Outcome::new("TCP", Err("no route".into()), Cost::default()),
            ],
            idle: Idle { seconds: 2.0, cpu_seconds: Cpu { switch: 0.002, guest_a: 0.0, guest_b: 0.0 } },
            ports: vec![port("vm-a", "csum"), port("vm-b", "csum"), port("vm-c", "mrg-rxbuf")],
            drops: cost().drops,
        }
    }

    #[test]
    fn cost_is_per_gigabyte_that_arrived_and_every_loss_is_accounted_for() {
        let outcome = Outcome::new("UDP", Ok(udp()), cost());
        assert_eq!(outcome.cpu_seconds_per_gigabyte, Some(Cpu { switch: 1.0, guest_a: 0.25, guest_b: 0.75 }));
        assert_eq!((outcome.unaccounted, outcome.frames_per_second), (1000, 1_000_005.0));
    }

    #[test]
    fn the_text_names_rates_costs_losses_failures_and_features() {
        let text = document().render();
        for expected in [
            "ringferry 1.2.3 on Linux 6.1 x86_64, 2 x Test CPU",
            "in a user namespace",
            "8.00 Gbit/s",
            "20.00 %",
            "UDP: vm-b: no-receive-buffers",
            "UDP: not accounted for",
            "TCP FAILED: no route",
            "Idle CPU: switch 0.1 %, guests 0.0 %",
            "  vm-a, vm-b: csum\n  vm-c: mrg-rxbuf\n",
        ] {
            assert!(text.contains(expected), "{expected} is not in\n{text}");
        }
    }

    #[test]
    fn json_has_the_same_data() {
        let json = serde_json::to_value(document()).unwrap();
        assert_eq!(json["tests"][0]["traffic"]["packets"], 2_000_000);
        assert_eq!(json["tests"][0]["cpu_seconds_per_gigabyte"]["switch"], 1.0);
        assert_eq!(json["tests"][1]["error"], "no route");
        assert_eq!(json["drops"]["vm-b: no-receive-buffers"], 499_000);
        assert_eq!(json["machine"]["cpus"], 2);
        assert_eq!(json["ports"][2]["features"][0], "mrg-rxbuf");
    }

    #[test]
    fn this_machine_is_known() {
        let machine = Machine::here();
        assert!(
            machine.kernel.starts_with("Linux ") && machine.cpus > 0 && machine.memory > 1 << 20,
            "{machine:?}"
        );
    }
}
