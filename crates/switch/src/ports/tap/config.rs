//! Configuration of a tap port: keys, flags and checks.

use std::os::fd::RawFd;

use crate::config::{
    Boolean, Claim, Fields, Flag, MAX_WORKERS, PortSettings, Text, Unset, keys, number, number_of,
};

/// Bytes the name of a network interface may have: `IFNAMSIZ` is 16 with the closing NUL (netdevice(7)).
pub const MAX_TAP_NAME: usize = 15;

/// Settings of a tap port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TapConfig {
    /// The tap: by name, or as an inherited descriptor.
    pub source: TapSource,
    /// Checksum and segmentation offloads to and from the kernel (`TUNSETOFFLOAD`).
    pub offloads: bool,
    /// Queues of the tap, 1 to [`MAX_WORKERS`]; absent: one per worker, or one if the tap exists and has one.
    pub queues: Option<u16>,
}

/// The tap device of a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TapSource {
    /// A tap that is opened by its name.
    Name {
        /// Name of the interface, 1 to [`MAX_TAP_NAME`] bytes.
        name: String,
        /// True: the tap must exist already. False: it must not. Absent: it is created if it does not exist.
        existing: Option<bool>,
    },
    /// An inherited descriptor of `/dev/net/tun` with a tap attached, at least 3.
    Fd(RawFd),
}

keys! {
    /// The keys that only a tap port has.
    pub(crate) struct TapKeys {
        /// The name of the tap. This or `fd` must be given.
        tap: String {
            is: TAP_NAME,
            default: Unset::Means("none"),
            example: "rf0",
        }
        /// An inherited descriptor of `/dev/net/tun` with a tap attached.
        fd: RawFd {
            is: number(3..=RawFd::MAX as u64),
            default: Unset::Means("none"),
            example: "7",
        }
        /// With `true` the tap must exist, with `false` it must not.
        existing: bool {
            is: Boolean,
            default: Unset::Means("either; it is made if it does not exist"),
            example: "true",
            only_with: "tap" because "an inherited tap exists already",
        }
        /// Checksum and segmentation offloads to and from the kernel.
        offloads: bool {
            is: Boolean,
            default: Unset::Value("true"),
            example: "false",
        }
        /// Queues of the tap, each read by a worker.
        queues: u16 {
            is: number_of("queues", 1..=MAX_WORKERS as u64),
            default: Unset::Means("one for each worker; one if the tap exists and has one"),
            example: "2",
        }
    }
}

const TAP_NAME: Text<String> = Text {
    placeholder: "NAME",
    what: "1 to 15 bytes, no spaces, no `/`, `:` or `%`",
    read: |name| check_tap_name(name).map(|()| name.to_owned()),
    write: String::to_owned,
};

impl PortSettings for TapConfig {
    const KIND: &'static str = "tap";

    const FLAGS: &'static [Flag] = &[
        Flag {
            word: "tap",
            key: "tap",
            place: "NAME",
            help: "a tap device of the host, made if it does not exist",
        },
        Flag { word: "tap-fd", key: "fd", place: "N", help: "an inherited tap" },
    ];

    type Keys = TapKeys;

    fn from_keys(keys: TapKeys, fields: &mut Fields<'_>) -> Option<Self> {
        let TapKeys { tap, fd, existing, offloads, queues } = keys;
        fields.exactly_one(&["tap", "fd"]);
        if fields.has("worker") && queues != Some(1) {
            let message = "only goes with queues = 1: of several queues each worker reads one";
            fields.report("worker", message);
        }
        let source = tap.map(|name| TapSource::Name { name, existing }).or_else(|| fd.map(TapSource::Fd))?;
        Some(TapConfig { source, offloads: offloads.unwrap_or(true), queues })
    }

    fn to_keys(&self) -> TapKeys {
        let (tap, fd, existing) = match &self.source {
            TapSource::Name { name, existing } => (Some(name.clone()), None, *existing),
            TapSource::Fd(fd) => (None, Some(*fd), None),
        };
        TapKeys { tap, fd, existing, offloads: Some(self.offloads), queues: self.queues }
    }

    fn claim(&self) -> Claim<'_> {
        match &self.source {
            TapSource::Name { name, .. } => Claim::thing(format!("the tap {name}")),
            TapSource::Fd(fd) => Claim::Fd(*fd),
        }
    }

    fn is_passed(&self) -> bool {
        matches!(self.source, TapSource::Fd(_))
    }

    fn default_name(&self) -> String {
        match &self.source {
            TapSource::Name { name, .. } => name.clone(),
            TapSource::Fd(fd) => format!("fd{fd}"),
        }
    }
}

/// Checks that the kernel takes `name` as an interface name (`dev_valid_name`). A `%` is refused as it makes
/// the kernel choose a number.
fn check_tap_name(name: &str) -> Result<(), String> {
    if name.len() > MAX_TAP_NAME {
        return Err(format!(
            "{name:?} has {} bytes, an interface name has at most {MAX_TAP_NAME}",
            name.len()
        ));
    }
    let bad = |byte: u8| byte.is_ascii_whitespace() || byte == 0x0b || b"/:%\0".contains(&byte);
    if matches!(name, "" | "." | "..") || name.bytes().any(bad) {
        return Err(format!("{name:?} is not an interface name: no spaces, no / : %"));
    }
    Ok(())
}
