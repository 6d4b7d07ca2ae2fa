//! Measures what a test cost and what it lost: differences between two looks at the switch, the guests and their
//! kernels.
//!
//! A datagram that did not arrive was dropped somewhere: by the switch (`ringferry ctl show`), by the
//! sending kernel in front of a full tap, or by the receiving kernel. All of these are counted and reported
//! under their names.

use ringferry_control::snapshot::PortSnapshot;
use serde::Serialize;
use std::collections::BTreeMap;
use std::io;
use std::time::{Duration, Instant};

/// Counts by reason. The reason starts with where it happened: `vm-b: no-receive-buffers`.
pub type Drops = BTreeMap<String, u64>;

/// A port as the switch describes it.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Port {
    /// Its name.
    pub name: String,
    /// Names of the features that were negotiated.
    pub features: Vec<String>,
    /// Counters other than drops.
    pub counters: BTreeMap<String, u64>,
    /// Dropped packets by reason.
    pub drops: Drops,
}

impl From<PortSnapshot> for Port {
    fn from(port: PortSnapshot) -> Self {
        let features = port.negotiated.features();
        Self { name: port.name, features, counters: port.counters, drops: port.drops }
    }
}

/// Counters of the kernel in a guest's namespace.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Kernel {
    /// Frames that came from the switch. With segmentation offload a frame holds up to 64 KiB.
    frames: u64,
    /// Frames from the switch that the network stack had no room for.
    backlog_full: u64,
    /// Frames for the switch that found the tap's queue full.
    tap_full: u64,
    /// Datagrams that found their socket's buffer full.
    socket_full: u64,
    /// TCP segments sent again.
    retransmitted: u64,
}

impl Kernel {
    /// The counters of the network namespace of process `pid`.
    pub fn read(pid: u32, tap: &str) -> io::Result<Self> {
        let file = |name: &str| std::fs::read_to_string(format!("/proc/{pid}/net/{name}"));
        Ok(Self::parse(&file("dev")?, &file("snmp")?, tap))
    }

    fn parse(dev: &str, snmp: &str, tap: &str) -> Self {
        // proc_pid_net(5): sixteen columns after the name, eight of receive and eight of transmit; the
        // fourth of each is drops.
        let columns: Vec<u64> = dev
            .lines()
            .find_map(|line| line.trim_start().strip_prefix(tap)?.strip_prefix(':'))
            .map(|rest| rest.split_whitespace().map(|number| number.parse().unwrap_or(0)).collect())
            .unwrap_or_default();
        let column = |index: usize| columns.get(index).copied().unwrap_or(0);
        // A line of names, then a line of values, each with the protocol in front.
        let counter = |protocol: &str, name: &str| {
            let mut lines = snmp.lines().filter_map(|line| line.strip_prefix(protocol)?.strip_prefix(": "));
            let (names, values) = (lines.next()?, lines.next()?);
            let at = names.split_whitespace().position(|candidate| candidate == name)?;
            values.split_whitespace().nth(at)?.parse().ok()
        };
        Self {
            frames: column(1),
            backlog_full: column(3),
            tap_full: column(11),
            socket_full: counter("Udp", "RcvbufErrors").unwrap_or(0),
            retransmitted: counter("Tcp", "RetransSegs").unwrap_or(0),
        }
    }
}

/// CPU time in seconds, user and kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Cpu {
    /// Seconds of the switch.
    pub switch: f64,
    /// Of the driver in guest a: tap and virtqueue, without the programs in the guest.
    pub guest_a: f64,
    /// Of the driver in guest b.
    pub guest_b: f64,
}

impl Cpu {
    /// Seconds of both guests.
    pub fn guests(&self) -> f64 {
        self.guest_a + self.guest_b
    }
}

/// All counters at one moment.
pub struct Snapshot {
    at: Instant,
    cpu: [Duration; 3],
    ports: Vec<Port>,
    kernels: [Kernel; 2],
}

/// The difference between two snapshots.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Cost {
    /// Seconds between the moments.
    pub seconds: f64,
    /// CPU time spent.
    pub cpu_seconds: Cpu,
    /// Frames that both guests received through the switch. With segmentation offload a frame holds up to
    /// 64 KiB.
    pub frames: u64,
    /// TCP segments that the guests sent again.
    pub retransmitted: u64,
    /// Packets dropped, by place and reason; reasons without a drop are left out.
    pub drops: Drops,
}

impl Snapshot {
    /// The counters now: CPU time of the switch and guests a and b, the switch's ports, the guests' kernels.
    pub fn new(cpu: [Duration; 3], ports: Vec<Port>, kernels: [Kernel; 2]) -> Self {
        Self { at: Instant::now(), cpu, ports, kernels }
    }

    /// The ports at that moment.
    pub fn ports(&self) -> &[Port] {
        &self.ports
    }

    /// Returns the difference from `before` to this one.
    pub fn since(&self, before: &Snapshot) -> Cost {
        let [switch, guest_a, guest_b] =
            [0, 1, 2].map(|i| self.cpu[i].saturating_sub(before.cpu[i]).as_secs_f64());
        let mut drops = Drops::new();
        for port in &self.ports {
            let earlier = before.ports.iter().find(|earlier| earlier.name == port.name);
            for (reason, count) in &port.drops {
                let earlier = earlier.and_then(|port| port.drops.get(reason)).copied().unwrap_or(0);
                drops.insert(format!("{}: {reason}", port.name), count.saturating_sub(earlier));
            }
        }
        let grown = |index: usize, field: fn(&Kernel) -> u64| {
            field(&self.kernels[index]).saturating_sub(field(&before.kernels[index]))
        };
        for (index, guest) in ["guest a", "guest b"].into_iter().enumerate() {
            drops.insert(format!("{guest} kernel: tap queue full"), grown(index, |kernel| kernel.tap_full));
            drops.insert(
                format!("{guest} kernel: receive backlog full"),
                grown(index, |kernel| kernel.backlog_full),
            );
            drops.insert(
                format!("{guest} kernel: UDP socket buffer full"),
                grown(index, |kernel| kernel.socket_full),
            );
        }
        drops.retain(|_, count| *count > 0);
        Cost {
            seconds: (self.at - before.at).as_secs_f64(),
            cpu_seconds: Cpu { switch, guest_a, guest_b },
            frames: grown(0, |kernel| kernel.frames) + grown(1, |kernel| kernel.frames),
            retransmitted: grown(0, |kernel| kernel.retransmitted) + grown(1, |kernel| kernel.retransmitted),
            drops,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEV: &str = "\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo:       1       2    3    4    0     0          0         0        5       6    7    8    0     0       0          0
   rf0: 9000000  600000    0   17    0     0          0         0   123456     789    0   23    0     0       0          0
";
    const SNMP: &str = "\
Tcp: RtoAlgorithm RetransSegs InErrs
Tcp: 1 42 0
Udp: InDatagrams NoPorts InErrors OutDatagrams RcvbufErrors
Udp: 100 1 2 300 55
UdpLite: InDatagrams RcvbufErrors
UdpLite: 9 9
";

    #[test]
    fn kernel_counters_are_found_by_interface_and_by_name() {
        let kernel = Kernel::parse(DEV, SNMP, "rf0");
        assert_eq!(
            kernel,
            Kernel { frames: 600_000, backlog_full: 17, tap_full: 23, socket_full: 55, retransmitted: 42 }
        );
        assert_eq!(Kernel::parse("", "", "rf0"), Kernel::default());
    }

    #[test]
    fn this_kernels_files_have_the_expected_form() {
        let kernel = Kernel::read(std::process::id(), "lo").unwrap();
        let text = std::fs::read_to_string("/proc/self/net/snmp").unwrap();
        assert!(text.contains("RcvbufErrors") && text.contains("RetransSegs"), "{kernel:?}");
    }

    fn ports(dropped: u64) -> Vec<Port> {
        let port = |name: &str, drops: &[(&str, u64)]| Port {
            name: name.to_owned(),
            drops: drops.iter().map(|(reason, count)| ((*reason).to_owned(), *count)).collect(),
            ..Port::default()
        };
        vec![
            port("vm-a", &[("link-down", 3)]),
            port("vm-b", &[("no-receive-buffers", dropped), ("same-port", 1)]),
        ]
    }

    #[test]
    fn a_cost_is_the_difference_and_names_each_drop() {
        let second = Duration::from_secs(1);
        let before = Snapshot::new([second; 3], ports(7), [Kernel::default(); 2]);
        let after = Snapshot::new(
            [3 * second, second, 2 * second],
            ports(107),
            [
                Kernel { tap_full: 4, frames: 10, ..Kernel::default() },
                Kernel { socket_full: 6, frames: 20, retransmitted: 1, ..Kernel::default() },
            ],
        );
        let cost = after.since(&before);
        assert_eq!(cost.cpu_seconds, Cpu { switch: 2.0, guest_a: 0.0, guest_b: 1.0 });
        assert_eq!((cost.frames, cost.retransmitted), (30, 1));
        let expected = [
            ("guest a kernel: tap queue full", 4),
            ("guest b kernel: UDP socket buffer full", 6),
            ("vm-b: no-receive-buffers", 100),
        ];
        assert_eq!(cost.drops, expected.map(|(reason, count)| (reason.to_owned(), count)).into());
    }
}
