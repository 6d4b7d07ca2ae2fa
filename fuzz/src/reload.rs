//! The differences between a running switch and its configuration file, which a reload carries out.
//!
//! A script writes two files, line by line out of a table, and has them compared. What comes out must lead from the one to the other, and nothing may differ between a file
//! and itself.

use ringferry_switch::config::{Config, follow};

use crate::ring::Reached;
use crate::script::{Bytes, Field, operations};

/// How ports begin; `N` is the number of the port.
const KINDS: [&str; 5] = [
    "kind = 'vhost-user'\nsocket = '/s/N.sock'",
    "kind = 'vhost-user'\nsocket = '/s/0.sock'\nmode = 'connect'",
    "kind = 'tap'\ntap = 'tapN'",
    "kind = 'xdp'\ninterface = 'ethN'",
    "kind = 'xen-vif'\nprovider = 'xen'",
];

/// Lines of ports, and of what comes before them.
const LINES: [&str; 28] = [
    "mtu = 9000",
    "mtu = 1500",
    "worker = 1",
    "worker = [1, 0]",
    "queues = 1",
    "queues = 2",
    "queue_size = 256",
    "tso = false",
    "csum = false",
    "mac = '52:54:00:00:00:01'",
    "mac = '52:54:00:00:00:02'",
    "bridge = 'br0'",
    "address = ['10.0.0.1/24']",
    "address = ['10.0.0.1/24', 'fd00::1/64']",
    "up = true",
    "persistent = true",
    "offloads = false",
    "mode = 'generic'",
    "socket_mode = '0660'",
    "vlan = 10",
    "vlan = 20",
    "trunk = [10, '20-29']",
    "isolated = true",
    "quarantine = 'p1'",
    "static_macs = ['52:54:00:00:00:03']",
    "allowed_ips = ['10.0.0.2']",
    "rate_in = '1gbit'",
    "max_macs = 4",
];

operations! {
    /// One step of a script.
    Step {
        /// A port begins, of one of the [kinds](KINDS).
        Port { number: u8, kind: u8 },
        /// One of the [lines](LINES).
        Line { line: u8 },
        /// The next file begins.
        Next {},
        /// Both files are compared.
        Compare {},
    }
}

/// Runs a script, and panics if a check fails.
pub fn reload(input: &[u8]) -> Reached {
    let mut input = Bytes(input);
    let (mut files, mut at) = ([String::new(), String::new()], 0);
    let mut reached = Reached::default();
    while let Some(step) = Step::get(&mut input) {
        match step {
            Step::Port { number, kind } => {
                let (number, kind) = (number % 8, KINDS[usize::from(kind) % KINDS.len()]);
                let kind = kind.replace('N', &number.to_string());
                files[at] += &format!("[[port]]\nname = 'p{number}'\n{kind}\n");
            }
            Step::Line { line } => {
                files[at] += LINES[usize::from(line) % LINES.len()];
                files[at].push('\n');
            }
            Step::Next {} => {
                at = 1 - at;
                files[at].clear();
            }
            Step::Compare {} => {
                let read =
                    |text: &String| Config::builder().may_be_empty().toml("rf.toml", text).build().ok();
                let [Some(before), Some(now)] = files.each_ref().map(read) else { continue };
                if let Some(count) = follow(&before, &now) {
                    reached.chains += 1;
                    reached.longest = reached.longest.max(count);
                }
            }
        }
    }
    reached
}
