//! The messages of a script: requests of each kind with any content, and bytes that are no request.

use std::path::Path;

use serde_json::{Value, json};

use crate::script::{Bytes, Field};

/// Bytes of a [`FLOOD`] for each unit of [`Message::name`].
const FLOOD_UNIT: usize = 1 << 14;

/// Names of ports in requests: ports of the configuration, those that [`PORTS`] describes, and names of no port.
pub const NAMES: [&str; 18] = [
    "vm0",
    "vm1",
    "rf0",
    "vm2",
    "",
    "../vm1",
    "HERE/other.sock",
    "precious",
    "vm3",
    "vm4",
    "new",
    "in",
    "peer",
    "behind",
    "link",
    "stranger",
    "other",
    "vm9",
];

/// Lines that the rules of a port in [`KEEP`], [`OPEN`] and [`KEEP_PORT`] are made of.
pub const RULES: [&str; 18] = [
    "vlan = 20",
    "vlan = 5000",
    "trunk = ['1-9', '20']",
    "native = 5",
    "isolated = true",
    "max_macs = 3",
    "static_macs = ['52:54:00:00:00:01']",
    "allowed_macs = ['52:54:00:00:00:01', '52:54:00:00:00:02']",
    "allowed_ips = ['10.0.0.0/8', 'fd00::1']",
    "rate_in = '1gbit'",
    "storm = '1kpps'",
    "storm_burst = 9",
    "socket = '/precious'",
    "control = '/precious'",
    "[[port]]\nkind = 'tap'\ntap = 'x'",
    "# \u{1f980} \\u0000",
    "queue_size = 64",
    "csum = false",
];

/// Keys of settings that [`KEEP`] names.
pub const KEYS: [&str; 18] = [
    "vlan",
    "trunk",
    "native",
    "isolated",
    "max_macs",
    "static_macs",
    "allowed_macs",
    "allowed_ips",
    "rate_in",
    "storm",
    "storm_burst",
    "socket",
    "kind",
    "name",
    "port",
    "vlan = 1\nsocket",
    "queue_size",
    "csum",
];

/// Ports that [`OPEN`] and [`KEEP_PORT`] name; `HERE` is the folder of the run.
pub const PORTS: [&str; 26] = [
    "kind = 'vhost-user'\nsocket = 'HERE/new.sock'",
    "kind = 'vhost-user'\nsocket = 'HERE/machines/in.sock'",
    "kind = 'vhost-user'\nsocket = 'HERE/machines/peer.sock'\nmode = 'connect'",
    "kind = 'vhost-user'\nsocket = 'HERE/named/behind.sock'",
    "kind = 'vhost-user'\nsocket = 'HERE/other.sock'\nmode = 'connect'",
    "kind = 'vhost-user'\nsocket = 'HERE/elsewhere/out.sock'",
    "kind = 'vhost-user'\nsocket = 'HERE/machines/../elsewhere/out.sock'",
    "kind = 'vhost-user'\nsocket = 'HERE/machines/out/out.sock'",
    "kind = 'vhost-user'\nsocket = 'HERE/link/in.sock'",
    "kind = 'vhost-user'\nsocket = 'HERE/precious'",
    "kind = 'vhost-user'\nsocket = 'HERE/listen.sock'\nname = 'vm0'",
    "kind = 'vhost-user'\nsocket = 'HERE/listen.sock'",
    "kind = 'vhost-user'\nsocket = 'HERE/stranger.sock'",
    "kind = 'vhost-user'\nsocket = 'HERE/other.sock'",
    "kind = 'vhost-user'\nsocket = 'HERE/machines/link.sock'\nmode = 'connect'",
    "kind = 'vhost-user'\nsocket = 'HERE/machines/link.sock'",
    "kind = 'vhost-user'\nsocket = 'HERE/elsewhere/vm3.sock'",
    "kind = 'vhost-user'\nsocket = 'HERE/vm4.sock'",
    "kind = 'vhost-user'\nsocket = 'HERE/vm1.sock'\nmode = 'connect'",
    "kind = 'vhost-user'\nsocket = 'new.sock'",
    "kind = 'vhost-user'\nfd = 3",
    "kind = 'vhost-user'\nactivation = 'vm2'",
    "kind = 'tap'\ntap = 'lo'",
    "kind = 'tap'\nfd = 3",
    "kind = 'xen-vif'",
    "kind = 'xen-vif'\nprovider = 'process'\nbroker = 'HERE/other.sock'\nstore = 'HERE/other.sock'",
];

/// Further keys of the port in [`OPEN`] and [`KEEP_PORT`].
pub const OPTIONS: [&str; 12] = [
    "name = 'vm0'",
    "name = 'vm9'",
    "mode = 'connect'",
    "mtu = 9000",
    "worker = 1",
    "csum = false",
    "[switch]\nworkers = 2",
    "existing = true",
    "socket_owner = 'root'",
    "socket_group = '0'",
    "socket_mode = '0600'",
    "socket_owner = 'no-such-user'",
];

/// Kinds of messages: connects the port [`Message::name`], to whose name the rest is appended.
pub const CONNECT: u8 = 0;
/// Keeps rules of the port [`Message::name`]. The bytes of the rest choose [`RULES`], and from 0x80 on [`KEYS`].
pub const KEEP: u8 = 1;
/// Keeps the key [`Message::name`] of the port that the rest describes.
pub const KEEP_TEXT: u8 = 2;
/// Keeps `vlan` of a port that the rest describes, which is repeated 16 times for each unit of [`Message::name`].
pub const KEEP_LONG: u8 = 3;
/// Kind of message: asks the helper to remove the files of sockets.
pub const TIDY: u8 = 4;
/// Kind of message: sends the rest, in which `HERE` is the folder of the run if it is text.
pub const RAW: u8 = 5;
/// Sends the rest, and behind it 16 KiB of anything for each unit of [`Message::name`].
pub const FLOOD: u8 = 6;
/// Opens the port [`Message::name`] of [`PORTS`]. The bytes of the rest choose [`RULES`], and from 0x80 on [`OPTIONS`].
pub const OPEN: u8 = 7;
/// Keeps the port that [`OPEN`] would open.
pub const KEEP_PORT: u8 = 8;
/// Closes the port [`Message::name`], to whose name the rest is appended.
pub const CLOSE: u8 = 9;
/// Forgets the port [`Message::name`], to whose name the rest is appended.
pub const FORGET: u8 = 10;
/// Reads the configuration.
pub const READ: u8 = 11;
/// Asks whether the port that [`OPEN`] would open can be.
pub const CAN_OPEN: u8 = 12;
const KINDS: u8 = 13;

/// A message, or some bytes that are none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Bits 0 and 1: number of descriptors that come with it. Bit 2: it is sent together with the next message. Bit 3: it does not end
    /// with a newline. Bit 4: the sockets that the helper has sent so far are closed before. Bits 5 to 7: number of workers,
    /// and of the keys of [`KEEP`] that are to be removed rather than set.
    pub flags: u8,
    /// The kind of the message, such as [`CONNECT`].
    pub kind: u8,
    /// A number whose meaning depends on the kind.
    pub name: u8,
    /// Bytes whose meaning depends on the kind.
    pub rest: Vec<u8>,
}

impl Field for Message {
    fn get(bytes: &mut Bytes<'_>) -> Option<Self> {
        let (flags, kind, name) = (u8::get(bytes)?, u8::get(bytes)?, u8::get(bytes)?);
        let len = usize::from(u8::get(bytes)?).min(bytes.0.len());
        let (rest, left) = bytes.0.split_at(len);
        bytes.0 = left;
        Some(Self { flags, kind, name, rest: rest.to_vec() })
    }

    fn put(&self, out: &mut Vec<u8>) {
        out.extend([self.flags, self.kind, self.name, self.rest.len() as u8]);
        out.extend(&self.rest);
    }
}

impl Message {
    /// Returns the bytes that are sent in a run in `folder`.
    pub(super) fn line(&self, folder: &Path) -> Vec<u8> {
        let folder = folder.to_string_lossy();
        let text = String::from_utf8_lossy(&self.rest);
        let name = NAMES[usize::from(self.name) % NAMES.len()].replace("HERE", &folder) + &text;
        // One byte says which of the keys are removed if they can be.
        let keep = |port: String, keys: Vec<&str>| {
            let unset = keys.len().min(usize::from(self.flags >> 5));
            json!({ "Keep": { "port": port, "set": keys[unset..], "unset": keys[..unset] } })
        };
        let request = match self.kind % KINDS {
            CONNECT => json!({ "Connect": { "port": name } }),
            KEEP => {
                let (lines, keys) = self.chosen(&KEYS);
                let name = NAMES[usize::from(self.name) % NAMES.len()].replace("HERE", &folder);
                let head = format!("[[port]]\nkind = 'vhost-user'\nsocket = '/precious'\nname = '{name}'\n");
                keep(head + &lines.join("\n"), keys)
            }
            KEEP_TEXT => keep(text.into_owned(), vec![KEYS[usize::from(self.name) % KEYS.len()]]),
            KEEP_LONG => keep(text.repeat(16 * usize::from(self.name)), vec!["vlan"]),
            TIDY => json!("Tidy"),
            OPEN => json!({ "Open": { "port": self.port(&folder), "workers": self.flags >> 5 } }),
            KEEP_PORT => json!({ "KeepPort": { "port": self.port(&folder) } }),
            CLOSE => json!({ "Close": { "port": name } }),
            FORGET => json!({ "ForgetPort": { "port": name } }),
            READ => json!("Read"),
            CAN_OPEN => json!({ "CanOpen": { "port": self.port(&folder) } }),
            _ => Value::Null,
        };
        let mut line = match self.kind % KINDS {
            RAW => match std::str::from_utf8(&self.rest) {
                Ok(text) => text.replace("HERE", &folder).into_bytes(),
                Err(_) => self.rest.clone(),
            },
            FLOOD => [&self.rest[..], &vec![b'x'; FLOOD_UNIT * usize::from(self.name)]].concat(),
            _ => request.to_string().into_bytes(),
        };
        if self.flags >> 3 & 1 == 0 {
            line.push(b'\n');
        }
        line
    }

    /// Returns what the bytes of the rest choose: [`RULES`], and from 0x80 on some of `others`.
    fn chosen(&self, others: &[&'static str]) -> (Vec<&'static str>, Vec<&'static str>) {
        let (mut rules, mut chosen) = (Vec::new(), Vec::new());
        for &byte in &self.rest {
            let at = usize::from(byte & 0x7f);
            if byte < 0x80 {
                rules.push(RULES[at % RULES.len()]);
            } else {
                chosen.push(others[at % others.len()]);
            }
        }
        (rules, chosen)
    }

    /// Returns the configuration of one port that [`OPEN`] and [`KEEP_PORT`] send.
    fn port(&self, folder: &str) -> String {
        let (rules, options) = self.chosen(&OPTIONS);
        let head = PORTS[usize::from(self.name) % PORTS.len()].replace("HERE", folder);
        [&["[[port]]", &head][..], &rules, &options].concat().join("\n")
    }
}
